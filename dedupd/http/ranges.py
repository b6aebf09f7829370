# SPDX-License-Identifier: Apache-2.0

"""Parses the ranges of an image that a request names.

They are in its header ``Range`` (RFC 9110, 14), or in its body.
"""

import re
from typing import Any

from dedupd.http import messages

#: Limits of ``POST /v1/images/{id}/blocks``.
MAX_BODY_BYTES = 1024 * 1024
MAX_RANGES = 16384

_RANGE = re.compile('([0-9]{0,19})-([0-9]{0,19})')


def parse(value: str, size: int) -> tuple[int, int] | None:
    """Return where a Range header begins and ends; None: send the whole image.

    The whole image is a valid answer to a request for several ranges.

    :raises messages.HTTPError: 416, if it is malformed or not in the image
    """
    unit, equals, given = value.partition('=')
    if unit.strip().lower() != 'bytes' and equals:
        return None
    bad = messages.HTTPError(
        416, f'The range {value!r} is not one of this image, which has {size} '
        'bytes.', {'Content-Range': f'bytes */{size}'})
    ranges = []
    for text in given.split(','):
        match = _RANGE.fullmatch(text.strip())
        if match is None or match[0] == '-' or (
                match[1] and match[2] and int(match[1]) > int(match[2])):
            raise bad
        ranges.append((match[1], match[2]))
    if len(ranges) > 1:
        return None
    (first, last), = ranges
    if not first:
        begin, end = max(0, size - int(last)), size
    else:
        begin, end = int(first), min(size, int(last) + 1 if last else size)
    if begin >= end:
        raise bad
    return begin, end


def parse_body(body: Any, size: int) -> list[tuple[int, int]]:
    """Return the ranges in the body of ``POST .../blocks``.

    Only the engine can check whether they match blocks.

    :raises messages.HTTPError: 400 or 416
    """
    ranges = body.get('ranges') if isinstance(body, dict) else None
    if not isinstance(ranges, list) or not all(
            isinstance(r, list) and len(r) == 2
            and all(type(n) is int and 0 <= n < 1 << 63 for n in r)
            for r in ranges):
        raise messages.HTTPError(
            400, 'The body is not {"ranges": [[offset, length], ...]}.')
    if len(ranges) > MAX_RANGES:
        raise messages.HTTPError(400, f'{MAX_RANGES} ranges are the most.')
    before = 0
    for offset, length in ranges:
        if not length or offset < before:
            raise messages.HTTPError(
                400, 'The ranges are not in order, or one is empty.')
        before = offset + length
        if before > size:
            raise messages.HTTPError(
                416, f'The image has {size} bytes, and not the range '
                     f'{[offset, length]}.')
    return [(offset, length) for offset, length in ranges]
