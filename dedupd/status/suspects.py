# SPDX-License-Identifier: Apache-2.0

"""Images of which a read failed, until they are verified.

A user meets damage before the next scrub does. So each read that finds some
is noted here. The image counts as damaged at once, and is read as a whole in
the background: when that succeeds, for example because the damage was repaired
or was the memory's, the image counts as damaged no more. Nor does an image
that was deleted. An image that is still damaged is read again an hour later,
and after each scrub.
"""

import contextlib
import os
import threading
import time

from oslo_log import log

from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.repository import image_repository

LOG = log.getLogger(__name__)

#: Seconds until an image that is still damaged is read again.
AGAIN_SECONDS = 3600.0
#: Images that are remembered; further ones are counted only.
IMAGES = 1000
#: Bytes that are read at once, between pauses as long as the read.
_PIECE = 4 << 20
#: The time of the image that is being read.
_BEING_READ = float('inf')


class Suspects:
    """Images of which a read failed. Thread-safe.

    :param repository: whose reads are watched; it calls :meth:`note`
    :ivar failed_reads: the number of reads that found damage
    """

    def __init__(self, repository: image_repository.Repository) -> None:
        self._repository = repository
        self._changed = threading.Condition()
        self._found: dict[str, float] = {}      # the time to verify it
        self._thread: threading.Thread | None = None
        self._closed = False
        self.failed_reads = 0
        repository.on_damage = self.note

    def images(self) -> set[str]:
        """Return the ids of the images, without those that were deleted."""
        with self._changed:
            for image_id in [*filter(self._is_gone, self._found)]:
                del self._found[image_id]
            return set(self._found)

    def _is_gone(self, image_id: str) -> bool:
        # If the disk cannot report a deletion, they stay.
        with contextlib.suppress(exceptions.RepositoryError):
            return not files.exists(os.path.join(
                self._repository.path, 'images', image_id))
        return False

    def note(self, image_id: str, error: exceptions.DamagedError) -> None:
        """Take an image of which a read failed."""
        with self._changed:
            if threading.current_thread() is self._thread or self._closed:
                return
            self.failed_reads += 1
            if image_id in self._found or len(self._found) == IMAGES:
                return
            self._found[image_id] = 0.0
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._verify_all, daemon=True, name='dedupd-verify')
                self._thread.start()
            self._changed.notify_all()
        LOG.error('Image %s is damaged, and is verified now: %s', image_id,
                  error)

    def verify_now(self) -> None:
        """Have all images verified again, without waiting for their time."""
        with self._changed:
            self._found = dict.fromkeys(self._found, 0.0)
            self._changed.notify_all()

    def close(self) -> None:
        """End the verification, and wait for it. Idempotent."""
        with self._changed:
            self._closed = True
            self._repository.on_damage = None
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _verify_all(self) -> None:
        while (image_id := self._next()) is not None:
            is_fine = self._verify(image_id)
            with self._changed:
                if is_fine:
                    self._found.pop(image_id, None)
                elif self._found.get(image_id) == _BEING_READ:
                    self._found[image_id] = time.monotonic() + AGAIN_SECONDS

    def _next(self) -> str | None:
        """Wait for the next image that is to be verified; None: the end."""
        with self._changed:
            while not self._closed:
                first = min(self._found, key=self._found.__getitem__,
                            default=None)
                if first is None:
                    self._changed.wait()
                    continue
                left = self._found[first] - time.monotonic()
                if left <= 0:
                    self._found[first] = _BEING_READ
                    return first
                self._changed.wait(left)
            return None

    def _verify(self, image_id: str) -> bool:
        """Read an image; return whether all of it is good."""
        try:
            with self._repository.open_image(image_id) as image:
                buffer, offset = bytearray(_PIECE), 0
                while offset < image.size and not self._closed:
                    begun = time.monotonic()
                    offset += image.readinto(buffer, offset)
                    time.sleep(min(1.0, time.monotonic() - begun))
        except exceptions.ImageNotFound:
            return True
        except exceptions.DamagedError:
            return False
        except exceptions.RepositoryError as e:
            LOG.warning('Image %s cannot be verified now: %s', image_id, e)
            return False
        if self._closed:
            return False
        LOG.info('Image %s is intact.', image_id)
        return True
