# SPDX-License-Identifier: Apache-2.0

"""Pulls: images that are read while they arrive from another repository.

Each image that is missing here has one pull, however many clients want it. The
pull goes through the image in order, some lots ahead of the stored ones, and
goes on after the readers have left. Readers get the bytes that have come
(``partial_image.py``).

The pull hashes the bytes in order, as Glance has recorded the hash. So it
finds a description of another image before the commit, and before readers get
the image's last piece. On the commit the readers go over to the committed
image (I12).
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import threading
import time
from typing import Any

from dedupd.cache import description as description_module
from dedupd.cache import partial_image
from dedupd.cache import source_client as source_client_module
from dedupd.serve import readings
from glance_dedup.base import exceptions
from glance_dedup.base import workers as workers_module
from glance_dedup.client import daemon as daemon_module
from glance_dedup.repository import openimages
from glance_dedup.repository import repository as repository_module
from glance_dedup.transfer import assembler

LOG = logging.getLogger(__name__)

#: The most images that arrive at once; others wait for so many seconds.
PULLS = 4
BUSY_SECONDS = 5.0
#: For so many seconds nobody asks a peer that did not answer.
AWAY_SECONDS = 30.0
#: The lots that a pull requests at once.
LOTS = 4
#: Bytes of the image's last piece. Readers get it once the whole image is
#: known to be right.
LAST_BYTES = 64 << 10

_WAIT = 10.0


class WrongImage(readings.ArrivalFailed):
    """The image that came is not the one that Glance means.

    So no response with bytes of it may end as if it were whole.
    """


@dataclasses.dataclass(frozen=True)
class Expected:
    """What Glance says of an image."""

    size: int
    md5: str | None = None
    hash_name: str | None = None
    hash_value: str | None = None

    @property
    def mark(self) -> str:
        """64 hexadecimal digits that stand for all these facts."""
        return hashlib.sha256(json.dumps(
            dataclasses.astuple(self)).encode()).hexdigest()

    def hasher(self) -> tuple[Any, str] | None:
        """A new hash object, and the expected result; None if unknown."""
        for name, value in ((self.hash_name, self.hash_value),
                            ('md5', self.md5)):
            if name and value:
                with contextlib.suppress(ValueError):
                    hasher = hashlib.new(name, usedforsecurity=False)
                    if hasher.digest_size:
                        return hasher, value.lower()
        return None


# -- one image ----------------------------------------------------------------

class _Arrival:
    """One arriving image, and its readers.

    :ivar begun: whether it is known what comes
    :ivar whole: why fingerprints cannot tell blocks apart; None: they can
    :ivar failure: why the arrival ended without an image
    """

    def __init__(self, arrivals: 'Arrivals', image_id: str,
                 expected: Expected | None) -> None:
        self._arrivals = arrivals
        self._repository = arrivals.repository
        self.image_id = image_id
        self.expected = expected
        self._changed = threading.Condition()
        self._readings: set['_Reading'] = set()
        self._at_work = 0               # calls of readinto
        self.begun = self._ended = self._cut = False
        self.whole: str | None = None
        self.failure: Exception | None = None
        self._present: readings.Present | None = None
        self.size = self._data_bytes = 0
        self.upload_id = ''
        self.peer: source_client_module.Peer | None = None
        self._arriving: partial_image.Arriving | None = None
        # The facts to compare the image with, and how.
        self._judge: Expected | None = None
        self._judged = False            # or about to be
        self._hash: tuple[Any, str] | None = None
        self._hashed_lots = 0
        self._holding = contextlib.ExitStack()
        self._threads: list[futures.Future] = []

    def __str__(self) -> str:
        return f'image {self.image_id} from {self.peer.address}'

    # -- beginning --------------------------------------------------------

    def begin(self, connect: Callable[[str | None], daemon_module.Client],
              token: str | None) -> None:
        """Learn what comes, and prepare for it.

        :raises ArrivalFailed, ClientError, RepositoryError: if nothing comes
        """
        try:
            self.peer = source_client_module.Peer(
                connect, self.image_id, token)
        except (OSError, ValueError) as e:
            raise readings.ArrivalFailed(f'image {self.image_id}: {e}') from e
        self._holding.callback(self.peer.close)
        recipe = self._holding.enter_context(self.peer.recipe())
        header = recipe.header
        self.size = header.size
        self._data_bytes = header.size - header.zero_bytes
        self.need_size(self.expected)
        self._transaction = self._holding.enter_context(
            self._repository.begin(self.image_id, scope=header.scope))
        self.upload_id = self._transaction.upload_id
        self.whole = assembler.why_whole(self._repository.parameters, header)
        if self.whole is not None:
            recipe.close()
            return
        self._description = description_module.Description(
            str(self), header)
        self._holding.callback(self._description.close)
        self._arriving = partial_image.Arriving(
            self._repository, self._transaction, header, self._description,
            self.peer)
        self._holding.callback(self._arriving.close)
        self._threads.append(self._arrivals.workers.submit(
            self._description.fill, recipe))

    def set_begun(self) -> None:
        with self._changed:
            self.begun = True
            self._changed.notify_all()

    def need_size(self, expected: Expected | None) -> None:
        """:raises WrongImage: if Glance's image has another size"""
        if expected is not None and expected.size != self.size:
            raise self._wrong(expected, f'it has {self.size} bytes, and '
                              f"{expected.size} by Glance's record")

    def _wrong(self, expected: Expected, why: str) -> WrongImage:
        """Note that the image is wrong; return the exception to raise."""
        self._arrivals.tell_wrong(self.image_id, expected, why)
        return WrongImage(f'{self}: {why}')

    def join(self, expected: Expected | None, token: str | None) -> None:
        """Let another client share this arrival.

        :raises readings.ArrivalFailed: if the client wants another image, or
            the arrival has just failed
        """
        self._need_hope()
        self.need_size(expected)
        with self._changed:
            if self.expected is None and not self._judged:
                self.expected = expected
            if expected not in (None, self.expected):
                raise readings.ArrivalFailed(
                    f'{self} is not compared with what Glance says of it now')
        self.peer.add_token(token)

    # -- the pull ---------------------------------------------------------

    def run(self) -> None:
        """Pull the image. Does not raise."""
        try:
            if self.whole is None:
                self._pull()
            else:
                self._pull_whole()
            self._need_right()
            self._commit()
        except exceptions.ImageExists as e:
            self._use_other(e)
        except Exception as e:
            self._fail(e)
        finally:
            self._end()

    def _pull(self) -> None:
        waiting: collections.deque = collections.deque()
        for number in itertools.count():
            lot = self._description.lot(number)
            if lot is None:
                break
            waiting.append((number, lot, self._ask_for(number, lot)))
            if len(waiting) == LOTS:
                self._finish(*waiting.popleft())
        while waiting:
            self._finish(*waiting.popleft())

    def _ask_for(self, number: int, lot: assembler.Lot
                 ) -> futures.Future | None:
        """Look a lot's blocks up, and start to fetch the missing ones."""
        self._arriving.look_up(number, lot)
        if not lot.wanted:
            return None
        future = self._arrivals.fetchers.submit(self._arriving.fetch, lot)
        self._threads.append(future)
        return future

    def _finish(self, number: int, lot: assembler.Lot,
                future: futures.Future | None) -> None:
        """Store the first lot that is under way."""
        if self._cut:
            raise readings.ArrivalFailed('the daemon is stopping')
        if future is not None:
            # Stored blocks are kept even if nothing comes any more.
            while not futures.wait([future], partial_image.SYNC_SECONDS).done:
                self._arriving.keep_in_time()
            future.result()
            self._threads.remove(future)
        self._arriving.store(number, lot)
        self._tell()
        self._hash_on()

    def _pull_whole(self) -> None:
        self._need_hash()
        with self.peer.stream() as stream:
            if stream.size != self.size:
                raise daemon_module.BadAnswer(
                    f'it has {stream.size} bytes, and {self.size} by its '
                    'description')
            while piece := stream.read(openimages.PIECE):
                self._transaction.write(piece)
                if self._hash is not None:
                    self._hash[0].update(piece)

    # -- whether it is the image ------------------------------------------

    def _need_hash(self) -> None:
        with self._changed:
            if self._judge is None and self.expected is not None:
                self._judge = self.expected
                self._hash = self.expected.hasher()

    def _hash_on(self) -> None:
        """Hash the stored bytes that were not hashed yet."""
        self._need_hash()
        while self._hash is not None and (
                self._hashed_lots < self._arriving.stored_lots):
            for data in self._arriving.content(self._hashed_lots):
                self._hash[0].update(data)
            self._hashed_lots += 1

    def _need_right(self) -> None:
        """Make sure that this is the image that Glance means.

        :raises WrongImage: if it is not
        """
        with self._changed:
            # Later clients cannot have it judged by what they expect.
            self._judged = True
        if self.whole is None:
            self._hash_on()
        if self._hash is not None:
            hasher, value = self._hash
            if hasher.hexdigest() != value:
                raise self._wrong(
                    self._judge, f'what came has the {hasher.name} '
                    f"{hasher.hexdigest()}, and {value} by Glance's record")
            self._transaction.set_hash(hasher.name, hasher.digest())

    # -- the end ----------------------------------------------------------

    def _commit(self) -> None:
        self._become(self._transaction.commit_open())
        if self._arriving is not None:
            self._arriving.forget_recent()
        LOG.info('%s is here: %d bytes, %d received for it', self, self.size,
                 self.peer.received)

    def _become(self, image: openimages.Image) -> None:
        self._arrivals.tell_arrived(self.image_id, self._judge)
        with self._changed:
            self._present = readings.Present(image)

    def _use_other(self, error: exceptions.ImageExists) -> None:
        """Another upload of this id was committed first."""
        try:
            image = self._repository.open_image(self.image_id)
        except exceptions.RepositoryError as e:
            self._fail(e)
            return
        # Nobody has hashed the other upload.
        if image.size != self.size or self.expected is not None:
            image.close()
            self._fail(error)
            return
        self._become(image)

    def _fail(self, error: Exception) -> None:
        # Whatever is wrong, the blocks that came are good.
        with contextlib.suppress(exceptions.RepositoryError):
            self._transaction.keep()
        kind = (WrongImage if isinstance(error, WrongImage)
                else readings.ArrivalFailed)
        self.failure = kind(f'{self} does not arrive: {error}')
        self._arrivals.note_failure(self.failure, error)

    def abandon(self, error: Exception) -> None:
        """End an arrival that cannot begin."""
        self.failure = error
        if not isinstance(error, exceptions.ImageExists):
            self._arrivals.note_failure(error, error)
        self._end()

    def _end(self) -> None:
        """Wake all who wait, and stop threads that nobody needs any more."""
        if self._arriving is not None:
            self._arriving.end()
            if self.failure is not None:
                self._description.give_up(self.failure)
        if self.failure is not None and self.peer is not None:
            self.peer.interrupt()
        for future in self._threads:
            future.cancel()
        futures.wait(self._threads, _WAIT)
        self._arrivals.remove(self)
        with self._changed:
            self._ended = True
        self._tell()
        self._release()

    def cut_off(self) -> None:
        """Make the pull fail, from any thread."""
        self._cut = True
        if self.peer is not None:
            self.peer.interrupt()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
            callbacks = [reading.callback for reading in self._readings]
        for callback in callbacks:
            if callback is not None:
                callback()

    def _release(self) -> None:
        """Release everything, once the arrival ended and nobody reads."""
        with self._changed:
            if not self._ended or self._readings or self._at_work:
                return
            present, self._present = self._present, None
        # Idempotent, in case two threads come here.
        self._holding.close()
        if present is not None:
            present.close()

    # -- reading ----------------------------------------------------------

    @property
    def here(self) -> bool:
        """Whether the image is committed."""
        return self._present is not None

    def enter(self, reading: '_Reading') -> None:
        with self._changed:
            self._readings.add(reading)

    def leave(self, reading: '_Reading') -> None:
        with self._changed:
            self._readings.discard(reading)
        self._release()

    def wait_begun(self) -> None:
        """:raises Exception: if the arrival did not begin"""
        with self._changed:
            self._changed.wait_for(lambda: self.begun or self.failure)
        if not self.begun:
            raise self.failure

    def _need_hope(self) -> None:
        if isinstance(self.failure, WrongImage):
            raise WrongImage(str(self.failure))
        if self.failure is not None:
            raise readings.ArrivalFailed(str(self.failure))

    def _last(self, held_back: bool) -> int:
        """The offset behind which readers get nothing before all is right."""
        return max(0, self.size - LAST_BYTES) if held_back else self.size

    def available(self, offset: int, held_back: bool) -> int:
        with self._changed:
            if self._present is not None:
                return max(0, self.size - offset)
            stored = min(self._arriving.stored, self._last(held_back))
            if stored <= offset < self.size:
                self._need_hope()
            return max(0, stored - offset)

    def extents(self, offset: int, length: int) -> list[tuple[int, bool]]:
        with self._working() as present:
            if present is not None:
                return present.extents(offset, length)
        return [(min(length, self.size - offset), False)]

    @contextlib.contextmanager
    def _working(self) -> Iterator[readings.Present | None]:
        """Prevent the release of anything meanwhile."""
        with self._changed:
            self._at_work += 1
            present = self._present
        try:
            yield present
        finally:
            with self._changed:
                self._at_work -= 1
            self._release()

    def readinto(self, view: memoryview, offset: int, held_back: bool) -> int:
        wanted = max(0, min(len(view), self.size - offset))
        done = 0
        while done < wanted:
            with self._working() as present:
                if present is not None:
                    done += present.readinto(view[done:wanted], offset + done)
                else:
                    done += self._read(view[done:wanted], offset + done,
                                       held_back)
        return wanted

    def _read(self, view: memoryview, offset: int, held_back: bool) -> int:
        """Read a part before the image is here; 0: something changed."""
        last = self._last(held_back)
        if offset >= last:
            with self._changed:
                if self._present is None:
                    self._need_hope()
                    self._changed.wait(_WAIT)
            return 0
        try:
            return self._arriving.read(view[:last - offset], offset)
        except partial_image.NoMore:
            with self._changed:
                self._need_hope()
            return 0
        except (daemon_module.ClientError, assembler.BadBlock, OSError) as e:
            if self._present is not None:
                return 0
            raise readings.ArrivalFailed(f'{self}: {e}') from e

    # -- what is told -----------------------------------------------------

    def status(self) -> dict[str, Any]:
        with self._changed:
            return {'id': self.image_id, 'size': self.size,
                    'done': self._done, 'readers': len(self._readings),
                    'received_bytes': self.received}

    @property
    def _done(self) -> int:
        if self._present is not None:
            return self.size
        return 0 if self._arriving is None else self._arriving.stored

    @property
    def received(self) -> int:
        return 0 if self.peer is None else self.peer.received

    @property
    def found(self) -> int:
        """Bytes of blocks that were here."""
        return 0 if self._arriving is None else self._arriving.found_bytes

    def coming(self) -> int:
        """About how many bytes are still to be stored."""
        with self._changed:
            left = min(self._data_bytes, self.size - self._done)
            wanted = 1 if self._arriving is None else (
                self._arriving.wanted_bytes)
            return left * wanted // (self.found + wanted) if (
                self.found + wanted) else left


class _Reading:
    """A Reading of an arriving image."""

    def __init__(self, arrival: _Arrival, held_back: bool) -> None:
        self._arrival = arrival
        self._held_back = held_back
        self.callback: Callable[[], None] | None = None
        arrival.enter(self)

    @property
    def size(self) -> int:
        return self._arrival.size

    @property
    def upload_id(self) -> str:
        return self._arrival.upload_id

    @property
    def here(self) -> bool:
        return self._arrival.here

    def available(self, offset: int) -> int:
        return self._arrival.available(offset, self._held_back)

    def readinto(self, view: memoryview, offset: int) -> int:
        return self._arrival.readinto(view, offset, self._held_back)

    def extents(self, offset: int, length: int) -> list[tuple[int, bool]]:
        return self._arrival.extents(offset, length)

    def on_more(self, callback: Callable[[], None] | None) -> None:
        self.callback = callback
        if callback is not None:
            # Else the reader would miss bytes that came between two calls.
            callback()

    def close(self) -> None:
        self.callback = None
        self._arrival.leave(self)


# -- all of them --------------------------------------------------------------

class Arrivals:
    """All images that arrive from one peer. Thread-safe.

    :param connect: makes a client of the peer that shows a token; None: none
    :param on_begin: called when a pull begins, with the image's id and the
        bytes that may come
    :param on_arrived: called when an image is here, with its id and the facts
        that it was compared with
    :param on_wrong: called with an image's id, what Glance says of it, and
        why the peer's image is another one
    """

    def __init__(self, repository: repository_module.Repository,
                 connect: Callable[[str | None], daemon_module.Client], *,
                 on_begin: Callable[[str, int], None] = (
                     lambda image_id, size: None),
                 on_arrived: Callable[[str, Expected | None], None] = (
                     lambda image_id, expected: None),
                 on_wrong: Callable[[str, Expected, str], None] = (
                     lambda image_id, expected, why: None)) -> None:
        self.repository = repository
        self._connect = connect
        self._on_begin = on_begin
        self._on_arrived = on_arrived
        self._on_wrong = on_wrong
        # A pull and the filling of its description; lots.
        self.workers = workers_module.Workers('dedupd-arrival', 2 * PULLS)
        self.fetchers = workers_module.Workers('dedupd-fetch', PULLS * LOTS)
        self._places = threading.Semaphore(PULLS)
        self._lock = threading.Lock()
        self._arrivals: dict[str, _Arrival] = {}
        self._pulls: set[futures.Future] = set()
        self._stopping = False
        self._away = 0.0, ''
        self._begun = self._failures = 0
        self._received = self._found = 0
        self._last_failure: dict[str, Any] | None = None

    def open(self, image_id: str, expected: Expected | None,
             token: str | None, *, held_back: bool = True) -> readings.Reading:
        """Open an image that is here or arrives, or else begin to pull it.

        This may take as long as the peer takes to answer.

        :param held_back: readers get the last piece only after the whole
            image has come and is what was expected
        :raises ArrivalFailed, ClientError, RepositoryError: if the image
            cannot be read
        """
        while True:
            present = self._open_present(image_id, expected)
            if present is not None:
                return present
            with self._lock:
                arrival = self._arrivals.get(image_id)
                mine = arrival is None
                if arrival is None:
                    self._need_near(image_id)
                    arrival = _Arrival(self, image_id, expected)
                    self._arrivals[image_id] = arrival
                reading = _Reading(arrival, held_back)
            try:
                if mine:
                    self._begin(arrival, token)
                else:
                    arrival.wait_begun()
                    arrival.join(expected, token)
                self._need_blocks(arrival)
                return reading
            except exceptions.ImageExists:
                reading.close()         # somebody was faster
            except daemon_module.Refused:
                reading.close()
                if mine:
                    raise
                # The peer refused another client's token; this one may do.
            except BaseException:
                reading.close()
                raise

    def _open_present(self, image_id: str, expected: Expected | None
                      ) -> readings.Present | None:
        try:
            image = self.repository.open_image(image_id)
        except exceptions.ImageNotFound:
            return None
        if expected is not None and expected.size != image.size:
            size = image.size
            image.close()
            raise readings.ArrivalFailed(
                f'image {image_id} has {size} bytes here, and '
                f"{expected.size} by Glance's record")
        return readings.Present(image)

    def _need_near(self, image_id: str) -> None:
        if self._stopping:
            raise readings.ArrivalFailed(
                f'image {image_id}: the daemon is stopping')
        until, why = self._away
        left = until - time.monotonic()
        if left > 0:
            raise readings.ArrivalFailed(
                f'image {image_id}: {why}; it is asked again in {left:.0f} '
                'seconds')

    def _need_blocks(self, arrival: _Arrival) -> None:
        if arrival.whole is not None:
            raise readings.ArrivalFailed(
                f'{arrival} cannot be read before all of it is here, since '
                f'{arrival.whole}; make this repository with the same '
                'parameters')

    def _begin(self, arrival: _Arrival, token: str | None) -> None:
        placed = self._places.acquire(timeout=BUSY_SECONDS)
        try:
            if not placed:
                raise readings.ArrivalFailed(
                    f'image {arrival.image_id}: {PULLS} others are on their '
                    'way')
            arrival.begin(self._connect, token)
            self._on_begin(arrival.image_id, arrival.coming())
        except BaseException as e:
            arrival.abandon(
                e if isinstance(e, Exception) else readings.ArrivalFailed(
                    f'image {arrival.image_id}: interrupted'))
            if placed:
                self._places.release()
            raise
        with self._lock:
            self._begun += 1
            pull = self.workers.submit(self._run, arrival)
            self._pulls.add(pull)
            pull.add_done_callback(self._pulls.discard)
        arrival.set_begun()

    def _run(self, arrival: _Arrival) -> None:
        try:
            if self._stopping:
                arrival.cut_off()
            arrival.run()
        finally:
            self._places.release()

    # -- told by those under way ------------------------------------------

    def tell_arrived(self, image_id: str, expected: Expected | None) -> None:
        try:
            self._on_arrived(image_id, expected)
        except Exception:
            LOG.exception('Image %s is here, but not noted as such', image_id)

    def tell_wrong(self, image_id: str, expected: Expected, why: str) -> None:
        try:
            self._on_wrong(image_id, expected, why)
        except Exception:
            LOG.exception('Image %s is wrong, but not noted as such', image_id)

    def note_failure(self, failure: Exception, error: Exception) -> None:
        """:param error: the cause of the failure"""
        if not isinstance(failure, WrongImage):     # which was told before
            LOG.warning('%s', failure)
        with self._lock:
            self._failures += 1
            self._last_failure = {'time': int(time.time()),
                                  'message': str(failure)}
            if isinstance(error, daemon_module.DaemonUnavailable) and (
                    not self._stopping):
                self._away = (time.monotonic() + AWAY_SECONDS,
                              f'{error}, {time.strftime("%H:%M:%S")}')

    def remove(self, arrival: _Arrival) -> None:
        with self._lock:
            if self._arrivals.get(arrival.image_id) is arrival:
                del self._arrivals[arrival.image_id]
                self._received += arrival.received
                self._found += arrival.found

    # -- for operators, and the end ---------------------------------------

    def coming(self) -> int:
        """About how many bytes all arriving images will still take."""
        with self._lock:
            arrivals = list(self._arrivals.values())
        return sum(arrival.coming() for arrival in arrivals)

    def status(self) -> dict[str, Any]:
        """The arriving images, and the sums of former ones."""
        with self._lock:
            arrivals = list(self._arrivals.values())
            return {
                'images': [arrival.status() for arrival in arrivals],
                'pulls': self._begun, 'failures': self._failures,
                'last_failure': self._last_failure,
                'received_bytes': self._received + sum(
                    arrival.received for arrival in arrivals),
                'found_bytes': self._found + sum(
                    arrival.found for arrival in arrivals)}

    def stop(self, seconds: float) -> None:
        """End all pulls, within so many seconds; keep the blocks that came."""
        with self._lock:
            self._stopping = True
            arrivals = list(self._arrivals.values())
            pulls = list(self._pulls)
        for arrival in arrivals:
            arrival.cut_off()
        futures.wait(pulls, seconds)
