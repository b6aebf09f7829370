# SPDX-License-Identifier: Apache-2.0

"""What the checker says of reservations of uploads."""

import os

from glance_dedup.check import checker
from tests.support import repositories


def test_notes(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    directory = path / 'reservations'
    directory.mkdir(mode=0o700)
    for name, content in (
            ('lock', b''), ('1' * 32, b'{"project": "p", "bytes": 1}'),
            ('2' * 32, b''), ('3' * 32, b'?'), ('4' * 32, b'[' * 5000),
            ('other', b'')):
        (directory / name).write_bytes(content)
        os.chmod(directory / name, 0o600)
    assert [(found.severity, found.file)
            for found in checker.check(path).findings] == [
        (checker.NOTE, f'reservations/{name}')
        for name in ('other', '3' * 32, '4' * 32)]
