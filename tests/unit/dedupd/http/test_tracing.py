# SPDX-License-Identifier: Apache-2.0

"""Traces that requests carry, with the real OSProfiler and its signatures.

The store of traces is an OSProfiler driver that keeps a list.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import threading

from osprofiler import drivers
from osprofiler import notifier
from osprofiler import profiler
from osprofiler import web
import pytest

from dedupd.http import messages
from dedupd.http import tracing
from tests.support import daemons

KEY = 'a-key'
ID = '1d5a0b1e-5a3c-4a53-9d42-0a4d9f2c6b11'
PARENT = '7f0e2c44-0c5b-4a7e-8c1d-3f5b6a798812'


class Kept(drivers.base.Driver):
    """A store of traces that blocks until the test releases it."""

    told = []
    go = threading.Event()

    @classmethod
    def get_name(cls):
        return 'kept'

    def notify(self, info, **kwargs):
        assert self.go.wait(daemons.LIMIT)
        if info['name'].startswith('refused'):
            raise ConnectionError('kept://the-password')
        self.told.append(info)


@pytest.fixture
def options(tmp_path):
    config = tmp_path / 'dedupd.conf'
    config.write_text('[profiler]\nenabled = true\nhmac_keys = other, '
                      f'{KEY}\nconnection_string = kept://\n')
    return tracing.read_options([str(config)], None)


@pytest.fixture
def traces(options, monkeypatch):
    monkeypatch.setattr(tracing, 'STOP_SECONDS', 2 * daemons.LIMIT)
    before = notifier.get()
    Kept.told.clear()
    Kept.go.set()
    found = tracing.Traces(options)
    yield found
    Kept.go.set()
    found.close()
    notifier.set(before)


def signed(data, key=KEY):
    """Return the headers of a trace, as any client could sign them."""
    info = base64.urlsafe_b64encode(
        data if isinstance(data, bytes) else json.dumps(data).encode())
    return [(b'X-Trace-Info', info), (b'X-Trace-HMAC', hmac.new(
        key.encode(), info, hashlib.sha1).hexdigest().encode())]


GOOD = {'base_id': ID, 'parent_id': PARENT}


def serve(traces, headers, response=None, fails=None, name='one'):
    """Return the handler's message and the response."""
    got = []

    async def handler(message, facts):
        got.append(message)
        facts['source'] = 'here'
        if fails:
            raise fails
        return response or messages.Response(200)

    message = messages.Message('GET', '/v2/images/1/file?a=b', headers,
                               messages.Peer(), None)
    answer = asyncio.run(traces.follow(name, message, handler))
    assert profiler.get() is None
    return got[0], answer


def told(traces):
    traces.close()
    return Kept.told


def test_a_request_becomes_a_span(traces):
    message, _ = serve(traces, [(b'A', b'b'), *signed(GOOD)])
    start, stop = told(traces)
    assert (start['name'], stop['name']) == ('one-start', 'one-stop')
    assert start['base_id'] == ID and start['parent_id'] == PARENT
    assert start['info']['path'] == '/v2/images/1/file'
    assert stop['info']['source'] == 'here' and stop['info']['status'] == 200
    # Later spans have this span as their parent.
    assert message.headers[0] == (b'A', b'b') and len(message.headers) == 3
    passed = dict(message.headers[1:])
    info = passed[web.X_TRACE_INFO.encode()]
    assert json.loads(base64.urlsafe_b64decode(info)) == {
        'base_id': ID, 'parent_id': start['trace_id']}
    assert dict(signed(json.loads(base64.urlsafe_b64decode(info)))) == {
        b'X-Trace-Info': info,
        b'X-Trace-HMAC': passed[web.X_TRACE_HMAC.encode()]}


def test_a_trace_may_begin_with_it(traces):
    serve(traces, signed({'base_id': ID}))
    assert [item['parent_id'] for item in told(traces)] == [ID, ID]


@pytest.mark.parametrize('headers', [
    [], signed(GOOD)[:1], signed(GOOD)[1:], signed(GOOD) * 2,
    signed(GOOD, 'wrong'), signed(GOOD, ''), signed(GOOD, 'SECRET_KEY'),
    [signed(GOOD)[0], (b'X-Trace-HMAC', b'\xff' * 40)],
    [(b'X-Trace-Info', b'\xff'), signed(GOOD)[1]],
    signed({}), signed([]), signed(b'no JSON'), signed(b'[' * 9000),
    signed({'base_id': 'no id'}), signed({'base_id': 1}),
    signed({'base_id': 'no id', 'parent_id': PARENT}),
    signed({'base_id': ID, 'parent_id': ['a']})])
def test_other_headers_pass_and_begin_nothing(traces, headers):
    message, _ = serve(traces, headers)
    assert message.headers == headers
    assert told(traces) == []


class Pieces:
    """A body of two pieces, or a body that fails."""

    def __init__(self, fails=None):
        self.left = [b'a', b'b']
        self.fails = fails
        self.closed = False

    async def asend(self, pour):
        if self.fails:
            raise self.fails
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop(0)

    async def aclose(self):
        self.closed = True


async def read(body):
    try:
        while True:
            await body.asend(None)
    except StopAsyncIteration:
        pass
    finally:
        await body.aclose()


def test_a_span_ends_with_the_body(traces):
    pieces = Pieces()
    _, response = serve(traces, signed(GOOD), messages.Response(
        206, body=pieces))
    assert 'one-stop' not in str(Kept.told)
    asyncio.run(read(response.body))
    assert pieces.closed and not pieces.left
    stop = told(traces)[1]
    assert stop['info']['status'] == 206 and 'etype' not in stop['info']


def test_errors_are_told_by_their_class(traces):
    with pytest.raises(LookupError):
        serve(traces, signed(GOOD), fails=LookupError('a-secret'))
    _, response = serve(traces, signed(GOOD), messages.Response(
        body=Pieces(fails=OSError('a-secret'))))
    with pytest.raises(OSError):
        asyncio.run(read(response.body))
    assert [item['info']['etype'] for item in told(traces)[1::2]] == [
        'builtins.LookupError', 'builtins.OSError']
    assert 'a-secret' not in str(Kept.told)


def test_a_slow_store_delays_nothing_and_loses_spans(traces, caplog):
    Kept.go.clear()
    for _ in range(tracing.MAX_WAITING):
        serve(traces, signed(GOOD))
    assert not Kept.told
    Kept.go.set()
    # One span was being sent while others waited.
    assert (tracing.MAX_WAITING <= len(told(traces))
            <= tracing.MAX_WAITING + 1)
    record, = [r for r in caplog.records if 'Spans are lost' in r.message]
    assert 'slow' in record.message


def test_a_store_that_fails_is_told_once_without_its_password(
        traces, caplog):
    for _ in range(3):
        serve(traces, signed(GOOD), name='refused')
    serve(traces, signed(GOOD))
    assert [item['name'] for item in told(traces)] == ['one-start', 'one-stop']
    record, = [r for r in caplog.records if 'Spans are lost' in r.message]
    assert 'ConnectionError' in record.message
    assert 'the-password' not in caplog.text


@pytest.mark.parametrize('keys', ['', 'SECRET_KEY', f'{KEY},SECRET_KEY'])
def test_keys_that_everybody_knows_are_refused(tmp_path, keys):
    config = tmp_path / 'dedupd.conf'
    config.write_text(f'[profiler]\nhmac_keys = {keys}\n')
    with pytest.raises(ValueError, match='hmac_keys is not set'):
        tracing.read_options([str(config)], None)
    config.write_text('')
    with pytest.raises(ValueError, match='hmac_keys is not set'):
        tracing.read_options([str(config)], None)
