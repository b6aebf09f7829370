# SPDX-License-Identifier: Apache-2.0

"""The commands on this host's index of duplicates.

It is the fingerprint filter, or the index in its place.
"""

from cliff import show

from glance_dedup.cli import command
from glance_dedup.cli import common


def fields_of(repo) -> dict:
    """The columns that describe this host's filter."""
    kinds = {'filter_bytes': common.Size,
             'filter_refresh_age_seconds': common.Age}
    return {name: kinds[name](value) if name in kinds else value
            for name, value in repo.statistics().items()
            if name.startswith('filter_')}


class Show(command.RepositoryCommand, show.ShowOne):
    """Show this host's index: the fingerprint filter, or another."""

    def take_action(self, parsed_args):
        with self.open() as repo:
            fields = fields_of(repo)
            return common.shown({
                'index': repo.filter.index, 'path': repo.filter.file,
                'error': repo.filter.error, **fields})


class Rebuild(command.RepositoryCommand, show.ShowOne):
    """Rebuild this host's index from the groups.

    It is emptied first. The index only finds duplicates; nothing depends on
    it. Uploads go on meanwhile.
    """

    def take_action(self, parsed_args):
        with self.open() as repo:
            with self.progress('rebuilding', unit='groups') as progress:
                repo.rebuild_filter(progress.update)
            return common.shown(fields_of(repo))


class Remove(command.RepositoryCommand, show.ShowOne):
    """Remove this host's index.

    This gives its memory or disk space back, for example after another index
    was chosen, or before this host leaves the repository. Nothing is lost: the
    next upload on this host makes a new one. While a process has it open, it
    stays.
    """

    def take_action(self, parsed_args):
        with self.open() as repo:
            removed = repo.filter.remove()
        return common.shown({'path': removed, 'removed': removed is not None})
