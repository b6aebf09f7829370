# SPDX-License-Identifier: Apache-2.0

"""Checks whether the cache lives.

The cache may be silent for long while it works: it compares the bytes that it
sent with Glance's, or Glance takes an upload. So silence alone does not count.
If nothing has come on a connection for a while, the relay requests
``/healthcheck`` on the daemon's Unix socket. The daemon's event loop answers
that at once. If it does not, the daemon is *hung*: all waits that were silent
end, and requests go to Glance until it answers again.

If no process accepts connections, the kernel ends those of the cache, too. So
a refused connection is no reason to end waits: a daemon that is being stopped
has closed its Unix socket already, and still finishes its responses.
"""

import asyncio
from collections.abc import Iterator
import contextlib
import socket

from oslo_log import log

LOG = log.getLogger(__name__)

#: Seconds between two checks of the waits.
LOOK_SECONDS = 2.0
#: Seconds without a byte after which the relay checks whether the cache lives,
#: #: and seconds for the answer.
QUIET_SECONDS = 5.0
ANSWER_SECONDS = 10.0
#: Seconds without requests to the cache after it could not be reached.
AWAY_SECONDS = 3.0

_QUESTION = (b'GET /healthcheck HTTP/1.1\r\nHost: localhost\r\n'
             b'Connection: close\r\n\r\n')


class Pulse:
    """Knows whether the cache lives. Used in the event loop's thread.

    :param path: the daemon's Unix socket
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._waits: dict[asyncio.Timeout, float] = {}
        self._hung = self._missed = False
        self._away_until = 0.0

    def is_away(self) -> bool:
        """Return whether requests are to go to Glance at once."""
        return self._hung or (
            asyncio.get_running_loop().time() < self._away_until)

    def missed(self, error: Exception) -> None:
        """Note that the cache could not be reached."""
        self._away_until = asyncio.get_running_loop().time() + AWAY_SECONDS
        if not self._missed:
            LOG.warning('The cache is away, and requests go to Glance: %s',
                        error)
        self._missed = True

    def answered(self) -> None:
        """Note that the cache has answered a request."""
        if self._missed:
            LOG.info('The cache answers again.')
        self._missed = False

    @contextlib.contextmanager
    def watch(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Let a wait for the cache end by its timeout if the cache is hung."""
        self._waits[timeout] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._waits[timeout]

    async def run(self) -> None:
        """Check the waits, for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look()
            except OSError as e:
                LOG.warning('Whether dedupd answers is not known: %s', e)

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        quiet = [timeout for timeout, since in self._waits.items()
                 if since + QUIET_SECONDS < now]
        if not quiet and not self._hung:
            return
        hung = await self._is_hung()
        if hung and not self._hung:
            LOG.warning('dedupd does not answer at %s, and requests go to '
                        'Glance.', self._path)
        elif self._hung and not hung:
            LOG.info('dedupd no longer hangs.')
        self._hung = hung
        if hung:
            for timeout in quiet:
                # A wait that still lasts has been silent all the time.
                if timeout in self._waits and not timeout.expired():
                    timeout.reschedule(asyncio.get_running_loop().time())

    async def _is_hung(self) -> bool:
        """Return whether connections are accepted, and not answered."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await loop.sock_connect(sock, self._path)
                    await loop.sock_sendall(sock, _QUESTION)
                    await loop.sock_recv(sock, 1)
            except (FileNotFoundError, ConnectionError, PermissionError):
                return False
            except OSError:
                # No answer in time, or too many before us wait for one.
                return True
        return False
