# SPDX-License-Identifier: Apache-2.0

"""Measure the effect of the fingerprint filter's budget.

Run it from a checkout in which the extension is built::

    python benchmarks/budget.py [--versions 4] [--dir DIR] IMAGE...

It stores the images, and later versions of each, one after the other, each by
a handle of its own, which only has the filter; once for each budget. Then it
merges. A line of the table has:

* the budget, and its size per TiB of unique data, so that a few images stand
  for many: LiveDFS takes up to 2 GiB; it says that ZFS takes 64 and SDFS 8;
* the filter's final sampling level: 1 in 2^level blocks has a hint;
* the share of the savings of an exact deduplication that the uploads reached,
  and the share after merging;
* fingerprint stores read, and left out because of the cap, per GiB that is not
  zeros;
* the rate of storing.

A few images fill a few groups, of which eight stores are kept at hand. With
``--group-slots 1024`` they are spread over as many groups as if the repository
were 32 times as large.
"""

import os
import shutil
import sys

import common
import disk

from dedupd.tasks import merger
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository

BLOCK = 4096


def open_repository(path: str, directory: str,
                    budget: int) -> image_repository.Repository:
    """Open a repository with a budget below the option's minimum."""
    repo = image_repository.Repository(path, codec='lz4', filter_dir=directory)
    repo.filter._budget = budget
    return repo


def store(path: str, directory: str, budget: int,
          images: list[str]) -> dict[str, int]:
    """Store the images; returns the counts of all handles."""
    counts: dict[str, int] = {}
    for i, image in enumerate(images):
        with open_repository(path, directory, budget) as repo:
            repo.put(f'image-{i}', image)
            figures = repo.statistics()
        if figures['filter_bytes'] > budget:
            raise SystemExit(f'the filter has {figures["filter_bytes"]} '
                             f'bytes, and the budget is {budget}')
        for name in ('misses', 'cold_loads', 'capped_loads'):
            counts[name] = counts.get(name, 0) + figures[name]
        counts['level'] = figures['filter_level']
    return counts


def blocks_named(repo: image_repository.Repository) -> int:
    """Return the number of distinct blocks that recipes name."""
    named: dict[int, bytearray] = {}
    for image_id in repo.images():
        with repo.open_image(image_id) as image:
            for extent in image.extents():
                if extent.kind == 'blocks':
                    slots = named.setdefault(extent.group, bytearray(32768))
                    end = extent.slot + extent.blocks
                    slots[extent.slot:end] = b'\1' * extent.blocks
    return sum(map(sum, named.values()))


def merge(path: str, directory: str, budget: int) -> int:
    """Merge all that can be; returns the blocks that are still named."""
    with open_repository(path, directory, budget) as repo:
        with maintainer_role.Maintainer(repo) as maintainer:
            merger.run_once(maintainer, pacing.Pace())
        return blocks_named(repo)


def one_budget(directory: str, budget: int, slots: int, images: list[str],
               nonzero: int, unique: int) -> None:
    path = os.path.join(directory, 'repository')
    image_repository.Repository.create(path, group_slots=slots)
    spent = common.timed(store, path, directory, budget, images)
    counts = spent.result
    possible = max(nonzero - unique, 1)
    inline = (nonzero - counts['misses'] * BLOCK) / possible
    merged = (nonzero - merge(path, directory, budget) * BLOCK) / possible
    gib = nonzero / common.GIB
    print(f'{budget >> 10:8}{budget / unique * (1 << 20):12.0f}'
          f'{counts["level"]:7}{inline:10.2%}{merged:10.2%}'
          f'{counts["cold_loads"] / gib:11.1f}'
          f'{counts["capped_loads"] / gib:10.1f}'
          f'{nonzero / spent.wall / 1e6:8.0f}', flush=True)
    shutil.rmtree(path)
    common.remove_filters(directory)


def main() -> None:
    args = common.arguments(
        __doc__, paths='+', budget=('64,128,256,512,1024,4096', 'KiB'),
        group_slots=(32768, 'blocks in a group'),
        **disk.VERSIONS).parse_args()
    with common.place(args.dir) as directory:
        images = disk.with_versions(args.paths, args.versions, args.changed,
                                    directory)
        print('deduplicating exactly', file=sys.stderr)
        unique, nonzero = common.exact_unique(images)
        print(f'{len(images)} images, {nonzero / common.GIB:.2f} GiB that is '
              f'not zeros, {unique / common.GIB:.2f} GiB unique\n')
        print(f'{"KiB":>8}{"MiB per TiB":>12}{"level":>7}{"inline":>10}'
              f'{"merged":>10}{"loads/GiB":>11}{"left out":>10}{"MB/s":>8}')
        for budget in map(int, args.budget.split(',')):
            one_budget(directory, budget << 10, args.group_slots, images,
                       nonzero, unique)


if __name__ == '__main__':
    main()
