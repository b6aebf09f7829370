# SPDX-License-Identifier: Apache-2.0

"""Hints for uploads are given, or inferred from the first bytes."""

import array
import fcntl
import gzip
import io
import re

import pytest

from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.repository import fixtures

MIB = 1 << 20

path = fixtures.path
repo = fixtures.repo
large = fixtures.large


def test_said(large):
    data = noise(MIB)
    for name in ('one', 'two'):
        assert put(large, name, data, dedup=False).new_bytes == MIB
        assert read_all(large, name) == data
    figures = large.statistics()
    assert figures['skipped'] == 2 * MIB // 4096
    assert (figures['hits'], figures['filter_hints']) == (0, 0)
    # No upload finds these blocks (I14).
    assert put(large, 'three', data).new_bytes == MIB
    assert put(large, 'four', data).new_bytes == 0


def test_beside_an_older_program(large, caplog):
    """Its blocks are ordinary ones, and a warning says so."""
    data = noise(MIB)
    with open(f'{large.path}/locks/groups', 'r+b') as older:
        assert repositories.set_lock(
            older.fileno(), repositories.FEATURE_BYTE + 3, fcntl.F_RDLCK)
        put(large, 'one', data, dedup=False)
    [found] = caplog.records
    assert re.search('Image one: .*older programs', found.getMessage())
    assert large.statistics()['unmarked'] == MIB // 4096
    assert put(large, 'two', data).new_bytes == 0
    put(large, 'three', data, dedup=False)
    assert len(caplog.records) == 1


def test_the_repository_is_closed_meanwhile(large):
    """A commit that is done does not raise."""
    data = noise(MIB)
    with large.begin('one', dedup=False) as transaction:
        transaction.write(data)
        large.close()
        assert transaction.commit().size == MIB
    with open_repository(large.path) as again:
        assert read_all(again, 'one') == data


@pytest.mark.parametrize('piece', [MIB, 700, 5 * MIB])
def test_inferred(large, piece):
    """The same file is found again; other files are not looked up."""
    packed = [gzip.compress(noise(6 * MIB, seed), 1) for seed in (1, 2)]

    def store(name, data):
        with large.begin(name) as transaction:
            transaction.write(b'')
            for at in range(0, len(data), piece):
                transaction.write(data[at:at + piece])
            return transaction.commit().new_bytes
    assert store('one', packed[0]) == len(packed[0])
    blocks = -(-len(packed[0]) // 4096)
    assert large.statistics()['skipped'] == blocks
    assert store('same', packed[0]) == 0
    assert store('other', packed[1]) == len(packed[1])
    assert large.statistics()['skipped'] >= 2 * blocks - 1
    assert store('plain', noise(MIB, 3)) == MIB
    assert large.statistics()['skipped'] >= 2 * blocks - 1
    assert read_all(large, 'other') == packed[1]


def test_first_bytes_of_any_type(repo):
    """The hints also read the first bytes of other buffers."""
    with repo.begin('one') as transaction:
        transaction.write(array.array('Q', range(1000)))
        transaction.commit()
    with repo.begin('two') as transaction, pytest.raises(TypeError):
        transaction.write('text')


def test_without_a_filter(path):
    packed = gzip.compress(noise(MIB), 1)
    with open_repository(path, filter_dir='/dev/null') as repo, (
            pytest.warns(RuntimeWarning, match='filter')):
        for name in ('one', 'two'):
            found = repo.put(name, io.BytesIO(packed))
            assert found.new_bytes == len(packed)
        assert read_all(repo, 'two') == packed
