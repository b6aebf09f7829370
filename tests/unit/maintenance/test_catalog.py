# SPDX-License-Identifier: Apache-2.0

"""The catalog by itself: counts, ledger, what is damaged, room, history."""

import array
import collections
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import struct
import threading

import plyvel
import pytest

from glance_dedup.base import exceptions
from glance_dedup.maintenance import catalog as catalog_module
from tests.support import repositories

REPOSITORY = '0123456789abcdef' * 2


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'catalog'


@pytest.fixture
def catalog(path):
    catalog = catalog_module.Catalog(path, REPOSITORY, create=True)
    yield catalog
    catalog.close()


def open_catalog(path):
    return catalog_module.Catalog(path, REPOSITORY)


class Runs(bytes):
    """Packed runs, as those of a recipe with one page of extents."""

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


def uncount(catalog, number, *runs):
    batch = catalog.batch()
    catalog.uncount(batch, txid(number), pack(*runs))
    catalog.write(batch)


def counts(catalog, group, batch=None):
    """Slots and their counts, without the zeros."""
    words = array.array('I', catalog.counts(group, batch=batch))
    assert len(words) == 32768
    return {slot: n for slot, n in enumerate(words) if n}


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
            'judged': 0, 'dirty': False, 'indexed': 0, 'used': 1,
            'rewritten': 0}
        meta = json.loads(db.get(b'meta'))
        assert set(meta) == {'format', 'repository_id', 'catalog_id',
                             'sequence', 'valid', 'index_bits', 'ledger'}
        assert meta['ledger'] == f'{0xabcdef:032x}'
        assert meta['repository_id'] == REPOSITORY and meta['format'] == 1


def test_n1_each_recipe_is_counted_once(catalog):
    batch = catalog.batch()
    catalog.count(batch, txid(1), pack((1, 1, 1)), facts())
    with pytest.raises(catalog_module.CatalogError, match='already'):
        catalog.count(batch, txid(1), pack((1, 1, 1)), facts())
    catalog.write(batch)
    with pytest.raises(catalog_module.CatalogError, match='already'):
        catalog.count(catalog.batch(), txid(1), pack((1, 1, 1)), facts())


def test_n1_what_has_no_key_is_not_uncounted(catalog):
    count(catalog, 1, (1, 1, 1))
    batch = catalog.batch()
    with pytest.raises(catalog_module.CatalogError, match='not counted'):
        catalog.uncount(batch, txid(2), pack((1, 1, 1)))
    assert not len(batch)
    catalog.uncount(batch, txid(1), pack((1, 1, 1)))
    with pytest.raises(catalog_module.CatalogError, match='not counted'):
        catalog.uncount(batch, txid(1), pack((1, 1, 1)))


def test_count_below_zero_is_damage(catalog):
    count(catalog, 1, (1, 1, 1))
    count(catalog, 2, (1, 2, 1))
    with pytest.raises(catalog_module.CatalogError, match='too few'):
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
    # And nothing is seen without it, until it is written.
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


# -- large recipes: in parts --------------------------------------------------

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
    """Count, or un-count, in steps of a page; whether that was all."""
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
    """To its end and back, whatever was there before."""
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
    """Also what an earlier version counted at once, however large."""
    empty = everything(catalog)
    for counted in (0, 5000, 1 << 40):
        for uncounted in (0, 5000, 1 << 40):
            assert count_some(catalog, 2, 5, most=counted)
            assert uncount_some(catalog, 2, 5, most=uncounted)
            assert everything(catalog) == empty
            assert list(catalog.txids()) == []


def test_turning_round(catalog):
    """Between any two steps, as often as one likes."""
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


def test_format_of_parts(catalog, path):
    """A program that does not know them makes the catalog anew."""
    count(catalog, 1, (1, 5, 1))
    catalog.close()
    plain, _ = meta_of(path)
    assert plain['format'] == 1 and 'parts' not in plain
    for steps, parts in ((1, 1), (1, 2), (3, 4)):
        catalog = open_catalog(path)
        count_some(catalog, 2, steps)
        catalog.close()
        meta, _ = meta_of(path)
        assert (meta['format'], meta['parts']) == (2, parts)
    catalog = open_catalog(path)
    assert uncount_some(catalog, 2, 9)
    catalog.close()
    assert meta_of(path) == (plain, [])


@pytest.mark.parametrize('lost', range(4))
def test_lost_step_is_noticed(catalog, lost):
    """As where an older log was cut short: its counts are too low."""
    count_some(catalog, 2, 5)
    assert list(catalog.txids()) == [txid(2)]
    batch = catalog.batch()
    batch.delete(b'e' + txid(2) + struct.pack('>I', lost))
    catalog.write(batch)
    with pytest.raises(catalog_module.CatalogError, match='middle'):
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
    with pytest.raises(catalog_module.CatalogError):
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
    """What is in the batch is said to be."""
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


# -- what it says of itself ---------------------------------------------------

def test_new_catalog_is_not_valid(catalog, path):
    assert not catalog.valid and catalog.sequence == 0
    assert catalog.index_bits == 0 and len(catalog.id) == 16
    catalog_id = catalog.id
    catalog.write(catalog.batch(), valid=True, sequence=7, index_bits=3)
    catalog.close()
    catalog = open_catalog(path)
    assert catalog.valid and catalog.sequence == 7 and catalog.index_bits == 3
    assert catalog.id == catalog_id
    catalog.close()


def test_ids_differ(catalog, tmp_path):
    other = catalog_module.Catalog(tmp_path / 'other', REPOSITORY, create=True)
    assert other.id != catalog.id
    other.close()


def test_there_is_none(path):
    with pytest.raises(catalog_module.CatalogError, match='not there'):
        open_catalog(path)


def test_none_is_made_over_another(catalog, path):
    catalog.close()
    with pytest.raises(exceptions.DamagedError):
        catalog_module.Catalog(path, REPOSITORY, create=True)
    open_catalog(path).close()


def test_of_another_repository(catalog, path):
    catalog.close()
    with pytest.raises(catalog_module.CatalogError, match=REPOSITORY):
        catalog_module.Catalog(path, 'f' * 32)


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


# -- damage -------------------------------------------------------------------

def filled(path, images=60):
    """A closed catalog, with tables and a log."""
    catalog = catalog_module.Catalog(path, REPOSITORY, create=True)
    for number in range(images):
        batch = catalog.batch()
        # As random as they are.
        catalog.count(batch, hashlib.md5(b'%d' % number).digest(),
                      pack(*((g, number * 7, 500) for g in range(1, 40))),
                      facts(f'image-{number}'))
        catalog.write(batch, sequence=number + 1)
    catalog.write(catalog.batch(), sync=True, valid=True)
    catalog.close()
    return path


def read_everything(path):
    catalog = open_catalog(path)
    try:
        ledger = dict(catalog.ledger())
        assert set(catalog.txids()) == set(ledger)
        return (catalog.sequence, ledger,
                [catalog.counts(g) for g in range(1, 40)],
                dict(catalog.groups()))
    finally:
        catalog.close()


@pytest.fixture(scope='module')
def sample(tmp_path_factory):
    path = filled(tmp_path_factory.mktemp('catalog') / 'catalog')
    return path, read_everything(shutil.copytree(path, f'{path}-copy'))


def test_what_is_lost_is_noticed(sample, path):
    """Without a file it is refused, or older than it was."""
    original, truth = sample
    noticed = set()
    for name in sorted(os.listdir(original)):
        shutil.copytree(original, path)
        (path / name).unlink()
        try:
            found = read_everything(path)
            # LevelDB may not have removed yet what it needs no more.
            assert found == truth or found[0] < truth[0], name
            if found != truth:
                noticed.add(name)
        except catalog_module.CatalogError:
            noticed.add(name)
        shutil.rmtree(path)
    assert {name.partition('-')[0] for name in noticed} >= {
        'CURRENT', 'MANIFEST'} and len(noticed) > 2


@pytest.mark.parametrize('seed', range(40))
def test_damage_is_noticed(sample, path, seed):
    """Bytes changed anywhere: refused, or older, or without effect."""
    original, truth = sample
    shutil.copytree(original, path)
    rng = random.Random(seed)
    files = [f for f in sorted(path.iterdir())
             if f.stat().st_size and not f.name.startswith('LOG')]
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    if seed % 4 == 0:
        del data[at:]
    elif seed % 4 == 1:
        data[at:at + 512] = bytes(len(data[at:at + 512]))
    else:
        data[at] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    try:
        found = read_everything(path)
    except catalog_module.CatalogError:
        return
    assert found == truth or found[0] < truth[0], (file.name, at)


def test_lost_batch_in_the_middle_is_noticed(catalog, path):
    """As where an older log was cut short, and a newer one was not."""
    for number in range(1, 4):
        count(catalog, number, (number, 5, 1))
    assert len(list(catalog.txids())) == 3
    batch = catalog.batch()
    batch.delete(b'l' + txid(2))
    catalog.write(batch)
    with pytest.raises(catalog_module.CatalogError, match='middle'):
        list(catalog.txids())


def test_hole_in_the_log_is_noticed(path):
    """LevelDB alone would skip it, and take the batches that follow."""
    filled(path, 8)
    log, = path.glob('*.log')
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    with pytest.raises(catalog_module.CatalogError):
        open_catalog(path)


@pytest.mark.parametrize('key, value', [
    (b'meta', b''), (b'meta', b'[]'), (b'meta', b'{"format": 1}'),
    (b'meta', None), (b'meta', b'[' * 100000),
    (b'l' + bytes(15), b'{}'), (b'l' + bytes(16), b'\xff'),
    (b'g\0\0\0\1', b'3'), (b'g\0\0\0\1', b'{"used": "x"}'),
    (b'g\0\0\0\1', b'{"used": -1}'), (b'g\0\0', b'{}'),
    (b'c\0\0\0\1\0', b'short'), (b'd\0', b'{}'), (b'd' + bytes(8), b'0'),
    (b's', b'7'), (b's', b'{"waiting": [1]}'), (b's', b'{"slot": -1}'),
    (b's', b'{"unreadable": {"x": 1}}'), (b'l' + bytes(16), b'{}'),
    (b'l' + bytes(16), b'{"image_id": 1}'),
    (b'l' + bytes(16), b'{"image_id": "a", "size": "1"}'),
    (b'd' + bytes(8), b'{}'), (b'd\0\0\0\0\0\0\x80\0', b'{"found": 1}'),
    (b'g\0\0\0\1', b'{"judged": 40000}'), (b'f\0\0\0\0', b'short'),
    (b'f\0\0\0\0', bytes(26)), (b'p\0\0\0\1', b'short'),
    (b'p\0\0\0\1', bytes(16))])
def test_strange_keys_and_values(catalog, path, key, value):
    catalog.close()
    with plyvel.DB(str(path)) as db:
        if value is None:
            db.delete(key)
        else:
            db.put(key, value)

    def use():
        catalog = open_catalog(path)
        try:
            list(catalog.ledger())
            list(catalog.txids())
            list(catalog.groups())
            catalog.counts(1)
            catalog.damaged()
            catalog.scrub_state()
            catalog.index_page(0)
            catalog.duplicates(1)
        finally:
            catalog.close()
    with pytest.raises(catalog_module.CatalogError) as caught:
        use()
    assert "b'" not in str(caught.value) and 'b"' not in str(caught.value)


def test_strange_samples_are_left_out(catalog):
    """No decision depends on them."""
    catalog.sample(1000, {'images': 1})
    batch = catalog.batch()
    batch.put(b'h\1', b'{}')
    batch.put(b'h' + (2000).to_bytes(8, 'big'), b'7')
    catalog.write(batch)
    assert catalog.history() == [{'time': 1000, 'images': 1}]
    catalog.sample(3000, {'images': 2})
    assert [s['time'] for s in catalog.history()] == [1000, 3000]


@pytest.mark.parametrize('change', [
    {'format': 2}, {'catalog_id': '12'}, {'catalog_id': 5}, {'sequence': -1},
    {'sequence': 1 << 70}, {'sequence': True}, {'valid': 1},
    {'index_bits': 99}, {'repository_id': None}, {'ledger': 0},
    {'ledger': '12'}])
def test_strange_meta(catalog, path, change):
    catalog.close()
    with plyvel.DB(str(path)) as db:
        meta = json.loads(db.get(b'meta'))
        db.put(b'meta', json.dumps({**meta, **change}).encode())
    with pytest.raises(catalog_module.CatalogError):
        open_catalog(path)


@pytest.mark.parametrize('what', ['file', 'link'])
def test_not_a_directory(path, tmp_path, what):
    if what == 'file':
        path.write_bytes(b'')
    else:
        filled(tmp_path / 'real', 1)
        path.symlink_to(tmp_path / 'real')
    with pytest.raises(catalog_module.CatalogError):
        open_catalog(path)


def test_no_access(catalog, path):
    catalog.close()
    os.chmod(path, 0)
    os.chmod(path.parent, 0o755)
    top = path.parent
    while top.name != 'tmp' and top != top.parent:
        os.chmod(top, os.stat(top).st_mode | 0o055)
        top = top.parent

    def use():
        with pytest.raises(exceptions.AccessDenied):
            open_catalog(path)
    if os.geteuid() == 0:
        repositories.in_child(repositories.as_user(65534, use))
    else:
        use()
    os.chmod(path, 0o700)


# -- writing that fails -------------------------------------------------------

def test_no_room(tmp_path):
    """The batch is not written, and the catalog is good when there is."""
    with repositories.small_disk(tmp_path / 'disk', '4m') as disk:
        catalog = catalog_module.Catalog(disk / 'catalog', REPOSITORY,
                                         create=True)
        count(catalog, 1, (1, 5, 1))
        filling = repositories.fill_disk(disk)
        with pytest.raises(exceptions.NoSpaceError):
            for number in range(2, 1000):
                count(catalog, number, *((g, 0, 1) for g in range(1, 9)))
        last = number
        with pytest.raises(exceptions.NoSpaceError):
            count(catalog, 5000, (1, 5, 1))
        filling.unlink()
        written = catalog.counted(txid(last))
        assert set(catalog.txids()) == {
            txid(n) for n in range(1, last + written)}
        count(catalog, 6000, (1, 5, 1))
        catalog.close()
        catalog = open_catalog(disk / 'catalog')
        assert catalog.counted(txid(1)) and catalog.counted(txid(6000))
        assert not catalog.counted(txid(5000))
        catalog.close()


def test_same_batch_may_be_written_twice(catalog):
    batch = catalog.batch()
    catalog.count(batch, txid(1), pack((1, 5, 1)), facts())
    catalog.write(batch)
    catalog.write(batch)
    assert counts(catalog, 1) == {5: 1}
    assert list(catalog.txids()) == [txid(1)]


class FailsAfterwards:
    """A batch of LevelDB that is written, and whose writing is an error."""

    def __init__(self, batch):
        self._batch = batch

    def __getattr__(self, name):
        return getattr(self._batch, name)

    def write(self):
        self._batch.write()
        raise plyvel.IOError(f'fsync: {os.strerror(28)}')


class FailingOnce:
    """The database, of which one write fails after it was done."""

    def __init__(self, db):
        self._db = db

    def __getattr__(self, name):
        return getattr(self._db, name)

    def write_batch(self, **options):
        return FailsAfterwards(self._db.write_batch(**options))


@pytest.mark.parametrize('given', [{}, {'index_bits': 3}])
def test_next_batch_does_not_take_back_one_that_failed(catalog, path, given):
    """It was written all the same: what it said of the catalog must stay."""
    count(catalog, 1, (1, 5, 1))
    batch = catalog.batch()
    catalog.count(batch, txid(2), pack((1, 5, 1)), facts())
    catalog._db = FailingOnce(catalog._db)
    with pytest.raises(exceptions.NoSpaceError):
        catalog.write(batch, sync=True, sequence=7)
    catalog.write(catalog.batch(), **given)
    assert catalog.sequence == 7
    assert set(catalog.txids()) == {txid(1), txid(2)}
    catalog.close()
    catalog = open_catalog(path)
    assert catalog.sequence == 7
    assert set(catalog.txids()) == {txid(1), txid(2)}
    catalog.close()


def test_lost_batches_are_noticed_when_it_is_opened_anew(catalog, path):
    """As it is after a write that failed."""
    older = path.parent / 'older'
    shutil.copytree(path, older)
    catalog.write(catalog.batch(), sync=True, sequence=5)
    catalog._drop()
    shutil.rmtree(path)
    older.rename(path)
    with pytest.raises(catalog_module.CatalogError, match='lost'):
        catalog.counted(txid(1))


def _write_batches(path):
    catalog = open_catalog(path)
    base = catalog.sequence
    for number in range(base + 1, base + 10000):
        batch = catalog.batch()
        catalog.count(batch, txid(number), pack(
            (1, number % 30000, 9), (2, 3, 5)), facts())
        catalog.write(batch, sync=number % 16 == 0, sequence=number)


def _log_bytes(path):
    size = 0
    for file in path.glob('*.log'):
        # One that is full goes at any time.
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


def test_killed_in_the_middle(path):
    """Of batches that were written each is there, or not, as a whole."""
    catalog_module.Catalog(path, REPOSITORY, create=True).close()
    # Not forked: a child has none of the threads that LevelDB has begun here.
    context = multiprocessing.get_context('spawn')
    for round_ in range(4):
        child = context.Process(target=_write_batches, args=(path,))
        child.start()
        try:
            repositories.eventually(
                lambda: _log_bytes(path) > 200000 * (round_ + 1))
        finally:
            child.kill()
            child.join()
        catalog = open_catalog(path)
        numbers = {int.from_bytes(t, 'big') for t in catalog.txids()}
        assert numbers == set(range(1, catalog.sequence + 1))
        assert counts(catalog, 2)[3] == catalog.sequence
        catalog.close()


def test_read_by_other_threads(catalog):
    errors = []
    done = threading.Event()

    def read():
        try:
            while not done.is_set():
                catalog.statistics()
                counts(catalog, 1)
        except Exception as e:
            errors.append(e)
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 100):
            count(catalog, number, (1, number, 1))
            if number % 10 == 0:
                catalog._drop()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert [e for e in errors
            if not isinstance(e, exceptions.ClosedError)] == []
    assert catalog.statistics()['images'] == 99


# -- the rest -----------------------------------------------------------------

def test_groups_facts(catalog):
    assert catalog.group(3) == {
        'judged': 0, 'dirty': False, 'indexed': 0, 'used': 0,
        'rewritten': 0}
    batch = catalog.batch()
    catalog.set_group(batch, 3, judged=7)
    catalog.set_group(batch, 3, indexed=5)
    catalog.set_group(batch, 0x1000000, dirty=True)
    catalog.write(batch)
    assert catalog.group(3) == {
        'judged': 7, 'dirty': False, 'indexed': 5, 'used': 0,
        'rewritten': 0}
    assert [n for n, _ in catalog.groups()] == [3, 0x1000000]
    batch = catalog.batch()
    catalog.forget_group(batch, 3)
    catalog.write(batch)
    assert [n for n, _ in catalog.groups()] == [0x1000000]


def test_group_with_counts_is_not_forgotten(catalog):
    count(catalog, 1, (3, 2000, 1))
    with pytest.raises(catalog_module.CatalogError):
        catalog.forget_group(catalog.batch(), 3)


def test_statistics(catalog):
    assert catalog.statistics()['images'] == 0
    count(catalog, 1, (1, 5, 2), image_id='a', project='p')
    count(catalog, 2, (1, 5, 3), image_id='b', project='p')
    count(catalog, 3, (2, 5, 1), image_id='c', project='q', size=100)
    found = catalog.statistics()
    assert found.pop('projects') == {
        'p': {'images': 2, 'logical_bytes': 20, 'zero_bytes': 8,
              'nonzero_bytes': 12, 'new_bytes': 6, 'stored_bytes': 4,
              'blocks': 2},
        'q': {'images': 1, 'logical_bytes': 100, 'zero_bytes': 4,
              'nonzero_bytes': 96, 'new_bytes': 3, 'stored_bytes': 2,
              'blocks': 1}}
    assert found == {
        'images': 3, 'logical_bytes': 120, 'zero_bytes': 12,
        'nonzero_bytes': 108, 'new_bytes': 9, 'stored_bytes': 6, 'blocks': 3,
        'unique_blocks': 4}
    uncount(catalog, 3, (2, 5, 1))
    assert catalog.statistics()['images'] == 2
    assert catalog.statistics()['unique_blocks'] == 3


def test_facts_of():
    header = {'image_id': 'i', 'project': 'p', 'upload_id': b'\1' * 16,
              'transaction_id': b'\2' * 16, 'size': 1, 'zero_bytes': 2,
              'new_bytes': 3, 'stored_bytes': 4, 'extents': 5, 'fragments': 6,
              'created': 7}
    assert catalog_module.facts_of(header, 63) == {
        'image_id': 'i', 'project': 'p', 'upload_id': '01' * 16, 'size': 1,
        'zero_bytes': 2, 'new_bytes': 3, 'stored_bytes': 4, 'blocks': 63,
        'fragments': 6, 'created': 7}


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


def test_index_pages(catalog):
    assert catalog.index_page(0) == b''
    batch = catalog.batch()
    catalog.set_index_page(batch, 0, b'x' * 13)
    catalog.set_index_page(batch, 0x10000, b'y' * 13 + b'z' * 13)
    catalog.write(batch, index_bits=17)
    assert catalog.index_page(0) == b'x' * 13
    assert catalog.index_page(0x10000) == b'y' * 13 + b'z' * 13
    assert catalog.index_bits == 17
    batch = catalog.batch()
    catalog.set_index_page(batch, 0, b'')
    catalog.write(batch)
    assert catalog.index_page(0) == b''


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
    # Again, with nothing more to thin out.
    catalog.sample(now + 1, {})
    assert len(catalog.history()) == len(times) + 1


def test_salvage(catalog, tmp_path):
    catalog.sample(1000, {'images': 1})
    catalog.set_scrub_state({'slot': 9})
    batch = catalog.batch()
    facts = {'found': 1, 'fingerprint': 64 * 'a', 'quarantine': '',
             'images': ['one']}
    catalog.set_damaged(batch, 5 << 15 | 7, facts)
    # These are not well-formed, and are left behind.
    catalog.set_damaged(batch, 7, facts)
    catalog.set_damaged(batch, 5 << 15 | 8, {**facts, 'fingerprint': 'a'})
    batch.put(b'h', b'{}')
    batch.put(b'h' + bytes(8), b'[]')
    batch.put(b's1', b'{}')
    catalog.write(batch)
    count(catalog, 1, (1, 5, 2))
    other = catalog_module.Catalog(tmp_path / 'other', REPOSITORY, create=True)
    batch, lost = catalog.salvage()
    assert lost == 5
    other.write(batch)
    assert other.history() == [{'time': 1000, 'images': 1}]
    assert other.scrub_state() == {'slot': 9}
    assert other.damaged() == {5 << 15 | 7: facts}
    assert list(other.txids()) == list(other.groups()) == []
    other.close()
