# SPDX-License-Identifier: Apache-2.0

"""A socket on which every read ends by a deadline."""

import contextlib
import io
import os
import select
import socket
import time
from typing import Any
import weakref

from glance_dedup.base import forks

# The most descriptors that are taken with one message.
_DESCRIPTORS = 4
# The child of a fork closes these.
_channels: 'weakref.WeakSet[Channel]' = weakref.WeakSet()


class Channel(io.RawIOBase):
    """A socket on which every read ends by a deadline.

    http.client parses an answer from this object as from a file. Closing the
    file does not close the socket, which may serve further requests.

    The child of a fork closes it: two readers of one stream would each get
    some of the bytes, and the peer would not notice when one of them closes.
    """

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self.deadline = 0.0
        self.received = 0
        _channels.add(self)

    def makefile(self, mode: str) -> io.BufferedReader:
        """A buffered reader for http.client, which also keeps the deadline."""
        return io.BufferedReader(self, 1 << 16)

    def readable(self) -> bool:
        return True

    def _wait(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError('no answer in time')
        self._socket.settimeout(left)

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; 0 at the end.

        :raises OSError: TimeoutError, if nothing came by the deadline
        """
        self._wait()
        number = self._socket.recv_into(buffer)
        self.received += number
        return number

    def receive(self, length: int) -> bytes:
        """The next bytes, no more and no fewer.

        :raises OSError: the connection ended, or as for `readinto`
        """
        data = bytearray(length)
        done = 0
        while done < length:
            number = self.readinto(memoryview(data)[done:])
            if not number:
                raise ConnectionResetError('the connection ended')
            done += number
        return bytes(data)

    def receive_descriptors(self, length: int) -> tuple[bytes, list[int]]:
        """The next bytes, and the descriptors that come with the first.

        The caller closes them.

        :raises OSError: as for `receive`; no descriptor is open then
        """
        self._wait()
        data, descriptors, _, _ = socket.recv_fds(
            self._socket, length, _DESCRIPTORS)
        try:
            for fd in descriptors:
                os.set_inheritable(fd, False)
            if not data:
                raise ConnectionResetError('the connection ended')
            self.received += len(data)
            return data + self.receive(length - len(data)), descriptors
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise

    def send(self, data: bytes) -> None:
        """Send all of the data by the deadline.

        :raises OSError: TimeoutError, if the peer did not take them in time
        """
        self._wait()
        # The limit is for all data together.
        self._socket.sendall(data)

    def close(self) -> None:
        """Do nothing: http.client calls this at the end of an answer."""

    def usable(self) -> bool:
        """Return whether a request can be sent: open, and nothing to read."""
        try:
            poll = select.poll()
            poll.register(self._socket)
            return not [event for _, event in poll.poll(0)
                        if event & ~select.POLLOUT]
        except (OSError, ValueError):
            return False

    def is_whole(self) -> bool:
        """Return whether the peer of a Unix socket has kept the connection."""
        try:
            # Nothing is sent, but to an ended connection it fails. In a
            # process that eventlet has patched, there is no select.poll.
            self._socket.send(b'')
        except OSError:
            return False
        return True

    def break_off(self) -> None:
        """End any reading or sending, also in another thread."""
        with contextlib.suppress(OSError):
            # Over TLS, only the shutdown of the plain socket wakes a thread.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def __del__(self) -> None:
        # RawIOBase's would call `close`.
        if hasattr(self, '_socket'):
            self.hang_up()


def _close_inherited() -> None:
    for channel in list(_channels):
        channel._socket.close()


forks.register(_close_inherited)
