# SPDX-License-Identifier: Apache-2.0

"""A helper: a daemon that is no maintainer, and does its share of the work.

A helper recompresses and scrubs groups. It changes no file that others use:
it replaces a group's file by one that it wrote, under the group's lease and
exclusive lock (I4), and it notes the other work for the maintainer
(``host_notes.py``). So a helper that was cut off from the server, and does not
notice that its locks fell, can do no harm.
"""

from collections.abc import Callable
import contextlib
import socket
from typing import Any
from typing import TypeVar

from glance_dedup import _engine
from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import package_version
from glance_dedup.maintenance import host_notes
from glance_dedup.maintenance import live_hosts
from glance_dedup.repository import image_repository

_Result = TypeVar('_Result')


class Helper(closing.Closing):
    """Context of the tasks of a helper. One thread at a time uses it.

    :param hosts: in which this daemon has a number
    :ivar notes: for the maintainer, and for the next daemon with this number
    :raises AccessDenied: if this user may not maintain the repository
    :raises StorageError: as its name says
    """

    def __init__(self, repository: image_repository.Repository,
                 hosts: live_hosts.Hosts) -> None:
        with files.os_errors(f'cannot look at {repository.path}',
                             exceptions.StorageError):
            access.require_maintainer(repository.path)
            self.notes = host_notes.load(repository.path, hosts.number)
        self.notes.host = socket.gethostname()
        self.notes.program = package_version.version()
        self.repository = repository
        self.handle = repository.handle()
        self.engine = _engine.Maintenance(self.handle)
        self.rewriting: None = None
        """The maintainer's: a helper keeps no group in which it made way."""
        self._hosts = hosts
        self._saved = b''

    def close(self) -> None:
        """Give back every lease, and save the notes. Idempotent."""
        self.engine.close()
        with contextlib.suppress(exceptions.RepositoryError):
            self.save()

    def save(self) -> None:
        """Save the notes, if they have changed.

        :raises NoSpaceError, StorageError: as their names say
        """
        content = self.notes.encode()
        if content == self._saved:
            return
        with files.os_errors('cannot note what was found',
                             exceptions.StorageError):
            host_notes.save(self.repository.path, self._hosts.number,
                            content)
        self._saved = content

    # -- as the maintainer has them ----------------------------------------

    def guard(self, work: Callable[[], _Result],
              progress: Callable[[int, int, str], None] | None = None
              ) -> _Result:
        """Do `work`; a helper has no catalog that could be bad."""
        return work()

    def scrub_state(self) -> dict[str, Any]:
        """Return how far the last pass of the scrub got."""
        return self.notes.scrub

    def damaged_groups(self) -> set[int]:
        """The groups of which it is known that a block is damaged: none.

        It is computed from the groups' entries.
        """
        return set()
