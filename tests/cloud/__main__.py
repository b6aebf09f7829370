# SPDX-License-Identifier: Apache-2.0
"""tools/cloud, once everything is installed."""

import argparse
import contextlib
import fcntl
import pathlib
import signal
import sys

from tests.cloud import cloud as cloud_module

TOP = pathlib.Path(__file__).resolve().parents[2]


def say(text):
    # In one piece: several services say something at once.
    sys.stdout.write(f'tools/cloud: {text}\n')
    sys.stdout.flush()


def near(path):
    """A path as one would type it here."""
    with contextlib.suppress(ValueError):
        return path.relative_to(pathlib.Path.cwd())
    return path


@contextlib.contextmanager
def alone(cloud):
    """One command at a time changes a cloud."""
    with open(cloud.directory / 'lock', 'a') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise cloud_module.CloudError(
                f'Another tools/cloud is at work in {cloud.directory}.\n'
                'What to do: wait for it, or end it, and start again.')
        yield


def up(cloud, args):
    cloud.up(args.service)
    say(f'the cloud is up. To use it:\n\n'
        f'  PATH={pathlib.Path(sys.prefix) / "bin"}:$PATH\n'
        f'  . {near(cloud.directory / "openrc")}\n'
        '  openstack image list\n\n'
        f'Logs: {near(cloud.directory / "log")}/')
    return 0


def status(cloud, args):
    rows = [('service', 'state', 'process', 'address', 'log')]
    for name, service in cloud.services.items():
        if name not in cloud.state.wanted and not service.processes:
            continue
        pids = [process.pid for process in service.processes]
        rows.append((name, service.state(), str(pids[-1]) if pids else '-',
                     service.address, str(near(service.log))))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print('  '.join(map(str.ljust, row, widths)).rstrip())
    states = {row[1] for row in rows[1:]}
    return 0 if states == {'up'} else 1


def down(cloud, args):
    cloud.down(keep=args.keep)
    say('the cloud is down')
    return 0


def arguments():
    parser = argparse.ArgumentParser('tools/cloud')
    commands = parser.add_subparsers(required=True)
    for function in (up, status, down):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument('--dir', type=pathlib.Path,
                             default=TOP / '.cloud')
        if function is up:
            command.add_argument('service', nargs='*')
        if function is down:
            command.add_argument('--keep', action='store_true')
    return parser.parse_args()


def main():
    args = arguments()

    def end(signum, frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGHUP, end)
    try:
        if (args.function is not up
                and not (args.dir / 'state.json').exists()):
            say(f'there is no cloud in {args.dir}')
            return 1 if args.function is status else 0
        cloud = cloud_module.Cloud(args.dir, say=say)
        if args.function is status:
            return status(cloud, args)
        with alone(cloud):
            return args.function(cloud, args)
    except KeyboardInterrupt:
        say('interrupted. What was up stays so: tools/cloud up goes on, '
            'tools/cloud down ends and removes all.')
        return 130
    except (cloud_module.CloudError, OSError) as exc:
        print(f'tools/cloud: FAILED: {exc}', file=sys.stderr)
        return 2


if __name__ == '__main__':
    sys.exit(main())
