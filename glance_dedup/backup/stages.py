# SPDX-License-Identifier: Apache-2.0

"""The stages of a round, as one rank passes them (``batch.rst``, "Stages")."""

import array
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import itertools
import logging
import struct
import time
from typing import Any

from glance_dedup import _engine
from glance_dedup.backup import earlier_rounds
from glance_dedup.backup import rank_exchange
from glance_dedup.backup import rank_spool
from glance_dedup.backup import views
from glance_dedup.backup import work_split
from glance_dedup.base import exceptions
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages

_LOG = logging.getLogger(__name__)

_REQUESTER_BITS = 28
_MAX_BLOCKS = 1 << _REQUESTER_BITS
_ZEROS = bytes(32)
_BLOCK = struct.Struct('<32sI')
_RECORD = struct.Struct(f'{rank_spool.RECORD}s')
# Blocks that are looked up, and appended, together.
_LOT = 4096
# Bytes of new blocks, and blocks of any kind, that wait for being stored.
_NEW_BYTES = 1 << 18
_NEW_BLOCKS = 1 << 16
# Records that are added to the index together, and how often, with a pause of
# so many seconds, the lock of its runs is requested.
_RUN = 1 << 18
_LOCK_TRIES = 100
_LOCK_PAUSE = 0.1
# Advice if the exact index is of no use.
_ANEW = ('blocks that the repository has may be stored once more, and take '
         'space until the next merge. Turn merging on in dedupd, or run '
         'glance-dedup task merge; it makes the index, and mends it')


@dataclasses.dataclass
class Task:
    """A rank's work on one view in a round."""

    view: views.View
    source: str
    """The name of the source: a disk's or a server's."""
    backup_id: str
    previous: openimages.Image | None
    """The backup to which clean segments refer."""
    clean: bytearray = dataclasses.field(default_factory=bytearray)
    """For each segment 1: it is clean."""
    blocks: int = 0
    """Number of scanned blocks."""
    error: str = ''
    """Why it was given up."""
    read: int = 0
    """Bytes read from the view."""
    new: int = 0
    packed: int = 0
    """Plain bytes that stage 2b stored, and their size on the disk."""

    def dirty(self) -> Iterator[int]:
        """Return the dirty segments among the scanned ones."""
        return (index for index, clean in enumerate(self.clean) if not clean)


def places_at(image: openimages.Image, offset: int, lengths: Sequence[int],
              block_size: int) -> array.array:
    """Return an image's addresses from an offset, if blocks have one size.

    :param lengths: of the blocks that are compared with it
    :returns: an address for each; 0: the image has none there
    """
    places = array.array('Q')
    extents = image.extents(offset) if offset < image.size else iter(())
    extent = next(extents, None)
    for length in lengths:
        while extent is not None and extent.offset + extent.length <= offset:
            extent = next(extents, None)
        at = 0 if extent is None else offset - extent.offset
        places.append(
            0 if extent is None or extent.kind != 'blocks' or at % block_size
            else (extent.group << 15) + extent.slot + at // block_size)
        offset += length
    return places


class Blocks:
    """The scanned blocks of all views, in order, with their addresses.

    :param name: the file of the addresses
    """

    def __init__(self, spool: rank_spool.Spool, name: str) -> None:
        self._items = self._read(spool, name)

    @staticmethod
    def _read(spool: rank_spool.Spool, name: str
              ) -> Iterator[tuple[bytes, int, int]]:
        for scanned, places in itertools.zip_longest(
                spool.pieces('blocks', rank_spool.SCANNED, _LOT),
                spool.pieces(name, 8, _LOT), fillvalue=b''):
            addresses = array.array('Q', places)
            for (fingerprint, length), address in zip(
                    _BLOCK.iter_unpack(scanned), addresses, strict=True):
                yield fingerprint, length, address

    def segment(self, length: int) -> Iterator[tuple[bytes, int, int]]:
        """Fingerprint, length and address of each block of the next segment.

        :raises DamagedError: the spool does not have these blocks
        """
        while length > 0:
            item = next(self._items, None)
            if item is None or item[1] > length:
                raise exceptions.DamagedError(
                    'the spool does not have the blocks that were scanned')
            length -= item[1]
            yield item

    def skip(self, blocks: int) -> None:
        """Pass over the blocks of a view."""
        for _ in itertools.islice(self._items, blocks):
            pass


def is_new(fingerprint: bytes, address: int) -> bool:
    """Return whether a scanned block has to be read and stored."""
    return address == 0 and fingerprint != _ZEROS


def span_of_new(blocks: list[tuple[bytes, int, int]]) -> tuple[int, int]:
    """From where to where in a segment new blocks lie."""
    start = end = offset = 0
    for fingerprint, length, address in blocks:
        if is_new(fingerprint, address):
            start, end = start if end else offset, offset + length
        offset += length
    return start, end


def each_key_once(records: bytes) -> bytes:
    """The first record of each key, of sorted ones, as the index wants them.

    A partition that was joined in pieces may have a new block twice, at one
    address or at two in any order.
    """
    found, before = bytearray(), b''
    for record, in _RECORD.iter_unpack(records):
        if record[:8] != before:
            found += record
            before = record[:8]
    return bytes(found)


class Stored:
    """Blocks that are read from views and stored, and the addresses of all.

    :param note: called with the addresses of all blocks up to here, in order,
        and a reference for each that was stored
    """

    def __init__(self, transaction: openimages.Transaction,
                 note: Callable[[bytes, bytes], None]) -> None:
        self._transaction = transaction
        self._note = note
        self._data = bytearray()
        self._lengths = array.array('I')
        self._keys: list[bytes] = []
        self._places = array.array('Q')
        self._new: list[int] = []

    def add_segment(self, blocks: list[tuple[bytes, int, int]],
                    data: memoryview, start: int) -> None:
        """Take a segment's blocks.

        :param data: bytes of the segment from `start` on, with all blocks
            whose address is 0, except those of zeros
        """
        offset = -start
        for fingerprint, length, address in blocks:
            if is_new(fingerprint, address):
                self._data += data[offset:offset + length]
                self._keys.append(fingerprint[:8])
                self._lengths.append(length)
                self._new.append(len(self._places))
            self._places.append(address)
            offset += length
            if (len(self._data) >= _NEW_BYTES
                    or len(self._places) >= _NEW_BLOCKS):
                self.flush()

    def flush(self) -> None:
        """Store the waiting blocks."""
        addresses = array.array('Q')
        if self._new:
            addresses.frombytes(self._transaction.write_blocks(
                self._data, self._lengths.tobytes()))
        references = bytearray()
        for place, key, address in zip(self._new, self._keys, addresses,
                                       strict=True):
            self._places[place] = address and address | rank_spool.OWN
            if address:
                references += key + address.to_bytes(5, 'little')
        self._note(self._places.tobytes(), bytes(references))
        self._data = bytearray()
        del self._lengths[:], self._places[:], self._keys[:], self._new[:]


class Round:
    """A rank's part in a round.

    :param partitions: of each rank
    :param earlier: references of earlier rounds; None: there are none
    :param progress: called with a stage and the bytes of the views that are
        done
    """

    def __init__(self, repository: image_repository.Repository,
                 ranks: rank_exchange.Ranks, spool: rank_spool.Spool,
                 tasks: list[Task], partitions: int, project: str,
                 scope: bytes,
                 earlier: earlier_rounds.EarlierRounds | None,
                 progress: Callable[[str, int], None]) -> None:
        self._repository = repository
        self._engine = repository.handle()
        self._ranks = ranks
        self._spool = spool
        self._tasks = tasks
        self._partitions = partitions
        self._project = project
        self._scope = scope
        self._earlier = earlier
        self._progress = progress
        self._buffer = memoryview(bytearray(views.SEGMENT))
        self._first = ranks.rank << _REQUESTER_BITS

    @property
    def _blocks(self) -> int:
        return sum(task.blocks for task in self._tasks)

    def _attempt(self, task: Task, step: Callable[[Task], None]) -> None:
        """Do something for a view; if that fails, give the view up (B5)."""
        if task.error:
            return
        try:
            step(task)
        except views.SourceError as e:
            task.error = str(e)

    def _check(self) -> None:
        """Give up views that have changed (B2)."""
        for task in self._tasks:
            self._attempt(task, lambda task: task.view.check())

    def _give_up(self, why: object) -> None:
        """Give up all views of this rank; it goes on for the others."""
        for task in self._tasks:
            task.error = task.error or str(why)

    def _require_spool(self) -> None:
        """Check that the spool still keeps its records.

        :raises SourceError: it does not
        """
        if self._spool.lost:
            raise views.SourceError(self._spool.lost)

    def _end_stage(self, *kinds: str) -> None:
        """Write these files; without them, this rank's views are given up."""
        for kind in kinds:
            self._spool.end(kind)
        if self._spool.lost:
            self._give_up(self._spool.lost)

    # -- 1a: scan -----------------------------------------------------------

    def scan(self) -> None:
        """Stage 1a."""
        self._spool.clear()
        done = 0
        with contextlib.ExitStack() as stack:
            exchange = stack.enter_context(
                self._ranks.exchange(b'scan', self._take_requests))
            look = self._begin_look(stack)
            for task in self._tasks:
                self._attempt(task, functools.partial(
                    self._scan_view, exchange=exchange, look=look, done=done))
                done += task.view.size
        self._end_stage('blocks', 'requests', 'same')

    def _begin_look(self, stack: contextlib.ExitStack
                    ) -> openimages.Transaction | None:
        """Return a transaction to check addresses in; None: it failed."""
        if self._repository.parameters.cuts[1] or not any(
                task.previous for task in self._tasks):
            return None
        try:
            return stack.enter_context(self._begin(self._tasks[0].backup_id))
        except exceptions.RepositoryError:
            return None     # stage 2b reports it, if it has to store

    def _scan_view(self, task: Task, exchange: rank_exchange.Exchange,
                   look: openimages.Transaction | None, done: int) -> None:
        before = self._blocks
        for index in range(task.view.segments):
            length = task.view.length(index)
            found = task.view.scan(index, self._buffer)
            task.clean.append(found is views.Found.CLEAN)
            if found is views.Found.ZEROS:
                self._note_scanned(task, _BLOCK.pack(_ZEROS, length))
            elif found is views.Found.DATA:
                task.read += length
                scanned = self._engine.scan(self._buffer[:length], self._scope)
                number = before + task.blocks
                work_split.send(self._ranks, exchange, _engine.requests_of(
                    self._without_same(task, look, index, scanned, number),
                    self._first + number))
                self._note_scanned(task, scanned)
            self._require_numbers(before + task.blocks)
            exchange.poll()
            self._require_spool()
            self._progress('scan', done + index * views.SEGMENT + length)
        task.view.end_scan()

    def _without_same(self, task: Task, look: openimages.Transaction | None,
                      index: int, scanned: bytes, number: int) -> bytes:
        """Note the blocks that are as in the previous backup.

        Most of a dirty segment's blocks are. They take no request to a rank.

        :returns: the scanned part, with zeros as fingerprints
        """
        if look is None or task.previous is None:
            return scanned
        fingerprints, lengths = zip(*_BLOCK.iter_unpack(scanned), strict=True)
        places = array.array('Q', look.find_at(
            b''.join(fingerprints), array.array('I', lengths).tobytes(),
            places_at(task.previous, index * views.SEGMENT, lengths,
                      self._repository.parameters.block_size).tobytes()))
        left, answers = bytearray(scanned), bytearray()
        for at, place in enumerate(places):
            if place:
                start = at * rank_spool.SCANNED
                left[start:start + len(_ZEROS)] = _ZEROS
                answers += rank_spool.answer(self._first + number + at,
                                             place)
        self._spool.sort_answers('same', self._ranks.rank, bytes(answers))
        return bytes(left)

    def _note_scanned(self, task: Task, scanned: bytes) -> None:
        self._spool.append('blocks', scanned)
        task.blocks += len(scanned) // rank_spool.SCANNED

    def _require_numbers(self, blocks: int) -> None:
        if blocks > _MAX_BLOCKS:
            raise exceptions.InvalidParameter(
                f'rank {self._ranks.rank} has more than {_MAX_BLOCKS} blocks '
                'in one round: back up fewer servers in a round')

    def _take(self, kind: str, records: bytes) -> None:
        """File records by this rank's partitions."""
        for number, part in work_split.by_partition(
                self._ranks, self._partitions, records):
            self._spool.append(f'{kind}-{number}', part)

    def _take_requests(self, _source: int, records: bytes) -> None:
        self._take('requests', records)

    # -- 1b and 2a: detect and answer ----------------------------------------

    def answer(self) -> None:
        """Stages 1b and 2a."""
        for kind in ('waiting', 'answers', 'found'):
            self._spool.drop_all(kind)
        index, unread = self._open_index(), 0
        self._tell_of_index(index)
        with self._ranks.exchange(b'answer', self._take_answers) as exchange:
            for number in range(self._partitions):
                for requests in self._spool.pieces(f'requests-{number}',
                                                   rank_spool.RECORD):
                    unread += self._answer_piece(index, number, requests,
                                                 exchange)
                    exchange.poll()
        if unread:
            _LOG.warning('%d files of the exact index of the repository '
                         'could not be read, so %s', unread, _ANEW)
        if index is not None:
            index.close()
        self._spool.place_answers(('same', 'answers'), 'found', self._blocks)
        self._spool.drop_all('answers')
        self._end_stage('waiting')

    def _open_index(self) -> _engine.Index | None:
        """The exact index; None: there is none, and all blocks are new."""
        try:
            return _engine.Index(self._engine, None)
        except exceptions.ImageNotFound:
            return None

    def _tell_of_index(self, index: _engine.Index | None) -> None:
        """Warn, once for all ranks, if blocks cannot be looked up."""
        if self._ranks.rank == 0 and index is None:
            _LOG.warning('the repository has no exact index, so %s', _ANEW)
        elif self._ranks.rank == 0 and index is not None and (
                not index.shards()[1]):
            _LOG.warning('the exact index of the repository is not complete, '
                         'so %s', _ANEW)

    def _answer_piece(self, index: _engine.Index | None, number: int,
                      requests: bytes, exchange: rank_exchange.Exchange
                      ) -> int:
        """Answer requests; returns how many files were of no use."""
        unread = 0
        if self._earlier is not None:
            for references in self._earlier.pieces(number, self._partitions):
                answers, requests = _engine.resolve_requests(
                    requests, references)
                self._send_answers(exchange, answers)
                exchange.poll()
        if index is None:
            answers, waiting = _engine.answer_requests(requests)
        else:
            answers, waiting, unread = index.answer(requests)
        if waiting:
            self._spool.append(f'waiting-{number}', waiting)
        self._send_answers(exchange, answers)
        return unread

    def _send_answers(self, exchange: rank_exchange.Exchange,
                      answers: bytes) -> None:
        for rank, part in enumerate(_engine.split_records(
                answers, 1 << 12, 0, self._ranks.size)):
            if part:
                exchange.send(rank, part)

    def _take_answers(self, _source: int, answers: bytes) -> None:
        self._spool.sort_answers('answers', self._ranks.rank, answers)

    # -- 2b: store ----------------------------------------------------------

    def store(self) -> None:
        """Stage 2b."""
        for kind in ('references', 'known', 'stored', 'again'):
            self._spool.drop_all(kind)
        if not self._tasks:
            return
        try:
            self._store_all()
        except (exceptions.NoSpaceError, exceptions.ImageExists,
                views.SourceError) as e:
            self._give_up(e)
        self._check()
        self._end_stage('stored', 'references')

    def _store_all(self) -> None:
        blocks, done, before = Blocks(self._spool, 'found'), 0, (0, 0)
        self._require_spool()
        transaction = self._begin(self._tasks[0].backup_id)
        try:
            stored = Stored(transaction, self._note_stored)
            for task in self._tasks:
                self._store_view(task, blocks, stored, done)
                done += task.view.size
                stored.flush()
                now = transaction.keep()
                task.new, task.packed = now[0] - before[0], now[1] - before[1]
                before = now
        finally:
            transaction.abort()     # the kept blocks stay

    def _begin(self, backup_id: str) -> openimages.Transaction:
        return self._repository.begin(backup_id, self._project, self._scope)

    def _note_stored(self, addresses: bytes, references: bytes) -> None:
        self._spool.append('stored', addresses)
        self._spool.append('references', references)

    def _store_view(self, task: Task, blocks: Blocks, stored: Stored,
                    done: int) -> None:
        for index in task.dirty():
            length = task.view.length(index)
            found = list(blocks.segment(length))
            start, end = span_of_new(found)
            data = self._buffer[:end - start]
            self._attempt(task, lambda task: task.view.readinto(
                data, index * views.SEGMENT + start))
            if task.error:      # the contents of its blocks are unknown
                found = [(_ZEROS, length, place)
                         for _, length, place in found]
            task.read += end - start
            stored.add_segment(found, data, start)
            self._require_spool()
            self._progress('store', done + index * views.SEGMENT + length)

    # -- 3a, 3b and 4a: refer and resolve ------------------------------------

    def resolve(self) -> None:
        """Stages 3a, 3b and 4a."""
        self._spool.drop_all('known')
        self._spool.drop_all('again')
        with self._ranks.exchange(b'refer', self._take_references
                                  ) as exchange:
            for references in self._spool.pieces('references',
                                                 rank_spool.RECORD):
                work_split.send(self._ranks, exchange, references)
        self._spool.end('known')
        with self._ranks.exchange(b'resolve', self._take_again) as exchange:
            for number in range(self._partitions):
                self._resolve_partition(number, exchange)
        self._spool.place_answers(('again',), 'stored', self._blocks)
        self._spool.drop_all('again')
        self._end_stage('known')
        self._add_to_index()

    def _take_references(self, _source: int, references: bytes) -> None:
        self._take('known', references)

    def _take_again(self, _source: int, answers: bytes) -> None:
        self._spool.sort_answers('again', self._ranks.rank, answers)

    def _resolve_partition(self, number: int,
                           exchange: rank_exchange.Exchange) -> None:
        for waiting in self._spool.pieces(f'waiting-{number}',
                                          rank_spool.RECORD):
            for references in self._spool.pieces(f'known-{number}',
                                                 rank_spool.RECORD,
                                                 earlier_rounds.PIECE):
                answers, waiting = _engine.resolve_requests(waiting,
                                                            references)
                self._send_answers(exchange, answers)
            exchange.poll()

    def retain_references(self, round_: int) -> None:
        """Retain the references of new blocks for the run's later rounds."""
        if self._earlier is not None:
            self._earlier.retain(self._spool, 'known', round_,
                                 self._partitions)

    def _add_to_index(self) -> None:
        """Add the new blocks to the index, for other runs and uploads.

        The index is hints, so nothing is lost if this cannot be done now.
        """
        index = self._open_index()
        if index is None:
            return
        try:
            if not self._lock(index):
                return
            for number in range(self._partitions):
                for references in self._spool.pieces(
                        f'known-{number}', rank_spool.RECORD, _RUN):
                    index.add(each_key_once(_engine.index_sort(references)),
                              False)
        except exceptions.RepositoryError as e:
            _LOG.warning('the new blocks are not in the exact index yet, so '
                         'other backups store them again until the next '
                         'merge: %s', e)
        finally:
            index.close()

    @staticmethod
    def _lock(index: _engine.Index) -> bool:
        for _ in range(_LOCK_TRIES):
            if index.lock():
                return True
            time.sleep(_LOCK_PAUSE)
        return False

    # -- 4b: finish -----------------------------------------------------------

    def finish(self, committed: Callable[[Task, openimages.ImageStat], None]
               ) -> None:
        """Stage 4b.

        :param committed: called with each backup that exists now
        """
        blocks, done = Blocks(self._spool, 'stored'), 0
        for task in self._tasks:
            if task.error:
                blocks.skip(task.blocks)
            else:
                self._commit(task, blocks, done, committed)
            done += task.view.size

    def _commit(self, task: Task, blocks: Blocks, done: int,
                committed: Callable[[Task, openimages.ImageStat], None]
                ) -> None:
        try:
            with Recipe(self._begin(task.backup_id), task,
                        self._buffer) as recipe:
                for index in range(len(task.clean)):
                    recipe.add_segment(index, None if task.clean[index] else
                                       blocks.segment(task.view.length(index)))
                    self._progress('finish', done + index * views.SEGMENT)
                recipe.flush()
                task.view.check()                               # B2
                committed(task, recipe.commit())
        except exceptions.RepositoryError as e:
            task.error = str(e)


class Recipe:
    """A backup's recipe, put together in order from addresses (B1)."""

    def __init__(self, transaction: openimages.Transaction, task: Task,
                 buffer: memoryview) -> None:
        self._transaction = transaction
        self._task = task
        self._buffer = buffer
        self._clean: list[int] = []     # segments in a row that wait
        self._lot: list[tuple[bytes, int, int]] = []
        self._start = 0                 # where the lot begins
        self._own = 0                   # bytes that stage 2b stored for this

    def __enter__(self) -> 'Recipe':
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._transaction.abort()

    def add_segment(self, index: int,
                    blocks: Iterator[tuple[bytes, int, int]] | None) -> None:
        """Append a segment; None: it is clean."""
        if blocks is None:
            self._flush_lot()
            self._clean.append(index)
            return
        self._flush_clean()
        if not self._lot:
            self._start = index * views.SEGMENT
        self._lot.extend(blocks)
        if len(self._lot) >= _LOT:
            self._flush_lot()

    def flush(self) -> None:
        """Append the waiting blocks."""
        self._flush_clean()
        self._flush_lot()

    def commit(self) -> openimages.ImageStat:
        """Make the backup exist."""
        own = min(self._own, self._task.new)
        if own:
            self._transaction.credit(
                own, self._task.packed * own // self._task.new)
        return self._transaction.commit()

    def _flush_clean(self) -> None:
        if not self._clean:
            return
        if self._task.previous is None:
            raise exceptions.DamagedError(
                f'segments of {self._task.view.name} are said to be as in a '
                'backup that is not open')
        last = self._clean[-1]
        self._transaction.add_runs(
            self._task.previous, self._clean[0] * views.SEGMENT,
            last * views.SEGMENT + self._task.view.length(last))
        self._clean.clear()

    def _flush_lot(self) -> None:
        fingerprints = b''.join(item[0] for item in self._lot)
        lengths = array.array('I', [item[1] for item in self._lot])
        told = array.array('Q', [
            0 if address == rank_spool.WAIT or fingerprint == _ZEROS
            else address & ~rank_spool.OWN
            for fingerprint, _, address in self._lot])
        places = array.array('Q', self._transaction.find_at(
            fingerprints, lengths.tobytes(), told.tobytes()))
        self._own += sum(
            length for (_, length, address), place in zip(
                self._lot, places, strict=True)
            if place and address & rank_spool.OWN)
        at, offset = 0, self._start
        for kind, run in itertools.groupby(
                zip(self._lot, places, strict=True), _kind_of):
            count, size = _measure(run)
            self._append(kind, fingerprints[at * 32:(at + count) * 32],
                         lengths[at:at + count], places[at:at + count],
                         offset, size)
            at, offset = at + count, offset + size
        self._start = offset
        self._lot.clear()

    def _append(self, kind: str, fingerprints: bytes, lengths: array.array,
                places: array.array, offset: int, size: int) -> None:
        """Append blocks of one kind, which lie in a row."""
        if kind == 'zeros':
            self._transaction.add_zeros(size)
        elif kind == 'known':
            self._transaction.add(fingerprints, lengths.tobytes(),
                                  places.tobytes())
        else:
            self._read_anew(lengths, offset)

    def _read_anew(self, lengths: array.array, offset: int) -> None:
        """Store blocks that are not at the expected addresses."""
        at = 0
        while at < len(lengths):
            end, size = at, 0
            while (end < len(lengths)
                   and size + lengths[end] <= len(self._buffer)):
                size += lengths[end]
                end += 1
            data = self._buffer[:size]
            self._task.view.readinto(data, offset)
            self._transaction.write_blocks(data, lengths[at:end].tobytes())
            self._task.read += size
            at, offset = end, offset + size


def _kind_of(item: tuple[tuple[bytes, int, int], int]) -> str:
    (fingerprint, _, _), place = item
    return ('zeros' if fingerprint == _ZEROS else 'known' if place
            else 'unknown')


def _measure(run: Iterable[tuple[tuple[bytes, int, int], int]]
             ) -> tuple[int, int]:
    """Return how many blocks, and their bytes."""
    count = size = 0
    for (_, length, _), _ in run:
        count, size = count + 1, size + length
    return count, size
