# SPDX-License-Identifier: Apache-2.0

"""Fetches what a snapshot names: the files of cold groups, and recipes.

A file that is fetched is verified, written under another name, synced and
renamed. So each that is there is whole. Safe for use by several threads.
"""

import os
import secrets
import struct

import xxhash

from glance_dedup.base import access
from glance_dedup.base import files
from glance_dedup.objects import store as store_module
from glance_dedup.repository import layout
from glance_dedup.repository import parameters as parameters_module
from glance_dedup.snapshots import manifest as manifest_module

# The header of a group's file (format.rst): magic, major and minor version,
# number, repository id, scope id and slots; behind these the object's id.
_HEADER = struct.Struct('<8sHHI16s16sI')
_MAGIC, _COLD = b'GDGROUP\0', 3
_OBJECT, _CHECKED = slice(88, 104), 504
#: Bytes of a header.
HEADER_BYTES = 512
_LEAST_SLOTS, _MOST_SLOTS = 64, 32768
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


class LostError(Exception):
    """The object store does not have an object, or another one."""


class Fetcher:
    """Fetches files into a directory that is being restored."""

    def __init__(self, store: store_module.ObjectStore, path: str,
                 parameters: parameters_module.Parameters) -> None:
        self._store = store
        self._path = path
        self._mode = access.file_mode(path)
        self._id = bytes.fromhex(parameters.repository_id)
        self._guess = layout.data_start(parameters.group_slots)

    def group(self, group: manifest_module.Group) -> int:
        """Fetch the file of a cold group, unless it is there.

        :returns: bytes that were fetched
        :raises LostError: says what is wrong
        :raises UnavailableError, NoSpaceError, StorageError: as their names
            say
        """
        path = os.path.join(self._path, 'groups', f'{group.number:08x}')
        if self._is_there(path, group):
            return 0
        error = None
        for _ in range(_TRIES):
            try:
                content = manifest_module.patiently(lambda: self._begin(group))
            except store_module.ObjectNotFound as e:
                raise LostError(str(e)) from e
            except ValueError as e:
                error = e
                continue
            self._write(path, content)
            return len(content)
        raise LostError(f'{self._store.location.url}: {group.key} {error}')

    def recipe(self, recipe: manifest_module.Recipe) -> int:
        """Fetch a recipe; otherwise as :meth:`group`. Nothing is verified."""
        path = os.path.join(self._path, 'images', recipe.image_id)
        try:
            return manifest_module.patiently(
                lambda: self._copy(recipe, path))
        except store_module.ObjectNotFound as e:
            raise LostError(str(e)) from e

    # -- groups --

    def _is_there(self, path: str, group: manifest_module.Group) -> bool:
        """Whether an earlier call fetched this file."""
        try:
            with open(path, 'rb') as file:
                header = file.read(HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
            return size == self._length(header, group)
        except (OSError, ValueError):
            return False

    def _begin(self, group: manifest_module.Group) -> bytes:
        """What is in front of the segments of an object.

        :raises ValueError: it is another group's
        """
        content = self._store.get(group.key, 0,
                                  min(self._guess, group.length))
        length = self._length(content[:HEADER_BYTES], group)
        if length > len(content):
            content += self._store.get(group.key, len(content),
                                       length - len(content))
        return content[:length]

    def _length(self, header: bytes, group: manifest_module.Group) -> int:
        """How long a group's file is, by its header; verifies it.

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
        if not _LEAST_SLOTS <= slots <= _MOST_SLOTS or (
                layout.data_start(slots) > group.length):
            raise ValueError('has impossible bounds')
        return layout.data_start(slots)

    # -- files --

    def _copy(self, recipe: manifest_module.Recipe, path: str) -> int:
        if self._store.size(recipe.key) != recipe.length:
            raise LostError(
                f'{self._store.location.url}: {recipe.key} has not the '
                f'{recipe.length} bytes that it had')
        temporary = self._temporary()
        with files.os_errors(f'cannot write {path}'):
            try:
                with open(access.make_file(temporary, self._mode), 'wb') as f:
                    for start in range(0, recipe.length, _PIECE):
                        f.write(self._store.get(
                            recipe.key, start,
                            min(_PIECE, recipe.length - start)))
                    f.flush()
                    os.fsync(f.fileno())
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
