# SPDX-License-Identifier: Apache-2.0

"""Segments that lie in an object, as the file of a cold group lists them.

Written from ``doc/source/contributor/format.rst`` alone; see ``checker.py``.
The object is not read. So a block counts as good if its entry is valid, and
its segment has a place of its own in an object of that length.
"""

import typing

from glance_dedup.check import ondisk

if typing.TYPE_CHECKING:
    from glance_dedup.check import group_reader


def require_header(object_id: bytes, spare: bool) -> None:
    """Judge the fields that only the header of a cold group has.

    :param spare: it is a file of ``spares/``
    :raises Damage: with the problem in words
    """
    if spare:
        raise ondisk.Damage('is cold, which no file of spare copies is', 8)
    if not any(object_id):
        raise ondisk.Damage('is cold, but names no object', 88)


def check_lengths(group: 'group_reader.Group') -> None:
    """Judge the lengths of file and object, and the published slots.

    The file is exchanged whole, so nobody writes to it beyond its entries and
    records.
    """
    if group.size != group.data:
        group.problem(
            min(group.size, group.data), f'is cold and has {group.size} '
            f'bytes, but its fingerprint store ends at {group.data}',
            severity=ondisk.DAMAGE)
    if group.end < group.data:
        group.problem(
            ondisk.SECTOR,
            'is cold, but no published record has the length of '
            'its object', severity=ondisk.DAMAGE)
    if group.published < group.slots:
        group.problem(
            ondisk.SECTOR, f'is cold, but only {group.published} of '
            f'{group.slots} slots are published', severity=ondisk.DAMAGE)


def judge_segment(group: 'group_reader.Group', offset: int, stored: int,
                  codec: int, blocks: list[tuple], before: int) -> None:
    """Judge a segment by the entries that name it.

    :param blocks: its live blocks by slot: slot, offset, length, checksum
    :param before: where the segments before it end
    :raises Damage: with the problem in words
    """
    if offset < before:
        raise ondisk.Damage('it begins before the one before it ends')
    if offset + ondisk.SEGMENT_HEADER + stored > group.end:
        raise ondisk.Damage(f'its object ends at {group.end}, inside it')
    end = 0
    for slot, at, length, _ in blocks:
        if at < end:
            raise ondisk.Damage(
                f'the block of slot {slot} does not lie behind '
                'the one before it')
        end = at + length
    if codec == ondisk.CODEC_NONE and end > stored:
        raise ondisk.Damage(f'its blocks end at {end}, but it has {stored} '
                            'bytes')
