# SPDX-License-Identifier: Apache-2.0

"""Computes the catalog's counts by several processes (``batch.rst``).

The maintainer has one thread for this. It starts *counters*
(:mod:`~glance_dedup.maintenance.rebuild_worker`), gives each one task after
the other, and has the files of the partitions. A counter that ends, or finds
an unexpected file, makes the whole counting fail:
:class:`rebuild_worker.Broken`.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import itertools
from multiprocessing import connection
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from typing import Any

from glance_dedup import _engine
from glance_dedup.base import package_version
from glance_dedup.maintenance import rebuild_worker
from glance_dedup.maintenance import refcounts
from glance_dedup.maintenance import unreadable_recipes
from glance_dedup.repository import image_repository

#: The most counters.
MAX_COUNT = 64

# It ends when the other host does not answer for 45 seconds.
_SSH = ('ssh', '-T', '-oBatchMode=yes', '-oConnectTimeout=30',
        '-oServerAliveInterval=15', '-oServerAliveCountMax=3', '--')
# Length of the end of a counter's output, or of ssh's, that is shown.
_TAIL = 500

Progress = Callable[[int, int, str], None]
#: An image, and the only transaction of it to count, in hex; None: any.
Wanted = tuple[str, str | None]


def local(processes: int) -> tuple[str, ...]:
    """The hosts for so many counters on this one."""
    return ('',) * processes


class _Worker:
    """A counter, as the maintainer sees it. To be closed.

    :ivar host: where it runs
    :ivar peer: the talk with it
    """

    def __init__(self, host: str) -> None:
        self.host = host or os.uname().nodename
        command = [sys.executable, '-P', '-m', rebuild_worker.__name__]
        if host:
            command = [*_SSH, host, shlex.join(command)]
        self._said = tempfile.TemporaryFile()
        ours, theirs = socket.socketpair()
        talk = connection.Connection(ours.detach())
        self.peer = rebuild_worker.Peer(talk, talk)
        try:
            with theirs:
                self._child = subprocess.Popen(
                    command, stdin=theirs.fileno(),
                    stdout=theirs.fileno(), stderr=self._said,
                    # An interrupt is for the maintainer alone.
                    start_new_session=True)
        except BaseException:
            self.peer.close()
            self._said.close()
            raise

    def tell(self, *what: Any, payload: bytes = b'') -> None:
        """Send it a message.

        :raises Broken: it has ended
        """
        try:
            self.peer.tell(*what, payload=payload)
        except OSError as e:
            raise self._ended() from e

    def hear(self) -> tuple[list, bytes]:
        """Wait for a message of it.

        :raises Broken: it has ended, or has failed
        """
        try:
            said, payload = self.peer.hear()
        except (EOFError, OSError) as e:
            raise self._ended() from e
        except rebuild_worker.Broken as e:
            raise self.broken(str(e)) from e
        if said[0] == 'failed':
            raise self.broken(str(said[-1]))
        return said, payload

    def broken(self, why: str) -> rebuild_worker.Broken:
        """Return the error, with the place where something went wrong."""
        return rebuild_worker.Broken(f'host {self.host}: {why}')

    def _ended(self) -> rebuild_worker.Broken:
        # Its error may be on the way.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(1)
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - _TAIL))
        words = ' '.join(self._said.read().decode(errors='replace').split())
        return self.broken('a process that counts has ended'
                           + (f': {words}' if words else ''))

    def close(self) -> None:
        """End it. It changes nothing, so nothing is lost."""
        self.peer.close()
        self._child.kill()
        self._child.wait()
        self._said.close()


class Workers:
    """The counters of one counting, and the partitions. To be closed.

    :param hosts: where to start a counter each; '' is this host
    :param partitions: how many files the runs are spread over
    :raises OSError: they cannot be started, or have no disk
    """

    def __init__(self, repository: image_repository.Repository,
                 hosts: tuple[str, ...], partitions: int) -> None:
        self.partitions = partitions
        self._begin = 'begin', repository.path, partitions
        self._facts = [package_version.version(), repository.repository_id]
        self._stack = contextlib.ExitStack()
        self._workers: list[_Worker] = []
        try:
            # They have no names, so nothing is left of them. /tmp may be
            # memory.
            directory = os.environ.get('TMPDIR') or '/var/tmp'
            self._files = [self._stack.enter_context(
                tempfile.TemporaryFile('a+b', buffering=0, dir=directory))
                for _ in range(partitions)]
            for host in hosts:
                worker = _Worker(host)
                self._stack.callback(worker.close)
                self._workers.append(worker)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the counters, and give the disk back. Idempotent."""
        self._stack.close()

    def append(self, part: int, runs: bytes | bytearray) -> None:
        """Append packed runs to a partition.

        :raises Broken, OSError: the disk is full, or fails
        """
        if self._files[part].write(runs) != len(runs):
            raise rebuild_worker.Broken('the disk of the partitions is full')

    def spread(self, images: list[Wanted],
               done: Callable[[str, Wanted, list], None],
               watch: Callable[[], None]) -> None:
        """Have the runs of all images spread.

        :param done: called with a host, an image, and the result of
            :func:`counter.spread` there
        :param watch: called at least each second; may raise to end it
        :raises Broken: a counter failed
        """
        def answer(worker: _Worker, task: tuple, said: list,
                   payload: bytes) -> bool:
            match said:
                case ['runs', int(part)] if 0 <= part < self.partitions:
                    self.append(part, payload)
                    return False
                case ['begun', *facts]:
                    self._require_same(worker, facts)
                case ['flushed']:
                    pass
                case _:
                    done(worker.host, task[1:], said)
            return True
        # Each takes of the same images, and then sends its remaining runs.
        tasks = (('spread', *wanted) for wanted in images)
        self._run([itertools.chain([self._begin], tasks, [('flush',)])
                   for _ in self._workers], answer, watch)

    def _require_same(self, worker: _Worker, facts: list) -> None:
        if facts != self._facts:
            raise worker.broken(
                f'version and repository are {facts} there and {self._facts} '
                'here: install one version on all hosts, and mount the '
                'repository under the same path')

    def sum(self, take: Callable[[rebuild_worker.Chunk, bytes], None],
            done: Callable[[], None], watch: Callable[[], None]) -> None:
        """Add up the runs of all partitions.

        :param take: called with the key and the counters of a chunk
        :param done: called after each partition
        :param watch: as for :meth:`spread`
        :raises Broken: a counter failed
        """
        def answer(worker: _Worker, task: tuple, said: list,
                   payload: bytes) -> bool:
            match said:
                case ['piece', int(offset)]:
                    worker.tell('piece', payload=os.pread(
                        self._files[task[1]].fileno(), rebuild_worker.PIECE,
                        offset))
                    return False
                case ['counts']:
                    for key, counts in rebuild_worker.unpacked(payload):
                        take(key, counts)
                    return False
            done()
            return True
        tasks = (('sum', part) for part in range(self.partitions))
        self._run([tasks] * len(self._workers), answer, watch)

    def _run(self, tasks: list[Iterator[tuple]],
             answer: Callable[[_Worker, tuple, list, bytes], bool],
             watch: Callable[[], None]) -> None:
        """Give each counter one of its tasks after the other.

        :param answer: called with a counter, its task, and its message;
            returns whether the task is done
        """
        busy: dict[_Worker, tuple] = {}

        def give(worker: _Worker, waiting: Iterator[tuple]) -> None:
            busy.pop(worker, None)
            for task in itertools.islice(waiting, 1):
                worker.tell(*task)
                busy[worker] = task
        waiting = dict(zip(self._workers, tasks, strict=True))
        for worker in self._workers:
            give(worker, waiting[worker])
        while busy:
            watch()
            ready = connection.wait(
                [worker.peer.fileno() for worker in busy], 1.0)
            for worker in [worker for worker in busy
                           if worker.peer.fileno() in ready]:
                if answer(worker, busy[worker], *worker.hear()):
                    give(worker, waiting[worker])


def count(workers: Workers, images: list[Wanted],
          note: Callable[[str, Wanted, list], None],
          look_again: Callable[[list[Wanted], rebuild_worker.Buffers], None],
          take: Callable[[rebuild_worker.Chunk, bytes], None],
          progress: Progress | None) -> None:
    """Read the recipes of images, and add up their runs.

    :param note: called with a host, an image, and the outcome
    :param look_again: called with the images that were gone; spreads the ones
        that it finds. A counter's host may not know of the newest ones yet
    :param take: called with the key and the counters of each chunk that has
        any
    :raises Broken, OSError: nothing of it may be used
    """
    progress = progress or (lambda done, total, what: None)
    gone: list[Wanted] = []
    read = added = 0

    def done(host: str, wanted: Wanted, said: list) -> None:
        nonlocal read
        read += 1
        if said == ['gone']:
            gone.append(wanted)
        else:
            note(host, wanted, said)

    def summed() -> None:
        nonlocal added
        added += 1
    workers.spread(images, done, lambda: progress(
        read, len(images), 'reading images'))
    buffers = rebuild_worker.Buffers(workers.partitions, workers.append)
    look_again(gone, buffers)
    buffers.flush()
    workers.sum(take, summed, lambda: progress(
        added, workers.partitions, 'adding up counts'))


class Counting:
    """Counts images into a new catalog, which has no counts yet.

    :param unreadable: gets the recipes that cannot be read
    :param most: bytes; a batch that has more is written
    """

    def __init__(self, catalog: refcounts.Accounts,
                 engine: _engine.Maintenance,
                 unreadable: unreadable_recipes.Unreadable, most: int,
                 progress: Progress | None) -> None:
        self._catalog = catalog
        self._engine = engine
        self._unreadable = unreadable
        self._most = most
        self._progress = progress
        self._batch = catalog.batch()

    def run(self, repository: image_repository.Repository,
            image_ids: list[str], hosts: tuple[str, ...]) -> None:
        """Count these images by a counter on each of these hosts.

        :raises Broken: the catalog is good for nothing
        """
        partitions = rebuild_worker.partitions_for(len(self._engine.groups()))
        try:
            with contextlib.closing(Workers(
                    repository, hosts, partitions)) as workers:
                count(workers, [(image_id, None) for image_id in image_ids],
                      self._note, self._look_again, self._take,
                      self._progress)
        except OSError as e:
            raise rebuild_worker.Broken(f'processes cannot count: {e}') from e
        self._write()

    def _note(self, host: str, wanted: Wanted, said: list) -> None:
        image_id, _ = wanted
        if said[0] == 'unreadable':
            self._unreadable.note(*said[1:])
        elif said[0] == 'counted':
            txid = bytes.fromhex(said[1])
            if self._catalog.counted(txid, self._batch):
                raise rebuild_worker.Broken(
                    f'image {image_id} is a copy of another recipe file')
            self._catalog.record(self._batch, txid, said[2])
            self._unreadable.note_counted(image_id)
            self._grown()

    def _look_again(self, gone: list[Wanted],
                    buffers: rebuild_worker.Buffers) -> None:
        for wanted in gone:
            self._note('', wanted, rebuild_worker.spread(
                self._engine, *wanted, buffers))

    def _take(self, key: rebuild_worker.Chunk, counts: bytes) -> None:
        self._catalog.record_counts(self._batch, *key, counts)
        self._grown()

    def _grown(self) -> None:
        if self._batch.size > self._most:
            self._write()

    def _write(self) -> None:
        # Synced: LevelDB may lose a batch that is not synced, and keep later
        # ones that are.
        self._catalog.write(self._batch, sync=True)
        self._batch.clear()
