# SPDX-License-Identifier: Apache-2.0

"""The checker accepts sound files, and reports some oddities as notes."""

import fcntl
import hashlib
import os
import struct
import tracemalloc

import pytest
import xxhash

from dedupd.compute.cache import cache_catalog
from dedupd.status import task_history
from glance_dedup.check import check_report
from glance_dedup.check import checker
from glance_dedup.check import space
from glance_dedup.transfer import progress_file
from tests.unit.check import fixtures
from tests.unit.check.fixtures import block
from tests.unit.check.fixtures import look
from tests.unit.check.fixtures import NOTE
from tests.unit.check.fixtures import one_damage
from tests.unit.check.fixtures import patch
from tests.unit.repository import format_writer

no_pause = fixtures.no_pause
repository = fixtures.repository
group = fixtures.group
image = fixtures.image


# Sound files

def test_clean(repository, group, image):
    repository.image('empty', [])
    repository.image('zeros', [('zeros', 1 << 40)], project='a project')
    report = checker.check(repository.path)
    assert report.findings == []
    assert report.ok
    assert report.damaged_images == []
    assert report.figures == {
        'images': 3, 'groups': 1,
        'logical_bytes': (1 << 40) + 1000 + 12 * 512 + 512 + 5,
        'zero_bytes': (1 << 40) + 1000,
        'referenced_bytes': 11 * 512 + 5,
        'stored_bytes': len(group.data) - 7,
        'garbage_bytes': 7,
        'metadata_bytes': 8192 + 4096 * (2 + 1 + 2),
        'duplicate_blocks': 0, 'copy_blocks': 0, 'blocks_verified': 12,
        'garbage_blocks': 0, 'freed_blocks': 0, 'damaged_blocks': 0,
        'cold_groups': 0, 'cold_bytes': 0, 'slice_bytes': 0,
        'backups': 0, 'volumes': 0, 'volumes_in_use': 0, 'journal_bytes': 0,
        'spares': 0, 'spare_bytes': 0, 'index_records': 0, 'index_stale': 0,
        'damage': 0, 'notes': 0, 'findings_left_off': 0}


def test_nothing_stored(repository):
    found, report = look(repository)
    assert not found
    assert report.figures['images'] == 0


def test_progress_rises_to_its_total(repository, group, image):
    told = []
    checker.check(repository.path, lambda *args: told.append(args))
    dones = [done for done, _, _ in told]
    assert dones == sorted(dones)
    assert told[-1][0] == told[-1][1] > 16384
    assert {what for _, _, what in told} >= {'images/one',
                                             'groups/00000001'}


def test_huge_files_take_no_memory(repository, group, image):
    for path, size in ((group.path, 1 << 40), (image, 1 << 40),
                       (repository.path / 'key', 1 << 40),
                       (repository.path / 'spool' / ('D-' + '0' * 32),
                        1 << 40),
                       (repository.path / 'repository.json', 1 << 40)):
        path.touch()
        os.truncate(path, size)
    tracemalloc.start()
    try:
        look(repository)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_findings_are_bounded(monkeypatch, repository):
    monkeypatch.setattr(check_report, 'MAX_FINDINGS', 5)
    for i in range(9):
        repository.write(repository.path / f'images/a b{i}', b'')
    repository.write(repository.path / 'images/bad', b'')
    report = checker.check(repository.path)
    assert len(report.findings) == 5
    assert report.figures['findings_left_off'] == 5
    assert not report.ok
    assert report.damaged_images == ['bad']


@pytest.mark.parametrize('name', [
    'sha256', 'sha512-256', 'blake2s256', 'sha3-256', 'sha512', 'sha3-224'])
def test_digests(tmp_path, name):
    def compute(data):
        return hashlib.new(name, data).digest()[:32].ljust(32, b'\0')

    repository = format_writer.Repository(tmp_path / 'r', fingerprint=name)
    group = format_writer.Group(repository, 1, compute=compute)
    group.append([block(1), block(2)], format_writer.LZ4)
    group.publish()
    group.save()
    repository.image('one', [(group, 0, 2)])
    found, report = look(repository)
    assert not found
    assert report.figures['blocks_verified'] == 2


def test_xxh3_128(tmp_path):
    def compute(data):
        number = xxhash.xxh3_128_intdigest(data)
        return number.to_bytes(16, 'big') + bytes(16)

    repository = format_writer.Repository(
        tmp_path / 'r', fingerprint='xxh3-128', verify='bytes')
    group = format_writer.Group(repository, 1, compute=compute)
    group.append([block(1), block(2)])
    group.publish()
    group.save()
    repository.image('one', [(group, 0, 2)])
    assert look(repository)[1].findings == []
    repository.parameters['verify'] = 'fingerprint'
    repository.save_parameters()
    assert 'verify' in one_damage(
        repository, 'repository.json').sentence


def test_many_extents_over_several_pages(repository, group):
    repository.image('many', [(group, i % 12, 1) for i in range(250)])
    found, report = look(repository)
    assert not found
    assert report.figures['logical_bytes'] == sum(
        len(group.blocks[i % 12]) for i in range(250))


def test_duplicates_are_counted(repository, monkeypatch):
    monkeypatch.setattr(space.Duplicates, 'RUN', 4)
    monkeypatch.setattr(space.Duplicates, 'PIECE', 16)
    for number in (1, 2, 3):
        group = format_writer.Group(repository, number)
        group.append([block(i) for i in range(number * 3)])
        group.publish()
        group.save()
    assert look(repository)[1].figures['duplicate_blocks'] == 3 + 6


def test_void_and_freed_slots(repository):
    group = format_writer.Group(repository, 1)
    group.append([block(i) for i in range(5)], format_writer.LZ4,
                 states={0: format_writer.FREED, 3: format_writer.FREED})
    group.entry(5, state=format_writer.VOID)
    group.next = 6
    group.append([block(6)])
    group.publish()
    group.save()
    repository.image('one', [(group, 1, 2), (group, 4, 1), (group, 6, 1)])
    found, report = look(repository)
    assert not found
    assert report.figures['blocks_verified'] == 4


# Legal files that deserve a note

def test_tail_that_does_not_verify_is_a_note(repository, group, image):
    group.append([block(20), block(21)])
    group.entries[12] = group.entries[12][:-1] + b'!'
    group.data = group.data[:-1] + b'!'
    group.save()
    found, report = look(repository, NOTE)
    assert report.ok
    assert [f.file for f in found] == 2 * ['groups/00000001']
    assert 'slot 12' in found[0].sentence
    assert 'slot 13' in found[1].sentence


def test_tail_that_a_recipe_names_is_damage(repository, group, image):
    group.append([block(20), block(21)])
    repository.image('two', [(group, 12, 1)])
    repository.image('three', [(group, 13, 1)])
    group.save()
    assert look(repository)[1].findings == []
    group.entries[12] = group.entries[12][:-1] + b'!'
    group.save()
    one_damage(repository, 'groups/00000001', 'two')


def test_poisoned_group_is_a_note(repository, group, image):
    group.publish(flags=1)
    group.save()
    found, report = look(repository, NOTE)
    assert report.ok
    assert 'poisoned' in found[0].sentence


@pytest.mark.parametrize('lost', [False, True])
@pytest.mark.parametrize('name', ['images/one', 'groups/00000001'])
def test_n14_2_second_names(repository, group, image, name, lost):
    """A file that is being replaced is found by either name."""
    path = repository.path / name
    os.link(path, f'{path}~')
    if lost:
        path.unlink()
    assert not checker.check(repository.path).findings


def test_unknown_names_and_modes_are_notes(repository, group, image):
    for name in ('groups/1', 'groups/0000000G', 'groups/00000000',
                 'groups/02000000', 'images/a b', 'images/' + 'x' * 129,
                 'images/\udcff', 'images/a\nb', 'spool/T-1', 'locks/other',
                 'other', '.0123456789abcdef.new'):
        repository.write(repository.path / name, b'')
    for name in ('.', 'groups', 'images/one', 'groups/00000001', 'key',
                 'repository.json', 'locks/images'):
        (repository.path / name).chmod(0o755)
    found, report = look(repository, NOTE)
    assert report.ok
    names = [f.file for f in found if 'name' in f.sentence]
    assert len(names) == 12
    assert 'images/\\udcff' in names
    assert 'images/a\\nb' in names
    assert {f.file for f in found if '0755' in f.sentence} == {
        '.', 'groups', 'images/one', 'groups/00000001', 'key',
        'repository.json', 'locks/images'}


@pytest.mark.parametrize('name, module', [
    ('cache.json', cache_catalog), ('replication.json', progress_file),
    ('tasks.json', task_history)])
def test_lists_of_images(repository, group, image, name, module):
    """A damaged list of images is only a note."""
    file = repository.path / name
    good = module.encode([] if module is progress_file else {})
    for content in (b'', good):
        repository.write(file, content)
        repository.write(repository.path / f'{name}.new', b'half')
        found, report = look(repository, NOTE)
        assert report.ok and not found
    file.chmod(0o644)
    found, _ = look(repository, NOTE)
    assert [f.file for f in found] == [name] and '0644' in found[0].sentence
    file.unlink()
    for bad in (good[:-3], good.replace(b'"version": 1', b'"version": 2'),
                good.replace(b'[]', b'{}'), good.replace(b'glance', b'glence'),
                b'[' * 100000, b'9' * 5000, b'\xff', bytes(9 << 20)):
        repository.write(file, bad)
        found, report = look(repository, NOTE)
        assert report.ok and [f.file for f in found] == [name], bad[:99]
    file.unlink()
    for make in (file.mkdir, lambda: (file.rmdir(), os.mkfifo(file)),
                 lambda: (file.unlink(), file.symlink_to('/dev/zero'))):
        make()
        found, report = look(repository, NOTE)
        assert report.ok and [f.file for f in found] == [name]


def test_quarantine_and_lock_content_are_notes(repository):
    repository.write(repository.path / 'quarantine/x', b'')
    repository.write(repository.path / 'locks/groups', b'x')
    found, report = look(repository, NOTE)
    assert report.ok
    assert {f.file for f in found} == {'quarantine', 'locks/groups'}


def test_dead_spool_entries_are_notes(repository, group, image):
    spool = repository.path / 'spool'
    recipe = repository.recipe('two', [(group, 0, 1)])
    transaction = format_writer.some_id('upload of two').hex()
    repository.write(spool / ('T-' + '0' * 32), b'')
    repository.write(spool / ('T-' + '1' * 32), bytes(8192))
    repository.write(spool / ('T-' + transaction), recipe)
    repository.write(spool / ('T-' + '2' * 32), recipe)
    repository.write(spool / ('G-' + '3' * 32), b'')
    repository.write(spool / ('T-' + '4' * 32), recipe[:-1])
    found, report = look(repository, NOTE)
    assert report.ok
    assert len(found) == 6


def test_spool_in_use(repository, group, image):
    """A spool file that a writer has locked is not reported as garbage."""
    path = repository.path / 'spool' / ('T-' + '0' * 32)
    repository.write(path, b'')
    with open(path, 'rb') as f:
        fcntl.fcntl(f, fcntl.F_OFD_SETLK, struct.pack(
            '@hhqqi4x', fcntl.F_RDLCK, 0, 0, 1, 0))
        assert look(repository)[1].findings == []
    assert len(look(repository, NOTE)[0]) == 1


def test_committed_and_deleted_images_in_the_spool(repository, group, image):
    spool = repository.path / 'spool'
    os.link(image,
            spool / ('T-' + format_writer.some_id('upload of one').hex()))
    recipe = repository.recipe('two', [(group, 0, 12)])
    deleted = spool / ('D-' + '1' * 32)
    repository.write(deleted, recipe)
    os.link(deleted,
            spool / ('T-' + format_writer.some_id('upload of two').hex()))
    assert look(repository)[1].findings == []
    patch(deleted, 4096 + 20, b'!')
    one_damage(repository, f'spool/{deleted.name}')
