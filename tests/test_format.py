# SPDX-License-Identifier: Apache-2.0

"""The engine's and the checker's format is that of the pages.

The engine has tables of fields, the checker formats of :mod:`struct`. Both
were written from ``format.rst``, ``format-derived.rst`` and
``format-volumes.rst``, and are compared with their tables.
"""

import pathlib
import re
import struct

import pytest

from glance_dedup.check import exact_index
from glance_dedup.check import ondisk
from glance_dedup.check import volume_reader
from tests.support import field_tables

TOP = pathlib.Path(__file__).resolve().parent.parent
FORMAT = [TOP / 'doc' / 'source' / 'contributor' / f'format{name}.rst'
          for name in ('', '-derived', '-volumes')]
#: The engine's tables that make up each table of the pages: by heading, and
#: which of the tables below it.
PLACES = {
    ('Fixed header', 0): ('grouphead.HEAD',),
    ('Published records', 0): ('grouphead.RECORD',),
    ('Fingerprint store', 0): ('fptable.ENTRY',),
    ('Segments', 0): ('segment.HEADER',),
    ('Header page', 0): ('recipe.HEADER', 'recipe.HASH'),
    ('Extent pages', 1): ('recipe.EXTENT',),
    ('Recipes of images with a disk', 0): ('recipedisk.DISK',),
    ('Recipes of images with a disk', 1): ('recipedisk.ENCODER',),
    ('Recipes of images with a disk', 2): ('recipe.DERIVED',),
    ('Fence', 0): ('fencerecord.RECORD',),
    ('The exact index', 0): ('indexhead.HEAD',),
    ('Head of a journal', 0): ('volumehead.HEAD',),
    ('Records', 0): ('volumerecord.RECORD',)}
#: The checker's formats of the same tables, and of more.
CHECKER = {
    ('Fixed header', 0): ondisk.GROUP_HEADER,
    ('Published records', 0): ondisk.RECORD,
    ('Fingerprint store', 0): ondisk.ENTRY_FIELDS,
    ('Segments', 0): ondisk.SEGMENT_FIELDS,
    ('Header page', 0): ondisk.RECIPE_HEADER,
    ('Extent pages', 0): ondisk.PAGE_HEADER,
    ('Extent pages', 1): ondisk.EXTENT_FIELDS,
    ('Recipes of images with a disk', 0): ondisk.DISK_FIELDS,
    ('Recipes of images with a disk', 1): ondisk.ENCODER_FIELDS,
    ('Recipes of images with a disk', 2): ondisk.DERIVED_FIELDS,
    ('Fence', 0): ondisk.FENCE,
    ('The exact index', 0): exact_index.HEAD,
    ('The exact index', 1): exact_index.PACKED_HEAD,
    ('Head of a journal', 0): volume_reader._FIELDS,
    ('Head of a journal', 1): volume_reader._MARK_FIELDS,
    ('Records', 0): volume_reader._RECORD}
#: Not in the pages: the filter is no part of the repository.
ALONE = {'filterhead.HEAD'}
#: The engine writes these by other means: magics, versions, checksums, a
#: group's recompression, a block's place, and whether a segment has a list.
BY_HAND = re.compile(r'magic |major version|minor version|checksum of bytes 0 '
                     r'|flags, 0|how many slots these are|(with|at) which |'
                     r'the (codec|level) (with|of) |place, |layout, '
                     r'|with a list: |low 32 bits of the checksum '
                     r'|encoders 1 to 15, ')
_HEADING = re.compile(r'^(\S.*)\n([=\-])\2+$', re.MULTILINE)
_TABLE = re.compile(r'^====== ==== =+\noffset size field.*\n=+ =+ =+\n'
                    r'((?:.+\n)+?)====== ==== =+$', re.MULTILINE)
_ROW = re.compile(r'(\d+) +(\d+) +(.*)')


def documented(heading, which):
    """Return offset, size and words of each row of a table of the pages."""
    text = '\n'.join(page.read_text() for page in FORMAT)
    headings = [*_HEADING.finditer(text)]
    found, = (n for n, one in enumerate(headings) if one[1] == heading)
    section = text[headings[found].end():headings[found + 1].start()]
    rows = _TABLE.findall(section)[which].splitlines()
    return [(int(row[1]), int(row[2]), row[3])
            for row in map(_ROW.match, rows) if row]


def items(format):
    """Yield offset and size of each item of a format, except padding."""
    offset = 0
    for count, kind in re.findall(r'(\d*)(\w)', format.removeprefix('<')):
        size = struct.calcsize(f'<{count}{kind}')
        if kind != 'x':
            yield offset, size
        offset += size


def test_every_table_has_a_place():
    assert {name for names in PLACES.values() for name in names} | ALONE == {
        *field_tables.tables()}


@pytest.mark.parametrize('place', PLACES, ids=lambda place: place[0])
def test_tables_agree(place):
    """Each row of the pages has a field of its size, and no other fields."""
    fields = {field.offset: field for name in PLACES[place]
              for field in field_tables.tables()[name]}
    for offset, size, words in documented(*place):
        field = fields.pop(offset, None)
        if words.startswith('16 counters'):
            # Each counter is a field; the engine leaves the last four.
            assert field.size == 8
            for at in range(offset + 8, offset + 12 * 8, 8):
                assert fields.pop(at).size == 8
        elif words.startswith('reserved'):
            assert field is None, (field, words)
        elif words.startswith('kind: 0 zeros, 1 blocks'):
            # The field includes the three bytes behind it, which must be
            # zeros.
            assert (field.size, size) == (4, 1)
        elif field is None:
            assert BY_HAND.match(words), words
        else:
            assert field.size == size, (field, words)
    assert not fields


@pytest.mark.parametrize('place', CHECKER,
                         ids=lambda place: f'{place[0]} {place[1]}')
def test_checker_agrees(place):
    """The checker's items are the pages' rows, from the first on."""
    found = [*items(CHECKER[place].format)]
    rows = [(offset, size) for offset, size, words in documented(*place)
            if not words.startswith('reserved') or (offset, size) in found]
    assert found == rows[:len(found)]


def test_filter():
    """The fields lie between version and checksum, and do not overlap."""
    fields = field_tables.tables()['filterhead.HEAD']
    assert [(field.offset, field.size) for field in fields] == [
        (16, 16), (32, 8), (40, 8)]
