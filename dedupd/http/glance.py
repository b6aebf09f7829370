# SPDX-License-Identifier: Apache-2.0

"""Requests from Glance whether a user may read an image, and its record.

Only Glance knows the policies, an image's owner, and its members. So
the daemon requests one byte of the image with the user's token. A user who
may read that byte may read the rest.
"""

import contextlib
import json
import re
from typing import Any

from dedupd.http import upstream_client
from dedupd.http.upstream_client import find
from dedupd.http.upstream_client import Header

#: The most bytes of an image's record.
_MAX_RECORD = 1 << 20

_FIRST = re.compile('bytes 0-0/([0-9]{1,18})')


async def ask_first_byte(upstream: upstream_client.Upstream, target: str,
                         headers: list[Header]
                         ) -> tuple[int, int | None, list[Header]]:
    """Have Glance judge a request for an image's bytes.

    :param headers: the request's headers, without a range
    :returns: the answer's status; the image's size, None if Glance did not
        give this byte, or not alone; the answer's headers
    :raises UpstreamError: there is no answer, or it broke off
    """
    answer = await upstream.ask('GET', target,
                                [*headers, (b'Range', b'bytes=0-0')])
    with contextlib.closing(answer):
        # The rest of an answer that ignores the range is not read.
        match = _FIRST.fullmatch(
            upstream_client.text(answer.headers, b'content-range'))
        size = None
        if (answer.status == 206 and match is not None
                and find(answer.headers, b'content-encoding') is None
                and len(await answer.read()) == 1
                and not await answer.read()):
            size = int(match[1])
    return answer.status, size, answer.headers


async def ask_record(upstream: upstream_client.Upstream, target: str,
                     headers: list[Header]) -> tuple[int, dict[str, Any]]:
    """Return the status of Glance's answer, and, if 200, an image's record.

    :raises UpstreamError: if there is no answer, or it broke off
    :raises ValueError: if the answer is not the record of an image
    """
    answer = await upstream.ask('GET', target, headers)
    with contextlib.closing(answer):
        text = bytearray()
        while len(text) <= _MAX_RECORD and (piece := await answer.read()):
            text += piece
    if answer.status != 200:
        return answer.status, {}
    with contextlib.suppress(RecursionError):
        record = json.loads(text[:_MAX_RECORD])
        if isinstance(record, dict):
            return answer.status, record
    raise ValueError('Glance does not describe the image')
