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

"""Pulling: copying an image from another repository.

Only the blocks that this repository lacks are asked for, as ranges of the
image. Nothing is believed: each block is fingerprinted when it comes, and the
image is committed last. What came of a pull that failed stays until the next
collection, so that the next pull finds it.
"""

import array
import collections
from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import struct
import tempfile
from typing import Any

from dedupd import client as client_module
from glance_dedup import _engine
from glance_dedup import exceptions
from glance_dedup import parameters
from glance_dedup import repository as repository_module
from glance_dedup import scopes
from glance_dedup import workers as workers_module

#: The image is worked through in lots of at most so many blocks and bytes.
LOT_BLOCKS = 4096
LOT_BYTES = 8 << 20
#: So many lots are under way; at most twice as many are in memory.
LOTS = 3
#: Of a recipe, more than so many bytes wait in a temporary file.
RECIPE_BYTES = 16 << 20

_EXTENT = struct.Struct('<QQI')
_RECORD = 36                    # fingerprint, length
_FINGERPRINT = 32
_WAIT = 10.0

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a pull did."""

    stat: repository_module.ImageStat
    found_blocks: int
    """Blocks that were here, or that the image names once more."""
    asked_blocks: int
    received_bytes: int
    """Of all answers, as they came over the wire, without TLS."""
    whole: str | None
    """Why all bytes were asked for; None: only what was missing was."""


def pull(repository: repository_module.Repository, image_id: str,
         client: client_module.Client, *, project: str = '',
         scope: str = 'global',
         progress: Progress | None = None) -> Result:
    """Copy an image from the repository that the client's daemon serves.

    :param client: not used for anything else meanwhile
    :param project: that the image is to belong to
    :param scope: as for Repository.begin
    :param progress: called with the image's bytes done, and its size
    :raises ImageExists: at once, if the image is here
    :raises dedupd.client.ClientError: the peer refuses, fails, or sends what
        is not the image
    """
    before = client.received
    with contextlib.ExitStack() as stack:
        transaction = stack.enter_context(
            repository.begin(image_id, project, scope))
        recipe = stack.enter_context(client.recipe(image_id))
        whole = _why_whole(repository.parameters, recipe.header)
        if whole is not None:
            puller: Any = _WholePuller(transaction, client, image_id, recipe)
        elif recipe.header.scope != scopes.choose(scope, project):
            whole = 'its blocks are of another scope there'
            puller = _Puller(repository, transaction, client, image_id,
                             recipe, find=False)
        else:
            puller = _Puller(repository, transaction, client, image_id,
                             recipe)
        try:
            puller.run(progress or (lambda done, size: None))
        except BaseException:
            # Whatever is wrong: the blocks that came are good ones.
            with contextlib.suppress(exceptions.RepositoryError):
                transaction.keep()
            raise
        stat = transaction.commit()
    return Result(stat, puller.found, puller.asked, client.received - before,
                  whole)


def _why_whole(ours: parameters.Parameters,
               theirs: client_module.RecipeHeader) -> str | None:
    """Why their blocks cannot be told by fingerprint; None if they can."""
    if ours.compare != 'hash':
        return 'blocks are compared by value here'
    if ours.block_size != theirs.block_size:
        return (f'blocks have {ours.block_size} bytes here and '
                f'{theirs.block_size} there')
    if ours.cutting != theirs.cutting:
        return f'cutting is {ours.cutting} here and {theirs.cutting} there'
    if ours.fingerprint != theirs.fingerprint:
        return (f'the fingerprint is {ours.fingerprint} here and '
                f'{theirs.fingerprint} there')
    return None


class _WholePuller:
    """Reads the image as anybody would, and stores it as any other."""

    def __init__(self, transaction: repository_module.Transaction,
                 client: client_module.Client, image_id: str,
                 recipe: client_module.Recipe) -> None:
        self._transaction = transaction
        self._client = client
        self._image_id = image_id
        self._size = recipe.header.size
        self._upload_id = recipe.upload_id
        self.found = self.asked = 0
        # Its extents are of no use.
        recipe.close()

    def run(self, progress: Progress) -> None:
        with self._client.open_image(
                self._image_id, upload_id=self._upload_id) as stream:
            if stream.size != self._size:
                raise client_module.BadAnswer(
                    f'{self._client.address}: image {self._image_id} has '
                    f'{stream.size} bytes, and {self._size} by its recipe')
            done = 0
            while piece := stream.read(repository_module.PIECE):
                self._transaction.write(piece)
                done += len(piece)
                progress(done, self._size)


# -- lots ---------------------------------------------------------------------

@dataclasses.dataclass
class _Blocks:
    """A run of blocks of a lot.

    :ivar offset: in the image, of the first
    :ivar names: their fingerprints
    :ivar lengths: their lengths
    :ivar addresses: where they are here, 0 for those that are not
    """

    offset: int
    names: list[bytes]
    lengths: array.array
    addresses: Any = None


@dataclasses.dataclass
class _Lot:
    """A part of the image, and what is asked for to make it.

    :ivar parts: runs of blocks, and numbers of zeros, in order
    :ivar end: the offset behind it
    :ivar wanted: what is to come, by the block's offset in the image:
        fingerprint and length
    :ivar names: the fingerprints of these
    :ivar received: what came, by fingerprint
    :ivar before: lots of which it uses what came once more
    """

    parts: list[_Blocks | int]
    end: int
    wanted: dict[int, tuple[bytes, int]] = dataclasses.field(
        default_factory=dict)
    names: set[bytes] = dataclasses.field(default_factory=set)
    received: dict[bytes, bytes] = dataclasses.field(default_factory=dict)
    before: list['_Lot'] = dataclasses.field(default_factory=list)


def _lots(file: Any, block_size: int) -> Iterator[_Lot]:
    """Cut a recipe that was kept into lots."""
    most = max(1, min(LOT_BLOCKS, LOT_BYTES // block_size))
    parts: list[_Blocks | int] = []
    room = most
    offset = 0
    while head := file.read(_EXTENT.size):
        offset, length, blocks = _EXTENT.unpack(head)
        if not blocks:
            parts.append(length)
            offset += length
        while blocks:
            take = min(blocks, room)
            part = _Blocks(offset, *_columns(file.read(take * _RECORD)))
            parts.append(part)
            offset += sum(part.lengths)
            blocks -= take
            room -= take
            if not room:
                yield _Lot(parts, offset)
                parts, room = [], most
        if len(parts) >= most:
            yield _Lot(parts, offset)
            parts, room = [], most
    if parts:
        yield _Lot(parts, offset)


def _columns(table: bytes) -> tuple[list[bytes], array.array]:
    """The fingerprints and the lengths of a table of blocks."""
    return ([table[at:at + _FINGERPRINT]
             for at in range(0, len(table), _RECORD)],
            array.array('I', b''.join(
                [table[at + _FINGERPRINT:at + _RECORD]
                 for at in range(0, len(table), _RECORD)])))


class _Puller:
    """Pulls what is missing, some lots ahead of what is stored.

    :param find: look for blocks by their fingerprints there; if these are of
        another scope, they say what a block has to be, and nothing more
    """

    def __init__(self, repository: repository_module.Repository,
                 transaction: repository_module.Transaction,
                 client: client_module.Client, image_id: str,
                 recipe: client_module.Recipe, find: bool = True) -> None:
        self._parameters = repository.parameters
        self._find = find
        self._transaction = transaction
        self._client = client
        self._image_id = image_id
        self._recipe = recipe
        self._workers = workers_module.Workers('glance-dedup-pull', LOTS)
        # Lots that are not stored yet.
        self._waiting: collections.deque[
            tuple[_Lot, futures.Future | None]] = collections.deque()
        self.found = self.asked = 0

    def run(self, progress: Progress) -> None:
        size = self._recipe.header.size
        try:
            with tempfile.SpooledTemporaryFile(RECIPE_BYTES) as file:
                self._keep_recipe(file)
                for lot in _lots(file, self._parameters.block_size):
                    self._begin(lot)
                    if len(self._waiting) == LOTS:
                        progress(self._finish(), size)
                while self._waiting:
                    progress(self._finish(), size)
        finally:
            self._stop()

    def _keep_recipe(self, file: Any) -> None:
        """Read the recipe to its end.

        The peer would not wait for as long as the blocks may take.
        """
        for extent in self._recipe:
            file.write(_EXTENT.pack(extent.offset, extent.length,
                                    extent.blocks))
            file.write(extent.table)
        self._recipe.close()
        file.seek(0)

    def _stop(self) -> None:
        """Let no thread go on with what nobody waits for."""
        left = [future for _, future in self._waiting if future is not None]
        if left:
            for future in left:
                future.cancel()
            self._client.interrupt()
            futures.wait(left, _WAIT)

    # -- asking -----------------------------------------------------------

    def _begin(self, lot: _Lot) -> None:
        """Look a lot's blocks up, and have what is missing fetched."""
        lot.before = [earlier for earlier, _ in self._waiting]
        for part in lot.parts:
            if isinstance(part, _Blocks):
                self._look_up(lot, part)
        future = None
        if lot.wanted:
            self.asked += len(lot.wanted)
            future = self._workers.submit(self._fetch, lot)
        self._waiting.append((lot, future))

    def _look_up(self, lot: _Lot, part: _Blocks) -> None:
        part.addresses = array.array('Q', self._transaction.find(
            b''.join(part.names), part.lengths.tobytes())
            if self._find else bytes(8 * len(part.names)))
        offset = part.offset
        for name, length, address in zip(part.names, part.lengths,
                                         part.addresses):
            # Of what is asked for and not stored yet, find does not know.
            if address or name in lot.names or any(
                    name in earlier.names for earlier in lot.before):
                self.found += 1
            else:
                lot.names.add(name)
                lot.wanted[offset] = name, length
            offset += length

    def _fetch(self, lot: _Lot) -> None:
        """Receive the blocks of a lot, in a thread."""
        wanted = dict(lot.wanted)
        for frame in self._client.blocks(
                self._image_id, self._recipe.upload_id, _ranges(wanted)):
            view = memoryview(frame.plain)
            for offset, start, length in frame.places:
                self._take(lot, wanted, offset, view[start:start + length])
        if wanted:
            self._bad(f'{len(wanted)} blocks did not come', min(wanted))

    def _take(self, lot: _Lot, wanted: dict[int, tuple[bytes, int]],
              offset: int, plain: memoryview) -> None:
        """Verify the blocks that came for an offset of the image."""
        while plain:
            if offset not in wanted:
                self._bad('what came is not the block', offset)
            name, length = wanted.pop(offset)
            block = plain[:length]
            if _engine.fingerprint(self._parameters.fingerprint, block,
                                   self._recipe.header.scope) != name:
                self._bad('a block came that has not its fingerprint', offset)
            # A copy: what else came in the frame is not kept.
            lot.received[name] = bytes(block)
            plain = plain[length:]
            offset += length

    def _bad(self, what: str, offset: int) -> None:
        raise client_module.BadAnswer(
            f'{self._client.address}: image {self._image_id}, offset '
            f'{offset}: {what}')

    # -- storing ----------------------------------------------------------

    def _finish(self) -> int:
        """Store the first lot; returns the offset behind it."""
        lot, future = self._waiting[0]
        if future is not None:
            future.result()
        self._waiting.popleft()
        for part in lot.parts:
            if isinstance(part, _Blocks):
                self._store(lot, part)
            else:
                self._transaction.add_zeros(part)
        # Or each would keep all those before it.
        lot.before = []
        return lot.end

    def _store(self, lot: _Lot, part: _Blocks) -> None:
        addresses = part.addresses
        first = 0
        while first < len(addresses):
            end = first + 1
            while end < len(addresses) and (
                    bool(addresses[end]) == bool(addresses[first])):
                end += 1
            lengths = part.lengths[first:end].tobytes()
            if addresses[first]:
                self._transaction.add(b''.join(part.names[first:end]), lengths,
                                      addresses[first:end].tobytes())
            else:
                # Cut as they are there: the next pull finds them by that.
                self._transaction.write_blocks(
                    b''.join([self._block(lot, name)
                              for name in part.names[first:end]]), lengths)
            first = end

    def _block(self, lot: _Lot, name: bytes) -> bytes:
        """A block that came for this lot, or for one before it."""
        return next(some.received[name] for some in (lot, *lot.before)
                    if name in some.received)


def _ranges(wanted: dict[int, tuple[bytes, int]]) -> list[tuple[int, int]]:
    """The ranges of the image that blocks make up, by their offsets."""
    ranges: list[tuple[int, int]] = []
    for offset, (_, length) in sorted(wanted.items()):
        if ranges and sum(ranges[-1]) == offset:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + length
        else:
            ranges.append((offset, length))
    return ranges
