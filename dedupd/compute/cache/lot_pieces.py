# SPDX-License-Identifier: Apache-2.0

"""Pieces: the blocks of a lot, one by one, with their places in the image."""

from collections.abc import Iterator
import dataclasses
from typing import Any

from glance_dedup.transfer import image_assembly


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of an image; without a name it is zeros.

    :ivar address: of the block in this repository; 0: not here, or not known
    """

    offset: int
    length: int
    name: bytes = b''
    address: int = 0

    @property
    def end(self) -> int:
        """The offset behind the block."""
        return self.offset + self.length


def pieces_of(lot: image_assembly.Lot, offset: int,
              end: int) -> Iterator[Piece]:
    """The pieces of a lot that have bytes of a range."""
    start = lot.begin
    for part in lot.parts:
        if isinstance(part, int):
            if start < end and start + part > offset:
                yield Piece(start, part)
            start += part
            continue
        for name, length, address in zip(part.names, part.lengths,
                                         part.addresses):
            if start < end and start + length > offset:
                yield Piece(start, length, name, address)
            start += length


def fill(view: memoryview, offset: int, pieces: list[Piece],
         plain: list[Any]) -> None:
    """Copy the bytes of pieces into a buffer that begins at `offset`.

    :param plain: the bytes of each piece; ignored for pieces of zeros
    """
    end = offset + len(view)
    for piece, data in zip(pieces, plain):
        first = max(piece.offset, offset)
        last = min(piece.end, end)
        if first < last:
            view[first - offset:last - offset] = (
                data[first - piece.offset:last - piece.offset] if piece.name
                else bytes(last - first))
