# SPDX-License-Identifier: Apache-2.0

"""The crash-state explorer.

Each workload is run once under record. Then, for points of its journal and
strategies of ``states.py``, the state that a crash there may leave is made on
a real file system (one in memory), recovered, and verified by ``verify.py``;
some recoveries are recorded in their turn, and crash, twice.

In other states (``survivor``) another process was killed, and a process that
had the repository open goes on.

It is a command, which needs only the engine built in the tree::

    python -m tests.crash.explorer [--tree DIRECTORY] [--workload NAME,...]
        [--states NUMBER] [--seed NUMBER] [--recoveries NUMBER]
        [--strategy NAME,...] [--seconds NUMBER] [--most NUMBER]
        [--keep DIRECTORY] [--verbose]

``--tree`` is another copy of the project, whose tests and engine (built in
place) are used; ``--states`` counts the distinct states of each workload,
without those of recoveries. Each finding is a line of JSON on the standard
output: the error, the point of the journal, the directory of the state's tree
(below the directory of ``--keep``), and a command that makes and verifies the
same state again, or with ``--make DIRECTORY`` only makes it there. The last
line is a summary: the distinct states, and their number by strategy. It ends
after ``--most`` findings (1 by default). The exit status is 1 if there was a
finding, 0 if there was none.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time

from tests.functional import watched_process

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
#: The directory of the preloaded library; unset before the preload.
PRELOADED = 'GLANCE_DEDUP_CRASH_LIBRARY'


def parse(argv):
    parser = argparse.ArgumentParser(prog='tests.crash.explorer')
    parser.add_argument('--tree', default=str(ROOT))
    parser.add_argument('--workload')
    parser.add_argument('--strategy')
    parser.add_argument('--states', type=int, default=200)
    parser.add_argument('--recoveries', type=int, default=0)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--seconds', type=float)
    parser.add_argument('--most', type=int, default=1)
    parser.add_argument('--keep')
    parser.add_argument('--verbose', action='store_true')
    parser.add_argument('--scene')
    parser.add_argument('--state')
    parser.add_argument('--make')
    return parser.parse_args(argv)


def preload(argv, tree):
    """Restart as a process with the recorder, and with the tree's modules.

    Does not return.
    """
    directory = tempfile.mkdtemp(prefix='glance-dedup-recorder-')
    libraries = [str(watched_process.build(pathlib.Path(directory)))]
    if os.environ.get('LD_PRELOAD'):
        # A sanitizer's runtime must come first.
        libraries.insert(0, os.environ['LD_PRELOAD'])
    os.chdir(tree)
    os.execve(sys.executable,
              [sys.executable, '-m', 'tests.crash.explorer', *argv],
              {**os.environ, 'LD_PRELOAD': ':'.join(libraries),
               'PYTHONPATH': tree, PRELOADED: directory})


def report(finding):
    print(json.dumps(finding), flush=True)


def explore(explorer, arguments):
    from tests.crash import exploration

    names = (arguments.workload.split(',') if arguments.workload
             else list(exploration.WORKLOADS))
    counts = {}
    for name in names:
        began = time.monotonic()
        scene = explorer.record(name)
        counts[name] = explorer.explore(scene, arguments.states,
                                        arguments.recoveries)
        if arguments.verbose:
            print(f'{name}: {len(scene.records)} records, {counts[name]} '
                  f'states, {time.monotonic() - began:.1f} s',
                  file=sys.stderr, flush=True)
        if explorer.over():
            break
    print(json.dumps({
        'states': len(explorer.seen), 'findings': explorer.findings,
        'seed': arguments.seed, 'recoveries': explorer.recoveries,
        'workloads': counts, 'strategies': explorer.by_strategy}))


def again(explorer, arguments):
    """Make one state, and verify it."""
    from tests.crash import exploration
    state = exploration.load_state(arguments.scene, arguments.state,
                                   arguments.seed)
    if arguments.make:
        state.tree.write(arguments.make)
        print(json.dumps(state.expectation.dump()))
    else:
        explorer.verify(state)


def main(argv):
    arguments = parse(argv)
    if PRELOADED not in os.environ:
        preload(argv, os.path.abspath(arguments.tree))
    # The process has loaded it, so the file can go.
    shutil.rmtree(os.environ[PRELOADED], ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(2))
    from tests.crash import exploration
    keep = arguments.keep or tempfile.mkdtemp(prefix='glance-dedup-findings-')
    explorer = exploration.Explorer(
        arguments.seed, keep, report, arguments.most, arguments.seconds,
        arguments.strategy.split(',') if arguments.strategy else None)
    try:
        (again if arguments.scene else explore)(explorer, arguments)
    finally:
        explorer.close()
        if not arguments.keep and not explorer.findings:
            os.rmdir(keep)
    return 1 if explorer.findings else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
