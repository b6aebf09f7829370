# SPDX-License-Identifier: Apache-2.0
"""A libvirt of the cloud's own, in which its servers run.

It is one for a single user, ``qemu:///session``: all of its files are below
the cloud's directory, and it does not touch the machine's own libvirt,
networks and servers. libvirtd runs like that for every user except root, so
root starts it as another user, in a user namespace.
"""

import contextlib
import os
import pathlib
import subprocess

from tests.cloud import cloud_service
from tests.cloud import live_process

#: The longest path of a Unix socket below the cloud's directory.
SOCKET = 'var/h1/libvirt/qemu/lib/domain-100-instance-00000001/monitor.sock'
#: Programs that have to be installed, and their packages.
PROGRAMS = {'libvirtd': 'libvirt-daemon', 'virsh': 'libvirt-clients',
            'unshare': 'util-linux',
            'qemu-system-x86_64': 'qemu-system-x86'}
#: A user and a group that every Debian has, and whose number is not 0.
DAEMON = 1
# Seconds. At its first start libvirtd tries out every QEMU that it finds.
VIRSH_TIMEOUT = 120


class Libvirt(cloud_service.Service):
    """The daemon libvirtd, and the QEMUs that it starts."""

    name = 'libvirt'
    title = 'libvirt'

    @property
    def socket(self):
        return self.directory / 'run' / 'libvirt' / 'libvirt-sock'

    @property
    def uri(self):
        """Return the URI for nova-compute."""
        return f'qemu+unix:///session?socket={self.socket}'

    @property
    def address(self):
        return str(self.socket)

    @property
    def pki(self):
        """Return the directory of QEMU's files for TLS over NBD."""
        return self.directory / 'pki'

    def environment(self):
        # Its configuration and its servers' files are then in `directory`. A
        # client does not start another libvirtd if it is down.
        return {**super().environment(),
                'LIBVIRT_AUTOSTART': '0',
                'XDG_CONFIG_HOME': str(self.directory.parent),
                'XDG_CACHE_HOME': str(self.directory / 'cache'),
                'XDG_RUNTIME_DIR': str(self.directory / 'run')}

    def prepare(self):
        (self.directory / 'run').mkdir(mode=0o700, exist_ok=True)
        self.pki.mkdir(exist_ok=True)
        # The machine's virtlogd and AppArmor are not used.
        (self.directory / 'qemu.conf').write_text(
            'stdio_handler = "file"\nsecurity_driver = "none"\n'
            f'nbd_tls_x509_cert_dir = "{self.pki}"\n')
        (self.etc / 'libvirtd.conf').write_text(
            'log_outputs = "3:stderr"\n')

    def launch(self):
        for program, package in PROGRAMS.items():
            cloud_service.find(program, package)
        namespace = ['unshare', '--user', f'--map-user={DAEMON}',
                     f'--map-group={DAEMON}'] if os.geteuid() == 0 else []
        self.spawn([*namespace,
                    cloud_service.find('libvirtd', PROGRAMS['libvirtd']),
                    '--config', self.etc / 'libvirtd.conf',
                    '--pid-file', self.directory / 'run' / 'libvirtd.pid'])

    def answers(self):
        return self.virsh('version').returncode == 0

    def stop(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            for name in self.virsh('list', '--name').stdout.split():
                self.virsh('destroy', name)
        super().stop()

    def kill(self):
        super().kill()
        # A QEMU outlives its libvirtd, in a session of its own, with an almost
        # empty environment.
        for process in self.servers():
            process.kill()
            process.wait(cloud_service.STOP_TIMEOUT)

    def virsh(self, *arguments):
        """Run virsh on this libvirt."""
        return subprocess.run(
            ['virsh', '--quiet', '--connect', self.uri, *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=VIRSH_TIMEOUT, env=self.environment())

    def servers(self):
        """Return the processes of servers."""
        mark = f'{self.directory}/qemu/'.encode()
        for path in pathlib.Path('/proc').glob('[0-9]*'):
            with contextlib.suppress(OSError):
                words = (path / 'cmdline').read_bytes().split(b'\0')
                if (words[0].rpartition(b'/')[2].startswith(b'qemu-system-')
                        and any(mark in word for word in words)):
                    yield live_process.Process.of(int(path.name))
