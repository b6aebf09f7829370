# SPDX-License-Identifier: Apache-2.0

"""Measure the gain for reads if blocks were stored again in another order.

Run it from a checkout in which the extension is built::

    python benchmarks/arranging.py REPOSITORY

It changes nothing: it takes the recipes and the places of their blocks,
assumes other places for these, each block once, and computes the work of a
disk of the model (``--seek-ms``, ``--mb-s``) for reading each image from end
to end, as the engine would request it (readahead.c), without the recipes. It
shows the sum over all images: as it is; with all blocks in the order of their
first image, or their last, or by the images that need them; with the blocks
joined that only one image needs, or that are scattered for every image that
reads them; and the change of the sum if the scattered blocks of one of the
worst images are joined in its order. ``ageing.py --arrange`` shows the same of
the repository that it made.
"""

import argparse
import collections
from collections.abc import Callable, Iterable
import os
import struct
import sys
import tempfile
from typing import NamedTuple

import common
from common import MIB
import disk

from glance_dedup.base import exceptions
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository

# As in readahead.c.
SPAN_MIN, SPAN_MAX, SPAN_FAR = 4 * MIB, 32 * MIB, 128 * MIB
SCATTERED = 2 * MIB
GAP, SMALL_GAP = 512 << 10, 32768
ENTRY = struct.Struct('<32x3I4x')
STORE_ENTRY = 56
LIVE = 1

Block = tuple[int, int]  # group and slot


class Place(NamedTuple):
    """The range of a block's segment, and the block's share of it."""

    start: int
    end: int
    share: int


class Cost(NamedTuple):
    seeks: int
    bytes: int

    def seconds(self, args: argparse.Namespace) -> float:
        return self.seeks * args.seek_ms / 1e3 + self.bytes / args.mb_s / 1e6


# -- a repository, in thought -------------------------------------------------

class Layout:
    """Images, as the blocks that they name, and the blocks' places."""

    def __init__(self, images: dict[str, list[Block]],
                 places: dict[Block, Place], slots: int, size: int) -> None:
        self.images = images
        self.places = places
        self._slots = slots
        self._size = size       # of a block

    @classmethod
    def of(cls, path: str, filter_dir: str) -> 'Layout':
        with (image_repository.Repository(path, filter_dir=filter_dir) as repo,
              maintainer_role.Maintainer(repo) as maintainer):
            images = {}
            for name in sorted(repo.images(), key=lambda name: (
                    repo.stat(name).created, len(name), name)):
                with repo.open_image(name) as image:
                    images[name] = [
                        (e.group, e.slot + i) for e in image.extents()
                        if e.kind == 'blocks' for i in range(e.blocks)]
            places: dict[Block, Place] = {}
            for group in {g for blocks in images.values() for g, _ in blocks}:
                places.update(_places(maintainer, group))
            return cls(images, places, repo.parameters.group_slots,
                       repo.parameters.block_size)

    def rearranged(self, order: Iterable[Block]) -> 'Layout':
        """Return the layout with these blocks in new groups, in this order."""
        group = max(group for group, _ in self.places) + 1
        slot = end = 0
        moved: dict[Block, Block] = {}
        places = dict(self.places)
        for block in order:
            if slot == self._slots:
                group, slot, end = group + 1, 0, 0
            moved[block] = (group, slot)
            share = self.places[block].share
            places[group, slot] = Place(end, end + share, share)
            slot, end = slot + 1, end + share
        return Layout({name: [moved.get(b, b) for b in blocks]
                       for name, blocks in self.images.items()},
                      places, self._slots, self._size)

    # -- reading ----------------------------------------------------------

    def read(self, name: str, told: Callable | None = None) -> Cost:
        """Return the cost of reading an image from end to end.

        :param told: gets each request: its group, start and end, and the bytes
            of it that are wanted
        """
        seeks = asked = at = 0
        seen: set[int] = set()
        span, blocks = SPAN_MIN, self.images[name]
        while at < len(blocks):
            step = blocks[at:at + span // self._size]
            at += len(step)
            groups = collections.defaultdict(set)
            for block in step:
                groups[block[0]].add(self.places[block][:2])
            count = size = 0
            for group, stretches in sorted(groups.items()):
                if group not in seen:
                    seen.add(group)
                    seeks += 1
                    asked += STORE_ENTRY * self._slots
                for start, end, wanted in joined(sorted(stretches)):
                    count, size = count + 1, size + end - start
                    if told is not None:
                        told(group, start, end, wanted)
            seeks, asked = seeks + count, asked + size
            span = min(2 * span, SPAN_FAR if size < count * SCATTERED
                       else SPAN_MAX)
        return Cost(seeks, asked)

    def cost(self) -> Cost:
        """Return the cost of reading all images, each by itself."""
        return Cost(*map(sum, zip(*map(self.read, self.images))))

    def scattered(self, name: str, least: int) -> set[Block]:
        """Return blocks that are read in requests with fewer wanted bytes."""
        small = collections.defaultdict(list)

        def note(group: int, start: int, end: int, wanted: int) -> None:
            if wanted < least:
                small[group].append((start, end))

        self.read(name, note)
        return {(group, slot) for group, slot in self.images[name]
                if any(start <= self.places[group, slot].start < end
                       for start, end in small.get(group, ()))}


def _places(maintainer: maintainer_role.Maintainer, group: int
            ) -> dict[Block, Place]:
    slots = maintainer.engine.group_facts(group)['slots']
    listed = maintainer.engine.entries(group, 0, slots)
    found = {}
    for slot, (offset, _, stored) in enumerate(ENTRY.iter_unpack(listed)):
        if listed[ENTRY.size * slot + 44] == LIVE:
            found[group, slot] = (offset, offset + stored)
    sharing = collections.Counter(found.values())
    return {block: Place(*segment, (segment[1] - segment[0])
                         // sharing[segment])
            for block, segment in found.items()}


def joined(stretches: list[tuple[int, int]]
           ) -> Iterable[tuple[int, int, int]]:
    """Join sorted ranges as they are requested, with the bytes wanted."""
    begin, end = stretches[0]
    wanted, vain = end - begin, 0
    for start, stop in stretches[1:]:
        gap = max(0, start - end)
        more = max(0, stop - end - gap)
        if gap > GAP or (gap > SMALL_GAP and vain + gap > wanted + more):
            yield begin, end, wanted
            begin, end, wanted, vain = start, stop, stop - start, 0
            continue
        vain, wanted, end = vain + gap, wanted + more, end + gap + more
    yield begin, end, wanted


# -- orders -------------------------------------------------------------------

def once(layout: Layout, names: Iterable[str],
         among: set[Block] | None = None) -> list[Block]:
    """The blocks of images, one after the other, each block once."""
    return list(dict.fromkeys(
        block for name in names for block in layout.images[name]
        if among is None or block in among))


def users_of(layout: Layout) -> dict[Block, tuple[int, ...]]:
    """Return the images that name each block, by block."""
    users: dict[Block, list[int]] = collections.defaultdict(list)
    for i, blocks in enumerate(layout.images.values()):
        for block in set(blocks):
            users[block].append(i)
    return {block: tuple(images) for block, images in users.items()}


def orders(layout: Layout) -> Iterable[tuple[str, list[Block]]]:
    names = list(layout.images)
    users = users_of(layout)
    oldest = once(layout, names)
    yield 'all, first image first', oldest
    yield 'all, last image first', once(layout, reversed(names))
    yield 'all, by which images need them', sorted(
        oldest, key=lambda block: users[block])
    yield 'those of one image alone', once(
        layout, names, {b for b, u in users.items() if len(u) == 1})
    for least in (64, 256):
        found: dict[Block, int] = collections.Counter()
        for name in names:
            found.update(layout.scattered(name, least << 10))
        yield f'scattered (< {least} KiB) for all that read them', once(
            layout, names, {b for b, n in found.items()
                            if n == len(users[b])})


def show_line(what: str, moved: int, cost: Cost, args) -> None:
    print(f'{what:48}{moved:9}{cost.seeks:9}{cost.bytes / 1e6:9.0f}'
          f'{cost.seconds(args):9.2f}', flush=True)


def change(layout: Layout, now: Cost, name: str, least: int, args) -> float:
    """Return the sum's change if an image's scattered blocks are joined."""
    order = once(layout, [name], layout.scattered(name, least))
    found = layout.rearranged(order).cost() if order else now
    return found.seconds(args) / now.seconds(args) - 1


def show(path: str, filter_dir: str, args: argparse.Namespace) -> None:
    """Print all of it; args has ``seek_ms``, ``mb_s`` and ``worst``."""
    layout = Layout.of(path, filter_dir)
    if not layout.images or not layout.places:
        return
    print(f'\n{"stored anew":48}{"blocks":>9}{"seeks":>9}{"MB":>9}{"s":>9}')
    now = layout.cost()
    show_line('nothing', 0, now, args)
    for what, order in orders(layout):
        show_line(what, len(order), layout.rearranged(order).cost(), args)
    worst = sorted(layout.images, key=layout.read, reverse=True)[:args.worst]
    for least in (64, 256, 1024):
        found = sorted(change(layout, now, name, least << 10, args)
                       for name in worst)
        print(f'what one of the {len(worst)} worst images finds scattered (< '
              f'{least} KiB): the sum changes by {found[0]:+.2%} to '
              f'{found[-1]:+.2%}', flush=True)


def main() -> None:
    parser = common.arguments(
        __doc__, directory=False, worst=(8, 'images looked at'), **disk.MODEL)
    parser.add_argument('repository', type=os.path.abspath)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix='bench-') as directory:
        try:
            show(args.repository, directory, args)
        except exceptions.RepositoryError as e:
            sys.exit(str(e))


if __name__ == '__main__':
    main()
