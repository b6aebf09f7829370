# SPDX-License-Identifier: Apache-2.0

"""What all tasks of the maintainer share: stopping, progress and pace.

A task is a module with a ``run_once(maintainer, pace, ...)`` that returns a
dataclass of what it did, and, where it decides something first, a ``plan``
that returns a dataclass and changes nothing. It does its work in steps of
bounded size and calls :meth:`Pace.step` after each, between which it may be
stopped without harm.
"""

from collections.abc import Callable
import os
import threading
import time

#: How long a step is made to wait at most for the pace, seconds; so that a
#: task that is to stop does so soon.
LONGEST_WAIT = 0.2
#: For how long it is watched whether others want the processors, seconds.
WATCH = 1.0

_TICKS = os.sysconf('SC_CLK_TCK')


def idle_seconds() -> float:
    """How long processors had nothing to do since the machine's start."""
    with open('/proc/stat') as f:
        # Those that wait for a disk could work.
        return sum(map(int, f.readline().split()[4:6])) / _TICKS


class Stopped(Exception):
    """The task was asked to stop; what it did so far stands."""


class Pace:
    """How far a task is, how fast it may go, and whether to stop.

    Written by the one thread that runs the task; any thread may read the
    attributes or call :meth:`stop`.

    :param progress: called as `progress(done, total, what)` after each step
    :param rate: bytes a second of the disk that the task may read and write;
        None: as fast as it goes. May be changed while the task runs.
    :param patient: nobody waits for the task; so it gives others the
        processors (:meth:`wait_until_idle`)
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
        self._due = self.started    # when the work so far may be over

    def stop(self) -> None:
        self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def step(self, done: int, total: int, what: str, cost: int = 0) -> None:
        """Note progress, and wait as the pace demands.

        :param done: of `total`, in whatever the task counts
        :param what: a few words: what is being done, for people
        :param cost: bytes of disk that were read or written since the last
            step
        :raises Stopped: if the task is to stop
        """
        self.done, self.total, self.what = done, total, what
        if self._progress is not None:
            self._progress(done, total, what)
        self.check()
        # A pause is not made up for: no more than a second's worth.
        begin = max(self._due, self._clock() - 1.0)
        while rate := self.rate:    # which may change meanwhile
            self._due = begin + cost / rate
            left = self._due - self._clock()
            if left <= 0:
                break
            self._stop.wait(min(left, LONGEST_WAIT))
            self.check()

    def pause(self, seconds: float) -> None:
        """Wait.

        :raises Stopped: if the task is to stop
        """
        self.step(self.done, self.total, self.what)
        self._stop.wait(seconds)
        self.check()

    def wait_until_idle(self,
                        idle: Callable[[], float] | None = None) -> None:
        """If the task is patient: wait while others want the processors.

        Half of them have to be idle for a while in which the task does
        nothing itself.

        :param idle: seconds that processors were idle, all together
        :raises Stopped: if the task is to stop
        """
        idle = idle or idle_seconds
        while self.patient:
            self.step(self.done, self.total, 'waiting for idle processors')
            before, began = idle(), self._clock()
            self._stop.wait(WATCH)
            self.check()
            passed = self._clock() - began
            if 2 * (idle() - before) >= passed * (os.cpu_count() or 1):
                break

    def check(self) -> None:
        """Raise Stopped if the task is to stop."""
        if self._stop.is_set():
            raise Stopped()

    def seconds_left(self) -> float | None:
        """A guess, by the pace so far; None if there is nothing to go by."""
        if not 0 < self.done <= self.total:
            return None
        elapsed = self._clock() - self.started
        return elapsed * (self.total - self.done) / self.done
