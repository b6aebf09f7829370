# SPDX-License-Identifier: Apache-2.0

"""Receiving images that another site sends.

The sender describes the image lot by lot, in order, and the receiver answers
which ranges are missing. It fingerprints each block that the sender sends, and
hashes the whole image. The commit comes last (``replication.rst``).
The receiver trusts no data, and need not remember anything: if a replica
ends in the middle, its blocks stay as blocks that no image names, and the next
replica finds them.

``upload_rights.py`` says which peers may send which images. An option of the
daemon says in which scope they are stored.

At most ``MAX_COUNT`` replicas run at once. A peer that sends several of them
makes room for one that sends none. Each has at most ``LOTS`` lots, and
the bodies of ``REQUESTS`` requests, in memory. If no request for a replica
comes for ``IDLE_SECONDS``, the receiver keeps its blocks and gives it up.
After ``SILENT_SECONDS`` of silence the next sender may take a replica over.
"""

import array
import asyncio
import collections
from collections.abc import AsyncIterator
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import hashlib
import re
import secrets
import time
from typing import Any

from oslo_log import log

from dedupd.http import messages
from dedupd.serve import upload_rights
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import hashes
from glance_dedup.base import hexids
from glance_dedup.base import imageids
from glance_dedup.base import locations
from glance_dedup.base import scopes
from glance_dedup.base import thread_pool
from glance_dedup.client import wire
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages
from glance_dedup.transfer import image_assembly

LOG = log.getLogger(__name__)

#: The most images that are received at once.
MAX_COUNT = 4
#: The most lots of one image that are under way.
LOTS = 3
# Lots that were stored and are remembered, to be offered again.
_PAST = 8
#: The most requests of one replica that are served at once.
REQUESTS = 4
#: The most bytes of a lot's description, and of one request's frames.
EXTENTS_BYTES = 512 << 10
FRAMES_BYTES = 4 << 20
#: After this many received bytes the blocks are made durable and findable.
SYNC_BYTES = 32 << 20
IDLE_SECONDS = 60.0
SILENT_SECONDS = 10.0
#: Seconds after which a refused sender may try again.
RETRY_SECONDS = 5

_OFFSET = re.compile('[0-9]{1,19}')
_MAX_PROJECT = 255
_ZEROS = memoryview(bytes(1 << 20))
_SWEEP_SECONDS = 5.0


class Bad(Exception):
    """The sent data are invalid; the message is a sentence."""


class Conflict(Exception):
    """The sent data contradict the stored data; the message is a sentence."""


class Outdated(Exception):
    """The sender continues other data than it began: it begins again."""


def _buffer(data: bytes, what: str) -> wire.Buffer:
    return wire.Buffer(data, lambda why: Bad(f'{what}: {why}'))


# -- storing an image ---------------------------------------------------------

class _Hashes:
    """Hashes of an image's bytes, computed here.

    The first one is of the kind that the sender names, which the Glance of the
    sender has recorded. Another one is of the kind that Glance records by
    default.

    :param claimed: the hash that the sender names; None: it names none
    """

    def __init__(self, claimed: hashes.Hash | None) -> None:
        self._claimed = claimed
        kinds = [] if claimed is None else [claimed.name]
        self._hashers = [hashes.new(name) for name in dict.fromkeys(
            [*kinds, hashes.DEFAULT])]

    def update(self, data: Any) -> None:
        """Hash some more bytes."""
        for hasher in self._hashers:
            hasher.update(data)

    def found(self) -> list[hashes.Hash]:
        """Return the hashes of all bytes.

        :raises Conflict: the sender named another hash
        """
        found = [hashes.Hash(hasher.name, hasher.hexdigest())
                 for hasher in self._hashers]
        if self._claimed not in (None, *found):
            raise Conflict(
                f'the bytes that came have the {found[0].name} '
                f'{found[0].value}, and the sender named another one. Check '
                'the image at the sending site with image verify')
        return found


class _Storing(image_assembly.Assembly):
    """Stores a new image.

    :param hashed: None: no hashes of the image are needed
    """

    exists = False

    def __init__(self, repository: image_repository.Repository,
                 transaction: openimages.Transaction,
                 header: wire.RecipeHeader, hashed: _Hashes | None,
                 find: bool = True) -> None:
        super().__init__(transaction, header.fingerprint, header.scope, find)
        self._root = repository.path
        self._hashed = hashed
        self._reader = repository.block_reader()
        # Blocks by fingerprint that the reader cannot read yet.
        self._unsynced: dict[bytes, bytes] = {}
        self.upload_id = transaction.upload_id

    def store(self, lot: image_assembly.Lot) -> int:
        blocks = lot.blocks     # storing forgets those of lots before it
        end = super().store(lot)
        if self._hashed is not None:
            known = {**blocks, **self._unsynced}
            for part in lot.parts:
                self._hash(self._hashed, part, known)
            self._unsynced.update(lot.received)
        return end

    def _hash(self, hashed: _Hashes, part: image_assembly.Blocks | int,
              known: dict[bytes, bytes]) -> None:
        """Hash a stored part of a lot.

        :param known: blocks in memory; the others were here before
        """
        if isinstance(part, int):
            for length in _steps(part):
                hashed.update(_ZEROS[:length])
            return
        here = [number for number, name in enumerate(part.names)
                if name not in known]
        lengths = array.array('I', [part.lengths[number] for number in here])
        data = memoryview(self._reader.read(
            b''.join([part.names[number] for number in here]),
            lengths.tobytes(), array.array(
                'Q', [part.addresses[number] for number in here]).tobytes())
            if here else b'')
        for name, length in zip(part.names, part.lengths):
            if name in known:
                hashed.update(known[name])
            else:
                hashed.update(data[:length])
                data = data[length:]

    def keep(self) -> None:
        """Make the stored blocks durable and findable."""
        self._transaction.keep()
        self._unsynced.clear()

    def commit(self) -> openimages.ImageStat:
        found = [] if self._hashed is None else self._hashed.found()
        if found:
            self._transaction.set_hash(found[0].name,
                                       bytes.fromhex(found[0].value))
        stat = self._transaction.commit()
        for other in found[1:]:
            hashes.record(self._root, stat, other)
        return stat

    def close(self) -> None:
        # A failed or ended transaction can keep nothing.
        with contextlib.suppress(exceptions.RepositoryError):
            self._transaction.keep()
        self._transaction.abort()
        self._reader.close()


class _Plain(_Storing):
    """Stores all received bytes like any other data, and cuts them again.

    It leaves nothing out, and keeps blocks by their offsets: fingerprints
    that are not cryptographic may be equal where blocks are not (I5).
    """

    def __init__(self, repository: image_repository.Repository,
                 transaction: openimages.Transaction,
                 header: wire.RecipeHeader, hashed: _Hashes | None) -> None:
        super().__init__(repository, transaction, header, hashed, find=False)
        self._received: dict[int, bytes] = {}

    def look_up(self, lot: image_assembly.Lot) -> None:
        for part in lot.parts:
            if isinstance(part, image_assembly.Blocks):
                offset = part.offset
                for name, length in zip(part.names, part.lengths):
                    lot.wanted[offset] = name, length
                    offset += length

    def take(self, lot: image_assembly.Lot, offset: int, plain: Any) -> None:
        for at, _, block in self._verified(lot, offset, plain):
            self._received[at] = block

    def store(self, lot: image_assembly.Lot) -> int:
        offset = lot.begin
        for part in lot.parts:
            if isinstance(part, image_assembly.Blocks):
                for length in part.lengths:
                    self._write(self._received.pop(offset))
                    offset += length
            else:
                for length in _steps(part):
                    self._write(_ZEROS[:length])
                offset += part
        return lot.end

    def _write(self, data: Any) -> None:
        self._transaction.write(data)
        if self._hashed is not None:
            self._hashed.update(data)


class _Comparison:
    """Compares an image that is here already with the sent one.

    The image may be here since the sender's last try.

    :raises Conflict: if they are not, or cannot be found to be, the same
    """

    exists = True
    upload_id = None

    def __init__(self, repository: image_repository.Repository,
                 image_id: str, header: wire.RecipeHeader,
                 hashed: _Hashes | None) -> None:
        self._repository = repository
        self._hashed = hashed
        self._fingerprint = header.fingerprint
        self._scope = header.scope
        self._image = repository.open_image(image_id)
        try:
            self._require_comparable(header)
        except Conflict:
            self._image.close()
            raise

    def _require_comparable(self, header: wire.RecipeHeader) -> None:
        if self._image.size != header.size:
            raise Conflict(
                'there is another image of this id here, of '
                f'{self._image.size} bytes, and not {header.size}')
        if not _engine.is_cryptographic(header.fingerprint):
            raise Conflict(
                'there is an image of this id here, and by fingerprints of '
                f'the kind {header.fingerprint} it cannot be proven to be '
                'the same')

    def look_up(self, lot: image_assembly.Lot) -> None:
        offset = lot.begin
        for part in lot.parts:
            if isinstance(part, image_assembly.Blocks):
                self._compare(part)
                offset += sum(part.lengths)
                continue
            for length in _steps(part):
                plain = self._read(length, offset)
                if plain != _ZEROS[:length]:
                    raise self._differs(offset)
                offset += length

    def _read(self, length: int, offset: int) -> memoryview:
        plain = memoryview(self._image.read(length, offset))
        if self._hashed is not None:
            self._hashed.update(plain)
        return plain

    def _compare(self, part: image_assembly.Blocks) -> None:
        plain = self._read(sum(part.lengths), part.offset)
        at = 0
        for name, length in zip(part.names, part.lengths):
            if name != _engine.fingerprint(
                    self._fingerprint, plain[at:at + length], self._scope):
                raise self._differs(part.offset + at)
            at += length

    def _differs(self, offset: int) -> Conflict:
        return Conflict('there is another image of this id here, which '
                        f'differs at offset {offset}')

    def take(self, lot: image_assembly.Lot, offset: int, plain: Any) -> None:
        raise Conflict('no block is missing: the image is here')

    def store(self, lot: image_assembly.Lot) -> int:
        return lot.end

    def keep(self) -> None:
        """Nothing was stored."""

    def commit(self) -> openimages.ImageStat:
        found = [] if self._hashed is None else self._hashed.found()
        stat = self._repository.stat(self._image.stat.image_id)
        if stat.upload_id != self._image.stat.upload_id:
            raise Outdated('it was stored again meanwhile')
        for one in found:
            hashes.record(self._repository.path, stat, one)
        return stat

    def close(self) -> None:
        self._image.close()


def _steps(length: int) -> Iterator[int]:
    """Cut a run of so many zeros into pieces; give their lengths."""
    for at in range(0, length, len(_ZEROS)):
        yield min(len(_ZEROS), length - at)


class Replica:
    """An image that another site sends. Used by one thread at a time.

    After any exception except `Bad`, only `close` may be called.

    :param claimed: the hash of its bytes that the sender names; None: it names
        none
    :ivar stored: the offset behind the lots that need nothing any more
    :ivar whole: the reason why it requests all blocks; None: it requests
        missing ones
    :ivar exists: true if the image is here, and offers are compared with it
    :ivar upload_id: the id that the upload has here; None: the image is here
    """

    def __init__(self, repository: image_repository.Repository,
                 image_id: str, header: wire.RecipeHeader,
                 project: str, claimed: hashes.Hash | None = None) -> None:
        self.image_id = image_id
        self.header = header
        self._lots: collections.OrderedDict[
            int, tuple[image_assembly.Lot, bytes]] = (
                collections.OrderedDict())
        self._past: collections.OrderedDict[int, bytes] = (
            collections.OrderedDict())
        self._end = self.stored = 0
        self._described = self._offered = 0     # blocks; lots
        self._unsynced = 0
        self.whole = image_assembly.why_whole(repository.parameters, header)
        # Glance hashes uploads.
        hashed = None if imageids.is_upload(image_id) else _Hashes(claimed)
        self._image: _Storing | _Comparison
        try:
            transaction = repository.begin(image_id, project, header.scope)
        except exceptions.ImageExists:
            self._image = _Comparison(repository, image_id, header, hashed)
        else:
            storing = _Storing if self.whole is None else _Plain
            self._image = storing(repository, transaction, header, hashed)
        self.exists = self._image.exists
        self.upload_id = self._image.upload_id

    # -- lots -------------------------------------------------------------

    def offer(self, offset: int, extents: bytes
              ) -> tuple[list[tuple[int, int]], int]:
        """Look up the blocks of a lot.

        The same lot may be offered again until it is stored, and for some lots
        behind it: a sender whose connection broke may not know how far it got.

        :returns: the ranges of missing blocks, and the number of these
        """
        digest = hashlib.sha256(extents).digest()
        if offset in self._lots:
            lot, before = self._lots[offset]
            if digest != before:
                raise Outdated(f'another lot was offered at offset {offset}')
        elif offset in self._past:
            if digest != self._past[offset]:
                raise Outdated(f'another lot was stored at offset {offset}')
            return [], 0
        else:
            if offset != self._end:
                raise Conflict(f'a lot is offered at offset {offset}; the '
                               f'next one is at {self._end}')
            if len(self._lots) >= LOTS:
                raise Conflict(f'{LOTS} lots are under way; blocks of that '
                               f'at offset {self.stored} are missing')
            lot = self._parse(offset, extents)
            self._image.look_up(lot)
            self._lots[offset] = lot, digest
            self._end = lot.end
        found = image_assembly.ranges(lot.wanted), len(lot.wanted)
        self._store()
        return found

    def _parse(self, offset: int, extents: bytes) -> image_assembly.Lot:
        """Parse the description of a lot."""
        body = _buffer(extents, f'the lot at offset {offset}')
        lot: list[wire.RecipeExtent] = []
        while body:
            lot.append(wire.read_extent(
                body, self.header, lot[-1].end if lot else offset, 0.0))
        if not lot:
            raise body.bad('it has no extents')
        blocks = sum(extent.blocks for extent in lot)
        zeros = sum(extent.length for extent in lot if not extent.blocks)
        length = lot[-1].end - offset - zeros
        if (blocks > image_assembly.LOT_BLOCKS
                or zeros > image_assembly.LOT_ZEROS
                or length > image_assembly.LOT_BYTES):
            raise body.bad(f'it has {blocks} blocks of {length} bytes, and '
                           f'{zeros} zeros, which is more than a lot may '
                           'have')
        # Without a limit there could be endlessly many short blocks and tiny
        # lots.
        self._described += blocks
        self._offered += 1
        most = self.header.most_blocks
        if self._described > most or self._offered > (
                most + self.header.extents
                + self.header.size // image_assembly.LOT_ZEROS):
            raise Conflict('more blocks, or lots, are described than an '
                           f'image of {self.header.size} bytes may have')
        return image_assembly.lot_of(lot)

    def take(self, offset: int, frames: bytes) -> None:
        """Verify blocks that came for a lot, and store complete lots."""
        if offset not in self._lots:
            raise Conflict(f'no blocks of a lot at offset {offset} are '
                           'missing')
        lot, _ = self._lots[offset]
        body = _buffer(frames, f'the frames for the lot at offset {offset}')
        try:
            for frame in wire.Frames(
                    body, image_assembly.ranges(lot.wanted), 0.0):
                for at, block in frame.blocks():
                    self._image.take(lot, at, block)
                    self._unsynced += len(block)
        except image_assembly.BadBlock as e:
            raise Bad(str(e))
        self._store()

    def _store(self) -> None:
        """Store the lots that need nothing any more."""
        while self._lots:
            offset, (lot, digest) = next(iter(self._lots.items()))
            if lot.wanted:
                break
            self.stored = self._image.store(lot)
            del self._lots[offset]
            self._past[offset] = digest
            if len(self._past) > _PAST:
                self._past.popitem(last=False)
        if self._unsynced >= SYNC_BYTES:
            self._unsynced = 0
            self._image.keep()

    # -- the end ----------------------------------------------------------

    def commit(self) -> openimages.ImageStat:
        """Commit the image.

        :raises ImageExists: if another upload of this id was faster
        """
        if self.stored != self.header.size:
            raise Conflict(f'the image ends at offset {self.header.size}, but '
                           f'the received lots end at {self.stored}')
        return self._image.commit()

    def close(self) -> None:
        """End the replica; its blocks stay for the next one. Idempotent."""
        self._image.close()


# -- the handlers -------------------------------------------------------------

@dataclasses.dataclass(eq=False)
class _Entry:
    """A replica, and its sender."""

    image_id: str
    upload_id: str
    sender: str
    peer: messages.Peer
    strand: thread_pool.Strand
    used: float
    since: float = dataclasses.field(default_factory=time.time)
    token: str = ''
    requests: int = 0
    replica: Replica | None = None

    def silent(self, seconds: float) -> bool:
        return not self.requests and time.monotonic() - self.used >= seconds


class Receiving:
    """The handlers of requests that send images.

    It is made and used in the event loop's thread.

    :param rights: which peers may send which images
    :param scope: the one in which images are stored, of `scopes.CHOICES`;
        None: as the sender has it
    """

    def __init__(self, repository: image_repository.Repository,
                 rights: upload_rights.Rights,
                 scope: str | None = None) -> None:
        self._repository = repository
        self._rights = rights
        self._scope = scope
        self._workers = thread_pool.Workers('dedupd-receive', MAX_COUNT)
        self._entries: dict[str, _Entry] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._dropping: set[asyncio.Task] = set()
        # Committed images, bytes of all received blocks, and replicas that
        # failed.
        self._images = self._bytes = self._failures = 0

    def status(self) -> dict[str, Any]:
        """The figures since the start, and the replicas. Any thread."""
        return {'images': self._images, 'bytes': self._bytes,
                'failures': self._failures, 'under_way': len(self._entries),
                'replicas': [
                    {'image_id': entry.image_id, 'since': int(entry.since),
                     'stored': entry.replica.stored,
                     'size': entry.replica.header.size}
                    # Called in any thread, while replicas come and go.
                    for entry in list(self._entries.values())
                    if entry.replica is not None]}

    # -- admission --------------------------------------------------------

    @contextlib.asynccontextmanager
    async def admit_begin(self, request: messages.Request, image_id: str
                          ) -> AsyncIterator[None]:
        """Check the sender before the header of a replica is received."""
        self._rights.require(request.peer, image_id)
        yield

    @contextlib.asynccontextmanager
    async def admit(self, request: messages.Request, image_id: str
                    ) -> AsyncIterator[None]:
        """Check a request before its body is received, which takes memory."""
        self._rights.require(request.peer, image_id)
        entry, _ = self._found(request, image_id)
        if entry.requests >= REQUESTS:
            raise _wait('Requests before this one are not answered yet.')
        with self._using(entry):
            yield

    def _found(self, request: messages.Request, image_id: str
               ) -> tuple[_Entry, Replica]:
        """Return the named replica, if no other sender has taken it over."""
        entry = self._entries.get(image_id)
        token = request.query.get('replica', '')
        if entry is None or entry.replica is None or not entry.token or (
                not secrets.compare_digest(token.encode(),
                                           entry.token.encode())):
            raise _ended(image_id)
        return entry, entry.replica

    # -- handlers ---------------------------------------------------------

    async def terms(self, request: messages.Request) -> messages.Response:
        """GET /v1/replicas"""
        upload_rights.require_sender(request.peer)
        return messages.json_response({'scope': self._scope})

    async def begin(self, request: messages.Request, image_id: str
                    ) -> messages.Response:
        """POST /v1/replicas/{image_id}"""
        if not imageids.is_valid(image_id):
            raise messages.HTTPError(
                400, 'An image id has 1 to 128 characters of A-Z a-z 0-9 _ -.')
        if not imageids.is_image(image_id):
            raise messages.HTTPError(
                400, f'{image_id} is no image: such ids belong to volumes.')
        upload_id = _hex(request, 'upload')
        sender = _hex(request, 'sender')
        project = request.query.get('project', '')
        if len(project) > _MAX_PROJECT or '\0' in project:
            raise messages.HTTPError(
                400, 'project: it is too long, or holds a NUL.')
        header = _header(request.body)
        self._require_scope(image_id, header.scope, project)
        claimed = _hash(request)
        entry = await self._entry(image_id, upload_id, header, sender,
                                  request.peer)
        with self._using(entry):
            # Requests of the sender's last connection that come from here on
            # are refused; those before take their turn before this. So the
            # answer's offset holds until the sender goes on.
            entry.token = ''
            replica = await self._run(
                entry, self._open, entry, header, project, claimed)
            token = entry.token = secrets.token_hex(16)
            offset = replica.stored
        LOG.info('Receiving image %s, from offset %d of %d%s.', image_id,
                 offset, header.size,
                 f'; whole: {replica.whole}' if replica.whole else '')
        return messages.json_response({
            'replica': token, 'offset': offset,
            'exists': replica.exists, 'whole': replica.whole,
            'location': self._location(replica),
            'lot_blocks': image_assembly.LOT_BLOCKS,
            'lot_bytes': image_assembly.LOT_BYTES,
            'lot_zeros': image_assembly.LOT_ZEROS, 'lots': LOTS}, 201)

    def _require_scope(self, image_id: str, scope: bytes, project: str
                       ) -> None:
        """Refuse an image in a scope that this host would not choose."""
        chosen = scopes.CHOICES if self._scope is None else (self._scope,)
        if scope in [scopes.choose(one, project) for one in chosen]:
            return
        if scope not in (scopes.GLOBAL, scopes.of_project(project)):
            raise messages.HTTPError(
                400, f'Image {image_id} is of project {project!r}, but its '
                     'blocks are in the scope of another one. Copy it on the '
                     'sending host with image copy, and send the copy.')
        raise messages.HTTPError(
            400, f'Image {image_id} is in the scope {scopes.describe(scope)}, '
                 f'and this site stores images in the scope {self._scope} '
                 '(option scope of its daemon). Copy it on the sending host '
                 f'with image copy --scope {self._scope}, and send the copy.')

    def _location(self, replica: Replica) -> str | None:
        """Return the location that Glance is to get once the image is here.

        An image that was here before gives none. Glance has no location of an
        upload or a backup.
        """
        if replica.upload_id is None or (
                upload_rights.needed(replica.image_id)
                is not upload_rights.REPLICATE):
            return None
        return locations.url(self._repository, replica.image_id,
                             replica.upload_id)

    async def offer(self, request: messages.Request, image_id: str
                    ) -> messages.Response:
        """POST /v1/replicas/{image_id}/lots"""
        entry, replica = self._found(request, image_id)
        ranges, blocks = await self._run(
            entry, replica.offer, _offset(request), request.body)
        return messages.json_response({'ranges': ranges, 'blocks': blocks})

    async def blocks(self, request: messages.Request, image_id: str
                     ) -> messages.Response:
        """POST /v1/replicas/{image_id}/blocks"""
        entry, replica = self._found(request, image_id)
        offset = _offset(request)
        self._bytes += len(request.body)
        await self._run(entry, replica.take, offset, request.body)
        return messages.json_response({'stored': replica.stored})

    async def commit(self, request: messages.Request, image_id: str
                     ) -> messages.Response:
        """POST /v1/replicas/{image_id}/commit"""
        if imageids.is_upload(image_id):
            raise messages.HTTPError(
                400, f'{image_id} is the id of an upload, which does not stay '
                     'here. Request upload in place of commit.')
        replica, stat = await self._commit(request, image_id)
        LOG.info('Image %s is received.', image_id)
        return messages.json_response({
            'image_id': image_id, 'upload_id': stat.upload_id,
            'size': stat.size, 'new_bytes': stat.new_bytes,
            'exists': replica.exists})

    async def _commit(self, request: messages.Request, image_id: str
                      ) -> tuple[Replica, openimages.ImageStat]:
        entry, replica = self._found(request, image_id)
        stat = await self._run(entry, replica.commit)
        self._images += not replica.exists
        await self._drop(entry)
        return replica, stat

    async def claim(self, request: messages.Request, image_id: str
                    ) -> openimages.Image:
        """Take the received bytes, as an image without a name.

        The open image keeps its blocks (I12) until it is closed.

        :raises HTTPError: as for a commit
        """
        await self._commit(request, image_id)
        return await asyncio.wrap_future(
            self._workers.submit(self._open_and_delete, image_id))

    def _open_and_delete(self, image_id: str) -> openimages.Image:
        image = self._repository.open_image(image_id)
        try:
            self._repository.delete(image_id, image.stat.upload_id)
        except BaseException:
            image.close()
            raise
        return image

    async def give_up(self, request: messages.Request, image_id: str
                      ) -> messages.Response:
        """DELETE /v1/replicas/{image_id}"""
        entry, replica = self._found(request, image_id)
        await self._drop(entry)
        return messages.json_response({'stored': replica.stored})

    async def stop(self) -> None:
        """End all replicas, and keep their blocks."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        await asyncio.gather(*map(self._drop, list(self._entries.values())),
                             *self._dropping, return_exceptions=True)

    # -- replicas ---------------------------------------------------------

    async def _entry(self, image_id: str, upload_id: str,
                     header: wire.RecipeHeader, sender: str,
                     peer: messages.Peer) -> _Entry:
        """The sender's entry; may take it over from another sender."""
        while (entry := self._entries.get(image_id)) is not None:
            if (entry.sender, entry.peer) != (sender, peer) and (
                    not entry.silent(SILENT_SECONDS)):
                raise _wait(f'Image {image_id} is being received from another '
                            'sender, since ' + time.strftime(
                                '%Y-%m-%d %H:%M:%S UTC.',
                                time.gmtime(entry.since)))
            if entry.replica is not None and (
                    entry.peer, entry.upload_id, entry.replica.header) == (
                        peer, upload_id, header):
                entry.sender = sender
                return entry
            await self._drop(entry)
        self._make_room(peer)
        entry = self._entries[image_id] = _Entry(
            image_id, upload_id, sender, peer,
            thread_pool.Strand(self._workers), time.monotonic())
        if self._sweeping is None:
            self._sweep()
        return entry

    def _make_room(self, peer: messages.Peer) -> None:
        """Make room for a replica of a peer.

        End one whose sender is silent. If there is none, end one of the peer
        that has the most, unless it has only one more than this peer. So
        no peer keeps all others out. One with a running request goes last.
        """
        if len(self._entries) < MAX_COUNT:
            return
        entry = min(self._entries.values(), key=lambda entry: (
            entry.requests > 0, entry.used))
        if entry.silent(SILENT_SECONDS):
            self._give_up(entry)
            return
        counts = collections.Counter(
            entry.peer for entry in self._entries.values())
        entry = min(self._entries.values(), key=lambda entry: (
            -counts[entry.peer], entry.requests > 0, entry.used))
        if counts[entry.peer] < counts[peer] + 2:
            raise _wait(
                f'{MAX_COUNT} images are being received, which are the '
                'most at once.')
        self._give_up(entry, 'another sender, which sends fewer images, has '
                             'its place')

    def _give_up(self, entry: _Entry, why: str = '') -> None:
        self._failures += 1
        silence = time.monotonic() - entry.used
        LOG.warning('Receiving image %s: %s. The received blocks are kept.',
                    entry.image_id,
                    why or f'nothing came for {silence:.0f} seconds')
        # The entry goes at once; its thread closes it when it has the time.
        del self._entries[entry.image_id]
        task = asyncio.get_running_loop().create_task(self._drop(entry))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    def _open(self, entry: _Entry, header: wire.RecipeHeader, project: str,
              claimed: hashes.Hash | None) -> Replica:
        """The replica of an entry, which the sender begins or goes on with."""
        if entry.replica is None:
            entry.replica = Replica(
                self._repository, entry.image_id, header, project, claimed)
        return entry.replica

    @contextlib.contextmanager
    def _using(self, entry: _Entry) -> Iterator[None]:
        entry.requests += 1
        try:
            yield
        finally:
            entry.requests -= 1
            entry.used = time.monotonic()

    async def _run(self, entry: _Entry, function: Callable, *args: Any) -> Any:
        """Call a function in a thread, after earlier ones of this replica."""
        if self._entries.get(entry.image_id) is not entry:
            # It was dropped after the request had been admitted.
            raise _ended(entry.image_id)
        try:
            return await asyncio.shield(asyncio.wrap_future(
                entry.strand.submit(function, *args)))
        except Bad as e:
            raise _error(400, entry, e)
        except Exception as e:
            self._failures += 1
            await self._drop(entry)
            LOG.warning('Receiving image %s: %s', entry.image_id, e)
            if isinstance(e, Conflict):
                raise _error(409, entry, e)
            if isinstance(e, Outdated):
                raise _error(404, entry, e)
            if isinstance(e, exceptions.NoSpaceError):
                raise messages.HTTPError(
                    507, f'{e}. Make room at the receiving site, and send '
                         'the image again.')
            if isinstance(e, exceptions.ImageExists):
                raise messages.HTTPError(409, f'{e}.')
            raise

    async def _drop(self, entry: _Entry) -> None:
        """End a replica, and keep its blocks."""
        if self._entries.get(entry.image_id) is entry:
            del self._entries[entry.image_id]
        entry.token = ''
        # The replica may be about to begin.
        await asyncio.shield(asyncio.wrap_future(
            entry.strand.submit(self._close, entry)))

    @staticmethod
    def _close(entry: _Entry) -> None:
        if entry.replica is not None:
            entry.replica.close()

    def _sweep(self) -> None:
        """Give up replicas without requests."""
        for entry in list(self._entries.values()):
            if entry.silent(IDLE_SECONDS):
                self._give_up(entry)
        self._sweeping = asyncio.get_running_loop().call_later(
            _SWEEP_SECONDS, self._sweep) if self._entries else None


def _ended(image_id: str) -> messages.HTTPError:
    return messages.HTTPError(
        404, f'Image {image_id[:140]!r} is not being received, or not from '
             'this sender any more. Begin again.')


def _wait(sentence: str) -> messages.HTTPError:
    return messages.HTTPError(503, sentence,
                              {'Retry-After': str(RETRY_SECONDS)})


def _error(status: int, entry: _Entry, error: Exception) -> messages.HTTPError:
    return messages.HTTPError(status, f'Image {entry.image_id}: {error}.')


def _hex(request: messages.Request, name: str) -> str:
    value = request.query.get(name, '')
    if not hexids.is_valid(value):
        raise messages.HTTPError(400, f'{name}: 32 hexadecimal digits are '
                                 'needed.')
    return value


def _hash(request: messages.Request) -> hashes.Hash | None:
    if 'hash' not in request.query:
        return None
    name, _, value = request.query['hash'].partition(':')
    claimed = hashes.said(name, value)
    if claimed is None:
        raise messages.HTTPError(
            400, f'hash: {request.query["hash"][:40]!r} is not a hash that '
                 'this daemon can compute.')
    return claimed


def _offset(request: messages.Request) -> int:
    value = request.query.get('offset', '')
    if not _OFFSET.fullmatch(value) or int(value) >= 1 << 62:
        raise messages.HTTPError(
            400, f'offset: {value[:40]!r} is not a number of bytes.')
    return int(value)


def _header(data: bytes) -> wire.RecipeHeader:
    if len(data) != wire.RECIPE_HEADER_BYTES:
        raise messages.HTTPError(
            400, f'The body has {len(data)} bytes; the header of a recipe has '
                 f'{wire.RECIPE_HEADER_BYTES}.')
    try:
        header = wire.RecipeHeader.unpack(data, Bad)
        _engine.fingerprint(header.fingerprint, b'', header.scope)
    except (Bad, ValueError) as e:
        raise messages.HTTPError(
            400, f'This daemon cannot receive the image: {e}. Update it if it '
                 'is older than the sender.')
    return header
