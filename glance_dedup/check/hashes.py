# SPDX-License-Identifier: Apache-2.0

"""The kept hashes of images.

A damaged file counts as absent, so it is only a *note*.
"""

from glance_dedup.base import hashes
from glance_dedup.check import directories as directories_module
from glance_dedup.check import files
from glance_dedup.check import format as form


def check(directories: directories_module.Directories) -> None:
    """Report the files of hashes that cannot be read."""
    find = directories.findings.find
    for name in directories.names(hashes.DIRECTORY):
        file = f'{hashes.DIRECTORY}/{name}'
        try:
            hashes.decode(directories.read(file, hashes.LARGEST + 1))
        except files.Gone:
            pass
        except form.Damage as e:
            find(form.NOTE, file, e.offset, e.sentence)
        except ValueError as e:
            find(form.NOTE, file, None, f'counts as absent: {e}')
