# SPDX-License-Identifier: Apache-2.0

"""What the benchmarks share.

Importing it lets a benchmark that is run from a checkout find the packages
beside it.
"""

import argparse
from collections.abc import Callable, Iterator
import contextlib
import os
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


def arguments(description: str, mib: int = 512,
              rounds: int | None = 3) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have.

    :param rounds: None: it has none
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('--mib', type=int, default=mib,
                        help='how much data (default: %(default)s)')
    if rounds is not None:
        parser.add_argument('--rounds', type=int, default=rounds,
                            help='how often (default: %(default)s)')
    add_directory(parser)
    return parser


def add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--dir', default='.', type=os.path.abspath,
                        help='on which disk (default: the current directory)')


def remove_filters(directory: str) -> None:
    """Those of repositories that are gone."""
    for name in os.listdir(directory):
        if name.endswith('.filter'):
            os.unlink(os.path.join(directory, name))


# -- images -------------------------------------------------------------------

def by_distribution(paths: list[str]) -> list[tuple[str, str]]:
    """Distributions and images, those of a distribution together.

    A distribution is what an image's directory is called, or, where all are in
    one directory, what the image's name has before its first dash.
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
    """What a call took: seconds, and what it returned."""

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
    """What each thread that writes back has used, of any process's data."""
    ticks = {}
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError):
            with open(f'/proc/{pid}/stat') as f:
                name, _, rest = f.read().partition('(')[2].rpartition(')')
            if name.startswith(('kworker/', 'jbd2/', 'xfsaild/')):
                ticks[pid] = int(rest.split()[12])
    return ticks


def _kernel_seconds(before: dict[str, int]) -> float:
    """What they used since; those that have ended are not known any more."""
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
    host has to give it, and takes it back some seconds after it was freed.
    What is measured next would pay for it, and not what is measured after
    that.  So a file is written, and deleted, until that gets no faster.
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


# -- memory -------------------------------------------------------------------

class Memory(NamedTuple):
    """Bytes of a process's memory."""

    peak: int  #: the most that was resident
    resident: int
    #: resident, with pages that several processes have counted in part
    proportional: int
    #: of these, what is no page of a file: the system cannot drop it
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
    """Make what is resident now the peak."""
    with open(f'/proc/{pid}/clear_refs', 'w') as f:
        f.write('5\n')


class Peak:
    """The most memory that a process has of its own, while this is open.

    Looked at all the time.  Pages of files that are mapped, as LevelDB does
    with its tables, are not among them: the system takes them back at will.
    """

    def __init__(self) -> None:
        self.bytes = self._now()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.002):
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
        """Add the rate at which so many bytes were dealt with."""
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

        Not to 0: what takes less than a tick of the clock has no time.
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
            [sys.executable, '-m', 'dedupd.main', '--config-file', conf],
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
