# SPDX-License-Identifier: Apache-2.0

"""Failures while a compute host's cache serves, before a real Glance."""

import contextlib
import signal
import time
import uuid

import pytest

from dedupd.http import limited
from glance_dedup import _engine
from tests.functional import glance_server
from tests.support import cache_harness
from tests.support import cached_glance
from tests.support.cached_glance import begun
from tests.support.cached_glance import digest
from tests.support.cached_glance import other_there
from tests.support.cached_glance import received
from tests.support.cached_glance import refused
from tests.support.cached_glance import require_same
from tests.support.cached_glance import rest_of
from tests.support.cached_glance import store
from tests.support import daemons
from tests.support import ports
from tests.support import repositories

MIB = cached_glance.MIB
noise = cached_glance.noise
alice = cached_glance.alice
cache = cached_glance.cache
link = cached_glance.link
mended = cached_glance.mended
near = cached_glance.near
place = cached_glance.place
storing = cached_glance.storing


def test_the_peer_is_away(storing, alice, near, cache):
    data = noise(3 * MIB, 40)
    image_id = store(alice, data)
    storing.daemon.kill()
    before = cache.counts()
    for _ in range(2):
        assert near.download(image_id) == data
    after = cache.counts()
    assert after['plain'].get('failed', 0) - (
        before['plain'].get('failed', 0)) == 2
    assert after['last_failure']['image_id'] == image_id
    assert after['last_failure']['text'] in cache.text()
    # The cache sends it requests again after a while.
    storing.daemon.start().wait_for_catalog()
    time.sleep(cached_glance.AWAY_SECONDS)
    assert near.download(image_id) == data
    assert cache.counts()['arriving'] - after['arriving'] == 1


def test_failures_do_not_fill_the_log(tmp_path, storing, alice):
    """The log stays short although each request for an image fails here."""
    data = noise(MIB, 68)
    image_id = store(alice, data)
    with storing.cache(repositories.create(tmp_path / 'cache'), {
            'upstream_url': f'https://127.0.0.1:{ports.free_port()}',
            'upstream_cert': storing.operator}) as daemon:
        daemon.start()
        near = storing.glance.client('alice', daemon.url)
        began = time.monotonic()
        for _ in range(2 * limited.MESSAGES):
            assert near.download(image_id) == data
        assert daemon.counts()['plain']['failed'] == 2 * limited.MESSAGES
        windows = 1 + (time.monotonic() - began) // limited.SECONDS
        for source in 'glance_proxy', 'arrival_list':
            lines = [line for line in daemon.text().splitlines()
                     if f' WARNING dedupd.compute.cache.{source} ' in line]
            assert 0 < len(lines) <= windows * limited.MESSAGES + windows


@pytest.fixture
def impatient(tmp_path, storing, link):
    """Another cache, which does not wait for a peer for long."""
    path = repositories.create(tmp_path / 'impatient')
    with storing.cache(
            path, {'upstream_url': f'https://{link.address}'}) as daemon:
        daemon.program = cached_glance.IMPATIENT
        yield daemon.start().wait_for_catalog()
        assert daemon.stop() == 0, daemon.text()
        assert 'Traceback' not in daemon.text()
    repositories.require_clean(path)


def test_the_peer_says_nothing(storing, alice, impatient, link):
    """Glance serves the image soon if the peer does not answer."""
    near = storing.glance.client('alice', impatient.url)
    data = noise(3 * MIB, 56)
    image_id = store(alice, data)
    link.hold_after(0)
    assert near.download(image_id) == data
    found = impatient.counts()
    assert found['plain'] == {'failed': 1}
    assert 'did not begin within 4 seconds' in found['last_failure']['text']
    link.hold_after(None)
    repositories.eventually(lambda: not impatient.counts()['under_way'])
    assert near.download(image_id) == data


def require_completed(cache, before, data):
    """Glance gave only a part of an image, the rest; returns the counts."""
    after = cache.counts()
    assert after['fallbacks'] - before['fallbacks'] == 1
    assert 0 < after['bytes_glance'] - before['bytes_glance'] < 60 * MIB
    assert (after['bytes_glance'] - before['bytes_glance']
            + after['bytes_here'] - before['bytes_here']) == len(data)
    return after


def test_the_peer_fails_in_the_middle(storing, alice, near, cache, link):
    """The caller gets one answer; bytes that came are not requested again."""
    data = noise(72 * MIB, 41)
    image_id = store(alice, data)
    before = cache.counts()
    with begun(near, image_id, link, 48 * MIB) as (response, first):
        storing.daemon.kill()
        link.cut()
        found, whole = rest_of(response, first)
        assert whole and digest(found) == digest(data)
    after = require_completed(cache, before, data)
    link.hold_after(None)
    storing.daemon.start().wait_for_catalog()
    time.sleep(cached_glance.AWAY_SECONDS)
    assert near.download(image_id) == data
    assert (received(cache) - after['arrivals']['received_bytes']
            < 50 * MIB)


def test_the_peer_stops_in_the_middle(storing, alice, impatient, link):
    """The caller gets one answer."""
    near = storing.glance.client('alice', impatient.url)
    data = noise(72 * MIB, 42)
    image_id = store(alice, data)
    before = impatient.counts()
    with begun(near, image_id, link, 48 * MIB) as (response, first):
        found, whole = rest_of(response, first)
        assert whole and digest(found) == digest(data)
    after = require_completed(impatient, before, data)
    assert 'came for 4 seconds' in after['last_failure']['text']
    link.hold_after(None)


@contextlib.contextmanager
def cut_in_the_middle(storing, alice, link, path, data, other, begin=0):
    """Yields a cache whose peer, which has `other`, ends amid a download.

    The value has the cache's daemon, the image's id, and the bytes that the
    caller got from `begin` on.
    """
    image_id = str(uuid.uuid4())
    other_there(storing, alice, image_id, data, other, known=data)
    with storing.cache(repositories.create(path), {
            'upstream_url': f'https://{link.address}',
            'upstream_cert': storing.operator}) as daemon:
        daemon.program = cached_glance.PROGRAM
        daemon.start()
        near = storing.glance.client('alice', daemon.url)
        link.hold_after(16 * MIB)
        with near.open(image_id, begin or None,
                       len(data) - 1 if begin else None) as response:
            first = response.read(MIB)
            assert other[begin:].startswith(first)
            link.wait_until_held()
            storing.daemon.kill()
            link.cut()
            yield daemon, image_id, rest_of(response, first)
        assert daemon.stop() == 0, daemon.text()
    alice.delete(image_id)
    repositories.require_clean(path)
    with repositories.open_repository(storing.repository) as repository:
        repository.delete(image_id)


# Long: daemons start four times, and AWAY_SECONDS pass twice.
@pytest.mark.slow
@pytest.mark.parametrize('begin', [
    0, pytest.param(5 * MIB + 1, marks=pytest.mark.long)])
def test_a_wrong_image_whose_peer_fails(tmp_path, storing, alice, link,
                                        begin):
    """Glance does not complete a body that began with another's bytes."""
    data, other = noise(24 * MIB, 64), noise(24 * MIB, 65)
    with cut_in_the_middle(storing, alice, link, tmp_path / 'cache', data,
                           other, begin) as (daemon, image_id, found):
        body, whole = found
        assert not whole and other[begin:].startswith(body)
        counts = daemon.counts()
        assert counts['bytes_glance'] == 0
        assert counts['last_failure']['image_id'] == image_id
        assert counts['last_failure']['offset'] == begin + len(body)
        assert counts['held']['wrong_images'] == 1
        assert daemon.text().count(
            f'Image {image_id} of the storing host is not') == 1
        # The same holds when the peer is back, and after a kill.
        storing.daemon.start().wait_for_catalog()
        link.hold_after(None)
        time.sleep(cached_glance.AWAY_SECONDS)
        near = storing.glance.client('alice', daemon.url)
        assert near.download(image_id) == data
        daemon.kill()
        daemon.start()
        assert near.download(image_id) == data
        assert daemon.counts()['arrivals']['pulls'] == 0


@pytest.mark.slow
@pytest.mark.parametrize('same, begin', [
    (24 * MIB, 0), (20 * MIB, 5 * MIB + 1),
    *(pytest.param(*one, marks=pytest.mark.long)
      for one in ((24 * MIB, 5 * MIB + 1), (20 * MIB, 0)))])
def test_a_right_beginning_whose_peer_fails(tmp_path, storing, alice, link,
                                            begin, same):
    """Glance completes a body that began with its own bytes."""
    data = noise(24 * MIB, 66)
    other = data[:same] + noise(len(data) - same, 67)
    with cut_in_the_middle(storing, alice, link, tmp_path / 'cache', data,
                           other, begin) as (daemon, _, found):
        body, whole = found
        assert whole and digest(body) == digest(data[begin:])
        counts = daemon.counts()
        assert counts['fallbacks'] == 1
        assert counts['held']['wrong_images'] == 0
        assert counts['bytes_here'] > 0 and counts['bytes_glance'] > 0
        assert counts['bytes_here'] + counts['bytes_glance'] == len(body)


def test_glance_fails_in_the_middle(storing, alice, near, link):
    """A running pull completes; if the peer fails, too, the body ends."""
    data, other = (noise(40 * MIB, seed) for seed in (43, 44))
    first_id, second_id = store(alice, data), store(alice, other)
    with begun(near, first_id, link, 36 * MIB) as (first, begin), (
            begun(near, second_id, link, 12 * MIB)) as (second, other_begin):
        storing.glance.kill()
        link.hold_after(16 * MIB)
        assert begin + first.read() == data
        storing.daemon.kill()
        link.cut()
        found, whole = rest_of(second, other_begin)
        assert not whole and other.startswith(found)
    for image_id in (first_id, second_id):
        with pytest.raises(glance_server.HTTPError) as raised:
            near.download(image_id)
        assert raised.value.status == 503


@pytest.mark.parametrize('another', [True, False])
def test_a_token_expires_in_the_middle(storing, alice, near, cache, link,
                                       another):
    """Without its token a download ends early; another caller's continues."""
    data = noise(40 * MIB, 45 + another)
    image_id = store(alice, data)
    with begun(near, image_id, link, 12 * MIB) as (response, first), (
            contextlib.ExitStack()) as stack:
        if another:
            carol = storing.glance.client('carol', cache.url)
            second = stack.enter_context(carol.open(image_id))
            repositories.eventually(lambda: (
                cache.counts()['arrivals']['images'][0]['readers'] == 2))
        storing.glance.allow(carol=cache_harness.TOKENS['carol'])
        # The storing host remembers a permission, but not across its end.
        storing.daemon.kill()
        storing.daemon.start()
        link.hold_after(None)
        link.cut()
        found, whole = rest_of(response, first)
        if another:
            # Glance continues a download whose peer broke off.
            assert second.read() == data
        assert not whole and data.startswith(found)
    assert require_same(alice, near, 'GET',
                        f'/v2/images/{image_id}/file')[0] == 401


def test_a_damaged_image_here(place, alice, near, cache):
    """Bytes that do not verify are not sent; Glance gives the rest."""
    data = noise(24 * MIB, 47)
    image_id = store(alice, data)
    assert near.download(image_id) == data
    mark = data[12 * MIB:12 * MIB + 64]
    found = [(path, at) for path in (place / 'cache' / 'groups').iterdir()
             if path.is_file() and (at := path.read_bytes().find(mark)) > 0]
    assert found, 'the block is not stored as it is'
    path, at = found[0]

    def put(content):
        with open(path, 'r+b') as file:
            file.seek(at)
            file.write(content)

    cache.stop()
    put(bytes(64))
    try:
        cache.start().wait_for_catalog()
        assert digest(near.download(image_id)) == digest(data)
        counts = cache.counts()
        assert counts['fallbacks'] == 1
        assert 0 < counts['bytes_glance'] < len(data)
    finally:
        put(mark)


def test_the_end_waits_for_callers(alice, near, cache):
    data = noise(24 * MIB, 48)
    image_id = store(alice, data)
    near.download(image_id)
    with near.open(image_id) as response:
        first = response.read(MIB)
        cache.process.terminate()
        repositories.eventually(lambda: refused(cache))
        assert first + response.read() == data
    assert cache.process.wait(daemons.LIMIT) == 0


def test_a_killed_cache(alice, near, cache, link):
    """The next daemon finds the bytes that a killed cache had received."""
    data = noise(80 * MIB, 49)
    image_id = store(alice, data)
    with begun(near, image_id, link, 60 * MIB) as (response, first):
        cache.process.send_signal(signal.SIGKILL)
        cache.process.wait(daemons.LIMIT)
        link.hold_after(None)
        assert not rest_of(response, first)[1]
    cache.start().wait_for_catalog()
    assert digest(near.download(image_id)) == digest(data)
    assert received(cache) < 60 * MIB


def knows(repository, data):
    """Return true if a new transaction finds at least one of these blocks.

    For a single block the filter may have no hint.
    """
    blocks = [data[i:i + 4096] for i in range(0, len(data), 4096)]
    with repositories.open_repository(repository) as repo:
        repo.rebuild_filter()
        with repo.begin('probe') as transaction:
            return any(transaction.find(
                b''.join(_engine.fingerprint('sha256', block, bytes(16))
                         for block in blocks),
                b''.join(len(block).to_bytes(4, 'little')
                         for block in blocks)))


def test_a_cache_killed_early(place, alice, near, cache, link):
    """Blocks of a small image that never completes are synced, too."""
    data = noise(20 * MIB, 57)
    image_id = store(alice, data)
    with begun(near, image_id, link, 16 * MIB) as (response, first):
        repositories.eventually(lambda: knows(
            place / 'cache', data[4 * MIB:5 * MIB]))
        cache.process.send_signal(signal.SIGKILL)
        cache.process.wait(daemons.LIMIT)
        link.hold_after(None)
        assert not rest_of(response, first)[1]
    cache.start().wait_for_catalog()
    assert digest(near.download(image_id)) == digest(data)
    assert received(cache) < 17 * MIB
