# SPDX-License-Identifier: Apache-2.0

"""Spans in the traces of OSProfiler, which other services have begun.

A trace is a tree of spans: the time of a request, and of each part of it.
OSProfiler keeps the trace that runs in a variable of the thread. It is not
required here: without it, or without a trace, a span does nothing. Nothing
imports it, because the code that began the trace has.

A span has a copy of the trace, so that it may end in another thread, and after
the trace: a download goes on after Glance has left its own span.

Spans have ids, sizes and the classes of errors, but no locations and no error
messages, which may have data from a caller.
"""

import copy
import logging
import sys
from typing import Any

LOG = logging.getLogger(__name__)

_MODULE = 'osprofiler.profiler'


class Span:
    """A part of the trace that runs in this thread; it begins when it is made.

    As a context it ends with its block, and notes the class of an exception.
    For one thread at a time.

    :param name: letters and underscores; OSProfiler shows up to the first '-'
    :param facts: the facts known at the beginning

    :ivar facts: the facts at the end; the user may add to it
    :ivar id: the parent of spans below it; '' without a trace
    """

    def __init__(self, name: str, **facts: Any) -> None:
        self.facts: dict[str, Any] = {}
        profiler = sys.modules.get(_MODULE)
        trace = profiler.get() if profiler is not None else None
        self._trace: Any = None
        self.id = ''
        if trace is not None:
            self._trace = copy.deepcopy(trace)
            self._tell(self._trace.start, name, facts)
            self.id = self._trace.get_id() if self._trace else ''

    def __enter__(self) -> 'Span':
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self.fail(kind)
        self.end()

    def fail(self, kind: type[BaseException]) -> None:
        """Note the class of an exception, by which OSProfiler finds errors."""
        self.facts['etype'] = f'{kind.__module__}.{kind.__qualname__}'

    def end(self) -> None:
        """End it. Idempotent."""
        if self._trace is not None:
            self._tell(self._trace.stop, self.facts)
            self._trace = None

    def _tell(self, function: Any, *args: Any) -> None:
        """Tell OSProfiler's store, whose failures must not fail a request."""
        try:
            function(*args)
        except Exception as exc:
            # Its text may have the password of the store.
            self._trace = None
            LOG.warning('A span is lost: the store of traces, [profiler] '
                        'connection_string, failed: %s', type(exc).__name__)
