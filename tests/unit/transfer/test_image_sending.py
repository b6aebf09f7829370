# SPDX-License-Identifier: Apache-2.0

"""Images are sent to another repository, which a real daemon serves."""

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from dedupd.serve import replica_receiver
from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.base import locations
from glance_dedup.base import pacing
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import replica_upload
from glance_dedup.client import wire
from glance_dedup.transfer import image_sending
from tests.support import daemons
from tests.support import repositories
from tests.unit.transfer import test_pull

BLOCK = 4096
noise = repositories.noise
mixture = repositories.mixture

#: Bytes of a request besides its body, and the minimum for each image.
HEADS = 1000


@pytest.fixture
def home(tmp_path):
    site = test_pull.Site(tmp_path / 'home')
    yield site
    site.repo.close()
    shutil.rmtree(tmp_path / 'home-filter', ignore_errors=True)


@pytest.fixture
def away(tmp_path):
    site = test_pull.Site(tmp_path / 'away')
    yield site
    site.repo.close()
    shutil.rmtree(tmp_path / 'away-filter', ignore_errors=True)


@pytest.fixture
def daemon(away):
    with daemons.running(away.path) as daemon:
        yield daemon


@pytest.fixture
def client(daemon):
    with daemon.client() as client:
        yield client


def limit_lots(monkeypatch, blocks):
    """Make the receiver request lots of this size."""
    begin = daemon_client.Client.begin_replica

    def begin_replica(*args):
        replica = begin(*args)
        replica.lot_blocks = blocks
        return replica

    monkeypatch.setattr(daemon_client.Client, 'begin_replica', begin_replica)


@pytest.fixture
def small_lots(monkeypatch):
    limit_lots(monkeypatch, 16)


@pytest.fixture
def soon(monkeypatch):
    """Make attempts follow each other quickly."""
    monkeypatch.setattr(image_sending, 'PAUSES', (0.05, 0.1, 0.1))
    monkeypatch.setattr(image_sending, 'BUSY_SECONDS', 0.0)


def program(**constants):
    """Return a daemon program with other constants of its receiver."""
    return ['-c', 'from dedupd import daemon; import sys; '
            'from dedupd.serve import replica_receiver; '
            f'vars(replica_receiver).update({constants}); '
            'sys.exit(daemon.main())']


class Pace(pacing.Pace):
    """A pace that calls a function after each step."""

    def __init__(self, then):
        super().__init__()
        self.then = then
        self.sent = 0

    def step(self, done, total, what, cost=0):
        super().step(done, total, what)
        self.sent += cost
        self.then(self)


def once(condition, function):
    """Call a function when a condition is first true of a pace."""
    called = []

    def then(pace):
        if not called and condition(pace):
            called.append(1)
            function()

    return Pace(then)


def half(pace):
    return pace.done > pace.total // 2


def require_nothing_in_flight(site):
    """Require that the spool has no unfinished upload, new or old."""
    repositories.eventually(lambda: not [
        name for name in repositories.spool(site.path)
        if (site.path / 'spool' / name).stat().st_nlink < 2])


# -- results of a transfer, and its size --------------------------------------

LENGTHS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK, 5000000)


def test_send(home, away, client):
    for number, (content, length) in enumerate(itertools.product(
            (mixture, noise, bytes), LENGTHS)):
        image_id, data = f'image-{number}', content(length)
        home.put(image_id, data, project='p')
        # The receiver gets the known hash of the image.
        known = hashlib.sha256(data).hexdigest()
        if number % 2:
            hashes.record(home.repo.path, home.repo.stat(image_id),
                          hashes.Hash('sha256', known))
        steps = []
        sent = image_sending.send(home.repo, image_id, client, pace=Pace(
            lambda pace: steps.append((pace.done, pace.total))))
        assert away.read(image_id) == data
        stat, there = home.repo.stat(image_id), away.repo.stat(image_id)
        assert (there.size, there.zero_bytes, there.project, there.scope) == (
            length, stat.zero_bytes, 'p', stat.scope)
        # A transaction's id is never used again, even at another site.
        assert sent.upload_id == there.upload_id != stat.upload_id
        assert sent.location == locations.url(
            away.repo, image_id, sent.upload_id)
        assert (sent.size, sent.whole, sent.exists) == (length, None, False)
        assert (there.hash_name, there.hash_value) == (
            ('sha256', known) if number % 2 else
            ('sha512', hashlib.sha512(data).hexdigest()))
        assert hashes.recorded(away.repo.path, there)['sha512'] == (
            hashlib.sha512(data).hexdigest())
        assert steps == sorted(steps)
        if length:
            assert steps[-1] == (length, length)
    repositories.require_clean(away.path)


def test_only_what_is_missing_goes(home, away, client):
    data = noise(400 * BLOCK)
    home.put('one', data)
    # The other site has the middle in another image, at another offset.
    away.put('other', noise(77 * BLOCK, 2) + data[100 * BLOCK:350 * BLOCK])
    sent = image_sending.send(home.repo, 'one', client)
    assert (sent.found_blocks, sent.sent_blocks) == (250, 150)
    least = 150 * BLOCK + 400 * 36
    assert least < sent.sent_bytes < least * 1.03 + HEADS
    assert away.read('one') == data
    # Send a similar image; it has blocks of the first.
    home.put('two', data[:300 * BLOCK] + noise(10 * BLOCK, 3))
    sent = image_sending.send(home.repo, 'two', client)
    assert (sent.found_blocks, sent.sent_blocks) == (300, 10)
    least = 10 * BLOCK + 310 * 36
    assert least < sent.sent_bytes < least * 1.05 + 2 * HEADS
    # The image was deleted there: only its description is sent again.
    away.repo.delete('one')
    sent = image_sending.send(home.repo, 'one', client)
    assert (sent.found_blocks, sent.sent_blocks) == (400, 0)
    assert sent.sent_bytes < 400 * 36 + HEADS
    assert away.read('one') == data


@pytest.mark.usefixtures('small_lots')
def test_a_block_goes_once(home, away, client):
    """Each block is sent once, however often the image names it."""
    some = [noise(BLOCK, seed) for seed in range(40)]
    order = [0] * 20 + list(range(40)) + [5, 39, 0, 7] * 30 + [0] * 20
    data = b''.join(some[number] for number in order) + some[3][:100]
    home.put('one', data)
    sent = image_sending.send(home.repo, 'one', client)
    assert away.read('one') == data
    assert (sent.found_blocks, sent.sent_blocks) == (len(order) - 40, 41)


@pytest.mark.usefixtures('small_lots')
@pytest.mark.parametrize('seed', range(2))
def test_any_mixture(home, away, client, seed):
    home.put('one', mixture(2_000_000 + seed, seed))
    away.put('other', mixture(2_000_000, seed + 1))
    image_sending.send(home.repo, 'one', client)
    assert away.read('one') == mixture(2_000_000 + seed, seed)
    repositories.require_clean(away.path)


@pytest.mark.parametrize('seed', range(10))
def test_lots_are_cut_alike_from_any_on(seed):
    """Cutting again from a lot's end gives the same lots."""
    rng = random.Random(seed)
    extents, end = [], 0
    for number in range(60):
        blocks = rng.choice([0, 1, 5, 40])
        lengths = [rng.randint(1, 512) for _ in range(blocks)]
        length = sum(lengths) or rng.randint(1, 5000)
        extents.append(wire.RecipeExtent(end, length, blocks, b''.join(
            bytes(32) + n.to_bytes(4, 'little') for n in lengths)))
        end += length
    facts = {'replica': 'ab' * 16, 'whole': None, 'offset': 0,
             'lot_blocks': 16, 'lot_bytes': 8192, 'lot_zeros': 3000,
             'lots': 3}

    def cut(offset):
        most = replica_upload.Replica(None, '', end, facts)
        most.offset = offset
        return list(image_sending._lots(iter(extents), most, 512))

    lots = cut(0)
    assert (lots[0].offset, lots[-1].end) == (0, end)
    header = wire.RecipeHeader(512, end, 0, 60, 'sha256', bytes(16), 'fixed')
    for number, lot in enumerate(lots):
        assert cut(lot.offset) == lots[number:]
        assert lot.blocks <= 16
        # The receiver accepts the lots, too.
        source, at, zeros, parts = wire.Buffer(lot.extents, ValueError), (
            lot.offset), 0, 0
        while source:
            extent = wire.read_extent(source, header, at, 0.0)
            at += extent.length
            zeros += 0 if extent.blocks else extent.length
            parts += 1
        assert at == lot.end and zeros <= 3000 and parts <= 16


@pytest.mark.parametrize('parameters, word', [
    ({'block_size': 8192}, '8192'),
    ({'block_size': 512, 'segment_size': 65536}, '512'),
    ({'chunking': 'content-defined'}, '16384'),
    ({'fingerprint': 'blake2s256'}, 'blake2s256'),
    ({'verify': 'bytes'}, 'value')])
def test_all_of_it_goes(home, tmp_path, parameters, word):
    """Blocks with other parameters are sent whole, and cut again there."""
    data = mixture(5_000_001) + bytes(3_000_000) + noise(100_000) * 3
    home.put('one', data)
    away = test_pull.Site(tmp_path / 'away', **parameters)
    with daemons.running(away.path) as daemon, daemon.client() as client:
        sent = image_sending.send(home.repo, 'one', client)
        assert word in sent.whole
        assert away.read('one') == data
        # The result is the same as that of an upload there.
        stat = away.repo.stat('one')
        away.repo.delete('one')
        away.put('two', data)
        assert away.repo.stat('two').zero_bytes == stat.zero_bytes
        assert away.repo.stat('two').new_bytes < 10000
        # A second sending finds the image.
        image_sending.send(home.repo, 'one', client)
        assert image_sending.send(home.repo, 'one', client).exists
    repositories.require_clean(away.path)
    away.repo.close()


def test_fingerprints_that_are_not_cryptographic(tmp_path, away, client):
    """Blocks with weak fingerprints are always sent (I5)."""
    home = test_pull.Site(tmp_path / 'home', fingerprint='xxh3-128',
                          verify='bytes')
    data = noise(50 * BLOCK) * 2
    home.put('one', data)
    sent = image_sending.send(home.repo, 'one', client)
    assert sent.whole and sent.sent_blocks == 100
    assert away.read('one') == data
    # The image there is not taken for the same one.
    with pytest.raises(client_errors.Refused) as caught:
        image_sending.send(home.repo, 'one', client)
    assert caught.value.code == 409
    assert 'cannot be proven to be' in str(caught.value)
    home.repo.close()


def test_the_scope_goes_with_it(home, away, client):
    """An image keeps its scope, and finds no other project's blocks."""
    data = noise(50 * BLOCK)
    home.put('one', data, project='p', scope='project')
    home.put('two', data, project='q', scope='project')
    away.put('other', data)
    for image_id in ('one', 'two'):
        sent = image_sending.send(home.repo, image_id, client)
        assert sent.sent_blocks == 50
        assert (away.repo.stat(image_id).scope
                == home.repo.stat(image_id).scope)
        assert away.read(image_id) == data
    home.put('three', data, project='p', scope='project')
    assert image_sending.send(home.repo, 'three', client).sent_blocks == 0


def test_it_is_there_already(home, away, client):
    """An image that was sent before is found equal, and not changed."""
    data = mixture(3_000_001)
    home.put('one', data)
    first = image_sending.send(home.repo, 'one', client)
    again = image_sending.send(home.repo, 'one', client)
    assert again.exists and not first.exists
    assert again.location is None
    assert again.upload_id == first.upload_id
    # The location is known to the sender that stored it.
    again = image_sending.send(home.repo, 'one', client,
                               location=first.location)
    assert again.location == first.location
    away.repo.delete('one')
    away.put('one', data)
    again = image_sending.send(home.repo, 'one', client,
                               location=first.location)
    assert again.exists and again.location is None
    away.repo.delete('one')
    first = image_sending.send(home.repo, 'one', client)
    assert again.sent_blocks == 0
    assert away.repo.stat('one').upload_id == first.upload_id


@pytest.mark.parametrize('change', ['length', 'block', 'zeros', 'last'])
def test_another_is_there(home, away, client, change):
    """Another image of this id stays unchanged."""
    data = noise(50 * BLOCK) + bytes(20 * BLOCK) + noise(100)
    other = bytearray(data)
    if change == 'length':
        other += b'x'
    else:
        other[{'block': 20 * BLOCK + 1, 'zeros': 60 * BLOCK,
               'last': len(data) - 1}[change]] ^= 1
    home.put('one', data)
    away.put('one', bytes(other))
    with pytest.raises(client_errors.Refused) as caught:
        image_sending.send(home.repo, 'one', client)
    assert caught.value.code == 409
    assert 'another image of this id' in str(caught.value)
    assert away.read('one') == bytes(other)


# -- progress, and interruptions ----------------------------------------------

def test_bytes_are_told_before_they_go(home, client):
    home.put('one', noise(100 * BLOCK))
    pace = Pace(lambda pace: None)
    sent = image_sending.send(home.repo, 'one', client, pace=pace)
    assert 100 * BLOCK < pace.sent < sent.sent_bytes < pace.sent + 6000


@pytest.mark.usefixtures('small_lots')
def test_it_is_stopped(home, away, client):
    """A stopped transfer does not wait for the receiver; it can resume."""
    data = noise(600 * BLOCK)
    home.put('one', data)
    pace = once(half, lambda: pace.stop())
    with pytest.raises(pacing.Stopped):
        image_sending.send(home.repo, 'one', client, pace=pace)
    assert not client._busy
    away.require_nothing_of('one')
    require_nothing_in_flight(away)
    sent = image_sending.send(home.repo, 'one', client)
    assert sent.found_blocks > 250
    assert away.read('one') == data


def test_it_is_not_confirmed(home, away, client):
    class Deleted(Exception):
        pass

    def confirm(location):
        assert not away.repo.images()
        raise Deleted()

    home.put('one', noise(10 * BLOCK))
    with pytest.raises(Deleted):
        image_sending.send(home.repo, 'one', client, confirm=confirm)
    away.require_nothing_of('one')
    require_nothing_in_flight(away)
    assert image_sending.send(home.repo, 'one', client).sent_blocks == 0


@pytest.mark.usefixtures('small_lots')
def test_it_is_deleted_here_meanwhile(home, away, client):
    """An image that is deleted during its transfer is still sent (I12)."""
    data = noise(600 * BLOCK)
    home.put('one', data)
    image_sending.send(home.repo, 'one', client, pace=once(
        half, lambda: home.repo.delete('one')))
    assert away.read('one') == data
    with pytest.raises(exceptions.ImageNotFound):
        image_sending.send(home.repo, 'one', client)


def test_damage_here(home, away, client):
    """Damage at the sender names the image, and stores nothing there."""
    home.put('one', noise(3000 * BLOCK))
    group = repositories.Group(home.path, 1)
    group.data[-100:] = bytes(100)
    group.save()
    with pytest.raises(exceptions.DamagedError) as caught:
        image_sending.send(home.repo, 'one', client)
    assert 'image one is not sent: ' in str(caught.value)
    assert 'groups/00000001' in str(caught.value)
    away.require_nothing_of('one')
    require_nothing_in_flight(away)


# -- the other side fails -----------------------------------------------------

def test_nobody_is_there(home, tmp_path):
    home.put('one', b'data')
    with daemon_client.Client(f'unix:{tmp_path}/none') as client:
        began = time.monotonic()
        with pytest.raises(client_errors.DaemonUnavailable):
            image_sending.send(home.repo, 'one', client)
    # The sender does not retry if the receiver was never reachable.
    assert time.monotonic() - began < 5


def test_an_older_daemon(home, tmp_path):
    home.put('one', b'data')
    body = (b'{"error": {"code": 404, "title": "Not Found", '
            b'"message": "There is nothing here."}}')
    with daemons.scripted(
            tmp_path / 's', lambda connection, request: connection.sendall(
                daemons.answer(body, 404))):
        with daemon_client.Client(f'unix:{tmp_path}/s') as client:
            with pytest.raises(client_errors.Refused) as caught:
                image_sending.send(home.repo, 'one', client)
    assert 'Update it' in str(caught.value)


GOOD = {'replica': 'ab' * 16, 'offset': 0, 'exists': False, 'whole': None,
        'lot_blocks': 16, 'lot_bytes': 65536, 'lot_zeros': 1 << 20, 'lots': 3}


@pytest.mark.parametrize('first, second', [
    ({**GOOD, 'replica': 7}, None), ({**GOOD, 'offset': -1}, None),
    ({**GOOD, 'offset': 409601}, None), ({**GOOD, 'lots': 1}, None),
    ({**GOOD, 'lot_blocks': 0}, None), ({**GOOD, 'lot_bytes': 1 << 63}, None),
    ({**GOOD, 'lot_zeros': '5'}, None), ({**GOOD, 'whole': []}, None),
    ([], None),
    (GOOD, {}), (GOOD, {'ranges': 5}), (GOOD, {'ranges': [[0]]}),
    (GOOD, {'ranges': [[-1, 4096]]}), (GOOD, {'ranges': [[0, 1 << 70]]}),
    (GOOD, {'ranges': [[0, 0]]}), (GOOD, {'ranges': [[0, 65537]]}),
    (GOOD, {'ranges': [[4096, 4096], [0, 4096]]}),
    (GOOD, {'ranges': [[0, 8192], [4096, 4096]]}),
    # The range is within a block, which the engine refuses.
    (GOOD, {'ranges': [[5, 4096]]})])
def test_a_receiver_that_lies(home, tmp_path, first, second):
    """A wrong answer ends the transfer, without a second try."""
    home.put('one', noise(100 * BLOCK))
    posted = []

    def behave(connection, request):
        while request:
            posted.append(request.split()[:2])
            if b'/v1/replicas/one?upload' in request:
                answer = first
            elif b'/lots' in request:
                answer = second
            else:
                answer = {'stored': 0}
            body = json.dumps(answer).encode()
            connection.sendall(daemons.answer(body))
            request = connection.recv(65536)

    with daemons.scripted(tmp_path / 's', behave):
        with daemon_client.Client(f'unix:{tmp_path}/s') as client:
            with pytest.raises((client_errors.BadAnswer,
                                exceptions.InvalidParameter)):
                image_sending.send(home.repo, 'one', client)
    assert not [path for _, path in posted if b'/blocks' in path]
    assert len([path for _, path in posted if b'upload' in path]) == 1


class Relay:
    """Passes connections to a Unix socket, up to a number of bytes.

    :ivar left: how many may pass to the daemon; then all are cut off
    """

    def __init__(self, path, target):
        self.left = 1 << 60
        self.cuts = 0
        self._lock = threading.Lock()
        self._target = target
        self._listener = socket.socket(
            socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._pairs = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):

        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._target)
                self._pairs.append((near, far))
                threading.Thread(target=self._copy, args=(near, far, True),
                                 daemon=True).start()
                threading.Thread(target=self._copy, args=(far, near, False),
                                 daemon=True).start()

    def _copy(self, source, target, counts):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counts and not self._pass(data):
                    break
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _pass(self, data):
        with self._lock:
            self.left -= len(data)
            if self.left < 0:
                self.cuts += 1
                self.left = 1 << 60
                for pair in self._pairs:
                    for sock in pair:
                        with contextlib.suppress(OSError):
                            sock.shutdown(socket.SHUT_RDWR)
                return False
        return True

    def close(self):
        self._listener.close()


@pytest.mark.usefixtures('small_lots', 'soon')
def test_the_connection_breaks(home, away, daemon, tmp_path):
    """After a broken connection the transfer resumes; few bytes repeat."""
    for left in (5_000, 100_000, 1_000_000, 2_300_000):
        image_id = f'image-{left}'
        data = noise(600 * BLOCK, left)
        home.put(image_id, data)
        relay = Relay(tmp_path / f'relay-{left}', daemon.socket)
        with contextlib.closing(relay), daemon_client.Client(
                f'unix:{tmp_path}/relay-{left}') as client:
            relay.left = left
            sent = image_sending.send(home.repo, image_id, client)
        assert relay.cuts == 1
        assert away.read(image_id) == data
        # Two requests, each of a lot, were under way.
        assert sent.sent_bytes < len(data) * 1.03 + 4 * 16 * BLOCK + 60000
    repositories.require_clean(away.path)


@pytest.mark.usefixtures('small_lots')
def test_the_connection_breaks_for_ever(home, away, daemon, tmp_path,
                                        monkeypatch):
    """The sender gives up after its retries; the next one continues."""
    monkeypatch.setattr(image_sending, 'PAUSES', (0.05, 0.1))
    data = noise(600 * BLOCK)
    home.put('one', data)
    relay = Relay(tmp_path / 'relay', daemon.socket)

    def cut(pace):
        if half(pace):
            relay.left = 0

    with contextlib.closing(relay), daemon_client.Client(
            f'unix:{tmp_path}/relay') as client:
        with pytest.raises(client_errors.DaemonUnavailable) as caught:
            image_sending.send(home.repo, 'one', client, pace=Pace(cut))
        assert client.address in str(caught.value)
    assert not away.repo.images()
    assert relay.cuts >= 3


@pytest.mark.usefixtures('small_lots', 'soon')
def test_the_receiver_is_killed(home, away, daemon, client):
    """The receiver is killed in the middle (kill -9), and restarted."""
    data = noise(3000 * BLOCK)
    home.put('one', data)

    def restart():
        daemon.kill()
        daemon.start()

    sent = image_sending.send(home.repo, 'one', client,
                              pace=once(half, restart))
    assert away.read('one') == data
    repositories.require_clean(away.path)
    assert sent.sent_blocks >= 3000


@pytest.mark.usefixtures('small_lots', 'soon')
def test_the_receiver_is_restarted(home, away, daemon, client):
    """A restarted receiver keeps the received data."""
    data = noise(3000 * BLOCK)
    home.put('one', data)

    def restart():
        assert daemon.stop() == 0
        daemon.start()

    sent = image_sending.send(home.repo, 'one', client,
                              pace=once(half, restart))
    assert away.read('one') == data
    assert sent.sent_bytes < len(data) * 1.05
    repositories.require_clean(away.path)


@pytest.mark.usefixtures('small_lots', 'soon')
def test_the_receiver_does_not_come_back(home, away, daemon, client):
    data = noise(600 * BLOCK)
    home.put('one', data)
    with pytest.raises(client_errors.DaemonUnavailable):
        image_sending.send(home.repo, 'one', client,
                           pace=once(half, daemon.kill))
    assert not away.repo.images()
    daemon.start()
    image_sending.send(home.repo, 'one', client)
    assert away.read('one') == data


def test_the_disk_there_is_full(home, tmp_path):
    home.put('one', noise(3000 * BLOCK))
    with repositories.small_disk(tmp_path / 'disk', 8 << 20) as disk:
        away = test_pull.Site(disk / 'away')
        with daemons.running(away.path) as daemon, daemon.client() as client:
            with pytest.raises(client_errors.Refused) as caught:
                image_sending.send(home.repo, 'one', client)
            assert caught.value.code == 507
            assert 'Make room at the receiving site' in str(caught.value)
            away.require_nothing_of('one')
            # An abandoned upload does not hold its blocks.
            require_nothing_in_flight(away)
        away.repo.close()


# -- two senders --------------------------------------------------------------

@pytest.mark.usefixtures('small_lots', 'soon')
def test_two_send_one_image(home, away, daemon, client):
    """The second sender gets an error, and the first one continues."""
    data = noise(600 * BLOCK)
    home.put('one', data)
    errors = []

    def second():
        with daemon.client() as other:
            try:
                image_sending.send(home.repo, 'one', other)
            except client_errors.Refused as e:
                errors.append(e)

    image_sending.send(home.repo, 'one', client, pace=once(half, second))
    assert away.read('one') == data
    assert errors[0].code == 503
    assert 'another sender, since 20' in str(errors[0])
    assert image_sending.send(home.repo, 'one', client).exists


SENDER = '''
import os, signal, sys
from glance_dedup.base import pacing
from glance_dedup.client import daemon_client as client
from glance_dedup.repository import image_repository
from glance_dedup.transfer import image_sending
class Pace(pacing.Pace):
    def step(self, done, total, what, cost=0):
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)
with (image_repository.Repository(
        sys.argv[1], filter_dir=sys.argv[2]) as repo,
        client.Client(sys.argv[3]) as client):
    image_sending.send(repo, 'one', client, pace=Pace())
'''


@pytest.mark.parametrize('lots', [16, 4096])
def test_the_sender_is_killed(home, away, lots, monkeypatch):
    """The next sender takes over an upload that has been silent.

    It may be of another version, and cut the image in another way.
    """
    limit_lots(monkeypatch, lots)
    data = noise(24 << 20)
    home.put('one', data)
    with daemons.Daemon(away.path) as daemon, daemon.client() as client:
        daemon.program = program(SILENT_SECONDS=1)
        daemon.start()
        done = subprocess.run(
            [sys.executable, '-c', SENDER, home.path, f'{home.path}-filter',
             daemon.address], cwd=daemons.ROOT, timeout=100)
        assert done.returncode == -signal.SIGKILL
        sent = image_sending.send(home.repo, 'one', client)
    assert away.read('one') == data
    assert sent.sent_bytes < 0.7 * len(data)
    repositories.require_clean(away.path)


def test_many_images_at_once(home, away, daemon, monkeypatch):
    """The receiver takes its limit of images; the other senders wait."""
    monkeypatch.setattr(image_sending, 'BUSY_PAUSE', 0.1)
    names = [f'image-{n}' for n in range(replica_receiver.MAX_COUNT + 3)]
    for seed, name in enumerate(names):
        home.put(name, noise(200 * BLOCK, seed))
    errors = []

    def send(name):
        with daemon.client() as client:
            try:
                image_sending.send(home.repo, name, client)
            except Exception as e:
                errors.append(e)

    threads = [threading.Thread(target=send, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    for seed, name in enumerate(names):
        assert away.read(name) == noise(200 * BLOCK, seed)


# -- over TLS -----------------------------------------------------------------

@pytest.fixture
def tls(away, tmp_path):
    found = test_pull.TLS(tmp_path, away.path, replicate_from='operator',
                          scope='global')
    with found.daemon:
        yield found


def test_over_tls(home, away, tls):
    data = mixture(3_000_001)
    home.put('one', data)
    with daemon_client.Client(
            tls.address, cert=str(tls.operator),
            ca_file=str(tls.authority.path)) as client:
        image_sending.send(home.repo, 'one', client)
    assert away.read('one') == data


@pytest.mark.parametrize('kind', ['none', 'strange', 'their'])
def test_who_is_no_operator(home, away, tls, kind):
    """A client without an operator's certificate, or a wrong server, fails."""
    home.put('one', noise(100 * BLOCK))
    options = {
        'none': {'ca_file': str(tls.authority.path)},
        'strange': {'cert': str(tls.strange.issue('guest')),
                    'ca_file': str(tls.authority.path)},
        'their': {'cert': str(tls.operator),
                  'ca_file': str(tls.strange.path)}}[kind]
    with daemon_client.Client(tls.address, **options) as client:
        with pytest.raises(client_errors.ClientError) as caught:
            image_sending.send(home.repo, 'one', client)
    if kind == 'none':
        assert caught.value.code == 403
        assert 'certificate of tls_client_ca' in str(caught.value)
    assert tls.address in str(caught.value)
    away.require_nothing_of('one')
    assert not os.listdir(away.path / 'groups')


def test_who_only_gives(home, away, tmp_path):
    """A certificate only allows reading, unless the site permits more."""
    home.put('one', noise(100 * BLOCK))
    tls = test_pull.TLS(tmp_path, away.path)
    with tls.daemon, daemon_client.Client(
            tls.address, cert=str(tls.operator),
            ca_file=str(tls.authority.path)) as client:
        with pytest.raises(client_errors.Refused) as caught:
            image_sending.send(home.repo, 'one', client)
    assert caught.value.code == 403
    assert "'operator'" in str(caught.value)
    assert 'replicate_from' in str(caught.value)
    away.require_nothing_of('one')


def test_a_token_is_no_certificate(home, away, tls):
    home.put('one', b'data')
    with daemon_client.Client(tls.address, token='any',
                              ca_file=str(tls.authority.path)) as client:
        with pytest.raises(client_errors.Refused) as caught:
            image_sending.send(home.repo, 'one', client)
    assert caught.value.code == 403
