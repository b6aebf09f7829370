# SPDX-License-Identifier: Apache-2.0

"""The proxy between a compute host and Glance, in the mode ``cache``.

The proxy passes everything on unchanged, both ways, except the bytes of
images. These come from the cache, once Glance has given the image's first byte
to this very request. After a failure before the first byte is sent, the proxy
makes the plain request instead. After a later failure it makes a plain request
for the rest. If it sent bytes before the whole image had come, it first
compares them with Glance's. If they turn out not to be of Glance's image, it
ends the response there, before its announced length.

To the caller the proxy is Glance. To Glance it is a gateway: it sends the Host
by which Glance is called, and names itself in Via. It does not pass on
trailers, or interim answers other than 100.
"""

import asyncio
import collections
from collections.abc import AsyncGenerator
from collections.abc import Callable
import contextlib
import dataclasses
import hashlib
import time
from typing import Any

from oslo_log import log

from dedupd.compute.cache import arrival_list
from dedupd.compute.cache import arriving_image
from dedupd.compute.cache import cache_catalog
from dedupd.compute.cache import cached_uploads
from dedupd.http import glance
from dedupd.http import image_parts
from dedupd.http import limited
from dedupd.http import messages
from dedupd.http import passing
from dedupd.http import ranges
from dedupd.http import streams
from dedupd.http import upload_body
from dedupd.http import upstream_client
from dedupd.http.upstream_client import Header
from dedupd.http.upstream_client import text
from dedupd.http.upstream_client import without
from dedupd.serve import image_handlers
from dedupd.serve import image_source
from glance_dedup.base import exceptions
from glance_dedup.base import thread_pool
from glance_dedup.client import client_errors
from glance_dedup.repository import image_repository

LOG = log.getLogger(__name__)
_STRANGERS = limited.Log(LOG)

#: Seconds within which an image must begin to arrive.
OPEN_SECONDS = 30.0
#: Threads that open images.
_THREADS = 16

_FAILURES = (image_source.ArrivalFailed, client_errors.ClientError,
             exceptions.RepositoryError, OSError, ValueError)


@dataclasses.dataclass(frozen=True)
class _Allowed(image_parts.Facts):
    """Glance's facts of an image when it gave the first byte."""

    headers: list[Header]
    """All but those that name the part."""


class _NotFromHere(Exception):
    """The request must be passed on as it came; the message is one word."""


class Proxy:
    """Answers requests for Glance. Used in the event loop's thread.

    :param reads: reads images that are here or arriving
    :param uploads: takes uploads; None: they are passed on
    :param is_kept: returns whether an image stays here after Glance deleted it
    :param peer: names the source of missing images, for people
    :param traces: continues the traces of requests; None: they are passed on
    """

    def __init__(self, repository: image_repository.Repository,
                 upstream: upstream_client.Upstream,
                 arrivals: arrival_list.Arrivals,
                 held: cache_catalog.Held, reads: image_handlers.Reads,
                 uploads: cached_uploads.Uploads | None,
                 is_kept: Callable[[str], bool], peer: str,
                 traces: Any = None) -> None:
        self._repository = repository
        self._upstream = upstream
        self._arrivals = arrivals
        self._held = held
        self._reads = reads
        self._uploads = uploads
        self._is_kept = is_kept
        self._peer = peer
        self._traces = traces
        self._workers = thread_pool.Workers('dedupd-open', _THREADS)
        self._name = f'dedupd-{repository.repository_id}'.encode()
        self._counts: collections.Counter[str] = collections.Counter()
        self._plain: collections.Counter[str] = collections.Counter()
        self._last_failure: dict[str, Any] | None = None

    async def serve(self, message: messages.Message) -> messages.Response:
        """Answer any request."""
        if self._traces is None:
            return await self._answer(message, {})
        return await self._traces.follow('dedupd_cache', message, self._answer)

    async def _answer(self, message: messages.Message, facts: dict[str, Any]
                      ) -> messages.Response:
        """Answer a request, and add facts to its span."""
        headers = upstream_client.end_to_end(message.headers)
        self._counts['requests'] += 1
        if any(self._name in value for name, value in headers
               if name.lower() == b'via'):
            raise messages.HTTPError(508, 'glance_url of this cache leads to '
                                     'itself.')
        headers.append((b'Via', b'1.1 ' + self._name))
        asked = image_parts.asked(message, headers)
        if asked is not None:
            try:
                return await self._from_here(asked, facts)
            except _NotFromHere as e:
                self._plain[str(e)] += 1
                facts['plain'] = str(e)
        facts['source'] = 'glance'
        self._counts['relayed'] += 1
        return await passing.answer(
            message, lambda one: self._pass_on(one, headers))

    def status(self) -> dict[str, Any]:
        """The proxy's figures, for operators. Any thread."""
        arrivals = self._arrivals.status()
        return {
            'glance': self._upstream.url, 'upstream_url': self._peer,
            **{name: self._counts[name] for name in (
                'requests', 'relayed', 'here', 'arriving', 'fallbacks',
                'bytes_here', 'bytes_glance')},
            'plain': dict(self._plain), 'last_failure': self._last_failure,
            'under_way': len(arrivals['images']), 'arrivals': arrivals,
            'held': self._held.status(),
            'uploads': None if self._uploads is None
            else self._uploads.status()}

    # -- passed-on requests --------------------------------------------------

    async def _pass_on(self, message: messages.Message, headers: list[Header]
                       ) -> messages.Response:
        image_id = upload_body.image_of(message)
        if self._uploads is None or image_id is None:
            return await self._relay(message, headers, message.body)
        return await self._uploads.put(
            message, image_id, headers,
            lambda body: self._relay(message, headers, body))

    async def _relay(self, message: messages.Message, headers: list[Header],
                     body: AsyncGenerator[bytes, None] | None
                     ) -> messages.Response:
        answer = await self._upstream.ask(message.method, message.target,
                                          headers, body)
        if message.method == 'DELETE' and answer.status == 204:
            self._deleted(message.target)
        return await passing.response(message.method, answer)

    def _deleted(self, target: str) -> None:
        """If Glance has deleted an image, delete it here, too."""
        match = image_parts.IMAGE.fullmatch(target)
        if match is None or match[2]:
            return

        def stays(error: Exception) -> None:
            LOG.warning('Image %s, which was deleted in Glance, stays until '
                        'it is evicted: %s', match[1], error)

        def drop() -> None:
            try:
                if not self._is_kept(match[1]):
                    self._held.drop(match[1])
            except _FAILURES as e:
                stays(e)

        try:
            self._workers.submit(drop)
        except exceptions.NoThread as e:
            stays(e)

    # -- answers of the cache ------------------------------------------------

    async def _from_here(self, asked: image_parts.Asked,
                         facts: dict[str, Any]) -> messages.Response:
        """Answer with the cache's bytes.

        :raises _NotFromHere: if the plain request must be made
        """
        allowed = await self._ask_first_byte(asked)
        begin, end = 0, allowed.size
        if asked.range is not None:
            try:
                part = ranges.parse(asked.range, end)
            except messages.HTTPError:
                part = None
            if part is None:
                raise _NotFromHere('range')     # Glance sends the error
            begin, end = part
        reading, expected = await self._open(asked, allowed)
        if not reading.here and (
                end <= allowed.size - arriving_image.LAST_BYTES):
            # The range would end before all of the image is checked.
            try:
                self._workers.submit(reading.close)
            except exceptions.NoThread:
                reading.close()
            raise _NotFromHere('range')
        body = self._bytes(
            asked, allowed, expected,
            image_handlers.Course(reading, begin, end,
                                  proven=expected is None))
        headers = [*allowed.headers,
                   (b'Content-Length', b'%d' % (end - begin))]
        response = messages.Response(200, relayed=headers, length=end - begin,
                                     body=await image_handlers.primed(body))
        if asked.range is not None:
            response.status = 206
            headers.append((b'Content-Range', b'bytes %d-%d/%d' % (
                begin, end - 1, allowed.size)))
        facts['source'] = 'here' if expected is None else 'arriving'
        facts['bytes'] = end - begin
        self._counts[facts['source']] += 1
        self._held.used(asked.image_id)
        return response

    async def _ask_first_byte(self, asked: image_parts.Asked) -> _Allowed:
        """Have Glance judge the request.

        :raises _NotFromHere: if it gave no byte, or more than one
        """
        try:
            _, size, headers = await glance.ask_first_byte(
                self._upstream, asked.target, asked.headers)
        except upstream_client.UpstreamError:
            raise _NotFromHere('unavailable')   # Glance's answer names it
        if size is None:
            raise _NotFromHere('refused')
        return _Allowed(
            size, image_parts.md5_of(headers),
            without(headers, b'content-range', b'content-length'))

    async def _open(self, asked: image_parts.Asked, allowed: _Allowed
                    ) -> tuple[image_source.Reading,
                               arriving_image.Expected | None]:
        """Open the image that is here, or that arrives.

        An arriving image comes with the facts to compare it with.

        :raises _NotFromHere: if it is not here and does not arrive
        """
        if not self._held.worth(allowed.size):
            raise _NotFromHere('too large')
        try:
            reading = await self._run(self._open_present, asked.image_id,
                                      allowed)
            if reading is not None:
                return reading, None
            expected = await self._expected(asked, allowed)
            if expected is None:
                raise _NotFromHere('no hash')
            if self._held.is_wrong(asked.image_id, expected.mark):
                raise _NotFromHere('wrong')
            token = text(asked.headers, b'x-auth-token') or None
            return await self._run(self._open_arriving, asked.image_id,
                                   expected, token), expected
        except arriving_image.WrongImage:
            raise _NotFromHere('wrong')
        except _FAILURES as e:
            self._failed(asked.image_id, 0, e)
            raise _NotFromHere('failed')

    def _open_present(self, image_id: str, allowed: _Allowed
                      ) -> image_source.Reading | None:
        if self._held.fits(image_id, allowed.size, allowed.md5):
            with contextlib.suppress(exceptions.ImageNotFound):
                return image_source.Present(
                    self._repository.open_image(image_id))
        return None

    def _open_arriving(self, image_id: str,
                       expected: arriving_image.Expected, token: str | None
                       ) -> image_source.Reading:
        if not self._held.fits(image_id, expected.size, expected.md5):
            # The image here by this name is, or may be, another one.
            self._held.drop(image_id)
        reading = self._arrivals.open(image_id, expected, token)
        if isinstance(reading, image_source.Present) and (
                not self._held.fits(image_id, expected.size, expected.md5)):
            reading.close()
            raise image_source.ArrivalFailed(
                'another upload has just stored it, without a comparison')
        return reading

    async def _run(self, function: Any, *args: Any) -> Any:
        """Open an image by a function, in a thread, within OPEN_SECONDS."""
        future = self._workers.submit(function, *args)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            future.add_done_callback(_close_late)
            raise image_source.ArrivalFailed(
                f'it did not begin within {OPEN_SECONDS:g} seconds') from None
        except asyncio.CancelledError:
            future.add_done_callback(_close_late)   # no request waits any more
            raise

    async def _expected(self, asked: image_parts.Asked, allowed: _Allowed
                        ) -> arriving_image.Expected | None:
        """Glance's facts of the image; None if it gives too few."""
        try:
            _, record = await glance.ask_record(
                self._upstream, asked.target.removesuffix('/file'),
                without(asked.headers, b'accept', b'accept-encoding'))
        except (upstream_client.UpstreamError, ValueError):
            return None
        return _expectation(record, asked.image_id, allowed)

    # -- its bytes -----------------------------------------------------------

    async def _bytes(self, asked: image_parts.Asked, allowed: _Allowed,
                     expected: arriving_image.Expected | None,
                     course: image_handlers.Course
                     ) -> AsyncGenerator[Any, streams.Pour | None]:
        """Yield a range of the image, from the cache as far as possible.

        :param expected: None: the image was here at the beginning
        """
        begin, end = course.handed, course.handed + course.left
        try:
            async with contextlib.aclosing(self._reads.pieces(course)) as here:
                pour = None
                with contextlib.suppress(StopAsyncIteration):
                    while True:
                        pour = yield await here.asend(pour)
            return
        except streams.Disconnected:
            raise
        except arriving_image.WrongImage as e:
            if course.handed == begin:
                raise _NotFromHere('wrong')
            self._last_failure = _failure(asked.image_id, course.handed, e)
            raise       # no client must take it for the image
        except _FAILURES as e:
            self._failed(asked.image_id, course.handed, e)
            if course.handed == begin:
                raise _NotFromHere('failed')
        finally:
            self._counts['bytes_here'] += course.handed - begin
        self._counts['fallbacks'] += 1
        compared = expected if not course.proven else None
        sent = image_parts.Sent(begin, course.handed, end,
                                course.digest if compared else None)
        try:
            async with contextlib.aclosing(image_parts.rest(
                    self._upstream, asked, allowed, sent)) as rest:
                async for piece in rest:
                    self._counts['bytes_glance'] += len(piece)
                    yield piece
        except image_parts.OtherImage as e:
            assert compared is not None
            raise await self._is_other(asked.image_id, compared, sent, e)

    async def _is_other(self, image_id: str,
                        expected: arriving_image.Expected,
                        sent: image_parts.Sent,
                        error: image_parts.OtherImage) -> Exception:
        """Remember that the storing host's image is not Glance's."""
        await asyncio.wrap_future(self._workers.submit(
            self._held.note_wrong, image_id, expected.size, expected.mark,
            f'{error}; they came before the storing host failed'))
        wrong = arriving_image.WrongImage(f'image {image_id}: {error}')
        self._last_failure = _failure(image_id, sent.handed, wrong)
        return wrong

    def _failed(self, image_id: str, offset: int, error: Exception) -> None:
        self._last_failure = _failure(image_id, offset, error)
        _STRANGERS.warning('Image %s comes from Glance from byte %d on: %s',
                           image_id, offset, self._last_failure['text'])


def _failure(image_id: str, offset: int, error: Exception) -> dict[str, Any]:
    return {'time': time.time(), 'image_id': image_id, 'offset': offset,
            'text': str(error) or repr(error)}


def _expectation(record: dict[str, Any], image_id: str, allowed: _Allowed
                 ) -> arriving_image.Expected | None:
    if (record.get('id') != image_id
            or record.get('size') != allowed.size):
        return None
    name, value = record.get('os_hash_algo'), record.get('os_hash_value')
    if not (isinstance(name, str) and isinstance(value, str)
            and name in hashlib.algorithms_available):
        # An image from before Glance had these hashes.
        name, value = 'md5', allowed.md5
    if value is None:
        return None
    return arriving_image.Expected(allowed.size, allowed.md5, name, value)


def _close_late(future: Any) -> None:
    """Close an image whose requester no longer waits for it."""
    if not thread_pool.failed(future):
        reading = future.result()
        if reading is not None:
            reading.close()
