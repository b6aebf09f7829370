# SPDX-License-Identifier: Apache-2.0

"""Clients read images while these arrive from a real daemon."""

import collections
import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from dedupd.compute.cache import arrival_list
from dedupd.compute.cache import arriving_image
from dedupd.compute.cache import image_pull
from dedupd.serve import image_source
from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import wire
from glance_dedup.transfer import image_assembly
from glance_dedup.transfer import pull
from tests.support import daemons
from tests.support import repositories

noise = repositories.noise
mixture = repositories.mixture
BLOCK = 4096
MIB = 1 << 20
LIMIT = 60      # seconds for anything


class Relay:
    """A relay between a client and a daemon that counts every request.

    :ivar left: bytes of blocks that may still pass; None: all. At 0 the relay
        holds back the rest
    :ivar refused: tokens that get 401
    :ivar change: changes the bytes from the daemon
    """

    def __init__(self, path, target):
        self._target = target
        self._changed = threading.Condition()
        self.left = None
        self.refused = set()
        self.change = lambda data: data
        self.requests = collections.Counter()
        self.passed = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self.address = f'unix:{path}'
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def allow(self, left):
        """Let this many more bytes of blocks pass; None: all."""
        with self._changed:
            self.left = left
            self._changed.notify_all()

    def connect(self, token):
        return daemon_client.Client(self.address, token=token)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                threading.Thread(target=self._relay, args=(client,),
                                 daemon=True).start()

    def _relay(self, client):
        server = socket.socket(socket.AF_UNIX)
        self._sockets.append(server)
        kind = ['']
        try:
            server.connect(self._target)
            threading.Thread(target=self._back, args=(server, client, kind),
                             daemon=True).start()
            stream = client.makefile('rb')
            while request := self._request(stream):
                head, body = request
                kind[0] = head.split()[1].partition(b'?')[0].rpartition(
                    b'/')[2].decode()
                self.requests[kind[0]] += 1
                if any(f'x-auth-token: {token}\r\n'.encode() in head.lower()
                       for token in self.refused):
                    self.requests['refused'] += 1
                    client.sendall(b'HTTP/1.1 401 Unauthorized\r\n'
                                   b'Content-Length: 0\r\n\r\n')
                else:
                    server.sendall(head + body)
        except OSError:
            pass
        finally:
            for sock in (client, server):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    @staticmethod
    def _request(stream):
        head = b''
        while not head.endswith(b'\r\n\r\n'):
            line = stream.readline()
            if not line:
                return None
            head += line
        length = [line for line in head.lower().split(b'\r\n')
                  if line.startswith(b'content-length:')]
        return head, stream.read(int(length[0][15:])) if length else b''

    def _back(self, server, client, kind):
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if kind[0] == 'blocks':
                    data = self._hold(client, data)
                client.sendall(self.change(data))
                self.passed += len(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _hold(self, client, data):
        """Send as many bytes as may pass now; return those to send later."""
        while True:
            with self._changed:
                if self.left is None:
                    return data
                now = min(self.left, len(data))
                self.left -= now
                if now == len(data):
                    return data
                if not now:
                    self._changed.wait(LIMIT)
            client.sendall(self.change(data[:now]))
            self.passed += now
            data = data[now:]

    def close(self):
        self.allow(None)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def hashes_of(data):
    return {name: hashlib.new(name, data).hexdigest()
            for name in ('sha512', 'md5')}


class Hosts:
    """A storing host, and a host that lacks its images."""

    def __init__(self, tmp_path, **parameters):
        self.there = repositories.create(tmp_path / 'there')
        self.here = repositories.create(tmp_path / 'here', **parameters)
        self.theirs = repositories.open_repository(self.there)
        self.ours = repositories.open_repository(self.here)
        self.daemon = daemons.Daemon(self.there)
        self.begun, self.arrived = [], []

    def put(self, data, image_id='one', known=None, **options):
        """Store an image on the storing host.

        :param known: the hashes of its bytes, as the storing host records them
        """
        stat = repositories.put(self.theirs, image_id, data, **options)
        if known is None:
            known = hashes_of(data)
        for item in known.items():
            hashes.record(self.theirs.path, stat, hashes.Hash(*item))
        return arriving_image.Expected(
            len(data), hash_name='sha512',
            hash_value=hashlib.sha512(data).hexdigest())

    def require_nothing_of(self, image_id):
        """Require that no image and no recipe in flight is left."""
        assert image_id not in self.ours.images()
        repositories.eventually(lambda: not any(
            map(self.is_in_flight, repositories.spool(self.here))), LIMIT)

    def is_in_flight(self, name):
        """Return True for a recipe that has no name in images/."""
        try:
            return (self.here / 'spool' / name).stat().st_nlink != 2
        except FileNotFoundError:
            return False

    def ended(self):
        repositories.eventually(lambda: not self.arrivals._arrivals, LIMIT)


@pytest.fixture
def hosts(tmp_path):
    with serving(Hosts(tmp_path)) as hosts:
        yield hosts


@contextlib.contextmanager
def serving(hosts):
    with hosts.daemon as daemon:
        daemon.start()
        hosts.relay = Relay(daemon.directory / 'relay', daemon.socket)
        hosts.arrivals = arrival_list.Arrivals(
            hosts.ours, hosts.relay.connect,
            on_begin=lambda *args: hosts.begun.append(args),
            on_arrived=lambda *args: hosts.arrived.append(args))
        yield hosts
        hosts.arrivals.stop(LIMIT)
        hosts.relay.close()
    hosts.ours.close()
    hosts.theirs.close()


@pytest.fixture
def small(monkeypatch):
    """Set lots, memory and sync points so small that there are many."""
    monkeypatch.setattr(image_assembly, 'READ_LOT_BYTES', 64 << 10)
    monkeypatch.setattr(pull, 'SYNC_BYTES', 256 << 10)
    monkeypatch.setattr(image_pull, 'AHEAD_BYTES', 256 << 10)
    monkeypatch.setattr(image_pull, 'NEAR_BYTES', 16 << 10)


def read_at(reading, offset, length):
    data = bytearray(length)
    return bytes(data[:reading.readinto(memoryview(data), offset)])


def follow(reading, piece=100_000):
    """Read in order, and only the bytes that are available without waiting."""
    rung = threading.Event()
    reading.on_more(rung.set)
    found = b''
    while len(found) < reading.size:
        rung.clear()
        ready = reading.available(len(found))
        if not ready:
            assert rung.wait(LIMIT), 'nothing came, and nothing was told'
            continue
        found += read_at(reading, len(found), min(ready, piece))
    return found


def at_once(number, function):
    """Call a function in several threads at once and return the results."""
    barrier = threading.Barrier(number)
    results = []

    def call():
        barrier.wait(LIMIT)
        try:
            results.append(function())
        except Exception as e:
            results.append(e)

    threads = [threading.Thread(target=call) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return results


# -- reading ------------------------------------------------------------------

@pytest.mark.usefixtures('small')
@pytest.mark.parametrize('content, length', [
    (bytes, 0), (bytes, 5_000_000), (noise, 1), (noise, BLOCK),
    (noise, 64 << 10), (noise, (64 << 10) + 1), (mixture, 5_000_001)])
def test_in_order(hosts, content, length):
    data = content(length)
    expected = hosts.put(data)
    with contextlib.closing(
            hosts.arrivals.open('one', expected, None)) as reading:
        assert reading.size == length
        assert follow(reading) == data
        hosts.ended()
        assert reading.upload_id == hosts.ours.stat('one').upload_id
        # The second time, the data comes from the local image.
        assert follow(reading) == data
    assert repositories.read_all(hosts.ours, 'one') == data
    assert hosts.arrived == [('one', expected)]
    assert hosts.begun == [
        ('one', length - hosts.theirs.stat('one').zero_bytes)]
    assert hosts.arrivals.coming() == 0
    repositories.require_clean(hosts.here)


@pytest.mark.usefixtures('small')
@pytest.mark.parametrize('seed', range(3))
def test_anywhere(hosts, seed):
    """Threads read anywhere while an image arrives of which a part is here."""
    data = mixture(6_000_001, seed)
    repositories.put(hosts.ours, 'other', mixture(3_000_000, seed + 1)
                     + data[2_000_000:3_000_000])
    expected = hosts.put(data)
    hosts.relay.left = 100_000
    reading = hosts.arrivals.open('one', expected, None, held_back=False)
    rng = random.Random(seed)

    def read_some():
        for _ in range(60):
            offset = rng.randrange(len(data) + 1000)
            length = rng.choice([1, 512, BLOCK, 50_000, 300_000])
            hosts.relay.allow(rng.randrange(400_000))
            hosts.relay.allow(None)
            assert read_at(reading, offset, length) == (
                data[offset:offset + length])

    assert at_once(4, read_some) == [None] * 4
    assert follow(reading) == data
    reading.close()
    hosts.ended()       # the last bytes can be read before the commit
    assert repositories.read_all(hosts.ours, 'one') == data
    repositories.require_clean(hosts.here)


def test_one_pull_for_all(hosts):
    data = noise(6 * MIB)
    expected = hosts.put(data)

    def read():
        reading = hosts.arrivals.open('one', expected, None)
        with contextlib.closing(reading):
            return hashlib.sha512(follow(reading)).hexdigest()

    assert set(at_once(8, read)) == {expected.hash_value}
    hosts.ended()
    assert hosts.relay.requests['recipe'] == 1
    assert hosts.arrivals.status()['pulls'] == 1
    received = hosts.arrivals.status()['received_bytes']
    assert len(data) < received < 1.02 * len(data)
    # The client requested each of the three lots once.
    assert hosts.relay.requests['blocks'] == 3


def test_what_is_here_is_not_asked_for(hosts):
    data = noise(8 * MIB)
    repositories.put(hosts.ours, 'other', data[:6 * MIB] + noise(BLOCK, 9))
    expected = hosts.put(data)
    reading = hosts.arrivals.open('one', expected, None)
    assert follow(reading) == data
    reading.close()
    hosts.ended()
    status = hosts.arrivals.status()
    assert 2 * MIB < status['received_bytes'] < 2.2 * MIB
    assert status['found_bytes'] == 6 * MIB


def test_it_begins_at_once(hosts):
    """The first bytes are readable once the first lot has arrived."""
    data = noise(20 * MIB)
    expected = hosts.put(data)
    # Lots that are requested at once share the bytes that arrive.
    hosts.relay.left = 9 * MIB
    reading = hosts.arrivals.open('one', expected, None)
    repositories.eventually(lambda: reading.available(0), LIMIT)
    assert read_at(reading, 0, MIB) == data[:MIB]
    assert reading.available(0) < 10 * MIB
    status = hosts.arrivals.status()['images'][0]
    assert status['done'] < 10 * MIB and status['size'] == len(data)
    assert status['readers'] == 1
    assert 0 < hosts.arrivals.coming() < len(data)
    hosts.relay.allow(None)
    assert follow(reading) == data
    reading.close()


def test_what_was_fetched_ahead_does_not_come_again(hosts):
    data = noise(20 * MIB)
    expected = hosts.put(data)
    hosts.relay.left = 0
    reading = hosts.arrivals.open('one', expected, None)
    repositories.eventually(
        lambda: hosts.relay.requests['blocks'] == pull.LOTS, LIMIT)
    hosts.relay.allow(None)
    for offset in range(12 * MIB, 18 * MIB, MIB):
        assert read_at(reading, offset, 100_000) == (
            data[offset:offset + 100_000])
    assert follow(reading) == data
    reading.close()
    hosts.ended()
    assert hosts.arrivals.status()['received_bytes'] < 1.03 * len(data)


def test_the_pull_goes_on_without_readers(hosts):
    data = noise(10 * MIB)
    expected = hosts.put(data)
    hosts.relay.left = MIB
    hosts.arrivals.open('one', expected, None).close()
    hosts.relay.allow(None)
    hosts.ended()
    assert repositories.read_all(hosts.ours, 'one') == data
    assert hosts.arrivals.open('one', expected, None).available(0) == len(data)
    assert hosts.arrivals.status()['pulls'] == 1


def test_who_reads_keeps_the_image(hosts):
    """An open reading keeps an image that is deleted meanwhile (I12)."""
    data = noise(5 * MIB)
    expected = hosts.put(data)
    reading = hosts.arrivals.open('one', expected, None)
    hosts.ended()
    hosts.ours.delete('one')
    assert follow(reading) == data
    reading.close()
    reading.close()


@pytest.mark.usefixtures('small')
def test_the_scope_is_that_of_the_peer(hosts):
    data = noise(MIB)
    repositories.put(hosts.ours, 'global', data)
    expected = hosts.put(data, project='p', scope='project')
    with contextlib.closing(
            hosts.arrivals.open('one', expected, None)) as reading:
        assert follow(reading) == data
    hosts.ended()
    assert hosts.ours.stat('one').scope == hosts.theirs.stat('one').scope
    assert hosts.arrivals.status()['received_bytes'] > len(data)


def test_parameters_that_differ(tmp_path):
    """With another block size, an image is readable only once it is here."""
    data = mixture(5_000_001)
    with serving(Hosts(tmp_path, block_size=8192)) as hosts:
        expected = hosts.put(data)
        with pytest.raises(image_source.ArrivalFailed, match='8192'):
            hosts.arrivals.open('one', expected, None)
        hosts.ended()
        assert hosts.arrived == [('one', expected)]
        assert follow(hosts.arrivals.open('one', expected, None)) == data


# -- the identity of the image ------------------------------------------------

@pytest.mark.usefixtures('small')
@pytest.mark.parametrize('block_size', [4096, 8192])
@pytest.mark.parametrize('name', ['hash', 'md5'])
def test_another_image_is_found_out(tmp_path, block_size, name):
    """A peer's wrong image is rejected although all its blocks are right."""
    data, other = noise(3 * MIB), noise(3 * MIB, 2)
    with serving(Hosts(tmp_path, block_size=block_size)) as hosts:
        hosts.put(other, known=hashes_of(data))     # damaged on that host
        expected = arriving_image.Expected(
            len(data), **(
                {'md5': hashlib.md5(data).hexdigest()} if name == 'md5' else {
                    'hash_name': 'sha512',
                    'hash_value': hashlib.sha512(data).hexdigest()}))
        if block_size == 4096:
            reading = hosts.arrivals.open('one', expected, None)
            last = len(data) - arriving_image.LAST_BYTES
            with pytest.raises(image_source.ArrivalFailed,
                               match="by Glance's record"):
                read_at(reading, last, 1)
            # A client that has read so far does not have a whole image.
            assert reading.available(0) == last
            with pytest.raises(image_source.ArrivalFailed):
                follow(reading)
            reading.close()
        else:
            with pytest.raises(image_source.ArrivalFailed):
                hosts.arrivals.open('one', expected, None)
            hosts.ended()
        hosts.require_nothing_of('one')
        assert not hosts.arrived
        assert "Glance's record" in (
            hosts.arrivals.status()['last_failure']['message'])


@pytest.mark.usefixtures('small')
def test_the_last_piece_is_held_back(hosts, monkeypatch):
    """A reading gets the last piece only after the commit.

    A reading that is not held back gets it earlier.
    """
    data = noise(2 * MIB)
    expected = hosts.put(data)
    hosts.relay.left = MIB
    reading = hosts.arrivals.open('one', expected, None)
    bold = hosts.arrivals.open('one', expected, None, held_back=False)
    end = len(data) - 1000
    results = []
    waiting = threading.Thread(
        target=lambda: results.append(read_at(reading, end, 2000)))
    waiting.start()
    got = []
    asking = threading.Thread(
        target=lambda: got.append(read_at(bold, end, 2000)))
    asking.start()
    repositories.eventually(
        lambda: hosts.relay.requests['blocks'] > pull.LOTS, LIMIT)
    # The reading that is held back waits for the commit.
    arrival, ready = hosts.arrivals._arrivals['one'].result(), (
        threading.Event())
    monkeypatch.setattr(
        arrival, '_commit',
        lambda commit=arrival._commit: (ready.wait(LIMIT), commit()))
    hosts.relay.allow(None)
    asking.join(LIMIT)
    assert got == [data[end:]]
    repositories.eventually(
        lambda: reading.available(0) == len(data)
        - arriving_image.LAST_BYTES, LIMIT)
    repositories.eventually(
        lambda: bold.available(0) == len(data), LIMIT)
    assert not results
    ready.set()
    waiting.join(LIMIT)
    assert results == [data[end:]]
    reading.close()
    bold.close()


def test_another_size(hosts):
    hosts.put(noise(MIB))
    with pytest.raises(image_source.ArrivalFailed, match='1048575'):
        hosts.arrivals.open('one', arriving_image.Expected(MIB - 1), None)
    hosts.require_nothing_of('one')
    assert hosts.relay.requests['blocks'] == 0
    repositories.put(hosts.ours, 'one', b'here')
    with pytest.raises(image_source.ArrivalFailed, match='4 bytes here'):
        hosts.arrivals.open('one', arriving_image.Expected(MIB), None)


@pytest.mark.usefixtures('small')
def test_who_knows_the_hash_comes_later(hosts):
    data = noise(2 * MIB)
    hosts.put(data, known={'md5': '0' * 32})
    wrong = arriving_image.Expected(len(data), md5='0' * 32)
    hosts.relay.left = MIB
    first = hosts.arrivals.open('one', None, None)
    repositories.eventually(lambda: first.available(0), LIMIT)
    second = hosts.arrivals.open('one', wrong, None)
    hosts.relay.allow(None)
    with pytest.raises(image_source.ArrivalFailed, match='0' * 32):
        follow(second)
    first.close()
    second.close()
    hosts.require_nothing_of('one')


@pytest.mark.parametrize('expected', [
    None, arriving_image.Expected(MIB),
    arriving_image.Expected(MIB, hash_name='none', hash_value='0'),
    arriving_image.Expected(MIB, hash_name='shake_128', hash_value='0')])
def test_a_hash_that_is_not_known(hosts, expected):
    hosts.put(noise(MIB))
    reading = hosts.arrivals.open('one', expected, None)
    assert follow(reading) == noise(MIB)
    reading.close()
    assert hosts.arrived == [('one', expected)]


@pytest.mark.parametrize('known, expected', [
    ({}, 'none'), ({}, 'sha512'), ({'md5': '0' * 32}, 'sha512')])
def test_nothing_is_read_early_of_bytes_that_nobody_hashed(hosts, known,
                                                           expected):
    """A client reads bytes without a verified hash only after the comparison.

    Another user may have planted them.
    """
    data = noise(MIB)
    found = hosts.put(data, known=known)
    expected = found if expected == 'sha512' else None
    for held_back in (True, False):
        hosts.relay.left = 0
        with pytest.raises(image_source.ArrivalFailed,
                           match='sha512.* image verify'):
            hosts.arrivals.open('one', expected, None, held_back=held_back)
    hosts.relay.allow(None)
    hosts.ended()
    assert hosts.arrived == [('one', expected)]
    assert follow(hosts.arrivals.open('one', expected, None)) == data


@pytest.mark.parametrize('name', ['sha512', 'md5'])
def test_another_image_is_found_out_before_it_comes(hosts, name):
    """The hash that the peer has recorded exposes the wrong image."""
    hosts.put(noise(MIB, 2))
    value = hashes_of(noise(MIB))[name]
    expected = arriving_image.Expected(MIB, **(
        {'md5': value} if name == 'md5' else {
            'hash_name': name, 'hash_value': value}))
    with pytest.raises(arriving_image.WrongImage, match=value):
        hosts.arrivals.open('one', expected, None)
    assert not hosts.relay.requests['blocks']
    hosts.require_nothing_of('one')


def test_a_client_for_whose_hash_nobody_compared_it(hosts):
    """A client whose hash is unproven does not get the image early.

    A client without a hash does.
    """
    data = noise(MIB)
    found = hosts.put(data, known={'md5': hashes_of(data)['md5']})
    hosts.relay.left = 0
    first = hosts.arrivals.open('one', None, None)
    with pytest.raises(image_source.ArrivalFailed, match='image verify'):
        hosts.arrivals.open('one', found, None)
    with pytest.raises(arriving_image.WrongImage):
        hosts.arrivals.open(
            'one', arriving_image.Expected(MIB, md5='0' * 32), None)
    hosts.relay.allow(None)
    assert follow(first) == data
    first.close()


# -- failures -----------------------------------------------------------------

def spoil(frame):
    plain = bytearray(frame.plain)
    plain[-1] ^= 1
    return wire.Frame(bytes(plain), frame.places)


@pytest.mark.usefixtures('small')
@pytest.mark.parametrize('change, places', [
    (lambda frames: [*frames[:-1], spoil(frames[-1])], (0, MIB)),
    (lambda frames: frames[:-1], (0, MIB)),
    # These blocks are right, and the extra frame is noticed late.
    (lambda frames: [*frames, frames[-1]], ())],
    ids=['spoilt', 'left out', 'twice'])
def test_wrong_blocks(hosts, monkeypatch, change, places):
    """The cache refuses wrong blocks, and no byte of them is readable."""
    data = noise(2 * MIB)
    expected = hosts.put(data)
    blocks = daemon_client.Client.blocks
    with monkeypatch.context() as patch:
        patch.setattr(daemon_client.Client, 'blocks',
                      lambda *args: change(list(blocks(*args))))
        reading = hosts.arrivals.open('one', expected, None)
        for offset in (*places, len(data) - 2 * BLOCK):
            with pytest.raises(image_source.ArrivalFailed) as caught:
                read_at(reading, offset, 2 * BLOCK)
            assert hosts.relay.address in str(caught.value)
        reading.close()
    hosts.require_nothing_of('one')
    assert follow(hosts.arrivals.open('one', expected, None)) == data


def test_a_newer_peer(hosts):
    expected = hosts.put(noise(MIB))
    hosts.relay.change = lambda data: data.replace(
        b'GDWIRE\0' + bytes([2]), b'GDWIRE\0' + bytes([3]))
    with pytest.raises(client_errors.BadAnswer, match='has version 3'):
        hosts.arrivals.open('one', expected, None)
    hosts.require_nothing_of('one')
    hosts.relay.change = lambda data: data
    assert follow(hosts.arrivals.open('one', expected, None)) == noise(MIB)


def test_a_description_longer_than_the_image(hosts, monkeypatch):
    monkeypatch.setattr(wire.RecipeHeader, 'most_blocks', 10)
    hosts.put(noise(MIB + 1000))
    reading = hosts.arrivals.open('one', None, None)
    with pytest.raises(image_source.ArrivalFailed, match='more blocks'):
        read_at(reading, 0, 1)
    reading.close()
    hosts.require_nothing_of('one')


def test_a_description_that_finds_no_room(hosts, monkeypatch):
    monkeypatch.setattr(wire.RecipeHeader, 'most_bytes', 1 << 60)
    hosts.put(noise(MIB))
    with pytest.raises(client_errors.BadAnswer, match='of which half'):
        hosts.arrivals.open('one', None, None)
    hosts.require_nothing_of('one')


@pytest.mark.usefixtures('small')
def test_the_peer_dies(hosts, monkeypatch):
    """Bytes that arrived stay readable; the next pull gets only the rest."""
    monkeypatch.setattr(arrival_list, 'AWAY_SECONDS', 3600.0)
    data = noise(6 * MIB)
    expected = hosts.put(data)
    hosts.relay.left = 4 * MIB
    reading = hosts.arrivals.open('one', expected, None)
    repositories.eventually(lambda: reading.available(0) > 3 * MIB, LIMIT)
    hosts.daemon.kill()
    hosts.relay.allow(None)
    with pytest.raises(image_source.ArrivalFailed, match='does not arrive'):
        read_at(reading, len(data) - 1, 1)
    with pytest.raises(image_source.ArrivalFailed):
        read_at(reading, 5 * MIB, 1)
    have = reading.available(0)
    assert read_at(reading, 0, have) == data[:have]
    with pytest.raises(image_source.ArrivalFailed):
        reading.available(have)
    reading.close()
    hosts.require_nothing_of('one')
    # For a while the cache does not contact the peer, and clients do not wait.
    requests = hosts.relay.requests.total()
    hosts.daemon.start()
    with pytest.raises(image_source.ArrivalFailed, match='requests again in'):
        hosts.arrivals.open('one', expected, None)
    assert hosts.relay.requests.total() == requests
    hosts.arrivals._away = 0.0, ''
    before = hosts.arrivals.status()['received_bytes']
    reading = hosts.arrivals.open('one', expected, None)
    assert follow(reading) == data
    reading.close()
    hosts.ended()
    received = hosts.arrivals.status()['received_bytes'] - before
    assert received < len(data) - have + MIB // 2
    repositories.require_clean(hosts.here)


def test_a_peer_that_is_away(hosts, tmp_path, monkeypatch):
    monkeypatch.setattr(arrival_list, 'AWAY_SECONDS', 3600.0)
    asked = []

    def connect(token):
        asked.append(token)
        return daemon_client.Client(f'unix:{tmp_path}/nobody')

    arrivals = arrival_list.Arrivals(hosts.ours, connect)
    with pytest.raises(client_errors.DaemonUnavailable):
        arrivals.open('one', None, None)
    for image_id in ('one', 'two'):
        with pytest.raises(image_source.ArrivalFailed, match='nobody'):
            arrivals.open(image_id, None, None)
    assert len(asked) == 1
    repositories.put(hosts.ours, 'two', b'two')
    assert arrivals.open('two', None, None).available(0) == 3


def test_it_is_not_there(hosts):
    for error in at_once(3, lambda: hosts.arrivals.open('one', None, None)):
        assert isinstance(error, client_errors.Refused)
        assert error.code == 404
    hosts.require_nothing_of('one')


def test_a_client_that_cannot_be_made(hosts):
    with pytest.raises(image_source.ArrivalFailed, match='printable'):
        hosts.arrivals.open('one', None, 'a\nb')
    hosts.require_nothing_of('one')


@pytest.mark.usefixtures('small')
def test_a_token_that_expires(hosts):
    """If a token expires, the pull goes on with another client's token."""
    data = noise(4 * MIB)
    expected = hosts.put(data)
    hosts.relay.left = MIB
    first = hosts.arrivals.open('one', expected, 'old')
    second = hosts.arrivals.open('one', expected, 'new')
    repositories.eventually(lambda: first.available(0), LIMIT)
    hosts.relay.refused.add('old')
    hosts.relay.allow(None)
    assert follow(first) == follow(second) == data
    assert hosts.relay.requests['refused'] > 0
    first.close()
    second.close()


@pytest.mark.usefixtures('small')
def test_all_tokens_expire(hosts):
    data = noise(4 * MIB)
    expected = hosts.put(data)
    hosts.relay.left = MIB
    first = hosts.arrivals.open('one', expected, 'old')
    second = hosts.arrivals.open('one', expected, 'older')
    repositories.eventually(lambda: first.available(0), LIMIT)
    hosts.relay.refused |= {'old', 'older'}
    hosts.relay.allow(None)
    for reading in (first, second):
        with pytest.raises(image_source.ArrivalFailed, match='401') as e:
            follow(reading)
        assert 'old' not in str(e.value).replace('older', '')
        reading.close()
    hosts.require_nothing_of('one')
    third = hosts.arrivals.open('one', expected, 'new')
    assert follow(third) == data
    third.close()


def test_a_bad_token_does_not_hinder_others(hosts):
    data = noise(MIB)
    expected = hosts.put(data)
    hosts.relay.refused.add('bad')
    tokens = ['bad', 'good', 'bad', 'good', 'bad', 'good']

    def read():
        token = tokens.pop()
        reading = hosts.arrivals.open('one', expected, token)
        with contextlib.closing(reading):
            assert follow(reading) == data
            return token

    results = at_once(6, read)
    assert results.count('good') == 3
    for result in results:
        assert result in ('good', 'bad') or result.code == 401


@pytest.mark.parametrize('size,known', [
    (MIB, False), (2 * MIB, False), (2 * MIB, True)])
def test_another_upload_commits_first(hosts, size, known):
    """The image of another upload is read only if no hash is expected."""
    data = noise(2 * MIB)
    expected = hosts.put(data) if known else hosts.put(data) and None
    hosts.relay.left = 100_000
    reading = hosts.arrivals.open('one', expected, None)
    repositories.put(hosts.ours, 'one', data[:size])
    upload = hosts.ours.stat('one').upload_id
    hosts.relay.allow(None)
    if size == len(data) and not known:
        assert follow(reading) == data
        hosts.ended()
    else:
        with pytest.raises(image_source.ArrivalFailed, match='exists'):
            follow(reading)
    reading.close()
    assert hosts.ours.stat('one').upload_id == upload


def test_only_some_arrive_at_once(hosts, monkeypatch):
    hosts.relay.left = 0
    names = [f'image-{number}' for number in range(arrival_list.PULLS + 1)]
    for name in names:
        hosts.put(noise(100_000, len(name)), name)
    opened = [hosts.arrivals.open(name, None, None) for name in names[:-1]]
    with monkeypatch.context() as patch:
        patch.setattr(arrival_list, 'BUSY_SECONDS', 0.1)
        with pytest.raises(image_source.ArrivalFailed, match='others are on'):
            hosts.arrivals.open(names[-1], None, None)
    hosts.relay.allow(None)
    for reading in opened:
        follow(reading)
        reading.close()
    hosts.ended()
    reading = hosts.arrivals.open(names[-1], None, None)
    follow(reading)
    reading.close()
    assert sorted(hosts.ours.images()) == sorted(names)


@pytest.mark.usefixtures('small')
def test_stop_keeps_what_came(hosts):
    data = noise(4 * MIB)
    expected = hosts.put(data)
    hosts.relay.left = 3 * MIB
    reading = hosts.arrivals.open('one', expected, None)
    repositories.eventually(lambda: reading.available(0) > 2 * MIB, LIMIT)
    hosts.arrivals.stop(LIMIT)
    assert not hosts.arrivals._arrivals
    with pytest.raises(image_source.ArrivalFailed):
        follow(reading)
    reading.close()
    hosts.require_nothing_of('one')
    with pytest.raises(image_source.ArrivalFailed, match='stopping'):
        hosts.arrivals.open('one', expected, None)
    hosts.relay.allow(None)
    hosts.arrivals = arrival_list.Arrivals(hosts.ours, hosts.relay.connect)
    reading = hosts.arrivals.open('one', expected, None)
    assert follow(reading) == data
    reading.close()
    hosts.ended()
    assert hosts.arrivals.status()['received_bytes'] < 2.2 * MIB


def test_the_disk_is_full(hosts, tmp_path, monkeypatch):
    """Blocks that arrived are readable on a full disk, and the rest fails."""
    monkeypatch.setattr(pull, 'SYNC_BYTES', MIB)
    data = noise(16 * MIB)
    expected = hosts.put(data)
    with repositories.small_disk(tmp_path / 'disk', 8 << 20) as disk:
        path = repositories.create(disk / 'here')
        with repositories.open_repository(path) as repository:
            arrivals = arrival_list.Arrivals(
                repository, hosts.relay.connect)
            reading = arrivals.open('one', expected, None)
            with pytest.raises(image_source.ArrivalFailed, match='no room'):
                read_at(reading, 15 * MIB, MIB)
            have = reading.available(0)
            assert have >= 2 * MIB
            assert read_at(reading, 0, have) == data[:have]
            reading.close()
            assert 'one' not in repository.images()
            assert not repositories.spool(path)


def test_damage_here(hosts):
    """A damaged local block is never returned as data."""
    data = noise(100 * BLOCK)
    expected = hosts.put(data)
    repositories.put(hosts.ours, 'other', data[:50 * BLOCK])
    group = repositories.Group(hosts.here, 1)
    group.data[group.data_start() + 5000] ^= 1
    group.save()
    reading = hosts.arrivals.open('one', expected, None)
    with pytest.raises((image_source.ArrivalFailed,
                        exceptions.DamagedError), match='groups/'):
        follow(reading)
    reading.close()
    hosts.require_nothing_of('one')


KILLED = '''
    import os, sys, threading
    from dedupd.compute.cache import arrival_list
    from glance_dedup.client import daemon_client as client
    from glance_dedup.repository import image_repository
    from glance_dedup.transfer import image_assembly
    from glance_dedup.transfer import pull
    path, filters, address, size = sys.argv[1:]
    image_assembly.READ_LOT_BYTES, pull.SYNC_BYTES = 64 << 10, 256 << 10
    images = arrival_list.Arrivals(
        image_repository.Repository(path, filter_dir=filters, filter_mib=1),
        lambda token: client.Client(address))
    reading = images.open('one', None, None)
    rung = threading.Event()
    reading.on_more(rung.set)
    while reading.available(0) < int(size):
        rung.clear()
        if reading.available(0) < int(size):
            rung.wait(60)
    os.kill(os.getpid(), 9)
'''


@pytest.mark.usefixtures('small')
def test_kill_and_again(hosts):
    """After a kill, the next pull reuses the blocks before the sync point."""
    data = noise(6 * MIB)
    expected = hosts.put(data)
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(KILLED), str(hosts.here),
         f'{hosts.here}-filter', hosts.relay.address, str(4 * MIB)],
        timeout=LIMIT, cwd=daemons.ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    reading = hosts.arrivals.open('one', expected, None)
    assert follow(reading) == data
    reading.close()
    hosts.ended()
    assert hosts.arrivals.status()['received_bytes'] < 2.8 * MIB
    repositories.require_clean(hosts.here)


# -- costs --------------------------------------------------------------------

def test_memory_is_bounded(hosts, monkeypatch):
    """The memory depends neither on the image's size nor on the reads."""
    monkeypatch.setattr(image_assembly, 'READ_LOT_BYTES', 256 << 10)
    monkeypatch.setattr(pull, 'SYNC_BYTES', MIB)
    monkeypatch.setattr(image_pull, 'AHEAD_BYTES', 512 << 10)
    most = collections.Counter()

    def measure(self):
        with self._changed:
            kept = {'recent': sum(map(len, self._recent.values())),
                    'ahead': sum(map(len, self._ahead.values())),
                    # Fetching threads continue to add to these.
                    'lots': sum(len(block) for lot in self._under_way
                                for block in [*lot.received.values()])}
        for name, size in kept.items():
            most[name] = max(most[name], size)

    def measured(name):
        function = getattr(image_pull.ImagePull, name)

        def call(self, *args):
            result = function(self, *args)
            measure(self)
            return result
        monkeypatch.setattr(image_pull.ImagePull, name, call)

    for name in ('_store', 'fetch', '_keep_ahead', '_remember'):
        measured(name)
    data = noise(12 * MIB)
    expected = hosts.put(data)
    hosts.relay.left = 0
    reading = hosts.arrivals.open('one', expected, None)
    hosts.relay.allow(None)
    for offset in range(11 * MIB, 2 * MIB, -300_000):
        read_at(reading, offset, 100_000)
    assert follow(reading) == data
    reading.close()
    hosts.ended()
    assert MIB // 2 < most['recent'] <= MIB + (256 << 10)
    assert 0 < most['ahead'] <= 512 << 10
    assert 0 < most['lots'] <= pull.LOTS * (256 << 10)


def test_nothing_is_left_open(hosts):
    data = noise(MIB)
    hosts.put(data)
    clients = []

    def connect(token):
        clients.append(hosts.relay.connect(token))
        return clients[-1]

    def open_files():
        """Return the open files of an image's recipe or description."""
        found = []
        for name in os.listdir('/proc/self/fd'):
            with contextlib.suppress(OSError):
                target = os.readlink(f'/proc/self/fd/{name}')
                if target.endswith('(deleted)') or (
                        target.startswith((f'{hosts.here}/spool/',
                                           f'{hosts.here}/images/'))):
                    found.append(target)
        return sorted(found)

    hosts.arrivals = arrival_list.Arrivals(hosts.ours, connect)
    before = open_files()
    reading = hosts.arrivals.open('one', None, None)
    assert open_files() != before
    assert follow(reading) == data
    reading.close()
    hosts.ended()
    for _ in range(3):
        with pytest.raises(client_errors.Refused):
            hosts.arrivals.open('none', None, None)
    repositories.eventually(lambda: open_files() == before, LIMIT)
    assert not any(client._kept or client._busy for client in clients)
