# SPDX-License-Identifier: Apache-2.0

"""Spans of OSProfiler: a real Glance, a real Redis, and osprofiler's command.

A user with the key of Glance's ``[profiler]`` signs the headers of a request,
and finds the request's tree of spans in Redis.
"""

import json
import pathlib
import random
import subprocess
import sys
import time

from osprofiler import profiler
from osprofiler import web
import pytest
import redis

from tests.functional import glance_server
from tests import needs
from tests.support import cache_harness
from tests.support import daemons
from tests.support import ports
from tests.support import repositories

pytestmark = pytest.mark.slow

MIB = 1 << 20
KEY = 'a-key-that-signs-traces'
PASSWORD = 'the-password-of-redis'
SECONDS = 60


class Store:
    """A Redis for traces, on loopback, in memory alone."""

    def __init__(self, directory):
        self.port = ports.free_port()
        self.url = f'redis://:{PASSWORD}@127.0.0.1:{self.port}'
        self._process = subprocess.Popen(
            ['redis-server', '--port', str(self.port), '--bind', '127.0.0.1',
             '--save', '', '--requirepass', PASSWORD, '--dir', directory],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self.client = redis.Redis.from_url(self.url)
        try:
            wait(self._answers)
        except BaseException:
            self.stop()
            raise

    def _answers(self):
        assert self._process.poll() is None, 'redis-server ended'
        try:
            return self.client.ping()
        except redis.ConnectionError:
            return False

    def stop(self):
        self.client.close()
        self._process.kill()
        self._process.wait(SECONDS)

    def spans(self, base_id):
        """Return a trace's spans by id, from ``osprofiler trace show``."""
        said = subprocess.run(
            [pathlib.Path(sys.prefix) / 'bin' / 'osprofiler', 'trace', 'show',
             '--json', '--connection-string', self.url, base_id],
            capture_output=True, text=True, timeout=SECONDS)
        if said.returncode:
            assert 'not found' in said.stdout + said.stderr, said
            return {}
        found = {}

        def walk(span):
            for child in span['children']:
                found[child['trace_id']] = child
                walk(child)
        walk(json.loads(said.stdout))
        return found

    def all(self):
        """Return all that was written, as text."""
        return '\n'.join(
            str(self.client.lrange(key, 0, -1))
            for key in self.client.scan_iter('osprofiler*'))


def wait(condition):
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.fixture(scope='module')
@needs.of('redis')
def store(tmp_path_factory):
    found = Store(tmp_path_factory.mktemp('redis'))
    yield found
    found.stop()


@pytest.fixture(scope='module')
def server(store, tmp_path_factory):
    directory = tmp_path_factory.mktemp('glance')
    stores = {'dedup1': {'type': 'dedup',
                         'dedup_store_datadir': directory / 'repository',
                         'dedup_store_filter_dir': directory}}
    with glance_server.GlanceServer(
            directory / 'glance', stores, processes=1,
            options=profiling(store)) as found:
        yield found


def profiling(store):
    return {'profiler': {'enabled': True, 'hmac_keys': KEY,
                         'connection_string': store.url}}


class Trace:
    """A client that signs one trace's headers with a key."""

    def __init__(self, url, key=KEY, **headers):
        profiler.clean()
        self.base_id = profiler.init(key).get_base_id()
        self.headers = {**headers, **web.get_trace_id_headers()}
        profiler.clean()
        self.glance = glance_server.Client(url, headers=self.headers)


def named(store, trace, name):
    """Return the one span of this name, once it has ended, and its parent."""
    def ended():
        spans = store.spans(trace.base_id)
        found = [span for span in spans.values()
                 if span['info']['name'] == name
                 and f'meta.raw_payload.{name}-stop' in span['info']]
        return [(found[0], spans.get(found[0]['parent_id']))] if found else []
    (span, parent), = wait(ended)
    return span['info'][f'meta.raw_payload.{name}-stop']['info'], parent


def parents(store, trace, name):
    """Return the names of the spans above those of this name.

    This waits until all are there.
    """
    def known():
        spans = store.spans(trace.base_id)
        above = {span['parent_id'] for span in spans.values()
                 if span['info']['name'] == name}
        if above <= spans.keys():
            return [{spans[one]['info']['name'] for one in above}]
        return []

    found, = wait(known)
    return found


def image(client, data):
    made = client.create(name='one')['id']
    client.upload(made, data)
    return made


def test_an_upload(server, store):
    """The span has the new bytes, and is a child of Glance's own."""
    data = random.Random(1).randbytes(2 * MIB) + bytes(MIB)
    first, second = Trace(server.url), Trace(server.url)
    image(first.glance, data)
    image(second.glance, data)
    facts, parent = named(store, first, 'dedup_add')
    assert facts['bytes'] == 3 * MIB and facts['zero_bytes'] == MIB
    assert facts['new_bytes'] == 2 * MIB and facts['stored_bytes'] > 2 * MIB
    assert parent['info']['name'] == 'wsgi'
    assert named(store, second, 'dedup_add')[0]['new_bytes'] == 0


def test_a_download(server, store):
    """The store's span ends with the last byte, after Glance's own."""
    trace = Trace(server.url)
    data = random.Random(2).randbytes(3 * MIB)
    made = image(glance_server.Client(server.url), data)
    assert trace.glance.download(made) == data
    facts, parent = named(store, trace, 'dedup_get')
    assert facts['bytes'] == 3 * MIB and facts['daemon_bytes'] == 0
    assert parent['info']['name'] == 'wsgi'


def test_a_deletion(server, store):
    trace = Trace(server.url)
    made = image(glance_server.Client(server.url), b'data')
    trace.glance.delete(made)
    assert named(store, trace, 'dedup_delete')[1]['info']['name'] == 'wsgi'


def test_an_error(server, store):
    """The span has the error's class, so that OSProfiler lists the trace."""
    trace = Trace(server.url)
    made = trace.glance.create(name='one')['id']
    trace.glance.request('PUT', f'/v2/images/{made}/file', body=bytes(100),
                         headers={'Content-Type': 'application/octet-stream',
                                  'x-openstack-image-size': '99'},
                         expect=(400,))
    facts, _ = named(store, trace, 'dedup_add')
    assert facts['etype'] == 'glance_store.exceptions.Invalid'
    assert 'bytes' not in facts


def test_who_lacks_the_key_begins_no_trace(server, store):
    hostile = Trace(server.url, 'another-key')
    made = image(hostile.glance, b'data')
    trace = Trace(server.url)
    trace.glance.delete(made)
    named(store, trace, 'dedup_delete')
    assert hostile.base_id not in store.all()


def test_traces_have_no_secrets(server, store):
    trace = Trace(server.url)
    made = image(trace.glance, b'data')
    trace.glance.download(made)
    trace.glance.delete(made)
    for name in ('dedup_add', 'dedup_get', 'dedup_delete'):
        named(store, trace, name)
    told = store.all()
    assert made in told and 'dedup_get' in told
    for secret in ('dedup://', KEY, PASSWORD):
        assert secret not in told


@pytest.fixture(scope='module')
def storing(store, tmp_path_factory):
    host = cache_harness.Storing(tmp_path_factory.mktemp('storing'))
    host.glance.options = profiling(store)
    with host:
        yield host


@pytest.fixture(scope='module')
def cache(store, storing, tmp_path_factory):
    """A compute host's cache that continues traces."""
    daemon = storing.cache(
        repositories.create(tmp_path_factory.mktemp('cache') / 'repository'))
    options = profiling(store)['profiler']
    # The daemon's log has everything: debug is on.
    daemon.config.write_text(daemon.config.read_text()
                             + glance_server.ini({'profiler': options}))
    with daemon:
        yield daemon.start().wait_for_catalog()
        assert daemon.stop() == 0, daemon.text()
        assert PASSWORD not in daemon.text() and KEY not in daemon.text()


def test_a_cache_stands_between_nova_and_glance(cache, storing, store):
    """The cache's span has Glance's below it, and names the bytes' source."""
    data = random.Random(3).randbytes(2 * MIB)
    made = image(storing.glance.client('alice'), data)

    def download():
        trace = Trace(cache.url, **{'X-Auth-Token': 'alice'})
        assert trace.glance.download(made) == data
        return trace

    first = download()
    facts, _ = named(store, first, 'dedupd_cache')
    assert facts['source'] == 'arriving' and facts['status'] == 200
    assert facts['bytes'] == len(data)
    # Glance gave one byte of it.
    assert parents(store, first, 'wsgi') == {'dedupd_cache'}
    assert parents(store, first, 'dedup_get') == {'wsgi'}
    cache.wait_for(lambda: cache.counts()['under_way'] == 0)
    assert named(store, download(), 'dedupd_cache')[0]['source'] == 'here'


def test_a_cache_passes_uploads_on_in_their_trace(cache, store):
    trace = Trace(cache.url, **{'X-Auth-Token': 'alice'})
    image(trace.glance, b'data')
    named(store, trace, 'dedup_add')
    assert parents(store, trace, 'wsgi') == {'dedupd_cache'}


@pytest.mark.parametrize('change', [
    {'X-Trace-HMAC': '0' * 40}, {'X-Trace-HMAC': '\xe9' * 40},
    {'X-Trace-Info': 'e30='}, {'X-Trace-Info': '\xe9'}, {'X-Trace-HMAC': ''}])
def test_a_cache_answers_hostile_headers_without_a_span(cache, store, change):
    """The headers are passed on; some of them break OSProfiler in Glance."""
    hostile = Trace(cache.url, **{'X-Auth-Token': 'alice'})
    hostile.glance.headers.update(change)
    image_id = '5b1c6f5e-0d5e-4b5c-8b3e-2f6f1c9a7d10'
    hostile.glance.request('GET', f'/v2/images/{image_id}', expect=(404, 503))
    trace = Trace(cache.url, **{'X-Auth-Token': 'alice'})
    trace.glance.request('GET', f'/v2/images/{image_id}', expect=(404,))
    named(store, trace, 'dedupd_cache')
    assert hostile.base_id not in store.all()


@pytest.mark.parametrize('mode, keys, said', [
    ('store', KEY, 'only for mode = cache'),
    ('cache', 'SECRET_KEY', 'hmac_keys is not set')])
def test_options_that_do_not_go_together(cache, mode, keys, said):
    text = cache.config.read_text()
    text = text.replace('mode = cache', f'mode = {mode}')
    text = text.replace(f'hmac_keys = {KEY}', f'hmac_keys = {keys}')
    config = cache.config.with_name('wrong.conf')
    config.write_text(text)
    result = subprocess.run(
        [sys.executable, '-m', 'dedupd.daemon', '--config-file', config],
        capture_output=True, text=True, timeout=SECONDS, cwd=daemons.ROOT)
    assert result.returncode == 2 and said in result.stderr
