# SPDX-License-Identifier: Apache-2.0
"""A real Nova boots servers while its host's cache is dead, or dies.

Nova uses the relay, which is before the cache.
"""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from tests.cloud import boot
from tests.cloud import dedupd
from tests.cloud import test_cache
from tests.support import daemons

# Long: the first test starts all of OpenStack; servers boot without KVM.
pytestmark = test_cache.pytestmark

HOST = test_cache.HOST


@pytest.fixture(scope='module')
def cloud(cloud_with_host):
    """A cloud whose compute host has a relay before its cache."""
    one = cloud_with_host
    cache = one.services[f'{HOST}/dedupd']
    text = one.directory / 'log' / 'relay'
    with contextlib.ExitStack() as undo:
        undo.enter_context(cache.configured({
            'listen': f'127.0.0.1:{dedupd.CACHE_PORT + 1}',
            'relay_listen': f'127.0.0.1:{dedupd.CACHE_PORT}'}))
        with open(text, 'ab') as log:
            process = subprocess.Popen(
                [*one.hosts[HOST].enter(), sys.executable, '-m',
                 'dedupd.compute.relay.main', '--config-file',
                 cache.etc / 'dedupd.conf'], cwd=daemons.ROOT,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, 'PYTHONPATH': str(daemons.ROOT)})

        def end():
            process.kill()
            process.wait(test_cache.LIMIT)

        undo.callback(end)
        test_cache.wait_until(
            lambda: 'Passing requests on' in text.read_text(), 'no relay')
        yield one


@pytest.fixture
def sandbox(cloud, tmp_path):
    sandbox = test_cache.Sandbox(cloud, tmp_path)
    yield sandbox
    sandbox.close()


def size_of(sandbox, image):
    return sandbox.user.image.get_image(image).size


def test_images_come_from_the_cache(cloud, sandbox):
    image, said = sandbox.upload()
    assert sandbox.server(image)[1] == (said, 1)
    assert test_cache.plain(cloud, image) == []


def test_the_cache_is_dead_when_a_server_starts(cloud, sandbox):
    image, said = sandbox.upload()
    sandbox.cache.kill()
    try:
        assert sandbox.server(image)[1] == (said, 1)
    finally:
        sandbox.cache.start()
    assert test_cache.plain(cloud, image) == [size_of(sandbox, image)]


@pytest.mark.parametrize('number', [
    signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_the_cache_dies_amid_a_start(cloud, sandbox, number):
    image, said = sandbox.upload(test_cache.MUCH)
    pid = sandbox.cache.client().status()['daemon']['pid']
    with test_cache.half_way(sandbox, image) as server:
        os.kill(pid, number)
    try:
        assert boot.wait_until_up(sandbox.user, server) == (said, 1)
    finally:
        sandbox.cache.kill()
        sandbox.cache.start()
    # All of it, so that the first part could be compared.
    assert test_cache.plain(cloud, image) == [size_of(sandbox, image)]


@pytest.mark.long
def test_a_snapshot_is_made_without_the_cache(cloud, sandbox):
    image, said = sandbox.upload()
    server, _ = sandbox.server(image)
    sandbox.cache.kill()
    try:
        snapshot = sandbox.snapshot(server)
    finally:
        sandbox.cache.start()
    assert sandbox.server(snapshot)[1] == (said, 2)
