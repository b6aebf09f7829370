# SPDX-License-Identifier: Apache-2.0

"""Merging: finds the duplicates that uploads missed, and shares them.

A run has three stages.

*Finding.* The run merges the entries published since the last run, sorted by
their fingerprints, into the exact index, page by page. A block whose
fingerprint the index already has is a *duplicate*. The pair goes into the
catalog in the same batch that writes the page, and stays there until one of
the two blocks is freed. A group's cursor moves on in a later batch than all
pairs found in the group. So a run may stop, or be killed, anywhere: what it
found is known, and the next run finds the rest again.

*Choosing.* Blocks of one fingerprint form a class. Addresses of the class that
counted recipes name are *in use*; the lowest of them replaces all others.
Addresses that nobody uses are left to the collection: merging to one would
bring garbage back. While such a block lives, the next upload may find and use
it, so its pair stays.

*Merging.* Each image that names an address to replace gets another recipe
(N10). The next run looks again at images that are in use now, or opted out.

The index only points out pairs. It may have records of blocks that were freed,
damaged, or lost with their group. Such a record makes way as soon as a live
block with the same fingerprint appears. The index knows 8 bytes of each
fingerprint. If two different blocks have these in common, the index has only
the older one, and misses duplicates of the other. The same holds for blocks of
two scopes, which no pair joins: their fingerprints can be alike only where
bytes are compared. Only :class:`_engine.Merge` decides whether two blocks are
equal. Where it compares bytes, blocks with equal fingerprints may differ. Then
the run forgets their pair, and may miss duplicates of the newer block.
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
import struct
from typing import Any
from typing import NamedTuple

from dedupd.tasks import accounting
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import task
from glance_dedup.maintenance import accounts
from glance_dedup.maintenance import addresses as addresses_module
from glance_dedup.maintenance import catalog as catalog_module
from glance_dedup.maintenance import database
from glance_dedup.maintenance import maintainer as maintainer_module
from glance_dedup.maintenance import recipes
from glance_dedup.maintenance import records

LOG = logging.getLogger(__name__)

#: The most index records sorted at once; each takes 45 bytes meanwhile.
SORTED_RECORDS = 4 << 20

#: Pairs examined together, and blocks merged in one round. A round reads each
#: recipe once.
PAIRS_AT_ONCE = 1 << 17
ROUND_BLOCKS = 1 << 19

#: The index is rebuilt with more pages when its pages could have more records
#: than the first number, on average. Then they have at most the second.
PAGE_RECORDS_MOST = 512
PAGE_RECORDS = 256

#: The index is rebuilt when it has this many records more than twice what the
#: groups can have. A run examines this many pages to estimate that.
WORN_RECORDS = 1 << 16
PAGES_LOOKED_AT = 64

#: The spool is settled after this many images, because each leaves two
#: recipes in it.
ACCOUNT_EVERY = 64

_COUNT_BYTES = 4
_REPLACEMENT_BYTES = 32
_REPLACEMENT_WORDS = 4
_ENTRIES_AT_ONCE = 32768
_COARSE_BITS = 8
# Blocks that are to stay, and no more than _NEAR addresses apart, are read in
# one go with the blocks between them; at most _VERIFIED_AT_ONCE together.
_NEAR = 64
_VERIFIED_AT_ONCE = 4096
_CACHED_COUNTS = 256    # groups; 128 KiB each

_PAIR = struct.Struct('<QQ')

_Catalog = catalog_module.Catalog | accounting.Foreseen
Facts = dict[str, Any]
Exclude = Callable[[Facts], bool]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run would do."""

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
    """What a run did."""

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
    """Images that could not be merged, each with its error; mostly damage."""


def plan(maintainer: maintainer_module.Maintainer,
         pace: task.Pace | None = None,
         exclude: Exclude | None = None) -> Plan:
    """Predict what a run would do.

    This brings the index up to date, which is derived data, and changes
    nothing else.

    :param exclude: as for run_once
    :raises task.Stopped: the next run knows the duplicates found so far
    """
    pace = pace or task.Pace()
    return maintainer.guard(
        lambda: _Run(maintainer, pace, exclude).plan(), pace.step)


def run_once(maintainer: maintainer_module.Maintainer, pace: task.Pace,
             exclude: Exclude | None = None, dry_run: bool = False
             ) -> Result | Plan:
    """Find duplicates, and merge the images that name them.

    :param exclude: takes the ledger's facts of an image (``image_id``,
        ``project``, ...), and says whether its recipe must stay as it is
    :param dry_run: only plan
    :raises task.Stopped: between two steps; the steps before it stand
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
    """Whether the image has the new recipe."""
    collisions: bytes
    """Old addresses of blocks that are not equal to the new ones."""


def merge_image(maintainer: maintainer_module.Maintainer, image_id: str,
                mapping: bytes, pace: task.Pace) -> Merged:
    """Rewrite an image's recipe to other addresses of the same blocks (N10).

    This leaves entries in the spool, which the accounting settles.

    :param mapping: pairs of addresses, packed for the engine
    :raises BusyError: if the lock of a group was refused
    :raises DamagedError: if an old and a new block are not equal
    :raises ImageNotFound: if the image does not exist
    :raises task.Stopped: the image keeps its old recipe
    """
    with contextlib.closing(_engine.Merge(
            maintainer.engine, image_id, mapping)) as merge:    # N10.1, N10.2
        if not merge.replaced:
            return Merged(0, False, merge.collisions)
        _count(maintainer, pace, merge)                         # N10.3
        return Merged(merge.replaced, merge.exchange(),         # N10.4 to 7
                      merge.collisions)


def _count(maintainer: maintainer_module.Maintainer, pace: task.Pace,
           merge: _engine.Merge) -> None:
    """Count the whole new recipe, in as many steps as it takes (N10.3).

    If this ends between two steps, the accounting goes back.
    """
    batch = maintainer.catalog.batch()

    def write() -> None:
        maintainer.settle(batch)
        batch.clear()
        pace.check()
    txid = merge.header()['transaction_id']
    with contextlib.closing(
            maintainer.engine.open_entry(f'M-{txid.hex()}')) as recipe:
        try:
            maintainer.count(batch, recipe, write)
        except recipes.RecipeError as e:
            raise exceptions.DamagedError(str(e)) from e
    maintainer.settle(batch)


# -- blocks, by their addresses -----------------------------------------------

class _Blocks(NamedTuple):
    """The entries of some blocks, packed for the engine."""

    addresses: bytes
    """Sorted, each once."""
    entries: bytes
    """One entry for each address; an empty one if it cannot be read."""

    def entry(self, address: int) -> addresses_module.Entry:
        """The entry of one of the addresses."""
        at = bisect.bisect_left(
            addresses_module.unpack(self.addresses, 'Q'), address)
        return addresses_module.entry_at(self.entries, at)


def _look(maintainer: maintainer_module.Maintainer, pairs: bytes) -> _Blocks:
    """Read the entries of all blocks in pairs."""
    addresses = _engine.pair_addresses(pairs)
    entries = []
    size = addresses_module.ENTRY_BYTES
    for number, some in addresses_module.cut_by_group(addresses):
        slots = addresses_module.unpack(some, 'Q')
        first = addresses_module.slot_of(slots[0])
        count = slots[-1] - slots[0] + 1
        try:
            listing = maintainer.engine.entries(number, first, count)
        except (exceptions.ImageNotFound, exceptions.InvalidParameter,
                *exceptions.UNREADABLE):
            listing = bytes(size * count)
        entries.append(_engine.pick(listing, size, first, some))
    return _Blocks(addresses, b''.join(entries))


def _portions(pairs: bytes) -> Iterator[bytes]:
    """Cut sorted pairs into portions; pairs of one address stay together."""
    firsts = addresses_module.unpack(pairs, 'Q')[::2]
    begin = 0
    while begin < len(firsts):
        last = min(begin + PAIRS_AT_ONCE, len(firsts)) - 1
        end = bisect.bisect_right(firsts, firsts[last], last)
        yield pairs[begin * _PAIR.size:end * _PAIR.size]
        begin = end


# -- the exact index ----------------------------------------------------------

class _Page(NamedTuple):
    """A page of the index, before and after records are added."""

    number: int
    old: bytes
    added: bytes
    new: bytes
    pairs: bytes
    """Addresses that the page does not keep, each with the one it keeps."""


class _Index:
    """The exact index, and the known duplicates, both in the catalog."""

    def __init__(self, maintainer: maintainer_module.Maintainer,
                 pace: task.Pace) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._scopes: dict[int, bytes] = {}     # by group
        self.scanned = 0

    def catch_up(self) -> None:
        """Bring the index up to date."""
        published = self._published()
        self._make_room(sum(published.values()))
        self._revise()
        self._scan(published)

    def _published(self) -> dict[int, int]:
        published = {}
        for number in self._maintainer.engine.groups():
            # An unreadable group is scanned once it can be read.
            with contextlib.suppress(exceptions.ImageNotFound,
                                     *exceptions.UNREADABLE):
                facts = self._maintainer.engine.group_facts(number)
                published[number] = facts['published']
                self._scopes[number] = facts['scope']
        return published

    # -- its size ---------------------------------------------------------

    def _make_room(self, records: int) -> None:
        """Begin a new index if the pages get too large or the index is worn.

        The index is worn if most of its records are of groups that no longer
        exist: such records make way only for blocks with their fingerprints.

        All cursors go before the first page does. So at any moment the
        records that a page lacks are yet to be found, and all duplicates are
        found again. Each step is synced, because a crash may lose an unsynced
        write and keep a later one.

        :param records: how many the existing groups can have
        """
        catalog = self._maintainer.catalog
        old_bits = catalog.index_bits
        if (records <= PAGE_RECORDS_MOST << old_bits
                and self._estimate() <= 2 * records + WORN_RECORDS):
            return
        bits = old_bits
        while records > PAGE_RECORDS << bits:
            bits += 1
        batch = catalog.batch()
        for number, facts in catalog.groups():
            if facts['indexed']:
                catalog.set_group(batch, number, indexed=0)
        for number in catalog.groups_with_duplicates():
            catalog.set_duplicates(batch, number, b'')
        self._maintainer.write(batch, sync=True)
        batch = catalog.batch()
        for number in range(1 << old_bits):
            catalog.set_index_page(batch, number, b'')
            if len(batch) >= 1 << 16:
                self._maintainer.write(batch, sync=True)
                batch = catalog.batch()
                self._pace.check()
        self._maintainer.write(batch, sync=True, index_bits=bits)

    def _estimate(self) -> float:
        """Estimate the number of records in the index from some of its pages.

        Fingerprints are evenly spread, so records are evenly spread over
        pages.
        """
        catalog = self._maintainer.catalog
        pages = 1 << catalog.index_bits
        looked_at = range(0, pages, max(1, pages // PAGES_LOOKED_AT))
        return pages / len(looked_at) * sum(
            len(catalog.index_page(number)) for number in looked_at) / (
                records.INDEX_RECORD_BYTES)

    # -- adding records ---------------------------------------------------

    def _scan(self, published: dict[int, int]) -> None:
        catalog = self._maintainer.catalog
        cursors = {number: catalog.group(number)['indexed']
                   for number in published}
        total = sum(max(0, published[number] - first)
                    for number, first in cursors.items())
        read: list[bytes] = []
        moved: dict[int, int] = {}
        size = 0
        for number, first in sorted(cursors.items()):
            while first < published[number]:
                count = min(published[number] - first, _ENTRIES_AT_ONCE)
                records = self._read(number, first, count)
                if records is None:
                    break
                first += count
                read.append(records)
                moved[number] = first
                size += count
                self.scanned += count
                if size >= SORTED_RECORDS:
                    self._add_read(read, moved)
                    read, moved, size = [], {}, 0
                self._pace.step(self.scanned, total, 'reading new entries',
                                cost=addresses_module.ENTRY_BYTES * count)
        self._add_read(read, moved)

    def _read(self, number: int, first: int, count: int) -> bytes | None:
        try:
            return _engine.index_records(
                self._maintainer.engine.entries(number, first, count),
                number, first)
        except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
            return None

    def _add_read(self, read: list[bytes], moved: dict[int, int]) -> None:
        """Add records, and only then move the cursors."""
        self._add(_engine.index_sort(b''.join(read)))
        batch = self._maintainer.catalog.batch()
        for number, slot in moved.items():
            self._maintainer.catalog.set_group(batch, number, indexed=slot)
        if moved:
            self._maintainer.write(batch)

    def _add(self, records: bytes) -> None:
        """Add sorted records of live blocks."""
        catalog = self._maintainer.catalog
        bits = catalog.index_bits
        pages: list[_Page] = []
        size = pairs = 0
        # Two steps, so that only one part at a time is in small pieces.
        for _, part in _engine.index_split(records, min(bits, _COARSE_BITS)):
            for number, added in _engine.index_split(part, bits):
                page = self._update(number, catalog.index_page(number), added)
                pages.append(page)
                size += len(page.new)
                pairs += len(page.pairs) // _PAIR.size
                if (size >= maintainer_module.BATCH_BYTES
                        or pairs >= PAIRS_AT_ONCE):
                    self._write(pages)
                    pages, size, pairs = [], 0, 0
            self._pace.check()
        self._write(pages)

    def _update(self, number: int, old: bytes, added: bytes,
                removed: bytes = b'') -> _Page:
        try:
            new, pairs = _engine.index_update(old, added, removed)
        except ValueError as e:
            raise database.CatalogError(
                f'page {number} of the index is damaged: {e}')
        return _Page(number, old, added, new, pairs)

    def _write(self, pages: list[_Page]) -> None:
        """Write pages, and the duplicates found in them, at once."""
        pairs = b''.join([page.pairs for page in pages])
        blocks = _look(self._maintainer, pairs)
        found, stale = _engine.pairs_judge(pairs, *blocks)
        found = self._within_scopes(found)
        damaged: list[tuple[int, int]] = []
        if stale:
            pages = [self._without_stale(page, blocks, damaged)
                     for page in pages]
            found, _ = _engine.pairs_judge(
                b''.join([page.pairs for page in pages]), *blocks)
            found = self._within_scopes(found)
        batch = self._maintainer.catalog.batch()
        for page in pages:
            self._maintainer.catalog.set_index_page(
                batch, page.number, page.new)
        heirs = {other: kept for kept, other in _PAIR.iter_unpack(
            _engine.pairs_named(found, b''.join([p.old for p in pages])))}
        found += self._within_scopes(
            addresses_module.pack(
                itertools.chain.from_iterable(damaged), 'Q'))
        self._remember(batch, found + self._bequeath(batch, heirs))
        if len(batch):
            # Synced, because a crash may lose unsynced pages and keep the
            # cursors, which each accounting step writes, too.
            self._maintainer.write(batch, sync=True)

    def _within_scopes(self, pairs: bytes) -> bytes:
        """The pairs whose two blocks are of one scope."""
        if len(set(self._scopes.values())) < 2:
            return pairs
        both = addresses_module.unpack(pairs, 'Q')
        firsts, seconds = both[::2], both[1::2]
        good = [self._scopes.get(addresses_module.group_of(a))
                == self._scopes.get(addresses_module.group_of(b))
                for a, b in zip(firsts, seconds)]
        if all(good):
            return pairs
        LOG.warning('%d pairs of blocks of different scopes have the same '
                    'fingerprints: they stay apart', good.count(False))
        return addresses_module.pack(
            itertools.chain.from_iterable(itertools.compress(
                zip(firsts, seconds), good)), 'Q')

    def _without_stale(self, page: _Page, blocks: _Blocks,
                       damaged: list[tuple[int, int]]) -> _Page:
        """The page without records of blocks that do not live.

        Live blocks that were to be added take their places. A damaged block
        is noted as a duplicate of the live one, which can heal it.
        """
        _, stale = _engine.pairs_judge(page.pairs, *blocks)
        heirs: dict[int, int] = {}
        for other, kept in _PAIR.iter_unpack(stale):
            heirs[kept] = min(other, heirs.get(kept, other))
        if not heirs:
            return page
        removed = []
        for kept, heir in heirs.items():
            gone = blocks.entry(kept)
            fingerprint = blocks.entry(heir).fingerprint
            removed.append((fingerprint[:8], kept))
            if (gone.state == addresses_module.DAMAGED
                    and gone.fingerprint == fingerprint):
                damaged.append((heir, kept))
        return self._update(page.number, page.old, page.added, b''.join(
            itertools.starmap(records.index_record, sorted(removed))))

    # -- known duplicates -------------------------------------------------

    def _bequeath(self, batch: database.Batch, heirs: dict[int, int]
                  ) -> bytes:
        """Take over the pairs of blocks that the index no longer has.

        So blocks with one fingerprint remain one class.

        :param heirs: maps each such block to the one that the index has now
        :returns: the same pairs, of the heirs
        """
        catalog = self._maintainer.catalog
        taken: list[int] = []
        for group in set(map(addresses_module.group_of, heirs)):
            known = list(_PAIR.iter_unpack(catalog.duplicates(group, batch)))
            for kept, other in known:
                if kept in heirs:
                    taken += (heirs[kept], other)
            catalog.set_duplicates(batch, group, addresses_module.pack(
                itertools.chain.from_iterable(
                    pair for pair in known if pair[0] not in heirs), 'Q'))
        return addresses_module.pack(taken, 'Q')

    def _remember(self, batch: database.Batch, found: bytes) -> None:
        catalog = self._maintainer.catalog
        for group, some in addresses_module.cut_by_group(
                _engine.pairs_sort(found), _PAIR.size):
            known = catalog.duplicates(group, batch)
            catalog.set_duplicates(
                batch, group, _engine.pairs_sort(known + some))

    def forget(self, pairs: bytes) -> None:
        """Forget known duplicates."""
        catalog = self._maintainer.catalog
        batch = catalog.batch()
        for group, some in addresses_module.cut_by_group(
                _engine.pairs_sort(pairs), _PAIR.size):
            catalog.set_duplicates(batch, group, _engine.pairs_without(
                catalog.duplicates(group), some))
        if len(batch):
            self._maintainer.write(batch)

    def _revise(self) -> None:
        """Forget pairs of which a block is gone.

        If the index had that block, this puts the others into the index
        again, before it forgets them as its duplicates.
        """
        for group in self._maintainer.catalog.groups_with_duplicates():
            for pairs in _portions(self._maintainer.catalog.duplicates(group)):
                gone, again = _engine.pairs_revise(
                    pairs, *_look(self._maintainer, pairs))
                if again:
                    self._add(_engine.index_sort(again))
                if gone:
                    self.forget(gone)
                self._pace.check()


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
    :ivar words: all of these, one replacement after the other
    """

    def __init__(self, chosen: bytes) -> None:
        self.words = addresses_module.unpack(
            _engine.replacements_sort(chosen), 'Q')
        self.old, self.new, self.lengths, self.kept = (
            self.words[i::_REPLACEMENT_WORDS]
            for i in range(_REPLACEMENT_WORDS))

    def __len__(self) -> int:
        return len(self.old)

    def mapping(self) -> bytes:
        """Pairs of old and new addresses."""
        pairs = array.array('Q', bytes(_PAIR.size * len(self)))
        pairs[::2], pairs[1::2] = self.old, self.new
        return addresses_module.pack(pairs, 'Q')


class _Counts:
    """How often blocks are named, for a few groups at a time."""

    def __init__(self, catalog: _Catalog) -> None:
        self._group = functools.lru_cache(_CACHED_COUNTS)(catalog.counts)

    def of(self, addresses: bytes) -> bytes:
        """The counts of sorted addresses, 32 bits each."""
        return b''.join([
            _engine.pick(self._group(group), _COUNT_BYTES, 0, some)
            for group, some in addresses_module.cut_by_group(addresses)])


# -- a run --------------------------------------------------------------------

class _Run:
    def __init__(self, maintainer: maintainer_module.Maintainer,
                 pace: task.Pace, exclude: Exclude | None) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._exclude = exclude or (lambda facts: False)
        self._index = _Index(maintainer, pace)
        self._result = Result()

    def plan(self) -> Plan:
        foreseen = accounting.Accountant(
            self._maintainer, self._pace).foresee()
        self._index.catch_up()
        duplicates = total = 0
        images: set[str] = set()
        for chosen in self._rounds(foreseen):
            duplicates += len(chosen)
            total += sum(chosen.lengths)
            images.update(self._images_with(
                addresses_module.pack(chosen.old, 'Q')))
        return Plan(self._index.scanned, duplicates, total, len(images))

    def run(self) -> Result:
        # Committed recipes use their blocks, even if not counted yet.
        accounting.run_once(self._maintainer, self._pace)
        self._index.catch_up()
        for chosen in self._rounds():
            self._merge(_Replacements(self._without_damaged(chosen.words)))
        self._result.scanned = self._index.scanned
        return self._result

    def _rounds(self, foreseen: accounting.Foreseen | None = None
                ) -> Iterator[_Replacements]:
        """The blocks to replace, a bounded number at a time."""
        chosen: list[bytes] = []
        size = 0
        for group in self._maintainer.catalog.groups_with_duplicates():
            # An earlier round may have changed the counts.
            counts = _Counts(foreseen or self._maintainer.catalog)
            for pairs in _portions(self._maintainer.catalog.duplicates(group)):
                blocks = _look(self._maintainer, pairs)
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
            return any(naming) and not self._exclude(accounts.facts_of(
                recipe.header(), recipe.measure()))
        images = self._maintainer.repository.recipes()
        for done, image in enumerate(addresses_module.look_for(
                self._maintainer.engine, images, addresses, is_wanted)):
            if image.found:
                yield image.image_id
            self._pace.step(done + 1, len(images), 'merging images',
                            cost=image.cost)

    def _without_damaged(self, words: array.array) -> bytes:
        """The replacements whose new block can be read.

        Merging makes one block out of several, each of which could stand in
        if the others went bad. So the block that stays must be good. The scrub
        finds bad ones; then the next run takes another block.
        """
        news = sorted(set(words[1::_REPLACEMENT_WORDS]))
        bad: set[int] = set()
        begin = 0
        for end in range(1, len(news) + 1):
            if end < len(news) and self._are_near(news, begin, end):
                continue
            bad.update(self._damaged_of(news[begin], news[end - 1]))
            begin = end
        good = array.array('Q')
        for at in range(0, len(words), _REPLACEMENT_WORDS):
            if words[at + 1] not in bad:
                good.extend(words[at:at + _REPLACEMENT_WORDS])
        return addresses_module.pack(good, 'Q')

    def _are_near(self, news: list[int], begin: int, end: int) -> bool:
        """Whether to read a block in one go with those before it."""
        return (news[end] - news[end - 1] <= _NEAR
                and news[end] - news[begin] < _VERIFIED_AT_ONCE
                and addresses_module.group_of(news[end])
                == addresses_module.group_of(news[begin]))

    def _damaged_of(self, first: int, last: int) -> set[int]:
        """The unverifiable addresses from first to last, in one group."""
        number = addresses_module.group_of(first)
        try:
            cost, damaged, invalid, _ = _engine.verify_slots(
                self._maintainer.handle, number,
                addresses_module.slot_of(first), last - first + 1)
        except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
            return set(range(first, last + 1))
        self._pace.step(self._pace.done, self._pace.total,
                        'reading blocks that are to stay', cost=cost)
        return set(addresses_module.of_slots(
            number, addresses_module.unpack(damaged + invalid)))

    # -- merging ----------------------------------------------------------

    def _merge(self, chosen: _Replacements) -> None:
        mapping = chosen.mapping()
        olds = addresses_module.pack(chosen.old, 'Q')
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
            self._index.forget(addresses_module.pack(collided, 'Q'))
        self._result.duplicates += len(chosen)
        counts = addresses_module.unpack(
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
        except exceptions.UNREADABLE as e:
            self._result.failed[image_id] = str(e)
            return True
        collisions.update(addresses_module.unpack(merged.collisions, 'Q'))
        self._result.images += merged.exchanged
        self._result.gave_up += merged.replaced > 0 and not merged.exchanged
        return merged.replaced > 0
