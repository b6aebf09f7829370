# SPDX-License-Identifier: Apache-2.0

"""Taking over: this daemon's tries to become the maintainer.

A daemon tries once when it starts, and then every minute, if no process is the
maintainer.
"""

import contextlib
import math
import time

from oslo_log import log

from dedupd.schedule import host_share
from glance_dedup.base import exceptions
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository

LOG = log.getLogger(__name__)

#: Seconds between two tries to become the maintainer.
TRIAL_INTERVAL = 60.0


class Takeover:
    """This daemon's tries. Used in the scheduler's thread.

    :param repository: not owned
    :param membership: not owned; its number is made sure of before each try
    """

    def __init__(self, repository: image_repository.Repository,
                 membership: host_share.Membership) -> None:
        self._repository = repository
        self._membership = membership
        self._tried = -math.inf
        self._reported = False

    def attempt(self, progress: maintainer_role.Progress
                ) -> maintainer_role.Maintainer | None:
        """Try to become the maintainer; None: another process is.

        :param progress: shows a rebuild of the catalog
        :raises: as :class:`maintainer_role.Maintainer`, but for BusyError
        """
        self._tried = time.monotonic()
        try:
            maintainer = maintainer_role.Maintainer(self._repository, progress)
        except exceptions.BusyError as e:
            if not self._reported:
                LOG.warning('Only reads are served: %s. Tried again every '
                            '%d seconds.', e, TRIAL_INTERVAL)
            self._reported = True
            return None
        self._reported = False
        return maintainer

    def hurry(self) -> None:
        """Have the next try be due now."""
        self._tried = -math.inf

    @property
    def due(self) -> float:
        """Time of the daemon's next try, by time.monotonic()."""
        return self._tried + TRIAL_INTERVAL

    def is_due(self) -> bool:
        """Return whether the maintainer has gone; checks once in the interval.

        The check also makes sure of the number: the server may have dropped
        its lock.
        """
        if time.monotonic() < self.due:
            return False
        self._tried = time.monotonic()
        # If the check fails now, the daemon tries.
        with contextlib.suppress(exceptions.RepositoryError):
            if self._membership.hosts is not None:
                self._membership.hosts.renew()
            return not self._repository.is_maintained
        return True
