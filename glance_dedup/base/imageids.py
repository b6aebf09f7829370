# SPDX-License-Identifier: Apache-2.0

"""The valid ids of images, volumes, backups and uploads.

The engine refuses all other ids. A volume stores its bytes in recipes, which
are images for the engine, but not for users (``volumes.rst``). A backup is an
image for both, but never one of Glance's (``batch.rst``). So is an upload on
its way to Glance, for a moment (``cache.rst``, "Uploads of differences").
"""

import datetime
import re
import secrets
from typing import NamedTuple

#: The pattern of a valid id, as a part of larger patterns.
PATTERN = '[A-Za-z0-9_-]{1,128}'

#: Whether a string can name a recipe: an image's, or a volume's.
is_valid = re.compile(PATTERN).fullmatch

# Of the recipes of a volume; other ids behind the prefix are left to
# the versions that make it.
_OF_VOLUME = re.compile('v_([0-9a-f]{32})_([A-Za-z0-9_-]*)')
_OF_PART = re.compile('(0|[1-9][0-9]{0,19})_[1-9][0-9]{0,19}')

_TIME = '%Y%m%dT%H%M%SZ'
_NAME = '[A-Za-z0-9_-]{1,109}'
_OF_BACKUP = re.compile(f'b_({_NAME})_([0-9]{{8}}T[0-9]{{6}}Z)')

#: Whether a string can be the name of backups: with it, an id has at most 128
#: characters.
is_backup_name = re.compile(_NAME).fullmatch


class VolumeRecipe(NamedTuple):
    """Parts of the id of a volume's recipe."""

    volume_id: str
    """32 hexadecimal digits."""
    what: str
    """The kind of the volume's recipe, in words."""


def of_volume(image_id: str) -> VolumeRecipe | None:
    """Return the parts of the id of a volume's recipe; None: it is none.

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
    """Return whether a string can be the id of an image that users have."""
    return bool(is_valid(image_id)) and of_volume(image_id) is None


#: Whether an id can be one of Glance's, which takes capital letters, too.
is_glances = re.compile(
    '[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}').fullmatch

#: Whether an id is that of an upload on its way to Glance.
is_upload = re.compile('u_[0-9a-f]{32}').fullmatch


def upload_id() -> str:
    """An id for an upload on its way to Glance, which no other has."""
    return f'u_{secrets.token_hex(16)}'


class Backup(NamedTuple):
    """Parts of the id of a backup. Sorted by name, then by time."""

    name: str
    """The name of the source."""
    time: datetime.datetime
    """Time of the backup in UTC, to the second."""

    @property
    def image_id(self) -> str:
        """The id."""
        # strftime writes years before 1000 with fewer digits.
        return (f'b_{self.name}_{self.time.year:04}'
                f'{self.time:{_TIME.removeprefix("%Y")}}')


def of_backup(image_id: str) -> Backup | None:
    """Return the parts of the id of a backup; None: it is none.

    The time is the last part, so that a name may have any underscores.
    """
    match = _OF_BACKUP.fullmatch(image_id)
    if match is None:
        return None
    try:
        time = datetime.datetime.strptime(match[2], _TIME)
    except ValueError:      # such as the 30th of February
        return None
    return Backup(match[1], time.replace(tzinfo=datetime.timezone.utc))


def backup_id(name: str, time: datetime.datetime) -> str:
    """The id of a backup.

    :param time: with a time zone; parts of a second are cut off
    :raises ValueError: backups cannot have this name, or the time has no zone
    """
    if not is_backup_name(name):
        raise ValueError(
            f'{name!r} cannot name backups: a name has 1 to 109 characters '
            'of A-Z a-z 0-9 _ -')
    if time.tzinfo is None:
        raise ValueError(f'{time} has no time zone')
    return Backup(name, time.astimezone(datetime.timezone.utc)).image_id
