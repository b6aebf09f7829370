# SPDX-License-Identifier: Apache-2.0

"""All images that arrive from one peer, and what may arrive.

Each image that is missing here has one arrival (``arriving_image.py``),
however many clients want it. A few images arrive at once; others wait. A peer
that did not answer gets no request for a while.
"""

from collections.abc import Callable
from concurrent import futures
import contextlib
import logging
import threading
import time
from typing import Any

from dedupd.compute.cache import arriving_image
from dedupd.compute.cache import neighbour_caches
from dedupd.http import limited
from dedupd.serve import image_source
from glance_dedup.base import exceptions
from glance_dedup.base import thread_pool
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.repository import image_repository
from glance_dedup.transfer import pull

LOG = logging.getLogger(__name__)
_STRANGERS = limited.Log(LOG)

#: The most images that arrive at once. Others wait for so many seconds.
PULLS = 4
BUSY_SECONDS = 5.0
#: Seconds without requests to a peer that did not answer.
AWAY_SECONDS = 30.0


class Arrivals:
    """All images that arrive from one peer. Thread-safe.

    :param connect: makes a client of the peer that shows a token; None: none
    :param neighbours: get requests before the peer does; None: there are none
    :param on_begin: called when a pull begins, with the image's id and the
        bytes that may come
    :param on_arrived: called when an image is here, with its id and the facts
        that it was compared with
    :param on_wrong: called with an image's id, Glance's facts of it, and
        why the peer's image is another one
    """

    def __init__(self, repository: image_repository.Repository,
                 connect: Callable[[str | None], daemon_client.Client], *,
                 neighbours: neighbour_caches.Neighbours | None = None,
                 on_begin: Callable[[str, int], None] = (
                     lambda image_id, size: None),
                 on_arrived: Callable[
                     [str, arriving_image.Expected | None], None] = (
                         lambda image_id, expected: None),
                 on_wrong: Callable[
                     [str, arriving_image.Expected, str], None] = (
                         lambda image_id, expected, why: None)) -> None:
        self._repository = repository
        self._connect = connect
        self._neighbours = neighbours
        self._on_begin = on_begin
        self._on_arrived = on_arrived
        self._on_wrong = on_wrong
        self._workers = thread_pool.Workers('dedupd-arrival', PULLS)
        # Each image's lots, and its description.
        self._fetchers = thread_pool.Workers('dedupd-fetch',
                                             PULLS * (pull.LOTS + 1))
        self._places = threading.Semaphore(PULLS)
        self._lock = threading.Lock()
        # By the image's id. Arrivals that have not begun have no result yet.
        self._arrivals: dict[str, futures.Future[arriving_image.Arrival]] = {}
        self._pulls: set[futures.Future] = set()
        self._stopping = False
        self._away = 0.0, ''
        self._begun = self._failures = 0
        self._received = self._found = 0
        self._last_failure: dict[str, Any] | None = None

    def open(self, image_id: str, expected: arriving_image.Expected | None,
             token: str | None, *,
             held_back: bool = True) -> image_source.Reading:
        """Open an image that is here or arrives, or else begin to pull it.

        This may take as long as the peer takes to answer.

        :param held_back: readers get the last piece only after the whole
            image has come and is the expected one
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
                    self._require_near(image_id)
                    arrival = self._arrivals[image_id] = futures.Future()
            try:
                if mine:
                    self._begin(arrival, image_id, expected, token)
                return arrival.result().open(expected, token, held_back)
            except (exceptions.ImageExists, arriving_image.Over):
                pass                    # another thread was faster
            except client_errors.Refused:
                if mine:
                    raise
                # The peer refused another client's token; this one may do.

    def _open_present(self, image_id: str,
                      expected: arriving_image.Expected | None
                      ) -> image_source.Present | None:
        try:
            image = self._repository.open_image(image_id)
        except exceptions.ImageNotFound:
            return None
        if expected is not None and expected.size != image.size:
            size = image.size
            image.close()
            raise image_source.ArrivalFailed(
                f'image {image_id} has {size} bytes here, and '
                f"{expected.size} by Glance's record")
        return image_source.Present(image)

    def _require_near(self, image_id: str) -> None:
        if self._stopping:
            raise image_source.ArrivalFailed(
                f'image {image_id}: the daemon is stopping')
        until, why = self._away
        left = until - time.monotonic()
        if left > 0:
            raise image_source.ArrivalFailed(
                f'image {image_id}: {why}; it gets requests again in '
                f'{left:.0f} seconds')

    def _begin(self, begun: futures.Future, image_id: str,
               expected: arriving_image.Expected | None,
               token: str | None) -> None:
        """Begin to pull an image, and wake the threads that wait for that.

        :param begun: gets the arrival, or the reason why there is none
        """
        try:
            with contextlib.ExitStack() as stack:
                if not self._places.acquire(timeout=BUSY_SECONDS):
                    raise image_source.ArrivalFailed(
                        f'image {image_id}: {PULLS} others are on their way')
                stack.callback(self._places.release)
                arrival = arriving_image.Arrival(
                    self, self._repository, image_id, expected, self._connect,
                    token, self._fetchers, self._neighbours)
                stack.callback(arrival.close)
                self._on_begin(image_id, arrival.coming())
                with self._lock:
                    running = self._workers.submit(self._run, arrival)
                    self._begun += 1
                    self._pulls.add(running)
                    begun.set_result(arrival)
                running.add_done_callback(self._pulls.discard)
                stack.pop_all()
        except BaseException as e:
            with self._lock:
                del self._arrivals[image_id]
            error = e if isinstance(e, Exception) else (
                image_source.ArrivalFailed(f'image {image_id}: interrupted'))
            if not isinstance(e, exceptions.ImageExists):
                self._note_failure(error, error)
            begun.set_exception(error)
            raise

    def _run(self, arrival: arriving_image.Arrival) -> None:
        try:
            if self._stopping:
                arrival.cut_off()
            arrival.run()
        finally:
            self._places.release()

    # -- called by arrivals -----------------------------------------------

    def arrived(self, image_id: str, expected: arriving_image.Expected | None
                ) -> None:
        """See arriving_image.Owner."""
        try:
            self._on_arrived(image_id, expected)
        except Exception:
            LOG.exception('Image %s is here, but not noted as such', image_id)

    def is_wrong(self, image_id: str, expected: arriving_image.Expected,
                 why: str) -> None:
        """See arriving_image.Owner."""
        try:
            self._on_wrong(image_id, expected, why)
        except Exception:
            LOG.exception('Image %s is wrong, but not noted as such', image_id)

    def ended(self, arrival: arriving_image.Arrival, cause: Exception | None
              ) -> None:
        """See arriving_image.Owner."""
        if cause is not None and arrival.failure is not None:
            self._note_failure(arrival.failure, cause)
        with self._lock:
            del self._arrivals[arrival.image_id]
            self._received += arrival.received
            self._found += arrival.found

    def _note_failure(self, failure: Exception, cause: Exception) -> None:
        # on_wrong was called for a wrong image.
        if not isinstance(failure, arriving_image.WrongImage):
            _STRANGERS.warning('%s', failure)
        with self._lock:
            self._failures += 1
            self._last_failure = {'time': int(time.time()),
                                  'message': str(failure)}
            if isinstance(cause, client_errors.DaemonUnavailable) and (
                    not self._stopping):
                self._away = (time.monotonic() + AWAY_SECONDS,
                              f'{cause}, {time.strftime("%H:%M:%S")}')

    # -- for operators, and the end ---------------------------------------

    def _all(self) -> list[arriving_image.Arrival]:
        """Arrivals that have begun. REQUIRES: the caller holds `_lock`."""
        return [arrival.result() for arrival in self._arrivals.values()
                if arrival.done()]

    def under_way(self, image_id: str) -> arriving_image.Arrival | None:
        """The arrival of an image that has begun; None: there is none."""
        with self._lock:
            arrival = self._arrivals.get(image_id)
            if arrival is None or not arrival.done() or arrival.exception():
                return None
            return arrival.result()

    def coming(self) -> int:
        """Estimate the bytes that all arriving images will still take."""
        with self._lock:
            arrivals = self._all()
        return sum(arrival.coming() for arrival in arrivals)

    def status(self) -> dict[str, Any]:
        """The arriving images, and the sums of former ones."""
        with self._lock:
            arrivals = self._all()
            return {
                'images': [arrival.status() for arrival in arrivals],
                'pulls': self._begun, 'failures': self._failures,
                'last_failure': self._last_failure,
                'received_bytes': self._received + sum(
                    arrival.received for arrival in arrivals),
                'found_bytes': self._found + sum(
                    arrival.found for arrival in arrivals)}

    def stop(self, seconds: float) -> None:
        """End all pulls, within so many seconds; keep the received blocks."""
        with self._lock:
            self._stopping = True
            arrivals = self._all()
            pulls = list(self._pulls)
        for arrival in arrivals:
            arrival.cut_off()
        futures.wait(pulls, seconds)
