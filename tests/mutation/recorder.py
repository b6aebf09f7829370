# SPDX-License-Identifier: Apache-2.0

"""A pytest plugin that records the lines and times of each test.

Loaded by ``-p tests.mutation.recorder``. Writes JSON to the file that the
environment variable ``MUTATION_RECORD`` names.
"""

import json
import os

import coverage
import pytest

_coverage = coverage.Coverage(
    data_file=None, config_file=False, source=['glance_dedup', 'dedupd'])
_coverage.start()
_seconds: dict[str, float] = {}
_failed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    _coverage.switch_context(item.nodeid)
    result = yield
    _coverage.switch_context('')
    return result


def pytest_runtest_logreport(report):
    _seconds[report.nodeid] = (
        _seconds.get(report.nodeid, 0) + report.duration)
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish():
    _coverage.stop()
    data = _coverage.get_data()
    tests = [name for name in _seconds if name not in _failed]
    number = {name: i for i, name in enumerate(tests)}
    lines = {
        os.path.relpath(path): {
            line: [number[name] for name in names if name in number]
            for line, names in data.contexts_by_lineno(path).items()}
        for path in data.measured_files()}
    with open(os.environ['MUTATION_RECORD'], 'w') as f:
        json.dump({'tests': tests, 'failed': sorted(_failed),
                   'seconds': [_seconds[name] for name in tests],
                   'lines': lines}, f)
