# SPDX-License-Identifier: Apache-2.0

"""The relay's handling of answers that the test simulates."""

import asyncio
from unittest import mock

import pytest

from dedupd.compute.relay import request_relay
from dedupd.http import messages
from dedupd.http import upstream_client

ID = '3f0b2a4c-5d1e-4c7a-9b60-0d4a8f1c2e33'
FILE = f'/v2/images/{ID}/file'


class Answer:
    def __init__(self, status, *pieces, **headers):
        self.status, self.reason, self.pieces = status, b'', list(pieces)
        self.headers = [(name.replace('_', '-').encode(), value.encode())
                        for name, value in headers.items()]
        self.closed = False

    async def read(self):
        if not self.pieces:
            raise upstream_client.UpstreamError('it broke off')
        return self.pieces.pop(0)

    def close(self):
        self.closed = True


def serve(cache, glance, method='GET', target=FILE, away=False, body=None,
          **headers):
    """Return a response and the relay; the servers give or raise these."""
    relay = request_relay.Relay(
        mock.Mock(ask=mock.AsyncMock(side_effect=[cache])),
        mock.Mock(ask=mock.AsyncMock(side_effect=[glance])),
        mock.Mock(is_away=lambda: away))
    message = messages.Message(
        method, target, [(name.encode(), value.encode())
                         for name, value in headers.items()],
        messages.Peer(), body)
    return asyncio.run(relay.serve(message)), relay


def test_the_connection_is_released_if_nothing_is_sent():
    """The connection is released if the client leaves before the head."""
    answer = Answer(200, b'x', Content_Length='9')
    response, _ = serve(answer, None)
    asyncio.run(response.body.aclose())
    assert answer.closed


def broke_off(malformed=False):
    return upstream_client.UpstreamError('it broke off', malformed)


@pytest.mark.parametrize('method,error,asked', [
    ('GET', broke_off(), True), ('HEAD', broke_off(), True),
    ('OPTIONS', broke_off(True), True), ('DELETE', broke_off(), False),
    ('POST', broke_off(), False), ('PATCH', broke_off(True), False),
    ('POST', upstream_client.Unreached('x'), True),
    ('DELETE', upstream_client.Unreached('x'), True)])
def test_who_else_is_asked(method, error, asked):
    """The relay contacts Glance unless the cache may have made the change."""
    answer = Answer(200, b'')
    try:
        response, relay = serve(error, answer, method, '/v2/images')
    except messages.HTTPError as e:
        assert not asked and e.status == (502 if error.malformed else 503)
    else:
        assert asked and response.status == 200
        assert relay._glance.ask.await_count == 1


@pytest.mark.parametrize('status', [401, 404, 500, 502, 503, 508])
def test_what_the_cache_answers_counts(status):
    response, relay = serve(Answer(status), Answer(200))
    assert response.status == status
    relay._glance.ask.assert_not_awaited()


def test_a_cache_that_is_away_is_not_asked():
    response, relay = serve(Answer(500), Answer(200, b''), away=True)
    assert response.status == 200
    relay._cache.ask.assert_not_awaited()


def test_loops_end():
    _, relay = serve(Answer(200), None, Via='1.0 somebody')
    (name, value), = relay._cache.ask.await_args.args[2][1:]
    assert name == b'Via' and value == b'1.1 ' + relay._name
    with pytest.raises(messages.HTTPError) as raised:
        asyncio.run(relay.serve(messages.Message(
            'GET', '/', [(b'vIa', b'1.1 a, ' + value)], messages.Peer(),
            None)))
    assert raised.value.status == 508
