# SPDX-License-Identifier: Apache-2.0
"""The bootable image boots in libvirt without Nova; Neutron's stub works."""

import contextlib
import json
import pathlib
import shutil
import subprocess
import tempfile
import time

import pytest

from tests.cloud import boot
from tests.cloud import disk_images
from tests.cloud import local_cloud
from tests.functional import glance_server

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.needs('bootimage', 'guest', 'libvirtd', 'qemu')]

LIMIT = 240
DOMAIN = """
<domain type='qemu'>
  <name>instance-00000001</name>
  <memory unit='MiB'>128</memory>
  <os><type>hvm</type></os>
  <features><acpi/></features>
  <devices>
    {disk}
    <console type='pty'><log file='{console}' append='off'/></console>
  </devices>
</domain>
"""
DISK = """
<disk type='file' device='disk'>
  <driver name='qemu' type='{format}'/>
  <source file='{path}'/>
  <target dev='vda' bus='virtio'/>
</disk>
"""


@pytest.fixture(scope='module')
def little():
    """A cloud that only runs libvirt and Neutron's stub."""
    place = pathlib.Path(tempfile.mkdtemp(prefix='cloud-'))
    with local_cloud.Cloud(place) as cloud:
        cloud.up(['libvirt', 'neutron'])
        yield cloud


def copy(image, directory):
    """Return a domain's disk: a copy of an image."""
    path = directory / 'disk'
    shutil.copyfile(image, path)
    return DISK.format(format=image.suffix[1:], path=path)


class Server:
    """A server that libvirt runs.

    :param directory: for its console
    :param xml: its disk
    """

    def __init__(self, cloud, directory, xml):
        self.libvirt = cloud.services['libvirt']
        self.console = directory / 'console.log'
        self._domain = directory / 'domain.xml'
        self._domain.write_text(DOMAIN.format(
            disk=xml, console=self.console))

    def virsh(self, *arguments):
        done = self.libvirt.virsh(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self):
        self.console.unlink(missing_ok=True)
        self.virsh('create', str(self._domain))

    def shown(self):
        """Return the server's output, once it is up."""
        self.wait_for(lambda: boot.read(self.text()))
        return boot.read(self.text())

    def text(self):
        with contextlib.suppress(FileNotFoundError):
            return self.console.read_text(errors='replace')
        return ''

    def wait_for(self, condition):
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def press_power_button(self):
        self.virsh('shutdown', 'instance-00000001')
        self.wait_for(lambda: not self.virsh('list', '--name').split())


# Long: a server boots twice, without KVM.
def test_it_boots_counts_and_ends(little, tmp_path):
    server = Server(little, tmp_path,
                    copy(disk_images.images().qcow2, tmp_path))
    for boots in (1, 2):
        server.start()
        assert server.shown() == ('a disk of tools/boot_image', boots)
        server.press_power_button()
        assert 'glance-dedup: down' in server.text()


@pytest.mark.parametrize('end', ['stop', 'kill'])
def test_no_server_outlives_its_libvirt(little, tmp_path, end):
    server = Server(little, tmp_path,
                    copy(disk_images.images().qcow2, tmp_path))
    server.start()
    processes = list(server.libvirt.servers())
    assert len(processes) == 1
    getattr(server.libvirt, end)()
    assert processes[0].poll() is not None
    assert not server.libvirt.running() and not list(server.libvirt.servers())
    server.libvirt.start()
    assert not server.virsh('list', '--all', '--name').split()


def test_the_same_packages_give_the_same_image(tmp_path):
    images = disk_images.images()
    for package in images.raw.parent.glob('*.deb'):
        shutil.copyfile(package, tmp_path / package.name)
    done = subprocess.run(
        [disk_images.TOP / 'tools' / 'build_boot_image', tmp_path],
        capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    for image in images:
        assert (tmp_path / image.name).read_bytes() == image.read_bytes()
    assert subprocess.run(
        ['qemu-img', 'compare', *images], timeout=LIMIT).returncode == 0


def test_the_stub_knows_of_nothing(little):
    client = glance_server.Client(little.url('neutron'))
    for collection, name in (('ports?device_id=1', 'ports'),
                             ('networks', 'networks'),
                             ('extensions', 'extensions'),
                             ('security-groups.json', 'security_groups')):
        body = client.request('GET', f'/v2.0/{collection}', expect=(200,))[2]
        assert json.loads(body) == {name: []}
    for method, path in (('GET', '/v2.0/ports/1'), ('GET', '/v2.0/routers'),
                         ('POST', '/v2.0/ports'), ('PUT', '/v2.0/ports/1'),
                         ('DELETE', '/v2.0/ports/1')):
        body = client.request(method, path, b'{"port": {}}', expect=(501,))[2]
        assert path in json.loads(body)['NeutronError']['message']
