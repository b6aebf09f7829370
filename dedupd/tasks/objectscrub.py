# SPDX-License-Identifier: Apache-2.0

"""Scrubbing of cold groups' objects: their presence, and a sample of them.

A pass of the scrub (:mod:`dedupd.tasks.scrubber`) verifies the entries of cold
groups as of others. Then it checks their objects:

* It lists all. One that is not there, or has another length, is *missed*. If
  the next pass misses the same object again, it is *lost*, and is reported
  with the images that need it. Once is not enough: an object store's listing
  may lag, and a failed request proves nothing about the object.
* It reads a sample past the cache, and verifies the blocks in it. The sample
  goes round: it begins where that of the pass before ended, so the part
  that was verified longest ago comes first.

If the object store does not answer, nothing is judged, and the pass does not
end: the next run sends the requests again.
"""

from collections.abc import Callable
from collections.abc import Iterator
import logging
from typing import Any

from dedupd.tasks import damaged_blocks
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import maintainer_role
from glance_dedup.objects import object_store
from glance_dedup.objects import slice_cache
from glance_dedup.repository import cold_settings

LOG = logging.getLogger(__name__)

#: Bytes of an object that one step verifies, beside the end of the last
#: segment in them.
STEP_BYTES = 8 << 20
#: Objects that are missed at most. If there are more, a later pass finds them.
MAX_MISSED = 1000
#: Objects that one pass finds lost at most: each costs a reading of all
#: recipes.
MAX_LOST = 16

Facts = dict[str, Any]
Note = Callable[[str, str | None, list[str]], None]

_SLICE = slice_cache.SLICE


def begin(state: Facts) -> None:
    """Prepare the scrub's record for a new pass."""
    state['cold'] = {'group': 0, 'offset': 0, 'missed': {},
                     **state.get('cold', {}), 'listed': False,
                     'sampled': False, 'read': 0}


class Objects:
    """The objects of one pass.

    :param state: the scrub's record. This changes its entry ``cold``:
        the sample's cursor (group and offset), the bytes read in this pass,
        whether the objects were listed and the sample read, and the missed
        ones
    :param budget: the most bytes of objects that a pass reads
    :param found: called with a group and its slots whose blocks are damaged
    :param save: called with words and a step's bytes after each step
    :ivar unavailable: the error of the object store; None: it answered, or
        no request was needed
    :ivar unchecked: blocks in cold groups that this run did not get to for
        that reason
    """

    def __init__(self, maintainer: maintainer_role.Maintainer,
                 state: Facts, budget: int,
                 found: Callable[[int, list[int]], object],
                 save: Callable[[str, int], None]) -> None:
        self._maintainer = maintainer
        self._state = state
        self._budget = budget
        self._found = found
        self._save = save
        self.unavailable: str | None = None
        self.unchecked = 0
        self._verified: set[int] = set()    # groups
        if 'cold' not in state:
            begin(state)

    def scrub(self, note: Note, is_spent: Callable[[], bool]) -> bool:
        """Check the objects; return False if the run's budget is spent before.

        :param note: called with the name of a lost object, its error, and the
            images that need it; without an error if it is not lost any more
        :raises task.Stopped: between two steps
        """
        groups = dict(self._cold_groups())
        state = self._state['cold']
        try:
            if not state['listed']:
                self._look_for_missing(groups, note)
            if not state['sampled']:
                state['sampled'] = self._sample(groups, is_spent)
            return bool(state['sampled'])
        except (exceptions.UnavailableError, exceptions.AccessDenied,
                exceptions.NoSpaceError) as e:
            LOG.warning('Objects of cold groups are not verified now: %s', e)
            self.unavailable = str(e)
            self.unchecked = sum(
                facts['used']
                for number, facts in self._maintainer.catalog.groups()
                if number in groups and number not in self._verified)
            return True

    def _cold_groups(self) -> Iterator[tuple[int, Facts]]:
        engine = self._maintainer.engine
        for number in engine.groups():
            try:
                facts = engine.group_facts(number)
            except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
                continue        # the scrub of its file reports it
            if facts['is_cold']:
                yield number, facts

    # -- presence ---------------------------------------------------------

    def _look_for_missing(self, groups: dict[int, Facts], note: Note
                          ) -> None:
        state = self._state['cold']
        missed: dict[str, str] = {}
        lost: dict[str, tuple[int, str]] = {}
        if groups:
            settings = cold_settings.require(self._maintainer.repository.path)
            with cold_settings.connect(settings) as store:
                for number, why in self._missing(store, settings.owners,
                                                 groups):
                    object_id = groups[number]['object']
                    missed[str(number)] = object_id.hex()
                    if state['missed'].get(str(number)) == object_id.hex():
                        lost[slice_cache.key_of(
                            settings.owner, number, object_id)] = number, why
                    if len(missed) == MAX_MISSED:
                        break
        self._report(lost, note)
        # Only now: if this was stopped before, the object would be missed for
        # the second time within one pass.
        state['missed'], state['listed'] = missed, True
        self._save('looking for objects', 0)

    def _missing(self, store: object_store.ObjectStore,
                 owners: tuple[str, ...], groups: dict[int, Facts]
                 ) -> Iterator[tuple[int, str]]:
        """The groups whose objects are not there, and the objects instead."""
        there = {owner: dict(store.keys(f'{owner}/g/')) for owner in owners}
        for number, facts in groups.items():
            keys = [slice_cache.key_of(owner, number, facts['object'])
                    for owner in owners]
            if any(there[owner].get(key) == facts['end']
                   for owner, key in zip(owners, keys)):
                continue
            # The listing may lag behind.
            sizes = [size for key in keys
                     if (size := object_store.find(store, key)) is not None]
            if facts['end'] not in sizes:
                yield number, (
                    f'the object has {sizes[0]} bytes instead of '
                    f'{facts["end"]}' if sizes else 'there is no such object')

    def _report(self, lost: dict[str, tuple[int, str]], note: Note) -> None:
        for name in list(self._state['unreadable']):
            if '/g/' in name and name not in lost:
                note(name, None, [])
        new = sorted(lost.keys() - self._state['unreadable'].keys())
        for name in new[:MAX_LOST]:
            number, why = lost[name]
            note(name, f'{why}, as the scrub before this one found, too: '
                 f'groups/{number:08x} needs it',
                 damaged_blocks.images_of_group(self._maintainer, number))
        if len(new) > MAX_LOST:
            LOG.error('%d more objects are lost; the next scrubs report them',
                      len(new) - MAX_LOST)

    # -- a sample ---------------------------------------------------------

    def _sample(self, groups: dict[int, Facts], is_spent: Callable[[], bool]
                ) -> bool:
        """Verify blocks from the cursor on, and around the end."""
        state = self._state['cold']
        order = [(number, groups[number]['end']) for number in sorted(
            groups, key=lambda number: (number < state['group'], number))]
        if order and order[0][0] == state['group']:
            order.append((state['group'], state['offset']))
        for number, end in order:
            if number != state['group']:
                state['group'], state['offset'] = number, 0
            while state['offset'] < end and (
                    str(number) not in state['missed']):
                if self._budget - state['read'] < 2 * _SLICE:
                    return True
                if is_spent():
                    return False
                self._verify(number, groups[number])
            state['group'], state['offset'] = number + 1, 0
        return True

    def _verify(self, number: int, facts: Facts) -> None:
        """Verify the blocks of some slices of an object."""
        state = self._state['cold']
        first = state['offset'] // _SLICE
        # The last segment may end in one slice more.
        asked = min(1 + STEP_BYTES // _SLICE,
                    (self._budget - state['read']) // _SLICE,
                    -(-facts['end'] // _SLICE) - first)
        ends = facts['end']
        if (first + asked) * _SLICE < ends:
            ends = (first + asked - 1) * _SLICE
        fetcher = self._maintainer.repository.slices
        kept = fetcher.forget(facts['object'], first, asked)
        try:
            _, damaged, invalid, _ = _engine.verify_slots(
                self._maintainer.handle, number, 0, facts['published'], True,
                first * _SLICE, ends)
        except exceptions.ImageNotFound:
            damaged = invalid = b''     # it was collected
        except exceptions.UnavailableError:
            # The next sample does not begin with this object again.
            state['group'], state['offset'] = number + 1, 0
            self._save('verifying objects', 0)
            raise
        finally:
            for slot in range(first, first + asked):
                if slot not in kept:
                    fetcher.forget(facts['object'], slot, 1)
        self._verified.add(number)
        self._found(number, sorted({*block_addresses.unpack(damaged),
                                    *block_addresses.unpack(invalid)}))
        state['offset'] = ends
        state['read'] += asked * _SLICE
        self._save(f'verifying the object of group {number:08x}',
                   asked * _SLICE)
