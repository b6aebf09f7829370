# SPDX-License-Identifier: Apache-2.0
"""The container image of dedupd runs with podman as in its page.

The commands and files are those of the page. ``tools/container`` builds the
image, and podman runs it in namespaces of its own.
"""

import contextlib
import os
import pathlib
import re
import shlex
import socket
import subprocess
import time

import pytest

from tests.install import test_ansible
from tests.support import documents
from tests.support import podman_tool

TOP = documents.TOP
PAGE = documents.SOURCE / 'install' / 'containers.rst'
PROGRAM = pathlib.Path('/usr/bin/bash')
USER = 42415
#: Bytes; the image must not become much larger by accident.
MAX_SIZE = 260 << 20
#: Seconds: to build the image, for dedupd to answer, and for podman's three
#: failures after a container's first minute.
BUILD_SECONDS = 3000
START_SECONDS = 120
UNHEALTHY_SECONDS = 180
INSTALL = '. tools/lib.sh; need_packages podman'

pytestmark = [
    pytest.mark.long, pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason='only root can mount')]


def run(*command, **environment):
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=TOP,
        timeout=BUILD_SECONDS, env={**os.environ, **environment})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def command(start):
    """Return the words of the page's only command with this start."""
    found, = (found.text for block in documents.blocks(PAGE)
              if block.language == 'console'
              for found in documents.commands(block)
              if found.text.startswith(start))
    return shlex.split(found)


def block(language, start):
    """Return the text of the page's only block with this start."""
    found, = (found.text for found in documents.blocks(PAGE)
              if found.language == language and found.text.startswith(start))
    return found


def wait_for(condition, seconds=START_SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.2)


@pytest.fixture(scope='module')
def podman(tmp_path_factory):
    run('bash', '-c', INSTALL, 'tools/container')
    directory = tmp_path_factory.mktemp('podman')
    (directory / 'root').mkdir()
    with contextlib.closing(podman_tool.Podman(directory)) as podman:
        if reason := podman.why_not(directory / 'root'):
            pytest.skip(f'podman starts no container here: {reason}')
        yield podman


@pytest.fixture(scope='module')
def image(podman, tmp_path_factory):
    """The image's name, once it is built and loaded."""
    directory = tmp_path_factory.mktemp('image')
    words = command('tools/container')
    file = directory / words.pop()
    name = run(TOP / words[0], file,
               TMPDIR=str(directory)).splitlines()[-1]
    assert [path.name for path in directory.iterdir()] == [file.name]
    assert f'Loaded image: {name}' in podman.run(
        *command('podman load')[:-1], file)
    file.unlink()
    return name


class Host:
    """Host for the page's commands, with directories of the test."""

    def __init__(self, podman, image, directory):
        self._podman = podman
        self.glance = directory / 'glance'
        tmpfiles = directory / 'glance-dedup.conf'
        tmpfiles.write_text(block('text', 'd /dev/shm') + '\n')
        self._places = {'localhost/glance-dedup:VERSION': image,
                        '/etc/tmpfiles.d/glance-dedup.conf': str(tmpfiles),
                        '/srv/glance': str(self.glance)}

    def words(self, start):
        """Return the words of the command that begins like this."""
        text = shlex.join(command(start))
        for name, here in self._places.items():
            text = text.replace(name, here)
        return shlex.split(text)

    def run(self, start):
        return self._podman.run(*self.words(start))


@pytest.fixture(scope='module')
def host(podman, image, tmp_path_factory):
    """A host that the page has prepared."""
    host = Host(podman, image, tmp_path_factory.mktemp('host'))
    for start in ('systemd-tmpfiles', 'install', 'podman run --rm'):
        host.run(start)
    return host


@pytest.fixture
def dedupd(podman, host):
    """A container that serves."""
    host.run('podman run --detach')
    try:
        wait_for(lambda: is_healthy(podman))
        yield
    except AssertionError as error:
        raise AssertionError(f'{error}: {logs(podman)}') from error
    finally:
        podman.attempt('podman', 'rm', '--force', 'dedupd')


def is_healthy(podman):
    return not podman.attempt(*command('podman healthcheck')).returncode


def state(podman):
    return podman.run(*command('podman inspect')).strip()


def logs(podman, name='dedupd'):
    result = podman.attempt('podman', 'logs', name)
    return result.stdout + result.stderr


def inside(podman, *words):
    return podman.attempt('podman', 'exec', 'dedupd', *words)


def test_what_the_image_says_of_itself(podman, image):
    form = '{{.User}} {{.Config.StopSignal}} {{.Size}} {{.Architecture}}'
    user, stop, size, architecture = podman.run(
        'podman', 'image', 'inspect', '--format', form, image).split()
    assert (user, stop) == (f'{USER}:{USER}', 'SIGTERM')
    assert int(size) < MAX_SIZE
    assert architecture == run('dpkg', '--print-architecture').strip()
    version = image.rpartition(':')[2]
    form = ('{{index .Labels "org.opencontainers.image.version"}} '
            '{{index .Labels "org.opencontainers.image.licenses"}}')
    assert podman.run('podman', 'image', 'inspect', '--format', form,
                      image).split() == [version, 'Apache-2.0']


def test_what_is_in_the_image(podman, image):
    def says(*words):
        return podman.run('podman', 'run', '--rm', '--network', 'none', image,
                          *words)

    version = image.rpartition(':')[2]
    for program in ('glance-dedup', 'dedupd'):
        assert version in says(program, '--version').replace('+', '-')
    assert says('cat', '/usr/share/doc/glance-dedup/LICENSE') == (
        TOP / 'LICENSE').read_text()
    assert says('sh', '-c', 'cat /usr/share/doc/libc6/copyright')
    assert not podman.attempt('podman', 'run', '--rm', image, 'sh', '-c',
                              'find / -name pip -type d | grep .').stdout
    says('python', '-c', 'import glance_dedup.driver.dedup_store')


def test_it_serves_without_rights(podman, dedupd, host):
    status = inside(podman, *command('podman exec')[3:]).stdout
    assert 'process 1, maintainer' in status
    rights = inside(podman, 'cat', '/proc/1/status').stdout
    assert re.search(r'^CapEff:\s0+$', rights, re.MULTILINE)
    assert re.search(r'^CapBnd:\s0+$', rights, re.MULTILINE)
    assert re.search(r'^NoNewPrivs:\s1$', rights, re.MULTILINE)
    assert re.search(rf'^Uid:\s{USER}\s{USER}\s{USER}\s', rights, re.M)
    assert 'Read-only file system' in inside(podman, 'touch', '/file').stderr
    networks = inside(podman, 'cat', '/proc/net/dev').stdout
    assert re.findall(r'^ *(\S+):', networks, re.MULTILINE) == ['lo']


def test_another_container_stores_and_reads(podman, dedupd, host):
    """Another container, such as Glance's, uses the same repository."""
    words = ['podman', 'run', '--rm', '--network', 'none', '--volumes-from',
             'dedupd', podman.run('podman', 'inspect', '--format',
                                  '{{.ImageName}}', 'dedupd').strip()]
    podman.run(*words, 'glance-dedup', 'image', 'put', 'one', PROGRAM)
    podman.run(*words, 'sh', '-c', 'glance-dedup image get one /tmp/back '
               f'&& cmp /tmp/back {PROGRAM}')
    listed = inside(podman, 'glance-dedup', 'image', 'list', '-f', 'value',
                    '-c', 'image_id').stdout
    assert listed.split() == ['one']
    filters = podman.run('ls', '/dev/shm/glance-dedup-glance')
    assert filters.endswith('.filter\n')
    assert podman.run('stat', '--format', '%u %a %F',
                      '/run/dedupd/dedupd.sock') == f'{USER} 600 socket\n'


def test_it_reads_its_options_again(podman, dedupd, host):
    host.run('podman kill --signal HUP')
    wait_for(lambda: 'Reading the options again' in logs(podman))
    assert is_healthy(podman)


def test_it_is_unhealthy_without_its_repository(podman, dedupd, host):
    assert state(podman) == 'healthy'
    images = host.glance / 'dedup' / 'images'
    images.rename(images.with_name('gone'))
    try:
        wait_for(lambda: not is_healthy(podman) and (
            state(podman) == 'unhealthy'), UNHEALTHY_SECONDS)
    finally:
        images.with_name('gone').rename(images)
    assert is_healthy(podman)
    assert state(podman) == 'healthy'


def test_it_ends_in_time(podman, dedupd, host):
    before = time.monotonic()
    host.run('podman stop')
    # podman kills it after that.
    assert time.monotonic() - before < 15
    assert podman.run('podman', 'inspect', '--format',
                      '{{.State.Status}} {{.State.ExitCode}}',
                      'dedupd') == 'exited 0\n'
    assert logs(podman).splitlines()[-1].endswith(' Ending.')
    host.run('podman rm')


@pytest.mark.parametrize('content, message', [
    (b'{', 'repository.json is not the description'),
    (None, 'no repository')])
def test_it_ends_without_a_good_repository(podman, host, content, message):
    description = host.glance / 'dedup' / 'repository.json'
    good = description.rename(description.with_name('good'))
    if content is not None:
        description.write_bytes(content)
    try:
        host.run('podman run --detach')
        assert podman.run('podman', 'wait', 'dedupd') == '1\n'
        assert message in logs(podman)
    finally:
        podman.attempt('podman', 'rm', '--force', 'dedupd')
        good.rename(description)


def test_as_another_user_in_a_pod(podman, image, tmp_path):
    """The image runs in directories as Kubernetes makes them, as any user."""
    volumes = []
    for name in ('/var/lib/glance', '/run/dedupd', '/dev/shm'):
        directory = tmp_path / name.replace('/', '-')
        directory.mkdir()
        directory.chmod(0o777)
        volumes += ['--volume', f'{directory}:{name}']
    words = ['--network', 'none', '--user', '4711', *volumes, image]
    podman.run('podman', 'run', '--rm', *words, 'glance-dedup', 'repository',
               'create')
    made = tmp_path / '-var-lib-glance' / 'dedup'
    assert made.stat().st_uid == 4711
    podman.run('podman', 'run', '--detach', '--name', 'dedupd', '--read-only',
               '--cap-drop', 'all', '--env',
               'OS_DEDUPD__FILTER_DIR=/dev/shm/glance-dedup', *words)
    try:
        wait_for(lambda: is_healthy(podman))
        assert not inside(podman, 'glance-dedup', 'image', 'put', 'one',
                          PROGRAM).returncode
        assert list((tmp_path / '-dev-shm' / 'glance-dedup').iterdir())
    finally:
        said = logs(podman)
        podman.attempt('podman', 'rm', '--force', 'dedupd')
    assert 'no fingerprint filter' not in said


def test_it_tells_systemd_when_it_serves(podman, host, tmp_path):
    """The container notifies systemd when it serves, for the page's unit."""
    assert 'Notify=true' in block('ini', '[Unit]').splitlines()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.settimeout(START_SECONDS)
        notified.bind(str(tmp_path / 'notify'))
        words = host.words('podman run --detach')
        words[2:2] = ['--sdnotify', 'container']
        podman.run(*words, NOTIFY_SOCKET=str(tmp_path / 'notify'))
        try:
            said = b''
            while b'READY=1' not in said:
                said += notified.recv(4096) + b'\n'
        finally:
            podman.attempt('podman', 'rm', '--force', 'dedupd')


@pytest.fixture(scope='module')
def newer_podman(tmp_path_factory):
    """The files of Debian 13's podman, which makes units, unlike 12's."""
    root = tmp_path_factory.mktemp('trixie') / 'root'
    test_ansible.make_debian(root, '--variant=extract', '--include=podman',
                             suite='trixie')
    for name in ('bin', 'lib', 'lib64'):
        if not (root / name).exists():
            (root / name).symlink_to(f'usr/{name}')
    return root


def make_units(root, text):
    (root / 'units').mkdir(exist_ok=True)
    (root / 'units' / 'dedupd.container').write_text(text)
    return subprocess.run(
        ['chroot', root, '/usr/libexec/podman/quadlet', '-dryrun'],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, 'QUADLET_UNIT_DIRS': '/units'})


def test_podman_makes_a_service(podman, newer_podman, tmp_path):
    text = block('ini', '[Unit]')
    broken = make_units(newer_podman,
                        text.replace('DropCapability', 'DropCapabilty'))
    assert broken.returncode != 0
    assert "unsupported key 'DropCapabilty'" in broken.stderr
    result = make_units(newer_podman, text)
    assert result.returncode == 0, result.stderr
    name, _, unit = result.stdout.partition('\n')
    assert name == '---dedupd.service---'
    started = set(shlex.split(re.search('^ExecStart=(.*)$', unit, re.M)[1]))
    # Each option of the command is an option of the unit.
    assert {word.replace('--volume', '-v') for word in command(
        'podman run --detach')} - started <= {
            'podman', '--detach', '--security-opt', 'no-new-privileges'}
    (tmp_path / 'dedupd.service').write_text(unit)
    run('systemd-analyze', 'verify', '--man=no', tmp_path / 'dedupd.service')
