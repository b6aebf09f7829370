# SPDX-License-Identifier: Apache-2.0

"""Copies of images within a repository share blocks."""

import hashlib
import random

import pytest

from dedupd.tasks import collector
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from tests.support import maintenance
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put
from tests.support.repositories import read_all

UNIT = 4096
DATA = repositories.mixture(600_123, seed=3, unit=UNIT)


@pytest.fixture(params=['fingerprint', 'bytes'])
def path(tmp_path, request):
    return repositories.create(tmp_path / 'r', block_size=UNIT,
                               group_slots=64, verify=request.param)


@pytest.fixture
def repo(path):
    with repositories.open_repository(path) as opened:
        yield opened


def test_a_copy_is_the_same_image(repo):
    put(repo, 'one', DATA)
    before = repo.statistics()
    told = []
    with repo.open_image('one') as source:
        found = repo.copy(source, 'two', project='p', progress=told.append)
    after = repo.statistics()
    assert read_all(repo, 'two') == DATA
    assert (found.project, found.new_bytes, found.stored_bytes) == ('p', 0, 0)
    stat = repo.stat('one')
    assert (found.size, found.zero_bytes, found.extents, found.fragments) == (
        stat.size, stat.zero_bytes, stat.extents, stat.fragments)
    assert found.upload_id != stat.upload_id
    assert told == [len(DATA)]
    assert after['bytes_read'] == before['bytes_read']
    assert after['misses'] == before['misses']


def test_the_hash_is_copied(repo):
    digest = hashlib.sha512(DATA)
    with repo.begin('one') as transaction:
        transaction.write(DATA)
        transaction.set_hash('sha512', digest.digest())
        transaction.commit()
    with repo.open_image('one') as source:
        found = repo.copy(source, 'two')
    assert (found.hash_name, found.hash_value) == (
        'sha512', digest.hexdigest())


def test_another_scope_shares_nothing(repo):
    put(repo, 'one', DATA)
    told = []
    with repo.open_image('one') as source:
        found = repo.copy(source, 'two', 'p', 'project', told.append)
    assert read_all(repo, 'two') == DATA
    assert found.new_bytes > 0
    assert told[-1] == len(DATA)
    assert found.scope != repo.stat('one').scope


def test_progress_is_reported_where_bytes_are_stored(repo):
    data = repositories.noise(UNIT) + bytes(UNIT)
    size = put(repo, 'one', 200 * data).size
    for image_id, scope, times in (('two', 'global', 1),
                                   ('three', 'project', 4)):
        told = []
        with repo.open_image('one') as source:
            repo.copy(source, image_id, 'p', scope, told.append)
        assert len(told) == times
        assert told == sorted({*told}) and told[-1] == size
        assert read_all(repo, image_id) == 200 * data


def test_an_empty_image(repo):
    put(repo, 'one', b'')
    for image_id, scope in ('two', 'global'), ('three', 'project'):
        with repo.open_image('one') as source:
            assert repo.copy(source, image_id, 'p', scope).size == 0


def test_a_copy_outlives_the_first(path):
    """Accounting counts a copy; collection frees no block of it."""
    with repositories.open_repository(path) as repo:
        put(repo, 'one', DATA)
        with maintenance.maintaining(repo) as maintainer:
            maintenance.account(maintainer)
            with repo.open_image('one') as source:
                repo.copy(source, 'two')
            repo.delete('one')
            maintenance.account(maintainer)
            assert collector.run_once(
                maintainer, pacing.Pace()).freed_blocks == 0
        assert read_all(repo, 'two') == DATA
    assert checker.check(path).findings == []


def test_any_parts(repo):
    put(repo, 'one', DATA)
    rng = random.Random(5)
    wanted = b''
    with (repo.open_image('one') as source,
          repo.begin('two') as transaction):
        for _ in range(30):
            start = rng.randrange(len(DATA) + 1)
            end = rng.randrange(start, len(DATA) + 1)
            stored = transaction.add_runs(source, start, end)
            assert stored <= 2 * UNIT
            wanted += DATA[start:end]
        transaction.commit()
    assert read_all(repo, 'two') == wanted


@pytest.mark.parametrize('start, end', [
    (-1, 5), (0, len(DATA) + 1), (6, 5), (0, 1 << 63), (1 << 70, 1 << 71)])
def test_a_range_that_is_not_there(repo, start, end):
    put(repo, 'one', DATA)
    with (repo.open_image('one') as source,
          repo.begin('two') as transaction):
        with pytest.raises(exceptions.InvalidParameter):
            transaction.add_runs(source, start, end)
        transaction.add_runs(source, 0, len(DATA))
        transaction.commit()
    assert read_all(repo, 'two') == DATA


def test_images_that_cannot_be_the_source(path, repo):
    put(repo, 'one', DATA)
    with repositories.open_repository(path) as other:
        with other.open_image('one') as theirs, repo.begin('two') as begun:
            with pytest.raises(exceptions.InvalidParameter,
                               match='another handle'):
                begun.add_runs(theirs, 0, 1)
    source = repo.open_image('one')
    source.close()
    with repo.begin('two') as begun:
        with pytest.raises(exceptions.ClosedError):
            begun.add_runs(source, 0, 1)
    assert repo.images() == ['one']


def test_an_id_that_exists(repo):
    put(repo, 'one', DATA)
    put(repo, 'two', noise(5000))
    with repo.open_image('one') as source:
        for image_id in 'one', 'two':
            with pytest.raises(exceptions.ImageExists):
                repo.copy(source, image_id)
    assert read_all(repo, 'two') == noise(5000)
