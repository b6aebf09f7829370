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
(B1): if a file cannot be read, blocks may be stored again.
"""

from collections.abc import Iterator
import logging
import os
import re
import time
from typing import NamedTuple

from glance_dedup.backup import rank_spool
from glance_dedup.base import closing
from glance_dedup.base import exceptions

#: Prefix of the directories' names.
PREFIX = 'run-'
#: Seconds for which a directory of another run stays after its last round: no
#: process holds its lock between two rounds. The next night's run removes it.
MAX_AGE = 43200.0
#: References that are read together: as many requests wait for them.
PIECE = rank_spool.PIECE // 2
_LOG = logging.getLogger(__name__)
_file = re.compile('([0-9]{1,9})-([1-9][0-9]{0,8})-([0-9]{1,9})').fullmatch


def is_of(entry: os.DirEntry[str], run: str) -> bool:
    """Return whether a directory is of a run."""
    return entry.name.startswith(f'{PREFIX}{run}-')


def may_be_needed(entry: os.DirEntry[str], run: str) -> bool:
    """Return whether this run, or another one, may need a directory.

    :raises OSError: it is gone
    """
    return is_of(entry, run) or (
        entry.name.startswith(PREFIX)
        and time.time() - entry.stat(follow_symlinks=False).st_mtime < MAX_AGE)


class _File(NamedTuple):
    name: str
    partitions: int
    number: int


class EarlierRounds(closing.Closing):
    """A rank's references of earlier rounds, locked until :meth:`close`.

    :param spools: the place of a repository's spools
    :param run: a random name of the run
    """

    def __init__(self, spools: str, run: str, ranks: int, rank: int) -> None:
        self._spool = rank_spool.Spool(
            os.path.join(spools, f'{PREFIX}{run}-{ranks}-{rank}'))
        self._files = [
            _File(name, int(found[2]), int(found[3]))
            for name in self._spool.names() if (found := _file(name))]

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
        for file in list(self._files):
            if (file.number * partitions < (number + 1) * file.partitions
                    and number * file.partitions
                    < (file.number + 1) * partitions):
                try:
                    yield from self._spool.pieces(
                        file.name, rank_spool.RECORD, PIECE)
                except exceptions.RepositoryError as e:
                    self._files.remove(file)
                    _LOG.warning('blocks of an earlier round may be stored '
                                 'again: %s', e)

    def retain(self, spool: rank_spool.Spool, kind: str, round_: int,
               partitions: int) -> None:
        """Take the references of a round out of its spool.

        :param kind: of the spool's files, one for each partition
        """
        self._spool.drop_all(str(round_))   # of an attempt that broke
        for number in range(partitions):
            spool.move(f'{kind}-{number}', self._spool,
                       f'{round_}-{partitions}-{number}')
