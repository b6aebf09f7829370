# SPDX-License-Identifier: Apache-2.0

"""Crash states: possible results of a machine's or process's crash.

By default a sample of the explorer's states (``explorer.py``), which
``GLANCE_DEDUP_CRASH_SEED`` and ``GLANCE_DEDUP_CRASH_STATES`` (for each
workload) change; with ``--long`` ten thousand.
"""

import inspect
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.crash import exploration
from tests.crash import explorer
from tests.crash import filesystem
from tests.crash import maintenance_workloads
from tests.crash import record
from tests.crash import states
from tests.crash import volume_workloads
from tests.crash import workloads
from tests.functional import watched_process
from tests.support import repositories

pytestmark = pytest.mark.slow

SEED = os.environ.get('GLANCE_DEDUP_CRASH_SEED', '1')
STATES = os.environ.get('GLANCE_DEDUP_CRASH_STATES', '10')
LONG_STATES = 10000
ENV_H = explorer.ROOT / 'glance_dedup' / 'engine' / 'base' / 'env.h'
NAMES = list(exploration.WORKLOADS)


def explore(tmp_path, timeout, *arguments):
    """Run the explorer; return its summary. A finding fails the test."""
    process = subprocess.Popen(
        [sys.executable, '-m', 'tests.crash.explorer', '--seed', SEED,
         '--keep', str(tmp_path / 'kept'), '--most', '3', *arguments],
        cwd=explorer.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True)
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        process.terminate()
        process.communicate(timeout=30)
        raise
    lines = output.splitlines()
    print(f'seed {SEED}: {lines[-1:]}')
    assert process.returncode == 0, '\n'.join([*lines, errors])
    return json.loads(lines[-1])


def test_no_workload_is_left_out():
    """Each public function of a stage is a workload of its name."""
    for module in (workloads, maintenance_workloads, volume_workloads):
        found = {
            name.replace('_', '-') for name, function in inspect.getmembers(
                module, inspect.isfunction)
            if function.__module__ == module.__name__ and name[0] != '_'
            and list(inspect.signature(function).parameters) == ['stage']}
        assert found == set(module.WORKLOADS)


# -- the sample ---------------------------------------------------------------

# Long: more than a hundred states are made, recovered and checked.
@pytest.mark.timeout(600)
@pytest.mark.parametrize('which', range(4))
def test_what_a_crash_leaves_is_recovered(tmp_path, which):
    found = explore(tmp_path, 500, '--workload', ','.join(NAMES[which::4]),
                    '--states', STATES, '--recoveries', '1')
    # Some workloads have few states.
    assert found['states'] >= len(NAMES[which::4]) * min(int(STATES), 20)
    assert found['recoveries'] >= len(NAMES[which::4])


@pytest.mark.long
def test_what_ten_thousand_crashes_leave_is_recovered(tmp_path):
    recoveries = 8
    found = explore(tmp_path, 1750, '--states',
                    str(LONG_STATES // len(NAMES) + 1),
                    '--recoveries', str(recoveries))
    assert found['states'] >= LONG_STATES
    assert found['recoveries'] >= recoveries * len(NAMES)
    for strategy, number in found['strategies'].items():
        assert number >= 100, strategy


# -- the recorder -------------------------------------------------------------

#: Entries of the engine's table of system calls that change neither a file's
#: content nor a name.
CHANGE_NOTHING = {
    'close', 'pread', 'fstat', 'fstatat', 'renew', 'is_shared', 'fchmod',
    'free_space', 'lock', 'is_locked', 'list', 'start_writeback',
    'start_readahead',
    'drop_cache', 'mmap_shared', 'use_large_pages', 'munmap', 'random',
    'descriptor_limit', 'getpid', 'geteuid', 'now', 'monotonic_ns',
    'thread_ns', 'sleep_ms',
    'alloc', 'release'}


def test_each_entry_of_the_table_is_known_to_the_recorder():
    """A new entry is either recorded, or named above."""
    text = ENV_H.read_text()
    body = text[text.index('struct gd_env {'):text.index('\n};')]
    entries = set(re.findall(r'\(\*(\w+)\)\(', body)) - {'visit'}
    assert entries == CHANGE_NOTHING | set(record.ENTRIES)


def test_the_recorder_misses_nothing(tmp_path):
    """The explorer notices calls that the recorder does not record.

    It replays each journal, and compares with the real tree. This test makes
    calls that the recorder cannot see.
    """
    unseen = '''
import ctypes, os
from tests.crash import exploration
def unseen(stage):
    stage.create()
    fd = os.open(os.path.join(stage.path, 'key'), os.O_RDWR)
    call = ctypes.CDLL(None).syscall
    number = {'write': 1, 'mkdir': 83, 'unlink': 87}['%s']
    path = os.path.join(stage.path, 'locks').encode()
    if number == 1:
        assert call(number, fd, b'x', ctypes.c_size_t(1)) == 1
    else:
        assert call(number, path + (b'/new' if number == 83 else b'/groups'),
                    0o700) == 0
exploration.WORKLOADS['unseen'] = unseen
from tests.crash import explorer
explorer.main(['--workload', 'unseen', '--states', '1'])
'''
    for name in ('write', 'mkdir', 'unlink'):
        script = tmp_path / f'{name}.py'
        script.write_text(unseen % name)
        library = watched_process.build(tmp_path)
        process = subprocess.run(
            [sys.executable, script], cwd=explorer.ROOT, timeout=100,
            capture_output=True, text=True,
            env={**os.environ, 'LD_PRELOAD': str(library),
                 'PYTHONPATH': str(explorer.ROOT),
                 explorer.PRELOADED: str(tmp_path / 'none')})
        assert 'the recorder missed what' in process.stderr, process.stderr


# -- the cost of recovery -----------------------------------------------------

def test_opening_does_not_depend_on_what_is_stored(tmp_path):
    """I8: The calls of opening do not depend on the number of images.

    Nor do those of an upload's or a read's begin, once there is a filter.
    """
    calls = []
    witness_ = watched_process.Witness(watched_process.build(tmp_path))
    try:
        for images in (2, 40):
            path = repositories.create(
                tmp_path / f'with-{images}', block_size=512, group_slots=64,
                segment_size=4096)
            with repositories.open_repository(path, codec='none') as repo:
                for number in range(images):
                    repositories.put(repo, f'image-{number}',
                                     repositories.noise(20 * 512, number))
            # A crash in the middle of an upload leaves this file.
            (path / 'spool' / ('T-' + 32 * '0')).touch()
            run = witness_.run(path, [['statistics'], ['read', 'image-1'],
                                      ['put', 'new', 0, 20 * 512]])
            assert [outcome.get('error') for outcome in run.outcomes
                    ] == 3 * [None]
            calls.append(len(run.made()))
    finally:
        witness_.close()
    few, many = calls
    assert many <= few + 10, calls


# -- the model of the file system ---------------------------------------------

class Model:
    """A file system of one directory, and records for it."""

    def __init__(self, tmp_path):
        top = tmp_path / 'top'
        for name in ('a', 'b'):
            (top / name).mkdir(parents=True)
        (top / 'a' / 'old').write_bytes(b'o' * 1024)
        self.fs = filesystem.FileSystem(top)
        self.inodes = {path: (top / path).stat().st_ino
                       for path in ('a', 'b', 'a/old')}
        self.next = 1 << 40

    def _feed(self, kind, inode=0, dir_=0, other_dir=0, offset=0, length=0,
              name='', other='', data=b''):
        self.fs.feed(record.Record(kind, inode, dir_, other_dir, offset,
                                   length, name, other, data))

    def create(self, path):
        self.next += 1
        self.inodes[path] = self.next
        parent, _, name = path.rpartition('/')
        self._feed(record.Kind.CREATE, self.next, self.inodes[parent],
                   name=name)

    def write(self, path, offset, data):
        self._feed(record.Kind.WRITE, self.inodes[path], offset=offset,
                   data=data)

    def truncate(self, path, length):
        self._feed(record.Kind.TRUNCATE, self.inodes[path], length=length)

    def sync(self, path):
        self._feed(record.Kind.SYNC, self.inodes[path])

    def link(self, path, new):
        self.inodes[new] = self.inodes[path]
        parent, _, name = new.rpartition('/')
        self._feed(record.Kind.LINK, self.inodes[path], self.inodes[parent],
                   name=name)

    def rename(self, path, new):
        self.inodes[new] = self.inodes[path]
        parent, _, name = path.rpartition('/')
        other, _, other_name = new.rpartition('/')
        self._feed(record.Kind.RENAME, self.inodes[path],
                   self.inodes[parent], self.inodes[other], name=name,
                   other=other_name)

    def unlink(self, path):
        parent, _, name = path.rpartition('/')
        self._feed(record.Kind.UNLINK, self.inodes[path],
                   self.inodes[parent], name=name)

    def outcomes(self, strategies=('mixture', 'lost', 'kill', 'torn-512',
                                   'one-lost', 'one-kept', 'journalled'),
                 numbers=300):
        """Return the results of many choices, as sets of (path, content)."""
        found = set()
        for strategy in strategies:
            for number in range(numbers):
                choice = states.choose(self.fs, strategy, 1, number)
                if choice is not None:
                    found.add(frozenset(
                        (path, content) for path, (_, content)
                        in self.fs.crash(choice).files.items()))
        return found

    def contents(self, path):
        """Return this path's possible contents; None: it may be absent."""
        return {dict(found).get(path) for found in self.outcomes()}


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path)


def test_sectors_are_lost_each_for_itself(model):
    model.write('a/old', 0, b'n' * 1024)
    assert model.contents('a/old') == {
        first * 512 + second * 512 for first in (b'o', b'n')
        for second in (b'o', b'n')}
    model.sync('a/old')
    assert model.contents('a/old') == {b'n' * 1024}


def test_a_sector_is_never_torn(model):
    model.write('a/old', 100, b'n' * 300)
    model.write('a/old', 200, b'm' * 300)
    one = b'o' * 100 + b'n' * 300 + b'o' * 112 + b'o' * 512
    two = b'o' * 100 + b'n' * 100 + b'm' * 300 + b'o' * 12 + b'o' * 512
    assert model.contents('a/old') == {b'o' * 1024, one, two}


def test_a_length_is_one_that_there_was(model):
    model.truncate('a/old', 100)
    model.write('a/old', 1024, b'n' * 512)
    lengths = {len(c) for c in model.contents('a/old')}
    assert lengths == {100, 1024, 1536}


def test_a_sync_of_the_file_keeps_no_name(model):
    model.create('a/new')
    model.write('a/new', 0, b'x')
    model.sync('a/new')
    assert model.contents('a/new') == {None, b'x'}
    model.sync('a')
    assert model.contents('a/new') == {b'x'}


def test_a_sync_of_the_directory_keeps_no_data(model):
    model.create('a/new')
    model.write('a/new', 0, b'x')
    model.sync('a')
    assert model.contents('a/new') == {b'', b'x', b'\0'}
    model.sync('a/new')
    assert model.contents('a/new') == {b'x'}


def test_names_of_one_file_are_lost_each_for_itself(model):
    model.link('a/old', 'a/one')
    model.link('a/old', 'b/two')
    found = {frozenset(path for path, _ in tree)
             for tree in model.outcomes()}
    assert found == {frozenset({'a/old', *more}) for more in (
        (), ('a/one',), ('b/two',), ('a/one', 'b/two'))}
    model.sync('b')
    model.unlink('a/old')
    found = {frozenset(path for path, _ in tree)
             for tree in model.outcomes()}
    assert found == {frozenset({'b/two', *more}) for more in (
        (), ('a/one',), ('a/old',), ('a/one', 'a/old'))}


def test_a_rename_happens_to_both_names_or_to_neither(model):
    model.create('b/other')
    model.sync('b/other')
    model.sync('b')
    model.rename('a/old', 'b/other')
    both = {frozenset({'a/old', 'b/other'}), frozenset({'b/other'})}
    found = {frozenset(path for path, _ in tree)
             for tree in model.outcomes()}
    assert found == both
    for tree in model.outcomes():
        tree = dict(tree)
        assert ('a/old' in tree) == (tree['b/other'] == b'')
    # A sync of either directory keeps both.
    model.sync('b')
    assert {frozenset(path for path, _ in tree)
            for tree in model.outcomes()} == {frozenset({'b/other'})}


def test_a_tree_has_the_same_links(model, tmp_path):
    model.link('a/old', 'b/two')
    made = tmp_path / 'made'
    model.fs.crash(filesystem.Choice()).write(made)
    assert (made / 'a' / 'old').samefile(made / 'b' / 'two')
    assert (made / 'b' / 'two').read_bytes() == b'o' * 1024
    assert pathlib.Path(made).stat().st_mode & 0o777 == 0o700
