# SPDX-License-Identifier: Apache-2.0

"""Putting an image together from blocks that are here and blocks that come.

A *lot* of the image's description is looked up; what is missing is asked for,
by whoever uses this, and comes in any order; each block is fingerprinted when
it comes; then the lot is stored. Several lots may be looked up ahead of the
one that is stored next. Nobody is asked here, and no thread is made.
"""

import array
import collections
from collections.abc import Iterable
from collections.abc import Iterator
import dataclasses
from typing import Any

from glance_dedup import _engine
from glance_dedup.client import wire
from glance_dedup.repository import parameters
from glance_dedup.repository import repository as repository_module

#: An image is worked through in lots of at most so many blocks, and as many
#: extents; and so many bytes of blocks.
LOT_BLOCKS = 4096
LOT_BYTES = 8 << 20
#: The same of one that is read while it comes: small, because who waits for
#: the first byte waits for the first lot.
READ_LOT_BYTES = 2 << 20
#: Bytes of zeros of a lot that is received from a sender: that they are
#: written is bounded, too.
LOT_ZEROS = 1 << 30

_RECORD = 36                    # fingerprint, length
_FINGERPRINT = 32


class BadBlock(Exception):
    """What came is not what was asked for.

    :ivar offset: in the image
    """

    def __init__(self, offset: int, what: str):
        super().__init__(f'offset {offset}: {what}')
        self.offset = offset


@dataclasses.dataclass
class Blocks:
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
class Lot:
    """A part of the image, and what is asked for to make it.

    :ivar begin: its offset
    :ivar end: the offset behind it
    :ivar parts: runs of blocks, and numbers of zeros, in order
    :ivar wanted: what is to come, by the block's offset in the image:
        fingerprint and length
    :ivar names: the fingerprints of what was wanted at first
    :ivar received: what came, by fingerprint
    :ivar before: lots of which it uses what came once more
    """

    begin: int
    end: int
    parts: list[Blocks | int]
    wanted: dict[int, tuple[bytes, int]] = dataclasses.field(
        default_factory=dict)
    names: set[bytes] = dataclasses.field(default_factory=set)
    received: dict[bytes, bytes] = dataclasses.field(default_factory=dict)
    before: list['Lot'] = dataclasses.field(default_factory=list)

    def block(self, name: bytes) -> bytes | None:
        """A block that came for this lot, or for one before it."""
        return next((lot.received[name] for lot in (self, *self.before)
                     if name in lot.received), None)


def most_blocks(block_size: int, size: int | None = None,
                blocks: int | None = None) -> int:
    """The most blocks of a lot, and its most extents.

    :param size: the most bytes of a lot; LOT_BYTES if None
    :param blocks: a limit of their number; LOT_BLOCKS if None
    """
    return max(1, min(blocks or LOT_BLOCKS, (size or LOT_BYTES) // block_size))


def cut(extents: Iterable[wire.RecipeExtent], most: int, offset: int = 0,
        zeros: int = 1 << 62) -> Iterator[list[wire.RecipeExtent]]:
    """Cut a description into lots, as soon as there is enough of it for one.

    From the end of any lot on it is always cut alike.

    :param most: blocks, and extents, of a lot
    :param offset: where the first lot begins
    :param zeros: the most bytes of them in a lot
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
    """The ranges of the image that blocks make up, by their offsets."""
    found: list[tuple[int, int]] = []
    for offset, (_, length) in sorted(wanted.items()):
        if found and sum(found[-1]) == offset:
            found[-1] = found[-1][0], found[-1][1] + length
        else:
            found.append((offset, length))
    return found


def why_whole(ours: parameters.Parameters, theirs: Any) -> str | None:
    """Why their blocks cannot be told by fingerprint; None if they can.

    :param theirs: the header of a description
    """
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


class Assembly:
    """An image that is put together from blocks here and blocks that come.

    Blocks of different lots may be taken by several threads at once; all else
    belongs to one thread at a time.

    :param fingerprint: the kind of those in the description
    :param scope: the id of their scope
    :param find: look for blocks by them. Without it they say what a block
        has to be, and nothing more: for those of another scope than the
        transaction's
    :ivar found: blocks that were here, or that the image names once more
    :ivar asked: blocks that were not
    """

    def __init__(self, transaction: repository_module.Transaction,
                 fingerprint: str, scope: bytes, find: bool = True) -> None:
        self._transaction = transaction
        self._fingerprint = fingerprint
        self._scope = scope
        self._find = find
        # Lots that are looked up, and not stored yet.
        self._waiting: collections.deque[Lot] = collections.deque()
        self.found = self.asked = 0

    # -- what is missing --------------------------------------------------

    def look_up(self, lot: Lot) -> None:
        """Find out which blocks of a lot are to come: `lot.wanted`."""
        lot.before = list(self._waiting)
        for part in lot.parts:
            if isinstance(part, Blocks):
                self._look_up(lot, part)
        self.asked += len(lot.wanted)
        self._waiting.append(lot)

    def _look_up(self, lot: Lot, part: Blocks) -> None:
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

    def take(self, lot: Lot, offset: int, plain: Any) -> None:
        """Verify the blocks that came for an offset of the image.

        :param plain: their bytes, one behind the other
        :raises BadBlock: they are not those that the lot wants there
        """
        for _, name, block in self._verified(lot, offset, plain):
            lot.received[name] = block

    def _verified(self, lot: Lot, offset: int, plain: Any
                  ) -> Iterator[tuple[int, bytes, bytes]]:
        """Offset, fingerprint and bytes of what is wanted no more now."""
        view = memoryview(plain)
        while view:
            if offset not in lot.wanted:
                raise BadBlock(offset, 'what came is not the block')
            name, length = lot.wanted[offset]
            block = view[:length]
            if _engine.fingerprint(self._fingerprint, block,
                                   self._scope) != name:
                raise BadBlock(offset,
                               'a block came that has not its fingerprint')
            # A copy: what else came beside it is not kept.
            yield offset, name, bytes(block)
            del lot.wanted[offset]
            view = view[length:]
            offset += length

    # -- storing ----------------------------------------------------------

    def store(self, lot: Lot) -> int:
        """Append a lot to the image; returns the offset behind it.

        REQUIRES: it is the first of those looked up and not stored, and
        nothing of it is wanted any more. Then each of its blocks has its
        address; 0 for one that is all zeros.
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
        # Or each would keep all those before it.
        lot.before = []
        return lot.end

    def _store(self, lot: Lot, part: Blocks) -> None:
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
                # Cut as they are there: the next one finds them by that.
                part.addresses[first:end] = array.array(
                    'Q', self._transaction.write_blocks(
                        b''.join([lot.block(name)
                                  for name in part.names[first:end]]),
                        lengths))
            first = end
