# SPDX-License-Identifier: Apache-2.0

"""The caches of a rack request data from each other, then the storing host.

The tests use a real Glance and real daemons, each with a TLS listener. However
a neighbour behaves, the image arrives as it would have without it. The rules
L1 to L8 are in ``cache.rst``, "Caches that lend".
"""

import concurrent.futures
import contextlib
import http.client
import http.server
import json
import ssl
import threading

import pytest

from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import wire
from tests.support import cache_harness
from tests.support import certificates
from tests.support import daemons
from tests.support import ports
from tests.support import repositories

pytestmark = pytest.mark.slow

MIB = 1 << 20
noise = repositories.noise
#: An id that no repository has.
STRANGER = 'ab' * 16


def program(factor):
    """A daemon with so many times the usual patience."""
    return ['-c', 'from dedupd import daemon; import sys; '
            'from dedupd.compute.cache import block_lending; '
            'from dedupd.compute.cache import glance_proxy, neighbour_caches; '
            'from dedupd.serve import image_handlers; '
            f'factor = {factor}; '
            'neighbour_caches.SILENT_SECONDS *= factor; '
            'neighbour_caches.LOT_SECONDS *= factor; '
            'neighbour_caches.CONNECT_SECONDS *= max(1, factor); '
            'neighbour_caches.GREETING_SECONDS *= max(1, factor); '
            'block_lending.WAIT_SECONDS *= factor; '
            'image_handlers.STALLED *= max(1, factor); '
            'glance_proxy.OPEN_SECONDS *= max(1, factor); '
            'sys.exit(daemon.main())']


#: Its limits are so long that no neighbour is given up by mistake.
PATIENT = program(8)
#: It soon detects a neighbour that hangs.
IMPATIENT = program(0.3)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    return tmp_path_factory.mktemp('neighbours')


@pytest.fixture(scope='module')
def storing(place):
    with cache_harness.Storing(place) as host:
        yield host


@pytest.fixture
def alice(storing):
    return storing.glance.client('alice')


def store(client, data, **properties):
    image_id = client.create(name='image', **properties)['id']
    client.upload(image_id, data)
    return image_id


class Rack:
    """Caches, each of which knows some others.

    :ivar daemons: those that run
    """

    def __init__(self, storing, place):
        self.storing = storing
        self._place = place
        self._stack = contextlib.ExitStack()
        self._paths = []
        self.daemons = []

    def add(self, neighbours, listen=None, operator=True, peer=None,
            program=PATIENT):
        """Start one more cache.

        :param neighbours: addresses without their scheme
        :param operator: whether it has an operator's certificate
        """
        path = self._place / f'cache-{len(self._paths)}'
        repositories.create(path)
        self._paths.append(path)
        options = {'neighbours': ', '.join(
            f'https://{address}' for address in neighbours)}
        if operator:
            options['upstream_cert'] = self.storing.operator
        if peer is not None:
            options['upstream_url'] = f'https://{peer}'
        authority = self.storing.authority
        daemon = self.storing.cache(
            path, options, tls_cert=authority.issue(f'tls-{path.name}'),
            listen=listen or address(), tls_client_ca=authority.path)
        daemon.program = program
        self._stack.enter_context(daemon)
        daemon.start().wait_for_catalog()
        self.daemons.append(daemon)
        return daemon

    def of(self, number, **options):
        """Start so many caches, which know each other and themselves."""
        addresses = [address() for _ in range(number)]
        return [self.add(addresses, listen, **options)
                for listen in addresses]

    def close(self):
        with self._stack:
            for daemon in self.daemons:
                if daemon.process.poll() is None:
                    assert daemon.stop() == 0, daemon.text()
                    text = daemon.text()
                    assert 'Traceback' not in text, text[
                        text.find('Traceback'):][:3000]
        for path in self._paths:
            repositories.require_clean(path)

    # -- requests to the caches ---------------------------------------------

    def download(self, daemon, image_id):
        """Download as Nova on that host does."""
        return self.storing.glance.client('alice', daemon.url).download(
            image_id)

    def lent(self, daemon, image_id, size, **client):
        """Return an image's bytes that a cache lends, by their offset."""
        with daemon_client.Client(
                f'https://{daemon.options["listen"]}',
                ca_file=self.storing.authority.path, **client) as found:
            with found.lent_blocks(image_id, [(0, size)] if size else [],
                                   STRANGER) as loan:
                return {offset: bytes(data) for frame in loan
                        for offset, data in frame.blocks()}


@pytest.fixture
def rack(storing, tmp_path):
    with contextlib.closing(Rack(storing, tmp_path)) as found:
        yield found


def address():
    return f'127.0.0.1:{ports.free_port()}'


def at_once(rack, daemons_, image_id):
    """Return the data that the hosts get for simultaneous requests."""
    barrier = threading.Barrier(len(daemons_))

    def download(daemon):
        barrier.wait(daemons.LIMIT)
        return rack.download(daemon, image_id)

    with concurrent.futures.ThreadPoolExecutor(len(daemons_)) as pool:
        return list(pool.map(download, daemons_))


def neighbours(daemon):
    return daemon.counts()['neighbours']


def from_storing(daemon):
    """Return the count of bytes that came from the storing host."""
    return daemon.counts()['arrivals']['received_bytes']


def sent(storing):
    return storing.daemon.status()['reads']['bytes']


# -- together -----------------------------------------------------------------

# Long: eight daemons start, and each gets 48 MiB.
def test_eight_hosts_request_one_new_image_at_once(storing, alice, rack):
    data = noise(48 * MIB, 1)
    image_id = store(alice, data)
    hosts = rack.of(8)
    before = sent(storing)
    assert all(found == data for found in at_once(rack, hosts, image_id))
    total = sum(map(from_storing, hosts))
    assert len(data) <= total <= 2.5 * len(data), total / len(data)
    print(f'the storing host sent {total / len(data):.2f} of the image')
    assert sent(storing) - before <= 2.5 * len(data)
    lent = sum(neighbours(host)['lent_bytes'] for host in hosts)
    assert lent >= 5 * len(data)
    for host in hosts:
        assert not neighbours(host)['failures'], neighbours(host)


def test_a_later_host_gets_nearly_everything_from_neighbours(alice, rack):
    data = noise(12 * MIB, 2)
    image_id = store(alice, data)
    first, second, third, later = rack.of(4)
    for host in (first, second):
        assert rack.download(host, image_id) == data
    assert rack.download(later, image_id) == data
    assert from_storing(later) < len(data) // 50
    assert neighbours(later)['received_bytes'] >= len(data)
    assert not neighbours(third)['lent_bytes']


def test_nobody_waits_for_itself_in_a_ring(storing, alice, rack):
    """No host waits for itself if each of three uses the next."""
    data = noise(12 * MIB, 3)
    image_id = store(alice, data)
    addresses = [address() for _ in range(3)]
    hosts = [rack.add([addresses[(number + 1) % 3]], listen)
             for number, listen in enumerate(addresses)]
    assert all(found == data for found in at_once(rack, hosts, image_id))
    for host in hosts:
        # No neighbour was given up because it waited.
        assert not neighbours(host)['failures'], neighbours(host)


# -- itself -------------------------------------------------------------------

def test_a_list_of_only_itself(alice, rack):
    data = noise(5 * MIB, 4)
    image_id = store(alice, data)
    own = address()
    host = rack.add([own], own)
    assert rack.download(host, image_id) == data
    assert from_storing(host) >= len(data)
    found = neighbours(host)
    assert found['hosts'][0]['is_here'] and not found['failures']
    assert not found['lent_bytes']


def test_hosts_without_certificates_help_each_other(alice, rack):
    """Hosts lend to each other for the tokens of their users."""
    data = noise(12 * MIB, 5)
    image_id = store(alice, data)
    hosts = rack.of(3, operator=False)
    assert all(found == data for found in at_once(rack, hosts, image_id))
    assert sum(map(from_storing, hosts)) <= 2 * len(data)
    for host in hosts:
        assert not neighbours(host)['failures'], host.text()


# -- neighbours that misbehave ------------------------------------------------

class Neighbour(http.server.ThreadingHTTPServer):
    """A neighbour that answers greetings well, and others as the test says.

    :param behave: called with the handler, and the requested ranges
    """

    daemon_threads = True

    def __init__(self, cert, behave):
        super().__init__(('127.0.0.1', 0), _Handler)
        self.behave = behave
        self.over = threading.Event()
        self.requests = 0
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.address = f'127.0.0.1:{self.server_address[1]}'
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        pass

    def close(self):
        self.over.set()
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_POST(self):
        ranges = json.loads(self.rfile.read(
            int(self.headers['Content-Length'])))['ranges']
        if ranges:
            self.server.requests += 1
            self.server.behave(self, ranges)
        else:
            self.answer(wire.END_FRAME)

    def answer(self, body, stored=1 << 40, more=0):
        """Answer, and announce more bytes than come."""
        self.send_response(200)
        self.send_header('Content-Length', str(len(body) + more))
        self.send_header('Dedup-Repository', 'cd' * 16)
        self.send_header('Dedup-Stored', str(stored))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *args):
        pass


def lie(handler, ranges):
    handler.answer(wire.plain_frame([(ranges[0][0], noise(4096, 99))])
                   + wire.END_FRAME)


def hang(handler, ranges):
    handler.server.over.wait(daemons.LIMIT)


def stop_in_a_frame(handler, ranges):
    handler.answer(wire.plain_frame([(ranges[0][0], noise(4096, 99))])[:99],
                   more=100000)
    handler.server.over.wait(daemons.LIMIT)


def end_early(handler, ranges):
    handler.answer(wire.END_FRAME)


def break_off(handler, ranges):
    handler.answer(b'', more=100)
    handler.connection.close()


def fail(handler, ranges):
    handler.send_error(500)


def talk_nonsense(handler, ranges):
    handler.answer(b'nonsense' * 100)


@pytest.mark.parametrize('behave, words, program', [
    (lie, 'fingerprint', PATIENT), (hang, 'time', IMPATIENT),
    (stop_in_a_frame, 'time', IMPATIENT), (end_early, 'announced', PATIENT),
    (break_off, '', PATIENT), (fail, '500', PATIENT),
    (talk_nonsense, 'not a frame', PATIENT)], ids=lambda value: getattr(
        value, '__name__', ''))
def test_a_bad_neighbour(storing, alice, rack, behave, words, program):
    data = noise(6 * MIB, 6)
    image_id = store(alice, data)
    with contextlib.closing(Neighbour(storing.authority.issue('bad'),
                                      behave)) as bad:
        host = rack.add([bad.address], program=program)
        assert rack.download(host, image_id) == data
        assert bad.requests
        found, = neighbours(host)['hosts']
        assert found['failures'] and found['aside']
        assert words in found['last_failure'], found
        assert from_storing(host) >= len(data)
        # For the next image the cache sends this neighbour no request.
        before = bad.requests
        other = store(alice, noise(3 * MIB, 7))
        assert rack.download(host, other) == noise(3 * MIB, 7)
        assert bad.requests == before


def test_a_neighbour_with_less_is_not_put_aside(storing, alice, rack):
    data = noise(6 * MIB, 8)
    image_id = store(alice, data)

    def give_nothing(handler, ranges):
        handler.answer(wire.END_FRAME, stored=0)

    with contextlib.closing(Neighbour(storing.authority.issue('less'),
                                      give_nothing)) as other:
        host = rack.add([other.address])
        assert rack.download(host, image_id) == data
        assert other.requests == 3
        assert not neighbours(host)['failures']


def test_a_wrong_certificate(alice, rack, tmp_path):
    data = noise(3 * MIB, 9)
    image_id = store(alice, data)
    stranger = certificates.Authority(tmp_path, 'stranger')
    with contextlib.closing(Neighbour(stranger.issue('wrong'),
                                      end_early)) as bad:
        host = rack.add([bad.address])
        assert rack.download(host, image_id) == data
        assert not bad.requests
        found, = neighbours(host)['hosts']
        assert found['aside']
        assert 'certificate' in found['last_failure'].lower()


def test_nobody_is_there(alice, rack):
    data = noise(3 * MIB, 10)
    image_id = store(alice, data)
    host = rack.add([address()])
    assert rack.download(host, image_id) == data
    assert neighbours(host)['aside'] == 1


def test_a_neighbour_that_is_killed_in_the_middle(alice, rack):
    data = noise(12 * MIB, 11)
    image_id = store(alice, data)
    first = rack.add([])
    assert rack.download(first, image_id) == data
    with contextlib.closing(
            cache_harness.Link(first.options['listen'])) as link:
        link.hold_after(3 * MIB)
        host = rack.add([link.address])
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            done = pool.submit(rack.download, host, image_id)
            link.wait_until_held()
            first.kill()
            link.hold_after(None)
            assert done.result(daemons.LIMIT) == data
    assert neighbours(host)['aside'] == 1
    # The bytes that the first neighbour had sent were used.
    assert from_storing(host) < len(data) - MIB


# -- permissions --------------------------------------------------------------

def refusal(rack, *arguments, **client):
    with pytest.raises(client_errors.Refused) as refused:
        rack.lent(*arguments, **client)
    return refused.value.code


def before_its_body(rack, host, image_id, token):
    """Return the answer to a request whose body does not come."""
    connection = http.client.HTTPSConnection(
        *host.options['listen'].split(':'), timeout=daemons.LIMIT,
        context=ssl.create_default_context(
            cafile=rack.storing.authority.path))
    with contextlib.closing(connection):
        connection.putrequest('POST', f'/v1/cached/{image_id}/blocks')
        connection.putheader('X-Auth-Token', token)
        connection.putheader('Content-Length', '1000000')
        connection.endheaders()
        return connection.getresponse().status


def require_only_for_alice(rack, host, image_id, size):
    """Other users get nothing, not even the answer that the image is here."""
    assert refusal(rack, host, image_id, size, token='bob') == 404
    assert refusal(rack, host, image_id, size, token='nobody') == 401
    assert refusal(rack, host, image_id, size) == 401
    assert before_its_body(rack, host, image_id, 'bob') == 404
    stranger = certificates.Authority(rack.storing.place, 'other')
    with pytest.raises(client_errors.DaemonUnavailable):
        rack.lent(host, image_id, size, cert=stranger.issue('other-one'))


@pytest.mark.parametrize('operator', [False, True])
def test_who_is_lent_an_image_that_is_here(storing, alice, rack, operator):
    data = noise(3 * MIB, 12)
    image_id = store(alice, data)
    host = rack.add([], operator=operator)
    assert rack.download(host, image_id) == data
    for client in ({'token': 'alice'}, {'cert': storing.operator}):
        found = rack.lent(host, image_id, len(data), **client)
        assert sum(map(len, found.values())) == len(data)
        for offset, block in found.items():
            assert data[offset:offset + len(block)] == block
    require_only_for_alice(rack, host, image_id, len(data))
    storing.glance.allow(bob=cache_harness.TOKENS['bob'])
    try:
        # The lender refuses even with a hash that was proven before.
        assert refusal(rack, host, image_id, 0, token='carol') == 401
    finally:
        storing.glance.allow(**cache_harness.TOKENS)


@pytest.mark.parametrize('operator', [False, True])
def test_who_is_lent_an_image_that_arrives(storing, alice, rack, operator):
    """The cache lends to a token only if the image was proven for a token."""
    data = noise(12 * MIB, 13)
    image_id = store(alice, data)
    with contextlib.closing(cache_harness.Link(storing.listen)) as link:
        link.hold_after(5 * MIB)
        host = rack.add([], operator=operator, peer=link.address,
                        program=IMPATIENT)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            done = pool.submit(rack.download, host, image_id)
            link.wait_until_held()
            before = neighbours(host)['lent_bytes']
            require_only_for_alice(rack, host, image_id, len(data))
            if operator:
                assert refusal(rack, host, image_id, 0, token='alice') == 403
            assert neighbours(host)['lent_bytes'] == before
            for client in ({'cert': storing.operator}, {'token': 'alice'}):
                if operator and 'token' in client:
                    continue
                # The client gets the bytes that have come; then the answer
                # ends early.
                found = rack.lent(host, image_id, len(data), **client)
                assert 0 < sum(map(len, found.values())) < len(data)
                for offset, block in found.items():
                    assert data[offset:offset + len(block)] == block
            link.hold_after(None)
            assert done.result(daemons.LIMIT) == data
