# SPDX-License-Identifier: Apache-2.0

"""Continues the traces of requests, in the tree of OSProfiler's spans.

A request belongs to a trace if its header says so, signed with one of the keys
of ``[profiler]``. Any other header is passed on, but begins nothing here. The
request that a span covers is passed on with the span as its parent, signed
with the same key, so that Glance's own span becomes a part of it.

The store of traces may be slow, or away. So a thread sends events to it, from
a bounded queue.
"""

from collections.abc import Awaitable
from collections.abc import Callable
import contextlib
import dataclasses
import logging
import queue
import socket
import threading
from typing import Any
import uuid

from oslo_config import cfg
from oslo_log import log
from osprofiler import _utils       # has the only check of signatures
from osprofiler import drivers
from osprofiler import notifier
from osprofiler import opts
from osprofiler import profiler
from osprofiler import web

from dedupd.http import messages
from dedupd.http import streams
from dedupd.http import upstream_client
from glance_dedup.base import tracing

LOG = log.getLogger(__name__)

#: The most ends and beginnings of spans that wait for the store.
MAX_WAITING = 1000
#: The most seconds for which the end of the daemon waits for the store.
STOP_SECONDS = 4.0

_INFO = web.X_TRACE_INFO.lower().encode()
_HMAC = web.X_TRACE_HMAC.lower().encode()
#: OSProfiler's default, which is public.
_KNOWN_KEY = 'SECRET_KEY'

Facts = dict[str, Any]
Serve = Callable[[messages.Message, Facts], Awaitable[messages.Response]]


def read_options(files: list[str] | None, directories: list[str] | None
                 ) -> cfg.ConfigOpts:
    """The options of OSProfiler, from the daemon's own files.

    :raises ValueError: if they have no key, or a public one
    """
    options = cfg.ConfigOpts()
    opts.set_defaults(options)
    options([], project='dedupd', default_config_files=files or [],
            default_config_dirs=directories or [])
    keys = _utils.split(options.profiler.hmac_keys or '')
    if not keys or _KNOWN_KEY in keys:
        raise ValueError(
            '[profiler] hmac_keys is not set, or has the default of '
            'OSProfiler, with which any user could fill the store of traces. '
            'Set it to the keys of Glance.')
    return options


class Traces:
    """The traces of requests. For the event loop's thread.

    :param options: as :func:`read_options` returns them
    """

    def __init__(self, options: cfg.ConfigOpts) -> None:
        self._options = options.profiler
        self._keys = _utils.split(self._options.hmac_keys)
        self._waiting: queue.Queue[Facts | None] = queue.Queue(MAX_WAITING)
        self._fails = False
        # Its messages below warnings have the URL, perhaps with a password.
        logging.getLogger('osprofiler').setLevel(logging.WARNING)
        notifier.set(self._put)
        self._thread = threading.Thread(
            target=self._tell, args=(options,), name='dedupd-traces',
            daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the queue to the store; wait no longer than STOP_SECONDS."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=STOP_SECONDS / 2)
            self._thread.join(STOP_SECONDS / 2)

    async def follow(self, name: str, message: messages.Message, serve: Serve
                     ) -> messages.Response:
        """Serve a request, in a span if its header continues a trace.

        The span ends when the response is sent.

        :param serve: answers the request; may add facts to those of the span
        """
        begun = self._begin(name, message)
        if begun is None:
            return await serve(message, {})
        span, headers = begun
        try:
            response = await serve(
                dataclasses.replace(message, headers=headers), span.facts)
        except BaseException as e:
            span.fail(type(e))
            span.end()
            raise
        span.facts['status'] = response.status
        if isinstance(response.body, bytes):
            span.end()
        else:
            response.body = _Body(response.body, span)
        return response

    def _begin(self, name: str, message: messages.Message
               ) -> tuple[tracing.Span, list[upstream_client.Header]] | None:
        """A span and the header that makes it a parent; None: no trace."""
        trace = self._verify(message.headers)
        if trace is None:
            return None
        try:
            profiler.init(**trace)
            span = tracing.Span(name, method=message.method,
                                path=message.target.partition('?')[0])
            profiler.clean()
            profiler.init(trace['hmac_key'], trace['base_id'], span.id)
            signed = web.get_trace_id_headers()
        finally:
            # The thread serves others, too.
            profiler.clean()
        return span, [*upstream_client.without(message.headers, _INFO, _HMAC),
                      *((key.encode(), value.encode())
                        for key, value in signed.items())]

    def _verify(self, headers: list[upstream_client.Header]
                ) -> dict[str, str] | None:
        """Return a header's trace and key; None if no key has signed it."""
        info = upstream_client.text(headers, _INFO)
        signature = upstream_client.text(headers, _HMAC)
        if not signature.isascii():     # not compared, but an error
            return None
        found = _utils.signed_unpack(info, signature, self._keys)
        try:
            return found and {
                'hmac_key': found['hmac_key'],
                'base_id': str(uuid.UUID(found['base_id'])),
                'parent_id': str(uuid.UUID(
                    found.get('parent_id') or found['base_id']))}
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    # -- the store -----------------------------------------------------------

    def _put(self, event: Facts) -> None:
        """Queue an event for the thread, or lose it."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._failed('it is slow')

    def _failed(self, why: str) -> None:
        # Neither an exception's text nor the URL: both may have a password.
        if not self._fails:
            LOG.warning('Spans are lost: the store that [profiler] '
                        'connection_string names failed: %s', why)
        self._fails = True

    def _tell(self, options: cfg.ConfigOpts) -> None:
        driver = None
        while (event := self._waiting.get()) is not None:
            try:
                if driver is None:
                    driver = drivers.base.get_driver(
                        self._options.connection_string, context={},
                        project='dedupd', service='cache',
                        host=socket.gethostname(), conf=options)
                driver.notify(event)
                self._fails = False
            except Exception as e:
                self._failed(type(e).__name__)


class _Body:
    """The body of a response; its end is that of a span."""

    def __init__(self, pieces: messages.Pieces, span: tracing.Span) -> None:
        self._pieces = pieces
        self._span = span

    async def asend(self, pour: streams.Pour | None) -> Any:
        """The next piece."""
        try:
            return await self._pieces.asend(pour)
        except StopAsyncIteration:
            raise
        except BaseException as e:
            self._span.fail(type(e))
            raise

    async def aclose(self) -> None:
        """End the body, and the span."""
        try:
            await self._pieces.aclose()
        finally:
            self._span.end()
