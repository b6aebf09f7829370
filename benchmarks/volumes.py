# SPDX-License-Identifier: Apache-2.0

"""Measure the cost of a volume: making, writes, snapshots and memory.

Run it from a checkout in which the extension is built::

    python benchmarks/volumes.py [--mib 1024] [--writes 20000] [--rounds 3]
        [--dir DIR] [--filter-dir /dev/shm]

In each round, in turns on the same disk:

* random writes of 4 KiB over MIB, with a flush after every 32, and checkpoints
  whenever they are due; the same into a plain file that has its blocks;
* a part of these, with a flush after each;
* the same bytes written in order, 1 MiB at a time, with a flush and a
  checkpoint at the end; and into a new plain file, with an fdatasync;
* a snapshot after the random writes, with its checkpoint and without;
* a clone of that snapshot.

A ratio is the volume's rate to that of the plain file, of the same round. The
written bytes are those that the process gave to the file system, of all that
it wrote, for each byte that the caller wrote. At the end: the memory that a
process gains by opening a volume of 100 GiB that is idle. No figure passes or
fails.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
import random
import threading
import time

import common
from common import GIB
from common import MIB

from glance_dedup.repository import image_repository
from glance_dedup.repository import openvolumes

PAGE = 4096
FLUSH_EVERY = 32
LARGE = 100 * GIB


def written() -> int:
    """Return the bytes that this process has written so far."""
    with open('/proc/self/io') as f:
        return next(int(line.split()[1]) for line in f
                    if line.startswith('wchar:'))


@contextlib.contextmanager
def keeper(volume: openvolumes.Volume) -> Iterator[Callable[[], None]]:
    """A thread that makes checkpoints when they are due, as a server's.

    Yields a function to be called after each write.
    """
    due = threading.Event()
    ending = False

    def keep() -> None:
        while due.wait() and not ending:
            due.clear()
            if volume.needs_checkpoint():
                volume.checkpoint()

    def wrote() -> None:
        if volume.needs_checkpoint():
            due.set()
    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield wrote
    finally:
        ending = True
        due.set()
        thread.join()


class Bench:
    """One repository with volumes, and a plain file beside it."""

    def __init__(self, directory: str, filter_dir: str, size: int,
                 writes: int) -> None:
        path = os.path.join(directory, 'repository')
        image_repository.Repository.create(path)
        self.repo = image_repository.Repository(path, filter_dir=filter_dir)
        self.directory = directory
        self.size = size
        self.writes = writes
        self.table = common.Table()
        # The pages are like a guest's: all are different, and a third of each
        # compresses. Only a number in each is new, since making them is within
        # the time.
        rng = random.Random(1)
        self._pages = memoryview(bytearray().join(
            rng.randbytes(2700).ljust(PAGE) for _ in range(MIB // PAGE)))
        self._numbers = self._pages.cast('Q')[::PAGE // 8]

    def page(self, number: int) -> memoryview:
        place = number % len(self._numbers)
        self._numbers[place] = number
        return self._pages[place * PAGE:(place + 1) * PAGE]

    def pages(self, first: int) -> memoryview:
        """Return the MiB of pages from number `first` on."""
        for place in range(len(self._numbers)):
            self._numbers[place] = first + place
        return self._pages

    def random_writes(self, write: Callable[[memoryview, int], object],
                      flush: Callable[[], None], first: int) -> None:
        """Write the pages from number `first` on, to random places."""
        rng = random.Random(first)
        for number in range(self.writes):
            write(self.page(first + number),
                  rng.randrange(self.size // PAGE) * PAGE)
            if number % FLUSH_EVERY == FLUSH_EVERY - 1:
                flush()
        flush()

    def flushed_writes(self, write: Callable[[memoryview, int], object],
                       flush: Callable[[], None], first: int) -> None:
        """Write fewer pages, each followed by a flush."""
        rng = random.Random(first)
        for number in range(self.writes // FLUSH_EVERY):
            write(self.page(first + number),
                  rng.randrange(self.size // PAGE) * PAGE)
            flush()

    def in_order(self, write: Callable[[memoryview, int], object],
                 flush: Callable[[], None], first: int) -> None:
        for at in range(0, self.size, MIB):
            write(self.pages(first + at // PAGE), at)
        flush()

    def plain(self, name: str, work: Callable[..., None], first: int,
              size: int) -> None:
        path = os.path.join(self.directory, 'plain')
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            if work != self.in_order:
                os.posix_fallocate(fd, 0, self.size)
                os.fsync(fd)
            spent = common.timed(
                work, lambda data, at: os.pwrite(fd, data, at),
                lambda: os.fdatasync(fd), first)
        finally:
            os.close(fd)
            os.unlink(path)
        self.table.add(name, size, spent)

    def volume(self, name: str, work: Callable[..., None], first: int,
               size: int, of: str) -> None:
        def run() -> None:
            with keeper(volume) as wrote:
                def write(data: memoryview, at: int) -> None:
                    volume.write(data, at)
                    wrote()
                work(write, volume.flush, first)
            if work == self.in_order:
                volume.checkpoint()
        with openvolumes.open_volume(self.repo, 'disk') as volume:
            before = written()
            self.table.add(name, size, common.timed(run), of=of)
            self.table.figure(f'{name}: written',
                              (written() - before) / size, 'bytes per byte')

    def milliseconds(self, name: str, function: Callable, *args) -> None:
        start = time.perf_counter()
        function(*args)
        self.table.figure(name, (time.perf_counter() - start) * 1000, 'ms')

    def clone(self, image_id: str, name: str) -> None:
        with self.repo.open_image(image_id) as image:
            openvolumes.create(self.repo, name, image=image)

    def round(self, number: int) -> None:
        first = number << 32
        size = self.writes * PAGE
        openvolumes.create(self.repo, 'disk', self.size)
        common.warm_pages(min(self.size, 2 * GIB), self.directory)
        self.plain('plain file, in order', self.in_order, first, self.size)
        self.volume('volume, in order, with its checkpoint', self.in_order,
                    first, self.size, 'plain file, in order')
        self.plain('plain file, random', self.random_writes, first + 1, size)
        self.volume('volume, random', self.random_writes, first + 1, size,
                    'plain file, random')
        first += 2 * self.writes
        size = self.writes // FLUSH_EVERY * PAGE
        self.plain('plain file, each flushed', self.flushed_writes, first,
                   size)
        self.volume('volume, each flushed', self.flushed_writes, first, size,
                    'plain file, each flushed')
        with openvolumes.open_volume(self.repo, 'disk') as volume:
            self.milliseconds('checkpoint', volume.checkpoint)
            self.milliseconds('snapshot', volume.snapshot, 'snapshot')
        self.milliseconds('clone', self.clone, 'snapshot', 'clone')
        for name in ('disk', 'clone'):
            openvolumes.delete(self.repo, name)
        self.repo.delete('snapshot')

    def idle(self) -> None:
        openvolumes.create(self.repo, 'large', LARGE)
        with openvolumes.open_volume(self.repo, 'large') as volume:
            for at in range(0, LARGE, GIB):
                volume.write(self.page(at), at)
            volume.checkpoint()
        before = common.memory().resident
        with openvolumes.open_volume(self.repo, 'large') as volume:
            volume.read(PAGE, 0)
            self.table.figure('an idle volume of 100 GiB',
                              (common.memory().resident - before) / MIB,
                              'MiB of memory')


def main() -> None:
    args = common.arguments(__doc__, mib=1024, rounds=3, filter_dir=True,
                            writes=(20000, 'random ones')).parse_args()
    with (common.place(args.dir) as directory,
          common.place(args.filter_dir) as filters):
        bench = Bench(directory, filters, args.mib * MIB, args.writes)
        for number in range(args.rounds):
            bench.round(number)
        bench.idle()
        bench.repo.close()
        bench.table.show()


if __name__ == '__main__':
    main()
