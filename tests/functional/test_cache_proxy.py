# SPDX-License-Identifier: Apache-2.0

"""A compute host's cache before a real Glance that checks tokens.

The cache gives the same answers as Glance, byte by byte and header by header,
and only to the users to whom Glance gives them, whichever process is killed
meanwhile.
"""

import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import time
import uuid

import pytest

from dedupd.http import limited
from glance_dedup import _engine
from glance_dedup.base import hashes
from tests.functional import glance_server
from tests.functional import test_dedupd_openapi
from tests.support import cache_harness
from tests.support import daemons
from tests.support import ports
from tests.support import repositories

MIB = 1 << 20
noise = repositories.noise

# Those of Glance's and uWSGI's headers that differ from answer to answer.
_VARYING = {'date', 'x-openstack-request-id', 'connection'}
# Seconds for which the cache sends no request to a peer that was away.
_AWAY = 2


def _program(more=''):
    """A daemon that retries a peer sooner, and syncs received blocks sooner.

    :param more: what it does before it starts
    """
    return ['-c', 'from dedupd import daemon; import sys; '
            'from dedupd.compute.cache import arrival_list, glance_proxy; '
            'from dedupd.serve import image_handlers; '
            'from glance_dedup.transfer import pull; '
            'pull.SYNC_SECONDS = 0.5; '
            f'arrival_list.AWAY_SECONDS = {_AWAY}; '
            f'{more}sys.exit(daemon.main())']


_PROGRAM = _program()
#: A daemon that gives up an image sooner, too.
_IMPATIENT = _program(
    'image_handlers.STALLED = glance_proxy.OPEN_SECONDS = 4; ')


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    return tmp_path_factory.mktemp('cached')


@pytest.fixture(scope='module')
def storing(place):
    with cache_harness.Storing(place) as host:
        yield host


@pytest.fixture(scope='module')
def link(storing):
    """A link to the storing host's daemon."""
    with contextlib.closing(cache_harness.Link(storing.listen)) as found:
        yield found


@pytest.fixture(scope='module')
def cache(place, storing, link):
    with storing.cache(
            repositories.create(place / 'cache'),
            {'upstream_url': f'https://{link.address}'},
            status_listen=f'127.0.0.1:{ports.free_port()}') as daemon:
        daemon.program = _PROGRAM
        yield daemon.start().wait_for_catalog()
        assert daemon.stop() == 0, daemon.text()
        text = daemon.text()
        assert 'Traceback' not in text, text[text.find('Traceback'):][:3000]
    repositories.require_clean(place / 'cache')


@pytest.fixture(autouse=True)
def mended(storing, link, cache):
    """Everything runs afterwards, and nothing is held up."""
    pid = storing.daemon.process.pid
    yield
    link.hold_after(None)
    storing.glance.allow(**cache_harness.TOKENS)
    if storing.daemon.process.poll() is not None:
        storing.daemon.start().wait_for_catalog()
    if storing.daemon.process.pid != pid:
        time.sleep(_AWAY)
    if storing.glance.pid is None:
        storing.glance.start()
    if cache.process.poll() is not None:
        cache.start().wait_for_catalog()


@pytest.fixture
def alice(storing):
    return storing.glance.client('alice')


@pytest.fixture
def near(storing, cache):
    """Alice's client, through the cache."""
    return storing.glance.client('alice', cache.url)


def store(client, data, **properties):
    image_id = client.create(name='image', **properties)['id']
    client.upload(image_id, data)
    return image_id


def exchange(client, method, path, body=None, **headers):
    """Return status, reason, headers but those that vary, and body."""
    with contextlib.closing(client.connection()) as connection:
        connection.request(method, path, body, {**client.headers, **headers})
        with contextlib.closing(connection.getresponse()) as response:
            found = sorted((name.lower(), value)
                           for name, value in response.getheaders()
                           if name.lower() not in _VARYING)
            return response.status, response.reason, found, response.read()


def require_same(client, near, method, path, *arguments, **headers):
    """Require the same answer directly and through the cache; return it."""
    direct = exchange(client, method, path, *arguments, **headers)
    through = exchange(near, method, path, *arguments, **headers)
    assert through == direct
    return direct


def digest(data):
    return hashlib.sha256(data).hexdigest()


def received(cache):
    return cache.counts()['arrivals']['received_bytes']


def rest_of(response, first=b''):
    """Return the bytes that still come, and whether the body was complete."""
    found = bytearray(first)
    try:
        while piece := response.read(MIB):
            found += piece
    except (http.client.IncompleteRead, ConnectionResetError):
        return bytes(found), False
    return bytes(found), not response.length


# -- answers passed on --------------------------------------------------------

@pytest.mark.parametrize('method,path,body', [
    ('GET', '/', None), ('GET', '/versions', None), ('GET', '/v2/', None),
    ('GET', '/v2/images', None), ('GET', '/v2/images?limit=1', None),
    ('GET', '/v2/images?visibility=wrong', None), ('GET', '/nowhere', None),
    ('GET', '/v2/images/nowhere', None), ('HEAD', '/v2/images', None),
    ('GET', '/v2/images/nowhere/file', None),
    ('GET', '/v2/schemas/image', None), ('POST', '/v2/images', b'{"nonsense'),
    ('POST', '/v2/images', b'[]'), ('PUT', '/v2/images/nowhere/file', b'x'),
    ('DELETE', '/v2/images/x', None), ('PATCH', '/v2/images/nowhere', b'[]'),
    ('OPTIONS', '/v2/images', None), ('GET', '/v2/info/stores', None),
    ('BREW', '/v2/images', None)])
def test_everything_is_passed_on(alice, near, method, path, body):
    require_same(alice, near, method, path, body,
                 **{'Content-Type': 'application/json'} if body else {})


@pytest.mark.parametrize('size', [None, 5 * MIB + 3])
def test_uploads(alice, near, size):
    """Uploads in chunks, and with a length, arrive, as do later changes."""
    data = noise(5 * MIB + 3, 1)
    image = near.create(name='one', visibility='private')
    assert near.upload(image['id'], iter([data]) if size is None else data,
                       size) == 204
    shown = alice.show(image['id'])
    assert shown['status'] == 'active' and shown['size'] == len(data)
    assert shown['os_hash_value'] == hashlib.sha512(data).hexdigest()
    assert alice.download(image['id']) == data
    near.request('PATCH', f'/v2/images/{image["id"]}', json.dumps([
        {'op': 'replace', 'path': '/name', 'value': 'two'}]),
        {'Content-Type': 'application/openstack-images-v2.1-json-patch'})
    assert alice.show(image['id'])['name'] == 'two'
    assert near.delete(image['id']) == 204


def zeros(length):
    for _ in range(length // MIB):
        yield bytes(MIB)


@pytest.mark.parametrize('size', [
    96 * MIB, pytest.param(1 << 30, marks=pytest.mark.long)])
def test_a_large_upload_needs_no_memory(alice, near, cache, size):
    before = cache.memory('VmHWM')
    image_id = near.create(name='large')['id']
    assert near.upload(image_id, zeros(size)) == 204
    assert alice.show(image_id)['size'] == size
    assert cache.memory('VmHWM') - before < 32 * MIB
    alice.delete(image_id)


def test_a_refused_upload(storing, cache):
    """The refusal arrives even where much is still to be sent."""
    stranger = storing.glance.client('nobody', cache.url)
    with contextlib.closing(stranger.connection()) as connection:
        connection.putrequest('PUT', '/v2/images/x/file')
        for name, value in {**stranger.headers, 'Content-Length': 1 << 33,
                            'Content-Type': 'application/octet-stream'
                            }.items():
            connection.putheader(name, str(value))
        connection.endheaders()
        assert connection.getresponse().status == 401


# -- downloads ----------------------------------------------------------------

def test_downloads_are_glances(alice, near, cache):
    """The answers and headers are Glance's, from the first download on."""
    data = repositories.mixture(12 * MIB, seed=3) + noise(777, 4)
    image_id = store(alice, data)
    path = f'/v2/images/{image_id}/file'
    before = cache.counts()
    for _ in range(2):
        status, _, headers, body = require_same(alice, near, 'GET', path)
        assert status == 200 and body == data
        assert ('content-md5', hashlib.md5(data).hexdigest()) in headers
    # The daemon counts the last bytes when it sends them.
    repositories.eventually(lambda: (
        cache.counts()['bytes_here'] - before['bytes_here'] == 2 * len(data)))
    after = cache.counts()
    assert after['arriving'] - before['arriving'] == 1
    assert after['here'] - before['here'] == 1
    assert after['bytes_glance'] == before['bytes_glance']
    for part in ('bytes=0-0', 'bytes=5-', 'bytes=-5', 'bytes=4095-8192',
                 f'bytes=0-{len(data) * 2}', f'bytes=-{len(data) * 2}',
                 f'bytes={len(data) - 1}-{len(data) - 1}'):
        assert require_same(alice, near, 'GET', path,
                            Range=part)[0] == 206, part
    assert cache.counts()['here'] - after['here'] == 7


def test_ranges_of_glances_own_mind(alice, near, cache):
    """The cache passes on ranges that Glance answers in a way of its own."""
    data = noise(MIB, 5)
    image_id = store(alice, data)
    near.download(image_id)
    before = cache.counts()
    path = f'/v2/images/{image_id}/file'
    for part, status in (('bytes=0-1,4-5', 400), ('bytes=9-5', 416),
                         (f'bytes={len(data)}-', 416), ('items=0-5', 416),
                         ('nonsense', 416), ('bytes=-0', None),
                         ('bytes=1 - 2', None)):
        found = require_same(alice, near, 'GET', path, Range=part)[0]
        assert status in (None, found), part
    require_same(alice, near, 'GET', path, **{'Content-Range': 'bytes 1-4/*'})
    require_same(alice, near, 'HEAD', path)
    require_same(alice, near, 'GET', f'{path}?x=y')
    require_same(alice, near, 'GET', path.replace('v2/', 'v2//'))
    assert cache.counts()['here'] == before['here']


def test_images_without_bytes(alice, near):
    queued = alice.create(name='queued')['id']
    assert require_same(alice, near, 'GET',
                        f'/v2/images/{queued}/file')[0] == 204
    empty = store(alice, b'')
    require_same(alice, near, 'GET', f'/v2/images/{empty}/file')
    require_same(alice, near, 'GET', f'/v2/images/{empty}/file',
                 Range='bytes=0-')


@pytest.mark.parametrize('data', [b'x', bytes(3 * MIB), noise(65536, 7)],
                         ids=['a byte', 'zeros', 'a last piece'])
def test_small_and_odd_images(alice, near, cache, data):
    image_id = store(alice, data)
    before = cache.counts()
    for _ in range(2):
        assert near.download(image_id) == data
    assert near.download(image_id, 0, 0) == data[:1]
    after = cache.counts()
    assert after['arriving'] - before['arriving'] == 1
    assert after['here'] - before['here'] == 2


def test_only_missing_blocks_move(alice, near, cache):
    base = noise(16 * MIB, 10)
    first, second = (store(alice, base + noise(MIB // 2, seed))
                     for seed in (11, 12))
    before = received(cache)
    near.download(first)
    assert received(cache) - before > 16 * MIB
    before = received(cache)
    assert near.download(second) == base + noise(MIB // 2, 12)
    assert received(cache) - before < 16 * MIB // 10
    before = received(cache)
    near.download(second)
    assert received(cache) == before


# -- permissions --------------------------------------------------------------

def test_nobody_without_the_right(storing, alice, near, cache):
    """Without the right users get a refusal, although the image is here."""
    data = noise(2 * MIB, 20)
    image_id = store(alice, data, visibility='shared')
    path = f'/v2/images/{image_id}/file'
    bob, stranger, ops = ((storing.glance.client(name),
                           storing.glance.client(name, cache.url))
                          for name in ('bob', 'nobody', 'ops'))
    nameless = (glance_server.Client(storing.glance.url),
                glance_server.Client(cache.url))
    for pair, status in ((bob, 404), (stranger, 401), (nameless, 401)):
        for part in ({}, {'Range': 'bytes=0-0'}, {'Range': 'bytes=5-'}):
            assert near.download(image_id) == data
            assert require_same(*pair, 'GET', path, **part)[0] == status
    # Glance may change the permission at any time.
    alice.request('POST', f'/v2/images/{image_id}/members',
                  json.dumps({'member': 'bob'}),
                  {'Content-Type': 'application/json'})
    assert bob[1].download(image_id) == data
    alice.request('DELETE', f'/v2/images/{image_id}/members/bob')
    assert require_same(*bob, 'GET', path)[0] == 404
    ops[0].request('POST', f'/v2/images/{image_id}/actions/deactivate')
    assert require_same(alice, near, 'GET', path)[0] == 403
    ops[0].request('POST', f'/v2/images/{image_id}/actions/reactivate')
    assert near.download(image_id) == data
    storing.glance.allow(bob=cache_harness.TOKENS['bob'],
                         ops=cache_harness.TOKENS['ops'])
    assert require_same(alice, near, 'GET', path)[0] == 401


def test_a_deleted_image_goes(place, alice, near):
    image_id = store(alice, noise(MIB, 21))
    near.download(image_id)
    here = place / 'cache' / 'images' / image_id
    assert here.exists()
    assert near.delete(image_id) == 204
    repositories.eventually(lambda: not here.exists())
    with pytest.raises(glance_server.HTTPError) as raised:
        near.download(image_id)
    assert raised.value.status == 404


def test_a_refused_deletion(place, storing, alice, near, cache):
    """An image whose deletion Glance refuses stays in the cache."""
    image_id = store(alice, noise(MIB, 24))
    near.download(image_id)
    bob = storing.glance.client('bob', cache.url)
    assert bob.delete(image_id, expect=(404,)) == 404
    assert (place / 'cache' / 'images' / image_id).exists()


def test_another_image_of_the_same_name(place, alice, near):
    """The cache uses an image that it holds only if Glance has that hash."""
    data, other = noise(2 * MIB, 22), noise(2 * MIB, 23)
    image_id = store(alice, data)
    with repositories.open_repository(place / 'cache') as repository:
        repositories.put(repository, image_id, other)
    assert near.download(image_id) == data
    assert near.download(image_id) == data


def other_there(storing, alice, image_id, data, other, known=None):
    """Glance has an image in another store; the repository has `other`.

    :param known: the bytes whose hash is recorded with `other`
    """
    alice.create(id=image_id, name='image')
    alice.upload(image_id, data, store='plain')
    with repositories.open_repository(storing.repository) as repository:
        stat = repositories.put(repository, image_id, other)
        if known is not None:
            hashes.record(storing.repository, stat, hashes.Hash(
                'sha512', hashlib.sha512(known).hexdigest()))


@pytest.mark.parametrize('size', [3 * MIB, MIB])
def test_a_wrong_image_of_the_storing_host(place, storing, alice, size):
    """No wrong image ends as if it were whole; Glance gives it from then on.

    This also holds after a restart, in ranges, and until the image is deleted.
    """
    image_id = f'00000000-0000-4000-8000-{size:012}'
    data, other = noise(size, 60), noise(size, 61)
    # The storing host's disk has other bytes than were hashed.
    other_there(storing, alice, image_id, data, other, known=data)
    path = place / f'wrong-{size}'
    with storing.cache(repositories.create(path),
                       {'upstream_cert': storing.operator}) as daemon:
        daemon.program = _PROGRAM
        daemon.start()
        near = storing.glance.client('alice', daemon.url)
        with near.open(image_id) as response:
            found, whole = rest_of(response)
        # The body that has begun ends before its announced length.
        assert not whole and other.startswith(found)
        counts = daemon.counts()
        assert counts['fallbacks'] == 0
        assert counts['held']['wrong_images'] == 1
        for _ in range(2):
            for part in (None, (0, 100), (size - 100, size - 1)):
                assert near.download(image_id, *(part or ())) == (
                    data if part is None else data[part[0]:part[1] + 1])
            assert daemon.counts()['plain']['wrong'] == 3
            assert daemon.counts()['arrivals']['pulls'] < 2
            daemon.stop()
            daemon.start()
        text = daemon.text()
        assert text.count(f'Image {image_id} of the storing host is not') == 1
        # The mark goes with the image.
        assert near.delete(image_id) == 204
        repositories.eventually(
            lambda: not daemon.counts()['held']['wrong_images'])
        assert daemon.stop() == 0, daemon.text()
    with repositories.open_repository(storing.repository) as repository:
        repository.delete(image_id)
    repositories.require_clean(path)


@pytest.mark.parametrize('is_hashed', [False, True])
def test_an_image_that_somebody_planted(place, storing, alice, is_hashed):
    """No byte of the image is sent, since its hash is not that of Glance."""
    image_id = f'00000000-0000-4000-8000-00000000001{is_hashed:d}'
    data, other = noise(3 * MIB, 64), noise(3 * MIB, 65)
    other_there(storing, alice, image_id, data, other,
                known=other if is_hashed else None)
    with storing.cache(repositories.create(place / f'planted-{is_hashed}'),
                       {'upstream_cert': storing.operator}) as daemon:
        daemon.start()
        near = storing.glance.client('alice', daemon.url)
        assert near.download(image_id) == data
        repositories.eventually(
            lambda: daemon.counts()['held']['wrong_images'])
        assert near.download(image_id) == data
        assert daemon.stop() == 0, daemon.text()
    alice.delete(image_id)
    with repositories.open_repository(storing.repository) as repository:
        repository.delete(image_id)


def test_a_range_of_a_wrong_image(place, storing, alice):
    """Until an image is known to be right, Glance serves its ranges."""
    image_id = '00000000-0000-4000-8000-000000000002'
    data, other = noise(3 * MIB, 62), noise(3 * MIB, 63)
    other_there(storing, alice, image_id, data, other)
    with storing.cache(repositories.create(place / 'wrong-range'),
                       {'upstream_cert': storing.operator}) as daemon:
        daemon.program = _PROGRAM
        daemon.start()
        near = storing.glance.client('alice', daemon.url)
        assert near.download(image_id, 0, MIB) == data[:MIB + 1]
        repositories.eventually(
            lambda: daemon.counts()['held']['wrong_images'])
        assert near.download(image_id) == data
        assert daemon.stop() == 0, daemon.text()
    alice.delete(image_id)
    with repositories.open_repository(storing.repository) as repository:
        repository.delete(image_id)


# -- many at once -------------------------------------------------------------

def test_eight_callers_and_one_pull(alice, near, cache):
    data = noise(24 * MIB, 30)
    image_id = store(alice, data)
    before = cache.counts()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: digest(near.download(image_id)),
                              range(8)))
    assert set(found) == {digest(data)}
    after = cache.counts()
    assert after['arrivals']['pulls'] - before['arrivals']['pulls'] == 1
    moved = (after['arrivals']['received_bytes']
             - before['arrivals']['received_bytes'])
    assert moved < 1.1 * len(data)
    assert after['bytes_glance'] == before['bytes_glance']


@contextlib.contextmanager
def begun(near, image_id, link, part):
    """Yields a download, and its first MiB, when `part` bytes have come."""
    link.hold_after(part)
    with near.open(image_id) as response:
        first = response.read(MIB)
        link.wait_until_held()
        yield response, first


def test_the_first_byte_comes_before_the_last(alice, near, link):
    data = noise(40 * MIB, 31)
    image_id = store(alice, data)
    with begun(near, image_id, link, 24 * MIB) as (response, first):
        assert first == data[:MIB]
        link.hold_after(None)
        # A reader that begins elsewhere does not wait for the bytes before.
        assert near.download(image_id, 38 * MIB, 39 * MIB) == (
            data[38 * MIB:39 * MIB + 1])
        assert first + response.read() == data


def test_a_caller_that_leaves(place, alice, near, cache):
    """The image still arrives completely, for the next caller."""
    data = noise(24 * MIB, 32)
    image_id = store(alice, data)
    before = cache.counts()
    with near.open(image_id) as response:
        response.read(MIB)
    repositories.eventually((place / 'cache' / 'images' / image_id).exists)
    assert near.download(image_id) == data
    after = cache.counts()
    assert after['arrivals']['pulls'] - before['arrivals']['pulls'] == 1
    assert after['fallbacks'] == before['fallbacks']


# -- failures -----------------------------------------------------------------

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
    time.sleep(_AWAY)
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
        daemon.program = _IMPATIENT
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
    time.sleep(_AWAY)
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
        daemon.program = _PROGRAM
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


# Long: daemons start four times, and _AWAY seconds pass twice.
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
        time.sleep(_AWAY)
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


def refused(cache):
    try:
        with cache.connect_proxy() as sock:
            # A connection that was accepted just before is closed at the very
            # end.
            sock.settimeout(0.2)
            return not sock.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True


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


# -- status, and reading for operators ----------------------------------------

def test_the_status(alice, near, cache, link):
    """The status and the metrics are as described while an image arrives."""
    image_id = store(alice, noise(24 * MIB, 52))
    with begun(near, image_id, link, 16 * MIB) as (response, _):
        url = f'http://{cache.options["status_listen"]}'
        # More has come than sockets hold, so its reader waits for its client.
        repositories.eventually(lambda: cache.status()['cache'][
            'arrivals']['images'][0]['readers'] == 1)
        shown = test_dedupd_openapi.walk('status').call_and_validate(
            base_url=url, checks=test_dedupd_openapi.CHECKS).json()['cache']
        assert shown['under_way'] == 1
        found, = shown['arrivals']['images']
        assert (found['id'], found['size'], found['readers']) == (
            image_id, 24 * MIB, 1)
        text = cache.request('GET', '/metrics').body.decode()
        assert '\ndedupd_image_cache_arriving_images 1.0\n' in text
        link.hold_after(None)
        response.read()


def test_an_operators_cache(place, storing, alice):
    """A cache with a certificate also fetches for Unix socket clients."""
    data = noise(9 * MIB, 53)
    image_id = store(alice, data)
    with storing.cache(repositories.create(place / 'operator'),
                       {'upstream_cert': storing.operator}) as daemon:
        daemon.program = _PROGRAM
        daemon.start()
        for _ in range(2):
            response = daemon.request('GET', f'/v1/images/{image_id}')
            assert response.status == 200 and response.body == data
        assert daemon.counts()['arrivals']['pulls'] == 1
        assert daemon.request('GET', '/v1/images/nothing').status == 404
        storing.daemon.kill()
        response = daemon.request('GET', '/v1/images/else')
        assert response.status == 503
        assert 'Connection refused' in response.json()['error']['message']
        storing.daemon.start().wait_for_catalog()
        time.sleep(_AWAY)
        # Glance's callers get the image only if it is Glance's.
        near = storing.glance.client('alice', daemon.url)
        before = received(daemon)
        assert near.download(image_id) == data
        assert received(daemon) - before < MIB
        assert daemon.stop() == 0, daemon.text()


def test_what_nobody_compared_is_not_handed_out(tmp_path, storing, alice):
    """Bytes are not sent before they were compared with Glance's hash.

    They were read over the Unix socket, and Glance has no MD5 of the image.
    """
    image_id = str(uuid.uuid4())
    data, other = noise(3 * MIB, 68), noise(3 * MIB, 69)
    other_there(storing, alice, image_id, data, other, known=other)
    file = storing.glance.directory / 'glance.sqlite'
    with (contextlib.closing(sqlite3.connect(file, timeout=60)) as database,
          database):
        changed = database.execute(
            'UPDATE images SET checksum = NULL WHERE id = ?', (image_id,))
        assert changed.rowcount == 1
    with storing.cache(repositories.create(tmp_path / 'cache'),
                       {'upstream_cert': storing.operator}) as daemon:
        daemon.program = _PROGRAM
        daemon.start()
        response = daemon.request('GET', f'/v1/images/{image_id}')
        assert response.status == 200 and response.body == other
        near = storing.glance.client('alice', daemon.url)
        with near.open(image_id) as response:
            found, whole = rest_of(response)
        assert not whole or found == data
        assert near.download(image_id) == data
        assert daemon.stop() == 0, daemon.text()
    alice.delete(image_id)
    with repositories.open_repository(storing.repository) as repository:
        repository.delete(image_id)


def test_no_operator(place, cache, alice):
    """Without a certificate no image is fetched for the socket's clients."""
    image_id = store(alice, noise(MIB, 54))
    assert cache.request('GET', f'/v1/images/{image_id}').status == 404
    assert not (place / 'cache' / 'images' / image_id).exists()


def test_other_parameters(place, storing, alice):
    """With other parameters the cache fetches whole images, and reports it."""
    data = noise(3 * MIB, 55)
    image_id = store(alice, data)
    path = repositories.create(place / 'other', block_size=8192)
    with storing.cache(path) as daemon:
        daemon.start()
        near = storing.glance.client('alice', daemon.url)
        assert near.download(image_id) == data
        repositories.eventually(lambda: (path / 'images' / image_id).exists())
        assert 'same parameters' in daemon.counts()['last_failure']['text']
        assert 'same parameters' in daemon.text()
        assert near.download(image_id) == data
        assert daemon.counts()['here'] == 1


# -- clients ------------------------------------------------------------------

def run(*arguments):
    done = subprocess.run(
        [pathlib.Path(sys.executable).parent / arguments[0], *arguments[1:]],
        capture_output=True, text=True, timeout=120,
        env={name: value for name, value in os.environ.items()
             if not name.startswith('OS_')})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_glanceclient(tmp_path, cache):
    source, target = tmp_path / 'source', tmp_path / 'target'
    source.write_bytes(noise(5 * MIB, 50))
    common = ['glance', '--os-auth-token', 'alice', '--os-image-url',
              cache.url]
    text = run(*common, 'image-create', '--name', 'by-client',
               '--disk-format', 'raw', '--container-format', 'bare', '--file',
               str(source))
    image_id = [line.split('|')[2].strip() for line in text.splitlines()
                if line.startswith('| id ')][0]
    before = cache.counts()['bytes_here']
    run(*common, 'image-download', image_id, '--file', str(target))
    assert target.read_bytes() == source.read_bytes()
    repositories.eventually(
        lambda: cache.counts()['bytes_here'] - before == 5 * MIB)
    run(*common, 'image-delete', image_id)


@pytest.mark.slow
def test_openstackclient(tmp_path, cache):
    source, target = tmp_path / 'source', tmp_path / 'target'
    source.write_bytes(noise(5 * MIB, 51))
    common = ['openstack', '--os-auth-type', 'admin_token', '--os-token',
              'alice', '--os-endpoint', f'{cache.url}/v2']
    image = json.loads(run(
        *common, 'image', 'create', 'by-openstack', '--disk-format', 'raw',
        '--file', str(source), '-f', 'json'))
    run(*common, 'image', 'save', '--file', str(target), image['id'])
    assert target.read_bytes() == source.read_bytes()
    assert image['id'] in run(*common, 'image', 'list')
    run(*common, 'image', 'delete', image['id'])
