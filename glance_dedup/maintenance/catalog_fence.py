# SPDX-License-Identifier: Apache-2.0

"""The fence: which catalog may be used, and from which sequence on (N2).

The engine keeps the fence as two records, and replaces the older one. The
fence is synced after each accounting step and before any spool entry is
unlinked (I9), so a catalog that is older than the fence lacks a step.
"""

import struct

from glance_dedup import _engine
from glance_dedup.maintenance import catalog_db
from glance_dedup.maintenance import database

_FORMAT = struct.Struct('<16sQ')    # the catalog's id, and its sequence


class Fence:
    """The fence of a repository, for its maintainer's thread.

    :param engine: holds the maintainer's lock
    """

    def __init__(self, engine: _engine.Maintenance) -> None:
        self._engine = engine
        self._newest = -1           # of the sequences in the fence, if known
        self._current = False       # whether it has the catalog's sequence

    def read(self) -> tuple[bytes, int] | None:
        """The catalog's id and sequence; None: there is no good fence."""
        found = self._engine.read_fence()
        if found is None:
            return None
        catalog_id, sequence = _FORMAT.unpack(found)
        self._newest = max(self._newest, sequence)
        return catalog_id, sequence

    def check(self, catalog: catalog_db.Catalog) -> None:
        """Check that a catalog may be used (N2.1).

        :raises CatalogError: it may not, for the reason in the message
        """
        if not catalog.valid:
            raise database.CatalogError(
                f'the rebuild of the catalog {catalog.path} did not end')
        found = self.read()
        if found is None:
            raise database.CatalogError('the fence cannot be read')
        catalog_id, sequence = found
        if catalog_id != catalog.id:
            raise database.CatalogError('the fence is of another catalog')
        if catalog.sequence < sequence:
            raise database.CatalogError(
                f'the catalog {catalog.path} is older than the fence: it is '
                f'at {catalog.sequence}, the fence at {sequence}')

    def write(self, catalog: catalog_db.Catalog) -> None:
        """Write and sync the catalog's id and sequence."""
        self._current = False
        self._engine.write_fence(_FORMAT.pack(catalog.id, catalog.sequence))
        self._newest, self._current = catalog.sequence, True

    def doubt(self) -> None:
        """Note that the catalog changes, or may have changed."""
        self._current = False

    def renew(self, catalog: catalog_db.Catalog) -> None:
        """Write the fence, unless it has this catalog's sequence already."""
        if not self._current:
            self.write(catalog)

    def next_sequence(self, above: int) -> int:
        """The catalog's next sequence.

        It is above every sequence that the fence ever had, of any catalog,
        since the fence's higher record counts. It is odd if the fence's is
        even, and even if that is odd, so that the new record does not replace
        the newest one.
        """
        sequence = max(self._newest, above) + 1
        return sequence + (sequence - self._newest + 1) % 2
