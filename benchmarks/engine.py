# SPDX-License-Identifier: Apache-2.0

"""Measure the engine's speed, beside the machine's limits.

Run it from a checkout in which the extension is built::

    python benchmarks/engine.py [--mib 512] [--rounds 3] [--dir DIR] [IMAGE..]

It shows, each as the median of the rounds with the lowest and highest, and as
a ratio to its reference, which is measured in the same round, just before:

* storing unique data (incompressible, codec none), against ``cp`` plus fsync
  of the same bytes on the same disk, before and after it (a virtual machine
  writes slowly into memory that it has not touched before);
* storing the same again (every block a duplicate), against the rate at which
  all processors together compute the repository's digest;
* storing zeros, and reading an image back, against memcpy;
* the same incompressible data stored with each codec, against codec none, by
  rate and by the processor time outside the kernel, where memory that was not
  touched before does not count; and the bytes of the named images that are not
  zeros;
* the peak memory that storing takes, beside the filter;
* bytes of filter per million blocks, of metadata per GiB;
* for the images named: the stored bytes, and the inline path's share of the
  savings that an exact deduplication would reach.

DIR (default: a directory beside the current one's files) decides which disk is
measured. No figure passes or fails.
"""

import concurrent.futures
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import common
from common import GIB
from common import MIB
from common import PIECE
from common import timed


def hash_all_cores(data):
    """Compute the digest of each MiB, on a thread for each processor."""
    pieces = [memoryview(data)[i:i + MIB] for i in range(0, len(data), MIB)]
    with concurrent.futures.ThreadPoolExecutor(
            len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(lambda p: hashlib.sha256(p).digest(), pieces):
            pass


def copy_memory(data):
    target = bytearray(PIECE)
    view = memoryview(data)
    for i in range(0, len(data), PIECE):
        piece = view[i:i + PIECE]
        target[:len(piece)] = piece


def copy_and_sync(source, target):
    with open(source, 'rb') as read, open(target, 'wb') as write:
        while piece := read.read(PIECE):
            write.write(piece)
        write.flush()
        os.fsync(write.fileno())


def one_round(table, directory, data, source):
    """Take all measurements once, in a repository of its own."""
    size = len(data)
    target = os.path.join(directory, 'copy')
    with common.new_repository(directory) as repo:
        table.add('memcpy', size, timed(copy_memory, data))
        table.add('sha256 on all processors', size,
                  timed(hash_all_cores, data))
        table.add('cp plus fsync', size,
                  timed(copy_and_sync, source, target))
        os.unlink(target)
        table.add('store unique', size, timed(common.store, repo, 'one', data))
        table.add('cp plus fsync', size,
                  timed(copy_and_sync, source, target))
        os.unlink(target)
        table.compare('store unique', 'cp plus fsync', 2)
        table.add('store duplicates', size,
                  timed(common.store, repo, 'two', data),
                  'sha256 on all processors')
        zeros = itertools.repeat(bytes(PIECE), 4 * size // PIECE)
        table.add('store zeros', 4 * size,
                  timed(common.store, repo, 'zeros', zeros), 'memcpy')
        table.add('read back (page cache)', size,
                  timed(common.read_back, repo, 'one'), 'memcpy')
        figures = repo.statistics()
        recipe = os.path.getsize(os.path.join(repo.path, 'images', 'one'))
        groups = pathlib.Path(repo.path, 'groups').iterdir()
        stored = repo.stat('one').new_bytes
        metadata = sum(os.path.getsize(g) for g in groups) - stored + recipe
    return figures, metadata / (stored / GIB)


PROBE = '''
import json, sys
import common
from glance_dedup.repository import image_repository

def peak():
    return common.memory().peak

path, filter_dir, source = sys.argv[1:]
image_repository.Repository.create(path)
repo = image_repository.Repository(path, codec='lz4', filter_dir=filter_dir,
                             filter_mib=1)
before = peak()
with repo, open(source, 'rb') as stream:
    repo.put('one', stream)
    stored = peak()
    common.read_back(repo, 'one')
print(json.dumps([stored - before, peak() - before]))
'''


def peak_memory(directory, source):
    """Return a fresh process's peak growth by storing, then by reading."""
    path = os.path.join(directory, 'memory')
    env = {**os.environ,
           'PYTHONPATH': os.path.join(common.TOP, 'benchmarks')}
    done = subprocess.run(
        [sys.executable, '-c', PROBE, path, directory, source], env=env,
        check=True, capture_output=True, timeout=600)
    shutil.rmtree(path)
    return json.loads(done.stdout)


def codecs(table, directory, title, data):
    """Stores the same data with each codec, in repositories of their own."""
    reference = None
    for codec in ('none', 'lz4', 'zstd'):
        name = f'store {title}, {codec}'
        with common.new_repository(directory, codec=codec,
                                   warm=len(data)) as repo:
            user = os.times().user
            spent = timed(common.store, repo, 'one', data)
            user = os.times().user - user
        table.add(name, len(data), spent, reference)
        table.figure(f'{name}: user mode', user / (len(data) / GIB), 's/GiB',
                     reference and f'{reference}: user mode')
        reference = reference or name


def real_images(directory, images):
    """Stores the images, and compares with an exact deduplication."""
    unique, nonzero = common.exact_unique(images)
    print(f'\nimages: {nonzero / MIB:.0f} MiB non-zero, exact deduplication '
          f'keeps {unique / nonzero:.1%}')
    for codec in ('none', 'lz4', 'zstd'):
        with common.new_repository(directory, codec=codec) as repo:
            for i, image in enumerate(images):
                repo.put(f'image-{i}', image)
            stats = [repo.stat(i) for i in repo.images()]
            new = sum(s.new_bytes for s in stats)
            stored = sum(s.stored_bytes for s in stats)
            counts = repo.statistics()
        share = (nonzero - new) / (nonzero - unique) if nonzero > unique else 1
        print(f'  {codec:5} stored {stored / nonzero:6.1%} of non-zero, '
              f'inline share of the exact savings {share:.2%}, '
              f'{counts["cold_loads"]} cold loads, '
              f'{counts["capped_loads"]} left out')


def main():
    args = common.arguments(__doc__, mib=512, rounds=3,
                            paths='*').parse_args()
    with common.place(args.dir) as d:
        data = os.urandom(args.mib * MIB)
        source = os.path.join(d, 'source')
        with open(source, 'wb') as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        images = b''.join(itertools.islice(
            common.used_blocks(*args.paths), len(data) // 4096))
        table = common.Table()
        for _ in common.count_rounds(args.rounds):
            figures, metadata = one_round(table, d, data, source)
            codecs(table, d, 'noise', data)
            if images:
                codecs(table, d, 'images', images)
        table.show()
        storing, reading = peak_memory(d, source)
        print(f'\npeak memory of storing {storing / MIB:.0f} MiB, of storing '
              f'and then reading {reading / MIB:.0f} MiB (codec lz4, filter '
              f'included: 1 MiB)')
        print(f'filter: 8 bytes a hint, {8e6 / 0.875 / MIB:.1f} MiB per '
              f'million blocks at level 0 when 7/8 full, half of it with each '
              f'level; now level {figures["filter_level"]}, '
              f'{figures["filter_hints"]} hints')
        print(f'metadata: {metadata / MIB:.2f} MiB per GiB stored without '
              f'compression')
        if args.paths:
            real_images(d, args.paths)


if __name__ == '__main__':
    main()
