# SPDX-License-Identifier: Apache-2.0

"""Measure the rates and the memory of the metadata backends.

Run it from a checkout; gcc and the engine's libraries are needed::

    python benchmarks/kv.py [--keys 100000,1000000,10000000]
        [--backends inram,dtb,lmdb,leveldb] [--cache-mib 64]
        [--batch 1024] [--commit 0] [--rounds 3] [--dir DIR]

For each number of keys and each backend a new process makes a store in DIR
(``kv.c``), puts the keys, opens the store again, and looks up as many keys
that it has, in random order, and as many that it has not. The table shows
thousands of keys per second, and nanoseconds of processor time per key, as the
medians of the rounds; the memory that the process took, its own and mapped
files; the store's size on the disk; and the bytes that DTB wrote per key.

``--commit N`` syncs after each N keys: Dmdedup's CBT was measured with one
write or 1000 in a transaction, and without limit (0). ``--cache-mib`` is the
budget of DTB's and LevelDB's own caches. DTB reads the disk past the page
cache, so its budget is all that it has. LMDB and LevelDB also use the page
cache, which is not limited here: where their files fit in it, they never wait
for the disk.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import tempfile
from typing import NamedTuple

import common
from common import MIB
import synthetic

LIMIT = 24 * 3600


class Run(NamedTuple):
    """The output of kv.c, and the store's bytes on the disk."""

    put: float
    hit: float
    miss: float
    put_cpu: float
    hit_cpu: float
    miss_cpu: float
    own: int
    mapped: int
    reads: int
    bytes_read: int
    writes: int
    bytes_written: int
    syncs: int
    disk: int


def bytes_below(directory: str) -> int:
    """The bytes that files below a directory take on the disk."""
    return sum(path.stat().st_blocks * 512
               for path in pathlib.Path(directory).rglob('*')
               if path.is_file())


def run(program: str, backend: str, keys: int,
        args: argparse.Namespace) -> Run:
    """Measure one backend once, in a new process and an empty store."""
    with tempfile.TemporaryDirectory(dir=args.dir, prefix='bench-kv-') as d:
        result = subprocess.run(
            [program, backend, os.path.join(d, 'store'), str(keys),
             str(args.cache_mib * MIB), str(args.batch), str(args.commit)],
            check=True, capture_output=True, text=True, timeout=LIMIT)
        words = result.stdout.split()
        return Run(*map(float, words[:6]), *map(int, words[6:]),
                   bytes_below(d))


def show(backend: str, keys: int, runs: list[Run]) -> None:
    """Print a line of the table."""
    row = f'{keys:11,}  {backend:8}'
    medians = [statistics.median(values) for values in zip(*runs)]
    for seconds in medians[:3]:
        row += f'{keys / seconds / 1000:8.0f}'
    for seconds in medians[3:6]:
        row += f'{seconds / keys * 1e9:8.0f}'
    last = runs[-1]
    print(f'{row}{last.own / MIB:9.1f}{last.mapped / MIB:9.1f}'
          f'{last.disk / MIB:9.1f}{last.bytes_written / keys:9.0f}',
          flush=True)


def main() -> None:
    """Measure with the command line's arguments."""
    args = common.arguments(
        __doc__, rounds=3, keys=('100000,1000000,10000000', 'how many'),
        backends=('inram,dtb,lmdb,leveldb', 'which'),
        cache_mib=(64, 'for DTB and LevelDB'),
        batch=(1024, 'keys in one call'),
        commit=(0, 'sync after so many keys; 0: at the end')).parse_args()
    with common.place(args.dir) as d:
        program = synthetic.build(d, 'kv')
        names = f'{"put":>8}{"found":>8}{"absent":>8}'
        sizes = f'{"own":>9}{"mapped":>9}{"disk":>9}'
        print(f'{"":21}{"thousand per second":>24}'
              f'{"processor, ns per key":>24}{"MiB":^27}{"written":>9}')
        print(f'{"keys":>11}  {"backend":8}{names}{names}{sizes}'
              f'{"per key":>9}', flush=True)
        for keys in map(int, args.keys.split(',')):
            for backend in args.backends.split(','):
                show(backend, keys, [run(program, backend, keys, args)
                                     for _ in range(args.rounds)])


if __name__ == '__main__':
    main()
