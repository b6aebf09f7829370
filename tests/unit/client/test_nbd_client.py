# SPDX-License-Identifier: Apache-2.0

"""The client of NBD, against faulty and hostile servers."""

import contextlib
import socket
import struct
import threading
import time

import pytest

from glance_dedup.client import client_errors
from glance_dedup.client import nbd_client
from glance_dedup.client import nbd_reader

UPLOAD = 'ab' * 16
GREETING = b'NBDMAGICIHAVEOPT\0\3'
SIZE = 1000


def option(kind, data=b'', magic=0x3e889045565a9, length=None):
    return struct.pack('>QIII', magic, 7, kind,
                       len(data) if length is None else length) + data


EXPORT = option(3, struct.pack('>HQH', 0, SIZE, 3))
DESCRIPTION = option(3, b'\0\2upload ' + UPLOAD.encode())
ACK = option(1)
# The greeting, and the answer to the option of structured replies.
BEGUN = GREETING + ACK
OPENED = BEGUN + EXPORT + DESCRIPTION + ACK


def chunk(kind, data, flags=1, magic=0x668e33ef):
    return struct.pack('>IHHQI', magic, flags, kind, 0, len(data)) + data


def data(offset, content, **fields):
    return chunk(1, struct.pack('>Q', offset) + content, **fields)


def failure(text, flags=1):
    return chunk(32769, struct.pack('>IH', 5, len(text)) + text, flags)


@contextlib.contextmanager
def server(path, *scripts, close=True):
    """Send each connection the next script, and close it if `close` is set."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(8)
    connections = []

    def serve():
        with contextlib.suppress(OSError):
            for script in scripts:
                connection = listener.accept()[0]
                connections.append(connection)
                connection.sendall(script)
                if close:
                    connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        for sock in (listener, *connections):
            sock.close()
        thread.join(10)


@pytest.fixture
def path(tmp_path):
    return tmp_path / 's'


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(nbd_reader, 'ANSWER_SECONDS', 1.0)
    monkeypatch.setattr(nbd_client, 'RETURN_SECONDS', 1.0)


def opened(path):
    return contextlib.closing(nbd_client.Export(str(path), 'image', UPLOAD))


def test_what_is_right(path):
    with server(path, OPENED + data(5, b'x' * 10) + data(SIZE - 1, b'y')):
        with opened(path) as export:
            assert export.size == SIZE
            assert export.read(10, 5) == b'x' * 10
            # The client requests no bytes behind the end.
            assert export.read(10, SIZE - 1) == b'y'
            assert export.read(10, SIZE) == export.read(1, 1 << 60) == b''


@pytest.mark.parametrize('script,error', [
    (b'', client_errors.DaemonUnavailable),
    (GREETING[:-1], client_errors.DaemonUnavailable),
    (b'HTTP/1.1 400 Bad Request\r\n\r\n', client_errors.BadAnswer),
    (BEGUN + EXPORT + DESCRIPTION, client_errors.DaemonUnavailable),
    (BEGUN + ACK, client_errors.BadAnswer),
    (BEGUN + DESCRIPTION + ACK, client_errors.BadAnswer),
    (BEGUN + EXPORT + ACK, client_errors.Refused),
    (BEGUN + EXPORT + option(3, b'\0\2upload ' + b'cd' * 16) + ACK,
     client_errors.Refused),
    (BEGUN + option(3) + option(3, b'\0') + ACK, client_errors.BadAnswer),
    (GREETING + option(1 << 31 | 1), client_errors.Refused),
    (BEGUN + option(1 << 31 | 6, b'no such image'), client_errors.Refused),
    (BEGUN + option(9) + ACK, client_errors.BadAnswer),
    (BEGUN + option(3, magic=7), client_errors.BadAnswer),
    (BEGUN + option(3, length=65537), client_errors.BadAnswer),
    (BEGUN + option(1 << 31 | 6, length=(1 << 32) - 1),
     client_errors.BadAnswer)])
def test_what_is_wrong_at_the_start(path, script, error):
    with server(path, script), pytest.raises(error):
        nbd_client.Export(str(path), 'image', UPLOAD)


def test_a_refusal_is_the_sentence_of_the_daemon(path):
    """The exception consists of the daemon's sentence alone.

    The log of dedupd-nova-base contains that sentence.
    """
    with server(path, BEGUN + option(1 << 31 | 6, b'no room for image')), (
            pytest.raises(client_errors.Refused, match='^no room for image$')):
        nbd_client.Export(str(path), 'image', UPLOAD)


def test_nobody_is_there(path):
    with pytest.raises(client_errors.DaemonUnavailable):
        nbd_client.Export(str(path), 'image', UPLOAD)


def test_nothing_comes(path):
    since = time.monotonic()
    with server(path, b'', close=False), (
            pytest.raises(client_errors.DaemonUnavailable)):
        nbd_client.Export(str(path), 'image', UPLOAD)
    assert time.monotonic() - since < 20


@pytest.mark.parametrize('reply,error', [
    (failure(b'damaged'), client_errors.Refused),
    (data(0, b'x' * 10, magic=0x67446698), client_errors.BadAnswer)])
def test_what_is_wrong_later(path, reply, error):
    with server(path, OPENED + reply), opened(path) as export:
        with pytest.raises(
                error, match='image image cannot be read: .*damaged|begins'):
            export.read(10, 0)


@pytest.mark.parametrize('answer', [
    failure(b'groups/1'), data(0, b'xxx', flags=0) + failure(b'groups/1'),
    failure(b'groups/1', flags=0) + data(0, b'x' * 10),
    failure(b'groups/1', flags=0) + failure(b'groups/2', flags=0)
    + chunk(0, b'')])
def test_a_failed_read_ends_no_connection(path, answer):
    """The connection stays open after a failed read.

    A deleted image stays readable only as long as its connection is open.
    """
    with server(path, OPENED + answer + data(20, b'y' * 10)):
        with opened(path) as export:
            with pytest.raises(client_errors.Refused,
                               match='groups/1') as caught:
                export.read(10, 0)
            assert caught.value.code == 500
            assert export.read(10, 20) == b'y' * 10


def test_it_connects_again(path):
    with server(path, OPENED + data(0, b'x' * 10)[:-1],
                OPENED[:40], OPENED + data(0, b'y' * 10)):
        with opened(path) as export:
            assert export.read(10, 0) == b'y' * 10


def test_another_image_is_not_taken_for_it(path):
    with server(path, OPENED, OPENED.replace(b'ab' * 16, b'cd' * 16)):
        with opened(path) as export:
            with pytest.raises(client_errors.Refused,
                               match='is not the one that it was'):
                export.read(10, 0)


def test_it_does_not_wait_for_ever(path):
    since = time.monotonic()
    with server(path, OPENED), opened(path) as export:
        with pytest.raises(client_errors.DaemonUnavailable):
            export.read(10, 0)
    assert 1 <= time.monotonic() - since < 20
