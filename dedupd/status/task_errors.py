# SPDX-License-Identifier: Apache-2.0

"""The last errors of the tasks, for the daemon's status and its log."""

import collections
from collections.abc import Iterable
from collections.abc import Iterator
import threading
import time
from typing import Any

from oslo_log import log

from glance_dedup.base import exceptions

LOG = log.getLogger(__name__)

#: The most errors that are remembered.
MAX_COUNT = 20

Fields = dict[str, Any]


class Errors:
    """The last errors, oldest first. Thread-safe.

    Each is a dictionary with ``time``, ``task`` and ``text``. An error that
    comes again is there once, with its last time. Iterating goes through a
    copy.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._errors: collections.deque[Fields] = collections.deque(
            maxlen=MAX_COUNT)

    def __iter__(self) -> Iterator[Fields]:
        with self._mutex:
            return iter(list(self._errors))

    def add(self, name: str, text: str) -> None:
        """Add an error of a task; the oldest one makes room for it."""
        with self._mutex:
            for error in list(self._errors):
                if (error['task'], error['text']) == (name, text):
                    self._errors.remove(error)
            self._errors.append(
                {'time': time.time(), 'task': name, 'text': text})

    def failed(self, name: str, error: Exception,
               *expected: type[Exception]) -> None:
        """Log and add the exception that ended a task.

        :param expected: exceptions that the log reports without a traceback,
            besides RepositoryError
        """
        known = isinstance(error, (exceptions.RepositoryError, *expected))
        LOG.error('%s failed: %s', name, error,
                  exc_info=None if known else error)
        self.add(name, str(error) or repr(error))

    def merge(self, others: Iterable[Fields]) -> None:
        """Add errors of other processes, in the order of their times."""
        with self._mutex:
            found = sorted([*others, *self._errors],
                           key=lambda error: error['time'])
            self._errors.clear()
            self._errors.extend(found)
