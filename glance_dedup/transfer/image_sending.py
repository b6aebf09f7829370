# SPDX-License-Identifier: Apache-2.0

"""Sending an image to the repository of another site, or of a storing host.

Only blocks that the other site lacks go over the wire. The sender describes
the image lot by lot. The receiver answers which blocks of a lot are missing,
and the sender sends these while it describes the next lot
(``replication.rst``, "Replication"). The image stays open meanwhile, so its
deletion here takes no blocks away from the sender.

If a connection breaks, the sender connects again, and goes on where the
receiver is. After a failure nothing is remembered here: the next attempt
describes the image again, and the receiver finds the blocks that came.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import secrets
import time
from typing import Any

from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.base import pacing
from glance_dedup.base import thread_pool
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import replica_upload
from glance_dedup.client import wire
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages
from glance_dedup.transfer import image_assembly

#: Seconds to wait before each further attempt. If none of these attempts makes
#: progress, the sender gives up.
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
#: Seconds to wait until another sender is done, or the receiver drops it.
BUSY_SECONDS = 30.0
BUSY_PAUSE = 1.0
#: Number of requests under way.
REQUESTS = 2

_WAIT = 10.0
_STEP = 0.2


@dataclasses.dataclass(frozen=True)
class Sent:
    """Result of sending an image."""

    size: int
    upload_id: str
    """The upload id of the image there; that of the image here differs."""
    location: str | None
    """The location for that site's Glance; None: it is not known, since the
    image was there already."""
    found_blocks: int
    """Blocks that were there already, or that the image names again."""
    sent_blocks: int
    sent_bytes: int
    """Bytes of all requests on the wire, without TLS."""
    whole: str | None
    """Why the receiver wanted all blocks; None: only the missing ones."""
    exists: bool
    """Whether the image was there already, and was only compared."""


class Unsure(Exception):
    """The outcome of an upload is unknown, for the reason in the message."""


def send(repository: image_repository.Repository, image_id: str,
         client: daemon_client.Client, *, pace: pacing.Pace | None = None,
         location: str | None = None,
         confirm: Callable[[str | None], Any] = lambda location: None
         ) -> Sent:
    """Copy an image to the repository that the client's daemon serves.

    :param client: a client with an operator's certificate; the caller must not
        use it for anything else meanwhile
    :param pace: it gets the progress, in bytes of the image, and the number of
        bytes about to be sent. It may end the sending; the other site then
        keeps the blocks that came
    :param location: the one that an interrupted sending was to get
    :param confirm: called right before the commit there, with the location
        that the image is about to get; an exception from it ends the sending
    :raises ImageNotFound: there is no such image
    :raises DamagedError: the image cannot be read; it does not come to exist
        there
    :raises glance_dedup.client.daemon_client.ClientError: the receiver
        refuses, fails, or is away
    """
    with repository.open_image(image_id) as image:
        # One hash is enough: the other site's Glance gets the hash of ours.
        known = hashes.recorded(repository.path, image.stat)
        sender = _Sender(image, wire.RecipeHeader.of(
            image.stat, repository.parameters), client,
            pace or pacing.Pace(), known=next(iter(known.items()), ()),
            location=location)
        return sender.run(confirm)


def upload(repository: image_repository.Repository, image: openimages.Image,
           client: daemon_client.Client, target: str,
           headers: list[tuple[str, str]], timeout: float
           ) -> tuple[Sent, dict]:
    """Have the client's daemon upload an image's bytes to its Glance.

    :param image: an open image, whose id is `imageids.upload_id`'s
    :param client: as for `send`
    :param target: the id of Glance's image
    :param headers: of the request to Glance
    :param timeout: the seconds that Glance has
    :returns: result of sending; and Glance's answer, as of `Replica.upload`
    :raises Unsure: the request to Glance may have been made
    :raises ClientError: it was not made
    """
    answers = []

    def finish(replica: replica_upload.Replica) -> dict:
        try:
            answers.append(replica.upload(target, headers, timeout))
        except client_errors.Refused as e:
            if e.code == 502:
                raise Unsure(str(e)) from e
            raise
        except client_errors.ClientError as e:
            raise Unsure(str(e)) from e
        return {'upload_id': ''}

    sender = _Sender(image, wire.RecipeHeader.of(
        image.stat, repository.parameters), client, pacing.Pace(), finish)
    return sender.run(lambda location: None), answers[0]


# -- lots ---------------------------------------------------------------------

@dataclasses.dataclass
class _Lot:
    """A part of the image.

    :ivar extents: the lot's description
    :ivar blocks: how many blocks the lot has
    :ivar missing: how many of them the other site lacks
    :ivar posts: the requests under way that send missing blocks
    """

    offset: int
    end: int
    extents: bytes
    blocks: int
    missing: int = 0
    posts: list[futures.Future] = dataclasses.field(default_factory=list)


def _extents(image: openimages.Image, header: wire.RecipeHeader
             ) -> Iterator[wire.RecipeExtent]:
    """An image's extents, with the fingerprints of their blocks."""
    page, end = 0, 0
    while data := image.describe(page):
        source = wire.Buffer(data, exceptions.DamagedError)
        while source:
            extent = wire.read_extent(source, header, end, 0.0)
            end += extent.length
            yield extent
        page += 1


def _lots(extents: Iterator[wire.RecipeExtent], most: replica_upload.Replica,
          block_size: int) -> Iterator[_Lot]:
    """Cut a description into lots within the receiver's limits.

    The first lot begins at the offset from which the receiver wants them.
    """
    for some in image_assembly.cut(
            extents, image_assembly.most_blocks(block_size, most.lot_bytes,
                                                most.lot_blocks),
            most.offset, most.lot_zeros):
        yield _Lot(some[0].offset, some[-1].end,
                   b''.join([extent.pack() for extent in some]),
                   sum(extent.blocks for extent in some))


# -- sending ------------------------------------------------------------------

class _Sender:
    """Sends one image."""

    def __init__(self, image: openimages.Image,
                 header: wire.RecipeHeader, client: daemon_client.Client,
                 pace: pacing.Pace,
                 finish: Callable[[replica_upload.Replica], dict] = (
                     replica_upload.Replica.commit),
                 known: tuple[str, ...] = (),
                 location: str | None = None) -> None:
        self._image = image
        self._finish_there = finish
        self._hash = known
        self._location = location
        self._image_id = image.stat.image_id
        self._header = header
        self._client = client
        self._pace = pace
        self._workers = thread_pool.Workers(
            'glance-dedup-send', REQUESTS)
        self._id = secrets.token_hex(16)
        self._futures: set[futures.Future] = set()
        self._done = self._blocks = self._missing = 0

    def run(self, confirm: Callable[[str | None], Any]) -> Sent:
        before = self._client.sent
        replica, facts = self._persist(confirm)
        return Sent(
            self._image.size, facts['upload_id'],
            self._location_of(facts['upload_id']),
            max(0, self._blocks - self._missing), self._missing,
            self._client.sent - before, replica.whole, replica.exists)

    def _location_of(self, upload_id: str) -> str | None:
        """Return the location of an upload there, if it is known here."""
        location = self._location
        if location is not None and f'/{upload_id}/' in location:
            return location
        return None

    # -- attempts ---------------------------------------------------------

    def _persist(self, confirm: Callable[[str | None], Any]
                 ) -> tuple[replica_upload.Replica, dict]:
        """Send the image, over as many connections as needed."""
        pauses = iter(PAUSES)
        reached = 0
        replica: replica_upload.Replica | None = None
        while True:
            try:
                replica = self._begin()
                self._location = replica.location or self._location
                if replica.offset > reached:
                    reached = replica.offset
                    pauses = iter(PAUSES)
                return replica, self._attempt(replica, confirm)
            except client_errors.ClientError as e:
                pause = next(pauses, None)
                if replica is None or pause is None or not _may_pass(e):
                    raise
                self._pause(pause)

    def _attempt(self, replica: replica_upload.Replica,
                 confirm: Callable[[str | None], Any]) -> dict:
        try:
            self._send_lots(replica)
            confirm(replica.location)
            return self._result(self._submit(self._finish_there, replica))
        except BaseException as e:
            self._break_off()
            if not isinstance(e, client_errors.DaemonUnavailable):
                # So that the next sender need not wait for a timeout.
                with contextlib.suppress(client_errors.ClientError):
                    replica.give_up()
            raise

    def _begin(self) -> replica_upload.Replica:
        """Tell the receiver which image comes, or goes on."""
        deadline = time.monotonic() + BUSY_SECONDS
        stat = self._image.stat
        while True:
            try:
                return self._client.begin_replica(
                    self._image_id, stat.upload_id, self._header, self._id,
                    stat.project, *self._hash)
            except client_errors.Refused as e:
                if e.code in (404, 405):
                    raise client_errors.Refused(
                        e.code, f'{self._client.address}: the daemon there '
                        'takes no images. Update it') from e
                if e.code != 503 or time.monotonic() > deadline:
                    raise
            self._pause(BUSY_PAUSE)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._step('waiting for the receiver')
            time.sleep(min(left, _STEP))

    def _break_off(self) -> None:
        """Stop the requests without a waiting thread."""
        for future in self._futures:
            future.cancel()
        self._client.interrupt()
        futures.wait(self._futures, _WAIT)
        self._futures.clear()

    # -- one attempt ------------------------------------------------------

    def _step(self, what: str, cost: int = 0) -> None:
        self._pace.step(self._done, self._image.size, what, cost)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Make errors of the repository name the image."""
        try:
            yield
        except exceptions.RepositoryError as e:
            raise type(e)(f'image {self._image_id} is not sent: {e}') from e

    def _submit(self, function: Callable, *args: Any) -> futures.Future:
        future = self._workers.submit(function, *args)
        self._futures.add(future)
        return future

    def _result(self, future: futures.Future) -> Any:
        """Wait for a request; the pace may stop the wait."""
        while not futures.wait([future], _STEP).done:
            self._step('sending')
        self._futures.discard(future)
        return future.result()

    def _send_lots(self, replica: replica_upload.Replica) -> None:
        self._done = replica.offset
        lots = _lots(_extents(self._image, self._header), replica,
                     self._header.block_size)
        waiting: collections.deque[_Lot] = collections.deque()
        offered = self._offer(replica, lots)
        while offered is not None:
            lot, future = offered
            ranges, lot.missing = self._result(future)
            if len(waiting) + 1 == replica.lots:
                self._finish(waiting.popleft())
            # The answer for the next lot comes while this one's blocks go.
            offered = self._offer(replica, lots)
            self._post(replica, lot, ranges)
            waiting.append(lot)
        while waiting:
            self._finish(waiting.popleft())

    def _offer(self, replica: replica_upload.Replica, lots: Iterator[_Lot]
               ) -> tuple[_Lot, futures.Future] | None:
        with self._naming():
            lot = next(lots, None)
        if lot is None:
            return None
        return lot, self._submit(replica.offer, lot.offset, lot.end,
                                 lot.extents)

    def _post(self, replica: replica_upload.Replica, lot: _Lot,
              ranges: list[tuple[int, int]]) -> None:
        """Send the blocks in some ranges of a lot."""
        while ranges:
            with self._naming():
                frames, end = self._image.frames(ranges)
            ranges = wire.rest_of(ranges, end)
            body = b''.join([*frames, wire.END_FRAME])
            self._step('sending', len(body))
            self._wait_for_room()
            lot.posts.append(
                self._submit(replica.send, lot.offset, body))

    def _wait_for_room(self) -> None:
        """Wait until few enough requests' bodies are in memory."""
        while len(busy := [future for future in self._futures
                           if not future.done()]) > REQUESTS:
            futures.wait(busy, _STEP, futures.FIRST_COMPLETED)
            self._step('sending')

    def _finish(self, lot: _Lot) -> None:
        """Wait until the receiver has all missing blocks of a lot."""
        for post in lot.posts:
            self._result(post)
        self._done = lot.end
        self._blocks += lot.blocks
        self._missing += lot.missing
        self._step('sending')


def _may_pass(error: client_errors.ClientError) -> bool:
    """Return whether an error may pass: the receiver is away or restarted."""
    return isinstance(error, client_errors.DaemonUnavailable) or (
        isinstance(error, client_errors.Refused)
        and error.code in (404, 503))
