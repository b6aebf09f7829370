# SPDX-License-Identifier: Apache-2.0

"""Compares the catalog's counts with the recipes (``batch.rst``).

The maintainer has settled the spool, and settles nothing meanwhile. So the
counted recipes are those of the ledger, and the counted pages of recipes that
are begun. Each is in ``images/`` or, if it was deleted, in the spool, since
only the maintainer removes the files that a deleter put there (N9.3).
"""

import collections
import contextlib

from glance_dedup.base import exceptions
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import database
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import rebuild_worker
from glance_dedup.maintenance import records
from glance_dedup.maintenance import refcount_rebuild

# A counter that got so high stays there.
_MAX_COUNT = 2**32 - 1


class Unknown(Exception):
    """The counts cannot be computed, so nothing may be freed."""


def compare(maintainer: maintainer_role.Maintainer,
            progress: refcount_rebuild.Progress | None,
            hosts: tuple[str, ...]) -> None:
    """Compare all counts. If processes fail, one of this host counts alone.

    REQUIRES: the spool was settled.

    :param hosts: a process on each counts; '' is this host
    :raises CatalogError: the catalog has a wrong count
    :raises Unknown: a counted recipe is lost or cannot be read, or no process
        can count
    :raises LostLocks: another maintainer may have changed the catalog
    """
    try:
        _Comparison(maintainer).run(progress, hosts)
    except rebuild_worker.Broken as e:
        maintainer.warnings.append(f'{e}; so one process counts again')
        try:
            _Comparison(maintainer).run(progress, refcount_rebuild.local(1))
        except rebuild_worker.Broken as again:
            raise Unknown(
                f'the counts cannot be compared: {again}') from again


class _Comparison:
    def __init__(self, maintainer: maintainer_role.Maintainer) -> None:
        self._maintainer = maintainer
        self._catalog = maintainer.catalog
        self._chunks = 0
        self._used: collections.Counter[int] = collections.Counter()

    def run(self, progress: refcount_rebuild.Progress | None,
            hosts: tuple[str, ...]) -> None:
        maintainer = self._maintainer
        wanted: list[refcount_rebuild.Wanted] = [
            (facts['image_id'], txid.hex())
            for txid, facts in self._catalog.ledger()]
        partitions = rebuild_worker.partitions_for(len(
            maintainer.engine.groups()))
        try:
            with contextlib.closing(refcount_rebuild.Workers(
                    maintainer.repository, hosts, partitions)) as workers:
                refcount_rebuild.count(workers, wanted, self._note,
                                       self._look_again,
                                       self._take, progress)
        except OSError as e:
            raise rebuild_worker.Broken(f'processes cannot count: {e}') from e
        self._require_no_more()

    def _note(self, host: str, wanted: refcount_rebuild.Wanted,
              said: list) -> None:
        if said[0] != 'counted':
            raise Unknown(
                f'image {wanted[0]} cannot be read on host {host}, so its '
                f'counts cannot be compared: {said[-1]}. Collect without '
                '--by-partition, or put the file back')

    def _look_again(self, gone: list[refcount_rebuild.Wanted],
                    buffers: rebuild_worker.Buffers) -> None:
        """Spread the recipes missing in images/, and the begun ones.

        First images/, then the spool: a deleter puts the recipe into the one
        before it takes it out of the other.
        """
        engine = self._maintainer.engine
        left: dict[bytes, tuple[str, int | None]] = {
            txid: (image_id, self._catalog.begun(txid))
            for txid, image_id in self._catalog.all_begun()}
        for wanted in gone:
            said = rebuild_worker.spread(engine, *wanted, buffers)
            if said == ['gone']:
                image_id, txid = wanted
                left[bytes.fromhex(txid or '')] = image_id, None
            else:
                self._note('', wanted, said)
        for name in engine.spool():
            self._look_at_entry(name, left, buffers)
        if left:
            txid_, (image_id, _) = min(left.items())
            raise Unknown(
                f'the recipe {txid_.hex()} of image {image_id} is counted, '
                'and is neither in images/ nor in the spool, though it was '
                'not deleted: put it back')

    def _look_at_entry(self, name: str,
                       left: dict[bytes, tuple[str, int | None]],
                       buffers: rebuild_worker.Buffers) -> None:
        with contextlib.suppress(exceptions.ImageNotFound,
                                 *exceptions.UNREADABLE):
            with contextlib.closing(
                    self._maintainer.engine.open_entry(name)) as recipe:
                if not recipe.complete:
                    return
                txid = recipe.header()['transaction_id']
                if txid in left:
                    pages = left[txid][1]
                    rebuild_worker.spread_pages(
                        recipe, recipe.pages if pages is None else pages,
                        buffers)
                    del left[txid]

    def _take(self, key: rebuild_worker.Chunk, counts: bytes) -> None:
        """Compare a chunk that recipes name."""
        self._chunks += 1
        self._used[key[0]] += records.CHUNK_SLOTS - block_addresses.unpack(
            counts).count(0)
        known = self._catalog.chunk(*key)
        if known == counts:
            return
        for slot, (wrong, right) in enumerate(zip(
                block_addresses.unpack(known),
                block_addresses.unpack(counts))):
            if wrong not in (right, _MAX_COUNT):
                self._differ(
                    f'{wrong} recipes name the block of group {key[0]} in '
                    f'slot {key[1] * records.CHUNK_SLOTS + slot}, not {right}')

    def _require_no_more(self) -> None:
        """Require the groups' sums, and no counts of further blocks."""
        more = self._catalog.chunks() - self._chunks
        if more:
            self._differ(f'recipes name blocks in {more} more pieces of '
                         f'{records.CHUNK_SLOTS} slots than they do')
        for number, facts in self._catalog.groups():
            if facts['used'] != self._used[number]:
                self._differ(
                    f'{facts["used"]} blocks of group {number} are used, not '
                    f'{self._used[number]}')

    def _differ(self, how: str) -> None:
        # A concurrent change by another maintainer is no contradiction.
        self._maintainer.confirm()
        raise database.CatalogError(
            f'the catalog {self._catalog.path} is wrong: it says that {how}')
