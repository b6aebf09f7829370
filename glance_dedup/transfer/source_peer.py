# SPDX-License-Identifier: Apache-2.0

"""Requests to the peer that an image is pulled from, for all its requesters.

Each of them came with its own token, which the peer shows to Glance. If Glance
refuses a token in the middle of the image, because it has expired, the token
of another one takes its place.
"""

from collections.abc import Callable
from collections.abc import Iterator
import logging
import threading

from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import streams
from glance_dedup.client import wire

LOG = logging.getLogger(__name__)

#: Refusals that another token may change.
_TOKEN_REFUSED = (401, 403, 404)


class Peer:
    """Requests one image, with the tokens of all requesters. Thread-safe.

    :param connect: makes a client for a token; None: without one
    :ivar address: the peer's
    :ivar upload_id: the upload that :meth:`recipe` found
    """

    def __init__(self, connect: Callable[[str | None], daemon_client.Client],
                 image_id: str, token: str | None = None) -> None:
        self._connect = connect
        self._image_id = image_id
        self._lock = threading.Lock()
        self._tokens: list[str | None] = [token]
        self._clients = [connect(token)]
        self.address = self._clients[0].address
        self.upload_id = ''

    def __str__(self) -> str:
        return f'{self.address}: image {self._image_id}'

    def add_token(self, token: str | None) -> None:
        """Add the token of another requester of the image."""
        with self._lock:
            if token not in self._tokens:
                self._tokens.append(token)

    @property
    def token(self) -> str | None:
        """The token that requests show now."""
        return self._tokens[0]

    def recipe(self) -> streams.Recipe:
        """The image's recipe; further requests are for its upload alone."""
        recipe = self._clients[-1].recipe(self._image_id)
        self.upload_id = recipe.upload_id
        return recipe

    def blocks(self, ranges: list[tuple[int, int]]
               ) -> Iterator[wire.Frame]:
        """Like Client.blocks; another token replaces a refused one."""
        while True:
            client = self._clients[-1]
            try:
                # The refused request has given no frame.
                yield from client.blocks(self._image_id, self.upload_id,
                                         ranges)
                return
            except client_errors.Refused as e:
                if e.code not in _TOKEN_REFUSED:
                    raise
                self._require_other(client, e)

    def _require_other(self, client: daemon_client.Client,
                       refusal: client_errors.Refused) -> None:
        with self._lock:
            if client is not self._clients[-1]:
                return                  # another thread did it
            if len(self._tokens) == 1:
                raise refusal
            LOG.info('image %s: %s; another token is tried', self._image_id,
                     refusal)
            del self._tokens[0]
            self._clients.append(self._connect(self._tokens[0]))

    def stream(self) -> streams.ImageStream:
        """All bytes of the image, by an ordinary read."""
        # They come over the socket, so that they are counted.
        return self._clients[-1].open_image(
            self._image_id, upload_id=self.upload_id, shares=False)

    @property
    def received(self) -> int:
        """Bytes of all answers that are over, as they came on the wire."""
        return sum(client.received for client in self._clients)

    def interrupt(self) -> None:
        """Break off all requests under way in other threads."""
        for client in self._clients:
            client.interrupt()

    def close(self) -> None:
        """Close the connections. REQUIRES: no request is under way."""
        for client in self._clients:
            client.close()
