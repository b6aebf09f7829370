# SPDX-License-Identifier: Apache-2.0

"""Tables of ``repository check``: their records, and the memory they take."""

import os
import random
import tempfile
import tracemalloc

import plyvel
import pytest

from glance_dedup.base import exceptions
from glance_dedup.check import checker
from glance_dedup.check import files
from glance_dedup.check import recipe_table
from glance_dedup.check import record_table
from glance_dedup.check import space
from tests.unit.repository import format_writer


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Directory for temporary files; the test leaves no file there."""
    path = tmp_path / 'scratch'
    path.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(path))
    yield path
    assert os.listdir(path) == []


@pytest.fixture
def repository(tmp_path):
    return format_writer.Repository(tmp_path / 'repository')


@pytest.fixture
def group(repository):
    group = format_writer.Group(repository, 1)
    group.append([b'%d' % i * 512 for i in range(8)])
    group.publish()
    group.save()
    return group


# -- the store ----------------------------------------------------------------

@pytest.mark.parametrize('limit', [0, 3000, 1 << 30])
def test_it_is_an_ordered_map(monkeypatch, limit):
    monkeypatch.setattr(record_table, 'LIMIT', limit)
    monkeypatch.setattr(record_table, 'BATCH', 1000)
    rng = random.Random(limit)
    model, store = {}, record_table.RecordTable()
    for _ in range(300):
        key = b'%c%03d' % (rng.choice(b'abc'), rng.randrange(100))
        if rng.random() < 0.5:
            model[key] = b'%d' % rng.randrange(10)
            store.put(key, model[key])
        assert store.get(key) == model.get(key)
        assert (key in store) == (key in model)
        if rng.random() < 0.1:
            assert list(store.items(key[:1])) == [
                item for item in sorted(model.items())
                if item[0][:1] == key[:1]]
            assert list(store.items(key[:1], key)) == [
                item for item in sorted(model.items())
                if item[0][:1] == key[:1] and item[0] >= key]
    store.close()
    assert list(store.items(b'a')) == []
    store.put(b'a', b'again')
    assert store.get(b'a') == b'again'
    store.close()


@pytest.mark.parametrize('error, raised', [
    (plyvel.IOError(b'IO error: 000003.log: No space left on device'),
     exceptions.NoSpaceError),
    (plyvel.CorruptionError(b'Corruption: bad block'),
     exceptions.StorageError)])
def test_no_room_ends_the_check(
        repository, group, monkeypatch, error, raised):
    def refuse(*arguments, **options):
        raise error

    repository.image('one', [(group, 0, 8)])
    monkeypatch.setattr(record_table, 'LIMIT', 0)
    monkeypatch.setattr(record_table.plyvel, 'DB', refuse)
    with pytest.raises(raised, match='TMPDIR'):
        checker.check(repository.path)


# -- on the disk all is as in memory ------------------------------------------

@pytest.mark.parametrize('limit', [0, 1 << 30])
def test_the_verdict_is_the_same(repository, group, monkeypatch, limit):
    monkeypatch.setattr(record_table, 'LIMIT', limit)
    monkeypatch.setattr(record_table, 'BATCH', 0)
    monkeypatch.setattr(recipe_table, 'PAGES_AT_ONCE', 1)
    monkeypatch.setattr(files, 'PAUSE', 0)
    gone = format_writer.Group(repository, 7)
    gone.append([b'gone' * 128])
    catalog = format_writer.Catalog(repository)
    images = {'a': [(group, i % 8, 1) for i in range(250)],
              'b': [(group, 0, 2), (gone, 0, 1)],
              'c': [(group, 4, 4)], 'd': [(group, 5, 3)]}
    for name, pieces in images.items():
        repository.image(name, pieces)
        catalog.count(name, pieces)
    catalog.count('e', [(group, 0, 1)])
    del catalog.ledger[format_writer.some_id('upload of d')]
    catalog.index(group)
    catalog.save()
    # One bad block has a spare copy, and another one has none.
    spares = format_writer.Spares(repository, 1)
    spares.append([group.blocks[0]])
    spares.publish()
    spares.save()
    data = bytearray(group.path.read_bytes())
    data[group.data_start + 32] ^= 1
    data[group.data_start + 32 + 4 * 512] ^= 1
    group.path.write_bytes(data)
    # The last page of one recipe is bad.
    path = repository.image('f', [(group, 3, 1)] * 150 + [(gone, 0, 1)] * 100)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    report = checker.check(repository.path)
    assert report.damaged_images == ['a', 'b', 'c', 'f']
    assert [(f.severity, f.file, f.images) for f in report.findings
            if f.images] == [
        ('damage', 'images/f', ('f',)),
        ('damage', 'groups/00000001', ('a', 'b')),
        ('damage', 'groups/00000001', ('a', 'c')),
        ('damage', 'groups/00000007', ('b', 'f'))]
    assert ('is not counted, and nothing in the spool says that it is to be'
            in [f.sentence for f in report.findings
                if f.file == 'images/d'])
    assert report.figures['spares'] == 1


# -- memory -------------------------------------------------------------------

def in_pieces(repository, group, amount):
    """Store one image of this many extents."""
    repository.image('one', [(group, i * 3 % 8, 1) for i in range(amount)])


def many_images(repository, group, amount):
    """Store images that all name the same group, and count them all."""
    catalog = format_writer.Catalog(repository)
    for number in range(amount // 8):
        pieces = [(group, i * 3 % 8, 1) for i in range(8)]
        repository.image(f'{number:036}', pieces)
        catalog.count(f'{number:036}', pieces)
    catalog.save()


def many_spares(repository, group, amount):
    for number in range(1, amount // 400):
        spares = format_writer.Spares(repository, number, slots=512)
        spares.append([b'%12d' % (512 * number + i) for i in range(400)])
        spares.publish()
        spares.save()


@pytest.mark.parametrize('store, allowed', [
    (in_pieces, 3), (many_images, 60), (many_spares, 3)])
def test_memory_is_bounded(tmp_path, monkeypatch, store, allowed):
    """Memory grows only with the images' names, in one of the cases."""
    # Less of the constant memory, so that smaller repositories show growth.
    monkeypatch.setattr(files.File, 'WINDOW', 1 << 16)
    monkeypatch.setattr(record_table, 'LIMIT', 1 << 16)
    monkeypatch.setattr(record_table, 'BATCH', 1 << 16)
    monkeypatch.setattr(recipe_table, 'PAGES_AT_ONCE', 4)
    monkeypatch.setattr(recipe_table, 'OWNERS_AT_ONCE', 64)
    monkeypatch.setattr(space.Duplicates, 'RUN', 1 << 8)
    monkeypatch.setattr(space.Duplicates, 'PIECE', 1 << 8)
    peaks = []
    amounts = 4000, 16000
    for amount in amounts:
        repository = format_writer.Repository(tmp_path / str(amount))
        group = format_writer.Group(repository, 1)
        group.append([b'%d' % i * 512 for i in range(8)])
        group.publish()
        group.save()
        store(repository, group, amount)
        tracemalloc.start()
        try:
            assert checker.check(repository.path).ok
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    growth = (peaks[1] - peaks[0]) / (amounts[1] - amounts[0])
    assert growth < allowed, peaks
