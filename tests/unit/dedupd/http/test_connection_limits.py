# SPDX-License-Identifier: Apache-2.0

"""Places of a listener and their distribution among peers."""

import socket

import pytest

from dedupd.http import connection_limits
from dedupd.http import listeners


@pytest.fixture
def places():
    return connection_limits.Places()


@pytest.fixture
def ended():
    return []


@pytest.fixture
def take(places, ended):
    """Take a place for a peer; there are 8, and 3 for each peer."""
    def do(peer, name='', spare=False):
        place = places.take(peer, 8, 3)
        if place is not None:
            place.end = lambda: ended.append(name)
            place.spare = spare
        return place

    return do


def test_of_one_peer_there_are_so_many(places, take, ended):
    mine = [take('a') for _ in range(3)]
    assert take('a') is None
    assert take('b') is not None
    mine[0].leave()
    assert take('a') is not None
    assert take('a') is None
    assert places.taken == 4 and not ended


def test_in_all_there_are_so_many(places, take, ended):
    for number in range(8):
        assert take(number) is not None
    assert take('a') is None
    assert places.taken == 8 and not ended


def test_a_peer_gives_way_to_itself(places, take, ended):
    """A new connection ends the peer's longest idle connection."""
    first = take('a', 'first', spare=True)
    take('a', 'second', spare=True)
    take('a', 'third')
    first.spare = False
    first.spare = True
    take('b', 'other', spare=True)
    assert take('a') is not None and ended == ['second']
    assert take('a') is not None and ended == ['second', 'first']
    assert take('a') is None
    assert places.taken == 4


def test_whoever_has_the_most_to_spare_gives_way(places, take, ended):
    take('a', 'a', spare=True)
    for name in ('b1', 'b2'):
        take('b', name, spare=True)
    for number in range(5):
        take(number)
    assert take('c', 'c') is not None and ended == ['b1']
    assert take('d', 'd') is not None and ended[1] in ('a', 'b2')
    assert take('e', 'e') is not None and sorted(ended) == ['a', 'b1', 'b2']
    assert take('f') is None
    assert places.taken == 8


def test_a_place_is_left_once(places, take, ended):
    """A place is freed once if its connection ends after that request."""
    place = take('a', spare=True)
    for _ in range(3):
        take('a')
    assert places.taken == 3
    place.leave()
    place.spare = True
    assert places.taken == 3 and take('a') is None


def test_nothing_is_kept_of_peers_that_left(places, take):
    for number in range(100):
        take(number).leave()
    assert not places.taken and not places._peers


@pytest.mark.parametrize('family,address,peer', [
    (socket.AF_INET, ('10.0.0.1', 5), '10.0.0.1/32'),
    (socket.AF_INET6, ('::ffff:10.0.0.1', 5, 0, 0), '10.0.0.1/32'),
    # A host has at least so many addresses of its own.
    (socket.AF_INET6, ('2001:db8:1:2:3::4', 5, 0, 0), '2001:db8:1:2::/64'),
    (socket.AF_INET6, ('fe80::1%eth0', 5, 0, 2), 'fe80::/64')])
def test_peers(family, address, peer):
    assert str(listeners.peer_of(None, address)) == peer
    assert listeners.peer_of(7, '') == 7
