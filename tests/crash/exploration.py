# SPDX-License-Identifier: Apache-2.0

"""Recording workloads, and trying the states that a crash may leave.

This runs in a process into which ``explorer.py`` has preloaded the recorder.
It opens no repository itself: a child process does that.
"""

import copy
import itertools
import json
import os
import pathlib
import pickle
import random
import select
import shlex
import shutil
import sys
import tempfile
import time
import traceback

from tests.crash import expected_state
from tests.crash import filesystem
from tests.crash import maintenance_workloads
from tests.crash import record
from tests.crash import stages
from tests.crash import states
from tests.crash import verify
from tests.crash import volume_workloads
from tests.crash import workloads
from tests.support import repositories

WORKLOADS = (workloads.WORKLOADS | maintenance_workloads.WORKLOADS
             | volume_workloads.WORKLOADS)
JOBS = 2
TIMEOUT = 120       # seconds, for one state or one recording
NUMBERS = 60        # choices of a strategy by chance, at each point
PORTION = 400       # states for which a journal is gone through once
RECOVERY_STATES = 12    # of one recovery, at most


class Scene:
    """A recording: a base, and the changes to it since.

    :ivar base: a FileSystem as it was before
    :ivar expectation: of then
    :ivar filter_file: a filter as it was at the end
    """

    def __init__(self, name, base, expectation, records, filter_file=None):
        self.name = name
        self.base = base
        self.expectation = expectation
        self.records = records
        self.filter_file = filter_file

    def at(self, points):
        """Return (point, FileSystem, Expectation) for each point, sorted."""
        fs = copy.deepcopy(self.base)
        expectation = self.expectation.copy()
        fed = 0
        for point in points:
            for made in self.records[fed:point]:
                fs.feed(made)
                if made.kind is record.Kind.MARK:
                    expectation.feed(made)
            fed = point
            yield point, fs, expectation

    def words(self, point):
        return (f'{point} of {len(self.records)}: after '
                f'{self.records[point - 1]}')

    def specs(self, point):
        """Return all contents that were stored before."""
        marks = (json.loads(made.data) for made in self.records[:point]
                 if made.kind is record.Kind.MARK)
        return [mark['spec'] for mark in marks if mark.get('spec')]

    def pauses(self, point):
        """Return the earlier points between two operations, without locks."""
        if self.name.endswith('-meeting'):
            return []
        return [i for i, made in enumerate(self.records[:point - 1], 1)
                if made.kind is record.Kind.MARK and b'"end"' in made.data]


class State:
    """One state to be verified; `strategy` and `number` identify it."""

    def __init__(self, scene, seed, point, strategy, number):
        self.scene = scene
        self.seed = seed
        self.point = point
        self.strategy = strategy
        self.number = number
        self.tree = None
        self.world = None

    def __str__(self):
        return f'{self.point}:{self.strategy}:{self.number}'

    def make(self, fs, expectation):
        """Make the state's tree; return False if there is none.

        :param fs: at the point, as `expectation`
        """
        self.expectation = expectation.copy()
        self.expectation.interrupted(self.strategy in states.KILLED)
        if self.strategy == states.SURVIVOR:
            pauses = self.scene.pauses(self.point)
            if not pauses:
                return False
            # The pause before the operation under way, or any.
            rng = random.Random(f'{self.seed} {self.point} {self.number}')
            self.begin = rng.choice(pauses) if self.number else pauses[-1]
            for _, self.fs, _ in self.scene.at([self.begin]):
                self.tree = self.fs.crash(filesystem.Choice())
            return True
        choice = states.choose(fs, self.strategy, self.seed, self.number)
        if choice is not None:
            self.tree = fs.crash(choice)
        return choice is not None

    def key(self):
        """Return a key, equal for equal states, with the other variations."""
        more = None
        if self.strategy == states.SURVIVOR:
            more = (self.scene.name, self.point, self.begin)
        elif self.strategy == 'kill' and self.number == 1:
            more = 'filter'
        return (self.tree.digest(), self.expectation.digest()), more

    def verify(self, world):
        """Write it to a directory, recover, and compare; in a child only."""
        self.tree.write(world)
        if self.strategy == states.SURVIVOR:
            return verify.verify_survivor(
                world, self.fs,
                self.scene.records[self.begin:self.point], self.expectation,
                self.scene.specs(self.point))
        filter_file = None
        if self.strategy == 'kill' and self.number == 1:
            filter_file = self.scene.filter_file
        # Only a merge notices what a merge lost, and there may be few points
        # at which a crash loses it.
        merge = self.scene.name.startswith('merging') or self.point % 2 == 0
        return verify.verify(world, self.expectation, filter_file, merge)


class Explorer:
    """Explores scenes.

    :param report: called with each finding, a dictionary
    :param most: findings after which it ends
    :param seconds: after which it ends; None: never
    :param strategies: names; None: all
    """

    def __init__(self, seed, keep, report, most=1, seconds=None,
                 strategies=None):
        base = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None
        self.top = tempfile.mkdtemp(prefix='glance-dedup-crash-', dir=base)
        # A check's copy of the catalog is to be in memory, too.
        tempfile.tempdir = self.top
        self.seed = seed
        self.keep = keep
        self.report = report
        self.most = most
        self.deadline = time.monotonic() + seconds if seconds else None
        self.strategies = strategies or (*states.STRATEGIES, states.SURVIVOR)
        self.seen = set()
        self.seen_more = set()      # of which something besides is varied
        self.by_strategy = dict.fromkeys(self.strategies, 0)
        self.recoveries = 0
        self.findings = 0
        self._running = {}          # pipe: (child, State)
        self._numbers = itertools.count()

    def close(self):
        for (pid, _), _ in self._running.values():
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        shutil.rmtree(self.top, ignore_errors=True)

    def over(self):
        return self.findings >= self.most or (
            self.deadline is not None and time.monotonic() > self.deadline)

    def _directory(self, name):
        path = os.path.join(self.top, f'{name}-{next(self._numbers)}')
        os.mkdir(path)
        return path

    # -- recording --------------------------------------------------------

    def record(self, workload):
        """Run a workload under record; return the scene."""
        top = self._directory('workload')
        world = os.path.join(top, 'world')
        os.mkdir(world)
        base = filesystem.FileSystem(world)
        self._run(top, WORKLOADS[workload])
        scene = Scene(workload, base, expected_state.Expectation(),
                      record.read(os.path.join(top, 'journal')))
        require_complete(scene, world)
        shutil.rmtree(world)
        for path in pathlib.Path(top, 'filter').glob('*'):
            scene.filter_file = str(path)
        return scene

    def record_recovery(self, state, fs, expectation):
        """Recover a state under record; return the new scene.

        :param fs: at its point, as `expectation`; is changed
        """
        top = self._directory('recovery')
        world = os.path.join(top, 'world')
        state.tree.write(world)
        if state.strategy == 'kill':
            # Data that the killed process had not synced is still not synced.
            base = fs
            base.move(world)
        else:
            base = filesystem.FileSystem(world)
            expectation = state.expectation
        self._run(top, lambda stage: verify.recover(stage, expectation))
        scene = Scene(f'{state.scene.name} {state}', base, expectation,
                      record.read(os.path.join(top, 'journal')))
        require_complete(scene, world)
        shutil.rmtree(world)
        return scene

    @staticmethod
    def _run(top, work):
        world = os.path.join(top, 'world')

        def run():
            recorder = record.Recorder(os.path.join(top, 'journal'), world)
            work(stages.Stage(world, top, recorder))
        repositories.in_child(run, TIMEOUT)

    # -- exploring --------------------------------------------------------

    def explore(self, scene, most, recoveries=0, depth=2):
        """Verify so many distinct states, or all; return their number.

        :param recoveries: of so many of them the recovery is recorded, and
            explored in its turn
        :param depth: how often a recovery crashes in its turn
        """
        rng = random.Random(f'{self.seed} {scene.name}')
        candidates = self._candidates(scene, rng)
        before = len(self.seen)
        done = []
        while most > len(self.seen) - before and not self.over():
            left = most - (len(self.seen) - before)
            portion = list(itertools.islice(
                candidates, min(PORTION, 2 * left + 10)))
            if not portion:
                break
            done += self._explore_portion(
                scene, sorted(portion), before + most)
        self._drain()
        for state in rng.sample(done, min(recoveries, len(done))):
            if not self.over():
                self._crash_in_recovery(
                    state, min(RECOVERY_STATES, -(-most // 3)), depth)
        return len(self.seen) - before

    def _candidates(self, scene, rng):
        """Yield (point, strategy, number) in random order.

        Each strategy has its share, even if it has few states.
        """
        points = range(1, len(scene.records) + 1)
        several = []
        for name in self.strategies:
            numbers = NUMBERS
            if name == states.SURVIVOR:
                numbers = 2
            elif name in states.SINGLE:
                numbers = 2 if name == 'kill' and scene.filter_file else 1
            several.append([(point, name, number) for point in points
                            for number in range(numbers)])
            rng.shuffle(several[-1])
        return (candidate for some in itertools.zip_longest(*several)
                for candidate in some if candidate is not None)

    def _explore_portion(self, scene, portion, most):
        done = []
        by_point = itertools.groupby(portion, lambda candidate: candidate[0])
        points = {point: list(some) for point, some in by_point}
        for point, fs, expectation in scene.at(sorted(points)):
            for _, strategy, number in points[point]:
                if len(self.seen) >= most or self.over():
                    return done
                state = State(scene, self.seed, point, strategy, number)
                if state.make(fs, expectation) and self._is_new(state):
                    self.start(state)
                    if strategy != states.SURVIVOR:
                        done.append(state)
        return done

    def _is_new(self, state):
        key, more = state.key()
        if more is not None:
            if (key, more) in self.seen_more:
                return False
            self.seen_more.add((key, more))
        elif key in self.seen:
            return False
        if state.strategy != states.SURVIVOR:
            self.seen.add(key)
        self.by_strategy[state.strategy] += 1
        return True

    def _crash_in_recovery(self, state, most, depth):
        for _, fs, expectation in state.scene.at([state.point]):
            state.make(fs, expectation)
        try:
            scene = self.record_recovery(state, fs, expectation)
        except Exception:
            self._found(state, 'the recovery failed: '
                        + traceback.format_exc())
            return
        self.recoveries += 1
        self.explore(scene, most, int(depth > 1), depth - 1)

    # -- children ---------------------------------------------------------

    def start(self, state):
        while len(self._running) >= JOBS:
            self._reap()
        state.world = self._directory('state')
        child = repositories.fork_child(
            lambda: state.verify(os.path.join(state.world, 'world')))
        self._running[child[1]] = child, state

    def _reap(self):
        ready, _, _ = select.select(list(self._running), [], [], TIMEOUT)
        pipe = (ready or list(self._running))[0]
        child, state = self._running.pop(pipe)
        try:
            wrong = repositories.wait_for_child(child, 30)
        except repositories.ChildFailed as e:
            wrong = f'the verification died: {e}'
        shutil.rmtree(state.world, ignore_errors=True)
        if wrong:
            self._found(state, wrong)
        else:
            state.tree = None   # it can be made again

    def _drain(self):
        while self._running:
            self._reap()

    def verify(self, state):
        """Verify one state alone."""
        self.start(state)
        self._drain()

    # -- findings ---------------------------------------------------------

    def _found(self, state, sentence):
        self.findings += 1
        os.makedirs(self.keep, exist_ok=True)
        place = pathlib.Path(tempfile.mkdtemp(
            prefix='finding-', dir=os.path.abspath(self.keep)))
        state.tree.write(place / 'tree')
        scene = copy.copy(state.scene)
        if scene.filter_file is not None:
            scene.filter_file = shutil.copy(scene.filter_file, place)
        with open(place / 'scene', 'wb') as f:
            pickle.dump(scene, f)
        self.report({
            'workload': state.scene.name, 'state': str(state),
            'seed': self.seed, 'point': state.scene.words(state.point),
            'finding': sentence, 'tree': str(place / 'tree'),
            'command': shlex.join([
                sys.executable, '-m', 'tests.crash.explorer',
                '--scene', str(place / 'scene'), '--state', str(state),
                '--seed', str(self.seed)])})


def load_state(path, name, seed):
    """Make the same state that a finding's command names."""
    with open(path, 'rb') as f:
        scene = pickle.load(f)
    point, strategy, number = name.split(':')
    state = State(scene, seed, int(point), strategy, int(number))
    for _, fs, expectation in scene.at([state.point]):
        state.make(fs, expectation)
    return state


def require_complete(scene, world):
    """Require that replaying the whole journal gives the real tree."""
    for _, fs, _ in scene.at([len(scene.records)]):
        expected = fs.crash(filesystem.Choice()).contents()
    found = {}
    for path, names, files in os.walk(world):
        for name in names:
            found[os.path.relpath(os.path.join(path, name), world)] = None
        for name in files:
            file = os.path.join(path, name)
            found[os.path.relpath(file, world)] = pathlib.Path(
                file).read_bytes()
    # LevelDB's messages go through a stream, which is not recorded.
    for contents in (found, expected):
        for path in contents:
            if os.path.basename(path) in ('LOG', 'LOG.old'):
                contents[path] = b''
    if found.keys() != expected.keys():
        raise AssertionError(f'the recorder missed what made '
                             f'{sorted(found.keys() ^ expected.keys())}')
    for path, content in found.items():
        if content != expected[path]:
            raise AssertionError(f'the recorder missed what changed {path}')
