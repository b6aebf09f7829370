# SPDX-License-Identifier: Apache-2.0

"""The engine's tables of fields on the disk, read from its sources.

See ``glance_dedup/engine/format/fields.h``.
"""

import functools
import pathlib
import re
import typing

FORMAT = (pathlib.Path(__file__).resolve().parents[2]
          / 'glance_dedup' / 'engine' / 'format')
_TABLE = re.compile(r'^#define (\w+)_FIELDS\(F\)((?:.*\\\n)+.*\n)',
                    re.MULTILINE)
_ROW = re.compile(r'\bF\((\w+), (\d+), (\d+), ([\w.]+)\)')


class Field(typing.NamedTuple):
    """A row of a table."""

    kind: str
    offset: int
    size: int
    member: str


@functools.cache
def tables() -> dict[str, tuple[Field, ...]]:
    """Return the rows of all tables, by file and table: ``recipe.HEADER``."""
    return {f'{path.stem}.{name}': tuple(
        Field(kind, int(offset), int(size), member)
        for kind, offset, size, member in _ROW.findall(rows))
        for path in sorted(FORMAT.glob('*.c'))
        for name, rows in _TABLE.findall(path.read_text())}


def span(table: str, member: str) -> slice:
    """Return the bytes of a field; of a text, without its length."""
    field, = (field for field in tables()[table]
              if field.member == member and field.kind != 'LENGTH')
    return slice(field.offset, field.offset + field.size)
