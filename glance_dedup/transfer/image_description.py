# SPDX-License-Identifier: Apache-2.0

"""The description of a pulled image, kept as it comes.

A description grows with the image, to megabytes. The pull wants its lots in
order. Readers of an image that is still on its way want them in any order. So
the description is cut into lots as it comes. Each lot is one record of a
temporary file: the extents as they came, and behind them room for the
addresses of the blocks, once these are stored. Memory holds only where each
lot begins.
"""

import array
import bisect
from collections.abc import Iterator
import io
import itertools
import os
import tempfile
import threading

from glance_dedup.client import streams
from glance_dedup.client import wire
from glance_dedup.transfer import image_assembly


class Description:
    """The lots of an image, in order. Thread-safe; one thread fills it.

    :param where: names the image and the peer in errors
    :param header: the recipe's header
    :param lot_bytes: the most bytes of a lot; None: the usual number
    :raises BadAnswer: if there is no room for the description
    """

    def __init__(self, where: str, header: wire.RecipeHeader,
                 lot_bytes: int | None = None) -> None:
        streams.require_room(where, header)
        self._where = where
        self._most = image_assembly.most_blocks(header.block_size, lot_bytes)
        self._file = tempfile.TemporaryFile()
        self._changed = threading.Condition()
        # By the lot's number: its offset in the image; where its record is,
        # the record's length without addresses, and the number of addresses.
        self._starts = array.array('Q')
        self._places = array.array('Q')
        self._lengths = array.array('Q')
        self._counts = array.array('Q')
        self._end = 0
        self._ended = False
        self._error: BaseException | None = None

    # -- filling ----------------------------------------------------------

    def fill(self, recipe: streams.Recipe) -> None:
        """Read a recipe to its end; requests for lots raise its error, too.

        :raises BadAnswer, DaemonUnavailable: the recipe is wrong, or ended
        :raises OSError: the file cannot be written
        """
        try:
            with recipe:
                for extents in image_assembly.cut(recipe, self._most):
                    self._keep(extents)
        except BaseException as e:
            self._error = e
            raise
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _keep(self, extents: list[wire.RecipeExtent]) -> None:
        """Keep a lot."""
        record = b''.join([extent.pack() for extent in extents])
        blocks = sum(extent.blocks for extent in extents)
        end = self._end + len(record) + 8 * blocks
        try:
            os.pwrite(self._file.fileno(), record, self._end)
            os.truncate(self._file.fileno(), end)
        except OSError as e:
            raise OSError(e.errno, f'{self._where}: its description cannot '
                          f'be kept in {tempfile.gettempdir()}: '
                          f'{e.strerror}') from e
        with self._changed:
            self._starts.append(extents[0].offset)
            self._places.append(self._end)
            self._lengths.append(len(record))
            self._counts.append(blocks)
            self._end = end
            self._changed.notify_all()

    # -- asking -----------------------------------------------------------

    def lots(self) -> Iterator[image_assembly.Lot]:
        """All lots in order; waits for each.

        :raises Exception: if the description did not come
        """
        for number in itertools.count():
            with self._changed:
                self._changed.wait_for(
                    lambda: number < len(self._starts) or self._ended)
                if number >= len(self._starts):
                    self._require_good()
                    return
            yield self.lot(number)

    def lot(self, number: int) -> image_assembly.Lot:
        """A lot that has come.

        Each call makes a new object. Its blocks have addresses if these were
        kept.
        """
        with self._changed:
            place, length, count = (self._places[number],
                                    self._lengths[number],
                                    self._counts[number])
        data = os.pread(self._file.fileno(), length + 8 * count, place)
        lot = image_assembly.lot_of(list(
            wire.RecipeExtent.unpacked(io.BytesIO(data[:length]))))
        addresses = array.array('Q', data[length:])
        for part in lot.parts:
            if isinstance(part, image_assembly.Blocks):
                part.addresses = addresses[:len(part.names)]
                addresses = addresses[len(part.names):]
        return lot

    def _require_good(self) -> None:
        if self._error is not None:
            raise self._error

    def number_at(self, offset: int, seconds: float | None = None) -> int:
        """The number of the lot with this byte of the image; waits for it.

        :param seconds: how long; None: as long as it takes
        :raises TimeoutError: if it did not come in time
        :raises Exception: if the description did not come
        """
        with self._changed:
            if not self._changed.wait_for(
                    lambda: self._ended
                    or self._starts and self._starts[-1] > offset, seconds):
                raise TimeoutError(f'{self._where}: the description has not '
                                   f'reached byte {offset}')
            number = bisect.bisect_right(self._starts, offset) - 1
            if number == len(self._starts) - 1:
                # It may be the last one only because no more came.
                self._require_good()
            return number

    def keep_addresses(self, number: int, lot: image_assembly.Lot) -> None:
        """Note where a lot's blocks are stored."""
        addresses = array.array('Q')
        for part in lot.parts:
            if isinstance(part, image_assembly.Blocks):
                addresses.extend(part.addresses)
        os.pwrite(self._file.fileno(), addresses.tobytes(),
                  self._places[number] + self._lengths[number])

    def give_up(self, error: BaseException) -> None:
        """End the description; callers that wait for more get the error."""
        with self._changed:
            if not self._ended:
                self._error, self._ended = error, True
                self._changed.notify_all()

    def close(self) -> None:
        """Close the file. REQUIRES: no thread fills it or reads from it."""
        self._file.close()
