# SPDX-License-Identifier: Apache-2.0

"""Images in cold groups are read while other files fill the local disk.

The disk is a real one, without one free block, and no slice is on it.
"""

import contextlib
import subprocess
import sys
import threading

import pytest

from glance_dedup.client import slice_client
from glance_dedup.objects import slicefiles
from glance_dedup.repository import openvolumes
from tests.support import cold_repositories
from tests.support import daemons
from tests.support import disks
from tests.support import nbd
from tests.support import repositories
from tests.support import volume_tools

pytest_plugins = ['tests.support.object_fixtures']
pytestmark = pytest.mark.needs('disks')

MIB = 1 << 20
GROUP = cold_repositories.GROUP
SIZE = 4 * GROUP


class Full(cold_repositories.ColdRepository):
    """A repository whose disk is full; its filters are elsewhere."""

    def fill(self, place, root):
        self.filter_dir = place / 'filter'
        self.filling = disks.fill_bytes(root)

    def open(self, **options):
        if hasattr(self, 'filter_dir'):
            options.setdefault('filter_dir', str(self.filter_dir))
        return super().open(**options)

    def in_memory(self):
        """Return the files of the slices that are in memory."""
        return list(self.filter_dir.glob('*.slices/*/????????'))

    def free(self):
        for file in self.filling:
            file.unlink()


@pytest.fixture
def cold(server, proxy, faults, tmp_path):
    with disks.mounted(tmp_path, 'ext4') as root:
        made = Full(root / 'r', server, proxy.url)
        made.put('one', repositories.noise(SIZE, 1))
        with made.open() as repo, repo.open_image('one') as image:
            openvolumes.create(repo, 'disk', image=image, part_size=MIB)
        assert made.cool() == 4
        faults.seen.clear()
        made.fill(tmp_path, root)
        yield made


@pytest.fixture
def daemon(cold, monkeypatch):
    # On a busy machine the daemon may need longer than programs wait for it.
    monkeypatch.setattr(slice_client, 'ANSWER_SECONDS', daemons.LIMIT)
    with daemons.Daemon(cold.path, filter_dir=cold.filter_dir) as daemon:
        yield daemon.start()
        assert 'Traceback' not in daemon.text()


def require_bounded(cold):
    found = cold.in_memory()
    assert 0 < sum(f.stat().st_size for f in found) <= slicefiles.MAX_MEMORY


def test_a_process_alone(cold, monkeypatch):
    monkeypatch.setattr(slicefiles, 'MAX_MEMORY', 8 * MIB)
    with cold.open() as repo:
        assert repositories.read_all(repo, 'one') == cold.images['one']
        require_bounded(cold)
        # When there is room again, slices are on the disk, and not in memory.
        cold.free()
        facts = cold.groups[1]
        repo.slices.forget(facts['object'], 0, 1)
        repo.slices.fetch(1, facts['object'], facts['end'], 0, 1)
        assert cold.slices() and not cold.in_memory()


def test_processes_share_the_memory(cold, monkeypatch):
    """Each process counts the slices that the others have put there."""
    monkeypatch.setattr(slicefiles, 'MAX_MEMORY', 8 * MIB)
    with contextlib.ExitStack() as stack:
        repos = [stack.enter_context(cold.open()) for _ in range(3)]
        for number in range(1, 5):
            facts = cold.groups[number]
            for repo in repos:
                for first in range(4):
                    repo.slices.fetch(number, facts['object'], facts['end'],
                                      first, 1)
                require_bounded(cold)


def test_several_readers_at_once(cold):
    """Each reader reads another part; together they exceed the limit."""
    found = {}

    def read(number):
        with cold.open() as repo, repo.open_image('one') as image:
            found[number] = image.read(GROUP, number * GROUP)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert b''.join(found[n] for n in range(4)) == cold.images['one']
    require_bounded(cold)


def test_the_removed_cache_cannot_be_made_again(cold):
    (cold.path / 'slices').rmdir()
    with cold.open() as repo:
        # The directory's block is free again, so there is room for the
        # directory, and for no slice.
        assert repositories.read_all(repo, 'one') == cold.images['one']


def test_by_way_of_the_daemon(cold, daemon, faults, tmp_path):
    """One GET for each slice serves the daemon's own clients, and others."""
    assert daemon.request('GET', '/v1/images/one').body == cold.images['one']
    require_bounded(cold)
    seen = len(cold_repositories.gets(faults))
    assert seen == SIZE // MIB + 4
    with cold.open(ask_slices=slice_client.Asker(daemon.socket)) as repo:
        assert repositories.read_all(repo, 'one') == cold.images['one']
        figures = repo.slices.figures
    assert figures.gets == 0
    done = subprocess.run(
        [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
         cold.path, '--socket', daemon.socket, '--filter-dir',
         cold.filter_dir, 'image', 'get', 'one', tmp_path / 'got'],
        cwd=daemons.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / 'got').read_bytes() == cold.images['one']


def test_a_daemon_with_another_place_for_filters(cold, daemon, tmp_path):
    """A process that cannot see the daemon's slices fetches by itself."""
    asker = slice_client.Asker(daemon.socket)
    with cold.open(ask_slices=asker,
                   filter_dir=str(tmp_path / 'other')) as repo:
        assert repositories.read_all(repo, 'one') == cold.images['one']


def test_a_daemon_that_starts_again_empties_the_memory(cold, daemon):
    daemon.request('GET', '/v1/images/one')
    assert cold.in_memory()
    daemon.stop()
    cold.free()
    daemon.start()
    repositories.eventually(lambda: not cold.in_memory())


@pytest.mark.needs('nbdkit')
def test_a_volume_that_is_served(cold, daemon, tmp_path):
    cold.free()     # the server needs room to start
    with volume_tools.Server(cold.path, tmp_path,
                             GLANCE_DEDUP_SOCKET=daemon.socket) as server:
        server.start()
        cold.forget()
        disks.fill_bytes(cold.path.parent)
        with server.session() as session:
            assert volume_tools.ask(session, nbd.READ, 0, SIZE) == (
                cold.images['one'])
        require_bounded(cold)
