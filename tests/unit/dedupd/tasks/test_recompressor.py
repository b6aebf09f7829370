# SPDX-License-Identifier: Apache-2.0

"""Recompression: rewritten groups, skipped groups, and making way."""

import os

import pytest

from dedupd.tasks import collector
from dedupd.tasks import recompressor
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from tests.support import maintenance
from tests.support.maintenance import BLOCK
from tests.support.maintenance import maintaining
from tests.support.maintenance import SLOTS
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put

pytest_plugins = ['tests.support.maintainer_fixtures']

ZSTD = 2
SHARE = repositories.SHARE_BYTE


def text(*seeds, blocks=SLOTS):
    """Return a group of text for each seed; it compresses to half its size."""
    return b''.join(noise(blocks * BLOCK // 2, seed).hex().encode()
                    for seed in seeds)


def recompress(maintainer, codec='zstd', level=0, pace=None):
    return recompressor.run_once(maintainer, pace or pacing.Pace(), codec,
                                 level)


class Stopping(pacing.Pace):
    """A pace that has the task make way after this many steps."""

    def __init__(self, steps, **arguments):
        super().__init__(**arguments)
        self.steps = steps

    def step(self, *args, **kwargs):
        if not self.steps:
            self.stop()
        self.steps -= 1
        super().step(*args, **kwargs)


def mark_of(maintainer, number):
    facts = maintainer.engine.group_facts(number)
    return facts['codec'], facts['level']


@pytest.fixture
def model(other):
    """Store two full groups of text, one of noise, and a part of text."""
    model = {'text': text(1, 2), 'noise': noise(SLOTS * BLOCK, 3),
             'rest': text(4, blocks=10)}
    for image_id, data in model.items():
        put(other, image_id, data)
    return model


# -- recompressed groups ------------------------------------------------------

def test_groups_become_smaller(maintainer, path, other, model):
    before = maintenance.disk(path)
    states = [maintenance.states(path, number) for number in range(1, 5)]
    blocks = {name: maintenance.blocks_of(other, name) for name in model}
    result = recompress(maintainer)
    assert (result.groups, result.kept, result.busy) == (3, 1, 0)
    assert before - maintenance.disk(path) == result.disk_bytes > 2 * 12000
    assert [mark_of(maintainer, number) for number in range(1, 5)] == (
        [(ZSTD, 3)] * 4)
    maintenance.require_contents(other, model)
    for name, addresses in blocks.items():
        assert maintenance.blocks_of(other, name) == addresses
    assert states == [maintenance.states(path, number)
                      for number in range(1, 5)]
    assert checker.check(path).ok
    maintenance.account(maintainer)
    maintenance.require_counted(maintainer)


def test_each_group_once(maintainer, path, other, model):
    recompress(maintainer)
    found = {name: os.stat(f'{path}/groups/{name}').st_ino
             for name in os.listdir(path / 'groups')}
    log = maintenance.Log()
    again = recompress(maintenance.watch(maintainer, log), level=3)
    maintenance.unwatch(maintainer)
    assert (again.groups, again.kept) == (0, 0)
    assert not log.where('enter_group', 'begin_rewriting')
    assert {name: os.stat(f'{path}/groups/{name}').st_ino
            for name in os.listdir(path / 'groups')} == found
    # Another level counts as a new request. A group without a gain is kept and
    # noted.
    again = recompress(maintainer, level=1)
    assert (again.groups, again.kept) == (0, 4)
    assert mark_of(maintainer, 1) == (ZSTD, 1)
    again = recompress(maintainer, 'lz4')
    assert again.kept == 4 and mark_of(maintainer, 1) == (1, 0)


def test_a_plan_changes_nothing(maintainer, path, other, model):
    before = maintenance.disk(path)
    plan = recompressor.plan(maintainer, 'zstd', 19)
    assert [(g.number, g.action) for g in plan.groups] == [
        (number, 'recompress') for number in range(1, 5)]
    assert 0 < plan.bytes < before and maintenance.disk(path) == before
    recompress(maintainer)
    assert not recompressor.plan(maintainer, 'zstd').groups


@pytest.mark.parametrize('codec,level,words', [
    ('zstd', 20, 'codec level 20'), ('lz4', 3, 'codec level 3'),
    ('zstd', -1, 'codec level -1'), ('brotli', 0, 'brotli')])
def test_what_a_codec_lacks_is_refused(maintainer, model, codec, level, words):
    for function in (recompress, recompressor.plan):
        with pytest.raises(exceptions.InvalidParameter, match=words):
            function(maintainer, codec, level=level)
    assert mark_of(maintainer, 1) == (0, 0)


def test_freeing_in_what_was_compressed_anew(maintainer, path, other):
    put(other, 'one', text(1, blocks=40))
    put(other, 'two', text(2, blocks=24))
    recompress(maintainer)
    other.delete('one')
    result = collector.run_once(maintainer, pacing.Pace(), live_share=50,
                                evacuate_share=0)
    assert result.freed_blocks == 40 and result.rewritten == 1
    # The group is packed with its other blocks and counts as done.
    assert mark_of(maintainer, 1) == (ZSTD, 3)
    assert recompress(maintainer).groups == 0
    assert repositories.read_all(other, 'two') == text(2, blocks=24)
    assert checker.check(path).ok


def test_the_plan_of_a_collection_knows_joined_segments(
        maintainer, other):
    """The plan of a collection agrees with the collection."""
    put(other, 'one', text(1, blocks=34))
    put(other, 'two', text(2, blocks=30))
    recompress(maintainer)
    other.delete('one')
    options = {'live_share': 50, 'evacuate_share': 0}
    group, = collector.plan(maintainer, **options).groups
    assert group.action == 'rewrite'
    assert collector.run_once(maintainer, pacing.Pace(),
                              **options).rewritten == 1


# -- skipped groups -----------------------------------------------------------

def test_groups_in_use_are_put_off(maintainer, path, other, model):
    with repositories.holding(path / 'locks/groups', SHARE + 1):
        result = recompress(maintainer)
    assert (result.busy, result.groups, result.kept) == (1, 2, 1)
    assert mark_of(maintainer, 1) == (0, 0)
    assert recompress(maintainer).groups == 1


def test_a_transaction_puts_the_exchange_off(maintainer, path, other, model,
                                             monkeypatch):
    """The exchange waits if an upload began during the compression."""
    monkeypatch.setattr(recompressor, '_PAUSE', 0)
    uploads = []

    class Pace(pacing.Pace):
        def step(self, *args, **kwargs):
            if not uploads:
                uploads.append(other.begin('again'))
                uploads[0].write(model['text'][:SLOTS * BLOCK])
                uploads[0]._engine.keep()
            super().step(*args, **kwargs)

    result = recompress(maintainer, pace=Pace())
    assert (result.busy, result.groups) == (1, 2)
    uploads[0].commit()
    assert other.statistics()['hits'] >= SLOTS
    # The task no longer excludes other processes.
    assert not maintainer.busy and maintainer.rewriting is None
    assert recompress(maintainer).groups == 1
    assert os.listdir(path / 'spool') and not [
        name for name in os.listdir(path / 'spool') if name[0] == 'G']
    maintenance.require_contents(
        other, {**model, 'again': model['text'][:SLOTS * BLOCK]})


def test_a_damaged_block_stops_its_group_only(maintainer, path, other, model):
    file = repositories.Group(path, 1)
    file.data[file.entry(5)[2] + 40] ^= 1
    file.save()
    result = recompress(maintainer)
    assert list(result.failed) == [1] and 'slot 4' in result.failed[1]
    assert result.groups == 2
    assert mark_of(maintainer, 1) == (0, 0)
    # The task skips the group once the scrub has marked it.
    from dedupd.tasks import scrubber
    scrubber.run_once(maintainer, pacing.Pace(), full=True)
    plan = recompressor.plan(maintainer, 'zstd')
    assert plan.groups[0].reason == 'a block of it is damaged'


def test_a_poisoned_group_is_skipped(maintainer, path, model):
    file = repositories.Group(path, 1)
    record = file.record()
    record[0], record[3] = record[0] + 1, 1
    file.write_record(record)
    file.save()
    assert recompressor.plan(maintainer, 'zstd').groups[0].reason == (
        'writing to it failed once')
    assert recompress(maintainer).groups == 2


@pytest.mark.parametrize('call', ['begin_rewriting', '.step'])
def test_no_room(maintainer, path, other, model, call):
    def no_room(name, arguments, before):
        if name.endswith(call):
            raise exceptions.NoSpaceError('no room')
    result = recompress(maintenance.watch(maintainer, no_room))
    assert (result.skipped_for_space, result.groups) == (4, 0)
    maintenance.unwatch(maintainer)
    assert maintainer.rewriting is None
    assert not [name for name in os.listdir(path / 'spool')
                if name[0] == 'G']
    assert recompress(maintainer).groups == 3


# -- making way ---------------------------------------------------------------

def test_it_goes_on_in_the_middle_of_a_group(maintainer, path, other, model):
    with pytest.raises(pacing.Stopped):
        recompress(maintainer, pace=Stopping(1))
    rewriting, mark = maintainer.rewriting
    assert rewriting.number == 1 and mark == (ZSTD, 3, False)
    # Other work continues meanwhile; the task holds only the group's lease.
    maintenance.account(maintainer)
    put(other, 'again', model['text'])
    assert collector.run_once(maintainer, pacing.Pace()).busy == 1
    maintenance.require_contents(other, {**model, 'again': model['text']})
    log = maintenance.Log()
    result = recompress(maintenance.watch(maintainer, log))
    maintenance.unwatch(maintainer)
    assert result.groups == 3
    assert len(log.where('begin_rewriting')) == 3   # for the other groups
    maintenance.require_contents(other, {**model, 'again': model['text']})


def test_what_it_goes_on_with_is_forgotten_for_another_level(
        maintainer, path, model):
    for forget in (lambda: recompress(maintainer, level=19),
                   lambda: recompressor.give_up(maintainer)):
        with pytest.raises(pacing.Stopped):
            recompress(maintainer, level=1, pace=Stopping(1))
        assert any(name[0] == 'G' for name in os.listdir(path / 'spool'))
        forget()
        assert maintainer.rewriting is None
        assert not any(name[0] == 'G' for name in os.listdir(path / 'spool'))
    assert mark_of(maintainer, 1) == (ZSTD, 19)


def test_the_maintainers_end_leaves_nothing(path, repo, other, model):
    with maintaining(repo) as maintainer:
        with pytest.raises(pacing.Stopped):
            recompress(maintainer, pace=Stopping(1))
    assert not any(name[0] == 'G' for name in os.listdir(path / 'spool'))
    with maintaining(repo) as maintainer:
        assert recompress(maintainer).groups == 3
    maintenance.require_contents(other, model)


# -- idle hours ---------------------------------------------------------------

def test_it_waits_for_idle_processors(maintainer, model, monkeypatch):
    monkeypatch.setattr(pacing, 'WATCH', 0)
    clock = iter(range(1000))
    monkeypatch.setattr(os, 'cpu_count', lambda: 4)
    # These are idle seconds of four processors at the begin and the end of a
    # second, three times.
    seconds = [0, 1, 0, 1.9, 0, 2]
    monkeypatch.setattr(pacing, 'idle_seconds', lambda: seconds.pop(0))
    waits = []
    pace = pacing.Pace(
        lambda done, total, what: waits.append(what), patient=True,
        clock=lambda: next(clock))
    pace.wait_until_idle()
    assert waits == ['waiting for idle processors'] * 3 and not seconds
    # A client that waits for the task does not wait for idle processors.
    pacing.Pace().wait_until_idle()


def test_it_makes_way_while_it_waits(maintainer, model, monkeypatch):
    monkeypatch.setattr(pacing, 'WATCH', 0)
    monkeypatch.setattr(pacing, 'idle_seconds', lambda: 0)
    with pytest.raises(pacing.Stopped):
        recompress(maintainer, pace=Stopping(20, patient=True))
    assert maintainer.rewriting is None


def test_idle_seconds_grow():
    before = pacing.idle_seconds()
    assert 0 <= before <= pacing.idle_seconds()
