# SPDX-License-Identifier: Apache-2.0

"""Processes of all kinds on one repository, any of them killed at any moment.

The soak: two Glances, daemons, clients, processes that use the repository by
themselves, and operators' commands; see ``soak_run.py``. It runs with
``--long``, for GLANCE_DEDUP_SOAK_SECONDS, 1500 without it (an hour: 3600).
GLANCE_DEDUP_SOAK_SEED determines the random choices; the moments at which
processes get their turn are not determined.

The other test kills a maintainer between any two of its system calls.
"""

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import time

import pytest

from tests.functional import soak_run
from tests.functional import watched_process
from tests.support import maintenance
from tests.support import repositories

pytestmark = pytest.mark.slow

SOAK_SECONDS = int(os.environ.get('GLANCE_DEDUP_SOAK_SECONDS', 1500))
ROUND = 12              # seconds
#: The kinds of processes that must have been killed before a test ends.
KILLED = ('worker', 'client', 'daemon', 'glance', 'glance worker')
LIMIT = 60


# -- killed between any two system calls --------------------------------------

@pytest.fixture(scope='module')
def witness(tmp_path_factory):
    witness = watched_process.Witness(
        watched_process.build(tmp_path_factory.mktemp('witness')))
    yield witness
    witness.close()


class Scene:
    """A repository in which a maintainer has some of every kind of work."""

    MAINTAIN = ['maintain', 60, 30]

    def __init__(self, directory, witness):
        self.witness = witness
        self.directory = directory
        path = maintenance.create(directory)
        content = maintenance.content
        self.contents = {}
        with repositories.open_repository(path) as repo, (
                repositories.open_repository(
                    path, filter_dir=str(directory / 'other'))) as other:
            # From now on neither sees the hints of the other.
            self.put(repo, 'here', content(1000))
            self.put(other, 'there', content(1001))
            for i in range(16):
                self.put(repo, f'whole-{i}', content(2 * i, 2 * i + 1))
            # Most of it is counted before it is deleted.
            witness.run(path, [self.MAINTAIN])
            for i in range(16):
                whole = self.contents[f'whole-{i}']
                if i > 7 and i % 4 == 3:
                    self.put(other, f'again-{i}', whole[:5000])
                    continue
                # The second group gets no live block, and the first only a
                # few.
                if i > 7 and i % 4 != 0:
                    # Every other block stays in use.
                    self.put(repo, f'part-{i}', b''.join(
                        whole[at:at + maintenance.BLOCK] for at in
                        range(0, len(whole), 2 * maintenance.BLOCK)))
                self.delete(repo, f'whole-{i}')
            self.delete(other, 'there')
        self.deleted = content(0, 1)
        # The process ends without ending its transactions.
        witness.run(path, [['hold', 'never', 98, 7000], ['abort', 'never', 99,
                                                         7000]])

    def put(self, repo, image_id, data):
        repositories.put(repo, image_id, data)
        self.contents[image_id] = data

    def delete(self, repo, image_id):
        repo.delete(image_id)
        del self.contents[image_id]

    def copy(self, directory):
        """Return the repository's path in a copy, with all links."""
        subprocess.run(['cp', '-a', str(self.directory), str(directory)],
                       check=True, timeout=LIMIT)
        return directory / 'repository'

    def count(self, path):
        """Return the number of calls that change files, and the outcome."""
        run = self.witness.run(path, [self.MAINTAIN])
        assert run.status == 0 and not run.outcomes[0]['error'], run.outcomes
        return sum(c.result is None and c.name in watched_process.MUTATING
                   for c in run.calls), run.outcomes[0]

    def kill_at(self, path, number):
        """Kill the maintainer before its n-th such call; return that call."""
        left = itertools.count(number, -1)

        def hook(call):
            if call.result is None and call.name in watched_process.MUTATING:
                return watched_process.KILL if next(left) == 0 else None
            return None

        run = self.witness.run(path, [self.MAINTAIN], hook)
        assert run.status == -signal.SIGKILL, (run.status, run.outcomes)
        return run.calls[-1]

    def judge(self, path):
        """Require that later processes find a clean, exact repository."""
        repositories.require_clean(path)
        contents = dict(self.contents)
        with repositories.open_repository(path) as repo:
            maintenance.require_contents(repo, contents)
            # Some of its blocks may just have been freed.
            contents['later'] = self.deleted + repositories.noise(1000, 'x')
            repositories.put(repo, 'later', contents['later'])
            assert repositories.read_all(repo, 'later') == contents['later']
            soak_run.settle(repo)
        soak_run.require_exact(path, contents)


@pytest.fixture(scope='module')
def scene(tmp_path_factory, witness):
    return Scene(tmp_path_factory.mktemp('scene'), witness)


def kill_at_each(scene, tmp_path, choose):
    path = scene.copy(tmp_path / 'whole')
    calls, outcome = scene.count(path)
    scene.judge(path)
    # There was some of every kind of work.
    assert outcome['account']['uncounted'] and outcome['account']['removed']
    assert outcome['merge']['images'], outcome
    for name in ('freed_blocks', 'punched', 'rewritten', 'evacuated',
                 'unlinked'):
        assert outcome['collect'][name], (name, outcome)
    for number in choose(calls):
        path = scene.copy(tmp_path / str(number))
        call = scene.kill_at(path, number)
        try:
            scene.judge(path)
        except BaseException:
            print(f'killed before call {number} of {calls}: {call}')
            raise
        shutil.rmtree(path.parent)


def test_killed_at_some_calls(scene, tmp_path):
    seed = random.randrange(10 ** 9)
    print(f'seed {seed}')
    kill_at_each(scene, tmp_path, lambda calls: random.Random(seed).sample(
        range(calls), 15))


@pytest.mark.long
def test_killed_at_each_call(scene, tmp_path):
    kill_at_each(scene, tmp_path, range)


# -- all of it ----------------------------------------------------------------

def soak(tmp_path, seconds):
    seed = int(os.environ.get('GLANCE_DEDUP_SOAK_SEED',
                              random.randrange(10 ** 9)))
    print(f'GLANCE_DEDUP_SOAK_SEED={seed}', flush=True)
    path = maintenance.create(tmp_path)
    with contextlib.closing(soak_run.Soak(path, seed)) as it:
        try:
            it.start_glance()
            it.start_daemon()
            end = time.monotonic() + seconds
            while True:
                it.round(ROUND)
                contents = it.judge()
                it.report()
                if (time.monotonic() > end
                        and all(it.kills[who] for who in KILLED)):
                    break
            it.judge_memory()
            it.end(contents)
        except BaseException:
            it.last_words()
            raise


@pytest.mark.long
@pytest.mark.timeout(2 * SOAK_SECONDS + 600)
def test_soak(tmp_path):
    soak(tmp_path, SOAK_SECONDS)
