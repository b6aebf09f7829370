# SPDX-License-Identifier: Apache-2.0

"""Checks users of a repository, and the modes and groups of its files.

A repository belongs to one user alone, or, if its directory lets its group
write, to that group. New files and directories get their mode from the
repository's directory, whatever the process's umask is, and their group from
the directories' setgid bit. The engine does the same for its files
(``engine/files/file.c``).

In either case the catalog's maintainer is the user to whom the directory
belongs: LevelDB makes files that only their owner may change.

The functions here follow no symbolic link except in the repository's own path.
"""

import contextlib
import grp
import os
import pwd
import stat
import time

from glance_dedup.base import closing
from glance_dedup.base import exceptions

PRIVATE = 0o700
SHARED = 0o2770

_LEASE_SECONDS = 60.0
_LEASE_PAUSE = 0.01


def is_shared(status: os.stat_result) -> bool:
    """Return whether the group shares a repository with this directory."""
    return bool(status.st_mode & stat.S_IWGRP)


def directory_mode(root: str) -> int:
    """The mode of all directories in the repository `root`."""
    return SHARED if is_shared(os.stat(root)) else PRIVATE


def file_mode(root: str) -> int:
    """The mode of all files in the repository `root`."""
    return directory_mode(root) & 0o660


def user_name(uid: int) -> str:
    """A user's name and uid, for messages."""
    try:
        return f'{pwd.getpwuid(uid).pw_name} (uid {uid})'
    except KeyError:
        return f'uid {uid}'


def _group_name(gid: int) -> str:
    try:
        return f'{grp.getgrgid(gid).gr_name} (gid {gid})'
    except KeyError:
        return f'gid {gid}'


def _sudo(uid: int) -> str:
    try:
        return f'sudo -u {pwd.getpwuid(uid).pw_name} ...'
    except KeyError:
        return f'sudo -u \\#{uid} ...'


def require_user(path: str) -> None:
    """Refuse a process whose files the repository's users could not open.

    :raises AccessDenied: names the repository's owner and a remedy
    :raises OSError: there is no such directory
    """
    status = os.stat(path)
    uid = os.geteuid()
    if status.st_uid == uid:
        return
    if not is_shared(status):
        raise exceptions.AccessDenied(
            f'the repository {path} belongs to {user_name(status.st_uid)}, '
            f'and this process runs as {user_name(uid)}: neither could open '
            f'what the other makes. Run it as the owner: '
            f'{_sudo(status.st_uid)}. If that is the wrong owner, because '
            f'of a chown, set the right one: chown -R USER:GROUP {path}')
    if uid and status.st_gid not in (os.getegid(), *os.getgroups()):
        raise exceptions.AccessDenied(
            f'the repository {path} belongs to {user_name(status.st_uid)} '
            f'and the group {_group_name(status.st_gid)}, and this process '
            f'runs as {user_name(uid)}, who is not in the group. Add the '
            f'user to it, or run it as the owner: {_sudo(status.st_uid)}')


def require_maintainer(path: str) -> None:
    """Refuse a maintainer whose catalog the owner could not change.

    :raises AccessDenied: names the permitted users
    """
    owner = os.stat(path).st_uid
    if owner != os.geteuid():
        raise exceptions.AccessDenied(
            f'only {user_name(owner)}, to whom the directory {path} belongs, '
            f'may be its maintainer, and this process runs as '
            f'{user_name(os.geteuid())}. Run it as the owner: '
            f'{_sudo(owner)}')


def settle(path: str, shared: bool) -> None:
    """Set the mode of a new repository's directory.

    :param shared: whether the directory's group shares the repository
    :raises AccessDenied: the directory is another user's, or this user is not
        in its group
    """
    with closing.descriptor(
            os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise exceptions.AccessDenied(
                f'the directory {path} belongs to '
                f'{user_name(status.st_uid)}, and this process runs as '
                f'{user_name(os.geteuid())}. Create the repository as the '
                f'owner: {_sudo(status.st_uid)}')
        mode = SHARED if shared else PRIVATE
        os.fchmod(fd, mode)
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            # The system drops the setgid bit without an error.
            raise exceptions.AccessDenied(
                f'{path} cannot be shared by the group '
                f'{_group_name(status.st_gid)}: {user_name(os.geteuid())} '
                'is not in it')


def make_directory(path: str, mode: int) -> None:
    """Make a directory, or set the mode of one that exists."""
    with contextlib.suppress(FileExistsError):
        # The parent passes on its setgid bit. systemd may forbid to set it.
        os.mkdir(path, mode & 0o777)
    with closing.descriptor(
            os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                    | os.O_CLOEXEC)) as fd:
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.fchmod(fd, mode)


def open_file(path: str, flags: int, dir_fd: int | None = None) -> int:
    """Open a file; returns the descriptor.

    If a FIFO is in the file's place, this does not wait for its other end: the
    caller checks the kind of the opened file. If another program has a lease
    on the file, as Samba takes them, the kernel recalls the lease, and this
    waits for it.

    :raises BlockingIOError: after a minute; by default Linux waits 45 seconds
        before it takes a lease away
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC
    deadline = time.monotonic() + _LEASE_SECONDS
    while True:
        try:
            return os.open(path, flags, dir_fd=dir_fd)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LEASE_PAUSE)


def make_file(path: str, mode: int) -> int:
    """Make a new file; returns a descriptor for writing to it.

    :raises FileExistsError: the file exists already
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                 | os.O_CLOEXEC, mode)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        os.unlink(path)
        raise
    return fd
