# SPDX-License-Identifier: Apache-2.0

"""Reading through the daemon of this host, as long as it answers.

Nothing depends on the daemon. After any trouble the driver leaves it alone for
a while. So a missing daemon costs next to nothing, and one that hangs delays
one download by a second now and then.
"""

from collections.abc import Callable
import logging
import os
import time

from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import streams

LOG = logging.getLogger(__name__)

#: Seconds in which the daemon must begin to answer.
ANSWER_SECONDS = 1.0
#: Seconds in which each piece must come.
PIECE_SECONDS = 5.0
#: If a download's client takes nothing for this many seconds, the daemon may
#: cut off the stream; that does not count as trouble.
STILL_SECONDS = 20.0
#: Seconds for which the driver leaves the daemon alone after trouble.
PAUSE_SECONDS = 10.0


class Daemon:
    """State that one process has of the daemon of one repository.

    Thread-safe without a lock, since a fork could leave a lock locked. So two
    threads at once may try, or log, once too often. Every stream has a
    connection of its own, which does not survive a fork.

    :param path: the path of the daemon's Unix socket
    :param repository_id: the repository that the daemon must serve
    """

    def __init__(self, path: str, repository_id: str,
                 clock: Callable[[], float] = time.monotonic):
        self._path = path
        self._client = daemon_client.Client(f'unix:{path}',
                                            connect_timeout=ANSWER_SECONDS,
                                            keep=0)
        self._repository_id = repository_id
        self._clock = clock
        # Whether it answered last time; None: not known yet.
        self._well: bool | None = None
        self._retry_at = 0.0

    def open(self, image_id: str, upload_id: str, size: int, offset: int,
             length: int) -> streams.ImageStream | None:
        """A range of an image; None if the daemon does not give it.

        :param size: bytes of the whole image
        :param offset: the range's first byte
        :param length: bytes of the range
        """
        if self._well is False:
            now = self._clock()
            if now < self._retry_at:
                return None
            # Only this thread tries; the others wait for its result.
            self._retry_at = now + PAUSE_SECONDS
        try:
            stream = self._client.open_image(
                image_id, upload_id=upload_id, offset=offset, length=length,
                repository_id=self._repository_id, timeout=ANSWER_SECONDS)
        except client_errors.ClientError as exc:
            if getattr(exc, 'code', None) != 404:
                self._failed(str(exc))
            # 404: the image was deleted after it was opened.
            return None
        if stream.size != size:
            stream.close()
            self._failed(f'it has {stream.size} bytes of {size}')
            return None
        if self._well is False:
            LOG.info('Images are read through the daemon again')
        self._well = True
        return stream

    def read(self, stream: streams.ImageStream, length: int,
             seconds: float) -> bytes | None:
        """The next `length` bytes of a stream; None if they do not come.

        In that case the stream is closed.

        :param seconds: the time limit; 0: only :data:`PIECE_SECONDS`
        """
        still = time.monotonic() - stream.used
        try:
            return stream.read(
                length, min(PIECE_SECONDS, seconds or PIECE_SECONDS))
        except client_errors.ClientError as exc:
            stream.close()
            if still < STILL_SECONDS:
                self._failed(str(exc))
            return None

    def _failed(self, why: str) -> None:
        self._retry_at = self._clock() + PAUSE_SECONDS
        if self._well is not False:
            # If there never was a daemon, its absence is not worth a line.
            level = (logging.DEBUG if self._well is None
                     and not os.path.lexists(self._path) else logging.WARNING)
            self._well = False
            LOG.log(level, 'Images are read directly, without the daemon: %s',
                    why)
