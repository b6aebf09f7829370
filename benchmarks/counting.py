# SPDX-License-Identifier: Apache-2.0

"""Measure computing the catalog's counts, by one process and by several.

Run it from a checkout in which the extension is built::

    python benchmarks/counting.py [--images 300] [--runs 10000] [--dir DIR]

The repository has many recipes and few bytes: each image is a copy of one of
eight, whose blocks of 512 bytes lie apart, so that each block is a run. Rounds
alternate between

* rebuilding the catalog: in this process, and by one and two counters;
* a collection that finds nothing to free: as usual, and by partitions with one
  and two counters.

The table has the medians of wall and processor time, counters included, and
the largest sampled proportional set size (PSS) of a counter.
"""

import contextlib
import os
import statistics
from typing import Any
from typing import NamedTuple

import common

from dedupd.tasks import accounting
from dedupd.tasks import collector
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import rebuild_worker
from glance_dedup.maintenance import refcount_rebuild
from glance_dedup.repository import image_repository

BLOCK = 512
BASES = 8


class Step(NamedTuple):
    """A measured step: a row of the table."""

    name: str
    rebuilds: bool
    counters: int


STEPS = (
    Step('rebuild, sequential', True, 0), Step('rebuild, 1 counter', True, 1),
    Step('rebuild, 2 counters', True, 2), Step('collection', False, 0),
    Step('by partitions, 1 counter', False, 1),
    Step('by partitions, 2 counters', False, 2))


def fill(repo: image_repository.Repository, images: int, runs: int) -> None:
    """Store the images."""
    for base in range(BASES):
        with repo.begin(f'base-{base}') as transaction:
            for _ in range(runs):
                transaction.write(os.urandom(BLOCK) + bytes(BLOCK))
            transaction.commit()
    for number in range(images - BASES):
        with repo.open_image(f'base-{number % BASES}') as source:
            repo.copy(source, f'copy-{number}')


class Watch(common.Peak):
    """The largest PSS of a counter, while this is open."""

    INTERVAL = 0.2

    @staticmethod
    def _now() -> int:
        with open(f'/proc/self/task/{os.getpid()}/children') as f:
            children = f.read().split()
        largest = 0
        for pid in children:
            with contextlib.suppress(OSError):
                with open(f'/proc/{pid}/cmdline') as f:
                    counts = rebuild_worker.__name__ in f.read()
                if counts:
                    largest = max(largest, common.memory(pid).proportional)
        return largest


def run(maintainer: maintainer_role.Maintainer, step: Step) -> Any:
    """Do one step."""
    hosts = refcount_rebuild.local(step.counters)
    if step.rebuilds:
        maintainer.rebuild(hosts=hosts)
    else:
        result = collector.run_once(maintainer, pacing.Pace(), hosts=hosts)
        if result.refused or result.freed_blocks:
            raise SystemExit(f'this is not what was to be measured: {result}')
    if maintainer.warnings:
        raise SystemExit(f'it went wrong: {maintainer.warnings}')


def measure(repo: image_repository.Repository, rounds: int) -> None:
    """Print the table."""
    spent: dict[str, list[common.Spent]] = {step.name: [] for step in STEPS}
    most = dict.fromkeys(spent, 0)
    with maintainer_role.Maintainer(repo) as maintainer:
        accounting.run_once(maintainer, pacing.Pace())
        collector.run_once(maintainer, pacing.Pace())
        for _ in range(rounds):
            for step in STEPS:
                with contextlib.closing(Watch()) as watch:
                    spent[step.name].append(common.timed(
                        run, maintainer, step))
                most[step.name] = max(most[step.name], watch.bytes)
    print(f'{"":28}{"wall, s":>9}{"CPU, s":>9}{"PSS, MiB":>10}')
    for name, times in spent.items():
        print(f'{name:28}{statistics.median(t.wall for t in times):9.2f}'
              f'{statistics.median(t.cpu for t in times):9.2f}'
              f'{most[name] / common.MIB:10.1f}')


def main() -> None:
    """Measure with the command line's arguments."""
    args = common.arguments(
        __doc__, rounds=3, images=(300, 'how many'),
        runs=(10000, 'of each image')).parse_args()
    with (common.place(args.dir) as d,
          common.new_repository(os.path.abspath(d), block_size=BLOCK,
                                filter_mib=1) as repo):
        fill(repo, args.images, args.runs)
        measure(repo, args.rounds)


if __name__ == '__main__':
    main()
