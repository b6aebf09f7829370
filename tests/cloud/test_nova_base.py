# SPDX-License-Identifier: Apache-2.0
"""A real Nova boots servers from links in ``_base``, and downloads nothing.

Nova and libvirt are as they are. libvirt runs as another user than the mount,
and opens it as the backing file of the server's disk.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from dedupd.novabase import links
from tests.cloud import boot
from tests.cloud import cloud as cloud_module
from tests.cloud import test_cache
from tests.support import daemons
from tests.support import nbd

pytestmark = test_cache.pytestmark

HOST = test_cache.HOST
MIB = 1 << 20
#: Mbit/s at which an image is on its way for a while.
SLOW = 20
PROGRAM = ['-c', 'import sys; from dedupd.novabase import keeper, main; '
           'keeper.INTERVAL = 1; sys.exit(main.main())']


@pytest.fixture(scope='module')
def cloud():
    """One whose compute host has a cache, and links."""
    nbd.need('fusermount3')
    place = pathlib.Path(tempfile.mkdtemp(prefix='cloud-'))
    one = cloud_module.Cloud(place, hosts={HOST: True})
    cache = one.services[f'{HOST}/dedupd']
    base = one.services[f'{HOST}/nova-compute'].instances / '_base'
    mounted = place / 'mounted'
    cache.trusted = True
    cache.options = {'cloud': 'demo', 'nova_base': base,
                     'nova_mount': mounted}
    with contextlib.ExitStack() as undo:
        undo.callback(one.down)
        undo.callback(test_cache._keep_logs, place / 'log')
        one.up()
        base.mkdir(parents=True, exist_ok=True)
        with open(place / 'log' / 'nova-base', 'ab') as log:
            process = subprocess.Popen(
                [*one.hosts[HOST].enter(), sys.executable, *PROGRAM,
                 '--config-file', cache.etc / 'dedupd.conf'],
                cwd=daemons.ROOT, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env={
                    **os.environ, 'PYTHONPATH': str(daemons.ROOT),
                    'OS_CLIENT_CONFIG_FILE': str(one.clouds_yaml)})

        def end():
            process.kill()
            process.wait(test_cache.LIMIT)
            subprocess.run(['umount', '-l', mounted],
                           timeout=test_cache.LIMIT)

        undo.callback(end)
        test_cache.wait_until(lambda: os.path.ismount(mounted), 'no mount')
        yield one


@pytest.fixture
def sandbox(cloud, tmp_path):
    sandbox = test_cache.Sandbox(cloud, tmp_path)
    yield sandbox
    sandbox.close()


def linked(sandbox, image):
    """The image's name in ``_base``, once it is a link."""
    path = sandbox.compute.instances / '_base' / links.name_of(image)
    test_cache.wait_until(path.is_symlink, 'no link')
    return path


def whole(sandbox):
    return not sandbox.status()['under_way']


def test_a_server_starts_from_a_link(cloud, sandbox):
    image, said = sandbox.upload(own=76)
    path = linked(sandbox, image)
    size = sandbox.user.image.get_image(image).size
    sandbox.host.limit(SLOW)
    wire = test_cache.Wire(sandbox)
    server = sandbox.create(image)
    test_cache.wait_until(lambda: not whole(sandbox), 'no pull')

    # Whatever the server reads now waits until the daemon is back.
    sandbox.cache.kill()
    sandbox.cache.start()
    assert boot.wait_until_up(sandbox.user, server) == (said, 1)
    print(f'{wire.bytes()} of {size} bytes when it is up')
    assert path.is_symlink()
    # Only what was inspected came from Glance.
    assert set(test_cache.plain(cloud, image)) <= {MIB}

    sandbox.host.limit(None)
    test_cache.wait_until(lambda: whole(sandbox), 'it does not arrive')
    # What is here stays, without Glance's image and without the daemon.
    sandbox.user.image.delete_image(sandbox._images.pop())
    sandbox.cache.kill()
    sandbox.user.compute.reboot_server(server, 'HARD')
    test_cache.wait_until(
        lambda: boot.shown(sandbox.user, server) == (said, 2),
        'it does not start again')
    sandbox.cache.start()
    assert path.is_symlink()
