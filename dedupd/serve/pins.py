# SPDX-License-Identifier: Apache-2.0

"""Images that other hosts are pulling, kept open after their deletion.

A guest on a compute host reads an image that is still arriving there. If the
image is deleted meanwhile, the guest needs the rest all the same. So an image
of which an operator's host has requested blocks stays open for a while after
the last such request. An open image keeps its blocks (I12), and requests for
its upload are answered although it has no name any more.
"""

from collections.abc import Callable
import dataclasses
import threading
import time

from glance_dedup.base import exceptions
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages

#: For so many seconds after the last request an image is kept open.
SECONDS = 600.0
#: The most images that are kept open.
MAX_LEASES = 256


@dataclasses.dataclass
class _Held:
    """An open image, and the count of its users."""

    image: openimages.Image
    until: float
    users: int = 0


class Lease:
    """A held image for one request. To be used like an open image."""

    def __init__(self, image: openimages.Image, leave: Callable[[], None]
                 ) -> None:
        self.stat = image.stat
        self.size = image.size
        self.describe = image.describe
        self.frames = image.frames
        self._leave: Callable[[], None] | None = leave

    def close(self) -> None:
        """Leave the image. Idempotent; one thread at a time."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class Pins:
    """All images that are kept open. Thread-safe."""

    def __init__(self, repository: image_repository.Repository) -> None:
        self._repository = repository
        self._lock = threading.Lock()
        # By image id and upload id; the one that was used last is the last.
        self._held: dict[tuple[str, str], _Held] = {}

    def open(self, image_id: str, upload_id: str | None) -> Lease:
        """Open an image, which then stays open for a while.

        A deleted image that is held is found by its upload, or by its id as
        long as no other image has that.

        :param upload_id: the upload of the image; None: any
        :raises ImageNotFound, DamagedError: as of Repository.open_image
        """
        lease = self._lease(image_id, upload_id) if upload_id else None
        if lease is not None:
            return lease
        try:
            image = self._repository.open_image(image_id, upload_id)
        except exceptions.ImageNotFound:
            lease = self._lease(image_id, upload_id)
            if lease is None:
                raise
            return lease
        return self._hold(image)

    def _lease(self, image_id: str, upload_id: str | None) -> Lease | None:
        """A lease of the image that was used last."""
        with self._lock:
            for key in reversed(self._held):
                if key[0] == image_id and upload_id in (None, key[1]):
                    return self._use(key)
        return None

    def _hold(self, image: openimages.Image) -> Lease:
        key = image.stat.image_id, image.stat.upload_id
        with self._lock:
            known = key in self._held
            if not known:
                self._held[key] = _Held(image, 0)
            lease = self._use(key)
        if known:
            image.close()
        else:
            self.sweep()
        return lease

    def _use(self, key: tuple[str, str]) -> Lease:
        """REQUIRES: the caller holds the lock."""
        held = self._held.pop(key)
        self._held[key] = held
        held.users += 1
        held.until = time.monotonic() + SECONDS

        def leave() -> None:
            with self._lock:
                held.users -= 1
                held.until = time.monotonic() + SECONDS

        return Lease(held.image, leave)

    @property
    def count(self) -> int:
        """Return the number of images that are kept open."""
        return len(self._held)

    def sweep(self) -> None:
        """Close images without a request for long."""
        now = time.monotonic()
        with self._lock:
            unused = [key for key, held in self._held.items()
                      if not held.users]
            surplus = len(self._held) - MAX_LEASES
            old = [key for number, key in enumerate(unused)
                   if number < surplus or self._held[key].until <= now]
            images = [self._held.pop(key).image for key in old]
        for image in images:
            image.close()
