# SPDX-License-Identifier: Apache-2.0

"""Rules that are cited are stated, once, and stated rules are tested.

:data:`STATED` has the page of the contributors' guide that states the rules of
each letter. Code, documents and tests cite them by their numbers; the protocol
has steps like N7.3.
"""

import functools
import pathlib
import re

import pytest

from tests.crash import mutants
from tests.model import checker
from tests.model import scenarios
from tests.support import documents

TOP = pathlib.Path(__file__).resolve().parent.parent
GUIDE = TOP / 'doc' / 'source' / 'contributor'
SOURCES = ('glance_dedup', 'dedupd', 'tests', 'benchmarks', 'doc/source',
           'README.rst')
SUFFIXES = {'.py', '.pyi', '.c', '.h', '.rst', '.pml'}

#: The page that states the rules of a letter, and the last of them.
STATED = {'I': ('design', 14), 'N': ('protocol', 15), 'R': ('replication', 5),
          'V': ('volumes', 11), 'B': ('batch', 7), 'M': ('daemon', 5),
          'U': ('cache', 4), 'L': ('cache', 8), 'F': ('image-disks', 12)}

#: Rules for code that is yet to be written, so no test can cite them.
NOT_BUILT = {f'F{n}' for n in (12,)}

_LETTERS = ''.join(STATED)
_DEFINED = re.compile(rf'^([{_LETTERS}]\d{{1,2}}(?:\.\d)?)(?: \(.*\))?$', re.M)
# A number in the benchmarks' tables or in a standard is no rule.
_CITED = re.compile(
    rf'(?<![\w/.#-])([{_LETTERS}]\d{{1,2}}(?:\.\d)?)'
    rf'(?:(?: to |-)([{_LETTERS}]?)(\d{{1,2}}(?:\.\d)?)(?![\w.]\w))?(?!\w)')
_TEST = re.compile(r'``((?:unit|functional|c|crash)/[\w./]+)(?:::(\w+))?``')
_MUTANTS = re.compile(
    r'\b(model )?mutants?\s+((?:``[\w-]+``(?:,\s+|\s+and\s+)?)+)')
_IN_A_NAME = re.compile(r'_([inr])(\d{1,2})(?:_(\d)(?=_|\b))?(?=_|\b)')


@functools.cache
def protocol():
    return (GUIDE / 'protocol.rst').read_text()


@functools.cache
def defined():
    """Return the pages that state each rule."""
    found = {}
    for page in sorted((TOP / 'doc' / 'source').rglob('*.rst')):
        for rule in _DEFINED.findall(page.read_text()):
            found.setdefault(rule, []).append(page)
    return found


def expand(first, letter, last):
    """Return all rules of ``N1 to N11``, ``N10.4 to 7`` or ``N2-N6``."""
    if '.' in first and not letter:
        whole, begin = first.split('.')
        end = last.split('.')[-1]
        return [f'{whole}.{i}' for i in range(int(begin), int(end) + 1)]
    begin, end = (re.match(r'[A-Z]?(\d+)', rule)[1] for rule in (first, last))
    return [first, f'{first[0]}{last}'] + [
        f'{first[0]}{i}' for i in range(int(begin) + 1, int(end))]


def citations(text):
    for first, letter, last in _CITED.findall(text):
        if last and (letter or '.' in first):
            yield from expand(first, letter, last)
        else:
            yield first
    for letter, whole, step in _IN_A_NAME.findall(text):
        yield f'{letter.upper()}{whole}' + (f'.{step}' if step else '')


def files(*names):
    for name in names:
        top = TOP / name
        for path in [top] if top.is_file() else sorted(top.rglob('*')):
            if path.suffix in SUFFIXES and path.is_file():
                yield path


def is_defined(rule):
    """Return whether a rule is defined as a whole, or step by step."""
    return rule in defined() or any(
        other.startswith(rule + '.') for other in defined())


def test_what_is_cited_is_defined():
    wrong = []
    for path in files(*SOURCES):
        for number, line in enumerate(path.read_text().split('\n'), 1):
            wrong.extend(
                f'{path.relative_to(TOP)}:{number} cites {rule}'
                for rule in citations(line) if not is_defined(rule))
    assert not wrong, '\n'.join(wrong)


def test_what_is_defined_is_cited_by_a_test():
    """A test cites each step, and each rule without steps or invariant."""
    cited = set()
    for path in files('tests'):
        cited.update(citations(path.read_text()))
    untested = defined().keys() - cited
    assert untested == NOT_BUILT, sorted(untested ^ NOT_BUILT)


def test_rules_are_numbered_without_gaps():
    for letter, (_, last) in STATED.items():
        assert {rule.partition('.')[0] for rule in defined()
                if rule[0] == letter} == {
            f'{letter}{i}' for i in range(1, last + 1)}


def test_a_rule_is_stated_once():
    for rule, pages in defined().items():
        assert pages == [GUIDE / f'{STATED[rule[0]][0]}.rst'], rule


def steps():
    """Return each step of the protocol page, with its text."""
    parts = re.split(r'^\.\. _(N\d+(?:\.\d)?):$', protocol(), flags=re.M)
    return list(zip(parts[1::2], parts[2::2]))


def mutants_of(text, kind):
    """Return the mutants that a step names: of the code, or of the model."""
    return {name for found, names in _MUTANTS.findall(text) if found == kind
            for name in re.findall(r'``([\w-]+)``', names)}


@pytest.mark.parametrize(('rule', 'text'), steps(),
                         ids=[rule for rule, _ in steps()])
def test_a_step_says_how_strong_it_is_and_what_tests_it(rule, text):
    assert re.search(rf'^{re.escape(rule)} \((must|should)\)$', text, re.M)
    tests = _TEST.findall(
        text.partition('*Tests*:')[2])
    named = mutants_of(text, '')
    of_the_model = mutants_of(text, 'model ')
    assert tests or named or of_the_model or (
        rule in scenarios.WITHOUT_MUTANT and rule.startswith('N12')), (
        f'{rule} names no test')
    for name, function in tests:
        assert documents.has_test(name), f'{rule}: there is no {name}'
        assert documents.has_test(name, function), (
            f'{rule}: {name} has no {function}')
    assert named <= {mutant.name for mutant in mutants.MUTANTS}
    # A model mutant breaks one rule, and only that rule names it.
    assert of_the_model == {
        name for name in scenarios.FOUND_IN
        if checker.mutants()[name].rule == rule}


def test_a_citation_in_each_form_is_found():
    assert set(citations('N1 to N3; N10.4 to 7 (I9). test_n7_3_x, N2-N4')) == {
        'N1', 'N2', 'N3', 'N10.4', 'N10.5', 'N10.6', 'N10.7', 'I9', 'N7.3',
        'N4'}
