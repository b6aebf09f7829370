# SPDX-License-Identifier: Apache-2.0

"""Which volumes a repository has, for everything that is no volume itself.

A volume's owner changes its directory meanwhile: a journal that was listed may
be gone. So a volume that cannot be read is looked at again.
"""

from collections.abc import Iterable
import contextlib
import dataclasses
import os
import re
import struct
import time

import xxhash

from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import imageids
from glance_dedup.repository import layout

_NAME = re.compile('[A-Za-z0-9_-]{1,64}')
_JOURNAL = re.compile('journal-[0-9a-f]{8}')
_MAJOR = 1
_HEAD = 4096
# Magic and version; then, behind the number and the repository's id, the
# volume's id; its state.
_START = struct.Struct('<8sHH')
_ID = slice(32, 48)
_STATE = struct.Struct('<I')
_READY = 2
_LOOKS, _PAUSE = 3, 0.02


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
                          if _NAME.fullmatch(entry.name)
                          and entry.is_dir(follow_symlinks=False))
    except exceptions.ImageNotFound:
        return []


def look(path: str, name: str) -> Volume:
    """Read which volume has a name now.

    :raises ImageNotFound: there is no such volume
    :raises DamagedError: its newest journal has no valid head
    :raises VersionError: the volume is of a newer version
    """
    directory = os.path.join(path, layout.VOLUMES, name)
    for left in reversed(range(_LOOKS)):
        try:
            return _look(directory, name)
        except (exceptions.ImageNotFound, exceptions.DamagedError):
            if not os.path.isdir(directory):
                raise exceptions.ImageNotFound(
                    f'there is no volume {name}') from None
            if not left:
                raise
            time.sleep(_PAUSE)
    raise AssertionError('unreachable')


def _look(directory: str, name: str) -> Volume:
    with files.os_errors(f'cannot list {directory}'):
        journals = sorted(filter(_JOURNAL.fullmatch, os.listdir(directory)))
    if not journals:
        return Volume(name, None, False)
    file = os.path.join(directory, journals[-1])
    with files.os_errors(f'cannot read {file}'), open(file, 'rb') as f:
        head = f.read(_HEAD)
    if len(head) == _HEAD and head.startswith(b'GDVOLJ\0\0'):
        _, major, minor = _START.unpack_from(head)
        if major > _MAJOR:
            raise exceptions.VersionError(
                f'{file} has version {major}.{minor}; this program reads '
                f'{_MAJOR}.x')
        if xxhash.xxh3_64_intdigest(head[:-8]) == int.from_bytes(
                head[-8:], 'little'):
            return Volume(name, head[_ID].hex(),
                          _STATE.unpack_from(head, 96)[0] == _READY)
    raise exceptions.DamagedError(
        f'{file} has no valid head, so volume {name} cannot be used. Restore '
        'the directory from a backup')


def name_of(path: str, volume_id: str) -> str | None:
    """The name of the volume with an id; None: no volume has the id.

    :raises DamagedError, VersionError: no volume is known to have the id, and
        one cannot be read, which may be the one
    """
    unread = None
    for name in names(path):
        try:
            if look(path, name).volume_id == volume_id:
                return name
        except exceptions.ImageNotFound:
            continue
        except (exceptions.DamagedError, exceptions.VersionError) as e:
            unread = unread or e
    if unread is not None:
        raise unread
    return None


def apart(path: str, image_ids: Iterable[str]) -> tuple[list[str], list[str]]:
    """The images among the ids, and the volumes that have the others.

    :returns: both sorted; a volume by its name, or its id if no name is known
    """
    images, of_volumes = [], {}
    for image_id in image_ids:
        recipe = imageids.of_volume(image_id)
        if recipe is None:
            images.append(image_id)
        elif recipe.volume_id not in of_volumes:
            of_volumes[recipe.volume_id] = _known_name(path, recipe.volume_id)
    return sorted(images), sorted(of_volumes.values())


def described(path: str | None, image_id: str) -> str:
    """A recipe's id; behind that of a volume's, what of which volume it is.

    :param path: the repository; None: the volume's name is not known
    """
    what = words(path, image_id)
    return image_id if what is None else f'{image_id} ({what})'


def words(path: str | None, image_id: str) -> str | None:
    """What of a volume a recipe is, in words; None: it is an image's.

    :param path: the repository; None: the volume's name is not known
    """
    recipe = imageids.of_volume(image_id)
    if recipe is None:
        return None
    return (('the base' if recipe.part is None else f'part {recipe.part}')
            + f' of volume {_known_name(path, recipe.volume_id)}')


def _known_name(path: str | None, volume_id: str) -> str:
    """The name of a volume, or its id if no name is known."""
    if path is not None:
        # A volume that cannot be read may be the one.
        with contextlib.suppress(exceptions.RepositoryError):
            return name_of(path, volume_id) or volume_id
    return volume_id
