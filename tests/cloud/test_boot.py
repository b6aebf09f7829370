# SPDX-License-Identifier: Apache-2.0
"""Nova boots servers from images in the store, and takes snapshots into it."""

import contextlib
import hashlib
import pathlib
import subprocess
import sys
import uuid

import pytest

from glance_dedup.base import exceptions
from glance_dedup.repository import image_repository
from tests.cloud import boot
from tests.cloud import cloud_service
from tests.cloud import disk_images
from tests.cloud import nova

# Long: the first test starts all of OpenStack; servers boot without KVM.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MIB = 1 << 20
#: A snapshot of a server that was only started differs in a file, in the file
#: system's own blocks, and in tables of the disk's format.
LITTLE = MIB // 4
#: MiB that no other image has.
OWN = 4


class Sandbox:
    """Images and servers of a test in the cloud, deleted after it."""

    def __init__(self, cloud, directory):
        self.demo = cloud.connect('demo')
        self.repository = image_repository.Repository(cloud.repository)
        self._directory = directory
        self._images = []
        self._servers = []

    def upload(self, message):
        """Upload an image whose servers show a message."""
        path = self._directory / 'image'
        disk_images.variant(disk_images.images().raw, path, message, OWN)
        self._images.append(boot.upload(self.demo, path, message))
        return self._images[-1]

    def server(self, image):
        """Start a server; return its id and its output, once it is up."""
        self._servers.append(boot.create(self.demo, image, 'server'))
        return self._servers[-1], boot.wait_until_up(
            self.demo, self._servers[-1])

    def snapshot(self, server):
        self._images.append(boot.snapshot(self.demo, server, 'snapshot'))
        return self._images[-1]

    def clear(self):
        """Delete servers and images, which must all be deletable."""
        while self._servers:
            boot.delete(self.demo, self._servers.pop())
        while self._images:
            self.demo.image.delete_image(self._images.pop())

    def close(self):
        with contextlib.ExitStack() as stack:
            stack.callback(self.demo.close)
            stack.callback(self.repository.close)
            self.clear()


@pytest.fixture
def sandbox(cloud, tmp_path):
    sandbox = Sandbox(cloud, tmp_path)
    yield sandbox
    sandbox.close()


def message():
    """Return a message that neither an image nor Nova's cache has."""
    return f'an image of the test {uuid.uuid4()}'


def cached(cloud, image):
    """Return Nova's copy of an image, under its servers' disks."""
    name = hashlib.sha1(image.encode(), usedforsecurity=False).hexdigest()
    return cloud.directory / 'var/nova/instances/_base' / name


def unique_bytes(cloud):
    """Return the size of the store's blocks, after a collection."""
    client = cloud.services['dedupd'].client()
    done = client.wait('collect', client.start('collect'))
    assert done['error'] is None
    return client.status()['space']['unique_bytes']


@pytest.fixture(params=['qcow2', pytest.param('raw', marks=pytest.mark.long)])
def snapshot_format(cloud, request, monkeypatch):
    """Format of Nova's snapshots: by default that of a server's disk."""
    if request.param == 'qcow2':
        yield request.param
        return
    options = nova._options
    monkeypatch.setattr(nova, '_options', lambda *args: {
        **(given := options(*args)),
        'libvirt': {**given['libvirt'],
                    'snapshot_image_format': request.param}})
    compute = cloud.services['nova-compute']
    compute.stop()
    compute.start()
    yield request.param
    monkeypatch.undo()
    compute.stop()
    compute.start()


def test_boot_snapshot_boot(cloud, sandbox, snapshot_format):
    text = message()
    before = unique_bytes(cloud)
    base = sandbox.upload(text)
    size = sandbox.demo.image.get_image(base).size
    stat = sandbox.repository.stat(base)
    assert stat.size == size and stat.new_bytes >= OWN * MIB
    assert not cached(cloud, base).exists()

    server, shown = sandbox.server(base)
    assert shown == (text, 1)
    # Nova downloaded it once, from Glance.
    assert [download.size for download in boot.downloads(cloud, base)] == [
        size]
    assert cached(cloud, base).stat().st_size == size

    snapshot = sandbox.snapshot(server)
    record = sandbox.demo.image.get_image(snapshot)
    assert record.disk_format == snapshot_format
    assert record.properties['base_image_ref'] == base
    assert record.properties['stores'] == 'dedup'
    stat = sandbox.repository.stat(snapshot)
    assert stat.size == record.size
    assert stat.size - stat.zero_bytes > 64 * MIB
    assert 0 < stat.new_bytes < LITTLE

    # The store needs no daemon to read.
    dedupd = cloud.services['dedupd']
    dedupd.stop()
    try:
        _, shown = sandbox.server(snapshot)
    finally:
        dedupd.start()
    assert shown == (text, 2)
    assert [download.size for download in boot.downloads(cloud, snapshot)] == [
        record.size]

    sandbox.clear()
    for image in (base, snapshot):
        with pytest.raises(exceptions.ImageNotFound):
            sandbox.repository.stat(image)
    # Blocks shared with other tests' images stay.
    assert unique_bytes(cloud) <= before + LITTLE


@contextlib.contextmanager
def spoilt(path, content):
    """Yield a repository in which a byte of some content is changed."""
    for group in pathlib.Path(path, 'groups').iterdir():
        place = group.read_bytes().find(content)
        if place >= 0:
            break
    else:
        raise AssertionError('not found')

    def write(byte):
        with open(group, 'r+b') as data:
            data.seek(place)
            data.write(bytes([byte]))

    write(content[0] ^ 1)
    try:
        yield
    finally:
        write(content[0])


def test_no_server_of_a_damaged_image(cloud, sandbox):
    text = message()
    image = sandbox.upload(text)
    with spoilt(cloud.repository, disk_images.own(text, OWN)[-512:]):
        with pytest.raises(cloud_service.CloudError, match='has failed'):
            sandbox.server(image)
        assert not cached(cloud, image).exists()
    _, shown = sandbox.server(image)
    assert shown == (text, 1)


@pytest.mark.long
def test_the_benchmark_shows_its_table(cloud, tmp_path):
    with contextlib.closing(cloud.connect('demo')) as demo:
        before = {image.id for image in demo.image.images()}
        done = subprocess.run(
            [sys.executable, disk_images.TOP / 'benchmarks' / 'boot.py',
             '--cloud',
             cloud.directory, '--servers', '1', '--rounds', '1'],
            cwd=tmp_path, capture_output=True, text=True, timeout=1000)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [line.split()[:2] for line in done.stdout.splitlines()[-2:]]
        assert rows == [['1', 'file'], ['1', 'dedup']]
        assert {image.id for image in demo.image.images()} == before
        assert not list(tmp_path.iterdir())
