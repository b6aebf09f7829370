# SPDX-License-Identifier: Apache-2.0

"""Compare content-defined chunking with fixed blocks: savings and costs.

Run it from a checkout in which the extension is built; gcc is needed::

    python benchmarks/chunking.py [--rounds 3] [--chunking LIST] [--dir DIR]
        [--plot FILE] IMAGE...

For each way to cut (``--chunking``: ``BLOCK_SIZE``, or
``MINIMUM/AVERAGE/MAXIMUM``, separated by commas) it makes a repository, and
stores into it, with lz4, the images, and then two twins of the last of them:
one whose partition begins at sector 63 instead of 2048, and one with 100 bytes
put in behind its first MiB. It shows

* the bytes that were new of each, in percent of its bytes that are not zeros;
* the repository's final size on the disk, and the metadata's part of it:
  fingerprint stores and recipes;
* the number of blocks, and their lengths: the mean, and the length below which
  a twentieth, a quarter, half, three quarters and nineteen twentieths of the
  bytes of the first image are in blocks;
* the processor time that storing took, per GiB of images, and the rate of
  chunking alone, on one core, of the first image's bytes, each as the median
  of the rounds with the lowest and the highest, and the rate of memcpy of the
  same bytes.

An image is read into memory. ``--plot`` draws the lengths.
"""

import os
import shutil
import statistics
import struct
import subprocess
import sys
from typing import NamedTuple

import common
from common import GIB
from common import MIB
from common import PIECE
import plot
import synthetic

from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages

WAYS = ('4096,8192,1024/2048/8192,1024/4096/16384,2048/4096/16384,'
        '2048/8192/32768,4096/8192/32768')
SECTOR = 512
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


class Chunking(NamedTuple):
    minimum: int  #: 0 where cuts are fixed
    average: int
    maximum: int

    @classmethod
    def parse(cls, text: str) -> 'Chunking':
        parts = [int(n) for n in text.split('/')]
        return cls(0, 0, *parts) if len(parts) == 1 else cls(*parts)

    def __str__(self) -> str:
        return ('/'.join(map(str, self)) if self.average
                else f'fixed {self.maximum}')

    def create(self, path: str) -> None:
        image_repository.Repository.create(
            path, block_size=self.maximum, chunking=(
                f'content-defined {self.minimum} {self.average}'
                if self.average else 'fixed'))


def nonzero(data: bytes) -> int:
    """The bytes that are not in blocks of zeros, of 4 KiB."""
    zeros = bytes(4096)
    return sum(4096 for at in range(0, len(data), 4096)
               if data[at:at + 4096] != zeros[:len(data) - at])


def twins(data: bytes) -> dict[str, bytes]:
    """Return twins: partitioned at sector 63, and with bytes put in."""
    return {'sector 63': data[:SECTOR] + data[SECTOR * (1 + 2048 - 63):],
            '100 bytes put in': data[:MIB] + bytes(range(100)) + data[MIB:]}


def lengths(image: openimages.Image) -> list[int]:
    """Return the lengths of an image's blocks."""
    found: list[int] = []
    page = 0
    while text := image.describe(page):
        at = 0
        while at < len(text):
            blocks, = struct.unpack_from('<I', text, at + 16)
            end = at + 24 + 36 * blocks
            found += [n for n, in struct.iter_unpack('<32xI',
                                                     text[at + 24:end])]
            at = end
        page += 1
    return sorted(found)


def share_below(found: list[int], shares: tuple[float, ...]) -> list[int]:
    """Return the lengths below which these shares of the bytes are."""
    wanted = [share * sum(found) for share in shares]
    below, result = 0, []
    for length in found:
        below += length
        while len(result) < len(wanted) and below >= wanted[len(result)]:
            result.append(length)
    return result


def disk_bytes(path: str) -> int:
    return sum(os.stat(os.path.join(path, kind, name)).st_blocks * 512
               for kind in ('groups', 'images')
               for name in os.listdir(os.path.join(path, kind)))


class Result:
    """The results of storing the images with one chunking.

    :ivar new: by image, the bytes that were new
    """

    def __init__(self) -> None:
        self.new: dict[str, int] = {}
        self.lengths: list[int] = []
        self.disk = self.payload = 0
        self.stored: list[float] = []  #: seconds of processor time per GiB
        self.rates: list[float] = []
        self.copies: list[float] = []

    def store(self, chunking: Chunking, images: dict[str, bytes],
              directory: str) -> None:
        path = os.path.join(directory, 'repository')
        chunking.create(path)
        try:
            with image_repository.Repository(
                    path, filter_dir=directory, filter_mib=64) as repo:
                spent = common.timed(self._put, repo, images)
                size = sum(map(len, images.values()))
                self.stored.append(spent.cpu / (size / GIB))
                with repo.open_image('0') as image:
                    self.lengths = lengths(image)
            self.disk = disk_bytes(path)
        finally:
            shutil.rmtree(path)
            common.remove_filters(directory)

    def _put(self, repo: image_repository.Repository,
             images: dict[str, bytes]) -> None:
        self.payload = 0
        for number, (name, data) in enumerate(images.items()):
            with repo.begin(str(number)) as transaction:
                view = memoryview(data)
                for at in range(0, len(data), PIECE):
                    transaction.write(view[at:at + PIECE])
                stat = transaction.commit()
            self.new[name] = stat.new_bytes
            self.payload += stat.stored_bytes

    def cut(self, chunking: Chunking, program: str, image: str) -> None:
        """Measure chunking alone."""
        done = subprocess.run(
            [program, image, *map(str, chunking), '1'], check=True,
            capture_output=True, text=True)
        _, cut, copy = done.stdout.split()
        size = os.path.getsize(image)
        self.rates.append(size / float(cut) / 1e9)
        self.copies.append(size / float(copy) / 1e9)


def spread(figures: list[float]) -> str:
    return (f'{statistics.median(figures):.2f} '
            f'({min(figures):.2f}-{max(figures):.2f})')


def table(head: list[str], rows: list[list[str]]) -> None:
    print('| ' + ' | '.join(head) + ' |')
    print('|' + ' --- |' * len(head))
    for row in rows:
        print('| ' + ' | '.join(row) + ' |')
    print()


def show(results: dict[Chunking, Result], images: dict[str, bytes]) -> None:
    solid = {name: nonzero(data) for name, data in images.items()}
    print('New bytes, in percent of those that are not zeros\n')
    table(['chunking', *images, 'on the disk, MiB', 'of it metadata'],
          [[str(chunking),
            *[f'{100 * r.new[name] / max(1, solid[name]):.2f}'
              for name in images],
            f'{r.disk / MIB:.1f}',
            f'{100 * (r.disk - r.payload) / r.disk:.1f} %']
           for chunking, r in results.items()])
    print('Blocks of the first image: how many, their mean, and below which '
          'length 5, 25, 50, 75 and 95 % of the bytes are\n')
    table(['chunking', 'blocks', 'mean', '5 %', '25 %', '50 %', '75 %',
           '95 %'],
          [[str(chunking), str(len(r.lengths)),
            f'{statistics.mean(r.lengths):.0f}',
            *map(str, share_below(r.lengths, SHARES))]
           for chunking, r in results.items()])
    print('Processor time\n')
    table(['chunking', 'storing, s/GiB', 'chunking alone, GB/s',
           'memcpy, GB/s'],
          [[str(chunking), spread(r.stored),
            spread(r.rates) if chunking.average else '', spread(r.copies)]
           for chunking, r in results.items()])


def draw(results: dict[Chunking, Result], path: str) -> None:
    shares = [n / 50 for n in range(1, 51)]
    plot.lines(
        {str(chunking): (share_below(r.lengths, tuple(shares)),
                         [100 * share for share in shares])
         for chunking, r in results.items() if chunking.average},
        'length of a block, bytes', 'bytes in shorter blocks, %',
        'How long blocks cut by their content are', path)


def main() -> None:
    parser = common.arguments(__doc__, paths='+', rounds=3,
                              chunking=(WAYS, 'ways to cut'))
    plot.argument(parser)
    given = parser.parse_args()
    ways = [Chunking.parse(text) for text in given.chunking.split(',')]
    images = {}
    for name in given.paths:
        with open(name, 'rb') as f:
            images[os.path.basename(name)] = f.read()
    images |= twins(list(images.values())[-1])
    results = {chunking: Result() for chunking in ways}
    with common.place(given.dir) as directory:
        program = synthetic.build(directory, 'chunking')
        common.warm_pages(sum(map(len, images.values())) // 2, directory)
        for number in range(given.rounds):
            for chunking, result in results.items():
                print(f'round {number + 1}: {chunking}', file=sys.stderr)
                result.store(chunking, images, directory)
                result.cut(chunking, program, given.paths[0])
    show(results, images)
    if given.plot:
        draw(results, given.plot)


if __name__ == '__main__':
    main()
