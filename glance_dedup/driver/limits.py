# SPDX-License-Identifier: Apache-2.0

"""Limits on the bytes that projects store.

An upload knows of all images that were committed before, by any process on any
host (:mod:`~glance_dedup.repository.usage`). What uploads write is reserved
for them before they may write on, and before their commit
(:mod:`~glance_dedup.repository.reservations`). So the images that a project
commits never exceed its limit, however many uploads run at once. What an
upload leaves on the disk that is refused or broken off counts until it is
collected. An image that shares such blocks is charged for them.

If a project's usage is not known, its uploads are not refused.
"""

import contextlib
import logging

from glance_dedup.base import exceptions
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages
from glance_dedup.repository import reservations
from glance_dedup.repository import usage

LOG = logging.getLogger(__name__)

#: The most bytes that an upload reserves before it writes them.
MAX_AHEAD = 256 << 20
# It reserves this part of the rest, so that others can write, too. If that
# is less than _MIN_AHEAD bytes, it checks after each piece.
_AHEAD_PART = 16
_MIN_AHEAD = 16 << 20


class OverLimit(exceptions.RepositoryError):
    """The project may not store so much."""


class Limits(usage.Usage):
    """The limits of all projects, and their usage. Thread-safe.

    :param default_mib: the limit of each project; 0: none
    :param of_projects_mib: other limits, by the project's id
    """

    def __init__(self, default_mib: int, of_projects_mib: dict[str, int]
                 ) -> None:
        super().__init__()
        self._default = default_mib
        self._of_projects = of_projects_mib

    def of(self, project: str) -> int:
        """A project's limit in MiB; 0: none.

        Blocks that no project stores have none.
        """
        return (self._of_projects.get(project, self._default)
                if project else 0)


class Transaction:
    """An upload that has to keep its project's limit.

    :param transaction: the upload's own, with nothing written
    :raises OverLimit: the project has reached its limit already
    :raises BusyError: other uploads hold the lock of reservations
    """

    def __init__(self, limits: Limits,
                 repository: image_repository.Repository, project: str,
                 transaction: openimages.Transaction) -> None:
        self._limits = limits
        self._repository = repository
        self._project = project
        self._transaction = transaction
        self._unseen = self._ahead = 0
        self.upload_id = transaction.upload_id
        self.set_hash = transaction.set_hash
        self._reservation: reservations.Reservation | None = None
        try:
            with reservations.locked(repository.path):
                self._reservation = reservations.Reservation(
                    repository.path, project, self.upload_id)
                self._reserve(self._reservation, 1)
        except BaseException:
            self.abort()
            raise

    def write(self, data: bytes | memoryview) -> int:
        """Write as the transaction does.

        :raises OverLimit: the bytes written so far are over the limit
        """
        length = self._transaction.write(data)
        self._unseen += length
        if self._unseen >= self._ahead:
            self._unseen = 0
            stored, _ = self._transaction.measure()
            with reservations.locked(self._repository.path):
                self._reserve(self._own(), stored)
        return length

    def commit(self) -> openimages.ImageStat:
        """Commit as the transaction does.

        :raises OverLimit: the bytes written are over the limit
        """
        stored, found = self._transaction.measure()
        with reservations.locked(self._repository.path):
            self._reserve(self._own(), stored)
            adopted = min(found, self._own().given_up())
        if adopted:
            self._transaction.credit(adopted, adopted)
        stat = self._transaction.commit()
        self._end(self._own(), 0, adopted)
        return stat

    def abort(self) -> None:
        """Abort as the transaction does. Bytes left on the disk count."""
        try:
            kept = self._transaction.kept_bytes()
        except exceptions.ClosedError:
            kept = 0    # it was committed or aborted
        self._transaction.abort()
        if self._reservation is not None:
            self._end(self._reservation, kept, 0)

    def _end(self, own: reservations.Reservation, kept: int, adopted: int
             ) -> None:
        """End the reservation, at the latest when the lock is not had."""
        with (contextlib.suppress(exceptions.BusyError),
              reservations.locked(self._repository.path)):
            own.take_over(adopted)
            own.end(kept)
        own.end(kept)

    def _own(self) -> reservations.Reservation:
        assert self._reservation is not None
        return self._reservation

    def _reserve(self, own: reservations.Reservation, size: int) -> None:
        """Reserve bytes for the written pieces, and some ahead.

        REQUIRES: the lock of reservations.
        """
        limit = self._limits.of(self._project)
        stored = self._limits.stored(self._repository, self._project)
        if stored is None:
            own.set(size)
            return
        left = (limit << 20) - stored - own.others() - size
        if left >= 0:
            ahead = min(MAX_AHEAD, left // _AHEAD_PART)
            self._ahead = ahead if ahead >= _MIN_AHEAD else 0
            own.set(size + self._ahead)
            return
        LOG.info('Project %s may store %d MiB, has stored %d bytes, its other '
                 'uploads take %d until they are collected, and image %s '
                 'takes %d or more', self._project, limit, stored,
                 own.others(), self._transaction.image_id, size)
        # Usage is not for users: it shows what was there before.
        raise OverLimit(
            f'project {self._project} may store {limit} MiB in this store, '
            f'after deduplication and compression, and image '
            f'{self._transaction.image_id} would be over that. Delete images '
            'of the project and try again in some minutes, or ask for a '
            'higher limit.')
