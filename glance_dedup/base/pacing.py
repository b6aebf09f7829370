# SPDX-License-Identifier: Apache-2.0

"""Stopping, progress and pace, which all tasks of the maintainer share.

A task is a module with a ``run_once(maintainer, pace, ...)``, which returns a
dataclass of its results. A task that decides something first also has a
``plan``, which returns a dataclass and changes nothing. A task works in steps
of bounded size and calls :meth:`Pace.step` after each. Between two steps it
can be stopped without harm.
"""

from collections.abc import Callable
import os
import threading
import time

#: The longest single wait for the pace, seconds: so a task that is to
#: stop does so soon.
MAX_WAIT = 0.2
#: For how long a task watches whether others want the processors, seconds.
WATCH = 1.0

_TICKS = os.sysconf('SC_CLK_TCK')


def idle_seconds() -> float:
    """Return for how many seconds all processors were idle since the boot."""
    with open('/proc/stat') as f:
        # A processor that waits for a disk counts as idle: it could work.
        return sum(map(int, f.readline().split()[4:6])) / _TICKS


class Stopped(Exception):
    """The task was stopped; the work that it did so far stays."""


class Pace:
    """Progress and speed of a task, and the request to stop it.

    Only the thread that runs the task writes to it. Any thread may read the
    attributes or call :meth:`stop`.

    :param progress: called as `progress(done, total, what)` after each step
    :param rate: how many bytes a second the task may read from and write to
        the disk; None: no limit. It may change while the task runs.
    :param patient: whether no user waits for the task; then it leaves the
        processors to others (:meth:`wait_until_idle`)
    """

    def __init__(self, progress: Callable[[int, int, str], None] | None = None,
                 rate: float | None = None,
                 clock: Callable[[], float] = time.monotonic,
                 patient: bool = False) -> None:
        self.rate = rate
        self.patient = patient
        self.done = 0
        self.total = 0
        self.what = ''
        self.started = clock()
        self._progress = progress
        self._clock = clock
        self._stop = threading.Event()
        self._due = self.started    # when the rate allows the next step

    def stop(self) -> None:
        """Have the task stop at its next step or during its wait."""
        self._stop.set()

    def step(self, done: int, total: int, what: str, cost: int = 0,
             watch: Callable[[], None] | None = None) -> None:
        """Note progress, and wait as long as the rate demands.

        :param done: how much of `total` is done, in the task's own unit
        :param what: what the task is doing, in a few words for people
        :param cost: bytes that the task read from or wrote to the disk since
            the last step
        :param watch: called every MAX_WAIT seconds of the wait; an exception
            from it ends the wait
        :raises Stopped: if the task is to stop
        """
        self.done, self.total, self.what = done, total, what
        if self._progress is not None:
            self._progress(done, total, what)
        self.check()
        # After a pause the task may catch up on no more than one second.
        begin = max(self._due, self._clock() - 1.0)
        while rate := self.rate:    # it may change meanwhile
            self._due = begin + cost / rate
            left = self._due - self._clock()
            if left <= 0:
                break
            self._stop.wait(min(left, MAX_WAIT))
            self.check()
            if watch is not None:
                watch()

    def pause(self, seconds: float) -> None:
        """Wait.

        :raises Stopped: if the task is to stop
        """
        self.step(self.done, self.total, self.what)
        self._stop.wait(seconds)
        self.check()

    def wait_until_idle(self) -> None:
        """If the task is patient, wait while others want the processors.

        The wait ends when half of the processors are idle for a while, in
        which the task does nothing itself.

        :raises Stopped: if the task is to stop
        """
        while self.patient:
            self.step(self.done, self.total, 'waiting for idle processors')
            before, began = idle_seconds(), self._clock()
            self._stop.wait(WATCH)
            self.check()
            passed = self._clock() - began
            if 2 * (idle_seconds() - before) >= passed * (os.cpu_count() or 1):
                break

    def check(self) -> None:
        """Raise Stopped if the task is to stop."""
        if self._stop.is_set():
            raise Stopped()

    def seconds_left(self) -> float | None:
        """An estimate by the speed so far; None before any work is done."""
        if not 0 < self.done <= self.total:
            return None
        elapsed = self._clock() - self.started
        return elapsed * (self.total - self.done) / self.done
