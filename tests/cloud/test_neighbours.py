# SPDX-License-Identifier: Apache-2.0
"""A real Nova boots servers on two hosts whose caches use each other.

One host has a link of 100 Mbit/s, the other one of 1 Gbit/s. They reach each
other through the machine, as through a switch.
"""

import contextlib

import pytest

from tests.cloud import boot
from tests.cloud import conftest
from tests.cloud import dedupd
from tests.cloud import test_cache
from tests.support import cache_harness

# Long: the first test starts a cloud with two compute hosts; servers
# boot without KVM, and their images come over slow links.
pytestmark = test_cache.pytestmark

#: The hosts, and the Mbit/s of their links.
HOSTS = {'c1': 100, 'c2': 1000}


@pytest.fixture(scope='module')
def cloud():
    """A cloud with two compute hosts, whose caches are neighbours."""
    with contextlib.ExitStack() as undo:
        one = undo.enter_context(
            conftest.running(hosts=dict.fromkeys(HOSTS, True)))
        caches = [one.services[f'{name}/dedupd'] for name in HOSTS]
        links = [undo.enter_context(contextlib.closing(
            cache_harness.Link(cache.listen, one.address)))
            for cache in caches]
        for cache in caches:
            cache.trusted = True
            cache.neighbours = [f'https://{link.address}' for link in links]
            cache.stop()
            cache.start()
        yield one


@pytest.fixture
def rack(cloud, tmp_path):
    found = Rack(cloud, tmp_path)
    yield found
    found.close()


class Rack(test_cache.Sandbox):
    """Both hosts; servers are made by an administrator, who may choose."""

    def __init__(self, cloud, directory):
        super().__init__(cloud, directory, account='admin')
        self.caches = [cloud.services[f'{name}/dedupd'] for name in HOSTS]
        for name, mbit in HOSTS.items():
            cloud.hosts[name].limit(mbit)

    def start(self, host, image):
        """Create a server on a host, which is not up yet; return its id."""
        self._servers.append(boot.create(self.user, image, 'server', host))
        return self._servers[-1]

    def came(self):
        """Return each cache's bytes from the storing host and from others."""
        found = [cache.client().status()['cache'] for cache in self.caches]
        return [(one['arrivals']['received_bytes'],
                 one['neighbours']['received_bytes']) for one in found]

    def close(self):
        for name in HOSTS:
            self.cloud.hosts[name].limit(None)
            self.cloud.services[f'{name}/nova-compute'].forget_images()
        super().close()


@contextlib.contextmanager
def linked(cloud, rack):
    """Yield the NovaBase of each host; Nova finds links to images on both."""
    with contextlib.ExitStack() as stack:
        bases = []
        for cache in rack.caches:
            base = dedupd.NovaBase(cloud, cache, 'admin')
            cache.options = base.options
            cache.stop()
            cache.start()
            bases.append(stack.enter_context(base))
        stack.callback(rack.forget)
        yield bases


def since(rack, before):
    return [(stored - old_stored, lent - old_lent)
            for (stored, lent), (old_stored, old_lent) in zip(
                rack.came(), before)]


@pytest.mark.long
def test_both_start_the_same_new_image(cloud, rack):
    image, said = rack.upload(own=test_cache.MUCH)
    before = rack.came()
    servers = [rack.start(host, image) for host in HOSTS]
    for server in servers:
        assert boot.wait_until_up(rack.user, server) == (said, 1)
    came = since(rack, before)
    print([(round(stored / 1e6, 1), round(lent / 1e6, 1))
           for stored, lent in came])
    # Alone, each would have got all of it from the storing host.
    stored, lent = map(sum, zip(*came))
    assert stored < 0.75 * (stored + lent)
    assert test_cache.plain(cloud, image) == []


@pytest.mark.long
def test_the_second_host_asks_the_first(cloud, rack):
    image, said = rack.upload(own=test_cache.MUCH)
    for host in HOSTS:
        before = rack.came()
        assert boot.wait_until_up(
            rack.user, rack.start(host, image)) == (said, 1)
    stored, lent = since(rack, before)[1]
    print(stored, lent)
    assert stored < lent / 4


@pytest.mark.long
def test_the_first_host_dies_meanwhile(cloud, rack):
    image, said = rack.upload(own=test_cache.MUCH)
    first, second = HOSTS
    assert boot.wait_until_up(
        rack.user, rack.start(first, image)) == (said, 1)
    cloud.hosts[second].limit(test_cache.SLOW)
    before = rack.came()
    server = rack.start(second, image)
    test_cache.wait_until(lambda: since(rack, before)[1][1] > 0,
                          'it does not ask')
    rack.caches[0].kill()
    try:
        assert boot.wait_until_up(rack.user, server) == (said, 1)
    finally:
        rack.caches[0].start()


@pytest.mark.long
def test_both_start_from_links(cloud, rack):
    """Nova downloads nothing; the caches share the blocks that are read."""
    with linked(cloud, rack) as bases:
        image, said = rack.upload(own=test_cache.MUCH)
        for base in bases:
            base.link(image)
        before = rack.came()
        servers = [rack.start(host, image) for host in HOSTS]
        for server in servers:
            assert boot.wait_until_up(rack.user, server) == (said, 1)
        came = since(rack, before)
        print(came)
        stored, lent = map(sum, zip(*came))
        assert stored < 0.75 * (stored + lent)
        # Only the inspected part came from Glance.
        assert set(test_cache.plain(cloud, image)) <= {test_cache.MIB}
