# SPDX-License-Identifier: Apache-2.0

"""Tests whether a file system has the locks that a repository needs.

Opening a repository checks this, by a few system calls that leave nothing
behind. One host can see that the file system refuses locks, that locks keep
nobody out, or that the mount's options keep locks on this host. One host
cannot see whether a file system keeps locks on the host without saying so: for
that, two hosts try together (``glance_dedup/fstest``).
"""

import dataclasses
import errno
import fcntl
import mmap
import os
import secrets
import struct

from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions

_LOCK_FILE = 'locks/groups'
#: The probe locks bytes from here on in that file; see "Locks" in the
#: description of the format.
_FIRST_BYTE = 1 << 34
_TRIES = 8
#: The kernel's struct flock, for locks of open files.
_FLOCK = struct.Struct('@hhqqi4x')

#: Mount options that keep locks on this host, and how to mount instead.
_LOCAL = {
    'nfs': (('nolock', 'local_lock=all', 'local_lock=posix'),
            'with local_lock=none and without nolock'),
    'nfs4': (('nolock', 'local_lock=all', 'local_lock=posix'),
             'with local_lock=none and without nolock'),
    'cifs': (('nobrl', 'nolock'), 'without nobrl'),
    'smb3': (('nobrl', 'nolock'), 'without nobrl'),
    'lustre': (('localflock', 'noflock'), 'with flock'),
    'gfs2': (('localflocks', 'lockproto=lock_nolock'),
             'without localflocks, with lockproto=lock_dlm'),
}


@dataclasses.dataclass(frozen=True)
class Mount:
    """The kernel's description of a mounted file system."""

    kind: str
    place: str
    options: frozenset[str]


def mount_of(path: str) -> Mount | None:
    """Return the mount on which a path lies; None if the kernel names none."""
    device = os.stat(path).st_dev
    wanted = f'{os.major(device)}:{os.minor(device)}'
    try:
        with open('/proc/self/mountinfo', errors='surrogateescape') as f:
            lines = f.readlines()
    except OSError:
        return None
    found = None
    for line in lines:
        before, _, after = line.partition(' - ')
        fields, kind = before.split(), after.split()
        if fields[2] == wanted:
            place = fields[4].encode('utf-8', 'surrogateescape').decode(
                'unicode_escape', 'replace')
            # The last mount hides those before it.
            found = Mount(kind[0], place, frozenset(
                fields[5].split(',') + kind[-1].split(',')))
    return found


def lock(fd: int, kind: int, byte: int) -> bool:
    """Try to lock or unlock a byte of an open file; returns whether it could.

    :param kind: F_WRLCK, F_RDLCK or F_UNLCK of fcntl
    :raises OSError: the file system has no such locks
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK,
                    _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except OSError as e:
        if e.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_byte_locked(fd: int, byte: int) -> bool:
    """Return whether another open file, on any host, locks a byte.

    The lock is only tested, not taken.

    :raises OSError: the file system has no such locks
    """
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(
        fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK


def is_locked(path: str) -> bool:
    """Return whether some process, on any host, locks a file's byte 0.

    The lock is only tested, not taken. This process's own count, too.

    :raises OSError: as its name says
    """
    with closing.descriptor(
            access.open_file(path, os.O_RDONLY | os.O_NOFOLLOW)) as fd:
        return is_byte_locked(fd, 0)


def _where(path: str, mount: Mount | None) -> str:
    if mount is None:
        return f'the file system of {path}'
    return f'the file system of {path}, {mount.kind} on {mount.place},'


def _unfit(path: str, mount: Mount | None, what: str, remedy: str
           ) -> exceptions.UnfitFileSystem:
    return exceptions.UnfitFileSystem(
        f'{_where(path, mount)} {what}, and without locks that all processes '
        'and hosts see they would overwrite one another\'s blocks. The '
        f'repository was not opened. {remedy}')


def _require_shared(path: str) -> None:
    if os.major(os.stat(path).st_dev) != 0:
        return      # on a disk of this host
    mount = mount_of(path)
    if mount is None or mount.kind not in _LOCAL:
        return
    local, instead = _LOCAL[mount.kind]
    for option in local:
        if option in mount.options:
            raise _unfit(
                path, mount, f'is mounted with {option}: locks stay on this '
                'host', f'Mount it {instead}.')


def _try_locks(file: str) -> str | None:
    """Return a sentence on the problem with a file's locks, or None."""
    flags = os.O_RDWR | os.O_NOFOLLOW
    with (closing.descriptor(access.open_file(file, flags)) as one,
          closing.descriptor(access.open_file(file, flags)) as two):
        for _ in range(_TRIES):
            byte = _FIRST_BYTE + secrets.randbits(32)
            if not lock(one, fcntl.F_WRLCK, byte):
                continue    # another process tries the same byte
            if lock(two, fcntl.F_WRLCK, byte):
                return 'grants two open files the same lock'
            lock(one, fcntl.F_UNLCK, byte)
            return None
        return 'refuses locks that nobody holds'


def require_direct_reads(path: str) -> None:
    """Refuse a shared repository whose files cannot be read past the cache.

    Other hosts' writes are seen in no other way (N13.1).

    :raises UnfitFileSystem: names the file system and a remedy
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECT
    try:
        with (closing.descriptor(access.open_file(
                os.path.join(path, 'repository.json'), flags)) as fd,
              mmap.mmap(-1, mmap.PAGESIZE) as page):
            os.preadv(fd, [page], 0)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            return      # using the repository will report it
        raise exceptions.UnfitFileSystem(
            f'{_where(path, mount_of(path))} does not let files be read '
            f'beside the page cache (O_DIRECT: {e.strerror}), and hosts that '
            'share it would act on old bytes. The repository was not opened. '
            'Mount it with other options, or use another file system.'
        ) from e


def require_locks(path: str) -> None:
    """Refuse a repository on a file system whose locks do not work.

    :raises UnfitFileSystem: names the file system, the reason and a remedy
    """
    try:
        _require_shared(path)
        wrong = _try_locks(os.path.join(path, _LOCK_FILE))
    except OSError as e:
        if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EINVAL,
                           errno.EOPNOTSUPP):
            return      # opening the repository will report it
        wrong = f'refuses locks of open files (F_OFD_SETLK: {e.strerror})'
    if wrong:
        raise _unfit(path, mount_of(path), wrong, 'Mount it so that locks '
                     'work (for NFS: version 4, or with a lock service on '
                     'both sides), or use another file system.')
