# SPDX-License-Identifier: Apache-2.0

"""Pulling: copying an image from another repository.

A pull requests only the blocks that this repository lacks, as ranges of the
image. It trusts nothing: each block is fingerprinted when it comes, and the
image is committed last. Blocks of a failed pull stay until the next
collection, so that the next pull finds them.

:func:`pull` copies one image for a command. The cache of a compute host
extends :class:`Pull`, so that others can read the blocks that have come.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import time
from typing import Any

from glance_dedup.base import exceptions
from glance_dedup.base import scopes
from glance_dedup.base import thread_pool
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import wire
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages
from glance_dedup.transfer import image_assembly
from glance_dedup.transfer import image_description
from glance_dedup.transfer import source_peer

#: Number of lots under way; at most twice as many are in memory.
LOTS = 4
#: A sync point is made after this many received bytes.
SYNC_BYTES = 32 << 20
#: If fewer came, a sync point is made after this many seconds, so that a kill
#: loses no more.
SYNC_SECONDS = 3.0

_WAIT = 10.0

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a pull."""

    stat: openimages.ImageStat
    found_blocks: int
    """Blocks that were here already, or that the image names again."""
    asked_blocks: int
    received_bytes: int
    """Bytes of all answers on the wire, without TLS."""
    whole: str | None
    """Why the pull requested all bytes; None: only the missing blocks."""


def pull(repository: image_repository.Repository, image_id: str,
         client: daemon_client.Client, *, project: str = '',
         scope: str = 'global',
         progress: Progress = lambda done, size: None) -> Result:
    """Copy an image from the repository that the client's daemon serves.

    :param client: the caller must not use it for anything else meanwhile
    :param project: the project that will own the image
    :param scope: as for Repository.begin
    :param progress: called with the image's bytes done, and its size
    :raises ImageExists: at once, if the image is here
    :raises glance_dedup.client.daemon_client.ClientError: the peer refuses,
        fails, or sends wrong data
    """
    before = client.received
    source = source_peer.Peer(lambda token: client, image_id)
    found = asked = done = 0
    with contextlib.ExitStack() as stack:
        transaction = stack.enter_context(
            repository.begin(image_id, project, scope))
        stack.enter_context(keeping(transaction))
        recipe = stack.enter_context(source.recipe())
        header = recipe.header
        whole = image_assembly.why_whole(repository.parameters, header)
        if whole is not None:
            recipe.close()
            for piece in whole_image(transaction, source, header.size):
                done += len(piece)
                progress(done, header.size)
        else:
            find = header.scope == scopes.choose(scope, project)
            if not find:
                whole = 'its blocks are of another scope there'
            description = stack.enter_context(contextlib.closing(
                image_description.Description(str(source), header)))
            # All of it first: a lie in it is found before anything is stored.
            description.fill(recipe)
            blocks = stack.enter_context(Pull(
                transaction, header, description, source,
                thread_pool.Workers('glance-dedup-pull', LOTS), find))
            for done in blocks.run():
                progress(done, header.size)
            found, asked = blocks.assembly.found, blocks.assembly.asked
        stat = transaction.commit()
    return Result(stat, found, asked, client.received - before, whole)


@contextlib.contextmanager
def keeping(transaction: openimages.Transaction) -> Iterator[None]:
    """If anything fails within, keep the blocks that came: they are good."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(exceptions.RepositoryError):
            transaction.keep()
        raise


def whole_image(transaction: openimages.Transaction,
                source: source_peer.Peer, size: int
                ) -> Iterator[bytes]:
    """Fetch all bytes of an image; yields each piece once it is written.

    :param size: the image's size by its description
    :raises ClientError: the peer refuses, fails, or sends another size
    :raises RepositoryError: the transaction can only be aborted
    """
    with source.stream() as stream:
        if stream.size != size:
            raise client_errors.BadAnswer(
                f'{source} has {stream.size} bytes, and {size} by its '
                'description')
        while piece := stream.read(openimages.PIECE):
            transaction.write(piece)
            yield piece


class Pull:
    """Fetches an image's missing blocks, some lots ahead of storing them.

    One thread uses it, except for :meth:`fetch`. Leaving its ``with`` block
    ends it. The methods with an underscore are for subclasses to extend.

    :param description: it may still be filling
    :param workers: they run the requests, LOTS at once
    :param find: as for Assembly
    :ivar assembly: counts present and missing blocks
    """

    def __init__(self, transaction: openimages.Transaction,
                 header: wire.RecipeHeader,
                 description: image_description.Description,
                 source: source_peer.Peer,
                 workers: thread_pool.Workers, find: bool = True) -> None:
        self.assembly = image_assembly.Assembly(
            transaction, header.fingerprint, header.scope, find)
        self._transaction = transaction
        self._description = description
        self._source = source
        self._workers = workers
        self._calls: list[futures.Future] = []
        self._unsynced = 0              # received bytes
        self._synced = time.monotonic()

    def __enter__(self) -> 'Pull':
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any
                 ) -> None:
        self.end(error)

    def run(self) -> Iterator[int]:
        """Fetch and store all lots; yields the offset behind each stored one.

        :raises ClientError: the peer refuses, fails, or sends wrong data
        :raises RepositoryError: the transaction can only be aborted
        """
        waiting: collections.deque[
            tuple[image_assembly.Lot,
                  futures.Future | None]] = collections.deque()
        try:
            for lot in self._description.lots():
                self._look_up(lot)
                waiting.append((lot, self.submit(self.fetch, lot)
                                if lot.wanted else None))
                if len(waiting) == LOTS:
                    yield self._finish(*waiting.popleft())
            while waiting:
                yield self._finish(*waiting.popleft())
        except image_assembly.BadBlock as e:
            raise client_errors.BadAnswer(f'{self._source}, {e}') from e

    def submit(self, function: Callable, *args: Any) -> futures.Future:
        """Run a call on a worker; :meth:`end` waits for it."""
        future = self._workers.submit(function, *args)
        self._calls.append(future)
        return future

    def fetch(self, lot: image_assembly.Lot) -> None:
        """Receive the blocks that a lot wants. Any thread.

        :raises ClientError, BadBlock: if they do not come
        """
        for frame in self._source.blocks(image_assembly.ranges(lot.wanted)):
            self._take(lot, frame)
        if lot.wanted:
            raise image_assembly.BadBlock(
                min(lot.wanted), f'{len(lot.wanted)} blocks did not come')

    def end(self, error: BaseException | None) -> None:
        """Stop the calls without a waiting thread.

        :param error: why the pull failed; None: it did not
        """
        if error is not None:
            self._description.give_up(error)
            self._source.interrupt()
        for future in self._calls:
            future.cancel()
        futures.wait(self._calls, _WAIT)

    def _finish(self, lot: image_assembly.Lot, fetched: futures.Future | None
                ) -> int:
        """Store the first lot that is under way; returns its end."""
        if fetched is not None:
            # Stored blocks are kept even if nothing comes any more.
            while not futures.wait([fetched], SYNC_SECONDS).done:
                self._sync_in_time()
            fetched.result()
            self._calls.remove(fetched)
        self._store(lot)
        self._unsynced += sum(map(len, lot.received.values()))
        self._sync_in_time()
        return lot.end

    def _sync_in_time(self) -> None:
        """Make a sync point if enough was stored, or some of it long ago."""
        if self._unsynced >= SYNC_BYTES or self._unsynced and (
                time.monotonic() - self._synced >= SYNC_SECONDS):
            self._sync()
            self._synced = time.monotonic()
            self._unsynced = 0

    # -- steps ------------------------------------------------------------

    def _look_up(self, lot: image_assembly.Lot) -> None:
        """Look up the next lot."""
        self.assembly.look_up(lot)

    def _take(self, lot: image_assembly.Lot, frame: wire.Frame) -> None:
        """Verify and keep blocks that came for a lot. Any thread."""
        for offset, block in frame.blocks():
            self.assembly.take(lot, offset, block)

    def _store(self, lot: image_assembly.Lot) -> None:
        """Store the first lot of those looked up; all its blocks came."""
        self.assembly.store(lot)

    def _sync(self) -> None:
        """Make all stored blocks durable, and readable by others."""
        self._transaction.keep()
