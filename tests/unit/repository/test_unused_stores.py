# SPDX-License-Identifier: Apache-2.0

"""Stores in a directory of indexes are removed if they are unused."""

import os
import time

import pytest

from glance_dedup.repository import filters
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.unit.repository import fixtures

path = fixtures.path

STORES = ('lmdb', 'dtb', 'leveldb')


@pytest.fixture(params=STORES)
def index(request):
    return request.param


@pytest.fixture
def directory(tmp_path):
    return tmp_path / 'index'


def use(path, directory, index, image_id):
    with open_repository(path, index=index, index_dir=directory) as repo:
        put(repo, image_id, noise(5000))


def age(directory, seconds):
    for file in directory.glob('*/*.users'):
        then = time.time() - seconds
        os.utime(file, (then, then))


def left(directory):
    return sorted(os.fspath(file.relative_to(directory)).partition('.')[2]
                  for file in directory.rglob('*') if file.is_file())


def test_another_index_is_chosen(path, directory, index):
    """The index in use removes the one that was used before."""
    use(path, directory, index, 'one')
    age(directory, filters.UNUSED - 100)
    use(path, directory, 'filter', 'two')
    assert f'{index}/store.users' in left(directory)
    age(directory, filters.UNUSED + 100)
    use(path, directory, 'filter', 'three')
    assert left(directory) == []


def test_the_index_itself(path, directory, index):
    """An index that was long unused is removed, and made again."""
    use(path, directory, index, 'one')
    age(directory, filters.UNUSED + 100)
    use(path, directory, index, 'two')
    assert f'{index}/store.users' in left(directory)
    age(directory, 0)
    use(path, directory, 'filter', 'three')
    assert f'{index}/store.users' in left(directory)


def test_one_that_is_open(path, directory, index):
    """An open index is not removed, however long ago it was opened."""
    with open_repository(path, index=index, index_dir=directory) as repo:
        put(repo, 'one', noise(5000))
        age(directory, filters.UNUSED + 100)
        use(path, directory, 'filter', 'two')
        assert f'{index}/store.users' in left(directory)
        assert put(repo, 'three', noise(5000)).new_bytes == 0
    use(path, directory, 'filter', 'four')    # closing it was a use
    assert f'{index}/store.users' in left(directory)


def test_what_is_no_store(path, directory):
    """Files that do not have a store's name are left alone."""
    use(path, directory, 'dtb', 'one')
    found, = directory.glob('*.dtb')
    (found / 'notes').write_text('x')
    (directory / 'other.dtb').mkdir()
    (directory / 'other.dtb' / 'store.users').write_text('x')
    age(directory, filters.UNUSED + 100)
    use(path, directory, 'filter', 'two')
    assert left(directory) == ['dtb/notes', 'dtb/store.users']


def test_while_one_removes_it(path, directory, index):
    """Opening an index fails while it is removed, and works later."""
    use(path, directory, index, 'one')
    users, = directory.glob('*/store.users')
    with open_repository(path, index=index, index_dir=directory) as repo:
        with open(users, 'r+b') as f:
            assert filters.filesystem.lock(f.fileno(), filters.fcntl.F_WRLCK,
                                           filters._USED)
            with pytest.warns(RuntimeWarning, match='is being removed'):
                put(repo, 'two', noise(5000))
        repo.filter._again = 0.0
        assert put(repo, 'three', noise(5000)).new_bytes == 0
        assert repo.filter.error is None
