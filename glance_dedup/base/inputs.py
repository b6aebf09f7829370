# SPDX-License-Identifier: Apache-2.0

"""Read a file that becomes an image."""

import errno
import io
import os
import stat
from typing import Protocol

from glance_dedup.base import access
from glance_dedup.base import closing

_ZEROS = memoryview(bytes(1 << 20))


class Readable(Protocol):
    """A source of the bytes of an image, one after the other."""

    def read(self, length: int, /) -> bytes | memoryview:
        """Read some of the next bytes; none only at the end."""
        ...


class Changed(OSError):
    """The file has changed since it was opened."""


class InputFile(closing.Closing):
    """An ordinary file or a block device, read from its begin to its end.

    Holes are not read. Not thread-safe.

    :param path: its path
    :param follow: the file to which a symbolic link points
    :ivar size: its bytes when it was opened
    :raises OSError: it cannot be opened, or is neither
    """

    def __init__(self, path: str, follow: bool = False) -> None:
        self.path = path
        self._fd = access.open_file(
            path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW))
        self._at = self._data_ends = 0
        try:
            self._found = os.fstat(self._fd)
            if not (stat.S_ISREG(self._found.st_mode)
                    or follow and stat.S_ISBLK(self._found.st_mode)):
                raise OSError(errno.EINVAL, 'it is not an ordinary file', path)
            self.size = os.lseek(self._fd, 0, os.SEEK_END)
        except BaseException:
            self.close()
            raise

    def read(self, length: int) -> bytes | memoryview:
        """Read some of the next bytes; none only at the file's end.

        :param length: the most bytes
        :raises OSError: the file cannot be read; it names the file
        """
        try:
            zeros = self._hole()
            if zeros:
                piece: bytes | memoryview = _ZEROS[:min(length, zeros)]
            else:
                left = self._data_ends - self._at
                piece = os.pread(self._fd, min(length, left) if left > 0
                                 else length, self._at)
        except OSError as e:
            e.filename = self.path
            raise
        self._at += len(piece)
        return piece

    def has_next(self, data: bytes | memoryview) -> bool:
        """Read the next bytes; return whether they are these."""
        left = memoryview(data)
        while left:
            piece = self.read(len(left))
            if not piece or left[:len(piece)] != piece:
                return False
            left = left[len(piece):]
        return True

    def _hole(self) -> int:
        """Return how many bytes of a hole follow."""
        if self._at < self._data_ends:
            return 0
        try:
            data = os.lseek(self._fd, self._at, os.SEEK_DATA)
        except OSError as e:
            # A device, or a file system without holes, returns EINVAL.
            if e.errno != errno.ENXIO:
                return 0
            # The file may be longer by now, or shorter.
            data = max(os.lseek(self._fd, 0, os.SEEK_END), self._at)
        if data == self._at:
            try:
                self._data_ends = os.lseek(self._fd, data, os.SEEK_HOLE)
            except OSError as e:
                if e.errno != errno.ENXIO:      # the end
                    raise
        return data - self._at

    def require_unchanged(self) -> None:
        """Check that the file's size and time of writing are unchanged.

        :raises Changed: one changed, so the bytes read may not be an image
        """
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (
                self._found.st_size, self._found.st_mtime_ns):
            raise Changed(
                errno.EAGAIN, 'it changed while it was read: something writes '
                'to it; try again when that has ended', self.path)

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def open_input(path: str) -> InputFile | io.FileIO:
    """Open a file to read, of whatever kind.

    A pipe gets no buffer: a large read of a buffered file notices an interrupt
    only when the next bytes come.

    :raises OSError: it cannot be opened
    """
    kind = os.stat(path).st_mode
    if stat.S_ISREG(kind) or stat.S_ISBLK(kind):
        return InputFile(path, follow=True)
    return open(path, 'rb', buffering=0)
