# SPDX-License-Identifier: Apache-2.0

"""A rank's files: many at once, in bounded memory."""

import os

from glance_dedup.backup import rank_spool

PARTITIONS = 3000   # more than a process may have open files
LIMIT = 100_000


def record(partition: int, number: int) -> bytes:
    return (partition << 32 | number).to_bytes(rank_spool.RECORD, 'big')


def fill(spool: rank_spool.Spool, rounds: int) -> int:
    """Append to all partitions; returns the most bytes not written yet."""
    most = appended = 0
    for number in range(rounds):
        for partition in range(PARTITIONS):
            spool.append(f'requests-{partition}', record(partition, number))
        appended += PARTITIONS * rank_spool.RECORD
        most = max(most, appended - sum(
            entry.stat().st_size for entry in os.scandir(spool.path)))
    return most


def test_many_partitions(tmp_path):
    with rank_spool.Spool(str(tmp_path / 'spool'), LIMIT) as spool:
        before = os.listdir('/proc/self/fd')
        assert 0 < fill(spool, 10) <= LIMIT + rank_spool.RECORD
        assert len(os.listdir('/proc/self/fd')) == len(before)
        spool.end('requests')
        for partition in (0, 1, PARTITIONS - 1):
            assert b''.join(spool.pieces(
                f'requests-{partition}', rank_spool.RECORD)) == b''.join(
                record(partition, number) for number in range(10))
        assert not spool.lost


def test_only_its_kind_is_written(tmp_path):
    with rank_spool.Spool(str(tmp_path / 'spool')) as spool:
        for name in ('known-1', 'known', 'knowns', 'again-1'):
            spool.append(name, bytes(rank_spool.RECORD))
        spool.end('known')
        assert spool.names() == ['known', 'known-1']


def test_records_that_wait_are_removed(tmp_path):
    with rank_spool.Spool(str(tmp_path / 'spool')) as spool:
        spool.append('known-1', bytes(rank_spool.RECORD))
        spool.clear()
    assert spool.names() == []


def test_moving_to_a_spool_that_cannot_be_written(tmp_path):
    """The spool from which a file is moved is not lost."""
    with (rank_spool.Spool(str(tmp_path / 'a')) as spool,
          rank_spool.Spool(str(tmp_path / 'b')) as other):
        for name in 'known-1', 'blocks':
            spool.append(name, bytes(rank_spool.RECORD))
        (tmp_path / 'b' / '1-1-1').mkdir()
        spool.move('known-1', other, '1-1-1')
        assert other.lost and not spool.lost
        spool.end('blocks')
        assert spool.names() == ['blocks', 'known-1']


def test_nothing_can_be_written(tmp_path):
    with rank_spool.Spool(str(tmp_path / 'spool'), 0) as spool:
        (tmp_path / 'spool' / 'known-1').mkdir()
        spool.append('known-1', bytes(rank_spool.RECORD))
        assert 'cannot be written' in spool.lost
        spool.append('known-2', bytes(rank_spool.RECORD))
        spool.end('known')
        assert spool.names() == ['known-1']
