# SPDX-License-Identifier: Apache-2.0

"""Scrubbing: recipes that cannot be read are marked as lost."""

import contextlib
import os

import pytest

from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.support.repositories import ruin
from tests.unit.dedupd.tasks import scrubbing
from tests.unit.dedupd.tasks.scrubbing import collect
from tests.unit.dedupd.tasks.scrubbing import damage
from tests.unit.dedupd.tasks.scrubbing import findings

pytest_plugins = ['tests.support.maintainer_fixtures']

no_pause = scrubbing.no_pause


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
        assert maintainer.unreadable.reasons()
        assert collect(maintainer).refused
    aside = scrubber.mark_lost(maintainer, 'lost')
    assert (path / aside).exists()
    assert other.images() == ['kept']
    assert maintainer.unreadable.reasons() == {}
    assert maintainer.catalog.valid
    assert maintenance.counts(maintainer.catalog) == (
        maintenance.expected_counts(repo))
    account(maintainer)
    maintenance.require_counted(maintainer)
    assert collect(maintainer).refused is None
    maintenance.require_collected(maintainer)
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
    # A damaged block does not make the recipe damaged.
    damage(path, maintenance.blocks_of(repo, 'one')[0])
    with pytest.raises(exceptions.InvalidParameter, match='deleted'):
        scrubber.mark_lost(maintainer, 'one')


def test_counts_are_given_up_before_the_names(
        maintainer, path, repo, other):
    """The counts become invalid first, since they cannot be corrected."""
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
    """The blocks of a lost image stay until its reader closes it (I12)."""
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
    maintenance.require_counted(maintainer)
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
        maintainer = scrubber.maintainer_role.Maintainer(repo)
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
            maintenance.require_collected(maintainer)
            assert read_all(repo, 'kept') == content(1, 2)
        assert findings(path) == []
