# SPDX-License-Identifier: Apache-2.0

"""Volumes whose owner looks blocks up in a metadata backend.

An index only gives hints (I5). So whatever happens to it, the volume's bytes
are right and the repository is clean; only duplicates are missed.
"""

import itertools
import os
import shutil
import signal

import pytest

from tests.support import daemons
from tests.support import disks
from tests.support import nbd
from tests.support import repositories
from tests.support import volumes

MIB = 1 << 20
BLOCK = 4096
STORES = ('inram', 'dtb', 'lmdb', 'leveldb')
KEPT = STORES[1:]
DATA = repositories.noise(2 * MIB, 9)
PIECE = 16 * BLOCK


@pytest.fixture
def repository(tmp_path):
    """One that has DATA in an image, and an empty volume."""
    path = volumes.create_repository(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'image', DATA)
    volumes.create(path, 'disk', 64 * MIB)
    return path


def serve(repository, place, index, name='disk', **options):
    return volumes.Server(
        repository, place, name, GLANCE_DEDUP_INDEX=index,
        GLANCE_DEDUP_INDEX_DIR=str(place / 'index'), **options)


class Writer:
    """Writes to a served volume what is new, or DATA, at places of its own."""

    def __init__(self, server):
        self.server = server
        self.written = {}
        self._pieces = itertools.count()

    def write(self, data):
        """How many blocks of this the checkpoint finds stored already."""
        offset = next(self._pieces) * len(DATA)
        self.written[offset] = data
        before = self.server.number('duplicate')
        with self.server.session() as session:
            volumes.write(session, offset, data)
        self.server.control.checkpoint()
        return (self.server.number('duplicate') - before) // BLOCK

    def is_filled(self):
        """Whether DATA is found; each try writes another piece of it."""
        at = len(self.written) * PIECE
        assert at < len(DATA)
        return self.write(DATA[at:at + PIECE]) == PIECE // BLOCK

    def check(self):
        """All is there, also after a restart, and the format is right."""
        for restart in (False, True):
            if restart:
                self.server.stop()
                self.server.start()
            with self.server.session() as session:
                for offset, data in self.written.items():
                    assert session.read(offset, len(data)) == data
        self.server.stop()
        repositories.need_clean(self.server.repository)


@pytest.mark.parametrize('index', ['filter', *STORES])
def test_duplicates(repository, tmp_path, index):
    """What others stored before, and what the volume stored itself."""
    with serve(repository, tmp_path, index) as server:
        server.start('--index-mib', 2)
        writer = Writer(server)
        repositories.eventually(writer.is_filled)
        assert writer.write(DATA) == len(DATA) // BLOCK
        own = repositories.noise(MIB, 10)
        assert writer.write(own) == 0
        assert writer.write(own) == MIB // BLOCK
        assert 'index' not in server.text()
        server.stop()
        server.start()
        repositories.eventually(writer.is_filled)
        assert writer.write(own) == MIB // BLOCK
        writer.check()
    assert [path.name for path in (tmp_path / 'index').glob('*')] == (
        [f'{path_id(repository)}.{index}'] if index in KEPT else [])


def path_id(repository):
    with repositories.open_repository(repository) as repo:
        return repo.repository_id


@pytest.mark.parametrize('index', STORES)
def test_two_servers(repository, tmp_path, index):
    """Both have an index, at once; LMDB's is one."""
    volumes.create(repository, 'other', 64 * MIB)
    (tmp_path / 'two').mkdir()
    (tmp_path / 'two' / 'index').symlink_to(tmp_path / 'index')
    with serve(repository, tmp_path, index) as one, serve(
            repository, tmp_path / 'two', index, 'other') as two:
        writers = [Writer(server.start()) for server in (one, two)]
        for writer in writers:
            repositories.eventually(writer.is_filled)
        own = repositories.noise(MIB, 11)
        assert writers[0].write(own) == 0
        found = writers[1].write(own)
        assert found == (MIB // BLOCK if index == 'lmdb' else 0)
        for writer in writers:
            assert 'index' not in writer.server.text()
            writer.check()
