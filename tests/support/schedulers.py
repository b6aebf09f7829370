# SPDX-License-Identifier: Apache-2.0

"""A scheduler that maintains a repository during a test."""

import contextlib
import time

from dedupd.schedule import task_scheduler

LIMIT = 60


@contextlib.contextmanager
def running(repository, conf):
    """A scheduler whose first accounting is over.

    Its ``events`` are the calls of a listener.
    """
    scheduler = task_scheduler.Scheduler(repository, conf)
    scheduler.events = []
    scheduler.listeners.append(
        lambda *event: scheduler.events.append(event))
    scheduler.start()
    try:
        wait_for(lambda: scheduler.is_maintainer
                 and scheduler.tasks()['account']['runs'])
        yield scheduler
    finally:
        scheduler.stop()
        assert scheduler.join(LIMIT)


def wait_for(condition):
    """Wait until a condition holds, which often takes milliseconds."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
