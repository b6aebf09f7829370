# SPDX-License-Identifier: Apache-2.0

"""The thread that has the host's filter follow other hosts."""

import logging
import time

import pytest

from dedupd.sync import filter_follower
from glance_dedup.base import exceptions
from tests.support import repositories
from tests.unit.repository import fixtures

path = fixtures.path


def test_it_follows(path, monkeypatch):
    monkeypatch.setattr(filter_follower, 'INTERVAL', 0.05)
    data = repositories.noise(512 * 200)
    with (repositories.open_repository(path) as here,
          repositories.open_repository(
              path, filter_dir=str(path.parent / 'other')) as there):
        repositories.put(here, 'one', b'x')
        follower = filter_follower.Follower(here)
        follower.start()
        repositories.put(there, 'first', data)
        stored = time.monotonic()
        repositories.eventually(
            lambda: time.monotonic() - here.statistics()[
                'filter_refresh_age_seconds']
            > stored)
        follower.stop()
        assert follower.join(60)
        assert repositories.put(here, 'second', data).new_bytes == 0


def test_it_ends_before_it_was_started(path):
    with repositories.open_repository(path) as repo:
        follower = filter_follower.Follower(repo)
        follower.stop()
        assert follower.join(0)


class Repository:
    """A repository whose calls fail as the test prescribes."""

    def __init__(self, errors):
        self.errors = errors
        self.calls = 0

    def follow(self):
        self.calls += 1
        error = self.errors.pop(0)
        if error:
            raise exceptions.RepositoryError(error)
        return bool(self.errors)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO)
    return caplog


def test_an_error_is_told_once(log):
    repo = Repository(['broken', 'broken', 'worse', None])
    follower = filter_follower.Follower(repo)
    for _ in range(4):
        follower.run_once()
    assert [record.getMessage().split(': ')[-1] for record in log.records] == [
        'broken', 'worse', 'The filter follows other hosts again.']


def test_it_reads_all_there_is_unless_it_is_to_end():
    repo = Repository([None] * 5)
    follower = filter_follower.Follower(repo)
    follower.run_once()
    assert repo.calls == 5
    repo = Repository([None] * 5)
    follower = filter_follower.Follower(repo)
    follower.stop()
    follower.run_once()
    assert repo.calls == 1
