# SPDX-License-Identifier: Apache-2.0

"""``image convert`` works with a daemon and without."""

import json

import pytest

from glance_dedup.cli import common
from tests.support import daemons
from tests.support import qcow2files
from tests.support import repositories
from tests.support.repositories import noise

DISK = [noise(qcow2files.CLUSTER // 2, seed).hex().encode()
        for seed in range(30)]
FILE = qcow2files.file_of([qcow2files.deflated(one) for one in DISK])
#: Encrypted.
BAD = FILE[:32] + b'\0\0\0\2' + FILE[36:]


@pytest.fixture
def filled(created, tmp_path):
    for name, content in (('good', FILE), ('bad', BAD), ('raw', DISK[0])):
        (tmp_path / name).write_bytes(content)
        assert created('image', 'put', name, tmp_path / name).status == 0
    return created


@pytest.fixture(params=['here', 'daemon'])
def either(request, filled):
    """Both run the same commands: with a daemon, and without."""
    if request.param == 'here':
        yield filled
        return
    with daemons.running(filled.path) as daemon:
        at = filled.options.index('--socket')
        filled.options[at + 1] = daemon.socket
        yield filled


def show(cli, image_id):
    found = cli('image', 'show', image_id, '-f', 'json').json()
    return [found[name] for name in (
        'kept', 'format', 'virtual_size', 'derived_percent', 'kept_because')]


def get(cli, image_id, tmp_path):
    assert cli('image', 'get', image_id, tmp_path / 'got').status == 0
    content = (tmp_path / 'got').read_bytes()
    (tmp_path / 'got').unlink()
    return content


def test_to_the_disk_and_back(either, tmp_path):
    row, = either('image', 'convert', '--dry-run', 'good', '-f',
                  'json').json()
    assert row['action'] == 'convert' and 'qcow2' in row['reason']
    assert show(either, 'good') == ['file', None, None, None, None]
    assert either('image', 'convert', 'good', '-f', 'json').json() == [
        {'image_id': 'good', 'result': 'done', 'reason': ''}]
    kept, name, size, derived, reason = show(either, 'good')
    assert (kept, name, size) == ('disk', 'qcow2',
                                  30 * qcow2files.CLUSTER)
    assert 60 < derived < 100 and reason is None
    assert get(either, 'good', tmp_path) == FILE
    found = either('image', 'list', '-f', 'json').json()
    good, = (row for row in found if row['image_id'] == 'good')
    assert good['size'] == len(FILE) and good['zero_bytes'] == 0
    assert either('image', 'convert', 'good', '--to', 'file').status == 0
    assert show(either, 'good')[0::4] == ['file', 'an operator wants its file']
    assert get(either, 'good', tmp_path) == FILE
    assert either('repository', 'check').status == 0


def test_images_that_stay(either, tmp_path):
    result = either('image', 'convert', 'bad', 'raw', 'none', 'good', '-f',
                    'json')
    assert result.status == common.FAILED
    bad, raw, none, good = json.loads(result.out)
    assert bad['result'] == 'unchanged' and 'encrypted' in bad['reason']
    assert raw['result'] == 'unchanged' and 'no format' in raw['reason']
    assert none['result'] == 'unchanged' and 'no image' in none['reason']
    assert good['result'] == 'done'
    assert 'image bad stays as it is: ' in result.err
    assert 'encrypted' in show(either, 'bad')[4]
    assert show(either, 'raw')[4] is None
    assert get(either, 'bad', tmp_path) == BAD


def test_figures(either):
    assert either('image', 'convert', 'good').status == 0

    def counted():
        space = either('status', '-f', 'json').json()['space']
        return (space.get('disks') == 1 and space['derived_bytes'] > 0
                and space['zero_bytes'] + space['nonzero_bytes']
                == space['logical_bytes'])
    repositories.eventually(counted)


def test_wrong_arguments(filled):
    filled('image', 'convert', 'a b').refused("'a b' is not an id")
    many = [f'i{number}' for number in range(513)]
    filled('image', 'convert', *many).refused('512 of them, not 513')
    assert filled('image', 'convert').status == common.USAGE
    assert filled('image', 'convert', 'good', '--to', 'raw'
                  ).status == common.USAGE
