# SPDX-License-Identifier: Apache-2.0

"""A disk that is full of images, and of other programs' files.

Storing stops at the reserve. Where another program has taken the last block,
or the last inode, images can still be read, checked, deleted, counted and
collected, after which there is room again.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

from glance_dedup.base import exceptions
from glance_dedup.repository import image_repository
from tests.support import daemons
from tests.support import disks
from tests.support import repositories

pytestmark = pytest.mark.needs('disks')

MIB = 1 << 20


def run(place, kind, what, *scenario):
    with disks.mounted(place, kind, what == 'inodes') as root:
        done = subprocess.run(
            [sys.executable, '-m', 'tests.functional.full_disk', root,
             place / 'filter', what, *scenario], cwd=daemons.ROOT,
            capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f'{kind} without {what}: {done.stderr}'


@pytest.mark.parametrize('kind, what', [
    ('ext4', 'bytes'), ('ext4', 'inodes'), ('xfs', 'bytes')])
def test_without_room(tmp_path, kind, what):
    run(tmp_path, kind, what)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize('kind, what', [
    ('xfs', 'inodes'), ('tmpfs', 'bytes'), ('tmpfs', 'inodes')])
def test_without_room_elsewhere(tmp_path, kind, what):
    run(tmp_path, kind, what)


@pytest.mark.parametrize('kind, what', [
    ('ext4', 'bytes'), pytest.param('ext4', 'inodes', marks=pytest.mark.long),
    pytest.param('tmpfs', 'bytes', marks=pytest.mark.long)])
def test_a_cache_without_room(tmp_path, kind, what):
    run(tmp_path, kind, what, 'cache')


def command(path, *arguments):
    """Run the command line; return its status, output and errors."""
    done = subprocess.run(
        [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository', path,
         *arguments], cwd=daemons.ROOT, capture_output=True, text=True,
        timeout=120)
    assert 'Traceback' not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_the_reserve(tmp_path):
    """Storing leaves the reserve, which is enough for a collection."""
    with disks.mounted(tmp_path, 'ext4') as root:
        path = repositories.create(root / 'repository', group_slots=512)
        with repositories.open_repository(
                path, filter_dir=str(tmp_path / 'filter')) as repo:
            _, kept = repo.room()
            size = os.statvfs(root).f_blocks * os.statvfs(root).f_frsize
            assert kept == size // 100
            with pytest.raises(exceptions.NoSpaceError, match='are kept for '
                               'deleting and collecting') as caught:
                for n in range(100):
                    repositories.put(repo, f'image-{n}',
                                     repositories.noise(MIB, n))
            assert n > 20, caught.value
            # The failed upload's room is free again, and can be requested in
            # full.
            assert repo.room()[0] >= kept
            with pytest.raises(exceptions.NoSpaceError):
                repo.require_room(repo.room()[0] - kept + 1)
            repo.require_room(repo.room()[0] - kept)
            # Another program takes half of the reserve.
            filling = root / 'filling'
            with open(filling, 'wb') as f:
                os.posix_fallocate(f.fileno(), 0,
                                   repo.room()[0] - kept // 2)
            assert repo.room()[0] < kept
            # With 0 there is no reserve.
            with repositories.open_repository(
                    path, reserve_mib=0,
                    filter_dir=str(tmp_path / 'filter')) as other:
                assert other.room()[1] == 0
                repositories.put(other, 'small', b'small')
            with pytest.raises(exceptions.NoSpaceError):
                repo.begin('refused')
            for image_id in repo.images()[:12]:
                repo.delete(image_id)
        status, _, errors = command(path, '--socket', '', 'task', 'collect')
        assert status == 0, errors
        with repositories.open_repository(
                path, filter_dir=str(tmp_path / 'filter')) as repo:
            assert repo.room()[0] > kept + 8 * MIB
            repositories.put(repo, 'next', repositories.noise(MIB, 777))
        repositories.require_clean(path)


def ready(daemon):
    daemon.wait_for(
        lambda: daemon.status()['catalog']['state'] == 'ready')


def below_reserve(space):
    return space['filesystem_free_bytes'] < space['reserve_bytes']


def test_a_daemon_and_the_command_line_without_room(tmp_path):
    data = repositories.noise(12 * MIB, 1)
    with disks.mounted(tmp_path, 'ext4') as root:
        path = repositories.create(root / 'repository', group_slots=512)
        with repositories.open_repository(
                path, filter_dir=str(tmp_path / 'filter')) as repo:
            repositories.put(repo, 'image', data)
            repositories.put(repo, 'other', data[:MIB])
        with daemons.Daemon(path, filter_dir=tmp_path / 'filter') as daemon:
            daemon.start()
            ready(daemon)
            daemon.run('collect')
            filling, = disks.fill_bytes(root)
            new = tmp_path / 'new'
            new.write_bytes(b'new')
            command_path = str(path)
            status, _, errors = command(command_path, 'image', 'put', 'new',
                                        str(new))
            assert status == 3 and 'are kept for deleting' in errors
            daemon.wait_for(lambda: below_reserve(daemon.status()['space']))
            daemon.stop()
            # The daemon starts and ends well on such a disk, too.
            daemon.start()
            ready(daemon)
            assert daemon.request(
                'GET', '/v1/images/image').body == data
            assert command(command_path, 'image', 'delete', 'image')[0] == 0
            result = daemon.run('collect')['last']
            assert result['error'] is None, result
            assert image_repository.Repository(
                path, filter_dir=str(tmp_path / 'filter'),
                filter_mib=1).room()[0] > 8 * MIB
            status, out, errors = command(
                command_path, 'repository', 'check', '-f', 'json')
            assert status == 0, errors
            assert json.loads(out)['result'] == 'fine'
            assert command(command_path, 'image', 'put', 'new',
                           str(new))[0] == 0
            disks.fill_bytes(root)
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(30) == 0
            assert 'Traceback' not in daemon.text()
            filling.unlink()
