# SPDX-License-Identifier: Apache-2.0

"""A client of the daemon's NBD server, which reads an image for a mount.

It reads one image, on one connection, one request at a time. The daemon keeps
the image as long as the connection lasts, even if the image is deleted. When
the daemon restarts, the client connects again, and goes on only if the image
is still of the same upload.
"""

import threading
import time

from glance_dedup.client import client_errors
from glance_dedup.client import nbd_protocol
from glance_dedup.client import nbd_reader

#: Seconds in which a daemon that went away must be back.
RETURN_SECONDS = 30.0
_PAUSE = 0.25


class Export:
    """An image that can be read through the daemon. Thread-safe.

    :param path: the path of the daemon's NBD socket
    :param upload_id: the upload of which the image must be; None: of any
    :param return_seconds: in which a daemon that went away must be back; None:
        RETURN_SECONDS
    :raises ClientError: as :class:`nbd_reader.NbdReader`; Refused 404: also
        if the image is not of this upload
    """

    def __init__(self, path: str, image_id: str,
                 upload_id: str | None,
                 return_seconds: float | None = None) -> None:
        self._path = path
        self._image_id = image_id
        self._upload_id = upload_id
        self._return_seconds = (
            RETURN_SECONDS if return_seconds is None else return_seconds)
        self._lock = threading.Lock()
        self._closed = False
        self._reader: nbd_reader.NbdReader | None = self._connect()
        self.size = self._reader.size

    def read(self, length: int, offset: int) -> bytes:
        """Read `length` bytes; fewer only at the image's end.

        :raises: as the class
        """
        data = bytearray(min(length, max(0, self.size - offset)))
        until = time.monotonic() + self._return_seconds
        with self._lock:
            while data:
                try:
                    self._readinto(data, offset)
                    break
                except client_errors.DaemonUnavailable:
                    self._hang_up()
                    if self._closed or time.monotonic() > until:
                        raise
                time.sleep(_PAUSE)
        return bytes(data)

    def _readinto(self, data: bytearray, offset: int) -> None:
        if self._closed:
            raise client_errors.DaemonUnavailable(
                f'{self._path}: this connection was closed')
        if self._reader is None:
            self._reader = self._connect()
        try:
            self._reader.readinto(data, offset)
        except client_errors.Refused as e:
            raise client_errors.Refused(
                e.code, f'image {self._image_id} cannot be read: {e}') from e

    def close(self) -> None:
        """Close the connection; the daemon drops the image. Idempotent."""
        self._closed = True
        with self._lock:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _connect(self) -> nbd_reader.NbdReader:
        reader = nbd_reader.NbdReader(self._path, self._image_id)
        if self._upload_id is not None and (
                reader.description != nbd_protocol.describe(self._upload_id)):
            reader.close()
            raise client_errors.Refused(
                404, f'image {self._image_id} is not the one that it was')
        return reader
