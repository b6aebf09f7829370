# SPDX-License-Identifier: Apache-2.0

"""The images that a compute host offers to Nova, and their bytes.

The facts of an image come from memory alone: no look-up waits for Glance, for
dedupd, or for the network. The bytes come from the repository if
the whole image is there, and then need no daemon. Otherwise they come from
dedupd, which fetches the image. A read waits while the image still
exists somewhere: while dedupd restarts, or while the storing host is away.
"""

from collections.abc import Callable
import threading
import time

from oslo_log import log

from dedupd.compute.cache import offered_images
from glance_dedup.base import exceptions
from glance_dedup.client import client_errors
from glance_dedup.client import nbd_client
from glance_dedup import fuse_operations
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages

LOG = log.getLogger(__name__)

#: Seconds before a failed read is tried again, and between two checks whether
#: #: the whole image is here.
PAUSE = 1.0


class Contents(fuse_operations.Source):
    """The images that the mount shows. Thread-safe, but for `show`.

    :param socket: on which dedupd serves NBD
    :param is_missing: returns whether dedupd reports that no host has an image
    """

    def __init__(self, repository: image_repository.Repository, socket: str,
                 is_missing: Callable[[str], bool]) -> None:
        self.name = repository.path
        self.repository = repository
        self.socket = socket
        self._is_missing = is_missing
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._began = time.time_ns()
        self._offers: dict[str, offered_images.Offer] = {}
        self._open: dict[str, int] = {}
        # Times that were set, by image: of access and of change.
        self._times: dict[str, tuple[int, int]] = {}
        # Images that Glance has no more, held open.
        self._pins: dict[str, openimages.Image] = {}
        self._gone: frozenset[str] = frozenset()

    # -- shown images ------------------------------------------------------

    def show(self, offers: dict[str, offered_images.Offer],
             gone: frozenset[str]) -> None:
        """Show these images from now on, and let go of all others.

        :param gone: the ones that Glance has no more. If they are here, they
            are held open, so that they are not evicted.
        """
        with self._lock:
            self._offers, self._gone = offers, gone
            self._times = {image_id: times for image_id, times
                           in self._times.items() if image_id in offers}
            loose = [self._pins.pop(image_id) for image_id in [*self._pins]
                     if image_id not in gone]
        for image in loose:
            image.close()
        for image_id in gone:
            self._pin(offers[image_id])

    def _pin(self, offer: offered_images.Offer) -> None:
        """Hold an image open, if the whole of it is here."""
        if offer.image_id not in self._pins:
            image = self.open_present(offer)
            if image is not None:
                with self._lock:
                    self._pins[offer.image_id] = image

    def open_present(self, offer: offered_images.Offer
                     ) -> openimages.Image | None:
        """Open an image if the whole of it is here, as Glance means it."""
        try:
            image = self.repository.open_image(offer.image_id)
        except exceptions.ImageNotFound:
            return None
        stat = image.stat
        if (stat.size, stat.hash_name, stat.hash_value) == (
                offer.size, offer.hash_name, offer.hash_value):
            return image
        image.close()
        return None

    def is_here(self, offer: offered_images.Offer) -> bool:
        """Return whether the whole image is here."""
        if offer.image_id in self._pins:
            return True
        image = self.open_present(offer)
        if image is not None:
            image.close()
        return image is not None

    def is_open(self, image_id: str) -> bool:
        """Return whether a process has the image's file open."""
        with self._lock:
            return image_id in self._open

    def is_lost(self, image_id: str) -> bool:
        """Return whether the rest of an image cannot come any more.

        The storing host keeps an image that was deleted in Glance for its
        readers. So this requests dedupd's answer, too.
        """
        return (image_id in self._gone or image_id not in self._offers) and (
            self._is_missing(image_id))

    # -- as fuse_operations.Source ------------------------------------------

    def names(self) -> list[str]:
        """See :class:`fuse_operations.Source`."""
        return sorted(self._offers)

    def facts(self, image_id: str) -> fuse_operations.Facts:
        """See :class:`fuse_operations.Source`; from memory."""
        offer = self._offers[image_id]
        return fuse_operations.Facts(image_id, offer.hash_value, offer.size, 0)

    def open(self, facts: fuse_operations.Facts) -> 'Content':
        """See :class:`fuse_operations.Source`; never waits."""
        offer = self._offers[facts.image_id]
        if offer.hash_value != facts.upload_id:
            raise LookupError(f'image {facts.image_id} is another one now')
        with self._lock:
            self._open[facts.image_id] = self._open.get(facts.image_id, 0) + 1
        return Content(self, offer)

    def closed(self, image_id: str) -> None:
        """Note that one user of an open image has closed it."""
        with self._lock:
            self._open[image_id] -= 1
            if not self._open[image_id]:
                del self._open[image_id]

    # -- times -------------------------------------------------------------

    def times(self, image_id: str) -> tuple[int, int]:
        """Times of an image's access and change, as a process has set them.

        In nanoseconds since 1970; at first the start of this process.
        """
        return self._times.get(image_id, (self._began, self._began))

    def set_times(self, image_id: str, times: tuple[int, int]) -> None:
        """Remember both times."""
        with self._lock:
            self._times[image_id] = times


class Content(fuse_operations.Opened):
    """One open image. Thread-safe."""

    def __init__(self, contents: Contents,
                 offer: offered_images.Offer) -> None:
        self._contents = contents
        self._offer = offer
        self._lock = threading.Lock()
        self._reading: openimages.Image | nbd_client.Export | None = None
        self._looked = 0.0
        self._closed = False

    def read(self, length: int, offset: int) -> bytes:
        """Read so many bytes; fewer only at the end.

        :raises Exception: if the image is damaged here, or will not come
        """
        told = False
        length = min(length, max(0, self._offer.size - offset))
        while True:
            reading = self._get()
            if isinstance(reading, openimages.Image):
                return reading.read(length, offset)
            try:
                return self._read(reading, length, offset)
            except client_errors.ClientError as e:
                self._drop(reading)
                if self._contents.is_lost(self._offer.image_id):
                    raise
                if not told:
                    LOG.warning('A read of image %s waits: %s',
                                self._offer.image_id, e)
                    told = True
            if self._contents.stopping.wait(PAUSE):
                raise client_errors.DaemonUnavailable('the mount is ending')

    def _read(self, reading: nbd_client.Export | None, length: int,
              offset: int) -> bytes:
        if reading is None:
            reading = self._connect()
        return reading.read(length, offset)

    def _get(self) -> openimages.Image | nbd_client.Export | None:
        """The source to read: the repository once it has the whole image."""
        with self._lock:
            now = time.monotonic()
            if isinstance(self._reading, openimages.Image) or (
                    self._reading is not None
                    and now < self._looked + PAUSE):
                return self._reading
            self._looked = now
            image = self._contents.open_present(self._offer)
            if image is None:
                return self._reading
            before, self._reading = self._reading, image
        if before is not None:
            before.close()
        return image

    def _connect(self) -> nbd_client.Export:
        """Have dedupd open the image, which begins to fetch it.

        :raises ClientError: if it does not
        """
        export = nbd_client.Export(self._contents.socket,
                                   self._offer.image_id, None,
                                   return_seconds=0)
        if export.size != self._offer.size:
            export.close()
            raise client_errors.BadAnswer(
                f'image {self._offer.image_id} has {export.size} bytes there, '
                f"and {self._offer.size} by Glance's record")
        with self._lock:
            if self._reading is None and not self._closed:
                self._reading = export
                return export
            found = self._reading
        export.close()
        if isinstance(found, nbd_client.Export):
            return found
        raise client_errors.DaemonUnavailable('the whole image is here now')

    def _drop(self, reading: nbd_client.Export | None) -> None:
        with self._lock:
            if self._reading is reading:
                self._reading = None
        if reading is not None:
            reading.close()

    def close(self) -> None:
        """Let go. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            reading, self._reading = self._reading, None
        if reading is not None:
            reading.close()
        self._contents.closed(self._offer.image_id)
