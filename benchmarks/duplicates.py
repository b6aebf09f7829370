# SPDX-License-Identifier: Apache-2.0

"""Compare storing stored images with computing fingerprints alone.

Run it from a checkout in which the extension is built; gcc and the engine's
libraries are needed::

    python benchmarks/duplicates.py [--mib 1024] [--rounds 5] [--dir DIR]
        [--fingerprint sha256] [--verify fingerprint]

Data that no codec makes smaller is stored once. Then, in each round, on one
processor and on two, a process stores it again from its memory, up to the
commit, twice; the second time, with a handle that has not loaded anything, is
shown. Just before and just after it another process (``digest.c``) computes
the fingerprints of the same blocks in the same way, and does nothing else.

The ratio is that of the rates, and then that of processor seconds, which shows
the cost that storing adds to the fingerprints if other programs use the
machine, too.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys

import common
import synthetic

from glance_dedup.repository import image_repository

BLOCK = 4096
LIMIT = 300  # seconds

STORE = '''
import common
from glance_dedup.repository import image_repository
import json
import sys

path, filter_dir, source, *image_ids = sys.argv[1:]
with open(source, 'rb') as f:
    data = f.read()
for image_id in image_ids:
    with image_repository.Repository(path, codec='none',
                               filter_dir=filter_dir) as repo:
        repo.statistics()
        spent = common.timed(common.store, repo, image_id, data)
        counts = repo.statistics()
print(json.dumps([*spent[:3], counts['hits'], counts['cold_loads']]))
'''


def on(cpus, command):
    """Run a program on so many processors; return its output."""
    chosen = sorted(os.sched_getaffinity(0))[:cpus]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, timeout=LIMIT, text=True,
        env={**os.environ,
             'PYTHONPATH': os.path.join(common.TOP, 'benchmarks')},
        preexec_fn=lambda: os.sched_setaffinity(0, chosen))
    return done.stdout


def put(directory, path, source, cpus, *image_ids):
    """Store the source in a process of its own; return the last cost."""
    wall, cpu, kernel, hits, loads = json.loads(on(cpus, [
        sys.executable, '-c', STORE, path, directory, source, *image_ids]))
    return common.Spent(wall, cpu, kernel), hits, loads


def compute(program, source, name, cpus):
    wall, cpu = on(cpus, [program, source, name, str(BLOCK),
                          str(cpus - 1)]).split()
    return common.Spent(float(wall), float(cpu), 0)


def one_round(table, ratios, number, args, directory, program):
    path = os.path.join(directory, 'repository')
    source = os.path.join(directory, 'source')
    size = args.mib * common.MIB
    for cpus in range(1, min(2, len(os.sched_getaffinity(0))) + 1):
        where = 'one processor' if cpus == 1 else f'{cpus} processors'
        alone, store = f'fingerprints, {where}', f'duplicates, {where}'
        table.add(alone, size, compute(program, source, args.fingerprint,
                                       cpus))
        spent, hits, loads = put(directory, path, source, cpus,
                                 f'warm-{number}-{cpus}',
                                 f'again-{number}-{cpus}')
        if hits != size // BLOCK:
            raise SystemExit(f'{size // BLOCK - hits} blocks were not found')
        table.add(alone, size, compute(program, source, args.fingerprint,
                                       cpus))
        table.add(store, size, spent)
        table.compare(store, alone, 2)
        ratios.setdefault(where, []).append(
            statistics.mean(table.cpu[alone][-2:]) / table.cpu[store][-1])
    return loads


def main():
    args = common.arguments(
        __doc__, mib=1024, rounds=5, fingerprint=('sha256', 'the digest'),
        verify=('fingerprint', 'or bytes')).parse_args()
    with common.place(args.dir) as d:
        path = os.path.join(d, 'repository')
        source = os.path.join(d, 'source')
        with open(source, 'wb') as f:
            for _ in range(args.mib):
                f.write(os.urandom(common.MIB))
        program = synthetic.build(d, 'digest')
        image_repository.Repository.create(path, fingerprint=args.fingerprint,
                                           verify=args.verify)
        put(d, path, source, 2, 'first')
        table, ratios = common.Table(), {}
        for number in common.count_rounds(args.rounds):
            loads = one_round(table, ratios, number, args, d, program)
        table.show()
        for where, found in ratios.items():
            print(f'{"by processor time, " + where:42}'
                  f'{statistics.median(found):9.2f}{min(found):9.2f}'
                  f'{max(found):9.2f}')
        print(f'\n{loads} fingerprint stores loaded for {args.mib} MiB')
        shutil.rmtree(path)


if __name__ == '__main__':
    main()
