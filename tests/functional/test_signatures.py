#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.


"""Signed images in the real Glance: a key manager, certificates, the store.

Glance asks castellan for the certificate, and castellan's driver for Vault
asks :class:`Vault`, which keeps secrets as a key-value engine of version 2
does. All else is what runs in production: castellan, cursive, cryptography,
Glance under uWSGI, and two stores to compare.
"""

import base64
import collections
import contextlib
import datetime
import hashlib
import http.server
import json
import random
import secrets
import sys
import threading
import time
import uuid

from castellan.common.objects import x_509
from castellan.key_manager import vault_key_manager
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization
from cryptography import x509
from oslo_config import cfg
import pytest

from glance_dedup.repository import repository
from tests.functional import glance_server

MIB = 1 << 20
STORES = ('dedup', 'plain')

Signer = collections.namedtuple('Signer', 'kind key certificate')


class Vault(http.server.ThreadingHTTPServer):
    """Keeps secrets, for who has the token."""

    daemon_threads = True

    def __init__(self):
        self.token = secrets.token_hex(16)
        self.kept = {}
        super().__init__(('127.0.0.1', 0), _Handler)

    @property
    def url(self):
        return f'http://127.0.0.1:{self.server_port}'


class _Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, document=None):
        body = json.dumps(document or {}).encode()
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def is_allowed(self):
        if self.headers['X-Vault-Token'] == self.server.token:
            return True
        self.answer(403, {'errors': ['permission denied']})
        return False

    def do_POST(self):
        data = self.rfile.read(int(self.headers['Content-Length']))
        if self.is_allowed():
            self.server.kept[self.path] = json.loads(data)['data']
            self.answer(200)

    def do_GET(self):
        if not self.is_allowed():
            return
        if self.path in self.server.kept:
            self.answer(200, {'data': {'data': self.server.kept[self.path]}})
        else:
            self.answer(404, {'errors': []})

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope='module')
def vault():
    with Vault() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    return tmp_path_factory.mktemp('signed')


@pytest.fixture(scope='module')
def server(place, vault):
    stores = {
        'dedup': {'type': 'dedup', 'dedup_store_datadir': place / 'dedup',
                  'dedup_store_filter_dir': place / 'filter',
                  'dedup_store_filter_mib': 1},
        'plain': {'type': 'file',
                  'filesystem_store_datadir': place / 'plain'}}
    options = {'key_manager': {'backend': 'vault'},
               'vault': {'vault_url': vault.url,
                         'root_token_id': vault.token},
               # Under uWSGI sys.executable is not Python.
               'wsgi': {'python_interpreter': sys.executable}}
    with glance_server.ProjectServer(place / 'server', stores,
                                     options=options) as running:
        yield running


@pytest.fixture(scope='module')
def client(server):
    return glance_server.ProjectClient(server.url, 'alice')


@pytest.fixture(scope='module')
def signers(vault):
    """Of each kind of key, one whose certificate is in the key manager."""
    conf = cfg.ConfigOpts()
    conf([])
    manager = vault_key_manager.VaultKeyManager(conf)
    conf.set_override('vault_url', vault.url, 'vault')
    conf.set_override('root_token_id', vault.token, 'vault')
    manager = vault_key_manager.VaultKeyManager(conf)
    keys = {'RSA-PSS': rsa.generate_private_key(65537, 2048),
            'ECC_SECP384R1': ec.generate_private_key(ec.SECP384R1())}
    return {kind: Signer(kind, key, manager.store(
        None, x_509.X509(certificate(key)))) for kind, key in keys.items()}


def certificate(key):
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, 'signer')])
    now = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)
    return x509.CertificateBuilder().subject_name(name).issuer_name(
        name).public_key(key.public_key()).serial_number(
            x509.random_serial_number()).not_valid_before(
                now - day).not_valid_after(now + day).sign(
                    key, hashes.SHA256()).public_bytes(
                        serialization.Encoding.DER)


def sign(signer, data):
    """The properties of an image that is signed."""
    if signer.kind == 'RSA-PSS':
        signature = signer.key.sign(
            data, padding.PSS(padding.MGF1(hashes.SHA256()),
                              padding.PSS.MAX_LENGTH), hashes.SHA256())
    else:
        signature = signer.key.sign(data, ec.ECDSA(hashes.SHA256()))
    return {'img_signature': base64.b64encode(signature).decode(),
            'img_signature_hash_method': 'SHA-256',
            'img_signature_key_type': signer.kind,
            'img_signature_certificate_uuid': signer.certificate}


def content(length, seed):
    """With zeros and repetition, which are stored as references."""
    rng = random.Random(seed)
    unit = rng.randbytes(40960)
    data = bytearray()
    while len(data) < length:
        data += rng.choice((unit, bytes(81920), rng.randbytes(12345)))
    return bytes(data[:length])


def dribble(data):
    """Short and long pieces."""
    at = 0
    for length in (1, 3, 100_000, 4 * MIB + 5, 17, len(data)):
        if at < len(data):
            yield data[at:at + length]
            at += length


def nothing_is_left(place, store, image_id):
    if store == 'plain':
        return not (place / 'plain' / image_id).exists()
    with repository.Repository(place / 'dedup',
                               filter_dir=str(place / 'filter')) as repo:
        return image_id not in repo.images()


def upload(client, image_id, data, store, how, expect):
    if how == 'chunks':
        data = dribble(data)
    return client.upload(image_id, data, store=store, expect=expect)


@pytest.mark.parametrize('store', STORES)
@pytest.mark.parametrize('how', ['whole', 'chunks'])
@pytest.mark.parametrize('kind', ['RSA-PSS', 'ECC_SECP384R1'])
def test_good_signature(place, client, signers, store, how, kind):
    data = content(9 * MIB + 321, kind)
    image = client.create(**sign(signers[kind], data))
    upload(client, image['id'], data, store, how, (204,))
    shown = client.show(image['id'])
    assert shown['status'] == 'active' and shown['size'] == len(data)
    assert shown['os_hash_value'] == hashlib.sha512(data).hexdigest()
    assert client.download(image['id']) == data
    client.delete(image['id'])
    assert nothing_is_left(place, store, image['id'])


@pytest.mark.parametrize('store', STORES)
@pytest.mark.parametrize('how', ['whole', 'chunks'])
@pytest.mark.parametrize('at', [0, 5 * MIB, -1])
def test_upload_of_changed_bytes(place, client, signers, store, how, at):
    """One bit, anywhere: the image gets no data, and none is kept."""
    data = bytearray(content(9 * MIB + 321, at))
    image = client.create(**sign(signers['RSA-PSS'], bytes(data)))
    data[at] ^= 1
    status = upload(client, image['id'], bytes(data), store, how, (400,))
    assert status == 400
    assert client.show(image['id'])['status'] == 'queued'
    assert nothing_is_left(place, store, image['id'])
    # With the right ones it is accepted, under the same id.
    data[at] ^= 1
    client.upload(image['id'], bytes(data), store=store)
    assert client.download(image['id']) == data
    client.delete(image['id'])


@pytest.mark.parametrize('store', STORES)
@pytest.mark.parametrize('wrong', [
    'signature', 'key', 'hash', 'certificate', 'kind'])
def test_bad_signature(place, client, signers, store, wrong):
    data = content(2 * MIB + 9, wrong)
    properties = sign(signers['RSA-PSS'], data)
    other = sign(signers['RSA-PSS'], data + b'x')
    if wrong == 'signature':
        properties['img_signature'] = other['img_signature']
    elif wrong == 'key':
        properties.update(
            img_signature_key_type='ECC_SECP384R1',
            img_signature_certificate_uuid=signers[
                'ECC_SECP384R1'].certificate)
    elif wrong == 'hash':
        properties['img_signature_hash_method'] = 'SHA-512'
    elif wrong == 'certificate':
        properties['img_signature_certificate_uuid'] = uuid.uuid4().hex
    else:
        properties['img_signature_key_type'] = 'ECC_SECP384R1'
    image = client.create(**properties)
    assert client.upload(image['id'], data, store=store,
                         expect=(400,)) == 400
    assert client.show(image['id'])['status'] == 'queued'
    assert nothing_is_left(place, store, image['id'])
    client.delete(image['id'])


@pytest.mark.parametrize('store', STORES)
def test_import_of_a_signed_image(place, client, signers, store):
    """Through the staging area, as glance-direct does."""
    data = content(5 * MIB + 7, 'import')
    for good in (True, False):
        image = client.create(**sign(signers['RSA-PSS'],
                                     data if good else data + b'x'))
        path = f'/v2/images/{image["id"]}'
        client.request('PUT', f'{path}/stage', data, {
            'Content-Type': 'application/octet-stream'})
        client.request('POST', f'{path}/import', json.dumps({
            'method': {'name': 'glance-direct'}, 'stores': [store]}),
            {'Content-Type': 'application/json'})
        deadline = time.monotonic() + 60
        while (shown := client.show(image['id']))['status'] in (
                'uploading', 'importing') and not shown.get(
                    'os_glance_failed_import'):
            assert time.monotonic() < deadline, shown
            time.sleep(0.1)
        assert (shown['status'] == 'active') == good, shown
        if good:
            assert client.download(image['id']) == data
        assert good != nothing_is_left(place, store, image['id'])


def test_key_manager_that_is_down(place, client, signers, vault):
    """Nothing is stored that could not be verified."""
    data = content(2 * MIB, 'down')
    image = client.create(**sign(signers['RSA-PSS'], data))
    token, vault.token = vault.token, 'another'
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, vault, 'token', token)
        assert client.upload(image['id'], data, store='dedup',
                             expect=()) >= 400
    assert nothing_is_left(place, 'dedup', image['id'])
    client.delete(image['id'])
