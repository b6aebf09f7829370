# SPDX-License-Identifier: Apache-2.0

"""Measure the cost of a volume: making, writes, snapshots and memory.

Run it from a checkout in which the extension is built::

    python benchmarks/volumes.py [--mib 1024] [--writes 20000] [--rounds 5]
        [--dir DIR] [--filter-dir /dev/shm]

A plain file of MIB is written whole before anything is measured, so its
blocks are on the disk, and no write changes the file system's metadata. In
each round, each case is measured with the volume and with this file, in turns:
the volume comes first in every second round. Before the clock starts, the
volume has a checkpoint, so no case pays for the one before.

* the same bytes written in order, 1 MiB at a time, with a flush at the end;
  for the volume, with a checkpoint, too;
* random writes of 4 KiB over MIB, with a flush after every 32, and checkpoints
  whenever they are due;
* a part of these, with a flush after each, by one thread and by four.

And with the volume only:

* the first flush after a crash: up to 240 MiB of random writes with a flush
  after every 32, and more without one, are in the journal of an owner that is
  gone. Shown are the time to open the volume, and the time of a first write
  and its flush;
* the same without any flush in the journal;
* a checkpoint of the random writes; a snapshot, and a clone of it.

A ratio is the volume's rate to that of the plain file, of the same round. The
bytes are those that the process gave to the file system (*written*), and that
the disk below DIR got (*to the disk*), for each byte that the caller wrote.
The kernel counts what all processes do to the disk, so nothing else may use
it; a file system in a file that is mounted by a loop device has counts of its
own. Without such counts the figure is left out. At the end: the memory that a
process gains by opening a volume of 100 GiB that is idle. No figure passes or
fails.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import functools
import os
import random
import sys
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
THREADS = (1, 4)
#: In the journal of an owner that is gone; at 256 MiB writes would wait.
JOURNAL = 240 * MIB

Write = Callable[[memoryview, int], object]
Flush = Callable[[], None]
#: Writes, and flushes; the third argument is the first page's number.
Work = Callable[[Write, Flush, int], None]


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
        self._filter_dir = filter_dir
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
        self._plain = os.open(os.path.join(directory, 'plain'),
                              os.O_RDWR | os.O_CREAT)
        self.in_order(self._write_plain, self._flush_plain, 1 << 60)

    def close(self) -> None:
        self.repo.close()
        os.close(self._plain)

    def _write_plain(self, data: memoryview, at: int) -> None:
        os.pwrite(self._plain, data, at)

    def _flush_plain(self) -> None:
        os.fdatasync(self._plain)

    def page(self, number: int) -> memoryview:
        place = number % len(self._numbers)
        self._numbers[place] = number
        return self._pages[place * PAGE:(place + 1) * PAGE]

    def pages(self, first: int) -> memoryview:
        """Return the MiB of pages from number `first` on."""
        for place in range(len(self._numbers)):
            self._numbers[place] = first + place
        return self._pages

    # -- works ----------------------------------------------------------------

    def random_writes(self, write: Write, flush: Flush, first: int,
                      count: int, every: int) -> None:
        """Write the pages from number `first` on to random places.

        :param every: a flush follows so many; 0: none does
        """
        rng = random.Random(first)
        for number in range(count):
            write(self.page(first + number),
                  rng.randrange(self.size // PAGE) * PAGE)
            if every and number % every == every - 1:
                flush()
        if every:
            flush()

    def flushed_writes(self, write: Write, flush: Flush, first: int,
                       threads: int) -> None:
        """Write random pages, each followed by a flush, by several threads."""
        count = self.writes // FLUSH_EVERY // threads

        def run(thread: int) -> None:
            rng = random.Random(first + thread)
            for number in range(count):
                # No two threads use a place of the buffer at once.
                write(self.page(first + number * threads + thread),
                      rng.randrange(self.size // PAGE) * PAGE)
                flush()
        common.all_at_once(run, [(thread,) for thread in range(threads)])

    def in_order(self, write: Write, flush: Flush, first: int) -> None:
        for at in range(0, self.size, MIB):
            write(self.pages(first + at // PAGE), at)
        flush()

    # -- measuring ------------------------------------------------------------

    def _add(self, name: str, size: int, run: Callable[[], None]) -> None:
        """Measure the rate, and the bytes that it takes."""
        os.sync()
        before, disk = written(), common.disk_work(self.directory)
        self.table.add(name, size, common.timed(run))
        self.table.figure(f'{name}: written', (written() - before) / size,
                          'bytes per byte')
        if disk is not None:
            os.sync()
            now = common.disk_work(self.directory)
            assert now is not None
            self.table.figure(f'{name}: to the disk',
                              (now.bytes - disk.bytes) / size,
                              'bytes per byte')
            self.table.figure(f'{name}: flushes',
                              (now.flushes - disk.flushes) * PAGE / size,
                              'per 4 KiB')

    def plain(self, name: str, work: Work, first: int, size: int) -> None:
        self._add(f'plain file, {name}', size, lambda: work(
            self._write_plain, self._flush_plain, first))

    def volume(self, name: str, work: Work, first: int, size: int,
               whole: bool) -> None:
        """Measure the work on the volume.

        :param whole: with a checkpoint at the end
        """
        def run() -> None:
            with keeper(volume) as wrote:
                def write(data: memoryview, at: int) -> None:
                    volume.write(data, at)
                    wrote()
                work(write, volume.flush, first)
            if whole:
                volume.checkpoint()
        with openvolumes.open_volume(self.repo, 'disk') as volume:
            volume.checkpoint()
            self._add(f'volume, {name}', size, run)

    def both(self, number: int, name: str, work: Work, size: int,
             whole: bool = False) -> None:
        """Measure the same work on the plain file and on the volume.

        :param number: of the round: which of them is the first
        """
        first = random.Random(f'{number} {name}').getrandbits(40)
        for kind in ('plain', 'volume') if number % 2 == 0 else (
                'volume', 'plain'):
            if kind == 'plain':
                self.plain(name, work, first, size)
            else:
                self.volume(name, work, first, size, whole)
        self.table.compare(f'volume, {name}', f'plain file, {name}')

    def milliseconds(self, name: str, function: Callable, *args) -> None:
        start = time.perf_counter()
        function(*args)
        self.table.figure(name, (time.perf_counter() - start) * 1000, 'ms')

    def after_a_crash(self, name: str, first: int, every: int) -> None:
        """Measure the opening, and the first flush, behind a full journal.

        :param every: a flush follows so many writes; 0: none does
        """
        with openvolumes.open_volume(self.repo, 'disk') as volume:
            volume.checkpoint()
            # A volume that is closed makes no checkpoint.
            self.random_writes(volume.write, volume.flush, first,
                               min(JOURNAL, self.size) // PAGE
                               // FLUSH_EVERY * FLUSH_EVERY, every)
            self.random_writes(volume.write, volume.flush, first + 1,
                               FLUSH_EVERY - 1, 0)
        with contextlib.ExitStack() as stack:
            def open_it() -> openvolumes.Volume:
                return stack.enter_context(
                    openvolumes.open_volume(self.repo, 'disk'))
            start = time.perf_counter()
            volume = open_it()
            self.table.figure(f'opening after a crash, {name}',
                              (time.perf_counter() - start) * 1000, 'ms')

            def write_and_flush() -> None:
                volume.write(self.page(first), 0)
                volume.flush()
            self.milliseconds(f'first flush after a crash, {name}',
                              write_and_flush)
            volume.checkpoint()

    def clone(self, image_id: str, name: str) -> None:
        with self.repo.open_image(image_id) as image:
            openvolumes.create(self.repo, name, image=image)

    def round(self, number: int) -> None:
        size = self.writes * PAGE
        openvolumes.create(self.repo, 'disk', self.size)
        common.warm_pages(min(self.size, 2 * GIB), self.directory)
        self.both(number, 'in order', self.in_order, self.size, whole=True)
        self.both(number, f'random, a flush after {FLUSH_EVERY}',
                  functools.partial(self.random_writes, count=self.writes,
                                    every=FLUSH_EVERY), size)
        with openvolumes.open_volume(self.repo, 'disk') as volume:
            self.milliseconds('checkpoint of what is left', volume.checkpoint)
            self.milliseconds('snapshot', volume.snapshot, 'snapshot')
        for threads in THREADS:
            count = self.writes // FLUSH_EVERY // threads * threads
            self.both(number, f'each flushed, threads: {threads}',
                      functools.partial(self.flushed_writes, threads=threads),
                      count * PAGE)
        first = (number + 1) << 41
        self.after_a_crash('flushed', first, FLUSH_EVERY)
        self.after_a_crash('not flushed', first + (1 << 40), 0)
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
        # This process has memory to reuse from what it did before.
        self.table.figure('an idle volume of 100 GiB', common.in_a_process(
            __file__, self.repo.path, self._filter_dir) / MIB,
            'MiB of memory')


def probe(path: str, filter_dir: str) -> None:
    """Print the bytes that this process gains by opening a volume."""
    with image_repository.Repository(path, filter_dir=filter_dir) as repo:
        before = common.memory().resident
        with openvolumes.open_volume(repo, 'large') as volume:
            volume.read(PAGE, 0)
            print(common.memory().resident - before)


def main() -> None:
    if sys.argv[1:2] == ['--probe']:
        return probe(*sys.argv[2:])
    args = common.arguments(__doc__, mib=1024, rounds=5, filter_dir=True,
                            writes=(20000, 'random ones')).parse_args()
    with (common.place(args.dir) as directory,
          common.place(args.filter_dir) as filters):
        bench = Bench(directory, filters, args.mib * MIB, args.writes)
        for number in common.count_rounds(args.rounds):
            bench.round(number)
        bench.idle()
        bench.close()
        bench.table.show()


if __name__ == '__main__':
    main()
