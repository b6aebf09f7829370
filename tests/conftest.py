# Licensed under the Apache License, Version 2.0 (the "License"); you may
# not use this file except in compliance with the License. You may obtain
# a copy of the License at
#
#      http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
# WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
# License for the specific language governing permissions and limitations
# under the License.
"""Options, time limits and the log's level, which all tests share."""

import logging
import pathlib

import pytest

TESTS = pathlib.Path(__file__).resolve().parent

# Seconds. A test that hangs must fail long before the whole run is given up.
# Tests share the processors with those beside them.
TIMEOUT = 300
LONG_TIMEOUT = 1800

# These are for tempest to run: see tests/cloud/test_tempest.py.
collect_ignore = ['tempest']


def pytest_addoption(parser):
    parser.addoption(
        '--long', action='store_true',
        help='also run the tests marked long, which take minutes')


def pytest_collection_modifyitems(config, items):
    skip = pytest.mark.skip(reason='takes minutes; run with --long')
    for item in items:
        is_long = item.get_closest_marker('long') is not None
        if is_long and not config.getoption('--long'):
            item.add_marker(skip)
        if item.get_closest_marker('timeout') is None:
            item.add_marker(pytest.mark.timeout(
                LONG_TIMEOUT if is_long else TIMEOUT))


def pytest_itemcollected(item):
    """Tests of one group run in one process, one after the other.

    Those of a file share its fixtures, those of ``cloud/`` the cloud.
    """
    path = item.path.relative_to(TESTS)
    item.add_marker(pytest.mark.xdist_group(
        path.parts[0] if path.parts[0] == 'cloud' else str(path)))


@pytest.fixture(scope='session', autouse=True)
def no_filters_left(tmp_path_factory):
    """Commands that the tests run make them in /dev/shm, as users' do."""
    yield
    from tests import repositories
    repositories.remove_filters(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def log_level():
    """The commands quieten the log of their whole process."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
