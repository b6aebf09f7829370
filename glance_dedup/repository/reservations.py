# SPDX-License-Identifier: Apache-2.0

"""The disk space of uploads that are not committed: ``reservations/``.

Each upload of a project with a limit has a file, named after the upload's id,
with the project and the bytes that are reserved for it. The process that
uploads holds a lock on the file. The file of an upload that was given up, or
whose process died, stays without a lock: blocks of the upload may be on the
disk until a collection has visited all groups. Then the maintainer removes
the file.

The files are read and changed under the lock of ``reservations/lock``. So no
two uploads, of any process on any host, reserve the same bytes.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import json
import os
import time

from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import filesystem
from glance_dedup.base import hexids

DIRECTORY = 'reservations'
LOCK = 'lock'

# The most bytes of a file, and the most seconds for which the lock is waited
# for: its holders only read and write such files.
_MAX_BYTES = 4096
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


class Reservation:
    """Holds the bytes that are reserved for one upload.

    REQUIRES: each call is made under :func:`locked`.

    :param root: the repository's path
    """

    def __init__(self, root: str, project: str, upload_id: str) -> None:
        self._root = root
        self._project = project
        self._name = upload_id
        self._path = os.path.join(root, DIRECTORY, upload_id)
        with files.os_errors(f'cannot make {self._path}'):
            self._fd = access.make_file(self._path, access.file_mode(root))
            filesystem.lock(self._fd, fcntl.F_WRLCK, 0)

    def others(self) -> int:
        """Return the bytes of the project's other uploads."""
        return sum(size for name, project, size in _all(self._root)
                   if project == self._project and name != self._name)

    def set(self, size: int) -> None:
        """Reserve so many bytes in place of those before."""
        with files.os_errors(f'cannot write {self._path}'):
            _write(self._fd, self._project, size)

    def given_up(self) -> int:
        """Return the bytes of the project's uploads that were given up."""
        return sum(size for _, size in self._given_up())

    def take_over(self, size: int) -> None:
        """Free bytes of given-up uploads: this image counts them now."""
        for path, reserved in self._given_up():
            part = min(size, reserved)
            size -= part
            with files.os_errors(f'cannot change {path}'):
                if part == reserved:
                    os.unlink(path)
                elif part:
                    with closing.descriptor(access.open_file(
                            path, os.O_WRONLY | os.O_NOFOLLOW)) as fd:
                        _write(fd, self._project, reserved - part)

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
                _write(fd, self._project, kept)
            else:
                os.unlink(self._path)

    def _given_up(self) -> list[tuple[str, int]]:
        """Return path and bytes of each given-up upload of the project."""
        idle = given_up(self._root)
        return [(os.path.join(self._root, DIRECTORY, name), size)
                for name, project, size in _all(self._root)
                if project == self._project and name in idle]


def given_up(root: str) -> set[str]:
    """Return the names of the files of uploads that were given up.

    REQUIRES: the caller holds the lock.
    """
    found = set()
    for name in _names(root):
        with contextlib.suppress(OSError):
            if not filesystem.is_locked(os.path.join(root, DIRECTORY, name)):
                found.add(name)
    return found


def remove(root: str, name: str) -> None:
    """Remove the file of an upload whose blocks were collected."""
    path = os.path.join(root, DIRECTORY, name)
    with (files.os_errors(f'cannot remove {path}'),
          contextlib.suppress(FileNotFoundError)):
        os.unlink(path)


def exist(root: str) -> bool:
    """Return whether there are files of uploads."""
    return bool(_names(root))


def _names(root: str) -> list[str]:
    try:
        return [name for name in os.listdir(os.path.join(root, DIRECTORY))
                if hexids.is_valid(name)]
    except FileNotFoundError:
        return []


def _all(root: str) -> Iterator[tuple[str, str, int]]:
    """Yield the name, project and bytes of each valid file.

    A crash of the machine may leave an invalid one.
    """
    for name in _names(root):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError,
                                 exceptions.RepositoryError):
            found = json.loads(files.read_file(
                os.path.join(root, DIRECTORY, name), _MAX_BYTES))
            project, size = found['project'], found['bytes']
            if type(project) is str and type(size) is int and (
                    0 <= size < 1 << 63):
                yield name, project, size


def _write(fd: int, project: str, size: int) -> None:
    content = json.dumps({'project': project, 'bytes': size}).encode()
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, len(content))
