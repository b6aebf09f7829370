# SPDX-License-Identifier: Apache-2.0

"""The HTTP endpoints, without a server."""

import asyncio
import threading
from unittest import mock

import pytest

from dedupd.endpoints import http_api
from dedupd.http import messages

LIMIT = 60


def perform(router, method, path):
    """Return a task that runs the route's handler."""
    route, arguments = router.find(method, path)
    request = messages.Request(method, {}, {}, messages.Peer(0))
    return asyncio.create_task(route.handler(request, **arguments))


def test_marking_lost_leaves_threads_to_others():
    """Requests that wait up to a minute leave threads for other requests."""
    over = threading.Event()
    control = mock.Mock()
    control.status = lambda: {'fine': True}
    control.mark_lost = lambda image_id: {'over': over.wait(LIMIT)}

    async def check():
        router = http_api.API(control, *[mock.Mock()] * 5, '/', [],
                              asyncio.Event()).unix
        waiting = [perform(router, 'POST', '/v1/images/image/mark-lost')
                   for _ in range(20)]
        await asyncio.sleep(0.1)
        shown = await asyncio.wait_for(
            perform(router, 'GET', '/v1/status'), LIMIT / 2)
        over.set()
        assert shown.body == b'{"fine":true}\n'
        for response in await asyncio.gather(*waiting):
            assert response.body == b'{"over":true}\n'

    try:
        asyncio.run(check())
    finally:
        over.set()


def test_no_thread_can_be_started(monkeypatch):
    """Without a new thread, the client gets 503 and may try again."""
    async def check():
        router = http_api.API(*[mock.Mock()] * 6, '/', [],
                              asyncio.Event()).unix
        for method, path in (('GET', '/v1/status'), ('GET', '/metrics'),
                             ('POST', '/v1/images/image/mark-lost')):
            with pytest.raises(messages.HTTPError) as error:
                await perform(router, method, path)
            assert error.value.status == 503

    def fail(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, 'start', fail)
    asyncio.run(check())
