# SPDX-License-Identifier: Apache-2.0

import contextlib
import json
import random
import re

import pytest

from glance_dedup.repository import openvolumes
from tests.support import repositories
from tests.support.repositories import noise
from tests.support import volume_servers

MIB = 1 << 20


@pytest.fixture
def made(cli):
    """A repository that may have volumes."""
    result = cli('repository', 'create')
    assert result.status == 0, result.err
    return cli


@pytest.fixture
def content(tmp_path):
    data = random.Random(1).randbytes(300001) + bytes(MIB)
    path = tmp_path / 'content'
    path.write_bytes(data)
    return path


@pytest.fixture
def repo(made, tmp_path):
    with repositories.open_repository(
            made.path, filter_dir=str(tmp_path / 'filter')) as repo:
        yield repo


# -- sizes --------------------------------------------------------------------

@pytest.mark.parametrize('text', ['-1', '1.5G', '10 G'])
def test_texts_that_are_no_sizes(made, text):
    result = made('volume', 'create', 'disk', '--', text)
    assert result.status == 2 and 'is no size' in result.err


# -- the commands -------------------------------------------------------------

def test_create_list_show_delete(made):
    found = made('volume', 'create', 'disk', '10G', '--project', 'p',
                 '--scope', 'project', '-f', 'json').json()
    assert (found['name'], found['size'], found['state'], found['in_use']) == (
        'disk', 10 << 30, 'ready', False)
    assert (found['project'], found['scope'], found['source']) == (
        'p', 'project', '')
    assert found['created'] > 1700000000 and len(found['volume_id']) == 32
    assert found['written_bytes'] == found['checkpoints'] == 0
    assert found['journal_bytes'] is None and found['broken'] == ''
    assert found['index'] == '' and found['index_complete'] is None
    assert found['index_bytes'] is found['index_dropped'] is None
    assert made('volume', 'show', 'disk', '-f', 'json').json() == found
    listed = made('volume', 'list', '-f', 'json').json()
    assert listed == [{key: found[key] for key in (
        'name', 'size', 'state', 'in_use', 'source', 'created', 'project')}]
    result = made('volume', 'list')
    assert '10.0 GiB' in result.out and 'no' in result.out
    result = made('volume', 'delete', 'disk', 'none', '-f', 'json')
    assert result.status == 3
    assert [row['deleted'] for row in json.loads(result.out)] == [True, False]
    assert 'there is no volume none' in result.err
    assert made('volume', 'list', '-f', 'json').json() == []


def test_wrong_arguments(made, content):
    assert made('image', 'put', 'image', content).status == 0
    assert made('volume', 'create', 'disk', '1M').status == 0
    made('volume', 'create', 'disk', '1M').failed('disk exists already')
    made('volume', 'create', 'a.b', '1M').refused('64 characters')
    made('volume', 'create', 'other', '1000').refused('512', '1000')
    made('volume', 'create', 'other', '0').refused('size')
    made('volume', 'show', 'none').failed('there is no volume none')
    made('volume', 'resize', 'none', '1M').failed('there is no volume none')
    made('volume', 'snapshot', 'none', 'x').failed('there is no volume none')
    made('volume', 'snapshot', 'disk', 'image').failed('exists already')
    made('volume', 'snapshot', 'disk', 'a/b').refused('0x2f')
    made('volume', 'snapshot', 'disk', f'v_{"a" * 32}_0_1').refused('no image')
    made('volume', 'clone', 'none', 'other').failed('none')
    made('volume', 'clone', 'image', 'other', '--size', '1M').refused(
        'less than')
    assert [row['name'] for row in made(
        'volume', 'list', '-f', 'json').json()] == ['disk']


def test_clone_and_snapshot(made, content, tmp_path):
    data = content.read_bytes()
    stored = made('image', 'put', 'image', content, '--project', 'p',
                  '-f', 'json').json()
    found = made('volume', 'clone', 'image', 'disk', '--size', '2M',
                 '-f', 'json').json()
    assert (found['size'], found['source'], found['project'], found['scope'],
            found['copied_bytes']) == (2 * MIB, 'image', 'p', 'global', 0)
    found = made('volume', 'clone', 'image', 'rounded', '-f', 'json').json()
    assert found['size'] == -(-stored['size'] // 512) * 512
    found = made('volume', 'clone', 'image', 'apart', '--project', 'q',
                 '--scope', 'project', '-f', 'json').json()
    assert (found['project'], found['scope'], found['copied_bytes']) == (
        'q', 'project', len(data.rstrip(b'\0')) // 4096 * 4096 + 4096)
    assert made('image', 'delete', 'image').status == 0
    for name, project in (('disk', 'p'), ('apart', 'q')):
        found = made('volume', 'snapshot', name, f'of-{name}',
                     '-f', 'json').json()
        assert (found['project'], found['new_bytes']) == (project, 0)
        shown = made('image', 'show', f'of-{name}', '-f', 'json').json()
        assert found.items() <= shown.items()
        assert (shown['damaged'], shown['kept']) == (None, 'file')
        out = tmp_path / name
        assert made('image', 'get', f'of-{name}', out).status == 0
        assert out.read_bytes()[:len(data)] == data
    found = made('volume', 'snapshot', 'disk', 'other', '--project', 'r',
                 '-f', 'json').json()
    assert (found['project'], found['size']) == ('r', 2 * MIB)
    assert made('volume', 'delete', 'disk').status == 0
    assert made('image', 'show', 'of-disk').status == 0


@pytest.mark.parametrize('is_served', [False, True])
def test_snapshot_for_another_project_shares_nothing(made, repo, content,
                                                     is_served):
    """A snapshot for another project is refused: the scope is not its own."""
    made('image', 'put', 'base', content, '--project', 'p1', '--scope',
         'project')
    made('volume', 'clone', 'base', 'disk', '--size', '2M')
    with contextlib.ExitStack() as stack:
        if is_served:
            stack.enter_context(volume_servers.serving(repo, 'disk'))
        for project in ('p3', '', 'p'):
            made('volume', 'snapshot', 'disk', 'snap', '--project', project
                 ).refused("only within its project, 'p1'", 'image copy')
        assert repo.images() == ['base']
        assert made('volume', 'snapshot', 'disk', 'snap', '--project', 'p1',
                    '-f', 'json').json()['new_bytes'] == 0
    # The message recommends this command.
    found = made('image', 'copy', 'snap', 'theirs', '--project', 'p3', '-f',
                 'json').json()
    assert (found['project'], found['scope']) == ('p3', 'project')
    assert found['new_bytes'] > 0
    repo.close()
    assert repositories.require_clean(made.path).findings == []


def test_resize(made, repo):
    assert made('volume', 'create', 'disk', '1M').status == 0
    found = made('volume', 'resize', 'disk', '2M', '-f', 'json').json()
    assert found['size'] == 2 * MIB
    made('volume', 'resize', 'disk', '1M').refused('--shrink', 'lost')
    made('volume', 'resize', 'disk', '2M', '--reconnect', '-f', 'json').json()
    assert openvolumes.look(repo, 'disk').size == 2 * MIB
    found = made('volume', 'resize', 'disk', '512', '--shrink',
                 '-f', 'json').json()
    assert found['size'] == 512


def test_a_volume_that_is_served(made, repo):
    """The server of a volume runs the operations that need its owner."""
    openvolumes.create(repo, 'disk', MIB, project='a project')
    with volume_servers.serving(repo, 'disk') as server:
        server.volume.write(b'content', 0)
        found = made('volume', 'show', 'disk', '-f', 'json').json()
        assert (found['in_use'], found['written_bytes']) == (True, 7)
        assert found['journal_bytes'] > 0
        assert {key: found[key] for key in found if 'index' in key} == {
            'index': 'lmdb', 'index_complete': False, 'index_bytes': 4096,
            'index_dropped': 5}
        shown = made('volume', 'show', 'disk').out
        assert re.search(r'index_complete +\| no ', shown), shown
        assert re.search(r'index_bytes +\| 4.0 KiB ', shown), shown
        made('volume', 'snapshot', 'disk', 'image', '--project', 'p',
             '-f', 'json').json()
        assert 'snapshot image p' in server.asked
        assert repositories.read_all(repo, 'image')[:7] == b'content'
        made('volume', 'resize', 'disk', '512K').refused('--shrink')
        found = made('volume', 'resize', 'disk', '3M', '-f', 'json').json()
        assert found['size'] == 3 * MIB == server.volume.size
        assert 'disconnect' not in server.asked
        made('volume', 'resize', 'disk', '3M', '--reconnect', '-f', 'json'
             ).json()
        assert server.asked.count('disconnect') == 1
        rows = made('volume', 'list', '-f', 'json').json()
        assert [(row['size'], row['in_use']) for row in rows] == [
            (3 * MIB, True)]
        result = made('volume', 'delete', 'disk')
        assert result.status == 11
        assert 'process 1234' in result.err
        assert 'glance-dedup-volume@disk' in result.err
        for arguments in (('rollback', 'disk', 'image'),
                          ('rename', 'disk', 'other')):
            made('volume', *arguments).locked(
                'process 1234', 'glance-dedup-volume@disk')
    assert openvolumes.names(repo) == ['disk']


def test_rollback(made, repo):
    """A volume returns to a snapshot, or to an image of another size."""
    openvolumes.create(repo, 'disk', MIB, project='a project')
    with openvolumes.open_volume(repo, 'disk') as volume:
        volume.write(b'before', 0)
        volume.snapshot('moment')
        volume.resize(2 * MIB)
        volume.write(b'after ', 0)
        volume.flush()
    found = made('volume', 'rollback', 'disk', 'moment', '-f', 'json').json()
    assert (found['size'], found['source'], found['copied_bytes'],
            found['project']) == (MIB, 'moment', 0, 'a project')
    with openvolumes.open_volume(repo, 'disk') as volume:
        assert volume.read(MIB, 0) == b'before'.ljust(MIB, bytes(1))
    data = noise(3 * MIB + 7, 1)
    for scope, copied in (('project', len(data)), ('global', 0)):
        repositories.put(repo, scope, data, project='p', scope=scope)
        found = made('volume', 'rollback', 'disk', scope, '-f', 'json').json()
        assert (found['size'], found['scope']) == (3 * MIB + 512, 'global')
        # In the volume's scope only the block at the end is copied: it is not
        # whole.
        assert found['copied_bytes'] >= copied >= (
            found['copied_bytes'] - 4096)
        with openvolumes.open_volume(repo, 'disk') as volume:
            assert volume.read(volume.size, 0) == data.ljust(
                3 * MIB + 512, bytes(1))
    made('volume', 'rollback', 'disk', 'none').failed('none')
    made('volume', 'rollback', 'none', 'moment').failed(
        'there is no volume none')


def test_rename(made, repo):
    openvolumes.create(repo, 'taken', MIB)
    found = made('volume', 'create', 'disk', '2M', '-f', 'json').json()
    renamed = made('volume', 'rename', 'disk', 'other', '-f', 'json').json()
    assert renamed == {**found, 'name': 'other'}
    assert openvolumes.names(repo) == ['other', 'taken']
    made('volume', 'rename', 'other', 'taken').failed('taken exists already')
    made('volume', 'rename', 'disk', 'new').failed('there is no volume disk')
    made('volume', 'rename', 'other', 'a name').refused(
        "a volume's name")


def test_a_volume_whose_owner_does_not_answer(made, repo):
    openvolumes.create(repo, 'disk', MIB)
    with volume_servers.serving(repo, 'disk', answers=False) as volume:
        volume.write(b'content', 0)
        found = made('volume', 'show', 'disk', '-f', 'json').json()
        assert (found['in_use'], found['written_bytes'],
                found['journal_bytes']) == (True, 0, None)
        for arguments in (('snapshot', 'disk', 'image'),
                          ('resize', 'disk', '2M')):
            made('volume', *arguments).locked(
                'disk is in use', 'stop what uses it')
        result = made('volume', 'delete', 'disk')
        assert result.status == 11 and 'another process' in result.err


def test_a_damaged_volume_does_not_hide_others(made, repo):
    for name in ('a', 'b', 'c'):
        openvolumes.create(repo, name, MIB)
    (made.path / 'volumes' / 'b' / 'journal-00000001').write_bytes(b'x' * 5000)
    (made.path / 'volumes' / 'unmade').mkdir()
    result = made('volume', 'list', '-f', 'json')
    assert result.status == 1
    assert [row['name'] for row in result.json()] == ['a', 'c']
    assert 'volumes/b/journal-00000001' in result.err


def damage(made, name):
    """Flip bytes of the newest journal's head, behind the volume's id."""
    newest = max((made.path / 'volumes' / name).glob('journal-*'))
    head = bytearray(newest.read_bytes())
    head[100:1000] = bytes(900)
    newest.write_bytes(head)
    return newest


def recipes(made):
    return sorted(path.name for path in (made.path / 'images').glob('v_*'))


def write(repo, *names):
    for name in names:
        openvolumes.create(repo, name, 2 * MIB, part_size=MIB)
        with openvolumes.open_volume(repo, name) as volume:
            volume.write(name.encode() * 1000, 5)
            volume.write(name.encode() * 1000, MIB)
            volume.checkpoint()


def test_a_damaged_volume_is_deleted(made, repo):
    """The recipes of a damaged volume are deleted, too, and no others."""
    write(repo, 'whole')
    before = recipes(made)
    write(repo, 'torn')
    assert len(recipes(made)) == 4
    newest = damage(made, 'torn')
    result = made('volume', 'delete', 'torn', '-f', 'json')
    assert result.status == 1 and newest.name in result.err
    assert 'glance-dedup volume delete --damaged torn' in result.err
    assert len(recipes(made)) == 4
    with openvolumes.open_volume(repo, 'whole'):
        result = made('volume', 'delete', '--damaged', 'torn', 'whole')
    assert result.status == 11 and 'whole is in use' in result.err
    assert recipes(made) == before
    assert openvolumes.names(repo) == ['whole']
    result = made('volume', 'delete', '--damaged', 'whole', 'none')
    assert result.status == 3 and 'there is no volume none' in result.err
    assert not recipes(made)


def test_two_damaged_volumes_are_deleted(made, repo):
    """Recipes that may belong to either volume stay; an error lists them."""
    write(repo, 'one', 'two')
    damage(made, 'one')
    damage(made, 'two')
    result = made('volume', 'delete', '--damaged', 'one')
    assert result.status == 0
    left = [name for name in recipes(made) if name in result.err]
    assert len(left) == 2 and len(recipes(made)) == 4
    assert made('volume', 'delete', '--damaged', 'two').status == 0
    assert recipes(made) == left
    assert made('image', 'delete', *left).status == 0
    assert not recipes(made)


def test_a_volume_that_lost_its_journals_head(made, repo):
    """Without the journal's head nothing names the volume's recipes."""
    write(repo, 'short', 'whole')
    newest = max((made.path / 'volumes' / 'short').glob('journal-*'))
    newest.write_bytes(b'')
    assert made('volume', 'delete', '--damaged', 'short').status == 0
    assert openvolumes.names(repo) == ['whole']
    assert len(recipes(made)) == 4
    with openvolumes.open_volume(repo, 'whole') as volume:
        assert volume.read(5, 5) == b'whole'


# -- du and diff --------------------------------------------------------------

@pytest.fixture
def snapshots(made, repo):
    """Two snapshots of a volume that has changed twice."""
    openvolumes.create(repo, 'disk', 4 * MIB)
    with openvolumes.open_volume(repo, 'disk') as volume:
        volume.write(noise(MIB), 0)
        volume.snapshot('s1')
        volume.write(noise(8192, 2), 4096)
        volume.zero(MIB // 2, MIB // 2)
        volume.snapshot('s2')
        volume.write(noise(4096, 3), 2 * MIB)
        volume.flush()
    return made


def test_volume_du(snapshots):
    row, = snapshots('volume', 'du', 'disk', '-f', 'json').json()
    assert row['name'] == 'disk' and row['size'] == 4 * MIB
    # The snapshots have all of it.
    assert row['freed_blocks'] == 0 and row['referenced_bytes'] > MIB // 3
    assert row['journal_bytes'] >= 4096
    assert row['freed_disk_bytes'] > row['journal_bytes']
    found = snapshots('volume', 'du', 'disk', '--image', 's1', '--image', 's2',
                      '-f', 'json').json()
    assert [r['name'] for r in found] == ['s1', 's2', 'disk', '(together)']
    assert found[-1]['freed_bytes'] == MIB + 8192
    snapshots('volume', 'du', 'none').failed('there is no volume none')
    assert snapshots('volume', 'du', 'a b').status == 2


def test_volume_diff(snapshots):
    result = snapshots('volume', 'diff', 's1', 's2', '-f', 'json')
    assert result.status == 0 and result.err == ''
    assert [json.loads(line) for line in result.out.splitlines()] == [
        {'offset': 4096, 'length': 8192, 'zeros': False},
        {'offset': MIB // 2, 'length': MIB // 2, 'zeros': True}]
    result = snapshots('volume', 'diff', 's1', 's2')
    assert [line.split() for line in result.out.splitlines()] == [
        ['offset', 'length', 'content'], ['4096', '8192', 'data'],
        [str(MIB // 2), str(MIB // 2), 'zeros']]
    assert '2 ranges, 520 KiB together, changed' in result.err
    result = snapshots('volume', 'diff', 's1', 's1')
    assert result.out == '' and '0 ranges, 0 B together' in result.err


def test_volume_diff_of_what_cannot_be_compared(snapshots, repo):
    repositories.put(repo, 'short', noise(1000, 9))
    repositories.put(repo, 'alien', noise(4 * MIB, 9))
    snapshots('volume', 'diff', 's1', 'short').refused(
        's1 has 4194304 bytes', 'short has 1000')
    snapshots('volume', 'diff', 's1', 'alien').refused(
        'images s1 and alien have no block in common', '--unrelated')
    result = snapshots('volume', 'diff', 's1', 'alien', '--unrelated',
                       '-f', 'json')
    assert result.json() == {'offset': 0, 'length': 4 * MIB, 'zeros': False}
    snapshots('volume', 'diff', 's1', 'nothing').failed('nothing')
    recipe = next(name for name in repo.recipes() if name.startswith('v_'))
    snapshots('volume', 'diff', 's1', recipe).refused('is no image')
    repositories.ruin(f'{repo.path}/images/s1', 4096 + 50)
    snapshots('volume', 'diff', 's1', 's2').refused('images/s1', status=1)
