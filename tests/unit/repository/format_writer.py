# SPDX-License-Identifier: Apache-2.0

"""Writes repositories, byte by byte, as the format document describes them.

It is independent of the engine, so that the checker can be tested without it,
and of the checker, so that a mistake in one of the two shows.  Nothing is
synced: these are for tests.
"""

import functools
import hashlib
import json
import operator
import os
import pathlib
import struct

import lz4.block
import plyvel
import xxhash
import zstandard

KEY = hashlib.sha256(b'key').hexdigest().encode()

EMPTY, LIVE, VOID, FREED, DAMAGED = range(5)
NONE, LZ4, ZSTD = range(3)


def xxh3(data: bytes, seed: int = 0) -> int:
    return xxhash.xxh3_64(data, seed=seed % 2**64).intdigest()


def sha256(block: bytes) -> bytes:
    return hashlib.sha256(block).digest()


def some_id(text: str) -> bytes:
    """Return 16 bytes that replace random ones."""
    return hashlib.sha256(text.encode()).digest()[:16]


class Group:
    """A group with given content; `save` writes it."""

    def __init__(self, repository: 'Repository', number: int, *,
                 slots: int | None = None, fingerprint: str | None = None,
                 compute=sha256, minor: int = 0, major: int = 1,
                 scope: bytes = bytes(16), directory: str = 'groups',
                 object_id: bytes = bytes(16)):
        self.repository = repository
        self.directory = directory
        self.number = number
        self.slots = slots or repository.group_slots
        self.compute = compute
        name = fingerprint or repository.fingerprint
        header = struct.pack(
            '<8sHHI16s16sII16s16x16s', b'GDGROUP\0', major, minor, number,
            repository.repository_id, scope, self.slots,
            repository.block_size, name.encode(), object_id
        ).ljust(504, b'\0')
        self.seed = xxh3(header)
        self.header = header + struct.pack('<Q', self.seed)
        self.sectors = (self.slots + 8) // 9
        self.data_start = (4096 + 512 * self.sectors + 4095) // 4096 * 4096
        self.entries: dict[int, bytes] = {}
        self.blocks: dict[int, bytes] = {}
        self.data = b''
        self.next = 0
        self.sequence = 0
        self.generation = 0
        self.records = [bytes(512), bytes(512)]

    @property
    def path(self) -> pathlib.Path:
        return self.repository.path / self.directory / f'{self.number:08x}'

    def entry(self, slot: int, fields: bytes = b'', *, state=LIVE) -> None:
        if state in (VOID, FREED):
            fields = bytes(44) + struct.pack('<Q', state << 61)
        own = xxh3(fields, self.seed + slot) % 2**32
        self.entries[slot] = fields + struct.pack('<I', own)

    def append(self, blocks: list[bytes], codec: int = NONE, *,
               plain: bytes | None = None, stored: bytes | None = None,
               states: dict[int, int] | None = None,
               fingerprints: list[bytes] | None = None,
               nodedup: bool = False) -> int:
        """Store a segment of these blocks; returns their first slot."""
        first = self.next
        if plain is None:
            plain = b''.join(blocks)
        if stored is None:
            stored = {
                NONE: lambda: plain,
                LZ4: lambda: lz4.block.compress(plain, store_size=False),
                ZSTD: lambda: zstandard.ZstdCompressor().compress(plain),
            }[codec]()
        start = self.data_start + len(self.data)
        head = struct.pack('<4sBBHIIII', b'GDSG', codec, 0, len(blocks),
                           first, len(plain), len(stored), 0)
        self.data += head + struct.pack(
            '<Q', xxh3(head + stored, self.seed)) + stored
        at = 0
        for i, block in enumerate(blocks):
            slot = first + i
            state = (states or {}).get(i, LIVE)
            place = (at | len(block) << 20 | len(stored) << 37
                     | codec << 58 | nodedup << 60 | state << 61)
            fingerprint = (fingerprints[i] if fingerprints
                           else self.compute(block))
            self.entry(slot, struct.pack(
                '<32sQIQ', fingerprint, xxh3(block), start, place),
                state=state)
            self.blocks[slot] = block
            at += len(block)
        self.next += len(blocks)
        return first

    def garbage(self, data: bytes) -> None:
        """Bytes that no entry names."""
        self.data += data

    def publish(self, count: int | None = None, *, flags: int = 0,
                end: int | None = None) -> None:
        """Write the next published record."""
        self.sequence += 1
        record = struct.pack(
            '<QQIIQ', self.sequence, self.generation,
            self.next if count is None else count, flags,
            self.data_start + len(self.data) if end is None else end)
        record = record.ljust(504, b'\0')
        self.records[self.sequence % 2] = record + struct.pack(
            '<Q', xxh3(record, self.seed))

    def fingerprint(self, slot: int) -> bytes:
        return self.entries[slot][:32]

    def content(self) -> bytes:
        table = bytearray(self.data_start - 4096)
        for slot, entry in self.entries.items():
            at = 512 * (slot // 9) + 56 * (slot % 9)
            table[at:at + 56] = entry
        front = (self.header + b''.join(self.records)).ljust(4096, b'\0')
        return front + bytes(table) + self.data

    def save(self) -> pathlib.Path:
        self.repository.write(self.path, self.content())
        return self.path


class Spares(Group):
    """A file of spare copies."""

    def __init__(self, repository: 'Repository', number: int, **arguments):
        arguments.setdefault('scope', b'\xff' * 16)
        super().__init__(repository, number, directory='spares', **arguments)
        (repository.path / 'spares').mkdir(mode=0o700, exist_ok=True)


class ColdGroup(Group):
    """A group whose segments are in an object; `Group` writes the rest."""

    def __init__(self, repository: 'Repository', number: int, **arguments):
        arguments.setdefault('object_id', some_id(f'object {number}'))
        super().__init__(repository, number, **{'major': 3, **arguments})

    @property
    def object(self) -> bytes:
        return super().content()

    def content(self) -> bytes:
        return self.object[:self.data_start]


def together(transactions) -> int:
    """Return the exclusive or of ids, as a catalog records its ledger."""
    return functools.reduce(
        operator.xor, map(int.from_bytes, transactions), 0)


class Catalog:
    """A catalog with given content; `save` writes it, and its fence."""

    def __init__(self, repository: 'Repository', name: str = 'catalog'):
        self.repository = repository
        self.id = some_id(name)
        self.sequence = 7
        self.bits = 0       # of all shards of the index
        self.cursors: dict[int, int] = {}
        self.fence: dict[int, bytes] = {}
        self.counts: dict[int, list[int]] = {}
        self.ledger: dict[bytes, dict] = {}
        self.groups: dict[int, dict] = {}
        self.records: list[tuple[bytes, int]] = []
        self.more: dict[bytes, bytes | None] = {}   # a None is left out
        self.meta: dict = {}

    def count(self, image_id: str, pieces: list[tuple], **facts) -> None:
        """Count a recipe as `Repository.recipe` writes it."""
        size = zeros = blocks = fragments = 0
        before = None
        for piece in pieces:
            if piece[0] == 'zeros':
                size += piece[1]
                zeros += piece[1]
                continue
            group, slot, some = piece
            counts = self.counts.setdefault(group.number, [0] * 32768)
            for s in range(slot, slot + some):
                counts[s] += 1
                size += len(group.blocks[s])
            blocks += some
            fragments += before != (group.number, slot)
            before = group.number, slot + some
        transaction = some_id('upload of ' + image_id)
        self.ledger[transaction] = {
            'image_id': image_id, 'upload_id': transaction.hex(),
            'project': '', 'size': size, 'zero_bytes': zeros, 'new_bytes': 0,
            'stored_bytes': 0, 'blocks': blocks, 'fragments': fragments,
            'created': 1700000000, **facts}

    def index(self, group: Group) -> None:
        for slot in group.blocks:
            self.records.append(
                (group.fingerprint(slot)[:8], group.number << 15 | slot))

    def items(self) -> dict[bytes, bytes]:
        items = {}
        for transaction, facts in self.ledger.items():
            items[b'l' + transaction] = json.dumps(facts).encode()
        for group, counts in self.counts.items():
            for chunk in range(32):
                some = counts[1024 * chunk:1024 * (chunk + 1)]
                if any(some):
                    items[struct.pack('>cIB', b'c', group, chunk)] = (
                        struct.pack('<1024I', *some))
            self.groups.setdefault(group, {})
        for group, facts in self.groups.items():
            used = sum(map(bool, self.counts.get(group, [])))
            items[struct.pack('>cI', b'g', group)] = json.dumps({
                'judged': 0, 'dirty': False, 'used': used, 'rewritten': 0,
                **facts}).encode()
        items[b'meta'] = json.dumps({
            'format': 1, 'repository_id': self.repository.repository_id.hex(),
            'catalog_id': self.id.hex(), 'sequence': self.sequence,
            'valid': True, 'parts': 0,
            'ledger': f'{together(self.ledger):032x}', **self.meta}).encode()
        items.update(self.more)
        return {k: v for k, v in items.items() if v is not None}

    def fence_record(self, sequence: int) -> bytes:
        record = struct.pack('<8s16sQ', b'GDFENCE\0', self.id, sequence)
        record = record.ljust(504, b'\0')
        return record + struct.pack('<Q', xxh3(record))

    def save_fence(self, *sequences: int) -> pathlib.Path:
        places = [bytes(512), bytes(512)]
        for sequence in sequences:
            places[sequence % 2] = self.fence_record(sequence)
        path = self.repository.path / 'fence'
        self.repository.write(path, b''.join(places))
        return path

    def save(self) -> pathlib.Path:
        path = self.repository.path / 'catalog'
        path.mkdir(mode=0o700)
        with plyvel.DB(str(path), create_if_missing=True) as db:
            for key, value in self.items().items():
                db.put(key, value)
        self.save_fence(self.sequence - 1, self.sequence)
        return path

    def shards(self) -> dict[int, bytes]:
        found = {shard: b'' for shard in range(1 << self.bits)}
        for fingerprint, address in sorted(self.records):
            found[int.from_bytes(fingerprint) >> 64 - self.bits] += (
                fingerprint + address.to_bytes(5, 'little'))
        return found

    def save_index(self) -> None:
        """Write the exact index of the current records and cursors."""
        for shard, records in self.shards().items():
            IndexFile(self, 'shard', records, self.bits, shard).save()
        IndexFile(self, 'cursors', b''.join(
            struct.pack('<II', *item)
            for item in sorted(self.cursors.items()))).save()


def packed_frame(items: bytes, seed: int, padded: bool = False,
                 **more: int) -> bytes:
    """Return a packed frame of a shard, of these records."""
    keys = [int.from_bytes(items[at:at + 8]) for at in range(
        0, len(items), 13)]
    addresses = [int.from_bytes(items[at + 8:at + 13], 'little')
                 for at in range(0, len(items), 13)]
    differences = [0, *((b - a) % (1 << 64)
                        for a, b in zip(keys, keys[1:]))]
    facts = {'key': keys[0], 'count': len(keys),
             'key_bits': max(differences).bit_length(),
             'address_bits': max(addresses).bit_length(), **more}
    bits = at = 0
    for difference, address in zip(differences, addresses):
        bits |= difference << at
        at += facts['key_bits']
        bits |= address << at
        at += facts['address_bits']
    frame = struct.pack('<QIBB2x', *facts.values()) + bits.to_bytes(
        -(-at // 8), 'little')
    if padded:
        frame = frame.ljust(32760, b'\0')
    return frame + struct.pack('<Q', xxh3(frame, seed))


class IndexFile:
    """A file of the exact index with given content; `save` writes it."""

    KINDS = {'shard': 1, 'run': 2, 'gone': 3, 'pairs': 4, 'cursors': 5}
    SIZES = {1: 13, 2: 13, 3: 13, 4: 16, 5: 8}

    def __init__(self, catalog: Catalog, kind: str, items: bytes,
                 bits: int = 0, shard: int = 0, number: int = 1):
        self.catalog = catalog
        self.kind = self.KINDS[kind]
        self.items = items
        self.bits, self.shard, self.number = bits, shard, number
        self.name = f'{kind}-{bits:02x}-{shard:04x}.{number:016x}'
        self.head: dict = {}

    def _head(self, **more: int) -> bytes:
        facts = {'magic': b'GDINDEX\0', 'major': 1, 'minor': 0,
                 'kind': self.kind, 'catalog_id': self.catalog.id,
                 'number': self.number, 'bits': self.bits,
                 'shard': self.shard,
                 'items': len(self.items) // self.SIZES[self.kind],
                 'seed': 77, 'flags': 0, 'length': 0, **more, **self.head}
        head = struct.pack('<8sHHI16sQIIQQI4xQ', *facts.values())
        head = head.ljust(504, b'\0')
        return head + struct.pack('<Q', xxh3(head))

    def content(self) -> bytes:
        if self.kind == self.KINDS['shard']:
            return self.packed()
        size = self.SIZES[self.kind]
        parts = [self._head()]
        frame = 65528 // size * size
        for number, at in enumerate(range(0, len(self.items), frame)):
            items = self.items[at:at + frame]
            parts += [items, struct.pack('<Q', xxh3(items, 77 + number))]
        return b''.join(parts)

    def packed(self, most: int = 4096) -> bytes:
        """Return the content with packed frames of at most so many records."""
        frames = []
        for at in range(0, len(self.items), 13 * most):
            items = self.items[at:at + 13 * most]
            frames.append(packed_frame(items, 77 + len(frames),
                                       at + len(items) < len(self.items)))
        return self._head(length=512 + sum(
            map(len, frames))) + b''.join(frames)

    def save(self, content: bytes | None = None) -> pathlib.Path:
        directory = self.catalog.repository.path / 'index'
        directory.mkdir(mode=0o700, exist_ok=True)
        self.catalog.repository.write(directory / self.name,
                                      content or self.content())
        return directory / self.name


class Repository:
    """A repository's own files, and its recipes."""

    def __init__(self, path, *, block_size: int = 512,
                 group_slots: int = 64, segment_size: int = 4096,
                 fingerprint: str = 'sha256', verify: str = 'fingerprint',
                 name: str = 'repository', features: tuple[str, ...] = (),
                 **more):
        self.path = pathlib.Path(path)
        self.repository_id = some_id(name)
        self.block_size = block_size
        self.group_slots = group_slots
        self.fingerprint = fingerprint
        self.parameters = {
            'kind': 'glance-dedup repository', 'format': 1,
            'repository_id': self.repository_id.hex(),
            'block_size': block_size, 'group_slots': group_slots,
            'segment_size': segment_size, 'chunking': 'fixed',
            'fingerprint': fingerprint, 'verify': verify}
        self.parameters.update(more)
        self.path.mkdir(mode=0o700)
        for directory in ('groups', 'images', 'spool', 'locks',
                          'quarantine', 'volumes', 'slices', 'features'):
            (self.path / directory).mkdir(mode=0o700)
        for name in ('locks/groups', 'locks/images',
                     *(f'features/{name}' for name in features)):
            self.write(self.path / name, b'')
        self.write(self.path / 'key',
                   b'%b %b\n' % (KEY, xxhash.xxh3_64_hexdigest(KEY).encode()))
        self.save_parameters()

    def write(self, path, content: bytes) -> None:
        path.write_bytes(content)
        os.chmod(path, 0o600)

    def save_parameters(self) -> None:
        found = {k: v for k, v in self.parameters.items()
                 if k != 'checksum'}
        text = json.dumps(found, sort_keys=True, separators=(',', ':'))
        found['checksum'] = f'{xxh3(text.encode("ascii")):016x}'
        self.write(self.path / 'repository.json',
                   json.dumps(found).encode())

    def attach(self, **change) -> pathlib.Path:
        """Write ``cold.json``.

        :param change: new values of fields; None: they are left out
        """
        fields = {
            'kind': 'glance-dedup object store', 'version': 1,
            'location': {
                'kind': 's3', 'container': 'bucket', 'prefix': 'a/prefix',
                'endpoint': 'https://[::1]:9000', 'region': '',
                'ca_file': ''},
            'credentials': '/etc/credentials', 'cache_mib': 1024,
            'owners': [some_id('owner').hex()], 'inode': 7, **change}
        fields = {k: v for k, v in fields.items() if v is not None}
        text = json.dumps(fields, sort_keys=True, separators=(',', ':'))
        fields.setdefault('checksum', f'{xxh3(text.encode("ascii")):016x}')
        path = self.path / 'cold.json'
        self.write(path, json.dumps(fields).encode())
        return path

    def recipe(self, image_id: str, pieces: list[tuple], *,
               transaction: bytes | None = None, project: str = '',
               header: dict | None = None) -> bytes:
        """Return a recipe's bytes.

        :param pieces: each ``('zeros', length)`` or ``(group, slot, blocks)``
            or a dict of an extent's new field values
        :param header: new values of the header's fields
        """
        transaction = transaction or some_id('upload of ' + image_id)
        extents, zero_bytes, offset, fragments = [], 0, 0, 0
        before = None
        for piece in pieces:
            if isinstance(piece, dict):
                fields = piece
            elif piece[0] == 'zeros':
                fields = {'length': piece[1]}
            else:
                group, slot, blocks = piece
                named = range(slot, slot + blocks)
                fields = {
                    'length': sum(len(group.blocks[s]) for s in named),
                    'group': group.number, 'slot': slot, 'blocks': blocks,
                    'kind': 1, 'digest': xxh3(b''.join(
                        group.fingerprint(s) for s in named))}
            fields = {'offset': offset, 'group': 0, 'slot': 0, 'blocks': 0,
                      'kind': 0, 'reserved': bytes(3), 'digest': 0,
                      **fields}
            if not fields['kind']:
                zero_bytes += fields['length']
            else:
                fragments += before != (fields['group'], fields['slot'])
                before = fields['group'], fields['slot'] + fields['blocks']
            offset = fields['offset'] + fields['length']
            extents.append(struct.pack(
                '<QQIIIB3sQ', *(fields[name] for name in (
                    'offset', 'length', 'group', 'slot', 'blocks', 'kind',
                    'reserved', 'digest'))))
        fields = {
            'magic': b'GDRECIPE', 'major': 1, 'minor': 0, 'flags': 0,
            'repository_id': self.repository_id, 'scope': bytes(16),
            'transaction': transaction, 'upload': transaction,
            'size': offset, 'zero_bytes': zero_bytes, 'new_bytes': 0,
            'stored_bytes': 0, 'extents': len(extents),
            'fragments': fragments, 'created': 1700000000,
            'id_length': len(image_id), 'project_length': len(project),
            'reserved': 0, 'image_id': image_id.encode(),
            'project': project.encode(), **(header or {})}
        first = struct.pack('<8sHHI16s16s16s16s7QHHI128s128s',
                            *fields.values()).ljust(4088, b'\0')
        pages = [first + struct.pack('<Q', xxh3(first))]
        seed = int.from_bytes(transaction[:8], 'little')
        for i in range(0, len(extents), 102):
            part = extents[i:i + 102]
            page = struct.pack('<II', len(pages), len(part)) + b''.join(part)
            page = page.ljust(4088, b'\0')
            pages.append(page + struct.pack('<Q', xxh3(page, seed)))
        return b''.join(pages)

    def image(self, image_id: str, pieces: list[tuple],
              **arguments) -> pathlib.Path:
        path = self.path / 'images' / image_id
        self.write(path, self.recipe(image_id, pieces, **arguments))
        return path
