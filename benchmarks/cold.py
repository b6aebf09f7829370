# SPDX-License-Identifier: Apache-2.0

"""Measure the cost of cold groups: requests, bytes, and rates.

Run it from a checkout in which the extension is built::

    python benchmarks/cold.py [--store s3|swift] [--mib 1024] [--dir DIR]
        [--gib-month PRICE] [--per-1000-puts PRICE] [--per-1000-gets PRICE]
        [--gib-out PRICE] [--tib TIB] [--downloads NUMBER]

It stores an image of random bytes, has a run of the task ``tier`` move all of
it but the last group, and reads it three times: without a cache, with its
slices in the cache, and, before all that, hot. The object store is a real
server on this machine: the S3 gateway of JuiceFS, or Swift.

For the limits it also measures how fast a scrub hashes the same blocks, how
fast the server takes objects of a group's size that need no reads before, and
how fast it sends the same slices to a client that discards them.

The counts are those of the client, which an object store bills. They do not
depend on the machine, the speeds do. From the counts it computes the cost of a
month at the given prices; none is assumed, and amounts without a price are
left out of the sum.
"""

from concurrent import futures
import contextlib
import dataclasses
import os
import pathlib
import platform
import random
import shutil
import tempfile

import common

from dedupd.tasks import accounting
from dedupd.tasks import scrubber
from dedupd.tasks import tierer
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.objects import object_store
from glance_dedup.objects import slice_cache
from glance_dedup.repository import cold_settings
from glance_dedup.repository import image_repository
from glance_dedup.repository import prefix_owners
from tests.support import objects

SERVERS = {'s3': objects.JuiceGateway, 'swift': objects.Swift}
TIB_OF_MIB = 1 << 20


class Bench:
    """A repository with one image, attached to an object store."""

    def __init__(self, directory: str, server, mib: int, slots: int) -> None:
        self.mib = mib
        self._directory = directory
        path = os.path.join(directory, 'repository')
        image_repository.Repository.create(path, group_slots=slots)
        self.repo = image_repository.Repository(path, filter_dir=directory)
        self.settings = prefix_owners.attach(
            self.repo, server.location('cold'),
            server.credentials(pathlib.Path(directory, 'credentials')),
            cold_settings.Options(cache_mib=2 * mib))

    def store(self) -> None:
        rng = random.Random(1)
        with self.repo.begin('image') as transaction:
            for _ in range(self.mib):
                transaction.write(rng.randbytes(common.MIB))
            transaction.commit()

    def read(self) -> object_store.Counts:
        """Read the image; return the requests to the object store for it."""
        # Another handle has nothing cached.
        with image_repository.Repository(
                self.repo.path, filter_dir=self._directory) as repo:
            with repo.open_image('image') as image:
                size = sum(map(len, image.pieces(piece=common.PIECE)))
            assert size == self.mib * common.MIB
            figures = repo.slices.figures
        return object_store.Counts(gets=figures.gets,
                                   received=figures.received)

    def maintain(self, work):
        with maintainer_role.Maintainer(self.repo) as maintainer:
            accounting.run_once(maintainer, pacing.Pace())
            return common.timed(work, maintainer)

    def scrub(self) -> common.Spent:
        return self.maintain(lambda maintainer: scrubber.run_once(
            maintainer, pacing.Pace(), full=True))

    def tier(self) -> tuple[common.Spent, object_store.Counts]:
        """Move all groups that can; return the time, and the requests."""
        opened: list[object_store.ObjectStore] = []
        connect = cold_settings.connect

        def noted(settings):
            opened.append(connect(settings))
            return opened[-1]

        cold_settings.connect = noted
        try:
            spent = self.maintain(lambda maintainer: tierer.run_once(
                maintainer, pacing.Pace(), tierer.Policy(everything=True)))
        finally:
            cold_settings.connect = connect
        return spent, opened[-1].counts

    def put(self, size: int, count: int) -> common.Spent:
        """Send so many objects of a size, which are deleted again."""
        with (cold_settings.connect(self.settings) as store,
              tempfile.TemporaryFile(dir=self._directory) as file):
            file.write(random.Random(2).randbytes(size))
            file.flush()
            keys = [f'{self.settings.owner}/bench-{number}'
                    for number in range(count)]

            def send():
                for key in keys:
                    store.put(key, file)

            spent = common.timed(send)
            for key in keys:
                store.delete(key)
        return spent

    def get(self) -> common.Spent:
        """Get each slice of all groups, as many at once as a reader does."""
        with (cold_settings.connect(self.settings) as store,
              futures.ThreadPoolExecutor(slice_cache.PARALLEL) as pool):
            wanted = [(key, start, min(slice_cache.SLICE, size - start))
                      for key, size in store.keys(f'{self.settings.owner}/g/')
                      for start in range(0, size, slice_cache.SLICE)]
            return common.timed(lambda: sum(
                pool.map(lambda one: len(store.get(*one)), wanted)))

    def forget(self) -> None:
        place = pathlib.Path(self.repo.path, 'slices')
        for one in place.iterdir():
            shutil.rmtree(one)


def row(name: str, mib: float, wall: float,
        counts: object_store.Counts | None = None) -> None:
    asked = (f'{counts.puts:>8,}{counts.gets:>8,}{counts.others:>8,}'
             if counts else f'{"-":>8}' * 3)
    print(f'{name:40}{mib:>9,.0f}{wall:>9.2f}{mib / wall:>9.0f}{asked}',
          flush=True)


def measure(bench: Bench) -> dict[str, float]:
    """Print the table; return counts per MiB that was stored or read."""
    print(f'{"":40}{"MiB":>9}{"seconds":>9}{"MiB/s":>9}{"PUT":>8}{"GET":>8}'
          f'{"others":>8}')
    spent = common.timed(bench.store)
    row('upload', bench.mib, spent.wall)
    row('download, hot', bench.mib, common.timed(bench.read).wall)
    row('limit: hashing, by a scrub', bench.mib, bench.scrub().wall)
    spent, moved = bench.tier()
    result = spent.result
    if not result.groups:
        raise SystemExit('nothing moved: take more --mib than a group has')
    sent = moved.sent / common.MIB
    row('tier', sent, spent.wall, moved)
    size = result.sent_bytes // result.groups
    row('limit: PUT of such objects alone', sent,
        bench.put(size, result.groups).wall)
    idle, others = bench.tier()
    row('tier, with nothing to do', 0, max(idle.wall, 0.01), others)
    bench.forget()
    spent = common.timed(bench.read)
    row('download, cold', bench.mib, spent.wall, spent.result)
    read = spent.result
    spent = bench.get()
    row('limit: GET of these slices alone', spent.result / common.MIB,
        spent.wall)
    spent = common.timed(bench.read)
    row('download, slices cached', bench.mib, spent.wall, spent.result)
    share = 100 * result.disk_bytes / (sent * common.MIB)
    print(f'{result.groups} groups moved; {share:.1f} % of their bytes were '
          'given back to the disk')
    return {'put': moved.puts / sent, 'get_when_moved': moved.gets / sent,
            'others': moved.others / sent,
            'get': read.gets / sent,
            'received': read.received / common.MIB / sent,
            'idle': others.puts + others.gets + others.others}


@dataclasses.dataclass(frozen=True)
class Prices:
    """The prices of an object store; None: not known, or nothing."""

    gib_month: float | None
    per_1000_puts: float | None
    per_1000_gets: float | None
    gib_out: float | None


def bill(per_mib: dict[str, float], prices: Prices, tib: float,
         downloads: float, runs: float) -> None:
    """Print a month's amounts, and their costs at the prices."""
    stored = tib * TIB_OF_MIB
    out = downloads * per_mib['received'] * stored
    lines = [
        ('GiB stored', stored / 1024, prices.gib_month),
        ('PUT, once', per_mib['put'] * stored / 1000, prices.per_1000_puts),
        ('GET and HEAD while moving, once',
         (per_mib['get_when_moved'] + per_mib['others']) * stored / 1000,
         prices.per_1000_gets),
        ('GET, downloads', downloads * per_mib['get'] * stored / 1000,
         prices.per_1000_gets),
        ('GiB read, downloads', out / 1024, prices.gib_out),
        ('requests of runs with nothing to do',
         runs * per_mib['idle'] / 1000, prices.per_1000_gets)]
    print(f'\nA month, with {tib:g} TiB stored, of which {downloads:g} '
          f'times as much is read past the cache, and {runs:g} runs:')
    total = 0.0
    for name, number, price in lines:
        thousands = '' if name.startswith('GiB') else ' thousand'
        cost = '' if price is None else f' x {price:g} = {number * price:.2f}'
        total += number * (price or 0)
        print(f'  {name:38}{number:>12,.1f}{thousands}{cost}')
    if any(getattr(prices, field.name) is not None
           for field in dataclasses.fields(prices)):
        print(f'  {"sum, of what has a price":38}{total:>12,.2f}')


def main() -> None:
    parser = common.arguments(
        __doc__, mib=1024, group_slots=(32768, 'blocks of a group'),
        tib=(1.0, 'what is stored'),
        downloads=(1.0, 'how often in a month as much as is stored is read '
                   'past the cache'),
        runs=(720.0, 'of the task in a month'))
    parser.add_argument('--store', choices=SERVERS, default='s3')
    for name, help in (('gib-month', 'of a GiB stored for a month'),
                       ('per-1000-puts', 'of 1,000 PUT'),
                       ('per-1000-gets', 'of 1,000 GET, HEAD or LIST'),
                       ('gib-out', 'of a GiB read')):
        parser.add_argument(f'--{name}', type=float, help=f'price {help}')
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(
            dir=args.dir, prefix='bench-'))
        server = stack.enter_context(
            SERVERS[args.store](pathlib.Path(directory, 'server')))
        print(f'{len(os.sched_getaffinity(0))} processors, '
              f'{platform.machine()}, {args.store} on this machine')
        bench = Bench(directory, server, args.mib, args.group_slots)
        with bench.repo:
            per_mib = measure(bench)
    bill(per_mib, Prices(args.gib_month, args.per_1000_puts,
                         args.per_1000_gets, args.gib_out),
         args.tib, args.downloads, args.runs)


if __name__ == '__main__':
    main()
