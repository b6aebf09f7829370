# SPDX-License-Identifier: Apache-2.0

"""Files of a repository that may be in use: opened, read, read again."""

from collections.abc import Iterator
import contextlib
import errno
import mmap
import os
import stat
import time

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.check import ondisk

# Reads of a file that looks wrong before it is reported, with pauses
# between them: another process may be in the middle of writing it.
LOOKS = 4
PAUSE = 0.05                    # seconds


# Errors of an open file that another host unlinked, where the server does not
# keep it.
_FORGOTTEN = (errno.ENOENT, errno.ESTALE)


class Gone(Exception):
    """The file that was to be read has no such name any more."""


class Forgotten(Gone):
    """Another host unlinked or replaced the open file: open it again."""


def looks() -> Iterator[int]:
    """The turns at reading something, with a pause before each further one.

    Each yields the number of turns that are left. Leave the loop as soon as
    the file was read without a problem.
    """
    for left in reversed(range(LOOKS)):
        yield left
        if left:
            time.sleep(PAUSE)


def refused_by_system(error: OSError, file: str) -> None:
    """Raise if the error is the environment's fault, not the repository's.

    :param file: its name, for the message
    :raises AccessDenied: the system refuses the access
    :raises StorageError: the system is short of descriptors or memory
    """
    if error.errno in (errno.EACCES, errno.EPERM):
        raise exceptions.AccessDenied(
            f'{file} cannot be read: {error.strerror}') from error
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise exceptions.StorageError(
            f'{file} cannot be read: {error.strerror}') from error


def is_forgotten(error: OSError) -> bool:
    """Return whether the server no longer keeps an open file or directory."""
    return error.errno in _FORGOTTEN


def identity(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return the difference between a file and another that replaces it."""
    return (status.st_dev, status.st_ino, status.st_size,
            status.st_mtime_ns)


def names_of(name: str, directory: str) -> tuple[str, ...]:
    """Return the names by which a file may be found, in this order.

    :param directory: its name inside the repository
    """
    if directory not in ondisk.HAVE_SECOND:
        return (name,)
    return name, name + ondisk.SECOND, name


def _open(name: str, directory: int) -> tuple[int, bool]:
    """Open a file; return it, and whether it is read past the page cache.

    That is where no disk of this host holds it: pages of a file that another
    host wrote may be old (N13.1), and would be called damage.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW
    if os.major(os.fstat(directory).st_dev) == 0:
        try:
            return access.open_file(name, flags | os.O_DIRECT, directory), True
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
    return access.open_file(name, flags, directory), False


def renew_names(directory: int) -> None:
    """Forget names that another host may have changed.

    A host may remember names for a minute, also those that are missing. One
    that opens the directory requests them.
    """
    os.close(os.open('.', os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC,
                     dir_fd=directory))


def _open_first(names: tuple[str, ...], directory: int) -> tuple[int, bool]:
    for name in names[:-1]:
        with contextlib.suppress(FileNotFoundError):
            return _open(name, directory)
    return _open(names[-1], directory)


def _open_any(names: tuple[str, ...], directory: int) -> tuple[int, bool]:
    """Open a file that may have another inode than this host remembers."""
    try:
        return _open_first(names, directory)
    except OSError as e:
        if e.errno not in _FORGOTTEN:
            raise
    renew_names(directory)
    return _open_first(names, directory)


class File:
    """A regular file of the repository, open for reading.

    :ivar file: its name in the repository, for messages
    :ivar identity: of the file that was opened; see :func:`identity`
    :raises Gone: if there is no such file; Forgotten if it was there, also
        when it is read
    :raises Damage: if it is not a regular file, or cannot be opened
    """

    # Bytes read ahead at once; most requests come in rising order.
    WINDOW = 4 << 20

    def __init__(self, directory: int, name: str, file: str):
        self.file = file
        try:
            self.fd, self._is_direct = _open_any(
                names_of(name, file.partition('/')[0]), directory)
        except FileNotFoundError:
            raise Gone() from None
        except OSError as e:
            refused_by_system(e, file)
            if e.errno == errno.ELOOP:
                raise ondisk.Damage('is a symbolic link') from e
            raise ondisk.Damage(f'cannot be opened: {e.strerror}') from e
        self._start = 0
        self._window = b''
        try:
            status = self.status()
            if not stat.S_ISREG(status.st_mode):
                raise ondisk.Damage('is not a regular file')
        except BaseException:
            os.close(self.fd)
            raise
        self.identity = identity(status)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        os.close(self.fd)

    def status(self) -> os.stat_result:
        """Return the status of the file at this moment."""
        try:
            return os.fstat(self.fd)
        except OSError as e:
            if is_forgotten(e):
                raise Forgotten() from e
            raise ondisk.Damage(f'has no status: {e.strerror}') from e

    def size(self) -> int:
        """The size in bytes at this moment; the file may be growing."""
        return self.status().st_size

    def read(self, offset: int, length: int) -> bytes:
        """The bytes at `offset`: fewer than `length` at the file's end."""
        parts = []
        while length > 0:
            try:
                part = self._read_once(offset, length)
            except OSError as e:
                refused_by_system(e, self.file)
                if is_forgotten(e):
                    raise Forgotten() from e
                raise ondisk.Damage(
                    f'cannot be read: {e.strerror}', offset) from e
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b''.join(parts)

    def _read_once(self, offset: int, length: int) -> bytes:
        if not self._is_direct:
            return os.pread(self.fd, length, offset)
        # Such a file is read in whole pages, into whole pages of memory.
        before = offset % ondisk.PAGE
        pages = -(-(before + length) // ondisk.PAGE)
        with mmap.mmap(-1, pages * ondisk.PAGE) as memory:
            count = os.preadv(self.fd, [memory], offset - before)
            return memory[before:min(count, before + length)]

    def read_ahead(self, offset: int, length: int) -> memoryview:
        """The same through a window, for many short pieces in order.

        The memory stays valid after the next call.
        """
        at = offset - self._start
        if at < 0 or at + length > len(self._window):
            self._window = b''
            try:
                self._window = self.read(offset, max(length, self.WINDOW))
            except ondisk.Damage:
                # A bad sector must not spoil the bytes before it.
                self._window = self.read(offset, length)
            self._start = offset
            at = 0
        return memoryview(self._window)[at:at + length]
