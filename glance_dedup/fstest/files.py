# SPDX-License-Identifier: Apache-2.0

"""The files that properties are tried on, and a few system calls."""

from collections.abc import Iterator
import contextlib
import ctypes
import os

from glance_dedup.base import closing

PAGE = 65536
_PUNCH_HOLE_KEEP_SIZE = 3


@contextlib.contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """A file that is open meanwhile."""
    with closing.descriptor(os.open(path, flags | os.O_CLOEXEC)) as fd:
        yield fd


@contextlib.contextmanager
def made(path: str, content: bytes) -> Iterator[int]:
    """A new file with some content, synced, that is open meanwhile."""
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        os.pwrite(fd, content, 0)
        os.fsync(fd)
        yield fd


def make(path: str, content: bytes) -> None:
    """Make a new file with some content, synced."""
    with made(path, content):
        pass


def page(word: str) -> bytes:
    """A page that begins with a word of up to eight letters."""
    return word.ljust(8).encode() * (PAGE // 8)


def inode(path: str) -> int | None:
    """The number of the file that has a name; None: there is none."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def punch(fd: int, length: int) -> int:
    """Punch a hole at the start of a file; 0, or the error's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(0),
                          ctypes.c_int64(length))
    return 0 if done == 0 else ctypes.get_errno()
