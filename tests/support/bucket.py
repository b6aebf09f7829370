# SPDX-License-Identifier: Apache-2.0

"""A directory replaces an object store in tests of crashes and damage.

A crash of the repository's host does not undo what an object store has
acknowledged. So the objects are files that are recorded like all others, in a
directory beside the repository, and an object is durable when its PUT returns.
The functional tests test the other properties of object stores with real ones.
"""

import contextlib
import os
import pathlib
import shutil
from unittest import mock

from glance_dedup.objects import object_location
from glance_dedup.objects import object_store
from glance_dedup.repository import cold_settings
from glance_dedup.repository import prefix_owners

_NEW = '.new'
LOCATION = object_location.parse('s3://bucket/prefix', 'http://127.0.0.1:1')


class Bucket:
    """A directory with the interface of :class:`object_store.ObjectStore`."""

    location = LOCATION

    def __init__(self, directory):
        self._directory = pathlib.Path(directory)
        self.counts = object_store.Counts()

    def _path(self, key):
        return self._directory / key.replace('/', '+')

    def put(self, key, file):
        file.seek(0)
        # Metadata backups send several objects at once.
        new = self._path(f'{key}{_NEW}')
        with open(new, 'wb', buffering=0) as f:
            f.write(file.read())
            os.fsync(f.fileno())
        os.rename(new, self._path(key))
        fd = os.open(self._directory, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        return self.size(key)

    def get(self, key, start, length):
        with self._found(key), open(self._path(key), 'rb') as f:
            f.seek(start)
            return f.read(length)

    def size(self, key):
        with self._found(key):
            return os.stat(self._path(key)).st_size

    def keys(self, prefix):
        found = [(path.name.replace('+', '/'), path.stat().st_size)
                 for path in sorted(self._directory.iterdir())
                 if path.suffix != _NEW]
        return [pair for pair in found if pair[0].startswith(prefix)]

    def delete(self, key):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    @contextlib.contextmanager
    def _found(self, key):
        try:
            yield
        except FileNotFoundError as e:
            raise object_store.ObjectNotFound(f'{key} is not there') from e


def of(repository):
    """Return the directory of a repository's objects."""
    return os.path.join(os.path.dirname(repository), 'bucket')


@contextlib.contextmanager
def beside(repository):
    """Read and write objects in the directory beside the repository."""
    with mock.patch.object(cold_settings, 'connect',
                           lambda settings: Bucket(of(repository))):
        yield


def attach(repo):
    """Make the bucket, and attach the repository to it."""
    os.mkdir(of(repo.path), 0o700)
    fd = os.open(os.path.dirname(repo.path), os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    prefix_owners.attach(repo, LOCATION, '/credentials')


def forget_slices(repo):
    """Empty the cache."""
    slices = os.path.join(repo.path, 'slices')
    for name in os.listdir(slices):
        shutil.rmtree(os.path.join(slices, name))
