#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""The HTTP/1.1 server: listeners, connections, deadlines, routes.

It knows nothing of repositories. h11 parses and frames; the sockets are the
server's own, so that a peer on a Unix socket is told from its credentials
before a byte is read, and so that each wait has a deadline and each buffer a
bound:

* a connection on which nothing comes is closed after ``idle_timeout``, and
  before that if another one needs its place (``connections.py``);
* from a request's first byte on its whole header, at most 16 KiB, has to come
  within ``header_timeout``, however it drips; each 256 KiB of its body, which
  has at most what its route allows, within as long again;
* whether a request is allowed is asked before any of its body is received, and
  the bodies of all connections together have ``bodies_mib`` of memory;
* a response is produced piece by piece, the next one when the client has taken
  the last; a client that takes nothing for ``write_timeout`` is cut off.

A listener either has routes, whose handlers get a request as a whole, or one
handler for all, which gets each as it came, and its body piece by piece: that
is for passing requests on. A client of it that sends nothing of a body for
``idle_timeout`` is cut off.

Everything runs in the event loop's thread, and handlers must not block it.
Nor must what has arrived already: awaiting that is no wait, and a client that
sends faster than it is served would have the loop for itself. So whatever is
awaited of a client lets all others go on first: bytes (``receive``), events of
HTTP (``Parser``), and connections.

Only a body that threads make may be sent by them, too, as far as the socket
takes it at once (``Pour``): handing each piece over costs more than sending.
"""

import asyncio
import collections
from collections.abc import AsyncGenerator
from collections.abc import AsyncIterator
from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Hashable
import contextlib
import dataclasses
import email.utils
import errno
import http
import ipaddress
import json
import os
import socket
import ssl
import stat
import struct
from typing import Any
from typing import Protocol
import urllib.parse

import h11
from oslo_log import log

from dedupd.http import connections as connections_module

LOG = log.getLogger(__name__)

#: Bytes of a request's header at most.
HEADER_LIMIT = 16384

_RECEIVE = 65536
# So much of a body has as long as a header.
_PACE = 262144
_TLS_PIECE = 262144
# How often connections are looked through for operators who are none now.
_LOOK_SECONDS = 2.0
# What whoever found no room is told to wait.
_RETRY_SECONDS = 5
# What is still read, and thrown away, after a response that did not wait for
# its request's body: closing with unread bytes would destroy the response.
_LINGER_BYTES = 4 << 20
_LINGER_SECONDS = 2.0
_JSON = 'application/json'


class Limits(Protocol):
    """Options of the server; read each time, since they may change."""

    max_connections: int
    max_peer_connections: int
    bodies_mib: int
    header_timeout: float
    idle_timeout: float
    write_timeout: float


class HTTPError(Exception):
    """A request ends with this status and a sentence."""

    def __init__(self, status: int, message: str,
                 headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers or {}


class Disconnected(Exception):
    """The peer is gone, or was too slow."""


class CertificateRefused(Disconnected):
    """The peer's certificate is no good; the message says why."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """Who is at the other end."""

    listener: str
    uid: int | None = None
    """Of a peer on a Unix socket."""
    operator: bool = False
    """It has a certificate of the operators' authority, by what is trusted
    now."""


@dataclasses.dataclass
class Request:
    method: str
    query: dict[str, str]
    headers: dict[str, str]
    """By name in lower case."""
    peer: Peer
    body: bytes = b''

    def json(self) -> Any:
        """The body, which must be JSON; None if there is none.

        :raises HTTPError: 400
        """
        if not self.body:
            return None
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise HTTPError(400, 'The body is not JSON.')


@dataclasses.dataclass
class Message:
    """A request as it came, to be passed on."""

    method: str
    target: str
    """Path and query."""
    headers: list[tuple[bytes, bytes]]
    """Names as they were written."""
    peer: Peer
    body: AsyncGenerator[bytes, None] | None
    """Its pieces; to be closed. None: it has no body. It may raise what ends
    the connection."""


@dataclasses.dataclass
class Response:
    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes | AsyncGenerator[Any, 'Pour | None'] = b''
    """Bytes, or a generator of pieces; each may be changed by the generator
    when the next one is asked for. It is closed in any case. What it is sent
    for each piece is by what it may send some of the next bytes itself."""
    length: int | None = None
    """Of what a generator yields, or a GET would; None: it is not known
    beforehand."""
    relayed: list[tuple[bytes, bytes]] | None = None
    """The header of another server's response: all of it, but for what h11
    adds to frame the body, is sent in the place of `headers`."""
    reason: bytes | None = None
    """None: the usual one of the status."""


def json_response(value: Any, status: int = 200) -> Response:
    return Response(status, {'Content-Type': _JSON},
                    json.dumps(value, separators=(',', ':')).encode() + b'\n')


def error_response(error: HTTPError) -> Response:
    response = json_response({'error': {
        'code': error.status,
        'title': http.HTTPStatus(error.status).phrase,
        'message': error.message}}, error.status)
    response.headers |= error.headers
    return response


# -- routes -------------------------------------------------------------------

Handler = Callable[..., Awaitable[Response]]


#: What a request with its body and its handler is within.
Admit = Callable[..., contextlib.AbstractAsyncContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Route:
    handler: Handler
    body_limit: int
    admit: Admit


def _admit_all(request: Request, **arguments: str
               ) -> contextlib.AbstractAsyncContextManager[None]:
    return contextlib.nullcontext()


class Router:
    """Finds the handler of a method and a path."""

    def __init__(self) -> None:
        self._routes: list[tuple[list[str], dict[str, Route]]] = []

    def add(self, method: str, path: str, handler: Handler,
            body_limit: int = 0, admit: Admit = _admit_all) -> None:
        """Add a route; GET answers HEAD, too.

        :param path: its segments in braces match any one segment, and are
            keyword arguments of the handler
        :param body_limit: bytes that a request's body may have
        :param admit: called with what the handler is, before the body is
            received; what it returns is left after the handler
        """
        segments = path.split('/')[1:]
        for known, methods in self._routes:
            if known == segments:
                break
        else:
            methods = {}
            self._routes.append((segments, methods))
        methods[method] = Route(handler, body_limit, admit)
        if method == 'GET':
            methods['HEAD'] = methods['GET']

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The route of a path as it stands in a request, and its arguments.

        :raises HTTPError: 404 or 405
        """
        # Split first: an encoded slash is none.
        try:
            given = [urllib.parse.unquote(s, errors='strict')
                     for s in path.split('/')[1:]]
        except UnicodeDecodeError:
            raise HTTPError(404, 'There is nothing here.')
        for segments, methods in self._routes:
            if len(segments) != len(given):
                continue
            arguments = {}
            for want, have in zip(segments, given):
                if want.startswith('{'):
                    arguments[want[1:-1]] = have
                elif want != have:
                    break
            else:
                if method not in methods:
                    raise HTTPError(
                        405, f'{method} is not possible here.',
                        {'Allow': ', '.join(sorted(methods))})
                return methods[method], arguments
        raise HTTPError(404, 'There is nothing here.')


#: What serves all that comes to a listener.
Relay = Callable[[Message], Awaitable[Response]]


# -- streams ------------------------------------------------------------------

class Parser(h11.Connection):
    """What a peer sends, as h11 takes it to pieces.

    It adds what h11 0.14 lacks: the end of each chunk of a body is looked at
    (CVE-2025-43859), and a length has no more digits than Python takes.
    """

    _fresh = False
    _chunk_ends = False

    def receive_data(self, data: bytes) -> None:
        super().receive_data(data)
        self._fresh = True

    async def event(self) -> Any:
        """The next event; others go on first."""
        # As they did before the first one, when its bytes were received.
        if not self._fresh:
            await asyncio.sleep(0)
        self._fresh = False
        return self.next_event()

    def next_event(self) -> Any:
        if self._chunk_ends:
            data, over = self.trailing_data
            if not over and data in (b'', b'\r'):
                return h11.NEED_DATA
            if data[:2] != b'\r\n':
                raise h11.RemoteProtocolError('a chunk does not end')
        try:
            event = super().next_event()
        except ValueError:
            raise h11.RemoteProtocolError('bad Content-Length')
        self._chunk_ends = isinstance(event, h11.Data) and event.chunk_end
        return event


class Pour:
    """Sends bytes of a body, in any thread, as many as go without waiting.

    One thread at a time, and none while the body has yielded a piece.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sent = 0

    def __call__(self, view: memoryview) -> int:
        """How many of the bytes were sent; 0: the next piece is to wait.

        :raises Disconnected: the peer is gone
        """
        try:
            sent = self._sock.send(view)
        except BlockingIOError:
            return 0
        except OSError as e:
            raise Disconnected(str(e))
        self._sent += sent
        return sent

    def take(self) -> '_Sent':
        """What was sent since this was asked last."""
        sent, self._sent = self._sent, 0
        return _Sent(sent)


class _Sent:
    """Stands for bytes that are sent already, where h11 counts them."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


class SocketStream:
    """A connected socket that does not block."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def receive(self) -> bytes:
        """What comes next, after others went on; b'' at the end."""
        await asyncio.sleep(0)
        try:
            return await self._loop.sock_recv(self._sock, _RECEIVE)
        except OSError as e:
            raise Disconnected(str(e))

    async def send(self, data: Any, timeout: float) -> None:
        """Send all; the time limit is for each bit of progress."""
        view = memoryview(data).cast('B')
        while view:
            try:
                view = view[self._sock.send(view):]
            except BlockingIOError:
                await self._writable(timeout)
            except OSError as e:
                raise Disconnected(str(e))

    async def _writable(self, timeout: float) -> None:
        future = self._loop.create_future()

        def finish(value: bool) -> None:
            if not future.done():
                future.set_result(value)

        timer = self._loop.call_later(timeout, finish, False)
        self._loop.add_writer(self._sock, finish, True)
        try:
            if not await future:
                raise Disconnected('it takes nothing')
        finally:
            timer.cancel()
            self._loop.remove_writer(self._sock)

    def pour(self) -> Pour | None:
        """For threads to send by; None: they cannot."""
        return Pour(self._sock)

    def abort(self) -> None:
        """Have closing be no end, but an error to the peer."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER,
                                  struct.pack('ii', 1, 0))

    async def finish(self, timeout: float) -> None:
        """Tell the peer that nothing more comes."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()


class TLSStream:
    """TLS over a SocketStream.

    :param server: whose name its certificate has to have; None: that is us
    """

    def __init__(self, stream: SocketStream, context: ssl.SSLContext,
                 server: str | None = None) -> None:
        self._stream = stream
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._in, self._out, server_side=server is None,
            server_hostname=server)

    async def handshake(self, timeout: float) -> None:
        """:raises Disconnected: with the reason, also if it is ours"""
        while True:
            try:
                self._tls.do_handshake()
                return await self._flush(timeout)
            except ssl.SSLWantReadError:
                await self._flush(timeout)
                await self._fill()
            except ssl.SSLError as e:
                # The alert says why.
                with contextlib.suppress(Disconnected):
                    await self._flush(timeout)
                if isinstance(e, ssl.SSLCertVerificationError):
                    raise CertificateRefused(
                        f'{e.verify_message} ({e.reason})')
                raise Disconnected(f'no TLS: {e.reason or e}')

    def has_certificate(self) -> bool:
        """Whether the peer has one, which was verified then."""
        return bool(self._tls.getpeercert())

    async def receive(self) -> bytes:
        """As that of a SocketStream."""
        # Of the bytes below, there may be thousands of records.
        await asyncio.sleep(0)
        while True:
            try:
                return self._tls.read(_RECEIVE)
            except ssl.SSLWantReadError:
                await self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b''
            except ssl.SSLError as e:
                raise Disconnected(f'TLS: {e.reason or e}')

    async def send(self, data: Any, timeout: float) -> None:
        view = memoryview(data).cast('B')
        while view:
            try:
                view = view[self._tls.write(view[:_TLS_PIECE]):]
            except ssl.SSLError as e:
                raise Disconnected(f'TLS: {e.reason or e}')
            await self._flush(timeout)

    def pour(self) -> None:
        return None

    def abort(self) -> None:
        self._stream.abort()

    async def finish(self, timeout: float) -> None:
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        with contextlib.suppress(Disconnected):
            await self._flush(timeout)
        await self._stream.finish(timeout)

    async def _fill(self) -> None:
        data = await self._stream.receive()
        if data:
            self._in.write(data)
        else:
            self._in.write_eof()

    async def _flush(self, timeout: float) -> None:
        if self._out.pending:
            await self._stream.send(self._out.read(), timeout)

    def close(self) -> None:
        self._stream.close()


# -- memory -------------------------------------------------------------------

class Bodies:
    """The memory that the bodies of all requests have together.

    A request gets all that its body may need before the body is received, so
    that no two wait for each other. A body that is no larger than a header
    waits for nothing: control is possible while large ones have everything.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = 0
        self._waiting: collections.deque[tuple[asyncio.Future, int]] = (
            collections.deque())

    @contextlib.asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Have so many bytes, in the order of those who ask.

        :raises HTTPError: 503: there was no room in time
        """
        if size <= HEADER_LIMIT:
            yield
            return
        await self._wait(size)
        try:
            yield
        finally:
            self._give_back(size)

    async def _wait(self, size: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((future, size))
        self._grant()
        try:
            async with asyncio.timeout(self._limits.header_timeout):
                await future
        except BaseException as e:
            if future.done() and not future.cancelled():
                self._give_back(size)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove((future, size))
                self._grant()
            if isinstance(e, TimeoutError):
                raise HTTPError(
                    503, 'Too many bodies of requests are being received.',
                    {'Retry-After': str(_RETRY_SECONDS)})
            raise

    def _give_back(self, size: int) -> None:
        self._held -= size
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            future, size = self._waiting[0]
            room = (self._limits.bodies_mib << 20) - self._held
            if self._held and size > room:
                break
            self._waiting.popleft()
            if not future.done():
                self._held += size
                future.set_result(None)


# -- listeners ----------------------------------------------------------------

class Connection(Protocol):
    """What serves one connection.

    :ivar idle: it may be cut off now
    """

    idle: bool

    async def run(self) -> None:
        """Serve it to its end, and close its socket."""


@dataclasses.dataclass
class Listener:
    """A socket that listens, and what is served on it.

    :ivar router: None: something else than HTTP is spoken
    :ivar allowed: for a Unix socket: whether a user id may connect
    :ivar tls: gives the context for a new connection, and what makes an
        operator now, to be compared; None: no TLS
    :ivar other: makes a connection on which something else is spoken
    """

    name: str
    sock: socket.socket
    router: Router | Relay | None
    allowed: Callable[[int], bool] | None = None
    tls: Callable[[], tuple[ssl.SSLContext, bytes]] | None = None
    other: Callable[[socket.socket, connections_module.Place],
                    Connection] | None = None
    places: connections_module.Places = dataclasses.field(
        default_factory=connections_module.Places)

    def is_meant(self, host: str) -> bool:
        """Whether a request with this Host is for us, by its looks.

        A page of elsewhere can have its own name lead to the loopback
        interface of whoever reads it, and then ask us as if we were it. We
        have no name of our own to compare with where others reach us.
        """
        if self.tls is not None or self.sock.family == socket.AF_UNIX or (
                not _is_loopback(self.sock.getsockname()[0])):
            return True
        try:
            name = urllib.parse.urlsplit(f'//{host}').hostname or ''
        except ValueError:
            return False
        return name in ('', 'localhost') or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def listen_unix(path: str, mode: int) -> socket.socket:
    """A listening socket at a path, in the place of one that nobody serves.

    :raises OSError: EADDRINUSE if somebody does; EEXIST if there is something
        else than a socket, which is left alone
    """
    temporary = f'{path}.{os.getpid()}'
    for place in (path, temporary):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(place).st_mode):
                raise OSError(errno.EEXIST,
                              f'{place} is there, and not a socket')
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            pass
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    sock = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        umask = os.umask(0o177)
        try:
            sock.bind(temporary)
        finally:
            os.umask(umask)
        os.chmod(temporary, mode)
        sock.listen(1024)
        # It gets its name when it has its mode, and when it answers.
        os.rename(temporary, path)
    except BaseException:
        sock.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sock.setblocking(False)
    return sock


def listen_tcp(address: str) -> socket.socket:
    """A listening socket at ADDRESS:PORT."""
    host, _, port = address.rpartition(':')
    found = socket.getaddrinfo(host.strip('[]'), int(port),
                               type=socket.SOCK_STREAM,
                               flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _peer_uid(sock: socket.socket) -> int:
    _, uid, _ = struct.unpack('iII', sock.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid


def peer_of(uid: int | None, address: Any) -> Hashable:
    """Who it is that has so many connections and no more.

    Of IPv6 all addresses of a network of 64 bits, which one host may have.
    """
    if uid is not None:
        return uid
    ip = ipaddress.ip_address(address[0].partition('%')[0])
    ip = getattr(ip, 'ipv4_mapped', None) or ip
    return ipaddress.ip_network((ip, 32 if ip.version == 4 else 64),
                                strict=False)


# -- the server ---------------------------------------------------------------

class Server:
    """Accepts on all listeners and serves each connection in a task.

    :ivar requests: that were answered
    :ivar sent: bytes of what was read to be sent, so of images
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.bodies = Bodies(limits)
        self.requests = 0
        self.sent = 0
        self.stopping = asyncio.Event()
        self._listeners: list[Listener] = []
        self._accepting: list[asyncio.Task] = []
        self._tasks: dict[asyncio.Task, Connection] = {}

    @property
    def connections(self) -> int:
        """Of HTTP."""
        return sum(listener.places.taken for listener in self._listeners
                   if listener.other is None)

    def add(self, listener: Listener) -> None:
        """Start to accept on a listener."""
        self._listeners.append(listener)
        self._accepting.append(asyncio.create_task(self._accept(listener)))
        if listener.tls is not None:
            self._accepting.append(asyncio.create_task(self._look_after()))

    async def stop(self, seconds: float) -> None:
        """Accept no more, end idle connections, let responses finish.

        :param seconds: after which what still runs is cut off
        """
        self.stopping.set()
        for task in self._accepting:
            task.cancel()
        for listener in self._listeners:
            listener.sock.close()
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

    async def _accept(self, listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener.sock)
            except OSError as e:
                # Out of descriptors or memory, or the peer left at once.
                LOG.warning('Cannot accept a connection: %s', e)
                await asyncio.sleep(0.1)
                continue
            try:
                self._begin(listener, sock, address)
            except OSError:
                sock.close()
            # There may be another already; those before it go on first.
            await asyncio.sleep(0)

    async def _look_after(self) -> None:
        """End waiting connections of operators who may be none any more.

        They would lose their rights at the next request. So that those who
        keep them need not notice, they connect anew instead.
        """
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for task, connection in list(self._tasks.items()):
                if (isinstance(connection, _Connection) and connection.idle
                        and connection.outdated()):
                    task.cancel()

    def _begin(self, listener: Listener, sock: socket.socket,
               address: Any) -> None:
        uid = None
        if listener.allowed is not None:
            uid = _peer_uid(sock)
            if not listener.allowed(uid):
                LOG.warning('User %d was refused at the socket.', uid)
                sock.close()
                return
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        else:
            # Fewer turns for each piece; the kernel takes what it allows.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        place = listener.places.take(
            peer_of(uid, address), self.limits.max_connections,
            self.limits.max_peer_connections)
        if place is None:
            self._refuse(listener, sock)
            return
        connection: Connection
        if listener.other is not None:
            connection = listener.other(sock, place)
        else:
            connection = _Connection(self, listener, sock, uid, place)
        task = asyncio.create_task(connection.run())
        place.end = task.cancel
        self._tasks[task] = connection
        task.add_done_callback(lambda t: self._ended(t, sock, place))

    def _refuse(self, listener: Listener, sock: socket.socket) -> None:
        """Answer 503 and close, without waiting for anything."""
        if listener.tls is None and listener.other is None:
            response = error_response(HTTPError(
                503, 'There are too many connections.'))
            with contextlib.suppress(OSError):
                sock.send(
                    b'HTTP/1.1 503 Service Unavailable\r\n'
                    b'Content-Type: %b\r\nContent-Length: %d\r\n'
                    b'Connection: close\r\n\r\n%b' % (
                        _JSON.encode(), len(response.body), response.body))
        sock.close()

    def _ended(self, task: asyncio.Task, sock: socket.socket,
               place: connections_module.Place) -> None:
        place.leave()
        sock.close()    # of a task that was cancelled before it began, too
        self._tasks.pop(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error('A connection failed.', exc_info=task.exception())


class _Connection:
    """One connection: its requests, one after the other."""

    def __init__(self, server: Server, listener: Listener,
                 sock: socket.socket, uid: int | None,
                 place: connections_module.Place) -> None:
        self._place = place
        self._server = server
        self._listener = listener
        self._limits = server.limits
        self._stream: SocketStream | TLSStream = SocketStream(sock)
        self._peer = Peer(listener.name, uid)
        self._trust = b''
        self._h11 = Parser(
            h11.SERVER, max_incomplete_event_size=HEADER_LIMIT)

    @property
    def idle(self) -> bool:
        return self._place.spare

    @idle.setter
    def idle(self, value: bool) -> None:
        self._place.spare = value

    async def run(self) -> None:
        try:
            if self._listener.tls is not None:
                await self._start_tls()
            while await self._serve_one():
                pass
        except CertificateRefused as e:
            LOG.warning('A certificate was refused on %s: %s',
                        self._listener.name, e)
        except (Disconnected, TimeoutError) as e:
            LOG.debug('Connection on %s: %s', self._listener.name, e)
        finally:
            self._stream.close()

    def outdated(self) -> bool:
        """Whether an operator's certificate was judged by what has changed.

        It is judged anew in a new connection only.
        """
        return self._peer.operator and self._listener.tls()[1] != self._trust

    async def _start_tls(self) -> None:
        context, self._trust = self._listener.tls()
        stream = TLSStream(self._stream, context)
        async with asyncio.timeout(self._limits.header_timeout):
            await stream.handshake(self._limits.write_timeout)
        self._stream = stream
        self._peer = dataclasses.replace(
            self._peer, operator=stream.has_certificate())

    # -- one request -------------------------------------------------------

    async def _serve_one(self) -> bool:
        """Answer a request; False if the connection is to be closed."""
        method = 'GET'
        try:
            event = await self._receive_header()
            if event is None:
                return False
            method = event.method.decode('ascii')
            if self.outdated():
                raise HTTPError(
                    401, 'What certificates are judged by has changed. '
                         'Connect anew.')
            response = await self._answer(event)
        except h11.RemoteProtocolError as e:
            response = error_response(HTTPError(
                e.error_status_hint, f'The request is malformed: {e}.'))
        except HTTPError as e:
            response = error_response(e)
        except Disconnected:
            raise
        except Exception:
            LOG.exception('A request failed.')
            response = error_response(HTTPError(
                500, 'The daemon failed; its log says how.'))
        complete = self._h11.their_state in (h11.DONE, h11.MUST_CLOSE)
        await self._respond(method, response, close=(
            not complete or self.outdated()
            or self._server.stopping.is_set()))
        self._server.requests += 1
        if not complete:
            await self._linger()
            return False
        if self._h11.our_state is not h11.DONE or (
                self._h11.their_state is not h11.DONE):
            await self._stream.finish(_LINGER_SECONDS)
            return False
        self._h11.start_next_cycle()
        self.idle = True
        return not self._server.stopping.is_set()

    async def _receive_header(self) -> h11.Request | None:
        """The next request; None if the peer ended or nothing came."""
        deadline = None
        while True:
            event = await self._h11.event()
            if isinstance(event, h11.Request):
                self.idle = False
                return event
            if isinstance(event, h11.ConnectionClosed):
                return None
            if event is not h11.NEED_DATA:
                raise Disconnected(f'unexpected {event!r}')
            loop = asyncio.get_running_loop()
            if self._h11.trailing_data[0] and self.idle:
                self.idle = False
            if deadline is None and not self.idle:
                deadline = loop.time() + self._limits.header_timeout
            try:
                async with asyncio.timeout_at(
                        deadline or loop.time() + self._limits.idle_timeout):
                    data = await self._stream.receive()
            except TimeoutError:
                if self.idle:
                    return None
                raise _too_slow()
            self._h11.receive_data(data)

    async def _answer(self, event: h11.Request) -> Response:
        target = self._target(event)
        hosts = [value.decode('latin-1') for name, value in event.headers
                 if name == b'host']
        if {b'content-length', b'transfer-encoding'} <= {
                name for name, _ in event.headers}:
            # What others take for its end need not be what we do.
            raise HTTPError(400, 'The request gives its length in two ways.')
        if not self._listener.is_meant(', '.join(hosts)):
            raise HTTPError(421, 'The request is for another host. Ask by an '
                            'address, or as localhost.')
        router = self._listener.router
        if not isinstance(router, Router):
            return await router(self._message(event, target))
        request, path = self._parse(event, target)
        route, arguments = router.find(request.method, path)
        async with route.admit(request, **arguments):
            async with self._server.bodies.hold(
                    _body_size(event, route.body_limit)):
                request.body = await self._receive_body(route.body_limit)
                return await route.handler(request, **arguments)

    def _target(self, event: h11.Request) -> str:
        if event.http_version not in (b'1.0', b'1.1'):
            raise HTTPError(505, 'Only HTTP/1.0 and HTTP/1.1 are spoken.')
        target = event.target.decode('ascii', 'replace')
        if not target.startswith('/'):
            # The absolute form, which a server has to know.
            scheme, _, rest = target.partition('://')
            if scheme.lower() not in ('http', 'https') or not rest:
                raise HTTPError(400, 'The request names no path.')
            target = '/' + rest.partition('/')[2]
        return target

    def _message(self, event: h11.Request, target: str) -> Message:
        framing = any(name in (b'content-length', b'transfer-encoding')
                      for name, _ in event.headers)
        if not framing:
            self._h11.next_event()  # the message's end
        return Message(event.method.decode('ascii'), target,
                       event.headers.raw_items(), self._peer,
                       self._pieces() if framing else None)

    def _parse(self, event: h11.Request, target: str) -> tuple[Request, str]:
        path, _, query = target.partition('?')
        try:
            pairs = urllib.parse.parse_qsl(
                query, keep_blank_values=True, errors='strict',
                max_num_fields=16)
        except ValueError:
            raise HTTPError(400, 'The query is malformed.')
        if len(dict(pairs)) != len(pairs):
            raise HTTPError(400, 'The query gives a parameter twice.')
        headers: dict[str, str] = {}
        for name, value in event.headers:
            key, text = name.decode('ascii'), value.decode('latin-1')
            headers[key] = f'{headers[key]}, {text}' if key in headers else (
                text)
        return Request(event.method.decode('ascii'), dict(pairs), headers,
                       self._peer), path

    async def _receive_body(self, limit: int) -> bytes:
        try:
            async with asyncio.timeout(self._limits.header_timeout) as timeout:
                return await self._receive_pieces(limit, timeout)
        except TimeoutError:
            raise _too_slow()

    async def _receive_pieces(self, limit: int,
                              timeout: asyncio.Timeout) -> bytes:
        body = bytearray()
        due = _PACE
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > limit:
                    raise _too_large(limit)
                if len(body) >= due:
                    due = len(body) + _PACE
                    timeout.reschedule(asyncio.get_running_loop().time()
                                       + self._limits.header_timeout)
        return bytes(body)

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        """The body of a request as it comes."""
        while True:
            event = await self._h11.event()
            if event is h11.NEED_DATA:
                if self._h11.they_are_waiting_for_100_continue:
                    await self._send(self._h11.send(h11.InformationalResponse(
                        status_code=100, headers=[])))
                try:
                    async with asyncio.timeout(self._limits.idle_timeout):
                        data = await self._stream.receive()
                except TimeoutError:
                    raise _too_slow()
                self._h11.receive_data(data)
            elif isinstance(event, h11.Data):
                yield event.data
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise Disconnected('the request was cut off')

    # -- its response ------------------------------------------------------

    async def _send(self, data: Any) -> None:
        await self._stream.send(data, self._limits.write_timeout)

    async def _respond(self, method: str, response: Response,
                       close: bool) -> None:
        body, length = response.body, response.length
        if isinstance(body, bytes) and length is None:
            length = len(body)
        try:
            await self._send(self._h11.send(h11.Response(
                status_code=response.status,
                headers=_headers(response, length, close),
                reason=_reason(response))))
            if method != 'HEAD':
                if isinstance(body, bytes):
                    await self._send_piece(body)
                else:
                    # Of a body in chunks each has its own head.
                    await self._send_pieces(
                        body, None if length is None else self._stream.pour())
            await self._send(self._h11.send(h11.EndOfMessage()))
        except Disconnected:
            raise
        except Exception as e:
            # Too late for another status; that the end is missing tells.
            LOG.error('A response was cut off: %s', e)
            if self._h11.their_http_version != b'1.1':
                # To whom the end of the connection may be that of the body.
                self._stream.abort()
            raise Disconnected('the response failed')
        finally:
            if not isinstance(body, bytes):
                await body.aclose()

    async def _send_pieces(self, body: AsyncGenerator[Any, Pour | None],
                           pour: Pour | None) -> None:
        """Send what a generator yields, and count what it pours."""
        send = None
        with contextlib.suppress(StopAsyncIteration):
            while True:
                try:
                    piece = await body.asend(send)
                finally:
                    if pour is not None:
                        self._poured(pour.take())
                await self._send_piece(piece)
                self._server.sent += len(piece)
                send = pour

    def _poured(self, sent: _Sent) -> None:
        if len(sent):
            self._h11.send_with_data_passthrough(h11.Data(data=sent))
            self._server.sent += len(sent)

    async def _send_piece(self, piece: Any) -> None:
        for part in self._h11.send_with_data_passthrough(
                h11.Data(data=piece)):
            await self._send(part)

    async def _linger(self) -> None:
        """Let the peer read the response before the connection closes."""
        await self._stream.finish(_LINGER_SECONDS)
        left = _LINGER_BYTES
        async with asyncio.timeout(_LINGER_SECONDS):
            while left > 0 and (data := await self._stream.receive()):
                left -= len(data)


def _body_size(event: h11.Request, limit: int) -> int:
    """Bytes that a request's body may have.

    :raises HTTPError: 413: it announces more than the limit
    """
    headers = dict(event.headers)
    if b'transfer-encoding' in headers:
        return limit
    length = headers.get(b'content-length', b'0')
    if len(length) > 18 or int(length) > limit:
        raise _too_large(limit)
    return int(length)


def _headers(response: Response, length: int | None, close: bool
             ) -> list[tuple[Any, Any]]:
    """All that is to be sent of them."""
    if response.relayed is not None:
        headers = list(response.relayed)
    else:
        headers = list(response.headers.items())
        if length is not None:
            headers.append(('Content-Length', str(length)))
    if not any(name.lower() in ('date', b'date') for name, _ in headers):
        headers.insert(0, ('Date', email.utils.formatdate(usegmt=True)))
    if close:
        headers.append(('Connection', 'close'))
    return headers


def _reason(response: Response) -> bytes:
    if response.reason is not None:
        return response.reason
    return http.HTTPStatus(response.status).phrase.encode()


def _too_slow() -> HTTPError:
    return HTTPError(408, 'The request did not arrive in time.')


def _too_large(limit: int) -> HTTPError:
    return HTTPError(413, f'The body may have {limit} bytes at most.')
