# SPDX-License-Identifier: Apache-2.0

"""Recompression of groups that are partly filled."""

import os
import time

import pytest

from dedupd.tasks import recompressor
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.maintenance import helper_daemon
from glance_dedup.maintenance import live_hosts
from tests.support import maintenance
from tests.support.maintenance import BLOCK
from tests.support.maintenance import SLOTS
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put

pytest_plugins = ['tests.support.maintainer_fixtures']

ZSTD = 2


def text(seed, blocks):
    """Return data that compresses to half its size."""
    return noise(blocks * BLOCK // 2, seed).hex().encode()


def recompress(worker, level=0, pace=None, is_mine=lambda group: True):
    return recompressor.run_once(worker, pace or pacing.Pace(), 'zstd', level,
                                 is_mine)


class Patient(pacing.Pace):
    """A pace for idle hours, with processors that are always idle."""

    def __init__(self):
        super().__init__(patient=True)

    def wait_until_idle(self):
        pass


def facts_of(maintainer, number=1):
    facts = maintainer.engine.group_facts(number)
    return facts['codec'], facts['level'], facts['covered'], facts['published']


def reasons(maintainer):
    return [(group.number, group.action, group.reason)
            for group in recompressor.plan(maintainer, 'zstd').groups]


def grow_old(path, seconds):
    then = time.time() - seconds
    os.utime(repositories.group_path(path, 1), (then, then))


def test_in_idle_hours_what_changed_lately_waits(maintainer, path, other):
    put(other, 'one', text(1, 20))
    assert recompress(maintainer, pace=Patient()) == recompressor.Result()
    grow_old(path, 3500)
    assert recompress(maintainer, pace=Patient()) == recompressor.Result()
    grow_old(path, 3700)
    assert recompress(maintainer, pace=Patient()).groups == 1
    assert repositories.read_all(other, 'one') == text(1, 20)


def test_a_time_to_come_is_no_reason_to_wait(maintainer, path, other):
    put(other, 'one', text(1, 20))
    grow_old(path, -10 ** 6)
    assert recompress(maintainer, pace=Patient()).groups == 1


def test_a_run_that_was_asked_for_does_not_wait(maintainer, other):
    put(other, 'one', text(1, 20))
    assert reasons(maintainer) == [(1, 'recompress', '')]
    assert recompress(maintainer).groups == 1
    assert reasons(maintainer) == []


def test_again_when_it_has_doubled_and_when_it_is_full(maintainer, path,
                                                       other):
    model = {}

    def add(blocks):
        name = f'image-{len(model)}'
        model[name] = text(len(model), blocks)
        put(other, name, model[name])
    add(20)
    assert recompress(maintainer).groups == 1
    assert facts_of(maintainer) == (ZSTD, 3, 20, 20)
    add(19)
    assert reasons(maintainer) == [
        (1, 'skip', 'few blocks were added since it was recompressed')]
    assert recompress(maintainer) == recompressor.Result()
    assert facts_of(maintainer) == (ZSTD, 3, 20, 39)
    # Another level counts as a new request.
    assert recompress(maintainer, level=19).groups == 1
    assert facts_of(maintainer) == (ZSTD, 19, 39, 39)
    add(1)
    assert recompress(maintainer).kept == 1
    assert facts_of(maintainer) == (ZSTD, 3, 40, 40)
    add(SLOTS - 40)
    assert recompress(maintainer).groups == 1
    assert facts_of(maintainer) == (ZSTD, 3, SLOTS, SLOTS)
    assert recompress(maintainer) == recompressor.Result()
    assert os.listdir(path / 'groups') == ['00000001']
    maintenance.require_contents(other, model)
    assert checker.check(path).ok
    maintenance.account(maintainer)
    maintenance.require_counted(maintainer)


def test_what_would_hardly_become_smaller_is_noted(maintainer, other):
    put(other, 'noise', noise(20 * BLOCK, 1))
    assert recompress(maintainer).kept == 1
    assert facts_of(maintainer) == (ZSTD, 3, 20, 20)
    assert recompress(maintainer) == recompressor.Result()


def test_an_older_program_appends(maintainer, path, other):
    """A group counts as new after an older version appended to it.

    That version writes zeros into fields that it does not know.
    """
    put(other, 'one', text(1, 20))
    recompress(maintainer)
    file = repositories.Group(path, 1)
    record = file.record()
    record[0] += 1
    file.write_record(record)
    file.save()
    assert facts_of(maintainer) == (0, 0, 0, 20)
    assert recompress(maintainer).kept == 1
    assert facts_of(maintainer) == (ZSTD, 3, 20, 20)
    assert repositories.read_all(other, 'one') == text(1, 20)


def test_nothing_is_stored_in_it(maintainer, path, other):
    put(other, 'one', text(1, 20))
    file = repositories.Group(path, 1)
    record = file.record()
    record[0], record[2] = record[0] + 1, 0
    file.write_record(record)
    file.save()
    assert reasons(maintainer) == [(1, 'skip', 'nothing is stored in it')]


def test_n7_3_a_tail_is_settled_first(maintainer, path, other):
    put(other, 'one', text(1, 20))
    put(other, 'two', text(2, 10))
    file = repositories.Group(path, 1)
    file.forget_newest_record()
    file.save()
    assert facts_of(maintainer) == (0, 0, 0, 20)
    assert recompress(maintainer).groups == 1
    assert facts_of(maintainer) == (ZSTD, 3, 30, 30)
    maintenance.require_contents(other,
                                 {'one': text(1, 20), 'two': text(2, 10)})
    assert checker.check(path).ok


def test_uploads_meanwhile_take_another_group(maintainer, path, other):
    put(other, 'one', text(1, 20))
    uploaded = []

    class Pace(pacing.Pace):
        def step(self, *args, **kwargs):
            if not uploaded:
                uploaded.append(put(other, 'two', text(2, 10)))
            super().step(*args, **kwargs)

    assert recompress(maintainer, pace=Pace()).groups == 2
    put(other, 'three', text(3, 10))
    # The fullest group is appended to, now that its lease is free.
    assert facts_of(maintainer) == (ZSTD, 3, 20, 30)
    assert facts_of(maintainer, 2) == (ZSTD, 3, 10, 10)
    maintenance.require_contents(other, {
        'one': text(1, 20), 'two': text(2, 10), 'three': text(3, 10)})
    assert checker.check(path).ok


def test_a_run_that_makes_way_gives_its_lease_back(maintainer, path, other):
    put(other, 'one', text(1, 20))

    class Pace(pacing.Pace):
        def step(self, *args, **kwargs):
            raise pacing.Stopped()

    with pytest.raises(pacing.Stopped):
        recompress(maintainer, pace=Pace())
    assert maintainer.rewriting is None
    assert not [name for name in os.listdir(path / 'spool')
                if name[0] == 'G']
    put(other, 'two', text(2, 10))
    assert os.listdir(path / 'groups') == ['00000001']
    assert recompress(maintainer).groups == 1


def test_helpers_leave_them_to_the_maintainer(maintainer, path, other):
    """A helper skips partial groups, and the maintainer takes all (I4)."""
    put(other, 'one', text(1, SLOTS + 20))
    with (live_hosts.Hosts(path) as hosts,
          helper_daemon.Helper(other, hosts) as helper):
        assert recompress(helper).groups == 1
        assert facts_of(helper, 2) == (0, 0, 0, 20)
        with pytest.raises(exceptions.BusyError, match='is not sealed'):
            helper.engine.begin_rewriting(2, 'zstd', 1)
    assert recompress(maintainer, is_mine=lambda group: False).groups == 1
    assert facts_of(maintainer, 2) == (ZSTD, 3, 20, 20)
    assert repositories.read_all(other, 'one') == text(1, SLOTS + 20)
