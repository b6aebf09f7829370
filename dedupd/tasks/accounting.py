# SPDX-License-Identifier: Apache-2.0

"""Accounting: judges each entry of the spool (N4) and settles it (N5).

N5 requires four steps in this order: fsync of ``images/`` after the check, the
batch, the fence, the unlinking. Here a *round* of up to 64 entries goes
through each step together, so that two fsyncs serve all of them. The order
still holds for each entry:

* The round makes every check of N4 before it closes, and the fsync comes after
  that. So the fsync comes after each entry's check.
* An entry judged not live stays so until it is unlinked, because its locks
  are held until then: holding byte 0 means that its transaction is gone, and
  no other process makes an image of it. An entry judged live may be deleted
  meanwhile. The deleter then makes its own entry, which a later round or run
  settles. The same is true of an entry that is alone in its round.
* The round looks the ledger up through the batch, so two entries of one
  transaction cannot both be counted. Two names of one inode are never in the
  same round, because their locks would refuse each other.
* The batch has the changes of all entries. It is synced before the fence is
  written, and the entries are unlinked after that.

A recipe that names more than one batch can hold takes several steps. Each
step is a batch and a fence. The catalog knows how far each recipe got. So a
run may end between any two steps, in any way. The next run that judges the
entry goes on if the recipe is live, and goes back if it is not. Until then the
entry stays in the spool, and pins everything that the recipe names (N6.3).
"""

import collections
from collections.abc import Iterator
import contextlib
import dataclasses

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import database
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import recipes
from glance_dedup.maintenance import records

#: The most entries that a round may have.
ROUND = 64

_CHUNK_BYTES = 4 * records.CHUNK_SLOTS


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of an accounting run."""

    counted: int
    uncounted: int
    removed: int
    """Spool entries that were settled and unlinked."""
    left: int
    """Spool entries in use, by uploads or by readers of deleted images."""
    unreadable: dict[str, str]
    """Damaged files that could not be counted, each with its error. Unless
    this is empty, nothing may be freed."""


def run_once(maintainer: maintainer_role.Maintainer,
             pace: pacing.Pace) -> Result:
    """Settle all entries of the spool that are not in use.

    :raises pacing.Stopped: between two rounds; the rounds before it stand
    :raises NoSpaceError: if the disk has no room even to count
    """
    return maintainer.guard(lambda: Accountant(maintainer, pace).run(),
                            pace.step)


# -- judging (N4) -------------------------------------------------------------

class Entry:
    """A judged entry of the spool. It holds its locks until it is closed."""

    def __init__(self, recipe: _engine.Recipe) -> None:
        self.recipe = recipe
        self.name = recipe.name.rpartition('/')[2]
        self.live = False
        """images/<id> is this inode."""
        self.left = False
        """The entry is in use and stays."""
        self.writer_gone = False
        self.damaged = False

    @property
    def txid(self) -> bytes | None:
        """The recipe's transaction; None if no header and no name has it."""
        if self.recipe.complete:
            return self.recipe.header()['transaction_id']
        return recipes.txid_of_name(self.name)

    @property
    def has_lost_header(self) -> bool:
        """Return whether the header is lost, so that its blocks are unknown.

        A file without a header is an unfinished upload, not a loss, if its
        writer is gone and it is not an image.
        """
        return not self.recipe.complete and (
            self.live or self.recipe.error is not None)

    def close(self) -> None:
        """Close the file, which releases the entry's locks."""
        self.recipe.close()


def judge(maintainer: maintainer_role.Maintainer, name: str
          ) -> Entry | None:
    """Decide what to do with an entry (N4); None if the entry is gone.

    The caller closes the entry, which releases its locks.
    """
    try:
        entry = Entry(maintainer.engine.open_entry(name))
    except exceptions.ImageNotFound:
        return None
    try:
        if entry.recipe.kind == 'G':
            # The process that made it holds byte 0 while it works.
            entry.left = not entry.recipe.try_lock(0)
        elif entry.recipe.kind != 'X':
            _judge_recipe(maintainer, entry)
    except BaseException:
        entry.close()
        raise
    return entry


def _judge_recipe(maintainer: maintainer_role.Maintainer,
                  entry: Entry) -> None:
    unfinished = entry.recipe.kind in 'DO'
    entry.live = _is_live(maintainer, entry)                    # N4.1
    if entry.live and not unfinished:
        return      # whatever the locks' state
    if not entry.recipe.try_lock(0):                            # N4.2, N4.6
        entry.left = True
        return
    entry.writer_gone = True
    entry.live = _is_live(maintainer, entry)                    # N4.3
    if entry.live and unfinished:
        entry.left = not _is_given_up(maintainer, entry)        # N4.6
    if not entry.live and not entry.recipe.try_lock(1):         # N4.4
        entry.left = True
    # N4.5


def _is_live(maintainer: maintainer_role.Maintainer, entry: Entry) -> bool:
    # This comes first because it reads a missing header again.
    if entry.recipe.live():
        return True
    if entry.recipe.complete:
        return _has_copy(maintainer, entry)
    # An image may have lost its header. The search is not worth while for
    # each running upload, whose file has no other name.
    return (not entry.recipe.complete
            and (entry.writer_gone or entry.recipe.links > 1)
            and maintainer.recipes.image_of(entry.recipe.inode) is not None)


def _has_copy(maintainer: maintainer_role.Maintainer,
              entry: Entry) -> bool:
    """Return whether ``images/<id>`` is the same recipe in another file.

    After a repository was copied, two names of one file may be two files. The
    transaction id decides, because it is never used again.

    :raises DamagedError: if the image's header cannot be read
    """
    try:
        with contextlib.closing(maintainer.engine.open_recipe(
                entry.recipe.header()['image_id'])) as image:
            if not image.complete:
                raise exceptions.DamagedError(
                    f'whether spool/{entry.name} is an image is not known: '
                    f'{image.error}')
            return image.header()['transaction_id'] == entry.txid
    except exceptions.ImageNotFound:
        return False


def _is_given_up(maintainer: maintainer_role.Maintainer,
                 entry: Entry) -> bool:
    """Return whether a delete or merge ended without its effect (N4.6).

    A delete or merge holds the image lock until ``images/<id>`` is another
    file, or is gone. So if the lock is free and the recipe is still live,
    no process will finish the operation. This function need not keep the lock:
    the next delete makes its own entry.
    """
    image_id = (entry.recipe.header()['image_id'] if entry.recipe.complete
                else maintainer.recipes.image_of(entry.recipe.inode))
    if image_id is None:
        entry.live = False
        return True
    with maintainer.image_lock(image_id) as free:
        if free:
            entry.live = _is_live(maintainer, entry)
        return free


# -- settling (N5) ------------------------------------------------------------

class _Named:
    """The blocks that a spool entry names, read again for each request.

    Only the groups' numbers are in memory. A complete entry does not change.

    :param first: the first page of extents to read
    :param end: the page after the last one to read
    """

    def __init__(self, maintainer: maintainer_role.Maintainer,
                 recipe: _engine.Recipe, first: int = 0,
                 end: int | None = None) -> None:
        self._maintainer = maintainer
        self._name = recipe.name.rpartition('/')[2]
        self._inode = recipe.inode
        self._first = first
        self._end = recipe.pages if end is None else end
        self.txid: bytes = recipe.header()['transaction_id']
        self.groups = {group for runs in self._pieces(recipe)
                       for group in block_addresses.groups_in(runs)}

    def _pieces(self, recipe: _engine.Recipe) -> Iterator[bytes]:
        return block_addresses.pieces(recipe, self._first, self._end)

    def runs(self, group: int) -> Iterator[bytes]:
        """Runs that may name blocks of this group, among those of others.

        :raises DamagedError, StorageError: if the entry cannot be read
        """
        if group not in self.groups:
            return
        try:
            recipe = self._maintainer.engine.open_entry(self._name)
        except exceptions.ImageNotFound:
            return      # its writer gave up; it had locked the group, N6.1
        with contextlib.closing(recipe):
            if recipe.inode == self._inode:
                for runs in self._pieces(recipe):
                    if group in block_addresses.groups_in(runs):
                        yield runs


class Foreseen:
    """The catalog as it would be after settling the spool; changes nothing."""

    def __init__(self, maintainer: maintainer_role.Maintainer) -> None:
        self._maintainer = maintainer
        self._catalog = maintainer.catalog
        self._changes: list[tuple[_Named, int]] = []
        self._states: dict[bytes, bool] = {}
        self._preset: set[int] = set()

    def counted(self, txid: bytes) -> bool:
        """Return whether the ledger would count a recipe."""
        return self._states.get(txid, self._catalog.counted(txid))

    def begun(self, txid: bytes) -> int:
        """The number of pages of a begun recipe that would be counted."""
        return 0 if txid in self._states else self._catalog.begun(txid)

    def change(self, entry: Entry) -> None:
        """Count an entry that is live, or un-count one that is not."""
        recipe, txid = entry.recipe, entry.recipe.header()['transaction_id']
        at = (recipe.pages if self.counted(txid) else self.begun(txid))
        pages = (at, None) if entry.live else (0, at)
        try:
            named = _Named(self._maintainer, recipe, *pages)
        except exceptions.UNREADABLE as e:
            raise recipes.RecipeError(str(e)) from e
        self._changes.append((named, 1 if entry.live else -1))
        self._states[txid] = entry.live

    def counts(self, group: int,
               slots: int = block_addresses.GROUP_SLOTS) -> bytes:
        """The group's counts, in the form of :meth:`Catalog.counts`."""
        counts = bytearray(self._catalog.counts(group))
        for named, delta in self._changes:
            for runs in named.runs(group):
                _add(counts, group, runs, delta)
        return bytes(counts[:4 * slots])

    def group(self, group: int) -> dict[str, int | bool]:
        """The group's facts, in the form of :meth:`Catalog.group`."""
        facts = self._catalog.group(group)
        if any(group in named.groups for named, _ in self._changes):
            before = block_addresses.unpack(self._catalog.counts(group))
            after = block_addresses.unpack(self.counts(group))
            facts['used'] += before.count(0) - after.count(0)
            facts['dirty'] = facts['dirty'] or any(
                b and not a for b, a in zip(before, after))
        return facts

    def preset(self, batch: database.Batch, runs: bytes) -> None:
        """Put the counts of the runs' groups into a batch.

        The batch must not be written, and each call must pass the same one.
        """
        for group in block_addresses.groups_in(runs) - self._preset:
            self._preset.add(group)
            if any(group in named.groups for named, _ in self._changes):
                self._catalog.preset(batch, group, self.counts(group))


def _add(counts: bytearray, group: int, runs: bytes, delta: int) -> None:
    """Count, or un-count, the blocks of a group that the runs name."""
    for chunk in range(len(counts) // _CHUNK_BYTES):
        at = chunk * _CHUNK_BYTES
        with memoryview(counts)[at:at + _CHUNK_BYTES] as some:
            try:
                _engine.add_runs(some, group, chunk, runs, delta)
            except ValueError as e:
                raise database.CatalogError(
                    f'the catalog counts too few recipes: {e}') from e


class Accountant:
    """Judges and settles all entries, at each call of :meth:`run`."""

    def __init__(self, maintainer: maintainer_role.Maintainer,
                 pace: pacing.Pace) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._counted = self._uncounted = self._removed = self._left = 0
        self._known: dict[tuple[str, int], _Named] = {}
        self._pins: list[_Named] = []
        # The current step, and the entries that it settles.
        self._batch = maintainer.catalog.batch()
        self._settled: list[Entry] = []
        self._done = self._total = 0
        self._suspects: set[str] = set()
        self._rebuilt: set[str] = set()

    def run(self) -> Result:
        """Settle all entries of the spool that are not in use."""
        self._left = 0
        self._pins = []
        self._settle(self._maintainer.engine.spool())
        if self._suspects:
            self._rebuild()
        self._maintainer.retry_unreadable(self._pace.step)
        self._maintainer.save_projects()
        # The catalog may have grown.
        self._maintainer.reserve.keep()
        return Result(self._counted, self._uncounted, self._removed,
                      self._left, {**self._maintainer.unreadable.reasons(),
                                   **self._begun()})

    def pins(self, group: int) -> Iterator[bytes]:
        """Uncounted runs that entries in use name (N6.3).

        :raises DamagedError, StorageError: if an entry is no longer readable
        """
        for named in self._pins:
            yield from named.runs(group)

    def _begun(self) -> dict[str, str]:
        """Recipes that are counted only in part, and that no entry pins.

        While there is one, nothing may be freed. The caller has counted the
        live ones to their ends, or knows that they are unreadable.
        """
        pinned = {named.txid for named in self._pins}
        return {image_id: f'the recipe {txid.hex()} is counted only in part'
                for txid, image_id in self._maintainer.catalog.all_begun()
                if txid not in pinned}

    def foresee(self) -> Foreseen:
        """Predict the catalog after run(), from the present state."""
        self._pins = []
        foreseen = Foreseen(self._maintainer)
        for name in self._maintainer.engine.spool():
            entry = self._judge(name)
            if entry is not None:
                with contextlib.closing(entry):
                    if entry.left:
                        self._leave(entry)
                    else:
                        self._account(entry, foreseen)
        return foreseen

    def _settle(self, names: list[str]) -> None:
        waiting = collections.deque(names)
        self._total = len(names)
        while waiting:
            entries: list[Entry] = []
            try:
                later = self._judge_round(waiting, entries)
                self._settle_round(entries)
            finally:
                for entry in entries:
                    entry.close()
            waiting.extend(later)
            self._step(self._total - len(waiting))

    def _step(self, done: int) -> None:
        self._done = done
        self._pace.step(done, self._total, 'accounting')

    def _judge_round(self, waiting: collections.deque[str],
                     entries: list[Entry]) -> list[str]:
        """Take entries into a round; return the names for a later round."""
        later = []
        inodes = set()
        while waiting and len(entries) < ROUND:
            name = waiting.popleft()
            entry = self._judge(name)
            if entry is None:
                continue
            if entry.recipe.inode in inodes and entry.recipe.kind != 'X':
                # The locks of its other name may refuse its own.
                later.append(name)
                entry.close()
            elif entry.left:
                self._leave(entry)
                entry.close()
            else:
                inodes.add(entry.recipe.inode)
                entries.append(entry)
        return later

    def _judge(self, name: str) -> Entry | None:
        """Judge an entry; None: it is gone, or cannot be read and stays."""
        try:
            return judge(self._maintainer, name)
        except exceptions.UNREADABLE as e:
            self._note(name, str(e))
            self._left += 1
            return None

    def _leave(self, entry: Entry) -> None:
        """Note the blocks that an entry in use keeps alive (N6.3)."""
        self._left += 1
        if entry.recipe.kind == 'G':
            return
        if entry.recipe.complete:
            txid = entry.recipe.header()['transaction_id']
            if not self._maintainer.catalog.counted(txid):
                self._pin(entry)
        elif entry.writer_gone and entry.has_lost_header:
            self._note(entry.name, entry.recipe.error)
        # Else its writer is working, and holds the groups that it names.

    def _pin(self, entry: Entry) -> None:
        key = entry.name, entry.recipe.inode
        try:
            if key not in self._known:
                self._known[key] = _Named(self._maintainer, entry.recipe)
            self._pins.append(self._known[key])
        except exceptions.UNREADABLE as e:
            self._note(entry.name, str(e))

    def _note(self, name: str, error: str | None) -> None:
        self._maintainer.unreadable.note(f'spool/{name}', error)

    def _settle_round(self, entries: list[Entry]) -> None:
        if not entries:
            return
        maintainer = self._maintainer
        maintainer.engine.sync('images')                        # N5.1
        self._batch, self._settled = maintainer.catalog.batch(), []
        for entry in entries:
            if self._account(entry, self):                      # N5.2
                self._settled.append(entry)
            if self._batch.size > maintainer_role.BATCH_BYTES:
                # The checks of the round's remaining entries came before the
                # fsync, too. So each entry has its own steps in order.
                self._finish()
        self._finish()

    def _finish(self) -> None:
        """Make one step, and unlink the entries that need no further one."""
        self._maintainer.settle(self._batch)                    # N5.2, N5.3
        for entry in self._settled:
            with contextlib.suppress(exceptions.ImageNotFound):
                if entry.damaged:
                    entry.recipe.set_aside()
                entry.recipe.unlink()                           # N5.4
                self._removed += 1
        self._batch.clear()
        self._settled.clear()

    def counted(self, txid: bytes) -> bool:
        """Return whether the ledger with the current step counts a recipe."""
        return self._maintainer.catalog.counted(txid, self._batch)

    def begun(self, txid: bytes) -> int:
        """The number of counted pages of a begun recipe, with this step."""
        return self._maintainer.catalog.begun(txid, self._batch)

    def change(self, entry: Entry) -> None:
        """Count an entry that is live, or un-count one that is not."""
        def write() -> None:
            self._finish()
            self._step(self._done)
        if entry.live:
            self._maintainer.count(self._batch, entry.recipe, write)
            self._counted += 1
        else:
            self._maintainer.uncount(self._batch, entry.recipe, write)
            self._uncounted += 1

    def _account(self, entry: Entry, ledger: 'Accountant | Foreseen') -> bool:
        """Make the change that the ledger needs (N5.2).

        :returns: False if the entry must stay
        """
        if entry.recipe.kind in 'GX':
            return True
        txid = entry.txid
        counted = txid is not None and ledger.counted(txid)
        begun = txid is not None and ledger.begun(txid) > 0
        # A counted recipe once had a header.
        if entry.has_lost_header or (
                (counted or begun) and not entry.recipe.complete):
            return self._account_blindly(entry, counted, begun)
        if txid is None or (counted == entry.live and not begun):
            return True
        try:
            ledger.change(entry)
        except recipes.RecipeError as e:
            return self._account_damaged(entry, str(e))
        return True

    # -- damaged entries --------------------------------------------------

    def _account_blindly(self, entry: Entry, counted: bool,
                         begun: bool) -> bool:
        """Account for an entry whose header is lost."""
        error = entry.recipe.error or (
            f'spool/{entry.name} has no header')
        if entry.live and counted:
            image_id = self._maintainer.recipes.image_of(entry.recipe.inode)
            if image_id is not None:
                self._maintainer.unreadable.note_counted(image_id)
            return True
        if entry.live:
            return self._account_damaged(entry, error)
        if entry.name in self._rebuilt:
            return True
        if entry.txid is not None and not counted and not begun:
            # It was never an image, or no longer is one.
            entry.damaged = True
            return True
        return self._account_damaged(entry, error)

    def _account_damaged(self, entry: Entry, error: str) -> bool:
        """Account for an unreadable entry that the ledger needs."""
        if entry.live:
            image_id = (entry.recipe.header()['image_id']
                        if entry.recipe.complete else
                        self._maintainer.recipes.image_of(entry.recipe.inode))
            if image_id is None:
                return False    # deleted just now; the next run sees it
            self._maintainer.unreadable.note(f'images/{image_id}', error)
        elif entry.name not in self._rebuilt:
            self._suspects.add(entry.name)
        else:
            self._note(entry.name, error)
        return False

    def _rebuild(self) -> None:
        """Remove the counts of deleted recipes that cannot be read.

        This sets their files aside. It rebuilds the catalog from ``images/``,
        which does not have them. Only then it removes the entries.
        """
        suspects = sorted(self._suspects)
        for name in suspects:
            with contextlib.closing(
                    self._maintainer.engine.open_entry(name)) as recipe:
                recipe.set_aside()
        self._suspects.clear()
        self._rebuilt.update(suspects)
        self._maintainer.rebuild(
            self._pace.step,
            f'spool/{suspects[0]} is damaged, so that it is not known what '
            'is to be un-counted')
        self._settle(suspects)
