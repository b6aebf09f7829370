# SPDX-License-Identifier: Apache-2.0

"""Volumes whose owner looks blocks up in a metadata backend.

An index only gives hints (I5). So whatever happens to it, the volume's bytes
are right and the repository is clean; only duplicates are missed.
"""

import itertools
import shutil

import pytest

from glance_dedup.base import imageids
from tests.support import disks
from tests.support import maintenance
from tests.support import nbd
from tests.support import repositories
from tests.support import volume_tools

pytestmark = [pytest.mark.slow, pytest.mark.needs('nbdkit')]

MIB = 1 << 20
BLOCK = 4096
STORES = ('inram', 'dtb', 'lmdb', 'leveldb')
KEPT = STORES[1:]
DATA = repositories.noise(2 * MIB, 9)
PIECE = 16 * BLOCK


@pytest.fixture
def repository(tmp_path):
    """A repository with DATA in an image, and an empty volume."""
    path = volume_tools.create_repository(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'image', DATA)
    volume_tools.create(path, 'disk', 64 * MIB)
    return path


def serve(repository, place, index, name='disk', **options):
    return volume_tools.Server(
        repository, place, name, GLANCE_DEDUP_INDEX=index,
        GLANCE_DEDUP_INDEX_DIR=str(place / 'index'), **options)


class Writer:
    """Writes new data, or DATA, to places of its own in a served volume."""

    def __init__(self, server):
        self.server = server
        self.written = {}
        self._pieces = itertools.count()

    def write(self, data):
        """Write, and return the number of blocks that were stored already."""
        offset = next(self._pieces) * len(DATA)
        self.written[offset] = data
        before = self.server.number('duplicate')
        with self.server.session() as session:
            volume_tools.write(session, offset, data)
        self.server.control.checkpoint()
        return (self.server.number('duplicate') - before) // BLOCK

    def is_filled(self):
        """Return true if DATA is found; each try writes a new piece of it."""
        if not self.server.number('index_complete'):
            return False
        at = len(self.written) * PIECE
        assert at < len(DATA)
        return self.write(DATA[at:at + PIECE]) == PIECE // BLOCK

    def check(self):
        """All data is there, even after a restart, and the format is right."""
        for restart in (False, True):
            if restart:
                self.server.stop()
                self.server.start()
            with self.server.session() as session:
                for offset, data in self.written.items():
                    assert session.read(offset, len(data)) == data
        self.server.stop()
        repositories.require_clean(self.server.repository)


@pytest.mark.parametrize('index', ['filter', *STORES])
def test_duplicates(repository, tmp_path, index):
    """The index finds other writers' blocks, and the volume's own."""
    with serve(repository, tmp_path, index) as server:
        server.start('--index-size', '2M')
        writer = Writer(server)
        repositories.eventually(writer.is_filled)
        repositories.eventually(lambda: server.number('index_complete'))
        status = server.control.status()
        assert (status['index'], status['index_dropped']) == (index, '0')
        # LMDB's cache is the kernel's.
        assert bool(int(status['index_bytes'])) == (index != 'lmdb')
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
    """Two servers have an index at once; with LMDB they share one."""
    volume_tools.create(repository, 'other', 64 * MIB)
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


def stores(place):
    return list((place / 'index').glob('*/*'))


def remove(files):
    for file in files:
        shutil.rmtree(file) if file.is_dir() else file.unlink()


@pytest.mark.parametrize('index', KEPT)
def test_that_of_another_repository(repository, tmp_path, index):
    """A foreign index gives wrong hints, or none; new blocks get true ones."""
    other = volume_tools.create_repository(tmp_path / 'other' / 'repository')
    with repositories.open_repository(other) as repo:
        # DATA goes to other groups.
        repositories.put(repo, 'shift', repositories.noise(6 * MIB, 12))
        repositories.put(repo, 'image', DATA)
    volume_tools.create(other, 'disk', 64 * MIB)
    with serve(other, tmp_path / 'other', index) as server:
        repositories.eventually(Writer(server.start()).is_filled)
    foreign, = (tmp_path / 'other' / 'index').iterdir()
    shutil.copytree(
        foreign, tmp_path / 'index' / f'{path_id(repository)}.{index}')
    with serve(repository, tmp_path, index) as server:
        writer = Writer(server.start())
        repositories.eventually(lambda: server.number('index_complete'))
        assert writer.write(DATA) < len(DATA) // BLOCK
        assert writer.write(DATA) == len(DATA) // BLOCK
        writer.check()


@pytest.mark.parametrize('index', ['filter', 'lmdb'])
def test_first_checkpoint_after_a_kill(repository, tmp_path, index):
    """The checkpoint of records that were left finds duplicates, too."""
    own = repositories.noise(MIB, 10)
    with serve(repository, tmp_path, index) as server:
        server.start()
        repositories.eventually(lambda: server.number('index_complete'))
        with server.session() as session:
            volume_tools.write(session, 0, own)
        server.control.checkpoint()
        with server.session() as session:
            volume_tools.write(session, 8 * MIB, own)
            volume_tools.ask(session, nbd.FLUSH)
            # This record proves that those before are on the disk.
            volume_tools.write(session, 8 * MIB, own[:BLOCK])
        server.kill()
        server.start()
        server.stop()
    with repositories.open_repository(repository) as repo:
        one, other = (maintenance.blocks_of(repo, name)
                      for name in sorted(repo.recipes())
                      if imageids.of_volume(name))
        assert one == other


@pytest.mark.parametrize('index', STORES)
def test_kill(repository, tmp_path, index):
    """Killing the server while it fills the index, or stores, does no harm."""
    with serve(repository, tmp_path, index) as server:
        writer = Writer(server.start())
        for number in range(3):
            writer.write(repositories.noise(MIB, 20 + number))
            server.kill()
            server.start()
        repositories.eventually(writer.is_filled)
        for number in range(3):
            assert writer.write(
                repositories.noise(MIB, 20 + number)) == MIB // BLOCK
        writer.check()


@pytest.mark.parametrize('index', KEPT)
def test_it_is_deleted_while_open(repository, tmp_path, index):
    with serve(repository, tmp_path, index) as server:
        writer = Writer(server.start())
        repositories.eventually(writer.is_filled)
        remove(stores(tmp_path))
        writer.write(repositories.noise(MIB, 13))
        writer.write(DATA)
        server.stop()
        server.start()
        repositories.eventually(writer.is_filled)
        writer.check()


@pytest.mark.parametrize('index', KEPT)
def test_its_file_is_damaged(repository, tmp_path, index):
    with serve(repository, tmp_path, index) as server:
        writer = Writer(server.start())
        repositories.eventually(writer.is_filled)
        server.stop()
        for file in (tmp_path / 'index').rglob('*'):
            if file.is_file():
                file.write_bytes(b'nonsense' * 3000)
        server.start()
        repositories.eventually(writer.is_filled)
        writer.check()


@pytest.mark.parametrize('index', KEPT)
def test_a_full_disk(repository, tmp_path, index):
    """A full disk, before the start or in use, does no harm."""
    with repositories.small_disk(tmp_path / 'index', '16m'):
        disks.fill_bytes(tmp_path / 'index')
        with serve(repository, tmp_path, index) as server:
            writer = Writer(server.start())
            writer.write(repositories.noise(MIB, 14))
            assert not server.number('index_complete')
            server.stop()
            (tmp_path / 'index' / 'filling').unlink()
            server.start()
            repositories.eventually(writer.is_filled)
            disks.fill_bytes(tmp_path / 'index')
            for number in range(3):
                writer.write(repositories.noise(2 * MIB, 15 + number))
            writer.check()
