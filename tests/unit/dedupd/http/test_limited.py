# SPDX-License-Identifier: Apache-2.0

import logging

import pytest

from dedupd.http import limited


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO)
    return limited.Log(logging.getLogger('strangers'))


def test_a_flood(log, caplog, monkeypatch):
    """The log has the first messages of a flood and counts the rest."""
    for number in range(1000):
        log.warning('%s was refused: %d', 'x' * 100000, number)
    assert len(caplog.records) == limited.MESSAGES
    assert sum(len(record.getMessage()) for record in caplog.records) < (
        limited.MESSAGES * (limited.LENGTH + 100))
    caplog.clear()
    monkeypatch.setattr(limited, 'SECONDS', 0.0)
    log._until = 0.0
    log.error('the next')
    assert [record.getMessage() for record in caplog.records] == [
        f'{1000 - limited.MESSAGES} messages such as the next were left out.',
        'the next']
    caplog.clear()
    log.error('one more')
    assert [record.getMessage() for record in caplog.records] == ['one more']


def test_a_traceback(log, caplog):
    log.error('failed: %s', 'x', exc_info=ValueError('why'))
    log.error('failed: %s', 'y')
    assert caplog.records[0].exc_info[0] is ValueError
    assert not caplog.records[1].exc_info


def test_what_strangers_send_is_text(log, caplog):
    log.warning('%s: %s', 'a\n\x1b[31mb', ValueError('c\r\nd'))
    message = caplog.records[0].getMessage()
    assert not any(ord(character) < 32 for character in message)
