# SPDX-License-Identifier: Apache-2.0

"""The last errors: limited in number, each once, in order."""

import pytest

from dedupd.status import task_errors
from glance_dedup.base import exceptions


@pytest.fixture
def errors():
    return task_errors.Errors()


def texts(errors):
    return [error['text'] for error in errors]


def test_a_repeated_error_is_there_once_and_last(errors):
    for text in ('torn', 'no room', 'torn'):
        errors.add('collect', text)
    errors.add('scrub', 'torn')
    assert [(e['task'], e['text']) for e in errors] == [
        ('collect', 'no room'), ('collect', 'torn'), ('scrub', 'torn')]


def test_the_oldest_make_room(errors):
    for number in range(task_errors.MAX_COUNT + 3):
        errors.add('scrub', str(number))
    assert texts(errors) == [
        str(number) for number in range(3, task_errors.MAX_COUNT + 3)]


def test_errors_of_others_come_by_their_time(errors):
    errors.add('merge', 'now')
    errors.merge([{'time': 2.0, 'task': 'merge', 'text': 'second'},
                  {'time': 1.0, 'task': 'scrub', 'text': 'first'}])
    assert texts(errors) == ['first', 'second', 'now']


def test_adding_while_somebody_reads(errors):
    errors.add('scrub', 'one')
    for _ in errors:
        errors.add('scrub', 'two')
    assert texts(errors) == ['one', 'two']


@pytest.mark.parametrize('error, expected, traced', [
    (exceptions.DamagedError('torn'), (), False),
    (OSError(5, 'gone'), (OSError,), False),
    (OSError(5, 'gone'), (), True), (KeyError(), (), True)])
def test_only_a_surprise_has_a_traceback(errors, caplog, error, expected,
                                         traced):
    errors.failed('scrub', error, *expected)
    assert texts(errors) == [str(error) or repr(error)]
    record, = caplog.records
    assert bool(record.exc_info) == traced
    assert record.getMessage().startswith('scrub failed')
