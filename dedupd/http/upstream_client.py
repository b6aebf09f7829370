# SPDX-License-Identifier: Apache-2.0

"""Passes requests on to another server, from the event loop.

h11 parses and frames, as in the server. The daemon sends a request's body as
it comes, and reads the answer as the client takes it, so that neither has more
than a few pieces in memory. It waits for the answer while it sends the body: a
server that refuses an upload may answer at its beginning, and close. The
daemon reads that answer even if it can send nothing any more; for this it uses
sockets, as the server does.

A connection is kept only for requests that change nothing. If the server has
closed it meanwhile, that looks like a failure, and only such requests may be
sent again. Other requests get a new connection. A request for which there was
no connection (`Unreached`) was not sent at all.
"""

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Callable
import contextlib
import socket
import ssl
from typing import Any
import urllib.parse

import h11

from dedupd.http import streams

#: A name and a value, as they are sent.
Header = tuple[bytes, bytes]
#: Makes the context of a wait.
Watch = Callable[[asyncio.Timeout], contextlib.AbstractContextManager]

#: Seconds for a connection.
CONNECT_SECONDS = 10.0
#: The most seconds without a byte from the server, as for Glance's clients.
PATIENCE = 600.0
#: Seconds that the server has to accept or refuse the body.
CONTINUE_SECONDS = 1.0
#: The most connections kept without a request, and for how many seconds.
MAX_RETAINED = 8
KEPT_SECONDS = 20.0

_HEADER_LIMIT = 65536
_SAFE = frozenset({'GET', 'HEAD', 'OPTIONS'})
# RFC 9110, 7.6.1; and the headers of the framing, which h11 makes.
_HOP_BY_HOP = frozenset({
    b'connection', b'keep-alive', b'proxy-connection', b'te', b'trailer',
    b'transfer-encoding', b'upgrade'})


class UpstreamError(Exception):
    """The server was not reached, or its answer is invalid or broke off.

    :ivar malformed: whether the server sent invalid data
    """

    def __init__(self, message: str, malformed: bool = False) -> None:
        super().__init__(message)
        self.malformed = malformed


class Unreached(UpstreamError):
    """There was no connection, so nothing of the request was sent."""


class _Stale(Exception):
    """A kept connection has ended before a byte of the answer."""


def may_repeat(method: str, body: AsyncGenerator[bytes, None] | None) -> bool:
    """Return whether a request changes nothing, however often it is sent."""
    return method in _SAFE and body is None


def end_to_end(headers: list[Header]) -> list[Header]:
    """The headers that are not only for the next hop."""
    named = {word.strip().lower() for name, value in headers
             if name.lower() == b'connection' for word in value.split(b',')}
    return [(name, value) for name, value in headers
            if name.lower() not in _HOP_BY_HOP
            and name.lower() not in named]


def find(headers: list[Header], name: bytes) -> bytes | None:
    """Return a header's value; None if it is missing or occurs twice."""
    values = [value for known, value in headers if known.lower() == name]
    return values[0] if len(values) == 1 else None


def text(headers: list[Header], name: bytes) -> str:
    """Return a header's value as text; '' where `find` returns None."""
    return (find(headers, name) or b'').decode('latin-1')


def without(headers: list[Header], *names: bytes) -> list[Header]:
    """The other headers; `names` are in lower case."""
    return [(name, value) for name, value in headers
            if name.lower() not in names]


class Answer:
    """The answer to a request. The user reads its body, and closes it.

    :ivar headers: the end-to-end headers
    """

    def __init__(self, connection: '_Connection',
                 response: h11.Response) -> None:
        self._connection: _Connection | None = connection
        self._over = self._ambiguous = False
        self.status = response.status_code
        self.reason = bytes(response.reason)
        self.headers = end_to_end(response.headers.raw_items())
        if any(name == b'transfer-encoding' for name, _ in response.headers):
            # With both, Transfer-Encoding counts: RFC 9112, 6.3.
            unambiguous = without(self.headers, b'content-length')
            self._ambiguous = unambiguous != self.headers
            self.headers = unambiguous

    async def read(self) -> bytes:
        """The next piece; b'' at the end.

        :raises UpstreamError: if the answer broke off
        """
        connection = self._connection
        if connection is None:
            raise ValueError('read of an answer that was closed')
        while not self._over:
            event = await connection.receive(connection.patience)
            if isinstance(event, h11.Data):
                if event.data:
                    return event.data
            elif isinstance(event, h11.EndOfMessage):
                self._over = True
            else:
                raise UpstreamError(f'{connection.url}: the answer was cut '
                                    'off')
        return b''

    def close(self) -> None:
        """Release the connection; it is kept if the answer is complete."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release(self._over and not self._ambiguous)


class Upstream:
    """The server to which requests are passed on.

    :param url: the server's URL, perhaps with the first part of each path; or
        unix:PATH, the server's Unix socket
    :param ca: file with the authorities that verify it; None: the system's
    :param patience: the most seconds without a byte; None: PATIENCE
    :param watch: makes the context of each wait for a byte, by its timeout,
        so that others may end it
    :raises OSError, ssl.SSLError: if that file cannot be read or is invalid
    """

    def __init__(self, url: str, ca: str | None = None,
                 patience: float | None = None, watch: Watch | None = None
                 ) -> None:
        self.patience = PATIENCE if patience is None else patience
        self.watch = watch or contextlib.nullcontext
        self._socket = (url.removeprefix('unix:')
                        if url.startswith('unix:') else None)
        parts = urllib.parse.urlsplit(
            'http://localhost' if self._socket else url.rstrip('/'))
        self.url = url if self._socket else f'{parts.scheme}://{parts.netloc}'
        self.host = parts.netloc.rpartition('@')[2].encode('ascii')
        self._prefix = parts.path
        self._tls = ssl.create_default_context(cafile=ca) if (
            parts.scheme == 'https') else None
        self._place = (parts.hostname,
                       parts.port or (80 if self._tls is None else 443))
        self._kept: list[_Connection] = []

    async def ask(self, method: str, target: str, headers: list[Header],
                  body: AsyncGenerator[bytes, None] | None = None) -> Answer:
        """Pass a request on.

        :param headers: the end-to-end headers; the Host header is replaced
        :param body: the pieces of the body; the headers may give its length
        :raises Unreached: if there is no connection; the body is not begun
        :raises UpstreamError: if there is no answer
        :raises: any error that the body raises
        """
        expects = (find(headers, b'expect') or b'').lower() == b'100-continue'
        headers = [(b'Host', self.host),
                   *without(headers, b'host', b'transfer-encoding')]
        if body is not None and find(headers, b'content-length') is None:
            headers.append((b'Transfer-Encoding', b'chunked'))
        try:
            request = h11.Request(method=method, headers=headers,
                                  target=self._prefix + target)
        except h11.LocalProtocolError as e:
            raise UpstreamError(f'The request cannot be passed on: {e}')
        reuse = may_repeat(method, body)
        while True:
            connection = self._take() if reuse else None
            if connection is None:
                connection = await self._connect()
            try:
                return await connection.ask(request, body, expects)
            except _Stale:
                connection.release(False)
            except BaseException:
                connection.release(False)
                raise

    def close(self) -> None:
        """Close the connections without a request."""
        while self._kept:
            self._kept.pop().close()

    # -- connections ---------------------------------------------------------

    def _take(self) -> '_Connection | None':
        """A kept connection that still seems to be open."""
        while self._kept:
            connection = self._kept.pop()
            if connection.usable():
                return connection
            connection.close()
        return None

    async def _connect(self) -> '_Connection':
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                found = [(socket.AF_UNIX, socket.SOCK_STREAM, 0, '',
                          self._socket)] if self._socket else (
                    await loop.getaddrinfo(*self._place,
                                           type=socket.SOCK_STREAM))
                for place in found[:-1]:
                    with contextlib.suppress(OSError):
                        return await self._connect_to(place)
                return await self._connect_to(found[-1])
        except TimeoutError:
            raise Unreached(f'{self.url} did not answer in time.')
        except OSError as e:
            raise Unreached(f'{self.url} cannot be reached: '
                            f'{e.strerror or e}.')
        except streams.Disconnected as e:
            raise Unreached(f'{self.url} cannot be reached: {e}.')

    async def _connect_to(self, place: Any) -> '_Connection':
        family, kind, protocol, _, address = place
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, address)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain = streams.SocketStream(sock)
            stream: streams.SocketStream | streams.TLSStream = plain
            if self._tls is not None:
                stream = streams.TLSStream(plain, self._tls, self._place[0])
                await stream.handshake(CONNECT_SECONDS)
        except BaseException:
            sock.close()
            raise
        return _Connection(self, sock, stream)

    def keep(self, connection: '_Connection') -> None:
        """Keep a connection without a request for another request."""
        if len(self._kept) < MAX_RETAINED:
            self._kept.append(connection)
        else:
            connection.close()


class _Connection:
    """A connection, for one request at a time."""

    def __init__(self, upstream: Upstream, sock: socket.socket,
                 stream: streams.SocketStream | streams.TLSStream) -> None:
        self._upstream = upstream
        self.url, self.patience = upstream.url, upstream.patience
        self._socket = sock
        self._stream = stream
        self._h11 = streams.Parser(
            h11.CLIENT, max_incomplete_event_size=_HEADER_LIMIT)
        self._used = self._answered = False
        self._idle_since = 0.0
        self._wanted = asyncio.Event()

    def usable(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._h11.trailing_data[0] or (
                now - self._idle_since > KEPT_SECONDS):
            return False
        try:
            # The connection's end, or bytes without a request.
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def release(self, whole: bool) -> None:
        """End a request; `whole`: its whole answer came."""
        if whole and self._h11.our_state is h11.DONE and (
                self._h11.their_state is h11.DONE):
            self._h11.start_next_cycle()
            self._used = True
            self._wanted.clear()
            self._idle_since = asyncio.get_running_loop().time()
            self._upstream.keep(self)
        else:
            self.close()

    def close(self) -> None:
        self._stream.close()

    # -- one request ---------------------------------------------------------

    async def ask(self, request: h11.Request,
                  body: AsyncGenerator[bytes, None] | None,
                  expects: bool) -> Answer:
        self._answered = False
        await self._send(request)
        if body is None:
            await self._send(h11.EndOfMessage())
            return await self._head(self.patience)
        pump = asyncio.create_task(self._pump(body, expects))
        head = asyncio.create_task(self._head(None))
        try:
            await asyncio.wait({pump, head},
                               return_when=asyncio.FIRST_COMPLETED)
            if not head.done() and not isinstance(pump.exception(),
                                                  UpstreamError):
                pump.result()   # of the caller's, if it failed
            async with asyncio.timeout(self.patience):
                return await head
        except TimeoutError:
            raise UpstreamError(f'{self.url} did not answer in time.')
        finally:
            # An answer before the body's end: the server needs no more.
            for task in (pump, head):
                task.cancel()
            await asyncio.gather(pump, head, return_exceptions=True)

    async def _pump(self, body: AsyncGenerator[bytes, None],
                    expects: bool) -> None:
        """Send a request's body as it comes."""
        if expects:
            # The first read of this body sends the caller a 100 Continue.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONTINUE_SECONDS):
                    await self._wanted.wait()
        async with contextlib.aclosing(body):
            async for piece in body:
                await self._send(h11.Data(data=piece))
        await self._send(h11.EndOfMessage())

    async def _head(self, seconds: float | None) -> Answer:
        """The answer's head; interim answers are skipped."""
        while True:
            event = await self.receive(seconds)
            if isinstance(event, h11.Response):
                return Answer(self, event)
            if not isinstance(event, h11.InformationalResponse):
                raise self._ended('without an answer')
            self._wanted.set()

    async def _send(self, event: Any) -> None:
        try:
            data = self._h11.send(event)
            if data:
                await self._stream.send(data, self.patience)
        except streams.Disconnected as e:
            raise self._ended(str(e)) from None
        except h11.LocalProtocolError as e:
            raise UpstreamError(f'The request cannot be passed on: {e}.')

    async def receive(self, seconds: float | None) -> Any:
        """The next event of the answer.

        :raises UpstreamError: if there is none
        """
        data = b'-'
        try:
            while (event := await self._h11.event()) is h11.NEED_DATA:
                async with asyncio.timeout(seconds) as timeout:
                    with self._upstream.watch(timeout):
                        data = await self._stream.receive()
                self._answered = self._answered or bool(data)
                self._h11.receive_data(data)
            return event
        except TimeoutError:
            raise UpstreamError(f'{self.url} did not answer in time.')
        except h11.RemoteProtocolError as e:
            if not data:
                raise self._ended('too early') from None
            raise UpstreamError(f'{self.url} sent an invalid answer: {e}.',
                                malformed=True)
        except streams.Disconnected as e:
            raise self._ended(str(e)) from None

    def _ended(self, why: str) -> Exception:
        if self._used and not self._answered:
            return _Stale()
        return UpstreamError(f'{self.url} ended the connection: {why}.')
