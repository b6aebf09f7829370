# SPDX-License-Identifier: Apache-2.0

"""Findings of helpers: the maintainer verifies them, and acts on them.

The helpers' notes are hints of other hosts. A block that a helper could not
read becomes *waiting*, as one that the maintainer's own scrub found, and is
marked only if the maintainer cannot read it either (``damaged_blocks.py``). A
group that a helper could not make smaller gets a note of that.
"""

from collections.abc import Iterable
import contextlib
import hashlib
import logging

from dedupd.tasks import damaged_blocks
from dedupd.tasks import recompressor
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import host_notes
from glance_dedup.maintenance import maintainer_role

LOG = logging.getLogger(__name__)


def take(maintainer: maintainer_role.Maintainer, pace: pacing.Pace) -> None:
    """Act on the notes that have changed since the last call.

    :raises pacing.Stopped: between two steps; the next call begins again
    """
    for number, content in host_notes.contents(maintainer.repository.path):
        digest = hashlib.sha256(content).digest()
        if maintainer.taken.get(number) == digest:
            continue
        try:
            notes = host_notes.decode(content)
        except ValueError as e:
            LOG.warning('helpers/%d.json is not used: %s', number, e)
        else:
            _take(maintainer, pace, notes)
        maintainer.taken[number] = digest
    _mark_waiting(maintainer, pace)


def _take(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
          notes: host_notes.Notes) -> None:
    _take_blocks(maintainer, pace, notes.found)
    _take_groups(maintainer, notes.unreadable)
    for number, mark in notes.kept.items():
        with contextlib.suppress(exceptions.BusyError,
                                 exceptions.NoSpaceError,
                                 *exceptions.UNREADABLE):
            recompressor.note_kept(maintainer, number, mark)
        pace.step(0, 0, 'noting what helpers found')


def _take_blocks(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
                 found: Iterable[int]) -> None:
    """Have blocks wait to be marked, and record those that are marked."""
    damage = damaged_blocks.Damage(maintainer, pace)
    state = maintainer.catalog.scrub_state()
    waiting = set(state.get('waiting', ()))
    for address in sorted(set(found).difference(damage.known, waiting)):
        group, slot = (block_addresses.group_of(address),
                       block_addresses.slot_of(address))
        with contextlib.suppress(exceptions.ImageNotFound,
                                 exceptions.InvalidParameter,
                                 *exceptions.UNREADABLE):
            listing = maintainer.engine.entries(group, slot, 1)
            damage.notice(group, slot, listing, ())
            if block_addresses.entry_at(listing, 0).state in (
                    block_addresses.LIVE, block_addresses.INVALID):
                waiting.add(address)
        pace.step(0, 0, 'looking at what helpers found')
    if waiting.difference(state.get('waiting', ())):
        maintainer.catalog.set_scrub_state(
            {**state, 'waiting': sorted(waiting)})


def _mark_waiting(maintainer: maintainer_role.Maintainer, pace: pacing.Pace
                  ) -> None:
    """Verify waiting blocks again, and mark, report and heal bad ones.

    Those in groups that are in use wait on.
    """
    state = maintainer.catalog.scrub_state()
    if not state.get('waiting'):
        return
    damage = damaged_blocks.Damage(maintainer, pace)
    done = damage.mark(state['waiting'])
    if done:
        maintainer.catalog.set_scrub_state({**state, 'waiting': sorted(
            set(state['waiting']) - done)})
        damage.heal()


def _take_groups(maintainer: maintainer_role.Maintainer,
                 unreadable: dict[int, str]) -> None:
    """Report groups that the maintainer cannot read either."""
    state = maintainer.catalog.scrub_state()
    known = state.setdefault('unreadable', {})
    for number in unreadable:
        name = f'groups/{number:08x}'
        try:
            maintainer.engine.group_facts(number)
        except (exceptions.ImageNotFound, exceptions.InvalidParameter):
            continue
        except exceptions.UNREADABLE as e:
            if name not in known:
                images = damaged_blocks.images_of_group(maintainer, number)
                LOG.error('%s cannot be read: %s. Images hit: %s', name, e,
                          damaged_blocks.listed_images(maintainer, images))
                known[name] = {'error': str(e), 'images': images}
                maintainer.catalog.set_scrub_state(state)
