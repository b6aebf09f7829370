# SPDX-License-Identifier: Apache-2.0

"""Repositories, and hooks for calls, that the tests of the protocol share.

The rules are N1 to N11 (``protocol.rst``) and I1 to I13 (``design.rst``).
The maintainer's part is played by the test. Between any two system calls of
the process under test it can lock, unlink or replace something.
"""

import errno
import hashlib
import shutil
import zlib

import pytest

from tests.functional import watched_process
from tests.support import repositories
from tests.support.repositories import create
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put

BLOCK = 512
LEASE = 1
SHARE = repositories.SHARE_BYTE + 1
SIZE = 10 * BLOCK


@pytest.fixture(scope='module')
def witness(tmp_path_factory):
    witness = watched_process.Witness(
        watched_process.build(tmp_path_factory.mktemp('witness')))
    yield witness
    witness.close()


@pytest.fixture
def path(tmp_path):
    path = create(tmp_path / 'repository', block_size=BLOCK, group_slots=64,
                  segment_size=4 * BLOCK)
    yield path


@pytest.fixture
def coarse(tmp_path):
    """A repository with larger groups, which are made less often."""
    return create(tmp_path / 'coarse', group_slots=64)


def store(path, *images):
    """Put images of (id, seed), with a handle that ends."""
    with open_repository(path, codec='none') as repo:
        for image_id, seed in images:
            put(repo, image_id, noise(SIZE, seed))


def sha(seed, size=SIZE):
    return hashlib.sha256(noise(size, seed)).hexdigest()


def is_made(call, name, path=None, *more):
    return call.result is not None and call.is_(name, path, *more)


def is_coming(call, name, path=None, *more):
    return call.result is None and call.is_(name, path, *more)


class Once:
    """A hook that does something at the first call of a kind."""

    def __init__(self, condition, action):
        self.condition = condition
        self.action = action
        self.happened = 0

    def __call__(self, call):
        if not self.happened and self.condition(call):
            self.happened += 1
            return self.action(call)
        return None


FAULTS = pytest.mark.parametrize('fault', [
    pytest.param('kill', id='kill'),
    pytest.param(errno.EIO, id='EIO'),
    pytest.param(errno.ENOSPC, id='ENOSPC'),
    pytest.param(errno.EMFILE, id='EMFILE'),
])


def sweep(witness, template, tmp_path, steps, fault, every, judge):
    """Do steps again and again; each time another call fails, or kills.

    :param every: 1: each call in turn, 2: every second one, and so on
    :param judge: is called with the repository and the run, each time
    """
    shutil.copytree(template, tmp_path / 'counted')
    run = witness.run(tmp_path / 'counted', steps)
    assert all(outcome['error'] is None for outcome in run.outcomes)
    judge(tmp_path / 'counted', run)
    total = len([call for call in run.calls if call.result is None])
    assert total > 100
    start = 0 if every == 1 else zlib.crc32(str(fault).encode()) % every
    for number in range(start, total, every):
        place = tmp_path / f'n{number}'
        shutil.copytree(template, place)
        seen = -1

        def fail(call, number=number):
            nonlocal seen
            if call.result is not None:
                return 0
            seen += 1
            if seen != number or call.name == 'close':
                return 0
            return watched_process.KILL if fault == 'kill' else fault
        run = witness.run(place, steps, fail)
        assert run.status == (-9 if len(run.outcomes) < len(steps) else 0)
        judge(place, run)
        shutil.rmtree(place)
        shutil.rmtree(tmp_path / f'n{number}-filter')
