# SPDX-License-Identifier: Apache-2.0

"""The valid ids of images, and those among them that volumes keep.

The engine refuses all other ids. A volume stores its bytes in recipes, which
are images for the engine, but not for users (``volumes.rst``).
"""

import re
from typing import NamedTuple

#: The pattern of a valid id, as a part of larger patterns.
PATTERN = '[A-Za-z0-9_-]{1,128}'

#: Whether a string can name a recipe: an image's, or a volume's.
is_valid = re.compile(PATTERN).fullmatch

_OF_VOLUME = re.compile(
    'v_([0-9a-f]{32})_(?:base_0|([0-9]{1,20})_([0-9]{1,20}))')


class VolumeRecipe(NamedTuple):
    """What the id of a volume's recipe says."""

    volume_id: str
    """32 hexadecimal digits."""
    part: int | None
    """None: it is the base."""
    edition: int


def of_volume(image_id: str) -> VolumeRecipe | None:
    """What an id says if it is that of a volume's recipe; None: it is not."""
    match = _OF_VOLUME.fullmatch(image_id)
    if match is None:
        return None
    volume_id, part, edition = match.groups()
    return VolumeRecipe(volume_id, None if part is None else int(part),
                        int(edition or 0))


def is_image(image_id: str) -> bool:
    """Whether a string can be the id of an image that users have."""
    return bool(is_valid(image_id)) and of_volume(image_id) is None
