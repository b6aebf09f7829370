# SPDX-License-Identifier: Apache-2.0

"""Hashes of whole images: recording, retention and damage.

No token opens an image whose hash is not known. A hash of other bytes must
never count as that of the image.
"""

import hashlib
import io
import os

import pytest

from dedupd.tasks import merger
from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.base import pacing
from glance_dedup.base import thread_pool
from glance_dedup.driver import dedup_store
from glance_dedup.driver import upload
from glance_dedup.repository import image_repository
from tests.support import repositories

pytest_plugins = ['tests.support.maintainer_fixtures']

MIB = 1 << 20
DATA = repositories.noise(2 * MIB, 1)


def hash_of(data, name='sha512'):
    return hashes.Hash(name, hashlib.new(name, data).hexdigest())


def put(repo, image_id, data=DATA, found=None):
    with repo.begin(image_id) as transaction:
        transaction.write(data)
        if found is not None:
            transaction.set_hash(found.name, bytes.fromhex(found.value))
        return transaction.commit()


def recorded(repo, image_id):
    return hashes.recorded(repo.path, repo.stat(image_id))


# -- in the recipe ------------------------------------------------------------

def test_none_is_recorded_of_itself(repo):
    stat = put(repo, 'a')
    assert (stat.hash_name, stat.hash_value) == ('', '')
    assert recorded(repo, 'a') == {}
    with pytest.raises(hashes.Unproven, match='image verify --algorithm '
                                              'sha512 a$'):
        hashes.require_same(repo.path, stat, hash_of(DATA))
    with pytest.raises(hashes.Unproven, match='Glance has recorded no hash'):
        hashes.require_same(repo.path, stat, None)


@pytest.mark.parametrize('name', ['md5', 'sha512', 'blake2b', 'sha3_512'])
def test_the_recipe_keeps_it(repo, name):
    found = hash_of(DATA, name)
    stat = put(repo, 'a', found=found)
    for stat in (stat, repo.stat('a')):
        assert (stat.hash_name, stat.hash_value) == (found.name, found.value)
        hashes.require_same(repo.path, stat, found)
        with pytest.raises(hashes.Other, match='another image'):
            hashes.require_same(repo.path, stat, hash_of(b'', name))
        with pytest.raises(hashes.Unproven, match='--algorithm sha256 a$'):
            hashes.require_same(repo.path, stat, hash_of(DATA, 'sha256'))


@pytest.mark.parametrize('name,value', [
    ('', b'a'), ('s' * 33, b'a'), ('sha512', b''), ('sha512', b'a' * 65)])
def test_what_no_recipe_has_room_for(repo, name, value):
    with repo.begin('a') as transaction:
        with pytest.raises(exceptions.InvalidParameter):
            transaction.set_hash(name, value)
        transaction.write(DATA)
        assert transaction.commit().hash_name == ''
    with pytest.raises(exceptions.ClosedError):
        transaction.set_hash('md5', b'a')


def test_an_upload_records_what_glance_records(repo):
    digest = hashlib.sha512()
    pool = thread_pool.Workers('storage', 2)
    upload.store(repo, 'a', repo.begin('a'), io.BytesIO(DATA), len(DATA),
                 [digest.update], pool, thread_pool.TimeLimit(0, pool), digest)
    assert recorded(repo, 'a') == {'sha512': hash_of(DATA).value}
    # The program accepts each name that the driver accepts.
    for name in ('SHA512', 'sha3-256', 'blake2s'):
        found = dedup_store._hash(name)
        assert hashes.said(name, found.hexdigest()).name == found.name


def test_merging_keeps_it(repo, maintainer):
    """N10: a merge that rewrites a recipe keeps the hash of the upload."""
    with repo.begin('a') as first, repo.begin('b') as second:
        for transaction, tail in ((first, b'a'), (second, b'b')):
            transaction.write(DATA + tail * 4096)
            transaction.set_hash('md5', tail * 16)
        first.commit()
        second.commit()
    files = [os.stat(os.path.join(repo.path, 'images', name)).st_ino
             for name in 'ab']
    merger.run_once(maintainer, pacing.Pace())
    assert files != [os.stat(os.path.join(repo.path, 'images', name)).st_ino
                     for name in 'ab']
    assert recorded(repo, 'a') == {'md5': (b'a' * 16).hex()}
    assert recorded(repo, 'b') == {'md5': (b'b' * 16).hex()}


# -- beside the recipe --------------------------------------------------------

def test_what_an_operator_verified(repo):
    put(repo, 'a')
    with repo.open_image('a') as image:
        for name in ('sha512', 'sha256'):
            found = hashes.compute(image, name)
            assert found == hash_of(DATA, name)
            hashes.record(repo.path, image.stat, found)
        hashes.require_same(repo.path, image.stat, hash_of(DATA))
        hashes.require_same(repo.path, image.stat, hash_of(DATA, 'sha256'))
        with pytest.raises(exceptions.DamagedError, match='is recorded'):
            hashes.record(repo.path, image.stat, hash_of(b'', 'sha256'))
    assert len(recorded(repo, 'a')) == 2
    repositories.require_clean(repo.path)


def test_the_recipe_is_believed_first(repo):
    stat = put(repo, 'a', found=hash_of(DATA))
    with pytest.raises(exceptions.DamagedError, match='is recorded'):
        hashes.record(repo.path, stat, hash_of(b''))
    os.makedirs(os.path.join(repo.path, 'hashes'), exist_ok=True)
    with open(os.path.join(repo.path, 'hashes', 'a'), 'wb') as file:
        file.write(hashes.encode(stat.upload_id, {
            'sha512': hash_of(b'').value}))
    assert recorded(repo, 'a') == {'sha512': hash_of(DATA).value}


def test_it_says_nothing_of_the_next_upload(repo):
    path = os.path.join(repo.path, 'hashes', 'a')
    hashes.record(repo.path, put(repo, 'a'), hash_of(DATA))
    with open(path, 'rb') as file:
        content = file.read()
    repo.delete('a')
    assert not os.path.exists(path)
    put(repo, 'a', b'another')
    # A killed process, or an older version, left this file.
    with open(path, 'wb') as file:
        file.write(content)
    assert recorded(repo, 'a') == {}
    with pytest.raises(hashes.Unproven):
        hashes.require_same(repo.path, repo.stat('a'), hash_of(DATA))
    hashes.record(repo.path, repo.stat('a'), hash_of(b'another'))
    assert recorded(repo, 'a') == {'sha512': hash_of(b'another').value}


def test_every_byte(repo):
    """A damaged hash file counts as absent; the next record replaces it."""
    stat = put(repo, 'a')
    hashes.record(repo.path, stat, hash_of(DATA))
    path = os.path.join(repo.path, 'hashes', 'a')
    with open(path, 'rb') as file:
        content = file.read()
    for at in range(len(content) - 1):
        for changed in (content[:at] + bytes([content[at] ^ 1])
                        + content[at + 1:], content[:at]):
            with open(path, 'wb') as file:
                file.write(changed)
            assert recorded(repo, 'a') == {}, at
    report = repositories.require_clean(repo.path)
    assert 'counts as absent' in ' '.join(map(str, report.findings))
    hashes.record(repo.path, stat, hash_of(DATA))
    assert recorded(repo, 'a') == {'sha512': hash_of(DATA).value}


def test_what_is_no_ordinary_file(repo):
    stat = put(repo, 'a')
    hashes.record(repo.path, stat, hash_of(DATA))
    path = os.path.join(repo.path, 'hashes', 'a')
    os.rename(path, path + '-elsewhere')
    os.symlink(path + '-elsewhere', path)
    assert recorded(repo, 'a') == {}
    os.unlink(path)
    os.mkfifo(path)
    assert recorded(repo, 'a') == {}


def test_only_so_many(repo):
    stat = put(repo, 'a')
    names = sorted(name for name in hashlib.algorithms_guaranteed
                   if not name.startswith('shake'))
    for name in names:
        hashes.record(repo.path, stat, hash_of(DATA, name))
        assert recorded(repo, 'a')[name] == hash_of(DATA, name).value
    assert len(recorded(repo, 'a')) == hashes.MAX_COUNT < len(names)
    size = os.stat(os.path.join(repo.path, 'hashes', 'a')).st_size
    assert size < hashes.MAX_SIZE


def test_in_a_header():
    known = {name: hash_of(DATA, name).value for name in ('sha512', 'md5')}
    header = hashes.pack_header(known)
    assert header == f'sha512:{known["sha512"]}, md5:{known["md5"]}'
    assert hashes.unpack_header(header) == known
    assert hashes.unpack_header('') == {} == hashes.unpack_header(
        hashes.pack_header({}))
    # The header may come from any sender.
    assert hashes.unpack_header(
        f'none:00, sha512, md5:{known["md5"]}, :, sha512:zz,') == {
            'md5': known['md5']}
    assert not hashes.unpack_header('x,' * 100_000 + header)


def test_what_is_left_over_goes(repo):
    hashes.sweep(repo)
    hashes.record(repo.path, put(repo, 'a'), hash_of(DATA))
    directory = os.path.join(repo.path, 'hashes')
    for name, age in (('gone', 0), ('.0123456789abcdef.new', 0),
                      ('.fedcba9876543210.new', 2 * 86400)):
        path = os.path.join(directory, name)
        open(path, 'w').close()
        os.utime(path, (os.stat(path).st_mtime - age,) * 2)
    hashes.sweep(repo)
    assert sorted(os.listdir(directory)) == ['.0123456789abcdef.new', 'a']


def test_whose_the_files_are(tmp_path):
    image_repository.Repository.create(tmp_path / 'shared',
                                       group_access=True)
    with repositories.open_repository(tmp_path / 'shared') as repo:
        hashes.record(repo.path, put(repo, 'a'), hash_of(DATA))
    directory = tmp_path / 'shared' / 'hashes'
    assert directory.stat().st_mode & 0o7777 == 0o2770
    assert (directory / 'a').stat().st_mode & 0o7777 == 0o660
    repositories.require_clean(tmp_path / 'shared')
