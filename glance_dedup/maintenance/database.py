# SPDX-License-Identifier: Apache-2.0

"""The catalog's LevelDB database: batches, and when it may be trusted.

One thread at a time changes the database; any thread may read it meanwhile.

The key ``meta`` names the database's subject and progress. Its field
``ledger`` is the exclusive or of all counted recipes and of all parts. It
shows whether LevelDB lost a batch and kept later ones.
"""

from collections.abc import Iterator
import contextlib
import errno
import itertools
import json
import os
import secrets
import stat
import threading
from typing import Any

import plyvel

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import leveldb
from glance_dedup.maintenance import records

FORMAT = 1

_PAGE = 1024     # items read at a time
_CURRENT = 'CURRENT'    # names LevelDB's manifest
_MAX_CURRENT = 64


class CatalogError(exceptions.DamagedError):
    """The catalog is damaged, or contradicts itself or a caller's request.

    Nothing in the catalog may be trusted any more.
    """


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

    def put(self, key: bytes, value: bytes | None) -> None:
        """Set a key's value; replaces an earlier change of the key.

        :param value: None: remove the key, if there is one
        """
        self.size += len(value or b'') - len(self._changes.get(key) or b'')
        if key not in self._changes:
            self.size += len(key)
        self._changes[key] = value

    def delete(self, key: bytes) -> None:
        """Remove a key, if there is one; replaces an earlier change of it."""
        self.put(key, None)

    def note_recipe(self, txid: bytes) -> None:
        """Note that this batch puts or deletes a recipe's ledger key."""
        self._keys ^= int.from_bytes(txid, 'big')

    def note_part(self, key: bytes, value: bytes, more: int) -> None:
        """Note that this batch puts or deletes a part of a recipe.

        :param more: by how much the number of parts grows: 1 or -1
        """
        self._keys ^= records.part_id(key, value)
        self._parts += more

    def items(self) -> list[tuple[bytes, bytes | None]]:
        """Keys and new values; None for a key that is deleted."""
        return list(self._changes.items())


class Database:
    """An open catalog, as keys and values.

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
        self._opening: tuple[bytes, int] | None = None
        self._meta: dict[str, Any] = {}
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

    def _require_files(self) -> None:
        """Raise CatalogError unless all files are ordinary and ours.

        LevelDB follows links, and writes to whatever it finds.
        """
        with (files.os_errors(f'the catalog {self.path}: cannot list it',
                              exceptions.StorageError),
              os.scandir(self.path) as entries):
            found = [(entry.path, entry.stat(follow_symlinks=False))
                     for entry in entries]
        for path, status in found:
            if (not stat.S_ISREG(status.st_mode) or status.st_nlink > 1
                    or status.st_uid != os.geteuid()):
                raise CatalogError(
                    f'{path} is not an ordinary file of '
                    f'{access.user_name(os.geteuid())} with one name')

    def _load(self, create: bool) -> None:
        try:
            with self._errors('open it'):
                # Without paranoid checks LevelDB skips damage in the middle of
                # its log, and applies the records after it.
                self._db = plyvel.DB(
                    self.path, create_if_missing=create,
                    error_if_exists=create, paranoid_checks=True,
                    max_open_files=100, bloom_filter_bits=10)
        finally:
            self._opening = self._last_opening()

    def _require_maps(self) -> None:
        """Refuse a file system that would make each opening fail later."""
        with files.os_errors(f'cannot look at the catalog {self.path}'):
            try:
                file = open(os.path.join(self.path, _CURRENT), 'rb')
            except FileNotFoundError:
                return      # LevelDB reports that the catalog is damaged
        with file:
            leveldb.require_maps(self.path, file.fileno())

    def _create(self) -> None:
        with files.os_errors(f'cannot make the catalog {self.path}',
                             exceptions.StorageError):
            access.make_directory(self.path, access.directory_mode(
                os.path.dirname(os.path.abspath(self.path))))
        self._load(create=True)
        try:
            self._require_maps()
        except BaseException:
            self._drop()
            raise
        self._meta = {
            'format': FORMAT, 'repository_id': self._repository_id,
            'catalog_id': secrets.token_hex(16), 'sequence': 0,
            'valid': False, 'ledger': '0' * 32, 'parts': 0}
        self.write(Batch(), sync=True, sequence=0)

    def _open(self) -> None:
        found = files.stat_of(self.path)
        if found is None or not stat.S_ISDIR(found.st_mode):
            raise CatalogError(f'the catalog {self.path} does not exist, or '
                               'is not a directory')
        self._require_files()
        self._require_maps()
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
        meta = self._read_json(records.META)
        if meta is None:
            raise self._damaged('it does not say of which repository it is')
        # Check the format first: another one may have other keys.
        if type(meta.get('format')) is int and meta['format'] != FORMAT:
            raise CatalogError(f'the catalog {self.path} has format '
                               f'{meta["format"]}; this program knows '
                               f'{FORMAT}')
        for name, good in records.META_FORM.checks.items():
            if not good(meta.get(name)):
                raise self._damaged(f'{name} is {meta.get(name)!r}')
        if meta['repository_id'] != self._repository_id:
            raise CatalogError(f'the catalog {self.path} belongs to '
                               f'repository {meta["repository_id"]}')
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
            if self.is_opened_elsewhere():
                raise exceptions.LostLocks(
                    f'another process has opened the catalog {self.path}')
            self._open()
        return self._db

    def is_opened_elsewhere(self) -> bool:
        """Return whether others have opened the catalog since this object did.

        They may have changed it. This object must not be used any more.

        :raises AccessDenied, StorageError: that cannot be found out
        """
        return self._opening != self._last_opening()

    def _last_opening(self) -> tuple[bytes, int] | None:
        """Return a token that changes whenever the catalog is opened.

        A process that opens a LevelDB begins a manifest, and replaces the file
        that names it.

        :returns: None if there is no catalog
        :raises AccessDenied, StorageError: that cannot be found out
        """
        try:
            for directory in os.path.join(self.path, os.pardir), self.path:
                # So that the server gets a request for the names in it.
                os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
            with open(os.path.join(self.path, _CURRENT), 'rb') as f:
                # No times: some file systems change their minds on them.
                return f.read(_MAX_CURRENT), os.fstat(f.fileno()).st_ino
        except OSError as e:
            # The opened file may be replaced meanwhile.
            if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return None
            with files.os_errors(f'cannot look at the catalog {self.path}'):
                raise

    def close(self) -> None:
        """Close the catalog; later calls raise ClosedError. Idempotent."""
        self._closed = True
        self._drop()

    # -- the catalog's own fields -----------------------------------------

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

    def disk_bytes(self) -> int:
        """Return how many bytes of the disk the catalog's files occupy."""
        total = 0
        with contextlib.suppress(FileNotFoundError):
            with os.scandir(self.path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat().st_blocks * 512
        return total

    # -- reading and writing ----------------------------------------------

    def batch(self) -> Batch:
        """A batch without changes, for :meth:`write`."""
        return Batch()

    def write(self, batch: Batch, sync: bool = False,
              sequence: int | None = None, valid: bool | None = None
              ) -> None:
        """Write a batch, and with it new values of the catalog's own fields.

        :param sync: make it durable before returning. Changes that authorise
            no freeing don't need this
        :param sequence: that of an accounting step
        :raises NoSpaceError: there is no room. The batch may be written or
            not. The caller may write it again, since all its values are
            absolute
        """
        given = {k: v for k, v in (('sequence', sequence), ('valid', valid))
                 if v is not None}
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
                for key, value in batch.items():
                    if value is None:
                        out.delete(key)
                    else:
                        out.put(key, value)
                if given:
                    out.put(records.META, records.to_json(meta))
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
        ledger = int(self._meta['ledger'], 16) ^ batch._keys
        return {'ledger': f'{ledger:032x}',
                'parts': self._meta['parts'] + batch._parts}

    def _get(self, key: bytes, batch: Batch | None = None) -> bytes | None:
        if batch is not None and key in batch._changes:
            return batch._changes[key]
        with self._errors('read it'):
            return self._open_db.get(key, verify_checksums=True)

    def _read_json(self, key: bytes, form: records.Form = records.Form(),
                   batch: Batch | None = None) -> dict[str, Any] | None:
        value = self._get(key, batch)
        return None if value is None else self._parse(key, value, form)

    def _parse(self, key: bytes, value: bytes,
               form: records.Form = records.Form()) -> dict[str, Any]:
        """The fields of a JSON object."""
        try:
            fields = json.loads(value)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise self._damaged(f'the value of {leveldb.shown(key)} is not '
                                'a JSON object')
        for name, is_good in form.checks.items():
            if (name in fields or name in form.need) and not is_good(
                    fields.get(name)):
                raise self._damaged(
                    f'{name} of {leveldb.shown(key)} is {fields.get(name)!r}')
        return fields

    def _damaged(self, how: str) -> CatalogError:
        return CatalogError(f'the catalog {self.path} is damaged: {how}')

    def _strange(self, key: bytes) -> CatalogError:
        return CatalogError(f'the catalog {self.path} has the strange key '
                            f'{leveldb.shown(key)}')

    def _number(self, key: bytes) -> int:
        """The number in a key."""
        number = records.number_of(key)
        if number is None:
            raise self._strange(key)
        return number

    def _items(self, prefix: bytes, start: bytes | None = None,
               values: bool = True) -> Iterator[Any]:
        """Keys with their values, or only keys; see :meth:`_pages`."""
        for page in self._pages(prefix, start, values):
            yield from page

    def _pages(self, prefix: bytes, start: bytes | None = None,
               values: bool = True) -> Iterator[list[Any]]:
        """The same, page by page, so that other threads get their turn.

        It sees changes that are made behind the present page.
        """
        stop = bytes([prefix[0] + 1])
        begin = prefix if start is None else start
        while True:
            with self._errors('read it'):
                # Many images do not fit into LevelDB's cache. Filling it takes
                # longer than reading them.
                with self._open_db.iterator(
                        start=begin, stop=stop, verify_checksums=True,
                        fill_cache=False, include_value=values) as iterator:
                    page = list(itertools.islice(iterator, _PAGE))
            yield page
            if len(page) < _PAGE:
                return
            begin = (page[-1][0] if values else page[-1]) + b'\0'
