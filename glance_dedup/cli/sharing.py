# SPDX-License-Identifier: Apache-2.0

"""The command ``repository test-filesystem``."""

from cliff import columns
from cliff import lister

from glance_dedup.cli import command
from glance_dedup.cli import common


class Seconds(columns.FormattableColumn):
    """Seconds, or None: with one decimal in a table."""

    def human_readable(self):
        return '-' if self._value is None else f'{self._value:.1f}'


class TestFilesystem(command.RepositoryCommand, lister.Lister):
    """Test whether hosts can share the repository's directory.

    Run it on all hosts at the same time, as the user that will run Glance
    there. The hosts meet in the directory and test each property of the file
    system that the store needs; each host then shows the findings of all. It
    takes a few minutes, longer if the file system caches names for long. The
    repository may be in use. No files remain.

    The exit status is 1 if a property is not fine. A limited property works,
    with the consequence that is shown.
    """

    def add_arguments(self, parser):
        parser.add_argument(
            '--hosts', type=int, default=2, metavar='N',
            help='The number of hosts that take part. Default: %(default)s.')
        parser.add_argument(
            '--wait', type=common.duration, default='5min',
            metavar='DURATION',
            help='How long to wait for the other hosts. Default: %(default)s.')

    def take_action(self, parsed_args):
        from glance_dedup.fstest import property_findings
        from glance_dedup.fstest import trial

        if parsed_args.hosts < 2:
            raise common.UsageError('--hosts must be at least 2')
        with self.progress('trying', unit='steps') as progress:
            findings = trial.Trial(
                self.path, parsed_args.hosts, parsed_args.wait,
                progress=progress.step).run()
        if any(f.verdict == property_findings.UNFIT for f in findings):
            self.app.status = common.DAMAGED
        return (('property', 'verdict', 'seconds', 'detail', 'meaning'),
                [(f.title, f.verdict, Seconds(f.seconds), f.detail, f.meaning)
                 for f in findings])
