# SPDX-License-Identifier: Apache-2.0

"""``dedupd-relay``: Nova gets its answers, whatever happens to the cache.

The relay, the cache's daemon, the storing host and Glance are real processes.
"""

import concurrent.futures
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid

import pytest

from tests.functional import glance_server
from tests.support import cache_harness
from tests.support import cached_glance
from tests.support.cached_glance import digest
from tests.support.cached_glance import exchange
from tests.support.cached_glance import other_there
from tests.support.cached_glance import require_same
from tests.support.cached_glance import rest_of
from tests.support.cached_glance import store
from tests.support import daemons
from tests.support import processes
from tests.support import relays
from tests.support import repositories

pytestmark = pytest.mark.slow

MIB = 1 << 20
noise = repositories.noise
eventually = repositories.eventually

#: This is more than all sockets of a download hold.
LARGE = 64 * MIB
# It must be in no log.
_TOKEN = 'a-token-that-nobody-may-see'


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    return tmp_path_factory.mktemp('relayed')


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
             'upstream_cert': storing.operator}) as daemon:
        daemon.program = cached_glance.PROGRAM
        yield daemon.start().wait_for_catalog()
        assert daemon.stop() == 0, daemon.text()
        assert 'Traceback' not in daemon.text()
    repositories.require_clean(place / 'cache')


@pytest.fixture(scope='module')
def relay(cache):
    with contextlib.closing(relays.Relay(cache)) as found:
        yield found.start()
        assert found.stop() == 0, found.text()
        assert 'Traceback' not in found.text(), found.text()
        assert _TOKEN not in found.text()


@pytest.fixture(autouse=True)
def mended(storing, link, cache, relay):
    """Everything runs afterwards, and requests go through the cache."""
    storing.glance.allow(**cache_harness.TOKENS,
                         **{_TOKEN: cache_harness.TOKENS['alice']})
    yield
    link.hold_after(None)
    if storing.daemon.process.poll() is not None:
        storing.daemon.start().wait_for_catalog()
    if storing.glance.pid is None:
        storing.glance.start()
    bring_back(cache)
    if relay.process.poll() is not None:
        relay.start()
    eventually(lambda: asks(cache, relay))


def bring_back(cache):
    """Have the cache's daemon run."""
    if cache.process.poll() is None:
        cache.process.send_signal(signal.SIGCONT)
    else:
        cache.start().wait_for_catalog()


def asks(cache, relay):
    """Return true if the relay passes a request on to the cache."""
    before = cache.counts()['requests']
    exchange(glance_server.Client(relay.url), 'GET', '/')
    return cache.counts()['requests'] > before


@pytest.fixture
def alice(storing):
    return storing.glance.client(_TOKEN)


@pytest.fixture
def near(storing, relay, mended):
    """Alice's client, through the relay."""
    return storing.glance.client(_TOKEN, relay.url)


def end_of(cache, how):
    """Kill the cache, or stop it so that it hangs."""
    if how == 'killed':
        cache.kill()
    else:
        processes.stop(cache.process.pid)


@pytest.fixture
def path(cache, relay):
    """The Unix socket at which the relay reaches the cache meanwhile."""
    def listen(where):
        cache.cache['listen'] = where
        cache.write_config()
        for one in (cache, relay):
            assert one.stop() == 0
            one.start()
        eventually(lambda: asks(cache, relay))

    before = cache.cache['listen']
    listen(str(cache.directory / 'relay.sock'))
    yield cache.cache['listen']
    listen(before)


# Long: this is the file's first test, and waits for Glance and two daemons.
@pytest.mark.skipif(os.geteuid() != 0, reason='only root becomes others')
def test_only_its_user_reaches_the_cache(cache, path):
    """Other users cannot use the cache's socket for the relay."""
    request = b'GET / HTTP/1.1\r\nHost: x\r\n\r\n'
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert daemons.connect_as(path, 65534, request) is None
    os.chmod(path, 0o666)
    try:
        assert daemons.connect_as(path, 65534, request) == b''
        assert daemons.connect_as(path, 0, request) == b'HTTP/1.1 '
    finally:
        os.chmod(path, 0o600)
    assert 'User 65534 was refused' in cache.text()


# -- while the cache runs -----------------------------------------------------

@pytest.mark.parametrize('method,path,body', [
    ('GET', '/', None), ('GET', '/v2/images?limit=1', None),
    ('GET', '/v2/images/nowhere/file', None), ('HEAD', '/v2/images', None),
    ('POST', '/v2/images', b'{"nonsense'), ('BREW', '/v2/images', None),
    ('PUT', '/v2/images/nowhere/file', b'x'), ('OPTIONS', '/v2/images', None),
    ('PATCH', '/v2/images/nowhere', b'[]')])
def test_everything_is_passed_on(alice, near, cache, method, path, body):
    before = cache.counts()['requests']
    require_same(alice, near, method, path, body,
                 **{'Content-Type': 'application/json'} if body else {})
    assert cache.counts()['requests'] - before == 1


def test_downloads_come_from_the_cache(alice, near, cache, relay):
    data = noise(12 * MIB + 77, 1)
    path = f'/v2/images/{store(alice, data)}/file'
    before, said = cache.counts(), relay.said()
    for part in ({}, {}, {'Range': 'bytes=5-'}, {'Range': 'bytes=9-1048580'},
                 {'Range': 'bytes=-7'}):
        require_same(alice, near, 'GET', path, **part)
    after = cache.counts()
    assert after['arriving'] - before['arriving'] == 1
    assert after['here'] - before['here'] == 4
    assert 'comes from Glance' not in said()


@pytest.mark.parametrize('size', [None, 3 * MIB + 5])
def test_an_upload(alice, near, size):
    data = noise(3 * MIB + 5, 2)
    image_id = near.create(name='through')['id']
    assert near.upload(image_id, iter([data]) if size is None else data,
                       size) == 204
    assert digest(alice.download(image_id)) == digest(data)
    assert near.delete(image_id) == 204


def test_the_caches_own_errors_are_passed_on(storing, near, cache):
    """The relay passes on the cache's error about Glance, without a retry."""
    storing.glance.kill()
    before = cache.counts()['requests']
    status, _, _, body = exchange(near, 'GET', '/v2/images')
    assert status == 503 and b'did not answer' in body
    assert cache.counts()['requests'] - before == 1


# -- without the cache --------------------------------------------------------

@pytest.mark.parametrize('how', ['killed', 'stopped'])
def test_the_cache_is_away(alice, near, cache, relay, how):
    data = noise(3 * MIB, 3)
    image_id = store(alice, data)
    path = f'/v2/images/{image_id}'
    end_of(cache, how)
    assert digest(near.download(image_id)) == digest(data)
    for request in ('GET', f'{path}/file'), ('HEAD', path), ('GET', path), (
            'GET', '/v2/images?limit=1'), ('GET', f'{path}/file'):
        require_same(alice, near, *request)
    assert near.download(image_id, 5, MIB) == data[5:MIB + 1]
    # Requests that change something work, since they cannot have been
    # processed.
    other = near.create(name='while it is away')['id']
    assert near.upload(other, iter([data]), None) == 204
    assert alice.show(other)['status'] == 'active'
    assert near.delete(other) == 204
    # The relay uses the cache again when it is back.
    bring_back(cache)
    eventually(lambda: asks(cache, relay))
    said = relay.said()
    before = cache.counts()['bytes_here']
    assert digest(near.download(image_id)) == digest(data)
    # Bytes are counted when they are sent. A stopped cache may have carried
    # out earlier requests, too.
    eventually(lambda: cache.counts()['bytes_here'] - before >= len(data))
    assert 'GET' not in said()


def test_nobody_waits_twice_for_a_cache_that_hangs(near, cache, relay):
    """Until the cache answers again, requests go to Glance at once."""
    processes.stop(cache.process.pid)
    said = relay.said()
    near.list()
    assert 'did not answer in time' in said()
    for _ in range(10):
        near.list()
    time.sleep(1.5)     # longer than the relay avoids a dead cache
    near.list()
    assert said().count('did not answer in time') == 1
    cache.process.send_signal(signal.SIGCONT)
    eventually(lambda: 'no longer hangs' in said())


@contextlib.contextmanager
def half_read(near, image_id, *part):
    """A download of which the client has read only the first MiB."""
    with near.open(image_id, *part) as response:
        yield response, response.read(MIB)


@pytest.mark.parametrize('how', ['killed', 'stopped'])
@pytest.mark.parametrize('begin', [0, 5 * MIB + 3])
def test_the_cache_fails_while_it_sends_what_it_has(alice, near, cache, relay,
                                                    how, begin):
    data = noise(LARGE, 4)
    image_id = store(alice, data)
    near.download(image_id)
    counts, said = cache.counts(), relay.said()
    part = (begin, LARGE - 2) if begin else ()
    with half_read(near, image_id, *part) as (response, first):
        assert cache.counts()['here'] - counts['here'] == 1
        end_of(cache, how)
        found, whole = rest_of(response, first)
    assert whole
    assert digest(found) == digest(data[begin:LARGE - 1] if begin else data)
    assert f'Image {image_id} comes from Glance from byte' in said()


@pytest.mark.parametrize('how', ['killed', 'stopped'])
def test_the_cache_fails_while_an_image_arrives(alice, near, cache, link,
                                                relay, how):
    data = noise(LARGE, 5 if how == 'killed' else 6)
    image_id = store(alice, data)
    said = relay.said()
    link.hold_after(24 * MIB)
    with half_read(near, image_id) as (response, first):
        link.wait_until_held()
        end_of(cache, how)
        found, whole = rest_of(response, first)
    assert whole and digest(found) == digest(data)
    assert f'Image {image_id} comes from Glance from byte' in said()


def test_a_cache_that_works_in_silence_is_waited_for(alice, near, cache, link,
                                                     relay):
    """The relay waits for a cache that works, longer than for a hung one."""
    data = noise(8 * MIB, 7)
    image_id = store(alice, data)
    said = relay.said()
    link.hold_after(MIB)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(near.download, image_id)
        link.wait_until_held()
        time.sleep(2)
        link.hold_after(None)
        assert digest(found.result()) == digest(data)
    assert 'comes from Glance' not in said()
    assert 'did not answer' not in said()


def test_a_stopped_cache_finishes_its_responses(alice, near, cache, relay):
    """The relay does not count the cache's orderly end as a failure."""
    data = noise(LARGE, 4)
    image_id = store(alice, data)
    near.download(image_id)
    said = relay.said()
    with half_read(near, image_id) as (response, first):
        cache.process.terminate()
        eventually(lambda: cached_glance.refused(cache))
        found, whole = rest_of(response, first)
    assert whole and digest(found) == digest(data)
    assert 'comes from Glance' not in said()


def test_neither_cache_nor_glance(storing, near, cache, relay):
    """The client may repeat the request after the answer with the reason."""
    cache.kill()
    storing.glance.kill()
    for method in 'GET', 'POST':
        status, _, _, body = exchange(near, method, '/v2/images')
        assert status == 503
        assert b'The Image service did not answer: ' in body
        assert storing.glance.url.encode() in body


def test_strangers_do_not_fill_the_disk(storing, near, cache, relay):
    """Requests of strangers while Glance is away leave the logs short."""
    storing.glance.kill()
    before = [os.path.getsize(path) for path in (relay.log, cache.log)]
    anybody = glance_server.Client(relay.url)
    for _ in range(100):
        assert exchange(anybody, 'GET', f'/{"%1b" * 2500}')[0] == 503
    for size, path in zip(before, (relay.log, cache.log)):
        assert os.path.getsize(path) - size < 40000
    assert 'GET /%1b' in relay.text() + cache.text()


def test_glance_is_away_when_the_rest_is_needed(storing, alice, near, cache):
    data = noise(LARGE, 4)
    image_id = store(alice, data)
    near.download(image_id)
    with half_read(near, image_id) as (response, first):
        storing.glance.kill()
        cache.kill()
        found, whole = rest_of(response, first)
    assert not whole and data.startswith(found)


def test_the_image_is_deleted_meanwhile(alice, near, cache):
    data = noise(LARGE, 4)
    image_id = store(alice, data)
    near.download(image_id)
    with half_read(near, image_id) as (response, first):
        alice.delete(image_id)
        cache.kill()
        found, whole = rest_of(response, first)
    assert not whole and data.startswith(found)


# -- another image ------------------------------------------------------------

@pytest.fixture
def wrong(storing, alice):
    """An id under which the storing host has another image; and both."""
    image_id = str(uuid.uuid4())
    # No other test has this data: the cache has earlier images' blocks.
    data, other = noise(LARGE, image_id), noise(LARGE, f'{image_id} 2')
    # The storing host's disk has other bytes than were hashed.
    other_there(storing, alice, image_id, data, other, known=data)
    yield image_id, data, other
    alice.delete(image_id)
    with repositories.open_repository(storing.repository) as repository:
        repository.delete(image_id)


def test_a_response_that_was_ended_on_purpose_stays_so(near, relay, wrong):
    """The cache found that it had sent another image's bytes."""
    image_id, data, other = wrong
    said = relay.said()
    with near.open(image_id) as response:
        found, whole = rest_of(response)
    assert not whole and other.startswith(found)
    assert "are not those of Glance's image" in said()
    # From then on the cache gives Glance's bytes.
    assert digest(near.download(image_id)) == digest(data)


def test_a_cache_that_is_killed_while_it_sends_another_image(
        near, cache, link, relay, wrong):
    """The relay itself notices that the bytes were another image's."""
    image_id, _, other = wrong
    said = relay.said()
    link.hold_after(24 * MIB)
    with half_read(near, image_id) as (response, first):
        link.wait_until_held()
        cache.kill()
        found, whole = rest_of(response, first)
    assert first and not whole and other.startswith(found)
    assert "are not those of Glance's image" in said()


# -- requests that change something -------------------------------------------

def pieces(data, at, event):
    """Yield the data, and call a function in its middle."""
    for begin in range(0, len(data), MIB):
        if begin == at:
            event()
        yield data[begin:begin + MIB]


@pytest.mark.parametrize('how', ['killed', 'stopped'])
def test_an_upload_is_cut_in_its_middle(alice, near, cache, how):
    """The client can send everything, and gets an answer.

    After a 503, or an error of the connection, Nova would send what it has not
    sent yet, and Glance would take that for the image.
    """
    data = noise(48 * MIB, 10)
    image_id = near.create(name='cut')['id']
    with contextlib.closing(near.connection()) as connection:
        connection.request(
            'PUT', f'/v2/images/{image_id}/file', pieces(
                data, 16 * MIB, lambda: end_of(cache, how)),
            {**near.headers, 'Content-Type': 'application/octet-stream',
             'Transfer-Encoding': 'chunked'}, encode_chunked=True)
        response = connection.getresponse()
        assert response.status == 502
        assert b'The Image service did not answer' in response.read()
    bring_back(cache)
    assert alice.show(image_id)['status'] == 'queued'
    assert near.upload(image_id, data) == 204
    assert digest(alice.download(image_id)) == digest(data)
    alice.delete(image_id)


def test_what_may_have_been_done_is_not_repeated(alice, near, cache):
    processes.stop(cache.process.pid)
    with pytest.raises(glance_server.HTTPError) as raised:
        near.create(name='only once')
    assert raised.value.status == 503
    assert 'only once' not in {image['name'] for image in alice.list()}


def test_a_refused_upload(storing, relay, mended):
    """The refusal arrives even where much is still to be sent."""
    stranger = storing.glance.client('nobody', relay.url)
    with contextlib.closing(stranger.connection()) as connection:
        connection.putrequest('PUT', '/v2/images/x/file')
        for name, value in {**stranger.headers, 'Content-Length': 1 << 33,
                            'Content-Type': 'application/octet-stream'
                            }.items():
            connection.putheader(name, str(value))
        connection.endheaders()
        assert connection.getresponse().status == 401


# -- many, and slow -----------------------------------------------------------

def test_slow_clients_need_little_memory(alice, near, relay):
    """Clients that read no more take little memory; others are served."""
    data = noise(LARGE, 4)
    image_id = store(alice, data)
    near.download(image_id)
    before = relay.memory()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(near.open(image_id)) for _ in range(40)]
        assert all(response.read(1) == data[:1] for response in slow)
        assert digest(near.download(image_id)) == digest(data)
        assert relay.memory() - before < 40 * MIB
    assert digest(near.download(image_id)) == digest(data)


def test_many_at_once_while_the_cache_dies(alice, near, cache):
    data = noise(24 * MIB, 11)
    image_id = store(alice, data)
    near.download(image_id)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = [pool.submit(near.download, image_id) for _ in range(24)]
        found[2].result()
        cache.kill()
        assert {digest(one.result()) for one in found} == {digest(data)}


# -- loops --------------------------------------------------------------------

@pytest.mark.parametrize('dead', [False, True])
def test_a_loop_is_found(tmp_path, storing, dead):
    """The relay detects a ``glance_url`` that leads to itself.

    The cache may be between them.
    """
    with storing.cache(repositories.create(tmp_path / 'loop')) as daemon, (
            contextlib.closing(relays.Relay(daemon))) as relay:
        daemon.write_config(glance_url=relay.url)
        if not dead:
            daemon.start()
        relay.start()
        status, _, _, body = exchange(glance_server.Client(relay.url), 'GET',
                                      '/v2/images')
        assert status == 508 and b'leads to dedupd-relay' in body


# -- the process --------------------------------------------------------------

@contextlib.contextmanager
def listening(address='127.0.0.1', family=socket.AF_INET):
    with socket.socket(family) as sock:
        sock.bind((address, 0))
        sock.listen(64)
        yield sock


@pytest.fixture
def spare(cache):
    """A relay that does not run."""
    options = dict(cache.cache)
    with contextlib.closing(relays.Relay(cache)) as found:
        del cache.cache['relay_listen']
        cache.write_config()
        yield found
    cache.cache = options
    cache.write_config()


def test_connections_wait_while_no_relay_runs(alice, cache, spare):
    """systemd holds the socket; the relay can be restarted, or be killed."""
    with listening() as sock:
        address = '127.0.0.1:{}'.format(sock.getsockname()[1])
        client = glance_server.Client(f'http://{address}',
                                      headers=alice.headers)
        for end in signal.SIGTERM, signal.SIGKILL, None:
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                found = [pool.submit(exchange, client, 'GET', '/v2/schemas')
                         for _ in range(4)]
                time.sleep(0.1)
                spare.start(sock.fileno())
                assert {one.result()[0] for one in found} == {
                    exchange(alice, 'GET', '/v2/schemas')[0]}
            spare.stop(end or signal.SIGTERM)


def test_two_sockets_are_passed(alice, spare):
    with listening() as first, listening('::1', socket.AF_INET6) as second:
        spare.start(first.fileno(), second.fileno())
        for address in ('127.0.0.1:{}'.format(first.getsockname()[1]),
                        '[::1]:{}'.format(second.getsockname()[1])):
            client = glance_server.Client(f'http://{address}',
                                          headers=alice.headers)
            assert exchange(client, 'GET', '/v2/images')[0] == 200
        assert spare.stop() == 0


@pytest.mark.needs('systemd')
def test_systemd_socket_activate(alice, cache, spare):
    """The real program starts the relay at the first connection."""
    with listening() as sock:
        address = '127.0.0.1:{}'.format(sock.getsockname()[1])
    with open(spare.log, 'ab') as log:
        spare.process = subprocess.Popen(
            ['systemd-socket-activate', '--listen', address, sys.executable,
             *relays.PROGRAM, '--config-file', str(cache.config)],
            cwd=daemons.ROOT, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log)
    client = glance_server.Client(f'http://{address}', headers=alice.headers)
    eventually(lambda: 'Listening on' in spare.text())
    assert exchange(client, 'GET', '/v2/images')[0] == 200
    assert spare.stop() == 0


def refusal(relay, *passed):
    """Return the error of a relay that does not start."""
    relay.launch(*passed)
    assert relay.process.wait(daemons.LIMIT) in (1, 2)
    return relay.text()


def test_what_is_passed_must_be_a_listening_socket(tmp_path, spare):
    with open(tmp_path / 'file', 'w') as file:
        assert 'descriptor 3 is not a socket' in refusal(spare, file.fileno())
    with socket.socket() as sock:
        assert 'descriptor 3 is not a TCP socket that listens' in refusal(
            spare, sock.fileno())
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / 'socket'))
        sock.listen()
        assert 'descriptor 3 is not a TCP socket that listens' in refusal(
            spare, sock.fileno())
    with listening() as good, socket.socket(
            socket.AF_INET, socket.SOCK_DGRAM) as sock:
        assert 'descriptor 4 is not a' in refusal(
            spare, good.fileno(), sock.fileno())


def test_other_hosts_do_not_reach_it(cache, spare):
    """The relay only listens on the host, as tokens pass it in clear."""
    with listening('0.0.0.0') as sock:
        assert 'listens on 0.0.0.0, port' in refusal(spare, sock.fileno())
    cache.cache['relay_listen'] = '0.0.0.0:9292'
    cache.write_config()
    assert '[cache] relay_listen: 0.0.0.0:9292 is not' in refusal(spare)


def test_what_it_needs(cache, spare):
    assert 'relay_listen is not set' in refusal(spare)
    place = cache.cache['listen']
    cache.cache['relay_listen'] = cache.cache['listen'] = spare.listen
    cache.write_config()
    assert 'are the same address' in refusal(spare)
    cache.cache['listen'] = place
    with listening() as sock:
        cache.cache['relay_listen'] = '127.0.0.1:{}'.format(
            sock.getsockname()[1])
        cache.write_config()
        assert 'cannot listen on 127.0.0.1:' in refusal(spare)


def test_it_needs_nothing_that_only_the_cache_needs(alice, cache, spare):
    """An operator's mistake ends the cache, and not the relay."""
    options = dict(cache.cache)
    cache.cache = {**options, 'upstream_ca': '/not/here', 'limit_mib': 'much',
                   'relay_listen': spare.listen}
    cache.write_config()
    spare.start()
    assert exchange(glance_server.Client(spare.url, headers=alice.headers),
                    'GET', '/v2/images')[0] == 200
    assert spare.stop() == 0


def test_the_engine_is_not_imported():
    """The relay does not import the engine, which could prevent its start."""
    done = subprocess.run(
        [sys.executable, '-c',
         'import sys; from dedupd.compute.relay import main; '
         'print(*[name for name in sys.modules if name.startswith('
         '("glance_dedup._engine", "glance_dedup.repository"))])'],
        cwd=daemons.ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
