# SPDX-License-Identifier: Apache-2.0
"""Servers of libvirt write to volumes, as in the guide.

The image comes from Glance, and the snapshot of a running server's volume goes
there.
"""

import contextlib
import json

import pytest
import yaml

from glance_dedup.cli import entry
from tests.cloud import boot
from tests.cloud import disk_images
from tests.cloud import test_libvirt
from tests.support import certificates
from tests.support import documents
from tests.support import ports
from tests.support import volume_tools

# Long: three servers boot, without KVM.
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.needs('nbdkit')]

PAGE = documents.SOURCE / 'admin' / 'volumes-qemu.rst'
SHOWN = 'a disk of tools/boot_image'
SNAPSHOT = '3f0b2a4c-5d1e-4c7a-9b60-0d4a8f1c2e33'


@pytest.fixture
def run(cloud, monkeypatch, capfd, tmp_path):
    """Run the command as the service user; return its output."""
    clouds = yaml.safe_load(cloud.clouds_yaml.read_text())['clouds']
    service = clouds['admin']
    service['auth'] |= {'username': 'glance', 'project_name': 'service'}
    file = tmp_path / 'clouds.yaml'
    file.write_text(yaml.safe_dump({'clouds': {'service': service}}))
    monkeypatch.setenv('OS_CLIENT_CONFIG_FILE', str(file))
    monkeypatch.setenv('no_proxy', cloud.address)

    def run(*arguments):
        capfd.readouterr()
        status = entry.main([
            '--repository', cloud.repository, '--filter-dir',
            str(tmp_path / 'filter'), '--socket', '', *arguments,
            '-f', 'json'])
        out, err = capfd.readouterr()
        assert status == 0, err
        return json.loads(out)
    return run


def disks():
    """Return the disks of the guide's domains: by a socket, and by TLS."""
    found = [block.text for block in documents.blocks(PAGE)
             if block.section == 'libvirt' and block.language == 'xml']
    assert len(found) == 2
    return found


def server(cloud, directory, xml, replaced):
    for old, new in replaced.items():
        assert old in xml
        xml = xml.replace(old, str(new))
    directory.mkdir()
    return test_libvirt.Server(cloud, directory, xml)


def test_a_server_of_a_volume(cloud, run, tmp_path):
    """A server runs on a clone of an image; the snapshot has its writes."""
    by_socket, by_tls = disks()
    certificates.make_pki(cloud.services['libvirt'].pki)
    with contextlib.ExitStack() as stack:
        demo = stack.enter_context(contextlib.closing(cloud.connect('demo')))
        image = boot.upload(demo, disk_images.images().raw, 'image')
        run('volume', 'clone', image, 'web1', '--size', '256M')
        first = stack.enter_context(volume_tools.Server(
            cloud.repository, tmp_path, 'web1')).start()
        one = server(cloud, tmp_path / 'one', by_socket, {
            '/run/glance-dedup-volume-web1/nbd.sock': first.socket})
        one.start()
        assert one.shown() == (SHOWN, 1)

        # The server runs on, over another server process of its volume.
        run('volume', 'snapshot', 'web1', SNAPSHOT)
        first.stop()
        first.start()
        one.press_power_button()
        assert 'glance-dedup: down' in one.text()
        assert int(first.control.status()['written'])
        first.stop()

        run('volume', 'clone', SNAPSHOT, 'web2')
        place = tmp_path / 'second'
        place.mkdir()
        port = ports.free_port()
        stack.enter_context(volume_tools.Server(
            cloud.repository, place, 'web2')).start(
                '--port', port, '--tls-certificates',
                cloud.services['libvirt'].pki)
        two = server(cloud, tmp_path / 'two', by_tls, {
            'web1': 'web2', 'storage.example.org': 'localhost',
            '10809': port})
        two.start()
        assert two.shown() == (SHOWN, 2)
        two.press_power_button()

        # As an image of the user's project, it goes the ordinary way.
        found = run('glance', 'register', SNAPSHOT, '--os-cloud', 'service')
        assert found['result'] == 'registered'
        record = demo.image.get_image(SNAPSHOT)
        assert record.owner == demo.current_project_id
        assert record.properties['stores'] == 'dedup'
        path = tmp_path / 'image.raw'
        demo.image.download_image(SNAPSHOT, output=str(path))
        three = test_libvirt.Server(cloud, tmp_path, test_libvirt.copy(
            path, tmp_path))
        three.start()
        assert three.shown() == (SHOWN, 2)
        three.press_power_button()
