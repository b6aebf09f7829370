# SPDX-License-Identifier: Apache-2.0

"""Asking the host's dedupd for slices of cold groups.

One request to the object store then serves all programs of the host. Nothing
depends on the daemon: a program whose daemon does not answer fetches slices
itself, and leaves the daemon alone for a while.
"""

from collections.abc import Callable
import http
import json
import logging
import time
import typing

from glance_dedup.base import exceptions
from glance_dedup.client import client_errors

if typing.TYPE_CHECKING:
    from glance_dedup.client import daemon_connection

LOG = logging.getLogger(__name__)

PATH = '/v1/slices'
#: The most slices in one request.
MAX_COUNT = 64
#: Seconds for which the daemon is to wait. It answers then even if the
#: object store is slower, so one that hangs is noticed.
POLL = 5.0
#: Seconds in which the daemon must accept a connection, and further seconds in
#: which it must answer.
ANSWER_SECONDS = 2.0
#: Seconds for which the daemon is left alone after trouble.
PAUSE_SECONDS = 10.0


class Asker:
    """State that one process has of the daemon on a socket. Thread-safe.

    Calls are those of ``ask_slices`` of
    :class:`glance_dedup.repository.image_repository.Repository`.

    :param socket: the path of the daemon's socket
    """

    def __init__(self, socket: str,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = socket
        self._clock = clock
        self._requester: daemon_connection.Requester | None = None
        self._retry_at: float | None = None     # None: it is well

    def __call__(self, repository_id: str, group: int, object_id: bytes,
                 first: int, count: int, wait: float) -> bool:
        """Have the daemon bring slices.

        :param wait: seconds until they must be there; 0: do not wait
        :returns: False: it does not answer, or not about this object
        :raises UnavailableError: the object store does not give one of them
        :raises TimeoutError: it does not give one in time
        """
        ends = self._clock() + wait if wait else None
        arguments = {'repository': repository_id, 'group': group,
                     'object': object_id.hex()}
        for start in range(first, first + count, MAX_COUNT):
            arguments |= {'first': start,
                          'count': min(MAX_COUNT, first + count - start)}
            if not self._bring(arguments, ends):
                return False
        return True

    def _bring(self, arguments: dict[str, typing.Any], ends: float | None
               ) -> bool:
        if self._retry_at is not None:
            now = self._clock()
            if now < self._retry_at:
                return False
            # Only this thread tries; the others go on without it.
            self._retry_at = now + PAUSE_SECONDS
        try:
            left = 0.0 if ends is None else min(POLL, ends - self._clock())
            while not self._ask({**arguments, 'wait': max(0.0, left)}) and (
                    ends is not None):
                left = min(POLL, ends - self._clock())
                if left <= 0:
                    raise TimeoutError
        except client_errors.ClientError as e:
            return self._failed(arguments['repository'], e)
        self._retry_at = None
        return True

    def _ask(self, arguments: dict[str, typing.Any]) -> bool:
        """One request; returns whether the slices are there."""
        # Only here: HTTP and TLS take longer to import than a command runs.
        from glance_dedup.client import daemon_connection

        if self._requester is None:
            try:
                self._requester = daemon_connection.Requester(
                    f'unix:{self._socket}', connect_timeout=ANSWER_SECONDS)
            except ValueError as e:
                raise client_errors.DaemonUnavailable(str(e)) from e
        with self._requester.request(
                'POST', PATH, json.dumps(arguments).encode(),
                POLL + ANSWER_SECONDS) as answer:
            if answer.repository_id != arguments['repository']:
                raise answer.bad('it serves another repository')
            there = answer.status == http.HTTPStatus.OK
            # Only a connection whose answer was read can be used again.
            answer.read(daemon_connection.MAX_ERROR, ANSWER_SECONDS)
            return there

    def _failed(self, repository_id: str,
                error: client_errors.ClientError) -> bool:
        """Log the meaning of an error; return False if it is the daemon's."""
        if isinstance(error, client_errors.Refused) and (
                error.repository_id == repository_id):
            self._retry_at = None
            if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:
                raise exceptions.UnavailableError(str(error)) from error
            # For example of an object that the group had before.
            LOG.debug('dedupd gives no slices: %s', error)
            return False
        if self._retry_at is None:
            LOG.debug('slices are fetched without dedupd: %s', error)
        self._retry_at = self._clock() + PAUSE_SECONDS
        return False
