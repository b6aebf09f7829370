# SPDX-License-Identifier: Apache-2.0

"""Measure the savings from hints: NODEDUP, PREFETCH, and file systems.

Run it from a checkout in which the extension is built::

    python benchmarks/papers/hints.py [--mib 256] [--rounds 5] [--dir DIR]
        [--filter-dir /dev/shm]

In each round, with a repository of its own for each index:

* new data, as an upload and as writes to a volume in order with a checkpoint:
  with a search for duplicates, or without (NODEDUP); an upload also as a
  compressed one, of which only samples are searched;
* the same compressed file again, which must be found;
* a copy within a volume, read and written 8 MiB at a time after the caches are
  empty: with and without PREFETCH of the blocks to read, with the filter and
  without one;
* the journal of an ext4, written over and over with a checkpoint each time:
  with its superblock, which says where the journal is, and without.

A gain is the rate with the hint to that without, of the same round; and the
same for the work in each second of processor time. Beside them stand those of
Mandal, "Design and Implementation of an Open-Source Deduplication Platform for
Research", 2015, section 6.2 (also in FAST 2016), for Dmdedup with its data on
a disk and its metadata on an SSD. No figure passes or fails.
"""

from collections.abc import Callable, Iterator
import contextlib
import io
import os
import re
import shutil
import statistics
import subprocess
import tempfile
from typing import NamedTuple
import warnings

import _path  # noqa: F401  finds the modules beside it
import common
from common import MIB

from glance_dedup.repository import image_repository
from glance_dedup.repository import openvolumes

PIECE = 8 * MIB
GZIP = b'\x1f\x8b'
#: The figures of the paper: least and greatest gain, as ratios.
DMDEDUP = {'NODEDUP': (2.2, 5.4), 'PREFETCH': (1.2, 1.8),
           'metadata': (1.01, 1.10)}


def bytes_of(mib: int, head: bytes = b'') -> bytes:
    """Return data that is nowhere else."""
    return head + os.urandom(mib * MIB - len(head))


class Bench:
    """One repository; the figures go into a table that others share.

    :param index: as for a Repository; '': none
    """

    def __init__(self, directory: str, filter_dir: str, index: str,
                 table: common.Table) -> None:
        self.path = os.path.join(directory, f'repository-{index}')
        self.index = index
        self.table = table
        self._options: dict = {'filter_dir': filter_dir}
        if index == 'lmdb':
            self._options = {'index': index, 'index_dir': directory}
        elif not index:
            self._options = {'filter_dir': '/dev/null'}
            warnings.simplefilter('ignore', RuntimeWarning)
        image_repository.Repository.create(self.path)
        self.repo = image_repository.Repository(self.path, **self._options)

    def close(self) -> None:
        self.repo.close()
        shutil.rmtree(self.path)

    def again(self) -> None:
        """Reopen as another process, with groups on the disk only."""
        self.repo.close()
        os.sync()
        groups = os.path.join(self.path, 'groups')
        for name in os.listdir(groups):
            fd = os.open(os.path.join(groups, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        self.repo = image_repository.Repository(self.path, **self._options)

    def name(self, what: str) -> str:
        return f'{what}, {self.index or "no index"}'

    # -- NODEDUP ----------------------------------------------------------

    def uploads(self, mib: int) -> None:
        names = [self.name(f'upload, {how}') for how in (
            'looked for', 'compressed: samples', 'NODEDUP')]
        self.repo.put('warm', io.BytesIO(bytes_of(mib)))
        self.repo.delete('warm')
        for name, head, dedup in zip(names, (b'', GZIP, b''),
                                     (True, True, False)):
            data = bytes_of(mib, head)
            spent = common.timed(lambda: self.repo.put(
                'image', io.BytesIO(data), dedup=dedup))
            self.table.add(name, len(data), spent, of=names[0])
            if head:
                again = self.repo.put('same', io.BytesIO(data))
                self.table.figure(self.name('the same again: new'),
                                  again.new_bytes / MIB, 'MiB')
                self.repo.delete('same')
            self.repo.delete('image')

    def writes(self, mib: int) -> None:
        names = [self.name(f'volume, {how}')
                 for how in ('looked for', 'NODEDUP')]
        for name in names:
            data = bytes_of(mib)
            openvolumes.create(self.repo, 'disk', len(data))
            with openvolumes.open_volume(self.repo, 'disk') as volume:
                volume.set_dedup(name == names[0])

                def write() -> None:
                    for at in range(0, len(data), MIB):
                        put(volume, data[at:at + MIB], at)
                    volume.checkpoint()
                self.table.add(name, len(data), common.timed(write),
                               of=names[0])
            openvolumes.delete(self.repo, 'disk')

    # -- PREFETCH ---------------------------------------------------------

    def copies(self, mib: int) -> None:
        names = [self.name(f'copy, {how}')
                 for how in ('without a hint', 'PREFETCH')]
        for name in names:
            data = bytes_of(mib)
            openvolumes.create(self.repo, 'disk', 2 * len(data))
            with openvolumes.open_volume(self.repo, 'disk') as volume:
                volume.write(data, 0)
                volume.checkpoint()
            self.again()
            with openvolumes.open_volume(self.repo, 'disk') as volume:
                def copy() -> None:
                    for at in range(0, len(data), PIECE):
                        if name == names[1]:
                            volume.prefetch(PIECE, at)
                        put(volume, volume.read(PIECE, at), len(data) + at)
                    volume.checkpoint()
                self.table.add(name, len(data), common.timed(copy),
                               of=names[0])
                counters = volume.info().counters
            self.table.figure(f'{name}: found',
                              100 * counters['duplicate'] / len(data), '%')
            openvolumes.delete(self.repo, 'disk')

    # -- metadata ---------------------------------------------------------

    def metadata(self, mib: int) -> None:
        image = os.path.join(self.path, 'ext4')
        with open(image, 'wb') as f:
            f.truncate(mib * MIB)
        subprocess.run(['mkfs.ext4', '-q', '-b', '4096', '-J', 'size=16',
                        image], check=True)
        place, length = journal_of(image)
        names = [self.name(f'journal of ext4, {how}')
                 for how in ('without a hint', 'its superblock')]
        for name in names:
            openvolumes.create(self.repo, 'disk', mib * MIB)
            with openvolumes.open_volume(self.repo, 'disk') as volume:
                if name == names[1]:
                    with open(image, 'rb') as f:
                        volume.write(f.read(MIB), 0)
                volume.checkpoint()
                data = [bytes_of(length // MIB) for _ in range(8)]

                def write() -> None:
                    for piece in data:
                        volume.write(piece, place)
                        volume.checkpoint()
                self.table.add(name, sum(map(len, data)),
                               common.timed(write), of=names[0])
            openvolumes.delete(self.repo, 'disk')
        os.unlink(image)


def put(volume: openvolumes.Volume, data: bytes, at: int) -> None:
    volume.write(data, at)
    if volume.needs_checkpoint():
        volume.checkpoint()


def journal_of(image: str) -> tuple[int, int]:
    """Return the longest extent of an ext4's journal, and its whole MiB."""
    text = subprocess.run(['debugfs', '-R', 'stat <8>', image], check=True,
                          capture_output=True, text=True).stdout
    length, first = max(
        (int(last) + 1 - int(first), int(first)) for first, last
        in re.findall(r'\(\d+-\d+\):(\d+)-(\d+)', text))
    return first * 4096, length * 4096 // MIB * MIB


@contextlib.contextmanager
def benches(directory: str, filter_dir: str, table: common.Table
            ) -> Iterator[Callable[[str], Bench]]:
    """Yield a function that makes repositories, which it removes later."""
    with tempfile.TemporaryDirectory(dir=directory) as place, \
            tempfile.TemporaryDirectory(dir=filter_dir) as filters, \
            contextlib.ExitStack() as stack:
        def make(index: str) -> Bench:
            bench = Bench(place, filters, index, table)
            stack.callback(bench.close)
            return bench
        yield make


def measure(directory: str, filter_dir: str, mib: int,
            rounds: int) -> common.Table:
    """Measure all figures of this benchmark, for others, too."""
    table = common.Table()
    with_ext4 = bool(shutil.which('mkfs.ext4') and shutil.which('debugfs'))
    common.warm_pages(2 * mib * MIB, directory)
    for _ in range(rounds):
        with benches(directory, filter_dir, table) as make:
            for index in ('filter', 'lmdb'):
                bench = make(index)
                bench.uploads(mib)
                bench.writes(mib)
                bench.copies(mib)
                if with_ext4:
                    bench.metadata(mib)
            make('').copies(mib)
    return table


class Gain(NamedTuple):
    """The median gain by a hint, in one place."""

    hint: str  #: as in DMDEDUP
    place: str
    rate: float
    #: that of work for each second of processor time, which others' load on
    #: the machine changes less
    processor: float


def gains(table: common.Table) -> list[Gain]:
    found = []
    for name, ratios in table.ratios.items():
        hint = ('metadata' if 'its superblock' in name else
                next((hint for hint in DMDEDUP if hint in name), None))
        for of, rates in ratios.items():
            if hint:
                seconds = [statistics.median(table.cpu[x])
                           + statistics.median(table.kernel[x])
                           for x in (of, name)]
                found.append(Gain(hint, name, statistics.median(rates),
                                  seconds[0] / seconds[1]))
    return found


def main() -> None:
    args = common.arguments(__doc__, mib=256, rounds=5,
                            filter_dir=True).parse_args()
    table = measure(args.dir, args.filter_dir, args.mib, args.rounds)
    table.show()
    print(f'\n{"gain":42}{"rate":>9}{"by processor time":>20}  Dmdedup, rate')
    for gain in gains(table):
        low, high = DMDEDUP[gain.hint]
        print(f'{gain.place:42}{gain.rate:9.2f}{gain.processor:20.2f}'
              f'  {low} to {high}')


if __name__ == '__main__':
    main()
