# SPDX-License-Identifier: Apache-2.0

"""Measure batch backups of disks that change from night to night.

Run it from a checkout, on an idle machine::

    python benchmarks/batch.py [--mib 256] [--disks 16] [--ranks 8]
        [--dirty 22] [--partitions N] [--dir DIR] [DISK...]

The disks are made: half of each is common to all, a tenth is zeros, the rest
is its own. The DISKs are read in their place, if there are any. On each night
but the first, so many percent of the segments change, each in two blocks of
4 KiB.

For each night: the time, the rate of virtual bytes for each second of a
processor, bytes read and stored, and the most memory of a rank (PSS, sampled
every 50 ms). At the end, the stored bytes next to those of the same disks
uploaded one after the other, and whether each backup has its disk's bytes.

Agun, Zhang and Yang (parallel deduplication with batch scheduling) report 88
MB/s of virtual disks for each node, at 10 to 13 % of a core and in 35 MB.
"""

import contextlib
import datetime
import os
import pathlib
import random
import resource
import shutil
import tempfile
import threading
import time

import common

from glance_dedup.base import imageids
from glance_dedup.batch import job
from glance_dedup.repository import repository

SEGMENT = 2 << 20
BLOCK = 4096
NIGHTS = 3
FIRST = datetime.datetime(2026, 1, 1, 1, tzinfo=datetime.timezone.utc)


class Sampler:
    """The most memory that a rank takes, and how many ranks were seen."""

    def __init__(self) -> None:
        self.peak = 0
        self.ranks: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> 'Sampler':
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
                with contextlib.suppress(OSError):
                    words = path.read_bytes().split(b'\0')
                    if words[1:3] == [b'-m', b'glance_dedup.batch.rank']:
                        pid = path.parent.name
                        self.ranks.add(pid)
                        self.peak = max(self.peak,
                                        common.memory(pid).proportional)


def made_disks(directory: str, count: int, size: int) -> list[str]:
    """Disks as the description says."""
    paths = []
    shared = random.Random(0).randbytes(size // 2 // SEGMENT * SEGMENT)
    for number in range(count):
        path = os.path.join(directory, f'disk{number}')
        zeros = size // 10 // SEGMENT * SEGMENT
        with open(path, 'wb') as disk:
            disk.write(shared)
            disk.write(random.Random(1 + number).randbytes(
                size - len(shared) - zeros))
            disk.truncate(size)
        paths.append(path)
    return paths


def change(paths: list[str], percent: float, night: int) -> None:
    """Change so many percent of each disk's segments."""
    for number, path in enumerate(paths):
        rng = random.Random(1000 * night + number)
        segments = os.path.getsize(path) // SEGMENT
        with open(path, 'r+b') as disk:
            for segment in rng.sample(range(segments),
                                      round(segments * percent / 100)):
                for _ in range(2):
                    disk.seek(segment * SEGMENT
                              + rng.randrange(SEGMENT // BLOCK) * BLOCK)
                    disk.write(rng.randbytes(BLOCK))


def children_seconds() -> float:
    """Processor time of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_night(repo: repository.Repository, settings: job.Settings,
              sources: list[job.Source], night: int) -> int:
    """Back all disks up, and print what it took; the new bytes."""
    work = job.Job(repo, settings, FIRST + datetime.timedelta(days=night),
                   lambda done, total, words: None)
    before, start = children_seconds(), time.monotonic()
    with Sampler() as sampler:
        results = work.run(sources)
    wall, used = time.monotonic() - start, children_seconds() - before
    failed = [result.note for result in results if result.note]
    if failed:
        raise SystemExit('\n'.join(failed))
    size = sum(result.size for result in results)
    print(f'night {night + 1}: {wall:6.1f} s, {used:6.1f} s of processors, '
          f'{size / used / 1e9:5.2f} GB/s for each; read '
          f'{sum(result.read for result in results) / size:5.2f}, stored '
          f'{sum(result.stored for result in results) / size:6.4f} of '
          f'{size / 1e9:.1f} GB; a rank took {sampler.peak / 1e6:.1f} MB')
    return sum(result.stored for result in results)


def upload_all(path: str, paths: list[str], filters: str, night: int) -> int:
    """The same bytes, uploaded one after the other; the new bytes."""
    with repository.Repository(path, filter_dir=filters) as repo:
        return sum(repo.put(
            f'{os.path.basename(source).partition(".")[0]}-{night}',
            source).new_bytes for source in paths)


def need_equal(repo: repository.Repository, paths: list[str],
               night: int) -> None:
    """Compare the backups of a night with the disks."""
    for path in paths:
        with (repo.open_image(imageids.backup_id(
                os.path.basename(path).partition('.')[0],
                FIRST + datetime.timedelta(days=night))) as image,
              open(path, 'rb') as disk):
            for piece in image.pieces():
                if disk.read(len(piece)) != piece:
                    raise SystemExit(f'the backup of {path} differs')
    print('all backups of the last night have the bytes of their disks')


def main() -> None:
    """Measure."""
    parser = common.arguments(__doc__, mib=256, rounds=None)
    parser.add_argument('--disks', type=int, default=16)
    parser.add_argument('--ranks', type=int, default=8)
    parser.add_argument('--dirty', type=float, default=22.0,
                        help='percent of segments')
    parser.add_argument('paths', metavar='DISK', nargs='*')
    options = parser.parse_args()
    top = tempfile.mkdtemp(prefix='batch-', dir=options.dir)
    try:
        measure(options, top)
    finally:
        shutil.rmtree(top)


def measure(options, top: str) -> None:
    """Make disks and two repositories, and go through the nights."""
    paths = options.paths or made_disks(top, options.disks,
                                        options.mib << 20)
    sources = [job.Source(os.path.basename(path).partition('.')[0], 'disk',
                          path, 'raw') for path in paths]
    settings = job.Settings(
        ranks=options.ranks, state=os.path.join(top, 'state'),
        spool=os.path.join(top, 'spool'), scratch=os.path.join(top, 'scratch'))
    for name in ('batch', 'uploads'):
        repository.Repository.create(os.path.join(top, name), volumes=True)
    common.warm_pages(sum(map(os.path.getsize, paths)), top)
    with repository.Repository(os.path.join(top, 'batch'),
                               index='none') as repo:
        batch = uploads = 0
        for night in range(NIGHTS):
            if night and not options.paths:
                change(paths, options.dirty, night)
            batch += run_night(repo, settings, sources, night)
            uploads += upload_all(os.path.join(top, 'uploads'), paths,
                                  os.path.join(top, 'filters'), night)
        need_equal(repo, paths, NIGHTS - 1)
    print(f'new: {batch / 1e6:.1f} MB, uploaded one after the other '
          f'{uploads / 1e6:.1f} MB: {batch / uploads:.4f}')


if __name__ == '__main__':
    main()
