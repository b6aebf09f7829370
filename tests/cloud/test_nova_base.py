# SPDX-License-Identifier: Apache-2.0
"""A real Nova boots servers from links in ``_base``, and downloads nothing.

Nova and libvirt are unchanged. libvirt runs as another user than the mount,
and opens it as the backing file of the server's disk.
"""

import hashlib
import time

import pytest

from tests.cloud import boot
from tests.cloud import dedupd
from tests.cloud import test_cache
from tests.support import nbd

# Long: the first test starts all of OpenStack; servers boot without KVM,
# and their images come over slow links.
pytestmark = test_cache.pytestmark

HOST = test_cache.HOST
MIB = 1 << 20
#: Mbit/s of the link while an image is on its way.
SLOW = 20
#: MiB of a large image. A quarter of it takes longer than a server needs to
#: start without KVM on a busy machine.
LARGE = 2048


@pytest.fixture(scope='module')
def base(cloud_with_host):
    """The process that makes links to the images on the compute host."""
    nbd.need('fusermount3')
    cache = cloud_with_host.services[f'{HOST}/dedupd']
    one = dedupd.NovaBase(cloud_with_host, cache)
    with cache.configured(one.options, trusted=True), one:
        yield one


@pytest.fixture(scope='module')
def cloud(cloud_with_host, base):
    return cloud_with_host


@pytest.fixture
def sandbox(cloud, tmp_path):
    sandbox = test_cache.Sandbox(cloud, tmp_path)
    yield sandbox
    sandbox.close()


def whole(sandbox):
    return not sandbox.status()['under_way']


def kill_cache(sandbox):
    """Kill and restart the cache; a server's reads wait until it is back."""
    sandbox.cache.kill()
    sandbox.cache.start()


def reboot(sandbox, server, said, boots):
    sandbox.user.compute.reboot_server(server, 'HARD')
    test_cache.wait_until(
        lambda: boot.shown(sandbox.user, server) == (said, boots),
        'it does not start again')


def test_a_server_starts_from_a_link(cloud, base, sandbox):
    image, said = sandbox.upload(own=76)
    path = base.link(image)
    sandbox.host.limit(SLOW)
    server = sandbox.create(image)
    test_cache.wait_until(lambda: not whole(sandbox), 'no pull')
    kill_cache(sandbox)
    assert boot.wait_until_up(sandbox.user, server) == (said, 1)
    assert path.is_symlink()
    # Only the inspected part came from Glance.
    assert set(test_cache.plain(cloud, image)) <= {MIB}

    sandbox.host.limit(None)
    test_cache.wait_until(lambda: whole(sandbox), 'it does not arrive')
    # The cached image stays, without Glance's image and without the daemon.
    sandbox.delete(image)
    sandbox.cache.kill()
    reboot(sandbox, server, said, 2)
    sandbox.cache.start()
    assert path.is_symlink()


@pytest.mark.long
def test_a_login_before_a_quarter_of_a_large_image(base, sandbox):
    """A login works early though daemon and image disappear meanwhile."""
    image, said = sandbox.upload(size=LARGE)
    base.link(image)
    sandbox.host.limit(SLOW)
    wire = test_cache.Wire(sandbox)
    server = sandbox.create(image)
    test_cache.wait_until(
        lambda: sandbox.user.compute.get_server(server).status == 'ACTIVE',
        'it does not start')
    kill_cache(sandbox)
    sandbox.delete(image)
    assert boot.wait_until_up(sandbox.user, server) == (said, 1)
    moved = wire.bytes()
    print(f'{moved / MIB:.0f} of {LARGE} MiB when it is up')
    assert not whole(sandbox)
    assert moved < LARGE * MIB / 4

    # The storing host keeps blocks that no other host has.
    sandbox.host.limit(None)
    test_cache.wait_until(lambda: whole(sandbox), 'it does not arrive')
    sandbox.cache.kill()
    reboot(sandbox, server, said, 2)
    sandbox.cache.start()


@pytest.mark.long
def test_the_link_is_down_for_a_minute(base, sandbox):
    image, said = sandbox.upload(own=76)
    base.link(image)
    sandbox.host.limit(SLOW)
    server = sandbox.create(image)
    test_cache.wait_until(
        lambda: sandbox.user.compute.get_server(server).status == 'ACTIVE',
        'it does not start')
    sandbox.host.connect(False)
    time.sleep(60)
    sandbox.host.connect(True)
    assert boot.wait_until_up(sandbox.user, server) == (said, 1)


def wait_until_shown(sandbox, server, wanted):
    test_cache.wait_until(
        lambda: boot.shown(sandbox.user, server) == wanted,
        f'it does not show {wanted}')


@pytest.mark.long
def test_rebuild_and_rescue(cloud, base, sandbox):
    """Rebuild and rescue find their images in the same place."""
    image, said = sandbox.upload()
    other, also = sandbox.upload()
    base.link(image)
    base.link(other)
    server = sandbox.create(image)
    assert boot.wait_until_up(sandbox.user, server) == (said, 1)
    compute = sandbox.user.compute
    compute.rebuild_server(server, image=other)
    wait_until_shown(sandbox, server, (also, 1))
    compute.wait_for_server(compute.get_server(server),
                            wait=test_cache.LIMIT)
    compute.rescue_server(server, image_ref=image)
    wait_until_shown(sandbox, server, (said, 1))
    compute.wait_for_server(compute.get_server(server), 'RESCUE',
                            wait=test_cache.LIMIT)
    compute.unrescue_server(server)
    wait_until_shown(sandbox, server, (also, 2))
    for used in (image, other):
        assert set(test_cache.plain(cloud, used)) <= {MIB}


def test_a_snapshot_sends_only_the_difference(cloud, sandbox, tmp_path):
    image, said = sandbox.upload(own=40)
    server, shown = sandbox.server(image)
    assert shown == (said, 1)
    before = sandbox.status()['uploads']['images']
    wire = test_cache.Wire(sandbox)
    snapshot = sandbox.snapshot(server)
    moved = wire.sent()
    found = sandbox.user.image.get_image(snapshot)
    print(f'{moved / MIB:.1f} of {found.size / MIB:.0f} MiB for a snapshot')
    assert sandbox.status()['uploads']['images'] == before + 1
    assert moved < found.size / 20
    with open(tmp_path / 'snapshot', 'w+b') as f:
        sandbox.user.image.download_image(snapshot, stream=False, output=f)
        f.seek(0)
        assert hashlib.file_digest(f, found.hash_algo).hexdigest() == (
            found.hash_value)
        assert f.tell() == found.size
    sandbox.forget()
    assert sandbox.server(snapshot)[1] == (said, 2)
