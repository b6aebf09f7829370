# SPDX-License-Identifier: Apache-2.0

"""The fixtures of the tests of the maintainer and of its tasks.

A module requests them with ``pytest_plugins``, and may replace some by its
own: the fixtures of a tests/unit/conftest.py would need the built engine for
all tests, also for the tests that build it.
"""

import pytest

from tests.support import maintenance
from tests.support import repositories


@pytest.fixture
def path(tmp_path):
    return maintenance.create(tmp_path)


@pytest.fixture
def repo(path):
    with repositories.open_repository(path, codec='none') as repo:
        yield repo


@pytest.fixture
def other(path):
    """Another process's handle."""
    with repositories.open_repository(path, codec='none') as repo:
        yield repo


@pytest.fixture
def maintainer(repo):
    with maintenance.maintaining(repo) as maintainer:
        yield maintainer
