# SPDX-License-Identifier: Apache-2.0

"""The protocol holds in every scenario, and no rule can be left out."""

import re

import pytest

from tests.model import checker
from tests.model import scenarios
from tests import needs
from tests import test_rules

# Seconds for one search. The slowest small one takes 20 on idle processors.
SEARCH = 250
LONG_SEARCH = 1700
# Seconds for a search that does not reach its end.
PART = 600

RULES = [rule for rule, _ in test_rules.steps()]


@pytest.fixture(scope='module')
@needs.of('spin')
def program(tmp_path_factory):
    return checker.Program(tmp_path_factory.mktemp('model'))


def by_size(is_large):
    return [name for name, scenario in scenarios.SCENARIOS.items()
            if scenario.is_large == is_large]


def require_protocol(program, name, seconds):
    scenario = scenarios.SCENARIOS[name]
    outcome = program.search(
        scenario.settings(), PART if scenario.is_open else seconds,
        table=25 if scenario.is_large else 21, whole=not scenario.is_open)
    print(f'{name}: {outcome.states:,} states in {outcome.seconds:.1f} s')
    assert outcome.finding == '', f'{name}: {outcome.finding}'
    # A scenario without events proves nothing.
    assert outcome.states > 1000


@pytest.mark.slow
@pytest.mark.parametrize('name', by_size(False))
def test_protocol_holds(program, name):
    require_protocol(program, name, SEARCH)


@pytest.mark.long
@pytest.mark.parametrize('name', by_size(True))
def test_protocol_holds_in_large_scenarios(program, name):
    require_protocol(program, name, LONG_SEARCH)


@pytest.mark.long
@pytest.mark.parametrize('name', [*scenarios.FOUND_IN])
def test_mutant_is_found(program, name):
    mutant = checker.mutants()[name]
    scenario, expected = scenarios.FOUND_IN[name]
    settings = scenarios.SCENARIOS[scenario].settings()
    settings['MUTANT'] = mutant.number
    outcome = program.search(settings, SEARCH)
    print(f'{mutant.rule} {name}: {outcome.finding}, after '
          f'{outcome.states:,} states of {scenario}')
    assert outcome.finding == expected, (
        f'{mutant.rule}: {mutant.text}: {outcome.finding or "no error"}')
    assert program.trace(settings, SEARCH)


@pytest.mark.long
@pytest.mark.parametrize('name', [*scenarios.BACKED_UP])
def test_other_rules_make_up_for_a_mutant(program, name):
    """A mutant that is found some day shows that its rule is necessary."""
    scenario, _ = scenarios.BACKED_UP[name]
    settings = scenarios.SCENARIOS[scenario].settings()
    settings['MUTANT'] = checker.mutants()[name].number
    outcome = program.search(settings, LONG_SEARCH, table=23)
    assert outcome.finding == ''


def test_each_mutant_is_found_or_backed_up():
    assert not set(scenarios.FOUND_IN) & set(scenarios.BACKED_UP)
    assert set(scenarios.FOUND_IN) | set(scenarios.BACKED_UP) == set(
        checker.mutants())
    named = {**scenarios.FOUND_IN, **scenarios.BACKED_UP}
    assert {scenario for scenario, _ in named.values()} <= set(
        scenarios.SCENARIOS)


def test_each_rule_has_a_mutant_or_a_reason():
    found = {checker.mutants()[name].rule for name in scenarios.FOUND_IN}
    assert found <= set(RULES)
    assert set(RULES) - found == set(scenarios.WITHOUT_MUTANT)


def test_mutants_are_used():
    """A mutant unknown to the model would be the protocol itself."""
    text = ''.join(path.read_text() for path in checker.HERE.glob('*.pml'))
    used = set(re.findall(r'\b(?:IS|READS_OLD)\((\w+)\)', text)) - {'m'}
    assert used == {name.upper().replace('-', '_')
                    for name in checker.mutants()}
