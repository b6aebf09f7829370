# SPDX-License-Identifier: Apache-2.0

"""The daemon's HTTP: right answers, and no wrong input breaks it.

The tests use a real process, over raw sockets.
"""

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import os
import random
import socket
import struct
import time

import lz4.block
import pytest
import xxhash

from tests.support import daemons
from tests.support.daemons import raw
from tests.support.daemons import read_response
from tests.support import ports
from tests.support import repositories

BLOCK = 4096
IMAGE = '/v1/images/image'
FRAMES = '/v1/images/image/blocks'


@pytest.fixture(scope='module')
def content():
    return repositories.mixture(3_000_000, seed=7) + repositories.noise(777)


@pytest.fixture(scope='module')
def repository(tmp_path_factory, content):
    path = repositories.create(tmp_path_factory.mktemp('r') / 'repository',
                               group_slots=512)
    with repositories.open_repository(path) as opened:
        for image_id, data in (('image', content), ('empty', b''),
                               ('zeros', bytes(100_000)),
                               ('other', content[::-1])):
            repositories.put(opened, image_id, data, project='p')
    return path


@pytest.fixture(scope='module')
def daemon(repository):
    """A daemon that maintains; it accounts on request, and at its start."""
    with daemons.Daemon(repository, max_connections=1200) as process:
        process.program = daemons.impatient(account=86400)
        process.start().wait_for_catalog()
        process.run('account')
        yield process


@pytest.fixture
def hasty(repository):
    """A daemon whose time limits are short."""
    with daemons.Daemon(
            repository, header_timeout=2, idle_timeout=3, write_timeout=3,
            max_connections=1200) as process:
        yield process.start()


def require_alive(daemon):
    assert daemon.request('GET', '/healthcheck').status == 200
    assert 'Traceback' not in daemon.text()


# -- reads --------------------------------------------------------------------

def test_image(daemon, content):
    response = daemon.request('GET', IMAGE)
    assert response.status == 200 and response.body == content
    assert response.headers['accept-ranges'] == 'bytes'
    assert response.headers['dedup-repository'] == (
        daemon.status()['repository']['id'])
    upload = response.headers['etag'].strip('"')
    head = daemon.request('HEAD', IMAGE)
    assert head.status == 200 and not head.body
    assert head.headers['content-length'] == str(len(content))
    assert head.headers['etag'] == response.headers['etag']
    assert daemon.request('GET', f'{IMAGE}?upload={upload}').body == content
    assert daemon.request('GET', f'{IMAGE}?upload={"0" * 32}').status == 404
    assert daemon.request('GET', f'{IMAGE}?upload=x').status == 400


@pytest.mark.parametrize('image_id,data', [('empty', b''),
                                           ('zeros', bytes(100_000))])
def test_images_without_blocks(daemon, image_id, data):
    response = daemon.request('GET', f'/v1/images/{image_id}')
    assert response.status == 200 and response.body == data
    recipe = daemon.request('GET', f'/v1/images/{image_id}/recipe')
    assert struct.unpack_from('<Q', recipe.body, 16) == (len(data),)
    assert len(recipe.body) == 80 + (24 if data else 0)


def test_ranges(daemon, content):
    size = len(content)
    rng = random.Random(3)
    cases = [(0, 0), (0, size - 1), (size - 1, size - 1), (4095, 4096)] + [
        sorted((rng.randrange(size), rng.randrange(size))) for _ in range(30)]
    with daemon.connect() as sock, sock.makefile('rb') as stream:
        for first, last in cases:
            sock.sendall(raw('GET', IMAGE, Range=f'bytes={first}-{last}'))
            response = read_response(stream)
            assert response.status == 206
            assert response.headers['content-range'] == (
                f'bytes {first}-{last}/{size}')
            assert response.body == content[first:last + 1]
        for value, data in (('bytes=5-', content[5:]),
                            ('bytes=-7', content[-7:]),
                            (f'bytes=-{size * 2}', content),
                            (f'bytes=9-{size * 9}', content[9:]),
                            ('Bytes = 3-4', content[3:5])):
            sock.sendall(raw('GET', IMAGE, Range=value))
            response = read_response(stream)
            assert (response.status, response.body) == (206, data), value


@pytest.mark.parametrize('value', [
    'bytes=3000777-', 'bytes=9-3', 'bytes=-0', 'bytes=-', 'bytes=', 'bytes',
    'bytes=a-b', 'bytes=1-2-3', 'bytes=-1-2', 'bytes=0x1-2', 'bytes=1-2,x',
    'bytes=99999999999999999999999999-', 'bytes=٣-٤', 'bytes=+1-2'])
def test_bad_ranges(daemon, value, content):
    request = raw('GET', IMAGE, Range='?').replace(b'?', value.encode())
    response = daemon.send(request)
    assert response.status == 416
    assert response.headers['content-range'] == f'bytes */{len(content)}'
    assert response.json()['error']['code'] == 416


def test_ranges_that_are_not_applied(daemon, content):
    for headers in ({'Range': 'bytes=0-1,5-6'}, {'Range': 'items=0-1'},
                    {'Range': 'bytes=0-1', 'If_Range': '"another"'}):
        response = daemon.request('GET', IMAGE, **headers)
        assert response.status == 200 and response.body == content
    etag = daemon.request('HEAD', IMAGE).headers['etag']
    assert daemon.request('GET', IMAGE, Range='bytes=0-1',
                          If_Range=etag).status == 206
    assert daemon.request('GET', '/v1/images/empty',
                          Range='bytes=0-0').status == 416


def test_recipe(daemon, content):
    """The recipe describes the image, with all fingerprints."""
    body = daemon.request('GET', f'{IMAGE}/recipe').body
    magic, block, size, zeros, extents, name, scope, *cuts = (
        struct.unpack_from('<8sI4xQQQ16s16sII', body))
    assert cuts == [0, 0]
    assert magic == b'GDWIRE\0\2' and (block, size) == (BLOCK, len(content))
    assert name.rstrip(b'\0') == b'sha256' and scope == bytes(16)
    at, offset, zero_bytes = 80, 0, 0
    for _ in range(extents):
        begin, length, blocks = struct.unpack_from('<QQI', body, at)
        at += 24
        assert begin == offset
        if not blocks:
            zero_bytes += length
            assert not any(content[offset:offset + length])
        for number in range(blocks):
            data = content[offset + number * BLOCK:offset + min(
                length, (number + 1) * BLOCK)]
            assert body[at:at + 36] == hashlib.sha256(
                data).digest() + struct.pack('<I', len(data))
            at += 36
        offset += length
    assert (at, offset, zero_bytes) == (len(body), len(content), zeros)


def parse_frames(body):
    """Return (image offset, bytes) of each place, and whether it is whole."""
    at, found = 0, []
    while at < len(body):
        magic, codec, _, places, plain, stored, checksum = (
            struct.unpack_from('<4sBBHIIQ', body, at))
        assert magic == b'GDFR'
        table = body[at + 24:at + 24 + 16 * places]
        data = body[at + 24 + 16 * places:][:stored]
        assert checksum == xxhash.xxh3_64_intdigest(
            body[at:at + 16] + table + data)
        at += 24 + 16 * places + stored
        if not places:
            return found, at == len(body)
        if codec == 1:
            data = lz4.block.decompress(data, uncompressed_size=plain)
        assert codec in (0, 1) and len(data) == plain
        for offset, start, length in struct.iter_unpack('<QII', table):
            found.append((offset, data[start:start + length]))
    return found, False


@pytest.mark.parametrize('ranges', [
    [], [[0, BLOCK]], [[0, 3_000_777]], [[8192, 4096], [40960, 65536]],
    [[2998272, 3_000_777 - 2998272]],
    [[n * 2 * BLOCK, BLOCK] for n in range(300)]])
def test_blocks(daemon, content, ranges):
    response = daemon.request('POST', FRAMES,
                              json.dumps({'ranges': ranges}).encode())
    assert response.status == 200
    places, complete = parse_frames(response.body)
    assert complete
    got = {}
    for offset, data in places:
        assert content[offset:offset + len(data)] == data
        for begin in range(offset, offset + len(data), BLOCK):
            got[begin] = True
    wanted = {b for offset, length in ranges
              for b in range(offset, offset + length, BLOCK)
              if any(content[b:b + BLOCK])}
    assert wanted <= set(got)
    # No other blocks came.
    assert all(any(o <= b < o + n for o, n in ranges) for b in got)


@pytest.mark.parametrize('body,status', [
    (b'', 400), (b'{}', 400), (b'[]', 400), (b'{"ranges": 3}', 400),
    (b'{"ranges": [[0]]}', 400), (b'{"ranges": [[0, true]]}', 400),
    (b'{"ranges": [[0, "4096"]]}', 400), (b'{"ranges": [[0, 0]]}', 400),
    (b'{"ranges": [[-4096, 4096]]}', 400), (b'{"ranges": [[1, 4096]]}', 400),
    (b'{"ranges": [[0, 5]]}', 400), (b'{"ranges": [[0, 1e3]]}', 400),
    (b'{"ranges": [[4096, 4096], [0, 4096]]}', 400),
    (b'{"ranges": [[0, 4096], [0, 4096]]}', 400),
    (b'{"ranges": [[0, 4096000]]}', 416),
    (b'{"ranges": [[9223372036854775807, 9223372036854775807]]}', 416),
    (b'{"ranges": [[99999999999999999999, 1]]}', 400),
    (b'\xff\xfe', 400), (b'[' * 100_000, 400), (b'{"ranges": [[', 400),
    (b'{"ranges": [' + b'[0,1],' * 16384 + b'[0,1]]}', 400)])
def test_bad_bodies_of_blocks(daemon, body, status):
    response = daemon.request('POST', FRAMES, body)
    assert response.status == status
    assert response.json()['error']['message']
    require_alive(daemon)


def test_many_readers_at_once(daemon, content):
    other = content[::-1]

    def read(number):
        rng = random.Random(number)
        image_id, data = rng.choice([('image', content), ('other', other)])
        for _ in range(6):
            first = rng.randrange(len(data))
            last = rng.randrange(first, len(data))
            response = daemon.request('GET', f'/v1/images/{image_id}',
                                      Range=f'bytes={first}-{last}')
            assert response.body == data[first:last + 1]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(read, range(40)))


# -- requests -----------------------------------------------------------------

@pytest.mark.parametrize('path', [
    '/v1/images/none', '/v1/images/', '/v1/images/%2e%2e', '/v1/images/..',
    '/v1/images/../status', '/v1/images/%2e%2e%2f%2e%2e%2fkey',
    '/v1/images/a%00b', '/v1/images/%ff', '/v1/images/image%2Frecipe',
    '/v1/images/' + 'a' * 129, '/v1/images/' + 'a' * 9000, '/v1/images/image/',
    '//v1/images/image', '/v1/images/image/../image', '/v1/images/%2', '/v2',
    '/v1/images/im age'.replace(' ', '%20'), '/v1/images/./image',
    '/v1/images/image;x', '/v1/tasks/none', '/v1/tasks/mark-lost'])
def test_unknown_and_tricky_paths(daemon, path):
    response = daemon.request('GET', path)
    assert response.status == 404
    assert response.json()['error']['code'] == 404


@pytest.mark.parametrize('request_', [
    b'\r\n\r\n', b'GET\r\n\r\n', b'GET / HTTP/9.9\r\n\r\n',
    b'\x16\x03\x01\r\n',
    b'GET / HTTP/1.1\r\n\r\n', b'GET  / HTTP/1.1\r\nHost: x\r\n\r\n',
    b'GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n', b'\x00' * 64 + b'\r\n\r\n',
    b'GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n',
    b'GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 2\r\n\r\n',
    b'GET / HTTP/1.1\r\nHost: x\r\nA\r\n\r\n', b'GET * HTTP/1.1\r\nHost: x'
    b'\r\n\r\n', b'GET ftp://x/ HTTP/1.1\r\nHost: x\r\n\r\n',
    b'GET /v1/status?a=%ff HTTP/1.1\r\nHost: x\r\n\r\n',
    b'GET /v1/status?a=1&a=2 HTTP/1.1\r\nHost: x\r\n\r\n',
    b'GET /v1/status?' + b'&'.join(b'a%d=1' % n for n in range(17))
    + b' HTTP/1.1\r\nHost: x\r\n\r\n',
    b'GET /v1/history?since=x HTTP/1.1\r\nHost: x\r\n\r\n',
    b'GET /v1/history?since=-1 HTTP/1.1\r\nHost: x\r\n\r\n',
    b'GET /v1/history?since=nan HTTP/1.1\r\nHost: x\r\n\r\n',
    b'GET /v1/tasks/collect?wait=inf HTTP/1.1\r\nHost: x\r\n\r\n',
    b'GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: x\r\n\r\n'])
def test_malformed_requests(daemon, request_):
    response = daemon.send(request_)
    assert response.status in (400, 501, 505)
    assert response.json()['error']['message']
    require_alive(daemon)


@pytest.mark.parametrize('path', [FRAMES, IMAGE, '/v1/none'])
def test_a_length_in_two_ways(daemon, path):
    """Bytes that another server took for a body must not become a request."""
    smuggled = raw('GET', '/healthcheck')
    with daemon.connect() as sock, sock.makefile('rb') as stream:
        sock.sendall(raw('POST', path, b'0\r\n\r\n' + smuggled,
                         Transfer_Encoding='chunked'))
        response = read_response(stream)
        assert response.status == 400
        assert 'two ways' in response.json()['error']['message']
        assert response.headers['connection'] == 'close'
        assert not stream.read()


@pytest.mark.parametrize('end', [b'XX', b'\n\n', b'\rX', b'X\r', b'00'])
def test_chunks_that_do_not_end(daemon, end):
    """The daemon refuses chunk ends that h11 0.14 accepts."""
    smuggled = raw('GET', '/healthcheck')
    for cut in (0, 1, 2):
        with daemon.connect() as sock, sock.makefile('rb') as stream:
            begin = raw('POST', FRAMES, Transfer_Encoding='chunked') + (
                b'e\r\n{"ranges": []}')
            sock.sendall(begin + end[:cut])
            with contextlib.suppress(OSError):
                sock.sendall(end[cut:] + b'0\r\n\r\n' + smuggled)
            response = read_response(stream)
            assert response.status == 400
            assert response.headers['connection'] == 'close'
            assert not stream.read()


def test_chunks_that_end_late(daemon):
    """A request whose bytes come one by one is served."""
    with daemon.connect() as sock, sock.makefile('rb') as stream:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        request = raw('POST', FRAMES, Transfer_Encoding='chunked') + (
            b'7\r\n{"range\r\n7\r\ns": []}\r\n0\r\n\r\n')
        for byte in request:
            sock.sendall(bytes([byte]))
            time.sleep(0.001)
        assert read_response(stream).status == 200
        sock.sendall(raw('GET', '/healthcheck'))
        assert read_response(stream).status == 200


@pytest.mark.parametrize('digits', [21, 4000, 9000])
def test_a_length_of_many_digits(daemon, digits):
    response = daemon.send(raw('POST', FRAMES, Content_Length='1' * digits))
    assert response.status in (400, 413)
    require_alive(daemon)


def test_oversize_header(daemon):
    """The header is refused as soon as it is too long."""
    with daemon.connect() as sock, sock.makefile('rb') as stream:
        with contextlib.suppress(OSError):
            sock.sendall(b'GET / HTTP/1.1\r\nHost: x\r\nA: ' + b'a' * 70_000)
        response = read_response(stream)
    assert response.status == 431
    require_alive(daemon)


def test_oversize_bodies(daemon):
    """A body is refused for its announced length, or when it gets too long."""
    before = daemon.memory()
    for path, limit in ((FRAMES, 1 << 20), ('/v1/tasks/collect', 65536)):
        begin = f'POST {path} HTTP/1.1\r\nHost: x\r\n'.encode()
        for length in (limit + 1, 10**12, 10**30):
            response = daemon.send(
                begin + b'Content-Length: %d\r\n\r\n' % length)
            assert response.status in (400, 413)
            assert response.headers['connection'] == 'close'
        with daemon.connect() as sock, sock.makefile('rb') as stream:
            sock.sendall(begin + b'Transfer-Encoding: chunked\r\n\r\n')
            chunk = b'10000\r\n' + bytes(65536) + b'\r\n'
            with contextlib.suppress(OSError):
                for _ in range(40):
                    sock.sendall(chunk)
            assert read_response(stream).status == 413
    response = daemon.request('GET', IMAGE, b'x' * 10)
    assert response.status == 413
    assert daemon.memory() - before < 32 << 20
    require_alive(daemon)


def test_expect_continue(daemon):
    with daemon.connect() as sock, sock.makefile('rb') as stream:
        begin = raw('POST', FRAMES, Expect='100-continue', Content_Length=14)
        sock.sendall(begin)
        assert read_response(stream).status == 100
        sock.sendall(b'{"ranges": []}')
        assert read_response(stream).status == 200
        # A client that announces too much gets no 100.
        sock.sendall(raw('POST', FRAMES, Expect='100-continue',
                         Content_Length=1 << 30))
        assert read_response(stream).status == 413


def test_methods(daemon):
    for method, path, allowed in (
            ('PUT', IMAGE, 'GET, HEAD'), ('DELETE', IMAGE, 'GET, HEAD'),
            ('GET', FRAMES, 'POST'), ('POST', '/v1/status', 'GET, HEAD'),
            ('DELETE', '/v1/tasks/collect', 'GET, HEAD, POST'),
            ('OPTIONS', '/', 'GET, HEAD')):
        response = daemon.request(method, path)
        assert response.status == 405
        assert response.headers['allow'] == allowed


def test_head_is_get_without_a_body(daemon):
    for path in ('/', '/metrics', '/healthcheck', '/v1/status', '/v1/images',
                 f'{IMAGE}/recipe', '/v1/none'):
        head = daemon.request('HEAD', path)
        get = daemon.request('GET', path)
        assert head.status == get.status and not head.body
        assert head.headers['content-type'] == get.headers['content-type']


def test_pipelining_and_keeping_alive(daemon, content):
    with daemon.connect() as sock, sock.makefile('rb') as stream:
        sock.sendall(b''.join(
            raw('GET', IMAGE, Range=f'bytes={n}-{n + 9}') for n in range(50))
            + raw('GET', 'http://x/healthcheck')
            + raw('GET', '/v1/none', Connection='close'))
        for n in range(50):
            assert read_response(stream).body == content[n:n + 10]
        assert read_response(stream).json() == {'live': True}
        assert read_response(stream).status == 404
        assert read_response(stream) is None


def test_http_1_0(daemon, content):
    response = daemon.send(f'GET {IMAGE} HTTP/1.0\r\n\r\n'.encode())
    assert response.body == content
    response = daemon.send(f'GET {IMAGE}/recipe HTTP/1.0\r\n\r\n'.encode())
    assert 'transfer-encoding' not in response.headers
    assert response.body[:6] == b'GDWIRE'


# -- deadlines ----------------------------------------------------------------

def test_half_requests_and_drips_are_ended(hasty):
    """A drip does not extend the time limit of a header or body."""
    head = raw('GET', IMAGE)
    for begin in (b'G', head[:-2], raw('POST', FRAMES, Content_Length=100)):
        with hasty.connect() as sock:
            since = time.monotonic()
            sock.sendall(begin)
            sock.settimeout(0.2)
            data = b''
            while time.monotonic() - since < 20 and not data:
                # The answer may be there already, and the connection closed.
                with contextlib.suppress(ConnectionError):
                    sock.sendall(b' ' if b'POST' in begin else b'a')
                with contextlib.suppress(TimeoutError):
                    data = sock.recv(65536)
            took = time.monotonic() - since
            assert b' 408 ' in data and 1.5 < took < 15
    require_alive(hasty)


def test_a_thousand_idle_connections(daemon, content):
    """Idle connections do not hold up others."""
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(daemon.connect())
        assert daemon.request('GET', IMAGE).body == content
        assert daemon.status()['reads']['connections'] > 1000
    daemon.wait_for(lambda: daemon.status()['reads']['connections'] < 10)
    require_alive(daemon)


def test_idle_connections_are_ended(hasty):
    with contextlib.ExitStack() as stack:
        for sock in [stack.enter_context(hasty.connect())
                     for _ in range(100)]:
            assert sock.recv(1) == b''
        hasty.wait_for(lambda: hasty.status()['reads']['connections'] <= 1)
    require_alive(hasty)


def test_too_many_connections(repository, content):
    with daemons.Daemon(repository, max_connections=3) as daemon:
        daemon.start()
        with contextlib.ExitStack() as stack:
            busy = []

            def begins():
                sock = stack.enter_context(daemon.connect())
                # The answer is larger than all buffers on the way.
                sock.sendall(raw('GET', IMAGE))
                if sock.recv(12) != b'HTTP/1.1 200':
                    return False
                busy.append(sock)
                return True

            # Connections that polled whether the daemon is ready may still be
            # open.
            for _ in range(3):
                daemon.wait_for(begins)
            assert daemon.send(b'').status == 503

            def take_the_rest(sock):
                found = b''
                while not found.endswith(content[-777:]):
                    found += sock.recv(65536)

            # Such a connection, idle for the daemon, is closed for a new one.
            take_the_rest(busy[0])
            daemon.wait_for(
                lambda: daemon.request('GET', IMAGE).body == content)
            assert busy[0].recv(1) == b''
            for sock in busy[1:]:
                take_the_rest(sock)
        daemon.wait_for(
            lambda: daemon.request('GET', IMAGE).body == content)


def test_one_peer_leaves_connections_to_others(repository):
    """A peer with many connections leaves some to others."""
    port = ports.free_port()

    @contextlib.contextmanager
    def connected(host):
        with socket.socket() as sock:
            sock.settimeout(daemons.LIMIT)
            sock.bind((host, 0))
            sock.connect(('127.0.0.1', port))
            yield sock

    def answer(host):
        with connected(host) as sock:
            sock.sendall(raw('GET', '/healthcheck').replace(b' x', b' [::1]'))
            return read_response(sock.makefile('rb')).status

    with daemons.Daemon(repository, status_listen=f'127.0.0.1:{port}',
                        max_connections=20, max_peer_connections=8,
                        header_timeout=60) as daemon:
        daemon.start()
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(connected('127.0.0.2'))
                    for _ in range(100)]
            assert answer('127.0.0.3') == 200
            assert idle[0].recv(1) == b''
            assert daemon.status()['reads']['connections'] <= 10
            assert answer('127.0.0.2') == 200
            # Others have as many connections.
            for host in ('127.0.0.3', '127.0.0.4', '127.0.0.5'):
                idle += [stack.enter_context(connected(host))
                         for _ in range(8)]
            assert answer('127.0.0.6') == 200
        daemon.wait_for(lambda: daemon.status()['reads']['connections'] <= 1)
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(connected('127.0.0.2')).sendall(b'G')
            daemon.wait_for(
                lambda: daemon.status()['reads']['connections'] == 9)
            daemon.status()     # it answers this after their first bytes
            # The daemon answers at once, and then closes the connection.
            with connected('127.0.0.2') as sock:
                assert read_response(sock.makefile('rb')).status == 503
            assert answer('127.0.0.3') == 200
        daemon.wait_for(lambda: answer('127.0.0.2') == 200)
        require_alive(daemon)


@contextlib.contextmanager
def slow_clients(daemon):
    """A hundred clients that request the image, and read nothing."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(daemon.connect()) for _ in range(100)]
        for sock in slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(raw('GET', IMAGE))
        yield slow


def test_slow_clients(daemon, content):
    """Slow clients take little memory and do not hold up others."""
    before = daemon.memory()
    with slow_clients(daemon):
        assert daemon.request('GET', IMAGE).body == content
        # No client was disconnected for that.
        assert daemon.status()['reads']['connections'] > 100
        assert daemon.memory() - before < 100 * (1 << 20)
    require_alive(daemon)


def test_slow_clients_are_cut_off(hasty, content):
    with slow_clients(hasty) as slow:
        # Only the status client is left.
        hasty.wait_for(lambda: hasty.status()['reads']['connections'] <= 1)
        for sock in slow:
            data = b''
            with contextlib.suppress(ConnectionResetError):
                while piece := sock.recv(1 << 20):
                    data += piece
            # The bytes that came are right, and cannot be taken for the whole.
            head, _, body = data.partition(b'\r\n\r\n')
            assert len(body) < len(content) and content.startswith(body)
    require_alive(hasty)


# Long: two hundred clients wait for the end of the header timeout.
@pytest.mark.slow
def test_bodies_of_many_at_once(repository):
    """All bodies together get the memory that the option allows."""
    mib = 1 << 20
    with daemons.Daemon(repository, max_body_memory_mib=8,
                        header_timeout=5) as daemon:
        daemon.start()
        before = daemon.memory()
        with contextlib.ExitStack() as stack:
            # The request lacks its last byte.
            request = raw('POST', FRAMES, b' ' * mib)[:-1]
            threads = stack.enter_context(
                concurrent.futures.ThreadPoolExecutor(200))

            def send(number):
                sock = stack.enter_context(daemon.connect())
                sock.settimeout(60)
                with contextlib.suppress(OSError):
                    sock.sendall(request)
                with contextlib.suppress(OSError):
                    return read_response(sock.makefile('rb'))

            answers = [threads.submit(send, n) for n in range(200)]
            most = 0
            while not all(answer.done() for answer in answers):
                most = max(most, daemon.memory())
                time.sleep(0.05)
        assert {answer.result().status for answer in answers
                if answer.result() is not None} <= {408, 503}
        assert most - before < 80 * mib
        assert daemon.request('POST', FRAMES,
                              b'{"ranges": []}'.ljust(mib)).status == 200
        require_alive(daemon)


def test_client_that_leaves(daemon):
    for _ in range(20):
        with daemon.connect() as sock:
            sock.sendall(raw('GET', IMAGE))
            sock.recv(100)
    daemon.wait_for(lambda: daemon.status()['reads']['connections'] < 3)
    require_alive(daemon)


# -- users --------------------------------------------------------------------

@pytest.mark.skipif(os.geteuid() != 0, reason='only root becomes others')
def test_wrong_user(daemon, repository):
    """The socket's mode refuses another user; the daemon does, too.

    If the mode is lost, the daemon disconnects before it parses a byte.
    """
    request = raw('GET', '/healthcheck')
    assert os.stat(daemon.socket).st_mode & 0o777 == 0o600
    assert daemons.connect_as(daemon.socket, 65534, request) is None
    os.chmod(daemon.socket, 0o666)
    try:
        before = daemon.status()['reads']['requests']
        assert daemons.connect_as(daemon.socket, 65534, request) == b''
        assert daemons.connect_as(daemon.socket, 0, request) == b'HTTP/1.1 '
        # A request is counted after its answer; so is each of these.
        asked = itertools.count(before + 2)
        repositories.eventually(lambda: (
            daemon.status()['reads']['requests'] == next(asked)))
        assert 'User 65534 was refused' in daemon.text()
    finally:
        os.chmod(daemon.socket, 0o600)
    with daemons.Daemon(repository, socket_users='65534') as other:
        other.start()
        assert daemons.connect_as(other.socket, 65534, request) == b'HTTP/1.1 '
        assert daemons.connect_as(other.socket, 65533, request) == b''


# -- state --------------------------------------------------------------------

def test_state(daemon, content):
    status = daemon.status()
    assert status['daemon']['role'] == 'maintainer'
    assert status['space']['images'] == 4
    size = 2 * len(content) + 100_000
    assert status['space']['logical_bytes'] == size
    assert status['catalog']['state'] == 'ready'
    assert set(status['tasks']) == {
        'account', 'collect', 'merge', 'scrub', 'recompress', 'convert',
        'tier', 'projects', 'usage', 'rebuild-catalog'}
    images = daemon.request('GET', '/v1/images').json()['images']
    assert [i['image_id'] for i in images] == [
        'empty', 'image', 'other', 'zeros']
    assert sum(i['size'] for i in images) == size
    groups = daemon.request('GET', '/v1/groups').json()['groups']
    assert sum(g['live'] for g in groups) == status['space']['unique_blocks']
    daemon.run('account')
    project, = daemon.request('GET', '/v1/projects').json()['projects']
    assert (project['project'], project['images']) == ('p', 4)
    assert project['logical_bytes'] == size
    sharing = daemon.request('GET', '/v1/sharing').json()
    assert len(sharing['images']) == len(sharing['shared']) == 3
    # A sample is kept after the end of a task.
    daemon.wait_for(
        lambda: daemon.request('GET', '/v1/history').json()['samples'])
    assert b'dedupd_images 4.0' in daemon.request('GET', '/metrics').body
    assert b'<html' in daemon.request('GET', '/').body


def test_an_image_is_listed_before_it_is_counted(daemon, repository):
    with repositories.open_repository(repository) as opened:
        repositories.put(opened, 'new', repositories.noise(50_000))
        images = daemon.request('GET', '/v1/images').json()['images']
        assert 'new' in [i['image_id'] for i in images]
        assert daemon.run('account')['last']['result']['counted'] == 1
        assert daemon.status()['space']['images'] in (4, 5)
        opened.delete('new')
        assert daemon.request('GET', '/v1/images/new').status == 404
        images = daemon.request('GET', '/v1/images').json()['images']
        assert 'new' not in [i['image_id'] for i in images]
        assert daemon.run('account')['last']['result']['uncounted'] == 1


def test_tasks(daemon):
    for name in ('account', 'rebuild-catalog'):
        status = daemon.run(name)
        assert status['state'] == 'idle' and status['last']['error'] is None
    for body, status in ((b'{"dry_run": 1}', 400), (b'[]', 400),
                         (b'{"other": true}', 400), (b'{', 400),
                         (b'{"name": "x"}', 400), (b'{"self": "x"}', 400)):
        assert daemon.request('POST', '/v1/tasks/collect',
                              body).status == status
    for codec in (b'gzip', b'a\\u0000b', b'\\ud800'):
        assert daemon.request('POST', '/v1/tasks/recompress',
                              b'{"codec": "%b"}' % codec).status == 400
    assert daemon.request('POST', '/v1/tasks/none').status == 404
    require_alive(daemon)
    assert daemon.request('POST', '/v1/images/image/mark-lost',
                          b'{"a": 1}').status == 400


@pytest.mark.parametrize('name', [
    'a%00b', '%00', '%2e%2e', '%2e%2e%2fkey', 'a%20b', 'a%0ab', '%c3%a4',
    '%ed%b2%80', 'a' * 129])
@pytest.mark.parametrize('method,path', [
    ('POST', '/v1/images/{}/mark-lost'), ('GET', '/v1/images/{}'),
    ('GET', '/v1/images/{}/recipe'), ('POST', '/v1/images/{}/blocks'),
    ('GET', '/v1/tasks/{}'), ('POST', '/v1/tasks/{}'),
    ('POST', '/v1/replicas/{}'), ('POST', '/v1/replicas/{}/lots'),
    ('POST', '/v1/replicas/{}/blocks'), ('POST', '/v1/replicas/{}/commit'),
    ('DELETE', '/v1/replicas/{}')])
def test_what_no_name_can_be(daemon, method, path, name):
    response = daemon.request(method, path.format(name),
                              b'' if method == 'POST' else None)
    assert response.status in (400, 404)
    assert response.json()['error']['message']
    require_alive(daemon)


def test_long_poll_waits(daemon):
    since = time.monotonic()
    status = daemon.request(
        'GET', '/v1/tasks/account?after=100000&wait=1.2').json()
    assert time.monotonic() - since >= 1.0
    assert status['finished'] < 100000


def test_damaged_image(tmp_path):
    """Damage at the start gives an error; later it ends the response early."""
    path = repositories.create(tmp_path / 'repository', group_slots=512,
                               segment_size=4096)
    data = repositories.noise(4_000_000)
    with repositories.open_repository(path, codec='none') as opened:
        repositories.put(opened, 'early', data[:50_000])
        repositories.put(opened, 'late', data)
    for number in (1, 2):
        group = repositories.Group(path, number)
        # The first block is damaged, and one in the middle.
        at = group.data.index(data[:64] if number == 1
                              else data[2_996_224 - 4096 * 2:][:64])
        group.data[at] ^= 1
        group.save()
    with daemons.Daemon(path) as daemon:
        daemon.start()
        response = daemon.request('GET', '/v1/images/early')
        assert response.status == 500
        assert 'group' in response.json()['error']['message']
        # The damage is known at once, and not only after the next scrub.
        status = daemon.status()
        assert status['damage']['images'] == ['early']
        assert status['reads']['failed'] == 1
        assert [problem['text'] for problem in status['problems']
                if problem['severity'] == 'critical'] == ['1 image damaged.']
        metrics = daemon.request('GET', '/metrics').body.decode()
        assert 'dedupd_failed_reads_total 1.0' in metrics
        assert 'dedupd_damaged_images 1.0' in metrics
        with daemon.connect() as sock:
            sock.sendall(raw('GET', '/v1/images/late',
                             Range='bytes=1000000-'))
            got = b''
            with contextlib.suppress(ConnectionResetError):
                while piece := sock.recv(1 << 20):
                    got += piece
        body = got.partition(b'\r\n\r\n')[2]
        assert len(body) < 3_000_000
        assert data[1_000_000:].startswith(body)
