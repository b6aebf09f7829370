# SPDX-License-Identifier: Apache-2.0

"""Finds out when the disk has too little free space to wait for the interval.

The task ``tier`` runs at its interval. Uploads may fill the disk sooner. So
the maintainer checks the free space every few seconds, and runs the task at
once if less is free than ``tier_free_mib``.
"""

import contextlib
import math
import time

from glance_dedup.base import exceptions
from glance_dedup.repository import cold_settings
from glance_dedup.repository import image_repository

#: Seconds between two runs while they do not free enough: groups may be in
#: use, or not be full.
RETRY = 60.0


class Shortage:
    """Decides whether groups are to move now. Not thread-safe.

    :param repository: its groups may be cold
    """

    def __init__(self, repository: image_repository.Repository) -> None:
        self._repository = repository
        self._ended = -math.inf
        self._left = 0

    def look(self, free_bytes: int) -> bool:
        """Return whether the task is to run now.

        :param free_bytes: to be kept free; 0: no group moves for that
        """
        if not free_bytes:
            return False
        with contextlib.suppress(exceptions.RepositoryError):
            room, kept = self._repository.room()
            parameters = self._repository.parameters
            return (room < cold_settings.wanted_room(free_bytes, kept,
                                                     parameters)
                    and (time.monotonic() >= self._ended + RETRY
                         or room + parameters.group_slots
                         * parameters.block_size <= self._left)
                    and cold_settings.read(self._repository.path) is not None)
        return False    # the next check comes soon

    def ended(self) -> None:
        """Note that the task has run, with or without success."""
        self._ended = time.monotonic()
        with contextlib.suppress(exceptions.RepositoryError):
            self._left, _ = self._repository.room()
