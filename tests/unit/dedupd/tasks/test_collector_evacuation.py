# SPDX-License-Identifier: Apache-2.0

"""Collection: nearly empty groups are evacuated."""

import random

import pytest

from dedupd.tasks import collector
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from tests.support import maintenance
from tests.support.maintenance import BLOCK
from tests.support.maintenance import content
from tests.support.maintenance import SLOTS
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put
from tests.unit.dedupd.tasks.collecting import collect

pytest_plugins = ['tests.support.maintainer_fixtures']


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
    maintenance.require_contents(other, images)
    collect(maintainer)
    maintenance.require_collected(maintainer)
    assert len(maintenance.groups(path)) <= 3
    repositories.require_clean(path)


def test_uploads_find_what_was_evacuated(maintainer, path, other):
    """Another host's upload finds blocks after an evacuation.

    The evacuation updates the host's filter.
    """
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
    maintenance.require_collected(maintainer)
    assert 1 not in maintenance.groups(path)
    assert repositories.read_all(other, 'small') == data[:BLOCK]


def make_sparse(other, count):
    """Store full groups with one live block each, and one more group."""
    for number in range(count):
        data = noise(SLOTS * BLOCK, number)
        put(other, f'big-{number}', data)
        put(other, f'small-{number}', data[:BLOCK])
    put(other, 'last', content(99))
    for number in range(count):
        other.delete(f'big-{number}')


def test_what_is_too_much_is_evacuated_by_later_runs(
        maintainer, path, other, monkeypatch):
    monkeypatch.setattr(collector, '_MAX_EVACUATED', 2)
    make_sparse(other, 6)
    assert [collect(maintainer, evacuate_share=10).evacuated
            for _ in range(4)] == [2, 2, 2, 0]
    collect(maintainer)
    maintenance.require_collected(maintainer)
    assert len(maintenance.groups(path)) == 1
    assert collect(maintainer).groups == 0


def test_evacuation_that_was_stopped_is_not_forgotten(
        maintainer, path, other):
    make_sparse(other, 2)

    def stop(done, total, what):
        if what in ('looking for images', 'evacuating groups'):
            pace.stop()
    pace = pacing.Pace(progress=stop)
    with pytest.raises(pacing.Stopped):
        collector.run_once(maintainer, pace, evacuate_share=10)
    assert collect(maintainer, evacuate_share=10).evacuated == 2
    collect(maintainer)
    maintenance.require_collected(maintainer)
    assert collect(maintainer).groups == 0


def test_killed_evacuation_does_not_forget_what_went_meanwhile(
        maintainer, path, other, monkeypatch):
    """A killed evacuation keeps a group whose count later becomes zero.

    The count changes after the group was found to be sparse.
    """
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
    maintenance.require_collected(maintainer)
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
    # The engine's own functions need the real module.
    real = collector._engine

    class Module:
        names_any = staticmethod(real.names_any)
        slots_judge = staticmethod(real.slots_judge)

        @staticmethod
        def Relocation(engine, handle):
            return real.Relocation(engine._target, handle)

        @staticmethod
        def Merge(engine, image_id, mapping):
            return real.Merge(engine._target, image_id, mapping)
    for module in (maintainer_role, collector, collector.merger):
        monkeypatch.setattr(module, '_engine', Module)
    collect(maintainer, evacuate_share=10)
    monkeypatch.undo()
    maintenance.unwatch(maintainer)
    assert reading.read() == noise(BLOCK, 3)
    reading.close()
    maintenance.require_contents(other, images)
    for _ in range(3):
        collect(maintainer, evacuate_share=10)
    maintenance.require_collected(maintainer)
    maintenance.require_contents(other, images)
    repositories.require_clean(path)
