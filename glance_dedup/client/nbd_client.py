# SPDX-License-Identifier: Apache-2.0

"""A client of the daemon's NBD server, for ``glance-dedup mount``.

It reads one image, on one connection, one request at a time. The daemon keeps
the image as long as the connection lasts, even if the image is deleted. When
the daemon restarts, the client connects again, and goes on only if the image
is still of the same upload.
"""

import contextlib
import socket
import threading
import time

from glance_dedup.base import sockets
from glance_dedup.client import errors as client_errors
from glance_dedup.client import nbd_protocol as protocol

#: Seconds for the answer to a request; data of an image that is still on its
#: way may take a while.
ANSWER_SECONDS = 60.0
#: Seconds in which a daemon that went away must be back.
RETURN_SECONDS = 30.0
_PAUSE = 0.25
# The longest reply to an option.
_LONGEST_REPLY = 65536


class Export:
    """An image that can be read through the daemon. Thread-safe.

    :param path: the path of the daemon's NBD socket
    :param upload_id: the upload of which the image must be; None: of any
    :param return_seconds: in which a daemon that went away must be back; None:
        RETURN_SECONDS
    :raises client.DaemonUnavailable: nobody answers, or not in time
    :raises client.BadAnswer: the answer is not what a daemon sends
    :raises client.Refused: 404: there is no such image, or not of this
        upload; 500: the image cannot be read
    """

    def __init__(self, path: str, image_id: str,
                 upload_id: str | None,
                 return_seconds: float | None = None) -> None:
        self.size = 0
        self._path = path
        self._image_id = image_id
        self._upload_id = upload_id
        self._return_seconds = (
            RETURN_SECONDS if return_seconds is None else return_seconds)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False
        self._socket = self._connect()

    def read(self, length: int, offset: int) -> bytes:
        """Read `length` bytes; fewer only at the image's end.

        :raises: as the class
        """
        length = min(length, max(0, self.size - offset))
        if not length:
            return b''
        until = time.monotonic() + self._return_seconds
        with self._lock:
            while True:
                try:
                    if self._closed:
                        raise client_errors.DaemonUnavailable(
                            f'{self._path}: this connection was closed')
                    if self._socket is None:
                        self._socket = self._connect()
                    return self._ask(self._socket, length, offset)
                except client_errors.DaemonUnavailable:
                    self._hang_up()
                    if self._closed or time.monotonic() > until:
                        raise
                time.sleep(_PAUSE)

    def close(self) -> None:
        """Close the connection; the daemon drops the image. Idempotent."""
        self._closed = True
        with self._lock:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # -- talking -----------------------------------------------------------

    @contextlib.contextmanager
    def _talking(self):
        """Turn errors of the socket into DaemonUnavailable."""
        try:
            yield
        except OSError as e:
            raise client_errors.DaemonUnavailable(
                f'{self._path}: {e.strerror or e}') from e

    def _bad(self, why: str) -> client_errors.BadAnswer:
        self._hang_up()
        return client_errors.BadAnswer(f'{self._path}: {why}')

    @staticmethod
    def _receive(sock: socket.socket, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            number = sock.recv_into(view)
            if not number:
                raise ConnectionResetError('the daemon hung up')
            view = view[number:]
        return data

    def _ask(self, sock: socket.socket, length: int, offset: int) -> bytes:
        with self._talking():
            sock.sendall(protocol.request(
                protocol.Command.READ, length, offset))
            magic, error, _ = protocol.SIMPLE.unpack(
                self._receive(sock, protocol.SIMPLE.size))
            if magic != protocol.SIMPLE_MAGIC:
                raise self._bad(f'a reply begins with {magic:#010x}')
            if error:
                raise client_errors.Refused(
                    500, f'image {self._image_id} cannot be read at {offset}: '
                    "the daemon's log says why")
            return bytes(self._receive(sock, length))

    def _connect(self) -> socket.socket:
        with self._talking(), contextlib.ExitStack() as stack:
            sock = stack.enter_context(
                sockets.connect_unix(self._path, ANSWER_SECONDS))
            self._haggle(sock)
            stack.pop_all()
            return sock

    def _haggle(self, sock: socket.socket) -> None:
        if self._receive(sock, len(protocol.GREETING)) != protocol.GREETING:
            raise self._bad('this is not the NBD socket of a dedupd')
        sock.sendall(
            protocol.CLIENT_FLAGS.pack(protocol.FIXED_NEWSTYLE
                                       | protocol.NO_ZEROES)
            + protocol.go_request(self._image_id.encode(),
                                  protocol.Info.DESCRIPTION))
        size = description = None
        while True:
            kind, data = self._option_reply(sock)
            if kind == protocol.Reply.ACK:
                break
            if kind != protocol.Reply.INFO:
                raise client_errors.Refused(
                    404, data.decode(errors='replace')[:2000])
            info = int.from_bytes(data[:2], 'big')
            if info == protocol.Info.EXPORT and len(data) == 12:
                size = int.from_bytes(data[2:10], 'big')
            elif info == protocol.Info.DESCRIPTION:
                description = data[2:].decode(errors='replace')
        if size is None:
            raise self._bad('it does not say how large the image is')
        if self._upload_id is not None and (
                description != protocol.describe(self._upload_id)):
            raise client_errors.Refused(
                404, f'image {self._image_id} is not the one that it was')
        self.size = size

    def _option_reply(self, sock: socket.socket) -> tuple[int, bytes]:
        try:
            kind, length = protocol.parse_option_reply(
                bytes(self._receive(sock, protocol.OPTION_REPLY.size)))
        except protocol.Violation as e:
            raise self._bad(str(e)) from e
        if length > _LONGEST_REPLY:
            raise self._bad(f'a reply of {length} bytes')
        return kind, bytes(self._receive(sock, length))
