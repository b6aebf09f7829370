# SPDX-License-Identifier: Apache-2.0

"""The checker: the major version, the directory of volumes, and its lock."""

import threading

import pytest

from glance_dedup.check import checker
from glance_dedup.check import files
from tests.support import repositories
from tests.unit.check import fixtures
from tests.unit.check.fixtures import look
from tests.unit.check.fixtures import NOTE
from tests.unit.check.fixtures import one_damage
from tests.unit.repository import format_writer as writer

no_pause = fixtures.no_pause


@pytest.fixture
def repository(tmp_path):
    """One of 2.0."""
    repository = writer.Repository(tmp_path / 'repository', major=2)
    (repository.path / 'volumes').mkdir(mode=0o700)
    return repository


@pytest.fixture
def older(tmp_path):
    """One of 1.1, where an upgrade was interrupted."""
    repository = writer.Repository(tmp_path / 'older', minor=1)
    (repository.path / 'volumes').mkdir(mode=0o700)
    return repository


def test_both_versions_are_fine(repository, older):
    for one in (repository, older):
        assert checker.check(one.path).findings == []


def test_no_directory_of_volumes(repository):
    (repository.path / 'volumes').rmdir()
    finding = one_damage(repository, 'volumes')
    assert 'the directory is missing' in finding.sentence
    assert 'format 2.x' in finding.sentence


def test_volumes_are_no_directory(repository):
    (repository.path / 'volumes').rmdir()
    (repository.path / 'volumes').write_bytes(b'')
    one_damage(repository, 'volumes')


def test_volumes_of_the_wrong_mode(repository):
    (repository.path / 'volumes').chmod(0o755)
    found, _ = look(repository, NOTE)
    assert [f.file for f in found] == ['volumes']


def test_an_older_repository_json_was_put_back(older):
    (older.path / 'volumes' / 'disk').mkdir(mode=0o700)
    finding = one_damage(older, 'volumes')
    assert 'repository.json has format 1.x' in finding.sentence


def test_upgraded_and_used_while_it_is_checked(older, monkeypatch):
    """What is made after repository.json was read says nothing."""
    original = files.File.__init__

    def init(self, directory, name, file):
        original(self, directory, name, file)
        if file == 'repository.json':
            (older.path / 'volumes' / 'disk').mkdir(mode=0o700)
            monkeypatch.undo()
    monkeypatch.setattr(files.File, '__init__', init)
    assert look(older)[0] == []
    assert (older.path / 'volumes' / 'disk').exists()


@pytest.mark.parametrize('alone', [False, True])
def test_a_program_that_works_by_the_old_version(repository, alone):
    path = repository.path / 'locks' / 'groups'
    with repositories.holding(path, repositories.VERSION_BYTE + 1,
                              repositories.VERSION_BYTE + 3,
                              shared=not alone):
        finding, = look(repository, NOTE)[0]
    assert finding.file == 'locks/groups'
    assert 'format 1.x' in finding.sentence and '2.x' in finding.sentence
    with repositories.holding(path, repositories.VERSION_BYTE + 2):
        assert look(repository, NOTE)[0] == []


def test_a_program_that_is_just_opening(repository, monkeypatch):
    monkeypatch.setattr(files, 'PAUSE', 0.05)
    path = repository.path / 'locks' / 'groups'
    with open(path, 'r+b') as f:
        assert repositories.set_lock(
            f.fileno(), repositories.VERSION_BYTE + 1, 0)
        timer = threading.Timer(0.03, f.close)
        timer.start()
        try:
            assert look(repository, NOTE)[0] == []
        finally:
            timer.join()


def test_what_a_killed_creation_left(tmp_path):
    repository = writer.Repository(tmp_path / 'new')
    (repository.path / 'volumes').mkdir(mode=0o700)
    (repository.path / 'repository.json').unlink()
    finding, = look(repository, NOTE)[0]
    assert 'repository create completes it' in finding.sentence
    (repository.path / 'volumes' / 'disk').mkdir(mode=0o700)
    one_damage(repository, 'repository.json')
