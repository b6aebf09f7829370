# SPDX-License-Identifier: Apache-2.0

"""Rounds: plans are compared with all possible ones."""

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


def all_plans(disks, limits):
    """The exact solver: a plan for each way to divide the disks."""
    return [rounds.plan(parts, limits) for parts in partitions(disks)]


@pytest.mark.parametrize('weight', [0, 0.2, 0.5, 0.8, 1])
@pytest.mark.parametrize('seed', range(22))
def test_competitive_ratio(seed, weight):
    """The cheapest plan costs at most twice the optimum, for T and for J."""
    disks = skewed(seed, 7)
    limits = rounds.Limits(overhead=random.Random(seed).choice([0, 0.1, 1]))
    optimum = min(plan.cost(weight) for plan in all_plans(disks, limits))
    found = rounds.best(disks, limits, weight)
    assert optimum <= found.cost(weight) * (1 + 1e-9)
    assert found.cost(weight) <= 2 * optimum
    if weight == 1:         # the average backup time alone
        assert found.average == pytest.approx(optimum)


def test_the_ratio_is_not_that_of_a_fixed_number_of_rounds():
    """Of as many rounds, there may be a plan with less than half of T.

    So the paper's bound needs that every number is tried.
    """
    disks = [*(rounds.Disk(f'large{n}', 'a', 300.0) for n in range(3)),
             *(rounds.Disk(f'small{n}', 'a', 1.0) for n in range(300))]
    found = rounds.plan(rounds.schedule(
        rounds.largest(disks), 4, rounds.least_load), rounds.Limits())
    better = rounds.plan([disks[:3], *(
        disks[3 + n * 100:103 + n * 100] for n in range(3))], rounds.Limits())
    assert len(found.rounds) == len(better.rounds) == 4
    assert found.average > 2 * better.average
    assert rounds.best(disks, rounds.Limits(), 1).average == pytest.approx(
        sum(disk.seconds for disk in disks) / len(disks))


@pytest.mark.parametrize('name', rounds.HEURISTICS)
@pytest.mark.parametrize('seed', range(22))
def test_more_rounds_would_be_empty(seed, name):
    """A plan that leaves rounds empty is that of fewer rounds."""
    disks = skewed(seed, 30)
    most = rounds.max_rounds(disks, name)
    for count in range(1, most + 3):
        found = rounds.make(disks, rounds.Limits(), name, count)
        assert len(found.rounds) <= min(count, most)
        assert found == rounds.make(disks, rounds.Limits(), name,
                                    len(found.rounds))
        assert sorted(disk.name for part in found.rounds for disk in part
                      ) == sorted(disk.name for disk in disks)


@pytest.mark.parametrize('overhead', [0.0, 1.0])
@pytest.mark.parametrize('weight', [0, 0.3, 0.9, 1])
@pytest.mark.parametrize('seed', range(0, 22, 3))
def test_the_best_is_the_cheapest_of_all_tries(seed, weight, overhead):
    """Numbers of rounds that are left out would not have been cheaper."""
    disks = skewed(seed, 25)
    alone = max(rounds.views([disk], rounds.Limits(1)) for disk in disks)
    limits = rounds.Limits(overhead, 2 * alone)
    found = rounds.best(disks, limits, weight)
    assert sorted(disk.name for part in found.rounds for disk in part) == (
        sorted(disk.name for disk in disks))
    assert all(rounds.views(part, limits) <= 2 * alone
               for part in found.rounds)
    assert found.cost(weight) == pytest.approx(min(
        rounds.make(disks, limits, name, count).cost(weight)
        for name in rounds.HEURISTICS for count in range(1, 26)))


@pytest.mark.parametrize('weight', [0, 0.5, 0.9, 1])
def test_many_disks(weight, monkeypatch):
    """For a thousand disks, not every number of rounds is tried."""
    tried = []
    make = rounds.make
    monkeypatch.setattr(rounds, 'make', lambda disks, limits, name, count: (
        tried.append(count), make(disks, limits, name, count))[-1])
    disks = [rounds.Disk(f'disk-{n}', 'a', 1.0 + n % 7) for n in range(1000)]
    found = rounds.best(disks, rounds.Limits(overhead=1), weight)
    assert len(tried) <= 110 * len(rounds.HEURISTICS)
    if weight == 1:
        assert tried == [1000]      # nothing can be better
        assert len(found.rounds) == 1000


def test_the_orders():
    """Algorithm 1 takes the largest disk, algorithm 2 the busiest host's."""
    disks = [rounds.Disk(name, name[0], seconds) for name, seconds in (
        ('a1', 5.0), ('a2', 5.0), ('b1', 9.0), ('c1', 2.0))]
    assert [disk.name for disk in rounds.largest(disks)] == [
        'b1', 'a1', 'a2', 'c1']
    assert [disk.name for disk in rounds.busiest(disks)] == [
        'a1', 'b1', 'a2', 'c1']


def test_the_choices_of_a_round():
    disk = rounds.Disk('x', 'a', 3.0)
    # The host has nothing to do in the last two, of which one is shorter.
    assert rounds.least_load(disk, [4.0, 0.0, 0.0], [4.0, 9.0, 2.0]) == 2
    # The round becomes 3 s longer, none, and 1 s.
    assert rounds.least_increase(disk, [4.0, 5.0, 0.0], [4.0, 9.0, 2.0]) == 1


def test_the_weight_decides():
    disks = skewed(1, 40)
    limits = rounds.Limits(overhead=1)
    short, both, single = (rounds.best(disks, limits, weight)
                           for weight in (0, 0.7, 1))
    # One round takes the least time; one disk per round keeps views shortest.
    assert len(short.rounds) == 1 and len(single.rounds) == 40
    assert short.span < both.span <= single.span
    assert short.average > both.average >= single.average
    # The mean counts each disk, not each round.
    assert both.average == pytest.approx(sum(
        rounds.seconds(part, limits) * len(part)
        for part in both.rounds) / 40)


def test_long_rounds_coincide():
    """Balanced rounds take as long as the host with the most work."""
    disks = [rounds.Disk(f'{host}{n}', host, n + 1.0)
             for host in HOSTS for n in range(6)]
    for count in range(1, 7):
        found = rounds.balance(disks, count)
        assert rounds.plan(found, rounds.Limits()).span == pytest.approx(
            max(sum(disk.seconds for disk in disks if disk.host == host)
                for host in HOSTS))


@pytest.mark.parametrize('weight', [0, 0.5, 0.9])
def test_ranks_of_a_host_work_at_the_same_time(weight):
    """No rank is idle while there are disks for it."""
    disks = [rounds.Disk(f'disk{n}', 'a', 10.0) for n in range(12)]
    for ranks in 1, 4:
        limits = rounds.Limits(5, ranks=ranks)
        found = rounds.best(disks, limits, weight)
        assert min(map(len, found.rounds)) >= ranks
        assert found.span == pytest.approx(
            len(found.rounds) * 5 + 120 / ranks)
    assert rounds.seconds(disks[:5], limits) == 5 + 20


@pytest.mark.parametrize('weight', [0.2, 0.9])
@pytest.mark.parametrize('seed', range(6))
def test_the_best_for_several_ranks(seed, weight):
    disks = skewed(seed, 7)
    limits = rounds.Limits(0.5, ranks=2)
    optimum = min(plan.cost(weight) for plan in all_plans(disks, limits))
    found = rounds.best(disks, limits, weight)
    assert optimum <= found.cost(weight) * (1 + 1e-9)
    assert found.cost(weight) <= 2 * optimum


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
    found = rounds.best(disks, rounds.Limits(0, 500), 0)
    assert [[disk.name for disk in part] for part in found.rounds] == [
        ['slow'], ['busy']]


def test_nothing_to_do():
    assert rounds.best([], rounds.Limits(), 0.5) == rounds.Plan([], 0, 0)
