# SPDX-License-Identifier: Apache-2.0

"""Scrubbing: damaged blocks are found, marked and healed."""

import os

import pytest

from dedupd.tasks import merger
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import BLOCK
from tests.support.maintenance import content
from tests.support import repositories
from tests.support.repositories import DAMAGED
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.support.repositories import ruin
from tests.unit.dedupd.tasks import scrubbing
from tests.unit.dedupd.tasks.scrubbing import collect
from tests.unit.dedupd.tasks.scrubbing import damage
from tests.unit.dedupd.tasks.scrubbing import findings
from tests.unit.dedupd.tasks.scrubbing import flip
from tests.unit.dedupd.tasks.scrubbing import place_of
from tests.unit.dedupd.tasks.scrubbing import scrub
from tests.unit.dedupd.tasks.scrubbing import state_of

pytest_plugins = ['tests.support.maintainer_fixtures']

no_pause = scrubbing.no_pause


def in_use(path, address):
    """Hold the lock of a transaction that names blocks of the group."""
    return repositories.holding(
        path / 'locks' / 'groups', repositories.SHARE_BYTE + address[0],
        shared=True)


def packed(address):
    return address[0] << 15 | address[1]


# -- a good repository --------------------------------------------------------

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


# -- damage -------------------------------------------------------------------

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
    # Only this block is marked.
    assert state_of(path, bad) == DAMAGED
    assert [state for group in maintenance.groups(path)
            for state in maintenance.states(path, group)].count(DAMAGED) == 1
    # The stored bytes are kept as they were found.
    [name] = result.quarantined
    segment = repositories.Group(path, bad[0]).entry(bad[1])[2]
    kept = (path / name).read_bytes()
    assert kept == before[segment:segment + len(kept)]
    assert segment < at < segment + len(kept)
    # The catalog names the images that need the block.
    [(address, facts)] = maintainer.catalog.damaged().items()
    assert address == packed(bad)
    assert facts['images'] == ['one', 'two']
    assert facts['quarantine'] == name
    assert facts['fingerprint'] == repositories.Group(
        path, bad[0]).entry(bad[1])[0].hex()
    assert maintainer.catalog.damaged_images() == {'one', 'two'}
    # The damaged block never becomes data, and other images are intact.
    for image_id in ('one', 'two'):
        with pytest.raises(exceptions.DamagedError, match=image_id):
            read_all(other, image_id)
    assert read_all(other, 'three') == content(3)
    # The second run does not report the damage again, but still counts it.
    again = scrub(maintainer)
    assert (again.damaged, again.found, again.quarantined) == (1, 0, [])
    assert again.images == ['one', 'two']


def test_lookups_do_not_find_a_damaged_block(maintainer, path, repo, other):
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[3]
    damage(path, bad)
    scrub(maintainer)
    # This handle still has the fingerprint table in its cache.
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
    # The mark goes with the last recipe that names the block.
    assert maintainer.catalog.damaged() == {}
    maintenance.require_counted(maintainer)
    assert scrub(maintainer).healed == 0
    # The slot goes with the next collection.
    collect(maintainer)
    assert state_of(path, bad) == repositories.FREED
    maintainer.close()
    assert findings(path) == []


def test_healing_by_the_index(maintainer, path, repo, other):
    """A pass is not needed if the exact index knows the copy."""
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[3]
    damage(path, bad)
    scrub(maintainer)
    put(other, 'two', content(1))
    merger.run_once(maintainer, pacing.Pace())
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
    merger.run_once(maintainer, pacing.Pace())
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
    """A damaged segment header damages all blocks of the segment, or none."""
    put(other, 'one', content(1))
    account(maintainer)
    bad = maintenance.blocks_of(repo, 'one')[4]
    file, start = place_of(path, bad)
    flip(file, start - 32 + at)
    result = scrub(maintainer)
    if at in (5, 20, 25, 30):       # reserved bytes and their checksum
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
    # The fingerprint is still good, as the recipe's digest shows.
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
    """Damage stays known while a new pass has not reached it."""
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
    """The log has one line for each group with damaged blocks."""
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
        # The next run tries again, and does not count the block twice.
        result = scrub(maintainer)
        assert (result.damaged, result.found, result.busy) == (1, 0, 1)
    result = scrub(maintainer, full=False, budget_bytes=0)
    assert (result.busy, len(result.quarantined)) == (0, 1)
    assert state_of(path, bad) == DAMAGED
    assert result.images == ['one']


def test_waiting_block_that_is_good_again(maintainer, path, repo, other):
    """A waiting block is read again before it is given up."""
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


# -- damage between files -----------------------------------------------------

def test_older_copy_of_a_group(maintainer, path, other):
    """An older copy of a group makes the newer image unreadable.

    The entries of that copy are valid in themselves.
    """
    put(other, 'before', content(1))
    older = repositories.group_path(path, 1).read_bytes()
    put(other, 'after', content(2))
    repositories.group_path(path, 1).write_bytes(older)
    found = scrub(maintainer).unreadable
    assert list(found) == ['images/after']
    assert 'groups/00000001' in found['images/after']
    # Another image takes the slots.
    put(other, 'usurper', content(3))
    assert list(scrub(maintainer).unreadable) == ['images/after']
