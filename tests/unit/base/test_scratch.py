# SPDX-License-Identifier: Apache-2.0


import os
import tempfile

import pytest

from glance_dedup.base import scratch
from glance_dedup.check import catalog_copy
from glance_dedup.check import checker
from tests.support import repositories
from tests.unit.repository import format_writer


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The directory for temporary files."""
    place = tmp_path / 'temporary'
    place.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(place))
    return place


def die_with_a_directory():
    directory = scratch.Directory()
    with open(os.path.join(directory.name, 'file'), 'w') as f:
        f.write('x')
    os._exit(9)


def test_what_a_dead_process_left_is_removed(place):
    with pytest.raises(repositories.ChildFailed):
        repositories.in_child(die_with_a_directory)
    dead, = place.iterdir()
    first = scratch.Directory()
    second = scratch.Directory()
    assert sorted(map(str, place.iterdir())) == sorted(
        [first.name, second.name])
    assert not dead.exists()
    assert os.stat(first.name).st_mode & 0o777 == 0o700
    first.cleanup()
    first.cleanup()
    second.cleanup()
    assert list(place.iterdir()) == []


def test_what_is_none_of_ours_stays(place, tmp_path, monkeypatch):
    precious = tmp_path / 'precious'
    precious.mkdir()
    (precious / 'file').write_text('x')
    (place / f'{scratch.PREFIX}link').symlink_to(precious)
    (place / f'{scratch.PREFIX}file').write_text('x')
    (place / 'another').mkdir()
    (place / f'{scratch.PREFIX}strange').mkdir()
    before = set(place.iterdir())
    real = os.lstat

    def strange(path, **keywords):
        """Report another user as the owner of that directory."""
        status = real(path, **keywords)
        if str(path).endswith('strange'):
            status = os.stat_result([*status[:4], 12345, *status[5:10]])
        return status
    with monkeypatch.context() as patch:
        patch.setattr(scratch.os, 'lstat', strange)
        scratch.Directory().cleanup()
    assert set(place.iterdir()) == before
    assert (precious / 'file').exists()
    scratch.Directory().cleanup()
    assert before - set(place.iterdir()) == {
        place / f'{scratch.PREFIX}strange'}


def test_it_is_taken_for_dead_before_it_is_locked(place, monkeypatch):
    """A process may remove the new directory before this process locks it."""
    lock, calls = scratch.lock_directory, []

    def late(path):
        calls.append(path)
        if len(calls) == 1:
            os.rmdir(path)
        elif len(calls) == 2:
            return None
        elif len(calls) == 3:
            fd = lock(path)
            os.rmdir(path)
            return fd
        return lock(path)
    monkeypatch.setattr(scratch, 'lock_directory', late)
    monkeypatch.setattr(scratch, '_remove_dead', int)
    directory = scratch.Directory()
    assert len(calls) == 4 and directory.name == calls[3]
    assert [str(path) for path in place.iterdir()] == [directory.name]
    directory.cleanup()


def test_no_locks(place, monkeypatch):
    def refuse(path):
        raise OSError(37, 'No locks available')
    monkeypatch.setattr(scratch, 'lock_directory', refuse)
    (place / f'{scratch.PREFIX}other').mkdir()
    scratch.Directory().cleanup()
    assert [path.name for path in place.iterdir()] == [
        f'{scratch.PREFIX}other']


def test_killed_check_leaves_its_copy_only_until_the_next(
        place, tmp_path, monkeypatch):
    repository = format_writer.Repository(tmp_path / 'repository')
    format_writer.Catalog(repository).save()

    def killed():
        catalog_copy.Copy.open = lambda self: os._exit(9)
        checker.check(repository.path)
    with pytest.raises(repositories.ChildFailed):
        repositories.in_child(killed)
    left, = place.iterdir()
    assert list(left.glob('MANIFEST-*'))
    assert checker.check(repository.path).ok
    assert list(place.iterdir()) == []
