# SPDX-License-Identifier: Apache-2.0

"""Uploads that are passed on, and may fail.

Nova sends an upload again after a 503, and after an error of the connection.
It sends only the part of its file that it has not read yet, perhaps nothing,
and Glance takes that for the whole image. So an upload that fails needs an
answer after which Nova gives up, and Nova must get that answer: it reads none
while it sends. Hence a failed upload is read to its end, and answered 502.
"""

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Awaitable
from collections.abc import Callable
import contextlib
import dataclasses
from typing import Any
from typing import cast

from dedupd.http import image_parts
from dedupd.http import messages
from dedupd.http import upstream_client


def image_of(message: messages.Message) -> str | None:
    """Return the image that a request uploads; None: it uploads none."""
    match = image_parts.IMAGE.fullmatch(message.target)
    if message.method != 'PUT' or message.body is None or match is None or (
            match[2] is None):
        return None
    return match[1]


async def answer(message: messages.Message,
                 pass_on: Callable[[messages.Message],
                                   Awaitable[messages.Response]]
                 ) -> messages.Response:
    """Answer an upload so that its client does not send a part of it.

    :param pass_on: answers the request, whose body stays readable
    :raises UpstreamError: as `pass_on`, once the body has come
    """
    assert message.body is not None
    body = Body(message.body)
    try:
        return await pass_on(
            dataclasses.replace(message, body=cast(Any, body)))
    except upstream_client.UpstreamError:
        await body.drain()
        raise
    finally:
        await body.end()


class Body:
    """The pieces of a body. Ending their user leaves the others readable."""

    def __init__(self, body: AsyncGenerator[bytes, None]) -> None:
        self._body = body
        self._next: asyncio.Task[bytes] | None = None

    def __aiter__(self) -> 'Body':
        return self

    async def __anext__(self) -> bytes:
        if self._next is None:
            self._next = asyncio.create_task(self._piece())
        # A piece that is on its way stays if this wait is cancelled.
        await asyncio.wait({self._next})
        found, self._next = self._next, None
        return found.result()

    async def _piece(self) -> bytes:
        return await anext(self._body)

    async def aclose(self) -> None:
        """Do nothing: the user calls this at its end, and the body stays."""

    async def drain(self) -> None:
        """Read the rest, as fast as the client sends it, and forget it.

        :raises: the body's error if the client is too slow, or leaves
        """
        async for _ in self:
            pass

    async def end(self) -> None:
        """Stop reading."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
            with contextlib.suppress(Exception, asyncio.CancelledError):
                self._next.result()
        await self._body.aclose()
