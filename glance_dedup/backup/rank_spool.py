# SPDX-License-Identifier: Apache-2.0

"""A rank's files on its host's disk during a round.

A spool is a directory of one round and one rank. Its files only grow, and are
read from their beginning. They are not synced: after a crash of the machine
the round starts again.

``blocks``
    All scanned blocks of all views, in order: 36 bytes for each block.
``found``
    64 bits for each block, behind stage 2a: its address; 0: this rank has to
    store it; or :data:`WAIT`.
``stored``
    The same behind stage 2b, with the addresses of blocks that were stored;
    :data:`OWN` is added to those that this rank stored.
``references``
    A record for each block that this rank stored.
``KIND-NUMBER``
    Records of one own partition (``requests``, ``waiting``, ``known``), or
    answers to 2 ** 18 own blocks (``same``, ``answers``, ``again``).

A spool that cannot be written, such as on a full disk, is *lost*: its files
are removed, and from then on it takes everything and keeps nothing. So the
rank gives up its own views, and other ranks lose no more than hints.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import json
import logging
import os
import shutil
from typing import Any

from glance_dedup import _engine
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import scratch

#: Bytes of a record, and of a scanned block.
RECORD = 13
SCANNED = 36
#: Blocks whose answers are put in their places together.
BUCKET = 1 << 18
#: Records that are sorted and joined together: some 6 MB with all values
#: computed from them.
PIECE = 100_000

#: Bytes of records that wait in memory to be written.
BUFFER = 1 << 20

#: In place of an address: another rank was ordered to store the block.
WAIT = (1 << 40) - 1
#: Added to an address: the block was stored for the view that has it.
OWN = 1 << 40

_LOG = logging.getLogger(__name__)
_NUMBERS = 1 << 28
_RANKS = 1 << 12


def answer(requester: int, address: int) -> bytes:
    """An answer, as the engine makes them."""
    return (requester << 24).to_bytes(8, 'big') + address.to_bytes(5, 'little')


def remove_dead(directory: str, stays: Callable[[os.DirEntry[str]], bool]
                ) -> list[str]:
    """Remove the spools that processes which died left on this host (B6).

    :param directory: the place of a repository's spools
    :param stays: whether a spool stays in any case
    :returns: the names of the removed spools
    """
    removed = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            with contextlib.suppress(OSError):
                fd = (None if stays(entry)
                      else scratch.lock_directory(entry.path))
                if fd is not None:
                    with closing.descriptor(fd):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    removed.append(entry.path)
    return removed


class Spool(closing.Closing):
    """A rank's files of a round, locked until :meth:`close`.

    :param path: of the directory, made if it is missing
    :param buffer: bytes of appended records that may wait in memory
    :raises BusyError: another process has it

    :ivar lost: why it keeps nothing; '': it keeps all records
    """

    def __init__(self, path: str, buffer: int = BUFFER) -> None:
        self.path = path
        self._buffer = buffer
        # By file. No file stays open, since there is one for each partition.
        self._waiting: dict[str, bytearray] = {}
        self._size = 0
        self._fd: int | None = None
        self.lost = ''
        with self._writing():
            os.makedirs(path, mode=0o700, exist_ok=True)
            self._fd = scratch.lock_directory(path)
        if self._fd is None and not self.lost:
            raise exceptions.BusyError(
                f'another process works in the spool {path}: wait for its end')

    def close(self) -> None:
        """Write the records that wait; the files stay."""
        self._write(list(self._waiting))
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _write(self, names: list[str]) -> None:
        """Append the records that wait to their files."""
        with self._writing():
            for name in names:
                records = self._waiting.pop(name)
                self._size -= len(records)
                with open(os.path.join(self.path, name), 'ab') as file:
                    file.write(records)

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self._size = 0

    def clear(self) -> None:
        """Remove all files."""
        self._drop_waiting()
        with self._writing():
            for name in os.listdir(self.path):
                os.unlink(os.path.join(self.path, name))

    def remove(self) -> None:
        """Remove everything, and close."""
        self.clear()
        with contextlib.suppress(OSError):      # the next run tries again
            os.rmdir(self.path)
        self.close()

    def _errors(self, name: str) -> contextlib.AbstractContextManager[None]:
        return files.os_errors(f'the spool {os.path.join(self.path, name)}')

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """If this fails, the spool is lost."""
        try:
            yield
        except OSError as e:
            if not self.lost:
                self._lose(e)

    def _lose(self, error: OSError) -> None:
        self.lost = (
            f'on {os.uname().nodename} the spool {self.path} cannot be '
            f'written: {error.strerror or error}. Make room there, or give '
            'another directory (--spool), and back up again')
        _LOG.warning(
            'the spool %s cannot be written: %s. So the blocks that this '
            'host compares for all are stored as new ones, until the next '
            'merge', self.path, error.strerror or error)
        self._drop_waiting()
        if self._fd is not None:
            with contextlib.suppress(OSError):
                for name in os.listdir(self.path):
                    os.unlink(os.path.join(self.path, name))

    # -- records ------------------------------------------------------------

    def append(self, name: str, data: bytes) -> None:
        """Append bytes to a file."""
        if self.lost:
            return
        self._waiting.setdefault(name, bytearray()).extend(data)
        self._size += len(data)
        if self._size > self._buffer:
            self._write(list(self._waiting))

    def end(self, kind: str) -> None:
        """Write the records that wait of all files of a kind."""
        self._write([name for name in self._waiting if name == kind
                     or name.startswith(kind + '-')])

    def names(self) -> list[str]:
        """Return the names of all files, in order."""
        with contextlib.suppress(OSError):      # the spool is lost
            return sorted(os.listdir(self.path))
        return []

    def move(self, name: str, other: 'Spool', new_name: str) -> None:
        """Move a file to another spool on the same disk, if it exists."""
        self.end(name)
        if not (self.lost or other.lost):
            with other._writing(), contextlib.suppress(FileNotFoundError):
                os.rename(os.path.join(self.path, name),
                          os.path.join(other.path, new_name))

    def pieces(self, name: str, size: int, count: int = PIECE
               ) -> Iterator[bytes]:
        """A file's items, so many at a time. A missing file has none.

        :param size: bytes of an item
        :raises DamagedError: the file ends within an item
        """
        with self._errors(name), contextlib.suppress(FileNotFoundError):
            with open(os.path.join(self.path, name), 'rb') as file:
                while piece := file.read(size * count):
                    if len(piece) % size != 0:
                        raise exceptions.DamagedError(
                            f'the spool {os.path.join(self.path, name)} ends '
                            'within a record')
                    yield piece

    def drop_all(self, kind: str) -> None:
        """Remove the files of a kind."""
        self.end(kind)
        with self._writing():
            for name in os.listdir(self.path):
                if name == kind or name.startswith(kind + '-'):
                    os.unlink(os.path.join(self.path, name))

    # -- answers ------------------------------------------------------------

    def place_answers(self, kinds: Sequence[str], name: str,
                      blocks: int) -> None:
        """Put answers into their places, one bucket after the other.

        :param kinds: of the files with the answers
        :param name: the file with the places; it is made if it is missing
        :param blocks: how many were scanned
        :raises ValueError: an answer is to no block
        """
        for kind in kinds:
            self.end(kind)
        with self._writing():
            if self.lost:
                return
            path = os.path.join(self.path, name)
            with open(path, 'ab'):
                pass
            self._fill(path, kinds, blocks)

    def _fill(self, path: str, kinds: Sequence[str], blocks: int) -> None:
        with open(path, 'r+b') as file:
            for bucket in range(-(-blocks // BUCKET)):
                first = bucket * BUCKET
                length = min(BUCKET, blocks - first) * 8
                file.seek(first * 8)
                places = bytearray(file.read(length).ljust(length, b'\0'))
                for kind in kinds:
                    for answers in self.pieces(f'{kind}-{bucket}', RECORD):
                        _engine.fill_answers(answers, first, places)
                file.seek(first * 8)
                file.write(places)

    def sort_answers(self, kind: str, rank: int, answers: bytes) -> None:
        """Append answers to this rank's blocks to the files of their buckets.

        :raises ValueError: an answer is to another rank
        """
        buckets = _NUMBERS // BUCKET
        for bucket, part in enumerate(_engine.split_records(
                answers, _RANKS * buckets, rank * buckets, buckets)):
            if part:
                self.append(f'{kind}-{bucket}', part)

    # -- stages -------------------------------------------------------------

    def note(self, stage: str, facts: dict[str, Any]) -> None:
        """Note that a stage is complete on this rank."""
        path = os.path.join(self.path, f'done-{stage}')
        with self._writing():
            if self.lost:
                return
            with open(path + '.new', 'w', encoding='utf-8') as file:
                json.dump(facts, file)
            os.rename(path + '.new', path)

    def noted(self, stage: str) -> dict[str, Any] | None:
        """Return the record of a stage; None: it is not complete."""
        with contextlib.suppress(OSError, ValueError):
            with open(os.path.join(self.path, f'done-{stage}'),
                      encoding='utf-8') as file:
                found = json.load(file)
                return found if isinstance(found, dict) else None
        return None
