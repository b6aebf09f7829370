# SPDX-License-Identifier: Apache-2.0

"""The checker checks cold groups, ``cold.json``, and cached slices."""

import os
import struct

import pytest

from glance_dedup.check import check_report
from glance_dedup.check import checker
from glance_dedup.check import files
from tests.unit.check import fixtures
from tests.unit.check.fixtures import block
from tests.unit.check.fixtures import look
from tests.unit.check.fixtures import NOTE
from tests.unit.check.fixtures import one_damage
from tests.unit.check.fixtures import patch
from tests.unit.repository import format_writer

no_pause = fixtures.no_pause

GROUP = 'groups/00000001'
OBJECT = format_writer.some_id('object 1').hex()
#: Size of a segment of four plain blocks.
SEGMENT = 32 + 4 * 512
DATA = 8192


@pytest.fixture
def repository(tmp_path):
    """A repository with cold groups that is attached."""
    repository = format_writer.Repository(tmp_path / 'repository',
                                          features=('listed-segments', 'cold'))
    repository.attach()
    return repository


def fill(group):
    """Fill all slots: plain segments, one of each codec, two unused blocks."""
    for first in range(0, 56, 4):
        group.append([block(first + i) for i in range(4)])
    group.append([block(56 + i) for i in range(4)], format_writer.LZ4)
    group.append([block(60 + i) for i in range(4)], format_writer.ZSTD,
                 states={1: format_writer.FREED, 2: format_writer.VOID})
    group.publish()
    group.publish()
    group.save()
    return group


@pytest.fixture
def group(repository):
    return fill(format_writer.ColdGroup(repository, 1))


@pytest.fixture
def image(repository, group):
    return repository.image('one', [(group, 0, 5), ('zeros', 1000),
                                    (group, 3, 58)])


@pytest.fixture
def slices(repository):
    path = repository.path / 'slices' / OBJECT
    path.mkdir(mode=0o700)
    repository.write(path / '00000000', bytes(1 << 20))
    repository.write(path / '00000001', bytes(77))
    repository.write(path / f'00000002.{"0f" * 8}', bytes(7))
    return path


def change_entry(group, slot, **change):
    fingerprint, checksum, offset, place = struct.unpack(
        '<32sQIQ', group.entries[slot][:52])
    fields = {'at': place & 0xfffff, 'length': place >> 20 & 0x1ffff,
              'stored': place >> 37 & 0x1fffff, 'codec': place >> 58 & 7,
              'state': place >> 61, 'offset': offset, **change}
    group.entry(slot, struct.pack(
        '<32sQIQ', fingerprint, checksum, fields['offset'],
        fields['at'] | fields['length'] << 20 | fields['stored'] << 37
        | fields['codec'] << 58 | fields['state'] << 61))
    group.save()


# -- sound cold groups --------------------------------------------------------

def test_clean(repository, group, image, slices):
    report = checker.check(repository.path)
    assert report.findings == [] and report.ok
    figures = report.figures
    assert figures['groups'] == figures['cold_groups'] == 1
    assert figures['cold_bytes'] == len(group.object)
    assert figures['slice_bytes'] == (1 << 20) + 77 + 7
    # No block was read, and none is on the disk.
    for name in ('blocks_verified', 'stored_bytes', 'garbage_bytes'):
        assert figures[name] == 0, name
    assert figures['referenced_bytes'] == 61 * 512
    assert figures['garbage_blocks'] == 1       # the last one
    assert figures['freed_blocks'] == 1
    assert figures['metadata_bytes'] == DATA + 2 * 4096


def test_beside_a_hot_group(repository, group, image):
    hot = format_writer.Group(repository, 2)
    hot.append([block(i) for i in range(3)])
    hot.publish()
    hot.save()
    repository.image('two', [(group, 2, 2), (hot, 0, 3)])
    report = checker.check(repository.path)
    assert report.findings == []
    assert report.figures['blocks_verified'] == 3
    assert report.figures['cold_groups'] == 1
    assert report.figures['duplicate_blocks'] == 3


def test_progress(repository, group, image, slices):
    told = []
    checker.check(repository.path, lambda *args: told.append(args))
    dones = [done for done, _, _ in told]
    assert dones == sorted(dones)
    assert told[-1][0] == told[-1][1] > DATA


def test_nothing_is_cold_yet(repository):
    assert checker.check(repository.path).findings == []
    (repository.path / 'cold.json').unlink()
    assert checker.check(repository.path).findings == []


def test_a_marked_block(repository, group):
    """A block marked as damaged damages the image that names it."""
    change_entry(group, 3, state=format_writer.DAMAGED)
    repository.image('one', [(group, 0, 5)])
    one_damage(repository, 'images/one', 'one')
    assert look(repository)[1].figures['damaged_blocks'] == 1


def test_what_an_image_does_not_have_is_found(repository, group, image):
    repository.image('two', [{'length': 512, 'group': 1, 'slot': 9,
                              'blocks': 1, 'kind': 1, 'digest': 9}])
    assert one_damage(repository, 'images/two', 'two')
    repository.image('two', [{'length': 512, 'group': 1, 'slot': 61,
                              'blocks': 1, 'kind': 1, 'digest': 9}])
    assert 'is freed' in one_damage(repository, 'images/two', 'two').sentence


# -- groups -------------------------------------------------------------------

@pytest.mark.parametrize('object_id, major, images, words', [
    (bytes(16), 3, ['one'], 'names no object'),
    (b'x' * 16, 4, ['one'], 'reads 1.x to 3.x'),
    # The header does not mark the file as one without segments.
    (b'x' * 16, 2, ['one'], ''), (b'x' * 16, 1, ['one'], '')])
def test_header(repository, object_id, major, images, words):
    group = fill(format_writer.ColdGroup(repository, 1, object_id=object_id,
                                         major=major))
    repository.image('one', [(group, 0, 5)])
    assert words in one_damage(repository, GROUP, *images).sentence


def test_a_whole_file_of_version_3(repository, group, image):
    """A local file with the whole object's content is damage."""
    repository.write(group.path, group.object)
    finding = one_damage(repository, GROUP)
    assert finding.offset == DATA
    assert f'{len(group.object)} bytes' in finding.sentence


@pytest.mark.parametrize('size, images', [
    (DATA - 4096, ['one']), (DATA - 1, []), (DATA + 1, []),
    (DATA + 4096, [])])
def test_length_of_the_file(repository, group, image, size, images):
    os.truncate(group.path, size)
    finding = one_damage(repository, GROUP, *images)
    assert f'is cold and has {size} bytes' in finding.sentence


def test_slots_that_are_not_published(repository, group, image):
    for _ in range(2):
        group.publish(63)
    group.save()
    finding = one_damage(repository, GROUP)
    assert 'only 63 of 64 slots are published' in finding.sentence


@pytest.mark.parametrize('end', [0, DATA - 1])
def test_object_that_is_too_short(repository, group, image, end):
    for _ in range(2):
        group.publish(end=end)
    group.save()
    finding = one_damage(repository, GROUP, 'one')
    assert 'the length of its object' in finding.sentence


def test_no_record(repository, group, image):
    patch(group.path, 512, bytes(1024))
    one_damage(repository, GROUP, 'one')


def test_one_torn_record(repository, group, image):
    patch(group.path, 512, b'torn')
    finding = one_damage(repository, GROUP)
    assert 'record 0' in finding.sentence


@pytest.mark.parametrize('less, images', [(1, []), (SEGMENT, ['one'])])
def test_segments_behind_the_object(repository, group, less, images):
    repository.image('one', [(group, 0, 60)])
    for _ in range(2):
        group.publish(end=len(group.object) - less)
    group.save()
    found = one_damage(repository, GROUP, *images)
    assert 'its object ends' in found.sentence


@pytest.mark.parametrize('changes', [
    # In another segment; in front of it; over it.
    {0: {'offset': DATA + SEGMENT}}, {4: {'offset': DATA + 5}},
    {4: {'offset': DATA + 2 * SEGMENT, 'stored': 2047}},
    {0: {'stored': 4 * 512 + 1}}, {0: {'codec': format_writer.LZ4}},
    # Two blocks in one place; behind the plain bytes.
    {1: {'at': 0}}, {1: {'at': 1}}, {2: {'at': 3 * 512}},
    {3: {'at': 4 * 512}}], ids=str)
def test_places_that_cannot_be(repository, group, image, changes):
    for slot, change in changes.items():
        change_entry(group, slot, **change)
    one_damage(repository, GROUP, 'one')


def test_flipped_bytes(repository, group, image):
    """The checker finds each of these changed bytes."""
    content = group.content()
    for at in (*range(104), *range(503, 548), *range(1015, 1060), 1535, 1536,
               *range(4095, 4210), 4600, 4607, DATA - 1):
        patch(group.path, at, bytes([content[at] ^ 1]))
        assert checker.check(repository.path).findings, at
        patch(group.path, at, content[at:at + 1])
    assert checker.check(repository.path).findings == []


def test_a_file_of_spares_is_never_cold(repository, group, image):
    (repository.path / 'spares').mkdir(mode=0o700)
    fill(format_writer.ColdGroup(repository, 1, scope=b'\xff' * 16,
                                 directory='spares'))
    assert 'no file of spare copies' in one_damage(
        repository, 'spares/00000001').sentence


@pytest.mark.parametrize('kind, major, feature', [
    (format_writer.ColdGroup, 3, 'cold'),
    (format_writer.Group, 2, 'listed-segments')])
def test_a_feature_that_is_missing(repository, kind, major, feature):
    group = fill(kind(repository, 1, major=major))
    repository.image('one', [(group, 0, 5)])
    assert look(repository)[0] == []
    (repository.path / 'features' / feature).unlink()
    finding = one_damage(repository, GROUP)
    assert finding.sentence == (
        f'has format {major}.x, but features/{feature} is missing: make that '
        'file again')
    assert finding.offset == 8
    for path in (repository.path / 'features').iterdir():
        path.unlink()
    (repository.path / 'features').rmdir()
    finding = one_damage(repository, 'features')
    assert finding.sentence == 'the directory is missing'


def test_the_first_cold_group_while_it_is_checked(repository, group, image,
                                                  monkeypatch):
    feature = repository.path / 'features' / 'cold'
    feature.unlink()
    original = files.File.__init__

    def init(self, directory, name, file):
        original(self, directory, name, file)
        if file == 'images/one':
            monkeypatch.undo()
            monkeypatch.setattr(files, 'PAUSE', 0)
            feature.touch(0o600)
    monkeypatch.setattr(files.File, '__init__', init)
    assert look(repository)[0] == []
    assert feature.exists()


# -- cold.json ----------------------------------------------------------------

def test_cold_groups_without_it(repository, group, image):
    (repository.path / 'cold.json').unlink()
    finding = one_damage(repository, 'cold.json')
    assert '1 cold groups' in finding.sentence
    assert 'from a backup' in finding.sentence


@pytest.mark.parametrize('content', [
    b'', b'{', b'[]', b'null', b'x' * 70000, b'[' * 60000, b'\xff',
    b'{"kind": "glance-dedup object store"}'])
def test_what_is_no_description(repository, content):
    repository.write(repository.path / 'cold.json', content)
    assert 'restore' in one_damage(repository, 'cold.json').sentence


def place(**change):
    found = {'kind': 's3', 'container': 'bucket', 'prefix': 'a',
             'endpoint': '', 'region': '', 'ca_file': '', **change}
    return {'location': {k: v for k, v in found.items() if v is not None}}


@pytest.mark.parametrize('change', [
    {'kind': 'glance-dedup cache'}, {'version': 2}, {'version': None},
    {'checksum': '0' * 16}, {'checksum': 7},
    {'owners': None}, {'owners': []}, {'owners': ['x']}, {'owners': [7]},
    {'owners': ['0' * 32] * 65}, {'owners': '0' * 32},
    {'cache_mib': None}, {'cache_mib': 0}, {'cache_mib': True},
    {'cache_mib': (1 << 20) + 1}, {'cache_mib': '1'},
    {'credentials': None}, {'credentials': 'relative'}, {'credentials': 7},
    {'inode': None}, {'inode': '7'}, {'inode': 7.0}, {'inode': True},
    {'allow_http': 1}, {'allow_http': 'true'},
    {'read_limit': 0}, {'read_limit': 3601}, {'read_limit': True},
    {'read_limit': 1.5},
    {'location': None}, {'location': 7}, {'location': {}},
    place(kind='ftp'), place(container='a'), place(container='Bucket'),
    place(container='-bucket'), place(container=None), place(other='x'),
    place(prefix=''), place(prefix='/a'), place(prefix='a//b'),
    place(prefix='../a'), place(prefix='a' * 513), place(prefix='a\n'),
    place(region='a b'), place(region=None), place(ca_file=7),
    place(endpoint='ftp://host'), place(endpoint='http://'),
    place(endpoint='http://user:secret@host'), place(endpoint='http://[::1'),
    place(endpoint='http://host:0'), place(endpoint='http://host/?x=y'),
    place(kind='swift', endpoint='http://host')], ids=str)
def test_wrong_values(repository, change):
    repository.attach(**change)
    assert 'restore the file from a backup' in one_damage(
        repository, 'cold.json').sentence


@pytest.mark.parametrize('change', [
    {'owners': ['0' * 32] * 64}, {'cache_mib': 1 << 20}, place(),
    {'allow_http': True}, {'allow_http': False},
    {'read_limit': 1}, {'read_limit': 3600},
    place(kind='swift', container='My_Container', region='one.two'),
    place(endpoint='http://host:9000/path', ca_file='/etc/ca.pem')], ids=str)
def test_right_values(repository, change):
    repository.attach(**change)
    assert checker.check(repository.path).findings == []


def test_strange_keys(repository):
    repository.attach(later='x')
    found, _ = look(repository, NOTE)
    assert [f.file for f in found] == ['cold.json']
    assert 'later' in found[0].sentence
    assert checker.check(repository.path).ok


def test_a_wrong_mode(repository):
    (repository.path / 'cold.json').chmod(0o644)
    assert [f.file for f in look(repository, NOTE)[0]] == ['cold.json']


def test_a_link(repository):
    path = repository.path / 'cold.json'
    path.rename(repository.path.parent / 'elsewhere')
    path.symlink_to(repository.path.parent / 'elsewhere')
    one_damage(repository, 'cold.json')


# -- slices -------------------------------------------------------------------

def test_no_directory_of_slices(repository):
    """A missing directory of slices is no finding: it is a cache."""
    (repository.path / 'slices').rmdir()
    assert checker.check(repository.path).findings == []


def test_strange_names(repository, slices):
    parent = slices.parent
    (parent / 'strange').mkdir(mode=0o700)
    repository.write(parent / ('0' * 32), b'a file')
    (parent / ('1' * 32)).symlink_to(slices)
    repository.write(slices / 'strange', b'')
    repository.write(slices / '00000000.new', b'')
    (slices / '00000003').mkdir(mode=0o700)
    os.mkfifo(slices / '00000004', 0o600)
    (slices / '00000005').symlink_to('00000000')
    repository.write(slices / '00000006', bytes((1 << 20) + 1))
    found, report = look(repository, NOTE)
    assert report.ok
    names = {f.file.removeprefix('slices/').removeprefix(f'{OBJECT}/'): f
             for f in found}
    assert set(names) == {
        'strange', '0' * 32, '1' * 32, '00000000.new', '00000003',
        '00000004', '00000005', '00000006'}
    assert len(found) == 9          # two are called strange
    assert 'more than a slice' in names['00000006'].sentence


def test_wrong_modes(repository, slices):
    slices.chmod(0o755)
    (slices / '00000000').chmod(0o644)
    assert {f.file for f in look(repository, NOTE)[0]} == {
        f'slices/{OBJECT}', f'slices/{OBJECT}/00000000'}


def test_slices_that_vanish(repository, slices, monkeypatch):
    """Slices that another process evicts meanwhile cause no finding."""
    real = os.scandir

    def scandir(fd):
        for path in slices.iterdir():
            if path.name == '00000001':
                path.unlink()
        return real(fd)
    with monkeypatch.context() as patched:
        patched.setattr(os, 'scandir', scandir)
        assert checker.check(repository.path).findings == []
    opened = os.open

    def open_gone(path, *arguments, **keywords):
        if path == OBJECT:
            raise FileNotFoundError(2, 'gone')
        return opened(path, *arguments, **keywords)
    monkeypatch.setattr(os, 'open', open_gone)
    report = checker.check(repository.path)
    assert report.findings == [] and report.figures['slice_bytes'] == 0


def test_the_figures_have_names(repository):
    assert {'cold_groups', 'cold_bytes', 'slice_bytes'} <= set(
        check_report.FIGURES)
