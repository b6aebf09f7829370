# SPDX-License-Identifier: Apache-2.0

"""The catalog's index, from fingerprints to addresses of blocks.

A page of it has the records of the fingerprints that begin with its number,
in order. A record is the start of a fingerprint and an address.
"""

from collections.abc import Callable
import itertools
import struct

from glance_dedup.check import catalog_copy
from glance_dedup.check import format as form
from glance_dedup.check import group_reader

PAGE_KEY = struct.Struct('>cI')
RECORD = 13                     # bytes


class Index:
    """Compares the index with the blocks of the groups.

    :param bits: how many bits of a fingerprint are the number of its page
    :ivar records: how many there are, once it was judged
    """

    def __init__(self, copy: catalog_copy.Copy, bits: int) -> None:
        self.records = 0
        self._copy = copy
        self._bits = bits
        self._matched = self._missing = 0

    @property
    def stale(self) -> int:
        """How many records there are of blocks that are no more."""
        return self.records - self._matched

    def look_up(self, group: group_reader.Group, indexed: int) -> None:
        """Look up all blocks of a group, page by page.

        :param indexed: how many of its slots the index should have
        """
        wanted = sorted(
            (group.fingerprint(slot)[:8], slot) for slot in range(group.slots)
            if group.states[slot] == form.GOOD)
        for page, blocks in itertools.groupby(
                wanted, lambda block: self._page_of(block[0])):
            value = self._copy.get(PAGE_KEY.pack(b'f', page)) or b''
            records = {value[at:at + 8]: value[at + 8:at + RECORD]
                       for at in range(0, len(value), RECORD)}
            for fingerprint, slot in blocks:
                found = records.get(fingerprint)
                if found is None:
                    self._missing += slot < indexed
                else:
                    address = group.number << 15 | slot
                    self._matched += (
                        int.from_bytes(found, 'little') == address)

    def judge(self, find: Callable[[str, str], None], complete: bool
              ) -> None:
        """Report what is wrong, once all groups were looked up.

        :param find: called with severity and sentence of each finding
        :param complete: whether all groups that could be read were looked up
        """
        bad = 0
        for key, value in self._copy.items(b'f'):
            if len(key) != PAGE_KEY.size:
                continue
            page = PAGE_KEY.unpack(key)[1]
            bad += not value or not self._is_good(page, value)
            self.records += len(value) // RECORD
        if bad:
            find(form.DAMAGE, f'has {bad} pages of the index that are not in '
                 'order')
        if self._missing:
            find(form.NOTE, f'has no index record for {self._missing} blocks '
                 'that should have one')
        if self.stale and complete:
            find(form.NOTE, f'has {self.stale} index records of blocks that '
                 'are no more')

    def _page_of(self, fingerprint: bytes) -> int:
        return int.from_bytes(fingerprint[:4], 'big') >> 32 - self._bits

    def _is_good(self, page: int, value: bytes) -> bool:
        if len(value) % RECORD:
            return False
        before = b''
        for at in range(0, len(value), RECORD):
            fingerprint = value[at:at + 8]
            group = int.from_bytes(value[at + 8:at + RECORD], 'little') >> 15
            if fingerprint <= before or not group or (
                    self._page_of(fingerprint) != page):
                return False
            before = fingerprint
        return True
