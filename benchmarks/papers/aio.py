# SPDX-License-Identifier: Apache-2.0

"""A file that is written with several requests in flight.

A disk is faster with a queue: this one has room for :data:`DEPTH` requests.
They go to the kernel by its asynchronous calls (``io_submit``), which Python
does not have, from one thread. The file should be open with ``O_DIRECT``;
otherwise, and where the kernel has no such calls, a request is done before the
next one begins.

Requests of overlapping ranges are done in their order.
"""

import ctypes
import errno
import mmap
import os
import platform

DEPTH = 32

#: Numbers of io_setup, io_destroy, io_submit and io_getevents.
_CALLS = {'x86_64': (206, 207, 209, 208), 'aarch64': (0, 1, 2, 4)}
_PWRITE = 1


class _Request(ctypes.Structure):
    """The kernel's struct iocb, on a little-endian processor."""

    _fields_ = [('data', ctypes.c_uint64), ('key', ctypes.c_uint32),
                ('rw_flags', ctypes.c_uint32), ('opcode', ctypes.c_uint16),
                ('priority', ctypes.c_int16), ('fd', ctypes.c_uint32),
                ('buffer', ctypes.c_uint64), ('size', ctypes.c_uint64),
                ('offset', ctypes.c_int64), ('reserved', ctypes.c_uint64),
                ('flags', ctypes.c_uint32), ('event_fd', ctypes.c_uint32)]


class _Event(ctypes.Structure):
    """The kernel's struct io_event."""

    _fields_ = [('data', ctypes.c_uint64), ('request', ctypes.c_uint64),
                ('result', ctypes.c_int64), ('result2', ctypes.c_int64)]


_libc = ctypes.CDLL(None, use_errno=True)


class Queue:
    """Writes to an open file.

    :param room: bytes of the longest write
    :ivar depth: how many requests may be in flight
    """

    def __init__(self, fd: int, room: int) -> None:
        self._fd = fd
        self._context = ctypes.c_ulong(0)
        self._calls = _CALLS.get(platform.machine())
        self.depth = DEPTH
        if self._calls is None or _libc.syscall(
                self._calls[0], ctypes.c_uint(DEPTH),
                ctypes.byref(self._context)) != 0:
            self._calls, self.depth = None, 1
        # O_DIRECT needs whole pages.
        room = -(-room // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, room * self.depth)
        view = memoryview(self._memory)
        self._buffers = [view[i * room:(i + 1) * room]
                         for i in range(self.depth)]
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._requests = [
            _Request(data=i, opcode=_PWRITE, fd=fd, buffer=start + i * room)
            for i in range(self.depth)]
        self._free = list(range(self.depth))
        self._busy: dict[int, tuple[int, int]] = {}
        self._events = (_Event * DEPTH)()

    def write(self, data: bytes, at: int) -> None:
        """Begin a write of whole blocks.

        :raises OSError: also for an earlier one
        """
        end = at + len(data)
        while not self._free or any(
                at < last and first < end
                for first, last in self._busy.values()):
            self._reap()
        slot = self._free[-1]
        self._buffers[slot][:len(data)] = data
        if self._calls is None:
            os.pwrite(self._fd, self._buffers[slot][:len(data)], at)
            return
        request = self._requests[slot]
        request.size, request.offset = len(data), at
        pointer = ctypes.pointer(request)
        if _libc.syscall(self._calls[2], self._context, ctypes.c_long(1),
                         ctypes.byref(pointer)) != 1:
            self._fail(ctypes.get_errno())
        self._free.pop()
        self._busy[slot] = at, end

    def drain(self) -> None:
        """Wait until no request is in flight.

        :raises OSError: if one of them failed
        """
        while self._busy:
            self._reap()

    def close(self) -> None:
        """Forget the queue; the file stays open."""
        try:
            self.drain()
        finally:
            if self._calls is not None:
                _libc.syscall(self._calls[1], self._context)

    def _reap(self) -> None:
        """Wait for a request, and take all that are done."""
        assert self._calls is not None
        count = _libc.syscall(
            self._calls[3], self._context, ctypes.c_long(1),
            ctypes.c_long(DEPTH), self._events, None)
        if count < 0 and ctypes.get_errno() != errno.EINTR:
            self._fail(ctypes.get_errno())
        for event in self._events[:max(count, 0)]:
            first, last = self._busy.pop(event.data)
            self._free.append(event.data)
            if event.result != last - first:
                self._fail(-event.result if event.result < 0 else errno.EIO)

    @staticmethod
    def _fail(number: int) -> None:
        raise OSError(number, os.strerror(number))
