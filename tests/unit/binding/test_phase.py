# SPDX-License-Identifier: Apache-2.0

"""Images with blocks stored at another phase, in Python code.

The C test ``tests/c/write/test_realign.c`` checks how the engine finds such
blocks. These tests check how other code handles a recipe with a short block in
its middle.
"""

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import scrubber
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.transfer import pull
from tests.support import daemons
from tests.support import maintenance
from tests.support import repositories
from tests.support.repositories import noise

BLOCK = 4096
SECTOR = 512

DATA = noise(40 * BLOCK, 1) + bytes(9 * BLOCK) + noise(40 * BLOCK, 2)
#: The first of its blocks ends where one of DATA begins.
TWIN = noise(3 * SECTOR, 3) + DATA


@pytest.fixture
def path(tmp_path):
    return repositories.create(tmp_path / 'repository')


def groups_of(repo, image_id):
    return {group for group, _ in maintenance.blocks_of(repo, image_id)}


def lengths_of(repo, image_id):
    with repo.open_image(image_id) as image:
        return [(extent.offset, extent.length, extent.blocks)
                for extent in image.extents()]


def test_twin_is_found_and_counted(path):
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'one', DATA)
        before = repo.statistics()
        stat = repositories.put(repo, 'twin', TWIN)
        figures = repo.statistics()
        assert stat.new_bytes == 3 * SECTOR
        assert figures['phase_changes'] == 1
        assert figures['phase_samples'] - before['phase_samples'] == 7 * 8
        assert repositories.read_all(repo, 'twin') == TWIN
        # One block is short, and it is not the last one.
        (offset, length, blocks), *_ = lengths_of(repo, 'twin')
        assert (offset, length % BLOCK) == (0, 3 * SECTOR)
        assert blocks == length // BLOCK + 1
        with repo.open_image('twin') as image:
            for at in (0, 3 * SECTOR - 1, 3 * SECTOR, 5000, 41 * BLOCK):
                assert image.read(10000, at) == TWIN[at:at + 10000]
    repositories.require_clean(path)


def test_twin_of_a_project_is_found_in_its_scope_alone(path):
    with repositories.open_repository(path) as repo:
        one = {'project': 'one', 'scope': 'project'}
        repositories.put(repo, 'one', DATA, **one)
        other = repositories.put(repo, 'other', TWIN, project='two',
                                 scope='project')
        assert other.new_bytes == other.size - other.zero_bytes
        assert repo.statistics()['phase_changes'] == 0
        assert repositories.put(
            repo, 'twin', TWIN, **one).new_bytes == 3 * SECTOR
        assert repositories.read_all(repo, 'other') == TWIN
        assert repositories.read_all(repo, 'twin') == TWIN
    repositories.require_clean(path)


def test_short_blocks_are_merged_collected_and_scrubbed(path):
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'one', DATA)
        first, = groups_of(repo, 'one')
        # The upload cannot find the blocks and stores them again; the twin
        # finds the new ones.
        with repositories.collector_in(path, first):
            repositories.put(repo, 'again', DATA)
            repositories.put(repo, 'twin', TWIN)
        assert first not in groups_of(repo, 'twin')
        with maintainer_role.Maintainer(repo) as maintainer:
            report = merger.run_once(maintainer, pacing.Pace())
            assert report.images == 2
            assert first in groups_of(repo, 'twin')
            assert repositories.read_all(repo, 'twin') == TWIN
            repo.delete('again')
            collector.run_once(maintainer, pacing.Pace(), live_share=100,
                               evacuate_share=100)
            scrubber.run_once(maintainer, pacing.Pace(), full=True,
                              spare_threshold=1)
            assert repositories.read_all(repo, 'twin') == TWIN
    repositories.require_clean(path)


def test_short_blocks_are_pulled_as_they_are_cut(path, tmp_path):
    fresh = repositories.create(tmp_path / 'fresh')
    with (repositories.open_repository(path) as repo,
          repositories.open_repository(fresh) as here):
        repositories.put(repo, 'one', DATA)
        repositories.put(repo, 'twin', TWIN)
        with daemons.running(path) as daemon, daemon.client() as client:
            pull.pull(here, 'twin', client)
            # All blocks were new there, so they are stored one after the
            # other.
            first = 3 * SECTOR + 40 * BLOCK
            assert lengths_of(here, 'twin') == [
                (0, first, 41), (first, 9 * BLOCK, 0),
                (first + 9 * BLOCK, 40 * BLOCK, 40)]
            assert pull.pull(here, 'one', client).asked_blocks == 0
        for image_id, data in (('one', DATA), ('twin', TWIN)):
            assert repositories.read_all(here, image_id) == data
    repositories.require_clean(fresh)
