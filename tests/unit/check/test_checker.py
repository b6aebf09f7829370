# SPDX-License-Identifier: Apache-2.0

"""The checker, against repositories that `format_writer` wrote."""

import fcntl
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import tracemalloc

import pytest
import xxhash
import zstandard

from dedupd.cache import index
from dedupd import history
from glance_dedup.base import exceptions
from glance_dedup.check import checker
from glance_dedup.check import format
from glance_dedup.repository import repository as repository_module
from glance_dedup.transfer import journal
from tests.support import repositories
from tests.unit.repository import format_writer as writer

DAMAGE, NOTE = checker.DAMAGE, checker.NOTE


def block(number, size=512):
    return (b'block %d. ' % number * size)[:size]


def noise(number, size=512):
    """Bytes that do not compress; the same for the same number."""
    return b''.join(writer.sha256(b'%d %d' % (number, i))
                    for i in range(size // 32))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(checker, 'PAUSE', 0)


@pytest.fixture
def repository(tmp_path):
    return writer.Repository(tmp_path / 'repository')


@pytest.fixture
def group(repository):
    """A group with a segment of each codec and garbage between two."""
    group = writer.Group(repository, 1)
    group.append([noise(i) for i in range(3)])
    group.publish()
    group.append([block(i) for i in range(4)], writer.LZ4)
    group.garbage(b'garbage')
    group.append([block(i) for i in range(4, 8)] + [b'short'], writer.ZSTD)
    group.publish()
    group.save()
    return group


@pytest.fixture
def image(repository, group):
    return repository.image(
        'one', [(group, 0, 5), ('zeros', 1000), (group, 3, 9)])


def look(repository, severity=DAMAGE):
    """The findings of this severity, and the report."""
    report = checker.check(repository.path)
    assert report.ok == (not any(
        f.severity == DAMAGE for f in report.findings))
    return [f for f in report.findings if f.severity == severity], report


def one_damage(repository, file, *images):
    """Assert that there is damage, all in one file; return the first."""
    found, report = look(repository)
    assert found, 'no damage was found'
    assert {f.file for f in found} == {file}
    assert sorted({i for f in found for i in f.images}) == sorted(images)
    assert report.damaged_images == sorted(images)
    return found[0]


def patch(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset:offset + len(data)] = data
    path.write_bytes(content)


# What is right


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
        'duplicate_blocks': 0, 'blocks_verified': 12,
        'garbage_blocks': 0, 'freed_blocks': 0, 'damaged_blocks': 0,
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


@pytest.mark.parametrize('name', [
    'sha256', 'sha512-256', 'blake2s256', 'sha3-256', 'sha512', 'sha3-224'])
def test_digests(tmp_path, name):
    def compute(data):
        return hashlib.new(name, data).digest()[:32].ljust(32, b'\0')

    repository = writer.Repository(tmp_path / 'r', fingerprint=name)
    group = writer.Group(repository, 1, compute=compute)
    group.append([block(1), block(2)], writer.LZ4)
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

    repository = writer.Repository(
        tmp_path / 'r', fingerprint='xxh3-128', compare='value')
    group = writer.Group(repository, 1, compute=compute)
    group.append([block(1), block(2)])
    group.publish()
    group.save()
    repository.image('one', [(group, 0, 2)])
    assert look(repository)[1].findings == []
    repository.parameters['compare'] = 'hash'
    repository.save_parameters()
    assert 'compare' in one_damage(
        repository, 'repository.json').sentence


def test_many_extents_over_several_pages(repository, group):
    repository.image('many', [(group, i % 12, 1) for i in range(250)])
    found, report = look(repository)
    assert not found
    assert report.figures['logical_bytes'] == sum(
        len(group.blocks[i % 12]) for i in range(250))


def test_duplicates_are_counted(repository, monkeypatch):
    monkeypatch.setattr(checker._Duplicates, 'RUN', 4)
    monkeypatch.setattr(checker._Duplicates, 'PIECE', 16)
    for number in (1, 2, 3):
        group = writer.Group(repository, number)
        group.append([block(i) for i in range(number * 3)])
        group.publish()
        group.save()
    assert look(repository)[1].figures['duplicate_blocks'] == 3 + 6


def test_void_and_freed_slots(repository):
    group = writer.Group(repository, 1)
    group.append([block(i) for i in range(5)], writer.LZ4,
                 states={0: writer.FREED, 3: writer.FREED})
    group.entry(5, state=writer.VOID)
    group.next = 6
    group.append([block(6)])
    group.publish()
    group.save()
    repository.image('one', [(group, 1, 2), (group, 4, 1), (group, 6, 1)])
    found, report = look(repository)
    assert not found
    assert report.figures['blocks_verified'] == 4


# What is legal, but worth a note


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
    ('cache.json', index), ('replication.json', journal),
    ('tasks.json', history)])
def test_lists_of_images(repository, group, image, name, module):
    """A bad one is a note: no image is worse for it."""
    file = repository.path / name
    good = module.encode([] if module is journal else {})
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
    transaction = writer.some_id('upload of two').hex()
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
    """What a writer holds locked is nobody's garbage."""
    path = repository.path / 'spool' / ('T-' + '0' * 32)
    repository.write(path, b'')
    with open(path, 'rb') as f:
        fcntl.fcntl(f, fcntl.F_OFD_SETLK, struct.pack(
            '@hhqqi4x', fcntl.F_RDLCK, 0, 0, 1, 0))
        assert look(repository)[1].findings == []
    assert len(look(repository, NOTE)[0]) == 1


def test_committed_and_deleted_images_in_the_spool(repository, group, image):
    spool = repository.path / 'spool'
    os.link(image, spool / ('T-' + writer.some_id('upload of one').hex()))
    recipe = repository.recipe('two', [(group, 0, 12)])
    deleted = spool / ('D-' + '1' * 32)
    repository.write(deleted, recipe)
    os.link(deleted,
            spool / ('T-' + writer.some_id('upload of two').hex()))
    assert look(repository)[1].findings == []
    patch(deleted, 4096 + 20, b'!')
    one_damage(repository, f'spool/{deleted.name}')


# Every byte


def flips(path):
    """The file with each byte changed, one after the other."""
    content = path.read_bytes()
    with open(path, 'r+b', buffering=0) as f:
        for offset, value in enumerate(content):
            # Every bit of a byte position has its turn in some byte.
            changed = value ^ (1 << offset % 8)
            os.pwrite(f.fileno(), bytes([changed]), offset)
            yield offset, value, changed
            os.pwrite(f.fileno(), bytes([value]), offset)


def damaged_offsets(repository, path, file, images, part=slice(None)):
    """Flip each byte; return the offsets of those not called damage.

    :param part: of all offsets, those to try
    """
    ignored = set()
    tried = range(path.stat().st_size)[part]
    for offset, _, _ in flips(path):
        if offset not in tried:
            continue
        report = checker.check(repository.path)
        if report.ok:
            ignored.add(offset)
        else:
            found = [f for f in report.findings if f.severity == DAMAGE]
            assert {f.file for f in found} == {file}, (offset, found)
            assert set(report.damaged_images) <= images, offset
    assert checker.check(repository.path).ok
    return ignored


@pytest.mark.parametrize('part', range(4))
def test_every_byte_of_a_group(repository, group, image, part):
    part = slice(part, None, 4)
    ignored = damaged_offsets(
        repository, group.path, 'groups/00000001', {'one'}, part)
    # Entries never used, and what lies behind the last of them: a note.
    unused = set()
    for slot in range(12, 72):
        at = 4096 + 512 * (slot // 9) + 56 * (slot % 9)
        unused.update(range(at, at + 56))
    garbage = group.content().index(b'garbage')
    unused.update(range(garbage, garbage + 7))
    assert ignored == unused.intersection(
        range(group.path.stat().st_size)[part])


@pytest.mark.parametrize('state', [
    writer.VOID, writer.FREED, writer.DAMAGED])
@pytest.mark.parametrize('codec', [writer.NONE, writer.LZ4])
def test_segment_of_which_not_all_lives(repository, state, codec):
    """What is no more may have lost its bytes; nobody needs them."""
    group = writer.Group(repository, 1)
    group.append([block(i) for i in range(4)], codec)
    group.append([block(i) for i in range(4, 8)], codec)
    fields = bytearray(group.entries[2][:52])
    fields[51] = fields[51] & 0x1f | state << 5
    group.entry(2, bytes(fields), state=state)
    group.publish()
    path = group.save()
    repository.image('one', [(group, 0, 2), (group, 3, 5)])
    assert look(repository)[1].findings == []
    at = group.data_start
    if codec == writer.NONE:
        patch(path, at + 32 + 2 * 512 + 7, b'!')
        note, = look(repository, NOTE)[0]
        assert not look(repository)[0]
        assert 'some of its blocks' in note.sentence
        group.save()
    # Every byte of the header is looked at all the same.
    content = path.read_bytes()
    for offset in range(32):
        patch(path, at + offset, bytes([content[at + offset] ^ 1]))
        report = checker.check(repository.path)
        assert [f.offset for f in report.findings] == [at], offset
        assert report.ok == (not report.damaged_images)
        path.write_bytes(content)
    # Where all live, what has changed was needed, or the header's.
    second = content.index(b'GDSG', at + 1)
    patch(path, second + 24, bytes([content[second + 24] ^ 1]))
    assert 'checksum' in one_damage(repository, 'groups/00000001').sentence


def test_every_byte_behind_a_fingerprint_store(tmp_path):
    """Slots that leave a gap before the segments: bytes of no meaning."""
    repository = writer.Repository(tmp_path / 'r', group_slots=80)
    group = writer.Group(repository, 1)
    group.append([block(0)])
    group.publish()
    path = group.save()
    end = 4096 + 512 * 9
    assert group.data_start == 12288
    for offset in (end, group.data_start - 1):
        patch(path, offset, b'!')
        found, report = look(repository, NOTE)
        assert report.ok
        assert found[0].offset == offset
        patch(path, offset, b'\0')


@pytest.mark.parametrize('pieces', ['blocks', 'zeros', 'nothing'])
def test_every_byte_of_a_recipe(repository, group, pieces):
    path = repository.image('one', {
        'blocks': [(group, i, 1) for i in range(12)] + [('zeros', 3)],
        'zeros': [('zeros', 1 << 30)],
        'nothing': []}[pieces], project='p')
    assert damaged_offsets(repository, path, 'images/one', {'one'}) == set()


def test_every_byte_of_a_deleted_recipe(repository, group):
    path = repository.path / 'spool' / ('D-' + '0' * 32)
    repository.write(path, repository.recipe('one', [(group, 0, 12)]))
    assert damaged_offsets(repository, path, f'spool/{path.name}',
                           set()) == set()


def test_every_byte_of_the_parameters(repository, group, image):
    path = repository.path / 'repository.json'
    assert damaged_offsets(
        repository, path, 'repository.json', set()) == set()


def test_every_byte_of_the_key(repository):
    path = repository.path / 'key'
    for _ in flips(path):
        assert not checker.check(repository.path).ok


@pytest.mark.parametrize('part', range(4))
@pytest.mark.parametrize('which', ['group', 'image'])
def test_every_truncation(repository, group, image, which, part):
    path = {'group': group.path, 'image': image}[which]
    content = path.read_bytes()
    for size in range(len(content) - 1 - part, -1, -4):
        os.truncate(path, size)
        one_damage(repository, str(path.relative_to(repository.path)),
                   'one')
    path.write_bytes(content + b'!')
    assert look(repository)[1].ok == (which == 'group')


def test_zeroed_sectors(repository, group, image):
    for path in (group.path, image):
        content = path.read_bytes()
        for offset in range(0, len(content), 512):
            if (path, offset) == (group.path, 512):
                continue        # as if it had been published only once
            if any(content[offset:offset + 512]):
                patch(path, offset, bytes(len(content[offset:][:512])))
                one_damage(repository,
                           str(path.relative_to(repository.path)),
                           *checker.check(repository.path).damaged_images)
                path.write_bytes(content)


# What is whole, but in the wrong place


def test_swapped_groups(repository, group, image):
    other = writer.Group(repository, 2)
    other.append([block(30)])
    other.publish()
    other.save()
    repository.image('two', [(other, 0, 1)])
    first, second = group.path.read_bytes(), other.path.read_bytes()
    group.path.write_bytes(second)
    other.path.write_bytes(first)
    found, report = look(repository)
    assert {(f.file, f.images) for f in found} == {
        ('groups/00000001', ('one',)), ('groups/00000002', ('two',))}


def test_swapped_recipes(repository, group, image):
    other = repository.image('two', [(group, 0, 1)])
    first, second = image.read_bytes(), other.read_bytes()
    image.write_bytes(second)
    other.write_bytes(first)
    found, report = look(repository)
    assert {f.file for f in found} == {'images/one', 'images/two'}
    assert report.damaged_images == ['one', 'two']


def test_swapped_extent_pages(repository, group):
    path = repository.image('many', [(group, 0, 1)] * 204)
    content = path.read_bytes()
    path.write_bytes(content[:4096] + content[8192:] + content[4096:8192])
    one_damage(repository, 'images/many', 'many')


def test_extent_page_of_another_recipe(repository, group, image):
    other = repository.image(
        'two', [(group, 0, 5), ('zeros', 1000), (group, 3, 9)])
    patch(other, 4096, image.read_bytes()[4096:])
    one_damage(repository, 'images/two', 'two')


def test_older_copy_of_a_group(repository, group, image):
    older = group.content()
    group.append([block(30)])
    group.publish()
    group.save()
    repository.image('two', [(group, 0, 1), (group, 12, 1)])
    assert look(repository)[1].ok
    group.path.write_bytes(older)
    finding = one_damage(repository, 'images/two', 'two')
    assert finding.offset == 4096 + 8 + 40
    assert 'slot 12 is empty' in finding.sentence


def test_another_history_of_a_group(repository, group, image):
    """The same addresses hold other blocks, and all of it verifies."""
    other = writer.Group(repository, 1)
    other.append([noise(i) for i in range(100, 111)] + [b'other'])
    other.publish()
    other.save()
    finding = one_damage(repository, 'images/one', 'one')
    assert finding.offset == 4096 + 8
    assert 'not the blocks' in finding.sentence


def test_older_copy_of_a_record(repository, group, image):
    """A record is lost: told, but nothing depends on it."""
    patch(group.path, 1024, bytes(512))
    assert one_damage(
        repository, 'groups/00000001').sentence == (
            'published record 1 is lost')


def test_swapped_records(repository, group, image):
    content = group.path.read_bytes()
    patch(group.path, 512, content[1024:1536] + content[512:1024])
    one_damage(repository, 'groups/00000001')


def test_files_of_another_repository(tmp_path, repository, group, image):
    other = writer.Repository(tmp_path / 'other', name='other')
    shutil.copy(group.path, other.path / 'groups')
    shutil.copy(image, other.path / 'images')
    found, _ = look(other)
    assert {f.file for f in found} == {'images/one', 'groups/00000001'}
    assert all(repository.repository_id.hex() in f.sentence for f in found)


# What is missing


def test_missing_group(repository, group, image):
    group.path.unlink()
    finding = one_damage(repository, 'groups/00000001', 'one')
    assert finding.sentence == 'is missing'


@pytest.mark.parametrize('name', ['groups', 'images', 'spool'])
def test_missing_directory(repository, group, image, name):
    shutil.rmtree(repository.path / name)
    found, report = look(repository)
    assert found[0].file == name
    assert report.damaged_images == (['one'] if name == 'groups' else [])


def test_missing_parameters_and_key(repository, group, image):
    (repository.path / 'repository.json').unlink()
    (repository.path / 'key').unlink()
    found, report = look(repository)
    assert [f.file for f in found] == ['repository.json', 'key']
    assert report.figures['blocks_verified'] == 12


#: The calls of a creation that change something.
CHANGING = ('mkdir', 'open', 'fchmod', 'chmod', 'chown', 'fsync', 'link',
            'unlink')


def create_until(path, count):
    """Create a repository; die before the call of this number."""
    left = [count]

    def counted(call):
        def wrapper(*arguments, **keywords):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return call(*arguments, **keywords)
        return wrapper
    for name in CHANGING:
        setattr(os, name, counted(getattr(os, name)))
    repository_module.Repository.create(path)


def test_creation_is_killed_anywhere(tmp_path):
    """What it leaves is a note, or no repository; and can be completed."""
    unfinished = 0
    for count in range(1000):
        path = tmp_path / str(count)
        path.mkdir(0o700)
        try:
            repositories.in_child(lambda: create_until(path, count))
            ended = True
        except repositories.ChildFailed:
            ended = False
        try:
            report = checker.check(path)
        except exceptions.InvalidParameter as e:
            assert 'not a repository' in str(e) and not os.listdir(path)
        else:
            assert report.ok, (count, report.findings)
            if not (path / 'repository.json').exists():
                unfinished += 1
                assert [f.file for f in report.findings] == [
                    'repository.json']
                assert 'create completes it' in report.findings[0].sentence
        if ended:
            break
        if not (path / 'repository.json').exists():
            repository_module.Repository.create(path)
        with repositories.open_repository(path) as repo:
            repositories.put(repo, 'one', noise(1))
        assert checker.check(path).ok
    assert unfinished > 20 and ended


def test_what_no_creation_leaves(repository, group):
    """A repository that has lost its description is damaged."""
    (repository.path / 'repository.json').unlink()
    group.path.rename(repository.path / 'spool' / ('G-' + 32 * '0'))
    assert not checker.check(repository.path).ok
    (repository.path / 'spool' / ('G-' + 32 * '0')).unlink()
    assert checker.check(repository.path).ok
    (repository.path / 'catalog').mkdir()
    assert not checker.check(repository.path).ok


@pytest.mark.parametrize('directory', ['groups', 'images'])
@pytest.mark.parametrize('kind', ['symlink', 'fifo', 'directory'])
def test_not_a_regular_file(repository, group, image, directory, kind):
    path = group.path if directory == 'groups' else image
    content = repository.path.parent / 'content'
    path.rename(content)
    if kind == 'symlink':
        path.symlink_to(content)
    elif kind == 'fifo':
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(0o700)
    one_damage(repository, str(path.relative_to(repository.path)), 'one')


# What no writer writes: each structure is sealed by its checksums


RECIPES = {
    'magic': {'magic': b'GDRECIPF'},
    'version': {'major': 2},
    'flags': {'flags': 1},
    'another repository': {'repository_id': writer.some_id('x')},
    'size': {'size': 1023},
    'huge size': {'size': 2**64 - 1},
    'zero bytes': {'zero_bytes': 1},
    'extents': {'extents': 3},
    'huge extents': {'extents': 2**64 - 1},
    'no extents': {'extents': 0},
    'another image': {'image_id': b'two'},
    'id too short': {'id_length': 2},
    'id too long': {'id_length': 65535},
    'no id': {'id_length': 0},
    'project': {'project_length': 65535},
    'rest of project': {'project': b'x'},
}


@pytest.mark.parametrize('change', RECIPES.values(), ids=RECIPES)
def test_recipe_header(repository, group, change):
    repository.image('one', [(group, 0, 2)], header=change)
    one_damage(repository, 'images/one', 'one')


def test_fragments(repository, group):
    """They are for people; zeros between do not count."""
    pieces = [(group, 0, 2), ('zeros', 9), (group, 2, 1), (group, 4, 1)]
    path = repository.image('one', pieces)
    assert struct.unpack_from('<Q', path.read_bytes(), 120) == (2,)
    assert look(repository)[1].findings == []
    repository.image('one', pieces, header={'fragments': 3})
    found, report = look(repository, NOTE)
    assert report.ok
    assert found[0].offset == 120


EXTENTS = {
    'gap': {'offset': 1},
    'no length': {'length': 0},
    'another length': {'length': 1025},
    'huge length': {'length': 2**64 - 1},
    'too long for its blocks': {'length': 2 * 65536 + 1},
    'no group': {'group': 0},
    'huge group': {'group': 2**32 - 1},
    'unknown group': {'group': 2},
    'slot': {'slot': 1},
    'huge slot': {'slot': 2**32 - 1},
    'beyond the group': {'slot': 63},
    'empty slots': {'slot': 40},
    'no blocks': {'blocks': 0},
    'more blocks': {'blocks': 3},
    'huge blocks': {'blocks': 2**32 - 1},
    'kind': {'kind': 2},
    'zeros with an address': {'kind': 0},
    'reserved': {'reserved': b'\0\1\0'},
    'digest': {'digest': 1},
}


@pytest.mark.parametrize('change', EXTENTS.values(), ids=EXTENTS)
def test_extent(repository, group, change):
    extent = {'length': 1024, 'group': 1, 'slot': 0, 'blocks': 2, 'kind': 1,
              'digest': writer.xxh3(
                  group.fingerprint(0) + group.fingerprint(1))}
    repository.image('one', [extent])
    assert look(repository)[1].ok
    size = change.get('length', 1024) + change.get('offset', 0)
    repository.image('one', [{**extent, **change}],
                     header={'size': min(size, 2**64 - 1)})
    found, report = look(repository)
    assert found
    assert report.damaged_images == ['one']
    assert {f.file for f in found} <= {'images/one', 'groups/00000002'}


@pytest.mark.parametrize('place, data', [
    (0, struct.pack('<I', 2)), (4, struct.pack('<I', 0)),
    (4, struct.pack('<I', 3)), (4, struct.pack('<I', 2**32 - 1)),
    (4087, b'!')])
def test_page(repository, group, place, data):
    path = repository.image('one', [(group, 0, 1), (group, 1, 1)])
    patch(path, 4096 + place, data)
    page = path.read_bytes()[4096:8184]
    seed = int.from_bytes(writer.some_id('upload of one')[:8], 'little')
    patch(path, 8184, struct.pack('<Q', writer.xxh3(page, seed)))
    one_damage(repository, 'images/one', 'one')


def sealed_group(repository, **change):
    """A group whose header is sealed, but has these bytes changed."""
    group = writer.Group(repository, 1)
    header = bytearray(group.header[:504])
    for offset, data in change.items():
        offset = int(offset[1:])
        header[offset:offset + len(data)] = data
    group.seed = writer.xxh3(bytes(header))
    group.header = bytes(header) + struct.pack('<Q', group.seed)
    group.append([block(0)])
    group.publish()
    group.save()
    repository.image('one', [(group, 0, 1)])


@pytest.mark.parametrize('change', [
    {'_0': b'X'}, {'_8': b'\2'}, {'_12': b'\2'}, {'_16': b'\0\0'},
    {'_48': struct.pack('<I', 63)}, {'_48': struct.pack('<I', 32769)},
    {'_48': struct.pack('<I', 2**32 - 1)}, {'_52': struct.pack('<I', 0)},
    {'_52': struct.pack('<I', 2**32 - 1)}, {'_56': b'none\0\0\0'},
    {'_56': b'shake_128'}, {'_56': b'\xff\xfe'}, {'_56': bytes(16)},
    {'_56': b'md5\0\0\0\0'}, {'_56': b'sha1\0six'}], ids=str)
def test_group_header(repository, change):
    sealed_group(repository, **change)
    one_damage(repository, 'groups/00000001', 'one')


def test_group_header_of_a_later_minor_version(repository):
    sealed_group(repository, _10=b'\2', _72=b'\1')
    assert look(repository)[1].ok


def entry_fields(group, slot, **change):
    """The entry's fields, sealed again with some of them changed."""
    fingerprint, checksum, offset, place = struct.unpack(
        '<32sQIQ', group.entries[slot][:52])
    fields = {'at': place & 0xfffff, 'length': place >> 20 & 0x1ffff,
              'stored': place >> 37 & 0x1fffff, 'codec': place >> 58 & 7,
              'state': place >> 61, 'offset': offset, 'checksum': checksum,
              'fingerprint': fingerprint, **change}
    group.entry(slot, struct.pack(
        '<32sQIQ', fields['fingerprint'], fields['checksum'],
        fields['offset'],
        fields['at'] | fields['length'] << 20 | fields['stored'] << 37
        | fields['codec'] << 58 | fields['state'] << 61))


ENTRIES = {
    'no state': {'state': 0},
    'unknown state': {'state': 7},
    'void with fields': {'state': 2},
    'freed with fields': {'state': 3},
    'no length': {'length': 0},
    'another length': {'length': 511},
    'too long': {'length': 513},
    'longest': {'length': 0x1ffff},
    'segment in the header': {'offset': 100},
    'segment behind the file': {'offset': 2**32 - 1},
    'no segment there': {'offset': 8193},
    'another place': {'at': 0},
    'place beyond': {'at': 0xfffff},
    'stored': {'stored': 1},
    'stored huge': {'stored': 0x1fffff},
    'codec': {'codec': 2},
    'unknown codec': {'codec': 7},
    'checksum': {'checksum': 1},
    'fingerprint': {'fingerprint': bytes(32)},
}


@pytest.mark.parametrize('change', ENTRIES.values(), ids=ENTRIES)
def test_entry(repository, group, image, change):
    entry_fields(group, 4, **change)
    group.save()
    found, report = look(repository)
    assert found
    assert report.damaged_images == ['one']
    # It is one block's matter, except where it spoils its segment's order.
    repository.image('two', [(group, 0, 1)])
    assert 'two' not in look(repository)[1].damaged_images


def test_wrong_fingerprint(repository):
    """All checksums agree, and the recipe's digest; only it does not."""
    group = writer.Group(repository, 1)
    group.append([block(0), block(1)], fingerprints=[
        writer.sha256(block(0)), writer.sha256(block(2))])
    group.publish()
    group.save()
    repository.image('one', [(group, 0, 1)])
    repository.image('two', [(group, 0, 2)])
    finding = one_damage(repository, 'groups/00000001', 'two')
    assert 'slot 1: its bytes do not have its fingerprint' in (
        finding.sentence)


def test_block_marked_as_damaged(repository, group, image):
    entry_fields(group, 4, state=writer.DAMAGED)
    group.save()
    finding = one_damage(repository, 'images/one', 'one')
    assert 'slot 4 is marked as damaged' in finding.sentence


def test_entries_moved_to_other_slots(repository, group, image):
    group.entries[1], group.entries[2] = group.entries[2], group.entries[1]
    group.save()
    one_damage(repository, 'groups/00000001', 'one')


def test_blocks_moved_inside_a_segment(repository, group, image):
    """Two entries of a segment change places, sealed for their slots."""
    for slot, other in ((1, 2), (2, 1)):
        group.entry(slot, struct.pack(
            '<32sQIQ', writer.sha256(noise(other)),
            writer.xxh3(noise(other)), group.data_start,
            other * 512 | 512 << 20 | 1536 << 37 | 1 << 61))
    group.save()
    one_damage(repository, 'groups/00000001', 'one')


def damaged_segment(repository, **arguments):
    group = writer.Group(repository, 1)
    group.append([block(0), block(1)], **arguments)
    group.publish()
    group.save()
    repository.image('one', [(group, 0, 2)])
    return one_damage(repository, 'groups/00000001', 'one')


def test_segments_that_do_not_decode(repository):
    plain = block(0) + block(1)
    frame = zstandard.ZstdCompressor(write_content_size=False)
    without_size = frame.compress(plain)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    unsized_bomb = frame.compress(bytes(1 << 24))
    for codec, stored, sentence in (
            (writer.LZ4, b'\xff' * 100, 'do not decode'),
            (writer.LZ4, b'\x10x', 'decodes to 1 bytes'),
            (writer.ZSTD, b'nonsense', 'do not decode'),
            (writer.ZSTD, b'', 'do not decode'),
            (writer.ZSTD, without_size[:-1], 'do not decode'),
            (writer.ZSTD, without_size + b'x', 'do not decode'),
            (writer.ZSTD, bomb[:1000], 'decodes to 1073741824 bytes'),
            (writer.ZSTD, unsized_bomb, 'do')):
        finding = damaged_segment(repository, codec=codec, stored=stored)
        assert sentence in finding.sentence, stored
    group = writer.Group(repository, 1)
    group.append([block(0), block(1)], writer.ZSTD, stored=without_size)
    group.publish()
    group.save()
    assert look(repository)[1].ok


@pytest.mark.parametrize('offset, data', [
    (0, b'X'), (4, b'\1'), (6, b'\1\0'), (6, b'\3\0'), (6, b'\0\0'),
    (6, b'\xff\xff'), (8, b'\1'), (8, b'\xff\xff\xff\xff'), (12, b'\1'),
    (12, b'\xff\xff\xff\xff'), (16, b'\1'), (16, b'\xff\xff\xff\xff')])
def test_segment_header(repository, offset, data):
    group = writer.Group(repository, 1)
    group.append([block(0), block(1)])
    group.publish()
    content = bytearray(group.data)
    content[offset:offset + len(data)] = data
    content[24:32] = struct.pack('<Q', writer.xxh3(
        bytes(content[:24] + content[32:]), group.seed))
    group.data = bytes(content)
    group.save()
    repository.image('one', [(group, 0, 2)])
    one_damage(repository, 'groups/00000001', 'one')


@pytest.mark.parametrize('change', [
    {'count': 65}, {'count': 2**32 - 1}, {'end': 2**63}, {'count': 13}],
    ids=str)
def test_record(repository, group, image, change):
    group.publish(**change)
    group.save()
    one_damage(repository, 'groups/00000001')


def test_images_hit_are_those_that_name_the_block(repository, group, image):
    repository.image('two', [(group, 3, 2), (group, 0, 1)])
    repository.image('three', [(group, 0, 3), (group, 7, 5)])
    entry_fields(group, 3, checksum=0)
    group.save()
    one_damage(repository, 'groups/00000001', 'one', 'two')


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
    monkeypatch.setattr(checker, 'MAX_FINDINGS', 5)
    for i in range(9):
        repository.write(repository.path / f'images/a b{i}', b'')
    repository.write(repository.path / 'images/bad', b'')
    report = checker.check(repository.path)
    assert len(report.findings) == 5
    assert report.figures['findings_left_off'] == 5
    assert not report.ok
    assert report.damaged_images == ['bad']


# repository.json


PARAMETERS = {
    'kind': {'kind': 'another'},
    'major 0': {'major': 0},
    'major a bool': {'major': True},
    'major a string': {'major': '1'},
    'id': {'repository_id': 'x' * 32},
    'block size no power': {'block_size': 3000},
    'block size small': {'block_size': 256},
    'block size large': {'block_size': 131072},
    'block size float': {'block_size': 512.0},
    'block size huge': {'block_size': 2**100},
    'slots small': {'group_slots': 63},
    'slots large': {'group_slots': 32769},
    'segment small': {'segment_size': 256},
    'segment large': {'segment_size': 1 << 21},
    'cutting': {'cutting': 'other'},
    'cutting without sizes': {'cutting': 'gear'},
    'cutting padded': {'cutting': 'gear 0128 256', 'block_size': 512},
    'minimum small': {'cutting': 'gear 63 256', 'block_size': 512},
    'minimum large': {'cutting': 'gear 256 256', 'block_size': 512},
    'average large': {'cutting': 'gear 128 512', 'block_size': 512},
    'average no power': {'cutting': 'gear 128 300', 'block_size': 512},
    'compare': {'compare': 'other'},
    'compare surrogate': {'compare': '\ud800\n'},
    'more keys': {'more': 1},
    'nested': {'more': [[[[]]]]},
}


@pytest.mark.parametrize('change', PARAMETERS.values(), ids=PARAMETERS)
def test_parameters(repository, group, image, change):
    repository.parameters.update(change)
    repository.save_parameters()
    finding = one_damage(repository, 'repository.json')
    str(finding).encode('utf-8')


@pytest.mark.parametrize('text', [
    b'', b'{}', b'[]', b'1', b'\xff', b'[' * 60000, b'{"kind": 1}',
    b'9' * 60000, b' ' * 70000,
    b'{"kind": "glance-dedup repository", "x": 1, "x": 1}',
    b'{"kind": "glance-dedup repository", "x": NaN, "checksum": ""}',
    b'{"kind": "glance-dedup repository", "x": ' + 900 * b'[' + 900 * b']'
    + b'}'], ids=range(12))
def test_parameters_that_are_no_object(repository, group, image, text):
    (repository.path / 'repository.json').write_bytes(text)
    one_damage(repository, 'repository.json')


def test_parameters_of_content_defined_cutting(repository):
    repository.parameters['cutting'] = 'gear 128 256'
    repository.save_parameters()
    assert look(repository)[1].findings == []


def test_parameters_with_a_key_missing(repository):
    del repository.parameters['cutting']
    repository.save_parameters()
    one_damage(repository, 'repository.json')


def test_parameters_with_spaces(repository):
    path = repository.path / 'repository.json'
    path.write_text(json.dumps(json.loads(path.read_text()), indent=8))
    assert look(repository)[1].findings == []


def test_newer_format(repository):
    repository.parameters['major'] = 2
    repository.save_parameters()
    with pytest.raises(exceptions.VersionError, match='2.0'):
        checker.check(repository.path)


def test_newer_minor_format(repository, group, image):
    repository.parameters['minor'] = 7
    repository.save_parameters()
    assert look(repository)[1].findings == []


def test_unknown_digest(repository):
    repository.parameters['fingerprint'] = 'none\n'
    repository.save_parameters()
    with pytest.raises(exceptions.InvalidParameter, match='none'):
        checker.check(repository.path)


def test_not_a_repository(tmp_path):
    with pytest.raises(exceptions.ImageNotFound):
        checker.check(tmp_path / 'missing')
    with pytest.raises(exceptions.InvalidParameter):
        checker.check(tmp_path)
    (tmp_path / 'file').touch()
    with pytest.raises(exceptions.InvalidParameter):
        checker.check(tmp_path / 'file')


@pytest.mark.skipif(os.getuid() != 0, reason='becomes another user')
@pytest.mark.parametrize('name', ['.', 'groups', 'images', 'images/one',
                                  'groups/00000001', 'repository.json'])
def test_not_readable(repository, group, image, name):
    """A file that must not be read is not damage, but an error."""
    for path in (repository.path, *repository.path.rglob('*')):
        os.chown(path, 65534, 65534)
    path = repository.path
    while path.parent != path:
        if not os.stat(path.parent).st_mode & 1:
            os.chmod(path.parent, 0o711)
        path = path.parent
    os.chmod(repository.path / name, 0)
    program = (
        'import os, sys\n'
        'from glance_dedup.base import exceptions\n'
        'from glance_dedup.check import checker\n'
        'os.setresuid(65534, 65534, 65534)\n'
        'try:\n'
        '    print(checker.check(sys.argv[1]))\n'
        'except exceptions.AccessDenied as e:\n'
        '    print("denied", e)\n')
    answer = subprocess.run(
        [sys.executable, '-c', program, repository.path], text=True,
        capture_output=True, timeout=60)
    assert answer.stdout.startswith('denied'), answer


# While the repository is in use


def hooked(monkeypatch, when, action):
    """Call `action` once, right before the `when`-th opening of a file."""
    opened = []
    original = format.File.__init__

    def init(self, directory, name, file):
        opened.append(file)
        if opened.count(when) and not done:
            done.append(1)
            action()
        original(self, directory, name, file)

    done: list[int] = []
    monkeypatch.setattr(format.File, '__init__', init)
    return done


def test_image_deleted_before_it_is_read(
        monkeypatch, repository, group, image):
    done = hooked(monkeypatch, 'images/one', image.unlink)
    assert look(repository)[1].findings == []
    assert done


def test_image_deleted_and_collected(monkeypatch, repository, group, image):
    """Its blocks are freed, and their bytes gone, before they are read."""
    def act():
        image.unlink()
        for slot in range(12):
            group.entry(slot, state=writer.FREED)
        group.data = bytes(len(group.data))
        group.save()
    done = hooked(monkeypatch, 'groups/00000001', act)
    assert look(repository)[1].findings == []
    assert done


def test_image_deleted_and_its_group_removed(
        monkeypatch, repository, group, image):
    def act():
        image.unlink()
        group.path.unlink()
    done = hooked(monkeypatch, 'groups/00000001', act)
    assert look(repository)[1].findings == []
    assert done


def test_blocks_freed_under_a_live_image(
        monkeypatch, repository, group, image):
    def act():
        for slot in range(12):
            group.entry(slot, state=writer.FREED)
        group.save()
    hooked(monkeypatch, 'groups/00000001', act)
    one_damage(repository, 'images/one', 'one')


@pytest.mark.parametrize('intact', [True, False])
def test_image_replaced_by_merging(
        monkeypatch, repository, group, image, intact):
    def act():
        other = writer.Group(repository, 2)
        other.append([noise(50)])
        other.publish()
        if not intact:
            other.data = other.data[:-1] + b'!'
        other.save()
        image.rename(repository.path / 'spool' / ('O-' + '0' * 32))
        repository.image('one', [(other, 0, 1)])
        group.path.unlink()
    done = hooked(monkeypatch, 'groups/00000001', act)
    found, report = look(repository)
    assert done
    if intact:
        assert not found
    else:
        assert [(f.file, f.images) for f in found] == [
            ('groups/00000002', ('one',))]


def test_group_that_grows_while_it_is_read(
        monkeypatch, repository, group, image):
    """The record is read before the entries, and they are torn at first."""
    group.append([block(20)])
    group.publish()
    whole = group.content()
    group.entries[12] = group.entries[12][:-2] + b'??'
    group.data = group.data[:-3]
    group.save()
    repository.image('two', [(group, 12, 1)])
    looks = []
    original = format.GroupReader.look

    def act(self, *args):
        looks.append(args)
        if len(looks) == 3:
            group.path.write_bytes(whole)
        return original(self, *args)

    monkeypatch.setattr(format.GroupReader, 'look', act)
    assert look(repository)[1].findings == []
    assert len(looks) == 3


def test_busy_repository(tmp_path, repository):
    """Images come and go and groups grow; the checker finds no fault."""
    stop = threading.Event()
    failures = []

    def work(number):
        group = writer.Group(repository, number)
        try:
            for i in range(64):
                if stop.is_set():
                    break
                group.append([block(100 * number + i)])
                group.publish()
                temporary = tmp_path / f'group{number}'
                repository.write(temporary, group.content())
                temporary.rename(group.path)
                temporary = tmp_path / f'image{number}'
                repository.write(temporary, repository.recipe(
                    f'image{number}', [(group, i // 2, i // 2)] if i > 1
                    else []))
                temporary.rename(
                    repository.path / 'images' / f'image{number}')
                if i % 3 == 0:
                    (repository.path / 'images' / f'image{number}').unlink()
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=[n]) for n in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            assert look(repository)[1].ok
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
