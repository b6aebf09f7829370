# SPDX-License-Identifier: Apache-2.0

"""Measure the memory that the store's processes take.

Run it from a checkout in which the extension is built::

    python benchmarks/memory.py [--mib 512] [--clients 4] [--dir DIR]

It shows, each in a process of its own:

* the growth of a process's peak memory by an upload through the driver, of
  data half of which can be compressed away, and by a download, directly and
  through the daemon; from when the store is configured; of one client, and of
  several at once;
* the daemon's memory: when it is idle, when it has served these downloads,
  when it has merged and collected, and when it has scrubbed.

A page of several processes counts in part as *proportional*, and whole as
*resident*; the filter is mapped, and counted where it is used.  Its size here
is 1 MiB.  No figure passes or fails.
"""

import json
import os
import shutil
import sys
import time

import common
from common import MIB
from glance_store import location
import upload

from glance_dedup.client import daemon_client
from glance_dedup.driver import dedup_store


class Bench(upload.Bench):
    """A store in this process, and the measured operations."""

    def __init__(self, directory: str, socket: str):
        super().__init__(directory)
        self.conf.set_override('dedup_store_dedupd_socket', socket,
                               group='lz4')
        self._store = self.open('lz4', os.path.join(directory, 'store'),
                                filter_mib=1)

    def uploads(self, clients: str, source: str) -> list[str]:
        """Upload a file, each client its part of it."""
        return self.upload(self._store, self.parts(source, int(clients)))

    def twins(self, source: str) -> list[str]:
        """Upload a file twice at once: neither finds the other's blocks."""
        return self.upload(self._store, self.parts(source, 1) * 2)

    def downloads(self, *urls: str) -> None:
        common.all_at_once(self._read, [(url,) for url in urls])

    def _read(self, url: str) -> None:
        place = location.Location('dedup', dedup_store.StoreLocation,
                                  self.conf, uri=url)
        pieces, size = self._store.get(place)
        for piece in pieces:
            size -= len(piece)
        if size:
            raise SystemExit('a download was cut off')


def probe(what: str, directory: str, socket: str, *arguments: str) -> None:
    """Do one thing in this process; print its growth and the result."""
    do = getattr(Bench(directory, socket), what)
    before = common.memory().resident
    common.forget_peak()
    result = do(*arguments)
    json.dump([common.memory().peak - before, result], sys.stdout)


def show_growth(name: str, growth: int) -> None:
    print(f'{name:42}{growth / MIB:9.1f}', flush=True)


def show_memory(name: str, pid: int) -> None:
    found = common.memory(pid)
    print(f'{name:42}' + ''.join(f'{size / MIB:9.1f}' for size in (
        found.peak, found.resident, found.proportional)), flush=True)


def daemon_at_work(directory: str, images: list[str]) -> None:
    path = os.path.join(directory, 'store')
    with common.daemon(directory, path, filter_mib=1,
                       scrub_rate_mib=0) as (address, pid):
        time.sleep(3)
        show_memory('dedupd, idle', pid)
        for urls in (images[:1], images):
            growth, _ = common.in_a_process(
                __file__, 'downloads', directory,
                address.removeprefix('unix:'), *urls)
            show_growth(f'download through dedupd, {len(urls)} at once',
                        growth)
        show_memory('dedupd, after these', pid)
        with daemon_client.Client(address) as far:
            for task in ('merge', 'collect', 'scrub'):
                far.wait(task, far.start(task))
                show_memory(f'dedupd, after {task}', pid)
        time.sleep(5)
        show_memory('dedupd, idle again', pid)


def main() -> None:
    if sys.argv[1:2] == ['--probe']:
        return probe(*sys.argv[2:])
    args = common.arguments(__doc__, mib=512,
                            clients=(4, 'how many at once')).parse_args()
    with common.place(args.dir) as d:
        d = os.path.abspath(d)
        source = os.path.join(d, 'source')
        upload.write_out(source, upload.half_random(args.mib * MIB))
        print(f'{"MiB":42}{"growth":>9}')
        for clients in (1, args.clients):
            shutil.rmtree(os.path.join(d, 'store'), ignore_errors=True)
            os.mkdir(os.path.join(d, 'store'), 0o700)
            growth, images = common.in_a_process(
                __file__, 'uploads', d, '', clients, source)
            show_growth(f'upload, {clients} at once', growth)
            growth, _ = common.in_a_process(__file__, 'downloads', d, '',
                                            *images)
            show_growth(f'download, {clients} at once', growth)
        upload.write_out(source, os.urandom(args.mib * MIB // 2))
        common.in_a_process(__file__, 'twins', d, '', source)
        print(f'\n{"MiB":42}{"peak":>9}{"resident":>9}{"proport.":>9}')
        daemon_at_work(d, images)


if __name__ == '__main__':
    main()
