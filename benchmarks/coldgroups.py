# SPDX-License-Identifier: Apache-2.0

"""Measure reads of images whose groups are in a distant object store.

Run it from a checkout::

    python benchmarks/coldgroups.py [--mib 128] [--rounds 3]
        [--latency-ms 20] [--only download,boot] [--dir DIR]

The object store is JuiceFS's S3 gateway, behind a proxy that delays each
request. dedupd fetches the slices. It is restarted before each
measurement, so nothing is in its memory. *Hot* is before the groups moved;
*cold* is with no slice on this host; *warm* is with those that the cold one
left.

``download`` reads an image of so many MiB of noise from the daemon's socket,
from its beginning to its end. ``boot`` starts the boot image of
``tools/boot_image`` in QEMU, with an emulated processor, from the daemon's NBD
export, until its console says that it is up. It also shows the GETs, the MiB
that they received, and the maximum of GETs at once.
"""

import argparse
from collections.abc import Callable
import contextlib
import pathlib
import random
import tempfile
import time

import common

from tests.cloud import disk_images
from tests.support import cold_repositories
from tests.support import daemons
from tests.support import faulty_proxy
from tests.support import nbd
from tests.support import objects

# Groups are small, so that all of an image is in full ones.
SLOTS = 4096
WAYS = ('download', 'boot')

#: The measured way to read, with a daemon.
Way = Callable[[daemons.Daemon, str], None]


def download(daemon: daemons.Daemon, image_id: str) -> None:
    with daemon.client() as client, client.open_image(image_id) as stream:
        done = 0
        while done < stream.size:
            done += len(stream.read(min(common.PIECE, stream.size - done),
                                    nbd.LIMIT))


def boot(daemon: daemons.Daemon, image_id: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        with nbd.Guest(pathlib.Path(place), f'nbd+unix:///{image_id}?socket='
                       f'{daemon.directory}/nbd') as guest:
            guest.wait_until_up()


class Bench:
    """A repository, its object store, and the figures."""

    def __init__(self, place: pathlib.Path, server: objects.Server,
                 proxy: faulty_proxy.FaultyProxy, latency: float) -> None:
        self._faults = proxy.faults
        self._latency = latency
        self.repository = cold_repositories.ColdRepository(
            place / 'repository', server, proxy.url, group_slots=SLOTS)
        self.table = common.Table()

    def cool(self) -> None:
        """Move all groups; images fill only some of the last one."""
        self.repository.put('filler', random.randbytes(SLOTS * 4096))
        self._faults.delay = 0
        self.repository.cool()
        self._faults.delay = self._latency

    def measure(self, way: Way, image_id: str, state: str, size: int) -> None:
        name = f'{way.__name__}, {state}'
        self._faults.seen.clear()
        self._faults.most = 0
        with daemons.Daemon(self.repository.path, filter_mib=1) as daemon:
            daemon.write_config(nbd_socket=daemon.directory / 'nbd')
            daemon.start()
            # The daemon also loads the object store's library.
            daemon.wait_for_catalog()
            start = time.perf_counter()
            way(daemon, image_id)
            seconds = time.perf_counter() - start
            figures = daemon.status()['cold']
        if size:
            self.table.figure(name, size / common.MIB / seconds, 'MiB/s')
        self.table.figure(f'{name}, seconds', seconds, 's')
        if state == 'cold':
            self._cold(name, figures)

    def _cold(self, name: str, figures: dict[str, int]) -> None:
        for what, figure, unit in (
                ('GETs', figures['gets'], ''),
                ('received', figures['received'] / common.MIB, 'MiB'),
                ('at once', self._faults.most, 'GETs')):
            self.table.figure(f'{name}, {what}', figure, unit)

    def round(self, ways: list[tuple[Way, str, int]], state: str) -> None:
        for way, image_id, size in ways:
            if state == 'cold':
                self.repository.forget()
            self.measure(way, image_id, state, size)
            if state == 'cold':
                self.measure(way, image_id, 'warm', size)
                cold, warm = (f'{way.__name__}, {which}, seconds'
                              for which in ('cold', 'warm'))
                self.table.compare(cold, warm)


def parse() -> argparse.Namespace:
    parser = common.arguments(
        __doc__, mib=128, rounds=3, only=(','.join(WAYS), 'ways of reading'),
        latency_ms=(20.0, 'of each request to the object store'))
    args = parser.parse_args()
    args.only = args.only.split(',')
    if not set(args.only) <= set(WAYS):
        parser.error(f'--only: choose from {", ".join(WAYS)}')
    return args


def main() -> None:
    args = parse()
    with contextlib.ExitStack() as stack:
        place = pathlib.Path(stack.enter_context(
            tempfile.TemporaryDirectory(dir=args.dir, prefix='cold-')))
        server = stack.enter_context(objects.JuiceGateway(place / 'objects'))
        proxy = stack.enter_context(faulty_proxy.FaultyProxy(server.port))
        bench = Bench(place, server, proxy, args.latency_ms / 1000)
        ways: list[tuple[Way, str, int]] = []
        if 'download' in args.only:
            size = args.mib * common.MIB
            bench.repository.put('noise', b''.join(
                random.randbytes(common.MIB) for _ in range(args.mib)))
            ways.append((download, 'noise', size))
        if 'boot' in args.only:
            bench.repository.put('boot', disk_images.images().raw.read_bytes())
            ways.append((boot, 'boot', 0))
        for _ in range(args.rounds):
            bench.round(ways, 'hot')
        bench.cool()
        for _ in range(args.rounds):
            bench.round(ways, 'cold')
        print(f'latency {args.latency_ms:g} ms')
        bench.table.show()


if __name__ == '__main__':
    main()
