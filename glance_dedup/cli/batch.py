# SPDX-License-Identifier: Apache-2.0

"""The commands that plan and make batch backups."""

import argparse
import os

from cliff import lister

from glance_dedup.backup import limits
from glance_dedup.backup import retention
from glance_dedup.base import exceptions
from glance_dedup.base import hostlist
from glance_dedup.base import imageids
from glance_dedup.base import scopes
from glance_dedup.cli import backup_commands
from glance_dedup.cli import command
from glance_dedup.cli import common

_PREFIX = 'volume:'


def source_of(text: str, format_: str | None):
    """Parsed argument that names sources.

    ``volume:NAME`` is a volume, ``[NAME=]PATH`` with a slash a file, and
    anything else a server.

    :raises UsageError: its backups cannot be named like this
    """
    from glance_dedup.backup import backup_job

    if text.startswith(_PREFIX):
        return backup_job.Source(text.removeprefix(_PREFIX), 'volume')
    if '/' not in text:
        return backup_job.Source(text, 'server')
    name, equals, path = text.partition('=')
    if not equals or '/' in name:
        path = text
        name = os.path.basename(text).partition('.')[0]
    if not imageids.is_backup_name(name):
        raise common.UsageError(
            f'the backups of {path} cannot be named {name!r}: a name has 1 to '
            '109 characters of A-Z a-z 0-9 _ -. Give one: NAME=FILE')
    return backup_job.Source(name, 'disk', os.path.abspath(path), format_)


def _weight(text):
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 <= weight <= 1:
        raise argparse.ArgumentTypeError(f'{text!r} is no number from 0 to 1')
    return weight


def _percent(text):
    try:
        percent = float(text.removesuffix('%'))
    except ValueError:
        percent = 0.0
    if not 1 <= percent <= 100:
        raise argparse.ArgumentTypeError(
            f'{text!r} is no number from 1 to 100')
    return percent / 100


class _Batch(command.RepositoryCommand, lister.Lister):
    """Base of both commands."""

    def add_arguments(self, parser):
        from glance_dedup.backup import backup_job

        parser.add_argument(
            'sources', metavar='FILE|SERVER|volume:VOLUME', nargs='+',
            help="What to back up: a disk in a file or on a device, whose "
            "name is the file's without its suffix, or NAME in NAME=FILE; a "
            'server of libvirt; or a volume of this repository. A FILE has a '
            'slash in it.')
        where = parser.add_mutually_exclusive_group()
        where.add_argument(
            '--local', metavar='N', type=int, default=1,
            help='Work with N processes on this host. Default: %(default)s.')
        where.add_argument(
            '--hosts', metavar='FILE',
            help='Work with one process on each of the hosts in this file, '
            'one on each line. They are reached by ssh, and have the '
            'repository under the same path.')
        parser.add_argument(
            '--disk-format', choices=('raw', 'qcow2'),
            help='Of all FILEs. Default: raw, and a file that looks '
            'otherwise is refused.')
        parser.add_argument(
            '--view-limit', metavar='SIZE', type=common.size, default='10G',
            help='The most that the views on one host may take: what running '
            'servers overwrite during their backup. Servers that would take '
            'more together, as fast as they wrote in their last backups, are '
            'in other rounds; one that takes more by itself is given up. '
            'Default: %(default)s.')
        parser.add_argument(
            '--weight', metavar='A', type=_weight,
            default=backup_job.Settings.weight,
            help='A plan of rounds costs A T + (1 - A) J, where T is the time '
            'of a backup on average, and J that of the whole run. 0: as short '
            'a run as possible, in one round; 1: each disk is read in as '
            'short a time as possible, in a round of its own. '
            'Default: %(default)s.')
        parser.add_argument(
            '--libvirt', metavar='URI', default=backup_job.Settings.libvirt,
            help="Of each host's libvirt. Default: %(default)s.")
        parser.add_argument(
            '--backing', metavar='DIR', action='append', default=[],
            help='Where backing files may lie of the disks of servers that '
            'are shut off, and of FILEs in the format qcow2. May be given '
            'several times.')
        for name, words in (
                ('state', 'for what is kept between backups'),
                ('spool', 'for the spool of a round'),
                ('scratch', 'for what running servers overwrite')):
            parser.add_argument(
                f'--{name}', metavar='DIR',
                default=getattr(backup_job.Settings,
                                name),
                help=f'A directory of each host {words}. '
                'Default: %(default)s.')

    def job_settings(self, parsed_args, **more):
        """The job's settings.

        :raises UsageError: a number is out of its bounds
        """
        from glance_dedup.backup import backup_job

        if not 1 <= parsed_args.local <= 256:
            raise common.UsageError('--local: 1 to 256 processes')
        if not parsed_args.view_limit:
            raise common.UsageError('--view-limit: a size above 0')
        return backup_job.Settings(
            ranks=parsed_args.local, hosts=(
                () if parsed_args.hosts is None
                else hostlist.read(parsed_args.hosts)),
            state=os.path.abspath(parsed_args.state),
            spool=os.path.abspath(parsed_args.spool),
            scratch=os.path.abspath(parsed_args.scratch),
            views=parsed_args.view_limit, weight=parsed_args.weight,
            libvirt=parsed_args.libvirt,
            backing=tuple(map(os.path.abspath, parsed_args.backing)), **more)

    def sources(self, parsed_args):
        """Return the sources to be backed up.

        :raises UsageError: two of them have one name
        """
        found: dict = {}
        for text in parsed_args.sources:
            source = source_of(text, parsed_args.disk_format)
            if found.setdefault(source.name, source) != source:
                raise common.UsageError(
                    f'two of the sources are named {source.name}: give one of '
                    'them another name (NAME=FILE)')
        return list(found.values())

    def report_lost(self, work):
        """Report the hosts that could not take part."""
        for host, why in work.lost.items():
            self.app.report(exceptions.RepositoryError(
                f'{host} was left out: {why}'))


class Plan(_Batch):
    """Show which sources would be backed up together, in rounds.

    The times are estimates: 100 MB/s for each host. The last line on standard
    error has the cost: how long a backup takes on average, and the whole run.
    """

    def take_action(self, parsed_args):
        from glance_dedup.backup import backup_job

        sources = self.sources(parsed_args)
        with self.open(index='none') as repo:
            found = backup_job.Job(
                repo, self.job_settings(parsed_args), retention.now(),
                lambda done, total, words: None)
            plan = found.plan(
                [source for source in sources if source.kind != 'volume'])
            self.report_lost(found)
            for missing in found.missing():
                self.app.report(exceptions.ImageNotFound(
                    f'{missing.name}: {missing.note}'))
        self.app.tell(f'a backup takes {plan.average:.0f} s on average, and '
                      f'the whole run {plan.span:.0f} s')
        return ('round', 'host', 'name', 'size', 'seconds'), [
            (number, disk.host, disk.name, common.Size(disk.size),
             round(disk.seconds)) for number, disks in enumerate(
                 plan.rounds, 1) for disk in disks]


class Run(_Batch):
    """Back up disks, servers and volumes.

    Equal blocks are stored once, and clean parts of a disk are not sent. A
    source that fails does not stop the others; the exit status is then 3.
    """

    def add_arguments(self, parser):
        super().add_arguments(parser)
        common.add_codec(parser)
        parser.add_argument(
            '--read-rate', metavar='SIZE', type=common.size, default='0',
            help='The most bytes that a host reads of its disks in a second. '
            'Default: no limit.')
        parser.add_argument(
            '--cpu-share', metavar='PERCENT', type=_percent, default=0.0,
            help='The most that each process takes of a processor. '
            'Default: no limit.')
        parser.add_argument(
            '--priority', choices=limits.PRIORITIES,
            default=limits.LOW,
            help='For processors and disks: idle has its turn when nobody '
            'else wants it. Default: %(default)s.')
        parser.add_argument(
            '--project', default='', help='To which the backups belong.')
        common.add_scope(parser)

    def take_action(self, parsed_args):
        from glance_dedup.backup import backup_job

        sources = self.sources(parsed_args)
        settings = self.job_settings(
            parsed_args, codec=parsed_args.codec,
            read_rate=parsed_args.read_rate, cpu_share=parsed_args.cpu_share,
            priority=parsed_args.priority, project=parsed_args.project,
            scope=scopes.choose(parsed_args.scope, parsed_args.project))
        rows = []
        with (self.open(index='none') as repo,
              self.progress('backing up') as progress):
            work = backup_job.Job(repo, settings, retention.now(),
                                  progress.step)
            results = work.run(sources)
            for notice in work.notices:
                self.app.tell(notice)
            for (host, limit), seconds in sorted(work.held.items()):
                if seconds >= 1:
                    self.app.tell(f'--{limit.replace("_", "-")} held the '
                                  f'backup on {host} for {seconds:.0f} s')
            for result in results:
                if not result.backup_id:
                    self.app.report(exceptions.RepositoryError(
                        f'{result.name} was not backed up: {result.note}'))
                rows.append((result.name, result.backup_id or None,
                             common.Size(result.size),
                             common.Size(result.read),
                             common.Size(result.stored), result.note))
            self.report_lost(work)
            names = {result.name for result in results}
            backup_commands.tell_of_future(
                self.app, [found for found in repo.backups()
                           if found.name in names], retention.now())
        return ('name', 'backup_id', 'size', 'read_bytes', 'new_bytes',
                'note'), rows
