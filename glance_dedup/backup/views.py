# SPDX-License-Identifier: Apache-2.0

"""A source at one moment, as the stages see it: a view.

A view has two parts. Its *content* gives the bytes, of a file or of a
running server's disk (``diskfiles.py``, ``exports.py``). Its *changes* know
the segments that are as in an earlier backup, the *base* of the view: by
digests (``digests.py``) or by a bitmap of QEMU (``checkpoints.py``).

For words and rules (B1 to B7), see ``doc/source/contributor/batch.rst``.
Nothing here is thread-safe: a view belongs to one thread of one process.
"""

import abc
import contextlib
import enum
from typing import Any
from typing import NamedTuple

from glance_dedup.base import closing
from glance_dedup.base import exceptions

#: Bytes of a segment; only the last one of a view may be shorter.
SEGMENT = 2 << 20


class SourceError(exceptions.RepositoryError):
    """A source cannot be backed up, or its view has ended (B2, B5).

    The message names the source and a remedy.
    """


class Base(NamedTuple):
    """The backup with which a view is compared."""

    backup_id: str
    upload_id: str
    """32 hexadecimal digits."""


class Found(enum.Enum):
    """Result of the scan of a segment."""

    CLEAN = enum.auto()
    """It is as in the base; the buffer holds nothing of use."""
    ZEROS = enum.auto()
    """It is zeros, and was not read; the buffer holds nothing of use."""
    DATA = enum.auto()
    """It is in the buffer, and may differ from the base."""


class Content(closing.Closing, abc.ABC):
    """The bytes of a view.

    :ivar size: bytes
    :ivar identity: two contents of one identity have the same bytes
    """

    size: int
    identity: str

    @abc.abstractmethod
    def readinto(self, buffer: Any, offset: int) -> None:
        """Fill a writable buffer from `offset`, within the content.

        :raises SourceError: the content has ended, or cannot be read
        """

    @abc.abstractmethod
    def is_hole(self, offset: int, length: int) -> bool:
        """Return whether a range is known to be zeros without reading it.

        :raises SourceError: as :meth:`readinto`
        """

    @abc.abstractmethod
    def check(self) -> None:
        """Make sure that every byte read so far was the identity's (B2).

        :raises SourceError: the content has changed, or has ended
        """


class Changes(closing.Closing, abc.ABC):
    """Segments of a view that are as in its base.

    :ivar base: None: nothing is known, and every segment is dirty
    """

    base: Base | None

    @abc.abstractmethod
    def is_clean(self, number: int) -> bool:
        """Return whether a segment is known to be clean before it is read."""

    @abc.abstractmethod
    def is_same(self, number: int, data: Any) -> bool:
        """Return whether the segment with these bytes is clean.

        A scan calls this once for each segment that is not known to be clean,
        in order.

        :param data: None: zeros
        """

    @abc.abstractmethod
    def end_scan(self) -> None:
        """Make all data durable that :meth:`commit` needs from the scan."""

    @abc.abstractmethod
    def commit(self, base: Base) -> None:
        """Make a backup that was committed the base of the next view (B3)."""


class View(closing.Closing):
    """A source at one moment.

    Stage 1a calls :meth:`scan` for each segment, in order, and then
    :meth:`end_scan`. Later stages read segments again. Before the backup
    is committed, :meth:`check` must return; afterwards comes :meth:`commit`.

    A process that dies leaves its view. Another one finds the view again by
    its identity, and need not scan it again.

    :param name: names the backups: ``b_<name>_<time>``
    :param held: closed with the view

    :ivar read_bytes: how many bytes were read
    """

    def __init__(self, name: str, content: Content, changes: Changes,
                 held: closing.Closing | None = None) -> None:
        self.name = name
        self._content = content
        self._changes = changes
        self._held = held
        self.read_bytes = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return self._content.size

    @property
    def identity(self) -> str:
        """Two views of one identity give the same bytes."""
        return self._content.identity

    @property
    def segments(self) -> int:
        """Return how many segments it has."""
        return -(-self.size // SEGMENT)

    @property
    def base(self) -> Base | None:
        """The backup that clean segments are in; None: none will be clean.

        A backup with this id and this upload must be open before the scan and
        until the commit (B4). If it cannot be opened, call :meth:`drop_base`.
        """
        return self._changes.base

    def drop_base(self) -> None:
        """Have the scan call no segment clean."""
        self._changes.base = None

    def length(self, number: int) -> int:
        """The bytes of a segment."""
        return min(SEGMENT, self.size - number * SEGMENT)

    def scan(self, number: int, buffer: memoryview) -> Found:
        """Look at the next segment, and read it once if that is needed.

        :param buffer: writable; of :data:`SEGMENT` bytes at least
        :raises SourceError: the view has ended, or cannot be read
        """
        if self._changes.is_clean(number):
            return Found.CLEAN
        length = self.length(number)
        if self._content.is_hole(number * SEGMENT, length):
            return (Found.CLEAN if self._changes.is_same(number, None)
                    else Found.ZEROS)
        data = buffer[:length]
        self._read(data, number * SEGMENT)
        return (Found.CLEAN if self._changes.is_same(number, data)
                else Found.DATA)

    def end_scan(self) -> None:
        """End the scan: after this a process may die, and need not repeat it.

        :raises SourceError: the view has ended, or changed while it was read
        """
        self.check()
        self._changes.end_scan()

    def readinto(self, buffer: Any, offset: int) -> None:
        """Fill a writable buffer with bytes of the view.

        :raises SourceError: the view has ended, or cannot be read
        """
        if offset < 0 or offset + len(buffer) > self.size:
            raise exceptions.InvalidParameter(
                f'{self.name} has {self.size} bytes, and {len(buffer)} from '
                f'{offset} were asked for')
        self._read(buffer, offset)

    def _read(self, buffer: Any, offset: int) -> None:
        self._content.readinto(buffer, offset)
        self.read_bytes += len(buffer)

    def check(self) -> None:
        """Make sure that every byte read so far was the view's (B2).

        :raises SourceError: the source has changed, or the view has ended
        """
        self._content.check()

    def commit(self, backup_id: str, upload_id: str) -> None:
        """Make this backup, which was committed, the base of the next (B3).

        If the process dies before this returns, the next view has its base as
        before, or this one.

        :raises SourceError: that failed. The backup is good, and the next one
            reads more
        """
        self._changes.commit(Base(backup_id, upload_id))

    def close(self) -> None:
        """End the view. Without :meth:`commit`, all is as before it."""
        with contextlib.ExitStack() as stack:
            if self._held is not None:
                stack.callback(self._held.close)
            stack.callback(self._content.close)
            self._changes.close()
