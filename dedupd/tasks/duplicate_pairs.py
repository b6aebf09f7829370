# SPDX-License-Identifier: Apache-2.0

"""The known duplicates: pairs of equal blocks, in the catalog.

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

import bisect
from collections.abc import Iterable
from collections.abc import Iterator
import itertools
import logging
from typing import NamedTuple

from dedupd.tasks import exactindex
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import database
from glance_dedup.maintenance import maintainer_role

LOG = logging.getLogger(__name__)

#: A run merges the index at most so often: again, if blocks that the index had
#: are gone. The next run does the rest.
ROUNDS = 8

PAIR = exactindex.PAIR


class Blocks(NamedTuple):
    """The entries of some blocks, packed for the engine."""

    addresses: bytes
    """Sorted, each once."""
    entries: bytes
    """One entry for each address; an empty one if it cannot be read."""

    def entry(self, address: int) -> block_addresses.Entry:
        """The entry of one of the addresses."""
        at = bisect.bisect_left(
            block_addresses.unpack(self.addresses, 'Q'), address)
        return block_addresses.entry_at(self.entries, at)


def look(maintainer: maintainer_role.Maintainer, pairs: bytes) -> Blocks:
    """Read the entries of all blocks in pairs."""
    addresses = _engine.pair_addresses(pairs)
    entries = []
    size = block_addresses.ENTRY_BYTES
    for number, some in block_addresses.cut_by_group(addresses):
        slots = block_addresses.unpack(some, 'Q')
        first = block_addresses.slot_of(slots[0])
        count = slots[-1] - slots[0] + 1
        try:
            listing = maintainer.engine.entries(number, first, count)
        except (exceptions.ImageNotFound, exceptions.InvalidParameter,
                *exceptions.UNREADABLE):
            listing = bytes(size * count)
        entries.append(_engine.pick(listing, size, first, some))
    return Blocks(addresses, b''.join(entries))


def portions(pairs: bytes) -> Iterator[bytes]:
    """Cut sorted pairs into portions; pairs of one address stay together."""
    firsts = block_addresses.unpack(pairs, 'Q')[::2]
    begin = 0
    while begin < len(firsts):
        last = min(begin + exactindex.PAIRS_AT_ONCE, len(firsts)) - 1
        end = bisect.bisect_right(firsts, firsts[last], last)
        yield pairs[begin * PAIR.size:end * PAIR.size]
        begin = end


class Duplicates:
    """The pairs in the catalog, and their way there from the index."""

    def __init__(self, maintainer: maintainer_role.Maintainer,
                 pace: pacing.Pace) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._scopes: dict[int, bytes | None] = {}     # by group

    def catch_up(self) -> int:
        """Bring index and pairs up to date.

        :returns: the number of entries that were new to the index
        :raises BusyError: another process has the index all the time
        """
        index = exactindex.Index(
            self._maintainer.handle, self._maintainer.engine,
            self._maintainer.catalog.id, self._pace)
        try:
            try:
                return self._catch_up(index)
            except database.CatalogError:
                raise
            except exceptions.DamagedError as e:
                LOG.warning('the exact index cannot be used: %s', e)
                index.repair()
                return self._catch_up(index)
        finally:
            index.close()

    def _catch_up(self, index: exactindex.Index) -> int:
        index.prepare()
        self._revise(index)
        scanned = index.scan()
        for _ in range(ROUNDS):
            index.merge()
            if not self._take_in(index):
                break
        return scanned

    # -- taking in the index's pairs --------------------------------------

    def _take_in(self, index: exactindex.Index) -> bool:
        """Take in all pairs; return whether there is more to merge."""
        again = False
        for file in index.pairs_files():
            for pairs in index.portions(file):
                again |= self._take(index, pairs)
                self._pace.check()
            # The pairs are in the catalog, durably.
            index.remove(file)
        return again

    def _take(self, index: exactindex.Index, pairs: bytes) -> bool:
        blocks = look(self._maintainer, pairs)
        found, stale = _engine.pairs_judge(pairs, *blocks)
        healed: list[tuple[int, int]] = []
        if stale:
            healed = self._replace_stale(index, blocks, stale)
            dead = {kept for _, kept in PAIR.iter_unpack(stale)}
            found = _pack(pair for pair in PAIR.iter_unpack(found)
                          if pair[0] not in dead)
        found = self._within_scopes(found + _pack(healed), blocks)
        batch = self._maintainer.catalog.batch()
        self._remember(batch, found + self._inherit(batch, found))
        if len(batch):
            # Synced: the file of the pairs is removed because of it.
            self._maintainer.write(batch, sync=True)
        return bool(stale)

    def _replace_stale(self, index: exactindex.Index, blocks: Blocks,
                       stale: bytes) -> list[tuple[int, int]]:
        """Have live blocks replace those that the index has and that are gone.

        Returns pairs of a live block and a damaged one, which it can heal.
        """
        gone, again = set(), set()
        healed: dict[int, int] = {}
        for other, kept in PAIR.iter_unpack(stale):
            live, dead = blocks.entry(other), blocks.entry(kept)
            if live.state != block_addresses.LIVE:
                continue
            gone.add(exactindex.record(live.fingerprint, kept))
            again.add(exactindex.record(live.fingerprint, other))
            if (dead.state == block_addresses.DAMAGED
                    and dead.fingerprint == live.fingerprint):
                healed[kept] = min(other, healed.get(kept, other))
        index.add(again, gone)
        return [(live, damaged) for damaged, live in healed.items()]

    def _within_scopes(self, pairs: bytes, blocks: Blocks) -> bytes:
        """The pairs whose two blocks are of one scope.

        :param blocks: has all blocks of the pairs
        """
        if len({self._scope_of(group) for group, _ in
                block_addresses.cut_by_group(blocks.addresses)}) < 2:
            return pairs
        good = [pair for pair in PAIR.iter_unpack(pairs)
                if len(set(map(self._scope_of, map(
                    block_addresses.group_of, pair)))) == 1]
        bad = len(pairs) // PAIR.size - len(good)
        if not bad:
            return pairs
        LOG.warning('%d pairs of blocks of different scopes have the same '
                    'fingerprints: they stay apart', bad)
        return _pack(good)

    def _scope_of(self, group: int) -> bytes | None:
        if group not in self._scopes:
            try:
                self._scopes[group] = self._maintainer.engine.group_facts(
                    group)['scope']
            except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
                self._scopes[group] = None
        return self._scopes[group]

    def _inherit(self, batch: database.Batch, found: bytes) -> bytes:
        """Take over the pairs of blocks that the index no longer has.

        So blocks with one fingerprint remain one class.

        :param found: pairs of a block that the index has now, and another one
        :returns: the same pairs, of the heirs
        """
        catalog = self._maintainer.catalog
        taken: list[tuple[int, int]] = []
        for group, some in block_addresses.cut_by_group(
                _engine.pairs_sort(_swapped(found)), PAIR.size):
            pairs = catalog.duplicates(group, batch)
            if not pairs or set(block_addresses.unpack(pairs, 'Q')[::2]
                                ).isdisjoint(block_addresses.unpack(
                                    some, 'Q')[::2]):
                continue
            heirs = dict(PAIR.iter_unpack(some))
            known = list(PAIR.iter_unpack(pairs))
            taken += ((heirs[kept], other) for kept, other in known
                      if kept in heirs and heirs[kept] != other)
            catalog.set_duplicates(batch, group, _pack(
                pair for pair in known if pair[0] not in heirs))
        return _pack(taken)

    # -- known duplicates -------------------------------------------------

    def _remember(self, batch: database.Batch, found: bytes) -> None:
        catalog = self._maintainer.catalog
        for group, some in block_addresses.cut_by_group(
                _engine.pairs_sort(found), PAIR.size):
            known = catalog.duplicates(group, batch)
            catalog.set_duplicates(batch, group, _engine.pairs_sort(
                known + some) if known else some)

    def forget(self, pairs: bytes) -> None:
        """Forget known duplicates."""
        catalog = self._maintainer.catalog
        batch = catalog.batch()
        for group, some in block_addresses.cut_by_group(
                _engine.pairs_sort(pairs), PAIR.size):
            catalog.set_duplicates(batch, group, _engine.pairs_without(
                catalog.duplicates(group), some))
        if len(batch):
            self._maintainer.write(batch)

    def _revise(self, index: exactindex.Index) -> None:
        """Forget pairs of which a block is gone.

        If the index had that block, the others are in a run, durably, before
        they are forgotten as its duplicates.
        """
        for group in self._maintainer.catalog.groups_with_duplicates():
            for pairs in portions(self._maintainer.catalog.duplicates(group)):
                gone, again = _engine.pairs_revise(
                    pairs, *look(self._maintainer, pairs))
                if again:
                    index.add(exactindex.cut(again))
                if gone:
                    self.forget(gone)
                self._pace.check()


def _pack(pairs: Iterable[tuple[int, int]]) -> bytes:
    return block_addresses.pack(itertools.chain.from_iterable(pairs), 'Q')


def _swapped(pairs: bytes) -> bytes:
    """Pairs (b, a) of pairs (a, b)."""
    words = block_addresses.unpack(pairs, 'Q')
    words[::2], words[1::2] = words[1::2], words[::2]
    return block_addresses.pack(words, 'Q')
