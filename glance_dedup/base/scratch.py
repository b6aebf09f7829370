# SPDX-License-Identifier: Apache-2.0

"""Temporary directories that do not stay after a killed process.

A killed process cannot remove its directory. So the next process that makes
such a directory removes the unused ones. Each process locks
its directory (``flock`` on the directory itself); the lock ends with the
process. Another user's directories are left alone.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile

from glance_dedup.base import closing

PREFIX = 'glance-dedup-scratch-'
_TRIES = 10


def lock_directory(path: str) -> int | None:
    """Open and lock a directory; None: another process uses it.

    :raises OSError: it is not known whether a process uses the directory
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                 | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _remove_dead() -> None:
    """Remove the directories of processes that have ended."""
    place = tempfile.gettempdir()
    for name in os.listdir(place):
        path = os.path.join(place, name)
        if not name.startswith(PREFIX):
            continue
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid != os.geteuid():
                continue
            fd = lock_directory(path)
            if fd is not None:
                with closing.descriptor(fd):
                    shutil.rmtree(path, ignore_errors=True)


class Directory:
    """A directory, readable by this user alone, until :meth:`cleanup`.

    :ivar name: its path
    :raises OSError: it cannot be made
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            _remove_dead()
        for _ in range(_TRIES):
            self.name = tempfile.mkdtemp(prefix=PREFIX)
            try:
                fd = self._fd = lock_directory(self.name)
            except FileNotFoundError:
                continue
            except OSError:
                return      # no locks here, so no process can remove it
            if fd is not None and self._is_there(fd):
                return
            # Another process removed it before it was locked.
            self.cleanup()
        raise FileNotFoundError(
            2, 'another process removed the new directory', self.name)

    def _is_there(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.name), os.fstat(fd))
        except FileNotFoundError:
            return False

    def cleanup(self) -> None:
        """Remove the directory with all its content. Idempotent."""
        shutil.rmtree(self.name, ignore_errors=True)
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
