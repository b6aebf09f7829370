# SPDX-License-Identifier: Apache-2.0

"""The stored estimate of the rate at which a server overwrites its disks."""

import logging

import pytest

from glance_dedup.backup import rates
from glance_dedup.base import files

SERVER = '00000000-0000-0000-0000-000000000001'


def test_a_rate_is_kept(tmp_path):
    assert rates.load(tmp_path, SERVER) == 0
    rates.save(tmp_path, SERVER, 5 << 20)
    rates.save(tmp_path, SERVER, 7 << 20)
    assert rates.load(tmp_path, SERVER) == 7 << 20
    assert rates.load(tmp_path, 'another') == 0


@pytest.mark.parametrize('data', [
    b'', b'{', b'[1]', b'{"a":' * 2000, bytes(8192),
    *(files.pack_json('rate of a server', rate=rate)
      for rate in (-1, 1.5, True, '1', None, 1 << 63)),
    files.pack_json('rate of a server'),
    files.pack_json('checkpoint of a disk', rate=1),
    files.pack_json('rate of a server', rate=1234).replace(b'1234', b'1235')])
def test_what_is_no_rate(tmp_path, data):
    (tmp_path / f'{SERVER}.rate').write_bytes(data)
    assert rates.load(tmp_path, SERVER) == 0


def test_what_is_no_file(tmp_path):
    (tmp_path / f'{SERVER}.rate').symlink_to('/dev/zero')
    assert rates.load(tmp_path, SERVER) == 0


def test_a_rate_that_cannot_be_kept(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        rates.save(tmp_path / 'missing', SERVER, 1)
    assert f'the server {SERVER} overwrites cannot be noted' in caplog.text
