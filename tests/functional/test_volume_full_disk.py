# SPDX-License-Identifier: Apache-2.0

"""A volume is served from a disk that other files fill."""

import re

import pytest

from dedupd.tasks import collector
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from tests.support import disks
from tests.support import maintenance
from tests.support import nbd
from tests.support import repositories
from tests.support import volume_tools

pytestmark = [pytest.mark.needs('disks'), pytest.mark.needs('nbdkit')]

MIB = 1 << 20
READ_ONLY = 1 << 1      # a bit of a transmission's flags


def serves(server):
    """Return true if a client of NBD gets the export."""
    assert server.process.poll() is None, server.text()
    try:
        server.session().close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize('kind, inodes', [
    ('ext4', False), ('ext4', True), ('xfs', False)])
def test_it_starts_read_only(tmp_path, kind, inodes):
    """A full disk's volume is served read-only until there is room."""
    written = repositories.noise(MIB, 1)
    with disks.mounted(tmp_path, kind, inodes) as root:
        repository = volume_tools.create_repository(root / 'repository')
        volume_tools.create(repository, 'disk', 8 * MIB)
        with volume_tools.Server(repository, tmp_path) as server:
            with server.start().session() as session:
                volume_tools.write(session, 0, written)
                volume_tools.ask(session, nbd.FLUSH)
            server.kill()
            # The next server would remove this socket, and so would have an
            # inode for a moment.
            (repository / 'volumes' / 'disk' / 'control').unlink()
            filling = (disks.fill_inodes if inodes else disks.fill_bytes)(root)
            server.start(wait=False)
            repositories.eventually(lambda: serves(server))
            with server.session() as session:
                assert session.flags & READ_ONLY
                assert volume_tools.ask(session, nbd.READ, 0, MIB) == written
                error, _ = session.answer(nbd.WRITE, 0, 512, data=bytes(512))
                assert error
            assert 'volume disk is served read-only' in server.text()
            repositories.eventually(lambda: re.search(
                'checkpoint failed, and is tried again: .*'
                '(no room|room for 0 more|No space left)', server.text()))
            for file in filling:
                file.unlink()
            repositories.eventually(
                lambda: 'can be written to again' in server.text())
            with server.session() as session:
                assert not session.flags & READ_ONLY
                assert volume_tools.ask(session, nbd.READ, 0, MIB) == written
                volume_tools.write(session, MIB, written)
                volume_tools.ask(session, nbd.FLUSH)
                assert volume_tools.ask(session, nbd.READ, MIB, MIB) == written
            assert server.end(15) == 0, server.text()
        repositories.require_clean(repository)


@pytest.mark.parametrize('index', ['filter', 'dtb', 'lmdb', 'leveldb'])
def test_everything_is_on_the_full_disk(tmp_path, index):
    """Also the things that find duplicates, and however often it is killed."""
    written = repositories.noise(MIB, 2)
    with disks.mounted(tmp_path, 'ext4') as root:
        repository = volume_tools.create_repository(root / 'repository')
        volume_tools.create(repository, 'disk', 8 * MIB)
        with volume_tools.Server(repository, tmp_path) as server:
            with server.start().session() as session:
                volume_tools.write(session, 0, written)
                volume_tools.ask(session, nbd.FLUSH)
            server.kill()
        filling, = disks.fill_bytes(root)
        place = ('import os; os.environ["GLANCE_DEDUP_FILTER_DIR"] = '
                 f'{str(root / "filter")!r}')
        with volume_tools.Server(
                repository, tmp_path, before=place, GLANCE_DEDUP_INDEX=index,
                GLANCE_DEDUP_INDEX_DIR=str(root / 'index')) as server:
            for _ in range(3):
                server.start(wait=False)
                repositories.eventually(lambda: serves(server))
                with server.session() as session:
                    assert session.flags & READ_ONLY
                    assert session.read(0, MIB) == written
                server.kill()
            filling.unlink()
            with server.start().session() as session:
                assert not session.flags & READ_ONLY
                volume_tools.write(session, MIB, written)
                server.control.checkpoint()
                assert session.read(0, 2 * MIB) == 2 * written
            assert server.end(15) == 0, server.text()
        repositories.require_clean(repository)


def test_without_room(tmp_path):
    """ENOSPC reaches the client; deleting and collecting make room again."""
    filters = {'filter_dir': str(tmp_path / 'filter')}
    with disks.mounted(tmp_path, 'ext4') as root:
        repository = volume_tools.create_repository(root / 'repository')
        with repositories.open_repository(repository, **filters) as repo:
            repositories.put(repo, 'image', repositories.noise(12 * MIB, 1))
            collect(repo)
        volume_tools.create(repository, 'disk', 256 * MIB, 4 * MIB)
        with volume_tools.Server(repository, tmp_path) as server:
            server.start()
            with server.session() as session:
                volume_tools.write(session, 0, repositories.noise(2 * MIB, 2))
                server.control.checkpoint()
                volume_tools.write(session, MIB, repositories.noise(MIB, 3))
                disks.fill_bytes(root)
                at = 2 * MIB
                error = 0
                while not error and at < 200 * MIB:
                    error, _ = session.answer(
                        nbd.WRITE, at, 65536,
                        data=repositories.noise(65536, at))
                    at += 65536
                assert error == volume_tools.ENOSPC
                with pytest.raises(exceptions.NoSpaceError):
                    server.control.checkpoint()
                assert session.read(0, 2 * MIB) == (
                    repositories.noise(2 * MIB, 2)[:MIB]
                    + repositories.noise(MIB, 3))
                # The same message is not logged again and again.
                assert server.text().count('error:') < 5, server.text()
                with repositories.open_repository(
                        repository, **filters) as repo:
                    repo.delete('image')
                    collect(repo)
                volume_tools.write(session, 8 * MIB, b'x' * 4096,
                                   volume_tools.FUA)
                server.control.checkpoint()
                assert session.read(8 * MIB, 4096) == b'x' * 4096
            server.stop()


def collect(repo):
    with maintainer_role.Maintainer(repo) as maintainer:
        maintenance.account(maintainer)
        collector.run_once(maintainer, pacing.Pace())
