# SPDX-License-Identifier: Apache-2.0

"""Accounting: large recipes are counted in steps."""

import os

import pytest

from dedupd.tasks import accounting
from dedupd.tasks import collector
from glance_dedup.base import pacing
from glance_dedup.check import checker
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put
from tests.support.repositories import ruin
from tests.unit.dedupd.tasks.accounts import figures
from tests.unit.dedupd.tasks.accounts import spool

pytest_plugins = ['tests.support.maintainer_fixtures']


PAGES = 4


@pytest.fixture
def small_steps(monkeypatch):
    """Set one step for each page of extents."""
    monkeypatch.setattr(maintenance.maintainer_role, 'BATCH_BYTES', 0)


@pytest.fixture
def started(other, small_steps):
    """Begin the catalog, so that later images are counted by accounting."""
    with maintaining(other):
        pass


def stop_after(steps):
    """Return a pace that stops a run after this many steps."""
    def progress(*_):
        nonlocal steps
        steps -= 1
        if steps == 0:
            pace.stop()
    pace = pacing.Pace(progress=progress)
    return pace


def account_some(maintainer, steps):
    with pytest.raises(pacing.Stopped):
        accounting.run_once(maintainer, stop_after(steps))


def begun(maintainer):
    """Return the number of counted pages of the only partly counted recipe."""
    (txid, _), = maintainer.catalog.all_begun()
    assert not maintainer.catalog.counted(txid)
    return maintainer.catalog.begun(txid)


def require_lawful(maintainer, path):
    """Require that the checker accepts the counts as those after a crash."""
    maintainer.close()
    result = checker.check(path)
    assert result.ok, result.findings
    for finding in result.findings:
        assert finding.file.startswith(('spool/', 'fence', 'groups/')) or (
            'index' in finding.sentence), finding


def test_large_recipe_is_counted_in_steps(maintainer, path, other,
                                          small_steps):
    put(other, 'large', maintenance.scattered(1, pages=PAGES))
    log = maintenance.Log()
    assert figures(account(maintenance.watch(maintainer, log))) == (1, 0, 1, 0)
    fences, unlinked = log.where('write_fence'), log.where('.unlink')
    assert len(fences) == PAGES and max(fences) < min(unlinked)
    assert len(log.where('catalog.write')) == PAGES
    maintenance.unwatch(maintainer)
    maintenance.require_counted(maintainer)
    other.delete('large')
    maintenance.watch(maintainer, log)
    assert figures(account(maintainer)) == (0, 1, 1, 0)
    maintenance.unwatch(maintainer)
    assert len(log.where('catalog.write')) == 2 * PAGES
    maintenance.require_counted(maintainer)
    require_lawful(maintainer, path)


def test_batches_are_bounded(maintainer, other, monkeypatch):
    """The size of a batch does not depend on the size of a recipe."""
    monkeypatch.setattr(maintenance.maintainer_role, 'BATCH_BYTES', 10000)
    sizes = []
    settle = maintainer.settle
    monkeypatch.setattr(maintainer, 'settle', lambda batch: (
        sizes.append(batch.size), settle(batch)))
    put(other, 'large', maintenance.scattered(*range(3), pages=10))
    account(maintainer)
    other.delete('large')
    account(maintainer)
    assert len(sizes) > 8 and max(sizes) < 10000 + 3 * 4200
    maintenance.require_counted(maintainer)


@pytest.mark.parametrize('steps', range(1, PAGES))
def test_stopped_counting_goes_on(path, other, started, steps):
    put(other, 'large', maintenance.scattered(1, pages=PAGES))
    with maintaining(other) as maintainer:
        account_some(maintainer, steps)
        assert begun(maintainer) == steps
        require_lawful(maintainer, path)
    with maintaining(other) as maintainer:
        log = maintenance.Log()
        account(maintenance.watch(maintainer, log))
        maintenance.unwatch(maintainer)
        assert len(log.where('catalog.write')) == PAGES - steps
        assert maintainer.warnings == []
        maintenance.require_counted(maintainer)
        require_lawful(maintainer, path)


@pytest.mark.parametrize('steps', range(1, PAGES))
def test_stopped_uncounting_goes_on(path, other, started, steps):
    put(other, 'stays', maintenance.scattered(1, pages=1))
    put(other, 'large', maintenance.scattered(1, pages=PAGES))
    with maintaining(other) as maintainer:
        account(maintainer)
        other.delete('large')
        account_some(maintainer, steps)
        assert begun(maintainer) == PAGES - steps
        require_lawful(maintainer, path)
    with maintaining(other) as maintainer:
        log = maintenance.Log()
        account(maintenance.watch(maintainer, log))
        maintenance.unwatch(maintainer)
        assert len(log.where('catalog.write')) == PAGES - steps
        maintenance.require_counted(maintainer)


@pytest.mark.parametrize('steps', range(1, PAGES))
def test_deleted_in_the_middle_of_counting(path, other, started, steps):
    """The counts of a partly counted image are taken back after a deletion."""
    put(other, 'stays', maintenance.scattered(1, pages=PAGES))
    with maintaining(other) as maintainer:
        account(maintainer)
        put(other, 'goes', maintenance.scattered(1, pages=PAGES))
        account_some(maintainer, steps)
        other.delete('goes')
        require_lawful(maintainer, path)
    with maintaining(other) as maintainer:
        log = maintenance.Log()
        account(maintenance.watch(maintainer, log))
        maintenance.unwatch(maintainer)
        assert len(log.where('catalog.write')) == steps
        maintenance.require_counted(maintainer)


@pytest.mark.parametrize('call', range(1, 110, 4))
def test_killed_in_any_step(path, other, started, call):
    """Counting, un-counting and taking back survive a kill in any step."""
    with maintaining(other) as maintainer:
        put(other, 'old', maintenance.scattered(1, 2, pages=2))
        account(maintainer)
        put(other, 'taken-back', maintenance.scattered(2, 3, pages=2))
        account_some(maintainer, 2)
        other.delete('taken-back')
        other.delete('old')
        put(other, 'new', maintenance.scattered(3, 1, pages=2))
    maintainer = maintenance.maintainer_role.Maintainer(other)
    try:
        account(maintenance.watch(maintainer, maintenance.Kill(call)))
    except maintenance.Killed:
        pass
    maintenance.kill(maintainer)
    require_lawful(maintainer, path)
    with maintaining(other) as maintainer:
        assert maintainer.warnings == []
        account(maintainer)
        maintenance.require_counted(maintainer)
    repositories.require_clean(path)


@pytest.mark.parametrize('steps', range(1, PAGES))
def test_n6_3_counted_in_part_and_in_use(path, other, started, steps):
    """The blocks of a partly counted image are kept while it is read."""
    data = maintenance.scattered(1, pages=PAGES)
    put(other, 'read', data)
    with maintaining(other) as maintainer:
        account_some(maintainer, steps)
        with other.open_image('read') as image:
            other.delete('read')
            live = maintenance.live_slots(path)
            result = collector.run_once(maintainer, pacing.Pace())
            assert result.refused is None and result.freed_blocks == 0
            assert maintenance.live_slots(path) == live
            assert collector.plan(maintainer).blocks == 0
            assert image.read() == data
        result = collector.run_once(maintainer, pacing.Pace())
        assert result.freed_blocks == 51 * PAGES
        maintenance.require_collected(maintainer)


def test_n6_3_counted_in_part_and_lost(path, other, started):
    """Nothing is freed while a partly counted image's entry is missing."""
    put(other, 'lost', maintenance.scattered(1, pages=PAGES))
    put(other, 'goes', content(9))
    with maintaining(other) as maintainer:
        account(maintainer)
        other.delete('lost')
        account_some(maintainer, 1)
    name, = spool(path, 'D')
    other.delete('goes')
    os.rename(path / 'spool' / name, path / 'aside')
    with maintaining(other) as maintainer:
        result = collector.run_once(maintainer, pacing.Pace())
        assert 'lost' in result.refused and result.freed_blocks == 0
        os.rename(path / 'aside', path / 'spool' / name)
        result = collector.run_once(maintainer, pacing.Pace())
        assert result.refused is None
        maintenance.require_collected(maintainer)


def test_n6_3_pins_are_those_of_the_last_run(path, other, started):
    """The pins of a run come from that run, not from an earlier one."""
    put(other, 'read', maintenance.scattered(1, pages=PAGES))
    with maintaining(other) as maintainer:
        account_some(maintainer, 2)
        with other.open_image('read'):
            other.delete('read')
            accountant = accounting.Accountant(maintainer, pacing.Pace())
            assert not accountant.run().unreadable
            pins = list(accountant.pins(1))
            assert pins != []
            assert not accountant.run().unreadable
            assert list(accountant.pins(1)) == pins     # each pin once
            for name in spool(path):
                os.rename(path / 'spool' / name, path / name)
            unreadable = accountant.run().unreadable
            assert 'only in part' in unreadable['read']
            assert list(accountant.pins(1)) == []


def test_n6_3_nothing_is_freed_if_no_entry_pins_it(
        path, other, started, monkeypatch):
    """Nothing is freed if accounting has left out a partly counted recipe."""
    put(other, 'goes', content(9))
    put(other, 'large', maintenance.scattered(1, pages=PAGES))
    with maintaining(other) as maintainer:
        account(maintainer)
        other.delete('large')
        account_some(maintainer, 2)
        other.delete('goes')
        monkeypatch.setattr(accounting.Accountant, '_settle',
                            lambda self, names: None)
        result = collector.run_once(maintainer, pacing.Pace())
        assert 'only in part' in result.refused and not result.freed_blocks


def test_damaged_in_the_middle_of_counting(path, other, started):
    """Nothing is freed while a partly counted recipe is damaged."""
    put(other, 'goes', content(9))
    with maintaining(other) as maintainer:
        account(maintainer)
        put(other, 'large', maintenance.scattered(1, pages=PAGES))
        account_some(maintainer, 2)
        original = (path / 'images/large').read_bytes()
        ruin(path / 'images/large', 4096 * PAGES + 100)
        other.delete('goes')
        result = collector.run_once(maintainer, pacing.Pace())
        assert 'large' in result.refused and not result.freed_blocks
        with open(path / 'images/large', 'r+b') as f:
            f.write(original)
        assert collector.run_once(maintainer, pacing.Pace()).refused is None
        maintenance.require_collected(maintainer)


def test_damaged_in_the_middle_of_uncounting(path, other, started):
    """A damaged recipe is set aside, and the catalog is rebuilt without it."""
    put(other, 'stays', maintenance.scattered(1, pages=2))
    put(other, 'large', maintenance.scattered(1, pages=PAGES))
    with maintaining(other) as maintainer:
        account(maintainer)
        other.delete('large')
        account_some(maintainer, 2)
        entry, = spool(path, 'D')
        ruin(path / 'spool' / entry, 4096 + 100)
        account(maintainer)
        maintenance.require_counted(maintainer)
        assert list(maintainer.catalog.all_begun()) == []


def test_foreseen_from_the_middle(maintainer, path, other, small_steps):
    """A plan continues with a partly counted recipe."""
    put(other, 'stays', maintenance.scattered(1, pages=1))
    put(other, 'large', maintenance.scattered(1, 2, pages=2))
    account(maintainer)
    other.delete('large')
    account_some(maintainer, 2)
    put(other, 'new', maintenance.scattered(3, pages=2))
    planned = collector.plan(maintainer)
    assert begun(maintainer) == 2
    result = collector.run_once(maintainer, pacing.Pace())
    assert (planned.blocks, planned.refused) == (result.freed_blocks, None)
    assert planned.blocks == 51 * 3
    maintenance.require_collected(maintainer)
