# SPDX-License-Identifier: Apache-2.0

"""Measure the memory that keeping the accounts takes, by an image's size.

Run it from a checkout in which the extension is built::

    python benchmarks/accounts.py [--mib 512 1024 2048] [--dir DIR]

Accounts are kept by the block, and what they take goes by distinct blocks. So
the image is of blocks of 512 bytes, the minimum, which are all different: 2
GiB have as many blocks as 16 GiB with blocks of 4 KiB. For each size, in a
process of its own that begins with an open catalog, the growth of the
process's memory at its peak is shown by

* counting the image, and one that is the same; and un-counting the latter;
* rebuilding the catalog, with both;
* merging the image to other copies of some of its blocks;
* evacuating a block group of which it needs a few blocks;
* planning to evict it, and evicting it.

No figure passes or fails; but if memory is bounded, the columns are alike.
"""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import itertools
import json
import os
import random
import sys

import common
from common import MIB

from dedupd.compute.cache import cache_catalog
from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import evictor
from dedupd.tasks import merger
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import reserve
from glance_dedup.repository import image_repository

BLOCK = 512
SLOTS = 32768
SMALL = 40000 * BLOCK       # an image that fills a group
KEPT = 1000 * BLOCK         # the large one's part of it
MERGED = 1000               # blocks

STEPS = ('counting', 'un-counting', 'rebuilding', 'merging', 'evacuating',
         'planning to evict', 'evicting')


def noise(first: int, size: int) -> Iterator[bytes]:
    """Yield so many bytes of different blocks, then pieces of others."""
    rng = random.Random(1)
    yield rng.randbytes(first)
    for _ in range(size // MIB):
        yield rng.randbytes(MIB)


def open_repository(directory: str) -> image_repository.Repository:
    return image_repository.Repository(
        os.path.join(directory, 'repository'), codec='none', filter_mib=1,
        filter_dir=directory)


class Bench:
    """A repository with the images, and the measured operations."""

    def __init__(self, directory: str,
                 repo: image_repository.Repository) -> None:
        self._repo = repo
        self._pace = pacing.Pace()
        self._held = cache_catalog.Held(repo)
        # The reserve grows with the catalog, which is small here.
        reserve.RESERVE_BYTES = MIB
        self._maintainer = maintainer_role.Maintainer(repo)

    def close(self) -> None:
        self._maintainer.close()
        self._held.close()

    def store(self, mib: str) -> None:
        for name in ('small', 'large', 'same'):
            pieces = noise(SMALL, int(mib) * MIB)
            small = next(pieces)
            self._put(name, [small] if name == 'small' else
                      itertools.chain([small[:KEPT]], pieces))

    def _put(self, image_id: str, pieces: Iterable[bytes]) -> None:
        common.store(self._repo, image_id, pieces)
        self._held.note(image_id, self._repo.stat(image_id).size, None)

    def counting(self) -> None:
        self._account()

    def uncounting(self) -> None:
        self._held.drop('same')
        self._account()

    def rebuilding(self) -> None:
        self._maintainer.rebuild()

    def merging(self) -> None:
        with contextlib.closing(self._maintainer.engine.open_recipe(
                'large')) as recipe:
            group, slot, _ = [run for run in _runs(recipe.runs(0, 1))
                              if run[2] >= MERGED][1]
        with contextlib.closing(self._maintainer.relocation()) as relocation:
            first = group << 15 | slot
            relocation.add(b''.join(
                (first + i).to_bytes(8, 'little') for i in range(MERGED)))
            merged = merger.merge_image(self._maintainer, 'large',
                                        relocation.finish(), self._pace)
        if merged.replaced != MERGED or not merged.exchanged:
            raise SystemExit(f'it was not merged: {merged}')

    def evacuating(self) -> None:
        self._held.drop('small')
        done = collector.run_once(self._maintainer, self._pace)
        if not done.evacuated:
            raise SystemExit(f'nothing was evacuated: {done}')

    def planning(self) -> None:
        if evictor.plan(self._maintainer, self._pace, self._held,
                        self._limit()).images != ['large']:
            raise SystemExit('it is not to be evicted')

    def evicting(self) -> None:
        done = evictor.run_once(self._maintainer, self._pace, self._held,
                                self._limit())
        if done.evicted != ['large']:
            raise SystemExit(f'it was not evicted: {done}')

    def _limit(self) -> int:
        # The minimum: the large image does not fit.
        return BLOCK * SLOTS + reserve.RESERVE_BYTES

    def _account(self) -> None:
        done = accounting.run_once(self._maintainer, self._pace)
        if done.left or done.unreadable:
            raise SystemExit(f'something was left: {done}')


def _runs(runs: bytes) -> Iterator[tuple[int, ...]]:
    for at in range(0, len(runs), 12):
        yield tuple(int.from_bytes(runs[at + i:at + i + 4], 'little')
                    for i in (0, 4, 8))


def probe(directory: str, what: str, *arguments: str) -> None:
    """Do one thing in this process; print its growth."""
    with (open_repository(directory) as repo,
          contextlib.closing(Bench(directory, repo)) as bench):
        with contextlib.closing(common.Peak()) as peak:
            before = peak.bytes
            getattr(bench, what)(*arguments)
        json.dump(peak.bytes - before, sys.stdout)


def growths(directory: str, mib: int) -> list[int]:
    """Return the growths of all steps, for an image of this size."""
    image_repository.Repository.create(
        os.path.join(directory, 'repository'), block_size=BLOCK,
        group_slots=SLOTS)
    common.in_a_process(__file__, directory, 'store', mib)
    return [common.in_a_process(
        __file__, directory, step.replace('-', '').split()[0])
        for step in STEPS]


def main() -> None:
    if sys.argv[1:2] == ['--probe']:
        return probe(*sys.argv[2:])
    args = common.arguments(
        __doc__, mib=([512, 1024, 2048], 'sizes of the image')).parse_args()
    columns = []
    for mib in args.mib:
        with common.place(args.dir) as d:
            columns.append(growths(os.path.abspath(d), mib))
    print(f'{"growth, MiB; blocks, thousands:":32}' + ''.join(
        f'{mib * MIB // BLOCK // 1000:9}' for mib in args.mib))
    for step, figures in zip(STEPS, zip(*columns)):
        print(f'{step:32}' + ''.join(f'{n / MIB:9.1f}' for n in figures))


if __name__ == '__main__':
    main()
