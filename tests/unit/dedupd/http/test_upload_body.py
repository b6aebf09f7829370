# SPDX-License-Identifier: Apache-2.0

"""Uploads whose forwarding ends at any time."""

import asyncio
import contextlib

import pytest

from dedupd.http import upload_body


class Source:
    """Pieces that arrive when the test releases them."""

    def __init__(self, count=5, error=None):
        self.ready = asyncio.Semaphore(0)
        self.taken, self.ended = 0, False
        self.pieces = self._make(count, error)

    async def _make(self, count, error):
        try:
            for number in range(count):
                await self.ready.acquire()
                self.taken += 1
                yield b'%d' % number
            if error is not None:
                raise error
        finally:
            self.ended = True

    def release(self, count):
        for _ in range(count):
            self.ready.release()


async def use(upload, found):
    async with contextlib.aclosing(upload) as pieces:
        async for piece in pieces:
            found.append(piece)


async def begin(body, upload, count):
    """Begin a user that has this many pieces and waits for the next one."""
    found = []
    task = asyncio.create_task(use(upload, found))
    body.release(count)
    while len(found) < count:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task, found


async def begin_and_cancel(body, upload, count):
    """Begin a user that has this many pieces, and cancel it."""
    task, _ = await begin(body, upload, count)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_all_pieces():
    async def scenario():
        body = Source()
        upload = upload_body.Body(body.pieces)
        body.release(5)
        found = []
        await use(upload, found)
        await upload.end()
        return found

    assert asyncio.run(scenario()) == [b'0', b'1', b'2', b'3', b'4']


@pytest.mark.parametrize('count', range(5))
def test_a_user_that_is_cancelled_leaves_the_rest(count):
    """The rest includes the piece for which the cancelled user waited."""
    async def scenario():
        body = Source()
        upload = upload_body.Body(body.pieces)
        await begin_and_cancel(body, upload, count)
        assert not body.ended
        body.release(9)
        left = []
        await use(upload, left)
        await upload.end()
        assert len(left) == 5 - count and left[-1] == b'4'

    asyncio.run(scenario())


def test_the_rest_is_drained():
    async def scenario():
        body = Source()
        upload = upload_body.Body(body.pieces)
        await begin_and_cancel(body, upload, 2)
        body.release(9)
        await upload.drain()
        assert body.taken == 5 and body.ended
        await upload.end()

    asyncio.run(scenario())


def test_the_clients_errors_pass():
    async def scenario():
        body = Source(2, KeyError('left'))
        upload = upload_body.Body(body.pieces)
        body.release(9)
        with pytest.raises(KeyError):
            await upload.drain()
        await upload.end()

    asyncio.run(scenario())


@pytest.mark.parametrize('count', [0, 3])
def test_the_end_waits_for_nobody(count):
    """The end does not wait for a piece that is on its way."""
    async def scenario():
        body = Source()
        upload = upload_body.Body(body.pieces)
        await begin_and_cancel(body, upload, count)
        await upload.end()
        assert body.ended
        assert not asyncio.all_tasks() - {asyncio.current_task()}

    asyncio.run(scenario())
