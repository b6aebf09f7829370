# SPDX-License-Identifier: Apache-2.0

"""A private copy of the catalog's database, and LevelDB's verdict on it.

LevelDB cannot open a database without changing it, so the checker opens a
copy. A copy is only possible while no maintainer is at work.

If LevelDB cannot read something, a damaged table is *damage*, since LevelDB
syncs each table before anything names it. All else is a *note*: a crash may
leave CURRENT, the manifest, the log and the list of tables as they were at
different times, and with them accounting steps may be missing. The next
maintainer notices that, and rebuilds the catalog.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
import pathlib
import re

import plyvel

from glance_dedup.base import leveldb
from glance_dedup.base import scratch
from glance_dedup.check import files
from glance_dedup.check import ondisk

# The names of the files that make up a LevelDB database. Other files are its
# messages, its lock, and files that LevelDB forgot to remove.
NEEDED_NAME = re.compile(r'(CURRENT|MANIFEST-[0-9]+|[0-9]+\.(ldb|sst|log))\Z')
OTHER_NAME = re.compile(r'(LOCK|LOG|LOG\.old|[0-9]+\.dbtmp)\Z')
CURRENT = re.compile(rb'MANIFEST-[0-9]+\n\Z')
# In LevelDB's messages: a file's name; that it is missing.
NAMED = re.compile(r'/([0-9]+\.(?:ldb|sst|log)|MANIFEST-[0-9]+)\b')
MISSING = re.compile('missing files|No such file')
# In its journal: a log that it cannot read to its end.
CUT_LOG = re.compile(r'/([0-9]+\.log): dropping')
TABLE = ('.ldb', '.sst')
REBUILT = 'the next maintainer rebuilds it'
PIECE = 1 << 20


class InUse(Exception):
    """A maintainer has the catalog."""


class Unusable(Exception):
    """The judging ends with a note: a crash may leave the catalog so."""


class Copy:
    """A copy of the catalog as it is at the moment.

    :param directory: the catalog's, open
    :param find: called with severity, sentence and file of each finding
    """

    def __init__(self, directory: int,
                 find: Callable[[str, str, str], None]) -> None:
        self._directory = directory
        self._find = find
        self._before = _snapshot(directory)
        self._scratch = scratch.Directory()
        self._db: plyvel.DB | None = None

    def close(self) -> None:
        """Close the database and remove the copy."""
        self.close_database()
        self._scratch.cleanup()

    # Making it

    def changed(self) -> bool:
        """Return whether a maintainer opened the catalog since."""
        return _needed(_snapshot(self._directory)) != _needed(self._before)

    def copy_files(self) -> None:
        """Copy the database; files with unknown names are reported.

        :raises InUse: if a file vanishes or shrinks meanwhile
        :raises Damage: if a file cannot be read
        :raises OSError: if there is no room for the copy
        """
        for name in sorted(self._before):
            if not NEEDED_NAME.match(name):
                if not OTHER_NAME.match(name):
                    self._find(ondisk.NOTE, 'has an unknown name',
                               f'catalog/{name}')
                continue
            try:
                with files.File(self._directory, name,
                                f'catalog/{name}') as f:
                    self._copy_file(f, name)
            except files.Gone:
                raise InUse() from None
            except ondisk.Damage as e:
                raise ondisk.Damage(f'{name} {e.sentence}') from e

    def _copy_file(self, f: files.File, name: str) -> None:
        if name == 'CURRENT' and not CURRENT.match(f.read(0, 256)):
            raise ondisk.Damage('names no manifest')
        with open(os.path.join(self._scratch.name, name), 'wb') as out:
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

    def open(self) -> None:
        """Open the copy.

        :raises Unusable: if it is no database
        :raises plyvel.Error: if LevelDB cannot read it
        """
        if 'CURRENT' not in self._before:
            raise Unusable('is not a database of LevelDB')
        self._db = plyvel.DB(self._scratch.name, create_if_missing=False,
                             paranoid_checks=True, max_open_files=100)

    # Reading it

    @property
    def db(self) -> plyvel.DB:
        """The database, while it is open."""
        if self._db is None:
            raise RuntimeError('the copy of the catalog is not open')
        return self._db

    def close_database(self) -> None:
        """Close the database; the files stay."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None if there is none."""
        return self.db.get(key, verify_checksums=True)

    def items(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The keys with a prefix, and their values, in order."""
        with self.db.iterator(prefix=prefix, verify_checksums=True) as found:
            yield from found

    def transactions(self, prefix: bytes) -> Iterator[bytes]:
        """The transaction ids that follow a prefix of one byte."""
        with self.db.iterator(prefix=prefix, include_value=False,
                              verify_checksums=True) as keys:
            for key in keys:
                if len(key) == 17:
                    yield key[1:]

    # Files that LevelDB cannot read

    def blame(self, error: plyvel.Error) -> tuple[str, str, str]:
        """Return the severity, sentence and file of a LevelDB error.

        This may close the database.
        """
        words = leveldb.words(error).replace(self._scratch.name + '/', '')
        words = ondisk.printable(words)
        if leveldb.refusal(error) is not None:
            return (ondisk.NOTE, f'was not looked at to its end: {words}',
                    'catalog')
        name = self._damaged_file(leveldb.words(error))
        file = f'catalog/{name}' if name else 'catalog'
        if MISSING.search(words) or not (name or '').endswith(TABLE):
            return ondisk.NOTE, f'cannot be read: {words}: {REBUILT}', file
        return (ondisk.DAMAGE, f'cannot be read: {words}: glance-dedup '
                'repository rebuild-catalog makes the catalog anew', file)

    def _damaged_file(self, words: str) -> str | None:
        """Return the file that LevelDB named; it does not always name one."""
        named = NAMED.search(words)
        if named is not None:
            return named[1]
        opened = self._db is not None
        self.close_database()
        copy = pathlib.Path(self._scratch.name)
        with contextlib.suppress(plyvel.Error, OSError):
            log = CUT_LOG.search((copy / 'LOG').read_text(errors='replace'))
            if log is not None:
                return log[1]
            manifest = (copy / 'CURRENT').read_text('ascii').strip()
            # This reads all tables, and puts aside the damaged ones.
            plyvel.repair_db(str(copy), paranoid_checks=True)
            tables = [file.name for file in sorted(copy.glob('lost/*'))
                      if file.suffix in TABLE]
            if tables or not opened:
                return (*tables, manifest)[0]
        return None


def _snapshot(directory: int) -> dict[str, tuple[int, int]]:
    """The inode and size of each file.

    The database's versions change once a process opened it, which begins a
    manifest. Times are left out: on a shared file system, the time of a file
    written a moment ago may still change.
    """
    found = {}
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            found[name] = status.st_ino, status.st_size
    return found


def _needed(snapshot: dict[str, tuple[int, int]]
            ) -> dict[str, tuple[int, int]]:
    return {name: file for name, file in snapshot.items()
            if NEEDED_NAME.match(name)}
