# SPDX-License-Identifier: Apache-2.0

"""Recipes and frames as they go over the wire: packing and parsing them.

``doc/source/reference/http.rst`` has the formats. The bytes are a daemon's
answer, or the body of a request to a daemon. Neither is trusted: every length
is bounded, and a frame is checked before a byte of it is handed out.
"""

import bisect
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import re
import struct
from typing import Any
from typing import IO
from typing import Protocol

import xxhash

#: The most bytes of a frame, plain or as they are sent.
MAX_FRAME = 1 << 20

_FRAME = struct.Struct('<4sBBHIIQ')
_PLACE = struct.Struct('<QII')
_RECIPE = struct.Struct('<8sI4xQQQ16s16sII')
_EXTENT = struct.Struct('<QQI4x')
_LENGTH = struct.Struct('<32xI')  # of a block, behind its fingerprint
#: The bytes of a recipe's header.
RECIPE_HEADER_BYTES = _RECIPE.size
_FRAME_MAGIC = b'GDFR'
_RECIPE_MAGIC = b'GDWIRE\0'
_RECIPE_VERSION = 2
# The most blocks of an extent: an extent lies in one group.
_MAX_BLOCKS = 32768
_BLOCK = 36                     # fingerprint, length
# Blocks that an image may have beyond those that its size explains.
_SPARE_BLOCKS = 1024
_NONE, _LZ4, _ZSTD = range(3)
_LAST = _FRAME.pack(_FRAME_MAGIC, _NONE, 0, 0, 0, 0, 0)[:16]
#: The frame that ends a stream.
END_FRAME = _LAST + struct.pack('<Q', xxhash.xxh3_64_intdigest(_LAST))


class Source(Protocol):
    """The stream that a recipe or frames come from."""

    def read(self, length: int, timeout: float) -> bytes:
        """Read `length` bytes within `timeout` seconds; fewer at the end."""

    def read_exactly(self, length: int, timeout: float) -> bytes:
        """Read as `read` does; raise an exception at an early end."""

    def bad(self, why: str) -> Exception:
        """An exception for the caller to raise: the bytes are invalid."""


class Buffer:
    """A source of bytes in memory.

    :param bad: makes an exception of a sentence about the problem
    """

    def __init__(self, data: bytes, bad: Callable[[str], Exception]) -> None:
        self._data = memoryview(data)
        self.bad = bad

    def __bool__(self) -> bool:
        return bool(self._data)

    def read(self, length: int, timeout: float = 0.0) -> bytes:
        """Read as `Source.read` does, without waiting."""
        data, self._data = self._data[:length], self._data[length:]
        return bytes(data)

    def read_exactly(self, length: int, timeout: float = 0.0) -> bytes:
        """Read as `Source.read_exactly` does, without waiting."""
        if length > len(self._data):
            raise self.bad('it was cut off')
        return self.read(length)


# -- recipes ------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class RecipeHeader:
    """Header of a recipe: facts about the whole image."""

    block_size: int
    size: int
    zero_bytes: int
    extents: int
    fingerprint: str
    scope: bytes
    """the id of the fingerprints' scope"""
    chunking: str
    """as in the repository's parameters"""

    @classmethod
    def of(cls, stat: Any, parameters: Any) -> 'RecipeHeader':
        """The header of an image in a repository with these parameters."""
        return cls(parameters.block_size, stat.size, stat.zero_bytes,
                   stat.extents, parameters.fingerprint,
                   bytes.fromhex(stat.scope), parameters.chunking)

    @property
    def most_blocks(self) -> int:
        """An upper bound for the number of the image's blocks.

        Most blocks are at least as long as the shortest that chunking makes.
        Shorter are the last block before zeros, and some next to blocks that
        were found at another phase.
        """
        shortest = ([int(n) for n in self.chunking.split()[1:]]
                    or [self.block_size])[0]
        return (2 * (self.size - self.zero_bytes) // shortest + self.extents
                + _SPARE_BLOCKS)

    @property
    def most_bytes(self) -> int:
        """An upper bound for the bytes of the extents behind the header."""
        return self.extents * _EXTENT.size + self.most_blocks * _BLOCK

    def pack(self) -> bytes:
        """The header as it goes over the wire."""
        cuts = [int(n) for n in self.chunking.split()[1:]] or [0, 0]
        return _RECIPE.pack(
            _RECIPE_MAGIC + bytes([_RECIPE_VERSION]), self.block_size,
            self.size, self.zero_bytes, self.extents,
            self.fingerprint.encode(), self.scope, *cuts)

    @classmethod
    def unpack(cls, data: bytes, bad: Callable[[str], Exception]
               ) -> 'RecipeHeader':
        """The header in RECIPE_HEADER_BYTES bytes, checked.

        :param bad: makes the exception for an invalid header
        """
        (magic, block_size, size, zero_bytes, extents, name, scope, minimum,
         average) = _RECIPE.unpack(data)
        if magic[:-1] != _RECIPE_MAGIC:
            raise bad('the answer is not a recipe')
        if magic[-1] != _RECIPE_VERSION:
            raise bad(f'the recipe has version {magic[-1]}; this '
                      f'program knows {_RECIPE_VERSION}')
        if not 512 <= block_size <= 65536 or block_size & (block_size - 1):
            raise bad(f'the recipe has blocks of {block_size} bytes')
        if (minimum or average) and not 64 <= minimum < average < block_size:
            raise bad(f'the recipe has blocks of {minimum} to '
                      f'{block_size} bytes, on an average {average}')
        # Two runs of zeros in a row would be one.
        if size >= 1 << 62 or zero_bytes > size or (
                extents > min(size, 2 * (size - zero_bytes) + 1)):
            raise bad(f'the recipe has {size} bytes, {zero_bytes} '
                      f'zeros and {extents} extents')
        name = name.rstrip(b'\0')
        if not re.fullmatch(rb'[!-~]+', name):
            raise bad(f'the recipe names no fingerprint, but {name!r}')
        if name.lower() == b'weak-8':
            raise bad('the recipe has fingerprints of the kind weak-8, which '
                      'is for tests only')
        return cls(block_size, size, zero_bytes, extents,
                   name.decode('ascii'), scope,
                   f'content-defined {minimum} {average}' if average
                   else 'fixed')


@dataclasses.dataclass(frozen=True)
class RecipeExtent:
    """A run of blocks, or, if it has no blocks, a run of zeros."""

    offset: int
    length: int
    blocks: int
    table: bytes
    """for each block 36 bytes: fingerprint (32), length (32 bits)"""

    @property
    def end(self) -> int:
        """The offset in the image behind the extent."""
        return self.offset + self.length

    def pack(self) -> bytes:
        """The extent as it goes over the wire."""
        return _EXTENT.pack(self.offset, self.length, self.blocks) + self.table

    @classmethod
    def unpacked(cls, file: IO[bytes]) -> Iterator['RecipeExtent']:
        """The extents that `pack` wrote into a file. They are not checked."""
        while head := file.read(_EXTENT.size):
            offset, length, blocks = _EXTENT.unpack(head)
            yield cls(offset, length, blocks, file.read(blocks * _BLOCK))

    def cut(self, blocks: int, zeros: int
            ) -> tuple['RecipeExtent', 'RecipeExtent | None']:
        """Cut the extent in two; None: nothing is left for the second.

        :param blocks: the most blocks of the first part
        :param zeros: the most bytes of the first part, if it is zeros
        """
        table = self.table[:blocks * _BLOCK]
        length = (sum(n for n, in _LENGTH.iter_unpack(table)) if self.blocks
                  else min(self.length, zeros))
        first = RecipeExtent(self.offset, length, len(table) // _BLOCK, table)
        if length == self.length:
            return first, None
        return first, RecipeExtent(
            self.offset + length, self.length - length,
            self.blocks - first.blocks, self.table[len(table):])

    def behind(self, offset: int) -> 'RecipeExtent | None':
        """The part from `offset` on; None: there is none.

        :param offset: where a block begins, if it lies in the extent
        """
        if offset <= self.offset:
            return self
        blocks, end = 0, self.offset
        for length, in _LENGTH.iter_unpack(self.table):
            if end >= offset:
                break
            blocks, end = blocks + 1, end + length
        return self.cut(blocks, offset - self.offset)[1]


def read_extent(source: Source, header: RecipeHeader, end: int,
                timeout: float) -> RecipeExtent:
    """The next extent of a recipe, checked.

    :param end: the end of the extent before
    """
    offset, length, blocks = _EXTENT.unpack(
        source.read_exactly(_EXTENT.size, timeout))
    # This also bounds the memory for the extent.
    if (offset != end or not 0 < length <= header.size - offset
            or blocks > min(length, _MAX_BLOCKS)):
        raise source.bad(f'the recipe has an extent of {length} bytes and '
                         f'{blocks} blocks at {offset}, behind {end}')
    table = source.read_exactly(blocks * _BLOCK, timeout)
    lengths = [n for n, in _LENGTH.iter_unpack(table)]
    if blocks and not (0 < min(lengths) and max(lengths)
                       <= header.block_size and sum(lengths) == length):
        raise source.bad('the recipe has a block of another length '
                         f'in the extent at {offset}')
    return RecipeExtent(offset, length, blocks, table)


# -- frames -------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Frame:
    """Bytes of an image, and the places where they belong."""

    plain: bytes
    places: list[tuple[int, int, int]]
    """offset in the image, offset in `plain`, length"""

    def blocks(self) -> Iterator[tuple[int, memoryview]]:
        """The offset in the image and the bytes of each block."""
        view = memoryview(self.plain)
        for offset, start, length in self.places:
            yield offset, view[start:start + length]


def plain_frame(blocks: list[tuple[int, Any]]) -> bytes:
    """A frame of blocks that are not compressed.

    :param blocks: offset in the image, and bytes, of each; at least one, and
        together at most MAX_FRAME bytes
    """
    places, start = [], 0
    for offset, data in blocks:
        places.append(_PLACE.pack(offset, start, len(data)))
        start += len(data)
    body = b''.join([*places, *(data for _, data in blocks)])
    head = _FRAME.pack(_FRAME_MAGIC, _NONE, 0, len(places), start, start,
                       0)[:16]
    return head + struct.pack(
        '<Q', xxhash.xxh3_64_intdigest(head + body)) + body


def _unpack_stored(codec: int, stored: bytes, length: int) -> bytes:
    """Decompress a frame.

    :raises ValueError: it is damaged, or does not have `length` bytes
    """
    if codec == _NONE:
        plain = stored
    elif codec == _LZ4:
        from lz4 import block as lz4_block

        try:
            plain = lz4_block.decompress(stored, uncompressed_size=length)
        except lz4_block.LZ4BlockError as e:
            raise ValueError(str(e)) from e
    elif codec == _ZSTD:
        import zstandard

        try:
            # A frame can claim any size, and zstd would allocate it.
            if zstandard.frame_content_size(stored) not in (-1, length):
                raise ValueError('it claims another length')
            plain = zstandard.ZstdDecompressor().decompress(
                stored, max_output_size=length)
        except zstandard.ZstdError as e:
            raise ValueError(str(e)) from e
    else:
        raise ValueError(f'there is no codec {codec}')
    if len(plain) != length:
        raise ValueError(f'it has {len(plain)} bytes and not {length}')
    return plain


def rest_of(ranges: list[tuple[int, int]],
            end: int) -> list[tuple[int, int]]:
    """The parts of sorted ranges that lie behind an offset."""
    first = bisect.bisect_right(ranges, end, key=sum)
    rest = ranges[first:]
    if rest and rest[0][0] < end:
        rest[0] = end, sum(rest[0]) - end
    return rest


class Frames:
    """Parses a stream of frames. Iterating gives each frame, checked.

    :param ranges: the ranges that were requested: sorted, without overlap
    :param timeout: seconds for each wait
    """

    def __init__(self, source: Source, ranges: Sequence[tuple[int, int]],
                 timeout: float):
        self._source = source
        self._bad = source.bad
        self._timeout = timeout
        self._starts = [offset for offset, _ in ranges]
        self._ends = [offset + length for offset, length in ranges]
        self._left = sum(length for _, length in ranges)
        # Some frames may bring few requested bytes, but not all.
        self._plain_left = 2 * self._left + MAX_FRAME

    def __iter__(self) -> Iterator[Frame]:
        while (frame := self._next()) is not None:
            yield frame
        if self._source.read(1, self._timeout):
            raise self._bad('the frames go on behind their end')

    def _next(self) -> Frame | None:
        head = self._source.read_exactly(_FRAME.size, self._timeout)
        magic, codec, _, places, plain, stored, checksum = _FRAME.unpack(head)
        if magic != _FRAME_MAGIC:
            raise self._bad('the answer is not a frame')
        last = not places
        if last and (plain or stored) or not last and not (
                0 < stored <= plain <= MAX_FRAME):
            raise self._bad(f'a frame has {places} places, {plain} bytes, '
                            f'stored as {stored}')
        body = self._source.read_exactly(
            places * _PLACE.size + stored, self._timeout)
        if xxhash.xxh3_64_intdigest(head[:16] + body) != checksum:
            raise self._bad("a frame's checksum is wrong")
        if last:
            return None
        found = [self._place(body, number, plain) for number in range(places)]
        self._plain_left -= plain
        if self._plain_left < 0:
            raise self._bad('more plain bytes came than the ranges explain')
        try:
            data = _unpack_stored(codec, body[places * _PLACE.size:], plain)
        except ValueError as e:
            raise self._bad(f'a frame does not decompress: {e}') from e
        return Frame(data, found)

    def _place(self, body: bytes, number: int,
               plain: int) -> tuple[int, int, int]:
        place = _PLACE.unpack_from(body, number * _PLACE.size)
        offset, start, length = place
        if not length or start + length > plain:
            raise self._bad(f'a frame of {plain} bytes has a place of '
                            f'{length} at {start}')
        at = bisect.bisect_right(self._starts, offset) - 1
        if at < 0 or offset + length > self._ends[at]:
            raise self._bad(f'{length} bytes at {offset} came, which were '
                            'not asked for')
        self._left -= length
        if self._left < 0:
            raise self._bad('more bytes came than were asked for')
        return place
