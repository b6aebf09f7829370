# SPDX-License-Identifier: Apache-2.0

"""The catalog: a LevelDB database of facts derived from recipes and groups.

``format-derived.rst`` describes its keys. The catalog belongs to the
maintainer. It lists the counted recipes, and how often they name each
block. The catalog authorises freeing. So any contradiction in it raises
:class:`~glance_dedup.maintenance.database.CatalogError`; the maintainer then
sets the catalog aside and rebuilds it.

A :class:`~glance_dedup.maintenance.database.Batch` gathers changes, which are
then written at once. One thread at a time changes the catalog; any thread may
read it meanwhile.
"""

from collections.abc import Iterator
import contextlib
from typing import Any

from glance_dedup.base import imageids
from glance_dedup.base import leveldb
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import database
from glance_dedup.maintenance import records
from glance_dedup.maintenance import refcounts

# The kinds of recipes, and of their sums.
_KINDS = ('images', 'backups')
_LEDGER_SUMS = ('size', 'zero_bytes', 'new_bytes', 'stored_bytes', 'blocks')

# One sample an hour is kept of those older than a day, one a day of those
# older than 90 days. Seconds.
_HISTORY = ((90 * 86400, 86400), (86400, 3600))


class Catalog(refcounts.Accounts):
    """An open catalog: the accounts, and all its other facts.

    Any thread may call the methods that only read.
    """

    # The sums, and how many batches were written by then.
    _statistics: tuple[int, dict[str, Any]] | None = None

    # -- image files ------------------------------------------------------

    def seen(self) -> Iterator[tuple[bytes, tuple[int, int, bytes]]]:
        """Image ids, and the file in which each image's recipe was last seen.

        The file's inode; when it was last written, nanoseconds since 1970; and
        the transaction id in it.
        """
        for page in self.seen_pages():
            for image_id, file in page:
                yield image_id, records.unpack_seen(file)

    def seen_pages(self) -> Iterator[tuple[tuple[bytes, bytes], ...]]:
        """The same, page by page, each file packed (:mod:`records`)."""
        for page in self._pages(records.SEEN):
            for key, file in page:
                if len(file) != records.SEEN_BYTES:
                    raise self._damaged(f'{leveldb.shown(key)} has '
                                        f'{len(file)} bytes')
            yield tuple((key[1:], file) for key, file in page)

    def set_seen(self, batch: database.Batch, image_id: bytes,
                 file: tuple[int, int, bytes] | None) -> None:
        """Remember the file of an image's recipe; None: forget it."""
        batch.put(records.SEEN + image_id,
                  None if file is None else records.pack_seen(file))

    def images(self) -> dict[str, tuple[tuple[int, int], dict[str, Any]]]:
        """The counted images and volumes' recipes, by their ids.

        Of each the file, as :meth:`seen` gives it, and the ledger's facts. A
        reader compares the file with the one that is there now
        (:func:`~glance_dedup.maintenance.recipes.facts_of`).
        """
        ledger = dict(self.ledger())
        return {image_id.decode(): ((inode, modified), ledger[txid])
                for image_id, (inode, modified, txid) in self.seen()
                if txid in ledger}

    # -- statistics -------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Sums over the counted recipes, and over all groups.

        The recipes of backups and volumes are in all sums but ``images``;
        ``backups`` counts the backups.

        ``images``, ``backups``, ``logical_bytes``, ``zero_bytes``,
        ``nonzero_bytes``, ``new_bytes``, ``stored_bytes``, ``blocks`` (counted
        each time that a recipe names them), ``unique_blocks``; ``disks``: the
        recipes with a disk, and ``derived_bytes``: bytes of their files that
        are not stored; and ``projects``: the same sums for each project,
        without the last three.
        """
        changes = self._changes
        if self._statistics is None or self._statistics[0] != changes:
            projects: dict[str, dict[str, int]] = {}
            disks = derived_bytes = 0
            for _, facts in self.ledger():
                try:
                    sums = projects.setdefault(
                        facts['project'],
                        dict.fromkeys((*_KINDS, *_LEDGER_SUMS), 0))
                    image_id = facts['image_id']
                    if imageids.of_backup(image_id) is not None:
                        sums['backups'] += 1
                    elif imageids.of_volume(image_id) is None:
                        sums['images'] += 1
                    for name in _LEDGER_SUMS:
                        sums[name] += facts[name]
                    disks += 'derived_bytes' in facts
                    derived_bytes += facts.get('derived_bytes', 0)
                except (KeyError, TypeError) as e:
                    raise self._damaged(f'facts of an image lack {e}')
            total = dict.fromkeys((*_KINDS, *_LEDGER_SUMS), 0)
            for sums in projects.values():
                for name, value in sums.items():
                    total[name] += value
            for sums in (total, *projects.values()):
                sums['logical_bytes'] = sums.pop('size')
                sums['nonzero_bytes'] = (sums['logical_bytes']
                                         - sums['zero_bytes'])
            total |= {'disks': disks, 'derived_bytes': derived_bytes}
            total['unique_blocks'] = sum(
                facts['used'] for _, facts in self.groups())
            self._statistics = changes, {**total, 'projects': projects}
        return self._statistics[1]

    # -- damaged blocks, scrub state, history -----------------------------

    def damaged(self) -> dict[int, dict[str, Any]]:
        """The facts about each damaged block, by its address."""
        return dict(self._damaged_block(key, value)
                    for key, value in self._items(records.DAMAGED))

    def _damaged_block(self, key: bytes, value: bytes
                       ) -> tuple[int, dict[str, Any]]:
        address = self._number(key)
        if not block_addresses.is_address(address):
            raise self._damaged(f'{leveldb.shown(key)} is not the address '
                                'of a block')
        return address, self._parse(key, value, records.DAMAGED_FORM)

    def set_damaged(self, batch: database.Batch, address: int,
                    facts: dict[str, Any] | None) -> None:
        """Remember facts about a damaged block; None: forget the block."""
        batch.put(records.numbered_key(records.DAMAGED, address),
                  None if facts is None else records.to_json(facts))

    def scrub_state(self) -> dict[str, Any]:
        """The state that was last set; at first an empty one."""
        return self._read_json(records.SCRUB, records.SCRUB_FORM) or {}

    def set_scrub_state(self, state: dict[str, Any]) -> None:
        """Write the state of the scrub, at once."""
        batch = database.Batch()
        batch.put(records.SCRUB, records.to_json(state))
        self.write(batch)

    def damaged_images(self) -> set[str]:
        """The images that are known to have parts that cannot be read."""
        return {image_id for hit in (
            *self.damaged().values(),
            *self.scrub_state().get('unreadable', {}).values())
            for image_id in hit['images']}

    def sample(self, time: float, sample: dict[str, Any]) -> None:
        """Keep a sample for the plots, and thin out the older ones.

        :param time: seconds since 1970
        """
        batch = database.Batch()
        seen = set()
        for key in self._items(records.HISTORY, values=False):
            then = records.number_of(key)
            if then is None:
                batch.delete(key)
                continue
            for age, every in _HISTORY:
                if then < time - age:
                    if (every, then // every) in seen:
                        batch.delete(key)
                    seen.add((every, then // every))
                    break
        batch.put(records.numbered_key(records.HISTORY, int(time)),
                  records.to_json(sample))
        self.write(batch)

    def history(self, since: float = 0) -> list[dict[str, Any]]:
        """The samples from `since` on, each with its ``time``.

        Malformed samples are left out, since no decision depends on them.

        :param since: seconds since 1970
        """
        samples = []
        start = records.numbered_key(records.HISTORY, max(0, int(since)))
        for key, value in self._items(records.HISTORY, start):
            with contextlib.suppress(database.CatalogError):
                samples.append({'time': self._number(key),
                                **self._parse(key, value)})
        return samples

    def salvage(self) -> tuple[database.Batch, int]:
        """Rows that no rebuild derives: history, scrub state, damaged blocks.

        Returns the items that can be read and are well-formed, and how many
        are lost. If the rest of one kind cannot be read, it counts as one.
        """
        batch = database.Batch()
        lost = 0
        for prefix, parse in ((records.HISTORY, self._sample),
                              (records.SCRUB, self._state),
                              (records.DAMAGED, self._damaged_block)):
            try:
                for key, value in self._items(prefix):
                    try:
                        parse(key, value)
                    except database.CatalogError:
                        lost += 1
                    else:
                        batch.put(key, value)
            except database.CatalogError:
                lost += 1
        return batch, lost

    def _sample(self, key: bytes, value: bytes) -> None:
        self._number(key)
        self._parse(key, value)

    def _state(self, key: bytes, value: bytes) -> None:
        if key != records.SCRUB:
            raise self._strange(key)
        self._parse(key, value, records.SCRUB_FORM)

    # -- known duplicates -------------------------------------------------

    def duplicates(self, group: int,
                   batch: database.Batch | None = None) -> bytes:
        """The duplicates of a group's blocks that are not merged yet.

        Sorted pairs of addresses (2 x 64 bits): the block in this group that
        is in the index, and another block with the same fingerprint.
        """
        key = records.numbered_key(records.DUPLICATES, group)
        pairs = self._get(key, batch) or b''
        if not records.are_duplicates(pairs, group):
            raise self._damaged(f'the duplicates of group {group} are not '
                                'pairs of addresses in order')
        return pairs

    def set_duplicates(self, batch: database.Batch, group: int,
                       pairs: bytes) -> None:
        """Replace a group's pairs, as :meth:`duplicates` returns them."""
        batch.put(records.numbered_key(records.DUPLICATES, group),
                  pairs or None)

    def groups_with_duplicates(self) -> list[int]:
        """The groups that have known duplicates, sorted."""
        return [self._number(key)
                for key in self._items(records.DUPLICATES, values=False)]
