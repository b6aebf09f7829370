# SPDX-License-Identifier: Apache-2.0

"""Checks with Glance whether a user's token opens an image.

A token that opens an image in Glance (``glance.py``) opens it here. So a
stolen compute host reads no more than the tokens on it may. The daemon also
requests the image's hash: Glance's image under this id may be another one than
the image here (``glance_dedup/base/hashes.py``).
"""

import asyncio
import collections
import hashlib
import time

from dedupd.http import glance
from dedupd.http import messages
from dedupd.http import upstream_client
from glance_dedup.base import hashes

#: Seconds for which a permission is remembered.
REMEMBERED = 60.0
#: The most permissions that are remembered.
MAX_COUNT = 10000
#: The most requests that may wait for Glance's answer.
MAX_REQUESTS = 1000

_TIMEOUT = 10.0
# The most requests to Glance at once.
_AT_ONCE = 4


class Tokens:
    """Checks tokens with Glance, and remembers permissions for a while.

    Used in the event loop's thread.

    :param url: Glance's URL, without the version
    :param ca: file with the authorities that verify it; None: the system's
    :raises OSError, ssl.SSLError: if that file cannot be read or is invalid
    """

    def __init__(self, url: str, ca: str | None = None) -> None:
        self._upstream = upstream_client.Upstream(url, ca)
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._allowed: collections.OrderedDict[
            bytes, tuple[float, hashes.Hash | None]] = (
                collections.OrderedDict())
        self._asking: dict[bytes, asyncio.Future] = {}

    async def check(self, token: str, image_id: str) -> hashes.Hash | None:
        """Return if the token opens the image that Glance means.

        :param image_id: well formed
        :returns: the hash of that image; None: Glance has none
        :raises HTTPError: 401, 403 or 404 as Glance answers; 503 if it
            answers anything else, or nothing
        """
        key = hashlib.sha256(token.encode('latin-1')).digest()
        key += image_id.encode()
        until, found = self._allowed.get(key, (0.0, None))
        if until > time.monotonic():
            return found
        future = self._asking.get(key)
        if future is None:
            if len(self._asking) >= MAX_REQUESTS:
                raise messages.HTTPError(
                    503, 'Too many tokens are being checked.')
            began = time.monotonic()
            future = asyncio.create_task(self._ask(token, image_id))
            self._asking[key] = future
            future.add_done_callback(
                lambda done: self._told(key, began, done))
        try:
            status, found = await asyncio.wait_for(asyncio.shield(future),
                                                   2 * _TIMEOUT)
        except (upstream_client.UpstreamError, TimeoutError, ValueError) as e:
            why = str(e).rstrip('.') or 'no answer'
            raise messages.HTTPError(
                503, f'The token cannot be checked: {why}.')
        if status in (401, 403, 404):
            raise messages.HTTPError(
                status, 'Glance does not give this image to this token.')
        if status not in (200, 206):
            raise messages.HTTPError(
                503, f'The token cannot be checked: Glance answered {status}.')
        return found

    def _told(self, key: bytes, began: float,
              future: asyncio.Future) -> None:
        del self._asking[key]
        if future.cancelled() or future.exception() is not None:
            return
        status, found = future.result()
        if status in (200, 206):
            # Count from the request on: the answer may be that old.
            self._allowed[key] = began + REMEMBERED, found
            self._allowed.move_to_end(key)
            while len(self._allowed) > MAX_COUNT:
                self._allowed.popitem(last=False)

    async def _ask(self, token: str, image_id: str
                   ) -> tuple[int, hashes.Hash | None]:
        """Return Glance's status, and the image's hash.

        :raises UpstreamError, TimeoutError: if Glance does not answer
        :raises ValueError: if the answer is not the record of an image
        """
        target = f'/v2/images/{image_id}'
        headers = [(b'X-Auth-Token', token.encode('latin-1')),
                   (b'Accept-Encoding', b'identity')]
        async with self._turns, asyncio.timeout(2 * _TIMEOUT):
            status, _, _ = await glance.ask_first_byte(
                self._upstream, f'{target}/file', headers)
            if status not in (200, 206):
                return status, None
            status, record = await glance.ask_record(
                self._upstream, target, headers)
        return status, hashes.of_record(record)
