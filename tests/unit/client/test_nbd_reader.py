# SPDX-License-Identifier: Apache-2.0

"""The client of QEMU's NBD server: a real server and faulty ones."""

import contextlib
import os
import socket
import struct
import subprocess
import threading

import pytest

from glance_dedup.client import client_errors
from glance_dedup.client import nbd_reader
from tests.support import nbd
from tests.support import repositories

MIB = 1 << 20
GREETING = b'NBDMAGICIHAVEOPT\0\3'
BITMAP = nbd_reader.BITMAP_PREFIX + 'b'


def option(kind, data=b'', length=None):
    return struct.pack('>QIII', 0x3e889045565a9, 7, kind,
                       len(data) if length is None else length) + data


def chunk(kind, data=b'', flags=1, cookie=0, length=None):
    return struct.pack('>IHHQI', 0x668e33ef, flags, kind, cookie,
                       len(data) if length is None else length) + data


OPENED = (GREETING + option(1) + option(4, b'\0\0\0\1base:allocation')
          + option(1) + option(3, struct.pack('>HQH', 0, MIB, 3)) + option(1))


def data(offset, content, **fields):
    return chunk(1, struct.pack('>Q', offset) + content, **fields)


def hole(offset, length, **fields):
    return chunk(2, struct.pack('>QI', offset, length), **fields)


@contextlib.contextmanager
def server(path, script):
    """Send a script on the first connection, and hang up."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def serve():
            with contextlib.suppress(OSError):
                with listener.accept()[0] as connection:
                    connection.sendall(script)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)


def reader(path):
    return nbd_reader.NbdReader(str(path), 'x', [nbd_reader.ALLOCATION])


@pytest.mark.parametrize('script', [
    data(10, b'abcd'), data(12, b'cd', flags=0) + hole(10, 2),
    hole(10, 2, flags=0) + data(12, b'cd', flags=0) + chunk(0)])
def test_answers(tmp_path, script):
    with server(tmp_path / 's', OPENED + script), reader(
            tmp_path / 's') as opened:
        buffer = bytearray(b'....')
        opened.readinto(buffer, 10)
        assert buffer in (b'abcd', b'\0\0cd')


@pytest.mark.parametrize('script', [
    b'', b'x' * 20, data(10, b'abc'), data(10, b'ab', flags=0) + chunk(0),
    data(10, b'ab', flags=0) + data(10, b'ab'),         # twice the same
    data(10, b'a', flags=0) + data(13, b'd'),           # with a gap
    data(9, b'abcd'), data(11, b'abcd'), data(1 << 63, b'abcd'),
    data(10, b'abcde'), hole(10, 0), hole(10, 1 << 31), hole(0, 4),
    chunk(1, length=1 << 31), chunk(2, b'x' * 11), chunk(0, b'x'),
    chunk(5, b'\0\0\0\1' + bytes(8)), chunk(77), data(10, b'abcd', cookie=1),
    chunk(32769, struct.pack('>IH', 5, 3) + b'bad'),
    chunk(32769, b''), chunk(32769, length=1 << 31)])
def test_wrong_answers_to_a_read(tmp_path, script):
    with server(tmp_path / 's', OPENED + script), reader(
            tmp_path / 's') as opened:
        with pytest.raises(client_errors.ClientError,
                           match=str(tmp_path / 's')):
            opened.readinto(bytearray(4), 10)
        # The rest of the answer does not count as the next answer.
        with pytest.raises(client_errors.ClientError):
            opened.readinto(bytearray(4), 10)


@pytest.mark.parametrize('script', [
    chunk(0), chunk(5, b'\0\0\0\2' + struct.pack('>II', 1, 0)),
    chunk(5, b'\0\0\0\1'), chunk(5, b'\0\0\0\1' + bytes(8)),
    chunk(5, b'\0\0\0\1' + bytes(7)), chunk(5, length=1 << 30),
    data(0, b'x')])
def test_wrong_answers_about_extents(tmp_path, script):
    with server(tmp_path / 's', OPENED + script), reader(
            tmp_path / 's') as opened:
        with pytest.raises(client_errors.ClientError):
            opened.extents(0, 512)


@pytest.mark.parametrize('script', [
    b'', b'HTTP/1.1 400 Bad Request\r\n', b'NBDMAGICIHAVEOPT\0\0',
    GREETING, GREETING + b'x' * 20, GREETING + option(1 << 31 | 1),
    GREETING + option(1) + option(1),                   # no context
    GREETING + option(1) + option(4, b'\0\0\0\1other') + option(1),
    GREETING + option(1, length=1 << 31),
    GREETING + option(4, b'x') * 100,
    GREETING + option(1) + option(4, b'\0\0\0\1base:allocation')
    + option(1) + option(1 << 31 | 6, b'no such export'),
    GREETING + option(1) + option(4, b'\0\0\0\1base:allocation')
    + option(1) + option(1)])
def test_servers_that_are_none(tmp_path, script):
    with server(tmp_path / 's', script):
        with pytest.raises(client_errors.ClientError):
            reader(tmp_path / 's')


def test_no_server(tmp_path):
    with pytest.raises(client_errors.ClientError, match='No such file'):
        reader(tmp_path / 's')


@pytest.mark.needs('qemu')
def test_qemu(tmp_path):
    """The client reads data, holes and a bitmap of a real server."""
    for program in ('qemu-img', 'qemu-nbd', 'qemu-io'):
        nbd.need(program)
    disk, path = tmp_path / 'disk.qcow2', tmp_path / 's'

    def run(*command):
        subprocess.run([str(word) for word in command], check=True,
                       capture_output=True, timeout=60)

    run('qemu-img', 'create', '-f', 'qcow2', disk, '64M')
    run('qemu-io', '-c', 'write -P 1 0 1M', disk)
    run('qemu-img', 'bitmap', '--add', disk, 'b')
    run('qemu-io', '-c', 'write -P 2 1M 64k', '-c', 'write -P 3 40M 64k',
        disk)
    process = subprocess.Popen(
        ['qemu-nbd', '--read-only', f'--socket={path}', '--export-name=x',
         '--format=qcow2', '--bitmap=b', '--persistent', str(disk)])
    try:
        def answers():
            with contextlib.suppress(client_errors.ClientError):
                reader(path).close()
                return True

        repositories.eventually(answers)
        with nbd_reader.NbdReader(
                str(path), 'x', [nbd_reader.ALLOCATION, BITMAP]) as opened:
            assert opened.size == 64 * MIB
            buffer = bytearray(os.urandom(2 * MIB))
            opened.readinto(buffer, 0)
            assert buffer == (b'\1' * MIB + b'\2' * 65536
                              + bytes(MIB - 65536))
            found = opened.extents(0, 64 * MIB)
            assert found[BITMAP] == [
                (MIB, 0), (65536, 1), (39 * MIB - 65536, 0), (65536, 1),
                (24 * MIB - 65536, 0)]
            assert [flags & nbd_reader.ZERO for _, flags in
                    found[nbd_reader.ALLOCATION]] == [0, 2, 0, 2]
        for name, contexts in (('y', ()), ('x', [BITMAP + 'b'])):
            with pytest.raises(client_errors.ClientError):
                nbd_reader.NbdReader(str(path), name, contexts)
    finally:
        process.kill()
        process.wait(30)
