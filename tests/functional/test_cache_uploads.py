# SPDX-License-Identifier: Apache-2.0

"""Uploads through a compute host's cache, which sends only the difference.

The tests use a real Glance and real daemons. Whatever breaks, the upload
arrives as it would have without the cache, or fails as it would have. The
steps U1 to U4 are in ``cache.rst``, "Uploads of differences".
"""

import concurrent.futures
import contextlib
import hashlib
import time

import pytest

from glance_dedup.base import imageids
from glance_dedup.base import scopes
from tests.support import cache_harness
from tests.support import cached_glance
from tests.support import daemons
from tests.support import ports
from tests.support import repositories

MIB = 1 << 20
noise = repositories.noise
# The cache's daemon, whose attempts to send follow each other quickly.
_PROGRAM = ['-c', 'from dedupd import daemon; import sys; '
            'from glance_dedup.transfer import image_sending; '
            'image_sending.PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8); '
            'sys.exit(daemon.main())']


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    return tmp_path_factory.mktemp('uploads')


@pytest.fixture(scope='module')
def storing(place):
    with cache_harness.Storing(
            place, upload_from='operator', scope='global') as host:
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
            {'upstream_url': f'https://{link.address}',
             'upstream_cert': storing.operator},
            status_listen=f'127.0.0.1:{ports.free_port()}') as daemon:
        daemon.program = _PROGRAM
        yield daemon.start().wait_for_catalog()
        assert daemon.stop() == 0, daemon.text()
        text = daemon.text()
        assert 'Traceback' not in text, text[text.find('Traceback'):][:3000]
    repositories.require_clean(place / 'cache')


@pytest.fixture
def near(storing, cache):
    """Alice's client, through the cache."""
    return storing.glance.client('alice', cache.url)


def uploads(cache):
    return cache.counts()['uploads']


def pulled(near, data):
    """Have the cache hold an image, and return its id."""
    image_id = near.create(name='base')['id']
    near.upload(image_id, data)
    assert near.download(image_id) == data
    return image_id


def require_uploaded(storing, image_id, data):
    """Glance has the bytes, and their hash, as after a plain upload."""
    client = storing.glance.client('alice')
    record = client.show(image_id)
    assert record['status'] == 'active'
    assert record['size'] == len(data)
    assert record['os_hash_value'] == hashlib.sha512(data).hexdigest()
    assert record['checksum'] == hashlib.md5(data).hexdigest()
    assert client.download(image_id) == data
    with repositories.open_repository(storing.repository) as repo:
        assert not [name for name in repo.images()
                    if imageids.is_upload(name)]


def test_only_the_difference_is_sent(storing, cache, near, place):
    base = noise(24 * MIB, 1)
    base_id = pulled(near, base)
    snapshot = base[:8 * MIB] + noise(MIB, 2) + base[9 * MIB:] + bytes(MIB)
    before = uploads(cache)
    image_id = near.create(name='snapshot', base_image_ref=base_id)['id']
    near.upload(image_id, snapshot)
    require_uploaded(storing, image_id, snapshot)
    found = uploads(cache)
    assert found['images'] == before['images'] + 1
    assert found['bytes'] - before['bytes'] == len(snapshot)
    assert MIB <= found['sent_bytes'] - before['sent_bytes'] < (
        MIB + len(snapshot) // 20)
    with repositories.open_repository(place / 'cache') as repo:
        assert not [name for name in repo.images()
                    if imageids.is_upload(name)]


def passed_on(cache, near, storing, data, **properties):
    """Upload data that the cache passes on whole; return the image's id."""
    before = uploads(cache)
    image_id = near.create(name='image', **properties)['id']
    near.upload(image_id, data)
    require_uploaded(storing, image_id, data)
    found = uploads(cache)
    assert (found['images'], found['plain']) == (
        before['images'], before['plain'] + 1)
    assert not found['under_way']
    return image_id


def test_little_is_passed_on(storing, cache, near):
    passed_on(cache, near, storing, b'x' * (MIB - 1))


def test_no_length_is_announced(storing, cache, near):
    """An upload without a length works, as python-glanceclient sends it."""
    data = noise(5 * MIB, 3)
    image_id = near.create(name='image')['id']
    near.upload(image_id, iter([data[:777], data[777:]]))
    require_uploaded(storing, image_id, data)
    assert uploads(cache)['images']


def test_the_storing_daemon_is_away(storing, cache, near):
    storing.daemon.kill()
    try:
        passed_on(cache, near, storing, noise(3 * MIB, 4))
    finally:
        storing.daemon.start().wait_for_catalog()


@pytest.mark.parametrize('after', [0, 2000, 3000, 100000])
def test_the_link_breaks(storing, cache, near, link, after):
    """The upload succeeds if the link breaks for good, at any byte."""
    data = noise(6 * MIB, 5 + after)
    image_id = near.create(name='image')['id']
    link.hold_after(after)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(near.upload, image_id, data)
        try:
            cut_until(link, done)
        finally:
            link.hold_after(None)
    assert done.result() == 204
    require_uploaded(storing, image_id, data)


def cut_until(link, done):
    """Cut all connections, again and again, until a future is done."""
    deadline = time.monotonic() + 10 * daemons.LIMIT
    while not done.done():
        assert time.monotonic() < deadline
        link.cut()
        time.sleep(0.2)


def test_the_storing_daemon_is_killed_while_glance_takes_it(
        storing, cache, near):
    """The upload completes if the storing daemon dies before its end."""
    data = noise(40 * MIB, 6)
    image_id = near.create(name='image')['id']
    client = storing.glance.client('alice')
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(near.upload, image_id, data)
        repositories.eventually(
            lambda: client.show(image_id)['status'] != 'queued', 60)
        storing.daemon.kill()
        try:
            assert done.result(120) == 204
        finally:
            storing.daemon.start().wait_for_catalog()
    require_uploaded(storing, image_id, data)


def test_the_client_breaks_off(storing, cache, near):
    image_id = near.create(name='image')['id']

    def broken():
        yield noise(3 * MIB, 7)
        raise KeyError('enough')

    with pytest.raises(KeyError):
        near.upload(image_id, broken())
    repositories.eventually(lambda: not uploads(cache)['under_way'], 60)
    assert storing.glance.client('alice').show(image_id)['status'] == 'queued'
    near.upload(image_id, noise(3 * MIB, 8))
    require_uploaded(storing, image_id, noise(3 * MIB, 8))


@pytest.mark.parametrize('token, status', [('bob', 404), ('nobody', 401)])
def test_who_may_not(storing, cache, near, token, status):
    """Glance refuses the upload, as without the cache; no file is left."""
    before = uploads(cache)
    image_id = near.create(name='image')['id']
    other = storing.glance.client(token, cache.url)
    other.upload(image_id, noise(2 * MIB, 9), expect=(status,))
    assert uploads(cache) == before


def test_an_image_that_has_data(storing, cache, near):
    before = uploads(cache)
    image_id = near.create(name='image')['id']
    near.upload(image_id, b'data')
    near.upload(image_id, noise(2 * MIB, 10), expect=(409,))
    assert uploads(cache)['images'] == before['images']


def test_the_token_ends_before_glance_is_asked(storing, cache, near, link):
    """The answer is Glance's."""
    before = uploads(cache)
    image_id = near.create(name='image')['id']
    # The cache has Glance's record of the image when it sends the peer its
    # request.
    link.hold_after(1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(near.upload, image_id, noise(2 * MIB, 11),
                           expect=(401,))
        try:
            link.wait_until_held()
            storing.glance.allow()
            link.hold_after(None)
            assert done.result(120) == 401
        finally:
            link.hold_after(None)
            storing.glance.allow(**cache_harness.TOKENS)
    assert uploads(cache)['images'] == before['images'] + 1
    assert storing.glance.client('alice').show(image_id)['status'] == 'queued'


def test_no_room_to_keep_it(storing, place, near):
    """The cache passes on the bytes that came, then the rest as it comes."""
    data = noise(60 * MIB, 12)
    with repositories.small_disk(place / 'disk', 48 * MIB):
        with storing.cache(
                repositories.create(place / 'disk' / 'cache'),
                {'upstream_cert': storing.operator}, reserve_mib=1) as daemon:
            daemon.start().wait_for_catalog()
            client = storing.glance.client('alice', daemon.url)
            image_id = client.create(name='image')['id']
            client.upload(image_id, data)
            require_uploaded(storing, image_id, data)
            found = uploads(daemon)
            assert found['plain'] == 1 and 'full' in found['last_failure']


def test_a_cache_that_is_no_operator(storing, place, near):
    with storing.cache(repositories.create(place / 'other')) as daemon:
        daemon.start().wait_for_catalog()
        client = storing.glance.client('alice', daemon.url)
        image_id = client.create(name='image')['id']
        client.upload(image_id, noise(2 * MIB, 13))
        require_uploaded(storing, image_id, noise(2 * MIB, 13))
        assert uploads(daemon) is None


def test_what_a_killed_daemon_left(storing, cache, place):
    """Both daemons remove the files of a killed daemon when they start."""
    left = imageids.upload_id()
    for path, daemon in ((storing.repository, storing.daemon),
                         (place / 'cache', cache)):
        with repositories.open_repository(path) as repo:
            repositories.put(repo, left, b'left')
        daemon.stop()
        daemon.start().wait_for_catalog()

        def is_gone(path=path):
            with repositories.open_repository(path) as repo:
                return left not in repo.images()
        repositories.eventually(is_gone, 60)


# -- projects that share nothing ----------------------------------------------

@pytest.fixture(scope='module')
def apart(tmp_path_factory):
    """A storing host on which projects share nothing, and a cache."""
    place = tmp_path_factory.mktemp('apart')
    with cache_harness.Storing(
            place, store={'dedup_store_scope': 'project'},
            upload_from='operator', scope='project') as host:
        with host.cache(repositories.create(place / 'cache'),
                        {'upstream_cert': host.operator}) as daemon:
            yield host, daemon.start().wait_for_catalog()


def sent_for(host, cache, token, data):
    """Return the bytes that the cache sends for an upload, and the answer."""
    near = host.glance.client(token, cache.url)
    image_id = near.create(name='snapshot')['id']
    before = uploads(cache)
    status, reason, headers, body = cached_glance.exchange(
        near, 'PUT', f'/v2/images/{image_id}/file', data,
        **{'Content-Type': 'application/octet-stream'})
    found = uploads(cache)
    assert found['images'] == before['images'] + 1, found
    names = [name for name, value in headers]
    return found['sent_bytes'] - before['sent_bytes'], (
        status, reason, names, body)


def test_what_is_sent_does_not_tell_what_others_have(apart):
    """The bytes sent for bob do not depend on the snapshots that alice has."""
    host, cache = apart
    data = noise(6 * MIB, 40)
    new, answer = sent_for(host, cache, 'alice', data)
    again, other_answer = sent_for(host, cache, 'alice', data)
    assert again < MIB < 6 * MIB < new
    hers, answer_there = sent_for(host, cache, 'bob', data)
    none, answer_nowhere = sent_for(host, cache, 'bob', noise(6 * MIB, 41))
    assert abs(hers - none) < MIB / 50 and hers > 6 * MIB
    assert answer == other_answer == answer_there == answer_nowhere
    with repositories.open_repository(host.repository) as repo:
        assert {scopes.describe(bytes.fromhex(repo.stat(image_id).scope))
                for image_id in repo.images()} == {'project'}


def test_a_storing_host_that_chooses_no_scope(tmp_path, storing):
    """The upload is passed on whole."""
    before = dict(storing.daemon.options)
    storing.daemon.stop()
    storing.daemon.write_config(upload_from=None, scope=None)
    storing.daemon.start().wait_for_catalog()
    try:
        with storing.cache(repositories.create(tmp_path / 'cache'),
                           {'upstream_cert': storing.operator}) as daemon:
            daemon.start().wait_for_catalog()
            near = storing.glance.client('alice', daemon.url)
            passed_on(daemon, near, storing, noise(2 * MIB, 42))
            assert 'upload_from' in uploads(daemon)['last_failure']
    finally:
        storing.daemon.stop()
        storing.daemon.write_config(**before)
        storing.daemon.start().wait_for_catalog()
