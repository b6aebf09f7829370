# SPDX-License-Identifier: Apache-2.0
"""The cloud that the tests share."""

import contextlib
import os
import pathlib
import shutil
import tempfile

import pytest

from tests.cloud import cloud as cloud_module
from tests import needs

LOGS = pathlib.Path(__file__).resolve().parents[2] / '.log' / 'cloud'


@pytest.fixture(scope='session')
@needs.of('cloud')
def cloud():
    """All services, up. Who stops one starts it again.

    Their logs are left in ``.log/cloud/``, below the name of the process that
    runs the tests.
    """
    # Not pytest's own directory: a socket's path has to be short.
    place = pathlib.Path(tempfile.mkdtemp(prefix='cloud-'))
    one = cloud_module.Cloud(place)
    with contextlib.ExitStack() as undo:
        undo.callback(one.down)
        undo.callback(_keep_logs, place / 'log')
        one.up()
        yield one


def _keep_logs(log):
    kept = LOGS / os.environ.get('PYTEST_XDIST_WORKER', 'main')
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(log, kept)
