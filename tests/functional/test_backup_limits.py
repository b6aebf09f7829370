# SPDX-License-Identifier: Apache-2.0

"""A backup reads no faster, and takes no more, than the operator allows."""

import dataclasses
import os
import time

import pytest

from glance_dedup.backup import backup_job
from glance_dedup.backup import limits
from glance_dedup.repository import image_repository
from tests.support import batches
from tests.support import repositories

# Bytes that the first night reads of all disks.
READ = 4 * (3 * batches.SEGMENT + 5000)
HOST = os.uname().nodename


def limited(tmp_path, ranks, **settings):
    cloud = batches.Cloud(tmp_path, ranks)
    for path in cloud.disks.directory.iterdir():
        path.write_bytes(repositories.noise(READ // 4, int(path.name[-1])))
    cloud.settings = dataclasses.replace(cloud.settings, **settings)
    return cloud


@pytest.mark.parametrize('ranks', [1, 2])
def test_the_rate_is_that_of_the_host(tmp_path, ranks):
    rate = READ // 8
    cloud = limited(tmp_path, ranks, read_rate=rate, weight=0.0)
    began = time.monotonic()
    results, held = run(cloud)
    took = time.monotonic() - began
    read = sum(result.read for result in results.values())
    assert read >= READ         # in both stages
    # A rank may make up for a pause before each stage.
    assert took >= read / rate - 2 * limits.CATCH_UP
    assert held[HOST, limits.READ_RATE] > 1
    assert held[HOST, limits.CPU_SHARE] == 0


def run(cloud):
    with image_repository.Repository(cloud.path) as repo:
        job = backup_job.Job(repo, cloud.settings, cloud.time(0),
                             lambda done, total, words: None)
        results = {found.name: found
                   for found in job.run(cloud.disks.sources())}
    assert not any(found.note for found in results.values()), results
    assert cloud.backups() == cloud.disks.digests()
    return results, job.held


def test_the_share_of_a_processor(tmp_path):
    cloud = limited(tmp_path, 1, cpu_share=0.02)
    for path in sorted(cloud.disks.directory.iterdir())[1:]:
        path.unlink()
    _, held = run(cloud)
    assert held[HOST, limits.CPU_SHARE] > 0
    assert held[HOST, limits.READ_RATE] == 0


def test_no_limit(tmp_path):
    _, held = run(limited(tmp_path, 2))
    assert set(held.values()) == {0}


# With the niceness that is added.
@pytest.mark.parametrize('priority, policy, nice', [
    ('idle', os.SCHED_IDLE, 0), ('low', os.SCHED_OTHER, 10),
    ('normal', os.SCHED_OTHER, 0)])
def test_priorities(tmp_path, monkeypatch, priority, policy, nice):
    cloud = limited(tmp_path, 1, priority=priority)
    proceed = batches.hold(tmp_path / 'site', monkeypatch, 'scan')
    found = []

    def look(processes, event):
        if event['event'] == 'view' and not found:
            pid, = batches.ranks_of(processes)
            found.extend(
                (os.sched_getscheduler(thread),
                 os.getpriority(os.PRIO_PROCESS, thread))
                for thread in map(int, os.listdir(f'/proc/{pid}/task')))
            proceed.touch()
    results = cloud.run(watch=look, monkeypatch=monkeypatch)
    assert not any(result.note for result in results.values())
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    assert len(found) > 1       # threads
    assert set(found) == {(policy, niceness)}


def test_the_command_tells_what_held_it(tmp_path):
    cloud = limited(tmp_path, 1)
    process = cloud.start('--read-rate', str(READ // 4), '--cpu-share', '100',
                          '--priority', 'normal', '--weight', '0')
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert f'--read-rate held the backup on {HOST} for ' in err
    assert '--cpu-share' not in err


@pytest.mark.parametrize('option', [
    ('--cpu-share', '0'), ('--cpu-share', '101'), ('--cpu-share', 'half'),
    ('--cpu-share', 'nan'), ('--read-rate', '-1'), ('--priority', 'high')])
def test_wrong_limits(tmp_path, option):
    process = batches.Cloud(tmp_path, 1).start(*option)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and option[0] in err, err
