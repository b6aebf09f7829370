# SPDX-License-Identifier: Apache-2.0

"""The slices of cold groups' objects that this host keeps.

The engine reads a cold group out of *slices*: ranges of its object, 1 MiB long
and aligned to that, each in a file of its own, ``<object id>/<slice>``. A file
appears whole, by a rename, and eviction removes it; who has it open reads on.
What is in it is verified by who reads it, so nothing here is synced.

Several processes may use one directory. Two that fetch the same slice at once
both write it, and the second file takes the first one's place. In one process
one request serves all that wait for it.
"""

from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import os
import re
import secrets
import stat
import threading

from glance_dedup.base import access
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.objects import store as store_module

#: Bytes of a slice. The engine has the same number.
SLICE = 1 << 20
#: Requests that are under way at most.
PARALLEL = 8
#: Requests that wait at most because they were announced. Further
#: announcements have no effect.
ANNOUNCED = 64

# By how much the cache is made smaller than its budget, so that not each new
# slice evicts one.
_SPARE = 16
# How often a slice is written at most, while its directory is removed.
_WRITES = 8
_OBJECT = re.compile('[0-9a-f]{32}')
_SLICE = re.compile('[0-9a-f]{8}')

_Key = tuple[bytes, int]


def key_of(owner: str, group: int, object_id: bytes) -> str:
    """The key of a cold group's object."""
    return f'{owner}/g/{group:08x}-{object_id.hex()}'


@dataclasses.dataclass(frozen=True)
class Source:
    """Where slices come from, and how many are kept."""

    store: store_module.ObjectStore
    owners: tuple[str, ...]
    """What the keys of the groups' objects may begin with. The object of a
    group is looked for under each in turn."""
    budget: int
    """Bytes; at least two slices for each request under way are kept."""


class Slices(closing.Closing):
    """What brings slices into a directory, and evicts others.

    Thread-safe. It belongs to the process that made it: after a fork the child
    makes its own.
    """

    def __init__(self, directory: str, connect: Callable[[], Source],
                 file_mode: int = 0o600) -> None:
        """Ask for nothing yet.

        :param directory: for slices of one repository; it is there
        :param connect: called once, when the first slice is needed
        :param file_mode: of the slices' files
        """
        self.directory = directory
        self._connect = connect
        self._file_mode = file_mode
        self._directory_mode = 0o2770 if file_mode & 0o020 else 0o700
        self._lock = threading.Lock()
        self._source: Source | None = None
        # Under which owner an object was found, if it is not the first one.
        self._owners: dict[bytes, str] = {}
        self._requests: dict[_Key, futures.Future[None]] = {}
        self._pool = futures.ThreadPoolExecutor(PARALLEL, 'slices')
        self._used: int | None = None       # bytes; None: not counted yet

    def fetch(self, group: int, object_id: bytes, length: int, first: int,
              count: int) -> None:
        """Bring slices, except those that are there; waits for all.

        :param length: of the object
        :raises UnavailableError: the object store does not give one
        :raises NoSpaceError: the cache's disk is full
        """
        asked = [self._ask(group, object_id, length, number)
                 for number in range(first, first + count)
                 if not self._is_there(object_id, number)]
        for one in asked:
            one.result()

    def expect(self, group: int, object_id: bytes, length: int, first: int,
               count: int) -> None:
        """Begin to bring slices, if not too many are waited for already."""
        for number in range(first, first + count):
            if len(self._requests) >= ANNOUNCED:
                return
            if not self._is_there(object_id, number):
                self._ask(group, object_id, length, number)

    def close(self) -> None:
        """Wait for what is under way, and close the connections."""
        self._pool.shutdown(cancel_futures=True)
        if self._source is not None:
            self._source.store.close()

    @property
    def counts(self) -> store_module.Counts:
        """What was asked of the object store."""
        return (self._source.store.counts if self._source
                else store_module.Counts())

    # -- requests --

    def _ask(self, group: int, object_id: bytes, length: int, number: int
             ) -> futures.Future[None]:
        """The request for a slice: the one under way, or a new one."""
        key = object_id, number
        with self._lock:
            request = self._requests.get(key)
            if request is None:
                request = self._pool.submit(
                    self._bring, group, object_id, length, number)
                self._requests[key] = request
            return request

    def _bring(self, group: int, object_id: bytes, length: int, number: int
               ) -> None:
        start = number * SLICE
        try:
            if not self._is_there(object_id, number) and start < length:
                self._keep(object_id, number, self._get(
                    group, object_id, start, min(SLICE, length - start)))
        finally:
            with self._lock:
                del self._requests[object_id, number]

    def _get(self, group: int, object_id: bytes, start: int, length: int
             ) -> bytes:
        source = self._get_source()
        known = self._owners.get(object_id)
        for owner in [known] if known else source.owners:
            try:
                content = source.store.get(
                    key_of(owner, group, object_id), start, length)
            except store_module.ObjectNotFound:
                if known or owner == source.owners[-1]:
                    raise
                continue
            if owner != source.owners[0]:
                self._owners[object_id] = owner
            return content
        raise exceptions.UnavailableError('no owner of objects is known')

    def _get_source(self) -> Source:
        with self._lock:
            if self._source is None:
                self._source = self._connect()
            return self._source

    # -- files --

    def _path(self, object_id: bytes, number: int) -> str:
        return os.path.join(self.directory, object_id.hex(), f'{number:08x}')

    def _is_there(self, object_id: bytes, number: int) -> bool:
        return os.path.exists(self._path(object_id, number))

    def _keep(self, object_id: bytes, number: int, content: bytes) -> None:
        path = self._path(object_id, number)
        with files.os_errors(f'cannot write {path}', exceptions.StorageError):
            for left in reversed(range(_WRITES)):
                try:
                    self._write(path, content)
                    break
                except FileNotFoundError:
                    # Somebody evicted the object's last slice, and with it the
                    # directory.
                    if not left:
                        raise
        self._make_room(len(content))

    def _write(self, path: str, content: bytes) -> None:
        temporary = f'{path}.{secrets.token_hex(8)}'
        if not os.path.isdir(os.path.dirname(path)):
            access.make_directory(os.path.dirname(path), self._directory_mode)
        try:
            with open(access.make_file(temporary, self._file_mode), 'wb') as f:
                f.write(content)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _make_room(self, more: int) -> None:
        """Evict what was used longest ago, if there is too much.

        Reading does not change a file: the time of its last access may be a
        day old. But a slice that is read often is fetched again soon.
        """
        budget = max(self._get_source().budget, 2 * PARALLEL * SLICE)
        with self._lock:
            if self._used is not None:
                self._used += more
                if self._used <= budget:
                    return
            found = sorted(self._all())
            used = sum(size for _, size, _ in found)
            wanted = budget - budget // _SPARE
            if used > budget:
                for _, size, path in found:
                    if used <= wanted:
                        break
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                        used -= size
            self._used = used

    def _all(self) -> Iterator[tuple[float, int, str]]:
        """Of each slice, and of what killed processes left: time, size, path.

        Empty directories of objects are removed.
        """
        with contextlib.suppress(OSError), os.scandir(self.directory) as there:
            for directory in there:
                if not _OBJECT.fullmatch(directory.name):
                    continue
                with contextlib.suppress(OSError):
                    os.rmdir(directory.path)
                with (contextlib.suppress(OSError),
                      os.scandir(directory.path) as slices):
                    for one in slices:
                        status = one.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) and (
                                _SLICE.match(one.name)):
                            yield (max(status.st_atime, status.st_mtime),
                                   status.st_size, one.path)
