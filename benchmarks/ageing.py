# SPDX-License-Identifier: Apache-2.0

"""Measure the effect of years of deleting and adding on reading images.

Run it from a checkout in which the extension is built::

    python benchmarks/ageing.py [--rounds 50] [--dir DIR] [--plot FILE] IMAGE..

It stores ``--images`` images, each the beginning (``--mib``) of one of those
named, or a later version of one that is stored: a share (``--changed``) of its
blocks differs, in runs of 4 KiB to 1 MiB. Then, in each round, ``--exchanged``
images chosen at random are deleted, and as many later versions of others are
stored; and the daemon's tasks run. The same is done in several repositories,
each with tasks of its own (``--tasks``), to show the effect of each task.
Every few rounds (``--every``) it shows, of all images:

* extents of blocks of an image, and how long they are;
* seeks that reading an image from end to end takes, as the engine counts them,
  and bytes read for each byte that is not zero;
* the rate at which a disk of the model (``--seek-ms``, ``--mb-s``) would read
  the bytes that are not zero, beside the rate of a plain file on it;
* the rate at which some of the images are read here, with nothing of them in
  the page cache, by their full size;
* bytes of the groups' files for each byte of the images that is not zero.

``--plot`` draws the rates, and the extents into a second file beside it. At
the end every image is read back and compared with the stored bytes. With
``--arrange`` it shows the effect of another order of the blocks for the first
repository, as ``arranging.py`` does.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import os
import random
import statistics
import sys
import time

import arranging
import common
from common import MIB
import disk
import plot

from dedupd import opts
from dedupd.tasks import registry
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository

BLOCK = disk.BLOCK
ZEROS = bytes(BLOCK)


# -- images -------------------------------------------------------------------

def blocks_in_use(content: bytes) -> list[int]:
    """Return offsets of the blocks that are not zeros."""
    return [at for at in range(0, len(content), BLOCK)
            if content[at:at + BLOCK] != ZEROS]


def later_version(content: bytes, share: float, rng: random.Random
                  ) -> bytearray:
    """A copy with a share of new blocks, as in disk.make_version."""
    result = bytearray(content)
    used = blocks_in_use(content)
    left = int(share * len(used))
    while left > 0:
        first = rng.randrange(len(used))
        source = rng.randrange(len(used))
        run = min(1 << rng.randrange(9), len(used) - max(first, source), left)
        for i in range(run):
            at, other = used[first + i], used[source + i]
            result[at:at + BLOCK] = (
                rng.randbytes(8) + content[other + 8:other + BLOCK])
        left -= max(run, 1)
    return result


class Collection:
    """The images that exist, and the digests of their contents."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._rng = random.Random(args.seed)
        self._changed = args.changed / 100
        self._bases = list(args.paths)
        self._size = args.mib * MIB
        self._count = 0
        self.digests: dict[str, str] = {}

    def make(self, read) -> tuple[str, bytes | bytearray]:
        """Return a new image, and its name.

        :param read: returns the content of an image that exists
        """
        content: bytes | bytearray
        if self._count < len(self._bases):
            with open(self._bases[self._count], 'rb') as f:
                content = f.read(self._size)
        else:
            content = later_version(read(self.choose()), self._changed,
                                    self._rng)
        name = f'image-{self._count}'
        self._count += 1
        self.digests[name] = hashlib.sha256(content).hexdigest()
        return name, content

    def choose(self) -> str:
        return self._rng.choice(sorted(self.digests))

    def drop(self) -> str:
        name = self.choose()
        del self.digests[name]
        return name


# -- a repository that grows old ----------------------------------------------

@dataclasses.dataclass
class Figures:
    """The figures of all images of a repository, in a round."""

    round: int
    fragments: float
    """Extents of blocks, of an image."""
    length: float
    """KiB of an extent."""
    seeks: float
    """Of reading an image."""
    read: float
    """Bytes read for each byte that is not zero."""
    model: float
    """MB/s of the model's disk."""
    file: float
    """The same of plain files."""
    wall: float
    """MB/s here, of the images that were read cold."""
    stored: float
    """Bytes of the repository for each that is not zero."""


class Aged:
    """One repository and the tasks that run in it."""

    def __init__(self, directory: str, name: str, args) -> None:
        self.name = name
        self.path = os.path.join(directory, name)
        self._directory = directory
        self._args = args
        self._options = opts.load().dedupd
        self.seconds = dict.fromkeys(name.split(','), 0.0)
        image_repository.Repository.create(self.path,
                                           group_slots=args.group_slots)

    @contextlib.contextmanager
    def _open(self):
        filters = f'{self.path}-filter'
        os.makedirs(filters, exist_ok=True)
        with image_repository.Repository(self.path, codec=self._args.codec,
                                         filter_dir=filters) as repo:
            yield repo

    def read(self, name: str) -> bytes:
        with self._open() as repo, repo.open_image(name) as image:
            return image.read()

    def put(self, name: str, content) -> None:
        with self._open() as repo, repo.begin(name) as transaction:
            transaction.write(content)
            transaction.commit()

    def delete(self, name: str) -> None:
        with self._open() as repo:
            repo.delete(name)

    def maintain(self) -> None:
        with self._open() as repo, maintainer_role.Maintainer(
                repo) as maintainer:
            for name in self.name.split(','):
                before = time.process_time()
                done = registry.run(name, maintainer, pacing.Pace(),
                                    self._options)
                self.seconds[name] += time.process_time() - before
                print(f'{name}: {done}', file=sys.stderr)

    def figures(self, number: int) -> Figures:
        stats, extents = [], []
        with self._open() as repo:
            before = repo.statistics()
            for name in repo.images():
                with repo.open_image(name) as image:
                    stats.append(image.stat)
                    extents += [e.length for e in image.extents()
                                if e.kind == 'blocks']
                    for _ in image.pieces():
                        pass
            after = repo.statistics()
            names = repo.images()
        done = disk.Done(*(after[f'image_{n}'] - before[f'image_{n}']
                           for n in ('reads', 'seeks', 'bytes')), 0.0)
        nonzero = sum(s.size - s.zero_bytes for s in stats)
        plain = disk.Done(0, len(stats), nonzero, 0.0)
        chosen = random.Random(number).sample(
            names, min(self._args.cold, len(names)))
        return Figures(
            number, len(extents) / len(stats),
            statistics.mean(extents) / 1024, done.seeks / len(stats),
            done.bytes / nonzero, nonzero / done.modelled(self._args) / 1e6,
            nonzero / plain.modelled(self._args) / 1e6,
            statistics.median(map(self._cold, chosen)) if chosen else 0.0,
            self._disk_bytes() / nonzero)

    def _cold(self, name: str) -> float:
        """Return MB/s of reading an image, none of it in the page cache."""
        disk.forget(self.path)
        with self._open() as repo:
            begin = time.perf_counter()
            with repo.open_image(name) as image:
                for _ in image.pieces():
                    pass
                return image.size / (time.perf_counter() - begin) / 1e6

    def _disk_bytes(self) -> int:
        groups = os.path.join(self.path, 'groups')
        return sum(os.stat(os.path.join(groups, name)).st_blocks * 512
                   for name in os.listdir(groups))

    def verify(self, digests: dict[str, str]) -> None:
        for name, digest in digests.items():
            if hashlib.sha256(self.read(name)).hexdigest() != digest:
                raise SystemExit(f'{self.name}: {name} has other bytes')


# -- rounds -------------------------------------------------------------------

def add(collection: Collection, ways: list[Aged]) -> None:
    name, content = collection.make(ways[0].read)
    for way in ways:
        way.put(name, content)


def show(way: Aged, found: Figures) -> None:
    print(f'{found.round:5} {way.name:28}{found.fragments:9.0f}'
          f'{found.length:8.0f}{found.seeks:8.1f}{found.read:7.2f}'
          f'{found.model:8.1f}{found.file:7.1f}'
          f'{found.model / found.file:6.2f}{found.wall:8.0f}'
          f'{found.stored:8.4f}', flush=True)


def grow_old(ways: list[Aged], args) -> list[list[Figures]]:
    """Return one list of figures for each way."""
    collection = Collection(args)
    found: list[list[Figures]] = [[] for _ in ways]
    for _ in range(args.images):
        add(collection, ways)
    for number in range(args.rounds + 1):
        print(f'round {number} of {args.rounds}', file=sys.stderr)
        if number:
            for _ in range(args.exchanged):
                gone = collection.drop()
                for way in ways:
                    way.delete(gone)
                add(collection, ways)
        for way in ways:
            way.maintain()
        if number % args.every and number < args.rounds:
            continue
        for way, figures in zip(ways, found):
            figures.append(way.figures(number))
            show(way, figures[-1])
    for way in ways:
        way.verify(collection.digests)
    return found


def draw(ways: list[Aged], found: list[list[Figures]], args) -> None:
    """Two charts: the rates, and, beside them, the extents."""
    rounds = [f.round for f in found[0]]
    names = [way.name for way in ways] if ways[1:] else ['repository']
    x = (f'rounds; in each, {args.exchanged} of {args.images} images are '
         'exchanged')
    rates = {name: (rounds, [f.model for f in figures])
             for name, figures in zip(names, found)}
    rates['plain file'] = (rounds, [f.file for f in found[0]])
    plot.lines(rates, x, 'MB/s of a disk with a head',
               'Reading images of a repository that grows old', args.plot)
    stem, suffix = os.path.splitext(args.plot)
    plot.lines({name: (rounds, [f.fragments for f in figures])
                for name, figures in zip(names, found)}, x,
               'extents of an image', 'Images of a repository that grows old',
               f'{stem}-extents{suffix}')


def main() -> None:
    parser = common.arguments(
        __doc__, paths='+', mib=256, rounds=50, **disk.MODEL,
        images=(26, 'how many are stored'),
        exchanged=(3, 'images deleted, and added, in a round'),
        every=(5, 'rounds, figures are taken'),
        cold=(3, 'images that are read cold here, each time'),
        group_slots=(32768, 'blocks in a group'),
        worst=(8, 'images looked at, with --arrange'),
        seed=(1, 'of what is chosen at random'),
        changed=disk.VERSIONS['changed'], codec=('lz4', 'none or zstd'),
        arrange=(False, 'show what other orders would do'))
    parser.add_argument('--tasks', action='append', metavar='TASK,...',
                        help='of a repository, in this order; may be repeated'
                        ' (default: collect,merge,collect)')
    plot.argument(parser)
    args = parser.parse_args()
    with common.place(args.dir) as directory:
        ways = [Aged(directory, names, args) for names in dict.fromkeys(
            args.tasks or ['collect,merge,collect'])]
        print(f'{"round":5} {"tasks":28}{"extents":>9}{"KiB":>8}{"seeks":>8}'
              f'{"read":>7}{"MB/s":>8}{"file":>7}{"ratio":>6}{"here":>8}'
              f'{"stored":>8}')
        found = grow_old(ways, args)
        for way in ways:
            print(f'{way.name}: ' + ', '.join(
                f'{name} {seconds:.1f} s' for name, seconds in
                way.seconds.items()) + ' of processor time')
        if args.plot:
            draw(ways, found, args)
        if args.arrange:
            arranging.show(ways[0].path, directory, args)


if __name__ == '__main__':
    main()
