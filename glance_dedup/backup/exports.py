# SPDX-License-Identifier: Apache-2.0

"""A disk that QEMU exports over NBD: the content of a view that it keeps.

QEMU serves a running server's disk as it was when its backup job began, and
keeps what the server overwrites in a scratch file. The name of the export is
drawn again for each job, so a connection to it either reaches this job or
fails. The name is the identity of the view.

The extents are requested in windows of 256 MiB, so memory does not grow with
the disk.
"""

from collections.abc import Callable
import contextlib
from typing import Any

from glance_dedup.backup import views
from glance_dedup.client import client_errors
from glance_dedup.client import nbd_reader

#: Name under which a job exports the bitmap of writes since the checkpoint.
BITMAP = 'dirty'
_WINDOW = 128       # segments


class _Window:
    """Answers of the server about the segments from `first` on."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.data: set[int] = set()
        self.dirty: set[int] = set()

    def note(self, found: set[int], offset: int, length: int) -> None:
        """Note a range; leave out the part beyond the window.

        A single extent may have 4 GiB.
        """
        begin = offset // views.SEGMENT
        end = -(-(offset + length) // views.SEGMENT)
        found.update(range(begin, min(end, self.first + _WINDOW)))


class ExportContent(views.Content):
    """A disk that is read over NBD.

    :param path: of the server's socket
    :param export: its name, and the identity of the content
    :param what: names the disk in messages
    :param has_bitmap: whether :data:`BITMAP` is exported, too
    :param ended: why the view was ended; '': it was not. May be called while
        another thread ends it
    :param release: called once, when the content is closed
    :raises SourceError: the export does not answer
    """

    def __init__(self, path: str, export: str, what: str, has_bitmap: bool,
                 ended: Callable[[], str] = lambda: '',
                 release: Callable[[], None] = lambda: None) -> None:
        self.identity = export
        self._what = what
        self._ended = ended
        self._release: Callable[[], None] | None = None
        self._window = _Window(-_WINDOW)
        contexts = [nbd_reader.ALLOCATION]
        if has_bitmap:
            contexts.append(nbd_reader.BITMAP_PREFIX + BITMAP)
        with self._reading():
            self._reader = nbd_reader.NbdReader(path, export, contexts)
        self._release = release
        self.size = self._reader.size

    @contextlib.contextmanager
    def _reading(self):
        try:
            yield
        except client_errors.ClientError as e:
            raise views.SourceError(
                f'the view of {self._what} has ended: '
                f'{self._ended() or e}. Was the server stopped, or moved? '
                'Back it up again') from e

    def readinto(self, buffer: Any, offset: int) -> None:
        """Fill a buffer. Raises as that of the base class."""
        with self._reading():
            self._reader.readinto(buffer, offset)

    def is_hole(self, offset: int, length: int) -> bool:
        """Return whether a segment is known to be zeros."""
        return not self._is_noted(offset // views.SEGMENT, 'data')

    def is_dirty(self, number: int) -> bool:
        """Return whether a segment was written to since the checkpoint."""
        return self._is_noted(number, 'dirty')

    def _is_noted(self, number: int, kind: str) -> bool:
        if not 0 <= number - self._window.first < _WINDOW:
            with self._reading():
                self._window = self._look(number - number % _WINDOW)
        return number in getattr(self._window, kind)

    def _look(self, first: int) -> _Window:
        window = _Window(first)
        offset = first * views.SEGMENT
        end = min(self.size, offset + _WINDOW * views.SEGMENT)
        while offset < end:
            ends = []
            found = self._reader.extents(offset, end - offset)
            for context, extents in found.items():
                at = offset
                for length, flags in extents:
                    if context != nbd_reader.ALLOCATION:
                        if flags & nbd_reader.DIRTY:
                            window.note(window.dirty, at, length)
                    elif not flags & nbd_reader.ZERO:
                        window.note(window.data, at, length)
                    at += length
                ends.append(at)
            offset = min(ends)
        return window

    def check(self) -> None:
        """Send the export a request. Raises as that of the base class.

        An export never changes: it is there or not.
        """
        if why := self._ended():
            raise views.SourceError(
                f'the view of {self._what} has ended: {why}. Back it up again')
        with self._reading():
            self._reader.extents(0, min(self.size, 512))

    def close(self) -> None:
        """Hang up. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            self._reader.close()
            release()
