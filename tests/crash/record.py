# SPDX-License-Identifier: Apache-2.0

"""The journal of a process's changes to the files below a directory.

``tests/functional/journal.c`` writes it, and describes a record.
"""

import contextlib
import ctypes
import dataclasses
import enum
import json
import os
import struct
import threading


class Kind(enum.IntEnum):
    CREATE = 1
    MKDIR = 2
    WRITE = 3
    TRUNCATE = 4
    ALLOCATE = 5
    PUNCH = 6
    LINK = 7
    RENAME = 8
    UNLINK = 9
    SYNC = 10
    MARK = 11
    UNKNOWN = 12


#: The entries of the engine's table of system calls that change something, and
#: the kind of record for each.
ENTRIES = {
    'openat': Kind.CREATE, 'pwritev': Kind.WRITE, 'fsync': Kind.SYNC,
    'fdatasync': Kind.SYNC, 'ftruncate': Kind.TRUNCATE,
    'fallocate': Kind.ALLOCATE, 'punch': Kind.PUNCH, 'linkat': Kind.LINK,
    'renameat': Kind.RENAME, 'unlinkat': Kind.UNLINK, 'rmdirat': Kind.UNLINK,
    'mkdirat': Kind.MKDIR}

_RECORD = struct.Struct('<IIQQQQQHHI')


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One call of the process; journal.h describes the fields."""

    kind: Kind
    inode: int
    dir: int
    other_dir: int
    offset: int
    length: int
    name: str
    other: str
    data: bytes

    def __str__(self):
        words = [self.kind.name.lower()]
        if self.name:
            words.append(self.name)
        if self.other:
            words.append(f'to {self.other}')
        if self.kind in (Kind.WRITE, Kind.PUNCH):
            length = len(self.data) or self.length
            words.append(f'{length} bytes at {self.offset}')
        elif self.kind in (Kind.TRUNCATE, Kind.ALLOCATE):
            words.append(f'{self.length} bytes')
        elif self.kind in (Kind.MARK, Kind.UNKNOWN):
            words.append(self.data.decode())
        return ' '.join(words)


def read(path):
    """Return all records of a journal, in their order."""
    records = []
    with open(path, 'rb') as f:
        data = f.read()
    at = 0
    while at < len(data):
        (size, kind, inode, dir_, other_dir, offset, length, name_length,
         other_length, data_length) = _RECORD.unpack_from(data, at)
        name = at + _RECORD.size
        other = name + name_length
        content = other + other_length
        assert content + data_length == at + size
        records.append(Record(
            Kind(kind), inode, dir_, other_dir, offset, length,
            data[name:other].decode(), data[other:content].decode(),
            data[content:at + size]))
        at += size
    return records


class Recorder:
    """Records this process, which has the library preloaded."""

    def __init__(self, journal, root):
        self._library = ctypes.CDLL(None)
        root = os.path.realpath(root)
        if self._library.witness_record(
                os.fsencode(journal), os.fsencode(root)) != 0:
            raise RuntimeError(f'{journal} cannot be written')

    @contextlib.contextmanager
    def held(self, call, path, work):
        """Have a thread do some work, and suspend it within.

        :param call: of the C library, at whose next one it waits
        :param path: of the file that the call is made on, as it begins,
            relative to the root
        """
        failures = []

        def run():
            try:
                work()
            except BaseException as e:
                failures.append(e)
        self._library.witness_gate(call.encode(), path.encode())
        thread = threading.Thread(target=run)
        thread.start()
        try:
            arrived = self._library.witness_arrived(10000)
            assert arrived, f'there was no {call} of {path}: {failures}'
            yield
        finally:
            self._library.witness_open()
            thread.join()
        if failures:
            raise failures[0]

    @contextlib.contextmanager
    def room(self, size):
        """Let the file system have so many bytes free."""
        self._library.witness_room(ctypes.c_uint64(size))
        try:
            yield
        finally:
            self._library.witness_room(ctypes.c_uint64(-1))

    def mark(self, **fields):
        """Record the beginning or the acknowledgement of an operation."""
        self._library.witness_mark(json.dumps(fields).encode())
