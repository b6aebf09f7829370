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

    def facts(self, blocks: int | None) -> dict:
        """Return the ledger's entry of a recipe with so many blocks."""
        return {
            'image_id': self.image_id, 'upload_id': self.upload.hex(),
            'project': self.project, 'size': self.size,
            'zero_bytes': self.zero_bytes, 'new_bytes': self.new_bytes,
            'stored_bytes': self.stored_bytes, 'blocks': blocks,
            'fragments': self.fragments, 'created': self.created}


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
        if len(data) < ondisk.PAGE:
            raise ondisk.Damage(f'ends inside page {page}', base + len(data))
        if ondisk.xxh3(data[:4088], self.seed) != ondisk.stored_checksum(
                data, 4088):
            raise ondisk.Damage(f'the checksum of page {page} does not agree',
                                base + 4088)
        its_page, count = ondisk.PAGE_HEADER.unpack_from(data)
        if its_page != page % (1 << 32):
            raise ondisk.Damage(f'page {page} says that it is page {its_page}',
                                base)
        if count != min(self.left, ondisk.EXTENTS_PER_PAGE):
            raise ondisk.Damage(
                f'page {page} says that it has {count} extents',
                base + 4)
        end = 8 + ondisk.EXTENT * count
        if any(data[end:4088]):
            raise ondisk.Damage(f'page {page} has bytes that should be zeros',
                                base + end)
        for at in range(8, end, ondisk.EXTENT):
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
        if not 1 <= length <= self.header.size - offset:
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
        if self.position != header.size:
            raise ondisk.Damage(f'its extents have {self.position} bytes '
                                f'instead of {header.size}', 80)
        if self.zeros != header.zero_bytes:
            raise ondisk.Damage(f'its zero extents have {self.zeros} bytes '
                                f'instead of {header.zero_bytes}', 88)


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
    if major != ondisk.MAJOR:
        raise ondisk.Damage(f'has format {major}.{minor}; this program reads '
                            f'{ondisk.MAJOR}.x', 8)
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
    pages = -(-extents // ondisk.EXTENTS_PER_PAGE)
    if size != ondisk.PAGE * (1 + pages):
        raise ondisk.Damage(f'has {size} bytes instead of the '
                            f'{ondisk.PAGE * (1 + pages)} of {extents} '
                            'extents',
                            112)
    return RecipeHeader(
        name, project[:project_length].decode('utf-8', 'replace'), scope,
        scope in (ondisk.GLOBAL_SCOPE,
                  ondisk.scope_of(project[:project_length])),
        transaction, upload, image_size, zero_bytes, new_bytes, stored_bytes,
        extents, fragments, created, size)
