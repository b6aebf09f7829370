# SPDX-License-Identifier: Apache-2.0

"""The scheduler: a thread that runs the tasks, one at a time.

A daemon is the *maintainer* while it holds the maintainer's lock, and a
*reader* otherwise. A reader takes over when the maintainer ends
(``maintainer_takeover.py``). Opening the catalog takes long if it must be
rebuilt; the daemon serves reads meanwhile. A reader is a *helper*, too: it
runs its part of some tasks (``registry.py`` lists them).

Tasks run on request, in order, and when their interval is over
(``task_queue.py``). Every minute, and before each collection and merging, the
accounting counts new and deleted images; a cache checks as often whether it
has to evict images. A scrub takes long, so it makes way for all other tasks
but recompression, which makes way for the scrub, too. If a task fails, the log
and the status have the reason, and it runs again when its time comes.
"""

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

from dedupd.compute.cache import cache_catalog
from dedupd.process import logs
from dedupd.schedule import host_share
from dedupd.schedule import low_space
from dedupd.schedule import maintainer_takeover
from dedupd.schedule import task_queue
from dedupd.schedule import task_records
from dedupd.schedule import volume_garbage
from dedupd.status import forecast
from dedupd.status import repository_stats
from dedupd.status import task_errors
from dedupd.status import task_history
from dedupd.tasks import registry
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import catalog_db
from glance_dedup.maintenance import database
from glance_dedup.maintenance import helper_daemon
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository

LOG = log.getLogger(__name__)

#: Seconds until an unfinished scrub goes on.
RETRY_INTERVAL = 600.0
#: Seconds between two samples of the history.
SAMPLE_INTERVAL = 300.0
#: Seconds between two checks of the volumes' garbage, and of the free space.
LOOK_INTERVAL = 5.0

_MIB = 1 << 20

#: The maintainer or the helper that has a task run.
Worker = maintainer_role.Maintainer | helper_daemon.Helper
Fields = task_queue.Fields
Job = task_queue.Job
#: Called as `listener(event, task, payload)`; the event is 'start', 'end' or
#: 'error', the payload the arguments, the result, or ``{'error': sentence}``.
Listener = Callable[[str, str, Fields], None]


def _troubles(result: Fields) -> Iterator[str]:
    """Describe what a finished run could not do, or found damaged."""
    if result.get('refused'):
        yield f'nothing was freed: {result["refused"]}'
    if result.get('unavailable'):
        yield (f'{result["unchecked"]} blocks in cold groups were not '
               f'checked: {result["unavailable"]}')
    if result.get('found'):
        yield f'{result["found"]} damaged blocks were found'
    for key, words in (('failed', 'failed'),
                       ('failed_volumes', 'volumes cannot be removed'),
                       ('unreadable', 'cannot be read')):
        for what, error in sorted((result.get(key) or {}).items())[:1]:
            yield f'{len(result[key])} {words}; the first is {what}: {error}'


class NotMaintainer(exceptions.BusyError):
    """This daemon does not maintain the repository now."""


class Scheduler:
    """Runs the maintainer's tasks in a thread. Thread-safe.

    :param conf: has the group ``[dedupd]``; read each time, since its values
        may change
    :param held: what the cache holds; None: this daemon serves no cache
    :param coming: returns the bytes that the cache is about to store
    :ivar membership: the daemons that live, and this one's share
    :ivar past: the last runs of the tasks before this daemon was started
    :ivar errors: the last errors of all tasks
    :ivar listeners: called in the scheduler's thread, around each task
    :ivar watchers: called in any thread when a task's status changed
    :ivar figures: the repository's figures; measured again after each task
    """

    def __init__(self, repository: image_repository.Repository,
                 conf: cfg.ConfigOpts, held: cache_catalog.Held | None = None,
                 coming: Callable[[], int] = lambda: 0) -> None:
        self._repository = repository
        self._conf = conf
        self._changed = threading.Condition()
        self._held = held
        self._coming = coming
        self._stopping = False
        self._records = {
            name: task_records.Record() for name,
            task in registry.TASKS.items()
            if task.run and (held is not None or not task.in_caches_only)}
        self._queue = task_queue.TaskQueue(conf, self._records)
        # The job whose task runs now. It has a pace.
        self._running: Job | None = None
        # The job that was taken from the queue, before it begins and while it
        # runs. While an accounting runs for it first, that is `_running`.
        self._taken: Job | None = None
        self._sampled = 0.0
        self._looked = 0.0
        self._pressure: volume_garbage.Pressure | None = None
        self._shortage: low_space.Shortage | None = None
        self._maintainer: maintainer_role.Maintainer | None = None
        self.membership = host_share.Membership(
            repository, conf, self._records)
        self._takeover = maintainer_takeover.Takeover(
            repository, self.membership)
        self._logged = 0
        self.past = task_history.Past(repository.path)
        self._thread = threading.Thread(
            target=self._run, name='dedupd-maintainer', daemon=True)
        self.is_maintainer = False
        self.catalog_state = 'absent'
        self.errors = task_errors.Errors()
        self.listeners: list[Listener] = []
        self.watchers: list[Callable[[], None]] = []
        self.figures = repository_stats.Figures(repository, self.catalog)
        self._watch = forecast.Watch(repository.path)

    # -- for any thread ----------------------------------------------------

    def start(self) -> None:
        """Start the thread, which tries to become the maintainer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the running task after its step, and start no other."""
        with self._changed:
            self._stopping = True
            if self._running is not None:
                self._pace.stop()
            self._changed.notify_all()
        self._tell()

    def join(self, timeout: float) -> bool:
        """Wait until the thread has released the maintainer's lock.

        :returns: False if it has not, after `timeout` seconds
        """
        if self._thread.ident is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def maintainer(self) -> maintainer_role.Maintainer | None:
        """None while another process maintains the repository."""
        return self._maintainer

    def catalog(self) -> catalog_db.Catalog | None:
        """The catalog, for reading; None: another process has it."""
        maintainer = self._maintainer
        if maintainer is not None:
            with contextlib.suppress(database.CatalogError):
                return maintainer.catalog
        return None

    def request(self, name: str, /, **arguments: Any) -> int:
        """Have a task run; return the number of the request.

        Two equal requests become one if the first has not begun. A request
        without arguments joins a scrub or recompression that has begun.

        :raises NotMaintainer: if another process maintains the repository
        """
        if not self.is_maintainer:
            raise NotMaintainer(
                'this daemon does not maintain the repository: another '
                'process does, or it has just been started')
        with self._changed:
            if self._stopping:
                raise NotMaintainer('the daemon is ending')
            number = self._queue.request(name, arguments,
                                         self._taken).number
            self._make_way()
            self._changed.notify_all()
        self._tell()
        return number

    def withdraw(self, number: int) -> bool:
        """Forget a request; False if it has begun."""
        with self._changed:
            return self._queue.withdraw(number)

    def reload(self) -> None:
        """Follow changes of the options, also in the task that runs."""
        with self._changed:
            if self._running is not None:
                self._pace.rate = self._rate(self._running)
            self._queue.reload()
            self._changed.notify_all()
        self.membership.follow()

    def has(self, name: str) -> bool:
        """Return whether this daemon has such a task."""
        return name in self._records

    def tasks(self) -> dict[str, Fields]:
        """The status of each task."""
        with self._changed:
            return {name: self._status(name) for name in self._records}

    def task(self, name: str) -> Fields:
        """The status of one task, which this daemon must have."""
        with self._changed:
            return self._status(name)

    def wait(self, name: str, number: int, timeout: float) -> Fields:
        """Wait for the end of a request; return the task's status.

        Its ``last`` is the run that served the request, if that is over.

        :param timeout: seconds to wait at most
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (self._records[name].finished >= number
                         or self._stopping), timeout)
            return self._status(name, number)

    def _status(self, name: str, after: int = 0) -> Fields:
        status = self._records[name].status(
            self.past.facts(name), self._queue.is_waiting(name), after)
        due = self._queue.due(name)
        return {
            **status,
            'interval': self._queue.interval(name),
            'next': None if due is None or status['state'] == 'running' else (
                round(time.time() + max(0.0, due - time.monotonic()))),
        }

    def _rate(self, job: Job) -> float | None:
        option = job.task.rate
        return (self._conf.dedupd[option] * _MIB or None) if option else None

    # -- the thread --------------------------------------------------------

    def _run(self) -> None:
        with self.membership:
            self.membership.join()
            self._change_roles()

    def _change_roles(self) -> None:
        """Maintain the repository, or help, until the daemon ends."""
        while not self._stopping:
            try:
                maintainer = self._takeover.attempt(self._opening)
            except pacing.Stopped:
                break
            except Exception as e:
                self.errors.failed('rebuild-catalog', e)
                self.catalog_state = 'failed'
                maintainer = None
            if maintainer is not None:
                with contextlib.closing(maintainer):
                    self._opened(maintainer)
                    self._maintain(maintainer)
                    if not maintainer.lost:
                        self.past.save()
                    self._maintainer = None
            self._leave()
            self._help()

    def _opening(self, done: int, total: int, what: str) -> None:
        """Show a rebuild of the catalog: this daemon is the maintainer now."""
        if self._running is None:
            LOG.warning('The catalog is being rebuilt.')
            with self._changed:
                self.is_maintainer = True
                self.catalog_state = 'rebuilding'
                self._running = Job('rebuild-catalog', began=time.time(),
                                    pace=pacing.Pace())
                self._records['rebuild-catalog'].job = self._running
                if self._stopping:
                    self._pace.stop()
            self._tell()
        self._pace.step(done, total, what)

    def _opened(self, maintainer: maintainer_role.Maintainer) -> None:
        self.errors.merge(self.past.load(registry.TASKS))
        with self._changed:
            self._records['rebuild-catalog'].job = self._running = None
            self._maintainer = maintainer
            self._pressure = volume_garbage.Pressure(maintainer.engine)
            self._shortage = low_space.Shortage(self._repository)
            self.is_maintainer = True
            self.catalog_state = 'ready'
            self._queue.begin()
        self._logged = 0
        self._log_warnings(maintainer)
        LOG.info('This daemon maintains %s.', self._repository.path)
        self._tell()

    def _leave(self) -> None:
        with self._changed:
            self._maintainer = self._pressure = self._shortage = None
            self._running = self._taken = None
            if self.catalog_state != 'failed':
                self.catalog_state = 'absent'
            self.is_maintainer = False
            self._queue.clear()
            for record in self._records.values():
                record.job = None
        self._tell()

    def _help(self) -> None:
        """Help until it is time to try to become the maintainer again."""
        with contextlib.ExitStack() as stack:
            helper, hosts = None, self.membership.hosts
            if hosts is not None and not self._stopping:
                try:
                    helper = stack.enter_context(helper_daemon.Helper(
                        self._repository, hosts))
                    helper.save()   # so that others know the host's name
                except exceptions.RepositoryError as e:
                    LOG.warning('This daemon cannot help the maintainer: %s',
                                e)
            if helper is None:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._stopping,
                        maintainer_takeover.TRIAL_INTERVAL)
                return
            with self._changed:
                self._queue.begin(helps=True)
            self._tell()
            self._schedule_scrub(helper)
            while (job := self._next()) is not None:
                self._perform(helper, job)
        self._leave()

    def _maintain(self, maintainer: maintainer_role.Maintainer) -> None:
        """Maintain the repository until the role ends."""
        self._schedule_scrub(maintainer)
        while (job := self._next()) is not None:
            if job.task.counts_first:
                self._perform(maintainer, Job('account'))
            if not self._stopping and not maintainer.lost:
                self._perform(maintainer, job)
                if maintainer.lost:
                    continue
                self._end_intent(maintainer)
                self._log_warnings(maintainer)
                if not job.task.is_routine:
                    self._keep_sample(maintainer)

    def _schedule_scrub(self, worker: Worker) -> None:
        """Go on with a pass that was interrupted, or wait for the next."""
        try:
            state = worker.scrub_state()
        except exceptions.RepositoryError:
            return  # the first task meets it, too
        left = 0.0
        if state.get('complete', True):
            left = (state.get('started', 0.0)
                    + self._queue.interval('scrub') - time.time())
        with self._changed:
            self._queue.put('scrub', max(left, 0.0))

    def _end_intent(self, maintainer: maintainer_role.Maintainer) -> None:
        """Have a collection run when the collector's intent is to end."""
        with self._changed:
            self._queue.collect_by(maintainer.intent_ends)

    def _next(self) -> Job | None:
        """Wait for the next job; None: the daemon's role ends."""
        maintainer = self._maintainer
        while True:
            if maintainer is None and self._takeover.is_due():
                return None
            with self._changed:
                if self._stopping or (
                        maintainer is not None and maintainer.lost):
                    return None
                job = self._taken = self._queue.take()
                if job is not None:
                    return job
                now = time.monotonic()
                until = self._queue.until(
                    self._takeover.due if maintainer is None
                    else self._sampled + SAMPLE_INTERVAL)
                if self._pressure is not None or self._shortage is not None:
                    until = min(until, self._looked + LOOK_INTERVAL)
                if until > now:
                    self._changed.wait(until - now)
            self._look()
            if maintainer is not None and (
                    self._sampled + SAMPLE_INTERVAL <= time.monotonic()):
                self._keep_sample(maintainer)

    # -- one run -----------------------------------------------------------

    def _perform(self, worker: Worker, job: Job) -> None:
        """Run a job to its end, or until it makes way."""
        if job.name not in self._records:
            job.arguments['run'](worker)
            return
        # Now, since accounting removes the entries that this counts.
        self._look(now=True)
        if job.name == 'collect' and not job.only_plans and self._pressure:
            self._pressure.collected()
        first = job.began is None
        self._begin(job)
        if first:
            self._notify('start', job.name, job.arguments)
        outcome = self._run_task(worker, job)
        if outcome is None:
            with self._changed:
                job.pace = self._running = self._taken = None
                self._queue.suspend(job)
            return
        if self._maintainer is not None:
            self._note_catalog(self._maintainer)
        self.figures.forget()
        if job.name == 'tier' and self._shortage is not None:
            self._shortage.ended()
        self._end(job, outcome)
        if job.name == 'scrub':
            # It healed what it could, or an operator had repaired something.
            self.figures.suspects.verify_now()

    def _begin(self, job: Job) -> None:
        """Note that a job begins, or goes on."""
        with self._changed:
            if job.began is None:
                job.began, job.started = time.time(), time.monotonic()
            if job.does_all:
                self._queue.put(job.name)
            job.pace = pacing.Pace(
                lambda *args: self._progress(), self._rate(job),
                patient=not job.number)
            self._records[job.name].job = self._running = job
            if self._stopping:
                job.pace.stop()
        self._tell()

    @property
    def _pace(self) -> pacing.Pace:
        """The pace of the running job. REQUIRES: there is one."""
        assert self._running is not None and self._running.pace is not None
        return self._running.pace

    def _arguments(self, job: Job) -> Fields:
        """The arguments of the job's task."""
        arguments = job.arguments
        if job.task.in_caches_only:
            arguments = {'held': self._held, 'coming': self._coming,
                         **arguments}
        share = self.membership.share(job.name)
        if share is not None and not job.only_plans:
            # A requested run does all groups.
            arguments = {**arguments, 'is_mine': lambda group: (
                bool(job.number) or share(group))}
        return arguments

    def _run_task(self, worker: Worker, job: Job
                  ) -> task_records.Outcome | None:
        """Run a job's task; return None if it stopped to make way."""
        if job.name == 'rebuild-catalog':
            self.catalog_state = 'rebuilding'
        try:
            result = registry.run(job.name, worker, self._pace,
                                  self._conf.dedupd, **self._arguments(job))
        except pacing.Stopped:
            if not self._stopping:
                return None
            return task_records.Outcome(
                error='it was stopped because the daemon ended',
                is_cut_off=True)
        except Exception as e:
            self._rebuild_after(e)
            self.errors.failed(job.name, e)
            return task_records.Outcome(error=str(e) or repr(e))
        return task_records.Outcome(
            {} if result is None else dataclasses.asdict(result))

    def _end(self, job: Job, outcome: task_records.Outcome) -> None:
        """Note and report the end of a job."""
        record = self._records[job.name]
        with self._changed:
            record.end(job, outcome)
            job.pace = self._running = None
            if self._taken is job:
                self._taken = None
            if job.does_all:
                self._queue.drop_suspended(job.name)
            if outcome.result.get('complete') is False:
                # Something kept the pass from ending.
                self._queue.put(job.name, RETRY_INTERVAL)
            self._changed.notify_all()
        if outcome.error is None:
            # Most runs find nothing to do.
            LOG.log(logging.INFO if any(outcome.result.values())
                    else logging.DEBUG, '%s: %s', job.name,
                    logs.fields(outcome.result))
            for text in _troubles(outcome.result):
                self.errors.add(job.name, text)
            self._notify('end', job.name, outcome.result)
        else:
            self._notify('error', job.name, {'error': outcome.error})
        self._tell()
        if self._maintainer is None:
            return      # the file with the last runs is the maintainer's
        if record.last is not None and not outcome.is_cut_off:
            self.past.note(job.name, record.last, record.last_success_run)
            if outcome.error is not None or not job.task.is_routine:
                # After a good routine run, the next save will do.
                self.past.save()

    def _progress(self) -> None:
        """Called in each step of a task, which may have to make way."""
        self._look()
        if self._maintainer is None and self._takeover.is_due():
            self._pace.stop()
            self._takeover.hurry()
        with self._changed:
            self._make_way()

    def _look(self, now: bool = False) -> None:
        """Have a collection be due if volumes have left enough.

        And have groups move if too little space is free.

        :param now: also if the last check was a moment ago
        """
        moment = time.monotonic()
        if not now and moment < self._looked + LOOK_INTERVAL:
            return
        self._looked = moment
        if self._shortage is not None and self._shortage.look(
                self._conf.dedupd.tier_free_mib * _MIB):
            with self._changed:
                if self._running is None or self._running.name != 'tier':
                    self._queue.hurry('tier')
        pressure = self._pressure
        if pressure is None or not self._repository.has_volumes:
            return
        limit = self._conf.dedupd.collect_volumes_mib * _MIB
        # Entries that cannot be read now are counted at the next check.
        with contextlib.suppress(exceptions.RepositoryError):
            pressure.look()
        if limit and pressure.bytes >= limit:
            with self._changed:
                if self._queue.interval('collect'):
                    self._queue.collect_by(moment)

    def _make_way(self) -> None:
        """Stop the running job after its step if it is to make way."""
        if self._running is not None and self._queue.makes_way(self._running):
            self._pace.stop()

    def _rebuild_after(self, error: Exception) -> None:
        """Rebuild the catalog again, if a task failed to do that."""
        maintainer = self._maintainer
        if maintainer is None or not isinstance(error, database.CatalogError):
            return
        LOG.warning('The catalog is rebuilt: %s', error)
        try:
            maintainer.rebuild(why=str(error))
        except Exception as e:
            self.errors.failed('rebuild-catalog', e)

    def _log_warnings(self, maintainer: maintainer_role.Maintainer) -> None:
        warnings = list(maintainer.warnings)
        for warning in warnings[self._logged:]:
            LOG.warning('%s', warning)
        self._logged = len(warnings)

    def _keep_sample(self, maintainer: maintainer_role.Maintainer) -> None:
        self._sampled = time.monotonic()
        try:
            maintainer.catalog.sample(time.time(), self.figures.sample())
            if self._held is None:  # a cache is full most of the time
                self._watch.look(self.figures.foresee())
        except Exception as e:
            self._rebuild_after(e)
            self.errors.failed('account', e)
            self._note_catalog(maintainer)

    def _notify(self, event: str, name: str, payload: Fields) -> None:
        for listener in self.listeners:
            try:
                listener(event, name, payload)
            except Exception:
                LOG.exception('A listener failed at the %s of the task %s',
                              event, name)

    def _tell(self) -> None:
        for watcher in self.watchers:
            watcher()

    def _note_catalog(self, maintainer: maintainer_role.Maintainer) -> None:
        """Note whether the catalog is good; if not, each task rebuilds it."""
        try:
            good = maintainer.catalog.valid
        except database.CatalogError:
            good = False
        self.catalog_state = 'ready' if good else 'failed'
