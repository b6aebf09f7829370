# SPDX-License-Identifier: Apache-2.0

"""Putting an image together from blocks that are here and blocks that come.

The image's description is processed in *lots*. :class:`Assembly` looks up
a lot's blocks. Its user requests the missing ones, which come in any order.
Each block is fingerprinted when it comes; then the lot is stored. Several lots
may be looked up ahead of the one that is stored next. This module sends no
requests and makes no threads.
"""

import array
import collections
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
from typing import Any

from glance_dedup import _engine
from glance_dedup.client import wire
from glance_dedup.repository import openimages
from glance_dedup.repository import repo_parameters

#: A lot has at most so many blocks, as many extents, and so many bytes of
#: blocks.
LOT_BLOCKS = 4096
LOT_BYTES = 8 << 20
#: The most bytes of a lot of an image that is read while it comes. It is
#: small, because a reader of the first byte waits for the whole first lot.
READ_LOT_BYTES = 2 << 20
#: The most bytes of zeros in a lot from a sender: this bounds the work of
#: writing them.
LOT_ZEROS = 1 << 30

_RECORD = 36                    # fingerprint, length
_FINGERPRINT = 32


class BadBlock(Exception):
    """A block that came is not the requested one, or one did not come.

    :ivar offset: the block's offset in the image
    """

    def __init__(self, offset: int, what: str):
        super().__init__(f'offset {offset}: {what}')
        self.offset = offset


@dataclasses.dataclass
class Blocks:
    """A run of blocks of a lot.

    :ivar offset: the first block's offset in the image
    :ivar names: the blocks' fingerprints
    :ivar lengths: the blocks' lengths
    :ivar addresses: the blocks' addresses here; 0 for a missing block
    """

    offset: int
    names: list[bytes]
    lengths: array.array
    addresses: Any = None


@dataclasses.dataclass
class Lot:
    """A part of the image, and the blocks that it needs.

    :ivar begin: the lot's offset
    :ivar end: the offset behind the lot
    :ivar parts: runs of blocks, and numbers of zeros, in order
    :ivar wanted: fingerprint and length of each block that is still to come,
        by the block's offset in the image
    :ivar names: the fingerprints of all blocks that were wanted at first
    :ivar received: the blocks that came, by fingerprint
    :ivar before: earlier lots, whose received blocks this one may use again
    """

    begin: int
    end: int
    parts: list[Blocks | int]
    wanted: dict[int, tuple[bytes, int]] = dataclasses.field(
        default_factory=dict)
    names: set[bytes] = dataclasses.field(default_factory=set)
    received: dict[bytes, bytes] = dataclasses.field(default_factory=dict)
    before: list['Lot'] = dataclasses.field(default_factory=list)

    @property
    def blocks(self) -> Mapping[bytes, bytes]:
        """The blocks that came for this lot, or for one before it."""
        return collections.ChainMap(
            self.received, *(lot.received for lot in self.before))


def most_blocks(block_size: int, size: int | None = None,
                blocks: int | None = None) -> int:
    """The most blocks of a lot, and its most extents.

    :param size: the most bytes of a lot; LOT_BYTES if None
    :param blocks: a limit for the number of blocks; LOT_BLOCKS if None
    """
    return max(1, min(blocks or LOT_BLOCKS, (size or LOT_BYTES) // block_size))


def cut(extents: Iterable[wire.RecipeExtent], most: int, offset: int = 0,
        zeros: int = 1 << 62) -> Iterator[list[wire.RecipeExtent]]:
    """Cut a description into lots; yields each as soon as it is complete.

    Cutting again from the end of any lot gives the same further lots.

    :param most: the most blocks, and the most extents, of a lot
    :param offset: where the first lot begins
    :param zeros: the most bytes of zeros in a lot
    """
    lot: list[wire.RecipeExtent] = []
    room, left = most, zeros
    for extent in extents:
        rest = extent.behind(offset)
        while rest is not None:
            first, rest = rest.cut(room, left)
            lot.append(first)
            room -= first.blocks
            left -= 0 if first.blocks else first.length
            if not room or not left or len(lot) == most:
                yield lot
                lot, room, left = [], most, zeros
    if lot:
        yield lot


def lot_of(extents: list[wire.RecipeExtent]) -> Lot:
    """The lot with these successive extents; nothing is looked up yet."""
    return Lot(extents[0].offset, extents[-1].end, [
        Blocks(extent.offset, *_columns(extent.table)) if extent.blocks
        else extent.length for extent in extents])


def _columns(table: bytes) -> tuple[list[bytes], array.array]:
    """The fingerprints and the lengths of a table of blocks."""
    return ([table[at:at + _FINGERPRINT]
             for at in range(0, len(table), _RECORD)],
            array.array('I', b''.join(
                [table[at + _FINGERPRINT:at + _RECORD]
                 for at in range(0, len(table), _RECORD)])))


def ranges(wanted: dict[int, tuple[bytes, int]]) -> list[tuple[int, int]]:
    """The ranges of the image that these blocks fill: offset, length."""
    found: list[tuple[int, int]] = []
    for offset, (_, length) in sorted(wanted.items()):
        if found and sum(found[-1]) == offset:
            found[-1] = found[-1][0], found[-1][1] + length
        else:
            found.append((offset, length))
    return found


def why_whole(ours: repo_parameters.Parameters, theirs: Any) -> str | None:
    """Return why fingerprints cannot identify their blocks here, or None.

    :param theirs: the header of a description
    """
    if ours.verify != 'fingerprint':
        return 'blocks are compared by value here'
    if ours.block_size != theirs.block_size:
        return (f'blocks have {ours.block_size} bytes here and '
                f'{theirs.block_size} there')
    if ours.chunking != theirs.chunking:
        return f'chunking is {ours.chunking} here and {theirs.chunking} there'
    if ours.fingerprint != theirs.fingerprint:
        return (f'the fingerprint is {ours.fingerprint} here and '
                f'{theirs.fingerprint} there')
    return None


class Assembly:
    """An image that is put together from blocks here and blocks that come.

    Several threads at once may :meth:`take` blocks of different lots. One
    thread at a time may call the other methods.

    :param fingerprint: the kind of the fingerprints in the description
    :param scope: the id of the fingerprints' scope
    :param find: whether to look up blocks by their fingerprints. If not, the
        fingerprints only verify blocks; this is for another scope than the
        transaction's
    :ivar found: blocks that were here, or that the image names again
    :ivar asked: blocks that were missing
    :ivar found_bytes: the size of the blocks that were found
    :ivar asked_bytes: the size of the blocks that were missing
    """

    def __init__(self, transaction: openimages.Transaction,
                 fingerprint: str, scope: bytes, find: bool = True) -> None:
        self._transaction = transaction
        self._fingerprint = fingerprint
        self._scope = scope
        self._find = find
        # Lots that were looked up, and are not stored yet.
        self._waiting: collections.deque[Lot] = collections.deque()
        self.found = self.asked = 0
        self.found_bytes = self.asked_bytes = 0

    # -- missing blocks ---------------------------------------------------

    def look_up(self, lot: Lot) -> None:
        """Look up a lot's blocks; puts the missing ones into `lot.wanted`."""
        lot.before = list(self._waiting)
        for part in lot.parts:
            if isinstance(part, Blocks):
                self._look_up(lot, part)
        self._waiting.append(lot)

    def _look_up(self, lot: Lot, part: Blocks) -> None:
        part.addresses = array.array('Q', self._transaction.find(
            b''.join(part.names), part.lengths.tobytes())
            if self._find else bytes(8 * len(part.names)))
        offset = part.offset
        for name, length, address in zip(part.names, part.lengths,
                                         part.addresses):
            # `find` does not know blocks that were requested, but not stored.
            if address or name in lot.names or any(
                    name in earlier.names for earlier in lot.before):
                self.found += 1
                self.found_bytes += length
            else:
                self.asked += 1
                self.asked_bytes += length
                lot.names.add(name)
                lot.wanted[offset] = name, length
            offset += length

    def take(self, lot: Lot, offset: int, plain: Any) -> None:
        """Verify and keep blocks that came for an offset of the image.

        :param plain: the blocks' bytes, one block behind the other
        :raises BadBlock: the lot does not want these blocks there
        """
        for _, name, block in self._verified(lot, offset, plain):
            lot.received[name] = block

    def _verified(self, lot: Lot, offset: int, plain: Any
                  ) -> Iterator[tuple[int, bytes, bytes]]:
        """Offset, fingerprint and bytes of each block that verifies."""
        view = memoryview(plain)
        while view:
            if offset not in lot.wanted:
                raise BadBlock(offset, 'what came is not the block')
            name, length = lot.wanted[offset]
            block = view[:length]
            if _engine.fingerprint(self._fingerprint, block,
                                   self._scope) != name:
                raise BadBlock(offset,
                               'a block came that does not have its '
                               'fingerprint')
            # A copy, so that the whole buffer is not kept.
            yield offset, name, bytes(block)
            del lot.wanted[offset]
            view = view[length:]
            offset += length

    # -- storing ----------------------------------------------------------

    def store(self, lot: Lot) -> int:
        """Append a lot to the image; returns the offset behind it.

        Afterwards each block of the lot has its address; 0 for a block of
        zeros. REQUIRES: the lot is the first one that was looked up and not
        stored.

        :raises BadBlock: some of its blocks did not come
        """
        if lot.wanted:
            raise BadBlock(min(lot.wanted),
                           f'{len(lot.wanted)} blocks did not come')
        for part in lot.parts:
            if isinstance(part, Blocks):
                self._store(lot, part)
            else:
                self._transaction.add_zeros(part)
        self._waiting.popleft()
        # Otherwise each lot would keep all lots before it.
        lot.before = []
        return lot.end

    def _store(self, lot: Lot, part: Blocks) -> None:
        addresses, received = part.addresses, lot.blocks
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
                # Keeps the peer's cuts: so the next image finds these blocks.
                part.addresses[first:end] = array.array(
                    'Q', self._transaction.write_blocks(
                        b''.join([received[name]
                                  for name in part.names[first:end]]),
                        lengths))
            first = end
