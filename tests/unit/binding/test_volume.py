# SPDX-License-Identifier: Apache-2.0

"""The engine's Volume from Python: arguments, forks, threads, closing.

The C tests in ``tests/c/volume`` check the effects of a volume on the disk.
"""

import gc
import threading

import pytest

from glance_dedup import _engine
from glance_dedup.base import exceptions
from tests.support import repositories
from tests.support.repositories import noise

PART = 65536
SIZE = 4 * PART
MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    return repositories.create(tmp_path / 'r', block_size=512, group_slots=64,
                               segment_size=4096)


@pytest.fixture
def repo(path):
    with repositories.open_repository(path) as repo:
        yield repo


@pytest.fixture
def volume(repo):
    assert repo.handle().create_volume(
        'disk', SIZE, 'p', bytes(16), None, PART) == 0
    volume = repo.handle().open_volume('disk')
    yield volume
    volume.close()


def test_arguments(repo):
    handle = repo.handle()
    for wrong in ((), ('disk',), ('disk', SIZE, 'p', bytes(16)),
                  ('disk', SIZE, 'p', bytes(16), 'image'),
                  ('disk', SIZE, 'p', bytes(16), repo)):
        with pytest.raises(TypeError):
            handle.create_volume(*wrong)
    for wrong in (b'', bytes(15), bytes(17)):
        with pytest.raises(ValueError):
            handle.create_volume('disk', SIZE, '', wrong, None)
    for name, size, part in (('', SIZE, PART), ('a.b', SIZE, PART),
                             ('x' * 65, SIZE, PART), ('disk', 0, PART),
                             ('disk', 513, PART), ('disk', 1 << 47, PART),
                             ('disk', SIZE, 5000), ('disk', SIZE, 1 << 50)):
        with pytest.raises(exceptions.InvalidParameter):
            handle.create_volume(name, size, '', bytes(16), None, part)
    with pytest.raises(TypeError):
        _engine.Volume()
    for call in (handle.open_volume, handle.look_at_volume,
                 handle.delete_volume):
        with pytest.raises(exceptions.ImageNotFound, match='volume'):
            call('disk')
        with pytest.raises(exceptions.InvalidParameter):
            call('a/b')
        with pytest.raises(ValueError):
            call('a\0b')


def test_requests(volume):
    volume.write(b'abc', 100)
    volume.write(memoryview(b'defg')[1:], PART - 1)
    volume.write(bytearray(b'hi'), SIZE - 2)
    volume.write(b'', SIZE)
    model = bytearray(SIZE)
    model[100:103], model[-2:] = b'abc', b'hi'
    model[PART - 1:PART + 2] = b'efg'
    assert volume.read(SIZE, 0) == model
    volume.zero(2, 101)
    model[101:103] = bytes(2)
    room = bytearray(b'x' * 10)
    volume.readinto(memoryview(room)[1:9], 96)
    assert room == b'x' + model[96:104] + b'x'
    assert volume.read(0, SIZE) == b''
    for call in (lambda: volume.read(1, SIZE),
                 lambda: volume.write(b'x', SIZE),
                 lambda: volume.zero(2, SIZE - 1),
                 lambda: volume.zero((1 << 64) - 1, 5),
                 lambda: volume.extents(1, SIZE),
                 lambda: volume.readinto(bytearray(2), SIZE - 1)):
        with pytest.raises(exceptions.InvalidParameter, match='volume disk'):
            call()
    for call in (lambda: volume.write('text', 0), lambda: volume.write([1], 0),
                 lambda: volume.write(5, 0), lambda: volume.read('1', 0),
                 lambda: volume.readinto(b'fixed', 0)):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError):
        volume.read(-1, 0)
    assert volume.read(SIZE, 0) == model


def test_extents(volume):
    assert volume.extents(SIZE, 0) == [(0, SIZE, True)]
    for at in (512, 1024, 1536, PART):
        volume.write(b'x' * 512, at)
    expected = [(0, 512, True), (512, 1536, False),
                (2048, PART - 2048, True), (PART, 512, False),
                (PART + 512, SIZE - PART - 512, True)]
    assert volume.extents(SIZE, 0) == expected
    volume.checkpoint()
    assert volume.extents(SIZE, 0) == expected
    assert volume.extents(1000, 1000) == [(1000, 1000, False)]
    assert volume.extents(0, 0) == []
    # The volume has more extents than one call returns.
    for at in range(0, SIZE, 128):
        volume.write(b'y', at)
    found = volume.extents(SIZE, 0)
    assert len(found) == 1024
    assert found[:4] == [(0, 1, False), (1, 127, True), (128, 1, False),
                         (129, 127, True)]


def test_info(repo, volume):
    head = repo.handle().look_at_volume('disk')
    assert (head['state'], head['size'], head['part_size']) == (
        'ready', SIZE, PART)
    assert (head['project'], head['source'], head['scope']) == (
        'p', '', bytes(16))
    assert len(head['volume_id']) == 16 and head['created'] > 1700000000
    volume.write(b'x' * 1000, 5)
    volume.write(b'x' * 1000, 5)
    volume.read(10, 0)
    volume.zero(7, 50000)
    volume.flush()
    info = volume.info()
    assert info['journal_records'] == 3
    assert info['journal_bytes'] > 2000
    assert info['broken'] == ''
    assert info['volume_id'] == head['volume_id']
    counters = info['counters']
    assert (counters['written'], counters['read'], counters['zeroed'],
            counters['flushes'], counters['overwritten']) == (
        2000, 10, 7, 1, 1000)
    assert not volume.needs_checkpoint()
    volume.checkpoint()
    info = volume.info()
    assert info['journal_records'] == 0
    assert info['counters']['checkpoints'] == 1
    assert info['counters']['unique'] > 0
    # The head was written before the checkpoint had ended.
    assert repo.handle().look_at_volume('disk')['counters']['written'] == 2000


def test_snapshot_and_resize(repo, volume):
    volume.write(noise(1000), 0)
    header = volume.snapshot('image', 'q')
    assert (header['image_id'], header['project'], header['size']) == (
        'image', 'q', SIZE)
    assert repositories.read_all(repo, 'image') == (
        noise(1000) + bytes(SIZE - 1000))
    with pytest.raises(exceptions.ImageExists):
        volume.snapshot('image', '')
    with pytest.raises(exceptions.InvalidParameter):
        volume.snapshot('a/b', '')
    volume.resize(2 * SIZE)
    volume.write(b'end', 2 * SIZE - 3)
    assert volume.read(4, 2 * SIZE - 4) == b'\0end'
    volume.resize(512)
    assert volume.read(512, 0) == noise(1000)[:512]
    for wrong in (0, 513, 1 << 47):
        with pytest.raises(exceptions.InvalidParameter):
            volume.resize(wrong)
    volume.renew()


def test_a_clone_needs_an_image_of_the_same_handle(path, repo):
    repositories.put(repo, 'image', noise(5000))
    with repositories.open_repository(path) as other:
        image = other.handle().open_image('image')
        with pytest.raises(exceptions.InvalidParameter):
            repo.handle().create_volume('disk', 0, '', bytes(16), image)
        image.close()
    with pytest.raises(exceptions.ClosedError):
        repo.handle().create_volume('disk', 0, '', bytes(16), image)
    with pytest.raises(exceptions.ImageNotFound):
        repo.handle().look_at_volume('disk')


def test_closing(path, repo, volume):
    lock = path / 'volumes/disk/lock'
    assert repositories.lock_held(lock, 0) == 'exclusive'
    with pytest.raises(exceptions.BusyError, match='volume disk is in use'):
        repo.handle().open_volume('disk')
    with pytest.raises(exceptions.BusyError, match='volume disk is in use'):
        repo.handle().delete_volume('disk')
    volume.write(b'kept', 0)
    volume.close()
    volume.close()
    assert repositories.lock_held(lock, 0) is None
    for call in (lambda: volume.read(1, 0), lambda: volume.write(b'x', 0),
                 lambda: volume.readinto(bytearray(1), 0),
                 lambda: volume.zero(1, 0), volume.flush, volume.checkpoint,
                 lambda: volume.extents(1, 0), volume.needs_checkpoint,
                 volume.renew, lambda: volume.snapshot('i', ''),
                 lambda: volume.resize(512), volume.info):
        with pytest.raises(exceptions.ClosedError, match='volume is closed'):
            call()
    again = repo.handle().open_volume('disk')
    assert again.read(4, 0) == b'kept'
    del again
    gc.collect()
    assert repositories.lock_held(lock, 0) is None


def test_a_volume_outlives_its_repository(path, repo, volume):
    repo.close()
    volume.write(b'late', 0)
    assert volume.read(4, 0) == b'late'
    volume.checkpoint()
    volume.close()
    assert repositories.lock_held(path / 'volumes/disk/lock', 0) is None


def test_fork(path, repo, volume):
    """The child cannot use the volume, and does not release its lock."""
    volume.write(b'parent', 0)

    def child():
        nonlocal volume
        for call in (lambda: volume.read(1, 0), lambda: volume.write(b'x', 0),
                     volume.flush, volume.info, volume.checkpoint):
            with pytest.raises(exceptions.ClosedError, match='before a fork'):
                call()
        volume.close()
        with pytest.raises(exceptions.BusyError):
            repo.handle().open_volume('disk')
        del volume
        gc.collect()
        with pytest.raises(exceptions.BusyError):
            repo.handle().open_volume('disk')
        return True

    assert repositories.in_child(child)
    lock = path / 'volumes/disk/lock'
    assert repositories.lock_held(lock, 0) == 'exclusive'
    volume.write(b'again!', 6)
    volume.checkpoint()
    assert volume.read(12, 0) == b'parentagain!'


def test_fork_while_threads_work(volume):
    """The child is not blocked by a lock that a thread had at the fork."""
    stop = threading.Event()

    def work(at):
        while not stop.is_set():
            volume.write(noise(3000, at), at)
            volume.read(3000, at)
            volume.checkpoint()
    threads = [threading.Thread(target=work, args=(n * PART,))
               for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            def child():
                with pytest.raises(exceptions.ClosedError):
                    volume.read(1, 0)
                volume.close()
                return True
            assert repositories.in_child(child)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for n in range(3):
        assert volume.read(3000, n * PART) == noise(3000, n * PART)


def test_closing_while_threads_work(path, repo, volume):
    """Running calls complete, and later ones raise ClosedError."""
    results = []

    def work(at):
        try:
            while True:
                volume.write(b'%8d' % at, at)
                assert volume.read(8, at) == b'%8d' % at
        except exceptions.ClosedError:
            results.append(at)
    threads = [threading.Thread(target=work, args=(n * PART,))
               for n in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        volume.checkpoint()
    volume.close()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == [n * PART for n in range(4)]
    assert repositories.lock_held(path / 'volumes/disk/lock', 0) is None
    again = repo.handle().open_volume('disk')
    for n in range(4):
        assert again.read(8, n * PART) == b'%8d' % (n * PART)
    again.close()


def test_a_buffer_that_changes_while_it_is_written(repo, volume):
    """A record is consistent if a thread changes the buffer meanwhile."""
    room = bytearray(PART)
    stop = threading.Event()

    def change():
        n = 0
        while not stop.is_set():
            n += 1
            room[:] = bytes([n % 256]) * PART
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(100):
            volume.write(room, 0)
            volume.read(PART, 0)
    finally:
        stop.set()
        thread.join()
    found = volume.read(PART, 0)
    volume.close()
    again = repo.handle().open_volume('disk')
    assert again.read(PART, 0) == found
    again.close()
