# SPDX-License-Identifier: Apache-2.0

"""The catalog survives a crash, or careless changes by hand.

LevelDB makes its system calls itself, so the crash explorer does not see them.
Here the test assumes the worst of the catalog: at any accounting step it may
be as it was at an earlier one, lack files, have its log cut at any length,
consist of files of two ages, or be another repository's; and the fence may be
as it is, older, torn or lost.

A *moment* is a copy of the whole repository, taken right after the catalog was
written, before the fence, or between two tasks. A *state* is a moment whose
catalog and fence are replaced. In each state the maintainer starts, counts and
collects: it may rebuild the catalog, with a warning, but must never trust a
wrong one.

A later task that writes to the catalog gets a step in :func:`record`.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
import random
import shutil
import tempfile

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import scrubber
from glance_dedup.base import pacing
from glance_dedup.check import files
from glance_dedup.maintenance import catalog_db
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import reserve
from tests.support import maintenance
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put

# States that are tried; more would take too long.
SAMPLE = 15
LONG_SAMPLE = 2000
SEED = 20


# -- moments ------------------------------------------------------------------

@dataclasses.dataclass
class Moment:
    """A copy of a repository at a moment."""

    number: int
    doing: str
    written: bool
    """The catalog was just written; else a step was just done."""
    path: pathlib.Path
    model: dict[str, bytes]
    """The images that were committed."""

    @property
    def has_catalog(self):
        return (self.path / 'catalog').exists()

    @property
    def what(self):
        return (f'moment {self.number}, {self.doing}'
                + (', catalog written' if self.written else ''))


class Recorder:
    """Records moments of a repository."""

    def __init__(self, path, directory):
        self.path = path
        self.directory = directory
        self.moments = []
        self.model = {}
        self.doing = ''

    def keep(self, written):
        number = len(self.moments)
        to = self.directory / f'moment-{number}'
        while True:
            before = listing(self.path)
            try:
                copy(self.path, to)
            except shutil.Error:
                pass
            else:
                if listing(self.path) == before:
                    break
            # LevelDB may be compacting in the background.
            shutil.rmtree(to)
        self.moments.append(Moment(number, self.doing, written, to,
                                   dict(self.model)))

    @contextlib.contextmanager
    def step(self, name):
        self.doing = name
        yield
        self.keep(written=False)

    def put(self, repo, image_id, data):
        put(repo, image_id, data)
        self.model[image_id] = data

    def delete(self, repo, image_id):
        repo.delete(image_id)
        del self.model[image_id]


def listing(path):
    """List a catalog's files with their sizes and times."""
    with contextlib.suppress(FileNotFoundError):
        with os.scandir(path / 'catalog') as entries:
            return sorted((entry.name, entry.stat().st_size,
                           entry.stat().st_mtime_ns) for entry in entries)


def copy(path, to):
    """Copy with the same links: two names of a recipe are one file."""
    made = {}

    def copy_file(source, target):
        inode = os.stat(source).st_ino
        if inode in made:
            os.link(made[inode], target)
        else:
            shutil.copy(source, target)
            made[inode] = target
    shutil.copytree(path, to, copy_function=copy_file,
                    ignore=shutil.ignore_patterns('catalog-reserve'))


def put_at_once(repo, recorder, *image_ids, data):
    """Upload in parallel, so that the uploads find no common blocks."""
    with contextlib.ExitStack() as stack:
        transactions = [stack.enter_context(repo.begin(image_id))
                        for image_id in image_ids]
        for transaction in transactions:
            transaction.write(data)
            transaction.find(b'', b'')     # stores the written data
        for transaction in transactions:
            transaction.commit()
    recorder.model.update(dict.fromkeys(image_ids, data))


def record(path, directory, patch):
    """Run through a repository's life: all operations on its catalog."""
    recorder = Recorder(path, directory)
    write = catalog_db.Catalog.write

    def write_and_keep(catalog, *arguments, **keywords):
        write(catalog, *arguments, **keywords)
        recorder.keep(written=True)
    patch.setattr(catalog_db.Catalog, 'write', write_and_keep)
    pace = pacing.Pace()
    with repositories.open_repository(path, codec='none') as repo:
        for number in range(5):
            recorder.put(repo, f'image-{number}',
                         content(number, 70 + number % 2))
        with recorder.step('first start'), maintaining(repo):
            pass
        with recorder.step('uploads and deletes'):
            recorder.put(repo, 'new', content(50, 51, 70))
            recorder.delete(repo, 'image-0')
            put_at_once(repo, recorder, 'twin-1', 'twin-2',
                        data=content(30, 31, 32))
            recorder.put(repo, 'large', maintenance.scattered(90, pages=3))
        patch.setattr(maintainer_role, 'BATCH_BYTES', 0)
        with maintaining(repo) as maintainer:
            with recorder.step('accounting'):
                maintenance.account(maintainer)
            with recorder.step('collection'):
                collector.run_once(maintainer, pace)
            with recorder.step('merging'):
                merger.run_once(maintainer, pace)
        for image_id in ('image-1', 'image-2', 'image-3', 'twin-1', 'large'):
            recorder.delete(repo, image_id)
        recorder.put(repo, 'later', content(1, 2, 60))
        # After a restart LevelDB makes tables of its log.
        with maintaining(repo) as maintainer:
            with recorder.step('second collection'):
                collector.run_once(maintainer, pace, live_share=99,
                                   evacuate_share=90)
            with recorder.step('scrub'):
                scrubber.run_once(maintainer, pace)
            with recorder.step('rebuild'):
                maintainer.rebuild()
        with recorder.step('last uploads and deletes'):
            recorder.put(repo, 'last', content(80, 81))
            recorder.delete(repo, 'later')
            recorder.delete(repo, 'image-4')
    return recorder.moments


@pytest.fixture(scope='module')
def directory():
    """Directory in memory, where a sync is fast: no disk crashes here."""
    where = '/dev/shm' if os.path.isdir('/dev/shm') else None
    with tempfile.TemporaryDirectory(prefix='catalog-', dir=where) as name:
        yield pathlib.Path(name)


@pytest.fixture(scope='module')
def moments(directory):
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        found = record(maintenance.create(directory), directory, patch)
    assert {moment.doing for moment in found if moment.written} == {
        'first start', 'accounting', 'collection', 'merging',
        'second collection', 'scrub', 'rebuild'}
    # LevelDB makes tables when it is opened.
    assert any(names(moment.path, TABLE) for moment in found)
    return found


@pytest.fixture(scope='module')
def strange(directory):
    """A moment of another repository."""
    (directory / 'strange').mkdir()
    path = maintenance.create(directory / 'strange')
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        with repositories.open_repository(path) as repo:
            put(repo, 'stranger', content(5))
            maintainer_role.Maintainer(repo).close()
    return Moment(-1, "another repository's", False, path, {})


def hurry(patch):
    """Do not wait for the reserve, or for others' writes."""
    patch.setattr(reserve, 'RESERVE_BYTES', 4096)
    patch.setattr(files, 'PAUSE', 0)


# -- states -------------------------------------------------------------------

def names(path, *endings):
    return sorted(name for name in os.listdir(path / 'catalog')
                  if name.endswith(endings) or name.startswith(endings))


def replace(path, other):
    """Replace the catalog by another one."""
    shutil.rmtree(path / 'catalog')
    shutil.copytree(other / 'catalog', path / 'catalog')


def mix(path, other, *endings):
    """Replace some files by those of another catalog."""
    for name in names(path, *endings):
        (path / 'catalog' / name).unlink()
    for name in names(other, *endings):
        shutil.copy(other / 'catalog' / name, path / 'catalog' / name)


def add(path, other):
    """Add the files of another catalog that this one does not have."""
    for name in os.listdir(other / 'catalog'):
        if not (path / 'catalog' / name).exists():
            shutil.copy(other / 'catalog' / name, path / 'catalog' / name)


def cut(path, length):
    newest = names(path, '.log')[-1]
    os.truncate(path / 'catalog' / newest, length)


def remove(path, name):
    (path / 'catalog' / name).unlink()


def empty(path, name):
    os.truncate(path / 'catalog' / name, 0)


def lose(path):
    shutil.rmtree(path / 'catalog')


CURRENT, MANIFEST, LOG, TABLE = 'CURRENT', 'MANIFEST', '.log', '.ldb'


def alone(moment):
    """Yield changes to a catalog alone: (kind, words, function)."""
    path = moment.path
    yield 'as it is', 'as it is', lambda p: None
    yield 'lost', 'lost', lose
    for ending in (CURRENT, MANIFEST, LOG, TABLE):
        for name in names(path, ending):
            yield (f'without {ending}', f'without {name}',
                   lambda p, n=name: remove(p, n))
            yield (f'{ending} is empty', f'{name} is empty',
                   lambda p, n=name: empty(p, n))


def cuts(moment):
    """Yield cuts of the log at many lengths, others at each moment."""
    logs = names(moment.path, LOG)
    size = (moment.path / 'catalog' / logs[-1]).stat().st_size if logs else 0
    for length in range(13 * moment.number % 61, size, 61):
        yield 'cut', f'log cut to {length}', lambda p, n=length: cut(p, n)


def with_other(moment, other):
    """Yield changes that use files of another catalog."""
    path, what = other.path, other.what
    age = 'older' if moment.number > other.number >= 0 else 'strange'
    yield age, f'that of {what}', lambda p: replace(p, path)
    for endings in ((CURRENT, MANIFEST), (LOG,), (TABLE,), (LOG, TABLE),
                    (CURRENT, MANIFEST, LOG)):
        yield (f'{age} {endings}', f'with {", ".join(endings)} of {what}',
               lambda p, e=endings: mix(p, path, *e))
    yield (f'{age} added', f'with the other files of {what}',
           lambda p: add(p, path))
    yield (f'{age} with added', f'that of {what} with the other files of its '
           'own', lambda p: swap_and_add(p, path, moment.path))


def swap_and_add(path, other, own):
    replace(path, other)
    add(path, own)


def older_fence(path, other):
    shutil.copy(other / 'fence', path / 'fence')


def lose_fence(path):
    (path / 'fence').unlink(missing_ok=True)


def tear_fence(path, record):
    """Make a record's second half another one's."""
    with open(path / 'fence', 'r+b') as f:
        f.seek(512 * record + 256)
        f.write(b'\xff' * 256)


def fences(moment, other):
    """Yield changes to a fence: (kind, words, function)."""
    yield 'as it is', 'as it is', lambda p: None
    if (moment.path / 'fence').exists():
        yield 'lost', 'lost', lose_fence
        for record in (0, 1):
            yield ('torn', f'torn in {record}',
                   lambda p, r=record: tear_fence(p, r))
        if other is not None and (other.path / 'fence').exists():
            yield ("the other's", f'that of {other.what}',
                   lambda p: older_fence(p, other.path))


def states(moments, strange):
    """Return by kind of change: (moment, words, functions for a copy)."""
    kinds = collections.defaultdict(list)
    for moment in moments:
        others = [other for other in [*moments[:moment.number], strange]
                  if other.has_catalog]
        changes = [(None, change) for change in alone(moment)]
        changes += [(None, change) for change in cuts(moment)]
        changes += [(other, change) for other in others
                    for change in with_other(moment, other)]
        # Before the first batch there is no catalog to damage.
        for other, (kind, words, change) in changes * moment.has_catalog:
            for fence_kind, fence, change_fence in fences(moment, other):
                kinds[kind, fence_kind].append((
                    moment, f'catalog {words}; fence {fence}',
                    (change, change_fence)))
    return kinds


def choose(kinds, count):
    """Return this many states, taking the kinds in turn."""
    rng = random.Random(SEED)
    for some in kinds.values():
        rng.shuffle(some)
    turns = itertools.chain.from_iterable(
        itertools.zip_longest(*kinds.values()))
    return list(itertools.islice(filter(None, turns), count))


# -- requirements -------------------------------------------------------------

def give_up_deleted(maintainer, words):
    """Rebuild if an older catalog, with an older fence, has deleted images.

    The maintainer cannot distinguish them from lost images, so it frees
    nothing.
    """
    if maintainer.unreadable.reasons():
        assert 'fence that of' in words or 'fence torn' in words, words
        assert collector.run_once(maintainer, pacing.Pace()).refused
        maintainer.rebuild()


def judge(moment, words, changes, path):
    """Require that the state recovers; return whether it was rebuilt."""
    copy(moment.path, path)
    for change in changes:
        change(path)
    with repositories.open_repository(path, codec='none') as repo:
        with maintaining(repo) as maintainer:
            warnings = list(maintainer.warnings)
            maintainer.guard(maintainer.reconcile)
            maintenance.account(maintainer)
            give_up_deleted(maintainer, words)
            maintenance.require_counted(maintainer)
            result = collector.run_once(maintainer, pacing.Pace())
            assert result.refused is None, result
            assert result.busy == 0 and not result.failed, result
            maintenance.require_collected(maintainer)
            rebuilt = any('was rebuilt' in warning
                          for warning in maintainer.warnings)
            # Problems are found, and reported, at the start or by the first
            # task that meets them.
            for warning in warnings:
                assert 'catalog' in warning or 'fence' in warning or (
                    'neither counted' in warning), warning
        maintenance.require_contents(repo, moment.model)
        with maintaining(repo) as maintainer:
            assert maintainer.warnings == []
    repositories.require_clean(path)
    return rebuilt


def judge_all(chosen, directory):
    figures = {True: 0, False: 0}
    for number, (moment, words, changes) in enumerate(chosen):
        path = directory / f'state-{number}'
        try:
            figures[judge(moment, words, changes, path)] += 1
        except BaseException as e:
            e.add_note(f'state {number}: at {moment.what}: {words}')
            raise
        shutil.rmtree(path)
        shutil.rmtree(path.with_name(f'{path.name}-filter'),
                      ignore_errors=True)
    return figures


# Long: a maintainer recovers, counts and collects in each of the states.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize('count', [
    SAMPLE, pytest.param(LONG_SAMPLE, marks=pytest.mark.long)])
def test_catalog_of_any_kind(moments, strange, directory, monkeypatch,
                             count):
    hurry(monkeypatch)
    kinds = states(moments, strange)
    figures = judge_all(choose(kinds, count), directory)
    print(f'{sum(map(len, kinds.values()))} states of {len(kinds)} kinds; '
          f'made anew or not: {figures}')
    # Both occur: the catalog is rebuilt where it must be, and only there.
    assert all(figures.values())
