# SPDX-License-Identifier: Apache-2.0

"""Disk formats in the real Glance, in our store and in a file store.

Glance inspects an image while the store reads it, and refuses an image that is
not of its declared format, or not safe. What Glance sees depends on how the
store reads. So each image goes into both stores, in every possible way: both
must answer alike, and give back the same bytes.
"""

import functools
import hashlib
import http.server
import json
import random
import struct
import subprocess
import threading
import time

import pytest

from tests.functional import glance_server

pytestmark = [pytest.mark.slow, pytest.mark.needs('qemu')]

MIB = 1 << 20
TIMEOUT = 120  # seconds
TASK_TIMEOUT = 20
ATTEMPTS = 4
DISK = 6 * MIB  # the virtual size

#: By name: qemu-img's format and options, and Glance's name for it.
CREATED = {
    'raw': ('raw', '', 'raw'),
    'qcow2': ('qcow2', '', 'qcow2'),
    'qcow2-old': ('qcow2', 'compat=0.10', 'qcow2'),
    'qcow2-clusters': ('qcow2', 'cluster_size=2M', 'qcow2'),
    'qcow': ('qcow', '', 'qcow2'),
    'qed': ('qed', '', 'raw'),
    'vdi': ('vdi', '', 'vdi'),
    'vdi-static': ('vdi', 'static=on', 'vdi'),
    'vhd': ('vpc', '', 'vhd'),
    'vhd-fixed': ('vpc', 'subformat=fixed', 'vhd'),
    'vhdx': ('vhdx', '', 'vhdx'),
    'vhdx-fixed': ('vhdx', 'subformat=fixed', 'vhdx'),
    'vhdx-small-blocks': ('vhdx', 'block_size=1M', 'vhdx'),
    'vhdx-large-log': ('vhdx', 'log_size=5M', 'vhdx'),
    'ploop': ('parallels', '', 'ploop'),
    'vmdk': ('vmdk', '', 'vmdk'),
    'vmdk-stream': ('vmdk', 'subformat=streamOptimized', 'vmdk'),
    'vmdk-flat': ('vmdk', 'subformat=monolithicFlat', 'vmdk'),
    'vmdk-many-sparse': ('vmdk', 'subformat=twoGbMaxExtentSparse', 'vmdk'),
    'vmdk-many-flat': ('vmdk', 'subformat=twoGbMaxExtentFlat', 'vmdk'),
    'luks': ('luks', 'key-secret=key,iter-time=10', 'luks'),
}
#: Glance's names of the formats that these tests write, by name.
WRITTEN = {'iso': 'iso', 'gpt': 'gpt', 'descriptor': 'vmdk'}
#: Images that Glance refuses: the file of a fixed VHD ends with its name, and
#: that of a VMDK in several files has none of the data; the others are not
#: safe.
REFUSED = {'qcow', 'qed', 'vhd-fixed', 'vmdk-flat', 'vmdk-many-sparse',
           'vmdk-many-flat', 'descriptor'}

EVERY = pytest.mark.parametrize('name', [*CREATED, *WRITTEN])
ACCEPTED = pytest.mark.parametrize(
    'name', sorted({*CREATED, *WRITTEN} - REFUSED))


def written(name, disk):
    """Make an image in a format that qemu-img does not write."""
    image = bytearray(disk)
    if name == 'descriptor':
        return (b'# Disk DescriptorFile\ncreateType="monolithicSparse"\n'
                + b'#' * (MIB // 2) + b'\nRW 1 FLAT "/etc/passwd" 0\n')
    if name == 'gpt':
        image[446:462] = bytes.fromhex('00000200eeffffff01000000ff2f0000')
        image[462:510] = bytes(48)
        image[510:512] = b'\x55\xaa'
    if name == 'iso':
        image[32768:32775] = b'\x01CD001\x01'
        struct.pack_into('<L', image, 32768 + 80, len(image) // 2048)
        struct.pack_into('<H', image, 32768 + 128, 2048)
    return bytes(image)


def convert(path, qemu_format, options, name):
    """Make an image of the disk.

    For LUKS qemu-img times its own hashing, and fails if the machine has not
    counted its processor time exactly; so it is tried again.
    """
    for left in reversed(range(50)):
        done = subprocess.run(
            ['qemu-img', 'convert', '-q', '-f', 'raw', '-O', qemu_format,
             '--object', 'secret,id=key,data=passphrase',
             *(['-o', options] if options else []), 'disk', name],
            cwd=path, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
        if done.returncode and left and 'accurate CPU usage' in done.stderr:
            continue
        assert done.returncode == 0, done.stderr
        return


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """A directory with all of the images."""
    path = tmp_path_factory.mktemp('images')
    disk = bytearray(random.Random(1).randbytes(DISK))
    disk[2 * MIB:4 * MIB] = bytes(2 * MIB)
    (path / 'disk').write_bytes(disk)
    for name, (qemu_format, options, _disk_format) in CREATED.items():
        convert(path, qemu_format, options, name)
    for name in WRITTEN:
        (path / name).write_bytes(written(name, disk))
    return path


@pytest.fixture(scope='module')
def web(images):
    """Serve the images over HTTP; yields the port."""
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            """Log nothing."""

    with http.server.ThreadingHTTPServer(
            ('127.0.0.1', 0),
            functools.partial(Handler, directory=images)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope='module')
def client(tmp_path_factory, web):
    path = tmp_path_factory.mktemp('formats')
    stores = {
        'dedup': {'type': 'dedup', 'dedup_store_datadir': path / 'dedup',
                  'dedup_store_filter_dir': path,
                  'dedup_store_filter_mib': 4},
        'file': {'type': 'file', 'filesystem_store_datadir': path / 'file'}}
    formats = {one for _, _, one in CREATED.values()} | {*WRITTEN.values()}
    options = {
        'DEFAULT': {'enabled_import_methods':
                    '[glance-direct,web-download,copy-image]'},
        'image_format': {'disk_formats': ','.join(sorted(formats)),
                         'require_image_format_match': True},
        'import_filtering_opts': {'allowed_hosts': '[127.0.0.1]',
                                  'allowed_ports': f'[{web}]'}}
    with glance_server.ProjectServer(path / 'server', stores,
                                     options=options) as running:
        yield glance_server.ProjectClient(running.url, 'alice', 'admin')


class Stored:
    """An image in a store, and Glance's record of it."""

    def __init__(self, client, name):
        self.client = client
        self.image_id = client.create(
            name=name, disk_format=(WRITTEN.get(name)
                                    or CREATED[name][2]))['id']

    def import_(self, store, method, **parameters):
        """Import the image; return true if that succeeded.

        Glance's task is a writer of its own, and ends, or is forgotten, where
        SQLite has another.
        """
        self.client.request(
            'POST', f'/v2/images/{self.image_id}/import',
            json.dumps({'method': {'name': method, **parameters},
                        'stores': [store]}).encode(),
            {'Content-Type': 'application/json'})
        deadline = time.monotonic() + TASK_TIMEOUT
        while time.monotonic() < deadline:
            tasks = json.loads(self.client.request(
                'GET', f'/v2/images/{self.image_id}/tasks')[2])['tasks']
            if tasks[0]['status'] in ('success', 'failure'):
                return tasks[0]['status'] == 'success'
            time.sleep(0.2)
        return False

    def answer(self):
        """Return the properties that do not depend on the store."""
        shown = self.client.show(self.image_id)
        return {key: shown[key] for key in (
            'size', 'virtual_size', 'disk_format', 'checksum',
            'os_hash_value')}

    def status(self):
        return self.client.show(self.image_id)['status']

    def digest(self):
        return hashlib.sha256(
            self.client.download(self.image_id)).hexdigest()

    def delete(self):
        self.client.delete(self.image_id, expect=())


def check(images, path, refused=False):
    """Glance shows the same properties of all images of one content."""
    for image in images:
        if refused:
            assert image.status() != 'active'
        else:
            assert image.answer() == images[0].answer()
            assert image.digest() == hashlib.sha256(
                path.read_bytes()).hexdigest()
    for image in images:
        image.delete()


@EVERY
def test_upload(client, images, name):
    made = []
    for store, known in (('dedup', True), ('dedup', False), ('file', True)):
        image = Stored(client, name)
        made.append(image)
        with open(images / name, 'rb') as f:
            status = client.upload(
                image.image_id, f, (images / name).stat().st_size
                if known else None, store=store, expect=(204, 415))
        assert status == (415 if name in REFUSED else 204), store
    check(made, images / name, name in REFUSED)


def imported(client, images, web, name, store, method):
    """Return an image that was imported; a refused one is tried only once."""
    for _ in range(1 if name in REFUSED else ATTEMPTS):
        image = Stored(client, name)
        parameters = {}
        if method == 'web-download':
            parameters = {'uri': f'http://127.0.0.1:{web}/{name}'}
        try:
            if method == 'glance-direct':
                client.request('PUT', f'/v2/images/{image.image_id}/stage',
                               (images / name).read_bytes(),
                               {'Content-Type': 'application/octet-stream'})
            if image.import_(store, method, **parameters):
                break
        except glance_server.HTTPError as exc:
            assert exc.status == 500, exc
    return image


@pytest.mark.parametrize('name, method', [
    *((name, 'glance-direct') for name in [*CREATED, *WRITTEN]),
    *((name, 'web-download') for name in (
        'qcow2', 'qed', 'vhdx', 'vhdx-fixed', 'vmdk-stream'))])
def test_import(client, images, web, name, method):
    made = [imported(client, images, web, name, store, method)
            for store in ('dedup', 'file')]
    check(made, images / name, name in REFUSED)


@ACCEPTED
def test_copy(client, images, name):
    """An image can be copied between the stores, and deleted in the first."""
    made = []
    for first, second in (('dedup', 'file'), ('file', 'dedup')):
        for _ in range(ATTEMPTS):
            image = Stored(client, name)
            client.upload(image.image_id, (images / name).read_bytes(),
                          store=first)
            if image.import_(second, 'copy-image'):
                break
        client.request('DELETE', f'/v2/stores/{first}/{image.image_id}')
        assert client.show(image.image_id)['stores'] == second
        made.append(image)
    check(made, images / name)
