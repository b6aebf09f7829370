# SPDX-License-Identifier: Apache-2.0

"""Neighbours: a rack's caches, which get requests before the storing host.

For each lot of an arriving image, all hosts compute the same order of the
rack's caches. The first of them is the lot's *home*: it fetches from the
storing host, and the others from it. A neighbour that has stored the lot comes
before the home. So the storing host sends a new image about once, however many
hosts want it.

The description of the image always comes from the storing host. Each block is
verified by its fingerprint from there before any use. So a neighbour can do no
more harm than to be slow. One that failed, was slow, or sent a wrong block is
put aside for a while, and the blocks that it did not bring come from the next
one, or from the storing host.
"""

from collections.abc import Callable
from concurrent import futures
import dataclasses
import hashlib
import logging
import threading
import time
from typing import Any

from glance_dedup.base import thread_pool
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import wire
from glance_dedup.transfer import image_assembly

LOG = logging.getLogger(__name__)

#: The most neighbours of a host.
MAX_COUNT = 100
#: The most neighbours that get a request for a lot before the storing host.
MAX_REQUESTS = 2
#: Seconds without requests to a neighbour that failed.
ASIDE_SECONDS = 60.0
#: Seconds without requests to a neighbour for an image that it lacks.
MISSING_SECONDS = 5.0
#: A neighbour has failed if nothing comes from it for so many seconds.
SILENT_SECONDS = 6.0
#: A lot comes from the storing host if neighbours have not brought it after
#: so many seconds. A reader gives up later (``image_handlers.STALLED``).
LOT_SECONDS = 12.0
#: Seconds until a connection is made.
CONNECT_SECONDS = 2.0
#: Seconds that a pull waits for the neighbours' responses at its beginning.
GREETING_SECONDS = 2.0

# Threads that greet neighbours.
_GREETERS = 16
# The neighbour does not give us this image; it may give us others.
_NOT_THIS = (400, 401, 403, 404, 416)

Take = Callable[[image_assembly.Lot, wire.Frame], None]


@dataclasses.dataclass
class Host:
    """A host of the rack. `Neighbours` has the lock for its fields.

    :ivar repository_id: of its cache; '': not known yet
    :ivar is_here: whether it is this host itself
    :ivar received: bytes of its answers, as they came on the wire
    :ivar failures: number of times that it was put aside
    :ivar why: the reason why it was put aside last
    :ivar until: time of the next request to it, by the monotonic clock
    """

    address: str
    repository_id: str = ''
    is_here: bool = False
    received: int = 0
    failures: int = 0
    why: str = ''
    until: float = 0.0

    @property
    def is_aside(self) -> bool:
        """Return whether it must get no request now."""
        return self.until > time.monotonic()


class Neighbours:
    """The rack, as this host knows it. Thread-safe.

    :param addresses: of the caches; this host's own may be one of them
    :param connect: makes a client for an address that shows a token; None:
        none
    :param repository_id: of this host's cache
    """

    def __init__(self, addresses: list[str],
                 connect: Callable[[str, str | None], daemon_client.Client],
                 repository_id: str) -> None:
        self.hosts = [Host(address) for address in dict.fromkeys(addresses)]
        self.connect = connect
        self.repository_id = repository_id
        self.workers = thread_pool.Workers('dedupd-greet', _GREETERS)
        self._lock = threading.Lock()

    def asking(self, image_id: str, token: Callable[[], str | None]
               ) -> 'Asking | None':
        """Return an Asking for an arriving image; None: no neighbours.

        :param token: the token that opens the image now
        """
        return Asking(self, image_id, token) if self.hosts else None

    def met(self, host: Host, repository_id: str) -> None:
        """Note the repository of which a host has sent an answer."""
        with self._lock:
            host.repository_id = repository_id
            host.is_here = repository_id == self.repository_id

    def count(self, host: Host, received: int) -> None:
        """Count bytes of a host's answers."""
        with self._lock:
            host.received += received

    def put_aside(self, host: Host, why: str) -> None:
        """Send no request to a host for a while, for any image."""
        with self._lock:
            is_new = not host.is_aside
            host.until = time.monotonic() + ASIDE_SECONDS
            host.failures += 1
            host.why = why
        if is_new:
            LOG.warning('Neighbour %s gets no requests for %d seconds: %s',
                        host.address, ASIDE_SECONDS, why)

    def status(self) -> dict[str, Any]:
        """The figures, for operators."""
        with self._lock:
            hosts: list[dict[str, Any]] = [
                {'address': host.address, 'is_here': host.is_here,
                 'received_bytes': host.received, 'failures': host.failures,
                 'last_failure': host.why, 'aside': host.is_aside}
                for host in self.hosts]
        return {'hosts': hosts,
                'aside': sum(host['aside'] for host in hosts),
                **{name: sum(host[name] for host in hosts)
                   for name in ('received_bytes', 'failures')}}


class Asking:
    """Requests blocks of one arriving image from neighbours. Thread-safe."""

    def __init__(self, rack: Neighbours, image_id: str,
                 token: Callable[[], str | None]) -> None:
        self._rack = rack
        self._image_id = image_id
        self._token = token
        self._lock = threading.Lock()
        # By address: the client; the number of its counted bytes.
        self._clients: dict[str, daemon_client.Client] = {}
        self._counted: dict[str, int] = {}
        # By address: the offset before which it has everything; the time
        # before which it gets no request.
        self._stored: dict[str, int] = {}
        self._missing: dict[str, float] = {}
        # By the repository's id: time of a neighbour's last request for this
        # image.
        self._heard: dict[str, float] = {}
        self._greetings: list[futures.Future] = []
        self._greeted_by = 0.0
        self._over = False

    # -- choice of neighbours ---------------------------------------------

    def greet(self) -> None:
        """Request from all neighbours the list of blocks they have.

        So they learn that the image arrives here.

        REQUIRES: neighbours can already find the arriving image here.
        """
        self._greeted_by = time.monotonic() + GREETING_SECONDS
        nothing = image_assembly.Lot(0, 0, [])
        self._greetings = [
            self._rack.workers.submit(self._ask, host, nothing, None,
                                      self._greeted_by)
            for host in self._rack.hosts
            if not host.is_here and not host.is_aside]

    def heard(self, repository_id: str) -> None:
        """Note that the image arrives at a neighbour, too."""
        with self._lock:
            if repository_id in self._heard or len(self._heard) < MAX_COUNT:
                self._heard[repository_id] = time.monotonic()
            for host in self._rack.hosts:
                if host.repository_id == repository_id:
                    self._missing.pop(host.address, None)

    def choose(self, home: int, end: int) -> list[Host]:
        """The neighbours of which to request a lot; none if we are its home.

        :param home: the offset by which they are chosen
        :param end: the offset behind the lot
        """
        now = time.monotonic()
        with self._lock:
            hosts = sorted((
                host for host in self._rack.hosts if not host.is_aside
                and self._missing.get(host.address, 0.0) <= now),
                key=lambda host: self._rank(host, home))
            chosen = [host for host in hosts if not host.is_here
                      and self._stored.get(host.address, -1) >= end]
        if not chosen:
            for host in hosts:
                if host.is_here:
                    break
                chosen.append(host)
        return chosen[:MAX_REQUESTS]

    def _rank(self, host: Host, home: int) -> bytes:
        # A host that goes changes the home of its own lots only.
        return hashlib.sha256(
            f'{self._image_id} {home} {host.address}'.encode()).digest()

    # -- requests ---------------------------------------------------------

    def fetch(self, lot: image_assembly.Lot, home: int, take: Take) -> None:
        """Receive the wanted blocks of a lot that neighbours have. Any thread.

        :param home: as for `choose`
        :param take: verifies a frame and keeps its blocks
        """
        deadline = time.monotonic() + LOT_SECONDS
        futures.wait(self._greetings,
                     max(0.0, self._greeted_by - time.monotonic()))
        for host in self._unless_over(home, lot.end):
            if not lot.wanted or time.monotonic() >= deadline:
                return
            self._ask(host, lot, take, deadline)

    def _unless_over(self, home: int, end: int) -> list[Host]:
        return [] if self._over else self.choose(home, end)

    def _ask(self, host: Host, lot: image_assembly.Lot, take: Take | None,
             deadline: float) -> None:
        """Send a neighbour one request. It is put aside if that fails."""
        began = time.monotonic()
        client = None
        try:
            client = self._client(host)
            with client.lent_blocks(self._image_id,
                                    image_assembly.ranges(lot.wanted),
                                    self._rack.repository_id) as loan:
                self._met(host, loan.repository_id, loan.stored)
                for frame in loan:
                    if take is not None:
                        take(lot, frame)
                    if time.monotonic() > deadline:
                        raise TimeoutError('it is too slow')
            if lot.wanted and loan.stored >= lot.end:
                raise client_errors.BadAnswer(
                    f'it announced that it has the first {loan.stored} bytes '
                    f'of image {self._image_id}, and did not send all of '
                    'them')
        except client_errors.Refused as e:
            self._refused(host, e, began)
        except (client_errors.ClientError, image_assembly.BadBlock, OSError,
                ValueError) as e:
            if not self._over:
                self._rack.put_aside(host, f'image {self._image_id}: {e}')
        finally:
            if client is not None:
                self._count(host, client)

    def _client(self, host: Host) -> daemon_client.Client:
        with self._lock:
            if self._over:
                raise client_errors.DaemonUnavailable(
                    'no request needs it any more')
            client = self._clients.get(host.address)
            if client is None:
                client = self._rack.connect(host.address, self._token())
                self._clients[host.address] = client
                self._counted[host.address] = 0
            return client

    def _count(self, host: Host, client: daemon_client.Client) -> None:
        with self._lock:
            if self._clients.get(host.address) is client:
                received = client.received
                self._rack.count(host, received - self._counted[host.address])
                self._counted[host.address] = received

    def _met(self, host: Host, repository_id: str, stored: int) -> None:
        self._rack.met(host, repository_id)
        with self._lock:
            self._stored[host.address] = stored

    def _refused(self, host: Host, refusal: client_errors.Refused, began: float
                 ) -> None:
        if refusal.repository_id:
            self._rack.met(host, refusal.repository_id)
        if host.is_here or refusal.code == 503:
            return                      # we are no neighbour; it is busy
        if refusal.code not in _NOT_THIS:
            self._rack.put_aside(host, str(refusal))
            return
        with self._lock:
            self._stored.pop(host.address, None)
            # It may have requested the image from us after it refused.
            if self._heard.get(refusal.repository_id, 0.0) < began:
                self._missing[host.address] = (
                    time.monotonic() + MISSING_SECONDS)
            if refusal.code == 401:
                # Next time with the token that opens the image then.
                self._clients.pop(host.address, None)

    # -- the end ----------------------------------------------------------

    def interrupt(self) -> None:
        """Break off all requests under way in other threads, and make none."""
        with self._lock:
            self._over = True
            clients = list(self._clients.values())
        for client in clients:
            client.interrupt()

    def close(self) -> None:
        """Close the connections. REQUIRES: `interrupt` was called."""
        with self._lock:
            for client in self._clients.values():
                client.close()
