# SPDX-License-Identifier: Apache-2.0

"""Accounting: the counts, and the rules N1, N3 and N4."""

import os
import shutil

import pytest

from dedupd.tasks import accounting
from glance_dedup.base import pacing
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put
from tests.unit.dedupd.tasks.accounts import figures
from tests.unit.dedupd.tasks.accounts import kill_it
from tests.unit.dedupd.tasks.accounts import make_entry
from tests.unit.dedupd.tasks.accounts import spool

pytest_plugins = ['tests.support.maintainer_fixtures']


# -- the counts ---------------------------------------------------------------

def test_images_are_counted(maintainer, path, other):
    put(other, 'one', content(1, 2, 1))
    put(other, 'two', content(2, 3) + bytes(5000))
    assert spool(path, 'T') != []
    assert figures(account(maintainer)) == (2, 0, 2, 0)
    maintenance.require_counted(maintainer)
    facts = {f['image_id']: f for _, f in maintainer.catalog.ledger()}
    assert facts['one']['blocks'] == 30
    assert facts['two']['upload_id'] == other.stat('two').upload_id
    assert figures(account(maintainer)) == (0, 0, 0, 0)


def test_deleted_images_are_uncounted(maintainer, path, other):
    for number in range(3):
        put(other, f'image-{number}', content(number, 7))
    account(maintainer)
    other.delete('image-1')
    assert figures(account(maintainer)) == (0, 1, 1, 0)
    maintenance.require_counted(maintainer)


def test_empty_image(maintainer, other):
    put(other, 'empty', b'')
    put(other, 'zeros', bytes(100000))
    assert figures(account(maintainer)) == (2, 0, 2, 0)
    maintenance.require_counted(maintainer)


def test_many_entries_take_several_rounds(maintainer, other, monkeypatch):
    log = maintenance.Log()
    monkeypatch.setattr(accounting, 'ROUND', 4)
    for number in range(10):
        put(other, f'image-{number}', content(number))
    assert figures(account(maintenance.watch(maintainer, log))) == (
        10, 0, 10, 0)
    assert len(log.where('sync images')) == len(
        log.where('write_fence')) == 3
    maintenance.require_counted(maintainer)


def test_large_batches_are_split(maintainer, other, monkeypatch):
    monkeypatch.setattr(
        'glance_dedup.maintenance.maintainer_role.BATCH_BYTES', 10000)
    for number in range(10):
        put(other, f'image-{number}', content(number, blocks=64))
    log = maintenance.Log()
    assert figures(account(maintenance.watch(maintainer, log))) == (
        10, 0, 10, 0)
    assert len(log.where('write_fence')) > 2
    maintenance.require_counted(maintainer)


def test_entries_that_somebody_else_removes(
        maintainer, path, other, monkeypatch):
    """Entries that another process removes are counted, as are later ones."""
    put(other, 'one', content(1))
    put(other, 'two', content(2))
    gone, stays = spool(path, 'T')
    settle = maintainer.settle

    def settle_and_remove(batch):
        settle(batch)
        if gone in spool(path):
            os.unlink(path / 'spool' / gone)
    monkeypatch.setattr(maintainer, 'settle', settle_and_remove)
    assert figures(account(maintainer)) == (2, 0, 1, 0)
    assert spool(path) == []
    maintenance.require_counted(maintainer)


def test_stopping_between_rounds(maintainer, other, monkeypatch):
    monkeypatch.setattr(accounting, 'ROUND', 2)
    for number in range(5):
        put(other, f'image-{number}', content(number))
    pace = pacing.Pace(progress=lambda *_: pace.stop())
    with pytest.raises(pacing.Stopped):
        accounting.run_once(maintainer, pace)
    assert figures(account(maintainer)) == (3, 0, 3, 0)
    maintenance.require_counted(maintainer)


# -- N1: the ledger -----------------------------------------------------------

def test_n1_image_deleted_before_it_was_counted(maintainer, path, other):
    """T and D are both in the spool, so the counts do not change."""
    put(other, 'stays', content(1))
    account(maintainer)
    put(other, 'goes', content(1))
    other.delete('goes')
    assert [name[0] for name in spool(path)] == ['D', 'T']
    assert figures(account(maintainer)) == (0, 0, 2, 0)
    maintenance.require_counted(maintainer)


def test_n1_deleted_after_its_entry_was_counted_but_not_unlinked(
        maintainer, path, other):
    put(other, 'stays', content(1))
    put(other, 'goes', content(1))
    with pytest.raises(maintenance.Killed):
        account(maintenance.watch(maintainer, maintenance.Once(
            '.unlink', kill_it)))
    maintenance.kill(maintainer)
    assert len(spool(path, 'T')) == 2
    other.delete('goes')
    with maintaining(other) as maintainer:
        assert figures(account(maintainer)) == (0, 1, 3, 0)
        maintenance.require_counted(maintainer)


@pytest.mark.parametrize('step', range(1, 80, 3))
def test_n1_everything_may_be_repeated(path, other, step):
    """After a kill at any call, a second run counts each recipe once."""
    for number in range(3):
        put(other, f'image-{number}', content(number, 9))
    with repositories.open_repository(path) as repo:
        with maintaining(repo) as maintainer:
            account(maintainer)
        other.delete('image-0')
        put(other, 'image-4', content(4, 9))
        put(other, 'image-5', content(5, 9))
        other.delete('image-5')
        os.rename(path / 'images' / 'image-1', path / 'aside')
        make = path / 'spool' / f'D-{"7" * 32}'
        os.rename(path / 'aside', make)
        maintainer = maintenance.maintainer_role.Maintainer(repo)
        hook = maintenance.Kill(step)
        try:
            account(maintenance.watch(maintainer, hook))
        except maintenance.Killed:
            pass
        maintenance.kill(maintainer)
    with maintaining(other) as maintainer:
        assert maintainer.warnings == []
        account(maintainer)
        maintenance.require_counted(maintainer)
    repositories.require_clean(path)


# -- N3: two lock bytes -------------------------------------------------------

def test_n3_byte_1_is_never_taken_of_a_live_recipe(maintainer, path, other):
    """The maintainer never takes byte 1 of a live recipe.

    So a live recipe never refuses a reader.
    """
    put(other, 'image', content(1))
    make_entry(path, 'image')
    make_entry(path, 'image', 'O')
    taken = []

    def hook(name, arguments, before):
        if name.endswith('try_lock') and not before:
            taken.append(arguments)
        if not before:
            assert repositories.lock_held(
                path / 'images' / 'image', 1) is None
    account(maintenance.watch(maintainer, hook))
    assert (0,) in taken and (1,) not in taken


# -- N4: judging --------------------------------------------------------------

def test_n4_1_live_counts_whatever_the_locks_say(maintainer, path, other):
    transaction = other.begin('image')
    transaction.write(content(1))
    transaction.commit()
    file = path / 'images' / 'image'
    with repositories.holding(file, 0, 1, shared=True):
        assert figures(account(maintainer)) == (1, 0, 1, 0)
    maintenance.require_counted(maintainer)


@pytest.mark.parametrize('write', [0, 5, 1000])
def test_n4_2_upload_under_way_is_left(maintainer, path, other, write):
    with other.begin('image') as transaction:
        transaction.write(content(1) * write)
        assert figures(account(maintainer)) == (0, 0, 0, 1)
        assert len(spool(path, 'T')) == 1
        transaction.write(content(2))
        transaction.commit()
    assert figures(account(maintainer)) == (1, 0, 1, 0)
    maintenance.require_counted(maintainer)


def test_n4_2_complete_and_not_linked_yet_is_left(maintainer, path, other):
    """A complete entry stays while its writer is about to link it."""
    put(other, 'image', content(1))
    os.unlink(path / 'images' / 'image')
    entry, = spool(path, 'T')
    with repositories.holding(path / 'spool' / entry, 0, shared=True):
        assert figures(account(maintainer)) == (0, 0, 0, 1)
    assert spool(path, 'T') == [entry]


@pytest.mark.parametrize('data', [b'', content(1), content(1) * 200])
def test_n4_2_dead_upload_is_removed(maintainer, path, data):
    """An entry whose locks are free is removed (N4.5)."""
    def die():
        with repositories.open_repository(path) as repo:
            transaction = repo.begin('image')
            transaction.write(data)
            os._exit(0)
    with pytest.raises(repositories.ChildFailed):
        repositories.in_child(die)
    assert len(spool(path, 'T')) == 1
    assert figures(account(maintainer)) == (0, 0, 1, 0)
    maintenance.require_counted(maintainer)


def test_n4_2_the_lock_is_held_until_the_entry_is_unlinked(
        maintainer, path, other):
    """The lock stays until the unlink, so no process revives a dead entry."""
    put(other, 'image', content(1))
    os.unlink(path / 'images' / 'image')
    entry, = spool(path, 'T')
    held = []

    def hook(name, arguments, before):
        if name.endswith('.unlink') and before:
            held.append(repositories.lock_held(path / 'spool' / entry, 0))
            held.append(repositories.lock_held(path / 'spool' / entry, 1))
    account(maintenance.watch(maintainer, hook))
    assert held == ['exclusive', 'exclusive']


def test_n4_3_committed_between_look_and_lock(maintainer, path, other):
    """The second check finds that the entry is an image by now."""
    transaction = other.begin('image')
    transaction.write(content(1))
    hook = maintenance.Once('.try_lock', transaction.commit)
    assert figures(account(maintenance.watch(maintainer, hook))) == (
        1, 0, 1, 0)
    assert hook.happened
    maintenance.require_counted(maintainer)


def test_n4_3_complete_and_committed_between_look_and_lock(
        maintainer, path, other):
    put(other, 'image', content(1))
    entry, = spool(path, 'T')
    os.rename(path / 'images' / 'image', path / 'aside')
    hook = maintenance.Once('.try_lock', lambda: os.rename(
        path / 'aside', path / 'images' / 'image'))
    assert figures(account(maintenance.watch(maintainer, hook))) == (
        1, 0, 1, 0)
    assert hook.happened
    maintenance.require_counted(maintainer)


def test_n4_4_what_is_being_read_is_left(maintainer, path, other):
    put(other, 'image', content(1))
    account(maintainer)
    with other.open_image('image') as image:
        other.delete('image')
        assert figures(account(maintainer)) == (0, 0, 0, 1)
        assert maintenance.counts(maintainer.catalog)
        assert image.read() == content(1)
    assert figures(account(maintainer)) == (0, 1, 1, 0)
    maintenance.require_counted(maintainer)


@pytest.mark.parametrize('kind', ['D', 'O'])
def test_n4_6_unfinished_delete_is_undone(maintainer, path, other, kind):
    put(other, 'image', content(1))
    account(maintainer)
    make_entry(path, 'image', kind)
    assert figures(account(maintainer)) == (0, 0, 1, 0)
    maintenance.require_counted(maintainer)
    assert repositories.read_all(other, 'image') == content(1)


@pytest.mark.parametrize('kind', ['D', 'O'])
def test_n4_6_delete_under_way_is_left(maintainer, path, other, kind):
    """An entry of a deletion stays while the deletion is in progress.

    Otherwise the image would go, and no entry would record it.
    """
    put(other, 'image', content(1))
    account(maintainer)
    entry = make_entry(path, 'image', kind)
    byte = repositories.image_lock_byte('image')
    with repositories.holding(path / 'locks' / 'images', byte):
        assert figures(account(maintainer)) == (0, 0, 0, 1)
        assert spool(path) == [entry]
        os.unlink(path / 'images' / 'image')
    assert figures(account(maintainer)) == (0, 1, 1, 0)
    maintenance.require_counted(maintainer)


def test_n4_6_delete_finished_between_look_and_lock(maintainer, path, other):
    put(other, 'image', content(1))
    account(maintainer)
    make_entry(path, 'image')
    image = path / 'images' / 'image'
    looks = []

    def hook(name, arguments, before):
        # This is after the second check and before the image lock is tried.
        if name.endswith('.live') and not before:
            looks.append(name)
            if len(looks) == 2:
                image.unlink()
    assert figures(account(maintenance.watch(maintainer, hook))) == (
        0, 1, 1, 0)
    assert len(looks) == 3
    maintenance.require_counted(maintainer)


def test_n4_6_while_its_writer_ends(maintainer, path, other):
    put(other, 'image', content(1))
    account(maintainer)
    make_entry(path, 'image')
    with repositories.holding(path / 'images' / 'image', 0, shared=True):
        assert figures(account(maintainer)) == (0, 0, 0, 1)
    assert figures(account(maintainer)) == (0, 0, 1, 0)


def test_image_lock_is_given_back(maintainer, path, other):
    put(other, 'image', content(1))
    make_entry(path, 'image')
    account(maintainer)
    other.delete('image')
    account(maintainer)
    maintenance.require_counted(maintainer)


def test_groups_and_temporary_names(maintainer, path, other):
    put(other, 'image', content(1))
    account(maintainer)
    used = f'G-{"1" * 32}'
    for name in (used, f'G-{"2" * 32}'):
        shutil.copy(path / 'groups' / '00000001', path / 'spool' / name)
    os.link(path / 'images' / 'image', path / 'spool' / f'X-{"3" * 32}')
    with repositories.holding(path / 'spool' / used, 0, shared=True):
        assert figures(account(maintainer)) == (0, 0, 2, 1)
        assert spool(path) == [used]
    assert figures(account(maintainer)) == (0, 0, 1, 0)
    maintenance.require_counted(maintainer)


def test_strange_files_stay(maintainer, path):
    names = ['T-1', 'Z-' + '1' * 32, 'x', 'T-' + 'g' * 32]
    for name in names:
        (path / 'spool' / name).write_bytes(b'x')
    assert figures(account(maintainer)) == (0, 0, 0, 0)
    assert spool(path) == sorted(names)
