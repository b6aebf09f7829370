# SPDX-License-Identifier: Apache-2.0

"""The task ``tier``, with a real object store that may fail."""

import contextlib
import dataclasses
import os
import secrets

import pytest

from dedupd.tasks import collector
from dedupd.tasks import recompressor
from dedupd.tasks import tierer
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import cold_settings
from glance_dedup.repository import prefix_owners
from tests.support import cold_repositories
from tests.support import objects
from tests.support import repositories

pytest_plugins = ['tests.support.object_fixtures']

SLOTS = 256
SIZE = SLOTS * 4096
ALL = tierer.Policy(everything=True)


class Store:
    """A repository that is attached, with its maintainer."""

    def __init__(self, path, location, credentials, **parameters):
        self.path = repositories.create(path, group_slots=SLOTS,
                                        **parameters)
        self.images = {}
        self.repo = repositories.open_repository(self.path)
        self.settings = prefix_owners.attach(self.repo, location, credentials)
        self.maintainer = maintainer_role.Maintainer(self.repo)

    def put(self, name, groups, seed, **options):
        data = repositories.noise(int(groups * SIZE), seed)
        repositories.put(self.repo, name, data, **options)
        self.images[name] = data

    def account(self):
        from dedupd.tasks import accounting

        accounting.run_once(self.maintainer, pacing.Pace())

    def tier(self, policy=ALL, pace=None):
        self.account()
        return tierer.run_once(self.maintainer, pace or pacing.Pace(), policy)

    def forget(self):
        cold_repositories.forget(self.path)

    def require_all(self):
        """Each image reads as it was stored, without a cache."""
        self.forget()
        for name, data in self.images.items():
            with self.repo.open_image(name) as image:
                assert image.read() == data, name

    def objects(self):
        with cold_settings.connect(self.settings) as store:
            return dict(store.keys(f'{self.settings.owner}/g/'))

    def facts(self):
        engine = self.maintainer.engine
        return {number: engine.group_facts(number)
                for number in engine.groups()}

    def cold(self):
        return sorted(number for number, facts in self.facts().items()
                      if facts['is_cold'])

    def close(self):
        self.maintainer.close()
        self.repo.close()


@pytest.fixture
def store(server, proxy, faults, tmp_path):
    location = objects.object_location.parse(
        f's3://{server.container}/{secrets.token_hex(8)}', proxy.url)
    with contextlib.closing(Store(
            tmp_path / 'r', location,
            server.credentials(tmp_path / 'credentials'))) as made:
        yield made


def test_full_groups_move(store):
    store.put('one', 3.5, 1)
    result = store.tier()
    assert store.cold() == [1, 2, 3]
    assert (result.groups, result.renewed, result.failed) == (3, 0, {})
    assert result.disk_bytes > 2.5 * SIZE
    assert len(store.objects()) == 3
    assert result.sent_bytes == sum(store.objects().values()) > 3 * SIZE
    assert result.puts >= 3
    store.require_all()
    assert store.tier().groups == 0
    assert not os.listdir(store.path / 'spool')


def test_a_plan_changes_nothing(store):
    store.put('one', 2.5, 1)
    store.account()
    plan = tierer.plan(store.maintainer, ALL)
    assert [(group.number, group.action) for group in plan.groups] == [
        (1, 'move'), (2, 'move'), (3, 'skip')]
    assert plan.bytes > 2 * SIZE
    assert not store.cold() and not store.objects()


def test_by_age(store):
    store.put('one', 2, 1)
    os.utime(store.path / 'groups' / '00000001', (1, 1))
    assert store.tier(tierer.Policy(age=3600.0)).groups == 1
    assert store.cold() == [1]


def test_a_clock_that_is_wrong(store):
    """A group of the future counts as new."""
    store.put('one', 1, 1)
    os.utime(store.path / 'groups' / '00000001', (1 << 33, 1 << 33))
    assert store.tier(tierer.Policy(age=1.0)).groups == 0


def test_by_free_space(store, monkeypatch):
    store.put('one', 3, 1)
    for number in (1, 2, 3):
        os.utime(store.path / 'groups' / f'{number:08x}',
                 (5 - number, 5 - number))
    monkeypatch.setattr(store.repo, 'room', lambda: (10 * SIZE, 0))
    assert store.tier(tierer.Policy(free_bytes=10 * SIZE)).groups == 0
    store.tier(tierer.Policy(free_bytes=11 * SIZE + SIZE // 2))
    assert store.cold() == [2, 3]


def test_what_is_kept(store):
    store.put('one', 1, 1)
    store.put('two', 1, 2)
    result = store.tier(dataclasses.replace(
        ALL, keep=lambda facts: facts['image_id'] == 'one'))
    assert result.groups == 1 and store.cold() == [2]


def test_recompression_comes_first(store):
    store.put('one', 1, 1)
    mark = recompressor.mark_of(store.maintainer, 'zstd', 1, True)
    policy = dataclasses.replace(ALL, mark=mark)
    assert store.tier(policy).groups == 0
    recompressor.run_once(store.maintainer, pacing.Pace(), 'zstd', 1,
                          similar=True)
    assert store.tier(policy).groups == 1
    # Cold groups are not recompressed any more.
    result = recompressor.run_once(store.maintainer, pacing.Pace(), 'lz4')
    assert result == recompressor.Result()
    store.require_all()


def test_a_short_disk_does_not_wait_for_recompression(store, monkeypatch):
    store.put('one', 1, 1)
    mark = recompressor.mark_of(store.maintainer, 'zstd', 1, True)
    policy = tierer.Policy(free_bytes=1, mark=mark)
    monkeypatch.setattr(store.repo, 'room', lambda: (4 * SIZE, SIZE))
    assert store.tier(policy).groups == 0
    # Less than one group is free beyond the reserve.
    monkeypatch.setattr(store.repo, 'room', lambda: (2 * SIZE - 1, SIZE))
    assert store.tier(policy).groups == 1
    store.require_all()


def test_a_worn_group_gets_a_smaller_object(store):
    store.put('one', 0.25, 1)
    store.put('two', 0.75, 2)
    store.tier()
    before = store.objects()
    store.repo.delete('two')
    del store.images['two']
    result = collector.run_once(store.maintainer, pacing.Pace(),
                                evacuate_share=0)
    assert result.freed_blocks == 192 and not result.punched
    assert store.objects() == before
    assert store.tier().renewed == 1
    new = {key: size for key, size in store.objects().items()
           if key not in before}
    assert len(new) == 1 and sum(new.values()) < SIZE // 2
    store.require_all()
    assert store.tier().renewed == 0


def test_a_nearly_empty_group_is_evacuated(store):
    store.put('one', 0.05, 1)
    store.put('two', 0.95, 2)
    store.tier()
    store.repo.delete('two')
    del store.images['two']
    result = collector.run_once(store.maintainer, pacing.Pace())
    assert result.evacuated == 1 and 1 not in store.facts()
    store.require_all()


def test_an_unused_cold_group_goes(store):
    store.put('one', 1, 1)
    store.put('two', 1, 2)
    store.tier()
    store.repo.delete('one')
    del store.images['one']
    assert collector.run_once(store.maintainer, pacing.Pace()).unlinked == 1
    assert store.cold() == [2]
    store.require_all()


@pytest.mark.parametrize('fault', [503, 404, 'truncate', 'flip', 'reset'])
def test_a_store_that_fails(store, faults, fault):
    store.put('one', 1, 1)
    faults.always = fault
    with contextlib.suppress(exceptions.RepositoryError):
        store.tier()
    faults.always = None
    assert not store.cold() and not os.listdir(store.path / 'spool')
    assert store.tier().groups == 1
    store.require_all()


def test_a_changed_object_is_noticed(store, faults):
    """The server claims to have the right bytes, and sends others."""
    store.put('one', 1, 1)
    with cold_settings.connect(store.settings):
        faults.plan(*['flip'] * 8, methods=('GET',))
        # The first GET is for the owner's object, and is read again.
        with pytest.raises(exceptions.RepositoryError):
            store.tier()
    assert not store.cold()


def test_a_repository_that_is_not_attached(store):
    (store.path / 'cold.json').unlink()
    with pytest.raises(exceptions.UnavailableError,
                       match='object-store attach'):
        store.tier()


def test_a_directory_that_was_replaced(store):
    store.put('one', 1, 1)
    with cold_settings.connect(store.settings) as connection:
        prefix_owners.put_bytes(connection,
                                prefix_owners.retired_key(
                                    store.settings.owner), b'')
        with pytest.raises(exceptions.InvalidParameter, match='its place'):
            store.tier()
    assert not store.cold() and not store.objects()


def test_a_bucket_that_was_emptied(store):
    with cold_settings.connect(store.settings) as connection:
        connection.delete(prefix_owners.owner_key(store.settings.owner))
    with pytest.raises(exceptions.UnavailableError, match='was emptied'):
        store.tier()


def test_stopping(store):
    store.put('one', 2, 1)
    pace = pacing.Pace(lambda done, total, what: (
        what.startswith('sending') and pace.stop()))
    with pytest.raises(pacing.Stopped):
        store.tier(pace=pace)
    assert not os.listdir(store.path / 'spool')
    assert store.tier().groups == 2
    store.require_all()
