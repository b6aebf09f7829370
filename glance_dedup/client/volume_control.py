# SPDX-License-Identifier: Apache-2.0

"""Requests to the process that serves a volume, by its control socket.

Only the owner of a volume can change it, so a command on a served volume sends
a request to its server. The head of ``nbdkit/control.h`` has the protocol. The
client bounds its replies, and checks their form.
"""

import dataclasses
import os
import re
import socket
import time

from glance_dedup.base import exceptions
from glance_dedup.base import sockets

# The most bytes of an answer.
_MAX_LENGTH = 64 << 10
_CONNECT_SECONDS = 5.0
# The most characters of a text that is kept.
_TEXT = 1000
_is_number = re.compile('[0-9]{1,19}').fullmatch
#: The kinds of requests whose times a server counts.
OPERATIONS = 'read', 'write', 'flush'
#: The most seconds of a request in each bucket but the last (latency.h).
LATENCY_BOUNDS = tuple(16 * 2 ** i / 1e6 for i in range(20))

_EXCEPTIONS: dict[str, type[exceptions.RepositoryError]] = {
    'io': exceptions.StorageError,
    'corrupt': exceptions.DamagedError,
    'nospace': exceptions.NoSpaceError,
    'notfound': exceptions.ImageNotFound,
    'exists': exceptions.ImageExists,
    'busy': exceptions.BusyError,
    'version': exceptions.VersionError,
    'invalid': exceptions.InvalidParameter,
    'denied': exceptions.AccessDenied,
    'closed': exceptions.ClosedError,
}


class NotServed(exceptions.RepositoryError):
    """No process serves the volume, or it does not answer in time."""


class VolumeControl:
    """The server of one volume. Thread-safe.

    Each call raises :class:`NotServed`, or the exception of the server's
    error.

    :param repository: the repository's path
    :param name: the volume's
    :param timeout: seconds for an answer
    """

    def __init__(self, repository: str, name: str,
                 timeout: float = 3600.0) -> None:
        self._directory = os.path.join(repository, 'volumes', name)
        self._name = name
        self._timeout = timeout

    def status(self) -> dict[str, str]:
        """The volume's size, journal and counters, by name, as text."""
        return self._ask('status')

    def snapshot(self, image_id: str, project: str = '') -> dict[str, str]:
        """Commit an image with the volume's bytes at one moment.

        Returns the image's facts.

        :raises ImageExists: there is an image of this id
        """
        if ' ' in image_id:
            raise exceptions.InvalidParameter(
                f"the image id '{image_id}' holds a space")
        return self._ask(f'snapshot {image_id} {project}')

    def resize(self, size: int) -> None:
        """Change the volume's size, in bytes.

        Clients that are connected see the new size when they connect again.

        :raises BusyError: it would become smaller, and a client is connected
        """
        self._ask(f'resize {size}')

    def disconnect(self) -> int:
        """Disconnect all clients; return their number.

        They get the present size when they connect again. QEMU does so with
        its next request if it has a ``reconnect-delay``.
        """
        numbers, _ = figures(self._ask('disconnect'))
        return numbers.get('clients', 0)

    def checkpoint(self) -> None:
        """Bring all earlier writes into recipes."""
        self._ask('checkpoint')

    def _ask(self, request: str) -> dict[str, str]:
        deadline = time.monotonic() + self._timeout
        if not request.isprintable():
            raise exceptions.InvalidParameter(
                'a request to a volume cannot hold control characters')
        with self._connect() as sock:
            try:
                sock.sendall(request.encode() + b'\n')
                answer = self._receive(sock, deadline)
            except OSError as e:
                raise NotServed(f'the server of the volume {self._name} does '
                                f'not answer: {e}') from e
        return self._parse(answer)

    def _connect(self) -> socket.socket:
        """A connection; the path may be longer than an address."""
        try:
            directory = os.open(
                self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise NotServed(f'there is no volume {self._name}: '
                            f'{self._directory}: {e.strerror}') from e
        try:
            return sockets.connect_unix(
                f'/proc/self/fd/{directory}/control',
                min(_CONNECT_SECONDS, self._timeout))
        except TimeoutError as e:
            raise NotServed(f'the server of the volume {self._name} does not '
                            f'answer: {e}') from e
        except OSError as e:
            raise NotServed(f'no process serves the volume {self._name}: '
                            f'{self._directory}/control: {e.strerror}') from e
        finally:
            os.close(directory)

    def _receive(self, sock: socket.socket, deadline: float) -> bytes:
        answer = b''
        while not answer.endswith(b'\n\n'):
            left = deadline - time.monotonic()
            if left <= 0:
                raise NotServed(
                    f'the server of the volume {self._name} has not answered '
                    f'in {self._timeout:g} seconds')
            sock.settimeout(left)
            piece = sock.recv(_MAX_LENGTH)
            answer += piece
            if not piece or len(answer) > _MAX_LENGTH:
                raise NotServed(f'the answer of the server of the volume '
                                f'{self._name} is incomplete')
        return answer

    def _parse(self, answer: bytes) -> dict[str, str]:
        first, *lines = answer.decode(errors='replace')[:-2].split('\n')
        word, _, rest = first.partition(' ')
        if word == 'error':
            kind, _, text = rest.partition(' ')
            raise _EXCEPTIONS.get(kind, exceptions.StorageError)(text)
        if first != 'ok':
            raise NotServed(f'the server of the volume {self._name} answered '
                            f"'{first[:80]}'")
        return {key: value for key, _, value in (
            line.partition(' ') for line in lines)}


@dataclasses.dataclass(frozen=True)
class Latency:
    """The times of a server's requests of one kind, since it started."""

    seconds: float
    """The sum of all times."""
    counts: tuple[int, ...]
    """The requests in each bucket; the last bucket has no bound."""

    def quantile(self, share: float) -> float | None:
        """The least bound that a share of the requests kept to, in seconds.

        None: there were no requests, or it is longer than the last bound.
        """
        wanted = share * sum(self.counts)
        found = 0
        for bound, count in zip(LATENCY_BOUNDS, self.counts):
            found += count
            if found and found >= wanted:
                return bound
        return None


def latencies(status: dict[str, str]) -> dict[str, Latency]:
    """The times in a server's status, by the kind of request.

    A kind is left out if its line is missing or has another form.
    """
    found = {}
    for operation in OPERATIONS:
        words = status.get(f'{operation}_latency', '').split(' ')
        if len(words) == len(LATENCY_BOUNDS) + 2 and all(
                map(_is_number, words)):
            nanoseconds, *counts = map(int, words)
            found[operation] = Latency(nanoseconds / 1e9, tuple(counts))
    return found


def figures(status: dict[str, str]) -> tuple[dict[str, int], str]:
    """The numbers of a server's status, and why its volume takes no writes.

    :returns: the values that are numbers of at most 19 digits; and a text of
        at most 1000 characters, '' if the volume takes writes
    """
    return ({key: int(value) for key, value in status.items()
             if _is_number(value)}, status.get('broken', '')[:_TEXT])
