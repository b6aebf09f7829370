# SPDX-License-Identifier: Apache-2.0

"""The disk in a file of a disk format, for an estimate of its space.

The store would keep the *plain bytes* of such a file: its disk, and then its
rest (:doc:`image-disks`). Nothing here converts a file. Its streams are
inflated, and a sample of them is deflated again, as a conversion would do to
decide. Bytes of the rest are found by sectors: those that share a sector with
the disk, such as the marker in front of a grain, are left out.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import re

from glance_dedup import _engine
from glance_dedup.base import confined

#: Bytes of the file, or zeros, that are handed on at once.
PIECE = 4 << 20
# The limits of a conversion.
_MAX_RATIO = 64         # plain bytes of the streams, to the file's
_MIN_STREAM = 16        # plain bytes of a stream, to its own
_DERIVED_EXTENT = 40
_RECIPE_PORTION = 8
_MIN_EQUAL = 0.9
_SEARCHES = 3
# The streams with which the parameters are searched.
_PROBES = 8
_PROBES_AMONG = 256
_MIN_PROBE = 1000
#: The most streams that are tried, spread over the file.
_MAX_TRIED = 512

Read = Callable[[int, int], bytes]


class Disk:
    """The disk of a file, found to be one that a conversion would keep.

    It is a context manager, with one process for inflating.

    :param read: returns so many bytes from an offset of the file
    :ivar format: as QEMU calls it
    :ivar size: of the disk
    :ivar streams: bytes of the compressed clusters
    :ivar equal: the portion of these bytes that an encoder makes
    :raises RefusedError: the file would stay as it came
    :raises UnavailableError: no process can be confined
    """

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._file_size = size
        self.streams = 0
        self.equal = 1.0
        self._unequal = 0.0
        with contextlib.ExitStack() as stack:
            self._parser = stack.enter_context(confined.Parser(read, size))
            first, spread = self._survey()
            self.format = self._parser.format
            self.size = self._parser.disk_size
            if spread:
                self.equal = self._try(first, spread)
            if self.equal < _MIN_EQUAL:
                raise confined.RefusedError(
                    f'zlib makes only {100 * self.equal:.0f} % of its '
                    'compressed bytes again')
            self._stack = stack.pop_all()

    def __enter__(self) -> 'Disk':
        return self

    def __exit__(self, *exc_info) -> None:
        self._stack.close()

    def _survey(self) -> tuple[list[confined.Piece], list[confined.Piece]]:
        """Map the disk; the first streams, and some of all."""
        first: list[confined.Piece] = []
        spread: list[confined.Piece] = []
        step = 1
        pieces = streams = plain = 0
        for piece in self._parser.pieces():
            pieces += piece.kind >= confined.PLAIN
            if not piece.is_stream:
                continue
            if piece.kind == confined.ZSTD:
                raise confined.RefusedError('it is compressed by zstd')
            plain += piece.length
            self.streams += piece.room
            if len(first) < _PROBES_AMONG:
                first.append(piece)
            if streams % step == 0:
                spread.append(piece)
            if len(spread) > _MAX_TRIED:
                del spread[1::2]
                step *= 2
            streams += 1
        if plain > _MAX_RATIO * self._file_size:
            raise confined.RefusedError(
                f'it decodes to more than {_MAX_RATIO} times its size')
        if pieces * _DERIVED_EXTENT > self._file_size / _RECIPE_PORTION:
            raise confined.RefusedError(
                'its disk has more pieces than a file of its size is worth')
        return first, spread

    def _inflated(self, piece: confined.Piece) -> tuple[bytes, bytes]:
        """Return the plain bytes, and the stream."""
        self._parser.send(piece)
        used, plain = self._parser.receive()
        return plain, self._read(used, piece.place)

    def _try(self, first: list[confined.Piece],
             spread: list[confined.Piece]) -> float:
        """Return the portion of the streams' bytes that come out equal."""
        usual = [piece for piece in first if piece.room >= _MIN_PROBE]
        probes = sorted(usual or first, key=lambda piece: piece.room)
        has_header = first[0].kind == confined.ZLIB
        encoders: list[tuple[int, int, int, int, int]] = []
        samples = [self._inflated(piece) for piece in probes[:_PROBES]]
        equal = tried = 0
        searches = _SEARCHES
        for piece in spread:
            sample = self._inflated(piece)
            tried += len(sample[1])
            known = any(_engine.deflates_to(encoder, sample)
                        for encoder in encoders)
            # Several programs may have written the file.
            while not known and searches:
                searches -= 1
                found = _engine.find_deflate(samples or [sample], has_header)
                samples = []
                if found is not None:
                    encoders.append(found)
                    known = _engine.deflates_to(found, sample)
            equal += len(sample[1]) if known else 0
        return equal / tried

    def give(self, data: Callable[[bytes], None],
             zeros: Callable[[int], None]) -> Iterator[int]:
        """Give the plain bytes, in order; yields bytes of the file by and by.

        :raises RefusedError: a stream is damaged, or the process did what it
            must not do; what was given is only a part
        """
        rest = _Sectors(self._file_size)
        with confined.Parser(self._read, self._file_size) as parser:
            for piece in parser.pieces():
                if piece.kind < confined.PLAIN:
                    zeros(piece.length)
                elif piece.kind == confined.PLAIN:
                    yield from self._give_range(
                        piece.place, piece.place + piece.length, data)
                    rest.remove(piece.place, piece.length)
                else:
                    self._parser.send(piece)
                    used, plain = self._parser.receive()
                    data(plain[:piece.length])
                    if self._is_derived(used, len(plain)):
                        rest.remove(piece.place, used)
                    yield used
        # The rest begins where the largest cluster may end.
        zeros(-self.size % confined.MAX_CLUSTER)
        for begin, end in rest.ranges():
            yield from self._give_range(begin, end, data)

    def _is_derived(self, used: int, plain: int) -> bool:
        """Return whether a stream counts as one that an encoder makes."""
        if used * _MIN_STREAM < plain:
            return False
        self._unequal += (1 - self.equal) * used
        if self._unequal < used:
            return True
        self._unequal -= used
        return False

    def _give_range(self, begin: int, end: int,
                    data: Callable[[bytes], None]) -> Iterator[int]:
        for at in range(begin, end, PIECE):
            length = min(PIECE, end - at)
            content = self._read(length, at)
            if len(content) != length:
                raise confined.RefusedError(
                    'it became shorter while it was read')
            data(content)
            yield length


class _Sectors:
    """The sectors of a file with none of the disk's bytes: a bit for each."""

    def __init__(self, size: int) -> None:
        self._size = size
        sectors = -(-size // confined.SECTOR)
        self._removed = bytearray(-(-sectors // 8))
        if sectors % 8:
            self._removed[-1] = 0xff << sectors % 8 & 0xff

    def remove(self, place: int, length: int) -> None:
        """Remove all sectors of a range."""
        removed = self._removed
        first = place // confined.SECTOR
        end = -(-(place + length) // confined.SECTOR)
        low, high = first // 8, end // 8
        head = 0xff << first % 8 & 0xff
        tail = (1 << end % 8) - 1
        if low == high:
            removed[low] |= head & tail
            return
        removed[low] |= head
        removed[low + 1:high] = b'\xff' * (high - low - 1)
        if tail:
            removed[high] |= tail

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the others, in order."""
        begin = end = 0
        for found in re.finditer(rb'[^\xff]', self._removed):
            byte = found[0][0]
            for bit in range(8):
                sector = 8 * found.start() + bit
                if byte >> bit & 1:
                    continue
                if sector != end:
                    if begin < end:
                        yield self._bytes(begin, end)
                    begin = sector
                end = sector + 1
        if begin < end:
            yield self._bytes(begin, end)

    def _bytes(self, begin: int, end: int) -> tuple[int, int]:
        return (min(self._size, begin * confined.SECTOR),
                min(self._size, end * confined.SECTOR))
