# SPDX-License-Identifier: Apache-2.0

"""The small files of a repository, made and replaced whole or not at all.

The engine reads and writes the files of images and block groups.
"""

from collections.abc import Iterator
import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat as stat_module
from typing import Any

import xxhash

from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions


@contextlib.contextmanager
def os_errors(what: str, missing: type[exceptions.RepositoryError]
              = exceptions.ImageNotFound) -> Iterator[None]:
    """Turn an OSError into the exception of its kind, as the engine does.

    :param what: the failed action; the message begins with it
    :param missing: the kind for a file or directory that does not exist
    """
    try:
        yield
    except OSError as e:
        if isinstance(e, PermissionError) or e.errno == errno.EROFS:
            kind: type = exceptions.AccessDenied
        elif e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            kind = exceptions.NoSpaceError
        elif isinstance(e, FileNotFoundError):
            kind = missing
        else:
            kind = exceptions.StorageError
        error = kind(f'{what}: {e.strerror or e}')
        error.errno = e.errno or 0
        raise error from e


def stat_of(path: str, follow: bool = False) -> os.stat_result | None:
    """Return the status of a path; None if nothing is there.

    :param follow: of the file to which a symbolic link points
    :raises AccessDenied, StorageError: it is not known whether
        something is there, for example because the disk fails
    """
    with os_errors(f'cannot look at {path}'):
        try:
            return os.stat(path, follow_symlinks=follow)
        except (FileNotFoundError, NotADirectoryError):
            return None


def exists(path: str) -> bool:
    """Return whether something has a name, if only a broken link.

    Unlike :func:`os.path.lexists` it does not take a failing disk for an
    empty one. Raises as :func:`stat_of`.
    """
    return stat_of(path) is not None


def is_directory(path: str) -> bool:
    """Return whether a path leads to a directory; raises as `stat_of`."""
    found = stat_of(path, follow=True)
    return found is not None and stat_module.S_ISDIR(found.st_mode)


def remove(path: str) -> None:
    """Remove a file, or a directory with its contents.

    :raises OSError: as its name says
    """
    if stat_module.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable.

    :raises OSError: as its name says
    """
    with closing.descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        os.fsync(fd)


def _fill(fd: int, content: bytes) -> None:
    """Give a new file its content, durably, and close it."""
    with os.fdopen(fd, 'wb') as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


#: The names that `temporary_of` makes; a killed process leaves such files.
TEMPORARY = re.compile(r'\.[0-9a-f]{16}\.new')


def temporary_of(path: str) -> str:
    """A new, unique path in a file's directory."""
    return os.path.join(os.path.dirname(path), f'.{secrets.token_hex(8)}.new')


def create_file(path: str, content: bytes, mode: int) -> None:
    """Create a file whole and durable, or not at all.

    :raises OSError: as its name says
    """
    temporary = temporary_of(path)
    fd = access.make_file(temporary, mode)
    try:
        _fill(fd, content)
        # A link, unlike a rename, never replaces another process's file.
        os.link(temporary, path)
    finally:
        os.unlink(temporary)


def replace_file(path: str, content: bytes, mode: int,
                 temporary: str | None = None) -> None:
    """Replace a file's content durably, or leave the file as it is.

    :param temporary: the new file's name meanwhile. None: ``path.new``; then
        only one process may do this at a time, and it replaces the file that
        a killed one left
    :raises OSError: as its name says
    """
    if temporary is None:
        temporary = f'{path}.new'
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    fd = access.make_file(temporary, mode)
    try:
        _fill(fd, content)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(os.path.dirname(path))


def read_file(path: str, limit: int) -> bytes:
    """The first `limit` bytes of an ordinary file; follows no link.

    :raises DamagedError: the path is not that of an ordinary file
    :raises OSError: as its name says
    """
    with closing.descriptor(
            access.open_file(path, os.O_RDONLY | os.O_NOFOLLOW)) as fd:
        if not stat_module.S_ISREG(os.fstat(fd).st_mode):
            raise exceptions.DamagedError(f'{path} is not an ordinary file')
        return os.read(fd, limit)


#: The version that small JSON files have beside their kind.
_JSON_VERSION = 1


def pack_json(kind: str, **fields: Any) -> bytes:
    """The content of a small JSON file, with its kind and a checksum."""
    fields = {'kind': kind, 'version': _JSON_VERSION, **fields}
    fields['checksum'] = json_checksum(fields)
    return json.dumps(fields).encode() + b'\n'


def unpack_json(content: bytes, kind: str, largest: int) -> dict[str, Any]:
    """The fields of a file that :func:`pack_json` made; trusts nothing.

    :raises ValueError: it has more than `largest` bytes, or is of another
        kind or version, or its checksum is wrong
    :raises KeyError, TypeError, AttributeError, RecursionError: it is no JSON
        object, or lacks one of these fields
    """
    if len(content) > largest:
        raise ValueError(f'it is larger than {largest} bytes')
    fields = json.loads(content)
    if fields['kind'] != kind:
        raise ValueError('it is of another kind')
    if fields['version'] != _JSON_VERSION:
        raise ValueError(f'it has version {fields["version"]!r}, and this '
                         f'program knows {_JSON_VERSION}')
    if fields.pop('checksum') != json_checksum(fields):
        raise ValueError('its checksum is wrong')
    return fields


def json_checksum(fields: dict[str, Any]) -> str:
    """The field ``checksum`` of a JSON file, from its other fields."""
    plain = json.dumps(fields, sort_keys=True, separators=(',', ':'))
    return xxhash.xxh3_64_hexdigest(plain.encode())
