# SPDX-License-Identifier: Apache-2.0

"""Measure the cost of each index: the filter, and the metadata backends.

Run it from a checkout in which the extension is built; the libraries of LMDB
and LevelDB are needed::

    python benchmarks/indexes.py [--blocks 1000000] [--index-mib 64]
        [--indexes filter,inram,dtb,lmdb,leveldb] [--rounds 5]
        [--writes 0] [--dir DIR] [--filter-dir /dev/shm]

One repository with so many blocks is made (``synthetic.py``). Each index is
filled from its groups, as the server of a volume does it. Then, in turns, each
index finds by their fingerprints, in one transaction,

* new blocks: no store at hand has them, and the index has no hint;
* an image: blocks that were stored one after the other;
* single blocks from everywhere.

``--writes N`` stores the blocks, too, 4 GB for a million. In each round, each
index then serves a volume, to which N blocks of 4 KiB are written, at random
places: first new ones, then blocks from everywhere in the repository. It shows
the time of the checkpoint, which looks them up and stores them, for each
block; the share of the others that it found; and the fingerprint stores that
it read for each.

All figures but sizes are medians of the rounds, and compare the indexes with
each other. INDEX_MIB is the filter's budget, and that of the caches of dtb and
leveldb; inram gets room for all blocks. lmdb has the kernel's page cache. With
one of 64 MiB for 20 million blocks, dtb reads the disk for each look-up.
"""

import argparse
import contextlib
import os
import pathlib
import random
import statistics
import time

import common
import synthetic

from glance_dedup.repository import hostfilter
from glance_dedup.repository import image_repository
from glance_dedup.repository import openvolumes

PAGE = 4096
IMAGE = 1 << 14
SINGLE = 1 << 11
KINDS = ('new', 'image', 'single')
VOLUME = 1 << 28
INRAM_KEY = 20  # bytes


class Subject:
    """The repository, opened with one index."""

    def __init__(self, path: str, directory: str, index: str,
                 args: argparse.Namespace) -> None:
        mib = args.index_mib
        if index == 'inram':
            mib = args.blocks * INRAM_KEY // common.MIB + 1
        self.index = index
        self.blocks = args.blocks
        self.data = args.writes > 0
        self.figures: dict[str, list[float]] = {}
        self.directory = pathlib.Path(directory, index)
        self.directory.mkdir()
        self.repo = image_repository.Repository(
            path, index=index, index_dir=self.directory, filter_mib=mib,
            filter_dir=os.path.join(args.filter_dir,
                                    os.path.basename(directory)),
            reserve_mib=0)
        self.fill = common.timed(self.repo.rebuild_filter)

    def note(self, name: str, figure: float) -> None:
        self.figures.setdefault(name, []).append(figure)

    def find(self, kind: str) -> None:
        """Look up once; note nanoseconds of processor time for each block."""
        if kind == 'new':
            found = os.urandom(32 * IMAGE)
        else:
            first = random.randrange(self.blocks - IMAGE)
            numbers = (range(first, first + IMAGE) if kind == 'image' else
                       random.sample(range(self.blocks), SINGLE))
            found = b''.join(synthetic.fingerprint(i, self.data)
                             for i in numbers)
        count = len(found) // 32
        lengths = PAGE.to_bytes(4, 'little') * count
        with self.repo.begin('measured') as transaction:
            start = time.process_time()
            transaction.find(found, lengths)
            self.note(kind, (time.process_time() - start) / count * 1e9)

    def write(self, writes: int, duplicates: bool) -> None:
        """Write blocks to a new volume; note its checkpoint's time."""
        name = 'found' if duplicates else 'stored'
        openvolumes.create(self.repo, 'disk', VOLUME)
        with openvolumes.open_volume(self.repo, 'disk') as volume:
            for at in random.sample(range(VOLUME // PAGE), writes):
                volume.write(synthetic.content(random.randrange(self.blocks))
                             if duplicates else os.urandom(PAGE), at * PAGE)
            before = self.repo.statistics()
            start = time.perf_counter()
            volume.checkpoint()
            self.note(name, (time.perf_counter() - start) / writes * 1e6)
            after = self.repo.statistics()
        openvolumes.delete(self.repo, 'disk')
        if duplicates:
            for key in ('hits', 'cold_loads'):
                self.note(key, (after[key] - before[key]) / writes)

    def disk(self) -> int:
        return sum(file.stat().st_blocks * 512
                   for file in self.directory.rglob('*') if file.is_file())


def show(subjects: list[Subject], writes: bool) -> None:
    """Print the table."""
    print(f'{"":8}{"filling, ns":>16}{"finding, ns":>24}{"MiB, million":>16}'
          + (f'{"checkpoint, us":>18}' if writes else ''))
    print(f'{"index":8}{"wall":>8}{"cpu":>8}{"new":>8}{"image":>8}'
          f'{"single":>8}{"memory":>8}{"disk":>8}'
          + (f'{"new":>9}{"single":>9}{"found":>8}{"loads":>7}' if writes
             else ''))
    for s in subjects:
        median = {name: statistics.median(figures)
                  for name, figures in s.figures.items()}
        million = s.blocks / 1e6 * common.MIB
        row = (f'{s.index:8}{s.fill.wall / s.blocks * 1e9:8.0f}'
               f'{s.fill.cpu / s.blocks * 1e9:8.0f}')
        row += ''.join(f'{median[kind]:8.0f}' for kind in KINDS)
        memory = s.repo.statistics()['filter_bytes']
        row += f'{memory / million:8.1f}{s.disk() / million:8.1f}'
        if writes:
            row += (f'{median["stored"]:9.1f}{median["found"]:9.1f}'
                    f'{median["hits"]:8.1%}{median["cold_loads"]:7.2f}')
        print(row, flush=True)


def main() -> None:
    """Measure with the command line's arguments."""
    parser = common.arguments(
        __doc__, rounds=5, filter_dir=True, blocks=(1_000_000, 'how many'),
        index_mib=(64, 'for the filter and caches'),
        indexes=('filter,inram,dtb,lmdb,leveldb', 'which'),
        writes=(0, 'to a volume, of each kind'))
    args = parser.parse_args()
    args.indexes = args.indexes.split(',')
    if args.blocks <= IMAGE or not set(args.indexes) <= set(
            hostfilter.INDEXES):
        parser.error(f'--blocks must be more than {IMAGE}, and --indexes some '
                     f'of {", ".join(hostfilter.INDEXES)}')
    with (common.place(args.dir) as d,
          common.place(args.filter_dir) as args.filter_dir,
          contextlib.ExitStack() as stack):
        path = os.path.join(d, 'repository')
        synthetic.make(path, args.blocks, data=args.writes > 0)
        subjects = []
        for index in args.indexes:
            subjects.append(Subject(path, d, index, args))
            stack.callback(subjects[-1].repo.close)
        for _ in range(args.rounds):
            for kind in KINDS:
                for subject in subjects:
                    subject.find(kind)
            for duplicates in (False, True) if args.writes else ():
                for subject in subjects:
                    subject.write(args.writes, duplicates)
        show(subjects, args.writes > 0)


if __name__ == '__main__':
    main()
