# SPDX-License-Identifier: Apache-2.0

"""Limits on what projects store, through Glance itself, beside a daemon.

Headers name the user, as Keystone's middleware would set them.
"""

import json
import re
import threading

import pytest

from glance_dedup.repository import image_repository
from tests.functional import glance_server
from tests.support import daemons
from tests.support import repositories

pytestmark = pytest.mark.slow

noise = repositories.noise
MIB = 1 << 20
LIMIT = 4       # MiB


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    return tmp_path_factory.mktemp('limits')


@pytest.fixture(scope='module')
def server(place):
    stores = {'dedup1': {
        'type': 'dedup', 'dedup_store_datadir': place / 'repository',
        'dedup_store_filter_dir': place / 'filter',
        'dedup_store_filter_mib': 1, 'dedup_store_dedupd_socket': '',
        'dedup_store_project_limit_mib': LIMIT,
        'dedup_store_project_limits_mib': 'rich:0,poor:1'}}
    options = {'DEFAULT': {'enabled_import_methods': '[glance-direct]'}}
    with glance_server.ProjectServer(place / 'server', stores, processes=2,
                                     threads=2, options=options) as running:
        yield running


@pytest.fixture(scope='module')
def daemon(server, place):
    with daemons.Daemon(place / 'repository', collect_interval='0',
                        merge_interval='0', metrics_projects='true'
                        ) as running:
        running.start()
        repositories.eventually(
            lambda: running.status()['daemon']['role'] == 'maintainer')
        running.run('account')
        yield running


@pytest.fixture
def as_project(server, daemon):
    """Yields a function that makes a project's client; deletes its images."""
    made = []

    def client(name):
        made.append(glance_server.ProjectClient(server.url, name))
        return made[-1]
    yield client
    for found in made:
        for image in found.list():
            found.delete(image['id'])
    daemon.run('collect')
    assert projects(daemon) == {}


def store(client, data, **options):
    image_id = client.create(name='image')['id']
    client.upload(image_id, data, **options)
    return image_id


def refused(client, data, size=None):
    """Upload an image that is refused; return its id and the sentence."""
    image_id = client.create(name='image')['id']
    status, _, body = client.request(
        'PUT', f'/v2/images/{image_id}/file', data,
        {'Content-Type': 'application/octet-stream',
         'Content-Length': str(len(data) if size is None else size)},
        expect=())
    assert status == 413
    return image_id, ' '.join(body.decode().split())


def projects(daemon):
    return {project['project']: project for project in daemon.request(
        'GET', '/v1/projects').json()['projects']}


def recipes(place):
    with image_repository.Repository(place / 'repository') as repo:
        return repo.recipes()


def test_two_projects_that_share(as_project, daemon, place):
    alice, bob = as_project('alice'), as_project('bob')
    common = noise(3 * MIB)
    first = store(alice, common)
    # Blocks that are stored already take nothing of a limit, however often.
    copies = [store(bob, common) for _ in range(3)]
    daemon.run('account')
    found = projects(daemon)
    assert found['alice']['stored_bytes'] > 3 * MIB
    assert found['bob']['stored_bytes'] == 0
    assert found['bob']['logical_bytes'] == 9 * MIB
    assert found['alice']['exclusive_bytes'] is None    # not counted yet
    own = store(bob, noise(2 * MIB, 2))
    daemon.run('projects')
    found = projects(daemon)
    assert found['alice']['exclusive_bytes'] == 0
    assert found['alice']['shared_bytes'] == 3 * MIB
    assert found['bob']['exclusive_bytes'] == 2 * MIB
    assert found['bob']['shared_bytes'] == 3 * MIB
    assert found['bob']['charged_bytes'] > found['alice']['charged_bytes']
    text = daemon.request('GET', '/metrics').body.decode()
    shown = re.search(
        r'^dedupd_project_stored_bytes\{project="bob"} (.*)$', text, re.M)
    assert float(shown[1]) == found['bob']['stored_bytes']

    before = recipes(place)
    image_id, words = refused(bob, noise(3 * MIB, 3))
    assert (f'Image storage media is full: project bob may store {LIMIT} MiB '
            'in this store, after deduplication and compression, and image '
            f'{image_id} would be over that. Delete images of the project and '
            'try again in some minutes, or ask for a higher limit.') in words
    # No part of it is left, and the record can be used again.
    assert recipes(place) == before
    assert bob.show(image_id)['status'] == 'queued'
    assert bob.list() and 'checksum' in bob.show(own)
    assert alice.download(first) == common
    repositories.require_clean(place / 'repository')

    bob.delete(own)
    daemon.run('collect')
    assert projects(daemon)['bob']['stored_bytes'] == 0
    bob.upload(image_id, noise(3 * MIB, 3))
    assert bob.download(image_id) == noise(3 * MIB, 3)
    # The owner of common data deletes it; the others keep it.
    alice.delete(first)
    daemon.run('collect')
    assert bob.download(copies[0]) == common
    assert 'alice' not in projects(daemon)
    daemon.run('projects')
    assert projects(daemon)['bob']['exclusive_bytes'] == 6 * MIB


def test_limits_of_their_own(as_project):
    store(as_project('rich'), noise(2 * LIMIT * MIB, 4))
    _, words = refused(as_project('poor'), noise(2 * MIB, 5))
    assert 'project poor may store 1 MiB' in words


def test_workers_at_once(as_project, daemon, place):
    """Workers count images that others committed before."""
    carol = as_project('carol')
    images = [carol.create(name='image')['id'] for _ in range(6)]
    together = threading.Barrier(len(images))
    results = []

    def upload(number):
        together.wait(60)
        results.append(carol.upload(images[number], noise(3 * MIB, number),
                                    expect=()))
    threads = [threading.Thread(target=upload, args=(n,))
               for n in range(len(images))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert set(results) <= {204, 413} and 204 in results
    daemon.run('account')
    assert projects(daemon)['carol']['images'] == results.count(204)
    # Every worker refuses a later upload.
    for number in range(4):
        refused(carol, noise(3 * MIB, 10 + number))


def test_an_import_over_the_limit(server, as_project, place):
    """The import fails in the background, as on a full disk."""
    dave = as_project('dave')
    store(dave, noise(3 * MIB, 20))
    image_id = dave.create(name='image')['id']
    before = recipes(place)
    dave.request('PUT', f'/v2/images/{image_id}/stage', noise(2 * MIB, 21),
                 {'Content-Type': 'application/octet-stream'})
    dave.request('POST', f'/v2/images/{image_id}/import', json.dumps(
        {'method': {'name': 'glance-direct'}}),
        {'Content-Type': 'application/json'})

    def task():
        return json.loads(dave.request(
            'GET', f'/v2/images/{image_id}/tasks')[2])['tasks'][0]
    repositories.eventually(lambda: task()['status'] == 'failure')
    assert dave.show(image_id)['os_glance_failed_import'] == 'dedup1'
    # Glance keeps the sentence for its log.
    assert f'project dave may store {LIMIT} MiB' in server.log.read_text()
    assert recipes(place) == before
