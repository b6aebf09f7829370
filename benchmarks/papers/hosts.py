# SPDX-License-Identifier: Apache-2.0

"""Measure the savings of hosts that store images in one directory.

Run it from a checkout in which the extension is built, as root; gcc and the
headers of FUSE are needed::

    python benchmarks/papers/hosts.py [--hosts 4] [--images 24] [--mib 64]
        [--interval 5] [--dir DIR] [--filter-dir /dev/shm] [IMAGE...]

Each host has a mount of the directory (``tests/sharedfs``): a client with page
cache, names and locks of its own, which keeps names and attributes for longer
than this runs. So a host only gets the changes of others that it requests. On
each host run a dedupd, by which the host's filter follows the others, and a
process that stores images, both with that filter. The images are stored

* *in turn*: each by the next host, when that host has scanned the groups
  stored before. This is as if the images came further apart than the scans;
* *at once*: all hosts begin together, and each stores its share without a
  pause. Blocks that several of them store between two scans are stored several
  times.

Then the daemon that is the maintainer merges. Shares are of the bytes that are
not zeros, without compression. Without IMAGE, the benchmark makes images: they
are of one release and have aged, and each differs from it in a seventh of its
blocks.
"""

import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import _path  # noqa: F401  finds the modules beside it
import common
from common import MIB
import equalblocks
import exactindex

from glance_dedup.repository import image_repository
from tests.sharedfs import fuse_hosts
from tests.support import daemons

BLOCK = 4096
HOSTS = 4
#: Seconds that a host may take to scan the groups that others stored.
LIMIT = 300
#: Seconds for which names and attributes are trusted.
REMEMBERED = 3600
ORDERS = ('in turn', 'at once')

DAEMON = '''
from dedupd import daemon
from dedupd.sync import filter_follower
import sys
filter_follower.INTERVAL = {}
sys.exit(daemon.main())
'''

STORE = '''
from glance_dedup.repository import image_repository
import json
import sys

path, filters = sys.argv[1:]
with image_repository.Repository(
        path, codec='none', filter_dir=filters) as repo:
    repo.filter.attach(repo.handle())
    while repo.follow():
        pass
    print('null', flush=True)
    for line in sys.stdin:
        stat = repo.put(*json.loads(line))
        print(json.dumps([stat.size - stat.zero_bytes, stat.new_bytes]),
              flush=True)
'''


class Kept(NamedTuple):
    """The results of storing the images; sizes are in bytes."""

    named: list[int]    #: not zeros, after each image
    stored: list[int]   #: blocks, after each image
    merged: int         #: by merging, in the end
    seconds: float      #: that merging took
    index: int
    catalog: int

    @property
    def left(self) -> int:
        """Return the bytes that are kept in the end."""
        return self.stored[-1] - self.merged


def made_images(directory: str, count: int, mib: int) -> list[str]:
    """Images of one release that have aged, each in another way."""
    rng = random.Random(1)
    release = [rng.randbytes(BLOCK) for _ in range(mib * MIB // BLOCK)]
    paths = []
    for number in range(count):
        image = list(release)
        for _ in range(12 * mib // 4):  # files that were written
            at = rng.randrange(len(image) - 24)
            length = rng.randrange(1, 24)
            image[at:at + length] = [rng.randbytes(BLOCK)
                                     for _ in range(length)]
        paths.append(os.path.join(directory, f'release-{number}.raw'))
        with open(paths[-1], 'wb') as f:
            f.writelines(image)
    return paths


# -- a host -------------------------------------------------------------------

class Host:
    """The processes on a mount: a daemon, and one that stores images.

    :param interval: seconds between two scans of the daemon
    """

    def __init__(self, mount: fuse_hosts.Host, filters: str,
                 interval: float) -> None:
        self._path = os.path.join(mount.root, 'repository')
        self._filters = filters
        self.daemon = daemons.Daemon(self._path, filter_dir=filters,
                                     filter_mib=None)
        self.daemon.program = ['-c', DAEMON.format(interval)]

    def __enter__(self) -> 'Host':
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.daemon).start()
            self._storing = stack.enter_context(subprocess.Popen(
                [sys.executable, '-c', STORE, self._path, self._filters],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, 'PYTHONPATH': common.TOP}))
            stack.callback(self._storing.kill)
            self.answer()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info) -> None:
        self._stack.close()

    def store(self, image_id: str, source: str) -> None:
        """Begin to store an image; :meth:`answer` waits for its end."""
        json.dump([image_id, source], self._storing.stdin)
        self._storing.stdin.write('\n')
        self._storing.stdin.flush()

    def answer(self) -> list[int]:
        """Bytes of the next image that are not zeros, and new ones."""
        line = self._storing.stdout.readline()
        if not line:
            raise SystemExit('a process that stores images has failed')
        return json.loads(line)

    def wait_for_scan(self, moment: float) -> None:
        """Wait until the daemon has scanned the groups since a moment.

        :param moment: by time.monotonic()
        """
        while True:
            asked = time.monotonic()
            if asked > moment + LIMIT:
                raise SystemExit('a daemon does not look at what others '
                                 f'stored: {self.daemon.text()}')
            looked = self.daemon.status()['filter'][
                'filter_refresh_age_seconds']
            if looked is not None and asked - looked > moment:
                return
            time.sleep(0.02)


# -- storing ------------------------------------------------------------------

def in_turn(hosts: list[Host], images: list[str]) -> list[list[int]]:
    """Store one image after the other; return each host's answer."""
    answers, moment = [], time.monotonic()
    for number, path in enumerate(images):
        host = hosts[number % len(hosts)]
        host.wait_for_scan(moment)
        host.store(f'image-{number}', path)
        answers.append(host.answer())
        moment = time.monotonic()
    return answers


def at_once(hosts: list[Host], images: list[str]) -> list[list[int]]:
    """Store all images, each host its part; return the hosts' answers."""
    for number, path in enumerate(images):
        hosts[number % len(hosts)].store(f'image-{number}', path)
    return [hosts[number % len(hosts)].answer()
            for number in range(len(images))]


def merge(maintainer: daemons.Daemon) -> dict:
    """Have the maintainer merge; return the result."""
    done = maintainer.run('merge')['last']
    result = done['result']
    if done['error'] or result['failed'] or result['busy']:
        raise SystemExit(f'not all was merged: {done}')
    return done


def store(order: str, images: list[str], directory: str, filters: str,
          count: int = HOSTS, interval: float = 5.0) -> Kept:
    """Store images on hosts, then merge."""
    with contextlib.ExitStack() as stack:
        place = pathlib.Path(stack.enter_context(
            tempfile.TemporaryDirectory(dir=directory, prefix='hosts-')))
        own = stack.enter_context(
            tempfile.TemporaryDirectory(dir=filters, prefix='hosts-'))
        found = stack.enter_context(fuse_hosts.hosts(
            place, count, names=REMEMBERED, attributes=REMEMBERED))
        image_repository.Repository.create(found[0].root / 'repository')
        hosts = [stack.enter_context(Host(
            mount, os.path.join(own, str(number)), interval))
            for number, mount in enumerate(found)]
        maintainer = hosts[0].daemon.wait_for_catalog()
        named, stored = [0], [0]
        for used, new in (in_turn if order == 'in turn' else at_once)(
                hosts, images):
            named.append(named[-1] + used)
            stored.append(stored[-1] + new)
        done = merge(maintainer)
        return Kept(named, stored, done['result']['merged_bytes'],
                    done['seconds'],
                    exactindex.index_bytes(found[0].backing / 'repository'),
                    maintainer.status()['catalog']['disk_bytes'])


# -- showing ------------------------------------------------------------------

def share(part: float, whole: float) -> float:
    """Return a part's share; 0 of nothing."""
    return part / whole if whole else 0.0


def show(found: dict[str, Kept], exact: int) -> None:
    """Print the bytes that each way keeps.

    :param exact: bytes of the different blocks
    """
    used = next(iter(found.values())).named[-1]

    def figures(size: int) -> str:
        return (f'{size / MIB:13,.1f}{share(size, used):8.1%}'
                f'{share(used - size, used - exact):16.2%}')

    print(f'{"":32}{"inline, MiB":>13}{"kept":>8}{"of the savings":>16}'
          f'{"merged, MiB":>13}{"kept":>8}{"of the savings":>16}{"s":>8}')
    for name, of in found.items():
        print(f'{name:32}{figures(of.stored[-1])}{figures(of.left)}'
              f'{of.seconds:8.2f}', flush=True)


def main() -> None:
    args = common.arguments(
        __doc__, mib=64, paths='*', filter_dir=True,
        hosts=(HOSTS, 'how many'), images=(24, 'that are made'),
        interval=(5.0, 'seconds between looks')).parse_args()
    with common.place(args.dir) as d:
        images = args.paths or made_images(d, args.images, args.mib)
        exact = equalblocks.analyse(images, d).blocks.kept * BLOCK
        show({f'{args.hosts} hosts, {order}': store(
            order, images, d, args.filter_dir, args.hosts, args.interval)
            for order in ORDERS}, exact)


if __name__ == '__main__':
    main()
