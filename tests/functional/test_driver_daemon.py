# SPDX-License-Identifier: Apache-2.0

"""The store with a real dedupd, which is killed at various moments."""

import contextlib
import random
import signal
import threading
import time

import glance_store
from glance_store import exceptions
import pytest

from glance_dedup.client import shared_memory
from glance_dedup.driver import daemon_reads
from glance_dedup.driver import dedup_store
from tests.support import daemons
from tests.support import processes
from tests.support import repositories
from tests.support import stores

configure = stores.configure
add = stores.add
get = stores.get

PIECE = shared_memory.PIECE
MIB = 1 << 20
LIMIT = 60      # seconds


@pytest.fixture
def store(configure, tmp_path, monkeypatch):
    # On a busy machine the daemon may need longer than Glance waits for it.
    for name in ('ANSWER_SECONDS', 'PIECE_SECONDS'):
        monkeypatch.setattr(daemon_reads, name, LIMIT)
    return configure(one={
        'dedup_store_dedupd_socket': str(tmp_path / 'd' / 'socket')})


@pytest.fixture
def daemon(store, tmp_path):
    with daemons.running(tmp_path / 'one', tmp_path / 'd') as daemon:
        yield daemon


@pytest.fixture
def direct(monkeypatch):
    """The pieces that are read directly."""
    found = []
    read = dedup_store.Download._read_directly

    def note(self, length):
        found.append((self._offset, length))
        return read(self, length)

    monkeypatch.setattr(dedup_store.Download, '_read_directly', note)
    return found


def sent(daemon):
    with daemon.client() as client:
        return client.status()['reads']['bytes']


def test_reads_through_it(store, daemon, direct):
    data = repositories.mixture(9 * MIB + 17)
    url = add(data)[0]
    before = sent(daemon)
    assert get(url) == data
    # A thread sends most of it; the daemon's loop counts it a little later.
    daemon.wait_for(lambda: sent(daemon) - before >= len(data))
    rng = random.Random(3)
    for _ in range(50):
        offset = rng.randrange(len(data))
        length = rng.randrange(1, 5 * MIB)
        assert get(url, offset=offset, chunk_size=length) == (
            data[offset:offset + length])
    assert get(add(b'', 'empty')[0]) == b''
    assert not direct


def test_it_is_killed_in_the_middle(store, daemon, direct):
    """No byte is wrong if the daemon is killed after any of its pieces."""
    data = repositories.mixture(6 * PIECE + 12345)
    url = add(data)[0]
    for kill_after in range(7):
        store._daemon._retry_at = 0.0
        direct.clear()
        download, size = glance_store.get(url, 'one')
        found = b''
        for number, piece in enumerate(download):
            found += piece
            if number == kill_after:
                daemon.kill()
        assert size == len(data)
        assert found == data
        if kill_after < 5:
            # No bytes are taken from its memory any more (M3).
            assert direct[0][0] >= (kill_after + 1) * PIECE
            assert direct[0][0] % PIECE == 0
            assert sum(length for _, length in direct) == (
                len(data) - direct[0][0])
        daemon.start()


@pytest.mark.long
def test_it_is_killed_at_any_moment(store, daemon):
    data = repositories.mixture(8 * PIECE + 12345)
    url = add(data)[0]
    rng = random.Random(5)
    for _ in range(30):
        store._daemon._retry_at = 0.0
        failed = []

        def read():
            if get(url) != data:
                failed.append('wrong bytes')

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(rng.random() * 0.1)
        daemon.kill()
        for thread in threads:
            thread.join(60)
        assert not failed
        daemon.start()


def test_it_hangs_in_the_middle(store, daemon, direct, monkeypatch):
    data = repositories.mixture(6 * PIECE)
    url = add(data)[0]
    download, _ = glance_store.get(url, 'one')
    pieces = iter(download)
    found = next(pieces)
    with stopped(daemon), monkeypatch.context() as hasty:
        hasty.setattr(daemon_reads, 'PIECE_SECONDS', 0.5)
        found += b''.join(pieces)
        assert found == data
        assert direct
        # The next download sends the daemon no request.
        with monkeypatch.context() as patch:
            patch.setattr(store._daemon._client, 'open_image',
                          lambda *args, **kwargs: pytest.fail('it asked'))
            assert get(url) == data
    direct.clear()
    store._daemon._retry_at = 0.0
    assert get(url) == data
    assert not direct


@contextlib.contextmanager
def stopped(daemon):
    processes.stop(daemon.process.pid)
    try:
        yield
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def test_another_repository(configure, tmp_path, direct):
    """The store does not use the image of that id in another repository."""
    path = tmp_path / 'd' / 'socket'
    configure(one={'dedup_store_dedupd_socket': str(path)}, two={})
    url = add(b'one' * MIB)[0]
    add(b'two' * MIB, backend='two')
    with daemons.running(tmp_path / 'two', tmp_path / 'd'):
        assert get(url) == b'one' * MIB
        assert direct


def test_deleted_and_stored_anew(store, daemon, direct):
    """Each location leads to its own upload's bytes."""
    data = repositories.noise(3 * PIECE)
    url = add(data)[0]
    download, _ = glance_store.get(url, 'one')
    stores.delete(url)
    other = repositories.noise(3 * PIECE, 2)
    second = add(other)[0]
    assert b''.join(download) == data
    assert get(second) == other
    with pytest.raises(exceptions.NotFound):
        get(url)
    assert not direct


def test_it_ends_in_order(store, daemon):
    """After SIGTERM, running downloads may finish."""
    data = repositories.mixture(5 * PIECE)
    url = add(data)[0]
    download, _ = glance_store.get(url, 'one')
    pieces = iter(download)
    found = next(pieces)
    stopping = threading.Thread(target=daemon.stop)
    stopping.start()
    found += b''.join(pieces)
    assert found == data
    stopping.join(60)
    assert daemon.process.returncode == 0
