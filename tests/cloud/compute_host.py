# SPDX-License-Identifier: Apache-2.0
"""Compute hosts of a cloud: each has a network and a name of its own.

A :class:`Host` is a process that sleeps in new namespaces, and a pair of
virtual interfaces, a link, between these and the machine, on which all other
services run. The namespaces have no name, and the interface is named after the
process: so nothing can collide with another cloud's. If the process is killed,
the namespaces disappear with the last process in them.
"""

import contextlib
import os
import pathlib
import re
import subprocess

from tests.cloud import cloud_service

#: Programs that have to be installed, and their packages.
PROGRAMS = {'ip': 'iproute2', 'tc': 'iproute2', 'nsenter': 'util-linux',
            'unshare': 'util-linux'}
COMMAND_TIMEOUT = 60
#: The interface at a host's end of its link.
UPLINK = 'uplink'
#: Bytes that pass at once through a link that is limited: at least the amount
#: for one tick of the kernel's clock (4 ms).
BURST = 64 << 10
TICKS = 250


def joined(state, more):
    """Return the compute hosts of a cloud, and more.

    :param state: the cloud's record
    :param more: names, and whether each has a cache
    :raises CloudError: if the cloud cannot have them
    """
    again = ('What to do: tools/cloud down, and then tools/cloud up with all '
             'options.')
    for name, cache in more.items():
        if not re.fullmatch('[a-z][a-z0-9]', name):
            raise cloud_service.CloudError(
                f'{name!r} is no name of a compute host.\nWhat to do: give '
                'it a letter and another, or a digit, as in c1.')
        if state.hosts.get(name, cache) != cache:
            raise cloud_service.CloudError(
                f'The compute host {name} is there already, '
                f'{"without" if cache else "with"} a cache.\n{again}')
    if more and state.is_used and not state.hosts:
        raise cloud_service.CloudError(
            'This cloud was started without compute hosts of their own, and '
            f'listens where none could reach it.\n{again}')
    return {**state.hosts, **more}


class Host(cloud_service.Service):
    """A compute host.

    :param cache: whether its Nova has its images through a cache
    """

    def __init__(self, cloud, name, cache):
        self.name = name
        self.title = f'compute host {name}'
        self.cache = cache
        super().__init__(cloud)
        # Services that are on no host need all hosts; a host needs none.
        self.needs = ()

    @property
    def ip(self):
        """Return its own address; the link's other end has the cloud's."""
        return self.cloud.state.address(self.name)

    @property
    def address(self):
        return self.ip

    @property
    def _pid(self):
        processes = self.processes
        if not processes:
            raise cloud_service.CloudError(
                f'{self.title} is not up.\nWhat to do: start it first.')
        return processes[0].pid

    @property
    def link(self):
        """Return the interface at the machine's end."""
        return f'dedup{self._pid}'

    def _interface(self, name):
        return pathlib.Path('/sys/class/net', self.link, name)

    def running(self):
        return super().running() and self._linked()

    def _linked(self):
        try:
            return self._interface('operstate').read_text() == 'up\n'
        except OSError:
            return False

    def launch(self):
        if os.geteuid() != 0:
            raise cloud_service.CloudError(
                'only root can make a network.\nWhat to do: run this as '
                'root, or have a cloud without compute hosts of their own.')
        for program, package in PROGRAMS.items():
            cloud_service.find(program, package)
        holder = self.spawn(['unshare', '--net', '--uts', 'sh', '-c',
                             'hostname "$0" && exec sleep infinity',
                             self.name])
        # The holder sleeps in its own namespaces now.
        self.wait_for(lambda: pathlib.Path(
            f'/proc/{holder.pid}/comm').read_text() == 'sleep\n')
        here = ['ip', 'address', 'add', self.cloud.address, 'peer', self.ip,
                'dev', self.link]
        there = [*self.enter(), 'ip', 'address', 'add', self.ip, 'peer',
                 self.cloud.address, 'dev', UPLINK]
        self._run('ip', 'link', 'add', self.link, 'type', 'veth',
                  'peer', 'name', UPLINK, 'netns', holder.pid)
        self._run(*here)
        self._run(*there)
        for name in ('lo', UPLINK):
            self._run(*self.enter(), 'ip', 'link', 'set', name, 'up')
        self._run('ip', 'link', 'set', self.link, 'up')

    def answers(self):
        return self._linked()

    def kill(self):
        # The namespace goes with its last process, and the link with it; but
        # the address must be free at once.
        if os.geteuid() == 0 and self.processes:
            with contextlib.suppress(cloud_service.CloudError):
                self._run('ip', 'link', 'delete', self.link)
        super().kill()

    def _run(self, *command):
        result = subprocess.run(
            [str(word) for word in command], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=COMMAND_TIMEOUT,
            env={'PATH': cloud_service.path()})
        if result.returncode:
            raise cloud_service.CloudError(
                f'{" ".join(map(str, command))}: {result.stderr.strip()}')

    def enter(self):
        """Return the words before a command that run it on this host."""
        return [cloud_service.find('nsenter', 'util-linux'),
                f'--target={self._pid}', '--net', '--uts']

    # -- the link ----------------------------------------------------------

    def limit(self, mbit):
        """Limit the link to so many Mbit/s, each way; None: no limit."""
        for enter, name in (([], self.link), (self.enter(), UPLINK)):
            if mbit is None:
                self._run(*enter, 'tc', 'qdisc', 'replace', 'dev', name,
                          'root', 'noqueue')
                continue
            self._run(*enter, 'tc', 'qdisc', 'replace', 'dev', name, 'root',
                      'tbf', 'rate', f'{mbit}mbit', 'latency', '50ms',
                      'burst', max(BURST, mbit * 10**6 // 8 // TICKS))

    def connect(self, connected):
        """Plug the link in or out, at the machine's end."""
        self._run('ip', 'link', 'set', self.link,
                  'up' if connected else 'down')

    # Bytes sent by the machine's end are bytes received by the host.

    def received(self):
        """Return the bytes received over the link so far, with all headers."""
        return int(self._interface('statistics/tx_bytes').read_text())

    def sent(self):
        """Return the bytes sent over the link so far, with all headers."""
        return int(self._interface('statistics/rx_bytes').read_text())
