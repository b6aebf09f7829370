# SPDX-License-Identifier: Apache-2.0

"""A collection removes volumes whose making or deleting was interrupted."""

import shutil

import pytest

from dedupd.tasks import collector
from dedupd.tasks import volumes
from glance_dedup.base import exceptions
from glance_dedup.base import task
from tests.support import maintenance
from tests.support import volume_writer

pytest_plugins = ['tests.support.maintainer_fixtures']


@pytest.fixture
def path(tmp_path):
    return maintenance.create(tmp_path, volumes=True)


@pytest.fixture
def asked(monkeypatch):
    """Stands for the engine: the names that it was to remove.

    An exception under a name is what it raises.
    """
    found = []
    found_errors = {}

    def remove(handle, name):
        found.append(name)
        if name in found_errors:
            raise found_errors[name]

    monkeypatch.setattr(volumes, '_remove', remove)
    remove.names, remove.errors = found, found_errors
    return remove


def make(path, repo, name, state=None):
    volume = volume_writer.Volume(path, bytes.fromhex(repo.repository_id),
                                  name)
    if state is not None:
        volume.journal(state=state).save()
    return volume


def test_only_unfinished_ones(path, repo, maintainer, asked):
    make(path, repo, 'ready', volume_writer.READY)
    make(path, repo, 'making', volume_writer.MAKING)
    make(path, repo, 'deleting', volume_writer.DELETING)
    make(path, repo, 'none')
    damaged = make(path, repo, 'damaged', volume_writer.MAKING)
    damaged.journal().path.write_bytes(b'GDVOLJ')
    make(path, repo, 'newer', volume_writer.DELETING).journal(
        2, major=2, state=volume_writer.DELETING).save()
    result = collector.run_once(maintainer, task.Pace())
    assert asked.names == ['deleting', 'making', 'none']
    assert (result.removed_volumes, result.failed_volumes) == (3, {})


def test_errors(path, repo, maintainer, asked):
    for name in ('a', 'b', 'c', 'd'):
        make(path, repo, name, volume_writer.DELETING)
    asked.errors.update(
        a=exceptions.BusyError('an owner'), b=exceptions.ImageNotFound('gone'),
        c=exceptions.StorageError('the disk failed'))
    result = collector.run_once(maintainer, task.Pace())
    assert asked.names == ['a', 'b', 'c', 'd']
    assert result.removed_volumes == 1
    assert result.failed_volumes == {'c': 'the disk failed'}


def test_what_they_had_is_freed_at_once(path, repo, maintainer, monkeypatch):
    """They are removed before the collection counts."""
    volume = make(path, repo, 'old', volume_writer.DELETING)
    volume_writer.store_recipe(repo, volume.recipe(0, 1),
                               maintenance.content(1))

    def remove(handle, name):
        handle.delete(volume.recipe(0, 1))
        shutil.rmtree(volume.directory)

    monkeypatch.setattr(volumes, '_remove', remove)
    result = collector.run_once(maintainer, task.Pace())
    assert (result.removed_volumes, result.freed_blocks) == (1, 10)
    assert collector.run_once(maintainer, task.Pace()).removed_volumes == 0


def test_a_dry_run_removes_nothing(path, repo, maintainer, asked):
    make(path, repo, 'deleting', volume_writer.DELETING)
    collector.plan(maintainer)
    assert asked.names == []
