# SPDX-License-Identifier: Apache-2.0

"""The disk space of uploads that are not committed: ``reservations/``.

Each upload of a project with a limit has an empty file there. Its name has the
upload's id, the project, and the bytes that are reserved for the upload, so
that any host that lists the directory knows them (N13.1). The process that
uploads holds a lock on the file. The file of an upload that was given up, or
whose process died, stays without a lock: blocks of the upload may be on the
disk until a collection has visited all groups. Then the maintainer removes
the file.

The directory is listed and changed under the lock of ``reservations/lock``. So
no two uploads, of any process on any host, reserve the same bytes.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import hashlib
import os
import re
import time
import typing

from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import filesystem

DIRECTORY = 'reservations'
LOCK = 'lock'

# Of a file: the upload, the project's digest, the reserved bytes.
_NAME = re.compile(r'([0-9a-f]{32})\.([0-9a-f]{32})\.(0|[1-9][0-9]{0,17})')

# The most seconds for which the lock is waited for: its holders only list and
# rename such files.
_MAX_WAIT = 30.0
_PAUSE = 0.005


@contextlib.contextmanager
def locked(root: str) -> Iterator[None]:
    """Hold the lock under which reservations are read and changed.

    :param root: the repository's path
    :raises BusyError: other processes hold the lock for too long
    """
    path = os.path.join(root, DIRECTORY, LOCK)
    with files.os_errors(f'cannot lock {path}', exceptions.StorageError):
        fd = _open_lock(root, path)
    with closing.descriptor(fd):
        deadline = time.monotonic() + _MAX_WAIT
        while True:
            with files.os_errors(f'cannot lock {path}'):
                if filesystem.lock(fd, fcntl.F_WRLCK, 0):
                    break
            if time.monotonic() > deadline:
                raise exceptions.BusyError(
                    f'another process holds the lock of {path} for more than '
                    f'{_MAX_WAIT:.0f} seconds')
            time.sleep(_PAUSE)
        yield


def _open_lock(root: str, path: str) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW
    try:
        return access.open_file(path, flags)
    except FileNotFoundError:
        directory = os.path.dirname(path)
        if not files.is_directory(directory):
            access.make_directory(directory, access.directory_mode(root))
        with contextlib.suppress(FileExistsError):
            os.close(access.make_file(path, access.file_mode(root)))
        return access.open_file(path, flags)


class _File(typing.NamedTuple):
    path: str
    upload: str
    project: str    # its digest
    size: int


class Reservation:
    """Holds the bytes that are reserved for one upload.

    REQUIRES: each call is made under :func:`locked`.

    :param root: the repository's path
    """

    def __init__(self, root: str, project: str, upload_id: str) -> None:
        self._root = root
        self._upload = upload_id
        self._project = hashlib.sha256(project.encode()).hexdigest()[:32]
        self._path = self._path_for(0)
        with files.os_errors(f'cannot make {self._path}'):
            self._fd = access.make_file(self._path, access.file_mode(root))
            filesystem.lock(self._fd, fcntl.F_WRLCK, 0)

    def _path_for(self, size: int) -> str:
        return os.path.join(self._root, DIRECTORY,
                            f'{self._upload}.{self._project}.{size}')

    def others(self) -> int:
        """Return the bytes of the project's other uploads."""
        return sum(file.size for file in _all(self._root)
                   if file.project == self._project
                   and file.upload != self._upload)

    def set(self, size: int) -> None:
        """Reserve so many bytes in place of those before."""
        path = self._path_for(size)
        with files.os_errors(f'cannot rename {self._path}'):
            os.rename(self._path, path)
        self._path = path

    def given_up(self) -> int:
        """Return the bytes of the project's uploads that were given up."""
        return sum(file.size for file in self._given_up())

    def take_over(self, size: int) -> None:
        """Free bytes of given-up uploads: this image counts them now."""
        for file in self._given_up():
            part = min(size, file.size)
            size -= part
            with files.os_errors(f'cannot change {file.path}'):
                if part == file.size:
                    os.unlink(file.path)
                elif part:
                    kept, _, _ = file.path.rpartition('.')
                    os.rename(file.path, f'{kept}.{file.size - part}')

    def end(self, kept: int) -> None:
        """End the upload; idempotent.

        :param kept: bytes that it leaves on the disk without an image
        """
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        with closing.descriptor(fd), files.os_errors(
                f'cannot change {self._path}'):
            if kept:
                self.set(kept)
            else:
                os.unlink(self._path)

    def _given_up(self) -> list[_File]:
        """Return the files of the project's uploads that were given up."""
        return [file for file in _all(self._root)
                if file.project == self._project and _is_given_up(file)]


def _is_given_up(file: _File) -> bool:
    try:
        return not filesystem.is_locked(file.path)
    except OSError:
        return False    # it is no file, or gone


def given_up(root: str) -> set[str]:
    """Return the ids of uploads that were given up.

    REQUIRES: the caller holds the lock.
    """
    return {file.upload for file in _all(root) if _is_given_up(file)}


def remove(root: str, uploads: set[str]) -> None:
    """Remove the files of uploads whose blocks were collected.

    REQUIRES: the caller holds the lock.
    """
    for file in _all(root):
        if file.upload in uploads:
            with files.os_errors(f'cannot remove {file.path}'):
                os.unlink(file.path)


def exist(root: str) -> bool:
    """Return whether there are files of uploads."""
    return any(_all(root))


def _all(root: str) -> list[_File]:
    """Return the files of uploads; other names count nothing."""
    try:
        with os.scandir(os.path.join(root, DIRECTORY)) as entries:
            return [_File(entry.path, found[1], found[2], int(found[3]))
                    for entry in entries
                    if (found := _NAME.fullmatch(entry.name))
                    and entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return []
