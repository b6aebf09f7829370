# SPDX-License-Identifier: Apache-2.0

"""Recompression that puts similar blocks next to each other."""

import struct

import pytest
import xxhash

from dedupd.tasks import collector
from dedupd.tasks import recompressor
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from tests.golden import make
from tests.support import maintenance
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put

BLOCK, SLOTS = 4096, 256    # a group has four segments
KINDS = 40


def alike(count, seed=1):
    """Return blocks; each resembles the block that is 40 places away."""
    return b''.join(
        repositories.noise(BLOCK - 20, f'{seed} {number % KINDS}')
        + repositories.noise(20, f'{seed} single {number}')
        for number in range(count))


DATA = alike(2 * SLOTS + 50)


@pytest.fixture
def path(tmp_path):
    path = repositories.create(
        tmp_path / 'repository', block_size=BLOCK, group_slots=SLOTS)
    with repositories.open_repository(path) as repo:
        put(repo, 'image', DATA)
    return path


@pytest.fixture
def repo(path):
    with repositories.open_repository(path) as repo:
        yield repo


def recompress(repo, codec='zstd', level=9, similar=True):
    with maintaining(repo) as maintainer:
        return recompressor.run_once(maintainer, pacing.Pace(), codec, level,
                                     similar=similar)


def facts_of(repo):
    with maintaining(repo) as maintainer:
        return [maintainer.engine.group_facts(number)
                for number in maintainer.engine.groups()]


def test_groups_become_smaller_at_the_same_addresses(path, repo):
    blocks = maintenance.blocks_of(repo, 'image')
    recompress(repo, similar=False)
    before = maintenance.disk(path)
    result = recompress(repo)
    # The last group has few blocks and would hardly become smaller.
    assert (result.groups, result.kept) == (2, 1)
    assert maintenance.disk(path) < before * 6 // 10
    make.require_lists(path)
    assert [(fact['has_lists'], fact['similar'], fact['level'])
            for fact in facts_of(repo)] == [
        (True, True, 9), (True, True, 9), (False, True, 9)]
    assert maintenance.blocks_of(repo, 'image') == blocks
    assert repositories.read_all(repo, 'image') == DATA
    assert put(repo, 'again', DATA).new_bytes == 0
    repositories.require_clean(path)


def test_each_group_once_for_each_order(repo):
    assert recompress(repo).groups == 3
    again = recompress(repo)
    assert (again.groups, again.kept) == (0, 0)
    # The other order would be larger, so the task only notes it.
    again = recompress(repo, similar=False)
    assert (again.groups, again.kept) == (0, 3)
    assert [(fact['has_lists'], fact['similar'])
            for fact in facts_of(repo)] == [(True, False)] * 3
    assert recompress(repo).kept == 3
    assert [fact['similar'] for fact in facts_of(repo)] == [True] * 3


def test_the_feature_is_set_with_the_first_lists(repo):
    recompress(repo, similar=False)
    assert repo.features == []
    recompress(repo)
    assert repo.features == ['listed-segments']


def test_freeing_and_rewriting(path, repo):
    put(repo, 'other', alike(SLOTS, 2))
    recompress(repo)
    repo.delete('image')
    with maintaining(repo) as maintainer:
        collector.run_once(maintainer, pacing.Pace())
        result = collector.run_once(maintainer, pacing.Pace(), live_share=95,
                                    evacuate_share=0)
        assert result.refused is None and not result.failed
        maintenance.require_counted(maintainer)
    assert repositories.read_all(repo, 'other') == alike(SLOTS, 2)
    repositories.require_clean(path)


def test_half_of_a_group_is_rewritten(path, tmp_path):
    """A rewrite after a deletion keeps the order of the remaining blocks."""
    with repositories.open_repository(path) as repo:
        put(repo, 'one', alike(100, 3))
        put(repo, 'two', alike(SLOTS, 4))
        recompress(repo)
        before = maintenance.disk(path)
        repo.delete('one')
        with maintaining(repo) as maintainer:
            result = collector.run_once(
                maintainer, pacing.Pace(), live_share=95, evacuate_share=0)
            assert result.rewritten == 1
        assert maintenance.disk(path) < before
        assert repositories.read_all(repo, 'image') == DATA
        assert repositories.read_all(repo, 'two') == alike(SLOTS, 4)
    make.require_lists(path)
    repositories.require_clean(path)


def test_the_scrub_reads_each_segment_once(path, repo):
    def scrub():
        with maintaining(repo) as maintainer:
            return scrubber.run_once(maintainer, pacing.Pace(), full=True)
    recompress(repo)
    # With a third of a group in each step, most segments would be read again.
    recipe = 4096 + 40 * 1
    stored = sum(
        fact['end'] - 4096 * (1 + -(-512 * -(-SLOTS // 9) // 4096))
        for fact in facts_of(repo))
    result = scrub()
    assert result.complete and not result.damaged
    assert abs(result.bytes - stored - recipe) < 4096


# -- damage -------------------------------------------------------------------

def a_list(path):
    """Return a group's file, and the offset of a segment with a list."""
    file = repositories.Group(path, 1)
    for slot in range(file.slots):
        segment = file.entry(slot)[2]
        if file.list_size(segment):
            return file, segment
    raise AssertionError('there is none')


def mend(file, segment):
    """Give list and segment the checksums of their bytes."""
    data, size = file.data, file.list_size(segment)
    stored, = struct.unpack_from('<I', data, segment + 16)
    behind = bytes(data[segment + 32:segment + 32 + stored])
    struct.pack_into('<I', data, segment + 20, xxhash.xxh3_64_intdigest(
        bytes(data[segment:segment + 20]) + behind[:size],
        seed=file.seed) & 0xffffffff)
    struct.pack_into('<Q', data, segment + 24, xxhash.xxh3_64_intdigest(
        bytes(data[segment:segment + 24]) + behind, seed=file.seed))


def swap(data, at):
    data[at:at + 4] = data[at + 2:at + 4] + data[at:at + 2]


def repeat(data, at):
    data[at + 2:at + 4] = data[at:at + 2]


def outside(data, at):
    data[at + 2:at + 4] = struct.pack('<H', SLOTS)


@pytest.mark.parametrize('mended', [False, True])
@pytest.mark.parametrize('spoil', [swap, repeat, outside])
def test_a_wrong_list_is_an_error_never_data(path, spoil, mended):
    with repositories.open_repository(path) as repo:
        recompress(repo)
    file, segment = a_list(path)
    # The damage affects the first two slots, or the last one.
    spoil(file.data, segment + 32 if spoil is not outside
          else segment + 32 + file.list_size(segment) - 4)
    if mended:
        mend(file, segment)
    file.save()
    with repositories.open_repository(path) as repo:
        with repo.open_image('image') as image:
            errors = 0
            for number in range(SLOTS):
                try:
                    block = image.read(BLOCK, number * BLOCK)
                except exceptions.DamagedError as e:
                    assert 'list of slots' in str(e), e
                    errors += 1
                else:
                    assert block == DATA[number * BLOCK:][:BLOCK]
        assert 30 < errors < SLOTS
        report = checker.check(path)
        assert not report.ok and report.damaged_images == ['image']
        assert any('list of' in f.sentence for f in report.findings)
        with maintaining(repo) as maintainer:
            result = scrubber.run_once(maintainer, pacing.Pace(), full=True)
            assert result.damaged == errors
            assert result.images == ['image']
