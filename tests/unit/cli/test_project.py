# SPDX-License-Identifier: Apache-2.0

"""The commands on projects work with a daemon and without."""

import csv
import io

import pytest

from tests.support import daemons
from tests.support import repositories

LENGTH = 40 * 4096


@pytest.fixture
def filled(created, tmp_path):
    """Two projects that have half of the smaller one's data in common."""
    first, second, third = (repositories.noise(LENGTH, seed)
                            for seed in range(3))
    for name, data, project in (
            ('a', first + bytes(LENGTH), 'one'),
            ('b', first + second, 'two'), ('c', second + third, 'two'),
            ('d', repositories.noise(4096, 3), '')):
        (tmp_path / name).write_bytes(data)
        assert created('image', 'put', name, tmp_path / name, '--project',
                       project).status == 0
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
        with daemon.client() as client:
            number = client.start('account')
            client.wait('account', number)
        yield filled


def rows(cli):
    return {row['project']: row for row in cli(
        'project', 'list', '-f', 'json').json()}


def test_list_and_show(either):
    result = either('project', 'count', '-f', 'json').json()
    assert result == {'projects': 3, 'images': 4, 'left_out': 0}
    found = rows(either)
    assert list(found) == ['two', 'one', '']    # the largest first
    assert found['one']['logical_bytes'] == 2 * LENGTH
    assert found['one']['exclusive_bytes'] == 0
    assert found['one']['shared_bytes'] == LENGTH
    assert found['two']['exclusive_bytes'] == 2 * LENGTH
    assert found['two']['shared_bytes'] == LENGTH
    assert found['two']['images'] == 2
    # The project shares a third of its blocks with one other project.
    assert found['two']['charged_bytes'] == pytest.approx(
        5 * found['one']['charged_bytes'], abs=3)
    shown = either('project', 'show', 'two', '-f', 'json').json()
    assert {name: shown[name] for name in found['two']} == found['two']
    assert shown['zero_bytes'] == 0 and shown['backups'] == 0
    assert shown['new_bytes'] == 2 * LENGTH
    assert shown['counted'] > 1700000000
    assert either('project', 'show', '', '-f', 'json').json()['images'] == 1
    table = either('project', 'show', 'two').out
    assert 'UTC' in table and '320 KiB' in table


def test_other_formats(either):
    either('project', 'count')
    lines = list(csv.DictReader(io.StringIO(
        either('project', 'list', '-f', 'csv').out)))
    assert lines[1]['logical_bytes'] == str(2 * LENGTH)
    assert '160 KiB' in either('project', 'list').out


def test_what_was_not_counted_is_unknown(created, tmp_path):
    assert rows(created) == {}
    (tmp_path / 'a').write_bytes(repositories.noise(LENGTH))
    created('image', 'put', 'a', tmp_path / 'a', '--project', 'one')
    assert rows(created) == {}
    created('task', 'collect')
    found = rows(created)['one']
    assert found['stored_bytes'] > LENGTH
    assert found['exclusive_bytes'] is found['charged_bytes'] is None
    assert ' - ' in created('project', 'list').out


def test_hostile_names(created, tmp_path):
    """Names of projects may have any characters, but the output is safe."""
    (tmp_path / 'a').write_bytes(b'x')
    for number, name in enumerate(('a\nb', '\x1b[31m', 'ünï')):
        created('image', 'put', str(number), tmp_path / 'a', '--project',
                name)
    created('task', 'collect')
    assert '\x1b' not in created('project', 'list').out
    assert set(rows(created)) == {'a\nb', '\x1b[31m', 'ünï'}
    assert created('project', 'show', 'a\nb', '-f', 'json').json()[
        'images'] == 1


def test_a_project_that_is_not_there(created):
    created('project', 'show', 'nobody').failed(
        "project 'nobody' has stored nothing that was counted",
        'project list')
    assert created('project', 'show').status == 2
