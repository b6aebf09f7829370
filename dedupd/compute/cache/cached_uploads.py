# SPDX-License-Identifier: Apache-2.0

"""Uploads through the cache, which sends only their differences.

Nova sends a server's snapshot to the proxy as a plain upload. The proxy keeps
it, sends the blocks that the storing host lacks, and has that host's daemon
upload the rest (``cache.rst``, "Uploads of differences"). The client's token
goes with it, so Glance judges the client. Until Glance gets the request to
take the bytes, the plain upload is still possible: its bytes are in a file.
"""

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Callable
import contextlib
import errno
import os
import shutil
import tempfile
from typing import Any

from oslo_log import log

from dedupd.http import glance
from dedupd.http import limited
from dedupd.http import messages
from dedupd.http import upstream_client
from dedupd.http.upstream_client import Header
from dedupd.http.upstream_client import without
from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.base import thread_pool
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.repository import image_repository
from glance_dedup.repository import openimages
from glance_dedup.transfer import image_sending

LOG = log.getLogger(__name__)
_STRANGERS = limited.Log(LOG)

#: The most uploads that are kept at once. Further ones are passed on.
MAX_COUNT = 4
#: A shorter upload is passed on.
MIN_SIZE = 1 << 20
#: The share of the disk that uploads leave free at least.
FREE_SHARE = 0.05
#: The seconds that Glance has for an upload, besides one for so many bytes.
PATIENCE, SLOWEST = 600.0, 8 << 20

# Bytes that are kept in one step, and read for a plain upload.
_PIECE = 1 << 20
_POLLS = 60     # seconds
# Glance's answers to the later one of two uploads of an image.
_TAKEN = (409, 410)

# Headers of the client's connection with us, or of the body.
_OF_UPLOAD = (b'host', b'expect', b'content-length', b'transfer-encoding')
_OF_BODY = (*_OF_UPLOAD, b'content-type', b'accept', b'accept-encoding')


class Kept:
    """The bytes of an upload that have come. Used by one thread at a time.

    They are in a file without a name, and in a transaction, which stores the
    blocks that are not here yet. If the transaction fails, the file is enough.

    :ivar size: their number
    """

    def __init__(self, repository: image_repository.Repository, scope: str,
                 project: str) -> None:
        self._repository = repository
        self._file = tempfile.TemporaryFile(dir=repository.path)
        self.size = 0
        self._transaction: openimages.Transaction | None = None
        with self._failing():
            self._transaction = repository.begin(imageids.upload_id(), project,
                                                 scope)

    @contextlib.contextmanager
    def _failing(self) -> Any:
        """End the transaction if it fails."""
        try:
            yield
        except exceptions.RepositoryError as e:
            _STRANGERS.warning('An upload is passed on whole: %s', e)
            self._abort()

    def _abort(self) -> None:
        found, self._transaction = self._transaction, None
        if found is not None:
            found.abort()

    def write(self, data: bytes) -> None:
        """Keep some more bytes.

        :raises OSError: there is no room for them; the earlier ones stay
        """
        usage = shutil.disk_usage(self._repository.path)
        if usage.free < 2 * len(data) + FREE_SHARE * usage.total:
            raise OSError(errno.ENOSPC, 'the disk of the cache is nearly full')
        os.pwrite(self._file.fileno(), data, self.size)
        self.size += len(data)
        if self._transaction is not None:
            with self._failing():
                self._transaction.write(data)

    def read(self, offset: int) -> bytes:
        """Return some of the bytes from an offset on."""
        return os.pread(self._file.fileno(), min(_PIECE, self.size - offset),
                        offset)

    def image(self) -> openimages.Image | None:
        """All bytes, as an image without a name; None: that has failed.

        The open image keeps its blocks (I12) until it is closed.
        """
        with self._failing():
            if self._transaction is not None:
                stat = self._transaction.commit()
                self._transaction = None
                image = self._repository.open_image(stat.image_id)
                self._repository.delete(stat.image_id)
                return image
        return None

    def close(self) -> None:
        """Forget the bytes. Idempotent."""
        self._abort()
        self._file.close()


class Uploads:
    """Takes uploads for Glance. Used in the event loop's thread.

    :param connect: makes a client of the storing host's daemon, as an operator
    """

    def __init__(self, repository: image_repository.Repository,
                 upstream: upstream_client.Upstream,
                 connect: Callable[[], daemon_client.Client]) -> None:
        self._repository = repository
        self._upstream = upstream
        self._connect = connect
        self._workers = thread_pool.Workers('dedupd-upload', MAX_COUNT)
        self._under_way = self._sent = self._images = self._bytes = 0
        self._plain = 0
        self._last_failure = ''

    def status(self) -> dict[str, Any]:
        """The figures since the start. Any thread."""
        return {'images': self._images, 'bytes': self._bytes,
                'sent_bytes': self._sent, 'under_way': self._under_way,
                'plain': self._plain, 'last_failure': self._last_failure}

    async def put(self, message: messages.Message, image_id: str,
                  headers: list[Header], relay: Callable[..., Any]
                  ) -> messages.Response:
        """Answer the upload of an image's bytes.

        :param headers: the end-to-end headers for Glance
        :param relay: passes a body on to Glance, and gives the answer
        """
        assert message.body is not None
        record = await self._record(message.target, headers)
        if self._under_way >= MAX_COUNT or record.get(
            'status') != 'queued' or (
                record.get('id') != image_id):
            return await relay(message.body)    # Glance sends the error
        self._under_way += 1
        kept = None
        try:
            try:
                kept = await self._run(self._begin, record)
            except (OSError, client_errors.ClientError,
                    exceptions.RepositoryError) as e:
                self._failed(image_id, e)
                self._plain += 1
                return await relay(message.body)
            rest = await self._keep(kept, message.body)
            answer, unsure = None, False
            if rest is None and kept.size >= MIN_SIZE:
                answer, unsure = await self._send(
                    kept, image_id, message.target, headers)
            if answer is None:
                self._plain += 1
                answer = await relay(_joined(self._run, kept, rest,
                                             message.body))
                if unsure and answer.status in _TAKEN:
                    answer = await self._rather_settled(
                        answer, kept.size, message.target, headers)
            return answer
        finally:
            self._under_way -= 1
            if kept is not None:
                await asyncio.shield(self._run(kept.close))

    def _run(self, function: Callable, *args: Any) -> asyncio.Future:
        return asyncio.wrap_future(self._workers.submit(function, *args))

    async def _record(self, target: str, headers: list[Header]
                      ) -> dict[str, Any]:
        """Glance's record of the image, for this client; {}: it gives none."""
        try:
            return (await glance.ask_record(
                self._upstream, target.removesuffix('/file'),
                without(headers, *_OF_BODY)))[1]
        except (upstream_client.UpstreamError, ValueError):
            return {}

    def _begin(self, record: dict[str, Any]) -> Kept:
        """Begin to keep an upload, in the scope that the storing host chooses.

        In another scope the fingerprints would name nothing there, or blocks
        of other projects.

        :raises ClientError: the storing host does not answer, or chooses none
        """
        owner = str(record.get('owner') or '')
        with self._connect() as client:
            scope = client.replica_scope()
            if scope is None:
                raise client.bad('the daemon there takes no uploads: its '
                                 'option upload_from is not set')
        return Kept(self._repository, scope, owner)

    async def _keep(self, kept: Kept, body: AsyncGenerator[bytes, None]
                    ) -> bytes | None:
        """Keep the body; or return the piece for which there is no room."""
        pieces: list[bytes] = []
        length = 0

        async def flush() -> bytes | None:
            nonlocal length
            data = b''.join(pieces)
            pieces.clear()
            length = 0
            try:
                await self._run(kept.write, data)
            except OSError as e:
                self._last_failure = f'{e.strerror}'
                _STRANGERS.warning('An upload is passed on as it comes: %s', e)
                return data
            return None

        async for piece in body:
            pieces.append(bytes(piece))
            length += len(piece)
            if length >= _PIECE and (rest := await flush()) is not None:
                return rest
        return await flush() if pieces else None

    async def _send(self, kept: Kept, image_id: str, target: str,
                    headers: list[Header]
                    ) -> tuple[messages.Response | None, bool]:
        """Return Glance's answer; None: it has none of the bytes yet.

        The second value: whether the storing host may still send them.
        """
        lines = [(name.decode('latin-1'), value.decode('latin-1'))
                 for name, value in without(headers, *_OF_UPLOAD)]
        try:
            sent, answer = await self._run(self._upload, kept, image_id, lines)
        except image_sending.Unsure as e:
            self._failed(image_id, e)
            return await self._settled(kept.size, target, headers), True
        except (client_errors.ClientError, exceptions.RepositoryError, OSError,
                ValueError) as e:
            self._failed(image_id, e)
            return None, False
        self._images += 1
        self._bytes += kept.size
        self._sent += sent
        return messages.Response(
            answer['status'], reason=answer['reason'].encode('latin-1'),
            relayed=[(name.encode('latin-1'), value.encode('latin-1'))
                     for name, value in answer['headers']],
            body=answer['body'].encode('latin-1')), False

    def _upload(self, kept: Kept, image_id: str,
                headers: list[tuple[str, str]]) -> tuple[int, dict]:
        """Send missing blocks. In a thread."""
        image = kept.image()
        if image is None:
            raise exceptions.StorageError('the upload could not be kept here')
        with image, self._connect() as client:
            sent, answer = image_sending.upload(
                self._repository, image, client, image_id, headers,
                PATIENCE + kept.size / SLOWEST)
        return sent.sent_bytes, answer

    def _failed(self, image_id: str, error: Exception) -> None:
        self._last_failure = f'image {image_id}: {error}'
        _STRANGERS.warning('The upload of image %s is passed on whole: %s',
                           image_id, error)

    async def _settled(self, size: int, target: str, headers: list[Header]
                       ) -> messages.Response | None:
        """Return the result of an upload of which no answer came."""
        for _ in range(_POLLS):
            record = await self._record(target, headers)
            if record.get('status') == 'active' and (
                    record.get('size') == size):
                return messages.Response(204)
            if record.get('status') != 'saving':
                break
            await asyncio.sleep(1)
        return None

    async def _rather_settled(self, answer: messages.Response, size: int,
                              target: str, headers: list[Header]
                              ) -> messages.Response:
        """Return the result of the storing host's request, or else the answer.

        :param answer: to the plain upload: that request came to Glance just
            before
        """
        settled = await self._settled(size, target, headers)
        if settled is None:
            return answer
        if not isinstance(answer.body, bytes):
            await answer.body.aclose()
        return settled


async def _joined(run: Callable, kept: Kept, rest: bytes | None,
                  body: AsyncGenerator[bytes, None]
                  ) -> AsyncGenerator[bytes, None]:
    """Yield the kept bytes of a body, and then the rest of it."""
    offset = 0
    while offset < kept.size:
        data = await run(kept.read, offset)
        offset += len(data)
        yield data
    if rest is not None:
        yield rest
        async with contextlib.aclosing(body):
            async for piece in body:
                yield piece
