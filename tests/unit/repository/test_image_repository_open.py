# SPDX-License-Identifier: Apache-2.0

"""Repositories are created and opened through the API."""

import json
import os
import shutil
import threading
import warnings

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import signingkeys
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository
from glance_dedup.repository import layout
from glance_dedup.repository import repo_parameters
from tests.support import repositories
from tests.support.repositories import create
from tests.support.repositories import mixture
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.repository import fixtures
from tests.unit.repository.fixtures import NOBODY

MIB = 1 << 20

path = fixtures.path
public_tmp = fixtures.public_tmp


# -- creating -----------------------------------------------------------------

@pytest.mark.parametrize('parameters, words', [
    ({'block_size': 3000}, 'block_size'),
    ({'block_size': 256}, 'block_size'),
    ({'block_size': 131072}, 'block_size'),
    ({'block_size': 0}, 'block_size'),
    ({'block_size': -4096}, 'block_size'),
    ({'block_size': True}, 'block_size'),
    ({'block_size': '4096'}, 'block_size'),
    ({'group_slots': 63}, 'group_slots'),
    ({'group_slots': 32769}, 'group_slots'),
    ({'segment_size': 2048}, 'segment_size'),
    ({'segment_size': 5000}, 'segment_size'),
    ({'segment_size': 2 * MIB}, 'segment_size'),
    ({'fingerprint': 'sha257'}, 'sha257'),
    ({'fingerprint': ''}, 'digest'),
    ({'fingerprint': 'md5'}, 'md5'),
    ({'fingerprint': 'shake128'}, 'shake128'),
    ({'fingerprint': 'x' * 300}, 'digest'),
    ({'fingerprint': 'weak-8', 'verify': 'bytes'}, 'weak-8'),
    ({'fingerprint': 'xxh3-128'}, 'verify'),
    ({'verify': 'guess'}, 'verify'),
])
def test_create_with_bad_parameter(tmp_path, parameters, words):
    with pytest.raises(exceptions.InvalidParameter, match=words):
        image_repository.Repository.create(tmp_path / 'r', **parameters)
    assert not (tmp_path / 'r').exists()


def test_create_in_a_directory_that_holds_something(tmp_path):
    (tmp_path / 'precious').write_text('mine')
    with pytest.raises(exceptions.InvalidParameter, match='precious'):
        image_repository.Repository.create(tmp_path)
    assert os.listdir(tmp_path) == ['precious']


@pytest.mark.parametrize('name', ['groups', 'images'])
def test_create_over_what_has_lost_its_description(tmp_path, name):
    """A new id would make all images damaged, so creation is refused."""
    path = tmp_path / 'r'
    create(path)
    with open_repository(path) as repo:
        put(repo, 'one', noise(20000))
    (path / 'repository.json').unlink()
    for other in {'groups', 'images'} - {name}:
        shutil.rmtree(path / other)
    with pytest.raises(exceptions.InvalidParameter,
                       match=f'lost its repository.json: {name}/'):
        create(path)
    assert not (path / 'repository.json').exists()


def test_a_used_repository_that_lost_its_description(tmp_path):
    """A repository that only has a catalog left is not created again."""
    path = tmp_path / 'r'
    create(path)
    with open_repository(path) as repo, maintainer_role.Maintainer(repo):
        pass
    (path / 'repository.json').unlink()
    with pytest.raises(exceptions.InvalidParameter,
                       match='lost its repository.json: catalog/'):
        create(path)
    with pytest.raises(exceptions.ImageNotFound,
                       match='lost its repository.json: restore the file'):
        open_repository(path)


@pytest.mark.parametrize('names', [[], ['00000001']])
def test_a_directory_that_is_being_restored(tmp_path, names):
    """A directory that is being restored is neither created nor opened."""
    path = tmp_path / 'r'
    layout.begin_restoring(path, repo_parameters.Parameters.choose(),
                           signingkeys.make())
    for name in names:
        (path / 'groups' / name).touch()
    before = sorted(os.listdir(path))
    wanted = "is being restored: when 'repository restore' was interrupted"
    with pytest.raises(exceptions.InvalidParameter, match=wanted):
        create(path)
    with pytest.raises(exceptions.ImageNotFound, match=wanted):
        open_repository(path)
    assert sorted(os.listdir(path)) == before


def test_create_beside_one_who_was_faster(tmp_path, monkeypatch):
    """Creation fails if another process has made the repository meanwhile."""
    path = tmp_path / 'r'
    create(path)
    with open_repository(path) as repo:
        put(repo, 'one', noise(20000))
    listed = os.listdir

    def earlier(where):
        return [name for name in listed(where) if name != 'repository.json']

    monkeypatch.setattr(os, 'listdir', earlier)
    with pytest.raises(exceptions.ImageExists):
        create(path)


def test_create_twice(path):
    before = (path / 'repository.json').read_bytes()
    with pytest.raises(exceptions.ImageExists, match='already'):
        image_repository.Repository.create(path)
    assert (path / 'repository.json').read_bytes() == before


def test_create_over_a_file(tmp_path):
    (tmp_path / 'file').write_text('mine')
    with pytest.raises(exceptions.RepositoryError, match='file'):
        image_repository.Repository.create(tmp_path / 'file')
    assert (tmp_path / 'file').read_text() == 'mine'


def test_create_in_an_empty_directory_and_with_parents(tmp_path):
    (tmp_path / 'empty').mkdir()
    for path in (tmp_path / 'empty', tmp_path / 'a' / 'b'):
        create(path)
        with open_repository(path) as repo:
            put(repo, 'image', b'x')


def test_create_completes_what_a_dead_call_left(tmp_path):
    for name in ('groups', 'images'):
        (tmp_path / 'r' / name).mkdir(parents=True)
    (tmp_path / 'r' / '.0123456789abcdef.new').write_text('half')
    create(tmp_path / 'r')
    with open_repository(tmp_path / 'r') as repo:
        put(repo, 'image', b'x')


def test_create_many_at_once_makes_one(tmp_path):
    outcomes = []

    def work():
        try:
            image_repository.Repository.create(tmp_path / 'r')
            outcomes.append(True)
        except exceptions.ImageExists:
            outcomes.append(False)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == [False] * 7 + [True]
    with open_repository(tmp_path / 'r') as repo:
        put(repo, 'image', b'x')
    repositories.require_clean(tmp_path / 'r')


def test_create_where_it_is_not_allowed(public_tmp):
    (public_tmp / 'closed').mkdir(mode=0o755)

    def attempt():
        with pytest.raises(exceptions.AccessDenied, match='closed') as info:
            image_repository.Repository.create(public_tmp / 'closed' / 'r')
        return info.value.errno
    assert repositories.in_child(
        repositories.as_user(NOBODY, attempt)) == 13


def test_create_without_room(tmp_path):
    with repositories.small_disk(tmp_path / 'disk', 1 << 16) as disk:
        filling = repositories.fill_disk(disk)
        with pytest.raises(exceptions.NoSpaceError):
            image_repository.Repository.create(disk / 'r')
        filling.unlink()
        create(disk / 'r')


# -- opening ------------------------------------------------------------------

def test_open_what_is_missing(tmp_path):
    with pytest.raises(exceptions.ImageNotFound, match='nowhere'):
        open_repository(tmp_path / 'nowhere')


def test_open_a_file(tmp_path):
    (tmp_path / 'file').write_text('mine')
    with pytest.raises(exceptions.ImageNotFound, match='file'):
        open_repository(tmp_path / 'file')


def test_open_what_is_not_a_repository(tmp_path):
    (tmp_path / 'plain').mkdir()
    with pytest.raises(exceptions.ImageNotFound, match='not a repository'):
        open_repository(tmp_path / 'plain')
    assert os.listdir(tmp_path / 'plain') == []


@pytest.mark.parametrize('options, words', [
    ({'codec': 'gzip'}, 'gzip'),
    ({'codec': None}, 'codec'),
    ({'codec': 'zstd', 'codec_level': 20}, 'level 20'),
    ({'codec': 'zstd', 'codec_level': -1}, 'level -1'),
    ({'codec': 'lz4', 'codec_level': 3}, 'level 3'),
    ({'threads': -1}, 'threads'),
    ({'threads': 65}, 'threads'),
    ({'threads': 1.5}, 'threads'),
    ({'filter_mib': 0}, 'filter_mib'),
    ({'filter_mib': -1}, 'filter_mib'),
    ({'filter_mib': 1 << 21}, 'filter_mib'),
    ({'lock_timeout': -1}, 'lock_timeout'),
    ({'lock_timeout': 4000}, 'lock_timeout'),
])
def test_open_with_bad_option(path, options, words):
    with pytest.raises(exceptions.InvalidParameter, match=words):
        open_repository(path, **options)


def test_open_not_readable(public_tmp):
    path = create(public_tmp / 'r')

    def attempt():
        with pytest.raises(exceptions.AccessDenied, match=str(path)):
            open_repository(path, filter_dir=str(public_tmp))
        return True
    assert repositories.in_child(repositories.as_user(NOBODY, attempt))


def test_not_writable(public_tmp):
    path = create(public_tmp / 'r', block_size=512, group_slots=64)
    data = mixture(40000)
    with open_repository(path) as repo:
        put(repo, 'image', data)
    for directory, _, files in os.walk(path, topdown=False):
        for name in files:
            # Every reader needs write access to the lock files.
            file = os.path.join(directory, name)
            os.chmod(file, 0o600 if os.path.basename(directory) == 'locks'
                     else 0o400)
            os.chown(file, NOBODY, NOBODY)
        os.chmod(directory, 0o500)
        os.chown(directory, NOBODY, NOBODY)
    filter_dir = public_tmp / 'filter'
    filter_dir.mkdir()
    filter_dir.chmod(0o777)

    def attempt():
        with open_repository(path, filter_dir=str(filter_dir)) as repo:
            assert read_all(repo, 'image') == data
            with pytest.raises(exceptions.AccessDenied):
                put(repo, 'other', data)
            with pytest.raises(exceptions.AccessDenied):
                repo.delete('image')
            assert repo.images() == ['image']
            return read_all(repo, 'image') == data
    assert repositories.in_child(repositories.as_user(NOBODY, attempt))


def test_repository_of_a_newer_format(path):
    repositories.edit_parameters(path, format=2)
    with pytest.raises(exceptions.VersionError, match='version 2'):
        open_repository(path)


def test_repository_of_a_newer_format_with_unknown_keys(path):
    """The error names the newer version, whose checksum may differ."""
    file = path / 'repository.json'
    fields = json.loads(file.read_text())
    fields.update(format=7, novelty=[1], checksum='another kind')
    file.write_text(json.dumps(fields))
    with pytest.raises(exceptions.VersionError, match='version 7'):
        open_repository(path)


def test_repository_of_a_development_version(path):
    """The error names the unreleased version, whatever its checksum."""
    file = path / 'repository.json'
    fields = json.loads(file.read_text())
    del fields['format']
    for major, minor in (1, 0), (1, 1), (2, 0), (3, 0), (4, 0):
        fields.update(major=major, minor=minor)
        file.write_text(json.dumps(fields))
        with pytest.raises(exceptions.VersionError, match=(
                rf'version {major}\.{minor} .* never released')):
            open_repository(path)


@pytest.mark.parametrize('content', [
    b'', b'{', b'[]', b'null', b'3', b'"x"', b'\xff\xfe', b'{}',
    b'[' * 60000, b'{"kind": "glance-dedup repository"}', bytes(4096),
    b'{"kind": "other", "checksum": "", "format": 1}',
])
def test_repository_json_is_something_else(path, content):
    (path / 'repository.json').write_bytes(content)
    with pytest.raises(exceptions.DamagedError, match='repository.json'):
        open_repository(path)


@pytest.mark.parametrize('changes', [
    {'block_size': 3000}, {'block_size': '512'}, {'block_size': None},
    {'group_slots': 1}, {'segment_size': 1 << 30}, {'chunking': 'fastcdc'},
    {'fingerprint': 'crc32'}, {'fingerprint': 'weak-8'},
    {'fingerprint': 'xxh3-128'}, {'fingerprint': ['sha256']},
    {'fingerprint': None}, {'fingerprint': 'x\0y'}, {'verify': 'never'},
    {'repository_id': 'short'}, {'repository_id': '00'},
    {'repository_id': 5}, {'repository_id': 'AA' * 16},
    {'format': 'one'}, {'format': None}, {'format': 0}, {'format': True},
    {'more': 1},
], ids=str)
def test_repository_json_out_of_bounds(path, changes):
    repositories.edit_parameters(path, **changes)
    with pytest.raises((exceptions.DamagedError, exceptions.VersionError),
                       match='repository.json'):
        open_repository(path)


def test_repository_json_lacks_a_key(path):
    file = path / 'repository.json'
    for key in json.loads(file.read_text()):
        text = file.read_text()
        fields = json.loads(text)
        del fields[key]
        file.write_text(json.dumps(fields))
        with pytest.raises(exceptions.DamagedError, match='repository.json'):
            open_repository(path)
        file.write_text(text)


def test_key_is_damaged(path):
    good = (path / 'key').read_bytes()
    other = bytes([good[0] ^ 1]) + good[1:]
    for content in (b'', b'0' * 63, b'0' * 64 + b'\n', good[:-1], good + b' ',
                    good[:64] + b'\n', other):
        (path / 'key').write_bytes(content)
        with pytest.raises(exceptions.DamagedError, match='key'):
            open_repository(path)


@pytest.mark.parametrize('name', ['locks/groups', 'locks/images', 'groups',
                                  'images', 'spool'])
def test_a_part_is_missing(path, name):
    with open_repository(path) as repo:
        put(repo, 'image', noise(5000))
    (path / name).rename(path.parent / 'aside')
    with pytest.raises(exceptions.RepositoryError):
        with open_repository(path) as repo:
            repo.images()
            put(repo, 'other', noise(5000, 2))
            repo.delete('image')
    (path.parent / 'aside').rename(path / name)
    with open_repository(path) as repo:
        put(repo, 'another', noise(5000, 3))
        assert read_all(repo, 'another') == noise(5000, 3)


def test_symbolic_links_are_not_followed(path):
    with open_repository(path) as repo:
        put(repo, 'image', noise(5000))
    for name in ('images/image', 'groups/00000001'):
        target = path.parent / 'target'
        (path / name).rename(target)
        (path / name).symlink_to(target)
        with open_repository(path) as repo:
            with pytest.raises(exceptions.RepositoryError):
                read_all(repo, 'image')
        (path / name).unlink()
        target.rename(path / name)
    # The repository's own path may be a link: the operator chose it.
    link = path.parent / 'link'
    link.symlink_to(path)
    with open_repository(link) as repo:
        assert read_all(repo, 'image') == noise(5000)


def test_newer_recipe_and_group(path):
    with open_repository(path) as repo:
        put(repo, 'image', noise(5000))
    for name, call in (
            ('images/image', lambda repo: repo.stat('image')),
            ('groups/00000001', lambda repo: read_all(repo, 'image'))):
        before = (path / name).read_bytes()
        (path / name).write_bytes(before[:8] + b'\4\0' + before[10:])
        with open_repository(path) as repo:
            with pytest.raises(exceptions.VersionError, match=name) as info:
                call(repo)
            assert 'version 4' in str(info.value)
            # Others are stored all the same.
            put(repo, f'beside-{name[0]}', noise(5000, 9))
        (path / name).write_bytes(before)
        with open_repository(path) as repo:
            assert read_all(repo, 'image') == noise(5000)
            assert read_all(repo, f'beside-{name[0]}') == noise(5000, 9)


def test_newer_minor_version_is_read(path):
    import struct

    import xxhash
    with open_repository(path) as repo:
        put(repo, 'image', noise(5000))
    recipe = bytearray((path / 'images' / 'image').read_bytes())
    recipe[10] = 9
    recipe[4088:4096] = struct.pack(
        '<Q', xxhash.xxh3_64_intdigest(bytes(recipe[:4088])))
    (path / 'images' / 'image').write_bytes(recipe)
    with open_repository(path) as repo:
        assert read_all(repo, 'image') == noise(5000)


def test_warnings_are_not_usual(path):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with open_repository(path) as repo:
            put(repo, 'image', b'x')
