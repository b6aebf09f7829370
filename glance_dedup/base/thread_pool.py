# SPDX-License-Identifier: Apache-2.0

"""Threads: bounded workers, calls in order, calls with a time limit.

``Workers`` is a bounded set of daemon threads.  A ``Strand`` runs calls one
after the other, in the order in which they came, on any free worker.  It
occupies a worker only while it has calls.  After each call it gives the worker
to others that wait for one.  So any number of strands make progress with any
number of workers.  A ``TimeLimit`` bounds how long a caller waits for a call
that may hang in the kernel.

All of this survives ``fork``: the child starts with no threads and no calls.
"""

import collections
from collections.abc import Callable
from concurrent import futures
import logging
import threading
from typing import Any
import weakref

from glance_dedup.base import exceptions
from glance_dedup.base import forks

LOG = logging.getLogger(__name__)

#: Seconds after which a worker without work ends.
IDLE_SECONDS = 30.0

_ALL: 'weakref.WeakSet[Workers]' = weakref.WeakSet()


class Expired(Exception):
    """A call did not return within its time limit."""


def failed(future: futures.Future) -> bool:
    """Return whether a finished call was cancelled or raised."""
    return future.cancelled() or future.exception() is not None


def _perform(future: futures.Future, function: Callable, args: tuple) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args)
    except BaseException as exc:
        future.set_exception(exc)
    else:
        future.set_result(result)
    finally:
        # An exception's traceback holds this frame: avoid a cycle through it.
        del future, args


class Workers:
    """A bounded set of daemon threads, started when needed.

    They are daemon threads, because a thread that hangs in the kernel must not
    keep the process from ending.  Thread-safe.

    :param name: the threads' name
    :param limit: the greatest number of threads
    """

    def __init__(self, name: str, limit: int):
        self._name = name
        self._limit = limit
        self._reset()
        _ALL.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._tasks: collections.deque = collections.deque()
        self._idle = 0
        self._threads = 0

    def submit(self, function: Callable, *args) -> futures.Future:
        """Run a call on a worker, as soon as one is free.

        :raises NoThread: no thread could be started at all
        """
        future: futures.Future = futures.Future()
        with self._changed:
            self._tasks.append((future, function, args))
            if len(self._tasks) <= self._idle:
                self._changed.notify()
            elif self._threads < self._limit:
                self._start_thread()
        return future

    def wanted(self) -> bool:
        """Return whether some call waits for a worker."""
        return bool(self._tasks)

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a worker."""
        return len(self._tasks)

    def _start_thread(self) -> None:
        self._threads += 1
        try:
            threading.Thread(target=self._work, name=self._name,
                             daemon=True).start()
        except RuntimeError as e:
            self._threads -= 1
            if not self._threads:
                self._tasks.pop()
                raise exceptions.NoThread(
                    f'no thread can be started for {self._name}: {e}') from e

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._tasks:
                    self._idle += 1
                    woken = self._changed.wait(IDLE_SECONDS)
                    self._idle -= 1
                    if not woken and not self._tasks:
                        self._threads -= 1
                        return
                task = self._tasks.popleft()
            _perform(*task)
            del task  # it may hold a large buffer, or the last reference


def _after_fork() -> None:
    for workers in list(_ALL):
        workers._reset()


forks.register(_after_fork)


class Strand:
    """Runs calls one at a time and in order.  Thread-safe."""

    def __init__(self, workers: Workers):
        self._workers = workers
        self._lock = threading.Lock()
        self._tasks: collections.deque = collections.deque()
        self._running = False

    def submit(self, function: Callable, *args) -> futures.Future:
        """Run a call after all calls that were submitted before it."""
        future: futures.Future = futures.Future()
        with self._lock:
            self._tasks.append((future, function, args))
            if self._running:
                return future
            self._running = True
        try:
            self._workers.submit(self._run)
        except BaseException:
            with self._lock:
                self._running = False
                self._tasks.clear()
            raise
        return future

    def drop(self) -> None:
        """Cancel the calls that have not begun."""
        with self._lock:
            dropped, self._tasks = self._tasks, collections.deque()
        for future, _function, _args in dropped:
            future.cancel()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._running = False
                    return
                task = self._tasks.popleft()
            _perform(*task)
            del task
            if self._workers.wanted():
                self._workers.submit(self._run)  # behind the waiting ones
                return


class TimeLimit:
    """Bounds how long callers wait for calls.  Thread-safe.

    :param seconds: the limit for each call; 0: no limit, and no threads
    :param workers: they run the calls if there is a limit
    """

    def __init__(self, seconds: float, workers: Workers):
        self.seconds = seconds
        self._workers = workers

    def call(self, function: Callable, *args,
             late: Callable[[Any], None] | None = None) -> Any:
        """Call a function that may hang.

        A call that exceeds the limit goes on in its thread.  If no thread was
        free for the call, it never begins.

        :param late: undoes a call that was given up and returns after all;
                     called with that call's result
        :raises Expired: the limit was exceeded
        """
        if not self.seconds:
            return function(*args)
        return self.result(self._workers.submit(function, *args), late)

    def result(self, future: futures.Future,
               late: Callable[[Any], None] | None = None) -> Any:
        """Wait for a call; otherwise the same as :meth:`call`."""
        try:
            futures.wait([future], self.seconds or None)
            if future.done():
                return future.result()
            raise Expired('The storage did not answer within '
                          f'{self.seconds:g} seconds.')
        except BaseException:
            if not future.done() or not failed(future):
                self._give_up(future, late)
            raise
        finally:
            del future  # no cycle through an exception's traceback

    def _give_up(self, future: futures.Future,
                 late: Callable[[Any], None] | None) -> None:
        if future.cancel() or late is None:
            return

        def undo(done: futures.Future) -> None:
            if failed(done):
                return
            try:
                late(done.result())
            except Exception:
                LOG.exception('Undoing a call that came too late failed')

        future.add_done_callback(undo)
