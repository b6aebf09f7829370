# SPDX-License-Identifier: Apache-2.0

"""Readings: images to read, either present or still arriving."""

from collections.abc import Callable
from typing import Protocol

from glance_dedup.base import exceptions
from glance_dedup.repository import openimages

# The most extents of an image that one request examines and returns.
_MAX_EXTENTS = 16384


class ArrivalFailed(Exception):
    """An image does not come; the message has its id, source and cause."""


class Reading(Protocol):
    """An image that is read. Thread-safe."""

    @property
    def size(self) -> int:
        """Bytes of the image."""

    @property
    def upload_id(self) -> str:
        """The id of the upload that wrote the image."""

    @property
    def here(self) -> bool:
        """Return whether the whole image is here, and is the expected one."""

    def available(self, offset: int) -> int:
        """Bytes from an offset on that `readinto` gives without waiting.

        :raises ArrivalFailed: if there are none, and no more will come
        """

    def readinto(self, view: memoryview, offset: int) -> int:
        """Fill a buffer, unless the image ends before; return the bytes read.

        This fetches missing bytes at once.

        :raises ArrivalFailed: if they will not come
        :raises RepositoryError: if they cannot be read here
        """

    def extents(self, offset: int, length: int) -> list[tuple[int, bool]]:
        """Successive extents: (length, whether it is known to be zeros).

        There is at least one. Together they may be shorter than the request.
        A part that is not known yet does not count as zeros.
        """

    def on_more(self, callback: Callable[[], None] | None) -> None:
        """Set the callback for when more is available, or the arrival failed.

        It is called in any thread. It replaces the one before; None removes
        that.
        """

    def close(self) -> None:
        """Release the image. Idempotent."""


class Present:
    """A Reading of an image that is completely here."""

    here = True

    def __init__(self, image: openimages.Image) -> None:
        self._image = image
        self.size = image.size
        self.upload_id = image.stat.upload_id

    def available(self, offset: int) -> int:
        """See `Reading.available`."""
        return max(0, self.size - offset)

    def readinto(self, view: memoryview, offset: int) -> int:
        """See `Reading.readinto`."""
        wanted = min(len(view), max(0, self.size - offset))
        # Released even if an error keeps this frame: the memory may be shared
        # with a client, and has to be given back.
        with view[:wanted] as part:
            found = self._image.readinto(part, offset)
        if found != wanted:
            raise exceptions.DamagedError(
                f'image {self._image.stat.image_id} ended before its end')
        return wanted

    def frames(self, ranges: list[tuple[int, int]]
               ) -> tuple[list[bytes], int]:
        """See Image.frames."""
        return self._image.frames(ranges)

    def is_zeros(self, offset: int, length: int) -> bool:
        """Return whether a range is zeros, as known without reading blocks."""
        return self._image.is_zeros(length, offset)

    def extents(self, offset: int, length: int) -> list[tuple[int, bool]]:
        """See `Reading.extents`."""
        end = min(self.size, offset + length)
        if self._image.disk is not None:
            return [(end - offset, False)]  # its extents are not of the file
        found: list[tuple[int, bool]] = []
        for number, extent in enumerate(self._image.extents(offset)):
            if extent.offset >= end or number == _MAX_EXTENTS:
                break
            part = (min(end, extent.offset + extent.length)
                    - max(offset, extent.offset))
            zeros = extent.kind == 'zeros'
            if found and found[-1][1] == zeros:
                part += found.pop()[0]
            found.append((part, zeros))
        return found

    def on_more(self, callback: Callable[[], None] | None) -> None:
        """See `Reading.on_more`; nothing more comes."""

    def close(self) -> None:
        """See `Reading.close`."""
        self._image.close()
