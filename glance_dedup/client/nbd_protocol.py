# SPDX-License-Identifier: Apache-2.0

"""The messages of the NBD protocol: packing and unpacking them.

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

Replies come in any order; the client recognises each by its cookie. If the
client requested structured replies, reads are answered in chunks: then the
server can still report an error after it has sent some of the data.

The functions here keep no state and do not wait: they turn bytes into values,
and values into bytes. The names of options, commands, flags and errors are the
specification's: https://github.com/NetworkBlockDevice/nbd, ``doc/proto.md``.
"""

from collections.abc import Iterable
import enum
import struct
from typing import NamedTuple

#: The server's first bytes. The flags 3: it speaks fixed newstyle, and can
#: leave out the zeros that follow the data of an export.
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
_SIMPLE = struct.Struct('>IIQ')
_SIMPLE_MAGIC = 0x67446698
CHUNK = struct.Struct('>IHHQI')
_CHUNK_MAGIC = 0x668e33ef
_DONE = 1
_IS_ERROR = 1 << 15

#: The longest string of the protocol.
MAX_STRING = 4096
#: The longest data of an option. The server ends a session that sends more.
MAX_OPTION = 65536
#: The longest data of a request, or of one chunk.
MAX_PAYLOAD = 32 << 20

#: The metadata context of zeros, and its number.
CONTEXT = b'base:allocation'
ALLOCATION = 1
#: The prefix of a context of changes, and the number of such a context. An
#: image's id follows. Backup programs know the prefix from QEMU's bitmaps.
CHANGES_PREFIX = b'qemu:dirty-bitmap:'
CHANGES = 2


class Option(enum.IntEnum):
    """Options that a client sends before transmission."""

    EXPORT_NAME = 1
    ABORT = 2
    LIST = 3
    INFO = 6
    GO = 7
    STRUCTURED_REPLY = 8
    LIST_META_CONTEXT = 9
    SET_META_CONTEXT = 10


class Reply(enum.IntEnum):
    """The kind of a reply to an option."""

    ACK = 1
    SERVER = 2
    INFO = 3
    META_CONTEXT = 4
    ERR_UNSUP = 1 << 31 | 1
    ERR_INVALID = 1 << 31 | 3
    ERR_UNKNOWN = 1 << 31 | 6


class Info(enum.IntEnum):
    """A fact about an export, in the replies to INFO and GO."""

    EXPORT = 0
    NAME = 1
    DESCRIPTION = 2
    BLOCK_SIZE = 3


class Command(enum.IntEnum):
    """The kind of a request."""

    READ = 0
    WRITE = 1
    DISC = 2
    FLUSH = 3
    TRIM = 4
    CACHE = 5
    WRITE_ZEROES = 6
    BLOCK_STATUS = 7


class Flag(enum.IntFlag):
    """A property of an export."""

    HAS_FLAGS = 1 << 0
    READ_ONLY = 1 << 1
    SEND_FLUSH = 1 << 2
    SEND_DF = 1 << 7
    CAN_MULTI_CONN = 1 << 8
    SEND_CACHE = 1 << 10


class RequestFlag(enum.IntFlag):
    """Flags of a request that choose the form of the answer."""

    DF = 1 << 2
    """all data of a read in one chunk"""
    REQ_ONE = 1 << 3
    """only one extent"""


class Error(enum.IntEnum):
    """Errors of a failed request; the numbers are those of Linux."""

    EPERM = 1
    EIO = 5
    ENOMEM = 12
    EINVAL = 22


class Chunk(enum.IntEnum):
    """The kind of a chunk."""

    NONE = 0
    OFFSET_DATA = 1
    OFFSET_HOLE = 2
    BLOCK_STATUS = 5
    ERROR = 1 << 15 | 1


# Flags of an extent of base:allocation: it is a hole, and reads as zeros.
_HOLE = 1
_ZERO = 2
_DIRTY = 1


class Violation(Exception):
    """The peer breaks the protocol, so the session ends."""


class Invalid(Exception):
    """The data of an option are malformed; the session goes on."""


# -- haggling -----------------------------------------------------------------

class Parser:
    """Reads the fields of an option's data, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, size: int) -> int:
        """The next number, of `size` bytes.

        :raises Invalid: the data end before
        """
        return int.from_bytes(self._take(size), 'big')

    def string(self) -> bytes:
        """The next string.

        :raises Invalid: the data end before, or the string is too long
        """
        length = self.number(4)
        if length > MAX_STRING:
            raise Invalid(f'a string of {length} bytes is too long')
        return self._take(length)

    def end(self) -> None:
        """Check that no data are left.

        :raises Invalid: some are left
        """
        if self._at != len(self._data):
            raise Invalid(f'{len(self._data) - self._at} bytes too many')

    def _take(self, length: int) -> bytes:
        data = self._data[self._at:self._at + length]
        if len(data) != length:
            raise Invalid('the data are cut off')
        self._at += length
        return data


def parse_go(data: bytes) -> tuple[bytes, list[int]]:
    """The export's name and the wanted facts, from the data of GO or INFO.

    :raises Invalid: the data are malformed
    """
    parser = Parser(data)
    name = parser.string()
    wanted = [parser.number(2) for _ in range(parser.number(2))]
    parser.end()
    return name, wanted


def parse_contexts(data: bytes) -> tuple[bytes, list[bytes]]:
    """The export's name and the queries, of LIST_ or SET_META_CONTEXT.

    :raises Invalid: the data are malformed
    """
    parser = Parser(data)
    name = parser.string()
    # A false number does no harm: each query takes at least four bytes.
    queries = [parser.string() for _ in range(parser.number(4))]
    parser.end()
    return name, queries


def option_reply(option: int, kind: Reply, data: bytes = b'') -> bytes:
    """A reply to an option."""
    return OPTION_REPLY.pack(
        _OPTION_REPLY_MAGIC, option, kind, len(data)) + data


def option_error(option: int, kind: Reply, message: str) -> bytes:
    """The refusal of an option; a long message is cut."""
    return option_reply(option, kind, _text(message))


def server_reply(name: str) -> bytes:
    """A reply to LIST that names one export."""
    data = name.encode()
    return option_reply(Option.LIST, Reply.SERVER,
                        struct.pack('>I', len(data)) + data)


def context_reply(option: int, number: int, name: bytes) -> bytes:
    """A reply to LIST_ or SET_META_CONTEXT that names a context."""
    if option == Option.LIST_META_CONTEXT:
        number = 0
    return option_reply(option, Reply.META_CONTEXT,
                        struct.pack('>I', number) + name)


def export_data(size: int, flags: Flag) -> bytes:
    """The answer to EXPORT_NAME, without its zeros."""
    return struct.pack('>QH', size, flags)


def describe(upload_id: str) -> str:
    """An export's description, for people, and for our own client."""
    return f'upload {upload_id}'


def info_replies(option: int, name: bytes, size: int, flags: Flag,
                 upload_id: str, block_size: int,
                 wanted: Iterable[int]) -> bytes:
    """All replies to INFO or GO: an export's facts, and the end.

    :param block_size: the preferred one
    :param wanted: the facts that the client requested
    """
    told = [struct.pack('>H', Info.EXPORT) + export_data(size, flags)]
    if Info.NAME in wanted:
        told.append(struct.pack('>H', Info.NAME) + name)
    if Info.DESCRIPTION in wanted:
        told.append(struct.pack('>H', Info.DESCRIPTION)
                    + describe(upload_id).encode())
    if Info.BLOCK_SIZE in wanted:
        told.append(struct.pack('>HIII', Info.BLOCK_SIZE, 1, block_size,
                                MAX_PAYLOAD))
    return b''.join([*(option_reply(option, Reply.INFO, info)
                       for info in told), option_reply(option, Reply.ACK)])


# -- transmission -------------------------------------------------------------

class Request(NamedTuple):
    """A request of the client's. None of its fields is checked."""

    flags: int
    command: int
    cookie: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset behind the range."""
        return self.offset + self.length


def parse_request(data: bytes) -> Request:
    """The request in a header of REQUEST.size bytes.

    :raises Violation: the bytes are not a request
    """
    magic, *fields = REQUEST.unpack(data)
    if magic != _REQUEST_MAGIC:
        raise Violation(f'a request begins with {magic:#010x}')
    return Request(*fields)


#: The bytes in front of the data of a read, in a simple reply and in a chunk.
SIMPLE_HEAD = _SIMPLE.size
DATA_HEAD = CHUNK.size + 8


def simple_reply(cookie: int, error: int = 0) -> bytes:
    """A simple reply; the data of a read follow it."""
    return _SIMPLE.pack(_SIMPLE_MAGIC, error, cookie)


def data_head(cookie: int, offset: int, length: int, last: bool) -> bytes:
    """The head of a chunk of data; `length` bytes of data follow it.

    :param last: whether the chunk is the last one of its reply
    """
    return _chunk(cookie, Chunk.OFFSET_DATA, 8 + length, last) + (
        offset.to_bytes(8, 'big'))


def error_chunk(cookie: int, error: Error, message: str) -> bytes:
    """A chunk that reports an error; it is the last one of its reply."""
    text = _text(message)
    return _chunk(cookie, Chunk.ERROR, 6 + len(text), True) + struct.pack(
        '>IH', error, len(text)) + text


def status_chunk(cookie: int, context: int,
                 extents: Iterable[tuple[int, bool]], last: bool) -> bytes:
    """The reply to BLOCK_STATUS for one of the contexts.

    :param extents: the length of each, and whether it is zeros, or has changed
    :param last: whether the chunk is the last one of its reply
    """
    flags = _HOLE | _ZERO if context == ALLOCATION else _DIRTY
    data = b''.join([context.to_bytes(4, 'big'), *(
        struct.pack('>II', length, flags if is_set else 0)
        for length, is_set in extents)])
    return _chunk(cookie, Chunk.BLOCK_STATUS, len(data), last) + data


def _chunk(cookie: int, kind: Chunk, length: int, last: bool) -> bytes:
    return CHUNK.pack(_CHUNK_MAGIC, _DONE if last else 0, kind, cookie,
                      length)


# -- for our own client -------------------------------------------------------

def go_request(name: bytes) -> bytes:
    """The option GO for an export, which requests facts about it."""
    return option_request(Option.GO, _counted(name) + struct.pack(
        '>HHH', 2, Info.DESCRIPTION, Info.BLOCK_SIZE))


def contexts_request(name: bytes, contexts: Iterable[bytes]) -> bytes:
    """The option SET_META_CONTEXT for an export."""
    queries = list(contexts)
    return option_request(Option.SET_META_CONTEXT, b''.join([
        _counted(name), len(queries).to_bytes(4, 'big'),
        *map(_counted, queries)]))


def _counted(text: bytes) -> bytes:
    return len(text).to_bytes(4, 'big') + text


def option_request(option: Option, data: bytes = b'') -> bytes:
    """An option with its data."""
    return OPTION.pack(OPTION_MAGIC, option, len(data)) + data


def parse_option_reply(data: bytes) -> tuple[int, int]:
    """The kind of a reply to an option, and the length of its data.

    :raises Violation: the bytes are not the head of such a reply
    """
    magic, _, kind, length = OPTION_REPLY.unpack(data)
    if magic != _OPTION_REPLY_MAGIC:
        raise Violation(f'the reply to an option begins with {magic:#x}')
    return kind, length


def request(command: Command, length: int, offset: int) -> bytes:
    """A request for a range, with the cookie 0."""
    return REQUEST.pack(_REQUEST_MAGIC, 0, command, 0, offset, length)


class ChunkHead(NamedTuple):
    """The header of a chunk; its payload follows."""

    kind: int
    length: int
    """Length of the payload. It has not been checked."""
    is_last: bool
    is_error: bool


def parse_chunk(data: bytes) -> ChunkHead:
    """The head of a chunk of the reply with the cookie 0.

    :raises Violation: the bytes are no such head
    """
    magic, flags, kind, cookie, length = CHUNK.unpack(data)
    if magic != _CHUNK_MAGIC or cookie:
        raise Violation(
            f'a chunk begins with {magic:#010x} and the cookie {cookie}')
    return ChunkHead(kind, length, bool(flags & _DONE),
                     bool(kind & _IS_ERROR))


def _text(message: str) -> bytes:
    """A message, cut to the longest string."""
    return message.encode(errors='replace')[:MAX_STRING].decode(
        errors='ignore').encode()
