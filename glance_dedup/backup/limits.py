# SPDX-License-Identifier: Apache-2.0

"""Limits of a rank, so that the servers on its host hardly notice it.

After each segment a rank waits until it has read no faster, and has taken no
larger share of a processor, than the operator allows. A slow rank keeps its
views for longer, so limits cost space while servers write.
"""

from collections.abc import Callable
import os
import time

#: The limits.
READ_RATE, CPU_SHARE = NAMES = 'read_rate', 'cpu_share'
#: Priorities of a rank's process.
PRIORITIES = IDLE, LOW, NORMAL = 'idle', 'low', 'normal'
#: The longest single wait, seconds.
MAX_WAIT = 0.2
#: Seconds of a pause that a rank may make up for.
CATCH_UP = 1.0


def lower_priority(priority: str) -> None:
    """Give the calling thread, and those that it starts, a lower priority.

    The kernel derives the priority for disks from it: see ioprio_set(2).

    :param priority: one of PRIORITIES
    """
    if priority == IDLE:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    elif priority == LOW:
        os.nice(10)


class Limits:
    """Waits of one rank. For one thread.

    :param rate: bytes that it may read in a second; 0: as many as it can
    :param share: of a processor that all its threads together may take, above
        0; 1: a whole one; infinity: as much as they can
    :param watch: called after each MAX_WAIT seconds of a wait
    :param cpu: returns the seconds of a processor that the process has taken

    :ivar held: for how many seconds each limit has held the rank
    """

    def __init__(self, rate: float, share: float, watch: Callable[[], None],
                 clock: Callable[[], float] = time.monotonic,
                 cpu: Callable[[], float] = time.process_time,
                 sleep: Callable[[float], None] = time.sleep) -> None:
        self.held = {READ_RATE: 0.0, CPU_SHARE: 0.0}
        # Seconds that each unit takes at least: a byte, a processor's second.
        self._least = {READ_RATE: 1 / rate if rate else 0.0,
                       CPU_SHARE: 1 / share}
        self._watch = watch
        self._clock = clock
        self._cpu = cpu
        self._sleep = sleep
        self._spent = {READ_RATE: 0.0, CPU_SHARE: cpu()}
        # When each limit allows the next step.
        self._due = dict.fromkeys(self.held, clock())

    def wait(self, read: int) -> None:
        """Wait as long as the limits demand.

        :param read: how many bytes this rank has read until now
        """
        spent: dict[str, float] = {READ_RATE: read, CPU_SHARE: self._cpu()}
        earliest = self._clock() - CATCH_UP
        for name, least in self._least.items():
            self._due[name] = max(self._due[name], earliest) + least * (
                spent[name] - self._spent[name])
        self._spent = spent
        name = max(self._due, key=lambda name: self._due[name])
        while (left := self._due[name] - self._clock()) > 0:
            began = self._clock()
            self._sleep(min(left, MAX_WAIT))
            self.held[name] += self._clock() - began
            self._watch()
