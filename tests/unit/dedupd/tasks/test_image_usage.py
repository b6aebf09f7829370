# SPDX-License-Identifier: Apache-2.0

"""The announced figures, compared with a deletion and a collection."""

import collections
import contextlib
import itertools
import os
import random

import pytest

from dedupd.tasks import image_usage
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import rebuild_worker
from glance_dedup.repository import openvolumes
from glance_dedup.repository import space
from tests.support import maintenance
from tests.support.maintenance import BLOCK
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put
from tests.unit.dedupd.tasks.collecting import collect

pytest_plugins = ['tests.support.maintainer_fixtures']

PART = 65536


def measure(maintainer, images=(), volumes=()):
    return image_usage.run_once(maintainer, pacing.Pace(), images, volumes)


def stored_bytes(repo):
    """Bytes of segments that have a block."""
    return sum(
        part.bytes for part in space.parts(repo)
        if part.name.startswith(('blocks, ', 'segment headers')))


def bytes_of(repo, name):
    return sum(part.bytes for part in space.parts(repo) if part.name == name)


def require_freed(repo, usage, delete):
    """Delete; require that a collection frees exactly what was announced."""
    before = {name: bytes_of(repo, name)
              for name in ('recipes', 'journals of volumes')}
    stored = stored_bytes(repo)
    delete()
    with maintaining(repo) as maintainer:
        result = collect(maintainer)
    assert result.refused is None and not result.busy
    assert (result.freed_blocks, result.freed_bytes) == (
        usage.freed_blocks, usage.freed_bytes)
    assert stored - stored_bytes(repo) == usage.freed_stored_bytes
    for name, expected in (('recipes', usage.recipe_bytes),
                           ('journals of volumes', usage.journal_bytes)):
        assert before[name] - bytes_of(repo, name) == expected


# -- images -------------------------------------------------------------------

@pytest.mark.parametrize('codec', ['none', 'lz4', 'zstd'])
def test_against_a_collection(path, codec):
    rng = random.Random(codec)
    names, numbers = [], itertools.count()
    with repositories.open_repository(path, codec=codec) as repo:
        for _ in range(3):
            for _ in range(7):
                name = f'image-{next(numbers)}'
                data = b''.join(
                    rng.choice([content, maintenance.scattered])(
                        rng.randrange(12))[:rng.randrange(1, 30) * BLOCK]
                    + b'text' * rng.randrange(500)
                    for _ in range(rng.randrange(5)))
                put(repo, name, data + bytes(rng.randrange(3000)),
                    project=rng.choice(['one', 'two']),
                    scope=rng.choice(['global', 'project']))
                names.append(name)
            chosen = rng.sample(names, rng.randrange(1, 7))
            counts = maintenance.expected_counts(repo)
            with maintaining(repo) as maintainer:
                collect(maintainer)
                found = measure(maintainer, chosen)
                assert [u.name for u in found.usages] == chosen
                for usage in found.usages:
                    own = maintenance.blocks_of(repo, usage.name)
                    assert usage.freed_blocks == sum(
                        own.count(b) == counts[b] for b in set(own))
                    assert usage.size == repo.stat(usage.name).size
                    assert usage.freed_bytes <= usage.referenced_bytes
                    assert measure(
                        maintainer, [usage.name]).usages == [usage]
                maintenance.require_counted(maintainer)
            assert found.in_use == 0 and not found.uncounted
            assert not found.unread_groups
            assert found.together.freed_blocks >= sum(
                usage.freed_blocks for usage in found.usages)

            def delete():
                for name in chosen:
                    repo.delete(name)
                    names.remove(name)
            require_freed(repo, found.together, delete)


def test_what_only_two_share_is_freed_with_both(repo, maintainer):
    put(repo, 'a', content(1, 2))
    put(repo, 'b', content(2, 3))
    put(repo, 'c', content(3))
    a, b = measure(maintainer, ['a', 'b']).usages
    assert (a.freed_bytes, b.freed_bytes) == (10 * BLOCK, 0)
    assert a.referenced_bytes == b.referenced_bytes == 20 * BLOCK
    together = measure(maintainer, ['a', 'b']).together
    assert together.freed_bytes == 20 * BLOCK
    assert together.referenced_bytes == 30 * BLOCK
    assert together.size == 40 * BLOCK
    every = measure(maintainer, ['a', 'b', 'c']).together
    assert every.freed_bytes == every.referenced_bytes == 30 * BLOCK


def test_a_block_that_an_image_names_often(repo, maintainer):
    put(repo, 'a', 7 * content(1, blocks=1))
    put(repo, 'b', 9 * content(2, blocks=1))
    put(repo, 'c', content(2, blocks=1))
    a, b = measure(maintainer, ['a', 'b']).usages
    assert (a.freed_blocks, a.referenced_bytes, a.size) == (
        1, BLOCK, 7 * BLOCK)
    assert (b.freed_blocks, b.referenced_bytes) == (0, BLOCK)


def test_a_name_that_is_given_twice(repo, maintainer):
    put(repo, 'a', content(1))
    found = measure(maintainer, ['a', 'a'])
    usage, = found.usages
    assert usage.freed_blocks == found.together.freed_blocks == 10


def test_empty_and_zero_images(repo, maintainer):
    put(repo, 'empty', b'')
    put(repo, 'zeros', bytes(100 * BLOCK))
    for usage in measure(maintainer, ['empty', 'zeros']).usages:
        assert usage.error is None and usage.recipe_bytes > 0
        assert usage.referenced_bytes == usage.freed_blocks == 0


def test_several_partitions_and_turns(path, monkeypatch):
    monkeypatch.setattr(rebuild_worker, '_GROUPS', 3)
    monkeypatch.setattr(image_usage, '_GROUPS', 1)
    with repositories.open_repository(path, codec='none') as repo:
        for number in range(5):
            put(repo, f'i{number}', content(*range(number, number + 30)))
        assert len(maintenance.groups(path)) > 4
        counts = maintenance.expected_counts(repo)
        with maintaining(repo) as maintainer:
            found = measure(maintainer, ['i1', 'i0', 'i2'])
        named = collections.Counter()
        for usage in found.usages:
            own = collections.Counter(maintenance.blocks_of(repo, usage.name))
            named += own
            assert usage.freed_blocks == sum(
                n == counts[b] for b, n in own.items())
        assert found.together.freed_blocks == sum(
            n == counts[b] for b, n in named.items())
        assert found.together.referenced_bytes == len(named) * BLOCK

        def delete():
            for name in ('i0', 'i1', 'i2'):
                repo.delete(name)
        require_freed(repo, found.together, delete)


# -- images that come and go --------------------------------------------------

def test_images_that_are_not_counted_yet(repo, other, maintainer):
    put(other, 'new', content(1, 2))
    put(other, 'newer', content(2))
    other.delete('newer')
    usage, = measure(maintainer, ['new']).usages
    assert usage.freed_blocks == 20 and usage.left_out == 0


def test_entries_in_use(repo, other, maintainer):
    put(repo, 'a', content(1))
    put(repo, 'b', content(1))
    with repo.open_image('b'):
        other.delete('b')
        with other.begin('c') as transaction:
            transaction.write(content(5))
            found = measure(maintainer, ['a'])
            assert found.in_use >= 2
            # Its reader needs the blocks.
            assert found.usages[0].freed_blocks == 0
    assert measure(maintainer, ['a']).usages[0].freed_blocks == 10


def test_an_image_that_goes_meanwhile(repo, other, maintainer, monkeypatch):
    put(repo, 'a', content(1))
    choose = image_usage._Run._choose

    def delete(self):
        choose(self)
        with contextlib.suppress(exceptions.ImageNotFound):
            other.delete('a')
    monkeypatch.setattr(image_usage._Run, '_choose', delete)
    usage, = measure(maintainer, ['a']).usages
    assert 'there is no image a' in usage.error and not usage.is_damaged


def test_unknown_names(repo, maintainer):
    put(repo, 'a', content(1))
    put(repo, 'b', content(2))
    volume_recipe = f'v_{"0" * 32}_base_0'
    found = measure(maintainer, ['x', 'a', volume_recipe, 'b'], ['none'])
    missing, a, recipe, b, volume = found.usages
    assert missing.error == (
        "there is no image x; 'glance-dedup image list' shows those that "
        'exist')
    assert 'is no image' in recipe.error
    assert 'there is no volume none' in volume.error
    assert a.freed_blocks == b.freed_blocks == 10
    assert found.together.freed_blocks == 20


# -- damage -------------------------------------------------------------------

def test_a_damaged_recipe(repo, path, maintainer):
    put(repo, 'a', content(1))
    put(repo, 'b', content(2))
    collect(maintainer)
    repositories.ruin(path / 'images' / 'a', 4096 + 50)
    found = measure(maintainer, ['a', 'b'])
    a, b = found.usages
    assert a.is_damaged and 'images/a' in a.error
    assert 'image mark-lost --yes a' in a.error
    assert b.error is None and b.freed_blocks == 10
    assert found.together.freed_blocks == 10


def test_a_damaged_recipe_that_is_not_counted(repo, path, maintainer):
    put(repo, 'a', content(1))
    put(repo, 'b', content(2))
    repositories.ruin(path / 'images' / 'a', 4096 + 50)
    found = measure(maintainer, ['b'])
    assert found.usages[0].freed_blocks == 10
    assert [name.rpartition('/')[2] for name in found.uncounted] == ['a']


def test_a_damaged_group(repo, path, maintainer):
    put(repo, 'a', content(*range(20)))
    group = maintenance.blocks_of(repo, 'a')[0][0]
    before = measure(maintainer, ['a']).together
    repositories.ruin(repositories.group_path(path, group), 0)
    found = measure(maintainer, ['a'])
    assert list(found.unread_groups) == [group]
    assert 0 < found.together.freed_blocks < before.freed_blocks


def test_entries_that_do_not_verify(path):
    """Their lengths may be any number, so they are in no figure."""
    with repositories.open_repository(path, codec='none') as repo:
        put(repo, 'a', content(1))
        put(repo, 'b', content(2))
        group, slot = maintenance.blocks_of(repo, 'a')[4]
        with maintaining(repo) as maintainer:
            collect(maintainer)
            good = measure(maintainer, ['a', 'b'])
            with open(repositories.group_path(path, group), 'r+b') as file:
                file.seek(repositories.Group.entry_offset(slot) + 40)
                file.write(b'\xff' * 11)
            found = measure(maintainer, ['a', 'b'])
        a, b = found.usages
        assert (a.invalid_blocks, b.invalid_blocks) == (1, 0)
        assert found.together.invalid_blocks == 1
        assert a.referenced_bytes == a.freed_bytes == 9 * BLOCK
        assert a.freed_stored_bytes == good.usages[0].freed_stored_bytes
        # Nothing of the group is given back while the entry is in use.
        assert b.freed_blocks == 10 and b.freed_stored_bytes == 0
        require_freed(repo, found.together, lambda: [
            repo.delete(name) for name in ('a', 'b')])


def test_an_older_copy_of_a_group(repo, path, maintainer):
    """An entry that an image needs is empty again."""
    put(repo, 'a', content(1))
    file = repositories.group_path(path, 1)
    old = file.read_bytes()
    put(repo, 'b', content(2))
    assert {group for group, _ in maintenance.blocks_of(repo, 'b')} == {1}
    file.write_bytes(old)
    found = measure(maintainer, ['b'])
    assert 'its entry holds none' in found.unread_groups[1]


def test_a_catalog_that_counts_too_few(repo, maintainer):
    """It contradicts the recipe, so it is rebuilt."""
    put(repo, 'a', content(1))
    collect(maintainer)
    (group, slot), *_ = maintenance.blocks_of(repo, 'a')
    catalog = maintainer.catalog
    batch = catalog.batch()
    catalog.record_counts(batch, group, 0, bytes(4096))
    catalog.write(batch)
    usage, = measure(maintainer, ['a']).usages
    assert usage.freed_blocks == 10
    assert any('counts too few' in text for text in maintainer.warnings)
    maintenance.require_counted(maintainer)


# -- volumes ------------------------------------------------------------------

@pytest.fixture
def big(tmp_path):
    path = repositories.create(tmp_path / 'big')
    with repositories.open_repository(path) as repo:
        yield repo


def fill(volume, seed, blocks=40):
    rng = random.Random(seed)
    for _ in range(blocks):
        at = rng.randrange(volume.size // 4096) * 4096
        volume.write(rng.randbytes(2048) + bytes(1024) + b'x' * 1024, at)


def test_a_volume_with_a_snapshot_and_a_clone(big):
    openvolumes.create(big, 'disk', 8 * PART, part_size=PART)
    with openvolumes.open_volume(big, 'disk') as volume:
        fill(volume, 1)
        volume.snapshot('snapshot')
        fill(volume, 2)
        volume.checkpoint()
        fill(volume, 3, 5)
        volume.flush()
    with big.open_image('snapshot') as image:
        openvolumes.create(big, 'clone', image=image, part_size=PART)
    with openvolumes.open_volume(big, 'clone') as volume:
        fill(volume, 4, 10)
        volume.checkpoint()
    with maintaining(big) as maintainer:
        collect(maintainer)
        found = measure(maintainer, ['snapshot'], ['disk', 'clone'])
        snapshot, disk, clone = found.usages
        assert disk.size == clone.size == snapshot.size == 8 * PART
        assert disk.journal_bytes > 4096 and not snapshot.journal_bytes
        assert disk.is_volume and clone.is_volume
        # The clone has all of it.
        assert snapshot.freed_blocks == 0
        assert 0 < disk.freed_blocks < found.together.freed_blocks
        both = measure(maintainer, ['snapshot'], ['disk']).together
    require_freed(big, disk, lambda: openvolumes.delete(big, 'disk'))
    with maintaining(big) as maintainer:
        left = measure(maintainer, ['snapshot'], ['clone']).together
    assert left.freed_blocks == (found.together.freed_blocks
                                 - disk.freed_blocks)
    assert both.freed_blocks == disk.freed_blocks

    def delete():
        openvolumes.delete(big, 'clone')
        big.delete('snapshot')
    require_freed(big, left, delete)
    assert maintenance.live_slots(big.path) == set()


def test_a_volume_in_use(big, monkeypatch):
    """Checkpoints come while the recipes are read; the task begins again."""
    openvolumes.create(big, 'disk', 8 * PART, part_size=PART)
    with openvolumes.open_volume(big, 'disk') as volume, maintaining(
            big) as maintainer:
        fill(volume, 1)
        volume.checkpoint()
        choose = image_usage._Run._choose
        times = 0

        def write(self):
            nonlocal times
            choose(self)
            times += 1
            if times <= most:
                fill(volume, 10 + times)
                volume.checkpoint()
        monkeypatch.setattr(image_usage._Run, '_choose', write)
        most = 1
        usage, = measure(maintainer, volumes=['disk']).usages
        assert times == 2 and usage.left_out == 0
        most, times = 9, 0
        lower, = measure(maintainer, volumes=['disk']).usages
        assert times == 3 and lower.left_out > 0 and lower.error is None
        monkeypatch.undo()
        exact, = measure(maintainer, volumes=['disk']).usages
        assert lower.freed_blocks < exact.freed_blocks


def test_a_damaged_volume(big):
    openvolumes.create(big, 'disk', PART)
    journals = os.path.join(big.path, 'volumes', 'disk')
    name = max(n for n in os.listdir(journals) if n.startswith('journal-'))
    repositories.ruin(os.path.join(journals, name), 10)
    with maintaining(big) as maintainer:
        usage, = measure(maintainer, volumes=['disk']).usages
    assert usage.is_damaged and 'volume delete --damaged disk' in usage.error


# -- the run ------------------------------------------------------------------

@pytest.mark.parametrize('groups', [
    [], [1], list(range(1, 65)), list(range(1, 400)), [5, 1 << 20, 1 << 27],
    list(range(1, 100_000, 771))])
@pytest.mark.parametrize('partitions', [1, 2, 8])
def test_passes_over_a_partition(groups, partitions):
    """They go by the groups that exist; each number is in one pass."""
    for part in range(partitions):
        found = image_usage._stretches(groups, part, partitions)
        own = [group for group in groups if group % partitions == part]
        assert len(found) == max(1, -(-len(own) // 64))
        assert all(sum(group in numbers for group in own) <= 64
                   for numbers in found)
        assert found[0].start == 0 and found[-1].stop == 1 << 32
        assert all(one.stop == following.start
                   for one, following in zip(found, found[1:]))


def test_it_can_be_stopped(repo, maintainer):
    put(repo, 'a', content(1))
    pace = pacing.Pace()
    pace.stop()
    with pytest.raises(pacing.Stopped):
        image_usage.run_once(maintainer, pace, ['a'])
    maintenance.account(maintainer)


def test_progress(repo, maintainer):
    put(repo, 'a', maintenance.scattered(1))
    told = []
    image_usage.run_once(maintainer, pacing.Pace(
        lambda *args: told.append(args)), ['a'])
    assert {what for _, _, what in told} >= {
        'reading recipes', 'comparing blocks'}
    assert all(done <= total for done, total, _ in told)
