# SPDX-License-Identifier: Apache-2.0

"""Rounds: the disks that are backed up together.

While a disk is read, a view of it is kept, and its server's writes
meanwhile take space. All hosts work through a round's stages together, so
each view of a round is kept until the slowest host is done. One round for all
disks takes the least time in total, since each round has costs of its own, but
it keeps each view longest.

A plan weighs both: its cost is ``a * T + (1 - a) * J``, where T is the time of
all rounds and J is how long a disk's view is kept on average. This cost is
that of Agun, Zhang and Yang (parallel deduplication with batch scheduling),
who call the first one J and the second one T. The heuristic *balance* is their
Algorithm 1, and besides sorts each host's rounds by load, so that the long
rounds of all hosts coincide, which never makes a plan longer. *Fill* takes the
place of their Algorithm 2. A round whose views would not fit is divided.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

from glance_dedup.base import exceptions


@dataclasses.dataclass(frozen=True)
class Disk:
    """A disk that is to be backed up."""

    name: str
    host: str
    """The host that reads it."""
    seconds: float
    """Seconds for which its host works on it."""
    size: int = 0
    """Bytes; its view cannot take more."""
    written: float = 0.0
    """Bytes that its server writes in a second."""


Round = Sequence[Disk]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Costs and limits that are the same for all rounds."""

    overhead: float = 0.0
    """Seconds of each round that no disk accounts for."""
    views: float = float('inf')
    """Bytes that the views on a host may take at the same time."""


def seconds(disks: Round, limits: Limits) -> float:
    """Return how long a round takes: its slowest host decides."""
    loads: dict[str, float] = collections.defaultdict(float)
    for disk in disks:
        loads[disk.host] += disk.seconds
    return limits.overhead + max(loads.values(), default=0.0)


def views(disks: Round, limits: Limits) -> float:
    """The most bytes that a host's views take at the end of a round."""
    time = seconds(disks, limits)
    taken: dict[str, float] = collections.defaultdict(float)
    for disk in disks:
        taken[disk.host] += min(disk.size, disk.written * time)
    return max(taken.values(), default=0.0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Rounds, one after the other, and their cost."""

    rounds: list[list[Disk]]
    total: float
    """T: seconds of all rounds."""
    kept: float
    """J: seconds for which a view is kept, on average."""

    def cost(self, weight: float) -> float:
        """Return the cost of a plan.

        :param weight: of the total time, from 0 to 1
        """
        return weight * self.total + (1 - weight) * self.kept


def plan(rounds: list[list[Disk]], limits: Limits) -> Plan:
    """These rounds as a plan; empty ones are left out."""
    rounds = [disks for disks in rounds if disks]
    times = [seconds(disks, limits) for disks in rounds]
    count = sum(map(len, rounds))
    return Plan(rounds, sum(times), sum(
        time * len(disks) for time, disks in zip(times, rounds, strict=True)
    ) / max(count, 1))


# -- heuristics ---------------------------------------------------------------

def _by_host(disks: Round) -> dict[str, list[Disk]]:
    """Each host's disks, the largest first."""
    found: dict[str, list[Disk]] = {}
    for disk in sorted(disks, key=lambda disk: (-disk.seconds, disk.name)):
        found.setdefault(disk.host, []).append(disk)
    return found


def _load(disks: Round) -> float:
    return sum(disk.seconds for disk in disks)


def balance(disks: Round, count: int) -> list[list[Disk]]:
    """The paper's first heuristic: rounds alike on each host.

    A host's disks go, the largest first, into the round in which that host has
    the least to do.

    :param count: of rounds
    """
    rounds: list[list[Disk]] = [[] for _ in range(count)]
    for found in _by_host(disks).values():
        mine: list[list[Disk]] = [[] for _ in range(count)]
        for disk in found:
            min(mine, key=_load).append(disk)
        mine.sort(key=_load, reverse=True)
        for whole, part in zip(rounds, mine, strict=True):
            whole += part
    return rounds


def fill(disks: Round, count: int) -> list[list[Disk]]:
    """Return rounds for which the busiest host sets the pace.

    A round is to take the busiest host's share of what it has left. Each host
    fills it with the largest of its disks that fit.

    :param count: of rounds
    """
    left = _by_host(disks)
    rounds: list[list[Disk]] = []
    for number in range(count):
        most = max(map(_load, left.values()), default=0.0)
        share = most / (count - number)
        rounds.append([disk for found in left.values()
                       for disk in _take(found, share, number == count - 1)])
    return rounds


def _take(found: list[Disk], share: float, everything: bool) -> list[Disk]:
    """Take the disks of a round from a host's remaining ones."""
    taken: list[Disk] = []
    load = 0.0
    for disk in list(found):
        # A disk that is longer than a round is one's first, or nobody's.
        if everything or load + disk.seconds <= share or not taken:
            taken.append(disk)
            found.remove(disk)
            load += disk.seconds
    return taken


HEURISTICS: dict[str, Callable[[Round, int], list[list[Disk]]]] = {
    'balance': balance, 'fill': fill}


# -- the plan -----------------------------------------------------------------

def _divide(disks: list[Disk], limits: Limits) -> list[list[Disk]]:
    """Rounds of these disks whose views fit."""
    if views(disks, limits) <= limits.views:
        return [disks]
    if len(disks) == 1:
        disk = disks[0]
        raise exceptions.InvalidParameter(
            f'the disk {disk.name} on {disk.host} cannot be backed up: its '
            f'server writes {disk.written / 1e6:.1f} MB/s, and in the '
            f'{seconds(disks, limits):.0f} s that this takes its view needs '
            f'more than the {limits.views / 1e6:.0f} MB that views may take')
    by_time = sorted(disks, key=lambda disk: -disk.seconds)
    half = len(by_time) // 2
    return (_divide(by_time[:half], limits)
            + _divide(by_time[half:], limits))


def candidates(disks: Round, limits: Limits,
               heuristics: Sequence[str] = tuple(HEURISTICS)) -> list[Plan]:
    """The plans that the heuristics find, with any number of rounds.

    :param heuristics: keys of :data:`HEURISTICS`
    :raises InvalidParameter: if a disk's view alone does not fit; names it
    """
    most = max(map(len, _by_host(disks).values()), default=0)
    return [
        plan([part for whole in HEURISTICS[name](disks, count)
              for part in _divide(whole, limits)], limits)
        for name in heuristics for count in range(1, most + 1)]


def best(disks: Round, limits: Limits, weight: float) -> Plan:
    """The cheapest plan that the heuristics find.

    :param weight: of the total time, from 0 to 1; the rest is that of the time
        for which a view is kept
    :raises InvalidParameter: as :func:`candidates`
    """
    return min(candidates(disks, limits),
               key=lambda found: found.cost(weight),
               default=plan([], limits))
