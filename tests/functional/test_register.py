# SPDX-License-Identifier: Apache-2.0

"""Images of the repository that get a record in a real Glance."""

import json
import multiprocessing
import os
import signal
import uuid

import pytest

from glance_dedup.cli import entry
from glance_dedup.client import glance_api
from glance_dedup.repository import image_repository
from glance_dedup.repository import openvolumes
from tests.support import cache_harness
from tests.support import repositories
from tests.support.repositories import noise
from tests.support import volume_tools

pytestmark = pytest.mark.slow

MIB = 1 << 20
OWNER = 'alice'
LIMIT = 120     # seconds


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    return tmp_path_factory.mktemp('register')


@pytest.fixture(scope='module')
def server(place):
    """A Glance with its own policy, in which tokens have roles."""
    volume_tools.create_repository(place / 'dedup1')
    (place / 'file1').mkdir()
    stores = {
        'dedup1': {'type': 'dedup', 'dedup_store_datadir': place / 'dedup1',
                   'dedup_store_filter_dir': place / 'filter',
                   'dedup_store_filter_mib': 1,
                   'dedup_store_dedupd_socket': ''},
        'file1': {'type': 'file', 'filesystem_store_datadir': place / 'file1'}}
    with cache_harness.TokenServer(
            place / 'server', stores, processes=1) as running:
        running.allow(**cache_harness.TOKENS,
                      register=('service', 'admin,service,member,reader'))
        yield running


@pytest.fixture
def client(server):
    """A client with an administrator's token."""
    return server.client('ops')


@pytest.fixture
def run(place, server, monkeypatch, capfd):
    """Yields a function that runs the command; it returns its output."""
    for name in [name for name in os.environ if name.startswith('OS_')]:
        monkeypatch.delenv(name)
    monkeypatch.setenv('OS_AUTH_TYPE', 'admin_token')
    monkeypatch.setenv('OS_ENDPOINT', f'{server.url}/v2')
    monkeypatch.setenv('OS_TOKEN', 'register')
    monkeypatch.setenv('no_proxy', '127.0.0.1')

    def run(*arguments, token='register'):
        monkeypatch.setenv('OS_TOKEN', token)
        capfd.readouterr()
        status = entry.main(command(place, *arguments))
        out, err = capfd.readouterr()
        return status, json.loads(out) if out else None, err
    return run


def command(place, *arguments):
    return ['--repository', str(place / 'dedup1'), '--filter-dir',
            str(place / 'filter'), '--socket', '', *arguments, '-f', 'json']


def new(place, data=b'data', image_id=None, project=OWNER):
    """Store an image that Glance does not know; return its id."""
    image_id = image_id or str(uuid.uuid4())
    with repositories.open_repository(place / 'dedup1') as repo:
        repositories.put(repo, image_id, data, project=project)
    return image_id


def upload(client, data, store='file1', **properties):
    image_id = client.create(name='image', **properties)['id']
    client.upload(image_id, data, store=store)
    return image_id


def test_a_snapshot_becomes_an_image(client, run, place):
    """Glance serves the image, shares its blocks, and deletes it."""
    image_id = str(uuid.uuid4())
    data = noise(MIB, 1) + bytes(MIB)
    with repositories.open_repository(place / 'dedup1') as repo:
        openvolumes.create(repo, 'disk', len(data), project=OWNER)
        with openvolumes.open_volume(repo, 'disk') as volume:
            volume.write(data[:MIB], 0)
    assert run('volume', 'snapshot', 'disk', image_id)[0] == 0
    status, found, err = run('glance', 'register', image_id, '--name',
                             'web1 before the upgrade')
    assert status == 0, err
    assert (found['image_id'], found['result'], found['status']) == (
        image_id, 'registered', 'active')
    record = client.show(image_id)
    assert {name: record[name] for name in (
        'name', 'owner', 'visibility', 'disk_format', 'container_format',
        'min_disk', 'size', 'stores', 'os_hash_algo')} == {
            'name': 'web1 before the upgrade', 'owner': OWNER,
            'visibility': 'private', 'disk_format': 'raw',
            'container_format': 'bare', 'min_disk': 1, 'size': len(data),
            'stores': 'dedup1', 'os_hash_algo': 'sha512'}
    assert client.download(image_id) == data
    # Users' tokens open images whose hash is recorded here.
    with repositories.open_repository(place / 'dedup1') as repo:
        assert os.path.exists(place / 'dedup1' / 'hashes' / image_id)
        openvolumes.delete(repo, 'disk')
    assert run('glance', 'orphans', '--store', 'dedup1', image_id)[1] == []
    assert run('glance', 'register', image_id)[1]['result'] == 'present'
    client.delete(image_id)
    with repositories.open_repository(place / 'dedup1') as repo:
        assert image_id not in repo.images()


BACKUP = 'b_web_20261123T180000Z'


@pytest.fixture
def backup(place):
    """A backup of no project, as the command `backup run` makes it."""
    new(place, b'disk', BACKUP, project='')
    yield BACKUP
    with repositories.open_repository(place / 'dedup1') as repo:
        assert repositories.read_all(repo, BACKUP) == b'disk'
        repo.delete(BACKUP)


def test_a_backup_becomes_an_image(client, run, place, backup):
    """One command registers it; the backup stays, and is not Glance's."""
    assert run('glance', 'orphans', '--store', 'dedup1', backup)[1] == []
    status, _, err = run('glance', 'register', backup)
    assert status == 3 and '--project' in err
    status, found, err = run('glance', 'register', backup, '--project', OWNER)
    assert status == 0, err
    image_id = found['image_id']
    assert (found['name'], found['owner']) == (backup, OWNER)
    assert client.download(image_id) == b'disk'
    # A second run finds the same image; for another project there is another.
    again = run('glance', 'register', backup, '--project', OWNER)[1]
    assert (again['image_id'], again['result']) == (image_id, 'present')
    other = run('glance', 'register', backup, '--project', 'bob', '--name',
                'web')[1]
    assert (other['name'], other['owner']) == ('web', 'bob')
    assert other['image_id'] != image_id
    for one in (image_id, other['image_id']):
        client.delete(one)
    # A backup is no orphan, even if nearly all images are backups.
    found = run('glance', 'orphans', '--store', 'dedup1', '--delete',
                '--older-than', '0s')[1]
    assert backup not in {row['image_id'] for row in found}
    # Glance uses no id twice.
    status, _, err = run('glance', 'register', backup, '--project', OWNER)
    assert status == 3 and 'was deleted' in err and 'image copy' in err


def test_project_is_for_backups(run, place):
    status, _, err = run('glance', 'register', new(place), '--project', 'bob')
    assert status == 2 and '--project is for backups' in err


@pytest.mark.parametrize('step', [
    (image_repository.Repository, 'copy'), (glance_api.Glance, 'create'),
    (glance_api.Glance, 'add_data')])
def test_killed_with_a_backup(client, run, place, backup, step, tmp_path):
    """The command finds the copy when it is started again."""
    arguments = 'glance', 'register', backup, '--project', f'of-{step[1]}'
    process = multiprocessing.get_context('fork').Process(
        target=child, args=(command(place, *arguments), step[1],
                            tmp_path / 'log', step[0]))
    process.start()
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL, (
        (tmp_path / 'log').read_text())
    with repositories.open_repository(place / 'dedup1') as repo:
        copies = {image_id for image_id in repo.images()
                  if repo.stat(image_id).project == arguments[-1]}
    status, found, err = run(*arguments)
    assert status == 0, err
    assert found['image_id'] in copies
    assert client.download(found['image_id']) == b'disk'


def test_visibility(client, run, place):
    image_id = new(place)
    status, _, err = run('glance', 'register', image_id, '--visibility',
                         'community')
    assert status == 0, err
    record = client.show(image_id)
    assert (record['visibility'], record['name']) == ('community', image_id)


def test_what_cannot_be_registered(client, run, place):
    new(place, image_id='by-hand')
    status, _, err = run('glance', 'register', 'by-hand')
    assert status == 3 and 'image copy by-hand' in err
    missing = str(uuid.uuid4())
    status, _, err = run('glance', 'register', missing)
    assert status == 3 and missing in err
    nobodys = new(place, project='')
    status, _, err = run('glance', 'register', nobodys)
    assert status == 3 and f'copy {nobodys} NEW --project' in err
    for image_id in (missing, nobodys):
        client.request('GET', f'/v2/images/{image_id}', expect=(404,))


def test_an_id_that_is_taken(client, run, place):
    """An id of another owner, other bytes or a deleted image is refused."""
    others = new(place)
    client.create(name='x', id=others, owner='bob')
    status, _, err = run('glance', 'register', others)
    assert status == 3 and 'bob' in err and 'image copy' in err
    assert client.show(others)['status'] == 'queued'
    other_bytes = upload(client, noise(MIB, 1), owner=OWNER)
    new(place, noise(MIB, 2), other_bytes)
    status, _, err = run('glance', 'register', other_bytes)
    assert status == 3 and 'other bytes' in err
    assert client.show(other_bytes)['stores'] == 'file1'
    deleted = upload(client, b'data')
    client.delete(deleted)
    new(place, image_id=deleted)
    status, _, err = run('glance', 'register', deleted)
    assert status == 3 and 'was deleted' in err and 'image copy' in err


def test_an_account_without_rights(client, run, place):
    """The record stays, without data; the next run completes it."""
    image_id = new(place, noise(MIB, 3))
    status, _, err = run('glance', 'register', image_id, token='bob')
    assert status == 3 and 'administrator' in err
    client.request('GET', f'/v2/images/{image_id}', expect=(404,))
    # The user is an administrator, but not a service.
    status, _, err = run('glance', 'register', image_id, token='ops')
    assert status == 3 and '403' in err and 'run the command again' in err
    assert client.show(image_id)['status'] == 'queued'
    assert run('glance', 'register', image_id)[1]['result'] == 'registered'
    assert client.download(image_id) == noise(MIB, 3)


def test_another_repository(client, run, place, tmp_path):
    """Glance has no store with that repository, so it refuses the location."""
    path = repositories.create(tmp_path / 'other')
    image_id = str(uuid.uuid4())
    with repositories.open_repository(path) as repo:
        repositories.put(repo, image_id, b'data', project=OWNER)
    status, _, err = run('--repository', str(path), 'glance', 'register',
                         image_id)
    assert status == 3 and 'run the command again' in err
    assert client.show(image_id)['status'] == 'queued'


@pytest.mark.parametrize('failures', [1, 2])
def test_a_task_of_glance_that_fails(client, run, place, monkeypatch,
                                     failures):
    """Glance deletes the data at the location; the image stays."""
    data = noise(MIB, 5)
    image_id = new(place, data)
    real = glance_api.Glance.add_data
    values = ['0' * 128] * failures

    def add_data(self, image_id, url, name, value):
        real(self, image_id, url, name, values.pop() if values else value)
    monkeypatch.setattr(glance_api.Glance, 'add_data', add_data)
    status, found, err = run('glance', 'register', image_id)
    if failures == 2:
        assert status == 3 and 'run the command again' in err
        with repositories.open_repository(place / 'dedup1') as repo:
            assert repositories.read_all(repo, image_id) == data
            assert f'{image_id}-registering' not in repo.images()
        status, found, err = run('glance', 'register', image_id)
    assert status == 0, err
    assert found['result'] == 'registered'
    assert client.download(image_id) == data
    with repositories.open_repository(place / 'dedup1') as repo:
        assert f'{image_id}-registering' not in repo.images()
        assert repo.stat(image_id).project == OWNER


def test_killed_before_a_task_of_glance_failed(client, run, place, tmp_path,
                                               monkeypatch):
    """The next run finds the copy, and puts it in the image's place.

    It does so even if it has begun before the task deletes the image.
    """
    data = noise(MIB, 6)
    image_id = new(place, data)
    process = multiprocessing.get_context('fork').Process(
        target=child, args=(command(place, 'glance', 'register', image_id),
                            'create', tmp_path / 'log'))
    process.start()
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL
    with repositories.open_repository(place / 'dedup1') as repo:
        with repo.open_image(image_id) as image:
            repo.copy(image, f'{image_id}-registering', OWNER)
    real = glance_api.Glance.wait_for_task
    waited = []

    def wait_for_task(self, image_id, size):
        real(self, image_id, size)
        with repositories.open_repository(place / 'dedup1') as repo:
            assert f'{image_id}-registering' in repo.images()
            repo.delete(image_id)
        waited.append(size)
    monkeypatch.setattr(glance_api.Glance, 'wait_for_task', wait_for_task)
    status, found, err = run('glance', 'register', image_id)
    assert status == 0, err
    assert waited == [len(data)]
    assert found['result'] == 'registered'
    assert client.download(image_id) == data


def child(arguments, step, log, owner=glance_api.Glance):
    with open(log, 'w') as f:
        os.dup2(f.fileno(), 2)
    real = getattr(owner, step)

    def killed(*args, **kwargs):
        real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, step, killed)
    entry.main(arguments)


@pytest.mark.parametrize('step', ['create', 'add_data'])
def test_killed(client, run, place, step, tmp_path):
    """The command finds its earlier work when it is started again."""
    image_id = new(place, noise(MIB, 4))
    process = multiprocessing.get_context('fork').Process(
        target=child, args=(command(place, 'glance', 'register', image_id),
                            step, tmp_path / 'log'))
    process.start()
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL, (
        (tmp_path / 'log').read_text())
    status, _, err = run('glance', 'register', image_id)
    assert status == 0, err
    assert client.show(image_id)['status'] == 'active'
    assert client.download(image_id) == noise(MIB, 4)


def test_images_are_listed_with_their_names(client, run, place, capfd):
    """Names are any text of users; an image may have none, or no record."""
    hostile = 'web \x1b[2J server'
    named = client.create(name=hostile)['id']
    client.upload(named, b'content', store='dedup1')
    nameless = client.create()['id']
    client.upload(nameless, b'content', store='dedup1')
    unknown = new(place)
    status, found, err = run('image', 'list', '--names')
    assert status == 0, err
    names = {row['image_id']: row['name'] for row in found}
    assert names[named] == hostile
    assert entry.main(command(place, 'image', 'list', '--names')[:-2]) == 0
    table, _ = capfd.readouterr()
    assert 'server' in table and '\x1b' not in table
    assert names[nameless] is None and names[unknown] is None
    assert run('image', 'show', named, '--names')[1]['name'] == hostile
    assert run('image', 'show', unknown, '--names')[1]['name'] is None
    # Without the option, no names are requested.
    assert 'name' not in run('image', 'show', named)[1]
    status, _, err = run('image', 'list', '--names', token='none')
    assert status == 3 and 'Traceback' not in err


def test_names_need_a_glance(run, monkeypatch):
    for name in ('OS_AUTH_TYPE', 'OS_ENDPOINT'):
        monkeypatch.delenv(name)
    monkeypatch.setenv('OS_CLIENT_CONFIG_FILE', '/nowhere')
    status, _, err = run('image', 'list', '--names')
    assert status == 2 and 'there is no Glance to ask' in err
