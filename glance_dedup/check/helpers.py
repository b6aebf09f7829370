# SPDX-License-Identifier: Apache-2.0

"""The notes of daemons for the maintainer, in ``helpers/``.

They are hints, and an invalid file is forgotten, so it is only a *note*.
"""

import re

from glance_dedup.check import directories as directories_module
from glance_dedup.check import format as form
from glance_dedup.check import json_objects

DIRECTORY = 'helpers'
# Daemons have numbers below 64. A daemon that is killed may leave the second.
_NAME = re.compile(r'([0-9]|[1-5][0-9]|6[0-3])\.json(\.new)?\Z')
#: Of each list, how many items an entry has; 1: it is no list.
_LISTS = {'found': (1,), 'unreadable': (2,), 'kept': (3, 4)}


def check(directories: directories_module.Directories) -> None:
    """Report the files of notes that cannot be read."""
    names = directories.known_names(DIRECTORY, directories.names(DIRECTORY),
                                    _NAME)
    for name in names:
        if name.endswith('.new'):
            continue
        file = f'{DIRECTORY}/{name}'
        with directories.reported(form.NOTE, file):
            _parse(directories.read(file, form.MAX_NOTES + 1))


def _parse(text: bytes) -> None:
    if len(text) > form.MAX_NOTES:
        raise form.Damage(f'is longer than {form.MAX_NOTES} bytes')
    found = json_objects.load(text, 'glance-dedup helper')
    if found.get('version') != 1:
        version = form.printable(str(found.get('version')))
        raise form.Damage(f'has version {version}; this program reads 1')
    json_objects.require_checksum(found)
    if not isinstance(found.get('host'), str):
        raise form.Damage('has no host')
    if not isinstance(found.get('scrub'), dict):
        raise form.Damage('has no cursor')
    for key, widths in _LISTS.items():
        entries = found.get(key)
        if not isinstance(entries, list) or not all(
                _has_width(entry, widths) for entry in entries):
            raise form.Damage(f'has no list {key!r}')


def _has_width(entry: object, widths: tuple[int, ...]) -> bool:
    if widths == (1,):
        return type(entry) is int
    return isinstance(entry, list) and len(entry) in widths
