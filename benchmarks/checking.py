# SPDX-License-Identifier: Apache-2.0

"""Measure the memory that ``repository check`` takes, by a store's contents.

Run it from a checkout in which the extension is built::

    python benchmarks/checking.py [--extents 250 1000 4000]
        [--images 1000 4000 16000] [--dir DIR]

Two kinds of stores are checked, each in a process of its own.  The first has
one image that is in as many pieces as it has blocks: blocks of 512 bytes, all
of them in another image, in random order.  The second has many images of one
block each, which are counted in the catalog.  The growth of the process's own
memory at its peak is shown, and the seconds that the check took.

No figure passes or fails; but if memory is bounded, the columns are alike.
"""

from collections.abc import Callable
import contextlib
import json
import os
import random
import sys
import time

import common
from common import MIB

from dedupd.tasks import accounting
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository

BLOCK = 512
BLOCKS = 1 << 16            # of the image in pieces
PIECE = MIB // BLOCK        # blocks that are written at once


def store_in_pieces(repo: image_repository.Repository, thousands: int) -> None:
    rng = random.Random(1)
    whole = rng.randbytes(BLOCKS * BLOCK)
    common.store(repo, 'whole', whole)
    common.store(repo, 'pieces', (
        b''.join(whole[BLOCK * n:BLOCK * (n + 1)]
                 for n in rng.choices(range(BLOCKS), k=PIECE))
        for _ in range(thousands * 1000 // PIECE)))


def store_many(repo: image_repository.Repository, images: int) -> None:
    rng = random.Random(1)
    for number in range(images):
        common.store(repo, f'image-{number}', rng.randbytes(BLOCK))
    with contextlib.closing(maintainer_role.Maintainer(repo)) as maintainer:
        accounting.run_once(maintainer, pacing.Pace())


def prepare(directory: str, store_some: Callable, amount: int) -> str:
    path = os.path.join(directory, 'repository')
    image_repository.Repository.create(path, block_size=BLOCK)
    with image_repository.Repository(path, codec='none', filter_mib=1,
                                     filter_dir=directory) as repo:
        store_some(repo, amount)
    return path


def probe(path: str) -> None:
    """Check in this process; print its growth and the seconds."""
    with contextlib.closing(common.Peak()) as peak:
        before, began = peak.bytes, time.monotonic()
        report = checker.check(path)
        seconds = time.monotonic() - began
    if not report.ok:
        raise SystemExit(f'damage was found: {report.findings[:3]}')
    json.dump([peak.bytes - before, seconds], sys.stdout)


def measure(directory: str, store_some: Callable, amount: int) -> list[float]:
    with common.place(directory) as d:
        path = prepare(os.path.abspath(d), store_some, amount)
        return common.in_a_process(__file__, path)


def main() -> None:
    if sys.argv[1:2] == ['--probe']:
        return probe(*sys.argv[2:])
    args = common.arguments(
        __doc__, extents=([250, 1000, 4000], 'thousands, of an image'),
        images=([1000, 4000, 16000], 'images of one block')).parse_args()
    for what, store_some, amounts in (
            ('thousand extents', store_in_pieces, args.extents),
            ('images', store_many, args.images)):
        print(f'{what:>18}{"growth, MiB":>14}{"seconds":>10}')
        for amount in amounts:
            growth, seconds = measure(args.dir, store_some, amount)
            print(f'{amount:18}{growth / MIB:14.1f}{seconds:10.1f}',
                  flush=True)


if __name__ == '__main__':
    main()
