# SPDX-License-Identifier: Apache-2.0

"""Scrubbing: finds, sets aside, reports and heals damage of the disk.

A *pass* reads every recipe and every block once, in the order of their names
and slots. It may be stopped anywhere and goes on in the next run: the catalog
keeps its cursor and its figures.

A block that does not verify on two readings becomes *waiting*, in the same
record as the cursor, so that nothing can make the scrub forget it. When the
pass leaves the block's group, and the group is free, the scrub marks the block
as damaged, and reports the images that need it (``damaged_blocks.py``). If the
group is in use, the block waits for a later run.

Other daemons may have shares of the groups (``sharescrub.py``); then the pass
verifies those of the maintainer. But while damaged blocks are known, it reads
all groups, since any may have a copy.

Of cold groups, whose blocks are in objects, a pass reads the entries, and a
sample of the objects (``objectscrub.py``). A pass that the object store did
not answer has not ended.

At the begin and the end of a run the scrub heals damaged blocks of which there
is a copy. At the end of a pass it renews the spare copies of the most used
blocks (``spare_copies.py``).
"""

from collections.abc import Callable
from collections.abc import Iterable
import contextlib
import dataclasses
import logging
import time

from dedupd.tasks import damaged_blocks
from dedupd.tasks import objectscrub
from dedupd.tasks import spare_copies
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository
from glance_dedup.repository import volumes

LOG = logging.getLogger(__name__)

#: Slots that one step verifies at most, and about how many bytes of blocks,
#: unless their segments have others, too. One thread reads on while others
#: judge, so a step has several windows (scrub.h).
STEP_SLOTS = 4096
STEP_BYTES = 16 << 20
#: The most bytes of blocks, before compression, that get a spare copy.
SPARE_MAX = 1 << 30


@dataclasses.dataclass(frozen=True)
class Result:
    """Findings of a pass so far, and results of this run."""

    blocks: int
    """Blocks verified in this pass."""
    bytes: int
    """Bytes read from the disk in this pass."""
    damaged: int
    """All damaged blocks known in this run, including those that it healed."""
    found: int
    """Damaged blocks that this pass found first."""
    healed: int
    """Damaged blocks that this run healed."""
    images: list[str]
    """Images that now cannot be read completely, of this pass or before."""
    quarantined: list[str]
    """Files with bytes that this run set aside."""
    complete: bool
    """True if the pass has ended."""
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
    volumes: list[str] = dataclasses.field(default_factory=list)
    """Names of volumes that now cannot be read completely."""
    cold_bytes: int = 0
    """Bytes of cold groups' objects that were read in this pass."""
    unavailable: str | None = None
    """The reason why this run read no objects; None: the object store
    answered, or no request was needed."""
    unchecked: int = 0
    """Blocks in cold groups that this run could not check for that reason."""


def run_once(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
             full: bool = False, budget_bytes: int | None = None,
             spare_threshold: int = 0, spare_max: int = SPARE_MAX,
             is_mine: Callable[[int], bool] = lambda group: True,
             cold_budget: int = 0) -> Result:
    """Heal damaged blocks, and go on with the pass to its end.

    :param full: begin a new pass, even if the last one has not ended
    :param budget_bytes: about how much of the disk to read at most; None: no
        limit
    :param spare_threshold: a block that recipes name at least this often gets
        a spare copy when the pass ends; 0: no block does, and existing copies
        go
    :param spare_max: the most bytes of blocks that get a spare copy
    :param is_mine: returns whether a group is in the maintainer's share;
        called for each group just before
    :param cold_budget: the most bytes of objects that a pass reads
    :raises pacing.Stopped: between two steps; the next run goes on from there
    """
    return maintainer.guard(
        lambda: _Run(maintainer, pace, full, budget_bytes,
                     spare_threshold, spare_max, is_mine,
                     cold_budget).run(), pace.step)


def mark_lost(maintainer: maintainer_role.Maintainer, image_id: str,
              progress: Callable[[int, int, str], None] | None = None) -> str:
    """Give up an image whose recipe cannot be read.

    While the image is there, nothing may be freed anywhere, because the blocks
    that it names are not known. This keeps its file in ``quarantine/``. The
    next collection frees the blocks that only this image named. A volume's
    recipe is given up like an image; the volume then cannot read what it had.

    :returns: the name of the file in ``quarantine/``
    :raises ImageNotFound: if there is no such image
    :raises InvalidParameter: if the recipe can be read, so that the image can
        be deleted; or if this is not an image id
    :raises BusyError: if the image is being deleted or merged
    """
    image_repository.require_text('image id', image_id)
    with contextlib.closing(
            maintainer.engine.open_recipe(image_id)) as recipe:
        if _error_of(recipe) is None:
            what = volumes.words(maintainer.repository, image_id)
            raise exceptions.InvalidParameter(
                f'the recipe of image {image_id} can be read: '
                + ('it can be deleted like any other' if what is None
                   else f'it is {what}, which is not lost'))
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
            # a process writes or reads the image, the entries keep its
            # blocks from being freed (I12). Then the accounting finds out when
            # that is over.
            if recipe.try_lock(0) and recipe.try_lock(1):
                _unlink_entries(maintainer, recipe.inode)
        except exceptions.RepositoryError:
            maintainer.rebuild(progress)
            raise
    maintainer.rebuild(progress)
    state = maintainer.catalog.scrub_state()
    if state.get('unreadable', {}).pop(f'images/{image_id}', None):
        maintainer.catalog.set_scrub_state(state)
    LOG.warning('Image %s was given up; its recipe is in %s',
                volumes.described(maintainer.repository, image_id), aside)
    return aside


def _unlink_entries(maintainer: maintainer_role.Maintainer,
                    inode: int) -> None:
    for name in maintainer.engine.spool():
        with contextlib.suppress(exceptions.ImageNotFound):
            with contextlib.closing(
                    maintainer.engine.open_entry(name)) as entry:
                if entry.inode == inode:
                    entry.unlink()


def _error_of(recipe: _engine.Recipe) -> str | None:
    """The reason why a recipe in ``images/`` cannot be read; None: it can."""
    if not recipe.complete:
        return recipe.error or f'{recipe.name} has no header'
    try:
        recipe.measure()
    except exceptions.UNREADABLE as e:
        return str(e)
    return None


class _Run:
    """One run. All data that must outlive it are in `_state`."""

    def __init__(self, maintainer: maintainer_role.Maintainer,
                 pace: pacing.Pace, full: bool, budget: int | None,
                 spare_threshold: int, spare_max: int,
                 is_mine: Callable[[int], bool], cold_budget: int) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._budget = budget
        self._spare_threshold = spare_threshold
        self._spare_max = spare_max
        self._is_mine = is_mine
        self._step_slots = min(STEP_SLOTS, max(
            1, STEP_BYTES // maintainer.repository.parameters.average_block))
        self._damage = damaged_blocks.Damage(maintainer, pace)
        self._read = 0          # bytes, in this run
        state = maintainer.catalog.scrub_state()
        begun = {
            'started': time.time(), 'complete': False,
            'image': '', 'group': 0, 'slot': 0,
            'blocks': 0, 'bytes': 0, 'damaged': 0, 'worn': 0,
            'waiting': state.get('waiting', []),
            'unreadable': state.get('unreadable', {}),
            'spares': state.get('spares', {}), 'cold': state.get('cold', {})}
        objectscrub.begin(begun)
        # A pass whose record lacks a field could not end properly.
        if full or state.get('complete', True) or (
                begun.keys() - state.keys() - {'cold'}):
            state = begun
        self._state = state
        self._objects = objectscrub.Objects(
            maintainer, state, cold_budget, self._add_damage,
            lambda what, cost: self._step(pace.done, pace.total, what, cost))

    def run(self) -> Result:
        try:
            self._mark(self._state['waiting'])
            self._damage.heal()
            self._scrub_recipes()
            # The objects come first: while the groups are read, copies of
            # damaged blocks are found.
            complete = self._objects.scrub(self._note, self._spent)
            self._mark(self._state['waiting'])
            complete = (complete and self._scrub_groups()
                        and self._objects.unavailable is None)
        finally:
            # The findings are reported even if the run is stopped.
            self._mark(self._state['waiting'])
            self._save()
        self._damage.heal()
        if complete:
            self._renew_spares()
            self._state['complete'] = True
        self._save()
        return self._result()

    def _result(self) -> Result:
        state = self._state
        spares = state['spares']
        images, names = volumes.apart(
            self._maintainer.repository,
            self._maintainer.catalog.damaged_images())
        return Result(
            state['blocks'], state['bytes'],
            len(self._damage.met.union(state['waiting'])), state['damaged'],
            self._damage.healed,
            images,
            self._damage.quarantined, state['complete'],
            spares.get('blocks', 0), spares.get('bytes', 0),
            len(state['waiting']), state['worn'],
            {name: hit['error']
             for name, hit in state['unreadable'].items()}, names,
            state['cold']['read'], self._objects.unavailable,
            self._objects.unchecked)

    def _save(self) -> None:
        self._maintainer.catalog.set_scrub_state(self._state)

    def _step(self, done: int, total: int, what: str, cost: int) -> None:
        """Save the pass's progress after a step, then keep the pace."""
        self._read += cost
        self._save()
        self._pace.step(done, total, what, cost=cost)

    def _spent(self) -> bool:
        return self._budget is not None and self._read >= self._budget

    def _mark(self, waiting: list[int]) -> None:
        """Mark waiting blocks; those that cannot be marked wait on."""
        done = self._damage.mark(waiting)
        if done:
            self._state['waiting'] = sorted(
                set(self._state['waiting']) - done)
            self._save()

    def _renew_spares(self) -> None:
        maintainer = self._maintainer
        wanted = spare_copies.most_used(
            maintainer, self._spare_threshold, self._spare_max
            // maintainer.repository.parameters.average_block)
        self._state['spares'] = dataclasses.asdict(spare_copies.renew(
            maintainer, self._pace, wanted, self._damage.known,
            self._state['spares'].get('files', 0)))

    # -- recipes ----------------------------------------------------------

    def _scrub_recipes(self) -> None:
        """Read all recipes after the one at the cursor."""
        if self._state['image'] is None:
            return
        images = self._maintainer.repository.recipes()
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
                self._names_damage, block_addresses.pieces(recipe))
            ) else str(e)
        return None

    def _names_damage(self, runs: bytes) -> bool:
        """Return whether an entry, or a group, cannot be read as written."""
        for number, slot, blocks in block_addresses.runs_in(runs):
            try:
                listing = self._maintainer.engine.entries(number, slot, blocks)
            except exceptions.InvalidParameter:
                continue
            except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
                return True
            if not {block_addresses.DAMAGED, block_addresses.INVALID
                    }.isdisjoint(block_addresses.columns(listing).states):
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
                  damaged_blocks.listed_images(self._maintainer, images))
        self._state['unreadable'][name] = {'error': error, 'images': images}

    # -- groups -----------------------------------------------------------

    def _scrub_groups(self) -> bool:
        """Verify all blocks from the cursor on; return whether this ended."""
        state = self._state
        numbers = self._maintainer.engine.groups()
        if not state['group']:
            self._look_for_missing(numbers)
        for done, number in enumerate(numbers):
            if number < state['group'] or not self._is_to_read(number):
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
                       damaged_blocks.images_of_group(
                           self._maintainer, number) if error else ())
            # The next group, so that a finished one is not begun again.
            state['group'], state['slot'] = number + 1, 0
            self._mark([address for address in state['waiting']
                        if block_addresses.group_of(address) == number])
        return True

    def _is_to_read(self, number: int) -> bool:
        return bool(self._damage.known or self._is_mine(number)
                    or f'groups/{number:08x}' in self._state['unreadable'])

    def _look_for_missing(self, numbers: list[int]) -> None:
        there = {f'groups/{number:08x}' for number in numbers}
        for name in list(self._state['unreadable']):
            if name.startswith('groups/') and name not in there:
                self._note(name, None)
        for number, facts in self._maintainer.catalog.groups():
            name = f'groups/{number:08x}'
            if facts['used'] and name not in there:
                self._note(name, 'it is missing',
                           damaged_blocks.images_of_group(
                               self._maintainer, number))

    def _scrub_group(self, number: int, done: int, total: int) -> bool:
        """Verify the rest of a group; False if the budget is spent."""
        state = self._state
        facts = self._maintainer.engine.group_facts(number)
        is_cold = facts['is_cold']
        # The next writer judges the unpublished slots behind these (N7.3).
        while (first := state['slot']) < facts['published']:
            if self._spent():
                return False
            # Segments with lists have slots from anywhere in the group, and
            # are to be read once.
            step = facts['slots'] if facts['has_lists'] else self._step_slots
            count = min(step, facts['published'] - first)
            cost = self._scrub_slots(number, first, count, is_cold)
            state['slot'] = first + count
            self._step(
                done * facts['slots'] + first, total * facts['slots'],
                f'scrubbing group {number:08x}', cost)
        return True

    def _scrub_slots(self, number: int, first: int, count: int,
                     is_cold: bool) -> int:
        """Verify some slots of a group; return the bytes read."""
        state = self._state
        listing = self._maintainer.engine.entries(number, first, count)
        cost, damaged, invalid, worn = _engine.verify_slots(
            self._maintainer.handle, number, first, count, True, 0,
            *([0] if is_cold else []))
        bad = self._add_damage(
            number, block_addresses.unpack(damaged + invalid))
        state['worn'] += len(worn) // 4
        state['bytes'] += cost
        if not is_cold:
            state['blocks'] += block_addresses.columns(listing).states.count(
                block_addresses.LIVE)
        self._damage.notice(number, first, listing, bad)
        return cost

    def _add_damage(self, number: int, slots: Iterable[int]) -> set[int]:
        """Have damaged blocks wait to be marked; return their addresses."""
        state = self._state
        # A known block is marked. An invalid entry has nothing to mark.
        bad = set(block_addresses.of_slots(number, slots)
                  ).difference(self._damage.known)
        waiting = set(state['waiting'])
        state['damaged'] += len(bad - waiting)
        state['waiting'] = sorted(waiting.union(bad))
        return bad
