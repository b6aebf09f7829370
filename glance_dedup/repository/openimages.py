# SPDX-License-Identifier: Apache-2.0

"""Images that are being stored, and images that are being read.

:meth:`Repository.begin` and :meth:`Repository.open_image
<glance_dedup.repository.image_repository.Repository.open_image>` make these
objects. Any number of threads may use one at once.
"""

import bisect
from collections.abc import Iterator
import contextlib
import dataclasses
import logging
from typing import Any
from typing import Protocol
from typing import Self

from glance_dedup import _engine
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import formats
from glance_dedup.repository import repo_parameters

LOG = logging.getLogger(__name__)

#: Bytes that are read or written at once by default.
PIECE = 4 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class ImageStat:
    """The facts in a recipe about its image. Sizes are in bytes."""

    image_id: str
    upload_id: str
    project: str
    scope: str
    """The scope whose blocks the image shares: 32 hexadecimal digits, all
    zeros for the global one."""
    size: int
    zero_bytes: int
    """Of an image with a disk: that its size is more than its plain bytes that
    are not zeros."""
    new_bytes: int
    """Plain bytes of the blocks that this image was the first to store."""
    stored_bytes: int
    """Bytes written for these blocks: compressed, with segment headers."""
    extents: int
    fragments: int
    """Runs of blocks that do not continue the run before them."""
    created: int
    """Seconds since 1970."""
    hash_name: str = ''
    """The name of the hash that the storing program computed; '': none."""
    hash_value: str = ''
    """Hexadecimal digits."""
    derived_bytes: int | None = None
    """Bytes of the file that an encoder makes; None: it has no disk."""


@dataclasses.dataclass(frozen=True)
class DiskStat:
    """The facts in a recipe about an image's disk. Sizes are in bytes."""

    size: int
    plain_bytes: int
    """The disk, zeros behind it, and the rest of the file."""
    derived: int
    """Extents of the table."""
    derived_bytes: int
    """Bytes of the file that are made by an encoder."""
    format: int
    is_proven: bool
    """Only then can the disk be read (F5)."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """A run of zeros, or of blocks with consecutive addresses."""

    offset: int
    length: int
    kind: str
    """'zeros' or 'blocks'"""
    group: int
    slot: int
    blocks: int


def image_stat(header: dict[str, Any]) -> ImageStat:
    """The facts in a header, as the engine hands it over."""
    return ImageStat(**{**header, 'scope': header['scope'].hex(),
                        'upload_id': header['upload_id'].hex(),
                        'hash_value': header['hash_value'].hex()})


class _Opened(Protocol):
    def handle(self) -> _engine.Repository:
        """Return the engine's handle of the repository."""


class Transaction:
    """One image's store operation.

    Leaving its ``with`` block aborts it, unless it was committed.
    """

    def __init__(self, image_id: str, engine: _engine.Transaction,
                 repository: _Opened, dedup: bool = True) -> None:
        self.image_id = image_id
        # Keeps the repository alive: a fork closes only the descriptors of
        # repositories that still exist.
        self._repository = repository
        self._engine = engine
        if not dedup:
            engine.set_dedup('off')
        self._infer = dedup  # until the first bytes are there
        self._handle = None if dedup else repository.handle()
        self._unmarked = self._count_unmarked()
        self.upload_id: str = engine.upload_id.hex()
        """32 hexadecimal digits; no other upload ever has them."""

    def write(self, data: Any) -> int:
        """Append bytes to the image; returns their number.

        The caller may reuse the buffer when this returns, though the bytes may
        not be on the disk yet. After an error only :meth:`abort` is possible.

        If the first bytes are of a format that shares few blocks, only
        samples of it are looked up (:mod:`glance_dedup.base.formats`).

        :raises NoSpaceError, StorageError: as their names say
        """
        if self._infer and (view := memoryview(data)).nbytes:
            self._infer = False
            if formats.shares_nothing(view.cast('B')):
                self._engine.set_dedup('probe')
        return self._engine.write(data)

    def write_zeros(self, length: int) -> None:
        """Append zeros as :meth:`write` would, but any number at once.

        :raises InvalidParameter: the image would be longer than any file
        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        repo_parameters.require_range('length', length, 0, (1 << 63) - 1)
        self._infer = False
        self._engine.write_zeros(length)

    def find(self, fingerprints: bytes, lengths: bytes) -> bytes:
        """Look blocks up by their fingerprints, for :meth:`add`.

        This finds blocks that this transaction wrote, too. Blocks that it
        finds stay until the transaction ends. If the repository compares
        blocks by value, this finds none, since it has no bytes to compare.

        :param fingerprints: 32 bytes for each block
        :param lengths: each block's plain bytes, a little-endian number of 32
            bits
        :returns: an address of 64 bits for each block; 0: the caller has to
            write the block
        :raises NoSpaceError, StorageError: bytes written before could not be
            stored; only :meth:`abort` is possible
        """
        return self._engine.find(fingerprints, lengths)

    def find_at(self, fingerprints: bytes, lengths: bytes,
                addresses: bytes) -> bytes:
        """Look for blocks at addresses from the caller, for :meth:`add`.

        :param addresses: as :meth:`find` returns them, but from anywhere; 0:
            none is known
        :returns: each address at which the block is indeed, and 0 in place of
            the others, and of those of blocks that are to stay copies

        For the rest as :meth:`find`.
        """
        return self._engine.find_at(fingerprints, lengths, addresses)

    def add(self, fingerprints: bytes, lengths: bytes,
            addresses: bytes) -> None:
        """Append blocks that :meth:`find` or :meth:`find_at` found.

        :param fingerprints: as for :meth:`find`
        :param lengths: as for :meth:`find`
        :param addresses: as :meth:`find` returned them
        :raises InvalidParameter: if the last ``write`` ended within a block,
            or this transaction's :meth:`find` would not return one of the
            addresses for its block. Nothing is appended then.
        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        self._engine.add(fingerprints, lengths, addresses)

    def write_blocks(self, data: Any, lengths: bytes) -> bytes:
        """Append blocks that were cut elsewhere; they are not cut again.

        :param data: the blocks' bytes, one block behind the other
        :param lengths: as for :meth:`find`
        :returns: the blocks' addresses, as from :meth:`find`; 0 for a block of
            zeros
        :raises InvalidParameter: if the last ``write`` ended within a block,
            or a block is longer than this repository's blocks may be
        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        return self._engine.write_blocks(data, lengths)

    def add_runs(self, image: 'Image', start: int, end: int) -> int:
        """Append the plain bytes [start, end) of a stored image, by address.

        Without a disk, these are the image's bytes.

        The blocks are shared, not copied. Only what cannot be shared is read
        and stored again: the parts of blocks at both ends, blocks of another
        scope, and blocks of a group in which a collector is working.

        :param image: one that the same :class:`Repository` opened. It may be
            closed, and deleted, before the commit.
        :returns: the bytes that were read and stored again
        :raises InvalidParameter: if the last ``write`` ended within a block,
            or the range is not within these. Nothing is appended then.
        :raises DamagedError: the source's recipe or entries are damaged; only
            :meth:`abort` is possible
        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        for name, offset in (('start', start), ('end', end)):
            repo_parameters.require_range(name, offset, 0, (1 << 63) - 1)
        with image.reading():
            return self._engine.add_runs(image._engine, start, end)

    def copy_table(self, image: 'Image') -> None:
        """Append the table of a stored image, behind all its plain bytes.

        It has no effect if the image has no disk.

        :raises InvalidParameter: not all plain bytes of that image were
            appended, or others; only :meth:`abort` is possible
        :raises DamagedError: the source's recipe is damaged; likewise
        """
        with image.reading():
            self._engine.copy_table(image._engine)

    def add_zeros(self, length: int) -> None:
        """Append `length` bytes of zeros, as blocks of their own.

        :raises InvalidParameter: if the last ``write`` ended within a block,
            or the image would become longer than any file
        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        repo_parameters.require_range('length', length, 0, (1 << 63) - 1)
        self._engine.add_zeros(length)

    def keep(self) -> tuple[int, int]:
        """Make the blocks stored so far durable, and known to others.

        Later transactions find these blocks, even if this one is aborted,
        until a collection frees them.

        :returns: the plain bytes that were stored so far, and the bytes that
            they take on the disk
        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        return self._engine.keep()

    def measure(self) -> tuple[int, int]:
        """Write out the appended data, without publishing it.

        :returns: the bytes that this takes on the disk, and the plain bytes
            that were found there
        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        return self._engine.measure()

    def kept_bytes(self) -> int:
        """Return the bytes on the disk that an abort would leave there."""
        return self._engine.kept_bytes()

    def credit(self, new_bytes: int, stored_bytes: int) -> None:
        """Count bytes as the image's that an earlier transaction stored.

        :param new_bytes: plain bytes
        :param stored_bytes: their size on the disk
        """
        self._engine.credit(new_bytes, stored_bytes)

    def set_hash(self, name: str, value: bytes) -> None:
        """Set the whole image's hash, which the recipe records.

        :param name: the hash's name in hashlib
        :param value: the digest
        :raises InvalidParameter: the hash is too long for a recipe
        """
        self._engine.set_hash(name, value)

    def commit(self) -> ImageStat:
        """Make the image exist, durably.

        :raises ImageExists: if another transaction committed the id first
        :raises StorageError: if the disk failed. If it failed after the image
            to exist, the image stays: :meth:`Repository.stat` shows it.
        """
        header = self._engine.commit()
        self._report_unmarked()
        return image_stat(header)

    def commit_open(self) -> 'Image':
        """Commit, and return the image, open for reading.

        It was opened while the transaction still held its blocks. Raises as
        :meth:`commit`.
        """
        image = Image(self._engine.commit_open(), self._repository)
        self._report_unmarked()
        return image

    def _count_unmarked(self) -> int:
        return self._handle.statistics()['unmarked'] if self._handle else 0

    def _report_unmarked(self) -> None:
        """Log that blocks have no mark. Raise nothing: the image exists."""
        with contextlib.suppress(exceptions.ClosedError):
            if self._count_unmarked() != self._unmarked:
                LOG.warning(
                    'Image %s: some blocks do not stay copies, but can be '
                    'shared by other images, since an older program has the '
                    'repository open: stop the older programs on all hosts, '
                    'and store the image again', self.image_id)

    def abort(self) -> None:
        """Give up the image; its recipe and unsynced blocks are dropped.

        Idempotent; it has no effect after a commit.
        """
        self._engine.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.abort()


class Image(closing.Closing):
    """An image open for reading. It keeps its blocks until it is closed.

    :ivar size: bytes of the whole image, zeros included
    :ivar disk: facts about its disk; None: it is kept as it was uploaded
    :ivar plain_size: bytes that its extents have
    """

    def __init__(self, engine: _engine.Image,
                 repository: object) -> None:
        self._engine = engine
        self._repository = repository  # as in Transaction
        self.stat = image_stat(engine.header())
        self.size = self.stat.size
        disk = engine.disk()
        self.disk = None if disk is None else DiskStat(**disk)
        self.plain_size = self.disk.plain_bytes if self.disk else self.size

    def readinto(self, buffer: Any, offset: int = 0) -> int:
        """Fill a writable buffer from `offset`; returns the bytes read.

        They are fewer than the buffer's only at the image's end.

        :raises DamagedError: names the file and the offset in it. The buffer's
            content is then undefined
        :raises UnavailableError: names the image and the object that the
            object store does not give
        """
        if offset < 0:
            raise exceptions.InvalidParameter(f'offset {offset} is negative')
        with self.reading():
            return self._engine.readinto(buffer, min(offset, self.size))

    def read(self, length: int = -1, offset: int = 0) -> bytes:
        """At most `length` bytes from `offset`; -1: all bytes to the end.

        For the rest as :meth:`readinto`.
        """
        if offset < 0:
            raise exceptions.InvalidParameter(f'offset {offset} is negative')
        size = self.size
        with self.reading():
            return self._engine.read(size if length < 0 else min(length, size),
                                     min(offset, size))

    def read_disk(self, length: int, offset: int = 0) -> bytes:
        """At most `length` bytes of the image's disk from `offset`.

        They are fewer only at the disk's end. For the rest as
        :meth:`readinto`.

        :raises InvalidParameter: the image has no disk that is proven
        """
        if self.disk is None or min(length, offset) < 0:
            raise exceptions.InvalidParameter(
                f'image {self.stat.image_id} has no disk, or {length} or '
                f'{offset} is negative')
        offset = min(offset, self.disk.size)
        buffer = bytearray(min(length, self.disk.size - offset))
        with self.reading():
            done = self._engine.readinto_disk(buffer, offset)
        return bytes(buffer[:done])

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Report damage that is found within, and name the image."""
        try:
            yield
        except exceptions.UnavailableError as e:
            raise self._unavailable(e) from e
        except exceptions.DamagedError as e:
            self._report_damage(e)
            raise

    def _report_damage(self, error: exceptions.DamagedError) -> None:
        report = getattr(self._repository, 'on_damage', None)
        if report is not None:
            report(self.stat.image_id, error)

    def _unavailable(self, error: exceptions.UnavailableError
                     ) -> exceptions.UnavailableError:
        """The error with the image's name in it."""
        return exceptions.UnavailableError(
            f'image {self.stat.image_id} cannot be read now: {error}')

    def is_zeros(self, length: int, offset: int) -> bool:
        """Return whether a range, clipped to the image, is known to be zeros.

        None is of an image with a disk.

        No block is read for that: blocks of zeros are not stored, except parts
        of them at the ends of other blocks.
        """
        for name, value in (('length', length), ('offset', offset)):
            repo_parameters.require_range(name, value, 0, (1 << 63) - 1)
        offset = min(offset, self.size)
        return self._engine.is_zeros(min(length, self.size - offset), offset)

    def pieces(self, offset: int = 0, length: int | None = None,
               piece: int = PIECE) -> Iterator[bytes]:
        """The bytes of a range (to the end if `length` is None), in pieces."""
        repo_parameters.require_range('piece', piece, 1, 1 << 40)
        end = self.size
        if length is not None:
            end = min(end, offset + length)
        while offset < end:
            data = self.read(min(piece, end - offset), offset)
            offset += len(data)
            yield data

    def extents(self, offset: int = 0) -> Iterator[Extent]:
        """The image's extents, in order, from the one at `offset` on.

        :raises InvalidParameter: the image is kept as its disk, so that its
            extents are not those of the file
        """
        self.require_no_disk()
        for _, extents in self.pages(offset):
            for extent in extents:
                if extent.offset + extent.length > offset:
                    yield extent

    def pages(self, offset: int = 0) -> Iterator[tuple[int, list[Extent]]]:
        """Each page's number and extents, from the page of `offset` on.

        They are those of the plain bytes.
        """
        page = self._page_of(offset)
        while extents := self._engine.extents(page):
            yield page, [Extent(*fields) for fields in extents]
            page += 1

    def _page_of(self, offset: int) -> int:
        """The page of extents that covers an offset."""
        if not offset:
            return 0
        # All pages but the last are as full as the first.
        pages = range(0, self.stat.extents, len(self._engine.extents(0)) or 1)
        return max(0, bisect.bisect_right(
            range(len(pages)), offset,
            key=lambda page: self._engine.extents(page)[0][0]) - 1)

    def describe(self, page: int) -> bytes:
        """One page of extents, with the fingerprints of their blocks.

        :param page: its number, from 0
        :returns: extents in the wire format, without its header; ``b''``
            behind the last page
        :raises InvalidParameter: the image is kept as its disk
        :raises DamagedError: the entries have changed since the image's commit
        """
        repo_parameters.require_range('page', page, 0, (1 << 63) - 1)
        self.require_no_disk()
        return self._engine.describe(page)

    def frames(self, ranges: list[tuple[int, int]]
               ) -> tuple[list[bytes], int]:
        """The blocks of some ranges, for another repository.

        The frames hold only these blocks. A segment is sent as it is stored
        only if this call asks for all its bytes.

        :param ranges: pairs of offset and length, sorted, without overlap;
            none begins or ends within a block
        :returns: frames in the wire format, in no order, without the final
            one, with at most 2 MiB of blocks; zeros are left out. And the
            offset from which the next call has to go on: if this call took
            everything, the last range's end
        :raises InvalidParameter: for other ranges, and as :meth:`describe`
        :raises DamagedError: a block does not verify, and has no spare copy
        :raises UnavailableError: as :meth:`readinto`
        """
        for offset, length in ranges:
            repo_parameters.require_range('offset', offset, 0, (1 << 63) - 1)
            repo_parameters.require_range('length', length, 0, (1 << 63) - 1)
        self.require_no_disk()
        try:
            return self._engine.frames(list(ranges))
        except exceptions.DamagedError as e:
            self._report_damage(e)
            raise
        except exceptions.UnavailableError as e:
            raise self._unavailable(e) from e

    def require_no_disk(self) -> None:
        """Refuse a use that takes plain bytes for those of the file.

        :raises InvalidParameter: the image is kept as its disk
        """
        if self.disk is not None:
            raise exceptions.InvalidParameter(
                f'image {self.stat.image_id} is kept as its disk: its blocks '
                'are not those of its file, and cannot be sent or compared '
                'yet')

    def close(self) -> None:
        """Close the image. Idempotent."""
        self._engine.close()


class BlockReader:
    """Reads blocks by their addresses, while a transaction holds them.

    It serves one thread at a time; others wait.
    """

    def __init__(self, engine: _engine.BlockReader,
                 repository: object) -> None:
        self._engine = engine
        self._repository = repository  # as in Transaction

    def read(self, fingerprints: bytes, lengths: bytes,
             addresses: bytes) -> bytes:
        """The blocks' bytes, one block behind the other.

        Blocks that a transaction found can be read until it ends. Blocks that
        it wrote can be read from its next :meth:`~Transaction.keep` on. The
        arguments are as for :meth:`Transaction.add`.

        :raises DamagedError: names group and slot: the slot has no good block,
            or another one
        """
        return self._engine.read(fingerprints, lengths, addresses)

    def close(self) -> None:
        """Close the reader. Idempotent."""
        self._engine.close()
