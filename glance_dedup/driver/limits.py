# SPDX-License-Identifier: Apache-2.0

"""Limits on what projects store.

An upload knows of all images that were committed before, by any process on any
host (:mod:`~glance_dedup.repository.usage`). Two uploads at once do not know
of each other before one is committed. So each looks again before its own
commit. Then a project can pass its limit only by what it commits within the
same moments.

If it is not known what a project has stored, its uploads are not refused.
"""

import logging

from glance_dedup.base import exceptions
from glance_dedup.repository import openimages
from glance_dedup.repository import repository as repository_module
from glance_dedup.repository import usage

LOG = logging.getLogger(__name__)

#: An upload looks again each time that so many of its bytes were written.
EVERY = 256 << 20


class OverLimit(exceptions.RepositoryError):
    """The project may not store so much."""


class Limits(usage.Usage):
    """The limits of all projects, and what these have stored. Thread-safe.

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

        What no project stores has none.
        """
        return (self._of_projects.get(project, self._default)
                if project else 0)


class Transaction:
    """An upload that has to keep its project's limit.

    :param transaction: the upload's own, with nothing written
    :raises OverLimit: the project has reached its limit already
    """

    def __init__(self, limits: Limits,
                 repository: repository_module.Repository, project: str,
                 transaction: openimages.Transaction) -> None:
        self._limits = limits
        self._repository = repository
        self._project = project
        self._transaction = transaction
        self._unseen = 0
        self.upload_id = transaction.upload_id
        self.set_hash = transaction.set_hash
        self.abort = transaction.abort
        try:
            self._need_room(1)
        except BaseException:
            transaction.abort()
            raise

    def write(self, data: bytes | memoryview) -> int:
        """As that of the transaction.

        :raises OverLimit: what was written so far is over the limit
        """
        length = self._transaction.write(data)
        self._unseen += length
        if self._unseen >= EVERY:
            self._unseen = 0
            self._need_room(self._transaction.keep()[1])
        return length

    def commit(self) -> openimages.ImageStat:
        """As that of the transaction.

        :raises OverLimit: what was written is over the limit
        """
        self._need_room(self._transaction.keep()[1])
        return self._transaction.commit()

    def _need_room(self, more: int) -> None:
        """Check whether the project may store so many more bytes."""
        limit = self._limits.of(self._project)
        stored = self._limits.stored(self._repository, self._project)
        if stored is None or stored + more <= limit << 20:
            return
        LOG.info('Project %s may store %d MiB, has stored %d bytes, and '
                 'image %s takes %d or more', self._project, limit, stored,
                 self._transaction.image_id, more)
        # How much is stored is not for users: it tells what was there before.
        raise OverLimit(
            f'project {self._project} may store {limit} MiB in this store, '
            f'after deduplication and compression, and image '
            f'{self._transaction.image_id} would be over that. Delete images '
            'of the project and try again in some minutes, or ask for a '
            'higher limit.')
