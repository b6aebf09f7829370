# SPDX-License-Identifier: Apache-2.0

"""The catalog, read by ``repository check``.

Written from ``doc/source/contributor/format.rst`` alone; see ``check.py``.

LevelDB cannot open a database without changing it, so the checker opens a
private copy. A copy is only possible while no maintainer is at work;
:meth:`Catalog.changed` tells whether one was.

The checker compares the catalog with its own counts. The caller reports what
it found; this module keeps the findings. They must be thrown away if the
catalog changed meanwhile.

If LevelDB cannot read something, that is one finding, and nothing more of the
catalog is judged. A damaged table is *damage*, since LevelDB syncs each table
before anything names it. All else is a *note*: a crash may leave CURRENT, the
manifest, the log and the list of tables as they were at different times, and
with them accounting steps may be missing. The next maintainer notices that,
and makes the catalog anew.
"""

import array
import collections
import contextlib
import functools
import hashlib
import itertools
import json
import operator
import os
import pathlib
import re
import struct
import sys
import typing

import plyvel

from glance_dedup.base import leveldb
from glance_dedup.base import scratch
from glance_dedup.check import format as form
from glance_dedup.check import store as store_module

DAMAGE = form.DAMAGE
NOTE = form.NOTE

# The file's names of LevelDB's that make up a database. Others are its
# messages, its lock, and what it forgot to remove.
NEEDED_NAME = re.compile(r'(CURRENT|MANIFEST-[0-9]+|[0-9]+\.(ldb|sst|log))\Z')
OTHER_NAME = re.compile(r'(LOCK|LOG|LOG\.old|[0-9]+\.dbtmp)\Z')
CURRENT = re.compile(rb'MANIFEST-[0-9]+\n\Z')
# In what LevelDB says: a file's name; that it is not there.
NAMED = re.compile(r'/([0-9]+\.(?:ldb|sst|log)|MANIFEST-[0-9]+)\b')
MISSING = re.compile('missing files|No such file')
# In its journal: a log that it cannot read to its end.
CUT_LOG = re.compile(r'/([0-9]+\.log): dropping')
TABLE = ('.ldb', '.sst')
ANEW = 'the next maintainer makes it anew'

CHUNK = 1024                    # slots whose counters have one key
COUNTS = struct.Struct('>cIB')
NUMBER = struct.Struct('>cI')
LONG_NUMBER = struct.Struct('>cQ')
PAIR = struct.Struct('<QQ')     # addresses of duplicates
SEEN = struct.Struct('<QQ16s')  # inode, time of writing, transaction id
PART = struct.Struct('>c16sI')  # of a recipe; the key
PART_END = struct.Struct('<Q')  # the page behind it; the value
IMAGE_KEY = re.compile(b'i[A-Za-z0-9_-]{1,128}')
RECORD = 13                     # bytes, in the index
COUNTER_MAX = (1 << 32) - 1
MAX_ADDRESS = form.MAX_GROUP * form.MAX_SLOTS
PIECE = 1 << 20
# Findings beyond these are only counted.
MAX_FINDINGS = 10000

META_KEYS = {'format': int, 'repository_id': str, 'catalog_id': str,
             'sequence': int, 'valid': bool, 'index_bits': int,
             'ledger': str, 'parts': int}
BEGUN_KEYS = {'image_id': str, 'parts': int}
GROUP_FACTS = {'judged': 0, 'dirty': False, 'indexed': 0, 'used': 0,
               'rewritten': 0}
GROUP_KEYS = {key: type(value) for key, value in GROUP_FACTS.items()}
DAMAGED_KEYS = {'found': (int, float), 'fingerprint': str,
                'quarantine': str, 'images': list}


class InUse(Exception):
    """A maintainer has the catalog."""


class Unusable(Exception):
    """The judging ends with a note: a crash may leave the catalog so."""


def judging(method):
    """A method that stops judging if LevelDB cannot read on."""
    @functools.wraps(method)
    def guarded(self, *arguments):
        if self.lost:
            return None
        try:
            return method(self, *arguments)
        except plyvel.Error as e:
            self.give_up(*self.blame(e))
        except Unusable as e:
            self.give_up(NOTE, f'{e}: {ANEW}')
        except form.Damage as e:
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
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
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


def snapshot(directory: int) -> dict[str, tuple]:
    """What tells that somebody opened the database."""
    found = {}
    for name in os.listdir(directory):
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            continue
        found[name] = form.identity(status)
    return found


class Catalog:
    """A copy of the catalog as it is at the moment.

    :ivar findings: severity, file, offset, sentence
    :ivar left_off: how many more there were, by severity
    :ivar valid: whether its ledger and counters are to be judged
    :ivar lost: whether nothing (more) can be said of it
    :raises InUse: if it changes while it is copied
    :raises OSError: if there is no room for a copy
    """

    def __init__(self, directory: int, repository_id: bytes | None,
                 fence: tuple[bytes, int] | None):
        self.directory = directory
        self.findings: list[tuple] = []
        self.left_off: collections.Counter[str] = collections.Counter()
        self.valid = self.lost = False
        self.bits = 0
        self.records = self.matched = self.missing = 0
        self.seen: set[int] = set()     # groups that were judged
        # By transaction id, the files of the recipes that the ledger has.
        self.met = store_module.Store()
        self.exact = True       # all that may have been counted was read
        self.before = snapshot(directory)
        self.copy = scratch.Directory()
        self._db: plyvel.DB | None = None
        try:
            self.read(repository_id, fence)
        except BaseException:
            self.close()
            raise

    @judging
    def read(self, repository_id, fence):
        self.copy_files()
        if self.changed():
            raise InUse()
        self.open()
        self.read_meta(repository_id, fence)
        if self.valid:
            self.read_ledger()

    def close(self):
        self.close_database()
        self.met.close()
        self.copy.cleanup()

    @property
    def db(self) -> plyvel.DB:
        if self._db is None:
            raise RuntimeError('the copy of the catalog is not open')
        return self._db

    def close_database(self):
        if self._db is not None:
            self._db.close()
            self._db = None

    # What LevelDB cannot read

    def give_up(self, severity, sentence, file='catalog'):
        self.find(severity, sentence, file)
        self.lost, self.valid = True, False
        self.records = self.matched = self.missing = 0
        self.close_database()

    def blame(self, error: plyvel.Error) -> tuple[str, str, str]:
        """Severity, sentence and file."""
        words = leveldb.words(error).replace(self.copy.name + '/', '')
        words = form.printable(words)
        if leveldb.refusal(error) is not None:
            return NOTE, f'was not looked at to its end: {words}', 'catalog'
        name = self.damaged_file(leveldb.words(error))
        file = f'catalog/{name}' if name else 'catalog'
        if MISSING.search(words) or not (name or '').endswith(TABLE):
            return NOTE, f'cannot be read: {words}: {ANEW}', file
        return (DAMAGE, f'cannot be read: {words}: glance-dedup repository '
                'rebuild-catalog makes the catalog anew', file)

    def damaged_file(self, words: str) -> str | None:
        """The file that LevelDB spoke of; it does not always tell."""
        named = NAMED.search(words)
        if named is not None:
            return named[1]
        opened = self._db is not None
        self.close_database()
        copy = pathlib.Path(self.copy.name)
        with contextlib.suppress(plyvel.Error, OSError):
            log = CUT_LOG.search((copy / 'LOG').read_text(errors='replace'))
            if log is not None:
                return log[1]
            manifest = (copy / 'CURRENT').read_text('ascii').strip()
            # This reads all tables, and puts aside those that are damaged.
            plyvel.repair_db(str(copy), paranoid_checks=True)
            tables = [file.name for file in sorted(copy.glob('lost/*'))
                      if file.suffix in TABLE]
            if tables or not opened:
                return (*tables, manifest)[0]
        return None

    def find(self, severity, sentence, file='catalog', offset=None):
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append((severity, file, offset, sentence))
        else:
            self.left_off[severity] += 1

    # The copy

    def changed(self) -> bool:
        """Whether a maintainer opened the catalog since."""
        return snapshot(self.directory) != self.before

    def copy_files(self):
        for name in sorted(self.before):
            if not NEEDED_NAME.match(name):
                if not OTHER_NAME.match(name):
                    self.find(NOTE, 'has an unknown name', f'catalog/{name}')
                continue
            try:
                with form.File(self.directory, name, f'catalog/{name}') as f:
                    self.copy_file(f, name)
            except form.Gone:
                raise InUse() from None
            except form.Damage as e:
                raise form.Damage(f'{name} {e.sentence}') from e

    def copy_file(self, f, name):
        if name == 'CURRENT' and not CURRENT.match(f.read(0, 256)):
            raise form.Damage('names no manifest')
        with open(os.path.join(self.copy.name, name), 'wb') as out:
            offset, size = 0, f.size()
            while offset < size:
                data = f.read(offset, min(PIECE, size - offset))
                if not data:
                    raise InUse()
                # Holes stay holes: a hostile file may be one large hole.
                if data.count(0) == len(data):
                    out.seek(len(data), os.SEEK_CUR)
                else:
                    out.write(data)
                offset += len(data)
            out.truncate(size)

    def open(self):
        if 'CURRENT' not in self.before:
            raise Unusable('is not a database of LevelDB')
        self._db = plyvel.DB(self.copy.name, create_if_missing=False,
                             paranoid_checks=True, max_open_files=100)

    # What it says of itself

    def read_meta(self, repository_id, fence):
        found = self.get(b'meta')
        if found is None:
            raise Unusable('does not say what it is')
        meta = _object(found, META_KEYS, {'parts': 0})
        if meta is None:
            raise form.Damage('says nonsense of what it is')
        if meta['format'] not in (1, 2):
            raise form.Damage(f'has format {meta["format"]}; this program '
                              'reads 1 and 2')
        if (meta['format'] == 2) != (meta['parts'] > 0):
            raise form.Damage(f'has format {meta["format"]} and '
                              f'{meta["parts"]} parts of recipes')
        if repository_id is not None and (
                meta['repository_id'] != repository_id.hex()):
            raise form.Damage('is of the repository '
                              + form.printable(meta['repository_id']))
        if not form.HEX_ID.match(meta['catalog_id']) or (
                meta['index_bits'] > 31
                or not form.HEX_ID.match(meta['ledger'])):
            raise form.Damage('has impossible parameters')
        self.bits = meta['index_bits']
        self.ledger, self.parts = meta['ledger'], meta['parts']
        if not meta['valid']:
            self.find(NOTE, f'was not finished: {ANEW}')
            return
        # Of the fence a new catalog writes last.
        if fence is None or fence[0].hex() != meta['catalog_id']:
            self.find(NOTE, f'has no fence of its own: {ANEW}')
            return
        if meta['sequence'] < fence[1]:
            self.find(NOTE, f'has the sequence {meta["sequence"]}, and the '
                      f'fence {fence[1]}: it lost accounting steps: {ANEW}')
            return
        self.valid = True

    def get(self, key: bytes) -> bytes | None:
        return self.db.get(key, verify_checksums=True)

    def items(self, prefix):
        with self.db.iterator(prefix=prefix, verify_checksums=True) as found:
            yield from found

    @judging
    def check_keys(self):
        """Everything that is neither of a recipe nor of a group."""
        lengths = {b'c': COUNTS.size, b'l': 17, b'b': 17, b'e': PART.size,
                   b'g': NUMBER.size,
                   b'f': NUMBER.size, b'd': LONG_NUMBER.size, b's': 1,
                   b'h': LONG_NUMBER.size, b'p': NUMBER.size}
        strange = 0
        with self.db.iterator(include_value=False,
                              verify_checksums=True) as keys:
            for key in keys:
                strange += (key != b'meta' and not IMAGE_KEY.fullmatch(key)
                            and len(key) != lengths.get(key[:1]))
        if strange:
            self.find(DAMAGE, f'has {strange} keys of no meaning')
        for prefix in (b's', b'h'):
            for key, value in self.items(prefix):
                if not isinstance(_json(value), dict):
                    self.find(DAMAGE, f'the value of {leveldb.shown(key)} is '
                              'not an object')
        for key, value in self.items(b'i'):
            if len(value) != SEEN.size:
                self.find(DAMAGE, f'the value of {leveldb.shown(key)} has '
                          f'{len(value)} bytes')
        for key, value in self.items(b'p'):
            if len(key) == NUMBER.size and not self.good_duplicates(
                    NUMBER.unpack(key)[1], value):
                self.find(DAMAGE, f'the duplicates of group '
                          f'{NUMBER.unpack(key)[1]:08x} are not in order')

    @staticmethod
    def good_duplicates(group, value) -> bool:
        if not value or len(value) % PAIR.size:
            return False
        pairs = list(PAIR.iter_unpack(value))
        return pairs == sorted(set(pairs)) and all(
            kept >> 15 == group and other < MAX_ADDRESS and other != kept
            for kept, other in pairs)

    # The ledger

    def read_ledger(self):
        together = functools.reduce(
            operator.xor, map(int.from_bytes, self.transactions(b'l')), 0)
        parts = 0
        for key, value in self.items(b'e'):
            together ^= int.from_bytes(
                hashlib.sha256(key + value).digest()[:16])
            parts += 1
        if f'{together:032x}' != self.ledger or parts != self.parts:
            # A crash can leave LevelDB its newest log and an older manifest,
            # which knows nothing of what the log before was made into. What
            # is missing here is then not missing anywhere else: no image is
            # damaged by it, and no count too low.
            self.find(NOTE, 'has not the ledger that it says it has: it lost '
                      f'accounting steps: {ANEW}')
            self.valid = False

    def transactions(self, prefix: bytes) -> typing.Iterator[bytes]:
        with self.db.iterator(prefix=prefix, include_value=False,
                              verify_checksums=True) as keys:
            for key in keys:
                if len(key) == 17:
                    yield key[1:]

    @judging
    def lacks(self, transaction: bytes) -> bool:
        """Whether it is in the ledger, and was not met with."""
        return self.valid and transaction not in self.met and any(
            self.get(prefix + transaction) is not None for prefix in (
                b'l', b'b'))

    @judging
    def meet(self, header: form.RecipeHeader, blocks: int | None,
             file: str) -> int:
        """How many of its extents are counted; and whether by its own figures.

        One without extents has one, when it is counted.

        :param blocks: that it names; None if not all of it could be read
        """
        if not self.valid:
            return 0
        value = self.get(b'l' + header.transaction)
        begun = self.get(b'b' + header.transaction)
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
            parts = self.judge_facts(_json(found), header, blocks, file)
            good = True
        ends = self.ends_of(header.transaction, parts)
        pages = -(-header.extents // form.EXTENTS_PER_PAGE)
        if not good or ends is None or ends[-1] + (not begun) > max(1, pages):
            self.find(DAMAGE, f'has impossible parts for {file}')
            return 0
        if begun:
            return min(ends[-1] * form.EXTENTS_PER_PAGE, header.extents)
        return max(1, header.extents)

    def ends_of(self, transaction: bytes, parts: int) -> list[int] | None:
        """The ends of a recipe's parts, after a 0; None if they cannot be."""
        ends = [0]
        for part in range(parts):
            value = self.get(PART.pack(b'e', transaction, part)) or b''
            if len(value) != PART_END.size:
                return None
            ends += PART_END.unpack(value)
            if ends[-1] <= ends[-2]:
                return None
        return ends

    def judge_facts(self, found: typing.Any, header: form.RecipeHeader,
                    blocks: int | None, file: str) -> int:
        """Compare what the ledger keeps of a recipe.

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

    @judging
    def meet_file(self, image_id: str, inode: int, modified: int,
                  header: form.RecipeHeader, file: str) -> None:
        """Whether an image's file is taken for the recipe that it holds."""
        value = self.valid and self.get(b'i' + image_id.encode())
        if value and len(value) == SEEN.size:
            *seen, transaction = SEEN.unpack(value)
            if (seen == [inode, modified]
                    and transaction != header.transaction):
                self.find(DAMAGE, f'has another transaction id for {file} '
                          'than its header')

    @judging
    def check_ledger(self, unannounced):
        """To be called when all recipes were met.

        :param unannounced: files of images that no spool entry announces,
            and that are not counted
        """
        if not self.valid:
            return
        for file in unannounced:
            self.find(DAMAGE, 'is not counted, and nothing in the spool says '
                      'that it is to be', file)
        # What cannot be read may be one of these.
        if not self.exact:
            return
        gone, first = 0, b'\xff' * 16
        for prefix in (b'l', b'b'):
            for transaction in self.transactions(prefix):
                if transaction not in self.met:
                    # One that is whole and begun is one.
                    gone += prefix == b'l' or (
                        self.get(b'l' + transaction) is None)
                    first = min(first, transaction)
        if gone:
            self.find(NOTE, f'counts {gone} recipes that are gone, as that of '
                      f'{first.hex()}: {ANEW}')

    # Counters, and what it says of the groups

    def stored_counts(self, number) -> array.array:
        parts = []
        for chunk in range(form.MAX_SLOTS // CHUNK):
            value = self.get(COUNTS.pack(b'c', number, chunk))
            if value is not None and len(value) != 4 * CHUNK:
                self.find(DAMAGE, f'the counters of group {number:08x}, chunk '
                          f'{chunk}, have {len(value)} bytes')
                value = None
            parts.append(value or bytes(4 * CHUNK))
        return _words(b''.join(parts))

    def judge_counts(self, number, changes: dict[int, int]) -> array.array:
        """Compare a group's counters with what recipes name.

        :param changes: by slot, how many more extents of counted recipes
            begin there than end there
        """
        stored = self.stored_counts(number)
        self.seen.add(number)
        # Behind these nothing is counted, nor named.
        counted = -(-len(stored.tobytes().rstrip(b'\0')) // 4)
        slots = min(form.MAX_SLOTS, max([counted, *changes]))
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

    @judging
    def judge_group(self, group: form.Group, changes: dict[int, int],
                    named: bytes):
        """Judge all that it says of a group that could be read.

        :param named: by slot, whether any recipe names it, counted or not
        """
        if not self.valid:
            return
        number = group.number
        stored = self.judge_counts(number, changes)
        facts = _object(self.get(NUMBER.pack(b'g', number)) or b'{}',
                        GROUP_KEYS, GROUP_FACTS)
        if facts is None or group.slots < max(
                facts['judged'], facts['indexed'], facts['rewritten']):
            self.find(DAMAGE, f'the facts of group {number:08x} cannot be')
            self.judge_indexed(group, 0)
            return
        used = len(stored) - stored.count(0)
        if facts['used'] != used:
            self.find(DAMAGE, f'says that {facts["used"]} slots of group '
                      f'{number:08x} are in use, and counts {used}')
        lost = [slot for slot in range(facts['judged'])
                if group.states[slot] == form.GOOD and not stored[slot]
                and not named[slot]]
        if lost and not facts['dirty']:
            self.find(NOTE, f'has {len(lost)} blocks of group {number:08x}, '
                      f'as slot {lost[0]}, that nothing names and no '
                      'collection will look for')
        self.judge_indexed(group, facts['indexed'])
        if form.DAMAGED in group.states:
            self.judge_damaged(group)

    def judge_damaged(self, group):
        unknown = [
            slot for slot in range(group.slots)
            if group.states[slot] == form.DAMAGED and self.get(
                LONG_NUMBER.pack(b'd', group.number << 15 | slot)) is None]
        if unknown:
            self.find(NOTE, f'does not know of {len(unknown)} damaged blocks '
                      f'of group {group.number:08x}, as slot {unknown[0]}: '
                      'the next scrub tells it')

    @judging
    def judge_others(self):
        """What it says of groups that are not there."""
        if not self.valid:
            return
        for key, value in self.items(b'c'):
            if len(key) == COUNTS.size and any(value):
                number = COUNTS.unpack(key)[1]
                if number not in self.seen:
                    self.judge_counts(number, {})
        for key, value in self.items(b'd'):
            if len(key) == LONG_NUMBER.size and (
                    _object(value, DAMAGED_KEYS) is None
                    or LONG_NUMBER.unpack(key)[1] >= MAX_ADDRESS):
                self.find(DAMAGE, f'what it says of the damaged block '
                          f'{LONG_NUMBER.unpack(key)[1]:010x} cannot be')

    # The index

    def page_of(self, fingerprint: bytes) -> int:
        return int.from_bytes(fingerprint[:4], 'big') >> 32 - self.bits

    def judge_indexed(self, group, indexed):
        """Look up all blocks of a group, page by page."""
        wanted = sorted(
            (group.fingerprint(slot)[:8], slot) for slot in range(group.slots)
            if group.states[slot] == form.GOOD)
        for page, blocks in itertools.groupby(
                wanted, lambda block: self.page_of(block[0])):
            value = self.get(NUMBER.pack(b'f', page)) or b''
            records = {value[at:at + 8]: value[at + 8:at + RECORD]
                       for at in range(0, len(value), RECORD)}
            for fingerprint, slot in blocks:
                found = records.get(fingerprint)
                if found is None:
                    self.missing += slot < indexed
                else:
                    address = group.number << 15 | slot
                    self.matched += (
                        int.from_bytes(found, 'little') == address)

    @judging
    def judge_index(self):
        """To be called when all groups were judged."""
        bad = 0
        for key, value in self.items(b'f'):
            if len(key) != NUMBER.size:
                continue
            page = NUMBER.unpack(key)[1]
            bad += not value or not self.good_page(page, value)
            self.records += len(value) // RECORD
        if bad:
            self.find(DAMAGE, f'has {bad} pages of the index that are not in '
                      'order')
        if self.missing:
            self.find(NOTE, f'has no index record for {self.missing} blocks '
                      'that should have one')
        stale = self.records - self.matched
        if stale and self.valid:
            self.find(NOTE, f'has {stale} index records of blocks that are '
                      'no more')

    def good_page(self, page, value) -> bool:
        if len(value) % RECORD:
            return False
        before = b''
        for at in range(0, len(value), RECORD):
            fingerprint = value[at:at + 8]
            group = int.from_bytes(value[at + 8:at + RECORD], 'little') >> 15
            if fingerprint <= before or not group or (
                    self.page_of(fingerprint) != page):
                return False
            before = fingerprint
        return True


def _json(value: bytes) -> typing.Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
