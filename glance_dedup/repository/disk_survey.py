# SPDX-License-Identifier: Apache-2.0

"""The disk in a file of a disk format, and what a conversion would keep of it.

A conversion keeps the *plain bytes* of such a file: its disk, and then its
rest (:doc:`image-disks`). The limits of that page are here (F8).
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import re
import time
from typing import NamedTuple

from glance_dedup import _engine
from glance_dedup.base import confined
from glance_dedup.base import diskformats

#: Bytes of the file, or zeros, that are handed on at once.
PIECE = 4 << 20
#: The rest begins at the first multiple of this behind the end of the disk.
REST_ALIGN = 2 << 20
_MAX_RATIO = 64         # plain bytes of the streams, to the file's
_STEP = 1024            # pieces
_MIN_STREAM = 16        # plain bytes of a stream, to its own
_DERIVED_EXTENT = 40
_RECIPE_PORTION = 8
_MIN_EQUAL = 0.9
_SEARCHES = 3
# Plain bytes that are deflated in a second of the processor, at least; and
# seconds that the searches may take besides.
_MIN_SPEED = 1 << 20
_SEARCHING = 30
# The streams with which the parameters are searched.
_PROBES = 8
_PROBES_AMONG = 256
_MIN_PROBE = 1000
#: The most streams that are tried, spread over the file.
_MAX_TRIED = 512

# As diskformats has them.
_FORMATS = frozenset({'qcow2', 'vmdk', 'vpc', 'vhdx', 'vdi'})
_FOOTER = 512           # a fixed VHD has its mark at the end

Read = Callable[[int, int], bytes]


def has_format(read: Read, size: int) -> bool:
    """Return whether the bytes at the ends of a file are those of a format."""
    head = read(diskformats.HEAD, 0)
    foot = read(_FOOTER, max(0, size - _FOOTER))
    return not _FORMATS.isdisjoint(map(diskformats.format_of, (head, foot)))


def require_table(extents: int, size: int) -> None:
    """Require that a file of this size is worth a table of so many extents.

    :raises RefusedError: the table would be too large
    """
    if extents * _DERIVED_EXTENT > size / _RECIPE_PORTION:
        raise confined.RefusedError(
            'its disk has more pieces than a file of its size is worth')


def is_worth_deriving(stream: int, plain: int) -> bool:
    """Return whether a stream is long enough for its plain bytes."""
    return stream * _MIN_STREAM >= plain


class Content(NamedTuple):
    """A piece of the disk, inflated if it is a stream."""

    piece: confined.Piece
    used: int = 0
    """Bytes of the stream."""
    plain: bytes = b''
    """They may be more than the disk has of them, at its end."""


class Disk:
    """The disk of a file, if it is one that a conversion would keep.

    It is a context manager, with one process for inflating (F6). All but
    :meth:`survey` needs the end of that.

    :param read: returns so many bytes from an offset of the file
    :param is_wanted: accept a file of whose streams few are derived
    :param block_size: of the repository
    :ivar format: as Glance calls it
    :ivar size: of the disk
    :ivar streams: bytes of the compressed clusters
    :ivar equal: the portion of these bytes that an encoder makes
    :ivar encoders: parameters of zlib, as ``deflateInit2`` has them
    :ivar new_bytes: bytes of the disk in streams, or at another place within a
        block than in the file
    """

    def __init__(self, read: Read, size: int, is_wanted: bool = False,
                 block_size: int = 1) -> None:
        self._read = read
        self._file_size = size
        self._is_wanted = is_wanted
        self._block_size = block_size
        self.format = 'raw'
        self.size = 0
        self.streams = 0
        self.equal = 1.0
        self.encoders: list[tuple[int, int, int, int, int]] = []
        self.new_bytes = 0
        self._has_header = False
        self._searches = _SEARCHES
        self._last = 0          # the encoder that gave the last equal stream
        self._unequal = 0.0
        self._seconds = 0.0     # for so many plain bytes that were deflated
        self._deflated = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> 'Disk':
        return self

    def __exit__(self, *exc_info) -> None:
        self._stack.close()

    def survey(self) -> Iterator[None]:
        """Map the disk and try its streams; yields between short steps.

        :raises RefusedError: the file would stay as it came (F7)
        :raises UnavailableError: no process can be confined
        """
        self._parser = self._stack.enter_context(
            confined.Parser(self._read, self._file_size))
        first: list[confined.Piece] = []
        spread: list[confined.Piece] = []
        yield from self._map(first, spread)
        self.format = self._parser.format
        self.size = self._parser.disk_size
        if self.format == 'raw':
            raise confined.RefusedError('it has no format of a disk')
        if spread:
            yield from self._try(first, spread)
        if self.equal < _MIN_EQUAL and not self._is_wanted:
            raise confined.RefusedError(
                f'zlib makes only {100 * self.equal:.0f} % of its '
                'compressed bytes again')

    def _pieces(self, parser: confined.Parser) -> Iterator[confined.Piece]:
        """Map the disk, and keep to the limits (F8)."""
        pieces = plain = inflated = 0
        for piece in parser.pieces():
            pieces += piece.kind >= confined.PLAIN
            if piece.kind == confined.ZSTD:
                raise confined.RefusedError('it is compressed by zstd')
            if piece.is_stream:
                inflated += piece.length
            elif piece.kind == confined.PLAIN:
                plain += piece.length
            if inflated > _MAX_RATIO * self._file_size:
                raise confined.RefusedError(
                    f'it decodes to more than {_MAX_RATIO} times its size')
            if plain > self._file_size:
                raise confined.RefusedError(
                    'its disk has more bytes than the file')
            yield piece
        require_table(pieces, self._file_size)

    def _map(self, first: list[confined.Piece],
             spread: list[confined.Piece]) -> Iterator[None]:
        """Map the disk; find the first streams, and some of all."""
        step = 1
        streams = 0
        for number, piece in enumerate(self._pieces(self._parser)):
            if number % _STEP == 0:
                yield
            if piece.kind == confined.PLAIN and (
                    piece.place - piece.offset) % self._block_size:
                self.new_bytes += piece.length
            if not piece.is_stream:
                continue
            self.new_bytes += piece.length
            self.streams += piece.room
            if len(first) < _PROBES_AMONG:
                first.append(piece)
            if streams % step == 0:
                spread.append(piece)
            if len(spread) > _MAX_TRIED:
                del spread[1::2]
                step *= 2
            streams += 1

    def _inflated(self, piece: confined.Piece) -> tuple[bytes, bytes]:
        """Return the plain bytes, and the stream."""
        self._parser.send(piece)
        used, plain = self._parser.receive()
        return plain, self._read(used, piece.place)

    def _try(self, first: list[confined.Piece],
             spread: list[confined.Piece]) -> Iterator[None]:
        """Find the portion of the streams' bytes that come out equal."""
        usual = [piece for piece in first if piece.room >= _MIN_PROBE]
        probes = sorted(usual or first, key=lambda piece: piece.room)
        self._has_header = first[0].kind == confined.ZLIB
        self._search([self._inflated(piece) for piece in probes[:_PROBES]])
        equal = tried = 0
        for piece in spread:
            yield
            plain, stream = self._inflated(piece)
            tried += len(stream)
            if self.encoder_of(plain, stream) is not None:
                equal += len(stream)
        self.equal = equal / tried

    @contextlib.contextmanager
    def _timing(self, plain: int) -> Iterator[None]:
        """Note the time in which bytes are deflated, or searched (F8).

        :raises RefusedError: zlib's search is slow in this content
        """
        begin = time.thread_time()
        yield
        self._seconds += time.thread_time() - begin
        self._deflated += plain
        if (self._seconds - _SEARCHING) * _MIN_SPEED > self._deflated:
            raise confined.RefusedError(
                'to deflate its streams again takes too long')

    def _search(self, samples: list[tuple[bytes, bytes]]) -> None:
        """Add the encoder that makes all of these streams, if there is one."""
        self._searches -= 1
        with self._timing(0):
            found = _engine.find_deflate(samples, self._has_header)
        if found is not None and found not in self.encoders:
            self.encoders.append(found)

    def encoder_of(self, plain: bytes, stream: bytes
                   ) -> tuple[int, int] | None:
        """Return the encoder that makes a stream, and the stream's checksum.

        :returns: the encoder's index; None: there is none
        :raises RefusedError: this takes too long
        """
        while True:
            known = len(self.encoders)
            for index in sorted(range(known),
                                key=lambda index: index != self._last):
                with self._timing(len(plain)):
                    checksum = _engine.deflates_to(
                        self.encoders[index], (plain, stream))
                if checksum is not None:
                    self._last = index
                    return index, checksum
            # Several programs may have written the file.
            if not self._searches:
                return None
            self._search([(plain, stream)])
            if len(self.encoders) == known:
                return None

    def content(self) -> Iterator[Content]:
        """Yield the whole disk, in order.

        :raises RefusedError: a stream is damaged, or the process did what it
            must not do; what was given is only a part
        """
        with confined.Parser(self._read, self._file_size) as parser:
            for piece in self._pieces(parser):
                if piece.is_stream:
                    self._parser.send(piece)
                    yield Content(piece, *self._parser.receive())
                else:
                    yield Content(piece)
            if (parser.format, parser.disk_size) != (self.format, self.size):
                raise confined.RefusedError(
                    'it could not be parsed: its parser sent two disks')

    def give(self, data: Callable[[bytes], None],
             zeros: Callable[[int], None]) -> Iterator[int]:
        """Give the plain bytes to an estimate, in order.

        Yields bytes of the file by and by. Bytes of the rest are found by
        sectors: those that share a sector with the disk, such as the marker in
        front of a grain, are left out.

        :raises RefusedError: a stream is damaged, or the process did what it
            must not do; what was given is only a part
        """
        rest = _Sectors(self._file_size)
        for piece, used, plain in self.content():
            if piece.kind < confined.PLAIN:
                zeros(piece.length)
            elif piece.kind == confined.PLAIN:
                yield from self._give_range(
                    piece.place, piece.place + piece.length, data)
                rest.remove(piece.place, piece.length)
            else:
                data(plain[:piece.length])
                if self._is_derived(used, len(plain)):
                    rest.remove(piece.place, used)
                yield used
        zeros(-self.size % REST_ALIGN)
        for begin, end in rest.ranges():
            yield from self._give_range(begin, end, data)

    def _is_derived(self, used: int, plain: int) -> bool:
        """Return whether a stream counts as one that an encoder makes."""
        if not is_worth_deriving(used, plain):
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


def surveyed(read: Read, size: int) -> Disk:
    """Return the disk of a file, for a ``with`` block.

    :raises RefusedError, UnavailableError: as :meth:`Disk.survey`
    """
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(Disk(read, size))
        for _ in disk.survey():
            pass
        stack.pop_all()
    return disk


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
