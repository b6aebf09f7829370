# SPDX-License-Identifier: Apache-2.0

"""Lending: a cache gives its neighbours blocks of images.

Images that are here are lent as the daemon lends them to any client. Images
that arrive are lent, too: otherwise each host of a rack that begins at the
same time would get all of the image from the storing host. A neighbour gets
the blocks that have come, and waits for those that are on their way from the
storing host; the lender fetches the rest from there at once. The lender does
not wait for blocks that come to it from another neighbour, so no hosts wait
for each other. If the lender can give no more, the answer ends early. Blocks
that it has announced as stored come in any case: so it holds the arrival for
the whole answer, and waits for its commit.
"""

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import AsyncIterator
from collections.abc import Iterator
import contextlib
import threading
import time
from typing import Any

from dedupd.compute.cache import arrival_list
from dedupd.compute.cache import arriving_image
from dedupd.compute.cache import image_pull
from dedupd.http import messages
from dedupd.http import ranges
from dedupd.http import streams
from dedupd.serve import image_handlers
from dedupd.serve import image_source
from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.base import hexids
from glance_dedup.base import thread_pool
from glance_dedup.client import client_errors
from glance_dedup.client import wire
from glance_dedup.transfer import image_assembly

#: The most requests at once.
MAX_COUNT = 32
#: An answer ends early if nothing came for so many seconds. A neighbour's
#: patience is longer (``neighbour_caches.SILENT_SECONDS``).
WAIT_SECONDS = 4.0


class Loan:
    """The blocks of ranges of an arriving image. One thread at a time.

    :param arrival: held by the caller
    :param partial: of the arrival
    :param wanted: ranges, sorted, without overlap, within the image
    :param workers: fetch missing blocks
    """

    def __init__(self, arrival: arriving_image.Arrival,
                 partial: image_pull.ImagePull,
                 wanted: list[tuple[int, int]],
                 workers: thread_pool.Workers) -> None:
        self._arrival = arrival
        self._partial = partial
        self._rest = wanted
        self._workers = workers
        # The blocks of the present lot that were not given yet.
        self._wanted: dict[int, tuple[bytes, int]] = {}
        # Set once the missing ones were fetched; None: no thread fetches them.
        self._fetched: threading.Event | None = None

    def next(self) -> list[bytes]:
        """Some frames; none: nothing more is to be had, or the rest came.

        :raises InvalidParameter: if a range begins or ends within a block
        :raises RepositoryError: if a block cannot be read
        """
        with self._arrival.working() as present:
            if present is None:
                try:
                    return self._of_arrival()
                except image_pull.NoMore:
                    present = self._arrival.settled(WAIT_SECONDS)
            return [] if present is None else self._of_image(present)

    def _of_image(self, image: image_source.Present) -> list[bytes]:
        """Frames of an image that is here by now."""
        self._rest = image_assembly.ranges(self._wanted) + self._rest
        self._wanted = {}
        frames: list[bytes] = []
        while self._rest and not frames:    # a call may find only zeros
            frames, end = image.frames(self._rest)
            self._rest = wire.rest_of(self._rest, end)
        return frames

    def _of_arrival(self) -> list[bytes]:
        """Frames of the received blocks.

        :raises NoMore: the pull has ended
        """
        while not self._wanted and self._rest:
            if self._partial.ended:
                raise image_pull.NoMore()
            try:
                self._wanted, self._rest = self._partial.cut(
                    self._rest, WAIT_SECONDS)
            except (client_errors.ClientError, image_source.ArrivalFailed,
                    OSError):
                return []               # it has not been described here
            self._fetched = None
        return self._of_lot() if self._wanted else []

    def _of_lot(self) -> list[bytes]:
        """Frames of the present lot."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            if self._partial.ended:
                raise image_pull.NoMore()
            changes = self._partial.changes
            is_over = self._fetched is not None and self._fetched.is_set()
            try:
                blocks = self._partial.ready(self._wanted, wire.MAX_FRAME)
            except exceptions.ClosedError as e:
                raise image_pull.NoMore() from e
            if blocks:
                for offset in blocks:
                    del self._wanted[offset]
                return [wire.plain_frame(list(blocks.items()))]
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not self._partial.is_coming(self._wanted):
                if is_over:
                    break
                if self._fetched is None:
                    self._fetched = threading.Event()
                    self._workers.submit(self._fetch, dict(self._wanted),
                                         self._fetched)
            self._partial.wait(changes, left)
        self._wanted, self._rest = {}, []
        return []

    def _fetch(self, wanted: dict[int, tuple[bytes, int]],
               fetched: threading.Event) -> None:
        """Fetch missing blocks, even if no request is left that needs them."""
        try:
            with self._arrival.working() as present:
                if present is None and not self._partial.ended:
                    self._partial.fetch_early(wanted)
        finally:
            fetched.set()
            self._partial.tell()


class Lending:
    """The handler of neighbours' requests. In the event loop's thread.

    :param repository_id: of this cache
    :param by_token: whether images arrive with their users' tokens
    """

    def __init__(self, repository_id: str, reads: image_handlers.Reads,
                 arrivals: arrival_list.Arrivals, by_token: bool) -> None:
        self._headers = {'Dedup-Repository': repository_id}
        self._reads = reads
        self._arrivals = arrivals
        self._by_token = by_token
        self._readers = thread_pool.Workers('dedupd-lend', MAX_COUNT)
        # Not the threads of readers, which wait for them.
        self._fetchers = thread_pool.Workers('dedupd-lend-fetch', MAX_COUNT)
        self._busy = self._lent = 0

    def status(self) -> dict[str, int]:
        """The figures, for operators. Any thread."""
        return {'lent_bytes': self._lent, 'lending': self._busy}

    @contextlib.asynccontextmanager
    async def admit(self, request: messages.Request, image_id: str
                    ) -> AsyncIterator[None]:
        """Check a request before its body is received."""
        if request.headers.get('dedup-repository') == (
                self._headers['Dedup-Repository']):
            raise messages.HTTPError(
                409, 'This host asks itself.', self._headers)
        if self._busy >= MAX_COUNT:
            raise messages.HTTPError(
                503, f'{MAX_COUNT} neighbours are being served.',
                self._headers)
        with self._counting():
            async with self._reads.admit(request, image_id):
                yield

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    async def blocks(self, request: messages.Request, image_id: str
                     ) -> messages.Response:
        """POST /v1/cached/{image_id}/blocks"""
        arrival = self._arrivals.under_way(image_id)
        if arrival is not None and arrival.partial is not None:
            await self._require_allowed(request, arrival)
            wanted = ranges.parse_body(request.json(), arrival.size)
            asker = request.headers.get('dedup-repository', '')
            if hexids.is_valid(asker):
                arrival.partial.heard(asker)
            if arrival.hold():
                return await self._response(
                    arrival.stored, self._frames(arrival, Loan(
                        arrival, arrival.partial, wanted, self._fetchers)))
        try:
            image = await self._reads.open(request, image_id)
        except exceptions.ImageNotFound as e:
            raise messages.HTTPError(404, str(e), self._headers)
        try:
            wanted = ranges.parse_body(request.json(), image.size)
        except BaseException:
            await self._run(image.close)
            raise
        return await self._response(image.size,
                                    self._reads.frames(image, wanted))

    async def _require_allowed(self, request: messages.Request,
                               arrival: arriving_image.Arrival) -> None:
        """Check that a request may have blocks of an arriving image."""
        # Check again: receiving a body in between takes its time.
        _, said = await self._reads.permit(request, arrival.image_id)
        if image_handlers.needs_no_token(request):
            return
        try:
            if not self._by_token:
                # The storing host has not compared it with Glance's for us.
                raise hashes.Unproven(
                    f'Image {arrival.image_id} is still arriving, and not yet '
                    'compared with its hash.')
            arrival.require_same(said)
        except (hashes.Unproven, hashes.Other) as e:
            raise self._reads.refusal(arrival.image_id, e)

    async def _response(self, stored: int,
                        frames: AsyncGenerator[Any, streams.Pour | None]
                        ) -> messages.Response:
        return messages.Response(
            200, {**self._headers, 'Content-Type': image_handlers.FRAMES_TYPE,
                  'Dedup-Stored': str(stored)},
            await image_handlers.primed(self._counted(frames)))

    async def _counted(self, frames: AsyncGenerator[Any, streams.Pour | None]
                       ) -> AsyncGenerator[Any, streams.Pour | None]:
        """The same frames; the request counts until all are sent."""
        with self._counting():
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    self._lent += len(frame)
                    yield frame

    async def _frames(self, arrival: arriving_image.Arrival, loan: Loan
                      ) -> AsyncGenerator[Any, streams.Pour | None]:
        """All frames of a loan; then the arrival is let go."""
        try:
            while frames := await self._run(loan.next):
                for frame in frames:
                    yield frame
            yield wire.END_FRAME
        finally:
            await self._run(arrival.let_go)

    def _run(self, function: Any) -> asyncio.Future:
        return asyncio.wrap_future(self._readers.submit(function))
