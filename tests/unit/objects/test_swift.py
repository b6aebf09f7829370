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


class Keystone(http.server.BaseHTTPRequestHandler):
    """Lists its version 3, and redirects all else to another host."""

    def log_message(self, *arguments):
        """Say nothing."""

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path == self.server.lists:
            body = json.dumps({'versions': {'values': [{
                'id': 'v3.14', 'status': 'stable', 'links': [{
                    'rel': 'self', 'href': f'{ELSEWHERE}/v3'}]}]}}).encode()
            self.send_response(300)
            self.send_header('Content-Type', 'application/json')
        else:
            body = b''
            self.send_response(307)
            self.send_header('Location', f'{ELSEWHERE}{self.path}')
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


@pytest.mark.parametrize('lists, path', [
    (None, '/'), ('/', '/v3/auth/tokens')])
def test_a_keystone_that_redirects(location, file, lists, path):
    """At once, or when it has the password: that goes to no other host."""
    with http.server.HTTPServer(('127.0.0.1', 0), Keystone) as server:
        server.asked, server.lists = [], lists
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            said = why_not(location, file(
                auth_type='password', username='u', password='p',
                project_name='p', user_domain_id='default',
                project_domain_id='default',
                auth_url=f'http://127.0.0.1:{server.server_port}'))
        finally:
            server.shutdown()
            thread.join(60)
    assert path in server.asked
    assert f'{ELSEWHERE}{path} has no encryption' in said


@pytest.mark.parametrize('url, protected', [
    ('https://192.0.2.1/v1', True), ('http://127.0.0.1:9/v1', True),
    ('http://[::1]:9', True), ('http://localhost', True), ('', True),
    ('http://192.0.2.1/v1', False), ('http://[2001:db8::1]', False),
    ('http://localhost.example', False), ('HTTP://192.0.2.1', False),
    ('http://127.0.0.1@192.0.2.1/', False)])
def test_what_is_protected(url, protected):
    assert object_location.is_protected(url) == protected
