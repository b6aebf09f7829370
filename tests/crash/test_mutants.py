# SPDX-License-Identifier: Apache-2.0

"""The tests find the bugs of ``mutants``."""

import json
import subprocess
import sys

import pytest

from tests.crash import exploration
from tests.crash import mutants
from tests.crash.mutants import mutant_trees

pytestmark = pytest.mark.slow

# A mutant is found among the first few hundred states, or not at all.
STATES = 2000
SECONDS = 900
TIMEOUT = 1500


@pytest.fixture(scope='module')
def builder(tmp_path_factory):
    return mutant_trees.Builder(tmp_path_factory.mktemp('objects'))


def by_explorer():
    return [pytest.param(mutant, id=mutant.name,
                         marks=() if mutant.quick else pytest.mark.long)
            for mutant in mutants.MUTANTS if mutant.workload]


def by_tests():
    return [pytest.param(mutant, id=mutant.name)
            for mutant in mutants.MUTANTS if mutant.tests]


def run(tree, *arguments):
    return subprocess.run(
        [sys.executable, '-m', *arguments], cwd=tree,
        env=mutant_trees.environment(tree), capture_output=True, text=True,
        timeout=TIMEOUT)


def run_tests(tree, mutant):
    # Nothing is stored outside of the tree's own directory.
    return run(tree, 'pytest', '-q', '-x', '-p', 'no:cacheprovider',
               f'--basetemp={tree.with_name("temporary")}', *mutant.tests)


@pytest.mark.parametrize('mutant', mutants.MUTANTS, ids=lambda m: m.name)
def test_fits(mutant):
    """No mutant is outdated, and each names the tests that find it."""
    mutant_trees.edited(mutant)
    assert bool(mutant.workload) != bool(mutant.why_not)
    assert mutant.workload in exploration.WORKLOADS or mutant.tests


def test_ordinary_tests_exist():
    """The tests that find mutants exist under their names."""
    names = {name for mutant in mutants.MUTANTS for name in mutant.tests
             if name.startswith('tests/')}
    found = run(mutant_trees.TOP, 'pytest', '-q', '--collect-only', '-n', '0',
                '-p', 'no:cacheprovider', *sorted(names))
    assert names and found.returncode == 0, found.stderr


# Long: the engine is compiled with the mutant, and its states are explored.
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize('mutant', by_explorer())
def test_explorer_finds(mutant, builder, tmp_path):
    tree = tmp_path / 'tree'
    builder.build(mutant, tree)
    found = run(mutant_trees.TOP, 'tests.crash.explorer', '--tree', str(tree),
                '--workload', mutant.workload, '--states', str(STATES),
                '--seconds', str(SECONDS), '--keep', str(tmp_path / 'kept'))
    lines = found.stdout.splitlines()
    assert found.returncode == 1 and len(lines) > 1, (
        f'{mutant.name} ({mutant.rule}) was not found: {lines[-1:]}\n'
        f'{found.stderr}')
    print(f'{mutant.name}: {json.loads(lines[-1])["states"]} states;',
          json.loads(lines[0])['finding'])


@pytest.mark.long
@pytest.mark.parametrize('mutant', by_tests())
def test_ordinary_tests_find(mutant, builder, tmp_path):
    builder.build(mutant, tmp_path / 'mutant')
    found = run_tests(tmp_path / 'mutant', mutant)
    assert found.returncode == 1 and ' failed' in found.stdout, (
        f'{mutant.name} ({mutant.rule}) was not found:\n{found.stdout}')
    # The tests pass without the mutant.
    builder.build(None, tmp_path / 'good')
    good = run_tests(tmp_path / 'good', mutant)
    assert good.returncode == 0, good.stdout
