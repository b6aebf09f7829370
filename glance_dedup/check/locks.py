# SPDX-License-Identifier: Apache-2.0

"""The files in ``locks/``, and the locks that processes hold now."""

import fcntl
import os
import struct

from glance_dedup.check import files
from glance_dedup.check import ondisk
from glance_dedup.check import repo_directories


def check(directories: repo_directories.Directories) -> None:
    """Report unknown files in the directory of locks."""
    find = directories.findings.find
    for name in directories.names('locks'):
        file = 'locks/' + name
        if name == 'trial':
            continue    # hosts try the directory together just now
        if name not in ('groups', 'images', 'maintainer', 'hosts', 'index'):
            find(ondisk.NOTE, file, None, 'has an unknown name')
            continue
        status = directories.status_of('locks', name)
        if status is not None:
            directories.check_mode(status, file, 0o600)
            if status.st_size:
                find(ondisk.NOTE, file, None,
                     'has content; it should only carry locks')


def is_locked(fd: int, byte: int) -> bool:
    """Return whether a process holds a lock of any kind on a byte of a file.

    :raises Forgotten: another host unlinked the file
    :raises OSError: if the system cannot find out
    """
    flock = struct.Struct('@hhqqi4x')
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, flock.pack(
            fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as e:
        if files.is_forgotten(e):
            raise files.Forgotten() from e
        raise
    return flock.unpack(answer)[0] != fcntl.F_UNLCK


def is_maintained(directories: repo_directories.Directories) -> bool:
    """Return whether a process is the maintainer now."""
    try:
        with files.File(directories['locks'], 'maintainer',
                        'locks/maintainer') as f:
            return is_locked(f.fd, 0)
    except OSError:
        return True     # perhaps: concurrent change is no damage
    except (KeyError, files.Gone, ondisk.Damage):
        return False
