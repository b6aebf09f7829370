# SPDX-License-Identifier: Apache-2.0

"""Projects in Glance: the blocks that they share, and their deletions.

Headers name the user, as Keystone's middleware would set them.
"""

import json

import pytest

from glance_dedup.repository import image_repository
from tests.functional import glance_server
from tests.support import repositories

pytestmark = pytest.mark.slow

noise = repositories.noise
MIB = 1 << 20


class Client(glance_server.ProjectClient):
    def store(self, data, name='private'):
        image_id = self.create(name='image')['id']
        self.upload(image_id, data, store=name)
        return image_id


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    return tmp_path_factory.mktemp('projects')


@pytest.fixture(scope='module')
def server(place):
    stores = {
        name: {'type': 'dedup', 'dedup_store_datadir': place / name,
               'dedup_store_filter_dir': place / 'filter',
               'dedup_store_filter_mib': 1, 'dedup_store_scope': scope,
               'dedup_store_dedupd_socket': ''}
        for name, scope in (('private', 'project'), ('shared', 'global'))}
    options = {'DEFAULT': {'show_multiple_locations': True}}
    with glance_server.ProjectServer(place / 'server', stores, processes=1,
                                     threads=2, options=options) as running:
        yield running


@pytest.fixture
def alice(server):
    return Client(server.url, 'alice')


@pytest.fixture
def bob(server):
    return Client(server.url, 'bob')


@pytest.fixture
def admin(server):
    return Client(server.url, 'ops', 'admin,member,reader')


def stat(place, store, image_id):
    with image_repository.Repository(place / store) as repo:
        return repo.stat(image_id)


def groups(place, store, image_id):
    with image_repository.Repository(place / store) as repo, repo.open_image(
            image_id) as image:
        return {extent.group for extent in image.extents()}


def test_projects_apart(place, alice, bob):
    data = noise(2 * MIB)
    first, second = alice.store(data), bob.store(data)
    assert stat(place, 'private', first).new_bytes == len(data)
    assert stat(place, 'private', second).new_bytes == len(data)
    assert not (groups(place, 'private', first)
                & groups(place, 'private', second))
    assert stat(place, 'private', alice.store(data)).new_bytes == 0
    assert alice.download(first) == bob.download(second) == data
    repositories.require_clean(place / 'private')


def test_projects_together(place, alice, bob):
    data = noise(2 * MIB)
    first, second = (who.store(data, 'shared') for who in (alice, bob))
    assert stat(place, 'shared', first).new_bytes == len(data)
    assert stat(place, 'shared', second).new_bytes == 0
    # Deleting one does not affect the other.
    alice.delete(first)
    assert bob.download(second) == data


def test_nobody_is_told_what_was_new(place, alice, bob):
    """Glance shows the same for data that was there and for new data."""
    data = noise(MIB, 2)
    shown = []
    alice.store(data, 'shared')
    for content in (data, noise(MIB, 3)):
        found = bob.show(bob.store(content, 'shared'))
        shown.append({key: value for key, value in found.items()
                      if key not in ('id', 'file', 'self', 'locations',
                                     'checksum', 'os_hash_value',
                                     'created_at', 'updated_at')})
    assert shown[0] == shown[1]


def attach(client, image_id, url, **options):
    client.request(
        'PATCH', f'/v2/images/{image_id}', json.dumps([{
            'op': 'add', 'path': '/locations/-',
            'value': {'url': url, 'metadata': {'store': 'private'}}}]),
        {'Content-Type': 'application/openstack-images-v2.1-json-patch'},
        **options)


def test_a_copied_location(place, alice, bob):
    """A user with a copied location can read the image, but not delete it."""
    data = noise(MIB, 4)
    image_id = alice.store(data)
    url = alice.show(image_id)['locations'][0]['url']
    copy = bob.create(name='copy')['id']
    attach(bob, copy, url)
    assert bob.download(copy) == data
    assert bob.delete(copy, expect=(403,)) == 403
    assert alice.download(image_id) == data
    assert stat(place, 'private', image_id).project == 'alice'
    assert alice.delete(image_id) == 204


def test_an_administrators_upload(place, alice, admin):
    """The image is the uploading project's: Glance sends no owner.

    While locations are shown, its owner could be any project.
    """
    image_id = alice.create(name='image')['id']
    admin.upload(image_id, noise(MIB, 5), store='private')
    assert stat(place, 'private', image_id).project == 'ops'
    assert alice.delete(image_id, expect=(403,)) == 403
    assert admin.delete(image_id) == 204
    with image_repository.Repository(place / 'private') as repo:
        assert image_id not in repo.images()


def test_where_locations_are_not_shown(server, place, alice, bob, admin):
    """Users cannot attach locations, so an owner may delete."""
    data = noise(MIB, 6)
    images = [alice.create(name='image')['id'] for _ in range(2)]
    for image_id in images:
        admin.upload(image_id, data, store='private')
    url = alice.show(images[1])['locations'][0]['url']
    defaults = server.options['DEFAULT']
    server.options['DEFAULT'] = {}
    server.restart()
    try:
        assert 'locations' not in alice.show(images[0])
        copy = bob.create(name='copy')['id']
        # Not even a location that was seen before can be attached.
        attach(bob, copy, url, expect=(403,))
        bob.request('POST', f'/v2/images/{copy}/locations',
                    json.dumps({'url': url}),
                    {'Content-Type': 'application/json'}, expect=(403,))
        assert bob.delete(images[0], expect=(404,)) == 404
        assert alice.delete(images[0]) == 204
        assert alice.download(images[1]) == data
        with image_repository.Repository(place / 'private') as repo:
            assert images[0] not in repo.images()
    finally:
        server.options['DEFAULT'] = defaults
        server.restart()
    assert alice.delete(images[1], expect=(403,)) == 403
