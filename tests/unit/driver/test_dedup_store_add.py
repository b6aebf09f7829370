# SPDX-License-Identifier: Apache-2.0

"""The store: successful and failed uploads."""

import hashlib
import io
import os
import threading
import time
import types

import glance_store
from glance_store import exceptions as glance_exceptions
import pytest

from glance_dedup.base import exceptions
from glance_dedup.driver import dedup_store
from glance_dedup.driver import upload
from tests.support.repositories import noise
from tests.support import stores
from tests.support.stores import add
from tests.support.stores import assert_nothing_left
from tests.support.stores import delete
from tests.support.stores import Dribble
from tests.support.stores import get
from tests.support.stores import get_size
from tests.support.stores import repo

MIB = 1 << 20

HASHES = sorted(name for name in hashlib.algorithms_available
                if not name.startswith('shake'))

configure = stores.configure
store = stores.store


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
    with pytest.raises(glance_exceptions.NotFound):
        glance_store.get(url, 'one')
    assert repo(store).images() == []


def test_the_id_of_a_volume_s_recipe(store):
    with pytest.raises(glance_exceptions.Invalid, match='is no image'):
        add(noise(100), f'v_{"a" * 32}_0_1')
    assert repo(store).recipes() == []


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

    with pytest.raises(glance_exceptions.UnknownHashingAlgo):
        store.add('image', Source(), 0, algo)
    assert_nothing_left(store)


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
    """A source with long reads among short ones."""

    def read(self, length):
        return self.data.read(min(length, self.random.choice(
            (1, 511, 70000, self.most, length))))


@pytest.mark.parametrize('source', [
    lambda data: io.BytesIO(data), lambda data: Dribble(data, 700),
    lambda data: Dribble(data, 2 * MIB), lambda data: Mixed(data, 3 * MIB)],
    ids=['long', 'short', 'middling', 'mixed'])
def test_the_verifier_sees_every_byte(store, source):
    """The verifier gets all pieces in order, once, and one at a time."""
    data = noise(5 * MIB + 3)
    under_way = threading.Lock()
    seen = []

    def update(piece):
        assert under_way.acquire(blocking=False)
        time.sleep(0.001)   # The next pieces are ready meanwhile.
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
    with pytest.raises(glance_exceptions.Invalid) as caught:
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
    with pytest.raises(glance_exceptions.Invalid):
        add(source, size=1000)
    assert source.served <= 2 * upload.PIECE


class Interrupt(BaseException):
    """An exception like KeyboardInterrupt, SystemExit or GreenletExit."""


@pytest.mark.parametrize('error', [
    OSError('gone'), ValueError('bad'), KeyboardInterrupt(), SystemExit(1),
    GeneratorExit(), Interrupt(), glance_exceptions.StorageFull(),
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
    with pytest.raises(glance_exceptions.Duplicate):
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
        except glance_exceptions.Duplicate as exc:
            results[name] = exc

    threads = [threading.Thread(target=run, args=(name,))
               for name in (b'a', b'b')]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [name for name in results if isinstance(results[name], str)]
    assert sum(isinstance(result, glance_exceptions.Duplicate)
               for result in results.values()) == 1
    assert get(results[winner]) == winner * 1000


@pytest.mark.parametrize('image_id', [
    '', '..', 'a/b', '../x', 'a.b', 'a\0b', 'x' * 129, 'x' * 300, '\u56fe',
    'a b', 'a%2fb', 'a?b', 'a#b', '\n'])
def test_image_ids_that_are_none(store, image_id):
    with pytest.raises(glance_exceptions.Invalid):
        add(b'data', image_id)
    assert repo(store).images() == []


UPLOAD_ERRORS = [
    (exceptions.NoSpaceError, glance_exceptions.StorageFull),
    (exceptions.AccessDenied, glance_exceptions.StorageWriteDenied),
    (exceptions.StorageError, glance_exceptions.StorageWriteDenied),
    (exceptions.DamagedError, glance_exceptions.StorageWriteDenied),
    (exceptions.VersionError, glance_exceptions.StorageWriteDenied),
    (exceptions.ImageExists, glance_exceptions.Duplicate),
    (exceptions.InvalidParameter, glance_exceptions.Invalid),
    (exceptions.BusyError, dedup_store.UPLOAD_TIMED_OUT),
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
    if expected is glance_exceptions.Duplicate:
        assert 'image' in str(caught.value)
    else:
        assert 'words' in str(caught.value)
    assert_nothing_left(store)


def test_a_failing_engine_stops_the_upload_promptly(store, monkeypatch):
    real = repo(store)

    def begin(*args):
        transaction = real.begin(*args)

        def write(data):
            raise exceptions.NoSpaceError('full')

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
    with pytest.raises(glance_exceptions.StorageFull):
        add(source)
    assert source.reads < upload.DEPTH


def test_a_commit_that_fails_when_the_image_is_there(store, monkeypatch):
    """The image is deleted, since the client gets an error."""
    real = repo(store)

    def begin(*args):
        transaction = real.begin(*args)

        def commit():
            transaction.commit()
            raise exceptions.StorageError('EIO')

        return types.SimpleNamespace(
            write=transaction.write, abort=transaction.abort, commit=commit,
            upload_id=transaction.upload_id,
            set_hash=transaction.set_hash)

    with monkeypatch.context() as patch:
        patch.setattr(store, '_repository', types.SimpleNamespace(
            begin=begin, delete=real.delete))
        with pytest.raises(glance_exceptions.StorageWriteDenied):
            add(b'data')
    assert real.images() == []
    assert get(add(b'again')[0]) == b'again'


def test_memory_is_bounded_by_back_pressure(store, monkeypatch):
    """The reader does not run ahead of a slow engine."""
    real = repo(store)
    written = [0]
    ahead = []

    def begin(*args):
        transaction = real.begin(*args)

        def write(data):
            time.sleep(0.005)
            written[0] += len(data)

        return types.SimpleNamespace(
            write=write, abort=transaction.abort, commit=transaction.commit,
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
        begin=begin, repository_id=real.repository_id,
        read_keys=real.read_keys))
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
            commit=transaction.commit, upload_id=transaction.upload_id,
            set_hash=transaction.set_hash)

    class Source:
        left = 10

        def read(self, length):
            time.sleep(0.1)
            self.left -= 1
            return bytes(length) if self.left >= 0 else b''

    monkeypatch.setattr(store, '_repository', types.SimpleNamespace(
        begin=begin, repository_id=real.repository_id,
        read_keys=real.read_keys))
    begun = time.monotonic()
    add(Source(), verifier=verifier)
    assert time.monotonic() - begun < 2.2  # in series it takes 3.1
