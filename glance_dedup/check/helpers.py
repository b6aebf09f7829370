# SPDX-License-Identifier: Apache-2.0

"""The notes of daemons for the maintainer, in ``helpers/``.

They are hints, and an invalid file is forgotten, so it is only a *note*.
"""

import re

from glance_dedup.check import json_objects
from glance_dedup.check import ondisk
from glance_dedup.check import repo_directories

DIRECTORY = 'helpers'
# Daemons have numbers below 64. A daemon that is killed may leave the second.
_NAME = re.compile(r'([0-9]|[1-5][0-9]|6[0-3])\.json(\.new)?\Z')
#: Of each list, the number of items in an entry; 1: it is no list.
_LISTS = {'found': (1,), 'unreadable': (2,), 'kept': (3, 4)}


def check(directories: repo_directories.Directories) -> None:
    """Report the files of notes that cannot be read."""
    names = directories.known_names(DIRECTORY, directories.names(DIRECTORY),
                                    _NAME)
    for name in names:
        if name.endswith('.new'):
            continue
        file = f'{DIRECTORY}/{name}'
        with directories.reported(ondisk.NOTE, file):
            _parse(directories.read(file, ondisk.MAX_NOTES + 1))


def _parse(text: bytes) -> None:
    if len(text) > ondisk.MAX_NOTES:
        raise ondisk.Damage(f'is longer than {ondisk.MAX_NOTES} bytes')
    found = json_objects.load(text, 'glance-dedup helper')
    if found.get('version') != 1:
        version = ondisk.printable(str(found.get('version')))
        raise ondisk.Damage(f'has version {version}; this program reads 1')
    json_objects.require_checksum(found)
    if not isinstance(found.get('host'), str):
        raise ondisk.Damage('has no host')
    if not isinstance(found.get('scrub'), dict):
        raise ondisk.Damage('has no cursor')
    for key, widths in _LISTS.items():
        entries = found.get(key)
        if not isinstance(entries, list) or not all(
                _has_width(entry, widths) for entry in entries):
            raise ondisk.Damage(f'has no list {key!r}')


def _has_width(entry: object, widths: tuple[int, ...]) -> bool:
    if widths == (1,):
        return type(entry) is int
    return isinstance(entry, list) and len(entry) in widths
