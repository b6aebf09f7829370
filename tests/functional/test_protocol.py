# SPDX-License-Identifier: Apache-2.0

"""The protocol's rules for writers, readers and deleters, one test each.

The rules are N1 to N11 and the invariants I1 to I12 of the design document.
The maintainer's part is played by the test. Between any two system calls of
the process under test it can lock, unlink or replace something.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import threading
import time
import zlib

import pytest

from glance_dedup.base import exceptions
from glance_dedup.check import checker
from tests.functional import witness as witness_module
from tests.support import repositories
from tests.support.repositories import create
from tests.support.repositories import Group
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all

BLOCK = 512
LEASE = 1
SHARE = repositories.SHARE_BYTE + 1
INTENT = repositories.INTENT_BYTE + 1
SIZE = 10 * BLOCK


@pytest.fixture(scope='module')
def witness(tmp_path_factory):
    witness = witness_module.Witness(
        witness_module.build(tmp_path_factory.mktemp('witness')))
    yield witness
    witness.close()


@pytest.fixture
def path(tmp_path):
    path = create(tmp_path / 'repository', block_size=BLOCK, group_slots=64,
                  segment_size=4 * BLOCK)
    yield path


@pytest.fixture
def coarse(tmp_path):
    """One whose groups are made less often; data comes in large batches."""
    return create(tmp_path / 'coarse', group_slots=64)


def store(path, *images):
    """Put images of (id, seed), with a handle that ends."""
    with open_repository(path, codec='none') as repo:
        for image_id, seed in images:
            put(repo, image_id, noise(SIZE, seed))


def sha(seed, size=SIZE):
    return hashlib.sha256(noise(size, seed)).hexdigest()


def is_made(call, name, path=None, *more):
    return call.result is not None and call.is_(name, path, *more)


def is_coming(call, name, path=None, *more):
    return call.result is None and call.is_(name, path, *more)


class Once:
    """A hook that does something at the first call of a kind."""

    def __init__(self, condition, action):
        self.condition = condition
        self.action = action
        self.happened = 0

    def __call__(self, call):
        if not self.happened and self.condition(call):
            self.happened += 1
            return self.action(call)
        return None


# -- N3: two lock bytes on a recipe's inode -----------------------------------

def test_n3_writer_holds_byte_0_shared(path):
    with open_repository(path) as repo:
        with repo.begin('image') as transaction:
            file = path / 'spool' / repositories.spool(path)[0]
            assert file.name == f'T-{transaction.upload_id}'
            assert repositories.lock_held(file, 0) == 'shared'
            assert repositories.lock_held(file, 1) is None
            transaction.write(noise(SIZE))
            transaction.commit()
        assert repositories.lock_held(path / 'images' / 'image', 0) is None


def test_n3_reader_holds_byte_1_shared(path):
    store(path, ('image', 1))
    file = path / 'images' / 'image'
    with open_repository(path) as repo:
        with repo.open_image('image') as one, repo.open_image('image') as two:
            assert repositories.lock_held(file, 1) == 'shared'
            assert repositories.lock_held(file, 0) is None
            one.close()
            assert repositories.lock_held(file, 1) == 'shared'
            assert two.read() == noise(SIZE)
        assert repositories.lock_held(file, 1) is None


# -- N7.1: the spool file -----------------------------------------------------

@pytest.mark.parametrize('kind', ['T', 'G'])
@pytest.mark.parametrize('deed', ['unlinked', 'locked', 'both'])
def test_n7_1_maintainer_takes_a_new_spool_file_for_dead(
        witness, path, kind, deed):
    """Between its creation and its lock the file may be judged dead."""
    held = []

    def be_maintainer(call):
        file = path / call.path
        if deed != 'unlinked':
            held.append(open(file, 'r+b'))
            assert repositories.set_lock(held[0].fileno(), 0, fcntl.F_WRLCK)
        if deed != 'locked':
            file.unlink()
        return 0
    hook = Once(lambda c: is_made(c, 'openat', f'spool/{kind}-*', 'create'),
                be_maintainer)
    run = witness.run(path, [['put', 'image', 1, SIZE], ['read', 'image']],
                      hook)
    assert hook.happened
    for file in held:
        file.close()
    assert run.outcomes[0]['error'] is None, run.outcomes[0]
    assert run.outcomes[1]['sha256'] == sha(1)
    # The new file has another name, and the lock; all that the recipe's
    # name leads to is the recipe that was locked.
    created = [c.path for c in run.made()
               if c.is_('openat', f'spool/{kind}-*', 'create')]
    assert len(created) == len(set(created)) == 2
    with open_repository(path) as repo:
        assert read_all(repo, 'image') == noise(SIZE)
    repositories.need_clean(path)


# -- N7.2: hits ---------------------------------------------------------------

def test_n7_2_shared_lock_comes_before_the_entries(witness, path):
    store(path, ('first', 1))
    run = witness.run(path, [['statistics'], ['put', 'second', 1, SIZE]])
    assert run.outcomes[1]['new'] == 0
    intent = run.find('lock', 'locks/groups', str(INTENT), 'shared', step=1)
    lock = run.find('lock', 'locks/groups', str(SHARE), 'shared', step=1,
                    after=intent)
    # What the filter's rebuild read before is for hints only.
    record = run.find('pread', 'groups/00000001', '512', step=1, after=lock)
    entries = run.find('pread', 'groups/00000001', '4096', step=1,
                       after=record)
    link = run.find('linkat', 'spool/T-*', 'images/second', step=1,
                    after=entries)
    run.find('lock', 'locks/groups', str(SHARE), 'free', step=1, after=link)
    with pytest.raises(AssertionError):
        run.find('pread', 'groups/00000001', '4096', step=1, after=entries)


@pytest.mark.parametrize('lock', [(SHARE,), (INTENT,), (SHARE, INTENT)])
def test_n7_2_refused_lock_is_a_miss(path, lock):
    """I6: locks are only tried: the image is stored elsewhere, at once."""
    store(path, ('first', 1))
    with open_repository(path) as repo:
        with repositories.holding(path / 'locks' / 'groups', *lock):
            stat = put(repo, 'second', noise(SIZE))
            assert stat.new_bytes == SIZE
            assert {e.group for e in repo.open_image('second').extents()
                    } == {2}
            assert repo.statistics()['lock_refusals'] >= 1
            assert read_all(repo, 'first') == noise(SIZE)
        assert put(repo, 'third', noise(SIZE)).new_bytes == 0


def test_n7_2_intent_counts_also_while_the_process_has_the_lock(coarse):
    """A process that is always busy must not keep the collector out."""
    store(coarse, ('first', 1))
    with open_repository(coarse) as repo:
        with repo.begin('second') as transaction:
            transaction.write(noise(SIZE) + noise(9 << 20, 5))
            assert repositories.group_lock_held(coarse, SHARE) == 'shared'
            with repositories.holding(coarse / 'locks' / 'groups', INTENT):
                assert put(repo, 'third', noise(SIZE)).new_bytes == SIZE
                # Who had it keeps it.
                transaction.commit()
                assert repositories.group_lock_held(coarse, SHARE) is None
        assert read_all(repo, 'second')[:SIZE] == noise(SIZE)
        assert read_all(repo, 'third') == noise(SIZE)


def free_slots(path, number, slots):
    """Be the collector: free slots of a group."""
    with repositories.collector_in(path, number):
        group = Group(path, number)
        for slot in slots:
            group.write_entry(slot, state=repositories.FREED)
        record = group.record()
        record[0] += 1
        record[1] += 1
        group.write_record(record)
        group.save()


def test_n7_2_generation_of_a_cached_store(path):
    """A store that was loaded before the collection is not used after it."""
    store(path, ('first', 1), ('other', 2))
    with open_repository(path) as repo:
        assert put(repo, 'second', noise(SIZE)).new_bytes == 0  # it is cached
        for image_id in ('first', 'second'):
            repo.delete(image_id)
        free_slots(path, 1, range(10))
        stat = put(repo, 'third', noise(SIZE))
        assert stat.new_bytes == SIZE
        assert read_all(repo, 'third') == noise(SIZE)
        assert put(repo, 'fourth', noise(SIZE, 2)).new_bytes == 0
        # I2: a freed slot is not used a second time.
        for image_id in ('third', 'fourth'):
            for extent in repo.open_image(image_id).extents():
                assert extent.slot >= 10
    repositories.need_clean(path)


@pytest.mark.parametrize('state', [
    repositories.VOID, repositories.FREED, repositories.DAMAGED])
def test_n7_2_state_comes_before_fingerprint(path, state):
    """An entry that is not live is no hit, whatever fingerprint it has."""
    store(path, ('first', 1))
    with repositories.collector_in(path, 1):
        group = Group(path, 1)
        for slot in range(10):
            group.write_entry(slot, *group.entry(slot), state=state)
        group.save()
    with open_repository(path) as repo:
        stat = put(repo, 'second', noise(SIZE))
        assert stat.new_bytes == SIZE
        assert read_all(repo, 'second') == noise(SIZE)
        if state == repositories.DAMAGED:
            # Its bytes are there after all, and verify (I7).
            assert read_all(repo, 'first') == noise(SIZE)
            return
        with pytest.raises(exceptions.DamagedError, match='groups/00000001'):
            read_all(repo, 'first')


# -- N7.3: the tail that a dead writer left -----------------------------------

def kill_before_publishing(witness, path, image_id, seed, size=SIZE):
    """A writer that dies when its entries are in the file."""
    hook = Once(lambda c: is_coming(c, 'fdatasync', 'groups/*'),
                lambda c: witness_module.KILL)
    run = witness.run(path, [['put', image_id, seed, size]], hook)
    assert hook.happened and run.status == -9


def test_n7_3_published_record_lost_by_a_crash_of_the_machine(path):
    """The image that was committed stays; its entries are made durable."""
    store(path, ('old', 1), ('committed', 2))
    group = Group(path, 1)
    before = [group.raw_entry(slot) for slot in range(20)]
    group.forget_newest_record()
    group.save()
    assert Group(path, 1).record()[2] == 10
    with open_repository(path) as repo:
        assert read_all(repo, 'committed') == noise(SIZE, 2)
    store(path, ('new', 3))
    group = Group(path, 1)
    assert [group.raw_entry(slot) for slot in range(20)] == before
    assert group.record()[2] == 30
    with open_repository(path) as repo:
        for image_id, seed in (('old', 1), ('committed', 2), ('new', 3)):
            assert read_all(repo, image_id) == noise(SIZE, seed)
        assert put(repo, 'again', noise(SIZE, 2)).new_bytes == 0
    repositories.need_clean(path)


@pytest.mark.parametrize('codec', ['none', 'lz4', 'zstd'])
def test_n7_3_both_records_lost(path, codec):
    text = b''.join(b'%d lines of text\n' % i for i in range(1500))
    with open_repository(path, codec=codec) as repo:
        put(repo, 'text', text)
        put(repo, 'noise', noise(SIZE))
    group = Group(path, 1)
    for _ in range(2):
        group.forget_newest_record()
    group.save()
    assert Group(path, 1).record() == [0, 0, 0, 0, 0]
    with open_repository(path) as repo:
        put(repo, 'new', noise(SIZE, 3))
        assert read_all(repo, 'text') == text
        assert read_all(repo, 'noise') == noise(SIZE)
        assert read_all(repo, 'new') == noise(SIZE, 3)
    repositories.need_clean(path)


def test_n7_3_tail_is_written_again_and_synced(witness, path):
    """What verifies may be in the page cache alone: reading proves nothing."""
    store(path, ('old', 1))
    kill_before_publishing(witness, path, 'died', 2)
    assert Group(path, 1).record()[2] == 10
    before = [Group(path, 1).raw_entry(slot) for slot in range(20)]
    run = witness.run(path, [['statistics'], ['put', 'new', 3, SIZE]])
    group = Group(path, 1)
    assert [group.raw_entry(slot) for slot in range(20)] == before
    segments = sorted({group.entry(slot)[2] for slot in range(10, 20)})
    assert len(segments) == 3
    synced = run.find('fdatasync', 'groups/00000001', step=1)
    published = run.find('pwritev', 'groups/00000001', '512', step=1,
                         after=synced)
    rewritten = [
        run.find('pwritev', 'groups/00000001', str(offset), step=1)
        for offset in [*segments, group.entry_offset(10)]]
    assert max(rewritten) < synced < published
    # Ours come after that.
    run.find('pwritev', 'groups/00000001', str(group.entry_offset(20)),
             step=1, after=published)
    assert run.outcomes[1]['error'] is None
    store(path, ('again', 2))
    with open_repository(path) as repo:
        assert repo.stat('again').new_bytes == 0
        assert read_all(repo, 'again') == noise(SIZE, 2)
    repositories.need_clean(path)


@pytest.mark.parametrize('damage', ['entry', 'last', 'segment', 'header',
                                    'checksum', 'truncated', 'sector'])
def test_n7_3_torn_tail_is_not_used_nor_are_its_slots(
        witness, path, damage):
    store(path, ('old', 1))
    kill_before_publishing(witness, path, 'died', 2)
    group = Group(path, 1)
    # Blocks 0 to 3 of it are one segment, in slots 10 to 13.
    _, _, segment, _ = group.entry(10)
    lost = range(10, 14)
    state = repositories.DAMAGED
    if damage == 'entry':
        group.data[group.entry_offset(12) + 40] ^= 1
        lost, state = [12], repositories.LIVE   # and not valid
    elif damage == 'last':
        group.data[group.entry_offset(19) + 40] ^= 1
        lost, state = [19], repositories.LIVE
    elif damage == 'segment':
        group.data[segment + 32 + 600] ^= 1
        lost = [11]
    elif damage == 'checksum':
        # No byte that a block needs.
        group.data[segment + 24] ^= 1
        lost = []
    elif damage == 'header':
        group.data[segment + 8] ^= 1
    elif damage == 'sector':
        # The sector with slots 9 to 17 was written as zeros, but slot 9.
        at = group.entry_offset(10)
        group.data[at:at + 8 * 56] = bytes(8 * 56)
        lost, state = range(10, 18), repositories.VOID
    else:
        del group.data[group.entry(18)[2] + 40:]
        lost = range(18, 20)
    group.save()
    kept = [s for s in range(20) if s not in lost]
    before = {slot: group.raw_entry(slot) for slot in kept}
    with open_repository(path, codec='none') as repo:
        stat = put(repo, 'new', noise(SIZE, 3))
        assert stat.new_bytes == SIZE
        extents = list(repo.open_image('new').extents())
        assert [(e.group, e.slot, e.blocks) for e in extents] == [(1, 20, 10)]
        after = Group(path, 1)
        assert {s: after.raw_entry(s) for s in kept} == before
        assert [after.state(s) for s in lost] == [state] * len(lost)
        assert after.record()[2] == 30
        # The lost blocks are stored anew; the others were adopted.
        stat = put(repo, 'again', noise(SIZE, 2))
        assert stat.new_bytes == len(lost) * BLOCK
        for image_id, seed in (('old', 1), ('new', 3), ('again', 2)):
            assert read_all(repo, image_id) == noise(SIZE, seed)
    if state == repositories.LIVE:
        # What an entry that is not valid named is not known: it stays, until
        # the counts say that nobody needs it (N6).
        report = checker.check(path)
        assert [f.file for f in report.findings
                if f.severity == checker.DAMAGE] == ['groups/00000001']
    else:
        repositories.need_clean(path)


def test_n7_3_tail_whose_content_is_not_its_fingerprints(witness, path):
    """Entries and segment verify by their checksums, but by no digest."""
    kill_before_publishing(witness, path, 'died', 2)
    group = Group(path, 1)
    fingerprint, checksum, segment, place = group.entry(3)
    group.write_entry(3, bytes(32), checksum, segment, place)
    group.save()
    store(path, ('new', 3))
    assert Group(path, 1).state(3) == repositories.DAMAGED
    assert Group(path, 1).state(4) == repositories.LIVE
    with open_repository(path) as repo:
        assert read_all(repo, 'new') == noise(SIZE, 3)
    repositories.need_clean(path)


def test_n7_3_unsynced_blocks_are_no_hits(witness, path):
    """I1: blocks beyond the published count do not exist for others."""
    store(path, ('old', 1))
    kill_before_publishing(witness, path, 'died', 2)
    (path.parent / 'repository-filter').rename(path.parent / 'no-filter')
    with repositories.holding(path / 'locks' / 'groups', LEASE):
        with open_repository(path) as repo:
            repo.rebuild_filter()
            stat = put(repo, 'image', noise(SIZE, 2))
            assert stat.new_bytes == SIZE
            assert {e.group for e in repo.open_image('image').extents()
                    } == {2}
            assert put(repo, 'also-old', noise(SIZE, 1)).new_bytes == 0


@pytest.mark.parametrize('fault', [errno.EIO, errno.ENOSPC])
def test_n7_3_renewing_fails(witness, path, fault):
    """Then nothing is published of it, and another group is taken."""
    store(path, ('old', 1))
    kill_before_publishing(witness, path, 'died', 2)
    hook = Once(lambda c: is_coming(c, 'fdatasync', 'groups/00000001'),
                lambda c: fault)
    run = witness.run(path, [['put', 'image', 3, SIZE], ['read', 'image']],
                      hook)
    assert hook.happened
    record = Group(path, 1).record()
    assert record[2] == 10 and record[3] & repositories.POISONED
    assert run.outcomes[0]['error'] is None, run.outcomes[0]
    assert run.outcomes[1]['sha256'] == sha(3)
    with open_repository(path) as repo:
        assert {e.group for e in repo.open_image('image').extents()} == {2}
        assert read_all(repo, 'old') == noise(SIZE)
    repositories.need_clean(path)


# -- N7.4: publishing ---------------------------------------------------------

def test_n7_4_published_after_ones_own_fdatasync(witness, path):
    """Also in the middle of a store operation, whenever a group is full."""
    run = witness.run(path, [['put', 'image', 1, 150 * BLOCK]])
    for group in ('00000001', '00000002', '00000003'):
        name = f'groups/{group}'
        made = [(i, c) for i, c in enumerate(run.made())
                if c.is_('pwritev', name) or c.is_('fdatasync', name)]
        records = [i for i, c in made
                   if c.name == 'pwritev' and int(c.arguments[1]) < 4096]
        entries = [i for i, c in made
                   if c.name == 'pwritev' and int(c.arguments[1]) == 4096]
        synced = [i for i, c in made if c.name == 'fdatasync']
        data = [i for i, c in made
                if c.name == 'pwritev' and int(c.arguments[1]) > 4096]
        assert len(records) == len(entries) == 1
        assert max(data) < entries[0] < synced[0] < records[0]
        # The record of a full group is synced, too: nobody will do it later,
        # and without it the tail would be judged again after a crash.
        assert len(synced) == (1 if group == '00000003' else 2)
        assert all(i > records[0] for i in synced[1:])


def test_n7_4_failed_fdatasync_poisons_the_group(witness, path):
    """I1: nobody appends to it again, and nobody syncs in its place."""
    store(path, ('old', 1))
    hook = Once(lambda c: is_coming(c, 'fdatasync', 'groups/00000001'),
                lambda c: errno.EIO)
    run = witness.run(path, [
        ['put', 'image', 2, SIZE], ['put', 'image', 2, SIZE],
        ['read', 'image'], ['read', 'old']], hook)
    assert hook.happened
    assert run.outcomes[0]['error'] == 'StorageError'
    assert run.outcomes[0]['errno'] == errno.EIO
    assert run.outcomes[1] == {'new': SIZE}  # none of its blocks was used
    assert run.outcomes[2]['sha256'] == sha(2)
    assert run.outcomes[3]['sha256'] == sha(1)
    # No second attempt at the sync.
    assert [c.path for c in run.made() if c.name == 'fdatasync'] == [
        'groups/00000002']
    record = Group(path, 1).record()
    assert record[2] == 10 and record[3] & repositories.POISONED
    # Nor does another process append there, or use what came after the
    # last sync point; what came before it is in use as ever.
    before = Group(path, 1).data
    with repositories.holding(path / 'locks' / 'groups', LEASE + 1):
        with open_repository(path) as repo:
            repo.rebuild_filter()
            put(repo, 'more', noise(SIZE, 4))
            assert put(repo, 'hit', noise(SIZE, 1)).new_bytes == 0
            assert {e.group for e in repo.open_image('more').extents()} == {3}
            assert {e.group for e in repo.open_image('hit').extents()} == {1}
    assert Group(path, 1).data == before
    repositories.need_clean(path)


@pytest.mark.parametrize('fault', [errno.EIO, errno.ENOSPC])
def test_n7_4_publishing_fails(witness, path, fault):
    hook = Once(lambda c: is_coming(c, 'pwritev', 'groups/00000001', '1024'),
                lambda c: fault)
    run = witness.run(path, [['put', 'image', 2, SIZE]], hook)
    assert hook.happened
    assert run.outcomes[0]['error'] in ('StorageError', 'NoSpaceError')
    assert Group(path, 1).record()[2] == 0
    # The next lessee publishes them.
    store(path, ('other', 3), ('image', 2))
    assert Group(path, 1).record()[2] == 20
    repositories.need_clean(path)


def test_n7_4_lease_may_go_early_the_shared_lock_not(coarse):
    with open_repository(coarse, codec='none') as repo:
        transaction = repo.begin('image')
        transaction.write(noise(9 << 20))
        groups = len(os.listdir(coarse / 'groups'))
        assert groups > 10
        for group in range(1, groups):
            assert repositories.group_lock_held(coarse, group) is None
        assert repositories.group_lock_held(coarse, groups) == 'exclusive'
        for group in range(1, groups + 1):
            assert repositories.group_lock_held(
                coarse, repositories.SHARE_BYTE + group) == 'shared'
        transaction.commit()
        for group in range(1, groups + 1):
            assert repositories.group_lock_held(
                coarse, repositories.SHARE_BYTE + group) is None


def test_new_group_is_durable_before_its_first_block_counts(witness, path):
    run = witness.run(path, [['put', 'image', 1, SIZE]])
    made = run.find('fsync', 'spool/G-*')
    named = run.find('linkat', 'spool/G-*', 'groups/00000001', after=made)
    durable = run.find('fsync', 'groups', after=named)
    run.find('fdatasync', 'groups/00000001', after=durable)
    assert repositories.spool(path, 'G') == []


# -- N8: commit ---------------------------------------------------------------

def test_n8_1_to_3_order_of_a_commit(witness, path):
    run = witness.run(path, [['put', 'image', 1, SIZE]])
    synced = run.find('fdatasync', 'groups/00000001')
    published = run.find('pwritev', 'groups/00000001', '1024', after=synced)
    header = run.find('pwritev', 'spool/T-*', '0', after=published)
    pages = run.find('pwritev', 'spool/T-*', '4096')
    recipe = run.find('fsync', 'spool/T-*', after=header)
    assert pages < recipe
    spool = run.find('fsync', 'spool', after=recipe)
    link = run.find('linkat', 'spool/T-*', 'images/image', after=spool)
    images = run.find('fsync', 'images', after=link)
    # Only then the locks.
    run.find('lock', 'locks/groups', str(SHARE), 'free', after=images)
    with pytest.raises(AssertionError):
        run.find('unlinkat', 'spool/T-*')
    assert len(repositories.spool(path)) == 1
    assert (path / 'images' / 'image').stat().st_nlink == 2


@pytest.mark.parametrize('call, image_stays', [
    (('fdatasync', 'groups/00000001'), False),
    (('fsync', 'spool/T-*'), False),
    (('fsync', 'spool'), False),
    (('linkat', 'spool/T-*'), False),
    (('fsync', 'images'), True),
])
def test_n8_failure_before_the_link_and_after_it(
        witness, path, call, image_stays):
    """N8.6: after the link the image stays, and the error is reported."""
    store(path, ('old', 9))
    hook = Once(lambda c: is_coming(c, *call), lambda c: errno.EIO)
    run = witness.run(path, [['put', 'image', 1, SIZE]], hook)
    assert hook.happened
    assert run.outcomes[0]['error'] == 'StorageError'
    assert run.outcomes[0]['errno'] == errno.EIO
    # No sync is tried a second time.
    if call[0] != 'linkat':
        assert not [c for c in run.made() if c.is_(*call)]
    with open_repository(path) as repo:
        if image_stays:
            assert read_all(repo, 'image') == noise(SIZE)
            assert len(repositories.spool(path)) == 2
            repo.delete('image')
        else:
            assert repo.images() == ['old']
            assert len(repositories.spool(path)) == 1
        put(repo, 'image', noise(SIZE))
        assert read_all(repo, 'image') == noise(SIZE)
        assert read_all(repo, 'old') == noise(SIZE, 9)
    repositories.need_clean(path)


def test_n8_3_link_that_succeeds_and_reports_an_error(witness, path):
    """As a repeated request on a network file system: the image exists."""
    hook = Once(lambda c: is_made(c, 'linkat', 'spool/T-*'),
                lambda c: errno.EEXIST)
    run = witness.run(path, [['put', 'image', 1, SIZE], ['read', 'image']],
                      hook)
    assert hook.happened
    assert run.outcomes[0]['error'] is None
    assert run.outcomes[1]['sha256'] == sha(1)


def test_n8_3_the_name_is_taken_at_the_last_moment(witness, path):
    """I3, I11: an existing name is Duplicate, and stays what it is."""
    hook = Once(lambda c: is_coming(c, 'linkat', 'spool/T-*', 'images/image'),
                lambda c: store(path, ('image', 2)))
    run = witness.run(path, [['put', 'image', 1, SIZE], ['read', 'image']],
                      hook)
    assert hook.happened
    assert run.outcomes[0]['error'] == 'ImageExists'
    assert run.outcomes[1]['sha256'] == sha(2)
    assert len(repositories.spool(path)) == 1
    repositories.need_clean(path)


def test_n8_4_locks_are_counted_among_a_processs_transactions(coarse):
    store(coarse, ('first', 1))
    with open_repository(coarse) as repo:
        one, two = repo.begin('one'), repo.begin('two')
        for seed, transaction in ((5, one), (6, two)):
            transaction.write(noise(SIZE) + noise(9 << 20, seed))
        assert repositories.group_lock_held(coarse, SHARE) == 'shared'
        one.commit()
        assert repositories.group_lock_held(coarse, SHARE) == 'shared'
        two.abort()
        assert repositories.group_lock_held(coarse, SHARE) is None


def test_n8_5_abort_unlinks_first(witness, path):
    store(path, ('first', 1))

    def look(call):
        assert repositories.lock_held(path / call.path, 0) == 'shared'
        assert repositories.group_lock_held(path, SHARE) == 'shared'
        return 0
    hook = Once(lambda c: is_coming(c, 'unlinkat', 'spool/T-*'), look)
    run = witness.run(
        path, [['hold', 'image', 1, 9 << 20], ['end', 'abort']], hook)
    assert hook.happened
    unlink = run.find('unlinkat', 'spool/T-*')
    run.find('close', 'spool/T-*', after=unlink)
    run.find('lock', 'locks/groups', str(SHARE), 'free', after=unlink)
    assert len(repositories.spool(path)) == 1


def test_n8_5_abort_after_a_failed_commit_is_no_plain_unlink(witness, path):
    """N8.6 once more: the caller aborts after commit() has raised."""
    hook = Once(lambda c: is_coming(c, 'fsync', 'images'),
                lambda c: errno.EIO)
    run = witness.run(
        path, [['hold', 'image', 1, SIZE], ['end', 'commit']], hook)
    assert run.outcomes[1]['error'] == 'StorageError'
    with open_repository(path) as repo:
        assert read_all(repo, 'image') == noise(SIZE)
    assert len(repositories.spool(path)) == 1


# -- N9: delete ---------------------------------------------------------------

def test_n9_1_the_image_lock_is_waited_for_and_bounded(path):
    store(path, ('image', 1), ('other', 2))
    locks = path / 'locks' / 'images'
    with open_repository(path, lock_timeout=0.3) as repo:
        byte = repositories.image_lock_byte('image')
        with repositories.holding(locks, byte):
            before = time.monotonic()
            with pytest.raises(exceptions.BusyError, match='image'):
                repo.delete('image')
            assert time.monotonic() - before >= 0.25
            assert read_all(repo, 'image') == noise(SIZE)
            repo.delete('other')
            # Storing and reading never wait for it.
            put(repo, 'third', noise(SIZE, 3))
        repo.delete('image')
    with open_repository(path, lock_timeout=60) as repo:
        byte = repositories.image_lock_byte('third')
        with repositories.holding(locks, byte) as held:
            timer = threading.Timer(0.3, lambda: repositories.set_lock(
                held.fileno(), byte, fcntl.F_UNLCK))
            timer.start()
            repo.delete('third')
            timer.join(60)
        assert repo.images() == []


def test_n9_1_two_threads_of_a_process_exclude_each_other(witness, path):
    """The image lock is taken before the image is opened."""
    store(path, ('image', 1))
    run = witness.run(path, [['delete', 'image']])
    byte = repositories.image_lock_byte('image')
    lock = run.find('lock', 'locks/images', str(byte), 'exclusive')
    opened = run.find('openat', 'images/image', after=lock)
    users = run.find('lock', 'images/image', '1', 'shared', after=opened)
    run.find('linkat', 'images/image', after=users)


def test_n9_2_deleter_holds_byte_1(witness, path):
    store(path, ('image', 1))
    held = []

    def look(call):
        held.append(repositories.lock_held(path / 'images' / 'image', 1))
        return 0
    hook = Once(lambda c: is_coming(c, 'linkat', 'images/image'), look)
    witness.run(path, [['delete', 'image']], hook)
    assert held == ['shared']


def test_n9_3_to_7_order_of_a_delete(witness, path):
    store(path, ('image', 1))
    inode = (path / 'images' / 'image').stat().st_ino
    run = witness.run(path, [['delete', 'image']])
    link = run.find('linkat', 'images/image')
    assert run.made()[link].arguments[1].startswith('spool/D-')
    spool = run.find('fsync', 'spool', after=link)
    unlink = run.find('unlinkat', 'images/image', after=spool)
    images = run.find('fsync', 'images', after=unlink)
    run.find('close', 'locks/images', after=images)
    assert not [c for c in run.made() if c.name == 'renameat']
    name, = repositories.spool(path, 'D')
    assert (path / 'spool' / name).stat().st_ino == inode
    # N9.7
    assert repositories.lock_held(path / 'spool' / name, 1) is None
    byte = repositories.image_lock_byte('image')
    assert repositories.lock_held(path / 'locks' / 'images', byte) is None


def test_n9_3_each_delete_has_a_name_of_its_own(path):
    with open_repository(path) as repo:
        for i in range(5):
            put(repo, 'image', noise(SIZE, i))
            repo.delete('image')
    assert len(repositories.spool(path, 'D')) == 5
    assert len(repositories.spool(path, 'T')) == 5


@pytest.mark.parametrize('call, gone', [
    (('linkat', 'images/image'), False),
    (('fsync', 'spool'), False),
    (('unlinkat', 'images/image'), False),
    (('fsync', 'images'), True),
])
def test_n9_failure(witness, path, call, gone):
    store(path, ('image', 1))
    hook = Once(lambda c: is_coming(c, *call), lambda c: errno.EIO)
    run = witness.run(path, [['delete', 'image']], hook)
    assert hook.happened
    assert run.outcomes[0]['error'] == 'StorageError'
    with open_repository(path) as repo:
        assert repo.images() == ([] if gone else ['image'])
        if not gone:
            assert read_all(repo, 'image') == noise(SIZE)
            repo.delete('image')
        put(repo, 'image', noise(SIZE, 2))
        assert read_all(repo, 'image') == noise(SIZE, 2)
    repositories.need_clean(path)


# -- N11: readers -------------------------------------------------------------

def replace_image(path, lock=False):
    """Delete and upload anew; returns what keeps the old one locked."""
    with open_repository(path) as repo:
        repo.delete('image')
        put(repo, 'image', noise(SIZE, 2))
    held = None
    if lock:
        name, = repositories.spool(path, 'D')
        held = open(path / 'spool' / name, 'r+b')
        assert repositories.set_lock(held.fileno(), 1, fcntl.F_WRLCK)
    return held


@pytest.mark.parametrize('lock', [False, True])
@pytest.mark.parametrize('steps', [
    [['read', 'image']], [['open', 'image'], ['again']]], ids=str)
def test_n11_replaced_between_opening_and_locking(
        witness, path, steps, lock):
    """The recipe that was opened is no longer the image's: open again."""
    store(path, ('image', 1))
    held = []

    def replace(call):
        held.append(replace_image(path, lock))
        return 0
    hook = Once(lambda c: is_made(c, 'openat', 'images/image'), replace)
    run = witness.run(path, steps, hook)
    assert hook.happened
    assert run.outcomes[-1]['sha256'] == sha(2)
    if lock:
        held[0].close()


@pytest.mark.parametrize('lock', [False, True])
def test_n11_deleted_between_opening_and_locking(witness, path, lock):
    store(path, ('image', 1))
    held = []

    def remove(call):
        with open_repository(path) as repo:
            repo.delete('image')
        name, = repositories.spool(path, 'D')
        held.append(open(path / 'spool' / name, 'r+b'))
        if lock:
            assert repositories.set_lock(held[0].fileno(), 1, fcntl.F_WRLCK)
        return 0
    hook = Once(lambda c: is_made(c, 'openat', 'images/image'), remove)
    run = witness.run(path, [['read', 'image']], hook)
    assert run.outcomes[0]['error'] == 'ImageNotFound'
    held[0].close()


def test_n11_order_of_opening(witness, path):
    store(path, ('image', 1))
    run = witness.run(path, [['read', 'image']])
    opened = run.find('openat', 'images/image')
    lock = run.find('lock', 'images/image', '1', 'shared', after=opened)
    run.find('pread', 'images/image', '0', after=lock)


def test_n11_an_image_that_changes_for_ever_is_busy(witness, path):
    """Bounded, not endless."""
    store(path, ('image', 1))

    def spoil(call):
        if is_made(call, 'openat', 'images/image'):
            file = path / 'images' / 'image'
            copy = path / 'images' / 'copy'
            shutil.copy(file, copy)
            copy.rename(file)
        return 0
    run = witness.run(path, [['read', 'image']], spoil)
    assert run.outcomes[0]['error'] == 'BusyError'


# -- invariants ---------------------------------------------------------------

def test_i4_only_the_holder_of_the_lease_appends(coarse):
    store(coarse, ('image', 1))
    before = Group(coarse, 1).data
    with repositories.holding(coarse / 'locks' / 'groups', LEASE):
        store(coarse, ('other', 2))
        assert Group(coarse, 1).data == before
    with open_repository(coarse) as repo:
        assert {e.group for e in repo.open_image('other').extents()} == {2}
        # One transaction of a process does not append to another's group.
        with repo.begin('a') as a, repo.begin('b') as b:
            a.write(noise(9 << 20, 3))
            b.write(noise(9 << 20, 4))
            a.commit()
            b.commit()
        groups = [{e.group for e in repo.open_image(i).extents()}
                  for i in ('a', 'b')]
        assert read_all(repo, 'a') == noise(9 << 20, 3)
        assert read_all(repo, 'b') == noise(9 << 20, 4)
        assert len(groups[0]) > 30 and len(groups[1]) > 30
    repositories.need_clean(coarse)


def rewrite_group(path, number):
    """Be the maintainer: the same blocks, in another file and order."""
    with repositories.collector_in(path, number):
        group = Group(path, number)
        new = bytearray(group.data)
        segments = {}
        end = group.data_start()
        del new[end:]
        new += bytes(4096)
        for slot in range(group.used()):
            fingerprint, checksum, segment, place = group.entry(slot)
            if segment not in segments:
                stored = place >> 37 & 0x1fffff
                segments[segment] = len(new)
                new += group.data[segment:segment + 32 + stored]
            group.write_entry(slot, fingerprint, checksum, segments[segment],
                              place)
        new[:end] = group.data[:end]
        group.data = new
        record = group.record()
        group.write_record([record[0] + 1, record[1] + 1, record[2],
                            record[3], len(new)])
        copy = group.path.with_name('new')
        copy.write_bytes(group.data)
        copy.chmod(0o600)
        copy.rename(group.path)


def test_i4_group_that_was_rewritten_meanwhile(path):
    """Who has the old file open looks again, to read, to hit, to append."""
    store(path, ('first', 1))
    with open_repository(path, codec='none') as repo:
        assert put(repo, 'second', noise(SIZE)).new_bytes == 0
        image = repo.open_image('first')
        assert image.read() == noise(SIZE)
        rewrite_group(path, 1)
        put(repo, 'third', noise(SIZE, 2))
        assert put(repo, 'fourth', noise(SIZE)).new_bytes == 0
        assert Group(path, 1).record()[2] == 20
        for image_id, seed in (('first', 1), ('second', 1), ('third', 2),
                               ('fourth', 1)):
            assert read_all(repo, image_id) == noise(SIZE, seed)
        assert image.read() == noise(SIZE)
        # The old file's hole punched, as after a freed block: nobody minds.
        repo.delete('third')
        repo.delete('fourth')
    repositories.need_clean(path)


@pytest.mark.parametrize('moment', ['locked', 'weighed'])
def test_i4_rewritten_between_choosing_and_leasing(witness, path, moment):
    store(path, ('first', 1))
    conditions = {
        # Its record was looked at to see how full it is.
        'weighed': lambda c: is_made(c, 'pread', 'groups/00000001', '512'),
        'locked': lambda c: is_coming(c, 'lock', 'locks/groups', str(LEASE)),
    }
    hook = Once(lambda c: c.step == 1 and conditions[moment](c),
                lambda c: rewrite_group(path, 1))
    run = witness.run(path, [['read', 'first'], ['put', 'second', 2, SIZE],
                             ['read', 'second'], ['read', 'first']], hook)
    assert run.outcomes[1]['error'] is None, run.outcomes
    assert run.outcomes[2]['sha256'] == sha(2)
    assert run.outcomes[3]['sha256'] == sha(1)
    with open_repository(path) as repo:
        assert read_all(repo, 'first') == noise(SIZE, 1)
        assert read_all(repo, 'second') == noise(SIZE, 2)
    repositories.need_clean(path)


def test_i4_group_unlinked_between_choosing_and_leasing(witness, path):
    """The collector took an empty group away."""
    store(path, ('first', 1))
    with open_repository(path) as repo:
        repo.delete('first')

    def remove(call):
        with repositories.collector_in(path, 1):
            repositories.group_path(path, 1).unlink()
    hook = Once(lambda c: is_coming(c, 'lock', 'locks/groups', str(LEASE)),
                remove)
    run = witness.run(path, [['put', 'image', 2, SIZE]], hook)
    assert hook.happened
    assert run.outcomes[0] == {'new': SIZE}
    with open_repository(path) as repo:
        assert read_all(repo, 'image') == noise(SIZE, 2)


def test_i6_shared_lock_from_the_first_block_to_the_end(coarse):
    store(coarse, ('first', 1))
    with open_repository(coarse) as repo:
        # A hit alone, without an append.
        transaction = repo.begin('image')
        transaction.write(noise(SIZE))
        transaction.write(bytes(9 << 20))
        transaction.write(noise(9 << 20, 5))
        assert repositories.group_lock_held(coarse, SHARE) == 'shared'
        with open(coarse / 'locks' / 'groups', 'r+b') as f:
            assert not repositories.set_lock(f.fileno(), SHARE,
                                             fcntl.F_WRLCK)
        transaction.abort()
        assert repositories.group_lock_held(coarse, SHARE) is None


def test_i12_reader_keeps_only_its_own_image(path):
    store(path, ('image', 1), ('other', 2))
    with open_repository(path) as repo:
        with repo.open_image('image') as image:
            image.read()
            # No group lock: the collector may work in the group.
            with repositories.collector_in(path, 1):
                assert image.read() == noise(SIZE)
            repo.delete('image')
            repo.delete('other')
            locks = {}
            for name in repositories.spool(path, 'D'):
                file = path / 'spool' / name
                content = file.read_bytes()
                locks[content[144:149]] = repositories.lock_held(file, 1)
            assert locks == {b'image': 'shared', b'other': None}


# -- every call fails, and dies, once -----------------------------------------

STEPS = [['put', 'old', 1, SIZE], ['put', 'image', 2, 70 * BLOCK],
         ['delete', 'old'], ['put', 'again', 2, 30 * BLOCK],
         ['put', 'old', 3, SIZE], ['read', 'image']]
CONTENT = {('image', 1): (2, 70 * BLOCK), ('again', 3): (2, 30 * BLOCK)}


def possible_contents(run, died):
    """For each id the contents it may have: seed and size, or None."""
    known = {}
    for number, (step, image_id, *what) in enumerate(STEPS[:5]):
        before = known.get(image_id, {None})
        after = {tuple(what)} if step == 'put' else {None}
        if number >= len(run.outcomes):
            # It was not acknowledged; only one step was under way.
            if died and number == len(run.outcomes):
                known[image_id] = before | after
        elif run.outcomes[number]['error'] is None:
            known[image_id] = after
        elif run.outcomes[number]['error'] not in (
                'ImageExists', 'ImageNotFound'):
            known[image_id] = before | after
    return known


def judge(path, run, died):
    with open_repository(path) as repo:
        known = possible_contents(run, died)
        there = repo.images()
        assert set(there) <= set(known)
        for image_id, contents in known.items():
            if image_id not in there:
                assert None in contents, (image_id, run.outcomes)
                continue
            data = read_all(repo, image_id)
            assert any(data == noise(c[1], c[0])
                       for c in contents if c is not None), image_id
        for image_id in there:
            repo.delete(image_id)
        for image_id, seed in (('old', 1), ('image', 2), ('new', 4)):
            put(repo, image_id, noise(SIZE, seed))
        for image_id, seed in (('old', 1), ('image', 2), ('new', 4)):
            assert read_all(repo, image_id) == noise(SIZE, seed)
    repositories.need_clean(path)


def count_calls(witness, template, tmp_path):
    shutil.copytree(template, tmp_path / 'counted')
    run = witness.run(tmp_path / 'counted', STEPS)
    assert all(o['error'] is None for o in run.outcomes)
    return len([c for c in run.calls if c.result is None])


@pytest.mark.parametrize('fault', [
    pytest.param('kill', id='kill'),
    pytest.param(errno.EIO, id='EIO'),
    pytest.param(errno.ENOSPC, id='ENOSPC'),
    pytest.param(errno.EMFILE, id='EMFILE'),
])
@pytest.mark.parametrize('every', [
    7, pytest.param(1, marks=pytest.mark.long, id='all')])
def test_every_call_fails_once(witness, path, tmp_path, fault, every):
    """I8: acknowledged is intact, unacknowledged is absent or whole."""
    shutil.copytree(path, tmp_path / 'template')
    total = count_calls(witness, tmp_path / 'template', tmp_path)
    assert total > 100
    start = 0 if every == 1 else zlib.crc32(str(fault).encode()) % every
    for number in range(start, total, every):
        place = tmp_path / f'n{number}'
        shutil.copytree(tmp_path / 'template', place)
        seen = -1

        def fail(call, number=number):
            nonlocal seen
            if call.result is not None:
                return 0
            seen += 1
            if seen != number or call.name == 'close':
                return 0
            return witness_module.KILL if fault == 'kill' else fault
        run = witness.run(place, STEPS, fail)
        assert run.status == (-9 if len(run.outcomes) < len(STEPS) else 0)
        judge(place, run, fault == 'kill')
        shutil.rmtree(place)
        shutil.rmtree(tmp_path / f'n{number}-filter')
