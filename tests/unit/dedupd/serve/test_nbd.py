# SPDX-License-Identifier: Apache-2.0

"""Connections that are cancelled close their images."""

import asyncio
import contextlib
import socket
import threading
import types

import pytest

from dedupd.http import connection_limits
from dedupd.serve import image_source
from dedupd.serve import nbd
from glance_dedup.base import exceptions
from tests.support.nbd import Session
from tests.support import repositories

LIMIT = 60
DATA = b'x' * 100_000


@pytest.fixture
def repo(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'image', DATA)
        yield repo


class Served:
    """A connection to exports with one thread, which can be held up."""

    def __init__(self, repo, monkeypatch):
        monkeypatch.setattr(nbd, 'THREADS', 1)
        self.repo = repo
        self.readings = []
        self.opening, self.open = threading.Event(), threading.Event()
        self.open.set()
        self.exports = nbd.Exports(
            'socket', repo, self.open_reading, types.SimpleNamespace(
                header_timeout=LIMIT, write_timeout=LIMIT), asyncio.Event())
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.settimeout(LIMIT)
        self.session = Session(theirs)
        place = connection_limits.Places().take('peer', 1, 1)
        self.task = asyncio.create_task(
            self.exports.connection(ours, place).run())

    def open_reading(self, image_id):
        self.opening.set()
        self.open.wait(LIMIT)
        image = self.repo.open_image(image_id)
        self.readings.append(image)
        return image_source.Present(image)

    async def cancel(self):
        """Cancel the task, also while it ends."""
        while not self.task.done():
            self.task.cancel()
            await asyncio.sleep(0.01)
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def require_closed(self):
        """Require that the one reading was closed."""
        await asyncio.to_thread(repositories.eventually, lambda: (
            self.readings and self.is_closed()))

    def is_closed(self):
        try:
            self.readings[0].readinto(bytearray(1), 0)
        except exceptions.ClosedError:
            return True
        return False


def test_a_cancelled_connection_closes_its_image(repo, monkeypatch):
    """Its close waits for a thread, and another cancel does not stop it."""
    async def run():
        served = Served(repo, monkeypatch)
        await asyncio.to_thread(served.session.go, b'image')
        hold = threading.Event()
        held = served.exports.run(hold.wait, LIMIT)
        await served.cancel()
        hold.set()
        await held
        await served.require_closed()
        served.session.close()
    asyncio.run(asyncio.wait_for(run(), LIMIT))


def test_an_image_that_opens_after_the_cancel_is_closed(repo, monkeypatch):
    async def run():
        served = Served(repo, monkeypatch)
        served.open.clear()
        going = asyncio.create_task(asyncio.to_thread(
            served.session.go, b'image'))
        await asyncio.to_thread(served.opening.wait, LIMIT)
        await served.cancel()
        served.open.set()
        await served.require_closed()
        served.session.close()
        with contextlib.suppress(OSError, EOFError, AssertionError):
            await going
    asyncio.run(asyncio.wait_for(run(), LIMIT))
