# SPDX-License-Identifier: Apache-2.0

"""Run DEDE's experiments on this store.

Run it from a checkout in which the extension is built; gcc is needed::

    python benchmarks/papers/dede.py [--scale tiny|quick|full] [--only PART]
        [--dir DIR] [--filter-dir /dev/shm] [--plot DIR] [IMAGE...]

After Clements, Ahmad, Vilayannur and Li, "Decentralized Deduplication in SAN
Cluster File Systems", USENIX ATC 2009. Their figures stand beside those
measured. ``equalblocks.py`` has their analysis of images.

*Savings.* Images are stored by one host, by four hosts in turn, and by four
hosts that search for no duplicates, as DEDE's do. Then merging shares the
remaining duplicates. Each of these hosts is a handle of this process, with a
filter of its own; all use one directory of this machine. Before each image its
host scans the blocks that the others stored, as if the images came further
apart than the interval of these scans. ``hosts.py`` has hosts of which each
has a mount, a daemon and a process that stores, and describes the images.
These hosts need root and FUSE.

*Index.* ``exactindex.py`` makes indexes of growing size.

*Rates.* They are in bytes of blocks of 4 KiB. DEDE's are:

* *scan*: a sorted batch without duplicates is merged into the index. The
  blocks are all that the index has;
* *subdivide*: DEDE divides a file's blocks of 1 MiB into blocks of 4 KiB. Here
  all blocks have 4 KiB, and a recipe's extents are divided. The image has one
  duplicate in each MiB. The blocks are all that it has;
* *share*: duplicates become references. Here all blocks of an image are
  duplicates, and it gets another recipe (N10). The old recipe's blocks are
  uncounted, and not freed.

*Find* comes before these: it reads new entries, and leaves the pairs of equal
blocks in the catalog. *Merging* is the whole task. It also reads each block
that stays, which the page cache may still have.

*Logs.* A host of DEDE logs its writes. Here a host reads the fingerprint
stores of the others. One host stores, and another scans.
"""

import array
from collections.abc import Iterator
import contextlib
import itertools
import os
import random
import shutil
import sys
import tempfile
from typing import Any, NamedTuple

import _path  # noqa: F401  finds the modules beside it
import common
from common import MIB
from common import PIECE
import equalblocks
import exactindex
import following
import hosts
import plot
import synthetic

from dedupd.tasks import accounting
from dedupd.tasks import duplicate_pairs
from dedupd.tasks import merger
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository

PARTS = ('savings', 'index', 'rates', 'logs')
BLOCK = 4096
HOSTS = hosts.HOSTS
#: Blocks of the image to divide for each that is a duplicate.
DIVIDED = MIB // BLOCK
POLICIES = {'hash': {'fingerprint': 'sha256', 'verify': 'fingerprint'},
            'value': {'fingerprint': 'xxh3-128', 'verify': 'bytes'}}

# What DEDE's authors published.
DEDE_KEPT = 235 / 1300      # of 113 virtual machines with 1.3 TB
DEDE_INDEX = 1.5 / 235      # of the kept bytes; with VMFS's metadata 1.1 %
DEDE_ENTRY = 23             # bytes
DEDE_LOG = 1 / 150          # of the written bytes
DEDE_RATES = {'scan': 6600.0, 'subdivide': 37.5, 'share': 2.6}  # MB/s


class Scale(NamedTuple):
    """The amount of work."""

    images: int     #: that are made
    mib: int        #: of each
    merged: int     #: MiB of each image of which rates are measured
    logged: int     #: MiB that one host stores and another scans
    interval: float     #: seconds between two scans of a daemon
    records: tuple[int, ...]    #: of the indexes


SCALES = {
    'tiny': Scale(8, 4, 4, 8, 0.2, (20_000, 40_000)),
    'quick': Scale(24, 64, 256, 143, 5.0, (1_000_000, 4_000_000)),
    'full': Scale(24, 256, 2048, 143, 5.0,
                  (1_000_000, 10_000_000, 30_000_000, 100_000_000))}


# -- savings ------------------------------------------------------------------

class Way(NamedTuple):
    """A way to store images."""

    name: str
    hosts: int
    dedup: bool     #: they search for duplicates


WAYS = (Way('one host', 1, True), Way(f'{HOSTS} hosts', HOSTS, True),
        Way(f'{HOSTS} hosts that look for none', HOSTS, False))


@contextlib.contextmanager
def hosts_of(directory: str, filters: str, way: Way
             ) -> Iterator[list[image_repository.Repository]]:
    """An empty repository, on a way's hosts; it is removed in the end."""
    path = os.path.join(directory, 'repository')
    image_repository.Repository.create(path)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, path)
        repos = []
        for _ in range(way.hosts):
            own = stack.enter_context(
                tempfile.TemporaryDirectory(dir=filters, prefix='host-'))
            repos.append(stack.enter_context(image_repository.Repository(
                path, codec='none', filter_dir=own,
                index='filter' if way.dedup else 'none')))
            repos[-1].filter.attach(repos[-1].handle())
        yield repos


def store(way: Way, images: list[str], directory: str, filters: str
          ) -> hosts.Kept:
    """Store images on hosts in turn, then merge."""
    named, stored = [0], [0]
    with hosts_of(directory, filters, way) as repos:
        for number, path in enumerate(images):
            host = repos[number % len(repos)]
            while host.follow():
                pass
            stat = host.put(f'image-{number}', path)
            named.append(named[-1] + stat.size - stat.zero_bytes)
            stored.append(stored[-1] + stat.new_bytes)
        with maintainer_role.Maintainer(repos[0]) as maintainer:
            spent = common.timed(merger.run_once, maintainer, pacing.Pace())
            if spent.result.failed or spent.result.busy:
                raise SystemExit(f'not all was merged: {spent.result}')
            return hosts.Kept(named, stored, spent.result.merged_bytes,
                              spent.wall,
                              exactindex.index_bytes(repos[0].path),
                              maintainer.catalog.disk_bytes())


def store_on_mounts(images: list[str], directory: str, filters: str,
                    interval: float) -> dict[str, hosts.Kept]:
    """Store images on hosts with mounts; does nothing without FUSE."""
    if os.geteuid() != 0 or not os.path.exists('/dev/fuse'):
        print('no hosts with mounts: these need root and FUSE',
              file=sys.stderr)
        return {}
    return {f'{HOSTS} hosts with mounts, {order}': hosts.store(
        order, images, directory, filters, HOSTS, interval)
        for order in hosts.ORDERS}


def show_savings(found: dict[str, hosts.Kept], exact: int) -> None:
    """Print the bytes that each way keeps."""
    used = next(iter(found.values())).named[-1]
    print(f'{used / MIB:,.0f} MiB that are not zeros, of which '
          f'{exact / MIB:,.0f} MiB are different: {exact / used:.1%} '
          f'(DEDE: {DEDE_KEPT:.0%} of 1.3 TB)\n')
    hosts.show(found, exact)


def show_metadata(kept: hosts.Kept) -> None:
    """Print the bytes needed to find blocks, as shares of the kept bytes."""
    print()
    for name, size, theirs in (
            ('index', kept.index, f' (DEDE: {DEDE_INDEX:.1%})'),
            ('fingerprint stores', kept.left / BLOCK * equalblocks.ENTRY, ''),
            ('catalog', kept.catalog, '')):
        print(f'{name:32}{size / MIB:13,.1f} MiB, '
              f'{hosts.share(size, kept.left):.2%} of what is kept{theirs}')


# -- rates --------------------------------------------------------------------

class Rate(NamedTuple):
    """The rate of handling blocks."""

    name: str
    blocks: int
    processor: float    #: seconds
    clock: float        #: seconds


def noise(mib: int, kind: str) -> Iterator[bytes]:
    """An image's bytes: of the base, its twin, or one with few equal blocks.

    :param kind: 'base', 'twin' or 'few'
    """
    rng, other = random.Random(1), random.Random(2)
    for _ in range(0, mib * MIB, PIECE):
        base = rng.randbytes(PIECE)
        if kind != 'few':
            yield base
            continue
        piece = bytearray(other.randbytes(PIECE))
        for at in range(0, PIECE, DIVIDED * BLOCK):
            piece[at:at + BLOCK] = base[at:at + BLOCK]
        yield bytes(piece)


def put_noise(repo: image_repository.Repository, mib: int) -> None:
    """Store the three images, as a host without an index."""
    with image_repository.Repository(repo.path, codec='none',
                                     index='none') as unaware:
        for kind in ('base', 'twin', 'few'):
            common.store(unaware, kind, noise(mib, kind))


def mapping_of(maintainer: maintainer_role.Maintainer) -> bytes:
    """Return pairs of an address and its replacement, from the catalog."""
    words = array.array('Q')
    for group in maintainer.catalog.groups_with_duplicates():
        words.extend(block_addresses.unpack(
            maintainer.catalog.duplicates(group), 'Q'))
    return block_addresses.pack(itertools.chain.from_iterable(
        sorted(zip(words[1::2], words[::2]))), 'Q')


def exchange(maintainer: maintainer_role.Maintainer, image_id: str,
             mapping: bytes) -> int:
    """Merge an image, and count both recipes; return the merged blocks."""
    done = merger.merge_image(maintainer, image_id, mapping, pacing.Pace())
    accounting.run_once(maintainer, pacing.Pace())
    return done.replaced if done.exchanged else 0


def need(found: int, wanted: int) -> None:
    """End the program if not all blocks were shared."""
    if found != wanted:
        raise SystemExit(f'{found} blocks were shared, and not {wanted}')


def rates_of_stages(directory: str, filters: str, mib: int, policy: str
                    ) -> Iterator[Rate]:
    """Merge in parts: the duplicates found, and images with few and all."""
    blocks = mib * MIB // BLOCK
    with common.new_repository(directory, filter_dir=filters,
                               **POLICIES[policy]) as repo:
        put_noise(repo, mib)
        with maintainer_role.Maintainer(repo) as maintainer:
            accounting.run_once(maintainer, pacing.Pace())
            found = common.timed(duplicate_pairs.Duplicates(
                maintainer, pacing.Pace()).catch_up)
            need(found.result, 3 * blocks)
            yield Rate('find', 3 * blocks, found.cpu, found.wall)
            mapping = mapping_of(maintainer)
            for name, image_id, shared in (
                    ('subdivide', 'few', blocks // DIVIDED),
                    ('share', 'twin', blocks)):
                spent = common.timed(exchange, maintainer, image_id, mapping)
                need(spent.result, shared)
                yield Rate(name, blocks, spent.cpu, spent.wall)


def rate_of_merging(directory: str, filters: str, mib: int, policy: str
                    ) -> Rate:
    """Merge as the task does."""
    with common.new_repository(directory, filter_dir=filters,
                               **POLICIES[policy]) as repo:
        put_noise(repo, mib)
        with maintainer_role.Maintainer(repo) as maintainer:
            accounting.run_once(maintainer, pacing.Pace())
            spent = common.timed(merger.run_once, maintainer, pacing.Pace())
    blocks = mib * MIB // BLOCK
    need(spent.result.merged_blocks, blocks + blocks // DIVIDED)
    return Rate('merging', spent.result.merged_blocks, spent.cpu, spent.wall)


def show_rates(rates: list[Rate], policy: str) -> None:
    """Print a table of rates."""
    print(f'\n{"compared by " + policy:24}{"blocks":>12}{"M/s, processor":>16}'
          f'{"M/s, clock":>12}{"MB/s, clock":>13}{"DEDE, MB/s":>12}')
    for name, blocks, processor, clock in rates:
        theirs = DEDE_RATES.get(name)
        print(f'{name:24}{blocks:>12,}{blocks / processor / 1e6:>16.3f}'
              f'{blocks / clock / 1e6:>12.3f}'
              f'{blocks * BLOCK / clock / 1e6:>13,.1f}'
              f'{"" if theirs is None else f"{theirs:>12,}"}'.rstrip(),
              flush=True)


# -- indexes and logs ---------------------------------------------------------

def indexes(directory: str, records: tuple[int, ...]
            ) -> dict[int, exactindex.Measured]:
    """Make indexes; return their figures by the number of records."""
    found = {}
    path = os.path.join(directory, 'repository')
    program = synthetic.build(directory)
    for count in records:
        found[count] = exactindex.measure(path, count, program)
        shutil.rmtree(path)
    return found


def show_indexes(found: dict[int, exactindex.Measured]) -> None:
    """Print the indexes' sizes, and the time of a small batch's merge."""
    print(f'\n{"index, records":>16}{"MiB":>10}{"bytes each":>12}'
          f'{"scan, s":>10}{"merge, s":>10}{"again, s":>10}'
          f'   (DEDE: {DEDE_ENTRY} bytes each)')
    for count, of in found.items():
        print(f'{count:>16,}{of.bytes / MIB:>10,.1f}{of.bytes / count:>12.2f}'
              + ''.join(f'{stage.clock:>10.2f}'
                        for stage in of.stages.values()))


def rate_of_scan(found: exactindex.Measured) -> Rate:
    """DEDE's scan: a batch without duplicates is merged into an index."""
    _, entries, processor, clock = found.stages['merge, again']
    return Rate('scan', entries, processor, clock)


def show_logs(directory: str, mib: int) -> None:
    """Print the bytes that one host reads of another's."""
    _, _, read = following.of_data(directory, mib)['by another host']
    print(f'\nof {mib * MIB / 1e6:,.0f} MB stored another host reads '
          f'{read / 1e6:.2f} MB, {read / (mib * MIB):.2%} '
          f'(DEDE: {DEDE_LOG:.2%})')


# -- figures ------------------------------------------------------------------

def draw_savings(kept: dict[str, hosts.Kept], directory: str) -> None:
    """Draw the bytes that images take as they come."""
    plot.lines(
        {name: ([named / MIB for named in of.named],
                [stored / MIB for stored in of.stored])
         for name, of in kept.items()},
        'MiB that are not zeros', 'MiB of blocks, before merging',
        'Stored by several hosts',
        os.path.join(directory, 'experiments-dede-hosts.svg'))


def draw_indexes(found: dict[int, exactindex.Measured], directory: str
                 ) -> None:
    """Draw the rates of indexes by their size."""
    records = list(found)
    rates = {name: [of.stages[name].entries / of.stages[name].clock / 1e6
                    for of in found.values()]
             for name in found[records[0]].stages}
    rates["DEDE's scan"] = [DEDE_RATES['scan'] / BLOCK] * len(records)
    plot.lines({name: (records, of) for name, of in rates.items()},
               'records', 'million records per second', 'The exact index',
               os.path.join(directory, 'experiments-dede-index.svg'),
               log_x=True)


def measure_savings(args: Any, directory: str, filters: str) -> None:
    """Store images in each way; show the first tables, and a figure."""
    scale = SCALES[args.scale]
    images = args.paths or hosts.made_images(directory, scale.images,
                                             scale.mib)
    counted = equalblocks.analyse(images, directory)
    if not counted.used:
        raise SystemExit('there are only zeros in these images')
    kept = {way.name: store(way, images, directory, filters) for way in WAYS}
    kept |= store_on_mounts(images, directory, filters, scale.interval)
    show_savings(kept, counted.blocks.kept * BLOCK)
    show_metadata(kept[WAYS[-1].name])
    if args.plot:
        draw_savings(kept, args.plot)
    if not args.paths:
        for path in images:
            os.unlink(path)


def main() -> None:
    """Measure with the command line's arguments."""
    parser = common.arguments(__doc__, paths='*', filter_dir=True)
    parser.add_argument('--scale', choices=SCALES, default='full',
                        help='amount of work (default: %(default)s)')
    parser.add_argument('--only', choices=PARTS, action='append',
                        help='this part; may be repeated (default: all)')
    plot.argument(parser, 'DIR')
    args = parser.parse_args()
    scale, parts = SCALES[args.scale], args.only or PARTS
    scan = []
    with (common.place(args.dir) as d,
          common.place(args.filter_dir) as filters):
        if 'savings' in parts:
            measure_savings(args, d, filters)
        if 'index' in parts:
            found = indexes(d, scale.records)
            show_indexes(found)
            scan = [rate_of_scan(found[scale.records[-1]])]
            if args.plot:
                draw_indexes(found, args.plot)
        if 'rates' in parts:
            for policy in POLICIES:
                show_rates([
                    *scan, *rates_of_stages(d, filters, scale.merged, policy),
                    rate_of_merging(d, filters, scale.merged, policy)], policy)
        if 'logs' in parts:
            show_logs(d, scale.logged)


if __name__ == '__main__':
    main()
