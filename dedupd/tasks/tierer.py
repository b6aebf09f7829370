# SPDX-License-Identifier: Apache-2.0

"""Tiering: moves sealed groups to an object store (cold.rst).

A run works group by group. It writes the group's new file into the spool,
sends it as a new object, reads a sample of that back, cuts the file where the
segments begin, and exchanges the files as recompression does. So a run that is
killed leaves an object that no group names, or a group that is cold.

A cold group in which few blocks live is fetched, and sent as a new object with
only these.

At its end a run takes a metadata backup
(:mod:`dedupd.tasks.metadata_backups`), and deletes the objects that are not
needed any more (:mod:`dedupd.tasks.sweeper`).
"""

from collections.abc import Callable
from collections.abc import Iterable
import contextlib
import dataclasses
import os
import random
import time
from typing import Any
from typing import BinaryIO

from dedupd.tasks import collector
from dedupd.tasks import metadata_backups
from dedupd.tasks import recompressor
from dedupd.tasks import sweeper
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import maintainer_role
from glance_dedup.objects import object_store
from glance_dedup.objects import slice_cache
from glance_dedup.repository import cold_settings
from glance_dedup.repository import prefix_owners

# Ranges of an object that are read back and compared, and their bytes.
_SAMPLES, _SAMPLE = 4, 65536
_POISONED = 1


@dataclasses.dataclass(frozen=True)
class Policy:
    """The choice of groups that move."""

    age: float = 0.0
    """Groups unchanged for so many seconds move; 0: none for that."""
    free_bytes: int = 0
    """While fewer bytes are free, the groups unchanged for longest move."""
    everything: bool = False
    """True if all groups that can move do."""
    keep: Callable[[dict[str, Any]], bool] = lambda facts: False
    """Returns whether an image's groups stay; called with the image's facts in
    the catalog."""
    live_share: int = collector.LIVE_SHARE
    """Percent. A cold group gets a new object if a smaller share of the
    blocks in its object lives."""
    mark: recompressor.Mark | None = None
    """The mark of groups that are recompressed before they move. None: none
    are. A disk that has too little free does not wait for that."""


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """Plan of a run for one group."""

    number: int
    action: str
    """'move', 'renew' or 'skip'."""
    reason: str
    """The reason for the action, in a few words."""
    bytes: int
    """Bytes of disk that the group takes now; if it is to get a new object,
    those of its object."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a run."""

    groups: list[GroupPlan]
    """Cold groups that stay as they are are left out."""
    bytes: int
    """Bytes of disk that the groups to move take now."""
    unneeded_objects: int | None = None
    """Objects that would be deleted if nothing moved; None: the repository is
    not attached, or the object store does not answer."""
    unneeded_bytes: int | None = None
    """Bytes of these."""


@dataclasses.dataclass
class Result:
    """Result of a run."""

    groups: int = 0
    """Groups that are cold now."""
    renewed: int = 0
    """Cold groups that have a new, smaller object."""
    disk_bytes: int = 0
    """Bytes given back to the file system."""
    sent_bytes: int = 0
    """Bytes of new objects."""
    busy: int = 0
    """Groups in use, put off to the next run."""
    skipped_for_space: int = 0
    """Groups for whose new file the disk had no room."""
    failed: dict[int, str] = dataclasses.field(default_factory=dict)
    """Groups that are damaged, or whose disk failed, or whose object is not
    there, each with its error."""
    puts: int = 0
    """Requests to the object store that sent an object."""
    gets: int = 0
    """Requests that read a part of an object."""
    metadata_backup: int = 0
    """The number of the new metadata backup; 0: nothing had changed."""
    sent_recipes: int = 0
    """Recipes that were sent for it."""
    deleted_objects: int = 0
    """Objects that were not needed any more, with old metadata backups."""
    deleted_bytes: int = 0
    """Bytes of these."""
    kept: str | None = None
    """The reason why no object may be deleted; None: it may."""


def plan(maintainer: maintainer_role.Maintainer, policy: Policy) -> Plan:
    """Plan a run; change nothing.

    The plan does not find out which groups are in use. Only if the repository
    is attached, this lists the object store's objects.
    """
    repo = maintainer.repository
    groups = maintainer.guard(lambda: _plan(maintainer, policy))
    moving = sum(group.bytes for group in groups if group.action == 'move')
    settings = cold_settings.read(repo.path)
    if settings is not None:
        with (contextlib.suppress(exceptions.UnavailableError),
              cold_settings.connect(settings) as store):
            listed = store.keys(f'{settings.owner}/')
            found = maintainer.guard(lambda: sweeper.plan(
                maintainer, pacing.Pace(), store, settings, listed))
            return Plan(groups, moving, len(found.objects), found.bytes)
    return Plan(groups, moving)


def run_once(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
             policy: Policy, metadata_only: bool = False) -> Result:
    """Move the groups that the policy chooses; take a metadata backup; sweep.

    :param metadata_only: move and delete nothing; take a metadata backup even
        if nothing has changed
    :raises pacing.Stopped: between two steps
    :raises UnavailableError: the repository is not attached, or the object
        store does not answer. Groups moved before stay so
    :raises InvalidParameter: another directory has taken this one's place
    """
    repo = maintainer.repository
    settings = cold_settings.require(repo.path)
    with cold_settings.connect(settings) as store:
        prefix_owners.require_claim(repo, settings, store)
        run = _Run(maintainer, pace, policy, store, settings.owners)
        if not metadata_only:
            maintainer.guard(run.run, pace.step)
        return maintainer.guard(
            lambda: run.finish(settings, metadata_only), pace.step)


# -- planning -----------------------------------------------------------------

def _plan(maintainer: maintainer_role.Maintainer, policy: Policy
          ) -> list[GroupPlan]:
    kept = _kept_groups(maintainer, policy.keep)
    damaged = maintainer.damaged_groups()
    found: list[GroupPlan] = []
    # True to recompress it first; time, number, bytes.
    movable: list[tuple[bool, float, int, int]] = []
    for number in maintainer.engine.groups():
        try:
            facts = maintainer.engine.group_facts(number)
            if facts['is_cold']:
                if number not in damaged:
                    found += _renewal(maintainer, policy, facts, number)
                continue
        except exceptions.ImageNotFound:
            continue
        except exceptions.UNREADABLE as e:
            found.append(GroupPlan(number, 'skip', str(e), 0))
            continue
        reason = _reason(facts, policy, number in damaged, number in kept)
        if reason:
            found.append(GroupPlan(number, 'skip', reason,
                                   facts['allocated']))
        else:
            movable.append((_is_raw(facts, policy), facts['modified'], number,
                            facts['allocated']))
    found += _choose(maintainer, policy, sorted(movable))
    return sorted(found, key=lambda group: group.number)


def _renewal(maintainer: maintainer_role.Maintainer, policy: Policy,
             facts: dict[str, Any], number: int) -> Iterable[GroupPlan]:
    """Return the plan for a cold group, if it needs one."""
    wear = collector.wear(maintainer, number, facts, policy.live_share)
    if wear.is_worn and wear.blocks:
        yield GroupPlan(number, 'renew', f'{wear.blocks} of {wear.before} '
                        'blocks of its object live', facts['end'])


def _reason(facts: dict[str, Any], policy: Policy, damaged: bool,
            kept: bool) -> str:
    """The reason why a group cannot move, in a few words; '': it can."""
    if facts['flags'] & _POISONED:
        return 'writing to it failed once'
    if facts['published'] < facts['slots']:
        return 'it is not full'
    if damaged:
        return 'a block of it is damaged'
    if kept:
        return 'an image that tier_keep names needs it'
    return ''


def _is_raw(facts: dict[str, Any], policy: Policy) -> bool:
    """Return whether a group is to be recompressed before it moves."""
    return policy.mark is not None and not recompressor.is_done(
        facts, policy.mark)


def _choose(maintainer: maintainer_role.Maintainer, policy: Policy,
            movable: list[tuple[bool, float, int, int]]
            ) -> Iterable[GroupPlan]:
    """Decide about groups that can move, oldest first."""
    repo = maintainer.repository
    room, kept = repo.room()
    missing = cold_settings.wanted_room(policy.free_bytes, kept,
                                        repo.parameters) - room
    now = time.time()
    for is_raw, modified, number, size in movable:
        # A time to come is a clock's mistake: it counts as now.
        age = max(now - modified, 0)
        if is_raw and missing <= 0:
            yield GroupPlan(number, 'skip', 'it is to be recompressed first',
                            size)
            continue
        if policy.everything:
            reason = 'all groups are to move'
        elif policy.age and age >= policy.age:
            reason = f'it has not changed for {age / 3600:.0f} hours'
        elif missing > 0:
            reason = 'the disk has too little free space'
        else:
            yield GroupPlan(number, 'skip', 'it changed lately', size)
            continue
        missing -= size
        yield GroupPlan(number, 'move', reason, size)


def _kept_groups(maintainer: maintainer_role.Maintainer,
                 keep: Callable[[dict[str, Any]], bool]) -> set[int]:
    """The groups that hold blocks of images that are to stay."""
    found: set[int] = set()
    for _, facts in maintainer.catalog.ledger():
        if not keep(facts):
            continue
        with (contextlib.suppress(exceptions.ImageNotFound,
                                  *exceptions.UNREADABLE),
              contextlib.closing(maintainer.engine.open_recipe(
                  facts['image_id'])) as recipe):
            for runs in block_addresses.pieces(recipe):
                found |= block_addresses.groups_in(runs)
    return found


# -- moving -------------------------------------------------------------------

class _Run:
    def __init__(self, maintainer: maintainer_role.Maintainer,
                 pace: pacing.Pace, policy: Policy,
                 store: object_store.ObjectStore,
                 owners: tuple[str, ...]) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._policy = policy
        self._store = store
        self._owner = owners[0]
        self._owners = owners
        self._result = Result()

    def run(self) -> Result:
        groups = [group for group in _plan(self._maintainer, self._policy)
                  if group.action != 'skip']
        for done, group in enumerate(groups):
            self._pace.step(done, len(groups), 'moving groups')
            self._try(group, done, len(groups))
        self._pace.step(len(groups), len(groups), 'moving groups')
        return self._result

    def finish(self, settings: cold_settings.Settings,
               metadata_only: bool) -> Result:
        """Take a metadata backup, and delete objects that nothing needs."""
        maintainer, pace, store = self._maintainer, self._pace, self._store
        result = self._result
        listed = store.keys(f'{settings.owner}/')
        taken = metadata_backups.take(maintainer, pace, store, settings,
                                      listed, metadata_only)
        result.metadata_backup = taken.metadata_backup
        result.sent_recipes = taken.sent_recipes
        if not metadata_only:
            if taken.key:
                listed.append((taken.key, 0))
            swept = sweeper.run(maintainer, pace, store, settings, listed)
            result.deleted_objects = len(swept.objects)
            result.deleted_bytes, result.kept = swept.bytes, swept.kept
        result.puts, result.gets = store.counts.puts, store.counts.gets
        return result

    def _try(self, group: GroupPlan, done: int, total: int) -> None:
        if self._result.skipped_for_space:
            # The next group needs as much room.
            self._result.skipped_for_space += 1
            return
        # An interrupted recompression has the lease of a group.
        recompressor.give_up(self._maintainer)
        try:
            with (recompressor.noting_failure(self._result, group.number),
                  contextlib.closing(self._maintainer.engine.begin_cooling(
                      group.number)) as rewriting):
                recompressor.write(rewriting, self._pace, done, total,
                                   f'reading group {group.number:08x}')
                self._move(group, rewriting)
        except exceptions.UnavailableError as e:
            if not self._is_lost(group.number):
                raise
            # Else no other group would ever get its turn.
            self._result.failed[group.number] = str(e)

    def _is_lost(self, number: int) -> bool:
        """Return whether the object store has no object of a cold group.

        :raises UnavailableError: it does not answer
        """
        try:
            facts = self._maintainer.engine.group_facts(number)
        except exceptions.ImageNotFound:
            return True
        if not facts['is_cold']:
            return False
        return prefix_owners.owner_of(self._store, self._owners, number,
                                      facts['object']) is None

    def _move(self, group: GroupPlan, rewriting: _engine.Rewriting) -> None:
        before = self._maintainer.engine.group_facts(group.number)
        object_id, length, name = rewriting.object()
        key = slice_cache.key_of(self._owner, group.number, object_id)
        self._pace.step(self._pace.done, self._pace.total,
                        f'sending group {group.number:08x}')
        try:
            self._send(key, name, length)
            rewriting.cut()
            moved = recompressor.exchange(self._maintainer, rewriting,
                                          self._pace)
        except (pacing.Stopped, exceptions.BusyError,
                exceptions.UnavailableError):
            self._give_up(group.number, object_id, key)
            raise
        if not moved:
            self._give_up(group.number, object_id, key)
            raise exceptions.BusyError(
                f'group {group.number:08x} is in use')
        self._note(group, before, length)

    def _send(self, key: str, name: str, length: int) -> None:
        """Send a file as an object, and read some of it back."""
        path = os.path.join(self._maintainer.repository.path, name)
        with open(path, 'rb') as file:
            self._store.put(key, file)
            self._compare(key, file, length)
        self._pace.step(self._pace.done, self._pace.total, self._pace.what,
                        length)

    def _compare(self, key: str, file: BinaryIO, length: int) -> None:
        """Compare parts of an object with the file that was sent.

        :raises UnavailableError: they are not the same
        """
        size = min(_SAMPLE, length)
        starts = {0, length - size, *(random.randrange(length - size + 1)
                                      for _ in range(_SAMPLES - 2))}
        for start in starts:
            if self._store.get(key, start, size) != os.pread(
                    file.fileno(), size, start):
                raise exceptions.UnavailableError(
                    f'{self._store.location.url}: {key} has other bytes at '
                    f'{start} than were sent')

    def _give_up(self, number: int, object_id: bytes, key: str) -> None:
        """Delete an object that no group names, nor ever did.

        If this fails, a later run finds and deletes it.
        """
        with contextlib.suppress(exceptions.UnavailableError,
                                 exceptions.ImageNotFound,
                                 *exceptions.UNREADABLE):
            # A file system may have done what it reported as failed.
            facts = self._maintainer.engine.group_facts(number)
            if facts['object'] != object_id:
                self._store.delete(key)

    def _note(self, group: GroupPlan, before: dict[str, Any], length: int
              ) -> None:
        maintainer, number = self._maintainer, group.number
        after = maintainer.engine.group_facts(number)
        self._result.disk_bytes += before['allocated'] - after['allocated']
        self._result.sent_bytes += length
        if before['is_cold']:
            self._result.renewed += 1
        else:
            self._result.groups += 1
        batch = maintainer.catalog.batch()
        maintainer.catalog.set_group(
            batch, number, rewritten=collector.freed_blocks(
                maintainer, number, after))
        # Without this note, the next run may send the group once more.
        with contextlib.suppress(exceptions.NoSpaceError):
            maintainer.write(batch)
