# SPDX-License-Identifier: Apache-2.0

"""Backups of volumes, whichever process has them open."""

import os

import pytest

from glance_dedup.backup import views
from glance_dedup.backup import volume_backups
from glance_dedup.base import exceptions
from glance_dedup.repository import openvolumes
from tests.support import nbd
from tests.support import repositories
from tests.support import volume_tools

MIB = 1 << 20
BACKUP = 'b_disk_20261123T180000Z'


@pytest.fixture
def repository(tmp_path):
    path = volume_tools.create_repository(tmp_path / 'repository')
    volume_tools.create(path, 'disk', 4 * MIB)
    return path


def test_a_volume_that_nobody_uses(repository):
    data = os.urandom(MIB)
    with repositories.open_repository(repository) as repo:
        with openvolumes.open_volume(repo, 'disk') as volume:
            volume.write(data, MIB)
        volume_backups.back_up(repo, 'disk', BACKUP)
        with repo.open_image(BACKUP) as image:
            assert image.size == 4 * MIB and image.read(MIB, MIB) == data
        with pytest.raises(exceptions.ImageExists):
            volume_backups.back_up(repo, 'disk', BACKUP)
        with pytest.raises(exceptions.ImageNotFound):
            volume_backups.back_up(repo, 'none', BACKUP)


@pytest.mark.needs('nbdkit')
def test_a_volume_that_another_process_serves(repository, tmp_path):
    nbd.need('nbdkit')
    with volume_tools.Server(repository, tmp_path) as server:
        server.start()
        with repositories.open_repository(repository) as repo:
            volume_backups.back_up(repo, 'disk', BACKUP)
            assert repo.stat(BACKUP).size == 4 * MIB
            with pytest.raises(exceptions.ImageExists):
                volume_backups.back_up(repo, 'disk', BACKUP)
        server.stop()


def test_a_volume_in_use_by_who_does_not_answer(repository):
    with repositories.open_repository(repository) as owner, (
            repositories.open_repository(repository)) as repo:
        with openvolumes.open_volume(owner, 'disk'):
            with pytest.raises(views.SourceError, match='it is in use, and'):
                volume_backups.back_up(repo, 'disk', BACKUP)
