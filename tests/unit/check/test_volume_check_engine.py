# SPDX-License-Identifier: Apache-2.0

"""The checker accepts volumes during and after the engine's writes."""

import random

import pytest

from glance_dedup.check import checker
from glance_dedup.check import repo_directories
from glance_dedup.check import volume_check
from glance_dedup.repository import openvolumes
from tests.support import repositories
from tests.unit.check import fixtures

no_pause = fixtures.no_pause
SIZE = 2 << 20


@pytest.fixture
def repo(tmp_path):
    path = repositories.create(tmp_path / 'repository', block_size=4096)
    with repositories.open_repository(path) as repo:
        yield repo


def require_clean(repo, in_use):
    report = checker.check(repo.path)
    assert [str(f) for f in report.findings] == []
    found = report.figures
    assert (found['volumes'], found['volumes_in_use']) == (1, in_use)


def scribble(volume, rng, times):
    for _ in range(times):
        size = volume.size
        volume.write(rng.randbytes(rng.randrange(1, 90000)),
                     rng.randrange(size - 90000))
        volume.zero(rng.randrange(1, 90000), rng.randrange(size - 90000))


@pytest.mark.parametrize('cloned', [True, False])
def test_life_of_a_volume(repo, cloned):
    rng = random.Random(cloned)
    image = None
    if cloned:
        repositories.put(repo, 'image', rng.randbytes(SIZE - 5000))
        image = repo.open_image('image')
    openvolumes.create(repo, 'disk', SIZE, image=image, part_size=65536)
    require_clean(repo, 0)
    with openvolumes.open_volume(repo, 'disk') as volume:
        scribble(volume, rng, 20)
        require_clean(repo, 1)
        volume.checkpoint()
        require_clean(repo, 1)
        scribble(volume, rng, 5)
        volume.flush()
        volume.resize(SIZE // 2 + 512)
        require_clean(repo, 1)
        scribble(volume, rng, 5)
        volume.snapshot('snapshot')
        require_clean(repo, 1)
        scribble(volume, rng, 3)
    # Closed without a checkpoint; recovered; and closed again.
    require_clean(repo, 0)
    with openvolumes.open_volume(repo, 'disk') as volume:
        require_clean(repo, 1)
        scribble(volume, rng, 3)
    require_clean(repo, 0)
    with openvolumes.open_volume(repo, 'disk') as volume:
        volume.resize(2 * SIZE)
        require_clean(repo, 1)
    with repo.open_image('snapshot') as snapshot:
        openvolumes.roll_back(repo, 'disk', snapshot)
    require_clean(repo, 0)
    openvolumes.rename(repo, 'disk', 'other')
    require_clean(repo, 0)
    openvolumes.rename(repo, 'other', 'disk')
    openvolumes.delete(repo, 'disk')
    report = checker.check(repo.path)
    assert report.ok and report.figures['volumes'] == 0


@pytest.mark.parametrize('old, new', [('a', 'b'), ('b', 'a')])
@pytest.mark.parametrize('both', [True, False])
def test_renamed_during_the_check(repo, monkeypatch, old, new, both):
    """A volume renamed during the check is no finding, nor are its recipes."""
    openvolumes.create(repo, old, SIZE, part_size=65536)
    with openvolumes.open_volume(repo, old) as volume:
        volume.write(b'content', 0)
        volume.checkpoint()
    real = repo_directories.Directories.names
    todo = [old]

    def names(self, directory):
        found = real(self, directory)
        if directory == 'volumes' and todo:
            if both:        # the list met it under both names
                found = sorted((old, new))
            else:
                openvolumes.rename(repo, todo.pop(), new)
        return found
    look = volume_check._Look.run

    def run(self):
        look(self)
        if todo:
            openvolumes.rename(repo, todo.pop(), new)
    monkeypatch.setattr(repo_directories.Directories, 'names', names)
    monkeypatch.setattr(volume_check._Look, 'run', run)
    require_clean(repo, 0)
