# SPDX-License-Identifier: Apache-2.0

"""A change of the key, and the locations that a real Glance has."""

import json

import pytest

from glance_dedup.base import signingkeys
from glance_dedup.cli import entry
from tests.functional import glance_server
from tests.functional import test_adoption
from tests.support import repositories
from tests.support.repositories import mixture

pytestmark = pytest.mark.slow

MIB = 1 << 20
PATCH = {'Content-Type': 'application/openstack-images-v2.1-json-patch'}

client = test_adoption.client
environment = test_adoption.environment
place = test_adoption.place
run = test_adoption.run
server = test_adoption.server


@pytest.fixture
def images(client):
    """Images of this store, with their bytes."""
    found = {}
    for seed, properties in enumerate((
            {}, {'os_hidden': True}, {'visibility': 'community'})):
        data = mixture(MIB, seed)
        found[test_adoption.upload(
            client, data, 'dedup1', **properties)] = data
    return found


def urls(client, image_id):
    return [one['url'] for one in client.show(image_id)['locations']]


def sign(run, *arguments):
    return run('glance', 'sign-locations', '--store', 'dedup1', *arguments)


def results(found, status=0):
    assert found.status == status, found.err
    return {image_id: row['result'] for image_id, row in found.rows.items()}


def rekey(place, *arguments, status=0):
    """Change the key in another process than the one that serves Glance."""
    assert entry.main(['--repository', str(place / 'dedup1'), '--socket', '',
                       'repository', 'rekey', *arguments]) == status


def add_location(client, image_id, url, expect=(200,)):
    client.request('PATCH', f'/v2/images/{image_id}', json.dumps([
        {'op': 'add', 'path': '/locations/-',
         'value': {'url': url, 'metadata': {'store': 'dedup1'}}}]),
        PATCH, expect=expect)


def read_all(client, images):
    for image_id, data in images.items():
        assert client.download(image_id) == data


def test_a_change_of_the_key(client, run, place, images, capfd):
    """Glance reads all images at each step, and keeps running."""
    before = {image_id: urls(client, image_id) for image_id in images}
    assert set(results(sign(run)).values()) == {'signed'}
    rekey(place)
    assert 'glance sign-locations' in capfd.readouterr().err
    read_all(client, images)
    later = mixture(MIB, 9)
    new = test_adoption.upload(client, later, 'dedup1')
    assert results(sign(run)) == {
        **dict.fromkeys(images, 'added'), new: 'signed'}
    assert set(results(sign(run)).values()) == {'signed'}
    for image_id in images:
        old, signed = urls(client, image_id)
        assert [old] == before[image_id] and signed != old
    images[new] = later
    read_all(client, images)
    # The command runs again, while the second change is under way.
    rekey(place, status=2)
    rekey(place, '--finish')
    read_all(client, images)
    expected = {**dict.fromkeys(before, 'removed'), new: 'signed'}
    assert results(sign(run)) == expected
    for image_id in images:
        url, = urls(client, image_id)
        assert [url] != before.get(image_id)
    read_all(client, images)
    assert set(results(sign(run)).values()) == {'signed'}
    # No user can open an image by the old location.
    thief = client.create(name='thief', disk_format='raw',
                          container_format='bare')['id']
    add_location(client, thief, before[next(iter(before))][0],
                 expect=(400, 403, 404, 409, 410))
    for image_id in before:
        client.delete(image_id)
        assert image_id not in test_adoption.held(place)


def test_a_key_that_is_lost(client, run, place, images):
    """All locations are bad; those of the right project are signed again."""
    (place / 'dedup1' / 'key').write_bytes(signingkeys.make().pack())
    for image_id in images:
        client.request('GET', f'/v2/images/{image_id}/file',
                       expect=(204, 404, 500, 503))
    assert set(results(sign(run)).values()) == {'removed'}
    read_all(client, images)
    assert all(len(urls(client, image_id)) == 1 for image_id in images)


def test_who_gets_no_signature(client, run, place, images):
    """An image of another project, or stored again, gets no signature."""
    first, second, third = images
    foreign = test_adoption.upload(client, mixture(MIB, 4), 'dedup1',
                                   owner='somebody')
    with repositories.open_repository(place / 'dedup1') as repo:
        project = repo.stat(second).project
        repo.delete(second)
        repositories.put(repo, second, b'stored again', project=project)
        repo.delete(third)
    found = sign(run)
    assert results(found, 3) == {first: 'signed', second: 'failed',
                                 third: 'failed', foreign: 'signed'}
    assert 'stored again' in found.rows[second]['error']
    assert 'there is no image' in found.rows[third]['error']
    (place / 'dedup1' / 'key').write_bytes(signingkeys.make().pack())
    before = urls(client, foreign)
    found = sign(run)
    assert results(found, 3) == {first: 'removed', second: 'failed',
                                 third: 'failed', foreign: 'failed'}
    assert 'belongs to project somebody' in found.rows[foreign]['error']
    assert urls(client, foreign) == before


def test_a_glance_that_shows_no_locations(place, run, monkeypatch, tmp_path):
    stores = {'dedup1': {'type': 'dedup',
                         'dedup_store_datadir': place / 'dedup1',
                         'dedup_store_filter_dir': place / 'filter',
                         'dedup_store_dedupd_socket': ''}}
    with glance_server.GlanceServer(tmp_path / 'server', stores,
                                    processes=1) as strict:
        client = glance_server.Client(strict.url)
        image_id = client.create(name='image')['id']
        client.upload(image_id, b'data')
        monkeypatch.setenv('OS_ENDPOINT', strict.url)
        found = sign(run)
        assert found.status == 3
        assert 'show_multiple_locations' in found.err
        client.delete(image_id)


def test_nobody_changes_the_key_meanwhile(client, run, place, images):
    with signingkeys.locked(str(place / 'dedup1')):
        found = sign(run)
        assert found.status == 11 and 'try again' in found.err
