# SPDX-License-Identifier: Apache-2.0

"""Putting an image together from blocks that are here and blocks that come.

A *lot* of the image's description is looked up; what is missing is asked for,
by whoever uses this, and comes in any order; each block is fingerprinted when
it comes; then the lot is stored. Several lots may be looked up ahead of the
one that is stored next. Nobody is asked here, and no thread is made.
"""

import array
import collections
from collections.abc import Iterator
import dataclasses
import struct
from typing import Any

from glance_dedup import _engine
from glance_dedup.repository import parameters
from glance_dedup.repository import repository as repository_module

#: An image is worked through in lots of at most so many blocks and bytes.
LOT_BLOCKS = 4096
LOT_BYTES = 8 << 20

#: The head of an extent of a description that was kept: offset, length, and
#: how many blocks follow, a record each; 0: zeros.
EXTENT = struct.Struct('<QQI')
RECORD = 36                     # fingerprint, length
FINGERPRINT = 32


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

    :ivar parts: runs of blocks, and numbers of zeros, in order
    :ivar end: the offset behind it
    :ivar wanted: what is to come, by the block's offset in the image:
        fingerprint and length
    :ivar names: the fingerprints of what was wanted at first
    :ivar received: what came, by fingerprint
    :ivar before: lots of which it uses what came once more
    """

    parts: list[Blocks | int]
    end: int
    wanted: dict[int, tuple[bytes, int]] = dataclasses.field(
        default_factory=dict)
    names: set[bytes] = dataclasses.field(default_factory=set)
    received: dict[bytes, bytes] = dataclasses.field(default_factory=dict)
    before: list['Lot'] = dataclasses.field(default_factory=list)

    def block(self, name: bytes) -> bytes | None:
        """A block that came for this lot, or for one before it."""
        return next((lot.received[name] for lot in (self, *self.before)
                     if name in lot.received), None)


def lots(file: Any, block_size: int) -> Iterator[Lot]:
    """Cut a description that was kept into lots."""
    most = max(1, min(LOT_BLOCKS, LOT_BYTES // block_size))
    parts: list[Blocks | int] = []
    room = most
    offset = 0
    while head := file.read(EXTENT.size):
        offset, length, blocks = EXTENT.unpack(head)
        if not blocks:
            parts.append(length)
            offset += length
        while blocks:
            take = min(blocks, room)
            part = Blocks(offset, *columns(file.read(take * RECORD)))
            parts.append(part)
            offset += sum(part.lengths)
            blocks -= take
            room -= take
            if not room:
                yield Lot(parts, offset)
                parts, room = [], most
        if len(parts) >= most:
            yield Lot(parts, offset)
            parts, room = [], most
    if parts:
        yield Lot(parts, offset)


def columns(table: bytes) -> tuple[list[bytes], array.array]:
    """The fingerprints and the lengths of a table of blocks."""
    return ([table[at:at + FINGERPRINT]
             for at in range(0, len(table), RECORD)],
            array.array('I', b''.join(
                [table[at + FINGERPRINT:at + RECORD]
                 for at in range(0, len(table), RECORD)])))


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
