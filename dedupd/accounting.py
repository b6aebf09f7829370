#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Accounting: each entry of the spool is judged (N4) and settled (N5).

N5 asks for four steps in this order: fsync of ``images/`` after the look, the
batch, the fence, the unlinking. Here a *lot* of up to 64 entries goes through
each step together, so that two fsyncs serve all. The order holds for each
entry of it:

* every look of N4 is made before the lot is closed, and the fsync is made
  after that, so after each entry's look;
* an entry that was judged not live stays so until it is unlinked, since its
  locks are held for so long: with byte 0 its transaction is gone, and nobody
  else makes an image of it. One that was judged live may be deleted
  meanwhile: then the deleter has made an entry of its own, which is settled by
  a later lot or run. It is the same with an entry that is alone in its lot;
* the ledger is asked through the batch, so two entries of one transaction
  cannot both be counted; and two names of one inode, whose locks would refuse
  one another, are never in one lot;
* the batch, with all entries' changes, is synced before the fence is written,
  and all are unlinked after that.
"""

import collections
import contextlib
import dataclasses

from dedupd import task
from glance_dedup import _engine
from glance_dedup import catalog as catalog_module
from glance_dedup import exceptions
from glance_dedup import maintainer as maintainer_module

LOT = 64


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
             control: task.Control) -> Result:
    """Settle what can be settled in the spool.

    :raises task.Stopped: between two lots; what was done stands
    :raises NoSpaceError: if there is no room even to count
    """
    return maintainer.guard(lambda: Accountant(maintainer, control).run(),
                            control.step)


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

class Accountant:
    """Judges and settles all entries, as often as it is asked to.

    Keeps in memory what entries in use name; an entry's content does not
    change once it is complete.
    """

    def __init__(self, maintainer: maintainer_module.Maintainer,
                 control: task.Control) -> None:
        self._maintainer = maintainer
        self._control = control
        self._counted = self._uncounted = self._removed = self._left = 0
        self._runs: dict[tuple[str, int], bytes] = {}
        self._pins: list[bytes] = []
        self._suspects: set[str] = set()
        self._rebuilt: set[str] = set()

    def run(self) -> Result:
        """Settle what can be settled."""
        self._left = 0
        self._pins = []
        self._settle(self._maintainer.engine.spool())
        if self._suspects:
            self._rebuild()
        self._maintainer.retry_unreadable()
        return Result(self._counted, self._uncounted, self._removed,
                      self._left, self._maintainer.unreadable())

    def pins(self) -> list[bytes]:
        """Runs that entries in use name and that are not counted (N6.3)."""
        return self._pins

    def foresee(self) -> catalog_module.Batch:
        """What run() would write, as far as is known now. Changes nothing."""
        self._pins = []
        batch = self._maintainer.catalog.batch()
        for name in self._maintainer.engine.spool():
            try:
                entry = judge(self._maintainer, name)
            except maintainer_module.UNREADABLE as e:
                self._note(name, str(e))
                continue
            if entry is not None:
                with contextlib.closing(entry):
                    if entry.left:
                        self._leave(entry)
                    else:
                        self._account(entry, batch)
        return batch

    def _settle(self, names: list[str]) -> None:
        waiting = collections.deque(names)
        while waiting:
            lot: list[Entry] = []
            try:
                later = self._judge_lot(waiting, lot)
                self._settle_lot(lot)
            finally:
                for entry in lot:
                    entry.close()
            waiting.extend(later)
            self._control.step(len(names) - len(waiting), len(names),
                               'accounting')

    def _judge_lot(self, waiting: collections.deque[str],
                   lot: list[Entry]) -> list[str]:
        """Take entries into a lot; returns those for a later one."""
        later = []
        inodes = set()
        while waiting and len(lot) < LOT:
            name = waiting.popleft()
            try:
                entry = judge(self._maintainer, name)
            except maintainer_module.UNREADABLE as e:
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
                lot.append(entry)
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
            if key not in self._runs:
                self._runs[key] = entry.recipe.runs()
            self._pins.append(self._runs[key])
        except maintainer_module.UNREADABLE as e:
            self._note(entry.name, str(e))

    def _note(self, name: str, error: str | None) -> None:
        self._maintainer.note_unreadable(f'spool/{name}', error)

    def _settle_lot(self, lot: list[Entry]) -> None:
        if not lot:
            return
        maintainer = self._maintainer
        maintainer.engine.sync('images')                        # N5.1
        batch = maintainer.catalog.batch()
        settled = []
        for entry in lot:
            if self._account(entry, batch):                     # N5.2
                settled.append(entry)
            if batch.size > maintainer_module.BATCH_BYTES:
                # Those of the lot that follow were looked at before the
                # fsync, too: so each has its own steps in order.
                self._finish(batch, settled)
                batch, settled = maintainer.catalog.batch(), []
        self._finish(batch, settled)

    def _finish(self, batch: catalog_module.Batch,
                settled: list[Entry]) -> None:
        self._maintainer.settle(batch)                          # N5.2, N5.3
        for entry in settled:
            with contextlib.suppress(exceptions.ImageNotFound):
                if entry.damaged:
                    entry.recipe.set_aside()
                entry.recipe.unlink()                           # N5.4
                self._removed += 1

    def _account(self, entry: Entry, batch: catalog_module.Batch) -> bool:
        """Put into the batch what the ledger asks for (N5.2).

        False if the entry must stay.
        """
        if entry.recipe.kind in 'GX':
            return True
        txid = entry.txid
        counted = txid is not None and (
            self._maintainer.catalog.counted(txid, batch))
        # What is counted had a header once.
        if entry.has_lost_header or (
                counted and not entry.recipe.complete):
            return self._account_blindly(entry)
        if txid is None or counted == entry.live:
            return True
        try:
            runs = entry.recipe.runs()
        except maintainer_module.UNREADABLE as e:
            return self._account_damaged(entry, str(e))
        if entry.live:
            header = entry.recipe.header()
            self._maintainer.catalog.count(
                batch, txid, runs, catalog_module.facts_of(header, runs))
            self._counted += 1
        else:
            self._maintainer.catalog.uncount(batch, txid, runs)
            self._uncounted += 1
        return True

    # -- damaged entries --------------------------------------------------

    def _account_blindly(self, entry: Entry) -> bool:
        """Of an entry whose header is lost."""
        txid = entry.txid
        counted = txid is not None and (
            self._maintainer.catalog.counted(txid))
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
        if txid is not None and not counted:
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
            self._control.step,
            f'spool/{suspects[0]} is damaged, so that it is not known what '
            'is to be un-counted: the catalog')
        self._settle(suspects)
