# SPDX-License-Identifier: Apache-2.0

"""Room on the disk that is kept for the catalog.

Even to free blocks on a full disk, LevelDB needs room: for the batch, and for
a new log and a table when it is opened again. It needs inodes for these files,
too. One file of the repository keeps the room, and empty ones keep the inodes.
The room grows with the catalog.
"""

from collections.abc import Callable
import contextlib
import os
import stat
import time
from typing import TypeVar

from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.repository import layout

RESERVE_BYTES = layout.MAX_RESERVE
_SHARE = 32     # the file has at most 1/32 of the file system's bytes
_INODE_FILES = [f'{layout.CATALOG_RESERVE}-{i}' for i in range(1, 9)]
# XFS reuses the space of an unlinked file only some time later. Seconds.
_PAUSES = (0.01, 0.1, 1)

_Result = TypeVar('_Result')


class Reserve:
    """The reserve of one repository. One thread at a time uses it.

    :param path: the repository's
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def keep(self) -> None:
        """Reserve the room, or the missing part of it.

        If the disk has too little room now, a later call may succeed.
        """
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._path)
            size = min(RESERVE_BYTES,
                       layout.reserve_bytes(self._catalog_bytes()),
                       disk.f_blocks * disk.f_frsize // _SHARE)
            if (not disk.f_files
                    or disk.f_favail > 2 * len(_INODE_FILES)):
                for name in _INODE_FILES:
                    self._reserve(name, 0)
            if disk.f_bavail * disk.f_frsize >= 2 * size:
                self._reserve(layout.CATALOG_RESERVE, size)

    def _catalog_bytes(self) -> int:
        """Bytes of the catalog's files; one that is gone by now has none."""
        total = 0
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(os.path.join(self._path, 'catalog')):
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_size
        return total

    def _reserve(self, name: str, size: int) -> None:
        """Make sure of an ordinary file with one name and about `size`.

        It has that at least, and at most twice as much: a catalog whose size
        goes up and down does not change the file each time.
        """
        path = os.path.join(self._path, name)
        had = self._size(path)
        if had is not None and size <= had and (not size or had <= 2 * size):
            return
        with closing.descriptor(
                access.make_file(path, access.file_mode(self._path))
                if had is None else access.open_file(
                    path, os.O_WRONLY | os.O_NOFOLLOW)) as fd:
            try:
                if size > (had or 0):
                    os.posix_fallocate(fd, 0, size)
                else:
                    os.ftruncate(fd, size)
            except OSError:
                # A smaller reserve is better than none.
                if had:
                    os.ftruncate(fd, had)
                else:
                    os.unlink(path)
                raise

    @staticmethod
    def _size(path: str) -> int | None:
        """The size of an ordinary file with one name; None: there is none."""
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                return status.st_size
            # Removes a link, but not the file to which it leads.
            os.unlink(path)
        return None

    def with_room(self, work: Callable[[], _Result]) -> _Result:
        """Do `work`. If it lacks room, free the reserve and do it again.

        :raises NoSpaceError: there is no reserve, or not enough
        """
        try:
            return work()
        except exceptions.NoSpaceError:
            if not self._make_room():
                raise
        for pause in _PAUSES:
            with contextlib.suppress(exceptions.NoSpaceError):
                return work()
            time.sleep(pause)
        return work()

    def _make_room(self) -> bool:
        made = False
        for name in (layout.CATALOG_RESERVE, *_INODE_FILES):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._path, name))
                made = True
        return made
