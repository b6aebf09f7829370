# SPDX-License-Identifier: Apache-2.0

"""A catalog by itself, and recipes that are made up for it."""

import array
import struct

import pytest

from glance_dedup.maintenance import catalog_db

REPOSITORY = '0123456789abcdef' * 2


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'catalog'


@pytest.fixture
def catalog(path):
    catalog = catalog_db.Catalog(path, REPOSITORY, create=True)
    yield catalog
    catalog.close()


def open_catalog(path):
    return catalog_db.Catalog(path, REPOSITORY)


class Runs(bytes):
    """Packed runs in the form of a recipe with one page of extents."""

    pages = 1

    def runs(self, page):
        assert page == 0
        return bytes(self)


def pack(*runs):
    return Runs(b''.join(struct.pack('<III', *run) for run in runs))


def txid(number):
    return number.to_bytes(16, 'big')


def facts(image_id='image', project='', **more):
    return {'image_id': image_id, 'project': project, 'size': 10,
            'zero_bytes': 4, 'new_bytes': 3, 'stored_bytes': 2, 'blocks': 1,
            'fragments': 1, 'created': 7, 'upload_id': '0' * 32, **more}


def count(catalog, number, *runs, **more):
    batch = catalog.batch()
    catalog.count(batch, txid(number), pack(*runs), facts(**more))
    catalog.write(batch)


def counts(catalog, group, batch=None):
    """Return slots and their counts, without the zeros."""
    words = array.array('I', catalog.counts(group, batch=batch))
    assert len(words) == 32768
    return {slot: n for slot, n in enumerate(words) if n}
