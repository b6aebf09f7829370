# SPDX-License-Identifier: Apache-2.0

"""Neighbours get blocks of an arriving image, from a real daemon."""

import asyncio
import contextlib
import json
import threading

import pytest

from dedupd.compute.cache import arriving_image
from dedupd.compute.cache import block_lending
from dedupd.http import messages
from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.base import thread_pool
from glance_dedup.client import client_errors
from glance_dedup.client import wire
from glance_dedup.transfer import pull
from tests.support import arriving_images
from tests.support import repositories

hosts = arriving_images.hosts
small = arriving_images.small
BLOCK = arriving_images.BLOCK
MIB = arriving_images.MIB
LIMIT = arriving_images.LIMIT
noise = arriving_images.noise


def begin(hosts, data, left):
    """Begin an arrival of which this many bytes arrive, and return it."""
    expected = hosts.put(data)
    hosts.relay.left = left
    hosts.arrivals.open('one', expected, None).close()
    return hosts.arrivals.under_way('one')


def loan_of(arrival, *ranges):
    return block_lending.Loan(arrival, arrival.partial, list(ranges),
                              thread_pool.Workers('test-lend', 8))


@contextlib.contextmanager
def borrowed(arrival, *ranges):
    """Return a loan of an arrival that is held until the last frame.

    The handler of requests holds the arrival as well. Otherwise it would lend
    no more blocks after the commit.
    """
    assert arrival.hold()
    try:
        yield loan_of(arrival, *ranges)
    finally:
        arrival.let_go()


def unframed(frames, ranges):
    """Return the bytes of frames by their offset."""
    buffer = wire.Buffer(b''.join([*frames, wire.END_FRAME]),
                         client_errors.BadAnswer)
    return {offset: bytes(data) for one in wire.Frames(buffer, ranges, 0)
            for offset, data in one.blocks()}


def all_of(loan, ranges):
    """Return all bytes of a loan by their offset."""
    found = {}
    while frames := loan.next():
        found |= unframed(frames, ranges)
    return found


def require_blocks_of(data, found, length):
    for offset, block in found.items():
        assert data[offset:offset + len(block)] == block
    assert sum(map(len, found.values())) == length


def test_everything_is_lent_while_it_comes(hosts):
    data = noise(9 * MIB)
    arrival = begin(hosts, data, 3 * MIB)
    ranges = [(0, len(data))]
    with borrowed(arrival, *ranges) as loan:
        threading.Timer(0.2, hosts.relay.allow, [None]).start()
        require_blocks_of(data, all_of(loan, ranges), len(data))
    hosts.ended()
    # No byte arrived twice.
    assert hosts.arrivals.status()['received_bytes'] < 1.03 * len(data)


def test_zeros_are_left_out(hosts):
    data = noise(MIB) + bytes(5 * MIB) + noise(MIB, 1)
    arrival = begin(hosts, data, 0)
    ranges = [(0, 2 * MIB), (5 * MIB, 2 * MIB)]
    with borrowed(arrival, *ranges) as loan:
        hosts.relay.allow(None)
        require_blocks_of(data, all_of(loan, ranges), 2 * MIB)


def test_only_what_was_asked_for_is_lent(hosts):
    data = noise(4 * MIB)
    arrival = begin(hosts, data, 0)
    ranges = [(BLOCK, BLOCK), (8 * BLOCK, 3 * BLOCK), (3 * MIB, BLOCK)]
    with borrowed(arrival, *ranges) as loan:
        hosts.relay.allow(None)
        require_blocks_of(data, all_of(loan, ranges), 5 * BLOCK)


@pytest.mark.parametrize('part', [(1, BLOCK - 1), (0, BLOCK - 1),
                                  (BLOCK, BLOCK + 1), (5, 6)])
def test_a_part_of_a_block(hosts, part):
    arrival = begin(hosts, noise(4 * MIB), 0)
    with pytest.raises(exceptions.InvalidParameter, match='within'):
        loan_of(arrival, part).next()
    hosts.relay.allow(None)


def test_what_several_want_is_requested_once(hosts):
    """Six neighbours cause one request, and the pull does not repeat it.

    The blocks are far ahead of the pull.
    """
    data = noise(20 * MIB)
    arrival = begin(hosts, data, 0)
    repositories.eventually(
        lambda: hosts.relay.requests['blocks'] == pull.LOTS, LIMIT)
    ranges = [(14 * MIB, MIB)]
    found = []
    with contextlib.ExitStack() as stack:
        loans = [stack.enter_context(borrowed(arrival, *ranges))
                 for _ in range(6)]
        threads = [threading.Thread(target=lambda loan=loan: found.append(
            all_of(loan, ranges))) for loan in loans]
        for thread in threads:
            thread.start()
        repositories.eventually(
            lambda: hosts.relay.requests['blocks'] == pull.LOTS + 1, LIMIT)
        hosts.relay.allow(None)
        for thread in threads:
            thread.join(LIMIT)
    for one in found:
        require_blocks_of(data, one, MIB)
    assert len(found) == 6
    hosts.ended()
    assert hosts.arrivals.status()['received_bytes'] < 1.03 * len(data)


def test_nothing_comes(hosts, monkeypatch):
    """If no block arrives, the answer ends early; the pull still succeeds."""
    monkeypatch.setattr(block_lending, 'WAIT_SECONDS', 0.3)
    data = noise(4 * MIB)
    arrival = begin(hosts, data, 0)
    loan = loan_of(arrival, (0, MIB))
    assert loan.next() == [] and loan.next() == []
    hosts.relay.allow(None)
    hosts.ended()
    assert repositories.read_all(hosts.ours, 'one') == data


def test_the_pull_ends_without_an_image(hosts):
    arrival = begin(hosts, noise(20 * MIB), 0)
    loan = loan_of(arrival, (14 * MIB, MIB))
    threading.Timer(0.2, arrival.cut_off).start()
    assert loan.next() == []
    hosts.ended()
    assert loan_of(arrival, (0, MIB)).next() == []


def test_the_image_is_committed_meanwhile(hosts):
    data = noise(6 * MIB)
    arrival = begin(hosts, data, 0)
    ranges = [(0, len(data))]
    # The reading holds the arrival until the last frame.
    reading = hosts.arrivals.open('one', None, None)
    loan = loan_of(arrival, *ranges)
    hosts.relay.allow(None)
    first = unframed(loan.next(), ranges)
    hosts.ended()
    rest = all_of(loan, ranges)
    reading.close()
    assert first and rest and not first.keys() & rest.keys()
    require_blocks_of(data, {**first, **rest}, len(data))
    # Later neighbours find the image in the repository.
    assert loan_of(arrival, *ranges).next() == []


# -- requests -----------------------------------------------------------------

OWN = 'ab' * 16


class Reads:
    """Handlers that admit every client; Glance has recorded a given hash."""

    def __init__(self, said=None):
        self._said = said

    async def permit(self, request, image_id):
        return None, self._said

    def refusal(self, image_id, error):
        return messages.HTTPError(
            404 if isinstance(error, hashes.Other) else 403, str(error))

    @contextlib.asynccontextmanager
    async def admit(self, request, image_id):
        yield


def request(**headers):
    return messages.Request('POST', {}, {
        name.replace('_', '-'): value for name, value in headers.items()},
        messages.Peer(operator=True))


async def status_of(context):
    try:
        async with context:
            return 200
    except messages.HTTPError as e:
        return e.status


def test_a_host_that_asks_itself():
    async def check():
        lender = block_lending.Lending(OWN, Reads(), None, False)
        assert await status_of(lender.admit(
            request(dedup_repository=OWN), 'one')) == 409
        assert await status_of(lender.admit(
            request(dedup_repository='cd' * 16), 'one')) == 200
        assert await status_of(lender.admit(request(), 'one')) == 200

    asyncio.run(check())


def test_too_many_neighbours_are_refused_at_once():
    async def check():
        lender = block_lending.Lending(OWN, Reads(), None, False)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(block_lending.MAX_COUNT):
                await stack.enter_async_context(
                    lender.admit(request(), 'one'))
            assert lender.status()['lending'] == block_lending.MAX_COUNT
            assert await status_of(lender.admit(request(), 'one')) == 503
        assert await status_of(lender.admit(request(), 'one')) == 200

        async def frames():
            yield b'frame'
            yield b'more'

        # A place is occupied until the last frame is sent.
        response = await lender._response(5, frames())
        assert response.headers == {
            'Dedup-Repository': OWN, 'Dedup-Stored': '5',
            'Content-Type': 'application/vnd.glance-dedup.frames'}
        assert lender.status()['lending'] == 1
        assert [piece async for piece in response.body] == [b'frame', b'more']
        assert lender.status() == {'lending': 0, 'lent_bytes': 9}

    asyncio.run(check())


# -- rules --------------------------------------------------------------------

class Asking:
    """Neighbours that delay the answer to each request."""

    def __init__(self):
        self.asked = 0
        self.over = threading.Event()

    def asking(self, image_id, token):
        return self

    def fetch(self, lot, home, take):
        self.asked += 1
        self.over.wait(LIMIT)

    def greet(self):
        pass

    def heard(self, repository_id):
        pass

    def interrupt(self):
        self.over.set()

    def close(self):
        pass


def test_a_lender_does_not_wait_for_its_neighbours(hosts):
    """Rule L7: a lender waits for no neighbour, since that may wait for it."""
    asking = Asking()
    hosts.arrivals._neighbours = asking
    data = noise(20 * MIB)
    arrival = begin(hosts, data, None)
    repositories.eventually(lambda: asking.asked == pull.LOTS, LIMIT)
    # The arrival requests some of these lots from neighbours.
    for ranges in ([(0, MIB)], [(3 * MIB, MIB)], [(16 * MIB, MIB)]):
        require_blocks_of(data, all_of(loan_of(arrival, *ranges), ranges), MIB)
    assert asking.asked == pull.LOTS
    asking.over.set()
    hosts.ended()
    assert repositories.read_all(hosts.ours, 'one') == data


def test_whether_glance_means_it(hosts):
    """Rule L8: the hash for the arrival's comparison decides."""
    data = noise(4 * MIB)
    arrival = begin(hosts, data, 0)
    expected = arrival._expected
    arrival.require_same(hashes.Hash('sha512', expected.hash_value))
    with pytest.raises(hashes.Other):
        arrival.require_same(hashes.Hash('sha512', '00' * 64))
    for unknown in (None, hashes.Hash('md5', '00' * 16)):
        with pytest.raises(hashes.Unproven):
            arrival.require_same(unknown)
    hosts.relay.allow(None)
    hosts.ended()


def test_who_gets_blocks_of_an_arriving_image(hosts):
    """Rule L8: a token gets blocks only of an image proven for a token."""
    arrival = begin(hosts, noise(4 * MIB), 0)
    same = hashes.Hash('sha512', arrival._expected.hash_value)
    other = hashes.Hash('sha512', '00' * 64)
    bearer = messages.Request('POST', {}, {'x-auth-token': 'a token'},
                              messages.Peer(), b'{"ranges": []}')
    operator = messages.Request('POST', {}, {}, messages.Peer(operator=True),
                                b'{"ranges": []}')

    async def status(asker, said, by_token):
        lender = block_lending.Lending(OWN, Reads(said), hosts.arrivals,
                                       by_token)
        try:
            response = await lender.blocks(asker, 'one')
        except messages.HTTPError as e:
            return e.status
        assert [piece async for piece in response.body] == [wire.END_FRAME]
        return response.status

    for asker, said, by_token, expected in (
            (bearer, same, True, 200), (bearer, same, False, 403),
            (bearer, other, True, 404), (bearer, None, True, 403),
            (operator, None, True, 200), (operator, None, False, 200)):
        assert asyncio.run(status(asker, said, by_token)) == expected
    hosts.relay.allow(None)
    hosts.ended()


def lent(hosts, ranges, meanwhile):
    """Return a whole answer to an operator as bytes, and its announced length.

    :param meanwhile: called after the first frame
    """
    asker = messages.Request(
        'POST', {}, {}, messages.Peer(operator=True), json.dumps(
            {'ranges': ranges}).encode())

    async def ask():
        lender = block_lending.Lending(OWN, Reads(), hosts.arrivals, False)
        response = await lender.blocks(asker, 'one')
        pieces = [await anext(response.body)]
        await asyncio.to_thread(meanwhile)
        pieces += [piece async for piece in response.body]
        return pieces[:-1], int(response.headers['Dedup-Stored'])

    return asyncio.run(ask())


def test_everybody_else_leaves_in_the_middle_of_an_answer(hosts):
    """An answer has all announced bytes if the arrival ends in the middle.

    Otherwise the neighbour would set this host aside.
    """
    data = noise(20 * MIB)
    arrival = begin(hosts, data, 15 * MIB)
    repositories.eventually(lambda: arrival.stored >= 3 * MIB, LIMIT)

    def arrive():
        hosts.relay.allow(None)
        hosts.ended()

    ranges = [[0, 3 * MIB]]
    frames, announced = lent(hosts, ranges, arrive)
    assert announced >= 3 * MIB
    require_blocks_of(data, unframed(frames, [(0, 3 * MIB)]), 3 * MIB)
    assert arrival._over    # only the answer kept it


@pytest.mark.parametrize('before', ['_become', '_end'])
def test_the_commit_is_under_way_while_frames_are_asked_for(
        hosts, monkeypatch, before):
    """A loan is complete if the commit runs meanwhile.

    The transaction is closed then, and the image is not open yet.
    """
    reached, go_on = threading.Event(), threading.Event()
    usual = getattr(arriving_image.Arrival, before)

    def late(self, what):
        if before == '_become' or what is None:
            reached.set()
            assert go_on.wait(LIMIT)
        return usual(self, what)

    monkeypatch.setattr(arriving_image.Arrival, before, late)
    data = noise(6 * MIB)
    arrival = begin(hosts, data, None)
    assert reached.wait(LIMIT)
    with borrowed(arrival, (0, len(data))) as loan:
        threading.Timer(0.3, go_on.set).start()
        reading = hosts.arrivals.open('one', None, None)
        require_blocks_of(data, all_of(loan, [(0, len(data))]), len(data))
        reading.close()


def test_the_commit_fails_while_frames_are_asked_for(hosts, monkeypatch):
    reached, go_on = threading.Event(), threading.Event()

    def fails(self):
        reached.set()
        assert go_on.wait(LIMIT)
        raise exceptions.StorageError('it cannot be written')

    monkeypatch.setattr(arriving_image.Arrival, '_commit', fails)
    arrival = begin(hosts, noise(6 * MIB), None)
    assert reached.wait(LIMIT)
    arrival.partial.end(None)
    loan = loan_of(arrival, (0, 6 * MIB))
    threading.Timer(0.1, go_on.set).start()
    assert loan.next() == []
    hosts.ended()


def test_an_arrival_that_is_compared_with_nothing(hosts):
    hosts.put(noise(4 * MIB))
    hosts.relay.left = 0
    hosts.arrivals.open('one', None, None).close()
    with pytest.raises(hashes.Unproven):
        hosts.arrivals.under_way('one').require_same(
            hashes.Hash('sha512', '00' * 64))
    hosts.relay.allow(None)
    hosts.ended()
    assert hosts.arrivals.under_way('one') is None


def test_md5_is_a_hash_too():
    assert arriving_image.Expected(1, md5='00' * 16).hash == hashes.Hash(
        'md5', '00' * 16)
    assert arriving_image.Expected(1).hash is None
