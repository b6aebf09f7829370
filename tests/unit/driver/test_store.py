# SPDX-License-Identifier: Apache-2.0

"""The store, through glance_store's own multi-backend interface."""

import contextlib
import errno
import gc
import hashlib
import io
import os
import random
import signal
import socket
import threading
import time
import types

import glance_store
from glance_store import exceptions
from glance_store import location as glance_location
from glance_store import multi_backend
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies
from oslo_config import cfg
from oslo_config import fixture as config_fixture
import pytest

from glance_dedup.base import exceptions as dedup_exceptions
from glance_dedup.base import filesystem
from glance_dedup.base import locations
from glance_dedup.driver import store as dedup_store
from glance_dedup.driver import upload
from glance_dedup.repository import repository

CONF = cfg.CONF
MIB = 1 << 20

ALICE = types.SimpleNamespace(project_id='alice', is_admin=False)
BOB = types.SimpleNamespace(project_id='bob', is_admin=False)
ADMIN = types.SimpleNamespace(project_id='ops', is_admin=True)

HASHES = sorted(name for name in hashlib.algorithms_available
                if not name.startswith('shake'))


def noise(length, seed=1):
    return random.Random(seed).randbytes(length)


@pytest.fixture
def configure(tmp_path):
    """A function that sets up stores: ``configure(one={...}, two={...})``."""
    saved = dict(glance_location.SCHEME_TO_CLS_BACKEND_MAP)
    config = config_fixture.Config(CONF)
    config.setUp()
    with contextlib.suppress(cfg.DuplicateOptError):
        CONF.register_opt(cfg.DictOpt('enabled_backends'))

    def _configure(**groups):
        glance_location.SCHEME_TO_CLS_BACKEND_MAP.clear()
        config.config(enabled_backends={
            group: values.pop('type', 'dedup')
            for group, values in groups.items()})
        glance_store.register_store_opts(CONF)
        config.config(group='glance_store', default_backend=next(iter(groups)))
        for group, values in groups.items():
            if CONF.enabled_backends[group] == 'dedup':
                values.setdefault('dedup_store_datadir', tmp_path / group)
                values.setdefault('dedup_store_filter_dir', tmp_path)
                values.setdefault('dedup_store_filter_mib', 1)
            for name, value in values.items():
                if value is ...:  # as the configuration file has it
                    continue
                value = str(value) if isinstance(value, os.PathLike) else value
                config.config(group=group, **{name: value})
        glance_store.create_multi_stores(CONF)
        found = [multi_backend.get_store_from_store_identifier(group)
                 for group in groups]
        return found[0] if len(found) == 1 else found

    yield _configure
    config.cleanUp()
    glance_location.SCHEME_TO_CLS_BACKEND_MAP.clear()
    glance_location.SCHEME_TO_CLS_BACKEND_MAP.update(saved)


@pytest.fixture
def store(configure):
    return configure(one={})


def add(data, image_id='image', size=None, backend='one', algo='sha512',
        context=None, verifier=None):
    source = io.BytesIO(data) if isinstance(data, bytes) else data
    if size is None:
        size = len(data) if isinstance(data, bytes) else 0
    return glance_store.add_with_multihash(
        CONF, image_id, source, size, backend, algo, context=context,
        verifier=verifier)


def get(url, backend='one', **kwargs):
    download, size = glance_store.get(url, backend, **kwargs)
    data = b''.join(download)
    assert len(data) == size
    return data


def get_size(url, backend='one'):
    return glance_store.get_size_from_uri_and_backend(url, backend)


def delete(url, backend='one', context=None):
    glance_store.delete(url, backend, context=context)


def repo(store):
    return store._repository


def assert_nothing_left(store, image_id='image'):
    """No image, no transaction: the same id can be stored again."""
    assert repo(store).images() == []
    assert os.listdir(os.path.join(repo(store).path, 'spool')) == []
    url = add(b'again', image_id)[0]
    assert get(url) == b'again'
    delete(url)


# -- Round trips -----------------------------------------------------------


@pytest.mark.parametrize('known', [True, False])
@pytest.mark.parametrize('length', [
    0, 1, 4095, 4096, 4097, 65536, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1,
    9 * MIB + 5])
def test_round_trip(store, length, known):
    data = noise(length)
    url, size, md5, multihash, metadata = add(
        data, size=length if known else 0)
    assert size == length
    assert md5 == hashlib.md5(data).hexdigest()
    assert multihash == hashlib.sha512(data).hexdigest()
    assert metadata == {'store': 'one'}
    assert get_size(url) == length
    assert get(url) == data
    delete(url)
    with pytest.raises(exceptions.NotFound):
        glance_store.get(url, 'one')
    assert repo(store).images() == []


def test_zeros_and_duplicates(store):
    data = bytes(3 * MIB) + noise(MIB) * 3
    first, second = add(data, 'a')[0], add(data, 'b')[0]
    assert first != second
    delete(first)
    assert get(second) == data


def test_four_values_for_callers_that_know_no_multihash(store):
    url, size, md5, metadata = store.add('image', io.BytesIO(b'abc'), 3)
    assert (size, md5) == (3, hashlib.md5(b'abc').hexdigest())
    assert metadata == {'store': 'one'}
    assert get(url) == b'abc'


@pytest.mark.parametrize('algo', HASHES)
def test_any_hash_of_hashlib(store, algo):
    data = noise(10000)
    _url, _size, md5, multihash, _metadata = add(data, algo=algo)
    assert multihash == hashlib.new(algo, data).hexdigest()
    assert md5 == hashlib.md5(data).hexdigest()


@pytest.mark.parametrize('algo', ['shake_128', 'shake_256', 'sha0'])
def test_a_hash_without_a_value_is_refused_before_reading(store, algo):
    class Source:
        def read(self, length):
            raise AssertionError('read')

    with pytest.raises(exceptions.UnknownHashingAlgo):
        store.add('image', Source(), 0, algo)
    assert_nothing_left(store)


class Dribble:
    """Returns fewer bytes than asked for."""

    def __init__(self, data, most):
        self.data = io.BytesIO(data)
        self.random = random.Random(7)
        self.most = most

    def read(self, length):
        return self.data.read(min(length, self.random.randint(1, self.most)))


@pytest.mark.parametrize('most', [3, 5000, 70000, 3 * MIB])
def test_short_reads(store, most):
    data = noise(min(5 * MIB, most * 3000))
    url, size, md5, _multihash, _metadata = add(Dribble(data, most))
    assert (size, md5) == (len(data), hashlib.md5(data).hexdigest())
    assert get(url) == data


def test_an_iterator_instead_of_a_file(store):
    data = noise(100000)
    url = add(iter([data[:7], data[7:50000], data[50000:]]))[0]
    assert get(url) == data


def test_a_source_that_reuses_its_buffer(store):
    data = noise(12 * MIB)

    class Source:
        buffer = bytearray(3 * MIB)
        position = 0

        def read(self, length):
            if self.position == len(data):
                return b''
            self.buffer[:] = data[self.position:self.position + 3 * MIB]
            self.position += len(self.buffer)
            return memoryview(self.buffer)

    url, _size, md5, _multihash, _metadata = add(Source())
    assert md5 == hashlib.md5(data).hexdigest()
    assert get(url) == data


class Verifier:
    def __init__(self, fail_at=None):
        self.seen = []
        self.fail_at = fail_at

    def update(self, data):
        if len(self.seen) == self.fail_at:
            raise ArithmeticError('verifier')
        self.seen.append(bytes(data))


class Mixed(Dribble):
    """Long reads among short ones."""

    def read(self, length):
        return self.data.read(min(length, self.random.choice(
            (1, 511, 70000, self.most, length))))


@pytest.mark.parametrize('source', [
    lambda data: io.BytesIO(data), lambda data: Dribble(data, 700),
    lambda data: Dribble(data, 2 * MIB), lambda data: Mixed(data, 3 * MIB)],
    ids=['long', 'short', 'middling', 'mixed'])
def test_the_verifier_sees_every_byte(store, source):
    """In order, once, and never two pieces at a time."""
    data = noise(5 * MIB + 3)
    under_way = threading.Lock()
    seen = []

    def update(piece):
        assert under_way.acquire(blocking=False)
        time.sleep(0.001)   # the pieces behind are there meanwhile
        seen.append(bytes(piece))
        under_way.release()
    url, size, *_more = add(
        source(data), verifier=types.SimpleNamespace(update=update))
    assert sum(map(len, seen)) == size == len(data)
    assert b''.join(seen) == data == get(url)


def test_a_verifier_may_keep_what_it_sees(store):
    data = noise(30 * MIB)
    seen = []
    add(Dribble(data, 65536),
        verifier=types.SimpleNamespace(update=seen.append))
    assert {type(piece) for piece in seen} == {bytes}
    assert b''.join(seen) == data


def test_a_verifier_that_raises(store):
    with pytest.raises(ArithmeticError):
        add(noise(11 * MIB), verifier=Verifier(fail_at=1))
    assert_nothing_left(store)


# -- Uploads that fail -----------------------------------------------------


@pytest.mark.parametrize('said,there', [
    (1, 2), (2, 1), (5 * MIB, 5 * MIB + 1), (5 * MIB + 1, 5 * MIB),
    (1, 9 * MIB), (9 * MIB, 1), (1, 0)])
def test_wrong_size(store, said, there):
    with pytest.raises(exceptions.Invalid) as caught:
        add(noise(there), size=said)
    assert str(said) in str(caught.value)
    assert_nothing_left(store)


def test_too_long_a_stream_is_not_read_to_its_end(store):
    class Endless:
        served = 0

        def read(self, length):
            self.served += length
            assert self.served < 100 * MIB
            return bytes(length)

    source = Endless()
    with pytest.raises(exceptions.Invalid):
        add(source, size=1000)
    assert source.served <= 2 * upload.PIECE


class Interrupt(BaseException):
    """Like KeyboardInterrupt, SystemExit, GreenletExit."""


@pytest.mark.parametrize('error', [
    OSError('gone'), ValueError('bad'), KeyboardInterrupt(), SystemExit(1),
    GeneratorExit(), Interrupt(), exceptions.StorageFull(),
    TimeoutError('a system call'), MemoryError()])
@pytest.mark.parametrize('after', [0, 1, 9 * MIB])
def test_a_source_that_raises(store, error, after):
    class Source:
        data = io.BytesIO(noise(after))

        def read(self, length):
            data = self.data.read(length)
            if not data:
                raise error
            return data

    with pytest.raises(type(error)) as caught:
        add(Source())
    assert caught.value is error
    assert_nothing_left(store)


def test_duplicate(store):
    url = add(b'one')[0]
    with pytest.raises(exceptions.Duplicate):
        add(b'two')
    assert get(url) == b'one'
    assert os.listdir(os.path.join(repo(store).path, 'spool')) in (
        [], [f'T-{repo(store).stat("image").upload_id}'])


def test_one_of_two_uploads_of_an_id_wins(store):
    barrier = threading.Barrier(2)
    results = {}

    class Source:
        def __init__(self, data):
            self.data = io.BytesIO(data)

        def read(self, length):
            data = self.data.read(length)
            if not data:
                barrier.wait(10)
            return data

    def run(name):
        try:
            results[name] = add(Source(name * 1000))[0]
        except exceptions.Duplicate as exc:
            results[name] = exc

    threads = [threading.Thread(target=run, args=(name,))
               for name in (b'a', b'b')]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [name for name in results if isinstance(results[name], str)]
    assert sum(isinstance(result, exceptions.Duplicate)
               for result in results.values()) == 1
    assert get(results[winner]) == winner * 1000


@pytest.mark.parametrize('image_id', [
    '', '..', 'a/b', '../x', 'a.b', 'a\0b', 'x' * 129, 'x' * 300, '\u56fe',
    'a b', 'a%2fb', 'a?b', 'a#b', '\n'])
def test_image_ids_that_are_none(store, image_id):
    with pytest.raises(exceptions.Invalid):
        add(b'data', image_id)
    assert repo(store).images() == []


UPLOAD_ERRORS = [
    (dedup_exceptions.NoSpaceError, exceptions.StorageFull),
    (dedup_exceptions.AccessDenied, exceptions.StorageWriteDenied),
    (dedup_exceptions.StorageError, exceptions.StorageWriteDenied),
    (dedup_exceptions.DamagedError, exceptions.StorageWriteDenied),
    (dedup_exceptions.VersionError, exceptions.StorageWriteDenied),
    (dedup_exceptions.ImageExists, exceptions.Duplicate),
    (dedup_exceptions.InvalidParameter, exceptions.Invalid),
    (dedup_exceptions.BusyError, exceptions.TimeoutError),
    (MemoryError, MemoryError),
]


@pytest.mark.parametrize('raised,expected', UPLOAD_ERRORS)
@pytest.mark.parametrize('call,after', [
    ('begin', 0), ('write', 0), ('write', 1), ('write', 5), ('commit', 0)])
def test_repository_errors_of_uploads(store, monkeypatch, raised, expected,
                                      call, after):
    real = repo(store)
    calls = iter(range(1000))

    def fail(*args, **kwargs):
        raise raised('words')

    def begin(*args):
        if call == 'begin':
            fail()
        transaction = real.begin(*args)
        write = transaction.write

        def write_some(data):
            if call == 'write' and next(calls) == after:
                fail()
            return write(data)

        return types.SimpleNamespace(
            write=write_some, abort=transaction.abort,
            commit=fail if call == 'commit' else transaction.commit,
            upload_id=transaction.upload_id,
            set_hash=transaction.set_hash)

    with monkeypatch.context() as patch:
        patch.setattr(store, '_repository', types.SimpleNamespace(
            begin=begin, delete=real.delete))
        with pytest.raises(expected) as caught:
            add(noise(30 * MIB) if call == 'write' else b'abc')
    if expected is exceptions.Duplicate:
        assert 'image' in str(caught.value)
    else:
        assert 'words' in str(caught.value)
    assert_nothing_left(store)


def test_a_failing_engine_stops_the_upload_promptly(store, monkeypatch):
    real = repo(store)

    def begin(*args):
        transaction = real.begin(*args)

        def write(data):
            raise dedup_exceptions.NoSpaceError('full')

        return types.SimpleNamespace(
            write=write, abort=transaction.abort, commit=None,
            upload_id=transaction.upload_id,
            set_hash=transaction.set_hash)

    class Endless:
        reads = 0

        def read(self, length):
            self.reads += 1
            time.sleep(0.1)
            return bytes(length)

    monkeypatch.setattr(store, '_repository', types.SimpleNamespace(
        begin=begin, delete=real.delete))
    source = Endless()
    with pytest.raises(exceptions.StorageFull):
        add(source)
    assert source.reads < upload.DEPTH


def test_a_commit_that_fails_when_the_image_is_there(store, monkeypatch):
    """Its client is told that it failed, so it must not stay."""
    real = repo(store)

    def begin(*args):
        transaction = real.begin(*args)

        def commit():
            transaction.commit()
            raise dedup_exceptions.StorageError('EIO')

        return types.SimpleNamespace(
            write=transaction.write, abort=transaction.abort, commit=commit,
            upload_id=transaction.upload_id,
            set_hash=transaction.set_hash)

    with monkeypatch.context() as patch:
        patch.setattr(store, '_repository', types.SimpleNamespace(
            begin=begin, delete=real.delete))
        with pytest.raises(exceptions.StorageWriteDenied):
            add(b'data')
    assert real.images() == []
    assert get(add(b'again')[0]) == b'again'


def test_memory_is_bounded_by_back_pressure(store, monkeypatch):
    """However slow the engine is, the reader does not run ahead of it."""
    real = repo(store)
    written = [0]
    ahead = []

    def begin(*args):
        transaction = real.begin(*args)

        def write(data):
            time.sleep(0.005)
            written[0] += len(data)

        return types.SimpleNamespace(
            write=write, abort=transaction.abort, commit=transaction.abort,
            upload_id=transaction.upload_id,
            set_hash=transaction.set_hash)

    class Source:
        served = 0

        def read(self, length):
            if self.served >= 200 * MIB:
                return b''
            ahead.append(self.served - written[0])
            self.served += length
            return bytes(length)

    monkeypatch.setattr(store, '_repository', types.SimpleNamespace(
        begin=begin, repository_id=real.repository_id, key=real.key))
    add(Source())
    assert max(ahead) <= upload.DEPTH * upload.PIECE


def test_hashes_and_engine_run_beside_each_other(store, monkeypatch):
    """An upload takes as long as its slowest part, not as their sum."""
    real = repo(store)
    verifier = types.SimpleNamespace(update=lambda data: time.sleep(0.1))

    def begin(*args):
        transaction = real.begin(*args)
        return types.SimpleNamespace(
            write=lambda data: time.sleep(0.1), abort=transaction.abort,
            commit=transaction.abort, upload_id=transaction.upload_id,
            set_hash=transaction.set_hash)

    class Source:
        left = 10

        def read(self, length):
            time.sleep(0.1)
            self.left -= 1
            return bytes(length) if self.left >= 0 else b''

    monkeypatch.setattr(store, '_repository', types.SimpleNamespace(
        begin=begin, repository_id=real.repository_id, key=real.key))
    begun = time.monotonic()
    add(Source(), verifier=verifier)
    assert time.monotonic() - begun < 2.2  # in series it takes 3.1


# -- Ranges and downloads --------------------------------------------------


def test_ranges(store):
    data = noise(9 * MIB + 123)
    url = add(data)[0]

    @settings(max_examples=60, deadline=None)
    @given(strategies.integers(0, len(data) + 10),
           strategies.none() | strategies.integers(0, len(data) + 10))
    def check(offset, length):
        end = None if length is None else offset + length
        assert get(url, offset=offset, chunk_size=length) == data[offset:end]

    check()
    assert get(url, offset=4 * MIB - 1, chunk_size=2) == (
        data[4 * MIB - 1:4 * MIB + 1])
    assert get(url, offset=len(data) - 1) == data[-1:]
    assert get(url, chunk_size=0) == b''


def test_an_empty_download_is_true(store):
    """Glance's search through all stores drops what is false."""
    download, size = glance_store.get(add(b'')[0], 'one')
    assert size == 0
    assert download
    assert list(download) == []


def test_pieces_are_bytes(store):
    """A WSGI server takes nothing else."""
    download, _size = glance_store.get(add(noise(5 * MIB))[0], 'one')
    assert {type(piece) for piece in download} == {bytes}


def open_files(path):
    """How many of this process's descriptors are below a path."""
    count = 0
    for number in os.listdir('/proc/self/fd'):
        with contextlib.suppress(OSError):
            count += os.readlink(f'/proc/self/fd/{number}').startswith(
                os.path.join(path, 'images'))
    return count


@pytest.mark.parametrize('way', [
    'not begun', 'closed unread', 'begun', 'closed', 'generator closed',
    'read out'])
def test_a_download_leaves_nothing_open(store, way):
    url = add(noise(9 * MIB))[0]
    path = os.path.realpath(repo(store).path)
    gc.collect()
    before = open_files(path)
    download, _size = glance_store.get(url, 'one')
    if way == 'closed unread':
        download.close()
    elif way != 'not begun':
        pieces = iter(download)
        next(pieces)
        if way == 'closed':
            download.close()
            assert list(pieces) == []
        elif way == 'generator closed':
            pieces.close()
        elif way == 'read out':
            for _piece in pieces:
                pass
        del pieces
    if 'closed' in way or way == 'read out':
        assert open_files(path) == before
        download.close()
    del download
    gc.collect()
    assert open_files(path) == before


def test_a_slow_reader_keeps_a_deleted_image(store):
    data = noise(9 * MIB)
    url = add(data)[0]
    download, _size = glance_store.get(url, 'one')
    pieces = iter(download)
    got = next(pieces)
    delete(url)
    assert got + b''.join(pieces) == data


# -- Damage ----------------------------------------------------------------


def damage(store, where):
    """Flip a bit of every group, at a part of the file's length."""
    groups = os.path.join(repo(store).path, 'groups')
    for name in os.listdir(groups):
        with open(os.path.join(groups, name), 'r+b') as group:
            place = int(group.seek(0, os.SEEK_END) * where)
            group.seek(place)
            byte = group.read(1)[0]
            group.seek(place)
            group.write(bytes([byte ^ 0x10]))


def read_all(download):
    got = b''
    with pytest.raises(exceptions.RemoteServiceUnavailable):
        for piece in download:
            got += piece
    return got


def test_the_codec_yields_where_told_to(configure):
    assert repo(configure(one={}))._options['codec_yields'] is False
    store = configure(one={'dedup_store_codec_yields': True})
    assert repo(store)._options['codec_yields'] is True


def test_beside_the_page_cache_where_told_to(configure):
    assert repo(configure(one={}))._options['direct_io'] is False
    store = configure(one={'dedup_store_direct_io': True})
    assert repo(store)._options['direct_io'] is True
    data = noise(3 * MIB + 77)
    assert b''.join(glance_store.get(add(data)[0], 'one')[0]) == data


def test_threads_are_those_of_the_machine_unless_told_otherwise(configure):
    wanted = min(4, len(os.sched_getaffinity(0)))
    assert repo(configure(one={}))._options['threads'] == wanted
    store = configure(one={'dedup_store_threads': 7})
    assert repo(store)._options['threads'] == 7


@pytest.mark.parametrize('where', [0.2, 0.5, 0.9, 0.99])
def test_damage_is_an_error_and_never_wrong_bytes(configure, where):
    store = configure(one={'dedup_store_codec': 'none'})
    data = noise(24 * MIB)
    url = add(data)[0]
    damage(store, where)
    store = configure(one={'dedup_store_codec': 'none'})
    try:
        download, _size = glance_store.get(url, 'one')
    except exceptions.RemoteServiceUnavailable:
        got = b''
    else:
        got = read_all(download)
    assert len(got) < len(data)
    assert data.startswith(got)


def test_damage_at_the_start_is_found_before_get_returns(configure):
    store = configure(one={'dedup_store_codec': 'none'})
    url = add(noise(3 * MIB))[0]
    damage(store, 0.8)
    store = configure(one={'dedup_store_codec': 'none'})
    path = os.path.realpath(repo(store).path)
    with pytest.raises(exceptions.RemoteServiceUnavailable):
        glance_store.get(url, 'one')
    gc.collect()
    assert open_files(path) == 0


def test_a_damaged_recipe(configure):
    store = configure(one={})
    url = add(noise(MIB))[0]
    with open(os.path.join(repo(store).path, 'images', 'image'),
              'r+b') as recipe:
        recipe.seek(20)
        recipe.write(b'damage')
    for call in (glance_store.get, glance_store.get_size_from_uri_and_backend):
        with pytest.raises(exceptions.RemoteServiceUnavailable):
            call(url, 'one')


@pytest.mark.parametrize('raised,expected', [
    (dedup_exceptions.ImageNotFound, exceptions.NotFound),
    (dedup_exceptions.DamagedError, exceptions.RemoteServiceUnavailable),
    (dedup_exceptions.StorageError, exceptions.RemoteServiceUnavailable),
    (dedup_exceptions.AccessDenied, exceptions.RemoteServiceUnavailable),
    (dedup_exceptions.VersionError, exceptions.RemoteServiceUnavailable),
    (dedup_exceptions.BusyError, exceptions.RemoteServiceUnavailable),
    (dedup_exceptions.ClosedError, exceptions.RemoteServiceUnavailable),
])
def test_repository_errors_of_reads(store, monkeypatch, raised, expected):
    url = add(b'abc')[0]
    real = repo(store)

    def fail(*args):
        raise raised('words')

    monkeypatch.setattr(store, '_repository', types.SimpleNamespace(
        open_image=fail, stat=fail, key=real.key,
        repository_id=real.repository_id))
    for call in (glance_store.get, glance_store.get_size_from_uri_and_backend):
        with pytest.raises(expected):
            call(url, 'one')


# -- Locations -------------------------------------------------------------


def refused(url, backend='one'):
    """Nothing can be had from a location, and nothing told."""
    for call in (glance_store.get, get_size, delete):
        with pytest.raises((exceptions.NotFound, exceptions.BadStoreUri)):
            call(url, backend)


def test_a_location_cannot_be_forged(store):
    url = add(b'secret', '11111111-2222-3333-4444-555555555555')[0]
    head, mac = url.rsplit('/', 1)
    for forged in ('0' * 64, mac[::-1], mac[:-1], mac[:-2], mac + '0', '',
                   mac.upper() + 'x', hashlib.sha256(b'').hexdigest()):
        if forged != mac:
            refused(f'{head}/{forged}')
    for place in range(0, 64, 9):
        digit = '0' if mac[place] != '0' else '1'
        refused(f'{head}/{mac[:place]}{digit}{mac[place + 1:]}')
    refused(head)
    refused(head + '/')
    assert get(url) == b'secret'


def test_a_true_location_spelt_otherwise(store):
    """Nothing but the very text is a location."""
    url = add(b'secret', 'image-A')[0]
    head, mac = url.rsplit('/', 1)
    for other in (f'{head}/{mac.upper()}', url.upper(), url.lower(),
                  url.replace('dedup', 'Dedup'), f'{url}?', f'{url}?x=1',
                  f'{url}&x', f'{url}#', f'{url};x', f'{url}/', f'{url}/..',
                  f'{url} ', f'{url}\n', f' {url}', f'{url}\0',
                  url.replace('//', '///'), url.replace('//', '//u@'),
                  url.replace('image-A', 'image%2DA'),
                  url.replace('image-A', './image-A'),
                  url.replace('image-A', 'image-a'),
                  url.replace('/image-A', '//image-A')):
        if other != url:
            # An unknown scheme is Glance's to refuse.
            with pytest.raises(exceptions.GlanceStoreException):
                get(other)
            with pytest.raises(exceptions.GlanceStoreException):
                delete(other, context=ADMIN)
    assert get(url) == b'secret'


def test_a_mac_is_good_for_its_own_image_only(store):
    one, two = add(b'one', 'a')[0].split('/'), add(b'two', 'b')[0].split('/')
    for place in (3, 4, 5):  # image id, upload id, mac
        mixed = list(one)
        mixed[place] = two[place]
        refused('/'.join(mixed))
    # 'ab' + 'c' must not sign as 'a' + 'bc'.
    key = repo(store).key
    assert (locations.sign(key, 'r', 'ab', 'c')
            != locations.sign(key, 'r', 'a', 'bc'))
    assert get('/'.join(one)) == b'one'


def test_a_location_of_another_repository(configure):
    one, two = configure(one={}, two={})
    url = add(b'one', backend='one')[0]
    refused(url, 'two')
    # ... even under this one's name, signed with that one's key.
    refused(url.replace(repo(one).repository_id, repo(two).repository_id),
            'two')
    assert get(url, 'one') == b'one'


def test_a_location_of_an_earlier_upload(store):
    old = add(b'old')[0]
    delete(old)
    new = add(b'new')[0]
    assert new != old
    refused(old)
    with pytest.raises(exceptions.NotFound):
        delete(old, context=ALICE)
    assert get(new) == b'new'


def test_locations_do_not_get_into_messages(store, caplog):
    url = add(b'secret')[0]
    mac = url.rsplit('/', 1)[1]
    wrong = url[:-1] + ('0' if url[-1] != '0' else '1')
    for bad in (wrong, url + '/', url.upper()):
        with pytest.raises(Exception) as caught:
            glance_store.get(bad, 'one')
        assert mac[:-1] not in str(caught.value)
    assert mac[:-1] not in caplog.text


def parse(uri):
    place = dedup_store.StoreLocation({}, CONF)
    place.parse_uri(uri)
    return place


HEX = strategies.text('0123456789abcdef', min_size=32, max_size=32)
IDS = strategies.from_regex(r'[A-Za-z0-9_-]{1,128}', fullmatch=True)


@given(HEX, IDS, HEX, HEX, HEX)
def test_any_well_formed_location_parses(repository_id, image_id, upload_id,
                                         mac, rest):
    uri = f'dedup://{repository_id}/{image_id}/{upload_id}/{mac}{rest}'
    place = parse(uri)
    assert place.get_uri() == uri
    assert place.image_id == image_id


GOOD = f'dedup://{"0" * 32}/image/{"1" * 32}/{"a" * 64}'


@settings(max_examples=500)
@given(strategies.text() | strategies.builds(
    lambda place, cut, new: GOOD[:place] + new + GOOD[place + cut:],
    strategies.integers(0, len(GOOD)), strategies.integers(0, 5),
    strategies.text(max_size=5)))
def test_anything_else_is_a_bad_uri(uri):
    try:
        place = parse(uri)
    except exceptions.BadStoreUri as exc:
        assert len(uri) < 30 or uri not in str(exc)
    else:
        assert place.get_uri() == uri
        assert len(uri.split('/')) == 6
        assert uri.isascii() and uri.isprintable()


@pytest.mark.parametrize('uri', [
    '', 'dedup', 'dedup:', 'dedup://', 'dedup:///', 'file:///etc/passwd',
    'DEDUP' + GOOD[5:], GOOD + '\n', '\n' + GOOD, ' ' + GOOD, GOOD + '?x=1',
    GOOD + '#x', GOOD + '/', GOOD.replace('//', '/'), 'dedup://u:p@h/a/b/c',
    GOOD.replace('image', '../..'), GOOD.replace('image', ''),
    GOOD.replace('image', 'a\0b'), GOOD.replace('image', 'x' * 129),
    GOOD.replace('1', '\u0661'), GOOD[:-1], 'x' * 1000000])
def test_malformed_locations(uri):
    with pytest.raises(exceptions.BadStoreUri):
        parse(uri)


# -- Deletion --------------------------------------------------------------


def glance_shows(store, **options):
    """Have a store know these options of Glance, and no others."""
    store.conf = cfg.ConfigOpts()
    for name, value in options.items():
        store.conf.register_opt(cfg.BoolOpt(name, default=value))


@pytest.mark.parametrize('owner,who,allowed', [
    (ALICE, ALICE, True), (ALICE, BOB, False), (ALICE, ADMIN, True),
    (ALICE, None, True), (None, BOB, True), (ADMIN, ALICE, False),
    (ALICE, types.SimpleNamespace(project_id=None, is_admin=False), False),
    (ALICE, types.SimpleNamespace(), False),
    (types.SimpleNamespace(project_id=None, is_admin=True), BOB, True)])
def test_who_may_delete(store, owner, who, allowed):
    glance_shows(store, show_multiple_locations=True)
    url = add(b'data', context=owner)[0]
    if allowed:
        delete(url, context=who)
        refused(url)
    else:
        with pytest.raises(exceptions.Forbidden):
            delete(url, context=who)
        assert get(url) == b'data'


@pytest.mark.parametrize('options,allowed', [
    ({'show_multiple_locations': False, 'show_image_direct_url': False}, True),
    ({'show_multiple_locations': True, 'show_image_direct_url': False}, False),
    ({'show_multiple_locations': False, 'show_image_direct_url': True}, False),
    ({'show_multiple_locations': False}, False),
    ({'show_image_direct_url': False}, False),
    ({}, False)])
def test_whose_image_is_asked_where_locations_are_shown(
        store, options, allowed):
    """A project deletes what an administrator stored for it."""
    glance_shows(store, **options)
    url = add(b'data', context=ADMIN)[0]
    if allowed:
        delete(url, context=ALICE)
        refused(url)
    else:
        with pytest.raises(exceptions.Forbidden):
            delete(url, context=ALICE)
        assert get(url) == b'data'


# -- Scopes ----------------------------------------------------------------


def new_bytes(store, image_id, data, context):
    add(data, image_id, context=context)
    return repo(store).stat(image_id).new_bytes


def test_projects_share(store):
    """As long as nothing else is configured."""
    data = noise(MIB)
    assert [new_bytes(store, f'i{n}', data, who) for n, who in enumerate(
        (ALICE, BOB, ALICE, None))] == [MIB, 0, 0, 0]


def test_projects_do_not_share(configure):
    """Those without a project share with their like only."""
    store = configure(one={'dedup_store_scope': 'project'})
    nobody = types.SimpleNamespace(project_id=None, is_admin=False)
    data = noise(MIB)
    assert [new_bytes(store, f'i{n}', data, who) for n, who in enumerate(
        (ALICE, BOB, ALICE, BOB, None, nobody, ADMIN))] == [
            MIB, MIB, 0, 0, MIB, 0, MIB]
    # The setting is not the repository's.
    store = configure(one={'dedup_store_scope': 'global'})
    assert [new_bytes(store, f'j{n}', data, who) for n, who in enumerate(
        (ALICE, BOB))] == [MIB, 0]
    store = configure(one={'dedup_store_scope': 'project'})
    assert new_bytes(store, 'k', data, ALICE) == 0


def test_another_scope_is_refused(configure):
    with pytest.raises(ValueError, match='tenant'):
        configure(one={'dedup_store_scope': 'tenant'})


def test_delete_twice(store):
    url = add(b'data')[0]
    delete(url)
    with pytest.raises(exceptions.NotFound):
        delete(url)


@pytest.mark.parametrize('raised,expected', [
    (dedup_exceptions.ImageNotFound, exceptions.NotFound),
    (dedup_exceptions.BusyError, exceptions.TimeoutError),
    (dedup_exceptions.AccessDenied, exceptions.Forbidden),
    (dedup_exceptions.StorageError, exceptions.BackendException),
    (dedup_exceptions.DamagedError, exceptions.BackendException)])
def test_repository_errors_of_deletes(store, monkeypatch, raised, expected):
    url = add(b'data')[0]
    real = repo(store)

    def fail(*args):
        raise raised('words')

    monkeypatch.setattr(store, '_repository', types.SimpleNamespace(
        delete=fail, key=real.key, repository_id=real.repository_id))
    with pytest.raises(expected):
        delete(url)


def test_set_acls_is_not_there(store):
    """Glance calls it at every save and takes this for an answer."""
    url = add(b'data')[0]
    glance_store.set_acls_for_multi_store(url, 'one', public=True)
    with pytest.raises(NotImplementedError):
        store.set_acls(None)


# -- Configuration ---------------------------------------------------------


def test_registration(store):
    assert store.get_schemes() == ('dedup',)
    assert store.get_store_location_class() is dedup_store.StoreLocation
    assert store.is_capable(
        glance_store.capabilities.BitMasks.READ_RANDOM,
        glance_store.capabilities.BitMasks.WRITE_ACCESS,
        glance_store.capabilities.BitMasks.DRIVER_REUSABLE)
    assert multi_backend.get_store_from_store_identifier('one') is store
    assert store.url_prefix == f'dedup://{repo(store).repository_id}/'
    assert add(b'data')[0].startswith(store.url_prefix)


def test_two_stores(configure):
    one, two = configure(one={}, two={})
    assert one.url_prefix != two.url_prefix
    first, second = add(b'1', backend='one')[0], add(b'2', backend='two')[0]
    assert (get(first, 'one'), get(second, 'two')) == (b'1', b'2')
    # Without the store's name, Glance searches all.
    assert (get(first, None), get(second, None)) == (b'1', b'2')
    glance_store.delete(second, None)
    refused(second, 'two')


def test_two_stores_need_two_repositories(configure, tmp_path):
    one, two = configure(one={'dedup_store_datadir': tmp_path / 'same'},
                         two={'dedup_store_datadir': tmp_path / 'same'})
    add(b'data', 'a', backend='one')
    assert two.url_prefix != one.url_prefix
    with pytest.raises(exceptions.StoreAddDisabled):
        add(b'data', 'b', backend='two')


def test_a_repository_that_is_there_is_used(configure):
    configure(one={})
    url = add(b'data')[0]
    store = configure(one={})
    assert url.startswith(store.url_prefix)
    assert get(url) == b'data'


def test_creation_options(configure):
    store = configure(one={
        'dedup_store_block_size': 8192, 'dedup_store_group_slots': 128,
        'dedup_store_segment_size': 131072,
        'dedup_store_fingerprint': 'xxh3-128',
        'dedup_store_compare': 'value'})
    found = repo(store).parameters
    assert (found.block_size, found.group_slots, found.segment_size,
            found.fingerprint, found.compare) == (
                8192, 128, 131072, 'xxh3-128', 'value')


def test_content_defined_cutting(configure):
    store = configure(one={'dedup_store_cutting': 'gear'})
    assert repo(store).parameters.cutting == 'gear 2048 4096'
    assert repo(store).parameters.block_size == 16384
    url = add(b'data')[0]
    for number, same in enumerate(('gear', 'gear 2048 4096', None)):
        configure(one={'dedup_store_cutting': same})
        add(b'more', f'more-{number}')
        assert get(url) == b'data'


def test_options_for_all_stores(configure, tmp_path):
    configure(backend_defaults={'type': 'http'})
    CONF.set_override('dedup_store_block_size', 16384, 'backend_defaults')
    one, two = configure(one={}, two={'dedup_store_block_size': 512})
    assert repo(one).parameters.block_size == 16384
    assert repo(two).parameters.block_size == 512


@pytest.mark.parametrize('name,value', [
    ('block_size', 512), ('group_slots', 64), ('segment_size', 32768),
    ('cutting', 'gear 1024 4096'), ('fingerprint', 'sha512-256'),
    ('compare', 'value')])
def test_an_option_that_disagrees(configure, name, value):
    configure(one={})
    url = add(b'data')[0]
    store = configure(one={f'dedup_store_{name}': value})
    with pytest.raises(exceptions.BadStoreConfiguration) as caught:
        store.configure_add()
    assert f'dedup_store_{name} is {value}' in str(caught.value)
    with pytest.raises(exceptions.StoreAddDisabled):
        add(b'more', 'more')
    assert get(url) == b'data'  # reading goes on


def test_file_system_without_locks(configure, monkeypatch):
    """The store is disabled, with the reason; nobody reads by chance."""
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(filesystem.fcntl, 'fcntl', refuse)
    store = configure(one={})
    with pytest.raises(exceptions.BadStoreConfiguration) as caught:
        store.configure_add()
    assert 'refuses locks of open files' in str(caught.value)
    with pytest.raises(exceptions.StoreAddDisabled):
        add(b'data')
    monkeypatch.undo()
    store.configure_add()


@pytest.mark.parametrize('values', [
    {'dedup_store_datadir': '/proc/none/x'},
    {'dedup_store_datadir': '/dev/null'},
    {'dedup_store_datadir': '/dev/null/x'},
    {'dedup_store_datadir': '/etc'},
    {'dedup_store_datadir': 'relative'},
    {'dedup_store_datadir': ''},
    {'dedup_store_block_size': 3000},
    {'dedup_store_segment_size': 1024},
    {'dedup_store_cutting': 'rabin'},
    {'dedup_store_cutting': 'gear 4096 2048'},
    {'dedup_store_cutting': 'gear', 'dedup_store_block_size': 4096},
    {'dedup_store_fingerprint': 'md5'},
    {'dedup_store_fingerprint': 'none-such'},
    {'dedup_store_codec': 'lz4', 'dedup_store_codec_level': 3},
    {'dedup_store_fingerprint': 'xxh3-128'},
], ids=str)
def test_bad_configurations(configure, values):
    store = configure(one=values)
    with pytest.raises(exceptions.BadStoreConfiguration) as caught:
        store.configure_add()
    assert 'one' in str(caught.value)
    with pytest.raises(exceptions.StoreAddDisabled):
        add(b'data')
    with pytest.raises(exceptions.RemoteServiceUnavailable):
        glance_store.get(GOOD, 'one')


@pytest.mark.parametrize('name,value', [
    ('block_size', '3'), ('block_size', 'x'), ('filter_mib', '0'),
    ('codec', 'gzip'), ('compare', 'luck'), ('timeout', '-1'),
    ('threads', '-1'), ('threads', '0'), ('codec_level', '20'),
    ('group_slots', '65536')])
def test_values_that_do_not_parse(configure, tmp_path, name, value):
    """They come from a file, so the option's type sees them only when read."""
    path = tmp_path / 'glance.conf'
    path.write_text(f'[one]\ndedup_store_{name} = {value}\n')
    CONF([], default_config_files=[str(path)])
    store = configure(one={f'dedup_store_{name}': ...})
    with pytest.raises(exceptions.BadStoreConfiguration) as caught:
        store.configure_add()
    assert name in str(caught.value)


def test_a_known_size_must_have_room(configure):
    """Refused before anything is stored; of what is not known, no share."""
    store = configure(one={'dedup_store_required_percent': 50})
    opened = repo(store)
    free, kept = opened.room()
    size = 2 * (free - kept)
    for much in (size + (1 << 40), size * 2):
        with pytest.raises(exceptions.StorageFull, match='are kept'):
            add(b'data', size=much)
    assert_nothing_left(store)
    # There would be room for half of it; so it is read, and found too short.
    with pytest.raises(exceptions.Invalid, match='only 4'):
        add(b'data', size=size // 2)
    assert get(add(io.BytesIO(b'data'), 'other', size=0)[0]) == b'data'


def test_no_share_of_a_known_size_is_asked_for_by_default(configure):
    configure(one={})
    with pytest.raises(exceptions.Invalid, match='only 4'):
        add(b'data', size=1 << 60)


def test_a_repository_of_a_group(configure, tmp_path):
    store = configure(one={'dedup_store_group_access': True})
    assert repo(store).group_access
    assert (tmp_path / 'one').stat().st_mode & 0o7777 == 0o2770
    assert repo(configure(one={})).group_access
    store = configure(one={'dedup_store_group_access': False})
    with pytest.raises(exceptions.BadStoreConfiguration,
                       match='group_access is False, but .*one says True'):
        store.configure_add()
    assert not repo(configure(two={})).group_access


@pytest.mark.skipif(os.geteuid() != 0, reason='only root becomes others')
def test_a_repository_of_another_user(configure, tmp_path):
    configure(one={})
    url = add(b'data')[0]
    os.chown(tmp_path / 'one', 65531, -1)
    store = configure(one={})
    words = 'belongs to uid 65531, and this process runs as root'
    with pytest.raises(exceptions.BadStoreConfiguration, match=words):
        store.configure_add()
    with pytest.raises(exceptions.StoreAddDisabled):
        add(b'more', 'more')
    with pytest.raises(exceptions.RemoteServiceUnavailable, match=words):
        get(url)


def test_storage_that_comes_late_can_be_read(configure, tmp_path):
    """A missing mount disables adding; reads work when it is there."""
    configure(one={})
    url = add(b'data')[0]
    (tmp_path / 'one').rename(tmp_path / 'away')
    (tmp_path / 'one').write_text('not mounted')
    configure(one={})
    with pytest.raises(exceptions.StoreAddDisabled):
        add(b'data', 'other')
    with pytest.raises(exceptions.RemoteServiceUnavailable):
        get(url)
    (tmp_path / 'one').unlink()
    (tmp_path / 'away').rename(tmp_path / 'one')
    assert get(url) == b'data'


def test_nothing_is_created_by_reading(configure, tmp_path):
    store = configure(one={'dedup_store_datadir': '/dev/null/x'})
    CONF.set_override('dedup_store_datadir', str(tmp_path / 'x'), 'one')
    with pytest.raises(exceptions.RemoteServiceUnavailable):
        glance_store.get(GOOD, 'one')
    assert not (tmp_path / 'x').exists()
    store.configure_add()
    assert (tmp_path / 'x').exists()


def in_children(count, function):
    """Run a function in forked processes; all must succeed."""
    children = []
    for number in range(count):
        child = os.fork()
        if not child:
            signal.alarm(60)  # a child that hangs must not stay
            try:
                function(number)
                os._exit(0)
            except BaseException as exc:
                print(repr(exc), flush=True)
            finally:
                os._exit(1)
        children.append(child)
    results = [os.waitpid(child, 0)[1] for child in children]
    assert results == [0] * count


def test_processes_that_start_at_once_make_one_repository(configure,
                                                          tmp_path):
    """As uWSGI's workers do, each configuring its own store."""
    ids = tmp_path / 'ids'
    ids.mkdir()
    for attempt in range(5):
        def start(number, attempt=attempt):
            store = configure(one={
                'dedup_store_datadir': tmp_path / f'r{attempt}'})
            url = add(noise(MIB), f'image{number}')[0]
            assert get(url) == noise(MIB)
            (ids / str(number)).write_text(repo(store).repository_id)

        in_children(6, start)
        assert len({path.read_text() for path in ids.iterdir()}) == 1


def test_a_fork_after_use(store):
    """Threads, descriptors and locks of the parent are not the child's."""
    data = noise(6 * MIB)
    url = add(data, 'parent')[0]
    download, _size = glance_store.get(url, 'one')
    pieces = iter(download)
    first = next(pieces)

    def child(number):
        assert get(url) == data
        mine = add(noise(5 * MIB, number), f'child{number}')[0]
        assert get(mine) == noise(5 * MIB, number)
        if number:
            delete(mine)

    in_children(3, child)
    assert first + b''.join(pieces) == data
    assert repo(store).images() == ['child0', 'parent']


def test_one_instance_many_threads(store):
    errors = []

    def run(number):
        try:
            for turn in range(4):
                data = noise(number * 100000 + turn, turn)
                url, size, md5, _multihash, _metadata = add(
                    Dribble(data, 200000), f'image-{number}-{turn}')
                assert md5 == hashlib.md5(data).hexdigest()
                assert get_size(url) == size == len(data)
                assert get(url) == data
                assert get(url, offset=5, chunk_size=7) == data[5:12]
                if turn % 2:
                    delete(url)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(number,))
               for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(repo(store).images()) == 24


# -- Time limits -----------------------------------------------------------


@pytest.fixture
def hanging(configure, monkeypatch):
    """A store with a limit of a second whose repository can be made hang.

    ``hanging.at`` is the call that hangs, until ``hanging.go`` is set.
    """
    store = configure(one={'dedup_store_timeout': 1})
    real = repo(store)
    state = types.SimpleNamespace(store=store, real=real, at=None, calls=[],
                                  go=threading.Event())

    def wrap(name, function):
        def call(*args):
            result = function(*args) if name != 'write' else None
            if state.at == name:
                state.go.wait(30)
            if name == 'write':
                result = function(*args)
            state.calls.append(name)
            return result
        return call

    def begin(*args):
        transaction = real.begin(*args)
        return types.SimpleNamespace(
            upload_id=transaction.upload_id,
            write=wrap('write', transaction.write),
            commit=wrap('commit', transaction.commit),
            set_hash=transaction.set_hash,
            abort=wrap('abort', transaction.abort))

    def open_image(*args):
        image = real.open_image(*args)
        return types.SimpleNamespace(
            size=image.size, stat=image.stat, read=wrap('read', image.read),
            close=wrap('close', image.close))

    monkeypatch.setattr(store, '_repository', types.SimpleNamespace(
        repository_id=real.repository_id, key=real.key,
        begin=wrap('begin', begin), open_image=wrap('open', open_image),
        stat=wrap('stat', real.stat), delete=wrap('delete', real.delete)))
    yield state
    state.go.set()


def soon(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_no_storm_in_a_store_with_a_limit(hanging):
    data = noise(9 * MIB)
    url = add(data, context=ALICE)[0]
    assert get(url) == data
    delete(url, context=ALICE)
    assert hanging.real.images() == []


@pytest.mark.parametrize('at,undone', [
    ('begin', 'abort'), ('write', 'abort'), ('commit', 'delete')])
def test_an_upload_to_storage_that_hangs(hanging, at, undone):
    hanging.at = at
    begun = time.monotonic()
    with pytest.raises(exceptions.TimeoutError):
        add(noise(9 * MIB))
    assert time.monotonic() - begun < 3
    # When the storage answers, what was told to have failed is undone.
    hanging.at = None
    hanging.go.set()
    soon(lambda: undone in hanging.calls)
    soon(lambda: hanging.real.images() == [])
    hanging.store._repository = hanging.real
    soon(lambda: not os.listdir(os.path.join(hanging.real.path, 'spool'))
         or undone == 'delete')
    assert get(add(b'again')[0]) == b'again'


@pytest.mark.parametrize('at', ['open', 'read'])
def test_a_download_from_storage_that_hangs(hanging, at):
    url = add(noise(9 * MIB))[0]
    hanging.at = at
    begun = time.monotonic()
    with pytest.raises(exceptions.RemoteServiceUnavailable):
        glance_store.get(url, 'one')
    assert time.monotonic() - begun < 3
    assert 'close' not in hanging.calls
    hanging.go.set()
    soon(lambda: 'close' in hanging.calls)
    soon(lambda: open_files(os.path.realpath(hanging.real.path)) == 0)


def test_storage_that_hangs_in_the_middle_of_a_download(hanging):
    data = noise(9 * MIB)
    url = add(data)[0]
    download, _size = glance_store.get(url, 'one')
    pieces = iter(download)
    assert data.startswith(next(pieces))
    hanging.at = 'read'
    with pytest.raises(exceptions.RemoteServiceUnavailable):
        list(pieces)
    hanging.go.set()
    soon(lambda: 'close' in hanging.calls)


@pytest.mark.parametrize('at,call,expected', [
    ('delete', delete, exceptions.TimeoutError),
    ('stat', get_size, exceptions.RemoteServiceUnavailable)])
def test_other_calls_to_storage_that_hangs(hanging, at, call, expected):
    url = add(b'data')[0]
    hanging.at = at
    begun = time.monotonic()
    with pytest.raises(expected):
        call(url)
    assert time.monotonic() - begun < 3


def test_opening_a_repository_that_hangs(configure, monkeypatch):
    go = threading.Event()

    class Hanging:
        def __init__(self, *args, **kwargs):
            go.wait(20)

        @staticmethod
        def create(*args, **kwargs):
            pass

    monkeypatch.setattr(repository, 'Repository', Hanging)
    begun = time.monotonic()
    store = configure(one={'dedup_store_timeout': 1})
    assert time.monotonic() - begun < 5
    go.set()
    with pytest.raises(exceptions.StoreAddDisabled):
        store.add('image', io.BytesIO(b''), 0, 'sha512')


def test_hanging_calls_are_bounded(hanging):
    """More requests than threads: they fail in time and never begin."""
    hanging.at = 'stat'
    url = add(b'data')[0]
    limit = dedup_store.STORAGE_THREADS
    failed = []

    def run():
        try:
            get_size(url)
        except exceptions.RemoteServiceUnavailable as exc:
            failed.append(exc)

    threads = [threading.Thread(target=run) for _ in range(limit + 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(failed) == limit + 10
    assert hanging.store._storage._threads == limit
    hanging.at = None
    hanging.go.set()
    assert get_size(url) == 4
    # On a slow machine a thread may come too late even for its first call.
    assert hanging.calls.count('stat') <= limit + 1


def test_no_socket_is_opened(configure, monkeypatch):
    """The store needs no other program."""
    def fail(*args, **kwargs):
        raise AssertionError('socket')

    configure(one={'dedup_store_dedupd_socket': ''})
    monkeypatch.setattr(socket, 'socket', fail)
    assert get(add(b'data')[0]) == b'data'
