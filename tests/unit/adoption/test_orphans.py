# SPDX-License-Identifier: Apache-2.0

"""An image of the repository is judged an orphan by the Glances' answers."""

import pytest

from glance_dedup.adoption import orphans
from glance_dedup.client import glance_api
from glance_dedup.repository import openimages


def answer(status='active', stores='dedup1', importing=''):
    return glance_api.image_of({
        'id': 'a', 'status': status, 'stores': stores,
        'os_glance_importing_to_stores': importing})


STAT = openimages.ImageStat('a', '', '', '', 1, 0, 1, 1, 1, 1, 0)


@pytest.mark.parametrize('answers, store, reason', [
    ([None], None, 'does not know it'),
    ([None, None], 'dedup1', 'does not know it'),
    # An image that one of the Glances still uses is no orphan.
    ([None, answer()], 'dedup1', None),
    ([answer(), None], None, None),
    ([answer(stores='file1'), answer()], 'dedup1', None),
    ([answer('deactivated')], 'dedup1', None),
    ([answer(stores='file1,dedup1')], 'dedup1', None),
    # The images are in another store.
    ([answer(stores='file1')], 'dedup1', 'elsewhere: file1'),
    ([answer(stores='file1')], None, None),
    ([answer(stores='file1'), answer(stores='b,a')], 'dedup1',
     'elsewhere: a, b, file1'),
    # These locations do not name the store that they are in.
    ([answer(stores='')], 'dedup1', None),
    # Glance is about to have the image.
    ([answer(stores='file1', importing='dedup1')], 'dedup1', None),
    ([answer('saving', '')], 'dedup1', None),
    ([answer('uploading', '')], 'dedup1', None),
    ([answer('importing', '')], 'dedup1', None),
    ([answer('queued', ''), answer('saving', '')], None, None),
    # Glance knows the image, but it has no data.
    ([answer('queued', '')], None, 'no data'),
    ([answer('queued', ''), None], 'dedup1', 'no data'),
    # Images in any other status are no orphans.
    ([answer('killed', '')], None, None),
    ([answer('pending_delete', '')], None, None),
    ([answer('of a later release', '')], 'dedup1', None),
])
def test_reasons(answers, store, reason):
    known = [{} if found is None else {'a': found} for found in answers]
    orphan = orphans.orphans([STAT], known, store)
    if reason is None:
        assert orphan == []
    else:
        assert reason in orphan[0].reason
        assert orphan[0].unknown == (not any(answers))


def test_which_hash_counts():
    record = {'id': 'a', 'status': 'active', 'checksum': 'm',
              'os_hash_algo': 'sha512', 'os_hash_value': 's'}
    for changes, expected in (
            ({}, ('sha512', 's')), ({'os_hash_value': None}, ('md5', 'm')),
            ({'os_hash_value': None, 'checksum': None}, (None, None))):
        found = glance_api.image_of(record | changes)
        assert (found.hash_name, found.hash_value) == expected
