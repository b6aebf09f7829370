#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""The fixtures of the tests of the maintainer and of its tasks.

A module asks for them with ``pytest_plugins``, and may replace some by its
own: those of a tests/unit/conftest.py would need the engine built for all
tests, also for those that build it.
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
