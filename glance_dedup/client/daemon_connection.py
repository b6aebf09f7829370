# SPDX-License-Identifier: Apache-2.0

"""Requests to a daemon, over connections that are kept for later ones.

The client does not trust the server: every length is bounded, and every read
has a time limit.
"""

import collections
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import http.client
import io
import json
import socket
import ssl
import threading
import time
from typing import Any
import urllib.parse
import weakref

from glance_dedup.base import closing
from glance_dedup.base import forks
from glance_dedup.base import hexids
from glance_dedup.base import sockets
from glance_dedup.client import channels
from glance_dedup.client import client_errors

#: The most bytes of an answer in JSON; a hundred thousand images have some
#: 30 MiB.
MAX_JSON = 128 << 20
#: The most bytes that are read of an error's body.
MAX_ERROR = 64 << 10
#: The header for recipes and frames that the client sends.
BINARY = {'Content-Type': 'application/octet-stream'}
#: Bytes a second: the client gives up on a peer that takes or sends slower.
SLOWEST = 16 << 10

# The child of a fork opens its own connections.
_requesters: 'weakref.WeakSet[Requester]' = weakref.WeakSet()


class Answer(closing.Closing):
    """The answer to one request; its body is not read yet."""

    def __init__(self, requester: 'Requester', channel: channels.Channel,
                 method: str):
        self._requester = requester
        self._channel: channels.Channel | None = channel
        self._before = channel.received
        self._waited = 0.0              # for its body
        self._good = True
        # It uses only `makefile` of a socket, which a channel has, too.
        self._response = http.client.HTTPResponse(
            channel, method=method)     # type: ignore[arg-type]
        self._response.begin()
        # A body in chunks is slow to read in small pieces.
        self._file = io.BufferedReader(self._response, 1 << 16)
        self.status = self._response.status
        self.headers = self._response.headers

    def header(self, name: str) -> str:
        """A header's value; '' if there is none."""
        return self.headers.get(name, '')

    @property
    def repository_id(self) -> str:
        """The repository that the daemon names; '': it names none."""
        found = self.header('Dedup-Repository')
        return found if hexids.is_valid(found) else ''

    def bad(self, why: str) -> client_errors.BadAnswer:
        """An exception for the caller to raise; drops the connection."""
        self._good = False
        return self._requester.bad(why)

    def unavailable(self, why: Any) -> client_errors.DaemonUnavailable:
        """An exception for the caller to raise: the connection failed."""
        return self._requester.unavailable(why)

    def switched(self) -> channels.Channel:
        """The connection, on which another protocol follows from here on.

        `close` drops it.
        """
        self._good = False
        assert self._channel is not None
        return self._channel

    @property
    def length(self) -> int | None:
        """The body's length, before reading; None if it is in chunks."""
        if self._response.chunked:
            return None
        if self._response.length is None:
            raise self.bad('the answer does not say how long it is')
        return self._response.length

    def read(self, length: int, timeout: float) -> bytes:
        """Read `length` bytes within `timeout` seconds; fewer only at the end.

        The whole body must come at a rate of at least SLOWEST, too; only the
        time spent waiting counts.

        :raises DaemonUnavailable: the bytes did not come
        """
        channel = self._channel
        if channel is None:
            raise ValueError('read of an answer that was closed')
        began = time.monotonic()
        came = channel.received - self._before
        channel.deadline = began + min(
            timeout, timeout + came / SLOWEST - self._waited)
        try:
            data = self._file.read(length)
            self._waited += time.monotonic() - began
            return data
        except (OSError, http.client.HTTPException, ValueError) as e:
            channel.hang_up()
            raise self._requester.unavailable(e) from e

    def read_exactly(self, length: int, timeout: float) -> bytes:
        """Read as `read` does; the body must have so many bytes.

        :raises DaemonUnavailable: they did not come
        """
        data = self.read(length, timeout)
        if len(data) != length:
            raise self._requester.unavailable('the answer was cut off')
        return data

    def close(self) -> None:
        """Close; the connection is kept if the whole body was read."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        whole = (self._good and self._response.isclosed()
                 and not self._response.will_close
                 and not self._response.length)
        self._requester.release(channel, whole,
                                channel.received - self._before)
        self._response.close()


class Requester(closing.Closing):
    """Requests to one daemon. Thread-safe.

    :param address: ``unix:/path``, or ``https://host:port``
    :param cert: file with the client's certificate, for TLS
    :param key: file with its key, if that is not in the same file
    :param ca_file: file of certificate authorities that verify the server's
        certificate; None: the system's
    :param token: a Keystone token for the server's requests to Glance
    :param connect_timeout: seconds until the connection is made
    :param timeout: seconds until an answer begins, and for each further piece
    :param keep: how many idle connections are kept for later requests
    :ivar received: bytes of all answers that are over, as they came on the
        wire
    :ivar sent: bytes of all requests that were sent whole
    :raises ValueError: for an address, token or file that is malformed
    :raises OSError: for a file that cannot be read
    """

    def __init__(self, address: str, *, cert: str | None = None,
                 key: str | None = None, ca_file: str | None = None,
                 token: str | None = None, connect_timeout: float = 10.0,
                 timeout: float = 60.0, keep: int = 4):
        self.address = address
        self._keep = keep
        self._connect_timeout = connect_timeout
        self.timeout = timeout
        self.received = self.sent = 0
        self._reset()
        _requesters.add(self)
        self._path: str | None = None
        self._context: ssl.SSLContext | None = None
        if address.startswith('unix:'):
            self._path = address[len('unix:'):]
            if not self._path or '\0' in self._path:
                raise ValueError(f'{address!r} names no socket')
            self._host = 'localhost'
        else:
            self._parse(address)
            with _naming(ca_file):
                self._context = ssl.create_default_context(cafile=ca_file)
            if cert is not None:
                with _naming(cert if key is None else f'{cert}, {key}',
                             '' if key else '. It needs the key, too, if no '
                             'file of the key is given'):
                    self._context.load_cert_chain(cert, key)
        self._headers = {'Host': self._host, 'User-Agent': 'glance-dedup'}
        if token is not None:
            if not token.isascii() or not token.isprintable():
                raise ValueError('the token is not printable')
            self._headers['X-Auth-Token'] = token

    def _parse(self, address: str) -> None:
        parts = urllib.parse.urlsplit(address)
        if (parts.scheme != 'https' or not parts.hostname or parts.query
                or parts.fragment or parts.path not in ('', '/')
                or parts.username is not None
                or not address.isascii() or not address.isprintable()
                or ' ' in address):
            raise ValueError(f'{address!r} is neither unix:/path nor '
                             'https://host:port')
        self._host = parts.netloc
        self._place = (parts.hostname, parts.port or 443)

    # -- connections ------------------------------------------------------

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._kept: collections.deque[channels.Channel] = collections.deque()
        self._busy: set[channels.Channel] = set()

    def bad(self, why: str) -> client_errors.BadAnswer:
        """An exception for the caller to raise, with the address."""
        return client_errors.BadAnswer(f'{self.address}: {why}')

    def unavailable(self, why: Any) -> client_errors.DaemonUnavailable:
        """An exception for the caller to raise, with the address."""
        if isinstance(why, OSError):
            why = why.strerror or why
        return client_errors.DaemonUnavailable(
            f'{self.address}: {why or "no answer"}')

    def _connect(self) -> channels.Channel:
        with self._lock:
            while self._kept:
                channel = self._kept.pop()
                if channel.usable():
                    return channel
                channel.hang_up()
        try:
            if self._path is None:
                sock = socket.create_connection(
                    self._place, self._connect_timeout)
            else:
                sock = sockets.connect_unix(self._path, self._connect_timeout)
        except (OSError, ValueError) as e:
            raise self.unavailable(e) from e
        try:
            if self._context is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock = self._context.wrap_socket(
                    sock, server_hostname=self._place[0])
        except (OSError, ValueError) as e:
            sock.close()
            raise self.unavailable(e) from e
        return channels.Channel(sock)

    def release(self, channel: channels.Channel, keep: bool,
                received: int) -> None:
        """Keep or drop a channel whose request is over."""
        with self._lock:
            self.received += received
            self._busy.discard(channel)
            if keep and len(self._kept) < self._keep:
                self._kept.append(channel)
                return
        channel.hang_up()

    def interrupt(self) -> None:
        """Break off all requests under way in other threads."""
        with self._lock:
            for channel in self._busy:
                channel.break_off()

    def close(self) -> None:
        """Close the idle connections. Idempotent."""
        with self._lock:
            while self._kept:
                self._kept.pop().hang_up()

    # -- requests ---------------------------------------------------------

    def request(self, method: str, path: str, body: bytes | None = None,
                timeout: float | None = None,
                headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request; returns the answer if it is no error.

        :param path: the path with its query, quoted
        :param timeout: seconds until the answer begins
        :param headers: further headers, besides those of every request
        :raises Refused: the answer is an error
        :raises DaemonUnavailable: there is no answer
        """
        lines = [f'{method} {path} HTTP/1.1']
        sent = {**self._headers, **(headers or {})}
        if body is not None:
            sent.setdefault('Content-Type', 'application/json')
            sent['Content-Length'] = str(len(body))
        lines += [f'{name}: {value}' for name, value in sent.items()]
        head = '\r\n'.join((*lines, '', '')).encode('ascii')
        channel = self._connect()
        with self._lock:
            self._busy.add(channel)
        try:
            channel.deadline = time.monotonic() + (
                self.timeout if timeout is None else timeout)
            channel.send(head + (body or b''))
            with self._lock:
                self.sent += len(head) + len(body or b'')
            answer = Answer(self, channel, method)
        except BaseException as e:
            self.release(channel, False, 0)
            if isinstance(e, (OSError, http.client.HTTPException,
                              ValueError)):
                raise self.unavailable(e) from e
            raise
        if answer.status >= 300:
            with answer:
                raise self._refusal(answer)
        return answer

    def _refusal(self, answer: Answer) -> client_errors.ClientError:
        try:
            body = answer.read(MAX_ERROR, self.timeout)
            message = json.loads(body)['error']['message']
        except (ValueError, TypeError, KeyError, RecursionError,
                client_errors.DaemonUnavailable):
            message = None
        if not isinstance(message, str):
            message = f'the daemon answered with status {answer.status}'
        return client_errors.Refused(answer.status,
                                     f'{self.address}: {message[:2000]}',
                                     answer.repository_id)

    def request_json(self, method: str, path: str,
                     arguments: dict | None = None,
                     timeout: float | None = None) -> dict:
        """Send a request with a JSON object; returns that of the answer."""
        body = None if arguments is None else json.dumps(arguments).encode()
        return self.parse_json(self.request(method, path, body, timeout))

    def parse_json(self, answer: Answer) -> dict:
        """The JSON object in an answer's body. Closes the answer."""
        with answer:
            length = answer.length
            if length is not None and length > MAX_JSON:
                raise answer.bad(f'an answer of {length} bytes')
            data = answer.read(MAX_JSON + 1, self.timeout)
            if len(data) > MAX_JSON:
                raise answer.bad('the answer is too long')
            if length is not None and len(data) != length:
                raise self.unavailable('the answer was cut off')
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise self.bad('the answer is not JSON') from e
        if not isinstance(found, dict):
            raise self.bad('the answer is no object')
        return found

    def request_list(self, path: str, name: str) -> list:
        """The list of this name in the answer to a request."""
        found = self.request_json('GET', path).get(name)
        if not isinstance(found, list):
            raise self.bad(f'the answer has no {name}')
        return found


def number(fields: dict, name: str) -> int:
    """A number in an answer; 0 if there is none, or it is negative."""
    value = fields.get(name)
    return value if isinstance(value, int) and value >= 0 else 0


def _reset_inherited() -> None:
    for requester in list(_requesters):
        requester._reset()


forks.register(_reset_inherited)


@contextlib.contextmanager
def _naming(file: str | None, advice: str = '') -> Iterator[None]:
    """Make OpenSSL's errors name the file, and give advice."""
    try:
        yield
    except ssl.SSLError as e:
        raise ValueError(f'{file}: {e.reason or e}{advice}') from e
    except OSError as e:
        e.filename = file
        raise
