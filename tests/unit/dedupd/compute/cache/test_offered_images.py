# SPDX-License-Identifier: Apache-2.0

"""The list of images that are offered to Nova."""

import dataclasses
import os

import pytest

from dedupd.compute.cache import offered_images
from glance_dedup.base import files

OFFER = offered_images.Offer('image', 5, 'sha512', 'ab' * 64, 'cd' * 16)


@pytest.fixture
def file(tmp_path):
    return offered_images.File(str(tmp_path / 'images'))


def test_what_was_saved_is_read(file, tmp_path):
    assert file.offers() == {}
    other = dataclasses.replace(OFFER, image_id='other', md5=None)
    file.save({'image': OFFER, 'other': other})
    assert file.offers() == {'image': OFFER, 'other': other}
    # Another process writes the file, and this process reads the change.
    offered_images.File(str(tmp_path / 'images')).save({'image': OFFER})
    assert file.offers() == {'image': OFFER}


def test_it_lies_beside_the_repository(file, tmp_path):
    (tmp_path / 'images').mkdir()
    file.save({})
    assert os.listdir(tmp_path / 'images') == []


@pytest.mark.parametrize('change', [
    {'image_id': '../image'}, {'image_id': 5}, {'size': 0}, {'size': True},
    {'size': 1 << 63}, {'size': '5'}, {'hash_value': 'AB' * 64},
    {'hash_value': None}, {'hash_name': None}, {'md5': 'cd'}, {'md5': 3}])
def test_invalid_fields_are_refused(file, change):
    fields = {**dataclasses.asdict(OFFER), **change}
    with pytest.raises(ValueError):
        offered_images.Offer(**fields)
    # The same holds for a file with a valid checksum.
    with open(file.path, 'wb') as f:
        f.write(files.pack_json('glance-dedup images for Nova',
                                images=[fields]))
    assert file.offers() == {}


def test_a_damaged_file_offers_nothing(file):
    file.save({'image': OFFER})
    with open(file.path, 'r+b') as f:
        f.seek(40)
        f.write(b'?')
    assert file.offers() == {}
    os.unlink(file.path)
    os.mkdir(file.path)
    assert file.offers() == {}


def test_what_comes_is_compared_with_all_of_it():
    expected = OFFER.expected
    assert (expected.size, expected.md5, expected.hash_name,
            expected.hash_value) == (5, 'cd' * 16, 'sha512', 'ab' * 64)
