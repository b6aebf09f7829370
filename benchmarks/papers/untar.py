# SPDX-License-Identifier: Apache-2.0

"""Time the extraction of tar files onto ext4 on a volume, and on files.

Run it as root from a checkout in which the extension is built; nbdkit and
nbdfuse are needed, and kernels.py fetches such files::

    python benchmarks/papers/untar.py [--mib 0] [--rounds 3] [--dir DIR] TAR...

After Mandal, "Design and Implementation of an Open-Source Deduplication
Platform for Research", 2015, table 4.2: extracting 40 kernels took 649 seconds
on ext4, 521 with Dmdedup below it, and 814 to 1,825 with Lessfs. In each round
a new ext4 takes all tar files, each in a directory of its own, on

* *file*: a file, by a loop device;
* *file over NBD*: such a file, served by nbdkit's own plugin, and mounted by
  nbdfuse and a loop device. A kernel's own client would be faster than
  nbdfuse, so compare volumes with this;
* *volume over NBD*: a volume, by the same way. Its blocks are not compressed.

The seconds include the sync of the file system. *All* has the volume's
checkpoint, too. *Kept* is the space of the file, or of the repository's files,
for each byte of the tar files. The tar files are in the page cache.
"""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import _path  # noqa: F401  finds the modules beside it
import common
from common import MIB
import start

from glance_dedup.repository import image_repository
from glance_dedup.repository import openvolumes
from tests.support import volume_tools

NEEDED = ('mkfs.ext4', 'mount', 'nbdfuse', 'nbdkit', 'tar')
LIMIT = 3600    # seconds for any command


def run(*command: object) -> None:
    """:raises SystemExit: it failed"""
    if subprocess.run(list(map(str, command)), timeout=LIMIT).returncode:
        raise SystemExit(f'{command[0]} failed')


def end(process: subprocess.Popen) -> None:
    """End a process that this one has started."""
    process.terminate()
    try:
        process.wait(start.LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def as_file(uri: str, place: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a file that is a disk over NBD."""
    point = place / 'fuse'
    point.mkdir()
    process = subprocess.Popen(['nbdfuse', point, uri])
    try:
        deadline = time.monotonic() + start.LIMIT
        while not os.path.ismount(point):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit('nbdfuse does not show the disk')
            time.sleep(0.01)
        yield point / 'nbd'
    finally:
        subprocess.run(['umount', point], timeout=LIMIT)
        end(process)
        point.rmdir()


@contextlib.contextmanager
def mounted(disk: pathlib.Path, place: pathlib.Path
            ) -> Iterator[pathlib.Path]:
    """Make an ext4, and yield its root."""
    run('mkfs.ext4', '-q', '-F', disk)
    root = place / 'root'
    root.mkdir()
    run('mount', '-o', 'loop', disk, root)
    try:
        yield root
    finally:
        run('umount', root)
        root.rmdir()


class File:
    """A file, by a loop device."""

    name = 'file'

    def __init__(self, place: pathlib.Path, size: int) -> None:
        self.place = place
        self.kept = place / 'disk'
        with open(self.kept, 'wb') as file:
            file.truncate(size)

    @contextlib.contextmanager
    def disk(self) -> Iterator[pathlib.Path]:
        """Yield the file that is mounted."""
        yield self.kept

    def settle(self) -> None:
        """Do now what the disk does later with the written bytes."""


class Served(File):
    """A file, by nbdkit, nbdfuse and a loop device."""

    name = 'file over NBD'

    @contextlib.contextmanager
    def disk(self) -> Iterator[pathlib.Path]:
        socket = self.place / 'nbd.sock'
        process = subprocess.Popen(
            ['nbdkit', '--foreground', f'--unix={socket}', 'file', self.kept])
        try:
            deadline = time.monotonic() + start.LIMIT
            while not socket.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit('nbdkit does not serve the file')
                time.sleep(0.01)
            with as_file(f'nbd+unix:///?socket={socket}',
                         self.place) as found:
                yield found
        finally:
            end(process)


class Volume:
    """A volume, by its server, nbdfuse and a loop device."""

    name = 'volume over NBD'

    def __init__(self, place: pathlib.Path, size: int) -> None:
        self.place = place
        self.kept = place / 'repository'
        self._server: volume_tools.Server | None = None
        image_repository.Repository.create(str(self.kept))
        with image_repository.Repository(
                str(self.kept), filter_dir=str(place / 'filter')) as repo:
            openvolumes.create(repo, 'disk', size)

    @contextlib.contextmanager
    def disk(self) -> Iterator[pathlib.Path]:
        """Yield the file that is mounted."""
        with volume_tools.Server(self.kept, self.place) as self._server:
            self._server.start('--codec', 'none')
            with as_file(self._server.uri, self.place) as found:
                yield found
            self._server.stop()

    def settle(self) -> None:
        """Make a checkpoint."""
        assert self._server is not None
        self._server.control.checkpoint()


def on_disk(path: pathlib.Path) -> int:
    """Return the bytes of a file, or of all files below a directory."""
    return sum(found.lstat().st_blocks * 512
               for found in (path, *path.rglob('*')))


def extract(tars: list[str], root: pathlib.Path) -> None:
    """Extract each into a directory of its own, and sync."""
    for number, tar in enumerate(tars):
        target = root / str(number)
        target.mkdir()
        run('tar', '-xf', tar, '-C', target)
    run('sync', '--file-system', root)


def measure(kind: type[File] | type[Volume], directory: str, size: int,
            tars: list[str], table: common.Table) -> None:
    """Measure one round of one kind of disk."""
    # The path of a socket has to be short.
    with (tempfile.TemporaryDirectory(dir=directory) as place,
          tempfile.TemporaryDirectory() as sockets):
        short = pathlib.Path(sockets, 'place')
        short.symlink_to(place)
        target = kind(short, size)
        with target.disk() as disk, mounted(disk, short) as root:
            began = time.perf_counter()
            extract(tars, root)
            synced = time.perf_counter()
            target.settle()
            done = time.perf_counter()
        written = sum(map(os.path.getsize, tars))
        for what, figure, unit in (
                ('extracted', synced - began, 's'), ('all', done - began, 's'),
                ('kept', on_disk(target.kept) / written, 'of the tar files')):
            table.figure(f'{kind.name}: {what}', figure, unit, of=(
                None if kind is File else f'{File.name}: {what}'))


def main() -> None:
    """Measure with the command line's arguments."""
    parser = common.arguments(
        __doc__, rounds=3, paths='+',
        mib=(0, 'of the disk; 0: twice that of the tar files, and 256'))
    args = parser.parse_args()
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        parser.error('not installed: ' + ', '.join(missing))
    if os.geteuid() != 0:
        parser.error('only root may mount file systems')
    tars = [os.path.abspath(path) for path in args.paths]
    size = args.mib * MIB or 2 * sum(map(os.path.getsize, tars)) + 256 * MIB
    table = common.Table()
    with common.place(args.dir) as directory:
        common.warm_pages(size // 2, directory)
        for tar in tars:
            common.cat(tar)
        for number in common.count_rounds(args.rounds):
            kinds: list[type[File] | type[Volume]] = [File, Served, Volume]
            # Ratios are to the file of the round, so it stays the first.
            for kind in kinds[:1] + kinds[1:][::1 - 2 * (number % 2)]:
                print(kind.name, file=sys.stderr)
                measure(kind, directory, size, tars, table)
    table.show()
    print('\nDmdedup: ext4 649 s, Dmdedup below it 521 s, Lessfs 814 to '
          '1,825 s')


if __name__ == '__main__':
    main()
