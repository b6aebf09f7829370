# SPDX-License-Identifier: Apache-2.0

"""The protocol of blocks: rule N7, but for the tail; I4 and I6."""

import errno
import fcntl
import os

import pytest

from glance_dedup.base import exceptions
from tests.functional import protocol
from tests.functional.protocol import BLOCK
from tests.functional.protocol import is_coming
from tests.functional.protocol import is_made
from tests.functional.protocol import LEASE
from tests.functional.protocol import Once
from tests.functional.protocol import sha
from tests.functional.protocol import SHARE
from tests.functional.protocol import SIZE
from tests.functional.protocol import store
from tests.support import repositories
from tests.support.repositories import Group
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all

INTENT = repositories.INTENT_BYTE + 1

witness = protocol.witness
path = protocol.path
coarse = protocol.coarse


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
    # The new file has another name, and the lock; the recipe's name only leads
    # to the recipe that was locked.
    created = [c.path for c in run.made()
               if c.is_('openat', f'spool/{kind}-*', 'create')]
    assert len(created) == len(set(created)) == 2
    with open_repository(path) as repo:
        assert read_all(repo, 'image') == noise(SIZE)
    repositories.require_clean(path)


# -- N7.2: hits ---------------------------------------------------------------

def test_n7_2_shared_lock_comes_before_the_entries(witness, path):
    store(path, ('first', 1))
    run = witness.run(path, [['statistics'], ['put', 'second', 1, SIZE]])
    assert run.outcomes[1]['new'] == 0
    intent = run.find('lock', 'locks/groups', str(INTENT), 'shared', step=1)
    lock = run.find('lock', 'locks/groups', str(SHARE), 'shared', step=1,
                    after=intent)
    # Reads of the filter's rebuild before are for hints only.
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
                # The transaction that had the lock keeps it.
                transaction.commit()
                assert repositories.group_lock_held(coarse, SHARE) is None
        assert read_all(repo, 'second')[:SIZE] == noise(SIZE)
        assert read_all(repo, 'third') == noise(SIZE)


def free_slots(path, number, slots):
    """Free slots of a group, as the collector does."""
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
    """A table that was loaded before the collection is not used after it."""
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
    repositories.require_clean(path)


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


# -- N7.4: publishing ---------------------------------------------------------

def test_n7_4_published_after_ones_own_fdatasync(witness, path):
    """This also holds amid a store operation, whenever a group is full."""
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
        # The record of a full group is synced, too: no later writer syncs it,
        # and without it the tail would be judged again after a crash.
        assert len(synced) == (1 if group == '00000003' else 2)
        assert all(i > records[0] for i in synced[1:])


def test_n7_4_failed_fdatasync_poisons_the_group(witness, path):
    """I1: no writer appends to it again, or syncs in its place."""
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
    # There is no second attempt at the sync.
    assert [c.path for c in run.made() if c.name == 'fdatasync'] == [
        'groups/00000002']
    record = Group(path, 1).record()
    assert record[2] == 10 and record[3] & repositories.POISONED
    # Nor does another process append there, or use blocks from after the last
    # sync point; earlier blocks are in use as ever.
    before = Group(path, 1).data
    with repositories.holding(path / 'locks' / 'groups', LEASE + 1):
        with open_repository(path) as repo:
            repo.rebuild_filter()
            put(repo, 'more', noise(SIZE, 4))
            assert put(repo, 'hit', noise(SIZE, 1)).new_bytes == 0
            assert {e.group for e in repo.open_image('more').extents()} == {3}
            assert {e.group for e in repo.open_image('hit').extents()} == {1}
    assert Group(path, 1).data == before
    repositories.require_clean(path)


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
    repositories.require_clean(path)


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
    repositories.require_clean(coarse)


def rewrite_group(path, number):
    """Rewrite a group as the maintainer does: in another file and order."""
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
    """A process reopens a replaced group to read, to hit and to append."""
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
        # A hole is punched in the old file, as after a freed block; reads
        # work.
        repo.delete('third')
        repo.delete('fourth')
    repositories.require_clean(path)


@pytest.mark.parametrize('moment', ['locked', 'weighed'])
def test_i4_rewritten_between_choosing_and_leasing(witness, path, moment):
    store(path, ('first', 1))
    conditions = {
        # Its record was read to see how full it is.
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
    repositories.require_clean(path)


def test_i4_group_unlinked_between_choosing_and_leasing(witness, path):
    """The writer takes another group if the collector removed an empty one."""
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
        # This is a hit alone, without an append.
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
