# SPDX-License-Identifier: Apache-2.0

"""The experiments of Dmdedup, on this store.

Run it from a checkout in which the extension is built; gcc is needed::

    python benchmarks/papers/dmdedup.py [--quick] [--scale tiny|quick|full]
        [--rounds 3] [--trace FILE [--trace-block 4096]] [--hints]
        [--kernels TAR..] [--dir DIR] [--filter-dir /dev/shm] [--plot DIR]

After Mandal, "Design and Implementation of an Open-Source Deduplication
Platform for Research", 2015, and Tarasov and others, "Dmdedup: Device Mapper
Target for Data Deduplication", OLS 2014. Their figures stand beside those
measured; for traces they are multiples of their raw disk's. That disk had a
head: 147 MB/s in order, and 420 random writes per second. Only their CBT had
sync points, so their INRAM and DTB stand at those with one at the end. Three
targets get the same writes, with a sync point after every one, every 1000, and
at the end only:

* *plain file*: it was written whole before, and is written with ``O_DIRECT``,
  32 requests at a time (``aio.py``). It stands for the raw disk, and each
  other figure is also given as a multiple of its;
* *volume*: one of this store, with one of the indexes. A flush is its sync
  point. Its checkpoints are in the time, with one at the end;
* *direct*: Dmdedup's own way, without a journal (``directmap.c``), with each
  metadata backend. DTB's memory is limited to shares of the metadata's size,
  which is what INRAM's tables take, and LevelDB's to that size. DTB keeps at
  least 8 pages of each table. LMDB has the page cache, and no limit. Keys are
  the first 8 bytes of a fingerprint, where Dmdedup has all 16 of an MD5. No
  references are counted.

The data: blocks of 4 KiB that are all different, or all the same, written in
order, 640 KB at a time, or to random places, 4 KiB at a time; and traces
(``traces.py``), real ones with ``--trace``, else made with the ratios that
Dmdedup's had, with a sync point every 1000 writes. Each run ends after some
seconds. Volumes and direct stores compress nothing, and write blocks past the
page cache; a volume's journal goes through it.

``--kernels`` adds the blocks of tar files (``kernels.py`` fetches them), in
both ways, with files aligned to 512 and to 4096 bytes, and runs that may take
ten times as long, since duplicates come with the second file. ``--hints`` adds
what hints gain (``hints.py``), beside Mandal's figures.

All targets are measured in turns, in each of the rounds. The table has the
medians, and the lowest and highest multiple of the plain file of a round.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import functools
import itertools
import json
import mmap
import os
import pathlib
import random
import shutil
import statistics
import struct
import subprocess
import tempfile
import time
from typing import Any, NamedTuple, Protocol

import _path  # noqa: F401  finds the modules beside it
import aio
import common
from common import MIB
import kernels
import plot
import synthetic
import traces

from glance_dedup.repository import hostfilter
from glance_dedup.repository import image_repository
from glance_dedup.repository import openvolumes

BLOCK = 4096
#: Blocks of a write in order: 640 KB.
TOGETHER = 160
BACKENDS = ('inram', 'dtb', 'lmdb', 'leveldb')
CACHES = (0.3, 25, 50, 75, 100, 135)    # of DTB, per cent of the metadata
EVERY = (1, 1000, 0)    # writes to a sync point; 0: one at the end
TRACE_EVERY = 1000
LIMIT = 3600


class Scale(NamedTuple):
    """The amount of work."""

    mib: int        #: of the disk that is written to
    seconds: float  #: of each run
    lines: int      #: of each trace
    rounds: int
    caches: tuple[float, ...] = CACHES
    every: tuple[int, ...] = EVERY


SCALES = {'tiny': Scale(4, 0.05, 300, 2, (0.3, 135), (1000,)),
          'quick': Scale(1024, 1.5, 100_000, 3),
          'full': Scale(16384, 20, 2_000_000, 3)}


# -- what Dmdedup's authors published -----------------------------------------

#: By the way of writing: the unit, and the rate of their disk.
RAW = {'sequential': ('MB/s', 147.0), 'random': ('IOPS', 420.0)}
#: Lowest and highest rate, by data, backend and cache. Their CBT is LMDB here.
#: They give no rates of LevelDB, and for random writes one range for all.
_UNIQUE = {'inram': (147, 147), 'dtb': (34, 147)}
#: 0: the paper gives only the maximum.
_CBT = {1: (3, 6), 1000: (13, 34), 0: (0, 95)}
_RANDOM = (670, 11100)
#: Multiples of the raw disk's rate.
_DUPLICATE = {'sequential': (1.4, 2), 'random': (2, 140)}
#: In order, by CBT with a sync point after each write: not among these.
_CBT_DUPLICATE = 12
_TRACES = (1.6, 7.2)
#: INRAM's tar files in order. They give no other figures of tar files.
_TARS = {'sequential tar-512': (1.11, 1.11),
         'sequential tar-4096': (1.45, 1.45)}


def published(data: str, backend: str,
              every: int) -> tuple[float, float] | None:
    """Return their lowest and highest multiple of the raw disk's rate.

    :param data: the name of a data set
    """
    if backend not in ('inram', 'dtb', 'lmdb'):
        return None
    way, _, kind = data.partition(' ')
    if way not in RAW:
        return _TRACES
    if kind.startswith('tar'):
        return _TARS.get(data) if backend == 'inram' else None
    if backend != 'lmdb' and every:
        return None     # they had no sync points
    if (data, every) == ('sequential duplicate', 1):
        multiple = _CBT_DUPLICATE / RAW[way][1]
        return multiple, multiple
    if kind == 'duplicate':
        return _DUPLICATE[way]
    low, high = (_RANDOM if way == 'random' else
                 _CBT[every] if backend == 'lmdb' else _UNIQUE[backend])
    return low / RAW[way][1], high / RAW[way][1]


# -- data ---------------------------------------------------------------------

class DataSet(NamedTuple):
    """The writes of a run, and their blocks."""

    name: str
    block: int
    work: traces.Work
    seconds: float  #: of each run
    caches: tuple[float, ...]
    every: tuple[int, ...] = (TRACE_EVERY,)
    figure: str = ''    #: its number among Dmdedup's; '': it has none

    @property
    def unit(self) -> str:
        """Return the unit of its rates."""
        return 'MB/s' if self.name.startswith('sequential') else 'IOPS'

    @property
    def slug(self) -> str:
        """Return a part of a file's name: of the two tar formats, too."""
        return '-'.join(filter(None, (
            self.figure.replace('.', '-'), self.name.partition('-')[2])))


def place_all(way: str, ids: bytes) -> traces.Work:
    """Write blocks with these ids to a disk that has as many.

    In order, blocks that do not fill a write are left out.
    """
    rng = random.Random(1)
    length = (TOGETHER if way == 'sequential' else 1) * traces.ID
    blocks = len(ids) // traces.ID
    pieces = [
        traces.operation(
            traces.WRITE, at // traces.ID if way == 'sequential'
            else rng.randrange(blocks), ids[at:at + length])
        for at in range(0, len(ids) - length + 1, length)]
    ids = ids[:len(pieces) * length]
    return traces.Work(b''.join(pieces), blocks, len(ids) // traces.ID, len(
        {ids[at:at + traces.ID] for at in range(0, len(ids), traces.ID)}))


def pattern(way: str, kind: str, blocks: int) -> traces.Work:
    """Write a disk once in order, or as many blocks to random places.

    :param kind: whether the blocks are ``unique``, or all are the same
    """
    return place_all(way, b''.join(
        struct.pack('<QQ', 1, i if kind == 'unique' else 1)
        for i in range(blocks)))


def patterns(scale: Scale) -> Iterator[DataSet]:
    """Yield the data sets of figures 4.1a, 4.1b, 4.2a and 4.2b."""
    for number, kind in enumerate(('unique', 'duplicate'), 1):
        for letter, way in zip('ab', RAW):
            yield DataSet(f'{way} {kind}', BLOCK,
                          pattern(way, kind, scale.mib * MIB // BLOCK),
                          scale.seconds, scale.caches, scale.every,
                          f'4.{number}{letter}')


def tars(paths: list[str], scale: Scale) -> Iterator[DataSet]:
    """Yield the data sets of figures 4.3a and 4.3b, if there are any files."""
    found = {} if not paths else {
        alignment: b''.join(block for path in paths
                            for block in kernels.ids(path, alignment))
        for alignment in kernels.ALIGNMENTS}
    for letter, way in zip('ab', RAW):
        for alignment, ids in found.items():
            yield DataSet(f'{way} tar-{alignment}', BLOCK,
                          place_all(way, ids), 10 * scale.seconds,
                          (scale.caches[0], 100), (TRACE_EVERY,),
                          f'4.3{letter}')


def trace(name: str, path: str, block: int, scale: Scale) -> DataSet:
    """Read a trace; ends the program if a line is bad, or there is none."""
    try:
        work = traces.work(traces.read(path, scale.lines), block)
    except (OSError, ValueError) as e:
        raise SystemExit(f'dmdedup: {e}') from None
    if not work.data:
        raise SystemExit(f'dmdedup: {path} has no lines')
    return DataSet(f'trace {name}', block, work, scale.seconds, scale.caches)


def made_traces(scale: Scale, directory: str) -> Iterator[DataSet]:
    """Make, and read, a trace for each of Dmdedup's."""
    for name, server in traces.SERVERS.items():
        path = os.path.join(directory, name)
        with open(path, 'w') as file:
            file.writelines(traces.generate(server, scale.lines))
        yield trace(name, path, server.block, scale)
        os.unlink(path)


# -- targets ------------------------------------------------------------------

class Target(Protocol):
    """A disk. Places and lengths are in bytes."""

    def write(self, data: bytes, at: int) -> None:
        """Write whole blocks."""

    def read(self, length: int, at: int) -> bytes:
        """Read whole blocks."""

    def sync(self) -> None:
        """Make the writes durable."""

    def finish(self) -> None:
        """Do the remaining work, and sync."""


class Nothing:
    """No disk: the cost of the replay itself."""

    def write(self, data: bytes, at: int) -> None:
        """Do nothing."""

    def read(self, length: int, at: int) -> bytes:
        """Return nothing."""
        return b''

    def sync(self) -> None:
        """Do nothing."""

    finish = sync


class Plain:
    """A file that was written whole, past the page cache where that works.

    Up to 32 writes are in flight: one alone would be less than a disk can do.
    A read waits for the writes before it.
    """

    def __init__(self, path: str, size: int) -> None:
        room = traces.MAX_COUNT * traces.SECTOR + BLOCK
        self._buffer = memoryview(mmap.mmap(-1, room))
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(path, flags | os.O_DIRECT)
        except OSError:
            self._fd = os.open(path, flags)
        self._queue = aio.Queue(self._fd, room)
        piece = self._buffer[:MIB]
        for at in range(0, size, MIB):
            os.pwrite(self._fd, piece, at)
        self.sync()

    def write(self, data: bytes, at: int) -> None:
        """Begin a write."""
        self._queue.write(data, at)

    def read(self, length: int, at: int) -> bytes:
        """Read into a buffer that lies as O_DIRECT needs it."""
        self._queue.drain()
        os.preadv(self._fd, [self._buffer[:length]], at)
        return bytes(self._buffer[:length])

    def sync(self) -> None:
        """Wait for all writes, and have the disk write its cache."""
        self._queue.drain()
        os.fdatasync(self._fd)

    finish = sync

    def close(self) -> None:
        """Close the file, which stays."""
        self._queue.close()
        os.close(self._fd)


class Volume:
    """An open volume, with its checkpoints when they are due."""

    def __init__(self, volume: openvolumes.Volume) -> None:
        self._volume = volume
        self.read = volume.read
        self.sync = volume.flush

    def write(self, data: bytes, at: int) -> None:
        """Write, with due checkpoints, which servers make in a thread."""
        self._volume.write(data, at)
        if self._volume.needs_checkpoint():
            self._volume.checkpoint()

    def finish(self) -> None:
        """Make a last checkpoint."""
        self._volume.flush()
        self._volume.checkpoint()


class Done(NamedTuple):
    """The result of a run."""

    operations: int
    bytes: int
    seconds: float

    def rate(self, unit: str) -> float:
        """MB/s, or operations per second."""
        return (self.bytes / 1e6 if unit == 'MB/s'
                else self.operations) / self.seconds


def replay(work: traces.Work, block: int, target: Target, every: int,
           seconds: float) -> Done:
    """Do the work, for so many seconds at most; directmap.c does it, too.

    :raises AssertionError: a checked block differs from the written one
    """
    done = size = writes = 0
    start = time.perf_counter()
    for kind, first, ids in traces.operations(work.data):
        if time.perf_counter() - start >= seconds:
            break
        length = len(ids) // traces.ID * block
        if kind == traces.WRITE:
            target.write(content(ids, block), first * block)
            writes += 1
            if every and writes % every == 0:
                target.sync()
        elif (target.read(length, first * block) != content(ids, block)
              and kind == traces.CHECK):
            raise AssertionError(f'block {first} is not what was written')
        done += 1
        size += length
    target.finish()
    return Done(done, size, time.perf_counter() - start)


def content(ids: bytes, block: int) -> bytes:
    """The bytes of blocks: each has its id, repeated."""
    times = block // traces.ID
    if len(ids) == traces.ID:
        return ids * times
    return b''.join(ids[i:i + traces.ID] * times
                    for i in range(0, len(ids), traces.ID))


# -- runs ---------------------------------------------------------------------

class Bench:
    """Runs on one disk; each but the plain file's in a repository of its own.

    :param directory: on the disk
    :param filters: a directory on a tmpfs
    """

    def __init__(self, directory: str, filters: str, program: str) -> None:
        self.directory = directory
        self._filters = filters
        self._program = program

    @contextlib.contextmanager
    def plain(self, data: DataSet) -> Iterator[Plain]:
        """A plain file that is as large as the data needs it."""
        path = os.path.join(self.directory, 'plain')
        target = Plain(path, data.work.blocks * data.block)
        try:
            yield target
        finally:
            target.close()
            os.unlink(path)

    @contextlib.contextmanager
    def _repository(self, **parameters: Any) -> Iterator[str]:
        path = os.path.join(self.directory, 'repository')
        image_repository.Repository.create(path, **parameters)
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def volume(self, data: DataSet, index: str, every: int) -> Done:
        """Replay on a volume with this index."""
        with (self._repository(block_size=data.block) as path,
              tempfile.TemporaryDirectory(dir=self.directory) as stores,
              tempfile.TemporaryDirectory(dir=self._filters) as filters,
              image_repository.Repository(
                  path, codec='none', direct_io='on', filter_dir=filters,
                  index=index, index_dir=stores) as repo):
            openvolumes.create(repo, 'disk', data.work.blocks * data.block)
            with openvolumes.open_volume(repo, 'disk') as volume:
                return replay(data.work, data.block, Volume(volume), every,
                              data.seconds)

    def direct(self, data: DataSet, backend: str, cache: int,
               every: int) -> tuple[Done, dict]:
        """Replay by directmap.c.

        :param cache: bytes
        :returns: also all that it printed
        """
        with (self._repository(block_size=data.block) as path,
              tempfile.TemporaryDirectory(dir=self.directory) as stores):
            found = run_direct(self._program, path, stores, backend, cache,
                               data.work, every, data.seconds)
        return Done(found['operations'], found['bytes'],
                    found['seconds']), found


def run_direct(program: str, path: str, stores: str, backend: str, cache: int,
               work: traces.Work, every: int, seconds: float) -> dict:
    """Run directmap.c on a repository; return its output."""
    with image_repository.Repository(path) as repo:
        is_ = repo.parameters
    operations = os.path.join(stores, 'operations')
    pathlib.Path(operations).write_bytes(work.data)
    done = subprocess.run(
        [program, path, is_.repository_id, str(is_.block_size),
         str(is_.group_slots), str(is_.segment_size), is_.fingerprint,
         backend, stores, str(max(work.blocks, work.different)), str(cache),
         str(every), str(seconds), operations],
        stdout=subprocess.PIPE, timeout=LIMIT)
    if done.returncode != 0:
        raise SystemExit(f'dmdedup: the direct store with {backend} failed')
    return json.loads(done.stdout)


# -- tables and figures -------------------------------------------------------

class Row(NamedTuple):
    """A line of the table."""

    target: str
    cache: float | None     #: per cent of the metadata
    run: Callable[[int], Done]  #: its argument: writes to a sync point
    rates: list[list[float]]    #: of the rounds, by the choice of sync points


def sync_words(every: int) -> str:
    """Return words for the interval of sync points."""
    return {0: 'at the end', 1: 'each write'}.get(every, f'{every:,} writes')


def show_head(data: DataSet, rounds: int) -> None:
    """Print the lines' heading."""
    raw = RAW.get(data.name.partition(' ')[0])
    print(f'\n{data.name}: blocks of {data.block}, {data.work.written:,} '
          f'written at most, {data.work.ratio:,.2f} for each different one; '
          f'a disk of {data.work.blocks * data.block / MIB:,.0f} MiB; '
          f'rounds: {rounds}')
    print(f'{"sync point":>24}' + ''.join(
        f'{sync_words(every):^47}' for every in data.every).rstrip())
    theirs = f'Dmdedup, {data.unit}' if raw else 'Dmdedup, raw=1'
    print(f'{"cache":>24}' + f'{data.unit:>9}{"plain=1":>8}'
          f'{"lowest-highest":>15}{theirs:>15}' * len(data.every))
    if raw:
        cells = ''.join(f'{"":32}{raw[1]:15.0f}' for _ in data.every)
        print(f'{"raw disk":24}{cells}')


def show(data: DataSet, row: Row, plain: Row) -> None:
    """Print a line of the table."""
    line = f'{row.target:18}' + (f'{"-":>6}' if row.cache is None
                                 else f'{row.cache:>6g}')
    _, raw = RAW.get(data.name.partition(' ')[0], ('', 1))
    for every, rates, of in zip(data.every, row.rates, plain.rates):
        theirs = published(data.name, row.target.removeprefix('direct, '),
                           every)
        words = ('' if theirs is None else
                 between(*(figure * raw for figure in theirs)))
        # Each by the plain file's rate of the same round.
        ratios = [rate / plain_rate for rate, plain_rate in zip(rates, of)]
        interval = f'{min(ratios):.2f}-{max(ratios):.2f}'
        line += (f'{statistics.median(rates):9,.0f}'
                 f'{statistics.median(ratios):8.2f}{interval:>15}{words:>15}')
    print(line.rstrip(), flush=True)


def between(low: float, high: float) -> str:
    """Two figures, or one if they are equal; a first one of 0 is unknown."""
    words = [f'{figure:,.0f}' if figure >= 10 else f'{figure:.2g}'
             for figure in (low, high)]
    if not low:
        return f'up to {words[1]}'
    return words[0] if words[0] == words[1] else '-'.join(words)


class Direct:
    """Runs of directmap.c, with caches by the size of their metadata."""

    def __init__(self, bench: Bench, data: DataSet) -> None:
        self._bench = bench
        self._data = data
        self.metadata = 0   #: bytes; INRAM's run, which is the first, sets it
        self.hashing: list[float] = []

    def run(self, backend: str, cache: float, every: int) -> Done:
        """Replay once.

        :param cache: per cent of the metadata
        """
        done, found = self._bench.direct(
            self._data, backend, int(self.metadata * cache / 100), every)
        if backend == 'inram':
            self.metadata = max(self.metadata, found['memory'])
        self.hashing.append(found['hashing'] / 1e6)
        return done


def targets(bench: Bench, data: DataSet, plain: Target,
            direct: Direct) -> list[Row]:
    """Return the lines of the table, without rates; INRAM is before DTB."""
    rows = [Row('plain file', None, lambda every: replay(
        data.work, data.block, plain, every, data.seconds), [])]
    for index in hostfilter.INDEXES:
        rows.append(Row(f'volume, {index}', None,
                        functools.partial(bench.volume, data, index), []))
    for backend in BACKENDS:
        for cache in data.caches if backend == 'dtb' else (None,):
            rows.append(Row(f'direct, {backend}', cache, functools.partial(
                direct.run, backend, 100 if cache is None else cache), []))
    for row in rows:
        row.rates.extend([] for _ in data.every)
    return rows


def measure(bench: Bench, data: DataSet, rounds: int) -> list[Row]:
    """Run all targets in turns, and print their table."""
    direct = Direct(bench, data)
    with bench.plain(data) as plain:
        rows = targets(bench, data, plain, direct)
        for _ in common.count_rounds(rounds, f'{data.name}, round'):
            for row in rows:
                for rates, every in zip(row.rates, data.every):
                    rates.append(row.run(every).rate(data.unit))
    show_head(data, rounds)
    for row in rows:
        show(data, row, rows[0])
    print(f'The metadata takes {direct.metadata / MIB:.2f} MiB. Fingerprints '
          f'alone, on one thread: {statistics.median(direct.hashing):,.0f} '
          'MB/s.', flush=True)
    return rows


def draw(data: DataSet, rows: list[Row], directory: str) -> None:
    """Draw a figure: the rates by target, some caches, and sync points."""
    shown = [row for row in rows
             if row.cache in (None, data.caches[0], 50, data.caches[-1])]
    plot.bars(
        [row.target if row.cache is None else f'{row.target}, {row.cache:g} %'
         for row in shown],
        {f'sync point: {sync_words(every)}': [
            statistics.median(row.rates[i]) for row in shown]
         for i, every in enumerate(data.every)},
        data.unit, f'{data.figure}: {data.name}',
        os.path.join(directory, f'experiments-dmdedup-{data.slug}.svg'),
        digits=0)


# -- limits -------------------------------------------------------------------

def memcpy_rate() -> float:
    """Return MB/s at which this machine copies memory."""
    source, copy = b'x' * (64 * MIB), bytearray(64 * MIB)
    # The first time the system has to give the pages.
    return max(len(source) / common.timed(
        copy.__setitem__, slice(None), source).wall / 1e6 for _ in range(3))


def show_limits(bench: Bench, scale: Scale) -> None:
    """Print the machine's limits, which no figure can exceed."""
    memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    print(f'a disk of {scale.mib:,} MiB; {memory / MIB:,.0f} MiB of memory; '
          f'at most {scale.seconds:g} s each\n')
    print(f'{"copying memory":32}{memcpy_rate():10,.0f} MB/s')
    for data in patterns(scale):
        if not data.name.endswith(' unique'):
            continue
        reads = data.work._replace(data=b''.join(
            traces.operation(traces.READ, first, ids)
            for _, first, ids in traces.operations(data.work.data)))
        with bench.plain(data) as target:
            for name, work, on in (
                    ('replay without a disk', data.work, Nothing()),
                    ('disk, reads', reads, target),
                    ('disk, writes', data.work, target)):
                done = replay(work, BLOCK, on, 0, data.seconds)
                way = data.name.partition(' ')[0]
                print(f'{f"{name}, {way}":32}{done.rate(data.unit):10,.0f} '
                      f'{data.unit}', flush=True)


# -- hints --------------------------------------------------------------------

def show_hints(directory: str, filters: str, scale: Scale,
               figures: str | None) -> None:
    """Measure the gain of hints, and draw it, as described in hints.py.

    :param figures: the directory for the figure; None: it is not drawn
    """
    import hints
    # Less has no room for the journal of an ext4.
    mib = min(256, max(64, scale.mib))
    table = hints.measure(directory, filters, mib, 3)
    print()
    table.show()
    rates = collections.defaultdict(list)
    for gain in hints.gains(table):
        rates[gain.hint].append(gain.rate)
    gains = {hint: (min(found), max(found)) for hint, found in rates.items()}
    theirs = hints.DMDEDUP
    for kind, found in gains.items():
        print(f'{kind}: {found[0]:.2f} to {found[1]:.2f} times the rate '
              f'without it; {theirs[kind][0]} to {theirs[kind][1]} with '
              'Dmdedup')
    if figures:
        plot.bars(
            list(gains), {f'{whose}, {end}': [of[kind][i] for kind in gains]
                          for whose, of in (('here', gains),
                                            ('Dmdedup', theirs))
                          for i, end in enumerate(('lowest', 'highest'))},
            'rate with the hint; 1: as without', '6.1 to 6.4: hints',
            os.path.join(figures, 'experiments-dmdedup-6.svg'), digits=2)


def main() -> None:
    """Measure with the command line's arguments."""
    parser = common.arguments(
        __doc__, filter_dir=True,
        quick=(False, 'as --scale quick, unless that is given'),
        hints=(False, 'also measure what hints gain'))
    parser.add_argument('--scale', choices=SCALES,
                        help='how much is done (default: full)')
    parser.add_argument('--rounds', type=int,
                        help='how often (default: by the scale)')
    parser.add_argument('--trace', metavar='FILE', action='append',
                        help='replay real traces, and nothing else')
    parser.add_argument('--trace-block', type=int, choices=(512, 4096),
                        default=4096,
                        help='bytes of their blocks (default: %(default)s)')
    parser.add_argument('--kernels', metavar='TAR', nargs='+', default=[],
                        help='also write the blocks of tar files')
    plot.argument(parser, 'DIR')
    args = parser.parse_args()
    scale = SCALES[args.scale or ('quick' if args.quick else 'full')]
    rounds = args.rounds or scale.rounds
    real = [trace(os.path.basename(path), path, args.trace_block, scale)
            for path in args.trace or ()]
    with (common.place(args.dir) as d,
          common.place(args.filter_dir) as filters):
        bench = Bench(d, filters, synthetic.build(d, 'directmap', 'linearmap'))
        show_limits(bench, scale)
        for data in real or itertools.chain(
                patterns(scale), tars(args.kernels, scale),
                made_traces(scale, d)):
            rows = measure(bench, data, rounds)
            if args.plot and data.figure:
                draw(data, rows, args.plot)
        if args.hints:
            show_hints(d, filters, scale, args.plot)
        if args.kernels:
            kernels.show(args.kernels)


if __name__ == '__main__':
    main()
