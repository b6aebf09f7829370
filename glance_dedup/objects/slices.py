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
_OBJECT = re.compile('[0-9a-f]{32}')
_SLICE = re.compile('[0-9a-f]{8}')

_Key = tuple[bytes, int]


def key_of(owner: str, group: int, object_id: bytes) -> str:
    """The key of a cold group's object."""
    return f'{owner}/g/{group:08x}-{object_id.hex()}'


class Slices(closing.Closing):
    """What brings slices into a directory, and evicts others.

    Thread-safe. It belongs to the process that made it: after a fork the child
    makes its own.
    """

    def __init__(self, directory: str, budget: int,
                 open_store: Callable[[], store_module.ObjectStore],
                 owner: str) -> None:
        """Make the directory, if it is missing; ask for nothing yet.

        :param directory: for slices of one repository
        :param budget: bytes; at least one slice for each request under way
        :param open_store: called once, when the first slice is needed
        :param owner: what the keys of the groups' objects begin with
        :raises AccessDenied: somebody else may change the directory
        """
        self.directory = directory
        self.budget = max(budget, 2 * PARALLEL * SLICE)
        self._open_store = open_store
        self._owner = owner
        self._lock = threading.Lock()
        self._store: store_module.ObjectStore | None = None
        self._requests: dict[_Key, futures.Future[None]] = {}
        self._pool = futures.ThreadPoolExecutor(PARALLEL, 'slices')
        self._used: int | None = None       # bytes; None: not counted yet
        _make_directory(directory)

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
        if self._store is not None:
            self._store.close()

    @property
    def counts(self) -> store_module.Counts:
        """What was asked of the object store."""
        return self._store.counts if self._store else store_module.Counts()

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
                content = self._get_store().get(
                    key_of(self._owner, group, object_id), start,
                    min(SLICE, length - start))
                self._keep(object_id, number, content)
        finally:
            with self._lock:
                del self._requests[object_id, number]

    def _get_store(self) -> store_module.ObjectStore:
        with self._lock:
            if self._store is None:
                self._store = self._open_store()
            return self._store

    # -- files --

    def _path(self, object_id: bytes, number: int) -> str:
        return os.path.join(self.directory, object_id.hex(), f'{number:08x}')

    def _is_there(self, object_id: bytes, number: int) -> bool:
        return os.path.exists(self._path(object_id, number))

    def _keep(self, object_id: bytes, number: int, content: bytes) -> None:
        path = self._path(object_id, number)
        temporary = f'{path}.{secrets.token_hex(8)}'
        with files.os_errors(f'cannot write {path}'):
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(path), 0o700)
            try:
                with open(access.make_file(temporary, 0o600), 'wb') as f:
                    f.write(content)
                os.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        self._make_room(len(content))

    def _make_room(self, more: int) -> None:
        """Evict what was used longest ago, if there is too much.

        Reading does not change a file: the time of its last access may be a
        day old. But a slice that is read often is fetched again soon.
        """
        with self._lock:
            if self._used is not None:
                self._used += more
                if self._used <= self.budget:
                    return
            found = sorted(self._all())
            used = sum(size for _, size, _ in found)
            wanted = self.budget - self.budget // _SPARE
            if used > self.budget:
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


def _make_directory(path: str) -> None:
    """Make a directory that only this user may change."""
    with files.os_errors(f'cannot make the cache of slices {path}'):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or (
            status.st_mode & 0o022):
        raise exceptions.AccessDenied(
            f'{path} is no directory that only '
            f'{access.user_name(os.geteuid())} may change: remove it, or '
            'choose another one')
