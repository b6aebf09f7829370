# SPDX-License-Identifier: Apache-2.0

"""Images whose replication has begun: ``replication.json``.

Replication notes an image here before it makes the record in the other site's
Glance. The note stays until the image is known to be complete there, and still
to exist here (R2 to R5 of ``replication.rst``, "Replication"). So if a user
deletes an image while it is on its way, it is deleted there, too, even if the
process that sent it died.

The file is small: it has one image for each process that replicates, and the
images that could not be finished. It is replaced as a whole, under a lock on
the present file. A process that gets the lock checks that the file still has
its name (as for I4). A bad file is an error, and stays as it is: an empty one
in its place would forget the images that must be deleted.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
import os
import stat
import time
from typing import Any

from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import filesystem
from glance_dedup.base import imageids
from glance_dedup.base import imagelist
from glance_dedup.repository import image_repository

NAME = 'replication.json'
#: The most images; more would mean that something is wrong with all of them.
MAX_COUNT = 1024
#: The most bytes of the file.
MAX_SIZE = 2 << 20

_KIND = 'glance-dedup replication'
_MAX_SITE = _MAX_LOCATION = 512
# Holders keep the lock only while they write the file. Seconds.
_LOCK_SECONDS = 30.0
_POLL = 0.02


@dataclasses.dataclass(frozen=True)
class Entry:
    """An image that is under way."""

    image_id: str
    site: str
    """The other Glance's URL."""
    recorded: bool
    """Whether we surely made its record there; otherwise we may have."""
    location: str | None = None
    """The location of its data there, noted before the commit (R3): the other
    site names no location of an image that it has. None: not known."""

    def __post_init__(self) -> None:
        # The values may come from a file that any user may have written.
        if not (isinstance(self.image_id, str)
                and imageids.is_valid(self.image_id)):
            raise ValueError(f'{self.image_id!r} is not an image id')
        if not isinstance(self.site, str) or len(self.site) > _MAX_SITE:
            raise ValueError(f'{self.site!r:.80} is not a URL')
        if type(self.recorded) is not bool:
            raise ValueError(f'{self.recorded!r} is neither true nor false')
        if self.location is not None and not (
                isinstance(self.location, str)
                and len(self.location) <= _MAX_LOCATION):
            raise ValueError(f'{self.location!r:.80} is not a location')


_Entries = dict[tuple[str, str], Entry]


def encode(entries: list[Entry]) -> bytes:
    """The file's content."""
    return imagelist.encode(_KIND, map(dataclasses.asdict, entries))


def decode(content: bytes) -> list[Entry]:
    """The images in a file's content; an empty file is a new one.

    :raises ValueError: names the file's problem
    """
    if not content:
        return []
    return imagelist.decode(content, _KIND, MAX_SIZE, Entry)


class Underway:
    """The images that are on their way to one site. Thread-safe.

    :param site: the other Glance's URL
    :raises InvalidParameter: the URL is too long
    """

    def __init__(self, repository: image_repository.Repository,
                 site: str) -> None:
        if len(site) > _MAX_SITE:
            raise exceptions.InvalidParameter(
                f'the URL {site[:80]}... has more than {_MAX_SITE} bytes')
        self._root = repository.path
        self._path = os.path.join(repository.path, NAME)
        self._site = site

    def entries(self) -> dict[str, Entry]:
        """The images on their way to this site, by their ids.

        :raises DamagedError: the file is bad; with a remedy
        """
        try:
            fd = access.open_file(self._path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return {}
        except OSError as e:
            raise self._unusable(e, 'opened') from e
        with closing.descriptor(fd):
            found = self._read(fd)
        return {entry.image_id: entry for entry in found.values()
                if entry.site == self._site}

    def begin(self, image_id: str) -> None:
        """Note an image before its record is made (R2).

        An image that is noted already keeps its note.

        :raises BusyError: too many images are under way
        """
        with self._changing() as entries:
            if len(entries) >= MAX_COUNT and (
                    image_id, self._site) not in entries:
                raise exceptions.BusyError(
                    f'{self._path} has {MAX_COUNT} images that could not be '
                    'brought to an end: see why these fail, first')
            entries.setdefault((image_id, self._site),
                               Entry(image_id, self._site, False))

    def recorded(self, image_id: str) -> None:
        """Note that we made the image's record."""
        self._set(image_id, recorded=True)

    def located(self, image_id: str, location: str) -> None:
        """Note the location that the image's data is about to get."""
        self._set(image_id, location=location)

    def _set(self, image_id: str, **fields: Any) -> None:
        with self._changing() as entries:
            key = image_id, self._site
            entries[key] = dataclasses.replace(
                entries.get(key, Entry(image_id, self._site, False)),
                **fields)

    def end(self, image_id: str) -> None:
        """Remove an image's note: nothing is left to do."""
        with self._changing() as entries:
            entries.pop((image_id, self._site), None)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Entries]:
        """The file's entries. Writes the caller's changes at the end."""
        with closing.descriptor(self._open_locked()) as fd:
            entries = self._read(fd)
            before = dict(entries)
            yield entries
            if entries != before:
                self._write(entries)

    def _write(self, entries: _Entries) -> None:
        try:
            files.replace_file(
                self._path, encode(list(entries.values())),
                access.file_mode(self._root))
        except OSError as e:
            raise self._unusable(e, 'written') from e

    def _open_locked(self) -> int:
        """Open and lock the file of this name; make it if it is missing."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            fd = self._open()
            try:
                if filesystem.lock(fd, fcntl.F_WRLCK, 0) and self._is_it(fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if time.monotonic() > deadline:
                raise exceptions.BusyError(
                    f'another process has {self._path} locked for '
                    f'{_LOCK_SECONDS:.0f} seconds; see whether it was stopped')
            time.sleep(_POLL)

    def _open(self) -> int:
        try:
            if not files.exists(self._path):
                with contextlib.suppress(FileExistsError):
                    os.close(access.make_file(
                        self._path, access.file_mode(self._root)))
            return access.open_file(self._path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as e:
            raise self._unusable(e, 'opened') from e

    def _is_it(self, fd: int) -> bool:
        try:
            named = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(fd), named)

    def _read(self, fd: int) -> _Entries:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise self._damaged('it is not an ordinary file')
        try:
            found = decode(os.pread(fd, MAX_SIZE + 1, 0))
        except OSError as e:
            raise self._unusable(e, 'read') from e
        except ValueError as e:
            raise self._damaged(str(e)) from e
        return {(entry.image_id, entry.site): entry for entry in found}

    def _unusable(self, error: OSError, what: str) -> exceptions.StorageError:
        found = exceptions.StorageError(
            f'{self._path} cannot be {what}: {error.strerror}. No image is '
            'replicated without it')
        found.errno = error.errno or 0
        return found

    def _damaged(self, why: str) -> exceptions.DamagedError:
        return exceptions.DamagedError(
            f'{self._path}, which says what is on its way to other sites, '
            f'cannot be used: {why}. Nothing was replicated. See which images '
            'are queued at the other site, move the file away, and begin '
            'again')
