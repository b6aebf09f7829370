# SPDX-License-Identifier: Apache-2.0

"""Continuous replication: sends new images to another site.

The options ``[replication]`` choose the images. The replicator has its own
thread, beside the maintainer's tasks: it needs neither the catalog nor the
maintainer's lock, and it waits for the network. If it gave way to each task,
it would offer a large image's description again each minute. Only the
maintainer replicates, so that only one of several daemons does.

If an image fails, the replicator tries it again after longer and longer times.
It remembers failures, and the images at the other site, while the daemon runs;
another daemon lists them from Glance.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import logging
import threading
import time
from typing import Any

from oslo_config import cfg
from oslo_log import log

from dedupd.process import logs
from dedupd.schedule import task_queue
from dedupd.schedule import task_records
from dedupd.status import task_errors
from dedupd.status import task_history
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import glance_api
from glance_dedup.repository import image_repository
from glance_dedup.transfer import site_replication

LOG = log.getLogger(__name__)

#: Seconds until an image that failed is tried again: at first, and at most.
#: They double each time.
FIRST_WAIT, MAX_WAIT = 60.0, 6 * 3600.0
#: Seconds between two checks whether this daemon has become the maintainer.
TRIAL_INTERVAL = 5.0
#: The most failed images that the status shows.
SHOWN = 20

_MIB = 1 << 20

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Policy:
    """The choice of images that are taken to the other site."""

    projects: frozenset[str]
    """Their owners; empty: every project."""
    properties: tuple[tuple[str, str], ...]
    """Names and values that each image must have."""

    @classmethod
    def of(cls, options: Any) -> 'Policy':
        """The policy of the group ``[replication]``."""
        return cls(frozenset(options.projects), tuple(
            tuple(item.split('=', 1)) for item in options.properties))

    def wants(self, record: glance_api.Record) -> bool:
        """Return whether to take an image of Glance to the other site."""
        if record.get('status') != 'active':
            return False
        if self.projects and record.get('owner') not in self.projects:
            return False
        return all(record.get(name) == value
                   for name, value in self.properties)


@dataclasses.dataclass
class Result:
    """Result of a run."""

    replicated: int = 0
    present: int = 0
    """Images that were at the other site already."""
    deleted: int = 0
    """Images deleted there, because they were deleted at home meanwhile."""
    left_out: int = 0
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Images that are tried again later, each with its error."""
    sent_bytes: int = 0


@dataclasses.dataclass
class _Failure:
    error: str
    times: int
    again: float
    """The time of the next try, by the clock."""


class Memory:
    """The images that the runs have done, and those that failed.

    :ivar pending: wanted images that are not at the other site yet
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._settled: set[str] = set()
        self._failures: dict[str, _Failure] = {}
        self.pending = 0

    @property
    def is_new(self) -> bool:
        """Return whether no image is known to be done, as after the start."""
        return not self._settled

    def choose(self, wanted: list[str]) -> list[str]:
        """The images to try now; forgets images that are not wanted."""
        self._settled.intersection_update(wanted)
        for image_id in self._failures.keys() - {*wanted}:
            del self._failures[image_id]
        left = [image_id for image_id in wanted
                if image_id not in self._settled]
        self.pending = len(left)
        now = self._clock()
        return [image_id for image_id in left
                if image_id not in self._failures
                or self._failures[image_id].again <= now]

    def settle(self, image_id: str) -> None:
        """Note that an image is done, and needs no further try."""
        self._settled.add(image_id)
        self._failures.pop(image_id, None)
        self.pending = max(0, self.pending - 1)

    def fail(self, image_id: str, error: str) -> float:
        """Note a failure; return the seconds until the next try."""
        before = self._failures.get(image_id)
        times = 1 if before is None else before.times + 1
        wait = min(FIRST_WAIT * 2 ** min(times - 1, 20), MAX_WAIT)
        self._failures[image_id] = _Failure(error, times,
                                            self._clock() + wait)
        return wait

    def failed(self) -> Fields:
        """At most SHOWN failed images: the error, and the next try's time."""
        now = self._clock()
        return {image_id: {'error': failure.error, 'times': failure.times,
                           'seconds_left': round(max(
                               0.0, failure.again - now))}
                for image_id, failure in [*self._failures.items()][:SHOWN]}


def run_once(repository: image_repository.Repository,
             replication: site_replication.Replication,
             home: glance_api.Glance, away: glance_api.Glance,
             policy: Policy, memory: Memory,
             pace: site_replication.Pace) -> Result:
    """Take the new images to the other site.

    If one image fails, the run notes that, and goes on with the next.

    :raises task.Stopped: if it is to stop; the next run goes on
    :raises Exception: if an error concerns every image, such as a site that
        does not answer
    """
    replication.need()
    stored = {*repository.images()}
    records = [record for record in home.records()
               if policy.wants(record) and record['id'] in stored]
    records.sort(key=lambda record: str(record.get('created_at')))
    if memory.is_new:
        replication.listed(
            {record['id']: glance_api.image_of(record) for record in records},
            {image.image_id: image for image in away.images()})
    sizes = {record['id']: record.get('size') or 0 for record in records}
    del records
    chosen = memory.choose([*sizes])
    result = Result()
    pace.total = sum(sizes[image_id] for image_id in chosen)
    for image_id in [*replication.left(sizes), *chosen]:
        pace.check()
        pace.image_id = image_id
        outcome = replication.take(image_id, pace)
        pace.over(sizes.get(image_id, 0))
        result.sent_bytes += outcome.sent_bytes
        if outcome.absence is not None:
            raise outcome.absence
        _note(outcome, memory, result)
    return result


def _note(outcome: site_replication.Outcome, memory: Memory, result: Result
          ) -> None:
    image_id = outcome.image_id
    for note in outcome.notes:
        LOG.warning('Image %s: %s', image_id, note)
    if outcome.result == site_replication.FAILED:
        error = str(outcome.error) or repr(outcome.error)
        wait = memory.fail(image_id, error)
        result.failed[image_id] = error
        LOG.error('Image %s was not replicated, and is tried again in %d '
                  'seconds: %s', image_id, wait, error)
        return
    memory.settle(image_id)
    name = outcome.result.replace(' ', '_')
    setattr(result, name, getattr(result, name) + 1)
    if outcome.result != site_replication.PRESENT:
        LOG.info('Image %s: %s', image_id, outcome.error or
                 f'{outcome.result}, {outcome.sent_bytes} bytes sent')


class Replicator:
    """Replicates in a thread of its own. Thread-safe.

    :param conf: has the group ``[replication]``; read for each run
    :param is_maintainer: returns whether this daemon is the maintainer
    :param errors: the errors of the daemon's status; gets those of the runs
    :param watchers: called when the status of the task has changed
    :param past: the last run before this daemon was started
    """

    def __init__(self, repository: image_repository.Repository,
                 conf: cfg.ConfigOpts, is_maintainer: Callable[[], bool],
                 errors: task_errors.Errors,
                 watchers: list[Callable[[], None]],
                 past: task_history.Past) -> None:
        self._repository = repository
        self._conf = conf
        self._is_maintainer = is_maintainer
        self._errors = errors
        self._watchers = watchers
        self._past = past
        self._memory = Memory()
        self._changed = threading.Condition()
        self._stopping = False
        self._due = time.monotonic()
        self._numbers = 0
        self._pace: site_replication.Pace | None = None
        self._record = task_records.Record()
        self._replicated = self._sent = 0
        self._thread = threading.Thread(
            target=self._run, name='dedupd-replicate', daemon=True)

    # -- for any thread ----------------------------------------------------

    def start(self) -> None:
        """Start the thread; the first run comes as soon as it may."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current step; the other site keeps the sent blocks."""
        with self._changed:
            self._stopping = True
            if self._pace is not None:
                self._pace.stop()
            self._changed.notify_all()

    def request(self) -> int:
        """Look for new images now; return the number of the request.

        :raises BusyError: if this daemon is not the maintainer
        """
        if not self._is_maintainer():
            raise exceptions.BusyError(
                'this daemon does not maintain the repository; the one that '
                'does replicates')
        with self._changed:
            if self._due > 0.0 or self._pace is not None:
                self._numbers += 1
            self._due = 0.0
            self._changed.notify_all()
            return self._numbers

    def reload(self) -> None:
        """Follow changes of the options, also in the run that goes on."""
        with self._changed:
            if self._pace is not None:
                self._pace.rate = self._rate()
            if self._due > 0.0:
                self._due = self._next()
            self._changed.notify_all()

    def wait(self, number: int, timeout: float) -> Fields:
        """Wait for the end of a request; return the status as `task` does.

        :param timeout: seconds to wait at most
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._record.finished >= number or self._stopping,
                timeout)
        return self.task()

    def task(self) -> Fields:
        """The task's status, with the fields of the scheduler's tasks."""
        with self._changed:
            pace, due = self._pace, self._due
            status = self._record.status(self._past.facts('replicate'),
                                         waits=due == 0.0)
            if pace is not None:
                status['what'] = pace.image_id and (
                    f'replicating {pace.image_id}')
            return {
                **status,
                'interval': self._conf.replication.interval,
                'next': None if pace is not None or due == float('inf')
                else round(time.time() + max(0.0, due - time.monotonic()))}

    def status(self) -> Fields:
        """The fields of the status that only this task has."""
        with self._changed:
            pace = self._pace
            sent = 0 if pace is None else pace.sent
            return {'target_url': self._conf.replication.target_url,
                    'pending': self._memory.pending,
                    'replicated': self._replicated,
                    'sent_bytes': self._sent + sent,
                    'failed': self._memory.failed()}

    def _rate(self) -> float | None:
        return self._conf.replication.rate_mib * _MIB or None

    def _next(self) -> float:
        interval = self._conf.replication.interval
        return time.monotonic() + interval if interval else float('inf')

    # -- the thread --------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and (
                        self._due > time.monotonic()
                        or not self._is_maintainer()):
                    self._changed.wait(min(
                        TRIAL_INTERVAL,
                        max(0.05, self._due - time.monotonic())))
                if self._stopping:
                    return
                self._due = self._next()
                pace = self._pace = site_replication.Pace(rate=self._rate())
                job = self._record.job = task_queue.Job(
                    'replicate', self._numbers, began=time.time(),
                    started=time.monotonic(), pace=pace)
            self._tell()
            self._perform(job, pace)
            self._tell()

    def _perform(self, job: task_queue.Job,
                 pace: site_replication.Pace) -> None:
        outcome = task_records.Outcome()
        try:
            outcome.result = dataclasses.asdict(self._replicate(pace))
        except pacing.Stopped:
            outcome.error = 'it was stopped because the daemon ended'
            outcome.is_cut_off = True
        except Exception as e:
            outcome.error = str(e) or repr(e)
            self._errors.failed(
                'replicate', e, glance_api.GlanceError,
                client_errors.ClientError, OSError, ValueError)
        result, record = outcome.result, self._record
        with self._changed:
            record.end(job, outcome)
            self._replicated += result.get('replicated', 0)
            self._sent += pace.sent
            self._pace = None
            self._changed.notify_all()
        if record.last is not None and not outcome.is_cut_off:
            self._past.note('replicate', record.last, record.last_success_run)
        if outcome.error is None:
            LOG.log(logging.INFO if result['replicated'] or result['failed']
                    else logging.DEBUG, 'replicate: %s', logs.fields(result))

    def _replicate(self, pace: site_replication.Pace) -> Result:
        options = self._conf.replication
        home, away = map(glance_api.Glance,
                         (options.from_cloud, options.to_cloud))
        with contextlib.closing(daemon_client.Client(
                options.target_url, cert=options.cert, key=options.key,
                ca_file=options.ca_file)) as client:
            return run_once(
                self._repository,
                site_replication.Replication(self._repository, client, home,
                                             away),
                home, away, Policy.of(options), self._memory, pace)

    def _tell(self) -> None:
        for watcher in self._watchers:
            watcher()
