# SPDX-License-Identifier: Apache-2.0
"""A real Nova boots servers through the cache of its compute host.

The host is in a network namespace; the bytes over its link are counted. Nova
has its usual settings, except for ``endpoint_override``.
"""

import contextlib
import hashlib
import os
import random
import subprocess
import time
import uuid

from openstack import exceptions as sdk
import pytest

from glance_dedup.repository import image_repository
from tests.cloud import boot
from tests.cloud import cloud_service
from tests.cloud import disk_images

# Long: the first test starts all of OpenStack; servers boot without KVM.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0,
                       reason='only root can make a network')]

HOST = 'c1'
MIB = 1 << 20
#: MiB that no other image has.
OWN = 4
#: Bytes of other messages between services during a server's start.
CHATTER = 2 * MIB
#: Mbit/s at which a download has a middle, and those at which it stays there;
#: bytes that are the middle; and MiB that no host has yet.
SLOW = 40
HELD = 1
MIDDLE = 16 * MIB
MUCH = 40
# Seconds. For a loaded machine.
LIMIT = 300


@pytest.fixture(scope='module')
def cloud(cloud_with_host):
    return cloud_with_host


class Sandbox:
    """Images and servers of a test in the cloud, which are deleted after it.

    :param account: of the user
    """

    def __init__(self, cloud, directory, account='demo'):
        self.cloud = cloud
        self.host = cloud.hosts[HOST]
        self.cache = cloud.services[f'{HOST}/dedupd']
        self.compute = cloud.services[f'{HOST}/nova-compute']
        self.user = cloud.connect(account)
        self._directory = directory
        self._images = []
        self._servers = []

    def upload(self, own=OWN, size=0):
        """Upload an image whose servers show a unique message.

        :param size: MiB up to which random bytes follow the disk's partitions
        """
        message = f'an image of the test {uuid.uuid4()}'
        path = self._directory / 'image'
        disk_images.variant(disk_images.images().raw, path, message, own)
        rest = random.Random(message)
        with open(path, 'ab') as f:
            while f.tell() < size * MIB:
                f.write(rest.randbytes(MIB))
        self._images.append(boot.upload(self.user, path, message))
        return self._images[-1], message

    def delete(self, image):
        """Delete an image before the test's end."""
        self._images.remove(image)
        self.user.image.delete_image(image)

    def create(self, image):
        """Create a server of an image, which is not up yet; return its id."""
        self._servers.append(boot.create(self.user, image, 'server'))
        return self._servers[-1]

    def server(self, image):
        """Start a server; return its id and its output, once it is up."""
        server = self.create(image)
        return server, boot.wait_until_up(self.user, server)

    def snapshot(self, server):
        self._images.append(boot.snapshot(self.user, server, 'snapshot'))
        return self._images[-1]

    def forget(self):
        """Delete the servers, and their images in Nova's cache."""
        while self._servers:
            boot.delete(self.user, self._servers.pop())
        self.compute.forget_images()

    def again(self):
        """Log in the user again, for a new token."""
        self.user.close()
        self.user = self.cloud.connect('demo')

    def status(self):
        return self.cache.client().status()['cache']

    def close(self):
        with contextlib.ExitStack() as stack:
            stack.callback(self.user.close)
            stack.callback(self.host.limit, None)
            self.forget()
            while self._images:
                self.user.image.delete_image(self._images.pop())


@pytest.fixture
def sandbox(cloud, tmp_path):
    sandbox = Sandbox(cloud, tmp_path)
    yield sandbox
    sandbox.close()


def wait_until(condition, what):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def plain(cloud, image):
    """Return the sizes of Glance's own answers, without their first byte."""
    return [download.size for download in boot.downloads(cloud, image)
            if download.size != 1]


class Wire:
    """Counts the bytes that pass the link each way from now on."""

    def __init__(self, sandbox):
        self._host = sandbox.host
        self._received = self._host.received()
        self._sent = self._host.sent()

    def bytes(self):
        return self._host.received() - self._received

    def sent(self):
        return self._host.sent() - self._sent


# -- the cache's purpose ------------------------------------------------------

def test_a_similar_image_moves_less_than_a_tenth(cloud, sandbox):
    first, said = sandbox.upload()
    similar, also = sandbox.upload()
    size = sandbox.user.image.get_image(first).size

    wire = Wire(sandbox)
    assert sandbox.server(first)[1] == (said, 1)
    moved = wire.bytes()
    assert OWN * MIB < moved < size

    wire = Wire(sandbox)
    server, shown = sandbox.server(similar)
    assert shown == (also, 1)
    assert OWN * MIB < wire.bytes() < size / 10
    assert plain(cloud, first) == plain(cloud, similar) == []

    # The host's snapshot is stored, although it is sent through the cache.
    snapshot = sandbox.snapshot(server)
    with image_repository.Repository(cloud.repository) as repo:
        assert repo.stat(snapshot).size == sandbox.user.image.get_image(
            snapshot).size
    sandbox.forget()

    # Nova and the cache send new requests; the blocks are all here.
    asked = len(boot.downloads(cloud, similar))
    wire = Wire(sandbox)
    assert sandbox.server(similar)[1] == (also, 1)
    assert wire.bytes() < CHATTER
    assert len(boot.downloads(cloud, similar)) > asked
    assert sandbox.server(snapshot)[1] == (also, 2)
    assert plain(cloud, similar) == plain(cloud, snapshot) == []


@pytest.mark.long
def test_servers_of_one_image_at_once(cloud, sandbox):
    image, said = sandbox.upload()
    pulls = sandbox.status()['arrivals']['pulls']
    wire = Wire(sandbox)
    servers = [sandbox.create(image) for _ in range(3)]
    for server in servers:
        assert boot.wait_until_up(sandbox.user, server) == (said, 1)
    assert sandbox.status()['arrivals']['pulls'] == pulls + 1
    assert wire.bytes() < sandbox.user.image.get_image(image).size
    assert plain(cloud, image) == []


# -- refused requests ---------------------------------------------------------

def ask(sandbox, token, path):
    """Return status and body of an answer to the compute host."""
    done = subprocess.run(
        [*sandbox.host.enter(), 'curl', '--silent', '--noproxy', '*',
         '--max-time', str(LIMIT), '--header', 'Accept:',
         '--header', f'X-Auth-Token: {token}',
         '--write-out', '\n%{http_code}',
         f'{sandbox.cache.url}/v2/images/{path}'],
        capture_output=True, timeout=LIMIT)
    body, _, status = done.stdout.rpartition(b'\n')
    return int(status), body


def test_an_image_of_another_project(cloud, sandbox):
    """A user of another project gets Glance's answer for a cached image."""
    image, said = sandbox.upload()
    assert sandbox.server(image)[1] == (said, 1)
    token = sandbox.user.session.get_token()
    assert ask(sandbox, token, image)[0] == 200
    identity = cloud.connect()
    with contextlib.ExitStack() as stack:
        stack.callback(identity.close)
        other = stack.enter_context(stranger(cloud, identity.identity))
        token = other.session.get_token()
        status, body = ask(sandbox, token, f'{image}/file')
        assert (status, body) == direct(cloud, token, f'{image}/file')
        assert status == 404 and said.encode() not in body
        assert ask(sandbox, token, f'{image}')[0] == 404
        assert ask(sandbox, 'no-token', f'{image}/file')[0] == 401
        with pytest.raises(sdk.BadRequestException):
            boot.create(other, image, 'server')


@contextlib.contextmanager
def stranger(cloud, identity):
    """Yield a user in a project without images."""
    project = identity.create_project(name='strange', domain_id='default')
    user = identity.create_user(
        name='stranger', password=cloud.password, domain_id='default',
        default_project_id=project.id)
    try:
        for name in ('member', 'reader'):
            identity.assign_project_role_to_user(
                project, user, identity.find_role(name))
        with contextlib.closing(cloud.services['keystone'].connect(
                'stranger', 'strange')) as connection:
            yield connection
    finally:
        identity.delete_user(user)
        identity.delete_project(project)


def direct(cloud, token, path):
    """Return Glance's own answer."""
    client = cloud_service.glance_server.Client(
        cloud.glance.url, headers={'X-Auth-Token': token})
    status, _, body = client.request('GET', f'/v2/images/{path}', expect=())
    return status, body


# -- failures during a transfer -----------------------------------------------

@contextlib.contextmanager
def half_way(sandbox, image):
    """Yield the id of a server whose image is half way to its host."""
    sandbox.host.limit(SLOW)
    wire = Wire(sandbox)
    server = sandbox.create(image)
    wait_until(lambda: wire.bytes() > MIDDLE, 'nothing comes')
    # The rest takes minutes: longer than the test does.
    sandbox.host.limit(HELD)
    assert sandbox.user.compute.get_server(server).status == 'BUILD'
    yield server
    sandbox.host.limit(None)


def end(sandbox, server, said):
    """Wait for a server to be up, or to fail; return which it was."""
    try:
        assert boot.wait_until_up(sandbox.user, server) == (said, 1)
        return 'up'
    except cloud_service.CloudError:
        found = sandbox.user.compute.get_server(server)
        assert found.status == 'ERROR' and found.fault['message']
        return 'ERROR'


def require_good(sandbox, image, said, became):
    """Require the same image as before, and that a failed server can start."""
    status, body = ask(sandbox, sandbox.user.session.get_token(),
                       f'{image}/file')
    found = hashlib.md5(body, usedforsecurity=False).hexdigest()
    assert (status, found) == (
        200, sandbox.user.image.get_image(image).checksum)
    if became == 'ERROR':
        sandbox.forget()
        assert sandbox.server(image)[1] == (said, 1)


#: Possible results for a server: Glance has all data of the storing host's
#: dedupd, and dedupd works for a minute without Glance; but without the
#: cache's daemon Nova has no source.
KILLED = {'dedupd': ['up'], f'{HOST}/dedupd': ['ERROR'],
          'glance': ['up', 'ERROR']}


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=[] if '/' in name else pytest.mark.long)
    for name in KILLED])
def test_killed_in_the_middle(cloud, sandbox, name):
    image, said = sandbox.upload(MUCH)
    with half_way(sandbox, image) as server:
        cloud.services[name].kill()
    try:
        became = end(sandbox, server, said)
    finally:
        cloud.services[name].start()
    assert became in KILLED[name]
    if name == 'dedupd':
        # The first part came from the cache. Glance gave it once more, so that
        # the cache could compare it, and the rest in the same answer.
        assert plain(cloud, image) == [
            sandbox.user.image.get_image(image).size]
    require_good(sandbox, image, said, became)


@pytest.mark.long
@pytest.mark.parametrize('seed', range(8))
def test_killed_at_any_time(cloud, sandbox, seed):
    chosen = random.Random(seed)
    image, said = sandbox.upload(MUCH)
    sandbox.host.limit(SLOW)
    server = sandbox.create(image)
    time.sleep(chosen.uniform(0, 12))
    name = chosen.choice([*KILLED, 'keystone'])
    cloud.services[name].kill()
    time.sleep(chosen.uniform(0, 3))
    sandbox.host.limit(None)
    cloud.services[name].start()
    # Without Keystone the token cannot be validated.
    sandbox.again()
    require_good(sandbox, image, said, end(sandbox, server, said))


@pytest.mark.long
def test_a_token_is_revoked_in_the_middle(cloud, sandbox):
    """The restart clears all caches of the revoked token."""
    image, said = sandbox.upload(MUCH)
    token = sandbox.user.session.get_token()
    with half_way(sandbox, image) as server:
        sandbox.user.identity.delete(
            '/auth/tokens', headers={'X-Subject-Token': token})
        sandbox.again()
        for name in ('dedupd', 'glance'):
            cloud.services[name].kill()
            cloud.services[name].start()
        assert ask(sandbox, token, f'{image}/file')[0] == 401
    require_good(sandbox, image, said, end(sandbox, server, said))
