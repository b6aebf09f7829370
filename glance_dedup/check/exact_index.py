# SPDX-License-Identifier: Apache-2.0

"""The exact index: sorted records, from fingerprints to addresses of blocks.

Written from ``format-derived.rst`` alone; see ``checker.py``.

Each file is read once, from its beginning to its end. What the index should
have is sorted in the same order (``sorting.py``), and both are compared.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
import heapq
import itertools
import os
import re
import struct
import typing

from glance_dedup.base import sorting
from glance_dedup.check import files
from glance_dedup.check import group_reader
from glance_dedup.check import ondisk

NAME = re.compile('(shard|run|gone|pairs|cursors|new)-([0-9a-f]{2})-'
                  r'([0-9a-f]{4})\.([0-9a-f]{16})\Z')
KINDS = {'shard': 1, 'run': 2, 'gone': 3, 'pairs': 4, 'cursors': 5}
SIZES = {'shard': 13, 'run': 13, 'gone': 13, 'pairs': 16, 'cursors': 8}
MAX_BITS = 16
MAJOR = 1
HEAD = struct.Struct('<8sHHI16sQIIQQI4xQ')
HEAD_BYTES, HEAD_CHECKED = 512, 504
FRAME_ITEMS = 65528             # bytes of a frame's items, at most
PACKED_FRAME, PACKED_ITEMS = 32768, 4096
PACKED_HEAD = struct.Struct('<QIBB2x')
CURSOR = struct.Struct('<II')
PAIR = struct.Struct('<QQ')
ADDRESSES = range(1 << 15, ondisk.MAX_GROUP << 15)
# Behind the first 8 bytes of a fingerprint and an address: the kind of slot.
ITEM = 14
BLOCK, EXPECTED, SHARD, RUN, MARKED = b'\0', b'\1', b'\2', b'\3', b'\4'

Find = Callable[..., None]


class Name(typing.NamedTuple):
    """Parsed name of a file."""

    kind: str
    bits: int
    shard: int
    number: int


class NewerError(ondisk.Damage):
    """The file has a newer major version."""


def parse(name: str) -> Name | None:
    """Return the parsed name; None: no file of the index has it."""
    match = NAME.match(name)
    if match is None:
        return None
    found = Name(match[1], *(int(digits, 16) for digits in match.groups()[1:]))
    return found if found.bits <= MAX_BITS and (
        found.shard < 1 << found.bits) else None


def resolve(shards: dict[tuple[int, int], int]
            ) -> tuple[set[tuple[int, int]], bool]:
    """Select the shards that count; find whether they cover all fingerprints.

    :param shards: generations, by bits and shard
    """
    below = collections.Counter(
        (bits, shard >> own - bits) for own, shard in shards
        for bits in range(own + 1))

    def is_covered(bits: int, shard: int, least: int) -> bool:
        if shards.get((bits, shard), -1) >= least:
            return True
        return below[bits, shard] > 0 and bits < MAX_BITS and all(
            is_covered(bits + 1, 2 * shard + half, least) for half in (0, 1))

    found: set[tuple[int, int]] = set()
    left = [(0, 0)]
    whole = True
    while left:
        bits, shard = left.pop()
        halves = [(bits + 1, 2 * shard), (bits + 1, 2 * shard + 1)]
        own = shards.get((bits, shard))
        if own is not None and not (bits < MAX_BITS and all(
                is_covered(*half, own) for half in halves)):
            found.add((bits, shard))
        elif below[bits, shard] and bits < MAX_BITS:
            left += halves
        else:
            whole = False
    return found, whole


class IndexFile:
    """One file of the index, open.

    :raises Gone: there is none any more
    :raises Damage: its head is wrong
    """

    def __init__(self, directory: int, base: str, name: Name) -> None:
        self._name = name
        self._file = files.File(directory, base, f'index/{base}')
        try:
            self._read_head()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._file.fd)

    def _read_head(self) -> None:
        head = self._file.read(0, HEAD_BYTES)
        if len(head) < HEAD_BYTES or head[:8] != b'GDINDEX\0':
            raise ondisk.Damage('is no file of the index', 0)
        (_, major, _, kind, self.catalog_id, number, bits, shard, self._items,
         self._seed, _, told) = HEAD.unpack_from(head)
        self._packed = self._name.kind == 'shard'
        if major > MAJOR:
            raise NewerError(f'has version {major}', 8)
        if ondisk.CHECKSUM.unpack_from(head, HEAD_CHECKED)[0] != (
                ondisk.xxh3(head[:HEAD_CHECKED])):
            raise ondisk.Damage('the checksum of its head is wrong', 0)
        if (kind, bits, shard, number) != (
                KINDS[self._name.kind], *self._name[1:]):
            raise ondisk.Damage('had another name', 0)
        self._size = SIZES[self._name.kind]
        self._most = FRAME_ITEMS // self._size
        frames = -(-self._items // self._most)
        self._length = told if self._packed else (
            HEAD_BYTES + self._items * self._size + 8 * frames)
        if self._file.size() != self._length:
            raise ondisk.Damage(f'has {self._file.size()} bytes instead of '
                                f'{self._length}')

    def items(self) -> Iterator[bytes]:
        """All items, once they were verified.

        :raises Damage: at the first that is wrong
        """
        seen, before = 0, None
        for at, data in self._frames():
            items = unpack(data, at) if self._packed else [
                data[begin:begin + self._size]
                for begin in range(0, len(data), self._size)]
            for i, item in enumerate(items):
                if not self._is_good(item, before):
                    raise ondisk.Damage(
                        'has an item that cannot be there',
                        at if self._packed else at + i * self._size)
                yield item
                before = item
            seen += len(items)
        if seen != self._items:
            raise ondisk.Damage(f'has {seen} items instead of {self._items}',
                                48)

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each frame, without its checksum."""
        full = PACKED_FRAME if self._packed else self._most * self._size + 8
        for frame, at in enumerate(range(HEAD_BYTES, self._length, full)):
            wanted = min(full, self._length - at)
            data = self._file.read(at, wanted)
            if len(data) != wanted or wanted < 8 or ondisk.CHECKSUM.unpack(
                    data[-8:])[0] != ondisk.xxh3(
                        data[:-8], self._seed + frame & (1 << 64) - 1):
                raise ondisk.Damage(f'the checksum of frame {frame} is wrong',
                                    at)
            yield at, data[:-8]

    def _is_good(self, item: bytes, before: bytes | None) -> bool:
        if self._name.kind == 'pairs':
            other, kept = PAIR.unpack(item)
            return other in ADDRESSES and kept in ADDRESSES and other != kept
        if self._name.kind == 'cursors':
            group, slots = CURSOR.unpack(item)
            return (0 < group < ondisk.MAX_GROUP
                    and slots <= ondisk.MAX_SLOTS
                    and (before is None
                         or CURSOR.unpack(before)[0] < group))
        if (address_of(item) not in ADDRESSES
                or int.from_bytes(item[:2]) >> MAX_BITS - self._name.bits
                != self._name.shard):
            return False
        if before is None or before[:8] < item[:8]:
            return True
        return (self._name.kind != 'shard' and before[:8] == item[:8]
                and address_of(before) < address_of(item))


def unpack(frame: bytes, at: int) -> list[bytes]:
    """The records of a packed frame, which lies at this offset.

    :raises Damage: if it is no such frame
    """
    if len(frame) < PACKED_HEAD.size:
        raise ondisk.Damage('has a frame that ends in its head', at)
    key, count, key_bits, address_bits = PACKED_HEAD.unpack_from(frame)
    size = key_bits + address_bits
    room = 8 * (len(frame) - PACKED_HEAD.size)
    if (not 1 <= count <= PACKED_ITEMS or key_bits > 64 or address_bits > 40
            or count * size > room):
        raise ondisk.Damage('has a frame that cannot be', at)
    records = []
    for i in range(count):
        byte, bit = divmod(i * size, 8)
        byte += PACKED_HEAD.size
        bits = int.from_bytes(frame[byte:byte + 14], 'little') >> bit
        key = key + (bits & (1 << key_bits) - 1) & (1 << 64) - 1
        address = bits >> key_bits & (1 << address_bits) - 1
        records.append(key.to_bytes(8, 'big') + address.to_bytes(5, 'little'))
    return records


def address_of(record: bytes) -> int:
    """The address in a record."""
    return int.from_bytes(record[8:13], 'little')


def _item(fingerprint: bytes, address: int, what: bytes) -> bytes:
    return fingerprint[:8] + address.to_bytes(5, 'big') + what


class Index:
    """Compares the index with the blocks of the groups.

    :param directory: ``index/``, open; None: there is none
    :param names: the names in it
    :param catalog_id: the index is judged if it is of this catalog; None: not
    :param exact: whether equal fingerprints are equal blocks, so that all
        pairs must be known
    :param find: called with severity, sentence, file and offset
    :ivar records: how many records the shards have, once it was judged
    :ivar stale: how many of them are of blocks that are no more
    """

    def __init__(self, directory: int | None, names: list[str],
                 catalog_id: bytes | None, exact: bool, find: Find) -> None:
        self.records = self.stale = self._marked = 0
        self._directory = -1 if directory is None else directory
        self._exact = exact
        self._find = find
        self._catalog_id = catalog_id
        self._blocks = sorting.Sorted(ITEM)
        self._cursors: dict[int, int] = {}
        self._names: dict[Name, str] = {}
        self._whole = False
        if directory is not None and catalog_id is not None:
            self._list(names)
            self._read_cursors()

    def close(self) -> None:
        """Forget everything."""
        self._blocks.close()

    def _list(self, names: list[str]) -> None:
        for name in names:
            found = parse(name)
            if found is None:
                self._find(ondisk.NOTE, 'has an unknown name', f'index/{name}')
            elif found.kind != 'new':
                self._names[found] = name

    def _of_kind(self, *kinds: str) -> list[Name]:
        return sorted(name for name in self._names if name.kind in kinds)

    def _open(self, name: Name) -> IndexFile | None:
        """A file of this catalog's; None: not, or it was reported."""
        file = f'index/{self._names[name]}'
        try:
            found = IndexFile(self._directory, self._names[name], name)
        except files.Gone:
            return None
        except NewerError as e:
            self._find(ondisk.NOTE, f'{e.sentence}, which this program does '
                       'not know', file)
            return None
        except ondisk.Damage as e:
            self._find(ondisk.DAMAGE, e.sentence, file, e.offset)
            return None
        if found.catalog_id != self._catalog_id:
            found.close()
            self._find(ondisk.NOTE, 'is of another catalog: merging makes the '
                       'index anew', file)
            return None
        return found

    def _items_of(self, name: Name) -> Iterator[bytes]:
        """The items of a file, up to the first that is wrong."""
        found = self._open(name)
        if found is None:
            self._whole = False
            return
        try:
            yield from found.items()
        except files.Gone:
            self._whole = False
        except ondisk.Damage as e:
            self._whole = False
            self._find(ondisk.DAMAGE, e.sentence, f'index/{self._names[name]}',
                       e.offset)
        finally:
            found.close()

    def _read_cursors(self) -> None:
        cursors = self._of_kind('cursors')
        if cursors:
            newest = max(cursors, key=lambda name: name.number)
            self._whole = True
            self._cursors = dict(CURSOR.unpack(item)
                                 for item in self._items_of(newest))

    def slots(self, group: int) -> int:
        """Return the number of a group's slots that the index should have."""
        return self._cursors.get(group, 0)

    def look_up(self, group: group_reader.Group) -> None:
        """Note all blocks of a group, to be looked for."""
        if not self._names:
            return
        expected = self.slots(group.number)
        for slot in range(group.slots):
            if group.states[slot] == ondisk.GOOD:
                self._blocks.add(_item(
                    group.fingerprint(slot), group.number << 15 | slot,
                    MARKED if slot in group.nodedup
                    else EXPECTED if slot < expected else BLOCK))

    def judge(self, known: typing.Iterable[int], complete: bool) -> None:
        """Report the problems, once all groups were looked up.

        :param known: the other blocks of the catalog's pairs, in any order
        :param complete: whether all groups that could be read were looked up
        """
        if not self._names:
            return
        generations: dict[tuple[int, int], int] = {}
        for name in self._of_kind('shard'):
            generations[name[1:3]] = max(
                name.number, generations.get(name[1:3], 0))
        counted, covers = resolve(generations)
        self._whole &= covers
        if not covers:
            self._find(ondisk.NOTE, 'does not cover all fingerprints: merging '
                       'makes the index anew', 'index')
        shards = [name for name in self._of_kind('shard')
                  if name[1:3] in counted
                  and name.number == generations[name[1:3]]]
        missing, unpaired = self._compare(shards)
        known_here = self._known(known)
        if self._marked:
            self._find(ondisk.DAMAGE, f'has records of {self._marked} blocks '
                       'with the mark nodedup, so merging would join them',
                       'index')
        if not self._whole:
            return
        if missing:
            self._find(ondisk.NOTE, f'has no record for {missing} blocks that '
                       'should have one', 'index')
        forgotten = self._forgotten(unpaired, known_here)
        if forgotten and self._exact:
            self._find(ondisk.NOTE, f'has {forgotten} blocks twice that are '
                       'not known to be duplicates', 'index')
        if self.stale and complete:
            self._find(ondisk.NOTE, f'has {self.stale} records of blocks that '
                       'are no more', 'index')

    def _tagged(self, names: list[Name], what: bytes) -> Iterator[bytes]:
        for record in itertools.chain.from_iterable(
                map(self._items_of, names)):
            yield _item(record, address_of(record), what)

    def _compare(self, shards: list[Name]) -> tuple[int, sorting.Sorted]:
        """Return how many blocks lack a record, and addresses without pair."""
        shards.sort(key=lambda name: name.shard << MAX_BITS - name.bits)
        runs = [self._tagged([name], RUN) for name in self._of_kind('run')]
        missing, matched = 0, 0
        unpaired = sorting.Sorted(5)
        for _, group in itertools.groupby(
                heapq.merge(self._blocks.items(),
                            self._tagged(shards, SHARD), *runs),
                key=lambda item: item[:8]):
            found: dict[bytes, set[bytes]] = {
                what: set() for what in (BLOCK, EXPECTED, SHARD, RUN, MARKED)}
            for item in group:
                found[item[13:]].add(item[8:13])
            self.records += len(found[SHARD])
            live = found[BLOCK] | found[EXPECTED]
            matched += len(found[SHARD] & (live | found[MARKED]))
            self._marked += len((found[SHARD] | found[RUN]) & found[MARKED])
            if not found[SHARD] and not found[RUN]:
                missing += len(found[EXPECTED])
            elif found[SHARD] <= live and not found[RUN]:
                for address in found[EXPECTED] - found[SHARD]:
                    unpaired.add(address)
        self.stale = self.records - matched
        return missing, unpaired

    def _known(self, known: typing.Iterable[int]) -> sorting.Sorted:
        found = sorting.Sorted(5)
        for address in known:
            found.add(address.to_bytes(5, 'big'))
        for name in self._of_kind('pairs'):
            for item in self._items_of(name):
                found.add(PAIR.unpack(item)[0].to_bytes(5, 'big'))
        for name in self._of_kind('gone'):
            collections.deque(self._items_of(name), maxlen=0)
        return found

    @staticmethod
    def _forgotten(unpaired: sorting.Sorted, known: sorting.Sorted) -> int:
        """Return the number of addresses only in the first."""
        count = 0
        others = known.items()
        other = next(others, b'\xff' * 6)
        for address in unpaired.items():
            while other < address:
                other = next(others, b'\xff' * 6)
            count += other != address
        unpaired.close()
        known.close()
        return count
