# SPDX-License-Identifier: Apache-2.0

"""Swift is reached with encryption, whatever Keystone says later."""

import contextlib
import http.server
import json
import threading

import pytest

from glance_dedup.base import exceptions
from glance_dedup.objects import credentials
from glance_dedup.objects import object_location
from glance_dedup.objects import object_store
from glance_dedup.objects import swift
from tests.support import ports

#: An address of nobody (RFC 5737).
ELSEWHERE = 'http://192.0.2.1:9'


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """No waits between tries."""
    monkeypatch.setattr(object_store, 'FIRST_WAIT', 0.001)


@pytest.fixture
def location():
    return object_location.parse('swift://container/prefix')


@pytest.fixture
def file(tmp_path):
    """Writes a file of credentials, and gives its path."""
    def write(**options):
        path = tmp_path / 'credentials'
        path.write_text('[swift]\n' + ''.join(
            f'{name} = {value}\n' for name, value in options.items()))
        path.chmod(0o600)
        return str(path)
    return write


def at(url):
    """Credentials that name where Swift is, as a catalogue does."""
    return {'auth_type': 'admin_token', 'token': 't',
            'endpoint': f'{url}/v1/AUTH_a'}


def why_not(location, path, **options):
    """The reason why nothing can be read."""
    with object_store.ObjectStore(location, path, **options) as store:
        with pytest.raises(exceptions.UnavailableError) as refused:
            store.size('key')
    return str(refused.value)


@contextlib.contextmanager
def serve(handler, **attributes):
    """A server on a port of this host.

    :param handler: the class that answers
    :param attributes: what its requests find in ``self.server``
    """
    with http.server.ThreadingHTTPServer(
            ('127.0.0.1', 0), handler) as server:
        server.url = f'http://127.0.0.1:{server.server_port}'
        vars(server).update(attributes)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(60)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with a body."""

    def log_message(self, *arguments):
        """Say nothing."""

    def answer(self, status, body=b'', **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace('_', '-'), value)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_another_url_of_swift(location, file):
    """Each new process, and each new login, looks at it."""
    here = f'http://127.0.0.1:{ports.free_port()}'
    assert 'has no encryption' not in why_not(location, file(**at(here)))
    said = why_not(location, file(**at(ELSEWHERE)))
    assert f'{ELSEWHERE}/v1/AUTH_a has no encryption' in said
    assert "--allow-http to 'glance-dedup object-store attach'" in said


def test_it_was_allowed(location, file):
    path = file(**at(ELSEWHERE))
    with contextlib.closing(swift.Swift(
            location, credentials.options(path, credentials.read(path)),
            True)) as backend, backend._connection():
        pass


class RedirectingKeystone(Handler):
    """Lists its version 3, and redirects all else to another host."""

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path == self.server.lists:
            self.answer(300, json.dumps({'versions': {'values': [{
                'id': 'v3.14', 'status': 'stable', 'links': [{
                    'rel': 'self', 'href': f'{ELSEWHERE}/v3'}]}]}}).encode(),
                Content_Type='application/json')
        else:
            self.answer(307, Location=f'{ELSEWHERE}{self.path}')

    do_POST = do_GET


def password(keystone):
    """Credentials that log in."""
    return {'auth_type': 'v3password', 'username': 'u', 'password': 'p',
            'project_name': 'p', 'user_domain_id': 'default',
            'project_domain_id': 'default', 'auth_url': keystone}


@pytest.mark.parametrize('lists, path', [
    (None, '/'), ('/', '/v3/auth/tokens')])
def test_a_keystone_that_redirects(location, file, lists, path):
    """At once, or when it has the password: that goes to no other host."""
    with serve(RedirectingKeystone, asked=[], lists=lists) as server:
        said = why_not(location, file(
            **password(server.url) | {'auth_type': 'password'}))
    assert path in server.asked
    assert f'{ELSEWHERE}{path} has no encryption' in said


class Keystone(Handler):
    """Gives tokens, and for each login a catalogue."""

    def do_POST(self):
        self.rfile.read(int(self.headers['Content-Length']))
        url = self.server.catalogues.pop(0)
        token = {
            'methods': ['password'], 'expires_at': '2999-01-01T00:00:00Z',
            'issued_at': '2020-01-01T00:00:00Z',
            'user': {'id': 'u', 'name': 'u',
                     'domain': {'id': 'default', 'name': 'Default'}},
            'catalog': [{'type': 'object-store', 'name': 'swift', 'id': 's',
                         'endpoints': [{
                             'id': 'e', 'interface': 'public', 'region': 'r',
                             'region_id': 'r', 'url': url}]}]}
        self.answer(201, json.dumps({'token': token}).encode(),
                    X_Subject_Token=f'token {len(self.server.catalogues)}')


class Swift(Handler):
    """Gives each request the same answer."""

    def do_HEAD(self):
        self.server.asked.append((self.path, self.headers['X-Auth-Token']))
        self.answer(self.server.status, **self.server.headers)

    do_GET = do_PUT = do_DELETE = do_HEAD


def test_another_url_when_the_token_has_ended(location, file, monkeypatch):
    """The client logs in again by itself."""
    with (serve(Swift, asked=[], status=401, headers={}) as here,
          serve(Swift, asked=[], status=404, headers={}) as other,
          serve(Keystone, catalogues=[here.url, other.url]) as keystone):
        monkeypatch.setattr(object_location, 'is_protected',
                            lambda url: not url.startswith(other.url))
        said = why_not(location, file(**password(keystone.url)))
    assert [token for _, token in here.asked] == ['token 1']
    assert not other.asked
    assert f'{other.url} has no encryption' in said


@pytest.mark.parametrize('allow_http', [False, True])
@pytest.mark.parametrize('status', [301, 302, 303, 307, 308])
def test_a_swift_that_redirects(location, file, status, allow_http):
    """The token goes to no other host, not even with encryption."""
    with serve(Swift, asked=[], status=404, headers={}) as other:
        with serve(Swift, asked=[], status=status,
                   headers={'Location': f'{other.url}/key'}) as here:
            said = why_not(location, file(**at(here.url)),
                           allow_http=allow_http)
    assert here.asked
    assert not other.asked
    assert f'the server answered {status}' in said


@pytest.mark.parametrize('url, protected', [
    ('https://192.0.2.1/v1', True), ('http://127.0.0.1:9/v1', True),
    ('http://[::1]:9', True), ('http://localhost', True), ('', True),
    ('http://192.0.2.1/v1', False), ('http://[2001:db8::1]', False),
    ('http://localhost.example', False), ('HTTP://192.0.2.1', False),
    ('http://127.0.0.1@192.0.2.1/', False)])
def test_what_is_protected(url, protected):
    assert object_location.is_protected(url) == protected
