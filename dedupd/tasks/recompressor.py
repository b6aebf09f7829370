# SPDX-License-Identifier: Apache-2.0

"""Recompression: makes quickly compressed groups smaller in idle hours.

A run works group by group. It writes a new file with the same blocks at the
same addresses, while the old file stays in use; then it exchanges the files.
The group itself notes its codec and level, so there is no cursor: a run goes
on with the first group that is not done. A collector that wants the group, and
a full disk, end the work on it at once.

A group that is partly filled is recompressed when it has not changed for an
hour, and again when it has twice as many blocks, or is full. So each block
is compressed a few times at most. Only the maintainer does this: it recovers
the tail that writers left, and locks them out of the old file before it takes
the name from it. A helper changes no file in place, so it takes only sealed
groups, to which no writer comes any more.

If the maintainer's run makes way in the middle of a sealed group, it keeps the
unfinished file, and the group's lease, until it goes on or the maintainer
ends. It gives up a group that is partly filled, since uploads may want to
append to it. A helper's run gives up any: a helper has one lease at most.

Similar blocks are put next to each other within their group, unless the option
``recompress_cluster_similar`` says otherwise.

If the new file is hardly smaller, the old one stays, and counts as done. To
try again would take as long and gain as little. So a group is recompressed
once for each requested codec, level and order, as long as no block is added. A
helper notes such a group for the maintainer, which alone may write that into
the group (I4).
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import time
from typing import Any

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import helper_daemon
from glance_dedup.maintenance import host_notes
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import space

# The new file must be smaller than the old one by at least one part in this.
_WORTH = 32
# The exchange waits for transactions that name blocks of the group: it makes
# this many tries, half a second apart.
_TRIES = 60
_PAUSE = 0.5
# In idle hours a partly filled group waits until its last change is this old.
_QUIET = 3600.0

_POISONED = 1

Worker = maintainer_role.Maintainer | helper_daemon.Helper
#: Codec and level, as numbers; true for the order of similarity.
Mark = tuple[int, int, bool]


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """Plan of a run for one group."""

    number: int
    action: str
    """'recompress' or 'skip'."""
    reason: str
    """The reason why the run would skip the group, in a few words."""
    bytes: int
    """Bytes of disk that the group takes now."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a run."""

    groups: list[GroupPlan]
    """The groups that are not done."""
    bytes: int
    """Bytes of disk that the groups to recompress take now."""


@dataclasses.dataclass
class Result:
    """Result of a run."""

    groups: int = 0
    """Groups that are smaller now."""
    disk_bytes: int = 0
    """Bytes given back to the file system."""
    kept: int = 0
    """Groups left as they were, because they would hardly become smaller."""
    busy: int = 0
    """Groups in use, put off to the next run."""
    skipped_for_space: int = 0
    """Groups for whose new file the disk had no room."""
    failed: dict[int, str] = dataclasses.field(default_factory=dict)
    """Groups that are damaged, or whose disk failed, each with its error."""


def plan(maintainer: maintainer_role.Maintainer, codec: str,
         level: int = 0, similar: bool = False) -> Plan:
    """Plan a requested run; change nothing.

    The plan does not find out which groups are in use.

    :raises InvalidParameter: for a level that the codec lacks
    """
    mark = mark_of(maintainer, codec, level, similar)
    groups = maintainer.guard(lambda: _plan(maintainer, mark, 0))
    return Plan(groups, sum(group.bytes for group in groups
                            if group.action == 'recompress'))


def run_once(worker: Worker, pace: pacing.Pace, codec: str, level: int = 0,
             is_mine: Callable[[int], bool] = lambda group: True,
             similar: bool = False) -> Result:
    """Recompress the groups that do not have this codec and level yet.

    :param pace: if it waits for idle processors, the run leaves partly filled
        groups that changed lately
    :param similar: put similar blocks next to each other
    :param is_mine: returns whether a sealed group is to be recompressed here;
        called for each group just before, since shares may change. Partly
        filled groups are the maintainer's
    :raises pacing.Stopped: between two steps; the next run goes on from there
    :raises InvalidParameter: for a level that the codec lacks
    """
    mark = mark_of(worker, codec, level, similar)
    kind = _HelpersRun if isinstance(worker, helper_daemon.Helper) else _Run
    return worker.guard(
        lambda: kind(worker, pace, codec, level, mark, is_mine).run(),
        pace.step)


def mark_of(worker: Worker, codec: str, level: int, similar: bool) -> Mark:
    """The mark of groups that are recompressed like this.

    :raises InvalidParameter: for a level that the codec lacks
    """
    return _engine.codec_mark(codec, level, similar)


def give_up(maintainer: maintainer_role.Maintainer) -> None:
    """Drop the unfinished group in which a run made way."""
    if maintainer.rewriting is not None:
        rewriting, _ = maintainer.rewriting
        maintainer.rewriting = None
        rewriting.close()


def note_kept(maintainer: maintainer_role.Maintainer, number: int,
              mark: Mark) -> None:
    """Note in a group a helper's finding: it hardly becomes smaller.

    :param mark: the mark of the helper's try; if there is no such codec or
        level, nothing is noted
    :raises BusyError: if the group is in use
    """
    codec, level, similar = mark
    if codec >= len(space.CODECS):
        return
    with contextlib.suppress(exceptions.ImageNotFound,
                             exceptions.InvalidParameter):
        facts = maintainer.engine.group_facts(number)
        if not _has_mark(facts, mark):
            maintainer.engine.note_codec(number, space.CODECS[codec], level,
                                         similar)


@contextlib.contextmanager
def noting_failure(result: Any, number: int) -> Iterator[None]:
    """Note a group's failure in a run's result; the next one may not."""
    try:
        yield
    except exceptions.ImageNotFound:
        pass                    # it was collected
    except exceptions.BusyError:
        result.busy += 1        # or is to be collected
    except exceptions.NoSpaceError:
        result.skipped_for_space += 1
    except exceptions.UNREADABLE as e:
        result.failed[number] = str(e)


def write(rewriting: _engine.Rewriting, pace: pacing.Pace, done: int,
          total: int, what: str) -> None:
    """Write all of a group's new file.

    :param done: groups before this one, of so many in all
    :raises BusyError: a collector wants the group
    """
    complete = False
    while not complete:
        complete, cost = rewriting.step()
        pace.step(done, total, f'{what}: '
                  f'{100 * rewriting.done // rewriting.slots} %', cost,
                  watch=rewriting.check)


def exchange(worker: Worker, rewriting: _engine.Rewriting, pace: pacing.Pace
             ) -> bool:
    """Put a complete new file in the old one's place; False: it is in use.

    :raises BusyError: a collector wants the group
    """
    engine, number = worker.engine, rewriting.number
    announced = engine.announce(number)
    try:
        for _ in range(_TRIES):
            with contextlib.suppress(exceptions.BusyError):
                rewriting.exchange()
                return True
            if not announced:
                rewriting.check()   # a collector may want the group
            pace.pause(_PAUSE)
    finally:
        if announced:
            engine.withdraw(number)
    return False


def _plan(worker: Worker, mark: Mark, quiet: float) -> list[GroupPlan]:
    damaged = worker.damaged_groups()
    found = []
    for number in worker.engine.groups():
        try:
            facts = worker.engine.group_facts(number)
        except exceptions.ImageNotFound:
            continue
        except exceptions.UNREADABLE as e:
            found.append(GroupPlan(number, 'skip', str(e), 0))
            continue
        if not facts['is_cold'] and not is_done(facts, mark):
            reason = _reason(facts, number in damaged) or (
                _reason_to_wait(facts, mark, quiet))
            found.append(GroupPlan(
                number, 'skip' if reason else 'recompress', reason,
                facts['allocated']))
    return found


def _reason(facts: dict[str, Any], damaged: bool) -> str:
    """The reason why a group cannot be recompressed; '': it can."""
    if facts['flags'] & _POISONED:
        return 'writing to it failed once'
    if not facts['published']:
        return 'nothing is stored in it'
    return 'a block of it is damaged' if damaged else ''


def _is_partial(facts: dict[str, Any]) -> bool:
    return facts['published'] < facts['slots']


def _has_mark(facts: dict[str, Any], mark: Mark) -> bool:
    return (facts['codec'], facts['level'], facts['similar']) == mark


def is_done(facts: dict[str, Any], mark: Mark) -> bool:
    """Return whether a group is recompressed as a mark requires."""
    # A group never recompressed, or to no codec, covers nothing.
    return _has_mark(facts, mark) and (
        not facts['codec'] or facts['covered'] == facts['published'])


def _reason_to_wait(facts: dict[str, Any], mark: Mark,
                    quiet: float) -> str:
    """The reason to recompress a group later; '': it need not wait.

    :param quiet: the minimum age of its last change, seconds
    """
    if not _is_partial(facts):
        return ''
    if _has_mark(facts, mark) and facts['published'] < 2 * facts['covered']:
        return 'few blocks were added since it was recompressed'
    # A time to come is a clock's mistake.
    if 0 <= time.time() - facts['modified'] < quiet:
        return 'it changed lately'
    return ''


class _Run:
    """A run of the maintainer."""

    def __init__(self, worker: Any, pace: pacing.Pace, codec: str, level: int,
                 mark: Mark, is_mine: Callable[[int], bool]) -> None:
        self._worker = worker
        self._pace = pace
        self._codec, self._level, self._mark = codec, level, mark
        self._is_mine = is_mine
        self._quiet = _QUIET if pace.patient else 0
        self._result = Result()
        self._tried: set[int] = set()
        self._done = 0          # groups
        self._total = 0

    def run(self) -> Result:
        # Again, since another member may have gone and left its share.
        while wanted := self._wanted():
            self._total = len(self._tried) + len(wanted)
            self._resume(wanted)
            for number in wanted:
                if self._is_here(number):
                    self._tried.add(number)
                    self._try(number)
        return self._result

    def _wanted(self) -> list[int]:
        groups = _plan(self._worker, self._mark, self._quiet)
        return [group.number for group in groups
                if group.action == 'recompress'
                and group.number not in self._tried
                and self._is_here(group.number)]

    def _is_here(self, number: int) -> bool:
        """Return whether this run is to recompress the group."""
        return self._is_mine(number) or self._is_open(number)

    def _is_open(self, number: int) -> bool:
        """Return whether writers may append to a group."""
        try:
            return _is_partial(self._worker.engine.group_facts(number))
        except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
            return False

    def _resume(self, wanted: list[int]) -> None:
        """Go on with the group in which the last run made way."""
        if self._worker.rewriting is None:
            return
        rewriting, mark = self._worker.rewriting
        number = rewriting.number
        if mark == self._mark and number in wanted:
            wanted.remove(number)
            self._tried.add(number)
            self._finish(rewriting, number)
        else:
            give_up(self._worker)

    def _try(self, number: int) -> None:
        if self._result.skipped_for_space:
            # The next group needs as much room.
            self._result.skipped_for_space += 1
            return
        self._pace.wait_until_idle()
        rewriting = None
        with noting_failure(self._result, number):
            rewriting = self._worker.engine.begin_rewriting(
                number, self._codec, self._level, self._mark[2])
        if rewriting is None:
            self._done += 1
        else:
            self._go_on(rewriting, number)

    def _go_on(self, rewriting: _engine.Rewriting, number: int) -> None:
        """Recompress a group; if the run makes way, the next one goes on.

        But uploads may want to append to a partly filled group.
        """
        if self._is_open(number):
            self._do_at_once(rewriting, number)
        else:
            self._worker.rewriting = rewriting, self._mark
            self._finish(rewriting, number)

    def _do_at_once(self, rewriting: _engine.Rewriting, number: int) -> None:
        """Recompress a group, or give it up if the run makes way."""
        with contextlib.closing(rewriting):
            self._finish(rewriting, number)

    def _finish(self, rewriting: _engine.Rewriting, number: int) -> None:
        """Recompress the rest of a group, up to the exchange."""
        with noting_failure(self._result, number):
            write(rewriting, self._pace, self._done, self._total,
                  f'compressing group {number:08x} again')
            self._exchange(rewriting)
        self._close(rewriting)
        self._done += 1
        self._pace.step(self._done, self._total, 'compressing groups again')

    def _close(self, rewriting: _engine.Rewriting) -> None:
        give_up(self._worker)
        rewriting.close()

    def _exchange(self, rewriting: _engine.Rewriting) -> None:
        before, after = rewriting.sizes()
        if after > before - before // _WORTH:
            self._keep_old(rewriting)
            self._result.kept += 1
            return
        if exchange(self._worker, rewriting, self._pace):
            self._result.groups += 1
            self._result.disk_bytes += before - after
        else:
            self._result.busy += 1

    def _keep_old(self, rewriting: _engine.Rewriting) -> None:
        rewriting.keep_old()


class _HelpersRun(_Run):
    """A run of a helper, which has no catalog and changes no file in place."""

    def run(self) -> Result:
        kept = self._worker.notes.kept
        wanted = set(self._wanted())
        for number in [number for number, mark in kept.items()
                       if number not in wanted or mark != self._mark]:
            del kept[number]
        self._tried.update(kept)
        return super().run()

    def _try(self, number: int) -> None:
        # A helper has no catalog, which would have the damaged blocks.
        with contextlib.suppress(exceptions.ImageNotFound,
                                 *exceptions.UNREADABLE):
            slots = self._worker.engine.group_facts(number)['slots']
            entries = self._worker.engine.entries(number, 0, slots)
            if block_addresses.DAMAGED in block_addresses.columns(
                    entries).states:
                return
        super()._try(number)

    def _is_here(self, number: int) -> bool:
        return self._is_mine(number) and not self._is_open(number)

    def _go_on(self, rewriting: _engine.Rewriting, number: int) -> None:
        self._do_at_once(rewriting, number)

    def _keep_old(self, rewriting: _engine.Rewriting) -> None:
        kept = self._worker.notes.kept
        while len(kept) >= host_notes.MAX_RETAINED:
            del kept[next(iter(kept))]
        kept[rewriting.number] = self._mark
        self._worker.save()
