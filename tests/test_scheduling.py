# SPDX-License-Identifier: Apache-2.0
"""The tests that take longest start first."""

import dataclasses
import re

import pytest

from tests import scheduling
from tests.support import documents


@dataclasses.dataclass
class Item:
    nodeid: str
    slow: bool = False


def order(durations, *items):
    items = list(items)
    scheduling.sort(items, lambda item: item.slow, durations)
    return [item.nodeid for item in items]


def test_longest_first_and_files_whole():
    assert order({'a.py': [1, 0], 'b.py': [5, 0]}, Item('a.py::test_1'),
                 Item('b.py::test_2'), Item('a.py::test_3'),
                 Item('b.py::test_1')) == [
        'b.py::test_2', 'b.py::test_1', 'a.py::test_1', 'a.py::test_3']


def test_unknown_files_start_before_all_others():
    assert order({'a.py': [900, 0]}, Item('a.py::test'),
                 Item('new.py::test')) == ['new.py::test', 'a.py::test']


def test_slow_tests_count_if_they_run():
    durations = {'a.py': [1, 90], 'b.py': [5, 0]}
    assert order(durations, Item('b.py::test'), Item('a.py::test')) == [
        'b.py::test', 'a.py::test']
    assert order(durations, Item('b.py::test'), Item('a.py::test'),
                 Item('a.py::test_2', slow=True))[0] == 'a.py::test'


def test_scopes():
    assert scheduling.scope_of('tests/a.py::test[b::c]') == 'tests/a.py'
    for split in scheduling.SPLIT:
        node_id = f'{split}::Test::test[x]'
        assert scheduling.scope_of(node_id) == node_id
    for group, files in scheduling.GROUPS.items():
        for file in files:
            assert (scheduling.HERE.parent / file).exists()
            assert scheduling.scope_of(f'{file}::test') == group


def test_written_and_read(tmp_path):
    path = tmp_path / 'durations.json'
    assert scheduling.read(path) == {}
    scheduling.write(path, {'b.py': [1.5, 0.0], 'a.py': [2.0, 30.0]})
    assert scheduling.read(path) == {'a.py': [2.0, 30.0], 'b.py': [1.5, 0.0]}
    assert path.read_text().splitlines()[1].startswith('"a.py"')


@pytest.mark.parametrize('text', [
    '', '<<<<<<< HEAD', '[]', '{"a.py": 1}', '{"a.py": [1]}',
    '{"a.py": [1, null]}', '{"a.py": ["soon", 1]}'])
def test_damaged(tmp_path, text):
    """A damaged file of durations is refused, for example after a conflict."""
    path = tmp_path / 'durations.json'
    path.write_text(text)
    with pytest.raises(pytest.UsageError,
                       match='durations.json is damaged .* restore it'):
        scheduling.read(path)


def test_stated_times_are_those_recorded():
    """The page on testing states the recorded times, rounded up to minutes."""
    page = (documents.SOURCE / 'contributor' / 'testing.rst').read_text()
    for row, seconds in zip(
            (r'``tools/test`` +(\d+) minutes ',
             r'``\.\.\. --all`` +(\d+) minutes more '),
            scheduling.read()[scheduling.WHOLE], strict=True):
        minutes = int(re.search(f'^{row}', page, re.M)[1])
        assert 60 * minutes - 120 < seconds <= 60 * minutes, row
