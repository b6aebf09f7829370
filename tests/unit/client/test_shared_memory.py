# SPDX-License-Identifier: Apache-2.0

"""The client's side of shared memory, against servers that misbehave.

The page ``daemon.rst`` has the rules M1 to M5 in "Shared memory".
"""

import contextlib
import fcntl
import os
import socket
import threading
import time

import pytest

from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import shared_memory
from tests.support import daemons
from tests.support import repositories

PIECE, MIN_SIZE = shared_memory.PIECE, shared_memory.MIN_SIZE
MEMORY = 4 * PIECE
DATA = repositories.noise(6 * PIECE + 5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / 's'


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = len(os.listdir('/proc/self/fd'))
    yield
    # The server's threads close their own descriptors.
    deadline = time.monotonic() + 30
    while len(os.listdir('/proc/self/fd')) > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def made(size=MEMORY, seals=shared_memory.SEALS):
    fd = os.memfd_create('m', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Server:
    """A daemon that shares memory, with the changes that a test needs.

    :param descriptors: makes the descriptors that go with the first answer
    :param answer: makes the answer for a length
    :param limit: after so many answers `then` is called
    """

    def __init__(self, descriptors=lambda: [made()], limit=1 << 30,
                 answer=lambda length: shared_memory.ANSWER.pack(length, 0),
                 then=lambda connection, fd: None, **headers):
        self.descriptors = descriptors
        self.answer = answer
        self.limit = limit
        self.then = then
        self.headers = {'Dedup_Repository': 'r', 'Dedup_Size': len(DATA),
                        'Dedup_Memory': MEMORY, 'Content_Length': None,
                        'Upgrade': shared_memory.PROTOCOL,
                        'Connection': 'Upgrade', **headers}

    def serve(self, connection, request):
        assert b'Upgrade: glance-dedup-memory\r\n' in request
        connection.sendall(daemons.answer(status=101, **self.headers))
        descriptors = self.descriptors()
        try:
            self._serve(connection, descriptors)
        finally:
            for fd in descriptors:
                os.close(fd)

    def _serve(self, connection, descriptors):
        size = shared_memory.REQUEST.size
        for number in range(self.limit):
            request = connection.recv(size, socket.MSG_WAITALL)
            if len(request) < size:
                return
            offset, place, length = shared_memory.REQUEST.unpack(request)
            if descriptors:
                os.pwrite(descriptors[0], DATA[offset:offset + length], place)
            socket.send_fds(connection, [self.answer(length)],
                            descriptors if not number else [])
        self.then(connection, descriptors[0])


@contextlib.contextmanager
def opened(path, server, **options):
    with daemons.scripted(path, server.serve):
        with daemon_client.Client(f'unix:{path}', timeout=20) as client:
            with client.open_image('image', **options) as stream:
                yield stream


@pytest.mark.parametrize('length', [1, 1000, PIECE, PIECE + 1, 10 * PIECE])
def test_all_bytes_in_order(path, length):
    length = min(length, len(DATA))
    with opened(path, Server()) as stream:
        found = []
        while piece := stream.read(min(length, 1 << 22)):
            found.append(piece)
            if len(found) == 2000:      # enough of the shortest
                break
        data = b''.join(found)
        assert data == DATA[:len(data)]
        assert len(found) == 2000 or len(data) == len(DATA)


def test_zeros_are_not_taken_from_the_memory(path):
    server = Server(answer=lambda length: shared_memory.ANSWER.pack(length, 1))
    with opened(path, server, length=3 * PIECE) as stream:
        assert stream.read(len(DATA)) == bytes(3 * PIECE)


@pytest.mark.parametrize('server', [
    Server(Dedup_Memory=None), Server(Dedup_Memory=PIECE - 1),
    Server(Dedup_Memory=1 << 40), Server(Dedup_Memory='-1'),
    Server(Dedup_Memory='9' * 5000), Server(Dedup_Size=None),
    Server(Dedup_Size=2 * PIECE), Server(Dedup_Size='x')])
def test_bad_headers(path, server):
    with pytest.raises(client_errors.BadAnswer):
        with opened(path, server, offset=PIECE, length=2 * PIECE):
            pass


@pytest.mark.parametrize('descriptors', [
    lambda: [], lambda: [made(), made()],
    lambda: [made(seals=0)], lambda: [made(seals=fcntl.F_SEAL_GROW)],
    lambda: [made(seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)],
    lambda: [made(MEMORY - 1)], lambda: [made(MEMORY + 1)],
    lambda: [os.open('/dev/zero', os.O_RDWR)],
    lambda: [os.open(__file__, os.O_RDONLY)]])
def test_m1_memory_that_is_not_sealed_is_refused(path, descriptors):
    with opened(path, Server(descriptors)) as stream:
        with pytest.raises(client_errors.DaemonUnavailable):
            stream.read(PIECE)


@pytest.mark.parametrize('answer', [
    lambda length: shared_memory.ANSWER.pack(length - 1, 0),
    lambda length: shared_memory.ANSWER.pack(length + 1, 0),
    lambda length: shared_memory.ANSWER.pack(length, 2),
    lambda length: shared_memory.ANSWER.pack(0, 0)])
def test_bad_answers(path, answer):
    with opened(path, Server(answer=answer)) as stream:
        with pytest.raises(client_errors.DaemonUnavailable):
            stream.read(PIECE)


@pytest.mark.parametrize('limit', [0, 1, 4])
def test_one_that_leaves(path, limit):
    with opened(path, Server(limit=limit)) as stream:
        with pytest.raises(client_errors.DaemonUnavailable):
            stream.read(len(DATA))


def test_an_answer_that_is_cut_off(path):
    server = Server(limit=1, answer=lambda length: b'\0\0\0')
    with opened(path, server) as stream:
        with pytest.raises(client_errors.DaemonUnavailable):
            stream.read(1)


def test_one_that_hangs(path):
    go = threading.Event()
    server = Server(limit=2, then=lambda connection, fd: go.wait(30))
    with opened(path, server) as stream:
        assert stream.read(2 * PIECE) == DATA[:2 * PIECE]
        # No more answers come, so the read times out.
        stream._timeout = 0.3
        with pytest.raises(client_errors.DaemonUnavailable):
            stream.read(1)
        go.set()


def test_m3_what_the_daemon_took_back_is_not_given_out(path):
    """The client drops a piece that the daemon zeroes before the read.

    The answers have arrived by then.
    """
    go, gone = threading.Event(), threading.Event()

    def take_back(connection, fd):
        assert go.wait(30)
        connection.shutdown(socket.SHUT_RDWR)
        os.pwrite(fd, bytes(MEMORY), 0)
        gone.set()

    with opened(path, Server(limit=4, then=take_back)) as stream:
        # The rest of this piece has arrived, too.
        assert stream.read(PIECE - 2) == DATA[:PIECE - 2]
        go.set()
        assert gone.wait(30)
        with pytest.raises(client_errors.DaemonUnavailable):
            stream.read(1)


def test_interrupt_ends_it(path):
    go = threading.Event()
    server = Server(limit=1, then=lambda connection, fd: go.wait(30))
    with daemons.scripted(path, server.serve):
        with daemon_client.Client(f'unix:{path}') as client:
            with client.open_image('image') as stream:
                stream.read(PIECE)
                client.interrupt()
                with pytest.raises(client_errors.DaemonUnavailable):
                    stream.read(PIECE)
                go.set()


def test_only_long_ranges_ask_for_memory(path):
    def serve(connection, request):
        requests.append(request)
        body = DATA[:MIN_SIZE - 1]
        connection.sendall(daemons.answer(
            body, status=206,
            Content_Range=f'bytes 0-{MIN_SIZE - 2}/{len(DATA)}'))

    requests = []
    with daemons.scripted(path, serve):
        with daemon_client.Client(f'unix:{path}') as client:
            with client.open_image('image', length=MIN_SIZE - 1) as stream:
                assert stream.read(PIECE) == DATA[:MIN_SIZE - 1]
    assert b'Upgrade' not in requests[0]
