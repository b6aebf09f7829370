# SPDX-License-Identifier: Apache-2.0

"""Four processes at once on one repository, against an oracle.

Now and then one is killed and another takes its place; the test meanwhile
takes locks as the collector would. ``storm.py`` has their steps, and the
oracle.
"""

import contextlib
import itertools
import os
import random
import signal
import time

import pytest

from glance_dedup.base import exceptions
from tests.functional import storm
from tests.support import repositories
from tests.support.repositories import open_repository

pytestmark = pytest.mark.slow

WORKERS = 4
NEVER = 10 ** 6         # seconds


def be_collector_for_a_moment(path, rng):
    """Take the lease and exclusive lock of a group, if they are free."""
    with open(path / 'locks' / 'groups', 'r+b') as f:
        group = rng.randrange(1, 20)
        for byte in rng.choice([
                (repositories.INTENT_BYTE + group,),
                (group, repositories.SHARE_BYTE + group)]):
            repositories.set_lock(f.fileno(), byte, 1)  # F_WRLCK
        time.sleep(rng.random() / 50)


def run_workers(path, seconds, kill_every, names):
    """Return the logs' names and how many workers were killed."""
    rng = random.Random()
    deadline = time.monotonic() + seconds
    logs, running, killed = [], {}, 0

    def start():
        name = f'w{next(names)}'
        logs.append(path.parent / f'{name}.log')
        running[storm.start_worker(path, logs[-1], name, deadline)] = name
    for _ in range(WORKERS):
        start()
    next_kill = time.monotonic() + kill_every
    try:
        while running:
            assert time.monotonic() < deadline + 60, 'they do not end'
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in running:
                name = running.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                if code == -signal.SIGKILL:
                    killed += 1
                    if time.monotonic() < deadline:
                        start()
                else:
                    assert code == 0, f'{name} ended with {code}:\n' + (
                        path.parent / f'{name}.log').read_text()[-3000:]
                continue
            now = time.monotonic()
            if next_kill < now < deadline:
                os.kill(rng.choice(list(running)), signal.SIGKILL)
                next_kill = now + kill_every * 2 * rng.random()
            be_collector_for_a_moment(path, rng)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return logs, killed


def is_enough(uploads):
    """Check that there is something to judge."""
    acknowledged = [u for u in uploads.values() if u.put is not None]
    return len(acknowledged) > 10 and any(
        u.deleted for u in uploads.values())


def run_storm(path, seconds, kill_every=NEVER):
    names = itertools.count()
    logs, killed, uploads = [], 0, {}
    is_killing = kill_every < NEVER
    # However slow the machine is, enough work must have been done.
    while not is_enough(uploads) or (is_killing and not killed):
        more, more_killed = run_workers(path, seconds, kill_every, names)
        logs += more
        killed += more_killed
        uploads, reads = storm.read_logs(logs)
        # Otherwise all may be killed again before they have done any work.
        kill_every *= 2
    storm.judge_reads(uploads, reads)
    died = [u for u in uploads.values() if u.put is None and not u.refused]
    with open_repository(path) as repo:
        storm.judge_end(repo, uploads)
        report = repositories.require_clean(path)
        assert report.figures['images'] == len(repo.images())
        # The killed workers have left no lock that is in the way.
        for image_id in {u.image_id for u in died}:
            with contextlib.suppress(exceptions.ImageNotFound):
                repo.delete(image_id)
            repositories.put(repo, image_id, storm.content(image_id, 'after'))
            assert storm.require_right(image_id, repositories.read_all(
                repo, image_id)) == 'after'
        for group in range(1, len(os.listdir(path / 'groups')) + 1):
            for byte in (group, repositories.SHARE_BYTE + group):
                assert repositories.group_lock_held(path, byte) is None
    repositories.require_clean(path)


@pytest.fixture
def path(tmp_path):
    return repositories.create(
        tmp_path / 'repository', block_size=storm.BLOCK, group_slots=256,
        segment_size=4096)


def test_processes(path):
    run_storm(path, 5)


def test_processes_that_are_killed(path):
    run_storm(path, 6, kill_every=0.1)


@pytest.mark.long
@pytest.mark.parametrize('kill_every', [0.03, 0.3, NEVER])
def test_processes_for_long(path, kill_every):
    run_storm(path, 60, kill_every)
