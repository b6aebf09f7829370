# SPDX-License-Identifier: Apache-2.0

"""The catalog: a LevelDB database of facts derived from recipes and groups.

``format.rst`` describes its keys. The catalog belongs to the maintainer. It
lists the counted recipes, and says how often they name each block. The catalog
authorises freeing. So any contradiction in it raises :class:`CatalogError`;
the maintainer then sets the catalog aside and rebuilds it.

A :class:`Batch` gathers changes, which are then written at once. One thread at
a time changes the catalog; any thread may read it meanwhile.

A recipe may name more counters than fit into memory. So it is counted from its
first page of extents to its last, and un-counted from the last to the first,
in batches of a bounded size. Between two batches the recipe is *begun*:
exactly the pages before a certain one are counted, in either direction. Each
batch records this page, so the next one may count on, or un-count. A *part* is
what one batch counted. Each part but the last has a key of its own, as long as
its pages are counted. So if LevelDB loses a batch in the middle, the ledger
lacks something, as it does without parts.

A program that does not know parts would take their counts for those of whole
recipes. So while there is a part, the catalog has a newer format number.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import hashlib
import itertools
import json
import operator
import os
import re
import secrets
import stat
import struct
import sys
import threading
from typing import Any
from typing import Protocol

import plyvel

from glance_dedup import _engine
from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import leveldb
from glance_dedup.maintenance import addresses as addresses_module

# The newest format that this program knows, and that of catalogs without
# parts.
FORMAT = 2
_PLAIN = 1

CHUNK_SLOTS = 1024
_CHUNK_BITS = 10
_CHUNK_BYTES = 4 * CHUNK_SLOTS
_ZEROS = bytes(_CHUNK_BYTES)
_PAIR_BYTES = 16
#: Bytes of a record of the exact index.
INDEX_RECORD_BYTES = 13

_PAGE = 256      # items read at a time

_META_KEY = b'meta'
_SCRUB = b's'
_GROUP = struct.Struct('>cI')
_COUNTS = struct.Struct('>cIB')
_NUMBER = struct.Struct('>cQ')
_PART = struct.Struct('>c16sI')
_END = struct.Struct('<Q')
_SEEN = struct.Struct('<QQ16s')

_GROUP_FACTS = {'judged': 0, 'dirty': False, 'indexed': 0, 'used': 0,
                'rewritten': 0}
_META = {
    'format': lambda v: type(v) is int,
    'repository_id': lambda v: isinstance(v, str),
    'catalog_id': lambda v: (isinstance(v, str)
                             and re.fullmatch('[0-9a-f]{32}', v)),
    'sequence': lambda v: type(v) is int and 0 <= v < 1 << 63,
    'valid': lambda v: type(v) is bool,
    'index_bits': lambda v: type(v) is int and 0 <= v <= 32,
    'ledger': lambda v: (isinstance(v, str)
                         and re.fullmatch('[0-9a-f]{32}', v)),
    'parts': lambda v: v is None or _is_count(v),
}
_LEDGER_SUMS = ('size', 'zero_bytes', 'new_bytes', 'stored_bytes', 'blocks')

_Good = dict[str, Callable[[Any], bool]]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1 << 63


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_addresses(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(v) is int and addresses_module.is_address(v) for v in value)


def _are_hits(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(hit, dict) and _is_text(hit.get('error'))
        and _are_texts(hit.get('images')) for hit in value.values())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_LEDGER: _Good = {
    'image_id': _is_text, 'upload_id': _is_text, 'project': _is_text,
    'size': _is_count, 'zero_bytes': _is_count, 'new_bytes': _is_count,
    'stored_bytes': _is_count, 'blocks': _is_count, 'fragments': _is_count,
    'created': _is_number, 'parts': _is_count,
}
_NEEDED = ('image_id',)
_BEGUN: _Good = {'image_id': _is_text,
                 'parts': lambda v: _is_count(v) and v > 0}
_DAMAGED: _Good = {
    'found': _is_number,
    'fingerprint': lambda v: (isinstance(v, str) and re.fullmatch(
        '[0-9a-f]{64}', v) is not None),
    'quarantine': _is_text, 'images': _are_texts,
}
_SCRUB_STATE: _Good = {
    'started': _is_number, 'complete': lambda v: type(v) is bool,
    'image': lambda v: v is None or _is_text(v),
    'group': _is_count, 'slot': _is_count, 'blocks': _is_count,
    'bytes': _is_count, 'damaged': _is_count, 'worn': _is_count,
    'waiting': _are_addresses, 'unreadable': _are_hits,
    'spares': lambda v: (isinstance(v, dict)
                         and all(map(_is_count, v.values()))),
}

# Of samples older than a day one an hour is kept, of those older than 90 days
# one a day. Seconds.
_HISTORY = ((90 * 86400, 86400), (86400, 3600))


class CatalogError(exceptions.DamagedError):
    """The catalog is damaged, or contradicts itself or a caller's request.

    Nothing in the catalog may be trusted any more.
    """


def index_record(fingerprint: bytes, address: int) -> bytes:
    """A record of the exact index: a block's place in it, and its address."""
    return fingerprint[:8] + address.to_bytes(5, 'little')


class Batch:
    """Changes to a catalog, which are written at once, or not at all.

    Methods that take a batch read the catalog as if it were written. A batch
    that is never written changes nothing.
    """

    def __init__(self) -> None:
        self._changes: dict[bytes, bytes | None] = {}
        self.clear()

    def clear(self) -> None:
        """Drop the changes, to use a batch again after it was written."""
        self._changes = {}
        # The exclusive or of the ledger's keys that come and go, and by how
        # much the number of parts grows.
        self._keys = 0
        self._parts = 0
        # The catalog's fields about its ledger, with this batch.
        self._ledger: dict[str, Any] | None = None
        self.size = 0
        """About how many bytes the changes have."""

    def __len__(self) -> int:
        return len(self._changes)

    def put(self, key: bytes, value: bytes) -> None:
        self._change(key, value)

    def delete(self, key: bytes) -> None:
        self._change(key, None)

    def _change(self, key: bytes, value: bytes | None) -> None:
        self.size += len(value or b'') - len(self._changes.get(key) or b'')
        if key not in self._changes:
            self.size += len(key)
        self._changes[key] = value

    def items(self) -> list[tuple[bytes, bytes | None]]:
        """Keys and new values; None for a key that is deleted."""
        return list(self._changes.items())


class Extents(Protocol):
    """A recipe's extents of blocks, page by page."""

    @property
    def pages(self) -> int:
        """How many pages there are."""
        ...

    def runs(self, page: int) -> bytes:
        """The packed runs of one page; the first page has number 0."""


def facts_of(header: dict[str, Any], blocks: int) -> dict[str, Any]:
    """The ledger's facts about a recipe that names so many blocks."""
    facts = {name: header[name] for name in (
        'image_id', 'project', 'size', 'zero_bytes', 'new_bytes',
        'stored_bytes', 'fragments', 'created')}
    facts['upload_id'] = header['upload_id'].hex()
    facts['blocks'] = blocks
    return facts


def _part_id(key: bytes, value: bytes) -> int:
    """The number with which a part enters the ledger's exclusive or."""
    return int.from_bytes(hashlib.sha256(key + value).digest()[:16], 'big')


def _by_chunk(runs: bytes) -> dict[tuple[int, int], bytes | bytearray]:
    """Runs by the chunks of counters that they touch: (group, chunk).

    A run that touches two chunks is in both.
    """
    chunks: dict[tuple[int, int], bytearray] = {}
    begin = at = 0
    key = None
    for group, slot, blocks in addresses_module.runs_in(runs):
        if not group or slot + blocks > addresses_module.GROUP_SLOTS:
            raise CatalogError(f'there are no {blocks} slots from {slot} in '
                               f'group {group}')
        chunk = slot >> _CHUNK_BITS
        # An image's runs come in long sequences within one chunk.
        if key != (group, chunk):
            if at > begin:
                chunks.setdefault(key, bytearray()).extend(runs[begin:at])
            begin, key = at, (group, chunk)
        for further in range(chunk + 1,
                             (slot + blocks - 1 >> _CHUNK_BITS) + 1):
            chunks.setdefault((group, further), bytearray()).extend(
                runs[at:at + addresses_module.RUN_BYTES])
        at += addresses_module.RUN_BYTES
    if at > begin:
        chunks.setdefault(key, bytearray()).extend(runs[begin:at])
    return chunks


class Catalog:
    """An open catalog.

    One thread at a time writes; any thread may read meanwhile.

    :param path: the LevelDB database's directory
    :param repository_id: 32 hexadecimal digits; a catalog of another
        repository is refused
    :param create: make a new catalog, which is not valid yet; there must be
        none
    :raises CatalogError: if the catalog is damaged, or another repository's
    :raises NoSpaceError, AccessDenied, BusyError, StorageError: as their
        names say; the catalog may be good
    """

    def __init__(self, path: str | os.PathLike, repository_id: str,
                 create: bool = False) -> None:
        self.path = os.fspath(path)
        self._repository_id = repository_id
        self._closed = False
        # If one thread closed LevelDB while another uses it, the process
        # would crash.
        self._mutex = threading.RLock()
        self._db: plyvel.DB | None = None
        self._meta: dict[str, Any] = {}
        self._statistics: tuple[Any, dict[str, Any]] | None = None
        self._changes = 0       # how many batches were written
        if create:
            self._create()
        else:
            self._open()

    # -- opening and closing ----------------------------------------------

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Lock LevelDB, and turn plyvel's errors into ours."""
        try:
            with self._mutex:
                yield
        except plyvel.Error as e:
            kind = leveldb.refusal(e) or CatalogError
            raise kind(f'the catalog {self.path}: cannot {what}: '
                       f'{leveldb.words(e)}') from e

    def _check_files(self) -> None:
        """Raise CatalogError unless all files are ordinary and ours.

        LevelDB follows links, and writes to whatever it finds.
        """
        try:
            with os.scandir(self.path) as entries:
                found = [(entry.path, entry.stat(follow_symlinks=False))
                         for entry in entries]
        except OSError as e:
            kind = (exceptions.AccessDenied if isinstance(e, PermissionError)
                    else exceptions.StorageError)
            raise kind(f'the catalog {self.path}: cannot list it: '
                       f'{e.strerror}')
        for path, status in found:
            if (not stat.S_ISREG(status.st_mode) or status.st_nlink > 1
                    or status.st_uid != os.geteuid()):
                raise CatalogError(
                    f'{path} is not an ordinary file of '
                    f'{access.user_name(os.geteuid())} with one name')

    def _load(self, create: bool) -> None:
        with self._errors('open it'):
            # Without paranoid checks LevelDB skips damage in the middle of its
            # log, and applies what follows.
            self._db = plyvel.DB(
                self.path, create_if_missing=create, error_if_exists=create,
                paranoid_checks=True, max_open_files=100,
                bloom_filter_bits=10)

    def _create(self) -> None:
        try:
            access.make_directory(self.path, access.directory_mode(
                os.path.dirname(os.path.abspath(self.path))))
        except OSError as e:
            kind = (exceptions.NoSpaceError if e.errno in (28, 122)
                    else exceptions.StorageError)
            raise kind(f'cannot make the catalog {self.path}: {e.strerror}')
        self._load(create=True)
        self._meta = {
            'format': _PLAIN, 'repository_id': self._repository_id,
            'catalog_id': secrets.token_hex(16), 'sequence': 0,
            'valid': False, 'index_bits': 0, 'ledger': '0' * 32}
        self.write(Batch(), sync=True, sequence=0)

    def _open(self) -> None:
        if not os.path.isdir(self.path) or os.path.islink(self.path):
            raise CatalogError(f'the catalog {self.path} is not there, or '
                               'not a directory')
        self._check_files()
        known = self._meta.get('sequence', 0)
        self._load(create=False)
        try:
            self._meta = self._read_meta()
            if self.sequence < known:
                raise CatalogError(
                    f'the catalog {self.path} lost batches that were synced: '
                    f'it is at {self.sequence} and was at {known}')
        except BaseException:
            self._drop()
            raise

    def _read_meta(self) -> dict[str, Any]:
        meta = self._read_json(_META_KEY)
        if meta is None:
            raise CatalogError(f'the catalog {self.path} says nothing of '
                               'itself')
        # Check the format first: another one may have other keys.
        if (type(meta.get('format')) is int
                and not _PLAIN <= meta['format'] <= FORMAT):
            raise CatalogError(f'the catalog {self.path} has format '
                               f'{meta["format"]}; this program knows '
                               f'{FORMAT}')
        for name, good in _META.items():
            if not good(meta.get(name)):
                raise CatalogError(f'the catalog {self.path} is damaged: '
                                   f'{name} is {meta.get(name)!r}')
        if (meta['format'] == _PLAIN) != (not meta.get('parts')):
            raise self._damaged(f'its format is {meta["format"]}, and it has '
                                f'{meta.get("parts", 0)} parts of recipes')
        if meta['repository_id'] != self._repository_id:
            raise CatalogError(f'the catalog {self.path} is of repository '
                               f'{meta["repository_id"]}')
        return meta

    def _drop(self) -> None:
        with self._mutex:
            db, self._db = self._db, None
            if db is not None:
                db.close()

    @property
    def _open_db(self) -> plyvel.DB:
        """The database; opened again after a failed write.

        REQUIRES: the caller is within _errors.
        """
        if self._closed:
            raise exceptions.ClosedError(f'the catalog {self.path} is closed')
        if self._db is None:
            self._open()
        return self._db

    def close(self) -> None:
        """Close the catalog; later calls raise ClosedError. Idempotent."""
        self._closed = True
        self._drop()

    # -- what it says about itself ----------------------------------------

    @property
    def id(self) -> bytes:
        """16 random bytes, drawn when the catalog was made."""
        return bytes.fromhex(self._meta['catalog_id'])

    @property
    def sequence(self) -> int:
        """The sequence of the last accounting step (I9)."""
        return self._meta['sequence']

    @property
    def valid(self) -> bool:
        """False until all images are counted in a new catalog (N2.3)."""
        return self._meta['valid']

    @property
    def index_bits(self) -> int:
        """How many bits of a fingerprint give its page of the index."""
        return self._meta['index_bits']

    def disk_bytes(self) -> int:
        """How many bytes of the disk the catalog's files occupy."""
        total = 0
        with contextlib.suppress(FileNotFoundError):
            with os.scandir(self.path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat().st_blocks * 512
        return total

    # -- reading and writing ----------------------------------------------

    def batch(self) -> Batch:
        return Batch()

    def write(self, batch: Batch, sync: bool = False,
              sequence: int | None = None, valid: bool | None = None,
              index_bits: int | None = None) -> None:
        """Write a batch, and with it new values of the catalog's own fields.

        :param sync: make it durable before returning. Changes that authorise
            no freeing don't need this
        :param sequence: that of an accounting step
        :raises NoSpaceError: there is no room. The batch may be written or
            not. The caller may write it again, since all its values are
            absolute
        """
        given = {'sequence': sequence, 'valid': valid,
                 'index_bits': index_bits}
        given = {k: v for k, v in given.items() if v is not None}
        try:
            with self._errors('write to it'):
                # First: after a failed write this opens the database again,
                # and reads its fields, which that write may have changed.
                out = self._open_db.write_batch(sync=sync)
                if batch._keys:
                    # Only once: a second write of this batch must not take
                    # its keys out of the exclusive or again.
                    batch._ledger = batch._ledger or self._ledger_with(batch)
                    given.update(batch._ledger)
                meta = {**self._meta, **given}
                if not meta.get('parts'):
                    meta.pop('parts', None)
                for key, value in batch.items():
                    if value is None:
                        out.delete(key)
                    else:
                        out.put(key, value)
                if given:
                    out.put(_META_KEY, _to_json(meta))
                out.write()
        except exceptions.RepositoryError:
            # LevelDB's log may end in a torn record now. Records behind that
            # would be lost. When opened again, LevelDB begins a new log.
            self._drop()
            raise
        self._meta = meta
        self._changes += 1

    def _ledger_with(self, batch: Batch) -> dict[str, Any]:
        """The catalog's fields about its ledger, once a batch is written."""
        parts = self._meta.get('parts', 0) + batch._parts
        ledger = int(self._meta['ledger'], 16) ^ batch._keys
        return {'ledger': f'{ledger:032x}', 'parts': parts,
                'format': FORMAT if parts else _PLAIN}

    def _get(self, key: bytes, batch: Batch | None = None) -> bytes | None:
        if batch is not None and key in batch._changes:
            return batch._changes[key]
        with self._errors('read it'):
            return self._open_db.get(key, verify_checksums=True)

    def _read_json(self, key: bytes, good: _Good | None = None,
                   need: tuple[str, ...] = (),
                   batch: Batch | None = None) -> Any:
        value = self._get(key, batch)
        return None if value is None else self._parse(key, value, good, need)

    def _parse(self, key: bytes, value: bytes, good: _Good | None = None,
               need: tuple[str, ...] = ()) -> dict[str, Any]:
        """The fields of a JSON object.

        :param good: a check for each known field; there may be other fields
        :param need: the known fields that must be there
        """
        try:
            fields = json.loads(value)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise self._damaged(f'the value of {leveldb.shown(key)} is not '
                                'a JSON object')
        for name, is_good in (good or {}).items():
            if (name in fields or name in need) and not is_good(
                    fields.get(name)):
                raise self._damaged(
                    f'{name} of {leveldb.shown(key)} is {fields.get(name)!r}')
        return fields

    def _damaged(self, how: str) -> CatalogError:
        return CatalogError(f'the catalog {self.path} is damaged: {how}')

    def _number(self, form: struct.Struct, key: bytes) -> int:
        """The number that ends a key."""
        if len(key) != form.size:
            raise CatalogError(f'the catalog {self.path} has the strange key '
                               f'{leveldb.shown(key)}')
        return form.unpack(key)[1]

    def _items(self, prefix: bytes, start: bytes | None = None,
               values: bool = True) -> Iterator[Any]:
        """Keys with their values, or only keys.

        This reads page by page, so that other threads get their turn. It sees
        changes that are made behind the present page.
        """
        stop = bytes([prefix[0] + 1])
        begin = prefix if start is None else start
        while True:
            with self._errors('read it'):
                with self._open_db.iterator(
                        start=begin, stop=stop, verify_checksums=True,
                        include_value=values) as iterator:
                    page = list(itertools.islice(iterator, _PAGE))
            yield from page
            if len(page) < _PAGE:
                return
            begin = (page[-1][0] if values else page[-1]) + b'\0'

    # -- the ledger and the counts (N1) -----------------------------------

    def counted(self, txid: bytes, batch: Batch | None = None) -> bool:
        """Whether the recipe of this transaction id (16 bytes) is counted.

        That means all of it: otherwise it has no ledger key.
        """
        return self._get(b'l' + txid, batch) is not None

    def begun(self, txid: bytes, batch: Batch | None = None) -> int:
        """How many pages of a begun recipe are counted; 0: it is not begun."""
        return self._begun(txid, batch)[1]

    def all_begun(self) -> Iterator[tuple[bytes, str]]:
        """Transaction id and image id of each begun recipe."""
        for key, value in self._items(b'b'):
            yield key[1:], self._parse(key, value, _BEGUN,
                                       tuple(_BEGUN))['image_id']

    def facts(self, txid: bytes, batch: Batch | None = None
              ) -> dict[str, Any] | None:
        """The ledger's facts about a counted recipe; None if not counted."""
        return self._read_json(b'l' + txid, _LEDGER, _NEEDED, batch)

    def txids(self) -> Iterator[bytes]:
        """The transaction ids of all counted recipes.

        REQUIRES: nothing is counted meanwhile.

        :raises CatalogError: behind the last one, if ledger keys, or parts of
            recipes, are missing. LevelDB does not notice if one of several
            logs is cut short: it then has later batches, but not earlier ones
        """
        ledger = parts = 0
        for key in self._items(b'l', values=False):
            if len(key) != 17:
                raise CatalogError(f'the catalog {self.path} has the strange '
                                   f'key {leveldb.shown(key)}')
            ledger ^= int.from_bytes(key[1:], 'big')
            yield key[1:]
        for key, value in self._items(b'e'):
            ledger ^= _part_id(key, value)
            parts += 1
        if (ledger != int(self._meta['ledger'], 16)
                or parts != self._meta.get('parts', 0)):
            raise CatalogError(f'the catalog {self.path} lost batches in the '
                               'middle: its ledger is not complete')

    def ledger(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Transaction id and facts of each counted recipe."""
        for key, value in self._items(b'l'):
            yield key[1:], self._parse(key, value, _LEDGER, _NEEDED)

    def count(self, batch: Batch, txid: bytes, recipe: Extents,
              facts: dict[str, Any], most: int = sys.maxsize) -> bool:
        """Count a recipe's further blocks; behind the last one, put its key.

        REQUIRES: the recipe has no ledger key yet.

        :param most: bytes; no page is added to a batch that has more
        :returns: whether all is counted; otherwise the caller writes the batch
            and calls this again with an empty one
        """
        if self.counted(txid, batch):
            raise CatalogError(f'the recipe {txid.hex()} is counted already')
        parts, page = begun = self._begun(txid, batch)
        self._need_page(txid, page, recipe)
        try:
            while page < recipe.pages and batch.size <= most:
                self._add(batch, recipe.runs(page), 1)
                page += 1
        finally:
            # Also if the next page cannot be read: the batch has the pages
            # before it.
            if begun[1] < page < recipe.pages:
                self._set_part(batch, txid, parts, page)
                self._set_begun(batch, txid, facts['image_id'], parts + 1)
        if page < recipe.pages:
            return False
        batch.put(b'l' + txid,
                  _to_json({**facts, 'parts': parts} if parts else facts))
        self._set_begun(batch, txid, None, 0)
        batch._keys ^= int.from_bytes(txid, 'big')
        return True

    def uncount(self, batch: Batch, txid: bytes, recipe: Extents,
                most: int = sys.maxsize) -> bool:
        """Take a recipe's blocks off the counts, from its end.

        Groups in which a count goes to zero become dirty. REQUIRES: the recipe
        is counted or begun.

        :param most: as for :meth:`count`
        :returns: whether nothing of the recipe is counted any more; otherwise
            as for :meth:`count`
        :raises CatalogError: if the recipe is neither counted nor begun, or a
            count would go below zero
        """
        facts = self.facts(txid, batch)
        parts, page = self._begun(txid, batch)
        if facts is None and not parts:
            raise CatalogError(f'the recipe {txid.hex()} is not counted')
        if batch.size > most:
            return False
        # The part that is being un-counted; it begins behind the one before.
        part = parts - 1
        image_id = None
        if facts is not None:
            part, page = facts.get('parts', 0), recipe.pages
            image_id = facts['image_id']
        self._need_page(txid, page, recipe)
        begin = self._begin(txid, part, page, batch)
        try:
            while page and batch.size <= most:
                self._add(batch, recipe.runs(page - 1), -1)
                page -= 1
                if page == begin and part:
                    self._set_part(batch, txid, part, None)
                    part -= 1
                    begin = self._begin(txid, part, page, batch)
        finally:
            if facts is not None:
                batch.delete(b'l' + txid)
                batch._keys ^= int.from_bytes(txid, 'big')
            self._set_part(batch, txid, part, page or None)
            self._set_begun(batch, txid, image_id, part + 1 if page else 0)
        return not page

    def discount(self, batch: Batch, runs: bytes) -> int:
        """Take runs off the counts in a batch that is never written.

        :returns: how many counts went to zero
        """
        return -self._add(batch, runs, -1)

    def preset(self, batch: Batch, group: int, counts: bytes) -> None:
        """Put a group's counts into a batch that is never written."""
        for chunk in range(-(-len(counts) // _CHUNK_BYTES)):
            at = chunk * _CHUNK_BYTES
            batch.put(_COUNTS.pack(b'c', group, chunk),
                      counts[at:at + _CHUNK_BYTES])

    # -- recipes that are begun -------------------------------------------

    def _begun(self, txid: bytes, batch: Batch | None) -> tuple[int, int]:
        """How many parts and pages of a begun recipe are counted."""
        fields = self._read_json(b'b' + txid, _BEGUN, tuple(_BEGUN), batch)
        if fields is None:
            return 0, 0
        return fields['parts'], self._end(txid, fields['parts'] - 1, batch)

    def _set_begun(self, batch: Batch, txid: bytes, image_id: str | None,
                   parts: int) -> None:
        """Put a recipe's key of begun recipes; delete it for 0 parts.

        :param image_id: None: keep the present one
        """
        key = b'b' + txid
        known = self._read_json(key, _BEGUN, tuple(_BEGUN), batch)
        if parts:
            batch.put(key, _to_json({
                'image_id': image_id or known['image_id'], 'parts': parts}))
        elif known is not None:
            batch.delete(key)

    def _end(self, txid: bytes, part: int, batch: Batch | None) -> int:
        """The number of the page behind a part; 0 for a part below 0."""
        if part < 0:
            return 0
        key = _PART.pack(b'e', txid, part)
        value = self._get(key, batch) or b''
        if len(value) != _END.size:
            raise self._damaged(f'{key!r} has {len(value)} bytes')
        return _END.unpack(value)[0]

    def _begin(self, txid: bytes, part: int, page: int, batch: Batch) -> int:
        """The first page of the part that ends before `page`."""
        begin = self._end(txid, part - 1, batch)
        if part and begin >= page:
            raise self._damaged(f'part {part} of the recipe {txid.hex()} '
                                'begins behind its end')
        return begin

    def _set_part(self, batch: Batch, txid: bytes, part: int,
                  end: int | None) -> None:
        """Record the page behind a part; None: the part is gone."""
        key = _PART.pack(b'e', txid, part)
        value = self._get(key, batch)
        if value is not None:
            batch._keys ^= _part_id(key, value)
            batch._parts -= 1
            batch.delete(key)
        if end is not None:
            value = _END.pack(end)
            batch._keys ^= _part_id(key, value)
            batch._parts += 1
            batch.put(key, value)

    def _need_page(self, txid: bytes, page: int, recipe: Extents) -> None:
        if page > recipe.pages:
            raise self._damaged(
                f'{page} pages of the recipe {txid.hex()} are counted, which '
                f'has {recipe.pages}')

    # -- image files ------------------------------------------------------

    def seen(self) -> Iterator[tuple[bytes, tuple[int, int, bytes]]]:
        """Image ids, and the file in which each image's recipe was last seen.

        The file's inode; when it was last written, nanoseconds since 1970; and
        the transaction id in it.
        """
        for key, value in self._items(b'i'):
            if len(value) != _SEEN.size:
                raise self._damaged(f'{leveldb.shown(key)} has '
                                    f'{len(value)} bytes')
            yield key[1:], _SEEN.unpack(value)

    def set_seen(self, batch: Batch, image_id: bytes,
                 file: tuple[int, int, bytes] | None) -> None:
        """Remember the file of an image's recipe; None: forget it."""
        if file is None:
            batch.delete(b'i' + image_id)
        else:
            batch.put(b'i' + image_id, _SEEN.pack(*file))

    def _add(self, batch: Batch, runs: bytes, delta: int) -> int:
        """Add `delta` to the counts of all blocks in these runs.

        Returns by how much the number of blocks with a count above 0 grew.
        """
        used: dict[int, int] = {}
        for (group, chunk), some in _by_chunk(runs).items():
            key = _COUNTS.pack(b'c', group, chunk)
            counts = bytearray(self._counts(key, batch))
            before = _zeros(counts)
            try:
                _engine.add_runs(counts, group, chunk, some, delta)
            except ValueError as e:
                raise CatalogError(
                    f'the catalog {self.path} counts too few recipes for a '
                    f'block of group {group}: {e}')
            used[group] = used.get(group, 0) + before - _zeros(counts)
            if counts == _ZEROS:
                batch.delete(key)
            else:
                batch.put(key, bytes(counts))
        for group, more in used.items():
            if more:
                facts = self.group(group, batch)
                changes = {'used': facts['used'] + more}
                if more < 0:
                    changes['dirty'] = True
                self.set_group(batch, group, **changes)
        return sum(used.values())

    def _counts(self, key: bytes, batch: Batch | None) -> bytes:
        counts = self._get(key, batch)
        if counts is None:
            return _ZEROS
        if len(counts) != _CHUNK_BYTES:
            raise CatalogError(f'the catalog {self.path} is damaged: the '
                               f'counts {leveldb.shown(key)} have '
                               f'{len(counts)} bytes')
        return counts

    def counts(self, group: int, slots: int = addresses_module.GROUP_SLOTS,
               batch: Batch | None = None) -> bytes:
        """How often recipes name each of a group's first slots (32 bits)."""
        return b''.join(
            self._counts(_COUNTS.pack(b'c', group, chunk), batch)
            for chunk in range(-(-slots // CHUNK_SLOTS)))[:4 * slots]

    # -- groups -----------------------------------------------------------

    def group(self, number: int, batch: Batch | None = None
              ) -> dict[str, Any]:
        """The facts about a group that format.rst lists."""
        key = _GROUP.pack(b'g', number)
        value = self._get(key, batch)
        return dict(_GROUP_FACTS) if value is None else (
            self._group_facts(key, value))

    def _group_facts(self, key: bytes, value: bytes) -> dict[str, Any]:
        facts = {**_GROUP_FACTS, **self._parse(key, value)}
        for name, default in _GROUP_FACTS.items():
            if (type(facts[name]) is not type(default)
                    or not 0 <= facts[name] <= addresses_module.GROUP_SLOTS):
                raise CatalogError(f'the catalog {self.path} is damaged: '
                                   f'{name} of {leveldb.shown(key)} is '
                                   f'{facts[name]!r}')
        return facts

    def groups(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The groups about which the catalog has facts, with these."""
        for key, value in self._items(b'g'):
            yield self._number(_GROUP, key), self._group_facts(key, value)

    def set_group(self, batch: Batch, number: int, **facts: Any) -> None:
        """Change some of a group's facts."""
        batch.put(_GROUP.pack(b'g', number),
                  _to_json({**self.group(number, batch), **facts}))

    def forget_group(self, batch: Batch, number: int) -> None:
        """Drop the facts about a group that is gone.

        :raises CatalogError: a count of the group is above zero
        """
        if any(self.counts(number, batch=batch)):
            raise CatalogError(f'group {number} is gone, but blocks of it are '
                               'counted')
        batch.delete(_GROUP.pack(b'g', number))

    # -- statistics -------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Sums over the counted images, and over all groups.

        ``images``, ``logical_bytes``, ``zero_bytes``, ``nonzero_bytes``,
        ``new_bytes``, ``stored_bytes``, ``blocks`` (counted each time that a
        recipe names them), ``unique_blocks``; and ``projects``: the same sums
        for each project, without ``unique_blocks``.
        """
        changes = self._changes
        if self._statistics is None or self._statistics[0] != changes:
            projects: dict[str, dict[str, int]] = {}
            for _, facts in self.ledger():
                try:
                    sums = projects.setdefault(
                        facts['project'],
                        dict.fromkeys(('images', *_LEDGER_SUMS), 0))
                    sums['images'] += 1
                    for name in _LEDGER_SUMS:
                        sums[name] += facts[name]
                except (KeyError, TypeError) as e:
                    raise CatalogError(f'the catalog {self.path} is damaged: '
                                       f'facts of an image lack {e}')
            total = dict.fromkeys(('images', *_LEDGER_SUMS), 0)
            for sums in projects.values():
                for name, value in sums.items():
                    total[name] += value
            for sums in (total, *projects.values()):
                sums['logical_bytes'] = sums.pop('size')
                sums['nonzero_bytes'] = (sums['logical_bytes']
                                         - sums['zero_bytes'])
            total['unique_blocks'] = sum(
                facts['used'] for _, facts in self.groups())
            self._statistics = changes, {**total, 'projects': projects}
        return self._statistics[1]

    # -- damaged blocks, scrub state, history -----------------------------

    def damaged(self) -> dict[int, dict[str, Any]]:
        """The facts about each damaged block, by its address."""
        return dict(self._damaged_block(key, value)
                    for key, value in self._items(b'd'))

    def _damaged_block(self, key: bytes, value: bytes
                       ) -> tuple[int, dict[str, Any]]:
        address = self._number(_NUMBER, key)
        if not addresses_module.is_address(address):
            raise self._damaged(f'{leveldb.shown(key)} is not the address '
                                'of a block')
        return address, self._parse(key, value, _DAMAGED, tuple(_DAMAGED))

    def set_damaged(self, batch: Batch, address: int,
                    facts: dict[str, Any] | None) -> None:
        """Remember facts about a damaged block; None: forget the block."""
        key = _NUMBER.pack(b'd', address)
        if facts is None:
            batch.delete(key)
        else:
            batch.put(key, _to_json(facts))

    def scrub_state(self) -> dict[str, Any]:
        """The state that was last set; at first an empty one."""
        return self._read_json(_SCRUB, _SCRUB_STATE) or {}

    def set_scrub_state(self, state: dict[str, Any]) -> None:
        batch = Batch()
        batch.put(_SCRUB, _to_json(state))
        self.write(batch)

    def damaged_images(self) -> set[str]:
        """The images that are known to have parts that cannot be read."""
        return {image_id for hit in (
            *self.damaged().values(),
            *self.scrub_state().get('unreadable', {}).values())
            for image_id in hit['images']}

    def sample(self, time: float, sample: dict[str, Any]) -> None:
        """Keep a sample for the plots, and thin out the older ones.

        :param time: seconds since 1970
        """
        batch = Batch()
        seen = set()
        for key in self._items(b'h', values=False):
            if len(key) != _NUMBER.size:
                batch.delete(key)
                continue
            then = self._number(_NUMBER, key)
            for age, every in _HISTORY:
                if then < time - age:
                    if (every, then // every) in seen:
                        batch.delete(key)
                    seen.add((every, then // every))
                    break
        batch.put(_NUMBER.pack(b'h', int(time)), _to_json(sample))
        self.write(batch)

    def history(self, since: float = 0) -> list[dict[str, Any]]:
        """The samples from `since` on, each with its ``time``.

        Malformed samples are left out, since no decision depends on them.

        :param since: seconds since 1970
        """
        samples = []
        for key, value in self._items(
                b'h', _NUMBER.pack(b'h', max(0, int(since)))):
            with contextlib.suppress(CatalogError):
                samples.append({'time': self._number(_NUMBER, key),
                                **self._parse(key, value)})
        return samples

    def salvage(self) -> tuple[Batch, int]:
        """What a rebuild cannot derive: history, scrub state, damaged blocks.

        Returns the items that can be read and are well-formed, and how many
        are lost. If the rest of one kind cannot be read, it counts as one.
        """
        batch = Batch()
        lost = 0
        for prefix, parse in ((b'h', self._sample), (_SCRUB, self._state),
                              (b'd', self._damaged_block)):
            try:
                for key, value in self._items(prefix):
                    try:
                        parse(key, value)
                    except CatalogError:
                        lost += 1
                    else:
                        batch.put(key, value)
            except CatalogError:
                lost += 1
        return batch, lost

    def _sample(self, key: bytes, value: bytes) -> None:
        self._number(_NUMBER, key)
        self._parse(key, value)

    def _state(self, key: bytes, value: bytes) -> None:
        if key != _SCRUB:
            raise self._damaged(f'the key {leveldb.shown(key)} is strange')
        self._parse(key, value, _SCRUB_STATE)

    # -- pages of the exact index -----------------------------------------

    def indexed(self, fingerprint: bytes) -> int | None:
        """The address that the exact index has for this block, or None."""
        page = self.index_page(
            int.from_bytes(fingerprint[:4], 'big') >> 32 - self.index_bits)
        for at in range(0, len(page), INDEX_RECORD_BYTES):
            if page[at:at + 8] == fingerprint[:8]:
                return int.from_bytes(page[at + 8:at + INDEX_RECORD_BYTES],
                                      'little')
        return None

    def index_page(self, number: int) -> bytes:
        """The page's records, sorted; b'' if there are none."""
        page = self._get(_GROUP.pack(b'f', number)) or b''
        records = [page[at:at + INDEX_RECORD_BYTES]
                   for at in range(0, len(page), INDEX_RECORD_BYTES)]
        if len(page) % INDEX_RECORD_BYTES or any(map(
                operator.ge, records, records[1:])):
            raise self._damaged(f'page {number} of the index is not in order')
        return page

    def set_index_page(self, batch: Batch, number: int, page: bytes) -> None:
        key = _GROUP.pack(b'f', number)
        if page:
            batch.put(key, page)
        else:
            batch.delete(key)

    # -- known duplicates -------------------------------------------------

    def duplicates(self, group: int, batch: Batch | None = None) -> bytes:
        """The duplicates of a group's blocks that are not merged yet.

        Sorted pairs of addresses (2 x 64 bits): the block in this group that
        is in the index, and another block with the same fingerprint.
        """
        pairs = self._get(_GROUP.pack(b'p', group), batch) or b''
        if len(pairs) % _PAIR_BYTES or not _are_pairs(pairs, group):
            raise self._damaged(f'the duplicates of group {group} are not '
                                'pairs of addresses in order')
        return pairs

    def set_duplicates(self, batch: Batch, group: int, pairs: bytes) -> None:
        key = _GROUP.pack(b'p', group)
        if pairs:
            batch.put(key, pairs)
        else:
            batch.delete(key)

    def groups_with_duplicates(self) -> list[int]:
        """The groups that have known duplicates, sorted."""
        return [self._number(_GROUP, key)
                for key in self._items(b'p', values=False)]


def _to_json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(',', ':')).encode()


def _are_pairs(pairs: bytes, group: int) -> bool:
    numbers = addresses_module.unpack(pairs, 'Q')
    first, second = numbers[::2], numbers[1::2]
    both = list(zip(first, second))
    return not pairs or (
        {group} == {addresses_module.group_of(min(first)),
                    addresses_module.group_of(max(first))}
        and addresses_module.is_address(min(second))
        and addresses_module.is_address(max(second))
        and not any(map(operator.ge, both, both[1:])))


def _zeros(counts: bytearray) -> int:
    return addresses_module.unpack(counts).count(0)
