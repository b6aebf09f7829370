# SPDX-License-Identifier: Apache-2.0

"""Swift, by python-swiftclient and keystoneauth.

Keystone's catalogue says where Swift is, and may say something else later. So
each login looks at the URL, and no redirect of Swift is followed: the token
goes to the catalogue's URL only.
"""

from collections.abc import Iterator
import contextlib
import http.client
import queue
from typing import Any
from typing import BinaryIO

from keystoneauth1 import exceptions as keystone_exceptions
from keystoneauth1 import loading
from keystoneauth1 import session as session_module
from oslo_config import cfg
import requests
from requests import adapters
from swiftclient import client
from urllib3 import exceptions as urllib3_exceptions

from glance_dedup.base import exceptions
from glance_dedup.base import printable
from glance_dedup.objects import backend_base
from glance_dedup.objects import object_location

#: Keys that are requested at once.
PAGE = 1000


class Swift(backend_base.Backend):
    """A container."""

    def __init__(self, location: object_location.Location,
                 conf: cfg.ConfigOpts, allow_http: bool) -> None:
        """Connect to nothing yet.

        :param conf: the credentials
        :param allow_http: whether to log in, and to send objects, without
            encryption
        :raises AccessDenied: there are none for Swift
        """
        loading.register_auth_conf_options(conf, 'swift')
        try:
            plugin = loading.load_auth_from_conf_options(conf, 'swift')
        except (cfg.Error, keystone_exceptions.ClientException) as e:
            raise exceptions.AccessDenied(
                'the file of credentials has no way to log in in [swift]: '
                f'{printable.printable(str(e))[:200]}') from e
        if plugin is None:
            raise exceptions.AccessDenied(
                'the file of credentials lacks auth_type in [swift]')
        self._container = location.container
        self._session = session_module.Session(
            plugin, verify=location.ca_file or True,
            timeout=backend_base.ANSWER_TIMEOUT)
        self._allow_http = allow_http
        if not allow_http:
            # Also where Keystone's versions or a redirection lead.
            self._session.session.mount('http://', _ThisHost())
        self._options = {'region_name': location.region} if (
            location.region) else {}
        self._ca_file = location.ca_file or None
        # A connection is for one thread at a time. The second ones are for
        # PUT, which has a longer timeout.
        self._idle: tuple[queue.SimpleQueue[_Connection], ...] = (
            queue.SimpleQueue(), queue.SimpleQueue())

    def urls(self) -> Iterator[str]:
        yield getattr(self._session.auth, 'auth_url', None) or ''
        with _errors():
            yield self._session.get_endpoint(
                service_type='object-store', interface='public',
                region_name=self._options.get('region_name')) or ''

    def put(self, key: str, file: BinaryIO, length: int, md5: bytes) -> None:
        with self._connection(is_put=True) as connection:
            connection.put_object(
                self._container, key, file, content_length=length,
                etag=md5.hex(), chunk_size=backend_base.PIECE,
                content_type='application/octet-stream')

    def get(self, key: str, start: int, length: int) -> backend_base.Pieces:
        answer: dict[str, Any] = {}
        with self._connection() as connection:
            _, body = connection.get_object(
                self._container, key, resp_chunk_size=backend_base.PIECE,
                headers={'Range': f'bytes={start}-{start + length - 1}'},
                response_dict=answer)
            if answer.get('status') != 206:
                raise exceptions.UnavailableError(
                    'the server does not read ranges of objects')
            yield from backend_base.pieces(body.resp.raw)
            body.close()

    def size(self, key: str) -> int:
        with self._connection() as connection:
            headers = connection.head_object(self._container, key)
            try:
                return int(headers['content-length'])
            except (KeyError, ValueError) as e:
                raise exceptions.UnavailableError(
                    'the server does not tell how long the object is') from e

    def keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        marker = ''
        while True:
            with self._connection() as connection:
                _, page = connection.get_container(
                    self._container, prefix=prefix, marker=marker,
                    limit=PAGE)
            for one in page:
                yield one['name'], one['bytes']
            if not page or page[-1]['name'] <= marker:
                return
            marker = page[-1]['name']

    def delete(self, key: str) -> None:
        with (contextlib.suppress(backend_base.ObjectNotFound),
              self._connection() as connection):
            connection.delete_object(self._container, key)

    def close(self) -> None:
        for idle in self._idle:
            with contextlib.suppress(queue.Empty):
                while True:
                    idle.get_nowait().close()

    @contextlib.contextmanager
    def _connection(self, is_put: bool = False) -> Iterator['_Connection']:
        """One that is idle, or a new one; after an error it is closed."""
        try:
            connection = self._idle[is_put].get_nowait()
        except queue.Empty:
            connection = _Connection(
                self._allow_http, session=self._session,
                os_options=self._options, cacert=self._ca_file,
                timeout=(backend_base.PUT_TIMEOUT if is_put
                         else backend_base.ANSWER_TIMEOUT),
                # The store repeats requests.
                retries=0)
        try:
            with _errors():
                yield connection
        except _TokenRefused as e:
            connection.close()
            self._log_in_again()
            raise exceptions.UnavailableError(str(e)) from e
        except BaseException:
            connection.close()
            raise
        self._idle[is_put].put(connection)

    def _log_in_again(self) -> None:
        """Forget the token, which has ended or was revoked.

        Idle connections have it, too. If the credentials are not right any
        more either, logging in fails.
        """
        self._session.invalidate()
        self.close()


class _Connection(client.Connection):
    """Sends the token to the URL of the last login only.

    It logs in before its first request, and again when Swift refuses the
    token.
    """

    def __init__(self, allow_http: bool, **options: Any) -> None:
        super().__init__(**options)
        self._allow_http = allow_http

    def get_auth(self) -> tuple[str, str]:
        url, token = super().get_auth()
        if not self._allow_http:
            _require_protected(url or '')
        return url, token

    def http_connection(self, url: str | None = None) -> Any:
        parsed, connection = super().http_connection(url)
        connection.requests_args['allow_redirects'] = False
        return parsed, connection


def _require_protected(url: str) -> None:
    """Refuse a URL to which others on the way could listen.

    :raises UnavailableError: it is one
    """
    if not object_location.is_protected(url):
        raise exceptions.UnavailableError(
            f'{printable.printable(url)[:200]} has no encryption: who is on '
            'the way reads the credentials or the images, and changes what '
            "comes. Have Keystone's catalogue name https, or give "
            "--allow-http to 'glance-dedup object-store attach'")


class _ThisHost(adapters.HTTPAdapter):
    """Sends requests without encryption to this host only."""

    def send(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        _require_protected(request.url)
        return super().send(request, *args, **kwargs)


class _TokenRefused(exceptions.UnavailableError):
    """Swift refuses the token, which may be right no longer."""


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except client.ClientException as e:
        raise _kind(e) from e
    except keystone_exceptions.Unauthorized as e:
        raise backend_base.RefusedError(
            'Keystone refuses the credentials') from e
    except (keystone_exceptions.ClientException,
            requests.RequestException, urllib3_exceptions.HTTPError,
            http.client.HTTPException, OSError) as e:
        raise exceptions.UnavailableError(
            printable.printable(str(e))[:200]) from e


def _kind(error: client.ClientException) -> exceptions.UnavailableError:
    """Return the meaning of an answer, in our words and the server's."""
    said = (f'the server answered {error.http_status}, '
            f'{printable.printable(str(error.http_reason))[:200]}')
    if error.http_status is None:
        said = printable.printable(str(error))[:200]
    if error.http_status == 404:
        return backend_base.ObjectNotFound('there is no such object')
    if error.http_status == 401:
        return _TokenRefused(said)
    if error.http_status == 403:
        return backend_base.RefusedError(said)
    return exceptions.UnavailableError(said)
