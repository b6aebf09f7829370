# SPDX-License-Identifier: Apache-2.0

"""The split of sources and blocks among the ranks."""

import dataclasses
import os

from glance_dedup.backup import work_split

HERE = os.uname().nodename


@dataclasses.dataclass
class Ranks:
    """A set of ranks that includes this process."""

    rank: int
    size: int


def source(name, size, host=HERE):
    return {'name': name, 'size': size, 'host': host}


def record(key, address=1):
    return key.to_bytes(8, 'big') + address.to_bytes(5, 'little')


def test_each_source_of_this_host_is_of_one_rank():
    sources = [source('a', 3), source('b', 9), source('c', 0), source('d', 7),
               source('e', 5), source('f', 99, 'elsewhere')]
    shares = [[found['name'] for found in work_split.own_sources(
        rank, [0, 2], sources)] for rank in (0, 2)]
    assert shares == [['b', 'a', 'c'], ['d', 'e']]


def test_records_go_to_the_rank_and_the_partition_of_their_key():
    ranks = [Ranks(rank, 4) for rank in range(4)]
    keys = [0, 1 << 59, 1 << 61, 1 << 62, 3 << 62, (1 << 64) - 1]
    sent = {}

    class Exchange:
        @staticmethod
        def send(rank, part):
            sent[rank] = sent.get(rank, b'') + part

    work_split.send(ranks[0], Exchange(), b''.join(map(record, keys)))
    assert sent == {0: record(0) + record(1 << 59) + record(1 << 61),
                    1: record(1 << 62),
                    3: record(3 << 62) + record((1 << 64) - 1)}
    found = {rank: dict(work_split.by_partition(ranks[rank], 2, part))
             for rank, part in sent.items()}
    assert found == {0: {0: record(0) + record(1 << 59),
                         1: record(1 << 61)},
                     1: {0: record(1 << 62)},
                     3: {0: record(3 << 62), 1: record((1 << 64) - 1)}}
