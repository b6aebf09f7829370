# SPDX-License-Identifier: Apache-2.0

"""The pull of an image, of which readers get what they want before the rest.

One thread pulls the image (``glance_dedup/transfer/pull.py``). Other threads
receive its blocks, and any number of threads read. Readers get

* bytes before the transaction's last sync point from the repository, by
  address, verified by checksum and fingerprint (I7), under the transaction's
  shared group locks (I6);
* bytes that were stored since then, or fetched ahead, from memory, because a
  block can be read by its address only once it is synced (I1);
* all other bytes by waiting for them if their lot is under way, or else by
  fetching them out of order.

Neighbours get blocks from the same places (``block_lending.py``). If this host
has neighbours, blocks come from them first (``neighbour_caches.py``), and from
the storing host otherwise. A block that several readers want of
the storing host at the same time is requested once.

Readers get no block before it was fingerprinted. Memory holds about
``pull.SYNC_BYTES`` of received blocks, AHEAD_BYTES of blocks fetched ahead,
and the lots that are under way.
"""

import array
import bisect
import collections
from collections.abc import Iterator
import contextlib
import dataclasses
import itertools
import threading
from typing import Any

from dedupd.compute.cache import lot_pieces
from dedupd.compute.cache import neighbour_caches
from glance_dedup.base import exceptions
from glance_dedup.base import thread_pool
from glance_dedup.client import wire
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages
from glance_dedup.transfer import image_assembly
from glance_dedup.transfer import image_description
from glance_dedup.transfer import pull
from glance_dedup.transfer import source_peer

#: The most bytes that are kept of blocks fetched out of order.
AHEAD_BYTES = 8 << 20
#: A fetch out of order also gets the following blocks, up to this many bytes.
NEAR_BYTES = 128 << 10

_READERS = 3
_WAIT = 10.0
_ZEROS = bytes(1 << 20)


class NoMore(Exception):
    """The requested bytes have not come, and will not."""


class _Turns:
    """A fair lock: a waiting thread gets it before its last holder can again.

    The pull holds the transaction nearly always. Without fairness, a reader
    that fetches ahead would wait for the pull's end.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._used = threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._used.acquire()

    def __exit__(self, *exc_info: Any) -> None:
        self._used.release()


class ImagePull(pull.Pull):
    """A pull whose blocks can be read. Thread-safe, except where noted.

    `_changed` is the lock for the fields. No thread sends a request to the
    source, or uses the transaction, while it holds this lock.

    :param asking: the neighbours; None: there are none
    :ivar stored: the offset before which everything is stored
    :ivar ended: true if nothing more will come
    """

    def __init__(self, repository: image_repository.Repository,
                 transaction: openimages.Transaction,
                 header: wire.RecipeHeader,
                 description: image_description.Description,
                 source: source_peer.Peer,
                 workers: thread_pool.Workers,
                 asking: neighbour_caches.Asking | None = None) -> None:
        super().__init__(transaction, header, description, source, workers)
        self._asking = asking
        self._changed = threading.Condition()
        self._changes = 0
        self._turns = _Turns()          # for the transaction
        self.ended = False
        self.stored = 0
        self._stored_lots = self._given_lots = 0
        self._under_way: collections.deque[image_assembly.Lot] = (
            collections.deque())
        # Lots that come from the storing host just now, by their identity.
        self._coming: dict[int, image_assembly.Lot] = {}
        # Blocks by fingerprint: since the last sync point; fetched ahead.
        self._recent: dict[bytes, bytes] = {}
        self._ahead: collections.OrderedDict[bytes, bytes] = (
            collections.OrderedDict())
        self._ahead_bytes = 0
        self._turn = itertools.count()
        with contextlib.ExitStack() as stack:
            self._readers = [
                stack.enter_context(contextlib.closing(
                    repository.block_reader())) for _ in range(_READERS)]
            self._holding = stack.pop_all()

    # -- the pull: one thread; but for _take ------------------------------

    def _look_up(self, lot: image_assembly.Lot) -> None:
        with self._turns:
            super()._look_up(lot)
        with self._changed:
            self._take_ahead(lot)
            self._under_way.append(lot)

    def _take_ahead(self, lot: image_assembly.Lot) -> None:
        """Take the lot's blocks that were fetched ahead."""
        for offset, (name, length) in list(lot.wanted.items()):
            block = self._ahead.pop(name, None)
            if block is not None:
                self._ahead_bytes -= length
                lot.received[name] = block
                del lot.wanted[offset]

    def _take(self, lot: image_assembly.Lot, frame: wire.Frame) -> None:
        super()._take(lot, frame)
        self.tell()

    def tell(self) -> None:
        """Wake all threads that wait for a change."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _store(self, lot: image_assembly.Lot) -> None:
        self._remember(lot)
        with self._turns:
            super()._store(lot)
        self._description.keep_addresses(self._stored_lots, lot)
        with self._changed:
            self._under_way.popleft()
            self.stored = lot.end
            self._stored_lots += 1
            self.tell()

    def _remember(self, lot: image_assembly.Lot) -> None:
        """Keep a lot's blocks in memory before they are written.

        A block that was just written cannot be read by its address yet.
        """
        blocks = lot.blocks
        written = {
            name: blocks[name]
            for part in lot.parts if isinstance(part, image_assembly.Blocks)
            for name, address in zip(part.names, part.addresses)
            if not address}
        with self._changed:
            self._recent.update(written)

    def _sync(self) -> None:
        with self._turns:
            super()._sync()
        self.forget_recent()

    def forget_recent(self) -> None:
        """Drop the blocks kept in memory. REQUIRES: all of them are synced."""
        with self._changed:
            self._recent = {}

    def content(self) -> Iterator[bytes | memoryview]:
        """The stored bytes that no call gave before, in order, in pieces."""
        while self._given_lots < self._stored_lots:
            lot = self._description.lot(self._given_lots)
            pieces = list(lot_pieces.pieces_of(lot, lot.begin, lot.end))
            for piece, data in zip(pieces, self._gather(pieces)):
                if piece.name:
                    yield data
                else:
                    for at in range(0, piece.length, len(_ZEROS)):
                        yield _ZEROS[:min(len(_ZEROS), piece.length - at)]
            self._given_lots += 1

    # -- the end ----------------------------------------------------------

    def end(self, error: BaseException | None) -> None:
        """End the pull, and wake waiting readers; nothing more will come."""
        with self._changed:
            self.ended = True
            self.tell()
        self.interrupt()
        super().end(error)

    def interrupt(self) -> None:
        """Break off all requests to neighbours, from any thread."""
        if self._asking is not None:
            self._asking.interrupt()

    def close(self) -> None:
        """Release everything. REQUIRES: no thread reads."""
        if self._asking is not None:
            self._asking.close()
        self._holding.close()

    # -- sources of blocks ------------------------------------------------

    def greet(self) -> None:
        """Notify the neighbours that this image arrives here."""
        if self._asking is not None:
            self._asking.greet()

    def heard(self, repository_id: str) -> None:
        """Note that this image arrives at a neighbour, too."""
        if self._asking is not None:
            self._asking.heard(repository_id)

    def fetch(self, lot: image_assembly.Lot) -> None:
        """Fetch as pull.Pull.fetch does, from the neighbours first."""
        self._fetch(lot, lot.begin)

    def _fetch(self, lot: image_assembly.Lot, home: int) -> None:
        """Receive a lot's wanted blocks from neighbours or the storing host.

        :param home: the offset by which the neighbours are chosen
        """
        if self._asking is not None:
            self._asking.fetch(lot, home, self._take)
        if lot.wanted:
            self._fetch_from_source(lot)

    def _fetch_from_source(self, lot: image_assembly.Lot) -> None:
        """Receive a lot's wanted blocks from the storing host.

        Waits for blocks that come from there already, and for nothing else:
        so no two hosts wait for each other.

        :raises NoMore: if the pull has ended
        """
        with self._changed:
            self._take_known(lot)
            while self._is_coming({name for name, _ in lot.wanted.values()}):
                self._changed.wait(_WAIT)
                self._take_known(lot)
            if self.ended and lot.wanted:
                raise NoMore()
            self._coming[id(lot)] = lot
            names = {name for name, _ in lot.wanted.values()}
        try:
            if lot.wanted:
                super().fetch(lot)
        except BaseException:
            with self._changed:
                # No reader gets the frames that came before a wrong one.
                lot.received = {}
            raise
        finally:
            with self._changed:
                del self._coming[id(lot)]
                if not lot.parts:       # no lot of the pull
                    self._keep_ahead({name: lot.received[name] for name in (
                        names & lot.received.keys())})
                self.tell()

    def _is_coming(self, names: set[bytes]) -> bool:
        """Return whether the storing host is sending one of these blocks."""
        return any(name in lot.names and name not in lot.received
                   for lot in self._coming.values() for name in names)

    def _take_known(self, lot: image_assembly.Lot) -> None:
        """Take the blocks that came meanwhile for other requests."""
        known = self._known({name for name, _ in lot.wanted.values()})
        for offset, (name, length) in list(lot.wanted.items()):
            if name in known:
                lot.received[name] = known[name]
                del lot.wanted[offset]
                if lot.parts and self._ahead.pop(name, None) is not None:
                    self._ahead_bytes -= length

    # -- lending ----------------------------------------------------------

    def cut(self, ranges: list[tuple[int, int]], seconds: float
            ) -> tuple[dict[int, tuple[bytes, int]], list[tuple[int, int]]]:
        """The blocks of ranges in their first lot, and the further ranges.

        :param ranges: sorted, without overlap, within the image
        :param seconds: the most seconds to wait for their description
        :returns: fingerprint and length of each block, by its offset
        :raises TimeoutError, ClientError: if that does not come
        :raises InvalidParameter: if a range begins or ends within a block
        """
        begin = ranges[0][0]
        lot = self._description.lot(
            self._description.number_at(begin, seconds))
        ends = [sum(one) for one in ranges]
        found = {}
        for piece in lot_pieces.pieces_of(lot, begin, ends[-1]):
            at = bisect.bisect_right(ends, piece.offset)
            if not piece.name or at == len(ends) or (
                    ranges[at][0] >= piece.end):
                continue
            if ranges[at][0] > piece.offset or ends[at] < piece.end:
                raise exceptions.InvalidParameter(
                    f'the range {list(ranges[at])} begins or ends within the '
                    f'block at {piece.offset}')
            found[piece.offset] = piece.name, piece.length
        return found, wire.rest_of(ranges, lot.end)

    def ready(self, wanted: dict[int, tuple[bytes, int]], most: int
              ) -> dict[int, Any]:
        """The bytes of blocks that are here, by their offsets.

        :param wanted: some blocks of one lot
        :param most: the most bytes to return
        """
        known, held = self._held(wanted)
        chosen = []
        for piece in held:
            most -= piece.length
            if most < 0:
                break
            chosen.append(piece)
        stored = iter(self._gather([piece for piece in chosen
                                    if piece.name not in known]))
        return {piece.offset: known[piece.name] if piece.name in known
                else next(stored) for piece in chosen}

    def _held(self, wanted: dict[int, tuple[bytes, int]]
              ) -> tuple[dict[bytes, bytes], list[lot_pieces.Piece]]:
        """The blocks that are in memory, and all that are here."""
        first = min(wanted)
        number = self._description.number_at(first)
        lot = self._description.lot(number)
        with self._changed:
            is_stored = lot.end <= self.stored
            is_under_way = [other for other in self._under_way
                            if other.begin == lot.begin]
        if is_stored:
            lot = self._description.lot(number)     # with addresses
        pieces = [piece for piece in lot_pieces.pieces_of(
            is_under_way[0] if is_under_way else lot, first, max(wanted) + 1)
            if piece.offset in wanted]
        if not is_stored and not is_under_way:
            pieces = self._find(pieces)
        known = self._known({piece.name for piece in pieces})
        return known, [piece for piece in pieces if (
            is_stored or piece.address or piece.name in known)]

    def fetch_early(self, wanted: dict[int, tuple[bytes, int]]) -> None:
        """Receive the blocks, of one lot, that are not here yet.

        They come from the storing host, in no case from a neighbour.

        :raises ClientError, BadBlock: if they do not come
        """
        held = {piece.offset for piece in self._held(wanted)[1]}
        lot = image_assembly.Lot(min(wanted), max(wanted), [])
        for offset, (name, length) in wanted.items():
            if offset not in held and name not in lot.names:
                lot.names.add(name)
                lot.wanted[offset] = name, length
        self._fetch_from_source(lot)

    def is_coming(self, wanted: dict[int, tuple[bytes, int]]) -> bool:
        """Return whether the storing host is sending one of these blocks."""
        with self._changed:
            return self._is_coming({name for name, _ in wanted.values()})

    @property
    def changes(self) -> int:
        """The number of changes so far, for :meth:`wait`."""
        return self._changes

    def wait(self, changes: int, seconds: float) -> None:
        """Wait until something has changed since then, or for some time."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != changes, seconds)

    # -- reading ----------------------------------------------------------

    def read(self, view: memoryview, offset: int) -> int:
        """Fill the first part of a buffer; 0: something changed, try again.

        :raises NoMore: if the bytes did not come before the end
        :raises ClientError, BadBlock, RepositoryError: if they cannot be read
        """
        with self._changed:
            if offset >= self.stored and self.ended:
                raise NoMore()
            is_stored = offset < self.stored
        number = self._description.number_at(offset)
        with self._changed:
            coming = next((lot for lot in self._under_way
                           if lot.begin <= offset < lot.end), None)
        if coming is not None:
            return self._read_coming(coming, view[:coming.end - offset],
                                     offset)
        lot = self._description.lot(number)
        view = view[:lot.end - offset]
        if not is_stored:
            return self._read_ahead(lot, view, offset)
        pieces = list(lot_pieces.pieces_of(lot, offset, offset + len(view)))
        lot_pieces.fill(view, offset, pieces, self._gather(pieces))
        return len(view)

    def _gather(self, pieces: list[lot_pieces.Piece]) -> list[Any]:
        """The bytes of blocks that are stored or in memory."""
        with self._changed:
            plain: list[Any] = [self._recent.get(piece.name)
                                for piece in pieces]
        missing = [number for number, piece in enumerate(pieces)
                   if piece.address and plain[number] is None]
        if missing:
            blocks = [pieces[number] for number in missing]
            lengths = array.array('I', [piece.length for piece in blocks])
            reader = self._readers[next(self._turn) % _READERS]
            data = memoryview(reader.read(
                b''.join([piece.name for piece in blocks]), lengths.tobytes(),
                array.array('Q', [piece.address
                                  for piece in blocks]).tobytes()))
            for number, length in zip(missing, lengths):
                plain[number], data = data[:length], data[length:]
        for number, piece in enumerate(pieces):
            if piece.name and plain[number] is None:
                # A stored block without a place is all zeros.
                plain[number] = bytes(piece.length)
        return plain

    def _read_coming(self, lot: image_assembly.Lot, view: memoryview,
                     offset: int
                     ) -> int:
        """Read from a lot that is under way, or wait for more of it."""
        pieces = list(lot_pieces.pieces_of(lot, offset, offset + len(view)))
        with self._changed:
            blocks = lot.blocks
            plain = [self._recent.get(piece.name) or blocks.get(piece.name)
                     for piece in pieces]
            if any(piece.name and not piece.address and block is None
                   for piece, block in zip(pieces, plain)):
                if not self.ended:
                    self._changed.wait(_WAIT)
                return 0
        stored = iter(self._gather([
            piece for piece, block in zip(pieces, plain) if block is None]))
        lot_pieces.fill(view, offset, pieces, [
            next(stored) if block is None else block for block in plain])
        return len(view)

    def _read_ahead(self, lot: image_assembly.Lot, view: memoryview,
                    offset: int
                    ) -> int:
        """Read bytes that the pull has not reached yet."""
        end = min(lot.end, offset + max(len(view), NEAR_BYTES))
        pieces = list(lot_pieces.pieces_of(lot, offset, end))
        try:
            pieces = self._find(pieces)
        except exceptions.ClosedError:
            # The transaction has just ended, with or without success.
            with self._changed:
                if not self.ended:
                    self._changed.wait(_WAIT)
            return 0
        known = self._known({piece.name for piece in pieces
                             if piece.name and not piece.address})
        asked = image_assembly.Lot(offset, end, [])
        for piece in pieces:
            if piece.name and not piece.address and (
                    piece.name not in known and piece.name not in asked.names):
                asked.names.add(piece.name)
                asked.wanted[piece.offset] = piece.name, piece.length
        if asked.wanted:
            self._fetch(asked, lot.begin)
            self._keep_ahead(asked.received)
            known.update(asked.received)
        stored = iter(self._gather([piece for piece in pieces
                                    if piece.name not in known]))
        lot_pieces.fill(view, offset, pieces, [
            known[piece.name] if piece.name in known else next(stored)
            for piece in pieces])
        return len(view)

    def _find(self, pieces: list[lot_pieces.Piece]
              ) -> list[lot_pieces.Piece]:
        """The same pieces, with the addresses of blocks that are here."""
        named = [piece for piece in pieces if piece.name]
        with self._turns:
            addresses = self._transaction.find(
                b''.join([piece.name for piece in named]),
                array.array('I', [piece.length for piece in named]).tobytes())
        found = iter(array.array('Q', addresses))
        return [dataclasses.replace(piece, address=next(found))
                if piece.name else piece for piece in pieces]

    def _known(self, names: set[bytes]) -> dict[bytes, bytes]:
        """The named blocks that are in memory."""
        with self._changed:
            places = [self._recent, self._ahead, *(
                lot.received for lot in itertools.chain(
                    self._under_way, self._coming.values()))]
            return {name: block for name in names if (block := next((
                place[name] for place in places if name in place), None))}

    def _keep_ahead(self, blocks: dict[bytes, bytes]) -> None:
        with self._changed:
            for name, block in blocks.items():
                if name not in self._ahead:
                    self._ahead[name] = block
                    self._ahead_bytes += len(block)
            while self._ahead_bytes > AHEAD_BYTES:
                _, block = self._ahead.popitem(last=False)
                self._ahead_bytes -= len(block)
