# SPDX-License-Identifier: Apache-2.0

"""Compare disks of servers: plain files, qcow2 overlays, and volumes.

Run it from a checkout in which the extension is built::

    python benchmarks/servers.py [--servers 4] [--mib 256] [--rounds 3]
        [--dir DIR]

In each round, for each kind of disk in turn, on the same file system:

* servers are started, one after the other, each from a disk of its own that
  is made of the image of ``tools/boot_image``: a copy of the file, an overlay
  over it, or a clone with its server. Shown are the seconds until the disk is
  made, and until the console says that the server is up;
* then all disks get the same 32 MiB, as an update of their system would write.
  Shown is the space of all on the file system, the image with it, before and
  after;
* then fio writes MIB into one disk: at random places, 4 KiB each, 16 at a time
  with a flush after every 32; and in order, 1 MiB at a time, with a flush at
  the end. A third of each block compresses. For a volume the time of a
  checkpoint behind it is included. All are written over NBD, files by
  qemu-nbd.

A ratio is to the plain file of the same round. Processors are emulated, so a
start is slow from any kind of disk. No figure passes or fails.
"""

import argparse
from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time

import common
from common import MIB

from glance_dedup.repository import image_repository
from glance_dedup.repository import openvolumes
from tests.cloud import disk_images
from tests.support import nbd
from tests.support import volume_tools

IMAGE = 'image'
UPDATE = 32 * MIB
LIMIT = 600


def run(*command: object) -> str:
    """:raises SystemExit: with its output, if it fails"""
    done = subprocess.run(list(map(str, command)), capture_output=True,
                          text=True, timeout=LIMIT)
    if done.returncode:
        raise SystemExit(f'{command[0]}: {done.stdout}{done.stderr}')
    return done.stdout


def listens(path: pathlib.Path) -> bool:
    """Return true if a process takes connections on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def on_disk(place: pathlib.Path) -> int:
    """Return the bytes of all files below a directory."""
    return sum(path.lstat().st_blocks * 512 for path in place.rglob('*'))


class Plain:
    """Each disk is a copy of the image."""

    name = 'plain file'
    form = 'raw'

    def __init__(self, place: pathlib.Path, sockets: pathlib.Path,
                 size: int) -> None:
        self.place = self.kept = place
        self.sockets = sockets
        self.size = size
        self.image = place / 'image.raw'
        run('cp', '--sparse=always', disk_images.images().raw, self.image)

    def make(self, number: int) -> None:
        """Make a disk of the image, with room behind it."""
        run('cp', '--sparse=always', self.image, self._disk(number))
        os.truncate(self._disk(number), self.size)

    def _disk(self, number: int) -> pathlib.Path:
        return self.place / f'disk-{number}'

    @contextlib.contextmanager
    def opened(self, number: int) -> Iterator[str]:
        """Yield the path that QEMU opens."""
        yield str(self._disk(number))

    @contextlib.contextmanager
    def served(self, number: int) -> Iterator[str]:
        """Yield the URI of the disk over NBD."""
        path = self.sockets / 'nbd'
        process = subprocess.Popen(
            ['qemu-nbd', '--persistent', '--discard=unmap',
             f'--format={self.form}', f'--socket={path}',
             self._disk(number)])
        try:
            deadline = time.monotonic() + LIMIT
            while not listens(path):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit('qemu-nbd does not serve the disk')
                time.sleep(0.01)
            yield f'nbd+unix:///?socket={path}'
        finally:
            process.terminate()
            process.wait(LIMIT)

    def settle(self) -> None:
        """Do now what a disk does later with the written bytes."""


class Overlay(Plain):
    """Each disk is a qcow2 file over the image."""

    name = 'qcow2 overlay'
    form = 'qcow2'

    def make(self, number: int) -> None:
        run('qemu-img', 'create', '-q', '-f', 'qcow2', '-F', 'raw', '-b',
            self.image, self._disk(number), self.size)


class Volume:
    """Each disk is a clone of the image, in a repository."""

    name = 'volume'
    form = 'raw'

    def __init__(self, place: pathlib.Path, sockets: pathlib.Path,
                 size: int) -> None:
        self.place = place
        self.sockets = sockets
        self.size = size
        self._path = self.kept = place / 'repository'
        self._filter = place / 'filter'
        image_repository.Repository.create(str(self._path))
        with self._repository() as repo:
            repo.put(IMAGE, disk_images.images().raw)
        self._server: volume_tools.Server | None = None

    def _repository(self) -> image_repository.Repository:
        return image_repository.Repository(str(self._path),
                                           filter_dir=str(self._filter))

    def make(self, number: int) -> None:
        with self._repository() as repo, repo.open_image(IMAGE) as image:
            openvolumes.create(repo, f'disk-{number}', self.size, image=image)

    @contextlib.contextmanager
    def opened(self, number: int) -> Iterator[str]:
        with volume_tools.Server(self._path, self.sockets, f'disk-{number}'
                                 ) as server:
            self._server = server.start()
            yield server.uri
            server.stop()

    served = opened

    def settle(self) -> None:
        assert self._server is not None
        self._server.control.checkpoint()


def start(kind: Plain | Volume, number: int, table: common.Table) -> None:
    """Start a server of a new disk, and end it."""
    console = kind.place / 'console'
    console.unlink(missing_ok=True)
    began = time.perf_counter()
    kind.make(number)
    with kind.opened(number) as opened:
        made = time.perf_counter()
        with nbd.Machine(
                ['qemu-system-x86_64', '-machine', 'pc,accel=tcg', '-m', '128',
                 '-nodefaults', '-display', 'none',
                 '-serial', f'file:{console}', '-drive',
                 f'file={opened},format={kind.form},if=virtio'],
                console) as guest:
            guest.wait_until_up()
            up = time.perf_counter()
    table.figure(f'{kind.name}: disk made', made - began, 's')
    table.figure(f'{kind.name}: server up', up - began, 's')


def update(kind: Plain | Volume, number: int, data: str) -> None:
    """Write the same bytes behind each disk's own."""
    at = disk_images.images().raw.stat().st_size
    with kind.opened(number) as opened:
        run('qemu-io', '-f', kind.form, '-c', f'write -s {data} {at} {UPDATE}',
            '-c', 'flush', opened)


def write(kind: Plain | Volume, mib: int, *how: str) -> float:
    """Write into the first disk by fio; return the rate in MB/s."""
    report = kind.place / 'fio.json'
    at = disk_images.images().raw.stat().st_size + UPDATE
    with kind.served(0) as uri:
        run('fio', '--name=write', '--ioengine=nbd', f'--uri={uri}',
            f'--offset={at}', f'--size={mib}m', '--refill_buffers',
            '--buffer_compress_percentage=33', '--output-format=json',
            f'--output={report}', *how)
        began = time.perf_counter()
        kind.settle()
        behind = time.perf_counter() - began
    text = report.read_text()       # behind lines of the engine's
    job, = json.loads(text[text.index('{'):])['jobs']
    return mib * MIB / (job['write']['runtime'] / 1000 + behind) / 1e6


def measure(kind: Plain | Volume, args: argparse.Namespace, data: str,
            table: common.Table) -> None:
    """Measure one round of one kind of disk."""
    def add(what: str, figure: float, unit: str) -> None:
        table.figure(f'{kind.name}: {what}', figure, unit, of=(
            None if kind.name == Plain.name else f'{Plain.name}: {what}'))

    for number in range(args.servers):
        start(kind, number, table)
    add('on disk', on_disk(kind.kept) / MIB, 'MiB')
    for number in range(args.servers):
        update(kind, number, data)
    add('on disk, after the update', on_disk(kind.kept) / MIB, 'MiB')
    add('4 KiB at random', write(
        kind, args.mib, '--rw=randwrite', '--bs=4k', '--iodepth=16',
        '--fsync=32'), 'MB/s')
    add('in order', write(
        kind, args.mib, '--rw=write', '--bs=1m', '--iodepth=4',
        '--end_fsync=1'), 'MB/s')


def main() -> None:
    args = common.arguments(__doc__, mib=256, rounds=3,
                            servers=(4, 'of each kind')).parse_args()
    table = common.Table()
    size = disk_images.images().raw.stat().st_size + UPDATE + args.mib * MIB
    with tempfile.TemporaryDirectory(dir=args.dir) as directory, \
            tempfile.TemporaryDirectory() as sockets:   # of short paths
        data = os.path.join(directory, 'update')
        with open(data, 'wb') as f:
            f.write(os.urandom(UPDATE))
        for number in range(args.rounds):
            # The plain files first: the others' ratios are to them.
            others = (Overlay, Volume)[::-1 if number % 2 else 1]
            for way in (Plain, *others):
                place = pathlib.Path(directory, 'disks')
                place.mkdir()
                measure(way(place, pathlib.Path(sockets), size), args,
                        data, table)
                shutil.rmtree(place)
    table.show()


if __name__ == '__main__':
    main()
