# SPDX-License-Identifier: Apache-2.0

"""The slices of cold groups' objects that this host keeps.

The engine reads a cold group out of *slices*: ranges of its object, 1 MiB long
and aligned to that, each in a file of its own, ``<object id>/<slice>``. A file
appears whole, by a rename, and eviction removes it; an open file
stays readable. Readers verify the bytes, so nothing here is synced.

Several processes may use one directory. They request slices from dedupd,
so that one request to the object store serves all of them. A process for which
no daemon answers makes the requests itself; two such processes that want the
same slice at once both write it, and the second file takes the first one's
place. In one process one request serves all threads that wait for it.

Slices that a reader waits for come before those that were only announced.
"""

from collections.abc import Callable
from collections.abc import Iterable
from concurrent import futures
import contextlib
import dataclasses
import threading
import time
from typing import NamedTuple
from typing import Protocol

from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import thread_pool
from glance_dedup.objects import object_store
from glance_dedup.objects import slicefiles

#: Bytes of a slice. The engine has the same number.
SLICE = 1 << 20
#: Requests that are under way at most.
PARALLEL = 8
#: Slices that are on their way at most because they were announced. Further
#: announcements have no effect.
ANNOUNCED = 64

# Part of the cache's budget for announced slices: they must not be
# evicted before they are read.
_AHEAD = 4
# Slices last announced to dedupd, which are not announced again: a slice
# has several segments, which are read one after the other.
_TOLD = 16


def key_of(owner: str, group: int, object_id: bytes) -> str:
    """The key of a cold group's object."""
    return f'{owner}/g/{group:08x}-{object_id.hex()}'


@dataclasses.dataclass(frozen=True)
class Figures:
    """Counters of slices since this process opened the repository."""

    gets: int = 0
    """Requests to the object store."""
    received: int = 0
    """Bytes of objects that these brought."""
    asked: int = 0
    """Slices that were requested from dedupd."""
    evicted: int = 0
    """Slices that were removed, to keep the cache's size."""
    unavailable: int = 0
    """Slices that the object store did not give."""
    cached: int | None = None
    """Bytes of the cache. None: this process has not counted them."""


class Wanted(NamedTuple):
    """A slice of a cold group's object."""

    group: int
    object_id: bytes
    length: int
    """Bytes of the object."""
    number: int
    """The slice's place in the object."""


class Ask(Protocol):
    """Asks another process of this host for slices."""

    def __call__(self, group: int, object_id: bytes, first: int, count: int,
                 wait: float) -> bool:
        """Have slices brought into the directory.

        :param wait: how many seconds to wait at most until they are there; 0:
            they are only announced
        :returns: False: no daemon answers, so the caller is to bring them
        :raises UnavailableError: the object store does not give one
        :raises TimeoutError: it does not give one in time
        """


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of slices, and how many are kept."""

    url: str
    connect: Callable[[], object_store.ObjectStore]
    """Loads the libraries, and returns the object store.

    :raises UnavailableError: the credentials cannot be used
    """
    owners: tuple[str, ...]
    """Prefixes of the keys of the groups' objects. The object of a
    group is tried under each in turn."""
    budget: int
    """Bytes; at least two slices for each request under way are kept."""
    read_limit: float
    """Seconds that a reader waits at most."""


class Slices(closing.Closing):
    """Cache that brings slices into a directory, and evicts others.

    Thread-safe. It belongs to the process that made it: after a fork the child
    makes its own.
    """

    def __init__(self, directory: str, source: Callable[[], Source],
                 file_mode: int = 0o600, ask: Ask | None = None,
                 memory: str | None = None) -> None:
        """Ask for nothing yet.

        :param directory: for slices of one repository; it is there
        :param source: called once, when the first slice is needed
        :param file_mode: of the slices' files
        :param ask: requests slices from dedupd. None: this is dedupd
        :param memory: a directory on a tmpfs, for the slices that are being
            read while the disk is full; None: there is none
        """
        self.directory = directory
        self.memory = memory
        self._files = slicefiles.SliceFiles(directory, file_mode, memory)
        self._find_source = source
        self._ask = ask
        self._connecting = threading.Lock()     # guards the next two
        self._source: Source | None = None
        self._store: object_store.ObjectStore | None = None
        # Under which owner an object was found, if it is not the first one.
        self._owners: dict[bytes, str] = {}
        self._lock = threading.Lock()   # guards all fields below
        self._requests: dict[Wanted, futures.Future[None]] = {}
        # Requests that have not begun, in their order: the ones with a waiting
        # reader, and the others.
        self._awaited: dict[Wanted, None] = {}
        self._announced: dict[Wanted, None] = {}
        # Slices that were announced to dedupd, oldest first.
        self._told: dict[Wanted, None] = {}
        self._asked = self._unavailable = 0
        self._pool = thread_pool.Workers('slices', PARALLEL)
        self._telling = thread_pool.Strand(thread_pool.Workers('slices-ahead',
                                                               1))

    def prepare(self) -> None:
        """Do the work that the first request would have to wait for.

        It loads the libraries, which takes a second, counts the slices, and
        sends nothing. An error comes again when a slice is needed.
        """
        with contextlib.suppress(exceptions.RepositoryError):
            self._get_store()
        self._files.start()

    # -- for the engine --

    def fetch(self, group: int, object_id: bytes, length: int, first: int,
              count: int, patience: float = 0.0) -> None:
        """Fetch the missing ones of some slices; wait for all.

        :param length: of the object
        :param patience: how many seconds to wait at most; 0: as many as the
            operator allows. The requests go on after that
        :raises UnavailableError: the object store does not give one
        :raises NoSpaceError: the cache's disk is full, and so is the memory
        """
        wanted = self.missing(group, object_id, length, first, count)
        if not wanted:
            return
        source = self._get_source()
        limit = patience or source.read_limit
        ends = time.monotonic() + limit
        try:
            if self._have_brought(wanted, limit):
                # While the disk is full, dedupd has them in memory. It may
                # have another place for them than this process.
                wanted = self.missing(group, object_id, length, first, count)
            for request in self.request(wanted):
                request.result(max(0.0, ends - time.monotonic()))
        except TimeoutError as e:
            raise exceptions.UnavailableError(
                f'{source.url}: {object_id.hex()} did not come within '
                f'{limit:g} s') from e

    def expect(self, group: int, object_id: bytes, length: int, first: int,
               count: int) -> None:
        """Begin to bring slices, if not too many are waited for already."""
        wanted = self.missing(group, object_id, length, first,
                              min(count, ANNOUNCED))
        if self._ask is None:
            self.announce(wanted)
            return
        with self._lock:
            wanted = [one for one in wanted if one not in self._told]
            self._told |= dict.fromkeys(wanted)
            while len(self._told) > _TOLD:
                del self._told[next(iter(self._told))]
        if wanted:
            # It may take a second to find out that dedupd hangs.
            self._telling.submit(self._tell, wanted)

    def missing(self, group: int, object_id: bytes, length: int, first: int,
                count: int) -> list[Wanted]:
        """Return the missing ones of some slices of an object."""
        end = min(first + count, -(-length // SLICE))
        return [Wanted(group, object_id, length, number)
                for number in range(first, end)
                if not self._files.is_there(object_id, number)]

    def forget(self, object_id: bytes, first: int, count: int) -> set[int]:
        """Remove slices: their next readers have them fetched again.

        :returns: the ones that were there
        """
        return {number for number in range(first, first + count)
                if self._files.remove(object_id, number)}

    # -- by way of dedupd --

    def _have_brought(self, wanted: list[Wanted], wait: float) -> bool:
        """Have dedupd bring slices that lie between two of an object."""
        if self._ask is None:
            return False
        first, last = wanted[0], wanted[-1]
        with self._lock:
            # The announced ones are counted.
            new = sum(one not in self._told for one in wanted) if wait else (
                len(wanted))
            for one in wanted if wait else ():
                self._told.pop(one, None)
        try:
            found = self._ask(first.group, first.object_id, first.number,
                              last.number - first.number + 1, wait)
        except (exceptions.UnavailableError, TimeoutError):
            self._count(unavailable=len(wanted))
            raise
        if found:
            self._count(asked=new)
        return found

    def _tell(self, wanted: list[Wanted]) -> None:
        with contextlib.suppress(exceptions.UnavailableError):
            if not self._have_brought(wanted, 0.0):
                self.announce(wanted)

    # -- requests --

    def request(self, wanted: Iterable[Wanted]) -> list[futures.Future[None]]:
        """Have slices fetched for a waiting reader; return at once.

        The results raise what :meth:`fetch` does.
        """
        return [self._begin(one, self._awaited) for one in wanted]

    def announce(self, wanted: Iterable[Wanted]) -> None:
        """Have slices brought soon, if not too many are on their way."""
        for one in wanted:
            if len(self._requests) >= self._most_announced():
                return
            self._begin(one, self._announced)

    def _most_announced(self) -> int:
        source = self._source
        if self._files.is_disk_full:
            return PARALLEL
        return ANNOUNCED if source is None else max(
            PARALLEL, min(ANNOUNCED, source.budget // SLICE // _AHEAD))

    def _begin(self, one: Wanted, queue: dict[Wanted, None]
               ) -> futures.Future[None]:
        """The request for a slice: the one under way, or a new one."""
        with self._lock:
            request = self._requests.get(one)
            if request is not None:
                if queue is self._awaited and one in self._announced:
                    del self._announced[one]
                    queue[one] = None
                return request
            request = self._requests[one] = futures.Future()
            request.set_running_or_notify_cancel()  # no thread cancels it
            queue[one] = None
        try:
            self._pool.submit(self._bring_next)
        except exceptions.NoThread as e:
            self._end(one, e)
        return request

    def _bring_next(self) -> None:
        """Bring the slice that is most urgent."""
        with self._lock:
            queue = self._awaited or self._announced
            if not queue:
                return
            one = next(iter(queue))
            del queue[one]
        error: BaseException | None = None
        try:
            self._bring(one)
        except BaseException as e:
            error = e
        self._end(one, error)

    def _end(self, one: Wanted, error: BaseException | None) -> None:
        with self._lock:
            self._awaited.pop(one, None)
            self._announced.pop(one, None)
            request = self._requests.pop(one)
            self._unavailable += isinstance(error,
                                            exceptions.UnavailableError)
        if error is None:
            request.set_result(None)
        else:
            request.set_exception(error)

    def _bring(self, one: Wanted) -> None:
        start = one.number * SLICE
        if start < one.length and not self._files.is_there(one.object_id,
                                                           one.number):
            content = self._get(one, start, min(SLICE, one.length - start))
            self._files.keep(
                one.object_id, one.number, content,
                max(self._get_source().budget, 2 * PARALLEL * SLICE))

    def _get(self, one: Wanted, start: int, length: int) -> bytes:
        source = self._get_source()
        known = self._owners.get(one.object_id)
        for owner in [known] if known else source.owners:
            try:
                content = self._get_store().get(
                    key_of(owner, one.group, one.object_id), start, length)
            except object_store.ObjectNotFound:
                if known or owner == source.owners[-1]:
                    raise
                continue
            if owner != source.owners[0]:
                self._owners[one.object_id] = owner
            return content
        raise exceptions.UnavailableError('no owner of objects is known')

    def _get_source(self) -> Source:
        with self._connecting:
            if self._source is None:
                self._source = self._find_source()
            return self._source

    def _get_store(self) -> object_store.ObjectStore:
        source = self._get_source()
        with self._connecting:
            if self._store is None:
                self._store = source.connect()
            return self._store

    def close(self) -> None:
        """Close the connections. No request may be under way."""
        if self._store is not None:
            self._store.close()

    # -- figures --

    @property
    def figures(self) -> Figures:
        """Return the counters of this process."""
        counts = (self._store.counts if self._store
                  else object_store.Counts())
        with self._lock:
            return Figures(
                counts.gets, counts.received, self._asked,
                self._files.evicted, self._unavailable, self._files.used)

    def _count(self, asked: int = 0, unavailable: int = 0) -> None:
        with self._lock:
            self._asked += asked
            self._unavailable += unavailable
