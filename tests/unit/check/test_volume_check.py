# SPDX-License-Identifier: Apache-2.0

"""The checker checks volumes, their journals and their recipes."""

import os
import socket
import struct

import hypothesis
from hypothesis import strategies
import pytest

from glance_dedup.check import checker
from glance_dedup.check import ondisk
from glance_dedup.check import record_table
from glance_dedup.check import volume_check
from glance_dedup.check import volume_reader
from tests.support import volume_writer
from tests.support.volume_writer import PART
from tests.unit.check import fixtures
from tests.unit.check.fixtures import DAMAGE
from tests.unit.check.fixtures import look
from tests.unit.check.fixtures import noise
from tests.unit.check.fixtures import NOTE
from tests.unit.check.fixtures import patch
from tests.unit.repository import format_writer

no_pause = fixtures.no_pause
group = fixtures.group

BASE = [('zeros', 2 * PART)]


@pytest.fixture
def repository(tmp_path):
    return format_writer.Repository(tmp_path / 'repository',
                                    features=('volumes',))


@pytest.fixture
def volume(repository):
    """A volume without journals."""
    return volume_writer.Volume(repository.path, repository.repository_id)


@pytest.fixture
def whole(repository, volume, group):
    """Two journals of a clone, with editions of two parts."""
    repository.image(volume.recipe(None), BASE)
    repository.image(volume.recipe(1, 4), [(group, 0, 5), ('zeros', 1000)])
    repository.image(volume.recipe(3, 1), [('zeros', PART)])
    first = volume.journal(4, needed=4, marks={1: 3}, base_size=2 * PART)
    first.data(0, noise(1)).data(PART - 256, noise(2)).zeros(5, PART)
    first.save()
    second = volume.journal(5, needed=4, before=first.end, marks={1: 3},
                            base_size=2 * PART)
    second.data(7, b'x').mark(1, 4).mark(3, 1)
    second.data(4 * PART - 65536, noise(3, 65536))
    second.save()
    return first, second


def rewritten(journal, **fields):
    """Write the same journal, valid, with other fields in its head."""
    journal.fields.update(fields)
    return journal.save()


def only(repository, severity=DAMAGE):
    """Return the single finding of this severity; there is no other one."""
    report = checker.check(repository.path)
    assert [f.severity for f in report.findings] == [severity], (
        report.findings)
    found = report.findings[0]
    if severity == DAMAGE:
        assert report.damaged_volumes == ['disk']
        assert found.volumes == ('disk',)
    else:
        assert report.ok and not report.damaged_volumes
    return found


def clean(repository):
    report = checker.check(repository.path)
    assert report.findings == []
    return report


# -- sound volumes ------------------------------------------------------------

def test_whole(repository, whole):
    report = clean(repository)
    assert report.figures['volumes'] == 1
    assert report.figures['volumes_in_use'] == 0
    assert report.figures['images'] == 0
    assert report.figures['journal_bytes'] == sum(
        journal.path.stat().st_size for journal in whole)
    assert report.figures['blocks_verified'] == 12


def test_empty_volume(repository, volume):
    volume.journal().save()
    clean(repository)


def test_progress(repository, whole):
    seen = []
    checker.check(repository.path, lambda *args: seen.append(args))
    sizes = sum(journal.path.stat().st_size for journal in whole)
    assert any(what.startswith('volumes/disk/journal') for *_, what in seen)
    assert max(total for _, total, _ in seen) >= sizes
    assert all(done <= total for done, total, _ in seen)


def test_many_marks(repository, volume):
    """Marks may fill several pages."""
    parts = range(0, 1000, 2)
    for part in parts:
        repository.image(volume.recipe(part, part + 1), [])
    volume.journal(size=1000 * PART, marks={p: p + 1 for p in parts}
                   ).data(999 * PART, b'end').save()
    clean(repository)


def test_what_lies_behind_the_end_means_nothing(repository, volume):
    """Torn records behind the journal's end are no damage."""
    journal = volume.journal().data(0, noise(1)).data(512, noise(2))
    journal.data(0, noise(3), durable=journal.ends[1]).save()
    patch(journal.path, journal.ends[1] + 60, b'torn')
    clean(repository)


def test_records_that_others_wrote(repository, volume):
    """A guest may write bytes that look like a record of another journal."""
    other = volume.journal(9).data(0, noise(1)).data(0, noise(2))
    journal = volume.journal()
    journal.data(0, other.records).save()
    patch(journal.path, journal.start, b'torn')
    clean(repository)


def test_a_shrunk_volume(repository, volume):
    """Records and recipes beyond the volume's new end are no damage."""
    repository.image(volume.recipe(1, 1), [('zeros', PART)])
    repository.image(volume.recipe(None), BASE)
    first = volume.journal(base_size=2 * PART).data(3 * PART, b'x').save()
    volume.journal(2, needed=1, before=first.end, size=PART + 512,
                   base_size=PART + 512, marks={1: 1}).save()
    clean(repository)


# -- the directory ------------------------------------------------------------

def test_names_and_modes(repository, volume):
    volume.journal().save()
    volume.write(volume.directory / 'journal.new', b'anything')
    volume.write(volume.directory / 'journal.new.0123456789abcdef', b'')
    volume.write(volume.directory / 'journal-00000000', b'')
    volume.write(volume.directory / 'else', b'')
    volume.write(volume.lock, b'x')
    (volume.directory / 'control').mkdir()
    os.chmod(volume.directory / 'journal-00000001', 0o640)
    os.chmod(volume.directory, 0o755)
    (volume.directory.parent / 'not a name').mkdir(mode=0o700)
    volume.write(volume.directory.parent / 'file', b'')
    found, report = look(repository, NOTE)
    assert {(f.file, f.sentence) for f in found} == {
        ('volumes/disk', 'has mode 0755 instead of 0700'),
        ('volumes/disk/control', 'is not a regular file'),
        ('volumes/disk/journal.new', 'has 8 bytes, and is not needed any '
         'more: the next owner removes it'),
        ('volumes/disk/journal.new.0123456789abcdef', 'has 0 bytes, and is '
         'not needed any more: the next owner removes it'),
        ('volumes/disk/else', 'has an unknown name'),
        ('volumes/disk/journal-00000000', 'has an unknown name'),
        ('volumes/disk/journal-00000001', 'has mode 0640 instead of 0600'),
        ('volumes/disk/lock', 'has content; it should only carry locks'),
        ('volumes/file', 'is no directory of a volume: Not a directory'),
        ('volumes/not a name', 'has an unknown name')}
    size = (volume.directory / 'journal-00000001').stat().st_size
    assert report.figures['journal_bytes'] == size + len('anything')


def test_control_socket(repository, volume):
    volume.journal().save()
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(f'/proc/self/fd/{os.open(volume.directory, os.O_PATH)}/control')
    clean(repository)


def test_no_lock(repository, volume):
    volume.journal().save()
    volume.lock.unlink()
    found = only(repository)
    assert found.file == 'volumes/disk/lock'
    assert 'make an empty file' in found.sentence


@pytest.mark.parametrize('state, word', [
    (volume_writer.MAKING, 'making'), (volume_writer.DELETING, 'deleting')])
def test_unfinished(repository, volume, state, word):
    """An unfinished volume gives one note, with or without its recipes."""
    repository.image(volume.recipe(2, 1), [])
    volume.journal(state=state, base_size=PART, marks={1: 1}).save()
    found = only(repository, NOTE)
    assert found.file == 'volumes/disk'
    assert f'in the state {word}' in found.sentence
    assert 'next collection removes it' in found.sentence
    with volume_writer.owning(volume):
        clean(repository)


def test_no_journal(repository, volume):
    found = only(repository, NOTE)
    assert found.file == 'volumes/disk'
    assert 'has no journal' in found.sentence
    volume.lock.unlink()
    assert 'has no journal' in only(repository, NOTE).sentence


def test_what_an_owner_has_yet_to_remove(repository, whole):
    first, second = whole
    volume = first.volume
    repository.image(volume.recipe(1, 3), [])
    volume.journal(3).save()
    found, _ = look(repository, NOTE)
    assert {(f.file, f.sentence.partition(':')[0]) for f in found} == {
        ('volumes/disk/journal-00000003', 'is not needed any more'),
        (f'images/{volume.recipe(1, 3)}',
         'is a recipe of volume disk without a mark')}
    with volume_writer.owning(volume):
        assert clean(repository).figures['volumes_in_use'] == 1


def test_recipes_of_no_volume(repository, volume):
    name = volume.recipe(0, 1)
    repository.image(name, [])
    volume.lock.unlink()
    volume.directory.rmdir()
    found = only(repository, NOTE)
    assert found.file == f'images/{name}'
    assert f'glance-dedup image delete {name} removes it' in found.sentence


def test_recipes_of_a_volume_that_cannot_be_read(repository, whole):
    """The checker does not call the recipes of a damaged volume removable."""
    whole[1].path.write_bytes(bytes(4096))
    found, report = look(repository, NOTE)
    assert {f.sentence for f in found} == {'is of no volume that can be read'}
    assert report.damaged_volumes == ['disk']


def test_a_copied_directory(repository, volume):
    volume.journal().save()
    copy = volume_writer.Volume(repository.path, repository.repository_id,
                                'two')
    copy.journal(volume_id=volume.id).save()
    found, report = look(repository)
    assert [f.file for f in found] == ['volumes/two']
    assert 'same id as volume disk' in found[0].sentence
    assert report.damaged_volumes == ['two']


# -- heads --------------------------------------------------------------------

@pytest.mark.parametrize('offset', [0, 5, 12, 16, 32, 48, 64, 72, 88, 96, 136,
                                    400, 4000, 4088, 4095])
@pytest.mark.parametrize('which', [0, 1])
def test_a_byte_of_a_head(repository, whole, which, offset):
    journal = whole[which]
    content = journal.path.read_bytes()
    patch(journal.path, offset, bytes([content[offset] ^ 0x10]))
    found = look(repository)[0]
    assert found[0].file == journal.file
    assert 'restored from a backup' in found[0].sentence


@pytest.mark.parametrize('fields, offset', [
    ({'number': 2}, 12), ({'repository_id': bytes(16)}, 16),
    ({'volume_id': bytes(16)}, 32), ({'scope': b'x' * 16}, 48),
    ({'size': 0}, 72), ({'size': 513}, 72), ({'size': (1 << 46) + 512}, 72),
    ({'base_size': 4 * PART + 1}, 80), ({'part_size': PART // 2}, 88),
    ({'part_size': 3 * PART}, 88), ({'part_size': 1 << 41}, 88),
    ({'state': 0}, 96), ({'state': 4}, 96), ({'needed': 2}, 100),
    ({'needed': 0}, 100), ({'before': 4096}, 104), ({'marks': 5}, 120),
    ({'before_durable': 8}, 520),
    ({'marks': 0xffffffff}, 120), ({'major': 2}, 8), ({'major': 0}, 8),
    ({'project': b'\xff', 'scope': bytes(16)}, 136),
    ({'project_length': 129}, 136), ({'project': b'ab', 'project_length': 1},
                                     136),
    ({'source': b'not/an/id'}, 264), ({'source': b'a\0b'}, 264),
    ({'magic': b'GDGROUP'}, 0)])
def test_a_field_of_a_head(repository, volume, fields, offset):
    journal = volume.journal()
    rewritten(journal, **fields)
    found = only(repository)
    assert (found.file, found.offset) == (journal.file, offset)


@pytest.mark.parametrize('fields', [
    {'size': 512}, {'size': 1 << 46, 'part_size': 1 << 40}, {'minor': 7},
    {'project': 'größe'.encode(), 'source': b'an-image'}])
def test_good_fields(repository, volume, fields):
    rewritten(volume.journal(), **fields)
    clean(repository)


def test_needed_and_before_contradict(repository, volume):
    volume.journal().save()
    journal = volume.journal(2, needed=2, before=4096).save()
    assert only(repository).offset == 104
    rewritten(journal, needed=1, before=4097)
    assert only(repository).offset == 104


def test_an_end_that_was_not_durable(repository, volume):
    first = volume.journal().data(0, noise(1)).data(512, noise(2))
    first.data(0, noise(3)).data(512, noise(4)).save()
    volume.journal(2, needed=1, before=0).data(0, noise(5)).save()
    clean(repository)
    os.truncate(first.path, first.end - 8)
    clean(repository)
    patch(first.path, first.ends[1] + 20, b'\xee')
    assert only(repository).offset == first.ends[1]


@pytest.mark.parametrize('fields, offset', [
    ({'volume_id': b'y' * 16}, 32), ({'part_size': 2 * PART}, 88)])
def test_journals_of_two_volumes(repository, whole, fields, offset):
    rewritten(whole[0], **fields)
    found = only(repository)
    assert (found.file, found.offset) == (whole[0].file, offset)


def test_needed_does_not_fall(repository, volume):
    one = volume.journal(1).save()
    two = volume.journal(2, needed=2).save()
    volume.journal(3, needed=1, before=two.end).save()
    found, _ = look(repository)
    assert ('volumes/disk/journal-00000002', 100) in {
        (f.file, f.offset) for f in found}
    assert one.path.exists()


@pytest.mark.parametrize('which', [0, 1])
def test_a_missing_journal(repository, volume, which):
    one = volume.journal(1).save()
    two = volume.journal(2, needed=1, before=one.end).save()
    volume.journal(3, needed=1, before=two.end).save()
    (one, two)[which].path.unlink()
    found = only(repository)
    assert found.file == (one, two)[which].file
    assert found.sentence.startswith('is missing;')


def test_billions_of_missing_journals(repository, volume):
    volume.journal(0xffffffff, needed=1, before=4096).save()
    found = only(repository)
    assert found.file == 'volumes/disk/journal-00000001'
    assert 'as are 4294967293 later ones' in found.sentence


def test_a_link_for_a_journal(repository, volume):
    journal = volume.journal().save()
    journal.path.rename(repository.path / 'aside')
    journal.path.symlink_to(repository.path / 'aside')
    found, _ = look(repository)
    assert 'is a symbolic link' in found[0].sentence


# -- marks --------------------------------------------------------------------

@pytest.mark.parametrize('offset, data', [
    (4096, b'\2'), (4104, b'\0'), (4112, b'\0'), (4128, b'\1'), (8191, b'x')])
def test_bytes_of_marks(repository, volume, offset, data):
    repository.image(volume.recipe(1, 4), [])
    repository.image(volume.recipe(3, 1), [])
    journal = volume.journal(marks={1: 4, 3: 1}).save()
    patch(journal.path, offset, data)
    found = look(repository)[0]
    assert found and found[0].file == journal.file


def test_marks_cut_off(repository, volume):
    repository.image(volume.recipe(1, 4), [])
    journal = volume.journal(marks={1: 4}).save()
    for size in (4096, 4100, 4112, 8191):
        journal.path.write_bytes(journal.content()[:size])
        found = look(repository)[0][0]
        assert (found.file, found.offset) == (journal.file, size)


def test_marks_of_a_hostile_size(repository, volume):
    """A huge number of marks takes no memory."""
    journal = volume.journal(size=1 << 46, marks={})
    rewritten(journal, marks=1 << 30)
    assert only(repository).offset == 4096


# -- records ------------------------------------------------------------------

@pytest.mark.parametrize('behind', [0, 3, 8, 20, 40, 54, 56, 500])
def test_lost_before_what_was_durable(repository, volume, behind):
    journal = volume.journal().data(0, noise(1)).data(512, noise(2))
    journal.data(0, noise(3)).save()
    at = journal.ends[1]
    patch(journal.path, at + behind, b'\xee')
    found = only(repository)
    assert (found.file, found.offset) == (journal.file, at)
    assert f'the record at {journal.ends[2]} says' in found.sentence
    assert 'acknowledged are lost' in found.sentence


def test_the_last_record_may_be_torn(repository, volume):
    journal = volume.journal().data(0, noise(1)).data(512, noise(2)).save()
    patch(journal.path, journal.ends[1] + 100, b'\xee')
    clean(repository)


def test_lost_in_a_frozen_journal(repository, whole):
    first, _ = whole
    patch(first.path, first.ends[2] + 16, b'\xee')
    found = only(repository)
    assert (found.file, found.offset) == (first.file, first.ends[2])
    assert f'up to {first.end}:' in found.sentence


def test_a_frozen_journal_that_was_cut(repository, whole):
    first, _ = whole
    os.truncate(first.path, first.ends[1])
    assert only(repository).offset == first.ends[1]


def test_an_end_inside_a_record(repository, whole):
    first, second = whole
    rewritten(second, before=first.end - 8)
    found = only(repository)
    assert (found.file, found.offset) == (first.file, first.end)


def test_a_frozen_journal_ends_where_the_next_says(repository, whole):
    first, _ = whole
    first.data(0, b'not read').save()
    clean(repository)


@pytest.fixture
def unsynced(repository, volume, group):
    """Two journals, of which the second was begun before the first was synced.

    The marks of the second one's records name a recipe that is missing.
    """
    repository.image(volume.recipe(1, 4), [(group, 0, 5), ('zeros', 1000)])
    first = volume.journal(1, marks={1: 4})
    first.data(0, noise(1), durable=first.start)
    first.data(512, noise(2), durable=first.ends[1]).data(
        5, noise(3), durable=first.ends[1]).save()
    second = volume.journal(2, needed=1, before=first.end, marks={1: 4},
                            before_durable=first.ends[2])
    second.data(7, b'x', durable=second.start).mark(
        1, 5, durable=second.start).save()
    return first, second


def test_whole_without_a_sync(repository, unsynced):
    _, second = unsynced
    assert only(repository).file == f'images/{second.volume.recipe(1, 5)}'


def test_torn_and_not_durable(repository, unsynced):
    """The later journal's head counts, and its records do not."""
    first, _ = unsynced
    patch(first.path, first.ends[2] + 70, b'\xee')
    clean(repository)
    os.truncate(first.path, first.ends[2])
    clean(repository)


def only_loss(repository):
    """The one journal with a loss; the recipe is missing besides."""
    found, missing = checker.check(repository.path).findings
    assert missing.file.startswith('images/')
    return found


def test_torn_before_what_the_next_head_knows(repository, unsynced):
    first, _ = unsynced
    patch(first.path, first.ends[1] + 70, b'\xee')
    found = only_loss(repository)
    assert (found.file, found.offset) == (first.file, first.ends[1])
    assert f'up to {first.ends[2]}:' in found.sentence


def test_torn_before_a_head_that_needs_all(repository, unsynced):
    first, second = unsynced
    rewritten(second, before_durable=0)
    patch(first.path, first.ends[2] + 70, b'\xee')
    found = only_loss(repository)
    assert (found.file, found.offset) == (first.file, first.ends[2])
    assert f'up to {first.end}:' in found.sentence


def test_torn_before_what_its_own_records_prove(repository, unsynced):
    first, second = unsynced
    rewritten(second, before_durable=first.start)
    patch(first.path, first.ends[1] + 70, b'\xee')
    clean(repository)
    patch(first.path, first.ends[0] + 70, b'\xee')
    assert only(repository).offset == first.ends[0]


@pytest.mark.parametrize('where', [1, 2])
def test_torn_before_what_the_next_records_prove(repository, unsynced, where):
    """A durable offset in the middle of a record proves nothing."""
    first, second = unsynced
    patch(first.path, first.ends[2] + 70, b'\xee')
    second.data(9, b'y', durable=second.ends[where] - 8).save()
    clean(repository)
    second.data(9, b'y', durable=second.ends[where]).save()
    found = only_loss(repository)
    assert (found.file, found.offset) == (first.file, first.ends[2])
    assert f'up to {first.end}:' in found.sentence


@pytest.mark.parametrize('how', [
    lambda j: j.data(4 * PART - 4, b'12345'),
    lambda j: j.data(1 << 63, b'12345'),
    lambda j: j.append(volume_writer.DATA, 0, 65537, bytes(65537)),
    lambda j: j.append(volume_writer.DATA, 0, 0),
    lambda j: j.append(volume_writer.DATA, 0, 1 << 60),
    lambda j: j.zeros(0, 4 * PART + 1), lambda j: j.zeros(5, 0),
    lambda j: j.append(5, 0, 1), lambda j: j.append(0, 0, 1),
    lambda j: j.append(4, 0, 1), lambda j: j.append(4, 1, 0),
    lambda j: j.mark(4, 1), lambda j: j.mark(0, 0),
    lambda j: j.data(0, b'x', durable=j.end + 8),
    lambda j: j.data(0, b'x', sequence=3),
    lambda j: j.data(0, b'x', sequence=1)])
def test_a_record_out_of_bounds_is_no_record(repository, volume, how):
    journal = volume.journal().data(0, b'good')
    how(journal).save()
    clean(repository)
    sequence = journal.sequence
    journal.data(0, b'later', sequence=sequence + 1).save()
    assert only(repository).offset == journal.ends[1]


def test_marks_among_the_records(repository, whole):
    """The last mark of a part counts, if it is in the newest journal."""
    first, second = whole
    second.mark(1, 5).save()
    found = only(repository)
    assert found.file == f'images/{second.volume.recipe(1, 5)}'
    second.mark(1, 4).save()
    clean(repository)


def test_journals_that_are_stored(repository, whole):
    """A journal that is stored may exist, be absent or be damaged."""
    first, second = whole
    second.stored().data(0, b'later').save()
    note = only(repository, NOTE)
    assert (note.file, note.sentence) == (
        first.file, 'is not needed any more: the next owner removes it')
    first.path.write_bytes(b'')
    assert only(repository, NOTE) == note
    first.path.unlink()
    clean(repository)


def test_that_journals_are_stored_says_the_newest(repository, volume):
    first = volume.journal().data(0, b'x').save()
    second = volume.journal(2, needed=1, before=first.end).stored().save()
    first.path.unlink()
    clean(repository)
    volume.journal(3, needed=2, before=second.end).save()
    clean(repository)
    volume.journal(3, needed=1, before=second.end).save()
    found, _ = look(repository)
    assert {f.file for f in found} == {first.file}


def test_marks_of_frozen_journals_mean_nothing(repository, volume):
    first = volume.journal().mark(0, 9).save()
    volume.journal(2, needed=1, before=first.end).save()
    clean(repository)


def test_holes_of_a_hostile_size(repository, volume):
    journal = volume.journal().data(0, noise(1)).save()
    os.truncate(journal.path, 1 << 40)
    clean(repository)


def test_old_records_are_not_hashed(repository, volume, monkeypatch):
    """A recycled journal may have a record of the one before every 56 bytes.

    A later record that proves nothing, or has an earlier sequence, is passed
    over by its fields.
    """
    journal = volume.journal().data(0, noise(1)).zeros(0, 5)
    for i in range(50):
        journal.zeros(0, 5, durable=0)
    journal.save()
    patch(journal.path, journal.ends[1], b'????')
    hashed = []
    real = ondisk.xxh3

    def count(*args):
        hashed.append(args)
        return real(*args)
    monkeypatch.setattr(ondisk, 'xxh3', count)
    clean(repository)
    assert len(hashed) < 40


def test_a_proof_in_a_later_piece(repository, volume, monkeypatch):
    """The checker finds the proof in any of the pieces that it reads."""
    monkeypatch.setattr(volume_reader, '_PIECE', 64)
    journal = volume.journal().data(0, noise(1)).zeros(0, 5)
    journal.data(0, noise(3, 2048), durable=0)
    for i in range(9):
        journal.zeros(0, 5, durable=0)
    journal.zeros(0, 7).save()
    patch(journal.path, journal.ends[1], b'????')
    found = only(repository)
    assert found.offset == journal.ends[1]
    assert str(journal.ends[-2]) in found.sentence


def test_a_torn_record_proves_what_lies_before(repository, volume):
    """A record's head proves how far the journal was durable.

    The record's own bytes may be torn.
    """
    journal = volume.journal().data(0, noise(1)).zeros(0, 5)
    journal.data(0, noise(3, 2048)).save()
    patch(journal.path, journal.ends[3] - 8, b'????')
    clean(repository)
    patch(journal.path, journal.ends[1] + 4, b'????')
    assert only(repository).offset == journal.ends[1]


# -- recipes ------------------------------------------------------------------

def test_a_damaged_volume_is_not_said_to_have_garbage(repository, whole):
    first, second = whole
    patch(second.path, second.ends[1], b'????')
    assert only(repository).file == second.file


def path_of(repository, name):
    return repository.path / 'images' / name


@pytest.mark.parametrize('recipe, what', [
    ((None,), 'the base'), ((1, 4), 'part 1'), ((3, 1), 'part 3')])
def test_a_missing_recipe(repository, whole, recipe, what):
    name = whole[0].volume.recipe(*recipe)
    path_of(repository, name).unlink()
    found = only(repository)
    assert found.file == f'images/{name}'
    assert found.sentence.startswith(f'is missing: it has {what};')


def test_a_damaged_recipe_is_told_once(repository, whole):
    name = whole[0].volume.recipe(3, 1)
    patch(path_of(repository, name), 100, b'?')
    report = checker.check(repository.path)
    found, = report.findings
    assert (found.file, found.images, found.volumes) == (
        f'images/{name}', (), ('disk',))
    assert (report.damaged_images, report.damaged_volumes) == ([], ['disk'])


def test_a_damaged_block(repository, group, whole):
    """A damaged block names its volume, not the recipe."""
    patch(group.path, group.data_start + 40, b'????')
    report = checker.check(repository.path)
    assert not report.ok
    assert (report.damaged_images, report.damaged_volumes) == ([], ['disk'])


def test_a_recipe_that_is_too_long(repository, volume):
    name = volume.recipe(0, 1)
    repository.image(name, [('zeros', PART + 1)])
    volume.journal(marks={0: 1}).save()
    found = only(repository)
    assert (found.file, found.offset) == (f'images/{name}', 80)


def test_a_base_that_is_too_short(repository, volume):
    name = volume.recipe(None)
    repository.image(name, [('zeros', PART)])
    volume.journal(base_size=PART + 1).save()
    found = only(repository)
    assert (found.file, found.offset) == (f'images/{name}', 80)


def test_a_recipe_of_another_scope(repository, volume):
    name = volume.recipe(0, 1)
    project = b'project'
    repository.image(name, [], project='project')
    volume.journal(marks={0: 1}, project=project,
                   scope=volume_writer.hashlib.sha256(
                       b'glance-dedup scope\0project').digest()[:16]).save()
    found = only(repository)
    assert (found.file, found.offset) == (f'images/{name}', 32)


# -- in use -------------------------------------------------------------------

def test_an_owner_at_work(repository, whole, monkeypatch):
    """Files that a checkpoint removes during the check are no damage."""
    first, second = whole
    volume = first.volume
    looks = []

    class Look(volume_check._Look):
        def run(self):
            looks.append(self)
            super().run()

        def _read_head(self, number):
            if first.path.exists():
                # A checkpoint ends when its journals are listed.
                repository.image(volume.recipe(1, 5), [])
                volume.journal(6, marks={1: 5, 3: 1}, base_size=2 * PART
                               ).save()
                for gone in (first.path, second.path, path_of(
                        repository, volume.recipe(1, 4))):
                    gone.unlink()
            return super()._read_head(number)

    monkeypatch.setattr(volume_check, '_Look', Look)
    report = checker.check(repository.path)
    assert [f for f in report.findings if f.severity == DAMAGE] == []
    assert len(looks) == 2


def test_a_volume_that_is_deleted_meanwhile(repository, volume, monkeypatch):
    volume.journal().save()
    run = volume_check._Look.run

    def delete(self):
        if volume.directory.exists():
            for path in volume.directory.iterdir():
                path.unlink()
            volume.directory.rmdir()
        run(self)

    monkeypatch.setattr(volume_check._Look, 'run', delete)
    assert clean(repository).figures['volumes'] == 0


def test_editions_beyond_memory(repository, volume, monkeypatch):
    monkeypatch.setattr(record_table, 'LIMIT', 1000)
    monkeypatch.setattr(record_table, 'BATCH', 500)
    for part in range(20):
        repository.image(volume.recipe(part, 1), [])
    volume.journal(size=20 * PART, marks=dict.fromkeys(range(20), 1)).save()
    clean(repository)
    path_of(repository, volume.recipe(17, 1)).unlink()
    assert only(repository).file == f'images/{volume.recipe(17, 1)}'


# -- hostile bytes ------------------------------------------------------------

changes = strategies.lists(strategies.tuples(
    strategies.integers(0, 1 << 14), strategies.binary(
        min_size=1, max_size=80)), max_size=8)


@hypothesis.settings(
    max_examples=60, deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(which=strategies.integers(0, 1), changes=changes,
                  size=strategies.integers(0, 20000) | strategies.none(),
                  checksum=strategies.booleans())
def test_any_bytes(repository, whole, which, changes, size, checksum):
    """For any bytes the checker ends and reports only findings."""
    for journal in whole:
        journal.save()
    path = whole[which].path
    for at, data in changes:
        patch(path, at, data)
    if checksum:
        head = path.read_bytes()[:4088]
        patch(path, 4088, struct.pack('<Q', volume_writer.xxh3(head)))
    if size is not None:
        os.truncate(path, size)
    for finding in checker.check(repository.path).findings:
        assert str(finding)


@hypothesis.settings(
    max_examples=60, deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(content=strategies.binary(max_size=6000),
                  start=strategies.sampled_from([b'', b'GDVOLJ\0\0\1\0\0\0']))
def test_random_bytes(repository, volume, content, start):
    volume.write(volume.directory / 'journal-00000001', start + content)
    found = only(repository)
    assert found.file == 'volumes/disk/journal-00000001'
