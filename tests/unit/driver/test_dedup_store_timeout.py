# SPDX-License-Identifier: Apache-2.0

"""The store: the time limit on storage that hangs."""

import io
import os
import threading
import time
import types

import glance_store
from glance_store import exceptions
import pytest

from glance_dedup.driver import dedup_store
from glance_dedup.repository import image_repository
from tests.support.repositories import noise
from tests.support import stores
from tests.support.stores import add
from tests.support.stores import ALICE
from tests.support.stores import delete
from tests.support.stores import get
from tests.support.stores import get_size
from tests.support.stores import open_files
from tests.support.stores import repo

MIB = 1 << 20

configure = stores.configure


@pytest.fixture
def hanging(configure, monkeypatch):
    """A store with a limit of a second and a repository that hangs on demand.

    The call ``hanging.at`` hangs until ``hanging.go`` is set.
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
        repository_id=real.repository_id, read_keys=real.read_keys,
        path=real.path,
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
    with pytest.raises(dedup_store.UPLOAD_TIMED_OUT):
        add(noise(9 * MIB))
    assert time.monotonic() - begun < 3
    # When the storage responds, the store undoes the call that was reported as
    # failed.
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
    ('delete', delete, dedup_store.DELETE_TIMED_OUT),
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

    monkeypatch.setattr(image_repository, 'Repository', Hanging)
    begun = time.monotonic()
    store = configure(one={'dedup_store_timeout': 1})
    assert time.monotonic() - begun < 5
    go.set()
    with pytest.raises(exceptions.StoreAddDisabled):
        store.add('image', io.BytesIO(b''), 0, 'sha512')


def test_hanging_calls_are_bounded(hanging):
    """More requests than threads fail in time, and most never start."""
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
