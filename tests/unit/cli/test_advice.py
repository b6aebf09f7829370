# SPDX-License-Identifier: Apache-2.0

"""Commands that messages advise, run in the state in which they are advised.

A test makes the state, looks for the command in the message, and runs it.
"""

import os
import re
import shlex
import shutil
import subprocess

import pytest

from tests.support import repositories

BLOCK = 4096


def advised(text, command):
    """The arguments of a command that a message names."""
    words = ' '.join(text.replace('|', ' ').split())
    assert f'glance-dedup {command}' in words, text
    return command.split()


def put(cli, image_id, data, *options):
    file = cli.path.parent / 'content'
    file.write_bytes(data)
    result = cli('image', 'put', image_id, file, *options)
    assert result.status == 0, result.err


def check(cli):
    """The findings of a check, by their files."""
    found = cli('repository', 'check', '-f', 'json').json()
    return {finding['file']: finding['sentence']
            for finding in found['findings']}


def test_there_is_no_repository(cli):
    said = cli('image', 'list')
    said.no_repository(str(cli.path))
    assert cli(*advised(said.err, 'repository create')).status == 0
    assert cli('image', 'list').status == 0


def test_the_creation_did_not_end(created):
    (created.path / 'repository.json').unlink()
    said = check(created)['repository.json']
    assert created(*advised(said, 'repository create')).status == 0
    assert check(created) == {}
    put(created, 'image', repositories.noise(3 * BLOCK))


@pytest.mark.parametrize('line', ['image list', 'repository create', 'status',
                                  'task collect'])
def test_the_description_is_lost(created, line):
    """Once a maintainer was there, its file has to come from a backup."""
    assert created('task', 'collect').status == 0
    file = created.path / 'repository.json'
    backup = file.rename(created.path.parent / 'backup')
    said = created(*line.split())
    assert said.status in (2, 10)
    assert 'estore the file from a backup' in said.err
    backup.rename(file)
    assert created('task', 'collect').status == 0
    assert check(created) == {}


def test_a_change_of_the_key(created):
    """It is finished before another one begins."""
    said = created('repository', 'rekey', '--finish')
    assert created(*advised(said.err, 'repository rekey')).status == 0
    said = created('repository', 'rekey')
    finish = advised(said.err, 'repository rekey --finish')
    assert created(*finish).status == 0
    assert created('repository', 'rekey').status == 0
    said = created('upgrade', 'check')
    assert created(*advised(said.out, ' '.join(finish))).status == 0
    assert 'rekey' not in created('upgrade', 'check').out


def test_recipes_of_a_volume_that_is_gone(created):
    name = 'v_' + 'a' * 32 + '_0_1'
    with repositories.open_repository(created.path) as repo:
        transaction = repo.handle().begin(name, '')
        transaction.write(repositories.noise(3 * BLOCK))
        transaction.commit()
    said = check(created)[f'images/{name}']
    assert created(*advised(said, f'image delete {name}')).status == 0
    assert check(created) == {}


def test_a_counted_recipe_is_lost(created):
    """Somebody removed its file; the rebuilt catalog gives it up."""
    put(created, 'lost', repositories.noise(30 * BLOCK))
    put(created, 'stays', repositories.noise(30 * BLOCK, 2))
    assert created('task', 'collect').status == 0
    recipe = created.path / 'images' / 'lost'
    recipe.rename(created.path.parent / 'moved')
    said = created('task', 'collect')
    assert 'image lost is counted' in said.err
    assert created(*advised(
        said.err, 'repository rebuild-catalog')).status == 0
    again = created('task', 'collect')
    assert again.status == 0 and 'image lost' not in again.err
    with repositories.open_repository(created.path) as repo:
        assert repositories.read_all(repo, 'stays') == (
            repositories.noise(30 * BLOCK, 2))
    # The blocks of the image are gone.
    shutil.copy(created.path.parent / 'moved', recipe)
    assert created('image', 'get', 'lost',
                   created.path.parent / 'got').status == 1


def test_a_backup_of_the_future(created):
    name = 'b_web_20990101T010000Z'
    with repositories.open_repository(created.path) as repo:
        repositories.put(repo, name, b'future')
    said = created('backup', 'list', 'web')
    words, = re.findall(rf'{name},.* or delete the backup \((.*?)\)', said.err)
    assert created(*words.split(), name).status == 0
    said = created('backup', 'list')
    assert said.status == 0 and not said.err


def test_a_project_that_has_nothing(created):
    put(created, 'image', b'data', '--project', 'one')
    assert created('project', 'count').status == 0
    said = created('project', 'show', 'other')
    assert said.status == 3
    assert 'one' in created(
        *advised(said.err, 'project list')).out


@pytest.mark.skipif(os.geteuid() != 0, reason='only root can change owners')
def test_a_stray_chown(created):
    put(created, 'image', b'data')
    os.chown(created.path, 12345, 12345)
    said = created('image', 'show', 'image')
    command, = re.findall('chown -R USER:GROUP .*$', said.err)
    command = command.replace('USER:GROUP', f'{os.geteuid()}:{os.getegid()}')
    subprocess.run(shlex.split(command), check=True, timeout=60)
    assert created('image', 'show', 'image').status == 0
