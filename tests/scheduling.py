# SPDX-License-Identifier: Apache-2.0
"""Distributes the tests among processes, and puts them in order.

Tests that run in one process, one after the other, are a *scope*. A scope is a
file, whose tests share its fixtures, with two exceptions: the tests of the
files in :data:`SPLIT` are scopes of their own, and the files of a group in
:data:`GROUPS`, which share a cloud, are one scope.

The scopes that take longest start first, so that no long one runs alone at the
end while the other processes are idle. ``tests/durations.json`` has the
seconds of each. Scopes without an entry start before all others.

::

    tools/test --durations-file tests/durations.json
    tools/test --all -m slow --durations-file tests/durations.json

record the durations of the tests that ran, and leave those of the others. Each
also records the time of the whole run, under :data:`WHOLE`. A run that fails,
or is interrupted, records nothing.
"""

import collections
import json
import pathlib
import time

import pytest
from xdist import scheduler

HERE = pathlib.Path(__file__).resolve().parent
FILE = HERE / 'durations.json'
#: Seconds from the begin to the end of a run without options, and of a run of
#: the slow tests alone.
WHOLE = 'all tests'
#: Every test in these files may run in another process.
SPLIT = {'tests/unit/test_c.py'}
#: Tests that need compute hosts of their own, and tests that do not.
GROUPS = {
    'tests/cloud/ with compute hosts': {
        f'tests/cloud/test_{name}.py' for name in (
            'cache', 'neighbours', 'nova_base', 'relay')},
    'tests/cloud/': {
        f'tests/cloud/test_{name}.py' for name in (
            'boot', 'clients', 'cold', 'down', 'signatures', 'tempest',
            'volumes')},
}


def scope_of(node_id):
    """Return the scope of a test."""
    path = node_id.partition('::')[0]
    if path in SPLIT:
        return node_id
    for name, files in GROUPS.items():
        if path in files:
            return name
    return path


def read(path=FILE):
    """Return seconds by scope: of its quick tests, and of its slow ones."""
    try:
        durations = json.loads(path.read_text())
        return {scope: [float(quick), float(slow)]
                for scope, (quick, slow) in durations.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as exc:
        raise pytest.UsageError(
            f'{path} is damaged ({exc}); restore it with git checkout, or '
            'remove it and record it again: see '
            'tests/scheduling.py') from None


def write(path, durations):
    lines = (f'{json.dumps(name)}: {json.dumps(seconds)}'
             for name, seconds in sorted(durations.items()))
    path.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


def sort(items, is_slow, durations=None):
    """Put the scopes that take longest first; within one, keep the order.

    :param is_slow: returns whether a test is slow
    """
    if durations is None:
        durations = read()
    scopes = {}
    for item in items:
        scopes.setdefault(scope_of(item.nodeid), []).append(item)

    def seconds(scope):
        known = durations.get(scope)
        if known is None:
            return float('inf')
        return sum(known[slow] for slow in {
            is_slow(item) for item in scopes[scope]})

    order = sorted(scopes, key=seconds, reverse=True)
    items[:] = [item for scope in order for item in scopes[scope]]


class Recorder:
    """Adds up the tests' times, in the leading process of a run."""

    def __init__(self, path, whole=None):
        """Record in a file.

        :param whole: which tests run: 0, those without options; 1, all slow
            ones; None, only some of these
        """
        self.path = path
        self.seconds = collections.defaultdict(lambda: [0.0, 0.0])
        self.whole = whole
        self.begin = time.monotonic()

    def pytest_runtest_logreport(self, report):
        slow = 'slow' in report.keywords
        self.seconds[scope_of(report.nodeid)][slow] += report.duration

    def pytest_sessionfinish(self, session):
        if session.exitstatus != pytest.ExitCode.OK:
            return
        if self.whole is not None:
            self.seconds[WHOLE][self.whole] = time.monotonic() - self.begin
        durations = read(self.path)
        for scope, seconds in self.seconds.items():
            known = durations.get(scope, [0.0, 0.0])
            durations[scope] = [round(new or old, 1)
                                for new, old in zip(seconds, known)]
        write(self.path, durations)


class ByScope(scheduler.LoadScopeScheduling):
    """xdist's scheduler, with our scopes."""

    def _split_scope(self, nodeid):
        return scope_of(nodeid)
