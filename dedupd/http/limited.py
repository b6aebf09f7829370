# SPDX-License-Identifier: Apache-2.0

"""Log errors that strangers cause, without letting them fill the disk."""

import logging
import threading
import time
from typing import Any

from glance_dedup.base import printable

#: Messages that are written in :data:`SECONDS` at most.
MESSAGES = 20
SECONDS = 60.0
#: Characters of each argument of a message.
LENGTH = 300


class Log:
    """A log of bounded messages, and a bounded number of them. Thread-safe.

    Omitted messages are counted; the next written message has their number.

    :param log: the log that gets them
    """

    def __init__(self, log: Any) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._until = 0.0
        self._room = self._left_out = 0

    def warning(self, message: str, *arguments: Any) -> None:
        """Write a warning; the arguments may be a stranger's data."""
        self._write(logging.WARNING, message, arguments)

    def error(self, message: str, *arguments: Any,
              exc_info: BaseException | None = None) -> None:
        """Write an error, likewise.

        :param exc_info: an exception to write with its traceback
        """
        self._write(logging.ERROR, message, arguments, exc_info)

    def _write(self, level: int, message: str, arguments: tuple,
               exc_info: BaseException | None = None) -> None:
        with self._lock:
            now, left_out = time.monotonic(), 0
            if now >= self._until:
                left_out, self._left_out = self._left_out, 0
                self._until, self._room = now + SECONDS, MESSAGES
            if not self._room:
                self._left_out += 1
                return
            self._room -= 1
        if left_out:
            self._log.warning('%d messages such as the next were left out.',
                              left_out)
        self._log.log(level, message, *map(_cut, arguments),
                      exc_info=exc_info)


def _cut(argument: Any) -> Any:
    if isinstance(argument, int):
        return argument
    text = printable.printable(str(argument)[:LENGTH + 1])
    return text if len(text) <= LENGTH else f'{text[:LENGTH]}...'
