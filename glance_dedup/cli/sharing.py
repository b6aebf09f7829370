# SPDX-License-Identifier: Apache-2.0

"""Trying a directory that hosts share: repository try-sharing."""

from cliff import columns
from cliff import lister

from glance_dedup.cli import common


class Seconds(columns.FormattableColumn):
    def human_readable(self):
        return '-' if self._value is None else f'{self._value:.1f}'


class TrySharing(common.RepositoryCommand, lister.Lister):
    """Try whether hosts can share the repository's directory.

    Run it on all hosts at the same time, as the user that will run Glance
    there. They meet in the directory and try each thing that the store needs
    of a file system that several hosts share; each of them then shows what
    all have found. It takes a minute or a few, the most where names are
    remembered for long. The repository may be in use. Nothing is left behind.

    The exit status is 1 if something is not fine. What is limited works, with
    the consequence that is told.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--hosts', type=int, default=2, metavar='N',
            help='How many hosts take part. Default: %(default)s.')
        parser.add_argument(
            '--wait', type=float, default=300, metavar='SECONDS',
            help='How long to wait for the others to come. Default: '
            '%(default)s.')
        return parser

    def take_action(self, parsed_args):
        from glance_dedup.trial import findings as findings_module
        from glance_dedup.trial import trial

        if parsed_args.hosts < 2:
            raise common.UsageError('--hosts: at least 2 take part')
        with self.progress('trying', unit='steps') as progress:
            def update(done, total, what):
                progress.what = what
                progress.update(done, total)
            findings = trial.Trial(self.path, parsed_args.hosts,
                                   parsed_args.wait, progress=update).run()
        if any(f.verdict == findings_module.UNFIT for f in findings):
            self.app.status = 1
        return (('property', 'verdict', 'seconds', 'detail', 'meaning'),
                [(f.title, f.verdict, Seconds(f.seconds), f.detail, f.meaning)
                 for f in findings])
