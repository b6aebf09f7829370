# SPDX-License-Identifier: Apache-2.0

"""The small files of a repository, made and replaced whole or not at all.

The engine reads and writes the files of images and block groups.
"""

from collections.abc import Iterator
import contextlib
import json
import os
import re
import secrets
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

    :param what: what failed; the message begins with it
    :param missing: the kind for a file or directory that does not exist
    """
    try:
        yield
    except OSError as e:
        if isinstance(e, PermissionError) or e.errno == 30:  # EROFS
            kind: type = exceptions.AccessDenied
        elif e.errno in (28, 122, 27):  # ENOSPC, EDQUOT, EFBIG
            kind = exceptions.NoSpaceError
        elif isinstance(e, FileNotFoundError):
            kind = missing
        else:
            kind = exceptions.StorageError
        error = kind(f'{what}: {e.strerror or e}')
        error.errno = e.errno or 0
        raise error from e


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


#: The names that `temporary_of` makes: what a killed process leaves.
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
        only one process may do this at a time, and it replaces what a killed
        one left
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


def json_checksum(fields: dict[str, Any]) -> str:
    """The field ``checksum`` of a JSON file, from its other fields."""
    plain = json.dumps(fields, sort_keys=True, separators=(',', ':'))
    return xxhash.xxh3_64_hexdigest(plain.encode())
