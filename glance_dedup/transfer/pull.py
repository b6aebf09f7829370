# SPDX-License-Identifier: Apache-2.0

"""Pulling: copying an image from another repository.

A pull requests only the blocks that this repository lacks, as ranges of the
image. It trusts nothing: each block is fingerprinted when it comes, and the
image is committed last. Blocks of a failed pull stay until the next
collection, so that the next pull finds them.
"""

import collections
from collections.abc import Callable
from concurrent import futures
import contextlib
import dataclasses
import tempfile
from typing import Any

from glance_dedup.base import exceptions
from glance_dedup.base import scopes
from glance_dedup.base import workers as workers_module
from glance_dedup.client import daemon as daemon_module
from glance_dedup.client import wire
from glance_dedup.repository import openimages
from glance_dedup.repository import repository as repository_module
from glance_dedup.transfer import assembler

#: How many lots are under way; at most twice as many are in memory.
LOTS = 3
#: A recipe of more bytes than this waits in a temporary file.
RECIPE_BYTES = 16 << 20

_WAIT = 10.0

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a pull did."""

    stat: openimages.ImageStat
    found_blocks: int
    """Blocks that were here already, or that the image names again."""
    asked_blocks: int
    received_bytes: int
    """Bytes of all answers on the wire, without TLS."""
    whole: str | None
    """Why the pull requested all bytes; None: only the missing blocks."""


def pull(repository: repository_module.Repository, image_id: str,
         client: daemon_module.Client, *, project: str = '',
         scope: str = 'global',
         progress: Progress | None = None) -> Result:
    """Copy an image from the repository that the client's daemon serves.

    :param client: the caller must not use it for anything else meanwhile
    :param project: the project that will own the image
    :param scope: as for Repository.begin
    :param progress: called with the image's bytes done, and its size
    :raises ImageExists: at once, if the image is here
    :raises glance_dedup.client.daemon.ClientError: the peer refuses, fails, or
        sends wrong data
    """
    before = client.received
    with contextlib.ExitStack() as stack:
        transaction = stack.enter_context(
            repository.begin(image_id, project, scope))
        recipe = stack.enter_context(client.recipe(image_id))
        whole = assembler.why_whole(repository.parameters, recipe.header)
        if whole is not None:
            puller: Any = _WholePuller(transaction, client, image_id, recipe)
        elif recipe.header.scope != scopes.choose(scope, project):
            whole = 'its blocks are of another scope there'
            puller = _Puller(transaction, client, image_id, recipe,
                             repository.parameters.block_size, find=False)
        else:
            puller = _Puller(transaction, client, image_id, recipe,
                             repository.parameters.block_size)
        try:
            puller.run(progress or (lambda done, size: None))
        except BaseException:
            # Whatever failed, the blocks that came are good.
            with contextlib.suppress(exceptions.RepositoryError):
                transaction.keep()
            raise
        stat = transaction.commit()
    return Result(stat, puller.found, puller.asked, client.received - before,
                  whole)


class _WholePuller:
    """Reads the whole image, and stores it as an upload does."""

    def __init__(self, transaction: openimages.Transaction,
                 client: daemon_module.Client, image_id: str,
                 recipe: daemon_module.Recipe) -> None:
        self._transaction = transaction
        self._client = client
        self._image_id = image_id
        self._size = recipe.header.size
        self._upload_id = recipe.upload_id
        self.found = self.asked = 0
        # This class does not need the recipe's extents.
        recipe.close()

    def run(self, progress: Progress) -> None:
        with self._client.open_image(
                self._image_id, upload_id=self._upload_id) as stream:
            if stream.size != self._size:
                raise daemon_module.BadAnswer(
                    f'{self._client.address}: image {self._image_id} has '
                    f'{stream.size} bytes, and {self._size} by its recipe')
            done = 0
            while piece := stream.read(openimages.PIECE):
                self._transaction.write(piece)
                done += len(piece)
                progress(done, self._size)


# -- what is missing ----------------------------------------------------------

class _Puller:
    """Pulls the missing blocks, some lots ahead of storing them.

    :param find: as for Assembly
    """

    def __init__(self, transaction: openimages.Transaction,
                 client: daemon_module.Client, image_id: str,
                 recipe: daemon_module.Recipe, block_size: int,
                 find: bool = True) -> None:
        self._assembly = assembler.Assembly(
            transaction, recipe.header.fingerprint, recipe.header.scope, find)
        self._block_size = block_size
        self._client = client
        self._image_id = image_id
        self._recipe = recipe
        self._workers = workers_module.Workers('glance-dedup-pull', LOTS)
        # Lots that are not stored yet.
        self._waiting: collections.deque[
            tuple[assembler.Lot, futures.Future | None]] = collections.deque()

    @property
    def found(self) -> int:
        return self._assembly.found

    @property
    def asked(self) -> int:
        return self._assembly.asked

    def run(self, progress: Progress) -> None:
        size = self._recipe.header.size
        try:
            with tempfile.SpooledTemporaryFile(RECIPE_BYTES) as file:
                self._keep_recipe(file)
                for extents in assembler.cut(
                        wire.RecipeExtent.unpacked(file),
                        assembler.most_blocks(self._block_size)):
                    self._begin(assembler.lot_of(extents))
                    if len(self._waiting) == LOTS:
                        progress(self._finish(), size)
                while self._waiting:
                    progress(self._finish(), size)
        except assembler.BadBlock as e:
            raise daemon_module.BadAnswer(
                f'{self._client.address}: image {self._image_id}, {e}') from e
        finally:
            self._stop()

    def _keep_recipe(self, file: Any) -> None:
        """Read the recipe to its end.

        The peer would not wait as long as the blocks may take.
        """
        daemon_module.need_room(
            f'{self._client.address}: image {self._image_id}',
            self._recipe.header)
        for extent in self._recipe:
            file.write(extent.pack())
        self._recipe.close()
        file.seek(0)

    def _stop(self) -> None:
        """Stop the requests for which nobody waits any more."""
        left = [future for _, future in self._waiting if future is not None]
        if left:
            for future in left:
                future.cancel()
            self._client.interrupt()
            futures.wait(left, _WAIT)

    def _begin(self, lot: assembler.Lot) -> None:
        """Look up a lot's blocks, and start to fetch the missing ones."""
        self._assembly.look_up(lot)
        future = None
        if lot.wanted:
            future = self._workers.submit(self._fetch, lot)
        self._waiting.append((lot, future))

    def _fetch(self, lot: assembler.Lot) -> None:
        """Receive the blocks of a lot, in a thread."""
        for frame in self._client.blocks(
                self._image_id, self._recipe.upload_id,
                assembler.ranges(lot.wanted)):
            for offset, block in frame.blocks():
                self._assembly.take(lot, offset, block)

    def _finish(self) -> int:
        """Store the first lot; returns the offset behind it."""
        lot, future = self._waiting[0]
        if future is not None:
            future.result()
        self._waiting.popleft()
        return self._assembly.store(lot)
