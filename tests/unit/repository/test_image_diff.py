# SPDX-License-Identifier: Apache-2.0

"""Changed ranges, compared with the bytes of both images."""

import random

import pytest

from glance_dedup.base import exceptions
from glance_dedup.repository import image_diff
from glance_dedup.repository import openvolumes
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put

BLOCK = 512
PART = 65536


@pytest.fixture(params=['fixed', 'by value', 'content-defined'])
def repo(tmp_path, request):
    parameters = {'block_size': BLOCK, 'group_slots': 256,
                  'segment_size': 4 * BLOCK}
    if request.param == 'by value':
        parameters |= {'fingerprint': 'xxh3-128', 'verify': 'bytes'}
    elif request.param == 'content-defined':
        parameters |= {'chunking': 'content-defined 128 256'}
    with repositories.open_repository(repositories.create(
            tmp_path / 'repository', **parameters)) as repo:
        yield repo


def compare(repo, before, after, offset=0):
    with image_diff.Comparison(repo, before, after) as comparison:
        return list(comparison.ranges(offset))


def require_right(repo, before, after, offset=0):
    """Equal ranges are equal, and all ranges follow one another."""
    old, new = (repositories.read_all(repo, name)
                for name in (before, after))
    found = compare(repo, before, after, offset)
    at = offset
    for one, following in zip(found, [*found[1:], None]):
        assert one.offset == at and one.length > 0
        at += one.length
        if not one.changed:
            assert old[one.offset:at] == new[one.offset:at]
        if one.zeros:
            assert not any(new[one.offset:at])
        assert following is None or (
            (one.changed, one.zeros) != (following.changed, following.zeros))
    assert at == max(len(new), offset)
    return found


def changed(found):
    return [(one.offset, one.length) for one in found if one.changed]


# -- snapshots ----------------------------------------------------------------

@pytest.mark.parametrize('seed', range(3))
def test_snapshots_of_a_volume(repo, seed):
    """Exactly the blocks that differ, as long as all are cut alike."""
    rng = random.Random(seed)
    size = 5 * PART
    openvolumes.create(repo, 'disk', size, part_size=PART)
    with openvolumes.open_volume(repo, 'disk') as volume:
        for number in range(4):
            for _ in range(rng.randrange(60)):
                at = rng.randrange(size // BLOCK) * BLOCK
                length = min(rng.choice([1, 1, 1, 30]) * BLOCK, size - at)
                if rng.random() < 0.2:
                    volume.zero(length, at)
                else:
                    volume.write(noise(length, rng.randrange(9)), at)
            volume.snapshot(f's{number}')
    for before in range(4):
        for after in range(4):
            found = require_right(repo, f's{before}', f's{after}')
            if before == after:
                assert changed(found) == []
            old, new = (repositories.read_all(repo, f's{number}')
                        for number in (before, after))
            listed = {at for offset, length in changed(found)
                      for at in range(offset, offset + length, BLOCK)}
            differ = {at for at in range(0, size, BLOCK)
                      if old[at:at + BLOCK] != new[at:at + BLOCK]}
            assert differ <= listed
            assert len(listed) <= 1.3 * len(differ) + 3


@pytest.mark.parametrize('seed', range(3))
def test_from_any_offset(repo, seed):
    rng = random.Random(seed)
    old = bytearray(noise(150_001, seed))
    old[20_000:70_000] = bytes(50_000)
    put(repo, 'a', old)
    for _ in range(20):
        at = rng.randrange(len(old) - 2000)
        old[at:at + 700] = noise(700, at) if rng.random() < 0.6 else bytes(700)
    put(repo, 'b', old)
    whole = require_right(repo, 'a', 'b')
    for _ in range(60):
        offset = rng.randrange(len(old))
        found = require_right(repo, 'a', 'b', offset)
        # It finds the same, cut off at the offset.
        assert all(any(
            one.offset <= at < one.offset + one.length for one in whole
            if one.changed) for at, _ in changed(found))
    assert compare(repo, 'a', 'b', len(old)) == []
    with image_diff.Comparison(repo, 'a', 'b') as comparison:
        at = 0
        while at < len(old):
            length = rng.randrange(1, 9000)
            for size, is_changed in comparison.extents(at, length):
                if not is_changed:
                    assert repositories.read_all(repo, 'a')[
                        at:at + size] == old[at:at + size]
                at += size
                length -= size
            assert length >= 0


def test_a_request_is_bounded(repo, monkeypatch):
    """A request compares no block behind its end, and only so many blocks."""
    steps = []

    def counted(*args):
        for step in all_steps(*args):
            steps.append(step)
            yield step

    all_steps = image_diff._steps
    monkeypatch.setattr(image_diff, '_steps', counted)
    monkeypatch.setattr(image_diff, '_MAX_STEPS', 8)
    put(repo, 'a', noise(100_000, 1))
    put(repo, 'b', noise(100_000, 2))
    with image_diff.Comparison(repo, 'a', 'b') as comparison:
        assert comparison.extents(3, 1) == [(1, True)]
        assert len(steps) == 1
        (length, is_changed), = comparison.extents(0, 100_000)
        assert is_changed and 0 < length <= 100_000
        assert len(steps) <= 1 + 8


def test_images_that_are_cut_in_different_ways(repo):
    """Shifted bytes are found at another phase, and compared all the same."""
    data = noise(60_000)
    put(repo, 'a', data)
    put(repo, 'b', data[:7168] + data[6144:-1024])
    put(repo, 'c', data[:513] + noise(11, 2) + data[524:])
    for before in 'abc':
        for after in 'abc':
            require_right(repo, before, after)


def test_equal_blocks_at_different_addresses(repo):
    """Only a cryptographic digest proves that they are equal."""
    put(repo, 'a', noise(20 * BLOCK))
    put(repo, 'b', noise(20 * BLOCK), dedup=False)
    found = compare(repo, 'a', 'b')
    if repo.parameters.is_cryptographic:
        assert changed(found) == []
    else:
        assert changed(found) == [(0, 20 * BLOCK)]


def test_images_without_blocks(repo):
    put(repo, 'a', b'')
    put(repo, 'b', b'')
    assert compare(repo, 'a', 'b') == []
    put(repo, 'c', bytes(PART))
    put(repo, 'd', noise(PART))
    found, = compare(repo, 'd', 'c')
    assert found == image_diff.Range(0, PART, True, True)
    found, = compare(repo, 'c', 'd')
    assert found == image_diff.Range(0, PART, True, False)


# -- what cannot be compared --------------------------------------------------

def test_different_sizes_and_scopes(repo):
    put(repo, 'a', noise(1000))
    put(repo, 'b', noise(1001))
    put(repo, 'c', noise(1000), project='p', scope='project')
    with pytest.raises(exceptions.InvalidParameter,
                       match='a has 1000 bytes, and image b has 1001'):
        compare(repo, 'a', 'b')
    with pytest.raises(exceptions.InvalidParameter,
                       match='a and c have different scopes'):
        compare(repo, 'a', 'c')
    for names in ('a', 'x'), ('x', 'a'):
        with pytest.raises(exceptions.ImageNotFound):
            compare(repo, *names)


def test_related_images(repo):
    put(repo, 'a', noise(PART))
    put(repo, 'b', noise(PART // 2, 2) + noise(PART)[PART // 2:])
    put(repo, 'c', noise(PART, 3))
    put(repo, 'zeros', bytes(PART))
    for names, expected in ((('a', 'b'), True), (('a', 'c'), False),
                            (('a', 'zeros'), True), (('zeros', 'c'), True)):
        with image_diff.Comparison(repo, *names) as comparison:
            assert comparison.are_related() == expected


def test_a_damaged_recipe(repo):
    put(repo, 'a', b''.join(noise(BLOCK, n) + bytes(BLOCK)
                            for n in range(300)))
    put(repo, 'b', b''.join(noise(BLOCK, n) + bytes(BLOCK)
                            for n in range(300)))
    with image_diff.Comparison(repo, 'a', 'b') as comparison:
        repositories.ruin(f'{repo.path}/images/a', 2 * 4096 + 50)
        with pytest.raises(exceptions.DamagedError, match='images/a'):
            list(comparison.ranges())
