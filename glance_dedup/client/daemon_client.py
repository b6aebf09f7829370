# SPDX-License-Identifier: Apache-2.0

"""The client of the daemon: over its Unix socket, or TCP with TLS.

The client does not trust the server: every length is bounded, every read has a
time limit, and binary data is checked (``wire.py``) before a caller gets it.

Sizes and offsets are in bytes, times in seconds.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import http
import json
from typing import Any
import urllib.parse

from glance_dedup.base import scopes
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_connection
from glance_dedup.client import replica_upload
from glance_dedup.client import shared_memory
from glance_dedup.client import streams
from glance_dedup.client import wire

#: The wait that one long poll requests of the daemon.
POLL = 10.0
# Seconds for the daemon to wait for its maintainer, and for its work.
_MARKING = 120.0


class Client(daemon_connection.Requester):
    """Client of a daemon: one method for each operation. Thread-safe."""

    # -- requests for facts -----------------------------------------------

    def status(self) -> dict:
        """The daemon's status, and its repository's."""
        return self.request_json('GET', '/v1/status')

    def history(self, since: int = 0) -> list[dict]:
        """Samples for plots since `since`, seconds since 1970."""
        return self.request_list(f'/v1/history?since={int(since)}', 'samples')

    def images(self) -> list[dict]:
        """All images, each with the sums of its recipe."""
        return self.request_list('/v1/images', 'images')

    def projects(self) -> list[dict]:
        """Return all projects, each with the bytes that it has stored."""
        return self.request_list('/v1/projects', 'projects')

    def groups(self) -> list[dict]:
        """All block groups, each with its size and its live blocks."""
        return self.request_list('/v1/groups', 'groups')

    def sharing(self) -> dict:
        """Return how many blocks the largest images have in common."""
        return self.request_json('GET', '/v1/sharing')

    # -- requests for work ------------------------------------------------

    def start(self, task: str, **arguments: Any) -> int:
        """Ask the daemon to run a task; returns the request's number."""
        number = self.request_json('POST', f'/v1/tasks/{_quoted(task)}',
                                   arguments).get('number')
        if not isinstance(number, int):
            raise self.bad('the answer has no number')
        return number

    def task(self, task: str, after: int = 0, wait: float = 0) -> dict:
        """A task's status; at once, or when request `after` is over."""
        return self.request_json(
            'GET', f'/v1/tasks/{_quoted(task)}?after={after}&wait={wait:g}',
            timeout=self.timeout + wait)

    def wait(self, task: str, number: int,
             progress: Callable[[int, int, str], None] | None = None) -> dict:
        """Wait for the end of a task that `start` requested.

        :param progress: called as `progress(done, total, what)`
        :returns: its ``started``, ``finished``, ``result`` and ``error``
        """
        pause = 0.1
        while True:
            status = self.task(task, number, pause)
            last = status.get('last')
            if isinstance(last, dict) and status.get('finished', 0) >= number:
                return last
            if progress is not None and status.get('state') == 'running':
                progress(daemon_connection.number(status, 'done'),
                         daemon_connection.number(status, 'total'),
                         str(status.get('what', ''))[:200])
            # Short tasks end soon; long ones are polled less often.
            pause = min(pause * 2, 1.0 if progress is not None else POLL)

    def mark_lost(self, image_id: str) -> dict:
        """Declare an image lost whose recipe is damaged."""
        return self.request_json(
            'POST', f'/v1/images/{_quoted(image_id)}/mark-lost', {},
            timeout=self.timeout + _MARKING)

    # -- images -----------------------------------------------------------

    def open_image(self, image_id: str, *, upload_id: str | None = None,
                   offset: int = 0, length: int | None = None,
                   repository_id: str | None = None,
                   timeout: float | None = None, shares: bool = True
                   ) -> streams.ImageStream:
        """Read an image, or a range of it.

        :param upload_id: only if the image is of this upload
        :param length: bytes; the range must lie within the image. None: all
            that follow
        :param repository_id: only if the daemon serves this repository
        :param timeout: seconds until the answer begins
        :param shares: whether the daemon may share memory. Not if something
            in between relays the socket's bytes: it passes on no descriptors
        """
        path = f'/v1/images/{_quoted(image_id)}'
        if upload_id is not None:
            path += f'?upload={_quoted(upload_id)}'
        headers = {}
        if offset or length is not None:
            last = '' if length is None else str(offset + length - 1)
            headers['Range'] = f'bytes={offset}-{last}'
        ranged = bool(headers)
        if shares and self._path is not None and (
                length is None or length >= shared_memory.MIN_SIZE):
            # A daemon that shares no memory answers as if this were not here.
            headers['Connection'] = 'Upgrade'
            headers['Upgrade'] = shared_memory.PROTOCOL
        answer = self.request('GET', path, timeout=timeout,
                              headers=headers)
        try:
            found = answer.header('Dedup-Repository')
            if repository_id is not None and found != repository_id:
                raise answer.bad(f'it serves the repository {found[:100]!r} '
                                 f'and not {repository_id}')
            timeout = self.timeout if timeout is None else timeout
            if answer.status == http.HTTPStatus.SWITCHING_PROTOCOLS:
                return streams.shared(answer, offset, length, timeout)
            size = streams.size_of(answer, offset, length, ranged)
            return streams.ImageStream(answer, size, answer.length or 0,
                                       timeout)
        except BaseException:
            answer.close()
            raise

    def recipe(self, image_id: str) -> streams.Recipe:
        """An image's recipe. The caller closes it."""
        answer = self.request('GET', f'/v1/images/{_quoted(image_id)}/recipe')
        try:
            return streams.Recipe(answer, self.timeout)
        except BaseException:
            answer.close()
            raise

    def blocks(self, image_id: str, upload_id: str,
               ranges: Sequence[tuple[int, int]]) -> Iterator[wire.Frame]:
        """Ranges of an image, in frames, in any order.

        Each byte comes at most once. The caller has to verify the blocks.

        :param ranges: `(offset, length)`, sorted, apart from each other, at
            block boundaries; the daemon takes at most 16384
        """
        body = _ranges(ranges)
        path = (f'/v1/images/{_quoted(image_id)}/blocks'
                f'?upload={_quoted(upload_id)}')
        with self.request('POST', path, body) as answer:
            yield from wire.Frames(answer, ranges, self.timeout)

    def lent_blocks(self, image_id: str, ranges: Sequence[tuple[int, int]],
                    repository_id: str) -> streams.Loan:
        """Ranges of an image that a cache has, or that arrives there.

        Fewer bytes may come. The caller has to verify them, and closes the
        answer.

        :param ranges: as for `blocks`
        :param repository_id: the caller's own repository
        :raises Refused: 409, if the daemon serves that repository itself
        """
        answer = self.request(
            'POST', f'/v1/cached/{_quoted(image_id)}/blocks',
            _ranges(ranges), headers={'Dedup-Repository': repository_id})
        try:
            return streams.Loan(answer, ranges, self.timeout)
        except BaseException:
            answer.close()
            raise

    def replica_scope(self) -> str | None:
        """Return the scope in which the daemon stores images that it gets.

        None: as the sender has them; only its own user may send any then.
        """
        found = self.request_json('GET', '/v1/replicas').get('scope')
        if found not in (*scopes.CHOICES, None):
            raise self.bad(f'the scope {found!r:.80} is unknown')
        return found

    def begin_replica(self, image_id: str, upload_id: str,
                      header: wire.RecipeHeader, sender: str,
                      project: str = '', hash_name: str = '',
                      hash_value: str = '') -> replica_upload.Replica:
        """Begin to send an image to the daemon, or go on.

        :param sender: 32 hexadecimal digits; the same sender may continue
            an upload that it began
        :param project: the project that owns the image
        :param hash_name: name of a hash of the image's bytes; '': none known
        :param hash_value: that hash, in hexadecimal digits
        :raises Refused: 503, if another sender is sending the image; 404 or
            405, if the daemon does not support replicas
        """
        path = f'/v1/replicas/{_quoted(image_id)}'
        query = urllib.parse.urlencode({
            'upload': upload_id, 'sender': sender, 'project': project,
            **({'hash': f'{hash_name}:{hash_value}'} if hash_name else {})})
        return replica_upload.Replica(
            self, path, header.size, self.parse_json(self.request(
                'POST', f'{path}?{query}', header.pack(),
                headers=daemon_connection.BINARY)))


def repository_of(status: dict) -> str:
    """The repository's id in a daemon's status."""
    return _of_repository(status, 'id')


def path_of(status: dict) -> str:
    """The repository's path in a daemon's status."""
    return _of_repository(status, 'path')


def _of_repository(status: dict, name: str) -> str:
    repository = status.get('repository')
    found = repository.get(name) if isinstance(repository, dict) else None
    if not isinstance(found, str):
        raise client_errors.BadAnswer(
            f'the status names no {name} of a repository')
    return found


def _ranges(ranges: Sequence[tuple[int, int]]) -> bytes:
    """The body of a request for ranges of an image."""
    return json.dumps({'ranges': [list(r) for r in ranges]},
                      separators=(',', ':')).encode()


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe='')
