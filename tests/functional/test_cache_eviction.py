# SPDX-License-Identifier: Apache-2.0

"""A full cache: a real cache of a real storing host.

It has room for two images of nine megabytes, beside what is kept for the
catalog.
"""

import contextlib
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

from dedupd.compute.cache import cache_catalog
from tests.support import cache_harness
from tests.support import daemons
from tests.support import repositories

pytestmark = pytest.mark.slow

MIB = 1 << 20
LIMIT_MIB = 72      # two images, and a cache's own files
SMALL = {'block_size': 4096, 'group_slots': 256, 'segment_size': 65536}
# The byte of a recipe that its readers share (N3).
_USERS = 1
# This daemon checks the limit more often than once a minute.
PROGRAM = daemons.impatient(evict=1)


@pytest.fixture(scope='module')
def storing(tmp_path_factory):
    with cache_harness.Storing(tmp_path_factory.mktemp('storing'),
                               SMALL) as host:
        yield host


@pytest.fixture(scope='module')
def alice(storing):
    return storing.glance.client('alice')


@pytest.fixture(scope='module')
def model(alice):
    """Images of noise, by their ids, in the order of their upload."""
    model = {}
    for seed in range(5):
        image_id = alice.create(name=f'image {seed}')['id']
        model[image_id] = repositories.noise(30 * MIB, seed)
        alice.upload(image_id, model[image_id])
    return model


@pytest.fixture
def cache(storing, model, tmp_path):
    path = repositories.create(tmp_path / 'cache', **SMALL)
    with storing.cache(path, {'limit_mib': LIMIT_MIB}) as daemon:
        daemon.path = path
        daemon.program = PROGRAM
        yield daemon.start().wait_for_catalog()
        if daemon.process.poll() is None:
            assert daemon.stop() == 0, daemon.text()
        assert 'Traceback' not in daemon.text()
    repositories.require_clean(path)


def fetch(storing, cache, image_id):
    return storing.glance.client('alice', cache.url).download(image_id)


def here(cache):
    with repositories.open_repository(cache.path) as repo:
        return set(repo.images())


def settled(cache, *images):
    """Wait until exactly these are held, and the cache is within its limit."""
    def condition():
        counts = cache.counts()['held']
        return (here(cache) == set(images)
                and counts['disk_bytes'] <= counts['limit_bytes'])
    # The limit is less than a test may take, so that the daemon's log is
    # shown.
    cache.wait_for(condition, 120)


# Long: this is the file's first test, and waits for Glance and two daemons.
def test_the_least_recently_used_goes(storing, cache, model):
    a, b, c, d, _ = model
    for image_id in (a, b, a, c):
        assert fetch(storing, cache, image_id) == model[image_id]
    settled(cache, a, c)
    counts = cache.counts()
    assert counts['held']['limit_bytes'] == LIMIT_MIB * MIB
    assert counts['held']['images'] == 2 and counts['held']['evictions'] == 1
    assert f'Evicted image {b}' in cache.text()
    # The image is fetched again; another daemon of this cache knows the order,
    # too.
    assert fetch(storing, cache, b) == model[b]
    settled(cache, b, c)
    assert cache.stop() == 0
    cache.start().wait_for_catalog()
    assert fetch(storing, cache, c) == model[c]
    assert fetch(storing, cache, d) == model[d]
    settled(cache, c, d)


def test_what_is_read_stays(storing, cache, model):
    a, b, c, d, _ = model
    fetch(storing, cache, a)
    with slow_reader(cache, a) as response:
        begun = response.read(1000)
        for image_id in (b, c, d):
            assert fetch(storing, cache, image_id) == model[image_id]
        settled(cache, a, d)
        assert begun + response.read() == model[a]
    # The daemon closes an image a moment after its client has all of it.
    cache.wait_for(lambda: repositories.lock_held(
        cache.path / 'images' / a, _USERS) is None)
    fetch(storing, cache, b)
    settled(cache, b, d)


@contextlib.contextmanager
def slow_reader(cache, image_id):
    """A response with more bytes than sockets hold."""
    host, _, port = cache.cache['listen'].rpartition(':')
    with contextlib.closing(http.client.HTTPConnection(
            host, int(port), timeout=daemons.LIMIT)) as connection:
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF,
                                   256 << 10)
        connection.request('GET', f'/v2/images/{image_id}/file',
                           headers={'X-Auth-Token': 'alice'})
        yield connection.getresponse()


def test_what_is_larger_than_all_passes_through(storing, cache, alice):
    data = repositories.noise((LIMIT_MIB + 1) * MIB, 99)
    image_id = alice.create(name='large')['id']
    alice.upload(image_id, data)
    assert fetch(storing, cache, image_id) == data
    assert here(cache) == set()
    alice.request('DELETE', f'/v2/images/{image_id}')


def test_a_lower_limit(storing, cache, model):
    """SIGHUP applies a new limit, and refuses one that nothing fits into."""
    a, b, *_ = model
    for image_id in (a, b):
        fetch(storing, cache, image_id)
    cache.cache['limit_mib'] = 46
    cache.write_config()
    cache.process.send_signal(signal.SIGHUP)
    settled(cache, b)
    cache.cache['limit_mib'] = 5
    cache.write_config()
    cache.process.send_signal(signal.SIGHUP)
    cache.wait_for(lambda: 'evict failed: limit_mib: 5 is too small'
                   in cache.text())
    assert here(cache) == {b}
    assert cache.stop() == 0
    cache.start(wait=False)
    assert cache.process.wait(daemons.LIMIT) == 2
    assert 'Choose at least 33, or 0 for no limit' in cache.text()
    cache.cache['limit_mib'] = LIMIT_MIB
    cache.write_config()
    cache.start().wait_for_catalog()


def command(cache, *arguments):
    done = subprocess.run(
        [sys.executable, '-m', 'glance_dedup.cli.entry', '--socket',
         cache.socket, *arguments], cwd=daemons.ROOT, capture_output=True,
        text=True, timeout=daemons.LIMIT)
    assert 'Traceback' not in done.stderr
    return done


def test_the_command(storing, cache, model, tmp_path):
    a, b, *_ = model
    for image_id in (a, b):
        fetch(storing, cache, image_id)
    dry = command(cache, 'task', 'evict', '--limit', '46M', '--dry-run',
                  '-f', 'json')
    assert json.loads(dry.stdout)['images'] == [a], dry.stderr
    assert here(cache) == {a, b}
    done = command(cache, 'task', 'evict', '--limit', '46M', '-f', 'json')
    assert json.loads(done.stdout)['evicted'] == [a], done.stderr
    assert here(cache) == {b}
    done = command(cache, 'task', 'evict', '-f', 'json')
    assert json.loads(done.stdout)['evicted'] == []
    done = command(cache, 'task', 'evict', '--limit', '5M')
    assert done.returncode == 3 and 'too small' in done.stderr
    done = command(storing.daemon, 'task', 'evict')
    assert done.returncode == 3 and 'does not serve a cache' in done.stderr
    assert cache.stop() == 0
    arguments = ['--repository', str(cache.path), 'task', 'evict']
    done = command(cache, *arguments)
    assert done.returncode == 2 and 'use --limit' in done.stderr
    done = command(cache, *arguments, '--limit', '33M', '-f', 'json')
    assert json.loads(done.stdout)['evicted'] == [b], done.stderr
    path = repositories.create(tmp_path / 'store')
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'precious', b'precious')
    done = command(cache, '--repository', str(path), 'task', 'evict',
                   '--limit', '200M')
    assert done.returncode == 2 and 'is no cache' in done.stderr


def test_a_store_is_no_cache(storing, model, tmp_path):
    """A store's directory, named by mistake, is refused, and stays whole."""
    with storing.cache(storing.repository, {'limit_mib': 33}) as daemon:
        daemon.start(wait=False)
        assert daemon.process.wait(daemons.LIMIT) == 2
        assert 'is no cache: it has no cache.json' in daemon.text()
    assert not (storing.repository / cache_catalog.NAME).exists()
    with repositories.open_repository(storing.repository) as repo:
        assert set(repo.images()) >= set(model)


def test_a_list_that_is_no_good(storing, cache, model):
    a, b, *_ = model
    for image_id in (a, b):
        fetch(storing, cache, image_id)
    assert cache.stop() == 0
    file = cache.path / cache_catalog.NAME
    file.write_bytes(file.read_bytes()[:-20])
    # No eviction may collect blocks that the download is about to find.
    cache.cache['limit_mib'] = 0
    cache.write_config()
    cache.start().wait_for_catalog()
    assert 'cache.json is invalid' in cache.text()
    received = cache.counts()['arrivals']
    assert fetch(storing, cache, a) == model[a]
    assert here(cache) == {a, b}
    # No blocks were moved for that.
    assert (cache.counts()['arrivals']['received_bytes']
            - received['received_bytes'] < MIB // 2)


@pytest.mark.long
def test_killed_again_and_again(storing, cache, model):
    rng = random.Random(5)
    names = list(model)
    for _ in range(4):
        for _ in range(3):
            image_id = rng.choice(names)
            assert fetch(storing, cache, image_id) == model[image_id]
        time.sleep(rng.random() / 4)
        cache.kill()
        repositories.require_clean(cache.path)
        cache.start().wait_for_catalog()
    cache.wait_for(lambda: (
        cache.counts()['held']['disk_bytes'] or 1 << 60)
        <= LIMIT_MIB * MIB, daemons.TASK_LIMIT)
    # A cache killed before it wrote the catalog may have no image, but is
    # intact.
    cache_catalog.decode((cache.path / cache_catalog.NAME).read_bytes())
