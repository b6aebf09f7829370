# SPDX-License-Identifier: Apache-2.0

"""The split of a round's work among the ranks: the sources, and the blocks.

A rank reads some of the sources on its host. Of all fingerprints, each rank
has an equal part, and splits this part into *partitions*. So equal blocks are
compared by one rank, whichever ranks read them.
"""

from collections.abc import Iterator
import os
from typing import Any

from glance_dedup import _engine
from glance_dedup.backup import rank_exchange


def own_sources(own_rank: int, ranks_here: list[int],
                sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a rank's part of the sources on this host.

    :param ranks_here: all ranks on this host
    """
    here = [source for source in sources
            if source['host'] == os.uname().nodename]
    # The largest first, so that the shares are about equal.
    here.sort(key=lambda source: (-source['size'], source['name']))
    loads = dict.fromkeys(ranks_here, 0)
    own = []
    for source in here:
        rank = min(loads, key=lambda rank: (loads[rank], rank))
        loads[rank] += max(source['size'], 1)
        if rank == own_rank:
            own.append(source)
    return own


def send(ranks: rank_exchange.Ranks, exchange: rank_exchange.Exchange,
         records: bytes) -> None:
    """Send records to the ranks that have their partitions."""
    for rank, part in enumerate(_engine.split_records(
            records, ranks.size, 0, ranks.size)):
        if part:
            exchange.send(rank, part)


def by_partition(ranks: rank_exchange.Ranks, partitions: int, records: bytes
                 ) -> Iterator[tuple[int, bytes]]:
    """Yield records of this rank, by the number of their partition."""
    for number, part in enumerate(_engine.split_records(
            records, ranks.size * partitions, ranks.rank * partitions,
            partitions)):
        if part:
            yield number, part
