# SPDX-License-Identifier: Apache-2.0

"""Restore drills find backups that are not the disk's bytes."""

import pytest

from glance_dedup.backup import digests
from glance_dedup.backup import drill
from glance_dedup.backup import places
from glance_dedup.backup import views
from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put

NAME = 'web'
IMAGE = 'b_web_20261123T180000Z'
SUCCESS, DISKS, FAILED = drill.METRICS
SIZE = 2 * views.SEGMENT + 5000


@pytest.fixture
def repo(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        put(repo, IMAGE, noise(SIZE, 1))
        yield repo


def keep_digests(repo, tmp_path, data, backup_id=IMAGE):
    """Keep digests as a backup of a disk does."""
    directory = tmp_path / 'state' / repo.repository_id
    directory.mkdir(parents=True)
    with places.Place(str(directory), NAME, repo.repository_id) as place:
        found = digests.DigestChanges(place, 'id', len(data))
        for number, at in enumerate(range(0, len(data), views.SEGMENT)):
            found.is_same(number, data[at:at + views.SEGMENT])
        found.end_scan()
        found.commit(views.Base(backup_id, repo.stat(IMAGE).upload_id))
        found.close()


def drilled(repo, tmp_path, seen=None):
    backup, = repo.backups()
    return drill.restore(repo, backup, str(tmp_path / 'state'),
                         (seen or []).append)


def test_a_backup_of_the_disk(repo, tmp_path):
    keep_digests(repo, tmp_path, noise(SIZE, 1))
    seen = [0]
    found = drilled(repo, tmp_path, seen)
    assert (found.error, found.size, found.compared) == (None, SIZE, SIZE)
    assert seen[-1] == SIZE
    # The hash is recorded for the next drill.
    assert hashes.recorded(repo.path, repo.stat(IMAGE))['sha256'] == (
        found.hash_value)
    assert drilled(repo, tmp_path).error is None


@pytest.mark.parametrize('at', [0, views.SEGMENT, SIZE - 1])
def test_other_bytes_than_the_disk_s(repo, tmp_path, at):
    """A byte that differs from the disk is named by its segment."""
    data = bytearray(noise(SIZE, 1))
    data[at] ^= 1
    keep_digests(repo, tmp_path, bytes(data))
    found = drilled(repo, tmp_path)
    first = at // views.SEGMENT * views.SEGMENT
    assert f'between {first} and ' in str(found.error)
    assert found.compared == first
    assert 'sha256' not in hashes.recorded(repo.path, repo.stat(IMAGE))


def test_another_hash_than_before(repo, tmp_path):
    hashes.record(repo.path, repo.stat(IMAGE),
                  hashes.Hash('sha256', '0' * 64))
    assert 'is recorded' in str(drilled(repo, tmp_path).error)


def test_digests_of_another_backup_say_nothing(repo, tmp_path):
    keep_digests(repo, tmp_path, noise(SIZE, 2), 'b_web_20261122T180000Z')
    found = drilled(repo, tmp_path)
    assert (found.error, found.compared) == (None, 0)


def test_no_digests(repo, tmp_path):
    found = drilled(repo, tmp_path)
    assert (found.error, found.compared) == (None, 0)


def test_a_backup_that_is_gone(repo, tmp_path):
    backup, = repo.backups()
    repo.delete(IMAGE)
    found = drill.restore(repo, backup, str(tmp_path), lambda done: None)
    assert isinstance(found.error, exceptions.ImageNotFound)


def test_a_sample():
    assert drill.sample([3, 1, 2], 7) == [1, 2, 3]
    assert all(len(set(drill.sample(range(9), 4))) == 4 for _ in range(20))
    assert {drill.sample(range(9), 1)[0] for _ in range(2000)} == set(range(9))


def values(path):
    return dict(line.split() for line in path.read_text().splitlines()
                if not line.startswith('#'))


def test_the_metrics(tmp_path):
    path = tmp_path / 'drill.prom'
    drill.write_metrics(str(path), 3, 0, 1795456800.7)
    assert values(path) == {SUCCESS: '1795456800', DISKS: '3', FAILED: '0'}
    assert path.stat().st_mode & 0o777 == 0o644
    # A drill with a fault is no success, and the last one stays.
    drill.write_metrics(str(path), 4, 2, 1795456900.7)
    assert values(path) == {SUCCESS: '1795456800', DISKS: '4', FAILED: '2'}


@pytest.mark.parametrize('before', [None, b'', b'\xff' * 9, b'x' * 100000])
def test_the_metrics_without_any_success(tmp_path, before):
    path = tmp_path / 'drill.prom'
    if before is not None:
        path.write_bytes(before)
    drill.write_metrics(str(path), 4, 1, 1795456900.7)
    assert values(path) == {DISKS: '4', FAILED: '1'}


def test_the_metrics_cannot_be_written(tmp_path):
    with pytest.raises(exceptions.RepositoryError, match='drill.prom'):
        drill.write_metrics(str(tmp_path / 'none' / 'drill.prom'), 1, 0, 7.0)
