# SPDX-License-Identifier: Apache-2.0

"""A collection removes volumes whose making or deletion was interrupted."""

import pytest

from dedupd.tasks import collector
from glance_dedup.base import imageids
from glance_dedup.base import pacing
from glance_dedup.repository import volumes
from tests.support import maintenance
from tests.support import volume_writer

pytest_plugins = ['tests.support.maintainer_fixtures']


@pytest.fixture
def path(tmp_path):
    return maintenance.create(tmp_path)


def make(path, repo, name, state=None):
    volume = volume_writer.Volume(path, bytes.fromhex(repo.repository_id),
                                  name)
    if state is not None:
        volume.journal(state=state).save()
    return volume


def collect(maintainer):
    return collector.run_once(maintainer, pacing.Pace())


def test_only_unfinished_ones(path, repo, maintainer):
    ready = make(path, repo, 'ready', volume_writer.READY)
    for volume in (ready, make(path, repo, 'making', volume_writer.MAKING),
                   make(path, repo, 'deleting', volume_writer.DELETING)):
        for name in (volume.recipe(None), volume.recipe(3, 1)):
            volume_writer.store_recipe(repo, name)
    make(path, repo, 'none')
    damaged = make(path, repo, 'damaged', volume_writer.MAKING)
    damaged.journal().path.write_bytes(b'GDVOLJ')
    make(path, repo, 'newer', volume_writer.DELETING).journal(
        2, major=2, state=volume_writer.DELETING).save()
    result = collect(maintainer)
    assert (result.removed_volumes, result.failed_volumes) == (3, {})
    assert volumes.names(repo.path) == ['damaged', 'newer', 'ready']
    assert {imageids.of_volume(name).volume_id for name in repo.recipes()} == {
        ready.id.hex()}
    assert collect(maintainer).removed_volumes == 0


def test_owned_ones_stay(path, repo, maintainer):
    volume = make(path, repo, 'making', volume_writer.MAKING)
    with volume_writer.owning(volume):
        assert collect(maintainer).removed_volumes == 0
    assert collect(maintainer).removed_volumes == 1


def test_one_that_was_made_meanwhile_stays(path, repo, maintainer,
                                           monkeypatch):
    """A volume that is completed between the check and the lock stays."""
    make(path, repo, 'new', volume_writer.READY)
    monkeypatch.setattr(volumes, 'look', lambda *a: volumes.Volume(
        'new', None, False))
    result = collect(maintainer)
    assert (result.removed_volumes, result.failed_volumes) == (0, {})
    assert volumes.names(repo.path) == ['new']


def test_errors(path, repo, maintainer):
    """A volume that cannot be removed stops neither others nor collecting."""
    for name in ('a', 'b', 'c'):
        make(path, repo, name, volume_writer.DELETING)
    (path / 'volumes' / 'b' / 'strange').write_bytes(b'')
    result = collect(maintainer)
    assert result.removed_volumes == 2
    assert list(result.failed_volumes) == ['b']
    assert volumes.names(repo.path) == ['b']


def test_what_they_had_is_freed_at_once(path, repo, maintainer):
    """The volumes are removed before the count, so their blocks are freed."""
    volume = make(path, repo, 'old', volume_writer.DELETING)
    volume_writer.store_recipe(repo, volume.recipe(0, 1),
                               maintenance.content(1))
    result = collect(maintainer)
    assert (result.removed_volumes, result.freed_blocks) == (1, 10)
    assert collect(maintainer).removed_volumes == 0


def test_a_dry_run_removes_nothing(path, repo, maintainer):
    make(path, repo, 'deleting', volume_writer.DELETING)
    collector.plan(maintainer)
    assert volumes.names(repo.path) == ['deleting']
