# SPDX-License-Identifier: Apache-2.0

"""Measure the time until a repository can be used, after various ends.

Run it from a checkout in which the extension is built, as root::

    python benchmarks/start.py [--blocks 1000000,10000000] [--images 1000]
        [--rounds 3] [--filter-mib 900] [--dir DIR]

For each number of blocks a repository with so many is made (``synthetic.py``),
on an ext4 in a file of DIR, mounted by a loop device: 100 million blocks take
7 GB of it. Then, in each round, it is left

* by a clean stop;
* by a process that is killed with SIGKILL in the middle of an upload;
* by a loss of power in the middle of an upload: the file system is shut down
  without writing anything more, so that bytes that were not synced are lost,
  and the filter, on its tmpfs, is, too. An image of 100 MiB was committed just
  before. Its group's record is lost then, and its entries are a tail, which
  the next writer has to judge; the benchmark checks that there is one;
* by a clean stop, and the filter is deleted.

After each, with the page cache emptied and then again without, it shows the
time that a fresh process needs

* for a first upload of 4 MiB of new data, from opening the repository to the
  commit's return, through the library and through the Glance driver; the
  imports of either are shown apart;
* for a first download of 4 MiB, to the first byte and to the last;
* and dedupd, from the start of its process until it answers on its socket, and
  until its maintainer can collect.

Without root there is no ext4 of its own, no loss of power, and no emptying.
"""

import argparse
import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import common
import synthetic

from glance_dedup.check import ondisk
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository

GROUP = 32768
TAIL = 100 * common.MIB
_SHUTDOWN = 0x8004587d      # EXT4_IOC_SHUTDOWN
_NO_FLUSH = 2               # neither the data nor the journal
LIMIT = 120                 # seconds for anything but making a repository

# Each is a program of its own, which prints its seconds as JSON.
LIBRARY = '''
import json, os, sys, time
path, filter_dir, filter_mib, what, image_id = sys.argv[1:]
start = time.perf_counter()
from glance_dedup.repository import image_repository
imported = time.perf_counter()
data = os.urandom(4 << 20)
opened = time.perf_counter()
repo = image_repository.Repository(path, filter_dir=filter_dir,
                             filter_mib=int(filter_mib))
seconds = {'import': imported - start}
if what == 'upload':
    with repo.begin(image_id) as transaction:
        transaction.write(data)
        transaction.commit()
    seconds['upload'] = time.perf_counter() - opened
else:
    with repo.open_image(image_id) as image:
        image.read(65536)
        seconds['first byte'] = time.perf_counter() - opened
        image.read()
        seconds['download'] = time.perf_counter() - opened
print(json.dumps(seconds), flush=True)
os._exit(0)
'''

DRIVER = '''
import json, io, os, sys, time, warnings
path, filter_dir, filter_mib, what, image_id = sys.argv[1:]
warnings.simplefilter('ignore')
start = time.perf_counter()
from glance_dedup.driver import dedup_store
import glance_store
from oslo_config import cfg
imported = time.perf_counter()
conf = cfg.CONF
conf.register_opt(cfg.DictOpt('enabled_backends'))
conf([], project='start')
conf.set_override('enabled_backends', {'one': 'dedup'})
glance_store.register_store_opts(conf)
conf.set_override('default_backend', 'one', group='glance_store')
for name, value in (('datadir', path), ('filter_dir', filter_dir),
                    ('filter_mib', int(filter_mib)), ('dedupd_socket', '')):
    conf.set_override(f'dedup_store_{name}', value, group='one')
data = os.urandom(4 << 20)
opened = time.perf_counter()
glance_store.create_multi_stores(conf)
glance_store.add_with_multihash(conf, image_id, io.BytesIO(data), len(data),
                                'one', 'sha512')
done = time.perf_counter()
print(json.dumps({'import': imported - start, 'upload': done - opened}),
      flush=True)
os._exit(0)
'''

# Commits an image, then stores another until it is stopped.
WRITER = '''
import os, sys, time
from glance_dedup.repository import image_repository
path, filter_dir, filter_mib, first, second, size = sys.argv[1:]
repo = image_repository.Repository(path, filter_dir=filter_dir, codec='none',
                             filter_mib=int(filter_mib))
if int(size):
    with repo.begin(first) as transaction:
        for _ in range(0, int(size), 1 << 20):
            transaction.write(os.urandom(1 << 20))
        transaction.commit()
transaction = repo.begin(second)
for number in range(8):
    transaction.write(os.urandom(1 << 20))
print('under way', flush=True)
time.sleep(600)
'''


class Place:
    """The place of a repository: a file system that can lose its power.

    :param size: of the file system, bytes; without root a directory is all
    """

    def __init__(self, directory: str, size: int) -> None:
        self.root = os.path.join(directory, 'mounted')
        self.file = os.path.join(directory, 'disk')
        os.mkdir(self.root)
        self.own = os.geteuid() == 0
        if self.own:
            with open(self.file, 'wb') as f:
                f.truncate(size)
            run('mkfs.ext4', '-q', '-F', self.file)
            self.mount()

    def mount(self) -> None:
        run('mount', '-o', 'loop', self.file, self.root)

    def unmount(self) -> None:
        deadline = time.monotonic() + LIMIT
        while subprocess.run(['umount', self.root],
                             capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise SystemExit(f'{self.root} cannot be unmounted')
            time.sleep(0.05)

    def fail(self) -> None:
        """Shut down: from now on no byte reaches the disk."""
        fd = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack('I', _NO_FLUSH))
        finally:
            os.close(fd)

    def close(self) -> None:
        if self.own:
            subprocess.run(['umount', '--lazy', self.root], timeout=LIMIT)


def run(*command) -> None:
    subprocess.run(command, check=True, timeout=LIMIT)


class Subject:
    """A repository that is stopped and started again and again."""

    def __init__(self, place: Place, filter_dir: str, mib: int) -> None:
        self.place = place
        self.path = os.path.join(place.root, 'repository')
        self.filter_dir = filter_dir
        self.mib = mib
        self._images = 0

    def open(self) -> image_repository.Repository:
        return image_repository.Repository(self.path,
                                           filter_dir=self.filter_dir,
                                           filter_mib=self.mib)

    def make(self, blocks: int, images: int) -> dict[str, float]:
        """Make it, with its catalog and filter; return their seconds."""
        synthetic.make(self.path, blocks, images=images)
        with self.open() as repo:
            # The filter comes first: otherwise the first upload has a thread
            # make it.
            built = common.timed(repo.rebuild_filter)
            repo.put('base', io.BytesIO(os.urandom(4 * common.MIB)))
            catalog = common.timed(self._maintain, repo)
        return {'catalog': catalog.wall, 'filter': built.wall}

    @staticmethod
    def _maintain(repo: image_repository.Repository) -> None:
        maintainer_role.Maintainer(repo).close()

    def _next(self) -> str:
        self._images += 1
        return f'image-{self._images}'

    # -- ways to leave it --------------------------------------------------

    def _write(self, size: int) -> subprocess.Popen:
        """Start an upload, after committing an image of so many bytes."""
        process = subprocess.Popen(
            [sys.executable, '-c', WRITER, self.path, self.filter_dir,
             str(self.mib), self._next(), self._next(), str(size)],
            cwd=common.TOP, stdout=subprocess.PIPE)
        process.stdout.readline()
        return process

    def stop(self) -> None:
        pass

    def kill(self) -> None:
        process = self._write(0)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LIMIT)

    def lose_power(self) -> None:
        with self.open() as repo:
            repo.put(self._next(), io.BytesIO(os.urandom(
                self._newest_group()[1] * 4096)))
        # No later write then reaches the disk by chance.
        os.sync()
        process = self._write(TAIL)
        self.place.fail()
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LIMIT)
        self.place.unmount()
        self.place.mount()
        self.delete_filter()
        self._require_tail()

    def delete_filter(self) -> None:
        for name in os.listdir(self.filter_dir):
            os.unlink(os.path.join(self.filter_dir, name))

    def _newest_group(self) -> tuple[str, int, int]:
        """Return its name, free slots, and unpublished entries."""
        directory = os.path.join(self.path, 'groups')
        name = max(os.listdir(directory))
        with open(os.path.join(directory, name), 'rb') as f:
            raw = f.read(4096 + 512 * -(-GROUP // 9))
        seed = struct.unpack_from('<Q', raw, 504)[0]
        records = [struct.unpack_from('<QQI', raw, at) for at in (512, 1024)
                   if ondisk.xxh3(raw[at:at + 504], seed)
                   == struct.unpack_from('<Q', raw, at + 504)[0]]
        published = max(records)[2] if records else 0
        used = sum(any(raw[at:at + 56]) for at in (
            4096 + 512 * (slot // 9) + 56 * (slot % 9)
            for slot in range(published, GROUP)))
        return name, GROUP - published - used, used

    def _require_tail(self) -> None:
        """Require that the last committed image's entries are a tail."""
        name, _, used = self._newest_group()
        if used < TAIL // 4096:
            raise SystemExit(f'the record of {name} was not lost: it has only '
                             f'{used} entries behind its published count')

    # -- measurements ------------------------------------------------------

    def _run(self, program: str, what: str, image_id: str) -> dict[str, float]:
        done = subprocess.run(
            [sys.executable, '-c', program, self.path, self.filter_dir,
             str(self.mib), what, image_id], cwd=common.TOP, check=True,
            timeout=LIMIT, stdout=subprocess.PIPE)
        return json.loads(done.stdout)

    def upload(self) -> dict[str, float]:
        image_id = self._next()
        found = self._run(LIBRARY, 'upload', image_id)
        return {'upload': found['upload'], 'import': found['import']}

    def driver(self) -> dict[str, float]:
        found = self._run(DRIVER, 'upload', self._next())
        return {'driver': found['upload'], 'its import': found['import']}

    def download(self) -> dict[str, float]:
        found = self._run(LIBRARY, 'download', 'base')
        return {'first byte': found['first byte'],
                'download': found['download']}

    def daemon(self) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix='start-') as directory:
            socket = os.path.join(directory, 'socket')
            conf = os.path.join(directory, 'dedupd.conf')
            with open(conf, 'w') as f:
                f.write(f'[dedupd]\ndatadir = {self.path}\n'
                        f'socket = {socket}\nfilter_dir = {self.filter_dir}\n'
                        f'filter_mib = {self.mib}\ncollect_interval = 0\n'
                        'merge_interval = 0\nscrub_interval = 0\n')
            start = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, '-m', 'dedupd.daemon', '--config-file', conf],
                cwd=common.TOP, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL)
            try:
                address = daemon_client.Client(f'unix:{socket}')
                status = wait_for(address.status)
                answers = time.perf_counter() - start
                while status['catalog']['state'] != 'ready':
                    time.sleep(0.005)
                    status = wait_for(address.status)
                ready = time.perf_counter() - start
                address.close()
            finally:
                process.terminate()
                process.wait(LIMIT)
        return {'dedupd': answers, 'maintainer': ready}


def wait_for(answer):
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            return answer()
        except client_errors.DaemonUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.002)


COLUMNS = ('import', 'upload', 'its import', 'driver', 'first byte',
           'download', 'dedupd', 'maintainer')


class Figures:
    """Seconds by case and column."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, list[float]]] = {}

    def add(self, case: str, found: dict[str, float]) -> None:
        row = self.rows.setdefault(case, {})
        for name, seconds in found.items():
            row.setdefault(name, []).append(seconds)

    def show(self) -> None:
        print('milliseconds: median (highest)')
        print(f'{"":24}' + ''.join(f'{name:>14}' for name in COLUMNS))
        for case, row in self.rows.items():
            print(f'{case:24}' + ''.join(
                f'{cell(row.get(name)):>14}' for name in COLUMNS))


def cell(seconds: list[float] | None) -> str:
    if not seconds:
        return '-'
    return (f'{statistics.median(seconds) * 1000:.0f} '
            f'({max(seconds) * 1000:.0f})')


def one_round(subject: Subject, figures: Figures, cold: bool) -> None:
    cases = {'stopped': subject.stop, 'killed': subject.kill}
    if subject.place.own:
        cases['lost power'] = subject.lose_power
    cases['filter deleted'] = subject.delete_filter
    for case, leave in cases.items():
        for warm in (False, True) if cold else (True,):
            # The first command meets remaining state; so each gets its own.
            for measure in (subject.upload, subject.driver, subject.download,
                            subject.daemon):
                if case == 'lost power' and warm:
                    continue
                leave()
                if not warm:
                    common.empty_page_cache()
                figures.add(f'{case}, {"warm" if warm else "cold"}',
                            measure())


def measure(args: argparse.Namespace, blocks: int, cold: bool) -> None:
    # Whole groups, so that the first upload of a round finds one not full.
    blocks = max(1, blocks // GROUP) * GROUP
    images = min(args.images, blocks)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(common.place(args.dir))
        filter_dir = stack.enter_context(common.place('/dev/shm'))
        place = Place(directory, (6 << 30) + 70 * blocks)
        stack.callback(place.close)
        subject = Subject(place, filter_dir, args.filter_mib)
        print(f'making {blocks} blocks', file=sys.stderr)
        made = subject.make(blocks, images)
        figures = Figures()
        for _ in common.count_rounds(args.rounds):
            one_round(subject, figures, cold)
        print(f'\n{blocks / 1e6:.1f} million blocks, {images} images')
        figures.show()
        print(f'the catalog rebuilt in {made["catalog"]:.1f} s, the filter '
              f'in {made["filter"]:.1f} s', flush=True)


def main() -> None:
    args = common.arguments(
        __doc__, rounds=3,
        blocks=('1000000,10000000', 'how many, and how many then'),
        images=(1000, 'that have them'),
        filter_mib=(900, "the filter's budget")).parse_args()
    if os.geteuid() == 0 and shutil.which('mkfs.ext4') is None:
        raise SystemExit('there is no mkfs.ext4')
    cold = common.can_empty_page_cache()
    for blocks in args.blocks.split(','):
        measure(args, int(float(blocks)), cold)


if __name__ == '__main__':
    main()
