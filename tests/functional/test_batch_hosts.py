# SPDX-License-Identifier: Apache-2.0

"""Batch backups of several hosts, as an operator runs them: by ssh and MPI.

Each host has network, hostname, ssh server, keys and disks of its own
(``tests/support/net_hosts.py``). Each also has the bridge that libvirt makes,
with the same address on all hosts.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.support import batches
from tests.support import net_hosts
from tests.support import repositories
from tests.support.repositories import noise

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(600),
    pytest.mark.needs('network', 'ssh')]

MIB = 1 << 20
NAMES = ('compute1', 'compute2', 'compute3')
LIMIT = 300
VENV = pathlib.Path(sys.executable).parent.parent


class Cloud:
    """A repository that three hosts share."""

    def __init__(self, directory, network):
        self.directory = directory
        self.network = network
        self.path = repositories.create(directory / 'repository')
        self.disks = {}
        for number, host in enumerate(network.hosts.values()):
            self.add_disk(host, f'disk{number + 1}',
                          noise(4 * MIB, 9) + noise(MIB, number))

    def add_disk(self, host, name, data):
        """Make a disk that only this host has."""
        path = host.own / f'{name}.img'
        path.write_bytes(data)
        self.disks[name] = data
        return path

    def command(self, *arguments, hosts='\n'.join(NAMES)):
        """Return the words of a command that works on hosts."""
        path = self.directory / 'hosts-file'
        path.write_text(f'# The rack\n\n{hosts}  # and no more\n')
        places = (f'--{name}={net_hosts.OWN}/{name}'
                  for name in ('state', 'spool', 'scratch'))
        return [VENV / 'bin' / 'glance-dedup', '--repository', self.path,
                'backup', arguments[0], '--hosts', path, *places,
                *arguments[1:], '-f', 'json',
                *(net_hosts.OWN / f'{name}.img' for name in self.disks)]

    def back_up(self, *arguments, **options):
        """Run a command on a host; return status, rows by name, errors."""
        done = self.network.hosts['compute1'].run(
            *self.command(*arguments, **options), check=False, env=ENV)
        rows = json.loads(done.stdout) if done.stdout else []
        return done.returncode, {row['name']: row for row in rows}, done.stderr

    def require_backups(self, rows):
        with repositories.open_repository(self.path) as repo:
            for name, row in rows.items():
                assert repositories.read_all(repo, row['backup_id']) == (
                    self.disks[name])


# The environment as after a login: no variable of the tests, and none of
# another job of MPI.
ENV = {name: value for name, value in os.environ.items()
       if not name.startswith(('GLANCE_DEDUP_', 'OMPI_', 'PMIX_', 'PRTE_'))}


@pytest.fixture(scope='module')
def network(tmp_path_factory):
    net_hosts.require_hosts()
    with net_hosts.Network(tmp_path_factory.mktemp('network'), NAMES
                           ) as found:
        found.know()
        for host in found.hosts.values():
            host.run('ip', 'link', 'add', 'virbr0', 'type', 'bridge')
            host.run('ip', 'address', 'add', '192.168.122.1/24', 'dev',
                     'virbr0')
            host.run('ip', 'link', 'set', 'virbr0', 'up')
        yield found


@pytest.fixture
def cloud(network, tmp_path):
    yield Cloud(tmp_path, network)
    for host in network.hosts.values():
        host.run('sh', '-c', f'rm -rf {net_hosts.OWN}/*')
        (host.directory / 'ssh' / 'environment').unlink(missing_ok=True)


@pytest.fixture
def hold(tmp_path, monkeypatch):
    """Have a host's rank wait amid a backup; return the file that ends it."""
    def hold_rank(host):
        proceed = batches.hold(tmp_path / 'site', monkeypatch, 'answer')
        (host.directory / 'ssh' / 'environment').write_text(
            f'PYTHONPATH={proceed.parent}\n')
        return proceed
    return hold_rank


def test_three_hosts(cloud):
    """Each host reads its own disk; equal blocks are stored once."""
    status, rows, err = cloud.back_up('run')
    assert status == 0, err
    assert set(rows) == set(cloud.disks)
    assert sum(row['new_bytes'] for row in rows.values()) == 7 * MIB
    cloud.require_backups(rows)
    for number, host in enumerate(cloud.network.hosts.values(), 1):
        kept = {path.name for path in (host.own / 'state').rglob('*')
                if path.is_file()}
        assert {name for name in kept if name.startswith('disk')} == {
            name for name in kept if name.startswith(f'disk{number}')} != set()
    repositories.require_clean(cloud.path)


def wrong_key(host):
    (host.directory / 'ssh' / 'authorized_keys').rename(
        host.directory / 'keys')
    yield 'Permission denied'
    (host.directory / 'keys').rename(
        host.directory / 'ssh' / 'authorized_keys')


def no_network(host):
    host.run('ip', 'link', 'set', 'uplink', 'down')
    yield 'port 22: '
    host.run('ip', 'link', 'set', 'uplink', 'up')


def no_software(host):
    (host.directory / 'empty').mkdir()
    host.run('mount', '--bind', host.directory / 'empty', VENV)
    yield 'does not run there with this software'
    host.run('umount', VENV)


def same_hostname(host):
    host.run('hostname', 'compute3')
    yield 'its hostname is compute3, which is that of compute3'
    host.run('hostname', host.name)


# Long: ssh waits ten seconds for a host without a network, twice.
@pytest.mark.parametrize('fault', [
    wrong_key, no_network, no_software, same_hostname])
def test_host_that_cannot_take_part(cloud, fault):
    """The host is left out, and named; the others' backups are made."""
    undo = fault(cloud.network.hosts['compute2'])
    reason = next(undo)
    try:
        status, rows, err = cloud.back_up('run')
    finally:
        next(undo, None)
    assert status == 3
    line, = (line for line in err.splitlines()
             if 'compute2 was left out: ' in line)
    assert reason in line
    assert 'left out: compute2' in rows.pop('disk2')['note']
    cloud.require_backups(rows)


def test_no_host_can_take_part(cloud):
    status, rows, err = cloud.back_up('plan', hosts='compute8\ncompute9')
    assert (status, rows) == (3, {})
    assert 'no host can take part' in err and 'compute8: ssh' in err


def test_unknown_key(cloud):
    """A host is left out while its key is not among the known keys."""
    known = cloud.network.hosts['compute1'].directory / 'ssh' / 'known_hosts'
    text = known.read_text()
    known.write_text(''.join(
        line for line in text.splitlines(True) if 'compute3' not in line))
    try:
        status, rows, err = cloud.back_up('plan')
    finally:
        known.write_text(text)
    assert status == 3 and set(rows) == {'disk1', 'disk2'}
    assert ('compute3 was left out: ssh cannot log in: Host key verification '
            'failed' in err)


PORTS = range(42000, 42200)


def test_ports_that_a_firewall_may_know(cloud, hold):
    """All ports that others connect to are in the ranges of the guide."""
    environment = {
        **ENV, 'PRTE_MCA_oob_tcp_dynamic_ipv4_ports': '42000-42099',
        'OMPI_MCA_btl_tcp_port_min_v4': '42100',
        'OMPI_MCA_btl_tcp_port_range_v4': '100'}
    seen = set()
    first = cloud.network.hosts['compute1']
    proceed = hold(cloud.network.hosts['compute2'])
    with subprocess.Popen(
            [*first.enter(), *cloud.command('run')],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=environment) as process:
        while process.poll() is None:
            for host in cloud.network.hosts.values():
                seen |= listening(host)
            if seen - {22}:
                proceed.touch()
    assert process.returncode == 0
    assert seen - {22} and seen <= {22, *PORTS}


def listening(host):
    """Return the ports of IPv4 on which other hosts can reach a host.

    Listeners for IPv6 alone are not used: the networks are of IPv4.
    """
    rows = host.run('ss', '-4', '--no-header', '--listening', '--numeric',
                    '--tcp').stdout.splitlines()
    addresses = (row.split()[3].rpartition(':') for row in rows)
    return {int(port) for address, _, port in addresses
            if not address.startswith('127.')}


#: Options of Open MPI, 5 and 4, by which it notices soon that a host is dead.
#: The host's kernel answers, so how busy the host is does not matter.
KEEPALIVE = {
    f'{prefix}_MCA_oob_tcp_keepalive_{name}': value
    for prefix in ('PRTE', 'OMPI')
    for name, value in (('time', '5'), ('intvl', '1'), ('probes', '6'))}


# Long: Open MPI needs eleven seconds to notice the death, and then ssh ten.
def test_host_that_dies(cloud, hold):
    """A dead host's disks are given up; the others are backed up again."""
    host = cloud.network.hosts['compute2']
    hold(host)
    with subprocess.Popen(
            [*cloud.network.hosts['compute1'].enter(), *cloud.command('run')],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
            env={**ENV, **KEEPALIVE}) as process:
        repositories.eventually(
            lambda: list(host.own.glob('spool/*/*')), LIMIT)
        killed = [pid for pid, command in host.processes()
                  if b'batch.rank' in command or b'prted' in command]
        host.run('ip', 'link', 'set', 'uplink', 'down')
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            process.terminate()
            host.run('ip', 'link', 'set', 'uplink', 'up')
    rows = {row['name']: row for row in json.loads(out)}
    assert killed and process.returncode == 3, err
    assert ('its host compute2 cannot take part any more: ssh cannot log in'
            in rows.pop('disk2')['note'])
    assert set(rows) == {'disk1', 'disk3'}
    cloud.require_backups(rows)
