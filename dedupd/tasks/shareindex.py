# SPDX-License-Identifier: Apache-2.0

"""A helper's merging: the stages of the exact index that need no catalog.

The helper writes runs, and merges them into shards (``exactindex.py``). Its
findings become files of pairs, which the maintainer takes in. It reads the id
of the catalog from the cursors: only the maintainer makes an index, and
only it mends one. The locks of the index divide the work. So there are no
shares.
"""

import contextlib
import dataclasses
import logging

from dedupd.tasks import exactindex
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import helper_daemon

LOG = logging.getLogger(__name__)


@dataclasses.dataclass
class Result:
    """Result of a run."""

    scanned: int = 0
    """Entries that were new to the index."""
    shards: int = 0
    """Shards of the index that were merged with their runs."""


def run_once(helper: helper_daemon.Helper, pace: pacing.Pace) -> Result:
    """Bring the exact index up to date, as far as it is worth it now.

    :raises pacing.Stopped: between two steps; the steps before it stand
    :raises BusyError: if another process did this one's work, because this one
        lost its locks
    :raises NoSpaceError: if the disk has no room; unfinished files are
        removed, and a later run does the rest
    """
    result = Result()
    with contextlib.ExitStack() as stack:
        try:
            index = stack.enter_context(contextlib.closing(exactindex.Index(
                helper.handle, helper.engine, None, pace)))
            result.scanned = index.help_scan()
            result.shards = index.help_merge()
        except exceptions.ImageNotFound:
            pass    # there is no index yet, or the maintainer discards it
        except exceptions.DamagedError as e:
            LOG.warning('The exact index cannot be used: %s. The next merging '
                        'of the maintainer mends it.', e)
    return result
