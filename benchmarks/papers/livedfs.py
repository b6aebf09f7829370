# SPDX-License-Identifier: Apache-2.0

"""Run the experiments of LiveDFS on this store.

Run it from a checkout in which the extension is built; gcc is needed, and for
A4 root, for B2 Glance and uWSGI::

    python benchmarks/papers/livedfs.py [--mib 512] [--memory MIB]
        [--rounds 3] [--dir DIR] [--stores-elsewhere] [--single-loads]
        [--no-combining] [--only A1,B1] [--plot DIR] [IMAGE..]

They are named after those of Ng, Ma, Wong, Lee and Lui, "Live Deduplication
Storage of Virtual Machine Images in an Open-Source Cloud", Middleware 2011:

* A1: an image of noise is written, all of it new, in pieces of 4 MiB;
* A2: it is read from end to end, with nothing of it in the page cache;
* A3: it is written again, under another name, with nothing in the page cache;
* A4: the power is lost: an image was committed, and another one is being
  written. Bytes that were not synced are gone, and the filter. Then the file
  system is mounted, the repository opened and its filter rebuilt, 4 MiB of
  new data stored, the committed image read, and the other one written again;
* B1: the images named are stored one after the other, distribution by
  distribution, by the names of their directories, or else their own names up
  to the first dash: the bytes that each takes, with zero blocks and without;
* B2: each of them is uploaded to a Glance, into this store and into its file
  store.

A1 to A4 stand beside a plain file on the same disk, written in the same pieces
and fsynced with its directory, in the same round. Nothing is compressed there.
``--memory`` limits the memory of each step of A1 to A3, page cache and filter
included (``memorylimit.py``); then the image has four times as much.

Each is done once more by the engine with its system calls changed (livedfs.c),
as if it were built otherwise, where that can make a difference:

* ``--stores-elsewhere``: fingerprint stores lie in files of their own, not in
  front of their blocks (A1 to A4);
* ``--single-loads``: stores are not loaded as a whole: every entry is read by
  itself (A3: without duplicates none is loaded, and reading an image never
  loads one);
* ``--no-combining``: each block is written by itself, and the page with its
  entry, too (A1: the same bytes are on the disk then, and none of duplicates
  are written).

Beside the measured time is the time that a disk with a head would need, since
an SSD, or a virtual disk, hides it: ``--seek-ms`` for each seek to another
place, ``--near-ms`` within a group or file (half a turn, at 7,200 a minute),
and ``--mb-s`` for its reads and writes. diskmodel.h defines a seek.
"""

import argparse
from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import _path  # noqa: F401  finds the modules beside it
import common
from common import MIB
import disk
import memorylimit
import plot
import start
import synthetic

from glance_dedup.repository import image_repository
from tests.functional import glance_server

EXPERIMENTS = {
    'A1': 'sequential write of new data',
    'A2': 'sequential read, page cache empty',
    'A3': 'sequential write of duplicates, page cache empty',
    'A4': 'after a loss of power',
    'B1': 'space',
    'B2': 'upload through Glance',
}
PLAIN, STORE = 'plain file', 'this store'
LIMIT = 900     # seconds for any step


# -- A: one step --------------------------------------------------------------

class Done(NamedTuple):
    """Cost of a step: seconds, and the requests to the disk."""

    wall: float
    cpu: float
    open: float     #: of the repository and its filter
    requests: int
    near: int       #: seeks
    far: int
    bytes: int

    def modelled(self, args: argparse.Namespace) -> float:
        """Seconds that a disk of the model would be busy."""
        return (self.near * args.near_ms / 1e3 + self.far * args.seek_ms / 1e3
                + self.bytes / args.mb_s / 1e6)


class Variant(NamedTuple):
    name: str
    elsewhere: bool = False
    single: bool = False
    alone: bool = False

    def differs(self, experiment: str) -> bool:
        """Return true if the result may differ from that of the store."""
        return {'A1': self.elsewhere or self.alone,
                'A2': self.elsewhere,
                'A3': self.elsewhere or self.single,
                'A4': self.elsewhere}[experiment]


def variants(args: argparse.Namespace) -> list[Variant]:
    """Return the requested variants, one by one, and then all at once."""
    asked = {'elsewhere': args.stores_elsewhere, 'single': args.single_loads,
             'alone': args.no_combining}
    names = {'elsewhere': 'stores elsewhere', 'single': 'single loads',
             'alone': 'no combining'}
    found = [Variant(names[key], **{key: True})
             for key, wanted in asked.items() if wanted]
    if len(found) > 1:
        found.append(Variant('all of these', **asked))
    return found


class Subject:
    """A plain file, or a repository, and its operations."""

    def __init__(self, program: str, directory: str, filter_dir: str,
                 variant: Variant | None, prefix: Sequence[str] = ()) -> None:
        """Make the place of the files.

        :param variant: None: plain files
        :param prefix: the beginning of each command
        """
        self.name = PLAIN if variant is None else variant.name
        self.variant = variant
        self._program, self._directory = program, directory
        self._prefix = prefix
        self._common: list[str] = []
        os.mkdir(directory)
        if variant is not None:
            path = os.path.join(directory, 'repository')
            image_repository.Repository.create(path)
            with image_repository.Repository(path) as repo:
                is_ = repo.parameters
            self.filter = os.path.join(filter_dir, is_.repository_id)
            self._common = [
                f'path={path}', f'id={is_.repository_id}',
                f'block={is_.block_size}', f'slots={is_.group_slots}',
                f'segment={is_.segment_size}', f'digest={is_.fingerprint}',
                f'filter={self.filter}']
            if variant.elsewhere:
                stores = os.path.join(directory, 'stores')
                os.mkdir(stores)
                self._common.append(f'stores={stores}')

    def command(self, write: bool, image: str, mib: int, seed: int,
                halt: bool = False) -> list[str]:
        operations = ('read', 'write') if self.variant is None else (
            'fetch', 'store')
        what = [f'mib={mib}', f'seed={seed}', *self._common, (
            f'path={image}' if self.variant is None else f'image={image}')]
        if self.variant is not None and write:
            what += [f'single={int(self.variant.single)}',
                     f'alone={int(self.variant.alone)}']
        return [*self._prefix, self._program,
                'halt-' * halt + operations[write], *what]

    def run(self, *what) -> Done:
        done = subprocess.run(self.command(*what), cwd=self._directory,
                              stdout=subprocess.PIPE, timeout=LIMIT)
        if done.returncode == -signal.SIGKILL and self._prefix:
            raise SystemExit(f'{self.name}: a step needs more memory')
        if done.returncode != 0:
            raise SystemExit(f'{self.name}: a step failed')
        return Done(**json.loads(done.stdout))

    def halt(self, image: str, mib: int, seed: int) -> subprocess.Popen:
        """Write an image, and begin another; return when that is written."""
        process = subprocess.Popen(
            self.command(True, image, mib, seed, True), cwd=self._directory,
            stdout=subprocess.PIPE)
        if process.stdout.readline() != b'under way\n':
            raise SystemExit(f'{self.name}: an upload ended')
        return process

    def forget(self) -> None:
        """Have the page cache drop this subject's files."""
        disk.forget(self._directory)

    def next_image_bytes(self, image: str) -> int:
        """Return the bytes under the name of the image that was begun."""
        name = image + '-next'
        path = (name if self.variant is None
                else os.path.join('repository', 'images', name))
        try:
            return os.path.getsize(os.path.join(self._directory, path))
        except FileNotFoundError:
            return 0

    def remove(self) -> None:
        shutil.rmtree(self._directory)
        if self.variant is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.filter)


# -- A1 to A3 -----------------------------------------------------------------

class Rounds:
    """The costs of an experiment's subjects, round by round."""

    def __init__(self) -> None:
        self.found: dict[str, list[Done]] = {}

    def add(self, name: str, done: Done) -> None:
        self.found.setdefault(name, []).append(done)

    def rates(self, name: str, size: int) -> list[float]:
        """MB/s of the rounds."""
        return [size / done.wall / 1e6 for done in self.found[name]]

    def ratio(self, name: str) -> float:
        """The median of the rounds' rates, each by the plain file's."""
        return statistics.median(
            plain.wall / done.wall
            for plain, done in zip(self.found[PLAIN], self.found[name]))


def line(name: str, *cells: str) -> str:
    return f'{name:18}' + ''.join(f'{cell:>9}' for cell in cells)


def show_rounds(experiment: str, rounds: Rounds, args) -> None:
    size = args.mib * MIB
    memory = f', {args.memory} MiB of memory' if args.memory else ''
    print(f'\n{experiment}: {EXPERIMENTS[experiment]}, {args.mib} MiB{memory}')
    print(line('', 'MB/s', 'low', 'high', 'of plain', 'cpu s/GiB', 'near',
               'far', 'MiB', 'model s', 'of plain'))
    plain = rounds.found[PLAIN][-1].modelled(args)
    for name, found in rounds.found.items():
        rates = rounds.rates(name, size)
        last = found[-1]
        cpu = statistics.median(done.cpu for done in found)
        print(line(name, *(f'{rate:.0f}' for rate in (
            statistics.median(rates), min(rates), max(rates))),
            f'{rounds.ratio(name):.2f}', f'{cpu / (size / common.GIB):.2f}',
            f'{last.near}', f'{last.far}', f'{last.bytes / MIB:.1f}',
            f'{last.modelled(args):.2f}',
            f'{plain / last.modelled(args):.2f}'), flush=True)


def plot_rounds(experiment: str, rounds: Rounds, args) -> None:
    names = list(rounds.found)
    size = args.mib * MIB
    measured = [statistics.median(rounds.rates(n, size)) for n in names]
    modelled = [size / rounds.found[n][-1].modelled(args) / 1e6 for n in names]
    plot.bars(names, {'measured': measured, 'disk of the model': modelled},
              'MB/s', f'{experiment}: {EXPERIMENTS[experiment]}',
              os.path.join(args.plot, f'{experiment}.svg'), digits=0)


def one_round(program: str, directory: str, filter_dir: str, args,
              prefix: list[str], results: dict[str, Rounds]) -> None:
    """Run A1 to A3 of all subjects; one subject at a time in each."""
    subjects = [Subject(program, os.path.join(directory, str(i)), filter_dir,
                        variant, prefix)
                for i, variant in enumerate(
                    [None, Variant(STORE), *variants(args)])]
    for experiment, image, write in (('A1', 'one', True), ('A2', 'one', False),
                                     ('A3', 'two', True)):
        for subject in subjects:
            wanted = subject.variant is None or subject.name == STORE or (
                subject.variant.differs(experiment))
            # A1 makes the files that the others need.
            if experiment != 'A1' and not (wanted and experiment in results):
                continue
            print(f'{experiment}, {subject.name}', file=sys.stderr)
            subject.forget()
            common.warm_pages(args.mib * MIB, directory)
            done = subject.run(write, image, args.mib, 1)
            if wanted and experiment in results:
                results[experiment].add(subject.name, done)
    for subject in subjects:
        subject.remove()


# -- A4 -----------------------------------------------------------------------

STEPS = ('mount', 'open', 'write 4 MiB', 'read', 'write again')


def wait_until_free(path: str) -> None:
    """Wait until no loop device has the file.

    Otherwise the next mount would show the file system that was shut down:
    another process's mount namespace may still have it.
    """
    deadline = time.monotonic() + start.LIMIT
    while True:
        held = set()
        for name in pathlib.Path('/sys/block').glob('loop*/loop/backing_file'):
            with contextlib.suppress(OSError):
                held.add(name.read_text().strip())
        if os.path.realpath(path) not in held:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f'{path} is still mounted somewhere')
        time.sleep(0.05)


def lose_power(place: start.Place, subject: Subject, mib: int) -> dict:
    """Lose power; return the steps' seconds. 'kept': the image's bytes."""
    common.empty_page_cache()
    process = subject.halt('image', mib, 1)
    place.fail()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT)
    place.unmount()
    wait_until_free(place.file)
    if subject.variant is not None:
        os.unlink(subject.filter)
    common.empty_page_cache()
    mounted = common.timed(place.mount).wall
    kept = subject.next_image_bytes('image')
    first = subject.run(True, 'new', 4, 3)
    return {'mount': mounted, 'open': first.open, 'write 4 MiB': first.wall,
            'read': subject.run(False, 'image', mib, 1).wall,
            'write again': subject.run(True, 'image-next', mib, 2).wall,
            'kept': kept}


def recovery_round(program: str, directory: str, filter_dir: str, args,
                   results: dict[str, list[dict]]) -> None:
    for variant in [None, Variant(STORE), *filter(
            lambda v: v.differs('A4') and not (v.single or v.alone),
            variants(args))]:
        common.warm_pages(3 * args.mib * MIB, directory)
        with (tempfile.TemporaryDirectory(dir=directory) as place_dir,
              contextlib.ExitStack() as stack):
            place = start.Place(place_dir, (4 * args.mib + 1024) * MIB)
            stack.callback(place.close)
            subject = Subject(program, os.path.join(place.root, 'subject'),
                              filter_dir, variant)
            print(f'A4, {subject.name}', file=sys.stderr)
            results.setdefault(subject.name, []).append(
                lose_power(place, subject, args.mib))
            subject.remove()
            place.unmount()
            stack.pop_all()


def cell(seconds: list[float]) -> str:
    if not any(seconds):
        return '-'      # a plain file has nothing to be opened
    return f'{statistics.median(seconds):.3f} ({max(seconds):.3f})'


def show_recovery(results: dict[str, list[dict]], args) -> None:
    print(f'\nA4: {EXPERIMENTS["A4"]}, {args.mib} MiB committed and as many '
          f'under way: seconds, median (highest)')
    print(f'{"":18}' + ''.join(f'{step:>16}' for step in STEPS)
          + '  of the other one there')
    for name, rounds in results.items():
        cells = ''.join(f'{cell([r[step] for r in rounds]):>16}'
                        for step in STEPS)
        kept = statistics.median(r['kept'] for r in rounds)
        print(f'{name:18}{cells}  {kept / MIB:.0f} MiB', flush=True)


def plot_recovery(results: dict[str, list[dict]], args) -> None:
    plot.bars(STEPS, {
        name: [statistics.median(r[step] for r in rounds) for step in STEPS]
        for name, rounds in results.items()},
        'seconds', f'A4: {EXPERIMENTS["A4"]}',
        os.path.join(args.plot, 'A4.svg'), digits=2)


# -- B1 -----------------------------------------------------------------------

class Space(NamedTuple):
    """Bytes of an image, or of several."""

    size: int
    zeros: int
    new: int        #: of blocks that were not there yet
    stored: int     #: written for them

    def cells(self) -> list[str]:
        used = self.size - self.zeros
        return [*(f'{n / MIB:.1f}' for n in (self.size, used, self.new,
                                             self.stored)),
                f'{1 - self.new / self.size:.1%}',
                f'{1 - self.new / used if used else 0:.1%}',
                f'{1 - self.stored / used if used else 0:.1%}']


def add_up(spaces: list[Space]) -> Space:
    return Space(*map(sum, zip(*spaces)))


def store_all(path: str, directory: str, images: list[tuple[str, str]]
              ) -> list[Space]:
    image_repository.Repository.create(path)
    found = []
    with image_repository.Repository(path, codec='lz4',
                                     filter_dir=directory) as repo:
        for i, (_, image) in enumerate(images):
            print(f'B1, storing {i + 1} of {len(images)}', file=sys.stderr)
            repo.put(f'image-{i}', image)
            stat = repo.stat(f'image-{i}')
            found.append(Space(stat.size, stat.zero_bytes, stat.new_bytes,
                               stat.stored_bytes))
    return found


def show_space(images: list[tuple[str, str]], found: list[Space],
               total: int) -> None:
    print(f'\nB1: {EXPERIMENTS["B1"]}, MiB; saved with zero blocks counted, '
          f'without them, and without them but with lz4')
    heads = ('size', 'no zeros', 'new', 'lz4', 'saved', 'no zeros', 'lz4')
    print(f'{"":44}' + ''.join(f'{head:>10}' for head in heads))

    def row(name, space):
        print(f'{name:44}' + ''.join(f'{c:>10}' for c in space.cells()))

    for name in dict.fromkeys(name for name, _ in images):
        ours = [space for (other, _), space in zip(images, found)
                if other == name]
        row(f'{name}, all {len(ours)}', add_up(ours))
        for (other, path), space in zip(images, found):
            if other == name:
                row('  ' + os.path.basename(path), space)
    row(f'all {len(images)}', add_up(found))
    print(f'all files of the repository: {total / MIB:.1f} MiB', flush=True)


def plot_space(found: list[Space], args) -> None:
    def running(of):
        total, figures = 0, []
        for space in found:
            total += of(space)
            figures.append(total / common.GIB)
        return range(1, len(found) + 1), figures

    plot.lines({'as they are': running(lambda s: s.size),
                'without zero blocks': running(lambda s: s.size - s.zeros),
                'each block once': running(lambda s: s.new),
                'and lz4': running(lambda s: s.stored)},
               'images stored', 'GiB', 'B1: space over a collection',
               os.path.join(args.plot, 'B1.svg'))


def space(directory: str, args) -> None:
    images = common.by_distribution(args.paths)
    path = os.path.join(directory, 'repository')
    found = store_all(path, directory, images)
    total = sum(os.stat(os.path.join(top, name)).st_blocks * 512
                for top, _, names in os.walk(path) for name in names)
    shutil.rmtree(path)
    show_space(images, found, total)
    if args.plot:
        plot_space(found, args)


# -- B2 -----------------------------------------------------------------------

def upload(client: glance_server.Client, store: str, path: str,
           directory: str) -> tuple[float, float]:
    """Return seconds of an upload, and of that with an fsync of its file."""
    image_id = client.create()['id']
    with open(path, 'rb') as f:
        began = time.perf_counter()
        client.upload(image_id, f, size=os.path.getsize(path), store=store)
    wall = synced = time.perf_counter() - began
    if store == 'file':
        with open(os.path.join(directory, 'file', image_id), 'rb') as f:
            os.fsync(f.fileno())
        synced = time.perf_counter() - began
        client.delete(image_id)     # the disk may be too small
    return wall, synced


def upload_round(directory: str, images: list[tuple[str, str]],
                 rows: list[dict[str, list[float]]]) -> None:
    stores = {
        'file': {'type': 'file', 'filesystem_store_datadir':
                 os.path.join(directory, 'file')},
        'dedup': {'type': 'dedup', 'dedup_store_datadir':
                  os.path.join(directory, 'dedup'),
                  'dedup_store_filter_dir': directory,
                  'dedup_store_filter_mib': 64}}
    for store in stores:
        os.mkdir(os.path.join(directory, store), 0o700)
    with glance_server.GlanceServer(os.path.join(directory, 'server'), stores,
                                    processes=1) as server:
        client = glance_server.Client(server.url, timeout=LIMIT)
        for i, (_, path) in enumerate(images):
            print(f'B2, image {i + 1} of {len(images)}', file=sys.stderr)
            common.warm_pages(os.path.getsize(path), directory)
            # The stores take turns at finding the image in the page cache.
            for store in sorted(stores, reverse=bool(i % 2)):
                wall, synced = upload(client, store, path, directory)
                rows[i].setdefault(store, []).append(wall)
                if store == 'file':
                    rows[i].setdefault('synced', []).append(synced)


def show_uploads(images: list[tuple[str, str]],
                 rows: list[dict[str, list[float]]]) -> None:
    print(f'\nB2: {EXPERIMENTS["B2"]}: seconds, median (highest); the ratio '
          f'is to the file store, synced')
    print(f'{"":36}{"MiB":>8}{"file":>16}{"file, synced":>16}'
          f'{"this store":>16}{"ratio":>8}')
    for (name, path), row in zip(images, rows):
        cells = ''.join(f'{statistics.median(row[of]):>8.2f} '
                        f'({max(row[of]):.2f})'.rjust(16)
                        for of in ('file', 'synced', 'dedup'))
        ratio = statistics.median(
            dedup / synced for dedup, synced in zip(row['dedup'],
                                                    row['synced']))
        print(f'{name + "/" + os.path.basename(path):36}'
              f'{os.path.getsize(path) / MIB:>8.0f}{cells}{ratio:>8.2f}',
              flush=True)
    print(f'{"all":44}' + ''.join(
        f'{sum(statistics.median(row[of]) for row in rows):>16.2f}'
        for of in ('file', 'synced', 'dedup')))


def plot_uploads(images: list[tuple[str, str]],
                 rows: list[dict[str, list[float]]], args) -> None:
    names = [os.path.basename(path) for _, path in images]
    if len(set(names)) < len(names):
        names = [f'{name}/{short}'
                 for (name, _), short in zip(images, names)]
    plot.bars(names, {title: [statistics.median(row[of]) for row in rows]
                      for title, of in (('file store', 'file'),
                                        ('file store, fsync', 'synced'),
                                        (STORE, 'dedup'))},
              'seconds', f'B2: {EXPERIMENTS["B2"]}',
              os.path.join(args.plot, 'B2.svg'))


def uploads(directory: str, args) -> None:
    images = common.by_distribution(args.paths)
    rows: list[dict[str, list[float]]] = [{} for _ in images]
    for _ in common.count_rounds(args.rounds, 'B2, round'):
        with tempfile.TemporaryDirectory(dir=directory) as d:
            upload_round(d, images, rows)
    show_uploads(images, rows)
    if args.plot:
        plot_uploads(images, rows, args)


# -- all of them --------------------------------------------------------------

def writing_and_reading(program: str, directory: str, filter_dir: str,
                        wanted: list[str], args) -> None:
    results = {name: Rounds() for name in wanted}
    with memorylimit.limited(args.memory * MIB) as prefix:
        for _ in common.count_rounds(args.rounds, 'A, round'):
            one_round(program, directory, filter_dir, args, prefix, results)
    for experiment, rounds in results.items():
        show_rounds(experiment, rounds, args)
        if args.plot:
            plot_rounds(experiment, rounds, args)


def recovery(program: str, directory: str, filter_dir: str, args) -> None:
    results: dict[str, list[dict]] = {}
    for _ in common.count_rounds(args.rounds, 'A4, round'):
        recovery_round(program, directory, filter_dir, args, results)
    show_recovery(results, args)
    if args.plot:
        plot_recovery(results, args)


def parse() -> argparse.Namespace:
    parser = common.arguments(
        __doc__, mib=(0, 'how much data; 0: 512, or four times the memory'),
        memory=(0, 'MiB of memory for A1 to A3; 0: no limit'),
        rounds=3, paths='*',
        stores_elsewhere=(False, 'also fingerprint stores in other files'),
        single_loads=(False, 'also each entry read by itself'),
        no_combining=(False, 'also each block written by itself'),
        seek_ms=(8.5, "of the model's disk, to another place"),
        near_ms=(4.2, 'within a file'), mb_s=(120.0, 'read or written'))

    def names(text: str) -> list[str]:
        found = text.split(',')
        if not set(found) <= set(EXPERIMENTS):
            raise argparse.ArgumentTypeError(
                f'{text} is not of {", ".join(EXPERIMENTS)}')
        return found

    parser.add_argument('--only', type=names, metavar='A1,B1',
                        help='these experiments (default: all that can be)')
    plot.argument(parser, 'DIR')
    args = parser.parse_args()
    args.mib = args.mib or 4 * args.memory or 512
    if args.only is None:
        args.only = [name for name in EXPERIMENTS
                     if not (name.startswith('B') and not args.paths
                             or name == 'A4' and os.geteuid() != 0)]
        for name in sorted(set(EXPERIMENTS) - set(args.only)):
            print(f'{name} is left out: it needs '
                  + ('images' if name.startswith('B') else 'root'),
                  file=sys.stderr)
    return args


def main() -> None:
    args = parse()
    with (common.place(args.dir) as d,
          common.place('/dev/shm') as filter_dir):
        rates = [name for name in args.only if name in ('A1', 'A2', 'A3')]
        if rates or 'A4' in args.only:
            program = synthetic.build(d, 'livedfs', 'diskmodel')
        if rates:
            writing_and_reading(program, d, filter_dir, rates, args)
        if 'A4' in args.only:
            recovery(program, d, filter_dir, args)
        if 'B1' in args.only:
            space(d, args)
        if 'B2' in args.only:
            uploads(d, args)


if __name__ == '__main__':
    main()
