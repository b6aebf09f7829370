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

# Of the recipes of a volume; what else may come behind the prefix is left to
# the versions that make it.
_OF_VOLUME = re.compile('v_([0-9a-f]{32})_([A-Za-z0-9_-]*)')
_OF_PART = re.compile('(0|[1-9][0-9]{0,19})_[1-9][0-9]{0,19}')


class VolumeRecipe(NamedTuple):
    """What the id of a volume's recipe says."""

    volume_id: str
    """32 hexadecimal digits."""
    what: str
    """Which of the volume's recipes it is, in words."""


def of_volume(image_id: str) -> VolumeRecipe | None:
    """What an id says if it is that of a volume's recipe; None: it is not.

    Every id that begins as those of a volume's recipes do is the volume's,
    since its owner deletes those among them that it does not need. The engine
    has the same rule (``volumenames.h``).
    """
    match = _OF_VOLUME.fullmatch(image_id)
    if match is None or not is_valid(image_id):
        return None
    volume_id, rest = match.groups()
    part = _OF_PART.fullmatch(rest)
    return VolumeRecipe(volume_id, f'part {part[1]}' if part else
                        'the base' if rest == 'base_0' else 'a recipe')


def is_image(image_id: str) -> bool:
    """Whether a string can be the id of an image that users have."""
    return bool(is_valid(image_id)) and of_volume(image_id) is None
