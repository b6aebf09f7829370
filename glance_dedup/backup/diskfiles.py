# SPDX-License-Identifier: Apache-2.0

"""Disks as files and block devices: the content of a source at rest.

No program may write to such a disk while it is backed up. A write to a file
shows in its inode, size and times; one to a block device in the kernel's
counters of written sectors, after a sync. Writes that pass by the device,
such as to the disk under a logical volume, or by another host, are not
seen.

A file in the format of a virtual machine's disk, such as qcow2, is not read as
it is: `images.py` opens it. The format is never guessed from the bytes of a
disk: a server that writes the beginning of a qcow2 file to its raw disk could
otherwise have any file of the host backed up as its own.
"""

import errno
import os
import stat
import time
from typing import Any

from glance_dedup.backup import places
from glance_dedup.backup import views
from glance_dedup.base import access
from glance_dedup.base import diskformats

# Of <time.h>: the clock that file systems read.
_COARSE = 5
# A file's time advances with the kernel's tick, of up to 10 ms. The longest
# wait for the next one.
_TICK_SECONDS = 1.0
_PAUSE = 0.005


def _wait_for_tick(fd: int) -> None:
    """Wait until a write would change the file's time.

    Else a write in the same tick as the last one, after our first read, would
    leave the time as it is.
    """
    deadline = time.monotonic() + _TICK_SECONDS
    while (time.monotonic() < deadline
           and time.clock_gettime_ns(_COARSE)
           <= os.fstat(fd).st_ctime_ns):
        time.sleep(_PAUSE)


def _identity(fd: int, status: os.stat_result) -> str:
    """Changes whenever the bytes do."""
    if stat.S_ISREG(status.st_mode):
        return (f'file {status.st_dev} {status.st_ino} {status.st_size} '
                f'{status.st_mtime_ns} {status.st_ctime_ns}')
    # The counters leave out writes that are only in the page cache.
    os.fsync(fd)
    number = f'{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}'
    with open(f'/sys/dev/block/{number}/stat') as f:
        counts = f.read().split()
    with open('/proc/sys/kernel/random/boot_id') as f:
        boot = f.read().strip()
    # Of the kernel's Documentation/block/stat.rst: sectors written and
    # discarded. Our own sync counts as a write, of none.
    written = ' '.join(counts[at] for at in (6, 13))
    size = os.lseek(fd, 0, os.SEEK_END)
    return f'device {boot} {number} {size} {written}'


class FileContent(views.Content):
    """A regular file or a block device, as it is.

    :param path: of the file; symbolic links are followed
    :raises SourceError: it cannot be read, or is neither
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        with places.source_errors(f'{path} cannot be backed up'):
            self._fd = access.open_file(path, os.O_RDONLY)
            try:
                self._look()
            except BaseException:
                self.close()
                raise

    def _look(self) -> None:
        status = os.fstat(self._fd)
        if stat.S_ISREG(status.st_mode):
            _wait_for_tick(self._fd)
        elif not stat.S_ISBLK(status.st_mode):
            raise views.SourceError(
                f'{self.path} cannot be backed up: it is neither a file nor a '
                'block device. Give the disk itself')
        self.identity = _identity(self._fd, os.fstat(self._fd))
        self.size = os.lseek(self._fd, 0, os.SEEK_END)

    def fileno(self) -> int:
        """The descriptor, which stays the content's."""
        return self._fd

    def head(self, length: int = diskformats.HEAD) -> bytes:
        """Its first bytes, or all if it has fewer."""
        with self._reading():
            return os.pread(self._fd, length, 0)

    def readinto(self, buffer: Any, offset: int) -> None:
        """Fill a buffer. Raises as that of the base class."""
        left = memoryview(buffer)
        with self._reading():
            while left:
                count = os.preadv(self._fd, [left], offset)
                if not count:
                    raise views.SourceError(
                        f'{self.path} has become shorter while it was backed '
                        'up. Stop what writes to it, and back it up again')
                left = left[count:]
                offset += count

    def is_hole(self, offset: int, length: int) -> bool:
        """Return whether the file system has no bytes for the range."""
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA) >= offset + length
        except OSError as e:
            # ENXIO: nothing but a hole follows. A block device has EINVAL.
            return e.errno == errno.ENXIO and length > 0

    def check(self) -> None:
        """Compare identities. Raises as that of the base class."""
        with self._reading():
            identity = _identity(self._fd, os.fstat(self._fd))
        if identity != self.identity:
            raise views.SourceError(
                f'{self.path} was changed while it was backed up. Stop what '
                'writes to it, such as its server, and back it up again; or '
                'back up the running server')

    def _reading(self):
        return places.source_errors(
            f'{self.path} cannot be read. See the messages of the kernel '
            '(dmesg) for its disk')

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
