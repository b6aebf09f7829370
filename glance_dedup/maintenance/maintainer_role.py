# SPDX-License-Identifier: Apache-2.0

"""The maintainer: its lock, and a catalog that may be trusted.

One process at a time maintains a repository. The tasks in ``dedupd/`` take a
:class:`Maintainer`. ``protocol.rst`` states rules N1 to N6.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import logging
import os
import secrets
from typing import Any
from typing import NoReturn
from typing import TypeVar

from glance_dedup import _engine
from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import catalog_db
from glance_dedup.maintenance import catalog_fence
from glance_dedup.maintenance import database
from glance_dedup.maintenance import recipes
from glance_dedup.maintenance import refcounts
from glance_dedup.maintenance import reserve
from glance_dedup.maintenance import unreadable_recipes
from glance_dedup.repository import image_repository
from glance_dedup.repository import projects

LOG = logging.getLogger(__name__)

#: Work that may take several batches writes a batch when it has so many bytes.
BATCH_BYTES = 4 << 20

_CATALOG = 'catalog'
_SET_ASIDE = 'quarantine/catalog-'

Progress = Callable[[int, int, str], None]
_Result = TypeVar('_Result')


@dataclasses.dataclass
class Busy:
    """A group that a collection found in use."""

    hold: float
    """For how long the collector announces its intent next time, seconds."""
    turn: float
    """Begin or end of the announcement, by time.monotonic()."""
    announced: bool = False
    """Whether the collector holds the group's intent byte."""


class Maintainer(closing.Closing):
    """The maintainer of a repository, from the lock to :meth:`close`.

    One thread at a time uses it; any thread may read the catalog's statistics,
    :attr:`warnings` and :attr:`unreadable`.

    :param progress: called as `progress(done, total, what)` during a rebuild
        of the catalog, which takes seconds for each hundred images
    :raises BusyError: if another process maintains the repository
    :raises NoSpaceError, StorageError, AccessDenied: as their names say
    """

    def __init__(self, repository: image_repository.Repository,
                 progress: Progress | None = None) -> None:
        with files.os_errors(f'cannot look at {repository.path}',
                             exceptions.StorageError):
            access.require_maintainer(repository.path)
        self.repository = repository
        self.handle = repository.handle()
        self.engine = _engine.Maintenance(self.handle)
        self._fence = catalog_fence.Fence(self.engine)
        self.unreadable = unreadable_recipes.Unreadable(repository.path,
                                                        self.engine)
        """While it has any, nothing may be freed."""
        self.reserve = reserve.Reserve(repository.path)
        """The catalog's room on the disk. Tasks that free blocks keep it."""
        self.warnings: list[str] = []
        self.recipes = recipes.Recipes(repository.path, self.engine,
                                       self.unreadable, self.warnings)
        self.busy: dict[int, Busy] = {}
        """Groups that collections found in use; the next one tries again."""
        self.given_up: dict[str, set[int]] = {}
        """Of each upload that was given up, by the name of its reservation:
        groups in which its blocks may still be."""
        self.rewriting: tuple[_engine.Rewriting, tuple[int, int]] | None = None
        """State of an interrupted recompression, and its codec and level
        as numbers. Closing the engine closes it."""
        self.converting: Any = None
        """An interrupted conversion. It has locks of groups."""
        self.judged: dict[str, str] = {}
        """Images that need no conversion, with their upload ids."""
        self.taken: dict[int, bytes] = {}
        """Digests of the helpers' notes on which this process has acted."""
        self.lost = ''
        """Why this process is not the maintainer any more; '': it still is,
        as far as known. Otherwise this object must be closed."""
        self._catalog: catalog_db.Catalog | None = None
        self._saved: int | None = None      # the sequence of projects.json
        try:
            if not self.engine.lock():
                raise exceptions.BusyError(
                    f'{repository.path} has another maintainer at work')
            self._start(progress)
        except BaseException:
            self.close()
            raise

    @property
    def intent_ends(self) -> float | None:
        """Return the end of the first announced intent, by time.monotonic().

        A collection then ends it. None: no intent is announced.
        """
        return min((busy.turn for busy in self.busy.values()
                    if busy.announced), default=None)

    @property
    def catalog(self) -> catalog_db.Catalog:
        """The catalog. A rebuild replaces this object.

        :raises CatalogError: there is none, since a rebuild failed
        """
        if self._catalog is None:
            raise database.CatalogError(
                f'{self.repository.path} has no catalog: its rebuild failed')
        return self._catalog

    def close(self) -> None:
        """Close the catalog and release the lock. Idempotent."""
        try:
            self.end_conversion()
        finally:
            # First the catalog: the lock keeps other processes from it.
            self._close_catalog()
            self.engine.close()

    def end_conversion(self) -> None:
        """Give up the interrupted conversion, if there is one."""
        work, self.converting = self.converting, None
        if work is not None:
            work.close()

    def enter_group(self, number: int) -> _engine.Group:
        """Enter a group, to free blocks or to mark them (N6.1).

        Only then is it certain who the maintainer is: if the server drops this
        host's locks later, it drops those of the group, too.

        :raises BusyError, ImageNotFound: as the engine says
        :raises LostLocks: this process is not the maintainer any more
        """
        group = self.engine.enter_group(number)
        try:
            self.confirm()
        except BaseException:
            group.close()
            raise
        return group

    def confirm(self) -> None:
        """Make sure that no other process has been the maintainer (I4).

        The server may have dropped this host's locks. Then another process may
        have changed the catalog, and this one's facts on it are too old.

        :raises LostLocks: another process is the maintainer, or was
        """
        self._confirm_lock()
        if self._catalog is not None and self._catalog.is_opened_elsewhere():
            self._lose('another process has opened the catalog')

    def _confirm_lock(self) -> None:
        if self.lost:
            self._lose(self.lost)
        if not self.engine.lock():
            self._lose('another process maintains it')

    def _lose(self, why: str) -> NoReturn:
        self.lost = why
        raise exceptions.LostLocks(
            f'this process does not maintain {self.repository.path} any '
            f'more: it was cut off, and lost its locks; {why}')

    def _path(self, name: str) -> str:
        return os.path.join(self.repository.path, name)

    def _close_catalog(self) -> None:
        catalog, self._catalog = self._catalog, None
        if catalog is not None:
            catalog.close()

    # -- start (N2) -------------------------------------------------------

    def _start(self, progress: Progress | None) -> None:
        if self._fence.read() is None and (
                not files.exists(self._path(_CATALOG))):
            # This repository had no maintainer before.
            self.rebuild(progress)
            return
        try:
            self._open_catalog()
            self._fence.check(self.catalog)
            # N2.2. Even a fence that looks right is written again: the one
            # that was read may not be on the disk yet.
            self._fence.write(self.catalog)
        except database.CatalogError as e:
            self.rebuild(progress, str(e))
        self.reserve.keep()

    def _open_catalog(self) -> None:
        def opened() -> catalog_db.Catalog:
            return catalog_db.Catalog(self._path(_CATALOG),
                                      self.repository.repository_id)
        self._catalog = self.reserve.with_room(opened)

    def reconcile(self, progress: Progress | None = None) -> None:
        """Compare images/ with the ledger, before anything is freed (I9).

        Other processes go on meanwhile. This method lists images/ first, then
        the spool, and only the maintainer removes spool entries. So every
        commit or deletion before the first listing that is not settled has its
        entry in the spool.

        An image without a ledger key is counted now. If a key has neither an
        image nor an entry, its recipe was not deleted, but lost. Then nothing
        is freed until the recipe is back, or an operator gives it up. The same
        holds for a recipe that is begun.

        :raises CatalogError: if the ledger is not complete
        """
        counted = self.catalog.txids()
        begun = dict(self.catalog.all_begun())
        doubtful: set[str] = set()
        # Once the counted ones are taken out, it has those that are not.
        unannounced = self.recipes.txids(self.catalog)
        left = {txid for txid in begun if txid not in unannounced}
        left.update([txid for txid in counted
                     if unannounced.pop(txid, None) is None])
        for name in self.engine.spool():
            noted, live = self.recipes.entry_facts(name)
            if noted is None:
                continue
            left.discard(noted)
            image_id = unannounced.pop(noted, None)
            if image_id is not None and not live:
                # The image was deleted just now, or its entry has changed.
                doubtful.add(image_id)
        lost = {}
        for txid in left:
            # Its header could still be read when it was counted.
            image_id = str(begun.get(txid) or (
                self.catalog.facts(txid) or {}).get('image_id'))
            if image_id not in self.unreadable:
                lost[txid] = image_id
            elif txid not in begun:
                self.unreadable.note_counted(image_id)
        self.unreadable.lost = lost
        if unannounced:
            self.warnings.append(
                f'{len(unannounced)} images were neither counted nor in the '
                f'spool, as {min(unannounced.values())}')
        doubtful.update(unannounced.values())
        if doubtful:
            self._count(sorted(doubtful), progress)

    # -- rebuilding the catalog (N2.3) ------------------------------------

    def rebuild(self, progress: Progress | None = None,
                why: str | None = None, hosts: tuple[str, ...] = ()) -> None:
        """Rebuild the catalog.

        A bad catalog is set aside. If the rebuild fails or is killed, the next
        start, or task, begins it again (N2.4).

        :param why: the old catalog's problem, in words; None: nothing
        :param hosts: a process on each counts; '' is this host. If they fail,
            or if there are none, this process counts alone
        :raises LostLocks: it is another maintainer's
        """
        self._confirm_lock()
        if why is not None:
            self.warnings.append(
                f'{why}; it was set aside, and the catalog was rebuilt' if
                files.exists(self._path(_CATALOG))
                else f'{why}; the catalog was rebuilt')
        self.reserve.with_room(
            lambda: self._rebuild(progress, why is not None, hosts))
        self.reserve.keep()

    def _rebuild(self, progress: Progress | None, set_aside: bool,
                 hosts: tuple[str, ...]) -> None:
        sequence, kept = self._clear_away(set_aside)
        self.unreadable.clear()
        self._fence.doubt()
        catalog = catalog_db.Catalog(
            self._path(_CATALOG), self.repository.repository_id, create=True)
        self._catalog = catalog
        catalog.write(kept)
        images = self.recipes.images()
        if hosts and len(images) > 1:
            # Only here: most maintainers need no multiprocessing.
            from glance_dedup.maintenance import rebuild_worker
            from glance_dedup.maintenance import refcount_rebuild

            try:
                refcount_rebuild.Counting(
                    catalog, self.engine, self.unreadable, BATCH_BYTES,
                    progress).run(self.repository, images, hosts)
            except rebuild_worker.Broken as e:
                self.warnings.append(
                    f'{e}; so the catalog was rebuilt by one process')
                self._rebuild(progress, False, ())
                return
        else:
            self._count(images, progress, unfinished=True)
        # N2.3. If a crash loses the link of an image that was counted, the
        # image has an entry in the spool. An image that was already unlinked,
        # and so was not counted, does not come back.
        self.engine.sync('images')
        self.engine.sync('spool')
        catalog.write(catalog.batch(), sync=True, valid=True,
                      sequence=sequence)
        self._fence.write(catalog)

    def _clear_away(self, set_aside: bool
                    ) -> tuple[int, database.Batch]:
        """Move the old catalog out of the way.

        Returns the sequence for the new catalog, and those items of the old
        one that cannot be derived again.
        """
        self._fence.read()      # the next sequence is above the fence's
        known = 0
        kept = database.Batch()
        path = self._path(_CATALOG)
        if files.exists(path):
            # Perhaps the old catalog cannot be read at all.
            with contextlib.suppress(exceptions.RepositoryError):
                if self._catalog is None:
                    self._catalog = catalog_db.Catalog(
                        path, self.repository.repository_id)
                known = self._catalog.sequence
                kept, lost = self._catalog.salvage()
                if lost:
                    self.warnings.append(
                        f'the catalog {path}: {lost} items of its history, '
                        'and of what the scrub found, are damaged, and lost')
            self._close_catalog()
            with files.os_errors(f'cannot set {path} aside',
                                 exceptions.StorageError):
                self._remove_set_aside()
                aside = self._path(_SET_ASIDE + secrets.token_hex(8))
                os.rename(path, aside)
                if not set_aside:
                    files.remove(aside)
        return self._fence.next_sequence(known), kept

    def _remove_set_aside(self) -> None:
        """Remove earlier catalogs that were set aside: only the last stays."""
        directory, prefix = os.path.split(_SET_ASIDE)
        for name in os.listdir(self._path(directory)):
            if name.startswith(prefix):
                files.remove(self._path(os.path.join(directory, name)))

    def _count(self, image_ids: list[str], progress: Progress | None = None,
               unfinished: bool = False) -> None:
        """Count images that have no ledger key.

        An image without a ledger key was not counted yet (N1). If an image is
        deleted meanwhile, its spool entry leads to its un-counting.

        :param unfinished: the catalog is not valid yet
        """
        batch = self.catalog.batch()
        done = 0

        def write() -> None:
            self._write_counts(batch, unfinished)
            batch.clear()
            if progress is not None:
                progress(done, len(image_ids), 'counting images')
        for image_id, recipe in self.recipes.opened(image_ids):
            with contextlib.closing(recipe):
                self._count_one(batch, image_id, recipe, write)
            done += 1
            if progress is not None:
                progress(done, len(image_ids), 'counting images')
        self._write_counts(batch, unfinished)

    def _write_counts(self, batch: database.Batch,
                      unfinished: bool) -> None:
        if unfinished:
            # Synced: LevelDB may lose a batch that is not synced, and keep
            # later ones that are.
            self.catalog.write(batch, sync=True)
        else:
            # The images were seen in images/ above. The sync makes their links
            # durable before they are counted (N5.1).
            self.engine.sync('images')
            self.settle(batch)

    def _count_one(self, batch: database.Batch, image_id: str,
                   recipe: _engine.Recipe, write: Callable[[], None]) -> None:
        if not recipe.complete:
            self.unreadable.note(recipe.name, recipe.error)
            return
        if not self.catalog.counted(recipe.header()['transaction_id'], batch):
            try:
                self.count(batch, recipe, write)
            except recipes.RecipeError as e:
                self.unreadable.note(recipe.name, str(e))
                return
        self.unreadable.note_counted(image_id)

    def guard(self, work: Callable[[], _Result],
              progress: Progress | None = None,
              hosts: tuple[str, ...] = ()) -> _Result:
        """Do `work`. If the catalog is bad, rebuild it and do `work` again.

        Every task runs its work through this method.

        :param hosts: as for :meth:`rebuild`
        :raises LostLocks: this process is not the maintainer any more
        """
        self.confirm()
        if self.converting is not None and self.converting.is_overdue:
            self.end_conversion()   # other tasks may need its groups
        if self._catalog is None or not self._catalog.valid:
            self.rebuild(progress, hosts=hosts)
        try:
            return work()
        except database.CatalogError as e:
            self.rebuild(progress, str(e), hosts)
            return work()

    def scrub_state(self) -> dict[str, Any]:
        """Return the progress of the scrub's last pass, and its findings."""
        return self.catalog.scrub_state()

    def damaged_groups(self) -> set[int]:
        """The groups of which a block is known to be damaged."""
        return set(map(block_addresses.group_of, self.catalog.damaged()))

    # -- accounting steps (N5.2, N5.3) ------------------------------------

    def count(self, batch: database.Batch, recipe: _engine.Recipe,
              write: Callable[[], None]) -> None:
        """Count a whole recipe, in as many steps as it takes (N5.2).

        An exception from `write` ends the work between two steps. The next
        call that counts or un-counts the recipe continues from there.

        :param write: makes a step of the batch, and clears it
        :raises RecipeError: the recipe cannot be read; the batch has the pages
            that could be read
        """
        header, extents = recipe.header(), recipes.Extents(recipe)
        facts = refcounts.facts_of(header, recipes.measure(recipe))
        while not self.catalog.count(batch, header['transaction_id'], extents,
                                     facts, BATCH_BYTES):
            write()
        # So neither a collection nor a list has to open it again.
        self.catalog.set_seen(
            batch, header['image_id'].encode(),
            (recipe.inode, recipe.modified, header['transaction_id']))

    def uncount(self, batch: database.Batch, recipe: _engine.Recipe,
                write: Callable[[], None]) -> None:
        """Un-count a recipe's counted pages; otherwise as :meth:`count`."""
        txid = recipe.header()['transaction_id']
        extents = recipes.Extents(recipe)
        recipes.measure(recipe)    # finds damage before the first step
        while not self.catalog.uncount(batch, txid, extents, BATCH_BYTES):
            write()

    def settle(self, batch: database.Batch) -> None:
        """One accounting step: write and sync the batch, then the fence (I9).

        When it returns, the caller may unlink spool entries that this batch,
        or an earlier one, settled. With an empty batch this only makes sure of
        the fence.

        :raises NoSpaceError: the catalog has no room. The batch may be written
            or not; the caller must not unlink anything because of it
        :raises LostLocks: another maintainer does not know of the batch
        """
        if len(batch):
            # First: a write that fails may still have written the batch.
            self._fence.doubt()
            self.write(batch, sync=True, sequence=self._fence.next_sequence(
                self.catalog.sequence))
        self._fence.renew(self.catalog)
        self.confirm()

    def save_projects(self) -> None:
        """Write ``projects.json``, if accounting has changed the sums.

        On a full disk the file stays as it was; the next call tries again.
        """
        sequence = self.catalog.sequence
        if sequence == self._saved:
            return
        try:
            projects.save(self.repository.path,
                          self.catalog.statistics()['projects'])
        except OSError as e:
            LOG.warning('%s cannot be written: %s. What projects have stored '
                        'stays as it was known before.',
                        self._path(projects.NAME), e.strerror)
        else:
            self._saved = sequence

    def write(self, batch: database.Batch, **options: Any) -> None:
        """Write a batch to the catalog, at need in the reserved room."""
        self.reserve.with_room(lambda: self.catalog.write(batch, **options))

    # -- blocks stored again ----------------------------------------------

    def relocation(self) -> _engine.Relocation:
        """An object that stores blocks again, where uploads find them.

        The caller closes it.
        """
        # If the filter knows all groups, it learns of new blocks only from the
        # process that stores them. A filter that is made later reads them.
        self.repository.filter.attach(self.handle, create=False)
        return _engine.Relocation(self.engine, self.handle)

    def retry_unreadable(self, progress: Progress | None = None) -> None:
        """Count those unreadable images that can be read now."""
        images = self.unreadable.images()
        if images:
            self._count(images, progress)

    # -- methods for several tasks ----------------------------------------

    @contextlib.contextmanager
    def image_lock(self, image_id: str) -> Iterator[bool]:
        """Try the lock that deletes and merges of an image take (N9.1).

        Gives whether the lock was free; the end of the block releases it.

        :raises StorageError: the file of these locks is missing
        """
        free = self.engine.lock_image(image_id)
        try:
            yield free
        finally:
            if free:
                self.engine.unlock_image()
