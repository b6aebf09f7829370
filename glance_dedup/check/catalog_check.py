# SPDX-License-Identifier: Apache-2.0

"""The catalog's ledger, counters and facts, compared with the recipes.

Written from ``format-derived.rst`` alone; see ``checker.py``.

This module keeps its findings, and the caller reports them: it discards them
if a maintainer changed the catalog meanwhile.

If LevelDB cannot read something (see ``catalog_copy.py``), that is one
finding, and nothing more of the catalog is judged.
"""

import array
import collections
from collections.abc import Callable
from collections.abc import Iterable
import functools
import hashlib
import itertools
import json
import operator
import re
import struct
import sys
import typing

import plyvel

from glance_dedup.base import leveldb
from glance_dedup.check import catalog_copy
from glance_dedup.check import check_report
from glance_dedup.check import exact_index
from glance_dedup.check import group_reader
from glance_dedup.check import ondisk
from glance_dedup.check import recipe_reader
from glance_dedup.check import record_table

DAMAGE = ondisk.DAMAGE
NOTE = ondisk.NOTE
REBUILT = catalog_copy.REBUILT

CHUNK = 1024                    # slots whose counters have one key
COUNTS = struct.Struct('>cIB')
NUMBER = struct.Struct('>cI')
LONG_NUMBER = struct.Struct('>cQ')
PAIR = struct.Struct('<QQ')     # addresses of duplicates
SEEN = struct.Struct('<QQ16s')  # inode, time of writing, transaction id
PART = struct.Struct('>c16sI')  # of a recipe; the key
PART_END = struct.Struct('<Q')  # the page behind it; the value
IMAGE_KEY = re.compile(b'i[A-Za-z0-9_-]{1,128}')
COUNTER_MAX = (1 << 32) - 1
MAX_ADDRESS = ondisk.MAX_GROUP * ondisk.MAX_SLOTS

MakeIndex = Callable[[bytes | None, exact_index.Find], exact_index.Index]

META_KEYS = {'format': int, 'repository_id': str, 'catalog_id': str,
             'sequence': int, 'valid': bool, 'ledger': str, 'parts': int}
BEGUN_KEYS = {'image_id': str, 'parts': int}
GROUP_FACTS = {'judged': 0, 'dirty': False, 'used': 0, 'rewritten': 0}
GROUP_KEYS = {key: type(value) for key, value in GROUP_FACTS.items()}
DAMAGED_KEYS = {'found': (int, float), 'fingerprint': str,
                'quarantine': str, 'images': list}


def _judging(method):
    """A method that stops judging if LevelDB cannot read on."""
    @functools.wraps(method)
    def guarded(self, *arguments):
        if self.lost:
            return None
        try:
            return method(self, *arguments)
        except plyvel.Error as e:
            self.give_up(*self.copy.blame(e))
        except catalog_copy.Unusable as e:
            self.give_up(NOTE, f'{e}: {REBUILT}')
        except ondisk.Damage as e:
            self.give_up(DAMAGE, e.sentence)
        return None
    return guarded


def _words(data: bytes) -> array.array:
    words = array.array('I', data)
    if sys.byteorder == 'big':
        words.byteswap()
    return words


def _object(value: bytes, keys: dict, defaults: dict | None = None
            ) -> dict | None:
    """The JSON object with exactly these keys, or None."""
    found = _json(value)
    if not isinstance(found, dict):
        return None
    found = {**(defaults or {}), **found}
    if set(found) != set(keys):
        return None
    for key, kinds in keys.items():
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if type(found[key]) not in kinds or (
                type(found[key]) is int and found[key] < 0):
            return None
    return found


class Catalog:
    """The catalog as it is at the moment, read from a copy.

    Its methods are called in this order: :meth:`meet` and :meth:`meet_file`
    for each recipe, :meth:`check_ledger`, :meth:`judge_group` for each group,
    then the others.

    :param directory: the catalog's, open
    :param index: makes the judge of the exact index: called with the id of
          the catalog, or None, and a function for findings
    :param fence: catalog id and sequence; None: there is none
    :ivar findings: severity, file, offset, sentence
    :ivar left_off: the number of findings left off, by severity
    :ivar valid: whether its ledger and counters are to be judged
    :ivar lost: whether nothing (more) can be judged
    :ivar exact: whether all recipes that may have been counted were read
    :raises InUse: if it changes while it is copied
    :raises OSError: if there is no room for a copy
    """

    def __init__(self, directory: int, repository_id: bytes | None,
                 fence: tuple[bytes, int] | None, index: MakeIndex) -> None:
        self.findings: list[tuple] = []
        self.left_off: collections.Counter[str] = collections.Counter()
        self.valid = self.lost = False
        self.seen: set[int] = set()     # groups that were judged
        # The files of the recipes that the ledger has, by transaction id.
        self.met = record_table.RecordTable()
        self.exact = True
        self.copy = catalog_copy.Copy(directory, self.find)
        self._make_index = index
        self.index = index(None, self.find)
        try:
            self._read(repository_id, fence)
        except BaseException:
            self.close()
            raise

    @_judging
    def _read(self, repository_id, fence):
        self.copy.copy_files()
        if self.copy.changed():
            raise catalog_copy.InUse()
        self.copy.open()
        self._read_meta(repository_id, fence)
        if self.valid:
            self._read_ledger()

    def close(self) -> None:
        """Close the copy and remove it."""
        self.met.close()
        self.index.close()
        self.copy.close()

    def give_up(self, severity: str, sentence: str, file: str = 'catalog'
                ) -> None:
        """Judge nothing more, for the reason in `sentence`."""
        self.find(severity, sentence, file)
        self.lost, self.valid = True, False
        self.index.close()
        self.index = self._make_index(None, self.find)
        self.copy.close_database()

    def find(self, severity: str, sentence: str, file: str = 'catalog',
             offset: int | None = None) -> None:
        """Keep a finding until it is known whether it may be reported."""
        if len(self.findings) < check_report.MAX_FINDINGS:
            self.findings.append((severity, file, offset, sentence))
        else:
            self.left_off[severity] += 1

    # The catalog's facts

    def _read_meta(self, repository_id, fence):
        found = self.copy.get(b'meta')
        if found is None:
            raise catalog_copy.Unusable('does not say what it is')
        meta = _object(found, META_KEYS)
        if meta is None:
            raise ondisk.Damage('says nonsense of what it is')
        if meta['format'] != 1:
            raise ondisk.Damage(f'has format {meta["format"]}; this program '
                                'reads 1')
        if repository_id is not None and (
                meta['repository_id'] != repository_id.hex()):
            raise ondisk.Damage('is of the repository '
                                + ondisk.printable(meta['repository_id']))
        if not ondisk.HEX_ID.match(meta['catalog_id']) or (
                not ondisk.HEX_ID.match(meta['ledger'])):
            raise ondisk.Damage('has impossible parameters')
        self.index = self._make_index(bytes.fromhex(meta['catalog_id']),
                                      self.find)
        self.ledger, self.parts = meta['ledger'], meta['parts']
        if not meta['valid']:
            self.find(NOTE, f'was not finished: {REBUILT}')
            return
        # A new catalog writes its fence last.
        if fence is None or fence[0].hex() != meta['catalog_id']:
            self.find(NOTE, f'has no fence of its own: {REBUILT}')
            return
        if meta['sequence'] < fence[1]:
            self.find(NOTE, f'has the sequence {meta["sequence"]}, and the '
                      f'fence {fence[1]}: it lost accounting steps: {REBUILT}')
            return
        self.valid = True

    @_judging
    def check_keys(self) -> None:
        """Judge everything that is neither of a recipe nor of a group."""
        lengths = {b'c': COUNTS.size, b'l': 17, b'b': 17, b'e': PART.size,
                   b'g': NUMBER.size, b'd': LONG_NUMBER.size, b's': 1,
                   b'h': LONG_NUMBER.size, b'p': NUMBER.size}
        strange = 0
        with self.copy.db.iterator(include_value=False,
                                   verify_checksums=True) as keys:
            for key in keys:
                strange += (key != b'meta' and not IMAGE_KEY.fullmatch(key)
                            and len(key) != lengths.get(key[:1]))
        if strange:
            self.find(DAMAGE, f'has {strange} keys of no meaning')
        for prefix in (b's', b'h'):
            for key, value in self.copy.items(prefix):
                if not isinstance(_json(value), dict):
                    self.find(DAMAGE, f'the value of {leveldb.shown(key)} is '
                              'not an object')
        for key, value in self.copy.items(b'i'):
            if len(value) != SEEN.size:
                self.find(DAMAGE, f'the value of {leveldb.shown(key)} has '
                          f'{len(value)} bytes')
        for key, value in self.copy.items(b'p'):
            if len(key) == NUMBER.size and not self._good_duplicates(
                    NUMBER.unpack(key)[1], value):
                self.find(DAMAGE, f'the duplicates of group '
                          f'{NUMBER.unpack(key)[1]:08x} are not in order')

    @staticmethod
    def _good_duplicates(group: int, value: bytes) -> bool:
        if not value or len(value) % PAIR.size:
            return False
        pairs = list(PAIR.iter_unpack(value))
        return pairs == sorted(set(pairs)) and all(
            kept >> 15 == group and other < MAX_ADDRESS and other != kept
            for kept, other in pairs)

    # The ledger

    def _read_ledger(self):
        together = functools.reduce(
            operator.xor, map(int.from_bytes, self.copy.transactions(b'l')),
            0)
        parts = 0
        for key, value in self.copy.items(b'e'):
            together ^= int.from_bytes(
                hashlib.sha256(key + value).digest()[:16])
            parts += 1
        if f'{together:032x}' != self.ledger or parts != self.parts:
            # A crash can leave LevelDB its newest log and an older manifest,
            # which does not list the tables made of the log before. The rows
            # that are missing here are not missing anywhere else: no image is
            # damaged by it, and no count too low.
            self.find(NOTE, 'has not the ledger that it says it has: it lost '
                      f'accounting steps: {REBUILT}')
            self.valid = False

    @_judging
    def lacks(self, transaction: bytes) -> bool:
        """Return whether the ledger has a recipe that was not met yet."""
        return self.valid and transaction not in self.met and any(
            self.copy.get(prefix + transaction) is not None for prefix in (
                b'l', b'b'))

    @_judging
    def meet(self, header: recipe_reader.RecipeHeader, blocks: int | None,
             file: str) -> int:
        """Compare a recipe with the ledger; how many of its extents count.

        A recipe without extents has one, once it is counted.

        :param blocks: that it names; None if not all of it could be read
        """
        if not self.valid:
            return 0
        value = self.copy.get(b'l' + header.transaction)
        begun = self.copy.get(b'b' + header.transaction)
        found = begun or value
        if not found:
            return 0
        other = self.met.get(header.transaction)
        if other is not None:
            self.find(DAMAGE, f'has the transaction id of '
                      f'{other.decode()}', file, 48)
            return 0
        self.met.put(header.transaction, file.encode())
        if begun:
            # A maintainer was ended between two steps; the next goes on.
            parts = (_object(begun, BEGUN_KEYS) or {}).get('parts', 0)
            good = not value and parts > 0
        else:
            parts = self._judge_facts(_json(found), header, blocks, file)
            good = True
        ends = self._ends_of(header.transaction, parts)
        pages = -(-header.extents // ondisk.EXTENTS_PER_PAGE)
        if not good or ends is None or ends[-1] + (not begun) > max(1, pages):
            self.find(DAMAGE, f'has impossible parts for {file}')
            return 0
        if begun:
            return min(ends[-1] * ondisk.EXTENTS_PER_PAGE, header.extents)
        return max(1, header.extents)

    def _ends_of(self, transaction: bytes, parts: int) -> list[int] | None:
        """The ends of a recipe's parts, after a 0; None if they cannot be."""
        ends = [0]
        for part in range(parts):
            value = self.copy.get(PART.pack(b'e', transaction, part)) or b''
            if len(value) != PART_END.size:
                return None
            ends += PART_END.unpack(value)
            if ends[-1] <= ends[-2]:
                return None
        return ends

    def _judge_facts(self, found: typing.Any,
                     header: recipe_reader.RecipeHeader, blocks: int | None,
                     file: str) -> int:
        """Compare the ledger's entry with a recipe.

        :returns: in how many parts it was counted, but the last
        """
        parts = 0
        if isinstance(found, dict) and type(found.get('parts')) is int:
            parts = found.pop('parts')
        if blocks is None and isinstance(found, dict):
            blocks = found.get('blocks')
        if found != header.facts(blocks):
            self.find(DAMAGE, f'has other figures for {file} than its header')
        return parts

    @_judging
    def meet_file(self, image_id: str, inode: int, modified: int,
                  header: recipe_reader.RecipeHeader, file: str) -> None:
        """Compare the transaction id that is kept for an image's file."""
        value = self.valid and self.copy.get(b'i' + image_id.encode())
        if value and len(value) == SEEN.size:
            *seen, transaction = SEEN.unpack(value)
            if (seen == [inode, modified]
                    and transaction != header.transaction):
                self.find(DAMAGE, f'has another transaction id for {file} '
                          'than its header')

    @_judging
    def check_ledger(self, unannounced: Iterable[str]) -> None:
        """Judge the ledger, once all recipes were met.

        :param unannounced: files of images that no spool entry announces,
            and that are not counted
        """
        if not self.valid:
            return
        for file in unannounced:
            self.find(DAMAGE, 'is not counted, and nothing in the spool says '
                      'that it is to be', file)
        # A recipe that cannot be read may be one that the ledger has.
        if not self.exact:
            return
        gone, first = 0, b'\xff' * 16
        for prefix in (b'l', b'b'):
            for transaction in self.copy.transactions(prefix):
                if transaction not in self.met:
                    # A recipe that is in the ledger twice counts once.
                    gone += prefix == b'l' or (
                        self.copy.get(b'l' + transaction) is None)
                    first = min(first, transaction)
        if gone:
            self.find(NOTE, f'counts {gone} recipes that are gone, as that of '
                      f'{first.hex()}: {REBUILT}')

    # Counters, and the facts about the groups

    def _stored_counts(self, number: int) -> array.array:
        parts = []
        for chunk in range(ondisk.MAX_SLOTS // CHUNK):
            value = self.copy.get(COUNTS.pack(b'c', number, chunk))
            if value is not None and len(value) != 4 * CHUNK:
                self.find(DAMAGE, f'the counters of group {number:08x}, chunk '
                          f'{chunk}, have {len(value)} bytes')
                value = None
            parts.append(value or bytes(4 * CHUNK))
        return _words(b''.join(parts))

    def _judge_counts(self, number: int, changes: dict[int, int]
                      ) -> array.array:
        """Compare a group's counters with what recipes name.

        :param changes: by slot, how many more extents of counted recipes
            begin there than end there
        """
        stored = self._stored_counts(number)
        self.seen.add(number)
        # Later slots are neither counted nor named.
        counted = -(-len(stored.tobytes().rstrip(b'\0')) // 4)
        slots = min(ondisk.MAX_SLOTS, max([counted, *changes]))
        names = array.array('Q', bytes(8 * slots))
        for slot, change in changes.items():
            if change < 0:
                change += 1 << 64
            if slot < slots:
                names[slot] = change
        expected = [n & ((1 << 64) - 1) for n in itertools.accumulate(names)]
        lower, higher = [], []
        for slot, (has, wanted) in enumerate(zip(stored, expected)):
            if has < min(wanted, COUNTER_MAX):
                lower.append(slot)
            elif has > wanted and has != COUNTER_MAX:
                higher.append(slot)
        if lower:
            slot = lower[0]
            self.find(DAMAGE, f'counts {len(lower)} blocks of group '
                      f'{number:08x} too low, as slot {slot}: {stored[slot]} '
                      f'instead of {expected[slot]}')
        if higher and self.exact:
            slot = higher[0]
            self.find(NOTE, f'counts err high for {len(higher)} blocks of '
                      f'group {number:08x}, as slot {slot}: {stored[slot]} '
                      f'instead of {expected[slot]}')
        return stored

    @_judging
    def judge_group(self, group: group_reader.Group, changes: dict[int, int],
                    named: bytes) -> None:
        """Judge all rows of a group that could be read.

        :param changes: by slot, how many more extents of counted recipes
            begin there than end there
        :param named: by slot, whether any recipe names it, counted or not
        """
        if not self.valid:
            return
        number = group.number
        stored = self._judge_counts(number, changes)
        facts = _object(self.copy.get(NUMBER.pack(b'g', number)) or b'{}',
                        GROUP_KEYS, GROUP_FACTS)
        if facts is None or group.slots < max(
                facts['judged'], facts['rewritten']):
            self.find(DAMAGE, f'the facts of group {number:08x} cannot be')
            self.index.look_up(group)
            return
        used = len(stored) - stored.count(0)
        if facts['used'] != used:
            self.find(DAMAGE, f'says that {facts["used"]} slots of group '
                      f'{number:08x} are in use, and counts {used}')
        lost = [slot for slot in range(facts['judged'])
                if group.states[slot] == ondisk.GOOD and not stored[slot]
                and not named[slot]]
        if lost and not facts['dirty']:
            self.find(NOTE, f'has {len(lost)} blocks of group {number:08x}, '
                      f'as slot {lost[0]}, that nothing names and no '
                      'collection will look for')
        self.index.look_up(group)
        if ondisk.DAMAGED in group.states:
            self._judge_damaged(group)

    def _judge_damaged(self, group: group_reader.Group) -> None:
        unknown = [
            slot for slot in range(group.slots)
            if group.states[slot] == ondisk.DAMAGED and self.copy.get(
                LONG_NUMBER.pack(b'd', group.number << 15 | slot)) is None]
        if unknown:
            self.find(NOTE, f'does not know of {len(unknown)} damaged blocks '
                      f'of group {group.number:08x}, as slot {unknown[0]}: '
                      'the next scrub tells it')

    @_judging
    def judge_others(self) -> None:
        """Judge the rows of groups that were not judged."""
        if not self.valid:
            return
        for key, value in self.copy.items(b'c'):
            if len(key) == COUNTS.size and any(value):
                number = COUNTS.unpack(key)[1]
                if number not in self.seen:
                    self._judge_counts(number, {})
        for key, value in self.copy.items(b'd'):
            if len(key) == LONG_NUMBER.size and (
                    _object(value, DAMAGED_KEYS) is None
                    or LONG_NUMBER.unpack(key)[1] >= MAX_ADDRESS):
                self.find(DAMAGE, f'what it says of the damaged block '
                          f'{LONG_NUMBER.unpack(key)[1]:010x} cannot be')

    @_judging
    def judge_index(self) -> None:
        """Judge the index, once all groups were judged."""
        self.index.judge(
            (other for _, value in self.copy.items(b'p')
             if len(value) % PAIR.size == 0
             for _, other in PAIR.iter_unpack(value) if other < MAX_ADDRESS),
            self.valid)


def _json(value: bytes) -> typing.Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
