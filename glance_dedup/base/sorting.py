# SPDX-License-Identifier: Apache-2.0

"""Sorting more items than fit into memory."""

from collections.abc import Iterator
import heapq
import os
import tempfile
import typing


class Sorted:
    """Items of one size, to be had in order; in bounded memory.

    Sorted runs go into a temporary file, and are merged when they are read.

    :param size: bytes of an item
    """

    RUN = 1 << 17               # items in memory
    PIECE = 1 << 12             # items of a run that is read, at most
    PIECES = 1 << 18            # items of all runs, as far as possible

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: list[bytes] = []
        self._file: typing.IO[bytes] | None = None
        self._runs: list[tuple[int, int]] = []

    def add(self, item: bytes) -> None:
        """Take an item in."""
        self._items.append(item)
        if len(self._items) >= self.RUN:
            self._flush()

    def _flush(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()
        start = self._file.seek(0, os.SEEK_END)
        self._file.write(b''.join(sorted(self._items)))
        self._runs.append((start, len(self._items) * self._size))
        self._items = []

    def _read_run(self, start: int, length: int) -> Iterator[bytes]:
        assert self._file is not None
        piece = self._size * min(
            self.PIECE, max(64, self.PIECES // len(self._runs)))
        for offset in range(0, length, piece):
            self._file.seek(start + offset)
            data = self._file.read(min(piece, length - offset))
            for at in range(0, len(data), self._size):
                yield data[at:at + self._size]

    def items(self) -> Iterator[bytes]:
        """All items, in order."""
        return heapq.merge(sorted(self._items),
                           *(self._read_run(*run) for run in self._runs))

    def close(self) -> None:
        """Forget all items."""
        self._items, self._runs = [], []
        if self._file is not None:
            self._file.close()
            self._file = None
