# SPDX-License-Identifier: Apache-2.0

"""One journal of a volume, read and verified: its head, marks and records.

Written from ``format-volumes.rst`` alone; see ``checker.py``.
``volume_check.py`` judges the journals of a volume together.
"""

from collections.abc import Callable
import os
import re
import struct
import typing

import xxhash

from glance_dedup.check import files
from glance_dedup.check import ondisk

MAJOR = 1
HEAD = 4096
MAKING, READY, DELETING = 1, 2, 3
DATA, ZEROS, MARK, STORED = 1, 2, 3, 4

_MAGIC = b'GDVOLJ\0\0'
_RECORD_MAGIC = b'GDVR'
_FIELDS = struct.Struct('<8sHHI16s16s16sQQQQIIQQIIQ128s128s128sQ')
_MARK_FIELDS = struct.Struct('<QQ')
_RECORD = struct.Struct('<4sIQQQQQQ')
_MAX_SIZE = 1 << 46
_MIN_PART, _MAX_PART = 1 << 16, 1 << 40
_MAX_DATA = 65536
_ALIGN = 8

# Bytes of marks, and of a search for records, that are read at once.
_PIECE = 1 << 20

NAME = re.compile(r'[A-Za-z0-9_-]{1,64}\Z')
JOURNAL_NAME = re.compile(r'journal-([0-9a-f]{8})\Z')


class Head(typing.NamedTuple):
    """The fields of a journal's head."""

    number: int
    repository_id: bytes
    volume_id: bytes
    scope: bytes
    seed: int
    size: int
    base_size: int
    part_size: int
    state: int
    needed: int
    before: int
    before_durable: int
    marks: int
    marks_checksum: int

    @property
    def parts(self) -> int:
        """Return the number of parts of the volume."""
        return -(-self.size // self.part_size)

    @property
    def records(self) -> int:
        """Return the offset of the first record."""
        return HEAD + -(-_MARK_FIELDS.size * self.marks // 4096) * 4096


def parse_head(data: bytes, number: int, repository_id: bytes | None) -> Head:
    """The head of the journal of this number, from its first page.

    :param repository_id: the one that it should have; None: any
    :raises Damage: if it does not verify
    """
    if len(data) < HEAD:
        raise ondisk.Damage('ends inside its head', len(data))
    (magic, major, minor, its_number, its_repository_id, volume_id, scope,
     seed, size, base_size, part_size, state, needed, before, _, marks,
     project_length, marks_checksum, project, source, _, before_durable
     ) = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        raise ondisk.Damage("does not start with the magic of a volume's "
                            'journal', 0)
    if major != MAJOR:
        raise ondisk.Damage(f'has version {major}.{minor}; this program reads '
                            f'{MAJOR}.x', 8)
    if ondisk.xxh3(data[:4088]) != ondisk.stored_checksum(data, 4088):
        raise ondisk.Damage('the checksum of its head does not agree', 4088)
    head = Head(its_number, its_repository_id, volume_id, scope, seed, size,
                base_size, part_size, state, needed, before,
                before_durable or before, marks, marks_checksum)
    for holds, offset, sentence in (
            (its_number == number, 12, f'says that it is journal {its_number}'
             ),
            (repository_id in (None, its_repository_id), 16,
             f'is of the repository {its_repository_id.hex()}'),
            (any(volume_id), 32, 'has zeros as the id of its volume'),
            (not size % ondisk.SECTOR and ondisk.SECTOR <= size <= _MAX_SIZE,
             72,
             f'says that the volume has {size} bytes'),
            (base_size <= size, 80, f'has a base of {base_size} bytes, and '
             f'{size} in all'),
            (_MIN_PART <= part_size <= _MAX_PART
             and not part_size & (part_size - 1), 88,
             f'says that a part has {part_size} bytes'),
            (state in (MAKING, READY, DELETING), 96,
             f'has the unknown state {state}'),
            (1 <= needed <= number, 100,
             f'says that journal {needed} is the first that is needed'),
            (not before or needed < number, 104,
             'says that the journal before it ends at '
             f'{before}, and that journal {needed} is the first that is '
             'needed'),
            (not before % _ALIGN and (not before or before >= HEAD), 104,
             f'says that the journal before it ends at {before}'),
            (before_durable <= before, 520, 'says that the journal before it '
             f'ends at {before}, and was durable up to {before_durable}'),
            (_is_text(project, project_length), 136,
             "has not a project's name"),
            (_is_source(source), 264, 'has not an image id'),
            (scope in (ondisk.GLOBAL_SCOPE,
                       ondisk.scope_of(project[:project_length])), 48,
             "is of a scope that is neither that of all nor its project's")):
        if not holds:
            raise ondisk.Damage(sentence, offset)
    if marks > head.parts:
        raise ondisk.Damage(f'has {marks} marks for {head.parts} parts', 120)
    return head


def _is_text(field: bytes, length: int) -> bool:
    if length > len(field) or any(field[length:]):
        return False
    try:
        return '\0' not in field[:length].decode()
    except UnicodeDecodeError:
        return False


def _is_source(field: bytes) -> bool:
    text = field.rstrip(b'\0').decode('ascii', 'replace')
    return not text or ondisk.IMAGE_NAME.match(text) is not None


class JournalReader:
    """Reads an open journal whose head is valid.

    :param found: called with part and edition of each mark, in their order;
        the head's marks come first
    :param advance: called with the number of bytes read since, and the file
    :ivar end: behind the last valid record, once :meth:`read_records` was
        called
    :ivar is_stored: whether a record makes all earlier journals unnecessary
    :ivar durable: up to where the records say that the journal was durable
    """

    def __init__(self, f: files.File, head: Head,
                 found: Callable[[int, int], None],
                 advance: Callable[[int, str], None]) -> None:
        self._file = f
        self._head = head
        self._found = found
        self._advance = advance
        self._sequence = 0      # of the last valid record
        self.end = head.records
        self.is_stored = False
        self.durable = head.records

    def read_marks(self) -> None:
        """Read the marks of the head.

        :raises Damage: if they do not verify
        """
        head, size = self._head, _MARK_FIELDS.size
        hasher = xxhash.xxh3_64(seed=head.seed)
        last = -1
        stop = HEAD + size * head.marks
        for at in range(HEAD, stop, _PIECE):
            piece = self._file.read(at, min(_PIECE, stop - at))
            if len(piece) < min(_PIECE, stop - at):
                raise ondisk.Damage('ends inside its marks', at + len(piece))
            hasher.update(piece)
            for i, (part, edition) in enumerate(
                    _MARK_FIELDS.iter_unpack(piece)):
                if not last < part < head.parts or not edition:
                    raise ondisk.Damage(
                        f'has a mark of edition {edition} of part {part} '
                        'where none can be', at + size * i)
                self._found(part, edition)
                last = part
        if hasher.intdigest() != head.marks_checksum:
            raise ondisk.Damage('the checksum of its marks does not agree',
                                128)
        rest = self._file.read(stop, head.records - stop)
        if len(rest) < head.records - stop:
            raise ondisk.Damage('ends inside its marks', stop + len(rest))
        if any(rest):
            raise ondisk.Damage('has bytes behind its marks that should be '
                                'zeros', stop)
        self._advance(head.records, self._file.file)

    def read_records(self, limit: int | None = None) -> None:
        """Read the records up to the first that is not valid.

        :param limit: end of the records, according to another journal; None:
            none follows
        """
        told = self.end
        while limit is None or self.end < limit:
            record = self._record(self.end, self._sequence + 1)
            if record is None:
                break
            kind, a, b, durable, length = record
            if kind == MARK:
                self._found(a, b)
            self.is_stored |= kind == STORED
            self.durable = max(self.durable, durable)
            self._sequence += 1
            self.end += length
            if self.end - told >= _PIECE:
                self._advance(self.end - told, self._file.file)
                told = self.end
        self._advance(self.end - told, self._file.file)

    def proof(self) -> int | None:
        """Return the offset of a record that proves later bytes durable.

        :returns: None: there is none, so the end is one
        """
        fd, overlap = self._file.fd, _RECORD.size
        start = self.end
        while True:
            try:
                # A hole has no record, and may have any size.
                start = os.lseek(fd, start, os.SEEK_DATA) // _ALIGN * _ALIGN
            except OSError:
                return None     # no data follows
            start = max(start, self.end)
            piece = self._file.read(start, _PIECE + overlap)
            at = piece.find(_RECORD_MAGIC)
            while at >= 0:
                if not (start + at) % _ALIGN:
                    if self._record(start + at, None) is not None:
                        return start + at
                at = piece.find(_RECORD_MAGIC, at + 1)
            if len(piece) < _PIECE + overlap:
                return None
            start += _PIECE
            self._advance(_PIECE, self._file.file)

    def proves_earlier(self) -> bool:
        """Return whether a record was written after a sync of the journal.

        Before that, all that is needed of earlier journals was durable.
        """
        if not self._head.records < self.durable < self.end:
            return self.durable > self._head.records
        # A record must begin there.
        data = self._file.read_ahead(self.durable, _RECORD.size)
        return (len(data) == _RECORD.size and self._record(
            self.durable, _RECORD.unpack(data)[2]) is not None)

    def _record(self, at: int, sequence: int | None
                ) -> tuple[int, int, int, int, int] | None:
        """A valid record: kind, two fields, durable offset, whole length.

        :param sequence: which it must have; None: a later one than all before.
            Then it must prove that the end was durable, and its data may be
            torn
        """
        data = self._file.read_ahead(at, _RECORD.size)
        if len(data) < _RECORD.size:
            return None
        magic, kind, number, a, b, durable, checksum, own = (
            _RECORD.unpack(data))
        # The checksum is last: a recycled journal may have millions of records
        # of the one before.
        if (magic != _RECORD_MAGIC or durable > at
                or (number <= self._sequence or durable <= self.end
                    if sequence is None else number != sequence)
                or ondisk.xxh3(data[:48], self._head.seed) != own):
            return None
        if kind == MARK:
            good = a < self._head.parts and b >= 1
        elif kind == STORED:
            good = not a and not b
        else:
            good = kind in (DATA, ZEROS) and 1 <= b <= self._head.size - a
        if not good or (kind == DATA and b > _MAX_DATA):
            return None
        if kind != DATA or sequence is None:
            return kind, a, b, durable, _RECORD.size
        content = self._file.read_ahead(at + _RECORD.size, b)
        if len(content) < b or ondisk.xxh3(content) != checksum:
            return None
        return kind, a, b, durable, _RECORD.size + -(-b // _ALIGN) * _ALIGN
