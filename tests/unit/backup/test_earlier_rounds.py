# SPDX-License-Identifier: Apache-2.0

"""References of earlier rounds reach the partitions of later ones."""

import random

import pytest

from glance_dedup import _engine
from glance_dedup.backup import earlier_rounds
from glance_dedup.backup import rank_spool
from glance_dedup.base import exceptions

RANKS, RANK = 3, 1


def some_references(seed, count=300):
    """Return references that this rank has."""
    rng = random.Random(seed)
    first, end = ((rank << 64) // RANKS + 1 for rank in (RANK, RANK + 1))
    return [rng.randrange(first, end).to_bytes(8, 'big')
            + number.to_bytes(5, 'little') for number in range(count)]


def split(records, partitions):
    return _engine.split_records(b''.join(records), RANKS * partitions,
                                 RANK * partitions, partitions)


def keep(path, round_, references, partitions):
    with (rank_spool.Spool(str(path / 'round')) as spool,
          earlier_rounds.EarlierRounds(str(path), 'a', RANKS, RANK) as found):
        for number, part in enumerate(split(references, partitions)):
            spool.append(f'known-{number}', part)
        found.keep(spool, 'known', round_, partitions)
        assert not spool.names()
        spool.remove()


@pytest.mark.parametrize('then', [1, 2, 3, 7, 40])
def test_each_partition_has_its_references(tmp_path, then):
    rounds = {1: 1, 2: 5, 3: 40}
    references = {round_: some_references(round_) for round_ in rounds}
    for round_, partitions in rounds.items():
        keep(tmp_path, round_, references[round_], partitions)
    everything = [record for found in references.values() for record in found]
    with earlier_rounds.EarlierRounds(str(tmp_path), 'a', RANKS, RANK) as all_:
        for number, part in enumerate(split(everything, then)):
            found = b''.join(all_.pieces(number, then))
            records = {found[at:at + 13] for at in range(0, len(found), 13)}
            assert {part[at:at + 13] for at in range(0, len(part), 13)} <= (
                records)
        # Of as many partitions, none reads another one's.
        if then == 40:
            assert len(found) < len(b''.join(everything)) / 2
        all_.remove()
    assert not list(tmp_path.iterdir())


def test_a_round_that_is_repeated_replaces_its_references(tmp_path):
    for seed in 1, 2:
        keep(tmp_path, 1, some_references(seed), 2)
    with earlier_rounds.EarlierRounds(str(tmp_path), 'a', RANKS, RANK) as all_:
        assert b''.join([*all_.pieces(0, 2), *all_.pieces(1, 2)]) == b''.join(
            split(some_references(2), 2))


def test_other_files_are_no_references(tmp_path):
    with earlier_rounds.EarlierRounds(str(tmp_path), 'a', RANKS, RANK) as all_:
        for name in '1-0-0', '1-1', 'x-1-0', '1-1-1':
            (tmp_path / f'run-a-{RANKS}-{RANK}' / name).write_bytes(b'\1' * 13)
        assert not list(all_.pieces(0, 1))
        with pytest.raises(exceptions.BusyError):
            earlier_rounds.EarlierRounds(str(tmp_path), 'a', RANKS, RANK)
