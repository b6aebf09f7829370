# SPDX-License-Identifier: Apache-2.0

"""The client of the daemon: over its Unix socket, or TCP with TLS.

The client does not trust the server: every length is bounded, every read has a
time limit, and binary data is checked (``wire.py``) before a caller gets it.

Sizes and offsets are in bytes, times in seconds.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import http
import http.client
import io
import json
import os
import select
import shutil
import socket
import ssl
import tempfile
import threading
import time
from typing import Any
import urllib.parse
import weakref

from glance_dedup.base import closing
from glance_dedup.base import hexids
from glance_dedup.base import sockets
from glance_dedup.client import shared_memory
from glance_dedup.client import wire

#: The most bytes of an answer in JSON; a hundred thousand images have some
#: 30 MiB.
LONGEST_JSON = 128 << 20
#: The most bytes that are read of an error's body.
LONGEST_ERROR = 64 << 10
#: The header for recipes and frames that the client sends.
BINARY = {'Content-Type': 'application/octet-stream'}
#: Bytes a second: the client gives up on a peer that takes or sends slower.
SLOWEST = 16 << 10
#: How long one long poll asks the daemon to wait.
POLL = 10.0
# Bytes of a stream that are best read at once from a socket.
_PIECE = 4 << 20
# The most descriptors that are taken with one message.
_DESCRIPTORS = 4
# Seconds for the daemon to wait for its maintainer, and for its work.
_MARKING = 120.0


class ClientError(Exception):
    """Base of all exceptions that the client raises on purpose."""


class DaemonUnavailable(ClientError):
    """Nobody answers, or not in time, or the connection broke."""


class BadAnswer(ClientError):
    """The answer is not what a daemon sends."""


class Refused(ClientError):
    """The daemon answered with an error.

    :ivar code: the HTTP status
    """

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


# -- the connection -----------------------------------------------------------

# The child of a fork closes these.
_channels: 'weakref.WeakSet[Channel]' = weakref.WeakSet()
_clients: 'weakref.WeakSet[Client]' = weakref.WeakSet()


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
        """Whether another request can be sent: open, and nothing to read."""
        try:
            poll = select.poll()
            poll.register(self._socket)
            return not [event for _, event in poll.poll(0)
                        if event & ~select.POLLOUT]
        except (OSError, ValueError):
            return False

    def is_whole(self) -> bool:
        """Whether the peer of a Unix socket has not ended the connection."""
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
    for client in list(_clients):
        client._reset()


os.register_at_fork(after_in_child=_close_inherited)


class Answer(closing.Closing):
    """The answer to one request; its body is not read yet."""

    def __init__(self, client: 'Client', channel: Channel, method: str):
        self._client = client
        self._channel: Channel | None = channel
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

    def bad(self, why: str) -> BadAnswer:
        """An exception for the caller to raise; drops the connection."""
        self._good = False
        return BadAnswer(f'{self._client.address}: {why}')

    def unavailable(self, why: Any) -> DaemonUnavailable:
        """An exception for the caller to raise: the connection failed."""
        return self._client._unavailable(why)

    def switched(self) -> Channel:
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
            raise self._client._unavailable(e) from e

    def read_exactly(self, length: int, timeout: float) -> bytes:
        """As `read`, but the body must have so many bytes.

        :raises DaemonUnavailable: they did not come
        """
        data = self.read(length, timeout)
        if len(data) != length:
            raise self._client._unavailable('the answer was cut off')
        return data

    def close(self) -> None:
        """Close; the connection is kept if the whole body was read."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        whole = (self._good and self._response.isclosed()
                 and not self._response.will_close
                 and not self._response.length)
        self._client._release(channel, whole, channel.received - self._before)
        self._response.close()


# -- what is read -------------------------------------------------------------

class ImageStream(closing.Closing):
    """The bytes of a range of an image, in order.

    :param source: gives the bytes; closed with the stream
    :ivar piece: read no more bytes at once, so that they are copied only once
    :ivar size: bytes of the whole image
    :ivar left: bytes that are still to come
    :ivar used: when the stream was last read, by the monotonic clock
    """

    def __init__(self, source: Answer | shared_memory.Reader, size: int,
                 left: int, timeout: float):
        self._source = source
        self._timeout = timeout
        self.piece = (shared_memory.PIECE if isinstance(
            source, shared_memory.Reader) else _PIECE)
        self.size = size
        self.left = left
        self.used = time.monotonic()

    def read(self, length: int, timeout: float | None = None) -> bytes:
        """The next `length` bytes; fewer only at the end.

        :raises DaemonUnavailable: they did not come. Then the stream cannot be
            used any more.
        """
        length = min(length, self.left)
        if not length:
            return b''
        data = self._source.read_exactly(
            length, self._timeout if timeout is None else timeout)
        self.left -= length
        self.used = time.monotonic()
        return data

    def close(self) -> None:
        """Close the stream.

        If all bytes came over the socket, the connection is kept.
        """
        self._source.close()


def need_room(where: str, header: wire.RecipeHeader) -> None:
    """Check that there is space to keep a peer's description of an image.

    :raises BadAnswer: it would take more than half of the free space
    """
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free
    if header.most_bytes > free // 2:
        raise BadAnswer(
            f'{where}: the description of {header.size} bytes in '
            f'{header.extents} extents may take {header.most_bytes} bytes, '
            f'and {directory} has {free} free, of which half may be used')


class Recipe(closing.Closing):
    """An image's recipe, read while it comes.

    Iterating gives the image's extents, checked: they follow each other and
    fill the image; blocks have at most the block size, and fill their extent.

    :ivar upload_id: the upload that wrote the image
    """

    def __init__(self, answer: Answer, timeout: float):
        self._answer = answer
        self._bad = answer.bad
        self._timeout = timeout
        upload_id = answer.header('ETag').strip('"')
        if not hexids.is_valid(upload_id):
            raise self._bad('the answer does not say of which upload it is')
        self.header = wire.RecipeHeader.unpack(
            answer.read_exactly(wire.RECIPE_HEADER_BYTES, timeout), self._bad)
        self.upload_id = upload_id

    def __iter__(self) -> Iterator[wire.RecipeExtent]:
        header = self.header
        end = blocks = 0
        for _ in range(header.extents):
            extent = wire.read_extent(self._answer, header, end, self._timeout)
            end += extent.length
            blocks += extent.blocks
            if blocks > header.most_blocks:
                raise self._bad('the recipe has more blocks than an image of '
                                f'{header.size} bytes')
            yield extent
        if end != header.size:
            raise self._bad(f'the recipe ends at {end} of {header.size}')
        if self._answer.read(1, self._timeout):
            raise self._bad('the recipe goes on behind its end')

    def close(self) -> None:
        """Close the answer. The connection is kept if all of it was read."""
        self._answer.close()


# -- the client ---------------------------------------------------------------

class Client(closing.Closing):
    """Requests to one daemon. Thread-safe.

    :param address: ``unix:/path``, or ``https://host:port``
    :param cert: file with the client's certificate, for TLS
    :param key: file with its key, if that is not in the same file
    :param ca_file: file of certificate authorities that verify the server's
        certificate; None: the system's
    :param token: a Keystone token, with which the server asks Glance
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
        self._timeout = timeout
        self.received = self.sent = 0
        self._reset()
        _clients.add(self)
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
                with _naming(cert if key is None else f'{cert}, {key}'):
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
        self._kept: collections.deque[Channel] = collections.deque()
        self._busy: set[Channel] = set()

    def _unavailable(self, why: Any) -> DaemonUnavailable:
        if isinstance(why, OSError):
            why = why.strerror or why
        return DaemonUnavailable(f'{self.address}: {why or "no answer"}')

    def _connect(self) -> Channel:
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
            raise self._unavailable(e) from e
        try:
            if self._context is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock = self._context.wrap_socket(
                    sock, server_hostname=self._place[0])
        except (OSError, ValueError) as e:
            sock.close()
            raise self._unavailable(e) from e
        return Channel(sock)

    def _release(self, channel: Channel, keep: bool, received: int) -> None:
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
                self._timeout if timeout is None else timeout)
            channel.send(head + (body or b''))
            with self._lock:
                self.sent += len(head) + len(body or b'')
            answer = Answer(self, channel, method)
        except BaseException as e:
            self._release(channel, False, 0)
            if isinstance(e, (OSError, http.client.HTTPException,
                              ValueError)):
                raise self._unavailable(e) from e
            raise
        if answer.status >= 300:
            with answer:
                raise self._refusal(answer)
        return answer

    def _refusal(self, answer: Answer) -> ClientError:
        try:
            body = answer.read(LONGEST_ERROR, self._timeout)
            message = json.loads(body)['error']['message']
        except (ValueError, TypeError, KeyError, RecursionError,
                DaemonUnavailable):
            message = None
        if not isinstance(message, str):
            message = f'the daemon answered with status {answer.status}'
        return Refused(answer.status, f'{self.address}: {message[:2000]}')

    def _json(self, method: str, path: str, arguments: dict | None = None,
              timeout: float | None = None) -> dict:
        body = None if arguments is None else json.dumps(arguments).encode()
        return self._parsed(self.request(method, path, body, timeout))

    def _parsed(self, answer: Answer) -> dict:
        """The JSON object in an answer's body."""
        with answer:
            length = answer.length
            if length is not None and length > LONGEST_JSON:
                raise answer.bad(f'an answer of {length} bytes')
            data = answer.read(LONGEST_JSON + 1, self._timeout)
            if len(data) > LONGEST_JSON:
                raise answer.bad('the answer is too long')
            if length is not None and len(data) != length:
                raise self._unavailable('the answer was cut off')
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise BadAnswer(f'{self.address}: the answer is not JSON') from e
        if not isinstance(found, dict):
            raise BadAnswer(f'{self.address}: the answer is no object')
        return found

    def _list(self, path: str, name: str) -> list:
        found = self._json('GET', path).get(name)
        if not isinstance(found, list):
            raise BadAnswer(f'{self.address}: the answer has no {name}')
        return found

    # -- what the daemon knows --------------------------------------------

    def status(self) -> dict:
        """The daemon's status, and its repository's."""
        return self._json('GET', '/v1/status')

    def history(self, since: int = 0) -> list[dict]:
        """Samples for plots since `since`, seconds since 1970."""
        return self._list(f'/v1/history?since={int(since)}', 'samples')

    def images(self) -> list[dict]:
        """All images, each with the sums of its recipe."""
        return self._list('/v1/images', 'images')

    def groups(self) -> list[dict]:
        """All block groups, each with its size and its live blocks."""
        return self._list('/v1/groups', 'groups')

    def sharing(self) -> dict:
        """How many blocks the largest images have in common."""
        return self._json('GET', '/v1/sharing')

    # -- what the daemon does ---------------------------------------------

    def start(self, task: str, **arguments: Any) -> int:
        """Ask the daemon to run a task; returns the request's number."""
        number = self._json('POST', f'/v1/tasks/{_quoted(task)}',
                            arguments).get('number')
        if not isinstance(number, int):
            raise BadAnswer(f'{self.address}: the answer has no number')
        return number

    def task(self, task: str, after: int = 0, wait: float = 0) -> dict:
        """A task's status; at once, or when request `after` is over."""
        return self._json(
            'GET', f'/v1/tasks/{_quoted(task)}?after={after}&wait={wait:g}',
            timeout=self._timeout + wait)

    def wait(self, task: str, number: int,
             progress: Callable[[int, int, str], None] | None = None) -> dict:
        """Wait for the end of a task that `start` requested.

        :param progress: called as `progress(done, total, what)`
        :returns: its ``started``, ``finished``, ``result`` and ``error``
        """
        pause = 0.1
        while True:
            status = self.task(task, number, pause)
            last = status.get('last')
            if isinstance(last, dict) and status.get('finished', 0) >= number:
                return last
            if progress is not None and status.get('state') == 'running':
                progress(_number(status, 'done'), _number(status, 'total'),
                         str(status.get('what', ''))[:200])
            # Short tasks end soon; long ones are polled less often.
            pause = min(pause * 2, 1.0 if progress is not None else POLL)

    def mark_lost(self, image_id: str) -> dict:
        """Declare an image lost whose recipe is damaged."""
        return self._json(
            'POST', f'/v1/images/{_quoted(image_id)}/mark-lost', {},
            timeout=self._timeout + _MARKING)

    # -- images -----------------------------------------------------------

    def open_image(self, image_id: str, *, upload_id: str | None = None,
                   offset: int = 0, length: int | None = None,
                   repository_id: str | None = None,
                   timeout: float | None = None, shares: bool = True
                   ) -> ImageStream:
        """Read an image, or a range of it.

        :param upload_id: only if the image is of this upload
        :param length: bytes; the range must lie within the image. None: all
            that follow
        :param repository_id: only if the daemon serves this repository
        :param timeout: seconds until the answer begins
        :param shares: whether the daemon may share memory. Not if something
            in between relays the socket's bytes: it passes on no descriptors
        """
        path = f'/v1/images/{_quoted(image_id)}'
        if upload_id is not None:
            path += f'?upload={_quoted(upload_id)}'
        headers = {}
        if offset or length is not None:
            last = '' if length is None else str(offset + length - 1)
            headers['Range'] = f'bytes={offset}-{last}'
        ranged = bool(headers)
        if shares and self._path is not None and (
                length is None or length >= shared_memory.LEAST):
            # A daemon that shares no memory answers as if this were not here.
            headers['Connection'] = 'Upgrade'
            headers['Upgrade'] = shared_memory.PROTOCOL
        answer = self.request('GET', path, timeout=timeout,
                              headers=headers)
        try:
            found = answer.header('Dedup-Repository')
            if repository_id is not None and found != repository_id:
                raise answer.bad(f'it serves the repository {found[:100]!r} '
                                 f'and not {repository_id}')
            timeout = self._timeout if timeout is None else timeout
            if answer.status == http.HTTPStatus.SWITCHING_PROTOCOLS:
                return _shared(answer, offset, length, timeout)
            size = _size_of(answer, offset, length, ranged)
            return ImageStream(answer, size, answer.length or 0, timeout)
        except BaseException:
            answer.close()
            raise

    def recipe(self, image_id: str) -> Recipe:
        """An image's recipe. The caller closes it."""
        answer = self.request('GET', f'/v1/images/{_quoted(image_id)}/recipe')
        try:
            return Recipe(answer, self._timeout)
        except BaseException:
            answer.close()
            raise

    def blocks(self, image_id: str, upload_id: str,
               ranges: Sequence[tuple[int, int]]) -> Iterator[wire.Frame]:
        """Ranges of an image, in frames, in any order.

        Each byte comes at most once. The caller has to verify the blocks.

        :param ranges: `(offset, length)`, sorted, apart from each other, at
            block boundaries; the daemon takes at most 16384
        """
        body = json.dumps({'ranges': [list(r) for r in ranges]},
                          separators=(',', ':')).encode()
        path = (f'/v1/images/{_quoted(image_id)}/blocks'
                f'?upload={_quoted(upload_id)}')
        with self.request('POST', path, body) as answer:
            yield from wire.Frames(answer, ranges, self._timeout)

    def begin_replica(self, image_id: str, upload_id: str,
                      header: wire.RecipeHeader, sender: str,
                      project: str = '', hash_name: str = '',
                      hash_value: str = '') -> 'Replica':
        """Begin to send an image to the daemon, or go on.

        :param sender: 32 hexadecimal digits; the same sender may go on with
            what it began before
        :param project: the project that owns the image
        :param hash_name: name of a hash of the image's bytes; '': none known
        :param hash_value: that hash, in hexadecimal digits
        :raises Refused: 503, if another sender is sending the image; 404 or
            405, if the daemon does not support replicas
        """
        path = f'/v1/replicas/{_quoted(image_id)}'
        query = urllib.parse.urlencode({
            'upload': upload_id, 'sender': sender, 'project': project,
            **({'hash': f'{hash_name}:{hash_value}'} if hash_name else {})})
        return Replica(self, path, header.size, self._parsed(self.request(
            'POST', f'{path}?{query}', header.pack(), headers=BINARY)))


class Replica:
    """An image that is being sent to the daemon's repository.

    :ivar offset: the offset in the image from which lots are to be offered
    :ivar exists: the image is there already, and offers are only compared
    :ivar whole: why all blocks are requested; None: only missing ones are
    :ivar lot_blocks: the most blocks of a lot
    :ivar lot_bytes: the most bytes of a lot's blocks
    :ivar lot_zeros: the most bytes of zeros of a lot
    :ivar lots: how many lots may be under way
    """

    def __init__(self, client: Client, path: str, size: int,
                 facts: dict) -> None:
        self._client = client
        self._path = path
        token, whole = facts.get('replica'), facts.get('whole')
        numbers = [n for name in (
            'offset', 'lot_blocks', 'lot_bytes', 'lot_zeros', 'lots')
            if isinstance(n := facts.get(name), int) and 0 <= n < 1 << 62]
        if (not isinstance(token, str) or len(numbers) != 5
                or not all(numbers[1:4]) or numbers[4] < 2
                or numbers[0] > size
                or not isinstance(whole, str | None)):
            raise BadAnswer(f'{client.address}: the answer does not say how '
                            'to send the image')
        self._token = token
        self.whole = whole
        self.exists = facts.get('exists') is True
        (self.offset, self.lot_blocks, self.lot_bytes, self.lot_zeros,
         self.lots) = numbers

    def _send(self, what: str, body: bytes, **query: Any) -> dict:
        parameters = urllib.parse.urlencode(
            {'replica': self._token, **query})
        client = self._client
        return client._parsed(client.request(
            'POST', f'{self._path}{what}?{parameters}', body,
            client._timeout + len(body) / SLOWEST, headers=BINARY))

    def offer(self, offset: int, end: int, extents: bytes
              ) -> tuple[list[tuple[int, int]], int]:
        """Describe a lot.

        Returns the ranges of the missing blocks, and the blocks' number.

        :param end: the offset behind the lot
        :param extents: as in a recipe
        """
        answer = self._send('/lots', extents, offset=offset)
        found = answer.get('ranges')
        if not isinstance(found, list) or not all(
                isinstance(r, list) and len(r) == 2
                and all(type(n) is int for n in r) for r in found):
            raise BadAnswer(f'{self._client.address}: the answer has no '
                            'ranges')
        before = offset
        for start, length in found:
            if start < before or not 0 < length <= end - start:
                raise BadAnswer(
                    f'{self._client.address}: {length} bytes at {start} are '
                    f'asked for, of a lot from {offset} to {end}')
            before = start + length
        return ([(start, length) for start, length in found],
                _number(answer, 'blocks'))

    def send(self, offset: int, frames: bytes) -> None:
        """Send blocks of the lot at this offset."""
        self._send('/blocks', frames, offset=offset)

    def commit(self) -> dict:
        """Commit the image; returns its upload id there and its location."""
        found = self._send('/commit', b'')
        for name in ('upload_id', 'location'):
            if not isinstance(found.get(name), str):
                raise BadAnswer(f'{self._client.address}: the answer has no '
                                f'{name}')
        return found

    def give_up(self) -> None:
        """Let others send the image; they find the blocks that came."""
        query = urllib.parse.urlencode({'replica': self._token})
        self._client._json('DELETE', f'{self._path}?{query}')


@contextlib.contextmanager
def _naming(file: str | None) -> Iterator[None]:
    """Make OpenSSL's errors name the file."""
    try:
        yield
    except ssl.SSLError as e:
        raise ValueError(f'{file}: {e.reason or e}') from e
    except OSError as e:
        e.filename = file
        raise


def repository_of(status: dict) -> str:
    """The repository's id in a daemon's status."""
    repository = status.get('repository')
    found = repository.get('id') if isinstance(repository, dict) else None
    if not isinstance(found, str):
        raise BadAnswer('the status names no repository')
    return found


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe='')


def _number(fields: dict, name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) and value >= 0 else 0


def _shared(answer: Answer, offset: int, length: int | None, timeout: float
            ) -> ImageStream:
    """A range of an image, through the memory that the daemon shares."""
    size = shared_memory.image_size(answer)
    left = size - offset if length is None else length
    if not 0 <= left <= size - offset:
        raise answer.bad(f'{left} bytes at {offset} of an image of {size}')
    return ImageStream(shared_memory.Reader(answer, offset, left), size, left,
                       timeout)


def _size_of(answer: Answer, offset: int, length: int | None,
             ranged: bool) -> int:
    """The image's size, if the answer has the requested range."""
    found = answer.length
    if found is None:
        raise answer.bad('an image without its length')
    if not ranged:
        if answer.status != 200:
            raise answer.bad(f'an image with status {answer.status}')
        return found
    words = answer.header('Content-Range').partition('/')
    try:
        size = int(words[2])
    except ValueError:
        size = -1
    wanted = size - offset if length is None else length
    if (answer.status != 206 or found != wanted or size < offset + wanted
            or words[0] != f'bytes {offset}-{offset + wanted - 1}'):
        raise answer.bad(
            f'{found} bytes with status {answer.status} and the range '
            f'{answer.header("Content-Range")[:100]!r}, not what was asked '
            'for')
    return size
