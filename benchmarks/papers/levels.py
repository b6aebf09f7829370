# SPDX-License-Identifier: Apache-2.0

"""Measure levels 1 and 2 of batch backups on disks of ageing systems.

Run it from a checkout, as root::

    unshare --mount python benchmarks/papers/levels.py [--disks 40] [--mib 512]
        [--nights 4] [--debs DIR] [--updates DIR] [--plot FILE] ROOT...

It should have mounts of its own. Else a program that starts meanwhile with a
copy of all mounts keeps a disk mounted, and may write to it during its backup.
Each ROOT is a directory with an installed system, as debootstrap makes it, or
with any files.
The first disk of each gets an ext4 file system with its files; the others are
copies of it, each with another host name, keys and machine id. Before each
night but the first, each disk is mounted through a loop device and ages:

* packages: one to three of DEBS are unpacked onto it (``dpkg-deb -x``); and
  on one of the nights, chosen at random for each disk, all packages in the
  subdirectory of UPDATES that is called as the disk's ROOT;
* logs: megabytes of lines are appended to three files; each night the files
  of the night before are compressed;
* a database: rows of an SQLite table of ``--rows`` rows are changed, and some
  are added.

For each night the table has, of the bytes that are not zeros: those of clean
segments (level 1); those of dirty segments that were found in the repository,
as share of the dirty segments' (level 2); both together; and new ones. At the
end, the stored bytes next to those of the same disks uploaded one after the
other, and whether each backup has its disk's bytes. Agun, Zhang and Yang
report 78 %, 74.5 % and 94.4 % for segments of 2 MB.
"""

import argparse
import contextlib
import gzip
import os
import pathlib
import random
import shutil
import sqlite3
import subprocess

import _path  # noqa: F401  finds the modules beside it
import batch
import common
from common import MIB
import plot

from glance_dedup.repository import image_repository

BLOCK = batch.BLOCK
ZEROS = bytes(BLOCK)
LOGS = ('syslog', 'auth.log', 'access.log')
LINES = 12000
LINE_WORDS = (
    'accepted', 'connection', 'from', 'closed', 'session', 'opened', 'for',
    'user', 'GET', 'POST', '/index.html', '/api/v1/items', '200', '404',
    'timeout', 'started', 'stopped', 'unit', 'kernel:', 'sshd', 'cron')
PAPER = (0.78, 0.745, 0.944)


def run(*words: str) -> None:
    """Run a program, and show its output only if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'{" ".join(words)}: {done.stderr.strip()}')


@contextlib.contextmanager
def mounted(path: str, top: str):
    """Mount a disk's file system; yields the directory."""
    place = os.path.join(top, 'mounted')
    os.makedirs(place, exist_ok=True)
    run('mount', '-o', 'loop,noatime', path, place)
    try:
        yield pathlib.Path(place)
    finally:
        run('umount', place)


# -- disks --------------------------------------------------------------------

def make_disks(args: argparse.Namespace, top: str) -> list[str]:
    """Make a disk of each root, and copies that differ in little."""
    paths: list[str] = []
    for number in range(args.disks):
        path = os.path.join(top, f'disk{number:02}')
        root = number % len(args.roots)
        if number < len(args.roots):
            with open(path, 'wb') as disk:
                disk.truncate(args.mib * MIB)
            run('mkfs.ext4', '-q', '-F', '-b', str(BLOCK), '-d',
                args.roots[root], path)
        else:
            run('cp', '--sparse=always', paths[root], path)
        paths.append(path)
    for number, path in enumerate(paths):
        with mounted(path, top) as place:
            make_own(place, random.Random(number), args.rows)
    return paths


def make_own(place: pathlib.Path, rng: random.Random, rows: int) -> None:
    """Make the files of a system's first start."""
    etc = place / 'etc'
    etc.mkdir(exist_ok=True)
    (etc / 'hostname').write_text(f'server-{rng.getrandbits(32):08x}\n')
    (etc / 'machine-id').write_text(f'{rng.getrandbits(128):032x}\n')
    (etc / 'ssh').mkdir(exist_ok=True)
    for kind in ('rsa', 'ecdsa', 'ed25519'):
        (etc / 'ssh' / f'ssh_host_{kind}_key').write_bytes(rng.randbytes(2600))
    add_logs(place, rng)
    with database(place) as table:
        table.execute('create table items (id integer primary key, '
                      'customer integer, text text, price real)')
        add_rows(table, rng, rows)
        table.execute('create index by_customer on items (customer)')


# -- ageing -------------------------------------------------------------------

def age(paths: list[str], args: argparse.Namespace, top: str, night: int
        ) -> None:
    """Do the changes of a server's day."""
    debs = sorted(map(str, pathlib.Path(args.debs).glob('*.deb'))
                  if args.debs else ())
    for number, path in enumerate(paths):
        root = os.path.basename(args.roots[number % len(args.roots)])
        updates = sorted(map(str, pathlib.Path(args.updates, root).glob(
            '*.deb')) if args.updates else ())
        rng = random.Random(1000 * night + number)
        when = random.Random(number).randrange(1, args.nights)
        chosen = rng.sample(debs, min(rng.randint(1, 3), len(debs)))
        with mounted(path, top) as place:
            for deb in chosen + (updates if night == when else []):
                run('dpkg-deb', '-x', deb, str(place))
            rotate_logs(place)
            add_logs(place, rng)
            with database(place) as table:
                change_rows(table, rng, args.rows)


def add_logs(place: pathlib.Path, rng: random.Random) -> None:
    """Append some megabytes of lines."""
    directory = place / 'var' / 'log'
    directory.mkdir(parents=True, exist_ok=True)
    for name in LOGS:
        second = 0.0
        with open(directory / name, 'a') as log:
            for _ in range(rng.randint(LINES // 4, LINES)):
                second += rng.expovariate(0.1)
                log.write(f'{second:.3f} [{rng.randrange(1 << 15)}] '
                          f'{" ".join(rng.choices(LINE_WORDS, k=8))} '
                          f'10.{rng.randrange(256)}.{rng.randrange(256)}.7\n')


def rotate_logs(place: pathlib.Path) -> None:
    """Compress the logs of the day before, as logrotate does."""
    for name in LOGS:
        path = place / 'var' / 'log' / name
        with open(path, 'rb') as log, gzip.open(f'{path}.1.gz', 'wb') as out:
            shutil.copyfileobj(log, out)
        path.unlink()


@contextlib.contextmanager
def database(place: pathlib.Path):
    """Yield the connection to a server's database; changes are committed."""
    directory = place / 'var' / 'lib'
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(directory / 'items.db')) as table:
        yield table
        table.commit()


def add_rows(table: sqlite3.Connection, rng: random.Random, count: int
             ) -> None:
    table.executemany(
        'insert into items (customer, text, price) values (?, ?, ?)',
        ((rng.randrange(1000), rng.randbytes(100).hex(), rng.random())
         for _ in range(count)))


def change_rows(table: sqlite3.Connection, rng: random.Random, rows: int
                ) -> None:
    """Change one row in a hundred, and add as many."""
    table.executemany(
        'update items set price = ?, text = ? where id = ?',
        ((rng.random(), rng.randbytes(100).hex(), rng.randrange(1, rows))
         for _ in range(rows // 100)))
    add_rows(table, rng, rows // 100)


# -- duplicates by level ------------------------------------------------------

def count_used(path: str, segments: bytes) -> tuple[int, int]:
    """Count the bytes that are not zeros, of clean and of dirty segments.

    :param segments: 1 for each clean one
    """
    found = [0, 0]
    with open(path, 'rb') as disk:
        for clean in segments:
            data = disk.read(batch.SEGMENT)
            found[not clean] += sum(
                len(data[at:at + BLOCK]) for at in range(0, len(data), BLOCK)
                if data[at:at + BLOCK] != ZEROS[:len(data) - at])
    return found[0], found[1]


def levels(paths: list[str], found: batch.Night
           ) -> tuple[float, float, float, int]:
    """Return the shares of level 1, level 2 and both; and bytes not zeros."""
    segments = {event['name']: bytes.fromhex(event['segments'])
                for event in found.events if event['event'] == 'segments'}
    clean, dirty = map(sum, zip(*(
        count_used(path, segments[os.path.basename(path)])
        for path in paths)))
    used = clean + dirty
    return (clean / used, 1 - found.stored / max(dirty, 1),
            1 - found.stored / used, used)


def show(night: int, shares: tuple[float, float, float, int],
         found: batch.Night) -> None:
    print(f'{night + 1:5}{shares[3] / 1e6:10.0f}{shares[0]:9.1%}'
          f'{shares[1]:9.1%}{shares[2]:9.1%}{found.stored / 1e6:9.1f}',
          flush=True)


def measure(args: argparse.Namespace, top: str) -> None:
    paths = make_disks(args, top)
    settings = batch.make_settings(top, args.ranks)
    for name in ('batch', 'uploads'):
        batch.make_repository(os.path.join(top, name))
    print(f'{len(paths)} disks of {args.mib} MiB. MB that are not zeros; '
          'shares that level 1, level 2 (of the rest) and both find; new MB')
    print('night      used  level 1  level 2     both      new')
    series: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in ('level 1', 'level 2, of the rest', 'both')}
    stored = uploaded = 0
    with image_repository.Repository(os.path.join(top, 'batch'),
                                     index='none') as repo:
        for night in range(args.nights):
            if night:
                age(paths, args, top, night)
            found = batch.run_night(repo, settings, batch.sources_of(paths),
                                    night)
            shares = levels(paths, found)
            show(night, shares, found)
            for (nights, figures), share in zip(series.values(), shares):
                nights.append(night + 1)
                figures.append(share * 100)
            stored += found.stored
            uploaded += batch.upload_all(
                os.path.join(top, 'uploads'), paths,
                os.path.join(top, 'filters'), night)
        batch.require_equal(repo, paths, args.nights - 1)
    print(f'the paper{"":6}' + ''.join(f'{share:9.1%}' for share in PAPER))
    print(f'new: {stored / 1e6:.1f} MB, uploaded one after the other '
          f'{uploaded / 1e6:.1f} MB: {stored / uploaded:.4f}')
    if args.plot:
        for name, share in zip(tuple(series), PAPER):
            series[f'{name}, the paper'] = ([1, args.nights],
                                            [share * 100] * 2)
        plot.lines(series, 'night', 'percent of what is not zeros',
                   f'Levels on {len(paths)} disks that age', args.plot)


def main() -> None:
    parser = common.arguments(
        __doc__, mib=512, disks=(40, 'how many'), nights=(4, 'how many'),
        ranks=(2, 'how many'),
        rows=(40000, 'of the database, some 240 bytes each'),
        debs=('', 'directory of packages that may be installed'),
        updates=('', 'directory of newer packages, by root'))
    plot.argument(parser)
    parser.add_argument('roots', metavar='ROOT', nargs='+')
    args = parser.parse_args()
    if args.nights < 2:
        parser.error('--nights is 2 at least: a disk ages between two')
    with common.place(args.dir) as top:
        measure(args, top)


if __name__ == '__main__':
    main()
