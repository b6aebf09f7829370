# SPDX-License-Identifier: Apache-2.0

"""A stored image gets another recipe: plain bytes, and a table.

The table says how the file is made from the plain bytes (image-disks.rst). Or
it gets the recipe of its file back, which has no table.
:meth:`Repository.begin_conversion
<glance_dedup.repository.image_repository.Repository.begin_conversion>` makes
these objects.
"""

from collections.abc import Iterable
import dataclasses
import struct
from typing import Any
from typing import NamedTuple

from glance_dedup.base import exceptions
from glance_dedup.repository import openimages

#: Formats of files, by their numbers in a recipe's header.
FORMATS = {'qcow2': 1, 'vmdk': 2, 'vhd': 3, 'vhdx': 4, 'vdi': 5}
_ZLIB = 1                       # an encoder's id
_ENCODER = struct.Struct('6B')
_EXTENT = struct.Struct('<QQIIQ')


class Encoder(NamedTuple):
    """Parameters of zlib, as its ``deflateInit2`` has them."""

    level: int
    window_bits: int
    memory_level: int
    strategy: int = 0
    has_header: bool = False


class Derived(NamedTuple):
    """A range of the file, made from a range of the plain bytes."""

    length: int
    """Bytes of the file. The range begins where the one before it ends."""
    plain: int
    """Place of the first of the plain bytes."""
    plain_length: int = 0
    """0 if the encoder is 0: then it is the length."""
    encoder: int = 0
    """0 copies; others are numbered from 1, as in :class:`Table`."""
    checksum: int = 0
    """XXH3-64 of the bytes of the file; 0 if the encoder is 0."""


@dataclasses.dataclass(frozen=True)
class Table:
    """The parts of a table that the recipe's header has."""

    disk_size: int
    format: str
    is_proven: bool
    """A parser has mapped the file, and the disk agrees with the map (F5)."""
    encoders: tuple[Encoder, ...] = ()


class Conversion(openimages.Transaction):
    """The plain bytes of a stored image, and then its table.

    The caller writes the plain bytes: the disk, zeros up to the next multiple
    of :data:`.disk_survey.REST_ALIGN`, and the rest. :meth:`finish` and
    :meth:`exchange` take the place of a commit. Leaving the ``with`` block
    before :meth:`finish` gives the new recipe up.
    """

    def begin_table(self, table: Table) -> None:
        """End the plain bytes, and set the feature ``disks`` (F10).

        :raises InvalidParameter: this table cannot be
        :raises BusyError: an older program has the repository open
        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        number = FORMATS.get(table.format)
        if number is None:
            raise exceptions.InvalidParameter(
                f'there is no format {table.format!r}')
        encoders = b''.join(_ENCODER.pack(_ZLIB, *encoder)
                            for encoder in table.encoders)
        self._engine.begin_table(table.disk_size, number, table.is_proven,
                                 encoders)

    def add_derived(self, extents: Iterable[Derived]) -> None:
        """Add extents of the table, in the order of the file.

        :raises InvalidParameter: one is not within the file or the plain
            bytes; only :meth:`abort` is possible
        :raises NoSpaceError, StorageError: the same
        """
        self._engine.add_derived(b''.join(
            _EXTENT.pack(*extent) for extent in extents))

    def finish(self) -> dict[str, Any]:
        """Make the new recipe durable (N10.2); return its header.

        It stays in the spool from then on. It is counted before
        :meth:`exchange` (N10.3). Without a table it is the recipe of the
        file, whose bytes were written.

        :raises InvalidParameter: the table is not that of the whole file
        :raises NoSpaceError, StorageError: only :meth:`abort` is possible
        """
        return self._engine.finish()

    def open_finished(self) -> openimages.Image:
        """Open the new recipe, to compare what a reader gets from it (F4).

        REQUIRES: it is finished; and the image is closed before this is.
        """
        return openimages.Image(self._engine.open_finished(),
                                self._repository)

    def exchange(self) -> bool:
        """Give the image the new recipe (N10.4 to N10.7).

        :returns: False if the image was deleted, or got another recipe, since
            the conversion began
        """
        return self._engine.exchange()
