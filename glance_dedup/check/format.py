# SPDX-License-Identifier: Apache-2.0

"""The format on the disk, read by ``repository check``: one file at a time.

Written from ``doc/source/contributor/format.rst`` alone; see ``check.py``.
What is here knows of one file; what the files have to do with each other is
judged there.

No length read from a file is trusted: each is bounded by the format's own
limits, or by the size of the file, before it is used.
"""

import array
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import stat
import struct
import typing

import lz4.block
import xxhash
import zstandard

from glance_dedup.base import access
from glance_dedup.base import exceptions

DAMAGE = 'damage'
NOTE = 'note'

KIND = 'glance-dedup repository'
MAJOR = 1
MINOR = 1
KEY_LENGTH = 82
# Digests of which two equal ones may be of unequal blocks; some have more
# names than these.
WEAK = ('xxh3-128', 'sha1', 'md5-sha1')
MAX_JSON = 65536
MIN_BLOCK, MAX_BLOCK = 512, 65536
MIN_SLOTS, MAX_SLOTS = 64, 32768
MAX_SEGMENT = 1 << 20
MAX_GROUP = 1 << 25
MAX_WINDOW = 8 << 20            # of a Zstandard frame; all are far smaller

PAGE = 4096
SECTOR = 512
ENTRY = 56
ENTRIES_PER_SECTOR = 9
EXTENT = 40
EXTENTS_PER_PAGE = 102
MAX_EXTENT_BLOCKS = 1024
SEGMENT_HEADER = 32

FENCE = struct.Struct('<8s16sQ')
GROUP_HEADER = struct.Struct('<8sHHI16s16sII16s')
RECORD = struct.Struct('<QQIIQBB')
ENTRY_FIELDS = struct.Struct('<32sQIQI')
SEGMENT_FIELDS = struct.Struct('<4sBBHIIIIQ')
RECIPE_HEADER = struct.Struct('<8sHHI16s16s16s16sQQQQQQQHHI128s128s')
PAGE_HEADER = struct.Struct('<II')
EXTENT_FIELDS = struct.Struct('<QQIIIB3sQ')
CHECKSUM = struct.Struct('<Q')
# An extent as it is kept until its group's turn: slot, blocks, length, number
# in its recipe, digest.
KEPT_EXTENT = struct.Struct('<IIIQQ')

LIVE, VOID, FREED, DAMAGED = 1, 2, 3, 4
# What a look found in a slot, beside VOID, FREED and DAMAGED.
EMPTY, GOOD, BAD = 0, 1, 5
STATE_NAMES = {EMPTY: 'empty', VOID: 'void', FREED: 'freed',
               DAMAGED: 'marked as damaged'}
GLOBAL_SCOPE = bytes(16)
SPARE_SCOPE = b'\xff' * 16      # of the files in spares/
CODEC_NONE, CODEC_LZ4, CODEC_ZSTD = 0, 1, 2
MOST_LEVEL = {CODEC_NONE: 0, CODEC_LZ4: 0, CODEC_ZSTD: 19}
POISONED, UNSETTLED = 1, 2

GROUP_NAME = re.compile(r'[0-9a-f]{8}\Z')
IMAGE_NAME = re.compile(r'[A-Za-z0-9_-]{1,128}\Z')
SPOOL_NAME = re.compile(r'[TDGMOX]-[0-9a-f]{32}\Z')
HEX_ID = re.compile(r'[0-9a-f]{32}\Z')

ENTRY_ZEROS = bytes(ENTRY)
PAGE_ZEROS = bytes(PAGE)


class Damage(Exception):
    """Something does not verify.  The message is the finding's sentence."""

    def __init__(self, sentence: str, offset: int | None = None):
        super().__init__(sentence)
        self.sentence = sentence
        self.offset = offset


class Gone(Exception):
    """The file that was to be read has no such name any more."""


class RecipeHeader(typing.NamedTuple):
    image_id: str
    project: str
    scope: bytes
    transaction: bytes
    upload: bytes
    size: int
    zero_bytes: int
    new_bytes: int
    stored_bytes: int
    extents: int
    fragments: int
    created: int
    file_size: int

    def facts(self, blocks) -> dict:
        """What the catalog's ledger has of a recipe with so many blocks."""
        return {
            'image_id': self.image_id, 'upload_id': self.upload.hex(),
            'project': self.project, 'size': self.size,
            'zero_bytes': self.zero_bytes, 'new_bytes': self.new_bytes,
            'stored_bytes': self.stored_bytes, 'blocks': blocks,
            'fragments': self.fragments, 'created': self.created}


@dataclasses.dataclass
class Problem:
    """What is wrong with a run of slots, or (slots == 0) with their group."""

    offset: int
    sentence: str
    slot: int = 0
    slots: int = 0
    severity: str | None = None  # None: it depends on who names the slots
    kind: str = ''              # of entries: what they have in common


@dataclasses.dataclass
class Group:
    """What one look at a group found."""

    number: int
    seed: int = 0
    slots: int = 0
    largest: int = 0
    digest: typing.Callable[[bytes, bytes], bytes] | None = None
    tells: bool = True          # a fingerprint says which block it is of
    scope: bytes = GLOBAL_SCOPE
    scopes: dict[int, bytes] = dataclasses.field(
        default_factory=dict)   # of spare copies, by slot
    exact: bool = True          # its minor version is the one known here
    sequence: int = 0
    published: int = 0
    end: int = 0
    size: int = 0
    data: int = 0               # where the segments start
    stored: int = 0             # bytes of segments with live blocks
    covered: int = 0            # bytes that such segments take of the file
    freed: int = 0              # slots
    damaged: int = 0            # slots
    doubtful: set[int] = dataclasses.field(
        default_factory=set)    # live slots of segments with problems
    told: int = 0               # bytes that progress was told of
    states: bytearray = dataclasses.field(default_factory=bytearray)
    lengths: array.array = dataclasses.field(
        default_factory=lambda: array.array('I'))
    fingerprints: bytearray = dataclasses.field(default_factory=bytearray)
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def problem(self, *args, **kwargs):
        self.problems.append(Problem(*args, **kwargs))

    def fingerprint(self, slot) -> bytes:
        return bytes(self.fingerprints[32 * slot:32 * slot + 32])

    def hits(self, extent) -> bool:
        """Whether a block that the extent names is bad, or its entry."""
        return BAD in self.states[extent.slot:extent.slot + extent.blocks]

    def has_spare(self, slot, spares: typing.Container[bytes]) -> bool:
        """Whether a spare copy stands in for what the slot has lost."""
        return self.tells and bool(self.lengths[slot]) and (
            self.scope + self.fingerprint(slot) in spares)


def xxh3(data, seed=0):
    return xxhash.xxh3_64_intdigest(data, seed)


def stored_checksum(data, offset):
    return CHECKSUM.unpack_from(data, offset)[0]


def printable(name: str) -> str:
    """The name with everything escaped that a terminal might not take."""
    return ''.join(
        c if c.isprintable() else
        c.encode('unicode_escape').decode('ascii') for c in name)


def is_power_of_two(value):
    return value > 0 and not value & (value - 1)


def scope_of(project: bytes) -> bytes:
    """The scope id of a project."""
    return hashlib.sha256(b'glance-dedup scope\0' + project).digest()[:16]


def _xxh3_128(scope, data):
    hasher = xxhash.xxh3_128(b'' if scope == GLOBAL_SCOPE else scope)
    hasher.update(data)
    return hasher.digest() + bytes(16)


def digest_of(name: str) -> typing.Callable[[bytes, bytes], bytes] | None:
    """The function from a scope id and a block to the fingerprint.

    :returns: None for an unknown digest
    """
    if name == 'xxh3-128':
        return _xxh3_128
    try:
        size = hashlib.new(name, usedforsecurity=False).digest_size
    except (ValueError, TypeError):
        return None
    if size < 20:
        return None
    # The constructors of the module are quicker than hashlib.new.
    make = getattr(hashlib, name) if (
        name in hashlib.algorithms_guaranteed) else None
    padding = bytes(max(0, 32 - size))

    def compute(scope, data):
        first = data if scope == GLOBAL_SCOPE else scope
        if make is not None:
            hasher = make(first, usedforsecurity=False)
        else:
            hasher = hashlib.new(name, first, usedforsecurity=False)
        if first is scope:
            hasher.update(data)
        return hasher.digest()[:32] + padding
    return compute


def is_cryptographic(name: str) -> bool:
    """Whether a fingerprint by this digest says which block it is of."""
    name = name.lower()
    with contextlib.suppress(ValueError, TypeError):
        name = hashlib.new(name, usedforsecurity=False).name
    return name not in WEAK


def refused_by_system(error: OSError, file: str):
    """Raise what is the environment's fault, not the repository's."""
    if error.errno in (errno.EACCES, errno.EPERM):
        raise exceptions.AccessDenied(
            f'{file} cannot be read: {error.strerror}') from error
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise exceptions.StorageError(
            f'{file} cannot be read: {error.strerror}') from error


def identity(status):
    return (status.st_dev, status.st_ino, status.st_size,
            status.st_mtime_ns)


class File:
    """A regular file of the repository, open for reading."""

    # What is read at once.  Requests are mostly in rising order.
    WINDOW = 4 << 20

    def __init__(self, directory: int, name: str, file: str):
        self.file = file
        try:
            self.fd = access.open_file(
                name, os.O_RDONLY | os.O_NOFOLLOW, directory)
        except FileNotFoundError:
            raise Gone() from None
        except OSError as e:
            refused_by_system(e, file)
            if e.errno == errno.ELOOP:
                raise Damage('is a symbolic link') from e
            raise Damage(f'cannot be opened: {e.strerror}') from e
        self._start = 0
        self._window = b''
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self.fd)
            raise Damage('is not a regular file')
        self.identity = identity(status)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        os.close(self.fd)

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        """The bytes at `offset`: fewer than `length` at the file's end."""
        parts = []
        while length > 0:
            try:
                part = os.pread(self.fd, length, offset)
            except OSError as e:
                refused_by_system(e, self.file)
                raise Damage(
                    f'cannot be read: {e.strerror}', offset) from e
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b''.join(parts)

    def read_ahead(self, offset: int, length: int) -> memoryview:
        """The same through a window, for many short pieces in order."""
        at = offset - self._start
        if at < 0 or at + length > len(self._window):
            self._window = b''
            try:
                self._window = self.read(offset, max(length, self.WINDOW))
            except Damage:
                # Let no bad sector spoil what lies before it.
                self._window = self.read(offset, length)
            self._start = offset
            at = 0
        return memoryview(self._window)[at:at + length]


def check_order(group, blocks, first, count, plain_length):
    """Blocks lie in a segment in the order of their slots, without gaps."""
    if first + count > group.slots or blocks[0][0] < first or (
            blocks[-1][0] >= first + count):
        raise Damage(f'says that it has {count} blocks from slot {first}')
    before, end = first - 1, 0
    for slot, at, length, _ in blocks:
        # Blocks between, that are not live any more, had a byte or more.
        between = slot - before - 1
        if at < end + between or (at > end and not between):
            raise Damage(f'the block of slot {slot} does not lie where '
                         'the one before it ends')
        before, end = slot, at + length
    between = first + count - before - 1
    if plain_length < end + between or (
            plain_length > end and not between):
        raise Damage(f'has {plain_length} plain bytes, but its blocks '
                     f'have {end}')


class GroupReader:
    """Reads groups, one look at a time.

    :param repository_id: that of all groups; None if it is not known
    :param fingerprint: the digest's name; None if it is not known
    :param block_size: the largest block's bytes; None if it is not known
    :param advance: told the bytes read and the file's name
    :ivar scopes: those that a spare copy may be of, the likeliest first;
        nothing in its file says which
    """

    def __init__(self, repository_id, fingerprint, block_size, advance):
        self.repository_id = repository_id
        self.fingerprint = fingerprint
        self.block_size = block_size or MAX_BLOCK
        self.advance = advance
        self.scopes = [GLOBAL_SCOPE]
        self.decompressor = zstandard.ZstdDecompressor(
            max_window_size=MAX_WINDOW)

    def look(self, directory: int, number: int,
             only: set[int] | None = None, spare: bool = False) -> Group:
        """Read a group; of its segments only those with slots in `only`.

        :param spare: it is a file of ``spares/``

        :raises Gone: if there is no such group
        :raises Damage: if nothing can be said of its slots
        """
        group = Group(number)
        name = f'{number:08x}'
        file = f'spares/{name}' if spare else f'groups/{name}'
        with File(directory, name, file) as f:
            head = f.read(0, PAGE)
            self.read_group_header(group, head, spare)
            self.read_records(group, head)
            group.size = f.size()
            if group.end > group.size:
                group.problem(
                    group.size, f'ends here, but at its last sync point '
                    f'it had {group.end} bytes', severity=DAMAGE)
            table = f.read(PAGE, group.data - PAGE)
            sectors = -(-group.slots // ENTRIES_PER_SECTOR)
            if len(table) < SECTOR * sectors:
                group.problem(
                    group.size, 'ends inside its fingerprint store',
                    0, group.slots)
            table = table.ljust(group.data - PAGE, b'\0')
            self.check_zeros(group, head, table, sectors)
            segments = self.read_entries(group, table)
            self.read_segments(group, f, segments, only)
        return group

    def scope_of_group(self, directory: int, number: int) -> bytes:
        """The scope of a group, by its header alone.

        :raises Gone, Damage: as for look
        """
        group = Group(number)
        with File(directory, f'{number:08x}', f'groups/{number:08x}') as f:
            self.read_group_header(group, f.read(0, PAGE), False)
        return group.scope

    def read_group_header(self, group, head, spare):
        if len(head) < PAGE:
            raise Damage('ends inside its header', len(head))
        (magic, major, minor, number, repository_id, scope, slots, largest,
         digest) = GROUP_HEADER.unpack_from(head)
        if magic != b'GDGROUP\0':
            raise Damage('does not start with the magic of a group', 0)
        group.seed = stored_checksum(head, 504)
        if xxh3(head[:504]) != group.seed:
            raise Damage('the checksum of its header does not agree', 504)
        if major != MAJOR:
            raise Damage(f'has format {major}.{minor}; this program reads '
                         f'{MAJOR}.x', 8)
        if number != group.number:
            raise Damage(f'is group {number:08x}', 12)
        if self.repository_id not in (None, repository_id):
            raise Damage('is of the repository '
                         f'{repository_id.hex()}', 16)
        if (scope == SPARE_SCOPE) != spare:
            raise Damage('is not of spare copies' if spare
                         else 'is of spare copies', 32)
        group.scope = scope
        if not MIN_SLOTS <= slots <= MAX_SLOTS:
            raise Damage(f'has {slots} slots', 48)
        if not 1 <= largest <= self.block_size:
            raise Damage(f'has blocks of up to {largest} bytes', 52)
        name = digest.rstrip(b'\0').decode('ascii', 'replace')
        group.digest = digest_of(name)
        if group.digest is None:
            raise Damage('has fingerprints of an unknown digest: '
                         + printable(name), 56)
        group.tells = is_cryptographic(name)
        if self.fingerprint not in (None, name):
            group.problem(56, f'has fingerprints by {name}', severity=NOTE)
        group.exact = minor <= MINOR
        group.slots = slots
        group.largest = largest
        group.data = -(-(PAGE + SECTOR * -(-slots // ENTRIES_PER_SECTOR))
                       // PAGE) * PAGE

    def read_records(self, group, head):
        valid, zeros = {}, set()
        for i in (0, 1):
            offset = SECTOR * (i + 1)
            record = head[offset:offset + SECTOR]
            if not any(record):
                zeros.add(i)
            elif xxh3(record[:504], group.seed) == stored_checksum(
                    record, 504):
                if record[7] >> 7:
                    group.problem(
                        offset, f'published record {i} has the impossible '
                        f'sequence {RECORD.unpack_from(record)[0]}',
                        severity=DAMAGE)
                    continue
                valid[i] = RECORD.unpack_from(record)
                if valid[i][0] % 2 != i:
                    group.problem(
                        offset, f'published record {i} has the sequence '
                        f'{valid[i][0]}', severity=DAMAGE)
            else:
                group.problem(
                    offset, f'the checksum of published record {i} does '
                    'not agree', severity=DAMAGE)
        if not valid:
            return
        which = max(valid, key=lambda i: valid[i][0])
        (sequence, _, published, flags, group.end, codec,
         level) = valid[which]
        offset = SECTOR * (which + 1)
        if 1 - which in zeros and sequence > 1:
            group.problem(
                SECTOR * (2 - which), f'published record {1 - which} is '
                'lost', severity=DAMAGE)
        if published > group.slots:
            group.problem(
                offset + 16, f'{published} of {group.slots} slots are '
                'published', severity=DAMAGE)
        group.published = min(published, group.slots)
        if flags & POISONED:
            group.problem(
                offset + 20, 'is poisoned: writing to it failed once, and '
                'nothing is appended to it any more', severity=NOTE)
        if flags & ~(POISONED | UNSETTLED) and group.exact:
            group.problem(offset + 20, f'has unknown flags: {flags:#x}',
                          severity=NOTE)
        if level > MOST_LEVEL.get(codec, -1) and group.exact:
            group.problem(
                offset + 32, f'was compressed anew with an unknown codec or '
                f'level: {codec}, {level}', severity=NOTE)

    def check_zeros(self, group, head, table, sectors):
        if not group.exact:
            return
        areas = [(3 * SECTOR, head[3 * SECTOR:], DAMAGE)]
        entries = ENTRY * ENTRIES_PER_SECTOR
        for at in range(0, SECTOR * sectors, SECTOR):
            areas.append((PAGE + at + entries,
                          table[at + entries:at + SECTOR], DAMAGE))
        # Of these two the format says nothing.
        last = SECTOR * (sectors - 1)
        at = last + ENTRY * (
            group.slots - ENTRIES_PER_SECTOR * (sectors - 1))
        areas.append((PAGE + at, table[at:last + entries], NOTE))
        areas.append((PAGE + SECTOR * sectors, table[SECTOR * sectors:],
                      NOTE))
        for offset, data, severity in areas:
            rest = data.lstrip(b'\0')
            if rest:
                group.problem(offset + len(data) - len(rest),
                              'has a byte here that should be zero',
                              severity=severity)

    def read_entries(self, group, table) -> dict[tuple, list[tuple]]:
        """Decode the fingerprint store.

        :returns: for each segment, by its offset, stored length and codec,
            its live blocks by slot: slot, offset, length, checksum
        """
        group.states = bytearray(group.slots)
        group.lengths = array.array('I', bytes(4 * group.slots))
        group.fingerprints = bytearray(32 * group.slots)
        segments: dict[tuple, list[tuple]] = {}
        run = None
        for slot in range(group.slots):
            sector, place = divmod(slot, ENTRIES_PER_SECTOR)
            at = SECTOR * sector + ENTRY * place
            sentence = self.read_entry(
                group, slot, table[at:at + ENTRY], segments)
            if sentence is None:
                run = None
            elif (run is not None and run.kind == sentence
                    and slot != group.published):
                run.slots += 1
                run.sentence = (f'the entries of slots {run.slot} to '
                                f'{slot}: {sentence}')
            else:
                run = Problem(
                    PAGE + at, f'the entry of slot {slot}: {sentence}',
                    slot, 1, kind=sentence)
                group.problems.append(run)
        return segments

    def read_entry(self, group, slot, raw, segments) -> str | None:
        if raw == ENTRY_ZEROS:
            if slot < group.published:
                group.states[slot] = BAD
                return 'is empty, but was published'
            return None
        fingerprint, checksum, offset, place, own = ENTRY_FIELDS.unpack(raw)
        group.states[slot] = BAD
        seed = (group.seed + slot) % (1 << 64)
        if xxh3(raw[:52], seed) % (1 << 32) != own:
            return 'its checksum does not agree'
        state = place >> 61
        if state in (VOID, FREED):
            group.states[slot] = state
            group.freed += state == FREED
            if any(raw[:44]) or place != state << 61:
                return f'is {STATE_NAMES[state]}, but has fields'
            return None
        if state not in (LIVE, DAMAGED):
            return f'has the unknown state {state}'
        at = place & 0xfffff
        length = place >> 20 & 0x1ffff
        stored = place >> 37 & 0x1fffff
        codec = place >> 58 & 7
        if not 1 <= length <= group.largest:
            return f'has a block of {length} bytes'
        if offset < group.data:
            return f'its segment lies at {offset}, before all segments'
        if at + length > MAX_SEGMENT or stored > MAX_SEGMENT:
            return 'its segment is too large'
        if codec > CODEC_ZSTD:
            return f'has the unknown codec {codec}'
        group.lengths[slot] = length
        group.fingerprints[32 * slot:32 * slot + 32] = fingerprint
        if state == DAMAGED:
            group.states[slot] = DAMAGED
            group.damaged += 1
            return None
        group.states[slot] = GOOD
        segments.setdefault((offset, stored, codec), []).append(
            (slot, at, length, checksum))
        return None

    def read_segments(self, group, f, segments, only):
        """Verify all segments with live blocks, or those with `only`."""
        end, untold = group.data, group.data
        for (offset, stored, codec), blocks in sorted(segments.items()):
            size = SEGMENT_HEADER + stored
            group.stored += size
            group.covered += max(0, offset + size - max(end, offset))
            end = max(end, offset + size)
            if only is not None and not any(b[0] in only for b in blocks):
                continue
            problems = len(group.problems)
            try:
                self.read_segment(group, f, offset, stored, codec, blocks)
            except Damage as e:
                for slot, _, _, _ in blocks:
                    group.states[slot] = BAD
                first, last = blocks[0][0], blocks[-1][0]
                group.problem(
                    offset if e.offset is None else e.offset,
                    f'the segment of slots {first} to {last}: {e.sentence}',
                    first, last - first + 1)
            if len(group.problems) > problems:
                group.doubtful.update(block[0] for block in blocks)
            untold += size
            if untold >= MAX_SEGMENT and only is None:
                self.advance(untold, f.file)
                group.told += untold
                untold = 0
        if only is None:
            self.advance(max(0, group.size - group.told), f.file)

    def read_segment(self, group, f, offset, stored, codec, blocks):
        data = f.read_ahead(offset, SEGMENT_HEADER + stored)
        if len(data) < SEGMENT_HEADER + stored:
            raise Damage('the file ends inside it')
        (magic, its_codec, _, count, first, plain_length, its_stored, _,
         checksum) = SEGMENT_FIELDS.unpack_from(data)
        if magic != b'GDSG':
            raise Damage('has not the magic of one')
        hasher = xxhash.xxh3_64(data[:24], seed=group.seed)
        hasher.update(data[SEGMENT_HEADER:])
        intact = hasher.intdigest() == checksum
        if its_codec != codec or its_stored != stored:
            raise Damage('its entries say otherwise of its codec or its '
                         'length')
        if plain_length > MAX_SEGMENT or stored > plain_length or (
                codec == CODEC_NONE and stored != plain_length):
            raise Damage(f'has {plain_length} bytes in {stored}')
        check_order(group, blocks, first, count, plain_length)
        plain = self.decode(codec, data[SEGMENT_HEADER:], plain_length)
        for slot, at, length, checksum in blocks:
            block = plain[at:at + length]
            severity = None
            if xxh3(block) != checksum:
                sentence = 'its bytes do not have its checksum'
            elif self.has_fingerprint(group, slot, block):
                continue
            elif group.scope == SPARE_SCOPE:
                # Of images, and groups, that are gone; or it is bad.
                sentence = ('its bytes have its fingerprint in no scope that '
                            'is known here')
                severity = NOTE
            else:
                sentence = 'its bytes do not have its fingerprint'
            group.states[slot] = BAD
            group.problem(offset, f'the block of slot {slot}: {sentence}',
                          slot, 1, severity)
        if not intact and all(
                group.states[block[0]] == GOOD for block in blocks):
            # Each block has been judged by its own; so nothing is lost.
            sentence = (f'the segment of slots {first} to '
                        f'{first + count - 1}: its checksum does not agree')
            severity = DAMAGE
            if blocks[0][0] >= group.published:
                severity = NOTE
            elif sum(block[2] for block in blocks) < plain_length:
                # A crash, or damage that was told, may have spoiled these.
                sentence += '; some of its blocks are needed no more'
                severity = NOTE
            group.problem(offset, sentence, severity=severity)

    def has_fingerprint(self, group, slot, block) -> bool:
        wanted = group.fingerprint(slot)
        if group.scope != SPARE_SCOPE:
            return group.digest(group.scope, block) == wanted
        for number, scope in enumerate(self.scopes):
            if group.digest(scope, block) == wanted:
                group.scopes[slot] = scope
                # The next copy is of the same, most likely.
                self.scopes.insert(0, self.scopes.pop(number))
                return True
        return False

    def decode(self, codec, stored, plain_length) -> memoryview:
        try:
            if codec == CODEC_NONE:
                return stored
            if codec == CODEC_LZ4:
                plain = lz4.block.decompress(
                    stored, uncompressed_size=plain_length)
            else:
                told = zstandard.get_frame_parameters(stored).content_size
                if told not in (zstandard.CONTENTSIZE_UNKNOWN,
                                plain_length):
                    raise Damage(f'decodes to {told} bytes instead of '
                                 f'{plain_length}')
                plain = self.decompressor.decompress(
                    stored, max_output_size=plain_length,
                    allow_extra_data=False)
        except (lz4.block.LZ4BlockError, zstandard.ZstdError,
                ValueError) as e:
            raise Damage('its bytes do not decode') from e
        if len(plain) != plain_length:
            raise Damage(f'decodes to {len(plain)} bytes instead of '
                         f'{plain_length}')
        return memoryview(plain)


class ExtentJudge:
    """Reads the pages of a recipe in order, and keeps their extents."""

    def __init__(self, header, extents):
        self.header = header
        self.extents = extents
        self.left = header.extents
        self.number = 0
        self.position = 0
        self.zeros = 0
        self.blocks = 0
        self.fragments = 0
        self.next = None        # the address after the last blocks
        self.seed = int.from_bytes(header.transaction[:8], 'little')

    def read_page(self, page, data):
        base = page * PAGE
        if len(data) < PAGE:
            raise Damage(f'ends inside page {page}', base + len(data))
        if xxh3(data[:4088], self.seed) != stored_checksum(data, 4088):
            raise Damage(f'the checksum of page {page} does not agree',
                         base + 4088)
        its_page, count = PAGE_HEADER.unpack_from(data)
        if its_page != page % (1 << 32):
            raise Damage(f'page {page} says that it is page {its_page}',
                         base)
        if count != min(self.left, EXTENTS_PER_PAGE):
            raise Damage(f'page {page} says that it has {count} extents',
                         base + 4)
        end = 8 + EXTENT * count
        if any(data[end:4088]):
            raise Damage(f'page {page} has bytes that should be zeros',
                         base + end)
        for at in range(8, end, EXTENT):
            sentence = self.read_extent(
                *EXTENT_FIELDS.unpack_from(data, at))
            if sentence is not None:
                raise Damage(f'extent {self.number} {sentence}', base + at)
            self.number += 1
        self.left -= count

    def read_extent(self, offset, length, group, slot, blocks, kind,
                    reserved, digest) -> str | None:
        if offset != self.position:
            return (f'starts at {offset}, where {self.position} would '
                    'follow')
        if not 1 <= length <= self.header.size - offset:
            return f'has {length} bytes'
        if any(reserved):
            return 'has reserved bytes that should be zeros'
        self.position += length
        if kind == 0:
            if group or slot or blocks or digest:
                return 'of zeros has fields of blocks'
            self.zeros += length
            return None
        if kind != 1:
            return f'has the unknown kind {kind}'
        if not 1 <= group < MAX_GROUP:
            return f'names group {group}'
        if not 1 <= blocks <= MAX_EXTENT_BLOCKS or (
                slot + blocks > MAX_SLOTS):
            return f'names {blocks} blocks from slot {slot}'
        if not blocks <= length <= blocks * MAX_BLOCK:
            return f'has {length} bytes in {blocks} blocks'
        self.blocks += blocks
        self.fragments += (group, slot) != self.next
        self.next = (group, slot + blocks)
        self.extents.setdefault(group, bytearray()).extend(
            KEPT_EXTENT.pack(slot, blocks, length, self.number, digest))
        return None

    def finish(self):
        header = self.header
        if self.position != header.size:
            raise Damage(f'its extents have {self.position} bytes instead '
                         f'of {header.size}', 80)
        if self.zeros != header.zero_bytes:
            raise Damage(f'its zero extents have {self.zeros} bytes '
                         f'instead of {header.zero_bytes}', 88)


def parse_recipe_header(data, size, repository_id) -> RecipeHeader:
    """The header of a recipe of `size` bytes, from its first page."""
    if len(data) < PAGE:
        raise Damage('ends inside its header', len(data))
    if data == PAGE_ZEROS:
        raise Damage('is a recipe that was never completed', 0)
    (magic, major, minor, flags, its_repository_id, scope, transaction, upload,
     image_size, zero_bytes, new_bytes, stored_bytes, extents, fragments,
     created, id_length, project_length, _, image_id,
     project) = RECIPE_HEADER.unpack_from(data)
    if magic != b'GDRECIPE':
        raise Damage('does not start with the magic of a recipe', 0)
    if xxh3(data[:4088]) != stored_checksum(data, 4088):
        raise Damage('the checksum of its header does not agree', 4088)
    if major != MAJOR:
        raise Damage(f'has format {major}.{minor}; this program reads '
                     f'{MAJOR}.x', 8)
    if flags and minor <= MINOR:
        raise Damage(f'has unknown flags: {flags:#x}', 12)
    if repository_id not in (None, its_repository_id):
        raise Damage(f'is of the repository {its_repository_id.hex()}', 16)
    name = image_id[:id_length].decode('ascii', 'replace')
    if id_length > 128 or not IMAGE_NAME.match(name) or (
            any(image_id[id_length:])):
        raise Damage('has not an image id', 144)
    if project_length > 128 or any(project[project_length:]):
        raise Damage("has not a project's name", 272)
    if scope not in (GLOBAL_SCOPE, scope_of(project[:project_length])):
        raise Damage('is of a scope that is neither that of all nor its '
                     "project's", 32)
    pages = -(-extents // EXTENTS_PER_PAGE)
    if size != PAGE * (1 + pages):
        raise Damage(f'has {size} bytes instead of the '
                     f'{PAGE * (1 + pages)} of {extents} extents', 112)
    return RecipeHeader(
        name, project[:project_length].decode('utf-8', 'replace'), scope,
        transaction, upload, image_size, zero_bytes, new_bytes, stored_bytes,
        extents, fragments, created, size)


def parse_fence(data: bytes) -> tuple[tuple[bytes, int] | None, list[Problem]]:
    """The newest record of the fence: catalog id and sequence."""
    found, problems = None, []
    if len(data) > 2 * SECTOR:
        problems.append(Problem(2 * SECTOR, 'has more than two records',
                                severity=NOTE))
    for at in (0, SECTOR):
        record = data[at:at + SECTOR]
        if not any(record):
            continue
        magic, catalog, sequence = FENCE.unpack_from(record.ljust(SECTOR))
        if len(record) < SECTOR or magic != b'GDFENCE\0' or (
                xxh3(record[:504]) != stored_checksum(record, 504)):
            # Torn by a crash, most likely; the other counts then.
            problems.append(Problem(at, 'has a record that does not verify',
                                    severity=NOTE))
        elif sequence % 2 != at // SECTOR:
            problems.append(Problem(
                at, f'has the sequence {sequence} in the other\'s place',
                severity=DAMAGE))
        elif found is None or sequence > found[1]:
            found = catalog, sequence
    return found, problems


def _load_object(text: bytes, kind: str = KIND) -> dict:
    def once(pairs):
        if len(dict(pairs)) != len(pairs):
            raise ValueError('a key is there twice')
        return dict(pairs)

    try:
        found = json.loads(text.decode('utf-8'), object_pairs_hook=once)
    except (ValueError, RecursionError) as e:
        raise Damage('is not a JSON object') from e
    if not isinstance(found, dict) or found.get('kind') != kind:
        raise Damage(f'is not of the kind {kind!r}')
    return found


def _need_checksum(found: dict):
    canonical = json.dumps(
        {k: v for k, v in found.items() if k != 'checksum'},
        sort_keys=True, separators=(',', ':'))
    if found.get('checksum') != f'{xxh3(canonical.encode()):016x}':
        raise Damage('its checksum does not agree')


def check_list(text: bytes, kind: str, what: str, longest: int):
    """Raise Damage if it is no list of images or tasks, as daemons keep."""
    if not text:
        return      # it was just made, or is to be begun
    if len(text) > longest:
        raise Damage(f'is longer than {longest} bytes')
    found = _load_object(text, kind)
    if found.get('version') != 1:
        raise Damage(f'has version {printable(str(found.get("version")))}; '
                     'this program reads 1')
    _need_checksum(found)
    entries = found.get(what)
    if not isinstance(entries, list) or not all(
            isinstance(entry, dict) for entry in entries):
        raise Damage(f'has no list of {what}')


def are_cuts(text: str, block_size: int) -> bool:
    """Whether blocks of up to `block_size` bytes can be cut like that."""
    if text == 'fixed':
        return True
    match = re.fullmatch('gear ([1-9][0-9]{0,8}) ([1-9][0-9]{0,8})', text)
    if match is None:
        return False
    minimum, average = int(match[1]), int(match[2])
    return (64 <= minimum < average < block_size
            and is_power_of_two(average))


def parse_parameters(text: bytes) -> dict:
    """The parameters in ``repository.json``, once they are valid."""
    if len(text) > MAX_JSON:
        raise Damage(f'is longer than {MAX_JSON} bytes')
    found = _load_object(text)
    # First: a newer version may have another checksum.
    major = found.get('major')
    if type(major) is int and major > MAJOR:
        raise exceptions.VersionError(
            f'repository.json has format {major}.{found.get("minor")}; this '
            f'program reads {MAJOR}.x')
    _need_checksum(found)
    texts = ('kind', 'repository_id', 'cutting', 'fingerprint', 'compare',
             'checksum')
    numbers = ('major', 'minor', 'block_size', 'group_slots',
               'segment_size')
    if set(found) != set(texts + numbers):
        raise Damage('has not the keys that it should have')
    for key in found:
        if type(found[key]) is not (str if key in texts else int):
            raise Damage(f'{key} is not of the type that it should be')
    block, segment = found['block_size'], found['segment_size']
    for key, holds in (
            ('major', major == MAJOR),
            ('minor', found['minor'] >= 0),
            ('repository_id', HEX_ID.match(found['repository_id'])),
            ('block_size', MIN_BLOCK <= block <= MAX_BLOCK
             and is_power_of_two(block)),
            ('group_slots', MIN_SLOTS <= found['group_slots'] <= MAX_SLOTS),
            ('segment_size', block <= segment <= MAX_SEGMENT
             and is_power_of_two(segment)),
            ('cutting', are_cuts(found['cutting'], block)),
            ('compare', found['compare'] == 'value' or (
                found['compare'] == 'hash'
                and is_cryptographic(found['fingerprint'])))):
        if not holds:
            raise Damage(
                f'{key} is {printable(str(found[key]))}, which cannot be')
    return found
