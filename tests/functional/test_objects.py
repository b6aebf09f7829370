# SPDX-License-Identifier: Apache-2.0

"""One set of tests for all object stores, on real servers."""

import os
import socket
import threading

import pytest

from glance_dedup.base import exceptions
from glance_dedup.objects import object_location
from glance_dedup.objects import object_store
from glance_dedup.objects import s3
from glance_dedup.objects import swift
from tests.support import objects
from tests.support import ports

pytest_plugins = ['tests.support.object_fixtures']

_SWIFT = [pytest.mark.slow, pytest.mark.needs('swift')]
KINDS = [objects.JuiceGateway,
         pytest.param(objects.Swift, marks=_SWIFT),
         pytest.param(objects.SwiftAsS3, marks=_SWIFT)]

SIZE = (1 << 20) + 7


@pytest.fixture(scope='module', params=KINDS)
def server(request, tmp_path_factory):
    with request.param(tmp_path_factory.mktemp('objects')) as running:
        yield running


class Through:
    """A server whose requests go through a proxy."""

    def __init__(self, server, proxy):
        self._server, self._proxy = server, proxy

    def location(self, prefix):
        return object_location.parse(
            self._server.location(prefix).url,
            self._proxy.url if self._server.kind == 's3' else '')

    def credentials(self, path):
        if self._server.kind == 's3':
            return self._server.credentials(path)
        return objects.write_swift(path, self._proxy.url, self._server.user,
                                   self._server.secret)


@pytest.fixture
def prefix(request):
    return f'tests/{abs(hash(request.node.name)):x}'


@pytest.fixture
def store(server, tmp_path, prefix):
    with object_store.ObjectStore(
            server.location(prefix),
            server.credentials(tmp_path / 'credentials')) as opened:
        yield opened


@pytest.fixture
def through(server, proxy, faults, tmp_path, prefix):
    """The store behind a proxy with the faults of `faults`."""
    behind = Through(server, proxy)
    with object_store.ObjectStore(
            behind.location(prefix),
            behind.credentials(tmp_path / 'through')) as opened:
        # This logs in, where that is a request of its own.
        assert opened.keys(f'{prefix}/nothing/') == []
        faults.seen.clear()
        yield opened


@pytest.fixture
def content():
    return os.urandom(SIZE)


def file_of(path, content):
    path.write_bytes(content)
    return open(path, 'rb')


@pytest.fixture
def source(tmp_path, content):
    with file_of(tmp_path / 'source', content) as opened:
        yield opened


# -- a store's operations --

def test_ranges_are_those_of_the_object(store, source, content, prefix):
    key = f'{prefix}/g/one'
    assert store.put(key, source) == SIZE
    assert store.size(key) == SIZE
    for start, length in ((0, SIZE), (0, 1), (SIZE - 1, 1), (4095, 8192)):
        assert store.get(key, start, length) == content[start:start + length]
    assert store.counts.puts == 1
    assert store.counts.gets == 4
    assert store.counts.sent == SIZE
    assert store.counts.received == SIZE + 2 + 8192
    assert store.counts.repeated == 0


def test_an_object_may_be_empty(store, tmp_path, prefix):
    with file_of(tmp_path / 'empty', b'') as empty:
        assert store.put(f'{prefix}/empty', empty) == 0
    assert store.keys(prefix) == [(f'{prefix}/empty', 0)]


def test_keys_are_those_with_the_prefix(store, source, prefix, monkeypatch):
    monkeypatch.setattr(swift, 'PAGE', 2)
    monkeypatch.setattr(s3, 'PAGE', 2)
    wanted = [(f'{prefix}/g/{number}', SIZE) for number in range(5)]
    for key, _ in wanted:
        store.put(key, source)
    store.put(f'{prefix}/h', source)
    assert store.keys(f'{prefix}/g/') == wanted
    assert store.keys(f'{prefix}/g/3') == wanted[3:4]
    assert store.keys(f'{prefix}/x') == []
    store.delete(wanted[0][0])
    assert store.keys(f'{prefix}/g/') == wanted[1:]


def test_what_is_not_there(store, source, prefix):
    key = f'{prefix}/gone'
    store.put(key, source)
    for _ in range(2):
        store.delete(key)
    with pytest.raises(object_store.ObjectNotFound, match=key):
        store.get(key, 0, 1)
    with pytest.raises(object_store.ObjectNotFound):
        store.size(key)
    assert store.counts.repeated == 0


def test_a_range_behind_the_end(store, source, prefix):
    key = f'{prefix}/short'
    store.put(key, source)
    with pytest.raises(exceptions.UnavailableError):
        store.get(key, SIZE - 1, 2)
    with pytest.raises(exceptions.UnavailableError):
        store.get(key, SIZE, 1)


def test_a_container_that_is_not_there(server, tmp_path, prefix):
    """The whole container may come back, so no object counts as lost."""
    credentials = server.credentials(tmp_path / 'credentials')
    named = server.location(prefix).fields() | {'container': 'missing'}
    with object_store.ObjectStore(
            object_location.from_fields(named), credentials) as other:
        with pytest.raises(exceptions.UnavailableError):
            other.keys(prefix)
        with pytest.raises(exceptions.UnavailableError):
            other.get(f'{prefix}/g', 0, 1)


# -- credentials --

def wrong(server, path):
    if server.kind == 's3':
        return objects.write_s3(path, 'access-key', 'wrong-secret')
    return objects.write_swift(path, server.url, server.user, 'wrong-secret')


def test_credentials_are_refused(server, tmp_path, prefix):
    path = wrong(server, tmp_path / 'credentials')
    with object_store.ObjectStore(server.location(prefix), path) as refused:
        with pytest.raises(object_store.RefusedError) as raised:
            refused.get(f'{prefix}/g', 0, 1)
        assert 'wrong-secret' not in str(raised.value)


def test_credentials_are_replaced_while_it_runs(server, source, tmp_path,
                                                prefix):
    path = wrong(server, tmp_path / 'credentials')
    with object_store.ObjectStore(server.location(prefix), path) as renewed:
        server.credentials(tmp_path / 'credentials')
        assert renewed.put(f'{prefix}/g', source) == SIZE
        wrong(server, tmp_path / 'credentials')
        assert renewed.get(f'{prefix}/g', 0, 9)     # no server refused it


# -- servers and networks that fail --

READS = ['truncate', 'shorten', 'lengthen', 'whole', 500, 502, 503, 429]


@pytest.mark.parametrize('fault', READS)
def test_a_read_is_repeated(through, faults, source, content, prefix, fault):
    key = f'{prefix}/g'
    through.put(key, source)
    faults.plan(fault, fault, methods=('GET',))
    assert through.get(key, 5, 9999) == content[5:5 + 9999]
    assert through.counts.repeated == 2


@pytest.mark.parametrize('fault', READS)
def test_a_read_fails_at_last(through, faults, source, prefix, fault):
    key = f'{prefix}/g'
    through.put(key, source)
    faults.plan(*[fault] * object_store.TRIES, methods=('GET',))
    with pytest.raises(exceptions.UnavailableError, match=key) as raised:
        through.get(key, 5, 9999)
    assert not isinstance(raised.value, object_store.ObjectNotFound)


def test_a_stale_404(through, faults, source, prefix):
    """A 404 is not a transient error: the caller decides."""
    key = f'{prefix}/g'
    through.put(key, source)
    faults.plan(404, methods=('GET',))
    with pytest.raises(exceptions.UnavailableError):
        through.get(key, 0, 1)
    assert through.get(key, 0, 1)


@pytest.mark.parametrize('fault', ['spoil', 'repeat', 'forget', 500, 503])
def test_a_put_is_whole_or_repeated(through, faults, source, content, prefix,
                                    fault):
    key = f'{prefix}/g'
    faults.plan(fault, methods=('PUT',))
    assert through.put(key, source) == SIZE
    assert through.get(key, 0, SIZE) == content


def test_a_put_of_wrong_bytes_fails(through, faults, source, prefix):
    faults.plan(*['spoil'] * object_store.TRIES, methods=('PUT',))
    with pytest.raises(exceptions.UnavailableError):
        through.put(f'{prefix}/g', source)


@pytest.mark.parametrize('fault', ['hang', 'trickle'])
def test_a_server_that_takes_for_ever(through, faults, source, prefix, fault,
                                      monkeypatch):
    key = f'{prefix}/g'
    through.put(key, source)
    monkeypatch.setattr(object_store, 'MIN_TIMEOUT', 0.3)
    monkeypatch.setattr(object_store, 'TRIES', 1)
    # If a server sends no byte at all, the libraries' own limit ends the
    # request.
    monkeypatch.setattr(object_store.backend_base, 'ANSWER_TIMEOUT', 0.5)
    with object_store.ObjectStore(through.location, through._path) as short:
        faults.plan(fault, methods=('GET',))
        with pytest.raises(exceptions.UnavailableError):
            short.get(key, 0, 10000)


def test_nobody_listens(tmp_path):
    path = objects.write_s3(tmp_path / 'credentials', 'a', 'b')
    location = object_location.parse(
        's3://bucket/prefix', f'http://127.0.0.1:{ports.free_port()}')
    with object_store.ObjectStore(location, path) as alone, pytest.raises(
            exceptions.UnavailableError, match='s3://bucket/prefix'):
        alone.size('prefix/g')


@pytest.mark.parametrize('answer', [
    b'', b'\0' * 4096, b'HTTP/1.1 200 OK\r\n\r\n',
    b'HTTP/1.1 206 x\r\nContent-Length: 99999999999\r\n\r\nx',
    b'HTTP/1.1 206 x\r\nContent-Length: -1\r\n\r\nx',
    b'HTTP/1.1 403 \x1b[2J\r\nContent-Length: 0\r\n\r\n',
    b'HTTP/1.1 403 x\r\nContent-Length: 15\r\n\r\n<Error>\x1b[2J<',
    b'HTTP/1.1 500 x\r\n' + b'a: b\r\n' * 2000 + b'\r\n',
    b'HTTP/1.1 206 x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n'])
def test_answers_that_are_none(tmp_path, answer, monkeypatch):
    monkeypatch.setattr(object_store, 'TRIES', 1)
    path = objects.write_s3(tmp_path / 'credentials', 'a', 'b')
    with socket.create_server(('127.0.0.1', 0)) as listener:
        with object_store.ObjectStore(object_location.parse(
                's3://bucket/prefix', 'http://127.0.0.1:%d'
                % listener.getsockname()[1]), path) as asking:
            thread = threading.Thread(
                target=_answer_once, args=(listener, answer), daemon=True)
            thread.start()
            with pytest.raises(exceptions.UnavailableError) as raised:
                asking.get('prefix/g', 0, 5)
            assert '\x1b' not in str(raised.value)
            thread.join(10)


def _answer_once(listener, answer):
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(10)
        connection.recv(65536)
        connection.sendall(answer)
