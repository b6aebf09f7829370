# SPDX-License-Identifier: Apache-2.0

"""The store in the real Glance: uWSGI, several processes, HTTP."""

import collections
import contextlib
import hashlib
import http.client
import io
import json
import os
import pathlib
import random
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import uuid

import pytest

from glance_dedup.repository import image_repository
from tests.functional import glance_server
from tests.support import daemons
from tests.support import repositories

MIB = 1 << 20
SMALL = 24  # MiB, of the file system that is to fill up


def noise(length, seed=1):
    return random.Random(seed).randbytes(length)


def blob(length, seed=1):
    """Return bytes like a disk image's: noise, repetition, zeros."""
    rng = random.Random(seed)
    data = bytearray()
    while len(data) < length:
        kind = rng.randrange(3)
        part = rng.randrange(1, 500000)
        if kind == 0:
            data += rng.randbytes(part)
        elif kind == 1:
            data += bytes(part)
        else:
            data += b'a line of text, again and again\n' * (part // 32)
    return bytes(data[:length])


@pytest.fixture(scope='module')
def small_disk(tmp_path_factory):
    """A file system of a few MiB, mounted for these tests."""
    path = tmp_path_factory.mktemp('small')
    mount = subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', f'size={SMALL}m,mode=700', 'dedup-test',
         path], capture_output=True, text=True)
    if mount.returncode:
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(['umount', '--lazy', path], check=True)


@pytest.fixture(scope='module')
def server(tmp_path_factory, small_disk):
    path = tmp_path_factory.mktemp('glance')
    stores = {
        name: {'type': 'dedup', 'dedup_store_datadir': path / name,
               'dedup_store_filter_dir': path, 'dedup_store_filter_mib': 4}
        for name in ('one', 'two', 'frail')}
    stores['frail']['dedup_store_codec'] = 'none'
    stores['frail']['dedup_store_timeout'] = 60
    stores['plain'] = {'type': 'file',
                       'filesystem_store_datadir': path / 'plain'}
    if small_disk:
        stores['small'] = {
            'type': 'dedup', 'dedup_store_datadir': small_disk / 'store',
            'dedup_store_filter_dir': path, 'dedup_store_filter_mib': 1}
    options = {'DEFAULT': {'show_multiple_locations': True}}
    with glance_server.GlanceServer(path / 'server', stores, processes=3,
                                    threads=4, options=options) as running:
        assert len(running.worker_pids()) >= 2
        yield running


@pytest.fixture
def client(server):
    return Client(server.url)


class Client(glance_server.Client):
    """Repeats requests that SQLite refused, as it takes one writer at a time.

    Uploads are not repeated: it is not known how far they came.
    """

    def request(self, method, path, body=None, headers=None, chunked=False,
                expect=(200, 201, 202, 204)):
        for attempt in range(20):
            answer = super().request(method, path, body, headers, chunked, ())
            status, _headers, content = answer
            if status != 500 or method == 'PUT' or 500 in expect:
                break
            time.sleep(0.05 * (attempt + 1))
        if expect and status not in expect:
            raise glance_server.HTTPError(method, path, status, content)
        return answer

    def patch(self, image_id, changes, expect=(200,)):
        return self.request(
            'PATCH', f'/v2/images/{image_id}', json.dumps(changes).encode(),
            {'Content-Type':
             'application/openstack-images-v2.1-json-patch'}, expect=expect)

    def wait(self, image_id, status):
        deadline = time.monotonic() + 30
        while self.show(image_id)['status'] != status:
            assert time.monotonic() < deadline, self.show(image_id)
            time.sleep(0.05)


@pytest.fixture
def new(client):
    """Yields a function that creates image records, deleted at the end."""
    made = []

    def _new(**properties):
        made.append(client.create(**properties)['id'])
        return made[-1]

    yield _new
    for image_id in made:
        client.delete(image_id, expect=(204, 404))


def store_path(server, name):
    return pathlib.Path(server.stores[name]['dedup_store_datadir'])


@contextlib.contextmanager
def opened(server, name, tmp_path):
    with image_repository.Repository(str(store_path(server, name)),
                                     filter_dir=str(tmp_path),
                                     filter_mib=1) as found:
        yield found


def stored(server, name='one'):
    return sorted(os.listdir(store_path(server, name) / 'images'))


def spooled(server, name='one'):
    """Return the uploads under way: a committed recipe has a second name."""
    return [entry.name
            for entry in os.scandir(store_path(server, name) / 'spool')
            if entry.name.startswith('T-') and entry.stat().st_nlink == 1]


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- Successes -------------------------------------------------------------


@pytest.mark.parametrize('known', [True, False], ids=['known', 'unknown'])
@pytest.mark.parametrize('length', [
    1, 4095, 4096, 4097, 4 * MIB, 13 * MIB + 7])
def test_round_trip(client, new, length, known):
    data = blob(length, length)
    image_id = new()
    client.upload(image_id, data if known else io.BytesIO(data))
    image = client.show(image_id)
    assert (image['status'], image['size']) == ('active', length)
    assert image['checksum'] == hashlib.md5(data).hexdigest()
    assert image['os_hash_algo'] == 'sha512'
    assert image['os_hash_value'] == hashlib.sha512(data).hexdigest()
    assert image['stores'] == 'one'
    assert client.download(image_id) == data


def test_nothing_at_all(client, new):
    image_id = new()
    client.upload(image_id, io.BytesIO(b''))
    assert client.show(image_id)['size'] == 0
    assert client.download(image_id) == b''


def test_ranges(client, new):
    data = blob(10 * MIB, 3)
    image_id = new()
    client.upload(image_id, data)
    rng = random.Random(4)
    cases = [(0, 0), (len(data) - 1, len(data) - 1), (4 * MIB - 1, 4 * MIB),
             (0, len(data) - 1), (5, None)]
    for _ in range(30):
        first = rng.randrange(len(data))
        cases.append((first, rng.randrange(first, len(data))))
    for first, last in cases:
        with client.open(image_id, first, last) as response:
            assert response.status == 206
            end = len(data) if last is None else last + 1
            assert response.read() == data[first:end]
    assert client.request(
        'GET', f'/v2/images/{image_id}/file', expect=(416,),
        headers={'Range': f'bytes={len(data)}-{len(data) + 5}'})


def test_delete(server, client):
    image_id = client.create()['id']
    client.upload(image_id, blob(MIB))
    assert image_id in stored(server)
    client.delete(image_id)
    assert image_id not in stored(server)
    client.request('GET', f'/v2/images/{image_id}/file', expect=(404,))


def test_a_client_that_drops_a_download(server, client, new):
    data = blob(30 * MIB, 5)
    image_id = new()
    client.upload(image_id, data)
    for _ in range(30):
        with client.open(image_id) as response:
            assert response.read(100000) == data[:100000]
    path = str(store_path(server, 'one') / 'images')

    def readers():
        count = 0
        for pid in server.worker_pids():
            for link in pathlib.Path(f'/proc/{pid}/fd').iterdir():
                with contextlib.suppress(OSError):
                    count += os.readlink(link).startswith(path)
        return count

    until(lambda: readers() == 0)
    assert client.download(image_id) == data


def test_several_stores(server, client, new):
    data = blob(3 * MIB, 6)
    images = {}
    for name in ('one', 'two', 'plain', 'frail'):
        images[name] = new()
        client.upload(images[name], data, store=name)
    for name, image_id in images.items():
        image = client.show(image_id)
        assert image['stores'] == name
        url = image['locations'][0]['url']
        assert url.startswith('file:' if name == 'plain' else 'dedup:')
        assert client.download(image_id) == data
        for other in ('one', 'two', 'frail'):
            assert (image_id in stored(server, other)) == (other == name)
    assert {store['id'] for store in client.stores()} == set(server.stores)
    for name, image_id in images.items():
        client.delete(image_id)
        if name != 'plain':
            assert image_id not in stored(server, name)


def test_duplicates_cost_no_space(server, client, new, tmp_path):
    data = noise(6 * MIB, 7)
    first, second = new(), new()
    client.upload(first, data)
    client.upload(second, data)
    with opened(server, 'one', tmp_path) as found:
        assert found.stat(first).new_bytes > 0
        assert found.stat(second).new_bytes < len(data) // 10


# Long: it lasts fifteen seconds.
@pytest.mark.slow
@pytest.mark.timeout(480)
def test_many_clients_and_processes_at_once(server, client):
    """Concurrent uploads, downloads and deletes; every byte is compared.

    They last for a while, and on a slow machine until enough were done.
    """
    seconds, most, errors = 15, 240, []
    images = {}  # id: content
    lock = threading.Lock()
    counts = collections.Counter()
    start = time.monotonic()
    names = ('one', 'two')
    logged = server.log.stat().st_size

    def enough():
        return min(counts[name] for name in ('up', 'down', 'deleted')) > 5

    def going_on():
        return time.monotonic() < start + (seconds if enough() else most)

    def count(name):
        with lock:
            counts[name] += 1

    def remove(mine, image_id):
        # 400 and 404: SQLite refused the answer to a delete that was done.
        mine.delete(image_id, expect=(204, 400, 404))

    def run(number):
        rng = random.Random(number)
        mine = Client(server.url)
        try:
            while going_on():
                what = rng.random()
                with lock:
                    image_id = rng.choice(list(images)) if images else None
                    data = images.get(image_id)
                    if what >= 0.75:
                        images.pop(image_id, None)
                if what < 0.4 or image_id is None:
                    seed = rng.randrange(40)
                    data = blob(rng.randrange(1, 3 * MIB), seed)
                    image_id = mine.create()['id']
                    status = mine.upload(
                        image_id,
                        data if rng.random() < 0.5 else io.BytesIO(data),
                        store=rng.choice(names), expect=())
                    if status == 500:  # SQLite
                        remove(mine, image_id)
                        count('refused')
                        continue
                    assert status == 204
                    with lock:
                        images[image_id] = data
                    count('up')
                elif what < 0.75:
                    status, _headers, got = mine.request(
                        'GET', f'/v2/images/{image_id}/file', expect=())
                    if status == 200:
                        assert got == data
                        count('down')
                    else:
                        with lock:
                            assert image_id not in images, status
                else:
                    remove(mine, image_id)
                    count('deleted')
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(number,))
               for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    # All failures were the database's.
    with open(server.log, 'rb') as log:
        log.seek(logged)
        assert b'glance_dedup' not in log.read()
    assert enough(), counts
    for image_id, data in images.items():
        assert client.download(image_id) == data
        client.delete(image_id)
    left = set(images) & set(stored(server) + stored(server, 'two'))
    assert not left
    assert not spooled(server) and not spooled(server, 'two')


# -- Failures --------------------------------------------------------------


def start_upload(server, image_id, length, first):
    """Send the beginning of an upload; returns the socket."""
    host, port = server.url.split('//')[1].split(':')
    sock = socket.create_connection((host, int(port)), timeout=30)
    sock.sendall(f'PUT /v2/images/{image_id}/file HTTP/1.1\r\n'
                 f'Host: {host}\r\nContent-Type: application/octet-stream\r\n'
                 f'Content-Length: {length}\r\n\r\n'.encode())
    sock.sendall(first)
    return sock


@pytest.mark.parametrize('how', ['closed', 'reset'])
def test_a_client_that_disconnects_and_comes_back(server, client, new, how):
    data = blob(20 * MIB, 8)
    image_id = new()
    sock = start_upload(server, image_id, len(data), data[:12 * MIB])
    until(lambda: spooled(server))
    if how == 'reset':
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER,
                        struct.pack('ii', 1, 0))
    sock.close()
    client.wait(image_id, 'queued')
    assert not spooled(server)
    assert image_id not in stored(server)
    client.upload(image_id, data)
    assert client.download(image_id) == data


@pytest.mark.parametrize('said,there', [
    (5 * MIB, 5 * MIB + 1), (5 * MIB, 5 * MIB - 1), (1, MIB), (MIB, 1)])
def test_another_size_than_was_said(server, client, new, said, there):
    data = blob(there, 9)
    image_id = new()
    status = client.upload(
        image_id, io.BytesIO(data), expect=(400,),
        headers={'X-Openstack-Image-Size': str(said)})
    assert status == 400
    assert client.show(image_id)['status'] == 'queued'
    assert image_id not in stored(server) and not spooled(server)
    client.upload(image_id, data,
                  headers={'X-Openstack-Image-Size': str(there)})
    assert client.download(image_id) == data


def test_a_second_upload_of_an_image(client, new):
    image_id = new()
    client.upload(image_id, b'first')
    client.upload(image_id, b'second', expect=(409,))
    assert client.download(image_id) == b'first'


def test_an_id_that_is_taken_in_the_store(server, client, new, tmp_path):
    """No upload overwrites an orphan, an image that Glance does not know."""
    image_id = new()
    with opened(server, 'one', tmp_path) as found:
        found.put(image_id, io.BytesIO(b'orphan'))
        client.upload(image_id, b'other', expect=(500,))
        assert client.show(image_id)['status'] == 'queued'
        with found.open_image(image_id) as image:
            assert image.read() == b'orphan'
        found.delete(image_id)
    client.upload(image_id, b'other')
    assert client.download(image_id) == b'other'


def test_a_disk_that_is_full(server, client, new, small_disk):
    if small_disk is None:
        pytest.skip('mounting a tmpfs needs root')
    there, too_big, later = new(), new(), new()
    kept = noise(6 * MIB, 10)
    client.upload(there, kept, store='small')
    for known in (True, False):
        data = noise(40 * MIB, 11)
        status = client.upload(too_big, data if known else io.BytesIO(data),
                               store='small', expect=(413,))
        assert status == 413
        assert client.show(too_big)['status'] == 'queued'
        assert too_big not in stored(server, 'small')
        assert not spooled(server, 'small')
    # The first image is still there, and can be deleted.
    assert client.download(there) == kept
    client.delete(there)
    assert there not in stored(server, 'small')
    client.upload(too_big, kept, store='one')  # another store has room
    assert client.download(too_big) == kept
    # Zeros need next to no room.
    client.upload(later, bytes(100 * MIB), store='small',
                  expect=(204, 413))


def test_deleting_on_a_disk_without_a_free_byte(server, client, new,
                                                small_disk):
    if small_disk is None:
        pytest.skip('mounting a tmpfs needs root')
    image_id = new()
    client.upload(image_id, bytes(MIB), store='small', expect=(204, 413))
    filler = small_disk / 'filler'
    try:
        with contextlib.suppress(OSError), open(filler, 'wb') as full:
            while True:
                full.write(bytes(4096))
                full.flush()
        free = os.statvfs(small_disk)
        assert free.f_bavail == 0
        client.delete(image_id)
        assert image_id not in stored(server, 'small')
    finally:
        filler.unlink()


def test_a_disk_whose_reserve_is_reached(server, client, new, small_disk):
    """An upload is refused before it stores a block, until there is space."""
    if small_disk is None:
        pytest.skip('mounting a tmpfs needs root')
    there, refused = new(), new()
    data = noise(6 * MIB, 12)
    client.upload(there, data, store='small')
    path = store_path(server, 'small')
    filler = small_disk / 'filler'
    try:
        with image_repository.Repository(
                str(path), filter_dir=str(path.parent),
                filter_mib=1) as found, open(filler, 'wb') as f:
            free, kept = found.room()
            os.posix_fallocate(f.fileno(), 0, free - kept // 2)
        before = sorted(os.listdir(path / 'groups'))
        assert client.upload(refused, b'small', store='small',
                             expect=(413,)) == 413
        assert client.show(refused)['status'] == 'queued'
        assert 'are kept for deleting and collecting' in server.log.read_text()
        assert not spooled(server, 'small')
        assert sorted(os.listdir(path / 'groups')) == before
        assert client.download(there) == data
        client.delete(there)
        subprocess.run(
            [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
             path, '--socket', '', 'task', 'collect'], check=True, timeout=120,
            capture_output=True)
        client.upload(refused, b'small', store='small')
        assert client.download(refused) == b'small'
    finally:
        filler.unlink()


def test_killed_workers(server, client, new):
    """The same id can be uploaded again after kill -9 amid an upload."""
    data = blob(20 * MIB, 12)
    image_id = new()
    sock = start_upload(server, image_id, len(data), data[:15 * MIB])
    until(lambda: spooled(server))
    before = set(server.worker_pids())
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    sock.close()

    def back():
        try:
            return (len(set(server.worker_pids()) - before) == len(before)
                    and client.show(image_id))
        except (OSError, http.client.HTTPException):
            return False

    until(back, 60)
    assert client.show(image_id)['status'] == 'saving'
    assert image_id not in stored(server)
    # Glance leaves it so. An operator sets it back, here by hand.
    with contextlib.closing(sqlite3.connect(
            server.directory / 'glance.sqlite', timeout=30)) as database:
        database.execute("UPDATE images SET status = 'queued' WHERE id = ?",
                         (image_id,))
        database.commit()
    client.upload(image_id, data)
    assert client.download(image_id) == data


def frail_image(server, client, new, length, seed):
    data = noise(length, seed)
    groups = store_path(server, 'frail') / 'groups'
    before = {path: path.stat().st_size for path in groups.iterdir()}
    image_id = new()
    client.upload(image_id, data, store='frail')
    return image_id, data, groups, before


def damage(groups, content):
    """Change one byte of the content that a group holds."""
    for path in groups.iterdir():
        raw = path.read_bytes()
        place = raw.find(content)
        if place >= 0:
            with open(path, 'r+b') as group:
                group.seek(place + 7)
                group.write(bytes([raw[place + 7] ^ 1]))
            return
    raise AssertionError('not found')


def test_damage_at_the_start_is_503(server, client, new):
    image_id, data, groups, _before = frail_image(server, client, new,
                                                  3 * MIB, 13)
    assert client.download(image_id) == data
    damage(groups, data[8192:8192 + 512])
    for _ in range(4):  # any of the processes may answer
        client.request('GET', f'/v2/images/{image_id}/file', expect=(503,))
        client.request('GET', f'/v2/images/{image_id}/file', expect=(503,),
                       headers={'Range': 'bytes=9000-9001'})


def test_damage_further_on_cuts_the_download_off(server, client, new):
    image_id, data, groups, _before = frail_image(server, client, new,
                                                  20 * MIB, 14)
    place = 13 * MIB
    damage(groups, data[place:place + 512])
    for _ in range(4):
        got = b''
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            with client.open(image_id) as response:
                while piece := response.read(MIB):
                    got += piece
                if len(got) < len(data):
                    raise http.client.IncompleteRead(b'')
        assert len(got) <= place and data.startswith(got)
    # Intact parts can be read.
    assert client.download(image_id, 0, MIB) == data[:MIB + 1]


# -- Locations -------------------------------------------------------------


def location_of(client, image_id):
    (place,) = client.show(image_id)['locations']
    assert place['metadata']['store']
    return place


def test_locations_that_nobody_signed(client, new):
    """A member who may set locations still cannot make a valid one."""
    victim, other = new(), new()
    client.upload(victim, b'secret', store='one')
    client.upload(other, b'other', store='two')
    place = location_of(client, victim)
    repository_id, image_id, upload_id, mac = place['url'].split('/')[2:]
    assert image_id == victim
    two = location_of(client, other)['url'].split('/')
    forged = [
        f'dedup://{repository_id}/{victim}',
        f'dedup://{repository_id}/{victim}/{upload_id}',
        f'dedup://{repository_id}/{victim}/{upload_id}/',
        f'dedup://{repository_id}/{victim}/{upload_id}/{"0" * 64}',
        f'dedup://{repository_id}/{victim}/{upload_id}/{mac[:-1]}',
        f'dedup://{repository_id}/{victim}/{upload_id}/{two[5]}',
        f'dedup://{repository_id}/{uuid.uuid4()}/{upload_id}/{mac}',
        f'dedup://{two[2]}/{victim}/{upload_id}/{mac}',
        f'dedup://{repository_id}/../images/{victim}/{upload_id}/{mac}',
        f'dedup://{repository_id}/{victim}/{upload_id}/{mac}?x=1',
    ]
    mine = new()
    for url in forged:
        for metadata in ({'store': 'one'}, {'store': 'two'}):
            client.patch(mine, [{
                'op': 'add', 'path': '/locations/-',
                'value': {'url': url, 'metadata': metadata}}], expect=(400,))
    assert client.show(mine)['status'] == 'queued'
    client.delete(mine)
    assert client.download(victim) == b'secret'
    assert client.download(other) == b'other'


def test_a_store_that_was_renamed(client, server, new):
    """Glance finds the store of a location by its prefix."""
    image_id = new()
    client.upload(image_id, b'data', store='two')
    place = location_of(client, image_id)
    with contextlib.closing(sqlite3.connect(
            server.directory / 'glance.sqlite', timeout=30)) as database:
        database.execute(
            'UPDATE image_locations SET meta_data = ? WHERE image_id = ?',
            (json.dumps({'store': 'former'}), image_id))
        database.commit()
    assert client.download(image_id) == b'data'
    assert location_of(client, image_id) == place


def test_stores_detail_is_broken_in_glance(client):
    """This is Glance's own fault, with any store it does not know.

    If this test fails, Glance has been repaired: remove the fault from the
    documents.
    """
    client.request('GET', '/v2/info/stores/detail', expect=(500,))


def test_workers_that_uwsgi_forked_from_the_loaded_application(tmp_path):
    """Workers that uWSGI forked store and read images."""
    stores = {
        name: {'type': 'dedup', 'dedup_store_datadir': tmp_path / name,
               'dedup_store_filter_dir': tmp_path / 'filter', **more}
        for name, more in (('plain', {}),
                           ('timed', {'dedup_store_timeout': '60'}))}
    with glance_server.GlanceServer(
            tmp_path / 'glance', stores, lazy_apps=False) as server:
        client = glance_server.Client(server.url)
        data = blob(3 * MIB)
        for number in range(4 * server.processes):
            for store in stores:
                image_id = client.create(name=store)['id']
                status, _, _ = client.request(
                    'PUT', f'/v2/images/{image_id}/file', data,
                    {'Content-Type': 'application/octet-stream',
                     'X-Image-Meta-Store': store}, expect=(204,))
                assert client.download(image_id) == data
        # At their end Glance's workers would wait for a thread that exists
        # only in the process from which they were forked.
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize('index, processes', [('lmdb', 2), ('dtb', 1)])
def test_all_else_that_a_forked_worker_uses(tmp_path, index, processes):
    """An index, a limit and the daemon; also in a worker that is forked later.

    The master forks one when another has died.
    """
    path = repositories.create(tmp_path / 'store')
    data, limit = blob(3 * MIB, 2), 24
    with daemons.running(path) as daemon, glance_server.ProjectServer(
            tmp_path / 'glance', {'dedup1': {
                'type': 'dedup', 'dedup_store_datadir': path,
                'dedup_store_filter_dir': tmp_path / 'filter',
                'dedup_store_index': index,
                'dedup_store_index_dir': tmp_path / 'index',
                'dedup_store_dedupd_socket': daemon.socket,
                'dedup_store_project_limit_mib': limit}},
            processes=processes, lazy_apps=False) as server:
        client = glance_server.ProjectClient(server.url, 'alice')
        for _ in range(2):
            images = []
            for _ in range(3 * processes):
                images.append(client.create(name='image')['id'])
                client.upload(images[-1], data)
                assert client.download(images[-1]) == data
            for _ in range(processes):
                refused = client.create(name='refused')['id']
                client.upload(refused, noise((limit + 1) * MIB, 3),
                              expect=(413,))
                client.delete(refused)
            for image_id in images:
                client.delete(image_id)
            before = set(server.worker_pids())
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            repositories.eventually(lambda: len(
                set(server.worker_pids()) - before) == processes)
            # What was given up counts until it is collected.
            daemon.run('collect')
        daemon.wait_for(lambda: daemon.status()['reads']['bytes'] > 0)
        assert 'Traceback' not in server.log.read_text()
        # As in the test above.
        server.kill()
    repositories.require_clean(path)
