# SPDX-License-Identifier: Apache-2.0

"""Cold groups on a real object store: made, read, and read while it fails."""

from concurrent import futures
import contextlib
import dataclasses
import os
import secrets
import shutil
import threading

import pytest

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.objects import slice_cache
from glance_dedup.objects import slicefiles
from glance_dedup.repository import cold_settings
from glance_dedup.repository import prefix_owners
from tests.support import objects
from tests.support import repositories

pytest_plugins = ['tests.support.object_fixtures']

SLOTS = 1024
BLOCK = 4096
SIZE = SLOTS * BLOCK
# Seconds: much more than any read takes.
LIMIT = 300


@pytest.fixture
def place(server, proxy, tmp_path):
    """A location that no repository uses, and credentials for it."""
    return (objects.object_location.parse(
        f's3://{server.container}/{secrets.token_hex(8)}', proxy.url),
        server.credentials(tmp_path / 'credentials'))


@pytest.fixture
def content():
    return repositories.noise(SIZE, 1)


class Cold:
    """A repository whose first group is cold."""

    def __init__(self, path):
        self.path = path

    def open(self):
        return repositories.open_repository(self.path)

    def read(self):
        with self.open() as repo, repo.open_image('one') as image:
            return image.read(SIZE, 0)

    @property
    def slices(self):
        return self.path / 'slices' / self.object_id.hex()

    def forget(self):
        """Empty the cache."""
        shutil.rmtree(self.slices, ignore_errors=True)


@pytest.fixture
def cold(tmp_path, place, faults, content):
    made = Cold(repositories.create(tmp_path / 'r', group_slots=SLOTS,
                                    block_size=BLOCK))
    with made.open() as repo:
        repositories.put(repo, 'one', content)
        settings = prefix_owners.attach(repo, *place)
        store = cold_settings.connect(settings)
        with contextlib.closing(
                _engine.Maintenance(repo.handle())) as maintenance:
            assert maintenance.lock()
            cool(repo, maintenance, store, settings, made)
            facts = maintenance.group_facts(1)
        store.close()
    assert facts['is_cold'] and facts['object'] == made.object_id
    assert facts['size'] < SIZE // 20
    return made


def cool(repo, maintenance, store, settings, made):
    for is_last in (False, True):
        with contextlib.closing(maintenance.begin_cooling(1)) as rewriting:
            while not rewriting.step()[0]:
                pass
            made.object_id, made.length, name = rewriting.object()
            if not is_last:
                with pytest.raises(exceptions.InvalidParameter):
                    rewriting.exchange()        # it has its segments
                continue
            key = slice_cache.key_of(settings.owner, 1, made.object_id)
            with open(os.path.join(repo.path, name), 'rb') as file:
                assert store.put(key, file) == made.length
            rewriting.cut()
            rewriting.exchange()


def gets(faults):
    return [path for method, path in faults.seen if method == 'GET']


@pytest.mark.parametrize('is_open', [False, True])
def test_the_cache_was_removed(cold, content, is_open):
    """If the cache's directory was removed, it is made again."""
    with contextlib.ExitStack() as stack:
        if is_open:
            repo = stack.enter_context(cold.open())
            image = stack.enter_context(repo.open_image('one'))
        shutil.rmtree(cold.path / 'slices')
        if not is_open:
            repo = stack.enter_context(cold.open())
            image = stack.enter_context(repo.open_image('one'))
        assert image.read(SIZE, 0) == content
        repositories.put(repo, 'two', content)
    assert list(cold.slices.iterdir())
    repositories.require_clean(cold.path)


def test_each_slice_is_fetched_once(cold, faults, content):
    faults.seen.clear()
    assert cold.read() == content
    assert len(gets(faults)) == -(-cold.length // slice_cache.SLICE)
    assert cold.read() == content
    assert len(gets(faults)) == -(-cold.length // slice_cache.SLICE)


def test_one_request_serves_all_who_wait(cold, faults, content):
    faults.seen.clear()
    found = []
    with cold.open() as repo:
        def read():
            with repo.open_image('one') as image:
                found.append(image.read(SIZE, 0))

        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [content] * 6
    assert len(gets(faults)) == -(-cold.length // slice_cache.SLICE)


def test_an_image_is_read_after_its_repository_was_closed(cold, content):
    with cold.open() as repo:
        image = repo.open_image('one')
    with image:
        assert image.read(SIZE, 0) == content


def test_a_store_that_does_not_answer(cold, faults, content):
    faults.always = 503
    with pytest.raises(exceptions.UnavailableError, match='503'):
        cold.read()
    faults.always = None
    assert cold.read() == content


@pytest.mark.parametrize('threads', [1, 20])
def test_a_store_that_hangs(cold, faults, content, threads):
    """All readers together wait as long as the operator allows."""
    settings = cold_settings.read(cold.path)
    cold_settings.write(cold.path, dataclasses.replace(
        settings, options=cold_settings.Options(read_limit=1)))
    with (cold.open() as repo, repo.open_image('one') as image,
          futures.ThreadPoolExecutor(threads) as pool, faults.held()):
        for read in [pool.submit(image.read, SIZE, 0)
                     for _ in range(threads)]:
            with pytest.raises(
                    exceptions.UnavailableError,
                    match=f'{settings.location.url}: .* within 1 s'):
                read.result(LIMIT)
    cold_settings.write(cold.path, settings)
    assert cold.read() == content


def test_an_object_that_cannot_be_seen(cold, faults, content):
    faults.always = 404
    with pytest.raises(exceptions.UnavailableError):
        cold.read()
    faults.always = None
    assert cold.read() == content


def test_wrong_bytes_are_fetched_again(cold, faults, content):
    faults.plan('flip', methods=('GET',))
    with cold.open() as repo:
        repo.slices.fetch(1, cold.object_id, cold.length, 1, 1)
    faults.seen.clear()
    assert cold.read() == content
    assert gets(faults)


def test_an_object_of_wrong_bytes_is_damage(cold, faults):
    faults.always = 'flip'
    with pytest.raises(exceptions.DamagedError, match='groups/00000001'):
        cold.read()


def test_the_cache_stays_within_its_budget(cold, content, monkeypatch):
    monkeypatch.setattr(slice_cache, 'PARALLEL', 1)
    settings = cold_settings.read(cold.path)
    cold_settings.write(cold.path, dataclasses.replace(
        settings, options=cold_settings.Options(cache_mib=1)))
    for _ in range(2):
        assert cold.read() == content
        used = sum(map(os.path.getsize, cold.slices.iterdir()))
        assert 0 < used <= 2 * slice_cache.SLICE


def test_what_a_killed_process_left_goes_first(cold, content):
    assert cold.read() == content
    left = cold.slices / f'00000000.{"a" * 16}'
    with open(left, 'wb') as f:
        f.truncate(4 << 30)
    os.utime(left, (1, 1))
    (cold.slices / '00000000').unlink()
    with cold.open() as repo:
        repo.slices.fetch(1, bytes(16), 1, 1, 1)    # no such object
        repo.slices.fetch(1, cold.object_id, cold.length, 0, 1)
    assert not left.exists()
    assert cold.read() == content


@pytest.mark.parametrize('times, is_read', [(1, True), (5, True), (50, False)])
def test_a_directory_that_is_evicted(cold, content, monkeypatch, times,
                                     is_read):
    """The directory is removed when a slice is about to be written."""
    make_file, left = slicefiles.access.make_file, [times]

    def is_gone(directory):
        # Another slice may come into it while it is removed.
        shutil.rmtree(directory, ignore_errors=True)
        return not os.path.exists(directory)

    def evict(path, mode):
        if left[0]:
            left[0] -= 1
            repositories.eventually(lambda: is_gone(os.path.dirname(path)))
        return make_file(path, mode)

    monkeypatch.setattr(slicefiles.access, 'make_file', evict)
    cold.forget()
    if is_read:
        assert cold.read() == content and not left[0]
        return
    with cold.open() as repo, pytest.raises(
            exceptions.StorageError, match='cannot write'):
        repo.slices.fetch(1, cold.object_id, cold.length, 1, 1)


def test_a_cache_on_a_disk_that_others_have_filled(
        cold, content, monkeypatch):
    """Older slices make room for the slice that is read now."""
    make, full = slicefiles.access.make_file, []

    def filled(path, mode):
        if len(list(cold.slices.iterdir())) > 1:
            full.append(path)
            raise OSError(28, 'No space left on device')
        return make(path, mode)

    monkeypatch.setattr(slice_cache, 'PARALLEL', 1)
    with cold.open() as repo:
        for number in range(4):
            repo.slices.fetch(1, cold.object_id, cold.length, number, 1)
            monkeypatch.setattr(slicefiles.access, 'make_file', filled)
    assert full and len(list(cold.slices.iterdir())) < 4


def test_a_full_disk(cold, monkeypatch):
    def full(*arguments):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(slicefiles.access, 'make_file', full)
    with pytest.raises(exceptions.NoSpaceError, match='cannot write'):
        cold.read()


def test_a_group_shares_slices(cold, content):
    cold.path.chmod(0o2770)
    assert cold.read() == content
    assert cold.slices.stat().st_mode & 0o7777 == 0o2770
    assert all(path.stat().st_mode & 0o777 == 0o660
               for path in cold.slices.iterdir())


@pytest.mark.parametrize('raised', [
    ValueError('\x00\ud800'), KeyboardInterrupt(), exceptions.StorageError(),
    TypeError])
def test_what_else_the_source_may_raise(cold, raised):
    """Other errors of the source count neither as loss nor as damage."""
    def fail(*arguments):
        raise raised

    with cold.open() as repo, repo.open_image('one') as image:
        repo.slices.fetch = repo.slices.expect = fail
        with pytest.raises(exceptions.UnavailableError):
            image.read(SIZE, 0)


def test_an_object_of_another_owner(cold, content):
    """The image reads back after a restoring added an owner."""
    settings = cold_settings.read(cold.path)
    cold_settings.write(cold.path, dataclasses.replace(
        settings, owners=('0' * 32, '1' * 32, settings.owner)))
    assert cold.read() == content


def test_who_is_not_attached(cold):
    (cold.path / 'cold.json').unlink()
    with pytest.raises(exceptions.UnavailableError,
                       match='object-store attach'):
        cold.read()


def test_credentials_that_are_gone(cold, content):
    settings = cold_settings.read(cold.path)
    os.rename(settings.credentials, settings.credentials + '.away')
    with pytest.raises(exceptions.UnavailableError, match='credentials'):
        cold.read()
    os.rename(settings.credentials + '.away', settings.credentials)
    assert cold.read() == content


# -- attaching ----------------------------------------------------------------

def test_attaching_again_changes_the_cache(cold, place):
    before = cold_settings.read(cold.path)
    with cold.open() as repo:
        options = cold_settings.Options(cache_mib=7, read_limit=8)
        after = prefix_owners.attach(repo, *place, options)
    assert after == dataclasses.replace(before, options=options)
    assert cold_settings.read(cold.path) == after
    assert cold_settings.read(cold.path) == after


def test_attaching_elsewhere_needs_that_nothing_is_cold(cold, place):
    other = dataclasses.replace(place[0], prefix='elsewhere')
    with cold.open() as repo, pytest.raises(
            exceptions.InvalidParameter, match='cold groups'):
        prefix_owners.attach(repo, other, place[1])


def test_two_repositories_under_one_prefix(cold, place, tmp_path):
    other = repositories.create(tmp_path / 'other')
    with repositories.open_repository(other) as repo, pytest.raises(
            exceptions.InvalidParameter, match='another repository'):
        prefix_owners.attach(repo, *place)
    assert cold_settings.read(other) is None


def test_a_copy_of_the_directory(cold, place, tmp_path, content):
    """A copy of the directory can be read, and writes no object."""
    copy = Cold(tmp_path / 'copy')
    shutil.copytree(cold.path, copy.path)
    copy.object_id = cold.object_id
    assert copy.read() == content
    with copy.open() as repo:
        settings = cold_settings.read(copy.path)
        with cold_settings.connect(settings) as store, pytest.raises(
                exceptions.InvalidParameter, match='is a copy'):
            prefix_owners.require_claim(repo, settings, store)
        with pytest.raises(exceptions.InvalidParameter, match='cold groups'):
            prefix_owners.attach(repo, *place)


def test_attaching_while_there_is_a_maintainer(place, tmp_path):
    path = repositories.create(tmp_path / 'maintained')
    with repositories.open_repository(path) as repo, contextlib.closing(
            _engine.Maintenance(repo.handle())) as maintenance:
        assert maintenance.lock()
        with pytest.raises(exceptions.BusyError, match='stop dedupd'):
            prefix_owners.attach(repo, *place)


def test_wrong_credentials(place, tmp_path):
    path = repositories.create(tmp_path / 'r')
    wrong = objects.write_s3(tmp_path / 'wrong', 'nobody', 'nothing')
    with repositories.open_repository(path) as repo, pytest.raises(
            exceptions.UnavailableError):
        prefix_owners.attach(repo, place[0], wrong)
    assert cold_settings.read(path) is None


@pytest.mark.parametrize('bad', [
    b'', b'{', b'{"kind": "glance-dedup object store"}', b'x' * 70000,
    b'[' * 60000])
def test_a_damaged_description(cold, bad):
    (cold.path / 'cold.json').write_bytes(bad)
    with pytest.raises(exceptions.DamagedError, match='cold.json is damaged'):
        cold_settings.read(cold.path)


@pytest.mark.parametrize('change', [
    {'owners': []}, {'owners': ['x']}, {'owners': ['0' * 32] * 65},
    {'owners': 7}, {'cache_mib': 0}, {'cache_mib': '1'},
    {'read_limit': 0}, {'read_limit': '1'}, {'read_limit': 3601},
    {'credentials': 'relative'}, {'credentials': 7}, {'inode': '7'},
    {'location': {}}, {'location': None}])
def test_a_description_of_wrong_values(cold, change):
    fields = dataclasses.asdict(cold_settings.read(cold.path))
    fields |= {**fields.pop('options'), **change}
    (cold.path / 'cold.json').write_bytes(
        files.pack_json('glance-dedup object store', **fields))
    with pytest.raises(exceptions.DamagedError, match='cold.json is damaged'):
        cold_settings.read(cold.path)
