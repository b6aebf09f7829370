# SPDX-License-Identifier: Apache-2.0
"""Options, time limits and the log's level, which all tests share."""

import contextlib
import logging
import os
import pathlib
import signal
import time

import hypothesis
import pytest

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    'tests', deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile('tests')

# Seconds. A test that hangs must fail long before the whole run is given up.
# Tests share the processors with those beside them.
TIMEOUT = 300
LONG_TIMEOUT = 1800
# What tests have set up may take to end; a cloud, half a minute.
TEARDOWN_TIMEOUT = 120

HERE = pathlib.Path(__file__).resolve().parent
_OUT = pytest.StashKey()

# The processes that run tests side by side, for the one that leads them.
_NODES = []

# These are for tempest to run: see tests/cloud/test_tempest.py.
collect_ignore = ['tempest']


def pytest_addoption(parser):
    parser.addoption(
        '--all', action='store_true',
        help='also run the tests marked slow: half an hour altogether')
    parser.addoption(
        '--long', action='store_true',
        help='also run the tests marked slow or long: hours altogether')


def _left_out(config):
    """The marks of tests that do not run unless the command line names them.

    A test that is marked long runs with --long alone.
    """
    if config.getoption('--long'):
        return ()
    return ('long',) if config.getoption('--all') else ('slow', 'long')


def _is_named(item):
    """Whether the command line names the test, its file or a directory of it.

    The directory of all tests is named where no other is.
    """
    named = (item.config.invocation_params.dir / name.partition('::')[0]
             for name in item.config.args)
    return any(path != HERE and item.path.is_relative_to(path)
               for path in map(pathlib.Path.resolve, named))


def pytest_collection_modifyitems(config, items):
    run, out = [], []
    for item in items:
        marks = {mark for mark in _left_out(config)
                 if item.get_closest_marker(mark) is not None}
        wanted = not marks or marks == {'slow'} and _is_named(item)
        (run if wanted else out).append(item)
        if item.get_closest_marker('timeout') is None:
            is_long = item.get_closest_marker('long') is not None
            item.add_marker(pytest.mark.timeout(
                LONG_TIMEOUT if is_long else TIMEOUT))
    items[:] = run
    config.hook.pytest_deselected(items=out)
    config.stash[_OUT] = len(out)
    if hasattr(config, 'workeroutput'):
        config.workeroutput['left out'] = len(out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Each process collected the same."""
    if hasattr(node, 'workeroutput'):
        node.config.stash[_OUT] = node.workeroutput.get('left out', 0)


def pytest_terminal_summary(terminalreporter, config):
    out = config.stash.get(_OUT, 0)
    if out:
        marks = ' or '.join(_left_out(config))
        options = ' or '.join(f'--{"all" if mark == "slow" else mark}'
                              for mark in _left_out(config))
        terminalreporter.write_line(
            f'{out} tests marked {marks} were left out: see {options}')


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Where tests run side by side, which stay in one process, in order.

    Those of a file share its fixtures, those of ``cloud/`` the cloud.
    """
    from xdist import scheduler

    class ByFile(scheduler.LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition('::')[0]
            return 'cloud' if '/cloud/' in path else path

    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node):
    _NODES.append(node)


def pytest_keyboard_interrupt(excinfo):
    """An interrupted run waits until its processes have torn down.

    xdist interrupts them once more after five seconds, and ends them ten
    seconds later, whatever they are at: what they had started would run on.
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
    """Commands that the tests run make them in /dev/shm, as users' do."""
    yield
    from tests.support import repositories
    repositories.remove_filters(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def log_level():
    """The commands quieten the log of their whole process."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
