# SPDX-License-Identifier: Apache-2.0

"""Measure batch backups of disks that change from night to night.

Run it from a checkout, on an idle machine::

    python benchmarks/papers/batch.py nights [--dirty 22] [--dirty-bits]
        [--profile] [DISK...]
    python benchmarks/papers/batch.py memory [--partitions 1 2 ...]
        [--plot DIR]
    python benchmarks/papers/batch.py buffers [--bytes 1300 ...] [--plot DIR]

Each has ``[--mib 256] [--disks 16] [--ranks 8] [--dir DIR]``. The disks are
made: half of each is common to all, a tenth is zeros, the rest is its own.

nights
    Three nights; on each but the first, so many percent of the segments
    change, each in two blocks of 4 KiB. The DISKs are read in their place, if
    there are any. With ``--dirty-bits`` the ranks get the changed segments, as
    from a driver that keeps dirty bits; otherwise they read each one. For each
    night: processor seconds of each stage, the rate of virtual bytes for each
    second of a processor, bytes read and stored, and the maximum memory of a
    rank (PSS, sampled every 50 ms), in all and without pages of files. At the
    end, the stored bytes next to those of the same disks uploaded one after
    the other, and whether each backup has its disk's bytes.
memory
    Agun's table 1 and figure 8: the number of partitions varies, with the
    buffers of option 2 (the product's) and of option 1 (a send buffer for each
    partition of each rank; only here). Both options get the same memory for
    buffers. A trial is two nights in a repository of its own. In the first,
    all blocks are new. In the second only the index is left from the night
    before, so each block is requested, and found.
buffers
    Figure 9: the size of a message varies, in such trials.

Agun, Zhang and Yang (parallel deduplication with batch scheduling) report 88
MB/s of virtual disks for each node, at 10 to 13 % of a core and in 35 MB.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import pstats
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
from typing import Any

import _path  # noqa: F401  finds the modules beside it
import batchrank
import common
import plot

from dedupd.tasks import merger
from glance_dedup.backup import backup_job
from glance_dedup.backup import rank_exchange
from glance_dedup.backup import rank_spool
from glance_dedup.base import imageids
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository

SEGMENT = 2 << 20
BLOCK = 4096
NIGHTS = 3
STAGES = ('start', 'scan', 'answer', 'store', 'resolve', 'finish')
#: Bytes that a request takes while its partition is sorted and joined.
JOINED = 60
# The paper's table 1: partitions, MB of one, hours, GB/s of 100 nodes.
PAPER = ((100, 83.6, None, None), (250, 33.5, 3.12, 8.76),
         (500, 16.8, 3.15, 8.67), (750, 11.2, 3.22, 8.48),
         (1000, 8.45, 3.29, 8.30))
# The share of a core, while the paper's nodes worked.
PAPER_CORE = (0.10, 0.13)
PAPER_RATE = 88e6
FIRST = datetime.datetime(2026, 1, 1, 1, tzinfo=datetime.timezone.utc)


class Sampler:
    """The maximum memory of a rank.

    :param log: the directory of the trial, in which each rank has a file that
        is called as its process; their environments have it
    """

    def __init__(self, log: str) -> None:
        self.peak = self.anonymous = 0
        self._log = log
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
            for path in pathlib.Path(self._log).glob('[0-9]*'):
                with contextlib.suppress(OSError):
                    environ = pathlib.Path('/proc', path.name, 'environ')
                    if self._log.encode() in environ.read_bytes():
                        found = common.memory(path.name)
                        self.peak = max(self.peak, found.proportional)
                        self.anonymous = max(self.anonymous, found.anonymous)


def made_disks(directory: str, count: int, size: int) -> list[str]:
    """Make disks by the description; return their paths."""
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


def change(paths: list[str], percent: float, night: int
           ) -> dict[str, list[int]]:
    """Change so many percent of each disk's segments; return them by name."""
    written = {}
    for number, path in enumerate(paths):
        rng = random.Random(1000 * night + number)
        segments = os.path.getsize(path) // SEGMENT
        changed = rng.sample(range(segments), round(segments * percent / 100))
        written[os.path.basename(path)] = changed
        with open(path, 'r+b') as disk:
            for segment in changed:
                for _ in range(2):
                    disk.seek(segment * SEGMENT
                              + rng.randrange(SEGMENT // BLOCK) * BLOCK)
                    disk.write(rng.randbytes(BLOCK))
    return written


def children_seconds() -> float:
    """Return the processor time of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclasses.dataclass
class Night:
    """The cost of a night."""

    wall: float
    used: float
    """Seconds of processors, of all processes."""
    stages: dict[str, float]
    """The same of the ranks that made backups, by stage."""
    size: int
    read: int
    stored: int
    peak: int
    """Bytes of memory (PSS), of the rank with the most."""
    anonymous: int
    """The same without pages of files, which the system can drop."""
    events: list[dict[str, Any]]
    """The ranks' records."""

    @property
    def rate(self) -> float:
        """Virtual bytes for each second of a processor."""
        return self.size / self.used

    @property
    def working_rate(self) -> float:
        """Return the same without the time for starting the processes."""
        return self.size / sum(self.stages[stage] for stage in STAGES[1:])


def read_events(directory: str) -> list[dict[str, Any]]:
    """Return the ranks' records, one process after the other."""
    return [{**json.loads(line), 'pid': path.name} for path in sorted(
        pathlib.Path(directory).glob('[0-9]*')) if path.suffix == ''
        for line in path.read_text(encoding='utf-8').splitlines()]


def by_stage(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return the ranks' seconds of processors, by stage."""
    found = dict.fromkeys(STAGES, 0.0)
    for pid in {event['pid'] for event in events}:
        own = [event for event in events if event['pid'] == pid
               and event['event'] in ('view', 'stage', 'ended')]
        stage, since = 'start', 0.0
        for event in own:
            found[stage] += event['used'] - since
            since = event['used']
            stage = event.get('stage', 'scan')
    return found


def run_night(repo: image_repository.Repository, settings: backup_job.Settings,
              sources: list[backup_job.Source], night: int,
              **trial: Any) -> Night:
    """Back all disks up.

    :param trial: of :class:`batchrank.Trial`, and the `partitions`
    """
    partitions = trial.pop('partitions', None)
    with tempfile.TemporaryDirectory(dir=settings.spool) as log:
        os.environ['BATCH_RANK'] = json.dumps({**trial, 'log': log})
        backup_job.RANK = (batchrank.__file__,)
        work = Job(repo, settings, FIRST + datetime.timedelta(days=night),
                   lambda done, total, words: None)
        work.partitions = partitions
        before, start = children_seconds(), time.monotonic()
        with Sampler(log) as sampler:
            results = work.run(sources)
        wall, used = time.monotonic() - start, children_seconds() - before
        failed = [result.note for result in results if result.note]
        if failed:
            raise SystemExit('\n'.join(failed))
        if trial.get('profile'):
            show_profile(log)
        events = read_events(log)
        broken = [event['error'] for event in events
                  if event['event'] == 'broken']
        if broken:
            raise SystemExit('a round broke: ' + '; '.join(broken))
        return Night(wall, used, by_stage(events),
                     sum(result.size for result in results),
                     sum(result.read for result in results),
                     sum(result.stored for result in results),
                     sampler.peak, sampler.anonymous, events)


class Job(backup_job.Job):
    """A job with an optional number of partitions."""

    partitions: int | None = None

    def _partitions(self, sources: Any, ranks: int) -> int:
        return self.partitions or super()._partitions(sources, ranks)


def show_profile(log: str) -> None:
    """Print the functions that took most of the ranks' time."""
    paths = [str(path) for path in pathlib.Path(log).glob('*.profile')]
    stats = pstats.Stats(*paths, stream=sys.stdout)
    stats.strip_dirs().sort_stats('tottime').print_stats(25)


def upload_all(path: str, paths: list[str], filters: str, night: int) -> int:
    """Upload the same bytes, one after the other; return the new bytes."""
    with image_repository.Repository(path, filter_dir=filters) as repo:
        return sum(repo.put(
            f'{os.path.basename(source).partition(".")[0]}-{night}',
            source).new_bytes for source in paths)


def require_equal(repo: image_repository.Repository, paths: list[str],
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


# -- nights -------------------------------------------------------------------

def make_repository(path: str) -> None:
    """Make an empty repository with an exact index, which merging keeps."""
    image_repository.Repository.create(path)
    with (image_repository.Repository(path, index='none') as repo,
          maintainer_role.Maintainer(repo) as maintainer):
        merger.run_once(maintainer, pacing.Pace())


def make_settings(top: str, count: int) -> backup_job.Settings:
    os.makedirs(os.path.join(top, 'spool'), exist_ok=True)
    return backup_job.Settings(
        ranks=count, state=os.path.join(top, 'state'),
        spool=os.path.join(top, 'spool'), scratch=os.path.join(top, 'scratch'))


def sources_of(paths: list[str]) -> list[backup_job.Source]:
    return [backup_job.Source(os.path.basename(path).partition('.')[0], 'disk',
                              path, 'raw') for path in paths]


def show_night(night: int, found: Night) -> None:
    print(f'{night + 1:5}{found.wall:7.1f}{found.used:7.1f} '
          + ''.join(f'{found.stages[stage]:8.2f}' for stage in STAGES)
          + f'{found.rate / 1e6:8.0f}{found.working_rate / 1e6:9.0f}'
          f'{found.read / found.size:6.2f}{found.stored / found.size:8.4f}'
          f'{found.peak / 1e6:6.1f}{found.anonymous / 1e6:6.1f}',
          flush=True)


def measure_nights(options: argparse.Namespace, top: str) -> None:
    """Make disks and two repositories, and go through the nights."""
    paths = options.paths or made_disks(top, options.disks,
                                        options.mib << 20)
    settings = make_settings(top, options.ranks)
    for name in ('batch', 'uploads'):
        make_repository(os.path.join(top, name))
    size = sum(map(os.path.getsize, paths))
    common.warm_pages(size, top)
    print(f'{len(paths)} disks, {size / 1e9:.1f} GB, {options.ranks} ranks, '
          f'{options.dirty:g} % of the segments change. Seconds: of the '
          'clock, of processors, and of these by stage; MB/s for each second '
          'of a processor, with and without the start of all processes; bytes '
          'read and stored, of the size; MB of a rank, in all and without '
          'pages of files')
    print('night  clock   used ' + ''.join(f'{s:>8}' for s in STAGES)
          + '    MB/s  working  read  stored  rank   own')
    with image_repository.Repository(os.path.join(top, 'batch'),
                                     index='none') as repo:
        batch = uploads = 0
        for night in range(NIGHTS):
            written = (change(paths, options.dirty, night)
                       if night and not options.paths else None)
            found = run_night(repo, settings, sources_of(paths), night,
                              profile=options.profile,
                              written=written if options.dirty_bits else None)
            show_night(night, found)
            batch += found.stored
            uploads += upload_all(os.path.join(top, 'uploads'), paths,
                                  os.path.join(top, 'filters'), night)
        require_equal(repo, paths, NIGHTS - 1)
    low, high = (PAPER_RATE / core / 1e6 for core in reversed(PAPER_CORE))
    print(f'the paper: {PAPER_RATE / 1e6:.0f} MB/s of a node at '
          f'{PAPER_CORE[0]:.0%} to {PAPER_CORE[1]:.0%} of a core, so '
          f'{low:.0f} to {high:.0f} MB/s for each second of a core; 35 MB')
    print(f'new: {batch / 1e6:.1f} MB, uploaded one after the other '
          f'{uploads / 1e6:.1f} MB: {batch / uploads:.4f}')


# -- memory and buffers -------------------------------------------------------

@dataclasses.dataclass
class Tried:
    """Two nights of a trial."""

    new: Night
    known: Night
    duplicates: int
    """Bytes that were stored more than once, by both."""

    @property
    def used(self) -> float:
        return sum(sum(night.stages[stage] for stage in STAGES[1:])
                   for night in (self.new, self.known))

    @property
    def peak(self) -> int:
        return max(self.new.peak, self.known.peak)

    @property
    def hours(self) -> float:
        """Return hours for 1 TB, a node's share, at its share of a core."""
        return (1e12 / (self.new.size + self.known.size) * self.used
                / PAPER_CORE[1] / 3600)


def run_trial(options: argparse.Namespace, top: str, paths: list[str],
              unique: int, **trial: Any) -> Tried:
    """Run two nights in a repository of their own."""
    with tempfile.TemporaryDirectory(dir=top) as own:
        path = os.path.join(own, 'batch')
        make_repository(path)
        settings = make_settings(own, options.ranks)
        with image_repository.Repository(path, index='none') as repo:
            new = run_night(repo, settings, sources_of(paths), 0, **trial)
            shutil.rmtree(settings.state)
            known = run_night(repo, settings, sources_of(paths), 1, **trial)
        return Tried(new, known, new.stored + known.stored - unique)


def prepare(options: argparse.Namespace, top: str) -> tuple[list[str], int]:
    """Make the disks; return them, and the bytes of different blocks."""
    paths = made_disks(top, options.disks, options.mib << 20)
    common.warm_pages(sum(map(os.path.getsize, paths)), top)
    path = os.path.join(top, 'uploads')
    make_repository(path)
    unique = upload_all(path, paths, os.path.join(top, 'filters'), 0)
    shutil.rmtree(path)
    print(f'{options.disks} disks of {options.mib} MiB, {options.ranks} '
          'ranks; in each trial all blocks are new at first, then known')
    return paths, unique


def show_tried(name: str, found: Tried) -> None:
    print(f'{name}{found.new.wall:8.1f}{found.known.wall:8.1f}'
          f'{found.used:8.2f}{found.hours:7.2f}{found.peak / 1e6:7.1f}'
          f'{found.duplicates / 1e6:8.2f}', flush=True)


TRIED = (f'{"new, s":>8}{"known":>8}{"used":>8}{"hours":>7}{"rank":>7}'
         f'{"twice":>8}')
TRIED_TEXT = ('Seconds of both nights, seconds of processors in both without '
              f'the start, hours for 1 TB at {PAPER_CORE[1]:.0%} of a core, '
              'MB of a rank, MB stored twice')


def buffers_of(ranks_: int) -> int:
    """Return the bytes of a rank's buffers in option 2."""
    return (ranks_ + 1) * rank_exchange.BUFFER + rank_spool.BUFFER


def measure_memory(options: argparse.Namespace, top: str) -> None:
    """Measure table 1, and figure 8."""
    paths, unique = prepare(options, top)
    blocks = sum(map(os.path.getsize, paths)) // BLOCK
    print(f'MB of a partition, of all buffers of a rank, bytes of one. '
          f'{TRIED_TEXT}')
    print(f'option  partitions      MB  buffers     one{TRIED}')
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for partitions in options.partitions:
        requests = blocks / options.ranks / partitions
        for option in (2, 1):
            memory = buffers_of(options.ranks)
            one = (rank_exchange.BUFFER if option == 2 else max(
                rank_spool.RECORD, memory // (options.ranks * partitions)))
            found = run_trial(
                options, top, paths, unique, partitions=partitions,
                option=option, buffer=one,
                piece=max(int(requests * 1.2), 1000))
            show_tried(f'{option:6}{partitions:12}'
                       f'{requests * JOINED / 1e6:8.2f}{memory / 1e6:9.2f}'
                       f'{one:8}', found)
            series = lines.setdefault(f'option {option}', ([], []))
            series[0].append(requests * JOINED / 1e6)
            series[1].append(found.used)
    show_pieces(options, top, paths, unique, blocks)
    print('the paper, 100 nodes, 2,500 disks of 40 GB, option 2: partitions, '
          'MB of one, hours, GB/s (option 1: 7.8 to 26 h)')
    for row in PAPER:
        print(''.join(f'{"-" if figure is None else figure:>8}'
                      for figure in row))
    if options.plot:
        plot.lines(lines, 'MB of a partition (requests, while it is joined)',
                   'seconds of processors', 'Batch backups by memory',
                   os.path.join(options.plot, 'experiments-batch-memory.svg'),
                   log_x=True)


def show_pieces(options: argparse.Namespace, top: str, paths: list[str],
                unique: int, blocks: int) -> None:
    """Measure one partition larger than memory, which is joined in pieces."""
    piece = max(1000, blocks // options.ranks // 10)
    found = run_trial(options, top, paths, unique, partitions=1, piece=piece)
    buffer = rank_exchange.BUFFER
    show_tried(f'{"2, in pieces":>18}{piece * JOINED / 1e6:8.2f}'
               f'{buffers_of(options.ranks) / 1e6:9.2f}{buffer:8}',
               found)


def measure_buffers(options: argparse.Namespace, top: str) -> None:
    """Measure figure 9."""
    paths, unique = prepare(options, top)
    print(f'Bytes of a message. {TRIED_TEXT}')
    print(f'message{TRIED}')
    seconds = []
    for size in options.bytes:
        found = run_trial(options, top, paths, unique, buffer=size)
        show_tried(f'{size:7}', found)
        seconds.append(found.used)
    if options.plot:
        plot.lines({'option 2': (options.bytes, seconds)},
                   'bytes of a message', 'seconds of processors',
                   'Batch backups by the size of messages',
                   os.path.join(options.plot, 'experiments-batch-buffers.svg'),
                   log_x=True)


# -- the command --------------------------------------------------------------

def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition('\n')[0].rstrip('.'))
    commands = parser.add_subparsers(required=True)
    for name, measure, mib in (('nights', measure_nights, 256),
                               ('memory', measure_memory, 128),
                               ('buffers', measure_buffers, 128)):
        command = commands.add_parser(name)
        command.set_defaults(measure=measure)
        command.add_argument('--mib', type=int, default=mib,
                             help='of each disk (default: %(default)s)')
        command.add_argument('--disks', type=int, default=16)
        command.add_argument('--ranks', type=int, default=8)
        common.add_directory(command)
        if name == 'nights':
            command.add_argument('--dirty', type=float, default=22.0,
                                 help='percent of segments')
            command.add_argument('--dirty-bits', action='store_true',
                                 help='do not read clean segments')
            command.add_argument('--profile', action='store_true',
                                 help='show where the ranks spend their time')
            command.add_argument('paths', metavar='DISK', nargs='*')
            continue
        plot.argument(command, 'DIR')
        if name == 'memory':
            command.add_argument('--partitions', type=int, nargs='+',
                                 default=[1, 4, 10, 40, 100],
                                 help='of each rank')
        else:
            command.add_argument('--bytes', type=int, nargs='+', default=[
                1300, 5200, 16250, 65000, 260000])
    return parser


def main() -> None:
    """Measure."""
    parser = make_parser()
    options = parser.parse_args()
    if getattr(options, 'dirty_bits', False) and options.paths:
        parser.error('--dirty-bits is for disks that are made: nobody knows '
                     'what was written to a DISK')
    with common.place(options.dir) as top:
        options.measure(options, top)


if __name__ == '__main__':
    main()
