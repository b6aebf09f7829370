# SPDX-License-Identifier: Apache-2.0

"""The maps of the disks in files, from the engine's parsers in C."""

import ctypes
import dataclasses
import os
import pathlib
import zlib

from tests.support import native

HOLES = UNALLOCATED, ZEROS = range(2)
PLAIN, DEFLATED, ZLIB, ZSTD = range(2, 6)
_OK, _IO = 0, 1


class _Piece(ctypes.Structure):
    _fields_ = [('kind', ctypes.c_int), ('offset', ctypes.c_uint64),
                ('length', ctypes.c_uint64), ('place', ctypes.c_uint64),
                ('room', ctypes.c_uint32), ('min_plain', ctypes.c_uint32),
                ('max_plain', ctypes.c_uint32)]


_READER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
    ctypes.c_uint64, ctypes.c_void_p)
_TAKER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Piece), ctypes.c_void_p)


class _File(ctypes.Structure):
    _fields_ = [('read', _READER), ('read_arg', ctypes.c_void_p),
                ('size', ctypes.c_uint64), ('take', _TAKER),
                ('take_arg', ctypes.c_void_p)]


class _Error(ctypes.Structure):
    _fields_ = [('status', ctypes.c_int), ('sys_errno', ctypes.c_int),
                ('text', ctypes.c_char * 1024)]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A range of a disk, and where its bytes are in the file."""

    kind: int
    offset: int
    length: int
    place: int
    room: int
    min_plain: int
    max_plain: int


class RefusedError(Exception):
    """The file is refused, for the reason that this says."""


@dataclasses.dataclass
class Map:
    """The format of a file, and the pieces of its disk."""

    format: str
    size: int
    pieces: list[Piece]

    def read(self, file: bytes) -> bytes:
        """Return the disk's bytes.

        :param file: the bytes of the file
        """
        return b''.join(self._bytes_of(piece, file) for piece in self.pieces)

    @staticmethod
    def _bytes_of(piece: Piece, file: bytes) -> bytes:
        if piece.kind in HOLES:
            return bytes(piece.length)
        if piece.kind == PLAIN:
            return file[piece.place:piece.place + piece.length]
        assert piece.kind in (DEFLATED, ZLIB)
        decoder = zlib.decompressobj(15 if piece.kind == ZLIB else -15)
        plain = decoder.decompress(file[piece.place:piece.place + piece.room])
        assert decoder.eof
        assert piece.min_plain <= len(plain) <= piece.max_plain
        return plain[:piece.length]


def of_file(path: pathlib.Path) -> Map:
    """Map the disk in a file.

    :raises RefusedError: the file is damaged, or not of a kind that is mapped
    """
    engine = ctypes.CDLL(str(native.directory('plain') / 'libengine.so'))
    engine.gd_diskformat_name.restype = ctypes.c_char_p
    pieces: list[Piece] = []

    def read(_arg, out, length, offset, _err):
        piece = os.pread(fd, length, offset)
        if len(piece) != length:
            return _IO
        ctypes.memmove(out, piece, length)
        return _OK

    def take(_arg, piece, _err):
        pieces.append(Piece(*(getattr(piece.contents, field)
                              for field, _ in _Piece._fields_)))
        return _OK

    fd = os.open(path, os.O_RDONLY)
    try:
        file = _File(_READER(read), None, os.fstat(fd).st_size, _TAKER(take),
                     None)
        kind, size, error = ctypes.c_int(), ctypes.c_uint64(), _Error()
        status = engine.gd_diskformat_map(
            ctypes.byref(file), ctypes.byref(kind), ctypes.byref(size),
            ctypes.byref(error))
    finally:
        os.close(fd)
    if status != _OK:
        raise RefusedError(error.text.decode())
    return Map(engine.gd_diskformat_name(kind).decode(), size.value, pieces)
