# SPDX-License-Identifier: Apache-2.0

"""The HTTP/1.1 server: listeners, connections, deadlines, routes.

The server knows nothing of repositories. h11 parses and frames. The sockets
are the server's own, so that it knows a Unix socket's peer by its credentials
before it reads a byte, and so that each wait has a deadline and each buffer a
bound:

* a connection on which nothing comes is closed after ``idle_timeout``, and
  before that if another one needs its place (``connection_limits.py``);
* from a request's first byte on its whole header, at most 16 KiB, has to come
  within ``header_timeout``, however it drips; each 256 KiB of its body, whose
  length its route limits, within as long again;
* a request is checked before any of its body is received, and the bodies of
  all connections together have ``max_body_memory_mib`` of memory;
* a response is produced piece by piece, the next one when the client has taken
  the last; a client that takes nothing for ``write_timeout`` is cut off.

A listener either has routes, whose handlers get a request as a whole, or one
handler for all, which gets each as it came, and its body piece by piece: that
is for passing requests on. A client of it that sends nothing of a body for
``idle_timeout`` is cut off.

Everything runs in the event loop's thread, and handlers must not block it.
Nor must bytes that have arrived already: awaiting these is no wait, and a
client that sends faster than it is served would have the loop for itself. So
each await of a client's data lets all other tasks go on first: bytes
(``receive``), events of HTTP (``Parser``), and connections.

Only a body that threads make may be sent by them, too, as far as the socket
takes it at once (``Pour``): handing each piece over costs more than sending.
"""

import asyncio
import contextlib
import socket
from typing import Any

from oslo_log import log

from dedupd.http import connection_limits
from dedupd.http import http_connection
from dedupd.http import limited
from dedupd.http import listeners
from dedupd.http import messages

LOG = log.getLogger(__name__)
_STRANGERS = limited.Log(LOG)

# Seconds between two searches for connections of former operators.
_LOOK_SECONDS = 2.0
# Seconds without accepting after an error.
_REST_SECONDS = 0.1


class Server:
    """Accepts on all listeners and serves each connection in a task.

    :ivar shared: limits and counters that its connections share
    """

    def __init__(self, limits: messages.Limits) -> None:
        self.shared = http_connection.Shared(limits)
        self._limits = limits
        self._listeners: list[listeners.Listener] = []
        self._resting: dict[str, asyncio.TimerHandle] = {}
        self._searching: list[asyncio.Task] = []
        self._tasks: dict[asyncio.Task, listeners.Connection] = {}

    @property
    def connections(self) -> int:
        """The number of HTTP connections."""
        return sum(listener.places.taken for listener in self._listeners
                   if listener.other is None)

    def listening(self) -> dict[str, int]:
        """The number of connections of each listener, by its name."""
        return {listener.name: listener.places.taken
                for listener in self._listeners}

    def add(self, listener: listeners.Listener) -> None:
        """Start to accept on a listener."""
        self._listeners.append(listener)
        self._start_accepting(listener)
        if listener.tls is not None:
            self._searching.append(asyncio.create_task(self._look_after()))

    async def stop(self, seconds: float) -> None:
        """Accept no more, end idle connections, let responses finish.

        :param seconds: responses that run longer are cut off
        """
        self.shared.stopping.set()
        for timer in self._resting.values():
            timer.cancel()
        for listener in self._listeners:
            self._stop_accepting(listener)
            listener.sock.close()
        for task in self._searching:
            task.cancel()
        for task, connection in list(self._tasks.items()):
            if connection.idle:
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        left = list(self._tasks)
        if left:
            LOG.warning('%d connections are cut off.', len(left))
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=1.0)

    def _start_accepting(self, listener: listeners.Listener) -> None:
        asyncio.get_running_loop().add_reader(
            listener.sock, self._accept, listener)

    def _stop_accepting(self, listener: listeners.Listener) -> None:
        """Accept nothing more, not even what the event loop has seen already.

        ``sock_accept`` of asyncio fails then: it can be cancelled after the
        event loop has seen a connection, and accepts it nevertheless.
        """
        asyncio.get_running_loop().remove_reader(listener.sock)

    def _accept(self, listener: listeners.Listener) -> None:
        """Accept one connection; those before it have their turn then."""
        try:
            sock, address = listener.sock.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            # Out of descriptors or memory, or the peer left at once.
            _STRANGERS.warning('Cannot accept a connection: %s', e)
            self._stop_accepting(listener)
            self._resting[listener.name] = (
                asyncio.get_running_loop().call_later(
                    _REST_SECONDS, self._start_accepting, listener))
            return
        try:
            sock.setblocking(False)
            self._begin(listener, sock, address)
        except OSError:
            sock.close()

    async def _look_after(self) -> None:
        """End waiting connections of operators whose rights may have ended.

        Otherwise these would lose their rights at the next request. Operators
        with the rights connect again, and need not notice.
        """
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for task, connection in list(self._tasks.items()):
                if (isinstance(connection, http_connection.HTTPConnection)
                        and connection.idle and connection.outdated()):
                    task.cancel()

    def _begin(self, listener: listeners.Listener, sock: socket.socket,
               address: Any) -> None:
        uid = None
        if listener.allowed is not None:
            uid = listeners.peer_uid(sock)
            if not listener.allowed(uid):
                _STRANGERS.warning('User %d was refused at the socket.', uid)
                sock.close()
                return
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        else:
            # Fewer turns for each piece; the kernel takes what it allows.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        place = listener.places.take(
            listeners.peer_of(uid, address), self._limits.max_connections,
            self._limits.max_peer_connections)
        if place is None:
            self._refuse(listener, sock)
            return
        connection: listeners.Connection
        if listener.other is not None:
            connection = listener.other(sock, place)
        else:
            connection = http_connection.HTTPConnection(
                self.shared, listener, sock, uid, place)
        task = asyncio.create_task(connection.run())
        place.end = task.cancel
        self._tasks[task] = connection
        task.add_done_callback(lambda t: self._ended(t, sock, place))

    def _refuse(self, listener: listeners.Listener, sock: socket.socket
                ) -> None:
        """Answer 503 and close, without waiting for anything."""
        if listener.tls is None and listener.other is None:
            body = messages.error_body(messages.HTTPError(
                503, 'There are too many connections.'))
            with contextlib.suppress(OSError):
                sock.send(
                    b'HTTP/1.1 503 Service Unavailable\r\n'
                    b'Content-Type: %b\r\nContent-Length: %d\r\n'
                    b'Connection: close\r\n\r\n%b' % (
                        messages.JSON.encode(), len(body), body))
        sock.close()

    def _ended(self, task: asyncio.Task, sock: socket.socket,
               place: connection_limits.Place) -> None:
        place.leave()
        sock.close()    # of a task that was cancelled before it began, too
        self._tasks.pop(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error('A connection failed.', exc_info=task.exception())
