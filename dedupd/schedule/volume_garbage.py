# SPDX-License-Identifier: Apache-2.0

"""Counts the garbage that volumes have left since the last collection.

A volume that is overwritten again and again leaves garbage faster than
collections at a fixed interval free it. Each edition that an owner deletes
leaves an entry ``D-`` in the spool, whose header says how many bytes were
stored for the edition. The next edition may share some of them. So this counts
too much rather than too little; but it counts each stored byte only once.
"""

import contextlib

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import imageids


class Pressure:
    """The garbage that volumes have left. Not thread-safe.

    :ivar bytes: of the disk, stored for editions that were deleted
    """

    def __init__(self, engine: _engine.Maintenance) -> None:
        self._engine = engine
        self._seen: set[str] = set()
        self.bytes = 0

    def look(self) -> None:
        """Count the entries that came since the last call.

        Only they are opened; the others cost their part of the listing. An
        entry that accounting removes between two calls is missed.
        """
        names = {name for name in self._engine.spool()
                 if name.startswith('D-')}
        self._seen &= names
        for name in names - self._seen:
            self.bytes += self._stored_bytes(name)
            self._seen.add(name)

    def collected(self) -> None:
        """Begin again at zero, because a collection begins."""
        self.bytes = 0

    def _stored_bytes(self, name: str) -> int:
        try:
            with contextlib.closing(self._engine.open_entry(name)) as entry:
                if entry.complete:
                    header = entry.header()
                    if imageids.of_volume(header['image_id']) is not None:
                        return header['stored_bytes']
        except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
            pass
        return 0
