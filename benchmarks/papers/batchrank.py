# SPDX-License-Identifier: Apache-2.0

"""A rank of a batch backup that is measured (``batch.py`` starts it).

It is the product's rank, and also writes its events to a file: each event with
the processor time of this process so far. The environment variable
``BATCH_RANK`` has the :class:`Trial` as JSON: the varied values.
"""

import cProfile
import dataclasses
import json
import os
import sys
import time
from typing import Any

import _path  # noqa: F401  finds the modules beside it
import common  # noqa: F401  finds the packages beside it

from glance_dedup import _engine
from glance_dedup.backup import digests
from glance_dedup.backup import rank
from glance_dedup.backup import rank_exchange
from glance_dedup.backup import rank_spool
from glance_dedup.backup import stages


@dataclasses.dataclass(frozen=True)
class Trial:
    """The varied values; the defaults are the product's."""

    log: str
    """A directory for what the ranks write."""
    buffer: int = rank_exchange.BUFFER
    """Bytes of a message's records; in option 1 of each buffer."""
    piece: int = rank_spool.PIECE
    """Requests that are sorted and joined together."""
    option: int = 2
    """How requests go to their partitions."""
    written: dict[str, list[int]] | None = None
    """For each disk, the segments that were written to, as a driver that keeps
    dirty bits knows them. None: digests tell."""
    profile: bool = False


def read_trial() -> Trial:
    return Trial(**json.loads(os.environ['BATCH_RANK']))


class Spool(rank_spool.Spool):
    """A spool that gives pieces of the trial's size."""

    trial: Trial

    def __init__(self, path: str) -> None:
        # In option 1 a message is of one partition, and is written at once.
        super().__init__(path, *([0] if self.trial.option == 1 else []))

    def pieces(self, name: str, size: int, count: int = 0):
        return super().pieces(name, size, count or self.trial.piece)


class PartitionExchange(rank_exchange.Exchange):
    """Option 1 of the paper: a send buffer for each partition of each rank."""

    partitions = 0      # of each rank

    def send(self, rank: int, records: bytes) -> None:
        if not hasattr(self, '_parts'):
            self._parts = [bytearray() for _ in range(
                len(self._buffers) * self.partitions)]
        first, size = rank * self.partitions, rank_exchange.BUFFER
        for number, part in enumerate(_engine.split_records(
                records, len(self._parts), first, self.partitions), first):
            buffer = self._parts[number]
            buffer += part
            while len(buffer) >= size:
                piece = bytes(buffer[:size])
                del buffer[:size]
                self._flush(rank, self._kind, piece)

    def _finish(self) -> None:
        for number, buffer in enumerate(getattr(self, '_parts', ())):
            self._flush(number // self.partitions, self._kind, bytes(buffer))
        super()._finish()


class Ranks(rank_exchange.Ranks):
    """Ranks that send requests and references by option 1."""

    def exchange(self, kind: bytes, receive: Any) -> rank_exchange.Exchange:
        found = super().exchange(kind, receive)
        if kind in (b'scan', b'refer'):
            found.__class__ = PartitionExchange
        return found


class Round(stages.Round):
    """A round that gives option 1's exchange its number of partitions."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        PartitionExchange.partitions = self._partitions


class DirtyBits(digests.DigestChanges):
    """Digests, which stay unread for segments that were not written to."""

    written: dict[str, list[int]] = {}

    def is_clean(self, number: int) -> bool:
        if (self._known is None or self.base is None
                or number in self.written[self._place.name]):
            return False
        self._add(self._known.get(number))
        return True


class Rank(rank.Rank):
    """A rank that records the clean segments."""

    def _committed(self, task: stages.Task, stat: Any) -> None:
        rank.tell(self._ranks.rank, 'segments', name=task.view.name,
                  segments=task.clean.hex())
        super()._committed(task, stat)


def main() -> int:
    """Run one rank of the trial."""
    trial = read_trial()
    rank_exchange.BUFFER = (
        trial.buffer // rank_spool.RECORD * rank_spool.RECORD)
    Spool.trial = trial
    rank_spool.Spool = Spool  # type: ignore[assignment,misc]
    rank.Rank = Rank  # type: ignore[misc]
    if trial.option == 1:
        rank_exchange.Ranks = Ranks  # type: ignore[misc]
        stages.Round = Round  # type: ignore[assignment,misc]
    if trial.written is not None:
        DirtyBits.written = trial.written
        digests.DigestChanges = DirtyBits  # type: ignore[misc]
    told = rank.tell
    path = os.path.join(trial.log, str(os.getpid()))
    with open(path, 'w', encoding='utf-8') as log:
        def tell(rank: int, event: str, **facts: Any) -> None:
            if event != 'progress':
                log.write(json.dumps({
                    'event': event, 'rank': rank, 'wall': time.monotonic(),
                    'used': time.process_time(), **facts}) + '\n')
            if event != 'segments':
                told(rank, event, **facts)
        rank.tell = tell
        if not trial.profile:
            return rank.main()
        profile = cProfile.Profile()
        try:
            return profile.runcall(rank.main)
        finally:
            profile.dump_stats(path + '.profile')


if __name__ == '__main__':
    sys.exit(main())
