# SPDX-License-Identifier: Apache-2.0
"""The program of tools/cloud, once everything is installed."""

import argparse
import contextlib
import fcntl
import pathlib
import shlex
import signal
import subprocess
import sys
import time

from tests.cloud import local_cloud
from tests.cloud import tempest_run

TOP = pathlib.Path(__file__).resolve().parents[2]
#: Those of tempest's tests that are about images.
REGEX = r'^tempest\.api\.image'


def say(text):
    # Write in one call: several services print at the same time.
    sys.stdout.write(f'tools/cloud: {text}\n')
    sys.stdout.flush()


def near(path):
    """Return a path as a user would type it here."""
    with contextlib.suppress(ValueError):
        return path.relative_to(pathlib.Path.cwd())
    return path


@contextlib.contextmanager
def alone(cloud):
    """Hold the lock, so that one command at a time changes a cloud."""
    with open(cloud.directory / 'lock', 'a') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise local_cloud.CloudError(
                f'Another tools/cloud is at work in {cloud.directory}.\n'
                'What to do: wait for it, or end it, and start again.')
        yield


def install(environments):
    """Make the missing environments of services."""
    with subprocess.Popen([
            'bash', '-c', '. "$1"; shift; need_services "$@"', 'tools/cloud',
            TOP / 'tools' / 'lib.sh', *environments],
            stdin=subprocess.DEVNULL) as process:
        try:
            status = process.wait()
        except BaseException:
            # The process ends its own children.
            process.terminate()
            raise
    if status:
        raise local_cloud.CloudError(
            'not everything is installed that this cloud needs.\n'
            'What to do: what is said above, then run this again.')


def up(cloud, args):
    begin = time.monotonic()
    services = args.service
    if args.tempest and services:
        services = [*services, 'keystone', 'glance']
    install([*cloud.environments(services),
             *(['tempest'] if args.tempest else [])])
    installed = time.monotonic()
    cloud.up(services)
    if args.tempest:
        say('configure tempest ...')
        tempest_run.Tempest(cloud, cloud.directory / 'tempest',
                            tempest_run.options_of(cloud))
    end = time.monotonic()
    say(f'the cloud is up, after {end - begin:.0f} s, of which '
        f'{installed - begin:.0f} for environments. To use it:\n\n'
        + ''.join(f'  {line}\n' if line else '\n' for line in usage(cloud))
        + f'\nLogs: {near(cloud.directory / "log")}/')
    return 0


def usage(cloud):
    """Yield lines for a shell, with comments."""
    yield f'PATH={pathlib.Path(sys.prefix) / "bin"}:$PATH'
    yield f'. {near(cloud.directory / "openrc")}'
    yield 'openstack image list'
    for host in cloud.hosts.values():
        yield from ('', f'# on the compute host {host.name}')
        yield shlex.join(host.enter()) + ' bash'
    if cloud.state.swift:
        yield from ('', '# move full groups to Swift')
        yield ('glance-dedup --socket '
               f'{cloud.services["dedupd"].socket} task tier --all')
    if cloud.state.site:
        daemon = cloud.services['other/dedupd']
        yield from ('', '# send all images to the other site')
        yield f'export GLANCE_DEDUP_REPOSITORY={cloud.repository}'
        yield ('glance-dedup image replicate --all '
               f'--to https://{daemon.listen} \\')
        yield (f'    --cert {daemon.operator} --key {daemon.operator} \\')
        yield (f'    --ca-file {daemon.authority} --from-cloud admin '
               '--to-cloud other')
    place = cloud.directory / 'tempest'
    if place.exists():
        prefix = tempest_run.prefix()
        yield from ('', '# tempest')
        yield (f'cd {place} && PATH={prefix / "bin"}:$PATH tempest run \\')
        yield f"    --config-file {place}/etc/tempest.conf --regex '{REGEX}'"


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
    notes = [f'Glance has {section}.{name}={value}'
             for section, values in cloud.settings.items()
             for name, value in values.items()]
    if (cloud.directory / 'tempest').exists():
        notes.append(f'tempest is in {near(cloud.directory / "tempest")}')
    if notes:
        print('', *notes, sep='\n')
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
            for name, variable in (('--glance', '[SECTION.]OPTION=VALUE'),
                                   ('--host', 'NAME'),
                                   ('--cached-host', 'NAME')):
                command.add_argument(name, metavar=variable, action='append',
                                     default=[])
            command.add_argument('--site', action='store_true')
            command.add_argument('--swift', action='store_true')
            command.add_argument('--tempest', action='store_true')
            command.add_argument('service', nargs='*')
        if function is down:
            command.add_argument('--keep', action='store_true')
    return parser.parse_args()


def changed(args):
    """Return the cloud, with the additions of `up`'s options."""
    both = {*args.host} & {*args.cached_host}
    if both:
        raise local_cloud.CloudError(
            f'{both.pop()} cannot be a host both with and without a cache.\n'
            'What to do: give it to either --host or --cached-host.')
    return local_cloud.Cloud(
        args.dir, say=say, site=args.site, swift=args.swift,
        settings=args.glance,
        hosts={**dict.fromkeys(args.host, False),
               **dict.fromkeys(args.cached_host, True)})


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
        cloud = local_cloud.Cloud(args.dir, say=say)
        if args.function is status:
            return status(cloud, args)
        with alone(cloud):
            return args.function(
                changed(args) if args.function is up else cloud, args)
    except KeyboardInterrupt:
        say('interrupted. What was up stays so: tools/cloud up goes on, '
            'tools/cloud down ends and removes all.')
        return 130
    except (local_cloud.CloudError, OSError) as exc:
        print(f'tools/cloud: FAILED: {exc}', file=sys.stderr)
        return 2


if __name__ == '__main__':
    sys.exit(main())
