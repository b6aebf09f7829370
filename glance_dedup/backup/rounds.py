# SPDX-License-Identifier: Apache-2.0

"""Rounds: the disks that are backed up together.

While a disk is read, a view of it is kept, and its server's writes
meanwhile take space. All hosts work through a round's stages together, so
each view of a round is kept until the slowest host is done. One round for all
disks takes the least time in total, since each round has costs of its own, but
it keeps each view longest.

A plan weighs both, as Agun, Zhang and Yang do (parallel deduplication with
batch scheduling, section 4). Its cost is ``a * T + (1 - a) * J``: T is the
average backup time, for which a disk's view is kept, and J the job span, the
time of all rounds. The heuristics are theirs, and one of ours. Each is tried
with every number of rounds that can be the best, and the cheapest plan is
taken; numbers above 40 are tried in steps of 5 %. A round whose views would
not fit is divided.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import heapq
import itertools

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
    ranks: int = 1
    """Number of disks that a host reads at the same time."""


def seconds(disks: Round, limits: Limits) -> float:
    """Return how long a round takes: its slowest rank decides.

    A host's ranks share its disks as ``work_split.own_sources`` has them do.
    """
    loads: dict[str, list[float]] = {}
    for disk in largest(disks):
        ranks = loads.setdefault(disk.host, [0.0] * limits.ranks)
        heapq.heapreplace(ranks, ranks[0] + disk.seconds)
    return limits.overhead + max(map(max, loads.values()), default=0.0)


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
    average: float
    """T: seconds of a backup, and so of its view, on average."""
    span: float
    """J: seconds of all rounds."""

    def cost(self, weight: float) -> float:
        """Return the cost of a plan.

        :param weight: of the average backup time, from 0 to 1
        """
        return weight * self.average + (1 - weight) * self.span


def plan(rounds: list[list[Disk]], limits: Limits) -> Plan:
    """These rounds as a plan; empty ones are left out."""
    rounds = [disks for disks in rounds if disks]
    times = [seconds(disks, limits) for disks in rounds]
    count = sum(map(len, rounds))
    return Plan(rounds, sum(
        time * len(disks) for time, disks in zip(times, rounds, strict=True)
    ) / max(count, 1), sum(times))


# Share by which sums of the same numbers may differ.
_ROUNDING = 1e-9
# Steps between a number of rounds and one that is twice as high.
_STEPS = 20

_Choose = Callable[[Disk, list[float], list[float]], int]


# -- heuristics ---------------------------------------------------------------

def _by_host(disks: Round) -> dict[str, list[Disk]]:
    """Each host's disks, the largest first."""
    found: dict[str, list[Disk]] = {}
    for disk in largest(disks):
        found.setdefault(disk.host, []).append(disk)
    return found


def largest(disks: Round) -> list[Disk]:
    """The order of algorithm 1: the largest disk is the next."""
    return sorted(disks, key=lambda disk: (-disk.seconds, disk.name))


def busiest(disks: Round) -> list[Disk]:
    """The order of algorithm 2: the busiest host's largest disk is the next.

    That is the host with the most seconds of disks that are in no round yet.
    """
    left = {host: iter(found) for host, found in _by_host(disks).items()}
    loads: dict[str, float] = dict.fromkeys(left, 0.0)
    for disk in disks:
        loads[disk.host] += disk.seconds
    queue = [(-load, host) for host, load in loads.items()]
    heapq.heapify(queue)
    ordered: list[Disk] = []
    while queue:
        load, host = heapq.heappop(queue)
        for disk in itertools.islice(left[host], 1):
            ordered.append(disk)
            heapq.heappush(queue, (load + disk.seconds, host))
    return ordered


def least_load(disk: Disk, mine: list[float], times: list[float]) -> int:
    """The round in which the disk's host has the least to do.

    Among several of these, the shortest: so a disk does not wait for the large
    ones of other hosts.
    """
    return min(zip(mine, times, range(len(times)), strict=True))[2]


def least_increase(disk: Disk, mine: list[float], times: list[float]) -> int:
    """The round that makes all rounds together the least longer.

    Among several of these, that in which the disk's host has the least to do.
    """
    return min((max(time, load + disk.seconds) - time, load, number)
               for number, (load, time) in enumerate(
                   zip(mine, times, strict=True)))[2]


def schedule(ordered: Round, count: int, choose: _Choose
             ) -> list[list[Disk]]:
    """Rounds of disks that are assigned one after the other.

    :param ordered: in the order in which they are assigned
    :param count: of rounds
    :param choose: a round for a disk, by the loads of its host in each round,
        and the seconds of each round
    """
    rounds: list[list[Disk]] = [[] for _ in range(count)]
    times = [0.0] * count
    loads: dict[str, list[float]] = {}
    for disk in ordered:
        mine = loads.setdefault(disk.host, [0.0] * count)
        number = choose(disk, mine, times)
        rounds[number].append(disk)
        mine[number] += disk.seconds
        times[number] = max(times[number], mine[number])
    return rounds


def balance(disks: Round, count: int) -> list[list[Disk]]:
    """Return algorithm 1's rounds, with each host's sorted by its load.

    So the long rounds of all hosts coincide.
    """
    rounds: list[list[Disk]] = [[] for _ in range(count)]
    for found in _by_host(disks).values():
        mine = schedule(found, count, least_load)
        mine.sort(key=_load, reverse=True)
        for whole, part in zip(rounds, mine, strict=True):
            whole += part
    return rounds


def _load(disks: Round) -> float:
    return sum(disk.seconds for disk in disks)


def _scheduled(order: Callable[[Round], list[Disk]], choose: _Choose
               ) -> Callable[[Round, int], list[list[Disk]]]:
    return lambda disks, count: schedule(order(disks), count, choose)


#: The paper's four, by the order of the disks and the choice of a round; ours.
HEURISTICS: dict[str, Callable[[Round, int], list[list[Disk]]]] = {
    'largest, least load': _scheduled(largest, least_load),
    'busiest, least load': _scheduled(busiest, least_load),
    'largest, least increase': _scheduled(largest, least_increase),
    'busiest, least increase': _scheduled(busiest, least_increase),
    'balance': balance,
}
# With these, so ordered, the next disk gets an empty round as long as there is
# one. With the others, only a host that has a disk in each round begins
# another one. A plan that leaves rounds empty is that of fewer rounds.
_USE_ALL = {'largest, least load': largest, 'busiest, least load': busiest}


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


def max_rounds(disks: Round, name: str) -> int:
    """The highest number of rounds that a heuristic uses."""
    return len(disks) if name in _USE_ALL else max(
        map(len, _by_host(disks).values()), default=0)


def make(disks: Round, limits: Limits, name: str, count: int) -> Plan:
    """Return a heuristic's plan.

    :param name: a key of :data:`HEURISTICS`
    :raises InvalidParameter: if a disk's view alone does not fit; names it
    """
    return plan([part for whole in HEURISTICS[name](disks, count)
                 for part in _divide(whole, limits)], limits)


def best(disks: Round, limits: Limits, weight: float,
         heuristics: Sequence[str] = tuple(HEURISTICS)) -> Plan:
    """The cheapest plan that the heuristics find, of any number of rounds.

    :param weight: of the average backup time, from 0 to 1; the rest is that of
        the job span
    :param heuristics: keys of :data:`HEURISTICS`
    :raises InvalidParameter: as :func:`make`
    """
    if not disks:
        return plan([], limits)
    found: list[Plan] = []
    for name in heuristics:
        bounds = _bounds(disks, limits, name)
        # With the highest number, no disk waits for another one of its host.
        for count in (len(bounds), *_counts(len(bounds) - 1)):
            cost = bounds[count - 1].cost(weight)
            if found and cost >= found[-1].cost(weight) * (1 - _ROUNDING):
                if count < len(bounds):
                    break       # no plan of more rounds is cheaper
                continue
            made = make(disks, limits, name, count)
            if not found or made.cost(weight) < found[-1].cost(weight):
                found.append(made)
    return found[-1]


def _counts(most: int) -> Iterator[int]:
    """The numbers of rounds that are tried: far ones are 5 % apart."""
    count = 1
    while count <= most:
        yield count
        count += max(1, count // _STEPS)


def _bounds(disks: Round, limits: Limits, name: str) -> list[Plan]:
    """For each number of rounds of a heuristic, T and J at least.

    A disk's own time is part of T, and the busiest host's time of J.
    """
    busy = max(map(_load, _by_host(disks).values())) / limits.ranks
    firsts = itertools.accumulate(
        disk.seconds for disk in _USE_ALL.get(name, largest)(disks))
    return [Plan([], limits.overhead + _load(disks) / len(disks),
                 count * limits.overhead + (
                     max(busy, first) if name in _USE_ALL else busy))
            for count, first in zip(
                range(1, max_rounds(disks, name) + 1), firsts)]
