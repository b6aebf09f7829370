# SPDX-License-Identifier: Apache-2.0

"""Processes that move groups to an object store are killed again and again.

One process maintains: it counts, moves groups, collects, merges and scrubs.
Another one uploads and deletes. Both are killed at a random moment. Then each
image has its stored content, or, if its upload or deletion was under way, it
is whole or gone. All other objects in the object store are unnamed by groups.

All of this is a program of its own, which forks the processes to kill::

    python -m tests.functional.test_cold_kills DIR LOCATION ENDPOINT
        CREDENTIALS STATES SEED

LevelDB's background thread does not come along with a fork. A child of a
process that has used LevelDB would wait for ever until that thread has merged
its tables, so this one uses it in children only.
"""

import contextlib
import itertools
import os
import pathlib
import random
import secrets
import signal
import subprocess
import sys
import time

import pytest

from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import scrubber
from dedupd.tasks import tierer
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.maintenance import maintainer_role
from glance_dedup.objects import object_location
from glance_dedup.objects import object_store
from glance_dedup.repository import cold_settings
from glance_dedup.repository import prefix_owners
from tests.support import daemons
from tests.support import maintenance
from tests.support import repositories

pytestmark = pytest.mark.slow

pytest_plugins = ['tests.support.object_fixtures']

BLOCK, SLOTS = 512, 64
#: Seconds for a process; all of this takes 60 on a busy machine.
LIMIT = 100
#: Seconds after which the processes are killed, at least and at most. It takes
#: some time until a maintainer has begun.
SOONEST, LATEST = 0.1, 2.5


def content(spec):
    """An image: runs of numbered blocks."""
    return b''.join(repositories.noise(BLOCK, first + i)
                    for first, count in spec for i in range(count))


class Journal:
    """The log of operations, in a file that outlives a killed process."""

    def __init__(self, path):
        self.path = path

    def write(self, *fields):
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, f'{fields!r}\n'.encode())
        os.close(fd)

    def settle(self, images):
        """Record that only these images exist, whole; no others ever did."""
        new = f'{self.path}.new'
        with open(new, 'w') as f:
            for name, spec in images.items():
                f.write(f'{("put", name, spec)!r}\n'
                        f'{("did put", name)!r}\n')
        os.rename(new, self.path)

    def images(self):
        """Return the possible states of each image: contents, or None."""
        may = {}
        with open(self.path) as f:
            for line in f:
                what, name, *spec = eval(line)
                if what == 'put':
                    may[name] = [None, spec[0]]
                elif what == 'did put':
                    may[name] = may[name][-1:]
                elif what == 'delete':
                    may[name] = [None, may[name][-1]]
                else:
                    may[name] = [None]
        return may


class World:
    def __init__(self, path, location, credentials):
        self.path = repositories.create(
            path / 'r', block_size=BLOCK, group_slots=SLOTS,
            segment_size=4096)
        self.journal = Journal(path / 'journal')
        with self.open() as repo:
            self.settings = prefix_owners.attach(
                repo, location, credentials,
                cold_settings.Options(cache_mib=1))

    def open(self):
        return repositories.open_repository(
            self.path, codec='none', threads=0, segment_cache_mib=1)

    # -- the processes to kill --

    def use(self, seed):
        """Upload and delete, for ever."""
        rng = random.Random(seed)
        with self.open() as repo:
            there = repo.images()
            for number in range(1 << 30):
                if there and rng.random() < min(0.9, len(there) / 40):
                    name = there.pop(rng.randrange(len(there)))
                    self.journal.write('delete', name)
                    repo.delete(name)
                    self.journal.write('did delete', name)
                    continue
                name = f'{seed}-{number}'
                spec = [(rng.randrange(200) * 50, rng.randrange(1, 50))
                        for _ in range(rng.randrange(1, 4))]
                self.journal.write('put', name, spec)
                repositories.put(repo, name, content(spec))
                self.journal.write('did put', name)
                there.append(name)

    def maintain(self, seed):
        """Maintain, for ever."""
        rng = random.Random(seed)
        work = (
            lambda m: tierer.run_once(m, pacing.Pace(), tierer.Policy(
                everything=True, live_share=rng.choice((50, 95)))),
            lambda m: collector.run_once(
                m, pacing.Pace(), live_share=rng.choice((50, 95)),
                evacuate_share=rng.choice((0, 10, 50))),
            lambda m: merger.run_once(m, pacing.Pace()),
            lambda m: scrubber.run_once(m, pacing.Pace(),
                                        cold_budget=4 << 20))
        with self.open() as repo, maintainer_role.Maintainer(
                repo) as maintainer:
            while True:
                accounting.run_once(maintainer, pacing.Pace())
                result = rng.choices(work, (6, 3, 1, 1))[0](maintainer)
                assert not getattr(result, 'failed', None), result
                assert not getattr(result, 'images', None) or isinstance(
                    result.images, int), result

    # -- the state afterwards --

    def verify(self):
        """Check each image's content, and record what is there."""
        may = self.journal.images()
        found = {}
        with self.open() as repo:
            there = set(repo.images())
            assert there <= may.keys()
            for name, choices in may.items():
                if name not in there:
                    assert None in choices, f'{name} is lost'
                    continue
                data = repositories.read_all(repo, name)
                assert choices[-1] is not None and (
                    data == content(choices[-1])), name
                found[name] = choices[-1]
        self.journal.settle(found)

    def settle(self):
        """After a collection only needed blocks are left."""
        with self.open() as repo, maintainer_role.Maintainer(
                repo) as maintainer:
            for share in (10, 0):
                # An evacuation reveals the blocks that a dead writer left: the
                # next collection frees them.
                result = collector.run_once(maintainer, pacing.Pace(),
                                            evacuate_share=share)
                assert not result.failed and not result.refused
            assert not os.listdir(self.path / 'spool')
            damaged = maintainer.catalog.damaged()
            # A process that rebuilds the catalog moves the old one away, and
            # is killed.
            assert not damaged and all(name.startswith('catalog-') for name in
                                       os.listdir(self.path / 'quarantine'))
            assert not maintainer.catalog.scrub_state().get('unreadable')
            named = {facts['object']: facts['end'] for facts in map(
                maintainer.engine.group_facts, maintainer.engine.groups())
                if facts['is_cold']}
            needed = set(maintenance.expected_counts(repo))
        for group in maintenance.groups(self.path):
            file = repositories.Group(self.path, group)
            for slot in range(file.record()[2]):
                assert (file.state(slot) == repositories.LIVE) == (
                    (group, slot) in needed)
        with cold_settings.connect(self.settings) as store:
            there = {key[-32:]: size for key, size in store.keys(
                f'{self.settings.owner}/g/')}
        for object_id, length in named.items():
            assert there[object_id.hex()] == length
        report = checker.check(self.path)
        assert report.ok, report.findings
        return len(named), len(there) - len(named)

    def sweep(self):
        """Runs that are not killed leave no object that no group names.

        The first two take the metadata backups that no longer name the others.
        """
        with self.open() as repo, maintainer_role.Maintainer(
                repo) as maintainer:
            for _ in range(3):
                accounting.run_once(maintainer, pacing.Pace())
                result = tierer.run_once(maintainer, pacing.Pace(),
                                         tierer.Policy(everything=True))
                assert not result.failed and not result.busy, result


def kill(children):
    """Kill as kill -9 does; a child that ended by itself has failed."""
    for pid, _ in children:
        os.kill(pid, signal.SIGKILL)
    for child in children:
        with pytest.raises(repositories.ChildFailed) as e:
            repositories.wait_for_child(child, LIMIT)
        assert 'said nothing' in str(e.value), e.value


def explore(world, states, seed):
    rng = random.Random(seed)
    cold_groups = orphans = 0
    for number in itertools.count():
        # However slow the machine is, groups must have been moved.
        latest = LATEST * (1 + number // states)
        children = [
            repositories.fork_child(lambda: world.maintain(f'm{number}')),
            repositories.fork_child(lambda: world.use(f'u{number}'))]
        try:
            time.sleep(rng.uniform(SOONEST, latest))
            if rng.random() < 0.3:      # only one of both
                children.reverse()
                kill(children[:1])
                del children[0]
                time.sleep(rng.uniform(0, latest / 4))
        finally:
            with contextlib.suppress(ProcessLookupError):
                kill(children)
        repositories.in_child(world.verify, LIMIT)
        if number % 5 == 4 or number >= states - 1:
            found = repositories.in_child(world.settle, LIMIT)
            cold_groups, orphans = max(cold_groups, found[0]), found[1]
            repositories.in_child(world.verify, LIMIT)
        if cold_groups and number >= states - 1:
            break
    repositories.in_child(world.sweep, 10 * LIMIT)
    left = repositories.in_child(world.settle, LIMIT)[1]
    repositories.in_child(world.verify, LIMIT)
    print(f'{number + 1} kills, {cold_groups} cold groups at once, {orphans} '
          f'orphaned objects, {left} at last, '
          f'{len(world.journal.images())} images')
    assert cold_groups and not left


def main(directory, location, endpoint, credentials, states, seed):
    object_store.FIRST_WAIT = 0.001     # no waits between tries
    explore(World(pathlib.Path(directory),
                  object_location.parse(location, endpoint), credentials),
            int(states), seed)


def start(server, directory, states, seed):
    """Run the program; its output is shown if the test fails."""
    process = subprocess.Popen(
        [sys.executable, '-X', 'faulthandler', '-m', __name__, directory,
         f's3://{server.container}/{secrets.token_hex(8)}', server.url,
         server.credentials(directory / 'keys'), str(states),
         os.environ.get('GLANCE_DEDUP_SEED', seed)],
        cwd=daemons.ROOT, start_new_session=True)
    try:
        assert process.wait(states * LIMIT) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# Long: two processes work for some seconds before each of fifteen kills.
@pytest.mark.timeout(900)
def test_some_kills(server, tmp_path):
    start(server, tmp_path, 15, '1')


@pytest.mark.long
def test_two_hundred_kills(server, tmp_path):
    start(server, tmp_path, 200, '2')


if __name__ == '__main__':
    main(*sys.argv[1:])
