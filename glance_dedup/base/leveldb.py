# SPDX-License-Identifier: Apache-2.0

"""The meaning of LevelDB's errors, for all modules that use it."""

import mmap
import os

import plyvel

from glance_dedup.base import exceptions

# LevelDB reports the system's error only in words.
_REFUSALS = (
    (exceptions.NoSpaceError, (28, 122, 27)),      # ENOSPC, EDQUOT, EFBIG
    (exceptions.AccessDenied, (13, 1, 30)),        # EACCES, EPERM, EROFS
    (exceptions.BusyError, (11,)),                 # EAGAIN: its LOCK is held
    (exceptions.StorageError, (24, 23, 12)),       # EMFILE, ENFILE, ENOMEM
)


def require_maps(directory: str, fd: int) -> None:
    """Refuse a file system on which LevelDB could not read its tables.

    LevelDB maps them as memory, and reports the system's errors as damage.

    :param directory: of the database
    :param fd: of a file in it
    :raises StorageError: names the directory and a remedy
    """
    try:
        mmap.mmap(fd, 1, mmap.MAP_SHARED, mmap.PROT_READ).close()
    except ValueError:
        pass        # the file is empty: LevelDB reports the damage
    except OSError as e:
        raise exceptions.StorageError(
            f'{directory} is on a file system that does not let files be '
            f'mapped as memory ({e.strerror}), which LevelDB needs: mount it '
            'with other options (GlusterFS: without direct-io-mode=enable)'
        ) from e


def words(error: plyvel.Error) -> str:
    """LevelDB's message: plyvel passes its bytes on as they are."""
    said = error.args[0] if error.args else ''
    if isinstance(said, bytes):
        said = said.decode(errors='replace')
    return str(said)


def shown(key: bytes) -> str:
    """A key in printable form, for a message."""
    return "'" + ''.join(
        chr(byte) if 0x20 <= byte < 0x7f and byte != 0x5c
        else f'\\x{byte:02x}' for byte in key) + "'"


def refusal(error: plyvel.Error) -> type[exceptions.RepositoryError] | None:
    """The exception for a system error; None: the database is bad."""
    if not isinstance(error, plyvel.IOError):
        return None
    found = None
    for kind, numbers in _REFUSALS:
        if any(os.strerror(n) in words(error) for n in numbers):
            found = kind
    if 'already held by process' in words(error):
        found = exceptions.BusyError
    return found
