# SPDX-License-Identifier: Apache-2.0

"""The part of an image that has come, and reading it before the rest.

One thread pulls the image (``glance_dedup/transfer/pull.py``). Other threads
receive its blocks, and any number of threads read. Readers get

* bytes before the transaction's last sync point from the repository, by
  address, verified by checksum and fingerprint (I7), under the transaction's
  shared group locks (I6);
* bytes that were stored since then, or fetched ahead, from memory, because a
  block can be read by its address only once it is synced (I1);
* all other bytes by waiting for them if their lot is under way, or else by
  fetching them out of order.

Readers get no block before it was fingerprinted. Memory holds about
``pull.SYNC_BYTES`` of received blocks, AHEAD_BYTES of blocks fetched ahead,
and the lots that are under way.
"""

import array
import collections
from collections.abc import Iterator
import contextlib
import dataclasses
import itertools
import threading
from typing import Any

from glance_dedup.base import exceptions
from glance_dedup.base import workers as workers_module
from glance_dedup.client import wire
from glance_dedup.repository import openimages
from glance_dedup.repository import repository as repository_module
from glance_dedup.transfer import assembler
from glance_dedup.transfer import description as description_module
from glance_dedup.transfer import pull
from glance_dedup.transfer import source_client as source_client_module

#: The most bytes that are kept of blocks fetched out of order.
AHEAD_BYTES = 8 << 20
#: A fetch out of order also gets the following blocks, up to this many bytes.
NEAR_BYTES = 128 << 10

_READERS = 3
_WAIT = 10.0
_ZEROS = bytes(1 << 20)


class NoMore(Exception):
    """The requested bytes have not come, and will not."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A block of an image; without a name it is zeros."""

    offset: int
    length: int
    name: bytes = b''
    address: int = 0


def _pieces(lot: assembler.Lot, offset: int, end: int) -> Iterator[_Piece]:
    """The pieces of a lot that have bytes of a range."""
    start = lot.begin
    for part in lot.parts:
        if isinstance(part, int):
            if start < end and start + part > offset:
                yield _Piece(start, part)
            start += part
            continue
        for name, length, address in zip(part.names, part.lengths,
                                         part.addresses):
            if start < end and start + length > offset:
                yield _Piece(start, length, name, address)
            start += length


def _fill(view: memoryview, offset: int, pieces: list[_Piece],
          plain: list[Any]) -> None:
    """Copy the bytes of pieces into a buffer that begins at `offset`."""
    end = offset + len(view)
    for piece, data in zip(pieces, plain):
        first = max(piece.offset, offset)
        last = min(piece.offset + piece.length, end)
        if first < last:
            view[first - offset:last - offset] = (
                data[first - piece.offset:last - piece.offset] if piece.name
                else bytes(last - first))


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


class PartialImage(pull.Pull):
    """A pull whose blocks can be read. Thread-safe, except where noted.

    `_changed` is the lock for the fields. No thread asks the source, or uses
    the transaction, while it holds this lock.

    :ivar stored: the offset before which everything is stored
    """

    def __init__(self, repository: repository_module.Repository,
                 transaction: openimages.Transaction,
                 header: wire.RecipeHeader,
                 description: description_module.Description,
                 source: source_client_module.Peer,
                 workers: workers_module.Workers) -> None:
        super().__init__(transaction, header, description, source, workers)
        self._changed = threading.Condition()
        self._turns = _Turns()          # for the transaction
        self._ended = False
        self.stored = 0
        self._stored_lots = self._given_lots = 0
        self._under_way: collections.deque[assembler.Lot] = (
            collections.deque())
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

    def _look_up(self, lot: assembler.Lot) -> None:
        with self._turns:
            super()._look_up(lot)
        with self._changed:
            self._take_ahead(lot)
            self._under_way.append(lot)

    def _take_ahead(self, lot: assembler.Lot) -> None:
        """Take the lot's blocks that were fetched ahead."""
        for offset, (name, length) in list(lot.wanted.items()):
            block = self._ahead.pop(name, None)
            if block is not None:
                self._ahead_bytes -= length
                lot.received[name] = block
                del lot.wanted[offset]

    def _take(self, lot: assembler.Lot, frame: wire.Frame) -> None:
        super()._take(lot, frame)
        with self._changed:
            self._changed.notify_all()

    def _store(self, lot: assembler.Lot) -> None:
        self._remember(lot)
        with self._turns:
            super()._store(lot)
        self._description.keep_addresses(self._stored_lots, lot)
        with self._changed:
            self._under_way.popleft()
            self.stored = lot.end
            self._stored_lots += 1
            self._changed.notify_all()

    def _remember(self, lot: assembler.Lot) -> None:
        """Keep a lot's blocks in memory before they are written.

        A block that was just written cannot be read by its address yet.
        """
        blocks = lot.blocks
        written = {
            name: blocks[name]
            for part in lot.parts if isinstance(part, assembler.Blocks)
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
            pieces = list(_pieces(lot, lot.begin, lot.end))
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
            self._ended = True
            self._changed.notify_all()
        super().end(error)

    def close(self) -> None:
        """Release everything. REQUIRES: nobody reads."""
        self._holding.close()

    # -- reading ----------------------------------------------------------

    def read(self, view: memoryview, offset: int) -> int:
        """Fill the first part of a buffer; 0: something changed, try again.

        :raises NoMore: if the bytes did not come before the end
        :raises ClientError, BadBlock, RepositoryError: if they cannot be read
        """
        with self._changed:
            if offset >= self.stored and self._ended:
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
        pieces = list(_pieces(lot, offset, offset + len(view)))
        _fill(view, offset, pieces, self._gather(pieces))
        return len(view)

    def _gather(self, pieces: list[_Piece]) -> list[Any]:
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

    def _read_coming(self, lot: assembler.Lot, view: memoryview, offset: int
                     ) -> int:
        """Read from a lot that is under way, or wait for more of it."""
        pieces = list(_pieces(lot, offset, offset + len(view)))
        with self._changed:
            blocks = lot.blocks
            plain = [self._recent.get(piece.name) or blocks.get(piece.name)
                     for piece in pieces]
            if any(piece.name and not piece.address and block is None
                   for piece, block in zip(pieces, plain)):
                if not self._ended:
                    self._changed.wait(_WAIT)
                return 0
        stored = iter(self._gather([
            piece for piece, block in zip(pieces, plain) if block is None]))
        _fill(view, offset, pieces, [
            next(stored) if block is None else block for block in plain])
        return len(view)

    def _read_ahead(self, lot: assembler.Lot, view: memoryview, offset: int
                    ) -> int:
        """Read bytes that the pull has not reached yet."""
        end = min(lot.end, offset + max(len(view), NEAR_BYTES))
        pieces = list(_pieces(lot, offset, end))
        try:
            pieces = self._find(pieces)
        except exceptions.ClosedError:
            # The transaction has just ended, with or without success.
            with self._changed:
                if not self._ended:
                    self._changed.wait(_WAIT)
            return 0
        known = self._known({piece.name for piece in pieces
                             if piece.name and not piece.address})
        asked = assembler.Lot(offset, end, [])
        for piece in pieces:
            if piece.name and not piece.address and (
                    piece.name not in known and piece.name not in asked.names):
                asked.names.add(piece.name)
                asked.wanted[piece.offset] = piece.name, piece.length
        if asked.wanted:
            self.fetch(asked)
            self._keep_ahead(asked.received)
            known.update(asked.received)
        stored = iter(self._gather([piece for piece in pieces
                                    if piece.name not in known]))
        _fill(view, offset, pieces, [
            known[piece.name] if piece.name in known else next(stored)
            for piece in pieces])
        return len(view)

    def _find(self, pieces: list[_Piece]) -> list[_Piece]:
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
            return {name: block for name in names
                    if (block := self._recent.get(name)
                        or self._ahead.get(name)) is not None}

    def _keep_ahead(self, blocks: dict[bytes, bytes]) -> None:
        with self._changed:
            for name, block in blocks.items():
                if name not in self._ahead:
                    self._ahead[name] = block
                    self._ahead_bytes += len(block)
            while self._ahead_bytes > AHEAD_BYTES:
                _, block = self._ahead.popitem(last=False)
                self._ahead_bytes -= len(block)
