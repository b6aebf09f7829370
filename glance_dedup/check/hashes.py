# SPDX-License-Identifier: Apache-2.0

"""The kept hashes of images.

A damaged file counts as absent, so it is only a *note*.
"""

from glance_dedup.base import hashes
from glance_dedup.check import ondisk
from glance_dedup.check import repo_directories


def check(directories: repo_directories.Directories) -> None:
    """Report the files of hashes that cannot be read."""
    for name in directories.names(hashes.DIRECTORY):
        file = f'{hashes.DIRECTORY}/{name}'
        with directories.reported(ondisk.NOTE, file):
            try:
                hashes.decode(directories.read(file, hashes.MAX_SIZE + 1))
            except ValueError as e:
                raise ondisk.Damage(f'counts as absent: {e}') from e
