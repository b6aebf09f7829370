# SPDX-License-Identifier: Apache-2.0

"""Cold groups on a real object store: made, read, and read while it fails."""

import contextlib
import os
import threading

import pytest

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.objects import slices as slices_module
from glance_dedup.objects import store as store_module
from tests.support import objects
from tests.support import repositories

pytest_plugins = ['tests.support.object_fixtures']

SLOTS = 1024
BLOCK = 4096
SIZE = SLOTS * BLOCK
OWNER = 'tests/owner'


@pytest.fixture
def store(server, proxy, faults, tmp_path):
    location = objects.location_module.parse(
        f's3://{server.container}/{OWNER}', proxy.url)
    with store_module.ObjectStore(
            location, server.credentials(tmp_path / 'credentials')) as opened:
        yield opened


@pytest.fixture
def content():
    return repositories.noise(SIZE, 1)


class Cold:
    """A repository whose first group is cold."""

    def __init__(self, path, store, budget=1 << 30):
        self.path = path
        self.slices = slices_module.Slices(
            str(path.parent / f'{path.name}-slices'), budget, lambda: store,
            OWNER)

    @contextlib.contextmanager
    def engine(self):
        with repositories.open_repository(self.path) as repo:
            chosen = repo.parameters
            engine = _engine.Repository(
                os.fsencode(self.path), major=4,
                repository_id=bytes.fromhex(chosen.repository_id),
                block_size=chosen.block_size, group_slots=chosen.group_slots,
                segment_size=chosen.segment_size,
                fingerprint=chosen.fingerprint, by_value=False, codec='lz4',
                codec_level=0, threads=2, lock_timeout_ms=1000,
                slice_dir=os.fsencode(self.slices.directory),
                slice_source=self.slices)
            try:
                yield engine
            finally:
                engine.close()

    def read(self):
        with self.engine() as engine:
            image = engine.open_image('one')
            try:
                return image.read(SIZE, 0)
            finally:
                image.close()


@pytest.fixture
def cold(tmp_path, store, content):
    path = repositories.create(tmp_path / 'r', group_slots=SLOTS,
                               block_size=BLOCK, similar=True)
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'one', content)
    made = Cold(path, store)
    with made.engine() as engine, contextlib.closing(
            _engine.Maintenance(engine)) as maintenance:
        assert maintenance.lock()
        rewriting = maintenance.begin_cooling(1)
        while not rewriting.step()[0]:
            pass
        object_id, length, name = rewriting.object()
        with pytest.raises(exceptions.InvalidParameter):
            rewriting.exchange()        # it still has its segments
        rewriting.close()

        rewriting = maintenance.begin_cooling(1)
        while not rewriting.step()[0]:
            pass
        object_id, length, name = rewriting.object()
        key = slices_module.key_of(OWNER, 1, object_id)
        with open(path / name, 'rb') as file:
            assert store.put(key, file) == length
        rewriting.cut()
        rewriting.exchange()
        rewriting.close()
        facts = maintenance.group_facts(1)
        assert facts['is_cold'] and facts['object'] == object_id
        assert facts['size'] < SIZE // 20
        made.key, made.object_id, made.length = key, object_id, length
    yield made
    made.slices.close()


def gets(faults):
    return [path for method, path in faults.seen if method == 'GET']


def test_each_slice_is_fetched_once(cold, faults, content):
    faults.seen.clear()
    assert cold.read() == content
    assert len(gets(faults)) == -(-cold.length // slices_module.SLICE)
    assert cold.read() == content
    assert len(gets(faults)) == -(-cold.length // slices_module.SLICE)


def test_one_request_serves_all_who_wait(cold, faults, content):
    faults.seen.clear()
    found = []
    with cold.engine() as engine:
        def read():
            image = engine.open_image('one')
            found.append(image.read(SIZE, 0))
            image.close()

        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [content] * 6
    assert len(gets(faults)) == -(-cold.length // slices_module.SLICE)


def test_a_store_that_does_not_answer(cold, faults, content):
    faults.always = 503
    with pytest.raises(exceptions.UnavailableError, match='503'):
        cold.read()
    faults.always = None
    assert cold.read() == content


def test_an_object_that_cannot_be_seen(cold, faults, content):
    faults.always = 404
    with pytest.raises(exceptions.UnavailableError):
        cold.read()
    faults.always = None
    assert cold.read() == content


def test_wrong_bytes_are_fetched_again(cold, faults, content):
    faults.plan('flip', methods=('GET',))
    cold.slices.fetch(1, cold.object_id, cold.length, 1, 1)
    faults.seen.clear()
    assert cold.read() == content
    assert gets(faults)


def test_an_object_of_wrong_bytes_is_damage(cold, faults):
    faults.always = 'flip'
    with pytest.raises(exceptions.DamagedError, match='groups/00000001'):
        cold.read()


def test_the_cache_stays_within_its_budget(cold, store, content, monkeypatch):
    monkeypatch.setattr(slices_module, 'PARALLEL', 1)
    small = Cold(cold.path, store, 0)
    small.slices.directory = str(cold.path.parent / 'small')
    os.mkdir(small.slices.directory)
    for _ in range(2):
        assert small.read() == content
        used = sum(os.path.getsize(os.path.join(directory, name))
                   for directory, _, names in os.walk(small.slices.directory)
                   for name in names)
        assert 0 < used <= small.slices.budget == 2 * slices_module.SLICE
    small.slices.close()


def test_what_a_killed_process_left_goes_first(cold, content):
    assert cold.read() == content
    directory = os.path.join(cold.slices.directory, cold.object_id.hex())
    left = os.path.join(directory, f'00000000.{"a" * 16}')
    with open(left, 'wb') as f:
        f.truncate(1 << 30)
    os.utime(left, (1, 1))
    other = slices_module.Slices(
        cold.slices.directory, 64 << 20, cold.slices._open_store, OWNER)
    other.fetch(1, bytes(16), 1, 1, 1)      # nothing of such an object
    os.unlink(os.path.join(directory, '00000000'))
    other.fetch(1, cold.object_id, cold.length, 0, 1)
    assert not os.path.exists(left)
    other.close()
    assert cold.read() == content


def test_a_full_disk(cold, monkeypatch):
    def full(*arguments):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(slices_module.access, 'make_file', full)
    with pytest.raises(exceptions.NoSpaceError, match='cannot write'):
        cold.read()


def test_a_directory_of_somebody_else(tmp_path):
    theirs = tmp_path / 'theirs'
    theirs.mkdir(mode=0o777)
    theirs.chmod(0o777)
    link = tmp_path / 'link'
    link.symlink_to(tmp_path)
    for bad in (theirs, link):
        with pytest.raises(exceptions.AccessDenied, match=bad.name):
            slices_module.Slices(str(bad), 0, None, OWNER)


@pytest.mark.parametrize('raised', [
    ValueError('\x00\ud800'), KeyboardInterrupt(), exceptions.StorageError(),
    TypeError])
def test_what_else_the_source_may_raise(cold, raised):
    """It cannot have lost or damaged anything."""
    def fail(*arguments):
        raise raised

    cold.slices.fetch = fail
    cold.slices.expect = fail
    with pytest.raises(exceptions.UnavailableError):
        cold.read()
