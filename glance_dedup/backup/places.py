# SPDX-License-Identifier: Apache-2.0

"""A host's files of a source between two backups: the source's place.

A place is some files in the state directory, all with the source's name::

    <name>.lock           locked (flock) by the process that backs it up
    <name>.digests        the digests of its last backup (digests.py)
    <name>.digests.new    the digests of a backup that goes on
    <name>.checkpoint     the checkpoint of its last backup (checkpoints.py)

All of them are hints (B1): without them a backup reads everything. A state
directory belongs to one repository; files that name another are not used.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import os
import re

from glance_dedup.backup import views
from glance_dedup.base import closing

#: The longest name: ``b_<name>_<time>`` is an image's id, of 128 characters.
MAX_NAME = 109
is_name = re.compile(f'[A-Za-z0-9_-]{{1,{MAX_NAME}}}').fullmatch
#: Files of a state directory that record when each server was backed up.
MODE = 0o600


@contextlib.contextmanager
def source_errors(what: str) -> Iterator[None]:
    """Turn an OSError into a SourceError.

    :param what: the failed action; the message begins with it
    """
    try:
        yield
    except OSError as e:
        error = views.SourceError(f'{what}: {e.strerror or e}')
        error.errno = e.errno or 0
        raise error from e


class Place(closing.Closing):
    """The files of one source, locked until :meth:`close`.

    :param directory: the state directory; made if it is missing
    :param name: the source's
    :param repository_id: of the repository that has the backups
    :raises SourceError: another process backs up the source, or the state
        directory cannot be used
    """

    def __init__(self, directory: str, name: str, repository_id: str) -> None:
        if not is_name(name):
            raise views.SourceError(
                f"'{name}' cannot name backups: a name has 1 to "
                f'{MAX_NAME} characters of A-Z a-z 0-9 _ -. Give another '
                'name')
        self.directory = directory
        self.name = name
        self.repository_id = repository_id
        self._lock: int | None = None
        with source_errors(f'the state directory {directory} cannot be used'):
            os.makedirs(directory, 0o700, exist_ok=True)
            fd = os.open(self.path('lock'), os.O_RDWR | os.O_CREAT
                         | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, MODE)
        try:
            self._take(fd)
        except BaseException:
            os.close(fd)
            raise
        self._lock = fd

    def _take(self, fd: int) -> None:
        with source_errors(f'{self.path("lock")} cannot be locked'):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise views.SourceError(
                    f'another backup of {self.name} is running on this host. '
                    'Wait until it has ended: it holds the lock '
                    f'{self.path("lock")}') from None

    def path(self, kind: str) -> str:
        """The path of a file of this source."""
        return os.path.join(self.directory, f'{self.name}.{kind}')

    def close(self) -> None:
        """Give the lock back. Idempotent."""
        fd, self._lock = self._lock, None
        if fd is not None:
            os.close(fd)
