# SPDX-License-Identifier: Apache-2.0

"""Check the reservations of uploads with a limit: ``reservations/``.

Only limits depend on it, and an invalid file counts nothing, so it is only a
*note*. A crash of the machine may leave an empty one.
"""

import json
import re

from glance_dedup.check import directories as directories_module
from glance_dedup.check import format as form

DIRECTORY = 'reservations'
_LOCK = 'lock'
_NAME = re.compile(rf'[0-9a-f]{{32}}\Z|{_LOCK}\Z')
_MAX_BYTES = 4096


def check(directories: directories_module.Directories) -> None:
    """Report the files that cannot be read."""
    for name in directories.known_names(
            DIRECTORY, directories.names(DIRECTORY), _NAME):
        file = f'{DIRECTORY}/{name}'
        if name != _LOCK:
            with directories.reported(form.NOTE, file):
                _parse(directories.read(file, _MAX_BYTES + 1))


def _parse(text: bytes) -> None:
    if not text:
        return
    try:
        found = json.loads(text)
        valid = (len(text) <= _MAX_BYTES and set(found) == {'project', 'bytes'}
                 and type(found['project']) is str
                 and type(found['bytes']) is int
                 and 0 <= found['bytes'] < 1 << 63)
    except (ValueError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise form.Damage('is no reservation of an upload')
