# SPDX-License-Identifier: Apache-2.0

"""Scrubbing: finds, sets aside, reports and heals what the disk has lost.

A *pass* reads every recipe and every block once, in the order of their names
and slots. It may be stopped anywhere and goes on in the next run: the catalog
keeps its cursor and its figures.

A block that does not verify on two readings becomes *waiting*, in the same
record as the cursor, so that nothing can make the scrub forget it. When the
pass leaves the block's group, and the group is free, the scrub copies the
stored bytes to ``quarantine/`` and marks the entry, so that no look-up returns
it. Then it reports which images need the block. If the group is in use, the
block waits for a later run.

A damaged block is *healed* if the same block is also stored elsewhere: in a
spare copy, or because a later upload stored it again. The scrub then merges
the images to that block. Where fingerprints are not cryptographic, nothing
tells whether another block is the same. There the block stays damaged, unless
it becomes readable after all. The mark in the catalog goes when no recipe
names the block any more, and the slot goes with the next collection.

At the end of a pass the scrub renews the spare copies of the most used blocks.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import dataclasses
import heapq
import itertools
import logging
import time
from typing import Any

from dedupd.tasks import accounting
from dedupd.tasks import merger
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import task
from glance_dedup.maintenance import addresses as addresses_module
from glance_dedup.maintenance import maintainer as maintainer_module
from glance_dedup.repository import repository as repository_module

LOG = logging.getLogger(__name__)

#: Slots that one step verifies.
STEP_SLOTS = 1024
#: Blocks marked in one go.
MARK_SLOTS = 1024
#: The most bytes of blocks, before compression, that get a spare copy.
SPARE_MAX = 1 << 30

#: Slots and images that a line of the log names.
LISTED = 10


@dataclasses.dataclass(frozen=True)
class Result:
    """What a pass found so far, and what this run did."""

    blocks: int
    """Blocks verified in this pass."""
    bytes: int
    """Bytes read from the disk in this pass."""
    damaged: int
    """Damaged blocks known in this run, whenever they were found, including
    those that it healed."""
    found: int
    """Damaged blocks that this pass found first."""
    healed: int
    """Damaged blocks that this run healed."""
    images: list[str]
    """Images that now cannot be read completely, of this pass or before."""
    quarantined: list[str]
    """Files with bytes that this run set aside."""
    complete: bool
    """Whether the pass has ended."""
    spares: int
    """Blocks that have a spare copy."""
    spare_bytes: int
    """Size of the files with the spare copies."""
    busy: int
    """Damaged blocks not marked yet, because their group is in use."""
    worn: int
    """Good blocks with a neighbour whose bytes have changed on the disk."""
    unreadable: dict[str, str]
    """Recipes and groups known to be unreadable, each with its error. Findings
    of an earlier pass stay until this one looks there."""


def run_once(maintainer: maintainer_module.Maintainer, pace: task.Pace,
             full: bool = False, budget_bytes: int | None = None,
             spare_threshold: int = 0, spare_max: int = SPARE_MAX) -> Result:
    """Heal damaged blocks, and go on with the pass to its end.

    :param full: begin a new pass, wherever the last one was
    :param budget_bytes: about how much of the disk to read at most; None: no
        limit
    :param spare_threshold: a block that recipes name at least this often gets
        a spare copy when the pass ends; 0: no block does, and existing copies
        go
    :param spare_max: the most bytes of blocks that get a spare copy
    :raises task.Stopped: between two steps; the next run goes on from there
    """
    return maintainer.guard(
        lambda: _Run(maintainer, pace, full, budget_bytes,
                     spare_threshold, spare_max).run(), pace.step)


def mark_lost(maintainer: maintainer_module.Maintainer, image_id: str,
              progress: Callable[[int, int, str], None] | None = None) -> str:
    """Give up an image whose recipe cannot be read.

    While the image is there, nothing may be freed anywhere, because nobody
    knows what it names. This keeps its file in ``quarantine/``. The next
    collection frees the blocks that only this image named.

    :returns: the name of the file in ``quarantine/``
    :raises ImageNotFound: if there is no such image
    :raises InvalidParameter: if the recipe can be read, so that the image can
        be deleted; or if this is not an image id
    :raises BusyError: if the image is being deleted or merged
    """
    repository_module.need_text('image id', image_id)
    with contextlib.closing(
            maintainer.engine.open_recipe(image_id)) as recipe:
        if _error_of(recipe) is None:
            raise exceptions.InvalidParameter(
                f'the recipe of image {image_id} can be read: it can be '
                'deleted like any other')
        with maintainer.image_lock(image_id) as free:
            if not free:
                raise exceptions.BusyError(
                    f'image {image_id} is being deleted, or merged')
        aside = recipe.set_aside()
        # The recipe may have been counted, and cannot be un-counted. So the
        # counts are given up before its names are: after a crash anywhere
        # below, the catalog is rebuilt before anything is freed.
        maintainer.write(maintainer.catalog.batch(), sync=True, valid=False)
        try:
            recipe.delete()                                     # N9
            # Each later accounting would judge its entries in vain. But while
            # somebody writes or reads the image, the entries keep its blocks
            # from being freed (I12). Then the accounting finds out when that
            # is over.
            if recipe.try_lock(0) and recipe.try_lock(1):
                _unlink_entries(maintainer, recipe.inode)
        except exceptions.RepositoryError:
            maintainer.rebuild(progress)
            raise
    maintainer.rebuild(progress)
    state = maintainer.catalog.scrub_state()
    if state.get('unreadable', {}).pop(f'images/{image_id}', None):
        maintainer.catalog.set_scrub_state(state)
    LOG.warning('Image %s was given up; its recipe is in %s', image_id, aside)
    return aside


def _unlink_entries(maintainer: maintainer_module.Maintainer,
                    inode: int) -> None:
    for name in maintainer.engine.spool():
        with contextlib.suppress(exceptions.ImageNotFound):
            with contextlib.closing(
                    maintainer.engine.open_entry(name)) as entry:
                if entry.inode == inode:
                    entry.unlink()


def _error_of(recipe: _engine.Recipe) -> str | None:
    """Why a recipe in ``images/`` cannot be read; None: it can."""
    if not recipe.complete:
        return recipe.error or f'{recipe.name} has no header'
    try:
        recipe.measure()
    except exceptions.UNREADABLE as e:
        return str(e)
    return None


def _listed(items: Sequence[Any]) -> str:
    """The first LISTED items, in words."""
    words = ', '.join(map(str, items[:LISTED]))
    if len(items) > LISTED:
        words += f' and {len(items) - LISTED} more'
    return words or 'none'


class _Run:
    """One run. Whatever must outlive it is in `_state`."""

    def __init__(self, maintainer: maintainer_module.Maintainer,
                 pace: task.Pace, full: bool, budget: int | None,
                 spare_threshold: int, spare_max: int) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._budget = budget
        self._spare_threshold = spare_threshold
        self._spare_max = spare_max
        self._tells_apart = (
            maintainer.repository.parameters.is_cryptographic)  # I5
        self._quarantined: list[str] = []
        self._healed = 0
        self._read = 0          # bytes, in this run
        self._copies: dict[bytes, int] = {}     # of damaged blocks, as met
        self._damaged: set[int] = set()     # known in this run
        state = maintainer.catalog.scrub_state()
        begun = {
            'started': time.time(), 'complete': False,
            'image': '', 'group': 0, 'slot': 0,
            'blocks': 0, 'bytes': 0, 'damaged': 0, 'worn': 0,
            'waiting': state.get('waiting', []),
            'unreadable': state.get('unreadable', {}),
            'spares': state.get('spares', {})}
        # A pass whose record lacks a field could not end properly.
        if full or state.get('complete', True) or begun.keys() - state.keys():
            state = begun
        self._state = state

    def run(self) -> Result:
        self._wanted = self._fingerprints()
        try:
            self._mark(self._state['waiting'])
            self._heal()
            self._scrub_recipes()
            complete = self._scrub_groups()
        finally:
            # The findings are reported even if the run is stopped.
            self._mark(self._state['waiting'])
            self._save()
        self._heal()
        if complete:
            self._renew_spares()
            self._state['complete'] = True
        self._save()
        return self._result()

    def _result(self) -> Result:
        state = self._state
        spares = state['spares']
        return Result(
            state['blocks'], state['bytes'],
            len(self._damaged.union(state['waiting'])), state['damaged'],
            self._healed, sorted(self._maintainer.catalog.damaged_images()),
            self._quarantined, state['complete'],
            spares.get('blocks', 0), spares.get('bytes', 0),
            len(state['waiting']), state['worn'],
            {name: hit['error']
             for name, hit in state['unreadable'].items()})

    def _save(self) -> None:
        self._maintainer.catalog.set_scrub_state(self._state)

    def _step(self, done: int, total: int, what: str, cost: int) -> None:
        """After a step: save how far the pass got, then keep the pace."""
        self._read += cost
        self._save()
        self._pace.step(done, total, what, cost=cost)

    def _spent(self) -> bool:
        return self._budget is not None and self._read >= self._budget

    # -- recipes ----------------------------------------------------------

    def _scrub_recipes(self) -> None:
        """Read all recipes after the one at the cursor."""
        if self._state['image'] is None:
            return
        images = sorted(self._maintainer.repository.images())
        for done, image_id in enumerate(images):
            if image_id <= self._state['image']:
                continue
            cost = 0
            try:
                with contextlib.closing(self._maintainer.engine.open_recipe(
                        image_id)) as recipe:
                    error = _error_of(recipe)
                    if error is None:
                        cost = 4096 + 40 * recipe.header()['extents']
                        error = self._misled(image_id, recipe)
            except exceptions.ImageNotFound:
                error = None
            except (exceptions.InvalidParameter,
                    *exceptions.UNREADABLE) as e:
                error = str(e)
            self._note(f'images/{image_id}', error, [image_id])
            self._state['image'] = image_id
            self._state['bytes'] += cost
            self._step(done + 1, len(images), 'reading recipes', cost)
        self._state['image'] = None
        there = {f'images/{image_id}' for image_id in images}
        for name in list(self._state['unreadable']):
            if name.startswith('images/') and name not in there:
                self._note(name, None)

    def _misled(self, image_id: str, recipe: _engine.Recipe) -> str | None:
        """Describe the error if entries are not of the recipe's blocks (I7).

        Where an older copy of a group was put back, each entry is good by
        itself. Entries that are not good are found with the groups.
        """
        try:
            with contextlib.closing(
                    self._maintainer.handle.open_image(image_id)) as image:
                page = 0
                while image.describe(page):
                    page += 1
        except exceptions.DamagedError as e:
            return None if any(map(
                self._names_damage, addresses_module.pieces(recipe))
            ) else str(e)
        return None

    def _names_damage(self, runs: bytes) -> bool:
        """Whether an entry, or a group, cannot be read as it was written."""
        for number, slot, blocks in addresses_module.runs_in(runs):
            try:
                listing = self._maintainer.engine.entries(number, slot, blocks)
            except exceptions.InvalidParameter:
                continue
            except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
                return True
            if not {addresses_module.DAMAGED, addresses_module.INVALID
                    }.isdisjoint(addresses_module.columns(listing).states):
                return True
        return False

    def _note(self, name: str, error: str | None,
              images: Iterable[str] = ()) -> None:
        """Remember the error of a recipe or group; None: it has none."""
        if error is None:
            self._state['unreadable'].pop(name, None)
            return
        images = list(images)
        LOG.error('%s cannot be read: %s. Images hit: %s', name, error,
                  _listed(images))
        self._state['unreadable'][name] = {'error': error, 'images': images}

    # -- groups -----------------------------------------------------------

    def _scrub_groups(self) -> bool:
        """Verify all blocks from the cursor on; return whether this ended."""
        state = self._state
        numbers = self._maintainer.engine.groups()
        if not state['group']:
            self._look_for_missing(numbers)
        for done, number in enumerate(numbers):
            if number < state['group']:
                continue
            if number > state['group']:
                state['group'], state['slot'] = number, 0
            error = None
            try:
                ended = self._scrub_group(number, done, len(numbers))
            except exceptions.ImageNotFound:
                ended = True    # it was empty, and is gone
            except exceptions.UNREADABLE as e:
                # One bad group does not stop the pass.
                error = str(e)
                ended = True
            if not ended:
                return False
            self._note(f'groups/{number:08x}', error,
                       self._images_of_group(number) if error else ())
            # The next group, so that a finished one is not begun again.
            state['group'], state['slot'] = number + 1, 0
            self._mark([address for address in state['waiting']
                        if addresses_module.group_of(address) == number])
        return True

    def _look_for_missing(self, numbers: list[int]) -> None:
        there = {f'groups/{number:08x}' for number in numbers}
        for name in list(self._state['unreadable']):
            if name.startswith('groups/') and name not in there:
                self._note(name, None)
        for number, facts in self._maintainer.catalog.groups():
            name = f'groups/{number:08x}'
            if facts['used'] and name not in there:
                self._note(name, 'it is missing',
                           self._images_of_group(number))

    def _images_of_group(self, number: int) -> list[str]:
        return sorted(self._images_with(addresses_module.of_slots(
            number, range(addresses_module.GROUP_SLOTS))))

    def _scrub_group(self, number: int, done: int, total: int) -> bool:
        """Verify the rest of a group; False if the budget is spent."""
        state = self._state
        facts = self._maintainer.engine.group_facts(number)
        # The next writer judges the unpublished slots behind these (N7.3).
        while (first := state['slot']) < facts['published']:
            if self._spent():
                return False
            count = min(STEP_SLOTS, facts['published'] - first)
            self._scrub_slots(number, first, count)
            state['slot'] = first + count
            self._step(
                done * facts['slots'] + first, total * facts['slots'],
                f'scrubbing group {number:08x}', self._cost)
        return True

    def _scrub_slots(self, number: int, first: int, count: int) -> None:
        state = self._state
        self._cost = addresses_module.ENTRY_BYTES * count
        entries = addresses_module.entries(
            self._maintainer.engine.entries(number, first, count))
        self._cost, damaged, invalid, worn = _engine.verify_slots(
            self._maintainer.handle, number, first, count)
        bad = addresses_module.of_slots(
            number, addresses_module.unpack(damaged + invalid))
        # An invalid entry has nothing to mark.
        bad = [address for address in bad if address not in self._known]
        waiting = set(state['waiting'])
        state['damaged'] += len(set(bad) - waiting)
        state['waiting'] = sorted(waiting.union(bad))
        state['worn'] += len(worn) // 4
        state['bytes'] += self._cost
        state['blocks'] += sum(
            entry.state == addresses_module.LIVE for entry in entries)
        self._notice(number, first, entries, set(bad))

    def _notice(self, number: int, first: int,
                entries: list[addresses_module.Entry], bad: set[int]) -> None:
        """Look for marked blocks that were not reported, and for copies."""
        for slot, entry in enumerate(entries, first):
            address = addresses_module.address(number, slot)
            if entry.state == addresses_module.DAMAGED:
                if address not in self._known and self._count(address):
                    self._tell({address: ''})
            elif (entry.state == addresses_module.LIVE
                    and entry.fingerprint in self._wanted
                    and address not in bad):
                self._copies.setdefault(entry.fingerprint, address)

    # -- damaged blocks ---------------------------------------------------

    def _fingerprints(self) -> set[bytes]:
        """Load the damaged blocks; return their fingerprints."""
        self._known = self._maintainer.catalog.damaged()
        self._damaged.update(self._known)
        return {bytes.fromhex(facts['fingerprint'])
                for facts in self._known.values()}

    def _count(self, address: int) -> int:
        counts = self._maintainer.catalog.counts(
            addresses_module.group_of(address),
            addresses_module.slot_of(address) + 1)
        return addresses_module.unpack(counts[-4:])[0]

    def _entry(self, address: int) -> addresses_module.Entry:
        return addresses_module.entry_at(self._maintainer.engine.entries(
            addresses_module.group_of(address),
            addresses_module.slot_of(address), 1), 0)

    def _mark(self, waiting: list[int]) -> None:
        """Mark damaged blocks, and report which images need them."""
        told: dict[int, str] = {}
        left = set(self._state['waiting'])
        for number, slots in addresses_module.by_group(waiting):
            for at in range(0, len(slots), MARK_SLOTS):
                some = slots[at:at + MARK_SLOTS]
                try:
                    told.update(self._mark_in(number, some))
                except exceptions.BusyError:
                    break
                except (exceptions.NoSpaceError, exceptions.ImageNotFound,
                        *exceptions.UNREADABLE) as e:
                    LOG.error('Group %08x: damaged blocks cannot be set '
                              'aside: %s', number, e)
                    break
                left.difference_update(
                    addresses_module.of_slots(number, some))
        if told:
            self._tell(told)
        if len(left) != len(self._state['waiting']):
            self._state['waiting'] = sorted(left)
            self._save()

    def _mark_in(self, number: int, slots: list[int]) -> dict[int, str]:
        """Mark blocks in their group; return addresses and files set aside."""
        try:
            entered = self._maintainer.engine.enter_group(number)
        except exceptions.ImageNotFound:
            return {}       # nothing in it was needed any more
        with contextlib.closing(entered) as group:
            bad = []
            invalid = []
            for slot in slots:
                # The block may have been freed since it was found.
                _, damaged, lost, _ = _engine.verify_slots(
                    self._maintainer.handle, number, slot, 1)
                bad += addresses_module.unpack(damaged)
                invalid += addresses_module.unpack(lost)
            names = (group.mark_damaged(addresses_module.pack(bad)) if bad
                     else [])
        self._quarantined += names
        # A file has the bytes of one segment: group-offset-digits.
        files = {int(name.rsplit('-', 2)[1]): name for name in names}
        told = dict.fromkeys(addresses_module.of_slots(number, invalid), '')
        for address in addresses_module.of_slots(number, bad):
            told[address] = files.get(self._entry(address).segment, '')
        return told

    def _tell(self, told: dict[int, str]) -> None:
        """Record damaged blocks, and log which images need them."""
        images = self._images_with(told)
        catalog = self._maintainer.catalog
        batch = catalog.batch()
        for address, name in sorted(told.items()):
            hit = sorted(i for i, named in images.items() if address in named)
            facts = {
                'found': int(time.time()),
                'fingerprint': self._entry(address).fingerprint.hex(),
                'quarantine': name, 'images': hit}
            catalog.set_damaged(batch, address, facts)
        self._maintainer.write(batch)
        for number, slots in addresses_module.by_group(told):
            hit = sorted(
                i for i, named in images.items() if not named.isdisjoint(
                    addresses_module.of_slots(number, slots)))
            LOG.error('%d blocks of group %08x are damaged, in the slots %s. '
                      'Images hit: %s', len(slots), number, _listed(slots),
                      _listed(hit))
        self._wanted = self._fingerprints()

    def _images_with(self, addresses: Iterable[int]) -> dict[str, set[int]]:
        """The images that name some of the addresses, and which they name."""
        return {image.image_id: image.found
                for image in addresses_module.which_named(
                    self._maintainer.engine,
                    self._maintainer.repository.images(), addresses)
                if image.found}

    # -- healing ----------------------------------------------------------

    def _heal(self) -> None:
        """Merge the images to other copies of their damaged blocks."""
        self._wanted = self._fingerprints()
        if not self._known:
            return
        before = self._images_with(self._known)
        if before:
            with contextlib.closing(
                    self._maintainer.relocation()) as relocation:
                mapping = self._find_copies(before, relocation)
                self._merge(before, mapping)
            accounting.run_once(self._maintainer, self._pace)
        self._forget(self._images_with(self._known))

    def _find_copies(self, images: dict[str, set[int]],
                     relocation: _engine.Relocation) -> dict[int, int]:
        """Find copies of the blocks: a map of old to new addresses."""
        mapping = {}
        left = []
        for address in sorted(set().union(*images.values())):
            fingerprint = bytes.fromhex(self._known[address]['fingerprint'])
            for copy in (self._copies.get(fingerprint),
                         self._maintainer.catalog.indexed(fingerprint)):
                if (self._tells_apart and copy is not None
                        and self._is_good(copy, fingerprint)
                        and self._same_scope(copy, address)):
                    mapping[address] = copy
                    break
            else:
                left.append(address)
        if left:
            # Read spare copies; or the cause of the read errors has passed.
            with contextlib.suppress(exceptions.NoSpaceError):
                relocation.add(addresses_module.pack(left, 'Q'))
                pairs = addresses_module.unpack(relocation.finish(), 'Q')
                mapping.update(zip(pairs[::2], pairs[1::2]))
        lost = len(set(left) - mapping.keys())
        if lost and not self._tells_apart:
            LOG.warning(
                '%d damaged blocks cannot be healed: only their fingerprints '
                'say what they were, and another block can have the same: '
                '%s is not cryptographic', lost,
                self._maintainer.repository.parameters.fingerprint)
        return mapping

    def _is_good(self, address: int, fingerprint: bytes) -> bool:
        try:
            entry = self._entry(address)
            if (entry.state != addresses_module.LIVE
                    or entry.fingerprint != fingerprint):
                return False
            _, damaged, invalid, _ = _engine.verify_slots(
                self._maintainer.handle, addresses_module.group_of(address),
                addresses_module.slot_of(address), 1)
        except (exceptions.ImageNotFound, exceptions.InvalidParameter,
                *exceptions.UNREADABLE):
            return False
        return not damaged and not invalid

    def _same_scope(self, *addresses: int) -> bool:
        """Whether the addresses are of one scope, so that images may merge."""
        try:
            return len({self._maintainer.engine.group_facts(number)['scope']
                        for number in map(addresses_module.group_of,
                                          addresses)}) == 1
        except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
            return False

    def _merge(self, images: dict[str, set[int]],
               mapping: dict[int, int]) -> None:
        for done, (image_id, named) in enumerate(sorted(images.items())):
            pairs = sorted((old, mapping[old]) for old in named
                           if old in mapping)
            if not pairs:
                continue
            try:
                merger.merge_image(
                    self._maintainer, image_id,
                    addresses_module.pack(
                        itertools.chain.from_iterable(pairs), 'Q'),
                    self._pace)
            except exceptions.ImageNotFound:
                continue
            except (exceptions.BusyError, exceptions.NoSpaceError,
                    *exceptions.UNREADABLE) as e:
                LOG.warning('Image %s cannot be healed now: %s', image_id, e)
            self._pace.step(done + 1, len(images), 'healing images')

    def _forget(self, images: dict[str, set[int]]) -> None:
        """Note which images still need damaged blocks."""
        catalog = self._maintainer.catalog
        hit = collections.defaultdict(list)
        for image_id, named in images.items():
            for address in named:
                hit[address].append(image_id)
        batch = catalog.batch()
        for address, facts in self._known.items():
            needed = sorted(hit[address])
            if facts['images'] and not needed:
                self._healed += 1
            if not needed and not self._count(address):
                catalog.set_damaged(batch, address, None)
            elif facts['images'] != needed:
                catalog.set_damaged(batch, address,
                                    {**facts, 'images': needed})
        if len(batch):
            self._maintainer.write(batch)
        self._wanted = self._fingerprints()

    # -- spare copies -----------------------------------------------------

    def _renew_spares(self) -> None:
        """Copy the most used blocks again.

        This copies all of them, so that a copy that went bad does not stay
        bad. The cost is small compared with what the pass has read.
        """
        repository = self._maintainer.repository
        slots = repository.parameters.group_slots
        wanted = self._most_used(
            self._spare_max // repository.parameters.average_block)
        before = self._state['spares'].get('files', 0)
        files = [wanted[at:at + slots] for at in range(0, len(wanted), slots)]
        written = copied = 0
        for number in range(1, max(len(files), before) + 1):
            some = files[number - 1] if number <= len(files) else []
            blocks, size = self._write_spares(number, some)
            copied += blocks
            written += size
            self._pace.step(number, max(len(files), before),
                            'writing spare copies', cost=2 * size)
        self._state['spares'] = {
            'files': len(files), 'blocks': copied, 'bytes': written}

    def _write_spares(self, number: int, addresses: list[int]
                      ) -> tuple[int, int]:
        """Write a file of spare copies; return its blocks and bytes."""
        good = [a for a in addresses if a not in self._known]
        for some in ((addresses, good) if len(good) < len(addresses)
                     else (addresses,)):
            try:
                # A damaged block comes from its existing copy.
                size = _engine.write_spares(self._maintainer.engine, number,
                                            addresses_module.pack(some, 'Q'))
                return len(some), size
            except (exceptions.NoSpaceError,
                    *exceptions.UNREADABLE) as e:
                LOG.warning('Spare copies cannot be written: %s', e)
        return 0, 0

    def _most_used(self, most: int) -> list[int]:
        """The addresses of the blocks that recipes name most often, sorted."""
        if not self._spare_threshold:
            return []
        if not self._tells_apart:
            LOG.warning(
                'No spare copies are written: their fingerprints alone say '
                'what they are, and %s is not cryptographic',
                self._maintainer.repository.parameters.fingerprint)
            return []
        catalog = self._maintainer.catalog
        found = heapq.nlargest(most, (
            (count, -addresses_module.address(number, slot))
            for number, facts in catalog.groups() if facts['used']
            for slot, count in enumerate(
                addresses_module.unpack(catalog.counts(number)))
            if count >= self._spare_threshold))
        return sorted(-address for _, address in found)
