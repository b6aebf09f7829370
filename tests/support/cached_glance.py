# SPDX-License-Identifier: Apache-2.0

"""A cache between callers and a real Glance, for tests.

Its fixtures are of a module: ``cache = cached_glance.cache``.
"""

import contextlib
import hashlib
import http.client
import time

import pytest

from glance_dedup.base import hashes
from tests.support import cache_harness
from tests.support import ports
from tests.support import repositories

MIB = 1 << 20
noise = repositories.noise

# Those of Glance's and uWSGI's headers that differ from answer to answer.
_VARYING = {'date', 'x-openstack-request-id', 'connection'}
# Seconds for which the cache sends no request to a peer that was away.
AWAY_SECONDS = 2


def _program(more=''):
    """A daemon that retries a peer sooner, and syncs received blocks sooner.

    :param more: what it does before it starts
    """
    return ['-c', 'from dedupd import daemon; import sys; '
            'from dedupd.compute.cache import arrival_list, glance_proxy; '
            'from dedupd.serve import image_handlers; '
            'from glance_dedup.transfer import pull; '
            'pull.SYNC_SECONDS = 0.5; '
            f'arrival_list.AWAY_SECONDS = {AWAY_SECONDS}; '
            f'{more}sys.exit(daemon.main())']


PROGRAM = _program()
#: A daemon that gives up an image sooner, too.
IMPATIENT = _program(
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
        daemon.program = PROGRAM
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
        time.sleep(AWAY_SECONDS)
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


@contextlib.contextmanager
def begun(near, image_id, link, part):
    """Yields a download, and its first MiB, when `part` bytes have come."""
    link.hold_after(part)
    with near.open(image_id) as response:
        first = response.read(MIB)
        link.wait_until_held()
        yield response, first


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
