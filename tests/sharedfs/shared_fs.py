# SPDX-License-Identifier: Apache-2.0

"""A real shared file system in a directory, mounted twice, as by two hosts.

``tools/shared`` is this as a command; tests have it as the fixture `two_hosts`
(``tests/functional/conftest.py``)::

    with Shared('juicefs', directory) as shared:
        shared.up()
        with shared.place('images') as hosts:
            hosts[0].root

Its servers and clients are services like those of ``tests/cloud``: recorded in
``state.json``, with their logs in ``log/``. Each client is a process of its
own, with caches and locks of its own, and so is the mount that it serves: the
file system cannot tell it from a host. Killing it is the host's death.
``one/shared`` and ``two/shared`` are the mounts.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import threading
import time

from tests.cloud import cloud_service
from tests.cloud import cloud_state
from tests.cloud import live_process

SharedError = cloud_service.CloudError
HOSTS = ('one', 'two')
LIMIT = 60
#: Seconds for which a mount may stay busy before it counts as used.
BUSY = 3
#: An address that only the servers' own network has; for measurements.
ADDRESS = '198.18.0.1'


class Server(cloud_service.Service):
    """A server of a file system, or a service that it needs.

    :param shared: the file system
    """

    def __init__(self, shared):
        super().__init__(shared)
        self.shared = shared

    @property
    def address(self):
        return '-'

    def find(self, program, package):
        """Return the path of a program that a package of the system has."""
        return cloud_service.find(program, package)

    def ask(self, *command):
        """Return the output of a command on the file system's network."""
        done = subprocess.run(
            [*self.shared.enter(), *map(str, command)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=cloud_service.COMMAND_TIMEOUT,
            env={**self.environment(), live_process.MARK: str(
                self.shared.directory)})
        if done.returncode:
            raise SharedError(
                f'{" ".join(map(str, command))}: exit status '
                f'{done.returncode}: {done.stderr.strip()}{done.stdout}')
        return done.stdout

    def environment(self):
        return {**super().environment(), 'PATH': cloud_service.path()}


class Network(Server):
    """A network of the servers' and the clients' own, with one address.

    So fixed ports of a server collide with no others, and only these processes
    reach them. It has no name, and goes with its last process.
    """

    name = 'network'
    title = 'the network'

    @property
    def address(self):
        return ADDRESS

    def launch(self):
        if os.geteuid() != 0:
            raise SharedError('only root can make a network and mount.\n'
                              'What to do: run this as root.')
        ip = self.find('ip', 'iproute2')
        self.spawn([
            self.find('unshare', 'util-linux'), '--net', 'sh', '-c',
            '"$0" link set lo up && "$0" address add "$1"/32 dev lo && '
            'exec sleep infinity', ip, ADDRESS])

    def answers(self):
        return (pathlib.Path(f'/proc/{self.processes[0].pid}/comm').read_text()
                == 'sleep\n')

    def enter(self):
        """Return the words before a command that run it in this network."""
        return [cloud_service.find('nsenter', 'util-linux'),
                f'--net=/proc/{self.processes[0].pid}/ns/net']


def still_mounted(places: list) -> SharedError:
    return SharedError(
        f'still mounted: {", ".join(map(str, places))}.\nWhat to do: see who '
        'uses it (fuser -m), end that, and run tools/shared down again.')


class Mount(Server):
    """A client of a file system, for one host.

    A file system's class has `launch`, which starts the client on `root`, and
    `versions`.

    :ivar directory: for this host's own files
    :ivar root: the mount
    """

    def __init__(self, shared, name):
        self.name = name
        self.title = f'the mount of host {name}'
        super().__init__(shared)
        self.directory = shared.directory / name
        self.root = self.directory / 'shared'

    @property
    def address(self):
        return str(self.root)

    def prepare(self):
        self.root.mkdir(exist_ok=True)

    def answers(self):
        if not os.path.ismount(self.root):
            return False
        # Some mount before they can serve.
        os.listdir(self.root)
        return True

    def stop(self):
        """Unmount, as an operator would.

        A client sometimes accesses its own mount, which keeps it busy.
        """
        deadline = time.monotonic() + BUSY
        while os.path.ismount(self.root):
            done = subprocess.run(['umount', self.root], timeout=LIMIT,
                                  check=False, capture_output=True)
            if done.returncode != 0 and time.monotonic() > deadline:
                raise still_mounted([self.root])
            time.sleep(0.1)
        super().stop()

    def die(self):
        """End the client at once, and leave its mount, broken."""
        super().kill()

    def kill(self):
        self.die()
        # There may be several, one over another, and broken ones.
        for _ in range(mounts_at(self.root)):
            subprocess.run(['umount', '--lazy', self.root], timeout=LIMIT,
                           check=True)


class Host:
    """A host in a directory of its mount; see tests/sharedfs/fuse_hosts.py.

    :param mount: the host's
    :param name: of the directory
    """

    remembers = False

    def __init__(self, mount, name):
        self.mount = mount
        self.directory = mount.directory / name
        self.root = mount.root / name
        self.filters = self.directory / 'filters'
        self.directory.mkdir()

    @property
    def seen(self):
        """Return the path of the shared files, even if this host is dead."""
        mount = next(mount for mount in self.mount.shared.mounts
                     if mount.running())
        return mount.root / self.root.name

    def die(self):
        """Kill the host: its unsynced data is lost."""
        self.mount.die()

    def kill(self):
        """Kill the host, and remove its mount."""
        self.mount.kill()

    def restart(self):
        """Restart the host, with empty caches."""
        self.mount.kill()
        self.mount.start()
        return self


def mounts():
    """Return all mount points that this process sees."""
    lines = pathlib.Path('/proc/self/mountinfo').read_text().splitlines()
    return [line.split()[4].encode('latin-1').decode('unicode_escape')
            for line in lines]


def mounts_at(path):
    return mounts().count(str(path))


def kind_in(directory):
    """Return the kind of file system in a directory; None: nothing."""
    try:
        state = json.loads((directory / 'state.json').read_text())
    except FileNotFoundError:
        return None
    return state['wanted'][0]


class Shared:
    """A shared file system in a directory, running or not.

    :param kind: its name in `KINDS` of ``tests/sharedfs/kinds.py``
    :param make: that makes its services, given this, in the order in which
        they are started; the last are the mounts
    :param directory: for all of its files; empty, missing, or one of these
    :param say: called with lines about the progress
    """

    def __init__(self, kind, make, directory, say=lambda text: None):
        self.kind = kind
        self.directory = pathlib.Path(directory).resolve()
        self.say = say
        self._cancelled = threading.Event()
        self._make_directory()
        self.state = cloud_state.State(self.directory / 'state.json')
        self.state.want([kind])
        if self.state.wanted != [kind]:
            raise SharedError(
                f'{self.directory} has another file system: '
                f'{self.state.wanted}.\nWhat to do: end that one with '
                'tools/shared down, or give another --directory.')
        self.services = {one.name: one for one in make(self)}
        self.mounts = [self.services[name] for name in HOSTS]

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.down()

    def _make_directory(self):
        place = self.directory
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()) and not (place / 'state.json').exists():
            raise SharedError(
                f'{place} has something in it that is no shared file '
                'system.\nWhat to do: give --directory another one.')
        for name in ('tmp', 'log'):
            (place / name).mkdir(exist_ok=True)

    # -- for services ------------------------------------------------------

    def marked(self):
        """Return all of its processes, recorded or not."""
        return live_process.marked(self.directory)

    def check(self):
        if self._cancelled.is_set():
            raise cloud_service.Cancelled('interrupted')

    def enter(self):
        """Return the words that run a command on the servers' network."""
        network = self.services.get('network')
        return network.enter() if network else []

    # -- for tests ---------------------------------------------------------

    @contextlib.contextmanager
    def place(self, name):
        """Yield both hosts, with an empty directory; restart dead ones."""
        root = self.mounts[0].root / name
        root.mkdir()
        hosts = [Host(mount, name) for mount in self.mounts]
        try:
            yield hosts
        finally:
            for host in hosts:
                if not host.mount.running():
                    host.restart()
                shutil.rmtree(host.directory)
            shutil.rmtree(root)

    # -- up and down -------------------------------------------------------

    def up(self):
        """Start all services that do not run."""
        for one in self.services.values():
            if one.state() == 'up':
                self.say(f'{one.title} runs already')
                continue
            self.say(f'start {one.title} ...')
            one.start()

    def versions(self):
        """Return the tested versions, by package or program."""
        return self.mounts[0].versions()

    def down(self):
        """End everything, and remove the directory."""
        for one in reversed(self.services.values()):
            if one.processes:
                self.say(f'end {one.title} ...')
            # A mount may remain after its process has ended.
            one.stop()
        self._end_marked()
        left = [path for path in mounts()
                if pathlib.Path(path).is_relative_to(self.directory)]
        if left:
            raise still_mounted(left)   # nothing is removed through a mount
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)

    def _end_marked(self):
        """Kill the daemons that servers have started."""
        deadline = time.monotonic() + LIMIT
        while left := self.marked():
            for process in left:
                process.kill()
            if time.monotonic() > deadline:
                raise SharedError(
                    f'process {left[0].pid} does not end.\nWhat to do: see '
                    f'what it waits for in /proc/{left[0].pid}/stack, and try '
                    'again.')
            time.sleep(live_process.POLL)
