# SPDX-License-Identifier: Apache-2.0
"""Options, time limits and the log's level, which all tests share."""

import collections
import contextlib
import ctypes
import gc
import logging
import os
import pathlib
import signal
import time
import types

import hypothesis
import pytest

from tests import needs
from tests import scheduling
from tests.support import forkserver
from tests.support import sweeps

# The time of an example depends on the machine's load.
hypothesis.settings.register_profile(
    'tests', deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile('tests')

# Seconds. A test that hangs must fail long before the whole run is given up.
# Tests share the processors with parallel ones.
TIMEOUT = 300
LONG_TIMEOUT = 1800
# The tests' servers may take this long to end; a cloud, half a minute.
TEARDOWN_TIMEOUT = 120

HERE = pathlib.Path(__file__).resolve().parent
_OUT = pytest.StashKey()
_NEEDS = pytest.StashKey()
_IMPOSSIBLE = pytest.StashKey()
_GUARD = pytest.StashKey()
_NOTHING = types.SimpleNamespace(params={})

# The processes that run tests in parallel, for their leading process.
_NODES = []

# tempest runs these: see tests/cloud/test_tempest.py.
collect_ignore = ['tempest']


def pytest_addoption(parser):
    parser.addoption(
        '--all', action='store_true',
        help='also run the tests marked slow')
    parser.addoption(
        '--long', action='store_true',
        help='also run the tests marked slow or long: hours')
    parser.addoption(
        '--without', action='append', default=[], metavar='NEED=REASON',
        help='leave out the tests that need this, and fail at the end')
    parser.addoption(
        '--durations-file', metavar='FILE', type=pathlib.Path,
        help='record what each file of tests takes; see tests/scheduling.py')


def pytest_configure(config):
    # Programs would inherit the ignored signal of nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    forkserver.install()
    sweeps.everything = config.getoption('--long')
    if hasattr(config, 'workerinput'):
        return
    path = config.getoption('--durations-file')
    if path is not None and not config.getoption('collectonly'):
        config.pluginmanager.register(scheduling.Recorder(
            path, _whole(config)))


def _whole(config):
    """Return the tests that run: 0, all without options; 1, slow; None."""
    every = config.getoption('--all')
    if config.getoption('--long') or config.getoption('keyword') or (
            config.getoption('markexpr') != ('slow' if every else '')
            or any(pathlib.Path(name).resolve() != HERE
                   for name in config.args)):
        return None
    return int(every)


def _left_out(config):
    """Return the marks of tests left out unless the command line names them.

    A test that is marked long runs with --long alone.
    """
    if config.getoption('--long'):
        return ()
    return ('long',) if config.getoption('--all') else ('slow', 'long')


def _is_named(item):
    """Return whether the command line names the test, its file or directory.

    The directory of all tests is named where no other is.
    """
    named = (item.config.invocation_params.dir / name.partition('::')[0]
             for name in item.config.args)
    return any(path != HERE and item.path.is_relative_to(path)
               for path in map(pathlib.Path.resolve, named))


def _is_slow(item):
    return item.get_closest_marker('slow') is not None


def pytest_collection_modifyitems(config, items):
    run, out = [], []
    counts = collections.Counter()
    for item in items:
        item.stash[_NEEDS] = needs.needs_of(item)
        marks = {mark for mark in _left_out(config)
                 if item.get_closest_marker(mark) is not None}
        wanted = not marks or marks == {'slow'} and _is_named(item)
        (run if wanted else out).append(item)
        if not wanted:
            counts['long' if 'long' in marks else 'slow'] += 1
        if item.get_closest_marker('timeout') is None:
            is_long = item.get_closest_marker('long') is not None
            item.add_marker(pytest.mark.timeout(
                LONG_TIMEOUT if is_long else TIMEOUT))
    run, impossible = _without(config, run)
    scheduling.sort(run, _is_slow)
    items[:] = run
    config.hook.pytest_deselected(items=[*out, *impossible])
    config.stash[_OUT] = dict(counts)
    config.stash[_IMPOSSIBLE] = [item.nodeid for item in impossible]
    if hasattr(config, 'workeroutput'):
        config.workeroutput['left out'] = dict(counts)
        config.workeroutput['impossible'] = config.stash[_IMPOSSIBLE]


def pytest_collection_finish():
    """Keep the garbage collector from scanning ten thousand tests."""
    gc.collect()
    gc.freeze()


def _without(config, items):
    """Return the tests that can run, and those with unavailable needs."""
    missing = {option.partition('=')[0]
               for option in config.getoption('--without')}
    run, impossible = [], []
    for item in items:
        (impossible if item.stash[_NEEDS] & missing else run).append(item)
    return run, impossible


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Take the results of one process: each collected the same."""
    if hasattr(node, 'workeroutput'):
        node.config.stash[_OUT] = node.workeroutput.get('left out', {})
        node.config.stash[_IMPOSSIBLE] = node.workeroutput.get(
            'impossible', [])


def pytest_terminal_summary(terminalreporter, config):
    impossible = config.stash.get(_IMPOSSIBLE, ())
    if impossible:
        terminalreporter.section('not run', red=True)
        for option in config.getoption('--without'):
            name, _, reason = option.partition('=')
            terminalreporter.write_line(f'{name}: {reason}')
        for node_id in impossible:
            terminalreporter.write_line(node_id)
    for mark, count in config.stash.get(_OUT, {}).items():
        option = '--all' if mark == 'slow' else '--long'
        terminalreporter.write_line(
            f'tests marked {mark} that were left out: {count}; see {option}')


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if (session.config.stash.get(_IMPOSSIBLE, ())
            and session.exitstatus == pytest.ExitCode.OK):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return scheduling.ByScope(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Refuse access to needs that a test does not declare."""
    if _GUARD not in item.config.stash:
        item.config.stash[_GUARD] = needs.Guard()
    item.config.stash[_GUARD].begin(item.stash[_NEEDS])
    return (yield)


def _forget(item, following):
    """Free memory, which a process of many tests would pile up.

    An exception that is the parameter of a test has a traceback, once it was
    raised, and so every frame that it went through. The C library keeps the
    memory that the threads of a test have freed.
    """
    for value in getattr(item, 'callspec', _NOTHING).params.values():
        if isinstance(value, BaseException):
            value.__traceback__ = value.__context__ = None
    if following is None or following.path != item.path:
        ctypes.CDLL(None).malloc_trim(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    # Fixtures of other tests are torn down here, too.
    refused = item.config.stash[_GUARD].end()
    try:
        return (yield)
    finally:
        _forget(item, nextitem)
        if refused:
            pytest.fail('the test does not declare that it needs '
                        f'{", ".join(refused)}; see tests/needs.py',
                        pytrace=False)


def pytest_unconfigure(config):
    if _GUARD in config.stash:
        config.stash[_GUARD].close()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node):
    _NODES.append(node)


def pytest_keyboard_interrupt(excinfo):
    """Wait in an interrupted run until its processes have torn down.

    xdist interrupts them once more after five seconds, and ends them ten
    seconds later, even in a teardown: the programs that they had started would
    run on.
    """
    if 'PYTEST_XDIST_WORKER' in os.environ:
        signal.signal(signal.SIGINT, lambda number, frame: None)
    elif excinfo.type is KeyboardInterrupt:
        deadline = time.monotonic() + TEARDOWN_TIMEOUT
        for node in _NODES:
            channel = node.channel
            with contextlib.suppress(
                    EOFError, channel.RemoteError, channel.TimeoutError):
                channel.waitclose(max(0.01, deadline - time.monotonic()))


@pytest.fixture(scope='session', autouse=True)
def no_filters_left(tmp_path_factory):
    """Remove the filters that the tests' commands make in /dev/shm."""
    yield
    from tests.support import repositories
    repositories.remove_filters(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def path_without_guard(request):
    """Restore PATH before shared fixtures are torn down.

    A test that changed it has put back the one with the guard.
    """
    yield
    request.config.stash[_GUARD].restore_path()


@pytest.fixture(autouse=True)
def log_level():
    """The commands quieten the log of their whole process."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
