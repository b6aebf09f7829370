# SPDX-License-Identifier: Apache-2.0

"""The queue: decides which of the maintainer's tasks runs next.

A *job* is one run of a task. It comes from a request, or from the task's
interval: then the task is *due*. Requests go first, in their order.

A task of rank 1 or more *makes way* between two of its steps, for requests and
for due tasks of a lower rank. Then its job is *suspended*. It goes on when
nothing is left that it would make way for. A requested job makes no way for
later requests of the same task, so these end in their order; and no job makes
way for a run of the same task that would do the same.

A helper's queue has only the tasks that helpers run, and no requests: those
are the maintainer's.
"""

import collections
from collections.abc import Collection
import dataclasses
import math
import time
from typing import Any

from oslo_config import cfg

from dedupd.tasks import registry
from glance_dedup.base import pacing

Fields = dict[str, Any]

# A job that is no task: it is short, and has no status.
_ERRAND = registry.Task('')


@dataclasses.dataclass(eq=False)
class Job:
    """One run of a task.

    :ivar number: of the last request that this job serves; 0: no request
        waits for it
    """

    name: str
    number: int = 0
    arguments: Fields = dataclasses.field(default_factory=dict)
    began: float | None = None
    """The time of its begin, by the time of day, which may be set back later;
    None: it has not begun."""
    started: float = 0.0
    """The same moment, by time.monotonic()."""
    pace: pacing.Pace | None = None
    """The pace while it runs."""

    @property
    def task(self) -> registry.Task:
        """The row of the task; for an errand, one with no properties."""
        return registry.TASKS.get(self.name, _ERRAND)

    @property
    def only_plans(self) -> bool:
        """Return whether the job is a dry run."""
        return bool(self.arguments.get('dry_run'))

    @property
    def does_all(self) -> bool:
        """Return whether the job does all that a scheduled run does."""
        return not (self.only_plans or self.arguments.get('metadata_only')
                    or self.arguments.get('images'))


class TaskQueue:
    """The jobs that wait, and the time at which each task is due.

    REQUIRES: the caller holds the scheduler's lock, at each call.

    :param conf: has the group ``[dedupd]``; read each time, since its values
        may change
    :param names: the tasks that run here
    """

    def __init__(self, conf: cfg.ConfigOpts, names: Collection[str]) -> None:
        self._conf = conf
        self._names = names
        self._numbers = 0
        self._requests: collections.deque[Job] = collections.deque()
        self._suspended: list[Job] = []     # in the order of their beginning
        self._due: dict[str, float] = {}    # by time.monotonic()
        self._urgent: set[str] = set()
        self._active = names                # tasks that may be due
        self._helps = False

    def interval(self, name: str) -> float:
        """Seconds between two scheduled runs of a task; 0: only requests."""
        return registry.interval(name, self._conf.dedupd)

    # -- due tasks ---------------------------------------------------------

    def begin(self, helps: bool = False) -> None:
        """Begin each task's interval; the accounting is due at once.

        :param helps: whether this is a helper
        """
        now = time.monotonic()
        self._helps = helps
        self._active = [name for name in self._names
                        if not helps or registry.TASKS[name].help]
        self._due = {name: now + self.interval(name)
                     for name in self._active if self.interval(name)}
        if not helps:
            self._due['account'] = now

    def clear(self) -> None:
        """Have no task due, because the daemon's role ends."""
        self._due.clear()
        self._urgent.clear()
        self._suspended.clear()
        self._active = ()
        self._helps = False

    def reload(self) -> None:
        """Follow the options: no task waits longer than its interval."""
        now = time.monotonic()
        for name in self._active:
            interval = self.interval(name)
            if interval:
                self._due[name] = min(self._due.get(name, now + interval),
                                      now + interval)
            else:
                self._due.pop(name, None)

    def due(self, name: str) -> float | None:
        """A task's due time, by time.monotonic(); None: only on request."""
        return self._due.get(name)

    def put(self, name: str, seconds: float = math.inf) -> None:
        """Have a task be due after so many seconds, at most its interval.

        A task without an interval is not due, whatever `seconds` is.
        """
        interval = self.interval(name)
        self._urgent.discard(name)
        if interval:
            self._due[name] = time.monotonic() + min(seconds, interval)

    def hurry(self, name: str) -> None:
        """Have a task be due now, and all that make way do so for it.

        This holds until :meth:`put`. A task without an interval is not due.
        """
        if self.interval(name):
            self._due[name] = min(self._due.get(name, math.inf),
                                  time.monotonic())
            self._urgent.add(name)

    def _rank(self, name: str) -> int:
        return 0 if name in self._urgent else registry.TASKS[name].rank

    def collect_by(self, moment: float | None) -> None:
        """Have a collection be due at a moment, or before.

        :param moment: None: as the interval says
        """
        if moment is not None:
            self._due['collect'] = min(
                moment, self._due['collect'] if self.interval('collect')
                else moment)
        elif not self.interval('collect'):
            self._due.pop('collect', None)

    def until(self, moment: float) -> float:
        """The moment when the first task is due, but at most this one."""
        return min([moment, *self._due.values()])

    def _first_due(self, before: Job | None = None) -> str | None:
        """The task that is due for longest.

        :param before: only tasks for which this job would make way
        """
        now = time.monotonic()
        return min((name for name, due in self._due.items() if due <= now
                    and (before is None
                         or self._rank(name) < before.task.rank
                         and not (name == before.name and before.does_all))),
                   key=self._due.__getitem__, default=None)

    # -- jobs --------------------------------------------------------------

    def request(self, name: str, arguments: Fields, running: Job | None
                ) -> Job:
        """Return a job that serves a new request.

        It is an equal request that waits; or, if there are no arguments, a
        job that makes way and has begun; else a new job.

        :param running: the job that runs now
        """
        for job in self._requests:
            if job.name == name and job.arguments == arguments:
                return job
        self._numbers += 1
        if not any(arguments.values()):
            begun = self._begun(name, running)
            if begun is not None:
                # A client that waits for an earlier number waits for the
                # same job.
                begun.number = self._numbers
                if begun.pace is not None:
                    begun.pace.patient = False
                return begun
        job = Job(name, self._numbers, arguments)
        self._requests.append(job)
        return job

    def _begun(self, name: str, running: Job | None) -> Job | None:
        """The job of a task that makes way, if it has begun and does all."""
        begun = [*self._suspended]
        if running is not None and running.task.rank:
            begun.insert(0, running)
        return next((job for job in begun
                     if job.name == name and job.does_all), None)

    def withdraw(self, number: int) -> bool:
        """Forget a request; False if it has begun."""
        for job in self._requests:
            if job.number == number:
                self._requests.remove(job)
                return True
        return False

    def is_waiting(self, name: str) -> bool:
        """Return whether a job of the task was requested, or is suspended."""
        return any(job.name == name
                   for job in (*self._suspended, *self._requests))

    def take(self) -> Job | None:
        """Take the job that is to run now; None: there is none."""
        requested = self._first_request(self._suspended)
        if requested is not None:
            self._requests.remove(requested)
            return requested
        job = min(self._suspended, key=lambda job: job.task.rank,
                  default=None)
        name = self._first_due(before=job)
        if name is not None:
            # The due task may be the one suspended before another task.
            job = self._begun(name, None)
            if job is None:
                return Job(name)
        if job is not None:
            self._suspended.remove(job)
        return job

    def _first_request(self, begun: Collection[Job]) -> Job | None:
        """The first request that waits for none of some jobs."""
        if self._helps:
            return None
        ordered = {job.name for job in begun if job.number}
        return next((job for job in self._requests
                     if job.name not in ordered), None)

    def makes_way(self, job: Job) -> bool:
        """Return whether a running job is to make way now."""
        return bool(job.task.rank and (
            self._first_request([job, *self._suspended])
            or self._first_due(before=job)))

    def suspend(self, job: Job) -> None:
        """Keep a job that made way; it goes on, and does not begin again."""
        job.arguments = {key: value for key, value in job.arguments.items()
                         if key not in job.task.not_again}
        self._suspended.append(job)

    def drop_suspended(self, name: str) -> None:
        """Forget a task's scheduled job, because another did its work."""
        self._suspended = [job for job in self._suspended
                           if job.name != name or job.number]
