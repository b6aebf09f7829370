# SPDX-License-Identifier: Apache-2.0

"""The checker finds values that no writer writes, under good checksums."""

import struct

import pytest
import zstandard

from tests.unit.check import fixtures
from tests.unit.check.fixtures import block
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


RECIPES = {
    'magic': {'magic': b'GDRECIPF'},
    'version': {'major': 2},
    'flags': {'flags': 1},
    'another repository': {'repository_id': format_writer.some_id('x')},
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
    """A wrong number of fragments is only a note; zeros do not count."""
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
              'digest': format_writer.xxh3(
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
    seed = int.from_bytes(format_writer.some_id('upload of one')[:8], 'little')
    patch(path, 8184, struct.pack('<Q', format_writer.xxh3(page, seed)))
    one_damage(repository, 'images/one', 'one')


def sealed_group(repository, **change):
    """A group with these header bytes changed, under a valid checksum."""
    group = format_writer.Group(repository, 1)
    header = bytearray(group.header[:504])
    for offset, data in change.items():
        offset = int(offset[1:])
        header[offset:offset + len(data)] = data
    group.seed = format_writer.xxh3(bytes(header))
    group.header = bytes(header) + struct.pack('<Q', group.seed)
    group.append([block(0)])
    group.publish()
    group.save()
    repository.image('one', [(group, 0, 1)])


@pytest.mark.parametrize('change', [
    {'_0': b'X'}, {'_8': b'\3'}, {'_12': b'\2'}, {'_16': b'\0\0'},
    {'_48': struct.pack('<I', 63)}, {'_48': struct.pack('<I', 32769)},
    {'_48': struct.pack('<I', 2**32 - 1)}, {'_52': struct.pack('<I', 0)},
    {'_52': struct.pack('<I', 2**32 - 1)}, {'_56': b'none\0\0\0'},
    {'_56': b'shake_128'}, {'_56': b'\xff\xfe'}, {'_56': bytes(16)},
    {'_56': b'md5\0\0\0\0'}, {'_56': b'sha1\0six'},
    {'_56': b'sha3-256'}, {'_56': b'SHA256'}], ids=str)
def test_group_header(repository, change):
    sealed_group(repository, **change)
    one_damage(repository, 'groups/00000001', 'one')


def test_group_header_of_a_later_minor_version(repository):
    sealed_group(repository, _10=b'\2', _72=b'\1')
    assert look(repository)[1].ok


def entry_fields(group, slot, **change):
    """Change some of the entry's fields, and seal it again."""
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
    # The damage concerns one block, unless it breaks the segment's order.
    repository.image('two', [(group, 0, 1)])
    assert 'two' not in look(repository)[1].damaged_images


def test_wrong_fingerprint(repository):
    """The checker detects a wrong fingerprint although all checksums agree."""
    group = format_writer.Group(repository, 1)
    group.append([block(0), block(1)], fingerprints=[
        format_writer.sha256(block(0)), format_writer.sha256(block(2))])
    group.publish()
    group.save()
    repository.image('one', [(group, 0, 1)])
    repository.image('two', [(group, 0, 2)])
    finding = one_damage(repository, 'groups/00000001', 'two')
    assert 'slot 1: its bytes do not have its fingerprint' in (
        finding.sentence)


def test_block_marked_as_damaged(repository, group, image):
    entry_fields(group, 4, state=format_writer.DAMAGED)
    group.save()
    finding = one_damage(repository, 'images/one', 'one')
    assert 'slot 4 is marked as damaged' in finding.sentence


def test_entries_moved_to_other_slots(repository, group, image):
    group.entries[1], group.entries[2] = group.entries[2], group.entries[1]
    group.save()
    one_damage(repository, 'groups/00000001', 'one')


def test_blocks_moved_inside_a_segment(repository, group, image):
    """Two entries of a segment that changed places are damage."""
    for slot, other in ((1, 2), (2, 1)):
        group.entry(slot, struct.pack(
            '<32sQIQ', format_writer.sha256(noise(other)),
            format_writer.xxh3(noise(other)), group.data_start,
            other * 512 | 512 << 20 | 1536 << 37 | 1 << 61))
    group.save()
    one_damage(repository, 'groups/00000001', 'one')


def damaged_segment(repository, **arguments):
    group = format_writer.Group(repository, 1)
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
            (format_writer.LZ4, b'\xff' * 100, 'do not decode'),
            (format_writer.LZ4, b'\x10x', 'decodes to 1 bytes'),
            (format_writer.ZSTD, b'nonsense', 'do not decode'),
            (format_writer.ZSTD, b'', 'do not decode'),
            (format_writer.ZSTD, without_size[:-1], 'do not decode'),
            (format_writer.ZSTD, without_size + b'x', 'do not decode'),
            (format_writer.ZSTD, bomb[:1000], 'decodes to 1073741824 bytes'),
            (format_writer.ZSTD, unsized_bomb, 'do')):
        finding = damaged_segment(repository, codec=codec, stored=stored)
        assert sentence in finding.sentence, stored
    group = format_writer.Group(repository, 1)
    group.append([block(0), block(1)], format_writer.ZSTD, stored=without_size)
    group.publish()
    group.save()
    assert look(repository)[1].ok


@pytest.mark.parametrize('offset, data', [
    (0, b'X'), (4, b'\1'), (6, b'\1\0'), (6, b'\3\0'), (6, b'\0\0'),
    (6, b'\xff\xff'), (8, b'\1'), (8, b'\xff\xff\xff\xff'), (12, b'\1'),
    (12, b'\xff\xff\xff\xff'), (16, b'\1'), (16, b'\xff\xff\xff\xff')])
def test_segment_header(repository, offset, data):
    group = format_writer.Group(repository, 1)
    group.append([block(0), block(1)])
    group.publish()
    content = bytearray(group.data)
    content[offset:offset + len(data)] = data
    content[24:32] = struct.pack('<Q', format_writer.xxh3(
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
