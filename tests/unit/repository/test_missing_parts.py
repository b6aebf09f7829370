# SPDX-License-Identifier: Apache-2.0

"""A repository that lacks a part of its own does not deny its images.

Glance takes "there is no such image" for a delete that succeeded earlier. It
then forgets the image, and its blocks stay for ever.
"""

import contextlib

import pytest

from glance_dedup import _engine
from glance_dedup.base import exceptions
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all


@pytest.fixture
def path(tmp_path):
    path = tmp_path / 'repository'
    repositories.create(path)
    with open_repository(path) as repo:
        put(repo, 'image', noise(5000))
    return path


@pytest.fixture
def repo(path):
    with open_repository(path) as repo:
        yield repo


@contextlib.contextmanager
def lacking(path, name):
    aside = path.parent / 'aside'
    (path / name).rename(aside)
    yield
    aside.rename(path / name)


@pytest.mark.parametrize('name', ['locks/images', 'locks', 'images', 'spool'])
def test_delete(path, repo, name):
    with lacking(path, name), pytest.raises(
            exceptions.StorageError, match=rf'{name}.* is missing.*estore'):
        repo.delete('image')
    assert read_all(repo, 'image') == noise(5000)
    repo.delete('image')
    with pytest.raises(exceptions.ImageNotFound):
        repo.delete('image')


def test_reading(path, repo):
    with lacking(path, 'images'), pytest.raises(
            exceptions.StorageError, match='images is missing.*estore'):
        repo.open_image('image')
    with pytest.raises(exceptions.ImageNotFound):
        repo.open_image('other')


@pytest.mark.parametrize('name', ['locks/groups', 'locks'])
def test_opening(path, name):
    with lacking(path, name), pytest.raises(
            exceptions.StorageError, match='locks/groups is missing.*estore'):
        open_repository(path)


def test_lock_of_the_maintainer(path, repo):
    with contextlib.closing(_engine.Maintenance(repo.handle())) as engine:
        assert engine.lock()
        with lacking(path, 'locks/images'), pytest.raises(
                exceptions.StorageError, match='locks/images is missing'):
            engine.lock_image('image')
        assert engine.lock_image('image')
