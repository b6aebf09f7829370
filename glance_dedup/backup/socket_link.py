# SPDX-License-Identifier: Apache-2.0

"""Messages between the ranks of one host, over Unix sockets.

Each rank has one socket to receive from, and for each other rank the sending
end of that rank's socket. The job makes all of them, and the ranks inherit
them, so no other process can send. A datagram is one message. The receiver
acknowledges it when it takes it out, and the sender waits for that.
"""

import collections
from collections.abc import Callable
import errno
import select
import socket
import struct
import sys
import time

from glance_dedup.backup import rank_exchange

# Kind, rank of the sender, and tag.
_HEAD = struct.Struct('<BHI')
_MESSAGE, _TAKEN, _ALIVE = range(3)
_SEND_BUFFER = 1 << 18
# Seconds that a rank which ends waits until others have what it sent.
_MAX_CLOSE = 60.0
_PAUSE = 0.01
# Errors of sending when there is no room, now or in the system's memory.
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)
# Errors of sending to a process that has died.
_DEAD = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE)

Pair = tuple[socket.socket, socket.socket]


def make_pair() -> Pair:
    """Return a rank's socket, and the one by which others send to it."""
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    return receiver, sender


class SocketLink:
    """The connection of a rank with the others on its host.

    :param receiver: this rank's socket
    :param senders: one for each rank, in order
    """

    def __init__(self, rank: int, receiver: socket.socket,
                 senders: list[socket.socket]) -> None:
        self.rank = rank
        self.size = len(senders)
        self._receiver = receiver
        self._senders = senders
        for link in (receiver, *senders):
            link.setblocking(False)
        # By rank: the datagrams that did not fit into its socket yet.
        self._unsent: dict[int, collections.deque[bytes]] = {}
        self._under_way: set[int] = set()
        # By tag: messages that were not taken out yet. Each rank has at most
        # one, since it waits until it is.
        self._arrived: dict[int, collections.deque[tuple[int, bytes]]] = {}
        self._alive = False

    def send(self, rank: int, tag: int, message: bytes) -> Callable[[], bool]:
        """Begin to send a message; no other is under way to that rank.

        :returns: a function that returns whether the rank has taken it
        """
        self._under_way.add(rank)
        self._post(rank, _MESSAGE, tag, message)

        def is_taken() -> bool:
            self._work()
            return rank not in self._under_way
        return is_taken

    def receive(self, tag: int) -> tuple[int, bytes] | None:
        """Take out a message; None: none has come."""
        self._work()
        arrived = self._arrived.get(tag)
        if not arrived:
            return None
        source, message = arrived.popleft()
        self._post(source, _TAKEN, tag, b'')
        return source, message

    def show_life(self) -> None:
        """Send the others a sign of life, unless much waits already.

        While a rank works alone, this also sends what waits, and takes in what
        came: else the socket would stay full of signs.
        """
        self._work()
        for rank in set(range(self.size)) - {self.rank} - self._unsent.keys():
            self._post(rank, _ALIVE, 0, b'')

    def take_signs(self) -> bool:
        """Return whether there was a sign of life since the last call."""
        self._work()
        alive, self._alive = self._alive, False
        return alive

    def wait(self, seconds: float) -> None:
        """Wait until there may be something to do."""
        select.select([self._receiver],
                      [self._senders[rank] for rank in self._unsent], [],
                      seconds)

    def close(self) -> None:
        """Send what waits, and close the sockets."""
        deadline = time.monotonic() + _MAX_CLOSE
        while self._unsent and time.monotonic() < deadline:
            self.wait(_PAUSE)
            self._work()
        for link in (self._receiver, *self._senders):
            link.close()

    def abort(self, status: int) -> None:
        """End this rank; the job ends the others."""
        sys.exit(status)

    def _post(self, rank: int, kind: int, tag: int, message: bytes) -> None:
        self._unsent.setdefault(rank, collections.deque()).append(
            _HEAD.pack(kind, self.rank, tag) + message)
        self._send_to(rank)

    def _send_to(self, rank: int) -> None:
        waiting = self._unsent[rank]
        while waiting:
            try:
                self._senders[rank].send(waiting[0])
            except OSError as e:
                if e.errno in _FULL:
                    return
                # If the rank has died, the job ends all others.
                if e.errno not in _DEAD:
                    raise
            waiting.popleft()
        del self._unsent[rank]

    def _work(self) -> None:
        """Send and receive everything that is possible now."""
        for rank in list(self._unsent):
            self._send_to(rank)
        while True:
            try:
                data = self._receiver.recv(
                    _HEAD.size + rank_exchange.max_message())
            except BlockingIOError:
                return
            kind, source, tag = _HEAD.unpack_from(data)
            if kind == _MESSAGE:
                self._arrived.setdefault(tag, collections.deque()).append(
                    (source, data[_HEAD.size:]))
            elif kind == _TAKEN:
                self._under_way.discard(source)
            else:
                self._alive = True
