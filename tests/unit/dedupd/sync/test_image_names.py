# SPDX-License-Identifier: Apache-2.0

"""Names of images: hostile names, hostile answers, and no names.

The file ``tests/functional/test_dedupd_names.py`` has names from a real
Glance.
"""

import contextlib
import http.server
import json
import os
import threading

import pytest

from dedupd.sync import image_names
from tests.support import clouds
from tests.support import repositories

LIMIT = 60


@contextlib.contextmanager
def answering(answer):
    """Return the URL of a server that gives this answer to every request."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header('Content-Length', str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(
            ('127.0.0.1', 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever,
                                  kwargs={'poll_interval': 0.05})
        thread.start()
        try:
            yield f'http://127.0.0.1:{server.server_port}'
        finally:
            server.shutdown()
            thread.join(LIMIT)


@pytest.fixture
def repository(tmp_path):
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'x', b'x')
        yield repo


def record(image_id='x', **fields):
    return {'id': image_id, 'status': 'active', 'name': 'name', 'size': 1,
            **fields}


def ask(repository, tmp_path, monkeypatch, answer, times=1):
    with answering(answer) as url:
        monkeypatch.setenv('OS_CLIENT_CONFIG_FILE',
                           clouds.write(tmp_path, url))
        names = image_names.Names(repository, clouds.NAME)
        for _ in range(times):
            names.run_once()
    return names


@pytest.mark.parametrize('name, shown', [
    ('Debian 12', 'Debian 12'), ('', None), (None, None),
    ('\x1b[2J\r\n', r'\x1b[2J\r\n'), ('\u202etxt', r'\u202etxt'),
    ('\ud800', r'\ud800'), ('y' * 100_000, 'y' * 255),
    ('\u2066' * 255, (r'\u2066' * 255)[:255])])
def test_a_name_is_printable_and_cut(repository, tmp_path, monkeypatch, name,
                                     shown):
    names = ask(repository, tmp_path, monkeypatch,
                json.dumps({'images': [record(name=name)]}).encode())
    assert names.get('x') == shown


def test_what_is_not_asked_for_is_not_kept(repository, tmp_path, monkeypatch):
    answer = {'images': [record(str(number)) for number in range(1000)]
              + [record()]}
    names = ask(repository, tmp_path, monkeypatch, json.dumps(answer).encode())
    assert names.get('x') == 'name'
    assert names.get('5') is None


def test_a_list_without_end(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(image_names, 'MAX_RECORDS', 100)
    names = ask(repository, tmp_path, monkeypatch, json.dumps({
        'images': [record()] * 10, 'next': '/v2/images?marker=x'}).encode())
    assert names.get('x') == 'name'


@pytest.mark.parametrize('answer', [
    b'', b'[]', b'{"images": 5}', b'{"images": [5]}', b'null',
    b'{"images": [], "next": 5}', b'[' * 100_000,
    json.dumps({'images': [record(name={})]}).encode()])
def test_an_answer_that_is_none(repository, tmp_path, monkeypatch, caplog,
                                answer):
    """An invalid answer is logged once."""
    names = ask(repository, tmp_path, monkeypatch, answer, times=3)
    assert names.get('x') is None
    assert caplog.text.count('are not requested') == 1


def test_no_cloud_of_this_name(repository, monkeypatch, caplog):
    monkeypatch.setenv('OS_CLIENT_CONFIG_FILE', os.devnull)
    names = image_names.Names(repository, 'none')
    names.run_once()
    assert 'are not requested' in caplog.text
