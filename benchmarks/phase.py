# SPDX-License-Identifier: Apache-2.0

"""Measure the cost and the savings of finding blocks at other phases.

Run it from a checkout in which the extension is built::

    python benchmarks/phase.py [--mib 256] [--rounds 5] [--dir DIR] [IMAGE..]

It shows:

* unique data, of which no sample is found: stored as it is, and by a
  transaction that takes no samples, in turns, each in a repository of its own;
  by the engine alone, without compression and with, and by a whole upload with
  two of Glance's hashes beside it. The data are the bytes of the named images
  that are not zeros, or noise;
* data that change their phase all the time, against storing them without
  samples, time and bytes: at each block; and at each batch, with stored blocks
  just where samples are taken, and nowhere else, so that they are cut again
  without a gain;
* for each image named, its twin with the first partition at sector 63 rather
  than 2048, stored behind it: the part of its non-zero bytes that is stored
  again, within one scope, within a project's, and where blocks are compared by
  value; and the part if blocks were only searched where they are cut.

Rates are medians of the rounds, with the lowest and the highest, and the ratio
to the same without samples; and so is the processor time outside the kernel,
where neither the disk counts nor memory that was not touched before. No figure
passes or fails.
"""

from collections.abc import Callable, Iterable, Iterator
import functools
import hashlib
import io
import os
import random
import resource
import sys
from typing import Any

import common
from common import MIB
from common import PIECE

from glance_dedup.base import thread_pool
from glance_dedup.driver import upload
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages

BLOCK = 4096
SECTOR = 512
#: Where the first partition begins: of the image, and of its twin.
USUAL, ODD = 2048 * SECTOR, 63 * SECTOR
BATCH = 1024  #: blocks that are looked up together
PARTS = 8     #: of a batch, from each of which a pair is taken

_storage = thread_pool.Workers('benchmark-phase', 2)


# -- storing ------------------------------------------------------------------

def begin(repo: image_repository.Repository, image_id: str, samples: bool,
          **scope: str) -> openimages.Transaction:
    transaction = repo.begin(image_id, **scope)
    if not samples:
        # A caller that looks blocks up itself is assumed to know their cuts.
        transaction.find(b'', b'')
    return transaction


def store_pieces(repo: image_repository.Repository, image_id: str,
                 pieces: Iterable[Any], samples: bool = True,
                 **scope: str) -> None:
    with begin(repo, image_id, samples, **scope) as transaction:
        for piece in pieces:
            transaction.write(piece)
        transaction.commit()


def store(repo: image_repository.Repository, image_id: str, data: bytes,
          samples: bool = True) -> None:
    view = memoryview(data)
    store_pieces(repo, image_id, (view[at:at + PIECE]
                                  for at in range(0, len(view), PIECE)),
                 samples)


def send(repo: image_repository.Repository, image_id: str, data: bytes,
         samples: bool) -> None:
    """Store as the driver does, with the hashes that Glance needs."""
    transaction = begin(repo, image_id, samples)
    upload.store(repo, image_id, transaction, io.BytesIO(data), len(data),
                 [hashlib.md5(usedforsecurity=False).update,
                  hashlib.sha512().update],
                 _storage, thread_pool.TimeLimit(0, _storage))


# -- data ---------------------------------------------------------------------

def each_block(stored: bytes) -> bytes:
    """Return the stored blocks, with a sector behind each."""
    rng = random.Random(1)
    return b''.join(stored[at:at + BLOCK] + rng.randbytes(SECTOR)
                    for at in range(0, len(stored), BLOCK))


def each_batch(stored: bytes) -> bytes:
    """Return new bytes, except in a batch's sample: always another phase."""
    data = bytearray(os.urandom(len(stored)))
    part = BATCH // PARTS * BLOCK
    for number, at in enumerate(range(part, len(data) - part, part)):
        start = at - 2 * BLOCK + (number // PARTS + 1) % 8 * SECTOR
        data[start:start + 8 * BLOCK] = stored[at:at + 8 * BLOCK]
    return bytes(data)


def pieces_of(path: str) -> Iterator[bytes]:
    with open(path, 'rb') as f:
        while piece := f.read(PIECE):
            yield piece


def twin_of(path: str) -> Iterator[bytes]:
    """Yield the same image with its partition at an odd sector."""
    with open(path, 'rb') as f:
        first = f.read(SECTOR)
        f.seek(USUAL - ODD + SECTOR)
        yield first + f.read(PIECE - SECTOR)
        while piece := f.read(PIECE):
            yield piece


def blocks_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield blocks that are not zeros; all pieces but the last are whole."""
    for piece in pieces:
        for at in range(0, len(piece), BLOCK):
            block = piece[at:at + BLOCK]
            if block.count(0) != len(block):
                yield block


# -- parts --------------------------------------------------------------------

def user_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def add(table: common.Table, name: str, size: int, function: Callable,
        *args: Any) -> None:
    """Measure a call."""
    before = user_seconds()
    table.add(name, size, common.timed(function, *args))
    table.figure(f'{name}: user',
                 (user_seconds() - before) / (size / common.GIB), 's/GiB')


def compare(table: common.Table, name: str) -> None:
    for figure in ('', ': user'):
        table.compare(name + figure, f'{name}, no samples{figure}')


def measure_unique(table: common.Table, directory: str, data: bytes,
                   turn: int) -> float:
    """Measure each way once; return the share of blocks sampled."""
    size = len(data)
    for title, function, codec in (
            ('unique, codec none', store, 'none'),
            ('unique, codec lz4', store, 'lz4'),
            ('unique, whole upload, lz4', send, 'lz4')):
        names = {False: f'{title}, no samples', True: title}
        for samples in (turn % 2 == 0, turn % 2 == 1):
            with common.new_repository(directory, codec=codec,
                                       warm=size) as repo:
                add(table, names[samples], size, function, repo, 'one', data,
                    samples)
                if samples:
                    figures = repo.statistics()
        compare(table, title)
    return figures['phase_samples'] / figures['blocks']


def measure_changing(table: common.Table, directory: str, stored: bytes,
                     turn: int) -> dict[str, tuple]:
    """Measure each way once.

    :returns: new bytes without samples, and with; samples, and changes
    """
    found = {}
    for title, data in (('changing at each block', each_block(stored)),
                        ('changing at each batch', each_batch(stored))):
        names = {False: f'{title}, no samples', True: title}
        new = {}
        for samples in (turn % 2 == 0, turn % 2 == 1):
            with common.new_repository(
                    directory, warm=len(stored) + len(data)) as repo:
                store(repo, 'stored', stored)
                before = repo.statistics()
                add(table, names[samples], len(data), store, repo, 'one',
                    data, samples)
                new[samples] = repo.stat('one').new_bytes
                if samples:
                    after = repo.statistics()
        compare(table, title)
        found[title] = new[False], new[True], *(
            after[name] - before[name]
            for name in ('phase_samples', 'phase_changes'))
    return found


def show_twin(directory: str, path: str) -> None:
    known = {hashlib.sha256(block).digest()
             for block in common.used_blocks(path)}
    nonzero = lost = 0
    for block in blocks_of(twin_of(path)):
        nonzero += len(block)
        name = hashlib.sha256(block).digest()
        if name not in known:
            known.add(name)
            lost += len(block)
    print(f'\n{os.path.basename(path)}: its twin has {nonzero / MIB:.0f} MiB '
          f'that are not zeros\n'
          f'  {"found only where they are cut":34} {lost:12,} bytes '
          f'new  {lost / nonzero:8.3%}')
    for title, verify, scope in (
            ('one scope', 'fingerprint', {}),
            ("a project's scope", 'fingerprint',
             {'project': 'one', 'scope': 'project'}),
            ('compared by value', 'bytes', {})):
        with common.new_repository(directory, codec='lz4', warm=nonzero,
                                   verify=verify) as repo:
            store_pieces(repo, 'one', pieces_of(path), **scope)
            before = repo.statistics()
            spent = common.timed(functools.partial(
                store_pieces, repo, 'twin', twin_of(path), **scope))
            after, stat = repo.statistics(), repo.stat('twin')
        print(f'  {title:34} {stat.new_bytes:12,} bytes new  '
              f'{stat.new_bytes / nonzero:8.3%}  {spent.cpu:.2f} s of '
              f'processors, '
              f'{after["phase_samples"] - before["phase_samples"]:,} blocks '
              f'sampled, '
              f'{after["phase_changes"] - before["phase_changes"]} changes')


def main() -> None:
    args = common.arguments(__doc__, mib=256, rounds=5,
                            paths='*').parse_args()
    size = args.mib * MIB
    with common.place(args.dir) as d:
        data = (common.distinct_blocks(args.paths, size) if args.paths
                else os.urandom(size))
        table = common.Table()
        for turn in common.count_rounds(args.rounds):
            share = measure_unique(table, d, data, turn)
            changing = measure_changing(table, d, data, turn)
        table.show()
        print(f'\nunique data: for each block stored, {share:.3f} were '
              f'fingerprinted in vain')
        for title, (without, new, samples, changes) in changing.items():
            print(f'{title}: {new / without:.4f} of the bytes '
                  f'that are new without samples, {samples:,} blocks sampled, '
                  f'{changes} changes')
        for path in args.paths:
            print(f'twin of {path}', file=sys.stderr)
            show_twin(d, path)


if __name__ == '__main__':
    main()
