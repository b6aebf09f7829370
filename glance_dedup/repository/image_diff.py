# SPDX-License-Identifier: Apache-2.0

"""Changed ranges between two images of one size, by their recipes.

Equal addresses are equal blocks. So extents that begin with the same block at
the same offset are equal up to the end of the shorter one. Where the addresses
differ, the blocks' fingerprints are compared, if equal fingerprints are equal
blocks (I5). No block is read. Memory holds a page of extents of each image,
and the fingerprints of its blocks, at most 4 MiB each.

A range that counts as equal is equal. One that counts as changed may have some
equal bytes: a block counts as a whole, and the images may be cut in different
ways.
"""

from collections.abc import Iterator
import dataclasses
import itertools
import struct

from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages

# In the wire format: the head of an extent, and a block's entry (wire.h).
_HEAD = struct.Struct('<QQI4x')
_LENGTH = struct.Struct('<I')
_FINGERPRINT = 32
_BLOCK = _FINGERPRINT + _LENGTH.size

_SLOT_BITS = 15
# The most blocks, or extents, that one request compares.
_MAX_STEPS = 16384


@dataclasses.dataclass(frozen=True)
class Range:
    """A range of both images."""

    offset: int
    length: int
    changed: bool
    """False: it has the same bytes in both."""
    zeros: bool
    """True if it is known to be zeros in the second image."""


@dataclasses.dataclass
class _Piece:
    """The rest of an extent.

    :ivar page: the extent's page
    :ivar extent: its number in the page
    :ivar block: the number of the first block in the extent
    :ivar blocks: how many blocks are left; 0: zeros
    :ivar address: of the first block
    :ivar skipped: bytes of the first block that lie before the piece
    """

    length: int
    page: int
    extent: int
    block: int
    blocks: int
    address: int
    skipped: int = 0


class _Side:
    """One of the images, from an offset on."""

    def __init__(self, image: openimages.Image, offset: int) -> None:
        self._image = image
        self._pieces = self._all(offset)
        self._described: tuple[int, bytes, list[int]] | None = None
        self.piece: _Piece | None
        begin, self.piece = next(self._pieces, (0, None))
        if self.piece is not None:
            self.skip(offset - begin)

    def _all(self, offset: int) -> Iterator[tuple[int, _Piece]]:
        """Offset and piece of each extent, from the one at `offset` on."""
        for page, extents in self._image.pages(offset):
            for number, extent in enumerate(extents):
                if extent.offset + extent.length > offset:
                    yield extent.offset, _Piece(
                        extent.length, page, number, 0, extent.blocks,
                        extent.group << _SLOT_BITS | extent.slot)

    def skip(self, length: int) -> None:
        """Go on by so many bytes, which the piece has."""
        piece = self.piece
        assert piece is not None and length <= piece.length
        if length == piece.length:
            _, self.piece = next(self._pieces, (0, None))
            return
        piece.length -= length
        if piece.blocks and length:
            left, blocks = length + piece.skipped, 0
            for size in map(_length, self.entries()):
                if left < size:
                    break
                left -= size
                blocks += 1
            piece.block += blocks
            piece.blocks -= blocks
            piece.address += blocks
            piece.skipped = left

    def entries(self) -> Iterator[bytes]:
        """Fingerprint and length of each block of the piece, packed.

        :raises DamagedError: the entries have changed since the commit
        """
        piece = self.piece
        assert piece is not None
        if self._described is None or self._described[0] != piece.page:
            data = self._image.describe(piece.page)
            self._described = piece.page, data, _starts(data)
        _, data, starts = self._described
        begin = starts[piece.extent] + piece.block * _BLOCK
        return (data[at:at + _BLOCK] for at in range(
            begin, begin + piece.blocks * _BLOCK, _BLOCK))


def _starts(data: bytes) -> list[int]:
    """The offsets in a described page at which extents' blocks begin."""
    starts = []
    at = 0
    while at < len(data):
        blocks = _HEAD.unpack_from(data, at)[2]
        starts.append(at + _HEAD.size)
        at += _HEAD.size + blocks * _BLOCK
    return starts


def ranges(before: openimages.Image, after: openimages.Image,
           offset: int = 0, are_digests_strong: bool = True
           ) -> Iterator[Range]:
    """Compare two images; yield ranges in order, without gap.

    Two consecutive ranges differ in `changed` or in `zeros`.

    :param offset: where to begin
    :param are_digests_strong: whether equal fingerprints are equal blocks
    :raises DamagedError: a recipe is damaged, or an entry has changed since
        the image's commit
    """
    for (changed, zeros), some in itertools.groupby(
            _steps(before, after, offset, after.size, are_digests_strong),
            lambda step: step[1:]):
        length = sum(step[0] for step in some)
        yield Range(offset, length, changed, zeros)
        offset += length


def _steps(before: openimages.Image, after: openimages.Image, offset: int,
           end: int, are_digests_strong: bool
           ) -> Iterator[tuple[int, bool, bool]]:
    """Length, whether it changed, and whether it is zeros afterwards.

    A step is a part of a block, of an extent, or of several equal blocks.
    """
    a, b = _Side(before, offset), _Side(after, offset)
    while offset < end and a.piece is not None and b.piece is not None:
        length = min(a.piece.length, b.piece.length, end - offset)
        zeros = not b.piece.blocks
        if not a.piece.blocks or zeros:
            yield length, bool(a.piece.blocks) or not zeros, zeros
        elif (a.piece.address == b.piece.address
              and a.piece.skipped == b.piece.skipped):
            yield length, False, False
        elif not are_digests_strong:
            # At the same offset they have no common block, as long as they
            # are cut alike.
            yield length, True, False
        else:
            most, length = length, 0
            for step, changed in _by_block(a, b):
                step = min(step, most - length)
                length += step
                yield step, changed, False
                if length == most:
                    break
        a.skip(length)
        b.skip(length)
        offset += length


def _by_block(a: _Side, b: _Side) -> Iterator[tuple[int, bool]]:
    """Compare the blocks of two pieces, as far as they are cut alike.

    If they are not, the part up to the first end of a block has changed.
    """
    assert a.piece is not None and b.piece is not None
    skipped = a.piece.skipped, b.piece.skipped
    for one, other in zip(a.entries(), b.entries()):
        left = _length(one) - skipped[0], _length(other) - skipped[1]
        if left[0] != left[1] or skipped[0] != skipped[1]:
            yield min(left), True
            return
        yield left[0], one != other
        skipped = 0, 0


def _length(entry: bytes) -> int:
    return _LENGTH.unpack_from(entry, _FINGERPRINT)[0]


class Comparison(closing.Closing):
    """Two images of a repository, open to be compared. Thread-safe.

    :param before: the id of the first image
    :param after: the id of the second one
    :raises ImageNotFound, DamagedError: as :meth:`Repository.open_image`
    :raises InvalidParameter: they have different sizes or scopes, or one is
        kept as its disk
    """

    def __init__(self, repository: image_repository.Repository, before: str,
                 after: str) -> None:
        self._is_strong = repository.parameters.is_cryptographic
        self._before = repository.open_image(before)
        try:
            self._after = repository.open_image(after)
        except BaseException:
            self._before.close()
            raise
        try:
            self._require_alike(before, after)
        except BaseException:
            self.close()
            raise

    def _require_alike(self, before: str, after: str) -> None:
        for image in (self._before, self._after):
            image.require_no_disk()
        if self._before.size != self._after.size:
            raise exceptions.InvalidParameter(
                f'image {before} has {self._before.size} bytes, and image '
                f'{after} has {self._after.size}: only images of one size '
                'can be compared')
        if self._before.stat.scope != self._after.stat.scope:
            raise exceptions.InvalidParameter(
                f'images {before} and {after} have different scopes, so their '
                'blocks cannot be compared: copy one into the scope of the '
                "other with 'glance-dedup image copy'")

    @property
    def size(self) -> int:
        """Bytes of each of the images."""
        return self._after.size

    @property
    def upload_id(self) -> str:
        """The id of the upload that wrote the second image."""
        return self._after.stat.upload_id

    def ranges(self, offset: int = 0) -> Iterator[Range]:
        """See :func:`ranges`."""
        return ranges(self._before, self._after, offset, self._is_strong)

    def extents(self, offset: int, length: int) -> list[tuple[int, bool]]:
        """Successive extents: (length, whether it changed).

        There is at least one. Together they may be shorter than the request,
        since a call compares only so many blocks.
        """
        found: list[tuple[int, bool]] = []
        for size, changed, _ in itertools.islice(
                _steps(self._before, self._after, offset,
                       min(self.size, offset + length), self._is_strong),
                _MAX_STEPS):
            if found and found[-1][1] == changed:
                size += found.pop()[0]
            found.append((size, changed))
        return found

    def are_related(self) -> bool:
        """Return whether the images have a block in common at one place.

        An image of zeros is related to all. Usually this reads only the
        beginning of the recipes.
        """
        has_blocks = [any(extent.blocks for extent in image.extents())
                      for image in (self._before, self._after)]
        return not all(has_blocks) or any(
            not found.changed and not found.zeros for found in self.ranges())

    def close(self) -> None:
        """Close both images. Idempotent."""
        self._before.close()
        self._after.close()
