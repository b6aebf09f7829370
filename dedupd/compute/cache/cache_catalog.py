# SPDX-License-Identifier: Apache-2.0

"""The list of a compute host's cache: ``cache.json``.

The file has, for each image, the size and MD5 that Glance named when the image
came, and the time of its last use. The entries are in the order of use, the
least recently used first, so that no clock decides. All of this is a hint. An
image that the file does not have is the first to be evicted. On the next
request it is pulled again, which moves few blocks. An invalid file is set
aside in ``quarantine/``, and the cache begins an empty one.

The file also remembers images of which the storing host has another version
than Glance. The cache does not request these again until Glance means another
version, too.

The file also marks the repository as a cache, whose images may be evicted. A
repository that holds images, and has no such file, loses nothing.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import os
import re
import threading
import time
from typing import Any

from oslo_log import log

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import imageids
from glance_dedup.base import imagelist
from glance_dedup.maintenance import reserve
from glance_dedup.repository import image_repository

LOG = log.getLogger(__name__)

NAME = 'cache.json'
#: The directory for invalid files; it keeps only the last one.
SET_ASIDE = f'quarantine/{NAME}'
#: The most images that the file has.
MAX_COUNT = 20_000
#: The most images that are remembered as wrong.
MAX_WRONG = 1000
#: The most bytes that the file may have, which is more than these take.
MAX_SIZE = 8 << 20
#: Seconds between two writes of the file.
SAVE_INTERVAL = 5.0

_KIND = 'glance-dedup cache'
_MD5 = re.compile('[0-9a-f]{32}')
_MARK = re.compile('[0-9a-f]{64}')


@dataclasses.dataclass(frozen=True)
class CachedImage:
    """The cache's facts of an image."""

    size: int
    """Bytes; 0 if the image was not compared with Glance's."""
    md5: str | None
    """The MD5 that Glance named; None: it named none."""
    used: int
    """Seconds since 1970, for people: the entries' order decides which is
    evicted first."""
    wrong: str | None = None
    """The mark (`arriving_image.Expected.mark`) of Glance's image, if the
    storing host has another one. Then the image is not here. None: it
    is here."""

    def __post_init__(self) -> None:
        # The values may be from a file that any user may have written.
        for number in (self.size, self.used):
            if type(number) is not int or not 0 <= number < 1 << 63:
                raise ValueError(f'{number!r} is not a size or a time')
        if self.md5 is not None and not _MD5.fullmatch(self.md5):
            raise ValueError(f'{self.md5!r} is not an MD5')
        if self.wrong is not None and not _MARK.fullmatch(self.wrong):
            raise ValueError(f'{self.wrong!r} is not a mark')


def encode(images: dict[str, CachedImage]) -> bytes:
    """Encode the file's content."""
    return imagelist.encode(_KIND, (
        {'id': image_id, **{name: value for name, value
                            in dataclasses.asdict(entry).items()
                            # Older programs do not know `wrong`.
                            if name != 'wrong' or value is not None}}
        for image_id, entry in images.items()))


def decode(content: bytes) -> dict[str, CachedImage]:
    """Decode the images of a file.

    :raises ValueError: if the file is invalid; the message says why
    """
    def named(id: str, **fields: Any) -> tuple[str, CachedImage]:
        if not imageids.is_valid(id):
            raise ValueError(f'{id!r} is not an image id')
        return id, CachedImage(**fields)

    return dict(imagelist.decode(content, _KIND, MAX_SIZE, named))


def require_limit(repository: image_repository.Repository,
                  limit: int) -> None:
    """Refuse a limit that is too small to hold any image.

    :param limit: bytes; 0: no limit
    :raises InvalidParameter: if it is too small; the message gives the
        minimum
    """
    chosen = repository.parameters
    group = chosen.group_slots * chosen.average_block
    kept = reserve.RESERVE_BYTES
    if limit and limit < group + kept:
        raise exceptions.InvalidParameter(
            f'limit_mib: {limit >> 20} is too small for {repository.path}: a '
            f'block group takes up to {-(-group >> 20)} MiB, and {kept >> 20} '
            'are kept for the catalog. Choose at least '
            f'{-(-(group + kept) >> 20)}, or 0 for no limit')


class Held:
    """The images of a cache, and the time of each one's last use. Thread-safe.

    :param limit: returns the bytes of disk that the cache may take; 0: the
        whole disk
    :raises InvalidParameter: if the repository holds images and is not a
        cache, or if the limit is too small to hold anything

    :ivar evictions: images evicted since the start
    :ivar taken: bytes of disk that the repository took at the last
        measurement; None before the first
    """

    def __init__(self, repository: image_repository.Repository,
                 limit: Callable[[], int] = lambda: 0) -> None:
        self._repository = repository
        self._limit = limit
        self._path = os.path.join(repository.path, NAME)
        self._changed = threading.Condition()
        self._saving = threading.Lock()
        self._images: dict[str,
                           CachedImage] = {}     # the most recently used last
        self._wrong: dict[str,
                          CachedImage] = {}      # images that are not here
        self._dirty = False
        self._closed = False
        self._told = False      # logged that it cannot be written
        self._thread: threading.Thread | None = None
        self.evictions = 0
        self.taken: int | None = None
        require_limit(repository, self.limit)
        self._load()

    @property
    def limit(self) -> int:
        """Bytes of disk that the whole cache may take; 0: the whole disk."""
        return self._limit()

    # -- held images -------------------------------------------------------

    def fits(self, image_id: str, size: int, md5: str | None) -> bool:
        """Return whether the image of this id is the one that Glance means.

        :param md5: the MD5 that Glance names; None: it names none
        """
        with self._changed:
            entry = self._images.get(image_id)
        return (entry is not None and entry.size == size
                and (md5 is None or entry.md5 == md5))

    def worth(self, size: int) -> bool:
        """Return whether the cache may hold an image of this many bytes."""
        return not self.limit or size <= self.limit

    def note(self, image_id: str, size: int, md5: str | None) -> None:
        """Note that an image is here, whole and committed.

        :param md5: the MD5 that Glance named; an invalid one counts as None
        """
        if md5 is not None and not _MD5.fullmatch(md5):
            md5 = None
        with self._changed:
            self._images.pop(image_id, None)
            self._wrong.pop(image_id, None)
            self._images[image_id] = CachedImage(size, md5, int(time.time()))
            if len(self._images) > MAX_COUNT:
                del self._images[next(iter(self._images))]
            self._touch()

    def note_uncompared(self, image_id: str) -> None:
        """Note an image that is here and used, but may differ from Glance's.

        The entry fits no image that has bytes, so Glance's callers do not get
        this image.
        """
        self.note(image_id, 0, None)

    def note_wrong(self, image_id: str, size: int, mark: str,
                   why: str) -> None:
        """Note that the storing host's image is not the one that Glance means.

        This waits for the disk, so that the cache knows it after a kill, too.

        :param mark: identifies the image that Glance means
        """
        with self._changed:
            self._images.pop(image_id, None)
            before = self._wrong.pop(image_id, None)
            self._wrong[image_id] = CachedImage(size, None, int(time.time()),
                                                mark)
            if len(self._wrong) > MAX_WRONG:
                del self._wrong[next(iter(self._wrong))]
            self._touch()
        if before is None or before.wrong != mark:
            LOG.error('Image %s of the storing host is not the one that '
                      'Glance means, and comes from Glance from now on: %s',
                      image_id, why)
        self.save()

    def is_wrong(self, image_id: str, mark: str) -> bool:
        """Return whether the storing host's image is known to be another one.

        :param mark: identifies the image that Glance means now
        """
        with self._changed:
            entry = self._wrong.get(image_id)
            if entry is not None and entry.wrong != mark:
                del self._wrong[image_id]
                self._touch()
                return False
        return entry is not None

    def used(self, image_id: str) -> None:
        """Note that an image is used now."""
        with self._changed:
            entry = self._images.pop(image_id, None)
            if entry is not None:
                self._images[image_id] = dataclasses.replace(
                    entry, used=int(time.time()))
                self._touch()

    def drop(self, image_id: str) -> None:
        """Delete an image, if it is here. Waits for the disk.

        Readers of the image can go on.

        :raises BusyError: if another process is deleting it
        :raises StorageError, NoSpaceError: if the disk fails or is full
        """
        with contextlib.suppress(exceptions.ImageNotFound):
            self._repository.delete(image_id)
        with self._changed:
            gone = [known.pop(image_id, None)
                    for known in (self._images, self._wrong)]
            if gone != [None, None]:
                self._touch()

    def candidates(self) -> list[str]:
        """All images but backups, in the order in which to evict them.

        No Glance could give a backup back.

        Images whose last use is not known come first. The others follow, the
        least recently used first.
        """
        with self._changed:
            # List with the lock held, or images that come meanwhile would be
            # forgotten.
            here = [image_id for image_id in self._repository.images()
                    if imageids.of_backup(image_id) is None]
            for image_id in self._images.keys() - set(here):
                del self._images[image_id]
                self._touch()
            known = list(self._images)
        return [*sorted(set(here).difference(known)), *known]

    def last_used(self, image_id: str) -> int | None:
        """Time of an image's last use: seconds since 1970; None: unknown."""
        with self._changed:
            entry = self._images.get(image_id)
        return None if entry is None else entry.used

    def status(self) -> dict[str, Any]:
        """The figures of the cache, for operators."""
        with self._changed:
            images, wrong = len(self._images), sorted(self._wrong)
        return {'limit_bytes': self.limit, 'disk_bytes': self.taken,
                'images': images, 'wrong_images': len(wrong), 'wrong': wrong,
                'evictions': self.evictions}

    # -- the file ----------------------------------------------------------

    def _load(self) -> None:
        root = self._repository.path
        here = set(self._repository.images())
        try:
            images = decode(files.read_file(self._path, MAX_SIZE + 1))
        except FileNotFoundError:
            if here and not files.exists(os.path.join(root, SET_ASIDE)):
                raise exceptions.InvalidParameter(
                    f'{root} holds images and is no cache: it has no {NAME}. '
                    'A cache deletes what it holds, so give it a repository '
                    'of its own, made by "glance-dedup repository create". '
                    'If this was one, and has lost the file, put an empty '
                    'one in its place')
            self._dirty = True
        except (OSError, ValueError, exceptions.DamagedError) as e:
            self._set_aside(e)
            self._dirty = True
        else:
            self._images = {
                image_id: entry for image_id, entry in images.items()
                if image_id in here and entry.wrong is None}
            self._wrong = dict([
                (image_id, entry) for image_id, entry in images.items()
                if entry.wrong is not None][-MAX_WRONG:])
        # Save at once: images that arrive from now on belong to a cache.
        self.save()

    def _set_aside(self, error: Exception) -> None:
        aside = os.path.join(self._repository.path, SET_ASIDE)
        LOG.warning('%s is invalid, and set aside as %s: %s. The times of the '
                    'images\' last uses are forgotten. Each image is checked '
                    'again on its next request.', self._path, aside,
                    str(error)[:200])
        try:
            if files.exists(aside):
                files.remove(aside)
            os.rename(self._path, aside)
        except OSError as e:
            LOG.warning('%s cannot be set aside: %s', self._path, e.strerror)

    def _touch(self) -> None:
        """Schedule a save of the file. REQUIRES: the caller holds the lock."""
        self._dirty = True
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._save_in_turn, name='dedupd-held', daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _save_in_turn(self) -> None:
        """Save changes, at most once in SAVE_INTERVAL."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dirty or self._closed)
                self._changed.wait_for(lambda: self._closed, SAVE_INTERVAL)
                if self._closed:
                    return
            self.save()

    def save(self) -> None:
        """Write the file if it has changed. Failures are logged once."""
        with self._saving:
            with self._changed:
                if not self._dirty:
                    return
                self._dirty = False
                images = {**self._wrong, **self._images}
            try:
                files.replace_file(
                    self._path, encode(images),
                    access.file_mode(self._repository.path))
            except OSError as e:
                with self._changed:
                    self._dirty = True
                if not self._told:
                    LOG.warning(
                        '%s cannot be written: %s. It is tried again; what '
                        'is used until then is forgotten if the daemon '
                        'ends.', self._path, e.strerror)
                self._told = True
            else:
                self._told = False

    def close(self) -> None:
        """Write the file for the last time. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.save()
