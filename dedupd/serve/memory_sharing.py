# SPDX-License-Identifier: Apache-2.0

"""Sharing memory with clients on the Unix socket, to read images through it.

The rules M1 to M5 are in ``daemon.rst``, "Shared memory". This is the daemon's
side: the memory, the bound on all of it, and a connection's requests.

A thread serves the requests that have come. While there is none, the loop
waits, and no thread.
"""

import asyncio
from collections.abc import Callable
import fcntl
import mmap
import os

from oslo_log import log

from dedupd.http import messages
from dedupd.http import streams
from dedupd.serve import image_source
from glance_dedup.client import shared_memory

LOG = log.getLogger(__name__)

#: Bytes of memory that a client gets: it takes one piece while another comes.
MEMORY_BYTES = 2 * shared_memory.PIECE
#: Bytes of memory that all clients have together (M4).
SHARED_BYTES = 128 << 20
#: The bytes and the requests that a thread serves before others get their
#: turn.
TURN = 8 << 20
TURN_REQUESTS = 64


class Memory:
    """Memory that the daemon writes, and one client reads.

    :ivar view: all of it
    :ivar descriptor: the client's descriptor; None after `sent`
    :raises OSError: there is none
    """

    def __init__(self, size: int) -> None:
        fd = os.memfd_create('glance-dedup',
                             os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            # M1: only this user, and root, could open it once more to write.
            os.fchmod(fd, 0o400)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, shared_memory.SEALS)
            self.descriptor: int | None = os.open(
                f'/proc/self/fd/{fd}', os.O_RDONLY | os.O_CLOEXEC)
            self._map = mmap.mmap(fd, size)
            self.view = memoryview(self._map)
        finally:
            os.close(fd)

    def sent(self) -> None:
        """Close the client's descriptor. Idempotent."""
        fd, self.descriptor = self.descriptor, None
        if fd is not None:
            os.close(fd)

    def release(self) -> None:
        """Give the memory back, even if the client keeps its descriptor.

        REQUIRES: the connection has ended (M3), and no thread reads.
        """
        self.sent()
        self._map.madvise(mmap.MADV_REMOVE)
        self.view.release()
        self._map.close()


class Sharing:
    """All memory through which clients read images (M4).

    :param run: calls a function in one of the threads that read
    :param limits: the time within which a client has to go on
    """

    def __init__(self, run: Callable[..., asyncio.Future],
                 limits: messages.Limits) -> None:
        self.run = run
        self.limits = limits
        self._held = 0

    def offer(self, image: image_source.Reading,
              length: int) -> 'Session | None':
        """Return memory for reading an image; None: there is none for it.

        :param length: bytes of the image that the client wants
        """
        # An arriving image has parts for which a thread would have to wait.
        if length < shared_memory.MIN_SIZE or (
                not isinstance(image, image_source.Present)
                or self._held + MEMORY_BYTES > SHARED_BYTES):
            return None
        try:
            memory = Memory(MEMORY_BYTES)
        except OSError as e:
            LOG.warning('There is no memory to share with a client: %s', e)
            return None
        self._held += MEMORY_BYTES
        return Session(self, image, memory)

    def take_back(self, memory: Memory) -> None:
        """Give the memory of a client back to the system."""
        self._held -= MEMORY_BYTES
        memory.release()


class Session:
    """A connection's requests for ranges of one image.

    :ivar headers: the first headers for the client
    """

    def __init__(self, sharing: Sharing, image: image_source.Present,
                 memory: Memory) -> None:
        self._sharing = sharing
        self._image = image
        self._memory: Memory | None = memory
        self._stream: streams.SocketStream | None = None
        self._reading: asyncio.Future | None = None
        self._input = b''
        self._served = 0        # in this turn
        self.headers = {
            'Upgrade': shared_memory.PROTOCOL, 'Connection': 'Upgrade',
            shared_memory.MEMORY_HEADER: str(len(memory.view)),
            shared_memory.SIZE_HEADER: str(image.size)}

    async def run(self, stream: streams.SocketStream,
                  count: Callable[[int], None]) -> None:
        """Serve requests until the client leaves.

        :param count: called with the bytes that were served
        :raises Disconnected: the client left, breaks the protocol, or is slow
        """
        self._stream = stream
        sharing = self._sharing
        while True:
            await stream.readable(sharing.limits.write_timeout)
            more = True
            while more:
                self._reading = sharing.run(self._turn, stream)
                # Not cancelled with this task: a thread has the memory.
                await asyncio.wait([self._reading])
                count(self._served)
                more = self._reading.result()

    def _turn(self, stream: streams.SocketStream) -> bool:
        """Serve some requests (M5); return whether to go on at once."""
        self._served = 0
        for _ in range(TURN_REQUESTS):
            if self._served >= TURN:
                break
            data = stream.receive_now(
                shared_memory.REQUEST.size - len(self._input))
            if data is None:
                return False
            self._input += data
            if len(self._input) == shared_memory.REQUEST.size:
                self._serve(stream)
        return True

    def _serve(self, stream: streams.SocketStream) -> None:
        offset, place, length = shared_memory.REQUEST.unpack(self._input)
        self._input = b''
        memory, size = self._memory, self._image.size
        assert memory is not None
        if not (0 < length <= len(memory.view)
                and place <= len(memory.view) - length
                and length <= size and offset <= size - length):
            raise streams.Disconnected(
                f'{length} bytes at {offset} were asked for, to be put at '
                f'{place}')
        zeros = self._image.is_zeros(offset, length)
        if not zeros:
            # Released even if the error that is raised keeps this frame.
            with memory.view[place:place + length] as part:
                self._image.readinto(part, offset)
        stream.send_now(shared_memory.ANSWER.pack(length, zeros),
                        memory.descriptor)
        memory.sent()
        self._served += length

    async def aclose(self) -> None:
        """End the connection, close the image, and take the memory back."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        # M3: first the connection, then the memory.
        if self._stream is not None:
            self._stream.hang_up()
        if self._reading is not None:
            await asyncio.wait([self._reading])
        self._sharing.take_back(memory)
        await self._sharing.run(self._image.close)
