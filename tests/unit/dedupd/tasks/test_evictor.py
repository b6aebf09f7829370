# SPDX-License-Identifier: Apache-2.0

"""Evicting from a cache: the chosen images, and the end of a run.

The tests compare the space on the disk. So groups have a megabyte here and
free whole pages.
"""

import contextlib
import dataclasses
import shutil
import subprocess
import sys
import threading
import time

import pytest

from dedupd.compute.cache import cache_catalog
from dedupd import opts
from dedupd.schedule import task_scheduler
from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import evictor
from dedupd.tasks import registry
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import reserve
from glance_dedup.repository import space
from tests.support import disks
from tests.support import maintenance
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put

MIB = 1 << 20
LIMIT = 60      # seconds for each wait


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch):
    monkeypatch.setattr(reserve, 'RESERVE_BYTES', 1 << 16)


def create(directory, **parameters):
    return repositories.create(
        directory / 'repository', block_size=4096, group_slots=256,
        segment_size=65536, **parameters)


@pytest.fixture
def path(tmp_path):
    return create(tmp_path)


@pytest.fixture
def repo(path):
    with repositories.open_repository(path, codec='none',
                                      lock_timeout=0.1) as repo:
        yield repo


@pytest.fixture
def held(repo):
    with contextlib.closing(cache_catalog.Held(repo)) as held:
        yield held


def add(repo, held, name, *parts):
    """Store an image of noise and note it; `parts` are (seed, KiB)."""
    data = b''.join(noise(kib << 10, seed) for seed, kib in parts)
    put(repo, name, data)
    held.note(name, len(data), None)
    return data


@pytest.fixture
def model(repo, held):
    """Store six images of 1 MiB each, with half a megabyte in common."""
    return {f'image-{n}': add(repo, held, f'image-{n}', (n, 1024), (99, 512))
            for n in range(6)}


@pytest.fixture
def maintainer(repo, model):
    with maintaining(repo) as maintainer:
        maintenance.account(maintainer)
        yield maintainer


def returns(coming):
    return coming if callable(coming) else lambda: coming


def evict(maintainer, held, limit, coming=0, pace=None, **shares):
    return evictor.run_once(maintainer, pace or pacing.Pace(), held,
                            int(limit), returns(coming), **shares)


def plan(maintainer, held, limit, coming=0):
    return evictor.plan(maintainer, pacing.Pace(), held, int(limit),
                        returns(coming))


def taken(path):
    """Return the repository's size as du reports it."""
    done = subprocess.run(['du', '--block-size=1', '--summarize', path],
                          capture_output=True, check=True, timeout=LIMIT)
    return int(done.stdout.split()[0])


def need(repo, model, gone):
    """Require that all images but some are there, unchanged."""
    maintenance.require_contents(
        repo, {name: data for name, data in model.items()
               if name not in gone})


# -- evicted images -----------------------------------------------------------

def test_the_least_recently_used_go_first(maintainer, repo, path, held,
                                          model):
    held.used('image-0')
    held.used('image-1')
    before = taken(path)
    limit = before - 2.5 * MIB
    planned = plan(maintainer, held, limit)
    assert planned.images == ['image-2', 'image-3', 'image-4']
    assert planned.blocks == 3 * 256 and planned.in_use == 0
    assert abs(planned.over_bytes - 2.5 * MIB) < 65536
    need(repo, model, ())
    result = evict(maintainer, held, limit)
    assert result.evicted == planned.images
    assert result.disk_bytes == before - taken(path) > 2.5 * MIB
    assert (result.refused, result.short, result.failed) == (None, None, {})
    assert held.evictions == 3
    assert held.status()['disk_bytes'] == taken(path) < limit
    need(repo, model, result.evicted)
    maintenance.require_collected(maintainer)
    repositories.require_clean(path)
    # The next run evicts nothing.
    assert evict(maintainer, held, limit).evicted == []


def test_what_is_not_known_goes_before_all(maintainer, repo, path, held):
    put(repo, 'unknown', noise(MIB, 77))
    result = evict(maintainer, held, taken(path) - MIB // 2)
    assert result.evicted == ['unknown']


def test_below_the_limit_nothing_is_looked_at(maintainer, path, held):
    log = maintenance.Log()
    maintenance.watch(maintainer, log)
    for limit in (taken(path) + 65536, 0):
        result = evict(maintainer, held, limit)
        assert result == evictor.Result([], 0, 0, None, None, {})
    maintenance.unwatch(maintainer)
    # The run only checks, each time, that it is the maintainer.
    assert log.calls == 2 * [
        'engine.lock', 'catalog.is_opened_elsewhere']


def test_what_is_dead_already_goes_first(maintainer, repo, path, held,
                                         model):
    """No image is evicted if a collection frees enough space."""
    repo.delete('image-5')
    with repo.begin('given-up') as transaction:
        transaction.write(noise(MIB, 55))
        transaction.keep()
    result = evict(maintainer, held, taken(path) - 1.9 * MIB)
    assert result.evicted == [] and result.disk_bytes > 1.9 * MIB
    need(repo, model, ['image-5'])
    # The plan evicts no image either.
    repo.delete('image-4')
    planned = plan(maintainer, held, taken(path) - 0.9 * MIB)
    assert planned.images == [] and planned.over_bytes == 0


def test_what_is_on_its_way_needs_room_too(maintainer, repo, path, held,
                                           model):
    result = evict(maintainer, held, taken(path) + MIB, coming=3 * MIB)
    assert result.evicted == ['image-0', 'image-1']
    assert taken(path) < sum(map(len, model.values())) - 2 * MIB


def test_what_came_meanwhile_does_not_count_twice(
        maintainer, repo, path, held, model):
    """An image that arrives during a run is not counted twice."""
    left = [3 * MIB]

    class Arriving(pacing.Pace):
        def step(self, *args, **options):
            if left[0]:
                model['new'] = add(repo, held, 'new', (500, 3 * 1024))
                left[0] = 0
            super().step(*args, **options)

    limit = taken(path) + 2 * MIB
    result = evict(maintainer, held, limit, lambda: left[0], Arriving())
    assert 0 < len(result.evicted) <= 2
    assert taken(path) <= limit
    need(repo, model, result.evicted)


def test_images_that_share_nearly_all(repo, path, held):
    """The evictor estimates well for similar images and seldom collects."""
    for n in range(40):
        add(repo, held, f'image-{n:02}', (99, 2048), (n, 32))
    with maintaining(repo) as maintainer:
        maintenance.account(maintainer)
        log = maintenance.Log()
        maintenance.watch(maintainer, log)
        result = evict(maintainer, held, taken(path) - 24 * 32768)
        maintenance.unwatch(maintainer)
        assert 24 <= len(result.evicted) <= 27
        assert result.evicted == [
            f'image-{n:02}' for n in range(len(result.evicted))]
        assert len(log.where('catalog.txids')) <= 5     # a reconcile each
        # The shared blocks go with the last image.
        result = evict(maintainer, held, 1.5 * MIB)
        assert result.evicted[-1] == 'image-39' and repo.images() == []
        assert taken(path) < MIB


def test_what_is_not_counted_yet(maintainer, repo, path, held, model):
    """An image without a count or a use is evicted first.

    It was committed after the first collection.
    """
    def commit():
        put(repo, 'late', noise(2 * MIB, 66))
    maintenance.watch(maintainer, maintenance.Once('engine.spool', commit,
                                                   before=False))
    result = evict(maintainer, held, taken(path) - 1.5 * MIB)
    maintenance.unwatch(maintainer)
    assert result.evicted[0] == 'late'
    assert set(result.evicted) < {'late', *model}
    maintenance.account(maintainer)
    maintenance.require_counted(maintainer)


def test_memory_of_a_round_is_bounded(maintainer, repo, path, held, model,
                                      monkeypatch):
    monkeypatch.setattr(maintainer_role, 'BATCH_BYTES', 1)
    result = evict(maintainer, held, taken(path) - 2.5 * MIB)
    assert result.evicted == ['image-0', 'image-1', 'image-2']


# -- images that stay ---------------------------------------------------------

def test_an_image_that_is_read_stays(maintainer, repo, path, held, model):
    with repo.open_image('image-0') as image, repo.open_image('image-2'):
        result = evict(maintainer, held, taken(path) - 1.5 * MIB)
        assert result.evicted == ['image-1', 'image-3']
        assert image.read() == model['image-0']
        result = evict(maintainer, held, 1.2 * MIB)
        assert result.in_use == 2 and result.evicted == ['image-4', 'image-5']
        assert '2 images are being read' in result.short
        assert 'limit_mib allows 1.2 MiB' in result.short
        assert repo.images() == ['image-0', 'image-2']
    result = evict(maintainer, held, 1.2 * MIB)
    assert result.evicted == ['image-0', 'image-2'] and not result.short


READER = '''
from glance_dedup.repository import image_repository
import sys
with image_repository.Repository(sys.argv[1], filter_dir=sys.argv[2],
                           filter_mib=1) as repo:
    with repo.open_image('image-0') as image:
        print('open', flush=True)
        sys.stdin.read()
        print(len(image.read()))
'''


def test_an_image_that_another_process_reads(maintainer, repo, path, held,
                                             model, tmp_path):
    reader = subprocess.Popen(
        [sys.executable, '-c', READER, path, tmp_path / 'other-filter'],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout.readline() == 'open\n'
        assert maintainer.engine.is_read('image-0')
        assert not maintainer.engine.is_read('image-1')
        result = evict(maintainer, held, taken(path) - MIB // 2)
        assert (result.evicted, result.in_use) == (['image-1'], 1)
        out, _ = reader.communicate('', timeout=LIMIT)
        assert int(out) == len(model['image-0'])
    finally:
        reader.kill()
        reader.wait()
    result = evict(maintainer, held, taken(path) - MIB // 2)
    assert (result.evicted, result.in_use) == (['image-0'], 0)


def test_to_ask_takes_nothing(maintainer, repo, path, held, model):
    """The check for readers takes no lock that refuses another process."""
    file = path / 'images' / 'image-0'
    assert not maintainer.engine.is_read('image-0')
    with open(file, 'rb') as f:
        assert repositories.set_lock(f.fileno(), repositories.USERS_BYTE,
                                     0)    # F_RDLCK
        assert maintainer.engine.is_read('image-0')
    assert not maintainer.engine.is_read('nothing')


def test_what_a_pull_holds_counts_as_given_back(maintainer, repo, path, held,
                                                model):
    """Space that a pull holds counts as freed.

    Otherwise the evictor would evict all images in vain.
    """
    with repo.begin('arriving') as transaction:
        # The pull holds every group, since it found blocks in each of them.
        for n in range(6):
            transaction.write(noise(4096, n))
        transaction.keep()
        limit = taken(path) - 1.5 * MIB
        for _ in range(3):
            result = evict(maintainer, held, limit)
            assert result.disk_bytes < MIB and not result.short
        assert held.evictions == 2
        assert taken(path) > limit
        need(repo, model, ['image-0', 'image-1'])
        transaction.abort()
    result = evict(maintainer, held, limit)
    assert result.evicted == [] and taken(path) <= limit


def test_an_image_that_cannot_be_deleted(maintainer, repo, path, held, model):
    """If an image cannot be deleted, the next one is evicted."""
    before = taken(path)
    with maintainer.image_lock('image-0'):
        result = evict(maintainer, held, before - MIB // 2)
        assert result.evicted == ['image-1']
        assert list(result.failed) == ['image-0']
        result = evict(maintainer, held, 1.2 * MIB)
        assert repo.images() == ['image-0']
        assert '1 could not be deleted' in result.short
    assert evict(maintainer, held, 1.2 * MIB).evicted == ['image-0']


def test_a_damaged_recipe_is_given_up(maintainer, repo, path, held, model):
    """A damaged recipe is given up, since it would prevent any collection.

    A cache can pull the image again.
    """
    add(repo, held, 'damaged', (44, 1024))
    recipe = path / 'images' / 'damaged'
    content = bytearray(recipe.read_bytes())
    content[4100] ^= 255
    recipe.write_bytes(content)
    before = taken(path)
    result = evict(maintainer, held, before - 2.5 * MIB)
    assert result.refused is None and result.short is None
    # The image's own megabyte is not enough.
    assert result.evicted == ['damaged', 'image-0', 'image-1']
    assert held.status()['images'] == 4
    need(repo, model, result.evicted)
    assert taken(path) <= before - 2.5 * MIB
    assert list((path / 'quarantine').glob('damaged-*'))


def test_a_damaged_recipe_that_is_read(maintainer, repo, path, held, model):
    """A damaged image is evicted first, even while a reader has it open."""
    data = noise(MIB, 44)
    put(repo, 'damaged', data)
    with repo.open_image('damaged') as image:
        recipe = path / 'images' / 'damaged'
        content = bytearray(recipe.read_bytes())
        content[4100] ^= 255
        recipe.write_bytes(content)
        result = evict(maintainer, held, 2 * MIB)
        assert result.evicted == ['damaged']
        assert 'cannot be read' in result.refused
        assert image.size == len(data)
        need(repo, model, ())
    result = evict(maintainer, held, 2 * MIB)
    assert result.refused is None and result.short is None
    need(repo, model, result.evicted)
    assert taken(path) <= 2 * MIB


@pytest.mark.parametrize('damaged', [False, True])
def test_backups_stay(tmp_path, damaged):
    """Backups are never evicted, not even unreadable ones.

    No other host could return them.
    """
    backup = 'b_web_20261123T180000Z'
    path = create(tmp_path)
    with (repositories.open_repository(path, codec='none') as repo,
          contextlib.closing(cache_catalog.Held(repo)) as held):
        data = {'image': add(repo, held, 'image', (1, 1024)),
                backup: add(repo, held, backup, (2, 2048))}
        recipe = path / 'images' / backup
        content = bytearray(recipe.read_bytes())
        if damaged:
            content[4100] ^= 255
            recipe.write_bytes(content)
        with maintaining(repo) as maintainer:
            maintenance.account(maintainer)
            assert bool(maintainer.unreadable.reasons()) == damaged
            result = evict(maintainer, held, 1.2 * MIB)
        assert result.short is not None and backup not in result.evicted
        assert recipe.read_bytes() == content
        if not damaged:
            assert result.evicted == ['image']
            maintenance.require_contents(repo, {backup: data[backup]})


def test_a_limit_that_is_too_small(maintainer, held, repo):
    for limit in (65535 + MIB, 1, -1):
        with pytest.raises(exceptions.InvalidParameter, match='limit_mib'):
            evict(maintainer, held, limit)
    assert len(repo.images()) == 6


# -- the disk's size ----------------------------------------------------------

@pytest.fixture
def small_disk(tmp_path):
    (tmp_path / 'small').mkdir()
    with disks.mounted(tmp_path / 'small', 'tmpfs') as root:
        yield root


def test_a_full_disk_is_a_limit_too(small_disk, tmp_path):
    """A full disk acts as the limit if there is no other limit."""
    path = create(small_disk)
    with repositories.open_repository(
            path, codec='none', filter_dir=str(tmp_path / 'filter')) as repo, \
            contextlib.closing(cache_catalog.Held(repo)) as held:
        model = {}
        with pytest.raises(exceptions.NoSpaceError):
            for n in range(200):
                model[f'image-{n:03}'] = add(
                    repo, held, f'image-{n:03}', (n, 1024))
        assert len(model) > 35
        with maintaining(repo) as maintainer:
            result = evict(maintainer, held, 0, coming=3 * MIB)
            assert result.evicted == [f'image-{n:03}' for n in range(
                len(result.evicted))]
            assert 2 <= len(result.evicted) <= 6
            free, kept = repo.room()
            assert free >= kept + 3 * MIB
            need(repo, model, result.evicted)
            add(repo, held, 'next', (500, 2048))
            assert evict(maintainer, held, 0).evicted == []


def test_nothing_goes_where_it_would_be_in_vain(small_disk, tmp_path):
    """No image is evicted if this would not help.

    Other files fill the disk, or the arriving image is larger than the disk.
    """
    path = create(small_disk)
    with repositories.open_repository(
            path, codec='none', filter_dir=str(tmp_path / 'filter')) as repo, \
            contextlib.closing(cache_catalog.Held(repo)) as held:
        model = {name: add(repo, held, name, (1, 100)) for name in 'ab'}
        with maintaining(repo) as maintainer:
            result = evict(maintainer, held, 0, coming=100 * MIB)
            assert result.evicted == []
            assert '100.0 MiB are on their way' in result.short
            filling, = disks.fill_bytes(small_disk)
            result = evict(maintainer, held, 0)
            assert result.evicted == []
            assert '0.0 MiB are free on the disk' in result.short
            need(repo, model, ())
            filling.unlink()


# -- stopping and dying -------------------------------------------------------

class Stopping(pacing.Pace):
    """A pace that stops the task after this many steps."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def step(self, *args, **kwargs):
        if not self.steps:
            self.stop()
        self.steps -= 1
        super().step(*args, **kwargs)


def test_it_can_be_stopped_after_each_step(maintainer, repo, path, held,
                                           model):
    limit = taken(path) - 2.5 * MIB
    for steps in range(1000):
        pace = Stopping(steps)
        try:
            evict(maintainer, held, limit, pace=pace)
        except pacing.Stopped:
            need(repo, model, set(model) - set(repo.images()))
        else:
            break
    assert steps > 5
    assert repo.images() == ['image-3', 'image-4', 'image-5']
    maintenance.require_collected(maintainer)


def test_progress(maintainer, path, held):
    seen = []
    evict(maintainer, held, taken(path) - 2.5 * MIB, pace=pacing.Pace(
        lambda *args: seen.append(args)))
    mine = [(done, total) for done, total, what in seen
            if what == 'evicting images']
    assert mine == sorted(mine) and len(mine) >= 4
    assert 0 <= mine[0][0] <= mine[-1][0] <= mine[-1][1]


# Long: the repository is copied, recovered and checked for each kill.
def test_killed_at_any_call(tmp_path, repo, path, held, model):
    """After a kill, only images due for eviction are gone; none is partial."""
    with maintaining(repo) as maintainer:
        maintenance.account(maintainer)
    held.save()
    repo.close()
    kept = tmp_path / 'kept'
    shutil.copytree(path, kept)
    calls = 0
    died = True
    while died:
        calls += 23
        shutil.rmtree(path)
        shutil.copytree(kept, path)
        with repositories.open_repository(path, codec='none') as repo:
            held = cache_catalog.Held(repo)
            maintainer = maintainer_role.Maintainer(repo)
            limit = taken(path) - 2.5 * MIB
            maintenance.watch(maintainer, maintenance.Kill(calls))
            try:
                evict(maintainer, held, limit)
                died = False
            except maintenance.Killed:
                pass
            finally:
                maintenance.kill(maintainer)
                held._dirty = False     # a kill would not write it either
                held.close()
            left = repo.images()
            assert left == sorted(model)[6 - len(left):] and len(left) >= 3
            need(repo, model, set(model) - set(left))
            with (maintaining(repo) as maintainer,
                  contextlib.closing(cache_catalog.Held(repo)) as held):
                evict(maintainer, held, limit)
                assert repo.images() == sorted(model)[3:]
                maintenance.account(maintainer)
                maintenance.require_counted(maintainer)
            repositories.require_clean(path)
    assert calls > 50


# -- concurrent work ----------------------------------------------------------

def test_beside_readers_and_uploads(repo, path, held, model):
    """A reader with an open image reads it; others may get ImageNotFound."""
    stopping = threading.Event()
    failures, reads = [], []

    def work(number):
        with repositories.open_repository(path, codec='none') as other:
            while not stopping.is_set():
                for name, data in model.items():
                    try:
                        with other.open_image(name) as image:
                            held.used(name)
                            assert image.read() == data
                            reads.append(name)
                    except exceptions.ImageNotFound:
                        with contextlib.suppress(exceptions.ImageExists):
                            put(other, name, data)
                            held.note(name, len(data), None)

    def guarded(number):
        try:
            work(number)
        except BaseException as e:
            failures.append(e)
    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    try:
        with maintaining(repo) as maintainer:
            deadline = time.monotonic() + LIMIT
            while held.evictions <= 5 or len(reads) <= 20:
                assert time.monotonic() < deadline, failures
                result = evict(maintainer, held, 3.5 * MIB)
                # No image is evicted twice, however soon it is stored again.
                assert len(result.evicted) == len(set(result.evicted))
    finally:
        stopping.set()
        for thread in threads:
            thread.join(LIMIT)
    assert not failures
    with maintaining(repo) as maintainer:
        result = evict(maintainer, held, 3.5 * MIB)
        assert not result.short and taken(path) <= 3.5 * MIB
        need(repo, model, set(model) - set(repo.images()))
        maintenance.require_counted(maintainer)
    repositories.require_clean(path)


# -- the task -----------------------------------------------------------------

def test_what_is_counted_is_what_du_says(maintainer, repo, path):
    for n in range(3):
        repo.delete(f'image-{n}')
    assert space.taken(path) == taken(path)
    accounting.run_once(maintainer, pacing.Pace())
    collector.run_once(maintainer, pacing.Pace())
    with repo.begin('arriving') as transaction:
        transaction.write(noise(MIB, 5))
        transaction.keep()
        assert space.taken(path) == taken(path)


def options():
    return opts.load()


def test_by_name(maintainer, repo, path, held):
    """The daemon and the command line run the same task by its name."""
    pace = pacing.Pace()
    settings = options().dedupd
    limit = taken(path) // MIB - 1
    planned = registry.run('evict', maintainer, pace, settings, held=held,
                           limit_mib=limit, dry_run=True).images
    assert planned[0] == 'image-0'
    assert registry.run('evict', maintainer, pace, settings, held=held,
                        coming=lambda: 1).evicted == []
    held.save()
    assert registry.run('evict', maintainer, pace, settings,
                        limit_mib=limit).evicted == planned


def test_the_daemon_of_a_cache_looks_each_minute(repo, path, held, model,
                                                 monkeypatch):
    monkeypatch.setitem(registry.TASKS, 'evict', dataclasses.replace(
        registry.TASKS['evict'], interval=1))
    conf = options()
    scheduler = task_scheduler.Scheduler(repo, conf)
    assert not scheduler.has('evict') and 'evict' not in scheduler.tasks()
    limit = 0
    held._limit = lambda: limit
    scheduler = task_scheduler.Scheduler(repo, conf, held, lambda: MIB)
    scheduler.start()
    try:
        repositories.eventually(
            lambda: scheduler.task('evict')['runs'] > 1, LIMIT)
        assert len(repo.images()) == 6
        limit = taken(path) - MIB // 2
        repositories.eventually(
            lambda: repo.images() == sorted(model)[2:], LIMIT)
        number = scheduler.request('evict', limit_mib=3)
        status = scheduler.wait('evict', number, LIMIT)
        assert status['last']['error'] is None
        assert status['failures'] == 0
    finally:
        scheduler.stop()
        assert scheduler.join(LIMIT)
