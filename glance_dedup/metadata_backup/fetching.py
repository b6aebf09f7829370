# SPDX-License-Identifier: Apache-2.0

"""Fetches the files that a metadata backup names: of cold groups, and recipes.

A file that is fetched is compared with the digest in the manifest, written
under another name, synced and renamed. So each that is there is whole. Safe
for use by several threads.
"""

import hashlib
import os
import secrets
import struct

import xxhash

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.metadata_backup import backup_manifest
from glance_dedup.objects import object_store
from glance_dedup.repository import layout
from glance_dedup.repository import repo_parameters

# The header of a group's file (format.rst): magic, major and minor version,
# number, repository id, scope id and slots; behind these the object's id.
_HEADER = struct.Struct('<8sHHI16s16sI')
_MAGIC, _COLD = b'GDGROUP\0', 3
_OBJECT, _CHECKED = slice(88, 104), 504
# Entries lie nine to a sector, behind the header's page. An entry's place is a
# number of 64 bits at its byte 44, whose highest three bits are the state.
_PAGE, _SECTOR, _ENTRY_BYTES = 4096, 512, 56
_STATE_BYTE, _STATE_SHIFT, _LIVE = 51, 5, 1
#: Bytes of a header.
HEADER_BYTES = 512
_MIN_SLOTS, _MAX_SLOTS = 64, 32768
_PIECE = 8 << 20
#: How often an object is fetched that does not verify.
_TRIES = 3


def object_named(header: bytes) -> str | None:
    """The id of the object that a group's header names; None: it names none.

    Nothing is verified. A newer version counts as cold.
    """
    if len(header) < HEADER_BYTES or not header.startswith(_MAGIC) or (
            _HEADER.unpack_from(header)[1] < _COLD):
        return None
    return header[_OBJECT].hex()


def _is_same(here: bytes, there: bytes) -> bool:
    """Return whether two beginnings of a group's file have the same blocks.

    Records may differ, and entries that do not live in the first one.
    """
    if len(here) != len(there) or (
            here[:HEADER_BYTES] != there[:HEADER_BYTES]):
        return False
    for sector in range(_PAGE, len(here), _SECTOR):
        for start in range(sector, sector + _SECTOR - _ENTRY_BYTES,
                           _ENTRY_BYTES):
            entry = here[start:start + _ENTRY_BYTES]
            if entry[_STATE_BYTE] >> _STATE_SHIFT == _LIVE and (
                    entry != there[start:start + _ENTRY_BYTES]):
                return False
    return True


class LostError(Exception):
    """The object store does not have an object, or another one."""


class Fetcher:
    """Fetches files into a directory that is being restored."""

    def __init__(self, store: object_store.ObjectStore, path: str,
                 parameters: repo_parameters.Parameters) -> None:
        self._store = store
        self._path = path
        self._mode = access.file_mode(path)
        self._id = bytes.fromhex(parameters.repository_id)
        self._guess = layout.data_start(parameters.group_slots)

    def group(self, group: backup_manifest.Group) -> int:
        """Fetch the file of a cold group, unless it is there.

        :returns: bytes that were fetched
        :raises LostError: with the problem in words
        :raises UnavailableError, NoSpaceError, StorageError: as their names
            say
        """
        path = os.path.join(self._path, 'groups', f'{group.number:08x}')
        if self._is_there(path, group):
            return 0
        error = None
        for _ in range(_TRIES):
            try:
                content = backup_manifest.patiently(lambda: self._whole(group))
            except object_store.ObjectNotFound as e:
                raise LostError(str(e)) from e
            except ValueError as e:
                error = e
                continue
            self._write(path, content)
            return len(content)
        raise LostError(f'{self._store.location.url}: {group.key} {error}')

    def recipe(self, recipe: backup_manifest.Recipe) -> int:
        """Fetch a recipe; otherwise as :meth:`group`."""
        path = os.path.join(self._path, 'images', recipe.image_id)
        try:
            return backup_manifest.patiently(
                lambda: self._copy(recipe, path))
        except object_store.ObjectNotFound as e:
            raise LostError(str(e)) from e

    def digest(self, group: backup_manifest.Group) -> str:
        """Return the digest of a new object of a group that is here.

        The object store may have another object by now than it was sent. So
        the object's header and live entries are compared with the file's.

        :param group: its digest is not read
        :raises DamagedError: the object is another one
        :raises ObjectNotFound: it is not there, after repeated requests
        :raises UnavailableError, StorageError: as their names say
        """
        path = os.path.join(self._path, 'groups', f'{group.number:08x}')
        try:
            content = backup_manifest.patiently(lambda: self._begin(group))
        except ValueError as e:
            raise self._wrong(group, str(e)) from e
        with files.os_errors(f'cannot read {path}'), open(path, 'rb') as file:
            here = file.read(len(content))
        if not _is_same(here, content):
            raise self._wrong(group, 'is not the one that was sent')
        return hashlib.sha256(content).hexdigest()

    # -- groups --

    def _wrong(self, group: backup_manifest.Group, what: str
               ) -> exceptions.DamagedError:
        return exceptions.DamagedError(
            f'{self._store.location.url}: {group.key} {what}')

    def _is_there(self, path: str, group: backup_manifest.Group) -> bool:
        """Return whether an earlier call fetched this file."""
        try:
            with open(path, 'rb') as file:
                return hashlib.file_digest(file, 'sha256').hexdigest() == (
                    group.digest)
        except FileNotFoundError:
            return False

    def _whole(self, group: backup_manifest.Group) -> bytes:
        """Return the verified bytes in front of the segments of an object.

        :raises ValueError: it is not the one in the manifest
        """
        if self._store.size(group.key) != group.length:
            raise ValueError(f'has not the {group.length} bytes that it had')
        content = self._begin(group)
        if hashlib.sha256(content).hexdigest() != group.digest:
            raise ValueError('is not the one that the metadata backup names: '
                             'it is damaged, or somebody changed it')
        return content

    def _begin(self, group: backup_manifest.Group) -> bytes:
        """Return the bytes in front of the segments of an object.

        :raises ValueError: it is another group's
        """
        content = self._store.get(group.key, 0,
                                  min(self._guess, group.length))
        length = self._length(content[:HEADER_BYTES], group)
        if length > len(content):
            content += self._store.get(group.key, len(content),
                                       length - len(content))
        return content[:length]

    def _length(self, header: bytes, group: backup_manifest.Group) -> int:
        """Return how long a group's file is, by its header; verifies it.

        :raises ValueError: it is no header, or another group's
        """
        if len(header) < HEADER_BYTES:
            raise ValueError('has no header')
        if int.from_bytes(header[_CHECKED:], 'little') != (
                xxhash.xxh3_64_intdigest(header[:_CHECKED])):
            raise ValueError('has a damaged header')
        magic, major, _, number, repository, _, slots = _HEADER.unpack_from(
            header)
        if (magic, major, number, repository, header[_OBJECT]) != (
                _MAGIC, _COLD, group.number, self._id,
                bytes.fromhex(group.object_id)):
            raise ValueError('is that of another group')
        if not _MIN_SLOTS <= slots <= _MAX_SLOTS or (
                layout.data_start(slots) > group.length):
            raise ValueError('has impossible bounds')
        return layout.data_start(slots)

    # -- files --

    def _copy(self, recipe: backup_manifest.Recipe, path: str) -> int:
        if self._store.size(recipe.key) != recipe.length:
            raise LostError(
                f'{self._store.location.url}: {recipe.key} has not the '
                f'{recipe.length} bytes that it had')
        temporary = self._temporary()
        found = hashlib.sha256()
        with files.os_errors(f'cannot write {path}'):
            try:
                with open(access.make_file(temporary, self._mode), 'wb') as f:
                    for start in range(0, recipe.length, _PIECE):
                        piece = self._store.get(
                            recipe.key, start,
                            min(_PIECE, recipe.length - start))
                        found.update(piece)
                        f.write(piece)
                    f.flush()
                    os.fsync(f.fileno())
                if found.hexdigest() != recipe.digest:
                    raise LostError(
                        f'{self._store.location.url}: {recipe.key} is not '
                        'the one that the metadata backup names: it is '
                        'damaged, or somebody changed it')
                os.rename(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        return recipe.length

    def _write(self, path: str, content: bytes) -> None:
        with files.os_errors(f'cannot write {path}'):
            files.replace_file(path, content, self._mode, self._temporary())

    def _temporary(self) -> str:
        """A path that the next restoring removes."""
        return os.path.join(self._path, 'spool', secrets.token_hex(16))
