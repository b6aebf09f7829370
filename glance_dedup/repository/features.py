# SPDX-License-Identifier: Apache-2.0

"""The features of the format that a repository uses: ``features/``.

The engine sets a feature when it is first used (N15.1). A program that meets
one which it does not know refuses the repository (N15.3).
"""

import os

from glance_dedup.base import exceptions
from glance_dedup.base import files

DIRECTORY = 'features'
VOLUMES = 'volumes'
LISTED_SEGMENTS = 'listed-segments'
COLD = 'cold'
NODEDUP = 'nodedup'
DISKS = 'disks'
#: All features of this program, as ``engine/files/features.h`` numbers them.
KNOWN = (VOLUMES, LISTED_SEGMENTS, COLD, NODEDUP, DISKS)


def read(path: str) -> list[str]:
    """Return the features that a repository uses.

    :param path: the repository's directory
    :raises VersionError: it uses a feature unknown to this program
    :raises DamagedError: the directory is missing
    :raises AccessDenied, StorageError: as their names say
    """
    directory = os.path.join(path, DIRECTORY)
    try:
        with files.os_errors(f'cannot read {directory}'):
            found = set(os.listdir(directory))
    except exceptions.ImageNotFound:
        raise exceptions.DamagedError(
            f'the directory {directory} is missing: restore it from a backup')
    for name in sorted(found - {*KNOWN}):
        raise exceptions.VersionError(
            f'{path} uses the feature {name!r}, which this program does not '
            'know: use a newer program')
    return [name for name in KNOWN if name in found]


def is_set(path: str, name: str) -> bool:
    """Return whether a repository uses a feature."""
    return files.exists(os.path.join(path, DIRECTORY, name))
