# SPDX-License-Identifier: Apache-2.0

"""The API: processes that fork with a repository open."""

import gc
import os
import subprocess
import threading
import time

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import forks
from glance_dedup.base import thread_pool
from tests.support import repositories
from tests.support.repositories import mixture
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.repository import fixtures

MIB = 1 << 20

path = fixtures.path
repo = fixtures.repo
large = fixtures.large


def files_open_in(path):
    found = []
    for fd in os.listdir('/proc/self/fd'):
        try:
            target = os.readlink(f'/proc/self/fd/{fd}')
        except OSError:
            continue
        if str(path) in target:
            found.append(target)
    return sorted(found)


def test_fork_with_everything_open(large):
    """The child reopens its files; the parent's transaction continues."""
    path = large.path
    data = mixture(3 * MIB)
    put(large, 'image', data)
    image = large.open_image('image')
    transaction = large.begin('parent')
    for i in range(13):
        transaction.write(noise(MIB, i))
    other = open_repository(path)
    put(other, 'of-other', noise(5000, 77))

    def child():
        nonlocal image, transaction
        # The child inherited no file, not even the filter.
        inherited = files_open_in(path)
        for call in (lambda: transaction.write(b'x'), transaction.commit,
                     image.read, lambda: image.readinto(bytearray(5)),
                     lambda: list(image.extents()),
                     lambda: image.is_zeros(1, 0)):
            with pytest.raises(exceptions.ClosedError):
                call()
        transaction.abort()
        image.close()
        assert read_all(large, 'image') == data
        mine = large.begin('mine')
        mine.write(noise(MIB, 60))
        # Now that the numbers of the descriptors are used again.
        del image, transaction
        gc.collect()
        mine.commit()
        assert read_all(large, 'mine') == noise(MIB, 60)
        stat = put(large, 'child', data + noise(MIB, 50))
        assert stat.new_bytes == MIB
        assert read_all(large, 'child') == data + noise(MIB, 50)
        assert read_all(other, 'of-other') == noise(5000, 77)
        large.delete('of-other')
        large.close()
        return inherited
    assert repositories.in_child(child) == []
    transaction.write(noise(MIB, 13))
    transaction.commit()
    assert read_all(large, 'parent') == b''.join(
        noise(MIB, i) for i in range(14))
    assert image.read() == data
    assert read_all(large, 'child') == data + noise(MIB, 50)
    assert large.images() == ['child', 'image', 'mine', 'parent']
    image.close()
    other.close()
    repositories.require_clean(path)


@pytest.mark.parametrize('what', ['image', 'transaction'])
def test_fork_with_a_forgotten_repository(path, what):
    """A fork closes files that only an image or a transaction holds."""
    with open_repository(path) as repo:
        put(repo, 'image', b'content')
    if what == 'image':
        left = open_repository(path).open_image('image')
    else:
        left = open_repository(path).begin('other')
    gc.collect()
    assert len(files_open_in(path)) >= 2
    assert repositories.in_child(lambda: files_open_in(path)) == []
    if what == 'image':
        assert left.read() == b'content'
        left.close()
    else:
        left.commit()
        with open_repository(path) as repo:
            assert repo.images() == ['image', 'other']


def test_fork_of_a_fork(repo):
    put(repo, 'parent', noise(5000))

    def grandchild():
        put(repo, 'grandchild', noise(5000, 3))
        return read_all(repo, 'child') == noise(5000, 2)

    def child():
        put(repo, 'child', noise(5000, 2))
        return repositories.in_child(grandchild)
    assert repositories.in_child(child)
    assert repo.images() == ['child', 'grandchild', 'parent']


def test_parent_dies_and_its_locks_with_it(path):
    """The locks fall with their owner, though a forked child lives."""
    reading, writing = os.pipe()

    def parent():
        repo = open_repository(path)
        put(repo, 'image', noise(5000, 5))
        image = repo.open_image('image')
        transaction = repo.begin('unfinished')
        transaction.write(noise(512 * 20000))
        held = repositories.group_lock_held(path, 1)
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, b'%d\n' % os.getpid())
                threading.Event().wait(100)
            finally:
                os._exit(0)
        assert image.size
        return held, child
    held, child = repositories.in_child(parent)
    try:
        assert held == 'exclusive' or held is None
        assert int(os.read(reading, 100)) == child
        os.kill(child, 0)  # it lives
        groups = len(os.listdir(path / 'groups'))
        assert groups > 1
        for group in range(1, groups + 1):
            assert repositories.group_lock_held(path, group) is None
            assert repositories.group_lock_held(
                path, repositories.SHARE_BYTE + group) is None
        for name in repositories.spool(path):
            assert repositories.lock_held(path / 'spool' / name, 0) is None
        assert repositories.lock_held(path / 'images' / 'image', 1) is None
    finally:
        os.kill(child, 9)
        os.close(reading)
        os.close(writing)


def test_fork_while_another_thread_writes(large):
    """The child refuses a transaction whose lock was held at the fork."""
    transaction = large.begin('image')
    ending = threading.Event()

    # The write is long enough for the fork to come during it.
    piece = noise(48 * MIB)

    def write():
        while not ending.is_set():
            transaction.write(piece)
    thread = threading.Thread(target=write)
    thread.start()

    def child():
        with pytest.raises(exceptions.ClosedError):
            transaction.write(b'x')
        with pytest.raises(exceptions.ClosedError):
            transaction.commit()
        transaction.abort()
        put(large, f'child-{os.getpid()}', noise(100000))
        return True
    try:
        for _ in range(5):
            assert repositories.in_child(child, timeout=20)
    finally:
        ending.set()
        thread.join(60)
    transaction.commit()
    assert large.stat('image').size % MIB == 0


def test_exec_inherits_nothing(repo, path):
    image = repo.open_image(put(repo, 'image', b'x').image_id)
    transaction = repo.begin('other')
    result = subprocess.run(
        ['ls', '-l', '/proc/self/fd'], close_fds=False, text=True,
        capture_output=True, timeout=30)
    assert result.returncode == 0
    assert str(path) not in result.stdout
    image.close()
    transaction.abort()


def test_fork_that_python_does_not_notice(large):
    """A fork outside Python works, too, such as one of uWSGI."""
    data = mixture(3 * MIB)
    put(large, 'image', data)
    pool = thread_pool.Workers('test', 2)
    assert pool.submit(int, '5').result(60) == 5    # a thread is idle now

    def child():
        large.handle()
        assert pool.submit(int, '6').result(60) == 6
        assert read_all(large, 'image') == data
        put(large, 'child', data)
        large.close()

    assert repositories.in_child(child, unnoticed=True) is None
    assert read_all(large, 'child') == data
    repositories.require_clean(large.path)


def test_threads_of_a_child_catch_up_once(large, monkeypatch):
    """The first threads wait until the hooks have run."""
    put(large, 'image', noise(MIB))

    def child():
        calls = []
        monkeypatch.setattr(forks, '_hooks', [
            *forks._hooks, lambda: calls.append(time.sleep(0.2))])
        found = []
        threads = [threading.Thread(target=lambda: found.append(
            read_all(large, 'image'))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [len(calls), found == 8 * [noise(MIB)]]

    assert repositories.in_child(child, unnoticed=True) == [1, True]
