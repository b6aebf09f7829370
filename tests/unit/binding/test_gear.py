# SPDX-License-Identifier: Apache-2.0

"""Content-defined chunking: a repository of ``gear`` and the work on it.

The tests compare the stored blocks with those of
``tests/support/gear_reference.py``, a second implementation of the format's
text.
"""

import random
import struct

import pytest

from glance_dedup.base import exceptions
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository
from glance_dedup.repository import repo_parameters
from glance_dedup.transfer import pull
from tests.damage import template
from tests.support import daemons
from tests.support import gear_reference
from tests.support import maintenance
from tests.support import repositories
from tests.support.repositories import noise

LIMITS = 256, 1024, 4096
GEAR = {'chunking': 'content-defined 256 1024', 'block_size': 4096,
        'group_slots': 128,
        'segment_size': 16384}
MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    return repositories.create(tmp_path / 'repository', **GEAR)


@pytest.fixture
def repo(path):
    with repositories.open_repository(path) as repo:
        yield repo


def image_of(size, seed=1):
    """Return noise, texts, zeros and repetitions of odd lengths."""
    rng = random.Random(seed)
    data = bytearray()
    while len(data) < size:
        data += rng.choice([
            lambda n: rng.randbytes(n), lambda n: bytes(n),
            lambda n: (b'a line %d of it\n' % rng.randrange(9) * n)[:n],
            lambda n: noise(n, 'again')])(rng.choice([70, 900, 5000, 40000]))
    return bytes(data[:size])


def put(repo, image_id, data, pieces=None):
    rng = random.Random(len(data))
    with repo.begin(image_id) as transaction:
        at = 0
        while at < len(data):
            piece = rng.choice(pieces or [2 * MIB])
            transaction.write(data[at:at + piece])
            at += piece
        return transaction.commit()


def lengths_of(repo, image_id):
    """Return the lengths of an image's blocks, negative for zeros."""
    found = []
    with repo.open_image(image_id) as image:
        page = 0
        while text := image.describe(page):
            at = 0
            while at < len(text):
                _, length, blocks = struct.unpack_from('<QQI4x', text, at)
                at += 24
                if not blocks:
                    found.append(-length)
                found += [n for n, in struct.iter_unpack(
                    '<32xI', text[at:at + 36 * blocks])]
                at += 36 * blocks
            page += 1
    return found


def expected(data, limits=LIMITS):
    found, at = [], 0
    for length in gear_reference.lengths(data, *limits):
        if any(data[at:at + length]):
            found.append(length)
        elif found and found[-1] < 0:
            found[-1] -= length
        else:
            found.append(-length)
        at += length
    return found


# -- the places of the cuts ---------------------------------------------------

@pytest.mark.parametrize('pieces', [
    None, [1, 70, 5000], [4096], [MIB - 1, 3], [MIB + 1, 5 * MIB]], ids=str)
def test_cuts_depend_on_nothing_but_the_bytes(repo, path, pieces):
    data = image_of(3 * MIB // 2)
    put(repo, 'one', data, pieces)
    assert lengths_of(repo, 'one') == expected(data)
    assert repositories.read_all(repo, 'one') == data
    repositories.require_clean(path)


@pytest.mark.parametrize('size', [
    0, 1, 63, 64, 255, 256, 257, 4095, 4096, 4097, 100001])
@pytest.mark.parametrize('kind', [bytes, noise])
def test_images_of_any_size(repo, path, size, kind):
    data = kind(size)
    put(repo, 'one', data, [1000, 7])
    assert lengths_of(repo, 'one') == expected(data)
    assert repositories.read_all(repo, 'one') == data
    repositories.require_clean(path)


@pytest.mark.parametrize('block_size, limits', [
    (512, (64, 128)), (65536, (32767, 32768)), (16384, (1024, 4096))])
def test_other_limits(tmp_path, block_size, limits):
    path = repositories.create(
        tmp_path / 'r', block_size=block_size, segment_size=65536,
        chunking='content-defined %d %d' % limits)
    data = image_of(MIB)
    with repositories.open_repository(path) as repo:
        put(repo, 'one', data)
        assert lengths_of(repo, 'one') == expected(data,
                                                   (*limits, block_size))
        assert repositories.read_all(repo, 'one') == data
    repositories.require_clean(path)


def test_the_default(tmp_path):
    repositories.create(tmp_path / 'r', chunking='content-defined')
    with repositories.open_repository(tmp_path / 'r') as repo:
        assert repo.parameters.chunking == repo_parameters.CONTENT_DEFINED
        assert repo.parameters.block_size == (
            repo_parameters.CONTENT_DEFINED_BLOCK)


def test_what_was_put_in_costs_little(tmp_path):
    data = noise(4 * MIB)
    moved = noise(777, 'before') + data[:MIB] + noise(3, 'x') + data[MIB:]
    repositories.create(tmp_path / 'r', chunking='content-defined')
    with repositories.open_repository(tmp_path / 'r') as repo:
        put(repo, 'one', data)
        assert put(repo, 'two', moved).new_bytes < 64 * 1024
        assert repositories.read_all(repo, 'two') == moved


def test_what_follows_zeros_is_found_wherever_it_lies(repo):
    """A small file behind zeros begins a block, so a second image finds it."""
    file = noise(1000, 'file')
    put(repo, 'one', noise(5000) + bytes(1000) + file + bytes(1000))
    stat = put(repo, 'two', noise(3333, 2) + bytes(777) + file + bytes(600))
    assert stat.new_bytes < 3333 + 500


# -- refused parameters -------------------------------------------------------

@pytest.mark.parametrize('text, word', [
    ('content-defined 1024', 'content-defined 1024'),
    ('content-defined 1024 4096 8192', '8192'),
    ('fastcdc', 'fastcdc'), ('content-defined  1024 4096',
                             'content-defined  1024'),
    ('content-defined 01024 4096', '01024'), ('content-defined -1 4096', '-1'),
    ('', 'choose'),
    ('content-defined 63 4096', 'minimum is 63'), ('content-defined 4096 4096',
                                                   'minimum, 4096'),
    ('content-defined 8192 4096', 'minimum, 8192'),
    ('content-defined 1024 16384', 'average, 16384'),
    ('content-defined 1024 32768', 'average, 32768'),
    ('content-defined 1024 4095', 'average is 4095'),
    ('content-defined 1024 4294967296', '4294967296')])
def test_limits_in_the_wrong_order_are_refused_by_name(tmp_path, text, word):
    with pytest.raises(exceptions.InvalidParameter) as caught:
        image_repository.Repository.create(tmp_path / 'r', chunking=text)
    assert str(caught.value).startswith('chunking: ')
    assert word in str(caught.value)
    assert not (tmp_path / 'r').exists()
    repositories.create(tmp_path / 'r', chunking='content-defined')
    repositories.edit_parameters(tmp_path / 'r', chunking=text)
    with pytest.raises(exceptions.DamagedError, match='chunking'):
        repositories.open_repository(tmp_path / 'r')


@pytest.mark.parametrize('cuts, word', [
    ((0, 1024), 'minimum is 0'), ((1024, 1024), 'minimum, 1024'),
    ((1024, 4096), 'average, 4096'), ((1024, 1500), 'average is 1500')])
def test_the_engine_refuses_them_itself(path, repo, cuts, word):
    with pytest.raises(exceptions.InvalidParameter, match=word):
        repo._open_engine(
            cut_minimum=cuts[0], cut_average=cuts[1])


# -- work on such a repository ------------------------------------------------

def test_blocks_that_were_cut_elsewhere(repo, path):
    data = image_of(200000)
    at, lengths = 0, []
    while at < len(data):
        lengths.append(min(len(data) - at, 1 + at * 7 % 4096))
        at += lengths[-1]
    packed = struct.pack(f'<{len(lengths)}I', *lengths)
    with repo.begin('one') as transaction:
        transaction.write(noise(5000))
        with pytest.raises(exceptions.InvalidParameter, match='within'):
            transaction.write_blocks(data, packed)
        transaction.abort()
    with repo.begin('one') as transaction:
        for bad in (b'', packed[:-1], packed[:-4], packed + bytes(3)):
            with pytest.raises(ValueError, match='lengths'):
                transaction.write_blocks(data, bad)
        for bad in ([4097], [0, 4096]):
            with pytest.raises(exceptions.InvalidParameter, match='1 to 4096'):
                transaction.write_blocks(
                    bytes(sum(bad)), struct.pack(f'<{len(bad)}I', *bad))
        transaction.write_blocks(b'', b'')
        transaction.write_blocks(data, packed)
        transaction.add_zeros(3)
        transaction.write_blocks(b'end', struct.pack('<I', 3))
        transaction.commit()
    assert repositories.read_all(repo, 'one') == data + bytes(3) + b'end'
    assert {n for n in lengths_of(repo, 'one') if n > 0} <= {*lengths, 3}
    repositories.require_clean(path)


def test_ranges(repo):
    data = image_of(300000, 3)
    put(repo, 'one', data)
    rng = random.Random(5)
    with repo.open_image('one') as image:
        for _ in range(300):
            first = rng.randrange(len(data))
            end = rng.randrange(first, len(data) + 1)
            assert image.read(end - first, first) == data[first:end]


def test_pulling(tmp_path):
    """A pull receives only the missing blocks, also at other offsets."""
    there, here = (repositories.create(tmp_path / name, **GEAR)
                   for name in ('there', 'here'))
    data = image_of(3 * MIB, 2)
    with repositories.open_repository(there) as repo:
        put(repo, 'one', data)
        put(repo, 'two', noise(99) + data[:MIB] + noise(5, 1) + data[MIB:])
    with repositories.open_repository(here) as repo, (
            daemons.running(there)) as daemon, daemon.client() as client:
        assert pull.pull(repo, 'one', client).whole is None
        result = pull.pull(repo, 'two', client)
        assert result.received_bytes < 300000
        assert result.asked_blocks < 30
        for image_id in ('one', 'two'):
            with repositories.open_repository(there) as other:
                assert lengths_of(repo, image_id) == lengths_of(other,
                                                                image_id)
                assert (repositories.read_all(repo, image_id)
                        == repositories.read_all(other, image_id))
    repositories.require_clean(here)


@pytest.mark.parametrize('parameters', [{}, GEAR], ids=str)
def test_pulling_blocks_of_any_lengths(tmp_path, parameters):
    """A pulled block keeps its length, wherever it ends."""
    there, here = (repositories.create(tmp_path / name, **parameters)
                   for name in ('there', 'here'))
    lengths = [1 + 37 * n * n % 4096 for n in range(200)]
    packed = struct.pack('<200I', *lengths)
    one, two = noise(sum(lengths), 1), noise(sum(lengths[50:150]), 2)
    two = one[:sum(lengths[:50])] + two + one[sum(lengths[:150]):]
    with repositories.open_repository(there) as repo:
        for image_id, data in (('one', one), ('two', two)):
            with repo.begin(image_id) as transaction:
                transaction.write_blocks(data, packed)
                transaction.commit()
    with repositories.open_repository(here) as repo, (
            daemons.running(there)) as daemon, daemon.client() as client:
        pull.pull(repo, 'one', client)
        # Only the blocks in the middle are missing here.
        assert pull.pull(repo, 'two', client).asked_blocks == 100
        assert repositories.read_all(repo, 'two') == two
        assert lengths_of(repo, 'two') == lengths
    repositories.require_clean(here)


@pytest.mark.parametrize('other', [
    {}, {'block_size': 4096}, {**GEAR,
                               'chunking': 'content-defined 512 1024'}],
    ids=str)
def test_pulling_what_is_cut_otherwise(tmp_path, other):
    there = repositories.create(tmp_path / 'there', **GEAR)
    here = repositories.create(tmp_path / 'here', **other)
    data = image_of(MIB, 2)
    with repositories.open_repository(there) as repo:
        put(repo, 'one', data)
    with repositories.open_repository(here) as repo, (
            daemons.running(there)) as daemon, daemon.client() as client:
        result = pull.pull(repo, 'one', client)
        assert 'chunking is' in result.whole
        assert 'content-defined 256' in result.whole
        assert repositories.read_all(repo, 'one') == data
    repositories.require_clean(here)


def test_all_that_the_maintainer_does(repo, path):
    """An image survives merging, collection, scrubbing and deletion."""
    twin = image_of(MIB // 2, 'twin')
    images = {'one': image_of(MIB, 1), 'two': image_of(MIB, 2) + twin}
    for image_id, data in images.items():
        put(repo, image_id, data)
    # No upload can use the stored blocks now, so it finds none of them.
    with repositories.collector_in(path, *maintenance.groups(path)):
        images['three'] = twin + noise(10000, 'three')
        put(repo, 'three', images['three'])
    before = sum(f.stat().st_blocks for f in (path / 'groups').iterdir())
    with maintainer_role.Maintainer(repo) as maintainer:
        template.run(maintainer, 'merge')
        repo.delete('one')
        for _ in range(2):
            for name in ('account', 'collect', 'merge', 'scrub'):
                template.run(maintainer, name)
        maintenance.require_collected(maintainer)
    del images['one']
    for image_id, data in images.items():
        assert repositories.read_all(repo, image_id) == data
    assert repositories.require_clean(path).figures['duplicate_blocks'] == 0
    assert before > sum(f.stat().st_blocks
                        for f in (path / 'groups').iterdir())
