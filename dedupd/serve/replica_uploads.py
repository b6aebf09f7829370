# SPDX-License-Identifier: Apache-2.0

"""Uploads to Glance that a compute host's cache has sent as a replica.

The cache sent only the blocks that were missing here. The daemon now uploads
all bytes to the Glance of this site, by the request that the cache got from
its client, so Glance judges that client and not the cache. Glance's driver
finds each block here (``cache.rst``, "Uploads of differences").
"""

from collections.abc import AsyncGenerator
import contextlib
from typing import Any

from oslo_log import log

from dedupd.http import messages
from dedupd.http import upstream_client
from dedupd.serve import image_handlers
from dedupd.serve import image_source
from dedupd.serve import replica_receiver
from glance_dedup.base import exceptions
from glance_dedup.base import imageids
from glance_dedup.repository import image_repository

LOG = log.getLogger(__name__)

#: The most bytes of a request's headers, as JSON.
HEADERS_BYTES = 128 << 10

# The most bytes of Glance's answer.
_MAX_ANSWER = 64 << 10
# The headers that belong to a connection, or to the body's framing.
_OURS = (b'host', b'content-length', b'transfer-encoding', b'expect')


class Uploads:
    """The handler of requests that upload a received image to Glance.

    :param upstream: this site's Glance; None: the daemon knows none
    """

    def __init__(self, receiving: replica_receiver.Receiving,
                 reads: image_handlers.Reads,
                 upstream: upstream_client.Upstream | None) -> None:
        self._receiving = receiving
        self._reads = reads
        self._upstream = upstream

    async def upload(self, request: messages.Request, image_id: str
                     ) -> messages.Response:
        """POST /v1/replicas/{image_id}/upload"""
        if self._upstream is None:
            raise messages.HTTPError(
                501, 'This daemon knows no Glance: its option glance_url is '
                     'not set.')
        if not imageids.is_upload(image_id):
            raise messages.HTTPError(
                400, f'{image_id} is not the id of an upload.')
        target, headers = _parse(request.json())
        image = await self._receiving.claim(request, image_id)
        size = image.size
        headers.append((b'Content-Length', b'%d' % size))
        try:
            answer = await self._upstream.ask(
                'PUT', f'/v2/images/{target}/file', headers,
                self._bytes(image_source.Present(image)))
        except upstream_client.UpstreamError as e:
            raise messages.HTTPError(
                502, f'Image {target} could not be uploaded here: {e}')
        with contextlib.closing(answer):
            body = bytearray()
            with contextlib.suppress(upstream_client.UpstreamError):
                while len(body) < _MAX_ANSWER and (
                        piece := await answer.read()):
                    body += piece
        LOG.info('Uploaded %d bytes to image %s, of which the cache sent the '
                 'missing blocks; Glance answers %d', size, target,
                 answer.status)
        return messages.json_response({
            'status': answer.status,
            'reason': answer.reason.decode('latin-1'),
            'headers': [[name.decode('latin-1'), value.decode('latin-1')]
                        for name, value in upstream_client.without(
                            answer.headers, b'content-length')],
            'body': body[:_MAX_ANSWER].decode('latin-1')})

    async def _bytes(self, image: image_source.Present
                     ) -> AsyncGenerator[bytes, None]:
        """All bytes of an image, which is closed then."""
        pieces = self._reads.pieces(image_handlers.Course(image, 0,
                                                          image.size))
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece


def _parse(body: Any) -> tuple[str, list[upstream_client.Header]]:
    """The image that is to get the bytes, and the headers for Glance.

    :raises HTTPError: 400
    """
    if isinstance(body, dict):
        image_id, lines = body.get('image'), body.get('headers')
        if isinstance(image_id, str) and imageids.is_glances(image_id) and (
                isinstance(lines, list) and all(map(_is_header, lines))):
            return image_id, upstream_client.without(
                upstream_client.end_to_end([
                    (name.encode('latin-1'), value.encode('latin-1'))
                    for name, value in lines]), *_OURS)
    raise messages.HTTPError(
        400, 'The body is not {"image": ID, "headers": [[NAME, VALUE], ...]}.')


def _is_header(line: Any) -> bool:
    return isinstance(line, list) and len(line) == 2 and all(
        isinstance(text, str) and text.isascii() for text in line)


def drop_leftovers(repository: image_repository.Repository) -> None:
    """Delete images of a daemon that was killed between commit and claim.

    The id of such an image is random, and it is deleted as soon as it is
    there. A process that has it open can still read all of it (I12).
    """
    for image_id in filter(imageids.is_upload, repository.images()):
        try:
            repository.delete(image_id)
        except exceptions.RepositoryError as e:
            LOG.warning('What is left of an upload stays: %s', e)
