# SPDX-License-Identifier: Apache-2.0

"""Collection by partitions: the same slots, and wrong counts are found."""

import contextlib
import datetime
import os
import random
import signal
import subprocess

import pytest

from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import merger
from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import comparison
from glance_dedup.maintenance import rebuild_worker
from glance_dedup.maintenance import records
from glance_dedup.maintenance import refcount_rebuild
from glance_dedup.maintenance import refcounts
from glance_dedup.repository import openvolumes
from tests.support import maintenance
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put
from tests.unit.dedupd.tasks.collecting import collect

pytestmark = pytest.mark.slow

pytest_plugins = ['tests.support.maintainer_fixtures']

TWO = refcount_rebuild.local(2)


@pytest.fixture(autouse=True)
def small_partitions(monkeypatch):
    """Set one partition for each group."""
    monkeypatch.setattr(rebuild_worker, '_GROUPS', 1)


@pytest.fixture
def path(tmp_path):
    return maintenance.create(tmp_path)


def fill(repo, images=8):
    """Store and count images, and delete two of them."""
    for number in range(images):
        put(repo, f'image-{number}', content(number, number + 1, 50))
    with maintaining(repo) as maintainer:
        maintenance.account(maintainer)
    repo.delete('image-3')
    repo.delete('image-4')


# -- the same slots -----------------------------------------------------------

class History:
    """Random actions of each kind that changes counts."""

    def __init__(self, repo, seed):
        self.repo = repo
        self.rng = random.Random(seed)
        self.number = 0
        openvolumes.create(repo, 'disk', 200 * maintenance.BLOCK,
                           part_size=1 << 16)

    def new(self):
        self.number += 1
        return f'image-{self.number}'

    def act(self):
        rng = self.rng
        images = self.repo.images()
        what = rng.choice(['upload', 'upload', 'delete', 'copy', 'backup',
                           'volume', 'collect'])
        data = content(*(rng.randrange(25) for _ in range(4)),
                       blocks=rng.randrange(1, 12))
        if what == 'upload':
            put(self.repo, self.new(), data)
        elif what == 'delete' and images:
            self.repo.delete(rng.choice(images))
        elif what == 'copy' and images:
            with self.repo.open_image(rng.choice(images)) as image:
                self.repo.copy(image, self.new())
        elif what == 'backup':
            self.number += 1
            put(self.repo, imageids.backup_id(
                'disk', datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
                + datetime.timedelta(hours=self.number)), data)
        elif what == 'volume':
            with openvolumes.open_volume(self.repo, 'disk') as volume:
                volume.write(data, maintenance.BLOCK * rng.randrange(50))
                volume.checkpoint()
                volume.snapshot(self.new())
        elif what == 'collect':
            with maintaining(self.repo) as maintainer:
                collect(maintainer)

    def merge(self):
        """Store two equal images at once and merge their blocks."""
        data = repositories.noise(1 << 20, self.number)
        with contextlib.ExitStack() as stack:
            both = [stack.enter_context(self.repo.begin(self.new()))
                    for _ in range(2)]
            for transaction in both:
                transaction.write(data)
            for transaction in both:
                transaction.commit()
        with maintaining(self.repo) as maintainer:
            maintenance.account(maintainer)
            assert merger.run_once(maintainer, pacing.Pace()).images


@pytest.mark.parametrize('seed', range(5))
def test_the_same_slots(path, tmp_path, seed):
    """Partitions free the same slots as an ordinary collection of a copy."""
    with repositories.open_repository(path, codec='none') as repo:
        history = History(repo, seed)
        for _ in range(30):
            history.act()
        history.merge()
        for _ in range(10):
            history.act()
        put(repo, 'last', content(77))
        with maintaining(repo) as maintainer:
            maintenance.account(maintainer)
        repo.delete('last')
    other = tmp_path / 'other'
    subprocess.run(['cp', '-a', path, other], check=True, timeout=60)
    results = []
    for directory, hosts in (path, TWO), (other, ()):
        with (repositories.open_repository(directory, codec='none') as repo,
              maintaining(repo) as maintainer):
            results.append((collect(maintainer, hosts=hosts),
                            maintenance.live_slots(directory)))
            assert maintainer.warnings == []
            maintenance.require_counted(maintainer)
        repositories.require_clean(directory)
    assert results[0] == results[1]
    assert results[0][0].freed_blocks > 0


def test_nothing_is_there(repo, maintainer):
    result = collect(maintainer, hosts=TWO)
    assert result.refused is None and maintainer.warnings == []


@pytest.mark.parametrize('steps', [1, 3])
def test_begun_recipes(path, other, monkeypatch, steps):
    """A deleted image that is read keeps its blocks, though partly counted."""
    monkeypatch.setattr(maintenance.maintainer_role, 'BATCH_BYTES', 0)
    with maintaining(other):
        pass
    data = maintenance.scattered(1, pages=4)
    put(other, 'read', data)
    with maintaining(other) as maintainer:
        stop_after(maintainer, steps)
        with other.open_image('read') as image:
            other.delete('read')
            result = collect(maintainer, hosts=TWO)
            assert result.refused is None and result.freed_blocks == 0
            assert len(list(maintainer.catalog.all_begun())) == 1
            assert image.read() == data and maintainer.warnings == []
        result = collect(maintainer, hosts=TWO)
        assert result.freed_blocks == 51 * 4
        maintenance.require_collected(maintainer)


def stop_after(maintainer, steps):
    left = [steps]

    def progress(*_):
        left[0] -= 1
        if not left[0]:
            pace.stop()
    pace = pacing.Pace(progress)
    with pytest.raises(pacing.Stopped):
        accounting.run_once(maintainer, pace)


# -- concurrent changes -------------------------------------------------------

def during(what, action):
    """Return a pace that acts once when the counting reaches a step."""
    happened = []

    def progress(done, total, now):
        if now == what and not happened:
            happened.append(now)
            action()
    pace = pacing.Pace(progress)
    pace.happened = happened
    return pace


@pytest.mark.parametrize('when', ['reading images', 'adding up counts'])
def test_deletion_and_upload_meanwhile(path, repo, other, when):
    """Deletions and uploads during the counting cause no wrong count."""
    fill(repo)

    def act():
        for number in (0, 1, 6, 7):
            other.delete(f'image-{number}')
        put(other, 'image-7', content(80))
        put(other, 'new', content(81, 5))
    with maintaining(repo) as maintainer:
        pace = during(when, act)
        result = collector.run_once(maintainer, pace, hosts=TWO)
        assert pace.happened and result.refused is None
        assert maintainer.warnings == []
        maintenance.require_counted(maintainer)
        collect(maintainer)
        maintenance.require_collected(maintainer)
    assert repositories.read_all(repo, 'image-7') == content(80)
    assert repositories.read_all(repo, 'new') == content(81, 5)
    repositories.require_clean(path)


def test_deleted_image_that_is_read(path, repo):
    """A deleted image that is read is counted from its entry in the spool."""
    fill(repo)
    with repo.open_image('image-0') as image, maintaining(repo) as maintainer:
        repo.delete('image-0')
        result = collect(maintainer, hosts=TWO)
        assert result.refused is None and result.freed_blocks > 0
        assert maintainer.warnings == []
        assert image.read() == content(0, 1, 50)


def test_another_maintainer(repo, monkeypatch):
    """A maintainer that lost its locks does not set the catalog aside."""
    fill(repo)
    with maintaining(repo) as maintainer:
        maintenance.account(maintainer)
        miscount(maintainer, 1)
        monkeypatch.setattr(maintainer.catalog, 'is_opened_elsewhere',
                            lambda: True)
        with pytest.raises(exceptions.LostLocks):
            comparison.compare(maintainer, None, TWO)
        assert os.listdir(os.path.join(repo.path, 'quarantine')) == []


# -- wrong counts -------------------------------------------------------------

def miscount(maintainer, more):
    """Change a count of the first counted block."""
    catalog = maintainer.catalog
    (group, slot) = min(maintenance.counts(catalog))
    counts = block_addresses.unpack(catalog.chunk(group, 0))
    counts[slot] += more
    batch = catalog.batch()
    batch.put(records.counts_key(group, 0), counts.tobytes())
    catalog.write(batch, sync=True)


def forget(maintainer):
    """Drop all counts of a group."""
    catalog = maintainer.catalog
    batch = catalog.batch()
    batch.delete(records.counts_key(min(maintenance.counts(catalog))[0], 0))
    catalog.write(batch, sync=True)


def invent(maintainer):
    """Count blocks of a group that no recipe names."""
    batch = maintainer.catalog.batch()
    batch.put(records.counts_key(90, 0), b'\1' * records.CHUNK_BYTES)
    maintainer.catalog.write(batch, sync=True)


def misuse(maintainer):
    """Change how many blocks of a group are used."""
    batch = maintainer.catalog.batch()
    maintainer.catalog.set_group(batch, 1, used=1)
    maintainer.catalog.write(batch, sync=True)


@pytest.mark.parametrize('spoil, words', [
    (lambda m: miscount(m, -1), 'recipes name the block'),
    (lambda m: miscount(m, 1), 'recipes name the block'),
    (forget, '0 recipes name the block'),
    (invent, 'in 1 more pieces'), (misuse, 'of group 1 are used')])
def test_a_wrong_count_is_found_before_anything_is_freed(
        path, repo, spoil, words):
    fill(repo)
    model = {name: repositories.read_all(repo, name)
             for name in repo.images()}
    live = maintenance.live_slots(path)
    with maintaining(repo) as maintainer:
        maintenance.account(maintainer)
        spoil(maintainer)

        def look():
            assert maintenance.live_slots(path) == live
        pace = during('counting images', look)
        pace_ = during('adding up counts', look)
        both = pacing.Pace(lambda *step: (pace.step(*step), pace_.step(*step)))
        result = collector.run_once(maintainer, both, hosts=TWO, live_share=0,
                                    evacuate_share=0)
        assert pace_.happened
        warning, = maintainer.warnings
        assert words in warning and 'was rebuilt' in warning
        assert result.refused is None and result.freed_blocks > 0
        maintenance.require_collected(maintainer)
    maintenance.require_contents(repo, model)
    repositories.require_clean(path)


def test_it_begins_again_only_once(repo, monkeypatch):
    """A difference that remains after a rebuild does not cause another one."""
    fill(repo)
    monkeypatch.setattr(
        refcounts.Accounts, 'chunks', lambda self: 10**6)
    with maintaining(repo) as maintainer:
        live = maintenance.live_slots(repo.path)
        with pytest.raises(exceptions.DamagedError, match='more pieces'):
            collect(maintainer, hosts=TWO)
        assert len(maintainer.warnings) == 1
        assert maintenance.live_slots(repo.path) == live


def test_counts_that_reached_the_most(repo):
    """A count at its maximum stays there, so it is not compared."""
    fill(repo)
    with maintaining(repo) as maintainer:
        maintenance.account(maintainer)
        group, slot = min(maintenance.counts(maintainer.catalog))
        count = maintenance.counts(maintainer.catalog)[group, slot]
        miscount(maintainer, 2**32 - 1 - count)
        comparison.compare(maintainer, None, TWO)


# -- refused collections ------------------------------------------------------

def test_lost_recipe(path, repo):
    """Nothing is freed while a counted recipe is missing (N6.2)."""
    fill(repo)
    recipe, aside = path / 'images' / 'image-7', path / 'aside'
    with maintaining(repo) as maintainer:
        live = maintenance.live_slots(path)
        pace = during('reading images', lambda: os.rename(recipe, aside))
        result = collector.run_once(maintainer, pace,
                                    hosts=refcount_rebuild.local(1))
        assert pace.happened and result.freed_blocks == 0
        assert 'of image image-7 is counted, and is neither' in result.refused
        assert maintenance.live_slots(path) == live
        os.rename(aside, recipe)
        assert collect(maintainer, hosts=TWO).freed_blocks > 0
        assert maintainer.warnings == []
        maintenance.require_collected(maintainer)


def test_unreadable_recipe(path, repo):
    """Nothing is freed if a recipe cannot be read.

    An ordinary collection uses the catalog's counts instead.
    """
    fill(repo)
    with maintaining(repo) as maintainer:
        repositories.ruin(path / 'images' / 'image-7', 4200)
        result = collect(maintainer, hosts=TWO)
        assert result.freed_blocks == 0
        assert (f'image image-7 cannot be read on host {os.uname().nodename}'
                in result.refused)
        assert collect(maintainer).freed_blocks > 0


@pytest.mark.parametrize('directory', ['/nowhere', '/dev/full'])
def test_no_disk_for_the_partitions(repo, monkeypatch, directory):
    """Nothing is freed if the partitions' files cannot be written.

    A collection without the option works.
    """
    fill(repo)
    if directory == '/nowhere':
        monkeypatch.setenv('TMPDIR', directory)
    else:
        monkeypatch.setattr(
            refcount_rebuild.tempfile, 'TemporaryFile',
            lambda *args, **kwargs: open(directory, 'ab', buffering=0))
    with maintaining(repo) as maintainer:
        result = collect(maintainer, hosts=TWO)
        assert 'the counts cannot be compared' in result.refused
        assert result.freed_blocks == 0
        assert collect(maintainer).freed_blocks > 0
        maintenance.require_collected(maintainer)


def test_full_repository(tmp_path):
    """Collecting by partitions needs no space in the repository itself."""
    with repositories.small_disk(tmp_path / 'disk', 48 << 20) as disk:
        path = maintenance.create(disk)
        with repositories.open_repository(path, codec='none') as repo:
            fill(repo)
            with maintaining(repo) as maintainer:
                maintenance.account(maintainer)
                filling = repositories.fill_disk(path)
                result = collect(maintainer, hosts=TWO)
                assert result.refused is None and result.freed_blocks > 0
                filling.unlink()
                maintenance.require_collected(maintainer)


# -- killed -------------------------------------------------------------------

def end_counter(pid, rng):
    """Kill one of a process's counters."""
    children = []
    for name in os.listdir('/proc'):
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f'/proc/{name}/stat') as f:
                    parent = f.read().rsplit(') ', 1)[1].split()[1]
                with open(f'/proc/{name}/cmdline') as f:
                    command = f.read()
                    if int(parent) == pid and (
                            rebuild_worker.__name__ in command):
                        children.append(int(name))
    if children:
        os.kill(rng.choice(children), signal.SIGKILL)


@pytest.mark.parametrize('seed', [
    *range(4), *(pytest.param(seed, marks=pytest.mark.long)
                 for seed in range(4, 20))])
def test_killed_at_random(path, repo, seed):
    """No image is lost if the maintainer or one of its counters is killed."""
    rng = random.Random(seed)
    fill(repo)
    model = {name: repositories.read_all(repo, name)
             for name in repo.images()}
    victim, rebuilds = seed % 2, seed % 4 > 1
    left = [rng.randrange(1, 60 if rebuilds else 80)]

    def progress(done, total, what):
        left[0] -= 1
        if left[0] == 0:
            if victim:
                end_counter(os.getpid(), rng)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    def work():
        with (repositories.open_repository(path, codec='none') as repo,
              maintaining(repo) as maintainer):
            if rebuilds:
                maintainer.rebuild(progress, hosts=TWO)
            collector.run_once(maintainer, pacing.Pace(progress), hosts=TWO)
    pid, pipe = repositories.fork_child(work)
    os.close(pipe)
    os.waitpid(pid, 0)
    maintenance.require_contents(repo, model)
    with maintaining(repo, wait=10) as maintainer:
        collect(maintainer, hosts=TWO)
        maintenance.require_collected(maintainer)
    maintenance.require_contents(repo, model)
    repositories.require_clean(path)
