# SPDX-License-Identifier: Apache-2.0

"""Counts the blocks that each project shares with other projects.

The catalog's counts say how many recipes name a block, but not of how many
projects. So this task reads all counted recipes, one project after the other,
and spreads their blocks over partitions, as counting by partition does
(``batch.rst``; ``run_partitions.py``). Then it takes one partition after the
other.

In memory, the blocks of a group that a project names are the bits of one
number. The number of projects that name each block is a sum of such numbers:
*planes*, of which the first has the lowest bit of every block's count. Both
take 4 KiB for each group of a partition, and there is one partition for each
128 groups, up to 256 partitions.
"""

import collections
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
import itertools
import time
from typing import BinaryIO

from dedupd.tasks import run_partitions
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import projects

Bits = dict[int, int]           # by group: the slots, as bits


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a run."""

    projects: int
    images: int
    """Recipes that were read, also those of backups and volumes."""
    left_out: int
    """Recipes that were deleted meanwhile, or cannot be read."""


def run_once(maintainer: maintainer_role.Maintainer, pace: pacing.Pace
             ) -> Result:
    """Count all projects, and write ``projects.json``.

    :raises pacing.Stopped: the file stays as it was
    :raises OSError: there is no room for the partitions or the file
    """
    return maintainer.guard(lambda: _run(maintainer, pace), pace.step)


def _run(maintainer: maintainer_role.Maintainer, pace: pacing.Pace) -> Result:
    catalog = maintainer.catalog
    ledger = sorted((str(facts.get('project', '')), facts['image_id'], txid)
                    for txid, facts in catalog.ledger())
    counted = time.time()
    with run_partitions.Partitions(
            len(maintainer.engine.groups())) as partitions:
        left_out = _spread(maintainer.engine, ledger, partitions, pace)
        sums = _Sums(maintainer.engine)
        for number, file in enumerate(partitions.files):
            sums.add(file)
            pace.step(number + 1, len(partitions.files), 'comparing projects',
                      cost=2 * file.tell())
    names = sorted({name for name, _, _ in ledger})
    sharing = {name: projects.Sharing(
        counted, sums.exclusive[number], sums.shared[number],
        round(sums.charged[number])) for number, name in enumerate(names)}
    projects.save(maintainer.repository.path,
                  catalog.statistics()['projects'], sharing)
    return Result(len(names), len(ledger) - left_out, left_out)


def _spread(engine: _engine.Maintenance, ledger: list[tuple[str, str, bytes]],
            partitions: run_partitions.Partitions, pace: pacing.Pace) -> int:
    """Spread the runs of all recipes; return the number left out."""
    left_out = done = 0
    for number, (_, recipes) in enumerate(
            itertools.groupby(ledger, lambda row: row[0])):
        partitions.begin(number)
        for _, image_id, txid in recipes:
            cost = 0
            try:
                with contextlib.closing(
                        engine.open_recipe(image_id)) as recipe:
                    if (not recipe.complete
                            or recipe.header()['transaction_id'] != txid):
                        left_out += 1
                    else:
                        for runs in block_addresses.pieces(recipe):
                            partitions.add(runs)
                            cost += len(runs)
            except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
                left_out += 1
            done += 1
            pace.step(done, len(ledger), 'reading images', cost=cost)
    partitions.finish()
    return left_out


class _Sums:
    """The sums of each project, by the project's number.

    :ivar exclusive: blocks that only the project names
    :ivar shared: blocks that others name, too
    :ivar charged: bytes of the disk. Each block of a group takes the same part
        of the group's file, and each project that names it an equal share
    """

    def __init__(self, engine: _engine.Maintenance) -> None:
        self._engine = engine
        self.exclusive: collections.Counter[int] = collections.Counter()
        self.shared: collections.Counter[int] = collections.Counter()
        self.charged: collections.defaultdict[int, float] = (
            collections.defaultdict(float))

    def add(self, file: BinaryIO) -> None:
        """Add the named blocks of a partition's groups."""
        planes: dict[int, list[int]] = {}
        for _, named in _named(file):
            for group, bits in named.items():
                _increase(planes.setdefault(group, []), bits)
        sizes = {group: self._block_bytes(group, found)
                 for group, found in planes.items()}
        for project, named in _named(file):
            for group, bits in named.items():
                for sharers, blocks in _by_sharers(bits, planes[group]):
                    (self.exclusive if sharers == 1
                     else self.shared)[project] += blocks
                    self.charged[project] += blocks * sizes[group] / sharers

    def _block_bytes(self, group: int, planes: list[int]) -> float:
        """The part of a group's file that each named block takes."""
        used = 0
        for plane in planes:
            used |= plane
        try:
            return (self._engine.group_facts(group)['allocated']
                    / used.bit_count())
        except exceptions.RepositoryError:
            return 0.0      # it cannot be read; the scrub reports that


def _named(file: BinaryIO) -> Iterator[tuple[int, Bits]]:
    """The projects of a partition, and the blocks that each names there."""
    for project, sections in itertools.groupby(
            run_partitions.sections(file), lambda section: section[0]):
        yield project, _bits(runs for _, runs in sections)


def _bits(pieces: Iterable[bytes]) -> Bits:
    """The slots that runs name."""
    found: collections.defaultdict[int, int] = collections.defaultdict(int)
    for runs in pieces:
        for group, slot, blocks in block_addresses.runs_in(runs):
            if slot + blocks > block_addresses.GROUP_SLOTS:
                raise exceptions.DamagedError(
                    f'there are no {blocks} slots from {slot} in group '
                    f'{group}')
            found[group] |= (1 << blocks) - 1 << slot
    return found


def _increase(planes: list[int], bits: int) -> None:
    """Add one to the count of each of these slots."""
    for number, plane in enumerate(planes):
        planes[number], bits = plane ^ bits, plane & bits
        if not bits:
            return
    planes.append(bits)


def _by_sharers(bits: int, planes: list[int]) -> Iterator[tuple[int, int]]:
    """Return each count that slots have, and the number of these slots."""
    parts = [(0, bits)]
    for number, plane in enumerate(planes):
        split = []
        for count, part in parts:
            high = part & plane
            for bit, some in ((0, part ^ high), (1, high)):
                if some:
                    split.append((count | bit << number, some))
        parts = split
    for count, part in parts:
        yield count, part.bit_count()
