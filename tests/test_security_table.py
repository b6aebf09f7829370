# SPDX-License-Identifier: Apache-2.0

"""Each cell of the guide's table "Who can do what" names its tests."""

import re

from tests.support import documents

VERBS = ['reads', 'writes', 'deletes', 'learns']


def section(page):
    """Return the section of a page."""
    text = (documents.SOURCE / page).read_text()
    return re.search(r'^Who can do what\n=+\n(.*?)^[^\n]+\n===', text,
                     re.M | re.S)[1]


def parties():
    """Return the page's parties, with the number of each one's cells."""
    rows = re.findall(r'^   \* - (.*?)\n((?:     .*\n)+)',
                      section('reference/access.rst'), re.M)
    return {name: len(re.findall('^     - ', cells, re.M))
            for name, cells in rows if name != 'who'}


def cited():
    """Return the tests of each verb, of each party."""
    found = {}
    text = section('contributor/breaking.rst')
    for name, block in re.findall(r'^(\S.*)\n((?:    .*\n)+)', text, re.M):
        found[name] = {
            verb: re.findall('``([^`]+)``', tests) for verb, tests in
            re.findall(r'\*(\w+)\*:\s+((?:``[^`]+``[,.]\s*)+)', block)}
    return found


def test_each_party_has_tests():
    assert list(cited()) == list(parties()) != []
    assert {*parties().values()} == {len(VERBS)}


def test_each_cell_has_tests():
    for name, cells in cited().items():
        assert list(cells) == VERBS, name
        for verb, tests in cells.items():
            assert tests, (name, verb)
            missing = [test for test in tests
                       if not documents.has_test(*test.split('::'))]
            assert not missing, (name, verb, missing)
