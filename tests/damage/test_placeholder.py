# SPDX-License-Identifier: Apache-2.0

"""Damage to the last group's placeholder after all images were deleted.

It has no block to lose. But new groups are numbered from it, uploads go on
with it damaged, and a collection may not take the damage for an empty group.
"""

import pytest

from dedupd.tasks import collector
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from tests.damage import template
from tests.support import maintenance
from tests.support import repositories
from tests.support.repositories import noise

HEAD = 512
RECORDS = (512, 1024)
#: Bytes of the header and of a record that have a meaning, including their
#: checksums; the checksums cover the others.
FIELDS = {*range(88), *range(504, 512)}
CONTENT = noise(9 * maintenance.BLOCK, 'new')


def collect(repo):
    with maintainer_role.Maintainer(repo) as maintainer:
        return collector.run_once(maintainer, pacing.Pace())


@pytest.fixture(scope='module', params=[False, True],
                ids=['plain', 'with lists'])
def left(request, tmp_path_factory):
    """A repository whose only group is a placeholder."""
    path = maintenance.create(tmp_path_factory.mktemp('left'))
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'image', noise(
            200 * maintenance.BLOCK, 'old'))
        with maintainer_role.Maintainer(repo) as maintainer:
            if request.param:
                template.run(maintainer, 'recompress')
        repo.delete('image')
        collect(repo)
    number, = maintenance.groups(path)
    file = repositories.Group(path, number)
    assert file.record()[2] == 0
    assert file.data[8] == (2 if request.param else 1)
    assert not any(file.data[1536:])
    return path, number


def require_progress(left, tmp_path, change):
    """Require that uploads and collections work after one change."""
    old, number = left
    path = tmp_path / 'repository'
    template.copy(old, path)
    file = repositories.group_path(path, number)
    good = file.read_bytes()
    bad = change(bytearray(good))
    file.write_bytes(bad)
    with repositories.open_repository(path, threads=0) as repo:
        repositories.put(repo, 'new', CONTENT)
        assert repositories.read_all(repo, 'new') == CONTENT
        groups = maintenance.groups(path)
        assert groups == [number, number + 1]
        assert file.read_bytes() == bad
        try:
            collect(repo)
        except exceptions.RepositoryError as e:
            assert file.name in str(e), e
        assert repositories.read_all(repo, 'new') == CONTENT
        if file.exists():
            # An operator repairs the file.
            file.write_bytes(good)
        collect(repo)
        assert maintenance.groups(path) == [number + 1]
        assert repositories.read_all(repo, 'new') == CONTENT
    repositories.require_clean(path)


def flipped(at):
    def change(data):
        data[at] ^= 1 << at % 8
        return data
    return change


def each_byte(step):
    places = sorted({*FIELDS, *(at + field for at in RECORDS
                                for field in FIELDS if not 32 < field < 504)})
    return [*places[::step], 8192 - 1, 4096 + 40]


@pytest.mark.parametrize('at', each_byte(23))
def test_some_bytes(left, tmp_path, at):
    require_progress(left, tmp_path, flipped(at))


@pytest.mark.long
@pytest.mark.parametrize('at', each_byte(1))
def test_each_byte(left, tmp_path, at):
    require_progress(left, tmp_path, flipped(at))


@pytest.mark.parametrize('length', [0, 1, 511, 512, 1023, 1536, 4096, 8191])
def test_cut(left, tmp_path, length):
    require_progress(left, tmp_path, lambda data: data[:length])
