# SPDX-License-Identifier: Apache-2.0

"""The protocol of images: rules N3, N8, N9 and N11."""

import errno
import fcntl
import shutil
import threading
import time

import pytest

from glance_dedup.base import exceptions
from tests.functional import protocol
from tests.functional.protocol import is_coming
from tests.functional.protocol import is_made
from tests.functional.protocol import Once
from tests.functional.protocol import sha
from tests.functional.protocol import SHARE
from tests.functional.protocol import SIZE
from tests.functional.protocol import store
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all

witness = protocol.witness
path = protocol.path
coarse = protocol.coarse


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
    # The locks are released only then.
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
    repositories.require_clean(path)


def test_n8_3_link_that_succeeds_and_reports_an_error(witness, path):
    """A link that a network file system repeats: the image exists."""
    hook = Once(lambda c: is_made(c, 'linkat', 'spool/T-*'),
                lambda c: errno.EEXIST)
    run = witness.run(path, [['put', 'image', 1, SIZE], ['read', 'image']],
                      hook)
    assert hook.happened
    assert run.outcomes[0]['error'] is None
    assert run.outcomes[1]['sha256'] == sha(1)


def test_n8_3_the_name_is_taken_at_the_last_moment(witness, path):
    """I3, I11: an existing name is Duplicate, and keeps its content."""
    hook = Once(lambda c: is_coming(c, 'linkat', 'spool/T-*', 'images/image'),
                lambda c: store(path, ('image', 2)))
    run = witness.run(path, [['put', 'image', 1, SIZE], ['read', 'image']],
                      hook)
    assert hook.happened
    assert run.outcomes[0]['error'] == 'ImageExists'
    assert run.outcomes[1]['sha256'] == sha(2)
    assert len(repositories.spool(path)) == 1
    repositories.require_clean(path)


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
    """N8.6: the image stays if the caller aborts after commit() has raised."""
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
    repositories.require_clean(path)


# -- N11: readers -------------------------------------------------------------

def replace_image(path, lock=False):
    """Delete and upload again; return the file that locks the old one."""
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
    """If the opened recipe is no longer the image's, the reader reopens."""
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
    """The reader gives up after some attempts."""
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

def test_i12_reader_keeps_only_its_own_image(path):
    store(path, ('image', 1), ('other', 2))
    with open_repository(path) as repo:
        with repo.open_image('image') as image:
            image.read()
            # There is no group lock: the collector may work in the group.
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
