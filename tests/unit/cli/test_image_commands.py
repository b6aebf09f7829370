# SPDX-License-Identifier: Apache-2.0

import hashlib
import json
import os
import random
import subprocess

import pytest

from glance_dedup.base import inputs
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository

BAD_IDS = ['', 'a/b', '../a', '/etc/passwd', '.', '..', 'a.b', 'a b', 'a\nb',
           'x' * 129, 'x' * 300, 'größe', '图像', 'صورة', 'a\0b', '\udcff']


@pytest.fixture
def content(tmp_path):
    data = random.Random(1).randbytes(300001)
    data += bytes(1 << 20) + data[:5000] + bytes(7)
    path = tmp_path / 'content'
    path.write_bytes(data)
    return path


@pytest.fixture
def stored(created, content):
    assert created('image', 'put', 'one', content).status == 0
    return created


#: The columns that show has besides those of put.
NO_DISK = {'damaged': None, 'kept': 'file', 'kept_because': None,
           'format': None, 'virtual_size': None, 'derived_percent': None}


@pytest.mark.parametrize('codec', ['none', 'lz4', 'zstd'])
def test_put_and_get(created, content, tmp_path, codec):
    data = content.read_bytes()
    found = created('image', 'put', 'one', content, '-f', 'json',
                    '--codec', codec, '--project', 'a project').json()
    assert found['image_id'] == 'one'
    assert found['size'] == len(data)
    assert found['project'] == 'a project'
    assert found['zero_bytes'] > 1 << 19
    assert 0 < found['new_bytes'] <= len(data) - found['zero_bytes']
    assert found['created'] > 1700000000
    assert len(found['upload_id']) == 32
    assert created('image', 'show', 'one', '-f', 'json').json() == (
        found | NO_DISK)
    out = tmp_path / 'out'
    result = created('image', 'get', 'one', out, '-f', 'json')
    assert result.json() == {
        'image_id': 'one', 'file': str(out), 'size': len(data)}
    assert out.read_bytes() == data
    # The zeros became a hole.
    assert out.stat().st_blocks * 512 < len(data) - (1 << 19)
    assert sorted(os.listdir(tmp_path)) == [
        'content', 'filter', 'out', 'repository']


def test_copy(created, content, tmp_path):
    first = created('image', 'put', 'one', content, '--project', 'p',
                    '-f', 'json').json()
    found = created('image', 'copy', 'one', 'two', '-f', 'json').json()
    assert (found['image_id'], found['project']) == ('two', 'p')
    assert found['size'] == first['size']
    assert found['new_bytes'] == found['stored_bytes'] == 0
    out = tmp_path / 'out'
    assert created('image', 'delete', 'one').status == 0
    assert created('image', 'get', 'two', out).status == 0
    assert out.read_bytes() == content.read_bytes()
    # Nothing may be shared with another project's scope.
    found = created('image', 'copy', 'two', 'three', '--project', 'q',
                    '--scope', 'project', '-f', 'json').json()
    assert (found['project'], found['scope']) == ('q', 'project')
    assert found['new_bytes'] > 0
    found = created('image', 'copy', 'three', 'four', '-f', 'json').json()
    assert (found['project'], found['scope'], found['new_bytes']) == (
        'q', 'project', 0)


def test_copies_that_cannot_be(created, content):
    assert created('image', 'put', 'one', content).status == 0
    result = created('image', 'copy', 'none', 'two')
    assert result.status == 3 and 'none' in result.err
    result = created('image', 'copy', 'one', 'one')
    assert result.status == 3 and 'exists already' in result.err
    result = created('image', 'copy', 'one', 'a/b')
    assert result.status == 2 and '0x2f' in result.err
    assert len(created('image', 'list', '-f', 'json').json()) == 1


def test_no_dedup(created, content):
    def put(name, *options):
        return created('image', 'put', name, content, '-f', 'json',
                       *options).json()['new_bytes']
    first = put('one')
    assert put('two', '--no-dedup') == first
    assert put('three') == 0


def test_scopes(created, content):
    def put(image_id, *options):
        found = created('image', 'put', image_id, content, '-f', 'json',
                        *options).json()
        assert created('image', 'show', image_id, '-f', 'json').json() == (
            found | NO_DISK)
        return found['scope'], found['new_bytes'] > 0
    mine = ('--project', 'p', '--scope', 'project')
    assert [put('a'), put('b', *mine), put('c', *mine),
            put('d', '--scope', 'project'), put('e', '--scope', 'global'),
            put('f', '--project', 'q', '--scope', 'project')] == [
        ('global', True), ('project', True), ('project', False),
        ('project', True), ('global', False), ('project', True)]
    assert created('image', 'put', 'g', content,
                   '--scope', 'tenant').status == 2


def test_standard_streams(created, content):
    data = content.read_bytes()
    result = created.program('image', 'put', 'one', '-', '-f', 'json',
                             input=data)
    assert result.json()['size'] == len(data)
    result = created.program('image', 'get', 'one', '-', '-f', 'json')
    assert result.status == 0
    assert result.out == data
    assert result.err == ''


@pytest.mark.parametrize('size', [0, 1, 4095, 4096, 4097])
@pytest.mark.parametrize('fill', [b'\0', b'x'])
def test_small_images(created, tmp_path, size, fill):
    (tmp_path / 'in').write_bytes(fill * size)
    assert created('image', 'put', 'a', tmp_path / 'in').status == 0
    assert created('image', 'get', 'a', tmp_path / 'out').status == 0
    assert (tmp_path / 'out').read_bytes() == fill * size


@pytest.mark.parametrize('image_id', BAD_IDS)
def test_bad_ids(created, tmp_path, image_id):
    created('image', 'put', image_id, '/dev/null').refused()
    created('image', 'get', image_id, tmp_path / 'out').refused()
    created('image', 'show', image_id).refused()
    result = created('image', 'delete', image_id, '-f', 'json')
    assert result.status == 2
    for directory in ('images', 'spool'):
        assert os.listdir(created.path / directory) == []
    assert not (tmp_path / 'out').exists()


def test_ids_that_look_like_options(created, content, tmp_path):
    for image_id in ('-f', '--force', '-', '_', 'x' * 128):
        assert created('image', 'put', '--', image_id, content).status == 0
        assert created('image', 'get', '--', image_id,
                       tmp_path / 'out').status == 0
        (tmp_path / 'out').unlink()
        assert created('image', 'delete', '--', image_id).status == 0


def test_same_id_twice(stored, content):
    before = stored('image', 'show', 'one', '-f', 'json').json()
    stored('image', 'put', 'one', content).failed('one')
    assert stored('image', 'show', 'one', '-f', 'json').json() == before
    assert len(os.listdir(stored.path / 'spool')) == 1


def test_bad_sources(created, tmp_path):
    created('image', 'put', 'a', tmp_path / 'missing').failed('missing')
    created('image', 'put', 'a', tmp_path).failed(str(tmp_path))
    created('image', 'put', 'a', 'x\0y').refused()
    created('image', 'put', 'a', '').failed()
    created('image', 'put', 'a', '/proc/self/mem').failed()
    assert os.listdir(created.path / 'images') == []
    assert os.listdir(created.path / 'spool') == []


def test_source_that_is_no_file(created):
    """A pipe has no size that the command could read before the data."""
    read, write = os.pipe()
    os.write(write, b'content')
    os.close(write)
    found = created('image', 'put', 'a', f'/dev/fd/{read}', '-f', 'json')
    os.close(read)
    assert found.json()['size'] == 7


def test_get_overwrites_only_by_force(stored, content, tmp_path):
    out = tmp_path / 'out'
    out.write_text('precious')
    out.chmod(0o640)
    stored('image', 'get', 'one', out).refused('out', '--force')
    assert out.read_text() == 'precious'
    assert stored('image', 'get', 'one', out, '--force').status == 0
    assert out.read_bytes() == content.read_bytes()
    assert out.stat().st_mode & 0o777 == 0o640


def test_get_of_a_damaged_image_leaves_no_file(stored, tmp_path):
    group = stored.path / 'groups' / '00000001'
    data = bytearray(group.read_bytes())
    data[-1] ^= 1
    group.write_bytes(data)
    result = stored('image', 'get', 'one', tmp_path / 'out')
    assert result.status == 1
    assert 'groups/00000001' in result.err
    assert sorted(os.listdir(tmp_path)) == [
        'content', 'filter', 'repository']


def test_get_to_a_full_disk(stored):
    with open('/dev/full', 'w') as full:
        process = stored.start('image', 'get', 'one', '-', stdout=full,
                               stderr=subprocess.PIPE)
        error = process.stderr.read().decode()
    assert process.wait(60) == 3
    process.stderr.close()
    assert 'standard output' in error and 'No space left' in error
    assert len(error.splitlines()) == 1


def test_unknown_images(created, tmp_path):
    created('image', 'get', 'a', tmp_path / 'out').failed('a')
    created('image', 'show', 'a').failed('a')
    result = created('image', 'delete', 'a', '-f', 'json')
    assert result.status == 3
    assert not (tmp_path / 'out').exists()


def test_delete(stored, content):
    stored('image', 'put', 'two', content)
    result = stored('image', 'delete', 'one', 'three', 'two', '-f', 'json')
    assert result.status == 3
    assert 'three' in result.err
    assert [(row['image_id'], row['deleted'])
            for row in json.loads(result.out)] == [
        ('one', True), ('three', False), ('two', True)]
    assert stored('image', 'list', '-f', 'json').json() == []
    assert stored('image', 'put', 'one', content).status == 0
    result = stored('image', 'delete', 'one', '-f', 'json')
    assert result.json() == [
        {'image_id': 'one', 'deleted': True, 'error': ''}]


def test_list(stored, content):
    stored('image', 'put', 'a', content, '--project', 'p')
    found = stored('image', 'list', '-f', 'json').json()
    assert [row['image_id'] for row in found] == ['a', 'one']
    size = content.stat().st_size
    assert [row['size'] for row in found] == [size, size]
    assert found[0]['project'] == 'p'
    assert found[0]['stored_bytes'] == 0
    assert found[0]['saved_percent'] == 100.0
    assert found[1]['stored_bytes'] > 300000
    result = stored('image', 'list')
    assert '1.3 MiB' in result.out
    assert result.err == ''


def test_delete_and_collect_in_one_process(stored, content, tmp_path):
    (tmp_path / 'other').write_bytes(random.Random(2).randbytes(40 * 4096))
    for image_id in ('two', 'three'):
        assert stored('image', 'put', image_id,
                      tmp_path / 'other').status == 0
    result = stored('image', 'delete', 'two', '-f', 'json')
    assert result.err == '' and len(result.json()) == 1
    result = stored('image', 'delete', 'three', 'none', '--collect',
                    '-f', 'json')
    assert result.status == 3
    assert [row['deleted'] for row in json.loads(result.out)] == [
        True, False]
    assert 'none' in result.err.splitlines()[0]
    assert ' 40 blocks were freed; ' in result.err
    assert stored('task', 'collect', '-f', 'json').json()['freed_blocks'] == 0


def test_deleted_images_are_told_if_the_collection_fails(stored):
    with image_repository.Repository(stored.path) as repo, \
            maintainer_role.Maintainer(repo):
        result = stored('image', 'delete', 'one', '--collect', '-f', 'json')
    assert result.status == 11
    assert [row['deleted'] for row in json.loads(result.out)] == [True]
    assert 'maintainer' in result.err


def test_list_opens_only_recipes_that_are_not_counted(
        stored, content, tmp_path, monkeypatch):
    def listed():
        opened.clear()
        return {row['image_id']: row
                for row in stored('image', 'list', '-f', 'json').json()}
    opened: list[str] = []
    stat = image_repository.Repository.stat

    def noted(self, image_id):
        opened.append(image_id)
        return stat(self, image_id)
    monkeypatch.setattr(image_repository.Repository, 'stat', noted)
    assert stored('image', 'put', 'two', content).status == 0
    before = listed()
    assert opened == ['one', 'two']
    assert stored('task', 'collect').status == 0
    counted = listed()
    assert opened == [] and counted.keys() == before.keys()
    for image_id, row in counted.items():
        # Without a catalog the damage was not known.
        assert row == {**before[image_id], 'damaged': False}
    # The list has the current state of images changed since.
    for image_id in ('one', 'two'):
        assert stored('image', 'delete', image_id).status == 0
    (tmp_path / 'other').write_bytes(b'x' * 5000)
    for image_id in ('two', 'three'):
        assert stored('image', 'put', image_id, tmp_path / 'other',
                      '--project', 'new').status == 0
    now = listed()
    assert opened == ['three', 'two'] == list(now)
    assert {(row['size'], row['project']) for row in now.values()} == {
        (5000, 'new')}


def test_list_with_damage_and_unknown_names(stored):
    path = stored.path / 'images' / 'one'
    path.write_bytes(path.read_bytes()[:-1])
    (stored.path / 'images' / 'a b').touch()
    result = stored('image', 'list', '-f', 'json')
    assert result.status == 1
    assert result.json() == []
    # Only the check reports the other name.
    assert len(result.err.splitlines()) == 1


def test_progress_of_long_work(stored, content, monkeypatch):
    from glance_dedup.cli import progress_bar
    monkeypatch.setattr(progress_bar.Progress, 'INTERVAL',
                        {True: 0, False: 0})
    size = content.stat().st_size
    result = stored('image', 'put', 'two', content)
    assert result.err.startswith(
        'storing two: 100 %, 1.3 MiB of 1.3 MiB, ')
    result = stored('image', 'get', 'two', content, '--force')
    assert result.err.splitlines()[-1].startswith(
        'reading two: 100 %, 1.3 MiB of 1.3 MiB, ')
    assert content.stat().st_size == size
    assert 'checking: ' in stored('repository', 'check').err
    assert 'rebuilding: 100 %, 1 of 1 groups' in stored(
        'index', 'rebuild').err
    assert stored('-q', 'repository', 'check').err == ''


def test_names_are_only_text(created, tmp_path):
    """Control characters in a name are shown as text."""
    (tmp_path / 'image').write_bytes(b'x' * 5000)
    project = 'p\x1b[2J\x9b31m\u202e'
    assert created('image', 'put', 'a', tmp_path / 'image', '--project',
                   project).status == 0
    for options in ((), ('-f', 'value'), ('-f', 'shell')):
        for command in (('image', 'show', 'a'), ('image', 'list', '-c',
                                                 'project')):
            if command[1] == 'list' and options == ('-f', 'shell'):
                continue
            out = created(*command, *options).out
            assert '\x1b' not in out and '\x9b' not in out, command
            assert '\u202e' not in out
            assert '\\x1b[2J' in out
    assert created('image', 'show', 'a', '-f', 'json').json()[
        'project'] == project
    found = created('--repository', tmp_path / 'no\x1b[2J', 'image', 'list')
    assert '\x1b' not in found.err and '\\x1b[2J' in found.err


# -- stored content -----------------------------------------------------------

def test_a_file_that_changes_while_it_is_stored(created, content, monkeypatch):
    """A file that changes while it is read is refused: it may be a mixture."""
    read = inputs.InputFile.read

    def changing(self, length):
        piece = read(self, length)
        if not piece:
            os.utime(self.path, (1, 1))
        return piece
    monkeypatch.setattr(inputs.InputFile, 'read', changing)
    created('image', 'put', 'a', content).failed(
        str(content), 'changed while it was read')
    assert created('image', 'list', '-f', 'json').json() == []


def test_holes_of_a_file_are_not_read(created, tmp_path):
    with open(tmp_path / 'disk', 'wb') as f:
        f.truncate(64 << 30)
        f.seek(1 << 30)
        f.write(b'data')
    stored = created('image', 'put', 'a', tmp_path / 'disk', '-f', 'json'
                     ).json()
    assert stored['size'] == 64 << 30
    assert stored['zero_bytes'] == (64 << 30) - 4096


def checksum(data, name='sha256'):
    return f'{name}:{hashlib.new(name, data).hexdigest()}'


def test_a_pipe_that_broke_off(created):
    """The user's size or checksum detects a pipe that broke off."""
    data = random.Random(1).randbytes(300000)
    for options, came, words in (
            (['--size', '300000'], data[:-1], 'only 299999 came'),
            (['--size', '299999'], data, 'more came'),
            (['--checksum', checksum(data)], data[:-1], 'nothing was stored'),
            (['--checksum', checksum(data, 'md5')], b'', 'nothing was')):
        found = created.program('image', 'put', 'a', '-', *options, input=came)
        assert found.status == 3 and words in found.err, found.err
    assert created('image', 'list', '-f', 'json').json() == []
    capitals = f'sha1:{hashlib.sha1(data).hexdigest().upper()}'
    for number, options in enumerate((
            ['--size', '300000'], ['--checksum', capitals],
            ['--checksum', checksum(data, 'sha512')])):
        assert created.program('image', 'put', f'a{number}', '-', *options,
                               input=data).status == 0


@pytest.mark.parametrize('word', [
    'sha256', 'sha256:', 'sha256:00', 'crc32:00000000', f'sha1:{"g" * 40}',
    f'shake_128:{"0" * 32}'])
def test_no_checksum(created, content, word):
    found = created('image', 'put', 'a', content, '--checksum', word)
    assert found.status == 2 and 'is not a checksum' in found.err


@pytest.mark.parametrize('word', ['-1', '1.5', '1e3', '', '9' * 30, '1g'])
def test_no_size(created, content, word):
    found = created('image', 'put', 'a', content, f'--size={word}')
    assert found.status == 2 and 'is no size' in found.err
