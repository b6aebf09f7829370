# SPDX-License-Identifier: Apache-2.0

"""The list of images that a compute host offers to Nova as files.

``dedupd-nova-base`` writes the file. dedupd reads Glance's facts of an image
that a guest reads from it, and compares the received image with them. The file
lies beside the repository, since it is no part of it. Without the file nothing
is offered until the next answer of Glance.
"""

import dataclasses
import os
import re

from oslo_log import log

from dedupd.compute.cache import arriving_image
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import imageids
from glance_dedup.base import imagelist

LOG = log.getLogger(__name__)

#: The most images of the file, and its most bytes, which is more.
MAX_COUNT = 20_000
MAX_SIZE = 16 << 20

_KIND = 'glance-dedup images for Nova'
_SUFFIX = '.nova-base.json'
_HEX = re.compile('[0-9a-f]{32,128}')


@dataclasses.dataclass(frozen=True)
class Offer:
    """An image that passed the inspection, as Glance described it."""

    image_id: str
    size: int
    hash_name: str
    hash_value: str
    """Hexadecimal digits."""
    md5: str | None

    def __post_init__(self) -> None:
        # The values may be from a file that any user may have written.
        if not (isinstance(self.image_id, str)
                and imageids.is_image(self.image_id)):
            raise ValueError(f'{self.image_id!r} is not the id of an image')
        if type(self.size) is not int or not 0 < self.size < 1 << 63:
            raise ValueError(f'{self.size!r} is not a size')
        if not isinstance(self.hash_name, str) or not _is_hex(
                self.hash_value) or not (
                    self.md5 is None or _is_hex(self.md5)):
            raise ValueError('it has no valid hash')

    @property
    def expected(self) -> arriving_image.Expected:
        """The facts that the received image is compared with."""
        return arriving_image.Expected(self.size, self.md5, self.hash_name,
                                       self.hash_value)


def _is_hex(text: object) -> bool:
    return isinstance(text, str) and _HEX.fullmatch(text) is not None


class File:
    """The list's file. Thread-safe for readers.

    :param datadir: the repository beside which it lies
    """

    def __init__(self, datadir: str) -> None:
        self.path = os.path.abspath(datadir) + _SUFFIX
        self._read: tuple[tuple[int, int, int] | None,
                          dict[str, Offer]] = None, {}

    def offers(self) -> dict[str, Offer]:
        """The images by their ids; none if the file is missing or invalid."""
        try:
            found = os.stat(self.path)
            state = found.st_ino, found.st_mtime_ns, found.st_size
            known, offers = self._read
            if state != known:
                offers = {offer.image_id: offer for offer in imagelist.decode(
                    files.read_file(self.path, MAX_SIZE + 1), _KIND, MAX_SIZE,
                    Offer)}
                self._read = state, offers
            return offers
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, exceptions.DamagedError) as e:
            LOG.warning('%s is not used: %s', self.path, e)
            return {}

    def save(self, offers: dict[str, Offer]) -> None:
        """Replace the file.

        :raises OSError: if it cannot be written
        """
        files.replace_file(self.path, imagelist.encode(
            _KIND, map(dataclasses.asdict, offers.values())), 0o600)
