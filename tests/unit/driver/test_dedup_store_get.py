# SPDX-License-Identifier: Apache-2.0

"""The store: downloads, whole and in ranges, and damage."""

import gc
import os
import types

import glance_store
from glance_store import exceptions as glance_exceptions
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies
import pytest

from glance_dedup.base import exceptions
from glance_dedup.repository import format_verdicts
from tests.support.repositories import noise
from tests.support import stores
from tests.support.stores import add
from tests.support.stores import delete
from tests.support.stores import get
from tests.support.stores import open_files
from tests.support.stores import repo

MIB = 1 << 20

configure = stores.configure
store = stores.store


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
    """A download of no bytes is true, since Glance drops false values."""
    download, size = glance_store.get(add(b'')[0], 'one')
    assert size == 0
    assert download
    assert list(download) == []


def test_pieces_are_bytes(store):
    """Each piece is of the type bytes, which a WSGI server requires."""
    download, _size = glance_store.get(add(noise(5 * MIB))[0], 'one')
    assert {type(piece) for piece in download} == {bytes}


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
    with pytest.raises(glance_exceptions.RemoteServiceUnavailable):
        for piece in download:
            got += piece
    return got


@pytest.mark.parametrize('where', [0.2, 0.5, 0.9, 0.99])
def test_damage_is_an_error_and_never_wrong_bytes(configure, where):
    store = configure(one={'dedup_store_codec': 'none'})
    data = noise(24 * MIB)
    url = add(data)[0]
    damage(store, where)
    store = configure(one={'dedup_store_codec': 'none'})
    try:
        download, _size = glance_store.get(url, 'one')
    except glance_exceptions.RemoteServiceUnavailable:
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
    with pytest.raises(glance_exceptions.RemoteServiceUnavailable):
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
        with pytest.raises(glance_exceptions.RemoteServiceUnavailable):
            call(url, 'one')


@pytest.mark.parametrize('raised,expected', [
    (exceptions.ImageNotFound, glance_exceptions.NotFound),
    (exceptions.DamagedError,
     glance_exceptions.RemoteServiceUnavailable),
    (exceptions.StorageError,
     glance_exceptions.RemoteServiceUnavailable),
    (exceptions.AccessDenied,
     glance_exceptions.RemoteServiceUnavailable),
    (exceptions.VersionError,
     glance_exceptions.RemoteServiceUnavailable),
    (exceptions.BusyError, glance_exceptions.RemoteServiceUnavailable),
    (exceptions.ClosedError,
     glance_exceptions.RemoteServiceUnavailable),
])
def test_repository_errors_of_reads(store, monkeypatch, raised, expected):
    url = add(b'abc')[0]
    real = repo(store)

    def fail(*args):
        raise raised('words')

    monkeypatch.setattr(store, '_repository', types.SimpleNamespace(
        open_image=fail, stat=fail, read_keys=real.read_keys,
        repository_id=real.repository_id))
    for call in (glance_store.get, glance_store.get_size_from_uri_and_backend):
        with pytest.raises(expected):
            call(url, 'one')


def test_a_download_is_noted_where_a_conversion_waits(store):
    """So the task knows of images that are downloaded often."""
    url = add(noise(MIB))[0]
    repository = repo(store)
    image_id, = repository.images()
    format_verdicts.write(repository.path, image_id, format_verdicts.Verdict(
        repository.stat(image_id).upload_id, 'it waits', since=0.0))
    path = os.path.join(repository.path, 'formats', image_id)
    os.utime(path, (1e9, 1e9))
    assert get(url) == noise(MIB)
    assert os.stat(path).st_mtime > 1.1e9
