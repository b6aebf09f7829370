# SPDX-License-Identifier: Apache-2.0

"""Runs the commands of the page on backup and disks, as it says.

Every command of its console blocks is run as it is on the page, but for the
paths. :meth:`Site.stand_in` replaces systemd and the database server, which
this machine lacks. Images come and go through a real Glance where its database
matters, else through the driver alone, which starts sooner.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import uuid

from glance_store import exceptions
import pytest

from tests.functional import glance_server
from tests.support import daemons
from tests.support import documents
from tests.support import repositories
from tests.support import stores

pytestmark = [pytest.mark.slow, pytest.mark.needs('rsync')]

configure = stores.configure

PAGE = documents.SOURCE / 'admin' / 'repository-backup.rst'
MIB = 1 << 20
COMMAND_SECONDS = 100


class Glance:
    """Images by the real Glance."""

    def __init__(self, directory, options):
        self.directory = directory
        self.server = glance_server.GlanceServer(
            directory / 'glance', {'dedup1': {'type': 'dedup', **options}})
        self.start = self.server.start
        self.stop = self.server.stop

    @property
    def database(self):
        return self.directory / 'glance' / 'glance.sqlite'

    @property
    def client(self):
        return glance_server.Client(self.server.url)

    def upload(self, data):
        client = self.client
        image_id = client.create()['id']
        client.upload(image_id, data)
        return image_id

    def delete(self, image_id):
        self.client.request('DELETE', f'/v2/images/{image_id}')

    def fetch(self, image_id):
        return self.client.request(
            'GET', f'/v2/images/{image_id}/file', expect=())[::2]


class Driver:
    """Images by the driver, with the locations that a Glance would keep."""

    def __init__(self, configure, options):
        self.configure = configure
        self.options = options
        self.store = None
        self.locations = {}

    def start(self):
        self.store = self.configure(one=dict(self.options))

    def stop(self):
        if self.store is not None:
            self.store._repository.close()
            self.store = None

    def upload(self, data):
        image_id = str(uuid.uuid4())
        self.locations[image_id] = stores.add(data, image_id)[0]
        return image_id

    def delete(self, image_id):
        stores.delete(self.locations[image_id])

    def fetch(self, image_id):
        try:
            return 200, stores.get(self.locations[image_id])
        except exceptions.NotFound:
            return 204, b''
        except exceptions.RemoteServiceUnavailable:
            return 503, b''


class Site:
    """A repository with its daemon, and where backups go."""

    def __init__(self, directory, make):
        self.directory = directory
        self.datadir = directory / 'dedup'
        (directory / 'backup').mkdir()
        (directory / 'new').mkdir()
        self.paths = {
            '/var/lib/glance/dedup': self.datadir,
            '/backup': directory / 'backup',
            '/mnt/new': directory / 'new',
            '/tmp/server.raw': directory / 'server.raw'}
        repositories.create(self.datadir, group_slots=512)
        self.daemon = daemons.Daemon(self.datadir)
        self.glance = make({
            'dedup_store_datadir': self.datadir,
            'dedup_store_filter_mib': 1,
            'dedup_store_filter_dir': self.daemon.directory / 'filter',
            'dedup_store_dedupd_socket': self.daemon.socket})
        self.images = {}

    def close(self):
        self.glance.stop()
        self.daemon.close()

    # -- the page ----------------------------------------------------------

    def follow(self, section, number=0, status=0, **names):
        """Run a console block; returns what its last command printed.

        :param section: the heading above it
        :param number: which of the blocks there
        :param status: of the last command
        :param names: what words in capitals stand for
        """
        block = [block for block in documents.blocks(PAGE)
                 if block.section == section
                 and block.language == 'console'][number]
        *first, last = documents.commands(block)
        for command in first:
            self.run(command, 0, names)
        return self.run(last, status, names)

    def run(self, command, status, names):
        if self.stand_in(command.text):
            return ''
        text = command.text
        for path, ours in self.paths.items():
            text = text.replace(path, str(ours))
        for name, value in names.items():
            text = text.replace(name, value)
        result = subprocess.run(
            ['bash', '-c', text], capture_output=True, text=True,
            timeout=COMMAND_SECONDS, cwd=self.directory, env={
                **os.environ,
                'PATH': f'{pathlib.Path(sys.prefix) / "bin"}:'
                        f'{os.environ["PATH"]}',
                'GLANCE_DEDUP_SOCKET': self.daemon.socket,
                'GLANCE_DEDUP_FILTER_DIR': str(
                    self.daemon.directory / 'filter')})
        assert result.returncode == status, (
            f'{command.place}: {text}\n{result.stdout}{result.stderr}')
        return result.stdout

    def stand_in(self, text):
        """Replace a command that cannot be run here."""
        if text.startswith('mysqldump '):
            if isinstance(self.glance, Glance):
                shutil.copy(self.glance.database,
                            self.directory / 'backup.sqlite')
            return True
        program, *words = text.split()
        if program != 'systemctl':
            return False
        assert set(words[1:]) <= {'glance-api', 'dedupd'}, text
        if words[0] == 'stop':
            if 'glance-api' in words:
                self.glance.stop()
            assert self.daemon.stop() == 0, self.daemon.text()
        else:
            self.start(*words[1:])
        return True

    # -- the services and the images ---------------------------------------

    def start(self, *services):
        if 'dedupd' in services:
            self.daemon.start().wait_for_catalog()
        if 'glance-api' in services:
            self.glance.start()

    def upload(self, data):
        image_id = self.glance.upload(data)
        self.images[image_id] = data
        return image_id

    def delete(self, image_id):
        self.glance.delete(image_id)
        del self.images[image_id]

    def fetch(self, image_id):
        return self.glance.fetch(image_id)

    def require_images(self):
        """Every image reads back, by its location, as it was uploaded."""
        for image_id, data in self.images.items():
            assert self.fetch(image_id) == (200, data), image_id

    def damage(self, data):
        """Spoil the one block group that has this data."""
        for path in sorted((self.datadir / 'groups').iterdir()):
            content = path.read_bytes()
            at = content.find(data)
            if at >= 0:
                with open(path, 'r+b') as f:
                    f.seek(at)
                    f.write(bytes(len(data)))
                return
        raise AssertionError('the data is stored nowhere as it is')

    @contextlib.contextmanager
    def uploading(self):
        """Upload images, one after the other, until the context ends."""
        ending = threading.Event()
        failures = []

        def work():
            seed = 1000
            while not ending.is_set():
                seed += 1
                try:
                    self.upload(repositories.noise(MIB, seed))
                except Exception as e:
                    failures.append(e)
                    return

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join(glance_server.REQUEST_TIMEOUT)
        assert not failures, failures


@contextlib.contextmanager
def running(directory, make):
    assert shutil.which('rsync'), 'rsync is not installed: see bindep.txt'
    site = Site(directory, make)
    try:
        site.start('dedupd', 'glance-api')
        yield site
    finally:
        site.close()


@pytest.fixture
def site(tmp_path, configure):
    with running(tmp_path, lambda options: Driver(configure, options)) as it:
        yield it


@pytest.fixture
def site_with_glance(tmp_path):
    with running(tmp_path, lambda options: Glance(tmp_path, options)) as it:
        yield it


def shared(seed):
    """Return images that have half of their blocks in common."""
    return (repositories.noise(2 * MIB, 7)
            + repositories.noise(2 * MIB, seed))


def result_of(table):
    """Return the results of ``repository check``, from its table."""
    lines = [line.split('|') for line in table.splitlines() if '|' in line]
    return {line[1].strip(): line[2].strip() for line in lines}


@pytest.mark.timeout(300)
def test_all_is_lost(site_with_glance):
    """Images of a backup made under uploads are restored after a loss."""
    site = site_with_glance
    first, second = (site.upload(shared(seed)) for seed in (1, 2))
    with site.uploading():
        report = result_of(site.follow('Backup'))
    assert report['result'] == 'fine' and int(report['images']) >= 2

    # The next backup replaces it.
    site.delete(second)
    site.upload(shared(3))
    site.daemon.run('collect')
    saved = dict(site.images)
    assert result_of(site.follow('Backup'))['result'] == 'fine'
    assert not (site.directory / 'backup/dedup/catalog').exists()
    later = site.upload(shared(4))

    shutil.rmtree(site.datadir)
    site.follow('Restore')
    assert site.fetch(later)[0] == 204      # only Glance knows it
    site.images = saved
    site.require_images()
    require_collection(site)
    site.upload(shared(4))
    site.require_images()
    require_clean(site)


def require_collection(site):
    """A collection gives space back, and no image is lost by it."""
    assert site.daemon.run('collect')['last']['result']['refused'] is None
    site.require_images()


def require_clean(site):
    """The repository is clean, and the catalog's counts are right."""
    site.daemon.stop()
    repositories.require_clean(site.datadir)


def test_a_step_back(site):
    """A backup is restored into a directory that has changed since."""
    _, gone = (site.upload(shared(seed)) for seed in (1, 2))
    site.daemon.run('merge')
    site.follow('Backup')
    saved = dict(site.images)
    site.delete(gone)
    site.upload(shared(3))
    site.daemon.run('collect')
    site.upload(shared(4))

    site.follow('Restore', 1)
    site.images = saved
    site.require_images()
    require_collection(site)
    require_clean(site)


def test_damage(site):
    """Blocks and recipes that a disk has lost come back from the backup."""
    image_id = site.upload(shared(1))
    site.follow('Backup')
    site.follow('Restore', 2, ID=image_id)
    server = site.directory / 'server.raw'
    assert server.read_bytes() == site.images[image_id]
    server.unlink()

    site.damage(repositories.noise(4096, 7))
    assert site.daemon.run('scrub')['last']['result']['damaged']
    assert site.fetch(image_id)[0] == 503
    site.follow('Damaged blocks', ID=image_id)
    site.require_images()
    require_collection(site)

    os.truncate(site.datadir / 'images' / image_id, 4096)
    assert site.fetch(image_id)[0] == 503
    # Healing took a merge: the old recipe names the damaged block.
    site.follow('A lost recipe', ID=image_id, status=1)


def test_a_lost_recipe(site):
    image_id = site.upload(shared(1))
    site.follow('Backup')
    os.unlink(site.datadir / 'images' / image_id)
    assert site.fetch(image_id)[0] == 204
    site.follow('A lost recipe', ID=image_id)
    site.require_images()
    require_collection(site)


def test_another_disk(site):
    for seed in range(3):
        site.upload(shared(seed))
    assert result_of(site.follow('To another disk'))['result'] == 'fine'
    shutil.rmtree(site.datadir)
    os.rename(site.directory / 'new/dedup', site.datadir)
    site.start('dedupd', 'glance-api')
    site.require_images()
    site.upload(shared(9))
    require_collection(site)


def test_every_command_is_run():
    """The tests above run every block of the page."""
    sections = [block.section for block in documents.blocks(PAGE)
                if block.language == 'console']
    assert sections == [
        'Backup', 'Restore', 'Restore', 'Restore', 'Damaged blocks',
        'A lost recipe', 'To another disk']
