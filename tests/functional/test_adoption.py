# SPDX-License-Identifier: Apache-2.0

"""Import, orphans and missing, with a real Glance."""

import contextlib
import json
import os
import threading
import time
import uuid

import pytest

from glance_dedup.adoption import orphans
from glance_dedup.cli import adoption
from glance_dedup.cli import entry
from glance_dedup.client import glance_api
from tests.functional import glance_server
from tests.support import repositories
from tests.support.repositories import mixture
from tests.support.repositories import noise

pytestmark = pytest.mark.slow

MIB = 1 << 20
LIMIT = 120     # seconds


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    return tmp_path_factory.mktemp('adoption')


@pytest.fixture(scope='module')
def server(place):
    (place / 'file1').mkdir()
    stores = {
        'file1': {'type': 'file', 'filesystem_store_datadir': place / 'file1'},
        'dedup1': {'type': 'dedup', 'dedup_store_datadir': place / 'dedup1',
                   'dedup_store_filter_dir': place / 'filter',
                   'dedup_store_filter_mib': 1,
                   'dedup_store_dedupd_socket': ''}}
    with glance_server.GlanceServer(
            place / 'server', stores, processes=1,
            options={'DEFAULT': {'show_multiple_locations': True}}) as running:
        yield running


@pytest.fixture
def client(server, place):
    """A client of a Glance and a repository, both without images."""
    client = glance_server.Client(server.url)
    yield client
    for hidden in ('true', 'false'):
        for image in client._json(
                'GET', '/v2/images?visibility=all&limit=1000&os_hidden='
                + hidden)['images']:
            client.delete(image['id'], expect=())
    with repositories.open_repository(place / 'dedup1') as repo:
        for image_id in repo.images():
            repo.delete(image_id)
    for path in (place / 'file1').iterdir():
        path.unlink()


@pytest.fixture
def environment(server, monkeypatch):
    for name in [name for name in os.environ if name.startswith('OS_')]:
        monkeypatch.delenv(name)
    monkeypatch.setenv('OS_AUTH_TYPE', 'none')
    monkeypatch.setenv('OS_ENDPOINT', server.url)
    monkeypatch.setenv('no_proxy', '127.0.0.1')


class Found:
    def __init__(self, status, out, err):
        self.status = status
        self.err = err
        self.rows = ({row['image_id']: row for row in json.loads(out)}
                     if out else None)


@pytest.fixture
def run(place, environment, capfd):
    def run(*arguments):
        capfd.readouterr()
        status = entry.main(
            ['--repository', str(place / 'dedup1'), '--filter-dir',
             str(place / 'filter'), '--socket', '', *map(str, arguments),
             '-f', 'json'])
        return Found(status, *capfd.readouterr())
    return run


def upload(client, data, store='file1', **properties):
    image_id = client.create(name='image', **properties)['id']
    client.upload(image_id, data, store=store)
    return image_id


def put(place, image_id, data=b'data', **options):
    with repositories.open_repository(place / 'dedup1') as repo:
        return repositories.put(repo, image_id, data, **options)


def held(place):
    with repositories.open_repository(place / 'dedup1') as repo:
        return repo.images()


def import_(run, place, *arguments):
    return run('glance', 'import', '--from-file-store', place / 'file1',
               *arguments)


# -- import -------------------------------------------------------------------

def test_import_and_switch(client, run, place):
    contents = {}
    for seed, properties in enumerate((
            {}, {'os_hidden': True}, {'visibility': 'community'},
            {'protected': True}, {'owner': 'somebody'})):
        data = mixture(MIB, seed)
        contents[upload(client, data, **properties)] = data
    owners = {image_id: client.show(image_id)['owner'] or ''
              for image_id in contents}
    found = import_(run, place, '--update-locations', 'dedup1')
    assert found.status == 0, found.err
    assert {(row['result'], row['verified_by'], row['located'])
            for row in found.rows.values()} == {('imported', 'sha512', True)}
    assert {image_id: row['project'] for image_id, row in found.rows.items()
            } == owners and 'somebody' in owners.values()
    for image_id, data in contents.items():
        assert client.show(image_id)['stores'] == 'file1,dedup1'
        client.request('DELETE', f'/v2/stores/file1/{image_id}')
        assert client.download(image_id) == data
    assert os.listdir(place / 'file1') == []
    for command in 'missing', 'orphans':
        found = run('glance', command, '--store', 'dedup1')
        assert (found.status, found.rows) == (0, {})
    for image_id in contents:
        client.request(
            'PATCH', f'/v2/images/{image_id}', json.dumps([
                {'op': 'replace', 'path': '/protected', 'value': False}]),
            {'Content-Type':
             'application/openstack-images-v2.1-json-patch'})


def test_ids_with_capital_letters(client, run, place):
    """Glance accepts such ids, and does not change them."""
    data = mixture(MIB, 7)
    image_id = str(uuid.uuid4()).upper()
    client.create(name='image', id=image_id)
    client.upload(image_id, data, store='file1')
    found = import_(run, place, '--update-locations', 'dedup1')
    assert found.rows[image_id]['result'] == 'imported', found.err
    assert client.show(image_id)['stores'] == 'file1,dedup1'
    assert run('glance', 'orphans', '--store', 'dedup1').rows == {}
    orphan, unknown = (str(uuid.uuid4()).upper() for _ in range(2))
    put(place, orphan)
    found = run('glance', 'orphans', '--store', 'dedup1', '--delete',
                '--older-than', '0s')
    assert found.rows[orphan]['deleted']
    put(place, unknown)
    found = run('glance', 'register', unknown, '--name', 'again')
    assert 'belongs to no project' in found.err     # and not: is no UUID


def test_locations_are_added_once(client, run, place):
    image_id = upload(client, b'data')
    assert import_(run, place).rows[image_id]['located'] is False
    assert client.show(image_id)['stores'] == 'file1'
    for _ in range(2):
        row = import_(run, place, '--update-locations',
                      'dedup1').rows[image_id]
        assert (row['result'], row['located'], row['verified_by']) == (
            'present', True, 'sha512')
        assert client.show(image_id)['stores'] == 'file1,dedup1'


def test_wrong_bytes_are_not_imported(client, run, place):
    good, flipped, cut = (upload(client, noise(MIB, seed))
                          for seed in range(3))
    data = bytearray((place / 'file1' / flipped).read_bytes())
    data[77] ^= 1
    (place / 'file1' / flipped).write_bytes(data)
    os.truncate(place / 'file1' / cut, MIB - 1)
    found = import_(run, place, '--update-locations', 'dedup1')
    assert found.status == 1
    assert held(place) == [good]
    assert 'sha512' in found.rows[flipped]['error']
    assert (f'{MIB - 1} bytes, but Glance recorded {MIB}'
            in found.rows[cut]['error'])
    assert client.show(flipped)['stores'] == 'file1'


def test_wrong_bytes_that_are_there(client, run, place):
    """An import does not hide wrong bytes in the repository."""
    image_id = upload(client, noise(MIB, 1))
    put(place, image_id, noise(MIB, 2))
    found = import_(run, place, '--update-locations', 'dedup1')
    assert found.status == 1
    assert 'of the repository does not have the sha512' in (
        found.rows[image_id]['error'])
    assert client.show(image_id)['stores'] == 'file1'


def test_what_glance_does_not_have(client, run, place):
    stranger = str(uuid.uuid4())
    (place / 'file1' / stranger).write_bytes(b'data')
    queued = client.create(name='queued')['id']
    (place / 'file1' / queued).write_bytes(b'data')
    found = import_(run, place)
    assert found.status == 0 and held(place) == []
    assert found.rows[stranger]['error'] == 'Glance does not know it'
    assert found.rows[queued]['error'] == 'in Glance it is queued'


@contextlib.contextmanager
def uploading(client, store):
    """Keep an upload going on until this context ends.

    The store has begun it: more was sent than sockets hold. Until then Glance
    may say "saving" while the store would still take another image of the id.
    """
    go_on = threading.Event()
    begun = threading.Event()
    image_id = client.create(name='slow')['id']

    def pieces():
        for _ in range(32):
            yield bytes(MIB)
        begun.set()
        yield noise(MIB, 1)
        go_on.wait(LIMIT)
        yield noise(MIB, 2)

    thread = threading.Thread(target=client.upload,
                              args=(image_id, pieces()),
                              kwargs={'store': store, 'expect': ()})
    thread.start()
    try:
        assert begun.wait(LIMIT)
        assert client.show(image_id)['status'] == 'saving'
        yield image_id
    finally:
        go_on.set()
        thread.join(LIMIT)


def test_an_upload_under_way_is_not_imported(client, run, place):
    with uploading(client, 'file1') as image_id:
        deadline = time.monotonic() + LIMIT
        while not (place / 'file1' / image_id).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = import_(run, place)
        assert found.rows[image_id]['error'] == 'in Glance it is saving'
    assert client.show(image_id)['status'] == 'active'
    assert held(place) == []
    assert import_(run, place).rows[image_id]['result'] == 'imported'


def test_wrong_usage(client, run, place):
    upload(client, b'data')
    found = import_(run, place, '--project', 'p')
    assert found.status == 2 and '--no-glance' in found.err
    found = import_(run, place, '--update-locations', 'dedup2')
    assert found.status == 3 and "no store 'dedup2', but dedup1" in found.err
    found = run('glance', 'missing', '--store', 'dedup2')
    assert found.status == 3 and 'dedup2' in found.err
    found = import_(run, place, '--glance-url', 'http://127.0.0.1:1')
    assert found.status == 3 and 'Traceback' not in found.err
    assert held(place) == []


# -- orphans and missing ------------------------------------------------------

def test_orphans(client, run, place):
    mine = [upload(client, noise(100, seed), 'dedup1') for seed in range(6)]
    hidden = upload(client, b'hidden', 'dedup1', os_hidden=True)
    community = upload(client, b'all', 'dedup1', visibility='community')
    lost, queued = str(uuid.uuid4()), client.create(name='queued')['id']
    for image_id in (lost, queued, 'by-hand'):
        put(place, image_id)
    client.request('POST', f'/v2/images/{mine[0]}/actions/deactivate')
    found = run('glance', 'orphans')
    assert {image_id: row['reason'] for image_id, row in found.rows.items()
            } == {lost: 'Glance does not know it',
                  'by-hand': 'Glance does not know it',
                  queued: 'Glance has no data of it'}
    # All of the images are young.
    found = run('glance', 'orphans', '--delete')
    assert {row['kept'] for row in found.rows.values()} == {
        'it is too young',
        'its id is not one of Glance: it was stored by hand'}
    found = run('glance', 'orphans', '--delete', '--older-than', '0s', queued)
    assert found.rows[queued]['deleted'] is True and len(found.rows) == 1
    time.sleep(1.1)             # ages are in whole seconds
    found = run('glance', 'orphans', '--delete', '--older-than', '0s')
    assert found.status == 0
    assert {image_id: row['deleted'] for image_id, row in found.rows.items()
            } == {lost: True, 'by-hand': False}
    assert held(place) == sorted([*mine, hidden, community, 'by-hand'])


def test_the_wrong_glance(client, run, place):
    """Nothing is deleted if Glance knows less than half of the images."""
    upload(client, b'data', 'dedup1')
    lost = [str(uuid.uuid4()) for _ in range(2)]
    for image_id in lost:
        put(place, image_id)
    time.sleep(1.1)
    found = run('glance', 'orphans', '--delete', '--older-than', '0s')
    assert found.status == 2 and '2 of the 3' in found.err
    assert len(held(place)) == 3
    # Images that the operator names are deleted.
    found = run('glance', 'orphans', '--delete', '--older-than', '0s', *lost)
    assert len(held(place)) == 1


def test_images_elsewhere_are_orphans_of_a_named_store(client, run, place):
    elsewhere = upload(client, b'data', 'file1')
    put(place, elsewhere)
    assert run('glance', 'orphans').rows == {}
    found = run('glance', 'orphans', '--store', 'dedup1')
    assert found.rows[elsewhere]['reason'] == (
        'Glance has it elsewhere: file1')


def test_an_upload_under_way_is_no_orphan(client, run, place):
    with uploading(client, 'dedup1') as image_id:
        # The upload looks committed, and Glance does not know of it.
        put(place, image_id)
        assert run('glance', 'orphans', '--store', 'dedup1').rows == {}


def test_what_glance_gets_to_know_meanwhile(client, place, environment):
    glance = glance_api.Glance()
    image_id = str(uuid.uuid4())
    stat = put(place, image_id)
    known = {image.image_id: image for image in glance.images()}
    found, = orphans.orphans([stat], [known], 'dedup1')
    later = time.time() + 100
    assert orphans.why_kept(found, [glance], 'dedup1', later) is None
    assert orphans.why_kept(found, [glance], 'dedup1', 0) == (
        'it is too young')
    client.create(name='x', id=image_id)
    client.upload(image_id, b'data', store='file1')
    assert orphans.why_kept(found, [glance], None, later) == (
        'Glance has it by now')


def test_another_upload_of_the_same_id_is_not_deleted(client, run, place,
                                                      environment):
    image_id = str(uuid.uuid4())
    stat = put(place, image_id)
    with repositories.open_repository(place / 'dedup1') as repo:
        repo.delete(image_id)
        put(place, image_id, b'other')
        command = adoption.Orphans(entry.App(), None)
        assert command.delete(repo, stat) is False
        assert repo.images() == [image_id]


def test_missing(client, run, place):
    images = [upload(client, noise(100, seed), 'dedup1')
              for seed in range(4)]
    images.append(upload(client, b'hidden', 'dedup1', os_hidden=True))
    upload(client, b'elsewhere', 'file1')
    assert run('glance', 'missing', '--store', 'dedup1').rows == {}
    with repositories.open_repository(place / 'dedup1') as repo:
        repo.delete(images[0])
        repo.delete(images[4])
    found = run('glance', 'missing', '--store', 'dedup1')
    assert found.status == 1
    assert sorted(found.rows) == sorted([images[0], images[4]])


def test_pages(client, place, environment, monkeypatch):
    monkeypatch.setattr(glance_api, 'PAGE', 2)
    images = {upload(client, b'x', 'file1') for _ in range(5)}
    images |= {upload(client, b'x', 'file1', os_hidden=True)
               for _ in range(3)}
    found = [image.image_id for image in glance_api.Glance().images()]
    assert sorted(found) == sorted(images)


def test_a_glance_that_breaks_off(client, run, place, server, environment,
                                  monkeypatch):
    """The command deletes nothing after half a list."""
    monkeypatch.setattr(glance_api, 'PAGE', 2)
    for seed in range(4):
        upload(client, noise(10, seed), 'dedup1')
    images = glance_api.Glance().images()
    next(images)
    server.stop()
    try:
        with pytest.raises(glance_api.GlanceError):
            list(images)
        found = run('glance', 'orphans', '--delete', '--older-than', '0s')
        assert found.status == 3 and len(held(place)) == 4
    finally:
        server.start()
