# SPDX-License-Identifier: Apache-2.0

"""The daemon's HTTP gets random bytes.

It still answers right requests before them rightly and in their order; later
answers are valid, none of them "the daemon failed"; the connection ends, and
no file stays open.

The tests use a real process, over its Unix socket. Hypothesis prints the bytes
sent.
"""

import os
import re
import socket
import time

import hypothesis
from hypothesis import strategies
import pytest

from tests.support import daemons
from tests.support import repositories

EXAMPLES = 250
LONG_EXAMPLES = 10_000
LONG_TIMEOUT = 1800  # seconds
# The statuses of any answer; 500 would be a fault of the daemon's, 503 of its
# being full.
STATUSES = {100, 200, 202, 206, 304, 400, 403, 404, 405, 408, 409, 412, 413,
            415, 416, 417, 421, 431, 501, 505}

CONTENT = repositories.mixture(60_000, seed=11, unit=512)
PATHS = ['/v1/images/image', '/v1/images/image/recipe',
         '/v1/images/image/blocks', '/v1/images', '/v1/images/image/mark-lost',
         '/v1/tasks/merge', '/v1/tasks/scrub?after=0&wait=0', '/v1/status',
         '/v1/groups', '/v1/volumes', '/v1/history', '/v1/sharing',
         '/healthcheck', '/metrics', '/', '/v1/images/no-such',
         '/v1/images/..%2fkey', '*', 'http://x/v1/status', '//', '/%ff',
         '/v1/images/%00']


# -- requests -----------------------------------------------------------------

def _right(first, length):
    """Return a request, and its expected answer."""
    if first is None:
        return daemons.raw('GET', '/healthcheck'), (200, None)
    last = min(first + length, len(CONTENT)) - 1
    return (daemons.raw('GET', '/v1/images/image',
                        Range=f'bytes={first}-{last}'),
            (206, CONTENT[first:last + 1]))


RIGHT = strategies.builds(
    _right, strategies.none() | strategies.integers(0, len(CONTENT) - 1),
    strategies.integers(1, 9000))
TOKENS = (strategies.sampled_from(['', '0', '1', '-1', '99999999999999999999',
                                   'chunked', 'identity, chunked', 'close',
                                   'keep-alive', '100-continue', 'bytes=0-',
                                   'bytes=-0', 'bytes=5-2', 'bytes=0-1,3-4',
                                   'bytes=-', 'x' * 9000, 'localhost',
                                   '[::1', 'a b', '\x00', '\xff'])
          | strategies.text(strategies.characters(max_codepoint=255),
                            max_size=20))
NAMES = strategies.sampled_from(
    ['Host', 'Content-Length', 'Transfer-Encoding', 'Connection', 'Expect',
     'Range', 'If-Range', 'If-None-Match', 'Content-Type', 'Upgrade', 'Te',
     'X' * 400, 'bad name', '', 'Cookie'])
METHODS = strategies.sampled_from(
    ['GET', 'HEAD', 'POST', 'PUT', 'DELETE', 'OPTIONS', 'CONNECT', 'TRACE',
     'get', 'G T', '', 'X' * 300])
VERSIONS = strategies.sampled_from(
    ['HTTP/1.1', 'HTTP/1.0', 'HTTP/2.0', 'HTTP/0.9', 'HTTP/1.', 'http/1.1',
     ''])
BODIES = (strategies.binary(max_size=200) | strategies.sampled_from([
    b'', b'{}', b'{"ranges": [[0, 512]]}', b'{"ranges": [[1, 9e99]]}',
    b'{"ranges": [[0, true]]}', b'{"ranges": 5}', b'{"dry_run": 1e999}',
    b'{"dry_run": true}', b'[' * 5000, b'{"a":' * 2000, b'null', b'0\r\n\r\n',
    b'5\r\nhello\r\n0\r\n\r\n', b'5\r\nhel', b'ffffffffffffffff\r\n',
    b'-1\r\n', b'2;x=y\r\n{}\r\n0\r\nA: b\r\n\r\n', b'x' * 70000]))


def _odd(method, path, version, headers, body, framing):
    lines = [f'{method} {path} {version}', *framing]
    lines += [f'{name}: {value}' for name, value in headers]
    if 'Content-Length:' in framing:
        lines[lines.index('Content-Length:')] += f' {len(body)}'
    elif framing:
        body = b'%x\r\n%b\r\n0\r\n\r\n' % (len(body), body)
    return '\r\n'.join(lines).encode('latin-1') + b'\r\n\r\n' + body


LENGTH = ['Host: x', 'Content-Length:']
CHUNKED = ['Host: x', 'Transfer-Encoding: chunked']
ODD = strategies.builds(
    _odd, METHODS, strategies.sampled_from(PATHS) | strategies.text(
        strategies.characters(max_codepoint=255), max_size=30),
    VERSIONS, strategies.lists(strategies.tuples(NAMES, TOKENS), max_size=5),
    BODIES, strategies.sampled_from([[], LENGTH, CHUNKED]))
SENSIBLE = strategies.builds(
    _odd, strategies.sampled_from(['GET', 'POST', 'HEAD']),
    strategies.sampled_from(PATHS), strategies.just('HTTP/1.1'),
    strategies.lists(strategies.tuples(NAMES, TOKENS), max_size=1),
    BODIES, strategies.sampled_from([LENGTH, LENGTH, CHUNKED]))


def _changed(request, changes):
    for where, cut, new in changes:
        at = int(where * len(request))
        request = request[:at] + new + request[at + cut:]
    return request


CHANGED = strategies.builds(
    _changed, SENSIBLE, strategies.lists(strategies.tuples(
        strategies.floats(0, 1), strategies.integers(0, 9),
        strategies.binary(max_size=9)), max_size=4))
WILD = strategies.binary(max_size=300) | ODD | SENSIBLE | CHANGED


# -- the daemon ---------------------------------------------------------------

@pytest.fixture(scope='module')
def daemon(tmp_path_factory):
    path = repositories.create(tmp_path_factory.mktemp('http') / 'repository',
                               block_size=512, group_slots=64)
    with repositories.open_repository(path) as opened:
        repositories.put(opened, 'image', CONTENT)
    with daemons.Daemon(path, header_timeout=2, idle_timeout=2,
                        write_timeout=2) as process:
        yield process.start().wait_for_catalog()


def descriptors(daemon):
    return len(os.listdir(f'/proc/{daemon.process.pid}/fd'))


def send_all(sock, data, cuts):
    """Send in pieces, which the daemon may receive apart."""
    at = 0
    for cut in sorted({int(cut * len(data)) for cut in cuts} | {len(data)}):
        sock.sendall(data[at:cut])
        at = cut


def exchange(daemon, right, wild, cuts):
    """Send right requests, then random bytes; check all answers."""
    data = b''.join(request for request, _ in right) + wild
    with daemon.connect() as sock, sock.makefile('rb') as stream:
        try:
            send_all(sock, data, cuts)
            sock.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has closed
        for _, (status, body) in right:
            answer = daemons.read_response(stream)
            assert answer is not None and answer.status == status
            assert body is None or answer.body == body
        try:
            rest = stream.read()
        except ConnectionResetError:
            rest = b''
    found = [int(s) for s in re.findall(rb'HTTP/1\.1 (\d{3}) [A-Z]', rest)]
    assert set(found) <= STATUSES, rest[:500]
    assert not rest or rest.startswith(b'HTTP/1.1 '), rest[:500]


def require_unharmed(daemon, before):
    assert daemon.request('GET', '/v1/images/image').body == CONTENT
    text = daemon.text()
    assert 'A request failed' not in text, text[-3000:]
    assert 'A connection failed' not in text, text[-3000:]
    deadline = time.monotonic() + daemons.LIMIT
    while descriptors(daemon) > before + 4:  # threads open files now and then
        assert time.monotonic() < deadline, (descriptors(daemon), before)
        time.sleep(0.1)


@pytest.mark.timeout(LONG_TIMEOUT)
def test_anything(daemon, request):
    long = request.config.getoption('--long')
    daemon.request('GET', '/v1/images/image')
    before = descriptors(daemon)

    @hypothesis.settings(
        max_examples=LONG_EXAMPLES if long else EXAMPLES, deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(strategies.lists(RIGHT, max_size=3), WILD,
                      strategies.lists(strategies.floats(0, 1), max_size=5))
    def check(right, wild, cuts):
        exchange(daemon, right, wild, cuts)

    check()
    require_unharmed(daemon, before)


def test_connections_that_are_left_open(daemon):
    """The daemon ends idle connections after any bytes."""
    before = descriptors(daemon)
    left = []
    for data in (b'', b'G', b'GET / HTTP/1.1\r\n', b'\r\n' * 99, b'\x16\x03',
                 daemons.raw('GET', '/healthcheck'),
                 daemons.raw('POST', '/v1/tasks/merge', Content_Length=99),
                 daemons.raw('POST', '/v1/tasks/merge',
                             Transfer_Encoding='chunked') + b'5\r\n'):
        sock = daemon.connect()
        sock.sendall(data)
        left.append(sock)
    for sock in left:
        with sock:
            while sock.recv(65536):
                pass
    require_unharmed(daemon, before)
