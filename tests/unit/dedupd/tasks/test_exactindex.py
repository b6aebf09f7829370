# SPDX-License-Identifier: Apache-2.0
"""The exact index: no damage to its files loses a duplicate."""

import contextlib
import os
import pathlib
import sys
import types

import pytest

from dedupd.tasks import duplicate_pairs
from dedupd.tasks import exactindex
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from tests.support import repositories
from tests.unit.dedupd.tasks import test_merger
from tests.unit.repository import format_writer

pytest_plugins = ['tests.support.maintainer_fixtures']

MIB = 1 << 20
DATA = repositories.noise(MIB)
OTHER = repositories.noise(MIB, 2)
KINDS = ['shard', 'run', 'gone', 'pairs', 'cursors']


@pytest.fixture
def path(tmp_path):
    return repositories.create(tmp_path / 'repo', group_slots=1024)


@pytest.fixture
def repo(path):
    with repositories.open_repository(path) as repo:
        yield repo


def files(repo, kind=''):
    return sorted(pathlib.Path(repo.path, 'index').glob(kind + '-*'
                                                        if kind else '*'))


class Died(BaseException):
    """An exception that replaces a kill."""


CHANGING = ('add', 'write', 'remove', 'finish_merge', 'fill', 'tidy',
            'set_aside')


class DyingIndex:
    """The engine's index; `before` is called before each change."""

    made = _engine.Index
    before = staticmethod(lambda name, arguments: None)

    def __init__(self, *arguments):
        self._index = self.made(*arguments)

    def __getattr__(self, name):
        method = getattr(self._index, name)
        if name not in CHANGING:
            return method

        def call(*arguments):
            type(self).before(name, arguments)
            return method(*arguments)
        return call


@contextlib.contextmanager
def watched(monkeypatch, before):
    with monkeypatch.context() as patch:
        patch.setattr(DyingIndex, 'before', staticmethod(before))
        patch.setattr(exactindex._engine, 'Index', DyingIndex)
        yield


def die_at(monkeypatch, maintainer, left):
    """Merge, and die before change number `left`; return True if it died."""
    def before(name, arguments):
        nonlocal left
        left -= 1
        if left == 0:
            raise Died()
    write = maintainer.write

    def dying_write(*arguments, **options):
        before('catalog', arguments)
        write(*arguments, **options)
    maintainer.write = dying_write
    with watched(monkeypatch, before):
        try:
            test_merger.merge(maintainer)
        except Died:
            return True
    return False


@pytest.mark.parametrize('taken', [False, True], ids=['killed', 'twice'])
def test_killed_before_any_change(tmp_path, monkeypatch, taken):
    """A merge that dies before any change loses no duplicate.

    The blocks are known, new, freed, or in several groups.
    """
    monkeypatch.setattr(exactindex, 'SPLIT_RECORDS', 100)
    monkeypatch.setattr(exactindex, 'SORTED_RECORDS', 400)
    monkeypatch.setattr(exactindex, 'PAIRS_AT_ONCE', 300)
    for number in range(1, 200):
        path = repositories.create(tmp_path / f'repo-{number}',
                                   group_slots=1024)
        with repositories.open_repository(path) as repo:
            test_merger.put_at_once(repo, a=DATA, b=DATA, gone=OTHER)
            with maintainer_role.Maintainer(repo) as maintainer:
                test_merger.merge(maintainer, exclude=lambda facts: True)
                repo.delete('a')
                repo.delete('gone')
                test_merger.collect(maintainer)
                test_merger.put_at_once(repo, c=DATA, d=OTHER, e=OTHER)
                died = die_at(monkeypatch, maintainer, number)
            for _ in range(taken):
                with maintainer_role.Maintainer(repo) as maintainer:
                    die_at(monkeypatch, maintainer, 2 + number % 5)
            with maintainer_role.Maintainer(repo) as maintainer:
                test_merger.merge(maintainer)
                test_merger.require_exact(maintainer, {
                    'b': DATA, 'c': DATA, 'd': OTHER, 'e': OTHER})
                test_merger.require_settled(maintainer)
        if not died:
            break
    assert 12 < number < 199


def with_all_kinds(maintainer, monkeypatch):
    """Make an index with a file of each kind that the next run will use."""
    repo = maintainer.repository
    test_merger.put_at_once(repo, a=DATA, b=DATA)
    test_merger.merge(maintainer, exclude=lambda facts: True)
    test_merger.put_at_once(repo, c=DATA, d=OTHER, e=OTHER)

    def before(name, arguments):
        if name == 'remove' and arguments[0][0] == 'pairs':
            raise Died()
    with watched(monkeypatch, before), pytest.raises(Died):
        test_merger.merge(maintainer)
    with contextlib.closing(_engine.Index(
            maintainer.handle, maintainer.catalog.id)) as index:
        assert index.lock()
        record = exactindex.record(b'\1' * 8, 1 << 15)
        index.add(record, True)
        index.add(exactindex.record(b'\2' * 8, 1 << 15), False)
    assert all(files(repo, kind) for kind in KINDS)
    return {'a': DATA, 'b': DATA, 'c': DATA, 'd': OTHER, 'e': OTHER}


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if len(content) > 600 else 40] ^= 1
    file.write_bytes(content)


def cut(file):
    os.truncate(file, file.stat().st_size - 5)


def emptied(file):
    os.truncate(file, 0)


def renamed(file):
    digits = '0' if file.name[-16] != '0' else '1'
    file.rename(file.with_name(file.name[:-16] + digits + file.name[-15:]))


def removed(file):
    file.unlink()


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('damage', [flipped, cut, emptied, renamed, removed])
def test_damage(repo, maintainer, monkeypatch, kind, damage):
    images = with_all_kinds(maintainer, monkeypatch)
    for file in files(repo, kind):
        damage(file)
    before = pathlib.Path(repo.path, 'quarantine', 'index')
    assert not before.exists()
    assert test_merger.merge(maintainer).failed == {}
    test_merger.require_exact(maintainer, images)
    # A wrong file of cursors causes a new index.
    if damage is not removed and not (damage is renamed and kind in (
            'run', 'gone', 'pairs', 'shard')) and kind != 'cursors':
        assert before.is_file()
    for _ in range(2):
        test_merger.collect(maintainer)
    assert test_merger.merge(maintainer).scanned == 0
    test_merger.require_settled(maintainer)


def test_index_of_another_catalog(repo, maintainer, monkeypatch):
    images = with_all_kinds(maintainer, monkeypatch)
    old = {file.name: file.read_bytes() for file in files(repo)}
    maintainer.rebuild()
    assert test_merger.merge(maintainer).scanned == 4 * 256
    test_merger.require_exact(maintainer, images)
    new = {file.name: file.read_bytes() for file in files(repo)}
    assert not set(old.values()) & set(new.values())
    # An old shard returns: it has another catalog's id and does not count.
    shard, = (name for name in old if name.startswith('shard-'))
    late = files(repo)[0].with_name(shard[:-2] + 'ff')
    late.write_bytes(old[shard])
    test_merger.put_at_once(repo, f=DATA, g=OTHER[::-1])
    test_merger.merge(maintainer)
    test_merger.require_exact(maintainer, {**images, 'f': DATA,
                                           'g': OTHER[::-1]})
    test_merger.require_settled(maintainer)


@pytest.mark.parametrize('kind', KINDS)
def test_files_of_another_repository(tmp_path, repo, maintainer, monkeypatch,
                                     kind):
    """Files of another repository do not count, though they are intact.

    A wrong restore may leave such files.
    """
    images = with_all_kinds(maintainer, monkeypatch)
    path = repositories.create(tmp_path / 'other', group_slots=1024)
    with (repositories.open_repository(path) as other,
          maintainer_role.Maintainer(other) as maintainer_of_other):
        with_all_kinds(maintainer_of_other, monkeypatch)
        for mine, theirs in zip(files(repo, kind), files(other, kind)):
            mine.write_bytes(theirs.read_bytes())
            # These files have their number in the name and in the head.
            mine.rename(mine.with_name(theirs.name))
    test_merger.merge(maintainer)
    test_merger.require_exact(maintainer, images)
    test_merger.require_settled(maintainer)


def unsort(file, kind):
    """Reverse a file's items, or repeat a single one, with valid checksums."""
    old = file.read_bytes()
    size = format_writer.IndexFile.SIZES[format_writer.IndexFile.KINDS[kind]]
    items = [old[at:at + size] for at in range(512, len(old) - 8, size)]
    items = items[::-1] if len(items) > 1 else items * 2
    file.write_bytes(format_writer.IndexFile(
        types.SimpleNamespace(id=old[16:32]), kind, b''.join(items),
        number=int(file.name[-16:], 16)).content())


@pytest.mark.parametrize('kind', ['shard', 'run', 'gone', 'cursors'])
def test_unsorted(repo, maintainer, monkeypatch, kind):
    images = with_all_kinds(maintainer, monkeypatch)
    for file in files(repo, kind):
        unsort(file, kind)
    test_merger.merge(maintainer)
    test_merger.require_exact(maintainer, images)
    test_merger.require_settled(maintainer)


@pytest.mark.parametrize('stage', ['write', 'add', 'begin_merge',
                                   'finish_merge', 'catalog'])
def test_full_disk(tmp_path, monkeypatch, stage):
    """A run ends with an error on a full disk and removes its new files."""
    with repositories.small_disk(tmp_path / 'disk', 48 * MIB) as disk:
        path = repositories.create(disk / 'repo', group_slots=1024)
        with (repositories.open_repository(path) as repo,
              maintainer_role.Maintainer(repo) as maintainer):
            test_merger.put_at_once(repo, a=DATA, b=DATA)
            test_merger.merge(maintainer, exclude=lambda facts: True)
            test_merger.put_at_once(repo, c=OTHER, d=OTHER)
            test_merger.account(maintainer)
            filling = []

            def before(name, arguments):
                if name == stage and not filling:
                    filling.append(repositories.fill_disk(disk))
            monkeypatch.setattr(sys.modules[__name__], 'CHANGING',
                                (*CHANGING, 'begin_merge'))
            take = duplicate_pairs.Duplicates._take

            def watched_take(*arguments):
                before('catalog', arguments)
                return take(*arguments)
            monkeypatch.setattr(duplicate_pairs.Duplicates, '_take',
                                watched_take)
            # The catalog has some reserved space.
            fails = (contextlib.nullcontext() if stage == 'catalog'
                     else pytest.raises(exceptions.NoSpaceError))
            with watched(monkeypatch, before), fails:
                test_merger.merge(maintainer)
            assert filling and not files(repo, 'new')
            filling[0].unlink()
            test_merger.merge(maintainer)
            test_merger.require_exact(maintainer, {
                'a': DATA, 'b': DATA, 'c': OTHER, 'd': OTHER})
            test_merger.require_settled(maintainer)


def test_runs_of_a_shard_that_does_not_count(repo, maintainer):
    test_merger.put_at_once(repo, a=DATA, b=DATA)
    test_merger.merge(maintainer)
    with contextlib.closing(_engine.Index(
            maintainer.handle, maintainer.catalog.id)) as index:
        index.write(('run', 3, 0, 9), b'')
    assert test_merger.merge(maintainer).scanned == 2 * 256
    assert files(repo, 'run') == []
    test_merger.require_exact(maintainer, {'a': DATA, 'b': DATA})


def test_newer_version(repo, maintainer):
    """A file of a newer version stays as it is, and nothing is merged."""
    test_merger.put_at_once(repo, a=DATA, b=DATA)
    test_merger.merge(maintainer, exclude=lambda facts: True)
    cursors, = files(repo, 'cursors')
    content = bytearray(cursors.read_bytes())
    content[8] = 2
    cursors.write_bytes(content)
    before = {file: file.read_bytes() for file in files(repo)}
    with pytest.raises(exceptions.VersionError):
        test_merger.merge(maintainer)
    assert {file: file.read_bytes() for file in files(repo)} == before


def test_another_process_has_the_lock(repo, maintainer, monkeypatch):
    monkeypatch.setattr(exactindex, 'LOCK_WAIT', 0.3)
    with contextlib.closing(_engine.Index(
            maintainer.handle, maintainer.catalog.id)) as other:
        assert other.lock()
        with pytest.raises(exceptions.BusyError):
            test_merger.merge(maintainer)
        other.unlock()
        test_merger.merge(maintainer)


def test_group_that_comes_back(repo, maintainer):
    """A group that returns is read again, since its records may be gone."""
    repositories.put(repo, 'a', DATA)
    number = test_merger.addresses(maintainer, 'a')[0] >> 15
    repositories.put(repo, 'b', repositories.noise(5 * MIB, 9))
    test_merger.merge(maintainer)
    file = pathlib.Path(repo.path, 'groups', f'{number:08x}')
    file.rename(file.with_name('aside'))
    repositories.put(repo, 'c', OTHER[::-1])
    test_merger.merge(maintainer)
    file.with_name('aside').rename(file)
    assert test_merger.merge(maintainer).scanned >= 256
    test_merger.require_settled(maintainer)


def test_without_a_catalog(repo, maintainer, monkeypatch):
    """The first two stages work without a catalog, so any daemon runs them."""
    monkeypatch.setattr(exactindex, 'PAIRS_AT_ONCE', 100)
    test_merger.put_at_once(repo, a=DATA, b=DATA)
    test_merger.merge(maintainer, exclude=lambda facts: True)
    test_merger.put_at_once(repo, c=OTHER, d=OTHER)
    with contextlib.closing(_engine.Maintenance(repo.handle())) as engine:
        index = exactindex.Index(repo.handle(), engine, maintainer.catalog.id,
                                 pacing.Pace())
        with contextlib.closing(index):
            assert index.scan() == 512
            index.merge()
            file, = index.pairs_files()
            portions = list(index.portions(file))
            assert [len(pairs) // 16 for pairs in portions] == [100, 100, 56]
            # With sorted portions, few groups are in more than one portion.
            assert b''.join(portions) == _engine.pairs_sort(b''.join(portions))
    assert test_merger.merge(maintainer).scanned == 0
    test_merger.require_exact(maintainer, {'a': DATA, 'b': DATA, 'c': OTHER,
                                           'd': OTHER})


def test_stopped(repo, maintainer, monkeypatch):
    monkeypatch.setattr(exactindex, 'STEP_RECORDS', 10)
    test_merger.put_at_once(repo, a=DATA, b=DATA)

    def stop(done, total, what):
        if what == 'merging the index':
            pace.stop()
    pace = pacing.Pace(stop)
    with pytest.raises(pacing.Stopped):
        test_merger.merger.run_once(maintainer, pace)
    test_merger.merge(maintainer)
    test_merger.require_exact(maintainer, {'a': DATA, 'b': DATA})


def test_arguments_that_cannot_be(repo, maintainer):
    with contextlib.closing(_engine.Index(
            repo.handle(), maintainer.catalog.id)) as index:
        for file in (('shard', 17, 0, 1), ('shard', 1, 2, 1),
                     ('other', 0, 0, 1)):
            with pytest.raises(ValueError):
                index.read(file, 0)
        two = [exactindex.record(b'\1' * 8, 1 << 15),
               exactindex.record(b'\2' * 8, 1 << 15)]
        for records in (b'1', two[1] + two[0], two[0] * 2):
            with pytest.raises(ValueError):
                index.add(records, False)
        for call in (lambda: index.add(two[0], False), index.tidy, index.fill,
                     lambda: index.step(1), index.finish_merge):
            with pytest.raises(exceptions.RepositoryError):
                call()
        with pytest.raises(ValueError):
            index.find(b'1234567')
        with pytest.raises(TypeError):
            index.read('shard', 0)
    with pytest.raises(exceptions.ClosedError):
        index.files()
