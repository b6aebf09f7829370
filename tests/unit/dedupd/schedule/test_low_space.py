# SPDX-License-Identifier: Apache-2.0

"""Groups move at once if the disk has too little free space."""

import pathlib
import threading
import time

from oslo_config import cfg
import pytest

from dedupd import opts
from dedupd.schedule import low_space
from dedupd.schedule import task_scheduler
from dedupd.tasks import registry
from glance_dedup.objects import object_location
from glance_dedup.repository import cold_settings
from tests.support import repositories
from tests.support import schedulers

MIB = 1 << 20
GROUP = 256 * 4096
KEPT = 10 * MIB


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A repository that is attached to an unused object store."""
    path = repositories.create(tmp_path / 'repository',
                               group_slots=256)
    cold_settings.write(path, cold_settings.Settings(
        object_location.parse('s3://bucket/prefix'), '/nowhere', ('0' * 32,),
        1))
    with repositories.open_repository(path) as repo:
        monkeypatch.setattr(repo, 'room', lambda: (repo.free, KEPT))
        repo.free = 100 * MIB
        yield repo


@pytest.fixture
def ran(monkeypatch):
    """The names of the tasks that ran; none does work, and no scrub ends."""
    found = []

    def noted(name, worker, pace, options, **arguments):
        found.append(name)
        if name == 'scrub':
            for number in range(10**9):
                pace.step(number, 10**9, 'working')
                time.sleep(0.002)

    monkeypatch.setattr(registry, 'run', noted)
    monkeypatch.setattr(task_scheduler, 'LOOK_INTERVAL', 0.02)
    return found


@pytest.fixture
def conf():
    found = cfg.ConfigOpts()
    found.register_opts(opts.dedupd_opts, group='dedupd')
    found([], default_config_files=[])
    for name, value in (('tier_interval', 86400), ('tier_free_mib', 50)):
        found.set_override(name, value, 'dedupd')
    return found


def test_below_what_is_to_be_free(repo):
    shortage = low_space.Shortage(repo)
    assert not shortage.look(50 * MIB)
    repo.free = 50 * MIB - 1
    assert shortage.look(50 * MIB)
    assert not shortage.look(0)
    # The store refuses uploads at KEPT, so a group moves earlier.
    repo.free = KEPT + GROUP - 1
    assert shortage.look(1)
    repo.free = KEPT + GROUP
    assert not shortage.look(1)


def test_a_run_that_freed_too_little_is_not_repeated_at_once(
        repo, monkeypatch):
    shortage = low_space.Shortage(repo)
    repo.free = 40 * MIB
    assert shortage.look(50 * MIB)
    shortage.ended()
    assert not shortage.look(50 * MIB)
    # An upload has filled another group.
    repo.free -= GROUP
    assert shortage.look(50 * MIB)
    shortage.ended()
    assert not shortage.look(50 * MIB)
    monkeypatch.setattr(low_space, 'RETRY', 0.0)
    assert shortage.look(50 * MIB)


def test_a_repository_that_is_not_attached(repo):
    repo.free = 0
    shortage = low_space.Shortage(repo)
    file = pathlib.Path(repo.path, 'cold.json')
    file.rename(file.with_suffix('.away'))
    assert not shortage.look(50 * MIB)
    file.write_bytes(b'damaged')
    assert not shortage.look(50 * MIB)


def test_a_disk_that_is_filled_has_groups_move(repo, conf, ran):
    with schedulers.running(repo, conf) as scheduler:
        time.sleep(0.2)
        assert 'tier' not in ran
        scheduler.request('scrub')
        schedulers.wait_for(lambda: 'scrub' in ran)
        repo.free = 40 * MIB
        schedulers.wait_for(lambda: 'tier' in ran)
        schedulers.wait_for(lambda: ran[-1] == 'scrub')
        assert ran.count('tier') == 1
        repo.free -= GROUP
        schedulers.wait_for(lambda: ran.count('tier') == 2)


@pytest.mark.parametrize('option', ['tier_interval', 'tier_free_mib'])
def test_never_by_itself(repo, conf, ran, option):
    conf.set_override(option, 0, 'dedupd')
    repo.free = 40 * MIB
    with schedulers.running(repo, conf):
        time.sleep(0.3)
        assert 'tier' not in ran


def test_what_was_requested_goes_on_after_a_pause(repo, conf, monkeypatch):
    """A requested move continues although low space requires one, too."""
    runs, finish = [], threading.Event()

    def run(name, worker, pace, options, **arguments):
        runs.append((name, arguments))
        while name == 'tier' and not finish.is_set():
            pace.step(1, 2, 'working')
            time.sleep(0.002)

    monkeypatch.setattr(registry, 'run', run)
    monkeypatch.setattr(task_scheduler, 'LOOK_INTERVAL', 0.0)
    monkeypatch.setattr(low_space, 'RETRY', 0.0)
    everything = ('tier', {'everything': True})
    with schedulers.running(repo, conf) as scheduler:
        number = scheduler.request('tier', everything=True)
        schedulers.wait_for(lambda: everything in runs)
        repo.free = 40 * MIB
        for count in (2, 3):
            scheduler.request('merge')
            schedulers.wait_for(lambda: runs.count(everything) == count)
        time.sleep(0.1)
        assert runs[-1] == everything
        finish.set()
        done = scheduler.wait('tier', number, 60)
    assert done['finished'] == done['last']['number'] == number
    assert done['last']['arguments'] == {'everything': True}
