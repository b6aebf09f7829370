# SPDX-License-Identifier: Apache-2.0

"""Measure how fast merging's index takes new blocks, by DEDE's stages.

Run it from a checkout in which the extension is built; gcc is needed::

    python benchmarks/papers/exactindex.py [--blocks 1000000] [--dir DIR]

The repository is made by ``synthetic.py``: it has the entries of so many
blocks, all different, and no blocks. 100 million take 5.6 GB of DIR, and the
index another 1.3, twice while it is merged. The table shows, in millions of
entries a second of the processor, and of the clock:

* *scan*: the entries are read, sorted, and written as runs;
* *merge*: the runs become the index;
* *merge, again*: runs of a tenth of the blocks, or of a million if that is
  less, which are in the index already, are merged into it, so that all of it
  is read and written. The entries are those of the index.
"""

from collections.abc import Callable
import contextlib
import os
from typing import NamedTuple

import _path  # noqa: F401  finds the modules beside it
import common
import synthetic

from dedupd.tasks import exactindex
from glance_dedup import _engine
from glance_dedup.base import pacing
from glance_dedup.repository import image_repository

#: The most entries that are merged again.
AGAIN = 1_000_000
CATALOG_ID = bytes(16)


class Stage(NamedTuple):
    """The cost of a stage."""

    name: str
    entries: int
    processor: float    #: seconds
    clock: float        #: seconds


class Measured(NamedTuple):
    """An index, and the cost of making it."""

    stages: dict[str, Stage]    #: by name
    bytes: int                  #: of the index


def add_again(index: exactindex.Index, engine: _engine.Maintenance,
              count: int) -> None:
    """Write runs of so many entries that the index has already."""
    records: list[bytes] = []
    for number in engine.groups():
        if len(records) >= count:
            break
        records += exactindex.cut(_engine.index_records(
            engine.entries(number, 0, engine.group_facts(
                number)['published']), number, 0))
    index.add(records[:count])


def measure(path: str, blocks: int, program: str | None = None) -> Measured:
    """Make a repository with so many blocks, and its index.

    :param program: synthetic.c, if it is built already
    """
    synthetic.make(path, blocks, program=program)
    stages: dict[str, Stage] = {}

    def stage(name: str, work: Callable[[], object]) -> None:
        spent = common.timed(work)
        stages[name] = Stage(name, blocks, spent.cpu, spent.wall)

    with (image_repository.Repository(path) as repo,
          contextlib.ExitStack() as stack):
        engine = stack.enter_context(contextlib.closing(
            _engine.Maintenance(repo.handle())))
        index = stack.enter_context(contextlib.closing(exactindex.Index(
            repo.handle(), engine, CATALOG_ID, pacing.Pace())))
        index.prepare()
        stage('scan', index.scan)
        stage('merge', index.merge)
        add_again(index, engine, min(AGAIN, blocks // 10))
        stage('merge, again', index.merge)
    return Measured(stages, index_bytes(path))


def index_bytes(path: str) -> int:
    """The bytes of all files of a repository's exact index."""
    with os.scandir(os.path.join(path, 'index')) as entries:
        return sum(entry.stat().st_size for entry in entries)


def show(found: Measured) -> None:
    """Print the table."""
    print(f'{"":16}{"entries":>12}{"M/s, processor":>16}{"M/s, clock":>12}')
    for name, entries, processor, clock in found.stages.values():
        print(f'{name:16}{entries:>12,}{entries / processor / 1e6:>16.2f}'
              f'{entries / clock / 1e6:>12.2f}')
    print(f'the index has {found.bytes / entries:.2f} bytes for each entry')


def main() -> None:
    args = common.arguments(__doc__,
                            blocks=(1_000_000, 'how many')).parse_args()
    with common.place(args.dir) as d:
        show(measure(os.path.join(d, 'repository'), args.blocks))


if __name__ == '__main__':
    main()
