# SPDX-License-Identifier: Apache-2.0

"""Guests on volumes: killed with their servers, while dedupd works.

After each kill the guest checks its file system, and the data that fio had
synced.
"""

import contextlib
import itertools
import random
import threading
import time

import pytest

from tests import needs
from tests.support import daemons
from tests.support import repositories
from tests.support import volume_tools
from tests.support import writing_guest

MIB = 1 << 20
SIZE = 600 * MIB        # three parts; XFS needs 300 MiB
TASKS = ('collect', 'merge', 'recompress', 'scrub', 'account')


@pytest.fixture(scope='module')
@needs.of(*writing_guest.NEEDS)
def system(tmp_path_factory):
    return writing_guest.build(tmp_path_factory.mktemp('system'))


@contextlib.contextmanager
def working(daemon):
    """Run the daemon's tasks by turns; yields the count of each."""
    counts = dict.fromkeys(TASKS, 0)
    errors = []
    end = threading.Event()

    def work():
        for task in itertools.cycle(TASKS):
            if end.is_set():
                return
            error = daemon.run(task)['last']['error']
            if error is not None:
                errors.append((task, error))
            counts[task] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield counts
    finally:
        end.set()
        thread.join(daemons.TASK_LIMIT)
    assert not errors


# Long: a guest boots twice, without KVM, and writes for five seconds.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize('kind', [
    pytest.param(kind, marks=[] if kind == 'ext4' else pytest.mark.long)
    for kind in writing_guest.MAKE])
@pytest.mark.parametrize('kills, seconds, size', [
    (1, 5, '2m'), pytest.param(20, 1800, '16m', marks=[
        pytest.mark.long, pytest.mark.timeout(7200)])])
def test_killed(system, tmp_path, kind, kills, seconds, size):
    """No synced data is lost, and the file system is clean.

    :param seconds: that fio writes, altogether
    """
    rng = random.Random(kills)
    lives = [rng.random() for _ in range(kills)]
    repository = volume_tools.create_repository(tmp_path / 'repository')
    writing_guest.clone_formatted(repository, tmp_path, kind, SIZE)
    last = 0
    with (daemons.running(repository) as daemon, working(daemon) as counts,
          volume_tools.Server(repository, tmp_path) as server):
        for number in range(kills + 1):
            server.start()
            with writing_guest.Guest(system, tmp_path, server, kind, last,
                                     size) as guest:
                guest.wait_for(guest.is_checked)
                if number == kills:
                    break
                end = time.monotonic() + (
                    seconds * lives[number] / sum(lives))
                guest.wait_for(lambda: time.monotonic() > end
                               and guest.last() > last)
                guest.require_healthy()
                for victim in rng.sample([guest, server], 2):
                    victim.kill()
                last = guest.last()
        repositories.eventually(lambda: all(counts.values()),
                                daemons.TASK_LIMIT, counts)
        server.stop()
    repositories.require_clean(repository)
