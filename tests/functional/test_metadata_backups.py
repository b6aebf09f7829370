# SPDX-License-Identifier: Apache-2.0

"""Metadata backups on a real object store, and the deletion of objects."""

import contextlib
import hashlib
import os
import secrets

import pytest

from dedupd.tasks import collector
from dedupd.tasks import metadata_backups
from dedupd.tasks import sweeper
from dedupd.tasks import tierer
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.metadata_backup import backup_manifest
from glance_dedup.metadata_backup import keys
from glance_dedup.objects import slice_cache
from glance_dedup.repository import cold_settings
from glance_dedup.repository import prefix_owners
from tests.functional import test_tierer
from tests.support import objects
from tests.support import repositories

pytestmark = pytest.mark.slow

pytest_plugins = ['tests.support.object_fixtures']

store = test_tierer.store
ALL = test_tierer.ALL


@pytest.fixture
def connection(store):
    with cold_settings.connect(store.settings) as connected:
        yield connected


def listed(store, connection):
    return connection.keys(f'{store.settings.owner}/')


def kinds(store, connection):
    """Return the keys of groups, of recipes, and of manifests."""
    found = [keys.parse(store.settings.owner, key)
             for key, _ in listed(store, connection)]
    return [sorted(key for key in found if isinstance(key, kind))
            for kind in (keys.Group, keys.Recipe, keys.Manifest)]


@contextlib.contextmanager
def newest(store, connection):
    found = backup_manifest.newest_whole(
        connection, store.settings.owner,
        [key for key, _ in listed(store, connection)],
        store.repo.read_keys(), pytest.fail)
    with found:
        yield found


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def wear(store):
    """Have most blocks of the first group freed; return its old object."""
    store.repo.delete('two')
    del store.images['two']
    before = store.facts()[1]['object'].hex()
    collector.run_once(store.maintainer, pacing.Pace(), evacuate_share=0)
    return before


def test_a_backup_names_everything(store, connection):
    store.put('one', 2.5, 1)
    store.put('two', 0.25, 2)
    result = store.tier()
    assert (result.metadata_backup, result.sent_recipes) == (1, 2)
    with newest(store, connection) as manifest:
        assert manifest.head.read_parameters() == store.repo.parameters
        assert manifest.has_current_key
        facts = store.facts()
        assert list(manifest.groups()) == [
            (number, facts[number]['object'].hex(), facts[number]['end'],
             store.settings.owner, digest(repositories.group_path(
                 store.path, number))) for number in store.cold()]
        recipes = list(manifest.recipes())
        assert [recipe.image_id for recipe in recipes] == ['one', 'two']
        for recipe in recipes:
            file = store.path / 'images' / recipe.image_id
            assert connection.get(
                recipe.key, 0, recipe.length) == file.read_bytes()
            assert recipe.digest == digest(file)


def test_one_is_taken_only_if_something_changed(store, connection):
    store.put('one', 1, 1)
    # There are two, so that the loss of one manifest loses no image.
    assert [store.tier().metadata_backup for _ in range(4)] == [1, 2, 0, 0]
    store.put('two', 0.1, 2)
    result = store.tier()
    assert (result.metadata_backup, result.sent_recipes) == (3, 1)
    assert [store.tier().metadata_backup for _ in range(2)] == [4, 0]
    store.repo.delete('two')
    assert [store.tier().metadata_backup for _ in range(3)] == [5, 6, 0]
    # Only the two newest are left.
    assert [key.number for key in kinds(store, connection)[2]] == [5, 6]


def test_without_cold_groups_there_is_nothing_to_restore(store, connection):
    store.put('one', 0.5, 1)
    assert store.tier().metadata_backup == 0
    assert not listed(store, connection)
    result = tierer.run_once(store.maintainer, pacing.Pace(), ALL,
                             metadata_only=True)
    assert result.metadata_backup == 1 and result.groups == 0


def test_a_replaced_object_goes_after_two_backups(store, connection):
    store.put('one', 0.25, 1)
    store.put('two', 0.75, 2)
    store.tier()
    store.tier()
    before = wear(store)
    first = store.tier()
    assert first.renewed == 1 and first.metadata_backup == 3
    assert keys.Group(1, before) in kinds(store, connection)[0]
    size = sum(size for _, size in listed(store, connection))
    plan = tierer.plan(store.maintainer, ALL)
    assert plan.unneeded_objects == 0
    second = store.tier()
    assert second.metadata_backup == 4 and second.kept is None
    groups, recipes, manifests = kinds(store, connection)
    assert [key.object_id for key in groups] == [
        store.facts()[1]['object'].hex()]
    assert [key.image_id for key in recipes] == ['one']
    assert [key.number for key in manifests] == [3, 4]
    # The object, the recipe of the deleted image, and metadata backup 2 go.
    assert second.deleted_objects == 3
    assert second.deleted_bytes > test_tierer.SIZE
    assert sum(size for _, size in listed(store, connection)) < size / 2
    store.require_all()


def test_what_killed_runs_left_goes(store, connection):
    store.put('one', 1, 1)
    store.tier()
    owner = store.settings.owner
    orphan = slice_cache.key_of(owner, 7, bytes(range(16)))
    recipe = keys.of_recipe(owner, 'gone', 'ab' * 16)
    strange = f'{owner}/g/strange'
    other = slice_cache.key_of('f' * 32, 7, bytes(range(16)))
    for key in (orphan, recipe, strange, other):
        prefix_owners.put_bytes(connection, key, b'x')
    store.tier()
    found = dict(connection.keys(''))
    assert orphan not in found and recipe not in found
    assert strange in found and other in found
    assert len(store.objects()) == 2        # with the strange one
    store.require_all()


def test_nothing_goes_before_there_are_two_backups(store, connection):
    store.put('one', 1, 1)
    orphan = slice_cache.key_of(store.settings.owner, 7, bytes(range(16)))
    prefix_owners.put_bytes(connection, orphan, b'x')
    result = store.tier()
    assert 'no two whole metadata backups' in result.kept
    assert orphan in dict(listed(store, connection))
    assert tierer.plan(store.maintainer, ALL).unneeded_objects == 0
    # A third party flips a bit of one of them.
    store.tier()
    prefix_owners.put_bytes(connection, orphan, b'x')
    key = kinds(store, connection)[2][0].key
    content = bytearray(connection.get(key, 0, connection.size(key)))
    content[len(content) // 2] ^= 1
    prefix_owners.put_bytes(connection, key, bytes(content))
    assert tierer.plan(store.maintainer, ALL).unneeded_objects == 0
    assert [store.tier().metadata_backup for _ in range(3)] == [3, 0, 0]
    assert orphan not in dict(listed(store, connection))


def test_an_object_that_the_spool_names_stays(store, connection):
    """A run before the exchange has sent it already."""
    store.put('one', 1, 1)
    store.tier()
    store.tier()
    store.put('two', 1, 2)
    store.account()
    with contextlib.closing(
            store.maintainer.engine.begin_cooling(2)) as rewriting:
        while not rewriting.step()[0]:
            pass
        object_id, _, name = rewriting.object()
        key = slice_cache.key_of(store.settings.owner, 2, object_id)
        with open(store.path / name, 'rb') as file:
            connection.put(key, file)
        rewriting.cut()
        plan = sweeper.plan(store.maintainer, pacing.Pace(), connection,
                            store.settings, listed(store, connection))
        assert plan.kept is None and key not in dict(plan.objects)
        rewriting.exchange()
    plan = sweeper.plan(store.maintainer, pacing.Pace(), connection,
                        store.settings, listed(store, connection))
    assert key not in dict(plan.objects)
    store.require_all()


def test_a_recipe_that_cannot_be_read_stays(store, connection):
    """The object store's copy of a damaged recipe may be the only one."""
    store.put('one', 1, 1)
    store.put('two', 1, 2)
    store.tier()
    store.tier()
    file = store.path / 'images' / 'two'
    content = file.read_bytes()
    repositories.ruin(file, 0)
    for _ in range(3):
        result = store.tier()
    assert 'two' in result.kept
    with newest(store, connection) as manifest:
        line = list(manifest.recipes())[1]
    assert connection.get(line.key, 0, line.length) == content


@pytest.mark.parametrize('how', ['ruin', 'unlink'])
def test_a_group_that_cannot_be_read_stays(store, connection, how):
    store.put('one', 1, 1)
    store.put('two', 1, 2)
    store.tier()
    store.tier()
    before = kinds(store, connection)[0]
    file = repositories.group_path(store.path, 2)
    if how == 'ruin':
        repositories.ruin(file, 0)
    else:
        os.unlink(file)
    for _ in range(3):
        store.tier()
    assert kinds(store, connection)[0] == before
    with newest(store, connection) as manifest:
        assert [group.number for group in manifest.groups()] == [1, 2]


def test_an_image_that_is_deleted_meanwhile(store, connection, monkeypatch):
    for name in 'abcdefgh':
        store.put(name, 0.25, ord(name))
    seen = []
    real = metadata_backups._Backup._open

    def opening(self, recipe):
        if not seen:
            seen.append(recipe)
            store.repo.delete('d')
            store.repo.delete('e')
            store.put('e', 0.25, 99)
        return real(self, recipe)

    monkeypatch.setattr(metadata_backups._Backup, '_open', opening)
    result = tierer.run_once(store.maintainer, pacing.Pace(), ALL)
    assert result.metadata_backup == 1
    with newest(store, connection) as manifest:
        lines = list(manifest.recipes())
    assert [line.image_id for line in lines] == list('abcefgh')
    file = store.path / 'images' / 'e'
    assert connection.get(lines[3].key, 0, lines[3].length) == (
        file.read_bytes())


def test_what_was_sent_is_not_sent_again(store, connection):
    for name in 'abcdefgh':
        store.put(name, 0.25, ord(name))

    def step(done, total, what):
        if what == 'sending the metadata backup':
            pace.stop()

    pace = pacing.Pace(step)
    with pytest.raises(pacing.Stopped):
        store.tier(pace=pace)
    assert [len(some) for some in kinds(store, connection)] == [2, 8, 0]
    before = connection.counts.puts
    result = store.tier()
    assert result.metadata_backup == 1 and result.puts == 1 and before == 0


def test_what_was_sent_for_the_next_backup_stays(store, connection):
    store.put('one', 1, 1)
    store.tier()
    store.tier()
    store.put('two', 0.25, 2)

    def step(done, total, what):
        if what == 'sending the metadata backup':
            pace.stop()

    pace = pacing.Pace(step)
    with pytest.raises(pacing.Stopped):
        store.tier(pace=pace)
    assert len(kinds(store, connection)[1]) == 2
    plan = sweeper.plan(store.maintainer, pacing.Pace(), connection,
                        store.settings, listed(store, connection))
    assert plan.kept is None and not plan.objects


# Long: groups are moved once for each of fourteen failing requests.
@pytest.mark.parametrize('fault', [503, 'truncate', 'reset'])
def test_a_store_that_fails(store, connection, faults, fault):
    """Whichever request fails for good, the next run completes the work."""
    if fault == 'reset':
        fault = 'forget'
    store.put('one', 0.25, 1)
    store.put('two', 0.75, 2)
    store.tier()
    wear(store)
    store.tier()
    for at in range(0, 40, 3):
        faults.plan(*[None] * at, *[fault] * 4)
        with contextlib.suppress(exceptions.UnavailableError):
            store.tier()
    faults.reset()
    for _ in range(3):
        store.tier()
    assert [len(some) for some in kinds(store, connection)] == [1, 1, 2]
    store.require_all()


def test_a_directory_that_was_replaced(store, connection):
    store.put('one', 1, 1)
    store.tier()
    store.tier()
    orphan = slice_cache.key_of(store.settings.owner, 7, bytes(range(16)))
    prefix_owners.put_bytes(connection, orphan, b'x')
    listing = listed(store, connection)
    prefix_owners.retire(connection, store.settings.owner,
                         secrets.token_hex(16))
    for call in (
            lambda: sweeper.run(store.maintainer, pacing.Pace(), connection,
                                store.settings, listing),
            lambda: metadata_backups.take(
                store.maintainer, pacing.Pace(), connection, store.settings,
                listing, True)):
        with pytest.raises(exceptions.InvalidParameter, match='its place'):
            call()
    assert listed(store, connection) == listing


def test_a_reader_of_a_group_that_was_replaced(store, connection):
    """An open image can be read on, though its object is gone."""
    store.put('one', 0.25, 1)
    store.put('two', 0.75, 2)
    store.tier()
    with repositories.open_repository(store.path) as repo, (
            repo.open_image('one')) as image:
        assert image.read(4096, 0) == store.images['one'][:4096]
        before = wear(store)
        for _ in range(3):
            store.tier()
        assert keys.Group(1, before) not in kinds(store, connection)[0]
        store.forget()
        assert image.read() == store.images['one']


@pytest.mark.needs('memcached', 'swift')
def test_swift(tmp_path):
    with objects.Swift(tmp_path / 'swift') as server, contextlib.closing(
            test_tierer.Store(
                tmp_path / 'r', server.location('cold'),
                server.credentials(tmp_path / 'credentials'))) as made:
        made.put('one', 0.25, 1)
        made.put('two', 0.75, 2)
        made.tier()
        before = wear(made)
        for _ in range(3):
            made.tier()
        with cold_settings.connect(made.settings) as connected:
            groups, recipes, manifests = kinds(made, connected)
        assert len(groups) == len(recipes) == 1 and len(manifests) == 2
        assert groups[0].object_id != before
        made.require_all()
