# SPDX-License-Identifier: Apache-2.0

"""A helper's scrub: verifies the blocks of its share of the groups.

It takes no lock and changes nothing. Blocks that do not verify on two
readings, and those that are marked as damaged, go into the helper's notes. The
maintainer verifies them again before it marks them (``findings.py``): a host
whose memory is bad must not be able to give up good blocks. The maintainer
also reads all recipes, since its catalog has the images that need a block.

The cursor is in the notes, too. If a group changes hands during a pass, it may
be verified twice, or only in the next pass.
"""

from collections.abc import Callable
import dataclasses
import time

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import helper_daemon
from glance_dedup.maintenance import host_notes

#: Slots that one step verifies.
STEP_SLOTS = 1024
#: Seconds between two times that the cursor is saved.
SAVE_INTERVAL = 60.0


@dataclasses.dataclass(frozen=True)
class Result:
    """Findings of a pass so far."""

    blocks: int
    """Blocks verified in this pass."""
    bytes: int
    """Bytes read from the disk in this pass."""
    found: int
    """Blocks that did not verify in this pass, and were not marked."""
    worn: int
    """Good blocks with a neighbour whose bytes have changed on the disk."""
    complete: bool
    """True if the pass has ended."""
    unreadable: dict[str, str]
    """Groups that cannot be read, each with its error."""


def run_once(helper: helper_daemon.Helper, pace: pacing.Pace,
             is_mine: Callable[[int], bool]) -> Result:
    """Go on with the pass to its end.

    :param is_mine: returns whether a group is in this daemon's share; called
        for each group just before
    :raises pacing.Stopped: between two steps; the next run goes on from there
    """
    if helper.notes.scrub['complete']:
        helper.notes.begin_scrub(time.time())
    return _Run(helper, pace, is_mine).run()


class _Run:
    def __init__(self, helper: helper_daemon.Helper, pace: pacing.Pace,
                 is_mine: Callable[[int], bool]) -> None:
        self._helper = helper
        self._pace = pace
        self._is_mine = is_mine
        self._notes = helper.notes
        self._state = helper.notes.scrub
        self._saved = time.monotonic()

    def run(self) -> Result:
        try:
            self._state['complete'] = self._scrub_groups()
        finally:
            self._helper.save()
        state = self._state
        return Result(
            state['blocks'], state['bytes'], state['damaged'], state['worn'],
            state['complete'],
            {f'groups/{number:08x}': error for number, error
             in self._notes.unreadable.items()})

    def _scrub_groups(self) -> bool:
        """Verify all groups from the cursor on; False if the notes are full.

        Then the maintainer must act on them first.
        """
        state = self._state
        numbers = self._helper.engine.groups()
        self._forget_others(set(numbers))
        for done, number in enumerate(numbers):
            if number < state['group'] or not self._is_mine(number):
                continue
            if number > state['group']:
                state['group'], state['slot'] = number, 0
            if not state['slot']:
                self._forget(number)
            try:
                if not self._scrub_group(number, done, len(numbers)):
                    return False
                self._notes.unreadable.pop(number, None)
            except exceptions.ImageNotFound:
                pass        # it was empty, and is gone
            except exceptions.UNREADABLE as e:
                # One bad group does not stop the pass.
                if len(self._notes.unreadable) < host_notes.MAX_UNREADABLE:
                    self._notes.unreadable[number] = str(e)
            state['group'], state['slot'] = number + 1, 0
        return True

    def _forget_others(self, there: set[int]) -> None:
        """Forget the findings in groups that are gone, or others' now."""
        for number in {block_addresses.group_of(address)
                       for address in self._notes.found}.union(
                           self._notes.unreadable):
            if number not in there or not self._is_mine(number):
                self._forget(number)
                self._notes.unreadable.pop(number, None)

    def _forget(self, number: int) -> None:
        """Forget the findings in a group, since it is verified again."""
        self._notes.found = {
            address for address in self._notes.found
            if block_addresses.group_of(address) != number}

    def _scrub_group(self, number: int, done: int, total: int) -> bool:
        """Verify the rest of a group; False if the notes are full."""
        state = self._state
        facts = self._helper.engine.group_facts(number)
        # The next writer judges the unpublished slots behind these (N7.3).
        while (first := state['slot']) < facts['published']:
            # As the maintainer's scrub does.
            step = facts['slots'] if facts['has_lists'] else STEP_SLOTS
            count = min(step, facts['published'] - first)
            if (len(self._notes.found) + min(count, STEP_SLOTS)
                    > host_notes.MAX_FOUND):
                return False
            cost = self._scrub_slots(number, first, count, facts['is_cold'])
            state['slot'] = first + count
            self._save_sometimes()
            self._pace.step(
                done * facts['slots'] + first, total * facts['slots'],
                f'scrubbing group {number:08x}', cost=cost)
        return True

    def _scrub_slots(self, number: int, first: int, count: int,
                     is_cold: bool) -> int:
        """Verify some slots of a group; return the bytes read.

        Of a cold group, these are the entries. The maintainer reads samples of
        the objects.
        """
        state = self._state
        states = block_addresses.columns(
            self._helper.engine.entries(number, first, count)).states
        cost, damaged, invalid, worn = _engine.verify_slots(
            self._helper.handle, number, first, count, True, 0,
            *([0] if is_cold else []))
        bad = {*block_addresses.unpack(damaged),
               *block_addresses.unpack(invalid)}
        marked = {slot for slot, entry in enumerate(states, first)
                  if entry == block_addresses.DAMAGED} if states.count(
                      block_addresses.DAMAGED) else set()
        # If not all fit, the maintainer will find the others: it reads all
        # groups once it knows of damage.
        room = host_notes.MAX_FOUND - len(self._notes.found)
        self._notes.found.update(
            block_addresses.of_slots(number, sorted(bad | marked)[:room]))
        state['damaged'] += len(bad)
        state['worn'] += len(worn) // 4
        state['bytes'] += cost
        if not is_cold:
            state['blocks'] += states.count(block_addresses.LIVE)
        if bad:
            self._helper.save()     # so that the maintainer knows soon
        return cost

    def _save_sometimes(self) -> None:
        if time.monotonic() > self._saved + SAVE_INTERVAL:
            self._saved = time.monotonic()
            self._helper.save()
