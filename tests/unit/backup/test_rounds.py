# SPDX-License-Identifier: Apache-2.0

"""Rounds: both heuristics are compared with all possible plans."""

from collections.abc import Iterator
import random

import pytest

from glance_dedup.backup import rounds
from glance_dedup.base import exceptions

HOSTS = 'abc'


def partitions(disks: list[rounds.Disk]) -> Iterator[list[list[rounds.Disk]]]:
    """Every way to divide the disks into rounds that are not empty."""
    if not disks:
        yield []
        return
    first, *rest = disks
    for found in partitions(rest):
        yield [[first], *found]
        for at, part in enumerate(found):
            yield [*found[:at], [first, *part], *found[at + 1:]]


def skewed(seed: int, count: int) -> list[rounds.Disk]:
    """Return disks of very different sizes; the seed sets the distribution."""
    rng = random.Random(seed)
    law = [lambda: rng.paretovariate(1.1), lambda: rng.lognormvariate(0, 1.5),
           lambda: rng.choice([1.0, 1.0, 1.0, 40.0]),
           lambda: rng.expovariate(1.0)][seed % 4]
    return [rounds.Disk(f'disk-{n}', rng.choice(HOSTS), law(), 1 << 40,
                        rng.uniform(0, 2)) for n in range(count)]


@pytest.mark.parametrize('name', rounds.HEURISTICS)
@pytest.mark.parametrize('seed', range(22))
def test_no_longer_than_twice_the_best(seed, name):
    disks = skewed(seed, 7)
    limits = rounds.Limits(overhead=random.Random(seed).choice([0, 0.1, 1]))
    best: dict[int, float] = {}
    for parts in partitions(disks):
        total = rounds.plan(parts, limits).total
        best[len(parts)] = min(best.get(len(parts), total), total)
    for count in range(1, 5):
        found = rounds.plan(
            rounds.HEURISTICS[name](disks, count), limits)
        assert found.total <= 2 * best[len(found.rounds)]


@pytest.mark.parametrize('weight', [0, 0.3, 1])
@pytest.mark.parametrize('seed', range(22))
def test_the_best_has_every_disk_once_and_keeps_the_limit(seed, weight):
    disks = skewed(seed, 40)
    alone = max(rounds.views([disk], rounds.Limits(1)) for disk in disks)
    limits = rounds.Limits(1, 2 * alone)
    found = rounds.best(disks, limits, weight)
    assert sorted(disk.name for part in found.rounds for disk in part) == (
        sorted(disk.name for disk in disks))
    assert all(rounds.views(part, limits) <= 2 * alone
               for part in found.rounds)
    assert found.cost(weight) == min(
        other.cost(weight) for other in rounds.candidates(disks, limits))


def test_the_weight_decides():
    disks = skewed(1, 40)
    limits = rounds.Limits(overhead=1)
    short, both, kept = (rounds.best(disks, limits, weight)
                         for weight in (1, 0.3, 0))
    # One round takes the least time; one disk per round keeps views shortest.
    assert len(short.rounds) == 1
    assert short.total == min(
        rounds.plan(rounds.balance(disks, count), limits).total
        for count in range(1, 41))
    assert short.total < both.total <= kept.total
    assert short.kept > both.kept >= kept.kept
    # The mean counts each disk, not each round.
    assert kept.kept == sum(
        rounds.seconds(part, limits) * len(part)
        for part in kept.rounds) / 40


def test_long_rounds_coincide():
    """Balanced rounds take as long as the host with the most work."""
    disks = [rounds.Disk(f'{host}{n}', host, n + 1.0)
             for host in HOSTS for n in range(6)]
    for count in range(1, 7):
        found = rounds.balance(disks, count)
        assert rounds.plan(found, rounds.Limits()).total == pytest.approx(
            max(sum(disk.seconds for disk in disks if disk.host == host)
                for host in HOSTS))


def test_a_view_that_fits_nowhere():
    disks = [rounds.Disk('small', 'a', 1, 1 << 30, 1.0),
             rounds.Disk('large', 'b', 100, 1 << 30, 1e7)]
    with pytest.raises(exceptions.InvalidParameter,
                       match='the disk large on b .* 10.0 MB/s, .* 100 s'):
        rounds.best(disks, rounds.Limits(0, 1e8), 0.5)
    # A view is at most as large as its disk.
    small = [rounds.Disk('small', 'b', 100, 10 ** 8, 1e7)]
    assert len(rounds.best(small, rounds.Limits(0, 1e8), 0.5).rounds) == 1


def test_a_round_whose_views_do_not_fit_is_divided():
    """A slow host's disk gets its own round if the views would not fit."""
    disks = [rounds.Disk('slow', 'a', 100, 1 << 40, 0.0),
             rounds.Disk('busy', 'b', 1, 1 << 40, 10.0)]
    found = rounds.best(disks, rounds.Limits(0, 500), 1)
    assert [[disk.name for disk in part] for part in found.rounds] == [
        ['slow'], ['busy']]


def test_nothing_to_do():
    assert rounds.best([], rounds.Limits(), 0.5) == rounds.Plan([], 0, 0)
