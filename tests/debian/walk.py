# SPDX-License-Identifier: Apache-2.0
"""The walk of a new operator, on a Debian 13 with nothing else on it.

It types the guide's commands unchanged: install the packages, configure the
store beside Debian's Glance, move a file store, monitor, break things and mend
them, upgrade, and remove. A command that fails, or that does not have the
effect described in the guide, ends it. Each step is timed::

    python -m tests.debian.walk PACKAGES

PACKAGES is the directory that ``tools/packages`` has filled. Only root can do
this. There is no Keystone: Glance permits every request.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

from tests.debian import booted
from tests.functional import test_migration
from tests.support import documents
from tests.support import monitoring

PAGE = documents.SOURCE / 'install' / 'packages.rst'
INDEX = documents.SOURCE / 'install' / 'index.rst'
MIGRATION = documents.SOURCE / 'admin' / 'migration.rst'
BACKUP = documents.SOURCE / 'admin' / 'repository-backup.rst'
NAMES = ('python3-glance-dedup', 'dedupd', 'dedupd-nova-base',
         'glance-dedup-doc')
MIB = 1 << 20
PATIENCE = 120
REPOSITORY = '/var/lib/glance/dedup'
#: Bytes of its file system; less than `BALLAST` and `TOO_MUCH` together.
REPOSITORY_MIB = 256
BALLAST = 150 * MIB
TOO_MUCH = 120 * MIB
URL = 'http://127.0.0.1:9292'
#: Environment of an operator's shell.
ENVIRONMENT = {'OS_CLOUD': 'admin', 'OS_IMAGE_URL': URL,
               'OS_AUTH_TOKEN': 'none'}
#: Not part of the packages: records of dpkg and apt, and the walk's own files.
ELSEWHERE = ('/var/lib/dpkg', '/var/lib/apt', '/var/cache', '/var/log/apt',
             '/root', '/backup')
#: The clouds.yaml of an operator without Keystone.
CLOUDS = f"""\
clouds:
  admin:
    auth_type: none
    auth:
      endpoint: {URL}
    image_endpoint_override: {URL}
"""
#: Without Keystone nobody has a role.
POLICY = """\
from glance import policies
import json
for rule in policies.list_rules():
    print(json.dumps(rule.name) + ': "@"')
"""
#: Sends the queries of its input to Prometheus; prints those with a result.
ASK = """\
import json, sys, urllib.parse, urllib.request
for query in json.load(sys.stdin):
    with urllib.request.urlopen(
            'http://127.0.0.1:9090/api/v1/query?'
            + urllib.parse.urlencode({'query': query}), timeout=60) as answer:
        found = json.load(answer)
    assert found['status'] == 'success', (query, found)
    if found['data']['result']:
        print(query)
"""
#: Metrics that a host like this has not, or not yet: of caches, other sites,
#: certificates, projects, a disk that fills, tasks that run or fail.
EMPTY = ('image_cache', 'replication', 'certificate', 'project_', 'space_full',
         'task_done', 'task_failures', 'cache_hits')
#: Overwrites the end of the last block group, which the last image brought.
DAMAGE = """\
import os, pathlib, sys
path = max(pathlib.Path(sys.argv[1], 'groups').iterdir())
with open(path, 'r+b') as group:
    group.seek(os.fstat(group.fileno()).st_size - 65536)
    group.write(bytes(32768))
"""


NOVA_MOUNT = '/run/dedupd-nova-base/images'
#: Sets up what dedupd-nova-base needs to start; no cache or Glance answers.
NOVA_BASE = """\
mknod -m 0666 /dev/fuse c 10 229
echo user_allow_other >>/etc/fuse.conf
groupadd --system nova
cd /etc/dedupd
openssl req -quiet -x509 -newkey rsa:2048 -noenc -subj /CN=compute1 \\
    -keyout operator.key -out operator.pem
chown dedupd operator.*
install -d -m 1777 -g nova /var/lib/nova/instances/_base
install -d -o dedupd -g dedupd -m 0700 /var/lib/dedupd-cache
cat >/etc/dedupd/dedupd-cache.conf <<END
[DEFAULT]
mode = cache
[dedupd]
datadir = /var/lib/dedupd-cache/images
nbd_socket = /run/dedupd-cache/nbd.sock
glance_url = http://127.0.0.1:9292
[cache]
upstream_url = https://127.0.0.1:1
cloud = admin
upstream_cert = /etc/dedupd/operator.pem
upstream_key = /etc/dedupd/operator.key
nova_base = /var/lib/nova/instances/_base
END
runuser -u dedupd -- glance-dedup --repository /var/lib/dedupd-cache/images \
    --filter-dir /dev/shm/glance-dedup-dedupd repository create
"""


def raise_version(directory, target):
    """Copy packages with a higher version to `target`."""
    for path in packages(directory):
        tree = target / 'tree'
        subprocess.run(['dpkg-deb', '-R', path, tree], check=True,
                       timeout=booted.RUN_SECONDS)
        control = tree / 'DEBIAN/control'
        text = control.read_text()
        old = re.search(r'^Version: (.+)$', text, re.M)[1]
        control.write_text(text.replace(old, f'{old}.1'))
        subprocess.run(['dpkg-deb', '-b', tree, target], check=True,
                       timeout=booted.RUN_SECONDS)
        shutil.rmtree(tree)


def packages(directory):
    found = [path for path in sorted(pathlib.Path(directory).glob('*.deb'))
             if path.name.split('_')[0] in NAMES]
    assert len(found) == len(NAMES), f'{directory} has {found}'
    return found


class Walk:
    """The operator, and the progress of the walk."""

    def __init__(self, debian):
        self.debian = debian
        self.images = {}
        #: (name, number of commands, seconds)
        self.steps = []
        self._commands = 0
        self._settings = []

    @contextlib.contextmanager
    def step(self, name):
        self._commands, started = 0, time.monotonic()
        yield
        self.steps.append((name, self._commands, time.monotonic() - started))
        print(f'{name}: {self._commands} commands, '
              f'{self.steps[-1][2]:.0f} s', flush=True)

    def root(self, script, **options):
        return self.debian.run(script, **options)

    def glance(self, script, **options):
        return self.debian.run('\n'.join([*self._settings, script]),
                               user='glance', **ENVIRONMENT, **options)

    # -- The guide ---------------------------------------------------------

    def type_commands(self, text, **put):
        """Type a block of commands; return all their output.

        :param put: replacements of a word, or of a whole command
        """
        said = ''
        for prompt, command in test_migration.commands(text):
            for word, value in put.items():
                command = re.sub(rf'\b{word}\b', value, command)
            print(f'{prompt} {command}', flush=True)
            self._commands += 1
            if re.match(r'export |[A-Z]+=\$\(', command):
                self._settings.append(command)
            said += (self.glance if prompt == '$' else self.root)(command)
            if 'restart glance-api' in command:
                self.wait_for(f'curl -sf {URL}/v2/info/stores')
        return said

    def type_section(self, page, section, **put):
        """Type all blocks below a heading; return all their output."""
        said = ''
        for block in documents.blocks(page):
            if block.section != section:
                continue
            if block.language == 'console':
                said += self.type_commands(prompted(block.text), **put)
            elif block.language in ('ini', 'yaml'):
                self.write(block.text)
        return said

    def write(self, text, name='/etc/glance/glance-api.conf'):
        """Add lines to a file, or write a new one if it is YAML."""
        if match := re.match(r'# (/\S+)\n', text):
            name, text = match[1], text[match.end():]
        mode = '>' if name.endswith('.yml') else '>>'
        print(f'{mode} {name}', flush=True)
        self.root(f'mkdir -p "$(dirname {name})"\n'
                  f'printf "%s\\n" {shlex.quote(text)} {mode}{name}')

    # -- The host ----------------------------------------------------------

    def wait_for(self, script, told=''):
        """Wait until a command prints `told`; return its output."""
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(booted.Failed):
                said = self.root(script)
                if told in said:
                    return said
            assert time.monotonic() < deadline, (
                f'{script}\n' + self.root(script, check=False))
            time.sleep(0.2)

    def make_file(self, name, seed, size):
        """Make a file with zeros at its end; return its name."""
        path = self.debian.path(f'/srv/{name}')
        path.write_bytes(random.Random(seed).randbytes(size) + bytes(MIB))
        return f'/srv/{name}'

    def upload(self, name, seed, size=8 * MIB, options='', check=True):
        """Upload an image; return the output of Glance's client."""
        source = self.make_file(name, seed, size)
        said = self.glance(
            f'glance image-create --name {name} --disk-format raw '
            f'--container-format bare --file {source} {options}', check=check)
        if ' active ' in said:
            image_id = re.search(r'\| id +\| (\S+)', said)[1]
            self.images[image_id] = digest(self.debian.path(source))
        return said

    def is_whole(self, image_id):
        """Return whether Glance returns the bytes that were uploaded."""
        # Not in /tmp, which is not on the disk.
        self.root('rm -f /var/lib/glance/copy')
        self.glance(f'openstack image save --file copy {image_id}',
                    check=False)
        copy = self.debian.path('/var/lib/glance/copy')
        return copy.exists() and digest(copy) == self.images[image_id]

    def require_all(self):
        """Require that all images are whole."""
        broken = [image_id for image_id in self.images
                  if not self.is_whole(image_id)]
        assert not broken, broken

    def forget(self, image_id):
        self.glance(f'openstack image delete {image_id}')
        del self.images[image_id]

    def version(self, name='dedupd'):
        return self.root(f"dpkg-query -W -f '${{Version}}' {name}")


def digest(path):
    with open(path, 'rb') as opened:
        return hashlib.file_digest(opened, 'sha256').hexdigest()


def prompted(text):
    """Return a block without the commands' output."""
    lines = text.splitlines()
    return '\n'.join(line for line in lines
                     if re.match(r'[$#>] |    ', line))


def prepare(walk):
    """Set up a Debian Glance that has images in a file store."""
    walk.root('echo \'APT::Get::Assume-Yes "true";\''
              ' >/etc/apt/apt.conf.d/assume-yes')
    walk.root('apt-get update')
    walk.root('apt-get install curl glance-api rsync')
    # Eight processes take a minute to start on two processors.
    walk.root("sed -i 's/^processes = 8/processes = 2/'"
              ' /etc/glance/glance-api-uwsgi.ini')
    walk.root('mkdir -p /etc/openstack')
    walk.write(CLOUDS, '/etc/openstack/clouds.yaml')
    walk.root(f'python3 -c {shlex.quote(POLICY)}'
              ' >/etc/glance/policy.d/zz.yaml')
    walk.write('[database]\nconnection = sqlite:////var/lib/glance/db\n')
    walk.glance('glance-manage db_sync')
    walk.root('systemctl restart glance-api')
    walk.wait_for(f'curl -sf {URL}/v2/images')
    walk.upload('one', 1)
    walk.upload('two', 1, 9 * MIB)
    walk.root(f'install -d -o glance -g glance -m 0700 {REPOSITORY}\n'
              f'mount -t tmpfs -o size={REPOSITORY_MIB}m tmpfs {REPOSITORY}\n'
              f'chown glance:glance {REPOSITORY}\nchmod 0700 {REPOSITORY}')


def install(walk):
    walk.type_section(PAGE, 'Install them')
    said = walk.root('systemctl is-active dedupd', check=False)
    assert said == 'inactive\n', said
    walk.root('runuser -u dedupd -- dedupd-relay --version')
    walk.root('systemd-analyze verify --man=no'
              ' $(dpkg -L dedupd | grep -E "(service|socket|timer)$")')


def configure(walk):
    assert 'maintainer' in walk.type_section(PAGE, 'Configure them')


def verify(walk):
    source = walk.make_file('server.raw', 3, 8 * MIB)
    said = walk.type_section(INDEX, 'Verify', **{
        'server.raw': source, 'back.raw': '/tmp/back.raw'})
    assert '"dedup1"' in said and 'fine' in said


def migrate(walk):
    replaced = [test_migration.commands(block.text)
                for block in documents.blocks(PAGE)
                if block.section == 'Migrate']
    for section in ('Before', 'A second store', 'A trial', 'Moving',
                    'Verifying', 'Removing the files'):
        for block in documents.blocks(MIGRATION):
            if block.section != section:
                continue
            if block.language == 'ini':
                walk.write(block.text)
            elif 'GLANCE_VENV/bin' in block.text:
                text = '\n'.join(f'{prompt} {command}'
                                 for prompt, command in replaced.pop(0))
                walk.type_commands(text)
            else:
                walk.type_commands(block.text)
    assert not replaced
    walk.require_all()
    assert not walk.glance('ls /var/lib/glance/images')


def monitor(walk):
    walk.type_section(PAGE, 'Monitor')


def asking(queries):
    """Return a command that prints the queries with a result in Prometheus."""
    return (f'echo {shlex.quote(json.dumps(queries))}'
            f' | python3 -c {shlex.quote(ASK)}')


def dashboard_answers(walk):
    """Return the number of the dashboard's queries, and those without data."""
    # Rates need two samples.
    walk.wait_for(asking(['count_over_time(dedupd_ready[5m]) > 1']), 'ready')
    queries = sorted({monitoring.filled(target['expr']).replace('30s', '5m')
                      for target in monitoring.targets()})
    found = walk.root(asking(queries)).splitlines()
    return len(queries), sorted(set(queries) - set(found))


def stop_the_daemon(walk):
    """By the page's table, only collection waits for dedupd."""
    walk.root('systemctl stop dedupd')
    walk.require_all()
    walk.upload('without', 11)
    said = walk.glance('glance-dedup status')
    assert 'no daemon answers' in said, said
    walk.type_commands('# systemctl start dedupd')
    walk.wait_for('runuser -u glance -- glance-dedup status', 'maintainer')


def damage_groups(walk):
    """Follow the guide's backup, and its repair of damaged groups."""
    text = next(block.text for block in documents.blocks(BACKUP)
                if block.section == 'Backup')
    walk.root('mkdir -p /backup')
    walk.type_commands('\n'.join(
        line for line in text.splitlines() if 'mysqldump' not in line))
    walk.root(f'python3 -c {shlex.quote(DAMAGE)} {REPOSITORY}\n'
              'systemctl restart dedupd')
    broken = [image_id for image_id in walk.images
              if not walk.is_whole(image_id)]
    assert broken
    try:
        walk.glance('glance-dedup repository check')
        raise AssertionError('damage is not found')
    except booted.Failed as error:
        assert 'damage: groups/' in error.output, error.output
    # Only a scrub marks damaged blocks, so that no new image shares them.
    walk.glance('glance-dedup task scrub --full', check=False)
    for image_id in broken:
        walk.type_section(BACKUP, 'Damaged blocks', ID=image_id)
    walk.require_all()
    walk.glance('glance-dedup repository check')


def fill_the_disk(walk):
    """Fill the disk: an upload is refused, and works after a deletion."""
    walk.upload('ballast', 12, BALLAST, '--store dedup1')
    ballast = next(reversed(walk.images))
    said = walk.upload('refused', 13, TOO_MUCH, '--store dedup1', check=False)
    assert '413' in said, said
    log = walk.root('tail -n 200 /var/log/glance/glance-api.log')
    assert 'are kept for deleting and collecting' in log, log
    walk.require_all()
    walk.forget(ballast)
    walk.type_commands('$ glance-dedup task collect')
    said = walk.upload('again', 13, TOO_MUCH, '--store dedup1')
    assert ' active ' in said, said


def upgrade(walk, higher):
    walk.write('# changed here\n', '/etc/dedupd/dedupd.conf')
    walk.root('rm -f /root/*.deb')
    for path in packages(higher):
        shutil.copy(path, walk.debian.path('/root'))
    old, started = walk.version(), main_pid(walk)
    install, restart = (block.text for block in documents.blocks(PAGE)
                        if block.section == 'Upgrade them')
    walk.type_commands(prompted(install))
    assert walk.version() == f'{old}.1'
    assert main_pid(walk) == started, 'dedupd was restarted unchecked'
    walk.type_commands(prompted(restart))
    assert walk.root('systemctl is-active dedupd') == 'active\n'
    assert main_pid(walk) != started, 'dedupd was not restarted'
    config = walk.debian.path('/etc/dedupd/dedupd.conf').read_text()
    assert '# changed here\n' in config
    walk.require_all()


def add_nova_base(walk):
    """Install it; it needs trio, which can prevent the import of eventlet."""
    walk.root('apt-get install ./dedupd-nova-base_*.deb')
    walk.root('runuser -u dedupd -- dedupd-nova-base --version')
    walk.root("python3 -c 'import trio'\npython3 -c 'import eventlet'")
    walk.root(NOVA_BASE)
    for action, restarts in (('start', 0), ('restart', 0),
                             ('kill --signal=KILL', 1)):
        walk.root(f'systemctl {action} dedupd-nova-base')
        walk.wait_for('systemctl show -p NRestarts dedupd-nova-base',
                      f'NRestarts={restarts}\n')
        # The unit's own process mounts nothing; all others see the mount.
        walk.wait_for('systemctl is-active dedupd-nova-base\n'
                      f'stat -c "%a %U %G" {NOVA_MOUNT}',
                      '550 dedupd nova\n')
    walk.root('systemctl stop dedupd-nova-base\n'
              f'! mountpoint {NOVA_MOUNT}\n'
              'rm -r /etc/dedupd/dedupd-cache.conf /etc/dedupd/operator.*'
              ' /var/lib/dedupd-cache/*\n'
              'rm -r /var/lib/nova')
    walk.root('apt-get purge dedupd-nova-base')


def main_pid(walk):
    return walk.root('systemctl show -p MainPID dedupd')


def remove(walk):
    """Remove the packages; the repository stays, and can be used again."""
    walk.root('apt-get remove dedupd python3-glance-dedup')
    assert main_pid(walk) == 'MainPID=0\n', 'dedupd still runs'
    assert walk.debian.path('/etc/dedupd/dedupd.conf').exists()
    walk.type_section(PAGE, 'Remove them')
    left = [path for path in files(walk.debian) if 'dedup' in path
            and not path.startswith(REPOSITORY)]
    assert not left, left
    walk.root('apt-get install ./python3-glance-dedup_*.deb')
    walk.glance(f'glance-dedup --repository {REPOSITORY} repository check')


def files(debian):
    """Return the names of all files on its disk."""
    for directory, names, others in os.walk(debian.directory):
        place = f'/{os.path.relpath(directory, debian.directory)}/'
        place = place.replace('/./', '/')
        names[:] = [name for name in names if place + name not in ELSEWHERE]
        for name in (*names, *others):
            yield place + name


def walk_through(debian, directory, higher):
    """Run all steps; return the name, commands and seconds of each."""
    walk = Walk(debian)
    for path in packages(directory):
        shutil.copy(path, debian.path('/root'))
    prepare(walk)
    with walk.step('install'):
        install(walk)
    with walk.step('configure'):
        configure(walk)
    with walk.step('verify'):
        verify(walk)
    with walk.step('migrate two images'):
        migrate(walk)
    with walk.step('monitor'):
        monitor(walk)
    asked, empty = dashboard_answers(walk)
    print(f'{asked} queries of the dashboard, without a result:', *empty,
          sep='\n  ')
    unknown = [query for query in empty
               if not any(word in query for word in EMPTY)]
    assert not unknown, unknown
    with walk.step('a stopped daemon'):
        stop_the_daemon(walk)
    with walk.step('damaged block groups'):
        damage_groups(walk)
    with walk.step('a full disk'):
        fill_the_disk(walk)
    with walk.step('upgrade'):
        upgrade(walk, higher)
    add_nova_base(walk)
    with walk.step('remove'):
        remove(walk)
    return walk.steps


def main():
    directory, = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix='walk-') as place:
        place = pathlib.Path(place)
        place.chmod(0o755)
        higher = place / 'higher'
        higher.mkdir()
        raise_version(directory, higher)
        booted.make(place / 'root', 'trixie')
        with booted.Debian(place / 'root') as debian:
            steps = walk_through(debian, directory, higher)
    for name, commands, seconds in steps:
        print(f'{name:24} {commands:4} commands {seconds:6.0f} s')


if __name__ == '__main__':
    main()
