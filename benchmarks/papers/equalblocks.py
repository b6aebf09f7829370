# SPDX-License-Identifier: Apache-2.0

"""Measure the savings from deduplication, as in DEDE's analysis.

Run it from a checkout; gcc and the engine's libraries are needed::

    python benchmarks/papers/equalblocks.py [--dir DIR] [--plot DIR] IMAGE...

After Clements, Ahmad, Vilayannur and Li, "Decentralized Deduplication in SAN
Cluster File Systems", USENIX ATC 2009. (dede.py has their other experiments.)
It stores nothing: equalblocks.c counts the images' blocks, exactly, by sorting
their fingerprints, which takes a sixteenth of the images' bytes that are not
zeros in DIR. Three tables:

* savings by block size, of fixed blocks; zeros apart, which every size saves.
  All shares are of the bytes in blocks of 4 KiB that are not zeros. *With
  entries*: the kept blocks and 57 bytes of fingerprint store for each, without
  which they cannot be found;
* the distribution of reference counts, of blocks of 4 KiB: the number of kept
  ones that are used once, twice, and so on, and their share of all blocks;
* the savings by linked clones, which only share equal blocks at the same
  offset, in blocks of 4 KiB: of a base, which is the image after which it is
  called (``sid-web`` of ``sid-web-old``), or else the first one named of its
  distribution (its directory's name, or its own up to the first dash); and, as
  a bound for any choice of bases, of any image.
"""

import json
import os
import subprocess
import tempfile
from typing import NamedTuple

import _path  # noqa: F401  finds the modules beside it
import common
from common import MIB
import plot
import synthetic

#: The bytes of the fingerprint store for each block: nine entries fill a
#: sector of 512.
ENTRY = 512 / 9
BLOCK = 4096
LIMIT = 24 * 3600


class Blocks(NamedTuple):
    """The blocks of a size."""

    size: int
    zeros: int
    #: blocks used once, twice, 3 to 4 times, 5 to 8, ...; their references
    counts: list[list[int]]

    @property
    def kept(self) -> int:
        return sum(blocks for blocks, _ in self.counts)

    @property
    def used(self) -> int:
        """References to them."""
        return sum(references for _, references in self.counts)


class Analysis:
    """The results of equalblocks.c."""

    def __init__(self, found: dict) -> None:
        self.bytes = found['bytes']
        self.by_size = {
            int(size): Blocks(int(size), of['zeros'], of['counts'])
            for size, of in found['blocks'].items()}
        self.blocks = self.by_size[BLOCK]
        #: bytes that are not zeros: of these are all shares
        self.used = self.blocks.used * BLOCK
        self.places = Blocks(BLOCK, self.blocks.zeros,
                             found['places']['counts'])
        #: blocks that clones keep: of the bases, and those that differ
        self.clones = found['base'] + found['other']

    def share(self, size: float) -> float:
        """Return the share of the bytes that are not zeros; 0 without any."""
        return size / self.used if self.used else 0


def stem(path: str) -> str:
    return os.path.basename(path).partition('.')[0]


def with_bases(images: list[str]) -> list[tuple[str, str]]:
    """Return images, each with the one that it is a clone of; '-': none."""
    found: list[tuple[str, str]] = []
    seen: dict[str, list[str]] = {}
    for name, path in common.by_distribution(images):
        before = seen.setdefault(name, [])
        namesakes = [other for other in before
                     if stem(path).startswith(stem(other) + '-')]
        base = max(namesakes, key=lambda other: len(stem(other)),
                   default=before[0] if before else '-')
        found.append((path, base))
        before.append(path)
    return found


def analyse(images: list[str], directory: str,
            program: str | None = None) -> Analysis:
    """Count the images' blocks.

    :param directory: for fingerprints, while it runs
    :param program: equalblocks.c, if it is built already
    """
    what = [word for pair in with_bases(images) for word in pair]
    with tempfile.TemporaryDirectory(dir=directory, prefix='bench-') as d:
        program = program or synthetic.build(d, 'equalblocks')
        done = subprocess.run([program, d, *what], stdout=subprocess.PIPE,
                              check=True, timeout=LIMIT)
    return Analysis(json.loads(done.stdout))


# -- tables -------------------------------------------------------------------

def in_words(size: int) -> str:
    return (f'{size // MIB} MiB' if size >= MIB else
            f'{size // 1024} KiB' if size >= 1024 else f'{size} B')


def times(bucket: int) -> str:
    """Return the number of uses of a bucket's blocks, in words."""
    if bucket < 2:
        return str(bucket + 1)
    return f'{2 ** (bucket - 1) + 1}-{2 ** bucket}'


def show_sizes(found: Analysis) -> None:
    print(f'{found.bytes / MIB:,.0f} MiB, of which '
          f'{found.used / MIB:,.0f} MiB in blocks of 4 KiB that are not '
          f'zeros\n')
    print(f'{"block":>8}{"zeros":>9}{"not zeros, MiB":>16}{"kept, MiB":>12}'
          f'{"kept":>9}{"with entries":>14}')
    for blocks in found.by_size.values():
        kept = blocks.kept * blocks.size
        print(f'{in_words(blocks.size):>8}'
              f'{blocks.zeros * blocks.size / found.bytes:>9.1%}'
              f'{blocks.used * blocks.size / MIB:>16,.1f}'
              f'{kept / MIB:>12,.1f}{found.share(kept):>9.1%}'
              f'{found.share(kept + blocks.kept * ENTRY):>14.1%}')


def show_counts(found: Analysis) -> None:
    blocks = found.blocks
    print(f'\n{"used":>12}{"blocks of 4 KiB":>17}{"of the kept":>13}'
          f'{"of all":>9}')
    for bucket, (kept, used) in enumerate(blocks.counts):
        print(f'{times(bucket):>12}{kept:>17,}{kept / blocks.kept:>13.2%}'
              f'{used / blocks.used:>9.2%}')


def sharing(found: Analysis) -> dict[str, int]:
    """Return the kept blocks of 4 KiB, by the kind of sharing."""
    return {'each block once': found.blocks.kept,
            'clones, any image as base': found.places.kept,
            'clones, each of its base': found.clones,
            'nothing shared': found.blocks.used}


def show_clones(found: Analysis) -> None:
    print(f'\n{"sharing":40}{"kept, MiB":>12}{"kept":>9}')
    for name, kept in sharing(found).items():
        print(f'{name:40}{kept * BLOCK / MIB:>12,.1f}'
              f'{found.share(kept * BLOCK):>9.1%}')


# -- plots --------------------------------------------------------------------

def draw(found: Analysis, directory: str) -> None:
    def path(name):
        return os.path.join(directory, f'space-{name}.svg')

    sizes = found.by_size.values()
    plot.bars([in_words(blocks.size) for blocks in sizes],
              {'blocks': [100 * found.share(blocks.kept * blocks.size)
                          for blocks in sizes],
               'with entries': [100 * found.share(
                   blocks.kept * (blocks.size + ENTRY)) for blocks in sizes]},
              'per cent of what is not zeros', 'Kept by block size',
              path('sizes'))
    blocks = found.blocks
    plot.bars([times(bucket) for bucket in range(len(blocks.counts))],
              {'of the kept blocks': [100 * kept / blocks.kept
                                      for kept, _ in blocks.counts],
               'of all blocks': [100 * used / blocks.used
                                 for _, used in blocks.counts]},
              'per cent', 'How often blocks of 4 KiB are used',
              path('counts'))
    shared = sharing(found)
    plot.bars(list(shared), {'': [100 * found.share(kept * BLOCK)
                                  for kept in shared.values()]},
              'per cent of what is not zeros',
              'Kept of blocks of 4 KiB, by what is shared', path('clones'))


def main() -> None:
    parser = common.arguments(__doc__, paths='+')
    plot.argument(parser, 'DIR')
    args = parser.parse_args()
    found = analyse(args.paths, args.dir)
    if not found.used:
        raise SystemExit('there are only zeros in these images')
    show_sizes(found)
    show_counts(found)
    show_clones(found)
    if args.plot:
        draw(found, args.plot)


if __name__ == '__main__':
    main()
