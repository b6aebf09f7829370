# SPDX-License-Identifier: Apache-2.0

"""The program of tools/shared, once everything is installed."""

import argparse
import contextlib
import fcntl
import pathlib
import signal
import subprocess
import sys

from tests.sharedfs import kinds
from tests.sharedfs import shared_fs

TOP = pathlib.Path(__file__).resolve().parents[2]


def say(text):
    print(f'tools/shared: {text}', flush=True)


@contextlib.contextmanager
def alone(shared):
    """Hold the lock, so that one command at a time changes a file system."""
    with open(shared.directory / 'lock', 'a') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise shared_fs.SharedError(
                f'Another tools/shared is at work in {shared.directory}.\n'
                'What to do: wait for it, or end it, and start again.')
        yield


def up(shared):
    shared.up()
    versions = ', '.join(map(' '.join, shared.versions().items()))
    say(f'{versions} is up. Two hosts have it mounted:\n')
    for mount in shared.mounts:
        print(f'  {mount.root}')
    print(f'\nLogs: {shared.directory / "log"}/')
    return 0


def status(shared):
    rows = [('service', 'state', 'process', 'address', 'log')]
    for name, one in shared.services.items():
        pids = [process.pid for process in one.processes]
        rows.append((name, one.state(), str(pids[-1]) if pids else '-',
                     one.address, str(one.log)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print('  '.join(map(str.ljust, row, widths)).rstrip())
    return 0 if {row[1] for row in rows[1:]} == {'up'} else 1


def run(shared, command):
    """Run a command on the host of the mounts: for NFS, in the guest."""
    machine = shared.services.get('guest')
    if machine is None:
        return subprocess.run(command, check=False).returncode
    return machine.call(command, None, pathlib.Path.cwd()).returncode


def down(shared):
    shared.down()
    say('nothing of it runs any more')
    return 0


def arguments():
    parser = argparse.ArgumentParser('tools/shared')
    commands = parser.add_subparsers(required=True)
    for function in (up, status, run, down):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument('--directory', type=pathlib.Path,
                             default=TOP / '.shared')
        if function is up:
            command.add_argument('kind', choices=sorted(kinds.KINDS))
        elif function is run:
            command.add_argument('command', nargs=argparse.REMAINDER)
    return parser.parse_args()


def main():
    args = arguments()

    def end(signum, frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGHUP, end)
    try:
        kind = (getattr(args, 'kind', None)
                or shared_fs.kind_in(args.directory))
        if kind is None:
            say(f'there is no shared file system in {args.directory}')
            return 0 if args.function is down else 1
        shared = shared_fs.Shared(kind, kinds.KINDS[kind], args.directory,
                                  say)
        if args.function is status:
            return status(shared)
        if args.function is run:
            return run(shared, args.command)
        with alone(shared):
            return args.function(shared)
    except KeyboardInterrupt:
        say('interrupted. What was up stays so: tools/shared up goes on, '
            'tools/shared down ends and removes all.')
        return 130
    except (shared_fs.SharedError, OSError) as exc:
        print(f'tools/shared: FAILED: {exc}', file=sys.stderr)
        return 2


if __name__ == '__main__':
    sys.exit(main())
