# SPDX-License-Identifier: Apache-2.0

"""The HTTP endpoints, and a table of them for each listener.

``doc/source/reference/openapi.yaml`` describes them. The Unix socket has all
endpoints. The TLS listener has the endpoints that read images, and those that
receive images from other sites. If the daemon is a compute host's cache, both
have the one that lends blocks to neighbours. The status listener has those
that show the daemon's state and change nothing.
"""

import asyncio
from collections.abc import Callable
import contextlib
import functools
import os
from typing import Any

from dedupd.compute.cache import block_lending
from dedupd.endpoints import operations
from dedupd.http import messages
from dedupd.http import ranges
from dedupd.http import routing
from dedupd.serve import image_handlers
from dedupd.serve import replica_receiver
from dedupd.serve import replica_uploads
from dedupd.serve import slice_fetching
from dedupd.status import metrics
from dedupd.status import page
from glance_dedup.base import exceptions
from glance_dedup.base import thread_pool
from glance_dedup.client import slice_client
from glance_dedup.client import wire

_BODY_LIMIT = 64 * 1024
_READY_SECONDS = 5.0
_THREADS = 8
# Threads for calls that wait until no task runs, for up to a minute.
_WAITING = 2


class API:
    """The handlers, and a router for each listener.

    It is made and used in the event loop's thread.

    :param lending: of a compute host's cache; None: this is none
    :param watchers: the scheduler's; called when a task's status changed
    :param stopping: set when long polls are to end
    :param metrics_projects: name projects in ``/metrics``
    """

    def __init__(self, control: operations.Control,
                 reads: image_handlers.Reads,
                 receiving: replica_receiver.Receiving,
                 uploads: replica_uploads.Uploads,
                 slices: slice_fetching.Fetching,
                 lending: block_lending.Lending | None, path: str,
                 watchers: list[Callable[[], None]],
                 stopping: asyncio.Event, *,
                 metrics_projects: bool = False) -> None:
        self._control = control
        self._metrics_projects = metrics_projects
        self._path = path
        self._stopping = stopping
        # Its own threads: the state is shown even if reads hang.
        self._workers = thread_pool.Workers('dedupd-control', _THREADS)
        self._waiting = thread_pool.Workers('dedupd-wait', _WAITING)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        watchers.append(self._watcher)
        self.unix = routing.Router()
        self.tls = routing.Router()
        self.status = routing.Router()
        for router in (self.unix, self.tls):
            self._add_reads(router, reads)
            self._add_receiving(router, receiving, uploads)
            if lending is not None:
                router.add('POST', '/v1/cached/{image_id}/blocks',
                           _translated(lending.blocks),
                           ranges.MAX_BODY_BYTES, lending.admit)
        for router in (self.unix, self.status):
            self._add_state(router)
        self._add_control(self.unix)
        self.unix.add('POST', slice_client.PATH, _translated(slices.fetch),
                      slice_fetching.BODY_BYTES)

    # -- routes ------------------------------------------------------------

    def _add_reads(self, router: routing.Router,
                   reads: image_handlers.Reads) -> None:
        image = '/v1/images/{image_id}'
        router.add('GET', image, _translated(reads.image))
        router.add('GET', f'{image}/recipe', _translated(reads.recipe))
        router.add('POST', f'{image}/blocks', _translated(reads.blocks),
                   ranges.MAX_BODY_BYTES, reads.admit)

    def _add_receiving(self, router: routing.Router,
                       receiving: replica_receiver.Receiving,
                       uploads: replica_uploads.Uploads) -> None:
        router.add('GET', '/v1/replicas', _translated(receiving.terms))
        image = '/v1/replicas/{image_id}'
        router.add('POST', image, _translated(receiving.begin),
                   wire.RECIPE_HEADER_BYTES, receiving.admit_begin)
        for method, path, handler, limit in (
                ('POST', '/lots', receiving.offer,
                 replica_receiver.EXTENTS_BYTES),
                ('POST', '/blocks', receiving.blocks,
                 replica_receiver.FRAMES_BYTES),
                ('POST', '/commit', receiving.commit, 0),
                ('POST', '/upload', uploads.upload,
                 replica_uploads.HEADERS_BYTES),
                ('DELETE', '', receiving.give_up, 0)):
            router.add(method, image + path, _translated(handler), limit,
                       receiving.admit)

    def _add_state(self, router: routing.Router) -> None:
        for path, handler in (
                ('/', self._page), ('/metrics', self._metrics),
                ('/healthcheck', self._live),
                ('/healthcheck/ready', self._ready),
                ('/v1/status', self._shown(self._control.status)),
                ('/v1/history', self._history),
                ('/v1/images', self._shown(self._control.images)),
                ('/v1/projects', self._shown(self._control.projects)),
                ('/v1/volumes', self._shown(self._control.volumes)),
                ('/v1/groups', self._shown(self._control.groups)),
                ('/v1/sharing', self._shown(self._control.sharing))):
            router.add('GET', path, _translated(handler))

    def _add_control(self, router: routing.Router) -> None:
        router.add('GET', '/v1/tasks/{name}', _translated(self._task))
        router.add('POST', '/v1/tasks/{name}', _translated(self._start_task),
                   _BODY_LIMIT)
        router.add('POST', '/v1/images/{image_id}/mark-lost',
                   _translated(self._mark_lost), _BODY_LIMIT)

    # -- handlers ----------------------------------------------------------

    def _run(self, function: Callable, /, *args: Any,
             **kwargs: Any) -> asyncio.Future:
        return asyncio.wrap_future(self._workers.submit(
            functools.partial(function, *args, **kwargs)))

    def _shown(self, function: Callable[[], Any]) -> routing.Handler:
        def make() -> messages.Response:
            return messages.json_response(function())

        async def handler(request: messages.Request) -> messages.Response:
            return await self._run(make)

        return handler

    async def _page(self, request: messages.Request) -> messages.Response:
        return messages.Response(
            200, {'Content-Type': page.CONTENT_TYPE, **page.headers()},
            page.content())

    async def _metrics(self, request: messages.Request) -> messages.Response:
        return messages.Response(
            200, {'Content-Type': metrics.CONTENT_TYPE},
            await self._run(
                metrics.render, self._control.status,
                lambda: self._control.projects()['projects'],
                lambda: self._control.volumes()['volumes'],
                self._metrics_projects))

    async def _live(self, request: messages.Request) -> messages.Response:
        return messages.json_response({'live': True})

    async def _ready(self, request: messages.Request) -> messages.Response:
        """Return whether reads are served, and the repository's disk works."""
        try:
            await asyncio.wait_for(
                self._run(os.stat, os.path.join(self._path, 'images')),
                _READY_SECONDS)
        except (OSError, TimeoutError) as e:
            raise messages.HTTPError(
                503, f'{self._path} does not answer: {e or "in time"}.')
        return messages.json_response({'ready': self._control.ready},
                                      200 if self._control.ready else 503)

    async def _history(self, request: messages.Request) -> messages.Response:
        since = _number(request, 'since', 0)
        return messages.json_response(
            await self._run(self._control.history, since))

    async def _start_task(self, request: messages.Request, name: str
                          ) -> messages.Response:
        arguments = _arguments(request)
        try:
            return messages.json_response(
                await self._run(self._control.start_task, name, **arguments),
                202)
        except exceptions.BusyError as e:
            raise messages.HTTPError(409, str(e))

    async def _task(self, request: messages.Request, name: str
                    ) -> messages.Response:
        """A long poll, which occupies no thread."""
        after = _number(request, 'after', 0)
        deadline = self._loop.time() + min(
            _number(request, 'wait', 0), operations.MAX_WAIT)
        while True:
            self._changed.clear()
            status = await self._run(self._control.task, name, after)
            left = deadline - self._loop.time()
            if status['finished'] >= after or left <= 0 or (
                    self._stopping.is_set()):
                return messages.json_response(status)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    async def _mark_lost(self, request: messages.Request, image_id: str
                         ) -> messages.Response:
        if _arguments(request):
            raise messages.HTTPError(400, 'There are no arguments.')
        try:
            return messages.json_response(await asyncio.wrap_future(
                self._waiting.submit(self._control.mark_lost, image_id)))
        except exceptions.BusyError as e:
            raise messages.HTTPError(409, str(e))

    def _watcher(self) -> None:
        """Called in the scheduler's threads."""
        with contextlib.suppress(RuntimeError):     # the loop has ended
            self._loop.call_soon_threadsafe(self._changed.set)


def _translated(handler: routing.Handler) -> routing.Handler:
    """The handler, with the repository's errors turned into those of HTTP."""

    async def translated(request: messages.Request, **kwargs: str
                         ) -> messages.Response:
        try:
            return await handler(request, **kwargs)
        except exceptions.RepositoryError as e:
            raise image_handlers.http_error(e)

    return translated


def _arguments(request: messages.Request) -> dict[str, Any]:
    arguments = request.json()
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise messages.HTTPError(400, 'The body is not a JSON object.')
    return arguments


def _number(request: messages.Request, name: str, default: float) -> float:
    """A parameter of the query, not negative."""
    value = request.query.get(name)
    if value is None:
        return default
    with contextlib.suppress(ValueError):
        number = float(value)
        if 0 <= number < 1 << 53:
            return number
    raise messages.HTTPError(400, f'{name}: {value[:40]!r} is not a number.')
