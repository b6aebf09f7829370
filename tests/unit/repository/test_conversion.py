# SPDX-License-Identifier: Apache-2.0

"""Images whose recipe has a table: written, read, carried along, damaged."""

import contextlib
import dataclasses
import hashlib

import pytest
import xxhash

from dedupd.serve import image_source
from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import recompressor
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.cli import copying
from glance_dedup.repository import conversion
from glance_dedup.repository import features
from glance_dedup.repository import image_diff
from glance_dedup.repository import openvolumes
from tests.support import keptdisks
from tests.support import maintenance
from tests.support.maintenance import maintaining
from tests.support import repositories

SIZE = 300 * 1024
MADE = keptdisks.make(keptdisks.texts(SIZE), lossy={5, 6, 30})


@pytest.fixture
def path(tmp_path):
    return maintenance.create(tmp_path)


@pytest.fixture
def repo(path):
    with repositories.open_repository(path) as repo:
        yield repo


@pytest.fixture
def maintainer(repo):
    with maintaining(repo) as maintainer:
        yield maintainer


@pytest.fixture
def image(repo, maintainer, path):
    keptdisks.put(repo, maintainer, 'image', MADE)
    maintenance.account(maintainer)
    return path / 'images' / 'image'


def require_read(repo, image_id='image', made=MADE):
    assert repositories.read_all(repo, image_id) == made.file
    with repo.open_image(image_id) as found:
        assert found.read_disk(len(made.disk)) == made.disk


def test_both_views(repo, image, path):
    """A reader of the file, and one of the disk, get their bytes (F1)."""
    assert image.read_bytes()[8] == 2
    require_read(repo)
    with repo.open_image('image') as found:
        assert found.size == len(MADE.file)
        assert found.disk.size == SIZE
        assert found.disk.plain_bytes == len(MADE.plain)
        assert found.disk.derived == len(MADE.extents)
        assert found.disk.derived_bytes == sum(
            extent.length for extent in MADE.extents if extent.encoder)
        assert found.read_disk(100, SIZE - 50) == MADE.disk[-50:]
        assert found.read_disk(100, SIZE + 5) == b''
        assert not found.is_zeros(1, 0)
    assert checker.check(path).ok


@pytest.mark.parametrize('piece', [1, 511, 4096, 65536])
def test_any_range(repo, image, piece):
    with repo.open_image('image') as found:
        step = max(piece, len(MADE.file) // 200)
        for at in range(0, len(MADE.file) + 10, step):
            assert found.read(piece, at) == MADE.file[at:at + piece]


def test_large_extents(repo, maintainer):
    """Extents of 2 MiB of plain bytes, and many pages of small ones."""
    for image_id, cluster, size in (('large', 2 << 20, 5 << 20),
                                    ('small', 512, 400 << 10)):
        made = keptdisks.make(keptdisks.texts(size), cluster)
        keptdisks.put(repo, maintainer, image_id, made)
        require_read(repo, image_id, made)
        with repo.open_image(image_id) as found:
            assert found.read(5000, 300000 % len(made.file)) == made.file[
                300000 % len(made.file):][:5000]


def test_the_upload_stays(repo, maintainer):
    """The new recipe keeps id, project, hash and time of the upload."""
    with repo.begin('image', 'a project') as new:
        new.write(MADE.file)
        new.set_hash('sha256', hashlib.sha256(MADE.file).digest())
        before = new.commit()
    keptdisks.convert(repo, maintainer, 'image', MADE)
    after = repo.stat('image')
    changed = ('zero_bytes', 'new_bytes', 'stored_bytes', 'extents',
               'fragments', 'derived_bytes')
    assert dataclasses.replace(before, **{
        name: getattr(after, name) for name in changed}) == after


def test_without_the_proof(repo, maintainer):
    """A disk that is not proven cannot be read; its file can (F5)."""
    keptdisks.put(repo, maintainer, 'image', MADE, is_proven=False)
    with repo.open_image('image') as found:
        assert found.read() == MADE.file
        with pytest.raises(exceptions.InvalidParameter, match='proven'):
            found.read_disk(1)


def test_without_a_disk(repo):
    repositories.put(repo, 'image', b'some bytes')
    with repo.open_image('image') as found:
        assert found.disk is None
        with pytest.raises(exceptions.InvalidParameter, match='no disk'):
            found.read_disk(1)
        with pytest.raises(exceptions.InvalidParameter):
            found._engine.readinto_disk(bytearray(1), 0)


def test_the_feature_comes_first(repo, maintainer, path):
    """It is set before there is a recipe of version 2 (F10, N15.1)."""
    repositories.put(repo, 'image', MADE.file)
    with repo.begin_conversion('image') as new:
        new.write(MADE.plain)
        assert repo.features == []
        new.begin_table(MADE.table())
        assert repo.features == [features.DISKS]
    require_only(path, 'image', 1)
    assert checker.check(path).ok


def require_only(path, image_id, version):
    """The image has a recipe of this version, and no M is there (F2)."""
    assert (path / 'images' / image_id).read_bytes()[8] == version
    assert not list((path / 'spool').glob('M-*'))


def test_without_the_feature(image, path):
    """The checker reports a table in a repository without the feature."""
    (path / 'features' / features.DISKS).unlink()
    assert any('features/disks is missing' in finding.sentence
               for finding in checker.check(path).findings)


WRONG = {
    'a gap': lambda extents: extents[:-1],
    'too long': lambda extents: [*extents, extents[0]],
    'no such encoder': lambda extents: [
        extents[0], extents[1]._replace(encoder=3), *extents[2:]],
    'behind the end': lambda extents: [
        extents[0]._replace(plain=len(MADE.plain)), *extents[1:]],
    'empty': lambda extents: [extents[0]._replace(length=0), *extents],
    'no plain bytes': lambda extents: [
        extents[0], extents[1]._replace(plain_length=0), *extents[2:]],
    'much too long': lambda extents: [
        extents[0], extents[1]._replace(plain_length=(2 << 20) + 1),
        *extents[2:]]}


@pytest.mark.parametrize('wrong', WRONG)
def test_wrong_tables(repo, wrong, path):
    """A table that is not that of the file is refused; the image stays."""
    repositories.put(repo, 'image', MADE.file)
    with repo.begin_conversion('image') as new:
        new.write(MADE.plain)
        new.begin_table(MADE.table())
        with pytest.raises(exceptions.InvalidParameter):
            new.add_derived(WRONG[wrong](MADE.extents))
            new.finish()
    require_only(path, 'image', 1)
    assert repositories.read_all(repo, 'image') == MADE.file


@pytest.mark.parametrize('change', [
    {'disk_size': 100}, {'disk_size': 4 << 20}, {'disk_size': 0},
    {'format': 'raw'}, {'encoders': (conversion.Encoder(0, 12, 9),)},
    {'encoders': (conversion.Encoder(6, 16, 9),)},
    {'encoders': (conversion.Encoder(6, 12, 9),) * 16}], ids=str)
def test_wrong_headers(repo, change):
    repositories.put(repo, 'image', MADE.file)
    with repo.begin_conversion('image') as new:
        new.write(MADE.plain)
        with pytest.raises((exceptions.InvalidParameter, ValueError)):
            new.begin_table(dataclasses.replace(MADE.table(), **change))


def test_out_of_order(repo):
    """Plain bytes, the table, the end: in no other order."""
    repositories.put(repo, 'image', MADE.file)
    with repo.begin_conversion('image') as new:
        for call in (lambda: new.add_derived(MADE.extents), new.exchange,
                     new.commit, new.open_finished):
            with pytest.raises(exceptions.InvalidParameter):
                call()
        new.write(MADE.plain)
        new.begin_table(MADE.table())
        for call in (lambda: new.write(b'more'), lambda: new.add_zeros(5),
                     lambda: new.begin_table(MADE.table()), new.exchange,
                     new.commit):
            with pytest.raises(exceptions.InvalidParameter):
                call()
    with repo.begin('other') as new:
        with pytest.raises(exceptions.InvalidParameter):
            new._engine.begin_table(512, 1, True, b'')


def test_the_file_again(repo, maintainer, image, path):
    """Without a table the recipe is that of the file."""
    for wrong in MADE.file[:-1], MADE.file + b'.', b'':
        with repo.begin_conversion('image') as new:
            new.write(wrong)
            with pytest.raises(exceptions.InvalidParameter, match='its'):
                new.finish()
        require_read(repo)
    with repo.begin_conversion('image') as new:
        new.write(MADE.file)
        header = new.finish()
        with new.open_finished() as found:
            assert found.read() == MADE.file and found.disk is None
        merger.count(maintainer, pacing.Pace(), header['transaction_id'])
        assert new.exchange()
    maintenance.account(maintainer)
    maintenance.require_counted(maintainer)
    require_only(path, 'image', 1)
    assert repositories.read_all(repo, 'image') == MADE.file
    assert checker.check(path).ok


def test_finished_and_read(repo):
    """The new recipe can be read before it is the image's (F4)."""
    repositories.put(repo, 'image', MADE.file)
    with repo.begin_conversion('image') as new:
        new.write(MADE.plain)
        new.begin_table(MADE.table())
        new.add_derived(MADE.extents)
        new.finish()
        with new.open_finished() as found:
            assert found.read() == MADE.file
            assert found.read_disk(SIZE) == MADE.disk
        with repo.open_image('image') as found:
            assert found.disk is None


def test_given_up(repo, maintainer, path):
    """Before the exchange the image has its old recipe, and only that (F2)."""
    repositories.put(repo, 'image', MADE.file)
    with repo.begin_conversion('image') as new:
        new.write(MADE.plain)
        new.begin_table(MADE.table())
        new.add_derived(MADE.extents)
        new.finish()
    assert list((path / 'spool').glob('M-*'))
    assert repositories.read_all(repo, 'image') == MADE.file
    maintenance.account(maintainer)
    require_only(path, 'image', 1)
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_counted(maintainer)
    assert checker.check(path).ok


def test_deleted_meanwhile(repo, maintainer, path):
    repositories.put(repo, 'image', MADE.file)
    with repo.begin_conversion('image') as new:
        new.write(MADE.plain)
        new.begin_table(MADE.table())
        new.add_derived(MADE.extents)
        new.finish()
        repo.delete('image')
        assert not new.exchange()
    maintenance.account(maintainer)
    assert repo.images() == []
    assert checker.check(path).ok


# -- carried along ------------------------------------------------------------

def test_copied(repo, image, path):
    """A copy by address, and one into another scope, have the same table."""
    table = keptdisks.table_of(image)
    with repo.open_image('image') as source:
        repo.copy(source, 'copy')
        repo.copy(source, 'elsewhere', 'a project', 'project')
    for image_id in ('copy', 'elsewhere'):
        require_read(repo, image_id)
        assert keptdisks.table_of(path / 'images' / image_id) == table
    assert repo.stat('copy').new_bytes == 0
    assert checker.check(path).ok


def test_only_a_part_is_copied(repo, image):
    """Without all plain bytes the table is not copied."""
    with repo.open_image('image') as source, repo.begin('part') as new:
        new.add_runs(source, 0, source.disk.plain_bytes - 1)
        with pytest.raises(exceptions.InvalidParameter, match='plain bytes'):
            new.copy_table(source)


def test_a_table_of_another_handle(repo, path, image):
    with (repositories.open_repository(path) as other,
          other.open_image('image') as source, repo.begin('copy') as new):
        with pytest.raises(exceptions.InvalidParameter, match='another hand'):
            new.copy_table(source)


def test_merged(repo, maintainer, image, path):
    """A merge gives the new recipe the table as it was (F2)."""
    table, before = keptdisks.table_of(image), image.read_bytes()
    with contextlib.closing(maintainer.relocation()) as relocation:
        relocation.add(b''.join(
            (group << 16 | slot).to_bytes(8, 'little') for group, slot in
            sorted({*maintenance.blocks_of(repo, 'image')})[:300]))
        mapping = relocation.finish()
    assert merger.merge_image(maintainer, 'image', mapping,
                              pacing.Pace()).exchanged
    assert keptdisks.table_of(image) == table
    assert image.read_bytes()[500:656] == before[500:656]
    assert image.read_bytes() != before
    require_read(repo)
    maintenance.account(maintainer)
    maintenance.require_counted(maintainer)
    assert checker.check(path).ok


def test_maintained(repo, maintainer, image, path):
    """Tasks that change groups leave the recipe, or its table, as it is."""
    table = keptdisks.table_of(image)
    repositories.put(repo, 'other', repositories.noise(SIZE, 99))
    repo.delete('other')
    collector.run_once(maintainer, pacing.Pace())
    recompressor.run_once(maintainer, pacing.Pace(), 'zstd', 3)
    scrubber.run_once(maintainer, pacing.Pace(), full=True)
    maintenance.require_counted(maintainer)
    require_read(repo)
    assert keptdisks.table_of(image) == table
    assert checker.check(path).ok
    repo.delete('image')
    collector.run_once(maintainer, pacing.Pace())
    maintenance.require_collected(maintainer)


def test_exchanged_during_a_read(repo, maintainer, path):
    """A reader of the old recipe reads on (I12)."""
    repositories.put(repo, 'image', MADE.file)
    with repo.open_image('image') as before:
        keptdisks.convert(repo, maintainer, 'image', MADE)
        maintenance.account(maintainer)
        collector.run_once(maintainer, pacing.Pace())
        assert before.read() == MADE.file and before.disk is None
    require_read(repo)


def test_uses_that_do_not_know_disks(repo, image):
    """They refuse, and take no plain bytes for the file."""
    repositories.put(repo, 'twin', MADE.file)
    with repo.open_image('image') as found:
        for call in (lambda: found.describe(0),
                     lambda: next(found.extents()),
                     lambda: found.frames([(0, 512)]),
                     lambda: openvolumes.create(repo, 'disk', image=found)):
            with pytest.raises(exceptions.InvalidParameter,
                               match='kept as its disk'):
                call()
        assert [*copying.filled_ranges(found)] == [(0, len(MADE.file))]
        reading = image_source.Present(found)
        assert reading.extents(70_000, 1 << 40) == [
            (len(MADE.file) - 70_000, False)]
    with pytest.raises(exceptions.InvalidParameter, match='kept as its disk'):
        image_diff.Comparison(repo, 'image', 'twin')
    openvolumes.create(repo, 'disk', size=1 << 20)
    with repo.open_image('image') as found:
        with pytest.raises(exceptions.InvalidParameter, match='kept as'):
            openvolumes.roll_back(repo, 'disk', found)


# -- damage -------------------------------------------------------------------

#: Fields of a header of version 2: offset, and a byte that is not possible, or
#: that does not fit the rest.
HEADER = {500: 1, 503: 0x7f, 508: 1, 515: 0x7f, 516: 0, 520: 1, 523: 0xff,
          531: 0xff, 532: 6, 533: 2, 534: 16, 536: 2, 537: 10, 538: 16,
          539: 10, 540: 5, 541: 2, 542: 1, 552: 1, 648: 1}


def seal(data, page):
    """Correct the checksum of a page of a recipe."""
    begin = page * 4096
    seed = 0 if page == 0 else int.from_bytes(data[48:56], 'little')
    data[begin + 4088:begin + 4096] = xxhash.xxh3_64_intdigest(
        data[begin:begin + 4088], seed).to_bytes(8, 'little')


def first_page_of_table(data):
    return 1 + -(-int.from_bytes(data[112:120], 'little') // 102)


@pytest.mark.parametrize('at', HEADER)
def test_damaged_headers(repo, image, path, at):
    """Each impossible field of the header is found by both programs (I10)."""
    data = bytearray(image.read_bytes())
    assert data[at] != HEADER[at]
    data[at] = HEADER[at]
    seal(data, 0)
    image.write_bytes(data)
    # How many plain bytes there are, and how many are derived, only who reads
    # all extents can tell.
    with contextlib.nullcontext() if at in (500, 503) else pytest.raises(
            exceptions.DamagedError, match='images/image'):
        repo.open_image('image').close()
    assert checker.check(path).damaged_images == ['image']


#: Fields of the third extent of a table: offset in it, and a byte.
EXTENT = {0: 0xff, 7: 1, 8: 0xff, 15: 1, 18: 0xff, 23: 1, 24: 0, 26: 0xff,
          28: 1, 29: 3, 30: 1, 32: None}


@pytest.mark.parametrize('at', EXTENT)
def test_damaged_tables(repo, image, path, at):
    """A spoiled field of the table is an error, never other bytes (F1)."""
    data = bytearray(image.read_bytes())
    page = first_page_of_table(data)
    place = page * 4096 + 8 + 40 * 2 + at
    assert MADE.extents[1].encoder and MADE.extents[3].encoder
    place += 40 * (MADE.extents[2].encoder == 0)
    number = (place - at - page * 4096 - 8) // 40
    data[place] = (EXTENT[at] if EXTENT[at] is not None
                   else data[place] ^ 1)
    if at == 24:
        data[place:place + 4] = bytes(4)
    seal(data, page)
    image.write_bytes(data)
    begin = sum(extent.length for extent in MADE.extents[:number])
    with repo.open_image('image') as found:
        with pytest.raises(exceptions.DamagedError, match='image'):
            found.read(100, begin)
        assert found.read_disk(SIZE) == MADE.disk
    # Nobody but an encoder sees that a checksum is wrong.
    assert checker.check(path).ok == (at == 32)


def test_a_wrong_encoder(repo, maintainer, path):
    """The error names image, offset and encoder; no block is marked (F1)."""
    wrong = dataclasses.replace(
        MADE, encoders=(conversion.Encoder(1, 12, 9), keptdisks.PLAIN))
    keptdisks.put(repo, maintainer, 'image', wrong)
    with repo.open_image('image') as found:
        number = next(i for i, extent in enumerate(MADE.extents)
                      if extent.encoder == 1)
        begin = sum(extent.length for extent in MADE.extents[:number])
        with pytest.raises(exceptions.DamagedError, match=(
                f'image image: encoder 1 .*file at offset {begin} ')):
            found.read(1, begin)
        assert found.read(begin) == MADE.file[:begin]
        assert found.read_disk(SIZE) == MADE.disk
    assert repositories.DAMAGED not in maintenance.states(path, 1)


def test_a_damaged_page(repo, image, path):
    """Damage of a page of the table is found by its checksum."""
    data = bytearray(image.read_bytes())
    data[-100] ^= 1
    image.write_bytes(data)
    with repo.open_image('image') as found:
        with pytest.raises(exceptions.DamagedError, match='images/image'):
            found.read()
        assert found.read_disk(SIZE) == MADE.disk
    assert checker.check(path).damaged_images == ['image']


def test_a_damaged_block(repo, image, path):
    """A block of plain bytes is damage of file and disk."""
    group, slot = maintenance.blocks_of(repo, 'image')[20]
    file = repositories.Group(path, group)
    repositories.ruin(file.path, file.entry(slot)[2] + 40)
    with repo.open_image('image') as found:
        for read in (found.read, lambda: found.read_disk(SIZE)):
            with pytest.raises(exceptions.DamagedError):
                read()


def test_cut_short(repo, image, path):
    data = image.read_bytes()
    image.write_bytes(data[:-4096])
    with pytest.raises(exceptions.DamagedError, match='pages'):
        repo.open_image('image')
    assert checker.check(path).damaged_images == ['image']
