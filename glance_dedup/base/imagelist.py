# SPDX-License-Identifier: Apache-2.0

"""Lists of images, or of tasks, in small files of a repository.

They are JSON with a checksum (``format.rst``, "Lists of images"). The reader
trusts nothing in them; each entry's class checks its own fields.
"""

from collections.abc import Iterable
import json
from typing import Any

from glance_dedup.base import files

_VERSION = 1


def encode(kind: str, entries: Iterable[dict[str, Any]],
           of: str = 'images') -> bytes:
    """The content of a list's file.

    :param kind: which list it is
    :param of: the name of the entries, in the plural
    """
    fields = {'kind': kind, 'version': _VERSION, of: [*entries]}
    fields['checksum'] = files.json_checksum(fields)
    return json.dumps(fields).encode() + b'\n'


def decode(content: bytes, kind: str, largest: int,
           entry: Any, of: str = 'images') -> list[Any]:
    """The entries in a file's content.

    :param largest: the most bytes that the file may have
    :param entry: called with an entry's fields as keyword arguments; makes the
        entry
    :raises ValueError: says what is wrong with the file
    """
    if len(content) > largest:
        raise ValueError(f'it is larger than {largest} bytes')
    try:
        fields = json.loads(content)
        if fields['kind'] != kind:
            raise ValueError('it is of another kind')
        if fields['version'] != _VERSION:
            raise ValueError(f'it has version {fields["version"]!r}, and this '
                             f'program knows {_VERSION}')
        if fields.pop('checksum') != files.json_checksum(fields):
            raise ValueError('its checksum is wrong')
        if not isinstance(fields[of], list):
            raise TypeError(f'the {of} are not a list')
        return [entry(**found) for found in fields[of]]
    except (KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f'it is not a list of {of}: {e!r}') from e
