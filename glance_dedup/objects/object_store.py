# SPDX-License-Identifier: Apache-2.0

"""An object store, as cold groups need one.

It keeps objects that are written once, under keys that were never used before.
It is not trusted: an object that was sent is verified by the server's digest
and by its length, and the reader of a range verifies its bytes.

A request that fails is repeated a few times, since servers of object stores
are often busy. A server that sends nothing, or too slowly, or too much, fails
the request. If it refuses the credentials, their file is read again once: it
may have been replaced, as temporary credentials are.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import hashlib
import itertools
import os
import random
import threading
import time
from typing import BinaryIO
from typing import cast
from typing import TypeVar

from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.objects import backend_base
from glance_dedup.objects import credentials
from glance_dedup.objects import object_location

#: How often a request is made, and the seconds before the second time. Each
#: further wait is twice as long, and all vary by half.
TRIES = 4
FIRST_WAIT = 0.25
#: More keys than a repository has groups and images: 4 GB of memory.
MAX_KEYS = 1 << 24
#: How slowly bytes may come or go: bytes a second, and further seconds.
SLOWEST, MIN_TIMEOUT = 65536, 60.0

ObjectNotFound = backend_base.ObjectNotFound
RefusedError = backend_base.RefusedError

_Result = TypeVar('_Result')


@dataclasses.dataclass
class Counts:
    """Requests and bytes since the store was opened; providers bill both."""

    puts: int = 0
    gets: int = 0
    others: int = 0
    """HEAD, LIST and DELETE."""
    repeated: int = 0
    """Number of all these that failed and were made again."""
    sent: int = 0
    """Bytes of objects."""
    received: int = 0
    """Bytes of objects."""


class ObjectStore(closing.Closing):
    """Objects of a bucket or container below a prefix. Thread-safe.

    Keys are given, and listed, without the prefix.

    Each method raises UnavailableError if the server does not answer, or not
    as it should; the message names the location and the object. Its subclasses
    :class:`ObjectNotFound` and :class:`RefusedError` are more precise.
    """

    def __init__(self, location: object_location.Location,
                 credentials_file: str, allow_http: bool = False) -> None:
        """Read the credentials; connect to nothing yet.

        :param allow_http: whether a catalogue may lead to another host without
            encryption
        :raises AccessDenied: as :func:`credentials.read`, or they are not for
            such an object store
        :raises UnavailableError: the client library is not installed
        """
        self.location = location
        self._prefix = f'{location.prefix}/'
        self.counts = Counts()
        self._path = credentials_file
        self._lock = threading.Lock()
        self._allow_http = allow_http
        self._content = credentials.read(credentials_file)
        self._backend = open_backend(location, credentials_file, self._content,
                                     allow_http)
        self._old: list[backend_base.Backend] = []

    def put(self, key: str, file: BinaryIO) -> int:
        """Store an object; returns its length.

        When this returns, the server has the bytes of the file, by its own
        digest.

        :param file: an ordinary file, of which all is sent
        """
        length = os.fstat(file.fileno()).st_size
        digest = hashlib.md5(usedforsecurity=False)
        file.seek(0)
        while piece := file.read(1 << 20):
            digest.update(piece)

        def send(backend: backend_base.Backend) -> None:
            file.seek(0)
            self._count(puts=1, sent=length)
            backend.put(self._prefix + key,
                        cast(BinaryIO, _Timed(file, length)), length,
                        digest.digest())

        self._request(f'PUT {key}', send)
        there = self.size(key)
        if there != length:
            raise exceptions.UnavailableError(
                f'{self.location.url}: {key} has {there} bytes after '
                f'{length} were sent')
        return length

    def get(self, key: str, start: int, length: int) -> bytes:
        """Read a range that lies in the object."""
        def receive(backend: backend_base.Backend) -> bytes:
            self._count(gets=1)
            deadline = _deadline(length)
            found = bytearray()
            with contextlib.closing(
                    backend.get(self._prefix + key, start, length)) as pieces:
                for piece in pieces:
                    found += piece
                    if len(found) > length:
                        raise exceptions.UnavailableError(
                            'more came than was asked for')
                    _require_time(deadline)
            self._count(received=len(found))
            if len(found) < length:
                raise exceptions.UnavailableError(
                    f'{len(found)} bytes came instead of {length}')
            return bytes(found)

        return self._request(f'GET {key}', receive)

    def size(self, key: str) -> int:
        """Return how many bytes an object has."""
        def ask(backend: backend_base.Backend) -> int:
            self._count(others=1)
            return backend.size(self._prefix + key)

        return self._request(f'HEAD {key}', ask)

    def keys(self, prefix: str) -> list[tuple[str, int]]:
        """The keys that begin with a prefix, and their sizes.

        A server may leave out objects stored or deleted lately.
        """
        def ask(backend: backend_base.Backend) -> list[tuple[str, int]]:
            self._count(others=1)
            found = [
                (key.removeprefix(self._prefix), size)
                for key, size in itertools.islice(
                    backend.keys(self._prefix + prefix), MAX_KEYS)]
            if len(found) == MAX_KEYS:
                raise exceptions.UnavailableError(
                    f'there are {MAX_KEYS} objects or more')
            return found

        return self._request(f'LIST {prefix}', ask)

    def delete(self, key: str) -> None:
        """Delete an object. If there is none, do nothing."""
        def ask(backend: backend_base.Backend) -> None:
            self._count(others=1)
            backend.delete(self._prefix + key)

        self._request(f'DELETE {key}', ask)

    def close(self) -> None:
        """Close all connections. No request may be under way."""
        for backend in [self._backend, *self._old]:
            backend.close()

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                setattr(self.counts, name,
                        getattr(self.counts, name) + number)

    def _request(self, what: str,
                 work: Callable[[backend_base.Backend], _Result]
                 ) -> _Result:
        """Do some work with the backend, several times if it fails."""
        tried = 0
        while True:
            backend = self._backend
            tried += 1
            try:
                return work(backend)
            except RefusedError as e:
                error: exceptions.UnavailableError = e
                again = self._renew(backend)
            except exceptions.UnavailableError as e:
                error = e
                again = not isinstance(e, ObjectNotFound)
            if not again or tried == TRIES:
                raise type(error)(
                    f'{self.location.url}: {what}: {error}') from error
            self._count(repeated=1)
            time.sleep(FIRST_WAIT * 2 ** (tried - 1)
                       * random.uniform(0.5, 1.5))

    def _renew(self, refused: backend_base.Backend) -> bool:
        """Take new credentials, if there are any; returns whether so."""
        with self._lock:
            if self._backend is not refused:
                return True     # another thread was faster
            try:
                content = credentials.read(self._path)
            except exceptions.AccessDenied:
                return False
            if content == self._content:
                return False
            try:
                self._backend = open_backend(self.location, self._path,
                                             content, self._allow_http)
            except exceptions.AccessDenied:
                return False
            self._content = content
            # Other threads may still use it.
            self._old.append(refused)
            return True


def find(store: ObjectStore, key: str) -> int | None:
    """Return how many bytes an object has, or None if none is seen.

    :raises UnavailableError: the object store does not answer
    """
    try:
        return store.size(key)
    except ObjectNotFound:
        return None


def open_backend(location: object_location.Location, path: str, content: bytes,
                 allow_http: bool = False) -> backend_base.Backend:
    """Return the backend of a location; it connects to nothing yet.

    :param path: of the file of credentials, for messages
    :param content: of that file
    :param allow_http: as for :class:`ObjectStore`
    :raises AccessDenied: there are no credentials in it
    :raises UnavailableError: a library is not installed
    """
    conf = credentials.options(path, content)
    # The client libraries take a second to import, and may not be there.
    try:
        if location.kind == 's3':
            from glance_dedup.objects import s3
            return s3.S3(location, conf)
        from glance_dedup.objects import swift
        return swift.Swift(location, conf, allow_http)
    except ImportError as e:
        raise exceptions.UnavailableError(
            f'{location.url} needs a library that is not installed ({e}): '
            f'pip install glance-dedup[{location.kind}]') from e
    except exceptions.AccessDenied as e:
        raise exceptions.AccessDenied(f'{path}: {e}') from e


def _deadline(length: int) -> float:
    return time.monotonic() + MIN_TIMEOUT + length / SLOWEST


def _require_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise exceptions.UnavailableError('it takes too long')


class _Timed:
    """A file that is to be sent within a time.

    It has the methods that the libraries use, and no more than `length` bytes.
    """

    def __init__(self, file: BinaryIO, length: int) -> None:
        self._file = file
        self._length = length
        self._deadline = _deadline(length)

    def read(self, size: int = -1) -> bytes:
        _require_time(self._deadline)
        left = self._length - self._file.tell()
        return self._file.read(left if size < 0 else min(size, left))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def __len__(self) -> int:
        return self._length
