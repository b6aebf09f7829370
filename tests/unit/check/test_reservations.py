# SPDX-License-Identifier: Apache-2.0

"""The checker checks the reservations of uploads."""

from glance_dedup.check import checker
from tests.support import repositories


def test_notes(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    directory = path / 'reservations'
    directory.mkdir(mode=0o700)
    good = ['lock', f'{1:032x}.{"a" * 32}.0', f'{2:032x}.{"a" * 32}.{10**17}']
    strange = [f'{3:032x}', f'{4:032x}.{"a" * 32}.01',
               f'{5:032x}.{"a" * 32}.{10**18}', 'other']
    for name in good + strange:
        (directory / name).touch(0o600)
    assert [(found.severity, found.file)
            for found in checker.check(path).findings] == [
        (checker.NOTE, f'reservations/{name}') for name in strange]
