# SPDX-License-Identifier: Apache-2.0

"""Images that other hosts pull are kept open after their deletion (I12)."""

import pytest

from dedupd.serve import pins
from glance_dedup.base import exceptions
from tests.support import repositories

DATA = repositories.noise(300_000, 1)


@pytest.fixture
def repo(tmp_path):
    with repositories.open_repository(
            repositories.create(tmp_path / 'repository')) as found:
        repositories.put(found, 'image', DATA)
        yield found


@pytest.fixture
def holds(repo):
    return pins.Pins(repo)


def require_readable(lease, data=DATA):
    """Require that all of the image is described and its blocks are there."""
    assert lease.size == len(data)
    assert lease.describe(0)
    end = 0
    while end < lease.size:
        frames, end = lease.frames([(end, lease.size - end)])
        assert frames


def test_deleted_image_is_found_by_upload_and_by_id(repo, holds):
    lease = holds.open('image', None)
    upload_id = lease.stat.upload_id
    repo.delete('image')
    lease.close()
    lease.close()
    for wanted in (upload_id, None):
        again = holds.open('image', wanted)
        require_readable(again)
        again.close()
    for wrong in (('image', '0' * 32), ('other', None), ('other', upload_id)):
        with pytest.raises(exceptions.ImageNotFound):
            holds.open(*wrong)


def test_new_image_of_that_id_is_found_first(repo, holds):
    old = holds.open('image', None)
    repo.delete('image')
    repositories.put(repo, 'image', b'new')
    new = holds.open('image', None)
    assert new.size == 3
    again = holds.open('image', old.stat.upload_id)
    require_readable(again)
    assert holds.count == 2


def test_image_is_closed_when_nobody_asks(repo, holds, monkeypatch):
    lease = holds.open('image', None)
    repo.delete('image')
    monkeypatch.setattr(pins, 'SECONDS', -1.0)
    lease.close()
    holds.sweep()
    assert not holds.count
    with pytest.raises(exceptions.ImageNotFound):
        holds.open('image', None)


def test_image_in_use_is_not_closed(repo, holds, monkeypatch):
    monkeypatch.setattr(pins, 'SECONDS', -1.0)
    monkeypatch.setattr(pins, 'MAX_LEASES', 0)
    lease = holds.open('image', None)
    repo.delete('image')
    holds.sweep()
    require_readable(lease)
    lease.close()
    holds.sweep()
    assert not holds.count


def test_no_more_than_the_most_are_kept(repo, holds, monkeypatch):
    monkeypatch.setattr(pins, 'MAX_LEASES', 2)
    for name in ('a', 'b', 'c'):
        repositories.put(repo, name, name.encode())
        holds.open(name, None).close()
    holds.open('a', None).close()
    repo.delete('a')
    repo.delete('b')
    repo.delete('c')
    holds.sweep()
    assert holds.count == 2
    holds.open('a', None).close()
    holds.open('c', None).close()
    with pytest.raises(exceptions.ImageNotFound):
        holds.open('b', None)
