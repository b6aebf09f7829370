# SPDX-License-Identifier: Apache-2.0

"""Glance answers requests if the proxy cannot start a thread."""

import asyncio
import threading
from unittest import mock

import pytest

from dedupd.compute.cache import glance_proxy
from dedupd.http import messages

ID = '3f0b2a4c-5d1e-4c7a-9b60-0d4a8f1c2e33'


class Answer:
    """A response of Glance with a body of one byte."""

    def __init__(self, status, headers=()):
        self.status, self.headers, self.reason = status, list(headers), b''
        self._pieces = [b'x', b'']

    async def read(self):
        return self._pieces.pop(0)

    def close(self):
        pass


@pytest.fixture
def held():
    found = mock.Mock()
    found.worth.return_value = True
    return found


@pytest.fixture
def ask(held, monkeypatch):
    """Have the proxy answer a request with Glance's responses."""
    def fail(self):
        raise RuntimeError("can't start new thread")

    def perform(method, target, *answers):
        upstream = mock.Mock(ask=mock.AsyncMock(side_effect=answers))
        proxy = glance_proxy.Proxy(
            mock.Mock(repository_id='0' * 32), upstream, mock.Mock(), held,
            mock.Mock(), None, lambda image_id: False, 'peer')
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, 'start', fail)
            return asyncio.run(proxy.serve(messages.Message(
                method, target, [], messages.Peer('tcp', None), None)))
    return perform


def test_glance_gives_an_image(ask):
    relayed = Answer(200)
    response = ask('GET', f'/v2/images/{ID}/file', Answer(
        206, [(b'Content-Range', b'bytes 0-0/100')]), relayed)
    assert response.status == 200 and response.body._answer is relayed


def test_glance_deletes_an_image(ask, held):
    """The deletion succeeds, and the cache keeps its copy for now."""
    assert ask('DELETE', f'/v2/images/{ID}', Answer(204)).status == 204
    held.drop.assert_not_called()
