# SPDX-License-Identifier: Apache-2.0

"""The API: all that callers of ``glance_dedup.repository`` may do."""

import gc
import io
import itertools
import json
import os
import pathlib
import pwd
import random
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings

import pytest

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.repository import repository
from tests.support import repositories
from tests.support.repositories import create
from tests.support.repositories import mixture
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all

MIB = 1 << 20
NOBODY = 65534
TOP = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def path(tmp_path):
    """A repository in which a group is soon full."""
    return create(tmp_path / 'repository', block_size=512, group_slots=64,
                  segment_size=4096)


@pytest.fixture
def repo(path):
    with open_repository(path) as repo:
        yield repo


@pytest.fixture
def large(tmp_path):
    """A repository as it is by default."""
    path = create(tmp_path / 'large')
    with open_repository(path) as repo:
        yield repo


@pytest.fixture
def public_tmp():
    """A directory that another user can reach."""
    if os.geteuid() != 0:
        pytest.skip('changing the user needs root')
    # pytest's own directories are closed to others.
    path = pathlib.Path(tempfile.mkdtemp(prefix='public-'))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


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
    ({'fingerprint': 'weak-8', 'compare': 'value'}, 'weak-8'),
    ({'fingerprint': 'xxh3-128'}, 'compare'),
    ({'compare': 'guess'}, 'compare'),
])
def test_create_with_bad_parameter(tmp_path, parameters, words):
    with pytest.raises(exceptions.InvalidParameter, match=words):
        repository.Repository.create(tmp_path / 'r', **parameters)
    assert not (tmp_path / 'r').exists()


def test_create_in_a_directory_that_holds_something(tmp_path):
    (tmp_path / 'precious').write_text('mine')
    with pytest.raises(exceptions.InvalidParameter, match='precious'):
        repository.Repository.create(tmp_path)
    assert os.listdir(tmp_path) == ['precious']


@pytest.mark.parametrize('name', ['groups', 'images'])
def test_create_over_what_has_lost_its_description(tmp_path, name):
    """With another id all images would be damaged."""
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


def test_create_beside_one_who_was_faster(tmp_path, monkeypatch):
    """It lists the directory, and then there is a repository with images."""
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
        repository.Repository.create(path)
    assert (path / 'repository.json').read_bytes() == before


def test_create_over_a_file(tmp_path):
    (tmp_path / 'file').write_text('mine')
    with pytest.raises(exceptions.RepositoryError, match='file'):
        repository.Repository.create(tmp_path / 'file')
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
            repository.Repository.create(tmp_path / 'r')
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
    repositories.need_clean(tmp_path / 'r')


def test_create_where_it_is_not_allowed(public_tmp):
    (public_tmp / 'closed').mkdir(mode=0o755)

    def attempt():
        with pytest.raises(exceptions.AccessDenied, match='closed') as info:
            repository.Repository.create(public_tmp / 'closed' / 'r')
        return info.value.errno
    assert repositories.in_child(
        repositories.as_user(NOBODY, attempt)) == 13


def test_create_without_room(tmp_path):
    with repositories.small_disk(tmp_path / 'disk', 1 << 16) as disk:
        filling = repositories.fill_disk(disk)
        with pytest.raises(exceptions.NoSpaceError):
            repository.Repository.create(disk / 'r')
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
            # The lock file must be writable to all who read.
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
    repositories.edit_parameters(path, major=2)
    with pytest.raises(exceptions.VersionError, match='version 2'):
        open_repository(path)


def test_repository_of_a_newer_format_with_unknown_keys(path):
    """A newer version may have another checksum: the version is told."""
    file = path / 'repository.json'
    fields = json.loads(file.read_text())
    fields.update(major=7, novelty=[1], checksum='another kind')
    file.write_text(json.dumps(fields))
    with pytest.raises(exceptions.VersionError, match='version 7'):
        open_repository(path)


@pytest.mark.parametrize('content', [
    b'', b'{', b'[]', b'null', b'3', b'"x"', b'\xff\xfe', b'{}',
    b'[' * 60000, b'{"kind": "glance-dedup repository"}', bytes(4096),
    b'{"kind": "other", "checksum": "", "major": 1}',
])
def test_repository_json_is_something_else(path, content):
    (path / 'repository.json').write_bytes(content)
    with pytest.raises(exceptions.DamagedError, match='repository.json'):
        open_repository(path)


@pytest.mark.parametrize('changes', [
    {'block_size': 3000}, {'block_size': '512'}, {'block_size': None},
    {'group_slots': 1}, {'segment_size': 1 << 30}, {'cutting': 'fastcdc'},
    {'fingerprint': 'crc32'}, {'fingerprint': 'weak-8'},
    {'fingerprint': 'xxh3-128'}, {'fingerprint': ['sha256']},
    {'fingerprint': None}, {'fingerprint': 'x\0y'}, {'compare': 'never'},
    {'repository_id': 'short'}, {'repository_id': '00'},
    {'repository_id': 5}, {'repository_id': 'AA' * 16},
    {'major': 'one'}, {'major': None}, {'more': 1},
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
    # But the repository's own place is the operator's choice.
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
        (path / name).write_bytes(before[:8] + b'\2\0' + before[10:])
        with open_repository(path) as repo:
            with pytest.raises(exceptions.VersionError, match=name) as info:
                call(repo)
            assert 'version 2' in str(info.value)
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


# -- image ids ----------------------------------------------------------------

BAD_IDS = ['', '.', '..', 'a/b', '/', '../images/x', 'a.b', 'a b', 'a\0b',
           '\0', 'x' * 129, 'x' * 300, 'x' * 100000, 'bild-ä', 'изображение',
           '画像', '\ud800', 'a\n', 'é' * 10, 'a%2fb', 'a\\b', '~', '*']


@pytest.mark.parametrize('image_id', BAD_IDS + [None, 5, b'bytes'],
                         ids=lambda i: ascii(i)[:20])
def test_bad_image_id(repo, path, image_id):
    assert not isinstance(image_id, str) or not imageids.is_valid(image_id)
    for call in (repo.begin, repo.open_image, repo.stat, repo.delete,
                 lambda i: repo.put(i, io.BytesIO(b'x'))):
        with pytest.raises(exceptions.InvalidParameter):
            call(image_id)
    assert repo.images() == []
    assert os.listdir(path / 'spool') == []


@pytest.mark.parametrize('image_id', ['x', '-', '_', 'x' * 128, 'A-Z_09'])
def test_good_image_id(repo, image_id):
    assert imageids.is_valid(image_id)
    put(repo, image_id, b'content')
    assert repo.images() == [image_id]
    assert read_all(repo, image_id) == b'content'
    assert repo.stat(image_id).image_id == image_id
    repo.delete(image_id)
    assert repo.images() == []


def test_project(repo):
    for project in ('', 'p', 'projekt-ä', 'x' * 128):
        put(repo, 'image', b'content', project=project)
        assert repo.stat('image').project == project
        repo.delete('image')
    for project in ('x' * 129, 'a\0b', None, '\udc00'):
        with pytest.raises(exceptions.InvalidParameter):
            repo.begin('image', project=project)
    assert repo.images() == []


def test_bad_upload_id(repo):
    put(repo, 'image', b'content')
    for upload_id in ('', 'x', '0' * 31, '0' * 33, 'A' * 32, '0' * 32 + '\n'):
        for call in (repo.delete, repo.open_image):
            with pytest.raises(exceptions.InvalidParameter):
                call('image', upload_id=upload_id)
    assert repo.images() == ['image']


def test_what_is_not_there(repo):
    for call in (repo.delete, repo.open_image, repo.stat):
        with pytest.raises(exceptions.ImageNotFound, match='nothing'):
            call('nothing')


# -- storing and reading ------------------------------------------------------

def odd_pieces(data, seed):
    rng = random.Random(seed)
    at = 0
    while at < len(data):
        n = rng.choice((1, 7, 511, 512, 513, 4096, 70001, 1 << 20))
        yield data[at:at + n]
        at += n


VARIANTS = [
    # block size, segment size, codec, level, fingerprint, compare, threads
    (512, 512, 'none', 0, 'sha256', 'hash', 0),
    (512, 4096, 'lz4', 0, 'blake2s256', 'hash', 2),
    (512, 65536, 'zstd', 1, 'weak-8', 'value', 1),
    (4096, 4096, 'lz4', 0, 'sha1', 'value', 2),
    (4096, 65536, 'none', 0, 'xxh3-128', 'value', 2),
    (4096, 65536, 'zstd', 0, 'sha512-256', 'hash', 2),
    (4096, 1 << 20, 'lz4', 0, 'sha3-256', 'hash', 1),
    (65536, 65536, 'zstd', 19, 'sha512', 'hash', 2),
    (65536, 1 << 20, 'none', 0, 'sha256', 'value', 0),
]


@pytest.mark.parametrize(
    'block, segment, codec, level, fingerprint, compare, threads', VARIANTS)
def test_sizes(tmp_path, block, segment, codec, level, fingerprint, compare,
               threads):
    """Every length around the limits comes back, whole and in ranges."""
    path = create(tmp_path / 'r', block_size=block, segment_size=segment,
                  group_slots=64, fingerprint=fingerprint, compare=compare)
    sizes = sorted({0, 1, 2, block - 1, block, block + 1, 2 * block - 1,
                    segment - 1, segment, segment + 1,
                    3 * segment + block // 2, 70 * block + 5})
    contents = {}
    rng = random.Random(block)
    options = {'codec': codec, 'codec_level': level, 'threads': threads,
               '_allow_weak': fingerprint == 'weak-8'}
    with open_repository(path, **options) as repo:
        for size, (kind, content) in itertools.product(sizes, (
                ('noise', noise), ('mixture', mixture),
                ('zeros', lambda size, seed: bytes(size)))):
            image_id = f'{kind}-{size}'
            data = content(size, seed=size)
            contents[image_id] = data
            with repo.begin(image_id) as transaction:
                for piece in odd_pieces(data, size):
                    assert transaction.write(piece) == len(piece)
                stat = transaction.commit()
            assert stat.size == size
            assert stat.zero_bytes <= size
            assert kind != 'zeros' or stat.zero_bytes == size
            assert read_all(repo, image_id) == data
        # Not those of the process that wrote them.
    with open_repository(path, **options) as repo:
        assert repo.images() == sorted(contents)
        for image_id, data in contents.items():
            with repo.open_image(image_id) as image:
                assert image.size == len(data)
                assert b''.join(image.pieces(piece=70001)) == data
                for _ in range(10):
                    start = rng.randrange(len(data) + 2)
                    length = rng.randrange(2 * block)
                    assert (image.read(length, start)
                            == data[start:start + length])
                extents = list(image.extents())
                assert sum(e.length for e in extents) == len(data)
                assert sum(e.length for e in extents if e.kind == 'zeros'
                           ) == image.stat.zero_bytes
                assert len(extents) == image.stat.extents
        # And all of it once more is nothing new.
        for image_id, data in list(contents.items())[::5]:
            put(repo, f'{image_id}-again', data)
            assert read_all(repo, f'{image_id}-again') == data
    if fingerprint != 'weak-8':
        repositories.need_clean(path)


def test_comparison_by_value_tells_equal_fingerprints_apart(tmp_path):
    """256 fingerprints for 3000 blocks: only bytes tell them apart."""
    path = create(tmp_path / 'r', block_size=512, group_slots=512,
                  fingerprint='weak-8', compare='value')
    data = noise(512 * 3000)
    shuffled = [data[i:i + 512] for i in range(0, len(data), 512)]
    random.Random(5).shuffle(shuffled)
    shuffled = b''.join(shuffled)
    with open_repository(path, _allow_weak=True) as repo:
        put(repo, 'first', data + data[:512 * 64])
        put(repo, 'second', shuffled)
        assert read_all(repo, 'first') == data + data[:512 * 64]
        assert read_all(repo, 'second') == shuffled
        figures = repo.statistics()
        assert figures['compares'] > figures['hits'] > 0


def test_duplicates_are_stored_once(large):
    data = noise(6 * MIB)
    first = put(large, 'first', data)
    assert first.new_bytes == len(data)
    again = put(large, 'again', data)
    assert (again.new_bytes, again.stored_bytes) == (0, 0)
    mixed = put(large, 'mixed', data[MIB:3 * MIB] + noise(MIB, 2) + data[:MIB])
    assert mixed.new_bytes == MIB
    within = put(large, 'within', noise(MIB, 3) * 5)
    assert within.new_bytes == MIB
    zeros = put(large, 'zeros', bytes(5 * MIB + 1))
    assert (zeros.new_bytes, zeros.zero_bytes) == (0, 5 * MIB + 1)
    assert zeros.extents == 1


def test_compression_pays_or_is_left_out(tmp_path):
    path = create(tmp_path / 'r')
    text = b'the same line, over and over %d\n'
    text = b''.join(text % i for i in range(60000))
    stored = {}
    for codec in ('none', 'lz4', 'zstd'):
        with open_repository(path, codec=codec) as repo:
            stored[codec] = put(
                repo, codec, codec.encode() + text).stored_bytes
            assert read_all(repo, codec) == codec.encode() + text
            raw = put(repo, f'{codec}-noise', noise(MIB, codec))
            assert MIB < raw.stored_bytes < MIB + MIB // 100
    assert stored['zstd'] < stored['lz4'] < stored['none'] / 2
    # Each reads what the others wrote.
    with open_repository(path) as repo:
        for codec in stored:
            assert read_all(repo, codec) == codec.encode() + text


@pytest.mark.parametrize('codec', ['lz4', 'zstd'])
def test_little_is_lost_where_compression_begins_to_pay(tmp_path, codec):
    """Seven segments of 64 KiB at most, however long nothing paid."""
    text = b''.join(b'the same line again, %d\n' % i for i in range(200000))
    path = create(tmp_path / 'r')
    with open_repository(path, codec=codec) as repo:
        alone = put(repo, 'alone', text).stored_bytes
    path = create(tmp_path / 'other')
    with open_repository(path, codec=codec) as repo:
        both = put(repo, 'both', noise(16 * MIB, 1) + text)
        raw = both.stored_bytes - 16 * MIB - alone
        assert 0 < raw < 7 * 65536 + MIB // 16
        assert read_all(repo, 'both')[16 * MIB:] == text


def test_a_codec_that_yields(tmp_path):
    """How much is stored as it is depends on the machine, and no more."""
    text = b''.join(b'the same line again, %d\n' % i for i in range(400000))
    path = create(tmp_path / 'r')
    with open_repository(path, codec='zstd', codec_yields=True) as repo:
        stored = put(repo, 'one', text).stored_bytes
        yielded = repo.statistics()['yielded_segments']
        assert 0 <= yielded <= len(text) // 65536 + 1
        assert stored >= yielded * 60000
        assert read_all(repo, 'one') == text
    with open_repository(path, codec='zstd') as repo:
        put(repo, 'two', b'x' + text)
        assert repo.statistics()['yielded_segments'] == 0


@pytest.mark.parametrize('threads', [0, 2])
def test_beside_the_page_cache(tmp_path, threads):
    """The files are the same, to the byte at their end."""
    sizes = []
    for direct_io in (False, True):
        path = create(tmp_path / f'direct-{direct_io}', compare='value')
        with open_repository(path, direct_io=direct_io,
                             threads=threads) as repo:
            # Of the last, half is found in what was written so just before.
            data = [noise(5 * MIB + 100, 1), noise(7777, 2) + noise(9000, 1),
                    2 * noise(2 * MIB, 4)]
            for number, content in enumerate(data):
                put(repo, str(number), content)
                with repo.begin('given-up') as transaction:
                    transaction.write(noise(3 * MIB + 5, 3))
            assert repo.stat('2').new_bytes == 2 * MIB
            for number, content in enumerate(data):
                assert read_all(repo, str(number)) == content
        repositories.need_clean(path)
        sizes.append({name: os.stat(path / 'groups' / name).st_size
                      for name in os.listdir(path / 'groups')})
    assert sizes[0] == sizes[1]


def test_put(repo, tmp_path):
    data = mixture(50000)
    (tmp_path / 'file').write_bytes(data)
    seen = []
    repo.put('path', tmp_path / 'file', progress=seen.append)
    repo.put('string', str(tmp_path / 'file'), size=len(data))
    repo.put('object', io.BytesIO(data), project='p')
    for image_id in ('path', 'string', 'object'):
        assert read_all(repo, image_id) == data
    assert seen[-1] == len(data)
    assert repo.stat('object').project == 'p'
    with pytest.raises(exceptions.RepositoryError, match='no-such'):
        repo.put('other', tmp_path / 'no-such')
    with pytest.raises(exceptions.ImageExists):
        repo.put('path', io.BytesIO(data))


@pytest.mark.parametrize('size, words', [
    (0, 'more'), (49999, 'more'), (50001, 'only 50000'), (10 ** 15, 'only')])
def test_put_of_another_size(repo, path, size, words):
    with pytest.raises(exceptions.InvalidParameter, match=words):
        repo.put('image', io.BytesIO(noise(50000)), size=size)
    assert repo.images() == []
    assert os.listdir(path / 'spool') == []
    repo.put('image', io.BytesIO(noise(50000)), size=50000)


class Raising(io.RawIOBase):
    def __init__(self, length):
        self.left = length

    def read(self, size=-1):
        if self.left <= 0:
            raise OSError('the client went away')
        n = min(size, self.left)
        self.left -= n
        return noise(n, self.left)


@pytest.mark.parametrize('length', [0, 1, 13 * MIB])
def test_put_of_a_stream_that_raises(large, length):
    with pytest.raises(OSError, match='went away'):
        large.put('image', Raising(length))
    assert large.images() == []
    assert os.listdir(os.path.join(large.path, 'spool')) == []
    put(large, 'image', b'x')
    repositories.need_clean(large.path)


def test_write_takes_buffers_and_refuses_others(repo):
    with repo.begin('image') as transaction:
        for data in (b'ab', bytearray(b'cd'), memoryview(b'xefx')[1:3], b''):
            transaction.write(data)
        for data in ('text', None, 5, memoryview(b'abcdef')[::2]):
            with pytest.raises((TypeError, BufferError)):
                transaction.write(data)
        transaction.commit()
    assert read_all(repo, 'image') == b'abcdef'


def test_the_buffer_is_the_callers_again(large):
    """What is written over after write() does not change the image."""
    expected = bytearray()
    with large.begin('image') as transaction:
        buffer = bytearray(100001)
        for i in range(150):
            buffer[:] = noise(len(buffer), i)
            expected += buffer
            transaction.write(buffer)
            buffer[:] = b'\xaa' * len(buffer)
        transaction.commit()
    assert read_all(large, 'image') == expected


def test_same_id_twice(repo):
    first = put(repo, 'image', b'first')
    with pytest.raises(exceptions.ImageExists, match='image'):
        repo.begin('image')
    assert repo.stat('image') == first
    assert read_all(repo, 'image') == b'first'


@pytest.mark.parametrize('handles', [1, 2])
def test_two_transactions_on_one_id(path, handles):
    """I11: of two uploads of one id exactly one commits."""
    with open_repository(path) as one, open_repository(path) as other:
        for i in range(15):
            outcomes = {}
            barrier = threading.Barrier(2)

            def commit(name, repo, i=i, outcomes=outcomes, barrier=barrier):
                with repo.begin(f'image-{i}') as transaction:
                    transaction.write(name.encode() * 1000)
                    barrier.wait(60)
                    try:
                        transaction.commit()
                        outcomes[name] = True
                    except exceptions.ImageExists:
                        outcomes[name] = False
            threads = [
                threading.Thread(target=commit, args=('a', one)),
                threading.Thread(target=commit, args=(
                    'b', other if handles == 2 else one))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert sorted(outcomes.values()) == [False, True]
            winner = max(outcomes, key=outcomes.get)
            assert read_all(one, f'image-{i}') == winner.encode() * 1000
        assert len(repositories.spool(path)) == 15
    repositories.need_clean(path)


def test_abort_leaves_nothing(large):
    path = large.path
    put(large, 'kept', noise(MIB))
    spool = os.listdir(os.path.join(path, 'spool'))
    group = repositories.group_path(path, 1)
    size = group.stat().st_size
    transaction = large.begin('image')
    for i in range(13):
        transaction.write(noise(MIB, i + 10))
    assert group.stat().st_size > size
    transaction.abort()
    assert group.stat().st_size == size
    assert large.images() == ['kept']
    assert os.listdir(os.path.join(path, 'spool')) == spool
    transaction.abort()
    put(large, 'image', noise(MIB, 99))
    assert read_all(large, 'image') == noise(MIB, 99)
    assert read_all(large, 'kept') == noise(MIB)
    repositories.need_clean(path)


def test_leaving_a_transaction_aborts_it(repo, path):
    with pytest.raises(KeyError):
        with repo.begin('image') as transaction:
            transaction.write(noise(5000))
            raise KeyError
    with repo.begin('image') as transaction:
        transaction.write(noise(5000))
    assert repo.images() == []
    assert os.listdir(path / 'spool') == []
    # Nor does a forgotten one stay.
    transaction = repo.begin('image')
    transaction.write(noise(5000))
    assert len(os.listdir(path / 'spool')) == 1
    del transaction
    gc.collect()
    assert os.listdir(path / 'spool') == []


def test_use_after_the_end(repo):
    transaction = repo.begin('image')
    transaction.write(b'x')
    transaction.commit()
    transaction.abort()
    for call in (lambda: transaction.write(b'y'), transaction.commit):
        with pytest.raises(exceptions.ClosedError):
            call()
    assert read_all(repo, 'image') == b'x'
    transaction = repo.begin('other')
    transaction.abort()
    for call in (lambda: transaction.write(b'y'), transaction.commit):
        with pytest.raises(exceptions.ClosedError):
            call()
    assert repo.images() == ['image']
    image = repo.open_image('image')
    image.close()
    image.close()
    for call in (image.read, lambda: image.readinto(bytearray(5)),
                 lambda: list(image.extents())):
        with pytest.raises(exceptions.ClosedError):
            call()


def test_use_after_close(path):
    repo = open_repository(path)
    put(repo, 'image', b'content')
    image = repo.open_image('image')
    transaction = repo.begin('late')
    transaction.write(b'late')
    repo.close()
    repo.close()
    for call in (lambda: repo.begin('x'), lambda: repo.open_image('image'),
                 lambda: repo.delete('image'), repo.images, repo.statistics,
                 repo.rebuild_filter, lambda: repo.stat('image')):
        with pytest.raises(exceptions.ClosedError):
            call()
    assert image.read() == b'content'
    transaction.commit()
    image.close()
    with open_repository(path) as repo:
        assert read_all(repo, 'late') == b'late'


def test_close_lets_go_of_everything(path):
    def open_files():
        return sorted(
            target for target in (
                os.readlink(f'/proc/self/fd/{fd}')
                for fd in os.listdir('/proc/self/fd')
                if os.path.lexists(f'/proc/self/fd/{fd}'))
            if str(path) in target)
    threads = set(threading.enumerate())
    for _ in range(3):
        with open_repository(path) as repo:
            put(repo, 'image', mixture(100000))
            read_all(repo, 'image')
            repo.begin('other').write(noise(100000, 4))
            repo.delete('image')
            assert open_files()
        gc.collect()
        assert open_files() == []
    # Those of other tests may end meanwhile.
    assert set(threading.enumerate()) <= threads


def test_descriptors_are_bounded(path):
    """Many groups, and many images one after the other."""
    with open_repository(path) as repo:
        for i in range(40):
            put(repo, f'image-{i}', noise(33000, i))
        assert len(os.listdir(path / 'groups')) >= 40
        for i in range(40):
            assert read_all(repo, f'image-{i}') == noise(33000, i)
        put(repo, 'all', b''.join(noise(33000, i) for i in range(40)))
        assert read_all(repo, 'all') == b''.join(
            noise(33000, i) for i in range(40))
        count = sum(
            str(path) in os.readlink(f'/proc/self/fd/{fd}')
            for fd in os.listdir('/proc/self/fd')
            if os.path.lexists(f'/proc/self/fd/{fd}'))
        assert count < 200


def test_two_threads_in_one_transaction(large):
    pieces = [noise(4096 * 50, i) for i in range(60)]
    with large.begin('image') as transaction:
        def write(some):
            for piece in some:
                transaction.write(piece)
        threads = [threading.Thread(target=write, args=(pieces[i::3],))
                   for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        transaction.commit()
    data = read_all(large, 'image')
    found = [data[i:i + 4096 * 50] for i in range(0, len(data), 4096 * 50)]
    assert sorted(found) == sorted(pieces)
    # Each thread's own are in its order.
    for i in range(3):
        mine = [piece for piece in found if piece in pieces[i::3]]
        assert mine == pieces[i::3]


def test_abort_while_another_thread_writes(large):
    for i in range(5):
        transaction = large.begin('image')
        started = threading.Event()
        outcomes = []

        def write(transaction=transaction, started=started,
                  outcomes=outcomes):
            try:
                for n in range(1000):
                    transaction.write(noise(MIB // 4, n % 50))
                    started.set()
            except exceptions.ClosedError:
                outcomes.append('closed')
        thread = threading.Thread(target=write)
        thread.start()
        assert started.wait(60)
        transaction.abort()
        thread.join(60)
        assert outcomes == ['closed']
    assert large.images() == []
    assert os.listdir(os.path.join(large.path, 'spool')) == []


def test_many_threads_store_and_read(path):
    failures = []

    def work(repo, n):
        try:
            for i in range(4):
                data = mixture(60000 + n * 777, seed=i * 3 + n % 2, unit=512)
                put(repo, f'image-{n}-{i}', data)
                assert read_all(repo, f'image-{n}-{i}') == data
                if i % 2:
                    repo.delete(f'image-{n}-{i}')
        except BaseException as e:
            failures.append(e)
            raise
    with open_repository(path) as repo:
        threads = [threading.Thread(target=work, args=(repo, n))
                   for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not failures
        assert repo.images() == sorted(
            f'image-{n}-{i}' for n in range(6) for i in (0, 2))
    repositories.need_clean(path)


# -- deleting -----------------------------------------------------------------

def test_delete_while_reading(repo):
    data = mixture(100000)
    put(repo, 'image', data)
    with repo.open_image('image') as image:
        assert image.read(1000) == data[:1000]
        repo.delete('image')
        with pytest.raises(exceptions.ImageNotFound):
            repo.stat('image')
        with pytest.raises(exceptions.ImageNotFound):
            repo.delete('image')
        assert repo.images() == []
        assert image.read() == data
        other = noise(100000, 7)
        put(repo, 'image', other)
        assert image.read() == data
        assert read_all(repo, 'image') == other


def test_delete_of_another_upload(repo):
    first = put(repo, 'image', b'first')
    repo.delete('image', upload_id=first.upload_id)
    second = put(repo, 'image', b'second')
    assert second.upload_id != first.upload_id
    for call in (repo.delete, repo.open_image):
        with pytest.raises(exceptions.ImageNotFound, match='another upload'):
            call('image', upload_id=first.upload_id)
    assert read_all(repo, 'image') == b'second'
    with repo.open_image('image', upload_id=second.upload_id) as image:
        assert image.read() == b'second'
    repo.delete('image', upload_id=second.upload_id)
    assert repo.images() == []


def test_delete_at_once_from_several_threads(repo, path):
    for i in range(10):
        put(repo, 'image', noise(1000, i))
        outcomes = []

        def delete(outcomes=outcomes):
            try:
                repo.delete('image')
                outcomes.append(True)
            except exceptions.ImageNotFound:
                outcomes.append(False)
        threads = [threading.Thread(target=delete) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(outcomes) == [False] * 3 + [True]
    assert len(repositories.spool(path, 'D')) == 10


def test_transaction_whose_upload_id_is_the_recipes(repo):
    with repo.begin('image') as transaction:
        upload_id = transaction.upload_id
        stat = transaction.commit()
    assert stat.upload_id == upload_id == repo.stat('image').upload_id
    assert len(upload_id) == 32


# -- reading ------------------------------------------------------------------

def test_readinto(repo):
    data = mixture(20000)
    put(repo, 'image', data)
    with repo.open_image('image') as image:
        buffer = bytearray(b'\xee' * 100)
        assert image.readinto(buffer, 19990) == 10
        assert buffer == data[19990:] + b'\xee' * 90
        assert image.readinto(buffer, 20000) == 0
        assert image.readinto(buffer, 1 << 62) == 0
        assert image.readinto(bytearray(), 0) == 0
        with pytest.raises(exceptions.InvalidParameter, match='negative'):
            image.readinto(buffer, -1)
        with pytest.raises((TypeError, BufferError)):
            image.readinto(b'constant', 0)
        assert image.read(0) == b''
        assert image.read(5, 1 << 62) == b''
        assert list(image.pieces(5, 0)) == []
        assert b''.join(image.pieces(5, 10)) == data[5:15]
        assert b''.join(image.pieces(19995, 10 ** 9)) == data[19995:]


def test_close_while_another_thread_reads(large):
    data = noise(24 * MIB)
    put(large, 'image', data)
    for _ in range(5):
        image = large.open_image('image')
        results = []
        started = threading.Event()

        def read(image=image, results=results, started=started):
            started.set()
            try:
                while True:
                    results.append(image.read() == data)
            except exceptions.ClosedError:
                results.append('closed')
        thread = threading.Thread(target=read)
        thread.start()
        started.wait(60)
        image.close()
        thread.join(60)
        assert results[-1] == 'closed'
        assert all(results)


def test_extents_of_a_long_recipe(repo):
    """Several pages of extents, each found by its offset."""
    data = b''.join(noise(512, i) + bytes(512) for i in range(300))
    put(repo, 'image', data)
    with repo.open_image('image') as image:
        extents = list(image.extents())
        assert image.stat.extents == len(extents) == 600
        offset = 0
        for extent in extents:
            assert extent.offset == offset
            offset += extent.length
        rng = random.Random(1)
        for _ in range(100):
            start = rng.randrange(len(data))
            assert image.read(700, start) == data[start:start + 700]
    stat = repo.stat('image')
    assert stat.zero_bytes == 300 * 512
    assert stat.new_bytes == 300 * 512
    assert 0 < stat.created


# -- memory -------------------------------------------------------------------

ZEROS = textwrap.dedent("""
    import sys
    from tests.support import repositories
    def peak():
        with open('/proc/self/status') as f:
            return next(int(l.split()[1]) for l in f if l[:6] == 'VmHWM:')
    path, gib = sys.argv[1], int(sys.argv[2])
    piece = bytearray(64 << 20)
    for i in range(0, len(piece), 4096):
        piece[i] = 0
    with repositories.open_repository(path) as repo:
        before = peak()
        with repo.begin('zeros') as transaction:
            for _ in range(gib * 16):
                transaction.write(piece)
            stat = transaction.commit()
        grown = peak() - before
        assert stat.size == stat.zero_bytes == gib << 30, stat
        assert stat.extents == 1
        with repo.open_image('zeros') as image:
            assert image.read(100, (gib << 30) - 50) == bytes(50)
    print(grown)
""")

DATA = textwrap.dedent("""
    import random, sys
    from tests.support import repositories
    def peak():
        with open('/proc/self/status') as f:
            return next(int(l.split()[1]) for l in f if l[:6] == 'VmHWM:')
    path, mib = sys.argv[1], int(sys.argv[2])
    piece = bytearray(random.Random(1).randbytes(1 << 20))
    with repositories.open_repository(path) as repo:
        before = peak()
        with repo.begin('data') as transaction:
            for i in range(mib):
                for at in range(0, len(piece), 4096):
                    piece[at:at + 4] = i.to_bytes(4, 'little')
                transaction.write(piece)
            transaction.commit()
        with repo.open_image('data') as image:
            for at in range(0, image.size, 1 << 20):
                image.readinto(piece, at)
        print(peak() - before)
""")


def run_python(code, *arguments):
    result = subprocess.run(
        [sys.executable, '-c', code, *map(str, arguments)], text=True,
        capture_output=True, timeout=100, env={
            **os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)})
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_64_gib_of_zeros_in_bounded_memory(tmp_path):
    path = create(tmp_path / 'r')
    grown = int(run_python(ZEROS, path, 64))
    assert grown < 64 * 1024  # KiB
    repositories.need_clean(path)


def test_data_in_bounded_memory(tmp_path):
    """An upload and a download take less than 64 MiB beside the filter."""
    path = create(tmp_path / 'r')
    assert int(run_python(DATA, path, 400)) < 64 * 1024


# -- the filter ---------------------------------------------------------------

def filter_file(path):
    file, = (path.parent / f'{path.name}-filter').glob('*.filter')
    return file


def test_filter_that_was_deleted(path):
    data = noise(512 * 200)
    with open_repository(path) as repo:
        put(repo, 'first', data)
        filter_file(path).unlink()
        # Those that have it open go on.
        assert put(repo, 'second', data).new_bytes == 0
    with open_repository(path) as repo:
        # It is made anew before something is stored.
        assert put(repo, 'third', data).new_bytes == 0
        assert repo.statistics()['filter_complete']


@pytest.mark.parametrize('content', [b'', b'nonsense' * 1000, bytes(1 << 20)])
def test_filter_that_is_something_else(path, content):
    data = noise(512 * 100)
    with open_repository(path) as repo:
        put(repo, 'first', data)
    filter_file(path).write_bytes(content)
    with open_repository(path) as repo:
        assert put(repo, 'second', data).new_bytes == 0
        assert read_all(repo, 'second') == data


def test_filter_of_lies(path):
    """Hints to anywhere cost compares; what is stored is right."""
    data = mixture(512 * 300, unit=512)
    with open_repository(path) as repo:
        put(repo, 'first', data)
    file = filter_file(path)
    content = bytearray(file.read_bytes())
    content[4096:] = noise(len(content) - 4096, 3)
    file.write_bytes(content)
    with open_repository(path) as repo:
        for i in range(3):
            put(repo, f'image-{i}', data + noise(30000, i))
            assert read_all(repo, f'image-{i}') == data + noise(30000, i)
        assert repo.statistics()['false_candidates'] >= 0
    repositories.need_clean(path)


def test_filter_of_many_groups_is_rebuilt_in_the_background(path):
    data = noise(512 * 64 * 80)
    with open_repository(path) as repo:
        put(repo, 'first', data)
    assert len(os.listdir(path / 'groups')) > 64
    filter_file(path).unlink()
    with open_repository(path) as repo:
        put(repo, 'image', b'x')
        repositories.eventually(
            lambda: repo.statistics()['filter_complete'])
        assert put(repo, 'second', data[-512 * 64:]).new_bytes == 0


def test_large_filter_is_not_waited_for(path, monkeypatch):
    """It is made while images are stored, and knows them all in the end."""
    monkeypatch.setattr(repository, '_MADE_AT_ONCE', 0)
    go = threading.Event()

    class Handle:
        def __init__(self, engine):
            self.engine = engine

        def attach_filter(self, *args):
            assert go.wait(60)
            self.engine.attach_filter(*args)

        def __getattr__(self, name):
            return getattr(self.engine, name)

    first, second, third = (noise(512 * 100, n) for n in range(3))
    with open_repository(path) as repo:
        put(repo, 'before', first)
    filter_file(path).unlink()
    with open_repository(path) as repo:
        repo._engine = Handle(repo._engine)
        put(repo, 'meanwhile', second)
        with repo.begin('under-way') as transaction:
            transaction.write(third[:512 * 70])
            assert repo.statistics()['filter_bytes'] == 0
            go.set()
            repositories.eventually(
                lambda: repo.statistics()['filter_complete'])
            transaction.write(third[512 * 70:])
            transaction.commit()
        repo.delete('under-way')
        for number, data in enumerate((first, second, third)):
            assert put(repo, f'again-{number}', data).new_bytes == 0
    # One that is there is opened at once.
    with open_repository(path) as repo:
        put(repo, 'image', b'x')
        assert repo.statistics()['filter_bytes'] > 0


def test_closing_while_a_large_filter_is_made(path, monkeypatch):
    monkeypatch.setattr(repository, '_MADE_AT_ONCE', 0)
    for number in range(20):
        with open_repository(path) as repo:
            put(repo, f'image-{number}', noise(5000, number))
        filter_file(path).unlink(missing_ok=True)


def test_rebuild_filter(path):
    data = noise(512 * 64 * 2)
    with open_repository(path) as repo:
        put(repo, 'first', data)
        assert repo.statistics()['filter_hints'] == 128
        file = filter_file(path)
        with open(file, 'r+b') as f:
            f.seek(4096)
            f.write(bytes(file.stat().st_size - 4096))
        assert put(repo, 'missed', data).new_bytes == len(data)
        seen = []
        repo.rebuild_filter(progress=lambda *done: seen.append(done))
        assert seen[-1] == (4, 4)
        assert repo.statistics()['filter_complete']
        assert put(repo, 'found', data).new_bytes == 0


def test_filter_budget(tmp_path):
    """More blocks than hints have room: the sampling level rises."""
    path = create(tmp_path / 'r', block_size=512)
    data = noise(512 * 150000)
    with open_repository(path, codec='none') as repo:
        put(repo, 'first', data)
        figures = repo.statistics()
        assert figures['filter_bytes'] <= MIB
        assert figures['filter_places'] * 8 <= MIB
        assert figures['filter_level'] >= 1
        assert figures['filter_hints'] <= figures['filter_places']
        # Whole stores are loaded, so sampling loses next to nothing.
        again = put(repo, 'again', data)
        assert again.new_bytes < len(data) / 50
        assert filter_file(path).stat().st_size <= MIB


def test_filter_without_room(tmp_path):
    path = create(tmp_path / 'r')
    data = noise(100000)
    with repositories.small_disk(tmp_path / 'disk', 1 << 18) as disk:
        with open_repository(path, filter_dir=str(disk)) as repo:
            with pytest.warns(RuntimeWarning, match='no fingerprint filter'):
                put(repo, 'image', data)
            put(repo, 'again', data)
            assert read_all(repo, 'image') == data
            assert repo.statistics()['filter_bytes'] == 0
            repo.rebuild_filter()
            repo.delete('image')
        assert os.listdir(disk) == []


def test_filter_that_may_not_be_made(public_tmp):
    closed = public_tmp / 'closed'
    closed.mkdir(mode=0o755)
    path = create(public_tmp / 'r')
    for directory, _, files in os.walk(public_tmp / 'r'):
        for name in [*files, '.']:
            os.chown(os.path.join(directory, name), NOBODY, NOBODY)

    def attempt():
        with open_repository(path, filter_dir=str(closed)) as repo:
            with pytest.warns(RuntimeWarning, match='no fingerprint filter'):
                put(repo, 'image', noise(100000))
            return read_all(repo, 'image') == noise(100000)
    assert repositories.in_child(repositories.as_user(NOBODY, attempt))


@pytest.fixture
def shm(public_tmp, monkeypatch):
    """A directory like /dev/shm, in which all users may make theirs."""
    path = public_tmp / 'shm'
    path.mkdir()
    path.chmod(0o1777)
    monkeypatch.setattr(repository, '_SHM', str(path))
    monkeypatch.setattr(repository, '_FILTER_AGAIN', 0.0)
    return path


def test_somebody_else_made_the_filters_directory(shm, tmp_path):
    """It is told, with what to do; and then it needs no new process."""
    path = create(tmp_path / 'r')
    taken = shm / f'glance-dedup-{os.geteuid()}'
    taken.mkdir()
    os.chown(taken, NOBODY, NOBODY)
    data = noise(512 * 200)
    with repository.Repository(path) as repo:
        assert repo.filter_error is None
        with pytest.warns(RuntimeWarning, match='no fingerprint filter'):
            put(repo, 'image', data)
        for word in (str(taken), f'uid {NOBODY}', 'tmpfiles'):
            assert word in repo.filter_error
        with warnings.catch_warnings():
            warnings.simplefilter('error')      # it was told
            put(repo, 'again', b'x')
            assert repo.statistics()['filter_bytes'] == 0
        taken.rmdir()
        assert put(repo, 'third', data).new_bytes == 0
        assert repo.filter_error is None
        assert repo.statistics()['filter_complete']


def test_whoever_only_reads_knows_of_it(shm, tmp_path):
    """The daemon makes no filter, and tells that glance-api has none."""
    path = create(tmp_path / 'r')
    taken = shm / f'glance-dedup-{os.geteuid()}'
    os.symlink('/', taken)
    with repository.Repository(path) as repo:
        with pytest.warns(RuntimeWarning, match='no fingerprint filter'):
            repo.statistics()
        assert str(taken) in repo.filter_error
        taken.unlink()
        repo.statistics()
        assert repo.filter_error is None
        assert list(taken.iterdir()) == []


def test_whoever_only_reads_sees_that_there_is_no_room(shm, tmp_path):
    path = create(tmp_path / 'r')
    with repository.Repository(path, filter_mib=1 << 20) as repo:
        repo.statistics()
        assert 'MiB' in repo.filter_error
        assert str(shm) in repo.filter_error
    with repository.Repository(path, filter_mib=1) as repo:
        repo.statistics()
        assert repo.filter_error is None


def test_a_directory_made_at_boot_is_taken(shm, tmp_path):
    """If it is this user's; an own one has the user's number."""
    path = create(tmp_path / 'r')
    prepared = shm / f'glance-dedup-{pwd.getpwuid(os.geteuid()).pw_name}'
    own = shm / f'glance-dedup-{os.geteuid()}'
    prepared.mkdir(mode=0o700)
    with repository.Repository(path, filter_mib=1) as repo:
        put(repo, 'image', b'x')
    assert len(list(prepared.iterdir())) == 1 and not own.exists()
    for change in (lambda: prepared.chmod(0o777),
                   lambda: (prepared.chmod(0o700),
                            os.chown(prepared, NOBODY, NOBODY))):
        change()
        shutil.rmtree(own, ignore_errors=True)
        with repository.Repository(path, filter_mib=1) as repo:
            put(repo, secrets.token_hex(4), b'x')
            assert repo.filter_error is None
        assert len(list(own.iterdir())) == 1


@pytest.mark.parametrize('name', ('glance-dedup', 'glance-dedup-cache'))
@pytest.mark.parametrize('taken', (False, True))
def test_tmpfiles(shm, name, taken):
    """What systemd makes at boot; also of a directory that is taken."""
    text = (TOP / 'etc' / 'tmpfiles.d' / f'{name}.conf').read_text()
    line = text.splitlines()[-1]
    kind, where, mode, user, group, age = line.split()
    assert (kind, mode, age) == ('d', '0700', '-')
    # The unit's user, for whom the directory is.
    unit = {'glance-dedup': 'dedupd', 'glance-dedup-cache': 'dedupd-cache'}
    service = (TOP / 'etc' / f'{unit[name]}.service').read_text()
    assert f'User={user}\nGroup={group}\n' in service
    assert where == f'/dev/shm/glance-dedup-{user}'
    made = shm / f'glance-dedup-{user}'
    if taken:
        made.mkdir(mode=0o777)
        os.chown(made, NOBODY, NOBODY)
    conf = shm.parent / 'test.conf'
    conf.write_text(f'd {made} {mode} 12345 12345 -\n')
    subprocess.run(['systemd-tmpfiles', '--create', conf], check=True,
                   timeout=60)
    found = os.lstat(made)
    assert stat.S_ISDIR(found.st_mode)
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (
        12345, 12345, 0o700)


def test_filter_is_private(path):
    with open_repository(path) as repo:
        put(repo, 'first', noise(5000))
    file = filter_file(path)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o666)
    with open_repository(path) as repo:
        put(repo, 'image', noise(5000))
    assert filter_file(path).stat().st_mode & 0o777 == 0o600


def test_a_process_id_used_again(path):
    """What a fork has disowned stays so, whatever the process's number."""
    repo = open_repository(path)
    put(repo, 'image', noise(5000))
    image = repo.open_image('image')
    transaction = repo.begin('other')
    _engine.after_fork()
    for call in (lambda: image.read(), lambda: transaction.write(b'x'),
                 transaction.commit, lambda: repo.handle().statistics()):
        with pytest.raises(exceptions.ClosedError, match='before a fork'):
            call()
    transaction.abort()
    assert len(os.listdir(path / 'spool')) == 2  # the other's, untouched


def test_nobody_rebuilds_before_the_filter_is_there(path):
    """Without a filter there would seem to be nothing left to rebuild."""
    order, opening, go = [], threading.Event(), threading.Event()

    class Handle:
        def __init__(self, engine):
            self.engine = engine

        def attach_filter(self, *args):
            opening.set()
            assert go.wait(60)
            self.engine.attach_filter(*args)
            order.append('attached')

        def rebuild_filter(self, *args):
            order.append('rebuilt')
            return self.engine.rebuild_filter(*args)

        def __getattr__(self, name):
            return getattr(self.engine, name)

    with open_repository(path) as repo:
        repo._engine = Handle(repo._engine)
        first, second = (
            threading.Thread(target=put, args=(repo, name, noise(5000)))
            for name in ('first', 'second'))
        first.start()
        assert opening.wait(60)
        second.start()
        second.join(0.3)
        go.set()
        for thread in (first, second):
            thread.join(60)
        assert order[0] == 'attached' and 'rebuilt' in order


def test_pieces_of_no_bytes(path):
    with open_repository(path) as repo:
        put(repo, 'image', noise(5000))
        with repo.open_image('image') as image:
            with pytest.raises(exceptions.InvalidParameter, match='piece'):
                next(image.pieces(piece=0))


# -- groups -------------------------------------------------------------------

def test_groups_fill_up(repo, path):
    data = noise(512 * 1000)
    stat = put(repo, 'image', data)
    assert stat.new_bytes == len(data)
    assert len(os.listdir(path / 'groups')) == 16
    assert repositories.Group(path, 1).record()[2] == 64
    assert repositories.Group(path, 16).record()[2] == 1000 % 64
    # The next one goes on where there is room.
    more = noise(512 * 20, 2)
    put(repo, 'more', more)
    assert len(os.listdir(path / 'groups')) == 16
    assert repositories.Group(path, 16).record()[2] == 1000 % 64 + 20
    assert read_all(repo, 'image') == data
    assert read_all(repo, 'more') == more
    repositories.need_clean(path)


def test_several_handles_in_one_process(path):
    data = mixture(100000, unit=512)
    with open_repository(path) as one, open_repository(path) as two:
        first, second = one.begin('a'), two.begin('b')
        # Each in a group of its own: the lease is the handle's.
        for i in range(3):
            first.write(noise(3000, i))
            second.write(noise(3000, i + 10))
        first.commit()
        second.commit()
        assert one.images() == two.images() == ['a', 'b']
        assert read_all(two, 'a') == b''.join(noise(3000, i)
                                              for i in range(3))
        put(one, 'c', data)
        assert put(two, 'd', data).new_bytes == 0
        one.delete('c')
        with pytest.raises(exceptions.ImageNotFound):
            two.open_image('c')
        assert read_all(two, 'd') == data
    repositories.need_clean(path)


def test_statistics(path):
    with open_repository(path) as repo:
        put(repo, 'first', noise(512 * 10) + bytes(512 * 7))
        put(repo, 'second', noise(512 * 10))
        figures = repo.statistics()
        assert figures['blocks'] == 20
        assert figures['zero_blocks'] == 7
        assert figures['hits'] == figures['misses'] == 10
        assert figures['candidates'] >= 1
        assert figures['cold_loads'] == 1
        assert figures['sync_points'] == 1
        assert figures['compares'] == figures['lock_refusals'] == 0
        assert figures['bytes_read'] == 0
        assert figures['filter_hints'] == 10
        assert all(isinstance(value, int) for value in figures.values())
        read_all(repo, 'second')
        assert repo.statistics()['bytes_read'] == 5120
    with open_repository(path) as repo:
        assert repo.statistics()['blocks'] == 0


# -- a full disk --------------------------------------------------------------

@pytest.mark.parametrize('codec', ['none', 'lz4'])
def test_disk_full_in_the_middle(tmp_path, codec):
    with repositories.small_disk(tmp_path / 'disk', 12 * MIB) as disk:
        path = create(disk / 'r', group_slots=512)
        with open_repository(path, codec=codec,
                             filter_dir=str(tmp_path / 'filter')) as repo:
            put(repo, 'first', noise(2 * MIB))
            spool = os.listdir(path / 'spool')
            for attempt in range(3):
                with pytest.raises(exceptions.NoSpaceError) as info:
                    repo.put('large', io.BytesIO(noise(24 * MIB, attempt)))
                assert info.value.errno == 28
                assert repo.images() == ['first']
                assert os.listdir(path / 'spool') == spool
            assert read_all(repo, 'first') == noise(2 * MIB)
            # Deleting and small uploads go on, in this process ...
            put(repo, 'small', b'small')
            assert read_all(repo, 'small') == b'small'
            repo.delete('first')
        # ... and in the next.
        with open_repository(path, codec=codec,
                             filter_dir=str(tmp_path / 'filter')) as repo:
            put(repo, 'other', b'other')
            repo.delete('small')
            assert repo.images() == ['other']
            assert read_all(repo, 'other') == b'other'
        repositories.need_clean(path)


def test_delete_on_a_disk_that_is_quite_full(tmp_path):
    with repositories.small_disk(tmp_path / 'disk', 4 * MIB) as disk:
        path = create(disk / 'r', group_slots=64)
        with open_repository(path,
                             filter_dir=str(tmp_path / 'filter')) as repo:
            put(repo, 'image', noise(MIB))
            filling = repositories.fill_disk(disk)
            assert read_all(repo, 'image') == noise(MIB)
            with pytest.raises(exceptions.NoSpaceError):
                put(repo, 'other', noise(MIB, 2))
            repo.delete('image')
            assert repo.images() == []
            filling.unlink()
            put(repo, 'other', noise(MIB, 2))
            assert read_all(repo, 'other') == noise(MIB, 2)
        repositories.need_clean(path)


# -- fork ---------------------------------------------------------------------

def files_open_in(path):
    found = []
    for fd in os.listdir('/proc/self/fd'):
        try:
            target = os.readlink(f'/proc/self/fd/{fd}')
        except OSError:
            continue
        if str(path) in target:
            found.append(target)
    return sorted(found)


def test_fork_with_everything_open(large):
    """The child opens anew; the parent's transaction is not disturbed."""
    path = large.path
    data = mixture(3 * MIB)
    put(large, 'image', data)
    image = large.open_image('image')
    transaction = large.begin('parent')
    for i in range(13):
        transaction.write(noise(MIB, i))
    other = open_repository(path)
    put(other, 'of-other', noise(5000, 77))

    def child():
        nonlocal image, transaction
        # Nothing was inherited, not even the filter's.
        inherited = files_open_in(path)
        for call in (lambda: transaction.write(b'x'), transaction.commit,
                     image.read, lambda: image.readinto(bytearray(5)),
                     lambda: list(image.extents())):
            with pytest.raises(exceptions.ClosedError):
                call()
        transaction.abort()
        image.close()
        assert read_all(large, 'image') == data
        mine = large.begin('mine')
        mine.write(noise(MIB, 60))
        # Now that the numbers of the descriptors are used again.
        del image, transaction
        gc.collect()
        mine.commit()
        assert read_all(large, 'mine') == noise(MIB, 60)
        stat = put(large, 'child', data + noise(MIB, 50))
        assert stat.new_bytes == MIB
        assert read_all(large, 'child') == data + noise(MIB, 50)
        assert read_all(other, 'of-other') == noise(5000, 77)
        large.delete('of-other')
        large.close()
        return inherited
    assert repositories.in_child(child) == []
    transaction.write(noise(MIB, 13))
    transaction.commit()
    assert read_all(large, 'parent') == b''.join(
        noise(MIB, i) for i in range(14))
    assert image.read() == data
    assert read_all(large, 'child') == data + noise(MIB, 50)
    assert large.images() == ['child', 'image', 'mine', 'parent']
    image.close()
    other.close()
    repositories.need_clean(path)


@pytest.mark.parametrize('what', ['image', 'transaction'])
def test_fork_with_a_forgotten_repository(path, what):
    """An image or a transaction is all that is left of the handle."""
    with open_repository(path) as repo:
        put(repo, 'image', b'content')
    if what == 'image':
        left = open_repository(path).open_image('image')
    else:
        left = open_repository(path).begin('other')
    gc.collect()
    assert len(files_open_in(path)) >= 2
    assert repositories.in_child(lambda: files_open_in(path)) == []
    if what == 'image':
        assert left.read() == b'content'
        left.close()
    else:
        left.commit()
        with open_repository(path) as repo:
            assert repo.images() == ['image', 'other']


def test_fork_of_a_fork(repo):
    put(repo, 'parent', noise(5000))

    def grandchild():
        put(repo, 'grandchild', noise(5000, 3))
        return read_all(repo, 'child') == noise(5000, 2)

    def child():
        put(repo, 'child', noise(5000, 2))
        return repositories.in_child(grandchild)
    assert repositories.in_child(child)
    assert repo.images() == ['child', 'grandchild', 'parent']


def test_parent_dies_and_its_locks_with_it(path):
    """A lock that a child inherited would outlive its owner."""
    reading, writing = os.pipe()

    def parent():
        repo = open_repository(path)
        put(repo, 'image', noise(5000, 5))
        image = repo.open_image('image')
        transaction = repo.begin('unfinished')
        transaction.write(noise(512 * 20000))
        held = repositories.group_lock_held(path, 1)
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, b'%d\n' % os.getpid())
                threading.Event().wait(100)
            finally:
                os._exit(0)
        assert image.size
        return held, child
    held, child = repositories.in_child(parent)
    try:
        assert held == 'exclusive' or held is None
        assert int(os.read(reading, 100)) == child
        os.kill(child, 0)  # it lives
        groups = len(os.listdir(path / 'groups'))
        assert groups > 1
        for group in range(1, groups + 1):
            assert repositories.group_lock_held(path, group) is None
            assert repositories.group_lock_held(
                path, repositories.SHARE_BYTE + group) is None
        for name in repositories.spool(path):
            assert repositories.lock_held(path / 'spool' / name, 0) is None
        assert repositories.lock_held(path / 'images' / 'image', 1) is None
    finally:
        os.kill(child, 9)
        os.close(reading)
        os.close(writing)


def test_fork_while_another_thread_writes(large):
    """The transaction's own lock is held at the fork; the child refuses."""
    transaction = large.begin('image')
    ending = threading.Event()

    # So long that the fork is in the middle of it.
    piece = noise(48 * MIB)

    def write():
        while not ending.is_set():
            transaction.write(piece)
    thread = threading.Thread(target=write)
    thread.start()

    def child():
        with pytest.raises(exceptions.ClosedError):
            transaction.write(b'x')
        with pytest.raises(exceptions.ClosedError):
            transaction.commit()
        transaction.abort()
        put(large, f'child-{os.getpid()}', noise(100000))
        return True
    try:
        for _ in range(5):
            assert repositories.in_child(child, timeout=20)
    finally:
        ending.set()
        thread.join(60)
    transaction.commit()
    assert large.stat('image').size % MIB == 0


def test_exec_inherits_nothing(repo, path):
    image = repo.open_image(put(repo, 'image', b'x').image_id)
    transaction = repo.begin('other')
    result = subprocess.run(
        ['ls', '-l', '/proc/self/fd'], close_fds=False, text=True,
        capture_output=True, timeout=30)
    assert result.returncode == 0
    assert str(path) not in result.stdout
    image.close()
    transaction.abort()


def test_warnings_are_not_usual(path):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with open_repository(path) as repo:
            put(repo, 'image', b'x')
