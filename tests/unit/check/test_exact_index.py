# SPDX-License-Identifier: Apache-2.0

"""The checker checks the exact index."""

import random
import struct

import pytest

from glance_dedup.base import sorting
from glance_dedup.check import checker
from glance_dedup.check import exact_index
from tests.unit.check import fixtures
from tests.unit.check import test_catalog_check
from tests.unit.repository import format_writer

no_pause = fixtures.no_pause
repository = fixtures.repository
group, pieces, image = (test_catalog_check.group, test_catalog_check.pieces,
                        test_catalog_check.image)
one, no_findings, findings = (test_catalog_check.one,
                              test_catalog_check.no_findings,
                              test_catalog_check.findings)

DAMAGE, NOTE = checker.DAMAGE, checker.NOTE
SHARD = 'index/shard-00-0000.0000000000000001'


@pytest.fixture
def catalog(repository, image, group, pieces):
    """A saved catalog with an index that is not saved yet."""
    catalog = format_writer.Catalog(repository)
    catalog.count('one', pieces)
    catalog.index(group)
    catalog.groups[1] = {'judged': 12}
    catalog.cursors[1] = 12
    catalog.save()
    return catalog


def record(fingerprint, address):
    return fingerprint[:8] + address.to_bytes(5, 'little')


def test_stale_records(repository, catalog):
    catalog.records.append((b'\0' * 8, 1 << 15 | 40))
    catalog.records.append((b'\1' * 8, 77 << 15))
    catalog.save_index()
    one(repository, NOTE, '2 records of blocks', file='index')
    report = checker.check(repository.path)
    assert report.figures['index_stale'] == 2
    assert report.figures['index_records'] == 14


def test_records_of_copies(repository, catalog):
    """No record is of a block with the mark nodedup (I14)."""
    (repository.path / 'features' / 'nodedup').touch(0o600)
    second = format_writer.Group(repository, 2)
    block = test_catalog_check.noise(99)
    second.append([block], nodedup=True)
    second.publish()
    second.save()
    catalog.cursors[2] = 1
    catalog.save_index()
    no_findings(repository)
    fingerprint = second.compute(block)
    run = format_writer.IndexFile(catalog, 'run', record(fingerprint, 2 << 15))
    path = run.save()
    one(repository, DAMAGE, '1 blocks with the mark nodedup', file='index')
    path.unlink()
    catalog.records.append((fingerprint[:8], 2 << 15))
    catalog.save_index()
    one(repository, DAMAGE, '1 blocks with the mark nodedup', file='index')


def test_missing_record(repository, catalog):
    fingerprint, address = catalog.records.pop(5)
    catalog.save_index()
    one(repository, NOTE, 'no record for 1 blocks', file='index')
    # The record is in a run, which a merge will move to the shard.
    run = format_writer.IndexFile(catalog, 'run', record(fingerprint, address))
    path = run.save()
    no_findings(repository)
    path.unlink()
    # The cursor is before the record: the index need not have it yet.
    catalog.cursors[1] = address & 32767
    catalog.records = [r for r in catalog.records if r[1] < address]
    catalog.save_index()
    no_findings(repository)


def second_of(repository, catalog, slot=3):
    second = format_writer.Group(repository, 2)
    second.append([test_catalog_check.noise(slot)])
    second.publish()
    second.save()
    catalog.cursors[2] = 1
    catalog.save_index()
    return 2 << 15


def test_duplicate_block(repository, catalog):
    """One of two equal blocks has no record; the pairs must name it."""
    other = second_of(repository, catalog)
    one(repository, NOTE, '1 blocks twice', file='index')
    pairs = format_writer.IndexFile(
        catalog, 'pairs', struct.pack('<QQ', other, 1 << 15 | 3))
    path = pairs.save()
    no_findings(repository)
    path.unlink()
    format_writer.IndexFile(catalog, 'pairs', struct.pack(
        '<QQ', other + 1, 1 << 15 | 3)).save()
    one(repository, NOTE, '1 blocks twice', file='index')
    # The indexer has not reached the second group yet.
    catalog.cursors[2] = 0
    catalog.save_index()
    no_findings(repository)


def test_duplicate_in_the_catalog(repository, catalog):
    other = second_of(repository, catalog)
    for file in (repository.path / 'catalog').iterdir():
        file.unlink()
    (repository.path / 'catalog').rmdir()
    catalog.more[struct.pack('>cI', b'p', 1)] = struct.pack(
        '<QQ', 1 << 15 | 3, other)
    catalog.save()
    no_findings(repository)


def test_weak_fingerprints(repository, catalog):
    """Equal weak fingerprints are no duplicates if blocks are compared."""
    second_of(repository, catalog)
    repository.parameters['verify'] = 'bytes'
    repository.save_parameters()
    no_findings(repository)


@pytest.mark.parametrize('head', [
    {'magic': b'GDINDEX1'}, {'kind': 2}, {'number': 2}, {'bits': 1},
    {'shard': 1}, {'items': 11}, {'items': 13}, {'items': (1 << 64) - 1}],
    ids=str)
def test_wrong_head(repository, catalog, head):
    catalog.save_index()
    file = format_writer.IndexFile(catalog, 'shard', catalog.shards()[0])
    file.head = head
    file.save()
    one(repository, DAMAGE, file=SHARD)


def test_other_catalog_and_newer_version(repository, catalog):
    catalog.save_index()
    for head, words in (({'catalog_id': bytes(16)}, 'another catalog'),
                        ({'major': 2}, 'version 2')):
        file = format_writer.IndexFile(catalog, 'shard', catalog.shards()[0])
        file.head = head
        file.save()
        one(repository, NOTE, words, file=SHARD)


def test_any_changed_byte(repository, catalog):
    catalog.save_index()
    path = repository.path / SHARD
    content = path.read_bytes()
    for at in [*range(0, 80, 5), 504, *range(512, len(content), 9)]:
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(changed)
        found, = checker.check(repository.path).findings
        assert found.file == SHARD
        assert found.severity == DAMAGE or at in (8, 9)
    for length in (0, 100, 512, len(content) - 1):
        path.write_bytes(content[:length])
        one(repository, DAMAGE, file=SHARD)
    path.write_bytes(content + b'\0')
    one(repository, DAMAGE, file=SHARD)


def save_shard(catalog, most):
    shard = format_writer.IndexFile(catalog, 'shard', catalog.shards()[0])
    shard.save(shard.packed(most))


@pytest.mark.parametrize('most', [1, 5, 4096])
def test_packed_frames(repository, catalog, most):
    catalog.save_index()
    save_shard(catalog, most)
    no_findings(repository)
    assert checker.check(repository.path).figures['index_records'] == 12
    catalog.records.pop(5)
    save_shard(catalog, most)
    one(repository, NOTE, 'no record for 1 blocks', file='index')


@pytest.mark.parametrize('head, words', [
    ({'items': 11}, '12 items instead of 11'),
    ({'items': 13}, '12 items instead of 13'),
    ({'length': 511}, 'bytes instead of 511'),
    ({'length': (1 << 64) - 1}, 'bytes instead of'),
    ({'kind': 2}, 'another name')], ids=str)
def test_wrong_head_of_packed_frames(repository, catalog, head, words):
    catalog.save_index()
    file = format_writer.IndexFile(catalog, 'shard', catalog.shards()[0])
    file.head = head
    file.save()
    one(repository, DAMAGE, words, file=SHARD)


RECORDS = record(b'\1' * 8, 1 << 15) + record(b'\2' * 8, 2 << 15)


@pytest.mark.parametrize('more, words', [
    ({'count': 0}, 'cannot be'), ({'count': 4097}, 'cannot be'),
    ({'key_bits': 65}, 'cannot be'), ({'address_bits': 41}, 'cannot be'),
    ({'count': 3}, 'cannot be'), ({'key': (1 << 64) - 1}, 'cannot be there'),
    ({'address_bits': 0}, 'cannot be there')], ids=str)
def test_packed_frames_that_cannot_be(repository, catalog, more, words):
    """Impossible fields are found under right checksums."""
    catalog.save_index()
    file = format_writer.IndexFile(catalog, 'shard', RECORDS)
    path = file.save()
    frame = format_writer.packed_frame(RECORDS, 77)
    content = path.read_bytes()
    assert content.endswith(frame)
    for key in ('key_bits', 'address_bits'):
        if key in more and more[key]:
            # Room for it.
            frame = format_writer.packed_frame(RECORDS, 77, padded=True)
    bad = bytearray(frame[:-8])
    facts = {'key': 1 << 56, 'count': 2, 'key_bits': bad[12],
             'address_bits': bad[13], **more}
    struct.pack_into('<QIBB', bad, 0, *facts.values())
    file.head = {'length': 512 + len(frame)}
    head = file.packed()[:512]
    path.write_bytes(head + bad + struct.pack('<Q', format_writer.xxh3(
        bytes(bad), 77)))
    one(repository, DAMAGE, words, file=SHARD)


@pytest.mark.parametrize('kind, items', [
    ('shard', record(b'\1' * 8, 1 << 15) + record(b'\1' * 8, 2 << 15)),
    ('shard', record(b'\2' * 8, 1 << 15) + record(b'\1' * 8, 1 << 15)),
    ('shard', record(b'\1' * 8, 32767)),
    ('run', record(b'\1' * 8, 2 << 15) + record(b'\1' * 8, 1 << 15)),
    ('gone', record(b'\1' * 8, 1 << 15) * 2),
    ('pairs', struct.pack('<QQ', 1 << 15, 1 << 15)),
    ('pairs', struct.pack('<QQ', 1, 1 << 15)),
    ('pairs', struct.pack('<QQ', 1 << 40, 1 << 15)),
    ('cursors', struct.pack('<II', 0, 1)),
    ('cursors', struct.pack('<II', 1 << 25, 1)),
    ('cursors', struct.pack('<II', 1, 32769)),
    ('cursors', struct.pack('<IIII', 2, 1, 1, 1))])
def test_items_that_cannot_be(repository, catalog, kind, items):
    catalog.save_index()
    path = format_writer.IndexFile(catalog, kind, items).save()
    found = findings(repository)
    assert [f.file for f in found] == [f'index/{path.name}']
    assert 'cannot be there' in found[0].sentence


def test_record_in_the_wrong_shard(repository, catalog):
    catalog.bits = 1
    catalog.save_index()
    format_writer.IndexFile(catalog, 'shard', catalog.shards()[1], 1, 0).save()
    assert 'cannot be there' in findings(repository)[0].sentence


def test_missing_shard(repository, catalog):
    catalog.bits = 1
    catalog.save_index()
    (repository.path / 'index/shard-01-0001.0000000000000001').unlink()
    one(repository, NOTE, 'does not cover', file='index')


def test_unknown_names(repository, catalog):
    catalog.save_index()
    for name in ('shard-11-0000.0000000000000001', 'other',
                 'shard-00-0001.0000000000000001'):
        repository.write(repository.path / 'index' / name, b'')
        one(repository, NOTE, 'unknown name', file=f'index/{name}')
        (repository.path / 'index' / name).unlink()
    # Files of a dead process have no effect.
    repository.write(repository.path / 'index'
                     / 'new-00-0000.0000000000000001', b'')
    no_findings(repository)


@pytest.mark.parametrize('shards, wanted, covers', [
    ({}, set(), False),
    ({(0, 0): 1}, {(0, 0)}, True),
    ({(0, 0): 1, (1, 0): 2}, {(0, 0)}, True),
    ({(0, 0): 3, (1, 0): 2, (1, 1): 4}, {(0, 0)}, True),
    ({(0, 0): 3, (1, 0): 3, (1, 1): 4}, {(1, 0), (1, 1)}, True),
    ({(1, 0): 3, (2, 3): 4}, {(1, 0), (2, 3)}, False),
    ({(0, 0): 3, (1, 0): 1, (2, 0): 5, (2, 1): 6, (1, 1): 7},
     {(2, 0), (2, 1), (1, 1)}, True)])
def test_which_shards_count(shards, wanted, covers):
    assert exact_index.resolve(shards) == (wanted, covers)


def test_sorting(monkeypatch):
    monkeypatch.setattr(sorting.Sorted, 'RUN', 100)
    monkeypatch.setattr(sorting.Sorted, 'PIECES', 100)
    rng = random.Random(3)
    items = [rng.randbytes(3) for _ in range(1234)]
    found = sorting.Sorted(3)
    for item in items:
        found.add(item)
    assert list(found.items()) == sorted(items)
    found.close()
    assert list(found.items()) == []
