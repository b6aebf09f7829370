# SPDX-License-Identifier: Apache-2.0

"""The catalog alone survives damage, and failing writes."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import threading

import plyvel
import pytest

from glance_dedup.base import exceptions
from glance_dedup.maintenance import catalog_db
from glance_dedup.maintenance import database
from tests.support import repositories
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


# -- damage -------------------------------------------------------------------

def filled(path, images=60):
    """A closed catalog, with tables and a log."""
    catalog = catalog_db.Catalog(path, REPOSITORY, create=True)
    for number in range(images):
        batch = catalog.batch()
        # Transaction ids are as random as real ones.
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
    """Without one of its files the catalog is refused, or is older."""
    original, truth = sample
    noticed = set()
    for name in sorted(os.listdir(original)):
        shutil.copytree(original, path)
        (path / name).unlink()
        try:
            found = read_everything(path)
            # LevelDB may not have removed yet a file that it does not need.
            assert found == truth or found[0] < truth[0], name
            if found != truth:
                noticed.add(name)
        except database.CatalogError:
            noticed.add(name)
        shutil.rmtree(path)
    assert {name.partition('-')[0] for name in noticed} >= {
        'CURRENT', 'MANIFEST'} and len(noticed) > 2


@pytest.mark.parametrize('seed', range(40))
def test_damage_is_noticed(sample, path, seed):
    """A changed byte makes the catalog refused or older, or has no effect."""
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
    except database.CatalogError:
        return
    assert found == truth or found[0] < truth[0], (file.name, at)


def test_lost_batch_in_the_middle_is_noticed(catalog, path):
    """A lost batch in the middle is an error: an older log was cut short."""
    for number in range(1, 4):
        count(catalog, number, (number, 5, 1))
    assert len(list(catalog.txids())) == 3
    batch = catalog.batch()
    batch.delete(b'l' + txid(2))
    catalog.write(batch)
    with pytest.raises(database.CatalogError, match='middle'):
        list(catalog.txids())


def test_hole_in_the_log_is_noticed(path):
    """A hole in the log is an error; LevelDB alone would skip it."""
    filled(path, 8)
    log, = path.glob('*.log')
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    with pytest.raises(database.CatalogError):
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
    (b'g\0\0\0\1', b'{"judged": 40000}'), (b'p\0\0\0\1', b'short'),
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
            catalog.duplicates(1)
        finally:
            catalog.close()
    with pytest.raises(database.CatalogError) as caught:
        use()
    assert "b'" not in str(caught.value) and 'b"' not in str(caught.value)


def test_strange_samples_are_left_out(catalog):
    """Malformed samples are left out of the history."""
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
    {'parts': -1}, {'repository_id': None}, {'ledger': 0},
    {'ledger': '12'}])
def test_strange_meta(catalog, path, change):
    catalog.close()
    with plyvel.DB(str(path)) as db:
        meta = json.loads(db.get(b'meta'))
        db.put(b'meta', json.dumps({**meta, **change}).encode())
    with pytest.raises(database.CatalogError):
        open_catalog(path)


@pytest.mark.parametrize('what', ['file', 'link'])
def test_not_a_directory(path, tmp_path, what):
    if what == 'file':
        path.write_bytes(b'')
    else:
        filled(tmp_path / 'real', 1)
        path.symlink_to(tmp_path / 'real')
    with pytest.raises(database.CatalogError):
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
    """Without space a batch fails, and the catalog stays good."""
    with repositories.small_disk(tmp_path / 'disk', '4m') as disk:
        catalog = catalog_db.Catalog(disk / 'catalog', REPOSITORY,
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
    """A LevelDB batch that is written although its write raises an error."""

    def __init__(self, batch):
        self._batch = batch

    def __getattr__(self, name):
        return getattr(self._batch, name)

    def write(self):
        self._batch.write()
        raise plyvel.IOError(f'fsync: {os.strerror(28)}')


class FailingOnce:
    """A database whose write fails once, after it was done."""

    def __init__(self, db):
        self._db = db

    def __getattr__(self, name):
        return getattr(self._db, name)

    def write_batch(self, **options):
        return FailsAfterwards(self._db.write_batch(**options))


@pytest.mark.parametrize('given', [{}, {'valid': True}])
def test_next_batch_does_not_take_back_one_that_failed(catalog, path, given):
    """The failed write reached the disk: its metadata must stay."""
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
    """Opening the catalog again after a failed write finds lost batches."""
    older = path.parent / 'older'
    shutil.copytree(path, older)
    catalog.write(catalog.batch(), sync=True, sequence=5)
    catalog._drop()
    for place in path, older:
        for file in place.iterdir():
            if file.name == 'CURRENT':
                continue    # the same in both
            if place == path:
                file.unlink()
            else:
                file.rename(path / file.name)
    with pytest.raises(database.CatalogError, match='lost'):
        catalog.counted(txid(1))


def test_opened_by_another_process_meanwhile(catalog, path):
    """The catalog is refused if another process has opened it meanwhile."""
    catalog._drop()
    open_catalog(path).close()
    assert catalog.is_opened_elsewhere()
    with pytest.raises(exceptions.LostLocks):
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
        # LevelDB may remove a full log at any time.
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


def test_killed_in_the_middle(path):
    """After a kill each written batch exists as a whole or not at all."""
    catalog_db.Catalog(path, REPOSITORY, create=True).close()
    # Spawn, not fork: a forked child lacks the threads that LevelDB started.
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
