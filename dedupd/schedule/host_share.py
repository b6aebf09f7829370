# SPDX-License-Identifier: Apache-2.0

"""This daemon among those that live: its number, and its share of tasks.

``glance_dedup/maintenance/live_hosts.py`` describes how daemons find each
other. A daemon takes part in a task if the task is shared (``registry.py``),
and if it has an interval for it. A daemon without a number works alone.
"""

from collections.abc import Callable
from collections.abc import Collection
import contextlib
import math
import socket
import time
from typing import Any

from oslo_config import cfg
from oslo_log import log

from dedupd.tasks import registry
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import package_version
from glance_dedup.maintenance import host_notes
from glance_dedup.maintenance import live_hosts
from glance_dedup.repository import image_repository

LOG = log.getLogger(__name__)


class Membership(closing.Closing):
    """This daemon's membership. Thread-safe.

    :param repository: not owned
    :param conf: has the group ``[dedupd]``
    :param names: the tasks that the daemon has
    :ivar hosts: None until `join`, and if this daemon has no number
    """

    def __init__(self, repository: image_repository.Repository,
                 conf: cfg.ConfigOpts, names: Collection[str]) -> None:
        self._repository = repository
        self._conf = conf
        self._shared = {name: task.share
                        for name, task in registry.TASKS.items()
                        if task.share and name in names}
        self._described: tuple[float, dict[str, dict[str, Any]]] = (
            -math.inf, {})
        self.hosts: live_hosts.Hosts | None = None

    def join(self) -> None:
        """Take a number, and the shares that the options give."""
        try:
            self.hosts = live_hosts.Hosts(self._repository.path)
        except exceptions.RepositoryError as e:
            LOG.warning('This daemon cannot share the work with others: %s',
                        e)
        self.follow()

    def close(self) -> None:
        """Give up the number. Idempotent."""
        if self.hosts is not None:
            self.hosts.close()

    def follow(self) -> None:
        """Follow the options: take part in the tasks that have an interval."""
        if self.hosts is None:
            return
        options = self._conf.dedupd
        try:
            self.hosts.take_part({
                share for name, share in self._shared.items()
                if registry.interval(name, options)
                and registry.TASKS[name].is_on(options)})
        except exceptions.RepositoryError as e:
            LOG.warning('The shares of the work stay as they were: %s', e)

    @property
    def number(self) -> int | None:
        """This daemon's number; None: it has none."""
        return None if self.hosts is None else self.hosts.number

    def share(self, name: str) -> Callable[[int], bool] | None:
        """Return the test whether a group is in this daemon's share.

        :returns: None if the task is not shared
        """
        hosts, share = self.hosts, self._shared.get(name)
        if hosts is None or share is None:
            return None
        return lambda group: hosts.is_mine(share, group)

    def members(self) -> dict[int, list[str]]:
        """The numbers of the daemons that live, with the tasks they share.

        :raises StorageError: as its name says
        """
        hosts = self.hosts
        if hosts is None:
            return {}
        members = {name: hosts.members(share)
                   for name, share in self._shared.items()}
        return {number: [name for name, found in members.items()
                         if number in found] for number in hosts.members()}

    def described(self) -> dict[str, dict[str, Any]]:
        """The daemons that live, for people: by their number as text.

        Each has its ``host`` and the ``version`` of its program, or None if
        it has not noted that, and its ``tasks``. Empty if that is not
        known. An answer is used again for some seconds.
        """
        moment, found = self._described
        if time.monotonic() > moment + live_hosts.MAX_MEMORY:
            with contextlib.suppress(exceptions.RepositoryError):
                found = {str(number): {**self._noted(number), 'tasks': tasks}
                         for number, tasks in self.members().items()}
            self._described = time.monotonic(), found
        return found

    def _noted(self, number: int) -> dict[str, str | None]:
        if self.hosts is not None and number == self.hosts.number:
            return {'host': socket.gethostname(),
                    'version': package_version.version()}
        with contextlib.suppress(OSError, exceptions.RepositoryError):
            notes = host_notes.load(self._repository.path, number)
            return {'host': notes.host or None,
                    'version': notes.program or None}
        return {'host': None, 'version': None}
