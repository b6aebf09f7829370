# SPDX-License-Identifier: Apache-2.0

"""Computes the catalog's counts by several processes (``batch.rst``).

The maintainer starts *workers*. In the first pass, each takes one image after
the other, and appends the runs of its recipe to the files of the partitions
that the runs' groups belong to. In the second pass, each takes one partition
after the other, adds its runs up, and gives the maintainer the counts. A
worker takes no lock and changes nothing in the repository.

The maintainer and a worker send each other tuples over a socket. A worker that
ends, or finds what it did not expect, makes the whole counting fail:
:class:`Broken`. A worker whose maintainer ends finds the socket closed, and
ends, too.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import itertools
from multiprocessing import connection
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.maintenance import accounts
from glance_dedup.maintenance import addresses
from glance_dedup.maintenance import recipes
from glance_dedup.maintenance import records
from glance_dedup.maintenance import unreadable as unreadable_module
from glance_dedup.repository import repository as repository_module

#: The most workers.
MOST = 64

# Groups whose counts take 16 MiB, and as many counters in memory.
_GROUPS = 128
_CHUNKS = 4096
_MOST_PARTITIONS = 256
# Bytes of all buffers of a worker, and of what it reads and sends at once.
_BUFFERS = 4 << 20
_PIECE = addresses.RUN_BYTES << 16
_SENT = 128     # chunks of counters

_Chunk = tuple[int, int]
Progress = Callable[[int, int, str], None]


class Broken(Exception):
    """The counting has failed, so that nothing of it may be used."""


def partitions_for(groups: int) -> int:
    """Into how many partitions to divide so many groups."""
    return min(max(1, -(-groups // _GROUPS)), _MOST_PARTITIONS)


def partition_of(group: int, partitions: int) -> int:
    """The partition of a group."""
    return group // _GROUPS % partitions


# -- workers ------------------------------------------------------------------

class _Buffers:
    """The runs that a worker has for each partition's file."""

    def __init__(self, files: list[int]) -> None:
        self._files = files
        self._runs = [bytearray() for _ in files]
        # A write of whole runs, so that workers can append to one file.
        self._most = _BUFFERS // len(files)

    def add(self, runs: bytes) -> None:
        """Divide the runs among the partitions."""
        begin = at = part = 0
        for group, _, _ in addresses.runs_in(runs):
            found = partition_of(group, len(self._files))
            if found != part:
                self._append(part, runs[begin:at])
                begin, part = at, found
            at += addresses.RUN_BYTES
        self._append(part, runs[begin:at])

    def _append(self, part: int, runs: bytes) -> None:
        self._runs[part] += runs
        if len(self._runs[part]) >= self._most:
            self._write(part)

    def _write(self, part: int) -> None:
        runs, self._runs[part] = self._runs[part], bytearray()
        if os.write(self._files[part], runs) != len(runs):
            raise Broken('the disk of the partitions is full')

    def flush(self) -> None:
        """Write what is left."""
        for part, runs in enumerate(self._runs):
            if runs:
                self._write(part)


def _spread(engine: _engine.Maintenance, image_id: str,
            buffers: _Buffers) -> tuple:
    """Append the runs of an image; returns what became of it."""
    try:
        recipe = engine.open_recipe(image_id)
    except exceptions.ImageNotFound:
        return 'gone',
    except exceptions.UNREADABLE as e:
        return 'unreadable', f'images/{image_id}', str(e)
    with contextlib.closing(recipe):
        if not recipe.complete:
            return 'unreadable', recipe.name, recipe.error
        header, extents = recipe.header(), recipes.Extents(recipe)
        try:
            # All of it: a recipe is counted whole, or not at all.
            blocks = recipes.measure(recipe)
        except recipes.RecipeError as e:
            return 'unreadable', recipe.name, str(e)
        for page in range(extents.pages):
            buffers.add(extents.runs(page))
        return ('counted', header['transaction_id'],
                accounts.facts_of(header, blocks))


def _pieces(file: int) -> Iterator[bytes]:
    for offset in itertools.count(0, _PIECE):
        piece = os.pread(file, _PIECE, offset)
        if piece:
            yield piece
        if len(piece) < _PIECE:
            return


def summed(pieces: Callable[[], Iterator[bytes]], most: int = _CHUNKS
           ) -> Iterator[tuple[_Chunk, bytes]]:
    """The counts of all runs: (group, chunk) and its counters, in order.

    If there are more than `most` chunks of counters, the runs are read
    several times.

    :param pieces: reads packed runs, from the first one on
    """
    last = -1, 0
    more = True
    while more:
        counters: dict[_Chunk, bytearray] = {}
        more = False
        end: _Chunk | None = None       # later chunks are for the next time
        for piece in pieces():
            for key, runs in accounts.by_chunk(piece).items():
                if key <= last:
                    continue
                if end is not None and key >= end:
                    more = True
                    continue
                counts = counters.setdefault(
                    key, bytearray(records.CHUNK_BYTES))
                _engine.add_runs(counts, *key, runs, 1)
                if len(counters) > most:
                    later = sorted(counters)[-(-most // 2):]
                    end, more = later[0], True
                    for key in later:
                        del counters[key]
        for key in sorted(counters):
            last = key
            yield key, bytes(counters[key])


def _work(peer: connection.Connection) -> None:
    """A worker's life: it ends when the maintainer closes the socket."""
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            path, files = peer.recv()
            with repository_module.Repository(path, threads=0) as repository:
                engine = _engine.Maintenance(repository.handle())
                with contextlib.closing(engine):
                    _obey(peer, engine, files)
        except ConnectionError:
            raise
        except (Broken, recipes.RecipeError, exceptions.RepositoryError,
                OSError) as e:
            peer.send(('failed', str(e)))


def _obey(peer: connection.Connection, engine: _engine.Maintenance,
          files: list[int]) -> None:
    """Do what the maintainer says, until it closes the socket."""
    buffers = _Buffers(files)
    while True:
        what, which = peer.recv()
        if what == 'spread':
            peer.send(_spread(engine, which, buffers))
        elif what == 'flush':
            buffers.flush()
            peer.send(('flushed',))
        else:
            _sum(peer, files[which])


def _sum(peer: connection.Connection, file: int) -> None:
    counts = summed(lambda: _pieces(file))
    while some := list(itertools.islice(counts, _SENT)):
        peer.send(('counts', some))
    peer.send(('summed',))


# -- the maintainer -----------------------------------------------------------

class Workers:
    """The workers of one counting. To be closed.

    :param path: the repository's directory
    :param number: how many
    :param partitions: how many files the runs are spread over
    :raises OSError: they cannot be started, or have no disk
    """

    def __init__(self, path: str, number: int, partitions: int) -> None:
        self._number = number
        self._partitions = partitions
        self._stack = contextlib.ExitStack()
        self._peers: list[connection.Connection] = []
        try:
            # They have no names, so nothing is left of them. /tmp may be
            # memory.
            directory = os.environ.get('TMPDIR') or '/var/tmp'
            files = [self._stack.enter_context(
                tempfile.TemporaryFile('a+b', buffering=0, dir=directory))
                for _ in range(partitions)]
            numbers = [file.fileno() for file in files]
            for _ in range(number):
                self._start(path, numbers)
        except BaseException:
            self.close()
            raise

    def _start(self, path: str, files: list[int]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            peer = connection.Connection(ours.detach())
            self._peers.append(peer)
            child = subprocess.Popen(
                [sys.executable, '-P', '-m', __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                # An interrupt is for the maintainer alone.
                start_new_session=True, pass_fds=[theirs.fileno(), *files])
        self._stack.callback(_end, child)
        peer.send((path, files))

    def close(self) -> None:
        """End the workers, and give their disk back. Idempotent."""
        for peer in self._peers:
            peer.close()
        self._stack.close()

    def spread(self, image_ids: list[str],
               done: Callable[[str, tuple], None],
               watch: Callable[[], None]) -> None:
        """Have the runs of all images spread.

        :param done: called with an image's id, and what became of it: 'gone',
            'unreadable' (file, why) or 'counted' (transaction id, facts)
        :param watch: called at least each second; may raise to end it
        :raises Broken: a worker failed
        """
        def answer(image_id: str, said: tuple) -> bool:
            done(image_id, said)
            return True
        self._run([('spread', image_id) for image_id in image_ids], answer,
                  watch)
        for peer in self._peers:
            self._ask(peer, ('flush', None))
        for peer in self._peers:
            self._hear(peer)

    def sum(self, take: Callable[[_Chunk, bytes], None],
            done: Callable[[], None], watch: Callable[[], None]) -> None:
        """Add up the runs of all partitions.

        :param take: called with the key and the counters of a chunk
        :param done: called after each partition
        :param watch: as for :meth:`spread`
        :raises Broken: a worker failed
        """
        def answer(part: int, said: tuple) -> bool:
            if said[0] == 'summed':
                done()
                return True
            for key, counts in said[1]:
                take(key, counts)
            return False
        self._run([('sum', part) for part in range(self._partitions)], answer,
                  watch)

    def _run(self, tasks: list[tuple[str, Any]],
             answer: Callable[[Any, tuple], bool],
             watch: Callable[[], None]) -> None:
        """Give each worker one task after the other, until all are done.

        :param answer: called with what the task is about, and what the worker
            says; returns whether the task is done
        """
        waiting = iter(tasks)
        busy: dict[connection.Connection, tuple[str, Any]] = {}

        def give(peer: connection.Connection) -> None:
            busy.pop(peer, None)
            for task in itertools.islice(waiting, 1):
                self._ask(peer, task)
                busy[peer] = task
        for peer in self._peers:
            give(peer)
        while busy:
            watch()
            ready = connection.wait([*busy], 1.0)
            for peer in [peer for peer in busy if peer in ready]:
                if answer(busy[peer][1], self._hear(peer)):
                    give(peer)

    @staticmethod
    def _ask(peer: connection.Connection, what: tuple) -> None:
        try:
            peer.send(what)
        except OSError as e:
            raise Broken('a process that counts has ended') from e

    @staticmethod
    def _hear(peer: connection.Connection) -> tuple:
        try:
            said = peer.recv()
        except (EOFError, OSError) as e:
            raise Broken('a process that counts has ended') from e
        if said[0] == 'failed':
            raise Broken(said[1])
        return said


def _end(child: subprocess.Popen) -> None:
    # It changes nothing, so nothing is lost.
    child.kill()
    child.wait()


class Counting:
    """Counts images into a new catalog, which has no counts yet.

    :param engine: only to list groups
    :param unreadable: gets the recipes that cannot be read
    :param most: bytes; a batch that has more is written
    """

    def __init__(self, catalog: accounts.Accounts,
                 engine: _engine.Maintenance,
                 unreadable: unreadable_module.Unreadable, most: int,
                 progress: Progress | None) -> None:
        self._catalog = catalog
        self._partitions = partitions_for(len(engine.groups()))
        self._unreadable = unreadable
        self._most = most
        self._progress = progress or (lambda done, total, what: None)
        self._batch = catalog.batch()

    def run(self, path: str, image_ids: list[str], number: int) -> None:
        """Count these images by so many processes.

        :param path: the repository's
        :raises Broken: the catalog is good for nothing
        """
        try:
            with contextlib.closing(Workers(
                    path, number, self._partitions)) as workers:
                self._spread(workers, image_ids)
                self._sum(workers)
        except OSError as e:
            raise Broken(f'processes cannot be started: {e}') from e
        self._write()

    def _spread(self, workers: Workers, image_ids: list[str]) -> None:
        finished = 0

        def watch() -> None:
            self._progress(finished, len(image_ids), 'reading images')

        def done(image_id: str, said: tuple) -> None:
            nonlocal finished
            finished += 1
            self._note(image_id, said)
        workers.spread(image_ids, done, watch)

    def _note(self, image_id: str, said: tuple) -> None:
        if said[0] == 'unreadable':
            self._unreadable.note(*said[1:])
        elif said[0] == 'counted':
            txid, facts = said[1:]
            if self._catalog.counted(txid, self._batch):
                raise Broken(
                    f'image {image_id} is a copy of another recipe file')
            self._catalog.record(self._batch, txid, facts)
            self._unreadable.note_counted(image_id)
            self._grown()

    def _sum(self, workers: Workers) -> None:
        finished = 0

        def watch() -> None:
            self._progress(finished, self._partitions, 'adding up counts')

        def done() -> None:
            nonlocal finished
            finished += 1

        def take(key: _Chunk, counts: bytes) -> None:
            self._catalog.record_counts(self._batch, *key, counts)
            self._grown()
        workers.sum(take, done, watch)

    def _grown(self) -> None:
        if self._batch.size > self._most:
            self._write()

    def _write(self) -> None:
        # Synced: LevelDB may lose a batch that is not synced, and keep later
        # ones that are.
        self._catalog.write(self._batch, sync=True)
        self._batch.clear()


if __name__ == '__main__':
    _work(connection.Connection(int(sys.argv[1])))
