# SPDX-License-Identifier: Apache-2.0

"""Interface of the kinds of object stores.

A backend makes one request and reports how it went. The rest is the same for
all: see :mod:`glance_dedup.objects.object_store`. Backends are thread-safe.
"""

import abc
from collections.abc import Generator
from collections.abc import Iterator
from typing import Any
from typing import BinaryIO

from glance_dedup.base import exceptions

#: Seconds to connect, and between two pieces of an answer.
TIMEOUT = 10.0
#: Seconds for an answer to begin, and for that to a PUT: Swift and S3 verify
#: an object first.
ANSWER_TIMEOUT, PUT_TIMEOUT = 15.0, 60.0
#: The most bytes of a body that are taken at once.
PIECE = 65536

Pieces = Generator[bytes, None, None]


class ObjectNotFound(exceptions.UnavailableError):
    """There is no object of this key, or it cannot be seen yet."""


class RefusedError(exceptions.UnavailableError):
    """The object store refuses the credentials, or the request under them."""


def pieces(answer: Any) -> Pieces:
    """The body of an answer of urllib3, as its bytes come.

    No piece waits for more bytes than have come, so that a server that sends
    them one by one is noticed.
    """
    while piece := answer.read1(PIECE):
        yield piece


class Backend(abc.ABC):
    """One bucket or container, as the credentials at hand show it.

    All methods raise :class:`ObjectNotFound`, :class:`RefusedError`, and
    UnavailableError for everything else.
    """

    @abc.abstractmethod
    def urls(self) -> Iterator[str]:
        """The URLs that get credentials, tokens or objects, in this order.

        It may have to log in for one.
        """

    @abc.abstractmethod
    def put(self, key: str, file: BinaryIO, length: int, md5: bytes) -> None:
        """Store an object.

        :param file: read from its present offset to its end
        :param md5: of the object. The server compares the bytes with it
        """

    @abc.abstractmethod
    def get(self, key: str, start: int, length: int) -> Pieces:
        """The bytes of a range that lies in the object, in pieces."""

    @abc.abstractmethod
    def size(self, key: str) -> int:
        """Return how many bytes an object has."""

    @abc.abstractmethod
    def keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        """The keys that begin with a prefix, in order, and their sizes."""

    @abc.abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object. If there is none, do nothing."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close all connections. No request may be under way."""
