# SPDX-License-Identifier: Apache-2.0

"""Measure the work of a disk with a head, which an SSD hides.

Run it from a checkout in which the extension is built::

    python benchmarks/disk.py [--versions 4] [--dir DIR] IMAGE...

It stores the images, and later versions of each, one after the other; in a
version a share of the blocks differs, in runs of 4 KiB to 1 MiB. Then it shows
for each codec the requests to the disk, after planning, with nothing cached:

* look-ups: fingerprint stores, while an image is stored by a process of its
  own;
* reading an image from end to end;
* reading ranges of 64 KiB, somewhere in it;

as reads, seeks and bytes per image; the seconds that a disk of the model needs
for them (``--seek-ms``, ``--mb-s``), also for the plain file, and their ratio;
the seconds measured here, likewise. The page cache has nothing of the files
then, but for the line that says so. The seconds of look-ups are those of
storing.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from typing import NamedTuple

import common

from glance_dedup.repository import image_repository

#: Options of a disk, and of :func:`with_versions`.
MODEL = {'seek_ms': (8.5, "of the model's disk"),
         'mb_s': (120.0, 'read or written')}
VERSIONS = {'versions': (4, 'of each image'),
            'changed': (5.0, 'percent, from one version to the next')}

BLOCK = 4096
RANGE = 64 * 1024

#: Stores, or reads, an image in a process of its own.
CHILD = '''
import json, sys, time
from glance_dedup.repository import image_repository

path, filter_dir, codec, what, image_id, source, ranges = sys.argv[1:]
repo = image_repository.Repository(path, codec=codec, filter_dir=filter_dir)
before = repo.statistics()
start = time.perf_counter()
if what == 'store':
    repo.put(image_id, source)
else:
    buffer = bytearray(4 << 20)
    with repo.open_image(image_id) as image:
        if what == 'read':
            offset = 0
            while n := image.readinto(buffer, offset):
                offset += n
        else:
            view = memoryview(buffer)[:65536]
            for offset in json.loads(ranges):
                image.readinto(view, offset)
wall = time.perf_counter() - start
after = repo.statistics()
print(json.dumps([wall, {k: after[k] - before[k] for k in after
                         if isinstance(before[k], int)}]))
'''


class Done(NamedTuple):
    """The requests to a disk, and the seconds that they took here."""

    reads: float
    seeks: float
    bytes: float
    wall: float

    def modelled(self, args) -> float:
        return self.seeks * args.seek_ms / 1e3 + self.bytes / args.mb_s / 1e6


# -- images -------------------------------------------------------------------

def stretches(path: str) -> list[tuple[int, int]]:
    """Return the ranges of a sparse file's data: offsets and ends."""
    found, end = [], 0
    with open(path, 'rb') as f:
        size = os.fstat(f.fileno()).st_size
        while end < size:
            try:
                start = os.lseek(f.fileno(), end, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(f.fileno(), start, os.SEEK_HOLE)
            found.append((start, end))
    return found


def make_version(source: str, target: str, changed: float,
                 rng: random.Random) -> None:
    """Copy an image, and change a share of its blocks in place.

    They get other parts of the image, marked, so that they are new but
    compress as well.
    """
    subprocess.run(['cp', '--sparse=always', source, target], check=True)
    data = stretches(source)
    weights = [end - start for start, end in data]
    left = changed * sum(weights)
    with open(source, 'rb') as old, open(target, 'r+b') as new:
        while left > 0:
            start, end = rng.choices(data, weights)[0]
            offset = rng.randrange(start, end) // BLOCK * BLOCK
            run = min(BLOCK << rng.randrange(9), end - offset)
            old.seek(rng.randrange(start, end) // BLOCK * BLOCK)
            content = bytearray(old.read(run))
            for at in range(0, len(content), BLOCK):
                content[at:at + 8] = rng.randbytes(8)
            new.seek(offset)
            new.write(content[:run])
            left -= run


def with_versions(sources: list[str], versions: int, changed: float,
                  directory: str) -> list[str]:
    """Return the images, and behind them the later versions of each."""
    rng = random.Random(2)
    images = list(sources)
    for version in range(1, versions):
        for i in range(len(sources)):
            name = os.path.join(directory, f'{i}-{version}.raw')
            print(f'making version {version + 1} of image {i + 1}',
                  file=sys.stderr)
            make_version(images[-len(sources)], name, changed / 100, rng)
            images.append(name)
    return images


# -- measuring ----------------------------------------------------------------

def forget(*paths: str) -> None:
    """Have the page cache drop files, and all files below directories."""
    for top in paths:
        files = [top] if os.path.isfile(top) else [
            os.path.join(directory, name)
            for directory, _, names in os.walk(top) for name in names]
        for name in files:
            fd = os.open(name, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def child(directory: str, path: str, codec: str, what: str, image_id: str,
          source: str = '', ranges=()) -> Done:
    counted = 'store' if what == 'store' else 'image'
    done = subprocess.run(
        [sys.executable, '-c', CHILD, path, directory, codec, what, image_id,
         source, json.dumps(ranges)], env={**os.environ, 'PYTHONPATH':
                                           common.TOP},
        check=True, stdout=subprocess.PIPE, timeout=600)
    wall, figures = json.loads(done.stdout)
    return Done(*(figures[f'{counted}_{n}']
                  for n in ('reads', 'seeks', 'bytes')), wall)


def read_plain(path: str, ranges=None) -> None:
    buffer = bytearray(common.PIECE)
    with open(path, 'rb', buffering=0) as f:
        if ranges is None:
            while f.readinto(buffer):
                pass
        for offset in ranges or ():
            f.seek(offset)
            f.readinto(memoryview(buffer)[:RANGE])


def plain(path: str, ranges=None) -> Done:
    """Measure the same of the file itself: one seek, and its bytes."""
    wall = common.timed(read_plain, path, ranges).wall
    if ranges is None:
        return Done(1, 1, os.stat(path).st_blocks * 512, wall)
    return Done(len(ranges), len(ranges), len(ranges) * RANGE, wall)


def some_ranges(path: str, count: int, rng: random.Random) -> list[int]:
    data = [s for s in stretches(path) if s[1] - s[0] > RANGE]
    return [rng.randrange(start, end - RANGE) for start, end in rng.choices(
        data, [end - start for start, end in data], k=count)]


def mean(found: list[Done]) -> Done:
    return Done(*map(statistics.mean, zip(*found)))


def compare(one: float, file: float | None) -> str:
    return f'{one:8.2f}' + (f'{"":13}' if file is None else
                            f'{file:7.2f}{one / file:6.2f}')


def show(name: str, found: list[Done], files: list[Done] | None, args,
         cold: bool = True) -> None:
    """Print the means of images, beside those of the files."""
    one = mean(found)
    file = None if files is None else mean(files)
    line = f'{name:34}' + ' ' * 47
    if cold:
        line = (f'{name:34}{one.reads:8.0f}{one.seeks:8.0f}'
                f'{one.bytes / common.MIB:9.1f} ' + compare(
                    one.modelled(args), file and file.modelled(args)))
    print(f'{line} {compare(one.wall, file and file.wall)}'.rstrip(),
          flush=True)


class Found:
    """The requests for each image: for storing, and for reading."""

    def __init__(self) -> None:
        self.look_ups: list[Done] = []
        self.read: list[Done] = []
        self.cached: list[Done] = []
        self.ranges: list[Done] = []


def measure(directory: str, path: str, codec: str, images: list[str],
            args) -> tuple[Found, Found]:
    """Store the images, and read them; also the files themselves."""
    rng = random.Random(1)
    found, files = Found(), Found()
    for i, image in enumerate(images):
        print(f'{codec}: storing {i + 1} of {len(images)}', file=sys.stderr)
        forget(path)
        found.look_ups.append(child(directory, path, codec, 'store',
                                    f'image-{i}', image))
    for i, image in enumerate(images):
        print(f'{codec}: reading {i + 1} of {len(images)}', file=sys.stderr)
        ranges = some_ranges(image, args.ranges, rng)
        forget(path, image)
        found.read.append(child(directory, path, codec, 'read', f'image-{i}'))
        found.cached.append(child(directory, path, codec, 'read',
                                  f'image-{i}'))
        files.read.append(plain(image))
        files.cached.append(plain(image))
        forget(path, image)
        found.ranges.append(child(directory, path, codec, 'ranges',
                                  f'image-{i}', '', ranges))
        files.ranges.append(plain(image, ranges))
    return found, files


def one_codec(directory: str, codec: str, images: list[str], args) -> None:
    path = os.path.join(directory, f'repository-{codec}')
    image_repository.Repository.create(path)
    found, files = measure(directory, path, codec, images, args)
    show(f'{codec}: look-ups, first image', found.look_ups[:1], None, args)
    if images[1:]:
        show(f'{codec}: look-ups, later ones', found.look_ups[1:], None, args)
    show(f'{codec}: reading, first image', found.read[:1], files.read[:1],
         args)
    if images[1:]:
        show(f'{codec}: reading, later ones', found.read[1:], files.read[1:],
             args)
    show(f'{codec}: reading, cached', found.cached, files.cached, args, False)
    show(f'{codec}: {args.ranges} ranges of 64 KiB', found.ranges,
         files.ranges, args)
    shutil.rmtree(path)
    common.remove_filters(directory)


def main() -> None:
    parser = common.arguments(
        __doc__, paths='+', ranges=(50, 'read of each image'),
        **MODEL, **VERSIONS)
    parser.add_argument('--codec', action='append',
                        choices=('none', 'lz4', 'zstd'),
                        help='may be repeated (default: none and lz4)')
    args = parser.parse_args()
    with common.place(args.dir) as directory:
        images = with_versions(args.paths, args.versions, args.changed,
                               directory)
        print(f'{"per image":34}{"reads":>8}{"seeks":>8}{"MiB":>9} '
              f'{"model s":>8}{"file":>7}{"ratio":>6} '
              f'{"here s":>8}{"file":>7}{"ratio":>6}')
        for codec in args.codec or ('none', 'lz4'):
            one_codec(directory, codec, images, args)


if __name__ == '__main__':
    main()
