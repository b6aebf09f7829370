# SPDX-License-Identifier: Apache-2.0

"""A process that counts for the maintainer (``batch.rst``).

The maintainer starts *counters*, on its own host or by ssh on others. In the
first pass, each takes one image after the other, and sends the runs of its
recipe, divided by the partitions that the runs' groups belong to. In the
second pass, each takes one partition after the other, requests its runs, adds
them up, and sends the counts. A counter takes no lock and changes nothing in
the repository.

They talk over the counter's standard input and output. A counter ends when
either is closed.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import itertools
import json
from multiprocessing import connection
import os
import struct
from typing import Any

from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import package_version
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import recipes
from glance_dedup.maintenance import records
from glance_dedup.maintenance import refcounts
from glance_dedup.repository import image_repository

#: Bytes of runs that a counter requests at once.
PIECE = block_addresses.RUN_BYTES << 16
#: Chunks of counters in memory: 16 MiB.
CHUNKS = 4096
# Groups whose counts take as much.
_GROUPS = 128
_MAX_PARTITIONS = 256
# Bytes of all buffers of a counter, and of a message, at most.
_BUFFERS = 4 << 20
_MESSAGE = 1 << 20
_SENT = 128     # chunks of counters

_KEY = struct.Struct('<II')
_COUNTED = _KEY.size + records.CHUNK_BYTES

Chunk = tuple[int, int]


class Broken(Exception):
    """The counting has failed, so that nothing of it may be used."""


def partitions_for(groups: int) -> int:
    """Into how many partitions to divide so many groups."""
    return min(max(1, -(-groups // _GROUPS)), _MAX_PARTITIONS)


def partition_of(group: int, partitions: int) -> int:
    """The partition of a group."""
    return group % partitions


class Peer:
    """One end of the talk between the maintainer and a counter.

    A message is a JSON list, a line feed, and bytes. Nothing of it is code:
    another host may be less trusted than this one.
    """

    def __init__(self, reading: connection.Connection,
                 writing: connection.Connection) -> None:
        self._reading = reading
        self._writing = writing

    def fileno(self) -> int:
        """Selector that waits for a message."""
        return self._reading.fileno()

    def tell(self, *what: Any, payload: bytes | bytearray = b'') -> None:
        """Send a message."""
        self._writing.send_bytes(
            json.dumps(what).encode() + b'\n' + payload)

    def hear(self) -> tuple[list, bytes]:
        """Wait for a message.

        :raises EOFError, OSError: the peer has ended
        :raises Broken: this is no message
        """
        head, _, payload = self._reading.recv_bytes(_MESSAGE).partition(b'\n')
        try:
            what = json.loads(head)
        except ValueError as e:
            raise Broken(f'it sent what is no message: {head[:80]!r}') from e
        if not isinstance(what, list) or not what:
            raise Broken(f'it sent what is no message: {head[:80]!r}')
        return what, payload

    def close(self) -> None:
        """Close both directions. Idempotent."""
        self._reading.close()
        self._writing.close()


class Buffers:
    """Runs on their way to the partitions.

    :param write: called with a partition and packed runs of it
    """

    def __init__(self, partitions: int,
                 write: Callable[[int, bytearray], None]) -> None:
        self._write = write
        self._runs = [bytearray() for _ in range(partitions)]
        self._most = min(_BUFFERS // partitions, PIECE)

    def add(self, runs: bytes) -> None:
        """Divide the runs among the partitions."""
        begin = at = part = 0
        for group, _, _ in block_addresses.runs_in(runs):
            found = partition_of(group, len(self._runs))
            if found != part:
                self._append(part, runs[begin:at])
                begin, part = at, found
            at += block_addresses.RUN_BYTES
        self._append(part, runs[begin:at])

    def _append(self, part: int, runs: bytes) -> None:
        self._runs[part] += runs
        if len(self._runs[part]) >= self._most:
            self._flush(part)

    def _flush(self, part: int) -> None:
        runs, self._runs[part] = self._runs[part], bytearray()
        self._write(part, runs)

    def flush(self) -> None:
        """Write the remaining runs."""
        for part, runs in enumerate(self._runs):
            if runs:
                self._flush(part)


def spread(engine: _engine.Maintenance, image_id: str, txid: str | None,
           buffers: Buffers) -> list:
    """Spread the runs of an image's recipe; return the outcome.

    :param txid: the only transaction to spread, in hex; None: any
    :returns: 'gone'; 'unreadable', file, why; or 'counted', transaction id,
        facts
    """
    try:
        recipe = engine.open_recipe(image_id)
    except exceptions.ImageNotFound:
        return ['gone']
    except exceptions.UNREADABLE as e:
        return ['unreadable', f'images/{image_id}', str(e)]
    with contextlib.closing(recipe):
        if not recipe.complete:
            return ['unreadable', recipe.name, recipe.error]
        header = recipe.header()
        if txid not in (None, header['transaction_id'].hex()):
            return ['gone']
        try:
            # All of it: a recipe is counted whole, or not at all.
            blocks = recipes.measure(recipe)
        except recipes.RecipeError as e:
            return ['unreadable', recipe.name, str(e)]
        spread_pages(recipe, recipe.pages, buffers)
        return ['counted', header['transaction_id'].hex(),
                refcounts.facts_of(header, blocks)]


def spread_pages(recipe: _engine.Recipe, pages: int, buffers: Buffers) -> None:
    """Spread the runs of a recipe's first pages.

    :raises Broken: one of them cannot be read
    """
    extents = recipes.Extents(recipe)
    try:
        for page in range(pages):
            buffers.add(extents.runs(page))
    except recipes.RecipeError as e:
        raise Broken(f'{recipe.name}: {e}') from e


def unpacked(payload: bytes) -> Iterator[tuple[Chunk, bytes]]:
    """The chunks of a message with counts.

    :raises Broken: the message has parts of chunks
    """
    if len(payload) % _COUNTED:
        raise Broken('it sent a part of the counts')
    for at in range(0, len(payload), _COUNTED):
        yield (_KEY.unpack_from(payload, at),
               payload[at + _KEY.size:at + _COUNTED])


def summed(pieces: Callable[[], Iterator[bytes]], most: int = CHUNKS
           ) -> Iterator[tuple[Chunk, bytes]]:
    """The counts of all runs: (group, chunk) and its counters, in order.

    If there are more than `most` chunks of counters, the runs are read
    several times.

    :param pieces: reads packed runs, from the first one on
    """
    last = -1, 0
    more = True
    while more:
        counters: dict[Chunk, bytearray] = {}
        more = False
        end: Chunk | None = None       # later chunks are for the next time
        for piece in pieces():
            for key, runs in refcounts.by_chunk(piece).items():
                if key <= last:
                    continue
                if end is not None and key >= end:
                    more = True
                    continue
                counts = counters.setdefault(
                    key, bytearray(records.CHUNK_BYTES))
                _engine.add_runs(counts, *key, runs, 1)
                if len(counters) > most:
                    later = sorted(counters)[-(-most // 2):]
                    end, more = later[0], True
                    for key in later:
                        del counters[key]
        for key in sorted(counters):
            last = key
            yield key, bytes(counters[key])


# -- the process --------------------------------------------------------------

def _work(peer: Peer) -> None:
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            (_, path, partitions), _ = peer.hear()
            with image_repository.Repository(path, threads=0) as repository:
                engine = _engine.Maintenance(repository.handle())
                with contextlib.closing(engine):
                    peer.tell('begun', package_version.version(),
                              repository.repository_id)
                    _obey(peer, engine, partitions)
        except ConnectionError:
            raise
        except (Broken, exceptions.RepositoryError, OSError) as e:
            peer.tell('failed', str(e))


def _obey(peer: Peer, engine: _engine.Maintenance, partitions: int) -> None:
    """Execute the maintainer's orders, until it closes the talk."""
    buffers = Buffers(partitions, lambda part, runs: peer.tell(
        'runs', part, payload=runs))
    while True:
        (what, *which), _ = peer.hear()
        if what == 'spread':
            image_id, txid = which
            peer.tell(*spread(engine, image_id, txid, buffers))
        elif what == 'flush':
            buffers.flush()
            peer.tell('flushed')
        else:
            _sum(peer)


def _pieces(peer: Peer) -> Iterator[bytes]:
    """The runs of the partition that is being added up."""
    for offset in itertools.count(0, PIECE):
        peer.tell('piece', offset)
        _, piece = peer.hear()
        if piece:
            yield piece
        if len(piece) < PIECE:
            return


def _sum(peer: Peer) -> None:
    counts = summed(lambda: _pieces(peer))
    while some := list(itertools.islice(counts, _SENT)):
        peer.tell('counts', payload=b''.join(
            _KEY.pack(*key) + counters for key, counters in some))
    peer.tell('summed')


def main() -> None:
    """Count for the maintainer at the other end of the standard streams."""
    peer = Peer(connection.Connection(os.dup(0)),
                connection.Connection(os.dup(1)))
    os.dup2(2, 1)       # whatever else is printed is no message
    _work(peer)


if __name__ == '__main__':
    main()
