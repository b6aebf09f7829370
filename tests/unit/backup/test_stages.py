# SPDX-License-Identifier: Apache-2.0

"""Parts of the stages."""

from glance_dedup import _engine
from glance_dedup.backup import stages


def record(key, address):
    return key.to_bytes(8, 'big') + address.to_bytes(5, 'little')


def test_a_new_block_that_was_stored_twice():
    """A key that occurs twice yields one record.

    The index refuses equal records.
    """
    records = _engine.index_sort(b''.join(
        record(key, address) for key, address in (
            (7, 1), (3, 5), (7, 1), (9, 4), (3, 2))))
    found = stages.each_key_once(records)
    assert [found[at:at + 8] for at in range(0, len(found), 13)] == [
        record(key, 0)[:8] for key in (3, 7, 9)]
    assert all(found[at:at + 13] in records
               for at in range(0, len(found), 13))
    assert stages.each_key_once(b'') == b''
