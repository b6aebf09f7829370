# SPDX-License-Identifier: Apache-2.0

"""The file that lists hosts."""

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import hostlist


def test_file(tmp_path):
    path = tmp_path / 'hosts'
    path.write_text('# the rack\none\n\ntwo.example  # new\n')
    assert hostlist.read(path) == ('one', 'two.example')


@pytest.mark.parametrize('text, error', [
    ('', 'names no hosts'), ('# one\n', 'names no hosts'),
    ('one\n-oProxyCommand=x\n', "line 2: '-oProxyCommand=x' is no name"),
    ('a b\n', "line 1: 'a b' is no name"), ('one:4\n', 'is no name'),
    ('one\ttwo\n', 'is no name'),
    ('one\n\none # again\n', 'line 3: one is in line 1 already')])
def test_wrong_file(tmp_path, text, error):
    path = tmp_path / 'hosts'
    path.write_text(text)
    with pytest.raises(exceptions.InvalidParameter, match=error) as raised:
        hostlist.read(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize('content', [None, b'\xff\n'])
def test_file_that_cannot_be_read(tmp_path, content):
    if content is not None:
        (tmp_path / 'hosts').write_bytes(content)
    with pytest.raises(exceptions.InvalidParameter, match='cannot read'):
        hostlist.read(tmp_path / 'hosts')
