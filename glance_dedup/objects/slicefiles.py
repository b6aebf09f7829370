# SPDX-License-Identifier: Apache-2.0

"""The files of slices: written whole, and the oldest ones removed.

Several processes may use one directory. Readers verify the bytes of a file, so
nothing here is synced.
"""

from collections.abc import Iterator
import contextlib
import os
import re
import secrets
import stat
import threading

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files

#: Least bytes of slices that stay on a full disk: slices that are on
#: their way to readers.
MIN_SIZE = 8 << 20
#: Bytes of the slices in memory, while the disk has no room for any.
MAX_MEMORY = 32 << 20

# By how much the files are made fewer than their budget allows, so that not
# each new slice evicts one.
_SPARE = 16
# How often a slice is written, if its directory is removed meanwhile.
_TRIES = 20
_OBJECT = re.compile('[0-9a-f]{32}')
_SLICE = re.compile('[0-9a-f]{8}')


class SliceFiles:
    """A directory with slices. Thread-safe."""

    def __init__(self, directory: str, file_mode: int,
                 memory: str | None = None) -> None:
        """Look at nothing yet.

        :param memory: a directory on a tmpfs, for a full disk
        """
        self._directory = directory
        self._memory = (None if memory is None
                        else SliceFiles(memory, 0o600))
        self._file_mode = file_mode
        self._directory_mode = 0o2770 if file_mode & 0o020 else 0o700
        self._lock = threading.Lock()
        self.used: int | None = None
        """Bytes of all slices; None: they were not counted yet."""
        self.evicted = 0
        """Slices that were removed to make room."""
        # Whether slices had to be put into memory; None: other processes may
        # have put some there.
        self._uses_memory: bool | None = None

    def start(self) -> None:
        """Find out how many bytes all slices have; remove those in memory."""
        with self._lock:
            self.used = sum(size for _, size, _ in self._all())
        if self._memory is not None:
            self._memory.clear()

    @property
    def is_disk_full(self) -> bool:
        """Tell whether the disk had no room for a slice, and has little."""
        return self._uses_memory is True

    def clear(self) -> None:
        """Remove all slices."""
        with self._lock:
            self.used = self._evict(list(self._all()), 0)

    def is_there(self, object_id: bytes, number: int) -> bool:
        """Return whether a slice has a file, on the disk or in memory."""
        return os.path.isfile(self._path(object_id, number)) or (
            self._memory is not None
            and self._memory.is_there(object_id, number))

    def remove(self, object_id: bytes, number: int) -> bool:
        """Remove a slice; returns whether it was there."""
        found = (self._memory is not None
                 and self._memory.remove(object_id, number))
        try:
            os.unlink(self._path(object_id, number))
        except OSError:
            return found
        return True

    def keep(self, object_id: bytes, number: int, content: bytes,
             budget: int) -> None:
        """Write a slice, and evict others if they take too much.

        If others have filled the disk, it is written into memory. Slices in
        memory are removed when the disk has room again.

        :param budget: the bytes that all slices may take
        :raises NoSpaceError: the disk is full, and the memory, too
        """
        try:
            self._write(object_id, number, content)
        except exceptions.NoSpaceError:
            self._keep_on_full_disk(object_id, number, content)
            return
        if (self._memory is not None and self._uses_memory is not False
                and self._free() >= MAX_MEMORY):
            self._uses_memory = False
            self._memory.clear()
        self._make_room(len(content), budget)

    def _keep_on_full_disk(self, object_id: bytes, number: int,
                           content: bytes) -> None:
        """Write a slice into memory, or in the place of others on the disk.

        If the disk has more slices than the memory has room for, half of them
        go, since the slices in use now need the room more.
        """
        ways = [self._replace_others, self._put_into_memory]
        if sum(size for _, size, _ in self._all()) <= MAX_MEMORY:
            ways.reverse()
        try:
            ways[0](object_id, number, content)
        except exceptions.NoSpaceError:
            ways[1](object_id, number, content)

    def _replace_others(self, object_id: bytes, number: int,
                        content: bytes) -> None:
        with self._lock:
            found = sorted(self._all())
            self.used = self._evict(found, sum(
                size for _, size, _ in found) // 2)
        self._write(object_id, number, content)

    def _put_into_memory(self, object_id: bytes, number: int,
                         content: bytes) -> None:
        if self._memory is None:
            raise exceptions.NoSpaceError(
                f'no room for slices in {self._directory}')
        self._uses_memory = True
        self._memory.used = None    # others put slices there, too
        self._memory.keep(object_id, number, content, MAX_MEMORY)

    def _path(self, object_id: bytes, number: int) -> str:
        return os.path.join(self._directory, object_id.hex(), f'{number:08x}')

    def _write(self, object_id: bytes, number: int, content: bytes) -> None:
        path = self._path(object_id, number)
        with files.os_errors(f'cannot write {path}', exceptions.StorageError):
            for _ in range(_TRIES - 1):
                # A process that evicts removes empty directories, and files
                # that are not renamed yet.
                with contextlib.suppress(FileNotFoundError):
                    return self._write_once(path, content)
            self._write_once(path, content)

    def _write_once(self, path: str, content: bytes) -> None:
        temporary = f'{path}.{secrets.token_hex(8)}'
        # Somebody may have removed the cache.
        for directory in self._directory, os.path.dirname(path):
            if not files.is_directory(directory):
                access.make_directory(directory, self._directory_mode)
        try:
            with open(access.make_file(temporary, self._file_mode), 'wb') as f:
                f.write(content)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _make_room(self, more: int, budget: int) -> None:
        """Evict the slices used longest ago, if there are too many.

        Reading does not change a file: the time of its last access may be a
        day old. But a slice that is read often is fetched again soon.
        """
        with self._lock:
            if self.used is not None:
                self.used += more
                if self.used <= self._allowed(budget, self.used):
                    return
            found = sorted(self._all())
            used = sum(size for _, size, _ in found)
            budget = self._allowed(budget, used)
            if used > budget:
                used = self._evict(found, budget - budget // _SPARE)
            self.used = used

    def _evict(self, found: list[tuple[float, int, str]], wanted: int) -> int:
        """Remove the first slices of a list, until so many bytes are left."""
        used = sum(size for _, size, _ in found)
        for _, size, path in found:
            if used <= wanted:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                used -= size
                self.evicted += 1
        return used

    def _allowed(self, budget: int, used: int) -> int:
        """Bytes that the slices may take now.

        They leave as much free as they take, since uploads need the disk more.
        """
        with contextlib.suppress(OSError):
            return min(budget, max((used + self._free()) // 2, MIN_SIZE))
        return budget

    def _free(self) -> int:
        """Bytes that are free on the disk."""
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize

    def _all(self) -> Iterator[tuple[float, int, str]]:
        """Yield time, size and path of each slice, and of killed writes.

        Empty directories of objects are removed.
        """
        with (contextlib.suppress(OSError),
              os.scandir(self._directory) as there):
            for directory in there:
                if not _OBJECT.fullmatch(directory.name):
                    continue
                with contextlib.suppress(OSError):
                    os.rmdir(directory.path)
                with (contextlib.suppress(OSError),
                      os.scandir(directory.path) as slices):
                    for one in slices:
                        status = one.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) and (
                                _SLICE.match(one.name)):
                            yield (max(status.st_atime, status.st_mtime),
                                   status.st_size, one.path)
