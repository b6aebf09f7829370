# SPDX-License-Identifier: Apache-2.0

"""One recipe, read and verified: its header and its pages of extents.

Written from ``doc/source/contributor/format.rst`` alone; see ``checker.py``.
``group_check.py`` judges whether the groups have the blocks of the extents.
"""

import struct
import typing

from glance_dedup.check import ondisk

# An extent as it is kept until its group's turn: slot, blocks, length, number
# in its recipe, digest.
KEPT_EXTENT = struct.Struct('<IIIQQ')


class Disk(typing.NamedTuple):
    """The header's fields of version 2."""

    plain_size: int
    size: int
    derived: int
    derived_bytes: int
    encoders: int


class RecipeHeader(typing.NamedTuple):
    """The fields of a recipe's first page, and the size of its file."""

    image_id: str
    project: str
    scope: bytes
    has_own_scope: bool     # the global one, or its project's
    transaction: bytes
    upload: bytes
    size: int
    zero_bytes: int
    new_bytes: int
    stored_bytes: int
    extents: int
    fragments: int
    created: int
    file_size: int
    disk: 'Disk | None' = None  # None: of version 1

    @property
    def plain_size(self) -> int:
        """The bytes of all extents."""
        return self.size if self.disk is None else self.disk.plain_size

    @property
    def shown_zeros(self) -> int:
        """The zeros in figures: what the size has beside the other bytes."""
        return max(0, self.size - (self.plain_size - self.zero_bytes))

    def facts(self, blocks: int | None) -> dict:
        """Return the ledger's entry of a recipe with so many blocks."""
        return {
            **({} if self.disk is None
               else {'derived_bytes': self.disk.derived_bytes}),
            'image_id': self.image_id, 'upload_id': self.upload.hex(),
            'project': self.project, 'size': self.size,
            'zero_bytes': self.shown_zeros, 'new_bytes': self.new_bytes,
            'stored_bytes': self.stored_bytes, 'blocks': blocks,
            'fragments': self.fragments, 'created': self.created}


def _require_page(page: int, data: bytes | memoryview, left: int, seed: int
                  ) -> int:
    """Verify a page; return how many extents it has.

    :param left: the extents from this page on
    """
    base = page * ondisk.PAGE
    if len(data) < ondisk.PAGE:
        raise ondisk.Damage(f'ends inside page {page}', base + len(data))
    if ondisk.xxh3(data[:4088], seed) != ondisk.stored_checksum(data, 4088):
        raise ondisk.Damage(f'the checksum of page {page} does not agree',
                            base + 4088)
    its_page, count = ondisk.PAGE_HEADER.unpack_from(data)
    if its_page != page % (1 << 32):
        raise ondisk.Damage(f'page {page} says that it is page {its_page}',
                            base)
    if count != min(left, ondisk.EXTENTS_PER_PAGE):
        raise ondisk.Damage(f'page {page} says that it has {count} extents',
                            base + 4)
    end = 8 + ondisk.EXTENT * count
    if any(data[end:4088]):
        raise ondisk.Damage(f'page {page} has bytes that should be zeros',
                            base + end)
    return count


class ExtentReader:
    """Reads the pages of a recipe in order, and keeps their extents.

    :param extents: by group, the extents as :data:`KEPT_EXTENT` packs them;
        the caller may take them out between two pages
    :ivar blocks: that the extents name, so far
    :ivar fragments: runs of blocks that lie side by side, so far
    """

    def __init__(self, header: RecipeHeader, extents: dict[int, bytearray]
                 ) -> None:
        self.header = header
        self.extents = extents
        self.left = header.extents
        self.number = 0
        self.position = 0
        self.zeros = 0
        self.blocks = 0
        self.fragments = 0
        # The address after the last blocks.
        self.next: tuple[int, int] | None = None
        self.seed = int.from_bytes(header.transaction[:8], 'little')

    def read_page(self, page: int, data: bytes | memoryview) -> None:
        """Read the next page.

        :raises Damage: if it does not verify; the extents before the damaged
            one are kept
        """
        base = page * ondisk.PAGE
        count = _require_page(page, data, self.left, self.seed)
        for at in range(8, 8 + ondisk.EXTENT * count, ondisk.EXTENT):
            sentence = self._read_extent(
                *ondisk.EXTENT_FIELDS.unpack_from(data, at))
            if sentence is not None:
                raise ondisk.Damage(f'extent {self.number} {sentence}',
                                    base + at)
            self.number += 1
        self.left -= count

    def _read_extent(self, offset: int, length: int, group: int, slot: int,
                     blocks: int, kind: int, reserved: bytes, digest: int
                     ) -> str | None:
        """Keep an extent, or report its problem."""
        if offset != self.position:
            return (f'starts at {offset}, where {self.position} would '
                    'follow')
        if not 1 <= length <= self.header.plain_size - offset:
            return f'has {length} bytes'
        if any(reserved):
            return 'has reserved bytes that should be zeros'
        self.position += length
        if kind == 0:
            if group or slot or blocks or digest:
                return 'of zeros has fields of blocks'
            self.zeros += length
            return None
        if kind != 1:
            return f'has the unknown kind {kind}'
        if not 1 <= group < ondisk.MAX_GROUP:
            return f'names group {group}'
        if not 1 <= blocks <= ondisk.MAX_EXTENT_BLOCKS or (
                slot + blocks > ondisk.MAX_SLOTS):
            return f'names {blocks} blocks from slot {slot}'
        if not blocks <= length <= blocks * ondisk.MAX_BLOCK:
            return f'has {length} bytes in {blocks} blocks'
        self.blocks += blocks
        self.fragments += (group, slot) != self.next
        self.next = (group, slot + blocks)
        self.extents.setdefault(group, bytearray()).extend(
            KEPT_EXTENT.pack(slot, blocks, length, self.number, digest))
        return None

    def finish(self) -> None:
        """Compare the extents with the header, once all pages were read.

        :raises Damage: if their sum is not the recipe's
        """
        header = self.header
        if self.position != header.plain_size:
            raise ondisk.Damage(f'its extents have {self.position} bytes '
                                f'instead of {header.plain_size}',
                                80 if header.disk is None else 500)
        if self.zeros != header.zero_bytes:
            raise ondisk.Damage(f'its zero extents have {self.zeros} bytes '
                                f'instead of {header.zero_bytes}', 88)


class TableReader:
    """Reads the pages of a recipe's table, in order (F1, F7).

    :param disk: the header's, which is not None
    """

    def __init__(self, header: RecipeHeader, disk: Disk) -> None:
        self._header = header
        self._disk = disk
        self._left = disk.derived
        self._number = 0
        self._position = 0
        self._derived_bytes = 0
        self._seed = int.from_bytes(header.transaction[:8], 'little')

    def read_page(self, page: int, data: bytes | memoryview) -> None:
        """Read the next page.

        :raises Damage: if it does not verify
        """
        count = _require_page(page, data, self._left, self._seed)
        for at in range(8, 8 + ondisk.EXTENT * count, ondisk.EXTENT):
            sentence = self._read_extent(
                *ondisk.DERIVED_FIELDS.unpack_from(data, at))
            if sentence is not None:
                raise ondisk.Damage(
                    f'derived extent {self._number} {sentence}',
                    page * ondisk.PAGE + at)
            self._number += 1
        self._left -= count

    def _read_extent(self, offset: int, length: int, plain: int,
                     plain_length: int, kind: int, encoder: int,
                     reserved: int, checksum: int) -> str | None:
        if offset != self._position:
            return (f'starts at {offset}, where {self._position} would '
                    'follow')
        if not 1 <= length <= self._header.size - offset:
            return f'has {length} bytes'
        if kind != 2 or reserved:
            return f'has the unknown kind {kind}, or reserved bytes'
        if encoder > self._disk.encoders:
            return f'names encoder {encoder}'
        if encoder == 0 and (plain_length or checksum):
            return 'is copied, and has fields of an encoder'
        if encoder and not (1 <= plain_length <= ondisk.MAX_DERIVED_PLAIN
                            and length <= ondisk.MAX_DERIVED):
            return f'makes {length} bytes of {plain_length}'
        if plain + (plain_length or length) > self._disk.plain_size:
            return f'names plain bytes at {plain}, behind their end'
        self._position += length
        self._derived_bytes += length if encoder else 0
        return None

    def finish(self) -> None:
        """Compare the table with the header, once all pages were read.

        :raises Damage: if it is not that of the whole file
        """
        if self._position != self._header.size:
            raise ondisk.Damage(f'its table has {self._position} bytes '
                                f'instead of {self._header.size}', 80)
        if self._derived_bytes != self._disk.derived_bytes:
            raise ondisk.Damage(
                f'its table derives {self._derived_bytes} bytes instead of '
                f'{self._disk.derived_bytes}', 524)


def _is_encoder(kind: int, level: int, window: int, memory: int,
                strategy: int, header: int, reserved: int) -> bool:
    return (kind == 1 and 1 <= level <= 9 and 9 <= window <= 15
            and 1 <= memory <= 9 and strategy <= 4 and header <= 1
            and reserved == 0)


def _parse_disk(data: bytes, size: int) -> Disk:
    """The fields of version 2 in a header page, of a file of `size` bytes."""
    (plain_size, disk_size, derived, derived_bytes, number, flags,
     encoders) = ondisk.DISK_FIELDS.unpack_from(data)
    if disk_size % 512 or not 512 <= disk_size <= ondisk.MAX_DISK:
        raise ondisk.Damage(f'has a disk of {disk_size} bytes', 508)
    if not (-(-disk_size // ondisk.REST_ALIGN) * ondisk.REST_ALIGN
            <= plain_size < 1 << 63):
        raise ondisk.Damage(f'has {plain_size} plain bytes', 500)
    if not 1 <= derived <= size:
        raise ondisk.Damage(f'has {derived} derived extents', 516)
    if not 1 <= number <= 5:
        raise ondisk.Damage(f'has the unknown format {number}', 532)
    if flags > 1:
        raise ondisk.Damage(f'has unknown flags of its disk: {flags:#x}', 533)
    if encoders > ondisk.MAX_ENCODERS:
        raise ondisk.Damage(f'has {encoders} encoders', 534)
    for index in range(ondisk.MAX_ENCODERS):
        at = 536 + index * ondisk.ENCODER_FIELDS.size
        fields = ondisk.ENCODER_FIELDS.unpack_from(data, at)
        if not _is_encoder(*fields) if index < encoders else any(fields):
            raise ondisk.Damage(f'has no possible encoder {index + 1}', at)
    return Disk(plain_size, disk_size, derived, derived_bytes, encoders)


def parse_header(data: bytes, size: int, repository_id: bytes | None
                 ) -> RecipeHeader:
    """The header of a recipe of `size` bytes, from its first page.

    :param repository_id: the one that it should have; None: any
    :raises Damage: if it does not verify
    """
    if len(data) < ondisk.PAGE:
        raise ondisk.Damage('ends inside its header', len(data))
    if data == ondisk.PAGE_ZEROS:
        raise ondisk.Damage('is a recipe that was never completed', 0)
    (magic, major, minor, flags, its_repository_id, scope, transaction, upload,
     image_size, zero_bytes, new_bytes, stored_bytes, extents, fragments,
     created, id_length, project_length, _, image_id,
     project) = ondisk.RECIPE_HEADER.unpack_from(data)
    if magic != b'GDRECIPE':
        raise ondisk.Damage('does not start with the magic of a recipe', 0)
    if ondisk.xxh3(data[:4088]) != ondisk.stored_checksum(data, 4088):
        raise ondisk.Damage('the checksum of its header does not agree', 4088)
    if major not in (ondisk.MAJOR, ondisk.WITH_DISK):
        raise ondisk.Damage(f'has format {major}.{minor}; this program reads '
                            f'{ondisk.MAJOR}.x and {ondisk.WITH_DISK}.x', 8)
    if flags and minor <= ondisk.MINOR:
        raise ondisk.Damage(f'has unknown flags: {flags:#x}', 12)
    if repository_id not in (None, its_repository_id):
        raise ondisk.Damage(f'is of the repository {its_repository_id.hex()}',
                            16)
    name = image_id[:id_length].decode('ascii', 'replace')
    if id_length > 128 or not ondisk.IMAGE_NAME.match(name) or (
            any(image_id[id_length:])):
        raise ondisk.Damage('has not an image id', 144)
    if project_length > 128 or any(project[project_length:]):
        raise ondisk.Damage("has not a project's name", 272)
    if scope == ondisk.SPARE_SCOPE:
        raise ondisk.Damage('is of the scope of spare copies', 32)
    disk = _parse_disk(data, image_size) if (
        major == ondisk.WITH_DISK) else None
    derived = 0 if disk is None else disk.derived
    pages = sum(-(-number // ondisk.EXTENTS_PER_PAGE)
                for number in (extents, derived))
    if size != ondisk.PAGE * (1 + pages):
        raise ondisk.Damage(f'has {size} bytes instead of the '
                            f'{ondisk.PAGE * (1 + pages)} of '
                            f'{extents + derived} extents', 112)
    return RecipeHeader(
        name, project[:project_length].decode('utf-8', 'replace'), scope,
        scope in (ondisk.GLOBAL_SCOPE,
                  ondisk.scope_of(project[:project_length])),
        transaction, upload, image_size, zero_bytes, new_bytes, stored_bytes,
        extents, fragments, created, size, disk)
