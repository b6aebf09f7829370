# SPDX-License-Identifier: Apache-2.0

"""The fixtures of tests that need an object store, and one that fails.

A module requests them with ``pytest_plugins``, and may replace some by its
own.
"""

import pytest

from glance_dedup.objects import object_store
from tests.support import faulty_proxy
from tests.support import objects


@pytest.fixture(scope='module')
def server(tmp_path_factory):
    with objects.JuiceGateway(tmp_path_factory.mktemp('objects')) as running:
        yield running


@pytest.fixture(scope='module')
def proxy(server):
    with faulty_proxy.FaultyProxy(server.port) as running:
        yield running


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Do not wait between attempts."""
    monkeypatch.setattr(object_store, 'FIRST_WAIT', 0.001)


@pytest.fixture
def faults(proxy):
    """Faults of the next requests that go through the proxy."""
    proxy.faults.reset()
    yield proxy.faults
    proxy.faults.reset()
