# SPDX-License-Identifier: Apache-2.0

"""Accounting: each entry of the spool is judged (N4) and settled (N5).

N5 asks for four steps in this order: fsync of ``images/`` after the look, the
batch, the fence, the unlinking. Here a *round* of up to 64 entries goes
through each step together, so that two fsyncs serve all. The order holds for
each entry of it:

* every look of N4 is made before the round is closed, and the fsync is made
  after that, so after each entry's look;
* an entry that was judged not live stays so until it is unlinked, since its
  locks are held for so long: with byte 0 its transaction is gone, and nobody
  else makes an image of it. One that was judged live may be deleted
  meanwhile: then the deleter has made an entry of its own, which is settled by
  a later round or run. It is the same with an entry that is alone in its
  round;
* the ledger is asked through the batch, so two entries of one transaction
  cannot both be counted; and two names of one inode, whose locks would refuse
  one another, are never in one round;
* the batch, with all entries' changes, is synced before the fence is written,
  and all are unlinked after that.

A recipe that names more than one batch has room for takes several steps, each
of which is a batch and a fence. The catalog knows how far each one got. So a
run may end between any two, however it ends: whoever judges the entry next
goes on if the recipe is live, and goes back if it is not. Until then the entry
stays where it is, and pins all that the recipe names (N6.3).
"""

import collections
from collections.abc import Iterator
import contextlib
import dataclasses

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import task
from glance_dedup.maintenance import addresses as addresses_module
from glance_dedup.maintenance import catalog as catalog_module
from glance_dedup.maintenance import maintainer as maintainer_module

#: Entries of a round, at most.
ROUND = 64

_CHUNK_BYTES = 4 * catalog_module.CHUNK_SLOTS


@dataclasses.dataclass(frozen=True)
class Result:
    """What an accounting run did."""

    counted: int
    uncounted: int
    removed: int
    """Entries of the spool that were settled and unlinked."""
    left: int
    """Entries that are in use: of uploads, or of images still being read."""
    unreadable: dict[str, str]
    """What could not be counted since it is damaged, and how. While there is
    something, nothing may be freed."""


def run_once(maintainer: maintainer_module.Maintainer,
             pace: task.Pace) -> Result:
    """Settle what can be settled in the spool.

    :raises task.Stopped: between two rounds; what was done stands
    :raises NoSpaceError: if there is no room even to count
    """
    return maintainer.guard(lambda: Accountant(maintainer, pace).run(),
                            pace.step)


# -- judging (N4) -------------------------------------------------------------

class Entry:
    """An entry of the spool, judged. Holds its locks until it is closed."""

    def __init__(self, recipe: _engine.Recipe) -> None:
        self.recipe = recipe
        self.name = recipe.name.rpartition('/')[2]
        self.live = False
        """images/<id> is this very inode."""
        self.left = False
        """It is in use and stays."""
        self.writer_gone = False
        self.damaged = False

    @property
    def txid(self) -> bytes | None:
        """Of the recipe; None if neither header nor name can tell."""
        if self.recipe.complete:
            return self.recipe.header()['transaction_id']
        return maintainer_module.txid_of_name(self.name)

    @property
    def has_lost_header(self) -> bool:
        """What it names can only be guessed.

        A file without a header whose writer is gone, and that is no image, is
        an upload that did not get so far.
        """
        return not self.recipe.complete and (
            self.live or self.recipe.error is not None)

    def close(self) -> None:
        self.recipe.close()


def judge(maintainer: maintainer_module.Maintainer, name: str
          ) -> Entry | None:
    """What is to become of an entry; None if it is gone."""
    try:
        entry = Entry(maintainer.engine.open_entry(name))
    except exceptions.ImageNotFound:
        return None
    try:
        if entry.recipe.kind == 'G':
            # Its maker holds byte 0 for as long as it is at work.
            entry.left = not entry.recipe.try_lock(0)
        elif entry.recipe.kind != 'X':
            _judge_recipe(maintainer, entry)
    except BaseException:
        entry.close()
        raise
    return entry


def _judge_recipe(maintainer: maintainer_module.Maintainer,
                  entry: Entry) -> None:
    unfinished = entry.recipe.kind in 'DO'
    entry.live = _is_live(maintainer, entry)                    # N4.1
    if entry.live and not unfinished:
        return      # whatever the locks say
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


def _is_live(maintainer: maintainer_module.Maintainer, entry: Entry) -> bool:
    # First, since it reads again a header that was not there.
    if entry.recipe.live():
        return True
    if entry.recipe.complete:
        return _has_copy(maintainer, entry)
    # An image may have lost its header. To look for it is not worth while for
    # each upload under way, which has no other name.
    return (not entry.recipe.complete
            and (entry.writer_gone or entry.recipe.links > 1)
            and maintainer.image_of(entry.recipe.inode) is not None)


def _has_copy(maintainer: maintainer_module.Maintainer,
              entry: Entry) -> bool:
    """Whether ``images/<id>`` is the same recipe in another file.

    Where a repository was copied, the names of one file may be those of two.
    A transaction id is never used again, so it tells.

    :raises DamagedError: if it cannot be told
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


def _is_given_up(maintainer: maintainer_module.Maintainer,
                 entry: Entry) -> bool:
    """Whether a delete or merge ended without its effect (N4.6).

    It holds the image lock until ``images/<id>`` is another file, or none. So
    if the lock is free and the recipe live still, nobody will finish it. It
    need not be held any longer: the next delete makes an entry of its own.
    """
    image_id = (entry.recipe.header()['image_id'] if entry.recipe.complete
                else maintainer.image_of(entry.recipe.inode))
    if image_id is None:
        entry.live = False
        return True
    with maintainer.image_lock(image_id) as free:
        if free:
            entry.live = _is_live(maintainer, entry)
        return free


# -- settling (N5) ------------------------------------------------------------

class _Named:
    """What an entry of the spool names, read whenever it is asked for.

    In memory are only the groups' numbers. An entry's content does not change
    once it is complete.

    :param first: of the pages of extents that are meant
    :param end: behind the last of them
    """

    def __init__(self, maintainer: maintainer_module.Maintainer,
                 recipe: _engine.Recipe, first: int = 0,
                 end: int | None = None) -> None:
        self._maintainer = maintainer
        self._name = recipe.name.rpartition('/')[2]
        self._inode = recipe.inode
        self._first = first
        self._end = recipe.pages if end is None else end
        self.txid: bytes = recipe.header()['transaction_id']
        self.groups = {group for runs in self._pieces(recipe)
                       for group in addresses_module.groups_in(runs)}

    def _pieces(self, recipe: _engine.Recipe) -> Iterator[bytes]:
        return addresses_module.pieces(recipe, self._first, self._end)

    def runs(self, group: int) -> Iterator[bytes]:
        """Of this group, and of others.

        :raises DamagedError, StorageError: they cannot be told
        """
        if group not in self.groups:
            return
        try:
            recipe = self._maintainer.engine.open_entry(self._name)
        except exceptions.ImageNotFound:
            return      # its writer gave up: it had the group locked, N6.1
        with contextlib.closing(recipe):
            if recipe.inode == self._inode:
                for runs in self._pieces(recipe):
                    if group in addresses_module.groups_in(runs):
                        yield runs


class Foreseen:
    """The catalog as settling the spool would leave it; changes nothing."""

    def __init__(self, maintainer: maintainer_module.Maintainer) -> None:
        self._maintainer = maintainer
        self._catalog = maintainer.catalog
        self._changes: list[tuple[_Named, int]] = []
        self._states: dict[bytes, bool] = {}
        self._preset: set[int] = set()

    def counted(self, txid: bytes) -> bool:
        return self._states.get(txid, self._catalog.counted(txid))

    def begun(self, txid: bytes) -> int:
        return 0 if txid in self._states else self._catalog.begun(txid)

    def change(self, entry: Entry) -> None:
        """Count an entry that is live, or un-count one that is not."""
        recipe, txid = entry.recipe, entry.recipe.header()['transaction_id']
        at = (recipe.pages if self.counted(txid) else self.begun(txid))
        pages = (at, None) if entry.live else (0, at)
        try:
            named = _Named(self._maintainer, recipe, *pages)
        except exceptions.UNREADABLE as e:
            raise maintainer_module.RecipeError(str(e)) from e
        self._changes.append((named, 1 if entry.live else -1))
        self._states[txid] = entry.live

    def counts(self, group: int,
               slots: int = addresses_module.GROUP_SLOTS) -> bytes:
        """As the catalog's."""
        counts = bytearray(self._catalog.counts(group))
        for named, delta in self._changes:
            for runs in named.runs(group):
                _add(counts, group, runs, delta)
        return bytes(counts[:4 * slots])

    def group(self, group: int) -> dict[str, int | bool]:
        """As the catalog's."""
        facts = self._catalog.group(group)
        if any(group in named.groups for named, _ in self._changes):
            before = addresses_module.unpack(self._catalog.counts(group))
            after = addresses_module.unpack(self.counts(group))
            facts['used'] += before.count(0) - after.count(0)
            facts['dirty'] = facts['dirty'] or any(
                b and not a for b, a in zip(before, after))
        return facts

    def preset(self, batch: catalog_module.Batch, runs: bytes) -> None:
        """Have the counts of what runs name in a batch, never to be written.

        Always of the same one.
        """
        for group in addresses_module.groups_in(runs) - self._preset:
            self._preset.add(group)
            if any(group in named.groups for named, _ in self._changes):
                self._catalog.preset(batch, group, self.counts(group))


def _add(counts: bytearray, group: int, runs: bytes, delta: int) -> None:
    """Count, or un-count, what runs name of a group."""
    for chunk in range(len(counts) // _CHUNK_BYTES):
        at = chunk * _CHUNK_BYTES
        with memoryview(counts)[at:at + _CHUNK_BYTES] as some:
            try:
                _engine.add_runs(some, group, chunk, runs, delta)
            except ValueError as e:
                raise catalog_module.CatalogError(
                    f'the catalog counts too few recipes: {e}') from e


class Accountant:
    """Judges and settles all entries, as often as it is asked to."""

    def __init__(self, maintainer: maintainer_module.Maintainer,
                 pace: task.Pace) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._counted = self._uncounted = self._removed = self._left = 0
        self._known: dict[tuple[str, int], _Named] = {}
        self._pins: list[_Named] = []
        # The present step, and the entries that are settled by it.
        self._batch = maintainer.catalog.batch()
        self._settled: list[Entry] = []
        self._done = self._total = 0
        self._suspects: set[str] = set()
        self._rebuilt: set[str] = set()

    def run(self) -> Result:
        """Settle what can be settled."""
        self._left = 0
        self._pins = []
        self._settle(self._maintainer.engine.spool())
        if self._suspects:
            self._rebuild()
        self._maintainer.retry_unreadable(self._pace.step)
        return Result(self._counted, self._uncounted, self._removed,
                      self._left, {**self._maintainer.unreadable(),
                                   **self._begun()})

    def pins(self, group: int) -> Iterator[bytes]:
        """Runs that entries in use name and that are not counted (N6.3).

        :raises DamagedError, StorageError: they cannot be told any more
        """
        for named in self._pins:
            yield from named.runs(group)

    def _begun(self) -> dict[str, str]:
        """What is counted in part, and pinned by no entry.

        Nothing may be freed as long as there is something. What is live was
        counted to its end above, or is known to be unreadable.
        """
        pinned = {named.txid for named in self._pins}
        return {image_id: f'the recipe {txid.hex()} is counted only in part'
                for txid, image_id in self._maintainer.catalog.all_begun()
                if txid not in pinned}

    def foresee(self) -> Foreseen:
        """What run() would make of the catalog, as far as is known now."""
        self._pins = []
        foreseen = Foreseen(self._maintainer)
        for name in self._maintainer.engine.spool():
            try:
                entry = judge(self._maintainer, name)
            except exceptions.UNREADABLE as e:
                self._note(name, str(e))
                continue
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
        """Take entries into a round; returns those for a later one."""
        later = []
        inodes = set()
        while waiting and len(entries) < ROUND:
            name = waiting.popleft()
            try:
                entry = judge(self._maintainer, name)
            except exceptions.UNREADABLE as e:
                self._note(name, str(e))
                self._left += 1
                continue
            if entry is None:
                continue
            if entry.recipe.inode in inodes and entry.recipe.kind != 'X':
                # Its locks may be refused by those of its other name.
                later.append(name)
                entry.close()
            elif entry.left:
                self._leave(entry)
                entry.close()
            else:
                inodes.add(entry.recipe.inode)
                entries.append(entry)
        return later

    def _leave(self, entry: Entry) -> None:
        """Note what an entry that is in use keeps from being freed (N6.3)."""
        self._left += 1
        if entry.recipe.kind == 'G':
            return
        if entry.recipe.complete:
            if not self._maintainer.catalog.counted(entry.txid):
                self._pin(entry)
        elif entry.writer_gone and entry.has_lost_header:
            self._note(entry.name, entry.recipe.error)
        # Else its writer is at work, and holds the groups that it names.

    def _pin(self, entry: Entry) -> None:
        key = entry.name, entry.recipe.inode
        try:
            if key not in self._known:
                self._known[key] = _Named(self._maintainer, entry.recipe)
            self._pins.append(self._known[key])
        except exceptions.UNREADABLE as e:
            self._note(entry.name, str(e))

    def _note(self, name: str, error: str | None) -> None:
        self._maintainer.note_unreadable(f'spool/{name}', error)

    def _settle_round(self, entries: list[Entry]) -> None:
        if not entries:
            return
        maintainer = self._maintainer
        maintainer.engine.sync('images')                        # N5.1
        self._batch, self._settled = maintainer.catalog.batch(), []
        for entry in entries:
            if self._account(entry, self):                      # N5.2
                self._settled.append(entry)
            if self._batch.size > maintainer_module.BATCH_BYTES:
                # Those of the round that follow were looked at before the
                # fsync, too: so each has its own steps in order.
                self._finish()
        self._finish()

    def _finish(self) -> None:
        """One step, and the end of those entries that need no more."""
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
        """What the ledger says, with the present step."""
        return self._maintainer.catalog.counted(txid, self._batch)

    def begun(self, txid: bytes) -> int:
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
        """Change what the ledger asks for (N5.2).

        False if the entry must stay.
        """
        if entry.recipe.kind in 'GX':
            return True
        txid = entry.txid
        counted = txid is not None and ledger.counted(txid)
        begun = txid is not None and ledger.begun(txid) > 0
        # What is counted had a header once.
        if entry.has_lost_header or (
                (counted or begun) and not entry.recipe.complete):
            return self._account_blindly(entry, counted, begun)
        if txid is None or (counted == entry.live and not begun):
            return True
        try:
            ledger.change(entry)
        except maintainer_module.RecipeError as e:
            return self._account_damaged(entry, str(e))
        return True

    # -- damaged entries --------------------------------------------------

    def _account_blindly(self, entry: Entry, counted: bool,
                         begun: bool) -> bool:
        """Of an entry whose header is lost."""
        error = entry.recipe.error or (
            f'spool/{entry.name} has no header')
        if entry.live and counted:
            image_id = self._maintainer.image_of(entry.recipe.inode)
            if image_id is not None:
                self._maintainer.note_counted(image_id)
            return True
        if entry.live:
            return self._account_damaged(entry, error)
        if entry.name in self._rebuilt:
            return True
        if entry.txid is not None and not counted and not begun:
            # It was never an image, or is none any more.
            entry.damaged = True
            return True
        return self._account_damaged(entry, error)

    def _account_damaged(self, entry: Entry, error: str) -> bool:
        """Of an entry that the ledger asks for, and that cannot be read."""
        if entry.live:
            image_id = (entry.recipe.header()['image_id']
                        if entry.recipe.complete else
                        self._maintainer.image_of(entry.recipe.inode))
            if image_id is None:
                return False    # deleted just now; the next run sees it
            self._maintainer.note_unreadable(f'images/{image_id}', error)
        elif entry.name not in self._rebuilt:
            self._suspects.add(entry.name)
        else:
            self._note(entry.name, error)
        return False

    def _rebuild(self) -> None:
        """Get rid of counts of deleted recipes that cannot be read.

        Their files are set aside; the catalog is made anew, from ``images/``,
        which they are not in; only then the entries go.
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
            'is to be un-counted: the catalog')
        self._settle(suspects)
