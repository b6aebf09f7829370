# SPDX-License-Identifier: Apache-2.0

"""The file with hosts."""

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import hostlist


def test_hosts_file(tmp_path):
    path = tmp_path / 'hosts'
    path.write_text('# the rack\none\n\ntwo.example  # new\n')
    assert hostlist.read(path) == ('one', 'two.example')
    for text in '', '-oProxyCommand=x\n', 'a b\n', 'one:4\n':
        path.write_text(text)
        with pytest.raises(exceptions.InvalidParameter, match=str(path)):
            hostlist.read(path)
