# SPDX-License-Identifier: Apache-2.0
"""The clouds that several tests share."""

import contextlib
import os
import pathlib
import shutil
import tempfile

import pytest

from tests.cloud import local_cloud
from tests import needs

LOGS = pathlib.Path(__file__).resolve().parents[2] / '.log' / 'cloud'


@pytest.fixture(scope='package')
@needs.of('cloud')
def cloud():
    """A cloud with all services up. A test that stops one starts it again."""
    with running() as one:
        yield one


@pytest.fixture(scope='package')
@needs.of('cloud')
def cloud_with_host():
    """A cloud whose compute host, c1, has a cache.

    A module may restart the cache, empty, with other options.
    """
    with running(hosts={'c1': True}) as one:
        yield one


@contextlib.contextmanager
def running(**arguments):
    """Yield a cloud that is up.

    The logs are left in ``.log/cloud/``, below the name of the process that
    runs the tests.
    """
    # Not pytest's own directory: a socket's path has to be short.
    place = pathlib.Path(tempfile.mkdtemp(prefix='cloud-'))
    one = local_cloud.Cloud(place, **arguments)
    with contextlib.ExitStack() as undo:
        undo.callback(one.down)
        undo.callback(_keep_logs, place / 'log')
        one.up()
        yield one


def _keep_logs(log):
    kept = LOGS / os.environ.get('PYTEST_XDIST_WORKER', 'main')
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(log, kept)
