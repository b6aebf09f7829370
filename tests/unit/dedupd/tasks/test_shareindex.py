# SPDX-License-Identifier: Apache-2.0
"""A helper's merging: the maintainer finds all, whatever fails."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from dedupd.tasks import exactindex
from dedupd.tasks import shareindex
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import helper_daemon
from glance_dedup.maintenance import live_hosts
from glance_dedup.maintenance import maintainer_role
from tests.support import repositories
from tests.unit.dedupd.tasks import test_exactindex
from tests.unit.dedupd.tasks import test_merger

pytest_plugins = ['tests.support.maintainer_fixtures']

path, repo = test_exactindex.path, test_exactindex.repo
DATA, OTHER = test_exactindex.DATA, test_exactindex.OTHER
MIB = test_exactindex.MIB
BLOCKS = MIB // 4096
#: Each of them has BLOCKS blocks.
IMAGES = {'a': DATA, 'b': DATA, 'c': OTHER, 'd': OTHER}


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(exactindex, 'HELP_ENTRIES', 1)
    monkeypatch.setattr(exactindex, 'HELP_PAUSE', 0)


@contextlib.contextmanager
def helping(path):
    with (repositories.open_repository(path) as other,
          live_hosts.Hosts(path) as hosts,
          helper_daemon.Helper(other, hosts) as helper):
        yield helper


@pytest.fixture
def helper(path):
    with helping(path) as helper:
        yield helper


@pytest.fixture
def index(helper, begun):
    """Open the index as a helper does."""
    with contextlib.closing(exactindex.Index(
            helper.handle, helper.engine, None, pacing.Pace())) as index:
        yield index


@pytest.fixture
def begun(repo, maintainer):
    """Fill the index with two images, and store two new ones."""
    begin(repo, maintainer)


def begin(repo, maintainer):
    test_merger.put_at_once(repo, a=DATA, b=DATA)
    test_merger.merge(maintainer, exclude=lambda facts: True)
    test_merger.put_at_once(repo, c=OTHER, d=OTHER)


def help_once(helper):
    return shareindex.run_once(helper, pacing.Pace())


def files(repo, kind=''):
    return [file.name for file in test_exactindex.files(repo, kind)]


def named_files(repo):
    """Return the files without those that are being written."""
    return [name for name in files(repo) if not name.startswith('new-')]


def discard(maintainer):
    """Make another catalog, which makes another index."""
    maintainer.rebuild()
    test_merger.merge(maintainer, exclude=lambda facts: True)


def require_all(maintainer, images=IMAGES):
    test_merger.require_exact(maintainer, images)
    test_merger.require_settled(maintainer)


def test_all_but_the_pairs(repo, maintainer, begun, helper):
    assert help_once(helper) == shareindex.Result(2 * BLOCKS, 1)
    assert len(files(repo, 'pairs')) == 1 and not files(repo, 'run')
    assert help_once(helper) == shareindex.Result()
    result = test_merger.merge(maintainer)
    assert (result.scanned, result.merged_blocks) == (0, 2 * BLOCKS)
    require_all(maintainer)


def test_nothing_before_the_maintainer(repo, maintainer, helper):
    """A helper makes no index, since only the maintainer knows the catalog."""
    test_merger.put_at_once(repo, a=DATA, b=DATA)
    assert help_once(helper) == shareindex.Result()
    assert not pathlib.Path(repo.path, 'index').exists()
    pathlib.Path(repo.path, 'index').mkdir()
    assert help_once(helper) == shareindex.Result()
    assert files(repo) == []


def test_what_is_worth_a_run(repo, maintainer, begun, helper, monkeypatch):
    monkeypatch.setattr(exactindex, 'HELP_ENTRIES', 2 * BLOCKS + 1)
    before = files(repo)
    assert help_once(helper) == shareindex.Result()
    assert files(repo) == before
    monkeypatch.setattr(exactindex, 'HELP_ENTRIES', 2 * BLOCKS)
    assert help_once(helper) == shareindex.Result(2 * BLOCKS, 1)


@pytest.mark.parametrize('known', [8, 9])
def test_what_is_worth_a_merge(repo, maintainer, helper, known):
    """A helper merges runs only if the shard is not much larger than these."""
    images = {'many': repositories.noise(known * MIB, 3)}
    repositories.put(repo, 'many', images['many'])
    test_merger.merge(maintainer)
    repositories.put(repo, 'a', DATA)
    merged = known <= exactindex.HELP_SHARE
    assert help_once(helper) == shareindex.Result(BLOCKS, merged)
    assert bool(files(repo, 'run')) == (not merged)
    # The maintainer merges even a single record.
    test_merger.merge(maintainer)
    assert not files(repo, 'run')
    require_all(maintainer, {**images, 'a': DATA})


def test_the_locks_decide(repo, maintainer, begun, index, helper):
    other = _engine.Index(helper.handle, maintainer.catalog.id)
    with contextlib.closing(other):
        assert other.lock()
        assert index.help_scan() == 0
        other.unlock()
        assert index.help_scan() == 2 * BLOCKS
        assert other.begin_merge(0, 0, 1 << 40, 1 << 40)
        assert index.help_merge() == 0
        other.cancel_merge()
        assert index.help_merge() == 1
    test_merger.merge(maintainer)
    require_all(maintainer)


def test_the_lock_is_given_back(repo, maintainer, begun, index, monkeypatch):
    """The lock is free after each part, since the maintainer may wait."""
    monkeypatch.setattr(exactindex, 'SORTED_RECORDS', BLOCKS)
    locked = []

    def pause(seconds):
        with contextlib.closing(_engine.Index(
                maintainer.handle, maintainer.catalog.id)) as other:
            locked.append(not other.lock())
    monkeypatch.setattr(exactindex, 'SCAN_ENTRIES', BLOCKS)
    monkeypatch.setattr(index._pace, 'pause', pause)
    assert index.help_scan() == 2 * BLOCKS
    assert locked == [False, False]


@pytest.mark.parametrize('ends', [True, False])
def test_the_maintainer_waits_for_a_helper(repo, maintainer, begun, index,
                                           monkeypatch, caplog, ends):
    """The maintainer waits for a helper's merge for a limited time."""
    monkeypatch.setattr(exactindex, 'LOCK_WAIT', 30.0 if ends else 0.3)
    assert index.help_scan() == 2 * BLOCKS
    # A helper does not delay the maintainer's own work.
    assert index._files.begin_merge(0, 0, 1 << 40, 1 << 40)
    assert not index._files.step(1 << 20)[0]

    waited = []

    def finish(pace, seconds):
        if not waited:
            index._files.finish_merge()
        waited.append(seconds)
    if ends:
        monkeypatch.setattr(pacing.Pace, 'pause', finish)
    merged = test_merger.merge(maintainer).merged_blocks
    assert bool(waited) == ends
    assert merged == (2 * BLOCKS if ends else BLOCKS)
    assert ('its runs wait' in caplog.text) == (not ends)
    if not ends:
        index._files.finish_merge()
        assert test_merger.merge(maintainer).merged_blocks == BLOCKS
    require_all(maintainer)


# -- kills and faults ---------------------------------------------------------

def help_and_die(path, left):
    """Help as another host's daemon; die before the change number `left`.

    The test runs this in a process of its own, which can be killed.
    """
    left = int(left)

    def before(name, arguments):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    exactindex.HELP_ENTRIES, exactindex.HELP_PAUSE = 1, 0
    exactindex.SPLIT_RECORDS, exactindex.SORTED_RECORDS = 100, 200
    exactindex.SCAN_ENTRIES = 100
    test_exactindex.DyingIndex.before = staticmethod(before)
    exactindex._engine.Index = test_exactindex.DyingIndex
    with helping(path) as helper:
        help_once(helper)


def killed(path, left):
    """Return True if a helper's process was killed before its end."""
    child = subprocess.run(
        [sys.executable, '-c', 'import sys\n'
         'from tests.unit.dedupd.tasks import test_shareindex\n'
         'test_shareindex.help_and_die(*sys.argv[1:])', str(path), str(left)],
        cwd=test_merger.TOP, timeout=100, capture_output=True, text=True)
    assert child.returncode in (0, -signal.SIGKILL), child.stderr
    return child.returncode != 0


@pytest.mark.timeout(300)
def test_killed_before_any_change(tmp_path, monkeypatch):
    """The maintainer finds all after a helper died before any change.

    Some helpers die twice.
    """
    monkeypatch.setattr(exactindex, 'SPLIT_RECORDS', 100)
    for number in range(1, 100):
        path = repositories.create(tmp_path / f'repo-{number}',
                                   group_slots=1024)
        with (repositories.open_repository(path) as repo,
              maintainer_role.Maintainer(repo) as maintainer):
            begin(repo, maintainer)
            died = killed(path, number)
            if number % 3 == 0:
                killed(path, 2 + number % 5)
            test_merger.merge(maintainer)
            require_all(maintainer)
        if not died:
            break
    assert 8 < number < 99
    assert len(files(repo, 'shard')) == 2   # the shard was split


@pytest.mark.parametrize('stage', ['write', 'add', 'begin_merge',
                                   'finish_merge'])
def test_full_disk(tmp_path, monkeypatch, stage):
    """A helper ends with an error on a full disk and removes its new files."""
    with repositories.small_disk(tmp_path / 'disk', 24 * MIB) as disk:
        path = repositories.create(disk / 'repo', group_slots=1024)
        with (repositories.open_repository(path) as repo,
              helping(path) as helper):
            with maintainer_role.Maintainer(repo) as maintainer:
                begin(repo, maintainer)
            filling = []

            def before(name, arguments):
                if name == stage and not filling:
                    filling.append(repositories.fill_disk(disk))
            monkeypatch.setattr(test_exactindex, 'CHANGING', (
                *test_exactindex.CHANGING, 'begin_merge'))
            with test_exactindex.watched(monkeypatch, before):
                with pytest.raises(exceptions.NoSpaceError):
                    help_once(helper)
                assert not files(repo, 'new')
                with pytest.raises(exceptions.NoSpaceError):
                    help_once(helper)
                assert not files(repo, 'new')
            filling[0].unlink()
            assert help_once(helper).shards == 1
            with maintainer_role.Maintainer(repo) as maintainer:
                test_merger.merge(maintainer)
                require_all(maintainer)


@pytest.mark.parametrize('kind', ['run', 'shard', 'cursors'])
def test_damage_is_left_to_the_maintainer(repo, maintainer, begun, index,
                                          helper, caplog, kind):
    index.help_scan()
    file, = test_exactindex.files(repo, kind)
    test_exactindex.flipped(file)
    before = files(repo)
    assert help_once(helper).shards == 0
    assert 'The exact index cannot be used' in caplog.text
    assert files(repo) == before
    test_merger.merge(maintainer)
    require_all(maintainer)


# -- a late helper ------------------------------------------------------------

def test_new_catalog_before_a_scan(repo, maintainer, begun, index):
    """A helper with an old catalog's index writes no file of the new one."""
    maintainer.rebuild()
    test_merger.merge(maintainer, exclude=lambda facts: True)
    test_merger.put_at_once(repo, e=DATA)
    before = files(repo)
    with pytest.raises(exceptions.DamagedError):
        index.help_scan()
    assert files(repo) == before
    test_merger.merge(maintainer)
    require_all(maintainer, {**IMAGES, 'e': DATA})


def test_new_catalog_amid_a_merge(repo, maintainer, begun, index,
                                  monkeypatch):
    """A helper that notices a new catalog gives up and leaves no damage."""
    monkeypatch.setattr(exactindex, 'LOCK_WAIT', 0.1)
    index.help_scan()
    seen = []

    def step(done, total, what, cost=0):
        if cost and not seen:
            discard(maintainer)
            seen.extend(named_files(repo))
    index._pace.step = step
    assert index.help_merge() == 0
    assert seen and files(repo) == seen
    assert test_merger.merge(maintainer).scanned == 0
    require_all(maintainer)


def repair(maintainer):
    """Set the shard aside, and read all entries again."""
    for shard in test_exactindex.files(maintainer.repository, 'shard'):
        test_exactindex.flipped(shard)
    own = exactindex.Index(maintainer.handle, maintainer.engine,
                           maintainer.catalog.id, pacing.Pace())
    with contextlib.closing(own):
        own.repair()


def at_the_end(repo, index):
    """Have a helper reach the last step of a merge without pairs."""
    index.help_scan()
    assert index._files.begin_merge(0, 0, 1 << 40, 1 << 40)
    assert not index._files.step(1 << 20)[0]


@pytest.mark.parametrize('meanwhile', [discard, repair])
def test_another_index_at_the_end_of_a_merge(
        repo, maintainer, begun, index, monkeypatch, meanwhile):
    """A helper's late shard gets no name; it lacks entries read since then."""
    monkeypatch.setattr(exactindex, 'LOCK_WAIT', 0.1)
    at_the_end(repo, index)
    meanwhile(maintainer)
    before = named_files(repo)
    with pytest.raises(exceptions.ImageNotFound):
        index._files.finish_merge()
    assert files(repo) == before
    test_merger.merge(maintainer)
    require_all(maintainer)


@pytest.mark.parametrize('meanwhile', [discard, repair])
@pytest.mark.parametrize('split', [False, True])
def test_a_shard_of_a_former_index_does_not_count(
        repo, maintainer, begun, index, monkeypatch, meanwhile, split):
    """A late helper's shard does not count in a new index.

    The helper checked the index just before.
    """
    monkeypatch.setattr(exactindex, 'LOCK_WAIT', 0.1)
    former, = index._files.shards()[0]
    late = [('shard', 1, half, former[3] + 1) for half in (0, 1)] if split \
        else [('shard', 0, 0, former[3] + 1)]
    meanwhile(maintainer)
    for file in late:
        index._files.write(file, b'')
    counted, complete = index._files.shards()
    assert complete and not set(late) & set(counted)
    test_merger.merge(maintainer)
    test_merger.put_at_once(repo, e=DATA[::-1], f=DATA[::-1])
    # The index has no damage to repair, so only these are read.
    assert test_merger.merge(maintainer).scanned == 2 * BLOCKS
    assert not set(late) & set(index._files.files())
    require_all(maintainer, {**IMAGES, 'e': DATA[::-1], 'f': DATA[::-1]})


@pytest.mark.parametrize('steps', [1, 2])
def test_cursors_of_a_helper_that_lost_its_lock(
        repo, maintainer, begun, index, helper, steps):
    """A helper that lost its lock does not overwrite the reset cursors.

    Another process has set them to zero, so all is read again.
    """
    cursors, = (file for file in index._files.files()
                if file[0] == 'cursors')
    add = index._files.add
    reset = (*cursors[:3], cursors[3] + steps)

    class Overtaken:
        def __getattr__(self, name):
            return getattr(files_, name)

        def add(self, records, gone):
            add(records, gone)
            with contextlib.closing(_engine.Index(
                    maintainer.handle, maintainer.catalog.id)) as other:
                other.write(reset, b'')
                other.remove(cursors)
    files_, index._files = index._files, Overtaken()
    if steps == 1:
        with pytest.raises(exceptions.BusyError):
            index.help_scan()
    else:
        index.help_scan()
    index._files = files_
    assert reset in index._files.files()
    assert test_merger.merge(maintainer).scanned == 4 * BLOCKS
    require_all(maintainer)
