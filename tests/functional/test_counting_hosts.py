# SPDX-License-Identifier: Apache-2.0

"""Counting on other hosts, by real ssh. Each host is this one, by a name."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from glance_dedup.base import package_version
from glance_dedup.maintenance import rebuild_worker
from glance_dedup.maintenance import refcount_rebuild
from tests.support import maintenance
from tests.support.maintenance import content
from tests.support import ports
from tests.support import repositories
from tests.support.repositories import put
from tests.unit.dedupd.tasks.collecting import collect

pytestmark = pytest.mark.needs('ssh')

pytest_plugins = ['tests.support.maintainer_fixtures']

HOSTS = ('one', 'two')


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A server of ssh, and a client that takes each host for this one."""
    server = shutil.which('sshd', path='/usr/sbin:/usr/bin')
    client = shutil.which('ssh')
    assert server and client, 'openssh is not installed: see bindep.txt'
    home = tmp_path / 'ssh'
    home.mkdir(mode=0o700)
    for name in 'host', 'user':
        subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f',
                        home / name], check=True, timeout=60)
    port = ports.free_port()
    (home / 'sshd_config').write_text(
        f'Port {port}\nListenAddress 127.0.0.1\nHostKey {home}/host\n'
        f'AuthorizedKeysFile {home}/user.pub\nStrictModes no\nUsePAM no\n'
        f'PermitRootLogin yes\nPidFile none\n')
    (home / 'config').write_text(
        f'Host {" ".join(HOSTS)}\n HostName 127.0.0.1\n Port {port}\n'
        f' IdentityFile {home}/user\n IdentitiesOnly yes\n'
        f' StrictHostKeyChecking no\n UserKnownHostsFile {home}/known\n'
        f' LogLevel ERROR\n')
    program = tmp_path / 'bin' / 'ssh'
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {client} -F {home}/config "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv('PATH', f'{program.parent}:{os.environ["PATH"]}')
    pathlib.Path('/run/sshd').mkdir(exist_ok=True)
    process = subprocess.Popen(
        [server, '-D', '-e', '-f', home / 'sshd_config'],
        stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    try:
        repositories.eventually(lambda: answers(port))
        yield
    finally:
        process.terminate()
        process.wait(30)


def answers(port):
    try:
        with socket.create_connection(('127.0.0.1', port), 1) as connection:
            return connection.recv(4) == b'SSH-'
    except OSError:
        return False


PROGRESS = re.compile(r' *[a-z ]+: \d+ %, .*')


@pytest.fixture
def filled(repo, monkeypatch):
    monkeypatch.setattr(rebuild_worker, '_GROUPS', 1)
    for number in range(8):
        put(repo, f'image-{number}', content(number, number + 1, 50))
    return repo


def counters():
    """The counters of all hosts that are no children of this process."""
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*'):
        try:
            command = (path / 'cmdline').read_bytes()
            parent = int((path / 'stat').read_text().rsplit(')')[1].split()[1])
        except OSError:
            continue
        if (command.endswith(
            b'-m\0' + rebuild_worker.__name__.encode() + b'\0')
                and parent != os.getpid()):
            found.append(int(path.name))
    return found


def command(path, *words):
    """Run one of glance-dedup's commands."""
    return subprocess.run(
        [pathlib.Path(sys.executable).parent / 'glance-dedup',
         '--repository', path, *words], capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=120)


def test_both_commands(ssh, path, filled, tmp_path):
    hosts = tmp_path / 'hosts'
    hosts.write_text('one\ntwo  # the other one\n')
    for words in (['repository', 'rebuild-catalog'],
                  ['task', 'collect', '--by-partition']):
        filled.delete(filled.images()[0])
        done = command(path, *words, '--hosts', hosts, '-f', 'json')
        assert done.returncode == 0, done.stderr
        # Progress is printed, for users of a slow machine.
        assert all(PROGRESS.fullmatch(line)
                   for line in done.stderr.splitlines()), done.stderr
    assert json.loads(done.stdout)['freed_blocks'] > 0
    with maintenance.maintaining(filled) as maintainer:
        maintenance.account(maintainer)
        maintenance.require_collected(maintainer)
    repositories.require_clean(path)


def test_the_same_catalog(ssh, filled, maintainer):
    maintainer.rebuild()
    expected = maintenance.counts(maintainer.catalog)
    assert expected
    maintainer.rebuild(hosts=HOSTS)
    assert not maintainer.warnings
    assert maintenance.counts(maintainer.catalog) == expected
    repositories.eventually(lambda: not counters())


@pytest.mark.parametrize('when', ['reading images', 'adding up counts'])
def test_a_host_dies(ssh, filled, maintainer, when):
    """A process of this host counts instead; a warning names the dead one."""
    filled.delete('image-3')
    collect(maintainer)

    def progress(done, total, what):
        # This kills only once.
        if what == when and not done and not killed:
            for pid in counters()[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    killed = []
    before = set(counters())
    assert not before
    maintainer.rebuild(progress, hosts=HOSTS)
    assert killed
    assert 'a process that counts has ended' in maintainer.warnings[-1]
    assert maintainer.warnings[-1].startswith(('host one:', 'host two:'))
    maintenance.account(maintainer)
    maintenance.require_counted(maintainer)


def test_a_host_that_is_not_there(ssh, filled, maintainer):
    result = collect(maintainer, hosts=('one', 'nowhere.invalid'))
    warning, = maintainer.warnings
    assert warning.startswith('host nowhere.invalid:')
    assert 'Could not resolve' in warning
    assert result.refused is None


def test_other_software(ssh, filled, maintainer, monkeypatch):
    monkeypatch.setattr(package_version, 'version', lambda: '99')
    collect(maintainer, hosts=HOSTS)
    assert 'install one version on all hosts' in maintainer.warnings[-1]


def test_too_many_hosts(path, filled, tmp_path):
    hosts = tmp_path / 'hosts'
    hosts.write_text(''.join(f'h{n}\n' for n in range(
        refcount_rebuild.MAX_COUNT + 1)))
    done = command(path, 'task', 'collect', '--by-partition', '--hosts', hosts)
    assert done.returncode == 2 and 'at most 64' in done.stderr
