# SPDX-License-Identifier: Apache-2.0

"""Clients read images while these arrive from a real daemon."""

import collections
import contextlib
import hashlib
import os
import random
import threading

import pytest

from dedupd.compute.cache import arrival_list
from dedupd.compute.cache import arriving_image
from dedupd.compute.cache import image_pull
from dedupd.serve import image_source
from glance_dedup.client import client_errors
from glance_dedup.transfer import image_assembly
from glance_dedup.transfer import pull
from tests.support import arriving_images
from tests.support.arriving_images import at_once
from tests.support.arriving_images import follow
from tests.support.arriving_images import hashes_of
from tests.support.arriving_images import Hosts
from tests.support.arriving_images import read_at
from tests.support.arriving_images import serving
from tests.support import repositories

BLOCK = arriving_images.BLOCK
LIMIT = arriving_images.LIMIT
MIB = arriving_images.MIB
hosts = arriving_images.hosts
mixture = arriving_images.mixture
noise = arriving_images.noise
small = arriving_images.small


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
