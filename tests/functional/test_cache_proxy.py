# SPDX-License-Identifier: Apache-2.0

"""A compute host's cache before a real Glance that checks tokens.

The cache gives the same answers as Glance, byte by byte and header by header,
and only to the users to whom Glance gives them, whichever process is killed
meanwhile.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import sqlite3
import subprocess
import sys
import time
import uuid

import pytest

from tests.functional import glance_server
from tests.functional import test_dedupd_openapi
from tests.support import cache_harness
from tests.support import cached_glance
from tests.support.cached_glance import begun
from tests.support.cached_glance import digest
from tests.support.cached_glance import other_there
from tests.support.cached_glance import received
from tests.support.cached_glance import require_same
from tests.support.cached_glance import rest_of
from tests.support.cached_glance import store
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
        daemon.program = cached_glance.PROGRAM
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
        daemon.program = cached_glance.PROGRAM
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
        daemon.program = cached_glance.PROGRAM
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
        time.sleep(cached_glance.AWAY_SECONDS)
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
        daemon.program = cached_glance.PROGRAM
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
