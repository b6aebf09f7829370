# SPDX-License-Identifier: Apache-2.0

"""Locks, process ids and forks of dead processes; and clocks that jump.

Processes are killed while they hold all that a process can hold; others are
given their numbers; processes fork in the middle of everything; two daemons
and the command line are maintainers by turns; a clock is set a year back, and
forward again, while a daemon runs.
"""

import contextlib
import itertools
import json
import os
import pathlib
import random
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import merger
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from tests.functional import clocks
from tests.functional import soak_run
from tests.support import daemons
from tests.support import maintenance
from tests.support import repositories
from tests.support.repositories import noise

pytestmark = pytest.mark.slow

LIMIT = 180
GROUP = maintenance.SLOTS * maintenance.BLOCK
YEAR = 365 * 86400
PID = 500

# The limit of a test that waits for many processes, seconds.
PATIENT = pytest.mark.timeout(600)


@pytest.fixture
def path(tmp_path):
    return maintenance.create(tmp_path)


@contextlib.contextmanager
def running(role, path, *arguments, before=(), **options):
    """Run this file as a process, which prints a line when it is ready."""
    process = subprocess.Popen(
        [*before, sys.executable, '-m', 'tests.functional.test_dead', role,
         str(path), *map(str, arguments)], cwd=daemons.ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT)


def said(process):
    """Return the next line that a process prints."""
    assert select.select([process.stdout], [], [], LIMIT)[0], 'it hangs'
    return process.stdout.readline()


def collect(repo):
    """Run accounting and collection; return the collection's result."""
    pace = pacing.Pace()
    with maintenance.maintaining(repo) as maintainer:
        accounting.run_once(maintainer, pace)
        return collector.run_once(maintainer, pace, live_share=0,
                                  evacuate_share=0)


# -- locks and blocks of dead processes ---------------------------------------

def hold(path):
    """Hold all that a writer and a reader can hold, until killed."""
    repo = repositories.open_repository(path)
    image = repo.open_image('deleted')
    held = [repo.begin(f'never-{n}') for n in range(3)]
    for n, transaction in enumerate(held):
        transaction.write(noise(3 * GROUP, f'held {n}'))
    held[0].keep()
    held[1].keep()
    # The transaction shares a group, and its recipe is to name blocks of it.
    held[2].write(noise(GROUP, 'kept'))
    repo.delete('deleted')
    print('ready', os.getpid(), flush=True)
    sys.stdin.read()
    assert image and held


def hold_as_maintainer(path):
    """Hold the maintainer's lock, intents, and a group."""
    repo = repositories.open_repository(path)
    maintainer = maintainer_role.Maintainer(repo)
    numbers = maintainer.engine.groups()
    group = maintainer.engine.enter_group(numbers[0])
    assert all(maintainer.engine.announce(n) for n in numbers[1:])
    print('ready', os.getpid(), flush=True)
    sys.stdin.read()
    assert group


def collect_here(path):
    """Print the number of blocks that a collection in this process frees."""
    with repositories.open_repository(path) as repo:
        print('ready', os.getpid(), collect(repo).freed_blocks, flush=True)


def put_kept_and_deleted(path):
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'kept', noise(GROUP, 'kept'))
        repositories.put(repo, 'deleted', noise(2 * GROUP, 'deleted'))
        collect(repo)
    return {'kept': noise(GROUP, 'kept')}


def require_all_given_back(path, contents):
    soak_run.require_no_locks(path)
    with repositories.open_repository(path) as repo:
        collect(repo)
    soak_run.require_exact(path, contents)
    with repositories.open_repository(path) as repo:
        again = repositories.put(repo, 'again', noise(3 * GROUP, 'again'))
        # Others can use a group that a dead process had leased or announced.
        assert repositories.put(repo, 'kept-too', contents['kept']
                                ).new_bytes == 0
        assert again.new_bytes == 3 * GROUP


def test_a_writer_and_a_reader_die(path):
    """Their blocks stay until both die; then a collection frees them."""
    contents = put_kept_and_deleted(path)
    with running('hold', path) as process:
        assert said(process).startswith('ready')
        with repositories.open_repository(path) as repo:
            assert collect(repo).freed_blocks == 0
        assert len(repositories.spool(path)) == 3
        assert len(repositories.spool(path, 'D')) == 1
        process.kill()
        process.wait(LIMIT)
        require_all_given_back(path, contents)


def test_a_maintainer_dies(path):
    contents = put_kept_and_deleted(path)
    with running('hold_as_maintainer', path) as process:
        assert said(process).startswith('ready')
        with repositories.open_repository(path) as repo:
            with pytest.raises(exceptions.BusyError):
                collect(repo)
            # No process uses its groups now; writers do without them.
            stat = repositories.put(repo, 'beside', contents['kept'])
            assert stat.new_bytes == GROUP
            repo.delete('beside')
            repo.delete('deleted')
        process.kill()
        process.wait(LIMIT)
        require_all_given_back(path, contents)


_SAME_NUMBER = f"""
next() {{ echo {PID - 1} > /proc/sys/kernel/ns_last_pid; }}
next
"$0" -m tests.functional.test_dead hold "$1" > "$1.held" < "$1.fifo" &
victim=$!
exec 9> "$1.fifo"
while ! grep -q ready "$1.held"; do sleep 0.05; done
kill -9 $victim
wait $victim
next
"$0" -m tests.functional.test_dead collect_here "$1"
exit
"""


@PATIENT
def test_a_number_used_again(path):
    """The next process gets the number of the process that held everything."""
    contents = put_kept_and_deleted(path)
    os.mkfifo(f'{path}.fifo')
    done = subprocess.run(
        ['unshare', '--pid', '--fork', '--mount-proc', '--kill-child', 'bash',
         '-c', _SAME_NUMBER, sys.executable, str(path)], cwd=daemons.ROOT,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LIMIT)
    if 'unshare' in done.stderr or 'ns_last_pid' in done.stderr:
        pytest.skip(f'numbers cannot be chosen here: {done.stderr}')
    assert pathlib.Path(f'{path}.held').read_text() == f'ready {PID}\n'
    ready, number, freed = done.stdout.split()
    assert int(number) == PID, done
    # The writer synced six groups, and the image had two.
    assert int(freed) == 8 * maintenance.SLOTS, done
    require_all_given_back(path, contents)


def test_a_number_that_another_has(path):
    """As in two containers, both processes live, and both are number 1."""
    contents = put_kept_and_deleted(path)
    before = ['unshare', '--pid', '--fork', '--kill-child']
    if subprocess.run([*before, 'true'], capture_output=True).returncode:
        pytest.skip('there are no namespaces of process ids here')
    with running('hold', path, before=before) as holder:
        assert said(holder) == 'ready 1\n'
        with running('collect_here', path, before=before) as other:
            assert said(other) == 'ready 1 0\n'
        assert len(repositories.spool(path)) == 3
    repositories.eventually(lambda: soak_run.users_of(path) == set())
    require_all_given_back(path, contents)


# -- forks --------------------------------------------------------------------

def fork_again_and_again(path, seed, count):
    """Fork while threads store, read and maintain; children end variously."""
    rng = random.Random(seed)
    repo = repositories.open_repository(path, threads=2)
    ending = threading.Event()
    failed = []

    def thread(work):
        def loop():
            try:
                while not ending.is_set():
                    work()
            except BaseException as e:
                failed.append(repr(e))
                raise
        started = threading.Thread(target=loop)
        started.start()
        return started

    repositories.put(repo, 'read', noise(5 * GROUP, 'read'))
    numbers = itertools.count()

    def store():
        name = f'parent-{next(numbers)}'
        repositories.put(repo, name, noise(2 * GROUP + 7, name))
        repo.delete(name)

    def read():
        assert repositories.read_all(repo, 'read') == noise(5 * GROUP, 'read')

    pace = pacing.Pace()
    maintainer = maintainer_role.Maintainer(repo)

    def maintain():
        accounting.run_once(maintainer, pace)
        merger.run_once(maintainer, pace)
        collector.run_once(maintainer, pace, live_share=60,
                           evacuate_share=30)
    threads = [thread(work) for work in (store, read, maintain)]
    open_image = repo.open_image('read')
    unfinished = repo.begin('unfinished')
    unfinished.write(noise(GROUP, 'unfinished'))
    for n in range(count):
        time.sleep(rng.random() / 20)
        end = ENDS[n % len(ENDS)]
        pid = os.fork()
        if pid == 0:
            signal.alarm(LIMIT)     # ends a child that hangs
            read()
            name = f'child-{n}'
            repositories.put(repo, name, noise(GROUP, name))
            if end == 'kill':
                repo.begin('killed').write(noise(GROUP, n))
                os.kill(os.getpid(), signal.SIGKILL)
            if end == 'fork':
                # The grandchild outlives the child.
                if os.fork():
                    os._exit(0)
                repositories.put(repo, f'grand{name}', noise(GROUP, name))
                os._exit(0)
            if end == 'exit':
                sys.exit(0)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code == (-signal.SIGKILL if end == 'kill' else 0), (n, end,
                                                                   code)
        assert open_image.read() == noise(5 * GROUP, 'read')
    ending.set()
    for started in threads:
        started.join(LIMIT)
        assert not started.is_alive(), failed
    assert not failed
    unfinished.commit()
    maintainer.close()
    repo.close()
    print('ready', flush=True)


ENDS = ['_exit', 'exit', 'kill', 'fork']


def forks(path, count):
    seed = random.randrange(10 ** 9)
    print(f'seed {seed}')
    with running('fork_again_and_again', path, seed, count) as process:
        assert said(process) == 'ready\n'
        assert process.wait(LIMIT) == 0
    repositories.eventually(lambda: soak_run.users_of(path) == set())
    contents = {'read': noise(5 * GROUP, 'read'),
                'unfinished': noise(GROUP, 'unfinished')}
    for n in range(count):
        contents[f'child-{n}'] = noise(GROUP, f'child-{n}')
        if ENDS[n % len(ENDS)] == 'fork':
            contents[f'grandchild-{n}'] = contents[f'child-{n}']
    soak_run.require_no_locks(path)
    with repositories.open_repository(path) as repo:
        soak_run.settle(repo)
    soak_run.require_exact(path, contents)


@PATIENT
def test_forks(path):
    forks(path, 12)


@pytest.mark.long
def test_forks_for_long(path):
    forks(path, 400)


# -- maintainers by turns -----------------------------------------------------

def by_turns(path, seconds):
    """Run two daemons, each killed in its turn, and commands beside them."""
    seed = random.randrange(10 ** 9)
    print(f'seed {seed}')
    rng = random.Random(seed)
    contents = {}
    with repositories.open_repository(path) as repo:
        collect(repo)               # there is a catalog from the start
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(daemons.Daemon(path, **soak_run.INTERVALS))
                for _ in range(2)]
        for daemon in both:
            daemon.program = daemons.impatient(account=0.2,
                                               TRIAL_INTERVAL=0.2)
            daemon.start(wait=False)
        repo = stack.enter_context(repositories.open_repository(path))
        numbers = itertools.count()
        killed = 0
        while time.monotonic() < end or killed < 2:
            until = time.monotonic() + rng.uniform(0.5, 2)
            while time.monotonic() < until:
                name = f'image-{next(numbers)}'
                data = noise(rng.randrange(GROUP), name) + noise(
                    GROUP, rng.randrange(5))
                repositories.put(repo, name, data)
                contents[name] = data
                if len(contents) > 20:
                    name = rng.choice(sorted(contents))
                    repo.delete(name)
                    del contents[name]
            # This is as the command line would, if there were no daemon.
            with contextlib.suppress(exceptions.BusyError), (
                    maintainer_role.Maintainer(repo)) as maintainer:
                accounting.run_once(maintainer, pacing.Pace())
            daemon = both[killed % 2]
            other = both[1 - killed % 2]
            daemon.kill()
            killed += 1
            # The other daemon must do the maintainer's work.
            other.wait_for(lambda: other.status()['daemon']['role']
                           == 'maintainer', LIMIT)
            other.wait_for_catalog()
            assert other.run('account')['last']['error'] is None
            daemon.start(wait=False)
        for daemon in both:
            daemon.wait_for(daemon.status)
            assert daemon.status()['errors'] == []
            assert daemon.stop() == 0, daemon.text()
            assert 'was rebuilt' not in daemon.text(), daemon.text()
        soak_run.settle(repo)
    soak_run.require_exact(path, contents)
    soak_run.require_no_locks(path)


@PATIENT
def test_maintainers_by_turns(path):
    by_turns(path, 4)


@pytest.mark.long
def test_maintainers_by_turns_for_long(path):
    by_turns(path, 300)


# -- clocks -------------------------------------------------------------------

@PATIENT
def test_the_clock_is_set_back(path, tmp_path):
    """If the clock jumps, tasks neither stall nor spin; images are right."""
    clock = clocks.Clock(tmp_path)
    contents = {}
    interval = 1
    with daemons.Daemon(path, **{**soak_run.INTERVALS,
                                 'collect_interval': interval}) as daemon, (
            repositories.open_repository(path)) as repo:
        daemon.environment = clock.environment
        daemon.program = daemons.impatient(account=1, SAMPLE_INTERVAL=0.2)
        daemon.start().wait_for_catalog()
        for number, offset in enumerate((0, -YEAR, YEAR, 0)):
            clock.set(offset)
            shown = json.loads(subprocess.run(
                [sys.executable, '-c', 'import time; print(time.time())'],
                env={**os.environ, **clock.environment}, check=True,
                capture_output=True, timeout=LIMIT).stdout)
            assert abs(shown - time.time() - offset) < 3600
            name = f'image-{number}'
            contents[name] = noise(GROUP, number)
            repositories.put(repo, name, contents[name])
            began = time.monotonic()
            before = daemon.status()['tasks']['collect']
            daemon.wait_for(lambda: daemon.status()['tasks']['collect'][
                'runs'] >= before['runs'] + 2)
            tasks = daemon.status()['tasks']
            passed = time.monotonic() - began
            runs = tasks['collect']['runs'] - before['runs']
            assert runs <= passed / interval + 2, (runs, passed)
            for name, status in tasks.items():
                if status['last'] is not None:
                    assert status['last']['seconds'] >= 0, (name, status)
                    assert status['last']['error'] is None
                if status['next'] is not None:
                    left = status['next'] - time.time() - offset
                    assert left < 3600 * 24 * 31, (name, status)
        with daemon.client() as client:
            for name, data in contents.items():
                with client.open_image(name) as stream:
                    assert stream.read(stream.size) == data
        assert daemon.status()['errors'] == []
        # The next daemon finds samples and a scrub of the future.
        clock.set(-YEAR)
        daemon.stop()
        daemon.start().wait_for_catalog()
        for name in ('account', 'scrub', 'merge', 'collect'):
            last = daemon.run(name)['last']
            assert last['error'] is None and last['seconds'] >= 0, last
        assert daemon.stop() == 0, daemon.text()
        assert 'Traceback' not in daemon.text(), daemon.text()
        soak_run.settle(repo)
    soak_run.require_exact(path, contents)


if __name__ == '__main__':
    globals()[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))
