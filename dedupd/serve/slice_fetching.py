# SPDX-License-Identifier: Apache-2.0

"""Slices of cold groups, which the daemon fetches for others (cold.rst).

Only the daemon of a host need send requests to the object store, and one of
them serves all clients that wait for a slice. They get no bytes here: the
slices' files are in the repository, and their readers verify them.

A client can have only those objects fetched that groups name now.
"""

import asyncio
from concurrent import futures
import dataclasses
import functools
import threading
from typing import Any

from dedupd.http import messages
from dedupd.serve import image_handlers
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import hexids
from glance_dedup.base import thread_pool
from glance_dedup.client import slice_client
from glance_dedup.objects import slice_cache
from glance_dedup.repository import image_repository

#: The most bytes of a request's body.
BODY_BYTES = 1024
#: The most seconds that a request waits.
MAX_WAIT = 30.0

# Threads that read groups' headers, and start requests.
_THREADS = 4
_NUMBERS = {'group': (0, (1 << 32) - 1), 'first': (0, (1 << 32) - 1),
            'count': (1, slice_client.MAX_COUNT), 'wait': (0, MAX_WAIT)}


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The parsed body of a request."""

    repository: str
    object: str
    group: int
    first: int
    count: int
    wait: float


class Fetching:
    """The handler of requests for slices.

    It is made and used in the event loop's thread.

    :param stopping: set when waiting is to end
    """

    def __init__(self, repository: image_repository.Repository,
                 stopping: asyncio.Event) -> None:
        self._repository = repository
        self._stopping = stopping
        self._workers = thread_pool.Workers('dedupd-slices', _THREADS)
        # One thread at a time uses it.
        self._lock = threading.Lock()
        self._engine = _engine.Maintenance(repository.handle())
        if repository.has_cold:
            self._workers.submit(repository.slices.prepare)

    async def fetch(self, request: messages.Request) -> messages.Response:
        """POST /v1/slices"""
        own = {'Dedup-Repository': self._repository.repository_id}
        asked = _parse(request.json())
        if asked.repository != self._repository.repository_id:
            raise messages.HTTPError(
                409, 'This daemon serves another repository, '
                f'{self._repository.path}.')
        try:
            there = await self._have(asked)
        except exceptions.RepositoryError as e:
            error = image_handlers.http_error(e)
            raise messages.HTTPError(error.status, error.message, own)
        except messages.HTTPError as e:
            raise messages.HTTPError(e.status, e.message, own)
        response = messages.json_response({'there': there},
                                          200 if there else 202)
        response.headers |= own
        return response

    async def _have(self, asked: _Asked) -> bool:
        """Have slices fetched, and wait; return whether they are there."""
        requests = await asyncio.wrap_future(self._workers.submit(
            functools.partial(self._begin, asked)))
        if requests and asked.wait:
            waiting = [asyncio.wrap_future(one) for one in requests]
            stopped = asyncio.ensure_future(self._stopping.wait())
            arrived = asyncio.ensure_future(asyncio.wait(waiting))
            try:
                await asyncio.wait([arrived, stopped], timeout=asked.wait,
                                   return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopped.cancel()
                arrived.cancel()
                for one in waiting:
                    # All clients that an error concerns may have left.
                    one.add_done_callback(_look)
        for one in requests:
            if not one.done():
                return False
            one.result()
        return True

    def _begin(self, asked: _Asked) -> list[futures.Future[None]]:
        """The requests for slices that are missing. Runs in a thread."""
        slices = self._repository.slices
        with self._lock:
            facts = self._engine.group_facts(asked.group)
        object_id = bytes.fromhex(asked.object)
        if not facts['is_cold'] or facts['object'] != object_id:
            raise messages.HTTPError(
                409, f'Group {asked.group:08x} is not in the object '
                f'{asked.object}.')
        if (asked.first + asked.count - 1) * slice_cache.SLICE >= (
                facts['end']):
            raise messages.HTTPError(
                400, f'The object of group {asked.group:08x} has '
                f'{facts["end"]} bytes, and not so many slices.')
        missing = slices.missing(asked.group, object_id, facts['end'],
                                 asked.first, asked.count)
        if asked.wait:
            return slices.request(missing)
        slices.announce(missing)
        return []


def _look(future: asyncio.Future[None]) -> None:
    """Mark an error as seen, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


def _parse(body: Any) -> _Asked:
    """:raises messages.HTTPError: 400"""
    names = [field.name for field in dataclasses.fields(_Asked)]
    if not isinstance(body, dict) or set(body) != set(names):
        raise messages.HTTPError(
            400, f'The body is no object of {", ".join(names)}.')
    for name in ('repository', 'object'):
        if not isinstance(body[name], str) or not hexids.is_valid(body[name]):
            raise messages.HTTPError(
                400, f'{name}: not 32 hexadecimal digits.')
    for name, (low, high) in _NUMBERS.items():
        kinds = (int, float) if name == 'wait' else (int,)
        if type(body[name]) not in kinds or not low <= body[name] <= high:
            raise messages.HTTPError(
                400, f'{name}: not a number from {low} to {high:g}.')
    return _Asked(**body)
