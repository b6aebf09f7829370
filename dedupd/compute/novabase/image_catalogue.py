# SPDX-License-Identifier: Apache-2.0

"""The images of Glance from which Nova may start before they are here.

Such an image is active, registered as raw, neither encrypted nor signed, and
its first bytes are those of a raw disk. Nova inspects and verifies an image
while it downloads it. It does not download these, so they are inspected here,
once for each, by the inspector that Nova uses.
"""

from collections.abc import Iterable
import io
from typing import Any

from oslo_log import log
from oslo_utils.imageutils import format_inspector

from dedupd.compute.cache import offered_images
from glance_dedup.base import diskformats
from glance_dedup.base import hashes
from glance_dedup.client import glance_api

LOG = log.getLogger(__name__)

#: The first bytes of an image, which the inspector gets. It needs 256 KiB.
HEAD = 1 << 20
# Its verdicts on a raw disk: one with a partition table is 'gpt'.
_RAW = ('raw', 'gpt')
_STEP = 4096
# Nova decrypts the images that have such properties, or verifies a signature.
_BY_NOVA = ('img_signature', 'os_encrypt', 'os_decrypt', 'cinder_encryption')


def offer_of(record: glance_api.Record) -> offered_images.Offer | None:
    """The offer of an image that only the inspection may refuse."""
    if (record.get('status') != 'active'
            or record.get('disk_format') != 'raw'
            or record.get('container_format') != 'bare'
            or any(name.startswith(_BY_NOVA) for name in record)):
        return None
    try:
        hashes.new(record['os_hash_algo'])
        return offered_images.Offer(
            record['id'], record['size'], record['os_hash_algo'],
            record['os_hash_value'], record.get('checksum'))
    except (KeyError, TypeError, ValueError):
        return None     # no hash could prove that the right image comes


def is_raw(head: bytes, size: int) -> bool:
    """Return whether an image is a raw disk, by its first bytes.

    The inspector does not know all formats that QEMU guesses.

    :param size: bytes of the whole image
    """
    if diskformats.format_of(head) != 'raw':
        return False
    wrapper = format_inspector.InspectWrapper(io.BytesIO(head))
    left = len(head)
    while left and not wrapper.formats:
        left -= len(wrapper.read(_STEP))
    if not wrapper.formats and len(head) < size:
        return False    # later bytes might have another format's mark
    try:
        wrapper.close()
        found: Any = wrapper.format
        found.safety_check()
    except (format_inspector.ImageFormatError,
            format_inspector.SafetyCheckFailed):
        return False
    return str(found) in _RAW


class Catalogue:
    """Glance's images for Nova. Used by one thread.

    :param known: offers that have passed the inspection
    """

    def __init__(self, glance: glance_api.Glance,
                 known: Iterable[offered_images.Offer] = ()) -> None:
        self._glance = glance
        # Each with the verdict of the inspector.
        self._verdicts = {offer: True for offer in known}

    def offers(self) -> dict[str, offered_images.Offer]:
        """The images that Glance has now, by their ids.

        :raises GlanceError: if Glance does not list them
        """
        verdicts: dict[offered_images.Offer, bool] = {}
        for record in self._glance.records():
            offer = offer_of(record)
            if offer is None or len(verdicts) >= offered_images.MAX_COUNT:
                continue
            verdict = self._verdicts.get(offer)
            if verdict is None:
                verdict = self._inspect(offer)
            if verdict is not None:
                verdicts[offer] = verdict
        self._verdicts = verdicts
        return {offer.image_id: offer for offer, passed in verdicts.items()
                if passed}

    def _inspect(self, offer: offered_images.Offer) -> bool | None:
        """The inspector's verdict; None: the next refresh tries again."""
        length = min(HEAD, offer.size)
        try:
            head = self._glance.head(offer.image_id, length)
        except glance_api.GlanceError as e:
            LOG.warning('Image %s is not offered to Nova: %s',
                        offer.image_id, e)
            return None
        if is_raw(head, offer.size):
            return True
        LOG.warning('Image %s is registered as raw and is of another format, '
                    'so Nova downloads it', offer.image_id)
        return False
