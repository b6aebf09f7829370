# SPDX-License-Identifier: Apache-2.0

"""Reading through memory that the daemon shares, from a real process.

The rules M1 to M5 are in ``daemon.rst``, "Shared memory".
"""

import contextlib
import fcntl
import itertools
import mmap
import os
import random
import signal
import socket

import pytest

from dedupd.serve import memory_sharing
from glance_dedup.client import client_errors
from glance_dedup.client import shared_memory
from tests.support import daemons
from tests.support import repositories

MIB = 1 << 20
PIECE, MIN_SIZE = shared_memory.PIECE, shared_memory.MIN_SIZE
IMAGE = '/v1/images/image'
ASKS = {'Connection': 'Upgrade', 'Upgrade': shared_memory.PROTOCOL}


@pytest.fixture(scope='module')
def content():
    return (repositories.mixture(3 * MIB, seed=7) + bytes(2 * MIB)
            + repositories.noise(MIB + 777))


@pytest.fixture(scope='module')
def repository(tmp_path_factory, content):
    path = repositories.create(tmp_path_factory.mktemp('r') / 'repository')
    with repositories.open_repository(path) as opened:
        repositories.put(opened, 'image', content)
        repositories.put(opened, 'small', content[:MIN_SIZE - 1])
    return path


@pytest.fixture(scope='module')
def daemon(repository):
    with daemons.Daemon(repository) as process:
        yield process.start().wait_for_catalog()


@pytest.fixture
def hasty(repository):
    """A daemon whose time limits are short."""
    with daemons.Daemon(repository, write_timeout=3) as process:
        yield process.start()


class Peer:
    """A client that ignores the protocol once it has the memory."""

    def __init__(self, daemon):
        self.sock = daemon.connect()
        self.sock.sendall(daemons.raw('GET', IMAGE, **ASKS))
        head = b''
        while b'\r\n\r\n' not in head:
            head += self.sock.recv(4096)
        self.status = int(head.split()[1])
        self.descriptors = []

    def ask(self, offset, place, length):
        self.sock.sendall(shared_memory.REQUEST.pack(offset, place, length))

    def answer(self):
        """Return the next answer; None if the daemon has disconnected."""
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self.sock, shared_memory.ANSWER.size, 4)
        except ConnectionResetError:
            return None
        self.descriptors += descriptors
        return shared_memory.ANSWER.unpack(data) if data else None

    def memory(self):
        return mmap.mmap(self.descriptors[0], memory_sharing.MEMORY_BYTES,
                         mmap.MAP_SHARED, mmap.PROT_READ)

    def close(self):
        self.sock.close()
        for fd in self.descriptors:
            os.close(fd)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()


def is_shared(stream):
    return isinstance(stream._source, shared_memory.Reader)


def shared_now(daemon):
    """Return the bytes of shared memory that the daemon has mapped."""
    with open(f'/proc/{daemon.process.pid}/smaps') as f:
        sizes = [int(size.split()[1]) for line, size in itertools.pairwise(f)
                 if 'memfd:glance-dedup' in line]
    return sum(sizes) << 10


# -- normal use ---------------------------------------------------------------

def test_an_image_comes_through_memory(daemon, content):
    before = daemon.status()['reads']['bytes']
    with daemon.client() as client, client.open_image('image') as stream:
        assert is_shared(stream) and stream.size == len(content)
        rng = random.Random(1)
        found = b''
        while piece := stream.read(rng.choice((1, 4096, PIECE, 3 * MIB))):
            found += piece
        assert found == content and not stream.left
    daemon.wait_for(lambda: daemon.status()['reads']['bytes'] - before
                    == len(content))
    daemon.wait_for(lambda: not shared_now(daemon))


@pytest.mark.parametrize('offset,length', [
    (0, PIECE), (1, PIECE), (MIB - 7, 4 * MIB), (777, None)])
def test_a_range_comes_through_memory(daemon, content, offset, length):
    with daemon.client() as client, client.open_image(
            'image', offset=offset, length=length) as stream:
        assert is_shared(stream)
        end = len(content) if length is None else offset + length
        assert stream.read(len(content)) == content[offset:end]
        assert stream.read(1) == b''


def test_many_at_once(daemon, content):
    """M4: readers beyond the memory's limit get the bytes over the socket."""
    daemon.wait_for(lambda: not shared_now(daemon))
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(daemon.client())
        streams = [stack.enter_context(client.open_image('image'))
                   for _ in range(memory_sharing.SHARED_BYTES
                                  // memory_sharing.MEMORY_BYTES + 3)]
        assert [is_shared(s) for s in streams].count(False) == 3
        assert shared_now(daemon) == memory_sharing.SHARED_BYTES
        found = [s.read(len(content)) for s in streams]
        assert all(data == content for data in found)
    daemon.wait_for(lambda: not shared_now(daemon))


def test_who_asks_for_little_gets_no_memory(daemon, content):
    with daemon.client() as client:
        with client.open_image('small') as stream:
            assert not is_shared(stream)
            assert stream.read(PIECE) == content[:MIN_SIZE - 1]
        # The connection serves further requests.
        assert len(client._kept) == 1
        with client.open_image('image', offset=5, length=100) as stream:
            assert stream.read(100) == content[5:105]


def test_errors_come_as_ever(daemon):
    with daemon.client() as client:
        for arguments in ({'image_id': 'none'},
                          {'image_id': 'image', 'offset': 1 << 40},
                          {'image_id': 'image', 'upload_id': '0' * 32}):
            with pytest.raises(client_errors.Refused):
                client.open_image(**arguments)


def test_http_1_0_has_no_other_protocol(daemon, content):
    request = daemons.raw('GET', IMAGE, **ASKS).replace(b'1.1', b'1.0', 1)
    assert daemon.send(request).body == content


# -- hostile clients ----------------------------------------------------------

def test_m1_the_memory_is_sealed_and_read_only(daemon):
    with Peer(daemon) as peer:
        peer.ask(0, 0, 4096)
        assert peer.answer() == (4096, 0)
        fd, = peer.descriptors
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == shared_memory.SEALS
        with pytest.raises(OSError):
            os.write(fd, b'x')
        with pytest.raises(OSError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
        # Even the same user, who can open it for writing, cannot cut it.
        again = os.open(f'/proc/self/fd/{fd}', os.O_RDWR)
        try:
            for size in (0, 2 * memory_sharing.MEMORY_BYTES):
                with pytest.raises(PermissionError):
                    os.ftruncate(again, size)
        finally:
            os.close(again)


def test_m4_a_client_that_keeps_the_memory_pins_nothing(repository, content):
    with daemons.Daemon(repository) as daemon, Peer(daemon.start()) as peer:
        assert peer.status == 101
        peer.ask(0, PIECE, PIECE)
        assert peer.answer() == (PIECE, 0)
        memory = peer.memory()
        assert memory[PIECE:2 * PIECE] == content[:PIECE]
        assert os.fstat(peer.descriptors[0]).st_blocks * 512 == PIECE
        # After the next request the daemon waits for a second only.
        daemon.write_config(write_timeout=1)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for(lambda: 'Reading the options again' in daemon.text())
        peer.ask(0, PIECE, PIECE)
        assert peer.answer() == (PIECE, 0)
        # It sends no more requests: the daemon ends the connection, and takes
        # the memory back.
        assert peer.answer() is None
        daemon.wait_for(lambda: not shared_now(daemon))
        assert os.fstat(peer.descriptors[0]).st_blocks == 0
        assert not any(memory[PIECE:2 * PIECE])
        memory.close()


@pytest.mark.parametrize('request_', [
    (0, 0, 0), (0, 0, memory_sharing.MEMORY_BYTES + 1),
    (0, 1, memory_sharing.MEMORY_BYTES),
    (0, memory_sharing.MEMORY_BYTES, 1), (0, (1 << 32) - 1, 2),
    ((1 << 64) - 1, 0, 2), (8 * MIB, 0, 1), (7 * MIB - 4096, 0, 8192),
    (0, 0, (1 << 32) - 1)])
def test_ranges_outside_of_image_or_memory_end_it(daemon, request_):
    with Peer(daemon) as peer:
        peer.ask(*request_)
        assert peer.answer() is None
    assert 'Traceback' not in daemon.text()


def test_a_request_that_does_not_end(hasty):
    with Peer(hasty) as peer:
        peer.sock.sendall(b'\0' * (shared_memory.REQUEST.size - 1))
        assert peer.answer() is None
    hasty.wait_for(lambda: not shared_now(hasty))


def test_one_that_does_not_wait_for_the_answer(daemon):
    request = daemons.raw('GET', IMAGE, **ASKS)
    with daemon.connect() as sock:
        sock.sendall(request + shared_memory.REQUEST.pack(0, 0, 1))
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b''
    daemon.wait_for(lambda: not shared_now(daemon))


def test_one_that_takes_no_answers(daemon, content):
    """A client that reads no answers is disconnected; no thread waits."""
    peers = [Peer(daemon) for _ in range(6)]    # more than threads that read
    try:
        for peer in peers:
            peer.sock.settimeout(0.5)
            with contextlib.suppress(OSError):
                for _ in range(100_000):
                    peer.ask(0, 0, 1)
        with daemon.client() as client, client.open_image('image') as stream:
            assert stream.read(len(content)) == content
    finally:
        for peer in peers:
            peer.close()
    daemon.wait_for(lambda: not shared_now(daemon))


def test_those_that_leave_in_the_middle(daemon, content):
    for number in range(40):
        with Peer(daemon) as peer:
            for place in range(number % 4):
                peer.ask(place * MIB, place * MIB, PIECE)
    daemon.wait_for(lambda: not shared_now(daemon))
    with daemon.client() as client, client.open_image('image') as stream:
        assert is_shared(stream) and stream.read(MIB) == content[:MIB]
    assert 'Traceback' not in daemon.text()


def test_a_damaged_image_ends_it(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    data = repositories.noise(4 * MIB)
    with repositories.open_repository(path) as opened:
        repositories.put(opened, 'image', data)
    group, = (path / 'groups').iterdir()
    whole = group.read_bytes()
    at = whole.index(data[2 * MIB:2 * MIB + 64])
    with open(group, 'r+b') as f:
        f.seek(at)
        f.write(bytes(64))
    with daemons.running(path) as daemon:
        with daemon.client() as client, client.open_image('image') as stream:
            found = b''
            # It may end before the client has copied the bytes before (M3).
            with pytest.raises(client_errors.DaemonUnavailable):
                while True:
                    found += stream.read(MIB)
            assert found in (b'', data[:MIB], data[:2 * MIB])
        daemon.wait_for(lambda: 'A response was cut off' in daemon.text())
        # Nor does the error keep the memory, or the image.
        daemon.wait_for(lambda: not shared_now(daemon))
        assert 'Traceback' not in daemon.text()
