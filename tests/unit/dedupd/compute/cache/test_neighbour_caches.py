# SPDX-License-Identifier: Apache-2.0

"""The choice of a rack's neighbours for a request for blocks."""

import collections
import logging
import types

import pytest

from dedupd.compute.cache import neighbour_caches
from glance_dedup.client import client_errors
from glance_dedup.transfer import image_assembly

IMAGE = 'image'
OWN = '0' * 32
ADDRESSES = [f'https://compute{number}:9393' for number in range(6)]
MIB = 1 << 20
#: An offset that no test requests.
WRONG = 99


def id_of(address):
    return f'{ADDRESSES.index(address) + 1:032}'


class Loan:
    """A loan like the client's, with blocks instead of frames."""

    def __init__(self, address, offsets, asked, stored):
        self.repository_id = id_of(address)
        self.stored = stored
        self._offsets = offsets
        self._asked = asked

    def __iter__(self):
        for offset in self._offsets:
            if isinstance(offset, Exception):
                raise offset
            if offset in self._asked or offset == WRONG:
                yield offset

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass


class World:
    """All hosts of a rack, as one of them sees them.

    :ivar answers: each address's answer: offsets of blocks, or an error
    :ivar stored: the bytes that each address has stored
    :ivar asked: the addresses, in order, without greetings
    """

    def __init__(self, monkeypatch, own=None):
        self.now = 1000.0
        monkeypatch.setattr(neighbour_caches, 'time', types.SimpleNamespace(
            monotonic=lambda: self.now))
        self.answers = {}
        self.stored = collections.defaultdict(int)
        self.asked = []
        self.rack = neighbour_caches.Neighbours(
            ADDRESSES, lambda address, token: Client(self, address, token),
            OWN)
        if own is not None:
            self.host(own).is_here = True

    def host(self, address):
        return next(host for host in self.rack.hosts
                    if host.address == address)

    def asking(self, image_id=IMAGE):
        return self.rack.asking(image_id, lambda: 'token')

    def fetch(self, asking, begin=0, wanted=(0,)):
        """Return the requested addresses and the offsets still wanted."""
        lot = image_assembly.Lot(begin, begin + MIB, [], wanted={
            offset: (b'name', 10) for offset in wanted})

        def take(lot, offset):
            if lot.wanted.pop(offset, None) is None:
                raise image_assembly.BadBlock(offset, 'it is wrong')

        self.asked = []
        asking.fetch(lot, begin, take)
        return self.asked, list(lot.wanted)


class Client:
    received = 0

    def __init__(self, world, address, token):
        assert token == 'token'
        self._world = world
        self._address = address

    def lent_blocks(self, image_id, ranges, repository_id):
        assert repository_id == OWN
        if ranges:
            self._world.asked.append(self._address)
        self.received += 100
        answer = self._world.answers.get(self._address, [])
        if isinstance(answer, Exception):
            raise answer
        return Loan(self._address, answer if ranges else [],
                    [offset for offset, _ in ranges],
                    self._world.stored[self._address])

    def interrupt(self):
        pass

    close = interrupt


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def order_of(world, begin=0, image_id=IMAGE):
    """Return the first two addresses that get a request."""
    return world.fetch(world.asking(image_id), begin)[0]


def test_no_list_no_asking():
    rack = neighbour_caches.Neighbours([], None, OWN)
    assert rack.asking(IMAGE, lambda: None) is None
    assert rack.status()['hosts'] == []


def test_all_hosts_choose_the_same_home(monkeypatch):
    homes = collections.Counter()
    for begin in range(0, 60 * MIB, MIB):
        order = order_of(World(monkeypatch), begin)
        assert len(order) == neighbour_caches.MAX_REQUESTS
        homes[order[0]] += 1
        for own in ADDRESSES:
            # Each host uses the home, unless it is the home itself.
            found = order_of(World(monkeypatch, own), begin)
            assert found[:1] == ([] if own == order[0] else order[:1])
            if own == order[1]:
                assert found == order[:1]   # the storing host comes next
    assert len(homes) == len(ADDRESSES)
    assert order_of(World(monkeypatch), 0, 'a') != (
        order_of(World(monkeypatch), 0, 'b'))


def test_a_host_that_goes_changes_its_own_lots_only(world, monkeypatch):
    gone = ADDRESSES[2]
    for begin in range(0, 60 * MIB, MIB):
        before = order_of(World(monkeypatch), begin)
        world.rack.put_aside(world.host(gone), 'it is gone')
        after = order_of(world, begin)
        assert after[0] == before[before[0] == gone]


def test_who_has_it_is_asked_first(world):
    asking = world.asking()
    first, second = order_of(world)
    other = next(one for one in ADDRESSES if one not in (first, second))
    world.answers = {address: [] for address in ADDRESSES}
    world.stored[other] = MIB
    asking.greet()
    world.answers[other] = [0]
    assert world.fetch(asking) == ([other], [])
    # For the blocks behind its announced bytes, the host is not asked first.
    begin = next(begin for begin in range(MIB, 99 * MIB, MIB)
                 if other not in order_of(world, begin))
    assert other not in world.fetch(asking, begin)[0]


def test_a_home_asks_neighbours_that_have_stored_the_lot(monkeypatch):
    world = World(monkeypatch)
    home, second = order_of(world)
    world = World(monkeypatch, home)
    asking = world.asking()
    assert world.fetch(asking) == ([], [0])
    world.stored[second] = MIB
    world.answers[second] = [0]
    asking.greet()
    assert world.fetch(asking) == ([second], [])


def test_what_one_lacks_comes_from_the_next(world):
    asking = world.asking()
    first, second = order_of(world)
    world.answers = {first: [0], second: [20]}
    assert world.fetch(asking, wanted=(0, 20, 40)) == ([first, second], [40])


@pytest.mark.parametrize('wrong, words', [
    ([WRONG], 'wrong'),
    ([0, client_errors.DaemonUnavailable('cut off')], 'cut off'),
    (client_errors.Refused(500, 'it failed'), 'failed'),
    (client_errors.Refused(409, 'another id', 'f' * 32), 'another'),
    (ValueError('no file'), 'no file')])
def test_who_fails_is_put_aside(world, wrong, words):
    asking = world.asking()
    first, second = order_of(world)
    world.answers = {first: wrong, second: [0, 20]}
    asked, left = world.fetch(asking, wanted=(0, 20))
    assert asked == [first, second] and left == []
    # The host is set aside for all images, but only for a while.
    for begin in range(0, 20 * MIB, MIB):
        assert first not in order_of(world, begin, 'other')
    status = world.rack.status()
    found = next(host for host in status['hosts']
                 if host['address'] == first)
    assert found['aside'] and words in found['last_failure']
    assert status['aside'] == status['failures'] == 1
    world.now += neighbour_caches.ASIDE_SECONDS + 1
    assert not world.rack.status()['aside']
    assert order_of(world)[0] == first


def test_who_is_slow_is_put_aside(world):
    first, second = order_of(world)

    class Slow(list):
        def __iter__(self):
            yield 0
            world.now += neighbour_caches.LOT_SECONDS + 1
            yield 20

    world.answers = {first: Slow(), second: [40]}
    # The others have no time left, so the storing host is next.
    assert world.fetch(world.asking(), wanted=(0, 20, 40)) == ([first], [40])
    assert world.host(first).is_aside


def test_who_did_not_send_what_it_announced_is_put_aside(world):
    asking = world.asking()
    first, second = order_of(world)
    world.stored[first] = MIB
    world.answers = {first: [0], second: []}
    assert world.fetch(asking, wanted=(0, 20)) == ([first, second], [20])
    assert world.host(first).is_aside
    # A neighbour that announced nothing made no mistake.
    assert not world.host(second).is_aside


@pytest.mark.parametrize('code', [400, 401, 403, 404, 416])
def test_who_lacks_it_is_not_asked_for_a_while(world, code):
    asking = world.asking()
    first, second = order_of(world)
    world.answers = {
        first: client_errors.Refused(code, 'not here', id_of(first))}
    assert world.fetch(asking)[0] == [first, second]
    assert first not in world.fetch(asking)[0]
    assert not world.rack.status()['failures']
    # The neighbour may have other images.
    assert order_of(world, 0, IMAGE)[0] == first
    world.now += neighbour_caches.MISSING_SECONDS + 1
    assert world.fetch(asking)[0][0] == first


def test_who_asks_us_for_it_is_asked_again(world):
    asking = world.asking()
    first = order_of(world)[0]
    world.answers = {
        first: client_errors.Refused(404, 'not here', id_of(first))}
    world.fetch(asking)
    assert first not in world.fetch(asking)[0]
    asking.heard(id_of(first))
    assert world.fetch(asking)[0][0] == first
    # While the refusal was on its way, the neighbour began a pull and sent us
    # a request.
    world.now += 1
    asking = world.asking()
    refusal = client_errors.Refused(404, 'not here', id_of(first))

    class Late(Client):
        def lent_blocks(self, *args):
            world.now += 1
            asking.heard(id_of(first))
            raise refusal

    asking._clients[first] = Late(world, first, 'token')
    asking._counted[first] = 0
    world.fetch(asking)
    del asking._clients[first]
    assert world.fetch(asking)[0][0] == first


def test_who_is_busy_is_asked_for_the_next(world):
    asking = world.asking()
    first = order_of(world)[0]
    world.answers = {first: client_errors.Refused(503, 'busy', id_of(first))}
    for _ in range(2):
        assert world.fetch(asking)[0][0] == first
    assert not world.rack.status()['failures']


def test_a_host_recognizes_itself(world):
    own = order_of(world)[0]
    asking = world.asking()
    world.answers = {own: client_errors.Refused(409, 'itself', OWN)}
    world.fetch(asking)
    assert world.host(own).is_here
    assert world.fetch(asking) == ([], [0])
    assert not world.rack.status()['failures']


def test_a_pull_that_is_over(world, caplog):
    """An interrupted pull does not count as a neighbour's failure."""
    asking = world.asking()
    asking.interrupt()
    with caplog.at_level(logging.WARNING):
        assert world.fetch(asking) == ([], [0])
    asking = world.asking()

    class Broken(list):
        def __iter__(self):
            asking.interrupt()
            raise client_errors.DaemonUnavailable('interrupted')

    first = order_of(world)[0]
    world.answers = {first: Broken()}
    assert world.fetch(asking) == ([first], [0])
    assert not world.rack.status()['failures'] and not caplog.records
    asking.close()


def test_bytes_are_counted(world):
    asking = world.asking()
    world.fetch(asking)
    world.fetch(asking)
    assert world.rack.status()['received_bytes'] == 400
