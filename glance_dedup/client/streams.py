# SPDX-License-Identifier: Apache-2.0

"""Images and recipes that are read while they come."""

from collections.abc import Iterator
from collections.abc import Sequence
import re
import shutil
import tempfile
import time

from glance_dedup.base import closing
from glance_dedup.base import hashes
from glance_dedup.base import hexids
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_connection
from glance_dedup.client import shared_memory
from glance_dedup.client import wire

_NUMBER = re.compile('[0-9]{1,19}')
# Bytes of a stream that are best read at once from a socket.
_PIECE = 4 << 20


class ImageStream(closing.Closing):
    """The bytes of a range of an image, in order.

    :param source: gives the bytes; closed with the stream
    :ivar piece: read no more bytes at once, so that they are copied only once
    :ivar size: bytes of the whole image
    :ivar left: bytes that are still to come
    :ivar used: when the stream was last read, by the monotonic clock
    """

    def __init__(self, source: daemon_connection.Answer | shared_memory.Reader,
                 size: int, left: int, timeout: float):
        self._source = source
        self._timeout = timeout
        self.piece = (shared_memory.PIECE if isinstance(
            source, shared_memory.Reader) else _PIECE)
        self.size = size
        self.left = left
        self.used = time.monotonic()

    def read(self, length: int, timeout: float | None = None) -> bytes:
        """The next `length` bytes; fewer only at the end.

        :raises DaemonUnavailable: they did not come. Then the stream cannot be
            used any more.
        """
        length = min(length, self.left)
        if not length:
            return b''
        data = self._source.read_exactly(
            length, self._timeout if timeout is None else timeout)
        self.left -= length
        self.used = time.monotonic()
        return data

    def close(self) -> None:
        """Close the stream.

        If all bytes came over the socket, the connection is kept.
        """
        self._source.close()


def require_room(where: str, header: wire.RecipeHeader) -> None:
    """Check that there is space to keep a peer's description of an image.

    :raises BadAnswer: it would take more than half of the free space
    """
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free
    if header.most_bytes > free // 2:
        raise client_errors.BadAnswer(
            f'{where}: the description of {header.size} bytes in '
            f'{header.extents} extents may take {header.most_bytes} bytes, '
            f'and {directory} has {free} free, of which half may be used')


class Recipe(closing.Closing):
    """An image's recipe, read while it comes.

    Iterating gives the image's extents, checked: they follow each other and
    fill the image; blocks have at most the block size, and fill their extent.

    :ivar upload_id: the upload that wrote the image
    :ivar hashes: the hashes that the daemon knows of the image's bytes, by
        their names
    """

    def __init__(self, answer: daemon_connection.Answer, timeout: float):
        self._answer = answer
        self._bad = answer.bad
        self._timeout = timeout
        upload_id = answer.header('ETag').strip('"')
        if not hexids.is_valid(upload_id):
            raise self._bad('the answer does not say of which upload it is')
        self.header = wire.RecipeHeader.unpack(
            answer.read_exactly(wire.RECIPE_HEADER_BYTES, timeout), self._bad)
        self.upload_id = upload_id
        self.hashes = hashes.unpack_header(answer.header('Dedup-Hashes'))

    def __iter__(self) -> Iterator[wire.RecipeExtent]:
        header = self.header
        end = blocks = 0
        for _ in range(header.extents):
            extent = wire.read_extent(self._answer, header, end, self._timeout)
            end += extent.length
            blocks += extent.blocks
            if blocks > header.most_blocks:
                raise self._bad('the recipe has more blocks than an image of '
                                f'{header.size} bytes')
            yield extent
        if end != header.size:
            raise self._bad(f'the recipe ends at {end} of {header.size}')
        if self._answer.read(1, self._timeout):
            raise self._bad('the recipe goes on behind its end')

    def close(self) -> None:
        """Close the answer. The connection is kept if all of it was read."""
        self._answer.close()


class Loan(closing.Closing):
    """Blocks of an image that a cache lends, as they come.

    Iterating gives their frames, checked; the blocks are to be verified.

    :ivar repository_id: the lender's repository
    :ivar stored: the offset before which the lender has everything
    :raises BadAnswer: if the answer lacks these
    """

    def __init__(self, answer: daemon_connection.Answer,
                 ranges: Sequence[tuple[int, int]], timeout: float):
        self._answer = answer
        self._frames = wire.Frames(answer, ranges, timeout)
        self.repository_id = answer.repository_id
        stored = answer.header('Dedup-Stored')
        if not self.repository_id or not _NUMBER.fullmatch(stored):
            raise answer.bad('the answer does not say what is lent')
        self.stored = int(stored)

    def __iter__(self) -> Iterator[wire.Frame]:
        return iter(self._frames)

    def close(self) -> None:
        """Close the answer. The connection is kept if all of it was read."""
        self._answer.close()


def shared(answer: daemon_connection.Answer, offset: int, length: int | None,
           timeout: float) -> ImageStream:
    """A range of an image, through the memory that the daemon shares."""
    size = shared_memory.image_size(answer)
    left = size - offset if length is None else length
    if not 0 <= left <= size - offset:
        raise answer.bad(f'{left} bytes at {offset} of an image of {size}')
    return ImageStream(shared_memory.Reader(answer, offset, left), size, left,
                       timeout)


def size_of(answer: daemon_connection.Answer, offset: int, length: int | None,
            ranged: bool) -> int:
    """The image's size, if the answer has the requested range."""
    found = answer.length
    if found is None:
        raise answer.bad('an image without its length')
    if not ranged:
        if answer.status != 200:
            raise answer.bad(f'an image with status {answer.status}')
        return found
    words = answer.header('Content-Range').partition('/')
    try:
        size = int(words[2])
    except ValueError:
        size = -1
    wanted = size - offset if length is None else length
    if (answer.status != 206 or found != wanted or size < offset + wanted
            or words[0] != f'bytes {offset}-{offset + wanted - 1}'):
        raise answer.bad(
            f'{found} bytes with status {answer.status} and the range '
            f'{answer.header("Content-Range")[:100]!r}, not what was asked '
            'for')
    return size
