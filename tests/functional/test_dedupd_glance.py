# SPDX-License-Identifier: Apache-2.0

"""A real Glance with a real dedupd beside it.

Upload, delete, the space back; downloads through the daemon, and across its
death; the token check of reads over TLS.
"""

import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys

import pytest

from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from tests.functional import glance_server
from tests.support import certificates
from tests.support import daemons
from tests.support import ports
from tests.support import repositories

pytestmark = pytest.mark.slow

MIB = 1 << 20


def noise(length, seed):
    return random.Random(seed).randbytes(length)


class PatientServer(glance_server.GlanceServer):
    module = 'tests.functional.patient_driver'


@pytest.fixture(scope='module')
def places(tmp_path_factory):
    return tmp_path_factory.mktemp('cloud')


@pytest.fixture(scope='module')
def daemon(places):
    datadir = repositories.create(places / 'repository')
    with daemons.Daemon(datadir) as running:
        yield running.start().wait_for_catalog()


@pytest.fixture(scope='module')
def glance(places, daemon):
    stores = {'dedup': {
        'type': 'dedup', 'dedup_store_datadir': places / 'repository',
        'dedup_store_filter_dir': places / 'filter',
        'dedup_store_filter_mib': 4, 'dedup_store_codec': 'none',
        'dedup_store_dedupd_socket': daemon.socket},
        'plain': {'type': 'file',
                  'filesystem_store_datadir': places / 'plain'}}
    with PatientServer(places / 'server', stores, processes=2,
                       threads=4) as running:
        yield glance_server.Client(running.url)


@pytest.fixture(autouse=True)
def clean(places, daemon, glance):
    """Each test leaves no image for the next, and a clean repository."""
    if daemon.process.poll() is not None:
        daemon.start().wait_for_catalog()
    assert daemon.run('collect')['last']['error'] is None
    yield
    for image in glance.list():
        glance.delete(image['id'])
    if daemon.process.poll() is None:
        daemon.stop()
    repositories.require_clean(places / 'repository')


def on_disk(places):
    """Return the bytes of the disk that the block groups take, as ``du``."""
    groups = places / 'repository' / 'groups'
    return sum(os.stat(groups / name).st_blocks * 512
               for name in os.listdir(groups))


def store(glance, data):
    image_id = glance.create(name='image')['id']
    glance.upload(image_id, data)
    return image_id


def command(places, daemon, *arguments):
    done = subprocess.run(
        [pathlib.Path(sys.executable).parent / 'glance-dedup',
         '--repository', places / 'repository', '--socket', daemon.socket,
         *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_space_comes_back(places, daemon, glance):
    base = noise(24 * MIB, 1)
    first = store(glance, base + noise(16 * MIB, 2))
    second = store(glance, base)
    before = on_disk(places)
    glance.delete(first)
    last = daemon.run('collect')['last']
    assert last['error'] is None
    assert last['result']['freed_bytes'] == 16 * MIB
    assert on_disk(places) <= before - 15 * MIB
    assert glance.download(second) == base


def test_space_comes_back_by_command(places, daemon, glance):
    image_id = store(glance, noise(8 * MIB, 3))
    before = on_disk(places)
    glance.delete(image_id)
    planned = json.loads(command(places, daemon, 'task', 'collect',
                                 '--dry-run', '-f', 'json'))
    assert planned['bytes'] == 8 * MIB
    done = json.loads(command(places, daemon, 'task', 'collect', '-f', 'json'))
    assert done['freed_bytes'] == 8 * MIB
    assert on_disk(places) <= before - 7 * MIB
    shown = json.loads(command(places, daemon, 'status', '-f', 'json'))
    assert shown['space']['images'] == 0


def test_space_comes_back_without_a_daemon(places, daemon, glance):
    image_id = store(glance, noise(8 * MIB, 4))
    before = on_disk(places)
    daemon.stop()
    glance.delete(image_id)
    done = json.loads(command(places, daemon, 'task', 'collect', '-f', 'json'))
    assert done['freed_bytes'] == 8 * MIB
    assert on_disk(places) <= before - 7 * MIB


def test_download_through_the_daemon(daemon, glance):
    data = noise(20 * MIB + 4321, 5)
    image_id = store(glance, data)
    before = daemon.status()['reads']['bytes']
    assert glance.download(image_id) == data
    daemon.wait_for(lambda: (
        daemon.status()['reads']['bytes'] - before >= len(data)))
    assert glance.download(image_id, 4095, 9 * MIB) == data[4095:9 * MIB + 1]


def test_download_across_the_daemons_death(daemon, glance):
    data = noise(64 * MIB + 1, 6)
    image_id = store(glance, data)
    received = bytearray()
    with glance.open(image_id) as response:
        received += response.read(8 * MIB)
        daemon.stop(signal.SIGKILL)
        while piece := response.read(MIB):
            received += piece
    assert bytes(received) == data
    # Downloads also work without the daemon.
    assert glance.download(image_id) == data


def test_collection_waits_for_a_download(places, daemon, glance):
    data = noise(64 * MIB, 7)
    image_id = store(glance, data)
    received = bytearray()
    with glance.open(image_id) as response:
        received += response.read(MIB)
        glance.delete(image_id)
        assert daemon.run('collect')['last']['result']['freed_blocks'] == 0
        while piece := response.read(MIB):
            received += piece
    assert bytes(received) == data

    def freed():
        return daemon.run('collect')['last']['result']['freed_bytes']
    repositories.eventually(lambda: freed() == 64 * MIB)


def test_uploads_while_the_daemon_works(places, daemon, glance):
    """Images stay right under uploads, deletes, collections and merges."""
    base = noise(8 * MIB, 8)
    images = {}
    for turn in range(6):
        data = base[turn * MIB:] + noise(4 * MIB, 100 + turn)
        images[store(glance, data)] = data
        if turn % 2:
            victim = min(images)
            glance.delete(victim)
            del images[victim]
        for task in ('collect', 'merge'):
            assert daemon.run(task)['last']['error'] is None
    for image_id, data in images.items():
        assert glance.download(image_id) == data
    # The repository has exactly the blocks that the images need.
    assert daemon.run('merge')['last']['error'] is None
    assert daemon.run('collect')['last']['error'] is None
    exact = {data[i:i + 4096] for data in images.values()
             for i in range(0, len(data), 4096)}
    assert daemon.status()['space']['unique_blocks'] == len(exact)


class Listening:
    """A second daemon of the repository, which only reads, over TLS."""

    def __init__(self, places, glance, directory):
        self.authority = certificates.Authority(directory)
        self.port = ports.free_port()
        self.daemon = daemons.Daemon(
            places / 'repository', listen=f'127.0.0.1:{self.port}',
            tls_cert=self.authority.issue('server'),
            tls_key=directory / 'server.pem',
            tls_client_ca=self.authority.path,
            glance_url=f'http://{glance.address}')

    def client(self, **options):
        return daemon_client.Client(f'https://127.0.0.1:{self.port}',
                                    ca_file=str(self.authority.path),
                                    **options)

    def __enter__(self):
        self.daemon.__enter__()
        self.daemon.start()
        return self

    def __exit__(self, *exc_info):
        self.daemon.__exit__(*exc_info)


def read(far, name):
    with far, far.open_image(name) as stream:
        return stream.read(stream.size)


def refusal(far, name):
    """Return the refusal of an image's bytes, description and blocks."""
    answers = []
    with far:
        for ask in (lambda: far.open_image(name), lambda: far.recipe(name),
                    lambda: list(far.blocks(name, '0' * 32, []))):
            with pytest.raises(client_errors.Refused) as refused:
                ask()
            answers.append((refused.value.code, str(refused.value)))
    assert len(set(answers)) == 1, answers
    return answers[0]


def test_an_id_alone_opens_nothing(places, daemon, glance, tmp_path):
    """A user who made an image of a known id elsewhere gets only his own."""
    secret, own = noise(2 * MIB, 90), noise(2 * MIB, 91)
    image_id = store(glance, secret)
    with repositories.open_repository(places / 'repository') as repo:
        kept = repo.stat(image_id)
        assert (kept.hash_name, kept.hash_value) == (
            'sha512', hashlib.sha512(secret).hexdigest())
    # Glance has forgotten these two images, and the repository still has them.
    fresh = {'old': '1' * 8 + '-1111-4111-8111-' + '1' * 12,
             'new': '2' * 8 + '-2222-4222-8222-' + '2' * 12}
    with repositories.open_repository(places / 'repository') as repo:
        repositories.put(repo, fresh['old'], secret)
        with repo.begin(fresh['new']) as transaction:
            transaction.write(secret)
            transaction.set_hash('sha512', hashlib.sha512(secret).digest())
            transaction.commit()
    for name in fresh.values():
        glance.create(id=name, name='mine')
        glance.upload(name, own, store='plain')
    with Listening(places, glance, tmp_path) as second:
        assert read(second.client(token='valid'), image_id) == secret
        # The one has no recorded hash, the other another image's.
        code, text = refusal(second.client(token='valid'), fresh['old'])
        assert code == 403
        assert f'image verify --algorithm sha512 {fresh["old"]}' in text
        assert refusal(second.client(token='valid'), fresh['new'])[0] == 404
        # Now an operator verifies it: it is still another image.
        shown = json.loads(command(places, daemon, 'image', 'verify',
                                   fresh['old'], '-f', 'json'))
        assert shown[0]['hash_value'] == hashlib.sha512(secret).hexdigest()
        assert refusal(second.client(token='valid'), fresh['old'])[0] == 404
        told = [line for line in second.daemon.text().splitlines()
                if 'No token opens' in line and fresh['old'] in line]
        assert len(told) == 2, told
        # This one is Glance's image, stored by an old program.
        for name in fresh.values():
            glance.delete(name)
        with repositories.open_repository(places / 'repository') as repo:
            repo.delete(fresh['new'])
            repositories.put(repo, fresh['new'], own)
        third = '3' * 8 + fresh['new'][8:]
        glance.create(id=third, name='mine')
        glance.upload(third, own, store='plain')
        with repositories.open_repository(places / 'repository') as repo:
            repositories.put(repo, third, own)
        assert refusal(second.client(token='valid'), third)[0] == 403
        command(places, daemon, 'image', 'verify', third)
        assert read(second.client(token='valid'), third) == own
    with repositories.open_repository(places / 'repository') as repo:
        for name in (*fresh.values(), third):
            repo.delete(name)


def test_tokens_are_glances_to_judge(places, daemon, glance, tmp_path):
    """Over TLS a user reads what Glance lets the token read, and no more."""
    data = noise(3 * MIB + 5, 9)
    image_id = store(glance, data)
    with repositories.open_repository(places / 'repository') as repo:
        repositories.put(repo, 'unknown-to-glance', data)
    with Listening(places, glance, tmp_path) as second:
        client = second.client
        assert read(client(token='valid'), image_id) == data
        with pytest.raises(client_errors.Refused) as refused:
            read(client(token='valid'), 'unknown-to-glance')
        assert refused.value.code == 404
        with pytest.raises(client_errors.Refused) as refused:
            read(client(), image_id)
        assert refused.value.code == 401
        operator = str(second.authority.issue('operator'))
        assert read(client(cert=operator), 'unknown-to-glance') == data
        # Images deleted from Glance can no longer be read by its users.
        glance.delete(image_id)
        with pytest.raises(client_errors.Refused):
            read(client(token='valid'), image_id)
    with repositories.open_repository(places / 'repository') as repo:
        repo.delete('unknown-to-glance')
