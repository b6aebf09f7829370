# SPDX-License-Identifier: Apache-2.0
"""A disk that answers every request with an error: a real XFS, shut down."""

import contextlib
import fcntl
import os
import pathlib
import struct
import subprocess
import sys

import pytest

from dedupd.tasks import collector
from dedupd.tasks import scrubber
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.cli import entry
from glance_dedup.maintenance import maintainer_role
from tests.functional import test_power_loss
from tests.support import disks
from tests.support import maintenance
from tests.support import repositories

pytestmark = pytest.mark.needs('disks')

TOP = pathlib.Path(__file__).resolve().parents[2]
_SHUT_DOWN = 0x8004587D         # FS_IOC_SHUTDOWN of <linux/fs.h>
_WITHOUT_LOG = 2


def fail(root):
    """Have each request to a file system answered by an error."""
    fd = os.open(root, os.O_RDONLY)
    fcntl.ioctl(fd, _SHUT_DOWN, struct.pack('I', _WITHOUT_LOG))
    os.close(fd)


@pytest.fixture(scope='module')
def command(tmp_path_factory):
    """The options of a command on a repository whose disk fails."""
    place = tmp_path_factory.mktemp('failing')
    with disks.mounted(place, 'xfs') as root:
        command = ['--repository', f'{root}/repository', '--socket', '',
                   '--filter-dir', str(place / 'filter')]
        for line in ('repository create', f'image put a {__file__}',
                     'task collect'):
            # This is another process, since it would turn down this process's
            # log.
            subprocess.run(
                [sys.executable, '-m', 'glance_dedup.cli.entry', *command,
                 *line.split()], check=True, capture_output=True, timeout=60,
                cwd=TOP)
        fail(root)
        yield command


@pytest.mark.parametrize('line', [
    'status', 'upgrade check', 'task collect', 'task merge', 'task scrub',
    'task recompress', 'task tier --all', 'repository space',
    'glance orphans', 'repository create', 'repository show',
    'repository check', 'repository rebuild-catalog',
    'index show', 'image put b /dev/null', 'image copy a b',
    'image get a -', 'image delete a', 'image list', 'image show a',
    'image verify a', 'image mark-lost a', 'project list', 'project count',
    'backup list', 'backup prune --keep-last 1', 'object-store show',
    'volume list', 'volume create v 1M', 'volume delete v',
    'glance export /tmp --all'])
def test_commands_say_what_the_system_says(command, capfd, line):
    status = entry.main([*command, *line.split()])
    told = ''.join(capfd.readouterr())
    assert 'Input/output error' in ' '.join(told.replace('|', ' ').split())
    # The check shows the error as a check that failed.
    assert status == (2 if line == 'upgrade check' else 3)
    for wrong in 'there is no', 'missing', 'another process', 'not a repos':
        assert wrong not in told, told


def test_a_maintainer_blames_nobody(tmp_path):
    """Errors of the disk do not end the maintainer's role."""
    with disks.mounted(tmp_path, 'xfs') as root:
        path = repositories.create(root / 'repository')
        with (repositories.open_repository(path) as repo,
              maintainer_role.Maintainer(repo) as maintainer):
            repositories.put(repo, 'a', repositories.noise(100000))
            repo.delete('a')
            fail(root)
            for work in (
                    maintainer.confirm,
                    lambda: collector.run_once(
                        maintainer, pacing.Pace(), live_share=0),
                    lambda: scrubber.run_once(maintainer, pacing.Pace())):
                with pytest.raises(exceptions.RepositoryError,
                                   match='Input/output error') as caught:
                    work()
                assert not isinstance(caught.value, exceptions.LostLocks)
            assert not maintainer.lost
        with pytest.raises(exceptions.StorageError,
                           match='Input/output error'):
            repositories.open_repository(path)


def test_a_lock_whose_file_cannot_be_asked_for(tmp_path):
    """A failed lock request is no sign of another maintainer."""
    with disks.mounted(tmp_path, 'xfs') as root:
        path = repositories.create(root / 'repository')
        with repositories.open_repository(path) as repo:
            maintainer_role.Maintainer(repo).close()
            with contextlib.closing(
                    _engine.Maintenance(repo.handle())) as engine:
                fail(root)
                with pytest.raises(exceptions.StorageError,
                                   match='Input/output error'):
                    engine.lock()


def test_nothing_stays_of_an_upload_whose_sync_failed(tmp_path):
    """The next collection frees its group, whatever reached the disk."""
    disk = test_power_loss.Disk(tmp_path, 'xfs')
    disk.create()
    with contextlib.closing(disk):
        path = repositories.create(disk.root / 'repository', group_slots=8192)
        with repositories.open_repository(
                path, filter_dir=str(tmp_path / 'filter')) as repo:
            transaction = repo.begin('a')
            transaction.write(repositories.noise(8 << 20))
            disk.fail()
            with pytest.raises(exceptions.StorageError):
                transaction.commit()
            transaction.abort()
        disk.recover()
        with (repositories.open_repository(
                path, filter_dir=str(tmp_path / 'filter')) as repo,
              maintainer_role.Maintainer(repo) as maintainer):
            assert maintenance.disk(path) > 460_000
            collector.run_once(maintainer, pacing.Pace())
            assert maintenance.disk(path) <= 8192
            repositories.put(repo, 'b', repositories.noise(100000))
        repositories.require_clean(path)
