# SPDX-License-Identifier: Apache-2.0

"""Sends and receives bytes: over a socket, and over TLS."""

import asyncio
from collections.abc import Callable
import contextlib
import socket
import ssl
import struct
from typing import Any

import h11


_RECEIVE = 65536
_TLS_PIECE = 262144


class Disconnected(Exception):
    """The peer is gone, or was too slow."""


class CertificateRefused(Disconnected):
    """The peer's certificate is invalid; the message has the reason."""


class Parser(h11.Connection):
    """Parses a peer's bytes with h11.

    It adds two checks that h11 0.14 lacks: it verifies the end of each chunk
    of a body (CVE-2025-43859), and it limits a length to as many digits as
    Python takes.
    """

    _fresh = False
    _chunk_ends = False

    def receive_data(self, data: bytes) -> None:
        super().receive_data(data)
        self._fresh = True

    async def event(self) -> Any:
        """The next event; other tasks go on first."""
        # `receive` has let them go on before the first event of new bytes.
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

    Only one thread at a time may use it, and none while the server sends a
    piece that the body has yielded.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sent = 0

    def __call__(self, view: memoryview) -> int:
        """Send bytes; return how many were sent. 0: the next piece must wait.

        :raises Disconnected: if the peer is gone
        """
        try:
            sent = self._sock.send(view)
        except BlockingIOError:
            return 0
        except OSError as e:
            raise Disconnected(str(e))
        self._sent += sent
        return sent

    def take(self) -> 'Sent':
        """The bytes sent since the last call of this method."""
        sent, self._sent = self._sent, 0
        return Sent(sent)


class Sent:
    """Represents sent bytes where h11 counts them."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


class SocketStream:
    """A connected socket that does not block."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    def peer_address(self) -> str:
        """Return the address of a TCP peer, for messages."""
        try:
            return str(self._sock.getpeername()[0])
        except OSError as e:
            return f'an unknown address ({e.strerror})'

    async def receive(self) -> bytes:
        """The next bytes, after other tasks went on; b'' at the end."""
        await asyncio.sleep(0)
        try:
            return await self._loop.sock_recv(self._sock, _RECEIVE)
        except OSError as e:
            raise Disconnected(str(e))

    async def send(self, data: Any, timeout: float) -> None:
        """Send all bytes. Each progress starts the timeout (seconds) again."""
        view = memoryview(data).cast('B')
        while view:
            try:
                view = view[self._sock.send(view):]
            except BlockingIOError:
                await self._writable(timeout)
            except OSError as e:
                raise Disconnected(str(e))

    async def _writable(self, timeout: float) -> None:
        if not await self._ready(self._loop.add_writer,
                                 self._loop.remove_writer, timeout):
            raise Disconnected('the peer takes nothing')

    async def readable(self, timeout: float) -> None:
        """Wait until bytes, or the end, can be received."""
        if not await self._ready(self._loop.add_reader,
                                 self._loop.remove_reader, timeout):
            raise Disconnected('the peer sends nothing')

    async def _ready(self, add: Callable, remove: Callable,
                     timeout: float) -> bool:
        """Return whether the socket becomes ready within the timeout."""
        future = self._loop.create_future()

        def finish(value: bool) -> None:
            if not future.done():
                future.set_result(value)

        timer = self._loop.call_later(timeout, finish, False)
        add(self._sock, finish, True)
        try:
            return await future
        finally:
            timer.cancel()
            remove(self._sock)

    def receive_now(self, length: int) -> bytes | None:
        """Bytes that have come; None: there are none. In any thread.

        :raises Disconnected: if the peer has ended
        """
        try:
            data = self._sock.recv(length)
        except BlockingIOError:
            return None
        except OSError as e:
            raise Disconnected(str(e))
        if not data:
            raise Disconnected('the peer has ended')
        return data

    def send_now(self, data: bytes, descriptor: int | None) -> None:
        """Send a few bytes, with a descriptor or without. In any thread.

        :raises Disconnected: if they cannot be sent without waiting
        """
        descriptors = [] if descriptor is None else [descriptor]
        try:
            sent = socket.send_fds(self._sock, [data], descriptors)
        except OSError as e:
            raise Disconnected(f'the peer takes no answer: {e}')
        if sent != len(data):
            raise Disconnected('the peer takes no answer')

    def pour(self) -> Pour | None:
        """An object by which threads send."""
        return Pour(self._sock)

    def abort(self) -> None:
        """Make the peer see an error, not an end, when this closes."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER,
                                  struct.pack('ii', 1, 0))

    async def finish(self, timeout: float) -> None:
        """Notify the peer that nothing more comes."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """End the connection in both directions, before it is closed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._sock.close()


class TLSStream:
    """TLS over a SocketStream.

    :param server: the name that the server's certificate must have; None:
        this side is the server
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
        """Make the connection a TLS one.

        :raises CertificateRefused: this side refuses the peer's certificate
        :raises Disconnected: the handshake failed for another reason
        """
        while True:
            try:
                self._tls.do_handshake()
                return await self._flush(timeout)
            except ssl.SSLWantReadError:
                await self._flush(timeout)
                await self._fill()
            except ssl.SSLError as e:
                # Send the alert, which has the reason.
                with contextlib.suppress(Disconnected):
                    await self._flush(timeout)
                if isinstance(e, ssl.SSLCertVerificationError):
                    raise CertificateRefused(
                        f'{e.verify_message} ({e.reason})')
                raise Disconnected(f'no TLS: {e.reason or e}')

    def certificate_names(self) -> tuple[str, ...] | None:
        """Return the names of the peer's verified certificate, if it has one.

        These are its common names and its DNS names.
        """
        found: Any = self._tls.getpeercert()
        if not found:
            return None
        subject = [field for fields in found.get('subject', ())
                   for field in fields]
        return tuple(dict.fromkeys(
            value for kind, value in (
                *subject, *found.get('subjectAltName', ()))
            if kind in ('commonName', 'DNS')))

    async def receive(self) -> bytes:
        """See `SocketStream.receive`."""
        # The received bytes may have thousands of records.
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
        """See `SocketStream.send`."""
        view = memoryview(data).cast('B')
        while view:
            try:
                view = view[self._tls.write(view[:_TLS_PIECE]):]
            except ssl.SSLError as e:
                raise Disconnected(f'TLS: {e.reason or e}')
            await self._flush(timeout)

    def pour(self) -> None:
        """See `SocketStream.pour`; None: threads cannot send."""
        return None

    def abort(self) -> None:
        """See `SocketStream.abort`."""
        self._stream.abort()

    async def finish(self, timeout: float) -> None:
        """End TLS, then as `SocketStream.finish`."""
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
        """Close the socket. Idempotent."""
        self._stream.close()
