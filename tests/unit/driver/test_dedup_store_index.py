# SPDX-License-Identifier: Apache-2.0

"""The store with an index on a disk instead of the filter."""

from glance_store import exceptions
import pytest

from tests.support.stores import add
from tests.support.stores import configure  # noqa: F401
from tests.support.stores import get

DATA = bytes(range(256)) * 16 * 100


@pytest.mark.parametrize('index', ['lmdb', 'dtb'])
def test_an_index_on_a_disk(configure, tmp_path, index):     # noqa: F811
    directory = tmp_path / 'index'
    store = configure(one={'dedup_store_index': index,
                           'dedup_store_index_dir': directory})
    first, second = (add(DATA, name)[0] for name in ('first', 'second'))
    assert get(first) == get(second) == DATA
    found, = directory.glob(f'*.{index}/store')
    assert found.stat().st_size > 0
    assert not list(tmp_path.glob('*.filter'))
    assert store.conf.one.dedup_store_index == index


def test_no_directory(configure):     # noqa: F811
    store = configure(one={'dedup_store_index': 'lmdb'})
    with pytest.raises(exceptions.BadStoreConfiguration, match='index_dir'):
        store.configure_add()
