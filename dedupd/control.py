# SPDX-License-Identifier: Apache-2.0

"""What operators ask of the daemon, by whichever way: HTTP and RPC alike.

Every method may be called in any thread. What it returns consists of what
JSON has. None waits for a task that runs, but those that say so.
"""

from collections.abc import Callable
import os
import socket
import threading
import time
from typing import Any

from oslo_log import log

from dedupd import figures as figures_module
from dedupd import scheduler as scheduler_module
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import version
from glance_dedup.repository import repository as repository_module

LOG = log.getLogger(__name__)

Fields = dict[str, Any]

#: The arguments of each task, and their types.
ARGUMENTS: dict[str, dict[str, type]] = {
    'account': {}, 'collect': {'dry_run': bool}, 'merge': {'dry_run': bool},
    'scrub': {'full': bool},
    'recompress': {'dry_run': bool, 'codec': str, 'level': int},
    'evict': {'dry_run': bool, 'limit_mib': int},
    'rebuild-catalog': {}, 'replicate': {}}

#: The one that is none of the scheduler's.
REPLICATE = 'replicate'

#: Seconds that a call waits at most.
LONGEST_WAIT = 60.0

_CACHE = ('cache_bytes', 'cache_hits', 'cache_misses')


def _check_codec(codec: str, level: int = 0, **others: Any) -> None:
    """Refuse a level that the codec lacks, by its name."""
    repository_module.need_text('codec', codec)
    if not 0 <= level < 256:
        raise exceptions.InvalidParameter(f'no codec has a level {level}')
    _engine.codec_mark(codec, level)


class Control:
    """The daemon's operations.

    :ivar ready: whether all listeners serve
    :ivar reads: gives connections, requests and bytes
    :ivar replicator: None where images are taken to no other site
    :ivar receiving: gives what came, and comes, from other sites
    :ivar nbd: gives the socket, exports, requests, bytes and errors
    :ivar cache: gives how the cache of a compute host does; None where there
        is none
    """

    def __init__(self, repository: repository_module.Repository,
                 scheduler: scheduler_module.Scheduler,
                 figures: figures_module.Figures) -> None:
        self._repository = repository
        self._scheduler = scheduler
        self._figures = figures
        # Whoever waits for a task's end, and then asks, sees what it did.
        scheduler.changed = figures.forget
        self._started = time.time()
        self.ready = False
        self.replicator: Any = None
        self.reads = lambda: {'connections': 0, 'requests': 0, 'bytes': 0}
        self.receiving = lambda: {'images': 0, 'bytes': 0, 'failures': 0,
                                  'under_way': 0, 'replicas': []}
        self.cache: Callable[[], Fields] | None = None
        self.nbd = lambda: {'socket': None, 'exports': 0, 'requests': 0,
                            'bytes': 0, 'errors': 0}

    def status(self) -> Fields:
        """Everything there is to see at a glance."""
        parameters = self._repository.parameters
        statistics = self._repository.statistics()
        scheduler, catalog = self._scheduler, self._scheduler.catalog()
        maintainer = scheduler.maintainer
        damaged_blocks, damaged_images = self._figures.damage()
        return {
            'repository': {
                'path': self._repository.path,
                'id': parameters.repository_id,
                'block_size': parameters.block_size,
                'cutting': parameters.cutting,
                'group_slots': parameters.group_slots,
                'fingerprint': parameters.fingerprint,
                'compare': parameters.compare},
            'daemon': {
                'role': 'maintainer' if scheduler.is_maintainer else 'reader',
                'version': version.version(), 'pid': os.getpid(),
                'host': socket.gethostname(), 'started': self._started,
                'ready': self.ready},
            'space': self._figures.space(),
            'catalog': {
                'state': scheduler.catalog_state,
                'sequence': None if catalog is None else catalog.sequence,
                'disk_bytes': 0 if catalog is None else catalog.disk_bytes(),
                'unreadable': ({} if maintainer is None
                               else maintainer.unreadable()),
                'warnings': ([] if maintainer is None
                             else list(maintainer.warnings))},
            'tasks': self._tasks(),
            'replication': (None if self.replicator is None
                            else self.replicator.status()),
            'damage': {'blocks': damaged_blocks,
                       'images': sorted(damaged_images)},
            'filter': {
                **{name: value for name, value in statistics.items()
                   if name.startswith('filter_')},
                'filter_error': self._repository.filter_error},
            'reads': {**self.reads(),
                      **{name: statistics.get(name, 0) for name in _CACHE}},
            'receiving': self.receiving(),
            'nbd': self.nbd(),
            'cache': None if self.cache is None else self.cache(),
            'errors': list(scheduler.errors),
        }

    def _tasks(self) -> Fields:
        tasks = self._scheduler.tasks()
        if self.replicator is not None:
            tasks[REPLICATE] = self.replicator.task()
        return tasks

    def sample(self) -> Fields:
        """What the history keeps of now."""
        self._figures.forget()
        space = self._figures.space()
        return {name: space[name] for name in (
            'images', 'logical_bytes', 'nonzero_bytes', 'unique_bytes',
            'disk_bytes')}

    def history(self, since: float = 0) -> Fields:
        """Samples for plots, from `since` (seconds since 1970) on."""
        catalog = self._scheduler.catalog()
        return {'samples': [] if catalog is None else catalog.history(since)}

    def images(self) -> Fields:
        return {'images': self._figures.images()}

    def groups(self) -> Fields:
        return {'groups': self._figures.groups()}

    def sharing(self) -> Fields:
        """Blocks that each two of the largest images have in common."""
        return self._figures.sharing()

    def start_task(self, name: str, /, **arguments: Any) -> Fields:
        """Have a task run as soon as can be; returns at once.

        :returns: ``task``, and the ``number`` to wait for
        :raises ImageNotFound: there is no such task
        :raises InvalidParameter: it has no such argument
        :raises BusyError: this daemon is not the maintainer
        """
        known = self._arguments(name)
        for key, value in arguments.items():
            if key not in known:
                raise exceptions.InvalidParameter(
                    f'the task {name} has no argument {key!r}')
            if type(value) is not known[key]:
                raise exceptions.InvalidParameter(
                    f'{key}: {value!r} is not of the type '
                    f'{known[key].__name__}')
        if name == 'recompress' and 'codec' in arguments:
            _check_codec(**arguments)
        if name == REPLICATE:
            return {'task': name, 'number': self.replicator.request()}
        return {'task': name,
                'number': self._scheduler.request(name, **arguments)}

    def task(self, name: str, after: int = 0, wait: float = 0) -> Fields:
        """A task's status; waits for the end of the request `after`.

        :param wait: seconds at most, 0 to 60
        """
        self._arguments(name)
        wait = min(max(0.0, wait), LONGEST_WAIT)
        if name == REPLICATE:
            return self.replicator.wait(after, wait)
        return self._scheduler.wait(name, after, wait)

    def _arguments(self, name: str) -> dict[str, type]:
        if name not in ARGUMENTS:
            raise exceptions.ImageNotFound(f'there is no task {name!r}')
        if name == REPLICATE:
            if self.replicator is None:
                raise exceptions.ImageNotFound(
                    f'this daemon has no task {name!r}: it takes images to '
                    'no other site (its option [replication] to is not set)')
        elif not self._scheduler.has(name):
            raise exceptions.ImageNotFound(
                f'this daemon has no task {name!r}: it does not serve a cache '
                '(its option mode is not cache)')
        return ARGUMENTS[name]

    def mark_lost(self, image_id: str) -> Fields:
        """Give up an image whose recipe cannot be read.

        It waits until no task runs, but not for more than a minute.

        :raises InvalidParameter: the recipe can be read
        :raises ImageNotFound: there is no such image
        :raises BusyError: this daemon is not the maintainer, or a task goes
            on for too long
        """
        over = threading.Event()
        outcome: list[Any] = []

        def run(maintainer: Any) -> None:
            from dedupd.tasks import scrubber
            try:
                outcome.append(scrubber.mark_lost(maintainer, image_id))
            except Exception as e:
                outcome.append(e)
            self._figures.forget()
            over.set()

        number = self._scheduler.request('mark-lost', run=run)
        if not over.wait(LONGEST_WAIT) and self._scheduler.withdraw(number):
            raise exceptions.BusyError(
                'the maintainer is at work; try again later')
        if not over.wait(LONGEST_WAIT):
            raise exceptions.BusyError('it goes on for long')
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        LOG.warning('Image %s was declared lost.', image_id)
        return {'image_id': image_id, 'quarantined': outcome[0]}
