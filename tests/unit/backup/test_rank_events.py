# SPDX-License-Identifier: Apache-2.0

import json

import pytest

from glance_dedup.backup import rank_events

GOOD = {'event': 'source', 'rank': 1, 'name': 'web', 'host': 'a', 'size': 5,
        'written': 0}


def line(**changed):
    return json.dumps({key: value for key, value in {
        **GOOD, **changed}.items() if value != 'left out'}).encode()


def test_an_event():
    assert rank_events.parse(line()) == GOOD
    assert rank_events.parse(line(more='of a later version'))['more']
    assert rank_events.parse(b'{"event": "ended", "rank": 0}')


@pytest.mark.parametrize('changed', [
    {'event': 'left out'}, {'event': 'unknown'}, {'event': ['source']},
    {'event': None}, {'rank': 'left out'}, {'rank': -1}, {'rank': True},
    {'name': 'left out'}, {'name': 7}, {'name': 'a\0b'},
    {'name': 'x' * 100000}, {'host': None}, {'size': -1}, {'size': 1.5},
    {'size': '5'}, {'size': True}, {'size': 1 << 63}, {'written': None}])
def test_what_no_rank_tells(changed):
    with pytest.raises(rank_events.FalseEvent,
                       match='which was left out') as found:
        rank_events.parse(line(**changed))
    assert len(str(found.value)) < 2000 and str(found.value).isprintable()


@pytest.mark.parametrize('text', [
    b'', b'{', b'[]', b'7', b'null', b'"event"', b'[' * 100000, b'\xff\x00',
    b'\x1b[2J'])
def test_what_is_no_json(text):
    with pytest.raises(rank_events.FalseEvent):
        rank_events.parse(text)
