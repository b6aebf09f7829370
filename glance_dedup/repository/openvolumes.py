# SPDX-License-Identifier: Apache-2.0

"""Volumes: disks that a server writes to, made, opened and deleted.

``doc/source/contributor/volumes.rst`` has the terms, and the rules that are
cited here.

Sizes and offsets are in bytes.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import os
from typing import Any

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import filesystem
from glance_dedup.base import imageids
from glance_dedup.base import scopes
from glance_dedup.repository import image_repository
from glance_dedup.repository import layout
from glance_dedup.repository import openimages
from glance_dedup.repository import repo_parameters
from glance_dedup.repository import volumes

_MAX_OFFSET = (1 << 63) - 1


@dataclasses.dataclass(frozen=True)
class VolumeStat:
    """The facts in the newest head of a volume's journal."""

    name: str
    volume_id: str
    """32 hexadecimal digits."""
    state: str
    """'ready'; 'making' or 'deleting', if that goes on or was interrupted."""
    size: int
    base_size: int
    """So many of the first bytes may still be read from the base."""
    part_size: int
    project: str
    source: str
    """The id of the image that it was cloned from; '': of none."""
    scope: str
    """Scope, as of an image: 32 hexadecimal digits."""
    created: int
    """Seconds since 1970."""
    counters: dict[str, int]
    """By the engine's names in :data:`volumes.COUNTERS`."""


@dataclasses.dataclass(frozen=True)
class OpenVolumeStat(VolumeStat):
    """Facts that only a volume's owner has, and the others as of now."""

    journal_bytes: int
    journal_records: int
    """Records that no checkpoint has stored yet."""
    broken: str
    """Why it takes no writes; '': it does (V3)."""


@dataclasses.dataclass(frozen=True)
class VolumeExtent:
    """A piece of a volume."""

    offset: int
    length: int
    zeros: bool
    """Whether it is known to read as zeros."""


def _facts(name: str, found: dict[str, Any]) -> dict[str, Any]:
    return {**found, 'name': name, 'volume_id': found['volume_id'].hex(),
            'scope': found['scope'].hex()}


class Volume:
    """A volume that this process owns (V1).

    Any number of threads may use it at once; a write that has returned is seen
    by every read that begins later. In a forked child each call raises
    ClosedError, and the parent keeps the volume.

    After the sync of a journal failed, writes raise the error of that failure
    until the volume is opened again (V3).

    :ivar name: the volume's name
    """

    def __init__(self, name: str, engine: _engine.Volume,
                 repository: image_repository.Repository) -> None:
        self.name = name
        self._engine = engine
        # A fork closes only the descriptors of repositories that still exist.
        self._repository = repository

    @property
    def size(self) -> int:
        """Bytes of the whole volume, as of now."""
        return self._engine.info()['size']

    def info(self) -> OpenVolumeStat:
        """The volume's facts, as of now."""
        return OpenVolumeStat(**_facts(self.name, self._engine.info()))

    def read(self, length: int, offset: int) -> bytes:
        """Exactly `length` bytes from `offset`.

        :raises InvalidParameter: the range is not within the volume
        :raises DamagedError: names the file, and the offset in it
        """
        _require_range(length, offset)
        if length > self.size:
            raise exceptions.InvalidParameter(
                f'volume {self.name} does not have {length} bytes')
        return self._engine.read(length, offset)

    def readinto(self, buffer: Any, offset: int) -> None:
        """Fill a writable buffer from `offset`. Raises as :meth:`read`."""
        _require_range(0, offset)
        self._engine.readinto(buffer, offset)

    def write(self, data: Any, offset: int) -> None:
        """Write bytes. They are durable after the next :meth:`flush`.

        The caller may reuse the buffer when this returns. This waits while the
        journal is full, and makes a checkpoint then.

        :raises InvalidParameter: the range is not within the volume
        :raises NoSpaceError: only the reserve is free on the file system
        """
        _require_range(0, offset)
        self._engine.write(data, offset)

    def zero(self, length: int, offset: int) -> None:
        """Have a range read as zeros. Raises as :meth:`write`."""
        _require_range(length, offset)
        self._engine.zero(length, offset)

    def flush(self) -> None:
        """Make all earlier writes durable."""
        self._engine.flush()

    def extents(self, offset: int = 0,
                length: int | None = None) -> Iterator[VolumeExtent]:
        """The pieces of a range, in order, without gap.

        :param length: None: up to the volume's end
        :raises InvalidParameter: the range is not within the volume
        """
        if length is None:
            length = max(0, self.size - offset)
        _require_range(length, offset)
        end = offset + length
        while True:
            found = self._engine.extents(end - offset, offset)
            for fields in found:
                yield VolumeExtent(*fields)
                offset = fields[0] + fields[1]
            if offset >= end:
                return

    def checkpoint(self) -> None:
        """Bring all earlier writes into recipes (V6).

        After an error the journal still has it, and the next checkpoint goes
        on.
        """
        self._engine.checkpoint()

    def needs_checkpoint(self) -> bool:
        """Return whether a checkpoint is due, since the journal is large."""
        return self._engine.needs_checkpoint()

    def set_dedup(self, dedup: bool) -> None:
        """Set whether checkpoints look up blocks, to share stored ones.

        It is true at first. A checkpoint that has begun is not
        affected.
        """
        self._engine.set_dedup(dedup)

    def prefetch(self, length: int, offset: int) -> None:
        """Have the next checkpoint find copies of a range without look-ups.

        This loads the fingerprint stores of the groups that the range's blocks
        are in. The last eight groups are kept. It is a hint: a store that
        cannot be loaded now is left out.

        :raises InvalidParameter: the range is not within the volume
        """
        _require_range(length, offset)
        if offset + length > self.size:
            raise exceptions.InvalidParameter(
                f'volume {self.name}: the range ends behind its end')
        self._engine.prefetch(length, offset)

    def renew(self) -> None:
        """Close recipes that a merge has replaced.

        Until then their blocks stay. Call it every few minutes.
        """
        self._engine.renew()

    def snapshot(self, image_id: str,
                 project: str = '') -> openimages.ImageStat:
        """Store the volume's bytes of one moment as an image.

        The moment is during the call. Other threads may go on writing.

        :raises ImageExists: there is an image of this id
        :raises InvalidParameter: for an id that no image may have
        """
        image_repository.require_text('project', project)
        self._repository.require_image(image_id)
        return openimages.image_stat(self._engine.snapshot(image_id, project))

    def resize(self, size: int) -> None:
        """Change the size. New bytes are zeros, bytes behind it are lost.

        :raises InvalidParameter: for a size that no volume may have
        """
        repo_parameters.require_range('size', size, 0, _MAX_OFFSET)
        self._engine.resize(size)

    def close(self) -> None:
        """Close the volume when the calls under way are done. Idempotent.

        It makes no checkpoint and no flush.
        """
        self._engine.close()

    def __enter__(self) -> 'Volume':
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


def _require_range(length: int, offset: int) -> None:
    repo_parameters.require_range('length', length, 0, _MAX_OFFSET)
    repo_parameters.require_range('offset', offset, 0, _MAX_OFFSET)


# -- volumes by their names ---------------------------------------------------

def create(repository: image_repository.Repository, name: str,
           size: int | None = None, *, project: str = '',
           scope: str | bytes = 'global',
           image: openimages.Image | None = None,
           part_size: int | None = None) -> int:
    """Make a volume; it has no owner then.

    In the image's scope the volume shares its blocks, and no bytes move. In
    another scope the image is read and stored.

    :param name: 1 to 64 characters out of ``A-Z a-z 0-9 _ -``
    :param size: a multiple of 512; None: the image's size, rounded up
    :param project: the project that the volume belongs to
    :param scope: as for an image
    :param image: one that `repository` opened, and that the volume becomes a
        clone of; None: the volume begins with zeros
    :param part_size: a power of two; None: the usual 256 MiB
    :returns: the bytes that were read from the image and stored
    :raises ImageExists: there is a volume of this name
    :raises InvalidParameter: for a size that is not allowed, or is less than
        the image's
    """
    for what, value in (('name', name), ('project', project)):
        image_repository.require_text(what, value)
    if size is None and image is None:
        raise exceptions.InvalidParameter('a volume needs a size, or an image')
    if size is not None:
        repo_parameters.require_range('size', size, 1, _MAX_OFFSET)
    handle = repository.handle()
    repository.filter.complete(handle)
    with _errors(repository):
        return handle.create_volume(
            name, size or 0, project, scopes.choose(scope, project),
            None if image is None else image._engine, part_size or 0)


def open_volume(repository: image_repository.Repository,
                name: str) -> Volume:
    """Become a volume's owner, until it is closed.

    :raises ImageNotFound: there is no such volume
    :raises BusyError: it has an owner
    :raises DamagedError: acknowledged bytes are lost (V5)
    """
    image_repository.require_text('name', name)
    handle = repository.handle()
    # A checkpoint stores blocks.
    repository.filter.complete(handle)
    with _errors(repository):
        return Volume(name, handle.open_volume(name), repository)


def look(repository: image_repository.Repository, name: str) -> VolumeStat:
    """The facts of a volume, even if another process owns it.

    If it has an owner, they are as at the beginning of its last checkpoint.

    :raises ImageNotFound: there is no such volume
    :raises DamagedError: its newest journal is damaged
    """
    image_repository.require_text('name', name)
    with _errors(repository):
        return VolumeStat(**_facts(
            name, repository.handle().look_at_volume(name)))


def names(repository: image_repository.Repository) -> list[str]:
    """The names of all volumes, sorted, even of those being deleted."""
    with _errors(repository):
        found = volumes.names(repository.path)
        if not found:
            _require_directory(repository)
        return found


def roll_back(repository: image_repository.Repository, name: str,
              image: openimages.Image) -> int:
    """Give a volume the bytes and the size of an image.

    In the image's scope they share their blocks. If this is interrupted, the
    volume is as it was, or as the image is.

    :param image: one that `repository` opened
    :returns: the bytes that were read from the image and stored
    :raises ImageNotFound: there is no such volume
    :raises BusyError: it has an owner
    :raises InvalidParameter: no volume may have the image's size
    """
    image_repository.require_text('name', name)
    handle = repository.handle()
    repository.filter.complete(handle)
    with _errors(repository):
        return handle.roll_back_volume(name, image._engine)


def rename(repository: image_repository.Repository, name: str,
           new_name: str) -> None:
    """Give a volume another name.

    :raises ImageNotFound: there is no such volume
    :raises BusyError: it has an owner
    :raises ImageExists: there is a volume of the new name
    :raises InvalidParameter: the new name is not allowed
    """
    for what, value in (('name', name), ('new name', new_name)):
        image_repository.require_text(what, value)
    with _errors(repository):
        repository.handle().rename_volume(name, new_name)


def delete(repository: image_repository.Repository, name: str) -> None:
    """Delete a volume. A later collection frees its space.

    :raises ImageNotFound: there is no such volume
    :raises BusyError: it has an owner
    """
    image_repository.require_text('name', name)
    with _errors(repository):
        repository.handle().delete_volume(name)


def discard(repository: image_repository.Repository, name: str) -> list[str]:
    """Delete a volume, even if its newest journal is damaged.

    The recipes of such a volume have an id that one of its journals names,
    and that no other volume has. Nobody needs them, since it is gone.

    :returns: recipes that were left, since another volume cannot be read
        either, and may be theirs
    :raises ImageNotFound: there is no such volume
    :raises BusyError: it has an owner
    """
    image_repository.require_text('name', name)
    with _errors(repository):
        ids = _ids_in_journals(repository, name)
        repository.handle().discard_volume(name)
    left = []
    for recipe_id in repository.recipes():
        recipe = imageids.of_volume(recipe_id)
        if recipe is not None and recipe.volume_id in ids:
            try:
                repository.delete(recipe_id)
            except (exceptions.DamagedError, exceptions.VersionError):
                left.append(recipe_id)
            except (exceptions.ImageNotFound, exceptions.InvalidParameter):
                pass    # it was deleted with the volume; or is another's
    return left


def _ids_in_journals(repository: image_repository.Repository,
                     name: str) -> set[str]:
    """The volume ids in the journals' heads, which may be damaged."""
    path = os.path.join(repository.path, layout.VOLUMES, name)
    found = set()
    with files.os_errors(f'cannot read {path}'), contextlib.suppress(
            FileNotFoundError):
        for file in os.listdir(path):
            if file.startswith('journal-'):
                with contextlib.suppress(exceptions.DamagedError):
                    found.add(files.read_file(os.path.join(path, file), 48)
                              [32:].hex())
    return found


def is_in_use(repository: image_repository.Repository, name: str) -> bool:
    """Return whether some process, perhaps on another host, owns a volume.

    The lock is only tested, not taken. This process's own volumes count,
    too.

    :raises ImageNotFound: there is no such volume
    """
    path = os.path.join(repository.path, layout.VOLUMES, name, 'lock')
    with files.os_errors(f'cannot look at {path}'):
        return filesystem.is_locked(path)


@contextlib.contextmanager
def _errors(repository: image_repository.Repository) -> Iterator[None]:
    """Translate errors as :func:`layout.image_errors`, also for volumes."""
    try:
        with layout.image_errors(repository.path):
            yield
    except exceptions.ImageNotFound:
        _require_directory(repository)
        raise


def _require_directory(repository: image_repository.Repository) -> None:
    directory = os.path.join(repository.path, layout.VOLUMES)
    if not files.is_directory(directory):
        raise exceptions.StorageError(
            f"the directory {directory} is missing. Mount the repository's "
            'disk, or restore the directory from a backup')
