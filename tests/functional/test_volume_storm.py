# SPDX-License-Identifier: Apache-2.0

"""The oracle of volumes that several hosts take over from each other.

A real owner writes. The next one finds what a loss, or another order, would
have left.
"""

import json
import random

import pytest

from glance_dedup.repository import openvolumes
from tests.functional import volume_storm
from tests.support import repositories

WRITES = [(0, 'a/0'), (3, 'a/1'), (0, 'a/2'), (5, 'a/3')]


def session(host, state, writes=(), written=0, durable=0):
    return volume_storm.Session(host, 0.0, list(state), list(writes), written,
                                durable)


def state(count):
    """Return the slots after so many of the writes."""
    slots = [''] * volume_storm.SLOTS
    for slot, tag in WRITES[:count]:
        slots[slot] = tag
    return slots


@pytest.mark.parametrize('count', range(5))
@pytest.mark.parametrize('host, least', [('a', 3), ('b', 2)])
def test_what_the_next_owner_finds(host, least, count):
    sessions = [session('a', state(0), WRITES, written=3, durable=2),
                session(host, state(count))]
    if count >= least:
        volume_storm.judge(sessions)
        return
    with pytest.raises(AssertionError, match=f'{least} of 4 writes'):
        volume_storm.judge(sessions)


def test_a_later_write_without_an_earlier_one():
    found = state(4)
    found[3] = ''
    with pytest.raises(AssertionError, match='0 of 4 writes'):
        volume_storm.judge([session('a', state(0), WRITES),
                            session('b', found)])


def test_an_owner(tmp_path):
    """The log of an owner has what the volume holds afterwards."""
    log = tmp_path / 'log'
    rng = random.Random(1)

    def tell(**fields):
        with log.open('a') as f:
            f.write(json.dumps({'op': 'volume', 'time': 1.0, **fields}) + '\n')

    repositories.create(tmp_path / 'repository')
    with repositories.open_repository(tmp_path / 'repository') as repo:
        volume_storm.create(repo)
        while True:
            volume_storm.own(repo, 'a', 'one', rng, tell, float('inf'))
            (one,) = volume_storm.read_sessions([log])
            if 0 < one.durable < one.written:
                break
            log.unlink()
            openvolumes.delete(repo, volume_storm.NAME)
            volume_storm.create(repo)
        with openvolumes.open_volume(repo, volume_storm.NAME) as volume:
            found = volume_storm.read_state(volume)
            volume.write(volume_storm.content('other'),
                         volume_storm.offset(one.writes[-1][0]))
            changed = volume_storm.read_state(volume)
    volume_storm.judge([one, session('a', found)])
    with pytest.raises(AssertionError):
        volume_storm.judge([one, session('b', changed)])
