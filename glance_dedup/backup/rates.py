# SPDX-License-Identifier: Apache-2.0

"""The rate at which a server overwrites its disks: that of its last backup.

While a view is kept, the server's overwrites take space, so a plan of rounds
has to know how much that may be (``rounds.py``). It is the size of the
server's scratch files in its last backup, divided by the seconds for
which they were kept. The file ``<UUID>.rate`` of the state directory has it,
as JSON with a checksum.

It is an estimate: a file that is missing or damaged means 0, and scratch files
are watched in any case.
"""

import logging
import os

from glance_dedup.backup import places
from glance_dedup.base import exceptions
from glance_dedup.base import files

LOG = logging.getLogger(__name__)

_KIND = 'rate of a server'
_MAX_SIZE = 4096


def _path(directory: str, server: str) -> str:
    return os.path.join(directory, f'{server}.rate')


def save(directory: str, server: str, rate: int) -> None:
    """Note a server's rate; if that fails, a warning is logged.

    :param directory: the state directory
    :param server: its UUID
    :param rate: bytes in a second
    """
    try:
        files.replace_file(_path(directory, server),
                           files.pack_json(_KIND, rate=rate), places.MODE)
    except OSError as e:
        LOG.warning('how much the server %s overwrites cannot be noted, so '
                    'the next plan does not know it: %s', server, e)


def load(directory: str, server: str) -> int:
    """A server's rate, in bytes in a second; 0: none is known."""
    try:
        rate = files.unpack_json(files.read_file(
            _path(directory, server), _MAX_SIZE + 1), _KIND, _MAX_SIZE)['rate']
    except (OSError, exceptions.DamagedError, ValueError, KeyError, TypeError,
            AttributeError, RecursionError):
        return 0
    return rate if type(rate) is int and 0 <= rate < 1 << 63 else 0
