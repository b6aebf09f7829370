# SPDX-License-Identifier: Apache-2.0
"""The machine of the roots; and one in which the plugin is installed."""

import os

import pytest

from tests.devstack import roots


@pytest.fixture(scope='package')
def machine():
    if os.geteuid() != 0:
        pytest.skip('roots of their own need root')
    machine = roots.Machine()
    yield machine
    machine.close()


@pytest.fixture(scope='package')
def installed(machine):
    """A root to build on: the package is installed, Glance has a database."""
    with machine.root() as root:
        root.local_conf()
        root.stack('install')
        root.make_database()
    return root


@pytest.fixture
def root(machine, installed):
    """A root in which stack.sh has nothing more to install."""
    with machine.root(on=installed) as root:
        yield root
