# SPDX-License-Identifier: Apache-2.0

"""Hostile users of the bucket can read no secret, and forge no image."""

import base64
import dataclasses
import hashlib
import json
import os
import re
import shutil

import pytest
import zstandard

from dedupd.tasks import collector
from dedupd.tasks import metadata_backups
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.base import signingkeys
from glance_dedup.metadata_backup import backup_manifest
from glance_dedup.metadata_backup import fetching
from glance_dedup.metadata_backup import keys
from glance_dedup.metadata_backup import restoring
from glance_dedup.objects import slice_cache
from glance_dedup.repository import prefix_owners
from tests.functional import test_metadata_backups
from tests.functional import test_restore
from tests.support import repositories

pytest_plugins = ['tests.support.object_fixtures']

store = test_restore.store
connection = test_restore.connection
filled = test_restore.filled
restore = test_restore.restore
run = test_restore.run


def content_of(connection, key):
    return connection.get(key, 0, connection.size(key))


def manifests(filled, connection):
    """Return the keys of all manifests, oldest first."""
    return [one.key for one in
            test_metadata_backups.kinds(filled, connection)[2]]


def restore_again(filled, path, **options):
    """Restore the first owner's backup, which others may have replaced."""
    shutil.rmtree(path, ignore_errors=True)
    return restore(filled, path, owner=filled.settings.owner, **options)


# -- readers ------------------------------------------------------------------

def unpacked(content):
    """Yield an object, and the content of each frame of zstd in it."""
    yield content
    start = content.find(zstandard.FRAME_HEADER[:4])
    while start >= 0:
        try:
            yield zstandard.ZstdDecompressor().stream_reader(
                content[start:]).read()
        except zstandard.ZstdError:
            pass        # only resembles one
        start = content.find(zstandard.FRAME_HEADER[:4], start + 1)


def forms(secret):
    """Return a secret in the forms in which it might be written."""
    for plain in (secret, secret.hex().encode()):
        yield plain
        for shift in range(3):
            # These are whole groups of three bytes, wherever it begins.
            cut = plain[shift:]
            cut = cut[:len(cut) // 3 * 3]
            yield base64.b64encode(cut)
            yield base64.urlsafe_b64encode(cut)
    yield secret.hex().upper().encode()


def test_no_object_has_a_key(filled, connection, tmp_path):
    """No object has the key, or one derived from it, even during a change."""
    known = set()
    for work in (signingkeys.begin_change, signingkeys.finish_change, None):
        for key in filled.repo.read_keys().accepted:
            known |= {key, signingkeys.manifest_key(key)}
        filled.tier()
        if work:
            work(str(filled.path))
    restore(filled, tmp_path / 'new')
    listed = [key for key, _ in connection.keys('')]
    assert {key.split('/')[1] for key in listed} > {'g', 'r', 'm'}
    secrets = [form for key in known for form in forms(key)]
    for key in listed:
        for part in unpacked(content_of(connection, key)):
            assert not [form for form in secrets if form in part], key


# -- writers ------------------------------------------------------------------

def flipped(content, others):
    changed = bytearray(content)
    changed[len(content) // 2 if len(content) < 9000 else 4100] ^= 1
    return bytes(changed)


CHANGES = {
    'flipped': flipped,
    # A frame of zstd ends with a checksum of four bytes, which adds no
    # protection.
    'cut': lambda content, others: content[:-9],
    'emptied': lambda content, others: b'',
    'longer': lambda content, others: content + bytes(4096),
    'replaced': lambda content, others: others[0],
}


@pytest.mark.parametrize('change', CHANGES)
def test_each_object_of_a_backup(filled, connection, tmp_path, change):
    """Restoring refuses each object that was changed, and names it."""
    owner = filled.settings.owner
    filled.tier()
    groups, recipes, (old, new) = test_metadata_backups.kinds(
        filled, connection)
    by_kind = {
        'm': [new.key, old.key],
        'g': [slice_cache.key_of(owner, key.number,
                                 bytes.fromhex(key.object_id))
              for key in groups],
        'r': [keys.of_recipe(owner, *key) for key in recipes]}
    for kind, names in by_kind.items():
        before = {name: content_of(connection, name) for name in names}
        for name in names:
            if name == old.key:
                continue        # a newer one counts
            prefix_owners.put_bytes(connection, name, CHANGES[change](
                before[name], [content for other, content in before.items()
                               if other != name]))
            if kind == 'm':
                with pytest.raises(exceptions.InvalidParameter, match=name):
                    restore_again(filled, tmp_path / 'new')
                assert not (tmp_path / 'new').exists() or not os.listdir(
                    tmp_path / 'new')
            else:
                result = restore_again(filled, tmp_path / 'new')
                assert name in str([*result.lost_groups.values(),
                                    *result.lost_images.values()])
                assert 'hot' in result.lost_images
                with repositories.open_repository(tmp_path / 'new') as repo:
                    for image in repo.images():
                        assert repositories.read_all(
                            repo, image) == filled.images[image]
            prefix_owners.put_bytes(connection, name, before[name])
    assert list(restore_again(filled, tmp_path / 'new').lost_images) == ['hot']


def lines_of(content):
    return zstandard.ZstdDecompressor().stream_reader(
        content).read().splitlines(keepends=True)


def forged(content, number, key, change=lambda line: line):
    """Return a manifest with other lines, whose digests are right.

    :param key: with which it is authenticated; None: as it was
    """
    head, *lines, foot = map(json.loads, lines_of(content))
    packed = [json.dumps(one).encode() + b'\n' for one in (
        {**head, 'number': number}, *map(change, lines))]
    whole = hashlib.sha256(b''.join(packed)).hexdigest()
    foot.update(whole=whole,
                content=hashlib.sha256(b''.join(packed[1:])).hexdigest())
    if key is not None:
        foot['mac'] = backup_manifest._mac(key, whole)
    return zstandard.ZstdCompressor().compress(
        b''.join(packed) + json.dumps(foot).encode())


@pytest.mark.parametrize('key', [None, bytes(32), b'k' * 32])
@pytest.mark.parametrize('place', ['newer', 'same'])
def test_a_forged_manifest(filled, connection, tmp_path, place, key):
    """A writer without the key cannot give an image another's content."""
    name, = manifests(filled, connection)
    content = content_of(connection, name)
    recipes = {fields[1]: fields for fields in map(
        json.loads, lines_of(content)) if isinstance(fields, list)}

    def swap(line):
        return ['r', 'one', *recipes['two'][2:]] if line[1] == 'one' else line

    number = {'newer': 2, 'same': 1}[place]
    where = {'newer': keys.of_manifest(filled.settings.owner, 2, 'a' * 32),
             'same': name}[place]
    prefix_owners.put_bytes(connection, where,
                            forged(content, number, key, swap))
    with pytest.raises(exceptions.InvalidParameter, match=(
            f'{where} was not made with')):
        restore(filled, tmp_path / 'new')
    assert not prefix_owners.is_retired(connection, filled.settings.owner)
    # The helper makes manifests that are accepted with the right key.
    prefix_owners.put_bytes(connection, where, forged(
        content, number, filled.repo.read_keys().current))
    assert restore(filled, tmp_path / 'new').metadata_backup == number


def test_a_manifest_of_another_repository(filled, connection, tmp_path):
    """Another repository's manifest is refused, even with the owner's id."""
    name, = manifests(filled, connection)
    content = content_of(connection, name)
    other = repositories.create(tmp_path / 'other')
    with repositories.open_repository(other) as repo:
        head = backup_manifest.Head(
            filled.settings.owner, 2, 1e10,
            repo.parameters.to_json().decode())
        with backup_manifest.send(connection, head, [],
                                  repo.read_keys()) as sent:
            key = sent.key
        with pytest.raises(exceptions.InvalidParameter, match=key):
            restore(filled, tmp_path / 'new')
        connection.delete(key)
        # This manifest's owner is another one.
        with backup_manifest.send(
                connection, dataclasses.replace(head, owner='f' * 32), [],
                repo.read_keys()) as sent:
            prefix_owners.put_bytes(connection, name, content_of(
                connection, sent.key))
    with pytest.raises(exceptions.InvalidParameter, match=name):
        restore(filled, tmp_path / 'new')
    prefix_owners.put_bytes(connection, name, content)
    # These are our own repository, and another one's copy of the key.
    with pytest.raises(exceptions.InvalidParameter, match='was not made with'):
        restoring.restore(
            tmp_path / 'new', filled.settings.location,
            filled.settings.credentials,
            signingkeys.read(str(other / 'key')))


def test_an_older_manifest_under_a_newer_name(filled, connection, tmp_path):
    filled.put('later', 1, 5)
    filled.tier()
    old, new = manifests(filled, connection)
    owner = filled.settings.owner
    replayed = keys.of_manifest(owner, 3, 'a' * 32)
    for where in (replayed, new):
        before = content_of(connection, new)
        prefix_owners.put_bytes(connection, where, content_of(connection, old))
        with pytest.raises(exceptions.InvalidParameter, match=where):
            restore(filled, tmp_path / 'new')
        if where == replayed:
            connection.delete(where)
        else:
            prefix_owners.put_bytes(connection, where, before)
    assert restore(filled, tmp_path / 'new').metadata_backup == 2


def test_what_remains_possible(filled, connection, tmp_path):
    """An old backup restores if newer ones are gone; its date is shown."""
    filled.put('later', 1, 5)
    filled.tier()
    connection.delete(manifests(filled, connection)[1])
    place = filled.settings
    asked = run(
        '--repository', tmp_path / 'new', 'repository', 'restore', '--from',
        place.location.url, '--endpoint', place.location.endpoint,
        '--credentials', place.credentials, '--key', filled.path / 'key',
        status=2)
    assert 'metadata backup 1 of owner' in asked.stderr
    assert 'Is it the last one that you know of?' in asked.stderr


def test_a_forged_manifest_only_keeps_objects(filled, connection):
    """The repository continues after it, and deletes no object meanwhile."""
    filled.tier()
    prefix_owners.put_bytes(connection, keys.of_manifest(
        filled.settings.owner, 9, 'a' * 32), b'forged')
    result = filled.tier()
    assert result.kept and result.metadata_backup == 10
    result = filled.tier()
    assert result.kept is None and result.metadata_backup == 11


@pytest.mark.parametrize('how', ['changed', 'gone'])
def test_an_object_that_is_wrong_before_the_backup(
        filled, connection, monkeypatch, how):
    """A wrong object gets into no manifest, and the others do."""
    real = metadata_backups.take
    wrong = []

    def take(*arguments, **options):
        for key in filled.objects():
            if '/g/00000003-' not in key or wrong:
                continue
            wrong.append(key)
            if how == 'changed':
                content = bytearray(content_of(connection, key))
                content[4096 + 5] ^= 1
                prefix_owners.put_bytes(connection, key, bytes(content))
            else:
                connection.delete(key)
        return real(*arguments, **options)

    monkeypatch.setattr(metadata_backups, 'take', take)
    filled.put('more', 0.5, 7)
    filled.tier()
    assert len(wrong) == 1
    warning, = filled.maintainer.warnings
    assert wrong[0] in warning and 'group 00000003' in warning
    assert [one.number for one in backed_up_groups(filled, connection)] == [
        1, 2]
    if how == 'changed':
        assert wrong[0] in filled.objects()     # nor is it deleted


def test_freed_blocks_do_not_count(filled, connection):
    """The object is unchanged, and the file has fewer blocks."""
    group = next(iter(backed_up_groups(filled, connection)))
    fetcher = fetching.Fetcher(connection, str(filled.path),
                               filled.repo.parameters)
    assert fetcher.digest(group) == group.digest
    filled.repo.delete('two')
    collector.run_once(filled.maintainer, pacing.Pace(), evacuate_share=0)
    for one in backed_up_groups(filled, connection):
        assert fetcher.digest(one) == one.digest


def backed_up_groups(filled, connection):
    with test_metadata_backups.newest(filled, connection) as found:
        return list(found.groups())


# -- a change of the key ------------------------------------------------------

def test_backups_follow_a_change_of_the_key(filled, connection, tmp_path):
    assert [filled.tier().metadata_backup for _ in range(2)] == [2, 0]
    shutil.copy(filled.path / 'key', tmp_path / 'old')
    signingkeys.begin_change(str(filled.path))
    shutil.copy(filled.path / 'key', tmp_path / 'both')
    # Metadata backups made with the old key are accepted, and replaced.
    assert [filled.tier().metadata_backup for _ in range(3)] == [3, 4, 0]
    signingkeys.finish_change(str(filled.path))
    assert filled.tier().metadata_backup == 0

    def restored(copy):
        shutil.rmtree(tmp_path / 'new', ignore_errors=True)
        return restoring.restore(
            tmp_path / 'new', filled.settings.location,
            filled.settings.credentials,
            signingkeys.read(str(tmp_path / copy)),
            owner=filled.settings.owner)

    with pytest.raises(exceptions.InvalidParameter, match='key was changed'):
        restored('old')
    assert restored('both').metadata_backup == 4
    assert (tmp_path / 'new' / 'key').read_bytes() == (
        tmp_path / 'both').read_bytes()


def test_a_change_that_ended_without_backups(filled, connection):
    """No object is deleted before two backups exist with the new key."""
    filled.tier()
    signingkeys.begin_change(str(filled.path))
    signingkeys.finish_change(str(filled.path))
    before = filled.objects()
    assert [filled.tier().metadata_backup for _ in range(3)] == [3, 4, 0]
    assert filled.objects() == before
    assert len(backed_up_groups(filled, connection)) == 2


def test_a_change_that_is_finished_too_early(filled, connection, tmp_path):
    """The command says until when a copy of the old key is needed."""
    place = filled.settings
    filled.maintainer.close()

    def refused(copy):
        return run('--repository', tmp_path / 'new', 'repository', 'restore',
                   '--from', place.location.url, '--endpoint',
                   place.location.endpoint, '--credentials',
                   place.credentials, '--key', copy, status=2).stderr

    def change(*arguments):
        return run('--repository', filled.path, 'repository', *arguments)

    old, new = tmp_path / 'old', filled.path / 'key'
    shutil.copy(new, old)
    change('rekey')
    said = change('rekey', '--finish').stderr
    advised, = re.findall(r"'glance-dedup repository ([a-z-]+)' has run twice",
                          said)
    assert 'would be restored' in refused(old)
    assert 'the key was changed' in refused(new)
    for _ in range(2):
        change(advised)
    assert 'the key was changed' in refused(old)
    assert 'would be restored' in refused(new)


# -- without a copy of the key ------------------------------------------------

def test_a_new_key(filled, connection, tmp_path):
    place = filled.settings
    words = ['--repository', tmp_path / 'new', 'repository', 'restore',
             '--from', place.location.url, '--endpoint',
             place.location.endpoint, '--credentials', place.credentials,
             '--yes']
    assert 'one of the arguments --key --new-key is required' in run(
        *words, status=2).stderr
    (tmp_path / 'no-key').write_text('x')
    for file, said, status in (('no-key', 'does not hold a key', 1),
                               ('nothing', 'there is no file', 3)):
        assert said in run(*words, '--key', tmp_path / file,
                           status=status).stderr
    assert not prefix_owners.is_retired(connection, place.owner)
    made = run(*words, '--new-key', status=1)       # an image is lost
    assert 'glance sign-locations' in made.stderr
    new = signingkeys.read(str(tmp_path / 'new' / 'key'))
    assert new.current not in filled.repo.read_keys().accepted
    # The new repository's own metadata backup is made with that key.
    with repositories.open_repository(tmp_path / 'new') as repo:
        assert repo.read_keys() == new
    found = restoring.restore(tmp_path / 'newest', place.location,
                              place.credentials, new)
    assert found.metadata_backup == 1 and not found.lost_images
