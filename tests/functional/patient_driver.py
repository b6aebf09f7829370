# SPDX-License-Identifier: Apache-2.0

"""A Glance of tests that waits for the daemon, however busy the machine is.

Otherwise the driver reads directly after a second, and for some time.
"""

from glance_dedup.driver import daemon_reads
from tests.functional import sqlite_locks  # noqa: F401

daemon_reads.ANSWER_SECONDS = daemon_reads.PIECE_SECONDS = 60.0
