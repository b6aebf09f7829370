# SPDX-License-Identifier: Apache-2.0

"""Run the papers' experiments in order, and write their tables into files.

Run it as root from a checkout in which the extension is built, on a machine
that does nothing else::

    python benchmarks/papers/everything.py RESULTS [--quick] [--dir DIR]
        [--images IMAGE...] [--tars TAR...] [--only STEP...]

``benchmarks/images.py`` makes the images, and ``kernels.py`` fetches the tar
files: two of Linux are enough, and more take longer. RESULTS gets a file for
each step, *step*.txt: the tables that the guide has. DIR needs room for the
images twice, or for the tar files six times. ``--quick`` shows in a few
minutes that all steps run; its figures mean nothing.

* livedfs-rates: LiveDFS's A1 to A3, with data four times as large as memory;
* livedfs-space, livedfs-uploads: its B1 and B2, with the images;
* dmdedup: Dmdedup's figures 4.1 to 4.3, and its traces;
* untar: its table 4.2, with the tar files;
* lookup: hints of LiveDFS's filter that are wrong.

A step that fails, or lacks what it needs, is named at the end, and the others
run all the same.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time

import _path  # noqa: F401  finds the modules beside it
import common

LIMIT = 7200    # seconds for any step


def steps(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the commands, by name; no images or tar files: none of these."""
    memory, rounds = (('128', '1') if args.quick else ('256', '3'))
    found = {'livedfs-rates': ['livedfs', '--only', 'A1,A2,A3', '--memory',
                               memory, '--rounds', rounds]}
    if args.images:
        found['livedfs-space'] = ['livedfs', '--only', 'B1', *args.images]
        found['livedfs-uploads'] = ['livedfs', '--only', 'B2', '--rounds', '1',
                                    *args.images]
    found['dmdedup'] = ['dmdedup', '--scale',
                        'tiny' if args.quick else 'quick']
    if args.tars:
        found['dmdedup'] += ['--kernels', *args.tars]
        found['untar'] = ['untar', '--rounds', rounds, *args.tars]
    found['lookup'] = ['lookup', '--blocks', '131072,1000000', '--rounds',
                       '1' if args.quick else '15']
    return found


def run(name: str, command: list[str], args: argparse.Namespace) -> bool:
    """Run a step; return whether it succeeded."""
    program, *options = command
    path = next(pathlib.Path(common.TOP, 'benchmarks').rglob(f'{program}.py'))
    target = os.path.join(args.results, f'{name}.txt')
    whole = [sys.executable, '-W', 'ignore', path, '--dir', args.dir, *options]
    with open(target + '.new', 'w') as output:
        try:
            status = subprocess.run(whole, stdout=output,
                                    timeout=LIMIT).returncode
        except subprocess.TimeoutExpired:
            status = -1
    if status:
        return False    # what it printed stays in the .new file
    os.rename(target + '.new', target)
    with open(target) as output:
        print(output.read(), flush=True)
    return True


def main() -> None:
    """Run the steps of the command line."""
    parser = common.arguments(
        __doc__, quick=(False, 'show that all steps run'))
    parser.add_argument('results', metavar='RESULTS', type=os.path.abspath)
    for name, what in (('images', 'of disks'), ('tars', 'of Linux')):
        parser.add_argument(f'--{name}', nargs='+', default=[], metavar='FILE',
                            help=what)
    parser.add_argument('--only', nargs='+', metavar='STEP')
    args = parser.parse_args()
    found = steps(args)
    if args.only and not set(args.only) <= set(found):
        parser.error(f'the steps are {", ".join(found)}')
    os.makedirs(args.results, exist_ok=True)
    wanted = args.only or list(found)
    failed = []
    for number, name in enumerate(wanted):
        print(f'step {number + 1} of {len(wanted)}: {name}', file=sys.stderr)
        began = time.monotonic()
        if not run(name, found[name], args):
            failed.append(name)
        print(f'{name}: {time.monotonic() - began:.0f} s', file=sys.stderr)
    for what, given in (('images', args.images), ('tars', args.tars)):
        if not given:
            print(f'without --{what} their steps are left out',
                  file=sys.stderr)
    if failed:
        raise SystemExit('failed: ' + ', '.join(failed))


if __name__ == '__main__':
    main()
