# SPDX-License-Identifier: Apache-2.0

"""The cache passes on requests and answers of a server that misbehaves.

The server is a few lines of this file, so that each byte that it gets and
sends is known; ``test_cache_proxy.py`` has the real Glance.
"""

import contextlib
import itertools
import queue
import random
import socket
import ssl
import threading
import time

import pytest

from tests.support import cache_harness
from tests.support import certificates
from tests.support import daemons
from tests.support.daemons import read_response
from tests.support import ports
from tests.support import repositories

pytestmark = pytest.mark.slow

LIMIT = daemons.LIMIT


class Server:
    """A server that answers each connection as the test says.

    :ivar behave: called with each connection, as (socket, file, number)
    :ivar heads: of each request that `read` read
    """

    def __init__(self, tls=None):
        self.tls = tls
        self.listener = socket.create_server(('127.0.0.1', 0))
        self.url = (f'{"https" if tls else "http"}://127.0.0.1:'
                    f'{self.listener.getsockname()[1]}')
        self.heads = queue.Queue()
        self.behave = None
        self.numbers = itertools.count()
        self.connections = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                sock = self.listener.accept()[0]
                sock.settimeout(LIMIT)
                self.connections.append(sock)
                threading.Thread(target=self.serve, args=(sock,),
                                 daemon=True).start()

    def serve(self, sock):
        if self.tls is not None:
            try:
                sock = self.tls.wrap_socket(sock, server_side=True)
            except OSError:
                return
        with sock, sock.makefile('rb') as stream, contextlib.suppress(OSError):
            self.behave(sock, stream, next(self.numbers))

    def forget(self):
        """End the connections that are open from the last test."""
        self.heads = queue.Queue()
        while self.connections:
            with contextlib.suppress(OSError):
                self.connections.pop().shutdown(socket.SHUT_RDWR)

    def read(self, stream):
        """Read a request's head: its line and its headers, as they came."""
        lines = []
        while (line := stream.readline()) not in (b'\r\n', b''):
            lines.append(line.rstrip(b'\r\n').decode())
        if lines:
            self.heads.put(lines)
        return lines

    def answers(self, *answers, close=True):
        """Send one of these answers to each request, and close after each."""
        left = list(answers)

        def behave(sock, stream, number):
            while left and self.read(stream):
                sock.sendall(left.pop(0))
                if close:
                    return

        self.behave = behave

    def head(self):
        return self.heads.get(timeout=LIMIT)


@contextlib.contextmanager
def running(place, program, **options):
    """A cache, and a Glance that the test plays: the attribute `server`.

    :param program: code that the cache runs before it starts
    """
    server = Server()
    with contextlib.closing(server.listener), cache_harness.CacheDaemon(
            repositories.create(place / 'cache'),
            {'upstream_url': 'https://127.0.0.1:9'},
            glance_url=server.url + '/image',
            **options) as daemon:
        daemon.program = [
            '-c', 'from dedupd import daemon; import sys; '
            f'from dedupd.http import upstream_client; {program}; '
            'sys.exit(daemon.main())']
        daemon.server = server
        yield daemon.start()
        assert 'Traceback' not in daemon.text()
        assert daemon.stop() == 0


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
    """A cache that waits as long as the tests need."""
    with running(tmp_path_factory.mktemp('relay'),
                 f'upstream_client.CONTINUE_SECONDS = {LIMIT}') as daemon:
        yield daemon


@pytest.fixture(scope='module')
def impatient(tmp_path_factory):
    """A cache that hardly waits, for the tests of its time limits."""
    with running(tmp_path_factory.mktemp('impatient'),
                 'upstream_client.PATIENCE = 3; '
                 'upstream_client.CONTINUE_SECONDS = 0.5',
                 header_timeout=2, idle_timeout=2) as daemon:
        yield daemon


@pytest.fixture
def server(cache):
    cache.server.forget()
    return cache.server


@contextlib.contextmanager
def connected(cache):
    with cache.connect_proxy() as sock, sock.makefile('rb') as stream:
        yield sock, stream


def raw(*arguments, **headers):
    """Return a request with a Host that names the cache itself."""
    return daemons.raw(*arguments, **headers).replace(
        b'Host: x\r\n', b'Host: localhost\r\n')


def ask(cache, data, head=False):
    with connected(cache) as (sock, stream):
        sock.sendall(data)
        return read_response(stream, head)


def ok(body=b'yes', *lines, status='200 OK'):
    head = [f'HTTP/1.1 {status}', f'Content-Length: {len(body)}', *lines]
    return '\r\n'.join(head).encode() + b'\r\n\r\n' + body


# -- heads --------------------------------------------------------------------

def test_a_request_as_it_is(cache, server):
    server.answers(ok())
    response = ask(cache, b'POST /v2/x%2Fy//z?a=1&a=2 HTTP/1.1\r\n'
                   b'hOST: localhost\r\nX-Auth-Token: t\r\nX-One: 1\r\n'
                   b'x-one: 2\r\nX-Gone: 1\r\n'
                   b'Connection: keep-alive, x-gone\r\n'
                   b'Keep-Alive: 5\r\nTE: gzip\r\nUpgrade: h2c\r\n'
                   b'Proxy-Connection: close\r\nVia: 1.1 there\r\n'
                   b'Content-Length: 0\r\n\r\n')
    assert response.status == 200 and response.body == b'yes'
    line, *headers = server.head()
    assert line == 'POST /image/v2/x%2Fy//z?a=1&a=2 HTTP/1.1'
    name = cache.status()['repository']['id']
    assert sorted(headers) == sorted([
        f'Host: {server.url.removeprefix("http://")}', 'X-Auth-Token: t',
        'X-One: 1', 'x-one: 2', 'Via: 1.1 there', f'Via: 1.1 dedupd-{name}',
        'Content-Length: 0'])


def test_an_answer_as_it_is(cache, server):
    server.answers(ok(b'body', 'Set-Cookie: a=1', 'sEt-cookie: b=2',
                      'Date: Thu, 01 Jan 1970 00:00:00 GMT', 'X-Gone: 1',
                      'Connection: x-gone, close', 'Keep-Alive: 3',
                      status='299 As You Like It'))
    with connected(cache) as (sock, stream):
        sock.sendall(raw('GET', '/'))
        lines = [stream.readline() for _ in range(6)]
        assert lines[0] == b'HTTP/1.1 299 As You Like It\r\n'
        assert sorted(lines[1:5]) == [
            b'Content-Length: 4\r\n',
            b'Date: Thu, 01 Jan 1970 00:00:00 GMT\r\n',
            b'Set-Cookie: a=1\r\n', b'sEt-cookie: b=2\r\n']
        assert lines[5] == b'\r\n' and stream.read(4) == b'body'


@pytest.mark.parametrize('method,answer,body', [
    ('HEAD', b'HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n', b''),
    ('GET', b'HTTP/1.1 204 No Content\r\n\r\n', b''),
    ('GET', b'HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n', b''),
    ('GET', b'HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n', b''),
    ('GET', b'HTTP/1.1 102 Wait\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n'
     b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab', b'ab'),
    ('GET', b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n'
     b'Content-Length: 9\r\n\r\n2;x=y\r\nab\r\n1\r\nc\r\n0\r\nTrailer: 1\r\n'
     b'\r\n', b'abc'),
    ('GET', b'HTTP/1.1 200 OK\r\n\r\nto the end', b'to the end'),
    ('GET', b'HTTP/1.0 200 OK\r\n\r\nto the end', b'to the end')])
def test_forms_of_answers(cache, server, method, answer, body):
    """Each answer is followed by another request on the same connection."""
    server.answers(answer, ok())
    with connected(cache) as (sock, stream):
        sock.sendall(raw(method, '/v2/images'))
        if method == 'HEAD' or b' 304 ' in answer:
            response = read_response(stream, head=True)
            assert response.headers['content-length'] in ('77', '9')
        elif b' 204 ' in answer:
            response = read_response(stream, head=True)
            assert response.status == 204
            assert 'transfer-encoding' not in response.headers
        else:
            response = read_response(stream)
            assert (response.status, response.body) == (200, body)
        sock.sendall(raw('GET', '/v2/images'))
        assert read_response(stream).body == b'yes'


def test_the_absolute_form(cache, server):
    server.answers(ok())
    assert ask(cache, raw('GET', 'http://localhost/v2/x?y')).status == 200
    assert server.head()[0] == 'GET /image/v2/x?y HTTP/1.1'


def test_other_hosts(cache, server):
    """A page from elsewhere cannot send requests to the cache in its name."""
    server.answers(ok())
    data = raw('GET', '/v2/images').replace(b'localhost', b'evil.example')
    assert ask(cache, data).status == 421
    assert server.heads.empty()


def test_http_1_0(cache, server):
    server.answers(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n'
                   b'2\r\nab\r\n0\r\n\r\n')
    with connected(cache) as (sock, stream):
        sock.sendall(b'GET / HTTP/1.0\r\nHost: localhost\r\n\r\n')
        head, _, body = stream.read().partition(b'\r\n\r\n')
        assert body == b'ab' and b'chunked' not in head


def test_a_cache_that_leads_to_itself(cache, server):
    """The cache recognizes its own requests by their Via."""
    name = cache.status()['repository']['id']
    response = ask(cache, raw('GET', '/', Via=f'1.0 a, 1.1 dedupd-{name}'))
    assert response.status == 508 and server.heads.empty()


# -- bodies of requests -------------------------------------------------------

def body_of(stream, head):
    """Return the body that a server received, and whether it was whole."""
    headers = dict(line.lower().split(': ', 1) for line in head[1:])
    if 'content-length' in headers:
        length = int(headers['content-length'])
        body = stream.read(length)
        return body, len(body) == length
    body = b''
    while size := stream.readline():
        size = int(size, 16)
        if not size:
            return body, stream.readline() == b'\r\n'
        body += stream.read(size)
        stream.readline()
    return body, False


def receives(server):
    """Have the server read bodies; returns the queue that gets them."""
    found = queue.Queue()

    def behave(sock, stream, number):
        found.put(body_of(stream, server.read(stream)))
        sock.sendall(ok())

    server.behave = behave
    return found


@pytest.mark.parametrize('chunked', [False, True])
def test_bodies(cache, server, chunked):
    found = receives(server)
    data = repositories.noise(3_000_000, 4)
    with connected(cache) as (sock, stream):
        if chunked:
            sock.sendall(raw('PUT', '/v2/x', Transfer_Encoding='chunked'))
            for at in range(0, len(data), 700_001):
                piece = data[at:at + 700_001]
                sock.sendall(b'%x\r\n%b\r\n' % (len(piece), piece))
            sock.sendall(b'0\r\nTrailer: 1\r\n\r\n')
        else:
            sock.sendall(raw('PUT', '/v2/x', data))
        assert read_response(stream).status == 200
        # The connection stays usable.
        sock.sendall(raw('POST', '/v2/x', b'{}'))
        assert read_response(stream).status == 200
    assert found.get(timeout=LIMIT) == (data, True)
    assert found.get(timeout=LIMIT) == (b'{}', True)


def test_a_server_that_takes_its_time(cache, server):
    """The cache's memory is bounded, however much a caller sends."""
    go = threading.Event()
    size = 96 << 20

    def behave(sock, stream, number):
        server.read(stream)
        assert go.wait(LIMIT)
        left = size
        while left:
            left -= len(stream.read(min(left, 1 << 20)))
        sock.sendall(ok())

    server.behave = behave
    before = cache.memory()
    sent = []

    def send(sock):
        sock.sendall(raw('PUT', '/v2/x', b'')[:-len(
            'Content-Length: 0\r\n\r\n')] + b'Content-Length: %d\r\n\r\n'
            % size)
        piece = bytes(1 << 20)
        for _ in range(size >> 20):
            sock.sendall(piece)
            sent.append(1)

    with connected(cache) as (sock, stream):
        thread = threading.Thread(target=send, args=(sock,))
        thread.start()
        server.head()
        count = -1
        while count != len(sent):
            count = len(sent)
            time.sleep(0.3)
        assert count < 24, 'it takes what the server does not'
        go.set()
        assert read_response(stream).status == 200
        thread.join(LIMIT)
    assert cache.memory() - before < 24 << 20


def test_a_refusal_before_the_body(cache, server):
    """The refusal arrives although the caller has only begun to send."""
    def behave(sock, stream, number):
        server.read(stream)
        sock.sendall(ok(b'no', 'Connection: close', status='413 Too Large'))
        stream.read(1)

    server.behave = behave
    with connected(cache) as (sock, stream):
        sock.sendall(raw('PUT', '/v2/x', Content_Length=1 << 40) + b'some')
        response = read_response(stream)
        assert (response.status, response.body) == (413, b'no')
        assert response.headers['connection'] == 'close'


def test_a_refusal_and_a_closed_door(cache, server):
    """The cache reads the refusal, though it cannot send any more."""
    def behave(sock, stream, number):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.recv(100)
        sock.sendall(ok(b'no', status='413 Too Large'))
        # The server leaves bytes unread, so the connection is reset.

    server.behave = behave
    for _ in range(20):
        with connected(cache) as (sock, stream):
            with contextlib.suppress(OSError):
                sock.sendall(raw('PUT', '/v2/x', Content_Length=1 << 40)
                             + bytes(1 << 20))
            assert read_response(stream).status == 413


def test_a_body_that_is_waited_for(cache, server):
    """Expect goes to the server, and its 100 comes back."""
    def behave(sock, stream, number):
        head = server.read(stream)
        sock.sendall(b'HTTP/1.1 100 Continue\r\n\r\n')
        assert body_of(stream, head) == (b'body', True)
        sock.sendall(ok())

    server.behave = behave
    with connected(cache) as (sock, stream):
        sock.sendall(raw('PUT', '/v2/x', Content_Length=4,
                         Expect='100-continue'))
        assert stream.readline().split()[1] == b'100'
        while stream.readline() != b'\r\n':
            pass
        sock.sendall(b'body')
        assert read_response(stream).status == 200
    assert 'Expect: 100-continue' in server.head()


def test_a_body_that_nobody_wants(cache, server):
    server.answers(ok(b'who?', status='401 Unauthorized'))
    with connected(cache) as (sock, stream):
        sock.sendall(raw('PUT', '/v2/x', Content_Length=4,
                         Expect='100-continue'))
        assert read_response(stream).status == 401


def test_a_server_that_knows_no_expectations(impatient):
    found = receives(impatient.server)
    with connected(impatient) as (sock, stream):
        sock.sendall(raw('PUT', '/v2/x', Content_Length=4,
                         Expect='100-continue'))
        assert stream.readline().split()[1] == b'100'
        sock.sendall(b'body')
        stream.readline()
        assert read_response(stream).status == 200
    assert found.get(timeout=LIMIT) == (b'body', True)


BROKEN_BODIES = pytest.mark.parametrize('begin', [
    raw('PUT', '/x', Content_Length=9) + b'four',
    raw('PUT', '/x', Transfer_Encoding='chunked') + b'4\r\nfour\r\n'])


@BROKEN_BODIES
def test_a_body_that_breaks_off(cache, server, begin):
    """The server can tell that the body is not whole."""
    found = receives(server)
    with connected(cache) as (sock, stream):
        sock.sendall(begin)
        server.head()
        sock.shutdown(socket.SHUT_WR)
        stream.read()
    assert found.get(timeout=LIMIT) == (b'four', False)


@BROKEN_BODIES
def test_a_body_that_stops(impatient, begin):
    """The caller gets 408; the server sees that the body is not whole."""
    found = receives(impatient.server)
    with connected(impatient) as (sock, stream):
        sock.sendall(begin)
        assert read_response(stream).status == 408
    assert found.get(timeout=LIMIT) == (b'four', False)


@pytest.mark.parametrize('framing', [
    'Content-Length: 5\r\nTransfer-Encoding: chunked',
    'Transfer-Encoding: chunked\r\nContent-Length: 5',
    'Content-Length: 5\r\nContent-Length: 6',
    'Transfer-Encoding: gzip, chunked', 'Transfer-Encoding: xchunked',
    'Transfer-Encoding: chunked\r\nTransfer-Encoding: identity',
    'Content-Length: +5', 'Content-Length: 0x5', 'Content-Length : 5',
    'Content-Length: -1', 'Content-Length: 5\r\n x: y'])
def test_smuggling(cache, server, framing):
    """The cache refuses a request with ambiguous framing, and sends none."""
    server.answers(ok(), ok())
    response = ask(cache, b'POST /v2/x HTTP/1.1\r\nHost: localhost\r\n'
                   + framing.encode()
                   + b'\r\n\r\n0\r\n\r\nGET /secret HTTP/1.1\r\n\r\n')
    assert response.status in (400, 501)
    assert server.heads.empty()


def test_bad_chunks(cache, server):
    found = receives(server)
    response = ask(cache, raw('PUT', '/x', Transfer_Encoding='chunked')
                   + b'5\r\nhello\r\nzz\r\n')
    assert response.status == 400
    assert found.get(timeout=LIMIT)[1] is False


# -- bodies of answers --------------------------------------------------------

@pytest.mark.parametrize('answer', [
    b'HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf',
    b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n',
    b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n'
    b'x\r\n'])
@pytest.mark.parametrize('version', ['1.0', '1.1'])
def test_an_answer_that_breaks_off(cache, server, answer, version):
    """The caller sees the break, and never a clean end."""
    server.answers(answer)
    with connected(cache) as (sock, stream):
        sock.sendall(f'GET / HTTP/{version}\r\nHost: localhost\r\n\r\n'
                     .encode())
        try:
            text = stream.read()
        except ConnectionResetError:
            return
        head, _, body = text.partition(b'\r\n\r\n')
        assert b'0\r\n\r\n' not in body
        assert b'Content-Length: 10' in head or b'chunked' in head


def test_an_answer_in_time(impatient):
    """A server that sends nothing, or stops in the middle, meets a limit."""
    def behave(sock, stream, number):
        impatient.server.read(stream)
        sock.sendall(b'' if number % 2 else
                     b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf')
        stream.read(1)

    impatient.server.behave = behave
    outcomes = set()
    for _ in range(2):
        with connected(impatient) as (sock, stream):
            sock.sendall(raw('GET', '/'))
            text = stream.read()
            outcomes.add(text[9:12])
            if text[9:12] == b'200':
                assert text.endswith(b'\r\n\r\nhalf')
            else:
                assert b'did not answer in time' in text
    assert outcomes == {b'200', b'503'}


@pytest.mark.parametrize('answer,status', [
    (b'', 503), (b'garbage\r\n\r\n', 502), (b'HTTP/1.1 200 OK\r\n', 503),
    (b'HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n', 502),
    (b'HTTP/1.1 200 OK\r\nX: ' + b'x' * 900_000 + b'\r\n\r\n', 502),
    (b'HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n', 502),
    (b'\0' * 200_000, 502)])
def test_what_is_no_answer(cache, server, answer, status):
    server.answers(answer)
    response = ask(cache, raw('GET', '/v2/images'))
    assert response.status == status
    message = response.json()['error']['message']
    assert message.startswith('The Image service did not answer: ')
    assert message.endswith('.')


@pytest.mark.parametrize('answer', [b'', b'garbage\r\n\r\n'])
def test_an_upload_that_is_not_answered(cache, server, answer):
    """The client can send everything; the answer makes Nova give up.

    After a 503, or an error of the connection, Nova would send what it has not
    sent yet, and Glance would take that for the image.
    """
    def behave(sock, stream, number):
        server.read(stream)
        stream.read(100_000)
        sock.sendall(answer)

    server.behave = behave
    response = ask(cache, raw('PUT', '/v2/images/x/file', bytes(50_000_000)))
    assert response.status == 502
    assert response.json()['error']['message'].startswith(
        'The Image service did not answer: ')


def test_nobody_is_there(tmp_path):
    with cache_harness.CacheDaemon(
            repositories.create(tmp_path / 'cache'),
            {'upstream_url': 'https://127.0.0.1:9'},
            glance_url=f'http://127.0.0.1:{ports.free_port()}') as daemon:
        daemon.start()
        response = ask(daemon, raw('GET', '/v2/images'))
        assert response.status == 503
        assert 'cannot be reached' in response.json()['error']['message']
        # Requests for images fail in the same way.
        assert ask(daemon, raw('GET', '/v2/images/x/file')).status == 503
        assert ask(daemon, raw('PUT', '/v2/images/x/file', bytes(20_000_000))
                   ).status == 502


@pytest.mark.parametrize('known', [True, False])
def test_tls(tmp_path, known):
    """The Image service's certificate has to be of the given authority."""
    authority = certificates.Authority(tmp_path)
    other = certificates.Authority(tmp_path, 'other')
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.issue('server'))
    server = Server(context)
    found = receives(server)
    with contextlib.closing(server.listener), cache_harness.CacheDaemon(
            repositories.create(tmp_path / 'cache'),
            {'upstream_url': 'https://127.0.0.1:9'}, glance_url=server.url,
            glance_ca=(authority if known else other).path) as daemon:
        daemon.start()
        data = repositories.noise(2_000_000, 5)
        response = ask(daemon, raw('PUT', '/v2/x', data))
        if known:
            assert (response.status, response.body) == (200, b'yes')
            assert found.get(timeout=LIMIT) == (data, True)
            server.answers(ok(data))
            assert ask(daemon, raw('GET', '/v2/x')).body == data
            server.answers(b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf')
            assert ask(daemon, raw('GET', '/v2/x')).body == b'half'
        else:
            assert response.status == 503 and found.empty()
            assert 'CERTIFICATE_VERIFY_FAILED' in (
                response.json()['error']['message'])
        assert daemon.stop() == 0, daemon.text()


# -- kept connections ---------------------------------------------------------

def test_a_connection_is_used_again(cache, server):
    numbers = []

    def behave(sock, stream, number):
        while server.read(stream):
            numbers.append(number)
            sock.sendall(ok())

    server.behave = behave
    for _ in range(5):
        assert ask(cache, raw('GET', '/')).status == 200
    assert len(numbers) == 5 and len(set(numbers)) <= 2


def test_a_length_in_two_ways_ends_a_connection(cache, server):
    """The connection is closed, since the next bytes may be of either body."""
    numbers = []

    def behave(sock, stream, number):
        while server.read(stream):
            numbers.append(number)
            sock.sendall(
                b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n'
                b'Content-Length: 5\r\n\r\n2\r\nab\r\n0\r\n\r\n')

    server.behave = behave
    for _ in range(5):
        response = ask(cache, raw('GET', '/'))
        assert (response.status, response.body) == (200, b'ab')
        assert 'content-length' not in response.headers
    assert len(set(numbers)) == 5


def test_a_kept_connection_that_ends(cache, server):
    """Only requests that change nothing are repeated, the others never."""
    requests = []

    def behave(sock, stream, number):
        requests.append(server.read(stream)[0])
        sock.sendall(ok())
        # The server reads the next request, and never answers it.
        line = stream.readline()
        if line:
            requests.append(line.decode().strip())

    server.behave = behave
    for _ in range(3):
        assert ask(cache, raw('GET', '/')).status == 200
    assert len(requests) >= 3
    del requests[:]
    for _ in range(3):
        assert ask(cache, raw('POST', '/', b'once')).status == 200
        assert ask(cache, raw('DELETE', '/')).status == 200
    assert sorted(requests) == (['DELETE /image/ HTTP/1.1'] * 3
                                + ['POST /image/ HTTP/1.1'] * 3)


def test_a_caller_that_leaves(cache, server):
    """The cache stops reading an answer whose caller has left."""
    ended = threading.Event()

    def behave(sock, stream, number):
        server.read(stream)
        sock.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n'
                     % (1 << 40))
        try:
            while True:
                sock.sendall(bytes(1 << 20))
        except OSError:
            ended.set()

    server.behave = behave
    before = cache.memory()
    with connected(cache) as (sock, stream):
        sock.sendall(raw('GET', '/big'))
        stream.read(100_000)
        # The caller takes nothing for as long as it may.
        time.sleep(1)
        assert cache.memory() - before < 24 << 20
    assert ended.wait(LIMIT)


# -- garbage ------------------------------------------------------------------

def test_garbage(cache, server):
    """The cache serves the next request whatever came before."""
    server.answers(*[ok()] * 1000)
    rng = random.Random(8)
    whole = raw('GET', '/v2/images/x/file', X_Auth_Token='t')
    for turn in range(150):
        data = bytearray(whole * rng.randrange(1, 3))
        for _ in range(rng.randrange(1, 12)):
            at = rng.randrange(len(data))
            data[at:at + rng.choice((0, 1, 4))] = rng.randbytes(
                rng.choice((0, 1, 3, 50)))
        if turn % 7 == 0:
            data = rng.randbytes(rng.randrange(1, 3000))
        with connected(cache) as (sock, stream):
            with contextlib.suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                for response in iter(lambda: read_response(stream), None):
                    assert 100 <= response.status < 600
    assert ask(cache, raw('GET', '/v2/x')).status == 200
    assert 'Traceback' not in cache.text()


def test_slow_callers(impatient):
    """Each slow caller has a limit; many of them do not block others."""
    impatient.server.answers(*[ok()] * 10)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            sock = stack.enter_context(impatient.connect_proxy())
            sock.sendall(b'GET / HTT')
        assert ask(impatient, raw('GET', '/')).status == 200
        with sock.makefile('rb') as stream:
            assert read_response(stream).status == 408


def test_a_long_header(cache, server):
    response = ask(cache, raw('GET', '/', X_Auth_Token='t' * 200_000))
    assert response.status == 431
    assert server.heads.empty()
