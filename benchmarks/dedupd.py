# SPDX-License-Identifier: Apache-2.0

"""Measure the daemon and the maintainer beside plain programs.

Run it from a checkout in which the extension is built::

    python benchmarks/dedupd.py [--mib 512] [--rounds 3] [--dir DIR]

It shows, as medians with the lowest and highest of the rounds, and as ratios
to a reference of the same round:

* reading an image through the daemon's socket, directly, and a plain file with
  ``cat``: with everything in the page cache, and with nothing in it;
* eight readers of eight similar images at once, against eight plain files,
  with nothing in the page cache, and the bytes that came from the disk;
* counting, collecting and merging: logical bytes and entries per second;
* the loss of a running upload while all of that runs beside it;
* scrubbing, against reading the same files with ``cat``;
* pulling an image of which most is there: bytes sent against bytes missing;
* the catalog's bytes per million blocks, the memory of an idle daemon.

DIR (default: the current directory) decides which disk is measured. Emptying
the page cache needs root; without it the figures called cold are left out. No
figure passes or fails.
"""

import os
import random
import sys
import threading
import time

import common
from common import MIB
from common import PIECE
from common import timed

from dedupd.tasks import accounting
from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import scrubber
from glance_dedup.base import pacing
from glance_dedup.client import daemon_client
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository
from glance_dedup.transfer import pull

READERS = 8


def bytes_read():
    """Return the bytes that came from any disk so far."""
    total = 0
    with open('/proc/vmstat') as f:
        for line in f:
            if line.startswith('pgpgin '):
                total = int(line.split()[1]) * 1024
    return total


def similar_images(directory, size, count):
    """Make files that share 7/8 of their blocks, in runs of 64 KiB."""
    rng = random.Random(1)
    run = 65536
    base = [rng.randbytes(run // 2) * 2 for _ in range(size // run)]
    paths = []
    for number in range(count):
        path = os.path.join(directory, f'plain-{number}')
        with open(path, 'wb') as f:
            for i, piece in enumerate(base):
                own = i % 8 == number % 8
                f.write(rng.randbytes(run // 2) * 2 if own else piece)
            f.flush()
            os.fsync(f.fileno())
        paths.append(path)
    return paths


# -- reading ------------------------------------------------------------------

def reading(table, directory, repo, address, plain, cold):
    size = os.path.getsize(plain[0])

    def measure(name, of, function, *args):
        table.add(name, size, timed(function, *args), of)

    common.cat(plain[0])
    common.read_back(repo, 'image-0')
    common.read_from_daemon(address, 'image-0')
    measure('warm: cat of a plain file', None, common.cat, plain[0])
    measure('warm: direct', 'warm: cat of a plain file', common.read_back,
            repo, 'image-0')
    measure('warm: through the socket', 'warm: direct',
            common.read_from_daemon, address, 'image-0')
    if not cold:
        return
    last = len(plain) - 1
    common.empty_page_cache()
    measure('cold: cat of a plain file', None, common.cat, plain[last])
    common.empty_page_cache()
    measure('cold: direct', 'cold: cat of a plain file', common.read_back,
            repo, f'image-{last}')
    common.empty_page_cache()
    measure('cold: through the socket', 'cold: direct',
            common.read_from_daemon, address, f'image-{last}')

    def many(name, function, arguments, of=None):
        common.empty_page_cache()
        before = bytes_read()
        table.add(name, len(arguments) * size,
                  timed(common.all_at_once, function, arguments), of)
        table.figure(f'{name}: from disk', (bytes_read() - before) / MIB,
                     'MiB')

    many('eight plain files', common.cat, [(p,) for p in plain])
    many('eight images, direct', common.read_back,
         [(repo, f'image-{i}') for i in range(len(plain))],
         of='eight plain files')
    many('eight images, socket', common.read_from_daemon,
         [(address, f'image-{i}') for i in range(len(plain))],
         of='eight plain files')


# -- maintenance --------------------------------------------------------------

def store_twice(repo, data):
    """Store two images at once, which cannot find each other's blocks."""
    view = memoryview(data)
    with repo.begin('one') as one, repo.begin('two') as two:
        for i in range(0, len(view), PIECE):
            one.write(view[i:i + PIECE])
            two.write(view[i:i + PIECE])
        one.commit()
        two.commit()


def maintenance(table, directory, size):
    data = os.urandom(size)
    pace = pacing.Pace()
    with common.new_repository(directory, 'maintained') as repo:
        path = repo.path
        with maintainer_role.Maintainer(repo) as keeper:
            store_twice(repo, data)
            spent = timed(accounting.run_once, keeper, pace).wall
            table.figure('counting', 2 * size / spent / 1e9, 'GB/s logical')
            spent, _, _, result = timed(merger.run_once, keeper, pace)
            table.figure('merging', result.merged_blocks / spent / 1e6,
                         'million blocks/s merged')
            table.figure('merging: scanning', result.scanned / spent / 1e6,
                         'million entries/s')
            empty = collector.run_once(keeper, pace)
            blocks = size // 4096
            table.figure('catalog', keeper.catalog.disk_bytes() / blocks,
                         'MB per million blocks')
            before = bytes_on_disk(path)
            table.add('scrub', before,
                      timed(scrubber.run_once, keeper, pace))
            repo.delete('one')
            repo.delete('two')
            spent, _, _, result = timed(collector.run_once, keeper, pace)
            table.figure('collecting', 2 * size / spent / 1e9, 'GB/s logical')
            table.figure('collecting: space back',
                         (before - bytes_on_disk(path)) / before,
                         'of the disk')
            del empty, result


def bytes_on_disk(path):
    return sum(os.stat(os.path.join(path, 'groups', name)).st_blocks * 512
               for name in os.listdir(os.path.join(path, 'groups')))


def beside_upload(table, directory, size):
    """Measure an upload's rate alone, and beside maintenance."""
    with common.new_repository(directory, 'shared') as repo:
        common.store(repo, 'first', os.urandom(size))
        table.add('upload alone', size,
                  timed(common.store, repo, 'alone', os.urandom(size)))
        stop = threading.Event()
        with (image_repository.Repository(repo.path,
                                          filter_dir=directory) as other,
              maintainer_role.Maintainer(other) as keeper):

            def work():
                while not stop.is_set():
                    pace = pacing.Pace(rate=64 * MIB)
                    for run in (collector.run_once, merger.run_once,
                                scrubber.run_once):
                        if not stop.is_set():
                            run(keeper, pace)

            thread = threading.Thread(target=work)
            thread.start()
            try:
                spent = timed(common.store, repo, 'beside', os.urandom(size))
            finally:
                stop.set()
                thread.join()
        table.add('upload beside maintenance', size, spent, 'upload alone')


def pulling(table, directory, address, plain):
    """Pull two similar images into an empty repository."""
    with common.new_repository(directory, 'puller', codec='lz4') as repo:
        far = daemon_client.Client(address)
        pull.pull(repo, 'image-0', far)
        spent = timed(pull.pull, repo, 'image-1', far)
        size = os.path.getsize(plain[1])
        table.add('pull of a similar image', size, spent)
        table.figure('pull: received of missing',
                     spent.result.received_bytes / (size / 4),
                     '(1: nothing spared)')


def one_round(table, directory, size, cold):
    plain = similar_images(directory, size // READERS, READERS)
    with common.new_repository(directory, codec='lz4') as repo:
        for number, file in enumerate(plain):
            repo.put(f'image-{number}', file)
        with common.daemon(directory, repo.path) as (address, pid):
            time.sleep(1)
            table.figure('daemon: memory when idle',
                         common.memory(pid).resident / MIB, 'MiB')
            reading(table, directory, repo, address, plain, cold)
            pulling(table, directory, address, plain)
            table.figure('daemon: memory after reading',
                         common.memory(pid).resident / MIB, 'MiB')
    maintenance(table, directory, size)
    beside_upload(table, directory, size)


def main():
    args = common.arguments(__doc__, mib=512, rounds=3).parse_args()
    cold = common.can_empty_page_cache()
    if not cold:
        print('the page cache cannot be emptied: no cold figures',
              file=sys.stderr)
    table = common.Table()
    for _ in common.count_rounds(args.rounds):
        with common.place(args.dir) as d:
            one_round(table, d, args.mib * MIB, cold)
    table.show()


if __name__ == '__main__':
    main()
