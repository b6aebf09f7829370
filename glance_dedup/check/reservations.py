# SPDX-License-Identifier: Apache-2.0

"""Check the reservations of uploads with a limit: ``reservations/``.

Only limits depend on it. A file is its name, and another name counts nothing,
so it is only a *note*.
"""

import re

from glance_dedup.check import repo_directories

DIRECTORY = 'reservations'
_NAME = re.compile(
    r'lock\Z|[0-9a-f]{32}\.[0-9a-f]{32}\.(0|[1-9][0-9]{0,17})\Z')


def check(directories: repo_directories.Directories) -> None:
    """Report other names than the format has."""
    for _ in directories.known_names(
            DIRECTORY, directories.names(DIRECTORY), _NAME):
        pass
