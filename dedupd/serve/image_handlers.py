# SPDX-License-Identifier: Apache-2.0

"""Reading images over HTTP: bytes, recipes, and blocks as they are stored.

The engine reads in a bounded set of threads, without the GIL, while the disk
reads ahead. A thread that has read a piece sends it, and goes on until the
client takes nothing more at once. Over TLS, threads read the next pieces while
one is sent. The pieces grow while the client takes them fast. A client that
takes nothing holds four pieces of 64 KiB and no thread.

The parts of an arriving image that have come are read in the same way. No
thread waits for other parts, except parts ahead of the pull.
"""

import asyncio
import collections
from collections.abc import AsyncGenerator
from collections.abc import AsyncIterator
from collections.abc import Callable
from collections.abc import Collection
import contextlib
import hashlib
from typing import Any
from typing import NamedTuple

from oslo_log import log

from dedupd.http import glance_tokens
from dedupd.http import messages
from dedupd.http import ranges
from dedupd.http import streams
from dedupd.serve import image_source
from dedupd.serve import memory_sharing
from dedupd.serve import pins
from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.base import hexids
from glance_dedup.base import imageids
from glance_dedup.base import thread_pool
from glance_dedup.client import client_errors
from glance_dedup.client import shared_memory
from glance_dedup.client import wire
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages

LOG = log.getLogger(__name__)

#: The minimum and maximum bytes of a piece of a response.
MIN_SIZE = 64 * 1024
MAX_SIZE = 512 * 1024
#: So many pieces are read ahead, so that threads need not wait for the loop
#: between pieces. With the piece that is being sent, they are what a response
#: holds: 2 MiB.
DEPTH = 3
#: The bytes that a thread sends before others get their turn.
TURN = 8 * 1024 * 1024

#: An image has failed if nothing of it comes for so many seconds.
STALLED = 30.0
#: Threads that fetch parts ahead of the pull.
_FETCHERS = 16

RECIPE_TYPE = 'application/vnd.glance-dedup.recipe'
FRAMES_TYPE = 'application/vnd.glance-dedup.frames'

# The most images remembered because the log already has the reason why no
# token opens them.
_MAX_REFUSED = 1000

# If a client takes a piece in fewer than _FAST seconds, pieces grow; if it
# takes more than _SLOW seconds, they shrink.
_FAST = 0.1
_SLOW = 1.0


def http_error(error: exceptions.RepositoryError) -> messages.HTTPError:
    """Return the HTTP error that answers an error of the repository."""
    if isinstance(error, exceptions.ImageNotFound):
        return messages.HTTPError(404, str(error))
    if isinstance(error, exceptions.InvalidParameter):
        return messages.HTTPError(400, str(error))
    if isinstance(error, (exceptions.BusyError, exceptions.ClosedError,
                          exceptions.NoThread, exceptions.UnavailableError)):
        return messages.HTTPError(503, str(error))
    return messages.HTTPError(500, str(error))


def needs_no_token(request: messages.Request) -> bool:
    """Clients on the socket, and operators over TCP, read all images."""
    return request.peer.uid is not None or request.peer.operator


class Reads:
    """The handlers of requests that read images.

    :param workers: the threads in which the engine reads
    :param tokens: checks the tokens of users; None: no user has one
    :param arrive: opens images that are not here, for the Unix socket; None:
        only images that are here can be read
    :param limits: the times that clients with shared memory have; None:
        no memory is shared
    """

    def __init__(self, repository: image_repository.Repository,
                 workers: thread_pool.Workers,
                 tokens: glance_tokens.Tokens | None = None,
                 arrive: Callable[[str], image_source.Reading] | None = None,
                 limits: messages.Limits | None = None) -> None:
        self._repository = repository
        self._workers = workers
        self._fetchers = thread_pool.Workers('dedupd-fetch', _FETCHERS)
        self._tokens = tokens
        # The logged sentence, by image.
        self._refused: collections.OrderedDict[str, str] = (
            collections.OrderedDict())
        self._arrive = arrive
        self._holds = pins.Pins(repository)
        self._sweep: asyncio.TimerHandle | None = None
        self._sharing = (None if limits is None
                         else memory_sharing.Sharing(self._run, limits))

    # -- handlers ----------------------------------------------------------

    async def image(self, request: messages.Request, image_id: str
                    ) -> messages.Response:
        """GET and HEAD /v1/images/{image_id}"""
        image = await self._open_reading(request, image_id)
        try:
            size = image.size
            tag = f'"{image.upload_id}"'
            response = messages.Response(200, {
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
                found = ranges.parse(wanted, size)
                if found is not None:
                    begin, end = found
                    response.status = 206
                    response.headers['Content-Range'] = (
                        f'bytes {begin}-{end - 1}/{size}')
                    response.length = end - begin
            if self._sharing is not None and request.peer.uid is not None and (
                    request.upgrade == shared_memory.PROTOCOL):
                response.session = self._sharing.offer(image, end - begin)
        except BaseException:
            await self._run(image.close)
            raise
        if response.session is not None:
            response.session.headers |= response.headers
            return response
        response.body = await primed(self.pieces(Course(image, begin, end)))
        return response

    async def recipe(self, request: messages.Request, image_id: str
                     ) -> messages.Response:
        """GET /v1/images/{image_id}/recipe"""
        image = await self._open_held(request, image_id)
        try:
            known = await self._run(hashes.recorded, self._repository.path,
                                    image.stat)
        except BaseException:
            await self._run(image.close)
            raise
        return messages.Response(
            200, {'Content-Type': RECIPE_TYPE,
                  'ETag': f'"{image.stat.upload_id}"',
                  'Dedup-Hashes': hashes.pack_header(known),
                  'Dedup-Repository': self._repository.repository_id},
            await primed(self._pages(image)))

    async def blocks(self, request: messages.Request, image_id: str
                     ) -> messages.Response:
        """POST /v1/images/{image_id}/blocks"""
        image = await self._open_held(request, image_id)
        try:
            wanted = ranges.parse_body(request.json(), image.size)
        except BaseException:
            await self._run(image.close)
            raise
        return messages.Response(
            200, {'Content-Type': FRAMES_TYPE,
                  'ETag': f'"{image.stat.upload_id}"'},
            await primed(self.frames(image, wanted)))

    # -- opening -----------------------------------------------------------

    @contextlib.asynccontextmanager
    async def admit(self, request: messages.Request, image_id: str
                    ) -> AsyncIterator[None]:
        """Check a request before its body is received, which takes memory."""
        await self.permit(request, image_id)
        yield

    async def permit(self, request: messages.Request, image_id: str
                     ) -> tuple[str | None, hashes.Hash | None]:
        """Return the upload that an allowed request means, and its hash.

        None means any upload; and no hash, if Glance has none or got no
        request.

        :raises HTTPError: if the request is not allowed
        """
        upload_id = request.query.get('upload')
        if upload_id is not None and not hexids.is_valid(upload_id):
            raise messages.HTTPError(
                400, 'upload: an upload id has 32 hexadecimal digits.')
        if not imageids.is_image(image_id):
            # No image has such a name.
            raise messages.HTTPError(404, 'There is no such image.')
        said = None
        if not needs_no_token(request):
            if imageids.of_backup(image_id) is not None:
                # None of Glance's images, whatever Glance answers.
                raise messages.HTTPError(404, 'There is no such image.')
            said = await self._ask_glance(request, image_id)
        return upload_id, said

    async def open(self, request: messages.Request, image_id: str
                   ) -> openimages.Image:
        """Open the image that a request may read.

        :raises HTTPError: if it may not
        :raises RepositoryError: if the image is not here, or cannot be opened
        """
        # Check again: receiving a body in between takes its time.
        upload_id, said = await self.permit(request, image_id)
        if needs_no_token(request):
            return await self._run(self._repository.open_image, image_id,
                                   upload_id)
        image = await self._run(self._repository.open_image, image_id)
        try:
            # Check the opened image, not one that has its name later.
            await self._run(hashes.require_same, self._repository.path,
                            image.stat, said)
            if upload_id not in (None, image.stat.upload_id):
                raise exceptions.ImageNotFound(
                    f'image {image_id} is not of the upload {upload_id}')
        except BaseException as e:
            await self._run(image.close)
            if isinstance(e, (hashes.Other, hashes.Unproven)):
                raise self.refusal(image_id, e)
            raise
        return image

    async def _open_held(self, request: messages.Request, image_id: str
                         ) -> openimages.Image | pins.Lease:
        """Open an image for another host's pull.

        An operator's host goes on although the image was deleted meanwhile.
        A user's token opens no deleted image, since Glance has none.
        """
        if not request.peer.operator:
            return await self.open(request, image_id)
        upload_id, _ = await self.permit(request, image_id)
        lease = await self._run(self._holds.open, image_id, upload_id)
        if self._sweep is None:
            self._sweep_later()
        return lease

    def _sweep_later(self) -> None:
        """Have images closed that get no more requests."""
        self._sweep = asyncio.get_running_loop().call_later(
            pins.SECONDS / 10, self._sweep_now)

    def _sweep_now(self) -> None:
        self._sweep = None
        if self._holds.count:
            self._sweep_later()
            with contextlib.suppress(exceptions.NoThread):
                self._workers.submit(self._holds.sweep)

    def refusal(self, image_id: str, error: Exception) -> messages.HTTPError:
        """Return the answer to a token if hashes differ; logged once."""
        return messages.HTTPError(
            404 if isinstance(error, hashes.Other) else 403,
            self._told(image_id, error))

    def _told(self, image_id: str, error: Exception) -> str:
        if self._refused.get(image_id) != str(error):
            LOG.warning('No token opens image %s. %s', image_id, error)
            self._refused[image_id] = str(error)
            while len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)
        return str(error)

    async def _open_reading(self, request: messages.Request, image_id: str
                            ) -> image_source.Reading:
        try:
            return image_source.Present(await self.open(request, image_id))
        except exceptions.ImageNotFound:
            if self._arrive is None or request.peer.uid is None or (
                    'upload' in request.query):
                raise
            try:
                return await asyncio.wrap_future(
                    self._fetchers.submit(self._arrive, image_id))
            except (image_source.ArrivalFailed,
                    client_errors.ClientError) as e:
                raise messages.HTTPError(503, str(e))

    async def _ask_glance(self, request: messages.Request, image_id: str
                          ) -> hashes.Hash | None:
        """Check that a user may read; return the image that Glance means."""
        token = request.headers.get('x-auth-token')
        if token is None or self._tokens is None:
            raise messages.HTTPError(
                401, 'A certificate, or a token in X-Auth-Token, is needed.')
        return await self._tokens.check(token, image_id)

    # -- bodies ------------------------------------------------------------

    def _run(self, function: Callable, *args: Any) -> asyncio.Future:
        """Call a function of the engine in a thread."""
        return asyncio.wrap_future(self._workers.submit(function, *args))

    async def pieces(self, course: 'Course'
                     ) -> AsyncGenerator[Any, streams.Pour | None]:
        """Yield the bytes of a range; then close the image."""
        loop = asyncio.get_running_loop()
        more = _Bell(loop, course.image)
        reading: collections.deque[asyncio.Future] = collections.deque()
        pour = None
        try:
            while course.left or reading:
                if not reading and not course.ready:
                    if course.in_order:
                        await more.wait(lambda: course.ready)
                        continue
                    reading.append(asyncio.wrap_future(self._fetchers.submit(
                        course.read, course.next())))
                # Pieces already read are sent before a thread sends any.
                elif pour is not None and not reading:
                    reading.append(self._run(course.pour, pour))
                while pour is None and course.ready and len(reading) <= DEPTH:
                    reading.append(self._run(course.read, course.next()))
                # Not cancelled with this task: a thread has the socket.
                await asyncio.wait([reading[0]])
                view = reading.popleft().result()
                if not view:
                    continue
                if course.proven:
                    hashing = None
                else:
                    hashing = self._run(course.hash, view)
                since = loop.time()
                pour = yield view
                if hashing is not None:
                    await hashing
                course.taken(view, loop.time() - since)
        finally:
            await self._finish(course.image, reading)

    async def _pages(self, image: openimages.Image | pins.Lease
                     ) -> AsyncGenerator[Any, streams.Pour | None]:
        """A recipe's description."""
        try:
            page = 0
            data = await self._run(image.describe, page)    # or it refuses
            yield wire.RecipeHeader.of(
                image.stat, self._repository.parameters).pack()
            while data:
                yield data
                page += 1
                data = await self._run(image.describe, page)
        finally:
            await self._finish(image, ())

    async def frames(self, image: openimages.Image | pins.Lease,
                     wanted: list[tuple[int, int]]
                     ) -> AsyncGenerator[Any, streams.Pour | None]:
        """Yield frames of ranges, read one call ahead; then the end frame."""
        reading = None
        try:
            if wanted:
                reading = self._run(image.frames, wanted)
            while reading is not None:
                frames, end = await reading
                wanted = wire.rest_of(wanted, end)
                reading = (self._run(image.frames, wanted) if wanted
                           else None)
                while frames:
                    yield frames.pop(0)
            yield wire.END_FRAME
        finally:
            await self._finish(image, [reading] if reading else ())

    async def _finish(self, image: (openimages.Image | pins.Lease
                                    | image_source.Reading),
                      reading: Collection[asyncio.Future]) -> None:
        """Close an image once no thread uses it any more."""
        if reading:
            await asyncio.wait(reading)
            for future in reading:
                if not future.cancelled():
                    future.exception()
        await self._run(image.close)


class _Step(NamedTuple):
    """A piece to read."""

    view: memoryview
    offset: int


class _Bell:
    """Waits until more of an image has come."""

    def __init__(self, loop: asyncio.AbstractEventLoop,
                 image: image_source.Reading) -> None:
        self._loop = loop
        self._rung = asyncio.Event()
        image.on_more(self._ring)

    def _ring(self) -> None:
        """Called in any thread."""
        with contextlib.suppress(RuntimeError):     # the loop has ended
            self._loop.call_soon_threadsafe(self._rung.set)

    async def wait(self, enough: Callable[[], Any]) -> None:
        """Wait until there may be enough.

        :raises ArrivalFailed: if nothing came for STALLED seconds
        """
        self._rung.clear()
        if enough():
            return
        try:
            async with asyncio.timeout(STALLED):
                await self._rung.wait()
        except TimeoutError:
            raise image_source.ArrivalFailed(
                f'no part of the image came for {STALLED:g} seconds'
            ) from None


class Course:
    """Goes through a range of an image, in pieces that fit the client.

    Only one thread at a time may use it, except for `read`.

    :param proven: `digest` will not be called

    :ivar handed: the offset behind the last byte that was sent
    :ivar proven: true if the sent bytes need no proof, because the whole
        image is here by now, or because no proof is wanted
    :ivar in_order: true to wait for missing bytes rather than fetch them:
        so for a client that begins at the beginning
    """

    def __init__(self, image: image_source.Reading, begin: int, end: int, *,
                 proven: bool = True) -> None:
        self.image = image
        self.handed = begin
        self.proven = proven
        self._hash = hashlib.sha256()
        self.in_order = not begin
        self._offset = begin
        self._end = end
        self._size, self._limit = MIN_SIZE, MAX_SIZE
        self._sent = 0
        self._spare: list[memoryview] = []

    @property
    def left(self) -> int:
        """Bytes of the range that were not given to `next` yet."""
        return self._end - self._offset

    @property
    def ready(self) -> int:
        """Bytes that can be read without waiting."""
        return min(self.left, self.image.available(self._offset))

    def next(self) -> _Step:
        """The next piece: from the ready bytes, or else from those left.

        REQUIRES: some bytes are left.
        """
        offset = self._offset
        buffer = (self._spare.pop() if self._spare
                  else memoryview(bytearray(self._size)))
        view = buffer[:min(self._size, self.ready or self.left)]
        self._offset += len(view)
        return _Step(view, offset)

    def read(self, step: _Step) -> memoryview:
        """Fill the buffer of a piece, and return it."""
        self.image.readinto(step.view, step.offset)
        return step.view

    def pour(self, send: streams.Pour) -> memoryview:
        """Read and send pieces; return the bytes that must wait, if any."""
        stop = self._sent + TURN
        while self._sent < stop and self.ready:
            view = self.read(self.next())
            piece = view
            while sent := send(view):
                self.hash(view[:sent])
                self.handed += sent
                view = view[sent:]
                if not view:
                    break
            if view:
                return view
            self._reuse(piece)
        return memoryview(b'')

    def hash(self, view: memoryview) -> None:
        """Add sent bytes to the digest, in order, if they need proof."""
        self.proven = self.proven or self.image.here
        if not self.proven:
            self._hash.update(view)

    @property
    def digest(self) -> bytes:
        """The SHA-256 of all sent bytes. REQUIRES: they are not proven."""
        return self._hash.digest()

    def taken(self, view: memoryview, seconds: float) -> None:
        """Note that the client took this many seconds for a piece."""
        if seconds < _FAST:
            self._limit = min(MAX_SIZE, 2 * self._limit)
        elif seconds > _SLOW:
            self._limit = max(MIN_SIZE, self._limit // 2)
        self.handed += len(view)
        self._reuse(view)

    def _reuse(self, view: memoryview) -> None:
        # The first bytes are in the kernel's buffers, and show nothing of
        # the client.
        self._sent += len(view)
        while 2 * self._size <= min(self._limit, self._sent // 8):
            self._size *= 2
        self._size = min(self._size, self._limit)
        self._spare.append(memoryview(view.obj))    # the whole buffer
        self._spare = [b for b in self._spare if len(b) == self._size]


async def primed(generator: AsyncGenerator[Any, streams.Pour | None]
                 ) -> AsyncGenerator[Any, streams.Pour | None]:
    """Return the same generator, after it has produced its first piece.

    So an error in the first piece can still become the response's status.
    """
    first = await anext(generator, None)

    async def all_of_it() -> AsyncGenerator[Any, streams.Pour | None]:
        piece = first
        try:
            with contextlib.suppress(StopAsyncIteration):
                while piece is not None:
                    piece = await generator.asend((yield piece))
        finally:
            await generator.aclose()

    return all_of_it()
