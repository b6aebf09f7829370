# SPDX-License-Identifier: Apache-2.0

"""The store's reads through a daemon, including faulty daemons."""

import logging
import re
import socket
import struct
import threading
import time

import glance_store
from glance_store import exceptions
import pytest

from glance_dedup.client import client_errors
from glance_dedup.driver import daemon_reads
from glance_dedup.driver import dedup_store
from tests.support import daemons
from tests.support import repositories
from tests.support import stores

configure = stores.configure
add = stores.add
get = stores.get

PIECE = dedup_store.Download.PIECE
DATA = repositories.noise(3 * PIECE // 16 * 16 + 5000)


@pytest.fixture
def path(tmp_path):
    return tmp_path / 's'


@pytest.fixture
def store(configure, path):
    return configure(one={'dedup_store_dedupd_socket': str(path)})


@pytest.fixture
def url(store):
    return add(DATA)[0]


def repository_id(store):
    return stores.repo(store).repository_id


def told(caplog):
    return [record.getMessage() for record in caplog.records
            if record.name == daemon_reads.__name__]


def levels(caplog):
    return [record.levelno for record in caplog.records
            if record.name == daemon_reads.__name__]


class Server:
    """A server like the daemon, with the changes that a test needs.

    :param send: bytes of the body after which `then` is called
    """

    def __init__(self, store, send=None, then=None, **changes):
        self.id = repository_id(store)
        self.send = send
        self.then = then
        self.changes = changes
        self.ranges = []
        self.gone = threading.Event()

    def serve(self, connection, request):
        first, last = map(int, re.search(
            rb'Range: bytes=(\d+)-(\d+)', request).groups())
        self.ranges.append((first, last))
        body = DATA[first:last + 1]
        fields = {'Dedup_Repository': self.id,
                  'Content_Range': f'bytes {first}-{last}/{len(DATA)}',
                  'Content_Length': len(body), 'status': 206, **self.changes}
        try:
            connection.sendall(daemons.answer(**fields))
            connection.sendall(
                body if self.send is None else body[:self.send])
            (self.then or hangs)(connection)
        finally:
            self.gone.set()


def hang(connection, request):
    connection.recv(1)


def hangs(connection):
    connection.recv(1)


def ends(connection):
    """Close the connection at once."""


def resets(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER,
                          struct.pack('ii', 1, 0))


# -- a healthy daemon ---------------------------------------------------------

def test_all_comes_from_the_daemon(store, url, path, monkeypatch, caplog):
    server = Server(store)
    monkeypatch.setattr(
        dedup_store.Download, '_read_directly',
        lambda self, length: pytest.fail('it was read directly'))
    with daemons.scripted(path, server.serve) as requests:
        assert get(url) == DATA
        assert get(url, offset=PIECE - 5, chunk_size=10) == (
            DATA[PIECE - 5:PIECE + 5])
        assert get(url, offset=len(DATA) - 1) == DATA[-1:]
        assert get(url, offset=len(DATA)) == b''
    assert server.ranges == [(0, len(DATA) - 1), (PIECE - 5, PIECE + 4),
                             (len(DATA) - 1, len(DATA) - 1)]
    upload = url.split('/')[4]
    assert requests[0].startswith(
        f'GET /v1/images/image?upload={upload} HTTP/1.1\r\n'.encode())
    assert not told(caplog)


def test_a_dropped_download_closes_its_socket(store, url, path):
    server = Server(store, send=2 * PIECE, then=hangs)
    with daemons.scripted(path, server.serve):
        download, _ = glance_store.get(url, 'one')
        pieces = iter(download)
        assert next(pieces) == DATA[:PIECE]
        assert not server.gone.is_set()
        download.close()
        assert server.gone.wait(20)
        server.gone.clear()
        download, _ = glance_store.get(url, 'one')
        del download
        assert server.gone.wait(20)


# -- a faulty daemon ----------------------------------------------------------

@pytest.mark.parametrize('then', [ends, hangs, resets],
                         ids=['ends', 'hangs', 'is reset'])
@pytest.mark.parametrize('send', [
    0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, len(DATA) - 1])
def test_it_ends_in_the_middle(store, url, path, monkeypatch, caplog, send,
                               then):
    """A download is complete and correct if the daemon fails in the middle."""
    monkeypatch.setattr(daemon_reads, 'PIECE_SECONDS', 0.3)
    server = Server(store, send=send, then=then)
    with daemons.scripted(path, server.serve) as requests:
        assert get(url) == DATA
        assert get(url) == DATA
        # The second download did not use the daemon.
        assert len(requests) == 1
    assert len(told(caplog)) == 1
    assert 'directly' in told(caplog)[0]


def test_reading_goes_on_from_where_it_was(store, url, path, monkeypatch):
    """The direct reads continue behind the pieces of the daemon."""
    direct = []
    read = dedup_store.Download._read_directly
    monkeypatch.setattr(
        dedup_store.Download, '_read_directly', lambda self, length: (
            direct.append((self._offset, length)), read(self, length))[1])
    server = Server(store, send=PIECE + 7, then=ends)
    with daemons.scripted(path, server.serve):
        assert get(url) == DATA
    assert direct == [(PIECE, PIECE), (2 * PIECE, PIECE),
                      (3 * PIECE, len(DATA) - 3 * PIECE)]


@pytest.mark.parametrize('changes', [
    {'Dedup_Repository': 'f' * 32},
    {'Dedup_Repository': None},
    {'status': 200},
    {'status': 204},
    {'status': 404},
    {'status': 500},
    {'Content_Length': len(DATA) - 1},
    {'Content_Length': len(DATA) + 1},
    {'Content_Length': None},
    {'Content_Length': None, 'Transfer_Encoding': 'chunked'},
    {'Content_Range': f'bytes 0-{len(DATA) - 1}/{len(DATA) + 1}'},
    {'Content_Range': f'bytes 1-{len(DATA)}/{len(DATA) + 1}'},
    {'Content_Range': None}])
def test_another_answer_is_not_used(store, url, path, monkeypatch, changes):
    """An answer that is not the image is ignored.

    Its body holds other bytes.
    """
    monkeypatch.setattr(daemon_reads, 'PIECE_SECONDS', 0.3)

    def behave(connection, request):
        fields = {'Dedup_Repository': repository_id(store), 'status': 206,
                  'Content_Range': f'bytes 0-{len(DATA) - 1}/{len(DATA)}',
                  'Content_Length': len(DATA), **changes}
        connection.sendall(daemons.answer(**fields))
        connection.sendall(bytes(len(DATA) + 1))

    with daemons.scripted(path, behave) as requests:
        assert get(url) == DATA
        assert len(requests) == 1


def test_garbage(store, url, path):
    def behave(connection, request):
        connection.sendall(repositories.noise(100000))

    with daemons.scripted(path, behave):
        assert get(url) == DATA


@pytest.mark.parametrize('timeout', [0, 20])
def test_it_does_not_answer(configure, path, monkeypatch, timeout):
    """A daemon without an answer delays one download, and no later one."""
    monkeypatch.setattr(daemon_reads, 'ANSWER_SECONDS', 0.5)
    configure(one={'dedup_store_dedupd_socket': str(path),
                   'dedup_store_timeout': timeout})
    url = add(DATA)[0]
    with daemons.scripted(path, hang) as requests:
        for _ in range(3):
            assert get(url) == DATA
        assert len(requests) == 1


def test_it_does_not_accept(configure, path, monkeypatch):
    """A download succeeds if the daemon does not accept the connection.

    Another connection fills the kernel's queue for the listener.
    """
    monkeypatch.setattr(daemon_reads, 'ANSWER_SECONDS', 0.5)
    configure(one={'dedup_store_dedupd_socket': str(path)})
    url = add(DATA)[0]
    with socket.socket(socket.AF_UNIX) as listener, (
            socket.socket(socket.AF_UNIX)) as waiting:
        listener.bind(str(path))
        listener.listen(0)
        waiting.connect(str(path))
        assert get(url) == DATA


def test_a_time_limit_bounds_its_pieces(configure, path):
    """The option dedup_store_timeout also limits reads from the daemon."""
    store = configure(one={'dedup_store_dedupd_socket': str(path),
                           'dedup_store_timeout': 1})
    url = add(DATA)[0]
    server = Server(store, send=PIECE, then=hangs)
    with daemons.scripted(path, server.serve):
        download, _ = glance_store.get(url, 'one')
        began = time.monotonic()
        pieces = iter(download)
        assert next(pieces) == DATA[:PIECE]
        assert next(pieces) == DATA[PIECE:2 * PIECE]
        # The time is below the default limit of a piece.
        assert time.monotonic() - began < daemon_reads.PIECE_SECONDS
        assert b''.join(pieces) == DATA[2 * PIECE:]


def test_errors_after_it_are_those_of_direct_reading(store, url, path):
    group = repositories.Group(stores.repo(store).path, 1)
    group.data[-100:] = bytes(100)
    group.save()
    server = Server(store, send=2 * PIECE, then=ends)
    with daemons.scripted(path, server.serve):
        download, _ = glance_store.get(url, 'one')
        found = []
        with pytest.raises(exceptions.RemoteServiceUnavailable):
            found.extend(download)
        data = b''.join(found)
        assert data == DATA[:len(data)] and len(data) >= 2 * PIECE


def test_an_image_that_it_does_not_find_says_nothing_of_it(
        store, url, path, caplog):
    def behave(connection, request):
        connection.sendall(daemons.answer(b'', 404))

    with daemons.scripted(path, behave) as requests:
        assert get(url) == DATA
        assert get(url) == DATA
        assert len(requests) == 2
    assert not told(caplog)


def test_it_is_tried_again_later(store, url, path, caplog):
    """After a failure, one download tries the daemon again 10 seconds later.

    The log reports the daemon's return once.
    """
    caplog.set_level(logging.DEBUG)
    now = [0.0]
    store._daemon._clock = lambda: now[0]
    tries = []
    opened = store._daemon._client.open_image

    def open_image(*args, **kwargs):
        tries.append(now[0])
        return opened(*args, **kwargs)

    store._daemon._client.open_image = open_image
    for now[0] in (0.0, 1.0, 9.9, 10.1, 11.0, 20.0, 20.2):
        assert get(url) == DATA
    assert tries == [0.0, 10.1, 20.2]
    # A daemon that never ran causes no warning.
    assert levels(caplog) == [logging.DEBUG]
    server = Server(store)
    with daemons.scripted(path, server.serve):
        for now[0] in (30.1, 31.0, 31.1, 31.2):
            assert get(url) == DATA
    assert tries[3:] == [31.0, 31.1, 31.2]
    assert [message.split(':')[0] for message in told(caplog)[1:]] == [
        'Images are read through the daemon again']
    # A daemon that stopped causes one.
    now[0] = 50.0
    assert get(url) == DATA
    assert levels(caplog)[1:] == [logging.INFO, logging.WARNING]


def test_while_one_tries_the_others_do_not_wait(store, url, path):
    daemon = store._daemon
    daemon._failed('a test')
    daemon._retry_at = 0.0
    entered, go = threading.Event(), threading.Event()

    def open_image(*args, **kwargs):
        entered.set()
        assert go.wait(20)
        raise client_errors.DaemonUnavailable('a test')

    daemon._client.open_image = open_image
    thread = threading.Thread(target=get, args=(url,))
    thread.start()
    assert entered.wait(20)
    daemon._client.open_image = lambda *args, **kwargs: pytest.fail(
        'two tried')
    assert get(url) == DATA
    go.set()
    thread.join(20)


def test_a_client_that_takes_nothing_is_no_trouble_of_the_daemon(
        store, url, path, monkeypatch, caplog):
    """The daemon disconnects a slow client, which then reads directly.

    The next download uses the daemon again, and nothing is logged.
    """
    monkeypatch.setattr(daemon_reads, 'STILL_SECONDS', 0.0)
    server = Server(store, send=PIECE, then=ends)
    with daemons.scripted(path, server.serve) as requests:
        assert get(url) == DATA
        assert get(url) == DATA
        assert len(requests) == 2
    assert not told(caplog)


def test_after_a_fork(store, url, path):
    """The child reads by itself and cannot use its parent's download."""
    server = Server(store)
    with daemons.scripted(path, server.serve) as requests:
        download, _ = glance_store.get(url, 'one')
        pieces = iter(download)
        assert next(pieces) == DATA[:PIECE]

        def child():
            assert get(url) == DATA
            with pytest.raises(exceptions.RemoteServiceUnavailable):
                next(pieces)
            return True

        assert repositories.in_child(child)
        assert b''.join(pieces) == DATA[PIECE:]
        assert len(requests) == 2


def test_without_the_option(configure, path):
    configure(one={'dedup_store_dedupd_socket': ''})
    url = add(DATA)[0]
    with daemons.scripted(path, hang) as requests:
        assert get(url) == DATA
        assert not requests


def test_a_relative_path_is_refused(configure, caplog):
    store = configure(one={'dedup_store_dedupd_socket': 'run/s'})
    with pytest.raises(exceptions.StoreAddDisabled):
        add(b'data')
    assert 'absolute' in caplog.text
    assert store._daemon is None
