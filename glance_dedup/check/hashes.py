# SPDX-License-Identifier: Apache-2.0

"""The kept hashes of images.

A damaged file counts as absent, so it is only a *note*.
"""

from glance_dedup.base import hashes
from glance_dedup.check import directories as directories_module
from glance_dedup.check import format as form


def check(directories: directories_module.Directories) -> None:
    """Report the files of hashes that cannot be read."""
    for name in directories.names(hashes.DIRECTORY):
        file = f'{hashes.DIRECTORY}/{name}'
        with directories.reported(form.NOTE, file):
            try:
                hashes.decode(directories.read(file, hashes.MAX_SIZE + 1))
            except ValueError as e:
                raise form.Damage(f'counts as absent: {e}') from e
