# SPDX-License-Identifier: Apache-2.0

"""Accounting: the order of the steps, rule N5; and full disks."""

import os

import pytest

from glance_dedup.base import exceptions
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put
from tests.unit.dedupd.tasks.accounts import figures
from tests.unit.dedupd.tasks.accounts import make_entry
from tests.unit.dedupd.tasks.accounts import spool

pytest_plugins = ['tests.support.maintainer_fixtures']


# -- N5: the order of the steps -----------------------------------------------

def orders(maintainer, account_it):
    log = maintenance.Log()
    account_it(maintenance.watch(maintainer, log))
    return log


def require_order(log):
    """Require the order of checks, fsync, batch, fence and unlink."""
    looks = log.where('.live', '.try_lock')
    syncs = log.where('sync images')
    batches = log.where('catalog.write')
    fences = log.where('write_fence')
    unlinks = log.where('.unlink')
    assert looks and syncs and batches and fences and unlinks
    assert looks[-1] < syncs[0] < batches[0] < fences[0] < unlinks[0]
    return log


def test_n5_order_for_a_committed_image(maintainer, other):
    put(other, 'image', content(1))
    require_order(orders(maintainer, account))


def test_n5_order_for_a_deleted_image(maintainer, other):
    put(other, 'image', content(1))
    account(maintainer)
    other.delete('image')
    require_order(orders(maintainer, account))


@pytest.mark.parametrize('entry', ['dead', 'unfinished', 'counted'])
def test_n5_1_fsync_also_where_the_ledger_asks_for_nothing(
        maintainer, path, other, entry):
    put(other, 'image', content(1))
    if entry == 'counted':
        account(maintainer)
        make = 'T-' + maintainer.catalog.txids()[0].hex()
        os.link(path / 'images' / 'image', path / 'spool' / make)
    elif entry == 'unfinished':
        account(maintainer)
        make_entry(path, 'image')
    else:
        os.unlink(path / 'images' / 'image')
    log = maintenance.Log()
    assert account(maintenance.watch(maintainer, log)).removed == 1
    assert not log.where('catalog.write')
    look, = log.where('.live', '.try_lock')[-1:]
    sync, = log.where('sync images')
    unlink, = log.where('.unlink')
    assert look < sync < unlink


def test_n5_1_nothing_happens_if_the_fsync_fails(maintainer, path, other):
    put(other, 'image', content(1))

    def fail():
        raise exceptions.StorageError('images: Input/output error')
    sequence = maintainer.catalog.sequence
    with pytest.raises(exceptions.StorageError):
        account(maintenance.watch(maintainer, maintenance.Once(
            'engine.sync', fail)))
    assert len(spool(path, 'T')) == 1
    assert maintainer.catalog.sequence == sequence
    assert not maintenance.counts(maintainer.catalog)


def test_n5_2_the_batch_is_synced(maintainer, other, monkeypatch):
    put(other, 'image', content(1))
    written = []
    write = maintainer.catalog.write

    def watched(batch, sync=False, **more):
        written.append((sync, more))
        write(batch, sync=sync, **more)
    monkeypatch.setattr(maintainer.catalog, 'write', watched)
    before = maintainer.catalog.sequence
    account(maintainer)
    (sync, more), = written
    assert sync and more['sequence'] > before


def test_n5_3_the_fence_is_the_catalogs_sequence(maintainer, other):
    put(other, 'image', content(1))
    account(maintainer)
    fence = maintainer.engine.read_fence()
    assert fence == (maintainer.catalog.id
                     + maintainer.catalog.sequence.to_bytes(8, 'little'))


def test_n5_3_fence_that_failed_is_written_before_the_unlinking(
        maintainer, path, other):
    """A fence that failed is written before the next run's unlink.

    The second run changes no count, but the fence is still due.
    """
    put(other, 'image', content(1))

    def fail():
        raise exceptions.StorageError('fence: Input/output error')
    hook = maintenance.Once('write_fence', fail)
    with pytest.raises(exceptions.StorageError):
        account(maintenance.watch(maintainer, hook))
    assert len(spool(path, 'T')) == 1
    assert len(list(maintainer.catalog.txids())) == 1
    log = maintenance.Log()
    assert figures(account(maintenance.watch(maintainer, log))) == (
        0, 0, 1, 0)
    assert log.where('write_fence')[0] < log.where('.unlink')[0]
    assert not log.where('catalog.write')


def test_n5_3_batch_that_failed_and_was_written(
        maintainer, path, other, monkeypatch):
    """The fence is written before the unlink if a batch's fsync failed.

    The batch itself was written.
    """
    put(other, 'image', content(1))
    write = maintainer.catalog.write

    def fail(batch, **options):
        write(batch, **options)
        monkeypatch.undo()
        raise exceptions.StorageError('the catalog: Input/output error')
    monkeypatch.setattr(maintainer.catalog, 'write', fail)
    with pytest.raises(exceptions.StorageError):
        account(maintainer)
    assert len(spool(path, 'T')) == 1
    assert account(maintainer).removed == 1
    assert maintainer.engine.read_fence() == (
        maintainer.catalog.id
        + maintainer.catalog.sequence.to_bytes(8, 'little'))


def test_n5_fences_take_turns(maintainer, path, other):
    """The newest record is never overwritten, whatever failed before."""
    def newest():
        data = (path / 'fence').read_bytes()
        return max(int.from_bytes(data[at + 24:at + 32], 'little')
                   for at in (0, 512))
    fail_next = [False]

    def hook(name, arguments, before):
        if name == 'engine.write_fence' and before:
            sequence = int.from_bytes(arguments[0][16:], 'little')
            assert sequence % 2 != newest() % 2 or sequence == newest()
            if fail_next.pop(0):
                raise exceptions.StorageError('fence')
    maintenance.watch(maintainer, hook)
    for number, fails in enumerate([0, 1, 1, 0, 1, 0, 0]):
        put(other, f'image-{number}', content(number))
        fail_next[:] = [fails] + [0] * 9
        try:
            account(maintainer)
        except exceptions.StorageError:
            assert fails


# -- full disks ---------------------------------------------------------------

def test_full_disk(tmp_path):
    """Accounting on a full disk uses the space reserved for the catalog."""
    with repositories.small_disk(tmp_path / 'disk', '16m') as disk:
        path = maintenance.create(disk)
        with repositories.open_repository(
                path, codec='none', filter_dir=str(tmp_path)) as repo:
            with maintaining(repo) as maintainer:
                for number in range(4):
                    put(repo, f'image-{number}', content(number, blocks=64))
                account(maintainer)
                for number in range(3):
                    repo.delete(f'image-{number}')
                repositories.fill_disk(disk)
                assert figures(account(maintainer)) == (0, 3, 3, 0)
                maintenance.require_counted(maintainer)


def test_full_disk_and_the_reserve_is_used_up(tmp_path):
    """Without space, the error names the catalog and no entry is unlinked."""
    with repositories.small_disk(tmp_path / 'disk', '16m') as disk:
        path = maintenance.create(disk)
        with repositories.open_repository(
                path, codec='none', filter_dir=str(tmp_path)) as repo:
            with maintaining(repo) as maintainer:
                for number in range(4):
                    put(repo, f'image-{number}', content(number, blocks=64))
                (path / 'catalog-reserve').unlink()
                filling = repositories.fill_disk(disk)
                with pytest.raises(exceptions.NoSpaceError, match='catalog'):
                    account(maintainer)
                assert len(spool(path, 'T')) == 4
                filling.unlink()
                assert figures(account(maintainer))[2:] == (4, 0)
                maintenance.require_counted(maintainer)
