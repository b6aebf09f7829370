# SPDX-License-Identifier: Apache-2.0

"""Users' commands on cold images while the object store is away.

Each command names the image and the store, leaves no partial result, and works
once the store is back.
"""

import dataclasses
import os
import subprocess
import sys

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.repository import cold_settings
from glance_dedup.repository import prefix_owners
from glance_dedup.transfer import image_sending
from glance_dedup.transfer import site_replication
from tests.support import batches
from tests.support import cold_repositories
from tests.support import daemons
from tests.support import objects
from tests.support import repositories

pytestmark = pytest.mark.slow

pytest_plugins = ['tests.support.object_fixtures']

AWAY = pytest.mark.parametrize('fault', [503, 404])
#: The program, with no waits between tries.
PROGRAM = """
from glance_dedup.cli import entry
from glance_dedup.objects import object_store
import sys

object_store.FIRST_WAIT = 0.001
sys.exit(entry.main())
"""


@pytest.fixture
def cold(server, proxy, faults, tmp_path):
    made = cold_repositories.ColdRepository(tmp_path / 'r', server, proxy.url)
    made.put('one', repositories.noise(cold_repositories.GROUP + 5000, 1))
    assert made.cool() == 1
    return made


def run(cold, *arguments):
    return subprocess.run(
        [sys.executable, '-c', PROGRAM, '--repository', cold.path, '--socket',
         '', *map(str, arguments)],
        cwd=daemons.ROOT, capture_output=True, text=True, timeout=100,
        env={**os.environ, 'GLANCE_DEDUP_FILTER_DIR': str(
            cold.path.parent / 'filter')})


def images(cold):
    with cold.open() as repo:
        return sorted(repo.images())


@AWAY
@pytest.mark.parametrize('command', [
    ('image', 'get', 'one', 'out'), ('glance', 'export', 'out', 'one'),
    ('image', 'copy', '--scope', 'project', '--project', 'p', 'one', 'two'),
    ('image', 'verify', '--no-glance', 'one')],
    ids=lambda words: '-'.join(words[:2]))
def test_commands(cold, faults, tmp_path, command, fault):
    out = tmp_path / 'out'
    if command[1] == 'export':
        out.mkdir()
    words = [out if word == 'out' else word for word in command]
    faults.always = fault
    done = run(cold, *words)
    assert done.returncode == 3, done
    assert cold.settings.location.url in done.stderr, done.stderr
    assert ' one' in done.stderr and 'Traceback' not in done.stderr
    # No part of a file, an image or a hash is there.
    assert not out.is_file() and (not out.exists() or not os.listdir(out))
    assert images(cold) == ['one']
    with cold.open() as repo:
        assert not hashes.recorded(cold.path, repo.stat('one'))
    faults.always = None
    done = run(cold, *words)
    assert done.returncode == 0, done.stderr
    repositories.require_clean(cold.path)


def test_a_store_that_hangs(cold, faults, tmp_path):
    cold_settings.write(cold.path, dataclasses.replace(
        cold.settings, options=cold_settings.Options(read_limit=1)))
    command = ('image', 'get', 'one', tmp_path / 'out')
    with faults.held():
        done = run(cold, *command)
    assert done.returncode == 3, done
    assert f'{cold.settings.location.url}: ' in done.stderr
    assert 'within 1 s' in done.stderr and ' one' in done.stderr
    assert not (tmp_path / 'out').exists()
    cold_settings.write(cold.path, cold.settings)
    assert run(cold, *command).returncode == 0


def test_a_copy_in_the_same_scope_needs_no_object(cold, faults):
    faults.always = 503
    faults.seen.clear()
    done = run(cold, 'image', 'copy', 'one', 'two')
    assert done.returncode == 0, done.stderr
    assert not faults.seen


@pytest.fixture
def away(tmp_path):
    """Another site."""
    path = repositories.create(tmp_path / 'away')
    with daemons.running(path) as daemon:
        yield daemon
        assert 'Traceback' not in daemon.text()


@AWAY
def test_sending_to_another_site(cold, faults, away, tmp_path, fault):
    with cold.open() as repo, away.client() as client:
        replication = site_replication.DataReplication(repo, client)
        faults.always = fault
        outcome = replication.take('one', site_replication.Pace())
        assert outcome.result == site_replication.FAILED
        assert isinstance(outcome.error, exceptions.UnavailableError)
        assert outcome.absence is None
        with repositories.open_repository(tmp_path / 'away') as there:
            assert not there.images()
        faults.always = None
        assert not image_sending.send(repo, 'one', client).exists
    with (repositories.open_repository(tmp_path / 'away') as there,
          there.open_image('one') as image):
        assert image.read() == cold.images['one']


# -- backups ------------------------------------------------------------------

@pytest.fixture
def cloud(server, proxy, faults, tmp_path):
    """Disks whose backups of one night are cold."""
    made = batches.Cloud(tmp_path, 2,
                         group_slots=512)
    with repositories.open_repository(made.path) as repo:
        prefix_owners.attach(repo, objects.object_location.parse(
            f's3://{server.container}/{os.urandom(8).hex()}', proxy.url),
            server.credentials(tmp_path / 'credentials'))
    results = made.run(0)
    assert all(not found.note for found in results.values()), results
    assert cold_repositories.cool(made.path)
    faults.seen.clear()
    return made


@pytest.mark.slow
def test_the_next_night_needs_no_object(cloud, faults):
    for path in cloud.disks.directory.iterdir():
        with open(path, 'r+b') as disk:
            disk.write(repositories.noise(8192, path.name))
    faults.always = 503
    results = cloud.run(1)
    assert all(not found.note for found in results.values()), results
    assert not faults.seen
    faults.always = None
    assert cloud.backups(1) == cloud.disks.digests()
    assert len(cloud.backups(0)) == len(cloud.backups(1))
    cloud.require_clean()


@pytest.mark.slow
@AWAY
def test_a_backup_that_is_restored(cloud, faults, tmp_path, fault):
    digests = cloud.disks.digests()
    faults.always = fault
    arguments = 'backup', 'restore', 'disk0', tmp_path / 'out'
    done = run(cloud, *arguments)
    assert done.returncode == 3 and 'Traceback' not in done.stderr, done
    assert 's3://' in done.stderr and 'disk0' in done.stderr, done.stderr
    assert not (tmp_path / 'out').exists()
    faults.always = None
    done = run(cloud, *arguments)
    assert done.returncode == 0, done.stderr
    assert digests['disk0'] == batches.digest_of([
        (tmp_path / 'out').read_bytes()])
