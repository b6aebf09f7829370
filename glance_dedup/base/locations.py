# SPDX-License-Identifier: Apache-2.0

"""The locations of images, which Glance keeps and gives to the driver.

``store.py`` says what locations are, and who must not see them. The functions
are in a module of their own, since the daemon makes locations, too, and has no
Glance.
"""

import hashlib
import hmac
from typing import Any

#: The store's type in ``enabled_backends`` and the scheme of its locations.
SCHEME = 'dedup'


def sign(key: bytes, repository_id: str, image_id: str,
         upload_id: str) -> str:
    """A location's mac, 64 hexadecimal digits.  No part may contain a NUL."""
    message = '\0'.join(('glance-dedup location 1', repository_id, image_id,
                         upload_id))
    return hmac.new(key, message.encode(), hashlib.sha256).hexdigest()


def uri(*parts: str) -> str:
    """Join a location's parts."""
    return f'{SCHEME}://{"/".join(parts)}'


def url(opened: Any, image_id: str, upload_id: str) -> str:
    """The location of an image of an open repository."""
    mac = sign(opened.key, opened.repository_id, image_id, upload_id)
    return uri(opened.repository_id, image_id, upload_id, mac)
