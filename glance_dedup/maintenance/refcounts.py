# SPDX-License-Identifier: Apache-2.0

"""The catalog's accounts: counted recipes, and how often they name each block.

The *ledger* lists the recipes that are counted whole. A group's *counts* give
for each slot the number of recipes that name its block.

A recipe may name more counters than fit into memory. So it is counted from its
first page of extents to its last, and un-counted from the last to the first,
in batches of a bounded size. Between two batches the recipe is *begun*:
exactly the pages before a certain one are counted, in either direction. Each
batch records this page, so the next one may count on, or un-count. A *part* is
the counts of one batch. Each part but the last has its own key, as long as
its pages are counted. So if LevelDB loses a batch in the middle, the ledger
lacks something, as it does without parts.

A program that does not know parts would take their counts for those of whole
recipes. So while there is a part, the catalog has a newer format number.
"""

from collections.abc import Iterator
import functools
import operator
import sys
from typing import Any
from typing import Protocol

from glance_dedup import _engine
from glance_dedup.base import leveldb
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import database
from glance_dedup.maintenance import records

_CHUNK_BITS = 10
_ZEROS = bytes(records.CHUNK_BYTES)


class Extents(Protocol):
    """A recipe's extents of blocks, page by page."""

    @property
    def pages(self) -> int:
        """Return how many pages there are."""
        ...

    def runs(self, page: int) -> bytes:
        """The packed runs of one page; the first page has number 0."""


def facts_of(header: dict[str, Any], blocks: int) -> dict[str, Any]:
    """The ledger's facts about a recipe that names so many blocks."""
    facts = {name: header[name] for name in (
        'image_id', 'project', 'size', 'zero_bytes', 'new_bytes',
        'stored_bytes', 'fragments', 'created')}
    facts['upload_id'] = header['upload_id'].hex()
    facts['blocks'] = blocks
    if header['derived_bytes'] is not None:
        facts['derived_bytes'] = header['derived_bytes']
    return facts


def by_chunk(runs: bytes) -> dict[tuple[int, int], bytearray]:
    """Runs by the chunks of counters that they touch: (group, chunk).

    A run that touches two chunks is in both.
    """
    chunks: dict[tuple[int, int], bytearray] = {}
    begin = at = 0
    key = 0, 0      # of the sequence of runs from `begin` on
    for group, slot, blocks in block_addresses.runs_in(runs):
        if not group or slot + blocks > block_addresses.GROUP_SLOTS:
            raise database.CatalogError(
                f'there are no {blocks} slots from {slot} in group {group}')
        chunk = slot >> _CHUNK_BITS
        # An image's runs come in long sequences within one chunk.
        if key != (group, chunk):
            if at > begin:
                chunks.setdefault(key, bytearray()).extend(runs[begin:at])
            begin, key = at, (group, chunk)
        for further in range(chunk + 1,
                             (slot + blocks - 1 >> _CHUNK_BITS) + 1):
            chunks.setdefault((group, further), bytearray()).extend(
                runs[at:at + block_addresses.RUN_BYTES])
        at += block_addresses.RUN_BYTES
    if at > begin:
        chunks.setdefault(key, bytearray()).extend(runs[begin:at])
    return chunks


class Accounts(database.Database):
    """A catalog's ledger, counts, and facts about groups (N1)."""

    # -- the ledger and the counts (N1) -----------------------------------

    def counted(self, txid: bytes,
                batch: database.Batch | None = None) -> bool:
        """Return whether the recipe of this 16-byte transaction id is counted.

        That means all of it: otherwise it has no ledger key.
        """
        return self._get(records.LEDGER + txid, batch) is not None

    def begun(self, txid: bytes, batch: database.Batch | None = None) -> int:
        """Return the counted pages of a begun recipe; 0: it is not begun."""
        return self._begun(txid, batch)[1]

    def all_begun(self) -> Iterator[tuple[bytes, str]]:
        """Transaction id and image id of each begun recipe."""
        for key, value in self._items(records.BEGUN):
            fields = self._parse(key, value, records.BEGUN_FORM)
            yield key[1:], fields['image_id']

    def facts(self, txid: bytes, batch: database.Batch | None = None
              ) -> dict[str, Any] | None:
        """The ledger's facts about a counted recipe; None if not counted."""
        return self._read_json(
            records.LEDGER + txid, records.LEDGER_FORM, batch)

    def txids(self) -> list[bytes]:
        """The transaction ids of all counted recipes, sorted.

        REQUIRES: nothing is counted meanwhile.

        :raises CatalogError: if ledger keys, or parts of recipes, are missing.
            LevelDB does not notice if one of several logs is cut short: it
            then has later batches, but not earlier ones
        """
        found: list[bytes] = []
        for page in self._pages(records.LEDGER, values=False):
            for key in page:
                if len(key) != 17:
                    raise self._strange(key)
            found += [key[1:] for key in page]
        ledger = functools.reduce(operator.xor,
                                  map(int.from_bytes, found), 0)
        parts = 0
        for key, value in self._items(records.PART):
            ledger ^= records.part_id(key, value)
            parts += 1
        if (ledger != int(self._meta['ledger'], 16)
                or parts != self._meta.get('parts', 0)):
            raise database.CatalogError(
                f'the catalog {self.path} lost batches in the middle: its '
                'ledger is not complete')
        return found

    def ledger(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Transaction id and facts of each counted recipe."""
        for key, value in self._items(records.LEDGER):
            yield key[1:], self._parse(key, value, records.LEDGER_FORM)

    def count(self, batch: database.Batch, txid: bytes, recipe: Extents,
              facts: dict[str, Any], most: int = sys.maxsize) -> bool:
        """Count a recipe's further blocks; behind the last one, put its key.

        REQUIRES: the recipe has no ledger key yet.

        :param most: bytes; no page is added to a batch that has more
        :returns: whether all is counted; otherwise the caller writes the batch
            and calls this again with an empty one
        """
        if self.counted(txid, batch):
            raise database.CatalogError(
                f'the recipe {txid.hex()} is counted already')
        parts, page = begun = self._begun(txid, batch)
        self._require_page(txid, page, recipe)
        try:
            while page < recipe.pages and batch.size <= most:
                self._add(batch, recipe.runs(page), 1)
                page += 1
        finally:
            # Also if the next page cannot be read: the batch has the pages
            # before it.
            if begun[1] < page < recipe.pages:
                self._set_part(batch, txid, parts, page)
                self._set_begun(batch, txid, facts['image_id'], parts + 1)
        if page < recipe.pages:
            return False
        batch.put(records.LEDGER + txid, records.to_json(
            {**facts, 'parts': parts} if parts else facts))
        self._set_begun(batch, txid, None, 0)
        batch.note_recipe(txid)
        return True

    def uncount(self, batch: database.Batch, txid: bytes, recipe: Extents,
                most: int = sys.maxsize) -> bool:
        """Take a recipe's blocks off the counts, from its end.

        Groups in which a count goes to zero become dirty. REQUIRES: the recipe
        is counted or begun.

        :param most: as for :meth:`count`
        :returns: whether nothing of the recipe is counted any more; otherwise
            as for :meth:`count`
        :raises CatalogError: if the recipe is neither counted nor begun, or a
            count would go below zero
        """
        facts = self.facts(txid, batch)
        parts, page = self._begun(txid, batch)
        if facts is None and not parts:
            raise database.CatalogError(
                f'the recipe {txid.hex()} is not counted')
        if batch.size > most:
            return False
        # The part that is being un-counted; it begins behind the one before.
        part = parts - 1
        image_id = None
        if facts is not None:
            part, page = facts.get('parts', 0), recipe.pages
            image_id = facts['image_id']
        self._require_page(txid, page, recipe)
        begin = self._begin(txid, part, page, batch)
        try:
            while page and batch.size <= most:
                self._add(batch, recipe.runs(page - 1), -1)
                page -= 1
                if page == begin and part:
                    self._set_part(batch, txid, part, None)
                    part -= 1
                    begin = self._begin(txid, part, page, batch)
        finally:
            if facts is not None:
                batch.delete(records.LEDGER + txid)
                batch.note_recipe(txid)
            self._set_part(batch, txid, part, page or None)
            self._set_begun(batch, txid, image_id, part + 1 if page else 0)
        return not page

    def record(self, batch: database.Batch, txid: bytes,
               facts: dict[str, Any]) -> None:
        """Put the ledger key of a recipe that :meth:`record_counts` counts.

        REQUIRES: the recipe has no ledger key yet.
        """
        batch.put(records.LEDGER + txid, records.to_json(facts))
        batch.note_recipe(txid)

    def record_counts(self, batch: database.Batch, group: int, chunk: int,
                      counts: bytes) -> None:
        """Put the counts of a chunk that has none yet, of all recipes."""
        batch.put(records.counts_key(group, chunk), counts)
        facts = self.group(group, batch)
        self.set_group(batch, group, used=facts['used'] + records.CHUNK_SLOTS
                       - block_addresses.unpack(counts).count(0))

    def chunk(self, group: int, chunk: int) -> bytes:
        """The counts of :data:`records.CHUNK_SLOTS` slots of a group."""
        return self._counts(records.counts_key(group, chunk), None)

    def chunks(self) -> int:
        """Return how many chunks have a count above zero."""
        return sum(1 for _ in self._items(records.COUNTS, values=False))

    def discount(self, batch: database.Batch, runs: bytes) -> int:
        """Take runs off the counts in a batch that is never written.

        :returns: how many counts went to zero
        """
        return -self._add(batch, runs, -1)

    def preset(self, batch: database.Batch, group: int, counts: bytes) -> None:
        """Put a group's counts into a batch that is never written."""
        for chunk in range(-(-len(counts) // records.CHUNK_BYTES)):
            at = chunk * records.CHUNK_BYTES
            batch.put(records.counts_key(group, chunk),
                      counts[at:at + records.CHUNK_BYTES])

    # -- recipes that are begun -------------------------------------------

    def _begun(self, txid: bytes,
               batch: database.Batch | None) -> tuple[int, int]:
        """Return how many parts and pages of a begun recipe are counted."""
        fields = self._read_json(
            records.BEGUN + txid, records.BEGUN_FORM, batch)
        if fields is None:
            return 0, 0
        return fields['parts'], self._end(txid, fields['parts'] - 1, batch)

    def _set_begun(self, batch: database.Batch, txid: bytes,
                   image_id: str | None, parts: int) -> None:
        """Put a recipe's key of begun recipes; delete it for 0 parts.

        :param image_id: None: keep the present one
        """
        key = records.BEGUN + txid
        known = self._read_json(key, records.BEGUN_FORM, batch)
        if image_id is None and known is not None:
            image_id = known['image_id']
        if parts:
            batch.put(key, records.to_json(
                {'image_id': image_id, 'parts': parts}))
        elif known is not None:
            batch.delete(key)

    def _end(self, txid: bytes, part: int,
             batch: database.Batch | None) -> int:
        """The number of the page behind a part; 0 for a part below 0."""
        if part < 0:
            return 0
        key = records.part_key(txid, part)
        value = self._get(key, batch) or b''
        end = records.unpack_end(value)
        if end is None:
            raise self._damaged(f'{leveldb.shown(key)} has {len(value)} bytes')
        return end

    def _begin(self, txid: bytes, part: int, page: int,
               batch: database.Batch) -> int:
        """The first page of the part that ends before `page`."""
        begin = self._end(txid, part - 1, batch)
        if part and begin >= page:
            raise self._damaged(f'part {part} of the recipe {txid.hex()} '
                                'begins behind its end')
        return begin

    def _set_part(self, batch: database.Batch, txid: bytes, part: int,
                  end: int | None) -> None:
        """Record the page behind a part; None: the part is gone."""
        key = records.part_key(txid, part)
        value = self._get(key, batch)
        if value is not None:
            batch.note_part(key, value, -1)
            batch.delete(key)
        if end is not None:
            value = records.pack_end(end)
            batch.note_part(key, value, 1)
            batch.put(key, value)

    def _require_page(self, txid: bytes, page: int, recipe: Extents) -> None:
        if page > recipe.pages:
            raise self._damaged(
                f'{page} pages of the recipe {txid.hex()} are counted, which '
                f'has {recipe.pages}')

    def _add(self, batch: database.Batch, runs: bytes, delta: int) -> int:
        """Add `delta` to the counts of all blocks in these runs.

        Returns by how much the number of blocks with a count above 0 grew.
        """
        used: dict[int, int] = {}
        for (group, chunk), some in by_chunk(runs).items():
            key = records.counts_key(group, chunk)
            counts = bytearray(self._counts(key, batch))
            before = _zeros(counts)
            try:
                _engine.add_runs(counts, group, chunk, some, delta)
            except ValueError as e:
                raise database.CatalogError(
                    f'the catalog {self.path} counts too few recipes for a '
                    f'block of group {group}: {e}')
            used[group] = used.get(group, 0) + before - _zeros(counts)
            batch.put(key, None if counts == _ZEROS else bytes(counts))
        for group, more in used.items():
            if more:
                facts = self.group(group, batch)
                changes = {'used': facts['used'] + more}
                if more < 0:
                    changes['dirty'] = True
                self.set_group(batch, group, **changes)
        return sum(used.values())

    def _counts(self, key: bytes, batch: database.Batch | None) -> bytes:
        counts = self._get(key, batch)
        if counts is None:
            return _ZEROS
        if len(counts) != records.CHUNK_BYTES:
            raise self._damaged(f'the counts {leveldb.shown(key)} have '
                                f'{len(counts)} bytes')
        return counts

    def counts(self, group: int, slots: int = block_addresses.GROUP_SLOTS,
               batch: database.Batch | None = None) -> bytes:
        """Return the counts of a group's first slots (32 bits)."""
        return b''.join(
            self._counts(records.counts_key(group, chunk), batch)
            for chunk in range(-(-slots // records.CHUNK_SLOTS)))[:4 * slots]

    # -- groups -----------------------------------------------------------

    def group(self, number: int, batch: database.Batch | None = None
              ) -> dict[str, Any]:
        """The facts about a group that format-derived.rst lists."""
        key = records.numbered_key(records.GROUP, number)
        value = self._get(key, batch)
        return dict(records.GROUP_FACTS) if value is None else (
            self._group_facts(key, value))

    def _group_facts(self, key: bytes, value: bytes) -> dict[str, Any]:
        facts = {**records.GROUP_FACTS, **self._parse(key, value)}
        for name, default in records.GROUP_FACTS.items():
            if (type(facts[name]) is not type(default)
                    or not 0 <= facts[name] <= block_addresses.GROUP_SLOTS):
                raise self._damaged(f'{name} of {leveldb.shown(key)} is '
                                    f'{facts[name]!r}')
        return facts

    def groups(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The groups about which the catalog has facts, with these."""
        for key, value in self._items(records.GROUP):
            yield self._number(key), self._group_facts(key, value)

    def set_group(self, batch: database.Batch, number: int,
                  **facts: Any) -> None:
        """Change some of a group's facts."""
        batch.put(records.numbered_key(records.GROUP, number),
                  records.to_json({**self.group(number, batch), **facts}))

    def forget_group(self, batch: database.Batch, number: int) -> None:
        """Drop the facts about a group that is gone.

        :raises CatalogError: a count of the group is above zero
        """
        if any(self.counts(number, batch=batch)):
            raise database.CatalogError(
                f'group {number} is gone, but blocks of it are counted')
        batch.delete(records.numbered_key(records.GROUP, number))


def _zeros(counts: bytearray) -> int:
    return block_addresses.unpack(counts).count(0)
