# SPDX-License-Identifier: Apache-2.0

"""Limit the memory for the bodies of all connections together."""

import asyncio
import collections
from collections.abc import AsyncIterator
from collections.abc import Iterator
import contextlib

from dedupd.http import messages

# Seconds after which a client whose request found no space may try again.
_RETRY_SECONDS = 5


class Bodies:
    """The memory that the bodies of all requests and responses share.

    A response that is made as a whole, such as a list, holds its memory until
    its client has taken it.

    A request gets all memory that its body may need before the body is
    received, so that no two requests wait for each other. A body no larger
    than a header does not wait: so control works even while large bodies have
    all the memory.
    """

    def __init__(self, limits: messages.Limits) -> None:
        self._limits = limits
        self._held = 0
        self._waiting: collections.deque[tuple[asyncio.Future, int]] = (
            collections.deque())

    @contextlib.asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold `length` bytes of memory; requests get it in turn.

        :raises HTTPError: 503, if there was no space in time
        """
        if size <= messages.HEADER_LIMIT:
            yield
            return
        await self._wait(size)
        try:
            yield
        finally:
            self._give_back(size)

    @contextlib.contextmanager
    def hold_now(self, size: int) -> Iterator[None]:
        """Hold `size` bytes of memory that a response has taken already.

        :raises HTTPError: 503, if there is no space: drop the response
        """
        if size <= messages.HEADER_LIMIT:
            yield
            return
        if self._waiting or not self._has_room(size):
            raise _full()
        self._held += size
        try:
            yield
        finally:
            self._give_back(size)

    def _has_room(self, size: int) -> bool:
        room = (self._limits.max_body_memory_mib << 20) - self._held
        return not self._held or size <= room

    async def _wait(self, size: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((future, size))
        self._grant()
        try:
            async with asyncio.timeout(self._limits.header_timeout):
                await future
        except BaseException as e:
            if future.done() and not future.cancelled():
                self._give_back(size)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove((future, size))
                self._grant()
            if isinstance(e, TimeoutError):
                raise _full()
            raise

    def _give_back(self, size: int) -> None:
        self._held -= size
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            future, size = self._waiting[0]
            if not self._has_room(size):
                break
            self._waiting.popleft()
            if not future.done():
                self._held += size
                future.set_result(None)


def _full() -> messages.HTTPError:
    return messages.HTTPError(
        503, 'Too many large requests or responses are under way.',
        {'Retry-After': str(_RETRY_SECONDS)})
