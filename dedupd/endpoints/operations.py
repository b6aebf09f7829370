# SPDX-License-Identifier: Apache-2.0

"""The operations that the daemon offers to operators, by HTTP and by RPC.

Every method may be called in any thread, and returns values that JSON can
have. No method waits for a running task, unless its docstring says so.
"""

from collections.abc import Callable
import dataclasses
import os
import socket
import threading
import time
from typing import Any

from oslo_log import log

from dedupd.schedule import task_scheduler
from dedupd.status import problems
from dedupd.status import repository_stats
from dedupd.status import volume_stats
from dedupd.tasks import registry
from glance_dedup.base import exceptions
from glance_dedup.base import package_version
from glance_dedup.repository import image_repository
from glance_dedup.repository import volumes

LOG = log.getLogger(__name__)

Fields = dict[str, Any]

#: The task that the scheduler does not run.
REPLICATE = 'replicate'

#: The most seconds that a call waits.
MAX_WAIT = 60.0

_SLICES = 'slice_'
_CACHE = ('cache_bytes', 'cache_hits', 'cache_misses')


@dataclasses.dataclass(frozen=True)
class Sources:
    """Functions that return parts of the status.

    :ivar reads: connections, requests and bytes
    :ivar receiving: images that came or are coming from other sites
    :ivar nbd: the socket, exports, requests, bytes and errors
    :ivar cache: the figures of a compute host's cache; None: there is none
    :ivar certificates: the daemon's certificates, by their options
    :ivar name: takes an image's id, returns its name in Glance, or None
    """

    reads: Callable[[], Fields] = lambda: {
        'connections': 0, 'requests': 0, 'bytes': 0}
    receiving: Callable[[], Fields] = lambda: {
        'images': 0, 'bytes': 0, 'failures': 0, 'under_way': 0, 'replicas': []}
    nbd: Callable[[], Fields] = lambda: {
        'socket': None, 'exports': 0, 'requests': 0, 'bytes': 0, 'errors': 0}
    cache: Callable[[], Fields | None] = lambda: None
    certificates: Callable[[], Fields] = dict
    name: Callable[[str], str | None] = lambda image_id: None


class Control:
    """The daemon's operations.

    :param replicator: None if no images are sent to another site
    :ivar ready: whether all listeners serve
    """

    def __init__(self, repository: image_repository.Repository,
                 scheduler: task_scheduler.Scheduler,
                 sources: Sources = Sources(), replicator: Any = None) -> None:
        self._repository = repository
        self._scheduler = scheduler
        self._figures = scheduler.figures
        self._volumes = volume_stats.VolumeFigures(
            repository, self._figures.journals)
        self._sources = sources
        self._replicator = replicator
        self._started = time.time()
        self.ready = False

    def status(self) -> Fields:
        """The daemon's whole status, and the problems that it shows."""
        status = self._status()
        return {**status, 'problems': problems.found_in(status)}

    def _status(self) -> Fields:
        statistics = self._repository.statistics()
        scheduler, catalog = self._scheduler, self._scheduler.catalog()
        maintainer = scheduler.maintainer
        damaged_blocks, damaged = self._figures.damage()
        images, names = volumes.apart(self._repository, damaged)
        unreadable = ({} if maintainer is None
                      else maintainer.unreadable.reasons())
        return {
            'repository': repository_stats.described(self._repository),
            'daemon': self._daemon(),
            'hosts': scheduler.membership.described(),
            'space': self._figures.space(),
            'volumes': self._volumes.sums(),
            'catalog': {
                'state': scheduler.catalog_state,
                'sequence': None if catalog is None else catalog.sequence,
                'disk_bytes': 0 if catalog is None else catalog.disk_bytes(),
                'unreadable': unreadable,
                'warnings': ([] if maintainer is None
                             else list(maintainer.warnings))},
            'tasks': self._tasks(),
            'replication': (None if self._replicator is None
                            else self._replicator.status()),
            'damage': {'blocks': damaged_blocks, 'images': images,
                       'volumes': names},
            'names': {image_id: name for image_id in {*images, *unreadable}
                      if (name := self._sources.name(image_id))},
            'filter': repository_stats.of_filter(self._repository, statistics),
            'reads': {**self._sources.reads(),
                      'failed': self._figures.suspects.failed_reads,
                      **{name: statistics.get(name, 0) for name in _CACHE}},
            'cold': None if not self._repository.has_cold else {
                name.removeprefix(_SLICES): value
                for name, value in statistics.items()
                if name.startswith(_SLICES)},
            'receiving': self._sources.receiving(),
            'nbd': self._sources.nbd(),
            'cache': self._sources.cache(),
            'certificates': self._sources.certificates(),
            'errors': list(scheduler.errors),
        }

    def _daemon(self) -> Fields:
        scheduler = self._scheduler
        return {
            'role': 'maintainer' if scheduler.is_maintainer else 'reader',
            'version': package_version.version(), 'pid': os.getpid(),
            'host': socket.gethostname(),
            'number': scheduler.membership.number,
            'started': self._started, 'ready': self.ready}

    def summary(self) -> Fields:
        """The daemon's activity: the status without the stored data."""
        return {
            'daemon': self._daemon(),
            'catalog': self._scheduler.catalog_state,
            'tasks': self._tasks(),
            'replication': (None if self._replicator is None
                            else self._replicator.status()),
            'reads': self._sources.reads(),
            'receiving': self._sources.receiving(),
            'nbd': self._sources.nbd(),
            'errors': list(self._scheduler.errors),
        }

    def _tasks(self) -> Fields:
        tasks = self._scheduler.tasks()
        if self._replicator is not None:
            tasks[REPLICATE] = self._replicator.task()
        return tasks

    def history(self, since: float = 0) -> Fields:
        """Samples for plots, from `since` (seconds since 1970) on."""
        catalog = self._scheduler.catalog()
        return {'samples': [] if catalog is None else catalog.history(since)}

    def images(self) -> Fields:
        """``images``: see `Figures.images`; and the name of each in Glance.

        A name is None if it is not known.
        """
        return {'images': [
            {**image, 'name': self._sources.name(image['image_id'])}
            for image in self._figures.images()]}

    def groups(self) -> Fields:
        """``groups``: see `Figures.groups`."""
        return {'groups': self._figures.groups()}

    def projects(self) -> Fields:
        """``projects``: see `Figures.projects`."""
        return {'projects': self._figures.projects()}

    def volumes(self) -> Fields:
        """``volumes``: see `VolumeFigures.all`."""
        return {'volumes': self._volumes.all()}

    def sharing(self) -> Fields:
        """The blocks that each two of the largest images have in common."""
        return self._figures.sharing()

    def start_task(self, name: str, /, **arguments: Any) -> Fields:
        """Have a task run as soon as possible; returns at once.

        :returns: ``task``, and the ``number`` to wait for
        :raises ImageNotFound: if there is no such task
        :raises InvalidParameter: if the task has no such argument
        :raises BusyError: if this daemon is not the maintainer
        """
        self._known(name).check(arguments)
        if name == REPLICATE:
            return {'task': name, 'number': self._replicator.request()}
        return {'task': name,
                'number': self._scheduler.request(name, **arguments)}

    def task(self, name: str, after: int = 0, wait: float = 0) -> Fields:
        """A task's status; waits for the end of the request `after`.

        :param wait: seconds at most, 0 to 60
        """
        self._known(name)
        wait = min(max(0.0, wait), MAX_WAIT)
        if name == REPLICATE:
            return self._replicator.wait(after, wait)
        return self._scheduler.wait(name, after, wait)

    def _known(self, name: str) -> registry.Task:
        if name not in registry.TASKS:
            raise exceptions.ImageNotFound(f'there is no task {name!r}')
        if name == REPLICATE:
            if self._replicator is None:
                raise exceptions.ImageNotFound(
                    f'this daemon has no task {name!r}: it takes images to '
                    'no other site (its option [replication] target_url is '
                    'not set)')
        elif not self._scheduler.has(name):
            raise exceptions.ImageNotFound(
                f'this daemon has no task {name!r}: it does not serve a cache '
                '(its option mode is not cache)')
        return registry.TASKS[name]

    def mark_lost(self, image_id: str) -> Fields:
        """Give up an image whose recipe cannot be read.

        This waits until no task runs, and for the end, for at most a minute.

        :raises InvalidParameter: if the recipe can be read
        :raises ImageNotFound: if there is no such image
        :raises BusyError: if this daemon is not the maintainer, or a task
            runs for too long, or this takes too long and goes on
        """
        over = threading.Event()
        outcome: list[Any] = []

        def run(maintainer: Any) -> None:
            from dedupd.tasks import scrubber
            try:
                outcome.append(scrubber.mark_lost(maintainer, image_id))
                LOG.warning('Image %s was declared lost.', image_id)
            except Exception as e:
                outcome.append(e)
            self._figures.forget()
            over.set()

        number = self._scheduler.request('mark-lost', run=run)
        if not over.wait(MAX_WAIT):
            raise exceptions.BusyError(
                'another task is running; try again later'
                if self._scheduler.withdraw(number) else
                f'giving up image {image_id} takes long; it goes on')
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return {'image_id': image_id, 'quarantined': outcome[0]}
