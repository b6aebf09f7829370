# SPDX-License-Identifier: Apache-2.0

"""Partitions of recipes' runs, for tasks that compare recipes block by block.

A partition is a file without a name on the disk of TMPDIR, or of ``/var/tmp``.
It has all runs of its groups. So a task that needs all runs of a group at once
has only one partition in memory.

Each run has an *owner*, such as a project or an image: a number that the task
chooses.
"""

from collections.abc import Iterator
import contextlib
import os
import struct
import tempfile
from typing import BinaryIO

from glance_dedup.maintenance import rebuild_worker

_HEAD = struct.Struct('<II')    # an owner's number; bytes of runs behind it


class Partitions:
    """The files, and the buffers in front of them. To be closed.

    :param groups: the number of groups
    :raises OSError: there is no room for the files, here or in any method
    """

    def __init__(self, groups: int) -> None:
        number = rebuild_worker.partitions_for(groups)
        self._owner = 0
        self._buffers = rebuild_worker.Buffers(number, self._write)
        # They have no names, so nothing is left of them. /tmp may be memory.
        directory = os.environ.get('TMPDIR') or '/var/tmp'
        with contextlib.ExitStack() as stack:
            self.files = [stack.enter_context(
                tempfile.TemporaryFile(dir=directory)) for _ in range(number)]
            self._stack = stack.pop_all()

    def __enter__(self) -> 'Partitions':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def begin(self, owner: int) -> None:
        """Write the rest of the owner before, and begin another."""
        self._buffers.flush()
        self._owner = owner

    def add(self, runs: bytes) -> None:
        """Spread runs of the owner."""
        self._buffers.add(runs)

    def finish(self) -> None:
        """Write the rest, so that the files can be read."""
        self._buffers.flush()
        for file in self.files:
            file.flush()

    def _write(self, part: int, runs: bytearray) -> None:
        self.files[part].write(_HEAD.pack(self._owner, len(runs)) + runs)


def sections(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """A partition's owners, in order, each with some of its runs."""
    file.seek(0)
    while head := file.read(_HEAD.size):
        owner, length = _HEAD.unpack(head)
        yield owner, file.read(length)
