# SPDX-License-Identifier: Apache-2.0

"""Signed images: Barbican has the certificates, Glance verifies, we store.

A signer keeps a certificate in Barbican, as in Glance's guide. All services
are those of production: Keystone's tokens, Barbican, castellan, cursive,
Glance under uWSGI; and a `file` store to compare with.
"""

import base64
import collections
import contextlib
import datetime
import hashlib
import json
import random
import time
import uuid

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization
from cryptography import x509
import pytest

from tests.cloud import boot
from tests.cloud import cloud_service
from tests.cloud import disk_images
from tests.cloud import nova
from tests.functional import glance_server
from tests.support import repositories

pytestmark = [pytest.mark.slow, pytest.mark.needs('barbican')]

MIB = 1 << 20
# Seconds. For a loaded machine.
LIMIT = 120

Signer = collections.namedtuple('Signer', 'kind key certificate')


@pytest.fixture(scope='module')
def barbican(cloud):
    """Start Barbican, which stays up like the rest of the cloud."""
    cloud.up(['barbican'])
    return cloud.services['barbican']


@pytest.fixture(scope='module')
def client(cloud):
    with contextlib.closing(cloud.connect('demo')) as user:
        token = user.session.get_token()
    return glance_server.Client(
        cloud.glance.url, LIMIT, {'X-Auth-Token': token})


@pytest.fixture(scope='module')
def signers(cloud, barbican):
    """Signers for each kind of key, with a certificate in Barbican.

    One more, `foreign`, has a certificate of another project.
    """
    def signer(kind, key, owner='demo'):
        return Signer(kind, key, keep(cloud, owner, certificate(key)))

    return {
        'RSA-PSS': signer('RSA-PSS', rsa.generate_private_key(65537, 2048)),
        'ECC_SECP384R1': signer(
            'ECC_SECP384R1', ec.generate_private_key(ec.SECP384R1())),
        'foreign': signer(
            'RSA-PSS', rsa.generate_private_key(65537, 2048), 'admin'),
    }


@pytest.fixture(scope='module', autouse=True)
def nothing_half_there(cloud):
    """Require that refused uploads have left at most garbage."""
    yield
    repositories.eventually(
        lambda: repositories.spool(cloud.repository) == [], LIMIT)
    repositories.require_clean(cloud.repository)


def keep(cloud, owner, pem):
    """Store a certificate in Barbican; return its id."""
    with contextlib.closing(cloud.connect(owner)) as user:
        return user.key_manager.create_secret(
            name='signer', secret_type='certificate',
            payload=base64.b64encode(pem).decode(),
            payload_content_type='application/octet-stream',
            payload_content_encoding='base64').secret_id


def certificate(key):
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, 'signer')])
    now = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)
    return x509.CertificateBuilder().subject_name(name).issuer_name(
        name).public_key(key.public_key()).serial_number(
            x509.random_serial_number()).not_valid_before(
                now - day).not_valid_after(now + day).sign(
                    key, hashes.SHA256()).public_bytes(
                        serialization.Encoding.PEM)


def sign(signer, data):
    """Return the properties of a signed image."""
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
    """Return content with zeros and repetition, stored as references."""
    rng = random.Random(seed)
    unit = rng.randbytes(40960)
    data = bytearray()
    while len(data) < length:
        data += rng.choice((unit, bytes(81920), rng.randbytes(12345)))
    return bytes(data[:length])


def dribble(data):
    """Yield short and long pieces of some data."""
    at = 0
    for length in (1, 3, 100_000, 4 * MIB + 5, 17, len(data)):
        if at < len(data):
            yield data[at:at + length]
            at += length


def nothing_is_left(cloud, store, image_id):
    if store == 'file':
        return not (cloud.directory / 'stores' / 'file' / image_id).exists()
    with repositories.open_repository(cloud.repository) as repo:
        return image_id not in repo.images()


def upload(client, image_id, data, store, how, expect):
    if how == 'chunks':
        data = dribble(data)
    return client.upload(image_id, data, store=store, expect=expect)


# Long: the first test waits for the cloud and for Barbican.
@pytest.mark.parametrize('store, how, kind', [
    ('dedup', 'whole', 'RSA-PSS'), ('dedup', 'chunks', 'RSA-PSS'),
    ('dedup', 'whole', 'ECC_SECP384R1'), ('dedup', 'chunks', 'ECC_SECP384R1'),
    ('file', 'chunks', 'RSA-PSS')])
def test_good_signature(cloud, client, signers, store, how, kind):
    data = content(9 * MIB + 321, kind)
    image = client.create(**sign(signers[kind], data))
    upload(client, image['id'], data, store, how, (204,))
    shown = client.show(image['id'])
    assert shown['status'] == 'active' and shown['size'] == len(data)
    assert shown['os_hash_value'] == hashlib.sha512(data).hexdigest()
    assert client.download(image['id']) == data
    client.delete(image['id'])
    assert nothing_is_left(cloud, store, image['id'])


@pytest.mark.parametrize('store, how, at', [
    ('dedup', 'whole', 0), ('dedup', 'whole', 5 * MIB),
    ('dedup', 'chunks', 5 * MIB), ('dedup', 'chunks', -1),
    ('file', 'whole', 0)])
def test_upload_of_changed_bytes(cloud, client, signers, store, how, at):
    """An image with one changed bit gets no data, and none is kept."""
    data = bytearray(content(9 * MIB + 321, at))
    image = client.create(**sign(signers['RSA-PSS'], bytes(data)))
    data[at] ^= 1
    status = upload(client, image['id'], bytes(data), store, how, (400,))
    assert status == 400
    assert client.show(image['id'])['status'] == 'queued'
    assert nothing_is_left(cloud, store, image['id'])
    # The right bytes are accepted, under the same id.
    data[at] ^= 1
    client.upload(image['id'], bytes(data), store=store)
    assert client.download(image['id']) == data
    client.delete(image['id'])


@pytest.mark.parametrize('store, wrong', [
    *(('dedup', wrong) for wrong in (
        'signature', 'key', 'hash', 'certificate', 'project', 'kind')),
    ('file', 'signature')])
def test_bad_signature(cloud, client, signers, store, wrong):
    data = content(2 * MIB + 9, wrong)
    properties = sign(signers['RSA-PSS'], data)
    if wrong == 'signature':
        properties['img_signature'] = sign(
            signers['RSA-PSS'], data + b'x')['img_signature']
    elif wrong == 'key':
        properties.update(
            img_signature_key_type='ECC_SECP384R1',
            img_signature_certificate_uuid=signers[
                'ECC_SECP384R1'].certificate)
    elif wrong == 'hash':
        properties['img_signature_hash_method'] = 'SHA-512'
    elif wrong == 'certificate':
        properties['img_signature_certificate_uuid'] = str(uuid.uuid4())
    elif wrong == 'project':
        # The signature is right, but Barbican does not show the certificate.
        properties = sign(signers['foreign'], data)
    else:
        properties['img_signature_key_type'] = 'ECC_SECP384R1'
    image = client.create(**properties)
    assert client.upload(image['id'], data, store=store,
                         expect=(400,)) == 400
    assert client.show(image['id'])['status'] == 'queued'
    assert nothing_is_left(cloud, store, image['id'])
    client.delete(image['id'])


@pytest.mark.parametrize('stores', [['dedup'], ['dedup', 'file']],
                         ids='-'.join)
def test_import_of_a_signed_image(cloud, client, signers, stores):
    """A signed image is imported through the staging area, or refused."""
    data = content(5 * MIB + 7, 'import')
    for good in (True, False):
        image = client.create(**sign(signers['RSA-PSS'],
                                     data if good else data + b'x'))
        path = f'/v2/images/{image["id"]}'
        client.request('PUT', f'{path}/stage', data, {
            'Content-Type': 'application/octet-stream'})
        client.request('POST', f'{path}/import', json.dumps({
            'method': {'name': 'glance-direct'}, 'stores': stores}),
            {'Content-Type': 'application/json'})
        deadline = time.monotonic() + LIMIT
        while (shown := client.show(image['id']))['status'] in (
                'uploading', 'importing') and not shown.get(
                    'os_glance_failed_import'):
            assert time.monotonic() < deadline, shown
            time.sleep(0.1)
        assert (shown['status'] == 'active') == good, shown
        if good:
            assert client.download(image['id']) == data
        for store in stores:
            assert good != nothing_is_left(cloud, store, image['id'])
        # While the task still ends, Glance answers 500.
        repositories.eventually(
            lambda: client.delete(image['id'], expect=(204, 500)) == 204,
            LIMIT)


@pytest.fixture
def nova_verifies(cloud, monkeypatch):
    """Have Nova boot only signed images."""
    options = nova._options
    keystone = cloud.services['keystone']

    def changed(*args):
        given = options(*args)
        given['glance']['verify_glance_signatures'] = True
        given['barbican'] = {'auth_endpoint': f'{keystone.url}/v3'}
        return given

    compute = cloud.services['nova-compute']
    monkeypatch.setattr(nova, '_options', changed)
    compute.stop()
    compute.start()
    yield
    monkeypatch.undo()
    compute.stop()
    compute.start()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_nova(cloud, client, signers, nova_verifies, tmp_path):
    """Nova verifies that the store returns the signed image."""
    path = tmp_path / 'image'
    disk_images.variant(disk_images.images().raw, path, 'signed', 4)
    data = path.read_bytes()
    image = client.create(name='signed', **sign(signers['RSA-PSS'], data))
    client.upload(image['id'], data, store='dedup')
    with contextlib.closing(cloud.connect('demo')) as user:
        server = boot.create(user, image['id'], 'server')
        assert boot.wait_until_up(user, server).message == 'signed'
        boot.delete(user, server)
        cloud.services['nova-compute'].forget_images()
        # Nova does verify it: with another signature it does not boot.
        user.image.update_image(image['id'], **sign(
            signers['RSA-PSS'], data + b'x'))
        server = boot.create(user, image['id'], 'server')
        with pytest.raises(cloud_service.CloudError, match='has failed'):
            boot.wait_until_up(user, server)
        user.compute.delete_server(server)
    # The user does not get the reason.
    log = cloud.services['nova-compute'].log.read_text()
    assert [word for word in ('succeeded', 'failed') if
            f'signature verification {word} for image {image["id"]}' in log
            ] == ['succeeded', 'failed']
    client.delete(image['id'])


def test_barbican_that_is_down(cloud, client, signers, barbican):
    """An image that cannot be verified is not stored."""
    data = content(2 * MIB, 'down')
    image = client.create(**sign(signers['RSA-PSS'], data))
    barbican.kill()
    try:
        assert client.upload(image['id'], data, store='dedup',
                             expect=()) >= 400
        assert nothing_is_left(cloud, 'dedup', image['id'])
    finally:
        barbican.start()
    client.upload(image['id'], data, store='dedup')
    assert client.download(image['id']) == data
    client.delete(image['id'])
