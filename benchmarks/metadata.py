# SPDX-License-Identifier: Apache-2.0

"""Measure the bytes of a repository's metadata, by kind.

Run it from a checkout in which the extension is built::

    python benchmarks/metadata.py REPOSITORY

Every byte that is not a block's counts, as ``du`` does: percent are of the
blocks before compression, and the last column is bytes for each block. It
divides some parts of ``glance-dedup repository space`` further: fingerprint
stores (by the fields of an entry), recipes, and the exact index. It changes
nothing; no process should store meanwhile.
"""

import argparse
import collections
import contextlib
import pathlib
import struct

from common import MIB

from glance_dedup import _engine
from glance_dedup.maintenance import block_addresses
from glance_dedup.repository import hostfilter
from glance_dedup.repository import image_repository
from glance_dedup.repository import space

PAGE, SECTOR = 4096, 512
ENTRIES_PER_SECTOR = 9
#: The fields of an entry, and their bytes.
FIELDS = {'fingerprints': 32, 'checksums of blocks': 8, 'places': 12,
          'checksums of entries': 4}
EXTENT, EXTENTS_AT = 40, 112
EMPTY = 0
#: The parts of ``space`` with details.
DETAILED = ('fingerprint stores', 'recipes', 'exact index')

Bytes = collections.Counter[str]


def stores(engine: _engine.Maintenance) -> tuple[Bytes, int]:
    """Return bytes of fingerprint stores, by use, and their live blocks."""
    found: Bytes = collections.Counter()
    live = 0
    for number in engine.groups():
        facts, used = engine.group_facts(number), engine.group_space(number)
        slots = facts['slots']
        states = block_addresses.columns(engine.entries(number, 0,
                                                        slots)).states
        here = states.count(block_addresses.LIVE)
        for name, size in FIELDS.items():
            found[name] += size * here
        sectors = -(-slots // ENTRIES_PER_SECTOR)
        found['ends of sectors'] += 8 * sectors
        found['slots not used yet'] += 56 * states.count(EMPTY)
        found['freed slots'] += 56 * (slots - here - states.count(EMPTY))
        found['headers, records, padding'] += used['store'] - (
            SECTOR * sectors) + 56 * (9 * sectors - slots)
        live += here
    return found, live


def recipes(path: pathlib.Path) -> tuple[Bytes, int]:
    """Return bytes of all recipes, by use, and the number of extents."""
    found: Bytes = collections.Counter()
    extents = 0
    for file in (path / 'images').iterdir():
        with file.open('rb') as f:
            here, = struct.unpack_from('<Q', f.read(PAGE), EXTENTS_AT)
        size = file.stat().st_size
        found['header pages'] += PAGE
        found['extents'] += EXTENT * here
        found['rest of pages'] += size - PAGE - EXTENT * here
        extents += here
    return found, extents


def index_files(path: pathlib.Path) -> Bytes:
    found: Bytes = collections.Counter()
    for file in path.glob('index/*'):
        found[file.name.partition('-')[0] + ' files'] += file.stat().st_size
    return found


class Table:
    """Rows of bytes."""

    def __init__(self, blocks: int, plain: int) -> None:
        self._blocks, self._plain = blocks, plain
        print(f'{"":36}{"MiB":>10}{"percent":>10}{"a block":>10}')

    def row(self, name: str, size: float) -> None:
        print(f'{name:36}{size / MIB:10.3f}'
              f'{100 * size / self._plain:10.3f}{size / self._blocks:10.2f}')


def show(path: pathlib.Path) -> None:
    with contextlib.closing(image_repository.Repository(
            str(path), index=hostfilter.NONE)) as repo:
        parts = {part.name: part for part in space.parts(repo)}
        with contextlib.closing(_engine.Maintenance(repo.handle())) as engine:
            of_stores, blocks = stores(engine)
    plain = sum(part.plain_bytes or 0 for part in parts.values())
    of_recipes, extents = recipes(path)
    details = dict(zip(DETAILED, (of_stores, of_recipes, index_files(path))))
    table = Table(blocks, plain)
    for name, part in parts.items():
        if part.plain_bytes is None:
            table.row(name, part.bytes)
            for detail, size in details.get(name, Bytes()).items():
                table.row('  ' + detail, size)
    table.row('all', sum(part.bytes for part in parts.values()
                         if part.plain_bytes is None))
    print(f'{blocks:,} blocks, {plain / MIB:,.0f} MiB; {extents:,} extents')


def main() -> None:
    parser = argparse.ArgumentParser(
        description='what a repository\'s metadata takes')
    parser.add_argument('repository', type=pathlib.Path)
    show(parser.parse_args().repository)


if __name__ == '__main__':
    main()
