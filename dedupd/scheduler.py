# SPDX-License-Identifier: Apache-2.0

"""The maintainer's thread: runs the tasks, one at a time.

A daemon is the *maintainer* while it holds the maintainer's lock, and a
*reader* otherwise; then it tries again every minute, so that another takes
over when the maintainer ends. Opening the catalog may take long, if it has to
be made anew; reads are served meanwhile.

Tasks run when somebody asks for them, in order, and else when their interval
is over. Deleted and new images are counted (``account``) every minute, and
before each collection and merging; a cache looks as often whether it has to
evict something. A scrub takes long, and gives way to
everything else between two steps; so does recompression, which is in no hurry
at all, and gives way to a scrub, too. A task that fails is told in the log and
in the status, and tried again when its time comes.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import logging
import threading
import time
from typing import Any

from oslo_config import cfg
from oslo_log import log

from dedupd.cache import index as index_module
from dedupd import figures as figures_module
from dedupd import history as history_module
from dedupd.tasks import registry
from glance_dedup.base import exceptions
from glance_dedup.base import task as task_module
from glance_dedup.maintenance import catalog as catalog_module
from glance_dedup.maintenance import database
from glance_dedup.maintenance import maintainer as maintainer_module
from glance_dedup.repository import repository as repository_module

LOG = log.getLogger(__name__)

#: Seconds between two tries to become the maintainer.
TRIAL_INTERVAL = 60.0
#: Seconds until an unfinished scrub goes on.
RETRY_INTERVAL = 600.0
#: Seconds between two samples of the history.
SAMPLE_INTERVAL = 300.0

# What is short, and has no status.
_ERRAND = registry.Task('')
_ERRORS = 20
_MIB = 1 << 20

Fields = dict[str, Any]
#: Called as `listener(event, task, payload)`; the event is 'start', 'end' or
#: 'error', the payload the arguments, the result, or ``{'error': sentence}``.
Listener = Callable[[str, str, Fields], None]


def _troubles(result: Fields) -> Iterator[str]:
    """Sentences about what a finished run could not do, or found wrong."""
    if result.get('refused'):
        yield f'nothing was freed: {result["refused"]}'
    if result.get('found'):
        yield f'{result["found"]} damaged blocks were found'
    for key, words in (('failed', 'left as it is'),
                       ('unreadable', 'unreadable')):
        for what, error in sorted((result.get(key) or {}).items())[:1]:
            yield f'{len(result[key])} {words}; the first is {what}: {error}'


def _rank(name: str) -> int:
    return registry.TASKS.get(name, _ERRAND).rank


class NotMaintainer(exceptions.BusyError):
    """This daemon does not maintain the repository (now)."""


@dataclasses.dataclass(eq=False)
class _Job:
    number: int
    name: str
    arguments: Fields
    began: float | None = None
    """By the time of day, which may be set back meanwhile."""
    started: float = 0.0
    """The same moment, by time.monotonic()."""


@dataclasses.dataclass
class _State:
    """Of one task."""

    pace: task_module.Pace | None = None
    job: _Job | None = None
    last: Fields | None = None
    finished: int = 0
    """The highest number of a request that is over."""
    last_success: float | None = None
    runs: int = 0
    failures: int = 0


class Scheduler:
    """Runs the maintainer's tasks in a thread. Thread-safe.

    :param conf: has the group ``[dedupd]``; read each time, since its values
        may change
    :param held: what the cache holds; None: this daemon serves no cache
    :param coming: returns the bytes that the cache is about to store
    """

    def __init__(self, repository: repository_module.Repository,
                 conf: cfg.ConfigOpts, held: index_module.Held | None = None,
                 coming: Callable[[], int] = lambda: 0) -> None:
        self._repository = repository
        self._conf = conf
        self._changed = threading.Condition()
        self._held = held
        self._coming = coming
        self._stopping = False
        self._numbers = 0
        self._requests: collections.deque[_Job] = collections.deque()
        self._suspended: dict[str, _Job] = {}   # what has made way
        self._due: dict[str, float] = {}    # by time.monotonic()
        self._states = {name: _State()
                        for name, task in registry.TASKS.items() if task.run}
        self._current: task_module.Pace | None = None
        self._sampled = 0.0
        self._maintainer: maintainer_module.Maintainer | None = None
        self._logged = 0
        self.past = history_module.Past(repository.path)
        """How the tasks did before this daemon was started."""
        self._thread = threading.Thread(
            target=self._run, name='dedupd-maintainer', daemon=True)
        self.is_maintainer = False
        self.catalog_state = 'absent'
        self.errors: collections.deque[Fields] = collections.deque(
            maxlen=_ERRORS)
        self.listeners: list[Listener] = []
        """Called in the maintainer's thread, around each task."""
        self.watchers: list[Callable[[], None]] = []
        """Called in any thread when a task's status changed."""
        self.figures = figures_module.Figures(repository, self.catalog)
        """Forgotten when a task ends, so that the next figures show it."""

    # -- for any thread ----------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the running task after its step, and start no other."""
        with self._changed:
            self._stopping = True
            if self._current is not None:
                self._current.stop()
            self._changed.notify_all()
        self._tell()

    def join(self, timeout: float) -> bool:
        """Wait for the release of the maintainer's lock; False: timeout."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def maintainer(self) -> maintainer_module.Maintainer | None:
        """None while another process maintains the repository."""
        return self._maintainer

    def catalog(self) -> catalog_module.Catalog | None:
        """The catalog, to be read; None if there is none."""
        maintainer = self._maintainer
        if maintainer is not None:
            with contextlib.suppress(database.CatalogError):
                return maintainer.catalog
        return None

    def request(self, name: str, /, **arguments: Any) -> int:
        """Have a task run; return the number of the request.

        Two equal requests become one if the first has not begun.

        :raises NotMaintainer: if another process maintains the repository
        """
        if not self.is_maintainer:
            raise NotMaintainer(
                'this daemon does not maintain the repository: another '
                'process does, or it has just been started')
        with self._changed:
            if self._stopping:
                raise NotMaintainer('the daemon is ending')
            for job in self._requests:
                if job.name == name and job.arguments == arguments:
                    return job.number
            self._numbers += 1
            number = self._numbers
            underway = None if any(arguments.values()) else (
                self._underway(name))
            if underway is not None:
                # It is what was asked for; whoever waits for it before waits
                # for the same.
                underway.number = number
                if self._states[name].pace is not None:
                    self._states[name].pace.patient = False
            else:
                self._requests.append(_Job(number, name, arguments))
                self._make_way()
            self._changed.notify_all()
        self._tell()
        return number

    def withdraw(self, number: int) -> bool:
        """Forget a request; False if it has begun."""
        with self._changed:
            for job in self._requests:
                if job.number == number:
                    self._requests.remove(job)
                    return True
        return False

    def reload(self) -> None:
        """Follow changes of the options, also in the task that runs."""
        with self._changed:
            for name, state in self._states.items():
                if state.pace is not None:
                    state.pace.rate = self._rate(name)
            now = time.monotonic()
            for name in list(self._due):
                interval = self._interval(name)
                if interval:
                    self._due[name] = min(self._due[name], now + interval)
                else:
                    del self._due[name]
            for name in self._states:
                if self._interval(name):
                    self._due.setdefault(name, now + self._interval(name))
            self._changed.notify_all()

    def has(self, name: str) -> bool:
        """Whether this daemon has such a task."""
        return name in self._states and (
            self._held is not None or not registry.TASKS[name].in_caches_only)

    def tasks(self) -> dict[str, Fields]:
        """The status of each task."""
        with self._changed:
            return {name: self._status(name) for name in self._states
                    if self.has(name)}

    def task(self, name: str) -> Fields:
        with self._changed:
            return self._status(name)

    def wait(self, name: str, number: int, timeout: float) -> Fields:
        """A task's status when the request is over, or the time is."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._states[name].finished >= number
                         or self._stopping), timeout)
            return self._status(name)

    def _status(self, name: str) -> Fields:
        state = self._states[name]
        pace, job = state.pace, state.job
        waiting = name in self._suspended or any(
            j.name == name for j in self._requests)
        left = None if pace is None else pace.seconds_left()
        due = self._due.get(name)
        past = self.past.facts(name)
        return {
            'state': ('running' if pace is not None else
                      'waiting' if waiting else 'idle'),
            'done': 0 if pace is None else pace.done,
            'total': 0 if pace is None else pace.total,
            'what': '' if pace is None else pace.what,
            'started': None if job is None else job.began,
            'seconds_left': None if left is None else round(left, 1),
            'interval': self._interval(name),
            'next': None if due is None or pace is not None else (
                round(time.time() + max(0.0, due - time.monotonic()))),
            'finished': state.finished,
            'last_success': state.last_success or past['last_success'],
            'runs': state.runs,
            'failures': state.failures,
            'last': state.last or past['last'],
        }

    # -- options -----------------------------------------------------------

    def _interval(self, name: str) -> float:
        if not self.has(name):
            return 0
        interval = registry.TASKS[name].interval
        return self._conf.dedupd[interval] if isinstance(interval, str) else (
            interval)

    def _rate(self, name: str) -> float | None:
        option = registry.TASKS[name].rate
        return (self._conf.dedupd[option] * _MIB or None) if option else None

    # -- the thread --------------------------------------------------------

    def _run(self) -> None:
        told = False
        while not self._stopping:
            try:
                maintainer = maintainer_module.Maintainer(
                    self._repository, self._opening)
            except task_module.Stopped:
                break
            except exceptions.BusyError as e:
                if not told:
                    LOG.warning('Only reads are served: %s. Tried again every '
                                '%d seconds.', e, TRIAL_INTERVAL)
                told = True
            except Exception as e:
                self._failed('rebuild-catalog', e)
                self.catalog_state = 'failed'
            else:
                told = False
                with contextlib.closing(maintainer):
                    self._opened(maintainer)
                    self._maintain(maintainer)
                    self.past.save()
                    self._maintainer = None
            self._leave()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping,
                                       TRIAL_INTERVAL)

    def _opening(self, done: int, total: int, what: str) -> None:
        """A catalog is being made anew: this is the maintainer already."""
        state = self._states['rebuild-catalog']
        if state.pace is None:
            LOG.warning('The catalog is being made anew.')
            with self._changed:
                self.is_maintainer = True
                self.catalog_state = 'rebuilding'
                state.pace = self._current = task_module.Pace()
                state.job = _Job(0, 'rebuild-catalog', {}, time.time())
                if self._stopping:
                    state.pace.stop()
            self._tell()
        state.pace.step(done, total, what)

    def _opened(self, maintainer: maintainer_module.Maintainer) -> None:
        errors = sorted([*self.past.load(registry.TASKS), *self.errors],
                        key=lambda error: error['time'])
        self.errors.clear()
        self.errors.extend(errors)
        now = time.monotonic()
        with self._changed:
            state = self._states['rebuild-catalog']
            state.pace = state.job = self._current = None
            self._maintainer = maintainer
            self.is_maintainer = True
            self.catalog_state = 'ready'
            self._due = {name: now + self._interval(name)
                         for name in self._states if self._interval(name)}
            self._due['account'] = now
        self._logged = 0
        self._log_warnings(maintainer)
        LOG.info('This daemon maintains %s.', self._repository.path)
        self._tell()

    def _leave(self) -> None:
        with self._changed:
            self._maintainer = None
            self._current = None
            if self.catalog_state != 'failed':
                self.catalog_state = 'absent'
            self.is_maintainer = False
            self._due.clear()
            for state in self._states.values():
                state.pace = state.job = None
        self._tell()

    def _maintain(self, maintainer: maintainer_module.Maintainer) -> None:
        self._schedule_scrub(maintainer)
        while (job := self._next(maintainer)) is not None:
            task = registry.TASKS.get(job.name, _ERRAND)
            if task.counts_first:
                self._perform(maintainer, _Job(0, 'account', {}))
            if not self._stopping:
                self._perform(maintainer, job)
                self._end_intent(maintainer)
                self._log_warnings(maintainer)
                if not task.is_routine:
                    self._keep_sample(maintainer)

    def _end_intent(self, maintainer: maintainer_module.Maintainer) -> None:
        """Have a collection run when the collector's intent is to end."""
        ends = maintainer.intent_ends
        with self._changed:
            if self._interval('collect'):
                if ends is not None:
                    self._due['collect'] = min(ends, self._due['collect'])
            elif ends is not None:
                self._due['collect'] = ends
            else:
                self._due.pop('collect', None)

    def _next(self, maintainer: maintainer_module.Maintainer) -> _Job | None:
        """The job that is to run now; None at the end."""
        while True:
            with self._changed:
                if self._stopping:
                    return None
                job = self._take()
                if job is not None:
                    return job
                now = time.monotonic()
                until = min([self._sampled + SAMPLE_INTERVAL,
                             *self._due.values()])
                if until > now:
                    self._changed.wait(until - now)
            if self._sampled + SAMPLE_INTERVAL <= time.monotonic():
                self._keep_sample(maintainer)

    def _take(self) -> _Job | None:
        if self._requests:
            return self._requests.popleft()
        suspended = min(self._suspended, key=_rank, default=None)
        name = self._first_due(before=suspended)
        if name is not None:
            return _Job(0, name, {})
        return None if suspended is None else self._suspended.pop(suspended)

    def _underway(self, name: str) -> _Job | None:
        """The job of a task that gives way, if it has begun."""
        if _rank(name) and self._states[name].pace is not None:
            return self._states[name].job
        return self._suspended.get(name)

    def _first_due(self, before: str | None = None) -> str | None:
        """What is due; of that, only what `before` gives way to."""
        now = time.monotonic()
        return min((name for name, due in self._due.items() if due <= now
                    and (before is None or _rank(name) < _rank(before))),
                   key=self._due.get, default=None)

    # -- one run -----------------------------------------------------------

    def _perform(self, maintainer: maintainer_module.Maintainer,
                 job: _Job) -> None:
        if job.name not in self._states:
            job.arguments['run'](maintainer)
            return
        state = self._states[job.name]
        first = job.began is None
        with self._changed:
            if first:
                job.began, job.started = time.time(), time.monotonic()
            state.job = job
            pace = task_module.Pace(
                lambda *args: self._progress(job.name), self._rate(job.name),
                patient=not job.number)
            state.pace = self._current = pace
            interval = self._interval(job.name)
            if interval and first:
                self._due[job.name] = time.monotonic() + interval
            if self._stopping:
                pace.stop()
        self._tell()
        if first:
            self._notify('start', job.name, job.arguments)
        result = error = None
        ended = True
        try:
            result = dataclasses.asdict(
                self._run_task(maintainer, pace, job) or _Nothing())
        except task_module.Stopped:
            if not self._stopping:
                with self._changed:
                    state.pace = self._current = None
                    # It goes on where it is, and does not begin anew.
                    job.arguments = {
                        key: value for key, value in job.arguments.items()
                        if key not in registry.TASKS[job.name].not_again}
                    self._suspended[job.name] = job
                return
            error = 'it was stopped, since the daemon ended'
            ended = False
        except Exception as e:
            if isinstance(e, database.CatalogError):
                self._rebuild_after(maintainer, e)
            error = str(e) or repr(e)
            self._failed(job.name, e)
        self._note_catalog(maintainer)
        self.figures.forget()
        with self._changed:
            finished = time.time()
            state.last = {
                'number': job.number, 'started': job.began,
                'finished': finished,
                'seconds': round(time.monotonic() - job.started, 3),
                'arguments': job.arguments, 'result': result, 'error': error}
            state.finished = max(state.finished, job.number)
            state.runs += 1
            if error is not None:
                state.failures += ended
            elif not job.arguments.get('dry_run'):
                state.last_success = finished
            state.pace = state.job = self._current = None
            if not job.arguments.get('dry_run'):
                # That was its pass, too.
                self._suspended.pop(job.name, None)
            if job.name in self._due and (result or {}).get(
                    'complete') is False:
                # A pass that something kept from ending.
                self._due[job.name] = time.monotonic() + RETRY_INTERVAL
            self._changed.notify_all()
        if error is None:
            # Most runs find nothing to do.
            LOG.log(logging.INFO if any(result.values()) else logging.DEBUG,
                    '%s: %s', job.name, result)
            for text in _troubles(result):
                self._add_error(job.name, text)
            self._notify('end', job.name, result)
        else:
            self._notify('error', job.name, {'error': error})
        self._tell()
        if ended:
            self.past.note(job.name, state.last, state.last_success)
            if error is not None or not registry.TASKS[job.name].is_routine:
                # For the others the next one will do.
                self.past.save()

    def _progress(self, name: str) -> None:
        """Called in each step of a task, which may have to make way."""
        with self._changed:
            if _rank(name) and (self._requests
                                or self._first_due(before=name)):
                self._make_way()

    def _make_way(self) -> None:
        """Have what gives way stop after its step; it goes on later."""
        for name, state in self._states.items():
            if _rank(name) and state.pace is not None:
                state.pace.stop()

    def _rebuild_after(self, maintainer: maintainer_module.Maintainer,
                       error: Exception) -> None:
        """The catalog let a task down, and again after its own rebuild."""
        LOG.warning('The catalog is made anew: %s', error)
        try:
            maintainer.rebuild(why=str(error))
        except Exception as e:
            self._failed('rebuild-catalog', e)

    def _failed(self, name: str, error: Exception) -> None:
        if isinstance(error, exceptions.RepositoryError):
            LOG.error('%s failed: %s', name, error)
        else:
            LOG.error('%s failed', name, exc_info=error)
        self._add_error(name, str(error) or repr(error))

    def _add_error(self, name: str, text: str) -> None:
        """For the status: what is told again and again is there once."""
        for error in list(self.errors):
            if (error['task'], error['text']) == (name, text):
                self.errors.remove(error)
        self.errors.append({'time': time.time(), 'task': name, 'text': text})

    def _log_warnings(self, maintainer: maintainer_module.Maintainer) -> None:
        warnings = list(maintainer.warnings)
        for warning in warnings[self._logged:]:
            LOG.warning('%s', warning)
        self._logged = len(warnings)

    def _keep_sample(self, maintainer: maintainer_module.Maintainer) -> None:
        self._sampled = time.monotonic()
        try:
            maintainer.catalog.sample(time.time(), self.figures.sample())
        except Exception as e:
            if isinstance(e, database.CatalogError):
                self._rebuild_after(maintainer, e)
            self._failed('account', e)
            self._note_catalog(maintainer)

    def _notify(self, event: str, name: str, payload: Fields) -> None:
        for listener in self.listeners:
            try:
                listener(event, name, payload)
            except Exception:
                LOG.exception('Telling of %s failed', name)

    def _tell(self) -> None:
        for watcher in self.watchers:
            watcher()

    # -- what the tasks are given ------------------------------------------

    def _schedule_scrub(self, maintainer: maintainer_module.Maintainer
                        ) -> None:
        """Go on with a pass that was interrupted, or wait for the next."""
        interval = self._interval('scrub')
        if not interval:
            return
        try:
            state = maintainer.catalog.scrub_state()
        except exceptions.RepositoryError:
            return  # the first task meets it, too
        left = 0.0
        if state.get('complete', True):
            left = state.get('started', 0.0) + interval - time.time()
        with self._changed:
            self._due['scrub'] = time.monotonic() + min(max(left, 0.0),
                                                        interval)

    def _run_task(self, maintainer: maintainer_module.Maintainer,
                  pace: task_module.Pace, job: _Job) -> Any:
        if job.name == 'rebuild-catalog':
            self.catalog_state = 'rebuilding'
        arguments = job.arguments
        if registry.TASKS[job.name].in_caches_only:
            arguments = {'held': self._held, 'coming': self._coming(),
                         **arguments}
        return registry.run(job.name, maintainer, pace, self._conf.dedupd,
                            **arguments)

    def _note_catalog(self, maintainer: maintainer_module.Maintainer) -> None:
        """Each task makes it anew if it is no good."""
        try:
            good = maintainer.catalog.valid
        except database.CatalogError:
            good = False
        self.catalog_state = 'ready' if good else 'failed'


@dataclasses.dataclass(frozen=True)
class _Nothing:
    """The result of a task that has none."""
