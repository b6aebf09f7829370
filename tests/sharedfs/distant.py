# SPDX-License-Identifier: Apache-2.0

"""Mounts by the kernel of the guest.

The client is part of the kernel, and this machine's may have none. In the
guest each host is a network with a name of its own, so that the kernel has a
client for each, with caches and locks of its own. Both mounts are in the guest
alone: programs that use them run there (``tools/shared run``).

A host dies by losing its link. The kernel lives on, so its unwritten data is
thrown away by force.
"""

import contextlib
import os
import subprocess
import sys
import time

from tests.cloud import cloud_service
from tests.sharedfs import guest
from tests.sharedfs import shared_fs

# A host's life: its name, its link, the addresses of that and of this machine,
# and the mount command.
_HOST = """
hostname "$0"
nsenter --net=/proc/1/ns/net ip link set "$1" netns $$
ip link set lo up
ip address add "$2/24" dev "$1"
ip link set "$1" up
ip route add default via "$3"
shift 3
"$@"
exec sleep infinity
"""


class Mount(shared_fs.Mount):
    """A host in the guest: its process holds its network.

    A file system's class has `options`, which are those of ``mount`` up to the
    directory.
    """

    #: Arguments of the command.
    options: tuple[str, ...] = ()

    @property
    def _link(self):
        return f'vec{shared_fs.HOSTS.index(self.name)}'

    def launch(self):
        # The server knows hosts by name. A host that comes back has a new
        # name: the kernel's rest of the dead one may still use the old one.
        number = shared_fs.HOSTS.index(self.name)
        self.spawn(['unshare', '--net', '--uts', 'sh', '-ec', _HOST,
                    f'{self.name}-{time.monotonic_ns()}', self._link,
                    guest.address(number, 2), guest.address(number, 1),
                    'mount', *self.options, self.root])

    def stop(self):
        if shared_fs.mounts_at(self.root):
            self.ask('umount', self.root)
        self._take_link()
        cloud_service.Service.stop(self)

    def _take_link(self):
        """Return the link to the guest's network, where it has no address."""
        with contextlib.suppress(shared_fs.SharedError, IndexError):
            self.ask(
                'nsenter', f'--net=/proc/{self.processes[0].pid}/ns/net', 'ip',
                'link', 'set', self._link, 'netns', '1')

    def versions(self):
        return {'Linux': os.uname().release}

    def die(self):
        self._take_link()
        cloud_service.Service.kill(self)
        # Processes that wait for the server get errors. A forced unmount
        # succeeds when the mount is not in use any more.
        subprocess.Popen(
            ['sh', '-c', 'while grep -qF " $0 " /proc/mounts; do '
             'umount -i --force "$0"; sleep 0.1; done', self.root],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True)

    def kill(self):
        self.die()
        deadline = time.monotonic() + shared_fs.LIMIT
        while shared_fs.mounts_at(self.root):
            if time.monotonic() > deadline:
                raise shared_fs.still_mounted([self.root])
            time.sleep(0.05)


class DistantMount(shared_fs.Mount):
    """A mount in the guest, as this machine handles it."""

    @property
    def guest(self):
        return self.shared.services['guest']

    @property
    def processes(self):
        return self.guest.processes

    @property
    def address(self):
        return f'{self.root} in the guest'

    def start(self):
        """Start both mounts, by this command in the guest."""
        done = self.guest.call(
            [sys.executable, '-P', '-m', 'tests.sharedfs', 'up',
             self.shared.kind, '--directory', self.shared.directory],
            cloud_service.START_TIMEOUT, capture_output=True, text=True)
        if done.returncode:
            raise shared_fs.SharedError(f'{done.stdout}{done.stderr}')

    def answers(self):
        return self.guest.call(
            ['mountpoint', '-q', self.root]).returncode == 0

    def stop(self):
        """Do nothing, since the guest's end ends its mounts."""

    kill = stop

    def versions(self):
        kernel = self.guest.call(['uname', '-r'], capture_output=True,
                                 text=True).stdout.strip()
        return {'Linux': kernel}


def make(shared, mount, outer=(), inner=()):
    """Return the services of a file system that the guest mounts.

    :param mount: the class of the mounts in the guest
    :param outer: classes of servers on this machine
    :param inner: classes of servers in the guest
    """
    if guest.inside():
        return [*(server(shared) for server in inner),
                *(mount(shared, name) for name in shared_fs.HOSTS)]
    return [shared_fs.Network(shared),
            *(server(shared) for server in outer), guest.Guest(shared),
            *(DistantMount(shared, name) for name in shared_fs.HOSTS)]
