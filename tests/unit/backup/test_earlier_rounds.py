# SPDX-License-Identifier: Apache-2.0

"""References of earlier rounds reach the partitions of later ones."""

import os
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


def retain(path, round_, references, partitions):
    with (rank_spool.Spool(str(path / 'round')) as spool,
          earlier_rounds.EarlierRounds(str(path), 'a', RANKS, RANK) as found):
        for number, part in enumerate(split(references, partitions)):
            spool.append(f'known-{number}', part)
        found.retain(spool, 'known', round_, partitions)
        assert not spool.names()
        spool.remove()


@pytest.mark.parametrize('then', [1, 2, 3, 7, 40])
def test_each_partition_has_its_references(tmp_path, then):
    rounds = {1: 1, 2: 5, 3: 40}
    references = {round_: some_references(round_) for round_ in rounds}
    for round_, partitions in rounds.items():
        retain(tmp_path, round_, references[round_], partitions)
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
    for seed, partitions in (1, 3), (2, 2):
        retain(tmp_path, 1, some_references(seed), partitions)
    with earlier_rounds.EarlierRounds(str(tmp_path), 'a', RANKS, RANK) as all_:
        assert b''.join([*all_.pieces(0, 2), *all_.pieces(1, 2)]) == b''.join(
            split(some_references(2), 2))


@pytest.mark.parametrize('damage', [
    lambda path: path.write_bytes(b'12345678901234'),
    lambda path: (path.unlink(), path.mkdir())])
def test_a_file_that_cannot_be_read(tmp_path, damage, caplog):
    """The references are hints, so the round goes on without the file."""
    for round_ in 1, 2:
        retain(tmp_path, round_, some_references(round_), 2)
    damage(tmp_path / f'run-a-{RANKS}-{RANK}' / '1-2-1')
    with earlier_rounds.EarlierRounds(str(tmp_path), 'a', RANKS, RANK) as all_:
        for _ in range(2):
            found = b''.join([*all_.pieces(0, 2), *all_.pieces(1, 2)])
            assert split(some_references(2), 2)[1] in found
    assert caplog.text.count('may be stored again') == 1
    assert '1-2-1' in caplog.text


def test_directories_of_other_runs(tmp_path):
    """One that may go on is not removed, and an old one is."""
    for run in 'a', 'b', 'c':
        retain_of_run(tmp_path, run)
    os.utime(tmp_path / f'run-c-{RANKS}-{RANK}', (7, 7))
    assert not rank_spool.remove_dead(str(tmp_path), lambda entry: (
        earlier_rounds.may_be_needed(entry, 'c')))
    removed = rank_spool.remove_dead(str(tmp_path), lambda entry: (
        earlier_rounds.may_be_needed(entry, 'a')))
    assert removed == [str(tmp_path / f'run-c-{RANKS}-{RANK}')]


def retain_of_run(path, run):
    earlier_rounds.EarlierRounds(str(path), run, RANKS, RANK).close()


def test_other_files_are_no_references(tmp_path):
    with earlier_rounds.EarlierRounds(str(tmp_path), 'a', RANKS, RANK) as all_:
        for name in '1-0-0', '1-1', 'x-1-0', '1-1-1':
            (tmp_path / f'run-a-{RANKS}-{RANK}' / name).write_bytes(b'\1' * 13)
    with earlier_rounds.EarlierRounds(str(tmp_path), 'a', RANKS, RANK) as all_:
        assert not list(all_.pieces(0, 1))
        with pytest.raises(exceptions.BusyError):
            earlier_rounds.EarlierRounds(str(tmp_path), 'a', RANKS, RANK)
