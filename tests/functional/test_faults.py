# SPDX-License-Identifier: Apache-2.0

"""Whole tasks under faults of the system; see ``task_faults.py``.

By default a few calls of each task fail, chosen by ``GLANCE_DEDUP_SEED`` (1).
A failure prints its case; ``GLANCE_DEDUP_FAULT='TASK KIND:NTH:ERROR:OFTEN'``
tries it alone.
"""

import errno
import os
import pathlib
import random
import resource
import select
import shutil
import subprocess
import sys

import pytest

from dedupd.tasks import collector
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from tests.functional import task_faults
from tests.functional import watched_process
from tests.support import maintenance
from tests.support import repositories

pytestmark = pytest.mark.slow

Fault = task_faults.Fault

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EINTR,
          errno.EAGAIN, errno.ENOMEM, 0)
SEED = int(os.environ.get('GLANCE_DEDUP_SEED', '1'))
TOP = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def library(tmp_path_factory):
    return task_faults.build(tmp_path_factory.mktemp('faults'))


@pytest.fixture(scope='module')
def faults(library):
    faults = task_faults.Faults(library)
    yield faults
    faults.close()


def in_child(code, *arguments, **options):
    """Run code in a new process, since LevelDB would hang children of this."""
    return subprocess.run(
        [sys.executable, '-c', code, *map(str, arguments)], cwd=TOP, text=True,
        capture_output=True, timeout=100, **options)


@pytest.fixture(scope='module')
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp('template')
    made = in_child(
        'import pathlib, sys\n'
        'from tests.functional import task_faults\n'
        'task_faults.fill(pathlib.Path(sys.argv[1]))\n', path)
    assert made.returncode == 0, made.stderr
    return path


@pytest.fixture
def attempt(faults, template, tmp_path):
    """A function that tries a task in a copy of the repository."""
    case = tmp_path / 'case'

    def attempt(task, fault):
        shutil.copytree(template, case)
        try:
            result = faults.run(case / 'repository', task, fault)
        finally:
            shutil.rmtree(case)
        assert not result['problems'], '\n'.join([
            f"GLANCE_DEDUP_FAULT='{task} {fault}' ({result['what']})",
            result['outcome'], *result['problems']])
        return result
    return attempt


def errors_for(kind):
    """Return the errors for a kind; only reads and writes can be short."""
    return [error for error in ERRORS
            if error or kind in ('read', 'write', 'any')]


def makes_sense(fault):
    """Return false for endless faults that the engine waits for.

    The engine repeats interrupted calls, and waits a minute for each leased
    file.
    """
    return not (fault.forever and (
        fault.error == errno.EINTR
        or fault.error == errno.EAGAIN and fault.kind in ('open', 'any')))


@pytest.mark.parametrize('task', task_faults.TASKS)
def test_some_calls_fail(attempt, task):
    rng = random.Random(f'{SEED} {task}')
    calls = attempt(task, Fault())['calls']
    assert calls > 0
    fault = Fault('any', rng.randint(1, calls),
                  rng.choice(errors_for('any')), rng.random() < 0.3)
    if makes_sense(fault):
        attempt(task, fault)


@pytest.mark.skipif('GLANCE_DEDUP_FAULT' not in os.environ,
                    reason='no case is named')
def test_one_case(attempt):
    task, text = os.environ['GLANCE_DEDUP_FAULT'].split()
    kind, nth, error, often = text.split(':')
    attempt(task, Fault(kind, int(nth), getattr(errno, error, 0),
                        often == 'ever'))


@pytest.mark.long
@pytest.mark.parametrize('task', task_faults.TASKS)
def test_every_call_fails_once(attempt, task):
    """A task survives a failure of any one call, with varying errors."""
    for nth in range(1, attempt(task, Fault())['calls'] + 1):
        attempt(task, Fault('any', nth, ERRORS[nth % len(ERRORS)]))


@pytest.mark.long
@pytest.mark.parametrize('task', task_faults.TASKS)
def test_calls_fail_for_ever(attempt, task):
    """A task survives if all calls of a kind fail from some call on.

    That is the first call, the last, or a random one.
    """
    rng = random.Random(f'{SEED} {task} for ever')
    for kind in task_faults.KINDS:
        calls = attempt(task, Fault(kind))['calls']
        for error in errors_for(kind):
            for nth in {1, calls, rng.randint(1, max(calls, 1))} - {0}:
                fault = Fault(kind, nth, error, True)
                if calls and makes_sense(fault):
                    attempt(task, fault)


# -- limits that the system really sets ---------------------------------------

_LIMITED = '''
import gc, os, pathlib, resource, sys
from glance_dedup.base import exceptions
from tests.functional import task_faults
from tests.support import repositories

path, which, most = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
limit = getattr(resource, which)
soft, hard = resource.getrlimit(limit)
with repositories.open_repository(path, codec='none', threads=2) as repo:
    def read():
        assert repositories.read_all(repo, 'a') == task_faults.data_of('a')
    def write():
        repositories.put(repo, 'late', repositories.noise(16 << 20, 5))
    failed = 0
    if which == 'RLIMIT_NOFILE':
        most += len(os.listdir('/proc/self/fd'))
    else:
        with open('/proc/self/statm') as f:
            most += int(f.read().split()[0]) * 4096
    resource.setrlimit(limit, (most, hard))
    for work in (read, write):
        try:
            work()
        except (exceptions.RepositoryError, MemoryError) as e:
            failed += 1
            error = e
            assert len(str(e)) > 10 or isinstance(e, MemoryError), repr(e)
    resource.setrlimit(limit, (soft, hard))
    assert failed, 'the limit did nothing'
    print(type(error).__name__, error)
    read()
    if 'late' not in repo.images():
        write()
'''


# Long: the file's first test waits until its repository has been made.
@pytest.mark.parametrize('which, most', [
    ('RLIMIT_NOFILE', 0),
    pytest.param('RLIMIT_NOFILE', 1, marks=pytest.mark.slow),
    pytest.param('RLIMIT_AS', 1 << 20, marks=pytest.mark.slow)])
def test_limits(template, tmp_path, which, most):
    """A shortage of descriptors or memory is an error, and no more."""
    assert hasattr(resource, which)
    shutil.copytree(template, tmp_path / 'case')
    done = in_child(_LIMITED, tmp_path / 'case' / 'repository', which, most)
    assert done.returncode == 0, done.stdout + done.stderr


# -- a process that goes on after a failure -----------------------------------

# Stores, as glance-api does, while no group can be synced, and then goes on.
_GOES_ON = """
import ctypes, errno, os, pathlib, sys
from glance_dedup.base import exceptions
from tests.functional import task_faults
from tests.support import repositories

path = pathlib.Path(sys.argv[1]).resolve()
library = ctypes.CDLL(None)
data = repositories.noise(4 << 20, 5)

def wait_after(text):
    print(text, flush=True)
    assert sys.stdin.readline()

with repositories.open_repository(path, codec='none') as repo:
    if sys.argv[2] == 'stays':
        repositories.put(repo, 'stays', data[:1 << 20])
    library.faults_arm(
        os.fsencode(path / 'groups'), task_faults.KINDS.index('sync'),
        ctypes.c_uint64(1), errno.EIO, True)
    try:
        repositories.put(repo, 'failed', data)
    except exceptions.StorageError as e:
        assert 'Input/output error' in str(e), e
    else:
        raise AssertionError('it was stored')
    library.faults_disarm(
        ctypes.byref(ctypes.c_uint64()), ctypes.create_string_buffer(8192),
        ctypes.c_size_t(8192))
    wait_after('failed')
    repositories.put(repo, 'next', data)
    assert repositories.read_all(repo, 'next') == data
    wait_after('stored')
"""


@pytest.mark.parametrize('before', ['stays', 'nothing'])
def test_a_failed_sync_leaves_nothing_though_its_process_lives(
        library, tmp_path, before):
    """Neither in a new group, nor behind the blocks of an image."""
    path = repositories.create(tmp_path / 'repository', group_slots=8192)
    process = watched_process.start(
        library, ['-c', _GOES_ON, path, before])
    with process:
        def wait_for(text):
            ready, _, _ = select.select([process.stdout], [], [], 60)
            assert ready and process.stdout.readline() == f'{text}\n'

        def go_on():
            process.stdin.write('\n')
            process.stdin.flush()

        try:
            wait_for('failed')
            with (repositories.open_repository(path) as repo,
                  maintainer_role.Maintainer(repo) as maintainer):
                assert maintenance.disk(path) > 460_000
                collector.run_once(maintainer, pacing.Pace())
                if before == 'stays':
                    # The image, its group's fingerprint table, its recipe.
                    assert maintenance.disk(path) < (1 << 20) + 520_000
                else:
                    assert maintenance.disk(path) <= 8192
            go_on()
            wait_for('stored')
            go_on()
            assert process.wait(60) == 0
        finally:
            process.kill()
    with repositories.open_repository(path) as repo:
        assert repo.images() == (['next', 'stays'] if before == 'stays'
                                 else ['next'])
        assert repositories.read_all(repo, 'next') == repositories.noise(
            4 << 20, 5)
    repositories.require_clean(path)
