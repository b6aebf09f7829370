# SPDX-License-Identifier: Apache-2.0

"""Requests, responses and HTTP errors."""

from collections.abc import AsyncGenerator
from collections.abc import Callable
import dataclasses
import http
import json
from typing import Any
from typing import Protocol

from dedupd.http import streams

#: The most bytes of a request's header.
HEADER_LIMIT = 16384
#: The type of errors, and of most answers.
JSON = 'application/json'


class Limits(Protocol):
    """Options of the server, read for each use because they may change."""

    max_connections: int
    max_peer_connections: int
    max_body_memory_mib: int
    header_timeout: float
    idle_timeout: float
    write_timeout: float


class HTTPError(Exception):
    """A request ends with this status and a sentence."""

    def __init__(self, status: int, message: str,
                 headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers or {}


@dataclasses.dataclass(frozen=True)
class Peer:
    """The other end of a connection."""

    uid: int | None = None
    """The user id of a peer on a Unix socket."""
    operator: bool = False
    """True if its certificate is of the operators' authority, by the current
    trust."""
    names: tuple[str, ...] = ()
    """The common names, and the DNS names, of an operator's certificate."""


@dataclasses.dataclass
class Request:
    """A request whose body has been received."""

    method: str
    query: dict[str, str]
    headers: dict[str, str]
    """Values by their names in lower case."""
    peer: Peer
    body: bytes = b''
    upgrade: str = ''
    """The protocol to which the client would change."""

    def json(self) -> Any:
        """The body, which must be JSON; None if there is none.

        :raises HTTPError: 400, if it is not JSON
        """
        if not self.body:
            return None
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise HTTPError(400, 'The body is not JSON.')


@dataclasses.dataclass
class Message:
    """A request as it came, to be passed on."""

    method: str
    target: str
    """Path and query."""
    headers: list[tuple[bytes, bytes]]
    """Names and values; names as the client wrote them."""
    peer: Peer
    body: AsyncGenerator[bytes, None] | None
    """The pieces of the body; the user closes it. None: there is no body. It
    may raise errors that end the connection."""


class Pieces(Protocol):
    """The methods of an asynchronous generator that sending a body needs."""

    async def asend(self, pour: streams.Pour | None, /) -> Any:
        """The next piece."""

    async def aclose(self) -> None:
        """End the generator, even before its first piece."""


class Session(Protocol):
    """Session on a connection that changes to another protocol."""

    headers: dict[str, str]

    async def run(self, stream: streams.SocketStream,
                  count: Callable[[int], None]) -> None:
        """Serve the client until it ends.

        :param count: called with bytes of images that were served
        """

    async def aclose(self) -> None:
        """End the session, even before it has begun."""


@dataclasses.dataclass
class Response:
    """An answer of a handler, which the server sends."""

    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes | Pieces = b''
    """Bytes, or a generator of pieces. The generator may change a piece when
    the next one is requested. It is closed in any case. For each piece the
    server sends it a Pour, by which it may send some of the next bytes
    itself."""
    length: int | None = None
    """Bytes that the generator, or a GET, yields; None: not known
    beforehand."""
    relayed: list[tuple[bytes, bytes]] | None = None
    """The header of another server's response. All of it is sent in the place
    of `headers`, except what h11 adds to frame the body."""
    session: Session | None = None
    """The protocol to which the connection changes, by a status of 101."""
    reason: bytes | None = None
    """The reason phrase; None: the usual one of the status."""


def _json_body(value: Any) -> bytes:
    return json.dumps(value, separators=(',', ':')).encode() + b'\n'


def json_response(value: Any, status: int = 200) -> Response:
    """A response with a value in JSON."""
    return Response(status, {'Content-Type': JSON}, _json_body(value))


def error_body(error: HTTPError) -> bytes:
    """The JSON that describes an error, as all OpenStack services send it."""
    return _json_body({'error': {
        'code': error.status,
        'title': http.HTTPStatus(error.status).phrase,
        'message': error.message}})


def error_response(error: HTTPError) -> Response:
    """The response for an error, with the error's headers."""
    return Response(error.status, {'Content-Type': JSON, **error.headers},
                    error_body(error))
