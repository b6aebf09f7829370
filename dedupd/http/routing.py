# SPDX-License-Identifier: Apache-2.0

"""Finds the handler of a request."""

from collections.abc import Awaitable
from collections.abc import Callable
import contextlib
import dataclasses
import urllib.parse

from dedupd.http import messages

Handler = Callable[..., Awaitable[messages.Response]]


#: Makes the context in which a body is received and its handler runs.
Admit = Callable[..., contextlib.AbstractAsyncContextManager[None]]


@dataclasses.dataclass
class Route:
    """Handler for requests of one method and path; see `Router.add`."""

    handler: Handler
    body_limit: int
    admit: Admit
    sent_bytes: int = 0
    """Bytes of the last response that was made as a whole: an estimate for the
    next one."""


def _admit_all(request: messages.Request, **arguments: str
               ) -> contextlib.AbstractAsyncContextManager[None]:
    return contextlib.nullcontext()


class Router:
    """Finds the handler of a method and a path."""

    def __init__(self) -> None:
        self._routes: list[tuple[list[str], dict[str, Route]]] = []

    def add(self, method: str, path: str, handler: Handler,
            body_limit: int = 0, admit: Admit = _admit_all) -> None:
        """Add a route; GET answers HEAD, too.

        :param path: a segment in braces matches any one segment, and becomes
            a keyword argument of the handler
        :param body_limit: the most bytes of a request's body
        :param admit: called with the handler's arguments before the body is
            received; the context that it returns ends after the handler
        """
        segments = path.split('/')[1:]
        for known, methods in self._routes:
            if known == segments:
                break
        else:
            methods = {}
            self._routes.append((segments, methods))
        methods[method] = Route(handler, body_limit, admit)
        if method == 'GET':
            methods['HEAD'] = methods['GET']

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The route of a request's undecoded path, and its arguments.

        :raises HTTPError: 404 for an unknown path, 405 for a wrong method
        """
        # Split first: an encoded slash does not separate segments.
        try:
            given = [urllib.parse.unquote(s, errors='strict')
                     for s in path.split('/')[1:]]
        except UnicodeDecodeError:
            raise messages.HTTPError(404, 'There is nothing here.')
        for segments, methods in self._routes:
            if len(segments) != len(given):
                continue
            arguments = {}
            for want, have in zip(segments, given):
                if want.startswith('{'):
                    arguments[want[1:-1]] = have
                elif want != have:
                    break
            else:
                if method not in methods:
                    raise messages.HTTPError(
                        405, f'{method} is not possible here.',
                        {'Allow': ', '.join(sorted(methods))})
                return methods[method], arguments
        raise messages.HTTPError(404, 'There is nothing here.')


#: Serves all requests of a listener.
Relay = Callable[[messages.Message], Awaitable[messages.Response]]
