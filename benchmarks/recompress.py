# SPDX-License-Identifier: Apache-2.0

"""Measure the gain and the cost of recompression.

Run it from a checkout in which the extension is built::

    python benchmarks/recompress.py [--rounds 3] [--threads 1,2]
        [--codecs lz4,zstd-3,zstd-9-similar] [--group-slots 32768]
        [--cache-mib 0] [--dir DIR] IMAGE...

The images are stored, with lz4, in one repository, and its groups then
compressed again with each codec in turn, with each number of threads. With
``-similar`` behind codec and level, similar blocks come next to each other. It
shows

* the blocks, their segments' headers included, in percent of
  the same blocks before compression: as they were stored, and after each
  codec;
* the rate of compressing again, by those bytes, and the processor time;
* the rate of reading the images back, all of it in the page cache, and the
  time of reading 4 KiB anywhere in them, through the engine, with a cache of
  segments of so many MiB, which is empty at first: as stored, and after each
  codec.

Each as the median of the rounds with the lowest and the highest. Beside each
rate stands its ratio to that of the stored data, of the same round.
"""

import functools
import os
import random
import shutil
import sys
from typing import Any

import common
from common import PIECE

from dedupd.tasks import recompressor
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository
from glance_dedup.repository import space

READS = 1000


def open_repository(path: str, threads: int, cache_mib: int = 0
                    ) -> image_repository.Repository:
    return image_repository.Repository(
        path, filter_dir=f'{path}-filter', threads=threads,
        segment_cache_mib=cache_mib)


def read(repo: image_repository.Repository) -> int:
    """Read all images; returns their bytes."""
    size = 0
    for image_id in repo.images():
        with repo.open_image(image_id) as image:
            for at in range(0, image.size, PIECE):
                size += len(image.read(at, min(PIECE, image.size - at)))
    return size


def read_anywhere(repo: image_repository.Repository, seed: int) -> None:
    """Read only at blocks: zeros take no time."""
    rng = random.Random(seed)
    with repo.open_image('image-0') as image:
        extents = [extent for extent in image.extents() if extent.blocks]
        weights = [extent.length for extent in extents]
        for extent in rng.choices(extents, weights, k=READS):
            at = extent.offset + rng.randrange(extent.length)
            image.read(at, min(4096, image.size - at))


def share(repo: image_repository.Repository) -> tuple[float, int]:
    """Return the stored bytes, in percent of plain ones and as a number."""
    parts = space.parts(repo)
    plain = sum(part.plain_bytes or 0 for part in parts)
    stored = sum(part.bytes for part in parts if part.plain_bytes is not None
                 or part.name == 'segment headers')
    return 100 * stored / plain, plain


def measure_reading(table: common.Table, path: str,
                    options: Any, threads: int, name: str,
                    seed: int) -> None:
    reading, anywhere = f'reading, {name}', f'4 KiB anywhere, {name}'
    with open_repository(path, threads) as repo:
        read(repo)                      # into the page cache
    with open_repository(path, threads, options.cache_mib) as repo:
        spent = common.timed(read, repo)
        table.add(reading, spent.result, spent, of='reading, as stored')
    with open_repository(path, threads, options.cache_mib) as repo:
        spent = common.timed(read_anywhere, repo, seed)
        table.figure(anywhere, spent.wall / READS * 1e6, 'us',
                     of='4 KiB anywhere, as stored')


def measure(table: common.Table, repo: image_repository.Repository, codec: str,
            threads: int) -> str:
    kind, _, how = codec.partition('-')
    level, _, order = how.partition('-')
    _, plain = share(repo)
    with maintainer_role.Maintainer(repo) as maintainer:
        run = functools.partial(recompressor.run_once,
                                similar=order == 'similar')
        spent = common.timed(run, maintainer, pacing.Pace(), kind,
                             int(level or 0))
    name = f'{codec}, {threads} threads'
    table.add(f'compressing anew, {name}', plain, spent)
    table.figure(f'blocks, {codec}', share(repo)[0], '% of plain',
                 of='blocks, as stored')
    return name


def one_round(table: common.Table, options: Any, path: str,
              threads: int, seed: int) -> None:
    """Measure each codec, each time from the first store."""
    for codec in options.codecs.split(','):
        print(f'{threads} threads, {codec}', file=sys.stderr)
        image_repository.Repository.create(path,
                                           group_slots=options.group_slots)
        try:
            with open_repository(path, threads) as repo:
                for i, image in enumerate(options.paths):
                    repo.put(f'image-{i}', image)
                table.figure('blocks, as stored', share(repo)[0],
                             '% of plain')
            measure_reading(table, path, options, threads, 'as stored', seed)
            with open_repository(path, threads) as repo:
                name = measure(table, repo, codec, threads)
            measure_reading(table, path, options, threads, name, seed)
        finally:
            common.remove_filters(f'{path}-filter')
            shutil.rmtree(path)


def main() -> None:
    options = common.arguments(
        __doc__, rounds=3, paths='+', threads=('1,2', 'numbers of them'),
        codecs=('lz4,zstd-3,zstd-3-similar,zstd-9-similar', 'to try'),
        cache_mib=(0, 'for segments'),
        group_slots=(32768, 'blocks in a group')).parse_args()
    table = common.Table()
    with common.place(options.dir) as directory:
        for number in common.count_rounds(options.rounds):
            for threads in map(int, options.threads.split(',')):
                one_round(table, options,
                          os.path.join(directory, 'repository'), threads,
                          number)
    table.show()


if __name__ == '__main__':
    main()
