# SPDX-License-Identifier: Apache-2.0

"""The daemon's side of shared memory, for cases that need exact moments.

The other tests are in ``functional/test_shared_memory.py``.
"""

import asyncio
import contextlib
import os
import socket
import threading
import types

import pytest

from dedupd.http import streams
from dedupd.serve import image_source
from dedupd.serve import memory_sharing
from glance_dedup.base import thread_pool
from glance_dedup.client import shared_memory
from tests.support import repositories

PIECE = shared_memory.PIECE
DATA = repositories.noise(20 * PIECE)


class Image:
    """An image for a `Present` reading; its reads wait for the test."""

    def __init__(self):
        self.size = len(DATA)
        self.stat = types.SimpleNamespace(image_id='image', upload_id='')
        self.may_read = threading.Event()
        self.may_read.set()
        self.reads = []
        self.closed = False

    def readinto(self, view, offset):
        self.reads.append(offset)
        assert self.may_read.wait(30)
        view[:] = DATA[offset:offset + len(view)]
        return len(view)

    def is_zeros(self, length, offset):
        return False

    def close(self):
        self.closed = True


def run(check, **limits):
    """Run a test with a Sharing, in a loop."""
    pool = thread_pool.Workers('read', 2)

    async def bounded():
        made = memory_sharing.Sharing(
            lambda *call: asyncio.wrap_future(pool.submit(*call)),
            types.SimpleNamespace(**{'write_timeout': 20, **limits}))
        await asyncio.wait_for(check(made), 60)
        assert not made._held

    asyncio.run(bounded())


@contextlib.contextmanager
def connected():
    """Return a stream of the daemon and the client's socket."""
    here, there = socket.socketpair()
    here.setblocking(False)
    there.settimeout(30)
    with here, there:
        yield streams.SocketStream(here), there


async def served(session, stream):
    """Run a session as a connection does and return the bytes of each turn."""
    turns: list[int] = []
    try:
        with contextlib.suppress(streams.Disconnected):
            await session.run(stream, turns.append)
    finally:
        await session.aclose()
    return turns


def test_m4_what_is_offered_is_bounded():
    async def check(made):
        image = image_source.Present(Image())
        sessions = [made.offer(image, len(DATA)) for _ in range(20)]
        found = [s for s in sessions if s is not None]
        assert len(
            found) * memory_sharing.MEMORY_BYTES == memory_sharing.SHARED_BYTES
        # The limit holds even if no session has begun.
        await found[0].aclose()
        await found[0].aclose()
        found[0] = made.offer(image, len(DATA))
        assert found[0] is not None and made.offer(image, len(DATA)) is None
        for session in found:
            await session.aclose()

    run(check)


def test_no_memory_is_no_error(monkeypatch):
    async def check(made):
        def fail(*args):
            raise OSError(24, 'too many open files')

        image = image_source.Present(Image())
        before = len(os.listdir('/proc/self/fd'))
        for name in ('memfd_create', 'open', 'fchmod'):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, fail)
                assert made.offer(image, len(DATA)) is None
            assert len(os.listdir('/proc/self/fd')) <= before

    run(check)


def test_images_that_arrive_are_not_offered():
    async def check(made):
        arriving = types.SimpleNamespace(size=len(DATA), here=False)
        assert made.offer(arriving, len(DATA)) is None
        assert made.offer(image_source.Present(Image()),
                          shared_memory.MIN_SIZE - 1) is None

    run(check)


def test_m3_the_connection_ends_before_the_memory_is_taken_back(monkeypatch):
    """The order holds if the connection breaks while a thread reads."""
    released = []
    release = memory_sharing.Memory.release

    def look(self):
        released.append((there.recv(1), list(image.reads)))
        release(self)

    async def check(made):
        nonlocal there
        session = made.offer(image_source.Present(image), len(DATA))
        with connected() as (stream, there):
            image.may_read.clear()
            there.sendall(shared_memory.REQUEST.pack(0, 0, PIECE))
            task = asyncio.create_task(served(session, stream))
            while not image.reads:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.sleep(0.05)
            # The thread still uses the memory.
            assert not released and not image.closed
            image.may_read.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert released == [(b'', [0])] and image.closed

    image, there = Image(), None
    monkeypatch.setattr(memory_sharing.Memory, 'release', look)
    run(check)


def test_m5_a_turn_ends(monkeypatch):
    async def check(made):
        session = made.offer(image_source.Present(Image()), len(DATA))
        with connected() as (stream, there):
            there.sendall(b''.join(
                shared_memory.REQUEST.pack(i * PIECE, 0, PIECE)
                for i in range(20)))
            there.sendall(shared_memory.REQUEST.pack(0, 0, 1) * 100)
            there.shutdown(socket.SHUT_WR)
            turns = await served(session, stream)
        assert sum(turns) == 20 * PIECE + 100
        assert max(turns) <= memory_sharing.TURN and len(turns) >= 4

    run(check)


def test_m4_a_client_that_requests_nothing_is_disconnected():
    async def check(made):
        session = made.offer(image_source.Present(Image()), len(DATA))
        with connected() as (stream, there):
            assert await served(session, stream) == []
            assert there.recv(1) == b''

    run(check, write_timeout=0.05)
