# SPDX-License-Identifier: Apache-2.0

"""Runs the commands of the page on volumes in QEMU, with other paths.

``tests/cloud/test_volumes.py`` runs the page's part on libvirt.
"""

import contextlib
import subprocess

import pytest

from glance_dedup.cli import volumeserve
from glance_dedup.repository import openvolumes
from tests.cloud import disk_images
from tests.support import certificates
from tests.support import daemons
from tests.support import documents
from tests.support import nbd
from tests.support import ports
from tests.support import repositories
from tests.support import volume_tools

PAGE = documents.SOURCE / 'admin' / 'volumes-qemu.rst'
UNIT = 'glance-dedup-volume@.service'
SHOWN = 'a disk of tools/boot_image'
IMAGE = '3f0b2a4c-5d1e-4c7a-9b60-0d4a8f1c2e33'


def commands(section):
    return [line.text for block in documents.blocks(PAGE)
            if block.section == section
            for line in documents.commands(block)]


def start(text, directory, replaced):
    """A command of the page that runs until it is ended."""
    for old, new in replaced.items():
        text = text.replace(old, str(new))
    console = directory / 'console'
    with open(console, 'wb') as out:
        return nbd.Machine(['bash', '-c', f'exec {text}'], console,
                           cwd=directory, stdout=out)


def is_served(path, export):
    """Return whether there is a server of NBD that has an export."""
    with contextlib.suppress(OSError), nbd.Session(path) as session:
        replies = session.haggle().option(nbd.INFO, nbd.name_and(export))
        return replies[-1][0] == nbd.ACK
    return False


@pytest.fixture(scope='module')
def repository(tmp_path_factory):
    path = repositories.create(
        tmp_path_factory.mktemp('guide') / 'repository')
    with repositories.open_repository(path) as repo:
        repo.put(IMAGE, disk_images.images().raw)
    return path


@pytest.fixture
def server(repository, tmp_path):
    with repositories.open_repository(repository) as repo:
        with repo.open_image(IMAGE) as image:
            openvolumes.create(repo, 'web1', image=image)
        with volume_tools.Server(repository, tmp_path, 'web1') as found:
            yield found
        openvolumes.delete(repo, 'web1')


def test_units():
    """The commands in the page's units have options that the program takes."""
    unit = documents.TOP / 'etc' / UNIT
    assert f'/systemd/{UNIT} /etc/systemd/system/' in PAGE.read_text()
    usual, = (line for line in unit.read_text().splitlines()
              if line.startswith('ExecStart='))
    begin = ('ExecStart=/usr/bin/glance-dedup --repository '
             '/var/lib/glance/dedup volume serve ')
    parser = volumeserve.Serve(None, None).get_parser('volume serve')
    socket, rate, tls = (
        line for block in documents.blocks(PAGE) if block.language == 'ini'
        for line in block.text.splitlines() if line.startswith(begin))
    assert socket.replace(' --repository /var/lib/glance/dedup', '') == (
        f'{usual} --socket-mode 660')
    assert 'GLANCE_DEDUP_REPOSITORY=/var/lib/glance/dedup' in unit.read_text()
    assert rate.replace(' --repository /var/lib/glance/dedup', '') == (
        f'{usual} --max-rate 50M')
    for line in (socket, rate, tls):
        volumeserve._require_options(parser.parse_args(
            line.removeprefix(begin).replace('%i', 'web1').split()))


# Long: two guests boot, without KVM.
@pytest.mark.needs('bootimage', 'guest', 'nbdkit')
@pytest.mark.slow
def test_qemu(server, tmp_path):
    """A guest uses the disk by the socket, and then by TLS."""
    by_socket, by_tls = commands('QEMU')
    server.start()
    with start(by_socket, tmp_path, {
            '/run/glance-dedup-volume-web1/nbd.sock': server.socket}) as guest:
        assert guest.wait_until_up() == (SHOWN, 1)
    server.stop()
    port = ports.free_port()
    certificates.make_pki(tmp_path / 'pki')
    server.start('--port', port, '--tls-certificates', tmp_path / 'pki')
    with start(by_tls, tmp_path, {
            '/etc/pki/libvirt-nbd': tmp_path / 'pki', '10809': port,
            'storage.example.org': 'localhost'}) as guest:
        assert guest.wait_until_up() == (SHOWN, 2)


@pytest.mark.needs('bootimage', 'guest', 'qemu')
@pytest.mark.slow
def test_a_disk_that_need_not_last(repository, tmp_path):
    create, storage, qemu = commands('A disk that need not last')
    replaced = {'/run/dedupd/nbd.sock': tmp_path / 'nbd',
                '/run/web2.sock': tmp_path / 'web2.sock'}
    with daemons.Daemon(repository, nbd_socket=tmp_path / 'nbd') as daemon:
        daemon.start()
        subprocess.run(
            create.replace('/run/dedupd/nbd.sock', str(tmp_path / 'nbd')),
            shell=True, cwd=tmp_path, check=True, timeout=nbd.LIMIT)
        with start(storage, tmp_path, replaced):
            repositories.eventually(lambda: is_served(
                tmp_path / 'web2.sock', b'web2'))
            with start(qemu, tmp_path, replaced) as guest:
                assert guest.wait_until_up() == (SHOWN, 1)
