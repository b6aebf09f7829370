# SPDX-License-Identifier: Apache-2.0

"""Compare the store with its peers, on images that the caller names.

Run it from a checkout in which the extension is built, as root for loop
devices and an empty page cache; the packages of the profile *benchmark* in
``bindep.txt`` have the peers, and ``benchmarks/images.py`` makes images::

    python benchmarks/peers.py [--only NAME] [--plot FILE] IMAGE...

Each peer, at its defaults unless its name says otherwise, in a directory of
its own:

* takes the images in, one after the other, and then does its later work, if it
  has any (*maintenance*). *Stored* is the space of its files on the disk by
  then, all metadata counted, and its ratio to restic's. Not counted are caches
  that can be made again: the store's filter in memory, and the files of borg
  and restic in the user's home;
* gives the first ``--restored`` images back, as streams of all their bytes,
  cold and warm, next to ``cat`` of the image as a plain file in the same state
  of the page cache: medians of the rounds, and of the ratios to ``cat``. Then
  every image is compared with its source;
* deletes the last image and gets its space back;
* takes the others in again, under other names.

Processor seconds, in brackets, and the memory, that of the largest, are of the
peer's processes. The work of a file system is the kernel's, and not in them.
"""

from collections.abc import Callable, Iterator
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

import common
import images
import plot

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT = 1800  #: seconds for any command
#: Set in the process that has mounts of its own.
INSIDE = 'GLANCE_DEDUP_PEERS_INSIDE'
RESTIC = 'restic'


class Failed(Exception):
    """A failed command, or wrong bytes; the message names it."""


class Spent(NamedTuple):
    wall: float
    cpu: float
    peak: int  #: bytes resident, of the largest process

    def plus(self, other: 'Spent') -> 'Spent':
        return Spent(self.wall + other.wall, self.cpu + other.cpu,
                     max(self.peak, other.peak))


NOTHING = Spent(0, 0, 0)

#: A function that reads a stream, by its descriptor.
Reader = Callable[[int], None]


# -- commands -----------------------------------------------------------------

def run(*command: str, cwd: str | None = None, reader: Reader | None = None,
        **environ: str) -> Spent:
    """Run a command, with its children, to its end or the limit.

    :param reader: of its standard output
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, cwd=cwd, stdin=subprocess.DEVNULL, stderr=said,
            stdout=said if reader is None else subprocess.PIPE,
            env={**os.environ, **environ}, start_new_session=True)
        timer = threading.Timer(LIMIT, os.killpg, (process.pid, 9))
        timer.start()
        try:
            if reader is not None:
                reader(process.stdout.fileno())
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            timer.cancel()
            if process.returncode is None:  # the bytes read are wrong
                os.killpg(process.pid, 9)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if process.returncode != 0:
            said.seek(0)
            lines = said.read().decode(errors='replace').split('\n')
            if time.perf_counter() - start >= LIMIT:
                lines = [f'not done after {LIMIT} s']
            raise Failed(f'{os.path.basename(command[0])} '
                         f'({process.returncode}): ' +
                         ' '.join(filter(None, lines[-3:])))
    return Spent(time.perf_counter() - start,
                 usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def output(*command: str, **environ: str) -> str:
    """Return the output of a command."""
    found = bytearray()

    def read(fd: int) -> None:
        while piece := os.read(fd, common.MIB):
            found.extend(piece)
    run(*command, reader=read, **environ)
    return found.decode()


def discard(fd: int) -> None:
    buffer = bytearray(common.MIB)
    while os.readv(fd, [buffer]):
        pass


def compare_with(path: str) -> Reader:
    """Return a reader that requires the bytes of a file."""
    def compare(fd: int) -> None:
        with open(path, 'rb') as f:
            while piece := os.read(fd, common.MIB):
                if piece != f.read(len(piece)):
                    raise Failed('gave back other bytes')
            if f.read(1):
                raise Failed('gave back too little')
    return compare


def allocated(directory: str) -> int:
    """Return the bytes that a directory and its files take on the disk."""
    run('sync', '-f', directory)
    found = {}
    for where, _, names in os.walk(directory):
        for path in (where, *(os.path.join(where, name) for name in names)):
            status = os.lstat(path)
            found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


# -- peers --------------------------------------------------------------------

class Peer:
    """A program that stores images; one is used from :meth:`prepare` on.

    An image is given by a path, and has a name from then on.
    """

    title: str
    needs: tuple[str, ...] = ()
    needs_root = False
    #: whether it can take in and delete images when there are some already
    grows = True

    def __init__(self, directory: str):
        self.directory = directory

    def prepare(self, size: int) -> None:
        """:param size: bytes that the images take on the disk"""

    def ingest(self, paths: dict[str, str]) -> Spent:
        total = NOTHING
        for name, path in paths.items():
            total = total.plus(self.take(name, path))
        return total

    def take(self, name: str, path: str) -> Spent:
        raise NotImplementedError

    def maintain(self) -> Spent | None:
        return None

    def stored(self) -> int:
        return allocated(self.directory)

    def restore(self, name: str, reader: Reader) -> Spent:
        raise NotImplementedError

    def delete(self, name: str) -> Spent:
        """Delete an image, and get its space back."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove everything but the directory."""


class Ours(Peer):
    title = 'glance-dedup, at once'
    parameters: tuple[str, ...] = ()

    def prepare(self, size):
        self.filter_dir = tempfile.mkdtemp(prefix='peers-', dir='/dev/shm')
        self.path = os.path.join(self.directory, 'repository')
        self.command('repository', 'create', *self.parameters)

    def command(self, *words: str, reader: Reader | None = None) -> Spent:
        return run(sys.executable, '-m', 'glance_dedup.cli.entry', '-q',
                   '--repository', self.path, '--filter-dir',
                   self.filter_dir, '--socket', '', *words, cwd=common.TOP,
                   reader=reader)

    def take(self, name, path):
        return self.command('image', 'put', name, path)

    def restore(self, name, reader):
        return self.command('image', 'get', name, '-', reader=reader)

    def delete(self, name):
        return self.command('image', 'delete', name).plus(
            self.command('task', 'collect'))

    def close(self):
        shutil.rmtree(self.filter_dir)


class Recompressed(Ours):
    title = 'glance-dedup, zstd-3 later'
    level = 3

    def maintain(self):
        return self.command('task', 'merge').plus(
            self.command('task', 'collect')).plus(
            self.command('task', 'recompress', '--codec', 'zstd', '--level',
                         str(self.level)))


class RecompressedMore(Recompressed):
    title = 'glance-dedup, zstd-19 later'
    level = 19


class RecompressedWell(Recompressed):
    title = 'glance-dedup, zstd-9 later'
    level = 9


class ByContent(Recompressed):
    title = 'glance-dedup, content-defined, zstd-3 later'
    parameters = ('--chunking', 'content-defined')


class Plain(Peer):
    title = 'plain files'

    def take(self, name, path):
        target = os.path.join(self.directory, name)
        return run('cp', path, target).plus(run('sync', target))

    def restore(self, name, reader):
        return run('cat', os.path.join(self.directory, name), reader=reader)

    def delete(self, name):
        return run('rm', os.path.join(self.directory, name)).plus(
            run('sync', '-f', self.directory))


class Borg(Peer):
    title = 'borg, 4 KiB blocks'
    needs = ('borg',)
    options = ('--chunker-params', 'fixed,4096', '--sparse')

    def prepare(self, size):
        self.repository = os.path.join(self.directory, 'repository')
        self.command('init', '--encryption', 'none', self.repository)

    def command(self, *words: str, **more) -> Spent:
        return run('borg', *words, **more, BORG_BASE_DIR=self.directory,
                   BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK='yes')

    def archive(self, name: str) -> str:
        return f'{self.repository}::{name}'

    def take(self, name, path):
        where, base = os.path.split(path)
        return self.command('create', '--files-cache', 'disabled',
                            *self.options, self.archive(name), base,
                            cwd=where)

    def restore(self, name, reader):
        return self.command('extract', '--stdout', self.archive(name),
                            reader=reader)

    def delete(self, name):
        return self.command('delete', self.archive(name)).plus(
            self.command('compact', self.repository))

    def stored(self):
        return allocated(self.repository)


class BorgByContent(Borg):
    title = 'borg'
    options = ()


class Restic(Peer):
    title = RESTIC
    needs = ('restic',)

    def prepare(self, size):
        self.repository = os.path.join(self.directory, 'repository')
        self.environ = {
            'RESTIC_PASSWORD': 'x',
            'RESTIC_REPOSITORY': self.repository,
            'RESTIC_CACHE_DIR': os.path.join(self.directory, 'cache')}
        self.paths: dict[str, str] = {}
        self.command('init')

    def command(self, *words: str, **more) -> Spent:
        return run('restic', '--quiet', *words, **more, **self.environ)

    def take(self, name, path):
        where, self.paths[name] = os.path.split(path)
        return self.command('backup', '--force', '--tag', name,
                            self.paths[name], cwd=where)

    def restore(self, name, reader):
        return self.command('dump', '--tag', name, 'latest',
                            '/' + self.paths[name], reader=reader)

    def delete(self, name):
        found = json.loads(output('restic', 'snapshots', '--json', '--tag',
                                  name, **self.environ))
        return self.command('forget', '--prune', found[0]['id'])

    def stored(self):
        return allocated(self.repository)


class Casync(Peer):
    """casync only writes to files, so its streams are files."""

    title = 'casync, to a file'
    needs = ('casync',)

    def prepare(self, size):
        self.store = os.path.join(self.directory, 'store.castr')
        self.target = os.path.join(self.directory, 'restored')

    def index(self, name: str) -> str:
        return os.path.join(self.directory, name + '.caibx')

    def take(self, name, path):
        return run('casync', 'make', '--store', self.store, self.index(name),
                   path)

    def restore(self, name, reader):
        spent = run('casync', 'extract', '--store', self.store,
                    self.index(name), self.target)
        if reader is not discard:
            with open(self.target, 'rb') as f:
                reader(f.fileno())
        os.unlink(self.target)
        return spent

    def delete(self, name):
        os.unlink(self.index(name))
        left = [os.path.join(self.directory, entry) for entry in
                os.listdir(self.directory) if entry.endswith('.caibx')]
        return run('casync', 'gc', '--store', self.store, *left)


class Squashfs(Peer):
    """squashfs writes its file once, as a whole: deleted files stay in it."""

    title = 'squashfs, zstd'
    needs = ('mksquashfs', 'unsquashfs')
    grows = False

    def prepare(self, size):
        self.file = os.path.join(self.directory, 'squashfs')

    def ingest(self, paths):
        self.paths = {name: os.path.basename(path)
                      for name, path in paths.items()}
        return run('mksquashfs', *paths.values(), self.file, '-comp', 'zstd',
                   '-quiet', '-no-progress')

    def restore(self, name, reader):
        return run('unsquashfs', '-cat', self.file, self.paths[name],
                   reader=reader)


class Mounted(Plain):
    """A file system of its own, in a file."""

    needs_root = True
    make: tuple[str, ...]
    mount = 'loop'

    def prepare(self, size):
        self.outer = self.directory
        self.file = os.path.join(self.outer, 'file')
        inner = os.path.join(self.outer, 'root')
        with open(self.file, 'wb') as f:
            # The images, those taken in again, and the file system's own.
            f.truncate(2 * size + 2 * common.GIB)
        run(*self.make, self.file)
        os.mkdir(inner)
        run('mount', '-o', self.mount, self.file, inner)
        self.directory = inner
        self.empty = self.used()

    def used(self) -> int:
        run('sync', '-f', self.directory)
        status = os.statvfs(self.directory)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def stored(self):
        return self.used() - self.empty

    def close(self):
        if self.directory != self.outer:
            run('umount', self.directory)


class Btrfs(Mounted):
    title = 'btrfs, zstd'
    needs = ('mkfs.btrfs', 'btrfs')
    make = ('mkfs.btrfs', '--quiet')
    mount = 'loop,compress=zstd'

    def used(self):
        run('sync', '-f', self.directory)
        for line in output('btrfs', 'filesystem', 'usage', '--raw',
                           self.directory).splitlines():
            name, _, figure = line.strip().partition(':')
            if name == 'Used':  # of the device: metadata is there twice
                return int(figure)
        raise Failed('btrfs tells no use')


class Xfs(Mounted):
    title = 'XFS, FIDEDUPERANGE by 4 KiB'
    needs = ('mkfs.xfs',)
    make = ('mkfs.xfs', '-q')
    # Otherwise space allocated ahead of a copy stays in its holes.
    mount = 'loop,allocsize=4096'

    def maintain(self):
        return run(sys.executable, os.path.join(HERE, 'dedupe_ranges.py'),
                   self.directory)


class XfsDuperemove(Xfs):
    title = 'XFS, duperemove'
    needs = ('mkfs.xfs', 'duperemove')

    def maintain(self):
        return run('duperemove', '-rdq', self.directory)


PEERS: dict[str, type[Peer]] = {
    'plain': Plain, 'ours': Ours, 'ours-zstd-3': Recompressed,
    'ours-zstd-9': RecompressedWell, 'ours-zstd-19': RecompressedMore,
    'ours-gear': ByContent,
    'restic': Restic, 'borg-4k': Borg, 'borg': BorgByContent,
    'casync': Casync, 'squashfs': Squashfs, 'btrfs': Btrfs, 'xfs': Xfs,
    'xfs-duperemove': XfsDuperemove,
}


# -- measuring ----------------------------------------------------------------

class Row(NamedTuple):
    """The results of a peer; None: it has no such operation."""

    title: str
    failed: str = ''
    stored: int = 0
    ingest: Spent = NOTHING
    maintenance: Spent | None = None
    #: medians, and medians of the ratios to cat; None without root
    cold: tuple[float, float] | None = None
    warm: tuple[float, float] = (0, 0)
    delete: Spent | None = None
    back: int = 0
    again: Spent | None = None
    peak: int = 0


def timed_restores(peer: Peer, paths: dict[str, str],
                   args) -> tuple[tuple[float, float] | None,
                                  tuple[float, float], int]:
    """Return seconds and ratios, cold and warm, and the peak."""
    chosen = list(paths.items())[:args.restored]
    seconds = {'cold': [], 'warm': []}
    ratios = {'cold': [], 'warm': []}
    peak = 0
    for _ in range(args.rounds):
        for state in ('cold', 'warm'):
            plain = ours = 0.0
            for name, path in chosen:
                if state == 'cold' and not common.can_empty_page_cache():
                    continue
                plain += run('cat', path, reader=discard).wall
                if state == 'cold':
                    common.empty_page_cache()
                spent = peer.restore(name, discard)
                ours += spent.wall
                peak = max(peak, spent.peak)
            if ours:
                seconds[state].append(ours)
                ratios[state].append(ours / plain)
    cold, warm = (
        (statistics.median(seconds[state]), statistics.median(ratios[state]))
        if seconds[state] else None for state in ('cold', 'warm'))
    return cold, warm, peak


def measure(peer: Peer, paths: dict[str, str], args) -> Row:
    """Measure all operations of a prepared peer."""
    ingest = peer.ingest(paths)
    tell('  taken in')
    maintenance = peer.maintain()
    stored = peer.stored()
    tell(f'  {stored / common.MIB:.0f} MiB stored')
    cold, warm, peak = timed_restores(peer, paths, args)
    for name, path in paths.items():
        peer.restore(name, compare_with(path))
    tell('  given back, and compared')
    row = Row(peer.title, '', stored, ingest, maintenance, cold, warm)
    if peer.grows:
        *others, last = paths
        delete = peer.delete(last)
        row = row._replace(
            delete=delete, back=stored - peer.stored(), again=peer.ingest(
                {name + '-again': paths[name] for name in others}))
    return row._replace(peak=max(
        peak, *(spent.peak for spent in (
            row.ingest, row.maintenance, row.delete, row.again) if spent)))


def find_row(peer: Peer, paths: dict[str, str], args) -> Row:
    """Return a peer's results, or the reason why there are none."""
    missing = [name for name in peer.needs if shutil.which(name) is None]
    if missing:
        return Row(peer.title, 'not installed: ' + ', '.join(missing))
    if peer.needs_root and os.geteuid() != 0:
        return Row(peer.title, 'needs root')
    try:
        peer.prepare(sum(os.stat(path).st_blocks * 512
                         for path in paths.values()))
        return measure(peer, paths, args)
    except (Failed, OSError) as e:
        return Row(peer.title, str(e))


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


@contextlib.contextmanager
def one_peer(kind: type[Peer], directory: str) -> Iterator[Peer]:
    tell(kind.title)
    with tempfile.TemporaryDirectory(dir=directory, prefix='peers-') as d:
        peer = kind(d)
        try:
            yield peer
        finally:
            with contextlib.suppress(Failed, OSError, AttributeError):
                peer.close()


# -- output -------------------------------------------------------------------

HEAD = ('', 'stored, MiB', 'of not zeros', 'of restic', 'ingest, s',
        'maintenance, s', 'cold, s', 'of cat', 'warm, s', 'of cat',
        'delete, s', 'back, MiB', 'again, s', 'memory, MiB')


def in_seconds(spent: Spent | None) -> str:
    return f'{spent.wall:.1f} ({spent.cpu:.1f})' if spent else '-'


def cells(row: Row, size: int, reference: int) -> list[str]:
    if row.failed:
        return [row.title, row.failed.replace('|', '/')]
    found = [row.title, f'{row.stored / common.MIB:.0f}',
             f'{row.stored / size:.1%}',
             f'{row.stored / reference:.2f}' if reference else '-',
             in_seconds(row.ingest), in_seconds(row.maintenance)]
    for figures in (row.cold, row.warm):
        found += ([f'{figures[0]:.1f}', f'{figures[1]:.2f}'] if figures
                  else ['-', '-'])
    back = f'{row.back / common.MIB:.0f}' if row.delete else '-'
    return [*found, in_seconds(row.delete), back, in_seconds(row.again),
            f'{row.peak / common.MIB:.0f}']


def show(rows: list[Row], size: int) -> None:
    reference = sum(row.stored for row in rows if row.title == RESTIC)
    print('| ' + ' | '.join(HEAD) + ' |')
    print('|---|' + '---:|' * (len(HEAD) - 1))
    for row in rows:
        print('| ' + ' | '.join(cells(row, size, reference)) + ' |')


def draw(rows: list[Row], size: int, path: str) -> None:
    found = sorted((row for row in rows if not row.failed),
                   key=lambda row: row.stored)
    plot.bars([row.title for row in found],
              {'stored': [100 * row.stored / size for row in found]},
              'stored, % of the bytes that are not zeros',
              'The same images, by what they take', path)


def own_mounts() -> None:
    """Start again in a namespace whose mounts end with the process."""
    if os.geteuid() == 0 and INSIDE not in os.environ and shutil.which(
            'unshare'):
        os.environ[INSIDE] = 'yes'
        os.execvp('unshare', ['unshare', '--mount', sys.executable,
                              *sys.argv])


def main():
    parser = common.arguments(
        __doc__, rounds=3,
        restored=(2, 'how many images are restored against the clock'))
    parser.add_argument('--only', action='append', choices=PEERS,
                        help='only this peer; may be given again')
    plot.argument(parser)
    parser.add_argument('images', nargs='+', metavar='IMAGE',
                        type=os.path.abspath)
    args = parser.parse_args()
    paths = {os.path.basename(path).replace('.', '-'): path
             for path in args.images}
    if len(paths) < len(args.images):
        parser.error('two images have the same name')
    own_mounts()
    # Running work is ended, unmounted and removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('ended'))
    size = sum(images.not_zeros(path) for path in args.images)
    rows = []
    for name in args.only or PEERS:
        with one_peer(PEERS[name], args.dir) as peer:
            rows.append(find_row(peer, paths, args))
        if rows[-1].failed:
            tell('  ' + rows[-1].failed)
    print(f'{len(paths)} images, {size / 1e9:.2f} GB not zeros\n')
    show(rows, size)
    if args.plot:
        draw(rows, size, args.plot)


if __name__ == '__main__':
    main()
