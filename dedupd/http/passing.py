# SPDX-License-Identifier: Apache-2.0

"""Answers requests with another server's answers, unchanged."""

from collections.abc import Awaitable
from collections.abc import Callable
import contextlib

from oslo_log import log

from dedupd.http import limited
from dedupd.http import messages
from dedupd.http import streams
from dedupd.http import upload_body
from dedupd.http import upstream_client

LOG = log.getLogger(__name__)
_STRANGERS = limited.Log(LOG)


class Body:
    """The body of a passed-on answer, in the form that the server reads."""

    def __init__(self, answer: upstream_client.Answer) -> None:
        self._answer = answer

    async def asend(self, pour: streams.Pour | None) -> bytes:
        """The next piece."""
        piece = await self._answer.read()
        if not piece:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Release the answer's connection."""
        self._answer.close()


async def response(method: str, answer: upstream_client.Answer
                   ) -> messages.Response:
    """The response that passes an answer on."""
    found = messages.Response(answer.status, relayed=answer.headers,
                              reason=answer.reason)
    if method == 'HEAD' or answer.status in (204, 304):
        with contextlib.suppress(upstream_client.UpstreamError):
            await answer.read()     # the end, which is all there is
        answer.close()
    else:
        found.body = Body(answer)
    return found


async def answer(message: messages.Message,
                 pass_on: Callable[[messages.Message],
                                   Awaitable[messages.Response]]
                 ) -> messages.Response:
    """Answer a request by passing it on.

    :raises HTTPError: if that raises an UpstreamError
    """
    uploads = upload_body.image_of(message) is not None
    try:
        return await (upload_body.answer(message, pass_on) if uploads
                      else pass_on(message))
    except upstream_client.UpstreamError as e:
        warn(message, e)
        # A client tries again after a 503, as it would without us.
        raise messages.HTTPError(502 if uploads or e.malformed else 503,
                                 f'The Image service did not answer: {e}')


def warn(message: messages.Message, error: Exception) -> None:
    """Log that a request was not answered."""
    _STRANGERS.warning('%s %s: %s', message.method,
                       message.target.partition('?')[0], error)
