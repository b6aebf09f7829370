# SPDX-License-Identifier: Apache-2.0

"""The catalog alone counts large recipes in parts."""

import contextlib
import json
import random
import struct

import plyvel
import pytest

from glance_dedup.maintenance import database
from tests.unit.maintenance import catalogs
from tests.unit.maintenance.catalogs import count
from tests.unit.maintenance.catalogs import counts
from tests.unit.maintenance.catalogs import facts
from tests.unit.maintenance.catalogs import open_catalog
from tests.unit.maintenance.catalogs import pack
from tests.unit.maintenance.catalogs import txid

path = catalogs.path
catalog = catalogs.catalog


class Pages:
    """A recipe of pages of extents, each a list of runs."""

    def __init__(self, *pages):
        self._pages = pages
        self.pages = len(pages)
        self.unreadable = None

    def runs(self, page):
        if page == self.unreadable:
            raise ValueError('this page')
        return bytes(pack(*self._pages[page]))


LARGE = Pages(*[[(1 + n // 2, 5 + n, 2), (9, 7, 1)] for n in range(5)])


def count_some(catalog, number, steps, recipe=LARGE, change='count',
               most=0):
    """Count, or uncount, in steps of a page; return whether that was all."""
    for _ in range(steps):
        batch = catalog.batch()
        arguments = [facts()] if change == 'count' else []
        done = getattr(catalog, change)(batch, txid(number), recipe,
                                        *arguments, most)
        catalog.write(batch)
        if done:
            return True
    return False


def uncount_some(catalog, number, steps, **more):
    return count_some(catalog, number, steps, change='uncount', **more)


def everything(catalog):
    return [counts(catalog, group) for group in range(1, 10)]


def meta_of(path):
    with contextlib.closing(plyvel.DB(str(path))) as db:
        return json.loads(db.get(b'meta')), [
            key[:1] for key, _ in db if key[:1] in b'be']


def test_counted_in_parts(catalog, path):
    """A recipe is counted page by page to its end, and uncounted again."""
    count(catalog, 1, (1, 5, 1))
    states = [everything(catalog)]
    for page in range(1, 5):
        assert not count_some(catalog, 2, 1)
        assert catalog.begun(txid(2)) == page
        assert not catalog.counted(txid(2))
        assert list(catalog.all_begun()) == [(txid(2), 'image')]
        assert list(catalog.txids()) == [txid(1)]
        states.append(everything(catalog))
    assert count_some(catalog, 2, 1)
    assert catalog.counted(txid(2)) and not catalog.begun(txid(2))
    assert list(catalog.all_begun()) == []
    assert catalog.facts(txid(2))['parts'] == 4
    assert list(catalog.txids()) == [txid(1), txid(2)]
    for page in range(4, 0, -1):
        assert not uncount_some(catalog, 2, 1)
        assert catalog.begun(txid(2)) == page
        assert everything(catalog) == states[page]
        assert list(catalog.txids()) == [txid(1)]
    assert uncount_some(catalog, 2, 1)
    assert everything(catalog) == states[0]
    assert not catalog.begun(txid(2))
    catalog.close()
    assert meta_of(path)[1] == []


def test_uncounting_in_other_steps_than_counting(catalog):
    """A recipe may be uncounted in other steps than it was counted in."""
    empty = everything(catalog)
    for counted in (0, 5000, 1 << 40):
        for uncounted in (0, 5000, 1 << 40):
            assert count_some(catalog, 2, 5, most=counted)
            assert uncount_some(catalog, 2, 5, most=uncounted)
            assert everything(catalog) == empty
            assert list(catalog.txids()) == []


def test_turning_round(catalog):
    """Counting can turn into uncounting, and back, between any two steps."""
    rng = random.Random(1)
    states = [everything(catalog)]
    at = 0
    for _ in range(5):
        count_some(catalog, 2, 1)
        states.append(everything(catalog))
    at = 5
    for _ in range(60):
        most = rng.choice([0, 5000, 10000])
        if at == 5 or at and rng.random() < 0.5:
            uncount_some(catalog, 2, 1, most=most)
        else:
            count_some(catalog, 2, 1, most=most)
        at = 5 if catalog.counted(txid(2)) else catalog.begun(txid(2))
        assert everything(catalog) == states[at]
        list(catalog.txids())


def test_number_of_parts(catalog, path):
    count(catalog, 1, (1, 5, 1))
    catalog.close()
    plain, _ = meta_of(path)
    assert plain['parts'] == 0
    for steps, parts in ((1, 1), (1, 2), (3, 4)):
        catalog = open_catalog(path)
        count_some(catalog, 2, steps)
        catalog.close()
        meta, _ = meta_of(path)
        assert meta['parts'] == parts
    catalog = open_catalog(path)
    assert uncount_some(catalog, 2, 9)
    catalog.close()
    assert meta_of(path) == (plain, [])


@pytest.mark.parametrize('lost', range(4))
def test_lost_step_is_noticed(catalog, lost):
    """A lost step is an error: its log was cut short."""
    count_some(catalog, 2, 5)
    assert list(catalog.txids()) == [txid(2)]
    batch = catalog.batch()
    batch.delete(b'e' + txid(2) + struct.pack('>I', lost))
    catalog.write(batch)
    with pytest.raises(database.CatalogError, match='middle'):
        list(catalog.txids())


@pytest.mark.parametrize('key, value', [
    (b'b', b'{}'), (b'b', b'{"image_id":"a","parts":0}'), (b'b', b'\xff'),
    (b'b', b'{"image_id":"a","parts":9}'), (b'e1', b''), (b'e1', b'x' * 9),
    (b'e1', struct.pack('<Q', 6)), (b'e0', struct.pack('<Q', 2)),
    (b'e0', struct.pack('<Q', 1 << 63))])
def test_hostile_parts(catalog, key, value):
    count_some(catalog, 2, 2)
    batch = catalog.batch()
    batch.put(key[:1] + txid(2) + (
        struct.pack('>I', int(key[1:])) if key[1:] else b''), value)
    catalog.write(batch)
    with pytest.raises(database.CatalogError):
        uncount_some(catalog, 2, 9)
        list(catalog.txids())


def test_same_step_may_be_written_twice(catalog):
    batch = catalog.batch()
    catalog.count(batch, txid(2), LARGE, facts(), 0)
    catalog.write(batch)
    catalog.write(batch)
    assert count_some(catalog, 2, 4)
    assert list(catalog.txids()) == [txid(2)]
    assert uncount_some(catalog, 2, 5)


@pytest.mark.parametrize('page', range(5))
def test_page_that_cannot_be_read(catalog, page):
    """The pages before the unreadable one are recorded in the batch."""
    LARGE.unreadable = page
    batch = catalog.batch()
    try:
        with pytest.raises(ValueError):
            catalog.count(batch, txid(2), LARGE, facts())
    finally:
        LARGE.unreadable = None
    catalog.write(batch)
    assert catalog.begun(txid(2)) == page
    assert catalog.count(batch := catalog.batch(), txid(2), LARGE, facts())
    catalog.write(batch)
    LARGE.unreadable = page
    batch = catalog.batch()
    try:
        with pytest.raises(ValueError):
            catalog.uncount(batch, txid(2), LARGE)
    finally:
        LARGE.unreadable = None
    catalog.write(batch)
    assert catalog.begun(txid(2)) == page + 1
    batch = catalog.batch()
    assert catalog.uncount(batch, txid(2), LARGE)
    catalog.write(batch)
    assert everything(catalog) == [{}] * 9 and list(catalog.txids()) == []
