# SPDX-License-Identifier: Apache-2.0

"""Accounting: the rules N1, N3, N4 and N5, each by its number."""

import os
import shutil
import struct

import pytest
import xxhash

from dedupd.tasks import accounting
from dedupd.tasks import collector
from glance_dedup.base import exceptions
from glance_dedup.base import task
from glance_dedup.check import checker
from tests.support import maintenance
from tests.support.maintenance import account
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put

pytest_plugins = ['tests.support.maintainer_fixtures']


def figures(result):
    return (result.counted, result.uncounted, result.removed, result.left)


def spool(path, kind=''):
    return sorted(name for name in os.listdir(path / 'spool')
                  if name.startswith(kind))


def make_entry(path, image_id, kind='D'):
    """What an unfinished delete, or merge, leaves."""
    name = f'{kind}-{os.urandom(16).hex()}'
    os.link(path / 'images' / image_id, path / 'spool' / name)
    return name


def ruin(file, at):
    with open(file, 'r+b') as f:
        f.seek(at)
        f.write(b'\xff' * 64)


# -- what is counted ----------------------------------------------------------

def test_images_are_counted(maintainer, path, other):
    put(other, 'one', content(1, 2, 1))
    put(other, 'two', content(2, 3) + bytes(5000))
    assert spool(path, 'T') != []
    assert figures(account(maintainer)) == (2, 0, 2, 0)
    maintenance.need_counted(maintainer)
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
    maintenance.need_counted(maintainer)


def test_empty_image(maintainer, other):
    put(other, 'empty', b'')
    put(other, 'zeros', bytes(100000))
    assert figures(account(maintainer)) == (2, 0, 2, 0)
    maintenance.need_counted(maintainer)


def test_many_entries_take_several_rounds(maintainer, other, monkeypatch):
    log = maintenance.Log()
    monkeypatch.setattr(accounting, 'ROUND', 4)
    for number in range(10):
        put(other, f'image-{number}', content(number))
    assert figures(account(maintenance.watch(maintainer, log))) == (
        10, 0, 10, 0)
    assert len(log.where('sync images')) == len(
        log.where('write_fence')) == 3
    maintenance.need_counted(maintainer)


def test_large_batches_are_split(maintainer, other, monkeypatch):
    monkeypatch.setattr(
        'glance_dedup.maintenance.maintainer.BATCH_BYTES', 10000)
    for number in range(10):
        put(other, f'image-{number}', content(number, blocks=64))
    log = maintenance.Log()
    assert figures(account(maintenance.watch(maintainer, log))) == (
        10, 0, 10, 0)
    assert len(log.where('write_fence')) > 2
    maintenance.need_counted(maintainer)


def test_entries_that_somebody_else_removes(
        maintainer, path, other, monkeypatch):
    """They are settled all the same, and so are those behind them."""
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
    maintenance.need_counted(maintainer)


def test_stopping_between_rounds(maintainer, other, monkeypatch):
    monkeypatch.setattr(accounting, 'ROUND', 2)
    for number in range(5):
        put(other, f'image-{number}', content(number))
    pace = task.Pace(progress=lambda *_: pace.stop())
    with pytest.raises(task.Stopped):
        accounting.run_once(maintainer, pace)
    assert figures(account(maintainer)) == (3, 0, 3, 0)
    maintenance.need_counted(maintainer)


# -- N1: the ledger -----------------------------------------------------------

def test_n1_image_deleted_before_it_was_counted(maintainer, path, other):
    """T and D are both there: neither asks for anything."""
    put(other, 'stays', content(1))
    account(maintainer)
    put(other, 'goes', content(1))
    other.delete('goes')
    assert [name[0] for name in spool(path)] == ['D', 'T']
    assert figures(account(maintainer)) == (0, 0, 2, 0)
    maintenance.need_counted(maintainer)


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
        maintenance.need_counted(maintainer)


def kill_it():
    raise maintenance.Killed


@pytest.mark.parametrize('step', range(1, 80, 3))
def test_n1_everything_may_be_repeated(path, other, step):
    """Killed at any of its calls, and done again: each counts once."""
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
        maintainer = maintenance.maintainer_module.Maintainer(repo)
        hook = maintenance.Kill(step)
        try:
            account(maintenance.watch(maintainer, hook))
        except maintenance.Killed:
            pass
        maintenance.kill(maintainer)
    with maintaining(other) as maintainer:
        assert maintainer.warnings == []
        account(maintainer)
        maintenance.need_counted(maintainer)
    repositories.need_clean(path)


# -- N3: two lock bytes -------------------------------------------------------

def test_n3_byte_1_is_never_taken_of_a_live_recipe(maintainer, path, other):
    """A live recipe never refuses a reader."""
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
    maintenance.need_counted(maintainer)


@pytest.mark.parametrize('write', [0, 5, 1000])
def test_n4_2_upload_under_way_is_left(maintainer, path, other, write):
    with other.begin('image') as transaction:
        transaction.write(content(1) * write)
        assert figures(account(maintainer)) == (0, 0, 0, 1)
        assert len(spool(path, 'T')) == 1
        transaction.write(content(2))
        transaction.commit()
    assert figures(account(maintainer)) == (1, 0, 1, 0)
    maintenance.need_counted(maintainer)


def test_n4_2_complete_and_not_linked_yet_is_left(maintainer, path, other):
    """Its writer is just about to link it."""
    put(other, 'image', content(1))
    os.unlink(path / 'images' / 'image')
    entry, = spool(path, 'T')
    with repositories.holding(path / 'spool' / entry, 0, shared=True):
        assert figures(account(maintainer)) == (0, 0, 0, 1)
    assert spool(path, 'T') == [entry]


@pytest.mark.parametrize('data', [b'', content(1), content(1) * 200])
def test_n4_2_dead_upload_is_removed(maintainer, path, data):
    """Nobody holds its locks, so its entry goes (N4.5)."""
    def die():
        with repositories.open_repository(path) as repo:
            transaction = repo.begin('image')
            transaction.write(data)
            os._exit(0)
    with pytest.raises(repositories.ChildFailed):
        repositories.in_child(die)
    assert len(spool(path, 'T')) == 1
    assert figures(account(maintainer)) == (0, 0, 1, 0)
    maintenance.need_counted(maintainer)


def test_n4_2_the_lock_is_held_until_the_entry_is_unlinked(
        maintainer, path, other):
    """So that nobody makes a recipe of what was judged dead."""
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
    """The second look sees that it is an image by now."""
    transaction = other.begin('image')
    transaction.write(content(1))
    hook = maintenance.Once('.try_lock', transaction.commit)
    assert figures(account(maintenance.watch(maintainer, hook))) == (
        1, 0, 1, 0)
    assert hook.happened
    maintenance.need_counted(maintainer)


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
    maintenance.need_counted(maintainer)


def test_n4_4_what_is_being_read_is_left(maintainer, path, other):
    put(other, 'image', content(1))
    account(maintainer)
    with other.open_image('image') as image:
        other.delete('image')
        assert figures(account(maintainer)) == (0, 0, 0, 1)
        assert maintenance.counts(maintainer.catalog)
        assert image.read() == content(1)
    assert figures(account(maintainer)) == (0, 1, 1, 0)
    maintenance.need_counted(maintainer)


@pytest.mark.parametrize('kind', ['D', 'O'])
def test_n4_6_unfinished_delete_is_undone(maintainer, path, other, kind):
    put(other, 'image', content(1))
    account(maintainer)
    make_entry(path, 'image', kind)
    assert figures(account(maintainer)) == (0, 0, 1, 0)
    maintenance.need_counted(maintainer)
    assert repositories.read_all(other, 'image') == content(1)


@pytest.mark.parametrize('kind', ['D', 'O'])
def test_n4_6_delete_under_way_is_left(maintainer, path, other, kind):
    """The image would go, and nothing would tell so."""
    put(other, 'image', content(1))
    account(maintainer)
    entry = make_entry(path, 'image', kind)
    byte = repositories.image_lock_byte('image')
    with repositories.holding(path / 'locks' / 'images', byte):
        assert figures(account(maintainer)) == (0, 0, 0, 1)
        assert spool(path) == [entry]
        os.unlink(path / 'images' / 'image')
    assert figures(account(maintainer)) == (0, 1, 1, 0)
    maintenance.need_counted(maintainer)


def test_n4_6_delete_finished_between_look_and_lock(maintainer, path, other):
    put(other, 'image', content(1))
    account(maintainer)
    make_entry(path, 'image')
    image = path / 'images' / 'image'
    looks = []

    def hook(name, arguments, before):
        # After the second look, just before the image lock is tried.
        if name.endswith('.live') and not before:
            looks.append(name)
            if len(looks) == 2:
                image.unlink()
    assert figures(account(maintenance.watch(maintainer, hook))) == (
        0, 1, 1, 0)
    assert len(looks) == 3
    maintenance.need_counted(maintainer)


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
    maintenance.need_counted(maintainer)


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
    maintenance.need_counted(maintainer)


def test_strange_files_stay(maintainer, path):
    names = ['T-1', 'Z-' + '1' * 32, 'x', 'T-' + 'g' * 32]
    for name in names:
        (path / 'spool' / name).write_bytes(b'x')
    assert figures(account(maintainer)) == (0, 0, 0, 0)
    assert spool(path) == sorted(names)


# -- N5: the order of the steps -----------------------------------------------

def orders(maintainer, account_it):
    log = maintenance.Log()
    account_it(maintenance.watch(maintainer, log))
    return log


def need_order(log):
    """Looks, fsync, batch, fence, unlink."""
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
    need_order(orders(maintainer, account))


def test_n5_order_for_a_deleted_image(maintainer, other):
    put(other, 'image', content(1))
    account(maintainer)
    other.delete('image')
    need_order(orders(maintainer, account))


@pytest.mark.parametrize('entry', ['dead', 'unfinished', 'counted'])
def test_n5_1_fsync_also_where_the_ledger_asks_for_nothing(
        maintainer, path, other, entry):
    put(other, 'image', content(1))
    if entry == 'counted':
        account(maintainer)
        make = 'T-' + next(maintainer.catalog.txids()).hex()
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
    """The ledger asks for nothing the second time; the fence is due yet."""
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
    """As by an fsync that failed; the fence is due before the unlinking."""
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
    """The newest record is never written over, whatever failed before."""
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


# -- damaged recipes ----------------------------------------------------------

BODY, HEADER = 4096 + 16, 16


@pytest.mark.parametrize('at', [BODY, HEADER])
def test_live_uncounted_and_damaged_is_reported(maintainer, path, other, at):
    put(other, 'bad', content(1))
    put(other, 'good', content(2))
    ruin(path / 'images' / 'bad', at)
    result = account(maintainer)
    assert (result.counted, result.removed) == (1, 1)
    assert list(result.unreadable) == ['bad']
    assert 'images/bad' in result.unreadable['bad'] or (
        'spool/T' in result.unreadable['bad'])
    assert result.unreadable == maintainer.unreadable()
    assert len(spool(path, 'T')) == 1
    assert account(maintainer).unreadable == result.unreadable


@pytest.mark.parametrize('at', [BODY, HEADER])
def test_damage_that_goes_away(maintainer, path, other, at):
    put(other, 'bad', content(1))
    file = path / 'images' / 'bad'
    data = file.read_bytes()
    ruin(file, at)
    assert account(maintainer).unreadable
    with open(file, 'r+b') as f:
        f.write(data)
    assert figures(account(maintainer)) == (1, 0, 1, 0)
    assert maintainer.unreadable() == {}
    maintenance.need_counted(maintainer)


@pytest.mark.parametrize('at', [BODY, HEADER])
def test_live_counted_and_damaged_goes_on(maintainer, path, other, at):
    """What it needs is counted already."""
    put(other, 'bad', content(1))
    with pytest.raises(maintenance.Killed):
        account(maintenance.watch(maintainer, maintenance.Once(
            '.unlink', kill_it)))
    maintenance.kill(maintainer)
    ruin(path / 'images' / 'bad', at)
    with maintaining(other) as maintainer:
        assert figures(account(maintainer)) == (0, 0, 1, 0)
        assert maintainer.unreadable() == {} and maintainer.warnings == []
        assert len(maintenance.counts(maintainer.catalog)) == 10


def quarantined(path):
    return [name for name in os.listdir(path / 'quarantine')
            if not name.startswith('catalog')]


@pytest.mark.parametrize('at', [BODY, HEADER])
def test_deleted_counted_and_damaged(maintainer, path, other, at):
    """What is to be un-counted is not known: the catalog is made anew."""
    put(other, 'bad', content(1, 2))
    put(other, 'good', content(2))
    account(maintainer)
    other.delete('bad')
    entry, = spool(path, 'D')
    ruin(path / 'spool' / entry, at)
    result = account(maintainer)
    assert result.unreadable == {} and spool(path) == []
    assert len(quarantined(path)) == 1
    assert len(maintainer.warnings) == 1 and entry in maintainer.warnings[0]
    maintenance.need_counted(maintainer)
    assert account(maintainer).removed == 0
    assert len(maintainer.warnings) == 1


@pytest.mark.parametrize('at', [BODY, HEADER])
def test_deleted_uncounted_and_damaged(maintainer, path, other, at):
    put(other, 'good', content(2))
    account(maintainer)
    put(other, 'bad', content(1, 2))
    other.delete('bad')
    ruin(path / 'spool' / spool(path, 'T')[0], at)
    result = account(maintainer)
    assert result.unreadable == {} and spool(path) == []
    assert maintainer.warnings == [] or at == HEADER
    maintenance.need_counted(maintainer)


def test_zeroed_header_of_an_image_is_no_dead_upload(maintainer, path, other):
    """Its entry looks like that of an upload that did not get so far."""
    put(other, 'bad', content(1))
    with open(path / 'images' / 'bad', 'r+b') as f:
        f.write(bytes(4096))
    result = account(maintainer)
    assert list(result.unreadable) == ['bad']
    assert len(spool(path, 'T')) == 1


def zero_header(file):
    with open(file, 'r+b') as f:
        f.write(bytes(4096))


def test_zeroed_header_of_what_was_deleted(maintainer, path, other):
    """What was in images/ had a header once: it is to be un-counted."""
    put(other, 'bad', content(1, 2))
    put(other, 'good', content(2))
    account(maintainer)
    other.delete('bad')
    zero_header(path / 'spool' / spool(path, 'D')[0])
    assert account(maintainer).unreadable == {}
    assert len(quarantined(path)) == 1
    maintenance.need_counted(maintainer)


def test_zeroed_header_of_what_was_counted(maintainer, path, other):
    """So had what is counted, though its entry was not removed in time."""
    put(other, 'bad', content(1, 2))
    with pytest.raises(maintenance.Killed):
        account(maintenance.watch(maintainer, maintenance.Once(
            '.unlink', kill_it)))
    maintenance.kill(maintainer)
    zero_header(path / 'images' / 'bad')
    with maintaining(other) as maintainer:
        other.delete('bad')
        os.unlink(path / 'spool' / spool(path, 'D')[0])
        assert account(maintainer).unreadable == {}
        maintenance.need_counted(maintainer)


def test_project_that_is_not_utf_8(maintainer, path, other):
    put(other, 'image', content(1))
    with open(path / 'images' / 'image', 'r+b') as f:
        page = bytearray(f.read(4088))
        struct.pack_into('<H', page, 138, 3)
        page[272:275] = b'a\xff\xfe'
        page += struct.pack('<Q', xxhash.xxh3_64_intdigest(bytes(page)))
        f.seek(0)
        f.write(page)
    assert figures(account(maintainer)) == (1, 0, 1, 0)
    (_, facts), = maintainer.catalog.ledger()
    assert facts['project'] == 'a\ufffd\ufffd'


@pytest.mark.parametrize('at', [BODY, HEADER])
def test_damaged_deleted_and_still_read(maintainer, path, other, at):
    """Not counted, and what it needs is not known: nothing may be freed."""
    put(other, 'bad', content(1))
    with other.open_image('bad'):
        other.delete('bad')
        os.unlink(path / 'spool' / spool(path, 'T')[0])
        entry, = spool(path, 'D')
        ruin(path / 'spool' / entry, at)
        assert list(account(maintainer).unreadable) == [f'spool/{entry}']
    assert account(maintainer).unreadable == {}
    assert spool(path) == []


def test_entry_that_cannot_be_opened(maintainer, path, other):
    """It might be anything."""
    name = f'T-{"1" * 32}'
    (path / 'spool' / name).symlink_to(path / 'key')
    result = account(maintainer)
    assert list(result.unreadable) == [f'spool/{name}']
    assert (path / 'key').exists()


# -- catalogs that do not add up ----------------------------------------------

def test_count_below_zero_makes_the_catalog_anew(maintainer, path, other):
    put(other, 'one', content(1))
    put(other, 'two', content(1, 2))
    account(maintainer)
    batch = maintainer.catalog.batch()
    for key, value in maintainer.catalog._items(b'c'):
        batch.delete(key)
    maintainer.catalog.write(batch)
    other.delete('one')
    account(maintainer)
    assert len(maintainer.warnings) == 1
    assert 'too few' in maintainer.warnings[0]
    maintenance.need_counted(maintainer)


def test_two_entries_of_one_transaction(maintainer, path, other):
    """A copy of a recipe's file, put there by somebody."""
    put(other, 'image', content(1))
    entry, = spool(path, 'T')
    shutil.copy(path / 'spool' / entry, path / 'spool' / f'D-{"1" * 32}')
    shutil.copy(path / 'spool' / entry, path / 'spool' / f'O-{"2" * 32}')
    account(maintainer)
    account(maintainer)
    assert spool(path) == []
    assert sum(maintenance.counts(maintainer.catalog).values()) in (0, 10)


# -- no room ------------------------------------------------------------------

def test_full_disk(tmp_path):
    """The room that is kept for the catalog is used."""
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
                maintenance.need_counted(maintainer)


def test_full_disk_and_the_reserve_is_used_up(tmp_path):
    """An error with words; nothing is unlinked that was not settled."""
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
                maintenance.need_counted(maintainer)


# -- large recipes: in steps --------------------------------------------------

PAGES = 4


@pytest.fixture
def small_steps(monkeypatch):
    """A step for each page of extents."""
    monkeypatch.setattr(maintenance.maintainer_module, 'BATCH_BYTES', 0)


@pytest.fixture
def started(other, small_steps):
    """What is put from now on is counted by the accounting."""
    with maintaining(other):
        pass


def stop_after(steps):
    """A pace that stops a run after so many steps."""
    def progress(*_):
        nonlocal steps
        steps -= 1
        if steps == 0:
            pace.stop()
    pace = task.Pace(progress=progress)
    return pace


def account_some(maintainer, steps):
    with pytest.raises(task.Stopped):
        accounting.run_once(maintainer, stop_after(steps))


def begun(maintainer):
    """Of the only recipe that is counted in part: how many pages."""
    (txid, _), = maintainer.catalog.all_begun()
    assert not maintainer.catalog.counted(txid)
    return maintainer.catalog.begun(txid)


def need_lawful(maintainer, path):
    """The checker counts the same, and takes it for what a crash leaves."""
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
    maintenance.need_counted(maintainer)
    other.delete('large')
    maintenance.watch(maintainer, log)
    assert figures(account(maintainer)) == (0, 1, 1, 0)
    maintenance.unwatch(maintainer)
    assert len(log.where('catalog.write')) == 2 * PAGES
    maintenance.need_counted(maintainer)
    need_lawful(maintainer, path)


def test_batches_are_bounded(maintainer, other, monkeypatch):
    """Whatever the size of a recipe: before, one batch had all of it."""
    monkeypatch.setattr(maintenance.maintainer_module, 'BATCH_BYTES', 10000)
    sizes = []
    settle = maintainer.settle
    monkeypatch.setattr(maintainer, 'settle', lambda batch: (
        sizes.append(batch.size), settle(batch)))
    put(other, 'large', maintenance.scattered(*range(3), pages=10))
    account(maintainer)
    other.delete('large')
    account(maintainer)
    assert len(sizes) > 8 and max(sizes) < 10000 + 3 * 4200
    maintenance.need_counted(maintainer)


@pytest.mark.parametrize('steps', range(1, PAGES))
def test_stopped_counting_goes_on(path, other, started, steps):
    put(other, 'large', maintenance.scattered(1, pages=PAGES))
    with maintaining(other) as maintainer:
        account_some(maintainer, steps)
        assert begun(maintainer) == steps
        need_lawful(maintainer, path)
    with maintaining(other) as maintainer:
        log = maintenance.Log()
        account(maintenance.watch(maintainer, log))
        maintenance.unwatch(maintainer)
        assert len(log.where('catalog.write')) == PAGES - steps
        assert maintainer.warnings == []
        maintenance.need_counted(maintainer)
        need_lawful(maintainer, path)


@pytest.mark.parametrize('steps', range(1, PAGES))
def test_stopped_uncounting_goes_on(path, other, started, steps):
    put(other, 'stays', maintenance.scattered(1, pages=1))
    put(other, 'large', maintenance.scattered(1, pages=PAGES))
    with maintaining(other) as maintainer:
        account(maintainer)
        other.delete('large')
        account_some(maintainer, steps)
        assert begun(maintainer) == PAGES - steps
        need_lawful(maintainer, path)
    with maintaining(other) as maintainer:
        log = maintenance.Log()
        account(maintenance.watch(maintainer, log))
        maintenance.unwatch(maintainer)
        assert len(log.where('catalog.write')) == PAGES - steps
        maintenance.need_counted(maintainer)


@pytest.mark.parametrize('steps', range(1, PAGES))
def test_deleted_in_the_middle_of_counting(path, other, started, steps):
    """What was counted of it is taken back, and no more than that."""
    put(other, 'stays', maintenance.scattered(1, pages=PAGES))
    with maintaining(other) as maintainer:
        account(maintainer)
        put(other, 'goes', maintenance.scattered(1, pages=PAGES))
        account_some(maintainer, steps)
        other.delete('goes')
        need_lawful(maintainer, path)
    with maintaining(other) as maintainer:
        log = maintenance.Log()
        account(maintenance.watch(maintainer, log))
        maintenance.unwatch(maintainer)
        assert len(log.where('catalog.write')) == steps
        maintenance.need_counted(maintainer)


@pytest.mark.parametrize('call', range(1, 110, 4))
def test_killed_in_any_step(path, other, started, call):
    """Counting one, un-counting one, and taking one back."""
    with maintaining(other) as maintainer:
        put(other, 'old', maintenance.scattered(1, 2, pages=2))
        account(maintainer)
        put(other, 'taken-back', maintenance.scattered(2, 3, pages=2))
        account_some(maintainer, 2)
        other.delete('taken-back')
        other.delete('old')
        put(other, 'new', maintenance.scattered(3, 1, pages=2))
    maintainer = maintenance.maintainer_module.Maintainer(other)
    try:
        account(maintenance.watch(maintainer, maintenance.Kill(call)))
    except maintenance.Killed:
        pass
    maintenance.kill(maintainer)
    need_lawful(maintainer, path)
    with maintaining(other) as maintainer:
        assert maintainer.warnings == []
        account(maintainer)
        maintenance.need_counted(maintainer)
    repositories.need_clean(path)


@pytest.mark.parametrize('steps', range(1, PAGES))
def test_n6_3_counted_in_part_and_in_use(path, other, started, steps):
    """Its reader needs what is not counted, and what is counted no more."""
    data = maintenance.scattered(1, pages=PAGES)
    put(other, 'read', data)
    with maintaining(other) as maintainer:
        account_some(maintainer, steps)
        with other.open_image('read') as image:
            other.delete('read')
            live = maintenance.live_slots(path)
            result = collector.run_once(maintainer, task.Pace())
            assert result.refused is None and result.freed_blocks == 0
            assert maintenance.live_slots(path) == live
            assert collector.plan(maintainer).blocks == 0
            assert image.read() == data
        result = collector.run_once(maintainer, task.Pace())
        assert result.freed_blocks == 51 * PAGES
        maintenance.need_collected(maintainer)


def test_n6_3_counted_in_part_and_lost(path, other, started):
    """Nothing is freed until it is back."""
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
        result = collector.run_once(maintainer, task.Pace())
        assert 'lost' in result.refused and result.freed_blocks == 0
        os.rename(path / 'aside', path / 'spool' / name)
        result = collector.run_once(maintainer, task.Pace())
        assert result.refused is None
        maintenance.need_collected(maintainer)


def test_n6_3_pins_are_those_of_the_last_run(path, other, started):
    """What pinned a recipe then says nothing of the present."""
    put(other, 'read', maintenance.scattered(1, pages=PAGES))
    with maintaining(other) as maintainer:
        account_some(maintainer, 2)
        with other.open_image('read'):
            other.delete('read')
            accountant = accounting.Accountant(maintainer, task.Pace())
            assert not accountant.run().unreadable
            pins = list(accountant.pins(1))
            assert pins != []
            assert not accountant.run().unreadable
            assert list(accountant.pins(1)) == pins     # each once
            for name in spool(path):
                os.rename(path / 'spool' / name, path / name)
            unreadable = accountant.run().unreadable
            assert 'only in part' in unreadable['read']
            assert list(accountant.pins(1)) == []


def test_n6_3_nothing_is_freed_if_no_entry_pins_it(
        path, other, started, monkeypatch):
    """Whatever the reason why it was left so."""
    put(other, 'goes', content(9))
    put(other, 'large', maintenance.scattered(1, pages=PAGES))
    with maintaining(other) as maintainer:
        account(maintainer)
        other.delete('large')
        account_some(maintainer, 2)
        other.delete('goes')
        monkeypatch.setattr(accounting.Accountant, '_settle',
                            lambda self, names: None)
        result = collector.run_once(maintainer, task.Pace())
        assert 'only in part' in result.refused and not result.freed_blocks


def test_damaged_in_the_middle_of_counting(path, other, started):
    """Nothing is freed; what is counted of it is known."""
    put(other, 'goes', content(9))
    with maintaining(other) as maintainer:
        account(maintainer)
        put(other, 'large', maintenance.scattered(1, pages=PAGES))
        account_some(maintainer, 2)
        original = (path / 'images/large').read_bytes()
        ruin(path / 'images/large', 4096 * PAGES + 100)
        other.delete('goes')
        result = collector.run_once(maintainer, task.Pace())
        assert 'large' in result.refused and not result.freed_blocks
        with open(path / 'images/large', 'r+b') as f:
            f.write(original)
        assert collector.run_once(maintainer, task.Pace()).refused is None
        maintenance.need_collected(maintainer)


def test_damaged_in_the_middle_of_uncounting(path, other, started):
    """It is set aside, and the catalog made anew without it."""
    put(other, 'stays', maintenance.scattered(1, pages=2))
    put(other, 'large', maintenance.scattered(1, pages=PAGES))
    with maintaining(other) as maintainer:
        account(maintainer)
        other.delete('large')
        account_some(maintainer, 2)
        entry, = spool(path, 'D')
        ruin(path / 'spool' / entry, 4096 + 100)
        account(maintainer)
        maintenance.need_counted(maintainer)
        assert list(maintainer.catalog.all_begun()) == []


def test_foreseen_from_the_middle(maintainer, path, other, small_steps):
    """A plan takes up what a run left off."""
    put(other, 'stays', maintenance.scattered(1, pages=1))
    put(other, 'large', maintenance.scattered(1, 2, pages=2))
    account(maintainer)
    other.delete('large')
    account_some(maintainer, 2)
    put(other, 'new', maintenance.scattered(3, pages=2))
    planned = collector.plan(maintainer)
    assert begun(maintainer) == 2
    result = collector.run_once(maintainer, task.Pace())
    assert (planned.blocks, planned.refused) == (result.freed_blocks, None)
    assert planned.blocks == 51 * 3
    maintenance.need_collected(maintainer)
