# SPDX-License-Identifier: Apache-2.0

"""Damage that a user's read finds is known before the next scrub."""

import contextlib
import pathlib

import pytest

from dedupd.status import repository_stats
from dedupd.status import suspects
from glance_dedup.base import exceptions
from tests.support import repositories


@pytest.fixture
def repo(tmp_path, monkeypatch):
    monkeypatch.setattr(suspects, 'AGAIN_SECONDS', 0.05)
    path = repositories.create(tmp_path / 'r')
    with repositories.open_repository(path) as repo:
        for name, seed in ('good', 1), ('bad', 2):
            repositories.put(repo, name, repositories.noise(1 << 20, seed))
        yield repo


@pytest.fixture
def watched(repo):
    with contextlib.closing(suspects.Suspects(repo)) as found:
        yield found


class Broken:
    """An image whose recipe is damaged until the test repairs it."""

    def __init__(self, repo, name):
        self.path = pathlib.Path(repo.path, 'images', name)
        self.content = self.path.read_bytes()
        self.path.write_bytes(self.content[:4096] + b'\xff' * 4096)

    def mend(self):
        self.path.write_bytes(self.content)


def read(repo, name):
    with repo.open_image(name) as image:
        return image.read()


def test_a_read_that_fails(repo, watched):
    broken = Broken(repo, 'bad')
    assert read(repo, 'good') and watched.images() == set()
    for number in 1, 2:
        with pytest.raises(exceptions.DamagedError):
            read(repo, 'bad')
        assert watched.images() == {'bad'}
        assert watched.failed_reads == number
    broken.mend()
    repositories.eventually(lambda: not watched.images())
    assert watched.failed_reads == 2        # the verification is no user's


def test_an_image_that_is_deleted(repo, watched):
    Broken(repo, 'bad')
    with pytest.raises(exceptions.DamagedError):
        read(repo, 'bad')
    repo.delete('bad')
    repositories.eventually(lambda: not watched.images())


def test_a_deleted_image_is_no_suspect_at_once(repo, watched, monkeypatch):
    """A deleted image stops counting as damaged, and frees its place."""
    monkeypatch.setattr(suspects, 'AGAIN_SECONDS', 3600)
    monkeypatch.setattr(suspects, 'IMAGES', 1)
    Broken(repo, 'bad')
    with pytest.raises(exceptions.DamagedError):
        read(repo, 'bad')
    repositories.eventually(lambda: watched._found['bad'])
    assert watched.images() == {'bad'}
    repo.delete('bad')
    assert watched.images() == set()
    Broken(repo, 'good')
    with pytest.raises(exceptions.DamagedError):
        read(repo, 'good')
    assert watched.images() == {'good'}


def test_an_image_is_verified_on_request(repo, watched, monkeypatch):
    """A request verifies a repaired image before the next hour."""
    monkeypatch.setattr(suspects, 'AGAIN_SECONDS', 3600)
    broken = Broken(repo, 'bad')
    with pytest.raises(exceptions.DamagedError):
        read(repo, 'bad')
    repositories.eventually(
        lambda: 0 < watched._found['bad'] < float('inf'))
    broken.mend()
    assert watched.images() == {'bad'}
    watched.verify_now()
    repositories.eventually(lambda: not watched.images())


def test_a_request_while_the_image_is_read(repo, watched, monkeypatch):
    """The image is read again, since the first read may predate the repair."""
    monkeypatch.setattr(suspects, 'AGAIN_SECONDS', 3600)
    results = [False, True]

    def verify(image_id):
        if len(results) == 2:
            watched.verify_now()
        return results.pop(0)

    monkeypatch.setattr(watched, '_verify', verify)
    watched.note('bad', exceptions.DamagedError('bad'))
    repositories.eventually(lambda: not watched.images())


def test_many(repo, watched, monkeypatch):
    monkeypatch.setattr(suspects, 'IMAGES', 2)
    monkeypatch.setattr(suspects, 'AGAIN_SECONDS', 3600)
    monkeypatch.setattr(watched, '_verify', lambda image_id: False)
    for number in range(5):
        repositories.put(repo, f'image-{number}', b'any')
        watched.note(f'image-{number}', exceptions.DamagedError('bad'))
    assert len(watched.images()) == 2 and watched.failed_reads == 5


def test_what_is_closed_hears_nothing(repo):
    found = suspects.Suspects(repo)
    found.close()
    Broken(repo, 'bad')
    with pytest.raises(exceptions.DamagedError):
        read(repo, 'bad')
    assert found.failed_reads == 0


def test_figures_have_them(repo):
    Broken(repo, 'bad')
    with contextlib.closing(repository_stats.Figures(repo,
                                                     lambda: None)) as found:
        with pytest.raises(exceptions.DamagedError):
            read(repo, 'bad')
        assert found.damage()[1] == {'bad'}
