# SPDX-License-Identifier: Apache-2.0

"""The records of ``repository check``, in bounded memory.

It remembers images, extents and spare copies, of which a repository may have
any number.
"""

import bisect
from collections.abc import Generator
from collections.abc import Iterator
import contextlib

import plyvel

from glance_dedup.base import exceptions
from glance_dedup.base import leveldb
from glance_dedup.base import scratch

# Bytes of the entries in memory: all, before the first go to the disk; what
# Python adds to each; and those of one batch, from then on.
LIMIT = 8 << 20
ENTRY = 200
BATCH = 1 << 20


class RecordTable:
    """An ordered map of bytes to bytes.

    A small one is in memory.  A larger one is a database of LevelDB's in a
    scratch directory, with a few MiB of memory, whatever its size.  Nothing
    may be put while :meth:`items` runs.

    :raises StorageError: by any method, if the scratch directory cannot be
        used
    :raises NoSpaceError: the same, if it is full
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, bytes] = {}
        self._keys: list[bytes] | None = []     # sorted; None: not at present
        self._size = 0
        self._scratch: scratch.Directory | None = None
        self._db: plyvel.DB | None = None

    def put(self, key: bytes, value: bytes = b'') -> None:
        """Keep a value, instead of the one that the key had."""
        self._entries[key] = value
        self._keys = None
        self._size += len(key) + len(value) + ENTRY
        if self._size > (LIMIT if self._db is None else BATCH):
            self._to_disk()

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None if it has none."""
        value = self._entries.get(key)
        if value is None and self._db is not None:
            with self._guarded():
                value = self._db.get(key)
        return value

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

    def items(self, prefix: bytes, start: bytes = b''
              ) -> Generator[tuple[bytes, bytes], None, None]:
        """The entries whose keys have the prefix, in order.

        :param start: the first key that is wanted; it has the prefix, too
        """
        start = start or prefix
        if self._db is None:
            if self._keys is None:
                self._keys = sorted(self._entries)
            for i in range(bisect.bisect_left(self._keys, start),
                           len(self._keys)):
                if not self._keys[i].startswith(prefix):
                    break
                yield self._keys[i], self._entries[self._keys[i]]
            return
        self._to_disk()
        with self._guarded(), self._db.iterator(start=start) as found:
            for key, value in found:
                if not key.startswith(prefix):
                    break
                yield key, value

    def close(self) -> None:
        """Forget all entries; more may be put then."""
        self._entries, self._keys = {}, []
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _to_disk(self) -> None:
        with self._guarded():
            if self._db is None:
                self._scratch = scratch.Directory()
                self._db = plyvel.DB(
                    self._scratch.name, create_if_missing=True,
                    write_buffer_size=4 << 20, lru_cache_size=4 << 20,
                    max_open_files=40)
            with self._db.write_batch() as batch:
                for key, value in self._entries.items():
                    batch.put(key, value)
        self._entries, self._keys, self._size = {}, [], 0

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except plyvel.Error as e:
            raise (leveldb.refusal(e) or exceptions.StorageError)(
                self._sentence(leveldb.words(e))) from e
        except OSError as e:
            raise exceptions.StorageError(
                self._sentence(e.strerror or str(e))) from e

    def _sentence(self, words: str) -> str:
        return ('the check was given up: it keeps what it has to remember in '
                f'the directory for temporary files: {words}. Make room '
                'there, or name another directory by the variable TMPDIR')
