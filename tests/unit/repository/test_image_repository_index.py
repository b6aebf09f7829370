# SPDX-License-Identifier: Apache-2.0

"""The API can use a host's key-value store instead of the filter."""

import os
import subprocess
import sys
import warnings

import pytest

from glance_dedup.base import exceptions
from glance_dedup.repository import hostfilter
from glance_dedup.repository import image_repository
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.repository import fixtures

path = fixtures.path

STORES = ('lmdb', 'dtb')
DATA = noise(512 * 200)     # in four groups: as many as a batch loads


@pytest.fixture(params=STORES)
def index(request):
    return request.param


def directory(path):
    return path.parent / 'index'


def store_file(path, index):
    found, = directory(path).glob(f'*.{index}/store')
    return found


def open_with(path, index, **options):
    return open_repository(path, index=index, index_dir=directory(path),
                           **options)


def wait_for_filling(repo):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        repo.filter.complete(repo.handle())
    if repo.filter._thread is not None:
        repo.filter._thread.join(60)


def test_duplicates_are_found(path, index):
    with open_with(path, index) as repo:
        assert put(repo, 'first', DATA).new_bytes == len(DATA)
    with open_with(path, index) as repo:
        assert put(repo, 'second', DATA).new_bytes == 0
        assert read_all(repo, 'second') == DATA
        assert repo.statistics()['candidates'] > 0
    assert not (path.parent / f'{path.name}-filter').exists()
    assert store_file(path, index).stat().st_mode & 0o777 == 0o600


def test_what_was_stored_before(path, index):
    """An index that is made later gets the blocks that exist."""
    with open_repository(path) as repo:
        put(repo, 'first', DATA)
    with open_with(path, index) as repo:
        wait_for_filling(repo)
        assert put(repo, 'second', DATA).new_bytes == 0
        assert repo.statistics()['filter_complete']
    with open_with(path, index) as repo:
        repo.filter.attach(repo.handle())
        assert repo.statistics()['filter_complete']
        # An index of one process has not been refreshed in this one.
        looked = repo.statistics()['filter_refresh_age_seconds']
        assert looked is None if index == 'dtb' else looked < 60


def test_the_table_of_dtb_follows_the_repository(path, monkeypatch):
    """The table of DTB grows with the repository."""
    monkeypatch.setattr(hostfilter, '_MIN_BITS', 12)
    sizes = []
    for number in range(1, 4):
        with open_with(path, 'dtb') as repo:
            wait_for_filling(repo)
            sizes.append(store_file(path, 'dtb').stat().st_size)
            for image in range(1, number):
                # These blocks are in four groups: as many as a batch loads.
                assert not put(repo, f'again-{image}-{number}', noise(
                    512 * 4000, image)[:512 * 200]).new_bytes
            put(repo, f'image-{number}', noise(512 * 4000, number))
            assert repo.statistics()['filter_dropped'] == 0
    assert sizes[0] < sizes[1] < sizes[2] < 1 << 20


@pytest.mark.parametrize('index', ['dtb', 'leveldb', 'lmdb', 'inram'],
                         indirect=True)
def test_what_others_store_at_the_same_time(path, index, monkeypatch):
    """The index gets blocks of other hosts, and of other indexes."""
    data = [noise(512 * 200, n) for n in range(3)]
    with (open_with(path, index) as repo,
          open_repository(path) as other):
        put(repo, 'one', b'x')
        wait_for_filling(repo)
        put(other, 'first', data[0])
        assert put(repo, 'missed', data[0]).new_bytes == len(data[0])
        monkeypatch.setattr(hostfilter, '_FOLLOW_MS', 0)
        put(other, 'second', data[1])
        assert put(repo, 'found', data[1]).new_bytes == 0
        assert repo.statistics()['filter_refresh_age_seconds'] < 60
        # The process still finds its own blocks.
        put(repo, 'third', data[2])
        assert put(repo, 'again', data[2]).new_bytes == 0


@pytest.mark.parametrize('index', ['dtb', 'leveldb'], indirect=True)
def test_what_others_stored_meanwhile(path, index):
    """An index of one process gets other processes' blocks on opening."""
    with open_repository(path) as repo:
        put(repo, 'first', DATA)
    with open_with(path, index) as repo:
        wait_for_filling(repo)
    with open_repository(path) as repo:
        put(repo, 'other', noise(512 * 200, 2))
    with open_with(path, index) as repo:
        repo.filter.attach(repo.handle())
        # The groups that were read are not read again.
        assert repo.statistics()['filter_rebuilt'] > 0
        wait_for_filling(repo)
        assert put(repo, 'second', noise(512 * 200, 2)).new_bytes == 0
        assert repo.statistics()['filter_complete']


@pytest.mark.parametrize('index', ['filter', *STORES], indirect=True)
def test_scattered_blocks(path, index):
    """An exact index finds scattered blocks without their groups' stores."""
    data = noise(64 * 40 * 512)
    with open_with(path, index) as repo:
        put(repo, 'first', data)
    with open_with(path, index) as repo:
        scattered = b''.join(data[i:i + 512]
                             for i in range(0, len(data), 64 * 512))
        new = put(repo, 'second', scattered).new_bytes
        assert read_all(repo, 'second') == scattered
        if index == 'filter':
            assert new > 0      # a batch loads four stores
        else:
            assert new == 0
            assert repo.statistics()['cold_loads'] == 0


def test_rebuilding(path, index):
    with open_with(path, index) as repo:
        put(repo, 'first', DATA)
        seen = []
        repo.rebuild_filter(lambda done, total: seen.append((done, total)))
        assert seen and seen[-1][0] == seen[-1][1] > 0
        assert put(repo, 'second', DATA).new_bytes == 0


@pytest.mark.parametrize('content', [b'', b'nonsense' * 5000])
def test_a_file_that_is_something_else(path, index, content):
    with open_with(path, index) as repo:
        put(repo, 'first', DATA)
    store_file(path, index).write_bytes(content)
    with open_with(path, index) as repo:
        wait_for_filling(repo)
        assert put(repo, 'second', DATA).new_bytes == 0


def test_hints_to_blocks_that_are_gone(path, index):
    """Hints to missing blocks are dropped; the blocks are stored again."""
    with open_with(path, index) as repo:
        put(repo, 'first', DATA)
    for group in (path / 'groups').iterdir():
        group.unlink()
    with open_with(path, index) as repo:
        assert put(repo, 'second', DATA).new_bytes == len(DATA)
        assert put(repo, 'third', DATA).new_bytes == 0
        assert read_all(repo, 'third') == DATA


OTHER = '''
import sys, warnings
warnings.simplefilter('ignore', RuntimeWarning)
from glance_dedup.repository import image_repository
path, index, directory, data = sys.argv[1:]
with image_repository.Repository(
        path, index=index, index_dir=directory) as repo:
    stat = repo.put('other', data)
    print(stat.new_bytes, repo.filter.error or '')
'''


def test_another_process(path, index):
    """LMDB serves a second process at the same time; DTB refuses it."""
    file = path.parent / 'data'
    file.write_bytes(DATA)
    with open_with(path, index) as repo:
        put(repo, 'first', DATA)
        result = subprocess.run(
            [sys.executable, '-c', OTHER, path, index, directory(path), file],
            capture_output=True, text=True, timeout=100, check=True)
        new, _, error = result.stdout.strip().partition(' ')
        if index == 'lmdb':
            assert (new, error) == ('0', '')
        else:
            assert int(new) == len(DATA)
            assert 'which serves only one' in error
        repo.delete('first')
        assert put(repo, 'last', DATA).new_bytes == 0


def test_a_child(path, index):
    """A child opens the store again, if it serves two processes."""
    with open_with(path, index) as repo:
        put(repo, 'first', DATA)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                warnings.simplefilter('ignore', RuntimeWarning)
                new = put(repo, 'child', DATA).new_bytes
                status = 0 if new == (0 if index == 'lmdb' else len(DATA)) \
                    else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert put(repo, 'second', DATA).new_bytes == 0
    with open_with(path, index) as repo:
        assert put(repo, 'third', DATA).new_bytes == 0


def test_a_directory_of_others(path, index):
    with open_with(path, index) as repo:
        put(repo, 'first', DATA)
    store_file(path, index).parent.chmod(0o777)
    with open_with(path, index) as repo:
        with pytest.warns(RuntimeWarning,
                          match=r'no fingerprint index, .*may change'):
            assert put(repo, 'second', DATA).new_bytes == len(DATA)


def test_settings(path):
    with pytest.raises(exceptions.InvalidParameter,
                       match='filter, lmdb, dtb, leveldb, inram'):
        image_repository.Repository(path, index='btree', index_dir=path.parent)
    with pytest.raises(exceptions.InvalidParameter, match='set index_dir'):
        image_repository.Repository(path, index='lmdb')
