# SPDX-License-Identifier: Apache-2.0

"""Requests and responses, and what goes wrong with them."""

from collections.abc import AsyncGenerator
import dataclasses
import http
import json
from typing import Any
from typing import Protocol

from dedupd.http import streams

#: Bytes of a request's header at most.
HEADER_LIMIT = 16384
#: The type of errors, and of most answers.
JSON = 'application/json'


class Limits(Protocol):
    """Options of the server; read each time, since they may change."""

    max_connections: int
    max_peer_connections: int
    bodies_mib: int
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
    """Who is at the other end."""

    listener: str
    uid: int | None = None
    """Of a peer on a Unix socket."""
    operator: bool = False
    """It has a certificate of the operators' authority, by what is trusted
    now."""


@dataclasses.dataclass
class Request:
    method: str
    query: dict[str, str]
    headers: dict[str, str]
    """By name in lower case."""
    peer: Peer
    body: bytes = b''

    def json(self) -> Any:
        """The body, which must be JSON; None if there is none.

        :raises HTTPError: 400
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
    """Names as they were written."""
    peer: Peer
    body: AsyncGenerator[bytes, None] | None
    """Its pieces; to be closed. None: it has no body. It may raise what ends
    the connection."""


@dataclasses.dataclass
class Response:
    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes | AsyncGenerator[Any, 'streams.Pour | None'] = b''
    """Bytes, or a generator of pieces; each may be changed by the generator
    when the next one is asked for. It is closed in any case. What it is sent
    for each piece is by what it may send some of the next bytes itself."""
    length: int | None = None
    """Of what a generator yields, or a GET would; None: it is not known
    beforehand."""
    relayed: list[tuple[bytes, bytes]] | None = None
    """The header of another server's response: all of it, but for what h11
    adds to frame the body, is sent in the place of `headers`."""
    reason: bytes | None = None
    """None: the usual one of the status."""


def _json_body(value: Any) -> bytes:
    return json.dumps(value, separators=(',', ':')).encode() + b'\n'


def json_response(value: Any, status: int = 200) -> Response:
    return Response(status, {'Content-Type': JSON}, _json_body(value))


def error_body(error: HTTPError) -> bytes:
    return _json_body({'error': {
        'code': error.status,
        'title': http.HTTPStatus(error.status).phrase,
        'message': error.message}})


def error_response(error: HTTPError) -> Response:
    return Response(error.status, {'Content-Type': JSON, **error.headers},
                    error_body(error))
