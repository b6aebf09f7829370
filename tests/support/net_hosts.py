# SPDX-License-Identifier: Apache-2.0

"""Hosts on one machine: namespaces for network, name and mounts, and ssh.

Each host has a name, an address in a network that only the hosts have, its own
``/etc/hosts``, ``~/.ssh`` and ``/run``, and its own directory at :data:`OWN`.
The hosts share the rest of the machine. Each runs an ssh server, and root of
each host may log in on each other one.

This needs root, and the packages that ``bindep.txt`` names.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

#: Path of each host's own directory.
OWN = pathlib.Path('/mnt')
#: Maximum seconds for a command.
LIMIT = 120

_NETWORK = '10.77.0'
# Arguments: the name, the host's directory on the machine, and that of ssh.
_HOST = """
mount --make-rprivate /
hostname "$1"
ip link set lo up
mount --bind "$2/own" /mnt
mount --bind "$2/etc-hosts" /etc/hosts
mkdir -p -m 0700 "$3"
mount --bind "$2/ssh" "$3"
mount -t tmpfs tmpfs /run
mkdir -m 0755 /run/sshd
exec sleep infinity
"""
_SSHD = """
HostKey {directory}/host-key
PidFile none
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
PermitUserEnvironment yes
LogLevel VERBOSE
"""


class Network:
    """Hosts that reach each other, but no other network."""

    def __init__(self, directory, names):
        self._directory = pathlib.Path(directory)
        self._stack = contextlib.ExitStack()
        self.names = names
        self.hosts = {}

    def __enter__(self):
        with self._stack:
            self._key()
            switch = self._spawn('unshare', '--net', 'sleep', 'infinity')
            _wait_for_sleep(switch)
            _in(switch, 'ip', 'link', 'add', 'switch', 'type', 'bridge')
            _in(switch, 'ip', 'link', 'set', 'switch', 'up')
            for number, name in enumerate(self.names, 1):
                self.hosts[name] = self._host(switch, name, number)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc_info):
        self._stack.close()

    def address(self, name):
        """Return a host's address."""
        return f'{_NETWORK}.{self.names.index(name) + 1}'

    def _key(self):
        _run('ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f',
             self._directory / 'key')
        (self._directory / 'hosts').write_text(
            '127.0.0.1 localhost\n' + ''.join(
                f'{self.address(name)} {name}\n' for name in self.names))

    def _host(self, switch, name, number):
        directory = self._directory / name
        ssh = directory / 'ssh'
        for made in (directory / 'own', ssh):
            made.mkdir(parents=True)
        ssh.chmod(0o700)
        shutil.copyfile(self._directory / 'hosts', directory / 'etc-hosts')
        shutil.copyfile(self._directory / 'key.pub', ssh / 'authorized_keys')
        shutil.copy(self._directory / 'key', ssh / 'id_ed25519')
        _run('ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f',
             directory / 'host-key')
        (directory / 'sshd.conf').write_text(
            _SSHD.format(directory=directory))
        host = Host(name, directory, self._spawn(
            'unshare', '--net', '--uts', '--mount', 'sh', '-ec', _HOST, 'sh',
            name, directory, pathlib.Path.home() / '.ssh'))
        _wait_for_sleep(host.process)
        self._stack.callback(host.die)
        port = f'port{number}'
        _in(switch, 'ip', 'link', 'add', port, 'type', 'veth', 'peer', 'name',
            'uplink', 'netns', host.process.pid)
        _in(switch, 'ip', 'link', 'set', port, 'master', 'switch', 'up')
        host.run('ip', 'address', 'add', f'{self.address(name)}/24', 'dev',
                 'uplink')
        host.run('ip', 'link', 'set', 'uplink', 'up')
        log = directory / 'sshd.log'
        server = self._spawn(
            *host.enter(), shutil.which('sshd', path='/usr/sbin'), '-D', '-e',
            '-f', directory / 'sshd.conf', log=log)
        _wait(server, lambda: 'Server listening' in log.read_text())
        return host

    def _spawn(self, *command, log=None):
        with contextlib.ExitStack() as stack:
            output = (subprocess.DEVNULL if log is None
                      else stack.enter_context(open(log, 'wb')))
            process = subprocess.Popen(
                [str(word) for word in command], stdin=subprocess.DEVNULL,
                stdout=output, stderr=output)
        self._stack.callback(process.wait, LIMIT)
        self._stack.callback(process.kill)
        return process

    def know(self):
        """Add the ssh keys of all hosts to each, as an operator would."""
        known = ''.join(
            f'{name} {(host.directory / "host-key.pub").read_text()}'
            for name, host in self.hosts.items())
        for host in self.hosts.values():
            (host.directory / 'ssh' / 'known_hosts').write_text(
                known)


class Host:
    """One of the hosts.

    :ivar own: its directory, as the machine sees it; OWN for the host
    """

    def __init__(self, name, directory, process):
        self.name = name
        self.directory = directory
        self.process = process
        self.own = directory / 'own'

    def enter(self):
        """Return the words before a command that run it on this host."""
        return ['nsenter', f'--target={self.process.pid}', '--net', '--uts',
                '--mount']

    def processes(self):
        """Yield all processes on the host, by their mount namespace."""
        mine = os.readlink(f'/proc/{self.process.pid}/ns/mnt')
        for path in pathlib.Path('/proc').glob('[0-9]*'):
            with contextlib.suppress(OSError):
                if os.readlink(path / 'ns' / 'mnt') == mine:
                    yield int(path.name), (path / 'cmdline').read_bytes()

    def die(self):
        """End all processes of the host, also those that ssh has started."""
        for pid, _ in list(self.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run(self, *command, check=True, **options):
        """Run a command on the host, and wait for it."""
        return _run(*self.enter(), *command, check=check, **options)


def require_hosts():
    """Skip a test if hosts cannot be made."""
    for program in ('ip', 'nsenter', 'ssh', 'ssh-keygen', 'unshare'):
        if shutil.which(program) is None:
            pytest.skip(f'{program} is not installed')
    if shutil.which('sshd', path='/usr/sbin') is None:
        pytest.skip('the package openssh-server is not installed')


def _run(*command, check=True, **options):
    done = subprocess.run(
        [str(word) for word in command], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=LIMIT, **options)
    assert not check or done.returncode == 0, (command, done.stderr)
    return done


def _in(process, *command):
    _run('nsenter', f'--target={process.pid}', '--net', *command)


def _wait_for_sleep(process):
    """Wait until a process has its namespaces."""
    comm = pathlib.Path(f'/proc/{process.pid}/comm')
    _wait(process, lambda: comm.read_text() == 'sleep\n')


def _wait(process, condition):
    """Wait until a condition is true, while a process runs."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None, process.args
        assert time.monotonic() < deadline, process.args
        time.sleep(0.01)
