# SPDX-License-Identifier: Apache-2.0

"""A disk that takes ten times its size, because groups move in time.

No test requests the task ``tier``: the maintainer notices that the disk is
short of room. Waits are for room, not for seconds.
"""

import os
import secrets
import threading

from oslo_config import cfg
import pytest

from dedupd import opts
from dedupd.schedule import low_space
from dedupd.schedule import task_scheduler
from glance_dedup.base import exceptions
from glance_dedup.repository import cold_settings
from glance_dedup.repository import prefix_owners
from tests.support import repositories
from tests.support import schedulers

pytest_plugins = ['tests.support.object_fixtures']
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MIB = 1 << 20
DISK = 64 * MIB
SLOTS = 1024
IMAGE = 8 * MIB
LIMIT = 240


@pytest.fixture
def conf():
    found = cfg.ConfigOpts()
    found.register_opts(opts.dedupd_opts, group='dedupd')
    found([], default_config_files=[])
    for name, value in (('tier_interval', 86400), ('tier_free_mib', 24),
                        ('tier_age_hours', 0), ('tier_rate_mib', 0),
                        ('recompress_codec', 'zstd'),
                        ('collect_interval', 86400)):
        found.set_override(name, value, 'dedupd')
    return found


class Least:
    """The minimum of a disk's free bytes, while the context is entered."""

    def __init__(self, root):
        self._root = root
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.bytes = DISK

    def _watch(self):
        while not self._ended.wait(0.005):
            found = os.statvfs(self._root)
            self.bytes = min(self.bytes, found.f_bavail * found.f_frsize)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._ended.set()
        self._thread.join()


class Filling:
    """A repository on a small disk, and the images that it has to hold."""

    def __init__(self, repo):
        self.repo = repo
        self.seeds = {}

    def put(self, seed):
        name = f'image-{seed}'
        # A client repeats a refused upload; here no upload may be refused.
        repositories.eventually(
            lambda: self.repo.room()[0] >= self.repo.room()[1] + 16 * MIB,
            LIMIT, 'the disk stays short of room')
        repositories.put(self.repo, name, repositories.noise(IMAGE, seed))
        self.seeds[name] = seed

    def delete(self, name):
        self.repo.delete(name)
        del self.seeds[name]

    def require_all(self):
        for name, seed in self.seeds.items():
            assert repositories.read_all(self.repo, name) == (
                repositories.noise(IMAGE, seed)), name


# Long: many times the disk goes to an object store and is read three times.
@pytest.mark.parametrize('times', [
    3, pytest.param(10, marks=pytest.mark.long)])
def test_many_times_the_disk(server, tmp_path, conf, monkeypatch, times):
    monkeypatch.setattr(task_scheduler, 'LOOK_INTERVAL', 0.05)
    monkeypatch.setattr(low_space, 'RETRY', 0.2)
    with (repositories.small_disk(tmp_path / 'disk', DISK) as disk,
          Least(disk) as least):
        path = repositories.create(disk / 'r', group_slots=SLOTS)
        with repositories.open_repository(
                path, filter_dir=str(tmp_path / 'filter')) as repo:
            prefix_owners.attach(repo, server.location(secrets.token_hex(8)),
                                 server.credentials(tmp_path / 'credentials'))
            with schedulers.running(repo, conf) as scheduler:
                fill_and_empty(Filling(repo), scheduler, times)
        assert least.bytes > 0
        print(f'of {DISK} bytes, {least.bytes} were free at least')


def fill_and_empty(filling, scheduler, times):
    repo = filling.repo
    for seed in range(times * DISK // IMAGE):
        filling.put(seed)
    with cold_settings.connect(cold_settings.require(repo.path)) as store:
        there = sum(size for _, size in store.keys(''))
    assert there > (times - 1) * DISK
    filling.require_all()
    # The cache is full now, and shrinks.
    for seed in range(1000, 1006):
        filling.put(seed)
    filling.require_all()
    for name in sorted(filling.seeds)[::2]:
        filling.delete(name)
    done = scheduler.wait('collect', scheduler.request('collect'), LIMIT)
    assert done['last']['error'] is None
    assert done['last']['result']['freed_blocks'] > times * DISK // 4096 // 4
    filling.require_all()
    assert not scheduler.tasks()['tier']['last']['error']


def test_a_disk_that_is_full_of_uploads_has_room_to_move_a_group(
        server, tmp_path, conf):
    """If no group was moved in time, storing is refused, and moving works."""
    conf.set_override('tier_interval', 0, 'dedupd')
    with repositories.small_disk(tmp_path / 'disk', DISK) as disk:
        path = repositories.create(disk / 'r', group_slots=SLOTS)
        with repositories.open_repository(
                path, filter_dir=str(tmp_path / 'filter')) as repo:
            prefix_owners.attach(repo, server.location(secrets.token_hex(8)),
                                 server.credentials(tmp_path / 'credentials'))
            filling = Filling(repo)
            with schedulers.running(repo, conf) as scheduler:
                with pytest.raises(exceptions.NoSpaceError):
                    for seed in range(DISK // MIB):
                        repositories.put(repo, f'image-{seed}',
                                         repositories.noise(MIB, seed))
                        filling.seeds[f'image-{seed}'] = seed
                done = scheduler.wait(
                    'tier', scheduler.request('tier'), LIMIT)
                result = done['last']['result']
                assert result['groups'] > 3, done
                assert not result['skipped_for_space'], done
                filling.put(1000)
                for name, seed in filling.seeds.items():
                    found = repositories.read_all(repo, name)
                    assert found == repositories.noise(len(found), seed)
