# SPDX-License-Identifier: Apache-2.0

"""The directory of a file store of Glance: one file for each image.

Glance's file driver keeps an image in the directory itself, under its id. It
writes uploads there directly, so a file may be half an upload; only Glance
knows.
"""

import dataclasses
import errno
import os
import stat
from typing import BinaryIO

from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import imageids


@dataclasses.dataclass(frozen=True)
class Entry:
    """An image's file in the file store."""

    image_id: str
    path: str
    size: int


def listing(directory: str) -> tuple[list[Entry], list[tuple[str, str]]]:
    """The images of a file store, sorted by id, and everything else there.

    :returns: the images, and for each other path a pair: the path, and why it
        is no image
    :raises OSError: the directory cannot be read
    """
    entries, others = [], []
    with os.scandir(directory) as found:
        for item in sorted(found, key=lambda item: item.name):
            if not item.is_file(follow_symlinks=False):
                others.append((item.path, 'it is not an ordinary file'))
            elif not imageids.is_glances(item.name):
                others.append((item.path, "its name is not an image's id"))
            else:
                entries.append(Entry(
                    item.name, item.path,
                    item.stat(follow_symlinks=False).st_size))
    return entries, others


class Changed(OSError):
    """The file has changed since it was opened."""


class Source(closing.Closing):
    """An image's file in the file store, open for reading.

    :ivar size: the file's bytes when it was opened
    """

    def __init__(self, path: str):
        fd = access.open_file(path, os.O_RDONLY | os.O_NOFOLLOW)
        self.file: BinaryIO = open(fd, 'rb', buffering=0)
        self.path = path
        self._found = os.fstat(fd)
        self.size = self._found.st_size
        if not stat.S_ISREG(self._found.st_mode):
            self.file.close()
            raise OSError(errno.EINVAL, 'it is not an ordinary file', path)

    def read(self, length: int) -> bytes:
        """Read `length` bytes; fewer only at the file's end."""
        pieces = []
        while length and (piece := self.file.read(length)):
            pieces.append(piece)
            length -= len(piece)
        return b''.join(pieces)

    def need_unchanged(self) -> None:
        """Check that the file's size and time of writing are unchanged.

        :raises Changed: one changed, so what was read may not be an image
        """
        now = os.fstat(self.file.fileno())
        if (now.st_size, now.st_mtime_ns) != (
                self._found.st_size, self._found.st_mtime_ns):
            raise Changed(
                errno.EAGAIN, 'it changed while it was read: it may be an '
                'upload under way; try again later', self.path)

    def close(self) -> None:
        self.file.close()
