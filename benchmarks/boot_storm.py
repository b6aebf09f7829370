# SPDX-License-Identifier: Apache-2.0

"""Measure bytes and seconds that a host's cache saves over a slow link.

Run it as root from a checkout in which ``tools/cloud up`` has installed its
services::

    python benchmarks/boot_storm.py [--rounds 1] [--own-mib 8] [--plot FILE]
        [--part start] [--part storm] [--part lazy] [--dir DIR]

It starts a cloud with six compute hosts, in network namespaces, each behind
a link of its own, which is limited each way by ``tc``: two whose Nova
downloads images from Glance as usual (*plain*), two whose Nova downloads them
through a *cache* (``dedupd --mode cache``), and two whose Nova finds *links*
to images that such a cache offers (``dedupd-nova-base``).  The images are
variants of that of ``tools/boot_image``, 192 MiB, of which so many are in no
other.

``start``: one server at a time, over links of 100 Mbit/s, of 1 Gbit/s, and
without a limit: of the *first* image, when nothing is cached; of a *similar*
one; and of that one *again*, after Nova has deleted its own copy.

``storm``: eight servers at once, four on each of two hosts, nothing cached:
all of one image, and each of an image of its own, all similar.

``lazy``: one server without Nova, over 100 Mbit/s, nothing cached: from a
copy of the image, downloaded from Glance or through the cache; and over NBD
from the cache, with a layer of its own, while the image is on its way.

Shown are, as medians over the rounds, the seconds from the request to the line
on a server's console that says that it is up, and the bytes that came over the
links, including all traffic between OpenStack's services; and of both the
ratio to the plain download of the same round. *Disk* is the space of the
images, the servers and the cache on the disks of the hosts when the servers
are up. Processors are emulated, and these, the servers' and OpenStack's own
work share the machine, so that every start is slow here, by any way of the
image.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from typing import Any, NamedTuple

import boot as boot_benchmark
import common
import plot

from tests.cloud import boot
from tests.cloud import cloud_service
from tests.cloud import dedupd
from tests.cloud import disk_images
from tests.cloud import local_cloud

#: The compute hosts that have their images in either way.
WAYS = {'plain': ['p1', 'p2'], 'cache': ['c1', 'c2'], 'links': ['b1', 'b2']}
SERVERS = 8
#: Mbit/s; None: no limit.
LINKS = (100, 1000, None)
LIMIT = 600
POLL = 0.05


class Taken(NamedTuple):
    """The cost of a case."""

    seconds: float  #: until all of its servers were up
    wire: int       #: bytes that came over the links of its hosts
    disk: int       #: bytes on their disks when all of its servers were up


class Figures:
    """Figures by part, link, case and way, one for each round."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int | None, str],
                         dict[str, list[Taken]]] = {}

    def add(self, part: str, link: int | None, case: str, way: str,
            taken: Taken) -> None:
        print(f'  {part}, {named(link)}, {case}, {way}: '
              f'{taken.seconds:.1f} s, {taken.wire / 1e6:.1f} MB, on disk '
              f'{taken.disk / 1e6:.1f} MB', flush=True)
        self._rows.setdefault((part, link, case), {}).setdefault(
            way, []).append(taken)

    def show(self, args: argparse.Namespace) -> None:
        print(f'\n{os.cpu_count()} processors, emulated ones in the servers; '
              f'rounds: {args.rounds}\nimages of 192 MiB, {args.own_mib} MiB '
              'of each its own\n'
              f'{"part":6} {"link":10} {"image":12} {"way":12}'
              f'{"seconds":>9}{"ratio":>7}{"MB":>9}{"ratio":>7}{"disk MB":>9}')
        for (part, link, case), ways in self._rows.items():
            if any(len(found) < args.rounds for found in ways.values()):
                continue    # interrupted
            for way, found in ways.items():
                seconds, wire = (
                    [(one[which], plain[which]) for one, plain in zip(
                        found, ways['plain'])] for which in (0, 1))
                disk_bytes = statistics.median(one.disk for one in found)
                print(f'{part:6} {named(link):10} {case:12} {way:12}'
                      f'{median(seconds):9.1f}{ratio(seconds):7.2f}'
                      f'{median(wire) / 1e6:9.1f}{ratio(wire):7.3f}'
                      f'{disk_bytes / 1e6:9.1f}')

    def plot(self, path: str) -> None:
        """Draw the seconds of the storms."""
        storms = {(link, case): ways for (part, link, case), ways
                  in self._rows.items() if part == 'storm'}
        plot.bars(
            [f'{named(link)}, {case}' for link, case in storms],
            {way: [statistics.median(one.seconds for one in ways[way])
                   if way in ways else None for ways in storms.values()]
             for way in WAYS},
            'seconds until all are up', f'{SERVERS} servers at once', path)


def named(link: int | None) -> str:
    return f'{link} Mbit/s' if link else 'no limit'


def median(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(one for one, _ in pairs)


def ratio(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(one / plain for one, plain in pairs)


# -- hosts --------------------------------------------------------------------

class Hosts:
    """The hosts of one way.

    :param way: of `WAYS`
    """

    def __init__(self, cloud: local_cloud.Cloud, way: str) -> None:
        self._cloud = cloud
        self._hosts = [cloud.hosts[name] for name in WAYS[way]]
        self.computes = [cloud.services[f'{name}/nova-compute']
                         for name in WAYS[way]]
        self.caches = [cloud.services[f'{host.name}/dedupd']
                       for host in self._hosts if host.cache]
        self._bases = [dedupd.NovaBase(cloud, cache, 'admin')
                       for cache in self.caches if way == 'links']
        self._linked = contextlib.ExitStack()

    def limit(self, mbit: int | None) -> None:
        for host in self._hosts:
            host.limit(mbit)

    def forget(self, trusted: bool = False) -> None:
        """Empty all caches."""
        self._linked.close()
        for compute in self.computes:
            compute.forget_images()
        for cache, base in itertools.zip_longest(self.caches, self._bases):
            cache.restart_empty(trusted or bool(base),
                                base.options if base else {})
        for base in self._bases:
            self._linked.enter_context(base)

    def wait_for_links(self, images: list[str]) -> None:
        """Wait until Nova finds these images, where it does."""
        for base in self._bases:
            for image in images:
                base.link(image)

    def close(self) -> None:
        """End the parts that are not the cloud's."""
        self._linked.close()

    def disk(self) -> int:
        """Bytes of the images, the servers and the cache on the disks."""
        places = [compute.instances for compute in self.computes]
        places += [cache.repository for cache in self.caches]
        return sum(
            os.lstat(os.path.join(directory, name)).st_blocks * 512
            for place in places for directory, _, names in os.walk(place)
            for name in names)

    def received(self) -> int:
        return sum(host.received() for host in self._hosts)

    def start(self, connections: list[Any], images: list[str]) -> Taken:
        """Start a server of each image, on each host in turn."""
        self.wait_for_links(images)
        jobs = [(self.computes[number % len(self.computes)], connection,
                 image) for number, (connection, image) in enumerate(
                     zip(connections, images))]
        before = self.received()
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            found = list(pool.map(
                lambda job: boot_benchmark.start_one(*job), jobs))
        taken = Taken(max(seconds for _, seconds in found),
                      self.received() - before, self.disk())
        for connection, (server, _) in zip(connections, found):
            boot.delete(connection, server)
        for compute in self.computes:
            compute.forget_images()
        return taken


# -- servers without Nova -----------------------------------------------------

class Bare:
    """A server on a host, of a disk that is a layer over something.

    :param host: where it runs
    """

    def __init__(self, host: Any, directory: str) -> None:
        self._host = host
        self._place = pathlib.Path(directory)

    def copied(self, url: str, token: str, image: str) -> float:
        """Download the image, and start; return the seconds until it is up."""
        began = time.perf_counter()
        copy = self._place / 'copy'
        self._run('curl', '--silent', '--fail', '--output', copy, '--header',
                  f'X-Auth-Token: {token}', f'{url}/v2/images/{image}/file')
        self._start(str(copy))
        copy.unlink()
        return time.perf_counter() - began

    def exported(self, socket: pathlib.Path, image: str) -> float:
        """Start over NBD at once; return the seconds until it is up."""
        began = time.perf_counter()
        self._start(f'nbd+unix:///{image}?socket={socket}')
        return time.perf_counter() - began

    def _run(self, *command: Any) -> None:
        subprocess.run([*self._host.enter(), *map(str, command)], check=True,
                       timeout=LIMIT, env={'PATH': cloud_service.path()})

    def _start(self, below: str) -> None:
        """Start a server, and end it when it is up."""
        layer, console = self._place / 'layer', self._place / 'console'
        self._run('qemu-img', 'create', '-q', '-f', 'qcow2', '-F', 'raw',
                  '-b', below, layer)
        process = subprocess.Popen([
            *self._host.enter(), 'qemu-system-x86_64', '-accel', 'tcg',
            '-m', '128', '-display', 'none', '-serial', f'file:{console}',
            '-drive', f'file={layer},if=virtio'],
            stdin=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + LIMIT
            while not (console.exists() and boot.read(
                    console.read_text(errors='replace'))):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f'a server from {below} is not up')
                time.sleep(POLL)
        finally:
            process.kill()
            process.wait(LIMIT)
            layer.unlink()
            console.unlink(missing_ok=True)


# -- the parts ----------------------------------------------------------------

class Benchmark:
    """A cloud with images in it.

    :param connections: one for each server of a storm
    """

    def __init__(self, cloud: local_cloud.Cloud, connections: list[Any],
                 args: argparse.Namespace) -> None:
        self._cloud = cloud
        self._connections = connections
        self._args = args
        self._hosts = {way: Hosts(cloud, way) for way in WAYS}
        self._images: list[str] = []
        self.figures = Figures()

    def upload(self) -> None:
        path = os.path.join(self._cloud.directory, 'tmp', 'image')
        for number in range(SERVERS):
            message = f'image {number}'
            disk_images.variant(disk_images.images().raw, path, message,
                                self._args.own_mib)
            self._images.append(boot.upload(
                self._connections[0], path, message))
        os.unlink(path)

    def close(self) -> None:
        """End the parts that are not the cloud's."""
        for hosts in self._hosts.values():
            hosts.close()

    def run(self) -> None:
        for number in range(self._args.rounds):
            ways = sorted(WAYS, reverse=not number % 2)
            for part in self._args.part:
                print(f'round {number + 1} of {self._args.rounds}: {part}',
                      flush=True)
                getattr(self, part)(ways)

    def start(self, ways: list[str]) -> None:
        cases = dict(zip(('first', 'similar', 'again'),
                         (self._images[0], *[self._images[1]] * 2)))
        for link in LINKS:
            for way in ways:
                hosts = self._hosts[way]
                hosts.limit(link)
                hosts.forget()
                for case, image in cases.items():
                    self.figures.add('start', link, case, way, hosts.start(
                        self._connections, [image]))

    def storm(self, ways: list[str]) -> None:
        for link in filter(None, LINKS):
            for case, images in (('one', [self._images[0]] * SERVERS),
                                 ('8 similar', self._images)):
                for way in ways:
                    hosts = self._hosts[way]
                    hosts.limit(link)
                    hosts.forget()
                    self.figures.add('storm', link, case, way, hosts.start(
                        self._connections, images))

    def lazy(self, ways: list[str]) -> None:
        link = LINKS[0]
        image = self._images[0]
        token = self._connections[0].session.get_token()
        with tempfile.TemporaryDirectory(dir=self._args.dir) as directory:
            for way in ('plain', 'cache', 'NBD'):
                hosts = self._hosts.get(way) or self._hosts['cache']
                hosts.limit(link)
                # No client has a token over NBD.
                hosts.forget(trusted=True)
                bare = Bare(hosts.computes[0].host, directory)
                cache = next(iter(hosts.caches), self._cloud.glance)
                before = hosts.received()
                seconds = (bare.exported(cache.nbd_socket, image)
                           if way == 'NBD'
                           else bare.copied(cache.url, token, image))
                self.figures.add('lazy', link, 'first', way, Taken(
                    seconds, hosts.received() - before, hosts.disk()))


# -- all of it ----------------------------------------------------------------

PARTS = ('start', 'storm', 'lazy')


def parse() -> argparse.Namespace:
    parser = common.arguments(
        __doc__, rounds=1,
        own_mib=(8, 'MiB of each image that are in no other'))
    parser.add_argument('--part', action='append', choices=PARTS,
                        help='may be repeated (default: all)')
    plot.argument(parser)
    args = parser.parse_args()
    args.part = args.part or PARTS
    if os.geteuid() != 0:
        parser.error('only root can make networks')
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix='cloud-') as place:
        directory = os.path.join(place, 'cloud')
        hosts = {name: way != 'plain' for way, names in WAYS.items()
                 for name in names}
        with contextlib.ExitStack() as stack:
            cloud = stack.enter_context(local_cloud.Cloud(
                directory, hosts=hosts, say=print))
            cloud.up()
            connections = [stack.enter_context(contextlib.closing(
                cloud.connect())) for _ in range(SERVERS)]
            for connection in connections:
                connection.authorize()
            benchmark = Benchmark(cloud, connections, args)
            print('upload the images', flush=True)
            benchmark.upload()
            try:
                benchmark.run()
            finally:
                benchmark.close()
                benchmark.figures.show(args)
                if args.plot:
                    benchmark.figures.plot(args.plot)


if __name__ == '__main__':
    main()
