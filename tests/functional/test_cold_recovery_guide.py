# SPDX-License-Identifier: Apache-2.0

"""Runs the commands of the page on a lost directory, on a real store.

Paths and URLs differ from the page's, and the test's own daemon replaces
systemd.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from glance_dedup.repository import cold_settings
from glance_dedup.repository import prefix_owners
from tests.support import daemons
from tests.support import documents
from tests.support import objects
from tests.support import repositories

pytestmark = [pytest.mark.slow, pytest.mark.needs('rsync')]

pytest_plugins = ['tests.support.object_fixtures']

PAGE = documents.SOURCE / 'admin' / 'disaster-recovery.rst'
SLOTS = 256
SIZE = SLOTS * 4096
LIMIT = 120


class Site:
    """A host with a repository of three groups, and its daemon."""

    def __init__(self, directory, server):
        self.directory = directory
        self.datadir = directory / 'dedup'
        objects.make_bucket(server.url, 'images', server.key, server.secret)
        self.credentials = server.credentials(directory / 'cold.conf')
        (directory / 'new').mkdir()
        self.replaced = {
            '/var/lib/glance/dedup': str(self.datadir),
            '/mnt/new': str(directory / 'new'),
            '/etc/glance-dedup/cold.conf': self.credentials,
            '/root/glance-dedup.key': str(directory / 'glance-dedup.key'),
            'https://s3.example.org': server.url}
        repositories.create(self.datadir, group_slots=SLOTS)
        self.put('one', 1)
        with repositories.open_repository(self.datadir) as repo:
            prefix_owners.attach(repo, objects.object_location.parse(
                's3://images/glance', server.url), self.credentials)
        self.daemon = daemons.Daemon(self.datadir)

    def put(self, name, seed, groups=2):
        with repositories.open_repository(self.datadir) as repo:
            repositories.put(repo, name, repositories.noise(
                groups * SIZE, seed))

    def need(self, path, **images):
        with repositories.open_repository(path) as repo:
            assert repo.images() == sorted(images)
            for name, seed in images.items():
                assert repositories.read_all(repo, name) == (
                    repositories.noise(2 * SIZE, seed))

    def follow(self, section, *statuses):
        """Run the console blocks under a heading; returns their output."""
        said = []
        commands = [command for block in documents.blocks(PAGE)
                    if block.section == section
                    and block.language == 'console'
                    for command in documents.commands(block)]
        assert len(commands) == len(statuses)
        for command, status in zip(commands, statuses):
            said.append(self.run(command.text, status))
        return said

    def run(self, text, status):
        program, *words = text.split()
        if program == 'systemctl':
            if words[0] == 'stop':
                assert self.daemon.stop() == 0, self.daemon.text()
            else:
                self.daemon.start().wait_for_catalog()
            return ''
        for name, ours in self.replaced.items():
            text = text.replace(name, ours)
        result = subprocess.run(
            ['bash', '-c', text.replace(
                'glance-dedup --', f'{sys.executable} -m '
                'glance_dedup.cli.entry --').replace(
                    'glance-dedup repository', f'{sys.executable} -m '
                    'glance_dedup.cli.entry repository')],
            capture_output=True, text=True, timeout=LIMIT,
            cwd=documents.TOP, env={
                **os.environ, 'GLANCE_DEDUP_SOCKET': self.daemon.socket,
                'GLANCE_DEDUP_FILTER_DIR': str(self.directory / 'filter')})
        assert result.returncode == status, (
            f'{text}\n{result.stdout}{result.stderr}')
        return result.stdout + result.stderr


@pytest.fixture
def site(server, tmp_path):
    made = Site(tmp_path, server)
    made.daemon.start().wait_for_catalog()
    try:
        yield made
    finally:
        made.daemon.close()


# Long: each of the page's commands is a process; the daemon starts again.
def test_the_page(site):
    site.daemon.run('recompress')
    site.daemon.run('tier', everything=True)
    site.put('later', 2)
    # The daemon sends it, since it has the lock.
    said, = site.follow('What is sent, and when', 0)
    assert re.search(r'metadata_backup +\| 2 ', said), said
    site.follow('Save the key', 0)
    lost = pathlib.Path(site.directory / 'lost')
    site.datadir.rename(lost)
    site.datadir.mkdir()
    stop, asked, restored, checked, start = site.follow(
        'Restoring', 0, 2, 1, 0, 0)
    assert 'confirm it with --yes' in asked and '2 groups' in asked
    assert 'image later is lost' in restored and 'fine' in checked
    site.need(site.datadir, one=1)
    # The directory moves.
    if shutil.which('rsync'):
        before = cold_settings.read(site.datadir)
        site.daemon.run('tier')
        site.follow('A directory that moved to another disk',
                    0, 0, 0, 0, 0)
        after = cold_settings.read(site.directory / 'new' / 'dedup')
        assert after.owners[1:] == before.owners
        site.need(site.directory / 'new' / 'dedup', one=1)
