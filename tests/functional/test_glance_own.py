# SPDX-License-Identifier: Apache-2.0

"""Glance's own functional tests, with the dedup store swapped in.

``glance_own.json`` lists the tests that use a store and pass with Glance's
file store; they must pass with ours and use it. A run with ``--long`` and with
GLANCE_DEDUP_RECORD set writes the list again. Tests that fail with the file
store, too, are not in it: they look up names in the DNS, or need programs that
are not installed here.

A run with ``--long`` runs every functional test of Glance with both stores,
side by side, and compares.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.needs('qemu')]

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
LIST = HERE / 'glance_own.json'

#: Tests that pass with the file store only, and why.
EXCLUDED = {
    'glance.tests.functional.v2.test_discovery.TestDiscovery.test_stores':
        'asks for /v2/info/stores/detail, which answers 500 to every type of '
        "store that is not Glance's own",
}


class Run:
    """A process that runs some of Glance's tests."""

    def __init__(self, path, driver, names, seconds):
        path.mkdir()
        self.results = path / 'results'
        self.log = path / 'log'
        self.names = names
        self.seconds = seconds
        cwd = path / 'cwd'
        cwd.mkdir()
        python_path = os.pathsep.join(
            [str(ROOT)] + os.environ.get('PYTHONPATH', '').split(os.pathsep))
        with open(self.log, 'wb') as log:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'tests.functional.glance_own', driver,
                 str(self.results), *names], cwd=cwd, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, 'PYTHONPATH': python_path,
                     'TMPDIR': str(path)})

    def wait(self):
        """Return the results by name: (outcome, touched a store, words)."""
        try:
            self.process.wait(self.seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        lines = [json.loads(line) for line
                 in self.results.read_text().splitlines()]
        assert lines and lines.pop() == 'done', self.log.read_text()[-3000:]
        return {name: (outcome, touched, words)
                for name, outcome, _seconds, touched, words in lines}


def run(path, driver, names, processes=2, seconds=900):
    """Run tests in some processes at once."""
    parts = [names[number::processes] for number in range(processes)]
    runs = [Run(path / f'{driver}{number}', driver, part, seconds)
            for number, part in enumerate(parts)]
    results = {}
    for each in runs:
        results.update(each.wait())
    return results


def differences(expected, found):
    """Return the tests that pass with the file store and not with ours."""
    lines = []
    for name in sorted(expected):
        outcome, touched, words = found.get(name, ('missing', False, ''))
        if name in EXCLUDED:
            if outcome == 'ok':
                lines.append(f'{name} passes: take it off EXCLUDED')
        elif outcome != 'ok':
            lines.append(f'{name}: {outcome}\n{words}')
        elif not touched:
            lines.append(f'{name} did not use the store')
    return lines


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_those_that_use_a_store(tmp_path):
    names = json.loads(LIST.read_text())
    assert len(names) > 80
    found = run(tmp_path, 'dedup', names)
    problems = differences(names, found)
    assert not problems, '\n'.join(problems)


@pytest.mark.long
def test_all_of_them(tmp_path):
    runs = [Run(tmp_path / driver, driver, [], 1700)
            for driver in ('file', 'dedup')]
    file, dedup = [each.wait() for each in runs]
    use_a_store = [name for name, (outcome, touched, _words) in file.items()
                   if outcome == 'ok' and touched]
    if os.environ.get('GLANCE_DEDUP_RECORD'):
        LIST.write_text(json.dumps(sorted(use_a_store), indent=0) + '\n')
    problems = differences(use_a_store, dedup)
    # The other tests must not notice the store either.
    for name, (outcome, touched, _words) in file.items():
        if outcome == 'ok' and not touched:
            if (dedup[name][0] == 'ok') == (name in EXCLUDED):
                problems.append(f'{name}: {dedup[name]}')
    missing = set(use_a_store) - set(json.loads(LIST.read_text()))
    problems += [f'{name} is not in {LIST.name}' for name in missing]
    assert not problems, '\n'.join(problems)
