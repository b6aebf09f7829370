# SPDX-License-Identifier: Apache-2.0

"""Collection: gives the space of unneeded blocks back to the disk.

The collector works group by group (N6). It examines only groups in which a
count went to zero, or whose blocks no collection has seen yet. Freeing changes
entries in place and punches holes, so it works on a full disk. In some
segments only a part of the blocks lives; rewriting the group reclaims the
rest. A nearly empty group is evacuated: the collector stores its blocks again
elsewhere, and changes the images that need them to the copies.
"""

import array
from collections.abc import Iterable
import contextlib
import dataclasses
import random
import time
from typing import Any

from dedupd.tasks import accounting
from dedupd.tasks import merger
from dedupd.tasks import volumes
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import catalog_db
from glance_dedup.maintenance import database
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import reservations

LIVE_SHARE = 50
EVACUATE_SHARE = 10

# A group in use is collected later. Where uploads overlap, it never becomes
# free by itself. So after _PATIENCE seconds the collector announces that it
# intends to collect the group. The announcement lasts _HOLD seconds, and is
# then withdrawn for _REST times as long, because no new transaction finds
# duplicates in an announced group. Each further announcement lasts twice as
# long as the one before, so that it finally outlasts the longest upload.
_PATIENCE = 600.0
_HOLD = 60.0
_REST = 9
# The most groups that are announced at the same time.
_MAX_ANNOUNCED = 8
# About as many blocks are evacuated in one run. There is a limit because an
# evacuation reads each recipe of the repository.
_MAX_EVACUATED = 32768
# Failed requests for cold groups after which a run makes no more.
_MAX_UNAVAILABLE = 4

_POISONED = 1
# The least size of a recompressed segment (segment.h), in bytes.
_JOINED = 256 << 10

_now = time.monotonic


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """Plan of a collection for one group. The numbers count blocks."""

    number: int
    slots: int
    published: int
    live: int
    """Blocks that stay."""
    free: int
    """Blocks that the collection would free."""
    pinned: int
    """Uncounted blocks that a spool entry in use keeps."""
    action: str
    """'free', 'rewrite', 'evacuate', 'unlink' or 'skip'."""
    reason: str
    """The reason for the action, in a few words."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a collection."""

    groups: list[GroupPlan]
    blocks: int
    bytes: int
    """Size of the blocks that would be freed, before compression."""
    refused: str | None
    """The reason why nothing would be freed; None: freeing is allowed."""


@dataclasses.dataclass
class Result:
    """Result of a collection."""

    groups: int = 0
    """Groups that the collection examined."""
    freed_blocks: int = 0
    freed_bytes: int = 0
    """Size of the freed blocks, before compression."""
    disk_bytes: int = 0
    """Bytes given back to the file system."""
    punched: int = 0
    """Groups in which holes were punched."""
    rewritten: int = 0
    evacuated: int = 0
    unlinked: int = 0
    busy: int = 0
    """Groups in use, put off to the next run."""
    refused: str | None = None
    """The reason why nothing was freed; None: freeing was allowed."""
    skipped_for_space: int = 0
    """Groups not rewritten or evacuated, because the disk lacks the room."""
    failed: dict[int, str] = dataclasses.field(default_factory=dict)
    """Groups that are damaged, or whose disk failed, or that the object store
    did not give, each with its error."""
    removed_volumes: int = 0
    """Volumes whose making or deleting had been interrupted."""
    failed_volumes: dict[str, str] = dataclasses.field(default_factory=dict)
    """Such volumes that could not be removed, each with its error."""


# Errors of a group's own file.
_GROUP_ERRORS = (exceptions.DamagedError, exceptions.StorageError)


class _Refused(Exception):
    """Nothing may be freed now."""


def plan(maintainer: maintainer_role.Maintainer,
         pace: pacing.Pace | None = None, live_share: int = LIVE_SHARE,
         evacuate_share: int = EVACUATE_SHARE) -> Plan:
    """Plan a collection; change nothing.

    The plan does not find out which groups are in use.
    """
    pace = pace or pacing.Pace()
    return maintainer.guard(
        lambda: _plan(maintainer, pace, live_share, evacuate_share),
        pace.step)


def run_once(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
             live_share: int = LIVE_SHARE,
             evacuate_share: int = EVACUATE_SHARE,
             hosts: tuple[str, ...] = ()) -> Result:
    """Free the blocks that no image needs, in groups that are not in use.

    :param live_share: percent; a group is rewritten if live blocks have a
        smaller share of its segments' bytes
    :param evacuate_share: percent; a full group is evacuated if a smaller
        share of its slots lives
    :param hosts: if there are any, a process on each first computes all counts
        again, and nothing is freed before they are those of the catalog; ''
        is this host
    :raises pacing.Stopped: between two groups; the work on those before stands
    :raises NoSpaceError: if the disk has no room even to count
    """
    return maintainer.guard(
        lambda: _Run(maintainer, pace, live_share, evacuate_share).run(hosts),
        pace.step, hosts)


# -- for planning and executing -----------------------------------------------

def _refuse_if_unreadable(unreadable: dict[str, str]) -> None:
    if unreadable:
        name, error = min(unreadable.items())
        more = len(unreadable) - 1
        raise _Refused(
            f'{name} cannot be read, so what it needs is not known: {error}'
            + (f' (and {more} more)' if more else ''))


def _candidates(maintainer: maintainer_role.Maintainer,
                catalog: catalog_db.Catalog | accounting.Foreseen
                ) -> tuple[list[int], dict[int, str]]:
    """The groups to examine; and the unreadable ones, with their errors."""
    wanted, damaged = [], {}
    numbers = maintainer.engine.groups()
    for number in numbers:
        facts = catalog.group(number)
        try:
            found = maintainer.engine.group_facts(number)
            if (facts['dirty'] or facts['judged'] < found['published']
                    or _is_spent(found, number == numbers[-1])
                    or _has_tail(maintainer, number, found, facts['used'])):
                wanted.append(number)
        except exceptions.ImageNotFound:
            pass
        except exceptions.UNREADABLE as e:
            damaged[number] = str(e)
    return wanted, damaged


def _is_spent(facts: dict[str, Any], last: bool) -> bool:
    """Return whether a group without a published block is to go.

    A placeholder keeps its number as long as it is the last group.
    """
    is_placeholder = facts['flags'] & _POISONED and facts['end']
    return not facts['published'] and not (last and is_placeholder)


def _has_tail(maintainer: maintainer_role.Maintainer, number: int,
              facts: dict[str, Any], used: int) -> bool:
    """Return whether a writer left entries behind the published end.

    A crash can cut off the bytes and keep their entries. Reading all entries
    takes time, so only groups without other blocks, and those to which no
    writer comes, are searched for such entries.
    """
    return facts['published'] < facts['slots'] and (
        facts['size'] > facts['end']
        or (not used or facts['flags'] & _POISONED != 0)
        and any(block_addresses.columns(maintainer.engine.entries(
            number, facts['published'],
            facts['slots'] - facts['published'])).states))


_LOST = ('groups/%08x: an image needs the block of slot %d, and its entry '
         'holds none: it may be from an older copy of the group. Nothing in '
         'it is freed')


class _Look:
    """The blocks of a group that live, may be freed, or are pinned."""

    def __init__(self, maintainer: maintainer_role.Maintainer,
                 catalog: catalog_db.Catalog | accounting.Foreseen,
                 number: int, slots: int, published: int,
                 pins: Iterable[bytes] = ()) -> None:
        self._listing = maintainer.engine.entries(number, 0, slots)
        #: The first slot that is counted but has no block, or None.
        self.lost, in_use, freed, unused, size = _engine.slots_judge(
            self._listing, catalog.counts(number, slots), published)
        #: Slots that may be freed (N6.4).
        self.free = block_addresses.unpack(unused)
        pinned = {slot for runs in pins for slot in block_addresses.slots_in(
            runs, number)}.intersection(self.free) if unused else set()
        if pinned:
            lengths = block_addresses.columns(self._listing).lengths
            self.free = array.array(
                'I', (slot for slot in self.free if slot not in pinned))
            size -= sum(map(lengths.__getitem__, pinned))
        self.pinned = len(pinned)
        self.live = in_use - len(self.free)
        #: The number of slots that are freed already.
        self.gone = freed
        #: The number of slots that are freed already, or may be.
        self.freed = freed + len(self.free)
        #: Size of the blocks that may be freed, before compression.
        self.bytes = size

    def live_share(self, segment_size: int) -> int:
        """Share of live blocks in the bytes of segments in use, in percent.

        This takes each segment to be full. Only the group's owner can read
        the true sizes.
        """
        free = set(self.free)
        segments = set()
        live = 0
        for slot, (segment, length, state) in enumerate(zip(
                *block_addresses.columns(self._listing))):
            if state == block_addresses.LIVE and slot not in free:
                segments.add(segment)
                live += length
        return 100 * live // (len(segments) * segment_size) if live else 0


def _is_sparse(facts: dict[str, int], live: int, share: int) -> bool:
    """Return whether to evacuate: the group has few blocks, gets no more."""
    return ((facts['published'] == facts['slots']
             or facts['flags'] & _POISONED != 0)
            and 0 < 100 * live < share * facts['slots'])


def _has_lost(look: _Look, facts: dict[str, Any], share: int) -> bool:
    """Return whether enough blocks were freed since the last rewriting.

    The entries alone do not show this. A live block's former neighbours may
    have been freed before the rewriting, and then its segment no longer has
    them.
    """
    gone = look.freed - facts['rewritten']
    return 100 * look.live < share * (look.live + gone)


# -- cold groups --------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Wear:
    """The fate of a group's blocks since it was last rewritten."""

    before: int
    """Blocks that it had then."""
    blocks: int
    """Of these, those that live."""
    is_worn: bool
    """True if that is a smaller share than the given one."""


def wear(maintainer: maintainer_role.Maintainer, number: int,
         facts: dict[str, Any], share: int) -> Wear:
    """Return the fate of a group's blocks, by its entries and the catalog.

    :param facts: those of the engine
    :param share: percent
    """
    look = _Look(maintainer, maintainer.catalog, number, facts['slots'],
                 facts['published'])
    blocks = look.live + len(look.free)     # as many as a new file would have
    gone = look.gone - maintainer.catalog.group(number)['rewritten']
    return Wear(blocks + gone, blocks, 100 * blocks < share * (blocks + gone))


def freed_blocks(maintainer: maintainer_role.Maintainer, number: int,
                 facts: dict[str, Any]) -> int:
    """Return the number of freed blocks of a group."""
    return _Look(maintainer, maintainer.catalog, number, facts['slots'],
                 facts['published']).gone


# -- planning -----------------------------------------------------------------

def _plan(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
          live_share: int, evacuate_share: int) -> Plan:
    maintainer.reconcile(pace.step)
    accountant = accounting.Accountant(maintainer, pace)
    foreseen = accountant.foresee()
    refused = None
    try:
        _refuse_if_unreadable(maintainer.unreadable.reasons())
    except _Refused as e:
        refused = str(e)
    wanted, damaged = _candidates(maintainer, foreseen)
    groups = [GroupPlan(number, 0, 0, 0, 0, 0, 'skip', why)
              for number, why in damaged.items()]
    freed = 0
    last = max(maintainer.engine.groups(), default=0)
    for done, number in enumerate(wanted):
        facts = maintainer.engine.group_facts(number)
        look = _Look(maintainer, foreseen, number, facts['slots'],
                     facts['published'], accountant.pins(number))
        action, reason = _foresee_action(
            look, facts, number == last, evacuate_share, _has_lost(
                look, foreseen.group(number), live_share)
            and look.live_share(_segment_size(maintainer, facts))
            < live_share)
        groups.append(GroupPlan(
            number, facts['slots'], facts['published'], look.live,
            len(look.free), look.pinned, action, reason))
        freed += look.bytes
        pace.step(done + 1, len(wanted), 'looking at groups',
                  cost=block_addresses.ENTRY_BYTES * facts['slots'])
    return Plan(sorted(groups, key=lambda g: g.number),
                sum(g.free for g in groups), freed, refused)


def _segment_size(maintainer: maintainer_role.Maintainer,
                  facts: dict[str, int]) -> int:
    """Bytes of a full segment of a group, before compression."""
    parameters = maintainer.repository.parameters
    size = parameters.segment_size
    if facts['codec']:
        size = max(size, _JOINED)
    return min(size, facts['slots'] * parameters.block_size)


def _foresee_action(look: _Look, facts: dict[str, int], last: bool,
                    evacuate_share: int, worn: bool) -> tuple[str, str]:
    if look.lost is not None:
        return 'skip', f'slot {look.lost} is needed, and has no block'
    if not look.live and not last:
        return 'unlink', 'it has no live block'
    if not look.live and facts['published']:
        return 'rewrite', 'it has no live block, and the last number stays'
    if _is_sparse(facts, look.live, evacuate_share):
        return 'evacuate', f'{look.live} of {facts["slots"]} blocks live'
    if worn:
        return 'rewrite', 'few bytes of its segments live'
    if look.free:
        return 'free', f'{len(look.free)} blocks are not used'
    if look.pinned:
        return 'skip', 'uncounted blocks are still in use'
    return 'skip', 'every block is in use'


# -- executing ----------------------------------------------------------------

class _Run:
    def __init__(self, maintainer: maintainer_role.Maintainer,
                 pace: pacing.Pace, live_share: int,
                 evacuate_share: int) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._live_share = live_share
        self._evacuate_share = evacuate_share
        self._accountant = accounting.Accountant(maintainer, pace)
        self._result = Result()
        self._sparse: set[int] = set()  # groups to evacuate
        self._left: set[int] = set()    # groups in use, or that failed
        self._merge_refused = False     # an image is in use
        self._cost = 0          # bytes read and written since the last step

    def run(self, hosts: tuple[str, ...]) -> Result:
        try:
            result = self._result
            result.removed_volumes, result.failed_volumes = volumes.finish(
                self._maintainer, self._pace)
            # A spool entry may have been lost before it was settled, or a
            # counted recipe may have been lost.
            self._maintainer.reconcile(self._pace.step)
            self._drain()
            if hosts:
                self._compare(hosts)
            self._forget_unlinked()
            given_up = self._given_up()
            wanted, self._result.failed = _candidates(
                self._maintainer, self._maintainer.catalog)
            self._left.update(self._result.failed)
            self._forget_busy(wanted)
            self._collect_all(wanted)
            self._end_reservations(given_up, self._left.union(wanted))
            if self._sparse:
                self._evacuate()
        except _Refused as e:
            self._forget_busy()
            self._result.refused = str(e)
        except BaseException:
            self._forget_busy()
            raise
        # The freed space may make room for the reserve.
        self._maintainer.reserve.keep()
        return self._result

    def _given_up(self) -> set[str]:
        """Return the ids of uploads that were given up."""
        root = self._maintainer.repository.path
        if not reservations.exist(root):
            return set()
        with reservations.locked(root):
            return reservations.given_up(root)

    def _end_reservations(self, given_up: set[str], looked_at: set[int]
                          ) -> None:
        """Free the reservations of uploads whose blocks are collected.

        :param given_up: those before the groups were chosen
        :param looked_at: the groups, also those in use and those that failed
        """
        maintainer, root = self._maintainer, self._maintainer.repository.path
        maintainer.given_up = {
            name: maintainer.given_up.get(name, looked_at) & self._left
            for name in given_up}
        ended = {name for name, left in maintainer.given_up.items()
                 if not left}
        if ended:
            with reservations.locked(root):
                reservations.remove(root, ended)
            for name in ended:
                del maintainer.given_up[name]

    def _drain(self) -> None:
        """Judge every spool entry (N6.2)."""
        _refuse_if_unreadable(self._accountant.run().unreadable)

    def _compare(self, hosts: tuple[str, ...]) -> None:
        """Compare the catalog's counts with the recipes."""
        from glance_dedup.maintenance import comparison

        try:
            comparison.compare(self._maintainer, self._pace.step, hosts)
        except comparison.Unknown as e:
            raise _Refused(str(e)) from e

    def _forget_unlinked(self) -> None:
        """Forget groups that a collection unlinked before it was killed."""
        maintainer = self._maintainer
        there = set(maintainer.engine.groups())
        batch = maintainer.catalog.batch()
        for number, facts in maintainer.catalog.groups():
            if number not in there and not facts['used']:
                maintainer.catalog.forget_group(batch, number)
        if len(batch):
            maintainer.write(batch)

    def _collect_all(self, wanted: list[int]) -> None:
        put_off = []
        for done, number in enumerate(wanted):
            if not self._collect(number):
                put_off.append(number)
            self._step(done + 1, len(wanted), 'collecting groups')
        # These may have become free while the others were collected.
        for number in put_off:
            if not self._collect(number):
                self._left.add(number)
                self._result.busy += 1
                self._wait_for(number)
            self._step(len(wanted), len(wanted), 'collecting groups')

    def _step(self, done: int, total: int, what: str) -> None:
        cost, self._cost = self._cost, 0
        self._pace.step(done, total, what, cost)

    # -- groups in use ----------------------------------------------------

    def _wait_for(self, number: int) -> None:
        """Announce or withdraw the collection of a group in use, when due."""
        engine, groups = self._maintainer.engine, self._maintainer.busy
        now = _now()
        busy = groups.setdefault(number, maintainer_role.Busy(
            _HOLD, now + _PATIENCE))
        if now < busy.turn:
            return
        if busy.announced:
            engine.withdraw(number)
            busy.announced = False
            busy.turn = now + _REST * busy.hold
            busy.hold *= 2
        elif (sum(other.announced for other in groups.values())
                < _MAX_ANNOUNCED and engine.announce(number)):
            busy.announced = True
            busy.turn = now + busy.hold

    def _forget(self, number: int) -> None:
        """Stop keeping transactions off a group."""
        busy = self._maintainer.busy.pop(number, None)
        if busy is not None and busy.announced:
            self._maintainer.engine.withdraw(number)

    def _forget_busy(self, but: Iterable[int] = ()) -> None:
        for number in set(self._maintainer.busy).difference(but):
            self._forget(number)

    # -- one group --------------------------------------------------------

    def _collect(self, number: int) -> bool:
        """Collect a group; False if it is in use."""
        try:
            group = self._maintainer.enter_group(number)    # N6.1
        except exceptions.BusyError:
            return False
        except exceptions.ImageNotFound:
            self._forget(number)
            return True
        except _GROUP_ERRORS as e:
            self._fail(number, e)
            return True
        with contextlib.closing(group):                             # N6.5
            # N6.2: now no process can begin to name the group's blocks.
            # Recipes committed since the last drain must be counted first.
            self._drain()
            try:
                self._collect_in(group)
            except database.CatalogError:
                raise
            except _GROUP_ERRORS as e:
                self._fail(number, e)
        self._forget(number)
        self._result.groups += 1
        return True

    def _fail(self, number: int, error: Exception) -> None:
        """Note a group's error; the run goes on with the other groups."""
        self._forget(number)
        self._left.add(number)
        self._result.failed[number] = str(error)

    def _collect_in(self, group: _engine.Group) -> None:
        maintainer, number = self._maintainer, group.number
        look = _Look(maintainer, maintainer.catalog, number, group.slots,
                     group.published, self._accountant.pins(number))  # N6.3
        self._cost += block_addresses.ENTRY_BYTES * group.slots
        if look.lost is not None:
            # The lost entry may come back; the block's bytes are still there.
            raise exceptions.DamagedError(_LOST % (number, look.lost))
        if look.free:
            self._result.freed_blocks += group.free(
                block_addresses.pack(look.free))                   # N6.4
            self._result.freed_bytes += look.bytes
        batch = maintainer.catalog.batch()
        if not look.live and self._unlink(group):
            maintainer.catalog.forget_group(batch, number)
        else:
            self._keep(group, look, batch)
        self._forget_damaged(batch, number, look.free)
        # If the disk has no room for this note, the next run only examines
        # the group once more.
        with contextlib.suppress(exceptions.NoSpaceError):
            maintainer.write(batch)

    def _keep(self, group: _engine.Group, look: _Look,
              batch: database.Batch) -> None:
        """Give back space of a group in which some blocks stay."""
        # Punch even if nothing was freed now: the last collection may have
        # been killed before it punched.
        engine_facts = self._maintainer.engine.group_facts(group.number)
        is_cold = engine_facts['is_cold']   # then *tier* gives space back
        given_back = 0 if is_cold else group.punch()
        self._result.disk_bytes += given_back
        self._result.punched += given_back > 0
        has_room = bool(look.live) or self._leave_placeholder(group)
        facts: dict[str, Any] = {'judged': group.published,
                                 'dirty': look.pinned > 0 or not has_room}
        if _is_sparse(engine_facts, look.live, self._evacuate_share):
            self._sparse.add(group.number)
            # It stays dirty until the evacuation was tried, in case this run
            # ends before that.
            facts['dirty'] = True
        elif not is_cold and self._is_worn(group, look):
            if self._rewrite(group):
                facts['rewritten'] = look.freed
            else:
                facts['dirty'] = True
        self._maintainer.catalog.set_group(batch, group.number, **facts)

    def _unlink(self, group: _engine.Group) -> bool:
        allocated = self._maintainer.engine.group_facts(
            group.number)['allocated']
        if not group.unlink():
            return False
        self._result.unlinked += 1
        self._result.disk_bytes += allocated
        return True

    def _leave_placeholder(self, group: _engine.Group) -> bool:
        """Give back the fingerprint store of an empty group that must stay.

        False if the disk has no room for the file that takes its place.
        """
        try:
            given_back = group.leave_placeholder()
        except exceptions.NoSpaceError:
            self._result.skipped_for_space += 1
            return False
        self._result.rewritten += given_back > 0
        self._result.disk_bytes += given_back
        return True

    def _is_worn(self, group: _engine.Group, look: _Look) -> bool:
        """Return whether rewriting is worth while."""
        facts = self._maintainer.catalog.group(group.number)
        if not _has_lost(look, facts, self._live_share):
            return False
        stored, kept = group.live_bytes()
        return 100 * kept < self._live_share * stored

    def _rewrite(self, group: _engine.Group) -> bool:
        """Rewrite a group; False if the disk has no room for it."""
        try:
            given_back = group.rewrite()
        except exceptions.NoSpaceError:
            self._result.skipped_for_space += 1
            return False
        except (exceptions.DamagedError, exceptions.BusyError):
            # The scrub will find the damaged block, and report the images that
            # need it. The next upload will find the blocks that an earlier
            # one did not publish (N7.3).
            return True
        self._result.rewritten += 1
        self._result.disk_bytes += given_back
        self._cost += 2 * self._maintainer.engine.group_facts(
            group.number)['allocated']
        return True

    def _forget_damaged(self, batch: database.Batch, number: int,
                        freed: Iterable[int]) -> None:
        damaged = self._maintainer.catalog.damaged()
        if damaged:
            gone = block_addresses.of_slots(number, freed)
            for address in damaged.keys() & gone:
                self._maintainer.catalog.set_damaged(batch, address, None)

    # -- evacuation -------------------------------------------------------

    def _evacuate(self) -> None:
        """Store the live blocks of nearly empty groups elsewhere.

        This merges the images that need the blocks to the copies (N10), and
        un-counts the replaced recipes. Then it collects the groups once more,
        which removes them.
        """
        groups = self._choose_sparse()
        try:
            groups = self._move_all(groups)
        except exceptions.NoSpaceError:
            self._result.skipped_for_space += len(self._sparse)
            return
        if not self._merge_refused:
            self._forget_sparse(groups)
        self._drain()
        for number in groups:
            if not any(self._maintainer.catalog.counts(number)):
                self._result.evacuated += 1
                self._collect(number)

    def _choose_sparse(self) -> list[int]:
        """Choose the groups for this run; the next run gets the others."""
        groups: list[int] = []
        blocks = 0
        for number in sorted(self._sparse):
            counts = block_addresses.unpack(
                self._maintainer.catalog.counts(number))
            blocks += len(counts) - counts.count(0)
            if groups and blocks > _MAX_EVACUATED:
                break
            groups.append(number)
        return groups

    def _forget_sparse(self, groups: list[int]) -> None:
        """Mark groups as clean after everything movable was moved.

        A group stays dirty if it has blocks that are pinned, or that went out
        of use since the group was chosen. Its present mark does not show
        this, because choosing the group made it dirty.
        """
        maintainer = self._maintainer
        batch = maintainer.catalog.batch()
        for number in groups:
            facts = maintainer.engine.group_facts(number)
            look = _Look(maintainer, maintainer.catalog, number,
                         facts['slots'], facts['published'])
            self._cost += block_addresses.ENTRY_BYTES * facts['slots']
            maintainer.catalog.set_group(batch, number,
                                         dirty=bool(look.free))
        with contextlib.suppress(exceptions.NoSpaceError):
            self._maintainer.write(batch)

    def _move_all(self, groups: list[int]) -> list[int]:
        """Move the blocks of groups; return those whose blocks were moved.

        A cold group that the object store does not give stays, and stays
        dirty, so that the next run tries it again.
        """
        engine = self._maintainer.engine
        cold = [number for number in groups
                if engine.group_facts(number)['is_cold']]
        moved = [number for number in groups if number not in cold]
        if moved:
            self._move_blocks(moved)
        # In any order, so that no group whose object is lost is in the way of
        # others for ever.
        random.shuffle(cold)
        tries = _MAX_UNAVAILABLE
        for number in cold:
            try:
                self._move_blocks([number])
            except exceptions.UnavailableError as e:
                self._result.failed[number] = str(e)
                tries -= 1
                if not tries:
                    break
            else:
                moved.append(number)
        return moved

    def _move_blocks(self, groups: list[int]) -> None:
        maintainer = self._maintainer
        images, needed = self._images_with([
            block_addresses.address(number, slot) for number in groups
            for slot, count in enumerate(block_addresses.unpack(
                maintainer.catalog.counts(number))) if count])
        if not needed:
            return
        with contextlib.closing(maintainer.relocation()) as relocation:
            relocation.add(block_addresses.pack(sorted(needed), 'Q'))
            mapping = relocation.finish()
            for done, image_id in enumerate(images):
                self._merge(image_id, mapping)
                self._step(done + 1, len(images), 'evacuating groups')

    def _merge(self, image_id: str, mapping: bytes) -> None:
        """Merge an image to the copies; if that fails, the group stays."""
        try:
            merger.merge_image(self._maintainer, image_id, mapping,
                               self._pace)
        except database.CatalogError:
            raise
        except (exceptions.BusyError, exceptions.UnavailableError):
            self._merge_refused = True
        except (exceptions.DamagedError, exceptions.ImageNotFound):
            pass

    def _images_with(self, addresses: list[int]
                     ) -> tuple[list[str], set[int]]:
        """The images that name any of these, and the addresses they name.

        This leaves out addresses that only deleted images need, even while
        a process still reads these.
        """
        images: list[str] = []
        needed: set[int] = set()
        ledger = [facts['image_id']
                  for _, facts in self._maintainer.catalog.ledger()]
        for done, image in enumerate(block_addresses.which_named(
                self._maintainer.engine, ledger, addresses)):
            self._cost += image.cost
            if image.found:
                images.append(image.image_id)
                needed |= image.found
            self._step(done + 1, len(ledger), 'looking for images')
        return images, needed
