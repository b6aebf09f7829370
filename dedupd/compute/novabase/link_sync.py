# SPDX-License-Identifier: Apache-2.0

"""Keeps the links that Nova finds in step with Glance's images.

Once a minute the keeper lists Glance's images, and makes, restores and
removes links. An image that Glance has no more keeps its link while a
process has it open, and while the whole of it is here: a server that is shut
off may start again. Nova's own image cache manager removes that link once no
server needs it, and it is not put back.

An image that is not here whole has a link only while dedupd can fetch it. The
link goes when dedupd has found that the storing host has another image under
the id, and when dedupd has not answered for two minutes. Then Nova downloads
the image as if there were no links. A restart of dedupd takes less, and
removes no link: Nova opens an image several times while it makes a server, and
fails if the link goes in between.
"""

from collections.abc import Callable
from collections.abc import Collection
import time

from oslo_log import log

from dedupd.compute.cache import offered_images
from dedupd.compute.novabase import base_links
from dedupd.compute.novabase import image_catalogue
from dedupd.compute.novabase import image_contents
from glance_dedup.client import glance_api

LOG = log.getLogger(__name__)

#: Seconds between two refreshes.
INTERVAL = 60.0
#: Seconds without an answer after which the keeper gives dedupd up.
AWAY = 120.0


class Keeper:
    """Keeps the offers, the links and the file. Used by one thread.

    :param connect: logs in at Glance, or raises GlanceError
    :param wrong_images: returns the images of which dedupd found another at
        the storing host; None: dedupd does not answer now
    """

    def __init__(self, contents: image_contents.Contents,
                 links: base_links.Links, file: offered_images.File,
                 connect: Callable[[], glance_api.Glance],
                 wrong_images: Callable[[], Collection[str] | None]) -> None:
        self._contents = contents
        self._links = links
        self._file = file
        self._connect = connect
        self._wrong_images = wrong_images
        self._catalogue: image_catalogue.Catalogue | None = None
        self._told: dict[str, str] = {}
        # When dedupd answered last, by the monotonic clock.
        self._answered = time.monotonic()
        # Until Glance answers, its last list counts.
        self._shown = self._saved = self._offered = file.offers()
        contents.show(self._shown, frozenset())

    def run(self) -> None:
        """Refresh every minute, until the mount ends. Does not raise."""
        while True:
            try:
                self.run_once()
            except Exception:
                LOG.exception('The links for Nova were not refreshed')
            if self._contents.stopping.wait(INTERVAL):
                return

    def run_once(self) -> None:
        """Refresh once. Failures are logged, each once in a row."""
        self._attempt('A request to Glance', self._ask)
        gone = frozenset(
            image_id for image_id, offer in self._shown.items()
            if image_id not in self._offered and self._stays(offer))
        self._shown = {**self._offered, **{
            image_id: self._shown[image_id] for image_id in gone}}
        self._contents.show(self._shown, gone)
        self._attempt('Saving the list of images', self._save)
        self._attempt('Making links', self._link)

    def _attempt(self, what: str, function: Callable[[], None]) -> None:
        try:
            function()
        except (glance_api.GlanceError, OSError) as e:
            if self._told.get(what) != str(e):
                self._told[what] = str(e)
                LOG.warning('%s failed, and is tried again every minute: %s',
                            what, e)
        else:
            self._told.pop(what, None)

    def _ask(self) -> None:
        if self._catalogue is None:
            self._catalogue = image_catalogue.Catalogue(
                self._connect(), self._offered.values())
        self._offered = self._catalogue.offers()

    def _stays(self, offer: offered_images.Offer) -> bool:
        """Return whether an image that Glance has no more is still shown."""
        return self._contents.is_open(offer.image_id) or (
            self._links.has(offer.image_id) and self._contents.is_here(offer))

    def _save(self) -> None:
        if self._shown != self._saved:
            self._file.save(self._shown)
            self._saved = self._shown

    def _link(self) -> None:
        wrong = self._wrong_images()
        if wrong is not None:
            self._answered = time.monotonic()
        is_restarting = (wrong is None
                         and time.monotonic() < self._answered + AWAY)
        for image_id, offer in self._shown.items():
            comes = wrong is not None and image_id not in wrong
            if comes or self._contents.is_here(offer):
                # Also for an image that Glance has no more: while dedupd was
                # away it may have lost its link, which its servers need to
                # start again.
                self._links.put(image_id)
            elif image_id in self._offered and not is_restarting:
                self._links.remove(image_id)
        self._links.sweep(self._shown)
