# SPDX-License-Identifier: Apache-2.0

"""Recompression: makes quickly compressed groups smaller in idle hours.

A run works group by group. It takes only sealed groups, to which no writer
comes any more. It writes a new file with the same blocks at the same
addresses, while the old file stays in use; then it exchanges the files. The
group itself notes its codec and level, so there is no cursor: a run goes on
with the first group that is not done.

A run that makes way in the middle of a group keeps the unfinished file, and
the group's lease, until it goes on or the maintainer ends.

If the new file is hardly smaller, the old one stays, and counts as done. To
try again would take as long and gain as little. So a group is recompressed
once for each requested codec and level.
"""

import contextlib
import dataclasses
from typing import Any

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import task
from glance_dedup.maintenance import addresses as addresses_module
from glance_dedup.maintenance import maintainer as maintainer_module

# The new file must be smaller than the old one by at least one part in this.
_WORTH = 32
# The exchange waits for transactions that name blocks of the group: it makes
# this many tries, half a second apart.
_TRIES = 60
_PAUSE = 0.5

_POISONED = 1


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """What a run would do with a group."""

    number: int
    action: str
    """'recompress' or 'skip'."""
    reason: str
    """Why the run would skip the group, in a few words."""
    bytes: int
    """Bytes of disk that the group takes now."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run would do now."""

    groups: list[GroupPlan]
    """The groups that are not done."""
    bytes: int
    """Bytes of disk that the groups to recompress take now."""


@dataclasses.dataclass
class Result:
    """What a run did."""

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


def plan(maintainer: maintainer_module.Maintainer, codec: str,
         level: int = 0) -> Plan:
    """Predict what a run would do; changes nothing.

    The plan does not find out which groups are in use.

    :raises InvalidParameter: for a level that the codec lacks
    """
    mark = _engine.codec_mark(codec, level)
    groups = maintainer.guard(lambda: _plan(maintainer, mark))
    return Plan(groups, sum(group.bytes for group in groups
                            if group.action == 'recompress'))


def run_once(maintainer: maintainer_module.Maintainer, pace: task.Pace,
             codec: str, level: int = 0) -> Result:
    """Recompress the groups that do not have this codec and level yet.

    :raises task.Stopped: between two steps; the next run goes on from there
    :raises InvalidParameter: for a level that the codec lacks
    """
    mark = _engine.codec_mark(codec, level)
    return maintainer.guard(
        lambda: _Run(maintainer, pace, codec, level, mark).run(),
        pace.step)


def give_up(maintainer: maintainer_module.Maintainer) -> None:
    """Drop the unfinished group in which a run made way."""
    if maintainer.rewriting is not None:
        rewriting, _ = maintainer.rewriting
        maintainer.rewriting = None
        rewriting.close()


def _plan(maintainer: maintainer_module.Maintainer,
          mark: tuple[int, int]) -> list[GroupPlan]:
    damaged = set(map(addresses_module.group_of,
                      maintainer.catalog.damaged()))
    found = []
    for number in maintainer.engine.groups():
        try:
            facts = maintainer.engine.group_facts(number)
        except exceptions.ImageNotFound:
            continue
        except exceptions.UNREADABLE as e:
            found.append(GroupPlan(number, 'skip', str(e), 0))
            continue
        if (facts['codec'], facts['level']) != mark:
            reason = _reason(facts, number in damaged)
            found.append(GroupPlan(
                number, 'skip' if reason else 'recompress', reason,
                facts['allocated']))
    return found


def _reason(facts: dict[str, Any], damaged: bool) -> str:
    """Why a group cannot be recompressed, in a few words; '': it can."""
    if facts['flags'] & _POISONED:
        return 'writing to it failed once'
    if facts['published'] < facts['slots']:
        return 'it is not full yet'
    return 'a block of it is damaged' if damaged else ''


class _Run:
    def __init__(self, maintainer: maintainer_module.Maintainer,
                 pace: task.Pace, codec: str, level: int,
                 mark: tuple[int, int]) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._codec, self._level, self._mark = codec, level, mark
        self._result = Result()
        self._done = 0          # groups
        self._total = 0

    def run(self) -> Result:
        wanted = [group.number
                  for group in _plan(self._maintainer, self._mark)
                  if group.action == 'recompress']
        self._total = len(wanted)
        self._resume(wanted)
        for number in wanted:
            if self._result.skipped_for_space:
                # The next group needs as much room.
                self._result.skipped_for_space += 1
                continue
            self._pace.wait_until_idle()
            self._recompress(number)
        return self._result

    def _resume(self, wanted: list[int]) -> None:
        """Go on with the group in which the last run made way."""
        if self._maintainer.rewriting is None:
            return
        rewriting, mark = self._maintainer.rewriting
        number = rewriting.number
        if mark == self._mark and number in wanted:
            wanted.remove(number)
            self._finish(rewriting, number)
        else:
            give_up(self._maintainer)

    def _recompress(self, number: int) -> None:
        engine = self._maintainer.engine
        try:
            # If the group is in use now, it may stay so for long. Then the
            # compression would be in vain.
            engine.enter_group(number).close()
            rewriting = engine.begin_rewriting(number, self._codec,
                                               self._level)
        except exceptions.ImageNotFound:
            self._done += 1
        except exceptions.BusyError:
            self._result.busy += 1
            self._done += 1
        except exceptions.NoSpaceError:
            self._result.skipped_for_space += 1
        except exceptions.UNREADABLE as e:
            self._result.failed[number] = str(e)
        else:
            self._maintainer.rewriting = rewriting, self._mark
            self._finish(rewriting, number)

    def _finish(self, rewriting: _engine.Rewriting, number: int) -> None:
        """Recompress the rest of a group, up to the exchange.

        If the task is stopped, the next run goes on with this group.
        """
        try:
            self._write(rewriting)
            self._exchange(rewriting)
        except exceptions.NoSpaceError:
            self._result.skipped_for_space += 1
        except exceptions.UNREADABLE as e:
            self._result.failed[number] = str(e)
        give_up(self._maintainer)
        self._done += 1
        self._pace.step(self._done, self._total, 'compressing groups anew')

    def _write(self, rewriting: _engine.Rewriting) -> None:
        complete = False
        while not complete:
            complete, cost = rewriting.step()
            self._pace.step(
                self._done, self._total,
                f'compressing group {rewriting.number:08x} anew: '
                f'{100 * rewriting.done // rewriting.slots} %', cost)

    def _exchange(self, rewriting: _engine.Rewriting) -> None:
        before, after = rewriting.sizes()
        if after > before - before // _WORTH:
            rewriting.keep_old()
            self._result.kept += 1
            return
        engine, number = self._maintainer.engine, rewriting.number
        announced = engine.announce(number)
        try:
            for _ in range(_TRIES):
                with contextlib.suppress(exceptions.BusyError):
                    rewriting.exchange()
                    self._result.groups += 1
                    self._result.disk_bytes += before - after
                    return
                self._pace.pause(_PAUSE)
        finally:
            if announced:
                engine.withdraw(number)
        self._result.busy += 1
