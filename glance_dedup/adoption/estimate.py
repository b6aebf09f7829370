# SPDX-License-Identifier: Apache-2.0

"""The space that images would take if they were stored: :func:`estimate`.

The estimate cuts files as storing would cut them, keeps the fingerprints of a
sample of blocks that is as large as memory allows, and compresses new blocks.
It stores nothing (``replication.rst``, "Moving in and out"). It adds the
metadata of a repository with these blocks, so that the sum is the result of
``du``.

Files are only read. If the file system can, they are read past the page cache,
so that a production host keeps its cache. Otherwise the pages that were read
are dropped from the cache.

If a file has a disk in a format such as qcow2, a second count has the plain
bytes of these disks (:mod:`glance_dedup.repository.disk_survey`) in place of
the files, and the other files as they are.
"""

from collections.abc import Callable, Iterator
from concurrent import futures
import contextlib
import dataclasses
import errno
import fcntl
import functools
import mmap
import os
import stat

from glance_dedup import _engine
from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import confined
from glance_dedup.base import exceptions
from glance_dedup.base import formats
from glance_dedup.repository import disk_survey
from glance_dedup.repository import layout
from glance_dedup.repository import repo_parameters

PIECE = 4 << 20
#: Of recompression: the default of dedupd's option.
LEVEL = 9
#: Bytes of memory for the sample's table, unless all blocks are to be known.
TABLE = 128 << 20
#: Bytes of the table for each block, when the table is least full: while it
#: grows there are two tables.
_RECORD = 16 * (8 / 3 + 4 / 3)

# Sizes in a repository; see format.rst.
_PAGE = 4096
_MAX_BLOCK = 65536
_EXTENTS_IN_PAGE = 102
_NO_DISK = confined.RefusedError, exceptions.UnavailableError
# Bytes of the catalog for each block: its record in the exact index, its
# count, and LevelDB's own bytes.
_CATALOG = 20


@dataclasses.dataclass
class Image:
    """The figures of one file, in bytes."""

    path: str
    size: int
    nonzero: int = 0
    extents: int = 0
    new: int = 0
    stored: int = 0
    advice: str | None = None
    disk: str | None = None
    """what was found of its disk, if the file has a format"""
    is_disk: bool = False
    """the figures are those of the disk's plain bytes"""


@dataclasses.dataclass
class Result:
    """The figures of all files together, in bytes."""

    images: list[Image]
    one_of: int
    """one block in so many was counted"""
    blocks: int
    """the number of distinct blocks"""
    stored: int
    """the blocks, as uploads leave them"""
    recompressed: int
    """the blocks, as recompression leaves them"""
    error_percent: float
    """in 19 of 20 cases `stored` is off by less than this; 0: sampling adds no
    error"""
    metadata: int
    """all other bytes of a repository, including its catalog"""
    unreadable: list[tuple[str, OSError]]
    with_disks: 'Result | None' = None
    """the same, if disks were kept in place of their files"""
    unconfined: str | None = None
    """why there is no such result, although a file has a format"""

    @property
    def on_disk(self) -> int:
        """Bytes of a repository after the uploads."""
        return self.stored + self.metadata

    @property
    def on_disk_recompressed(self) -> int:
        """Bytes of a repository after recompression."""
        return self.recompressed + self.metadata


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the repository, and of storing into it."""

    block_size: int | None = None
    chunking: str = 'fixed'
    codec: str = 'lz4'
    level: int = 0
    exact: bool = False

    def parameters(self) -> repo_parameters.Parameters:
        """The parameters of a repository with these options.

        :raises InvalidParameter: no repository can have these options
        """
        return repo_parameters.Parameters.choose(
            block_size=self.block_size, chunking=self.chunking)


def files_of(paths: list[str],
             skipped: Callable[[str], None] = lambda path: None
             ) -> list[str]:
    """The files that paths name: a path itself, or the files in a directory.

    :param skipped: called with each path in a directory that is not an
        ordinary file
    """
    files: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            files.append(path)
            continue
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_file(follow_symlinks=False):
                    files.append(entry.path)
                else:
                    skipped(entry.path)
    return files


def data_bytes(files: list[str]) -> int:
    """The number of bytes to read, without holes."""
    total = 0
    for path in files:
        with contextlib.suppress(OSError):
            found = os.stat(path)
            total += min(found.st_size, found.st_blocks * 512)
    return total


def exact_memory(files: list[str], options: Options) -> int:
    """The most bytes of memory that a table of all blocks may need."""
    return int(data_bytes(files) / options.parameters().average_block
               * _RECORD)


def formatted(files: list[str]) -> list[str]:
    """The files that begin, or end, as those of disk formats do."""
    found = []
    for path in files:
        with contextlib.suppress(OSError), closing.descriptor(
                _open(path)) as fd:
            if disk_survey.has_format(
                    lambda length, offset: os.pread(fd, length, offset),
                    os.fstat(fd).st_size):
                found.append(path)
    return found


class _Count:
    """A count of images, and the bytes of one on their way to the engine."""

    def __init__(self, options: Options) -> None:
        self.parameters = options.parameters()
        minimum, average = self.parameters.cuts
        self.engine = _engine.Estimate(
            block_size=self.parameters.block_size, cut_minimum=minimum,
            cut_average=average, segment_size=self.parameters.segment_size,
            codec=options.codec, codec_level=options.level, again_codec='zstd',
            again_level=LEVEL, table_bytes=0 if options.exact else TABLE)
        self.images: list[Image] = []
        self._length = 0
        self._waiting = bytearray()

    def data(self, content: bytes) -> None:
        """Take bytes of the image."""
        self._length += len(content)
        self._waiting += content
        if len(self._waiting) >= PIECE:
            self._take(False)

    def zeros(self, length: int) -> None:
        """Take zeros."""
        block = self.parameters.block_size
        if length < PIECE:
            self.data(bytes(length))
            return
        # Behind those of the last cut block all are zeros.
        self._waiting += bytes(2 * block)
        self._take(False)
        self._length += length
        left = length - 2 * block + len(self._waiting)
        self.engine.take_zeros(left // block * block)
        self._waiting = bytearray(left % block)

    def _take(self, last: bool) -> None:
        used = self.engine.take(self._waiting, last)
        del self._waiting[:used]

    def end_bytes(self) -> int:
        """End the image that came as bytes and zeros; returns its length."""
        self._take(True)
        length, self._length = self._length, 0
        return length

    def end(self, image: Image, length: int) -> None:
        """End an image of so many bytes."""
        # The part that was read counts, since the engine has counted it.
        zeros, image.extents = self.engine.end()
        image.nonzero = max(0, length - zeros)
        self.images.append(image)


def estimate(files: list[str], options: Options,
             progress: Callable[[int], None] = lambda done: None) -> Result:
    """Read all files, and return the space that they need in a repository.

    :param progress: called with the bytes read so far. Those of a file with a
        format count twice.
    :raises InvalidParameter: for options that no repository can have
    """
    counts = [_Count(options)]
    unconfined = None
    if with_format := set(formatted(files)):
        try:
            confined.require_program()
            counts.append(_Count(options))
        except exceptions.UnavailableError as e:
            unconfined = str(e)
    unreadable = []
    done = 0
    with futures.ThreadPoolExecutor(1, 'read-ahead') as ahead:
        for path in files:
            image = Image(path, 0)
            try:
                for length in _read(path, image, counts, ahead,
                                    path in with_format):
                    done += length
                    progress(done)
            except OSError as e:
                e.filename = e.filename or path
                unreadable.append((path, e))
    first, *second = [
        _sum(count.engine, count.images, unreadable, count.parameters)
        for count in counts]
    for found in second:
        first.with_disks = found
    first.unconfined = unconfined
    return first


def _read(path: str, image: Image, counts: list[_Count],
          ahead: futures.Executor, has_format: bool) -> Iterator[int]:
    """Count one file; yields the bytes read, by and by."""
    first, *second = counts
    with contextlib.ExitStack() as stack:
        disk = None
        if second and has_format:
            disk = _disk_of(path, image, stack)
        as_file = counts if disk is None else counts[:1]
        try:
            with _File(path, ahead) as file:
                image.size = file.size
                image.advice = file.advice
                yield from _take([count.engine for count in as_file], file,
                                 first.parameters.block_size)
        finally:
            first.end(image, image.size)
            for count in as_file[1:]:
                count.end(dataclasses.replace(image), image.size)
        if disk is None:
            return
        try:
            yield from _take_disk(path, disk, second[0])
        except _NO_DISK as e:
            image.disk = (f'its disk would not be kept: {e}. The sums with '
                          'disks have a part of it in place of the file')


def _disk_of(path: str, image: Image, stack: contextlib.ExitStack
             ) -> disk_survey.Disk | None:
    """The disk of a file, open until the stack is closed, if it has one."""
    fd = stack.enter_context(closing.descriptor(_open(path)))
    stack.callback(os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        disk = stack.enter_context(disk_survey.surveyed(
            lambda length, offset: os.pread(fd, length, offset),
            os.fstat(fd).st_size))
    except _NO_DISK as e:
        image.disk = f'its disk would not be kept: {e}'
        return None
    image.disk = f'the disk in this {disk.format} would be kept'
    if disk.streams:
        image.disk += (f'; zlib makes {100 * disk.equal:.0f} % of the '
                       'compressed bytes again')
    return disk


def _take_disk(path: str, disk: disk_survey.Disk,
               count: _Count) -> Iterator[int]:
    try:
        yield from disk.give(count.data, count.zeros)
    finally:
        count.end(Image(path, disk.size, is_disk=True), count.end_bytes())


def _take(engines: list[_engine.Estimate], file: '_File',
          block: int) -> Iterator[int]:
    """Give engines all of a file; yields the bytes read, by and by."""
    offset = 0
    while offset < file.size:
        hole = file.data_from(offset) - offset
        if hole >= block:
            zeros = hole // block * block
            for engine in engines:
                engine.take_zeros(zeros)
            offset += zeros
            continue
        piece = file.read(offset)
        last = offset + len(piece) >= file.size
        used = [engine.take(piece, last) for engine in engines][0]
        if not used:
            raise OSError(errno.EIO, 'it became shorter while it was read')
        offset += used
        yield used


def _sum(engine: _engine.Estimate, images: list[Image],
         unreadable: list, parameters: repo_parameters.Parameters
         ) -> Result:
    sums, level, plain, stored = engine.sum()
    blocks = 0
    squares = 0.0
    for image, (new_bytes, new_blocks, stored_bytes, squared) in zip(
            images, sums):
        image.new = new_bytes << level
        image.stored = stored_bytes << level
        blocks += new_blocks << level
        squares += squared
    total = sum(image.stored for image in images)
    new = sum(image.new for image in images)
    counted = total >> level
    error = (200 * (squares * (1 - 2 ** -level)) ** 0.5 / counted
             if counted else 0.0)
    return Result(
        images, 1 << level, blocks, total,
        min(total, round(new * stored / plain)) if plain else total, error,
        metadata(images, blocks, parameters), unreadable)


def metadata(images: list[Image], blocks: int,
             parameters: repo_parameters.Parameters) -> int:
    """The bytes of a repository besides its blocks."""
    slots = parameters.group_slots
    # Each group reserves the space for its metadata at once, and is never
    # quite full.
    recipes = sum(_PAGE * (1 + -(-image.extents // _EXTENTS_IN_PAGE))
                  for image in images)
    return (-(-blocks // slots) * layout.data_start(slots) + recipes
            + blocks * _CATALOG + layout.reserve_bytes(blocks * _CATALOG))


def _open(path: str) -> int:
    try:
        # Reading leaves no trace. Only the file's owner may request this.
        fd = access.open_file(path, os.O_RDONLY | os.O_NOATIME)
    except PermissionError:
        fd = access.open_file(path, os.O_RDONLY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, 'it is not an ordinary file', path)
    return fd


class _File:
    """A file that is read piece by piece, the next one ahead."""

    def __init__(self, path: str, ahead: futures.Executor):
        self.fd = _open(path)
        self._ahead = ahead
        self._coming: tuple[int, futures.Future] | None = None
        found = os.fstat(self.fd)
        self.size = found.st_size
        self.advice = formats.advice(functools.partial(os.pread, self.fd))
        # From now on memory and offsets must be multiples of a page.
        self._direct = self._make_direct(True)
        self._buffers = [mmap.mmap(-1, PIECE + _PAGE) for _ in range(2)]

    def _make_direct(self, direct: bool) -> bool:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
        except OSError:
            return False
        return direct

    def __enter__(self) -> '_File':
        return self

    def __exit__(self, *exc_info) -> None:
        if self._coming is not None:
            with contextlib.suppress(OSError):
                self._coming[1].result()
        if not self._direct:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(self.fd)

    def data_from(self, offset: int) -> int:
        """The offset of the next bytes that may be other than zeros."""
        try:
            return os.lseek(self.fd, offset, os.SEEK_DATA)
        except OSError as e:
            # Only a hole follows; or the file system does not show any.
            return self.size if e.errno == errno.ENXIO else offset

    def read(self, offset: int) -> memoryview:
        """Return the next PIECE bytes, or all that are left.

        They stay valid until the next call but one.
        """
        coming = self._coming
        if coming is None or not (
                0 <= offset - coming[0] < _MAX_BLOCK + _PAGE):
            if coming is not None:
                coming[1].result()
            coming = self._read_ahead(offset)
        begin, reading = coming
        self._coming = None
        data = memoryview(self._buffers[0])[:reading.result()]
        self._buffers.reverse()
        end = begin + len(data)
        if end < self.size:
            # The end of its last block may still be to come.
            self._coming = self._read_ahead(max(0, end - _MAX_BLOCK))
        return data[offset - begin:]

    def _read_ahead(self, offset: int) -> tuple[int, futures.Future]:
        begin = offset // _PAGE * _PAGE
        return begin, self._ahead.submit(
            self._fill, self._buffers[0], begin)

    def _fill(self, buffer: mmap.mmap, begin: int) -> int:
        filled = 0
        while filled < len(buffer):
            try:
                length = os.preadv(self.fd, [memoryview(buffer)[filled:]],
                                   begin + filled)
            except OSError as e:
                if e.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = self._make_direct(False)
                continue
            if not length:
                break
            filled += length
            if self._direct and length % _PAGE:
                break           # the file's end
        if not self._direct:
            os.posix_fadvise(self.fd, begin, filled,
                             os.POSIX_FADV_DONTNEED)
        return filled
