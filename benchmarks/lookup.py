# SPDX-License-Identifier: Apache-2.0

"""Measure the cost of a look-up, from a million blocks to a hundred million.

Run it from a checkout in which the extension is built::

    python benchmarks/lookup.py [--blocks 1000000,3000000,10000000]
        [--budget MIB,all] [--rounds 15] [--dir DIR] [--filter-dir /dev/shm]

For each number of blocks a repository with so many is made (``synthetic.py``:
its fingerprint stores are real, the blocks are not there), and removed
afterwards; 100 million blocks take 5.6 GB of DIR. Its filter is built from the
groups, once with room for all blocks (``all``) and once with the budget that
is the default. Then, in each round, after the same in the smallest repository,
it looks up by their fingerprints

* new blocks: no store at hand has them, and the filter has few hints, all
  false;
* an image: 65536 blocks that were stored one after the other;
* single blocks from everywhere: a batch's are in more groups than are loaded
  for it, so that only a part is found.

It shows the nanoseconds of processor time per block, median and lowest of the
rounds, and the lowest as a ratio to that of the smallest repository: other
programs that use the machine's memory make look-ups slower, never faster. The
look-ups are those of ``Transaction.find``, which a pull uses. It loads up to
16 stores for 1024 blocks, an upload up to four; and it checks the group again
for each block that it has found. The hints that the filter gave for 1024
blocks (candidates), the loads of stores and the share of blocks found are
given, too.

Then it counts the hints that new blocks find, all of them other blocks',
beside the number that chance gives: as "The filter" in hints.rst of the guide
computes it. No figure passes or fails.
"""

import contextlib
import os
import random
import shutil
import statistics
import sys
import time

import common
import synthetic

from glance_dedup.repository import image_repository

ALL = 0  # the budget that has room for all
FILL = 7 / 8  # of the filter, when its level rises
NEW = 1 << 17
IMAGE = 1 << 16
SINGLE = 1 << 13
#: Look-ups of new blocks, for each round, to count wrong hints. They are rare.
WRONG = 10 * NEW
KINDS = ('new', 'image', 'single')


def budget_of(mib, blocks):
    if mib != ALL:
        return mib
    return int(blocks * 8 / FILL * 1.05 / common.MIB) + 1


def chosen(kind, blocks):
    """Return fingerprints to look up."""
    if kind == 'new':
        return os.urandom(32 * NEW)
    if kind == 'image':
        first = random.randrange(blocks - IMAGE)
        numbers = range(first, first + IMAGE)
    else:
        numbers = random.sample(range(blocks), SINGLE)
    return b''.join(map(synthetic.fingerprint, numbers))


class Subject:
    """A repository with so many blocks, and its filter."""

    def __init__(self, path, filter_dir, mib, blocks):
        self.blocks = blocks
        self.repo = image_repository.Repository(
            path, filter_dir=filter_dir, filter_mib=budget_of(mib, blocks))
        self.figures = {kind: [] for kind in KINDS}
        self.counts = {kind: [] for kind in KINDS}
        self.found = {kind: [] for kind in KINDS}

    def measure(self, kind):
        """Look up once, and note the figures."""
        fingerprints = chosen(kind, self.blocks)
        count = len(fingerprints) // 32
        lengths = (4096).to_bytes(4, 'little') * count
        before = self.repo.statistics()
        with self.repo.begin('measured') as transaction:
            start = time.process_time()
            addresses = transaction.find(fingerprints, lengths)
            spent = (time.process_time() - start) / count * 1e9
        missing = sum(addresses[i:i + 8] == bytes(8)
                      for i in range(0, len(addresses), 8))
        self.figures[kind].append(spent)
        self.found[kind].append(1 - missing / count)
        after = self.repo.statistics()
        self.counts[kind].append([
            (after[name] - before[name]) / count * 1024
            for name in ('candidates', 'cold_loads')])

    def count_wrong(self, count):
        """Look up so many new blocks; return the hints that they find."""
        before = self.repo.statistics()['candidates']
        with self.repo.begin('measured') as transaction:
            for _ in range(0, count, NEW):
                transaction.find(os.urandom(32 * NEW),
                                 (4096).to_bytes(4, 'little') * NEW)
        return self.repo.statistics()['candidates'] - before

    def close(self):
        self.repo.close()


def expected_rate(stats):
    """Return the share of look-ups of new blocks that find a wrong hint.

    Two buckets have 16 words. A hint in one agrees by chance if its tag of 20
    bits does, and the number of zero bits, which does once in three times. At
    a level, one block in 2 to its power is looked up.
    """
    full = stats['filter_hints'] / stats['filter_places']
    return 16 * full / (3 << 20) / 2 ** stats['filter_level']


@contextlib.contextmanager
def subject(directory, filter_dir, mib, blocks, program):
    """Makes the repository and its filter; removes both at the end."""
    path = os.path.join(directory, f'repository-{blocks}')
    filters = os.path.join(filter_dir, f'filter-{blocks}-{mib}')
    os.mkdir(filters)
    result = None
    try:
        if not os.path.exists(path):
            print(f'making {blocks:,} blocks', file=sys.stderr)
            synthetic.make(path, blocks, program=program)
        result = Subject(path, filters, mib, blocks)
        print(f'building the filter of {blocks:,} blocks, '
              f'{budget_of(mib, blocks)} MiB', file=sys.stderr)
        result.repo.rebuild_filter()
        yield result
    finally:
        if result is not None:
            result.close()
        shutil.rmtree(filters)


def show(subject, smallest):
    stats = subject.repo.statistics()
    row = (f'{subject.blocks:12,}{stats["filter_bytes"] / common.MIB:8.1f}'
           f'{stats["filter_level"]:6}')
    for kind in KINDS:
        spent = subject.figures[kind]
        ratio = min(spent) / min(smallest.figures[kind])
        row += f'{statistics.median(spent):9.0f}{min(spent):7.0f}{ratio:6.2f}'
        hints, loads = map(statistics.mean, zip(*subject.counts[kind]))
        row += f'{hints:8.2f}{loads:7.2f}'
        if kind != 'new':
            row += f'{statistics.mean(subject.found[kind]):7.1%}'
    print(row, flush=True)


def show_wrong(subject, count):
    expected = count * expected_rate(subject.repo.statistics())
    print(f'{subject.blocks:12,}: {count:,} new blocks find '
          f'{subject.count_wrong(count):,} wrong hints; {expected:.0f} '
          'expected', flush=True)


def measure_budget(args, mib, directory, filter_dir, program):
    print(f'\n{"":12}{"filter":>8}{"":6}{"new blocks":>37}'
          f'{"an image":>44}{"single blocks":>44}')
    figures = f'{"ns":>9}{"low":>7}{"ratio":>6}{"hints":>8}{"loads":>7}'
    found = f'{figures}{"found":>7}'
    print(f'{"blocks":>12}{"MiB":>8}{"level":>6}{figures}{found}{found}',
          flush=True)
    smallest, *others = args.blocks
    with subject(directory, filter_dir, mib, smallest, program) as first:
        for kind in KINDS * args.rounds:
            first.measure(kind)
        show(first, first)
        show_wrong(first, args.rounds * WRONG)
        for blocks in others:
            with subject(directory, filter_dir, mib, blocks, program) as one:
                for kind in KINDS * args.rounds:
                    first.measure(kind)
                    one.measure(kind)
                show(one, first)
                show_wrong(one, args.rounds * WRONG)
            if mib == args.budgets[-1]:
                shutil.rmtree(os.path.join(directory, f'repository-{blocks}'))


def numbers(text):
    found = sorted(int(n) for n in text.split(','))
    if found[0] <= IMAGE:
        raise SystemExit(f'an image has {IMAGE} blocks')
    return found


def budgets(text):
    return [ALL if n == 'all' else int(n) for n in text.split(',')]


def main():
    args = common.arguments(
        __doc__, rounds=15, filter_dir=True,
        blocks=('1000000,3000000,10000000', 'how many'),
        budget=('all,64', 'of the filter, MiB')).parse_args()
    args.blocks, args.budgets = numbers(args.blocks), budgets(args.budget)
    with (common.place(args.dir) as d,
          common.place(args.filter_dir) as filter_dir):
        program = synthetic.build(d)
        for mib in args.budgets:
            measure_budget(args, mib, d, filter_dir, program)
    print('\nfor 1024 blocks: hints of the filter, loads of stores')


if __name__ == '__main__':
    main()
