# SPDX-License-Identifier: Apache-2.0

"""The commands on projects: the bytes that each has stored and shares."""

from cliff import lister
from cliff import show

from glance_dedup.cli import command
from glance_dedup.cli import common
from glance_dedup.cli import maintenance

_SIZES = ('logical_bytes', 'zero_bytes', 'new_bytes', 'stored_bytes',
          'exclusive_bytes', 'shared_bytes', 'charged_bytes')
_NAMES = ('project', 'images', 'backups', *_SIZES, 'counted')
_LISTED = ('project', 'images', 'logical_bytes', 'stored_bytes',
           'exclusive_bytes', 'shared_bytes', 'charged_bytes')


class _Command(command.RepositoryCommand):
    def rows(self) -> list[dict]:
        """All projects, from the daemon or from the repository."""
        client = self.require_repository()
        if client is not None:
            found = client.projects()
        else:
            from dedupd.status import repository_stats

            with self.open() as repo:
                found = repository_stats.of_projects(repo)
        return [{name: common.Size(row.get(name)) if name in _SIZES else
                 row.get(name) for name in _NAMES} for row in found]


class List(_Command, lister.Lister):
    """List the projects with what each has stored, the largest first.

    The figures are those of the last accounting. What a project shares with
    others is from the last project count.
    """

    def take_action(self, parsed_args):
        return _LISTED, [tuple(row[name] for name in _LISTED)
                         for row in self.rows()]


class Show(_Command, show.ShowOne):
    """Show what a project has stored, and what it shares with others."""

    def add_arguments(self, parser):
        parser.add_argument(
            'project', metavar='PROJECT',
            help="The project's id; an empty string for images that no "
            'project stored.')

    def take_action(self, parsed_args):
        for row in self.rows():
            if row['project'] == parsed_args.project:
                if row['counted'] is not None:
                    row['counted'] = common.Time(row['counted'])
                return common.shown(row)
        raise common.FailedError(
            f'project {parsed_args.project!r} has stored nothing that was '
            "counted; 'glance-dedup project list' shows those that have")


class Count(maintenance.TaskCommand):
    """Count what projects share with each other.

    This reads the recipes of all images. The daemon does it once a day.
    """

    task = 'projects'
    what = 'counting projects'
