# SPDX-License-Identifier: Apache-2.0

"""Collection: freed space, the order of steps, and obstacles."""

import dataclasses

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import recompressor
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import BLOCK
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put
from tests.unit.dedupd.tasks.collecting import collect
from tests.unit.dedupd.tasks.collecting import pin
from tests.unit.dedupd.tasks.collecting import SHARE

pytest_plugins = ['tests.support.maintainer_fixtures']


# -- freed space --------------------------------------------------------------

def test_deleted_blocks_are_freed(maintainer, path, other):
    put(other, 'one', content(1, 2))
    put(other, 'two', content(2, 3))
    assert collect(maintainer).freed_blocks == 0
    other.delete('one')
    result = collect(maintainer)
    assert (result.freed_blocks, result.freed_bytes) == (10, 10 * BLOCK)
    assert result.groups == 1 and result.busy == 0
    maintenance.require_collected(maintainer)
    assert repositories.read_all(other, 'two') == content(2, 3)
    repositories.require_clean(path)


def test_blocks_that_no_image_ever_named_are_freed(maintainer, path, other):
    """The blocks of an upload aborted after a sync point are freed."""
    with other.begin('image') as transaction:
        transaction.write(content(1))
        transaction._engine.keep()
        transaction.write(content(2))
    assert len(maintenance.live_slots(path)) == 10
    assert collect(maintainer).freed_blocks == 10
    maintenance.require_collected(maintainer)
    # A second run has nothing to examine.
    assert collect(maintainer).groups == 0


@pytest.mark.parametrize('poisoned', [False, True])
def test_n7_3_tail_of_a_dead_writer(maintainer, path, other, poisoned):
    """The tail of a writer that died or whose sync failed is freed.

    The writer had not published its entries.
    """
    put(other, 'stays', content(1))
    collect(maintainer)
    before = repositories.Group(path, 1).record()
    assert before[2] == 10
    put(other, 'named', content(2))
    with other.begin('given-up') as transaction:
        transaction.write(content(3))
        transaction._engine.keep()
    group = repositories.Group(path, 1)
    for _ in range(2):      # a crash lost both sync points
        group.forget_newest_record()
    before[3] |= repositories.POISONED * poisoned
    group.write_record(before)
    group.save()
    result = collect(maintainer)
    assert result.freed_blocks == 10 and not result.failed
    assert repositories.Group(path, 1).record()[2] == 30
    maintenance.require_collected(maintainer)
    for image_id, seed in ('stays', 1), ('named', 2):
        assert repositories.read_all(other, image_id) == content(seed)
    assert collect(maintainer).groups == 0
    repositories.require_clean(path)


def test_bytes_that_a_killed_writer_appended_are_cut_off(
        maintainer, path, other):
    """Bytes since a killed writer's last sync point are cut off.

    No entry names them.
    """
    put(other, 'image', content(1))
    collect(maintainer)
    file = repositories.group_path(path, 1)
    size = file.stat().st_size
    with open(file, 'ab') as f:
        f.write(noise(1 << 20, 2))
    assert collect(maintainer).groups == 1
    assert file.stat().st_size == size
    assert collect(maintainer).groups == 0
    put(other, 'next', content(2))
    assert repositories.read_all(other, 'image') == content(1)
    repositories.require_clean(path)


def test_a_tail_is_left_to_its_living_writer(maintainer, path, other):
    """A tail stays while its writer has the lease and may publish it."""
    put(other, 'image', content(1))
    collect(maintainer)
    with other.begin('next') as transaction:
        transaction.write(content(2))
        transaction.measure()       # writes the block to the group
        result = collect(maintainer)
        assert (result.groups, result.busy) == (0, 1)
        transaction.commit()
    assert repositories.read_all(other, 'next') == content(2)
    repositories.require_clean(path)


@pytest.mark.parametrize('entries', [True, False])
def test_nothing_stays_of_a_first_upload_that_failed(
        maintainer, path, other, entries):
    """The space of a failed upload is freed, with or without its entries."""
    with other.begin('failed') as transaction:
        transaction.write(content(1))
        transaction._engine.keep()
    group = repositories.Group(path, 1)
    group.forget_newest_record()
    if not entries:
        group.data[4096:4096 + 512 * 2] = bytes(512 * 2)
        group.write_record([1, 0, 0, repositories.POISONED, 0])
    group.save()
    collect(maintainer)
    assert maintenance.disk(path) <= 4096
    assert collect(maintainer).groups == 0
    put(other, 'next', content(1))
    collect(maintainer)
    assert maintenance.groups(path) == [2]
    repositories.require_clean(path)


def test_nothing_to_do_costs_nothing(maintainer, path, other):
    put(other, 'image', content(*range(20)))
    assert collect(maintainer).groups == 4
    log = maintenance.Log()
    assert collect(maintenance.watch(maintainer, log)).groups == 0
    assert not log.where('enter_group', 'entries')


def test_only_groups_that_lost_something_are_looked_at(
        maintainer, path, other):
    for number in range(20):
        put(other, f'image-{number}', content(number, blocks=32))
    collect(maintainer)
    other.delete('image-5')
    log = maintenance.Log()
    result = collect(maintenance.watch(maintainer, log))
    assert result.groups == len(log.where('enter_group')) == 1
    assert result.freed_blocks == 32


def test_space_goes_back_to_the_file_system(tmp_path):
    """The freed space is visible to `du`."""
    path = maintenance.create(tmp_path, block_size=4096, group_slots=1024,
                              segment_size=65536)
    with repositories.open_repository(path, codec='none') as repo:
        with maintaining(repo) as maintainer:
            put(repo, 'stays', noise(2 << 20, 1))
            account(maintainer)
            before = maintenance.disk(path)
            put(repo, 'goes', noise(8 << 20, 2))
            stored = maintenance.disk(path) - before
            assert stored > 8 << 20
            repo.delete('goes')
            result = collector.run_once(maintainer, pacing.Pace())
            left = maintenance.disk(path) - before
            # The last group stays, with its fingerprint table.
            assert left < 600 << 10
            assert stored - left == pytest.approx(result.disk_bytes, rel=0.02)
            assert result.freed_bytes == 8 << 20
            maintenance.require_collected(maintainer)
            assert repositories.read_all(repo, 'stays') == noise(2 << 20, 1)
            repositories.require_clean(path)


def test_empty_groups_are_unlinked(maintainer, path, other):
    put(other, 'stays', content(100))
    put(other, 'goes', content(*range(30)))
    collect(maintainer)
    other.delete('goes')
    groups = maintenance.groups(path)
    assert len(groups) == 5
    result = collect(maintainer)
    # The first group has other blocks, too; the last group may never go.
    assert result.unlinked == 3
    assert maintenance.groups(path) == [1, 5]
    assert [n for n, _ in maintainer.catalog.groups()] == [1, 5]
    maintenance.require_collected(maintainer)
    repositories.require_clean(path)
    put(other, 'again', content(*range(30)))
    assert min(set(maintenance.groups(path)) - {1, 5}) == 6
    collect(maintainer)
    maintenance.require_collected(maintainer)


def test_the_last_group_leaves_only_its_number(maintainer, path, other):
    for name in ('one', 'two'):     # this creates duplicates
        with other.begin(name) as transaction:
            transaction.write(content(1, 2))
            transaction.commit()
    collect(maintainer)
    merger.run_once(maintainer, pacing.Pace())
    number, = maintenance.groups(path)
    other.delete('one')
    other.delete('two')
    before = maintenance.disk(path)
    plan, = collector.plan(maintainer).groups
    assert plan.action == 'rewrite' and 'the last number' in plan.reason
    result = collect(maintainer)
    assert result.rewritten == 1 and not result.unlinked
    assert before - maintenance.disk(path) >= result.disk_bytes > 0
    file = path / 'groups' / f'{number:08x}'
    assert file.stat().st_blocks * 512 <= 4096
    # All readers of groups accept the file.
    maintenance.require_collected(maintainer)
    assert {found.file for found in repositories.require_clean(
        path).findings} <= {'catalog'}      # the catalog is in use
    merger.run_once(maintainer, pacing.Pace())
    scrubber.run_once(maintainer, pacing.Pace(), spare_threshold=1)
    recompressor.run_once(maintainer, pacing.Pace(), 'zstd', 1)
    assert collect(maintainer).groups == 0      # done once
    # The number is not used again, and the file goes when another group is
    # last.
    put(other, 'again', content(1, 2))
    assert maintenance.groups(path) == [number, number + 1]
    assert collect(maintainer).unlinked == 1
    assert maintenance.groups(path) == [number + 1]
    assert repositories.read_all(other, 'again') == content(1, 2)
    maintenance.require_collected(maintainer)
    repositories.require_clean(path)


def test_without_room_the_last_group_waits(maintainer, path, other):
    put(other, 'image', content(1))
    collect(maintainer)
    other.delete('image')

    def hook(name, arguments, before):
        if before and name.endswith('leave_placeholder'):
            raise exceptions.NoSpaceError('the disk is full')
    before = maintenance.disk(path)
    result = collect(maintenance.watch(maintainer, hook))
    assert result.skipped_for_space == 1 and result.freed_blocks == 10
    maintenance.unwatch(maintainer)
    result = collect(maintainer)
    assert result.rewritten == 1 and result.disk_bytes > 0
    assert maintenance.disk(path) < before
    repositories.require_clean(path)


def test_killed_after_unlinking(path, repo, other):
    put(other, 'goes', content(*range(30)))
    maintainer = maintainer_role.Maintainer(repo)
    other.delete('goes')

    def hook(name, arguments, before):
        if name == 'catalog.write' and not maintenance.groups(path)[1:]:
            raise maintenance.Killed
    with pytest.raises(maintenance.Killed):
        collect(maintenance.watch(maintainer, hook))
    maintenance.kill(maintainer)
    with maintaining(other) as maintainer:
        assert len(dict(maintainer.catalog.groups())) > 1
        collect(maintainer)
        assert len(dict(maintainer.catalog.groups())) == 1
        maintenance.require_collected(maintainer)


def test_groups_are_rewritten(maintainer, path, other):
    """Groups are rewritten if one block of four stays in each segment."""
    for number in range(16):
        put(other, f'stays-{number}', noise(BLOCK, f'stays {number}'))
        put(other, f'goes-{number}', noise(3 * BLOCK, f'goes {number}'))
    put(other, 'mix', b''.join(
        noise(BLOCK, f's{number}') + noise(3 * BLOCK, f'g{number}')
        for number in range(40)))
    with other.open_image('mix') as image:
        half = b''.join(image.read(BLOCK, 4 * n * BLOCK) for n in range(40))
    put(other, 'half', half)
    other.delete('mix')
    before = collect(maintainer)
    assert before.rewritten == 0
    batch = maintainer.catalog.batch()
    for number in maintenance.groups(path):
        maintainer.catalog.set_group(batch, number, dirty=True)
    maintainer.catalog.write(batch)
    result = collect(maintainer, live_share=90)
    assert result.rewritten > 0 and result.disk_bytes > 0
    assert repositories.read_all(other, 'half') == half
    maintenance.require_collected(maintainer)
    repositories.require_clean(path)


def test_rewriting_is_by_the_share_that_lives(maintainer, path, other):
    data = b''.join(noise(4 * BLOCK, f'segment {n}') for n in range(16))
    put(other, 'whole', data)
    put(other, 'half', b''.join(
        data[at:at + 2 * BLOCK] for at in range(0, len(data), 4 * BLOCK)))
    other.delete('whole')

    def share(percent):
        batch = maintainer.catalog.batch()
        maintainer.catalog.set_group(batch, 1, dirty=True)
        maintainer.catalog.write(batch)
        return collect(maintainer, live_share=percent).rewritten
    assert share(45) == 0
    assert share(55) == 1
    assert share(100) == 0


# -- N6.4: freeing, then punching ---------------------------------------------

def test_n6_4_order(maintainer, path, other):
    put(other, 'image', content(1))
    other.delete('image')
    log = maintenance.Log()
    collect(maintenance.watch(maintainer, log))
    free, = log.where('.free')
    punch, = log.where('.punch')
    closed, = log.where('group 1.close')
    assert free < punch < closed


def test_holes_are_punched_after_a_crash_between(path, repo, other):
    put(other, 'image', content(1, blocks=60))
    put(other, 'stays', content(2, blocks=4))
    maintainer = maintainer_role.Maintainer(repo)
    other.delete('image')

    def die():
        raise maintenance.Killed
    with pytest.raises(maintenance.Killed):
        collect(maintenance.watch(maintainer, maintenance.Once(
            '.punch', die)))
    maintenance.kill(maintainer)
    before = maintenance.disk(path)
    with maintaining(other) as maintainer:
        result = collect(maintainer)
        assert (result.freed_blocks, result.punched) == (0, 1)
        assert maintenance.disk(path) < before
        maintenance.require_collected(maintainer)


def test_what_an_older_sector_hides_comes_back(maintainer, path, other):
    """Nothing is freed if an entry that is needed has no block."""
    put(other, 'goes', content(1))
    put(other, 'stays', content(2))
    collect(maintainer)
    group = repositories.Group(path, 1)
    before = group.raw_entry(12)
    at = group.entry_offset(12)
    group.data[at:at + 56] = bytes(56)
    group.save()
    other.delete('goes')
    result = collect(maintainer)
    assert result.freed_blocks == result.punched == 0
    assert 'slot 12' in result.failed[1] and 'older copy' in result.failed[1]
    group = repositories.Group(path, 1)
    group.data[at:at + 56] = before
    group.save()
    assert collect(maintainer).freed_blocks == 10
    assert repositories.read_all(other, 'stays') == content(2)
    maintenance.require_collected(maintainer)


def test_damaged_marks_go_with_their_blocks(maintainer, path, other):
    put(other, 'image', content(1))
    put(other, 'stays', content(2))
    batch = maintainer.catalog.batch()
    for address in (1 << 15 | 3, 1 << 15 | 13):
        maintainer.catalog.set_damaged(batch, address, {
            'found': 1, 'fingerprint': '00' * 32, 'quarantine': '',
            'images': []})
    maintainer.catalog.write(batch)
    other.delete('image')
    collect(maintainer)
    assert list(maintainer.catalog.damaged()) == [1 << 15 | 13]


# -- obstacles ----------------------------------------------------------------

def test_unreadable_recipe_stops_all(maintainer, path, other):
    put(other, 'goes', content(1))
    put(other, 'bad', content(2))
    with open(path / 'images' / 'bad', 'r+b') as f:
        f.seek(4096 + 16)
        f.write(b'\xff' * 64)
    other.delete('goes')
    result = collect(maintainer)
    assert 'bad' in result.refused and result.freed_blocks == 0
    plan = collector.plan(maintainer)
    assert 'bad' in plan.refused


def test_unreadable_recipe_committed_meanwhile(maintainer, path, other):
    put(other, 'goes', content(1))
    other.delete('goes')

    def come():
        put(other, 'bad', content(1) + content(2))
        with open(path / 'images' / 'bad', 'r+b') as f:
            f.seek(4096 + 16)
            f.write(b'\xff' * 64)
    result = collect(maintenance.watch(
        maintainer, maintenance.Once('enter_group', come)))
    assert 'bad' in result.refused and result.freed_blocks == 0
    assert repositories.group_lock_held(path, SHARE + 1) is None


def test_damaged_group_is_skipped(maintainer, path, other):
    put(other, 'image', content(*range(20)))
    other.delete('image')
    with open(path / 'groups' / '00000002', 'r+b') as f:
        f.write(b'rubbish' * 10)
    result = collect(maintainer)
    assert result.refused is None and result.freed_blocks >= 130
    assert list(result.failed) == [2]
    plan = collector.plan(maintainer)
    assert [g.number for g in plan.groups if g.action == 'skip'] == [2]


def test_stopping_between_groups(maintainer, path, other):
    put(other, 'image', content(*range(30)))
    other.delete('image')
    pace = pacing.Pace()

    def progress(done, total, what):
        if what == 'collecting groups' and done == 2:
            pace.stop()
    pace._progress = progress
    with pytest.raises(pacing.Stopped):
        collector.run_once(maintainer, pace)
    left = maintenance.live_slots(path)
    assert left and len(left) < 300
    assert not any(repositories.group_lock_held(path, SHARE + g)
                   for g in range(1, 6))
    collect(maintainer)
    maintenance.require_collected(maintainer)


# -- plan ---------------------------------------------------------------------

def tree(path):
    """Return every file's bytes, except those of the catalog."""
    return {str(file): (file.read_bytes(), file.stat().st_blocks)
            for file in sorted(path.rglob('*'))
            if file.is_file() and 'catalog' not in str(
                file.relative_to(path))}


def test_plan_is_what_happens(maintainer, path, other):
    put(other, 'stays', content(100))
    put(other, 'goes', content(*range(30)))
    collect(maintainer)
    other.delete('goes')
    put(other, 'new', content(200))
    image = pin(path, other, 300)
    before, sequence = tree(path), maintainer.catalog.sequence
    plan = collector.plan(maintainer)
    assert tree(path) == before and maintainer.catalog.sequence == sequence
    assert (plan.blocks, plan.bytes, plan.refused) == (
        300, 300 * BLOCK, None)
    assert [g.action for g in plan.groups][1:4] == ['unlink'] * 3
    assert sum(g.pinned for g in plan.groups) == 10
    assert sum(g.live for g in plan.groups) == 30
    assert dataclasses.asdict(plan)['groups'][0]['number'] == 1
    result = collect(maintainer)
    assert (result.freed_blocks, result.freed_bytes) == (
        plan.blocks, plan.bytes)
    assert result.unlinked == 3
    image.close()
    collect(maintainer)
    maintenance.require_collected(maintainer)


def test_plan_looks_only_where_something_went(maintainer, other):
    put(other, 'one', content(1))
    collect(maintainer)
    put(other, 'two', content(1))
    assert collector.plan(maintainer).groups == []
    other.delete('one')
    assert collector.plan(maintainer).groups == []
    other.delete('two')
    assert [g.number for g in collector.plan(maintainer).groups] == [1]


def test_plan_changes_nothing_though_entries_are_damaged(
        maintainer, path, other):
    put(other, 'bad', content(1))
    account(maintainer)
    other.delete('bad')
    entry, = repositories.spool(path, 'D')
    with open(path / 'spool' / entry, 'r+b') as f:
        f.write(b'\xff' * 64)
    before = tree(path)
    collector.plan(maintainer)
    assert tree(path) == before and maintainer.warnings == []


# -- full disk ----------------------------------------------------------------

def test_full_disk(tmp_path):
    """Freeing and punching work on a full disk, and rewriting is left out."""
    with repositories.small_disk(tmp_path / 'disk', '32m') as disk:
        path = maintenance.create(disk, block_size=4096, group_slots=1024,
                                  segment_size=65536)
        with repositories.open_repository(
                path, codec='none', filter_dir=str(tmp_path)) as repo:
            with maintaining(repo) as maintainer:
                data = noise(8 << 20, 1)
                put(repo, 'whole', data)
                # These are the first three blocks of each segment.
                some = b''.join(data[at:at + 12288]
                                for at in range(0, len(data), 65536))
                put(repo, 'some', some)
                put(repo, 'goes', noise(4 << 20, 2))
                account(maintainer)
                repo.delete('whole')
                repo.delete('goes')
                repositories.fill_disk(disk)
                result = collector.run_once(maintainer, pacing.Pace())
                assert result.refused is None
                assert result.freed_bytes == (12 << 20) - len(some)
                assert result.disk_bytes > 3 << 20
                maintenance.require_collected(maintainer)
                assert repositories.read_all(repo, 'some') == some
                put(repo, 'new', noise(2 << 20, 3))
                collector.run_once(maintainer, pacing.Pace())
            repositories.require_clean(path)


def test_rewriting_without_room_is_skipped(maintainer, path, other,
                                           monkeypatch):
    data = b''.join(noise(4 * BLOCK, f'segment {n}') for n in range(16))
    put(other, 'whole', data)
    put(other, 'some', b''.join(
        data[at:at + BLOCK] for at in range(0, len(data), 4 * BLOCK)))
    other.delete('whole')

    def no_room(name, arguments, before):
        if name.endswith('.rewrite'):
            raise exceptions.NoSpaceError('no room')
    result = collect(maintenance.watch(maintainer, no_room), live_share=50)
    assert (result.freed_blocks, result.rewritten,
            result.skipped_for_space) == (48, 0, 1)
    # The next run tries it again.
    maintenance.unwatch(maintainer)
    result = collect(maintainer, live_share=50)
    assert (result.rewritten, result.skipped_for_space) == (1, 0)
    maintenance.require_collected(maintainer)
