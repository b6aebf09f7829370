# SPDX-License-Identifier: Apache-2.0

"""Bytes that volumes have freed are counted once and collected early."""

import contextlib
import time

from oslo_config import cfg
import pytest

from dedupd import opts
from dedupd.schedule import task_scheduler
from dedupd.schedule import volume_garbage
from dedupd.tasks import accounting
from dedupd.tasks import registry
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import openvolumes
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put
from tests.support.schedulers import LIMIT
from tests.support.schedulers import running
from tests.support.schedulers import wait_for
from tests.support import volume_writer

MIB = 1 << 20


@pytest.fixture
def repo(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path, codec='none') as repo:
        yield repo


@pytest.fixture
def volume(repo):
    found = volume_writer.Volume(repo.path,
                                 bytes.fromhex(repo.repository_id))
    found.journal().save()
    return found


def leave(repo, image_id, size, seed):
    """Store this many bytes under an id, and delete it as an owner does."""
    volume_writer.store_recipe(repo, image_id, noise(size, seed))
    repo.handle().delete(image_id)


def test_only_what_editions_stored_counts(repo, volume):
    with contextlib.closing(maintainer_role.Maintainer(repo)) as maintainer:
        found = volume_garbage.Pressure(maintainer.engine)
        put(repo, 'image', noise(MIB, 1))
        repo.delete('image')
        found.look()
        assert found.bytes == 0
        leave(repo, volume.recipe(0, 1), MIB, 2)
        found.look()
        once = found.bytes
        assert MIB <= once < MIB + 10000
        found.look()
        assert found.bytes == once
        # Equal bytes are not stored again.
        volume_writer.store_recipe(repo, volume.recipe(1, 1), noise(MIB, 3))
        leave(repo, volume.recipe(1, 2), MIB, 3)
        found.look()
        assert found.bytes == once
        found.collected()
        accounting.run_once(maintainer, pacing.Pace())
        found.look()
        assert found.bytes == 0
        leave(repo, volume.recipe(1, 3), MIB, 4)
        found.look()
        assert found.bytes == once


def test_only_new_entries_are_opened(repo, volume, monkeypatch):
    with contextlib.closing(maintainer_role.Maintainer(repo)) as maintainer:
        opened = []

        class Engine:
            spool = maintainer.engine.spool

            def open_entry(self, name):
                opened.append(name)
                return maintainer.engine.open_entry(name)

        found = volume_garbage.Pressure(Engine())
        for part in range(3):
            leave(repo, volume.recipe(part, 1), 4096, part)
        found.look()
        assert len(opened) == 3
        leave(repo, volume.recipe(9, 1), 4096, 9)
        found.look()
        assert len(opened) == 4
        assert {name[:2] for name in opened} == {'D-'}


def test_a_damaged_entry_counts_nothing(repo, volume):
    with contextlib.closing(maintainer_role.Maintainer(repo)) as maintainer:
        leave(repo, volume.recipe(0, 1), 4096, 1)
        for name in maintainer.engine.spool():
            file = volume.directory.parent.parent / 'spool' / name
            file.write_bytes(bytes(8192))
        found = volume_garbage.Pressure(maintainer.engine)
        found.look()
        assert found.bytes == 0


# -- the scheduler ------------------------------------------------------------

@pytest.fixture
def conf():
    found = cfg.ConfigOpts()
    found.register_opts(opts.dedupd_opts, group='dedupd')
    found([], default_config_files=[])
    for name, value in (('collect_interval', 3600), ('merge_interval', 0),
                        ('scrub_interval', 0), ('collect_volumes_mib', 1)):
        found.set_override(name, value, 'dedupd')
    return found


@pytest.fixture
def log(monkeypatch):
    """The names of the tasks that ran; no scrub ends."""
    found = []
    run = registry.run

    def noted(name, maintainer, pace, options, **arguments):
        found.append(name)
        if name == 'scrub':
            for number in range(10**9):
                pace.step(number, 10**9, 'working')
                time.sleep(0.002)
        return run(name, maintainer, pace, options, **arguments)

    monkeypatch.setattr(registry, 'run', noted)
    monkeypatch.setattr(task_scheduler, 'LOOK_INTERVAL', 0.05)
    return found


def test_a_collection_runs_early(repo, volume, conf, log):
    with running(repo, conf) as scheduler:
        leave(repo, volume.recipe(0, 1), MIB // 2, 1)
        time.sleep(0.3)
        assert 'collect' not in log
        leave(repo, volume.recipe(0, 2), MIB // 2, 2)
        wait_for(lambda: scheduler.tasks()['collect']['runs'])
        # The count begins at zero again.
        leave(repo, volume.recipe(0, 3), MIB // 2, 3)
        time.sleep(0.3)
        assert log.count('collect') == 1
        result = scheduler.tasks()['collect']['last']['result']
        assert result['freed_bytes'] >= MIB


def test_what_accounting_removes_counts(repo, volume, conf, log, monkeypatch):
    """The scheduler counts these bytes before each task."""
    monkeypatch.setattr(task_scheduler, 'LOOK_INTERVAL', 3600)
    with running(repo, conf) as scheduler:
        leave(repo, volume.recipe(0, 1), 2 * MIB, 1)
        scheduler.wait('account', scheduler.request('account'), LIMIT)
        wait_for(lambda: scheduler.tasks()['collect']['runs'])


def test_a_scrub_makes_way(repo, volume, conf, log):
    with running(repo, conf) as scheduler:
        scheduler.request('scrub')
        wait_for(lambda: 'scrub' in log)
        leave(repo, volume.recipe(0, 1), 2 * MIB, 1)
        wait_for(lambda: scheduler.tasks()['collect']['runs'])
        wait_for(lambda: log[-1] == 'scrub')


@pytest.mark.parametrize('option', ['collect_interval', 'collect_volumes_mib'])
def test_never_early(repo, volume, conf, log, option):
    conf.set_override(option, 0, 'dedupd')
    with running(repo, conf):
        leave(repo, volume.recipe(0, 1), 2 * MIB, 1)
        time.sleep(0.3)
        assert 'collect' not in log


def test_a_dry_run_collects_nothing(repo, volume, conf, log):
    with running(repo, conf) as scheduler:
        leave(repo, volume.recipe(0, 1), MIB * 3 // 4, 1)
        number = scheduler.request('collect', dry_run=True)
        scheduler.wait('collect', number, LIMIT)
        leave(repo, volume.recipe(0, 2), MIB * 3 // 4, 2)
        wait_for(lambda: log.count('collect') == 2)


def test_repositories_without_volumes_are_not_looked_at(
        tmp_path, conf, log, monkeypatch):
    looks = []
    monkeypatch.setattr(volume_garbage.Pressure, 'look',
                        lambda self: looks.append(self))
    path = repositories.create(tmp_path / 'without')
    with repositories.open_repository(path) as repo, (
            running(repo, conf)) as scheduler:
        wait_for(lambda: scheduler.is_maintainer)
        scheduler._look(now=True)
        assert not looks
        openvolumes.create(repo, 'disk', MIB)
        scheduler._look(now=True)
        assert looks
