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

"""The client of the daemon: over its Unix socket, or TCP with TLS.

What a server sends is not trusted: every length is bounded, every read has an
end in time, and a frame is checked before a byte of it is handed out.

Sizes and offsets are in bytes, times in seconds.
"""

import bisect
import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import http.client
import io
import json
import os
import re
import select
import socket
import ssl
import struct
import threading
import time
from typing import Any
import urllib.parse
import weakref

import xxhash

#: The most that an answer in JSON may have; a hundred thousand images have
#: some 30 MiB.
LONGEST_JSON = 128 << 20
#: The most that is read of an error's body.
LONGEST_ERROR = 64 << 10
#: The longest plain, or stored, bytes of a frame.
LONGEST_FRAME = 1 << 20
#: The most ranges of one request for blocks.
MOST_RANGES = 16384
#: How long one long poll asks the daemon to wait.
POLL = 10.0
# Seconds that the daemon may wait for its maintainer, and that may take.
_MARKING = 120.0

_FRAME = struct.Struct('<4sBBHIIQ')
_PLACE = struct.Struct('<QII')
_RECIPE = struct.Struct('<8sI4xQQQ16s16sII')
_EXTENT = struct.Struct('<QQI4x')
_LENGTH = struct.Struct('<32xI')  # of a block, behind its fingerprint
_FRAME_MAGIC = b'GDFR'
_RECIPE_MAGIC = b'GDWIRE\0'
_RECIPE_VERSION = 2
#: Blocks of an extent, which lies in one group.
_MOST_BLOCKS = 32768
_BLOCK = 36                     # fingerprint, length
_NONE, _LZ4, _ZSTD = range(3)


class ClientError(Exception):
    """Base of all that the client raises on purpose."""


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

# For the child of a fork.
_channels: 'weakref.WeakSet[Channel]' = weakref.WeakSet()
_clients: 'weakref.WeakSet[Client]' = weakref.WeakSet()


class Channel(io.RawIOBase):
    """A socket of which every read ends by a deadline.

    It is the file that http.client parses an answer from; closing that file
    does not close the socket, which may serve further requests.

    In the child of a fork it is closed: two readers of one stream would each
    get some of the bytes, and the peer would not learn that one hung up.
    """

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self.deadline = 0.0
        self.received = 0
        _channels.add(self)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, 1 << 16)

    def readable(self) -> bool:
        return True

    def _wait(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError('no answer in time')
        self._socket.settimeout(left)

    def readinto(self, buffer: Any) -> int:
        self._wait()
        number = self._socket.recv_into(buffer)
        self.received += number
        return number

    def send(self, data: bytes) -> None:
        self._wait()
        # The limit is for all of it together.
        self._socket.sendall(data)

    def close(self) -> None:
        """Only what http.client calls at the end of an answer."""

    def usable(self) -> bool:
        """Whether another request can be sent: open, and nothing to read."""
        try:
            poll = select.poll()
            poll.register(self._socket)
            return not [event for _, event in poll.poll(0)
                        if event & ~select.POLLOUT]
        except (OSError, ValueError):
            return False

    def break_off(self) -> None:
        """End what is read or sent, also by another thread."""
        with contextlib.suppress(OSError):
            # Of TLS it is the plain one's that wakes a thread.
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


class Answer:
    """The answer to one request, its body not read yet."""

    def __init__(self, client: 'Client', channel: Channel, method: str):
        self._client = client
        self._channel = channel
        self._before = channel.received
        self._good = True
        self._response = http.client.HTTPResponse(
            channel, method=method)     # type: ignore[arg-type]
        self._response.begin()
        # A body in chunks is slow to read in small pieces.
        self._file = io.BufferedReader(
            self._response, 1 << 16)    # type: ignore[arg-type]
        self.status = self._response.status
        self.headers = self._response.headers

    def header(self, name: str) -> str:
        return self.headers.get(name, '')

    def bad(self, why: str) -> BadAnswer:
        """An exception, to be raised; the connection is not kept."""
        self._good = False
        return BadAnswer(f'{self._client.address}: {why}')

    @property
    def length(self) -> int | None:
        """Of the body, before any of it is read; None if it is in chunks."""
        if self._response.chunked:
            return None
        if self._response.length is None:
            raise self.bad('the answer does not say how long it is')
        return self._response.length

    def read(self, length: int, timeout: float) -> bytes:
        """So many bytes, in so many seconds; fewer only at the end.

        :raises DaemonUnavailable: they did not come
        """
        self._channel.deadline = time.monotonic() + timeout
        try:
            return self._file.read(length)
        except (OSError, http.client.HTTPException, ValueError) as e:
            self._channel.hang_up()
            raise self._client._unavailable(e) from e

    def read_exactly(self, length: int, timeout: float) -> bytes:
        data = self.read(length, timeout)
        if len(data) != length:
            raise self._client._unavailable('the answer was cut off')
        return data

    def close(self) -> None:
        """Let go; the connection is kept if the whole body was read."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        whole = (self._good and self._response.isclosed()
                 and not self._response.will_close
                 and not self._response.length)
        self._client._release(channel, whole, channel.received - self._before)
        self._response.close()

    def __enter__(self) -> 'Answer':
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


# -- what is read -------------------------------------------------------------

class ImageStream:
    """The bytes of a range of an image, in order.

    :ivar size: of the image
    :ivar left: bytes that are still to come
    :ivar used: when it was last read, by the monotonic clock
    """

    def __init__(self, answer: Answer, size: int, timeout: float):
        self._answer = answer
        self._timeout = timeout
        self.size = size
        self.left = answer.length or 0
        self.used = time.monotonic()

    def read(self, length: int, timeout: float | None = None) -> bytes:
        """The next `length` bytes; fewer only at the end.

        :raises DaemonUnavailable: they did not come. The stream is of no
            more use then.
        """
        length = min(length, self.left)
        if not length:
            return b''
        data = self._answer.read_exactly(
            length, self._timeout if timeout is None else timeout)
        self.left -= length
        self.used = time.monotonic()
        return data

    def close(self) -> None:
        self._answer.close()

    def __enter__(self) -> 'ImageStream':
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class Frame:
    """Plain bytes, and where they belong."""

    plain: bytes
    places: list[tuple[int, int, int]]
    """offset in the image, offset in `plain`, length"""


@dataclasses.dataclass(frozen=True)
class RecipeHeader:
    block_size: int
    size: int
    zero_bytes: int
    extents: int
    fingerprint: str
    scope: bytes
    """the id of that of the fingerprints"""
    cutting: str
    """as in the repository's parameters"""


@dataclasses.dataclass(frozen=True)
class RecipeExtent:
    """A run of zeros, if it has no blocks."""

    offset: int
    length: int
    blocks: int
    table: bytes
    """for each block 36 bytes: fingerprint (32), length (32 bits)"""


class Recipe:
    """What an image consists of, as it comes.

    Iterating gives its extents, checked: they follow each other and make up
    the image; blocks have at most the block size, and make up their extent.

    :ivar upload_id: the upload that wrote the image
    """

    def __init__(self, answer: Answer, timeout: float):
        self._answer = answer
        self._bad = answer.bad
        self._timeout = timeout
        upload_id = answer.header('ETag').strip('"')
        if not re.fullmatch('[0-9a-f]{32}', upload_id):
            raise self._bad('the answer does not say of which upload it is')
        (magic, block_size, size, zero_bytes, extents, name, scope, minimum,
         average) = _RECIPE.unpack(answer.read_exactly(_RECIPE.size, timeout))
        if magic[:-1] != _RECIPE_MAGIC:
            raise self._bad('the answer is not a recipe')
        if magic[-1] != _RECIPE_VERSION:
            raise self._bad(f'the recipe is of version {magic[-1]}; this '
                            f'program knows {_RECIPE_VERSION}')
        if not 512 <= block_size <= 65536 or block_size & (block_size - 1):
            raise self._bad(f'the recipe has blocks of {block_size} bytes')
        if (minimum or average) and not 64 <= minimum < average < block_size:
            raise self._bad(f'the recipe has blocks of {minimum} to '
                            f'{block_size} bytes, on an average {average}')
        if size >= 1 << 62 or zero_bytes > size or extents > size:
            raise self._bad(f'the recipe is of {size} bytes, {zero_bytes} '
                            f'zeros and {extents} extents')
        self.header = RecipeHeader(
            block_size, size, zero_bytes, extents,
            name.rstrip(b'\0').decode('ascii', 'replace'), scope,
            f'gear {minimum} {average}' if average else 'fixed')
        self.upload_id = upload_id

    def __iter__(self) -> Iterator[RecipeExtent]:
        header = self.header
        end = 0
        for _ in range(header.extents):
            extent = self._extent(end)
            end += extent.length
            yield extent
        if end != header.size:
            raise self._bad(f'the recipe ends at {end} of {header.size}')
        if self._answer.read(1, self._timeout):
            raise self._bad('the recipe goes on behind its end')

    def _extent(self, end: int) -> RecipeExtent:
        header = self.header
        offset, length, blocks = _EXTENT.unpack(
            self._answer.read_exactly(_EXTENT.size, self._timeout))
        # Which also bounds what is read and kept of it.
        if (offset != end or not 0 < length <= header.size - offset
                or blocks > min(length, _MOST_BLOCKS)):
            raise self._bad(f'the recipe has an extent of {length} bytes and '
                            f'{blocks} blocks at {offset}, behind {end}')
        table = self._answer.read_exactly(blocks * _BLOCK, self._timeout)
        lengths = [n for n, in _LENGTH.iter_unpack(table)]
        if blocks and not (0 < min(lengths) and max(lengths)
                           <= header.block_size and sum(lengths) == length):
            raise self._bad('the recipe has a block of another length '
                            f'in the extent at {offset}')
        return RecipeExtent(offset, length, blocks, table)

    def close(self) -> None:
        self._answer.close()

    def __enter__(self) -> 'Recipe':
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


def _unpack_stored(codec: int, stored: bytes, length: int) -> bytes:
    """The plain bytes of a frame.

    :raises ValueError: it does not have so many
    """
    if codec == _NONE:
        plain = stored
    elif codec == _LZ4:
        from lz4 import block as lz4_block

        try:
            plain = lz4_block.decompress(stored, uncompressed_size=length)
        except lz4_block.LZ4BlockError as e:
            raise ValueError(str(e)) from e
    elif codec == _ZSTD:
        import zstandard

        try:
            # A frame may claim any size, and it would be allocated.
            if zstandard.frame_content_size(stored) not in (-1, length):
                raise ValueError('it claims another length')
            plain = zstandard.ZstdDecompressor().decompress(
                stored, max_output_size=length)
        except zstandard.ZstdError as e:
            raise ValueError(str(e)) from e
    else:
        raise ValueError(f'there is no codec {codec}')
    if len(plain) != length:
        raise ValueError(f'it has {len(plain)} bytes and not {length}')
    return plain


class _Frames:
    """Takes a stream of frames apart.

    :param ranges: what was asked for: sorted, and apart from each other
    """

    def __init__(self, answer: Answer, ranges: Sequence[tuple[int, int]],
                 timeout: float):
        self._answer = answer
        self._bad = answer.bad
        self._timeout = timeout
        self._starts = [offset for offset, _ in ranges]
        self._ends = [offset + length for offset, length in ranges]
        self._left = sum(length for _, length in ranges)

    def __iter__(self) -> Iterator[Frame]:
        while (frame := self._next()) is not None:
            yield frame
        if self._answer.read(1, self._timeout):
            raise self._bad('the frames go on behind their end')

    def _next(self) -> Frame | None:
        head = self._answer.read_exactly(_FRAME.size, self._timeout)
        magic, codec, _, places, plain, stored, checksum = _FRAME.unpack(head)
        if magic != _FRAME_MAGIC:
            raise self._bad('the answer is not a frame')
        last = not places
        if last and (plain or stored) or not last and not (
                0 < stored <= plain <= LONGEST_FRAME):
            raise self._bad(f'a frame has {places} places, {plain} bytes, '
                            f'stored as {stored}')
        body = self._answer.read_exactly(
            places * _PLACE.size + stored, self._timeout)
        if xxhash.xxh3_64_intdigest(head[:16] + body) != checksum:
            raise self._bad("a frame's checksum is wrong")
        if last:
            return None
        found = [self._place(body, number, plain) for number in range(places)]
        try:
            data = _unpack_stored(codec, body[places * _PLACE.size:], plain)
        except ValueError as e:
            raise self._bad(f'a frame does not decompress: {e}') from e
        return Frame(data, found)

    def _place(self, body: bytes, number: int,
               plain: int) -> tuple[int, int, int]:
        place = _PLACE.unpack_from(body, number * _PLACE.size)
        offset, start, length = place
        if not length or start + length > plain:
            raise self._bad(f'a frame of {plain} bytes has a place of '
                            f'{length} at {start}')
        at = bisect.bisect_right(self._starts, offset) - 1
        if at < 0 or offset + length > self._ends[at]:
            raise self._bad(f'{length} bytes at {offset} came, which were '
                            'not asked for')
        self._left -= length
        if self._left < 0:
            raise self._bad('more bytes came than were asked for')
        return place


# -- the client ---------------------------------------------------------------

class Client:
    """Requests to one daemon. Thread-safe.

    :param address: ``unix:/path``, or ``https://host:port``
    :param cert: file of the client's certificate, for TLS
    :param key: file of its key, if that is not in the same file
    :param ca_file: by which the server's certificate is judged; None: by the
        system's
    :param token: of Keystone, for the server to ask Glance with
    :param connect_timeout: until the connection stands
    :param timeout: until an answer begins; likewise for each further piece
    :param keep: so many connections without a request are kept for the next
    :raises ValueError: for an address, token or file that cannot be right
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
        self._received = 0
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
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.settimeout(self._connect_timeout)
        except OSError as e:
            raise self._unavailable(e) from e
        try:
            if self._path is not None:
                sock.connect(self._path)
            if self._context is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock = self._context.wrap_socket(
                    sock, server_hostname=self._place[0])
        except (OSError, ValueError) as e:
            sock.close()
            raise self._unavailable(e) from e
        return Channel(sock)

    def _release(self, channel: Channel, keep: bool, received: int) -> None:
        """A request is over."""
        with self._lock:
            self._received += received
            self._busy.discard(channel)
            if keep and len(self._kept) < self._keep:
                self._kept.append(channel)
                return
        channel.hang_up()

    def interrupt(self) -> None:
        """Break off all requests that other threads are at."""
        with self._lock:
            for channel in self._busy:
                channel.break_off()

    @property
    def received(self) -> int:
        """Bytes of all answers that are over, as they came."""
        return self._received

    def close(self) -> None:
        """Close the connections without a request. Idempotent."""
        with self._lock:
            while self._kept:
                self._kept.pop().hang_up()

    def __enter__(self) -> 'Client':
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    # -- requests ---------------------------------------------------------

    def request(self, method: str, path: str, body: bytes | None = None,
                timeout: float | None = None, **headers: str) -> Answer:
        """Send a request; its answer is a good one.

        :param path: with its query, quoted
        :param timeout: until the answer begins
        :raises Refused: the answer is an error
        :raises DaemonUnavailable: there is none
        """
        lines = [f'{method} {path} HTTP/1.1']
        headers = {**self._headers, **headers}
        if body is not None:
            headers['Content-Type'] = 'application/json'
            headers['Content-Length'] = str(len(body))
        lines += [f'{name.replace("_", "-")}: {value}'
                  for name, value in headers.items()]
        head = '\r\n'.join((*lines, '', '')).encode('ascii')
        channel = self._connect()
        with self._lock:
            self._busy.add(channel)
        try:
            channel.deadline = time.monotonic() + (
                self._timeout if timeout is None else timeout)
            channel.send(head + (body or b''))
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
        with self.request(method, path, body, timeout) as answer:
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
        """What the daemon says of itself and of its repository."""
        return self._json('GET', '/v1/status')

    def history(self, since: int = 0) -> list[dict]:
        """Samples for plots, of the time since `since`."""
        return self._list(f'/v1/history?since={int(since)}', 'samples')

    def images(self) -> list[dict]:
        return self._list('/v1/images', 'images')

    def groups(self) -> list[dict]:
        return self._list('/v1/groups', 'groups')

    def sharing(self) -> dict:
        """How many blocks the largest images have in common."""
        return self._json('GET', '/v1/sharing')

    # -- what the daemon does ---------------------------------------------

    def start(self, task: str, **arguments: Any) -> int:
        """Ask for a task to be run; returns the number of the request."""
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
        """Wait for the end of a request that `start` made.

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
            # Short tasks are over soon; long ones are not asked often.
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
                   timeout: float | None = None) -> ImageStream:
        """Read an image, or a range of it.

        :param upload_id: only if the image is of this upload
        :param length: bytes; the range must lie within the image. None: all
            that follow
        :param repository_id: only if the daemon is this repository's
        :param timeout: until the answer begins
        """
        path = f'/v1/images/{_quoted(image_id)}'
        if upload_id is not None:
            path += f'?upload={_quoted(upload_id)}'
        headers = {}
        if offset or length is not None:
            last = '' if length is None else str(offset + length - 1)
            headers['Range'] = f'bytes={offset}-{last}'
        answer = self.request('GET', path, timeout=timeout, **headers)
        try:
            found = answer.header('Dedup-Repository')
            if repository_id is not None and found != repository_id:
                raise answer.bad(f'it serves the repository {found[:100]!r} '
                                 f'and not {repository_id}')
            size = _size_of(answer, offset, length, bool(headers))
            return ImageStream(
                answer, size,
                self._timeout if timeout is None else timeout)
        except BaseException:
            answer.close()
            raise

    def recipe(self, image_id: str) -> Recipe:
        """What an image consists of. To be closed."""
        answer = self.request('GET', f'/v1/images/{_quoted(image_id)}/recipe')
        try:
            return Recipe(answer, self._timeout)
        except BaseException:
            answer.close()
            raise

    def blocks(self, image_id: str, upload_id: str,
               ranges: Sequence[tuple[int, int]]) -> Iterator[Frame]:
        """Ranges of an image, in frames, in any order.

        Each byte comes at most once. That the blocks are the right ones is
        for the caller to verify.

        :param ranges: `(offset, length)`, sorted, apart from each other, at
            block boundaries; at most MOST_RANGES
        """
        body = json.dumps({'ranges': [list(r) for r in ranges]},
                          separators=(',', ':')).encode()
        path = (f'/v1/images/{_quoted(image_id)}/blocks'
                f'?upload={_quoted(upload_id)}')
        with self.request('POST', path, body) as answer:
            yield from _Frames(answer, ranges, self._timeout)


@contextlib.contextmanager
def _naming(file: str | None) -> Iterator[None]:
    """Have errors of OpenSSL's name the file."""
    try:
        yield
    except ssl.SSLError as e:
        raise ValueError(f'{file}: {e.reason or e}') from e
    except OSError as e:
        e.filename = file
        raise


def repository_of(status: dict) -> str:
    """The id of the repository that a status is of."""
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


def _size_of(answer: Answer, offset: int, length: int | None,
             ranged: bool) -> int:
    """The image's size, if the answer has the range that was asked for."""
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
