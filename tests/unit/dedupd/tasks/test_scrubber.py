# SPDX-License-Identifier: Apache-2.0

"""Scrubbing, healing, lost recipes and spare copies, in real repositories."""

import contextlib
import json
import os
import pathlib
import signal
import time
import types

import pytest
import xxhash

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import task
from glance_dedup.check import checker
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import BLOCK
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import DAMAGED
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.repository import format_writer

pytest_plugins = ['tests.support.maintainer_fixtures']


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(checker, 'PAUSE', 0)


def scrub(maintainer, full=True, **options):
    return scrubber.run_once(maintainer, task.Pace(), full=full, **options)


def collect(maintainer):
    return collector.run_once(maintainer, task.Pace(), live_share=0,
                              evacuate_share=0)


def place_of(path, address):
    """Where in its group's file a block's first byte is, without codec."""
    group, slot = address
    file = repositories.Group(path, group)
    _, _, segment, place = file.entry(slot)
    return file.path, segment + 32 + (place & 0xfffff)


def flip(file, at):
    with open(file, 'r+b') as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 0x40]))


def damage(path, address):
    flip(*place_of(path, address))


def ruin(file, at):
    with open(file, 'r+b') as f:
        f.seek(at)
        f.write(b'\xff' * 64)


def state_of(path, address):
    return repositories.Group(path, address[0]).state(address[1])


def started(maintainer):
    """When the pass began that is under way."""
    state = maintainer.catalog.scrub_state()
    return None if state['complete'] else state['started']


def in_use(path, address):
    """As a transaction that names blocks of the group."""
    return repositories.holding(
        path / 'locks' / 'groups', repositories.SHARE_BYTE + address[0],
        shared=True)


def packed(address):
    return address[0] << 15 | address[1]


def findings(path, severity=checker.DAMAGE):
    return [str(f) for f in checker.check(path).findings
            if f.severity == severity]


# -- what is good -------------------------------------------------------------

def test_good_repository(maintainer, path, other):
    put(other, 'one', content(1, 2))
    put(other, 'two', content(2, 3) + bytes(9999))
    result = scrub(maintainer)
    assert result.blocks == 30
    assert result.bytes > 30 * BLOCK
    assert result.complete
    assert (result.damaged, result.healed, result.images,
            result.quarantined, result.busy, result.worn,
            result.unreadable) == (0, 0, [], [], 0, 0, {})
    assert os.listdir(path / 'quarantine') == []


def test_empty_repository(maintainer):
    assert scrub(maintainer).complete


# -- what is damaged ----------------------------------------------------------

def test_damaged_block(maintainer, path, repo, other):
    put(other, 'one', content(1, 2))
    put(other, 'two', content(2))
    put(other, 'three', content(3))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'two')[5]
    file, at = place_of(path, bad)
    damage(path, bad)
    before = file.read_bytes()
    result = scrub(maintainer)
    assert (result.damaged, result.healed, result.busy) == (1, 0, 0)
    assert result.images == ['one', 'two']
    assert result.complete
    # Marked, and not one block more.
    assert state_of(path, bad) == DAMAGED
    assert [state for group in maintenance.groups(path)
            for state in maintenance.states(path, group)].count(DAMAGED) == 1
    # The stored bytes are kept as they were found.
    [name] = result.quarantined
    segment = repositories.Group(path, bad[0]).entry(bad[1])[2]
    kept = (path / name).read_bytes()
    assert kept == before[segment:segment + len(kept)]
    assert segment < at < segment + len(kept)
    # It is known by whom it is needed.
    [(address, facts)] = maintainer.catalog.damaged().items()
    assert address == packed(bad)
    assert facts['images'] == ['one', 'two']
    assert facts['quarantine'] == name
    assert facts['fingerprint'] == repositories.Group(
        path, bad[0]).entry(bad[1])[0].hex()
    assert maintainer.catalog.damaged_images() == {'one', 'two'}
    # Never data, and the others are whole.
    for image_id in ('one', 'two'):
        with pytest.raises(exceptions.DamagedError, match=image_id):
            read_all(other, image_id)
    assert read_all(other, 'three') == content(3)
    # Told once; and it stays damage, whoever found it.
    again = scrub(maintainer)
    assert (again.damaged, again.found, again.quarantined) == (1, 0, [])
    assert again.images == ['one', 'two']


def test_lookups_do_not_find_a_damaged_block(maintainer, path, repo, other):
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[3]
    damage(path, bad)
    scrub(maintainer)
    # The fingerprint store is cached by this handle, and has it still.
    put(other, 'two', content(1))
    blocks = maintenance.blocks_of(repo, 'two')
    assert bad not in blocks
    assert set(blocks) - set(maintenance.blocks_of(repo, 'one')) == {
        blocks[3]}
    assert read_all(other, 'two') == content(1)


def test_healing_by_a_later_upload(maintainer, path, repo, other):
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[3]
    damage(path, bad)
    assert scrub(maintainer).images == ['one']
    put(other, 'two', content(1))
    result = scrub(maintainer)
    assert (result.healed, result.images) == (1, [])
    assert read_all(other, 'one') == content(1)
    assert bad not in maintenance.blocks_of(repo, 'one')
    # With the last recipe that names it the mark goes.
    assert maintainer.catalog.damaged() == {}
    maintenance.need_counted(maintainer)
    assert scrub(maintainer).healed == 0
    # And with the next collection the slot.
    collect(maintainer)
    assert state_of(path, bad) == repositories.FREED
    maintainer.close()
    assert findings(path) == []


def test_healing_by_the_index(maintainer, path, repo, other):
    """No pass is needed where the exact index knows the copy."""
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[3]
    damage(path, bad)
    scrub(maintainer)
    put(other, 'two', content(1))
    merger.run_once(maintainer, task.Pace())
    result = scrub(maintainer, budget_bytes=0)
    assert not result.complete
    assert (result.healed, result.images) == (1, [])
    assert read_all(other, 'one') == content(1)


def test_a_copy_that_is_damaged_too_heals_nothing(
        maintainer, path, repo, other):
    put(other, 'one', content(1))
    account(maintainer)
    damage(path, maintenance.blocks_of(repo, 'one')[3])
    scrub(maintainer)
    put(other, 'two', content(1))
    damage(path, maintenance.blocks_of(repo, 'two')[3])
    result = scrub(maintainer)
    assert (result.healed, result.damaged, result.found) == (0, 2, 1)
    assert result.images == ['one', 'two']
    put(other, 'three', content(1))
    result = scrub(maintainer)
    assert (result.healed, result.damaged, result.images) == (2, 2, [])
    assert scrub(maintainer).damaged == 0
    for image_id in ('one', 'two', 'three'):
        assert read_all(other, image_id) == content(1)


def test_a_copy_in_the_index_is_verified(maintainer, path, repo, other):
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[3]
    damage(path, bad)
    scrub(maintainer)
    put(other, 'two', content(1))
    merger.run_once(maintainer, task.Pace())
    damage(path, maintenance.blocks_of(repo, 'two')[3])
    assert scrub(maintainer, budget_bytes=0).healed == 0
    assert bad in maintenance.blocks_of(repo, 'one')


def test_a_reader_keeps_the_mark(maintainer, path, repo, other):
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[3]
    damage(path, bad)
    scrub(maintainer)
    put(other, 'two', content(1))
    with other.open_image('one'):
        assert scrub(maintainer).healed == 1
        assert list(maintainer.catalog.damaged()) == [packed(bad)]
    result = scrub(maintainer)
    account(maintainer)
    result = scrub(maintainer)
    assert (result.healed, maintainer.catalog.damaged()) == (0, {})


def test_deleting_the_images_forgets_the_damage(
        maintainer, path, repo, other):
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[3]
    damage(path, bad)
    scrub(maintainer)
    other.delete('one')
    account(maintainer)
    result = scrub(maintainer)
    assert (result.images, result.healed) == ([], 1)
    collect(maintainer)
    assert maintainer.catalog.damaged() == {}
    assert maintenance.live_slots(path) == set()


@pytest.mark.parametrize('at', range(0, 32, 5))
def test_damaged_segment_header(maintainer, path, repo, other, at):
    """All blocks of the segment, or none."""
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[4]
    file, start = place_of(path, bad)
    flip(file, start - 32 + at)
    result = scrub(maintainer)
    if at in (5, 20, 25, 30):       # reserved, and its checksum
        assert (result.damaged, result.worn, result.images) == (0, 4, [])
        assert read_all(other, 'one') == content(1)
    else:
        assert (result.damaged, result.worn) == (4, 0)
        assert len(result.quarantined) == 1
        assert result.images == ['one']


def test_worn_neighbours(maintainer, path, repo, other):
    put(other, 'one', content(1))
    account(maintainer)
    damage(path, maintenance.blocks_of(repo, 'one')[4])
    result = scrub(maintainer)
    assert (result.damaged, result.worn) == (1, 3)
    other.delete('one')
    account(maintainer)
    collect(maintainer)
    assert scrub(maintainer).worn == 0


def test_invalid_entry(maintainer, path, repo, other):
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[4]
    flip(repositories.group_path(path, bad[0]),
         repositories.Group.entry_offset(bad[1]) + 54)
    result = scrub(maintainer)
    assert (result.damaged, result.images, result.busy) == (1, ['one'], 0)
    assert result.quarantined == []
    assert list(maintainer.catalog.damaged()) == [packed(bad)]
    assert scrub(maintainer).damaged == 1
    # Its fingerprint is still good, as the recipe's digest says.
    put(other, 'two', content(1))
    result = scrub(maintainer)
    assert (result.healed, result.images) == (1, [])
    assert read_all(other, 'one') == content(1)


def test_bad_group_does_not_stop_the_pass(maintainer, path, repo, other):
    for number in range(4):
        put(other, f'image-{number}', content(number, blocks=60))
    account(maintainer)
    groups = maintenance.groups(path)
    assert len(groups) == 4
    flip(repositories.group_path(path, groups[1]), 20)
    os.unlink(repositories.group_path(path, groups[2]))
    last = maintenance.blocks_of(repo, 'image-3')[-1]
    damage(path, last)
    hit = [{f'image-{n}' for n in range(4) if any(
        group == which for group, _ in maintenance.blocks_of(
            repo, f'image-{n}'))} for which in groups]
    result = scrub(maintainer)
    assert result.complete
    assert set(result.unreadable) == {
        f'groups/{groups[1]:08x}', f'groups/{groups[2]:08x}'}
    assert result.damaged == 1
    assert set(result.images) == hit[1] | hit[2] | {'image-3'}
    assert maintainer.catalog.damaged_images() == set(result.images)


def test_bad_recipe_is_named(maintainer, path, repo, other):
    for name in ('one', 'two', 'three'):
        put(other, name, content(1))
    account(maintainer)
    ruin(path / 'images' / 'one', 4096 + 60)
    ruin(path / 'images' / 'two', 60)
    result = scrub(maintainer)
    assert result.complete
    assert set(result.unreadable) == {'images/one', 'images/two'}
    assert result.images == ['one', 'two']
    assert result.blocks == 10
    assert maintainer.catalog.damaged_images() == {'one', 'two'}


def test_damage_that_a_new_pass_has_not_reached_is_known(
        maintainer, path, repo, other):
    """Beginning a pass is no reason to say that all is well."""
    for number in range(3):
        put(other, f'image-{number}', content(number, blocks=60))
    put(other, 'recipe', content(9))
    account(maintainer)
    flip(repositories.group_path(path, maintenance.groups(path)[1]), 20)
    damage(path, maintenance.blocks_of(repo, 'image-2')[-1])
    ruin(path / 'images' / 'recipe', 4096 + 60)
    before = scrub(maintainer)
    assert len(before.unreadable) == 2
    known = maintainer.catalog.damaged_images()
    result = scrub(maintainer, budget_bytes=0)
    assert not result.complete
    assert result.unreadable == before.unreadable
    assert result.images == before.images
    assert (result.damaged, result.found) == (before.damaged, 0)
    assert maintainer.catalog.damaged_images() == known


def test_what_can_be_read_again_is_not_told_any_more(
        maintainer, path, repo, other):
    for number in range(3):
        put(other, f'image-{number}', content(number, blocks=60))
    account(maintainer)
    recipe = path / 'images' / 'image-0'
    group = repositories.group_path(path, maintenance.groups(path)[1])
    missing = repositories.group_path(path, maintenance.groups(path)[2])
    good = recipe.read_bytes()
    flip(group, 20)
    os.rename(missing, path / 'away')
    ruin(recipe, 60)
    assert len(scrub(maintainer).unreadable) == 3
    flip(group, 20)
    os.rename(path / 'away', missing)
    recipe.write_bytes(good)
    result = scrub(maintainer)
    assert (result.unreadable, result.images) == ({}, [])


def test_a_deleted_recipe_is_not_told_any_more(maintainer, path, other):
    put(other, 'one', content(1))
    account(maintainer)
    ruin(path / 'images' / 'one', 60)
    assert set(scrub(maintainer).unreadable) == {'images/one'}
    scrubber.mark_lost(maintainer, 'one')
    assert maintainer.catalog.damaged_images() == set()
    put(other, 'two', content(1))
    ruin(path / 'images' / 'two', 60)
    assert set(scrub(maintainer).unreadable) == {'images/two'}
    os.unlink(path / 'images' / 'two')
    result = scrub(maintainer)
    assert (result.unreadable, result.images) == ({}, [])


def test_the_log_is_bounded(maintainer, path, repo, other, caplog):
    """A line for each group, whatever is damaged in it."""
    for number in range(15):
        put(other, f'image-{number:02}', content(1, 2, 3))
    account(maintainer)
    blocks = maintenance.blocks_of(repo, 'image-00')
    for bad in blocks[:12]:
        damage(path, bad)
    result = scrub(maintainer)
    assert result.found >= 12
    lines = [record.getMessage() for record in caplog.records
             if 'damaged' in record.getMessage()]
    [line] = lines
    assert f'{result.found} blocks of group 00000001' in line
    assert 'image-09 and 5 more' in line and 'image-10' not in line
    assert len(line) < 400


# -- groups in use ------------------------------------------------------------

def test_busy_group_waits(maintainer, path, repo, other):
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[3]
    damage(path, bad)
    with in_use(path, bad):
        result = scrub(maintainer)
        assert (result.damaged, result.busy, result.quarantined) == (1, 1, [])
        assert result.complete
        assert state_of(path, bad) == repositories.LIVE
        # The next run tries again, and does not count it twice.
        result = scrub(maintainer)
        assert (result.damaged, result.found, result.busy) == (1, 0, 1)
    result = scrub(maintainer, full=False, budget_bytes=0)
    assert (result.busy, len(result.quarantined)) == (0, 1)
    assert state_of(path, bad) == DAMAGED
    assert result.images == ['one']


def test_waiting_block_that_is_good_again(maintainer, path, repo, other):
    """It is read once more before it is given up."""
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[3]
    damage(path, bad)
    with in_use(path, bad):
        assert scrub(maintainer).busy == 1
    damage(path, bad)   # the bit flips back
    result = scrub(maintainer, full=False, budget_bytes=0)
    assert (result.busy, result.quarantined, result.images) == (0, [], [])
    assert state_of(path, bad) == repositories.LIVE
    assert maintainer.catalog.damaged() == {}


def test_waiting_block_that_was_freed_meanwhile(
        maintainer, path, repo, other):
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[3]
    damage(path, bad)
    with in_use(path, bad):
        assert scrub(maintainer).busy == 1
    other.delete('one')
    account(maintainer)
    collect(maintainer)
    result = scrub(maintainer)
    assert (result.busy, result.quarantined, result.images) == (0, [], [])
    assert maintainer.catalog.damaged() == {}


def test_nothing_is_marked_that_cannot_be_set_aside(
        maintainer, path, repo, other):
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[3]
    damage(path, bad)
    os.rename(path / 'quarantine', path / 'away')
    result = scrub(maintainer)
    assert (result.damaged, result.busy, result.complete) == (1, 1, True)
    assert state_of(path, bad) == repositories.LIVE
    os.rename(path / 'away', path / 'quarantine')
    assert scrub(maintainer).images == ['one']
    assert state_of(path, bad) == DAMAGED


# -- passes -------------------------------------------------------------------

def fill(other, images=6):
    for number in range(images):
        put(other, f'image-{number}', content(number, blocks=50))


def test_pass_goes_on_where_it_was_stopped(
        maintainer, path, repo, other, monkeypatch):
    monkeypatch.setattr(scrubber, 'STEP_SLOTS', 16)
    fill(other)
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'image-3')[7]
    damage(path, bad)
    seen = []
    verify = scrubber._engine.verify_slots

    def verify_slots(handle, number, first, count):
        if count > 1:
            seen.append((number, first))
        return verify(handle, number, first, count)

    monkeypatch.setattr(scrubber._engine, 'verify_slots', verify_slots)
    begun = None
    for _ in range(100):
        steps = []

        def progress(*_):
            steps.append(1)
            if len(steps) == 3:
                pace.stop()

        pace = task.Pace(progress=progress)
        try:
            result = scrubber.run_once(maintainer, pace)
        except task.Stopped:
            begun = begun or started(maintainer)
            assert started(maintainer) == begun
        else:
            break
    assert result.complete
    assert started(maintainer) is None
    assert len(seen) == len(set(seen))
    assert len(seen) > 18
    assert result.blocks == 300
    assert result.damaged == 1
    assert result.images == ['image-3']
    # The next run begins a new pass.
    del seen[:]
    assert scrub(maintainer, full=False, budget_bytes=0).blocks == 0
    assert started(maintainer) > begun


def test_budget(maintainer, path, other, monkeypatch):
    monkeypatch.setattr(scrubber, 'STEP_SLOTS', 16)
    fill(other)
    read = []
    for _ in range(100):
        result = scrub(maintainer, full=False, budget_bytes=20000)
        read.append(result.bytes)
        if result.complete:
            break
    assert len(read) > 5
    assert result.blocks == 300
    steps = [b - a for a, b in zip(read, read[1:])]
    assert max(steps) < 20000 + 16 * (BLOCK + 32) + 48 * 16


def test_a_full_pass_starts_anew(maintainer, other, monkeypatch):
    monkeypatch.setattr(scrubber, 'STEP_SLOTS', 16)
    fill(other)
    scrub(maintainer, budget_bytes=40000)
    result = scrub(maintainer, full=True)
    assert (result.blocks, result.complete) == (300, True)


def test_pace(maintainer, other):
    fill(other)
    pace = task.Pace(rate=100 * 1024)
    begin = time.monotonic()
    with contextlib.suppress(task.Stopped):
        result = scrubber.run_once(maintainer, pace)
        took = time.monotonic() - begin
    assert result.bytes > 150 * 1024
    assert took >= result.bytes / pace.rate - 0.1


def test_no_segment_is_read_twice(maintainer, other):
    fill(other)
    once = scrub(maintainer).bytes
    recipes = sum(4096 + 40 * other.stat(i).extents for i in other.images())
    stored = sum(other.stat(i).stored_bytes for i in other.images())
    assert once == recipes + stored


def test_unfinished_tail_is_no_damage(maintainer, path, other):
    """What a dead writer left is the next writer's to judge (N7.3)."""
    put(other, 'one', content(1))
    group = maintenance.groups(path)[0]
    file = repositories.Group(path, group)
    file.write_entry(file.used(), b'\1' * 32, 1, file.data_start(),
                     512 << 20 | 512 << 37 | 1 << 61)
    file.save()
    result = scrub(maintainer)
    assert (result.damaged, result.blocks) == (0, 10)


def write(file, at, data):
    with open(file, 'r+b') as f:
        f.seek(at)
        f.write(data)


def crash(path, tear):
    """Leave a tail, as a machine that crashes before a sync point may.

    :param tear: changes it; is given the group's file
    """
    with repositories.open_repository(path, codec='none') as repo:
        put(repo, 'gone', content(1))
        assert maintenance.blocks_of(repo, 'gone')[0] == (1, 0)
    os.unlink(path / 'images' / 'gone')
    for name in os.listdir(path / 'spool'):
        os.unlink(path / 'spool' / name)
    group = repositories.Group(path, 1)
    tear(group)
    write(group.path, 512, bytes(1024))     # the published records


def tear_block(group):
    """A sector was not written."""
    write(group.path, group.entry(1)[2] + 32 + BLOCK, bytes(BLOCK))


def tear_entry(group):
    """Nor was that of its entry, which is the first in its own."""
    write(group.path, group.entry(9)[2] + 32 + BLOCK, bytes(BLOCK))
    write(group.path, group.entry_offset(9), bytes(56))


def tear_checksum(group):
    """A sector that begins with the header's end and has zeros otherwise."""
    write(group.path, group.entry(1)[2] + 24, bytes(8))


def tear_reserved(group):
    write(group.path, group.entry(1)[2] + 20, b'garbage')


@pytest.mark.parametrize('tear', [
    tear_block, tear_entry, tear_checksum, tear_reserved])
def test_what_a_torn_tail_has_left_is_no_damage(path, tear):
    """Of a segment that is not whole, what is good is used (N7.3)."""
    crash(path, tear)
    with repositories.open_repository(path, codec='none') as repo:
        with maintaining(repo) as maintainer:
            assert findings(path) == []
            put(repo, 'next', content(9))
            # The next writer has judged it: only what is torn is stored.
            assert put(repo, 'one', content(1)).new_bytes < 4 * BLOCK
            assert read_all(repo, 'one') == content(1)
            assert findings(path) == []
            for _ in range(2):
                account(maintainer)
                collect(maintainer)
                assert findings(path) == []
                result = scrub(maintainer)
                assert (result.damaged, result.worn) == (0, 0)
            states = maintenance.states(path, 1)
            assert DAMAGED not in states
            assert read_all(repo, 'one') == content(1)
    # No byte of the segment is in doubt.
    assert not [note for note in findings(path, checker.NOTE)
                if 'checksum' in note]


# -- killed -------------------------------------------------------------------

@pytest.mark.parametrize('calls', range(2, 60, 3))
def test_killed_anywhere(path, calls):
    """Whatever was found is known in the end, and nothing is invented."""
    with repositories.open_repository(path, codec='none') as repo:
        put(repo, 'one', content(1))
        put(repo, 'two', content(2))
        with maintaining(repo) as maintainer:
            account(maintainer)
        bad = maintenance.blocks_of(repo, 'one')[3]
        damage(path, bad)
        maintainer = scrubber.maintainer_module.Maintainer(repo)
        maintenance.watch(maintainer, maintenance.Kill(calls))
        with contextlib.suppress(maintenance.Killed):
            scrub(maintainer)
        maintenance.kill(maintainer)
        with maintaining(repo) as maintainer:
            result = scrub(maintainer, full=False)
            result = scrub(maintainer)
            assert result.images == ['one']
            [facts] = maintainer.catalog.damaged().values()
            assert facts['images'] == ['one']
            assert state_of(path, bad) == DAMAGED
            put(repo, 'three', content(1))
            scrub(maintainer)
            assert read_all(repo, 'one') == content(1)
            account(maintainer)
            collect(maintainer)
            maintenance.need_counted(maintainer)
        assert findings(path) == []


def test_cursor_survives_a_kill(path):
    with repositories.open_repository(path, codec='none') as repo:
        fill(repo)

    def child():
        scrubber.STEP_SLOTS = 16
        with repositories.open_repository(path, codec='none') as repo:
            with maintaining(repo) as maintainer:
                def progress(done, total, what):
                    if 'group' in what and done > 100:
                        os.kill(os.getpid(), signal.SIGKILL)
                scrubber.run_once(maintainer, task.Pace(progress))

    with pytest.raises(repositories.ChildFailed):
        repositories.in_child(child)
    with repositories.open_repository(path, codec='none') as repo:
        with maintaining(repo) as maintainer:
            assert started(maintainer) is not None
            before = maintainer.catalog.scrub_state()
            assert before['blocks'] >= 100
            result = scrub(maintainer, full=False)
            assert (result.blocks, result.complete) == (300, True)


# -- a repository at work -----------------------------------------------------

def test_no_false_damage(path):
    """Others store and delete, and groups are collected and rewritten."""
    def work(number):
        def run():
            deadline = time.monotonic() + 6
            rounds = 0
            with repositories.open_repository(path) as repo:
                while time.monotonic() < deadline:
                    name = f'image-{number}-{rounds % 4}'
                    with contextlib.suppress(exceptions.ImageNotFound):
                        repo.delete(name)
                    put(repo, name, content(
                        number, rounds % 7, 10 + rounds, blocks=20))
                    rounds += 1
            return rounds
        return run

    children = [repositories.fork_child(work(n)) for n in (1, 2)]
    try:
        with repositories.open_repository(path) as repo:
            with maintaining(repo) as maintainer:
                deadline = time.monotonic() + 6
                passes = 0
                while time.monotonic() < deadline:
                    result = scrub(maintainer, spare_threshold=3)
                    assert result.damaged == 0
                    assert result.unreadable == {}
                    assert result.worn == 0
                    account(maintainer)
                    collector.run_once(maintainer, task.Pace(),
                                       live_share=80, evacuate_share=10)
                    passes += 1
    finally:
        rounds = [repositories.wait_for_child(c) for c in children]
    assert passes > 1 and min(rounds) > 1
    with repositories.open_repository(path) as repo:
        with maintaining(repo) as maintainer:
            account(maintainer)
            result = scrub(maintainer)
            assert (result.damaged, result.complete) == (0, True)
    assert os.listdir(path / 'quarantine') == []
    repositories.need_clean(path)


# -- spare copies -------------------------------------------------------------

def test_spare_copies(maintainer, path, repo, other):
    for number in range(3):
        put(other, f'image-{number}', content(1, 10 + number))
    account(maintainer)
    result = scrub(maintainer, spare_threshold=3)
    assert result.spares == 10
    assert result.spare_bytes == sum(
        os.stat(path / 'spares' / name).st_size
        for name in os.listdir(path / 'spares'))
    assert checker.check(path).figures['spares'] == 10
    # A block is read from its copy,
    bad = maintenance.blocks_of(repo, 'image-0')[4]
    damage(path, bad)
    with repositories.open_repository(path) as third:
        assert read_all(third, 'image-1') == content(1, 11)
    assert checker.check(path).damaged_images == []
    # and healed from it.
    result = scrub(maintainer, spare_threshold=3)
    assert (result.damaged, result.images) == (1, [])
    assert result.healed == 1
    for number in range(3):
        assert read_all(other, f'image-{number}') == content(1, 10 + number)
        assert bad not in maintenance.blocks_of(repo, f'image-{number}')
    assert result.spares == 10
    # Fewer blocks are used so often; and then none are to have one.
    assert scrub(maintainer, spare_threshold=4).spares == 0
    assert os.listdir(path / 'spares') == []
    maintainer.close()
    assert findings(path) == []


def test_spares_are_of_the_most_used(maintainer, path, repo, other):
    put(other, 'all', content(1, 2, 3, 4, blocks=8))
    put(other, 'most', content(1, 2, blocks=8))
    put(other, 'least', content(3, blocks=8))
    put(other, 'again', content(2, blocks=8))
    account(maintainer)
    result = scrub(maintainer, spare_threshold=2, spare_max=16 * BLOCK)
    assert result.spares == 16
    # 2 is named three times; of the others those with the lower address.
    damage(path, maintenance.blocks_of(repo, 'all')[8])
    with repositories.open_repository(path) as third:
        assert read_all(third, 'again') == content(2, blocks=8)
    result = scrub(maintainer, spare_threshold=2)
    assert result.spares == 24
    assert result.images == []


def test_spares_in_several_files(maintainer, path, other):
    put(other, 'one', content(1, 2, blocks=70))
    put(other, 'two', content(1, 2, blocks=70))
    account(maintainer)
    result = scrub(maintainer, spare_threshold=2)
    assert result.spares == 140
    assert sorted(os.listdir(path / 'spares')) == [
        '00000001', '00000002', '00000003']
    other.delete('two')
    account(maintainer)
    assert scrub(maintainer, spare_threshold=2).spares == 0
    assert os.listdir(path / 'spares') == []


def test_spare_that_went_bad_is_renewed(maintainer, path, repo, other):
    put(other, 'one', content(1))
    put(other, 'two', content(1))
    account(maintainer)
    scrub(maintainer, spare_threshold=2)
    file = path / 'spares' / '00000001'
    flip(file, file.stat().st_size - 5)
    assert findings(path) != []
    scrub(maintainer, spare_threshold=2)
    assert findings(path) == []


def test_without_spares_nothing_is_made(maintainer, path, other):
    put(other, 'one', content(1))
    assert scrub(maintainer).spares == 0
    assert not (path / 'spares').exists() or not os.listdir(path / 'spares')


# -- fingerprints that are not cryptographic ----------------------------------

@pytest.fixture
def weak(tmp_path):
    return maintenance.create(tmp_path / 'weak', fingerprint='xxh3-128',
                              compare='value')


@pytest.fixture
def weak_repo(weak):
    with repositories.open_repository(weak, codec='none') as repo:
        yield repo


@pytest.fixture
def weak_maintainer(weak_repo):
    with maintaining(weak_repo) as maintainer:
        yield maintainer


def put_twins(repo):
    """Images that differ in one block, whose digests do not: its number."""
    mine, its = maintenance.twins(1)
    assert mine != its
    ends = content(1, blocks=3), content(2, blocks=3)
    images = {name: ends[0] + block + ends[1]
              for name, block in (('one', mine), ('two', its))}
    for name, data in images.items():
        put(repo, name, data)
        assert read_all(repo, name) == data
    first, second = (maintenance.blocks_of(repo, name)[3] for name in images)
    assert first != second
    entries = [repositories.Group(repo.path, group).entry(slot)
               for group, slot in (first, second)]
    assert entries[0][:2] == entries[1][:2]     # fingerprint, checksum
    return images


def need_no_other(path, images, bad):
    """What is read is right, and what is damaged is named."""
    with repositories.open_repository(path, codec='none') as reader:
        for name, data in images.items():
            if name == bad:
                with pytest.raises(exceptions.DamagedError):
                    read_all(reader, name)
            else:
                assert read_all(reader, name) == data
    report = checker.check(path)
    assert report.damaged_images == [bad]
    assert not report.ok


def test_no_healing_by_a_block_that_has_its_fingerprint(
        weak, weak_repo, weak_maintainer, caplog):
    images = put_twins(weak_repo)
    account(weak_maintainer)
    damage(weak, maintenance.blocks_of(weak_repo, 'one')[3])
    for _ in range(3):
        result = scrub(weak_maintainer)
        assert (result.healed, result.images) == (0, ['one'])
        merger.run_once(weak_maintainer, task.Pace())
        need_no_other(weak, images, 'one')
    assert 'xxh3-128 is not cryptographic' in caplog.text
    # An equal block is stored anew: only its twin has been found so far.
    put(weak_repo, 'again', images['one'])
    assert read_all(weak_repo, 'again') == images['one']


def test_what_is_damaged_hinders_no_merging(
        tmp_path, weak, weak_repo, weak_maintainer):
    """A pair that cannot be compared keeps no other pair apart."""
    images = put_twins(weak_repo)
    images.update(three=content(3), four=content(3))
    # On a host of its own, whose filter does not know the other's blocks.
    (tmp_path / 'filter').mkdir()
    with repositories.open_repository(
            weak, codec='none', filter_dir=str(tmp_path / 'filter')) as away:
        with away.begin('four') as transaction:
            put(weak_repo, 'three', content(3))
            transaction.write(content(3))
            transaction.commit()
    account(weak_maintainer)
    assert merger.plan(weak_maintainer).duplicates == 11
    bad = max(maintenance.blocks_of(weak_repo, name)[5]
              for name in ('three', 'four'))
    hit, = (name for name in ('three', 'four')
            if bad in maintenance.blocks_of(weak_repo, name))
    damage(weak, bad)
    assert scrub(weak_maintainer).images == [hit]
    result = merger.run_once(weak_maintainer, task.Pace())
    assert result.failed == {}
    assert len(set(maintenance.blocks_of(weak_repo, 'three')).intersection(
        maintenance.blocks_of(weak_repo, 'four'))) == 9
    need_no_other(weak, images, hit)


def test_a_block_that_can_be_read_after_all_is_healed(
        weak, weak_repo, weak_maintainer):
    images = put_twins(weak_repo)
    account(weak_maintainer)
    bad = maintenance.blocks_of(weak_repo, 'one')[3]
    damage(weak, bad)
    assert scrub(weak_maintainer).images == ['one']
    damage(weak, bad)   # once more: it is as it was
    result = scrub(weak_maintainer)
    assert (result.healed, result.images) == (1, [])
    assert bad not in maintenance.blocks_of(weak_repo, 'one')
    for name, data in images.items():
        assert read_all(weak_repo, name) == data


def test_no_spare_copies_of_weak_fingerprints(
        weak, weak_repo, weak_maintainer, caplog):
    images = put_twins(weak_repo)
    for number in range(3):
        images[f'more-{number}'] = images['two'] + content(10 + number)
        put(weak_repo, f'more-{number}', images[f'more-{number}'])
    account(weak_maintainer)
    result = scrub(weak_maintainer, spare_threshold=2)
    assert (result.spares, result.complete) == (0, True)
    assert not os.path.exists(weak / 'spares')
    assert 'No spare copies are written' in caplog.text
    damage(weak, maintenance.blocks_of(weak_repo, 'one')[3])
    need_no_other(weak, images, 'one')
    scrub(weak_maintainer, spare_threshold=2)
    need_no_other(weak, images, 'one')


def write_spares(repo, blocks):
    """As the engine once did, whatever the fingerprints."""
    with open(os.path.join(repo.path, 'repository.json'), 'rb') as f:
        parameters = json.load(f)
    like = types.SimpleNamespace(
        path=pathlib.Path(repo.path), block_size=BLOCK, group_slots=64,
        repository_id=bytes.fromhex(parameters['repository_id']),
        fingerprint=parameters['fingerprint'], write=None)
    spares = format_writer.Spares(like, 1, compute=lambda block: bytes(
        xxhash.xxh3_128_digest(block)) + bytes(16))
    spares.append(blocks)
    spares.publish()
    file = pathlib.Path(repo.path, 'spares', '00000001')
    file.write_bytes(spares.content())
    file.chmod(0o600)


@pytest.mark.parametrize('marked', [False, True])
def test_spare_copies_of_weak_fingerprints_are_not_read(
        weak, weak_repo, weak_maintainer, marked):
    """An earlier version wrote them."""
    images = put_twins(weak_repo)
    account(weak_maintainer)
    write_spares(weak_repo, [maintenance.twins(1)[1]])
    damage(weak, maintenance.blocks_of(weak_repo, 'one')[3])
    if marked:
        scrub(weak_maintainer, budget_bytes=1 << 30)
        write_spares(weak_repo, [maintenance.twins(1)[1]])
    need_no_other(weak, images, 'one')
    assert any('is never read' in note
               for note in findings(weak, checker.NOTE))
    # The next pass removes them.
    state = weak_maintainer.catalog.scrub_state()
    weak_maintainer.catalog.set_scrub_state(
        {**state, 'spares': {'files': 1, 'blocks': 1, 'bytes': 9}})
    assert scrub(weak_maintainer).images == ['one']
    assert os.listdir(weak / 'spares') == []
    need_no_other(weak, images, 'one')


# -- lost recipes -------------------------------------------------------------

def lose(path, image_id, how):
    file = path / 'images' / image_id
    if how == 'header':
        ruin(file, 60)
    elif how == 'page':
        ruin(file, 4096 + 60)
    elif how == 'zeros':
        file.write_bytes(bytes(file.stat().st_size))
    else:
        os.truncate(file, 100)


@pytest.mark.parametrize('how', ['header', 'page', 'zeros', 'short'])
@pytest.mark.parametrize('counted', [True, False])
def test_mark_lost(maintainer, path, repo, other, how, counted):
    put(other, 'kept', content(1, 2))
    put(other, 'lost', content(2, 3))
    if counted:
        account(maintainer)
    lose(path, 'lost', how)
    if not counted:
        account(maintainer)
        assert maintainer.unreadable()
        assert collect(maintainer).refused
    aside = scrubber.mark_lost(maintainer, 'lost')
    assert (path / aside).exists()
    assert other.images() == ['kept']
    assert maintainer.unreadable() == {}
    assert maintainer.catalog.valid
    assert maintenance.counts(maintainer.catalog) == (
        maintenance.expected_counts(repo))
    account(maintainer)
    maintenance.need_counted(maintainer)
    assert collect(maintainer).refused is None
    maintenance.need_collected(maintainer)
    assert read_all(other, 'kept') == content(1, 2)
    maintainer.close()
    assert findings(path) == []


def test_mark_lost_refuses_what_can_be_read(maintainer, path, repo, other):
    put(other, 'one', content(1))
    with pytest.raises(exceptions.InvalidParameter, match='one'):
        scrubber.mark_lost(maintainer, 'one')
    with pytest.raises(exceptions.ImageNotFound):
        scrubber.mark_lost(maintainer, 'two')
    assert os.listdir(path / 'quarantine') == []
    # A damaged block is not a damaged recipe.
    damage(path, maintenance.blocks_of(repo, 'one')[0])
    with pytest.raises(exceptions.InvalidParameter, match='deleted'):
        scrubber.mark_lost(maintainer, 'one')


def test_counts_are_given_up_before_the_names(
        maintainer, path, repo, other):
    """What was counted can no longer be un-counted."""
    put(other, 'one', content(1))
    account(maintainer)
    lose(path, 'one', 'page')
    seen = []

    def look():
        seen.append((maintainer.catalog.valid,
                     os.listdir(path / 'quarantine') != []))

    maintenance.watch(maintainer, maintenance.Once('.delete', look))
    scrubber.mark_lost(maintainer, 'one')
    assert seen == [(False, True)]


def test_mark_lost_while_it_is_deleted(maintainer, path, other):
    put(other, 'one', content(1))
    lose(path, 'one', 'page')
    with repositories.holding(path / 'locks' / 'images',
                              repositories.image_lock_byte('one')):
        with pytest.raises(exceptions.BusyError):
            scrubber.mark_lost(maintainer, 'one')
    assert maintainer.catalog.valid
    assert other.images() == ['one']


def test_mark_lost_while_it_is_read(maintainer, path, repo, other):
    """Its reader's blocks stay until he is done (I12)."""
    put(other, 'one', content(1))
    put(other, 'kept', content(9))
    account(maintainer)
    with other.open_image('one') as image:
        lose(path, 'one', 'page')
        scrubber.mark_lost(maintainer, 'one')
        account(maintainer)
        collect(maintainer)
        assert len(maintenance.live_slots(path)) == 20
        assert image is not None
    for _ in range(2):
        account(maintainer)
        collect(maintainer)
    assert len(maintenance.live_slots(path)) == 10
    maintenance.need_counted(maintainer)
    maintainer.close()
    assert findings(path) == []


@pytest.mark.parametrize('how', ['header', 'page'])
@pytest.mark.parametrize('calls', range(1, 40))
def test_mark_lost_killed_anywhere(path, how, calls):
    with repositories.open_repository(path, codec='none') as repo:
        put(repo, 'kept', content(1, 2))
        put(repo, 'lost', content(2, 3))
        with maintaining(repo) as maintainer:
            account(maintainer)
        lose(path, 'lost', how)
        maintainer = scrubber.maintainer_module.Maintainer(repo)
        maintenance.watch(maintainer, maintenance.Kill(calls))
        with contextlib.suppress(maintenance.Killed):
            scrubber.mark_lost(maintainer, 'lost')
        maintenance.kill(maintainer)
        with maintaining(repo) as maintainer:
            with contextlib.suppress(exceptions.ImageNotFound):
                scrubber.mark_lost(maintainer, 'lost')
            for _ in range(2):
                account(maintainer)
                assert collect(maintainer).refused is None
            maintenance.need_collected(maintainer)
            assert read_all(repo, 'kept') == content(1, 2)
        assert findings(path) == []


# -- what is whole in itself --------------------------------------------------

def test_older_copy_of_a_group(maintainer, path, other):
    """Its entries verify, but are not of the blocks that recipes mean."""
    put(other, 'before', content(1))
    older = repositories.group_path(path, 1).read_bytes()
    put(other, 'after', content(2))
    repositories.group_path(path, 1).write_bytes(older)
    found = scrub(maintainer).unreadable
    assert list(found) == ['images/after']
    assert 'groups/00000001' in found['images/after']
    # Its slots are given to another.
    put(other, 'usurper', content(3))
    assert list(scrub(maintainer).unreadable) == ['images/after']
