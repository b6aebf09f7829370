# SPDX-License-Identifier: Apache-2.0

"""Removal of unused filters, and of unused stores in their place.

A filter is a file on the host's tmpfs, so it occupies memory until it is
removed. Every user of a filter holds a shared lock on it
(``engine/files/filter.c``). So if a filter can be locked exclusively, nobody
uses it. It is removed if its repository is gone, or if nobody has opened it
for :data:`UNUSED` seconds. A wrong guess costs little: a missing filter is
rebuilt from the groups.

A filter's header page names its repository, behind the engine's own fields:
the path, ended by a zero byte. The file's mtime is the time at which a
process last opened the filter.
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import shutil
import stat as stat_module
import time

from glance_dedup import _engine
from glance_dedup.base import closing
from glance_dedup.base import files
from glance_dedup.base import filesystem
from glance_dedup.base import hexids
from glance_dedup.repository import layout

#: A filter that no process opens for so many seconds is removed in any case.
UNUSED = 30 * 86400
#: A use is noted again after so many seconds.
NOTED = 86400

_NAME = re.compile(rf'({hexids.PATTERN})\.filter(\.new)?')
_STORES = re.compile(rf'{hexids.PATTERN}\.(lmdb|dtb|leveldb)')
# Each user of a store holds a shared lock on this byte of this file
# (engine/repo/kvindex.c). The file's mtime is the time at which a process
# last opened the store, or closed it.
_USERS = '.users'
_USED = 1
_PAGE = 4096
_PATH_AT = 1024
_MAX_JSON = 1 << 16


def _open(path: str) -> int:
    """Open a filter, or the file in its place; return the descriptor.

    Unlike `access.open_file` this does not wait for a lease on the file: a
    later call can read the filter's name as well.
    """
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
                   | os.O_CLOEXEC)


def _is_ours(status: os.stat_result) -> bool:
    return (stat_module.S_ISREG(status.st_mode) and status.st_nlink == 1
            and status.st_uid == os.geteuid())


def _repository_of(fd: int) -> bytes:
    """The repository's path in a filter; b'' if there is none."""
    return os.pread(fd, _PAGE - _PATH_AT, _PATH_AT).split(b'\0')[0]


def note_use(path: str, repository: str) -> bool:
    """Note in a filter its repository's path and the time of this use.

    :returns: whether this noted a use: the filter is new, or was not used
        lately
    :raises OSError: as its name says
    """
    wanted = os.fsencode(os.path.realpath(repository))
    if len(wanted) >= _PAGE - _PATH_AT:
        wanted = b''
    with closing.descriptor(_open(path)) as fd:
        status = os.fstat(fd)
        if not _is_ours(status) or status.st_size < _PAGE or (
                _repository_of(fd) == wanted
                and abs(time.time() - status.st_mtime) < NOTED):
            return False
        os.pwrite(fd, wanted.ljust(_PAGE - _PATH_AT, b'\0'), _PATH_AT)
        os.utime(fd)
        return True


def _is_gone(repository: bytes, repository_id: str) -> bool:
    """Return whether there is certainly no such repository at this path."""
    if not repository:
        return False
    try:
        fd = os.open(
            os.path.join(repository, os.fsencode(layout.PARAMETERS_FILE)),
            os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        return e.errno in (errno.ENOENT, errno.ENOTDIR)
    with closing.descriptor(fd):
        try:
            found = json.loads(os.read(fd, _MAX_JSON))['repository_id']
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return False
    return found != repository_id


def _remove_if_dead(path: str, repository_id: str, unfinished: bool) -> None:
    with closing.descriptor(_open(path)) as fd:
        if _take(fd, path, unfinished) and (
                unfinished
                or abs(time.time() - os.fstat(fd).st_mtime) > UNUSED
                or _is_gone(_repository_of(fd), repository_id)):
            os.unlink(path)


def _take(fd: int, path: str, unfinished: bool = False) -> bool:
    """Lock a filter of this user's; False if a process uses it."""
    # The engine, too, first locks a filter, then checks its name.
    if not _engine.take_unused_filter(fd, unfinished):
        return False
    status = os.fstat(fd)
    return _is_ours(status) and os.path.samestat(status, os.lstat(path))


def remove(path: str) -> bool:
    """Remove a filter, whenever it was used last.

    :returns: whether no process has it open, so that it is removed
    :raises OSError: as its name says; FileNotFoundError: there is none
    """
    with closing.descriptor(_open(path)) as fd:
        if not _take(fd, path):
            return False
        os.unlink(path)
        return True


def remove_stores(directory: str) -> bool:
    """Remove one repository's stores, whenever they were used last.

    :param directory: the directory of these stores
    :returns: whether no process has one open, so that all are removed
    :raises OSError: as its name says; FileNotFoundError: there are none
    """
    for name in os.listdir(directory):
        if name.endswith(_USERS) and not _remove_store(
                os.path.join(directory, name.removesuffix(_USERS)), 0):
            return False
    shutil.rmtree(directory)
    return True


def _remove_store(path: str, unused: float = UNUSED) -> bool:
    """Remove a store that no process has open, or opened lately."""
    with closing.descriptor(_open(path + _USERS)) as fd:
        status = os.fstat(fd)
        if (not _is_ours(status) or time.time() - status.st_mtime < unused
                or not filesystem.lock(fd, fcntl.F_WRLCK, _USED)
                or not os.path.samestat(status, os.lstat(path + _USERS))):
            return False
        for name in (path, f'{path}-lock', f'{path}-process'):
            with contextlib.suppress(FileNotFoundError):
                files.remove(name)
        os.unlink(path + _USERS)
        return True


def remove_unused_stores(directory: str) -> None:
    """Remove the unused stores in a directory.

    They are left behind where another index is chosen, and by volumes that
    were deleted.
    """
    for path in glob.glob(f'{glob.escape(directory)}/*/*{_USERS}'):
        if _STORES.fullmatch(path.split(os.sep)[-2]) is not None:
            with contextlib.suppress(OSError):
                _remove_store(path.removesuffix(_USERS))


def remove_dead(directory: str) -> None:
    """Remove the unneeded filters in a directory.

    This may take long: repositories may be on file systems that do not answer.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            found = _NAME.fullmatch(name)
            if found is not None:
                with contextlib.suppress(OSError):
                    _remove_if_dead(os.path.join(directory, name), found[1],
                                    found[2] is not None)
