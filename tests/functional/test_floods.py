# SPDX-License-Identifier: Apache-2.0

"""One client that floods a listener does not hold up the others.

The tests use a real process with every kind of listener. A flood is one
connection on which bytes are sent without a pause, so that the daemon never
has to wait for it. It lasts until the test ends it. Meanwhile the daemon must
answer others, on each listener; the answers are counted, so that a slow
machine changes nothing.
"""

import contextlib
import http.server
import json
import socket
import ssl
import struct
import threading
import time

import pytest

from tests.support import cache_harness
from tests.support import certificates
from tests.support import daemons
from tests.support.daemons import raw
from tests.support.daemons import read_response
from tests.support import nbd
from tests.support import ports
from tests.support import repositories

#: Answers that others must get during a flood. If a flood holds them up they
#: get one or two.
ANSWERS = 20
#: The number of floods; during one of them others must get so many answers.
TRIES = 3
#: Seconds that a flood may take.
LIMIT = 120

BLOCKS = '/v1/images/image/blocks'
CHUNKED = {'Transfer_Encoding': 'chunked'}


class Glance(http.server.BaseHTTPRequestHandler):
    """A server that reads each request's body, and answers 200."""

    protocol_version = 'HTTP/1.1'

    def _answer(self):
        if 'chunked' in self.headers.get('Transfer-Encoding', ''):
            while size := int(self.rfile.readline() or b'0', 16):
                self.rfile.read(size + 2)
            self.rfile.readline()
        self.send_response(200)
        self.send_header('Content-Length', '0')
        self.end_headers()

    do_GET = do_PUT = _answer

    def log_message(self, *args):
        pass


@pytest.fixture(scope='module')
def glance():
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Glance) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


@pytest.fixture(scope='module')
def daemon(tmp_path_factory, glance):
    """A daemon with every listener."""
    place = tmp_path_factory.mktemp('floods')
    path = repositories.create(place / 'repository', group_slots=512)
    with repositories.open_repository(path) as opened:
        repositories.put(opened, 'image', repositories.noise(100_000))
    (path / 'cache.json').touch()
    authority = certificates.Authority(place)
    status, tls = (f'127.0.0.1:{ports.free_port()}' for _ in range(2))
    with cache_harness.CacheDaemon(
            path, {'upstream_url': 'https://127.0.0.1:9'},
            status_listen=status,
            listen=tls, tls_cert=authority.issue('server'),
            tls_client_ca=authority.path, glance_url=glance,
            header_timeout=LIMIT) as it:
        it.authority = authority
        it.write_config(nbd_socket=it.directory / 'nbd')
        yield it.start().wait_for_catalog()


# -- connections --------------------------------------------------------------

def tcp(daemon, option):
    address = (daemon.cache if option == 'cache' else daemon.options)[
        'listen' if option == 'cache' else option]
    host, _, port = address.rpartition(':')
    return socket.create_connection((host, int(port)), daemons.LIMIT)


def connect(daemon, listener):
    """Return a socket to a listener of HTTP."""
    if listener == 'unix':
        return daemon.connect()
    if listener == 'tls':
        context = ssl.create_default_context(cafile=daemon.authority.path)
        return context.wrap_socket(tcp(daemon, 'listen'),
                                   server_hostname='localhost')
    return tcp(daemon, 'status_listen' if listener == 'status' else 'cache')


def local(request):
    """Return the request with a host name that loopback listeners accept."""
    return request.replace(b'Host: x', b'Host: localhost')


def ask(daemon, listener):
    """Return true if another client gets an answer from a listener."""
    if listener == 'nbd':
        with nbd.Session(daemon.options['nbd_socket']) as session:
            return bool(session.haggle().option(nbd.LIST))
    with connect(daemon, listener) as sock, sock.makefile('rb') as stream:
        sock.sendall(local(raw('GET', '/none')))
        return read_response(stream) is not None


# -- floods: a connection, what it begins with, and what it then repeats ------

class Records:
    """A TLS connection that sends each byte in a record of its own."""

    def __init__(self, daemon):
        self._socket = tcp(daemon, 'listen')
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=daemon.authority.path)
        context.load_cert_chain(daemon.authority.issue('operator'))
        self._tls = context.wrap_bio(self._in, self._out,
                                     server_hostname='localhost')
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._socket.sendall(self._out.read())
                self._in.write(self._socket.recv(65536))

    def sendall(self, data):
        for byte in data:
            self._tls.write(bytes([byte]))
        self._socket.sendall(self._out.read())

    def __getattr__(self, name):
        return getattr(self._socket, name)


def requests(daemon, listener):
    """Return a flood of pipelined requests."""
    path = '/v1/images/image' if listener == 'tls' else '/healthcheck'
    return connect(daemon, listener), b'', local(raw('GET', path)) * 1000


def chunks(daemon, listener):
    """Return a flood with a body of the smallest possible chunks."""
    begin = (raw('PUT', '/v2/images/x/file', **CHUNKED)
             if listener == 'cache' else raw('POST', BLOCKS, **CHUNKED))
    return connect(daemon, listener), local(begin), b'1\r\n \r\n' * 10_000


def records(daemon, listener):
    """Return a flood with a body of the smallest possible TLS records."""
    return Records(daemon), raw(
        'POST', BLOCKS, Content_Length=1 << 20), bytes(10_000)


def options(daemon, listener):
    """Return a session's socket and an option of NBD."""
    session = nbd.Session(daemon.options['nbd_socket']).haggle()
    return session.socket, b'IHAVEOPT' + struct.pack('>II', 99, 0)


def unknown_options(daemon, listener):
    sock, option = options(daemon, listener)
    return sock, b'', option * 10_000


def flushes(daemon, listener):
    """Return a flood of NBD requests that read no data."""
    session = nbd.Session(daemon.options['nbd_socket'])
    session.go(b'image')
    return session.socket, b'', struct.pack(
        '>IHHQQI', 0x25609513, 0, nbd.FLUSH, 0, 0, 0) * 10_000


@contextlib.contextmanager
def flooding(sock, begin, again):
    """Send without end, and receive all that comes, in threads.

    Yields a function that returns true as long as that goes on, and for LIMIT
    at most.
    """
    ended = threading.Event()
    deadline = time.monotonic() + LIMIT

    def send():
        with contextlib.suppress(OSError):
            sock.sendall(begin)
            while not ended.is_set():
                sock.sendall(again)

    def take():
        with contextlib.suppress(OSError):
            while sock.recv(1 << 20):
                pass

    sock.settimeout(LIMIT)
    threads = [threading.Thread(target=target, daemon=True)
               for target in (send, take)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: (all(thread.is_alive() for thread in threads)
                       and time.monotonic() < deadline)
    finally:
        ended.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(LIMIT)
        sock.close()


@pytest.mark.parametrize('listener,flood', [
    ('unix', requests), ('unix', chunks), ('tls', requests),
    ('tls', records), ('status', requests), ('cache', requests),
    ('cache', chunks), ('nbd', unknown_options), ('nbd', flushes)],
    ids=lambda value: getattr(value, '__name__', value))
def test_others_are_answered(daemon, listener, flood):
    """Others get answers during a flood, which a limit may end early."""
    others = ('unix', 'status', 'cache', 'nbd', 'tls')
    for other in others:
        assert ask(daemon, other)
    for _ in range(TRIES):
        answers = 0
        with flooding(*flood(daemon, listener)) as going_on:
            while going_on() and answers < ANSWERS:
                assert ask(daemon, others[answers % len(others)])
                answers += going_on()
        if answers == ANSWERS:
            break
    assert answers == ANSWERS
    assert json.loads(daemon.request('GET', '/healthcheck').body)['live']


def end(address):
    """Send an empty datagram, which ends the thread that receives them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(LIMIT)
        sock.sendto(b'', address)


def test_the_watchdog_is_fed(daemon):
    """The watchdog gets its messages during a client's endless flood."""
    with contextlib.ExitStack() as stack:
        address = str(daemon.directory / 'notify')
        heard = stack.enter_context(socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM))
        heard.bind(address)
        heard.settimeout(LIMIT)
        signs = []

        def take():
            while sign := heard.recv(99):
                signs.append(sign)

        # The thread receives from the start on: few messages fit unread, and
        # the daemon waits until the next one does.
        taking = threading.Thread(target=take, daemon=True)
        taking.start()
        stack.callback(taking.join, LIMIT)
        stack.callback(end, address)
        daemon.kill()
        daemon.environment.update(NOTIFY_SOCKET=address,
                                  WATCHDOG_USEC='100000')
        daemon.start().wait_for_catalog()
        daemon.environment.clear()
        going_on = stack.enter_context(flooding(*chunks(daemon, 'unix')))
        before = len(signs)
        while going_on() and len(signs) < before + 5:
            time.sleep(0.01)
        assert signs[before:][:5] == [b'WATCHDOG=1'] * 5
