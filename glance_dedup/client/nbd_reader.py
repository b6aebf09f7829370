# SPDX-License-Identifier: Apache-2.0

"""A client of NBD servers, which reads a disk and requests its extents.

The servers are dedupd's and QEMU's. One connection, one request at a time. The
server answers in chunks (structured replies), so that a hole comes without its
zeros. Metadata contexts tell which ranges are holes (``base:allocation``), and
which a dirty bitmap holds (``qemu:dirty-bitmap:<name>``).

libnbd does the same and more. Its Python module is not on PyPI, and Debian's
is for the system's Python alone; the library with what it needs takes 2.5 MiB
of a process that may have 35. The messages are in `nbd_protocol.py` anyway.
"""

from collections.abc import Iterable
import contextlib
import socket
import struct
from typing import Any

from glance_dedup.base import closing
from glance_dedup.base import sockets
from glance_dedup.client import errors as client_errors
from glance_dedup.client import nbd_protocol as protocol

#: The context that tells holes, and the bits of its extents.
ALLOCATION = protocol.CONTEXT.decode()
HOLE = 1
ZERO = 2
#: What goes before a bitmap's name in the name of its context, and its bit.
BITMAP_PREFIX = 'qemu:dirty-bitmap:'
DIRTY = 1

#: Seconds for the answer to a request.
ANSWER_SECONDS = 60.0
# The longest payload but for data: 131,072 extents, the most that QEMU sends.
_MAX_STATUS = (1 << 20) + 4
_MAX_REPLY = 65536
_MAX_REPLIES = 64
_MAX_MESSAGE = 1000


class NbdReader(closing.Closing):
    """An export of an NBD server. Not thread-safe.

    After an exception the connection is of no use, unless the exception is
    `Refused`: then further requests may succeed.

    :param path: the path of the server's Unix socket
    :param export: the export's name
    :param contexts: the metadata contexts to request
    :ivar description: of the export; '': the server gave none
    :raises DaemonUnavailable: the server is gone, or does not answer in time
    :raises BadAnswer: it breaks the protocol, or lacks a context
    :raises Refused: 404: the server refuses the export, or an option; 500: it
        cannot read the export
    """

    def __init__(self, path: str, export: str,
                 contexts: Iterable[str] = ()) -> None:
        self.size = 0
        self.description = ''
        self._path = path
        self._contexts: dict[int, str] = {}
        self._socket: socket.socket | None = None
        with self._talking(), contextlib.ExitStack() as stack:
            self._socket = stack.enter_context(
                sockets.connect_unix(path, ANSWER_SECONDS))
            self._haggle(export.encode(), [text.encode() for text in contexts])
            stack.pop_all()

    def readinto(self, buffer: Any, offset: int) -> None:
        """Fill a writable buffer of at most 32 MiB from `offset`.

        :raises: as the class
        """
        target = memoryview(buffer)
        with self._talking():
            self._send(protocol.request(
                protocol.Command.READ, len(target), offset))
            ranges = [found for head in self._chunks()
                      if (found := self._take(head, target, offset))]
            at = 0
            for begin, end in sorted(ranges):
                if begin != at:
                    break
                at = end
            if at != len(target):
                raise protocol.Violation(
                    'the answer to a read is not the whole range')

    def extents(self, offset: int, length: int
                ) -> dict[str, list[tuple[int, int]]]:
        """The extents of a range of less than 4 GiB, by context.

        Each list has length and flags of extents from `offset` on. It may end
        before the range does, and the last extent may go beyond it.

        :raises: as the class
        """
        found: dict[str, list[tuple[int, int]]] = {}
        with self._talking():
            self._send(protocol.request(
                protocol.Command.BLOCK_STATUS, length, offset))
            for head in self._chunks():
                if head.kind != protocol.Chunk.BLOCK_STATUS:
                    raise protocol.Violation(
                        f'a chunk of the kind {head.kind}')
                context, extents = self._status(head)
                found[context] = extents
            if len(found) != len(self._contexts):
                raise protocol.Violation('a metadata context is missing')
        return found

    def close(self) -> None:
        """Close the connection. Idempotent."""
        sock, self._socket = self._socket, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.sendall(protocol.request(protocol.Command.DISC, 0, 0))
            sock.close()

    # -- the answers -------------------------------------------------------

    def _chunks(self) -> Iterable[protocol.ChunkHead]:
        """The heads of an answer; the caller receives the payload of each.

        :raises Refused: the answer is an error, all of which was received
        """
        refused = None
        while True:
            head = protocol.parse_chunk(
                bytes(self._receive(protocol.CHUNK.size)))
            if head.is_error:
                failure = self._receive_error(head)
                refused = refused or failure
            elif head.kind != protocol.Chunk.NONE:
                yield head
            elif head.length:
                raise protocol.Violation('an empty chunk has a payload')
            if head.is_last:
                break
        if refused is not None:
            raise refused

    def _receive_error(self, head: protocol.ChunkHead
                       ) -> client_errors.Refused:
        if not 6 <= head.length <= _MAX_REPLY:
            raise protocol.Violation(f'an error of {head.length} bytes')
        data = self._receive(head.length)
        number, length = struct.unpack_from('>IH', data)
        return client_errors.Refused(500, self._message(
            f'error {number}: {_text(data[6:6 + length])}'))

    def _take(self, head: protocol.ChunkHead, target: memoryview,
              offset: int) -> tuple[int, int]:
        """Put a chunk of data or of zeros in its place; the place."""
        if head.kind == protocol.Chunk.OFFSET_HOLE and head.length == 12:
            where, length = struct.unpack('>QI', self._receive(12))
        elif head.kind == protocol.Chunk.OFFSET_DATA and head.length > 8:
            where, = struct.unpack('>Q', self._receive(8))
            length = head.length - 8
        else:
            raise protocol.Violation(
                f'a chunk of the kind {head.kind} with {head.length} bytes')
        begin, end = where - offset, where - offset + length
        if not 0 <= begin < end <= len(target):
            raise protocol.Violation('a chunk is outside of the range')
        if head.kind == protocol.Chunk.OFFSET_HOLE:
            target[begin:end] = bytes(length)
        else:
            self._fill(target[begin:end])
        return begin, end

    def _status(self, head: protocol.ChunkHead
                ) -> tuple[str, list[tuple[int, int]]]:
        if not 12 <= head.length <= _MAX_STATUS or head.length % 8 != 4:
            raise protocol.Violation(f'extents of {head.length} bytes')
        data = self._receive(head.length)
        number, = struct.unpack_from('>I', data)
        extents = list(struct.iter_unpack('>II', memoryview(data)[4:]))
        if number not in self._contexts or not all(
                length for length, _ in extents):
            raise protocol.Violation('extents of no context, or empty ones')
        return self._contexts[number], extents

    # -- haggling ----------------------------------------------------------

    def _haggle(self, export: bytes, contexts: list[bytes]) -> None:
        greeting = self._receive(len(protocol.GREETING))
        if greeting[:16] != protocol.GREETING[:16] or not greeting[17] & 1:
            raise protocol.Violation('this is not an NBD server')
        leaves_out = greeting[17] & protocol.NO_ZEROES
        self._send(protocol.CLIENT_FLAGS.pack(
            protocol.FIXED_NEWSTYLE | leaves_out))
        self._ask(protocol.option_request(protocol.Option.STRUCTURED_REPLY))
        if contexts:
            self._set_contexts(export, contexts)
        facts = {bytes(data[:2]): data[2:] for kind, data in self._ask(
            protocol.go_request(export)) if kind == protocol.Reply.INFO}
        size = facts.get(protocol.Info.EXPORT.to_bytes(2, 'big'), b'')
        if len(size) != 10:
            raise protocol.Violation('it does not say how large the disk is')
        self.size = int.from_bytes(size[:8], 'big')
        self.description = facts.get(
            protocol.Info.DESCRIPTION.to_bytes(2, 'big'), b'').decode(
                errors='replace')

    def _set_contexts(self, export: bytes, contexts: list[bytes]) -> None:
        for kind, data in self._ask(
                protocol.contexts_request(export, contexts)):
            if kind == protocol.Reply.META_CONTEXT and bytes(
                    data[4:]) in contexts:
                self._contexts[int.from_bytes(data[:4], 'big')] = (
                    data[4:].decode())
        missing = {text.decode() for text in contexts} - set(
            self._contexts.values())
        if missing:
            raise protocol.Violation(
                f'it does not have {", ".join(sorted(missing))}')

    def _ask(self, option: bytes) -> list[tuple[int, bytearray]]:
        """The replies to an option, without the end.

        :raises Refused: 404: the option is refused
        """
        self._send(option)
        replies: list[tuple[int, bytearray]] = []
        while len(replies) <= _MAX_REPLIES:
            kind, length = protocol.parse_option_reply(
                bytes(self._receive(protocol.OPTION_REPLY.size)))
            if length > _MAX_REPLY:
                raise protocol.Violation(f'a reply of {length} bytes')
            data = self._receive(length)
            if kind == protocol.Reply.ACK:
                return replies
            if kind >> 31:
                raise client_errors.Refused(404, _text(data) or self._message(
                    f'it refuses with {kind:#x}'))
            replies.append((kind, data))
        raise protocol.Violation('an option has too many replies')

    # -- talking -----------------------------------------------------------

    @contextlib.contextmanager
    def _talking(self):
        """Turn errors of the socket and of the protocol into the client's.

        What is left of an answer would be taken for the next one.
        """
        try:
            yield
        except OSError as e:
            self._hang_up()
            raise client_errors.DaemonUnavailable(
                self._message(e.strerror or e)) from e
        except protocol.Violation as e:
            self._hang_up()
            raise client_errors.BadAnswer(self._message(e)) from e

    def _message(self, why: object) -> str:
        return f'the NBD server at {self._path}: {why}'

    def _hang_up(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    def _send(self, data: bytes) -> None:
        if self._socket is None:
            raise ConnectionResetError('the connection was closed')
        self._socket.sendall(data)

    def _receive(self, length: int) -> bytearray:
        data = bytearray(length)
        self._fill(memoryview(data))
        return data

    def _fill(self, target: memoryview) -> None:
        if self._socket is None:
            raise ConnectionResetError('the connection was closed')
        while target:
            count = self._socket.recv_into(target)
            if not count:
                raise ConnectionResetError('it hung up')
            target = target[count:]


def _text(data: bytearray) -> str:
    return data.decode(errors='replace')[:_MAX_MESSAGE]
