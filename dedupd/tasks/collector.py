# SPDX-License-Identifier: Apache-2.0

"""Collection: the space of blocks that no image needs goes back to the disk.

Group by group (N6), and only those in which a count went to zero, or that hold
blocks which no collection has seen yet. Freeing changes entries in place and
punches holes, so it works on a full disk. What is left of segments of which
only some blocks live goes by rewriting the group; a group that is nearly empty
is evacuated: its blocks are stored anew elsewhere, and the images that need
them changed to the copies.
"""

from collections.abc import Iterable
import contextlib
import dataclasses
import time
from typing import Any

from dedupd.tasks import accounting
from dedupd.tasks import merger
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import task
from glance_dedup.maintenance import addresses as addresses_module
from glance_dedup.maintenance import catalog as catalog_module
from glance_dedup.maintenance import maintainer as maintainer_module

LIVE_SHARE = 50
EVACUATE_SHARE = 10

# A group in use is collected later. Where uploads overlap it never comes free
# by itself; so after a while (seconds) the intent to collect it is announced,
# for a limited time, and then withdrawn for a time that is longer by this
# factor: while it is announced, no new transaction finds duplicates in the
# group. The next time it lasts twice as long; so it outlasts the longest
# upload at last.
_PATIENCE = 600.0
_HOLD = 60.0
_REST = 9
# At once.
_MOST_ANNOUNCED = 8
# Evacuated in one run, about, since each recipe of the repository is read for
# them: blocks.
_MOST_EVACUATED = 32768

_POISONED = 1
# Of a segment that was compressed anew, at least (segment.h).
_JOINED = 256 << 10

_now = time.monotonic


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """What a collection would do in a group. Numbers are of blocks."""

    number: int
    slots: int
    published: int
    live: int
    """That stay."""
    free: int
    """That go."""
    pinned: int
    """That nobody counts, but that an entry in use keeps."""
    action: str
    """'free', 'rewrite', 'evacuate', 'unlink' or 'skip'."""
    reason: str
    """Why, in a few words."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a collection would do now."""

    groups: list[GroupPlan]
    blocks: int
    bytes: int
    """Of the blocks that would be freed, before compression."""
    refused: str | None
    """Why nothing would be freed."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a collection did."""

    groups: int
    """That it looked at."""
    freed_blocks: int
    freed_bytes: int
    """Of these, before compression."""
    disk_bytes: int
    """Given back to the file system."""
    punched: int
    """Groups in which holes were punched."""
    rewritten: int
    evacuated: int
    unlinked: int
    busy: int
    """Groups in use, put off to the next run."""
    refused: str | None
    """Why nothing was freed."""
    skipped_for_space: int
    """Groups not rewritten or evacuated since that needs room on the disk."""
    failed: dict[int, str]
    """Groups that are damaged, or whose disk failed, and how."""


# Of a group's own file.
_GROUP_ERRORS = (exceptions.DamagedError, exceptions.StorageError)


class _Refused(Exception):
    """Nothing may be freed now."""


def plan(maintainer: maintainer_module.Maintainer,
         pace: task.Pace | None = None, live_share: int = LIVE_SHARE,
         evacuate_share: int = EVACUATE_SHARE) -> Plan:
    """What a collection would do; changes nothing.

    Whether a group is in use is not tried.
    """
    pace = pace or task.Pace()
    return maintainer.guard(
        lambda: _plan(maintainer, pace, live_share, evacuate_share),
        pace.step)


def run_once(maintainer: maintainer_module.Maintainer, pace: task.Pace,
             live_share: int = LIVE_SHARE,
             evacuate_share: int = EVACUATE_SHARE) -> Result:
    """Collect what can be.

    :param live_share: percent; a group is rewritten if less of its segments'
        bytes is of live blocks
    :param evacuate_share: percent; a full group is evacuated if less of its
        slots live
    :raises task.Stopped: between two groups; what was done stands
    :raises NoSpaceError: if there is no room even to count
    """
    return maintainer.guard(
        lambda: _Run(maintainer, pace, live_share, evacuate_share).run(),
        pace.step)


# -- what both look at --------------------------------------------------------

def _refuse_if_unreadable(unreadable: dict[str, str]) -> None:
    if unreadable:
        name, error = min(unreadable.items())
        more = len(unreadable) - 1
        raise _Refused(
            f'{name} cannot be read, so what it needs is not known: {error}'
            + (f' (and {more} more)' if more else ''))


def _candidates(maintainer: maintainer_module.Maintainer,
                catalog: catalog_module.Catalog | accounting.Foreseen
                ) -> tuple[list[int], dict[int, str]]:
    """The groups to be looked at; and those that cannot be, and why."""
    wanted, damaged = [], {}
    for number in maintainer.engine.groups():
        facts = catalog.group(number)
        try:
            found = maintainer.engine.group_facts(number)
            if (facts['dirty'] or facts['judged'] < found['published']
                    or _has_tail(maintainer, number, found)):
                wanted.append(number)
        except exceptions.ImageNotFound:
            pass
        except exceptions.UNREADABLE as e:
            damaged[number] = str(e)
    return wanted, damaged


def _has_tail(maintainer: maintainer_module.Maintainer, number: int,
              facts: dict[str, Any]) -> bool:
    """Whether a failed sync has left blocks, to which no writer will come."""
    return (facts['flags'] & _POISONED != 0
            and facts['published'] < facts['slots']
            and any(addresses_module.columns(maintainer.engine.entries(
                number, facts['published'],
                facts['slots'] - facts['published'])).states))


_LOST = ('groups/%08x: an image needs the block of slot %d, and its entry '
         'holds none: it may be from an older copy of the group. Nothing in '
         'it is freed')


class _Look:
    """What of a group lives, what may be freed, and what is pinned."""

    def __init__(self, entries: bytes, counts: bytes, published: int,
                 pins: Iterable[bytes], number: int) -> None:
        self._columns = addresses_module.columns(entries)
        _, lengths, states = self._columns
        used = addresses_module.unpack(counts)
        #: A slot that is counted and has no block, or None.
        self.lost = next((slot for slot, (state, count) in enumerate(
            zip(states, used)) if count
            and state not in addresses_module.IN_USE), None)
        unused = [slot for slot, (state, count) in enumerate(
                  zip(states[:published], used))
                  if not count and state in addresses_module.IN_USE]
        pinned = {slot for runs in pins for slot in addresses_module.slots_in(
            runs, number)} if unused else set()
        #: Slots: N6.4.
        self.free = ([s for s in unused if s not in pinned] if pinned
                     else unused)
        self.pinned = len(unused) - len(self.free)
        self.live = sum(map(
            states.count, addresses_module.IN_USE)) - len(self.free)
        #: With those about to be.
        self.freed = states.count(addresses_module.FREED) + len(self.free)
        #: Of the free ones, before compression.
        self.bytes = sum(map(lengths.__getitem__, self.free))

    def live_share(self, segment_size: int) -> int:
        """Percent of the bytes of segments in use that are of live blocks.

        As if each segment were a full one; only the group's owner can tell
        better.
        """
        free = set(self.free)
        segments = set()
        live = 0
        for slot, (segment, length, state) in enumerate(zip(*self._columns)):
            if state == addresses_module.LIVE and slot not in free:
                segments.add(segment)
                live += length
        return 100 * live // (len(segments) * segment_size) if live else 0


def _is_sparse(facts: dict[str, int], live: int, share: int) -> bool:
    """Whether to evacuate: few blocks, and nobody adds any."""
    return ((facts['published'] == facts['slots']
             or facts['flags'] & _POISONED != 0)
            and 0 < 100 * live < share * facts['slots'])


def _has_lost(look: _Look, facts: dict[str, Any], share: int) -> bool:
    """Whether enough blocks went since a group was rewritten.

    What its entries tell of its segments is not enough: they do not say
    whether the neighbours of a block that lives were freed before, and are
    not in its segment any more.
    """
    gone = look.freed - facts['rewritten']
    return 100 * look.live < share * (look.live + gone)


# -- planning -----------------------------------------------------------------

def _plan(maintainer: maintainer_module.Maintainer, pace: task.Pace,
          live_share: int, evacuate_share: int) -> Plan:
    maintainer.reconcile(pace.step)
    accountant = accounting.Accountant(maintainer, pace)
    foreseen = accountant.foresee()
    refused = None
    try:
        _refuse_if_unreadable(maintainer.unreadable())
    except _Refused as e:
        refused = str(e)
    wanted, damaged = _candidates(maintainer, foreseen)
    groups = [GroupPlan(number, 0, 0, 0, 0, 0, 'skip', why)
              for number, why in damaged.items()]
    freed = 0
    last = max(maintainer.engine.groups(), default=0)
    for done, number in enumerate(wanted):
        facts = maintainer.engine.group_facts(number)
        look = _Look(
            maintainer.engine.entries(number, 0, facts['slots']),
            foreseen.counts(number, facts['slots']),
            facts['published'], accountant.pins(number), number)
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
                  cost=addresses_module.ENTRY_BYTES * facts['slots'])
    return Plan(sorted(groups, key=lambda g: g.number),
                sum(g.free for g in groups), freed, refused)


def _segment_size(maintainer: maintainer_module.Maintainer,
                  facts: dict[str, int]) -> int:
    """Of a full segment of a group, before compression."""
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
        return 'unlink', 'nothing in it lives'
    if _is_sparse(facts, look.live, evacuate_share):
        return 'evacuate', f'{look.live} of {facts["slots"]} blocks live'
    if worn:
        return 'rewrite', 'little of its segments lives'
    if look.free:
        return 'free', f'{len(look.free)} blocks are not used'
    if look.pinned:
        return 'skip', 'what is not counted is still in use'
    return 'skip', 'all of it is used'


# -- executing ----------------------------------------------------------------

class _Run:
    def __init__(self, maintainer: maintainer_module.Maintainer,
                 pace: task.Pace, live_share: int,
                 evacuate_share: int) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._live_share = live_share
        self._evacuate_share = evacuate_share
        self._accountant = accounting.Accountant(maintainer, pace)
        self._sums = dict.fromkeys(
            (field.name for field in dataclasses.fields(Result)), 0)
        self._sums.update(refused=None, failed={})
        self._sparse: set[int] = set()  # groups to be evacuated
        self._merge_refused = False     # an image is in use
        self._cost = 0          # bytes read and written since the last step

    def run(self) -> Result:
        try:
            # An entry of the spool may have been lost before it was settled,
            # or a recipe that is counted.
            self._maintainer.reconcile(self._pace.step)
            self._drain()
            self._forget_unlinked()
            wanted, self._sums['failed'] = _candidates(
                self._maintainer, self._maintainer.catalog)
            self._forget_busy(wanted)
            self._collect_all(wanted)
            if self._sparse:
                self._evacuate()
        except _Refused as e:
            self._forget_busy()
            self._sums['refused'] = str(e)
        except BaseException:
            self._forget_busy()
            raise
        # What was freed may be room for it.
        self._maintainer.keep_reserve()
        return Result(**self._sums)

    def _drain(self) -> None:
        """Judge every spool entry (N6.2)."""
        _refuse_if_unreadable(self._accountant.run().unreadable)

    def _forget_unlinked(self) -> None:
        """Of groups that a collection unlinked, and was killed then."""
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
        # They had the time of all others to come free.
        for number in put_off:
            if not self._collect(number):
                self._sums['busy'] += 1
                self._wait_for(number)
            self._step(len(wanted), len(wanted), 'collecting groups')

    def _step(self, done: int, total: int, what: str) -> None:
        cost, self._cost = self._cost, 0
        self._pace.step(done, total, what, cost)

    # -- groups in use ----------------------------------------------------

    def _wait_for(self, number: int) -> None:
        """Keep new transactions off a group in use, if it is time to."""
        engine, groups = self._maintainer.engine, self._maintainer.busy
        now = _now()
        busy = groups.setdefault(number, maintainer_module.Busy(
            _HOLD, now + _PATIENCE))
        if now < busy.turn:
            return
        if busy.announced:
            engine.withdraw(number)
            busy.announced = False
            busy.turn = now + _REST * busy.hold
            busy.hold *= 2
        elif (sum(other.announced for other in groups.values())
                < _MOST_ANNOUNCED and engine.announce(number)):
            busy.announced = True
            busy.turn = now + busy.hold

    def _forget(self, number: int) -> None:
        """Nobody need be kept off a group."""
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
            group = self._maintainer.engine.enter_group(number)     # N6.1
        except exceptions.BusyError:
            return False
        except exceptions.ImageNotFound:
            self._forget(number)
            return True
        except _GROUP_ERRORS as e:
            self._fail(number, e)
            return True
        with contextlib.closing(group):                             # N6.5
            # N6.2, now that nobody can begin to name its blocks: what was
            # committed since the last time is to be counted first.
            self._drain()
            try:
                self._collect_in(group)
            except catalog_module.CatalogError:
                raise
            except _GROUP_ERRORS as e:
                self._fail(number, e)
        self._forget(number)
        self._sums['groups'] += 1
        return True

    def _fail(self, number: int, error: Exception) -> None:
        """Leave a group alone; the others are not worse for it."""
        self._forget(number)
        self._sums['failed'][number] = str(error)

    def _collect_in(self, group: _engine.Group) -> None:
        maintainer, number = self._maintainer, group.number
        look = _Look(
            maintainer.engine.entries(number, 0, group.slots),
            maintainer.catalog.counts(number, group.slots), group.published,
            self._accountant.pins(number), number)                  # N6.3
        self._cost += addresses_module.ENTRY_BYTES * group.slots
        if look.lost is not None:
            # What was in its place may come back; its bytes are still there.
            raise exceptions.DamagedError(_LOST % (number, look.lost))
        if look.free:
            self._sums['freed_blocks'] += group.free(
                addresses_module.pack(look.free))                   # N6.4
            self._sums['freed_bytes'] += look.bytes
        batch = maintainer.catalog.batch()
        if not look.live and self._unlink(group):
            maintainer.catalog.forget_group(batch, number)
        else:
            self._keep(group, look, batch)
        self._forget_damaged(batch, number, look.free)
        # If there is no room to say so, it is only looked at once more.
        with contextlib.suppress(exceptions.NoSpaceError):
            maintainer.write(batch)

    def _keep(self, group: _engine.Group, look: _Look,
              batch: catalog_module.Batch) -> None:
        """Give back what can be of a group in which something stays."""
        # Also if there was nothing to free: the last collection may have been
        # killed before it punched.
        given_back = group.punch()
        self._sums['disk_bytes'] += given_back
        self._sums['punched'] += given_back > 0
        facts: dict[str, Any] = {'judged': group.published,
                                 'dirty': look.pinned > 0}
        if _is_sparse(self._maintainer.engine.group_facts(group.number),
                      look.live, self._evacuate_share):
            self._sparse.add(group.number)
            # Until it was tried: whatever ends this run before.
            facts['dirty'] = True
        elif self._is_worn(group, look):
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
        self._sums['unlinked'] += 1
        self._sums['disk_bytes'] += allocated
        return True

    def _is_worn(self, group: _engine.Group, look: _Look) -> bool:
        """Whether rewriting is worth while."""
        facts = self._maintainer.catalog.group(group.number)
        if not _has_lost(look, facts, self._live_share):
            return False
        stored, kept = group.live_bytes()
        return 100 * kept < self._live_share * stored

    def _rewrite(self, group: _engine.Group) -> bool:
        """Rewrite a group; False if there is no room for it."""
        try:
            given_back = group.rewrite()
        except exceptions.NoSpaceError:
            self._sums['skipped_for_space'] += 1
            return False
        except (exceptions.DamagedError, exceptions.BusyError):
            # The scrub will find the block, and say whose it is; and the next
            # upload what an earlier one did not publish (N7.3).
            return True
        self._sums['rewritten'] += 1
        self._sums['disk_bytes'] += given_back
        self._cost += 2 * self._maintainer.engine.group_facts(
            group.number)['allocated']
        return True

    def _forget_damaged(self, batch: catalog_module.Batch, number: int,
                        freed: list[int]) -> None:
        damaged = self._maintainer.catalog.damaged()
        if damaged:
            gone = addresses_module.of_slots(number, freed)
            for address in damaged.keys() & gone:
                self._maintainer.catalog.set_damaged(batch, address, None)

    # -- evacuation -------------------------------------------------------

    def _evacuate(self) -> None:
        """Store what still lives in nearly empty groups elsewhere.

        The images that need it are merged to the copies (N10). What they were
        is un-counted, so that the groups can be collected once more, and go.
        """
        groups = self._choose_sparse()
        try:
            self._move_blocks(groups)
        except exceptions.NoSpaceError:
            self._sums['skipped_for_space'] += len(self._sparse)
            return
        if not self._merge_refused:
            self._forget_sparse(groups)
        self._drain()
        for number in groups:
            if not any(self._maintainer.catalog.counts(number)):
                self._sums['evacuated'] += 1
                self._collect(number)

    def _choose_sparse(self) -> list[int]:
        """As many as are evacuated in one run; the next has the others."""
        groups: list[int] = []
        blocks = 0
        for number in sorted(self._sparse):
            counts = addresses_module.unpack(
                self._maintainer.catalog.counts(number))
            blocks += len(counts) - counts.count(0)
            if groups and blocks > _MOST_EVACUATED:
                break
            groups.append(number)
        return groups

    def _forget_sparse(self, groups: list[int]) -> None:
        """What can be moved was: whatever is left has no need of a new look.

        But for what is pinned, or went out of use since they were found: that
        a group is dirty says nothing of that, since it was made so then.
        """
        maintainer = self._maintainer
        batch = maintainer.catalog.batch()
        for number in groups:
            facts = maintainer.engine.group_facts(number)
            look = _Look(
                maintainer.engine.entries(number, 0, facts['slots']),
                maintainer.catalog.counts(number, facts['slots']),
                facts['published'], (), number)
            self._cost += addresses_module.ENTRY_BYTES * facts['slots']
            maintainer.catalog.set_group(batch, number,
                                         dirty=bool(look.free))
        with contextlib.suppress(exceptions.NoSpaceError):
            self._maintainer.write(batch)

    def _move_blocks(self, groups: list[int]) -> None:
        maintainer = self._maintainer
        images, needed = self._images_with([
            addresses_module.address(number, slot) for number in groups
            for slot, count in enumerate(addresses_module.unpack(
                maintainer.catalog.counts(number))) if count])
        if not needed:
            return
        with contextlib.closing(maintainer.relocation()) as relocation:
            relocation.add(addresses_module.pack(sorted(needed), 'Q'))
            mapping = relocation.finish()
            for done, image_id in enumerate(images):
                self._merge(image_id, mapping)
                self._step(done + 1, len(images), 'evacuating groups')

    def _merge(self, image_id: str, mapping: bytes) -> None:
        """Merge an image to the copies; if it cannot be, the group stays."""
        try:
            merger.merge_image(self._maintainer, image_id, mapping,
                               self._pace)
        except catalog_module.CatalogError:
            raise
        except exceptions.BusyError:
            self._merge_refused = True
        except (exceptions.DamagedError, exceptions.ImageNotFound):
            pass

    def _images_with(self, addresses: list[int]
                     ) -> tuple[list[str], set[int]]:
        """The images that name any of these, and what of these they name.

        So without what only images need that are deleted, and still being
        read.
        """
        images: list[str] = []
        needed: set[int] = set()
        ledger = [facts['image_id']
                  for _, facts in self._maintainer.catalog.ledger()]
        for done, image in enumerate(addresses_module.which_named(
                self._maintainer.engine, ledger, addresses)):
            self._cost += image.cost
            if image.found:
                images.append(image.image_id)
                needed |= image.found
            self._step(done + 1, len(ledger), 'looking for images')
        return images, needed
