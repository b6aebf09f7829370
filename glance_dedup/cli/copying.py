# SPDX-License-Identifier: Apache-2.0

"""Copies ranges of an image into an open file.

While a thread writes one piece, the caller's thread reads the next one, and
the engine's threads decode it. Meanwhile another thread has the disk take the
earlier writes, so that little is left to wait for at the end. Two buffers
serve for all pieces: to get fresh memory for each piece takes the kernel
longer than to read it.
"""

from collections.abc import Iterator
from concurrent import futures
import os
import typing
from typing import Any

from glance_dedup.base import exceptions

if typing.TYPE_CHECKING:
    from glance_dedup.repository import openimages

#: Bytes that are read, and written, at once.
PIECE = 4 << 20
# Bytes that are written before the disk has to take them.
_FLUSHED = 64 << 20
# Runs of zeros of at least this length become holes in the file.
_HOLE = 1 << 16


class Progress(typing.Protocol):
    """A receiver of progress."""

    def update(self, done: int) -> None:
        """So many bytes are done."""


class Copier:
    """Copies from one image to one file. One thread at a time may use it.

    Leaving its ``with`` block waits until all is written. The caller syncs the
    file then.

    :param fd: the file, open for writing
    :param progress: gets the offset behind each piece that was read
    """

    def __init__(self, fd: int, image: 'openimages.Image',
                 progress: Progress) -> None:
        self._fd = fd
        self._image = image
        self._progress = progress
        self._free, self._busy = buffers_for(image, 2)
        self._writer = futures.ThreadPoolExecutor(1, 'write')
        self._writing: futures.Future | None = None
        self._flusher = futures.ThreadPoolExecutor(1, 'flush')
        self._flushing: futures.Future | None = None
        self._written = 0       # since the disk had to take bytes

    def copy(self, start: int, end: int) -> None:
        """Copy the bytes from `start` to `end` to the same place.

        They may be written only when the ``with`` block is left.

        :raises RepositoryError: they cannot be read
        :raises OSError: they, or those before, cannot be written
        """
        while start < end:
            view = self._free[:end - start]
            fill(view, self._image, start)
            self._wait()
            self._writing = self._writer.submit(
                write_all, self._fd, view, start)
            self._free, self._busy = self._busy, self._free
            self._flush(len(view))
            start += len(view)
            self._progress.update(start)

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _flush(self, length: int) -> None:
        """Have the disk take the earlier writes, unless it still does so."""
        self._written += length
        if self._written < _FLUSHED:
            return
        if self._flushing is not None:
            if not self._flushing.done():
                return
            # An error is reported only once: the last sync would not see it.
            self._flushing.result()
        self._written = 0
        self._flushing = self._flusher.submit(os.fdatasync, self._fd)

    def __enter__(self) -> 'Copier':
        return self

    def __exit__(self, kind: Any, *exc_info: Any) -> None:
        try:
            if kind is None:
                self._wait()
                if self._flushing is not None:
                    self._flushing.result()
        finally:
            self._writer.shutdown()
            self._flusher.shutdown()


def buffers_for(image: 'openimages.Image', count: int) -> list[memoryview]:
    """Buffers for pieces of an image, which is no longer than PIECE."""
    return [memoryview(bytearray(min(PIECE, image.size)))
            for _ in range(count)]


def fill(view: memoryview, image: 'openimages.Image', offset: int) -> None:
    """Fill a buffer with the bytes of an image from `offset` on.

    :raises DamagedError: the image ends before
    """
    if image.readinto(view, offset) != len(view):
        raise exceptions.DamagedError(
            f'image {image.stat.image_id} ends within {len(view)} bytes at '
            f'{offset}')


def write_all(fd: int, data: Any, offset: int) -> None:
    """Write all bytes, even if the system takes them in parts."""
    left = memoryview(data)
    while left:
        written = os.pwrite(fd, left, offset)
        left = left[written:]
        offset += written


def filled_ranges(image: 'openimages.Image') -> Iterator[tuple[int, int]]:
    """The ranges of an image between its long runs of zeros."""
    if image.disk is not None:      # its extents are not of the file
        yield 0, image.size
        return
    start = end = 0
    for extent in image.extents():
        if extent.kind == 'zeros' and extent.length >= _HOLE:
            if end > start:
                yield start, end
            start = extent.offset + extent.length
        end = extent.offset + extent.length
    if end > start:
        yield start, end
