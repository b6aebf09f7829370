# SPDX-License-Identifier: Apache-2.0

"""Failures while an image arrives from a real daemon."""

import contextlib
import signal
import subprocess
import sys
import textwrap

import pytest

from dedupd.compute.cache import arrival_list
from dedupd.serve import image_source
from glance_dedup.base import exceptions
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import wire
from glance_dedup.transfer import pull
from tests.support import arriving_images
from tests.support.arriving_images import at_once
from tests.support.arriving_images import follow
from tests.support.arriving_images import read_at
from tests.support import daemons
from tests.support import repositories

BLOCK = arriving_images.BLOCK
LIMIT = arriving_images.LIMIT
MIB = arriving_images.MIB
hosts = arriving_images.hosts
noise = arriving_images.noise
small = arriving_images.small


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
