# SPDX-License-Identifier: Apache-2.0

"""Collection: rules N6.1 to N6.3, and blocks that must not be freed."""

import os

import pytest

from dedupd.tasks import collector
from glance_dedup.base import pacing
from tests.support import maintenance
from tests.support.maintenance import BLOCK
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put
from tests.unit.dedupd.tasks.collecting import collect
from tests.unit.dedupd.tasks.collecting import pin
from tests.unit.dedupd.tasks.collecting import SHARE

pytest_plugins = ['tests.support.maintainer_fixtures']
INTENT = repositories.INTENT_BYTE


def quiet(maintainer):
    """Collect without a watch."""
    maintenance.unwatch(maintainer)
    return collect(maintainer)


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
    maintenance.require_collected(maintainer)


def test_n6_1_group_of_a_transaction_under_way(maintainer, path, other):
    """No block of a group is freed while a transaction holds the group."""
    put(other, 'first', content(1))
    other.delete('first')
    with other.begin('second') as transaction:
        transaction.write(content(1) + bytes(BLOCK))
        transaction._engine.keep()
        assert collect(maintainer).busy == 1
        assert transaction.commit().new_bytes == 0
    assert collect(maintainer).busy == 0
    maintenance.require_collected(maintainer)
    assert repositories.read_all(other, 'second') == content(1) + bytes(BLOCK)


def test_n6_1_transaction_of_the_maintainers_own_handle(
        maintainer, path, repo):
    """A transaction of the maintainer's own handle stops the collector, too.

    Locks of one handle do not exclude one another, so the handle itself
    reports the transaction.
    """
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


def test_what_is_not_published_any_more_is_recovered(maintainer, path, other):
    """Collection recovers a group whose published record is lost.

    A crash of the machine lost the record of both images.
    """
    put(other, 'stays', content(1))
    put(other, 'goes', content(2))
    collect(maintainer)
    other.delete('goes')
    group = repositories.Group(path, 1)
    group.forget_newest_record()
    group.save()
    result = collect(maintainer)
    assert result.freed_blocks == 10 and result.failed == {}
    assert repositories.read_all(other, 'stays') == content(1)
    maintenance.require_collected(maintainer)
    put(other, 'new', content(3))
    assert repositories.read_all(other, 'new') == content(3)


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
    """The collector's clock, as a list with one number."""
    now = [1000.0]
    monkeypatch.setattr(collector, '_now', lambda: now[0])
    return now


def held_intents(path):
    return [g for g in maintenance.groups(path)
            if repositories.group_lock_held(path, INTENT + g)]


def test_a_group_in_use_stays_open_to_uploads(maintainer, path, other, clock):
    """A collection does not block uploads to a group that an upload uses."""
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
    maintenance.require_collected(maintainer)


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
        # This upload stores the block again, in another group.
        assert put(other, 'third', content(2)).new_bytes == 10 * BLOCK
        transaction.commit()
    collect(maintainer)
    assert not held_intents(path) and not maintainer.busy
    maintenance.require_collected(maintainer)


@pytest.mark.parametrize('longest', [1, 30, 600, 7200])
def test_overlapping_uploads_do_not_starve_the_collector(
        maintainer, path, other, clock, longest):
    """Uploads that overlap without a pause do not starve the collector.

    Each upload begins before the last one has ended, except during an intent.
    """
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
    maintenance.require_collected(maintainer)


def test_an_intent_ends(maintainer, path, other, clock):
    """Each intent lasts longer than the last, with still longer pauses."""
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
        # The other groups come next.
        clock[0] += 60
        collect(maintainer)
        clock[0] += 1
        collect(maintainer)
        assert set(held_intents(path)) == set(groups) - set(first)
    assert collect(maintainer).busy == 0
    assert not held_intents(path)
    maintenance.require_collected(maintainer)


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
    """An intent without a use ends, since no other process would end it."""
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
            pace = pacing.Pace()
            pace.stop()
            with pytest.raises(pacing.Stopped):
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
    """An upload that commits just before the lock keeps its blocks.

    Their counts were zero before.
    """
    put(other, 'first', content(1))
    other.delete('first')
    hook = maintenance.Once('enter_group', lambda: put(
        other, 'second', content(1)))
    result = collect(maintenance.watch(maintainer, hook))
    assert hook.happened and result.freed_blocks == 0
    assert repositories.read_all(other, 'second') == content(1)
    quiet(maintainer)
    maintenance.require_collected(maintainer)
    repositories.require_clean(path)


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

def test_n6_3_read_and_not_counted(maintainer, path, other):
    collect(maintainer)
    with pin(path, other, 1, 2) as image:
        put(other, 'goes', content(3))
        other.delete('goes')
        result = collect(maintainer)
        assert result.freed_blocks == 10
        assert image.read() == content(1, 2)
        # Further runs give the same result.
        assert collect(maintainer).freed_blocks == 0
        assert image.read() == content(1, 2)
    result = collect(maintainer)
    assert result.freed_blocks == 20
    maintenance.require_collected(maintainer)
    assert collect(maintainer).groups == 0


def test_n6_3_of_several_groups(maintainer, path, other):
    with pin(path, other, *range(30)) as image:
        put(other, 'goes', content(*range(40)))
        other.delete('goes')
        assert collect(maintainer).freed_blocks >= 100
        assert len(maintenance.live_slots(path)) == 300
        assert image.read() == content(*range(30))
    assert collect(maintainer).freed_blocks == 300
    maintenance.require_collected(maintainer)


def test_n6_3_of_a_single_block(maintainer, path, other):
    """A pin of a single block has the collector examine the group again."""
    collect(maintainer)
    put(other, 'read', content(1)[:BLOCK])
    with other.open_image('read') as image:
        other.delete('read')
        assert collect(maintainer).freed_blocks == 0
        assert image.read() == content(1)[:BLOCK]
    assert collect(maintainer).freed_blocks == 1
    maintenance.require_collected(maintainer)


def test_n6_3_complete_and_about_to_be_linked(maintainer, path, other):
    """An entry is kept between the recipe's fsync and the link."""
    put(other, 'image', content(1))
    os.rename(path / 'images' / 'image', path / 'aside')
    entry, = repositories.spool(path)
    with repositories.holding(path / 'spool' / entry, 0, shared=True):
        assert collect(maintainer).freed_blocks == 0
        os.rename(path / 'aside', path / 'images' / 'image')
    collect(maintainer)
    maintenance.require_collected(maintainer)
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
    maintenance.require_collected(maintainer)
