# SPDX-License-Identifier: Apache-2.0

"""Two hosts on a real file system store, read, delete and maintain at once.

Each host has processes that store, read and delete, one that takes a volume
over from that of the other host and writes it, a dedupd that collects, merges,
scrubs and recompresses, and a reader of all files through descriptors that
stay open. Processes are killed at random. After each round both hosts must
have every acknowledged image, byte by byte, and what was flushed to the
volume, and their checks must find nothing. At the end a fresh mount judges,
too.
"""

import contextlib
import itertools
import os
import random
import shutil
import subprocess
import sys
import time

import pytest

from glance_dedup.repository import openvolumes
from tests.functional import conftest
from tests.functional import soak_run
from tests.functional import storm
from tests.functional import test_hosts
from tests.functional import volume_storm
from tests.sharedfs import fuse_hosts
from tests.support import daemons
from tests.support import repositories

ROUND = 8               # seconds
#: A round may take so many seconds on a busy machine.
ROUND_LIMIT = 120
ROUNDS = int(os.environ.get('GLANCE_DEDUP_STORM_ROUNDS', 60))
ENOUGH = {**test_hosts.ENOUGH, 'sessions': 6, 'writes': 60}
KILLS = int(os.environ.get('GLANCE_DEDUP_STORM_KILLS', 200))


class Storm(test_hosts.Cluster):
    """Two hosts without Glance, and with a volume."""

    def __init__(self, directory, hosts, seed):
        super().__init__(directory, hosts, seed)
        with repositories.open_repository(self.path) as repo:
            volume_storm.create(repo)
        self.sessions = []              # the last one, of the round before

    def round(self, seconds):
        self.note(f'round {next(self.rounds)}')
        self.deadline = time.monotonic() + seconds
        with contextlib.ExitStack() as stack:
            for number in range(2):
                self.watch(number, stack)
                for steps in (*test_hosts.KINDS, storm.OWNER):
                    self.start_worker_on(number, steps)
            self.kill_at_random(self.deeds(), rate=0.5)

    def watch(self, number, stack):
        stack.enter_context(test_hosts.Watcher(self.path_on(number)))

    def deeds(self):
        return {self.kill_daemon: 1, self.kill_worker: 2}

    def judge(self):
        """Judge the round on both hosts; only the daemons are at work."""
        self.note('judge')
        uploads, reads = storm.read_logs(self.logs['storm'], self.uploads)
        storm.judge_reads(uploads, reads)
        self.tally(reads, uploads, {})
        self.sessions += volume_storm.read_sessions(self.logs['storm'])
        self.done['sessions'] += len(self.sessions)
        self.done['writes'] += sum(one.written for one in self.sessions)
        self.chief()
        for number, daemon in enumerate((self.daemon, self.other)):
            contents, self.uploads = self.judge_mount(number, uploads)
            self.judge_daemon(daemon, contents)
        volume_storm.judge(self.sessions)
        del self.sessions[:-1]
        for log in self.logs['storm']:
            log.unlink(missing_ok=True)
        self.logs['storm'].clear()

    def judge_mount(self, number, uploads):
        """Read all images on a host, and check the repository there."""
        path = self.path_on(number)
        with repositories.open_repository(path) as repo:
            contents = storm.judge_end(repo, uploads)
            left = storm.survivors(uploads, repo)
            self.own_volume(number, repo)
        done = subprocess.run(
            [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
             path, 'repository', 'check'], cwd=daemons.ROOT,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=test_hosts.LIMIT)
        assert done.returncode == 0, (
            f'host {number}: {done.stdout}{done.stderr}')
        return contents, left

    def own_volume(self, number, repo):
        """Note what the volume holds, as its owner on a host."""
        with openvolumes.open_volume(repo, volume_storm.NAME) as volume:
            self.sessions.append(volume_storm.Session(
                self.life_of(number), time.monotonic(),
                volume_storm.read_state(volume)))

    def end(self):
        """Stop everything; a fresh mount has the same, and nothing more."""
        for daemon in (self.daemon, self.other):
            assert daemon.stop(limit=test_hosts.LIMIT) == 0, (
                daemon.text()[-3000:])
        for number in (1, 0):
            self.judge_mount(number, self.uploads)
        self.restart_host(0)
        contents, _ = self.judge_mount(0, self.uploads)
        volume_storm.judge(self.sessions)
        soak_run.require_no_locks(self.path)
        with repositories.open_repository(self.path) as repo:
            openvolumes.delete(repo, volume_storm.NAME)
            print(*soak_run.settle(repo))
        soak_run.require_exact(self.path, contents)

    def last_words(self):
        super().last_words()
        for number in range(2):
            copy = self.path.with_name(f'seen-by-{number}')
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(self.path_on(number), copy)
            print(f'what host {number} sees is copied to {copy}')


class ModelStorm(Storm):
    """On the model, whose hosts are killed, too: un-synced bytes are gone."""

    def watch(self, number, stack):
        """No descriptor outlives its host."""

    def deeds(self):
        return {**super().deeds(), self.kill_host: 2}


def run(it, rounds, kills):
    """Run rounds until enough was done and killed."""
    try:
        for daemon in (it.daemon, it.other):
            daemon.start(wait=False)
        for done in itertools.count(1):
            it.round(ROUND)
            it.judge()
            it.report()
            # However slow the machine is, enough work must have been done.
            if (done >= rounds and it.kills.total() >= kills and all(
                    it.done[what] >= n for what, n in ENOUGH.items())):
                break
        it.end()
    except BaseException:
        it.last_words()
        raise


def choose_seed():
    seed = int(os.environ.get('GLANCE_DEDUP_SOAK_SEED',
                              random.randrange(10 ** 9)))
    print(f'GLANCE_DEDUP_SOAK_SEED={seed}', flush=True)
    return seed


SIZES = pytest.mark.parametrize('rounds, kills', [
    pytest.param(2, 8, id='few', marks=pytest.mark.timeout(600)),
    pytest.param(ROUNDS, KILLS, id='many', marks=[
        pytest.mark.long, pytest.mark.timeout(ROUNDS * ROUND_LIMIT)])])


# Long: a real file system starts; processes work until each was killed.
@pytest.mark.slow
@SIZES
@pytest.mark.parametrize('two_hosts', conftest.REAL_FILE_SYSTEMS,
                         indirect=True)
def test_hosts_are_killed_in_a_storm(two_hosts, tmp_path, rounds, kills):
    with contextlib.closing(Storm(tmp_path, two_hosts, choose_seed())) as it:
        run(it, rounds, kills)


# Long: processes work until each was killed.
@pytest.mark.slow
@SIZES
def test_hosts_of_the_model_are_killed(tmp_path, rounds, kills):
    with fuse_hosts.hosts(tmp_path, pages='stay', rename='gap') as both:
        with contextlib.closing(
                ModelStorm(tmp_path, both, choose_seed())) as it:
            run(it, rounds, kills)
