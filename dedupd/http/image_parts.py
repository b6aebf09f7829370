# SPDX-License-Identifier: Apache-2.0

"""Requests for an image's bytes, and the rest of one whose answer broke off.

The rest comes from Glance by a plain request for a range. It counts only if it
is of the same image: the answer must have the size and, if Glance gives one,
the MD5 that the image had. If the bytes that a client already has may be of
another image, they are part of the same request, and are compared with
Glance's before the client gets more.
"""

from collections.abc import AsyncGenerator
import contextlib
import dataclasses
import hashlib
import re

from dedupd.http import messages
from dedupd.http import upstream_client
from dedupd.http.upstream_client import find
from dedupd.http.upstream_client import Header
from dedupd.http.upstream_client import text
from dedupd.http.upstream_client import without
from glance_dedup.base import imageids

#: The target of a request for an image's record, or its bytes.
IMAGE = re.compile(f'/v2/images/({imageids.PATTERN})(/file)?')

_PART = re.compile('bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})')
_LENGTH = re.compile('[0-9]{1,18}')
_MD5 = re.compile('[0-9a-f]{32}')
# A request that has one of these headers is passed on.
_PLAIN = frozenset({
    b'content-range', b'if-match', b'if-none-match', b'if-modified-since',
    b'if-unmodified-since', b'if-range'})


class OtherImage(Exception):
    """Bytes that a client got are not those of Glance's image."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request for the bytes of an image."""

    image_id: str
    target: str
    headers: list[Header]
    """All but the range's header."""
    range: str | None
    """The range's header."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts in an answer about the image that its bytes belong to."""

    size: int
    md5: str | None


@dataclasses.dataclass(frozen=True)
class Sent:
    """Progress of a client through a range of an image."""

    begin: int
    handed: int
    """The end of the client's bytes."""
    end: int
    digest: bytes | None
    """The SHA-256 of the client's bytes. None: they are Glance's."""


def asked(message: messages.Message, headers: list[Header]) -> Asked | None:
    """Return the image bytes that a request is for; None: it is for others.

    :param headers: the request's end-to-end headers
    """
    match = IMAGE.fullmatch(message.target)
    names = [name.lower() for name, _ in headers]
    if (message.method != 'GET' or message.body is not None or match is None
            or not match[2] or not _PLAIN.isdisjoint(names)
            or names.count(b'range') > 1):
        return None
    return Asked(match[1], message.target, without(headers, b'range'),
                 text(headers, b'range') if b'range' in names else None)


def md5_of(headers: list[Header]) -> str | None:
    """Return the MD5 of an answer's image; None: the answer has none."""
    md5 = text(headers, b'content-md5')
    return md5 if _MD5.fullmatch(md5) else None


def span(answer: upstream_client.Answer) -> tuple[int, int, Facts] | None:
    """Return where an answer's bytes begin and end, and facts of their image.

    None: its body is not a part of an image as it is, or of no known length.
    """
    length = text(answer.headers, b'content-length')
    if not _LENGTH.fullmatch(length) or (
            find(answer.headers, b'content-encoding') is not None):
        return None
    begin, end, size = 0, int(length), int(length)
    if answer.status == 206:
        match = _PART.fullmatch(text(answer.headers, b'content-range'))
        if match is None:
            return None
        begin, end, size = int(match[1]), int(match[2]) + 1, int(match[3])
    elif answer.status != 200:
        return None
    if end - begin != int(length) or end > size:
        return None
    return begin, end, Facts(size, md5_of(answer.headers))


async def rest(upstream: upstream_client.Upstream, request: Asked,
               facts: Facts, sent: Sent) -> AsyncGenerator[memoryview, None]:
    """Yield the bytes from `sent.handed` on, after comparing those before.

    :raises OtherImage: if Glance's image has other bytes before
    :raises UpstreamError: if Glance no longer gives the image, or fails
    """
    hasher = hashlib.sha256()
    left = 0 if sent.digest is None else sent.handed - sent.begin
    async with contextlib.aclosing(_part(
            upstream, request, facts, sent.handed - left, sent.end)) as part:
        async for piece in part:
            if left:
                known, piece = piece[:left], piece[left:]
                hasher.update(known)
                left -= len(known)
                if not left and hasher.digest() != sent.digest:
                    raise OtherImage(
                        f'the bytes from {sent.begin} to {sent.handed} are '
                        "not those of Glance's image")
            if piece:
                yield piece


async def _part(upstream: upstream_client.Upstream, request: Asked,
                facts: Facts, offset: int, end: int
                ) -> AsyncGenerator[memoryview, None]:
    """A part of the image, from Glance.

    :raises UpstreamError: if Glance no longer gives it, or fails
    """
    part = f'bytes={offset}-{end - 1}'
    answer = await upstream.ask(
        'GET', request.target, [*request.headers, (b'Range', part.encode())])
    with contextlib.closing(answer):
        skip = _skipped(answer, facts, offset, end)
        left = end - offset
        while left:
            piece = await answer.read()
            if not piece:
                raise upstream_client.UpstreamError(
                    f'Glance ended image {request.image_id} at {end - left}')
            view = memoryview(piece)[skip:skip + left]
            skip -= min(skip, len(piece))
            left -= len(view)
            if view:
                yield view


def _skipped(answer: upstream_client.Answer, facts: Facts, offset: int,
             end: int) -> int:
    """Return how many bytes of an answer come before the range's.

    :raises UpstreamError: if the answer is not of this range of the image
    """
    md5 = text(answer.headers, b'content-md5')
    same = facts.md5 is None or md5 in ('', facts.md5)
    if answer.status == 206 and same and (
            text(answer.headers, b'content-range')
            == f'bytes {offset}-{end - 1}/{facts.size}'):
        return 0
    if answer.status == 200 and same and (
            text(answer.headers, b'content-length') == str(facts.size)):
        return offset
    raise upstream_client.UpstreamError(
        f'Glance answers the request for the rest with {answer.status}')
