# SPDX-License-Identifier: Apache-2.0

"""Measure reading images back, beside the plain files on the same disk.

Run it from a checkout in which the extension is built::

    python benchmarks/reading.py [--rounds 5] [--dir DIR] IMAGE...

It stores the images, and a later version of each (``--versions``), in a
repository for each codec (``--codec``); sparse copies of the files are beside
them. ``stored`` and ``similar`` are zstd, then recompressed at level 9: in the
order in which the blocks came, and with similar ones next to each other. In
each round it reads all, from end to end, in turn from the files, by ``cat``,
and from each repository, by its engine, with a new handle:

* cold: before each image the page cache has nothing of any;
* warm: it has all of what is stored, and the cache of decompressed segments
  nothing;
* hot: that cache has all;

and through the socket of a dedupd, warm and hot; as rates of the images'
sizes, zeros included, with the median, the lowest and the highest of the
rounds, and their ratios to ``cat`` in the same round; and the bytes from the
disk. ``pread`` reads as ``cat`` does, in pieces and from a process like the
engine's, to show the effect of that on the comparison.

Then each image becomes a file, on the same disk and durable: by ``cp`` and
``sync`` from the plain file, and by ``glance-dedup image get`` from each
repository, cold and warm.

Then ``--ranges`` blocks of 4 KiB are read from each image, at random places
that are not zeros: the microseconds of the median one and of the slowest of a
hundred, from the file and from each repository, cold (the page cache has
nothing of any at first), warm (once more), and hot (once more, with the cache
of decompressed segments); and how many system calls that read each of them
took. ``--ranges 0`` leaves it out.

Then ``--storm`` versions of the first image are read at once, as when many
servers are booted: by as many ``cat`` from plain files, by threads from each
repository, and through a dedupd; cold, with the bytes from the disk, and the
files' bytes in the page cache afterwards. ``--storm 0`` leaves it out.
"""

from collections.abc import Callable
import contextlib
import os
import random
import resource
import statistics
import subprocess
import sys
import time

import common
from common import GIB
from common import MIB
from common import timed
import disk

from glance_dedup.repository import image_repository

BLOCK = 4096
COMMAND = sys.executable, '-m', 'glance_dedup.cli.entry', '-q'
CODECS = ('none', 'lz4', 'zstd', 'stored', 'similar')
RECOMPRESSED = ('stored', 'similar')


# -- ways to read -------------------------------------------------------------

class Stored:
    """A repository that has the images."""

    def __init__(self, directory: str, codec: str, images: list[str]) -> None:
        self.name = codec
        self.path = os.path.join(directory, f'repository-{codec}')
        self._codec = 'zstd' if codec in RECOMPRESSED else codec
        self._filters = directory
        image_repository.Repository.create(self.path)
        with self.open() as repo:
            for i, image in enumerate(images):
                print(f'{codec}: storing {i + 1} of {len(images)}',
                      file=sys.stderr)
                repo.put(f'image-{i}', image)
        if codec in RECOMPRESSED:
            conf = f'{self.path}.conf'
            with open(conf, 'w') as f:
                f.write('[dedupd]\nrecompress_cluster_similar = '
                        f'{codec == "similar"}\n')
            subprocess.run([*COMMAND, '--config-file', conf, '--repository',
                            self.path, '--socket', '', 'task', 'recompress',
                            '--codec', 'zstd', '--level', '9'], check=True,
                           stdout=subprocess.DEVNULL, cwd=common.TOP)

    def open(self) -> image_repository.Repository:
        return image_repository.Repository(self.path, codec=self._codec,
                                           filter_dir=self._filters)


def one_by_one(function, arguments: list[tuple]) -> None:
    for some in arguments:
        function(*some)


# -- costs --------------------------------------------------------------------

def bytes_from_disk() -> int:
    """Return the bytes that this process, and its children, read."""
    return 512 * sum(resource.getrusage(who).ru_inblock for who in (
        resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def bytes_cached(*paths: str) -> int:
    """Return the bytes of files, and of directories, in the page cache."""
    files = [os.path.join(top, name) for path in paths
             for top, _, names in os.walk(path) for name in names]
    files += filter(os.path.isfile, paths)
    done = subprocess.run(
        ['fincore', '--bytes', '--noheadings', '--output', 'RES', *files],
        check=True, stdout=subprocess.PIPE, text=True)
    return sum(map(int, done.stdout.split()))


def together(parts: list[common.Spent]) -> common.Spent:
    """Return the sum of several calls, one after the other."""
    return common.Spent(*(sum(part[i] for part in parts) for i in range(3)))


class Measure:
    """Adds the cost of reading so much to a table."""

    def __init__(self, table: common.Table, size: int) -> None:
        self.table = table
        self.size = size

    def __call__(self, name: str, of: str | None, function, *args) -> None:
        self.table.add(name, self.size, timed(function, *args), of)

    def cold(self, name: str, of: str | None, forget: list[str], function,
             arguments: list[tuple]) -> None:
        """Measure calls one by one, with nothing in the page cache."""
        before = bytes_from_disk()
        parts = []
        for some in arguments:
            disk.forget(*forget)
            parts.append(timed(function, *some))
        self.table.add(name, self.size, together(parts), of)
        self.table.figure(
            f'{name}: from the disk', (bytes_from_disk() - before) / MIB,
            'MiB', of and f'{of}: from the disk')


# -- one image after the other ------------------------------------------------

def restore_anew(one: Stored, image_id: str) -> None:
    with one.open() as repo:
        common.read_back(repo, image_id)


def one_after_the_other(measure: Measure, stored: list[Stored],
                        plain: list[str]) -> None:
    files = [(path,) for path in plain]
    names = [f'image-{i}' for i in range(len(plain))]
    measure.cold('cold: cat', None, plain, common.cat, files)
    for one in stored:
        measure.cold(f'cold: {one.name}', 'cold: cat', [one.path],
                     restore_anew, [(one, name) for name in names])
    one_by_one(common.cat, files)
    measure('warm: cat', None, one_by_one, common.cat, files)
    measure('warm: pread', 'warm: cat', one_by_one, disk.read_plain, files)
    for one in stored:
        for turn in range(2):
            with one.open() as repo:
                images = [(repo, name) for name in names]
                if turn == 0:
                    one_by_one(common.read_back, images)
                else:
                    measure(f'warm: {one.name}', 'warm: cat', one_by_one,
                            common.read_back, images)
    for one in stored:
        with one.open() as repo:
            images = [(repo, name) for name in names]
            repo.handle().set_segment_cache(2 * measure.size)
            one_by_one(common.read_back, images)
            measure(f'hot: {one.name}', 'warm: cat', one_by_one,
                    common.read_back, images)


def through_the_socket(measure: Measure, stored: list[Stored],
                       plain: list[str], directory: str) -> None:
    for one in stored:
        for turn, mib in (('warm', 64), ('hot', 2 * measure.size // MIB)):
            with common.daemon(directory, one.path, cache_mib=mib) as (
                    address, _):
                images = [(address, f'image-{i}') for i in range(len(plain))]
                one_by_one(common.read_from_daemon, images)
                measure(f'{turn}: {one.name}, dedupd', f'{turn}: {one.name}',
                        one_by_one, common.read_from_daemon, images)


# -- to files -----------------------------------------------------------------

def copy(path: str, target: str) -> None:
    subprocess.run(['cp', '--sparse=always', path, target], check=True)
    subprocess.run(['sync', target], check=True)


def get(one: Stored, image_id: str, target: str) -> None:
    subprocess.run(
        [*COMMAND, '--repository', one.path, '--socket', '', 'image', 'get',
         image_id, target],
        check=True, stdout=subprocess.DEVNULL, cwd=common.TOP)


def to_files(measure: Measure, stored: list[Stored], plain: list[str],
             directory: str) -> None:
    target = os.path.join(directory, 'copy')

    def removed(function, *args) -> common.Spent:
        spent = timed(function, *args, target)
        os.unlink(target)
        return spent

    def show(name: str, forget: list[str], function, arguments) -> None:
        for turn in ('cold', 'warm'):
            parts = []
            for some in arguments:
                if turn == 'cold':
                    disk.forget(*forget)
                parts.append(removed(function, *some))
            where = f'to a file, {turn}: '
            measure.table.add(
                where + name, measure.size,
                together(parts),
                None if function is copy else where + 'cp and sync')

    show('cp and sync', plain, copy, [(path,) for path in plain])
    for one in stored:
        show(f'image get, {one.name}', [one.path], get,
             [(one, f'image-{i}') for i in range(len(plain))])


# -- small ranges -------------------------------------------------------------

def random_places(path: str, count: int, seed: int) -> list[int]:
    """Return offsets of blocks of a file that are not zeros."""
    rng = random.Random(seed)
    blocks = os.path.getsize(path) // BLOCK
    places: list[int] = []
    with open(path, 'rb', buffering=0) as f:
        while len(places) < count:
            offset = rng.randrange(blocks) * BLOCK
            if os.pread(f.fileno(), BLOCK, offset).strip(b'\0'):
                places.append(offset)
    return places


def read_calls() -> int:
    """Return how many read calls this process has made."""
    with open('/proc/self/io') as f:
        return next(int(line.split()[1]) for line in f
                    if line.startswith('syscr:'))


class Turn:
    """Reads of single blocks: microseconds of each, read calls of all."""

    def __init__(self) -> None:
        self.spent: list[float] = []
        self.calls = 0

    def add(self, read: Callable[[memoryview, int], object],
            places: list[int]) -> None:
        view = memoryview(bytearray(BLOCK))
        before = read_calls()
        for offset in places:
            began = time.perf_counter()
            read(view, offset)
            self.spent.append((time.perf_counter() - began) * 1e6)
        self.calls += read_calls() - before

    def show(self, table: common.Table, turn: str, name: str) -> None:
        cuts = statistics.quantiles(self.spent, n=100)
        of = 'warm' if turn == 'hot' else turn
        for percent in (50, 99):
            where = f'p{percent}: '
            table.figure(f'4 KiB, {turn}, {where}{name}', cuts[percent - 1],
                         'us', None if name == 'pread' else
                         f'4 KiB, {of}, {where}pread')
        table.figure(f'4 KiB, {turn}, calls: {name}',
                     self.calls / len(self.spent), 'each')


def small_ranges(table: common.Table, stored: list[Stored],
                 plain: list[str], count: int, seed: int) -> None:
    places = [random_places(path, count, seed) for path in plain]
    cold, warm = Turn(), Turn()
    disk.forget(*plain)
    for path, offsets in zip(plain, places):
        with open(path, 'rb', buffering=0) as f:
            for turn in (cold, warm):
                turn.add(lambda view, offset, f=f: os.preadv(
                    f.fileno(), [view], offset), offsets)
    cold.show(table, 'cold', 'pread')
    warm.show(table, 'warm', 'pread')
    for one in stored:
        disk.forget(one.path)
        cold, warm, filling, hot = Turn(), Turn(), Turn(), Turn()
        with one.open() as repo:
            for i, offsets in enumerate(places):
                with repo.open_image(f'image-{i}') as image:
                    for turn in (cold, warm):
                        turn.add(image.readinto, offsets)
                    repo.handle().set_segment_cache(GIB)
                    for turn in (filling, hot):
                        turn.add(image.readinto, offsets)
                    repo.handle().set_segment_cache(0)
        cold.show(table, 'cold', one.name)
        warm.show(table, 'warm', one.name)
        hot.show(table, 'hot', one.name)


# -- many at once -------------------------------------------------------------

def storm(measure: Measure, stored: list[Stored], plain: list[str],
          directory: str) -> None:
    """:param measure: for a size of all of them"""
    table, reference = measure.table, 'storm: cat'

    def cached(name: str, *paths: str) -> None:
        table.figure(f'{name}: page cache', bytes_cached(*paths) / MIB, 'MiB',
                     None if name == reference else f'{reference}: page cache')

    measure.cold(reference, None, plain, common.all_at_once,
                 [(common.cat, [(path,) for path in plain])])
    cached(reference, *plain)
    names = [f'image-{i}' for i in range(len(plain))]
    for one in stored:
        name = f'storm: {one.name}'
        with one.open() as repo:
            measure.cold(
                name, reference, [one.path], common.all_at_once,
                [(common.read_back, [(repo, image) for image in names])])
        cached(name, one.path)
    one = stored[-1]
    name = f'storm: {one.name}, dedupd'
    disk.forget(one.path)
    with common.daemon(directory, one.path) as (address, _):
        measure(name, reference, common.all_at_once, common.read_from_daemon,
                [(address, image_id) for image_id in names])
    cached(name, one.path)


# -- rounds -------------------------------------------------------------------

def copied(images: list[str], directory: str) -> list[str]:
    """Make sparse copies, so that reads use the disk that is measured."""
    copies = []
    for i, image in enumerate(images):
        copies.append(os.path.join(directory, f'plain-{i}'))
        subprocess.run(['cp', '--sparse=always', image, copies[-1]],
                       check=True)
    return copies


@contextlib.contextmanager
def prepared(sources: list[str], versions: int, args):
    """Yield a directory, plain files, and repositories that have them."""
    with common.place(args.dir) as directory:
        plain = disk.with_versions(copied(sources, directory), versions,
                                   args.changed, directory)
        yield directory, plain, [
            Stored(directory, codec, plain)
            for codec in args.codec or CODECS]


def main() -> None:
    parser = common.arguments(
        __doc__, paths='+', rounds=5, **disk.VERSIONS,
        ranges=(500, 'blocks read from each'),
        storm=(8, 'images read at once'))
    parser.set_defaults(versions=2)
    parser.add_argument('--codec', action='append', choices=CODECS,
                        help='may be repeated (default: all)')
    args = parser.parse_args()
    table = common.Table()
    with prepared(args.paths, args.versions, args) as (
            directory, plain, stored):
        measure = Measure(table, sum(map(os.path.getsize, plain)))
        for number in common.count_rounds(args.rounds):
            one_after_the_other(measure, stored, plain)
            through_the_socket(measure, stored, plain, directory)
            to_files(measure, stored, plain, directory)
            if args.ranges:
                small_ranges(table, stored, plain, args.ranges, number)
    if args.storm:
        with prepared(args.paths[:1], args.storm, args) as (
                directory, plain, stored):
            measure = Measure(table, sum(map(os.path.getsize, plain)))
            for _ in common.count_rounds(args.rounds, 'storm'):
                storm(measure, stored, plain, directory)
    table.show()


if __name__ == '__main__':
    main()
