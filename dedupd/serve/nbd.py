# SPDX-License-Identifier: Apache-2.0

"""An NBD server on a Unix socket: images as read-only block devices.

A guest boots from an image that is here, or arrives, and writes to a file of
its own host (``qemu-img create -b nbd+unix://...``). The images are the
exports, named by their ids. The server speaks the reading part of the
protocol, in fixed newstyle: structured replies, the context
``base:allocation``, prefetching. It has no TLS, because clients are on this
host and known by their credentials.

The context ``qemu:dirty-bitmap:<id>`` has the ranges that changed since
another image of the same size, such as an earlier snapshot of a volume.

Everything is bounded, whatever a client sends or does not take: requests under
way, the memory of their replies, and the times within which a message must
arrive and some part of a reply must be taken. Between two requests there is no
limit: a guest may send none for a year.

The server disconnects a client that breaks the protocol, and logs a line. It
answers a request that it cannot serve with an error, and serves the next one.
"""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Callable
from collections.abc import Collection
from concurrent import futures
import contextlib
import socket
from typing import Any

from oslo_log import log

from dedupd.http import connection_limits
from dedupd.http import limited
from dedupd.http import messages
from dedupd.http import streams
from dedupd.serve import image_source
from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.base import thread_pool
from glance_dedup.client import nbd_protocol
from glance_dedup.repository import image_diff
from glance_dedup.repository import image_repository

LOG = log.getLogger(__name__)
_STRANGERS = limited.Log(LOG)
_FAILED_READS = limited.Log(LOG)

#: Threads that read, of all connections.
THREADS = 16
#: The most requests of a connection that are under way at once.
REQUESTS = 64
#: Bytes that are read and sent at once.
PIECE = 256 * 1024
#: Bytes of replies in memory. A connection may always hold one piece; it may
#: hold more, up to CONNECTION_BYTES, out of SHARED_BYTES for all connections.
CONNECTION_BYTES = 8 << 20
SHARED_BYTES = 256 << 20

_FLAGS = (nbd_protocol.Flag.HAS_FLAGS | nbd_protocol.Flag.READ_ONLY
          | nbd_protocol.Flag.SEND_FLUSH | nbd_protocol.Flag.CAN_MULTI_CONN
          | nbd_protocol.Flag.SEND_CACHE)
_WRITES = (nbd_protocol.Command.WRITE, nbd_protocol.Command.TRIM,
           nbd_protocol.Command.WRITE_ZEROES)
#: The flags that each reading command may have.
_ALLOWED: dict[int, int] = {
    nbd_protocol.Command.READ: nbd_protocol.RequestFlag.DF,
    nbd_protocol.Command.CACHE: 0,
    nbd_protocol.Command.BLOCK_STATUS: nbd_protocol.RequestFlag.REQ_ONE}
_META_CONTEXT = (nbd_protocol.Option.LIST_META_CONTEXT,
                 nbd_protocol.Option.SET_META_CONTEXT)
_NO_DATA = (nbd_protocol.Option.LIST, nbd_protocol.Option.STRUCTURED_REPLY)
#: Errors that reading may raise; any other is a bug of this program.
_EXPECTED = (exceptions.RepositoryError, image_source.ArrivalFailed,
             MemoryError)


class Exports:
    """The images, threads, limits and counts that all connections share.

    :param path: the path of the socket, for messages
    :param opener: opens an image for reading; called in a thread
    :param stopping: set when the daemon ends
    :ivar served: exports that clients use now
    :ivar requests: answered requests
    :ivar sent: sent bytes of images
    :ivar errors: valid requests that could not be served
    """

    def __init__(self, path: str,
                 repository: image_repository.Repository,
                 opener: Callable[[str], image_source.Reading],
                 limits: messages.Limits, stopping: asyncio.Event) -> None:
        self._path = path
        self.repository = repository
        self.opener = opener
        self.limits = limits
        self.stopping = stopping
        self.memory = _Memory()
        # Not the threads of HTTP, because these may wait for arrivals.
        self._workers = thread_pool.Workers('dedupd-nbd', THREADS)
        # One comparison at a time, so that other clients' reads have threads.
        self.comparing = asyncio.Semaphore()
        self.served = self.requests = self.sent = self.errors = 0

    def connection(self, sock: socket.socket, place: connection_limits.Place
                   ) -> '_Connection':
        """For `listeners.Listener.other`."""
        return _Connection(self, sock, place)

    def run(self, function: Callable, *args: Any) -> asyncio.Future:
        """Call a function in a thread."""
        return asyncio.wrap_future(self._workers.submit(function, *args))

    async def open(self, function: Callable[..., Any], *args: Any) -> Any:
        """Open something in a thread; close it if nobody waits any more."""
        future = self._workers.submit(function, *args)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_close_result)
            raise

    def close(self, opened: Any) -> None:
        """Close something in a thread. No cancelled task can prevent it."""
        self._workers.submit(opened.close)

    def status(self) -> dict[str, Any]:
        """The figures since the start, for the daemon's status."""
        return {'socket': self._path, 'exports': self.served,
                'requests': self.requests, 'bytes': self.sent,
                'errors': self.errors}


def _close_result(future: futures.Future) -> None:
    if not thread_pool.failed(future):
        future.result().close()


class _Memory:
    """The memory that the replies of all connections hold together."""

    def __init__(self) -> None:
        self._shared = 0
        self._waiting: dict[asyncio.Future, tuple[_Share, int]] = {}

    @contextlib.asynccontextmanager
    async def hold(self, share: '_Share', size: int) -> AsyncIterator[None]:
        """Hold so many bytes, as soon as there is room for them."""
        # Only one task of each connection waits for room. Thousands of tasks
        # would take as long to check for it as to be served.
        async with share.turn:
            while not self._fits(share, size):
                future = asyncio.get_running_loop().create_future()
                self._waiting[future] = share, size
                try:
                    await future
                finally:
                    del self._waiting[future]
            self._change(share, size)
        try:
            yield
        finally:
            self._change(share, -size)
            for future, wanted in self._waiting.items():
                if not future.done() and self._fits(*wanted):
                    future.set_result(None)

    def _fits(self, share: '_Share', size: int) -> bool:
        after = share.held + size
        if share.held and after > CONNECTION_BYTES:
            return False    # alone it may be larger
        more = _beyond(after) - _beyond(share.held)
        return not more or self._shared + more <= SHARED_BYTES

    def _change(self, share: '_Share', size: int) -> None:
        self._shared -= _beyond(share.held)
        share.held += size
        self._shared += _beyond(share.held)


def _beyond(held: int) -> int:
    """The part of a connection's bytes that counts as shared."""
    return max(0, held - PIECE)


class _Share:
    """The memory that one connection holds."""

    def __init__(self) -> None:
        self.held = 0
        self.turn = asyncio.Lock()


class _Input:
    """The client's bytes, taken in the lengths of the protocol."""

    def __init__(self, stream: streams.SocketStream) -> None:
        self._stream = stream
        self._data = bytearray()

    async def any(self) -> bool:
        """Wait until bytes come; False at the end of the client's bytes."""
        if not self._data:
            self._data += await self._stream.receive()
        return bool(self._data)

    async def take(self, length: int) -> bytes:
        # Thousands of messages may have come already. Before each, other
        # tasks go on.
        await asyncio.sleep(0)
        while len(self._data) < length:
            await self._more()
        data = bytes(self._data[:length])
        del self._data[:length]
        return data

    async def skip(self, length: int) -> None:
        while length > len(self._data):
            length -= len(self._data)
            self._data.clear()
            await self._more()
        del self._data[:length]

    async def _more(self) -> None:
        data = await self._stream.receive()
        if not data:
            raise streams.Disconnected('it ended within a message')
        self._data += data


class _Connection:
    """One client: it negotiates, and then reads an image."""

    def __init__(self, exports: Exports, sock: socket.socket,
                 place: connection_limits.Place) -> None:
        self._exports = exports
        self._place = place
        self._stream = streams.SocketStream(sock)
        self._input = _Input(self._stream)
        self._sending = asyncio.Lock()
        self._share = _Share()
        self._room = asyncio.Semaphore(REQUESTS)
        self._under_way = 0
        self._no_zeroes = False
        self._structured = False
        #: The export of the last request for metadata contexts.
        self._context: bytes | None = None
        #: Whether it selected the context of zeros.
        self._tells_zeros = False
        #: The images of the context of changes, if that was selected.
        self._comparison: image_diff.Comparison | None = None
        self._name = ''
        self._complaint = ''

    @property
    def idle(self) -> bool:
        return not self._under_way

    async def run(self) -> None:
        try:
            reading = await self._negotiate()
            if reading is not None:
                await self._serve(reading)
        except nbd_protocol.Violation as e:
            _STRANGERS.warning(
                'An NBD client%s was disconnected: %s.',
                f' of image {self._name}' if self._name else '', e)
        except (streams.Disconnected, TimeoutError) as e:
            LOG.debug('NBD connection: %s', e or 'it was too slow')
        finally:
            self._stream.close()
            self._forget_contexts()

    async def _send(self, data: Any) -> None:
        await self._stream.send(data, self._exports.limits.write_timeout)

    def _in_time(self) -> asyncio.Timeout:
        """The time limit of a message, from its first byte on."""
        return asyncio.timeout(self._exports.limits.header_timeout)

    # -- negotiation -------------------------------------------------------

    async def _negotiate(self) -> image_source.Reading | None:
        """Negotiate until the client has an export; None: it gets none."""
        async with self._in_time():
            await self._send(nbd_protocol.GREETING)
            flags, = nbd_protocol.CLIENT_FLAGS.unpack(await self._input.take(
                nbd_protocol.CLIENT_FLAGS.size))
        if flags & ~nbd_protocol.NO_ZEROES != nbd_protocol.FIXED_NEWSTYLE:
            raise nbd_protocol.Violation(f'its flags are {flags:#x}')
        self._no_zeroes = bool(flags & nbd_protocol.NO_ZEROES)
        while True:
            # Only until the client has an export: a guest never loses the
            # connection from which it reads.
            self._place.spare = True
            async with self._in_time():
                option, data = await self._receive_option()
            self._place.spare = False
            if option == nbd_protocol.Option.ABORT:
                await self._acknowledge(option)
                return None
            if option == nbd_protocol.Option.EXPORT_NAME:
                return await self._open_old(data)
            try:
                reading = await self._answer_option(option, data)
            except nbd_protocol.Invalid as e:
                await self._refuse(option, nbd_protocol.Reply.ERR_INVALID,
                                   str(e))
                continue
            if reading is not None:
                return reading

    async def _receive_option(self) -> tuple[int, bytes]:
        magic, option, length = nbd_protocol.OPTION.unpack(
            await self._input.take(nbd_protocol.OPTION.size))
        if magic != nbd_protocol.OPTION_MAGIC:
            raise nbd_protocol.Violation(f'an option begins with {magic!r}')
        if length > nbd_protocol.MAX_OPTION:
            raise nbd_protocol.Violation(
                f'option {option} announces {length} bytes of data')
        return option, await self._input.take(length)

    async def _answer_option(self, option: int, data: bytes
                             ) -> image_source.Reading | None:
        """Answer an option; return the image to read, if it named one.

        :raises nbd_protocol.Invalid: if the data are invalid
        """
        if option in _NO_DATA and data:
            raise nbd_protocol.Invalid('this option has no data')
        if option in (nbd_protocol.Option.INFO, nbd_protocol.Option.GO):
            return await self._open(option, data)
        if option == nbd_protocol.Option.LIST:
            names = await self._exports.run(self._exports.repository.images)
            await self._send(b''.join(map(nbd_protocol.server_reply, names)))
            await self._acknowledge(option)
        elif option == nbd_protocol.Option.STRUCTURED_REPLY:
            self._structured = True
            await self._acknowledge(option)
        elif option in _META_CONTEXT:
            await self._answer_contexts(option, data)
        else:
            await self._refuse(option, nbd_protocol.Reply.ERR_UNSUP,
                               f'option {option} is not known')
        return None

    async def _acknowledge(self, option: int) -> None:
        await self._send(nbd_protocol.option_reply(option,
                                                   nbd_protocol.Reply.ACK))

    async def _refuse(self, option: int, kind: nbd_protocol.Reply,
                      why: str) -> None:
        await self._send(nbd_protocol.option_error(option, kind, why))

    async def _answer_contexts(self, option: int, data: bytes) -> None:
        setting = option == nbd_protocol.Option.SET_META_CONTEXT
        if setting:
            self._forget_contexts()
        if not self._structured:
            raise nbd_protocol.Invalid('structured replies were not asked for')
        name, queries = nbd_protocol.parse_contexts(data)
        found = nbd_protocol.CONTEXT in queries
        if not setting:
            found = found or not queries or b'base:' in queries
        if found:
            await self._send(nbd_protocol.context_reply(
                option, nbd_protocol.ALLOCATION, nbd_protocol.CONTEXT))
        changes = next((query for query in queries if query.startswith(
            nbd_protocol.CHANGES_PREFIX)), b'')
        comparison = await self._compare(name, changes)
        if comparison is not None:
            try:
                await self._send(nbd_protocol.context_reply(
                    option, nbd_protocol.CHANGES, changes))
                if setting:
                    self._comparison, comparison = comparison, None
            finally:
                if comparison is not None:
                    self._exports.close(comparison)
        if setting and (found or self._comparison is not None):
            self._context, self._tells_zeros = name, found
        await self._acknowledge(option)

    async def _compare(self, name: bytes, query: bytes
                       ) -> image_diff.Comparison | None:
        """Open the images of a context of changes; None: there is none.

        The protocol has no errors for a context, so the log has the reason.
        """
        ids = [text.decode(errors='replace') for text in (
            query.removeprefix(nbd_protocol.CHANGES_PREFIX), name)]
        if not query or not all(map(imageids.is_image, ids)):
            return None
        try:
            return await self._exports.open(
                image_diff.Comparison, self._exports.repository, *ids)
        except exceptions.RepositoryError as e:
            _STRANGERS.warning(
                'An NBD client gets no ranges that changed from image %s to '
                '%s: %s', *ids, e)
            return None

    def _forget_contexts(self) -> None:
        comparison, self._comparison = self._comparison, None
        self._context, self._tells_zeros = None, False
        if comparison is not None:
            self._exports.close(comparison)

    # -- exports -----------------------------------------------------------

    async def _open(self, option: int, data: bytes
                    ) -> image_source.Reading | None:
        name, wanted = nbd_protocol.parse_go(data)
        try:
            reading = await self._reading(name)
        except Exception as e:
            if not isinstance(e, exceptions.ImageNotFound):
                _STRANGERS.warning('Image %s cannot be exported: %s',
                                   self._name, e)
            await self._refuse(option, nbd_protocol.Reply.ERR_UNKNOWN, str(e))
            return None
        go = option == nbd_protocol.Option.GO
        try:
            self._keep_contexts(name, reading)
            await self._send(nbd_protocol.info_replies(
                option, name, reading.size, self._flags(),
                reading.upload_id,
                self._exports.repository.parameters.block_size, wanted))
        except BaseException:
            go = False
            raise
        finally:
            if not go:
                self._exports.close(reading)
        return reading if go else None

    async def _open_old(self, data: bytes) -> image_source.Reading:
        """Answer EXPORT_NAME, which the protocol cannot refuse."""
        try:
            reading = await self._reading(data)
        except Exception as e:
            raise nbd_protocol.Violation(
                f'EXPORT_NAME has no answer for an error: {e}')
        try:
            self._keep_contexts(data, reading)
            await self._send(
                nbd_protocol.export_data(reading.size, self._flags())
                + (b'' if self._no_zeroes else bytes(124)))
        except BaseException:
            self._exports.close(reading)
            raise
        return reading

    async def _reading(self, name: bytes) -> image_source.Reading:
        """:raises ImageNotFound: if no image has this name"""
        image_id = name.decode(errors='replace')
        if not imageids.is_image(image_id):
            raise exceptions.ImageNotFound(
                f'there is no image {image_id[:200]!r}')
        self._name = image_id
        return await self._exports.open(self._exports.opener, image_id)

    def _flags(self) -> nbd_protocol.Flag:
        return _FLAGS | (nbd_protocol.Flag.SEND_DF if self._structured
                         else nbd_protocol.Flag(0))

    def _keep_contexts(self, name: bytes, reading: image_source.Reading
                       ) -> None:
        """Keep the selected contexts only if they are of this export.

        An image may have been replaced since the selection. The client then
        gets an error for its first request, and no ranges of another image.
        """
        if self._context != name or (
                self._comparison is not None
                and self._comparison.upload_id != reading.upload_id):
            self._forget_contexts()

    # -- transmission ------------------------------------------------------

    async def _serve(self, reading: image_source.Reading) -> None:
        exports = self._exports
        exports.served += 1
        LOG.debug('Image %s is exported.', self._name)
        try:
            # An answer that fails ends the others.
            async with asyncio.TaskGroup() as answers:
                while (request := await self._next()) is not None:
                    await self._room.acquire()
                    self._under_way += 1
                    answers.create_task(self._answer(reading, request))
        except BaseExceptionGroup as group:
            # Report the error of the answer, or of the client's end.
            raise group.exceptions[0] from None
        finally:
            exports.served -= 1
            exports.close(reading)

    async def _next(self) -> nbd_protocol.Request | None:
        """The next request; None when the client disconnects."""
        if not await self._input.any():
            return None
        async with self._in_time():
            request = nbd_protocol.parse_request(
                await self._input.take(nbd_protocol.REQUEST.size))
        if request.command == nbd_protocol.Command.DISC:
            return None
        if request.command == nbd_protocol.Command.WRITE:
            if request.length > nbd_protocol.MAX_PAYLOAD:
                raise nbd_protocol.Violation(
                    f'a write has {request.length} bytes')
            async with self._in_time():
                await self._input.skip(request.length)
        return request

    async def _answer(self, reading: image_source.Reading,
                      request: nbd_protocol.Request) -> None:
        try:
            try:
                await self._perform(reading, request)
            except _Refused as e:
                await self._reply_error(request, e.error, str(e))
            except (streams.Disconnected, asyncio.CancelledError):
                raise
            except Exception as e:
                await self._failed(request, e)
            self._exports.requests += 1
        finally:
            self._under_way -= 1
            self._room.release()
        if not self._under_way and self._exports.stopping.is_set():
            # An error would reach the guest. A disconnected client may
            # connect to the next daemon, and go on.
            raise streams.Disconnected('the daemon ends')

    async def _perform(self, reading: image_source.Reading,
                       request: nbd_protocol.Request) -> None:
        """:raises _Refused: if the request is invalid or not allowed"""
        command = request.command
        if command in _WRITES:
            raise _Refused(nbd_protocol.Error.EPERM, 'images are read-only')
        if command == nbd_protocol.Command.FLUSH:
            return await self._reply(nbd_protocol.simple_reply(request.cookie))
        allowed = _ALLOWED.get(command)
        if allowed is None or request.flags & ~allowed:
            raise _Refused(nbd_protocol.Error.EINVAL,
                           f'there is no command {command} with the flags '
                           f'{request.flags:#x}')
        if not request.length or request.end > reading.size:
            raise _Refused(nbd_protocol.Error.EINVAL,
                           f'there are no {request.length} bytes at '
                           f'{request.offset} of {reading.size}')
        if command == nbd_protocol.Command.CACHE:
            await self._prefetch(reading, request)
        elif command == nbd_protocol.Command.BLOCK_STATUS:
            await self._tell_extents(reading, request)
        else:
            await self._read(reading, request)

    async def _failed(self, request: nbd_protocol.Request,
                      error: Exception) -> None:
        """Report a failure to the client, and to the log if it is new there.

        A client may connect again for each read, so the lines of all
        connections are limited together.
        """
        self._exports.errors += 1
        if str(error) != self._complaint:
            self._complaint = str(error)
            _FAILED_READS.error(
                'Image %s cannot be read at %d: %s', self._name,
                request.offset, error, exc_info=(
                    None if isinstance(error, _EXPECTED) else error))
        await self._reply_error(
            request,
            nbd_protocol.Error.ENOMEM if isinstance(error, MemoryError)
            else nbd_protocol.Error.EIO, str(error))

    # -- replies -----------------------------------------------------------

    async def _reply(self, data: Any) -> None:
        async with self._sending:
            await self._send(data)

    async def _reply_error(self, request: nbd_protocol.Request,
                           error: nbd_protocol.Error, why: str) -> None:
        if self._structured:
            await self._reply(nbd_protocol.error_chunk(request.cookie, error,
                                                       why))
        else:
            await self._reply(nbd_protocol.simple_reply(request.cookie, error))

    async def _read(self, reading: image_source.Reading,
                    request: nbd_protocol.Request) -> None:
        cookie, length = request.cookie, request.length
        whole = not self._structured or bool(
            request.flags & nbd_protocol.RequestFlag.DF)
        if whole and length > nbd_protocol.MAX_PAYLOAD:
            raise _Refused(nbd_protocol.Error.EINVAL,
                           f'{length} bytes are too many at once')
        room = nbd_protocol.DATA_HEAD if self._structured else (
            nbd_protocol.SIMPLE_HEAD)
        step = length if whole else PIECE
        for offset in range(request.offset, request.end, step):
            size = min(step, request.end - offset)
            async with self._exports.memory.hold(self._share, size):
                # Header and data are sent together, so they lie together.
                reply = memoryview(bytearray(room + size))
                await self._fill(reading, reply[room:], offset)
                reply[:room] = (
                    nbd_protocol.data_head(cookie, offset, size,
                                           offset + size == request.end)
                    if self._structured else nbd_protocol.simple_reply(cookie))
                await self._reply(reply)
            self._exports.sent += size

    async def _fill(self, reading: image_source.Reading, view: memoryview,
                    offset: int) -> None:
        if await self._exports.run(reading.readinto, view,
                                   offset) != len(view):
            raise exceptions.DamagedError(
                f'image {self._name} ended before its end')

    async def _prefetch(self, reading: image_source.Reading,
                        request: nbd_protocol.Request) -> None:
        """Bring a range into the caches, or have it fetched."""
        size = min(PIECE, request.length)
        async with self._exports.memory.hold(self._share, size):
            view = memoryview(bytearray(size))
            for offset in range(request.offset, request.end, size):
                await self._fill(
                    reading, view[:request.end - offset], offset)
        await self._reply(nbd_protocol.simple_reply(request.cookie))

    async def _tell_extents(self, reading: image_source.Reading,
                            request: nbd_protocol.Request) -> None:
        if self._context is None:
            raise _Refused(nbd_protocol.Error.EINVAL,
                           'no metadata context was selected')
        found: list[tuple[int, Collection[tuple[int, bool]]]] = []
        if self._tells_zeros:
            found.append((nbd_protocol.ALLOCATION, await self._exports.run(
                reading.extents, request.offset, request.length)))
        if self._comparison is not None:
            async with self._exports.comparing:
                found.append((nbd_protocol.CHANGES, await self._exports.run(
                    self._comparison.extents, request.offset,
                    request.length)))
        is_one = request.flags & nbd_protocol.RequestFlag.REQ_ONE
        await self._reply(b''.join(
            nbd_protocol.status_chunk(
                request.cookie, number, list(extents)[:1] if is_one
                else extents, number == found[-1][0])
            for number, extents in found))


class _Refused(Exception):
    """A request must be answered with this error."""

    def __init__(self, error: nbd_protocol.Error, message: str) -> None:
        super().__init__(message)
        self.error = error
