# SPDX-License-Identifier: Apache-2.0

"""Passes requests on to the cache, or to Glance while the cache is away.

The relay changes nothing, both ways. The cache's answer counts, errors too. If
the cache gives no answer, the relay sends the request to Glance: one that
changes nothing in any case, others only if nothing of them was sent. A body
with an image's bytes that breaks off is continued from Glance at the same
offset, so that its client does not notice.

The cache breaks off on purpose if it finds that it sent bytes of another
image. The relay cannot distinguish that from a failure. So it keeps the
SHA-256 of the bytes that it sent, and sends more only if Glance's image has
those bytes.
"""

from collections.abc import AsyncGenerator
import contextlib
import hashlib
import secrets
from typing import Any

from oslo_log import log

from dedupd.compute.relay import liveness
from dedupd.http import image_parts
from dedupd.http import limited
from dedupd.http import messages
from dedupd.http import passing
from dedupd.http import streams
from dedupd.http import upstream_client
from dedupd.http.upstream_client import Header

LOG = log.getLogger(__name__)
_STRANGERS = limited.Log(LOG)


class Relay:
    """Answers requests for Glance. Used in the event loop's thread.

    :param cache: the cache's proxy
    :param glance: Glance itself
    :param pulse: knows whether the cache lives
    """

    def __init__(self, cache: upstream_client.Upstream,
                 glance: upstream_client.Upstream,
                 pulse: liveness.Pulse) -> None:
        self._cache = cache
        self._glance = glance
        self._pulse = pulse
        # It finds loops; so it need not be the same after a restart.
        self._name = f'dedupd-relay-{secrets.token_hex(16)}'.encode()

    async def serve(self, message: messages.Message) -> messages.Response:
        """Answer any request."""
        headers = upstream_client.end_to_end(message.headers)
        if any(self._name in value for name, value in headers
               if name.lower() == b'via'):
            raise messages.HTTPError(
                508, 'glance_url or [cache] listen leads to dedupd-relay.')
        headers.append((b'Via', b'1.1 ' + self._name))
        return await passing.answer(
            message, lambda one: self._pass_on(one, headers))

    async def _pass_on(self, message: messages.Message, headers: list[Header]
                       ) -> messages.Response:
        """Return the cache's answer, or Glance's in its place.

        :raises UpstreamError: if neither gives one, or only the cache may
        """
        answer = await self._from_cache(message, headers)
        if answer is None:
            return await passing.response(
                message.method, await self._glance.ask(
                    message.method, message.target, headers, message.body))
        response = await passing.response(message.method, answer)
        asked = image_parts.asked(message, headers)
        span = image_parts.span(answer)
        if asked is not None and span is not None:
            response.body = _Body(answer, self._whole(asked, answer, *span))
        return response

    async def _from_cache(self, message: messages.Message,
                          headers: list[Header]
                          ) -> upstream_client.Answer | None:
        """Return the cache's answer; None: the request is to go to Glance.

        :raises UpstreamError: if the cache may have done something, and failed
        """
        if self._pulse.is_away():
            return None
        try:
            answer = await self._cache.ask(message.method, message.target,
                                           headers, message.body)
        except upstream_client.Unreached as e:
            self._pulse.missed(e)
            return None
        except upstream_client.UpstreamError as e:
            if not upstream_client.may_repeat(message.method, message.body):
                raise
            passing.warn(message, e)
            return None
        self._pulse.answered()
        return answer

    async def _whole(self, asked: image_parts.Asked,
                     answer: upstream_client.Answer, begin: int, end: int,
                     facts: image_parts.Facts) -> AsyncGenerator[Any, None]:
        """The bytes of an answer, to their announced end.

        :raises OtherImage: if the sent bytes are not Glance's
        :raises UpstreamError: if Glance no longer gives the image, or fails
        """
        handed = begin
        hasher = hashlib.sha256()
        with contextlib.closing(answer):
            try:
                while piece := await answer.read():
                    hasher.update(piece)
                    handed += len(piece)
                    yield piece
                return
            except upstream_client.UpstreamError as e:
                _STRANGERS.warning(
                    'Image %s comes from Glance from byte %d on: %s',
                    asked.image_id, handed, e)
        async with contextlib.aclosing(image_parts.rest(
                self._glance, asked, facts, image_parts.Sent(
                    begin, handed, end, hasher.digest()))) as rest:
            async for view in rest:
                yield view


class _Body:
    """The pieces of an answer, whose connection is released in any case."""

    def __init__(self, answer: upstream_client.Answer,
                 pieces: AsyncGenerator[Any, None]) -> None:
        self._answer = answer
        self._pieces = pieces

    async def asend(self, pour: streams.Pour | None) -> Any:
        return await self._pieces.asend(None)

    async def aclose(self) -> None:
        await self._pieces.aclose()
        self._answer.close()
