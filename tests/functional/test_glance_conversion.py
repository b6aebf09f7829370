# SPDX-License-Identifier: Apache-2.0

"""Glance's import plugin ``image_conversion`` in front of the store.

A compressed qcow2 image has no block equal to another image's. Glance can
convert it to raw on its way in; ``contributor/measurements/space.rst`` says
how.
"""

import json
import random
import subprocess
import sys
import time

import pytest

from glance_dedup.repository import image_repository
from tests.functional import glance_server

pytestmark = [pytest.mark.slow, pytest.mark.needs('qemu')]

IMPORT_TIMEOUT = 120  # seconds


def _text(length, seed):
    """Return text that compresses, and never repeats a block of 4 KiB."""
    rng = random.Random(seed)
    words = [bytes(rng.choices(b'abcdefghijklmnop', k=7)) for _ in range(500)]
    return b' '.join(rng.choices(words, k=length // 8 + 1))[:length]


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp('conversion')


@pytest.fixture(scope='module')
def client(directory):
    store = {'type': 'dedup', 'dedup_store_datadir': directory / 'store',
             'dedup_store_filter_dir': directory,
             'dedup_store_filter_mib': 4}
    options = {
        'image_import_opts': {'image_import_plugins': '[image_conversion]'},
        'image_conversion': {'output_format': 'raw'},
        # uWSGI sets sys.executable to the Python without the environment.
        'wsgi': {'python_interpreter': sys.executable}}
    with glance_server.ProjectServer(directory / 'server', {'dedup': store},
                                     options=options) as server:
        yield glance_server.ProjectClient(server.url, 'alice')


@pytest.fixture(scope='module')
def raw():
    return _text(8 << 20, 1)


@pytest.fixture(scope='module')
def compressed(directory, raw):
    """Return the same image, as a compressed qcow2."""
    plain, qcow2 = directory / 'image.raw', directory / 'image.qcow2'
    plain.write_bytes(raw)
    subprocess.run(['qemu-img', 'convert', '-c', '-f', 'raw', '-O', 'qcow2',
                    plain, qcow2], check=True, timeout=IMPORT_TIMEOUT)
    content = qcow2.read_bytes()
    assert len(content) < len(raw) * 0.8
    return content


def _new_bytes(directory, image_id):
    with image_repository.Repository(directory / 'store') as opened:
        return opened.stat(image_id).new_bytes


def _import(client, image_id, content):
    client.request('PUT', f'/v2/images/{image_id}/stage', content,
                   {'Content-Type': 'application/octet-stream'})
    client.request(
        'POST', f'/v2/images/{image_id}/import',
        json.dumps({'method': {'name': 'glance-direct'}}).encode(),
        {'Content-Type': 'application/json'})
    deadline = time.monotonic() + IMPORT_TIMEOUT
    while (image := client.show(image_id))['status'] != 'active':
        # An image whose import failed is queued again.
        assert image['status'] in ('uploading', 'importing'), image
        assert time.monotonic() < deadline, image
        time.sleep(0.1)


def test_compressed_image_is_stored_raw(client, directory, raw, compressed):
    original = client.create(name='raw')['id']
    client.upload(original, raw)
    assert _new_bytes(directory, original) == len(raw)

    kept = client.create(name='kept', disk_format='qcow2')['id']
    client.upload(kept, compressed)
    assert _new_bytes(directory, kept) > len(compressed) * 0.8

    converted = client.create(name='converted', disk_format='qcow2')['id']
    _import(client, converted, compressed)
    shown = client.show(converted)
    assert (shown['disk_format'], shown['size']) == ('raw', len(raw))
    assert client.download(converted) == raw
    assert _new_bytes(directory, converted) == 0
