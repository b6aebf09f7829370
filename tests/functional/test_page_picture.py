# SPDX-License-Identifier: Apache-2.0
"""README's picture of the status page can be made again."""

import struct

import pytest

from tests.functional import page_picture

#: README is read on slow links, too.
MAX_SIZE = 150_000


def shape(path):
    """Return a PNG's width and height; it must be small."""
    data = path.read_bytes()
    assert data.startswith(b'\x89PNG\r\n\x1a\n')
    assert len(data) < MAX_SIZE
    return struct.unpack('>II', data[16:24])


def test_the_picture_is_small():
    assert shape(page_picture.PICTURE)[0] == 1000


@pytest.mark.needs('browser')
@pytest.mark.slow
def test_the_picture_can_be_made_again(tmp_path):
    """A new picture has the same shape; times and places may differ."""
    page_picture.make(tmp_path / 'page.png')
    width, height = shape(tmp_path / 'page.png')
    then = shape(page_picture.PICTURE)
    assert width == then[0] and abs(height - then[1]) < 200
