# SPDX-License-Identifier: Apache-2.0

"""One HTTP connection: serves its requests, one after the other."""

import asyncio
from collections.abc import AsyncGenerator
import contextlib
import dataclasses
import email.utils
import http
import socket
import ssl
from typing import Any
import urllib.parse

import h11
from oslo_log import log

from dedupd.http import body_memory
from dedupd.http import connection_limits
from dedupd.http import limited
from dedupd.http import listeners
from dedupd.http import messages
from dedupd.http import routing
from dedupd.http import streams

LOG = log.getLogger(__name__)
_STRANGERS = limited.Log(LOG)

# The bytes of a body that must arrive within the time for a header.
_PACE = 262144
# The most bytes of a body that are read and thrown away after a response that
# did not wait for them: closing with unread bytes would destroy the response.
_LINGER_BYTES = 4 << 20
_LINGER_SECONDS = 2.0


class Shared:
    """The limits and counters that all connections of a server share.

    :ivar requests: the number of answered requests
    :ivar sent: sent bytes of generated bodies, that is, of images
    """

    def __init__(self, limits: messages.Limits) -> None:
        self.limits = limits
        self.bodies = body_memory.Bodies(limits)
        self.requests = 0
        self.sent = 0
        self.stopping = asyncio.Event()


class HTTPConnection:
    """One connection; it serves its requests one after the other."""

    def __init__(self, shared: Shared, listener: listeners.Listener,
                 sock: socket.socket, uid: int | None,
                 place: connection_limits.Place) -> None:
        self._place = place
        self._shared = shared
        self._listener = listener
        self._limits = shared.limits
        self._socket_stream = streams.SocketStream(sock)
        self._stream: streams.SocketStream | streams.TLSStream = (
            self._socket_stream)
        self._peer = messages.Peer(uid)
        self._trust = b''
        self._h11 = streams.Parser(
            h11.SERVER, max_incomplete_event_size=messages.HEADER_LIMIT)

    @property
    def idle(self) -> bool:
        """Return whether the connection only waits for its next request."""
        return self._place.spare

    async def run(self) -> None:
        """Serve requests until the connection ends, and close its socket."""
        client = ''
        try:
            if self._listener.tls is not None:
                client = self._socket_stream.peer_address()
                await self._start_tls(*self._listener.tls())
            while await self._serve_one():
                pass
        except streams.CertificateRefused as e:
            _STRANGERS.warning(
                'A certificate was refused on %s, of a client at %s: %s',
                self._listener.name, client, e)
        except (streams.Disconnected, TimeoutError) as e:
            LOG.debug('Connection on %s: %s', self._listener.name, e)
        finally:
            self._stream.close()

    def outdated(self) -> bool:
        """Return whether the trust that made the peer an operator changed.

        Only a new connection judges the certificate again.
        """
        return (self._peer.operator and self._listener.tls is not None
                and self._listener.tls()[1] != self._trust)

    async def _start_tls(self, context: ssl.SSLContext, trust: bytes) -> None:
        self._trust = trust
        stream = streams.TLSStream(self._socket_stream, context)
        async with asyncio.timeout(self._limits.header_timeout):
            await stream.handshake(self._limits.write_timeout)
        self._stream = stream
        names = stream.certificate_names()
        if names is not None:
            self._peer = dataclasses.replace(
                self._peer, operator=True, names=names)

    # -- one request -------------------------------------------------------

    async def _serve_one(self) -> bool:
        """Answer a request; False if the connection must be closed."""
        async with contextlib.AsyncExitStack() as held:
            return await self._serve(held)

    async def _serve(self, held: contextlib.AsyncExitStack) -> bool:
        method = 'GET'
        try:
            event = await self._receive_header()
            if event is None:
                return False
            method = event.method.decode('ascii')
            if self.outdated():
                raise messages.HTTPError(
                    401, 'The authorities or revocation lists have changed. '
                         'Connect again.')
            response = await self._answer(event, held)
        except h11.RemoteProtocolError as e:
            response = messages.error_response(messages.HTTPError(
                e.error_status_hint, f'The request is malformed: {e}.'))
        except messages.HTTPError as e:
            response = messages.error_response(e)
        except streams.Disconnected:
            raise
        except Exception:
            LOG.exception('A request failed.')
            response = messages.error_response(messages.HTTPError(
                500, 'The daemon failed; its log has the cause.'))
        if response.session is not None:
            await self._change(response.session)
            return False
        complete = self._h11.their_state in (
            h11.DONE, h11.MUST_CLOSE, h11.MIGHT_SWITCH_PROTOCOL)
        await self._respond(method, response, close=(
            not complete or self.outdated()
            or self._shared.stopping.is_set()))
        self._shared.requests += 1
        if not complete:
            await self._linger()
            return False
        if self._h11.our_state is not h11.DONE or (
                self._h11.their_state is not h11.DONE):
            await self._stream.finish(_LINGER_SECONDS)
            return False
        self._h11.start_next_cycle()
        self._place.spare = True
        return not self._shared.stopping.is_set()

    async def _receive_header(self) -> h11.Request | None:
        """Return the next request; None if the peer ended or nothing came."""
        deadline = None
        while True:
            event = await self._h11.event()
            if isinstance(event, h11.Request):
                self._place.spare = False
                return event
            if isinstance(event, h11.ConnectionClosed):
                return None
            if event is not h11.NEED_DATA:
                raise streams.Disconnected(f'unexpected {event!r}')
            loop = asyncio.get_running_loop()
            if self._h11.trailing_data[0]:
                self._place.spare = False
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

    async def _answer(self, event: h11.Request,
                      held: contextlib.AsyncExitStack) -> messages.Response:
        """Answer a request.

        :param held: is closed when the response is sent
        """
        target = self._target(event)
        hosts = [value.decode('latin-1') for name, value in event.headers
                 if name == b'host']
        if {b'content-length', b'transfer-encoding'} <= {
                name for name, _ in event.headers}:
            # Other programs may see another end of the request than we do.
            raise messages.HTTPError(
                400, 'The request gives its length in two ways.')
        if not self._listener.is_meant(', '.join(hosts)):
            raise messages.HTTPError(
                421, 'The request is for another host. Use an address, or '
                'as localhost.')
        router = self._listener.handlers
        if not isinstance(router, routing.Router):
            return await router(self._message(event, target))
        request, path = self._parse(event, target)
        route, arguments = router.find(request.method, path)
        # A client may read its response as slowly as it likes.
        expected = route.sent_bytes
        await held.enter_async_context(self._shared.bodies.hold(expected))
        async with (route.admit(request, **arguments),
                    self._shared.bodies.hold(
                        _body_size(event, route.body_limit))):
            request.body = await self._receive_body(route.body_limit)
            response = await route.handler(request, **arguments)
        if isinstance(response.body, bytes):
            route.sent_bytes = len(response.body)
            # Only such requests may be refused after they were served.
            if request.method in ('GET', 'HEAD'):
                held.enter_context(self._shared.bodies.hold_now(
                    len(response.body) - expected))
        return response

    def _target(self, event: h11.Request) -> str:
        if event.http_version not in (b'1.0', b'1.1'):
            raise messages.HTTPError(
                505, 'Only HTTP/1.0 and HTTP/1.1 are supported.')
        target = event.target.decode('ascii', 'replace')
        if not target.startswith('/'):
            # The absolute form, which a server must accept.
            scheme, _, rest = target.partition('://')
            if scheme.lower() not in ('http', 'https') or not rest:
                raise messages.HTTPError(400, 'The request names no path.')
            target = '/' + rest.partition('/')[2]
        return target

    def _message(self, event: h11.Request, target: str) -> messages.Message:
        framing = any(name in (b'content-length', b'transfer-encoding')
                      for name, _ in event.headers)
        if not framing:
            self._h11.next_event()  # the message's end
        return messages.Message(event.method.decode('ascii'), target,
                                event.headers.raw_items(), self._peer,
                                self._pieces() if framing else None)

    def _parse(self, event: h11.Request, target: str
               ) -> tuple[messages.Request, str]:
        path, _, query = target.partition('?')
        try:
            pairs = urllib.parse.parse_qsl(
                query, keep_blank_values=True, errors='strict',
                max_num_fields=16)
        except ValueError:
            raise messages.HTTPError(400, 'The query is malformed.')
        if len(dict(pairs)) != len(pairs):
            raise messages.HTTPError(400, 'The query gives a parameter twice.')
        headers: dict[str, str] = {}
        for name, value in event.headers:
            key, text = name.decode('ascii'), value.decode('latin-1')
            headers[key] = f'{headers[key]}, {text}' if key in headers else (
                text)
        request = messages.Request(event.method.decode('ascii'), dict(pairs),
                                   headers, self._peer)
        if event.http_version == b'1.1':
            request.upgrade = headers.get('upgrade', '')
        return request, path

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
                raise streams.Disconnected('the request was cut off')

    # -- its response ------------------------------------------------------

    async def _send(self, data: Any) -> None:
        await self._stream.send(data, self._limits.write_timeout)

    async def _respond(self, method: str, response: messages.Response,
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
                    # In a chunked body each chunk has its own head, so that no
                    # thread may pour it.
                    await self._send_pieces(
                        body, None if length is None else self._stream.pour())
            await self._send(self._h11.send(h11.EndOfMessage()))
        except streams.Disconnected:
            raise
        except Exception as e:
            # It is too late for another status; the missing end shows the
            # failure.
            _STRANGERS.error('A response was cut off: %s', e)
            if self._h11.their_http_version != b'1.1':
                # For an older client, the connection's end may end the body.
                self._stream.abort()
            raise streams.Disconnected('the response failed')
        finally:
            if not isinstance(body, bytes):
                await body.aclose()

    async def _change(self, session: messages.Session) -> None:
        """Change to another protocol, until the end of the connection."""
        try:
            if self._h11.trailing_data[0]:
                raise streams.Disconnected('it does not wait for the answer')
            await self._send(self._h11.send(h11.InformationalResponse(
                status_code=http.HTTPStatus.SWITCHING_PROTOCOLS,
                headers=list(session.headers.items()))))
            self._shared.requests += 1
            await session.run(self._socket_stream, self._count)
        except streams.Disconnected:
            raise
        except Exception as e:
            _STRANGERS.error('A response was cut off: %s', e)
            raise streams.Disconnected('the response failed')
        finally:
            await session.aclose()

    def _count(self, sent: int) -> None:
        self._shared.sent += sent

    async def _send_pieces(self, body: messages.Pieces,
                           pour: streams.Pour | None) -> None:
        """Send the pieces of a generator, and count the bytes it pours."""
        send = None
        with contextlib.suppress(StopAsyncIteration):
            while True:
                try:
                    piece = await body.asend(send)
                finally:
                    if pour is not None and len(sent := pour.take()):
                        self._frame(sent)
                        self._shared.sent += len(sent)
                await self._send_piece(piece)
                self._shared.sent += len(piece)
                send = pour

    def _frame(self, piece: Any) -> list[Any]:
        """Frame a piece of a body for sending.

        :param piece: anything with a length; it is passed through unchanged
        """
        return self._h11.send_with_data_passthrough(
            h11.Data(data=piece)) or []

    async def _send_piece(self, piece: Any) -> None:
        for part in self._frame(piece):
            await self._send(part)

    async def _linger(self) -> None:
        """Let the peer read the response before the connection closes."""
        await self._stream.finish(_LINGER_SECONDS)
        left = _LINGER_BYTES
        async with asyncio.timeout(_LINGER_SECONDS):
            while left > 0 and (data := await self._stream.receive()):
                left -= len(data)


def _body_size(event: h11.Request, limit: int) -> int:
    """The most bytes that the body of this request may have.

    :raises HTTPError: 413, if it announces more than the limit
    """
    headers = dict(event.headers)
    if b'transfer-encoding' in headers:
        return limit
    length = headers.get(b'content-length', b'0')
    if len(length) > 18 or int(length) > limit:
        raise _too_large(limit)
    return int(length)


def _headers(response: messages.Response, length: int | None, close: bool
             ) -> list[tuple[Any, Any]]:
    """The headers of a response, as h11 takes them."""
    headers: list[tuple[Any, Any]] = []
    if response.relayed is not None:
        headers += response.relayed
    else:
        headers += response.headers.items()
        if length is not None:
            headers.append(('Content-Length', str(length)))
    if not any(name.lower() in ('date', b'date') for name, _ in headers):
        headers.insert(0, ('Date', email.utils.formatdate(usegmt=True)))
    if close:
        headers.append(('Connection', 'close'))
    return headers


def _reason(response: messages.Response) -> bytes:
    if response.reason is not None:
        return response.reason
    return http.HTTPStatus(response.status).phrase.encode()


def _too_slow() -> messages.HTTPError:
    return messages.HTTPError(408, 'The request did not arrive in time.')


def _too_large(limit: int) -> messages.HTTPError:
    return messages.HTTPError(413, f'The body may have {limit} bytes at most.')
