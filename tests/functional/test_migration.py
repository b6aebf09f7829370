# SPDX-License-Identifier: Apache-2.0

"""Runs the guide's page on migration, exactly as written.

The test takes its blocks one after the other: Glance gets the shown
configuration at its next restart, and a shell runs each command. Glance has a
file store with images of a project at first, and at the end again; all the
time each image has its original bytes.
"""

import configparser
import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.cloud import local_cloud
from tests.support import ports
from tests.support import repositories

# Long: a cloud starts; Glance starts again after each change that the page
# makes; most of its commands log in at Keystone.
pytestmark = [pytest.mark.slow, pytest.mark.needs('keystone', 'mariadb')]

TOP = pathlib.Path(__file__).resolve().parents[2]
PAGE = TOP / 'doc' / 'source' / 'admin' / 'migration.rst'
COMMAND_TIMEOUT = 600       # seconds
MIB = 1 << 20


def blocks(page):
    """Return the page's blocks of code, as (language, text) in its order."""
    language, text = None, []
    for line in [*page.read_text().splitlines(), 'end']:
        if language and line and not line.startswith(' '):
            yield language, '\n'.join(text).strip('\n')
            language, text = None, []
        if language:
            text.append(line[3:])
        elif match := re.fullmatch(r'\.\. code-block:: (\w+)', line):
            language = match[1]


def commands(text):
    """Return the commands of a console block, as (prompt, command)."""
    found = []
    for line in text.splitlines():
        if line[:2] in ('$ ', '# '):
            found.append([line[0], line[2:]])
        else:
            assert line.startswith(('> ', '    ')), (
                f'{line!r} is neither a command nor the rest of one')
            found[-1][1] += '\n' + line.removeprefix('> ')
    return found


class Operator:
    """An operator who follows the page."""

    def __init__(self, cloud):
        self.cloud = cloud
        self.place = cloud.directory / 'glance'
        self.places = {'/var/lib/glance': self.place,
                       '/etc/glance': cloud.glance.etc,
                       '/opt/glance': sys.prefix,
                       '9299': str(ports.free_port())}
        self.sections = {}
        self.settings = []
        self.ran = []

    def local(self, text):
        """Return the page's text with this test's directory for Glance's."""
        for there, here in self.places.items():
            text = text.replace(there, str(here))
        return text

    def configure(self, text):
        parser = configparser.ConfigParser(
            default_section='none', interpolation=None)
        parser.read_string(self.local(text))
        self.sections |= {name: dict(parser[name])
                          for name in parser.sections()}

    def restart(self):
        default = dict(self.sections['DEFAULT'])
        enabled = [item.strip().split(':') for item in
                   default.pop('enabled_backends').split(',')]
        stores = {name: {'type': kind, **self.sections[name]}
                  for name, kind in enabled}
        for options in stores.values():
            # The package makes these directories; here the test does.
            pathlib.Path(options.get('filesystem_store_datadir', self.place)
                         ).mkdir(parents=True, exist_ok=True)
        self.cloud.glance.reconfigure(
            stores, self.sections['glance_store']['default_backend'],
            {'DEFAULT': default})

    def run(self, command):
        """Run a command; return its standard output."""
        command = self.local(command)
        if re.match(r'export |[A-Z]+=\$\(', command):
            self.settings.append(command)
        script = '\n'.join(['set -euo pipefail', *self.settings, command])
        done = subprocess.run(
            ['bash', '-c', script], capture_output=True, text=True,
            timeout=COMMAND_TIMEOUT, env={
                **os.environ,
                'PATH': f'{pathlib.Path(sys.prefix) / "bin"}'
                        f':{os.environ["PATH"]}',
                'HOME': str(self.cloud.directory),
                'OS_CLIENT_CONFIG_FILE': str(self.cloud.clouds_yaml),
                'GLANCE_DEDUP_FILTER_DIR': str(self.cloud.directory
                                               / 'filter'),
                'GLANCE_DEDUP_SOCKET': '', 'no_proxy': '127.0.0.1'})
        assert done.returncode == 0, (
            f'{command}\n{done.stdout}\n{done.stderr}')
        self.ran.append(command)
        return done.stdout


class Users:
    """A project's images, and the conditions that they must fulfil."""

    def __init__(self, cloud):
        self.cloud = cloud
        self.images = {}

    @property
    def glance(self):
        return self.cloud.connect('demo').image

    def upload(self, seed, **properties):
        data = (repositories.mixture(3 * MIB, seed)
                + repositories.noise(MIB, 99))
        glance = self.glance
        image_id = glance.post('/images', json={
            'name': f'image-{seed}', 'disk_format': 'raw',
            'container_format': 'bare', **properties}).json()['id']
        answer = glance.put(
            f'/images/{image_id}/file', data=data,
            headers={'Content-Type': 'application/octet-stream'})
        assert answer.status_code == 204, answer.text
        self.images[image_id] = hashlib.sha256(data).hexdigest()
        return image_id

    def delete(self, image_id):
        self.glance.delete_image(image_id, ignore_missing=False)
        del self.images[image_id]

    def require_all(self):
        for image_id, digest in self.images.items():
            found = self.glance.get(f'/images/{image_id}/file').content
            assert hashlib.sha256(found).hexdigest() == digest, image_id

    def stores(self):
        """Return each image's stores, as Glance shows them."""
        return [self.glance.get(f'/images/{image_id}').json()['stores']
                for image_id in self.images]


@pytest.fixture
def cloud(tmp_path_factory):
    # A socket's path must not be long.
    directory = pathlib.Path(f'/tmp/glance-dedup-{os.getpid()}')
    files = {'type': 'file',
             'filesystem_store_datadir': directory / 'glance' / 'images'}
    cloud = local_cloud.Cloud(
        directory, {'file1': files, 'unused': {'type': 'dedup'}})
    with contextlib.ExitStack() as stack:
        stack.callback(cloud.down)
        files['filesystem_store_datadir'].mkdir(parents=True)
        cloud.up(['glance', 'keystone'])
        # The cloud's dedupd is for a store that the page does not have.
        cloud.services['dedupd'].stop()
        cloud.glance.reconfigure({'file1': files}, 'file1', {})
        yield cloud


def look(operator, users):
    """Check the state after some of the commands."""
    files = operator.place / 'images'
    last = operator.ran[-1]
    if last == 'systemctl restart glance-api':
        users.require_all()
    if '--update-locations' in last:
        assert set(users.stores()) == {'file1,dedup1'}
        # New images are stored in the new store.
        users.upload(20)
        assert users.stores()[-1] == 'dedup1'
        # Only the importing user has ever seen a location.
        shown = users.glance.get(f'/images/{next(iter(users.images))}')
        assert 'locations' not in shown.json()
    if 'image delete --store file1' in last:
        assert set(users.stores()) == {'dedup1'} and not os.listdir(files)
        users.require_all()
        # An owner may delete an imported image.
        users.delete(next(iter(users.images)))
    if 'method copy-image' in last:
        assert set(users.stores()) == {'dedup1,file1'}
    if 'image delete --store dedup1' in last:
        assert set(users.stores()) == {'file1'}
        users.require_all()


EMPTY = ('glance-dedup glance missing', 'glance-dedup glance orphans', 'ls ',
         'glance-dedup image list')


@pytest.mark.timeout(1800)
def test_there_and_back_as_written(cloud):
    assert shutil.which('openstack', path=pathlib.Path(sys.prefix) / 'bin'), (
        'python-openstackclient is not installed; see test-requirements.txt')
    operator, users = Operator(cloud), Users(cloud)
    users.upload(1)
    users.upload(2, os_hidden=True)
    users.upload(3, visibility='community', protected=True)
    protected = next(reversed(users.images))
    for language, text in blocks(PAGE):
        if language == 'ini':
            operator.configure(text)
            continue
        assert language == 'console', f'who would do what {language} says?'
        for prompt, command in commands(text):
            if prompt == '#':
                assert command == 'systemctl restart glance-api'
                operator.restart()
                operator.ran.append(command)
            else:
                output = operator.run(command)
                if command.startswith(EMPTY):
                    assert not output.strip(), f'{command}\n{output}'
            look(operator, users)
    # A user who is no administrator gets no full list, and so no answer.
    with pytest.raises(AssertionError, match='not take us for an admin'):
        operator.run('OS_CLOUD=demo glance-dedup glance orphans')
    assert protected in users.images
    assert sorted(os.listdir(operator.place / 'images')) == sorted(
        users.images)
    users.require_all()


def test_the_page_is_all_typed():
    """All commands of the page are recognized, and none is left out."""
    lines = [line for language, text in blocks(PAGE)
             if language == 'console' for line in text.splitlines()]
    typed = [line for line in PAGE.read_text().splitlines()
             if re.match(r'\s+[$#] ', line)]
    assert len([line for line in lines
                if line[:2] in ('$ ', '# ')]) == len(typed) > 15
    for word in ('estimate', 'import', 'missing', 'orphans', 'check',
                 'copy-image', 'collect'):
        assert any(word in line for line in lines), word
