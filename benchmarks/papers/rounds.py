# SPDX-License-Identifier: Apache-2.0

"""Simulate the rounds of a backup of many servers.

Run it from a checkout::

    python benchmarks/papers/rounds.py [--hosts 100] [--disks 25]
        [--weight 0.5] [--overhead 120] [--rate 88] [--plot DIR]

Each of 22 sets has so many disks on each host, of 40 GB on average, with sizes
that differ by another law. A host reads RATE MB of virtual disk in a second:
88 in Agun, Zhang and Yang's paper. A third of the servers write some MB in a
second, the others hardly. The additional cost of a round, OVERHEAD, is the
time for reading the index once.

For each set: the hours of all rounds, the hours for which a view is kept on
average, and the most GB that the views of a host take, of all disks at once
and of the cheapest plan of each heuristic. Then the means of all sets, by the
weight of the total time. At the end, how far the total time of each heuristic
is from the best possible one, in small sets of the same laws, of which all
plans are tried. The paper states a factor of 2, but for the average time of a
backup. (Its T is this average, its J the total.) No time passes and nothing is
stored.
"""

import argparse
from collections.abc import Callable, Iterator
import os
import random
import statistics

import _path  # noqa: F401  finds the modules beside it
import common
import plot

from glance_dedup.backup import rounds

MEAN = 40e9
WEIGHTS = [step / 10 for step in range(11)]
COLUMNS = ('rounds', 'T', 'J', 'views')

# Of the sets of which all plans are tried: hosts, and disks on each.
SMALL = (3, 2)

Law = Callable[[random.Random], float]


def _lognormal(sigma: float) -> Law:
    return lambda rng: rng.lognormvariate(-sigma * sigma / 2, sigma)


def _pareto(shape: float) -> Law:
    return lambda rng: rng.paretovariate(shape) * (shape - 1) / shape


#: Laws of sizes, each with a mean of 1.
LAWS: dict[str, Law] = {
    'equal': lambda rng: 1.0,
    'uniform': lambda rng: rng.uniform(0.1, 1.9),
    'exponential': lambda rng: rng.expovariate(1),
    **{f'lognormal {sigma}': _lognormal(sigma) for sigma in (0.5, 1, 1.5, 2)},
    **{f'pareto {shape}': _pareto(shape) for shape in (1.2, 1.5, 2)},
    'one of ten large': lambda rng: (
        20.0 if rng.randrange(10) == 0 else 1.0) * 10 / 29,
}
#: Laws by which hosts differ, too: how much one host's disks are larger.
HOSTS: dict[str, Law] = {
    'all alike': lambda rng: 1.0,
    'hosts differ': lambda rng: rng.lognormvariate(-0.125, 0.5),
}


def sets() -> list[tuple[str, str]]:
    """Return the 22 sets: law of sizes, and law of hosts."""
    return [(law, host) for law in LAWS for host in HOSTS]


def disks(law: str, host: str, args: argparse.Namespace, seed: int
          ) -> list[rounds.Disk]:
    """Return the disks of a set."""
    rng = random.Random(seed)
    found = []
    for number in range(args.hosts):
        factor = HOSTS[host](rng)
        for disk in range(args.disks):
            size = min(LAWS[law](rng), 50) * factor * MEAN
            written = rng.uniform(1e6, 5e6) if rng.random() < 1 / 3 else 5e4
            found.append(rounds.Disk(
                f'{number}-{disk}', f'host-{number}', size / args.rate / 1e6,
                int(size), written))
    return found


def figures(plan: rounds.Plan, limits: rounds.Limits) -> list[float]:
    """Return the values of :data:`COLUMNS`: a number, hours, hours and GB."""
    return [len(plan.rounds), plan.total / 3600, plan.kept / 3600,
            max(rounds.views(part, limits) for part in plan.rounds) / 1e9]


def candidates(found: list[rounds.Disk], limits: rounds.Limits
               ) -> dict[str, list[rounds.Plan]]:
    """Return the plans: all at once, and those of each heuristic."""
    return {'all at once': [rounds.plan([found], limits)],
            **{name: rounds.candidates(found, limits, [name])
               for name in rounds.HEURISTICS}}


def cheapest(found: dict[str, list[rounds.Plan]], limits: rounds.Limits,
             weight: float) -> dict[str, list[float]]:
    """Return the figures of the cheapest plan of each."""
    return {name: figures(min(of_name, key=lambda plan: plan.cost(weight)),
                          limits) for name, of_name in found.items()}


def show(name: str, found: dict[str, list[float]]) -> None:
    print(f'{name:32}' + '  '.join(
        f'{row[0]:3.0f}{row[1]:7.2f}{row[2]:7.2f}{row[3]:7.0f}'
        for row in found.values()))


def all_plans(found: list[rounds.Disk]) -> Iterator[list[list[rounds.Disk]]]:
    """Yield every way to divide disks into rounds."""
    if not found:
        yield []
        return
    for parts in all_plans(found[1:]):
        yield [[found[0]], *parts]
        for at, part in enumerate(parts):
            yield [*parts[:at], [found[0], *part], *parts[at + 1:]]


def factors(args: argparse.Namespace, limits: rounds.Limits
            ) -> dict[str, float]:
    """Return the worst T of each heuristic, in T of the best such plan."""
    worst = dict.fromkeys(rounds.HEURISTICS, 0.0)
    small = argparse.Namespace(hosts=SMALL[0], disks=SMALL[1], rate=args.rate)
    for seed, (law, host) in enumerate(sets()):
        found = disks(law, host, small, seed)
        best: dict[int, float] = {}
        for parts in all_plans(found):
            total = rounds.plan(parts, limits).total
            best[len(parts)] = min(best.get(len(parts), total), total)
        for name, heuristic in rounds.HEURISTICS.items():
            for count in range(1, len(found) + 1):
                plan = rounds.plan(heuristic(found, count), limits)
                worst[name] = max(worst[name],
                                  plan.total / best[len(plan.rounds)])
    return worst


def main() -> None:
    parser = common.arguments(
        __doc__, directory=False, hosts=(100, 'how many'),
        disks=(25, 'on each host'),
        weight=(0.5, 'of the total time in the cost'),
        overhead=(120.0, 'seconds of each round besides its disks'),
        rate=(88.0, 'MB of virtual disk that a host reads per second'))
    plot.argument(parser, 'DIR')
    args = parser.parse_args()
    limits = rounds.Limits(args.overhead)

    names = ('all at once', *rounds.HEURISTICS)
    print(f'{"":32}' + '  '.join(f'{name:^24}' for name in names))
    print(f'{"":32}' + '  '.join(
        f'{"":3}{"T, h":>7}{"J, h":>7}{"GB":>7}' for _ in names))
    everything = []
    for seed, (law, host) in enumerate(sets()):
        found = candidates(disks(law, host, args, seed), limits)
        everything.append(found)
        show(f'{law}, {host}', cheapest(found, limits, args.weight))

    print()
    means: dict[str, dict[str, list[float]]] = {
        column: {name: [] for name in names} for column in COLUMNS}
    for weight in WEIGHTS:
        of_sets = [cheapest(found, limits, weight) for found in everything]
        row = {name: [statistics.fmean(of_set[name][i] for of_set in of_sets)
                      for i in range(len(COLUMNS))] for name in names}
        show(f'mean, weight {weight:.1f}', row)
        for i, column in enumerate(COLUMNS):
            for name in names:
                means[column][name].append(row[name][i])
    print()
    for name, factor in factors(args, limits).items():
        print(f'{name}: T is {factor:.3f} T_opt at most, in {len(sets())} '
              f'sets of {SMALL[0] * SMALL[1]} disks on {SMALL[0]} hosts')
    print('the paper: 2, for its T, the average time of a backup')
    if args.plot:
        for column, y in (('T', 'hours of all rounds'),
                          ('J', 'hours for which a view is kept'),
                          ('views', "GB of a host's views")):
            plot.lines({name: (WEIGHTS, of_name)
                        for name, of_name in means[column].items()},
                       'weight of the total time', y,
                       f'Rounds: {y}, mean of {len(everything)} sets',
                       os.path.join(args.plot,
                                    f'experiments-batch-{column}.svg'))


if __name__ == '__main__':
    main()
