# SPDX-License-Identifier: Apache-2.0

"""The API serves pulls and the daemon's reads.

The test parses descriptions and frames by the HTTP reference alone, and with
nothing else an image goes from one repository to another.
"""

import array
import hashlib
import os
import resource
import struct
import threading

import lz4.block
import pytest
import xxhash

from dedupd.tasks import recompressor
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.client import wire
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import create
from tests.support.repositories import mixture
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.repository import fixtures

BLOCK = 512
MIB = 1 << 20

path = fixtures.path
repo = fixtures.repo


@pytest.fixture
def other(tmp_path):
    path = create(tmp_path / 'other', block_size=BLOCK, group_slots=128,
                  segment_size=8192)
    with open_repository(path) as repo:
        yield repo


# -- the wire format ----------------------------------------------------------

def described(image):
    """Return (offset, length, [(fingerprint, length), ...]) of each extent."""
    page = 0
    while data := image.describe(page):
        at = 0
        while at < len(data):
            offset, length, blocks, reserved = struct.unpack_from(
                '<QQII', data, at)
            assert reserved == 0
            at += 24
            yield offset, length, list(
                struct.iter_unpack('<32sI', data[at:at + 36 * blocks]))
            at += 36 * blocks
        assert at == len(data)
        page += 1


def unframed(frame):
    """Yield (offset in the image, bytes) of each range."""
    magic, codec, _, places, plain, stored, checksum = struct.unpack_from(
        '<4sBBHIIQ', frame)
    assert magic == b'GDFR'
    assert len(frame) == 24 + 16 * places + stored
    assert xxhash.xxh3_64_intdigest(frame[:16] + frame[24:]) == checksum
    data = frame[24 + 16 * places:]
    if codec == 1:
        data = lz4.block.decompress(data, uncompressed_size=plain)
    assert codec in (0, 1) and len(data) == plain
    for i in range(places):
        offset, start, length = struct.unpack_from('<QII', frame, 24 + 16 * i)
        assert start + length <= plain
        yield offset, data[start:start + length]


def received(image, ranges):
    """Return the data by offset, for all ranges."""
    places = {}
    while ranges:
        frames, end = image.frames(ranges)
        ranges = wire.rest_of(ranges, end)
        for frame in frames:
            for offset, data in unframed(frame):
                assert offset not in places and offset < end
                places[offset] = data
    return places


def packed(blocks):
    return (b''.join(fingerprint for fingerprint, _ in blocks),
            array.array('I', [length for _, length in blocks]).tobytes())


def pull(source, transaction):
    """Append the source's image; return the bytes that had to be fetched."""
    fetched = 0
    for offset, length, blocks in described(source):
        if not blocks:
            transaction.add_zeros(length)
            continue
        found = array.array('Q', transaction.find(*packed(blocks)))
        starts = [offset]
        for _, size in blocks:
            starts.append(starts[-1] + size)
        missing = {}
        for i, address in enumerate(found):
            if not address:
                missing |= received(source, [(starts[i], blocks[i][1])])
        for i, block in enumerate(blocks):
            if found[i]:
                transaction.add(*packed([block]),
                                array.array('Q', [found[i]]).tobytes())
            else:
                data = missing[starts[i]]
                assert hashlib.sha256(data).digest() == block[0]
                transaction.write(data)
                fetched += len(data)
    return fetched


# -- describing and sending ---------------------------------------------------

def test_describe(repo):
    data = mixture(400 * BLOCK + 77, unit=BLOCK)
    put(repo, 'a', data)
    with repo.open_image('a') as image:
        at = 0
        for offset, length, blocks in described(image):
            assert offset == at
            if not blocks:
                assert data[at:at + length] == bytes(length)
                at += length
            for fingerprint, size in blocks:
                assert (hashlib.sha256(data[at:at + size]).digest()
                        == fingerprint)
                at += size
            assert at == offset + length
        assert at == len(data)
        assert image.describe(1 << 40) == b''
        for page in (-1, 1 << 64):
            with pytest.raises(exceptions.InvalidParameter):
                image.describe(page)


def test_describe_an_empty_image(repo):
    put(repo, 'a', b'')
    with repo.open_image('a') as image:
        assert image.describe(0) == b''
        assert image.frames([]) == ([], 0)
        assert image.frames([(0, 0)]) == ([], 0)


def test_frames(repo):
    data = mixture(400 * BLOCK + 77, unit=BLOCK)
    put(repo, 'a', data)
    with repo.open_image('a') as image:
        ranges = [(0, 10 * BLOCK), (13 * BLOCK, BLOCK),
                  (100 * BLOCK, len(data) - 100 * BLOCK)]
        places = received(image, ranges)
        assert all(data[at:at + len(x)] == x for at, x in places.items())
        covered = bytearray(len(data))
        for at, x in places.items():
            covered[at:at + len(x)] = x
        for offset, length in ranges:
            end = offset + length
            assert covered[offset:end] == data[offset:end]
        assert max(places) + len(places[max(places)]) <= len(data)
        assert not any(10 * BLOCK <= at < 13 * BLOCK for at in places)


@pytest.mark.parametrize('ranges', [
    [(0, 100)], [(1, BLOCK)], [(0, BLOCK), (0, BLOCK)],
    [(BLOCK, BLOCK), (0, BLOCK)], [(0, 1 << 62)], [(-1, BLOCK)],
    [(0, -BLOCK)], [(0, 1 << 64)], [(1 << 70, 1)],
])
def test_frames_of_bad_ranges(repo, ranges):
    put(repo, 'a', noise(20 * BLOCK))
    with repo.open_image('a') as image:
        with pytest.raises(exceptions.InvalidParameter):
            image.frames(ranges)


@pytest.mark.parametrize('ranges', [[5], [(1,)], [(1, 2, 3)], ['ab'], None])
def test_frames_of_what_are_no_ranges(repo, ranges):
    put(repo, 'a', noise(20 * BLOCK))
    with repo.open_image('a') as image:
        with pytest.raises((TypeError, ValueError)):
            image._engine.frames(ranges)


def test_too_much_for_one_call(tmp_path):
    path = create(tmp_path / 'large')
    data = noise(4 * MIB + 4096)
    with open_repository(path) as repo:
        put(repo, 'a', data)
        with repo.open_image('a') as image:
            assert image.frames([(4096, 3 * MIB)])[1] == 4096 + 2 * MIB
            places = received(image, [(0, len(data))])
            assert b''.join(x for _, x in sorted(places.items())) == data


def test_closed(repo):
    put(repo, 'a', noise(BLOCK))
    image = repo.open_image('a')
    image.close()
    for call in (lambda: image.describe(0), lambda: image.frames([])):
        with pytest.raises(exceptions.ClosedError):
            call()
    transaction = repo.begin('b')
    transaction.abort()
    for call in (lambda: transaction.find(b'', b''),
                 lambda: transaction.add(b'', b'', b''),
                 lambda: transaction.add_zeros(1), transaction.keep):
        with pytest.raises(exceptions.ClosedError):
            call()


# -- pulling ------------------------------------------------------------------

def test_pull(repo, other):
    data = mixture(600 * BLOCK + 99, unit=BLOCK)
    put(repo, 'a', data)
    put(other, 'half', data[:300 * BLOCK])
    with repo.open_image('a') as source, other.begin('a') as transaction:
        fetched = pull(source, transaction)
        stat = transaction.commit()
        assert stat.size == len(data)
        assert stat.zero_bytes == source.stat.zero_bytes
    assert read_all(other, 'a') == data
    assert 0 < fetched < len(data) / 2
    # The blocks are all stored now, so another name fetches nothing.
    with repo.open_image('a') as source, other.begin('b') as transaction:
        assert pull(source, transaction) == 0
        assert transaction.commit().new_bytes == 0
    assert read_all(other, 'b') == data


def test_an_interrupted_pull_is_kept(repo, other):
    data = noise(200 * BLOCK)
    put(repo, 'a', data)
    with repo.open_image('a') as source:
        with other.begin('a') as transaction:
            transaction.write(data[:100 * BLOCK])
            transaction.keep()
            transaction.write(data[100 * BLOCK:150 * BLOCK])
        with other.begin('a') as transaction:
            assert pull(source, transaction) == 100 * BLOCK
            transaction.commit()
    assert read_all(other, 'a') == data


def test_addresses_of_another_transaction(repo):
    data = noise(4 * BLOCK)
    put(repo, 'a', data)
    with repo.open_image('a') as image:
        (_, _, blocks), = described(image)
    arguments = packed(blocks)
    with repo.begin('b') as transaction:
        addresses = transaction.find(*arguments)
        assert list(array.array('Q', addresses)) == [
            1 << 15 | i for i in range(4)]
    with repo.begin('b') as transaction:
        for wrong in (addresses, bytes(32), b'\xff' * 32):
            with pytest.raises(exceptions.InvalidParameter):
                transaction.add(*arguments, wrong)
        assert transaction.find(*arguments) == addresses
        transaction.add(*arguments, addresses)
        transaction.commit()
    assert read_all(repo, 'b') == data


def test_arguments_that_do_not_fit(repo):
    with repo.begin('a') as transaction:
        for fingerprints, lengths in ((b'x' * 31, b'1234'), (b'x' * 32, b''),
                                      (b'x' * 32, b'123'),
                                      (b'x' * 64, b'1234')):
            with pytest.raises(ValueError):
                transaction.find(fingerprints, lengths)
        for addresses in (b'', b'1234567', b'x' * 16):
            with pytest.raises(ValueError):
                transaction.add(b'x' * 32, b'1234', addresses)
        for length in (-1, 1 << 63, 1 << 64):
            with pytest.raises(exceptions.InvalidParameter):
                transaction.add_zeros(length)
        assert transaction.find(b'', b'') == b''
        assert transaction.commit().size == 0


def test_only_at_a_boundary(repo):
    with repo.begin('a') as transaction:
        transaction.write(b'x')
        with pytest.raises(exceptions.InvalidParameter, match='within a'):
            transaction.add_zeros(BLOCK)
        with pytest.raises(exceptions.InvalidParameter, match='within a'):
            transaction.add(b'', b'', b'')
        transaction.write(b'x' * (BLOCK - 1))
        transaction.add_zeros(BLOCK)
        transaction.commit()
    assert read_all(repo, 'a') == b'x' * BLOCK + bytes(BLOCK)


def test_nothing_is_found_by_value(tmp_path):
    path = create(tmp_path / 'value', block_size=BLOCK, verify='bytes')
    data = noise(4 * BLOCK)
    with open_repository(path) as repo:
        put(repo, 'a', data)
        with repo.open_image('a') as image:
            (_, _, blocks), = described(image)
        with repo.begin('b') as transaction:
            assert transaction.find(*packed(blocks)) == bytes(32)


# -- the segment cache --------------------------------------------------------

def test_segment_cache(path):
    data = mixture(300 * BLOCK, unit=BLOCK)
    with open_repository(path, segment_cache_mib=1) as repo:
        put(repo, 'a', data)
        assert read_all(repo, 'a') == data
        cold = repo.statistics()
        assert cold['cache_misses'] > 0
        assert 0 < cold['cache_bytes'] <= MIB
        assert read_all(repo, 'a') == data
        warm = repo.statistics()
        assert warm['cache_misses'] == cold['cache_misses']
        assert warm['cache_hits'] - cold['cache_hits'] >= (
            cold['cache_misses'])
        repo.handle().set_segment_cache(0)
        assert repo.statistics()['cache_bytes'] == 0
        assert read_all(repo, 'a') == data
        assert repo.statistics()['cache_hits'] == warm['cache_hits']


def test_readers_of_similar_blocks_have_a_cache(tmp_path):
    """Readers cache similar blocks, instead of decoding segments again."""
    # Each block resembles the block 256 KiB before it.
    data = b''.join(bytes([i]) * 8 + noise(4088, i % 64) for i in range(256))
    path = create(tmp_path / 'repository', group_slots=128)
    with open_repository(path) as repo:
        put(repo, 'a', data)
    for similar in (False, True):
        with open_repository(path) as repo, maintaining(repo) as maintainer:
            recompressor.run_once(maintainer, pacing.Pace(), 'zstd',
                                  similar=similar)
        with open_repository(path) as repo:
            assert read_all(repo, 'a') == data
            assert bool(repo.statistics()['cache_bytes']) == similar
        with open_repository(path, segment_cache_mib=0) as repo:
            assert read_all(repo, 'a') == data
            assert repo.statistics()['cache_bytes'] == 0


@pytest.mark.parametrize('mib', [-1, (1 << 20) + 1, 1.5])
def test_bad_segment_cache(path, mib):
    with pytest.raises(exceptions.InvalidParameter, match='segment_cache'):
        open_repository(path, segment_cache_mib=mib)


def test_threads_share_the_cache(path):
    data = mixture(600 * BLOCK, unit=BLOCK)
    wrong = []

    def read(seed):
        at = seed
        with repo.open_image('a') as image:
            for _ in range(100):
                at = (at * 7919 + 13) % len(data)
                if image.read(3000, at) != data[at:at + 3000]:
                    wrong.append(at)
            if seed % 2:
                repo.handle().set_segment_cache(30000)

    with open_repository(path, segment_cache_mib=1) as repo:
        put(repo, 'a', data)
        threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert repo.statistics()['cache_bytes'] <= 30000


# -- requests to the disk -----------------------------------------------------

def test_seeks_of_reading(repo):
    data = noise(300 * BLOCK)
    put(repo, 'a', data)
    put(repo, 'turned', b''.join(data[i:i + BLOCK] for i in reversed(
        range(0, len(data), BLOCK))))
    before = repo.statistics()
    assert before['image_reads'] == before['image_seeks'] == 0
    with repo.open_image('turned') as image:
        assert len(image.read()) == len(data)
    figures = repo.statistics()
    # The recipe; each group's entries and data; but not 300 blocks.
    groups = len(os.listdir(os.path.join(repo.path, 'groups')))
    assert 0 < figures['image_seeks'] <= 1 + 2 * groups
    assert figures['image_reads'] >= figures['image_seeks']
    assert figures['image_bytes'] > len(data)


# -- spare copies -------------------------------------------------------------

def spoil(path, data):
    """Change a block that is stored plain."""
    file = path / 'groups' / '00000001'
    content = file.read_bytes()
    at = content.index(data)
    with open(file, 'r+b') as f:
        f.seek(at + 5)
        f.write(bytes([data[5] ^ 1]))


def test_spare_copies(path):
    data = noise(20 * BLOCK)
    addresses = array.array('Q', [1 << 15 | i for i in range(5)])
    with open_repository(path) as repo:
        put(repo, 'a', data)
        maintenance = _engine.Maintenance(repo.handle())
        assert maintenance.lock()
        try:
            size = _engine.write_spares(maintenance, 1, addresses.tobytes())
            assert os.stat(path / 'spares' / '00000001').st_size == size
            report = checker.check(path)
            assert not report.findings
            spoil(path, data[3 * BLOCK:4 * BLOCK])
            assert read_all(repo, 'a') == data
            assert repo.statistics()['spare_reads'] > 0
            with repo.open_image('a') as image:
                places = received(image, [(0, 20 * BLOCK)])
                assert b''.join(
                    x for _, x in sorted(places.items())) == data
            spoil(path, data[7 * BLOCK:8 * BLOCK])
            with pytest.raises(exceptions.DamagedError, match='slot 7'):
                read_all(repo, 'a')
            assert _engine.write_spares(maintenance, 1, b'') == 0
            assert not os.listdir(path / 'spares')
        finally:
            maintenance.close()


def test_write_spares_needs_the_lock(path):
    with open_repository(path) as repo:
        put(repo, 'a', noise(BLOCK))
        maintenance = _engine.Maintenance(repo.handle())
        address = array.array('Q', [1 << 15]).tobytes()
        with pytest.raises(exceptions.RepositoryError):
            _engine.write_spares(maintenance, 1, address)
        assert maintenance.lock()
        for wrong in (b'1234567', b'\xff' * 8):
            with pytest.raises(ValueError):
                _engine.write_spares(maintenance, 1, wrong)
        with pytest.raises(exceptions.InvalidParameter):
            _engine.write_spares(maintenance, 0, address)
        with pytest.raises(exceptions.RepositoryError):
            _engine.write_spares(
                maintenance, 1, array.array('Q', [1 << 15 | 9]).tobytes())
        maintenance.close()
        assert not (path / 'spares').exists()


def test_image_scattered_over_many_groups(path):
    """Each group is opened once for a read, and not for each of its blocks."""
    groups, rounds = 80, 20     # more groups than are kept open
    length = struct.pack('<I', BLOCK)
    with open_repository(path) as repo:
        sources = [noise(64 * BLOCK, seed) for seed in range(groups)]
        for number, data in enumerate(sources):
            put(repo, f'image-{number}', data)
        blocks = [data[at * BLOCK:(at + 1) * BLOCK]
                  for at in range(rounds) for data in sources]
        names = [_engine.fingerprint(repo.parameters.fingerprint, block)
                 for block in blocks]
        with repo.begin('scattered') as transaction:
            for name in names:
                transaction.add(name, length, transaction.find(name, length))
            transaction.commit()

    def read():
        with open_repository(path) as repo:
            most = len(os.listdir('/proc/self/fd')) + groups + 20
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            return read_all(repo, 'scattered') == b''.join(blocks)
    assert repositories.in_child(read)
