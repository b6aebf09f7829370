# SPDX-License-Identifier: Apache-2.0

"""The base of all commands on a repository: its path, and its daemon."""

import contextlib
import functools
import os
import typing

from cliff import command

from glance_dedup.cli import common
from glance_dedup.cli import host_settings
from glance_dedup.cli import progress_bar
from glance_dedup.client import client_errors

if typing.TYPE_CHECKING:
    from glance_dedup.client import daemon_client

# Commands do without a daemon that takes longer to answer.
_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 30.0


class RepositoryCommand(command.Command):
    """A command on a repository, which has the daemon's help if it answers.

    :ivar status: the status of the daemon that was found, if any
    """

    app: common.Program
    status: dict | None = None

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        self.add_arguments(parser)
        return parser

    def get_epilog(self) -> str:
        """Return the end of the help.

        cliff would add which distribution a command is from, and would read
        the metadata of all installed ones for that, at every start.
        """
        return self._epilog or ''

    def add_arguments(self, parser):
        """Add the command's own arguments to its parser."""

    @functools.cached_property
    def settings(self) -> host_settings.Settings:
        """Return where the repository is. Warns of options without effect.

        :raises UsageError: the option file cannot be used
        """
        found = host_settings.find(self.app.options)
        file = self.app.options.config_file
        if file is not None:
            from dedupd import opts

            for sentence in opts.unknown_in(file):
                self.app.tell(sentence)
        return found

    @functools.cached_property
    def path(self) -> str:
        """The repository's path.

        :raises UsageError: no option and no file names it
        """
        if self.settings.path is not None:
            return self.settings.path
        self.require_repository()
        assert self.status is not None      # no other option names it
        from glance_dedup.client import daemon_client

        return daemon_client.path_of(self.status)

    def open(self, **options):
        """The repository, opened with the settings and these options."""
        # Help and usage errors need no engine.
        from glance_dedup.client import slice_client
        from glance_dedup.repository import image_repository

        return image_repository.Repository(self.path, **{
            'ask_slices': slice_client.Asker(self.settings.socket),
            'reserve_mib': self.settings.reserve_mib,
            **self._index(), **options})

    def _index(self) -> dict:
        """Return where duplicates are looked for, as `Repository` takes it.

        With ``--socket`` alone, only the daemon knows.
        """
        found = {name: getattr(self.settings, name)
                 for name in ('filter_dir', 'index', 'index_dir')}
        figures = (self.status or {}).get('filter')
        if self.settings.path is None and isinstance(figures, dict):
            index, file = figures.get('index'), figures.get('file')
            if (index in host_settings.INDEXES and isinstance(file, str)
                    and os.path.isabs(file) and '\0' not in file):
                place = 'filter_dir' if index == 'filter' else 'index_dir'
                found |= {'index': index, place: os.path.dirname(file)}
        return found | {name: value for name in found if (
            value := getattr(self.app.options, name))}

    def progress(self, what, total=None, **options):
        """A `Progress`, which is silent with ``--quiet``."""
        return progress_bar.Progress(
            what, total, quiet=self.app.options.verbose_level == 0,
            **options)

    def images_of(self, glance):
        """All images of a Glance, by their ids; this may take long."""
        with self.progress(f'asking {glance.url}', unit='images') as progress:
            found = {}
            for image in glance.images():
                found[image.image_id] = image
                progress.update(len(found))
            return found

    # -- the daemon -----------------------------------------------------------

    def daemon(self) -> 'daemon_client.Client | None':
        """The repository's daemon; None if it does not answer.

        It is also None if the daemon on the socket serves another repository.

        :raises UsageError: the socket's path is not valid
        """
        if not self._may_answer():
            return None
        # Only here: HTTP and TLS take longer to import than a command runs.
        from glance_dedup.client import daemon_client

        try:
            client = daemon_client.Client(
                f'unix:{self.settings.socket}',
                connect_timeout=_CONNECT_SECONDS, timeout=_ANSWER_SECONDS)
        except ValueError as e:
            raise common.UsageError(f'--socket: {e}') from e
        try:
            status = client.status()
            found = daemon_client.repository_of(status)
            path = daemon_client.path_of(status)
        except client_errors.DaemonUnavailable:
            return None
        if not self._is_ours(found, path):
            return None
        self.status = status
        return client

    def _may_answer(self) -> bool:
        """Return whether there is a socket, or a path the client refuses."""
        path = self.settings.socket
        return bool(path) and ('\0' in path or os.path.exists(path))

    def healthy_daemon(self) -> 'daemon_client.Client | None':
        """Return `daemon`'s client; also None if the daemon is in trouble."""
        if not self._may_answer():
            return None
        with contextlib.suppress(client_errors.ClientError):
            return self.daemon()
        return None

    def require_repository(self) -> 'daemon_client.Client | None':
        """Return `daemon`'s client; None: the command works without it.

        :raises UsageError: no option and no file names the repository
        """
        client = self.daemon()
        if client is None and self.settings.path is None:
            why = f', {self.settings.why}' if self.settings.why else ''
            raise common.UsageError(
                f'no repository is given{why}, and no daemon answers on '
                f'{self.settings.socket_in_words}: use --repository '
                'DIR, --config-file FILE or --socket PATH')
        return client

    def _is_ours(self, repository_id: str, path: str) -> bool:
        """Return whether a daemon that serves this also serves `settings`."""
        ours = self.settings.path
        if ours is None:
            return True
        # An operator who may use the socket need not be able to read the
        # repository. By the option file, both belong together.
        if self.settings.options is not None and (
                os.path.realpath(path) == os.path.realpath(ours)):
            return True
        with self.open() as repo:
            return repo.repository_id == repository_id
