# SPDX-License-Identifier: Apache-2.0

"""An image that is sent to a daemon, lot by lot."""

import json
from typing import Any
import urllib.parse

from glance_dedup.client import daemon_connection


class Replica:
    """An image that is being sent to the daemon's repository.

    :ivar offset: the offset in the image from which lots are to be offered
    :ivar exists: the image is there already, and offers are only compared
    :ivar location: the location for Glance once the image is there; None: the
        daemon gives none, as of an image that is there already
    :ivar whole: why all blocks are requested; None: only missing ones are
    :ivar lot_blocks: the most blocks of a lot
    :ivar lot_bytes: the most bytes of a lot's blocks
    :ivar lot_zeros: the most bytes of zeros of a lot
    :ivar lots: how many lots may be under way
    """

    def __init__(self, requester: daemon_connection.Requester, path: str,
                 size: int,
                 facts: dict) -> None:
        self._requester = requester
        self._path = path
        token, whole, location = (
            facts.get(name) for name in ('replica', 'whole', 'location'))
        numbers = [n for name in (
            'offset', 'lot_blocks', 'lot_bytes', 'lot_zeros', 'lots')
            if isinstance(n := facts.get(name), int) and 0 <= n < 1 << 62]
        if (not isinstance(token, str) or len(numbers) != 5
                or not all(numbers[1:4]) or numbers[4] < 2
                or numbers[0] > size
                or not isinstance(whole, str | None)
                or not isinstance(location, str | None)):
            raise requester.bad(
                'the answer does not say how to send the image')
        self._token = token
        self.whole = whole
        self.location = location
        self.exists = facts.get('exists') is True
        (self.offset, self.lot_blocks, self.lot_bytes, self.lot_zeros,
         self.lots) = numbers

    def _send(self, what: str, body: bytes, **query: Any) -> dict:
        parameters = urllib.parse.urlencode(
            {'replica': self._token, **query})
        requester = self._requester
        return requester.parse_json(requester.request(
            'POST', f'{self._path}{what}?{parameters}', body,
            requester.timeout + len(body) / daemon_connection.SLOWEST,
            headers=daemon_connection.BINARY))

    def offer(self, offset: int, end: int, extents: bytes
              ) -> tuple[list[tuple[int, int]], int]:
        """Describe a lot.

        Returns the ranges of the missing blocks, and the blocks' number.

        :param end: the offset behind the lot
        :param extents: as in a recipe
        """
        answer = self._send('/lots', extents, offset=offset)
        found = answer.get('ranges')
        if not isinstance(found, list) or not all(
                isinstance(r, list) and len(r) == 2
                and all(type(n) is int for n in r) for r in found):
            raise self._requester.bad('the answer has no ranges')
        before = offset
        for start, length in found:
            if start < before or not 0 < length <= end - start:
                raise self._requester.bad(
                    f'{length} bytes at {start} are asked for, of a lot from '
                    f'{offset} to {end}')
            before = start + length
        return ([(start, length) for start, length in found],
                daemon_connection.number(answer, 'blocks'))

    def send(self, offset: int, frames: bytes) -> None:
        """Send blocks of the lot at this offset."""
        self._send('/blocks', frames, offset=offset)

    def commit(self) -> dict:
        """Commit the image; returns its upload id there."""
        found = self._send('/commit', b'')
        if not isinstance(found.get('upload_id'), str):
            raise self._requester.bad('the answer has no upload_id')
        return found

    def upload(self, image_id: str, headers: list[tuple[str, str]],
               timeout: float) -> dict:
        """Have the daemon upload the bytes that it received to its Glance.

        :param image_id: the image to which they are to be uploaded
        :param headers: of the request to Glance
        :param timeout: the seconds that Glance has
        :returns: Glance's answer: its ``status``, ``reason``, ``headers`` and
            ``body``
        """
        query = urllib.parse.urlencode({'replica': self._token})
        requester = self._requester
        found = requester.parse_json(requester.request(
            'POST', f'{self._path}/upload?{query}',
            json.dumps({'image': image_id, 'headers': headers}).encode(),
            timeout, headers={'Content-Type': 'application/json'}))
        texts = [found.get(name) for name in ('reason', 'body')]
        lines = found.get('headers')
        if (not isinstance(found.get('status'), int)
                or not 200 <= found['status'] <= 599
                or not all(isinstance(text, str) for text in texts)
                or not isinstance(lines, list) or not all(
                    isinstance(line, list) and len(line) == 2
                    and all(isinstance(text, str) for text in line)
                    for line in lines)):
            raise requester.bad("the answer has no answer of Glance's")
        return found

    def give_up(self) -> None:
        """Let others send the image; they find the blocks that came."""
        query = urllib.parse.urlencode({'replica': self._token})
        self._requester.request_json('DELETE', f'{self._path}?{query}')
