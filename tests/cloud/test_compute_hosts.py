# SPDX-License-Identifier: Apache-2.0
"""Compute hosts in namespaces reach the cloud, and leave nothing behind.

A few services are enough; tests/cloud/test_cache.py boots servers on them.
"""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from tests.cloud import cloud_service
from tests.cloud import compute_host
from tests.cloud import live_process
from tests.cloud import local_cloud
from tests.functional import glance_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.needs('network'),
    pytest.mark.skipif(os.geteuid() != 0,
                       reason='only root can make a network')]

MIB = 1 << 20
# Seconds. For a loaded machine.
LIMIT = 120
#: Reads all data sent to it.
SINK = '''
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 60) as source:
    while source.recv(1 << 20):
        pass
'''
#: Prints the server's answer.
ASK = '''
import http.client, socket, sys
client = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=60)
client.request('GET', '/')
print(socket.gethostname(), client.getresponse().status)
'''


@pytest.fixture
def place():
    """A directory for clouds; the test leaves nothing of them."""
    with tempfile.TemporaryDirectory(prefix='cloud-') as parent:
        yield pathlib.Path(parent)
        for one in pathlib.Path(parent).iterdir():
            for process in live_process.marked(one):
                process.kill()


def on(host, program, *arguments):
    """Run a Python program on a host; return its output."""
    done = subprocess.run(
        [*host.enter(), sys.executable, '-c', program,
         *map(str, arguments)], capture_output=True, text=True,
        timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def links():
    return {path.name for path in pathlib.Path('/sys/class/net').iterdir()}


def wait_until_gone(link):
    """Wait until a link is gone: a moment after its last process."""
    deadline = time.monotonic() + LIMIT
    while link in links():
        assert time.monotonic() < deadline, f'{link} is still there'
        time.sleep(0.05)


def ask(cloud, host):
    """Return the answer to a host of the service that starts at once."""
    return on(host, ASK, cloud.address,
              cloud.services['neutron'].port).split()


def test_hosts_of_two_clouds(place):
    """Hosts of two clouds reach their own cloud, by unique addresses."""
    clouds = [local_cloud.Cloud(place / name, hosts={'c1': True, 'p1': False})
              for name in ('one', 'two')]
    for cloud in clouds:
        cloud.up(['neutron'])
    assert len({cloud.address for cloud in clouds}
               | {host.ip for cloud in clouds
                  for host in cloud.hosts.values()}) == 6
    for cloud in clouds:
        for name, host in cloud.hosts.items():
            assert ask(cloud, host) == [name, '200']
    # Another process that continues with the cloud finds the hosts unchanged.
    again = local_cloud.Cloud(place / 'one')
    assert {name: host.cache for name, host in again.hosts.items()} == {
        'c1': True, 'p1': False}
    assert all(host.running() for host in again.hosts.values())
    assert 'p1/dedupd' not in again.services
    assert again.services['c1/nova-compute'].needs[-2:] == (
        'c1/libvirt', 'c1/dedupd')
    gone = [host.link for host in again.hosts.values()]
    again.down()
    assert not links() & set(gone)
    assert ask(clouds[1], clouds[1].hosts['p1']) == ['p1', '200']
    clouds[1].down()


def test_host_is_killed(place):
    """A killed host's link disappears, and the next one has its address."""
    with local_cloud.Cloud(place / 'one', hosts={'p1': False}) as cloud:
        cloud.up(['neutron'])
        host = cloud.hosts['p1']
        link, ip = host.link, host.ip
        host.processes[0].kill()
        wait_until_gone(link)
        assert not host.running() and host.state() == 'down'
        cloud.up(['neutron'])
        assert host.running() and host.link != link
        assert host.ip == ip and ask(cloud, host) == ['p1', '200']


def test_up_is_killed(place):
    """After a killed `up` the next one completes the host."""
    with local_cloud.Cloud(place / 'one', hosts={'p1': False}) as cloud:
        host = cloud.hosts['p1']
        cloud.up(['p1'])
        host._run('ip', 'link', 'set', host.link, 'down')
        assert not host.running()
        cloud.up(['neutron'])
        assert host.running() and ask(cloud, host) == ['p1', '200']


def test_limit(place):
    """The link has the limit, and counts its bytes."""
    with local_cloud.Cloud(place / 'one', hosts={'p1': False}) as cloud:
        cloud.up(['neutron'])
        host = cloud.hosts['p1']

        def seconds(size):
            with socket.create_server((cloud.address, 0)) as listener:
                def send():
                    connection = listener.accept()[0]
                    with connection:
                        connection.sendall(bytes(size))
                sender = threading.Thread(target=send)
                sender.start()
                began, before = time.monotonic(), host.received()
                on(host, SINK, cloud.address, listener.getsockname()[1])
                sender.join(LIMIT)
            assert size < host.received() - before < 1.25 * size
            return time.monotonic() - began

        host.limit(16)
        # The first burst passes at once.
        least = (4 * MIB - compute_host.BURST - MIB // 4) * 8 / 16e6
        assert seconds(4 * MIB) > least
        # Within the limit it would take four minutes.
        host.limit(1)
        host.limit(None)
        assert seconds(32 * MIB) < LIMIT


def test_without_root(place, monkeypatch):
    """Without root the error names root."""
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    cloud = local_cloud.Cloud(place / 'one', hosts={'p1': False})
    with pytest.raises(cloud_service.CloudError, match='only root can'):
        cloud.up(['neutron'])
    cloud.down()


def test_a_client_on_the_machine(place):
    """A client on the machine only needs the other address."""
    with local_cloud.Cloud(place / 'one', hosts={'p1': False}) as cloud:
        cloud.up(['neutron'])
        assert cloud.address in (cloud.directory / 'openrc').read_text()
        assert glance_server.Client(cloud.url('neutron')).request(
            'GET', '/', expect=(200,))
