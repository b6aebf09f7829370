# SPDX-License-Identifier: Apache-2.0

"""The API: storing, reading and deleting images."""

import io
import itertools
import os
import random
import subprocess
import sys
import textwrap
import threading

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from tests.support import repositories
from tests.support.repositories import create
from tests.support.repositories import mixture
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.repository import fixtures

MIB = 1 << 20

path = fixtures.path
repo = fixtures.repo
large = fixtures.large


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
    # block size, segment size, codec, level, fingerprint, verify, threads
    (512, 512, 'none', 0, 'sha256', 'fingerprint', 0),
    (512, 4096, 'lz4', 0, 'blake2s256', 'fingerprint', 2),
    (512, 65536, 'zstd', 1, 'weak-8', 'bytes', 1),
    (4096, 4096, 'lz4', 0, 'sha1', 'bytes', 2),
    (4096, 65536, 'none', 0, 'xxh3-128', 'bytes', 2),
    (4096, 65536, 'zstd', 0, 'sha512-256', 'fingerprint', 2),
    (4096, 1 << 20, 'lz4', 0, 'sha3-256', 'fingerprint', 1),
    (65536, 65536, 'zstd', 19, 'sha512', 'fingerprint', 2),
    (65536, 1 << 20, 'none', 0, 'sha256', 'bytes', 0),
]


@pytest.mark.parametrize(
    'block, segment, codec, level, fingerprint, verify, threads', VARIANTS)
def test_sizes(tmp_path, block, segment, codec, level, fingerprint, verify,
               threads):
    """Every length around the limits comes back, whole and in ranges."""
    path = create(tmp_path / 'r', block_size=block, segment_size=segment,
                  group_slots=64, fingerprint=fingerprint, verify=verify)
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
        # Open the repository again: nothing comes from the writer's memory.
    with open_repository(path, **options) as repo:
        assert repo.images() == sorted(contents)
        for image_id, data in contents.items():
            with repo.open_image(image_id) as image:
                assert image.size == len(data)
                assert b''.join(image.pieces(piece=70001)) == data
                for _ in range(10):
                    start = rng.randrange(len(data) + 2)
                    length = rng.randrange(2 * block)
                    found = data[start:start + length]
                    assert image.read(length, start) == found
                    assert not (image.is_zeros(length, start) and any(found))
                extents = list(image.extents())
                assert sum(e.length for e in extents) == len(data)
                assert sum(e.length for e in extents if e.kind == 'zeros'
                           ) == image.stat.zero_bytes
                assert len(extents) == image.stat.extents
        # Storing an image again adds no new blocks.
        for image_id, data in list(contents.items())[::5]:
            put(repo, f'{image_id}-again', data)
            assert read_all(repo, f'{image_id}-again') == data
    if fingerprint != 'weak-8':
        repositories.require_clean(path)


def test_comparison_by_value_tells_equal_fingerprints_apart(tmp_path):
    """Only bytes distinguish 3000 blocks with 256 fingerprints."""
    path = create(tmp_path / 'r', block_size=512, group_slots=512,
                  fingerprint='weak-8', verify='bytes')
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
    # Each codec's content is readable with the default settings.
    with open_repository(path) as repo:
        for codec in stored:
            assert read_all(repo, codec) == codec.encode() + text


@pytest.mark.parametrize('codec', ['lz4', 'zstd'])
def test_little_is_lost_where_compression_begins_to_pay(tmp_path, codec):
    """At most seven segments of 64 KiB stay plain when compression pays."""
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
    """Adaptive compression may store segments plain; the content is right."""
    text = b''.join(b'the same line again, %d\n' % i for i in range(400000))
    path = create(tmp_path / 'r')
    with open_repository(path, codec='zstd',
                         adaptive_compression=True) as repo:
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
    """With direct I/O the files are the same, to the byte at their end."""
    sizes = []
    for direct_io in ('off', 'on', 'auto'):
        path = create(tmp_path / f'direct-{direct_io}', verify='bytes')
        with open_repository(path, direct_io=direct_io,
                             threads=threads) as repo:
            # Half of the last content repeats the data just before.
            data = [noise(5 * MIB + 100, 1), noise(7777, 2) + noise(9000, 1),
                    2 * noise(2 * MIB, 4)]
            for number, content in enumerate(data):
                put(repo, str(number), content)
                with repo.begin('given-up') as transaction:
                    transaction.write(noise(3 * MIB + 5, 3))
            assert repo.stat('2').new_bytes == 2 * MIB
            for number, content in enumerate(data):
                assert read_all(repo, str(number)) == content
        repositories.require_clean(path)
        sizes.append({name: os.stat(path / 'groups' / name).st_size
                      for name in os.listdir(path / 'groups')})
    assert sizes[0] == sizes[1] == sizes[2]


def test_no_other_way_beside_the_page_cache(tmp_path):
    path = create(tmp_path / 'repository')
    with pytest.raises(exceptions.InvalidParameter,
                       match='choose off, on or auto'):
        open_repository(path, direct_io='sometimes')


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
    repositories.require_clean(large.path)


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
    """A buffer that is overwritten after write() does not change the image."""
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


def test_pieces_of_no_bytes(path):
    with open_repository(path) as repo:
        put(repo, 'image', noise(5000))
        with repo.open_image('image') as image:
            with pytest.raises(exceptions.InvalidParameter, match='piece'):
                next(image.pieces(piece=0))


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


def test_what_is_known_to_be_zeros(repo):
    """Ranges of zero blocks are recognized, at any offset and length."""
    data = noise(4096) + bytes(3 * 4096) + noise(4096) + bytes(100)
    put(repo, 'image', data)
    with repo.open_image('image') as image:
        for offset, length, zeros in (
                (4096, 3 * 4096, True), (5000, 100, True), (4096, 0, True),
                (4095, 2, False), (4 * 4096 - 1, 2, False), (0, 1, False),
                (0, len(data), False), (len(data), 5, True),
                (1 << 62, 1 << 62, True)):
            assert image.is_zeros(length, offset) == zeros
        for bad in ((-1, 0), (0, -1)):
            with pytest.raises(exceptions.InvalidParameter):
                image.is_zeros(*bad)


def test_extents_of_a_long_recipe(repo):
    """Extents in several pages are found by their offset."""
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


@pytest.mark.slow
def test_64_gib_of_zeros_in_bounded_memory(tmp_path):
    path = create(tmp_path / 'r')
    grown = int(run_python(ZEROS, path, 64))
    assert grown < 64 * 1024  # KiB
    repositories.require_clean(path)


def test_data_in_bounded_memory(tmp_path):
    """An upload and a download take less than 64 MiB besides the filter."""
    path = create(tmp_path / 'r')
    assert int(run_python(DATA, path, 400)) < 64 * 1024


@pytest.mark.parametrize('chunking', ['fixed', 'content-defined'])
def test_zeros_of_any_length(tmp_path, chunking):
    """They are cut as their bytes would be, and are not looked through."""
    path = repositories.create(tmp_path / 'repository', chunking=chunking)
    with repositories.open_repository(path) as repo:
        for seed in range(8):
            rng = random.Random(seed)
            parts = []
            with repo.begin(f'zeros-{seed}') as new:
                for number in range(rng.randrange(1, 12)):
                    length = rng.choice([1, 4095, 4096, 70000, 3 << 20])
                    if rng.random() < 0.5:
                        parts.append(bytes(length))
                        new.write_zeros(length)
                    else:
                        parts.append(noise(length, number))
                        new.write(parts[-1])
                found = new.commit()
            data = b''.join(parts)
            assert repositories.read_all(repo, f'zeros-{seed}') == data
            stored = repositories.put(repo, f'bytes-{seed}', data)
            assert stored.new_bytes == 0
            assert stored.zero_bytes == found.zero_bytes
        with repo.begin('long') as new:
            new.write(b'.')
            new.write_zeros((1 << 62) + 5)
            with pytest.raises(exceptions.InvalidParameter):
                new.write_zeros(1 << 63)
            assert new.commit().size == (1 << 62) + 6
