#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""The daemon, uploads, deletes and reads, any of them killed at any moment.

A real daemon that has everything to do every second, processes of two hosts
(they do not see one another's hints, so that there is something to merge), and
operators' commands while no daemon runs. The oracle is that of ``storm.py``.
At the end one more accounting, merging and collection must leave exactly the
distinct blocks of the images that are there.

With ``--long`` it goes on for GLANCE_DEDUP_SOAK_SECONDS, 300 without it.
GLANCE_DEDUP_SOAK_SEED chooses what is random; the moments at which processes
get their turn are not.
"""

import collections
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from dedupd import accounting
from dedupd import collector
from dedupd import merger
from dedupd import task
from glance_dedup import check
from tests import daemons
from tests.functional import storm
from tests.functional import witness as witness_module
from tests import maintenance
from tests import repositories

SOAK_SECONDS = int(os.environ.get('GLANCE_DEDUP_SOAK_SECONDS', 300))
ROUND = 8               # seconds
#: Seconds that anything may take that ought to take none.
LIMIT = 60
IMAGES = 30
KINDS = [storm.UPLOADER, storm.UPLOADER, storm.UPLOADER, storm.DELETER,
         storm.READER, storm.READER]
INTERVALS = {'collect_interval': 1, 'merge_interval': 1, 'scrub_interval': 2,
             'scrub_rate_mib': 0, 'spare_threshold': 8,
             'collect_live_share': 60, 'collect_evacuate_share': 30}

#: What may be found at the end: the last catalog that was set aside; and the
#: index keeps records of freed blocks until it meets others like them.
EXPECTED = ('files of damaged bytes are set aside',
            'index records of blocks that are no more')


class Soak:
    """One repository, its daemon, and the processes that use it."""

    def __init__(self, path, seed):
        self.path = path
        self.rng = random.Random(seed)
        self.daemon = daemons.Daemon(path, **INTERVALS)
        self.daemon.program = daemons.impatient(
            ACCOUNT=1, TRIAL_INTERVAL=0.3, RETRY_INTERVAL=1.0)
        self.names = itertools.count()
        self.running = {}
        self.logs = []
        self.uploads = {}
        self.kills = collections.Counter()
        self.done = collections.Counter()
        self.deadline = 0.0

    # -- processes ---------------------------------------------------------

    def start_worker(self, steps):
        name = f'w{next(self.names)}'
        host = self.rng.randrange(2)
        log = self.path.parent / f'{name}.log'
        self.logs.append(log)
        job = {'path': str(self.path), 'log': str(log), 'name': name,
               'deadline': self.deadline, 'steps': steps, 'ids': IMAGES,
               'socket': self.daemon.socket,
               'filter_dir': str(self.path.parent / f'host-{host}')}
        process = subprocess.Popen(
            [sys.executable, '-m', 'tests.functional.storm', json.dumps(job)],
            cwd=daemons.ROOT, stdin=subprocess.DEVNULL)
        self.running[process] = (steps, log)

    def kill_worker(self):
        process = self.rng.choice(list(self.running))
        steps, _ = self.running.pop(process)
        process.kill()
        process.wait(LIMIT)
        self.kills['worker'] += 1
        self.start_worker(steps)

    def reap(self):
        for process in [p for p in self.running if p.poll() is not None]:
            _, log = self.running.pop(process)
            assert process.returncode == 0, (
                log.read_text()[-3000:] if log.exists() else process)

    def command(self, name, kill_after=None):
        """An operator's command, which may be killed."""
        process = subprocess.Popen(
            [sys.executable, '-m', 'glance_dedup.cli.main', '--repository',
             str(self.path), '--filter-dir', str(self.path.parent / 'host-0'),
             '--socket', self.daemon.socket, name, '--config-file',
             str(self.daemon.config)], cwd=daemons.ROOT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True)
        try:
            said, _ = process.communicate(
                timeout=LIMIT if kill_after is None else kill_after)
            assert process.returncode == 0, said
            self.kills['command done'] += 1
        except subprocess.TimeoutExpired:
            assert kill_after is not None, f'{name} does not end'
            self.kills['command'] += 1
        finally:
            process.kill()
            process.communicate()

    def kill_daemon(self):
        """And go on without it for a while."""
        self.daemon.kill()
        self.kills['daemon'] += 1
        rng = self.rng
        if rng.random() < 0.1:
            # It can be spared at any time (I9).
            (self.path / 'fence').unlink(missing_ok=True)
        for _ in range(rng.randrange(3)):
            self.command(rng.choice(['collect', 'merge', 'scrub']),
                         rng.choice([None, rng.uniform(0.3, 1.5)]))
        self.start_daemon()

    def start_daemon(self):
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            # Already at its start.
            self.daemon.start(wait=False)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.daemon.process.wait(self.rng.uniform(0.2, 1.5))
                raise AssertionError(self.daemon.text()[-3000:])
            self.daemon.kill()
            self.kills['start'] += 1
        self.daemon.start(wait=False)

    # -- rounds ------------------------------------------------------------

    def round(self, seconds):
        self.logs.clear()
        self.deadline = time.monotonic() + seconds
        for steps in KINDS:
            self.start_worker(steps)
        deeds = [self.kill_daemon, self.kill_worker]
        self.rng.shuffle(deeds)     # at least once each
        while deeds or time.monotonic() < self.deadline:
            time.sleep(min(2.0, self.rng.expovariate(1.0)))
            if deeds:
                deeds.pop()()
                continue
            self.reap()
            if time.monotonic() < self.deadline - 1:
                self.rng.choices([self.kill_daemon, self.kill_worker],
                                 [3, 7])[0]()
        for process in list(self.running):
            process.wait(LIMIT)
        self.reap()

    def judge(self):
        """Nobody but the daemon is at work now."""
        uploads, reads = storm.read_logs(self.logs, self.uploads)
        storm.judge_reads(uploads, reads)
        for log in self.logs:
            log.unlink(missing_ok=True)
        with repositories.open_repository(self.path) as repo:
            contents = storm.judge_end(repo, uploads)
            self.uploads = storm.survivors(uploads, repo)
            self.daemon.wait_for_catalog()
            for name in ('merge', 'collect', 'scrub'):
                last = self.daemon.run(name)['last']
                assert last['error'] is None, last
                self.done.update({
                    key: value for key, value in last['result'].items()
                    if type(value) is int})
            maintenance.need_contents(repo, contents)
        with self.daemon.client() as client:
            for image_id, data in contents.items():
                with client.open_image(image_id) as stream:
                    assert stream.read(stream.size) == data, image_id
            status = client.status()
        assert status['damage'] == {'blocks': 0, 'images': []}
        assert status['catalog']['unreadable'] == {}
        assert status['errors'] == []
        text = self.daemon.text()
        assert 'Traceback' not in text, text[text.index('Traceback'):][:3000]
        for line in text.splitlines():
            assert ' ERROR ' not in line, line
        os.truncate(self.daemon.log, 0)
        return contents

    def close(self):
        for process in self.running:
            process.kill()
            process.wait(LIMIT)
        self.daemon.close()


def distinct_blocks(contents):
    blocks = {data[at:at + storm.BLOCK] for data in contents.values()
              for at in range(0, len(data), storm.BLOCK)}
    return {block for block in blocks if any(block)}


def settle(repo):
    """One more run of everything."""
    control = task.Control()
    with maintenance.maintaining(repo) as maintainer:
        accounting.run_once(maintainer, control)
        merged = merger.run_once(maintainer, control)
        assert not merged.gave_up and not merged.busy, merged
        accounting.run_once(maintainer, control)
        collected = collector.run_once(maintainer, control, live_share=0,
                                       evacuate_share=0)
        assert not collected.busy and not collected.refused, collected
        return merged, collected


def need_exact(path, contents):
    """Not a block too much, nor too few; in counts, groups and catalog."""
    wanted = distinct_blocks(contents)
    with repositories.open_repository(path) as repo:
        assert repo.images() == sorted(contents)
        for image_id, data in contents.items():
            assert repositories.read_all(repo, image_id) == data
        expected = maintenance.expected_counts(repo)
        with maintenance.maintaining(repo) as maintainer:
            numbers = {group for group, _ in expected} | set(
                maintenance.groups(path))
            assert maintenance.counts(maintainer.catalog, numbers) == expected
            statistics = maintainer.catalog.statistics()
            assert maintainer.unreadable() == {}
    assert os.listdir(path / 'spool') == []
    assert len(expected) == len(wanted)
    assert maintenance.live_slots(path) == set(expected)
    assert statistics['unique_blocks'] == len(wanted)
    assert statistics['images'] == len(contents)
    assert statistics['logical_bytes'] == sum(map(len, contents.values()))
    report = check.check(path)
    assert [str(f) for f in report.findings
            if not f.sentence.endswith(EXPECTED)] == []
    assert report.figures['garbage_blocks'] == 0
    assert report.figures['duplicate_blocks'] == 0


def soak(tmp_path, seconds):
    seed = int(os.environ.get('GLANCE_DEDUP_SOAK_SEED',
                              random.randrange(10 ** 9)))
    print(f'GLANCE_DEDUP_SOAK_SEED={seed}')
    path = maintenance.create(tmp_path)
    end = time.monotonic() + seconds
    with contextlib.closing(Soak(path, seed)) as it:
        it.start_daemon()
        while True:
            it.round(ROUND)
            contents = it.judge()
            if time.monotonic() > end:
                break
        assert it.daemon.stop() == 0
        print(dict(it.kills), dict(it.done), len(contents), 'images')
        repositories.need_clean(path)
        with repositories.open_repository(path) as repo:
            print(*settle(repo))
        need_exact(path, contents)
        assert it.kills['worker'] and it.kills['daemon']


# -- killed between any two system calls --------------------------------------

@pytest.fixture(scope='module')
def witness(tmp_path_factory):
    witness = witness_module.Witness(
        witness_module.build(tmp_path_factory.mktemp('witness')))
    yield witness
    witness.close()


class Scene:
    """A repository in which a maintainer has some of everything to do."""

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
                # Nothing of the second group is left, and little of the first.
                if i > 7 and i % 4 != 0:
                    # Every other block goes on being used.
                    self.put(repo, f'part-{i}', b''.join(
                        whole[at:at + maintenance.BLOCK] for at in
                        range(0, len(whole), 2 * maintenance.BLOCK)))
                self.delete(repo, f'whole-{i}')
            self.delete(other, 'there')
        self.deleted = content(0, 1)
        # It ends without an end of its transactions.
        witness.run(path, [['hold', 'never', 98, 7000], ['abort', 'never', 99,
                                                         7000]])

    def put(self, repo, image_id, data):
        repositories.put(repo, image_id, data)
        self.contents[image_id] = data

    def delete(self, repo, image_id):
        repo.delete(image_id)
        del self.contents[image_id]

    def copy(self, directory):
        """The repository's path in a copy, with all links."""
        subprocess.run(['cp', '-a', str(self.directory), str(directory)],
                       check=True, timeout=LIMIT)
        return directory / 'repository'

    def count(self, path):
        """How many calls change something; and what comes out."""
        run = self.witness.run(path, [self.MAINTAIN])
        assert run.status == 0 and not run.outcomes[0]['error'], run.outcomes
        return sum(c.result is None and c.name in witness_module.MUTATING
                   for c in run.calls), run.outcomes[0]

    def kill_at(self, path, number):
        """Have it killed before its n-th such call; what that was."""
        left = itertools.count(number, -1)

        def hook(call):
            if call.result is None and call.name in witness_module.MUTATING:
                return witness_module.KILL if next(left) == 0 else None
            return None

        run = self.witness.run(path, [self.MAINTAIN], hook)
        assert run.status == -signal.SIGKILL, (run.status, run.outcomes)
        return run.calls[-1]

    def judge(self, path):
        """What the next ones make of it."""
        repositories.need_clean(path)
        contents = dict(self.contents)
        with repositories.open_repository(path) as repo:
            maintenance.need_contents(repo, contents)
            # Some of its blocks may just have been freed.
            contents['later'] = self.deleted + repositories.noise(1000, 'x')
            repositories.put(repo, 'later', contents['later'])
            assert repositories.read_all(repo, 'later') == contents['later']
            settle(repo)
        need_exact(path, contents)


@pytest.fixture(scope='module')
def scene(tmp_path_factory, witness):
    return Scene(tmp_path_factory.mktemp('scene'), witness)


def kill_at_each(scene, tmp_path, choose):
    path = scene.copy(tmp_path / 'whole')
    calls, outcome = scene.count(path)
    scene.judge(path)
    # There was some of everything.
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

def test_soak(tmp_path):
    soak(tmp_path, 12)


@pytest.mark.long
@pytest.mark.timeout(2 * SOAK_SECONDS + 600)
def test_soak_for_long(tmp_path):
    soak(tmp_path, SOAK_SECONDS)
