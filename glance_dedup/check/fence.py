# SPDX-License-Identifier: Apache-2.0

"""The fence: the sequence of the catalog's last accounting step."""

from glance_dedup.check import directories as directories_module
from glance_dedup.check import format as form
from glance_dedup.check import report


def read(directories: directories_module.Directories) -> bytes | None:
    """The bytes of the file; None if there are none, or no readable ones."""
    with directories.reported(form.DAMAGE, 'fence'):
        return directories.read('fence', 2 * form.SECTOR + 1)
    return None


def newest(data: bytes, findings: report.Findings
           ) -> tuple[bytes, int] | None:
    """The newest record of the fence: catalog id and sequence.

    What is wrong with the records is reported.
    """
    found = None
    if len(data) > 2 * form.SECTOR:
        findings.find(form.NOTE, 'fence', 2 * form.SECTOR,
                      'has more than two records')
    for at in (0, form.SECTOR):
        record = data[at:at + form.SECTOR]
        if not any(record):
            continue
        magic, catalog, sequence = form.FENCE.unpack_from(
            record.ljust(form.SECTOR))
        if len(record) < form.SECTOR or magic != b'GDFENCE\0' or (
                form.xxh3(record[:504]) != form.stored_checksum(record, 504)):
            # Torn by a crash, most likely; the other counts then.
            findings.find(form.NOTE, 'fence', at,
                          'has a record that does not verify')
        elif sequence % 2 != at // form.SECTOR:
            findings.find(form.DAMAGE, 'fence', at,
                          f'has the sequence {sequence} in the other\'s place')
        elif found is None or sequence > found[1]:
            found = catalog, sequence
    return found
