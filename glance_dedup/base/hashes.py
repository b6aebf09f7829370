# SPDX-License-Identifier: Apache-2.0

"""Hashes of whole images, by which Glance's image is compared with ours.

Glance records a hash of each uploaded image (``os_hash_algo``,
``os_hash_value``). An id alone proves nothing: Glance may have an image with
this id in another store, and not know the one here. So a client with access
only by Glance's word reads an image only if Glance's hash is that of the bytes
here. This module finds our hashes in two places:

* The recipe has a hash if the program that stored the image computed it over
  all bytes: the driver, an import, a pull that was compared with Glance, or
  the daemon that received the image from another site. A hash from another
  source is compared, and never recorded.
* ``glance-dedup image verify`` reads an image and writes the file
  ``hashes/<image id>``. The file names the upload, whose id is never used
  again: so a file that outlives its image does not apply to the next one. A
  damaged file counts as absent, and without a hash no user gets access.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import hashlib
import os
import re
import time
from typing import Any

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files

DIRECTORY = 'hashes'
#: The hash to compute if it is not known which one Glance has; its default.
DEFAULT = 'sha512'
#: The most bytes of a file, and the most hashes in it.
MAX_SIZE = 4096
MAX_COUNT = 8
PIECE = 4 << 20

_KIND = 'glance-dedup hashes'
_NAME = re.compile('[a-z0-9_-]{1,32}')
_VALUE = re.compile('(?:[0-9a-f]{2}){1,64}')
# A temporary file of this age, in seconds, is a dead process's.
_OLD = 86400


class Unproven(Exception):
    """It is not known whether two images are the same, for this reason."""


class Other(Exception):
    """Two images are not the same; the message is a sentence."""


@dataclasses.dataclass(frozen=True)
class Hash:
    """A hash of an image's bytes, from Glance or from us.

    :ivar name: the hash's name in hashlib
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

    :raises ValueError: hashlib has none of this name, or the hash has no fixed
        length
    """
    found = hashlib.new(name, usedforsecurity=False)
    if not found.digest_size:
        raise ValueError(f'{name} has no fixed length')
    return found


def said(name: Any, value: Any) -> Hash | None:
    """A hash from untrusted values; None if these are not a hash."""
    if isinstance(name, str) and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return Hash(new(name).name, value.lower())
    return None


def of_record(record: dict[str, Any]) -> Hash | None:
    """The hash in Glance's record of an image; None: it has none."""
    if record.get('os_hash_value'):
        return said(record.get('os_hash_algo'), record['os_hash_value'])
    # A record from before Glance had these fields.
    return said('md5', record.get('checksum'))


# -- ours ---------------------------------------------------------------------

def recorded(root: str, stat: Any) -> dict[str, str]:
    """The hashes of an image that are known here, by their names.

    :param root: the repository's directory
    :param stat: a :class:`~glance_dedup.repository.openimages.ImageStat`
    """
    found: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, exceptions.DamagedError):
        upload_id, found = decode(files.read_file(
            _path(root, stat.image_id), MAX_SIZE + 1))
        if upload_id != stat.upload_id:
            found = {}
    ours = said(stat.hash_name, stat.hash_value)
    if ours is not None:
        found[ours.name] = ours.value
    return found


def pack_header(known: dict[str, str]) -> str:
    """Encode known hashes, by their names, for a header of HTTP."""
    return ', '.join(f'{name}:{value}' for name, value in known.items())


def unpack_header(text: str) -> dict[str, str]:
    """Decode `pack_header`; leave out the fields that are no hash."""
    found = [said(*item.strip().partition(':')[::2])
             for item in text.split(',', MAX_COUNT + 1)[:MAX_COUNT + 1]]
    return {one.name: one.value for one in found if one is not None}


def require_same(root: str, stat: Any, theirs: Hash | None) -> None:
    """Check that an image here is the one that Glance means.

    :param theirs: the hash that Glance has; None: none
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
            progress: Callable[[int], None] = lambda done: None,
            require: Callable[[int, bytes], None] = lambda offset, data: None,
            size: int = PIECE) -> Hash:
    """Read and verify a whole image, and hash it.

    :param progress: called with the bytes read so far
    :param require: called with the offset and the bytes of each piece before
        they are hashed; an exception from it ends the reading
    :param size: bytes of a piece
    :raises DamagedError: the image cannot be read
    """
    hasher = new(name)
    done = 0
    for piece in image.pieces(piece=size):
        require(done, piece)
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
    """The content of an image's file of hashes."""
    return files.pack_json(_KIND, upload_id=upload_id, hashes=hashes)


def decode(content: bytes) -> tuple[str, dict[str, str]]:
    """The upload's id, and its hashes by their names, in a file's content.

    :raises ValueError: names the file's problem
    """
    try:
        fields = files.unpack_json(content, _KIND, MAX_SIZE)
        found = [Hash(*item) for item in fields['hashes'].items()]
        if not isinstance(fields['upload_id'], str) or len(found) > MAX_COUNT:
            raise TypeError('it has no upload or no hashes')
        return fields['upload_id'], {one.name: one.value for one in found}
    except (KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f'it holds no hashes: {e!r}') from e


def record(root: str, stat: Any, found: Hash) -> None:
    """Record a hash that was computed over all bytes of an image.

    :raises DamagedError: another hash of the same name is recorded
    :raises AccessDenied, NoSpaceError, StorageError: as their names say
    """
    known = recorded(root, stat)
    if known.setdefault(found.name, found.value) != found.value:
        raise exceptions.DamagedError(
            f'image {stat.image_id} has the {found.name} {found.value}, and '
            f'{known[found.name]} is recorded')
    while len(known) > MAX_COUNT:
        known.pop(next(name for name in known if name != found.name))
    path = _path(root, stat.image_id)
    directory = os.path.dirname(path)
    with files.os_errors(f'cannot write {path}'):
        if not files.is_directory(directory):
            access.make_directory(directory, access.directory_mode(root))
            files.sync_directory(root)
        files.replace_file(path, encode(stat.upload_id, known),
                           access.file_mode(root), files.temporary_of(path))


def forget(root: str, image_id: str) -> None:
    """Remove a deleted image's file. A file that stays does no harm."""
    with contextlib.suppress(OSError):
        os.unlink(_path(root, image_id))


def sweep(repository: Any) -> None:
    """Remove files that killed processes or others' deletions left."""
    directory = os.path.join(repository.path, DIRECTORY)
    try:
        names = os.listdir(directory)
    except OSError:
        return
    # Listed after the files, so that it has images that have just come.
    here = set(repository.images())
    for name in names:
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            if name not in here and (
                    not files.TEMPORARY.fullmatch(name)
                    or time.time() - os.lstat(path).st_mtime > _OLD):
                os.unlink(path)
