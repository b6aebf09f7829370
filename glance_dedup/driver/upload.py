# SPDX-License-Identifier: Apache-2.0

"""An upload: the engine and the hashes side by side.

::

    source --> pieces --+--> engine: split, look up, store
    (read by the        +--> md5
     caller's thread)   +--> multihash
                        +--> signature verifier, if any

Each arrow is a strand of its own, so that the slowest strand, not their sum,
sets the pace: hashlib and the engine release the GIL.  The caller's thread
reads the source, because a WSGI server's input may be read nowhere else.  At
most ``DEPTH`` pieces are under way; then the reader waits.  So an upload holds
at most ``(DEPTH + 1) * PIECE`` bytes of image data, 20 MiB.

A request's body comes in short reads.  These are put together in buffers.  A
buffer is used again when every sink is done with its piece.  Long reads are
passed on as they are.  So a sink must copy the bytes that it keeps.

Glance inspects the bytes as they are read, to see which format they have and
whether they are safe.  Its inspector, of oslo.utils, follows one reference
with each read.  The region table of a VHDX image ends at 256 KiB; it locates
the metadata, and these locate the virtual size.  So the read
after the one with the region table's end must not begin behind the virtual
size: otherwise the inspector never sees it, and Glance refuses the image.  The
format puts it at least 64 KiB behind a multiple of 1 MiB other than 0.
Therefore no read crosses ``HEAD``, which is 1 MiB, and later ones may be
of any length.  The first one is not shorter for another reason: of a VMDK's
descriptor without a header, the inspector judges only what the first read has
returned, up to 1 MiB less a byte.  All other formats are recognised and judged
by bytes at fixed places, or by the last 1536, however the image is read.

Whatever fails, the source, a strand or the caller's thread: no part of the
image remains when :func:`store` raises.  There is one exception: if the
storage hangs longer than the time limit, the hanging thread undoes the rest
when the storage answers.
"""

import collections
from collections.abc import Callable, Iterator
from concurrent import futures
import contextlib
import logging
import os
from typing import Any

from glance_dedup.base import exceptions
from glance_dedup.base import thread_pool
from glance_dedup.repository import openimages

LOG = logging.getLogger(__name__)

#: The bytes that are requested from the source at once.
PIECE = 4 << 20
#: No read crosses this offset.
HEAD = 1 << 20
#: Reads of at least this length are not copied.
LONG = 1 << 20
#: The most pieces that are under way at once.
DEPTH = 4

_hashers = thread_pool.Workers('dedup-hash', max(4, os.cpu_count() or 1))


class WrongSize(ValueError):
    """The source has more or fewer bytes than its stated size."""


def _reads(source: Any) -> Iterator[Any]:
    """The source's data, read by read: a file-like object or an iterator."""
    if not hasattr(source, 'read'):
        yield from source
        return
    total = 0
    while data := source.read(HEAD - total if total < HEAD else PIECE):
        total += len(data)
        yield data


def _pieces(source: Any, size: int,
            free: list[memoryview]) -> Iterator[bytes | memoryview]:
    """The source's bytes in pieces that are long enough to hand over.

    :param size: how many bytes the source must have; 0: any number
    :param free: buffers that may be filled; if there are none, one is made
    :raises WrongSize: the source has more bytes, or fewer
    """
    total = filled = 0
    buffer: memoryview | None = None    # `filled` bytes of it are in use
    for data in _reads(source):
        total += len(data)
        if size and total > size:
            raise WrongSize(f'The image was said to have {size} bytes, but '
                            f'has more: at least {total}.')
        if not filled and len(data) >= LONG and isinstance(data, bytes):
            yield data
            del data
            continue
        rest = memoryview(data)
        while rest:
            if buffer is None:
                buffer = free.pop() if free else memoryview(bytearray(PIECE))
            length = min(len(rest), PIECE - filled)
            buffer[filled:filled + length] = rest[:length]
            rest = rest[length:]
            filled += length
            if filled == PIECE:
                yield buffer
                buffer, filled = None, 0
        del data, rest
    if buffer is not None:
        yield buffer[:filled]
    if size and total != size:
        raise WrongSize(f'The image was said to have {size} bytes, but has '
                        f'only {total}.')


def _spread(source: Any, size: int,
            sinks: list[tuple[thread_pool.Strand, Callable]],
            limit: thread_pool.TimeLimit) -> None:
    """Give every piece to every sink."""
    under_way: collections.deque[tuple[Any, list[futures.Future]]] = (
        collections.deque())
    free: list[memoryview] = []

    def wait_for_first() -> None:
        for call in under_way[0][1]:
            limit.result(call)
        piece, _calls = under_way.popleft()
        if isinstance(piece, memoryview) and len(piece) == PIECE:
            free.append(piece)

    for piece in _pieces(source, size, free):
        under_way.append((piece, [strand.submit(function, piece)
                                  for strand, function in sinks]))
        del piece
        for _piece, calls in under_way:
            for call in calls:
                if call.done():
                    call.result()  # raises a failure at once
        if len(under_way) >= DEPTH:
            wait_for_first()
    while under_way:
        wait_for_first()


def store(repository: Any, image_id: str, transaction: Any, source: Any,
          size: int, watchers: list[Callable[[Any], Any]],
          storage: thread_pool.Workers, limit: thread_pool.TimeLimit,
          digest: Any = None) -> openimages.ImageStat:
    """Write all of a source into a transaction, and commit it.

    :param repository: where the transaction was begun, for this image id
    :param transaction: as :meth:`Repository.begin` gave it; it is committed
                        or aborted when this returns or raises
    :param source: an object with ``read(length)``, or an iterator of bytes
    :param size: the number of bytes, 0 if unknown
    :param watchers: functions called with every piece, in order, each from
                     one thread at a time; a piece is bytes, or a buffer
                     that is filled again after the function has returned
    :param storage: the threads for calls into the repository
    :param limit: how long each such call may take
    :param digest: a hash object that a watcher updates; the recipe records
                   its digest
    :returns: the facts about the image, as the commit gave them
    :raises WrongSize: the source has more or fewer bytes than ``size``
    :raises thread_pool.Expired: the time limit was exceeded
    :raises Exception: whatever the source, a watcher or the repository raised
    """
    engine = thread_pool.Strand(storage)
    sinks = [(engine, transaction.write)]
    sinks += [(thread_pool.Strand(_hashers), watcher) for watcher in watchers]
    commit = None

    def undo() -> None:
        try:
            transaction.abort()
            if commit is not None and not commit.cancelled():
                # A commit may fail, or be given up, after the image came to
                # exist.  The client got a failure of the upload.
                with contextlib.suppress(exceptions.ImageNotFound):
                    repository.delete(image_id, transaction.upload_id)
        except Exception:
            LOG.exception('Giving up the upload of image %s failed', image_id)

    try:
        _spread(source, size, sinks, limit)
        if digest is not None:
            limit.result(engine.submit(
                transaction.set_hash, digest.name, digest.digest()))
        commit = engine.submit(transaction.commit)
        return limit.result(commit)
    except BaseException as exc:
        for strand, _function in sinks:
            strand.drop()
        undone = engine.submit(undo)
        if not isinstance(exc, thread_pool.Expired):
            try:
                limit.result(undone)
            except thread_pool.Expired:
                LOG.warning('Giving up the upload of image %s takes long; '
                            'it goes on', image_id)
        raise
