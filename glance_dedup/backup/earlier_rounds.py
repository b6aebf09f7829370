# SPDX-License-Identifier: Apache-2.0

"""References of a run's earlier rounds, so that later ones store no copies.

The exact index has the blocks of earlier rounds only where there is an index
and its lock could be had. So each rank also keeps the references that it
received as the holder of partitions (stage 3a), until the run ends. They lie
beside the spools, in a directory that names the run, the number of ranks, and
the rank. If a host drops out, the ranks get other partitions, and begin
without references.

The directory has one file of records for each partition of each round,
``ROUND-PARTITIONS-NUMBER``. Rounds differ in their number of partitions, so a
partition reads all files whose keys can be among its own. References are hints
(B1).
"""

from collections.abc import Iterator
import os
import re

from glance_dedup.backup import rank_spool
from glance_dedup.base import closing

#: Prefix of the directories' names.
PREFIX = 'run-'
#: References that are read together: as many requests wait for them.
PIECE = rank_spool.PIECE // 2
_file = re.compile('([0-9]{1,9})-([1-9][0-9]{0,8})-([0-9]{1,9})').fullmatch


class EarlierRounds(closing.Closing):
    """A rank's references of earlier rounds, locked until :meth:`close`.

    :param spools: the place of a repository's spools
    :param run: a random name of the run
    """

    def __init__(self, spools: str, run: str, ranks: int, rank: int) -> None:
        self._spool = rank_spool.Spool(
            os.path.join(spools, f'{PREFIX}{run}-{ranks}-{rank}'))

    def close(self) -> None:
        """Give up the lock; the references stay."""
        self._spool.close()

    def remove(self) -> None:
        """Remove all references, and close."""
        self._spool.remove()

    def pieces(self, number: int, partitions: int) -> Iterator[bytes]:
        """Yield the references whose keys can be in a partition.

        :param partitions: of this rank in this round
        """
        for name in self._spool.names():
            found = _file(name)
            if found is None:
                continue
            _, count, other = map(int, found.groups())
            if (other * partitions < (number + 1) * count
                    and number * count < (other + 1) * partitions):
                yield from self._spool.pieces(name, rank_spool.RECORD, PIECE)

    def keep(self, spool: rank_spool.Spool, kind: str, round_: int,
             partitions: int) -> None:
        """Take the references of a round out of its spool.

        :param kind: of the spool's files, one for each partition
        """
        for number in range(partitions):
            spool.move(f'{kind}-{number}', self._spool,
                       f'{round_}-{partitions}-{number}')
