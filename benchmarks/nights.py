# SPDX-License-Identifier: Apache-2.0

"""Compare nightly backups of disks with those of restic and borg.

Run it from a checkout in which the extension is built, as root for an empty
page cache; the packages of the profile *benchmark* in ``bindep.txt`` have
restic and borg::

    python benchmarks/nights.py [--disks 40] [--mib 64] [--nights 5]
        [--restored 4] [--only NAME ...] [--dir DIR]

The disks are raw files. Half of each is common to all, a quarter its own, and
the rest zeros; a third of each block compresses. Each night, 2 to 5 percent of
each disk change, in runs of 64 KiB. After each night each program backs up all
disks in one run, in turn, at its defaults, from a warm page cache.

Shown are the space on the disk after each night, the seconds of the run, those
of processors, and the memory of the largest process. *Later* is the space
after merging and recompression. Not counted is what each program keeps beside
its repository, and can make again. At the end the first disks are restored,
from the newest and from the oldest night, from an empty page cache, and
compared.
"""

import datetime
import os
import pathlib
import random
import shutil
import statistics
import sys

import common
from common import MIB
import peers

BLOCK = 4096
RUN = 16 * BLOCK
#: Random bytes of a block; the rest is zeros.
NOISE = BLOCK * 2 // 3


# -- disks --------------------------------------------------------------------

def run_of(rng: random.Random) -> bytes:
    """Return RUN bytes, a third of which compress."""
    return b''.join(rng.randbytes(NOISE).ljust(BLOCK, b'\0')
                    for _ in range(RUN // BLOCK))


def make(place: pathlib.Path, count: int, size: int) -> list[str]:
    """Make the disks of the first night; return their paths."""
    paths = []
    for number in range(count):
        common_, own = random.Random(0), random.Random(1 + number)
        path = place / f'disk{number}'
        with open(path, 'wb') as disk:
            for rng, part in (common_, size // 2), (own, size // 4):
                for _ in range(part // RUN):
                    disk.write(run_of(rng))
            disk.truncate(size)
        paths.append(str(path))
    return paths


def change(paths: list[str], night: int) -> None:
    """Write what the servers write in a day."""
    for number, path in enumerate(paths):
        rng = random.Random(1000 * night + number)
        runs = os.path.getsize(path) // RUN
        with open(path, 'r+b') as disk:
            for place in rng.sample(
                    range(runs), round(runs * rng.uniform(0.02, 0.05))):
                disk.seek(place * RUN)
                disk.write(run_of(rng))


# -- programs -----------------------------------------------------------------

class Ours(peers.Recompressed):
    """`backup run` with a process for each processor."""

    title = 'glance-dedup'
    level = 9

    def back_up(self, night: int, paths: list[str]) -> peers.Spent:
        return self.command(
            'backup', 'run', '--local', str(os.cpu_count()),
            '--disk-format', 'raw', *(
                word for name in ('state', 'spool', 'scratch')
                for word in (f'--{name}', os.path.join(self.directory, name))),
            *paths)

    def back(self, night: int, path: str, reader: peers.Reader
             ) -> peers.Spent:
        """Restore a disk of a night, the first being 0."""
        name = os.path.basename(path)
        return self.command('backup', 'restore', name, '-', '--at',
                            self._times[night], reader=reader)

    def stored(self):
        return peers.allocated(self.path)

    def note_times(self, path: str) -> None:
        """Find out when the nights were."""
        found = peers.output(
            sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
            self.path, 'backup', 'list', os.path.basename(path), '-f',
            'value', '-c', 'time')
        self._times = [
            datetime.datetime.fromtimestamp(
                seconds, datetime.timezone.utc).isoformat()
            for seconds in sorted(map(int, found.split()))]


class Borg(peers.BorgByContent):
    """One archive for each night."""

    def back_up(self, night: int, paths: list[str]) -> peers.Spent:
        return self.command('create', '--sparse',
                            self.archive(f'night{night}'),
                            *map(os.path.basename, paths),
                            cwd=os.path.dirname(paths[0]))

    def back(self, night: int, path: str, reader: peers.Reader
             ) -> peers.Spent:
        return self.command('extract', '--stdout',
                            self.archive(f'night{night}'),
                            os.path.basename(path), reader=reader)


class Restic(peers.Restic):
    """One snapshot for each night."""

    def back_up(self, night: int, paths: list[str]) -> peers.Spent:
        return self.command('backup', '--tag', f'night{night}',
                            *map(os.path.basename, paths),
                            cwd=os.path.dirname(paths[0]))

    def back(self, night: int, path: str, reader: peers.Reader
             ) -> peers.Spent:
        return self.command('dump', '--tag', f'night{night}', 'latest',
                            '/' + os.path.basename(path), reader=reader)


PROGRAMS = {'glance-dedup': Ours, 'restic': Restic, 'borg': Borg}


# -- figures ------------------------------------------------------------------

def show_night(table: common.Table, name: str, night: int,
               spent: peers.Spent, stored: int) -> None:
    when = 'later nights' if night else 'first night'
    for what, figure, unit in (
            ('wall', spent.wall, 's'), ('processors', spent.cpu, 's'),
            ('memory', spent.peak / MIB, 'MiB')):
        table.figure(f'{name}: {when}: {what}', figure, unit)
    table.figure(f'{name}: stored, night {night + 1}', stored / MIB, 'MiB')


def show_restored(table: common.Table, name: str, program, which: str,
                  night: int, pairs: list[tuple[str, str]]) -> None:
    """Restore disks of one night, and compare them with copies."""
    spent = []
    for path, copy in pairs:
        common.empty_page_cache()
        spent.append(program.back(night, path, peers.discard).wall)
        program.back(night, path, peers.compare_with(copy))
    table.figure(f'{name}: a disk of the {which} night',
                 statistics.median(spent), 's')


def main() -> None:
    args = common.arguments(
        __doc__, mib=(64, 'of each disk'), disks=(40, 'how many'),
        nights=(5, 'how many'), restored=(4, 'disks of each night'),
        only=(list(PROGRAMS), 'of the programs')).parse_args()
    table = common.Table()
    with common.place(args.dir) as directory:
        place = pathlib.Path(directory)
        for name in ('disks', 'oldest', *args.only):
            (place / name).mkdir()
        paths = make(place / 'disks', args.disks, args.mib * MIB)
        kept = [str(place / 'oldest' / os.path.basename(path))
                for path in paths[:args.restored]]
        programs = {name: PROGRAMS[name](str(place / name))
                    for name in args.only}
        for program in programs.values():
            program.prepare(args.disks * args.mib * MIB)
        for night in common.count_rounds(args.nights, 'night'):
            if night:
                change(paths, night)
            else:
                for path, copy in zip(paths, kept):
                    shutil.copy(path, copy)
            for name in list(programs)[::-1 if night % 2 else 1]:
                spent = programs[name].back_up(night, paths)
                show_night(table, name, night, spent,
                           programs[name].stored())
        for name, program in programs.items():
            if isinstance(program, Ours):
                program.note_times(paths[0])
            for which, night, copies in (
                    ('newest', args.nights - 1, paths), ('oldest', 0, kept)):
                show_restored(table, name, program, which, night,
                              list(zip(paths, copies))[:args.restored])
        for name, program in programs.items():
            if program.maintain() is not None:
                table.figure(f'{name}: stored, later',
                             program.stored() / MIB, 'MiB')
            program.close()
    table.show()


if __name__ == '__main__':
    main()
