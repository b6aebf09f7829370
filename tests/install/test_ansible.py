# SPDX-License-Identifier: Apache-2.0
"""The Ansible role, applied to a Debian by Ansible itself.

The hosts are one directory with the packages of a small Debian, in which
commands run by chroot. systemd does not run there: the role leaves services
out, and the test starts dedupd itself. All mounts, and all processes that are
started there, are in namespaces that end with the process which made them.
"""

import configparser
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

from tests.support import documents
from tests.support import namespaces
from tests import test_package

TOP = documents.TOP
ANSIBLE = TOP / 'etc' / 'ansible'
PAGE = documents.SOURCE / 'install' / 'ansible.rst'
#: Seconds: to install something, and for a daemon to answer.
INSTALL_SECONDS = 900
START_SECONDS = 120
#: A host has these before: Python, and systemd's tools but not its init.
PACKAGES = 'procps,python3,python3-apt,python3-venv,systemd'
SOURCE_LINE = ('deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]'
               ' $(REPO_URI) $(RELEASE) $(COMPONENT)')
#: Mounts file systems for programs in the directory $1.
MOUNTS = r"""
mount -t proc proc "$1/proc"
mount --bind /dev "$1/dev"
mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm"
mount -t tmpfs -o mode=0755 tmpfs "$1/run"
mkdir -p "$1/etc/ssl/certs"
mount --bind /etc/ssl/certs "$1/etc/ssl/certs"
"""
DEDUP = '/opt/glance/bin/glance-dedup'
GLANCE_CONF = """\
# A comment that stays.
[DEFAULT]
enabled_backends = file:file

[glance_store]
default_backend = file

[file]
filesystem_store_datadir = /var/lib/glance/images
"""

tree = test_package.tree
wheel = test_package.wheel

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason='only root can chroot')]


def run(*command, succeeds=True, data=None, **environment):
    result = subprocess.run(
        command, input=data, capture_output=True, text=True, cwd='/',
        timeout=INSTALL_SECONDS, env={**os.environ, **environment})
    said = result.stdout + result.stderr
    assert (result.returncode == 0) == succeeds, said
    return said


@pytest.fixture(scope='module')
def tools(tmp_path_factory):
    """The programs of Ansible, with its collections, and its linters."""
    venv = tmp_path_factory.mktemp('tools') / 'venv'
    run(sys.executable, '-m', 'venv', venv)
    run(venv / 'bin' / 'pip', 'install', '--quiet', 'ansible', 'ansible-lint',
        'yamllint')
    return venv / 'bin'


def make_debian(directory, *options, suite=None):
    """Make a Debian, this machine's or another, from apt's mirrors.

    :param options: which packages, for mmdebstrap
    """
    here = re.search(r'^VERSION_CODENAME=(\w+)$',
                     pathlib.Path('/etc/os-release').read_text(), re.M)[1]
    sources = run('apt-get', 'indextargets', '--format', SOURCE_LINE,
                  'Identifier: Packages', 'Origin: Debian')
    assert sources, 'apt has no source whose origin is Debian'
    if suite is not None:
        sources = ''.join(
            line.replace(f' {here} ', f' {suite} ')
            for line in sources.splitlines(True) if f' {here} ' in line)
    # mmdebstrap does not read the machine's apt.conf, where a proxy may be.
    apt_conf = directory.parent / 'apt.conf'
    apt_conf.write_text('\n'.join(
        line for line in run('apt-config', 'dump').splitlines()
        if re.match(r'Acquire::(https?|check-)\S* ".+";', line, re.I)))
    # mmdebstrap mounts this machine's /dev/shm below the directory. Killed
    # without a namespace of its own, it would leave that mount there, and
    # removing the directory would empty /dev/shm.
    run(*namespaces.COMMAND, 'mmdebstrap', '--quiet', '--mode=root', *options,
        f'--aptopt={apt_conf}', suite or here, directory, '-', data=sources)


class Host:
    """A directory with a Debian in it, and the namespaces of its processes."""

    def __init__(self, root):
        self.root = root
        self._namespaces = namespaces.Namespaces(MOUNTS, root)
        #: Runs the following command with the mounts, outside the directory.
        self.enter = self._namespaces.enter
        self.close = self._namespaces.close

    def inside(self, *command, user='root'):
        return [*self.enter, 'chroot', self.root, 'runuser', '-u', user, '--',
                *command]

    def run(self, *command, user='root', **options):
        return run(*self.inside(*command, user=user), **options)

    def write(self, name, text):
        path = self.root / name.lstrip('/')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def read(self, name):
        return (self.root / name.lstrip('/')).read_text()


@pytest.fixture(scope='module')
def host(tmp_path_factory):
    """A host as the role requires it: users, options and an environment."""
    root = tmp_path_factory.mktemp('debian') / 'root'
    make_debian(root, '--variant=minbase', f'--include={PACKAGES}')
    # apt's lists of packages are missing. Ansible only reads this time.
    os.utime(root / 'var' / 'lib' / 'apt' / 'lists', (0, 0))
    for name in ('/etc/resolv.conf', '/etc/hosts', '/etc/pip.conf'):
        if os.path.exists(name):
            shutil.copy(name, root / name.lstrip('/'))
    with contextlib.closing(Host(root)) as host:
        host.run('useradd', '--system', '--user-group', '--home-dir',
                 '/var/lib/glance', '--create-home', 'glance')
        host.run('python3', '-m', 'venv', '/opt/glance')
        host.write('/etc/glance/glance-api.conf', GLANCE_CONF)
        host.write('/etc/nova/nova.conf', '[glance]\n')
        yield host


@pytest.fixture(scope='module')
def play(host, tools, wheel, tmp_path_factory):
    """A function that applies the playbook to both hosts of the guide."""
    directory = tmp_path_factory.mktemp('play')
    inventory, _ = (block.text for block in documents.blocks(PAGE)
                    if block.language == 'yaml')
    (directory / 'hosts.yml').write_text(inventory)
    (directory / 'ca.pem').write_text('An authority\n')

    def play(succeeds=True, **variables):
        variables = {
            'ansible_connection': 'community.general.chroot',
            'ansible_host': str(host.root),
            'ansible_python_interpreter': '/usr/bin/python3',
            'glance_dedup_wheel': str(wheel),
            'glance_dedup_cache_upstream_ca': str(directory / 'ca.pem'),
            **variables}
        return run(*host.enter, tools / 'ansible-playbook', '--inventory',
                   directory / 'hosts.yml', '--extra-vars',
                   json.dumps(variables), ANSIBLE / 'site.yml',
                   succeeds=succeeds, ANSIBLE_NOCOLOR='1',
                   ANSIBLE_HOME=str(directory / 'home'))

    return play


@pytest.fixture(scope='module')
def applied(play):
    """Ansible's output when it applied the role."""
    return play()


def changes(said):
    """Return the number of tasks that changed something, by host."""
    return {name: int(number) for name, number in re.findall(
        r'^(\S+) +: ok=\d+ +changed=(\d+) ', said, re.M)}


def test_the_linters_accept_it(tools, tmp_path):
    shutil.copytree(ANSIBLE, tmp_path / 'ansible')
    path = f'{tools}:{os.environ["PATH"]}'
    run(tools / 'ansible-lint', '--offline', '--profile', 'production',
        tmp_path / 'ansible', PATH=path)
    run(tools / 'yamllint', '--strict', tmp_path / 'ansible')


@pytest.mark.parametrize('variables, message', [
    ({'glance_dedup_venv': '/nowhere'}, '/nowhere is no virtual environment'),
    ({'glance_dedup_store': 'other'},
     'glance_dedup_enabled_backends has no other:dedup'),
    ({'glance_dedup_store_options': 'none'}, 'glance_dedup_store_options')
])
def test_wrong_variables_are_named(play, variables, message):
    # Ansible breaks long lines.
    assert message in ' '.join(play(succeeds=False, **variables).split())


def test_the_second_time_changes_nothing(play, applied):
    first = changes(applied)
    assert set(first) == {'controller1', 'compute1'}
    assert all(number > 0 for number in first.values())
    assert changes(play()) == dict.fromkeys(first, 0)


def test_options_are_added(host, applied):
    text = host.read('/etc/glance/glance-api.conf')
    assert text.startswith('# A comment that stays.\n')
    glance = configparser.ConfigParser()
    glance.read_string(text)
    assert glance['DEFAULT']['enabled_backends'] == 'file:file,dedup1:dedup'
    assert glance['dedup1']['dedup_store_datadir'] == '/var/lib/glance/dedup'
    assert glance['glance_store']['default_backend'] == 'file'
    assert 'filesystem_store_datadir' in glance['file']
    nova = configparser.ConfigParser()
    nova.read_string(host.read('/etc/nova/nova.conf'))
    assert nova['glance']['endpoint_override'] == 'http://127.0.0.1:9292'


def test_systemd_reads_the_units(host, applied):
    for name in ('dedupd.service', 'dedupd-cache.service',
                 'dedupd-relay.service', 'dedupd-relay.socket'):
        host.run('systemd-analyze', 'verify', '--man=no',
                 f'/etc/systemd/system/{name}')


def test_dedupd_serves(host, applied):
    """The command of its unit starts dedupd, which stores an image."""
    dropin = host.read('/etc/systemd/system/dedupd.service.d/ansible.conf')
    line = re.findall(r'^ExecStart=(.+)$', dropin, re.M)[-1]
    host.run('install', '-d', '-o', 'glance', '-g', 'glance', '/run/dedupd')
    with open(host.root.parent / 'dedupd.log', 'w+') as log, subprocess.Popen(
            host.inside(*line.split(), user='glance'), stdout=log,
            stderr=subprocess.STDOUT) as daemon:
        try:
            wait_for_maintainer(host, daemon)
            host.run(DEDUP, 'image', 'put', 'one', '/usr/bin/python3',
                     user='glance')
            host.run(DEDUP, 'image', 'get', 'one', '/tmp/back', user='glance')
        except AssertionError as error:
            log.seek(0)
            raise AssertionError(f'{error}: {log.read()}') from error
        finally:
            # End all processes in the namespace except its first. There is
            # none if dedupd has ended.
            run(*host.enter, 'sh', '-c', 'kill -TERM -1 || true')
    host.run('cmp', '/tmp/back', '/usr/bin/python3')


def wait_for_maintainer(host, daemon):
    ask = f'test ! -S /run/dedupd/dedupd.sock || {DEDUP} status'
    deadline = time.monotonic() + START_SECONDS
    said = ''
    while 'maintainer' not in said:
        assert daemon.poll() is None, 'dedupd ended'
        assert time.monotonic() < deadline, f'dedupd has no role yet: {said}'
        time.sleep(0.2)
        said = host.run('sh', '-c', ask, user='glance')
        assert 'no daemon answers' not in said
