# SPDX-License-Identifier: Apache-2.0

"""The locations of images, which Glance keeps and gives to the driver.

``dedup_store.py`` describes locations, and who must not see them. The
functions are in a module of their own, since the daemon makes locations, too,
and has no Glance.
"""

import hashlib
import hmac
import re
from typing import Any
from typing import NamedTuple

from glance_dedup.base import hexids
from glance_dedup.base import imageids
from glance_dedup.base import signingkeys

#: The store's type in ``enabled_backends`` and the scheme of its locations.
SCHEME = 'dedup'
_PATTERN = re.compile(rf'{SCHEME}://({hexids.PATTERN})/({imageids.PATTERN})'
                      rf'/({hexids.PATTERN})/([0-9a-f]{{64}})')


class Parts(NamedTuple):
    """The parts of a location, which are not verified."""

    repository_id: str
    image_id: str
    upload_id: str
    mac: str


def parse(url: Any) -> Parts | None:
    """Return the parts of a location; None: it is none."""
    found = _PATTERN.fullmatch(url) if isinstance(url, str) else None
    return None if found is None else Parts(*found.groups())


def sign(key: bytes, repository_id: str, image_id: str,
         upload_id: str) -> str:
    """A location's mac, 64 hexadecimal digits.  No part may contain a NUL."""
    message = '\0'.join(('glance-dedup location 1', repository_id, image_id,
                         upload_id))
    return hmac.new(key, message.encode(), hashlib.sha256).hexdigest()


def is_signed(keys: signingkeys.Keys, repository_id: str, image_id: str,
              upload_id: str, mac: str) -> bool:
    """Return whether one of the keys that are accepted made a mac."""
    return any([hmac.compare_digest(
        sign(key, repository_id, image_id, upload_id), mac)
        for key in keys.accepted])


def uri(*parts: str) -> str:
    """Join a location's parts."""
    return f'{SCHEME}://{"/".join(parts)}'


def url(opened: Any, image_id: str, upload_id: str) -> str:
    """The location of an image of an open repository.

    :raises DamagedError, AccessDenied, StorageError: its keys cannot be read
    """
    mac = sign(opened.read_keys().current, opened.repository_id, image_id,
               upload_id)
    return uri(opened.repository_id, image_id, upload_id, mac)
