# SPDX-License-Identifier: Apache-2.0

"""The volumes of a repository, by name and by id."""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
import os
import re
import time
from typing import Protocol

from glance_dedup import _engine
from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import filesystem
from glance_dedup.base import imageids
from glance_dedup.repository import layout

#: The byte of locks/images that the engine locks while it renames a volume.
_NAMES_BYTE = 1 << 62
#: Seconds to wait for it, or for volumes that come and go, and between two
#: attempts.
_LIMIT = 30.0
_PAUSE = 0.005

is_name = re.compile('[A-Za-z0-9_-]{1,64}').fullmatch

#: The counters of a volume, which begin when it is made: the engine's names,
#: with the names that users see, and the unit of each.
COUNTERS = {
    'read': ('read_bytes', 'Bytes that were read from volumes'),
    'written': ('written_bytes', 'Bytes that were written to volumes'),
    'zeroed': ('zeroed_bytes', 'Bytes that were trimmed or zeroed'),
    'flushes': ('flushes', 'Flushes'),
    'checkpoints': ('checkpoints', 'Checkpoints'),
    'unique': ('unique_bytes',
               'Bytes that checkpoints stored as new blocks'),
    'duplicate': ('duplicate_bytes',
                  'Bytes that checkpoints found to be stored already'),
    'zero': ('zero_bytes', 'Bytes that checkpoints found to be zeros'),
    'overwritten': ('overwritten_bytes',
                    'Bytes that were written again before a checkpoint'),
    'skipped': ('skipped_bytes',
                'Bytes that a hint had stored without a look-up'),
    'prefetches': ('prefetches',
                   'Fingerprint stores that were prefetched on request'),
    'prefetched': ('prefetched_bytes',
                   'Bytes that were found to be duplicates in such stores'),
}


class Repository(Protocol):
    """The part of an open repository that this module uses."""

    path: str

    def handle(self) -> _engine.Repository:
        """The engine's handle."""


@dataclasses.dataclass(frozen=True)
class Volume:
    """A volume, by the head of its newest journal."""

    name: str
    volume_id: str | None
    """32 hexadecimal digits; None: it has no journal yet, or any more."""
    is_ready: bool
    """False: it is being made or deleted, or that was interrupted."""


def names(path: str) -> list[str]:
    """The names of all volumes of the repository at a path, sorted."""
    directory = os.path.join(path, layout.VOLUMES)
    try:
        with files.os_errors(f'cannot list {directory}'), os.scandir(
                directory) as entries:
            return sorted(entry.name for entry in entries
                          if is_name(entry.name)
                          and entry.is_dir(follow_symlinks=False))
    except exceptions.ImageNotFound:
        return []


def look(repository: Repository, name: str) -> Volume:
    """Read which volume has a name now, even if a process owns it.

    :raises ImageNotFound: there is no such volume
    :raises DamagedError: its newest journal has no valid head
    :raises VersionError: the volume is of a newer version
    """
    try:
        head = repository.handle().look_at_volume(name)
    except exceptions.ImageNotFound:
        if files.is_directory(
                os.path.join(repository.path, layout.VOLUMES, name)):
            return Volume(name, None, False)
        raise
    return Volume(name, head['volume_id'].hex(), head['state'] == 'ready')


def name_of(repository: Repository, volume_id: str) -> str | None:
    """The name of the volume with an id; None: no volume has the id.

    No process renames a volume meanwhile, apart from a host that was cut off:
    its rename may come when it has lost its lock. Then a list may miss the
    volume under both names, or a read comes too late. So nothing counts as
    missing before two lists were the same, and every volume in them was there.

    :raises DamagedError, VersionError: no volume is known to have the id, and
        one cannot be read, which may be the one
    :raises BusyError: for 30 seconds volumes were being renamed, or made and
        deleted
    """
    deadline = time.monotonic() + _LIMIT
    with _no_renames(repository.path, deadline):
        return _find(repository, volume_id, deadline)


@contextlib.contextmanager
def _no_renames(path: str, deadline: float) -> Iterator[None]:
    """Share the lock on the volumes' names; a rename takes it exclusively."""
    file = os.path.join(path, layout.IMAGE_LOCKS)
    what = f'cannot lock {file}'
    with files.os_errors(what, exceptions.StorageError):
        opened = access.open_file(file, os.O_RDONLY | os.O_NOFOLLOW)
    with closing.descriptor(opened) as fd:
        with files.os_errors(what):
            while not filesystem.lock(fd, fcntl.F_RDLCK, _NAMES_BYTE):
                _require_time(deadline)
                time.sleep(_PAUSE)
        yield


def _require_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise exceptions.BusyError(
            'cannot look for a volume by its id: other processes rename, make '
            f'or delete volumes for more than {_LIMIT:.0f} seconds; try again')


def _find(repository: Repository, volume_id: str, deadline: float
          ) -> str | None:
    before = None
    while True:
        listed = names(repository.path)
        unread, gone = None, False
        for name in listed:
            try:
                if look(repository, name).volume_id == volume_id:
                    return name
            except exceptions.ImageNotFound:
                gone = True
            except (exceptions.DamagedError, exceptions.VersionError) as e:
                unread = unread or e
        if listed == before and not gone:
            break
        _require_time(deadline)
        before = listed
    if unread is not None:
        raise unread
    return None


def apart(repository: Repository, image_ids: Iterable[str]
          ) -> tuple[list[str], list[str]]:
    """The images among the ids, and the volumes that have the others.

    :returns: both sorted; a volume by its name, or its id if no name is known
    """
    images, of_volumes = [], {}
    for image_id in image_ids:
        recipe = imageids.of_volume(image_id)
        if recipe is None:
            images.append(image_id)
        elif recipe.volume_id not in of_volumes:
            of_volumes[recipe.volume_id] = _known_name(
                repository, recipe.volume_id)
    return sorted(images), sorted(of_volumes.values())


def described(repository: Repository | None, image_id: str) -> str:
    """A recipe's id; behind the id of a volume's, its part of the volume.

    :param repository: None: the volume's name is not known
    """
    what = words(repository, image_id)
    return image_id if what is None else f'{image_id} ({what})'


def words(repository: Repository | None, image_id: str) -> str | None:
    """Return a recipe's part of its volume, in words; None: it is an image's.

    :param repository: None: the volume's name is not known
    """
    recipe = imageids.of_volume(image_id)
    if recipe is None:
        return None
    return f'{recipe.what} of volume ' + _known_name(
        repository, recipe.volume_id)


def _known_name(repository: Repository | None, volume_id: str) -> str:
    """The name of a volume, or its id if no name is known."""
    if repository is not None:
        # A volume that cannot be read may be the one.
        with contextlib.suppress(exceptions.RepositoryError):
            return name_of(repository, volume_id) or volume_id
    return volume_id
