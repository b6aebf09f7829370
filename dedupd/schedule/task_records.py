# SPDX-License-Identifier: Apache-2.0

"""Each task's facts for the status: the run that goes on, and the last."""

import collections
import dataclasses
import time

from dedupd.schedule import task_queue

#: Requested runs of a task that are kept for their clients.
KEPT = 16


@dataclasses.dataclass
class Outcome:
    """The end of a job."""

    result: task_queue.Fields = dataclasses.field(default_factory=dict)
    error: str | None = None
    """None: it ended well."""
    is_cut_off: bool = False
    """True if it ended because the daemon did."""


@dataclasses.dataclass
class Record:
    """One task's facts for the status."""

    job: task_queue.Job | None = None
    """The job that runs, or is suspended."""
    last: task_queue.Fields | None = None
    """The last run in this daemon."""
    finished: int = 0
    """The highest number of a request that is over."""
    last_success_run: task_queue.Fields | None = None
    """The last run in this daemon that was a success."""
    requested: collections.deque[task_queue.Fields] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=KEPT))
    """The last requested runs, in their order."""
    runs: int = 0
    failures: int = 0

    def end(self, job: task_queue.Job, outcome: Outcome) -> None:
        """Note that a job has ended."""
        finished = time.time()
        error = outcome.error
        self.last = {
            'number': job.number, 'started': job.began, 'finished': finished,
            'seconds': round(time.monotonic() - job.started, 3),
            'arguments': job.arguments,
            'result': outcome.result if error is None else None,
            'error': error}
        if job.number:
            self.requested.append(self.last)
        self.finished = max(self.finished, job.number)
        self.runs += 1
        if error is not None:
            self.failures += not outcome.is_cut_off
        elif not job.only_plans and outcome.result.get('complete', True):
            self.last_success_run = self.last
        self.job = None

    def _run_for(self, number: int) -> task_queue.Fields | None:
        """Return the run that served a request; None: it is not kept.

        A run may have served requests with lower numbers than its own.
        """
        return min((run for run in self.requested if run['number'] >= number),
                   key=lambda run: run['number'], default=None)

    def status(self, past: task_queue.Fields, waits: bool, after: int = 0
               ) -> task_queue.Fields:
        """Return the fields of the status that do not depend on the options.

        :param past: the last run before this daemon was started
        :param waits: whether a job of the task waits
        :param after: the number of a request, whose run is to be ``last``. By
            now another run may have followed
        """
        pace = None if self.job is None else self.job.pace
        left = None if pace is None else pace.seconds_left()
        success = self.last_success_run
        return {
            'state': ('running' if pace is not None else
                      'waiting' if waits else 'idle'),
            'done': 0 if pace is None else pace.done,
            'total': 0 if pace is None else pace.total,
            'what': '' if pace is None else pace.what,
            'started': None if self.job is None else self.job.began,
            'seconds_left': None if left is None else round(left, 1),
            'finished': self.finished,
            'last_success': (past['last_success'] if success is None
                             else success['finished']),
            'last_success_run': success or past['last_success_run'],
            'runs': self.runs,
            'failures': self.failures,
            'last': (after and self._run_for(after)) or (
                self.last or past['last']),
        }
