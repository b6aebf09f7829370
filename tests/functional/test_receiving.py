# SPDX-License-Identifier: Apache-2.0

"""The daemon receives images that are sent wrongly, late, or not at all."""

import contextlib
import random
import signal
import socket
import ssl
import time
import urllib.parse

import pytest

from dedupd.serve import replica_receiver
from glance_dedup.client import wire
from glance_dedup.transfer import image_sending
from tests.support import daemons
from tests.support import replicas
from tests.support import repositories
from tests.unit.transfer import test_image_sending
from tests.unit.transfer import test_pull

BLOCK = 4096
noise = repositories.noise
UPLOAD = 'ab' * 16
SENDER = 'cd' * 16


#: No sender counts as silent, however slow the machine is.
PATIENT = test_image_sending.program(SILENT_SECONDS=3600, IDLE_SECONDS=3600)
#: Each sender counts as silent between two signals, and none otherwise.
SIGNALLED = [
    '-c', 'from dedupd import daemon; import itertools, signal, sys; '
    'from dedupd.serve import replica_receiver as incoming; '
    'seconds = itertools.cycle([3600, 0]); '
    'change = lambda *_: setattr(incoming, "IDLE_SECONDS", next(seconds)); '
    'change(); incoming._SWEEP_SECONDS = 0.2; '
    'signal.signal(signal.SIGUSR1, change); sys.exit(daemon.main())']


@pytest.fixture(scope='module')
def sites(tmp_path_factory):
    """A home, and a place for images to be sent to."""
    path = tmp_path_factory.mktemp('sites')
    home, away = (test_pull.Site(path / name) for name in ('home', 'away'))
    yield home, away
    for site in (home, away):
        site.repo.close()


@pytest.fixture(scope='module')
def daemon(sites):
    with daemons.Daemon(sites[1].path, header_timeout=5) as daemon:
        daemon.program = PATIENT
        yield daemon.start()
        assert daemon.stop() == 0
        assert 'Traceback' not in daemon.text()


class Peer:
    """Sends an image by hand."""

    def __init__(self, daemon, sending, image_id):
        self.daemon = daemon
        self.sending = sending
        self.path = f'/v1/replicas/{image_id}'
        self.token = None

    def request(self, method, what, body=b'', **query):
        return self.daemon.request(
            method, f'{self.path}{what}?{urllib.parse.urlencode(query)}',
            body)

    def begin(self, header=None, **query):
        query = {'upload': UPLOAD, 'sender': SENDER, **query}
        found = self.request(
            'POST', '', self.sending.header.pack() if header is None
            else header, **query)
        if found.status == 201:
            self.token = found.json()['replica']
        return found

    def post(self, what, body=b'', **query):
        return self.request('POST', what, body,
                            **{'replica': self.token, **query})

    def offer(self, lot, **query):
        return self.post('/lots', lot.extents,
                         **{'offset': lot.offset, **query})

    def complete(self):
        """Send the rest of the image correctly."""
        offset = self.begin().json()['offset']
        for lot in self.sending.lots:
            if lot.offset >= offset:
                found = self.offer(lot)
                assert found.status == 200, found.body
                for body in self.sending.frames(
                        list(map(tuple, found.json()['ranges']))):
                    assert self.post('/blocks', body,
                                     offset=lot.offset).status == 200
        found = self.post('/commit')
        assert found.status == 200, found.body
        return found.json()


@pytest.fixture
def peer(sites, daemon, request):
    """A peer with an image of 80 blocks, in five lots, unique to it."""
    home, away = sites
    image_id = 'image-' + format(random.Random(
        request.node.name).getrandbits(64), 'x')
    data = noise(75 * BLOCK, image_id) + bytes(20 * BLOCK) + noise(
        4 * BLOCK + 5, image_id + 'end')
    home.put(image_id, data)
    with contextlib.closing(
            replicas.Sending(home.repo, image_id)) as sending:
        peer = Peer(daemon, sending, image_id)
        peer.image_id, peer.data = image_id, data
        yield peer
    peer.request('DELETE', '', replica=peer.token)
    if image_id in away.repo.images():
        # Whatever was tried: the image is there, or none is.
        assert away.read(image_id) == data
    else:
        away.require_nothing_of(image_id)


def refused(found, status, *words):
    assert found.status == status, found.body
    message = found.json()['error']['message']
    assert message.endswith('.')
    for word in words:
        assert word in message


# -- beginning ----------------------------------------------------------------

@pytest.mark.parametrize('query, word', [
    ({'upload': ''}, 'upload'), ({'upload': 'AB' * 16}, 'upload'),
    ({'sender': 'x' * 32}, 'sender'), ({'project': 'p' * 256}, 'project'),
    ({'project': 'a\0b'}, 'project'), ({'hash': ''}, 'hash'),
    ({'hash': 'sha512:xx'}, 'hash'), ({'hash': 'sha512:' + 'a' * 130}, 'hash'),
    ({'hash': 's' * 33 + ':aa'}, 'hash'), ({'hash': 'sha512'}, 'hash')])
def test_bad_parameters(peer, query, word):
    refused(peer.begin(**query), 400, word)


@pytest.mark.parametrize('change, word', [
    (lambda header: b'', 'has 0 bytes'),
    (lambda header: header[:-1], 'has 79 bytes'),
    (lambda header: b'X' + header[1:], 'not a recipe'),
    # This is the next version, which this daemon cannot know.
    (lambda header: header[:7] + b'\3' + header[8:], 'older than the sender'),
    (lambda header: header[:8] + bytes(4) + header[12:], 'blocks of 0'),
    (lambda header: header[:16] + b'\xff' * 8 + header[24:], 'bytes'),
    (lambda header: header[:40] + b'nonsense'.ljust(16, b'\0')
     + header[56:], 'nonsense'),
    (lambda header: header[:40] + b'\xff' * 16 + header[56:],
     'no fingerprint'),
    (lambda header: header[:72] + b'\1\0\0\0\0\0\0\0', 'average 0')])
def test_bad_headers(peer, change, word):
    refused(peer.begin(change(peer.sending.header.pack())), 400, word)


def test_a_long_header(peer):
    refused(peer.begin(peer.sending.header.pack() + b'x'), 413)


def test_a_bad_id(peer):
    peer.path = '/v1/replicas/a.b'
    refused(peer.begin(), 400, 'image id')


def test_what_was_not_begun(peer):
    for found in (peer.post('/commit', replica='ab' * 16),
                  peer.post('/lots', b'', offset=0, replica=''),
                  peer.request('POST', '/commit'),
                  peer.request('DELETE', '', replica='\xff')):
        refused(found, 404, 'Begin again')


def test_a_token_of_before(peer):
    """A late request with an old token does not disturb a new sender."""
    peer.begin()
    before = peer.token
    lot = peer.sending.lots[0]
    request = daemons.raw(
        'POST', f'{peer.path}/lots?replica={before}&offset=0', lot.extents)
    with peer.daemon.connect() as sock:
        # Its body is completed when the token is old.
        sock.sendall(request[:-1])
        time.sleep(0.2)
        peer.begin()
        sock.sendall(request[-1:])
        refused(daemons.read_response(sock.makefile('rb')), 404)
    refused(peer.offer(lot, replica=before), 404)
    peer.complete()


def test_it_is_deleted_while_it_is_compared(sites, peer):
    """The image then has to be sent again."""
    away = sites[1]
    peer.complete()
    assert peer.begin().json()['exists']
    for lot in peer.sending.lots:
        assert peer.offer(lot).json()['ranges'] == []
    away.repo.delete(peer.image_id)
    assert peer.post('/commit').status == 404
    assert not peer.complete()['exists']


def test_another_sender(peer):
    assert peer.begin().status == 201
    found = peer.begin(sender='ef' * 16)
    refused(found, 503, 'another sender, since 20')
    assert found.headers['retry-after'] == '5'
    peer.complete()
    # The sending is over now.
    assert peer.begin(sender='ef' * 16).json()['exists']


def test_another_upload_of_the_same_sender(peer):
    """The image was stored again there: the lots sent so far are not used."""
    peer.begin(upload='ef' * 16)
    assert peer.offer(peer.sending.lots[0]).status == 200
    assert peer.begin().json()['offset'] == 0
    peer.complete()


# -- lots ---------------------------------------------------------------------

def test_an_offer_answered_twice(peer):
    """An offer can be repeated; each answer has the ranges missing then."""
    peer.begin()
    lot = peer.sending.lots[0]
    first, second = peer.offer(lot), peer.offer(lot)
    assert first.json() == second.json() == {
        'ranges': [[0, 16 * BLOCK]], 'blocks': 16}
    body, = peer.sending.frames([(0, 10 * BLOCK)])
    assert peer.post('/blocks', body, offset=0).json() == {'stored': 0}
    assert peer.offer(lot).json() == {
        'ranges': [[10 * BLOCK, 6 * BLOCK]], 'blocks': 6}
    body, = peer.sending.frames([(10 * BLOCK, 6 * BLOCK)])
    assert peer.post('/blocks', body, offset=0).json() == {
        'stored': 16 * BLOCK}
    # Now no block is missing.
    assert peer.offer(lot).json() == {'ranges': [], 'blocks': 0}
    refused(peer.offer(peer.sending.lots[1], offset=0), 404,
            'another lot was stored at offset 0')


@pytest.mark.parametrize('offset', [
    1, BLOCK, 32 * BLOCK, 1 << 61])
def test_offers_out_of_order(peer, offset):
    peer.begin()
    assert peer.offer(peer.sending.lots[0]).status == 200
    refused(peer.offer(peer.sending.lots[1], offset=offset), 409,
            f'the next one is at {16 * BLOCK}')


@pytest.mark.parametrize('offset', [
    '', '-1', 'x', '1.5', 1 << 63, 1 << 64, 10 ** 30])
def test_offsets_that_are_none(peer, offset):
    peer.begin()
    for what in ('/lots', '/blocks'):
        refused(peer.post(what, b'x', offset=offset), 400, 'offset')


def test_another_lot_at_the_same_place(peer):
    peer.begin()
    lot = peer.sending.lots[0]
    peer.offer(lot)
    changed = bytearray(lot.extents)
    changed[24] ^= 1
    refused(peer.post('/lots', bytes(changed), offset=0), 404,
            'another lot')
    peer.complete()


def test_too_many_lots(peer):
    peer.begin()
    for lot in peer.sending.lots[:replica_receiver.LOTS]:
        assert peer.offer(lot).status == 200
    refused(peer.offer(peer.sending.lots[replica_receiver.LOTS]), 409,
            'under way')


def extent(offset, length, blocks, lengths=None):
    return wire.RecipeExtent(offset, length, blocks, b''.join(
        bytes(32) + n.to_bytes(4, 'little')
        for n in lengths or [BLOCK] * blocks)).pack()


@pytest.mark.parametrize('body, word', [
    (b'', 'no extents'),
    (b'x', 'cut off'),
    (extent(0, BLOCK, 1)[:-1], 'cut off'),
    (extent(BLOCK, BLOCK, 1), 'behind 0'),
    (extent(0, BLOCK, 1) + extent(0, BLOCK, 1), f'behind {BLOCK}'),
    (extent(0, BLOCK, 1) + extent(3 * BLOCK, BLOCK, 1), f'behind {BLOCK}'),
    (extent(0, 0, 0), '0 bytes'),
    (extent(0, 1 << 63, 0), 'bytes'),
    (extent(1 << 63, BLOCK, 1), 'behind 0'),
    (extent(0, 100 * BLOCK, 0), 'bytes'),
    (extent(0, BLOCK, 1, [BLOCK - 1]), 'another length'),
    (extent(0, 2 * BLOCK, 2, [2 * BLOCK, 0]), 'another length'),
    (extent(0, BLOCK, 0) + b'\0' * 23, 'cut off')])
def test_bad_lots(peer, body, word):
    peer.begin()
    refused(peer.post('/lots', body, offset=0), 400, word)
    # Nothing of it was stored.
    peer.complete()


def test_lots_that_are_too_large(peer):
    header = wire.RecipeHeader(
        BLOCK, 1 << 40, 0, 1000, 'sha256', bytes(16), 'fixed')
    peer.begin(header.pack())
    refused(peer.post('/lots', extent(0, 4097 * 64, 4097, [64] * 4097),
                      offset=0), 400, '4097 blocks')
    refused(peer.post('/lots', extent(0, 2049 * BLOCK, 2049), offset=0),
            400, '2049 blocks')
    refused(peer.post('/lots', extent(0, (1 << 30) + 1, 0), offset=0), 400,
            'zeros')
    refused(peer.post('/lots', bytes(replica_receiver.EXTENTS_BYTES + 1),
                      offset=0), 413)
    assert peer.post('/lots', extent(0, 1 << 30, 0),
                     offset=0).status == 200


def test_lots_without_end(tmp_path):
    """A replica refuses lots beyond a limit, each of which is well formed."""
    header = wire.RecipeHeader(
        BLOCK, 1 << 20, 0, 1, 'sha256', bytes(16), 'fixed')
    path = repositories.create(tmp_path / 'here')
    with repositories.open_repository(path) as repository, (
            contextlib.closing(replica_receiver.Replica(
                repository, 'one', header, ''))) as replica:
        with pytest.raises(replica_receiver.Conflict, match='may have'):
            for offset in range(1 << 20):
                replica.offer(offset, extent(offset, 1, 0))
    assert offset < 4000
    repositories.require_clean(path)


# -- blocks -------------------------------------------------------------------

def test_blocks_that_nobody_asked_for(peer):
    peer.begin()
    body, = peer.sending.frames([(0, 16 * BLOCK)])
    refused(peer.post('/blocks', body, offset=0), 409, 'no blocks')
    peer.begin()
    peer.offer(peer.sending.lots[0])
    other, = peer.sending.frames([(16 * BLOCK, BLOCK)])
    refused(peer.post('/blocks', other, offset=0), 400, 'not asked for')
    assert peer.post('/blocks', body, offset=0).status == 200
    peer.complete()


def test_blocks_that_come_twice(peer):
    peer.begin()
    peer.offer(peer.sending.lots[0])
    body, = peer.sending.frames([(0, 8 * BLOCK)])
    assert peer.post('/blocks', body, offset=0).status == 200
    refused(peer.post('/blocks', body, offset=0), 400, 'not asked for')
    peer.complete()


def frame(plain, places):
    """Return a correct frame."""
    import struct

    import xxhash
    head = struct.pack('<4sBBHII', b'GDFR', 0, 0, len(places), len(plain),
                       len(plain))
    body = b''.join(struct.pack('<QII', *p) for p in places) + plain
    return head + struct.pack('<Q', xxhash.xxh3_64_intdigest(
        head + body)) + body


@pytest.mark.parametrize('spoil', [0, BLOCK - 1, 15 * BLOCK, 16 * BLOCK - 1])
def test_wrong_blocks(peer, spoil):
    """Wrong blocks are named by their offset, and not stored."""
    peer.begin()
    lot = peer.sending.lots[0]
    peer.offer(lot)
    plain = bytearray(peer.data[:16 * BLOCK])
    plain[spoil] ^= 1
    body = frame(bytes(plain), [(0, 0, 16 * BLOCK)]) + wire.END_FRAME
    refused(peer.post('/blocks', body, offset=0), 400,
            peer.image_id, f'offset {spoil // BLOCK * BLOCK}: ',
            'not have its fingerprint')
    # It is still missing, as are all blocks behind it.
    assert peer.offer(lot).json()['blocks'] == 16 - spoil // BLOCK
    peer.complete()


def test_exchanged_blocks(peer):
    peer.begin()
    peer.offer(peer.sending.lots[0])
    body = frame(peer.data[:2 * BLOCK], [
        (0, BLOCK, BLOCK), (BLOCK, 0, BLOCK)]) + wire.END_FRAME
    refused(peer.post('/blocks', body, offset=0), 400, 'fingerprint')
    peer.complete()


def test_bad_frames(peer):
    peer.begin()
    lot = peer.sending.lots[0]
    peer.offer(lot)
    body, = peer.sending.frames([(0, 16 * BLOCK)])
    for bad, word in (
            (b'', 'cut off'), (body[:10], 'cut off'),
            (b'X' + body[1:], 'not a frame'),
            (body[:50] + bytes([body[50] ^ 1]) + body[51:], 'checksum'),
            (frame(b'x', [(0, 0, 2)]) + wire.END_FRAME, 'place'),
            (frame(b'x', [(0, 0, 1)]) + wire.END_FRAME, 'fingerprint'),
            (frame(bytes(BLOCK), [(1 << 63, 0, BLOCK)]) + wire.END_FRAME,
             'not asked for')):
        refused(peer.post('/blocks', bad, offset=0), 400, word,
                peer.image_id)
    refused(peer.post('/blocks', bytes(replica_receiver.FRAMES_BYTES + 1),
                      offset=0), 413)
    # The blocks are right, and the end is wrong.
    for lot, change, word in zip(peer.sending.lots, (
            lambda body: body[:-24], lambda body: body[:-1],
            lambda body: body + b'x'), (
                'cut off', 'cut off', 'behind their end')):
        peer.offer(lot)
        body, = peer.sending.frames([(lot.offset, 16 * BLOCK)])
        refused(peer.post('/blocks', change(body), offset=lot.offset), 400,
                word)
    peer.complete()


def test_any_bytes_that_change(peer):
    """Changed bytes get a right answer, or a refusal; the image is right."""
    rng = random.Random(7)
    peer.begin()
    for number in range(300):
        lot = rng.choice(peer.sending.lots[:2])
        body = lot.extents
        what = '/lots'
        if rng.random() < 0.5:
            what = '/blocks'
            body = next(peer.sending.frames([(lot.offset, 16 * BLOCK)]))
        body = bytearray(body)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(min(len(body), 300))
            body[at] = rng.choice([0, 255, body[at] ^ 1 << rng.randrange(8)])
        if rng.random() < 0.2:
            del body[rng.randrange(len(body)):]
        found = peer.post(what, bytes(body), offset=lot.offset)
        assert found.status in (200, 400, 404, 409), found.body
        if found.status in (404, 409):
            peer.begin()
    peer.request('DELETE', '', replica=peer.token)
    peer.complete()


def test_a_commit_before_all_came(peer):
    for lots in range(replica_receiver.LOTS):
        peer.begin()
        for lot in peer.sending.lots[:lots]:
            assert peer.offer(lot).status == 200
        refused(peer.post('/commit'), 409, 'the received lots end at')


# -- senders ------------------------------------------------------------------

def test_only_operators_send_bodies(tmp_path):
    """The daemon refuses other users before it receives a body."""
    site = test_pull.Site(tmp_path / 'site')
    tls = test_pull.TLS(tmp_path, site.path)
    with tls.daemon:
        context = ssl.create_default_context(cafile=tls.authority.path)
        with socket.create_connection(('127.0.0.1', tls.port)) as plain, \
                context.wrap_socket(plain,
                                    server_hostname='127.0.0.1') as sock:
            sock.settimeout(daemons.LIMIT)
            sock.sendall(b'POST /v1/replicas/one/blocks?replica=x&offset=0 '
                         b'HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000'
                         b'\r\n\r\n' + bytes(1000))
            answer = daemons.read_response(sock.makefile('rb'))
            refused(answer, 403, 'certificate')
    site.repo.close()


# -- limits -------------------------------------------------------------------

def test_what_is_silent_is_given_up(sites, tmp_path):
    """The daemon gives up a silent sender, but keeps its blocks."""
    home, _ = sites
    home.put('silent', noise(80 * BLOCK, 'silent'))
    away = test_pull.Site(tmp_path / 'away')
    with contextlib.closing(replicas.Sending(home.repo, 'silent')) as sending:
        daemon = daemons.Daemon(away.path)
        daemon.program = SIGNALLED
        with daemon:
            daemon.start()
            peer = Peer(daemon, sending, 'silent')
            peer.begin()
            for lot in sending.lots[:4]:
                peer.offer(lot)
                for body in sending.frames([(lot.offset, 16 * BLOCK)]):
                    peer.post('/blocks', body, offset=lot.offset)
            assert repositories.spool(away.path)
            status = daemon.status()['receiving']
            assert status['under_way'] == 1
            replica, = status['replicas']
            assert (replica['image_id'], replica['stored'],
                    replica['size']) == ('silent', 64 * BLOCK, 80 * BLOCK)
            daemon.process.send_signal(signal.SIGUSR1)
            repositories.eventually(
                lambda: not repositories.spool(away.path))
            daemon.process.send_signal(signal.SIGUSR1)
            refused(peer.post('/commit'), 404)
            with daemon.client() as client:
                sent = image_sending.send(home.repo, 'silent', client)
            assert sent.found_blocks == 64
            status = daemon.status()['receiving']
            assert (status['images'], status['failures'],
                    status['replicas']) == (1, 1, [])
            assert status['bytes'] > 80 * BLOCK
            assert daemon.stop() == 0
            assert 'nothing came for' in daemon.text()
    away.repo.close()


def test_a_stop_keeps_what_came(sites, tmp_path):
    home, _ = sites
    home.put('stopped', noise(80 * BLOCK, 'stopped'))
    away = test_pull.Site(tmp_path / 'away')
    with contextlib.closing(
            replicas.Sending(home.repo, 'stopped')) as sending, \
            daemons.Daemon(away.path) as daemon:
        daemon.start()
        peer = Peer(daemon, sending, 'stopped')
        peer.begin()
        lot = sending.lots[0]
        peer.offer(lot)
        for body in sending.frames([(0, 16 * BLOCK)]):
            peer.post('/blocks', body, offset=0)
        assert daemon.stop() == 0
        assert not repositories.spool(away.path)
        daemon.start()
        with daemon.client() as client:
            sent = image_sending.send(home.repo, 'stopped', client)
        assert sent.found_blocks == 16
    away.repo.close()


@pytest.mark.slow
def test_killed_often(sites, tmp_path, monkeypatch):
    """After kill -9 again and again, hardly any byte is sent twice."""
    home, _ = sites
    data = noise(24 << 20, 'killed')
    home.put('killed', data)
    away = test_pull.Site(tmp_path / 'away')
    kills = 2
    test_image_sending.limit_lots(monkeypatch, 32)
    with daemons.Daemon(away.path) as daemon:
        daemon.program = test_image_sending.program(SYNC_BYTES=1 << 20)
        daemon.start()
        left = [len(data) * n // (kills + 1) for n in range(1, kills + 1)]

        class Pace:
            def step(self, done, total, what, cost=0):
                if left and done > left[0]:
                    left.pop(0)
                    daemon.kill()
                    daemon.start()

        with daemon.client() as client:
            sent = image_sending.send(home.repo, 'killed', client,
                                      pace=Pace())
        assert not left
        assert away.read('killed') == data
        # A sync point is behind, and some lots are under way.
        most = (1 << 20) + 6 * 32 * BLOCK
        assert sent.sent_bytes < 1.03 * len(data) + kills * most
        repositories.require_clean(away.path)
    away.repo.close()


def test_memory(sites, tmp_path):
    """The memory for lots that lack one block each is bounded."""
    home, _ = sites
    big = dict(vars(replicas.LOTS), lot_blocks=4096, lot_bytes=8 << 20)
    away = test_pull.Site(tmp_path / 'away')
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(daemons.Daemon(away.path))
        daemon.program = PATIENT
        daemon.start()
        before = daemon.memory()
        peers = []
        for number in range(replica_receiver.MAX_COUNT + 2):
            image_id = f'memory-{number}'
            home.put(image_id, noise(24 << 20, image_id))
            sending = stack.enter_context(contextlib.closing(
                replicas.Sending(home.repo, image_id,
                                 type(replicas.LOTS)(**big))))
            peer = Peer(daemon, sending, image_id)
            found = peer.begin()
            if number >= replica_receiver.MAX_COUNT:
                refused(found, 503, 'most at once')
                continue
            peers.append(peer)
            for lot in sending.lots:
                found = peer.offer(lot).json()['ranges']
                assert sum(length for _, length in found) == 8 << 20
                for body in sending.frames([
                        (lot.offset, (8 << 20) - BLOCK)]):
                    assert peer.post('/blocks', body,
                                     offset=lot.offset).status == 200
        held = daemon.memory('VmHWM') - before
        # The memory has blocks, their descriptions, and bodies.
        most = replica_receiver.MAX_COUNT * (3 * 12 + 16) << 20
        assert 96 << 20 < held < most, held
        # Other senders can begin when these are silent, or done.
        for peer in peers:
            lot = peer.sending.lots[0]
            for lot in peer.sending.lots:
                body, = peer.sending.frames([(lot.end - BLOCK, BLOCK)])
                assert peer.post('/blocks', body,
                                 offset=lot.offset).status == 200
            assert peer.post('/commit').status == 200
        assert daemon.stop() == 0
    for number in range(replica_receiver.MAX_COUNT):
        assert away.read(f'memory-{number}') == noise(
            24 << 20, f'memory-{number}')
    away.repo.close()


def test_too_many_requests_of_one(peer):
    """The daemon waits for a limited number of bodies that drip."""
    peer.begin()
    with contextlib.ExitStack() as stack:
        for _ in range(replica_receiver.REQUESTS):
            sock = stack.enter_context(peer.daemon.connect())
            sock.sendall(daemons.raw(
                'POST', f'{peer.path}/lots?replica={peer.token}&offset=0',
                bytes(100))[:-1])
        # The daemon reads their heads after a while.
        repositories.eventually(
            lambda: peer.offer(peer.sending.lots[0]).status == 503)
        refused(peer.offer(peer.sending.lots[0]), 503, 'not answered yet')
    # The waits have an end.
    repositories.eventually(
        lambda: peer.offer(peer.sending.lots[0]).status == 200)
    peer.complete()


def test_a_slow_body_is_waited_for(peer, tmp_path):
    """A body only has to bring 256 KiB in the header's time limit."""
    away = test_pull.Site(tmp_path / 'away')
    body = bytes(8 << 18)
    # A pause of this machine may take most of that time.
    with daemons.Daemon(away.path, header_timeout=5) as daemon:
        daemon.start()
        slow = Peer(daemon, peer.sending, peer.image_id)
        slow.begin()
        request = daemons.raw(
            'POST', f'{slow.path}/blocks?replica={slow.token}&offset=0', body)
        began = time.monotonic()
        with daemon.connect() as sock:
            for at in range(0, len(request), 1 << 16):
                sock.sendall(request[at:at + (1 << 16)])
                time.sleep(0.18)
            found = daemons.read_response(sock.makefile('rb'))
        assert time.monotonic() - began > 5
        refused(found, 409, 'no blocks')
    away.repo.close()
