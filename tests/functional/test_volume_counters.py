# SPDX-License-Identifier: Apache-2.0

"""A volume's counters when its server has stopped: none is lost."""

import pytest

from glance_dedup.repository import openvolumes
from tests.support import nbd
from tests.support import repositories
from tests.support import volume_tools

pytestmark = pytest.mark.needs('nbdkit')

MIB = 1 << 20


@pytest.fixture
def repository(tmp_path):
    return volume_tools.create_repository(tmp_path / 'repository')


@pytest.fixture
def server(repository, tmp_path):
    volume_tools.create(repository, 'disk', 4 * MIB)
    with volume_tools.Server(repository, tmp_path) as found:
        yield found


def counters(repository):
    with repositories.open_repository(repository) as repo:
        return openvolumes.look(repo, 'disk').counters


def journals(repository):
    return sorted(path.name for path in (
        repository / 'volumes' / 'disk').glob('journal-*'))


@pytest.mark.parametrize('written', [False, True])
def test_counters_outlive_the_server(repository, server, written):
    """Counters of the last checkpoint, after its journal's head, stay, too."""
    server.start()
    with server.session() as session:
        if written:
            volume_tools.write(session, 0, b'x' * 1000)
        session.read(0, 4096)
        volume_tools.ask(session, nbd.FLUSH)
    server.stop()
    found = counters(repository)
    assert (found['read'], found['flushes']) == (4096, 1)
    assert (found['written'], found['checkpoints']) == (
        (1000, 1) if written else (0, 0))
    assert (found['unique'] > 0) == written
    # The volume has its bytes, and needs one journal only.
    assert len(journals(repository)) == 1
    with server.start().session() as session:
        assert session.read(0, 1001) == (
            b'x' * 1000 + b'\0' if written else bytes(1001))


def test_an_idle_volume_gets_no_journal_when_it_ends(repository, server):
    """Only an owner's start begins a journal."""
    server.start()
    begun = journals(repository)
    with server.session():
        pass
    server.stop()
    assert journals(repository) == begun
