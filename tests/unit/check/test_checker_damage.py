# SPDX-License-Identifier: Apache-2.0

"""The checker finds every changed byte, and wrong, old or missing files."""

import os
import shutil

import pytest

from glance_dedup.base import exceptions
from glance_dedup.check import checker
from glance_dedup.repository import image_repository
from tests.support import repositories
from tests.unit.check import fixtures
from tests.unit.check.fixtures import block
from tests.unit.check.fixtures import DAMAGE
from tests.unit.check.fixtures import look
from tests.unit.check.fixtures import noise
from tests.unit.check.fixtures import NOTE
from tests.unit.check.fixtures import one_damage
from tests.unit.check.fixtures import patch
from tests.unit.repository import format_writer

no_pause = fixtures.no_pause
repository = fixtures.repository
group = fixtures.group
image = fixtures.image

# Each part has its share of the bytes; the first one is the sample.
PARTS = [0, *(pytest.param(part, marks=pytest.mark.long)
              for part in range(1, 4))]


# Every byte

def flips(path):
    """Yield the file with each byte changed, one after the other."""
    content = path.read_bytes()
    with open(path, 'r+b', buffering=0) as f:
        for offset, value in enumerate(content):
            # Every bit of a byte position has its turn in some byte.
            changed = value ^ (1 << offset % 8)
            os.pwrite(f.fileno(), bytes([changed]), offset)
            yield offset, value, changed
            os.pwrite(f.fileno(), bytes([value]), offset)


def damaged_offsets(repository, path, file, images, part=slice(None)):
    """Flip each byte; return the offsets that are not reported as damage.

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


@pytest.mark.parametrize('part', PARTS)
def test_every_byte_of_a_group(repository, group, image, part):
    part = slice(part, None, 4)
    ignored = damaged_offsets(
        repository, group.path, 'groups/00000001', {'one'}, part)
    # Damage in unused entries, and behind the last segment, gives a note.
    unused = set()
    for slot in range(12, 72):
        at = 4096 + 512 * (slot // 9) + 56 * (slot % 9)
        unused.update(range(at, at + 56))
    garbage = group.content().index(b'garbage')
    unused.update(range(garbage, garbage + 7))
    assert ignored == unused.intersection(
        range(group.path.stat().st_size)[part])


@pytest.mark.parametrize('state', [
    format_writer.VOID, format_writer.FREED, format_writer.DAMAGED])
@pytest.mark.parametrize('codec', [format_writer.NONE, format_writer.LZ4])
def test_segment_of_which_not_all_lives(repository, state, codec):
    """Freed and void blocks may have lost their bytes; nothing needs them."""
    group = format_writer.Group(repository, 1)
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
    if codec == format_writer.NONE:
        patch(path, at + 32 + 2 * 512 + 7, b'!')
        note, = look(repository, NOTE)[0]
        assert not look(repository)[0]
        assert 'some of its blocks' in note.sentence
        group.save()
    # The checker still checks every byte of the header.
    content = path.read_bytes()
    for offset in range(32):
        patch(path, at + offset, bytes([content[at + offset] ^ 1]))
        report = checker.check(repository.path)
        assert [f.offset for f in report.findings] == [at], offset
        assert report.ok == (not report.damaged_images)
        path.write_bytes(content)
    # If all blocks are in use, each changed byte was needed.
    second = content.index(b'GDSG', at + 1)
    patch(path, second + 24, bytes([content[second + 24] ^ 1]))
    assert 'checksum' in one_damage(repository, 'groups/00000001').sentence


def test_every_byte_behind_a_fingerprint_store(tmp_path):
    """Changed bytes in the gap before the segments are only a note."""
    repository = format_writer.Repository(tmp_path / 'r', group_slots=80)
    group = format_writer.Group(repository, 1)
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


# Long: the repository is checked once for each byte.
@pytest.mark.parametrize('pieces', [
    pytest.param('blocks', marks=pytest.mark.long),
    pytest.param('zeros', marks=pytest.mark.long), 'nothing'])
def test_every_byte_of_a_recipe(repository, group, pieces):
    path = repository.image('one', {
        'blocks': [(group, i, 1) for i in range(12)] + [('zeros', 3)],
        'zeros': [('zeros', 1 << 30)],
        'nothing': []}[pieces], project='p')
    assert damaged_offsets(repository, path, 'images/one', {'one'}) == set()


@pytest.mark.long
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


@pytest.mark.parametrize('part', PARTS)
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
                continue        # Like a group that was published only once.
            if any(content[offset:offset + 512]):
                patch(path, offset, bytes(len(content[offset:][:512])))
                one_damage(repository,
                           str(path.relative_to(repository.path)),
                           *checker.check(repository.path).damaged_images)
                path.write_bytes(content)


# Whole files in the wrong place

def test_swapped_groups(repository, group, image):
    other = format_writer.Group(repository, 2)
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
    """A valid group with other blocks at the addresses damages the image."""
    other = format_writer.Group(repository, 1)
    other.append([noise(i) for i in range(100, 111)] + [b'other'])
    other.publish()
    other.save()
    finding = one_damage(repository, 'images/one', 'one')
    assert finding.offset == 4096 + 8
    assert 'not the blocks' in finding.sentence


def test_older_copy_of_a_record(repository, group, image):
    """A lost record is reported as damage, though no image depends on it."""
    patch(group.path, 1024, bytes(512))
    assert one_damage(
        repository, 'groups/00000001').sentence == (
            'published record 1 is lost')


def test_swapped_records(repository, group, image):
    content = group.path.read_bytes()
    patch(group.path, 512, content[1024:1536] + content[512:1024])
    one_damage(repository, 'groups/00000001')


def test_files_of_another_repository(tmp_path, repository, group, image):
    other = format_writer.Repository(tmp_path / 'other', name='other')
    shutil.copy(group.path, other.path / 'groups')
    shutil.copy(image, other.path / 'images')
    found, _ = look(other)
    assert {f.file for f in found} == {'images/one', 'groups/00000001'}
    assert all(repository.repository_id.hex() in f.sentence for f in found)


# Missing files

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
    image_repository.Repository.create(path)


def test_creation_is_killed_anywhere(tmp_path):
    """A creation killed anywhere leaves a note or no repository.

    The creation can be completed afterwards.
    """
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
        except exceptions.RepositoryNotFound as e:
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
            image_repository.Repository.create(path)
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
