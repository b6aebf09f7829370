# SPDX-License-Identifier: Apache-2.0

"""A client of NBD servers, which reads a disk and requests its extents.

The servers are dedupd's and QEMU's. One connection, one request at a time. The
server answers in chunks (structured replies), so that a hole comes without its
zeros. Metadata contexts list the holes (``base:allocation``), and
the dirty ones of a bitmap (``qemu:dirty-bitmap:<name>``).

libnbd does the same and more. Its Python module is not on PyPI, and Debian's
is for the system's Python alone; the library with its needs takes 2.5 MiB
of a process that may have 35. The messages are in `nbd_protocol.py` anyway.
"""

from collections.abc import Iterable
import contextlib
import socket
import struct
from typing import Any

from glance_dedup.base import closing
from glance_dedup.base import sockets
from glance_dedup.client import client_errors
from glance_dedup.client import nbd_protocol

#: The context of holes, and the bits of its extents.
ALLOCATION = nbd_protocol.CONTEXT.decode()
HOLE = 1
ZERO = 2
#: Prefix of a bitmap's name in the name of its context, and its bit.
BITMAP_PREFIX = nbd_protocol.CHANGES_PREFIX.decode()
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
            self._send(nbd_protocol.request(
                nbd_protocol.Command.READ, len(target), offset))
            ranges = [found for head in self._chunks()
                      if (found := self._take(head, target, offset))]
            at = 0
            for begin, end in sorted(ranges):
                if begin != at:
                    break
                at = end
            if at != len(target):
                raise nbd_protocol.Violation(
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
            self._send(nbd_protocol.request(
                nbd_protocol.Command.BLOCK_STATUS, length, offset))
            for head in self._chunks():
                if head.kind != nbd_protocol.Chunk.BLOCK_STATUS:
                    raise nbd_protocol.Violation(
                        f'a chunk of the kind {head.kind}')
                context, extents = self._status(head)
                found[context] = extents
            if len(found) != len(self._contexts):
                raise nbd_protocol.Violation('a metadata context is missing')
        return found

    def close(self) -> None:
        """Close the connection. Idempotent."""
        sock, self._socket = self._socket, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.sendall(nbd_protocol.request(nbd_protocol.Command.DISC, 0,
                                                  0))
            sock.close()

    # -- the answers -------------------------------------------------------

    def _chunks(self) -> Iterable[nbd_protocol.ChunkHead]:
        """The heads of an answer; the caller receives the payload of each.

        :raises Refused: the answer is an error, all of which was received
        """
        refused = None
        while True:
            head = nbd_protocol.parse_chunk(
                bytes(self._receive(nbd_protocol.CHUNK.size)))
            if head.is_error:
                failure = self._receive_error(head)
                refused = refused or failure
            elif head.kind != nbd_protocol.Chunk.NONE:
                yield head
            elif head.length:
                raise nbd_protocol.Violation('an empty chunk has a payload')
            if head.is_last:
                break
        if refused is not None:
            raise refused

    def _receive_error(self, head: nbd_protocol.ChunkHead
                       ) -> client_errors.Refused:
        if not 6 <= head.length <= _MAX_REPLY:
            raise nbd_protocol.Violation(f'an error of {head.length} bytes')
        data = self._receive(head.length)
        number, length = struct.unpack_from('>IH', data)
        return client_errors.Refused(500, self._message(
            f'error {number}: {_text(data[6:6 + length])}'))

    def _take(self, head: nbd_protocol.ChunkHead, target: memoryview,
              offset: int) -> tuple[int, int]:
        """Put a chunk of data or of zeros in its place; the place."""
        if head.kind == nbd_protocol.Chunk.OFFSET_HOLE and head.length == 12:
            where, length = struct.unpack('>QI', self._receive(12))
        elif head.kind == nbd_protocol.Chunk.OFFSET_DATA and head.length > 8:
            where, = struct.unpack('>Q', self._receive(8))
            length = head.length - 8
        else:
            raise nbd_protocol.Violation(
                f'a chunk of the kind {head.kind} with {head.length} bytes')
        begin, end = where - offset, where - offset + length
        if not 0 <= begin < end <= len(target):
            raise nbd_protocol.Violation('a chunk is outside of the range')
        if head.kind == nbd_protocol.Chunk.OFFSET_HOLE:
            target[begin:end] = bytes(length)
        else:
            self._fill(target[begin:end])
        return begin, end

    def _status(self, head: nbd_protocol.ChunkHead
                ) -> tuple[str, list[tuple[int, int]]]:
        if not 12 <= head.length <= _MAX_STATUS or head.length % 8 != 4:
            raise nbd_protocol.Violation(f'extents of {head.length} bytes')
        data = self._receive(head.length)
        number, = struct.unpack_from('>I', data)
        extents = list(struct.iter_unpack('>II', memoryview(data)[4:]))
        if number not in self._contexts or not all(
                length for length, _ in extents):
            raise nbd_protocol.Violation(
                'extents of no context, or empty ones')
        return self._contexts[number], extents

    # -- haggling ----------------------------------------------------------

    def _haggle(self, export: bytes, contexts: list[bytes]) -> None:
        greeting = self._receive(len(nbd_protocol.GREETING))
        if greeting[:16] != nbd_protocol.GREETING[:16] or not greeting[17] & 1:
            raise nbd_protocol.Violation('this is not an NBD server')
        leaves_out = greeting[17] & nbd_protocol.NO_ZEROES
        self._send(nbd_protocol.CLIENT_FLAGS.pack(
            nbd_protocol.FIXED_NEWSTYLE | leaves_out))
        self._ask(nbd_protocol.option_request(
            nbd_protocol.Option.STRUCTURED_REPLY))
        if contexts:
            self._set_contexts(export, contexts)
        answers = self._ask(nbd_protocol.go_request(export))
        facts = {bytes(data[:2]): data[2:] for kind, data in answers
                 if kind == nbd_protocol.Reply.INFO}
        size = facts.get(nbd_protocol.Info.EXPORT.to_bytes(2, 'big'), b'')
        if len(size) != 10:
            raise nbd_protocol.Violation(
                'it does not say how large the disk is')
        self.size = int.from_bytes(size[:8], 'big')
        self.description = facts.get(
            nbd_protocol.Info.DESCRIPTION.to_bytes(2, 'big'), b'').decode(
                errors='replace')

    def _set_contexts(self, export: bytes, contexts: list[bytes]) -> None:
        for kind, data in self._ask(
                nbd_protocol.contexts_request(export, contexts)):
            if kind == nbd_protocol.Reply.META_CONTEXT and bytes(
                    data[4:]) in contexts:
                self._contexts[int.from_bytes(data[:4], 'big')] = (
                    data[4:].decode())
        missing = {text.decode() for text in contexts} - set(
            self._contexts.values())
        if missing:
            raise nbd_protocol.Violation(
                f'it does not have {", ".join(sorted(missing))}')

    def _ask(self, option: bytes) -> list[tuple[int, bytearray]]:
        """The replies to an option, without the end.

        :raises Refused: 404: the option is refused
        """
        self._send(option)
        replies: list[tuple[int, bytearray]] = []
        while len(replies) <= _MAX_REPLIES:
            kind, length = nbd_protocol.parse_option_reply(
                bytes(self._receive(nbd_protocol.OPTION_REPLY.size)))
            if length > _MAX_REPLY:
                raise nbd_protocol.Violation(f'a reply of {length} bytes')
            data = self._receive(length)
            if kind == nbd_protocol.Reply.ACK:
                return replies
            if kind >> 31:
                raise client_errors.Refused(404, _text(data) or self._message(
                    f'it refuses with {kind:#x}'))
            replies.append((kind, data))
        raise nbd_protocol.Violation('an option has too many replies')

    # -- talking -----------------------------------------------------------

    @contextlib.contextmanager
    def _talking(self):
        """Turn errors of the socket and of the protocol into the client's.

        The rest of an answer would be taken for the next one.
        """
        try:
            yield
        except OSError as e:
            self._hang_up()
            raise client_errors.DaemonUnavailable(
                self._message(e.strerror or e)) from e
        except nbd_protocol.Violation as e:
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
