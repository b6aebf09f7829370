# SPDX-License-Identifier: Apache-2.0

"""Merging: the duplicates that uploads missed are found, and shared.

A run goes three times through what it knows.

*Finding.* Entries published since the last run are merged, sorted by their
fingerprints, into the exact index, page by page. A block whose fingerprint the
index has already is a *duplicate*. The pair goes into the catalog in the very
batch that writes the page, and stays there until one of the two blocks is
freed; a group's cursor moves on in a later batch than all that was found in
it. So a run may stop, or be killed, anywhere: what it found is known, and what
is not known is found again.

*Choosing.* Blocks of one fingerprint form a class. Those of its addresses that
counted recipes name are *in use*; all are to be replaced by the lowest of
them. An address that nobody uses is left to the collection: to merge to it
would bring garbage back. As long as it lives the next upload may find and use
it, so its pair stays.

*Merging.* Each image that names an address to be replaced gets another recipe
(N10). Whatever is in use just now, or opted out, is looked at again by the
next run.

The index only points out pairs. It may have records of blocks that were freed,
damaged, or lost with their group: such a record makes way for a live block as
soon as one with its fingerprint is met. It knows 8 bytes of a fingerprint; if
two different blocks have these in common, only the older is in it, and
duplicates of the other are missed. The same holds for blocks of two scopes,
which no pair joins: only where bytes are compared can their fingerprints be
alike. Whether two blocks are equal is decided by :class:`_engine.Merge` alone.
Where that compares bytes, blocks with equal fingerprints may differ: their
pair is forgotten, and duplicates of the newer one may be missed.
"""

import array
import bisect
import collections
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
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
from glance_dedup.maintenance import addresses as addresses_module
from glance_dedup.maintenance import catalog as catalog_module
from glance_dedup.maintenance import maintainer as maintainer_module

LOG = logging.getLogger(__name__)

#: Records of the index that are sorted at once; each takes 45 bytes meanwhile.
SORTED_RECORDS = 4 << 20

#: Pairs that are looked at together, and blocks that are merged in one round,
#: in which each recipe is read once.
PAIRS_AT_ONCE = 1 << 17
ROUND_BLOCKS = 1 << 19

#: The index is made anew with more pages when they could have more records
#: than the first number, on average; then they have at most the second.
PAGE_RECORDS_MOST = 512
PAGE_RECORDS = 256

#: The index is made anew when it has this many records more than twice what
#: the groups can have; so many pages are looked at to find out.
WORN_RECORDS = 1 << 16
PAGES_LOOKED_AT = 64

#: Images after which the spool is settled, since each leaves two recipes in
#: it.
ACCOUNT_EVERY = 64

_COUNT_BYTES = 4
_RECORD_BYTES = 13
_REPLACEMENT_BYTES = 32
_REPLACEMENT_WORDS = 4
_ENTRIES_AT_ONCE = 32768
_COARSE_BITS = 8
# Blocks that are to stay are read in one go with those between them, if there
# are no more than so many; and no more than so many at once.
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
    """Blocks in use that would be replaced by equal ones."""
    bytes: int
    """Of these, before compression."""
    images: int
    """That would get other recipes."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run did."""

    scanned: int
    """Entries that were new to the index."""
    duplicates: int
    """Blocks in use that were to be replaced by equal ones."""
    merged_blocks: int
    """Of these, those that no image needs any more."""
    merged_bytes: int
    """Of these, before compression."""
    images: int
    """That have other recipes now."""
    gave_up: int
    """Images that were deleted, or in deletion, meanwhile."""
    busy: int
    """Images put off to the next run, since the collector is in a group."""
    failed: dict[str, str]
    """Images that could not be merged, and why: mostly damage."""


def plan(maintainer: maintainer_module.Maintainer,
         pace: task.Pace | None = None,
         exclude: Exclude | None = None) -> Plan:
    """What a run would do.

    It brings the index up to date, which is derived, and changes nothing else.

    :param exclude: as for run_once
    :raises task.Stopped: what was found is known to the next run
    """
    pace = pace or task.Pace()
    return maintainer.guard(
        lambda: _Run(maintainer, pace, exclude).plan(), pace.step)


def run_once(maintainer: maintainer_module.Maintainer, pace: task.Pace,
             exclude: Exclude | None = None, dry_run: bool = False
             ) -> Result | Plan:
    """Find duplicates, and merge what can be merged.

    :param exclude: says of the facts that the ledger keeps of an image
        (``image_id``, ``project``, ...) whether its recipe must stay as it is
    :param dry_run: only plan
    :raises task.Stopped: between two steps; what was done stands
    :raises NoSpaceError: there is no room for the index, or for a recipe
    """
    if dry_run:
        return plan(maintainer, pace, exclude)
    return maintainer.guard(
        lambda: _Run(maintainer, pace, exclude).run(), pace.step)


class Merged(NamedTuple):
    """What became of the merging of one image."""

    replaced: int
    """Blocks whose address was to change; 0: the image names none."""
    exchanged: bool
    """The image has the new recipe."""
    collisions: bytes
    """Old addresses of blocks that are not equal to the new ones."""


def merge_image(maintainer: maintainer_module.Maintainer, image_id: str,
                mapping: bytes, pace: task.Pace) -> Merged:
    """Rewrite an image's recipe to other addresses of the same blocks (N10).

    What it leaves in the spool is for the accounting to settle.

    :param mapping: pairs of addresses, as the engine wants them
    :raises BusyError: if the lock of a group was refused
    :raises DamagedError: if an old and a new block are not equal
    :raises ImageNotFound: as its name says
    :raises task.Stopped: the image is what it was
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
    """Count the new recipe, all of it, in as many steps as it takes (N10.3).

    If that ends between two steps, the accounting goes back.
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
        except maintainer_module.RecipeError as e:
            raise exceptions.DamagedError(str(e)) from e
    maintainer.settle(batch)


# -- blocks, by their addresses -----------------------------------------------

class _Blocks(NamedTuple):
    """What the entries of some blocks say; packed, as the engine wants it."""

    addresses: bytes
    """Sorted, each once."""
    entries: bytes
    """Of those that cannot be had: empty ones."""

    def __getitem__(self, address: int) -> addresses_module.Entry:
        at = bisect.bisect_left(
            addresses_module.unpack(self.addresses, 'Q'), address)
        return addresses_module.entry_at(self.entries, at)


def _look(maintainer: maintainer_module.Maintainer, pairs: bytes) -> _Blocks:
    """What the entries of all blocks in pairs say now."""
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


def _record(fingerprint: bytes, address: int) -> bytes:
    return fingerprint[:8] + address.to_bytes(5, 'little')


def _portions(pairs: bytes) -> Iterator[bytes]:
    """Sorted pairs, in portions that do not part those of one address."""
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
    """Addresses not kept, and kept."""


class _Index:
    """The exact index, and the known duplicates, both in the catalog."""

    def __init__(self, maintainer: maintainer_module.Maintainer,
                 pace: task.Pace) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._scopes: dict[int, bytes] = {}     # of the groups
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
            # One that cannot be read is found when it can be.
            with contextlib.suppress(exceptions.ImageNotFound,
                                     *exceptions.UNREADABLE):
                facts = self._maintainer.engine.group_facts(number)
                published[number] = facts['published']
                self._scopes[number] = facts['scope']
        return published

    # -- its size ---------------------------------------------------------

    def _make_room(self, records: int) -> None:
        """Begin the index anew, if its pages get too large, or it is worn.

        It is worn if most of its records are of groups that are no more: they
        make way only for blocks with their fingerprints.

        Before the first page goes, all cursors do: at any moment what a page
        lacks is yet to be found, and all duplicates are found again. Each step
        is synced, since a crash may lose what is not and keep what follows.

        :param records: that it can have of the groups that are there
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
        """How many records the index has, judged by some of its pages.

        Fingerprints are evenly spread, and so are records over pages.
        """
        catalog = self._maintainer.catalog
        pages = 1 << catalog.index_bits
        looked_at = range(0, pages, max(1, pages // PAGES_LOOKED_AT))
        return pages / len(looked_at) * sum(
            len(catalog.index_page(number)) for number in looked_at) / (
                _RECORD_BYTES)

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
        # In two steps, so that only a part is in small pieces at a time.
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
            raise catalog_module.CatalogError(
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
            # Synced: a crash may lose what is not, and keep the cursors, which
            # each accounting step writes, too.
            self._maintainer.write(batch, sync=True)

    def _within_scopes(self, pairs: bytes) -> bytes:
        """The pairs without those of blocks of two scopes."""
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

        Their places go to the live blocks that were to be added; a damaged
        one is noted as a duplicate of the live one, which can heal it.
        """
        _, stale = _engine.pairs_judge(page.pairs, *blocks)
        heirs: dict[int, int] = {}
        for other, kept in _PAIR.iter_unpack(stale):
            heirs[kept] = min(other, heirs.get(kept, other))
        if not heirs:
            return page
        removed = []
        for kept, heir in heirs.items():
            gone, fingerprint = blocks[kept], blocks[heir].fingerprint
            removed.append((fingerprint[:8], kept))
            if (gone.state == addresses_module.DAMAGED
                    and gone.fingerprint == fingerprint):
                damaged.append((heir, kept))
        return self._update(page.number, page.old, page.added, b''.join(
            itertools.starmap(_record, sorted(removed))))

    # -- known duplicates -------------------------------------------------

    def _bequeath(self, batch: catalog_module.Batch, heirs: dict[int, int]
                  ) -> bytes:
        """Take what was known of blocks that the index has no more.

        So blocks with one fingerprint remain one class.

        :param heirs: to each such block the one that the index has now
        :returns: the same of these
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

    def _remember(self, batch: catalog_module.Batch, found: bytes) -> None:
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

        If that is the one that the index had, the others are put to the index
        again, before they are forgotten as its duplicates.
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
    """Blocks that are to be replaced, sorted.

    Each is there once, and none is replaced by one that is replaced itself:
    what is left out, if two classes have a block in common, is for the next
    run.

    :ivar old: their addresses
    :ivar new: those of the blocks that replace them
    :ivar lengths: of the blocks
    :ivar kept: by which addresses the pairs are known
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
        self._catalog = catalog
        self._groups: collections.OrderedDict[int, bytes] = (
            collections.OrderedDict())

    def of(self, addresses: bytes) -> bytes:
        """Of sorted addresses, 32 bits each."""
        return b''.join([
            _engine.pick(self._group(group), _COUNT_BYTES, 0, some)
            for group, some in addresses_module.cut_by_group(addresses)])

    def _group(self, group: int) -> bytes:
        if group not in self._groups:
            if len(self._groups) >= _CACHED_COUNTS:
                self._groups.popitem(last=False)
            self._groups[group] = self._catalog.counts(group)
        self._groups.move_to_end(group)
        return self._groups[group]


# -- a run --------------------------------------------------------------------

class _Run:
    def __init__(self, maintainer: maintainer_module.Maintainer,
                 pace: task.Pace, exclude: Exclude | None) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._exclude = exclude or (lambda facts: False)
        self._index = _Index(maintainer, pace)
        self._sums = dict.fromkeys(
            (field.name for field in dataclasses.fields(Result)), 0)
        self._failed: dict[str, str] = {}

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
        # What is committed, but not counted, is in use all the same.
        accounting.run_once(self._maintainer, self._pace)
        self._index.catch_up()
        for chosen in self._rounds():
            self._merge(_Replacements(self._without_damaged(chosen.words)))
        self._sums['scanned'] = self._index.scanned
        return Result(**{**self._sums, 'failed': self._failed})

    def _rounds(self, foreseen: accounting.Foreseen | None = None
                ) -> Iterator[_Replacements]:
        """The blocks to be replaced, a bounded number at a time."""
        chosen: list[bytes] = []
        size = 0
        for group in self._maintainer.catalog.groups_with_duplicates():
            # A round before this one may have changed the counts.
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
        """The images to be merged that name any of the sorted addresses."""
        def is_wanted(recipe: _engine.Recipe, naming: Iterator[bytes]) -> bool:
            return any(naming) and not self._exclude(catalog_module.facts_of(
                recipe.header(), recipe.measure()))
        images = sorted(self._maintainer.repository.images())
        for done, image in enumerate(addresses_module.look_for(
                self._maintainer.engine, images, addresses, is_wanted)):
            if image.found:
                yield image.image_id
            self._pace.step(done + 1, len(images), 'merging images',
                            cost=image.cost)

    def _without_damaged(self, words: array.array) -> bytes:
        """Replacements, but for those by a block that cannot be read.

        A merge makes one block out of several, each of which would do if the
        others went bad. So the one that is to stay must be good. The scrub
        finds those that are not; then another one is taken.
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
        """Whether a block is to be read in one go with those before it."""
        return (news[end] - news[end - 1] <= _NEAR
                and news[end] - news[begin] < _VERIFIED_AT_ONCE
                and addresses_module.group_of(news[end])
                == addresses_module.group_of(news[begin]))

    def _damaged_of(self, first: int, last: int) -> set[int]:
        """The addresses between these, of one group, that do not verify."""
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
        self._sums['duplicates'] += len(chosen)
        counts = addresses_module.unpack(
            _Counts(self._maintainer.catalog).of(olds))
        self._sums['merged_blocks'] += counts.count(0)
        self._sums['merged_bytes'] += sum(itertools.compress(
            chosen.lengths, map(operator.not_, counts)))

    def _merge_one(self, image_id: str, mapping: bytes,
                   collisions: set[int]) -> bool:
        """Merge an image; whether that left something in the spool."""
        try:
            merged = merge_image(self._maintainer, image_id, mapping,
                                 self._pace)
        except exceptions.ImageNotFound:
            return False
        except exceptions.BusyError:
            self._sums['busy'] += 1
            return False
        except catalog_module.CatalogError:
            raise
        except exceptions.UNREADABLE as e:
            self._failed[image_id] = str(e)
            return True
        collisions.update(addresses_module.unpack(merged.collisions, 'Q'))
        self._sums['images'] += merged.exchanged
        self._sums['gave_up'] += merged.replaced > 0 and not merged.exchanged
        return merged.replaced > 0
