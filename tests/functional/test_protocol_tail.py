# SPDX-License-Identifier: Apache-2.0

"""The protocol of blocks: rule N7.3, the tail that a dead writer left."""

import errno

import pytest

from glance_dedup.check import checker
from tests.functional import protocol
from tests.functional.protocol import BLOCK
from tests.functional.protocol import is_coming
from tests.functional.protocol import LEASE
from tests.functional.protocol import Once
from tests.functional.protocol import sha
from tests.functional.protocol import SIZE
from tests.functional.protocol import store
from tests.functional import watched_process
from tests.support import repositories
from tests.support.repositories import Group
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all

witness = protocol.witness
path = protocol.path


def kill_before_publishing(witness, path, image_id, seed, size=SIZE):
    """Kill a writer as soon as its entries are in the file."""
    hook = Once(lambda c: is_coming(c, 'fdatasync', 'groups/*'),
                lambda c: watched_process.KILL)
    run = witness.run(path, [['put', image_id, seed, size]], hook)
    assert hook.happened and run.status == -9


def test_n7_3_published_record_lost_by_a_crash_of_the_machine(path):
    """The image that was committed stays; its entries are made durable."""
    store(path, ('old', 1), ('committed', 2))
    group = Group(path, 1)
    before = [group.raw_entry(slot) for slot in range(20)]
    group.forget_newest_record()
    group.save()
    assert Group(path, 1).record()[2] == 10
    with open_repository(path) as repo:
        assert read_all(repo, 'committed') == noise(SIZE, 2)
    store(path, ('new', 3))
    group = Group(path, 1)
    assert [group.raw_entry(slot) for slot in range(20)] == before
    assert group.record()[2] == 30
    with open_repository(path) as repo:
        for image_id, seed in (('old', 1), ('committed', 2), ('new', 3)):
            assert read_all(repo, image_id) == noise(SIZE, seed)
        assert put(repo, 'again', noise(SIZE, 2)).new_bytes == 0
    repositories.require_clean(path)


@pytest.mark.parametrize('codec', ['none', 'lz4', 'zstd'])
def test_n7_3_both_records_lost(path, codec):
    text = b''.join(b'%d lines of text\n' % i for i in range(1500))
    with open_repository(path, codec=codec) as repo:
        put(repo, 'text', text)
        put(repo, 'noise', noise(SIZE))
    group = Group(path, 1)
    for _ in range(2):
        group.forget_newest_record()
    group.save()
    assert Group(path, 1).record() == [0, 0, 0, 0, 0]
    with open_repository(path) as repo:
        put(repo, 'new', noise(SIZE, 3))
        assert read_all(repo, 'text') == text
        assert read_all(repo, 'noise') == noise(SIZE)
        assert read_all(repo, 'new') == noise(SIZE, 3)
    repositories.require_clean(path)


def test_n7_3_tail_is_written_again_and_synced(witness, path):
    """Blocks that verify may be only in the page cache; they are rewritten."""
    store(path, ('old', 1))
    kill_before_publishing(witness, path, 'died', 2)
    assert Group(path, 1).record()[2] == 10
    before = [Group(path, 1).raw_entry(slot) for slot in range(20)]
    run = witness.run(path, [['statistics'], ['put', 'new', 3, SIZE]])
    group = Group(path, 1)
    assert [group.raw_entry(slot) for slot in range(20)] == before
    segments = sorted({group.entry(slot)[2] for slot in range(10, 20)})
    assert len(segments) == 3
    synced = run.find('fdatasync', 'groups/00000001', step=1)
    published = run.find('pwritev', 'groups/00000001', '512', step=1,
                         after=synced)
    rewritten = [
        run.find('pwritev', 'groups/00000001', str(offset), step=1)
        for offset in [*segments, group.entry_offset(10)]]
    assert max(rewritten) < synced < published
    # Our writes come after that.
    run.find('pwritev', 'groups/00000001', str(group.entry_offset(20)),
             step=1, after=published)
    assert run.outcomes[1]['error'] is None
    store(path, ('again', 2))
    with open_repository(path) as repo:
        assert repo.stat('again').new_bytes == 0
        assert read_all(repo, 'again') == noise(SIZE, 2)
    repositories.require_clean(path)


@pytest.mark.parametrize('damage', ['entry', 'last', 'segment', 'header',
                                    'checksum', 'truncated', 'sector'])
def test_n7_3_torn_tail_is_not_used_nor_are_its_slots(
        witness, path, damage):
    store(path, ('old', 1))
    kill_before_publishing(witness, path, 'died', 2)
    group = Group(path, 1)
    # Blocks 0 to 3 of it are one segment, in slots 10 to 13.
    _, _, segment, _ = group.entry(10)
    lost = range(10, 14)
    state = repositories.DAMAGED
    if damage == 'entry':
        group.data[group.entry_offset(12) + 40] ^= 1
        lost, state = [12], repositories.LIVE   # and not valid
    elif damage == 'last':
        group.data[group.entry_offset(19) + 40] ^= 1
        lost, state = [19], repositories.LIVE
    elif damage == 'segment':
        group.data[segment + 32 + 600] ^= 1
        lost = [11]
    elif damage == 'checksum':
        # No block needs this byte.
        group.data[segment + 24] ^= 1
        lost = []
    elif damage == 'header':
        group.data[segment + 8] ^= 1
    elif damage == 'sector':
        # The sector with slots 9 to 17 was written as zeros, but slot 9.
        at = group.entry_offset(10)
        group.data[at:at + 8 * 56] = bytes(8 * 56)
        lost, state = range(10, 18), repositories.VOID
    else:
        del group.data[group.entry(18)[2] + 40:]
        lost = range(18, 20)
    group.save()
    kept = [s for s in range(20) if s not in lost]
    before = {slot: group.raw_entry(slot) for slot in kept}
    with open_repository(path, codec='none') as repo:
        stat = put(repo, 'new', noise(SIZE, 3))
        assert stat.new_bytes == SIZE
        extents = list(repo.open_image('new').extents())
        assert [(e.group, e.slot, e.blocks) for e in extents] == [(1, 20, 10)]
        after = Group(path, 1)
        assert {s: after.raw_entry(s) for s in kept} == before
        assert [after.state(s) for s in lost] == [state] * len(lost)
        assert after.record()[2] == 30
        # The lost blocks are stored again; the others were adopted.
        stat = put(repo, 'again', noise(SIZE, 2))
        assert stat.new_bytes == len(lost) * BLOCK
        for image_id, seed in (('old', 1), ('new', 3), ('again', 2)):
            assert read_all(repo, image_id) == noise(SIZE, seed)
    if state == repositories.LIVE:
        # The block that an invalid entry named is unknown: the entry stays,
        # until the counts show that no image needs it (N6).
        report = checker.check(path)
        assert [f.file for f in report.findings
                if f.severity == checker.DAMAGE] == ['groups/00000001']
    else:
        repositories.require_clean(path)


def test_n7_3_tail_whose_content_is_not_its_fingerprints(witness, path):
    """Entries and segment verify by their checksums, but by no digest."""
    kill_before_publishing(witness, path, 'died', 2)
    group = Group(path, 1)
    fingerprint, checksum, segment, place = group.entry(3)
    group.write_entry(3, bytes(32), checksum, segment, place)
    group.save()
    store(path, ('new', 3))
    assert Group(path, 1).state(3) == repositories.DAMAGED
    assert Group(path, 1).state(4) == repositories.LIVE
    with open_repository(path) as repo:
        assert read_all(repo, 'new') == noise(SIZE, 3)
    repositories.require_clean(path)


def test_n7_3_unsynced_blocks_are_no_hits(witness, path):
    """I1: blocks beyond the published count do not exist for others."""
    store(path, ('old', 1))
    kill_before_publishing(witness, path, 'died', 2)
    (path.parent / 'repository-filter').rename(path.parent / 'no-filter')
    with repositories.holding(path / 'locks' / 'groups', LEASE):
        with open_repository(path) as repo:
            repo.rebuild_filter()
            stat = put(repo, 'image', noise(SIZE, 2))
            assert stat.new_bytes == SIZE
            assert {e.group for e in repo.open_image('image').extents()
                    } == {2}
            assert put(repo, 'also-old', noise(SIZE, 1)).new_bytes == 0


@pytest.mark.parametrize('fault', [errno.EIO, errno.ENOSPC])
def test_n7_3_renewing_fails(witness, path, fault):
    """Its entries stay unpublished, and another group is used."""
    store(path, ('old', 1))
    kill_before_publishing(witness, path, 'died', 2)
    hook = Once(lambda c: is_coming(c, 'fdatasync', 'groups/00000001'),
                lambda c: fault)
    run = witness.run(path, [['put', 'image', 3, SIZE], ['read', 'image']],
                      hook)
    assert hook.happened
    record = Group(path, 1).record()
    assert record[2] == 10 and record[3] & repositories.POISONED
    assert run.outcomes[0]['error'] is None, run.outcomes[0]
    assert run.outcomes[1]['sha256'] == sha(3)
    with open_repository(path) as repo:
        assert {e.group for e in repo.open_image('image').extents()} == {2}
        assert read_all(repo, 'old') == noise(SIZE)
    repositories.require_clean(path)
