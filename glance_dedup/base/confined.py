# SPDX-License-Identifier: Apache-2.0

"""Parses and inflates files of disk formats in a process without rights.

The program (``confined.c``, :doc:`image-disks`) maps the disk in a file and
inflates the file's streams. An image may have taken it over, so each frame of
it is checked like any hostile byte: the order, and each place, length, kind
and number. At the first that is wrong the process is killed, and the image
stays as it is. Each image gets a new process (F6).
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
import select
import struct
import subprocess
import time
from typing import NamedTuple

from glance_dedup.base import exceptions
from glance_dedup.base import printable

#: The program, beside this package.
PROGRAM = os.path.join(os.path.dirname(os.path.dirname(__file__)),
                       'glance-dedup-confined')
#: By the number of END, as Glance calls them.
FORMATS = 'raw', 'qcow2', 'vmdk', 'vhd', 'vhdx', 'vdi'
UNALLOCATED, ZEROS, PLAIN, DEFLATED, ZLIB, ZSTD = range(6)
MAX_CLUSTER = 2 << 20
SECTOR = 512

_VERSION = 1
_HELLO, _READ, _PIECE, _END, _REFUSED, _PLAIN = range(1, 7)
_FRAME = struct.Struct('<IIQQ')
_STRETCH = struct.Struct('<QIIII')
_STREAM = struct.Struct('<IIII')
_SIZE = struct.Struct('<Q')
_MAX_STREAM = 2 * MAX_CLUSTER
_MAX_DISK = 1 << 62
_MAX_READ = 64 << 10
_MAX_REASON = 1023
_SHOWN_REASON = 200
#: Bytes of tables that are read besides those of the file, and pieces besides
#: one for each 256 bytes of it (``diskmap.c``).
_SPARE_BYTES = 64 << 10
_SPARE_PIECES = 1024
#: The longest that this waits for the process, in its processor seconds.
_PATIENCE = 10
_BUFFER = 256 << 10
_NOT_CONFINED = 2   # the program's exit status


class RefusedError(exceptions.RepositoryError):
    """The file's disk cannot be used; the message is the reason."""


class Piece(NamedTuple):
    """A range of the disk, and where its bytes are in the file."""

    offset: int
    length: int
    place: int
    kind: int
    room: int
    """of a stream: it ends within so many bytes from `place`"""
    min_plain: int
    max_plain: int

    @property
    def is_stream(self) -> bool:
        """True if the bytes are compressed."""
        return self.kind >= DEFLATED


def seconds_for(size: int) -> int:
    """The processor time that the program may take for a file."""
    return 60 + size // (4 << 20)


def require_program() -> None:
    """Require that the program starts, and can be confined.

    :raises UnavailableError: it is missing, too old, or not confined
    """
    Parser(lambda length, offset: b'', 0).close()


class Parser:
    """One process, for one file.

    It is a context manager, at whose end the process is killed. First take all
    of :meth:`pieces`, then :meth:`send` a stream and :meth:`receive` its plain
    bytes, any number of times.

    :param read: returns so many bytes from an offset of the file
    :param size: of the file
    :ivar format: one of :data:`FORMATS`, after the last piece
    :ivar disk_size: of the disk, after the last piece
    :raises UnavailableError: the program is missing, or cannot be confined
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self.format = 'raw'
        self.disk_size = 0
        self._read = read
        self._size = size
        seconds = seconds_for(size)
        self._patience = float(_PATIENCE * seconds)
        self._received = bytearray()
        self._sent: tuple[int, int, int] | None = None
        try:
            self._process = subprocess.Popen(
                [PROGRAM, str(seconds)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={},
                cwd='/', bufsize=0)
        except OSError as e:
            raise exceptions.UnavailableError(
                f'{PROGRAM}, which parses images, does not start '
                f'({e.strerror}): install the package again') from e
        assert self._process.stdin and self._process.stdout
        self._in = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> 'Parser':
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process, unless it has ended."""
        self._process.kill()
        self._process.wait()
        for pipe in self._process.stdin, self._process.stdout:
            with contextlib.suppress(OSError):
                pipe.close()        # type: ignore[union-attr]

    def _begin(self) -> None:
        try:
            kind, version, _ = self._frame()
        except RefusedError as e:
            # It has got no byte of the file, so this is not the file's fault.
            status = self._process.wait()
            raise exceptions.UnavailableError(
                f'{PROGRAM}, which parses images, cannot be confined: the '
                'kernel refuses its filter of system calls, or its limits'
                if status == _NOT_CONFINED else
                f'{PROGRAM}, which parses images, does not work ({e}): '
                'install the package again') from e
        if (kind, version) != (_HELLO, _VERSION):
            raise exceptions.UnavailableError(
                f'{PROGRAM}, which parses images, is of another version than '
                'this process: start this process again')
        self._send(_SIZE.pack(self._size))

    # -- The map --------------------------------------------------------------

    def pieces(self) -> Iterator[Piece]:
        """Map the disk: its pieces, in the order of the disk.

        :raises RefusedError: the file cannot be mapped, or the process did
            what it must not do
        """
        mapped = 0
        may_read = self._size + _SPARE_BYTES
        left = self._size // 256 + _SPARE_PIECES
        while True:
            kind, a, b = self._frame()
            if kind == _PIECE:
                left -= 1
                piece = Piece(a, b, *_STRETCH.unpack(
                    self._receive(_STRETCH.size)))
                self._require(left >= 0, 'more pieces than the file has')
                self._require_piece(piece, mapped)
                mapped += b
                yield piece
            elif kind == _READ:
                may_read -= b
                self._require(0 < b <= min(_MAX_READ, self._size)
                              and a <= self._size - b, 'a read of no bytes')
                self._require(may_read >= 0, 'more reads than the file has')
                self._send_range(a, b)
            elif kind == _END:
                self._require_end(a, b, mapped)
                self.format, self.disk_size = FORMATS[a], b
                return
            elif kind == _REFUSED:
                self._require(0 < a <= _MAX_REASON, 'a reason without end')
                reason = self._receive(a).decode(errors='replace')
                raise RefusedError(
                    printable.printable(reason)[:_SHOWN_REASON])
            else:
                raise self._violation(f'frame {kind}')

    def _require_piece(self, piece: Piece, mapped: int) -> None:
        self._require(piece.offset == mapped, 'pieces out of order')
        self._require(0 < piece.length <= _MAX_DISK - mapped,
                      'a piece of no length')
        self._require(piece.kind <= ZSTD, 'a piece of no kind')
        if piece.kind < PLAIN:
            return
        length = piece.length
        if piece.is_stream:
            length = piece.room
            self._require(0 < length <= _MAX_STREAM, 'a stream of no length')
            self._require(
                piece.length <= piece.min_plain <= piece.max_plain
                <= MAX_CLUSTER, 'a stream of no plain length')
        self._require(length <= self._size
                      and piece.place <= self._size - length,
                      'a piece outside the file')

    def _require_end(self, number: int, size: int, mapped: int) -> None:
        self._require(number < len(FORMATS), 'a format of no name')
        if number == 0:
            self._require(mapped == 0 and size == self._size,
                          'a raw file with pieces')
        else:
            self._require(size == mapped and size > 0 and size % SECTOR == 0,
                          'a disk of another size')

    # -- Streams --------------------------------------------------------------

    def send(self, piece: Piece) -> None:
        """Have a stream inflated.

        REQUIRES: the map is complete, and the stream sent before is received.

        :raises RefusedError: no such stream can be inflated
        """
        if piece.kind == ZSTD:
            raise RefusedError('its streams are compressed by zstd')
        self._send(_STREAM.pack(piece.kind, piece.room, piece.min_plain,
                                piece.max_plain))
        self._send_range(piece.place, piece.room)
        self._sent = piece.room, piece.min_plain, piece.max_plain

    def receive(self) -> tuple[int, bytes]:
        """Return the length of the stream that was sent, and its plain bytes.

        :raises RefusedError: the stream is damaged
        """
        assert self._sent is not None
        (room, least, most), self._sent = self._sent, None
        kind, used, length = self._frame()
        self._require(kind == _PLAIN, f'frame {kind}')
        if used == length == 0:
            raise RefusedError('a compressed cluster of it is damaged')
        self._require(0 < used <= room, 'a stream outside its room')
        self._require(least <= length <= most, 'plain bytes of no such length')
        return used, self._receive(length)

    # -- Bytes ----------------------------------------------------------------

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise self._violation(what)

    def _violation(self, what: str) -> RefusedError:
        self._process.kill()
        return RefusedError(f'it could not be parsed: its parser sent {what}')

    def _frame(self) -> tuple[int, int, int]:
        kind, zeros, a, b = _FRAME.unpack(self._receive(_FRAME.size))
        self._require(zeros == 0, 'a frame without zeros')
        return kind, a, b

    def _send_range(self, offset: int, length: int) -> None:
        content = self._read(length, offset)
        if len(content) != length:
            raise RefusedError('it became shorter while it was read')
        self._send(content)

    def _send(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            try:
                view = view[os.write(self._in, view):]
            except BlockingIOError:
                self._wait(self._in, select.POLLOUT)
            except BrokenPipeError:
                raise self._ended() from None

    def _receive(self, length: int) -> bytes:
        received = self._received
        while len(received) < length:
            try:
                more = os.read(self._out, _BUFFER)
            except BlockingIOError:
                self._wait(self._out, select.POLLIN)
                continue
            if not more:
                raise self._ended()
            received += more
        content = bytes(memoryview(received)[:length])
        del received[:length]
        return content

    def _wait(self, fd: int, event: int) -> None:
        poll = select.poll()
        poll.register(fd, event)
        begin = time.monotonic()
        poll.poll(max(0.0, self._patience) * 1000)
        self._patience -= time.monotonic() - begin
        if self._patience <= 0:
            self._process.kill()
            raise RefusedError(
                'it could not be parsed: its parser took too long')

    def _ended(self) -> RefusedError:
        # It may have closed a pipe only.
        self._process.kill()
        status = self._process.wait()
        return RefusedError(
            'it could not be parsed: its parser ended with '
            + (f'signal {-status}' if status < 0 else f'status {status}'))
