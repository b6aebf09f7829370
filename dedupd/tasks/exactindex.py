# SPDX-License-Identifier: Apache-2.0

"""The exact index: sorted files from which merging finds duplicates.

``merging.rst``, "The exact index", has the three stages, and the order of
their steps. This module has the first two: writing runs of new entries, and
merging these into shards. They need the repository's directory and locks, and
no catalog but its id. So the daemon of any host runs them.

All is derived. The maintainer sets untrusted files aside. Then the
cursors go back to zero, and the next scan reads all entries again.
"""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import logging
import struct
import time
from typing import Any

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses

LOG = logging.getLogger(__name__)

#: The most index records sorted at once; each takes 45 bytes meanwhile.
SORTED_RECORDS = 4 << 20
#: Pairs sorted at once; each takes 64 bytes meanwhile.
SORTED_PAIRS = 1 << 19
#: Pairs taken in, or examined, together.
PAIRS_AT_ONCE = 1 << 17
#: A shard is marked to be split if its merge took longer, nanoseconds, or if
#: it has more records.
SPLIT_NS = 2_000_000_000
SPLIT_RECORDS = 1 << 40
#: Entries of a group that are read at once.
SCAN_ENTRIES = 32768
#: Records merged between two checks of the pace.
STEP_RECORDS = 1 << 19
#: Seconds that the maintainer waits for a lock of the index.
LOCK_WAIT = 600.0
#: A helper writes runs if there are so many new entries for each shard.
HELP_ENTRIES = 1 << 15
#: A helper merges a shard if its runs have at least one part in this of the
#: shard's records: a merge writes the whole shard.
HELP_SHARE = 8
#: Seconds for which a helper leaves the lock to others.
HELP_PAUSE = 1.0

#: A pair: the address of a block, and the one that the index has for it.
PAIR = struct.Struct('<QQ')

_RECORD_BYTES = 13
_CURSOR = struct.Struct('<II')
# The highest generations that are counted on from.
_HIGHEST = 1 << 62              # of cursors
_HIGHEST_SHARD = 1 << 31

File = tuple[str, int, int, int]
"""Kind, bits, shard and number of a file, as its name has them."""


def record(fingerprint: bytes, address: int) -> bytes:
    """A record of the index."""
    return fingerprint[:8] + address.to_bytes(5, 'little')


def cut(records: bytes) -> list[bytes]:
    """Packed records, one by one."""
    return [records[at:at + _RECORD_BYTES]
            for at in range(0, len(records), _RECORD_BYTES)]


def find(handle: _engine.Repository, catalog_id: bytes, fingerprint: bytes
         ) -> int | None:
    """The address that the index has for a block; None: it has none.

    The block need not live.
    """
    with contextlib.suppress(exceptions.ImageNotFound,
                             *exceptions.UNREADABLE):
        with contextlib.closing(_engine.Index(handle, catalog_id)) as files:
            return files.find(fingerprint) or None
    return None


class Index:
    """The exact index of a repository. One thread at a time may use it.

    :param engine: needs no lock, since it only reads groups
    :param catalog_id: of the catalog that the index belongs to; None: of the
        one that the highest cursors name
    :raises ImageNotFound: if there are no cursors that could name one
    """

    def __init__(self, handle: _engine.Repository, engine: _engine.Maintenance,
                 catalog_id: bytes | None, pace: pacing.Pace) -> None:
        self._engine = engine
        self._pace = pace
        self._files = _engine.Index(handle, catalog_id)

    def close(self) -> None:
        """Release all locks and files. Idempotent."""
        self._files.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the runs.

        :raises BusyError: another process has it all the time
        """
        end = time.monotonic() + LOCK_WAIT
        while not self._files.lock():
            if time.monotonic() > end:
                raise exceptions.BusyError(
                    'the index is in use: another process has its lock')
            self._pace.pause(pacing.MAX_WAIT)
        try:
            yield
        finally:
            self._files.unlock()

    # -- its state --------------------------------------------------------

    def prepare(self) -> None:
        """Make sure that this catalog has an index, and that it is whole."""
        with self._locked():
            self._files.tidy()
            try:
                has_cursors = self._cursors(self._cursor_files()) is not None
            except exceptions.DamagedError as e:
                LOG.warning('the exact index is made again: %s', e)
                has_cursors = False
            if not has_cursors:
                self._discard()
            elif not self._is_whole():
                self._reset()

    def repair(self) -> None:
        """Set aside the files that cannot be trusted; begin to read again."""
        with self._locked():
            bad = []
            for file in self._files.files():
                try:
                    if file[0] != 'new':
                        self._files.verify(file)
                except exceptions.DamagedError as e:
                    LOG.warning('the exact index: %s; it is set aside, and '
                                'all entries are read again', e)
                    bad.append(file)
                except exceptions.ImageNotFound:
                    pass    # others are at work
            # First: entries of a missing file are to be found again.
            self._reset(bad)

    def _is_whole(self) -> bool:
        shards, complete = self._files.shards()
        if not complete:
            LOG.warning('a shard of the exact index is missing: all entries '
                        'are read again')
        return complete and not self._strays(shards)

    def _strays(self, shards: Iterable[File]) -> list[File]:
        """The runs of shards that do not count.

        Either a split died before it removed them, or a process that lost its
        locks wrote them.
        """
        counted = {file[1:3] for file in shards}
        return [file for file in self._files.files()
                if file[0] in ('run', 'gone') and file[1:3] not in counted]

    def _discard(self) -> None:
        """Make an index without any records.

        Until it has cursors it means nothing, and is discarded again.
        """
        cursors = self._cursor_files()
        for file in cursors:
            self._files.remove(file)
        self._files.sync()
        old = self._files.files()
        highest = max((file[3] for file in old if file[0] == 'shard'
                       and file[3] < _HIGHEST_SHARD), default=0)
        if highest:
            self._replace('shard', 0, 0, highest)
        for file in old:
            if file[0] != 'new':
                self._files.remove(file)
        self._files.sync()
        self._files.fill()
        self._write_cursors({}, cursors)

    def _reset(self, bad: Iterable[File] = ()) -> None:
        self._write_cursors({}, self._cursor_files())
        for file in bad:
            if file[0] == 'shard' and file[3] < _HIGHEST_SHARD:
                self._replace(*file)
            self._files.set_aside(file)
        for file in self._strays(self._files.shards()[0]):
            self._files.remove(file)
        self._files.fill()

    def _replace(self, kind: str, bits: int, shard: int, generation: int
                 ) -> None:
        """Make an empty shard, beside which nothing of the old one counts.

        Others may still be merging the old one, into its next generation. The
        halves of a split would count beside an empty shard of that one.
        """
        with contextlib.suppress(exceptions.ImageExists):
            self._files.write((kind, bits, shard, generation + 2), b'')

    # -- cursors ----------------------------------------------------------

    def _cursor_files(self) -> list[File]:
        return [file for file in self._files.files() if file[0] == 'cursors']

    def _cursors(self, files: list[File]) -> dict[int, int] | None:
        """Return the number of each group's slots in the index, or in a run.

        :param files: the files of cursors
        :returns: None if there are none
        """
        if not files:
            return None
        newest = max(files, key=lambda file: file[3])
        self._files.verify(newest)
        return dict(_CURSOR.iter_unpack(b''.join(self._frames(newest))))

    def _write_cursors(self, cursors: dict[int, int],
                       known: Iterable[File]) -> list[File]:
        """Make cursors durable.

        :param known: the files of cursors that this process knows, which are
            removed. Others write cursors only if this one lost its lock; then
            these count, and not the new ones.
        :returns: the file of the new ones
        :raises BusyError: if another process wrote cursors meanwhile
        """
        generation = 1 + max((file[3] for file in known
                              if file[3] < _HIGHEST), default=0)
        for file in known:
            if file[3] >= _HIGHEST:
                self._files.set_aside(file)
        new = 'cursors', 0, 0, generation
        try:
            self._files.write(new, b''.join(
                _CURSOR.pack(*item) for item in sorted(cursors.items())))
        except exceptions.ImageExists as e:
            raise exceptions.BusyError(
                'another process moved the cursors of the index, although '
                'this one has its lock') from e
        for file in known:
            self._files.remove(file)
        return [new]

    def _frames(self, file: File) -> Iterator[bytes]:
        frame = 0
        while items := self._files.read(file, frame):
            yield items
            frame += 1

    # -- runs -------------------------------------------------------------

    def scan(self) -> int:
        """Write runs of the entries published since the last scan.

        :returns: the number of entries
        :raises BusyError: another process has the lock all the time
        """
        with self._locked():
            return self._scan()

    def help_scan(self) -> int:
        """Write runs, as a helper: only if they are worth their files.

        If another process has the lock, that one may be writing runs. This one
        gives the lock back now and then, since the maintainer may want it.

        :returns: the number of entries
        """
        total = 0
        while self._files.lock():
            try:
                shards, _ = self._files.shards()
                done = self._scan(HELP_ENTRIES * len(shards), in_parts=True)
            finally:
                self._files.unlock()
            total += done
            if done < SORTED_RECORDS:
                break
            self._pace.pause(HELP_PAUSE)
        return total

    def _scan(self, least: int = 0, in_parts: bool = False) -> int:
        """Write runs. REQUIRES: the lock of the runs."""
        known = self._cursor_files()
        cursors = self._cursors(known)
        if cursors is None:
            return 0    # the maintainer has yet to make an index

        def write(moved: dict[int, int]) -> None:
            nonlocal known
            known = self._write_cursors(moved, known)
        return _Scan(self._files, self._engine, self._pace).run(
            cursors, write, least, in_parts)

    def add(self, records: Iterable[bytes], gone: Iterable[bytes] = ()
            ) -> None:
        """Make a run of these records, durably, and one of records to drop."""
        with self._locked():
            for some, kind in (records, False), (gone, True):
                joined = _engine.index_sort(b''.join(set(some)))
                if joined:
                    self._files.add(joined, kind)

    # -- merging ----------------------------------------------------------

    def merge(self) -> None:
        """Merge all runs that there are into their shards.

        This waits for merges of other processes. If it takes too long, the
        next call does the rest.

        :raises pacing.Stopped: the shard under way stays as it is
        """
        runs = self._runs()
        end = time.monotonic() + LOCK_WAIT
        while due := self._due(runs):
            if self._merge_all(due):
                end = time.monotonic() + LOCK_WAIT
            elif time.monotonic() > end:
                LOG.warning('another process merges a shard of the exact '
                            'index all the time: its runs wait')
                break
            else:
                self._pace.pause(pacing.MAX_WAIT)
            runs &= self._runs()    # others come, and are not waited for

    def help_merge(self) -> int:
        """Merge shards, as a helper: those that are worth it, and are free.

        The lock alone decides which process merges a shard. A merge is short,
        so a process that finds a shard taken goes on with the next one.

        :returns: the number of merged shards
        :raises pacing.Stopped: the shard under way stays as it is
        """
        runs = self._runs()
        return self._merge_all([shard for shard in self._due(runs)
                                if self._is_worth(shard, runs)])

    def _runs(self) -> set[File]:
        return {file for file in self._files.files()
                if file[0] in ('run', 'gone')}

    def _due(self, runs: Iterable[File]) -> list[File]:
        """The shards of these runs, if they count."""
        with_runs = {file[1:3] for file in runs}
        return [file for file in self._files.shards()[0]
                if file[1:3] in with_runs]

    def _is_worth(self, shard: File, runs: Iterable[File]) -> bool:
        """Return whether a shard has enough runs to be worth a merge."""
        with contextlib.suppress(exceptions.ImageNotFound):
            return HELP_SHARE * sum(
                self._files.count(file) for file in runs
                if file[1:3] == shard[1:3]) >= self._files.count(shard)
        return False    # another process has just merged it

    def _merge_all(self, due: list[File]) -> int:
        """Merge each of these shards that is free, once; return the number."""
        merged = 0
        for done, (_, bits, shard, _) in enumerate(due):
            self._pace.step(done, len(due), 'merging the index')
            if self._files.begin_merge(bits, shard, SPLIT_NS, SPLIT_RECORDS):
                merged += self._merge_one(done, len(due))
        return merged

    def _merge_one(self, done: int, total: int) -> bool:
        """Go on to the end of a merge; False: its shard does not count."""
        try:
            before, more = 0, 1
            while more:
                more, read = self._files.step(STEP_RECORDS)
                self._pace.step(done, total, 'merging the index',
                                cost=2 * (read - before))
                before = read
            self._files.finish_merge()
            return True
        except exceptions.ImageNotFound:
            return False    # it was discarded meanwhile
        finally:
            self._files.cancel_merge()

    # -- pairs ------------------------------------------------------------

    def pairs_files(self) -> list[File]:
        """The files of pairs that were not taken in, the oldest first."""
        return sorted((file for file in self._files.files()
                       if file[0] == 'pairs'), key=lambda file: file[3])

    def portions(self, file: File) -> Iterator[bytes]:
        """A file's pairs (other, kept), a bounded number at a time.

        They are sorted, in large pieces. In the file they have the order of
        fingerprints, and then nearly all portions name all groups.
        """
        read: list[bytes] = []
        size = 0
        for items in self._frames(file):
            read.append(items)
            size += len(items)
            if size >= SORTED_PAIRS * PAIR.size:
                yield from self._sorted_portions(b''.join(read))
                read, size = [], 0
        yield from self._sorted_portions(b''.join(read))

    @staticmethod
    def _sorted_portions(pairs: bytes) -> Iterator[bytes]:
        ordered = _engine.pairs_sort(pairs)
        size = PAIRS_AT_ONCE * PAIR.size
        for at in range(0, len(ordered), size):
            yield ordered[at:at + size]

    def remove(self, file: File) -> None:
        """Remove a file of pairs that were taken in, durably."""
        self._files.remove(file)


class _Scan:
    """One reading of the entries that were published since the last."""

    def __init__(self, files: _engine.Index, engine: _engine.Maintenance,
                 pace: pacing.Pace) -> None:
        self._files = files
        self._engine = engine
        self._pace = pace
        self._read: list[bytes] = []
        self._size = 0

    def run(self, cursors: dict[int, int], write: Any, least: int,
            in_parts: bool) -> int:
        """Read entries and write runs; return the number of new entries.

        :param write: makes cursors durable
        :param least: do nothing if fewer are new
        :param in_parts: end when runs were written for the first time
        """
        numbers = set(self._engine.groups())
        published = self._published(numbers)
        # A group that is gone may come back, with or without its entries.
        moved = {number: slots for number, slots in cursors.items()
                 if number in numbers
                 and slots <= published.get(number, slots)}
        total = sum(slots - moved.get(number, 0)
                    for number, slots in published.items())
        if total < least:
            return 0
        done = 0
        for number, slots in sorted(published.items()):
            for first, count in self._pieces(moved.get(number, 0), slots):
                if not self._take(number, first, count):
                    break
                moved[number] = first + count
                done += count
                if self._size >= SORTED_RECORDS:
                    self._flush()
                    write(moved)
                    if in_parts:
                        return done
                self._pace.step(done, total, 'reading new entries',
                                cost=block_addresses.ENTRY_BYTES * count)
        self._flush()
        if moved != cursors:
            write(moved)
        return done

    def _published(self, numbers: Iterable[int]) -> dict[int, int]:
        published = {}
        for number in numbers:
            # An unreadable group is scanned once it can be read.
            with contextlib.suppress(exceptions.ImageNotFound,
                                     *exceptions.UNREADABLE):
                published[number] = self._engine.group_facts(
                    number)['published']
        return published

    @staticmethod
    def _pieces(first: int, end: int) -> Iterator[tuple[int, int]]:
        for at in range(first, end, SCAN_ENTRIES):
            yield at, min(SCAN_ENTRIES, end - at)

    def _take(self, number: int, first: int, count: int) -> bool:
        try:
            records = _engine.index_records(
                self._engine.entries(number, first, count), number, first)
        except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
            return False
        self._read.append(records)
        self._size += count
        return True

    def _flush(self) -> None:
        """Write the runs, durably; only then may the cursors move."""
        if self._read:
            joined = _engine.index_sort(b''.join(self._read))
            self._read, self._size = [], 0
            if joined:
                self._files.add(joined, False)
