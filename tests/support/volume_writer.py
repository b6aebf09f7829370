# SPDX-License-Identifier: Apache-2.0

"""Writes volumes, byte by byte, as the format document describes them.

Independent of the engine and of the checker. Nothing is synced.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import struct

import xxhash

MAKING, READY, DELETING = 1, 2, 3
DATA, ZEROS, MARK, STORED = 1, 2, 3, 4
PART = 65536


def xxh3(data: bytes, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(data, seed)


def some_id(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def store_recipe(repo, image_id: str, data: bytes = b'') -> str:
    """Store a recipe under a volume's name, which the engine accepts."""
    transaction = repo.handle().begin(image_id, '', bytes(16))
    if data:
        transaction.write(data)
    transaction.commit()
    return image_id


@contextlib.contextmanager
def owning(volume: 'Volume'):
    """Hold the volume's lock, as another process would."""
    with volume.lock.open('r+b') as f:
        fcntl.fcntl(f, fcntl.F_OFD_SETLK, struct.pack(
            '@hhqqi4x', fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        yield


class Volume:
    """A volume's directory, its feature, and the fields of its heads."""

    def __init__(self, path, repository_id: bytes, name: str = 'disk', *,
                 size: int = 4 * PART, base_size: int = 0,
                 project: bytes = b'', scope: bytes = bytes(16)):
        self.name = name
        self.directory = pathlib.Path(path) / 'volumes' / name
        self.repository_id = repository_id
        self.id = some_id('volume ' + name)
        self.fields = {
            'major': 1, 'minor': 0, 'size': size, 'base_size': base_size,
            'part_size': PART, 'state': READY, 'project': project,
            'scope': scope, 'source': b'', 'volume_id': self.id,
            'repository_id': repository_id}
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self.lock = self.directory / 'lock'
        for file in (pathlib.Path(path, 'features', 'volumes'), self.lock):
            self.write(file, b'')

    @staticmethod
    def write(path, content: bytes) -> None:
        path.write_bytes(content)
        os.chmod(path, 0o600)

    def recipe(self, part: int | None, edition: int = 0) -> str:
        """Return the id of a part's recipe; without a part, of the base."""
        what = 'base_0' if part is None else f'{part}_{edition}'
        return f'v_{self.id.hex()}_{what}'

    def journal(self, number: int = 1, **fields) -> 'Journal':
        return Journal(self, number, **fields)


class Journal:
    """A journal with given content; `save` writes it.

    :ivar ends: where each record ends, the head's end first
    """

    def __init__(self, volume: Volume, number: int, *, needed: int = 0,
                 before: int = 0, marks: dict[int, int] | None = None,
                 **fields):
        self.volume = volume
        self.number = number
        self.fields = {**volume.fields, **fields}
        self.fields.update(needed=needed or number, before=before)
        self.marks = marks or {}
        self.seed = xxh3(b'%s %d' % (volume.id, number))
        self.records = b''
        self.sequence = 0
        self.start = 4096 + -(-16 * len(self.marks) // 4096) * 4096
        self.ends = [self.start]

    @property
    def file(self) -> str:
        return f'volumes/{self.volume.name}/journal-{self.number:08x}'

    @property
    def path(self) -> pathlib.Path:
        return self.volume.directory / f'journal-{self.number:08x}'

    @property
    def end(self) -> int:
        return self.ends[-1]

    def append(self, kind: int, a: int, b: int, data: bytes = b'',
               durable: int | None = None, **changes) -> 'Journal':
        self.sequence += 1
        if durable is None:
            durable = self.end
        record = struct.pack(
            '<4sIQQQQQ', b'GDVR', kind,
            changes.get('sequence', self.sequence), a, b, durable,
            xxh3(data) if kind == DATA else 0)
        record += struct.pack('<Q', xxh3(record, self.seed))
        self.records += record + data + bytes(-len(data) % 8)
        self.ends.append(self.start + len(self.records))
        return self

    def data(self, offset: int, data: bytes, **how) -> 'Journal':
        return self.append(DATA, offset, len(data), data, **how)

    def zeros(self, offset: int, length: int, **how) -> 'Journal':
        return self.append(ZEROS, offset, length, **how)

    def mark(self, part: int, edition: int, **how) -> 'Journal':
        return self.append(MARK, part, edition, **how)

    def stored(self, **how) -> 'Journal':
        return self.append(STORED, 0, 0, **how)

    def head(self) -> bytes:
        f = self.fields
        marks = b''.join(struct.pack('<QQ', *mark)
                         for mark in sorted(self.marks.items()))
        head = struct.pack(
            '<8sHHI16s16s16sQQQQIIQQIIQ128s128s128xQ',
            f.get('magic', b'GDVOLJ'), f['major'], f['minor'],
            f.get('number', self.number), f['repository_id'],
            f['volume_id'], f['scope'], self.seed, f['size'],
            f['base_size'], f['part_size'], f['state'], f['needed'],
            f['before'], 1700000000, f.get('marks', len(self.marks)),
            f.get('project_length', len(f['project'])),
            xxh3(marks, self.seed), f['project'], f['source'],
            f.get('before_durable', f['before'])
        ).ljust(4088, b'\0')
        head += struct.pack('<Q', xxh3(head))
        return (head + marks).ljust(self.start, b'\0')

    def content(self) -> bytes:
        return self.head() + self.records

    def save(self) -> 'Journal':
        self.volume.write(self.path, self.content())
        return self
