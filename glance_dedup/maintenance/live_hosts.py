# SPDX-License-Identifier: Apache-2.0

"""The daemons that live, and their portions of the groups: ``locks/hosts``.

A daemon has a *number* for as long as it lives: it holds the byte with that
number. For each task in which it takes part it holds one more byte. The locks
locks fall with the process, so no clock decides which daemon lives.

The groups are shared out by rendezvous hashing. Each daemon computes a weight
of each member's number and the group's, and the group belongs to the member
with the highest weight. So if a member comes or goes, no group changes hands
but its own.

It does no harm if two daemons believe for a moment that a group is theirs, or
if none does: portions only spread the work. The group's lease decides which
daemon may do it (I4).
"""

from collections.abc import Iterator
import contextlib
import fcntl
import os
import struct
import threading
import time

import xxhash

from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import filesystem

FILE = 'locks/hosts'
#: The most daemons that have a number at the same time.
MAX_COUNT = 64
#: Tasks have numbers from 1 up to this one.
MAX_TASKS = 255
#: For how long an answer of the server is used again, seconds.
MAX_MEMORY = 5.0

# Bytes of the file from one task to the next.
_STRIDE = 256
# Attempts to lock the file that has the name.
_LOOKS = 5


def share_of(group: int, members: list[int]) -> int:
    """The member to which a group belongs; there must be one."""
    return max(members, key=lambda number: (
        xxhash.xxh3_64_intdigest(struct.pack('<II', number, group)), number))


class Hosts(closing.Closing):
    """The daemons that live, of which this process is one. Thread-safe.

    :param path: the repository's
    :raises BusyError: if there are :data:`MAX_COUNT` daemons already
    :raises AccessDenied, NoSpaceError, StorageError: as their names say
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.join(path, FILE)
        self._mutex = threading.Lock()
        self._tasks: set[int] = set()
        self._known: dict[int, tuple[float, list[int]]] = {}
        with self._errors():
            self._mode = access.file_mode(path)
            self._fd = self._open()
            try:
                self.number = self._take_number()
            except BaseException:
                os.close(self._fd)
                raise

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return files.os_errors(f'cannot use {self._path}',
                               exceptions.StorageError)

    def close(self) -> None:
        """Give up the number. Idempotent."""
        with self._mutex:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _open(self) -> int:
        with contextlib.suppress(FileExistsError):
            os.close(access.make_file(self._path, self._mode))
        return access.open_file(self._path, os.O_RDWR | os.O_NOFOLLOW)

    def _take_number(self) -> int:
        for _ in range(_LOOKS):
            for number in range(MAX_COUNT):
                if not filesystem.lock(self._fd, fcntl.F_WRLCK, number):
                    continue
                if self._has_name():
                    return number
                break   # others lock the new file
            else:
                raise exceptions.BusyError(
                    f'{MAX_COUNT} daemons use the repository already')
            os.close(self._fd)
            self._fd = -1
            self._fd = self._open()
        raise exceptions.StorageError(f'{self._path} is replaced all the time')

    def _has_name(self) -> bool:
        """Return whether the name still leads to the open file (I4)."""
        return os.fstat(self._fd).st_ino == os.stat(
            self._path, follow_symlinks=False).st_ino

    def renew(self) -> None:
        """Ask for the number again: the server may have dropped the lock.

        If another daemon has the number now, this one takes another.

        :raises BusyError, StorageError: as at the beginning
        """
        with self._mutex, self._errors():
            if not (filesystem.lock(self._fd, fcntl.F_WRLCK, self.number)
                    and self._has_name()):
                self.number = self._take_number()
            for task in self._tasks:
                filesystem.lock(self._fd, fcntl.F_WRLCK, self._byte(task))
            self._known.clear()

    def _byte(self, task: int, number: int | None = None) -> int:
        return _STRIDE * task + (self.number if number is None else number)

    def take_part(self, tasks: set[int]) -> None:
        """Take part in these tasks, by their numbers, and in no others.

        :raises StorageError: as its name says
        """
        assert all(0 < task <= MAX_TASKS for task in tasks)
        with self._mutex, self._errors():
            for task in self._tasks - tasks:
                filesystem.lock(self._fd, fcntl.F_UNLCK, self._byte(task))
            for task in tasks - self._tasks:
                filesystem.lock(self._fd, fcntl.F_WRLCK, self._byte(task))
            self._tasks = set(tasks)
            self._known.clear()

    def members(self, task: int = 0) -> list[int]:
        """The numbers of the daemons that take part in a task.

        :param task: its number; 0: all daemons that live
        :raises StorageError: as its name says
        """
        with self._mutex, self._errors():
            if self._fd < 0:
                return []
            moment, found = self._known.get(task, (0.0, []))
            if not found or time.monotonic() > moment + MAX_MEMORY:
                found = list(self._look(task))
                self._known[task] = time.monotonic(), found
            return list(found)

    def _look(self, task: int) -> Iterator[int]:
        for number in range(MAX_COUNT):
            if number == self.number:
                if not task or task in self._tasks:
                    yield number
            elif filesystem.is_byte_locked(self._fd, self._byte(task, number)):
                yield number

    def is_mine(self, task: int, group: int) -> bool:
        """Return whether a group is in this daemon's share of a task.

        If this daemon takes no part, all groups are: then a user requested
        this run.
        """
        with self._mutex:
            if task not in self._tasks:
                return True
        return share_of(group, self.members(task)) == self.number
