# SPDX-License-Identifier: Apache-2.0

"""The history of tasks, in a file that any process may have written."""

import json
import os
import time

import pytest

from dedupd.status import task_history
from glance_dedup.base import files
from tests.support import repositories

NAMES = ('collect', 'scrub')
NOTHING = {'last': None, 'last_success': None, 'last_success_run': None}


@pytest.fixture
def path(tmp_path):
    return repositories.create(tmp_path / 'repository')


def last(**fields):
    return {'number': 7, 'started': 1e9, 'finished': 1e9 + 5, 'seconds': 5.0,
            'arguments': {}, 'result': {'blocks': 3}, 'error': None, **fields}


def written(path, **fields):
    """Write the file with other fields and a valid checksum."""
    facts = {'name': 'collect', 'last': last(), 'last_success': 1e9 + 5,
             'last_error': None}
    for key, value in fields.items():
        (facts if key in facts else facts['last'])[key] = value
    content = {'kind': 'glance-dedup tasks', 'version': 1, 'tasks': [facts]}
    content['checksum'] = files.json_checksum(content)
    (path / task_history.NAME).write_text(json.dumps(content))


def test_what_was_noted_is_there_for_the_next(path):
    one = task_history.Past(path)
    assert one.load(NAMES) == []
    one.note('scrub', last(error='the disk is gone', result=None,
                           finished=1e9 + 1), None)
    one.note('collect', last(error='gone, too', result=None), None)
    one.note('collect', last(), last())
    one.save()
    other = task_history.Past(path)
    assert other.facts('collect') == NOTHING
    assert other.load(NAMES) == [
        {'task': 'scrub', 'time': 1e9 + 1, 'text': 'the disk is gone'},
        {'task': 'collect', 'time': 1e9 + 5, 'text': 'gone, too'}]
    run = {**last(), 'number': 0}
    assert other.facts('collect') == {
        'last': run, 'last_success': 1e9 + 5, 'last_success_run': run}
    assert other.facts('scrub')['last_success'] is None
    assert other.facts('merge') == NOTHING
    # A later failure does not remove the last success.
    for at in (1e9 + 6, 1e9 + 7):
        other.note('collect', last(error='again', result=None, finished=at),
                   None)
        other.save()
        other = task_history.Past(path)
        other.load(NAMES)
        facts = other.facts('collect')
        assert facts['last']['finished'] == at
        assert facts['last_success'] == 1e9 + 5
        assert facts['last_success_run'] == run
    assert os.stat(path / task_history.NAME).st_mode & 0o777 == 0o600


def test_it_is_bounded(path):
    one = task_history.Past(path)
    for number in range(100):
        one.note('scrub', last(error='e' * 100_000,
                               result={'images': ['x' * 100] * 1000}),
                 last(result={'images': ['x' * 100] * 1000}))
    one.save()
    assert os.path.getsize(path / task_history.NAME) < 8192
    other = task_history.Past(path)
    other.load(NAMES)
    assert other.facts('scrub')['last']['result'] is None
    assert other.facts('scrub')['last_success_run']['result'] is None
    assert other.facts('scrub')['last'][
        'error'] == 'e' * task_history.MAX_ERROR


def test_older_versions_read_a_file_of_good_runs(path):
    """A file of good runs has no field that older versions reject."""
    one = task_history.Past(path)
    one.note('scrub', last(), last())
    one.note('collect', last(error='no'), None)
    one.save()
    for entry in json.loads((path / task_history.NAME).read_text())['tasks']:
        assert entry.keys() == {'name', 'last', 'last_success', 'last_error'}


def test_what_is_from_the_future_is_from_now(path):
    """A date in the future counts as now, so alarms are not delayed."""
    written(path, last_success=time.time() + 1e6)
    one = task_history.Past(path)
    one.load(NAMES)
    assert one.facts('collect')['last_success'] <= time.time()


@pytest.mark.parametrize('fields', (
    {'name': 5}, {'name': 'x' * 65}, {'last': None}, {'last': []},
    {'last_success': 'x'}, {'last_success': -1}, {'last_success': True},
    {'last_success': float('nan')}, {'last_success': float('inf')},
    {'last_success': 10**400}, {'last_error': 'x'}, {'last_error': {}},
    {'last_error': {'time': 1, 'text': 5}}, {'seconds': 'x'},
    {'seconds': None}, {'error': ['x']}, {'error': 'x' * 1001},
    {'result': 'x'}, {'result': {'x': float('inf')}},
    {'result': {'x': 1 << 63}}, {'arguments': []},
    {'arguments': {'x': float('-inf')}}, {'more': 1},
    {'result': {'x': [[[[[[[[[[]]]]]]]]]]}}, {'last_success_run': 5},
    {'last_success_run': {}}, {'last_success_run': last(result='x')},
    {'last_success_run': last(finished=float('nan'))}))
def test_an_entry_that_is_none(path, caplog, fields):
    if {'more', 'last_success_run'} & fields.keys():
        facts = {'name': 'collect', 'last': last(), 'last_success': None,
                 'last_error': None, **fields}
        content = {'kind': 'glance-dedup tasks', 'version': 1,
                   'tasks': [facts]}
        content['checksum'] = files.json_checksum(content)
        (path / task_history.NAME).write_text(json.dumps(content))
    else:
        written(path, **fields)
    one = task_history.Past(path)
    assert one.load(NAMES) == []
    assert one.facts('collect') == NOTHING
    assert 'is invalid' in caplog.text
    one.note('collect', last(), last())
    one.save()
    task_history.decode((path / task_history.NAME).read_bytes())


@pytest.mark.parametrize('content', (
    b'', b'{', b'[]', b'null', b'[' * 100_000, b'9' * 5000, b'\xff' * 100,
    bytes(task_history.MAX_SIZE + 5), b'{"kind": "glance-dedup cache"}'))
def test_a_file_that_is_none(path, caplog, content):
    (path / task_history.NAME).write_bytes(content)
    assert task_history.Past(path).load(NAMES) == []
    assert 'is invalid' in caplog.text


@pytest.mark.parametrize('make', (
    os.mkdir, os.mkfifo, lambda path: os.symlink('/dev/zero', path)))
def test_what_is_no_file(path, caplog, make):
    """A path that is no regular file is neither followed nor waited for."""
    make(path / task_history.NAME)
    one = task_history.Past(path)
    assert one.load(NAMES) == []
    assert 'is invalid' in caplog.text
    for _ in range(2):
        one.note('collect', last(), last())
        one.save()
    assert caplog.text.count('cannot be written') == (
        1 if make is os.mkdir else 0)
    assert not os.path.exists(path / f'{task_history.NAME}.new')
