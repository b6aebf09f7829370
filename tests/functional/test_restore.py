# SPDX-License-Identifier: Apache-2.0

"""Restoring a repository whose directory is lost, from a real object store."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import tierer
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.metadata_backup import keys
from glance_dedup.metadata_backup import restoring
from glance_dedup.repository import cold_settings
from glance_dedup.repository import features
from glance_dedup.repository import layout
from glance_dedup.repository import prefix_owners
from tests.functional import test_metadata_backups
from tests.functional import test_tierer
from tests.support import documents
from tests.support import maintenance
from tests.support import objects
from tests.support import repositories
from tests.support import sweeps

pytestmark = pytest.mark.slow

pytest_plugins = ['tests.support.object_fixtures']

store = test_tierer.store
connection = test_metadata_backups.connection
ALL = test_tierer.ALL
SIZE = test_tierer.SIZE


class Restored(test_tierer.Store):
    """A repository that was restored, with its maintainer."""

    def __init__(self, path, images):
        self.path = path
        self.images = dict(images)
        self.repo = repositories.open_repository(path)
        self.settings = cold_settings.read(path)
        self.maintainer = test_tierer.maintainer_role.Maintainer(self.repo)

    def require_healthy(self):
        self.account()
        repositories.require_clean(self.path)
        assert self.repo.images() == sorted(self.images)
        self.require_all()


@pytest.fixture
def filled(store):
    """A store with three images in cold groups, and one in a hot group."""
    store.put('one', 1.25, 1)
    store.put('two', 0.75, 2)
    store.put('both', 1, 1)
    store.put('hot', 0.5, 3)
    assert store.tier().metadata_backup == 1
    assert store.cold() == [1, 2]
    return store


def whole(filled):
    return {name: data for name, data in filled.images.items()
            if name != 'hot'}


def restore(filled, path, **options):
    place = filled.settings
    return restoring.restore(path, place.location, place.credentials,
                             filled.repo.read_keys(), **options)


def keys_of(connection, owner):
    return sorted(key for key, _ in connection.keys(f'{owner}/'))


def change(connection, key, at):
    """Flip a bit of an object."""
    content = bytearray(connection.get(key, 0, connection.size(key)))
    content[at] ^= 1
    prefix_owners.put_bytes(connection, key, bytes(content))


# -- without faults -----------------------------------------------------------

def test_what_was_cold_comes_back(filled, connection, tmp_path):
    seen = []
    result = restore(filled, tmp_path / 'new', progress=lambda *step: (
        seen.append(step)))
    assert (result.groups, result.images, result.metadata_backup) == (2, 3, 1)
    assert (result.lost_groups, result.lost_volumes) == ({}, [])
    assert list(result.lost_images) == ['hot']
    assert 'only on the disk' in result.lost_images['hot']
    assert result.restored_from == filled.settings.owner != result.owner
    assert (2, 2, 'fetching groups') in seen
    assert 0 < result.fetched_bytes < SIZE // 8
    for name in ('repository.json', 'key'):
        assert (tmp_path / 'new' / name).read_bytes() == (
            filled.path / name).read_bytes()
    for number in (1, 2):
        assert (repositories.group_path(tmp_path / 'new', number)
                .read_bytes()[4096:] == repositories.group_path(
                    filled.path, number).read_bytes()[4096:])
    with contextlib.closing(Restored(
            tmp_path / 'new', whole(filled))) as made:
        made.require_healthy()


def test_the_new_directory_goes_on(filled, connection, tmp_path):
    """The new directory tiers, collects and sweeps; old objects stay."""
    before = keys_of(connection, filled.settings.owner)
    restore(filled, tmp_path / 'new')
    with contextlib.closing(Restored(
            tmp_path / 'new', whole(filled))) as made:
        made.put('new', 2, 9)
        assert made.tier().metadata_backup == 2
        assert len(made.objects()) == 2
        made.repo.delete('two')
        del made.images['two']
        collector.run_once(made.maintainer, pacing.Pace(), evacuate_share=0)
        for _ in range(4):
            made.tier(tierer.Policy(everything=True, live_share=90))
        # A group of the old owner has a new object, which is the new owner's.
        assert len(made.objects()) >= 3
        made.require_healthy()
        assert keys_of(connection, filled.settings.owner) == before
        result = restore(made, tmp_path / 'newest')
        assert result.restored_from == made.settings.owner
        assert not result.lost_images
        with contextlib.closing(Restored(
                tmp_path / 'newest', made.images)) as newest:
            newest.require_healthy()
            assert set(newest.settings.owners[1:]) == {
                made.settings.owner, filled.settings.owner}
    assert keys_of(connection, filled.settings.owner) == before


def test_what_was_freed_is_freed_again(filled, tmp_path):
    filled.repo.delete('two')
    del filled.images['two']
    collector.run_once(filled.maintainer, pacing.Pace(), evacuate_share=0)
    filled.tier(tierer.Policy(everything=True, live_share=0))
    restore(filled, tmp_path / 'new')
    with contextlib.closing(Restored(
            tmp_path / 'new', whole(filled))) as made:
        made.account()
        result = collector.run_once(made.maintainer, pacing.Pace(),
                                    evacuate_share=0)
        assert result.freed_blocks > 0
        made.require_healthy()


def test_volumes_and_backups(server, proxy, tmp_path, faults):
    location = objects.object_location.parse(
        f's3://{server.container}/{secrets.token_hex(8)}', proxy.url)
    with contextlib.closing(test_tierer.Store(
            tmp_path / 'r', location,
            server.credentials(tmp_path / 'credentials'))) as made:
        name = 'b_disk_20260101T000000Z'
        made.put(name, 1, 1)
        # This image is like those of a volume's owner.
        transaction = made.repo.handle().begin('v_' + 'a' * 32 + '_0_1', '')
        transaction.write(repositories.noise(SIZE, 2))
        transaction.commit()
        made.tier()
        result = restore(made, tmp_path / 'new')
        assert result.lost_volumes == ['a' * 32] and not result.lost_images
        with contextlib.closing(Restored(
                tmp_path / 'new', {name: made.images[name]})) as restored:
            restored.require_healthy()


def test_copies(store, tmp_path):
    """Blocks that stay copies come back with their marks (I14)."""
    store.put('copy', 1, 1, dedup=False)
    store.put('ordinary', 1, 1)
    assert store.tier().metadata_backup == 1
    restore(store, tmp_path / 'new')
    with contextlib.closing(Restored(
            tmp_path / 'new', store.images)) as made:
        assert features.NODEDUP in made.repo.features
        made.require_healthy()
        made.put('later', 1, 1)
        merger.run_once(made.maintainer, pacing.Pace())
        blocks = {name: {*maintenance.blocks_of(made.repo, name)}
                  for name in made.images}
        assert blocks['later'] == blocks['ordinary']
        assert not blocks['later'] & blocks['copy']
        made.require_healthy()


# -- damaged and missing objects ----------------------------------------------

def test_a_damaged_manifest(filled, connection, tmp_path):
    """The backup before is restored only if the operator requests it."""
    filled.put('later', 1, 5)
    assert filled.tier().metadata_backup == 2
    newest = test_metadata_backups.kinds(filled, connection)[2][1]
    change(connection, newest.key, connection.size(newest.key) // 2)
    with pytest.raises(exceptions.InvalidParameter) as refused:
        restore(filled, tmp_path / 'new')
    assert newest.key in str(refused.value)
    assert 'give --metadata-backup 1 if' in str(refused.value)
    assert not prefix_owners.is_retired(connection, filled.settings.owner)
    with pytest.raises(exceptions.InvalidParameter, match='number 1'):
        restore(filled, tmp_path / 'new', number=2)
    result = restore(filled, tmp_path / 'new', number=1)
    assert result.metadata_backup == 1 and 'later' not in result.lost_images
    images = whole(filled)
    del images['later']
    with contextlib.closing(Restored(tmp_path / 'new', images)) as made:
        made.require_healthy()


def test_no_manifest_is_whole(filled, connection, tmp_path):
    key, = test_metadata_backups.kinds(filled, connection)[2]
    change(connection, key.key, 3)
    with pytest.raises(exceptions.InvalidParameter,
                       match='no metadata backup'):
        restore(filled, tmp_path / 'new')
    assert not os.listdir(tmp_path / 'new')
    assert not prefix_owners.is_retired(connection, filled.settings.owner)


def test_a_group_whose_object_is_gone(filled, connection, tmp_path):
    gone = [key for key in filled.objects() if '/g/00000002-' in key]
    connection.delete(*gone)
    result = restore(filled, tmp_path / 'new')
    assert list(result.lost_groups) == [2] and result.groups == 1
    assert 'no such object' in result.lost_groups[2]
    assert set(result.lost_images) == {'one', 'two', 'hot'}
    assert gone[0] in result.lost_images['one']
    with contextlib.closing(Restored(
            tmp_path / 'new', {'both': filled.images['both']})) as made:
        made.require_healthy()


# The header, a record, an entry of the image `two`, and unused bytes.
@pytest.mark.parametrize('at', [
    9, 100, 600, 2000, 4096 + 512 * 27 + 56 + 5])
def test_a_group_whose_object_is_damaged(filled, connection, tmp_path, at):
    key, = (key for key in filled.objects() if '/g/00000002-' in key)
    change(connection, key, at)
    result = restore(filled, tmp_path / 'new')
    assert set(result.lost_groups) == {2} and key in result.lost_groups[2]
    assert set(result.lost_images) == {'one', 'two', 'hot'}


def test_two_objects_that_changed_places(filled, connection, tmp_path):
    a, b = sorted(filled.objects())
    contents = [connection.get(key, 0, connection.size(key))
                for key in (a, b)]
    prefix_owners.put_bytes(connection, b, contents[0])
    prefix_owners.put_bytes(connection, a, contents[1])
    result = restore(filled, tmp_path / 'new')
    assert set(result.lost_groups) == {1, 2} and not result.images


@pytest.mark.parametrize('how', ['gone', 'damaged', 'short', 'other'])
def test_a_recipe_that_is_wrong(filled, connection, tmp_path, how):
    _, recipes, _ = test_metadata_backups.kinds(filled, connection)
    named = {key.image_id: keys.of_recipe(
        filled.settings.owner, *key) for key in recipes}
    key = named['two']
    if how == 'gone':
        connection.delete(key)
    elif how == 'damaged':
        change(connection, key, 5000)
    elif how == 'short':
        prefix_owners.put_bytes(connection, key, connection.get(key, 0, 4096))
    else:
        prefix_owners.put_bytes(connection, key, connection.get(
            named['both'], 0, connection.size(named['both'])))
    result = restore(filled, tmp_path / 'new')
    assert set(result.lost_images) == {'two', 'hot'}
    images = whole(filled)
    del images['two']
    with contextlib.closing(Restored(tmp_path / 'new', images)) as made:
        made.require_healthy()


# -- a store that fails -------------------------------------------------------

@pytest.mark.parametrize('fault', [
    503, 'truncate', 'flip', *(pytest.param(fault, marks=pytest.mark.long)
                               for fault in (404, 'shorten'))])
def test_a_store_that_fails_now_and_then(filled, faults, tmp_path, fault):
    """A single failing request loses nothing."""
    for at in sweeps.part(range(0, 24, 2), 3):
        path = tmp_path / f'new-{at}'
        faults.plan(*[None] * at, fault)
        try:
            result = restore(filled, path)
        except exceptions.RepositoryError:
            faults.reset()
            assert not (path / 'repository.json').exists()
            result = restore(filled, path)
        faults.reset()
        # A directory restored before has no backup with the hot image.
        assert set(result.lost_images) <= {'hot'} and result.images == 3, at
        assert not result.lost_groups


def test_a_store_that_is_away(filled, faults, tmp_path):
    """Nothing counts as lost; the next call uses the files that are there."""
    def fail(done, total, what):
        if what == 'fetching recipes':
            faults.always = 503

    path = tmp_path / 'new'
    with pytest.raises(exceptions.UnavailableError, match='503'):
        restore(filled, path, progress=fail)
    assert layout.is_being_restored(path)
    assert not (path / 'repository.json').exists()
    with pytest.raises(exceptions.ImageNotFound):
        repositories.open_repository(path)
    with pytest.raises(exceptions.InvalidParameter):
        repositories.create(path)
    faults.always = None
    before = sorted((path / 'groups').iterdir())
    inodes = [file.stat().st_ino for file in before]
    assert len(before) == 2
    result = restore(filled, path)
    assert [file.stat().st_ino for file in before] == inodes
    assert list(result.lost_images) == ['hot']
    with contextlib.closing(Restored(path, whole(filled))) as made:
        made.require_healthy()


# The script kills a restoring before the first request, before later ones, and
# before the last of those that one makes; then it completes the restoring.
# Each may make more requests than the one before, since that has left an
# owner.
KILLING = '''
import os, signal, sys, threading
from glance_dedup.base import signingkeys
from glance_dedup.objects import object_location, object_store, s3
from glance_dedup.metadata_backup import restoring

path, url, endpoint, credentials, key, *moments = sys.argv[1:]
lock = threading.Lock()
real = object_store.ObjectStore._request

def request(self, what, work):
    global left
    with lock:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return real(self, what, work)

object_store.ObjectStore._request = request
for left in [*map(int, moments), 1 << 30]:
    child = os.fork()
    if not child:
        restoring.restore(path, object_location.parse(url, endpoint),
                          credentials, signingkeys.read(key))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == (9 if left < 1 << 30 else 0), (left, status)
    assert left == 1 << 30 or not os.path.exists(path + '/repository.json')
'''


# Long: a directory is restored for each of the kills.
@pytest.mark.timeout(300)
def test_kill_9_anywhere(filled, faults, tmp_path):
    """The next restoring completes one that was killed before any request."""
    path = tmp_path / 'new'
    place = filled.settings
    faults.seen.clear()
    restore(filled, tmp_path / 'first')
    most = sum(method != 'POST' for method, _ in faults.seen)
    assert most > 30
    killing = subprocess.run(
        [sys.executable, '-c', KILLING, path, place.location.url,
         place.location.endpoint, place.credentials, filled.path / 'key',
         *map(str, sweeps.part(range(most), 12))],
        cwd=documents.TOP, timeout=280, capture_output=True, text=True)
    assert killing.returncode == 0, killing.stderr
    with contextlib.closing(Restored(path, whole(filled))) as made:
        made.require_healthy()
        assert [made.tier().kept for _ in range(2)][1] is None
    assert not [name for name in os.listdir(path)
                if name.endswith(('.new', '.restoring'))]


# -- owners -------------------------------------------------------------------

def test_the_old_directory_writes_nothing_more(filled, connection, tmp_path):
    filled.put('later', 1, 5)
    restore(filled, tmp_path / 'new')
    before = connection.keys('')
    for call in (filled.tier, lambda: tierer.run_once(
            filled.maintainer, pacing.Pace(), ALL, metadata_only=True)):
        with pytest.raises(exceptions.InvalidParameter, match='restored to'):
            call()
    assert connection.keys('') == before
    filled.require_all()       # still a repository


@pytest.mark.parametrize('moment', [
    'sending recipes', 'sending the metadata backup', 'deleting objects'])
def test_the_old_host_returns_in_the_middle(filled, connection, tmp_path,
                                            moment):
    """The old host continues its work after the directory was restored."""
    filled.tier()
    images = {'two': filled.images.pop('two')}
    filled.repo.delete('two')
    collector.run_once(filled.maintainer, pacing.Pace(), evacuate_share=0)
    if moment == 'deleting objects':
        filled.tier(tierer.Policy(everything=True, live_share=90))
        images.clear()
    else:
        filled.put('later', 0.25, 7)
    results = []

    def step(done, total, what):
        if what == moment and not results:
            results.append(restore(filled, tmp_path / 'new'))

    with contextlib.suppress(exceptions.InvalidParameter):
        filled.tier(tierer.Policy(everything=True, live_share=90),
                    pacing.Pace(step))
    result, = results
    assert not result.lost_groups
    for _ in range(3):
        with pytest.raises(exceptions.InvalidParameter):
            filled.tier(tierer.Policy(everything=True, live_share=90))
    # The newest metadata backup is from before the deletion, or from after it.
    images['one'], images['both'] = filled.images['one'], filled.images['both']
    assert result.metadata_backup == (2 if moment != 'deleting objects' else 4)
    with contextlib.closing(Restored(tmp_path / 'new', images)) as made:
        made.require_healthy()


def test_without_the_mark_the_old_host_would_delete(filled, connection,
                                                    tmp_path, monkeypatch):
    """Without the owner's mark, the old host would delete objects."""
    filled.tier()
    monkeypatch.setattr(prefix_owners, 'retire', lambda *arguments: None)
    monkeypatch.setattr(prefix_owners, '_require_alone',
                        lambda *arguments: None)
    restore(filled, tmp_path / 'new')
    filled.repo.delete('two')
    collector.run_once(filled.maintainer, pacing.Pace(), evacuate_share=0)
    for _ in range(3):
        filled.tier(tierer.Policy(everything=True, live_share=90))
    with contextlib.closing(Restored(
            tmp_path / 'new', whole(filled))) as made, pytest.raises(
            exceptions.UnavailableError):
        made.require_all()


def test_several_owners(filled, connection, tmp_path):
    """The operator has to name one of several owners; all are retired."""
    place = filled.settings
    other = secrets.token_hex(16)
    prefix_owners.put_bytes(connection, prefix_owners.owner_key(other), (
        connection.get(prefix_owners.owner_key(place.owner), 0,
                       connection.size(
            prefix_owners.owner_key(place.owner)))))
    with pytest.raises(exceptions.InvalidParameter, match='--owner'):
        restore(filled, tmp_path / 'new')
    with pytest.raises(exceptions.InvalidParameter, match='has no owner'):
        restore(filled, tmp_path / 'new', owner='f' * 32)
    prefix_owners.put_bytes(connection, prefix_owners.owner_key(other),
                            json.dumps(
        {}).encode())
    prefix_owners.retire(connection, other, secrets.token_hex(16))
    with pytest.raises(exceptions.InvalidParameter, match='--owner'):
        restore(filled, tmp_path / 'new')


def test_a_prefix_without_any(filled, tmp_path):
    with pytest.raises(exceptions.InvalidParameter, match='nothing was ever'):
        restoring.restore(
            tmp_path / 'new', objects.object_location.parse(
                's3://cold/nothing', filled.settings.location.endpoint),
            filled.settings.credentials, filled.repo.read_keys())


def test_directories_that_are_taken(filled, connection, tmp_path):
    with pytest.raises(exceptions.ImageExists):
        restore(filled, filled.path)
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other' / 'file').touch()
    with pytest.raises(exceptions.InvalidParameter, match='neither empty'):
        restore(filled, tmp_path / 'other')
    assert not prefix_owners.is_retired(connection, filled.settings.owner)
    restore(filled, tmp_path / 'new')
    (tmp_path / 'new' / 'repository.json').unlink()
    with pytest.raises(exceptions.InvalidParameter):
        restore(filled, tmp_path / 'new')
    assert len(os.listdir(tmp_path / 'new' / 'groups')) == 2


def test_two_restorings_of_one_directory(filled, tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def step(*arguments):
        begun.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=restore, args=(
        filled, tmp_path / 'new'), kwargs={'progress': step})
    thread.start()
    assert begun.wait(60)
    with pytest.raises(exceptions.BusyError):
        restore(filled, tmp_path / 'new')
    go_on.set()
    thread.join()
    assert (tmp_path / 'new' / 'repository.json').exists()


def test_two_restorings_at_the_same_time(filled, tmp_path):
    """One of both becomes the new owner, and the other one is refused."""
    found = []

    def step(*arguments):
        if not found:
            found.append(restore(filled, tmp_path / 'first'))

    with pytest.raises(exceptions.InvalidParameter, match='another'):
        restore(filled, tmp_path / 'second', progress=step)
    assert not (tmp_path / 'second' / 'repository.json').exists()
    with contextlib.closing(Restored(
            tmp_path / 'first', whole(filled))) as made:
        made.require_healthy()
        # The new owner's predecessor is known.
        again = restore(filled, tmp_path / 'third')
        assert again.restored_from == found[0].owner


def test_an_earlier_owner_is_restored(filled, connection, tmp_path):
    """The earlier owner's backup comes back; its successor is retired."""
    restore(filled, tmp_path / 'new')
    with contextlib.closing(Restored(
            tmp_path / 'new', whole(filled))) as made:
        made.put('later', 1, 9)
        made.repo.delete('one')
        made.tier()
        result = restore(filled, tmp_path / 'newest',
                         owner=filled.settings.owner)
        assert result.restored_from == filled.settings.owner
        assert prefix_owners.is_retired(connection, made.settings.owner)
        before = keys_of(connection, made.settings.owner)
        made.put('latest', 1, 10)
        with pytest.raises(exceptions.InvalidParameter, match='place'):
            made.tier()
        assert keys_of(connection, made.settings.owner) == before
    with contextlib.closing(Restored(
            tmp_path / 'newest', whole(filled))) as made:
        made.require_healthy()


# -- a directory that moved ---------------------------------------------------

@pytest.fixture
def moved(filled, tmp_path):
    """The repository's directory, copied to another disk."""
    shutil.copytree(filled.path, tmp_path / 'moved')
    return tmp_path / 'moved'


def move(filled, path):
    place = filled.settings
    with repositories.open_repository(path) as repo:
        return prefix_owners.move(repo, place.location, place.credentials)


def test_a_directory_that_moved(filled, moved, connection):
    settings = move(filled, moved)
    assert settings.owners[1:] == (filled.settings.owner,)
    with pytest.raises(exceptions.InvalidParameter, match='its place'):
        filled.tier()
    with contextlib.closing(Restored(moved, filled.images)) as made:
        assert made.tier().metadata_backup == 1
        made.put('more', 1, 8)
        made.tier()
        made.require_healthy()
        result = restore(made, moved.parent / 'new')
        assert result.restored_from == settings.owner


def test_moving_goes_on_after_a_kill(filled, moved, monkeypatch):
    for name in ('retire', 'claim'):
        real = getattr(prefix_owners, name)
        with monkeypatch.context() as patched:
            patched.setattr(prefix_owners, name, lambda *arguments: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                move(filled, moved)

        def die(*arguments):
            real(*arguments)
            raise ZeroDivisionError
        with monkeypatch.context() as patched:
            patched.setattr(prefix_owners, name, die)
            with pytest.raises(ZeroDivisionError):
                move(filled, moved)
    with repositories.open_repository(moved) as repo, cold_settings.connect(
            filled.settings) as store:
        with pytest.raises(exceptions.InvalidParameter):
            prefix_owners.require_claim(repo, cold_settings.read(moved), store)
        settings = move(filled, moved)
        prefix_owners.require_claim(repo, settings, store)
        assert cold_settings.read(moved) == settings


def test_an_old_copy(filled, moved, connection):
    filled.tier()
    filled.repo.delete('two')
    collector.run_once(filled.maintainer, pacing.Pace(), evacuate_share=0)
    for _ in range(3):
        filled.tier(tierer.Policy(everything=True, live_share=90))
    with pytest.raises(exceptions.InvalidParameter, match='an old copy'):
        move(filled, moved)
    assert not prefix_owners.is_retired(connection, filled.settings.owner)


def test_moving_what_did_not_move(filled, moved, tmp_path):
    with pytest.raises(exceptions.InvalidParameter, match='needs no'):
        prefix_owners.move(filled.repo, filled.settings.location,
                           filled.settings.credentials)
    with repositories.open_repository(moved) as repo, pytest.raises(
            exceptions.InvalidParameter, match='give this URL'):
        prefix_owners.move(repo,
                           objects.object_location.parse('s3://cold/other'),
                           filled.settings.credentials)
    restore(filled, tmp_path / 'new')
    with pytest.raises(exceptions.InvalidParameter, match='use that one'):
        move(filled, moved)


# -- Swift, and the commands --------------------------------------------------

@pytest.mark.needs('memcached', 'swift')
def test_swift(tmp_path):
    with objects.Swift(tmp_path / 'swift') as server, contextlib.closing(
            test_tierer.Store(
                tmp_path / 'r', server.location('cold'),
                server.credentials(tmp_path / 'credentials'))) as made:
        made.put('one', 1, 1)
        made.put('two', 1.5, 2)
        made.tier()
        result = restore(made, tmp_path / 'new')
        assert set(result.lost_images) == {'two'}
        with contextlib.closing(Restored(
                tmp_path / 'new', {'one': made.images['one']})) as restored:
            restored.require_healthy()
        with pytest.raises(exceptions.InvalidParameter):
            made.tier()


def run(*arguments, status=0):
    found = subprocess.run(
        [sys.executable, '-m', 'glance_dedup.cli.entry', *map(str, arguments)],
        cwd=documents.TOP, timeout=120, capture_output=True, text=True,
        env={**os.environ, 'GLANCE_DEDUP_SOCKET': ''})
    assert found.returncode == status, found.stderr
    return found


# Long: it runs ten commands, each of which connects to the object store.
def test_the_commands(filled, tmp_path):
    place = filled.settings
    filled.maintainer.close()
    exported = run('--repository', filled.path, 'repository',
                   'backup-metadata', '-f', 'json')
    assert json.loads(exported.stdout) == {
        'metadata_backup': 2, 'sent_recipes': 0}
    arguments = [
        '--repository', tmp_path / 'new', 'repository', 'restore', '--from',
        place.location.url, '--endpoint', place.location.endpoint,
        '--credentials', place.credentials, '--key', filled.path / 'key',
        '-f', 'json']
    asked = run(*arguments, status=2)
    assert 'confirm it with --yes' in asked.stderr
    assert '2 groups' in asked.stderr
    assert not (tmp_path / 'new').exists()
    made = run(*arguments, '--yes', status=1)
    assert 'image hot is lost: it needs group 00000003' in made.stderr
    fields = json.loads(made.stdout)
    assert fields['groups'] == 2 and fields['images'] == 3
    run('--repository', tmp_path / 'new', 'repository', 'check')
    refused = run('--repository', filled.path, 'task', 'tier', status=2)
    assert 'was restored to another directory' in refused.stderr
    shutil.move(tmp_path / 'new', tmp_path / 'elsewhere')
    shutil.copytree(tmp_path / 'elsewhere', tmp_path / 'again')
    attached = run('--repository', tmp_path / 'again', 'object-store',
                   'attach',
                   place.location.url, '--endpoint', place.location.endpoint,
                   '--credentials', place.credentials, '--moved', '-f', 'json')
    assert len(json.loads(attached.stdout)['restored_from']) >= 2
    run('--repository', tmp_path / 'again', 'task', 'tier')
    # Now no image is lost.
    run('--repository', tmp_path / 'again', 'repository', 'backup-metadata')
    whole = run('--repository', tmp_path / 'third', *arguments[2:], '--yes')
    assert json.loads(whole.stdout)['images'] == 3


def restoring_words(filled, path, *more):
    """The command that restores what the first owner has sent."""
    place = filled.settings
    return ['--repository', path, 'repository', 'restore', '--from',
            place.location.url, '--endpoint', place.location.endpoint,
            '--credentials', place.credentials, '--key', filled.path / 'key',
            '--owner', place.owner, '--yes', *more]


def object_of(filled, number):
    """The key of the object of a group."""
    key, = (key for key in filled.objects() if f'/g/{number:08x}-' in key)
    return key


def lose_a_group(filled, connection):
    return object_of(filled, 2), ['one', 'two']


def lose_a_group_without_images(filled, connection):
    for image_id in 'one', 'two':
        filled.repo.delete(image_id)
        del filled.images[image_id]
    filled.tier()
    return object_of(filled, 2), []


def lose_a_recipe(filled, connection):
    named = {key.image_id: keys.of_recipe(filled.settings.owner, *key)
             for key in test_metadata_backups.kinds(filled, connection)[1]}
    return named['two'], ['two']


@pytest.mark.parametrize('lose', [
    lose_a_group, lose_a_group_without_images, lose_a_recipe])
def test_the_exit_status_says_whether_something_is_lost(
        filled, connection, tmp_path, lose):
    """And the command names the object and the images; 0: nothing is lost."""
    filled.repo.delete('hot')
    del filled.images['hot']
    filled.tier()
    key, images = lose(filled, connection)
    before = connection.get(key, 0, connection.size(key))
    connection.delete(key)
    made = run(*restoring_words(filled, tmp_path / 'some', '-f', 'json'),
               status=1)
    fields = json.loads(made.stdout)
    assert list(fields['lost_images']) == images
    for image_id in images:
        assert f'image {image_id} is lost: ' in made.stderr
        assert key in fields['lost_images'][image_id]
    assert key in made.stderr
    assert bool(fields['lost_groups']) == (lose is not lose_a_recipe)
    assert fields['images'] == len(filled.images) - len(images)
    # What was restored is whole.
    run('--repository', tmp_path / 'some', 'repository', 'check')
    prefix_owners.put_bytes(connection, key, before)
    made = run(*restoring_words(filled, tmp_path / 'all', '-f', 'json'))
    fields = json.loads(made.stdout)
    assert not (fields['lost_images'] or fields['lost_groups']
                or fields['lost_volumes'])
    assert fields['images'] == len(filled.images)
    assert ' is lost' not in made.stderr
    with contextlib.closing(Restored(
            tmp_path / 'all', filled.images)) as restored:
        restored.require_healthy()


def test_a_lost_volume_is_a_loss(filled, tmp_path):
    """Even if all that the object store has is there."""
    filled.repo.delete('hot')
    transaction = filled.repo.handle().begin('v_' + 'a' * 32 + '_0_1', '')
    transaction.write(repositories.noise(SIZE, 4))
    transaction.commit()
    filled.tier()
    made = run(*restoring_words(filled, tmp_path / 'new', '-f', 'json'),
               status=1)
    fields = json.loads(made.stdout)
    assert fields['lost_volumes'] == ['a' * 32]
    assert not fields['lost_images'] and fields['images'] == 3
