# SPDX-License-Identifier: Apache-2.0

"""Reads images through memory that the daemon shares with its client.

The rules M1 to M5 are in ``daemon.rst``, "Shared memory"; the messages in
``http.rst``, under the same title. What both sides need to know of them is
here, and the client's side.
"""

import collections
import fcntl
import mmap
import os
import struct
import time
from typing import NamedTuple

from glance_dedup.base import closing
from glance_dedup.client import daemon_connection

#: The protocol's name, in the header ``Upgrade``.
PROTOCOL = 'glance-dedup-memory'
#: Headers of the answer: the bytes of the memory, and of the whole image.
MEMORY_HEADER = 'Dedup-Memory'
SIZE_HEADER = 'Dedup-Size'
#: A range shorter than this many bytes is not worth any memory.
MIN_SIZE = 1 << 20
#: Bytes that are requested at once: as many as the engine reads at once, with
#: all of its threads.
PIECE = 4 << 20
#: A request: offset in the image, place in the memory, length.
REQUEST = struct.Struct('<QII')
#: An answer: the length, once the bytes are in their place; and 1 if they are
#: all zeros, which are not written to it. Otherwise 0.
ANSWER = struct.Struct('<II')

#: M1: no process makes the memory shorter or longer.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# The most memory that a client maps.
_MAX_SIZE = 64 << 20


class _Piece(NamedTuple):
    """A range that was requested."""

    place: int
    length: int


class Reader(closing.Closing):
    """The bytes of a range, in order, out of the daemon's memory.

    One thread at a time may use it.

    :param answer: the daemon's answer, by which it changes to this protocol;
        it is closed with the reader
    :param offset: the range's first byte
    :param length: bytes of the range
    :raises BadAnswer: the answer lacks the size of the shared memory
    """

    def __init__(self, answer: daemon_connection.Answer, offset: int,
                 length: int) -> None:
        self._answer = answer
        self._channel = answer.switched()
        self._map: mmap.mmap | None = None
        self._size = _number(answer, MEMORY_HEADER)
        if not PIECE <= self._size <= _MAX_SIZE:
            raise answer.bad(f'it shares {self._size} bytes of memory')
        self._next, self._end = offset, offset + length
        self._free = list(range(0, self._size - PIECE + 1, PIECE))
        # Pieces that were requested, in order. Of the first, if it has
        # come, `_taken` bytes are taken.
        self._requested: collections.deque[_Piece] = collections.deque()
        self._here = self._zeros = False
        self._taken = 0

    def read_exactly(self, length: int, timeout: float) -> bytes:
        """The next `length` bytes of the range, within `timeout` seconds.

        Up to PIECE bytes at a time are copied only once.

        :raises DaemonUnavailable: they did not come
        """
        self._channel.deadline = time.monotonic() + timeout
        parts = []
        try:
            while length:
                parts.append(self._take(length))
                length -= len(parts[-1])
        except (OSError, ValueError) as e:
            self._channel.hang_up()
            raise self._answer.unavailable(e) from e
        return parts[0] if len(parts) == 1 else b''.join(parts)

    def _take(self, most: int) -> bytes:
        """Some of the next bytes."""
        self._request()
        if not self._here:
            self._receive()
        piece = self._requested[0]
        begin = piece.place + self._taken
        length = min(most, piece.length - self._taken)
        assert self._map is not None
        data = bytes(length) if self._zeros else (
            self._map[begin:begin + length])
        if not self._channel.is_whole():
            # M3: the daemon may have taken the memory back meanwhile.
            raise ConnectionResetError('the daemon ended the connection')
        self._channel.received += length
        self._taken += length
        if self._taken == piece.length:
            self._requested.popleft()
            self._here = False
            self._taken = 0
            self._free.append(piece.place)
            self._request()
        return data

    def _request(self) -> None:
        """Request as much as there is room for."""
        requests = []
        while self._free and self._next < self._end:
            piece = _Piece(self._free.pop(0),
                           min(PIECE, self._end - self._next))
            requests.append(REQUEST.pack(self._next, *piece))
            self._requested.append(piece)
            self._next += piece.length
        if requests:
            self._channel.send(b''.join(requests))

    def _receive(self) -> None:
        """Wait for the answer to the first request."""
        if self._map is None:
            data, descriptors = self._channel.receive_descriptors(ANSWER.size)
            try:
                self._map = self._mapped(descriptors)
            finally:
                for fd in descriptors:
                    os.close(fd)
        else:
            data = self._channel.receive(ANSWER.size)
        length, zeros = ANSWER.unpack(data)
        if length != self._requested[0].length or zeros > 1:
            raise ValueError(f'it answers {length}, {zeros}')
        self._here, self._zeros = True, bool(zeros)

    def _mapped(self, descriptors: list[int]) -> mmap.mmap:
        if len(descriptors) != 1:
            raise ValueError(f'it sent {len(descriptors)} descriptors')
        fd, = descriptors
        # M1; fcntl fails for memory of another kind.
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or (
                os.fstat(fd).st_size != self._size):
            raise ValueError('its memory is not sealed, or of another size')
        return mmap.mmap(fd, self._size, mmap.MAP_SHARED, mmap.PROT_READ)

    def close(self) -> None:
        """Close the connection, which gives the memory back. Idempotent."""
        self._answer.close()
        found, self._map = self._map, None
        if found is not None:
            found.close()


def image_size(answer: daemon_connection.Answer) -> int:
    """The size of the whole image."""
    return _number(answer, SIZE_HEADER)


def _number(answer: daemon_connection.Answer, header: str) -> int:
    text = answer.header(header)
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise answer.bad(f'{header} is {text[:100]!r}')
    return int(text)
