# SPDX-License-Identifier: Apache-2.0

"""The fence: the sequence of the catalog's last accounting step."""

from glance_dedup.check import check_report
from glance_dedup.check import ondisk
from glance_dedup.check import repo_directories


def read(directories: repo_directories.Directories) -> bytes | None:
    """The bytes of the file; None if there are none, or no readable ones."""
    with directories.reported(ondisk.DAMAGE, 'fence'):
        return directories.read('fence', 2 * ondisk.SECTOR + 1)
    return None


def newest(data: bytes, findings: check_report.Findings
           ) -> tuple[bytes, int] | None:
    """The newest record of the fence: catalog id and sequence.

    Problems of the records are reported.
    """
    found = None
    if len(data) > 2 * ondisk.SECTOR:
        findings.find(ondisk.NOTE, 'fence', 2 * ondisk.SECTOR,
                      'has more than two records')
    for at in (0, ondisk.SECTOR):
        record = data[at:at + ondisk.SECTOR]
        if not any(record):
            continue
        magic, catalog, sequence = ondisk.FENCE.unpack_from(
            record.ljust(ondisk.SECTOR))
        if len(record) < ondisk.SECTOR or magic != b'GDFENCE\0' or (
                ondisk.xxh3(record[:504]) !=
                ondisk.stored_checksum(record, 504)):
            # Torn by a crash, most likely; the other counts then.
            findings.find(ondisk.NOTE, 'fence', at,
                          'has a record that does not verify')
        elif sequence % 2 != at // ondisk.SECTOR:
            findings.find(ondisk.DAMAGE, 'fence', at,
                          f'has the sequence {sequence} in the other\'s place')
        elif found is None or sequence > found[1]:
            found = catalog, sequence
    return found
