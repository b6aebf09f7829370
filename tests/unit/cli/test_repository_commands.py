# SPDX-License-Identifier: Apache-2.0

import os
import random
import shutil

import pytest

from glance_dedup.base import signingkeys
from glance_dedup.repository import image_repository
from glance_dedup.repository import repo_parameters
from tests.unit.cli import conftest


def test_create(cli):
    found = cli('repository', 'create', '-f', 'json', '--block-size', 512,
                '--group-slots', 64, '--segment-size', 2048,
                '--fingerprint', 'blake2s256', '--verify', 'bytes').json()
    assert found == {
        'path': str(cli.path), 'repository_id': found['repository_id'],
        'format': 1, 'block_size': 512, 'group_slots': 64,
        'segment_size': 2048, 'chunking': 'fixed',
        'fingerprint': 'blake2s256', 'verify': 'bytes'}
    with image_repository.Repository(
            cli.path, filter_dir=cli.options[3], filter_mib=1) as repo:
        assert repo.repository_id == found['repository_id']
        assert repo.parameters.block_size == 512
    cli('repository', 'create').failed(str(cli.path))


def test_create_with_content_defined_chunking(cli):
    found = cli('repository', 'create', '-f', 'json',
                '--chunking', 'content-defined').json()
    assert found['chunking'] == repo_parameters.CONTENT_DEFINED
    assert found['block_size'] == repo_parameters.CONTENT_DEFINED_BLOCK


def test_create_where_something_is(cli):
    cli.path.mkdir()
    (cli.path / 'letters').touch()
    cli('repository', 'create').refused('letters')
    assert os.listdir(cli.path) == ['letters']


@pytest.mark.parametrize('options, word', [
    (('--block-size', 3000), 'block_size'),
    (('--block-size', 256), 'block_size'),
    (('--block-size', '128K'), 'block_size'),
    (('--block-size', 0), 'block_size'),
    (('--chunking', 'rabin'), 'rabin'),
    (('--chunking', 'content-defined 4096 1024'), 'the minimum, 4096'),
    (('--chunking', 'content-defined', '--block-size', 4096),
     'the average, 4096'),
    (('--group-slots', 63), 'group_slots'),
    (('--group-slots', 32769), 'group_slots'),
    (('--segment-size', 2048), 'segment_size'),
    (('--segment-size', 1 << 21), 'segment_size'),
    (('--fingerprint', 'nonsense'), 'nonsense'),
    (('--fingerprint', 'md5'), 'md5'),
    (('--fingerprint', 'shake128'), 'shake128'),
    (('--fingerprint', 'xxh3-128'), 'xxh3-128'),
    (('--fingerprint', ''), ''),
    (('--fingerprint', 'weak-8'), 'weak-8'),
    (('--fingerprint', 'x' * 300), 'x')])
def test_create_with_bad_options(cli, options, word):
    cli('repository', 'create', *options).refused(word)
    assert not cli.path.exists()


def test_create_by_value(cli):
    assert cli('repository', 'create', '--fingerprint', 'xxh3-128',
               '--verify', 'bytes').status == 0
    assert cli('repository', 'check').status == 0


@pytest.fixture
def filled(created, tmp_path):
    content = random.Random(1).randbytes(100000)
    (tmp_path / 'one').write_bytes(content + bytes(100000))
    (tmp_path / 'two').write_bytes(content)
    for name in ('one', 'two'):
        assert created('image', 'put', name, tmp_path / name).status == 0
    return created


def test_show(filled):
    found = filled('repository', 'show', '-f', 'json').json()
    assert found['block_size'] == 4096
    assert found['images'] == 2
    assert found['logical_bytes'] == 300000
    # The last block of the content includes some of the zeros.
    assert found['zero_bytes'] == 100000 - (25 * 4096 - 100000)
    assert found['groups'] == 1
    assert found['group_bytes'] > 100000
    assert found['filter_hints'] == 26
    assert 100000 < found['new_bytes'] < 110000
    assert '293 KiB' in filled('repository', 'show').out


def test_show_with_a_damaged_recipe(filled):
    path = filled.path / 'images' / 'one'
    path.write_bytes(path.read_bytes()[:-1])
    result = filled('repository', 'show', '-f', 'json')
    assert result.status == 1
    assert result.json()['images'] == 1
    assert 'one' in result.err


@pytest.mark.parametrize('command', [
    ('image', 'put', 'x', '/dev/null'), ('image', 'delete', 'x'),
    ('image', 'list'), ('task', 'collect')])
def test_a_directory_that_is_not_there(cli, command):
    found = cli(*command)
    assert found.status == 10
    for word in (f'there is no directory {cli.path}', 'mount its file system',
                 "'glance-dedup repository create'"):
        assert word in found.err


@pytest.mark.parametrize('name, content, words', [
    ('key', None, 'there is no file'), ('key', b'x', 'is damaged'),
    ('repository.json', b'{', 'it is no JSON object'),
    ('repository.json', b'[]', 'it is no JSON object'),
    ('repository.json', b'{}', "it lacks the field 'kind'")])
def test_a_damaged_file_of_its_own(filled, name, content, words):
    path = filled.path / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    for command in (('image', 'put', 'x', '/dev/null'), ('image', 'list')):
        found = filled(*command)
        assert found.status == (3 if content is None else 1)
        assert 'Error(' not in found.err
        for word in str(path), words, 'estore this one file from a backup':
            assert word in found.err


def test_rekey(filled):
    """The file has both keys until the change is finished."""
    file = filled.path / 'key'
    old = signingkeys.read(str(file)).current

    def accepted():
        return filled('repository', 'show', '-f', 'json').json()[
            'accepted_keys']

    assert accepted() == 1
    begun = filled('repository', 'rekey', '-f', 'json')
    assert begun.json() == {'path': str(filled.path), 'accepted_keys': 2}
    assert 'glance sign-locations' in begun.err and '--finish' in begun.err
    assert accepted() == 2
    filled('repository', 'rekey').refused('--finish')
    finished = filled('repository', 'rekey', '--finish', '-f', 'json')
    assert finished.json() == {'path': str(filled.path), 'accepted_keys': 1}
    assert str(file) in finished.err
    assert old not in signingkeys.read(str(file)).accepted
    filled('repository', 'rekey', '--finish').refused('no change of it')
    assert filled('repository', 'check').status == 0


def test_check(filled):
    result = filled('repository', 'check', '-f', 'json')
    assert result.status == 0
    assert result.err == ''
    found = result.json()
    assert found['result'] == 'fine'
    assert found['images'] == 2
    assert found['logical_bytes'] == 300000
    assert found['blocks_verified'] == 26
    assert found['damaged_images'] == []
    assert found['findings'] == []


def test_check_finds_damage(filled):
    path = filled.path / 'groups' / '00000001'
    with open(path, 'r+b') as f:
        f.seek(-1, os.SEEK_END)
        last = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last[0] ^ 1]))
    (filled.path / 'images' / 'a b').touch()
    result = filled('repository', 'check', '-f', 'json')
    assert result.status == 1
    found = result.json()
    assert found['result'] == 'damaged'
    assert found['damaged_images'] == ['two']
    damage = [f for f in found['findings'] if f['severity'] == 'damage']
    assert damage[0]['file'] == 'groups/00000001'
    assert damage[0]['images'] == ['two']
    assert damage[0]['offset'] > 4096
    result = filled('repository', 'check')
    assert result.status == 1
    lines = result.err.splitlines()
    assert lines[0].startswith('glance-dedup: note: images/a b: ')
    assert lines[1].startswith(
        'glance-dedup: damage: groups/00000001, offset ')
    assert 'two' in result.out
    result = filled('image', 'get', 'two', '-')
    assert result.status == 1
    assert 'groups/00000001' in result.err


def test_check_without_a_note_is_fine_with_one(filled):
    filled.path.chmod(0o755)
    result = filled('repository', 'check')
    assert result.status == 0
    assert '0755' in result.err


def test_rebuild_filter(filled):
    shutil.rmtree(filled.options[3])
    found = filled('index', 'rebuild', '-f', 'json').json()
    assert found['filter_hints'] == 26
    assert found['filter_complete']


NEEDS_ROOT = pytest.mark.skipif(
    os.getuid() != 0, reason='only root can give files away')
ANOTHER = 65534


def give_away(path, directory_mode, file_mode):
    for path in (path, *path.rglob('*')):
        path.chmod(directory_mode if path.is_dir() else file_mode)
        os.chown(path, ANOTHER, ANOTHER)


@NEEDS_ROOT
@pytest.mark.parametrize('command', [
    'repository show', 'repository check', 'repository create',
    'index rebuild', 'image list', 'image show one',
    'image put three /dev/null', 'image get one -'])
def test_of_another_user(filled, command):
    """A repository without permissions gives an error, and no damage."""
    give_away(filled.path, 0o700, 0o600)
    words = ('ermission' if command in ('repository check',
                                        'repository create')
             else 'belongs to nobody (uid 65534), and this process runs as '
             'root (uid 0)')
    filled.program(*command.split(),
                   preexec_fn=conftest.become_ordinary).failed(words)
    assert sorted(os.listdir(filled.path / 'images')) == ['one', 'two']


@NEEDS_ROOT
def test_not_writable(filled):
    """A read-only repository can be checked; storing reports the owner."""
    give_away(filled.path, 0o755, 0o644)

    def run(*arguments):
        return filled.program(
            *arguments, preexec_fn=conftest.become_ordinary)

    assert run('repository', 'check').status == 0
    run('image', 'put', 'three', '/dev/null').failed('belongs to nobody')
    result = run('image', 'delete', 'one')
    assert result.status == 3
    assert 'belongs to nobody' in result.err
    assert sorted(os.listdir(filled.path / 'images')) == ['one', 'two']
