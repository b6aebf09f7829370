# SPDX-License-Identifier: Apache-2.0

"""Volumes are used through the API."""

import os
import random
import select
import signal
import threading
import time

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import scopes
from glance_dedup.repository import openvolumes
from tests.support import repositories
from tests.support.repositories import mixture
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all

PART = 65536
SIZE = 5 * PART + 3 * 512
MIB = 1 << 20
LIMIT = 60      # seconds for anything


@pytest.fixture(params=['fixed', 'content-defined'])
def path(request, tmp_path):
    parameters = {'block_size': 512, 'group_slots': 64, 'segment_size': 4096}
    if request.param == 'content-defined':
        parameters.update(block_size=4096, chunking='content-defined 512 1024')
    return repositories.create(tmp_path / 'repository', **parameters)


@pytest.fixture
def repo(path):
    with open_repository(path) as repo:
        yield repo


def make(repo, name='disk', size=SIZE, **options):
    openvolumes.create(repo, name, size, part_size=PART, **options)
    return openvolumes.open_volume(repo, name)


# -- the calls ----------------------------------------------------------------

def test_a_repository_without_volumes(tmp_path):
    path = repositories.create(tmp_path / 'r')
    with open_repository(path) as repo:
        assert openvolumes.names(repo) == []
        for call in (lambda: openvolumes.open_volume(repo, 'disk'),
                     lambda: openvolumes.look(repo, 'disk'),
                     lambda: openvolumes.delete(repo, 'disk')):
            with pytest.raises(exceptions.ImageNotFound):
                call()
        assert repo.features == []
        openvolumes.create(repo, 'disk', SIZE)
        assert repo.features == ['volumes']


def test_the_directory_is_missing(path, repo):
    (path / 'volumes').rmdir()
    for call in (lambda: openvolumes.create(repo, 'disk', SIZE),
                 lambda: openvolumes.open_volume(repo, 'disk'),
                 lambda: openvolumes.look(repo, 'disk'),
                 lambda: openvolumes.delete(repo, 'disk'),
                 lambda: openvolumes.names(repo)):
        with pytest.raises(exceptions.StorageError, match='volumes is miss'):
            call()


def test_life(path, repo):
    assert openvolumes.names(repo) == []
    openvolumes.create(repo, 'disk', SIZE, project='p', scope='project')
    assert openvolumes.names(repo) == ['disk']
    stat = openvolumes.look(repo, 'disk')
    assert (stat.name, stat.state, stat.size, stat.project, stat.source) == (
        'disk', 'ready', SIZE, 'p', '')
    assert stat.scope == scopes.of_project('p').hex()
    assert stat.part_size == 256 * MIB
    assert not openvolumes.is_in_use(repo, 'disk')
    with openvolumes.open_volume(repo, 'disk') as volume:
        assert openvolumes.is_in_use(repo, 'disk')
        assert volume.size == SIZE
        info = volume.info()
        assert (info.volume_id, info.broken) == (stat.volume_id, '')
        volume.write(b'x', 0)
        assert volume.info().journal_records == 1
        with pytest.raises(exceptions.BusyError):
            openvolumes.delete(repo, 'disk')
    with pytest.raises(exceptions.ImageExists, match='disk'):
        openvolumes.create(repo, 'disk', SIZE)
    openvolumes.delete(repo, 'disk')
    assert openvolumes.names(repo) == []
    assert repo.recipes() == []
    for call in (openvolumes.delete, openvolumes.open_volume,
                 openvolumes.look, openvolumes.is_in_use):
        with pytest.raises(exceptions.ImageNotFound):
            call(repo, 'disk')
    repositories.require_clean(path)


@pytest.mark.parametrize('call', [
    lambda volume: volume.read(-1, 0), lambda volume: volume.read(1, -1),
    lambda volume: volume.read(1 << 70, 0),
    lambda volume: volume.read(1, SIZE),
    lambda volume: volume.write(b'x', -1), lambda volume: volume.zero(-1, 0),
    lambda volume: volume.zero(1, 1 << 70), lambda volume: volume.zero('1', 0),
    lambda volume: volume.readinto(bytearray(1), -1),
    lambda volume: list(volume.extents(-1)),
    lambda volume: list(volume.extents(0, SIZE + 1)),
    lambda volume: list(volume.extents(SIZE + 1)),
    lambda volume: volume.resize(-512), lambda volume: volume.resize(1 << 64),
    lambda volume: volume.snapshot('a\0b'),
    lambda volume: volume.snapshot('a/b'),
    lambda volume: volume.snapshot('i', 'p\0'),
    lambda volume: volume.snapshot(f'v_{"a" * 32}_0_1')])
def test_wrong_arguments(repo, call):
    with make(repo) as volume:
        with pytest.raises(exceptions.InvalidParameter):
            call(volume)
        assert volume.read(SIZE, 0) == bytes(SIZE)


@pytest.mark.parametrize('arguments, options', [
    (('disk',), {}), (('disk', 0), {}), (('disk', -512), {}),
    (('disk', 1 << 64), {}), (('disk', 513), {}), ((5, SIZE), {}),
    (('a\0b', SIZE), {}), (('disk', SIZE), {'project': 5}),
    (('disk', SIZE), {'scope': 'tenant'}),
    (('disk', SIZE), {'project': 'x' * 129})])
def test_wrong_plans(repo, arguments, options):
    with pytest.raises(exceptions.InvalidParameter):
        openvolumes.create(repo, *arguments, **options)
    assert openvolumes.names(repo) == []


def test_extents_of_any_number(repo):
    with make(repo) as volume:
        for at in range(0, SIZE, 64):
            volume.write(b'x', at)
        found = list(volume.extents())
        assert len(found) == 2 * -(-SIZE // 64)
        assert [e.offset for e in found[1:]] == [
            e.offset + e.length for e in found[:-1]]
        assert found[-1].offset + found[-1].length == SIZE
        assert {e.length for e in found if not e.zeros} == {1}
        assert list(volume.extents(SIZE)) == []
        assert list(volume.extents(64, 2)) == [
            openvolumes.VolumeExtent(64, 1, False),
            openvolumes.VolumeExtent(65, 1, True)]


# -- a model ------------------------------------------------------------------

def require_extents(volume, model):
    end = 0
    for extent in volume.extents():
        assert extent.offset == end
        end += extent.length
        if extent.zeros:
            assert not any(model[extent.offset:end])
    assert end == len(model)


@pytest.mark.parametrize('seed', range(3))
def test_model(path, repo, seed):
    """A volume under random calls matches a bytearray, as do its images."""
    rng = random.Random(seed)
    base = mixture(3 * PART + 700, seed)
    put(repo, 'base', base)
    model = bytearray(base + bytes(SIZE - len(base)))
    with repo.open_image('base') as image:
        volume = make(repo, image=image)
    images = {'base': base}
    repo.delete('base')
    del images['base']
    largest = max(rng.choices((3000, 3 * PART), k=3))
    for step in range(250):
        offset = rng.randrange(len(model))
        length = min(len(model) - offset,
                     int(largest ** rng.random()))
        what = rng.choices(
            ('write', 'zero', 'read', 'flush', 'checkpoint', 'reopen',
             'snapshot', 'resize', 'renew'),
            (40, 10, 30, 3, 5, 3, 2, 2, 2))[0]
        if what == 'write':
            data = (rng.randbytes(length) if rng.randrange(4)
                    else bytes(length))
            volume.write(data, offset)
            model[offset:offset + length] = data
        elif what == 'zero':
            volume.zero(length, offset)
            model[offset:offset + length] = bytes(length)
        elif what == 'read':
            assert volume.read(length, offset) == (
                model[offset:offset + length])
        elif what == 'snapshot':
            name = f'image-{step}'
            assert volume.snapshot(name, 'p').size == len(model)
            images[name] = bytes(model)
        elif what == 'resize':
            size = rng.randrange(1, 2 * SIZE // 512) * 512
            volume.resize(size)
            model[size:] = b''
            model += bytes(size - len(model))
        elif what == 'reopen':
            volume.close()
            volume = openvolumes.open_volume(repo, 'disk')
        else:
            getattr(volume, what)()
        if step % 25 == 0:
            require_extents(volume, model)
    assert volume.read(len(model), 0) == model
    volume.close()
    for name, data in images.items():
        assert read_all(repo, name) == data, name
    repositories.require_clean(path)
    openvolumes.delete(repo, 'disk')
    assert repo.recipes() == sorted(images)


# -- clones -------------------------------------------------------------------

def test_clone_shares_and_stays(path, repo):
    data = noise(2 * PART + 5000)
    put(repo, 'image', data)
    with repo.open_image('image') as image:
        assert openvolumes.create(repo, 'disk', image=image) == 0
    repo.delete('image')
    stat = openvolumes.look(repo, 'disk')
    size = -(-len(data) // 512) * 512
    assert (stat.size, stat.source) == (size, 'image')
    assert repo.stat(f'v_{stat.volume_id}_base_0').new_bytes == 0
    with openvolumes.open_volume(repo, 'disk') as volume:
        assert volume.read(size, 0) == data + bytes(size - len(data))
    with pytest.raises(exceptions.InvalidParameter, match='less than'):
        put(repo, 'image', data)
        with repo.open_image('image') as image:
            openvolumes.create(repo, 'other', 512, image=image)


def test_clone_of_a_damaged_recipe(path, repo):
    """Pages of the recipe that a read has kept do not hide the damage."""
    put(repo, 'image', bytes(PART))
    with repo.open_image('image') as image:
        assert image.readinto(bytearray(PART), 0) == PART
        repositories.ruin(path / 'images' / 'image', 4096 + 20)
        with pytest.raises(exceptions.DamagedError, match='images/image'):
            openvolumes.create(repo, 'disk', image=image, part_size=PART)


def test_clone_into_another_scope(repo):
    data = noise(PART)
    put(repo, 'image', data)
    with repo.open_image('image') as image:
        assert openvolumes.create(repo, 'disk', image=image, project='p',
                                  scope='project') == len(data)
    with openvolumes.open_volume(repo, 'disk') as volume:
        assert volume.read(len(data), 0) == data
        # Its snapshots are in this scope, too.
        assert volume.snapshot('shot', 'p').scope == (
            scopes.of_project('p').hex())


def base_of(repo):
    return f'v_{openvolumes.look(repo, "disk").volume_id}_base_0'


def clone(repo, size):
    """Clone an image of noise, and store a new version of part 1."""
    put(repo, 'image', noise(size))
    with repo.open_image('image') as image:
        openvolumes.create(repo, 'disk', image=image, part_size=PART)
    with openvolumes.open_volume(repo, 'disk') as volume:
        volume.write(noise(PART, 7), PART)
        volume.checkpoint()


@pytest.mark.parametrize('damage', [
    lambda recipe: recipe.unlink(),
    lambda recipe: repositories.ruin(recipe, 100),
    lambda recipe: os.truncate(recipe, 4096),
    lambda recipe: recipe.write_bytes(b'')])
def test_the_base_is_missing_or_damaged(path, repo, damage):
    """V7: reads of a missing base fail; data written later can be read."""
    clone(repo, 3 * PART)
    base = base_of(repo)
    damage(path / 'images' / base)
    with openvolumes.open_volume(repo, 'disk') as volume:
        for offset in (0, 2 * PART):
            with pytest.raises(exceptions.DamagedError, match=base):
                volume.read(512, offset)
        assert volume.read(PART, PART) == noise(PART, 7)
        volume.write(noise(512, 8), 100)
        volume.flush()
        # The rest of this part would have to come from the base.
        with pytest.raises(exceptions.DamagedError, match=base):
            volume.checkpoint()
    with openvolumes.open_volume(repo, 'disk') as volume:
        assert volume.read(512, 100) == noise(512, 8)
        with pytest.raises(exceptions.DamagedError, match=base):
            volume.read(1, 99)
    openvolumes.delete(repo, 'disk')
    assert read_all(repo, 'image') == noise(3 * PART)


def test_an_image_that_is_damaged_is_cloned(path, repo):
    """An image with damaged blocks can be cloned; reading them fails."""
    put(repo, 'image', noise(PART))
    group = repositories.Group(path, 1)
    repositories.ruin(group.path, group.data_start() + 100)
    with repo.open_image('image') as image:
        openvolumes.create(repo, 'disk', image=image, part_size=PART)
    with openvolumes.open_volume(repo, 'disk') as volume:
        with pytest.raises(exceptions.DamagedError):
            volume.read(PART, 0)
        assert volume.read(512, PART - 512) == noise(PART)[-512:]
        # Data written over the damage is whole, and is stored.
        volume.write(noise(PART, 7), 0)
        volume.checkpoint()
        assert volume.read(PART, 0) == noise(PART, 7)


# -- several owners -----------------------------------------------------------

def test_one_of_many_threads_opens_it(repo):
    openvolumes.create(repo, 'disk', SIZE)
    results = []
    barrier = threading.Barrier(6)

    def work():
        barrier.wait()
        try:
            results.append(openvolumes.open_volume(repo, 'disk'))
        except exceptions.BusyError:
            results.append(None)
    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    opened = [volume for volume in results if volume is not None]
    assert len(opened) == 1 and len(results) == 6
    opened[0].close()


def test_one_of_many_threads_makes_it(repo):
    put(repo, 'image', noise(5000))
    results = []
    barrier = threading.Barrier(6)

    def work():
        with repo.open_image('image') as image:
            barrier.wait()
            try:
                results.append(openvolumes.create(repo, 'disk', image=image))
            except exceptions.ImageExists:
                results.append(None)
    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count(None) == 5 and len(results) == 6
    assert openvolumes.look(repo, 'disk').state == 'ready'


def test_two_processes(path, repo):
    volume = make(repo)
    volume.write(b'mine', 0)

    def refused():
        with open_repository(path) as own:
            for call in (openvolumes.open_volume, openvolumes.delete):
                with pytest.raises(exceptions.BusyError, match='in use'):
                    call(own, 'disk')
            assert openvolumes.is_in_use(own, 'disk')
            assert openvolumes.look(own, 'disk').size == SIZE
        return True

    def theirs():
        with open_repository(path) as own, openvolumes.open_volume(
                own, 'disk') as volume:
            assert volume.read(4, 0) == b'mine'
            volume.write(b'hers', 0)
        return True
    assert repositories.in_child(refused)
    volume.close()
    assert repositories.in_child(theirs)
    with openvolumes.open_volume(repo, 'disk') as volume:
        assert volume.read(4, 0) == b'hers'


def test_fork(path, repo):
    """The child's repository opens again; the volume stays the parent's."""
    volume = make(repo)
    volume.write(b'parent', 0)

    def child():
        for call in (lambda: volume.read(1, 0), lambda: volume.size,
                     lambda: volume.write(b'x', 0), volume.flush,
                     lambda: list(volume.extents())):
            with pytest.raises(exceptions.ClosedError):
                call()
        volume.close()
        with pytest.raises(exceptions.BusyError):
            openvolumes.open_volume(repo, 'disk')
        with make(repo, 'of-child') as own:
            own.write(b'child', 0)
        return True
    assert repositories.in_child(child)
    assert volume.read(6, 0) == b'parent'
    volume.snapshot('image')
    volume.close()
    with openvolumes.open_volume(repo, 'of-child') as volume:
        assert volume.read(5, 0) == b'child'


@pytest.mark.parametrize('seed', range(4))
def test_killed(path, repo, seed):
    """After a kill flushed data exists; other writes are old or new."""
    rng = random.Random(seed)
    unit = 4096
    openvolumes.create(repo, 'disk', 4 * PART, part_size=PART)
    units = 4 * PART // unit
    reading, writing = os.pipe()

    def child():
        with open_repository(path) as own:
            volume = openvolumes.open_volume(own, 'disk')
            generation = 0
            while True:
                generation += 1
                for n in range(units):
                    volume.write(b'%08d' % generation * (unit // 8), n * unit)
                volume.flush()
                os.write(writing, b'%08d' % generation)
                if generation % 3 == 0:
                    volume.checkpoint()
    pid, pipe = repositories.fork_child(child)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], LIMIT)
    time.sleep(rng.random())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pipe)
    assert ready
    while piece := os.read(reading, 8):
        flushed = int(piece)
    os.close(reading)
    with openvolumes.open_volume(repo, 'disk') as volume:
        found = [volume.read(unit, n * unit) for n in range(units)]
        kinds = [b'%08d' % n * (unit // 8) for n in (flushed, flushed + 1)]
        assert all(piece in kinds for piece in found)
        # The writes took effect in their order.
        assert found == sorted(found, reverse=True)
        volume.checkpoint()
        assert [volume.read(unit, n * unit) for n in range(units)] == found
    repositories.require_clean(path)


# -- threads ------------------------------------------------------------------

def in_threads(*functions):
    """Run functions in parallel; the first one's end ends the others."""
    stop = threading.Event()
    errors = []

    def run(function):
        try:
            function(stop)
        except BaseException as e:
            errors.append(e)
            stop.set()
    threads = [threading.Thread(target=run, args=(function,))
               for function in functions]
    for thread in threads:
        thread.start()
    threads[0].join()
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_threads_that_write_different_ranges(path, repo):
    models = [bytearray(PART) for _ in range(6)]
    volume = make(repo, size=6 * PART)

    def writer(n):
        # Each writer writes from the middle of a part to that of the next, so
        # that two writers share each part.
        start = n * PART + PART // 2 if n < 5 else 0
        length = PART if n < 5 else PART // 2

        def work(stop):
            rng = random.Random(n)
            model = models[n]
            while not stop.is_set():
                offset = rng.randrange(length)
                size = rng.randrange(1, min(9000, length - offset + 1))
                if rng.randrange(5):
                    data = rng.randbytes(size)
                    volume.write(data, start + offset)
                else:
                    data = bytes(size)
                    volume.zero(size, start + offset)
                model[offset:offset + size] = data
                if rng.randrange(3) == 0:
                    assert volume.read(length, start) == model[:length]
        return work

    def checkpoints(stop):
        for _ in range(15):
            volume.checkpoint()
            volume.flush()
            volume.renew()
            time.sleep(0.02)
    in_threads(checkpoints, *map(writer, range(6)))
    expected = (bytes(models[5][:PART // 2]) + b''.join(models[:5]))
    assert volume.read(len(expected), 0) == expected
    volume.close()
    with openvolumes.open_volume(repo, 'disk') as volume:
        assert volume.read(len(expected), 0) == expected
    repositories.require_clean(path)


# Long: a hundred snapshots are made during writes and checkpoints.
def test_snapshots_are_of_one_moment(path, repo):
    """A snapshot never has a later write without the one before it."""
    parts = 48
    volume = make(repo, size=parts * PART)
    # A snapshot takes a while from the first to the second.
    for part in range(parts):
        volume.write(noise(PART, part), part * PART)
    first, second = 700, (parts - 1) * PART + 100

    def write(stop):
        count = 0
        while not stop.is_set():
            count += 1
            volume.write(b'%08d' % count * 3, first)
            volume.write(b'%08d' % count * 3, second)
    pairs = set()

    def snapshots(stop):
        for n in range(100):
            if stop.is_set():
                return
            volume.snapshot('image')
            with repo.open_image('image') as image:
                a, b = image.read(24, first), image.read(24, second)
            assert a[:8] * 3 == a and b[:8] * 3 == b
            pairs.add((int(a[:8]), int(b[:8])))
            repo.delete('image')
    volume.write(b'%08d' % 0 * 3, first)
    volume.write(b'%08d' % 0 * 3, second)

    def checkpoints(stop):
        while not stop.is_set():
            volume.checkpoint()
            time.sleep(0.001)
    in_threads(snapshots, write, checkpoints)
    assert len(pairs) > 30
    assert {a - b for a, b in pairs} <= {0, 1}
    volume.close()
    repositories.require_clean(path)


def test_resizing_while_threads_work(repo):
    volume = make(repo, size=4 * PART)

    def resize(stop):
        for _ in range(20):
            volume.resize(PART + 512)
            assert volume.read(512, PART) == b'k' * 512
            volume.resize(4 * PART)
            # Lost data does not come back.
            found = volume.read(PART, 2 * PART)
            assert found.strip(b'x\0') == b''

    def work(stop):
        while not stop.is_set():
            try:
                volume.write(b'x' * 5000, 3 * PART - 2500)
            except exceptions.InvalidParameter:
                pass
            volume.write(b'k' * 512, PART)
    volume.write(b'k' * 512, PART)
    in_threads(resize, work, work)
    volume.close()
