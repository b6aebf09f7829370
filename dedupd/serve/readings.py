# SPDX-License-Identifier: Apache-2.0

"""What is read: an image that is here, or one that is on its way."""

from collections.abc import Callable
from typing import Protocol

from glance_dedup.base import exceptions
from glance_dedup.repository import repository as repository_module

# Of an image's extents: looked at, and told, for one question.
_MOST_EXTENTS = 16384


class ArrivalFailed(Exception):
    """An image does not come: which one, from whom, and why."""


class Reading(Protocol):
    """An image that is read. Thread-safe.

    :ivar size: of the image
    :ivar upload_id: of the upload that wrote it
    :ivar here: whether all of it is here, and is what was expected
    """

    size: int
    upload_id: str
    here: bool

    def available(self, offset: int) -> int:
        """Bytes from there on that `readinto` gives without waiting.

        :raises ArrivalFailed: none, and no more will come
        """

    def readinto(self, view: memoryview, offset: int) -> int:
        """Fill a buffer, all of it unless the image ends; the bytes read.

        What has not come yet is fetched at once.

        :raises ArrivalFailed: it will not come
        :raises RepositoryError: it cannot be read here
        """

    def extents(self, offset: int, length: int) -> list[tuple[int, bool]]:
        """(length, whether it is known to be zeros), one behind the other.

        At least one; together they may be shorter than was asked for. What
        is not known yet is not zeros.
        """

    def on_more(self, callback: Callable[[], None] | None) -> None:
        """Have a callback called, in any thread, when more is available.

        Also when it failed. It takes the place of the one before; None takes
        that away.
        """

    def close(self) -> None:
        """Let go. Idempotent."""


class Present:
    """A Reading of an image that is here, whole."""

    here = True

    def __init__(self, image: repository_module.Image) -> None:
        self._image = image
        self.size = image.size
        self.upload_id = image.stat.upload_id

    def available(self, offset: int) -> int:
        return max(0, self.size - offset)

    def readinto(self, view: memoryview, offset: int) -> int:
        wanted = min(len(view), max(0, self.size - offset))
        if self._image.readinto(view[:wanted], offset) != wanted:
            raise exceptions.DamagedError(
                f'image {self._image.stat.image_id} ended before its end')
        return wanted

    def extents(self, offset: int, length: int) -> list[tuple[int, bool]]:
        end = min(self.size, offset + length)
        found: list[tuple[int, bool]] = []
        for number, extent in enumerate(self._image.extents(offset)):
            if extent.offset >= end or number == _MOST_EXTENTS:
                break
            part = (min(end, extent.offset + extent.length)
                    - max(offset, extent.offset))
            zeros = extent.kind == 'zeros'
            if found and found[-1][1] == zeros:
                part += found.pop()[0]
            found.append((part, zeros))
        return found

    def on_more(self, callback: Callable[[], None] | None) -> None:
        pass

    def close(self) -> None:
        self._image.close()
