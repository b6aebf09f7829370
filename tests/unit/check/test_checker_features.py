# SPDX-License-Identifier: Apache-2.0

"""The checker checks a repository's features, and the files that need them."""

import pytest

from glance_dedup.base import exceptions
from glance_dedup.check import checker
from glance_dedup.check import files
from tests.unit.check import fixtures
from tests.unit.check.fixtures import look
from tests.unit.check.fixtures import NOTE
from tests.unit.check.fixtures import one_damage
from tests.unit.repository import format_writer

no_pause = fixtures.no_pause
repository = fixtures.repository


def test_all_features(tmp_path):
    """A repository need not use the features that it has."""
    repository = format_writer.Repository(
        tmp_path / 'repository',
        features=('volumes', 'listed-segments', 'cold', 'nodedup'))
    assert checker.check(repository.path).findings == []


@pytest.mark.parametrize('name', ['of-the-future', 'Volumes', 'line\n'])
def test_an_unknown_feature(repository, name):
    (repository.path / 'features' / name).touch()
    with pytest.raises(exceptions.VersionError) as caught:
        checker.check(repository.path)
    shown = name.replace('\n', '\\n')
    assert shown in str(caught.value) and '\n' not in str(caught.value)


@pytest.mark.parametrize('name', ['volumes', 'features'])
@pytest.mark.parametrize('content', [None, b''])
def test_no_directory(repository, name, content):
    path = repository.path / name
    path.rmdir()
    if content is not None:
        path.write_bytes(content)
    finding = one_damage(repository, name)
    assert content is not None or finding.sentence == (
        'the directory is missing')


@pytest.mark.parametrize('name', ['volumes', 'features'])
def test_a_wrong_mode(repository, name):
    (repository.path / name).chmod(0o755)
    found, _ = look(repository, NOTE)
    assert [f.file for f in found] == [name]


def test_volumes_without_their_feature(repository):
    (repository.path / 'volumes' / 'disk').mkdir(mode=0o700)
    found = [f for f in look(repository)[0] if f.file == 'volumes']
    assert [f.sentence for f in found] == [
        'the directory is not empty, but features/volumes is missing: make '
        'that file again']
    (repository.path / 'features' / 'volumes').touch(0o600)
    assert look(repository)[0] == []


def test_the_first_volume_while_it_is_checked(repository, monkeypatch):
    """The first volume and its feature may be made during the check."""
    original = files.File.__init__

    def init(self, directory, name, file):
        original(self, directory, name, file)
        if file == 'repository.json':
            (repository.path / 'features' / 'volumes').touch(0o600)
            (repository.path / 'volumes' / 'disk').mkdir(mode=0o700)
            monkeypatch.undo()
    monkeypatch.setattr(files.File, '__init__', init)
    assert look(repository)[0] == []
    assert (repository.path / 'volumes' / 'disk').exists()


def test_what_a_killed_creation_left(repository):
    (repository.path / 'repository.json').unlink()
    finding, = look(repository, NOTE)[0]
    assert 'repository create completes it' in finding.sentence
    (repository.path / 'volumes' / 'disk').mkdir(mode=0o700)
    assert {f.file for f in look(repository)[0]} == {
        'repository.json', 'volumes'}


def test_marks_without_their_feature(repository):
    group = format_writer.Group(repository, 1)
    group.append([fixtures.block(1)] * 2, nodedup=True)
    group.append([fixtures.block(2)], format_writer.LZ4)
    group.publish()
    group.save()
    repository.image('one', [(group, 0, 3)])
    found = [f for f in look(repository)[0] if f.file == 'groups/00000001']
    assert [f.sentence for f in found] == [
        'an entry has the mark nodedup, but features/nodedup is missing: make '
        'that file again']
    (repository.path / 'features' / 'nodedup').touch(0o600)
    assert look(repository)[0] == []
