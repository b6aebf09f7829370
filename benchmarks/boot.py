# SPDX-License-Identifier: Apache-2.0

"""Compare Nova's starts from the deduplicating store and the file store.

Run it from a checkout in which ``tools/cloud up`` has installed its services::

    python benchmarks/boot.py [--servers 4] [--rounds 3] [--own-mib 16]
        [--cold] [--cloud DIR | --dir DIR]

It starts a cloud of its own, or uses one that runs.  Each of the servers has
an image of its own, of ``tools/boot_image``, 192 MiB, of which so many are in
no other and the rest, a kernel's modules, is in all; each image is in both
stores.  In each round one server is started, then two at once, and so on, from
each store in turn, and deleted again; and Nova's cache of images is emptied,
so that each start downloads its image.

Shown are the seconds from the request to the line on a server's console that
says that it is up, and until all are; and what Glance needed for a download,
from its log.  The ratio is to the file store of the same round, until all are
up.  Processors are emulated, and these, the servers' and OpenStack's own work
share the machine, so that a start is slow here, and the store's part in it
small.

With ``--cold``, as root, the page cache is emptied and dedupd restarted before
each start.
"""

import argparse
import concurrent.futures
import contextlib
import os
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import common

from tests.cloud import boot
from tests.cloud import disk_images
from tests.cloud import local_cloud
from tests.cloud import nova

STORES = ('file', 'dedup')
POLL = 0.05


class Started(NamedTuple):
    """Servers that were started at once: seconds of each, and of all."""

    up: list[float]
    downloads: list[float]

    @property
    def all_up(self) -> float:
        return max(self.up)


# -- images -------------------------------------------------------------------

def upload_images(connection: Any, args: argparse.Namespace
                  ) -> dict[str, list[str]]:
    """Upload an image for each server; return them by store."""
    images: dict[str, list[str]] = {store: [] for store in STORES}
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        path = os.path.join(directory, 'image')
        for number in range(args.servers):
            message = f'image {number}'
            disk_images.variant(disk_images.images().raw, path, message,
                                args.own_mib)
            for store in STORES:
                images[store].append(
                    boot.upload(connection, path, message, store=store))
    return images


# -- starting -----------------------------------------------------------------

def start_one(compute: nova.Compute, connection: Any, image: str
              ) -> tuple[str, float]:
    """Start a server; return it, and the seconds until it was up.

    Its console is a file, which is read instead of frequent requests to Nova.
    """
    began = time.perf_counter()
    server = boot.create(connection, image, 'benchmark',
                         compute.host and compute.host.name)
    console = compute.instances / server / 'console.log'
    while True:
        with contextlib.suppress(FileNotFoundError):
            if boot.read(console.read_text(errors='replace')):
                return server, time.perf_counter() - began
        if time.perf_counter() - began > boot.BOOT_TIMEOUT:
            raise SystemExit(f'server {server} is not up after '
                             f'{boot.BOOT_TIMEOUT} s; see {console} and '
                             f'{compute.log}')
        time.sleep(POLL)


def start(cloud: local_cloud.Cloud, connections: list[Any],
          images: list[str]) -> Started:
    """Start a server of each image at once, and delete them."""
    before = [len(boot.downloads(cloud, image)) for image in images]
    compute = cloud.services['nova-compute']
    with concurrent.futures.ThreadPoolExecutor(len(images)) as pool:
        found = list(pool.map(lambda pair: start_one(compute, *pair),
                              zip(connections, images)))
    fresh = [boot.downloads(cloud, image)[count:]
             for image, count in zip(images, before)]
    if any(len(one) != 1 for one in fresh):
        raise SystemExit('Nova had an image from elsewhere than Glance, or '
                         f'twice: {fresh}')
    for connection, (server, _) in zip(connections, found):
        boot.delete(connection, server)
    compute.forget_images()
    return Started([seconds for _, seconds in found],
                   [one[0].seconds for one in fresh])


def cool(cloud: local_cloud.Cloud) -> None:
    cloud.services['dedupd'].stop()
    common.empty_page_cache()
    cloud.services['dedupd'].start()


# -- the table ----------------------------------------------------------------

def cell(figures: list[float]) -> str:
    return (f'{statistics.median(figures):.1f} ({min(figures):.1f}-'
            f'{max(figures):.1f})').rjust(19)


def show(found: dict[tuple[str, int], list[Started]],
         args: argparse.Namespace) -> None:
    print(f'\nstarting servers, {os.cpu_count()} processors, emulated ones in '
          f'the servers, {"cold" if args.cold else "warm"}: seconds, median '
          '(lowest-highest)')
    print(f'{"at once":>7}  {"store":6}{"a server up":>19}{"all up":>19}'
          f'{"a download":>19}{"ratio":>7}')
    for (store, count), rounds in sorted(
            found.items(), key=lambda item: (item[0][1],
                                             STORES.index(item[0][0]))):
        ratio = statistics.median(
            one.all_up / plain.all_up
            for one, plain in zip(rounds, found['file', count]))
        print(f'{count:7}  {store:6}'
              + cell([seconds for one in rounds for seconds in one.up])
              + cell([one.all_up for one in rounds])
              + cell([seconds for one in rounds for seconds in one.downloads])
              + f'{ratio:7.2f}', flush=True)


# -- all of it ----------------------------------------------------------------

def measure(cloud: local_cloud.Cloud, args: argparse.Namespace) -> None:
    found: dict[tuple[str, int], list[Started]] = {}
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(contextlib.closing(
            cloud.connect('demo'))) for _ in range(args.servers)]
        for connection in connections:
            connection.authorize()
        print('upload the images', flush=True)
        images = upload_images(connections[0], args)
        for number in range(args.rounds):
            for count in range(1, args.servers + 1):
                for store in sorted(STORES, reverse=bool(number % 2)):
                    print(f'round {number + 1} of {args.rounds}: {count} at '
                          f'once from {store}', flush=True)
                    if args.cold:
                        cool(cloud)
                    found.setdefault((store, count), []).append(
                        start(cloud, connections, images[store][:count]))
        for image in [image for some in images.values() for image in some]:
            connections[0].image.delete_image(image)
    show(found, args)


def parse() -> argparse.Namespace:
    parser = common.arguments(
        __doc__, rounds=3, servers=(4, 'the most at once'),
        own_mib=(16, 'MiB of each image that are in no other'),
        cold=(False, 'empty the page cache before each start'),
        cloud=('', 'directory of a cloud that runs'))
    args = parser.parse_args()
    if args.cold and not common.can_empty_page_cache():
        parser.error('--cold: only root can empty the page cache')
    return args


def main() -> None:
    args = parse()
    if args.cloud:
        measure(local_cloud.Cloud(args.cloud), args)
        return
    with tempfile.TemporaryDirectory(dir=args.dir, prefix='cloud-') as place:
        directory = os.path.join(place, 'cloud')
        with local_cloud.Cloud(directory, say=print) as cloud:
            cloud.up()
            measure(cloud, args)


if __name__ == '__main__':
    main()
