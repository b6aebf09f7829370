# SPDX-License-Identifier: Apache-2.0

"""The file ``key``: the secrets with which a repository signs.

A repository signs the locations of its images, and the manifests of its
metadata in an object store. While its key is being changed it has two: it
signs with the current one, and accepts signatures by either.

The file is replaced in one step, so a reader finds one key or both (I13).
Nothing is remembered: each use reads the file, so all processes, on all hosts,
follow a change at once.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
from typing import NamedTuple

import xxhash

from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import filesystem

#: The name of the file in a repository's directory.
FILE = 'key'
_BYTES = 32
_DIGITS = re.compile(rb'[0-9a-f]{64}( [0-9a-f]{64})?')
_CHECKSUM_LENGTH = 18       # a space, 16 digits, a newline
_MAX_LENGTH = 1024
#: The key that authenticates manifests is derived under this name.
_MANIFESTS = b'glance-dedup manifest 2'


class Keys(NamedTuple):
    """The keys of a repository, each of 32 bytes."""

    current: bytes
    """It signs."""
    previous: bytes | None = None
    """Key whose signatures are accepted, too; None: no change is under way."""

    @property
    def accepted(self) -> tuple[bytes, ...]:
        """All of them, the current one first."""
        return ((self.current,) if self.previous is None
                else (self.current, self.previous))

    def pack(self) -> bytes:
        """Return the content of the file."""
        digits = b' '.join(key.hex().encode() for key in self.accepted)
        return digits + b' %b\n' % xxhash.xxh3_64_hexdigest(digits).encode()


def make() -> Keys:
    """Make a new, random key."""
    return Keys(secrets.token_bytes(_BYTES))


def manifest_key(key: bytes) -> bytes:
    """Derive the key that authenticates manifests (HKDF-Expand, RFC 5869)."""
    return hmac.new(key, _MANIFESTS + b'\x01', hashlib.sha256).digest()


def read(file: str) -> Keys:
    """Read the keys from a repository's file, or from a copy of it.

    :param file: its path
    :raises DamagedError: the file does not hold keys and their checksum
    :raises AccessDenied, StorageError: it is missing, or cannot be read
    """
    with _errors('read', file):
        content = files.read_file(file, _MAX_LENGTH)
    digits = content[:-_CHECKSUM_LENGTH]
    if _DIGITS.fullmatch(digits):
        keys = Keys(*(bytes.fromhex(one.decode()) for one in digits.split()))
        if keys.pack() == content:
            return keys
    raise exceptions.DamagedError(
        f'{file} is damaged: it does not hold a key and its checksum. '
        'Restore this one file from a backup')


@contextlib.contextmanager
def _errors(what: str, file: str) -> Iterator[None]:
    """Turn an OSError into the repository's; a missing key is no image."""
    try:
        with files.os_errors(f'cannot {what} {file}'):
            yield
    except exceptions.ImageNotFound as e:
        raise exceptions.StorageError(
            f'there is no file {file}: restore this one file from a backup'
        ) from e


def begin_change(path: str) -> Keys:
    """Give a repository a new key; its old one stays valid.

    :param path: the repository's directory
    :raises InvalidParameter: a change is under way
    :raises BusyError: another process changes the key at this moment
    :raises DamagedError, AccessDenied, NoSpaceError, StorageError: as their
        names say
    """
    with locked(path) as keys:
        if keys.previous is not None:
            raise exceptions.InvalidParameter(
                f'{path} has two keys already, since a change of its key was '
                "not finished: finish it, with 'glance-dedup repository rekey "
                "--finish', then begin the next one")
        return _write(path, Keys(make().current, keys.current))


def finish_change(path: str) -> Keys:
    """Make the signatures by the old key of a repository invalid.

    :raises InvalidParameter: no change is under way
    :raises BusyError, DamagedError, AccessDenied, NoSpaceError, StorageError:
        as :func:`begin_change`
    """
    with locked(path) as keys:
        if keys.previous is None:
            raise exceptions.InvalidParameter(
                f'{path} has one key: no change of it is under way. Begin one '
                "with 'glance-dedup repository rekey'")
        return _write(path, Keys(keys.current))


@contextlib.contextmanager
def locked(path: str) -> Iterator[Keys]:
    """Keep other processes from changing a repository's keys; yields them.

    :raises BusyError: another process has locked them
    :raises DamagedError, AccessDenied, StorageError: as their names say
    """
    file = os.path.join(path, FILE)
    with _errors('open', file):
        # An exclusive lock needs a file that is open for writing.
        fd = access.open_file(file, os.O_RDWR | os.O_NOFOLLOW)
    with closing.descriptor(fd):
        with files.os_errors(f'cannot lock {file}', exceptions.StorageError):
            is_current = filesystem.lock(fd, fcntl.F_WRLCK, 0) and (
                os.path.samestat(os.fstat(fd), os.stat(file)))
        if not is_current:
            raise exceptions.BusyError(
                f'another process uses or changes {file}: try again')
        yield read(file)


def _write(path: str, keys: Keys) -> Keys:
    file = os.path.join(path, FILE)
    with files.os_errors(f'cannot write {file}', exceptions.StorageError):
        files.replace_file(file, keys.pack(), access.file_mode(path),
                           files.temporary_of(file))
    return keys
