# SPDX-License-Identifier: Apache-2.0

"""Measure the cost of a file's sync for the disk, after short writes.

Run it from a checkout in which the extension is built::

    python benchmarks/journal.py [--writes 300] [--rounds 5] [--dir DIR]

A guest that flushes after each write has the volume's journal synced each
time. This shows the work of the disk below DIR for one write of 4152 bytes,
the record of a page, and its sync: writes, flushes, and KiB. The file

* becomes longer with each write;
* has its blocks, by ``fallocate``;
* has zeros ahead, 64 KiB or 1 MiB of them, before each write that needs some;
* was written before, in full, as a journal that is used again is.

The last line is a volume: pages that are written and flushed. All take turns;
the figures are medians of the rounds. The kernel counts what all processes do
to the disk (``/proc/diskstats``), so nothing else may use it. A file system in
a file that is mounted by a loop device has counts of its own::

    truncate -s 1G image && mkfs.ext4 -q image && mount -o loop image /mnt
    python benchmarks/journal.py --dir /mnt
"""

from collections.abc import Callable
import functools
import os
import statistics
import tempfile
import time
from typing import NamedTuple

import common

from glance_dedup.repository import openvolumes

PAGE = 4096
RECORD = 56 + PAGE
HEAD = 4096


class Cost(NamedTuple):
    """The disk's work; for one write, if divided."""

    writes: float
    flushes: float
    kib: float


class Result(NamedTuple):
    """The cost of one write, and the number of writes in a second."""

    cost: Cost
    rate: float


def disk_got(directory: str) -> Cost:
    """Return the work of the disk below a directory so far."""
    found = common.disk_work(directory)
    if found is None:
        raise SystemExit(f'{directory} is on no disk of /proc/diskstats: '
                         'choose another --dir')
    return Cost(found.writes, found.flushes, found.bytes / 1024)


def measured(directory: str, count: int,
             work: Callable[[], None]) -> Result:
    os.sync()
    before, began = disk_got(directory), time.monotonic()
    work()
    seconds = time.monotonic() - began
    return Result(Cost(*((now - then) / count for now, then in zip(
        disk_got(directory), before))), count / seconds)


def into_file(directory: str, count: int, ahead: int = 0,
              prepare: Callable[[int, int], None] | None = None) -> Result:
    """Append records to a new file."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as f:
        f.write(bytes(HEAD))
        if prepare is not None:
            prepare(f.fileno(), HEAD + count * RECORD)

        def work() -> None:
            end = zeros = HEAD
            for _ in range(count):
                os.pwrite(f.fileno(), os.urandom(RECORD), end)
                end += RECORD
                if ahead and end >= zeros:
                    os.pwrite(f.fileno(), bytes(ahead), end)
                    zeros = end + ahead
                os.fdatasync(f.fileno())
        return measured(directory, count, work)


def into_volume(directory: str, count: int) -> Result:
    with (common.place(directory) as place,
          common.new_repository(place, codec='lz4') as repo):
        openvolumes.create(repo, 'disk', count * PAGE)
        with openvolumes.open_volume(repo, 'disk') as volume:

            def work() -> None:
                for n in range(count):
                    volume.write(os.urandom(PAGE), n * PAGE)
                    volume.flush()
            return measured(directory, count, work)


def write_zeros(fd: int, size: int) -> None:
    """Overwrite the file from its beginning."""
    os.pwrite(fd, bytes(size), 0)


KINDS: dict[str, Callable[[str, int], Result]] = {
    'becomes longer': into_file,
    'has its blocks, by fallocate': functools.partial(
        into_file, prepare=lambda fd, size: os.posix_fallocate(fd, 0, size)),
    'has 64 KiB of zeros ahead': functools.partial(
        into_file, ahead=64 << 10),
    'has 1 MiB of zeros ahead': functools.partial(into_file, ahead=1 << 20),
    'was written before, in full': functools.partial(
        into_file, prepare=write_zeros),
    'a volume': into_volume,
}


def main() -> None:
    args = common.arguments(__doc__, rounds=5,
                            writes=(300, 'of each file')).parse_args()
    found: dict[str, list[Result]] = {kind: [] for kind in KINDS}
    for _ in range(args.rounds):
        for kind, run in KINDS.items():
            found[kind].append(run(args.dir, args.writes))
    print(f'{"of one write and its sync":30}{"writes":>8}{"flushes":>9}'
          f'{"KiB":>8}{"a second":>10}')
    for kind, results in found.items():
        cost = [statistics.median(values) for values in zip(
            *(result.cost for result in results))]
        rate = statistics.median(result.rate for result in results)
        print(f'{kind:30}{cost[0]:8.1f}{cost[1]:9.1f}{cost[2]:8.1f}'
              f'{rate:10.0f}')


if __name__ == '__main__':
    main()
