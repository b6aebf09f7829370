# SPDX-License-Identifier: Apache-2.0

"""The API: how groups and disks fill up."""

import io
import os

import pytest

from glance_dedup.base import exceptions
from tests.support import repositories
from tests.support.repositories import create
from tests.support.repositories import mixture
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.repository import fixtures

MIB = 1 << 20

path = fixtures.path
repo = fixtures.repo


# -- groups -------------------------------------------------------------------

def test_groups_fill_up(repo, path):
    data = noise(512 * 1000)
    stat = put(repo, 'image', data)
    assert stat.new_bytes == len(data)
    assert len(os.listdir(path / 'groups')) == 16
    assert repositories.Group(path, 1).record()[2] == 64
    assert repositories.Group(path, 16).record()[2] == 1000 % 64
    # The next upload continues in the group that has space.
    more = noise(512 * 20, 2)
    put(repo, 'more', more)
    assert len(os.listdir(path / 'groups')) == 16
    assert repositories.Group(path, 16).record()[2] == 1000 % 64 + 20
    assert read_all(repo, 'image') == data
    assert read_all(repo, 'more') == more
    repositories.require_clean(path)


def test_several_handles_in_one_process(path):
    data = mixture(100000, unit=512)
    with open_repository(path) as one, open_repository(path) as two:
        first, second = one.begin('a'), two.begin('b')
        # Each handle writes to its own group, since it holds the lease.
        for i in range(3):
            first.write(noise(3000, i))
            second.write(noise(3000, i + 10))
        first.commit()
        second.commit()
        assert one.images() == two.images() == ['a', 'b']
        assert read_all(two, 'a') == b''.join(noise(3000, i)
                                              for i in range(3))
        put(one, 'c', data)
        assert put(two, 'd', data).new_bytes == 0
        one.delete('c')
        with pytest.raises(exceptions.ImageNotFound):
            two.open_image('c')
        assert read_all(two, 'd') == data
    repositories.require_clean(path)


def test_statistics(path):
    with open_repository(path) as repo:
        put(repo, 'first', noise(512 * 10) + bytes(512 * 7))
        put(repo, 'second', noise(512 * 10))
        figures = repo.statistics()
        assert figures['blocks'] == 20
        assert figures['zero_blocks'] == 7
        assert figures['hits'] == figures['misses'] == 10
        assert figures['candidates'] >= 1
        assert figures['cold_loads'] == 1
        assert figures['sync_points'] == 1
        assert figures['compares'] == figures['lock_refusals'] == 0
        assert figures['bytes_read'] == 0
        assert figures['filter_hints'] == 10
        assert all(isinstance(value, int) for key, value in figures.items()
                   if key not in ('filter_refresh_age_seconds',
                                  'slice_cached'))
        read_all(repo, 'second')
        assert repo.statistics()['bytes_read'] == 5120
    with open_repository(path) as repo:
        assert repo.statistics()['blocks'] == 0


# -- a full disk --------------------------------------------------------------

@pytest.mark.parametrize('codec', ['none', 'lz4'])
def test_disk_full_in_the_middle(tmp_path, codec):
    with repositories.small_disk(tmp_path / 'disk', 12 * MIB) as disk:
        path = create(disk / 'r', group_slots=512)
        with open_repository(path, codec=codec,
                             filter_dir=str(tmp_path / 'filter')) as repo:
            put(repo, 'first', noise(2 * MIB))
            spool = os.listdir(path / 'spool')
            for attempt in range(3):
                with pytest.raises(exceptions.NoSpaceError) as info:
                    repo.put('large', io.BytesIO(noise(24 * MIB, attempt)))
                assert info.value.errno == 28
                assert repo.images() == ['first']
                assert os.listdir(path / 'spool') == spool
            assert read_all(repo, 'first') == noise(2 * MIB)
            # Deleting and small uploads still work, in this process ...
            put(repo, 'small', b'small')
            assert read_all(repo, 'small') == b'small'
            repo.delete('first')
        # ... and in the next.
        with open_repository(path, codec=codec,
                             filter_dir=str(tmp_path / 'filter')) as repo:
            put(repo, 'other', b'other')
            repo.delete('small')
            assert repo.images() == ['other']
            assert read_all(repo, 'other') == b'other'
        repositories.require_clean(path)


def test_delete_on_a_disk_that_is_quite_full(tmp_path):
    with repositories.small_disk(tmp_path / 'disk', 4 * MIB) as disk:
        path = create(disk / 'r', group_slots=64)
        with open_repository(path,
                             filter_dir=str(tmp_path / 'filter')) as repo:
            put(repo, 'image', noise(MIB))
            filling = repositories.fill_disk(disk)
            assert read_all(repo, 'image') == noise(MIB)
            with pytest.raises(exceptions.NoSpaceError):
                put(repo, 'other', noise(MIB, 2))
            repo.delete('image')
            assert repo.images() == []
            filling.unlink()
            put(repo, 'other', noise(MIB, 2))
            assert read_all(repo, 'other') == noise(MIB, 2)
        repositories.require_clean(path)
