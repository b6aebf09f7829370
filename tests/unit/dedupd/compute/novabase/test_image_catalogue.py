# SPDX-License-Identifier: Apache-2.0

"""The images that Nova may use before these arrive."""

import struct

import pytest

from dedupd.compute.cache import offered_images
from dedupd.compute.novabase import image_catalogue
from glance_dedup.client import glance_api
from tests.support import repositories

MIB = 1 << 20
RECORD = {'id': 'image', 'status': 'active', 'disk_format': 'raw',
          'container_format': 'bare', 'size': 2 * MIB, 'checksum': 'cd' * 16,
          'os_hash_algo': 'sha512', 'os_hash_value': 'ab' * 64}
OFFER = offered_images.Offer('image', 2 * MIB, 'sha512', 'ab' * 64, 'cd' * 16)
NOISE = repositories.noise(2 * MIB)


def qcow2():
    return struct.pack('>4sIQIIQIIQ', b'QFI\xfb', 3, 0, 0, 16, MIB, 0, 0,
                       0) + NOISE


class Glance:
    """A Glance with a list of images.

    :ivar inspected: the ids of the images whose head was requested
    """

    def __init__(self, *records, data=NOISE):
        self.found = records
        self.data = data
        self.inspected = []

    def records(self):
        if self.found is None:
            raise glance_api.GlanceError('it is away')
        return iter(self.found)

    def head(self, image_id, length):
        self.inspected.append(image_id)
        if self.data is None:
            raise glance_api.GlanceError('it is refused')
        assert len(self.data) >= length
        return self.data[:length]


def offers(*records, **options):
    return image_catalogue.Catalogue(Glance(*records, **options)).offers()


def test_a_raw_image_is_offered():
    assert offers(RECORD) == {'image': OFFER}


@pytest.mark.parametrize('change', [
    {'status': 'queued'}, {'status': 'deactivated'}, {'status': 'deleted'},
    {'disk_format': 'qcow2'}, {'disk_format': 'iso'}, {'disk_format': None},
    {'container_format': 'docker'}, {'size': None}, {'size': 0},
    {'os_hash_value': None}, {'os_hash_algo': 'no such hash'},
    {'os_hash_value': '../'}, {'checksum': 5}, {'id': '../image'},
    {'img_signature': 'x'}, {'img_signature_certificate_uuid': 'x'},
    {'os_encrypt_format': 'LUKS'}, {'os_decrypt_container_format': 'bare'},
    {'cinder_encryption_key_id': 'x'}])
def test_others_are_not(change):
    glance = Glance({**RECORD, **change})
    assert image_catalogue.Catalogue(glance).offers() == {}
    assert glance.inspected == []


@pytest.mark.parametrize('data', [
    qcow2(), b'KDMV' + struct.pack('<I', 1) + NOISE,
    b'LUKS\xba\xbe' + struct.pack('>H', 1) + NOISE,
    NOISE[:0x8001] + b'CD001' + NOISE,
    b'vhdxfile' + NOISE, *(
        text + b'version=1\n' + bytes(MIB) + NOISE for text in (
            b'# Disk DescriptorFile\n', b'#\n\n  \n', b'')),
    b'COWD' + NOISE, b'WithouFreSpacExt' + NOISE])
def test_an_image_of_another_format_is_not(data):
    size = len(data)
    assert not image_catalogue.is_raw(data[:MIB], size)
    assert offers({**RECORD, 'size': size}, data=data) == {}


def test_a_disk_with_partitions_is_raw():
    data = bytearray(NOISE)
    data[440:512] = bytes(72)
    data[446:462] = struct.pack('<B3xB3xII', 0x80, 0x83, 1, 2000)
    data[510:512] = b'\x55\xaa'
    assert image_catalogue.is_raw(bytes(data[:MIB]), len(data))


@pytest.mark.parametrize('size', [1, 511, 512, 70_000, MIB])
def test_small_images_are_raw(size):
    assert image_catalogue.is_raw(NOISE[:size], size)


def test_a_head_that_does_not_decide_is_not_raw():
    assert not image_catalogue.is_raw(NOISE[:100], 2 * MIB)


def test_an_image_is_inspected_once():
    glance = Glance(RECORD)
    catalogue = image_catalogue.Catalogue(glance)
    assert catalogue.offers() == catalogue.offers() == {'image': OFFER}
    assert glance.inspected == ['image']
    again = image_catalogue.Catalogue(glance, [OFFER])
    assert again.offers() == {'image': OFFER}
    assert glance.inspected == ['image']


def test_a_refused_image_is_not_inspected_again():
    glance = Glance(RECORD, data=qcow2())
    catalogue = image_catalogue.Catalogue(glance)
    assert catalogue.offers() == catalogue.offers() == {}
    assert glance.inspected == ['image']


def test_an_image_with_other_content_is_inspected_again():
    glance = Glance(RECORD)
    catalogue = image_catalogue.Catalogue(glance)
    catalogue.offers()
    glance.found = [{**RECORD, 'os_hash_value': 'ef' * 64}]
    glance.data = qcow2()
    assert catalogue.offers() == {}


def test_an_image_that_cannot_be_inspected_is_tried_again():
    glance = Glance(RECORD, data=None)
    catalogue = image_catalogue.Catalogue(glance)
    assert catalogue.offers() == {}
    glance.data = NOISE
    assert catalogue.offers() == {'image': OFFER}


def test_a_glance_that_is_away_is_told():
    glance = Glance(RECORD)
    catalogue = image_catalogue.Catalogue(glance)
    catalogue.offers()
    glance.found = None
    with pytest.raises(glance_api.GlanceError):
        catalogue.offers()
    glance.found = [RECORD]
    assert catalogue.offers() == {'image': OFFER}
    assert glance.inspected == ['image']
