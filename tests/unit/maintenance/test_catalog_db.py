# SPDX-License-Identifier: Apache-2.0

"""The catalog alone: counts, ledger, its own metadata, history."""

import collections
import json
import random
import struct

import plyvel
import pytest

from glance_dedup.base import exceptions
from glance_dedup.maintenance import catalog_db
from glance_dedup.maintenance import database
from glance_dedup.maintenance import refcounts
from tests.unit.maintenance import catalogs
from tests.unit.maintenance.catalogs import count
from tests.unit.maintenance.catalogs import counts
from tests.unit.maintenance.catalogs import facts
from tests.unit.maintenance.catalogs import open_catalog
from tests.unit.maintenance.catalogs import pack
from tests.unit.maintenance.catalogs import REPOSITORY
from tests.unit.maintenance.catalogs import txid

path = catalogs.path
catalog = catalogs.catalog


def uncount(catalog, number, *runs):
    batch = catalog.batch()
    catalog.uncount(batch, txid(number), pack(*runs))
    catalog.write(batch)


# -- counts and ledger --------------------------------------------------------

def test_counts_by_run(catalog):
    count(catalog, 1, (1, 5, 3), (1, 6, 1), (7, 32767, 1))
    assert counts(catalog, 1) == {5: 1, 6: 2, 7: 1}
    assert counts(catalog, 7) == {32767: 1}
    assert counts(catalog, 2) == {}
    assert catalog.counted(txid(1)) and not catalog.counted(txid(2))
    uncount(catalog, 1, (1, 5, 3), (1, 6, 1), (7, 32767, 1))
    assert counts(catalog, 1) == counts(catalog, 7) == {}
    assert not catalog.counted(txid(1))


def test_run_over_the_border_of_two_chunks(catalog):
    runs = [(3, 1000, 1024), (3, 2048, 1), (3, 0, 1), (4, 1023, 2)]
    count(catalog, 1, *runs)
    assert set(counts(catalog, 3)) == {0, 2048, *range(1000, 2024)}
    assert counts(catalog, 4) == {1023: 1, 1024: 1}
    uncount(catalog, 1, *runs)
    assert not counts(catalog, 3) and not counts(catalog, 4)


def test_counts_of_the_first_slots(catalog):
    count(catalog, 1, (1, 62, 4))
    assert catalog.counts(1, 64) == bytes(62 * 4) + struct.pack('<II', 1, 1)


def test_zero_counts_take_no_room(catalog, path):
    count(catalog, 1, (1, 5, 3))
    uncount(catalog, 1, (1, 5, 3))
    catalog.close()
    with plyvel.DB(str(path)) as db:
        assert [key for key, _ in db] == [b'g\0\0\0\1', b'meta']


def test_key_and_counts_are_as_the_format_says(catalog, path):
    count(catalog, 0xabcdef, (0x01020304, 1025, 1), image_id='an-image')
    catalog.close()
    with plyvel.DB(str(path)) as db:
        value = db.get(b'c\x01\x02\x03\x04\x01')
        assert value == bytes(4) + b'\1\0\0\0' + bytes(4088)
        assert json.loads(db.get(b'l' + txid(0xabcdef))) == facts('an-image')
        assert json.loads(db.get(b'g\x01\x02\x03\x04')) == {
            'judged': 0, 'dirty': False, 'used': 1,
            'rewritten': 0}
        meta = json.loads(db.get(b'meta'))
        assert set(meta) == {'format', 'repository_id', 'catalog_id',
                             'sequence', 'valid', 'ledger', 'parts'}
        assert meta['ledger'] == f'{0xabcdef:032x}'
        assert meta['repository_id'] == REPOSITORY and meta['format'] == 1


def test_n1_each_recipe_is_counted_once(catalog):
    batch = catalog.batch()
    catalog.count(batch, txid(1), pack((1, 1, 1)), facts())
    with pytest.raises(database.CatalogError, match='already'):
        catalog.count(batch, txid(1), pack((1, 1, 1)), facts())
    catalog.write(batch)
    with pytest.raises(database.CatalogError, match='already'):
        catalog.count(catalog.batch(), txid(1), pack((1, 1, 1)), facts())


def test_n1_what_has_no_key_is_not_uncounted(catalog):
    count(catalog, 1, (1, 1, 1))
    batch = catalog.batch()
    with pytest.raises(database.CatalogError, match='not counted'):
        catalog.uncount(batch, txid(2), pack((1, 1, 1)))
    assert not len(batch)
    catalog.uncount(batch, txid(1), pack((1, 1, 1)))
    with pytest.raises(database.CatalogError, match='not counted'):
        catalog.uncount(batch, txid(1), pack((1, 1, 1)))


def test_count_below_zero_is_damage(catalog):
    count(catalog, 1, (1, 1, 1))
    count(catalog, 2, (1, 2, 1))
    with pytest.raises(database.CatalogError, match='too few'):
        catalog.uncount(catalog.batch(), txid(1), pack((1, 1, 3)))
    assert counts(catalog, 1) == {1: 1, 2: 1}


def test_count_at_its_maximum_stays(catalog):
    batch = catalog.batch()
    batch.put(b'c\0\0\0\1\0', struct.pack('<II', 0xfffffffe, 0xffffffff)
              + bytes(4088))
    catalog.write(batch)
    count(catalog, 1, (1, 0, 2))
    assert counts(catalog, 1) == {0: 0xffffffff, 1: 0xffffffff}
    uncount(catalog, 1, (1, 0, 2))
    assert counts(catalog, 1) == {0: 0xffffffff, 1: 0xffffffff}


@pytest.mark.parametrize('run', [(0, 1, 1), (1, 32768, 1), (1, 32767, 2),
                                 (1, 0xffffffff, 1), (1, 5, 0xffffffff)])
def test_impossible_runs(catalog, run):
    with pytest.raises(exceptions.DamagedError):
        catalog.count(catalog.batch(), txid(1), pack(run), facts())


def test_batch_sees_what_it_holds(catalog):
    count(catalog, 1, (1, 5, 1))
    batch = catalog.batch()
    catalog.count(batch, txid(2), pack((1, 5, 1)), facts())
    catalog.count(batch, txid(3), pack((1, 5, 1)), facts())
    catalog.uncount(batch, txid(1), pack((1, 5, 1)))
    assert counts(catalog, 1, batch) == {5: 2}
    assert catalog.counted(txid(2), batch)
    assert not catalog.counted(txid(1), batch)
    # The changes are visible only through the batch until it is written.
    assert counts(catalog, 1) == {5: 1}
    assert catalog.counted(txid(1)) and not catalog.counted(txid(2))
    catalog.write(batch)
    assert counts(catalog, 1) == {5: 2}
    assert catalog.counted(txid(2)) and not catalog.counted(txid(1))


def test_batch_knows_its_size(catalog):
    batch = catalog.batch()
    assert batch.size == 0 and len(batch) == 0
    catalog.count(batch, txid(1), pack((1, 5, 1)), facts())
    size = batch.size
    assert 4096 < size < 5000
    catalog.count(batch, txid(2), pack((1, 6, 1)), facts())
    assert size + 17 < batch.size < size + 500
    assert batch.size == sum(len(k) + len(v or b'') for k, v in batch.items())


def test_group_is_dirty_once_a_count_is_zero(catalog):
    count(catalog, 1, (1, 5, 2), (2, 5, 1), (3, 1, 1))
    count(catalog, 2, (2, 5, 1), (1, 6, 1))
    assert not any(g['dirty'] for _, g in catalog.groups())
    uncount(catalog, 1, (1, 5, 2), (2, 5, 1), (3, 1, 1))
    assert {n: g['dirty'] for n, g in catalog.groups()} == {
        1: True, 2: False, 3: True}
    assert {n: g['used'] for n, g in catalog.groups()} == {1: 1, 2: 1, 3: 0}


def test_dirt_goes_with_the_counts(catalog):
    count(catalog, 1, (1, 5, 1))
    batch = catalog.batch()
    catalog.uncount(batch, txid(1), pack((1, 5, 1)))
    assert catalog.group(1, batch)['dirty']
    assert not catalog.group(1)['dirty']


@pytest.mark.parametrize('seed', range(5))
def test_counts_against_a_model(catalog, path, seed):
    rng = random.Random(seed)
    model = collections.defaultdict(collections.Counter)
    counted = {}
    for step in range(60):
        batch = catalog.batch()
        for _ in range(rng.randrange(4)):
            if counted and rng.random() < 0.45:
                number = rng.choice(list(counted))
                runs = counted.pop(number)
                catalog.uncount(batch, txid(number), pack(*runs))
                sign = -1
            else:
                number = rng.getrandbits(64)
                runs = [(rng.randrange(1, 4), rng.choice([
                    rng.randrange(32768 - 1024), rng.randrange(900, 2100)]),
                    rng.randrange(1, 1025)) for _ in range(rng.randrange(9))]
                counted[number] = runs
                catalog.count(batch, txid(number), pack(*runs), facts())
                sign = 1
            for group, slot, blocks in runs:
                for s in range(slot, slot + blocks):
                    model[group][s] += sign
        catalog.write(batch, sync=rng.random() < 0.1)
        if rng.random() < 0.1:
            catalog.close()
            catalog = open_catalog(path)
    for group in (1, 2, 3):
        real = {s: n for s, n in model[group].items() if n}
        assert counts(catalog, group) == real
        assert catalog.group(group)['used'] == len(real)
    assert set(catalog.txids()) == {txid(n) for n in counted}
    catalog.close()


# -- the catalog's own metadata -----------------------------------------------

def test_new_catalog_is_not_valid(catalog, path):
    assert not catalog.valid and catalog.sequence == 0
    assert len(catalog.id) == 16
    catalog_id = catalog.id
    catalog.write(catalog.batch(), valid=True, sequence=7)
    catalog.close()
    catalog = open_catalog(path)
    assert catalog.valid and catalog.sequence == 7
    assert catalog.id == catalog_id
    catalog.close()


def test_ids_differ(catalog, tmp_path):
    other = catalog_db.Catalog(tmp_path / 'other', REPOSITORY, create=True)
    assert other.id != catalog.id
    other.close()


def test_there_is_none(path):
    with pytest.raises(database.CatalogError, match='does not exist'):
        open_catalog(path)


def test_none_is_made_over_another(catalog, path):
    catalog.close()
    with pytest.raises(exceptions.DamagedError):
        catalog_db.Catalog(path, REPOSITORY, create=True)
    open_catalog(path).close()


def test_of_another_repository(catalog, path):
    catalog.close()
    with pytest.raises(database.CatalogError, match=REPOSITORY):
        catalog_db.Catalog(path, 'f' * 32)


def test_closed(catalog):
    catalog.close()
    catalog.close()
    with pytest.raises(exceptions.ClosedError):
        catalog.counted(txid(1))
    with pytest.raises(exceptions.ClosedError):
        catalog.write(catalog.batch())
    with pytest.raises(exceptions.ClosedError):
        list(catalog.ledger())


def test_open_twice_is_busy(catalog, path):
    with pytest.raises(exceptions.BusyError):
        open_catalog(path)


def test_disk_bytes(catalog):
    assert 0 < catalog.disk_bytes() < 1 << 20


# -- the rest -----------------------------------------------------------------

def test_groups_facts(catalog):
    assert catalog.group(3) == {
        'judged': 0, 'dirty': False, 'used': 0, 'rewritten': 0}
    batch = catalog.batch()
    catalog.set_group(batch, 3, judged=7)
    catalog.set_group(batch, 3, rewritten=5)
    catalog.set_group(batch, 0x1000000, dirty=True)
    catalog.write(batch)
    assert catalog.group(3) == {
        'judged': 7, 'dirty': False, 'used': 0, 'rewritten': 5}
    assert [n for n, _ in catalog.groups()] == [3, 0x1000000]
    batch = catalog.batch()
    catalog.forget_group(batch, 3)
    catalog.write(batch)
    assert [n for n, _ in catalog.groups()] == [0x1000000]


def test_group_with_counts_is_not_forgotten(catalog):
    count(catalog, 1, (3, 2000, 1))
    with pytest.raises(database.CatalogError):
        catalog.forget_group(catalog.batch(), 3)


def test_statistics(catalog):
    assert catalog.statistics()['images'] == 0
    count(catalog, 1, (1, 5, 2), image_id='a', project='p')
    count(catalog, 2, (1, 5, 3), image_id='b', project='p')
    count(catalog, 3, (2, 5, 1), image_id='c', project='q', size=100)
    count(catalog, 4, (2, 6, 1), image_id='b_web_20261123T180000Z',
          project='q')
    found = catalog.statistics()
    assert found.pop('projects') == {
        'p': {'images': 2, 'backups': 0, 'logical_bytes': 20, 'zero_bytes': 8,
              'nonzero_bytes': 12, 'new_bytes': 6, 'stored_bytes': 4,
              'blocks': 2},
        'q': {'images': 1, 'backups': 1, 'logical_bytes': 110, 'zero_bytes': 8,
              'nonzero_bytes': 102, 'new_bytes': 6, 'stored_bytes': 4,
              'blocks': 2}}
    assert found == {
        'images': 3, 'backups': 1, 'logical_bytes': 130, 'zero_bytes': 16,
        'nonzero_bytes': 114, 'new_bytes': 12, 'stored_bytes': 8, 'blocks': 4,
        'unique_blocks': 5, 'disks': 0, 'derived_bytes': 0}
    count(catalog, 5, (2, 7, 1), image_id='d', project='q', derived_bytes=3)
    assert catalog.statistics()['disks'] == 1
    assert catalog.statistics()['derived_bytes'] == 3
    uncount(catalog, 5, (2, 7, 1))
    uncount(catalog, 3, (2, 5, 1))
    assert catalog.statistics()['images'] == 2
    assert catalog.statistics()['unique_blocks'] == 4


def test_facts_of():
    header = {'image_id': 'i', 'project': 'p', 'upload_id': b'\1' * 16,
              'transaction_id': b'\2' * 16, 'size': 1, 'zero_bytes': 2,
              'new_bytes': 3, 'stored_bytes': 4, 'extents': 5, 'fragments': 6,
              'created': 7, 'derived_bytes': None}
    facts = {
        'image_id': 'i', 'project': 'p', 'upload_id': '01' * 16, 'size': 1,
        'zero_bytes': 2, 'new_bytes': 3, 'stored_bytes': 4, 'blocks': 63,
        'fragments': 6, 'created': 7}
    assert refcounts.facts_of(header, 63) == facts
    assert refcounts.facts_of({**header, 'derived_bytes': 0}, 63) == {
        **facts, 'derived_bytes': 0}


def test_damaged_blocks(catalog):
    batch = catalog.batch()
    facts = {'found': 1, 'fingerprint': 64 * 'a', 'quarantine': '',
             'images': ['one']}
    catalog.set_damaged(batch, 5 << 15 | 7, facts)
    catalog.set_damaged(batch, 6 << 15, {**facts, 'found': 2})
    catalog.write(batch)
    assert catalog.damaged() == {5 << 15 | 7: facts,
                                 6 << 15: {**facts, 'found': 2}}
    batch = catalog.batch()
    catalog.set_damaged(batch, 6 << 15, None)
    catalog.write(batch)
    assert list(catalog.damaged()) == [5 << 15 | 7]


def test_scrub_state(catalog):
    assert catalog.scrub_state() == {}
    catalog.set_scrub_state({'group': 3, 'slot': 9})
    assert catalog.scrub_state() == {'group': 3, 'slot': 9}


def test_history(catalog):
    catalog.sample(1000.7, {'images': 1})
    catalog.sample(2000, {'images': 2})
    assert catalog.history() == [{'time': 1000, 'images': 1},
                                 {'time': 2000, 'images': 2}]
    assert catalog.history(1001) == [{'time': 2000, 'images': 2}]
    assert catalog.history(3000) == []


def test_history_is_thinned_out(catalog):
    day = 86400
    now = 400 * day
    batch = catalog.batch()
    for time in range(now - 100 * day, now, 600):
        batch.put(b'h' + time.to_bytes(8, 'big'), b'{}')
    catalog.write(batch)
    catalog.sample(now, {})
    times = [sample['time'] for sample in catalog.history()]
    recent = [t for t in times if t >= now - day]
    hourly = [t for t in times if now - 90 * day <= t < now - day]
    daily = [t for t in times if t < now - 90 * day]
    assert recent == list(range(now - day, now + 1, 600))
    assert hourly == list(range(now - 90 * day, now - day, 3600))
    assert daily == list(range(now - 100 * day, now - 90 * day, day))
    # The second time there is nothing more to thin out.
    catalog.sample(now + 1, {})
    assert len(catalog.history()) == len(times) + 1


def test_salvage(catalog, tmp_path):
    catalog.sample(1000, {'images': 1})
    catalog.set_scrub_state({'slot': 9})
    batch = catalog.batch()
    facts = {'found': 1, 'fingerprint': 64 * 'a', 'quarantine': '',
             'images': ['one']}
    catalog.set_damaged(batch, 5 << 15 | 7, facts)
    # These records are not well-formed; the salvage leaves them behind.
    catalog.set_damaged(batch, 7, facts)
    catalog.set_damaged(batch, 5 << 15 | 8, {**facts, 'fingerprint': 'a'})
    batch.put(b'h', b'{}')
    batch.put(b'h' + bytes(8), b'[]')
    batch.put(b's1', b'{}')
    catalog.write(batch)
    count(catalog, 1, (1, 5, 2))
    other = catalog_db.Catalog(tmp_path / 'other', REPOSITORY, create=True)
    batch, lost = catalog.salvage()
    assert lost == 5
    other.write(batch)
    assert other.history() == [{'time': 1000, 'images': 1}]
    assert other.scrub_state() == {'slot': 9}
    assert other.damaged() == {5 << 15 | 7: facts}
    assert list(other.txids()) == list(other.groups()) == []
    other.close()
