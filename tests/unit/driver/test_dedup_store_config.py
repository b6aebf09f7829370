# SPDX-License-Identifier: Apache-2.0

"""The store: its options and the repository that they describe."""

import errno
import io
import os
import socket

import glance_store
from glance_store import driver
from glance_store import exceptions
from glance_store import multi_backend
from oslo_config import cfg
import pytest

from glance_dedup.base import filesystem
from glance_dedup.driver import dedup_store
from glance_dedup.repository import image_repository
from tests.support.repositories import noise
from tests.support import stores
from tests.support.stores import add
from tests.support.stores import assert_nothing_left
from tests.support.stores import get
from tests.support.stores import GOOD
from tests.support.stores import options
from tests.support.stores import refused
from tests.support.stores import repo

CONF = cfg.CONF
MIB = 1 << 20

configure = stores.configure
store = stores.store


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


def test_set_acls_is_not_there(store):
    """The store raises NotImplementedError, which Glance accepts.

    Glance calls set_acls each time that it saves an image.
    """
    url = add(b'data')[0]
    glance_store.set_acls_for_multi_store(url, 'one', public=True)
    with pytest.raises(NotImplementedError):
        store.set_acls(None)


def test_two_stores(configure):
    one, two = configure(one={}, two={})
    assert one.url_prefix != two.url_prefix
    first, second = add(b'1', backend='one')[0], add(b'2', backend='two')[0]
    assert (get(first, 'one'), get(second, 'two')) == (b'1', b'2')
    # Without the store's name, Glance searches all stores.
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


@pytest.mark.parametrize('chosen', [
    {}, {'block_size': 8192, 'group_slots': 128, 'segment_size': 131072,
         'fingerprint': 'xxh3-128', 'verify': 'bytes'},
    {'chunking': 'content-defined'}, {'group_access': True}], ids=str)
def test_a_repository_of_any_kind_is_used(configure, tmp_path, chosen):
    image_repository.Repository.create(str(tmp_path / 'one'), **chosen)
    store = configure(one={})
    assert repo(store).group_access == ('group_access' in chosen)
    assert get(add(b'data')[0]) == b'data'


def test_the_adaptive_compression_where_told_to(configure):
    assert options(configure(one={}))['adaptive_compression'] is False
    store = configure(one={'dedup_store_adaptive_compression': True})
    assert options(store)['adaptive_compression'] is True


@pytest.mark.parametrize('chosen, meant', [
    (None, 'auto'), ('auto', 'auto'), ('on', 'on'), ('off', 'off')])
def test_beside_the_page_cache_where_told_to(configure, chosen, meant):
    store = configure(one={} if chosen is None
                      else {'dedup_store_direct_io': chosen})
    assert options(store)['direct_io'] == ('off', 'on', 'auto').index(meant)
    data = noise(3 * MIB + 77)
    assert b''.join(glance_store.get(add(data)[0], 'one')[0]) == data


def test_threads_are_those_of_the_machine_unless_told_otherwise(configure):
    wanted = min(4, len(os.sched_getaffinity(0)))
    assert options(configure(one={}))['threads'] == wanted
    store = configure(one={'dedup_store_threads': 7})
    assert options(store)['threads'] == 7


@pytest.mark.skipif(
    not hasattr(driver, 'BackendGroupConfiguration'),
    reason='this glance_store has no [backend_defaults]')
def test_options_for_all_stores(configure, tmp_path):
    configure(backend_defaults={'type': 'http'})
    CONF.set_override('dedup_store_threads', 7, 'backend_defaults')
    one, two = configure(one={}, two={'dedup_store_threads': 3})
    assert options(one)['threads'] == 7
    assert options(two)['threads'] == 3


def test_file_system_without_locks(configure, monkeypatch):
    """The store is disabled, and the error gives the reason."""
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
    {'dedup_store_datadir': '/a\0b'},
    {'dedup_store_datadir': ''},
    {'dedup_store_codec': 'lz4', 'dedup_store_codec_level': 3},
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
    ('filter_mib', '0'), ('filter_mib', 'x'), ('codec', 'gzip'),
    ('timeout', '-1'), ('threads', '-1'), ('threads', '0'),
    ('codec_level', '20')])
def test_values_that_do_not_parse(configure, tmp_path, name, value):
    """A value that does not parse disables the store.

    The option's type sees a value from a file only when it is read.
    """
    path = tmp_path / 'glance.conf'
    path.write_text(f'[one]\ndedup_store_{name} = {value}\n')
    CONF([], default_config_files=[str(path)])
    store = configure(one={f'dedup_store_{name}': ...})
    with pytest.raises(exceptions.BadStoreConfiguration) as caught:
        store.configure_add()
    assert name in str(caught.value)


def test_a_known_size_must_have_room(configure):
    """An upload is refused at once if its known size does not fit.

    An upload of unknown size starts.
    """
    store = configure(one={'dedup_store_required_percent': 50})
    opened = repo(store)
    free, kept = opened.room()
    size = 2 * (free - kept)
    for much in (size + (1 << 40), size * 2):
        with pytest.raises(exceptions.StorageFull, match='are kept'):
            add(b'data', size=much)
    assert_nothing_left(store)
    # Half of that would fit, so the source is read and proves too short.
    with pytest.raises(exceptions.Invalid, match='only 4'):
        add(b'data', size=size // 2)
    assert get(add(io.BytesIO(b'data'), 'other', size=0)[0]) == b'data'


def test_no_share_of_a_known_size_is_asked_for_by_default(configure):
    configure(one={})
    with pytest.raises(exceptions.Invalid, match='only 4'):
        add(b'data', size=1 << 60)


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
    """A missing mount disables adding; reads work when the mount is there."""
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


def test_no_socket_is_opened(configure, monkeypatch):
    """The store opens no socket if no daemon is configured."""
    def fail(*args, **kwargs):
        raise AssertionError('socket')

    configure(one={'dedup_store_dedupd_socket': ''})
    monkeypatch.setattr(socket, 'socket', fail)
    assert get(add(b'data')[0]) == b'data'
