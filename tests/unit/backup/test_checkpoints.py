# SPDX-License-Identifier: Apache-2.0

"""A host's notes of checkpoints.

The file ``tests/functional/test_running_servers.py`` has the tests with real
servers.
"""

import json

import pytest

from glance_dedup.backup import checkpoints
from glance_dedup.backup import views
from glance_dedup.base import files
from tests.support import sources

SERVER = '0b4ba7a6-6fbe-4cd5-a1c0-0d9e06bb4d53'
NAMES = [f'{checkpoints.PREFIX}{number:016x}' for number in range(3)]


@pytest.fixture
def place(tmp_path):
    with sources.place(tmp_path) as found:
        checkpoints.Known(
            SERVER, NAMES[0], views.Base(sources.BACKUP, sources.UPLOAD),
            1 << 30, [NAMES[1]]).save(found)
        yield found


def test_it_is_read_back(place):
    known = checkpoints.load(place, SERVER)
    assert known.checkpoint == NAMES[0] and known.others == [NAMES[1]]
    assert known.base == (sources.BACKUP, sources.UPLOAD)
    checkpoints.announce(place, known, NAMES[2])
    assert checkpoints.load(place, SERVER).others == NAMES[1:]


def test_of_another_server_or_repository_it_says_nothing(place, tmp_path):
    nothing = checkpoints.Known('other')
    assert checkpoints.load(place, 'other') == nothing
    place.close()
    with sources.place(tmp_path, repository_id='ef' * 16) as other:
        assert not checkpoints.load(other, SERVER).checkpoint


@pytest.mark.parametrize('fields', [
    {'checkpoint': 'somebody-elses'}, {'checkpoint': 1}, {'others': ['x']},
    {'others': 1}, {'others': None}, {'size': 'x'}, {'backup_id': 1},
    {'checkpoint': NAMES[0] + "'/><disk"}, {'others': [[]]}])
def test_forged_fields_say_nothing(place, fields):
    """A record with forged fields counts as empty.

    The names in it would go into requests to libvirt.
    """
    path = place.path('checkpoint')
    with open(path) as f:
        found = json.load(f)
    del found['kind'], found['version'], found['checksum']
    with open(path, 'wb') as f:
        f.write(files.pack_json('checkpoint of a disk',
                                **{**found, **fields}))
    assert checkpoints.load(place, SERVER) == checkpoints.Known(SERVER)


@pytest.mark.parametrize('data', [b'', b'{}', b'[]', b'\xff' * 100,
                                  b'x' * 100000, b'[' * 16000])
def test_what_is_no_note(place, data):
    with open(place.path('checkpoint'), 'wb') as f:
        f.write(data)
    assert checkpoints.load(place, SERVER) == checkpoints.Known(SERVER)
