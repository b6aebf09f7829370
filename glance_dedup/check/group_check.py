# SPDX-License-Identifier: Apache-2.0

"""The groups, each compared with all extents that name it.

A group is read several times before it is reported, for it may be written
meanwhile. Recipes that are stale by then do not count.
"""

import bisect
from collections.abc import Iterable
import functools
import typing

from glance_dedup.check import catalog_check
from glance_dedup.check import files
from glance_dedup.check import group_reader
from glance_dedup.check import ondisk
from glance_dedup.check import recipe_table
from glance_dedup.check import repo_directories
from glance_dedup.check import space
from glance_dedup.check import spare_files

# The sentence on a group that has no file, and its place.
GONE = 'is missing', None


class _Doubts(typing.NamedTuple):
    """Problems of a group that matter to the extents that name it."""

    misfits: bool               # some name something that it does not have
    slots: set[int]             # that those name
    stale: set[int]             # numbers of owners that are stale


class Groups:
    """Judges groups, once all recipes and spare copies were read."""

    def __init__(self, directories: repo_directories.Directories,
                 reader: group_reader.GroupReader,
                 recipes: recipe_table.Recipes,
                 spares: spare_files.Spares) -> None:
        self._directories = directories
        self._findings = directories.findings
        self._reader = reader
        self._recipes = recipes
        self._spares = spares
        self._duplicates = space.Duplicates()

    def check_all(self, numbers: list[int]) -> None:
        """Judge the groups that there are, then others that recipes name.

        :param numbers: numbers of the groups with a file, sorted
        """
        for number in numbers:
            self.check(number)
        for number in self._recipes.groups():
            i = bisect.bisect_left(numbers, number)
            if numbers[i:i + 1] != [number]:
                self.check(number)

    def check(self, number: int, again: bool = False) -> None:
        """Judge a group, and all extents that name it.

        :param again: judge current extents only; the group was judged before
        """
        file = f'groups/{number:08x}'
        extents = functools.partial(self._recipes.extents, number)
        slots = None            # the slots to read; None: all
        if again:
            slots = {slot for e in extents() for slot in e.slots()}
        first = None            # the first reading with a valid header
        stale: set[int] = set()
        for _ in files.looks():
            group: group_reader.Group | None = None
            failure: tuple[str, int | None] = GONE
            try:
                group = self._look(number, slots)
            except files.Gone:
                pass
            except ondisk.Damage as e:
                failure = e.sentence, e.offset
            first = first or group
            doubts = self._doubts(number, group, stale)
            if group is not None and (
                    not doubts.misfits and not group.problems):
                break
            stale |= doubts.stale
            if group is not None:
                slots = doubts.slots | group.doubtful
                for p in group.problems:
                    slots.update(p.all_slots())
            elif failure == GONE and not any(extents(stale)):
                break           # no recipe names it any more
        if first is not None and self._recipes.catalog is not None:
            _judge_catalog(self._recipes.catalog, first, extents())
        if group is None:
            if failure == GONE and not any(extents(stale)):
                return
            self._report_failure(file, failure, extents(stale))
        else:
            if group.problems:
                self._report_problems(group, file, extents(stale), again)
            if doubts.misfits:
                self._report_misfits(group, file, extents(stale))
        if first is not None and not again:
            space.add_group(self._findings.figures, self._duplicates, first,
                            extents(stale))

    def count_duplicates(self) -> None:
        """Add the figure of duplicates once all groups were judged."""
        self._findings.figures['duplicate_blocks'] = self._duplicates.count()

    # Looking

    def _look(self, number: int, slots: set[int] | None
              ) -> group_reader.Group:
        if 'groups' not in self._directories:
            raise files.Gone()
        return self._reader.look(self._directories['groups'], number, slots)

    def _doubts(self, number: int, group: group_reader.Group | None,
                stale: set[int]) -> _Doubts:
        """Find out whether current recipes still name the bad slots.

        :param group: None if it could not be read
        :param stale: numbers of owners to leave out
        """
        misfits = group is not None and any(
            self._misfit(group, e)[0] is not None
            for e in self._recipes.extents(number, stale))
        found = _Doubts(misfits, set(), set())
        asked = None
        if group is not None and not found.misfits and not group.problems:
            return found
        for e in self._recipes.extents(number, stale):
            if group is not None:
                if self._misfit(group, e)[0] is not None:
                    found.slots.update(e.slots())
                elif not self._is_lost(group, e):
                    continue
            if e.owner.number != asked:
                asked = e.owner.number
                if self._recipes.is_stale(e.owner):
                    found.stale.add(asked)
        return found

    def _is_lost(self, group: group_reader.Group,
                 e: recipe_table.KeptExtent) -> bool:
        """Return whether it names a bad block without a spare copy."""
        return group.hits(e) and any(
            group.states[slot] == ondisk.BAD
            and not self._spares.replaces(group, slot)
            for slot in range(e.slot, min(e.slot + e.blocks, group.slots)))

    def _misfit(self, group: group_reader.Group,
                e: recipe_table.KeptExtent) -> tuple[str | None, str]:
        """Return the slots that an extent names in vain, and the severity."""
        states = group.states[e.slot:e.slot + e.blocks]
        end = e.slot + e.blocks
        if end > group.slots:
            return f'the group has only {group.slots} slots', ondisk.DAMAGE
        if group.scope != e.owner.scope:
            return 'the group has blocks of another scope', ondisk.DAMAGE
        marked, lost = None, False
        for slot, state in enumerate(states, e.slot) if (
                states.count(ondisk.GOOD) != e.blocks) else ():
            if state in (ondisk.DAMAGED, ondisk.BAD) and (
                    self._spares.replaces(group, slot)):
                marked = slot if state == ondisk.DAMAGED else marked
            elif state == ondisk.BAD:
                lost = True     # a finding of its group's
            elif state != ondisk.GOOD:
                return (f'slot {slot} is {ondisk.STATE_NAMES[state]}',
                        ondisk.DAMAGE)
        if lost:
            return None, ondisk.NOTE
        # A damaged entry keeps its fields.
        if sum(group.lengths[e.slot:end]) != e.length:
            return 'their lengths do not add up to its own', ondisk.DAMAGE
        if ondisk.xxh3(group.fingerprints[
                32 * e.slot:32 * end]) != e.digest:
            return ('these are not the blocks that it was made of',
                    ondisk.DAMAGE)
        if marked is not None:
            return (f'slot {marked} is marked as damaged; reads use a spare '
                    'copy instead'), ondisk.NOTE
        return None, ondisk.NOTE

    # Reporting

    def _report_failure(self, file: str, failure: tuple[str, int | None],
                        extents: Iterable[recipe_table.KeptExtent]) -> None:
        images = {e.owner.image_id for e in extents
                  if e.owner.image_id is not None}
        self._findings.find(
            ondisk.NOTE if failure == GONE and not images else ondisk.DAMAGE,
            file, failure[1], failure[0], images)

    def _report_problems(self, group: group_reader.Group, file: str,
                         extents: Iterable[recipe_table.KeptExtent],
                         again: bool) -> None:
        at: dict[int, list[int]] = {}       # problems by slot
        for number, p in enumerate(group.problems):
            for slot in p.all_slots():
                at.setdefault(slot, []).append(number)
        hit: list[set[str]] = [set() for _ in group.problems]
        bereft: list[set[str]] = [set() for _ in group.problems]
        for e in extents:
            if e.owner.image_id is None or not group.hits(e):
                continue
            lost = self._is_lost(group, e)
            for number in {n for slot in e.slots() for n in at.get(slot, ())}:
                hit[number].add(e.owner.image_id)
                if lost:
                    bereft[number].add(e.owner.image_id)
        for p, images, losing in zip(group.problems, hit, bereft):
            if images or not again:
                self._findings.find(group.severity_of(p, bool(losing)), file,
                                    p.offset, p.sentence, images, losing)

    def _report_misfits(self, group: group_reader.Group, file: str,
                        extents: Iterable[recipe_table.KeptExtent]) -> None:
        for e in extents:
            sentence, severity = self._misfit(group, e)
            if sentence is None:
                continue
            owner = e.owner
            page, place = divmod(e.number, ondisk.EXTENTS_PER_PAGE)
            self._findings.find(
                ondisk.NOTE if owner.image_id is None else severity,
                owner.file,
                (page + 1) * ondisk.PAGE + 8 + ondisk.EXTENT * place,
                f'extent {e.number} names {e.blocks} blocks of {file} from '
                f'slot {e.slot}, but {sentence}',
                [] if owner.image_id is None else [owner.image_id])


def _judge_catalog(catalog: catalog_check.Catalog,
                   group: group_reader.Group,
                   extents: Iterable[recipe_table.KeptExtent]) -> None:
    """Compare the catalog's facts about a group with the recipes."""
    changes: dict[int, int] = {}
    named = bytearray(group.slots)
    for e in extents:
        end = min(e.slot + e.blocks, group.slots)
        named[e.slot:end] = b'\1' * max(0, end - e.slot)
        if e.number < e.owner.counted:
            for slot, change in ((e.slot, 1), (e.slot + e.blocks, -1)):
                changes[slot] = changes.get(slot, 0) + change
    catalog.judge_group(group, changes, named)
