#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Reading images over HTTP: bytes, recipes, and blocks as they are stored.

The engine reads in a bounded set of threads, without the GIL. While one piece
of a response is sent the next ones are read, and the segments of those that
follow are fetched from the disk. The pieces grow as long as the client takes
them fast: one that takes nothing holds four of 64 KiB and no thread.
"""

import asyncio
import collections
from collections.abc import AsyncGenerator
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
import re
import struct
from typing import Any

from oslo_log import log
import xxhash

from dedupd import http
from dedupd import tokens as tokens_module
from glance_dedup import exceptions
from glance_dedup import repository as repository_module
from glance_dedup import workers as workers_module

LOG = log.getLogger(__name__)

#: Bytes of a piece of a response.
SMALLEST = 64 * 1024
LARGEST = 512 * 1024
#: So many pieces are read ahead: the threads need not wait for the loop
#: between them. With the one that is being sent they are what a response
#: holds: 2 MiB.
DEPTH = 3
#: How far ahead segments are fetched from the disk, bytes of the image.
AHEAD = 8 * 1024 * 1024
#: Plain bytes of the frames that are made at once.
LOT = 2 * 1024 * 1024

#: Of ``POST /v1/images/{id}/blocks``.
RANGES_BYTES = 1024 * 1024
RANGES = 16384

RECIPE_TYPE = 'application/vnd.glance-dedup.recipe'
FRAMES_TYPE = 'application/vnd.glance-dedup.frames'

_IMAGE_ID = re.compile('[A-Za-z0-9_-]{1,128}')
_UPLOAD_ID = re.compile('[0-9a-f]{32}')
_RANGE = re.compile('([0-9]{0,19})-([0-9]{0,19})')
_RECIPE_HEADER = struct.Struct('<8sIIQQQ16s8x')
_FRAME_HEADER = struct.pack('<4sBBHII', b'GDFR', 0, 0, 0, 0, 0)
#: The frame that says that all came.
END_FRAME = _FRAME_HEADER + struct.pack('<Q', xxhash.xxh3_64_intdigest(
    _FRAME_HEADER))

# Seconds that a client takes for a piece, below which pieces grow and above
# which they shrink.
_FAST = 0.1
_SLOW = 1.0


def http_error(error: exceptions.RepositoryError) -> http.HTTPError:
    """What to answer for an error of the repository."""
    if isinstance(error, exceptions.ImageNotFound):
        return http.HTTPError(404, str(error))
    if isinstance(error, exceptions.InvalidParameter):
        return http.HTTPError(400, str(error))
    if isinstance(error, (exceptions.BusyError, exceptions.ClosedError)):
        return http.HTTPError(503, str(error))
    return http.HTTPError(500, str(error))


def parse_range(value: str, size: int) -> tuple[int, int] | None:
    """(first, end) of a Range header; None if the whole is to be sent.

    Of several ranges none is taken out: the whole is a valid answer.

    :raises http.HTTPError: 416
    """
    unit, equals, given = value.partition('=')
    if unit.strip().lower() != 'bytes' and equals:
        return None
    ranges = [_RANGE.fullmatch(r.strip()) for r in given.split(',')]
    bad = http.HTTPError(416, f'The range {value!r} is not one of this image, '
                              f'which has {size} bytes.',
                         {'Content-Range': f'bytes */{size}'})
    for match in ranges:
        if match is None or match[0] == '-' or (
                match[1] and match[2] and int(match[1]) > int(match[2])):
            raise bad
    if len(ranges) > 1:
        return None
    first, last = ranges[0].groups()
    if not first:
        begin, end = max(0, size - int(last)), size
    else:
        begin, end = int(first), min(size, int(last) + 1 if last else size)
    if begin >= end:
        raise bad
    return begin, end


def parse_ranges(body: Any, size: int,
                 block_size: int) -> list[tuple[int, int]]:
    """The ranges of the body of ``POST .../blocks``.

    :raises http.HTTPError: 400 or 416
    """
    ranges = body.get('ranges') if isinstance(body, dict) else None
    if not isinstance(ranges, list) or not all(
            isinstance(r, list) and len(r) == 2
            and all(type(n) is int and 0 <= n < 1 << 63 for n in r)
            for r in ranges):
        raise http.HTTPError(
            400, 'The body is not {"ranges": [[offset, length], ...]}.')
    if len(ranges) > RANGES:
        raise http.HTTPError(400, f'{RANGES} ranges are the most.')
    before = 0
    for offset, length in ranges:
        if not length or offset < before:
            raise http.HTTPError(
                400, 'The ranges are not in order, or one is empty.')
        before = offset + length
        if before > size:
            raise http.HTTPError(
                416, f'The image has {size} bytes, and not the range '
                     f'{[offset, length]}.')
        if offset % block_size or (before % block_size and before != size):
            raise http.HTTPError(
                400, f'{[offset, length]} does not lie at blocks of '
                     f'{block_size} bytes.')
    return [(offset, length) for offset, length in ranges]


def lots(ranges: list[tuple[int, int]],
         most: int) -> Iterator[list[tuple[int, int]]]:
    """Cut ranges into lists of at most `most` bytes each."""
    lot: list[tuple[int, int]] = []
    room = most
    for offset, length in ranges:
        while length:
            take = min(length, room)
            lot.append((offset, take))
            offset, length, room = offset + take, length - take, room - take
            if not room:
                yield lot
                lot, room = [], most
    if lot:
        yield lot


class Reads:
    """The handlers of requests that read images.

    :param workers: the threads that the engine reads in
    :param tokens: checks the tokens of users; None: there are none
    """

    def __init__(self, repository: repository_module.Repository,
                 workers: workers_module.Workers,
                 tokens: tokens_module.Tokens | None = None) -> None:
        self._repository = repository
        self._workers = workers
        self._tokens = tokens

    # -- handlers ----------------------------------------------------------

    async def image(self, request: http.Request, image_id: str
                    ) -> http.Response:
        """GET and HEAD /v1/images/{image_id}"""
        image = await self._open(request, image_id)
        try:
            size = image.size
            tag = f'"{image.stat.upload_id}"'
            response = http.Response(200, {
                'Content-Type': 'application/octet-stream',
                'Accept-Ranges': 'bytes', 'ETag': tag,
                'Dedup-Repository': self._repository.repository_id},
                length=size)
            if request.method == 'HEAD':
                await self._run(image.close)
                return response
            begin, end = 0, size
            wanted = request.headers.get('range')
            if wanted is not None and (
                    request.headers.get('if-range', tag) == tag):
                found = parse_range(wanted, size)
                if found is not None:
                    begin, end = found
                    response.status = 206
                    response.headers['Content-Range'] = (
                        f'bytes {begin}-{end - 1}/{size}')
                    response.length = end - begin
        except BaseException:
            await self._run(image.close)
            raise
        response.body = await _primed(self._pieces(image, begin, end))
        return response

    async def recipe(self, request: http.Request, image_id: str
                     ) -> http.Response:
        """GET /v1/images/{image_id}/recipe"""
        image = await self._open(request, image_id)
        return http.Response(
            200, {'Content-Type': RECIPE_TYPE,
                  'ETag': f'"{image.stat.upload_id}"',
                  'Dedup-Repository': self._repository.repository_id},
            await _primed(self._pages(image)))

    async def blocks(self, request: http.Request, image_id: str
                     ) -> http.Response:
        """POST /v1/images/{image_id}/blocks"""
        image = await self._open(request, image_id)
        try:
            ranges = parse_ranges(request.json(), image.size,
                                  self._repository.parameters.block_size)
        except BaseException:
            await self._run(image.close)
            raise
        return http.Response(
            200, {'Content-Type': FRAMES_TYPE,
                  'ETag': f'"{image.stat.upload_id}"'},
            await _primed(self._frames(image, ranges)))

    # -- opening -----------------------------------------------------------

    async def _open(self, request: http.Request, image_id: str
                    ) -> repository_module.Image:
        upload_id = request.query.get('upload')
        if upload_id is not None and not _UPLOAD_ID.fullmatch(upload_id):
            raise http.HTTPError(
                400, 'upload: an upload id has 32 hexadecimal digits.')
        if not _IMAGE_ID.fullmatch(image_id):
            # Nothing is called that.
            raise http.HTTPError(404, 'There is no such image.')
        await self._authorize(request, image_id)
        return await self._run(self._repository.open_image, image_id,
                               upload_id)

    async def _authorize(self, request: http.Request, image_id: str) -> None:
        """Let those read over TCP who may; those on the socket do."""
        peer = request.peer
        if peer.uid is not None or peer.operator:
            return
        token = request.headers.get('x-auth-token')
        if token is None or self._tokens is None:
            raise http.HTTPError(
                401, 'A certificate, or a token in X-Auth-Token, is needed.')
        await self._tokens.check(token, image_id)

    # -- bodies ------------------------------------------------------------

    def _run(self, function: Callable, *args: Any) -> asyncio.Future:
        """Call a function of the engine in a thread."""
        return asyncio.wrap_future(self._workers.submit(function, *args))

    async def _pieces(self, image: repository_module.Image, begin: int,
                      end: int) -> AsyncGenerator[Any, None]:
        """The bytes of a range, read one piece ahead."""
        loop = asyncio.get_running_loop()
        size, limit, offset, fetched = SMALLEST, LARGEST, begin, begin
        reading: collections.deque[asyncio.Future] = collections.deque()
        spare: list[bytearray] = []
        taken = 0
        try:
            while offset < end or reading:
                while offset < end and len(reading) <= DEPTH:
                    ahead = None
                    if offset + AHEAD // 2 > fetched < end:
                        ahead = (AHEAD, max(offset, fetched))
                        fetched = sum(ahead)
                    length = min(size, end - offset)
                    buffer = spare.pop() if spare else bytearray(size)
                    reading.append(self._run(
                        _read, image, memoryview(buffer)[:length], offset,
                        ahead))
                    offset += length
                view = await reading[0]
                reading.popleft()
                since = loop.time()
                yield view
                took = loop.time() - since
                if took < _FAST:
                    limit = min(LARGEST, 2 * limit)
                elif took > _SLOW:
                    limit = max(SMALLEST, limit // 2)
                # The first bytes are in the kernel's buffers, and tell
                # nothing of the client.
                taken += len(view)
                while 2 * size <= min(limit, taken // 8):
                    size *= 2
                size = min(size, limit)
                spare.append(view.obj)
                spare = [b for b in spare if len(b) == size]
        finally:
            await self._finish(image, reading)

    async def _pages(self, image: repository_module.Image
                     ) -> AsyncGenerator[Any, None]:
        """A recipe's description."""
        try:
            stat, parameters = image.stat, self._repository.parameters
            yield _RECIPE_HEADER.pack(
                b'GDWIRE\0\1', parameters.block_size, 0, stat.size,
                stat.zero_bytes, stat.extents,
                parameters.fingerprint.encode())
            page = 0
            while data := await self._run(image.describe, page):
                yield data
                page += 1
        finally:
            await self._finish(image, ())

    async def _frames(self, image: repository_module.Image,
                      ranges: list[tuple[int, int]]
                      ) -> AsyncGenerator[Any, None]:
        """The frames of ranges, read one lot ahead; then that which ends."""
        reading = None
        try:
            remaining = lots(ranges, LOT)
            lot = next(remaining, None)
            if lot is not None:
                reading = self._run(image.frames, lot)
            while reading is not None:
                frames = await reading
                lot = next(remaining, None)
                reading = None if lot is None else (
                    self._run(image.frames, lot))
                while frames:
                    yield frames.pop(0)
            yield END_FRAME
        finally:
            await self._finish(image, [reading] if reading else ())

    async def _finish(self, image: repository_module.Image,
                      reading: Collection[asyncio.Future]) -> None:
        """Close an image when no thread is in it any more."""
        if reading:
            await asyncio.wait(reading)
            for future in reading:
                if not future.cancelled():
                    future.exception()
        await self._run(image.close)


def _read(image: repository_module.Image, view: memoryview, offset: int,
          ahead: tuple[int, int] | None) -> memoryview:
    """Fill a buffer from `offset`, and return it.

    :param ahead: (length, offset) to fetch from the disk meanwhile
    """
    if ahead is not None:
        image.prefetch(*ahead)
    if image.readinto(view, offset) != len(view):
        raise exceptions.DamagedError(
            f'image {image.stat.image_id} ended before its end')
    return view


async def _primed(generator: AsyncGenerator[Any, None]
                  ) -> AsyncGenerator[Any, None]:
    """The same generator, of which the first piece is there already.

    So that an error in it can still become the response's status.
    """
    first = await anext(generator, None)

    async def all_of_it() -> AsyncGenerator[Any, None]:
        try:
            if first is not None:
                yield first
                async for piece in generator:
                    yield piece
        finally:
            await generator.aclose()

    return all_of_it()
