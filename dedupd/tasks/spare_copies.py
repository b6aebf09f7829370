# SPDX-License-Identifier: Apache-2.0

"""Spare copies: the blocks that recipes name most often, stored once more.

The loss of such a block would hit the most images. The copies are in files of
their own, which are numbered from 1 and hold as many blocks as a group. The
scrub reads them to heal damaged blocks.
"""

from collections.abc import Container
import dataclasses
import heapq
import logging

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import maintainer_role

LOG = logging.getLogger(__name__)


@dataclasses.dataclass
class Spares:
    """The spare copies that are there. The scrub's record keeps this."""

    files: int = 0
    blocks: int = 0
    bytes: int = 0
    """Size of the files."""


def most_used(maintainer: maintainer_role.Maintainer, threshold: int,
              most: int) -> list[int]:
    """The blocks that recipes name most often, and at least `threshold` times.

    :param threshold: 0: no block is often used
    :param most: the most blocks
    :returns: their addresses, sorted
    """
    if not threshold:
        return []
    parameters = maintainer.repository.parameters
    if not parameters.is_cryptographic:                             # I5
        LOG.warning(
            'No spare copies are written: their fingerprints alone '
            'identify them, and %s is not cryptographic',
            parameters.fingerprint)
        return []
    catalog = maintainer.catalog
    found = heapq.nlargest(most, (
        (count, -block_addresses.address(number, slot))
        for number, facts in catalog.groups() if facts['used']
        for slot, count in enumerate(
            block_addresses.unpack(catalog.counts(number)))
        if count >= threshold))
    return sorted(-address for _, address in found)


def renew(maintainer: maintainer_role.Maintainer, pace: pacing.Pace,
          wanted: list[int], damaged: Container[int], before: int) -> Spares:
    """Copy blocks again, and remove the copies of others.

    This copies all of them, so that a copy that went bad does not stay bad.
    The cost is small compared with what a pass of the scrub has read.

    :param wanted: the addresses of the blocks
    :param damaged: those whose block is damaged; an existing copy is kept
    :param before: the number of files before
    :raises pacing.Stopped: between two files
    """
    slots = maintainer.repository.parameters.group_slots
    files = [wanted[at:at + slots] for at in range(0, len(wanted), slots)]
    spares = Spares(len(files))
    last = max(len(files), before)
    for number in range(1, last + 1):
        some = files[number - 1] if number <= len(files) else []
        blocks, size = _write(maintainer, number, some, damaged)
        spares.blocks += blocks
        spares.bytes += size
        pace.step(number, last, 'writing spare copies', cost=2 * size)
    return spares


def _write(maintainer: maintainer_role.Maintainer, number: int,
           addresses: list[int], damaged: Container[int]) -> tuple[int, int]:
    """Write a file of spare copies; return its blocks and bytes."""
    good = [address for address in addresses if address not in damaged]
    for some in ((addresses, good) if len(good) < len(addresses)
                 else (addresses,)):
        try:
            # A damaged block comes from its existing copy.
            size = _engine.write_spares(maintainer.engine, number,
                                        block_addresses.pack(some, 'Q'))
            return len(some), size
        except (exceptions.NoSpaceError, exceptions.UnavailableError,
                *exceptions.UNREADABLE) as e:
            # The file stays as it was.
            LOG.warning('Spare copies cannot be written: %s', e)
    return 0, 0
