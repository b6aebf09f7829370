# SPDX-License-Identifier: Apache-2.0

"""Traces of writes and reads, in the form of those of I/O Deduplication.

Run it from a checkout to make such a trace, on the standard output::

    python benchmarks/papers/traces.py {web,mail,homes}
        [--writes 100000] [--seed 1]

Koller and Rangaswami published traces of three servers of Florida
International University ("I/O Deduplication", FAST 2010). Each line is::

    timestamp pid process lba size W|R major minor md5

``lba`` and ``size`` are in sectors of 512 bytes; ``md5`` is the hash of the
bytes. Dmdedup was measured with these traces. They are not part of this
project. :func:`generate` makes others of the same form, which have Dmdedup's
ratios of blocks written to different blocks, exactly but for rounding. Nothing
else about them is true of those servers: half of the writes continue behind
the last one, the others are anywhere, and repeated contents are mostly recent
ones.
"""

import argparse
import array
from collections.abc import Iterable, Iterator
import hashlib
import random
import re
import struct
import sys
from typing import NamedTuple

SECTOR = 512
#: The most sectors of one line, 32 MiB, and the last sector there may be.
MAX_COUNT, END = 1 << 16, 1 << 40
#: The head of an operation: its first block, the number of blocks, and the
#: kind. 16 bytes for each block follow, which name its content.
HEAD = struct.Struct('<QII')
ID = 16
READ, WRITE, CHECK = range(3)

_LINE = re.compile(
    r'[0-9]{1,20} -?[0-9]{1,10} (?:.* )?(-?[0-9]{1,20}) (-?[0-9]{1,20}) '
    r'([WR]) [0-9]{1,10} [0-9]{1,10} ([0-9a-f]{32})', re.ASCII | re.IGNORECASE)


class Server(NamedTuple):
    """A trace that Dmdedup was measured with."""

    block: int      #: bytes of the blocks that the trace has hashes of
    ratio: float    #: of the blocks written to the different ones among them
    gigabytes: float    #: written


SERVERS = {'web': Server(4096, 2.33, 42.6), 'mail': Server(4096, 10.29, 1483),
           'homes': Server(512, 3.43, 65.3)}


class Line(NamedTuple):
    """A line of a trace; its place is in sectors."""

    write: bool
    lba: int
    size: int
    md5: bytes


def parse(text: str) -> Line:
    """Read one line; the process's name may have spaces.

    :raises ValueError: the message names the fault of the line
    """
    found = _LINE.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            'it is not "timestamp pid process lba size W|R major minor md5"')
    lba, size = int(found[1]), int(found[2])
    if not 1 <= size <= MAX_COUNT:
        raise ValueError(f'its size is {size}, not 1 to {MAX_COUNT} sectors')
    if not 0 <= lba <= END - size:
        raise ValueError(f'it ends behind sector {END}, or begins before 0')
    return Line(found[3] in 'Ww', lba, size, bytes.fromhex(found[4]))


def read(path: str, most: int) -> Iterator[Line]:
    """Yield the lines of a file, and no more than so many of them.

    :raises ValueError: names the file and the line
    """
    with open(path, encoding='ascii', errors='replace') as file:
        for number, text in enumerate(file, 1):
            if number > most:
                return
            try:
                yield parse(text)
            except ValueError as e:
                raise ValueError(f'{path}, line {number}: {e}') from None


# -- operations ---------------------------------------------------------------

def operation(kind: int, first: int, ids: bytes) -> bytes:
    """Return the bytes of an operation, as :func:`operations` yields them."""
    return HEAD.pack(first, len(ids) // ID, kind) + ids


def operations(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield what to do, with which first block, and the ids of all blocks."""
    at = 0
    while at < len(data):
        first, count, kind = HEAD.unpack_from(data, at)
        at += HEAD.size + count * ID
        yield kind, first, data[at - count * ID:at]


class Work(NamedTuple):
    """Operations, and their totals."""

    data: bytes
    blocks: int     #: numbers that blocks may have
    written: int
    different: int  #: of the blocks written

    @property
    def ratio(self) -> float:
        """Return the blocks written for each different one."""
        return self.written / max(1, self.different)


def _ids(line: Line, count: int) -> bytes:
    """Return a line's ids: the hash, and for further blocks one of its own."""
    return line.md5 + b''.join(
        hashlib.md5(line.md5 + i.to_bytes(4, 'little'),
                    usedforsecurity=False).digest() for i in range(1, count))


def work(lines: Iterable[Line], block: int) -> Work:
    """Return a trace's requests to a device whose blocks have so many bytes.

    A range that begins or ends within a block becomes one of whole blocks. The
    blocks that the trace touches are numbered in their order, so that the gaps
    between them need no disk.
    """
    found = list(lines)
    spans = array.array('Q')
    for line in found:
        first = line.lba * SECTOR // block
        spans.extend(range(first, first - (-line.size * SECTOR // block)))
    numbers = {place: i for i, place in enumerate(sorted(set(spans)))}
    contents: set[bytes] = set()
    pieces, written = [], 0
    for line in found:
        count = -(-line.size * SECTOR // block)
        ids = _ids(line, count)
        pieces.append(operation(WRITE if line.write else READ,
                                numbers[line.lba * SECTOR // block], ids))
        if line.write:
            written += count
            contents.update(ids[i:i + ID] for i in range(0, len(ids), ID))
    return Work(b''.join(pieces), len(numbers), written, len(contents))


# -- making traces ------------------------------------------------------------

def generate(server: Server, writes: int, seed: int = 1) -> Iterator[str]:
    """Yield the lines of a trace in which each write has one block.

    Of the blocks written, ``writes / ratio`` are different, rounded.
    """
    rng = random.Random(seed)
    new = max(1, round(writes / server.ratio)) if writes else 0
    sectors = server.block // SECTOR
    space = max(1, writes // 2)
    made: list[str] = []
    place = time = 0
    for left in range(writes, 0, -1):
        if not made or rng.randrange(left) < new - len(made):
            made.append(rng.randbytes(ID).hex())
            content = made[-1]
        else:
            content = made[-1 - int(len(made) * rng.random() ** 3)]
        place = (place + 1 if rng.random() < 0.5
                 else rng.randrange(space)) % space
        time += rng.randrange(1, 1000000)
        yield (f'{time} {rng.randrange(1, 32768)} process {place * sectors} '
               f'{sectors} W 8 0 {content}\n')


def main() -> None:
    """Write a trace to the standard output."""
    parser = argparse.ArgumentParser(
        description='Make a trace of writes to a disk.')
    parser.add_argument('server', choices=SERVERS)
    parser.add_argument('--writes', type=int, default=100000,
                        help='how many (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=1,
                        help='another one: another trace')
    args = parser.parse_args()
    sys.stdout.writelines(
        generate(SERVERS[args.server], args.writes, args.seed))


if __name__ == '__main__':
    main()
