# SPDX-License-Identifier: Apache-2.0

"""Streams of records between the ranks of a batch backup, from all to all.

A link carries the messages: Unix sockets between the ranks of one host, MPI
between hosts. A rank has at most one message under way to each other rank, and
the sender waits until it is received. So a slow rank has at most one message
of each other in its memory.
"""

from collections.abc import Callable
import json
import struct
import time
from typing import Any
from typing import Protocol

import xxhash

from glance_dedup.base import exceptions

_RECORD = 13
#: Bytes of a send buffer, and so of a message's records, at most. They are
#: whole records.
BUFFER = 5000 * _RECORD
# With more ranks, the buffers are smaller, but not smaller than this.
_RANKS = 16
_MIN_SIZE = 100 * _RECORD

# Kind, bytes of the records, and their checksum (B7).
_HEAD = struct.Struct('<8sQQ')
_END = b'end'

#: Seconds without a message from other ranks, after which a rank gives up.
SILENCE = 900.0
# While a rank works alone, it sends so many signs of life in that time.
_SIGNS = 15

# Seconds between two polls for messages, while there is no work: more and
# more, so that a rank that waits long costs its host nothing.
_PAUSE = 0.0005
_MAX_PAUSE = 0.02


def buffer_of(ranks: int) -> int:
    """Bytes of each send buffer of a rank, so that all take 1 MiB at most.

    As much again is under way. With more than 800 ranks it is more.
    """
    return max(_MIN_SIZE,
               min(BUFFER, _RANKS * BUFFER // ranks // _RECORD * _RECORD))


def max_message() -> int:
    """Return the most bytes of a message."""
    return _HEAD.size + BUFFER


class BrokenMessage(exceptions.RepositoryError):
    """A message does not agree with its head."""


def pack(kind: bytes, payload: bytes) -> bytes:
    """A message."""
    return _HEAD.pack(kind, len(payload), xxhash.xxh3_64_intdigest(payload)
                      ) + payload


def unpack(message: bytes | bytearray, source: int) -> tuple[bytes, bytes]:
    """The kind and the payload of a message.

    :raises BrokenMessage: it was cut off, or its bytes have changed
    """
    if len(message) >= _HEAD.size:
        kind, length, checksum = _HEAD.unpack_from(message)
        payload = bytes(message[_HEAD.size:])
        if (length == len(payload)
                and checksum == xxhash.xxh3_64_intdigest(payload)):
            return kind.rstrip(b'\0'), payload
    raise BrokenMessage(
        f'a message of rank {source} came with {len(message)} bytes that do '
        'not agree with its head: the network, or the software on that host, '
        'is broken')


class Link(Protocol):
    """The connection of a rank with all others."""

    rank: int
    size: int

    def send(self, rank: int, tag: int, message: bytes
             ) -> Callable[[], bool]:
        """Begin to send a message; no other is under way to that rank."""

    def receive(self, tag: int) -> tuple[int, bytes] | None:
        """Take out a message; None: none has come."""

    def show_life(self) -> None:
        """Send the others a sign of life."""

    def take_signs(self) -> bool:
        """Return whether there was a sign of life since the last call."""

    def wait(self, seconds: float) -> None:
        """Wait so long, or until a message comes."""

    def close(self) -> None:
        """Send what waits, and end."""

    def abort(self, status: int) -> None:
        """End all ranks."""


class Ranks:
    """This rank among the others.

    :ivar rank: this rank's number, from 0
    :ivar size: how many ranks there are
    :ivar limit: seconds without any message, while this rank waits for one,
        after which it gives up
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.limit = SILENCE
        self._tag = 0
        self._signed = 0.0
        self.rank: int = link.rank
        self.size: int = link.size

    def exchange(self, kind: bytes,
                 receive: Callable[[int, bytes], None]) -> 'Exchange':
        """Begin a stage in which all ranks send records to all.

        All ranks begin the same exchanges in the same order.

        :param kind: its name, of at most 8 bytes
        :param receive: called with the source and its records
        """
        self._tag = self._tag % 1000 + 1
        return Exchange(self._link, self._tag, kind, receive, self.limit)

    def show_life(self) -> None:
        """Let ranks that wait for this one know that it makes progress.

        A stage without messages calls it often.
        """
        now = time.monotonic()
        if now - self._signed < self.limit / _SIGNS:
            return
        self._signed = now
        self._link.show_life()

    def agree(self, value: Any) -> list[Any]:
        """Tell all ranks a value, and return all values, in their order.

        :param value: a value that JSON can hold
        """
        found: list[bytearray] = [bytearray() for _ in range(self.size)]
        with self.exchange(b'agree',
                           lambda source, data: found[source].extend(data)
                           ) as all_to_all:
            text = json.dumps(value).encode()
            for rank in range(self.size):
                all_to_all.send(rank, text)
        return [json.loads(text) for text in found]


class Exchange:
    """One stage's records on their way. Leaving it waits for all of them."""

    def __init__(self, link: Link, tag: int, kind: bytes,
                 receive: Callable[[int, bytes], None],
                 limit: float) -> None:
        self._link = link
        self._tag = tag
        self._kind = kind
        self._receive = receive
        self._limit = limit
        size = link.size
        self._rank = link.rank
        self._size = buffer_of(size)
        self._buffers = [bytearray() for _ in range(size)]
        # For each rank: whether it has the message that is under way to it.
        self._sending: list[Callable[[], bool] | None] = [None] * size
        self._open = set(range(size)) - {self._rank}
        self._heard = time.monotonic()

    def __enter__(self) -> 'Exchange':
        return self

    def __exit__(self, kind: type | None, *rest: Any) -> None:
        if kind is None:
            self._finish()

    def send(self, rank: int, records: bytes) -> None:
        """Send records; they may wait in a buffer until the end."""
        buffer = self._buffers[rank]
        buffer += records
        while len(buffer) >= self._size:
            piece = bytes(buffer[:self._size])
            del buffer[:self._size]
            self._flush(rank, self._kind, piece)

    def _flush(self, rank: int, kind: bytes, payload: bytes) -> None:
        if kind != _END and not payload:
            return
        if rank == self._rank:
            if kind != _END:
                self._receive(rank, payload)
            return
        self._wait(lambda: self._is_free(rank), f'receive from rank {rank}')
        self._sending[rank] = self._link.send(rank, self._tag,
                                              pack(kind, payload))

    def _is_free(self, rank: int) -> bool:
        under_way = self._sending[rank]
        if under_way is not None and under_way():
            self._sending[rank] = under_way = None
            self._heard = time.monotonic()
        return under_way is None

    def _finish(self) -> None:
        size = len(self._buffers)
        # Each rank begins with another one, so that they do not all wait for
        # the same.
        for rank in ((self._rank + step) % size for step in range(size)):
            self._flush(rank, self._kind, bytes(self._buffers[rank]))
            self._flush(rank, _END, b'')
        self._wait(lambda: not self._open, 'finish')
        self._wait(lambda: all(map(self._is_free, range(size))), 'finish')

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Receive messages until a condition holds."""
        pause = _PAUSE
        while not condition():
            if self._take():
                pause = _PAUSE
                continue
            if time.monotonic() - self._heard > self._limit:
                raise exceptions.BusyError(
                    f'rank {self._rank} waited {self._limit:.0f} s for others '
                    f'to {what} in the stage {self._kind.decode()}: look for '
                    'a host that hangs, and start again')
            self._link.wait(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    def poll(self) -> None:
        """Receive pending messages; for stages that seldom send."""
        while self._take():
            pass

    def _take(self) -> bool:
        """Receive a message, if one has come."""
        if self._link.take_signs():     # a rank that works does not hang
            self._heard = time.monotonic()
        found = self._link.receive(self._tag)
        if found is None:
            return False
        self._heard = time.monotonic()
        source, data = found
        kind, payload = unpack(data, source)
        if kind == _END:
            self._open.discard(source)
        elif kind != self._kind:
            raise BrokenMessage(
                f'rank {source} is in the stage {kind.decode()!r}, not in '
                f'{self._kind.decode()}')
        else:
            self._receive(source, payload)
        return True
