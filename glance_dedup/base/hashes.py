# SPDX-License-Identifier: Apache-2.0

"""Hashes of whole images: by them Glance's image is compared with ours.

Glance records a hash of each image that is uploaded (``os_hash_algo``,
``os_hash_value``). An id alone proves nothing: an image of this id may be
here that Glance does not know, while Glance has another one in another store.
So whoever is let in by Glance's word reads an image only if Glance's hash is
that of the bytes here. This module knows where ours are:

* in the recipe, since the image was stored by somebody who computed it over
  all bytes (the driver, an import, a pull that was compared with Glance), or
  by a site that sent it;
* in ``hashes/<image id>``, written by ``glance-dedup image verify``, which
  reads the image. The file names the upload, whose id is never used again: so
  one that outlived its image says nothing of the next. What is damaged counts
  as absent, and what is absent lets nobody in.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from typing import Any

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files

DIRECTORY = 'hashes'
#: What is computed where nobody says what Glance has; its default.
DEFAULT = 'sha512'
#: Bytes of a file at most, and hashes in it.
LARGEST = 4096
MOST = 8
PIECE = 4 << 20

_KIND = 'glance-dedup hashes'
_VERSION = 1
_NAME = re.compile('[a-z0-9_-]{1,32}')
_VALUE = re.compile('(?:[0-9a-f]{2}){1,64}')
_TEMPORARY = re.compile(r'\.[0-9a-f]{16}\.new')
# So old a temporary file belongs to nobody who is at work.
_OLD = 86400


class Unproven(Exception):
    """A sentence: it is not known whether two images are the same."""


class Other(Exception):
    """A sentence: two images are not the same."""


@dataclasses.dataclass(frozen=True)
class Hash:
    """What Glance says, or we, of an image's bytes.

    :ivar name: as hashlib has it
    :ivar value: hexadecimal digits
    """

    name: str
    value: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or not _VALUE.fullmatch(self.value):
            raise ValueError(f'{self.name[:40]!r}, {self.value[:40]!r} is not '
                             'a hash')


def new(name: str) -> Any:
    """A hash object of hashlib.

    :raises ValueError: there is none of this name, or of no length of its own
    """
    found = hashlib.new(name, usedforsecurity=False)
    if not found.digest_size:
        raise ValueError(f'{name} has no length of its own')
    return found


def said(name: Any, value: Any) -> Hash | None:
    """A hash by somebody else's words; None if these are none."""
    if isinstance(name, str) and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return Hash(new(name).name, value.lower())
    return None


def of_record(record: dict[str, Any]) -> Hash | None:
    """What Glance's record of an image says; None if it says nothing."""
    if record.get('os_hash_value'):
        return said(record.get('os_hash_algo'), record['os_hash_value'])
    # Of the time before Glance had these.
    return said('md5', record.get('checksum'))


# -- ours ---------------------------------------------------------------------

def recorded(root: str, stat: Any) -> dict[str, str]:
    """The hashes of an image that are known here, by their names.

    :param root: the repository's directory
    :param stat: a :class:`~glance_dedup.repository.repository.ImageStat`
    """
    found: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, exceptions.DamagedError):
        upload_id, found = decode(files.read_file(
            _path(root, stat.image_id), LARGEST + 1))
        if upload_id != stat.upload_id:
            found = {}
    ours = said(stat.hash_name, stat.hash_value)
    if ours is not None:
        found[ours.name] = ours.value
    return found


def need_same(root: str, stat: Any, theirs: Hash | None) -> None:
    """See that an image here is the one that Glance means.

    :param theirs: what Glance says of it; None: nothing
    :raises Unproven, Other: as their names say
    """
    if theirs is None:
        raise Unproven(
            f'Glance has recorded no hash of image {stat.image_id}, so it '
            'cannot be compared with the image here.')
    ours = recorded(root, stat)
    if theirs.name not in ours:
        raise Unproven(
            f'No {theirs.name} of image {stat.image_id} is recorded here, so '
            'nothing proves that it is the image that Glance means. An '
            'operator can record it: glance-dedup image verify --algorithm '
            f'{theirs.name} {stat.image_id}')
    if ours[theirs.name] != theirs.value:
        raise Other(f'Glance means another image than the image '
                    f'{stat.image_id} that is here: their {theirs.name} '
                    'differs.')


def compute(image: Any, name: str,
            progress: Callable[[int], None] = lambda done: None) -> Hash:
    """Read a whole image, verified, and hash it."""
    hasher = new(name)
    done = 0
    for piece in image.pieces(piece=PIECE):
        hasher.update(piece)
        done += len(piece)
        progress(done)
    if done != image.size:
        raise exceptions.DamagedError(
            f'image {image.stat.image_id} ends at {done} of {image.size}')
    return Hash(hasher.name, hasher.hexdigest())


# -- the files ----------------------------------------------------------------

def _path(root: str, image_id: str) -> str:
    return os.path.join(root, DIRECTORY, image_id)


def encode(upload_id: str, hashes: dict[str, str]) -> bytes:
    """A file's content."""
    fields = {'kind': _KIND, 'version': _VERSION, 'upload_id': upload_id,
              'hashes': hashes}
    fields['checksum'] = files.json_checksum(fields)
    return json.dumps(fields).encode() + b'\n'


def decode(content: bytes) -> tuple[str, dict[str, str]]:
    """The upload, and its hashes by their names.

    :raises ValueError: says what is wrong with the file
    """
    if len(content) > LARGEST:
        raise ValueError(f'it is larger than {LARGEST} bytes')
    try:
        fields = json.loads(content)
        if (fields['kind'], fields['version']) != (_KIND, _VERSION):
            raise ValueError('it is of another kind or version')
        if fields.pop('checksum') != files.json_checksum(fields):
            raise ValueError('its checksum is wrong')
        found = [Hash(*item) for item in fields['hashes'].items()]
        if not isinstance(fields['upload_id'], str) or len(found) > MOST:
            raise TypeError('its upload, or its hashes, are none')
        return fields['upload_id'], {one.name: one.value for one in found}
    except (KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f'it holds no hashes: {e!r}') from e


def record(root: str, stat: Any, found: Hash) -> None:
    """Write down a hash that was computed over all bytes of an image.

    :raises DamagedError: another one is recorded
    :raises AccessDenied, NoSpaceError, StorageError: as their names say
    """
    known = recorded(root, stat)
    if known.setdefault(found.name, found.value) != found.value:
        raise exceptions.DamagedError(
            f'image {stat.image_id} has the {found.name} {found.value}, and '
            f'{known[found.name]} is recorded')
    while len(known) > MOST:
        known.pop(next(name for name in known if name != found.name))
    path = _path(root, stat.image_id)
    directory = os.path.dirname(path)
    with files.os_errors(f'cannot write {path}'):
        if not os.path.isdir(directory):
            access.make_directory(directory, access.directory_mode(root))
            files.sync_directory(root)
        files.replace_file(path, encode(stat.upload_id, known),
                           access.file_mode(root), files.temporary_of(path))


def forget(root: str, image_id: str) -> None:
    """An image is deleted. What cannot be removed does no harm."""
    with contextlib.suppress(OSError):
        os.unlink(_path(root, image_id))


def sweep(repository: Any) -> None:
    """Remove what kills and other programs' deletions left."""
    directory = os.path.join(repository.path, DIRECTORY)
    try:
        names = os.listdir(directory)
    except OSError:
        return
    # Listed later: what has just come is among them.
    here = set(repository.images())
    for name in names:
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            if name not in here and (
                    not _TEMPORARY.fullmatch(name)
                    or time.time() - os.lstat(path).st_mtime > _OLD):
                os.unlink(path)
