# SPDX-License-Identifier: Apache-2.0

"""Repositories for the tests of the API."""

import os
import pathlib
import shutil
import tempfile

import pytest

from tests.support.repositories import create
from tests.support.repositories import open_repository

NOBODY = 65534


@pytest.fixture
def path(tmp_path):
    """A repository in which a group is soon full."""
    return create(tmp_path / 'repository', block_size=512, group_slots=64,
                  segment_size=4096)


@pytest.fixture
def repo(path):
    with open_repository(path) as repo:
        yield repo


@pytest.fixture
def large(tmp_path):
    """A repository with default parameters."""
    path = create(tmp_path / 'large')
    with open_repository(path) as repo:
        yield repo


@pytest.fixture
def public_tmp():
    """A directory that another user can reach."""
    if os.geteuid() != 0:
        pytest.skip('changing the user needs root')
    # pytest's own directories are closed to others.
    path = pathlib.Path(tempfile.mkdtemp(prefix='public-'))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
