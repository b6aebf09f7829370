# SPDX-License-Identifier: Apache-2.0

"""One file of ``groups/`` or ``spares/``, read and verified.

Written from ``doc/source/contributor/format.rst`` alone; see ``checker.py``.
``group_check.py`` compares the extents of recipes with a group.
"""

import array
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import itertools
import struct
import typing

import lz4.block
import xxhash
import zstandard

from glance_dedup.check import cold_group
from glance_dedup.check import files
from glance_dedup.check import ondisk


@dataclasses.dataclass
class Problem:
    """Problem of some slots, or (slots == 0) of their group."""

    offset: int
    sentence: str
    slot: int = 0               # the first
    slots: int = 0              # a run of so many
    severity: str | None = None  # None: it depends on the slots' recipes
    kind: str = ''              # of entries: their common problem
    among: tuple[int, ...] = ()  # some slots of the run; empty: all of it

    def all_slots(self) -> Sequence[int]:
        """The slots with which something is wrong."""
        return self.among or range(self.slot, self.slot + self.slots)


@dataclasses.dataclass
class Group:
    """Result of one reading of a group."""

    number: int
    seed: int = 0
    slots: int = 0
    largest: int = 0
    digest: typing.Callable[[bytes, bytes], bytes] | None = None
    tells: bool = True          # a fingerprint identifies its block
    scope: bytes = ondisk.GLOBAL_SCOPE
    scopes: dict[int, bytes] = dataclasses.field(
        default_factory=dict)   # of spare copies, by slot
    exact: bool = True          # its minor version is the one known here
    has_lists: bool = False     # segments may have lists of slots
    is_cold: bool = False       # segments are in an object, and are not read
    nodedup: set[int] = dataclasses.field(
        default_factory=set)    # slots with that mark
    published: int = 0
    end: int = 0                # of a cold group: its object's length
    size: int = 0
    data: int = 0               # where the segments start
    stored: int = 0             # bytes of segments with live blocks
    covered: int = 0            # bytes that such segments take of the file
    freed: int = 0              # slots
    damaged: int = 0            # slots
    doubtful: set[int] = dataclasses.field(
        default_factory=set)    # live slots of segments with problems
    states: bytearray = dataclasses.field(default_factory=bytearray)
    lengths: array.array = dataclasses.field(
        default_factory=lambda: array.array('I'))
    fingerprints: bytearray = dataclasses.field(default_factory=bytearray)
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def problem(self, *args, **kwargs) -> None:
        """Add a :class:`Problem`, of which these are the fields."""
        self.problems.append(Problem(*args, **kwargs))

    def fingerprint(self, slot: int) -> bytes:
        """The 32 bytes that the slot's entry has; zeros if it is not read."""
        return bytes(self.fingerprints[32 * slot:32 * slot + 32])

    def hits(self, extent) -> bool:
        """Return whether the extent names a bad block, or a bad entry."""
        return ondisk.BAD in self.states[extent.slot:extent.slot +
                                         extent.blocks]

    def severity_of(self, problem: Problem, lost: bool = False) -> str:
        """Return the severity of a problem.

        :param lost: whether an image loses content by it
        """
        if problem.severity is not None:
            return problem.severity
        return ondisk.DAMAGE if (
            lost or problem.slot < self.published) else ondisk.NOTE


def _require_order(blocks, slots, plain_length):
    """Blocks lie in a segment in the order of their slots, without gaps.

    :param slots: the slots of the segment, ascending
    """
    places = {slot: place for place, slot in enumerate(slots)}
    strange = [block[0] for block in blocks if block[0] not in places]
    if strange:
        raise ondisk.Damage(f'has no block of slot {strange[0]}')
    before, end = -1, 0
    for slot, at, length, _ in blocks:
        # Blocks between, that are not live any more, had a byte or more.
        between = places[slot] - before - 1
        if at < end + between or (at > end and not between):
            raise ondisk.Damage(f'the block of slot {slot} does not lie where '
                                'the one before it ends')
        before, end = places[slot], at + length
    between = len(slots) - before - 1
    if plain_length < end + between or (
            plain_length > end and not between):
        raise ondisk.Damage(f'has {plain_length} plain bytes, but its blocks '
                            f'have {end}')


def _listed_slots(group, data, count, first) -> tuple[int, ...]:
    """The list of a segment, verified.

    :param data: header and all bytes after it
    """
    size = 2 * count
    raw = data[ondisk.SEGMENT_HEADER:ondisk.SEGMENT_HEADER + size]
    if not count or len(raw) < size:
        raise ondisk.Damage(f'has a list of {count} slots')
    hasher = xxhash.xxh3_64(data[:20], seed=group.seed)
    hasher.update(raw)
    if hasher.intdigest() % (1 << 32) != int.from_bytes(data[20:24],
                                                        'little'):
        raise ondisk.Damage("the checksum of its list of slots does not agree")
    slots = struct.unpack(f'<{count}H', raw)
    if slots[0] != first or slots[-1] >= group.slots or any(
            one >= next_one for one, next_one in itertools.pairwise(slots)):
        raise ondisk.Damage('its list of slots does not ascend within the '
                            f'group, from slot {first}')
    return slots


def _check_zeros(group, head, table, sectors):
    if not group.exact:
        return
    areas = [(3 * ondisk.SECTOR, head[3 * ondisk.SECTOR:], ondisk.DAMAGE)]
    entries = ondisk.ENTRY * ondisk.ENTRIES_PER_SECTOR
    for at in range(0, ondisk.SECTOR * sectors, ondisk.SECTOR):
        areas.append((ondisk.PAGE + at + entries,
                      table[at + entries:at + ondisk.SECTOR], ondisk.DAMAGE))
    # The format does not restrict these two.
    last = ondisk.SECTOR * (sectors - 1)
    at = last + ondisk.ENTRY * (
        group.slots - ondisk.ENTRIES_PER_SECTOR * (sectors - 1))
    areas.append((ondisk.PAGE + at, table[at:last + entries], ondisk.NOTE))
    areas.append((ondisk.PAGE + ondisk.SECTOR * sectors,
                  table[ondisk.SECTOR * sectors:], ondisk.NOTE))
    for offset, data, severity in areas:
        rest = data.lstrip(b'\0')
        if rest:
            group.problem(offset + len(data) - len(rest),
                          'has a byte here that should be zero',
                          severity=severity)


class GroupReader:
    """Reads groups, one reading at a time.

    :param repository_id: the id of all groups; None if it is not known
    :param fingerprint: the digest's name; None if it is not known
    :param block_size: the largest block's bytes; None if it is not known
    :param advance: called with the bytes read and the file's name
    :param has_feature: returns whether the repository uses a feature of the
        format; None: the features of every repository
    :ivar scopes: scopes that a spare copy may be of, the likeliest first;
        its file does not name its scope
    """

    def __init__(self, repository_id, fingerprint, block_size, advance,
                 has_feature: Callable[[str | None], bool]):
        self.repository_id = repository_id
        self.fingerprint = fingerprint
        self.block_size = block_size or ondisk.MAX_BLOCK
        self.advance = advance
        self.has_feature = has_feature
        self.scopes = [ondisk.GLOBAL_SCOPE]
        self.decompressor = zstandard.ZstdDecompressor(
            max_window_size=ondisk.MAX_WINDOW)

    def look(self, directory: int, number: int,
             only: set[int] | None = None, spare: bool = False) -> Group:
        """Read a group; of its segments only those with slots in `only`.

        :param spare: it is a file of ``spares/``

        :raises Gone: if there is no such group
        :raises Damage: if its slots cannot be judged
        """
        group = Group(number)
        name = f'{number:08x}'
        file = f'spares/{name}' if spare else f'groups/{name}'
        with files.File(directory, name, file) as f:
            head = f.read(0, ondisk.PAGE)
            self._read_header(group, head, spare)
            self._read_records(group, head)
            group.size = f.size()
            if group.is_cold:
                cold_group.check_lengths(group)
            elif group.end > group.size:
                group.problem(
                    group.size, f'ends here, but at its last sync point '
                    f'it had {group.end} bytes', severity=ondisk.DAMAGE)
            table = f.read(ondisk.PAGE, group.data - ondisk.PAGE)
            sectors = -(-group.slots // ondisk.ENTRIES_PER_SECTOR)
            if len(table) < ondisk.SECTOR * sectors:
                group.problem(
                    group.size, 'ends inside its fingerprint store',
                    0, group.slots)
            table = table.ljust(group.data - ondisk.PAGE, b'\0')
            _check_zeros(group, head, table, sectors)
            segments = self._read_entries(group, table)
            if group.nodedup and not self.has_feature(ondisk.NODEDUP):
                group.problem(
                    ondisk.PAGE, 'an entry has the mark nodedup, but '
                    f'features/{ondisk.NODEDUP} is missing: make that file '
                    'again', severity=ondisk.DAMAGE)
            self._read_segments(group, f, segments, only)
        return group

    def scope_of_group(self, directory: int, number: int) -> bytes:
        """The scope of a group, by its header alone.

        :raises Gone, Damage: as for look
        """
        group = Group(number)
        with files.File(directory, f'{number:08x}',
                        f'groups/{number:08x}') as f:
            self._read_header(group, f.read(0, ondisk.PAGE), False)
        return group.scope

    def _read_header(self, group, head, spare):
        if len(head) < ondisk.PAGE:
            raise ondisk.Damage('ends inside its header', len(head))
        (magic, major, minor, number, repository_id, scope, slots, largest,
         digest, _, object_id) = ondisk.GROUP_HEADER.unpack_from(head)
        if magic != b'GDGROUP\0':
            raise ondisk.Damage('does not start with the magic of a group', 0)
        group.seed = ondisk.stored_checksum(head, 504)
        if ondisk.xxh3(head[:504]) != group.seed:
            raise ondisk.Damage('the checksum of its header does not agree',
                                504)
        if major not in ondisk.GROUP_MAJORS:
            raise ondisk.Damage(f'has format {major}.{minor}; this program '
                                f'reads {ondisk.MAJOR}.x to {ondisk.COLD}.x',
                                8)
        group.has_lists = major >= ondisk.WITH_LISTS
        group.is_cold = major == ondisk.COLD
        if number != group.number:
            raise ondisk.Damage(f'is group {number:08x}', 12)
        if self.repository_id not in (None, repository_id):
            raise ondisk.Damage('is of the repository '
                                f'{repository_id.hex()}', 16)
        if (scope == ondisk.SPARE_SCOPE) != spare:
            raise ondisk.Damage('is not of spare copies' if spare
                                else 'is of spare copies', 32)
        group.scope = scope
        if group.is_cold:
            cold_group.require_header(object_id, spare)
        feature = ondisk.GROUP_MAJORS[major]
        if not self.has_feature(feature):
            group.problem(
                8, f'has format {major}.x, but features/{feature} is missing: '
                'make that file again', severity=ondisk.DAMAGE)
        if not ondisk.MIN_SLOTS <= slots <= ondisk.MAX_SLOTS:
            raise ondisk.Damage(f'has {slots} slots', 48)
        if not 1 <= largest <= self.block_size:
            raise ondisk.Damage(f'has blocks of up to {largest} bytes', 52)
        name = digest.rstrip(b'\0').decode('ascii', 'replace')
        group.digest = ondisk.digest_of(name)
        if group.digest is None:
            raise ondisk.Damage('has fingerprints of an unknown digest: '
                                + ondisk.printable(name), 56)
        if self.fingerprint not in (None, name):
            raise ondisk.Damage(f'has fingerprints by {name}', 56)
        group.tells = ondisk.is_cryptographic(name)
        group.exact = minor <= ondisk.MINOR
        group.slots = slots
        group.largest = largest
        sectors = -(-slots // ondisk.ENTRIES_PER_SECTOR)
        group.data = -(-(ondisk.PAGE + ondisk.SECTOR * sectors)
                       // ondisk.PAGE) * ondisk.PAGE

    def _read_records(self, group, head):
        valid, zeros = {}, set()
        for i in (0, 1):
            offset = ondisk.SECTOR * (i + 1)
            record = head[offset:offset + ondisk.SECTOR]
            if not any(record):
                zeros.add(i)
            elif ondisk.xxh3(record[:504],
                             group.seed) == ondisk.stored_checksum(
                    record, 504):
                if record[7] >> 7:
                    group.problem(
                        offset, f'published record {i} has the impossible '
                        f'sequence {ondisk.RECORD.unpack_from(record)[0]}',
                        severity=ondisk.DAMAGE)
                    continue
                valid[i] = ondisk.RECORD.unpack_from(record)
                if valid[i][0] % 2 != i:
                    group.problem(
                        offset, f'published record {i} has the sequence '
                        f'{valid[i][0]}', severity=ondisk.DAMAGE)
            else:
                group.problem(
                    offset, f'the checksum of published record {i} does '
                    'not agree', severity=ondisk.DAMAGE)
        if not valid:
            return
        which = max(valid, key=lambda i: valid[i][0])
        (sequence, _, published, flags, group.end, codec,
         level) = valid[which]
        offset = ondisk.SECTOR * (which + 1)
        if 1 - which in zeros and sequence > 1:
            group.problem(
                ondisk.SECTOR * (2 - which),
                f'published record {1 - which} is '
                'lost', severity=ondisk.DAMAGE)
        if published > group.slots:
            group.problem(
                offset + 16, f'{published} of {group.slots} slots are '
                'published', severity=ondisk.DAMAGE)
        group.published = min(published, group.slots)
        # Without published slots it may only keep its number.
        if flags & ondisk.POISONED and published:
            group.problem(
                offset + 20, 'is poisoned: writing to it failed once, and '
                'nothing is appended to it any more', severity=ondisk.NOTE)
        if flags & ~(ondisk.POISONED | ondisk.UNSETTLED) and group.exact:
            group.problem(offset + 20, f'has unknown flags: {flags:#x}',
                          severity=ondisk.NOTE)
        if level & ~ondisk.SIMILAR > ondisk.MAX_LEVEL.get(codec, -1) and (
                group.exact):
            group.problem(
                offset + 32, f'was compressed anew with an unknown codec or '
                f'level: {codec}, {level}', severity=ondisk.NOTE)

    def _read_entries(self, group, table) -> dict[tuple, list[tuple]]:
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
            sector, place = divmod(slot, ondisk.ENTRIES_PER_SECTOR)
            at = ondisk.SECTOR * sector + ondisk.ENTRY * place
            sentence = self._read_entry(
                group, slot, table[at:at + ondisk.ENTRY], segments)
            if sentence is None:
                run = None
            elif (run is not None and run.kind == sentence
                    and slot != group.published):
                run.slots += 1
                run.sentence = (f'the entries of slots {run.slot} to '
                                f'{slot}: {sentence}')
            else:
                run = Problem(
                    ondisk.PAGE + at, f'the entry of slot {slot}: {sentence}',
                    slot, 1, kind=sentence)
                group.problems.append(run)
        return segments

    def _read_entry(self, group, slot, raw, segments) -> str | None:
        if raw == ondisk.ENTRY_ZEROS:
            if slot < group.published:
                group.states[slot] = ondisk.BAD
                return 'is empty, but was published'
            return None
        (fingerprint, checksum, offset, place,
         own) = ondisk.ENTRY_FIELDS.unpack(raw)
        group.states[slot] = ondisk.BAD
        seed = (group.seed + slot) % (1 << 64)
        if ondisk.xxh3(raw[:52], seed) % (1 << 32) != own:
            return 'its checksum does not agree'
        state = place >> 61
        if state in (ondisk.VOID, ondisk.FREED):
            group.states[slot] = state
            group.freed += state == ondisk.FREED
            if any(raw[:44]) or place != state << 61:
                return f'is {ondisk.STATE_NAMES[state]}, but has fields'
            return None
        if state not in (ondisk.LIVE, ondisk.DAMAGED):
            return f'has the unknown state {state}'
        at = place & 0xfffff
        length = place >> 20 & 0x1ffff
        stored = place >> 37 & 0x1fffff
        codec = place >> 58 & 3
        if place >> 60 & 1:
            group.nodedup.add(slot)
        if not 1 <= length <= group.largest:
            return f'has a block of {length} bytes'
        if offset < group.data:
            return f'its segment lies at {offset}, before all segments'
        if at + length > ondisk.MAX_SEGMENT or stored > ondisk.MAX_SEGMENT:
            return 'its segment is too large'
        if codec > ondisk.CODEC_ZSTD:
            return f'has the unknown codec {codec}'
        group.lengths[slot] = length
        group.fingerprints[32 * slot:32 * slot + 32] = fingerprint
        if state == ondisk.DAMAGED:
            group.states[slot] = ondisk.DAMAGED
            group.damaged += 1
            return None
        group.states[slot] = ondisk.GOOD
        segments.setdefault((offset, stored, codec), []).append(
            (slot, at, length, checksum))
        return None

    def _read_segments(self, group, f, segments, only):
        """Verify all segments with live blocks, or those with `only`."""
        end, untold, told = group.data, group.data, 0
        for (offset, stored, codec), blocks in sorted(segments.items()):
            size = ondisk.SEGMENT_HEADER + stored
            group.stored += size
            group.covered += max(0, offset + size - max(end, offset))
            before, end = end, max(end, offset + size)
            if only is not None and not any(b[0] in only for b in blocks):
                continue
            problems = len(group.problems)
            try:
                if group.is_cold:
                    cold_group.judge_segment(group, offset, stored, codec,
                                             blocks, before)
                else:
                    self._read_segment(group, f, offset, stored, codec,
                                       blocks)
            except ondisk.Damage as e:
                for slot, _, _, _ in blocks:
                    group.states[slot] = ondisk.BAD
                first, last = blocks[0][0], blocks[-1][0]
                group.problem(
                    offset if e.offset is None else e.offset,
                    f'the segment of slots {first} to {last}: {e.sentence}',
                    first, last - first + 1,
                    among=tuple(block[0] for block in blocks))
            if len(group.problems) > problems:
                group.doubtful.update(block[0] for block in blocks)
            untold += 0 if group.is_cold else size
            if untold >= ondisk.MAX_SEGMENT and only is None:
                self.advance(untold, f.file)
                told += untold
                untold = 0
        if only is None:
            self.advance(max(0, group.size - told), f.file)

    def _read_segment(self, group, f, offset, stored, codec, blocks):
        data = f.read_ahead(offset, ondisk.SEGMENT_HEADER + stored)
        if len(data) < ondisk.SEGMENT_HEADER + stored:
            raise ondisk.Damage('the file ends inside it')
        (magic, its_codec, layout, count, first, plain_length, its_stored, _,
         checksum) = ondisk.SEGMENT_FIELDS.unpack_from(data)
        if magic != b'GDSG':
            raise ondisk.Damage('has not the magic of one')
        hasher = xxhash.xxh3_64(data[:24], seed=group.seed)
        hasher.update(data[ondisk.SEGMENT_HEADER:])
        intact = hasher.intdigest() == checksum
        if its_codec != codec or its_stored != stored:
            raise ondisk.Damage(
                'its entries say otherwise of its codec or its '
                'length')
        slots = self._slots_of(group, data, layout, count, first)
        packed = data[ondisk.SEGMENT_HEADER
                      + (2 * count if isinstance(slots, tuple) else 0):]
        if plain_length > ondisk.MAX_SEGMENT or len(packed) > plain_length or (
                codec == ondisk.CODEC_NONE and len(packed) != plain_length):
            raise ondisk.Damage(f'has {plain_length} bytes in {len(packed)}')
        _require_order(blocks, slots, plain_length)
        plain = self._decode(codec, packed, plain_length)
        for slot, at, length, checksum in blocks:
            block = plain[at:at + length]
            severity = None
            if ondisk.xxh3(block) != checksum:
                sentence = 'its bytes do not have its checksum'
            elif self._has_fingerprint(group, slot, block):
                continue
            elif group.scope == ondisk.SPARE_SCOPE:
                # Its images and groups may be gone; or the copy is bad.
                sentence = ('its bytes have its fingerprint in no scope that '
                            'is known here')
                severity = ondisk.NOTE
            else:
                sentence = 'its bytes do not have its fingerprint'
            group.states[slot] = ondisk.BAD
            group.problem(offset, f'the block of slot {slot}: {sentence}',
                          slot, 1, severity)
        if not intact and all(
                group.states[block[0]] == ondisk.GOOD for block in blocks):
            # Each block has been judged by its own; so nothing is lost.
            sentence = (f'the segment of slots {slots[0]} to '
                        f'{slots[-1]}: its checksum does not agree')
            severity = ondisk.DAMAGE
            if blocks[0][0] >= group.published:
                severity = ondisk.NOTE
            elif sum(block[2] for block in blocks) < plain_length:
                # A crash, or reported damage, may have spoiled these.
                sentence += '; some of its blocks are needed no more'
                severity = ondisk.NOTE
            group.problem(offset, sentence, severity=severity)

    def _slots_of(self, group, data, layout, count, first
                  ) -> Sequence[int]:
        """The slots of a segment; a list of them is a tuple."""
        if group.has_lists and layout == ondisk.LISTED:
            return _listed_slots(group, data, count, first)
        if group.has_lists and layout:
            raise ondisk.Damage(f'has the unknown layout {layout}')
        if not count or first + count > group.slots:
            raise ondisk.Damage(
                f'says that it has {count} blocks from slot {first}')
        return range(first, first + count)

    def _has_fingerprint(self, group, slot, block) -> bool:
        wanted = group.fingerprint(slot)
        if group.scope != ondisk.SPARE_SCOPE:
            return group.digest(group.scope, block) == wanted
        for number, scope in enumerate(self.scopes):
            if group.digest(scope, block) == wanted:
                group.scopes[slot] = scope
                # The next copy is of the same, most likely.
                self.scopes.insert(0, self.scopes.pop(number))
                return True
        return False

    def _decode(self, codec, stored, plain_length) -> memoryview:
        try:
            if codec == ondisk.CODEC_NONE:
                return stored
            if codec == ondisk.CODEC_LZ4:
                plain = lz4.block.decompress(
                    stored, uncompressed_size=plain_length)
            else:
                told = zstandard.get_frame_parameters(stored).content_size
                if told not in (zstandard.CONTENTSIZE_UNKNOWN,
                                plain_length):
                    raise ondisk.Damage(f'decodes to {told} bytes instead of '
                                        f'{plain_length}')
                plain = self.decompressor.decompress(
                    stored, max_output_size=plain_length,
                    allow_extra_data=False)
        except (lz4.block.LZ4BlockError, zstandard.ZstdError,
                ValueError) as e:
            raise ondisk.Damage('its bytes do not decode') from e
        if len(plain) != plain_length:
            raise ondisk.Damage(f'decodes to {len(plain)} bytes instead of '
                                f'{plain_length}')
        return memoryview(plain)
