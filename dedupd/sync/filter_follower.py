# SPDX-License-Identifier: Apache-2.0

"""Following: adds blocks that other hosts store to the host's filter.

Each daemon does this for its host, whether it is the maintainer or not. It is
no task of the scheduler, for which it might have to wait.
"""

import threading

from oslo_log import log

from glance_dedup.base import exceptions
from glance_dedup.repository import image_repository

LOG = log.getLogger(__name__)

#: Seconds between the end of one scan of the groups and the next.
INTERVAL = 5.0


class Follower:
    """The thread that has a repository's filter follow other hosts."""

    def __init__(self, repository: image_repository.Repository) -> None:
        self._repository = repository
        self._stopping = threading.Event()
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True,
                                        name='dedupd-follow')

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end after its step."""
        self._stopping.set()

    def join(self, timeout: float) -> bool:
        """Wait for the thread; return whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL):
            self.run_once()

    def run_once(self) -> None:
        """Add the blocks that others have stored; log an error once."""
        try:
            while self._repository.follow() and not self._stopping.is_set():
                pass
        except exceptions.RepositoryError as e:
            self._note(str(e))
        else:
            self._note(None)

    def _note(self, error: str | None) -> None:
        if error is not None and error != self._error:
            LOG.warning('The filter does not follow other hosts: %s', error)
        elif error is None and self._error is not None:
            LOG.info('The filter follows other hosts again.')
        self._error = error
