# SPDX-License-Identifier: Apache-2.0

"""The conversion of one image, step by step (image-disks.rst, "Converting").

A :class:`Work` stores an image's other form, and compares what a reader would
get from it with the image. Nothing but the exchange, which the task does then,
changes what a reader sees. So a conversion may be given up at any time.
"""

from collections.abc import Generator
from collections.abc import Iterator
import contextlib
import hashlib
import os
import struct
import time
from typing import Any
from typing import NamedTuple

from glance_dedup import _engine
from glance_dedup.base import closing
from glance_dedup.base import confined
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import sorting
from glance_dedup.repository import conversion
from glance_dedup.repository import disk_survey
from glance_dedup.repository import features
from glance_dedup.repository import image_repository

#: The longest that a conversion may work, seconds, without its waits.
MAX_SECONDS = 7200.0
#: The longest that a conversion that makes way may keep its groups' locks,
#: seconds. Then the next task closes it.
MAX_WAIT = 7200.0
#: The longest that any conversion may keep them, seconds, with all its waits.
MAX_LOCKED = 86400.0

_PIECE = disk_survey.PIECE
# Place and length in the file, place and length of the plain bytes, encoder,
# checksum. Big-endian, so that they are sorted by the place.
_RECORD = struct.Struct('>QQQIIQ')
_BATCH = 4096       # extents of the table
_STEP = 1024        # pieces of the disk


class Step(NamedTuple):
    """The state of a conversion after a step."""

    done: int
    """Bytes of the file, of `total`, which counts them once for each pass."""
    total: int
    what: str
    cost: int
    """Bytes read from or written to the repository since the last step."""


class OlderProgramError(exceptions.BusyError):
    """A program that does not know disks has the repository open (F10)."""


class Work(closing.Closing):
    """A conversion under way. It holds the locks of its groups.

    :ivar source: the image that is read
    :ivar steps: ends when the new recipe is durable and compared
    :ivar upload_id: of the image
    :ivar header: of the new recipe, at the end
    :raises ImageNotFound, DamagedError: as :meth:`Repository.open_image`
    """

    def __init__(self, repository: image_repository.Repository,
                 image_id: str, to_disk: bool, is_wanted: bool) -> None:
        self._repository = repository
        self.image_id = image_id
        self.to_disk = to_disk
        self._is_wanted = is_wanted
        self._worked = 0.0      # seconds
        self._since = time.monotonic()  # it goes on, or waits
        self._locked: float | None = None   # since when it has locks
        self._path = os.path.join(repository.path, 'images', image_id)
        with contextlib.ExitStack() as stack:
            self.source = stack.enter_context(repository.open_image(image_id))
            self._inode = self._find_inode()
            self._stack = stack.pop_all()
        self._size = self.source.size
        self.upload_id = self.source.stat.upload_id
        self.header: dict[str, Any] = {}
        self._new: conversion.Conversion | None = None
        self._moved = 0     # bytes, since the last step
        self.steps = self._watched(
            self._convert_to_disk() if to_disk else self._convert_to_file())

    def close(self) -> None:
        """Give the conversion up, unless it was exchanged. Idempotent."""
        try:
            self.steps.close()
        finally:
            self._stack.close()

    @property
    def is_overdue(self) -> bool:
        """Return whether it waits so long that it has to give up its locks."""
        return time.monotonic() - self._since > MAX_WAIT

    def exchange(self) -> bool:
        """Give the image the new recipe, which is counted (N10.4 to N10.7)."""
        assert self._new is not None and self.header
        return self._new.exchange()

    def _find_inode(self) -> int:
        with files.os_errors(f'image {self.image_id} cannot be found'):
            return os.stat(self._path, follow_symlinks=False).st_ino

    def _watched(self, steps: Iterator[Step]
                 ) -> Generator[Step, None, None]:
        """End as soon as the exchange would be in vain, or too late (F8).

        The source, which is open, would keep a deleted image's space (I12).
        """
        self._since = time.monotonic()
        for step in steps:
            if self._find_inode() != self._inode:
                raise exceptions.ImageNotFound(
                    f'image {self.image_id} has another recipe now')
            self._require_time()
            self._worked += time.monotonic() - self._since
            self._since = time.monotonic()
            yield step
            self._since = time.monotonic()

    def _require_time(self) -> None:
        if self._worked + time.monotonic() - self._since > MAX_SECONDS:
            raise confined.RefusedError(
                f'its conversion takes more than {MAX_SECONDS:.0f} s')
        if (self._locked is not None
                and time.monotonic() - self._locked > MAX_LOCKED):
            raise confined.RefusedError(
                f'its conversion was not done after {MAX_LOCKED:.0f} s: '
                'convert_rate_mib is low for it, or other tasks took the time')

    def _step(self, done: int, total: int, what: str) -> Step:
        cost, self._moved = self._moved, 0
        # Several parts of a disk may be made of the same bytes of the file.
        return Step(min(done, total), total, what, cost)

    def _read(self, length: int, offset: int) -> bytes:
        self._require_time()    # the parser may read much in one step
        self._moved += length
        return self.source.read(length, offset)

    def _pieces(self, place: int, length: int
                ) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes of a range of the file, and their places."""
        for at in range(place, place + length, _PIECE):
            yield at, self._read(min(_PIECE, place + length - at), at)

    def _write(self, new: conversion.Conversion, content: bytes) -> None:
        self._moved += len(content)
        new.write(content)

    def _begin(self) -> conversion.Conversion:
        self._locked = time.monotonic()
        new = self._new = self._stack.enter_context(
            self._repository.begin_conversion(self.image_id))
        return new

    def _finish(self, new: conversion.Conversion, found: int) -> None:
        """Make the new recipe durable.

        :param found: bytes of the file whose blocks the old recipe has, too.
            Of its figures the new one keeps as large a share
        """
        stat = self.source.stat
        size = self._size or 1
        new.credit(stat.new_bytes * found // size,
                   stat.stored_bytes * found // size)
        self.header = new.finish()
        if self.header['upload_id'].hex() != self.upload_id:
            raise exceptions.ImageNotFound(
                f'image {self.image_id} was uploaded again')

    # -- to the disk ------------------------------------------------------

    def _convert_to_disk(self) -> Iterator[Step]:
        total = 3 * self._size
        self._repository.require_room(0)
        with disk_survey.Disk(
                self._read, self._size, self._is_wanted,
                self._repository.parameters.block_size) as disk:
            for _ in disk.survey():
                yield self._step(0, total, 'mapping the disk')
            self._repository.require_room(disk.new_bytes)
            self._use_feature()
            with contextlib.closing(
                    sorting.Sorted(_RECORD.size)) as records:
                new = self._begin()
                found = yield from self._store_disk(disk, new, records)
                yield from self._store_rest(disk, new, records)
                new.begin_table(conversion.Table(
                    disk.size, disk.format, True, tuple(
                        conversion.Encoder(*encoder[:4], bool(encoder[4]))
                        for encoder in disk.encoders)))
                yield from self._write_table(disk, new, records)
            self._finish(new, found)
        yield from self._compare(2 * self._size, total)

    def _use_feature(self) -> None:
        """Set the feature (F10), before anything is stored in vain."""
        try:
            self._repository.handle().use_feature(features.DISKS)
        except exceptions.BusyError as e:
            raise OlderProgramError(str(e)) from e

    def _store_disk(self, disk: disk_survey.Disk,
                    new: conversion.Conversion,
                    records: sorting.Sorted
                    ) -> Generator[Step, None, int]:
        """Store the disk, and record where its bytes are in the file.

        :returns: bytes that are cut on the disk as they are in the file
        """
        block = self._repository.parameters.block_size
        done = found = 0
        total, what = 3 * self._size, 'storing the disk'
        for number, (piece, used, plain) in enumerate(disk.content()):
            if number % _STEP == 0:
                yield self._step(done, total, what)
            if piece.kind < confined.PLAIN:
                new.write_zeros(piece.length)
            elif piece.kind == confined.PLAIN:
                for _, content in self._pieces(piece.place, piece.length):
                    self._write(new, content)
                    done += len(content)
                    yield self._step(done, total, what)
                records.add(_RECORD.pack(piece.place, piece.length,
                                         piece.offset, 0, 0, 0))
                if (piece.place - piece.offset) % block == 0:
                    found += piece.length
            else:
                self._write(new, plain[:piece.length])
                self._derive(disk, piece, used, plain, records)
                done += used
                if self._moved >= _PIECE:
                    yield self._step(done, total, what)
        new.write_zeros(-disk.size % disk_survey.REST_ALIGN)
        return min(found, self._size)

    def _derive(self, disk: disk_survey.Disk, piece: confined.Piece,
                used: int, plain: bytes, records: sorting.Sorted) -> None:
        """Record a stream that an encoder makes of the plain bytes."""
        rest = disk.size + -disk.size % disk_survey.REST_ALIGN
        end = piece.offset + piece.length
        if not disk_survey.is_worth_deriving(used, len(plain)) or (
                len(plain) > piece.length and (
                    end < disk.size or piece.offset + len(plain) > rest
                    or any(plain[piece.length:]))):
            return
        found = disk.encoder_of(plain, self._read(used, piece.place))
        if found is not None:
            records.add(_RECORD.pack(piece.place, used, piece.offset,
                                     len(plain), 1 + found[0], found[1]))

    def _ranges(self, disk: disk_survey.Disk, records: sorting.Sorted
                ) -> Iterator[tuple[int, conversion.Derived, bool]]:
        """Yield all of the file: place, extent, and whether it is of the rest.

        Of two ranges that overlap the first one counts.
        """
        at = 0
        rest = disk.size + -disk.size % disk_survey.REST_ALIGN
        for item in records.items():
            place, length, plain, plain_length, encoder, checksum = (
                _RECORD.unpack(item))
            end = place + length
            if end <= at or (encoder and place < at):
                continue
            if place < at:
                place, plain = at, plain + at - place
            elif place > at:
                yield at, conversion.Derived(place - at, rest), True
                rest += place - at
            yield place, conversion.Derived(
                end - place, plain, plain_length, encoder, checksum), False
            at = end
        if at < self._size:
            yield at, conversion.Derived(self._size - at, rest), True

    def _store_rest(self, disk: disk_survey.Disk,
                    new: conversion.Conversion,
                    records: sorting.Sorted) -> Iterator[Step]:
        extents = 0
        for place, extent, is_rest in self._ranges(disk, records):
            extents += 1
            if extents % _BATCH == 0:
                yield self._step(self._size + place, 3 * self._size,
                                 'storing the rest')
            if not is_rest:
                continue
            for at, content in self._pieces(place, extent.length):
                self._write(new, content)
                if self._moved >= _PIECE:
                    yield self._step(self._size + at, 3 * self._size,
                                     'storing the rest')
        disk_survey.require_table(extents, self._size)

    def _write_table(self, disk: disk_survey.Disk,
                     new: conversion.Conversion,
                     records: sorting.Sorted) -> Iterator[Step]:
        batch = []
        for place, extent, _ in self._ranges(disk, records):
            batch.append(extent)
            if len(batch) == _BATCH:
                new.add_derived(batch)
                batch = []
                yield self._step(self._size + place, 3 * self._size,
                                 'writing the table')
        new.add_derived(batch)

    # -- to the file ------------------------------------------------------

    def _convert_to_file(self) -> Iterator[Step]:
        """Store the bytes of the file as an upload would."""
        disk = self.source.disk
        derived = disk.derived_bytes if disk else 0
        self._repository.require_room(derived)
        new = self._begin()
        for at, content in self._pieces(0, self._size):
            self._write(new, content)
            yield self._step(at, 2 * self._size, 'storing the file')
        self._finish(new, self._size - derived)
        yield from self._compare(self._size, 2 * self._size)

    # -- the end ----------------------------------------------------------

    def _compare(self, done: int, total: int) -> Iterator[Step]:
        """Read the whole file through the new recipe (F4)."""
        assert self._new is not None
        stat = self.source.stat
        digest = _digest_of(stat.hash_name)
        with self._new.open_finished() as made:
            for at, content in self._pieces(0, self._size):
                self._moved += len(content)
                if made.read(_PIECE, at) != content:
                    raise exceptions.DamagedError(
                        f'bytes of image {self.image_id} from {at} on came '
                        'out otherwise')
                if digest is not None:
                    digest.update(content)
                yield self._step(done + at, total, 'comparing')
        if digest is not None and digest.hexdigest() != stat.hash_value:
            raise exceptions.DamagedError(
                f'image {self.image_id} has not the hash in its recipe')


def _digest_of(hash_name: str) -> Any:
    """Return an object of hashlib; None: this host cannot make such hashes."""
    with contextlib.suppress(ValueError, TypeError):
        digest = hashlib.new(hash_name)
        digest.hexdigest()      # some have no length of their own
        return digest
    return None


def require_encoder() -> None:
    """Require that this build's encoder makes the bytes that it must (F3).

    :raises VersionError: it does not, so nothing may be converted
    """
    _engine.require_golden()
