# SPDX-License-Identifier: Apache-2.0

"""Collection: rule N6, what goes back to the disk, and what never may."""

import dataclasses
import os
import random
import signal

import pytest

from dedupd.tasks import collector
from glance_dedup.base import exceptions
from glance_dedup.base import task
from glance_dedup.maintenance import maintainer as maintainer_module
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import BLOCK
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support.maintenance import SLOTS
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put

pytest_plugins = ['tests.support.maintainer_fixtures']

SHARE = repositories.SHARE_BYTE
INTENT = repositories.INTENT_BYTE


def collect(maintainer, **options):
    # As little else as possible, unless it is asked for.
    return collector.run_once(maintainer, task.Pace(),
                              **{'live_share': 0, 'evacuate_share': 0,
                                 **options})


def quiet(maintainer):
    """A collection without a watch."""
    maintenance.unwatch(maintainer)
    return collect(maintainer)


# -- what is freed ------------------------------------------------------------

def test_deleted_blocks_are_freed(maintainer, path, other):
    put(other, 'one', content(1, 2))
    put(other, 'two', content(2, 3))
    assert collect(maintainer).freed_blocks == 0
    other.delete('one')
    result = collect(maintainer)
    assert (result.freed_blocks, result.freed_bytes) == (10, 10 * BLOCK)
    assert result.groups == 1 and result.busy == 0
    maintenance.need_collected(maintainer)
    assert repositories.read_all(other, 'two') == content(2, 3)
    repositories.need_clean(path)


def test_blocks_that_no_image_ever_named_are_freed(maintainer, path, other):
    """Of an upload that was given up after a sync point."""
    with other.begin('image') as transaction:
        transaction.write(content(1))
        transaction._engine.keep()
        transaction.write(content(2))
    assert len(maintenance.live_slots(path)) == 10
    assert collect(maintainer).freed_blocks == 10
    maintenance.need_collected(maintainer)
    # And they are looked at once only.
    assert collect(maintainer).groups == 0


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
    """As `du` sees it."""
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
            result = collector.run_once(maintainer, task.Pace())
            left = maintenance.disk(path) - before
            # The last group stays, with its fingerprint store.
            assert left < 600 << 10
            assert stored - left == pytest.approx(result.disk_bytes, rel=0.02)
            assert result.freed_bytes == 8 << 20
            maintenance.need_collected(maintainer)
            assert repositories.read_all(repo, 'stays') == noise(2 << 20, 1)
            repositories.need_clean(path)


def test_empty_groups_are_unlinked(maintainer, path, other):
    put(other, 'stays', content(100))
    put(other, 'goes', content(*range(30)))
    collect(maintainer)
    other.delete('goes')
    groups = maintenance.groups(path)
    assert len(groups) == 5
    result = collect(maintainer)
    # The first has other blocks, too; the last may never go.
    assert result.unlinked == 3
    assert maintenance.groups(path) == [1, 5]
    assert [n for n, _ in maintainer.catalog.groups()] == [1, 5]
    maintenance.need_collected(maintainer)
    repositories.need_clean(path)
    put(other, 'again', content(*range(30)))
    assert min(set(maintenance.groups(path)) - {1, 5}) == 6
    collect(maintainer)
    maintenance.need_collected(maintainer)


def test_killed_after_unlinking(path, repo, other):
    put(other, 'goes', content(*range(30)))
    maintainer = maintainer_module.Maintainer(repo)
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
        maintenance.need_collected(maintainer)


def test_groups_are_rewritten(maintainer, path, other):
    """Of each segment one block of four stays."""
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
    maintenance.need_collected(maintainer)
    repositories.need_clean(path)


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


# -- N6.1: lease and exclusive lock -------------------------------------------

@pytest.mark.parametrize('byte', [1, SHARE + 1])
def test_n6_1_group_in_use_is_put_off(maintainer, path, other, byte):
    put(other, 'image', content(1))
    other.delete('image')
    with repositories.holding(path / 'locks' / 'groups', byte, shared=True):
        result = collect(maintainer)
        assert (result.busy, result.groups, result.freed_blocks) == (1, 0, 0)
        assert maintenance.live_slots(path)
    assert collect(maintainer).freed_blocks == 10
    assert repositories.group_lock_held(path, INTENT + 1) is None
    maintenance.need_collected(maintainer)


def test_n6_1_group_of_a_transaction_under_way(maintainer, path, other):
    """A count of zero says nothing as long as somebody holds the group."""
    put(other, 'first', content(1))
    other.delete('first')
    with other.begin('second') as transaction:
        transaction.write(content(1) + bytes(BLOCK))
        transaction._engine.keep()
        assert collect(maintainer).busy == 1
        assert transaction.commit().new_bytes == 0
    assert collect(maintainer).busy == 0
    maintenance.need_collected(maintainer)
    assert repositories.read_all(other, 'second') == content(1) + bytes(BLOCK)


def test_n6_1_transaction_of_the_maintainers_own_handle(
        maintainer, path, repo):
    """Its locks do not refuse one another: the handle has to tell."""
    put(repo, 'first', content(1))
    repo.delete('first')
    with repo.begin('second') as transaction:
        transaction.write(content(1) + bytes(BLOCK))
        transaction._engine.keep()
        assert collect(maintainer).busy == 1
        assert transaction.commit().new_bytes == 0
    assert collect(maintainer).busy == 0
    assert repositories.read_all(repo, 'second') == content(1) + bytes(BLOCK)


def test_n6_1_published_by_a_transaction_under_way(maintainer, path, other):
    with other.begin('image') as transaction:
        transaction.write(content(1))
        transaction._engine.keep()
        assert collect(maintainer).busy == 1
        assert len(maintenance.live_slots(path)) == 10
        transaction.commit()
    collect(maintainer)
    assert repositories.read_all(other, 'image') == content(1)


def test_what_is_not_published_is_left_alone(maintainer, path, other):
    """A crash of the machine lost the record; the next upload judges them."""
    put(other, 'stays', content(1))
    put(other, 'goes', content(2))
    collect(maintainer)
    other.delete('goes')
    group = repositories.Group(path, 1)
    group.forget_newest_record()
    group.save()
    result = collect(maintainer)
    assert result.freed_blocks == 0 and result.failed == {}
    assert repositories.read_all(other, 'stays') == content(1)
    put(other, 'new', content(3))
    collect(maintainer)
    maintenance.need_collected(maintainer)


def test_busy_group_is_tried_again_at_the_end(maintainer, path, other):
    put(other, 'image', content(*range(20)))
    other.delete('image')
    holding = repositories.holding(path / 'locks' / 'groups', SHARE + 1,
                                   shared=True)
    holding.__enter__()
    maintenance.watch(maintainer, maintenance.Once(
        '.punch', lambda: holding.__exit__(None, None, None)))
    result = collect(maintainer)
    assert result.busy == 0 and result.freed_blocks == 200
    assert not maintainer.busy


@pytest.fixture
def clock(monkeypatch):
    """The time that the collector sees; a list of the one number."""
    now = [1000.0]
    monkeypatch.setattr(collector, '_now', lambda: now[0])
    return now


def held_intents(path):
    return [g for g in maintenance.groups(path)
            if repositories.group_lock_held(path, INTENT + g)]


def test_a_group_in_use_stays_open_to_uploads(maintainer, path, other, clock):
    """One delete while an upload runs: the next copy is no new data."""
    put(other, 'base', content(1, 2))
    put(other, 'goes', content(3))
    other.delete('goes')
    with other.begin('long') as transaction:
        transaction.write(content(1))
        transaction._engine.keep()
        for _ in range(5):
            assert collect(maintainer).busy == 1
            assert not held_intents(path)
            clock[0] += 100
        assert put(other, 'copy', content(1, 2)).new_bytes == 0
        transaction.commit()
    collect(maintainer)
    maintenance.need_collected(maintainer)


def test_intent_keeps_new_transactions_off(maintainer, path, other, clock):
    put(other, 'first', content(1, 2))
    other.delete('first')
    with other.begin('second') as transaction:
        transaction.write(content(1) * 2)
        transaction._engine.keep()
        collect(maintainer)
        clock[0] += 10000
        assert collect(maintainer).busy == 1
        assert held_intents(path) == [1]
        # This one stores it anew, elsewhere.
        assert put(other, 'third', content(2)).new_bytes == 10 * BLOCK
        transaction.commit()
    collect(maintainer)
    assert not held_intents(path) and not maintainer.busy
    maintenance.need_collected(maintainer)


@pytest.mark.parametrize('longest', [1, 30, 600, 7200])
def test_overlapping_uploads_do_not_starve_the_collector(
        maintainer, path, other, clock, longest):
    """Each begins before the last has ended; none where the intent is seen."""
    put(other, 'image', content(1))
    other.delete('image')
    began = clock[0]
    under_intent = 0.0
    ends = [began + longest]
    holding = repositories.holding(path / 'locks' / 'groups', SHARE + 1,
                                   shared=True)
    holding.__enter__()
    while True:
        if ends and not held_intents(path):
            ends.append(clock[0] + longest)     # the next upload begins
        ends = [end for end in ends if end > clock[0]]
        if not ends:
            holding.__exit__(None, None, None)
        if not collect(maintainer).busy:
            break
        step = min(30.0, longest)
        if maintainer.intent_ends is not None:
            step = min(step, maintainer.intent_ends - clock[0])
        step = max(step, 0.5)
        under_intent += step * bool(held_intents(path))
        clock[0] += step
    assert clock[0] - began <= 600 + 60 + 40 * longest + 600
    assert under_intent <= 60 + 0.2 * (clock[0] - began) + longest
    assert not maintainer.busy and not held_intents(path)
    maintenance.need_collected(maintainer)


def test_an_intent_ends(maintainer, path, other, clock):
    """Longer each time, with pauses that are longer still."""
    put(other, 'image', content(1))
    other.delete('image')
    with repositories.holding(path / 'locks' / 'groups', SHARE + 1,
                              shared=True):
        changes = []
        for _ in range(10000):
            collect(maintainer)
            held = bool(held_intents(path))
            if held != (len(changes) % 2 == 1):
                changes.append(clock[0])
                assert (maintainer.intent_ends is not None) == held
            if len(changes) == 6:
                break
            clock[0] += 10
    gaps = [after - before for before, after in zip(changes, changes[1:])]
    held, open_ = gaps[::2], gaps[1::2]
    assert held == [60, 120, 240]
    assert all(o >= 9 * h for h, o in zip(held, open_))


def test_at_most_eight_groups_are_announced(maintainer, path, other, clock):
    put(other, 'image', content(*range(80)))
    other.delete('image')
    groups = maintenance.groups(path)
    assert len(groups) > 10
    with repositories.holding(path / 'locks' / 'groups',
                              *(SHARE + g for g in groups), shared=True):
        assert collect(maintainer).busy == len(groups)
        clock[0] += 10000
        assert collect(maintainer).busy == len(groups)
        first = held_intents(path)
        assert len(first) == 8
        # Then it is the others' turn.
        clock[0] += 60
        collect(maintainer)
        clock[0] += 1
        collect(maintainer)
        assert set(held_intents(path)) == set(groups) - set(first)
    assert collect(maintainer).busy == 0
    assert not held_intents(path)
    maintenance.need_collected(maintainer)


def test_intent_goes_with_the_maintainer(path, repo, other, clock):
    put(other, 'image', content(1))
    other.delete('image')
    with repositories.holding(path / 'locks' / 'groups', SHARE + 1,
                              shared=True):
        with maintaining(repo) as maintainer:
            collect(maintainer)
            clock[0] += 10000
            assert collect(maintainer).busy == 1
            assert held_intents(path) == [1]
        assert not held_intents(path)


@pytest.mark.parametrize('why', ['nothing to free', 'refused', 'stopped'])
def test_intent_that_is_not_needed_any_more(maintainer, path, other, clock,
                                            why):
    """Nobody else would end it."""
    put(other, 'kept', content(2))
    put(other, 'image', content(1))
    other.delete('image')
    with repositories.holding(path / 'locks' / 'groups', SHARE + 1,
                              shared=True):
        collect(maintainer)
        clock[0] += 10000
        collect(maintainer)
        assert held_intents(path) == [1]
        if why == 'refused':
            put(other, 'new', content(3))
            recipe = path / 'images' / 'new'
            recipe.write_bytes(bytes(len(recipe.read_bytes())))
            assert collect(maintainer).refused
        elif why == 'stopped':
            pace = task.Pace()
            pace.stop()
            with pytest.raises(task.Stopped):
                collector.run_once(maintainer, pace)
        else:
            batch = maintainer.catalog.batch()
            maintainer.catalog.set_group(
                batch, 1, dirty=False,
                judged=maintainer.engine.group_facts(1)['published'])
            maintainer.write(batch)
            collect(maintainer)
        assert not held_intents(path)


def test_n6_5_both_locks_are_given_back(maintainer, path, other):
    put(other, 'image', content(1))
    other.delete('image')
    assert collect(maintainer).freed_blocks == 10
    for byte in 1, SHARE + 1:
        assert repositories.group_lock_held(path, byte) is None


# -- N6.2: the spool is judged under the lock ---------------------------------

def test_n6_2_committed_just_before_the_lock(maintainer, path, other):
    """Its blocks have a count of zero in what was judged before."""
    put(other, 'first', content(1))
    other.delete('first')
    hook = maintenance.Once('enter_group', lambda: put(
        other, 'second', content(1)))
    result = collect(maintenance.watch(maintainer, hook))
    assert hook.happened and result.freed_blocks == 0
    assert repositories.read_all(other, 'second') == content(1)
    quiet(maintainer)
    maintenance.need_collected(maintainer)
    repositories.need_clean(path)


def test_n6_2_for_each_group(maintainer, path, other):
    put(other, 'first', content(*range(20)))
    other.delete('first')
    images = []

    def hook(name, arguments, before):
        if name.endswith('enter_group') and before:
            image_id = f'image-{len(images)}'
            put(other, image_id, content(*range(20)))
            images.append(image_id)
    assert collect(maintenance.watch(maintainer, hook)).freed_blocks == 0
    for image_id in images:
        assert repositories.read_all(
            other, image_id) == content(*range(20))


def test_n6_2_judged_before_the_counts_are_read(maintainer, path, other):
    put(other, 'image', content(1))
    collect(maintainer)
    other.delete('image')
    log = maintenance.Log()
    collect(maintenance.watch(maintainer, log))
    entered, = log.where('enter_group')
    listed = [at for at in log.where('engine.spool') if at > entered]
    counts, = log.where('catalog.counts')
    assert entered < listed[0] < counts


# -- N6.3: pins ---------------------------------------------------------------

def pin(path, other, *seeds):
    """An image that is deleted before it was counted, and is being read."""
    put(other, 'read', content(*seeds))
    image = other.open_image('read')
    other.delete('read')
    return image


def test_n6_3_read_and_not_counted(maintainer, path, other):
    collect(maintainer)
    with pin(path, other, 1, 2) as image:
        put(other, 'goes', content(3))
        other.delete('goes')
        result = collect(maintainer)
        assert result.freed_blocks == 10
        assert image.read() == content(1, 2)
        # As often as it is tried.
        assert collect(maintainer).freed_blocks == 0
        assert image.read() == content(1, 2)
    result = collect(maintainer)
    assert result.freed_blocks == 20
    maintenance.need_collected(maintainer)
    assert collect(maintainer).groups == 0


def test_n6_3_of_several_groups(maintainer, path, other):
    with pin(path, other, *range(30)) as image:
        put(other, 'goes', content(*range(40)))
        other.delete('goes')
        assert collect(maintainer).freed_blocks >= 100
        assert len(maintenance.live_slots(path)) == 300
        assert image.read() == content(*range(30))
    assert collect(maintainer).freed_blocks == 300
    maintenance.need_collected(maintainer)


def test_n6_3_of_a_single_block(maintainer, path, other):
    """The group is looked at again, for however little."""
    collect(maintainer)
    put(other, 'read', content(1)[:BLOCK])
    with other.open_image('read') as image:
        other.delete('read')
        assert collect(maintainer).freed_blocks == 0
        assert image.read() == content(1)[:BLOCK]
    assert collect(maintainer).freed_blocks == 1
    maintenance.need_collected(maintainer)


def test_n6_3_complete_and_about_to_be_linked(maintainer, path, other):
    """Its writer is between the recipe's fsync and the link."""
    put(other, 'image', content(1))
    os.rename(path / 'images' / 'image', path / 'aside')
    entry, = repositories.spool(path)
    with repositories.holding(path / 'spool' / entry, 0, shared=True):
        assert collect(maintainer).freed_blocks == 0
        os.rename(path / 'aside', path / 'images' / 'image')
    collect(maintainer)
    maintenance.need_collected(maintainer)
    assert repositories.read_all(other, 'image') == content(1)


def test_n6_3_damaged_pin_stops_the_collection(maintainer, path, other):
    put(other, 'goes', content(5))
    other.delete('goes')
    image = pin(path, other, 1)
    os.unlink(path / 'spool' / repositories.spool(path)[0])
    entry, = repositories.spool(path, 'D')[:1]
    for name in repositories.spool(path, 'D') + repositories.spool(path):
        with open(path / 'spool' / name, 'r+b') as f:
            f.seek(4096 + 16)
            f.write(b'\xff' * 64)
    result = collect(maintainer)
    assert result.refused is not None and result.freed_blocks == 0
    image.close()
    assert collect(maintainer).refused is None
    maintenance.need_collected(maintainer)


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
    maintainer = maintainer_module.Maintainer(repo)
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
        maintenance.need_collected(maintainer)


def test_what_an_older_sector_hides_comes_back(maintainer, path, other):
    """Nothing is freed where an entry that is needed has no block."""
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
    maintenance.need_collected(maintainer)


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


# -- what stops it ------------------------------------------------------------

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
    pace = task.Pace()

    def progress(done, total, what):
        if what == 'collecting groups' and done == 2:
            pace.stop()
    pace._progress = progress
    with pytest.raises(task.Stopped):
        collector.run_once(maintainer, pace)
    left = maintenance.live_slots(path)
    assert left and len(left) < 300
    assert not any(repositories.group_lock_held(path, SHARE + g)
                   for g in range(1, 6))
    collect(maintainer)
    maintenance.need_collected(maintainer)


# -- plan ---------------------------------------------------------------------

def tree(path):
    """Every file but the catalog's, with its bytes."""
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
    maintenance.need_collected(maintainer)


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
    """Freeing and punching need no room; what does is left out."""
    with repositories.small_disk(tmp_path / 'disk', '32m') as disk:
        path = maintenance.create(disk, block_size=4096, group_slots=1024,
                                  segment_size=65536)
        with repositories.open_repository(
                path, codec='none', filter_dir=str(tmp_path)) as repo:
            with maintaining(repo) as maintainer:
                data = noise(8 << 20, 1)
                put(repo, 'whole', data)
                # The first three blocks of each segment.
                some = b''.join(data[at:at + 12288]
                                for at in range(0, len(data), 65536))
                put(repo, 'some', some)
                put(repo, 'goes', noise(4 << 20, 2))
                account(maintainer)
                repo.delete('whole')
                repo.delete('goes')
                repositories.fill_disk(disk)
                result = collector.run_once(maintainer, task.Pace())
                assert result.refused is None
                assert result.freed_bytes == (12 << 20) - len(some)
                assert result.disk_bytes > 3 << 20
                maintenance.need_collected(maintainer)
                assert repositories.read_all(repo, 'some') == some
                put(repo, 'new', noise(2 << 20, 3))
                collector.run_once(maintainer, task.Pace())
            repositories.need_clean(path)


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
    # It is tried again.
    maintenance.unwatch(maintainer)
    result = collect(maintainer, live_share=50)
    assert (result.rewritten, result.skipped_for_space) == (1, 0)
    maintenance.need_collected(maintainer)


# -- evacuation ---------------------------------------------------------------

def test_nearly_empty_groups_are_evacuated(maintainer, path, other):
    images = {}
    for number in range(40):
        data = noise(16 * BLOCK, number)
        put(other, f'big-{number}', data)
        images[f'small-{number}'] = data[:BLOCK]
        put(other, f'small-{number}', data[:BLOCK])
    for number in range(40):
        other.delete(f'big-{number}')
    before = maintenance.disk(path)
    result = collect(maintainer, evacuate_share=10)
    assert result.evacuated >= 8 and result.unlinked == result.evacuated
    assert maintenance.disk(path) < before
    maintenance.need_contents(other, images)
    collect(maintainer)
    maintenance.need_collected(maintainer)
    assert len(maintenance.groups(path)) <= 3
    repositories.need_clean(path)


def test_uploads_find_what_was_evacuated(maintainer, path, other):
    """The host's filter, which others made, is told of it."""
    data = noise(SLOTS * BLOCK, 1)
    put(other, 'big', data)
    put(other, 'small', data[:5 * BLOCK])
    other.delete('big')
    assert collect(maintainer, evacuate_share=10).evacuated == 1
    assert put(other, 'again', data[:5 * BLOCK]).new_bytes == 0


@pytest.mark.parametrize('error', ['NoSpaceError', 'BusyError'])
def test_evacuation_that_was_not_possible_is_tried_again(
        maintainer, path, other, monkeypatch, error):
    data = noise(SLOTS * BLOCK, 1)
    put(other, 'big', data)
    put(other, 'small', data[:BLOCK])
    put(other, 'last', content(2))
    other.delete('big')

    def fail(*_):
        raise getattr(exceptions, error)('not now')
    with monkeypatch.context() as patch:
        if error == 'NoSpaceError':
            patch.setattr(maintainer, 'relocation', fail)
        else:
            patch.setattr(collector.merger, 'merge_image', fail)
        result = collect(maintainer, evacuate_share=10)
    assert result.evacuated == 0 and result.freed_blocks == SLOTS - 1
    assert result.skipped_for_space == (error == 'NoSpaceError')
    assert collect(maintainer, evacuate_share=10).evacuated == 1
    collect(maintainer)
    maintenance.need_collected(maintainer)
    assert 1 not in maintenance.groups(path)
    assert repositories.read_all(other, 'small') == data[:BLOCK]


def make_sparse(other, count):
    """Full groups in each of which one block lives; and another one."""
    for number in range(count):
        data = noise(SLOTS * BLOCK, number)
        put(other, f'big-{number}', data)
        put(other, f'small-{number}', data[:BLOCK])
    put(other, 'last', content(99))
    for number in range(count):
        other.delete(f'big-{number}')


def test_what_is_too_much_is_evacuated_by_later_runs(
        maintainer, path, other, monkeypatch):
    monkeypatch.setattr(collector, '_MOST_EVACUATED', 2)
    make_sparse(other, 6)
    assert [collect(maintainer, evacuate_share=10).evacuated
            for _ in range(4)] == [2, 2, 2, 0]
    collect(maintainer)
    maintenance.need_collected(maintainer)
    assert len(maintenance.groups(path)) == 1
    assert collect(maintainer).groups == 0


def test_evacuation_that_was_stopped_is_not_forgotten(
        maintainer, path, other):
    make_sparse(other, 2)

    def stop(done, total, what):
        if what in ('looking for images', 'evacuating groups'):
            pace.stop()
    pace = task.Pace(progress=stop)
    with pytest.raises(task.Stopped):
        collector.run_once(maintainer, pace, evacuate_share=10)
    assert collect(maintainer, evacuate_share=10).evacuated == 2
    collect(maintainer)
    maintenance.need_collected(maintainer)
    assert collect(maintainer).groups == 0


def test_killed_evacuation_does_not_forget_what_went_meanwhile(
        maintainer, path, other, monkeypatch):
    """A count that goes to zero after the group was found to be sparse."""
    make_sparse(other, 2)
    collect_one = collector._Run._collect
    forget = collector._Run._forget_sparse

    def delete_and_collect(run, number):
        if run._sparse and 'small-0' in other.images():
            other.delete('small-0')
        return collect_one(run, number)

    def forget_and_die(run, groups):
        forget(run, groups)
        raise maintenance.Killed
    with monkeypatch.context() as patch:
        patch.setattr(collector._Run, '_collect', delete_and_collect)
        patch.setattr(collector._Run, '_forget_sparse', forget_and_die)
        with pytest.raises(maintenance.Killed):
            collect(maintainer, evacuate_share=10)
    assert other.images() == ['last', 'small-1']
    collect(maintainer)
    maintenance.need_collected(maintainer)
    assert collect(maintainer).groups == 0


def test_group_that_is_not_full_is_not_evacuated(maintainer, path, other):
    put(other, 'big', content(1, blocks=40))
    put(other, 'small', content(1, blocks=40)[:BLOCK])
    other.delete('big')
    assert collect(maintainer, evacuate_share=10).evacuated == 0


def test_evacuation_while_images_come_and_go(
        maintainer, path, other, monkeypatch):
    images = {}
    for number in range(20):
        data = noise(16 * BLOCK, number)
        put(other, f'big-{number}', data)
        images[f'small-{number}'] = data[:BLOCK]
        put(other, f'small-{number}', data[:BLOCK])
    reading = other.open_image('small-3')
    for number in range(20):
        other.delete(f'big-{number}')
    rng = random.Random(3)

    def hook(name, arguments, before):
        if rng.random() < 0.02:
            number = rng.randrange(20)
            if f'small-{number}' in images:
                other.delete(f'small-{number}')
                del images[f'small-{number}']
            else:
                images[f'small-{number}'] = noise(BLOCK, number)
                put(other, f'small-{number}', noise(BLOCK, number))
    maintenance.watch(maintainer, hook)
    # What the engine makes of itself takes the real one.
    real = collector._engine

    class Module:
        names_any = staticmethod(real.names_any)

        @staticmethod
        def Relocation(engine, handle):
            return real.Relocation(engine._target, handle)

        @staticmethod
        def Merge(engine, image_id, mapping):
            return real.Merge(engine._target, image_id, mapping)
    for module in (maintainer_module, collector, collector.merger):
        monkeypatch.setattr(module, '_engine', Module)
    collect(maintainer, evacuate_share=10)
    monkeypatch.undo()
    maintenance.unwatch(maintainer)
    assert reading.read() == noise(BLOCK, 3)
    reading.close()
    maintenance.need_contents(other, images)
    for _ in range(3):
        collect(maintainer, evacuate_share=10)
    maintenance.need_collected(maintainer)
    maintenance.need_contents(other, images)
    repositories.need_clean(path)


# -- all of it, at random -----------------------------------------------------

@pytest.mark.parametrize('seed', range(6))
def test_against_a_model(path, repo, other, seed):
    """Two writers, deleters, readers; anything between any two steps."""
    rng = random.Random(seed)
    model, reading, writing = {}, [], []

    def act():
        what = rng.randrange(9)
        handle = rng.choice([repo, other])
        if what < 3:
            image_id = f'image-{rng.randrange(9)}'
            if image_id not in model:
                model[image_id] = content(
                    *(rng.randrange(25) for _ in range(rng.randrange(5))),
                    blocks=rng.randrange(1, 12))
                put(handle, image_id, model[image_id])
        elif what < 5 and model:
            image_id = rng.choice(sorted(model))
            handle.delete(image_id)
            del model[image_id]
        elif what == 5 and model and len(reading) < 4:
            image_id = rng.choice(sorted(model))
            reading.append((handle.open_image(image_id), model[image_id]))
        elif what == 6 and reading:
            image, data = reading.pop(rng.randrange(len(reading)))
            assert image.read() == data
            image.close()
        elif what == 7 and len(writing) < 2:
            image_id = f'slow-{rng.getrandbits(64)}'
            data = content(rng.randrange(25), rng.randrange(25))
            transaction = handle.begin(image_id)
            transaction.write(data[:7 * BLOCK])
            writing.append((transaction, data))
        elif what == 8 and writing:
            transaction, data = writing.pop()
            transaction.write(data[7 * BLOCK:])
            if rng.random() < 0.7:
                transaction.commit()
                model[transaction.image_id] = data
            else:
                transaction.abort()

    busy = [False]

    def hook(name, arguments, before):
        if rng.random() < 0.03 and not busy[0]:
            busy[0] = True
            act()
            busy[0] = False
    for _ in range(25):
        with maintaining(repo, hook) as maintainer:
            for _ in range(2):
                act()
                collector.run_once(maintainer, task.Pace(), live_share=50,
                                   evacuate_share=0)
            maintenance.unwatch(maintainer)
            assert maintainer.warnings == []
            for image, data in reading:
                assert image.read() == data
            maintenance.need_contents(other, model)
    for transaction, _ in writing:
        transaction.abort()
    for image, _ in reading:
        image.close()
    with maintaining(repo) as maintainer:
        for _ in range(3):
            collector.run_once(maintainer, task.Pace(), evacuate_share=20)
        maintenance.need_collected(maintainer)
    maintenance.need_contents(other, model)
    repositories.need_clean(path)


@pytest.mark.parametrize('seed', range(4))
def test_killed_at_random(path, repo, other, seed):
    """In the middle of everything that a collection does."""
    rng = random.Random(seed)
    model = {}

    def maintain():
        with repositories.open_repository(path, codec='none') as repo:
            with maintaining(repo) as maintainer:
                assert maintainer.warnings == []
                while True:
                    collector.run_once(maintainer, task.Pace(),
                                       live_share=70, evacuate_share=30)
    for round_ in range(5):
        pid, pipe = repositories.fork_child(maintain)
        try:
            for step in range(rng.randrange(5, 25)):
                if len(model) > 3 and rng.random() < 0.5:
                    image_id = rng.choice(sorted(model))
                    other.delete(image_id)
                    del model[image_id]
                else:
                    image_id = f'image-{round_}-{step}'
                    model[image_id] = content(
                        *(rng.randrange(30) for _ in range(3)))
                    put(other, image_id, model[image_id])
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)
        maintenance.need_contents(other, model)
    with maintaining(repo) as maintainer:
        for _ in range(3):
            collect(maintainer, live_share=70, evacuate_share=30)
        maintenance.need_collected(maintainer)
    maintenance.need_contents(other, model)
    repositories.need_clean(path)


@pytest.mark.parametrize('step', range(1, 70, 3))
def test_killed_at_each_step(path, repo, other, step):
    put(other, 'stays', content(1, 2, 30))
    put(other, 'goes', content(*range(14)))
    with maintaining(repo) as maintainer:
        collect(maintainer)
    other.delete('goes')
    put(other, 'new', content(5, 40))
    maintainer = maintainer_module.Maintainer(repo)
    try:
        collect(maintenance.watch(maintainer, maintenance.Kill(step)),
                live_share=90)
    except maintenance.Killed:
        pass
    maintenance.kill(maintainer)
    with maintaining(other) as maintainer:
        assert maintainer.warnings == []
        collect(maintainer)
        maintenance.need_collected(maintainer)
    maintenance.need_contents(other, {'stays': content(1, 2, 30),
                                      'new': content(5, 40)})
    repositories.need_clean(path)
