# SPDX-License-Identifier: Apache-2.0

"""Merging: finds the duplicates that uploads missed, and shares them.

A run has three stages.

*Finding.* The run brings the exact index up to date (exactindex.py): the
entries published since the last run are sorted by their fingerprints, and
merged into it. A block whose fingerprint the index already has is a
*duplicate*. The pair goes into the catalog (duplicate_pairs.py), and stays
there until one of the two blocks is freed. A run may stop, or be killed,
anywhere: the next run finds the rest.

*Choosing.* Blocks of one fingerprint form a class. Addresses of the class that
counted recipes name are *in use*; the lowest of them replaces all others.
Addresses out of use are left to the collection: merging to one would
bring garbage back. While such a block lives, the next upload may find and use
it, so its pair stays.

*Merging.* Each image that names an address to replace gets another recipe
(N10). The next run examines images again that are in use now, or opted out.
"""

import array
import bisect
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import itertools
import logging
import operator
from typing import Any
from typing import NamedTuple

from dedupd.tasks import accounting
from dedupd.tasks import duplicate_pairs
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import catalog_db
from glance_dedup.maintenance import database
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import recipes
from glance_dedup.maintenance import refcounts

LOG = logging.getLogger(__name__)

#: Blocks merged in one round. A round reads each recipe once.
ROUND_BLOCKS = 1 << 19

#: The spool is settled after this many images, because each leaves two
#: recipes in it.
ACCOUNT_EVERY = 64

_COUNT_BYTES = 4
_REPLACEMENT_BYTES = 32
_REPLACEMENT_WORDS = 4
# Blocks that are to stay, and no more than _NEAR addresses apart, are read in
# one go with the blocks between them; at most _VERIFIED_AT_ONCE together.
_NEAR = 64
_VERIFIED_AT_ONCE = 4096
_CACHED_COUNTS = 256    # groups; 128 KiB each

_Catalog = catalog_db.Catalog | accounting.Foreseen
Facts = dict[str, Any]
Exclude = Callable[[Facts], bool]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a run."""

    scanned: int
    """Entries that were new to the index."""
    duplicates: int
    """Blocks in use that equal ones would replace."""
    bytes: int
    """Size of the duplicates, before compression."""
    images: int
    """Images that would get other recipes."""


@dataclasses.dataclass
class Result:
    """Result of a run."""

    scanned: int = 0
    """Entries that were new to the index."""
    duplicates: int = 0
    """Blocks in use that equal ones were to replace."""
    merged_blocks: int = 0
    """Duplicates that no image needs any more."""
    merged_bytes: int = 0
    """Size of the merged blocks, before compression."""
    images: int = 0
    """Images that have other recipes now."""
    gave_up: int = 0
    """Images that were deleted, or were being deleted, meanwhile."""
    busy: int = 0
    """Images put off to the next run because the collector is in a group."""
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Images that could not be merged, each with its error: damage, or an
    object store that does not answer."""


def plan(maintainer: maintainer_role.Maintainer,
         pace: pacing.Pace | None = None,
         exclude: Exclude | None = None) -> Plan:
    """Plan a run.

    This brings the index up to date, which is derived data, and changes
    nothing else.

    :param exclude: as for run_once
    :raises pacing.Stopped: the next run knows the duplicates found so far
    """
    pace = pace or pacing.Pace()
    return maintainer.guard(
        lambda: _Run(maintainer, pace, exclude).plan(), pace.step)


def run_once(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
             exclude: Exclude | None = None, dry_run: bool = False
             ) -> Result | Plan:
    """Find duplicates, and merge the images that name them.

    :param exclude: takes the ledger's facts of an image (``image_id``,
        ``project``, ...), and returns whether its recipe must stay as it is
    :param dry_run: only plan
    :raises pacing.Stopped: between two steps; the steps before it stand
    :raises NoSpaceError: if the disk has no room for the index or a recipe
    """
    if dry_run:
        return plan(maintainer, pace, exclude)
    return maintainer.guard(
        lambda: _Run(maintainer, pace, exclude).run(), pace.step)


class Merged(NamedTuple):
    """The result of merging one image."""

    replaced: int
    """Blocks whose address was to change; 0: the image names no such block."""
    exchanged: bool
    """True if the image has the new recipe."""
    collisions: bytes
    """Old addresses of blocks that are not equal to the new ones."""


def merge_image(maintainer: maintainer_role.Maintainer, image_id: str,
                mapping: bytes, pace: pacing.Pace) -> Merged:
    """Rewrite an image's recipe to other addresses of the same blocks (N10).

    This leaves entries in the spool, which the accounting settles.

    :param mapping: pairs of addresses, packed for the engine
    :raises BusyError: if the lock of a group was refused
    :raises DamagedError: if an old and a new block are not equal
    :raises ImageNotFound: if the image does not exist
    :raises UnavailableError: bytes are compared, and the object store does not
        give a cold block
    :raises pacing.Stopped: the image keeps its old recipe
    """
    with contextlib.closing(_engine.Merge(
            maintainer.engine, image_id, mapping)) as merge:    # N10.1, N10.2
        if not merge.replaced:
            return Merged(0, False, merge.collisions)
        count(maintainer, pace, merge.header()['transaction_id'])   # N10.3
        return Merged(merge.replaced, merge.exchange(),         # N10.4 to 7
                      merge.collisions)


def count(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
          transaction_id: bytes) -> None:
    """Count the whole new recipe, in as many steps as it takes (N10.3).

    It is in the spool, under the kind M. If this ends between two steps, the
    accounting goes back.
    """
    batch = maintainer.catalog.batch()

    def write() -> None:
        maintainer.settle(batch)
        batch.clear()
        pace.check()
    with contextlib.closing(maintainer.engine.open_entry(
            f'M-{transaction_id.hex()}')) as recipe:
        try:
            maintainer.count(batch, recipe, write)
        except recipes.RecipeError as e:
            raise exceptions.DamagedError(str(e)) from e
    maintainer.settle(batch)


# -- choosing -----------------------------------------------------------------

class _Replacements:
    """Blocks to replace, sorted.

    Each block is there once, and none is replaced by a block that is replaced
    itself. If two classes have a block in common, the next run replaces what
    this one leaves out.

    :ivar old: the addresses of the blocks
    :ivar new: the addresses of the blocks that replace them
    :ivar lengths: the lengths of the blocks
    :ivar kept: the addresses under which the pairs are known
    """

    def __init__(self, chosen: bytes) -> None:
        words = block_addresses.unpack(
            _engine.replacements_sort(chosen), 'Q')
        self.old, self.new, self.lengths, self.kept = (
            words[i::_REPLACEMENT_WORDS] for i in range(_REPLACEMENT_WORDS))

    def __len__(self) -> int:
        return len(self.old)

    def mapping(self) -> bytes:
        """Pairs of old and new addresses."""
        pairs = array.array('Q', bytes(duplicate_pairs.PAIR.size * len(self)))
        pairs[::2], pairs[1::2] = self.old, self.new
        return block_addresses.pack(pairs, 'Q')


class _Counts:
    """The reference counts of blocks, for a few groups at a time."""

    def __init__(self, catalog: _Catalog) -> None:
        self._group = functools.lru_cache(_CACHED_COUNTS)(catalog.counts)

    def of(self, addresses: bytes) -> bytes:
        """The counts of sorted addresses, 32 bits each."""
        return b''.join([
            _engine.pick(self._group(group), _COUNT_BYTES, 0, some)
            for group, some in block_addresses.cut_by_group(addresses)])


# -- a run --------------------------------------------------------------------

class _Run:
    def __init__(self, maintainer: maintainer_role.Maintainer,
                 pace: pacing.Pace, exclude: Exclude | None) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._exclude = exclude or (lambda facts: False)
        self._known = duplicate_pairs.Duplicates(maintainer, pace)
        self._scanned = 0
        self._by_value = (
            maintainer.repository.parameters.verify == 'bytes')
        # True if the object store did not give a block in this run. It is not
        # asked again for blocks that are to stay.
        self._unavailable = False
        self._result = Result()

    def plan(self) -> Plan:
        foreseen = accounting.Accountant(
            self._maintainer, self._pace).foresee()
        self._scanned = self._known.catch_up()
        found = total = 0
        images: set[str] = set()
        for chosen in self._rounds(foreseen):
            found += len(chosen)
            total += sum(chosen.lengths)
            images.update(self._images_with(
                block_addresses.pack(chosen.old, 'Q')))
        return Plan(self._scanned, found, total, len(images))

    def run(self) -> Result:
        # Committed recipes use their blocks, even if not counted yet.
        accounting.run_once(self._maintainer, self._pace)
        self._scanned = self._known.catch_up()
        for chosen in self._rounds():
            self._merge(self._without_damaged(chosen))
        self._result.scanned = self._scanned
        return self._result

    def _rounds(self, foreseen: accounting.Foreseen | None = None
                ) -> Iterator[_Replacements]:
        """The blocks to replace, a bounded number at a time."""
        chosen: list[bytes] = []
        size = 0
        for group in self._maintainer.catalog.groups_with_duplicates():
            # An earlier round may have changed the counts.
            counts = _Counts(foreseen or self._maintainer.catalog)
            for pairs in duplicate_pairs.portions(
                    self._maintainer.catalog.duplicates(group)):
                blocks = duplicate_pairs.look(self._maintainer, pairs)
                chosen.append(_engine.pairs_choose(
                    pairs, *blocks, counts.of(blocks.addresses)))
                size += len(chosen[-1])
                self._pace.check()
            if size >= ROUND_BLOCKS * _REPLACEMENT_BYTES:
                yield _Replacements(b''.join(chosen))
                chosen, size = [], 0
        if size:
            yield _Replacements(b''.join(chosen))

    def _images_with(self, addresses: bytes) -> Iterator[str]:
        """The images to merge that name any of the sorted addresses."""
        def is_wanted(recipe: _engine.Recipe, naming: Iterator[bytes]) -> bool:
            return any(naming) and not self._exclude(refcounts.facts_of(
                recipe.header(), recipe.measure()))
        images = self._maintainer.repository.recipes()
        for done, image in enumerate(block_addresses.look_for(
                self._maintainer.engine, images, addresses, is_wanted)):
            if image.found:
                yield image.image_id
            self._pace.step(done + 1, len(images), 'merging images',
                            cost=image.cost)

    def _without_damaged(self, chosen: _Replacements) -> _Replacements:
        """The replacements whose new block can be read.

        Merging makes one block out of several, each of which could replace
        the others if these went bad. So the block that stays must be good: a
        reader would get it (I7). The scrub finds bad ones; then the next run
        takes another block.

        A cold block is read only where bytes are compared anyway. Otherwise
        its fingerprint stands for it: it was verified when its group became
        cold, and its object is never written again.
        """
        news = sorted(set(chosen.new))
        bad: set[int] = set()
        begin = 0
        while begin < len(news):
            end = self._end_of_reading(news, begin)
            bad.update(self._damaged_of(news[begin], news[end - 1]))
            begin = end
        if not bad:
            return chosen
        return _Replacements(block_addresses.pack(
            itertools.chain.from_iterable(
                words for words in zip(chosen.old, chosen.new, chosen.lengths,
                                       chosen.kept) if words[1] not in bad),
            'Q'))

    @staticmethod
    def _end_of_reading(news: list[int], begin: int) -> int:
        """The end of the blocks to read in one go, from one on."""
        first = news[begin]
        group = block_addresses.group_of(first)
        end = bisect.bisect_left(
            news, min(first + _VERIFIED_AT_ONCE,
                      block_addresses.address(group + 1, 0)), begin)
        if news[end - 1] - first == end - 1 - begin:
            return end      # without gaps, as most are
        for at in range(begin + 1, end):
            if news[at] - news[at - 1] > _NEAR:
                return at
        return end

    def _damaged_of(self, first: int, last: int) -> set[int]:
        """The unverifiable addresses from first to last, in one group."""
        number = block_addresses.group_of(first)
        every = set(range(first, last + 1))
        try:
            is_cold = self._maintainer.engine.group_facts(number)['is_cold']
            if is_cold and self._unavailable:
                return every
            cost, damaged, invalid, _ = _engine.verify_slots(
                self._maintainer.handle, number,
                block_addresses.slot_of(first), last - first + 1,
                False, 0, *([0] if is_cold and not self._by_value else []))
        except exceptions.UnavailableError as e:
            self._give_up_cold(e)
            return every
        except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
            return every
        self._pace.step(self._pace.done, self._pace.total,
                        'reading blocks that are to stay', cost=cost)
        return set(block_addresses.of_slots(
            number, block_addresses.unpack(damaged + invalid)))

    def _give_up_cold(self, error: Exception) -> None:
        LOG.warning('Blocks of cold groups are not merged now: %s', error)
        self._unavailable = True

    # -- merging ----------------------------------------------------------

    def _merge(self, chosen: _Replacements) -> None:
        mapping = chosen.mapping()
        olds = block_addresses.pack(chosen.old, 'Q')
        collisions: set[int] = set()
        merged = 0
        for image_id in self._images_with(olds):
            merged += self._merge_one(image_id, mapping, collisions)
            if merged >= ACCOUNT_EVERY:
                accounting.run_once(self._maintainer, self._pace)
                merged = 0
        accounting.run_once(self._maintainer, self._pace)
        if collisions:
            collided = itertools.chain.from_iterable(
                (kept, old if old != kept else new)
                for old, new, kept in zip(chosen.old, chosen.new, chosen.kept)
                if old in collisions)
            self._known.forget(block_addresses.pack(collided, 'Q'))
        self._result.duplicates += len(chosen)
        counts = block_addresses.unpack(
            _Counts(self._maintainer.catalog).of(olds))
        self._result.merged_blocks += counts.count(0)
        self._result.merged_bytes += sum(itertools.compress(
            chosen.lengths, map(operator.not_, counts)))

    def _merge_one(self, image_id: str, mapping: bytes,
                   collisions: set[int]) -> bool:
        """Merge an image; return whether it left entries in the spool."""
        try:
            merged = merge_image(self._maintainer, image_id, mapping,
                                 self._pace)
        except exceptions.ImageNotFound:
            return False
        except exceptions.BusyError:
            self._result.busy += 1
            return False
        except database.CatalogError:
            raise
        except (exceptions.UnavailableError, *exceptions.UNREADABLE) as e:
            self._result.failed[image_id] = str(e)
            return True
        collisions.update(block_addresses.unpack(merged.collisions, 'Q'))
        self._result.images += merged.exchanged
        self._result.gave_up += merged.replaced > 0 and not merged.exchanged
        return merged.replaced > 0
