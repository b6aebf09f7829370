# SPDX-License-Identifier: Apache-2.0

"""Functions that the benchmarks share.

Importing it lets a benchmark that is run from a checkout find the packages
beside it.
"""

import argparse
from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NamedTuple

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, TOP)

MIB = 1 << 20
GIB = 1 << 30
#: Bytes in which benchmarks read and write.
PIECE = 4 * MIB


#: Options that mean the same in several benchmarks.
OPTIONS = {'mib': 'how much data', 'rounds': 'how often'}


def arguments(doc: str, *, paths: str = '', filter_dir: bool = False,
              directory: bool = True, **options: Any
              ) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark.

    :param doc: its first paragraph is the description of the program
    :param paths: the number of images: ``*`` or ``+``; '': none
    :param options: a default and its meaning, by name; the meaning of
        :data:`OPTIONS` may be left out. False is a flag, and a list takes one
        value or several
    """
    parser = argparse.ArgumentParser(description=' '.join(
        doc.partition('\n\n')[0].split()))
    for name, given in options.items():
        default, what = (given if isinstance(given, tuple)
                         else (given, OPTIONS[name]))
        option = '--' + name.replace('_', '-')
        if default is False:
            parser.add_argument(option, action='store_true', help=what)
            continue
        several = isinstance(default, list)
        parser.add_argument(
            option, default=default, nargs='+' if several else None,
            type=type(default[0] if several else default),
            help=f'{what} (default: %(default)s)')
    if filter_dir:
        parser.add_argument('--filter-dir', default='/dev/shm',
                            help='a tmpfs (default: %(default)s)')
    if directory:
        add_directory(parser)
    if paths:
        parser.add_argument('paths', nargs=paths, metavar='IMAGE')
    return parser


def add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--dir', default='.', type=os.path.abspath,
                        help='on which disk (default: the current directory)')


def place(directory: str) -> tempfile.TemporaryDirectory:
    """A directory for all that a benchmark makes."""
    return tempfile.TemporaryDirectory(dir=directory, prefix='bench-')


def count_rounds(rounds: int, what: str = 'round') -> Iterator[int]:
    """Count rounds from 0, and report each."""
    for number in range(rounds):
        print(f'{what} {number + 1} of {rounds}', file=sys.stderr)
        yield number


def in_a_process(file: str, *arguments: Any, timeout: int = 3600) -> Any:
    """Run a benchmark's :func:`probe` in a process of its own.

    :returns: its standard output, parsed as JSON
    """
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', os.path.abspath(file), '--probe',
         *map(str, arguments)], check=True, stdout=subprocess.PIPE,
        timeout=timeout)
    return json.loads(done.stdout)


# -- repositories -------------------------------------------------------------

#: Options for making a repository; all others are for opening one.
CREATION = {'block_size', 'group_slots', 'segment_size', 'fingerprint',
            'chunking', 'verify'}


@contextlib.contextmanager
def new_repository(directory: str, name: str = 'repository', warm: int = 0,
                   **options: Any) -> Iterator[Any]:
    """Make a repository, with its filter beside it, and open it.

    Both are removed at the end.

    :param warm: bytes, as for :func:`warm_pages`
    """
    from glance_dedup.repository import image_repository

    path = os.path.join(directory, name)
    warm_pages(warm, directory)
    image_repository.Repository.create(path, **{
        key: options.pop(key) for key in CREATION & options.keys()})
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, path)
        repo = stack.enter_context(image_repository.Repository(path, **{
            'codec': 'none', 'filter_dir': directory, **options}))
        stack.callback(pathlib.Path(
            directory, f'{repo.repository_id}.filter').unlink, missing_ok=True)
        repo.statistics()
        yield repo


def remove_filters(directory: str) -> None:
    """Remove the filters of repositories that are gone."""
    for name in os.listdir(directory):
        if name.endswith('.filter'):
            os.unlink(os.path.join(directory, name))


def store(repo: Any, image_id: str, data: Any, **how: Any) -> None:
    """Store an image.

    :param data: bytes, or pieces of them
    """
    pieces = data
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data)
        pieces = (view[at:at + PIECE] for at in range(0, len(view), PIECE))
    with repo.begin(image_id, **how) as transaction:
        for piece in pieces:
            transaction.write(piece)
        transaction.commit()


def read_back(repo: Any, image_id: str) -> None:
    buffer = bytearray(PIECE)
    with repo.open_image(image_id) as image:
        offset = 0
        while n := image.readinto(buffer, offset):
            offset += n


def read_from_daemon(address: str, image_id: str) -> None:
    from glance_dedup.client import daemon_client

    with (daemon_client.Client(address) as far,
          far.open_image(image_id) as stream):
        while stream.read(stream.piece):
            pass


def cat(path: str) -> None:
    subprocess.run(['cat', path], stdout=subprocess.DEVNULL, check=True)


def all_at_once(function: Callable, arguments: list[tuple]) -> None:
    """Call a function with each arguments, on threads of their own."""
    with concurrent.futures.ThreadPoolExecutor(len(arguments)) as pool:
        for done in [pool.submit(function, *some) for some in arguments]:
            done.result()


# -- images -------------------------------------------------------------------

def used_blocks(*paths: str, size: int = 4096) -> Iterator[bytes]:
    """Yield the blocks of images that are not zeros."""
    for path in paths:
        with open(path, 'rb') as f:
            while block := f.read(size):
                if block.count(0) != len(block):
                    yield block


def distinct_blocks(paths: list[str], size: int) -> bytes:
    """The distinct blocks of images that are not zeros, up to a size."""
    found: dict[bytes, None] = {}
    for block in used_blocks(*paths):
        if len(found) * 4096 >= size:
            break
        found[block] = None
    return b''.join(found)


def exact_unique(paths: list[str], seen: set[bytes] | None = None
                 ) -> tuple[int, int]:
    """Distinct non-zero bytes of images, and all non-zero bytes.

    :param seen: digests of the blocks that are there already
    """
    seen = set() if seen is None else seen
    unique = nonzero = 0
    for block in used_blocks(*paths):
        nonzero += len(block)
        digest = hashlib.sha256(block).digest()[:16]
        if digest not in seen:
            seen.add(digest)
            unique += len(block)
    return unique, nonzero


def by_distribution(paths: list[str]) -> list[tuple[str, str]]:
    """Return distributions and images, those of a distribution together.

    A distribution is the name of an image's directory, or, if all are in one
    directory, the part of the image's name before its first dash.
    """
    directories = [os.path.basename(os.path.dirname(os.path.abspath(path)))
                   for path in paths]
    if len(set(directories)) == 1:
        names = [os.path.basename(path).partition('.')[0].partition('-')[0]
                 for path in paths]
    else:
        names = directories
    return sorted(zip(names, paths), key=lambda pair: names.index(pair[0]))


# -- time ---------------------------------------------------------------------

class Spent(NamedTuple):
    """The cost of a call: seconds, and its result."""

    wall: float
    #: of processor time, of this process and of the children it waited for
    cpu: float
    #: of processor time, of the kernel's threads, which write back
    kernel: float
    result: Any = None


def _own_seconds() -> float:
    times = os.times()
    return (time.process_time() + times.children_user +
            times.children_system)


def _kernel_ticks() -> dict[str, int]:
    """Return the ticks of each thread that writes back, for any process."""
    ticks = {}
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError):
            with open(f'/proc/{pid}/stat') as f:
                name, _, rest = f.read().partition('(')[2].rpartition(')')
            if name.startswith(('kworker/', 'jbd2/', 'xfsaild/')):
                ticks[pid] = int(rest.split()[12])
    return ticks


def _kernel_seconds(before: dict[str, int]) -> float:
    """Return the seconds used since; threads that have ended are missing."""
    ticks = sum(now - before.get(pid, 0)
                for pid, now in _kernel_ticks().items())
    return ticks / os.sysconf('SC_CLK_TCK')


def timed(function: Callable, *args) -> Spent:
    """Call a function; see :class:`Spent`."""
    kernel, cpu = _kernel_ticks(), _own_seconds()
    start = time.perf_counter()
    result = function(*args)
    wall = time.perf_counter() - start
    return Spent(wall, _own_seconds() - cpu, _kernel_seconds(kernel), result)


def warm_pages(size: int, directory: str) -> None:
    """Have the machine use so many bytes of its free memory.

    The first touch of a page is slow on a virtual machine, up to 3 s/GiB: its
    host has to give it, and takes it back some seconds after it was freed. The
    next measurement would include that, and later ones would not. So a file is
    written, and deleted, until that gets no faster.
    """
    path = os.path.join(directory, 'warm-pages')
    piece = os.urandom(MIB)
    last = float('inf')
    for _ in range(5):
        start = time.process_time()
        try:
            with open(path, 'wb') as f:
                for _ in range(0, size, MIB):
                    f.write(piece)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        taken = time.process_time() - start
        if taken > 0.7 * last:
            break
        last = taken


def empty_page_cache() -> None:
    """:raises OSError: only root may"""
    os.sync()
    with open('/proc/sys/vm/drop_caches', 'w') as f:
        f.write('3\n')


def can_empty_page_cache() -> bool:
    try:
        empty_page_cache()
    except OSError:
        return False
    return True


# -- disks --------------------------------------------------------------------

class DiskWork(NamedTuple):
    """The work that a disk was given."""

    writes: int
    flushes: int
    bytes: int


def disk_work(directory: str) -> DiskWork | None:
    """Return what the disk below a directory has done so far.

    The kernel counts the work of all processes (``/proc/diskstats``).

    :returns: None: the kernel has no counts of this disk
    """
    device = os.stat(directory).st_dev
    wanted = [str(os.major(device)), str(os.minor(device))]
    with open('/proc/diskstats') as f:
        for fields in map(str.split, f):
            if fields[:2] == wanted:
                return DiskWork(int(fields[7]), int(fields[18]),
                                int(fields[9]) * 512)
    return None


# -- memory -------------------------------------------------------------------

class Memory(NamedTuple):
    """Bytes of a process's memory."""

    peak: int  #: the most that was resident
    resident: int
    #: resident, with pages that several processes have counted in part
    proportional: int
    #: of these, pages of no file: the system cannot drop them
    anonymous: int


def _kib(path: str, name: str) -> int:
    with open(path) as f:
        for line in f:
            if line.startswith(name + ':'):
                return int(line.split()[1]) * 1024
    return 0


def memory(pid: int | str = 'self') -> Memory:
    status = f'/proc/{pid}/status'
    rollup = f'/proc/{pid}/smaps_rollup'
    return Memory(_kib(status, 'VmHWM'), _kib(status, 'VmRSS'),
                  _kib(rollup, 'Pss'), _kib(rollup, 'Pss_Anon'))


def forget_peak(pid: int | str = 'self') -> None:
    """Make the present resident memory the peak."""
    with open(f'/proc/{pid}/clear_refs', 'w') as f:
        f.write('5\n')


class Peak:
    """The maximum of a process's own memory, while this is open.

    It is sampled all the time. Pages of files that are mapped, as LevelDB does
    with its tables, are not among them: the system takes them back at will.
    """

    INTERVAL = 0.002

    def __init__(self) -> None:
        self.bytes = self._now()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(self.INTERVAL):
            self.bytes = max(self.bytes, self._now())

    @staticmethod
    def _now() -> int:
        with open('/proc/self/status') as f:
            line = next(line for line in f if line.startswith('RssAnon:'))
        return int(line.split()[1]) << 10


# -- tables -------------------------------------------------------------------

class Table:
    """Figures of the rounds, and their ratios to a reference of the round."""

    def __init__(self):
        self.figures, self.units, self.ratios = {}, {}, {}
        self.cpu, self.kernel = {}, {}

    def add(self, name: str, size: int, spent: Spent,
            of: str | None = None) -> None:
        """Add the rate at which so many bytes were handled."""
        self.figure(name, size / spent.wall / 1e6, of=of)
        self.cpu.setdefault(name, []).append(spent.cpu / (size / GIB))
        self.kernel.setdefault(name, []).append(spent.kernel / (size / GIB))

    def figure(self, name: str, figure: float, unit: str = 'MB/s',
               of: str | None = None) -> None:
        self.figures.setdefault(name, []).append(figure)
        self.units[name] = unit
        if of is not None:
            self.compare(name, of)

    def compare(self, name: str, of: str, count: int = 1) -> None:
        """Relate the last figure to the mean of the reference's last ones.

        A reference of 0, less than a tick of the clock, is left out.
        """
        reference = statistics.mean(self.figures[of][-count:])
        if reference:
            self.ratios.setdefault(name, {}).setdefault(of, []).append(
                self.figures[name][-1] / reference)

    def show(self) -> None:
        """Print medians, lowest and highest; seconds are those per GiB."""
        print(f'{"":42}{"median":>9}{"low":>9}{"high":>9} {"":23}'
              f'{"cpu s":>7}{"kernel":>7}  of')
        for name, found in self.figures.items():
            figures = ''.join(
                f'{figure:9.0f}' if figure >= 1000 else f'{figure:9.3g}'
                for figure in (statistics.median(found), min(found),
                               max(found)))
            seconds = ''.join(
                f'{statistics.median(of[name]):7.2f}' if name in of else
                f'{"":7}' for of in (self.cpu, self.kernel))
            ratios = ''.join(
                f'  {statistics.median(r):.2f} ({min(r):.2f}-{max(r):.2f}) '
                f'{other}' for other, r in self.ratios.get(name, {}).items())
            print(f'{name:42}{figures} {self.units[name]:23}{seconds}'
                  f'{ratios}'.rstrip())


# -- the daemon ---------------------------------------------------------------

@contextlib.contextmanager
def daemon(directory: str, path: str, **options) -> Iterator[tuple[str, int]]:
    """A dedupd of its own process; yields its address and its pid.

    :param directory: where its files are kept, but for the repository
    :param path: the repository
    """
    conf = os.path.join(directory, 'dedupd.conf')
    # A socket's path has to be short.
    place = tempfile.mkdtemp()
    socket = os.path.join(place, 'dedupd.sock')
    settings = {'datadir': path, 'socket': socket, 'filter_dir': directory,
                'collect_interval': 0, 'merge_interval': 0,
                'scrub_interval': 0, **options}
    with open(conf, 'w') as f:
        f.write('[dedupd]\n')
        f.writelines(f'{k} = {v}\n' for k, v in settings.items())
    with open(os.path.join(directory, 'dedupd.log'), 'ab') as log:
        process = subprocess.Popen(
            [sys.executable, '-m', 'dedupd.daemon', '--config-file', conf],
            cwd=TOP, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while not os.path.exists(socket):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit('dedupd did not start; see dedupd.log')
            time.sleep(0.02)
        yield f'unix:{socket}', process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError):
            os.unlink(socket)
        os.rmdir(place)
