# SPDX-License-Identifier: Apache-2.0

"""The space that blocks take: used, garbage, and stored more than once."""

import array
from collections.abc import Iterable
from collections.abc import Iterator
import heapq
import os
import tempfile
import typing

from glance_dedup.check import group_reader
from glance_dedup.check import ondisk
from glance_dedup.check import recipe_table


def add_group(figures: dict[str, int], duplicates: 'Duplicates',
              group: group_reader.Group,
              extents: Iterable[recipe_table.KeptExtent]) -> None:
    """Add the figures of a group.

    :param extents: all extents that name it
    """
    named, used = bytearray(group.slots), bytearray(group.slots)
    for e in extents:
        end = min(e.slot + e.blocks, group.slots)
        ones = b'\1' * max(0, end - e.slot)
        named[e.slot:end] = ones
        if e.owner.image_id is not None:
            used[e.slot:end] = ones
    figures['groups'] += 1
    figures['freed_blocks'] += group.freed
    figures['damaged_blocks'] += group.damaged
    figures['metadata_bytes'] += min(group.data, group.size)
    if group.is_cold:
        figures['cold_groups'] += 1
        figures['cold_bytes'] += group.end
    else:
        figures['stored_bytes'] += group.stored
        figures['garbage_bytes'] += max(
            0, group.size - group.data - group.covered)
    for slot, state in enumerate(group.states):
        if state == ondisk.GOOD:
            figures['blocks_verified'] += not group.is_cold
            if slot in group.nodedup:
                figures['copy_blocks'] += 1
            else:
                duplicates.add(group.fingerprint(slot))
            figures['garbage_blocks'] += not named[slot]
            if used[slot]:
                figures['referenced_bytes'] += group.lengths[slot]


class Duplicates:
    """Counts blocks that are stored more than once, in bounded memory.

    It keeps 8 bytes of each fingerprint: sorted runs in a temporary file,
    merged at the end.
    """

    RUN = 1 << 18
    PIECE = 1 << 16             # of a run that is in memory, at most
    PIECES = 16 << 20           # of all runs, as far as pieces of 4 KiB allow

    def __init__(self) -> None:
        self._values = array.array('Q')
        self._file: typing.IO[bytes] | None = None
        self._runs: list[tuple[int, int]] = []

    def add(self, fingerprint: bytes) -> None:
        """Take a block in."""
        self._values.append(int.from_bytes(fingerprint[:8], 'little'))
        if len(self._values) >= self.RUN:
            self._flush()

    def _flush(self) -> None:
        file = self._file
        if file is None:
            file = self._file = tempfile.TemporaryFile()
        run = array.array('Q', sorted(self._values)).tobytes()
        self._runs.append((file.seek(0, os.SEEK_END), len(run)))
        file.write(run)
        self._values = array.array('Q')

    def _read_run(self, file: typing.IO[bytes], start: int, length: int
                  ) -> Iterator[int]:
        fair = self.PIECES // len(self._runs) // 4096 * 4096
        size = min(self.PIECE, max(4096, fair))
        for offset in range(0, length, size):
            file.seek(start + offset)
            yield from array.array(
                'Q', file.read(min(size, length - offset)))

    def count(self) -> int:
        """Return the number of repeated fingerprints so far. Call it once."""
        file = self._file
        runs = [] if file is None else [
            self._read_run(file, *run) for run in self._runs]
        found, last = 0, None
        for value in heapq.merge(sorted(self._values), *runs):
            found += value == last
            last = value
        if file is not None:
            file.close()
        return found
