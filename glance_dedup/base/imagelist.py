# SPDX-License-Identifier: Apache-2.0

"""Lists of images, or of tasks, in small files of a repository.

They are JSON with a checksum (``format-derived.rst``). The reader trusts
nothing in them; each entry's class checks its own fields.
"""

from collections.abc import Iterable
from typing import Any

from glance_dedup.base import files


def encode(kind: str, entries: Iterable[dict[str, Any]],
           of: str = 'images') -> bytes:
    """The content of a list's file.

    :param kind: which list it is
    :param of: the name of the entries, in the plural
    """
    return files.pack_json(kind, **{of: [*entries]})


def decode(content: bytes, kind: str, largest: int,
           entry: Any, of: str = 'images') -> list[Any]:
    """The entries in a file's content.

    :param largest: the most bytes that the file may have
    :param entry: called with an entry's fields as keyword arguments; makes the
        entry
    :raises ValueError: names the file's problem
    """
    try:
        entries = files.unpack_json(content, kind, largest)[of]
        if not isinstance(entries, list):
            raise TypeError(f'the {of} are not a list')
        return [entry(**found) for found in entries]
    except (KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f'it is not a list of {of}: {e!r}') from e
