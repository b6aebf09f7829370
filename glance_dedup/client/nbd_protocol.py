# SPDX-License-Identifier: Apache-2.0

"""The NBD protocol: what its messages look like.

Numbers are big-endian. A session has two phases::

    haggling      server  NBDMAGIC IHAVEOPT flags(16)
                  client  flags(32)
                  client  IHAVEOPT option(32) length(32) data     any number
                  server  magic(64) option(32) type(32) length(32) data
    transmission  client  magic(32) flags(16) command(16) cookie(64)
                          offset(64) length(32) [data of a write]
                  server  simple   magic(32) error(32) cookie(64) [data]
                       or chunks   magic(32) flags(16) type(16) cookie(64)
                                   length(32) data

Replies come in any order; the client knows them by its cookie. Reads are
answered in chunks if the client asked for structured replies: then an error
can still be told when some of the data are out.

Nothing here waits or keeps anything: bytes in, values out, and the other way
round.
"""

from collections.abc import Iterable
import enum
import struct
from typing import NamedTuple

#: What the server says first: it speaks fixed newstyle, and can leave out
#: zeros that mean nothing.
GREETING = struct.pack('>8s8sH', b'NBDMAGIC', b'IHAVEOPT', 3)
CLIENT_FLAGS = struct.Struct('>I')
FIXED_NEWSTYLE = 1
NO_ZEROES = 2

OPTION = struct.Struct('>8sII')
OPTION_MAGIC = b'IHAVEOPT'
OPTION_REPLY = struct.Struct('>QIII')
_OPTION_REPLY_MAGIC = 0x3e889045565a9

REQUEST = struct.Struct('>IHHQQI')
_REQUEST_MAGIC = 0x25609513
SIMPLE = struct.Struct('>IIQ')
SIMPLE_MAGIC = 0x67446698
_CHUNK = struct.Struct('>IHHQI')
_CHUNK_MAGIC = 0x668e33ef
_DONE = 1

#: The longest string of the protocol.
LONGEST_STRING = 4096
#: The longest data of an option: more is an attack.
LONGEST_OPTION = 65536
#: The longest data of a request, or of one chunk.
LONGEST_PAYLOAD = 32 << 20

#: The one metadata context that is known here, and its number.
CONTEXT = b'base:allocation'
_CONTEXT_ID = 1


class Option(enum.IntEnum):
    EXPORT_NAME = 1
    ABORT = 2
    LIST = 3
    INFO = 6
    GO = 7
    STRUCTURED_REPLY = 8
    LIST_META_CONTEXT = 9
    SET_META_CONTEXT = 10


class Reply(enum.IntEnum):
    """To an option."""

    ACK = 1
    SERVER = 2
    INFO = 3
    META_CONTEXT = 4
    ERR_UNSUP = 1 << 31 | 1
    ERR_INVALID = 1 << 31 | 3
    ERR_UNKNOWN = 1 << 31 | 6


class Info(enum.IntEnum):
    EXPORT = 0
    NAME = 1
    DESCRIPTION = 2
    BLOCK_SIZE = 3


class Command(enum.IntEnum):
    READ = 0
    WRITE = 1
    DISC = 2
    FLUSH = 3
    TRIM = 4
    CACHE = 5
    WRITE_ZEROES = 6
    BLOCK_STATUS = 7


class Flag(enum.IntFlag):
    """Of an export."""

    HAS_FLAGS = 1 << 0
    READ_ONLY = 1 << 1
    SEND_FLUSH = 1 << 2
    SEND_DF = 1 << 7
    CAN_MULTI_CONN = 1 << 8
    SEND_CACHE = 1 << 10


class RequestFlag(enum.IntFlag):
    DF = 1 << 2
    """Data in one chunk."""
    REQ_ONE = 1 << 3
    """One extent."""


class Error(enum.IntEnum):
    EPERM = 1
    EIO = 5
    ENOMEM = 12
    EINVAL = 22


class _Chunk(enum.IntEnum):
    NONE = 0
    OFFSET_DATA = 1
    BLOCK_STATUS = 5
    ERROR = 1 << 15 | 1


#: Of an extent of base:allocation: a hole, which reads as zeros.
_HOLE = 1
_ZERO = 2


class Violation(Exception):
    """The client does not speak the protocol: the session ends."""


class Invalid(Exception):
    """The data of an option are not what they should be."""


# -- haggling -----------------------------------------------------------------

class Parser:
    """Takes the data of an option to pieces."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, size: int) -> int:
        """:raises Invalid: there is none"""
        return int.from_bytes(self._take(size), 'big')

    def string(self) -> bytes:
        """:raises Invalid: there is none, or it is too long"""
        length = self.number(4)
        if length > LONGEST_STRING:
            raise Invalid(f'a string of {length} bytes is too long')
        return self._take(length)

    def end(self) -> None:
        """:raises Invalid: there is more"""
        if self._at != len(self._data):
            raise Invalid(f'{len(self._data) - self._at} bytes too many')

    def _take(self, length: int) -> bytes:
        data = self._data[self._at:self._at + length]
        if len(data) != length:
            raise Invalid('the data are cut off')
        self._at += length
        return data


def parse_go(data: bytes) -> tuple[bytes, list[int]]:
    """Of GO and INFO: the name, and what is to be told.

    :raises Invalid: as its name says
    """
    parser = Parser(data)
    name = parser.string()
    wanted = [parser.number(2) for _ in range(parser.number(2))]
    parser.end()
    return name, wanted


def parse_contexts(data: bytes) -> tuple[bytes, list[bytes]]:
    """Of LIST_ and SET_META_CONTEXT: the name, and the queries.

    :raises Invalid: as its name says
    """
    parser = Parser(data)
    name = parser.string()
    # However many are announced: each takes four bytes at least.
    queries = [parser.string() for _ in range(parser.number(4))]
    parser.end()
    return name, queries


def option_reply(option: int, kind: Reply, data: bytes = b'') -> bytes:
    return OPTION_REPLY.pack(
        _OPTION_REPLY_MAGIC, option, kind, len(data)) + data


def option_error(option: int, kind: Reply, message: str) -> bytes:
    return option_reply(option, kind, _text(message))


def server_reply(name: str) -> bytes:
    """That there is an export."""
    data = name.encode()
    return option_reply(Option.LIST, Reply.SERVER,
                        struct.pack('>I', len(data)) + data)


def context_reply(option: int) -> bytes:
    """That there is, or that there will be, the metadata context."""
    number = _CONTEXT_ID if option == Option.SET_META_CONTEXT else 0
    return option_reply(option, Reply.META_CONTEXT,
                        struct.pack('>I', number) + CONTEXT)


def export_data(size: int, flags: Flag) -> bytes:
    """Of EXPORT_NAME, but for the zeros."""
    return struct.pack('>QH', size, flags)


def describe(upload_id: str) -> str:
    """What is told of an export to people, and to our own client."""
    return f'upload {upload_id}'


def info_replies(option: int, name: bytes, size: int, flags: Flag,
                 upload_id: str, block_size: int,
                 wanted: Iterable[int]) -> bytes:
    """What is told of an export, and that this is all."""
    told = [struct.pack('>H', Info.EXPORT) + export_data(size, flags)]
    if Info.NAME in wanted:
        told.append(struct.pack('>H', Info.NAME) + name)
    if Info.DESCRIPTION in wanted:
        told.append(struct.pack('>H', Info.DESCRIPTION)
                    + describe(upload_id).encode())
    if Info.BLOCK_SIZE in wanted:
        told.append(struct.pack('>HIII', Info.BLOCK_SIZE, 1, block_size,
                                LONGEST_PAYLOAD))
    return b''.join([*(option_reply(option, Reply.INFO, info)
                       for info in told), option_reply(option, Reply.ACK)])


# -- transmission -------------------------------------------------------------

class Request(NamedTuple):
    flags: int
    command: int
    cookie: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def parse_request(data: bytes) -> Request:
    """:raises Violation: it is none"""
    magic, *fields = REQUEST.unpack(data)
    if magic != _REQUEST_MAGIC:
        raise Violation(f'a request begins with {magic:#010x}')
    return Request(*fields)


#: Bytes in front of the data of a read.
SIMPLE_HEAD = SIMPLE.size
DATA_HEAD = _CHUNK.size + 8


def simple_reply(cookie: int, error: int = 0) -> bytes:
    return SIMPLE.pack(SIMPLE_MAGIC, error, cookie)


def data_head(cookie: int, offset: int, length: int, last: bool) -> bytes:
    """What stands before data that are a chunk."""
    return _chunk(cookie, _Chunk.OFFSET_DATA, 8 + length, last) + (
        offset.to_bytes(8, 'big'))


def error_chunk(cookie: int, error: Error, message: str) -> bytes:
    """That a request failed; the last chunk of its reply."""
    text = _text(message)
    return _chunk(cookie, _Chunk.ERROR, 6 + len(text), True) + struct.pack(
        '>IH', error, len(text)) + text


def status_chunk(cookie: int, extents: Iterable[tuple[int, bool]]) -> bytes:
    """(length, whether it is zeros) of each; the whole reply."""
    data = b''.join([_CONTEXT_ID.to_bytes(4, 'big'), *(
        struct.pack('>II', length, _HOLE | _ZERO if zeros else 0)
        for length, zeros in extents)])
    return _chunk(cookie, _Chunk.BLOCK_STATUS, len(data), True) + data


def _chunk(cookie: int, kind: _Chunk, length: int, last: bool) -> bytes:
    return _CHUNK.pack(_CHUNK_MAGIC, _DONE if last else 0, kind, cookie,
                       length)


# -- what our own client says -------------------------------------------------

def go_request(name: bytes, wanted: Info) -> bytes:
    data = struct.pack('>I', len(name)) + name + struct.pack('>HH', 1, wanted)
    return OPTION.pack(OPTION_MAGIC, Option.GO, len(data)) + data


def parse_option_reply(data: bytes) -> tuple[int, int]:
    """Its kind, and the length of its data.

    :raises Violation: it is none
    """
    magic, _, kind, length = OPTION_REPLY.unpack(data)
    if magic != _OPTION_REPLY_MAGIC:
        raise Violation(f'the reply to an option begins with {magic:#x}')
    return kind, length


def read_request(length: int, offset: int) -> bytes:
    return REQUEST.pack(_REQUEST_MAGIC, 0, Command.READ, 0, offset, length)


def _text(message: str) -> bytes:
    """A message as it fits into a string."""
    return message.encode(errors='replace')[:LONGEST_STRING].decode(
        errors='ignore').encode()
