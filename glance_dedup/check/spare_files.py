# SPDX-License-Identifier: Apache-2.0

"""The spare copies of blocks, in files of ``spares/``."""

from collections.abc import Iterable

from glance_dedup.check import files
from glance_dedup.check import group_reader
from glance_dedup.check import ondisk
from glance_dedup.check import record_table
from glance_dedup.check import repo_directories


class Spares:
    """The good spare copies of blocks.

    :param reader: which knows the scopes that copies may be of
    """

    def __init__(self, directories: repo_directories.Directories,
                 reader: group_reader.GroupReader) -> None:
        self._directories = directories
        self._findings = directories.findings
        self._reader = reader
        # Their scope ids and fingerprints.
        self._good = record_table.RecordTable()

    def replaces(self, group: group_reader.Group, slot: int) -> bool:
        """Return whether a copy replaces the lost block of a slot."""
        return group.tells and bool(group.lengths[slot]) and (
            group.scope + group.fingerprint(slot) in self._good)

    def close(self) -> None:
        """Forget all copies."""
        self._good.close()

    def check(self, numbers: Iterable[int]) -> None:
        """Read files of spare copies; report their problems."""
        find = self._findings.find
        for number in numbers:
            file = f'spares/{number:08x}'
            group, failure = None, None
            for _ in files.looks():
                failure = None
                try:
                    group = self._reader.look(
                        self._directories['spares'], number, spare=True)
                    if not group.problems:
                        break
                except files.Forgotten:
                    continue
                except files.Gone:
                    break
                except ondisk.Damage as e:
                    failure = e
            if failure is not None:
                find(ondisk.DAMAGE, file, failure.offset, failure.sentence)
            elif group is not None:
                for p in group.problems:
                    find(group.severity_of(p), file, p.offset, p.sentence)
                if not group.tells:
                    find(ondisk.NOTE, file, None,
                         'is never read: other blocks '
                         'can have the fingerprints of these')
                self._add(group)

    def _add(self, group: group_reader.Group) -> None:
        self._findings.figures['spare_bytes'] += group.size
        for slot, state in enumerate(group.states):
            if state == ondisk.GOOD:
                self._findings.figures['spares'] += 1
                self._good.put(group.scopes[slot] + group.fingerprint(slot))
