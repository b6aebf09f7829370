# SPDX-License-Identifier: Apache-2.0

"""Figures of the slices that a process read.

Those who need no object store import this, and not what asks one.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Figures:
    """What this process did for slices since it opened the repository."""

    gets: int = 0
    """Requests to the object store."""
    received: int = 0
    """Bytes of objects that these brought."""
    asked: int = 0
    """Slices that dedupd was asked for."""
    evicted: int = 0
    """Slices that were removed, to keep the cache's size."""
    unavailable: int = 0
    """Slices that the object store did not give."""
    cached: int | None = None
    """Bytes of the cache. None: this process has not counted them."""
