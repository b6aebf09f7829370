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

T is the average backup time, for which a disk's view is kept, and J the job
span, as in the paper. For each set: the number of rounds, the hours of T and
J, and the most GB that the views of a host take, of all disks at once, of the
cheapest plan of the paper's four heuristics, and of *balance*. Then the means
of all sets, by the weight of T in the cost. At the end, the cost of the
cheapest plan next to that of the best possible one, in small sets of the same
laws, of which all plans are tried. The paper states a factor of 2 for T. No
time passes and nothing is stored.
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
#: Names of heuristics whose cheapest plan is shown.
GROUPS = {'the paper': [name for name in rounds.HEURISTICS
                        if name != 'balance'], 'balance': ['balance']}

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
    return [len(plan.rounds), plan.average / 3600, plan.span / 3600,
            max(rounds.views(part, limits) for part in plan.rounds) / 1e9]


def cheapest(found: list[rounds.Disk], limits: rounds.Limits, weight: float
             ) -> dict[str, list[float]]:
    """Return the figures of all disks at once, and of the cheapest plans."""
    plans = {'all at once': rounds.plan([found], limits), **{
        name: rounds.best(found, limits, weight, heuristics)
        for name, heuristics in GROUPS.items()}}
    return {name: figures(plan, limits) for name, plan in plans.items()}


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
            ) -> dict[float, float]:
    """Return the worst cost of cheapest plans, by weight; the best is 1."""
    worst = dict.fromkeys(WEIGHTS, 0.0)
    small = argparse.Namespace(hosts=SMALL[0], disks=SMALL[1], rate=args.rate)
    for seed, (law, host) in enumerate(sets()):
        found = disks(law, host, small, seed)
        plans = [rounds.plan(parts, limits) for parts in all_plans(found)]
        for weight in WEIGHTS:
            worst[weight] = max(
                worst[weight],
                rounds.best(found, limits, weight).cost(weight)
                / min(plan.cost(weight) for plan in plans))
    return worst


def main() -> None:
    parser = common.arguments(
        __doc__, directory=False, hosts=(100, 'how many'),
        disks=(25, 'on each host'),
        weight=(0.5, 'of the average backup time in the cost'),
        overhead=(120.0, 'seconds of each round besides its disks'),
        rate=(88.0, 'MB of virtual disk that a host reads per second'))
    plot.argument(parser, 'DIR')
    args = parser.parse_args()
    limits = rounds.Limits(args.overhead)

    names = ('all at once', *GROUPS)
    print(f'{"":32}' + '  '.join(f'{name:^24}' for name in names))
    print(f'{"":32}' + '  '.join(
        f'{"":3}{"T, h":>7}{"J, h":>7}{"GB":>7}' for _ in names))
    everything = [disks(law, host, args, seed)
                  for seed, (law, host) in enumerate(sets())]
    for (law, host), found in zip(sets(), everything, strict=True):
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
    print(f'cost of the cheapest plan, in {len(sets())} sets of '
          f'{SMALL[0] * SMALL[1]} disks on {SMALL[0]} hosts; the best has 1')
    for weight, factor in factors(args, limits).items():
        print(f'weight {weight:.1f}: {factor:.3f} at most')
    print('the paper: T is at most 2 T_opt')
    if args.plot:
        for column, y in (('T', 'hours of a backup, on average'),
                          ('J', 'hours of the job'),
                          ('views', "GB of a host's views")):
            plot.lines({name: (WEIGHTS, of_name)
                        for name, of_name in means[column].items()},
                       'weight of the average backup time', y,
                       f'Rounds: {y}, mean of {len(everything)} sets',
                       os.path.join(args.plot,
                                    f'experiments-batch-{column}.svg'))


if __name__ == '__main__':
    main()
