# SPDX-License-Identifier: Apache-2.0

"""The bytes that each project has stored: ``projects.json``.

The maintainer writes the sums of the ledger into this file of the repository
whenever accounting has changed them. So every program on every host can read
them, without the catalog and without a daemon. The file also has what the task
*projects* counted last: which blocks a project shares with others.

Nothing depends on the file but limits of projects and reports. An invalid file
counts as missing.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import logging
import math
import os
from typing import Any

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import imagelist

LOG = logging.getLogger(__name__)

NAME = 'projects.json'
#: The most bytes of the file: some 150,000 projects.
MAX_SIZE = 64 << 20

_KIND = 'glance-dedup projects'


def _require_count(value: Any) -> None:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError('a number is none, or out of bounds')


@dataclasses.dataclass(frozen=True)
class Sharing:
    """The blocks that a project's recipes name, each counted once."""

    counted: float
    """Time of the task's count, in seconds since 1970."""
    exclusive_blocks: int
    """Blocks that no other project's recipe names."""
    shared_blocks: int
    """Blocks that others name, too."""
    charged_bytes: int
    """The project's part of the disk space of the block groups."""

    def __post_init__(self) -> None:
        if type(self.counted) not in (int, float) or not (
                math.isfinite(self.counted) and self.counted >= 0):
            raise ValueError('a time cannot be')
        for name in ('exclusive_blocks', 'shared_blocks', 'charged_bytes'):
            _require_count(getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Project:
    """A project's sums over its counted recipes.

    Recipes of backups and volumes are in all sums but ``images``.
    """

    project: str
    images: int
    backups: int
    logical_bytes: int
    zero_bytes: int
    new_bytes: int
    stored_bytes: int
    blocks: int
    sharing: Sharing | None = None
    """None: not counted since the project came."""

    def __post_init__(self) -> None:
        if not isinstance(self.project, str):
            raise TypeError('the name of a project is none')
        for name in SUMS:
            _require_count(getattr(self, name))


#: The sums that the file takes over from the catalog.
SUMS = ('images', 'backups', 'logical_bytes', 'zero_bytes', 'new_bytes',
        'stored_bytes', 'blocks')


def encode(projects: Iterable[Project]) -> bytes:
    """The file's content."""
    return imagelist.encode(
        _KIND, map(dataclasses.asdict, projects), of='projects')


def _entry(sharing: Any = None, **fields: Any) -> Project:
    return Project(sharing=None if sharing is None else Sharing(**sharing),
                   **fields)


def decode(content: bytes) -> dict[str, Project]:
    """The projects in a file, by their names.

    :raises ValueError: if the file is invalid; with the reason
    """
    return {found.project: found for found in imagelist.decode(
        content, _KIND, MAX_SIZE, _entry, of='projects')}


def load(root: str) -> dict[str, Project] | None:
    """The projects of a repository; None: there is no valid file.

    :param root: the repository's path
    """
    path = os.path.join(root, NAME)
    try:
        return decode(files.read_file(path, MAX_SIZE + 1))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, exceptions.DamagedError) as e:
        LOG.warning('%s is invalid: %s. What projects have stored is not '
                    'known until the maintainer writes the file again.',
                    path, str(e)[:200])
        return None


def save(root: str, sums: Mapping[str, Mapping[str, int]],
         sharing: Mapping[str, Sharing] | None = None) -> None:
    """Write the catalog's sums into the file, durably.

    REQUIRES: this process is the maintainer.

    :param root: the repository's path
    :param sums: by project, as the catalog has them
    :param sharing: the new counts; None: keep those of the file
    :raises OSError: the file stays as it was
    """
    if sharing is None:
        sharing = {name: found.sharing
                   for name, found in (load(root) or {}).items()
                   if found.sharing is not None}
    files.replace_file(
        os.path.join(root, NAME),
        encode(Project(project=name, sharing=sharing.get(name),
                       **{key: found[key] for key in SUMS})
               for name, found in sorted(sums.items())),
        access.file_mode(root))
