# SPDX-License-Identifier: Apache-2.0

"""The maintainer's types of the engine, as seen from Python.

The C tests in ``tests/c`` (``test_judge``, ``test_fence``, ``test_collect``,
``test_rewrite``, ``test_locks``) check the effects on the disk and their
order. These tests check each method's arguments and results, its callers, and
the effects of closing, forks and threads.
"""

import array
import collections
import contextlib
import gc
import os
import random
import struct
import threading

import pytest
import xxhash

from glance_dedup import _engine
from glance_dedup.base import exceptions
from tests.support import repositories

SLOTS = 64
BLOCK = 4096
EMPTY, INVALID = 0, 7


def packed(*numbers):
    return array.array('I', numbers).tobytes()


def runs_of(data):
    return [tuple(run) for run in struct.iter_unpack('<III', data)]


@pytest.fixture
def path(tmp_path):
    return repositories.create(tmp_path / 'r', group_slots=SLOTS,
                               block_size=BLOCK)


@pytest.fixture
def repo(path):
    with repositories.open_repository(path) as repo:
        yield repo


@pytest.fixture
def images(repo):
    """Store two images: 'one' fills group 1, 'two' half of group 2."""
    contents = {'one': repositories.noise(SLOTS * BLOCK, 1),
                'two': repositories.noise(SLOTS // 2 * BLOCK, 2)}
    for name, data in contents.items():
        repositories.put(repo, name, data)
    return contents


@pytest.fixture
def maintenance(repo):
    maintenance = _engine.Maintenance(repo.handle())
    assert maintenance.lock()
    yield maintenance
    maintenance.close()


def open_first(maintenance, kind='T'):
    name = next(n for n in maintenance.spool() if n.startswith(kind))
    return maintenance.open_entry(name)


# -- being the maintainer -----------------------------------------------------

def test_one_maintainer(path, repo, maintenance):
    assert maintenance.lock()   # a second call succeeds, too
    assert (path / 'locks/maintainer').stat().st_mode & 0o777 == 0o600
    second = _engine.Maintenance(repo.handle())
    assert not second.lock()

    def ask():
        with repositories.open_repository(path) as own:
            return _engine.Maintenance(own.handle()).lock()

    assert repositories.in_child(ask) is False
    maintenance.close()
    assert repositories.in_child(ask) is True
    assert second.lock()
    del second
    gc.collect()
    assert repositories.lock_held(path / 'locks/maintainer', 0) is None


def test_what_needs_the_lock(repo, images):
    maintenance = _engine.Maintenance(repo.handle())
    recipe = open_first(maintenance)
    for call in (lambda: maintenance.write_fence(bytes(24)),
                 lambda: maintenance.enter_group(1),
                 lambda: maintenance.lock_image('one'),
                 lambda: recipe.try_lock(0),
                 recipe.unlink, recipe.set_aside, recipe.delete):
        with pytest.raises(exceptions.InvalidParameter, match='maintainer'):
            call()
    # The listings work without the lock, and so do announcements, which a
    # helper's rewriting needs (N12).
    assert maintenance.announce(1)
    maintenance.withdraw(1)
    assert maintenance.groups() == [1, 2]
    assert len(maintenance.spool()) == 2
    assert maintenance.read_fence() is None
    assert maintenance.group_facts(1)['slots'] == SLOTS
    assert recipe.live() and recipe.runs() and recipe.header()
    assert not maintenance.is_read('one')
    maintenance.close()


def test_arguments_of_the_constructor(repo):
    for wrong in ((), (None,), (repo,), (repo.handle(), 1)):
        with pytest.raises(TypeError):
            _engine.Maintenance(*wrong)
    for kind in (_engine.Recipe, _engine.Group):
        with pytest.raises(TypeError):
            kind()
    handle = _engine.Maintenance(repository=repo.handle())
    handle.close()


# -- the locks of images ------------------------------------------------------

def test_image_lock(path, maintenance):
    """The lock is the same one that a deletion takes: N9.1."""
    locks = path / 'locks' / 'images'
    byte = xxhash.xxh3_64_intdigest(b'one') >> 2
    assert maintenance.lock_image('one') is True
    assert repositories.lock_held(locks, byte) == 'exclusive'
    for name in ('one', 'two'):
        with pytest.raises(exceptions.InvalidParameter, match='locked'):
            maintenance.lock_image(name)
    for _ in range(2):      # the second call finds no lock
        maintenance.unlock_image()
        assert repositories.lock_held(locks, byte) is None
    with repositories.holding(locks, byte):
        assert maintenance.lock_image('one') is False
        assert maintenance.lock_image('two') is True
    maintenance.close()
    assert repositories.lock_held(
        locks, xxhash.xxh3_64_intdigest(b'two') >> 2) is None
    with pytest.raises(exceptions.ClosedError):
        maintenance.unlock_image()


def test_image_lock_that_cannot_be_had(path, maintenance):
    (path / 'locks' / 'images').rename(path / 'locks' / 'aside')
    with pytest.raises(exceptions.RepositoryError, match='locks/images'):
        maintenance.lock_image('one')
    (path / 'locks' / 'aside').rename(path / 'locks' / 'images')
    assert maintenance.lock_image('one')


def test_image_that_is_read(repo, images, maintenance):
    with repo.open_image('one'):
        assert maintenance.is_read('one') is True
        assert maintenance.is_read('two') is False
    assert maintenance.is_read('one') is False
    assert maintenance.is_read('nothing') is False


def test_images_that_are_the_same_files(path, images, maintenance):
    found = os.lstat(path / 'images' / 'one')

    def file(inode=0, modified=0):
        return struct.pack('<QQ16s', found.st_ino + inode,
                           found.st_mtime_ns + modified, bytes(16))
    assert maintenance.are_same(()) == []
    assert maintenance.are_same((
        (b'one', file()), (b'one', file(inode=1)),
        (b'one', file(modified=1)), (b'two', file()), (b'nothing', file()),
        (b'../images/one', file()), (b'', file()))) == [True] + 6 * [False]
    with pytest.raises(ValueError, match='32 bytes'):
        maintenance.are_same(((b'one', file()[:-1]),))
    for wrong in ('one', file()), (b'one',), b'one':
        with pytest.raises(TypeError):
            maintenance.are_same((wrong,))


# -- the fence ----------------------------------------------------------------

def test_fence(path, maintenance):
    assert maintenance.read_fence() is None
    first = b'c' * 16 + (5).to_bytes(8, 'little')
    maintenance.write_fence(first)
    assert maintenance.read_fence() == first
    for wrong in (b'', first + b'x', first[:-1]):
        with pytest.raises(ValueError):
            maintenance.write_fence(wrong)
    with pytest.raises(exceptions.InvalidParameter, match='go back'):
        maintenance.write_fence(b'c' * 16 + (4).to_bytes(8, 'little'))
    second = b'd' * 16 + (1).to_bytes(8, 'little')
    maintenance.write_fence(second)
    assert maintenance.read_fence() == second
    (path / 'fence').write_bytes(b'x' * 1024)
    assert maintenance.read_fence() is None
    (path / 'fence').unlink()
    (path / 'fence').mkdir()
    with pytest.raises(exceptions.DamagedError, match='fence'):
        maintenance.read_fence()
    with pytest.raises(exceptions.StorageError, match='fence'):
        maintenance.write_fence(second)


def test_sync(path, maintenance):
    for directory in ('images', 'spool', 'groups', 'quarantine'):
        maintenance.sync(directory)
    for wrong in ('', '.', '..', 'locks', 'images/'):
        with pytest.raises(exceptions.InvalidParameter):
            maintenance.sync(wrong)
    (path / 'quarantine').rmdir()
    with pytest.raises(exceptions.ImageNotFound, match='quarantine'):
        maintenance.sync('quarantine')


# -- listings -----------------------------------------------------------------

def test_listings(path, repo, maintenance):
    assert maintenance.groups() == [] and maintenance.spool() == []
    for name in ('T-' + 'b' * 32, 'M-' + '0' * 32, 'strange', 'T-x'):
        (path / 'spool' / name).touch()
    for name in ('0000000a', '00000009', '1', '0000000g'):
        (path / 'groups' / name).touch()
    assert maintenance.spool() == ['M-' + '0' * 32, 'T-' + 'b' * 32]
    assert maintenance.groups() == [9, 10]


def test_group_facts(path, maintenance, images):
    for number in (1, 2):
        facts = maintenance.group_facts(number)
        group = repositories.Group(path, number)
        sequence, generation, count, flags, end = group.record()
        size = len(group.data)
        allocated = facts.pop('allocated')
        assert facts.pop('modified') == int(
            (path / f'groups/{number:08}').stat().st_mtime)
        assert facts == {
            'slots': SLOTS, 'has_lists': False,
            'is_cold': False, 'object': bytes(16), 'scope': bytes(16),
            'published': count,
            'generation': generation, 'flags': flags, 'sequence': sequence,
            'end': end, 'codec': 0, 'level': 0, 'similar': False,
            'covered': 0, 'size': size}
        assert 0 < allocated <= size + (1 << 20)
    with pytest.raises(exceptions.ImageNotFound, match='00000003'):
        maintenance.group_facts(3)
    (path / 'groups/00000003').write_bytes(bytes(10000))
    with pytest.raises(exceptions.DamagedError, match='00000003'):
        maintenance.group_facts(3)
    for wrong in (-1, (1 << 32) + 1, 1 << 70):
        with pytest.raises(OverflowError):
            maintenance.group_facts(wrong)
        with pytest.raises(OverflowError):
            maintenance.enter_group(wrong)


def test_entries(path, maintenance, images):
    data = maintenance.entries(2, 0, SLOTS)
    assert len(data) == 48 * SLOTS
    group = repositories.Group(path, 2)
    for slot in range(SLOTS):
        fingerprint, segment, plain, stored, state = struct.unpack_from(
            '<32sIIII', data, 48 * slot)
        if slot < SLOTS // 2:
            wanted, _, offset, place = group.entry(slot)
            assert (fingerprint, segment) == (wanted, offset)
            assert (plain, state) == (BLOCK, repositories.LIVE)
            assert stored == place >> 37 & 0x1fffff
        else:
            assert state == EMPTY
    assert maintenance.entries(2, 7, 5) == data[48 * 7:48 * 12]
    assert maintenance.entries(2, SLOTS, 0) == b''
    # Each call reads the file again.
    group.data[group.entry_offset(3)] ^= 1
    group.save()
    assert maintenance.entries(2, 3, 1)[44] == INVALID
    for first, count in ((0, SLOTS + 1), (SLOTS + 1, 0), (1, SLOTS),
                         (1 << 31, 1 << 14), (0, 32769), (0, 0xffffffff)):
        with pytest.raises(exceptions.InvalidParameter):
            maintenance.entries(2, first, count)
    with pytest.raises(exceptions.ImageNotFound):
        maintenance.entries(3, 0, 1)


# -- intents and groups -------------------------------------------------------

def test_announce(path, repo, maintenance, images):
    intent = repositories.INTENT_BYTE
    assert maintenance.announce(1)
    assert not maintenance.announce(1)
    assert repositories.group_lock_held(path, intent + 1) == 'exclusive'
    # No upload may use its blocks now, so they are stored again.
    stat = repositories.put(repo, 'again', images['one'])
    assert stat.new_bytes == len(images['one'])
    assert repo.statistics()['lock_refusals'] > 0
    maintenance.withdraw(1)
    maintenance.withdraw(1)
    assert repositories.group_lock_held(path, intent + 1) is None
    with repositories.holding(path / 'locks/groups', intent + 2, shared=True):
        assert not maintenance.announce(2)
    assert maintenance.announce(1) and maintenance.announce(2)
    for wrong in (0, 1 << 25):
        with pytest.raises(exceptions.InvalidParameter):
            maintenance.announce(wrong)
    maintenance.close()
    for number in (1, 2):
        assert repositories.group_lock_held(path, intent + number) is None


def test_enter_group(path, repo, maintenance, images):
    with repo.begin('three') as transaction:
        # The write is long enough that the blocks are looked up by now.
        transaction.write(images['one'] * 8)
        with pytest.raises(exceptions.BusyError, match='00000001'):
            maintenance.enter_group(1)
    assert repositories.group_lock_held(path, 1) is None
    group = maintenance.enter_group(1)
    assert (group.number, group.slots, group.published) == (1, SLOTS, SLOTS)
    assert repositories.group_lock_held(path, 1) == 'exclusive'
    shared = repositories.SHARE_BYTE + 1
    assert repositories.group_lock_held(path, shared) == 'exclusive'
    with pytest.raises(exceptions.BusyError):
        maintenance.enter_group(1)
    group.close()
    group.close()
    assert repositories.group_lock_held(path, 1) is None
    assert repositories.group_lock_held(path, shared) is None
    for wrong, error in ((0, exceptions.InvalidParameter),
                         (1 << 25, exceptions.InvalidParameter),
                         (7, exceptions.ImageNotFound)):
        with pytest.raises(error):
            maintenance.enter_group(wrong)
    group = maintenance.enter_group(1)
    del group
    gc.collect()
    assert repositories.group_lock_held(path, 1) is None


def test_group(path, repo, maintenance, images):
    repo.delete('one')
    group = maintenance.enter_group(1)
    assert group.states() == bytes([repositories.LIVE]) * SLOTS
    for wrong in (b'abc', packed(0)[:-1]):
        with pytest.raises(ValueError):
            group.free(wrong)
        with pytest.raises(ValueError):
            group.mark_damaged(wrong)
    with pytest.raises(exceptions.InvalidParameter, match='slot 64'):
        group.free(packed(0, SLOTS))
    before = group.live_bytes()
    assert before[0] == before[1] > SLOTS * BLOCK
    assert group.free(packed(*range(20))) == 20
    assert group.free(packed()) == 0
    assert group.states() == (bytes([repositories.FREED]) * 20
                              + bytes([repositories.LIVE]) * (SLOTS - 20))
    assert group.punch() > 0
    assert group.live_bytes() < before
    assert not group.unlink()
    for wrong in ({'codec': 'gzip'}, {'codec': 'zstd', 'level': 20},
                  {'level': 1}):
        with pytest.raises(exceptions.InvalidParameter):
            group.rewrite(**wrong)
    assert group.rewrite() >= 0
    assert group.rewrite(codec='zstd', level=3) >= 0
    names = group.mark_damaged(packed(30, 31))
    assert [os.path.exists(path / name) for name in names] == [True]
    assert names[0].startswith('quarantine/00000001-')
    assert group.states()[30] == repositories.DAMAGED
    states = group.states()
    # Only the old file has the bytes, which may still be readable.
    with pytest.raises(exceptions.DamagedError, match='slot 30'):
        group.rewrite()
    assert group.states() == states
    group.close()
    # The second implementation of the format agrees.
    repositories.require_clean(path)
    group = maintenance.enter_group(1)
    assert group.free(packed(*range(20, SLOTS))) == SLOTS - 20
    assert group.unlink()
    assert maintenance.groups() == [2]
    for call in (group.punch, group.rewrite, group.unlink):
        with pytest.raises(exceptions.ClosedError, match='00000001'):
            call()
    group.close()
    group = maintenance.enter_group(2)
    assert group.free(packed(*range(SLOTS // 2))) == SLOTS // 2
    assert not group.unlink()   # the highest group stays
    group.close()
    with pytest.raises(exceptions.DamagedError):
        repositories.read_all(repo, 'two')


def test_rewriting_damage(path, repo, maintenance, images):
    group = repositories.Group(path, 1)
    group.data[group.data_start() + 32 + 5 * BLOCK] ^= 1
    group.save()
    with contextlib.closing(maintenance.enter_group(1)) as group:
        with pytest.raises(exceptions.DamagedError, match='slot 5'):
            group.rewrite()
    assert repositories.spool(path, 'G') == []


# -- recipes ------------------------------------------------------------------

def test_recipe(path, repo, maintenance, images):
    recipe = maintenance.open_recipe('one')
    assert (recipe.name, recipe.kind) == ('images/one', '')
    assert recipe.complete and recipe.error is None and recipe.links == 2
    assert recipe.inode == os.stat(path / 'images/one').st_ino
    header = recipe.header()
    image = repo.handle().open_image('one')
    known = image.header()
    image.close()
    assert {**known, 'transaction_id': header['transaction_id']} == header
    assert len(header['transaction_id']) == 16
    assert header['transaction_id'] == header['upload_id']
    assert runs_of(recipe.runs()) == [(1, 0, SLOTS)]
    assert recipe.live()
    repo.delete('one')
    assert not recipe.live()
    entry = open_first(maintenance, 'D')
    assert entry.kind == 'D' and entry.inode == recipe.inode
    assert entry.header() == header and not entry.live()
    entry.unlink()
    with pytest.raises(exceptions.ImageNotFound):
        entry.unlink()
    for wrong, error in (('nobody', exceptions.ImageNotFound),
                         ('../key', exceptions.InvalidParameter),
                         ('', exceptions.InvalidParameter)):
        with pytest.raises(error):
            maintenance.open_recipe(wrong)
    for wrong, error in (('T-' + '0' * 32, exceptions.ImageNotFound),
                         ('../images/two', exceptions.InvalidParameter),
                         ('one', exceptions.InvalidParameter)):
        with pytest.raises(error):
            maintenance.open_entry(wrong)


def test_locks_of_a_recipe(path, repo, maintenance, images):
    recipe = maintenance.open_recipe('one')
    with repo.open_image('one'):
        assert recipe.try_lock(0)
        assert not recipe.try_lock(1)
    assert recipe.try_lock(1)
    assert repositories.lock_held(path / 'images/one', 1) == 'exclusive'
    for wrong in (2, -1):
        with pytest.raises(exceptions.InvalidParameter):
            recipe.try_lock(wrong)
    recipe.close()
    for byte in (0, 1):
        assert repositories.lock_held(path / 'images/one', byte) is None


def test_incomplete_and_damaged(path, repo, maintenance, images):
    transaction = repo.begin('three')
    transaction.write(images['one'])
    entry, = (maintenance.open_entry(name) for name in maintenance.spool()
              if not os.path.getsize(path / 'spool' / name))
    assert not entry.complete and entry.error is None and not entry.live()
    assert not entry.try_lock(0)
    for call in (entry.runs, entry.header):
        with pytest.raises(exceptions.InvalidParameter, match='header page'):
            call()
    transaction.commit()
    assert entry.try_lock(0)
    assert not entry.complete and entry.live() and entry.complete
    assert runs_of(entry.runs()) == [(1, 0, SLOTS)]
    # Damage a header and a page.
    with open(path / 'images/one', 'r+b') as f:
        f.seek(200)
        f.write(b'\xff')
    with open(path / 'images/two', 'r+b') as f:
        f.seek(4200)
        f.write(b'\xff')
    recipe = maintenance.open_recipe('one')
    assert not recipe.complete and 'images/one' in recipe.error
    assert not recipe.live()
    with pytest.raises(exceptions.DamagedError, match='images/two'):
        maintenance.open_recipe('two').runs()
    # The recipe is set aside, then deleted.
    name = recipe.set_aside()
    assert os.path.samefile(path / name, path / 'images/one')
    recipe.delete()
    assert not (path / 'images/one').exists() and (path / name).exists()
    assert len(repositories.spool(path, 'D')) == 1
    with pytest.raises(exceptions.ImageNotFound):
        recipe.delete()


# -- closing, forks, threads --------------------------------------------------

def calls_of(maintenance, recipe, group):
    """Return every method of each type, with valid arguments."""
    return {
        maintenance: [
            maintenance.lock, maintenance.read_fence,
            lambda: maintenance.write_fence(bytes(24)),
            lambda: maintenance.sync('spool'), maintenance.spool,
            lambda: maintenance.open_entry('T-' + '0' * 32),
            lambda: maintenance.open_recipe('two'), maintenance.groups,
            lambda: maintenance.group_facts(2),
            lambda: maintenance.entries(2, 0, 1),
            lambda: maintenance.announce(2),
            lambda: maintenance.withdraw(2),
            lambda: maintenance.enter_group(2)],
        recipe: [
            recipe.live, lambda: recipe.try_lock(0), recipe.runs,
            recipe.unlink, recipe.set_aside, recipe.delete],
        group: [
            lambda: group.number, lambda: group.slots,
            lambda: group.published, group.states,
            lambda: group.free(packed(0)), group.punch, group.live_bytes,
            group.rewrite, lambda: group.mark_damaged(packed(0)),
            group.unlink],
    }


def refused(calls):
    """Return how many of the calls raise ClosedError."""
    count = 0
    for call in calls:
        with contextlib.suppress(exceptions.ClosedError):
            call()
            continue
        count += 1
    return count


def test_closed(path, maintenance, images):
    recipe = maintenance.open_recipe('one')
    group = maintenance.enter_group(1)
    calls = calls_of(maintenance, recipe, group)
    recipe.close()
    group.close()
    for part in (recipe, group):
        assert refused(calls[part]) == len(calls[part])
    # The facts read before the closing stay available.
    assert recipe.name == 'images/one' and recipe.complete
    # Closing the maintenance object closes its parts.
    recipe = maintenance.open_recipe('one')
    assert recipe.try_lock(0)
    group = maintenance.enter_group(1)
    calls = calls_of(maintenance, recipe, group)
    maintenance.close()
    maintenance.close()
    assert repositories.group_lock_held(path, 1) is None
    assert repositories.lock_held(path / 'images/one', 0) is None
    for part in calls:
        assert refused(calls[part]) == len(calls[part])
    recipe.close()
    group.close()


def test_it_uses_the_handle(path, repo, images):
    maintenance = _engine.Maintenance(repo.handle())
    assert maintenance.lock()
    group = maintenance.enter_group(1)
    repo.close()
    assert group.free(packed(0)) == 1
    assert maintenance.groups() == [1, 2]
    del maintenance
    gc.collect()
    assert group.states()[0] == repositories.FREED   # kept by group
    with pytest.raises(exceptions.ClosedError):
        _engine.Maintenance(repo.handle())
    del group
    gc.collect()
    assert repositories.group_lock_held(path, 1) is None


def test_forked(path, repo, maintenance, images):
    parts = [maintenance.open_recipe('one'), maintenance.enter_group(1)]
    assert parts[0].try_lock(0)
    calls = calls_of(maintenance, *parts)
    wanted = {type(part).__name__: len(calls[part]) for part in calls}

    def child():
        counts = {type(part).__name__: refused(calls[part])
                  for part in calls}
        for part in calls:
            part.close()
        # The descriptors that the child closed at the fork now belong to other
        # files.
        own = [os.open('/dev/null', os.O_RDONLY) for _ in range(50)]
        del part
        calls.clear()
        parts.clear()   # their last references
        for fd in own:
            os.fstat(fd)
        return counts

    assert repositories.in_child(child) == wanted
    # The child released no lock, neither by closing nor by garbage collection.
    assert repositories.group_lock_held(path, 1) == 'exclusive'
    assert repositories.lock_held(path / 'images/one', 0) == 'exclusive'
    assert repositories.lock_held(path / 'locks/maintainer',
                                  0) == 'exclusive'
    assert parts[1].free(packed(0)) == 1


def descriptors(path):
    """Return the repository's files that this process has open."""
    found = []
    for fd in os.listdir('/proc/self/fd'):
        with contextlib.suppress(OSError):
            target = os.readlink(f'/proc/self/fd/{fd}')
            if target.startswith(str(path)):
                found.append(target)
    return found


def test_nothing_stays_open(path, repo, images):
    for closed_first in (True, False):
        handle = repositories.open_repository(path)
        maintenance = _engine.Maintenance(handle.handle())
        assert maintenance.lock()
        parts = [maintenance.open_recipe('one'), maintenance.enter_group(1)]
        repo.close()
        if closed_first:
            handle.close()
            assert descriptors(path)
            maintenance.close()
        else:
            maintenance.close()
            handle.close()
        assert descriptors(path) == []
        assert refused([parts[0].live, parts[1].states]) == 2


def test_a_second_thread_is_refused(path, maintenance, images):
    """A call from a second thread is refused while the first one waits."""
    recipe = maintenance.open_recipe('one')
    byte = xxhash.xxh3_64_intdigest(b'one') >> 2
    thread = threading.Thread(target=recipe.delete)

    def is_refused():
        try:
            maintenance.groups()
        except exceptions.BusyError as e:
            assert 'another thread' in str(e)
            return True
        return False

    with repositories.holding(path / 'locks/images', byte):
        thread.start()
        repositories.eventually(is_refused)
        for call in (maintenance.close, recipe.close, recipe.live):
            with pytest.raises(exceptions.BusyError):
                call()
    thread.join(timeout=60)
    assert not (path / 'images/one').exists()
    assert maintenance.groups() == [1, 2]


def test_threads(maintenance, images):
    """Calls of several threads succeed or raise BusyError."""
    outcomes = collections.Counter()

    def work():
        for _ in range(300):
            try:
                assert len(maintenance.entries(1, 0, SLOTS)) == 48 * SLOTS
                with contextlib.closing(maintenance.open_recipe('one')) as r:
                    assert r.runs()
                outcomes['done'] += 1
            except exceptions.BusyError as e:
                assert 'another thread' in str(e)
                outcomes['busy'] += 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert outcomes['done'] > 0
    assert sum(outcomes.values()) == 900


# -- runs ---------------------------------------------------------------------

def pack_runs(*runs):
    return b''.join(struct.pack('<III', *run) for run in runs)


def test_add_runs():
    counts = bytearray(4096)
    runs = pack_runs((5, 1000, 30), (5, 1023, 2), (6, 0, 32768), (5, 0, 1))
    _engine.add_runs(counts, 5, 0, runs, 1)
    numbers = array.array('I', bytes(counts))
    assert numbers[0] == 1 and numbers[1000] == 1 and numbers[1023] == 2
    assert sum(numbers) == 24 + 1 + 1
    upper = bytearray(4096)
    _engine.add_runs(upper, 5, 1, runs, 1)
    assert array.array('I', bytes(upper))[:7].tolist() == [
        2, 1, 1, 1, 1, 1, 0]
    _engine.add_runs(counts, 5, 0, runs, -1)
    assert counts == bytes(4096)


def test_add_runs_never_below_zero():
    counts = bytearray(4096)
    _engine.add_runs(counts, 5, 0, pack_runs((5, 10, 5)), 1)
    before = bytes(counts)
    for runs in (((5, 10, 6),), ((5, 12, 1), (5, 12, 1))):
        with pytest.raises(ValueError, match='below zero'):
            _engine.add_runs(counts, 5, 0, pack_runs(*runs), -1)
        assert counts == before


def test_a_counter_at_its_maximum_stays():
    counts = bytearray(4096)
    most = 0xffffffff
    struct.pack_into('<II', counts, 0, most, most - 1)
    _engine.add_runs(counts, 5, 0, pack_runs((5, 0, 2)), 1)
    assert struct.unpack_from('<II', counts) == (most, most)
    _engine.add_runs(counts, 5, 0, pack_runs((5, 0, 2)), -1)
    assert struct.unpack_from('<II', counts) == (most, most)


@pytest.mark.parametrize('seed', range(4))
def test_how_slots_are_used(seed):
    rng = random.Random(seed)
    states = rng.choices((0, 1, 2, 3, 4, 7), k=300)
    counts = rng.choices((0, 0, 1, 1 << 31), k=300)
    lengths = rng.choices(range(1, 65536), k=300)
    entries = b''.join(
        struct.pack('<32sIIIB3x', b'f', 0, length, 0, state)
        for length, state in zip(lengths, states))
    used = [state in (1, 4, 7) for state in states]
    lost = next((slot for slot in range(300)
                 if counts[slot] and not used[slot]), None)
    unused = [slot for slot in range(200)
              if used[slot] and not counts[slot]]
    packed = array.array('I', counts).tobytes()
    assert _engine.slots_judge(entries, packed, 200) == (
        lost, sum(used), states.count(3),
        array.array('I', unused).tobytes(),
        # The length of an entry that does not verify may be any number.
        sum(lengths[slot] for slot in unused if states[slot] != 7))
    assert _engine.slots_judge(b'', b'', 200) == (None, 0, 0, b'', 0)
    for bad in ((entries[:-1], packed), (entries, packed[:-1]),
                (entries[:-48], packed)):
        with pytest.raises(ValueError):
            _engine.slots_judge(*bad, 200)


def test_arguments_of_the_functions_of_runs():
    good = pack_runs((1, 0, 1))
    for args, error in (
            ((bytearray(4095), 1, 0, good, 1), ValueError),
            ((bytearray(4096), 1, 0, good[:-1], 1), ValueError),
            ((bytearray(4096), 1, 0, good, 2), ValueError),
            ((bytearray(4096), 1, 0, good, 0), ValueError),
            ((bytes(4096), 1, 0, good, 1), TypeError)):
        with pytest.raises(error):
            _engine.add_runs(*args)
    for args in ((good[:-1], good), (good, good + b'x')):
        with pytest.raises(ValueError):
            _engine.shared_blocks(*args)
    for args in ((good[:-1], bytes(8)), (good, bytes(7))):
        with pytest.raises(ValueError):
            _engine.names_any(*args)
    # Hostile runs cause no access outside the buffer.
    hostile = pack_runs((1, 0xffffffff, 0xffffffff), (1, 0, 0xffffffff))
    counts = bytearray(4096)
    _engine.add_runs(counts, 1, 31, hostile, 1)
    _engine.add_runs(counts, 1, 0xffffffff, hostile, 1)
    assert _engine.shared_blocks(hostile, hostile) > 0


@pytest.mark.parametrize('seed', range(20))
def test_runs_against_sets(seed):
    rng = random.Random(seed)

    def some_runs():
        return [(rng.randrange(1, 4), rng.randrange(3000),
                 rng.randrange(1, 200)) for _ in range(rng.randrange(40))]

    def named(runs):
        return {group << 15 | slot + i for group, slot, blocks in runs
                for i in range(blocks)}

    a, b = some_runs(), some_runs()
    assert _engine.shared_blocks(pack_runs(*a), pack_runs(*b)) == len(
        named(a) & named(b))
    for _ in range(30):
        addresses = sorted(rng.randrange(1 << 15, 4 << 15)
                           for _ in range(rng.randrange(4)))
        assert _engine.names_any(
            pack_runs(*a), array.array('Q', addresses).tobytes()) == (
                not named(a).isdisjoint(addresses))
    for address in named(a):
        one = array.array('Q', [address]).tobytes()
        assert _engine.names_any(pack_runs(*a), one)
    for group in range(1, 4):
        for chunk in range(4):
            counts = bytearray(4096)
            _engine.add_runs(counts, group, chunk, pack_runs(*a), 1)
            wanted = collections.Counter(
                slot + i - 1024 * chunk for g, slot, blocks in a
                if g == group for i in range(blocks))
            assert array.array('I', bytes(counts)).tolist() == [
                wanted[i] for i in range(1024)]


@pytest.mark.parametrize('number', [1 << 32, (1 << 32) + 1, -1, 1 << 70])
def test_numbers_are_not_taken_modulo(repo, number):
    engine = _engine.Maintenance(repo.handle())
    for call in (
            lambda: _engine.verify_slots(repo.handle(), number, 0, 1),
            lambda: _engine.verify_slots(repo.handle(), 1, number, 1),
            lambda: _engine.verify_slots(repo.handle(), 1, 0, number),
            lambda: _engine.write_spares(engine, number, b''),
            lambda: _engine.index_records(b'', number, 0),
            lambda: _engine.index_records(bytes(48), number, 0),
            lambda: _engine.pick(b'', number, 0, b''),
            lambda: repo.handle().follow(number)):
        with pytest.raises(OverflowError):
            call()
