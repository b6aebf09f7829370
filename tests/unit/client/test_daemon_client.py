# SPDX-License-Identifier: Apache-2.0

"""The daemon's client, against faulty and hostile servers."""

import itertools
import os
import socket
import struct
import threading
import time

from lz4 import block as lz4_block
import pytest
import xxhash
import zstandard

from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.client import daemon_connection
from glance_dedup.client import wire
from tests.support import daemons
from tests.support import repositories

UPLOAD = 'ab' * 16
NONE, LZ4, ZSTD = range(3)


@pytest.fixture
def path(tmp_path):
    return tmp_path / 's'


def client_of(path, **options):
    options.setdefault('timeout', 20)
    return daemon_client.Client(f'unix:{path}', **options)


def sends(*pieces):
    """Return a server that sends these bytes and closes the connection."""
    def behave(connection, request):
        for piece in pieces:
            connection.sendall(piece)
    return behave


def chunked(body, end=b'0\r\n\r\n', **headers):
    """Return an answer in chunks; without an `end` it is incomplete."""
    head = daemons.answer(Content_Length=None, Transfer_Encoding='chunked',
                          **headers)
    return head + b'%x\r\n%b\r\n' % (len(body), body) + end


# -- addresses ----------------------------------------------------------------

@pytest.mark.parametrize('address', [
    '', '/run/s', 'unix:', 'unix:a\0b', 'http://host:80', 'https://',
    'https://host/path', 'https://host?query', 'https://user@host',
    'https://host:port', 'https://ho st', 'https://host\r\nX: y',
    'ftp://host'])
def test_bad_addresses(address):
    with pytest.raises(ValueError):
        daemon_client.Client(address)


@pytest.mark.parametrize('token', ['a\r\nX-Roles: admin', 'a\nb', '\xe4'])
def test_bad_tokens(path, token):
    with pytest.raises(ValueError):
        client_of(path, token=token)


def test_nobody_answers(path):
    with pytest.raises(client_errors.DaemonUnavailable, match=str(path)):
        client_of(path).status()
    path.touch()
    with pytest.raises(client_errors.DaemonUnavailable):
        client_of(path).status()
    with pytest.raises(client_errors.DaemonUnavailable):
        client_of('/' + 'x' * 200).status()
    with socket.create_server(('127.0.0.1', 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(client_errors.DaemonUnavailable):
        daemon_client.Client(f'https://127.0.0.1:{port}').status()


# -- answers ------------------------------------------------------------------

def test_requests_share_a_connection(path):
    def behave(connection, request):
        for _ in range(3):
            connection.sendall(daemons.answer(b'{"a": 1}'))
            connection.recv(65536)

    with daemons.scripted(path, behave) as requests, client_of(path) as client:
        for _ in range(3):
            assert client.status() == {'a': 1}
        assert len(requests) == 1
        assert requests[0].startswith(b'GET /v1/status HTTP/1.1\r\n')


@pytest.mark.parametrize('left', [b'', b'HTTP/1.1 200 OK\r\n'])
def test_a_stale_connection_is_not_used(path, left):
    """A connection is dropped if the server closed it or sent extra bytes."""
    behave = sends(daemons.answer(b'{}') + left)
    with daemons.scripted(path, behave) as requests, client_of(path) as client:
        for number in range(1, 4):
            assert client.status() == {}
            assert len(requests) == number
            # A closed connection becomes readable.
            repositories.eventually(lambda: not client._kept[0].usable())


def test_after_a_fork_no_connection_is_shared(path):
    def behave(connection, request):
        while True:
            connection.sendall(daemons.answer(b'{}'))
            if not connection.recv(65536):
                return

    with daemons.scripted(path, behave) as requests, client_of(path) as client:
        client.status()
        kept = client._kept[0]._socket.fileno()

        def child():
            assert not client._kept
            with pytest.raises(OSError):
                os.fstat(kept)
            client.status()
            return True

        assert repositories.in_child(child)
        client.status()
        assert len(requests) == 2


def test_a_forked_child_holds_no_stream_open(path):
    """The server notices that the parent hung up, although a child lives."""
    gone = threading.Event()

    def behave(connection, request):
        connection.sendall(daemons.answer(bytes(10), Content_Length=100))
        connection.recv(1)
        gone.set()

    with daemons.scripted(path, behave), client_of(path) as client:
        stream = client.open_image('one')
        reading, writing = os.pipe()

        def wait():
            os.read(reading, 1)

        child = repositories.fork_child(wait)
        try:
            stream.close()
            assert gone.wait(20)
        finally:
            os.write(writing, b'x')
            repositories.wait_for_child(child)


@pytest.mark.parametrize('status, body, words', [
    (404, b'{"error": {"code": 404, "title": "x", "message": "gone away"}}',
     'gone away'),
    (500, b'{"error": {"message": ["not", "text"]}}', 'status 500'),
    (500, b'[' * 60000, 'status 500'),
    (503, b'not json', 'status 503'),
    (403, b'', 'status 403'),
    (301, b'', 'status 301'),
    (400, b'\xff' * 100000, 'status 400')])
def test_refusals(path, status, body, words):
    with daemons.scripted(path, sends(daemons.answer(body, status))):
        with pytest.raises(client_errors.Refused, match=words) as caught:
            client_of(path).status()
        assert caught.value.code == status
        assert str(path) in str(caught.value)


@pytest.mark.parametrize('answer, kind', [
    (b'', client_errors.DaemonUnavailable),
    (b'\xff\xfe garbage\r\n\r\n' * 100, client_errors.DaemonUnavailable),
    (b'HTTP/1.1 200', client_errors.BadAnswer),
    (b'HTTP/9 200 OK\r\n\r\n', client_errors.DaemonUnavailable),
    (b'HTTP/1.1 99999 OK\r\n\r\n', client_errors.DaemonUnavailable),
    (b'HTTP/1.1 200 ' + b'x' * 70000, client_errors.DaemonUnavailable),
    (b'HTTP/1.1 200 OK\r\nX: ' + b'x' * 70000,
     client_errors.DaemonUnavailable),
    (b'HTTP/1.1 200 OK\r\n' + b'X: y\r\n' * 1000,
     client_errors.DaemonUnavailable),
    (daemons.answer(b'{', Content_Length=2),
     client_errors.DaemonUnavailable),
    (daemons.answer(b'{}', Content_Length=None), client_errors.BadAnswer),
    (daemons.answer(b'{}', Content_Length=-5), client_errors.BadAnswer),
    (daemons.answer(b'{}', Content_Length='x'), client_errors.BadAnswer),
    (daemons.answer(b'{}', Content_Length=1 << 62), client_errors.BadAnswer),
    (daemons.answer(b'[]'), client_errors.BadAnswer),
    (daemons.answer(b'not json'), client_errors.BadAnswer),
    (daemons.answer(b'[' * 100000), client_errors.BadAnswer),
    (chunked(b'{}', end=b''), client_errors.DaemonUnavailable),
    (chunked(b'{}', end=b'nonsense\r\n'), client_errors.DaemonUnavailable),
    (chunked(b'{}', end=b'f' * 70000), client_errors.DaemonUnavailable)])
def test_bad_answers(path, answer, kind):
    with daemons.scripted(path, sends(answer)):
        with pytest.raises(kind, match=str(path)):
            client_of(path).status()


def test_an_answer_without_end_is_not_kept(path, monkeypatch):
    monkeypatch.setattr(daemon_connection, 'MAX_JSON', 1 << 16)

    def behave(connection, request):
        connection.sendall(chunked(b' ' * 1000, end=b''))
        while True:
            connection.sendall(b'3e8\r\n' + b' ' * 1000 + b'\r\n')

    with daemons.scripted(path, behave):
        with pytest.raises(client_errors.BadAnswer, match='too long'):
            client_of(path).status()


def hangs(connection, request):
    connection.recv(1)


def drips(connection, request):
    connection.sendall(b'HTTP/1.1 200 OK\r\n')
    for number in itertools.count():
        connection.sendall(b'X-%d: y\r\n' % number)
        time.sleep(0.05)


def drips_body(connection, request):
    connection.sendall(daemons.answer(Content_Length=1 << 20))
    while True:
        connection.sendall(b'x')
        time.sleep(0.05)


@pytest.mark.parametrize('behave', [hangs, drips, drips_body])
def test_every_wait_ends(path, behave):
    """A request times out even if each read of a slow answer is in time."""
    with daemons.scripted(path, behave):
        client = client_of(path, timeout=0.5)
        began = time.monotonic()
        with pytest.raises(client_errors.DaemonUnavailable, match='time'):
            client.status()
        assert time.monotonic() - began < 20


def test_interrupt(path):
    with daemons.scripted(path, hangs):
        client = client_of(path, timeout=100)
        outcome = []

        def ask():
            try:
                client.status()
            except client_errors.ClientError as e:
                outcome.append(e)

        thread = threading.Thread(target=ask)
        thread.start()
        repositories.eventually(lambda: client._busy)
        client.interrupt()
        thread.join(20)
        assert isinstance(outcome[0], client_errors.DaemonUnavailable)
        assert not client._busy


# -- images -------------------------------------------------------------------

def image(body, status=200, **headers):
    headers.setdefault('Dedup_Repository', 'r')
    return daemons.answer(body, status, **headers)


def test_an_image(path):
    with daemons.scripted(path, sends(image(b'0123456789'))) as requests:
        with client_of(path).open_image(
                'one', upload_id=UPLOAD, repository_id='r') as stream:
            assert stream.size == 10
            assert stream.read(4) == b'0123'
            assert stream.read(100) == b'456789'
            assert stream.read(1) == b''
    assert requests[0].startswith(
        b'GET /v1/images/one?upload=%b HTTP/1.1\r\n' % UPLOAD.encode())


def test_an_id_cannot_leave_its_place(path):
    with daemons.scripted(path, sends(image(b''))) as requests:
        client_of(path).open_image('a/../b?c#d\r\nX: y').close()
    assert requests[0].startswith(
        b'GET /v1/images/a%2F..%2Fb%3Fc%23d%0D%0AX%3A%20y HTTP/1.1\r\n')


def test_a_range(path):
    answer = image(b'2345', 206, Content_Range='bytes 2-5/10')
    with daemons.scripted(path, sends(answer)) as requests:
        with client_of(path).open_image('one', offset=2, length=4) as stream:
            assert stream.size == 10
            assert stream.read(100) == b'2345'
    assert b'\r\nRange: bytes=2-5\r\n' in requests[0]


@pytest.mark.parametrize('answer', [
    image(b'0123456789'),
    image(b'2345', 206),
    image(b'2345', 206, Content_Range='bytes 2-5/*'),
    image(b'2345', 206, Content_Range='bytes 2-5/5'),
    image(b'2345', 206, Content_Range='bytes 1-4/10'),
    image(b'2345', 206, Content_Range='bytes 2-6/10'),
    image(b'2345', 206, Content_Range='blocks 2-5/10'),
    image(b'23456', 206, Content_Range='bytes 2-5/10'),
    image(b'234', 206, Content_Range='bytes 2-4/10'),
    image(b'2345', 206, Content_Range='bytes 2-5/10', Content_Length=None,
          Transfer_Encoding='chunked'),
    image(b'2345', 206, Content_Range='bytes 2-5/10', Content_Length=None),
    image(b'2345', 206, Content_Range='bytes 2-5/10', Dedup_Repository='s'),
    image(b'2345', 206, Content_Range='bytes 2-5/10', Dedup_Repository=None)])
def test_not_the_range(path, answer):
    """An answer that is not the requested range is refused.

    It would give wrong bytes, or too few.
    """
    with daemons.scripted(path, sends(answer)):
        with pytest.raises(client_errors.BadAnswer, match=str(path)):
            client_of(path).open_image('one', offset=2, length=4,
                                       repository_id='r')


def test_an_image_is_cut_off(path):
    with daemons.scripted(path, sends(image(b'012', Content_Length=10))):
        with client_of(path).open_image('one') as stream:
            assert stream.read(2) == b'01'
            with pytest.raises(client_errors.DaemonUnavailable,
                               match='cut off'):
                stream.read(8)


# -- recipes ------------------------------------------------------------------

def header(block_size=4096, size=10000, zeros=0, extents=1,
           name=b'sha256', magic=b'GDWIRE\0\2', scope=bytes(16), cuts=(0, 0)):
    return struct.pack('<8sI4xQQQ16s16sII', magic, block_size, size, zeros,
                       extents, name, scope, *cuts)


def extent(offset, length, lengths):
    """Return an extent with blocks of these `lengths`; zeros have none."""
    return struct.pack('<QQI4x', offset, length, len(lengths)) + b''.join(
        bytes(32) + struct.pack('<I', n) for n in lengths)


GOOD = extent(0, 8192, [4096, 4096]) + extent(8192, 8192, []) + extent(
    16384, 100, [100])


def recipe(body, **headers):
    headers.setdefault('ETag', f'"{UPLOAD}"')
    return chunked(body, **headers)


def test_a_recipe(path):
    answer = recipe(header(size=16484, zeros=8192, extents=3,
                           scope=b's' * 16) + GOOD)
    with daemons.scripted(path, sends(answer)), client_of(path) as client:
        with client.recipe('one') as found:
            assert found.upload_id == UPLOAD
            assert found.header == wire.RecipeHeader(
                4096, 16484, 8192, 3, 'sha256', b's' * 16, 'fixed')
            assert [(e.offset, e.length, e.blocks, len(e.table))
                    for e in found] == [
                (0, 8192, 2, 72), (8192, 8192, 0, 0), (16384, 100, 1, 36)]


def test_a_recipe_of_blocks_of_many_lengths(path):
    body = (header(size=9000, zeros=1000, extents=3, cuts=(512, 1024))
            + extent(0, 4596, [500, 4096]) + extent(4596, 1000, [])
            + extent(5596, 3404, [1, 3000, 403]))
    with daemons.scripted(path, sends(recipe(body))), (
            client_of(path)) as client:
        with client.recipe('one') as found:
            assert found.header.chunking == 'content-defined 512 1024'
            assert [(e.offset, e.length, e.blocks) for e in found] == [
                (0, 4596, 2), (4596, 1000, 0), (5596, 3404, 3)]


def test_a_recipe_of_another_version(path):
    body = header(magic=b'GDWIRE\0\1')
    with daemons.scripted(path, sends(recipe(body))), (
            client_of(path)) as client:
        with pytest.raises(client_errors.BadAnswer, match='version 1'):
            client.recipe('one')


@pytest.mark.parametrize('body', [
    header(magic=b'GDWIRE\0\3'), header(magic=b'GDWIRD\0\2'),
    header(cuts=(63, 1024)), header(cuts=(1024, 1024)),
    header(cuts=(512, 4096)), header(cuts=(512, 0)), header(cuts=(0, 1024)),
    header(block_size=0), header(block_size=256), header(block_size=3000),
    header(block_size=1 << 31), header(size=1 << 63),
    header(size=10, zeros=11), header(size=10, extents=11),
    # The extents do not add up to the image.
    header(size=8192) + extent(0, 4096, [4096]),
    header(size=4096, extents=2) + 2 * extent(0, 4096, [4096]),
    header(size=8192) + extent(4096, 4096, [4096]),
    header(size=8192, extents=2) + extent(4096, 4096, [4096]) + extent(
        0, 4096, [4096]),
    header(size=4096) + extent(0, 8192, [4096, 4096]),
    header(size=4096) + extent(0, 0, []),
    header(size=4096) + extent(0, 1 << 63, []),
    header(size=4096) + extent(0, 4096, [4096]) + b'x',
    header(size=0, extents=0) + b'x',
    # The blocks do not add up to their extent.
    header(size=8192) + extent(0, 8192, [4096]),
    header(size=8192) + extent(0, 8192, [4096, 4096, 4096]),
    header(size=8192) + extent(0, 8192, [4096, 4095]),
    header(size=8192) + extent(0, 8192, [4096, 4097]),
    header(size=8192) + extent(0, 8192, [8192]),
    header(size=8192) + extent(0, 8192, [8192, 0]),
    header(size=8192) + extent(0, 8192, [4096, 0, 4096]),
    header(size=1) + extent(0, 1, [1, 0]),
    header(size=5000) + extent(0, 5000, [4096, 905]),
    header(size=5000) + extent(0, 5000, [4096, (1 << 32) - 3192]),
    header(size=1 << 40) + struct.pack('<QQI4x', 0, 1 << 40, 1 << 28)])
def test_bad_recipes(path, body):
    with daemons.scripted(path, sends(recipe(body))), (
            client_of(path)) as client:
        with pytest.raises(client_errors.BadAnswer, match=str(path)):
            with client.recipe('one') as found:
                list(found)


@pytest.mark.parametrize('answer, kind', [
    (recipe(header()[:20]), client_errors.DaemonUnavailable),
    (recipe(header(), end=b''), client_errors.DaemonUnavailable),
    (recipe(header() + extent(0, 10000, [4096, 4096, 1808])[:-1]),
     client_errors.DaemonUnavailable),
    (recipe(header(), ETag=None), client_errors.BadAnswer),
    (recipe(header(), ETag='"x"'), client_errors.BadAnswer)])
def test_recipes_that_are_cut_off(path, answer, kind):
    with daemons.scripted(path, sends(answer)), client_of(path) as client:
        with pytest.raises(kind):
            with client.recipe('one') as found:
                list(found)


# -- frames -------------------------------------------------------------------

def frame(plain, places, codec=NONE, stored=None, **changes):
    """Return a frame with a valid checksum, whatever else is changed."""
    if stored is None:
        stored = {
            NONE: lambda: plain,
            LZ4: lambda: lz4_block.compress(plain, store_size=False),
            ZSTD: lambda: zstandard.compress(plain)}.get(
                codec, lambda: plain)()
    fields = {'magic': b'GDFR', 'codec': codec, 'places': len(places),
              'plain_length': len(plain), 'stored_length': len(stored),
              **changes}
    head = struct.pack('<4sBBHII', fields['magic'], fields['codec'], 0,
                       fields['places'], fields['plain_length'],
                       fields['stored_length'])
    body = b''.join(struct.pack('<QII', *p) for p in places) + stored
    checksum = changes.get('checksum', xxhash.xxh3_64_intdigest(head + body))
    return head + struct.pack('<Q', checksum) + body


END = frame(b'', [])
RANGES = [(4096, 8192), (40960, 4096)]
TEXT = (b'some text that compresses ' * 600)[:8192]


@pytest.mark.parametrize('codec', [NONE, LZ4, ZSTD])
def test_frames(path, codec):
    body = (frame(TEXT, [(4096, 0, 8192)], codec)
            + frame(TEXT, [(40960, 4096, 4096)], codec) + END)
    with daemons.scripted(path, sends(chunked(body))) as requests, (
            client_of(path)) as client:
        found = list(client.blocks('one', UPLOAD, RANGES))
        assert [f.plain for f in found] == [TEXT, TEXT]
        assert [f.places for f in found] == [
            [(4096, 0, 8192)], [(40960, 4096, 4096)]]
        assert len(client._kept) == 1
        assert client.received > len(body)
    assert b'{"ranges":[[4096,8192],[40960,4096]]}' in requests[0]


BOMB = zstandard.compress(bytes(64 << 20))


@pytest.mark.parametrize('body', [
    frame(TEXT, [(4096, 0, 4096)], magic=b'GDFX'),
    frame(TEXT, [(4096, 0, 4096)], checksum=1),
    frame(TEXT, [(4096, 0, 4096)], codec=3),
    frame(TEXT, [(4096, 0, 4096)], codec=255),
    # Lengths
    frame(b'', [(4096, 0, 4096)]),
    frame(TEXT, [(4096, 0, 4096)], plain_length=8191),
    frame(TEXT, [(4096, 0, 4096)], plain_length=8193,
          stored_length=8192),
    frame(TEXT, [(4096, 0, 4096)], plain_length=(1 << 20) + 1),
    frame(TEXT, [(4096, 0, 4096)], stored_length=(1 << 32) - 1),
    frame(TEXT, [(4096, 0, 4096)], plain_length=0),
    frame(TEXT, []),
    # The stored bytes are no encoding of the plain bytes.
    frame(TEXT, [(4096, 0, 4096)], codec=LZ4, stored=b'\xff' * 100),
    frame(TEXT, [(4096, 0, 4096)], codec=ZSTD, stored=b'\xff' * 100),
    frame(TEXT, [(4096, 0, 4096)], codec=LZ4,
          stored=lz4_block.compress(TEXT[:100], store_size=False)),
    frame(TEXT, [(4096, 0, 4096)], codec=LZ4,
          stored=lz4_block.compress(2 * TEXT, store_size=False)),
    frame(TEXT, [(4096, 0, 4096)], codec=ZSTD,
          stored=zstandard.compress(TEXT[:100])),
    frame(TEXT, [(4096, 0, 4096)], codec=ZSTD, stored=BOMB),
    # Places
    frame(TEXT, [(4096, 0, 0)]),
    frame(TEXT, [(4096, 4096, 4097)]),
    frame(TEXT, [(4096, 8192, 1)]),
    frame(TEXT, [(4096, (1 << 32) - 1, (1 << 32) - 1)]),
    frame(TEXT, [(0, 0, 4096)]),
    frame(TEXT, [(4096, 0, 4096), (20480, 0, 4096)]),
    frame(TEXT, [(40960, 0, 8192)]),
    frame(TEXT, [((1 << 64) - 1, 0, 4096)]),
    # More blocks than the client requested
    frame(TEXT, [(4096, 0, 8192)]) * 2,
    frame(TEXT, [(4096, 0, 8192)]) + END + b'x'])
def test_bad_frames(path, body):
    with daemons.scripted(path, sends(chunked(body))), (
            client_of(path)) as client:
        with pytest.raises(client_errors.BadAnswer, match=str(path)):
            list(client.blocks('one', UPLOAD, RANGES))
        assert not client._kept


def test_a_zstd_bomb_is_not_unpacked(path, monkeypatch):
    """A frame with a false length is refused before anything is unpacked."""
    monkeypatch.setattr(
        zstandard, 'ZstdDecompressor',
        lambda: pytest.fail('it was unpacked'))
    body = frame(TEXT, [(4096, 0, 4096)], codec=ZSTD, stored=BOMB)
    with daemons.scripted(path, sends(chunked(body))):
        with pytest.raises(client_errors.BadAnswer, match='length'):
            list(client_of(path).blocks('one', UPLOAD, RANGES))


def test_frames_without_end(path):
    """Frames with one requested byte and 1 MiB of others are refused."""
    long = bytes(1 << 20)
    body = b''.join(frame(long, [(4096 + number, 0, 1)], LZ4)
                    for number in range(100))
    with daemons.scripted(path, sends(chunked(body))):
        with pytest.raises(client_errors.BadAnswer, match='explain'):
            list(client_of(path).blocks('one', UPLOAD, RANGES))


def test_a_zstd_frame_that_does_not_say_its_length(path):
    packer = zstandard.ZstdCompressor(write_content_size=False)
    long = packer.compress(bytes(64 << 20))
    for stored in (packer.compress(TEXT), long):
        behave = sends(chunked(frame(TEXT, [(4096, 0, 8192)], codec=ZSTD,
                                     stored=stored) + END))
        with daemons.scripted(path, behave):
            if stored is long:
                with pytest.raises(client_errors.BadAnswer):
                    list(client_of(path).blocks('one', UPLOAD, RANGES))
            else:
                found = list(client_of(path).blocks('one', UPLOAD, RANGES))
                assert found[0].plain == TEXT


@pytest.mark.parametrize('answer', [
    chunked(frame(TEXT, [(4096, 0, 8192)])),
    chunked(frame(TEXT, [(4096, 0, 8192)]), end=b''),
    chunked(frame(TEXT, [(4096, 0, 8192)])[:-1]),
    chunked(END[:-1]),
    chunked(END, end=b'')])
def test_frames_that_are_cut_off(path, answer):
    """An answer without its last frame counts as a failure."""
    with daemons.scripted(path, sends(answer)):
        with pytest.raises(client_errors.DaemonUnavailable):
            list(client_of(path).blocks('one', UPLOAD, RANGES))


LOAN = {'Dedup_Repository': 'ab' * 16, 'Dedup_Stored': '12288'}


def test_lent_blocks(path):
    body = frame(TEXT, [(4096, 0, 8192)]) + END
    with daemons.scripted(path, sends(chunked(body, **LOAN))) as requests, (
            client_of(path)) as client:
        with client.lent_blocks('a/b', RANGES, 'cd' * 16) as loan:
            assert loan.repository_id == 'ab' * 16 and loan.stored == 12288
            assert [f.plain for f in loan] == [TEXT]
        assert len(client._kept) == 1
    assert b'/v1/cached/a%2Fb/blocks HTTP' in requests[0]
    assert b'\r\nDedup-Repository: ' + b'cd' * 16 + b'\r\n' in requests[0]
    assert b'{"ranges":[[4096,8192],[40960,4096]]}' in requests[0]


@pytest.mark.parametrize('changed', [
    {'Dedup_Repository': None}, {'Dedup_Repository': 'me'},
    {'Dedup_Stored': None}, {'Dedup_Stored': '-1'}, {'Dedup_Stored': '1' * 20},
    {'Dedup_Stored': 'all'}])
def test_a_lender_that_does_not_say_what_it_lends(path, changed):
    with daemons.scripted(path, sends(chunked(END, **{**LOAN, **changed}))), (
            client_of(path)) as client:
        with pytest.raises(client_errors.BadAnswer, match='what is lent'):
            client.lent_blocks('one', RANGES, 'cd' * 16)
        assert not client._kept


def test_a_refusal_names_the_repository(path):
    for header, found in (('ab' * 16, 'ab' * 16), ('me', ''), (None, '')):
        with daemons.scripted(path, sends(daemons.answer(
                b'', 404, Dedup_Repository=header))):
            with pytest.raises(client_errors.Refused) as refused:
                client_of(path).lent_blocks('one', [], 'cd' * 16)
            assert refused.value.repository_id == found


# -- tasks --------------------------------------------------------------------

def test_wait_for_a_task(path):
    """The client waits for its own request and ignores older results."""
    before = {'number': 6, 'result': {'a': 0}, 'error': None}
    after = {'number': 7, 'result': {'a': 1}, 'error': None}
    answers = iter([
        {'state': 'waiting', 'finished': 6, 'last': before},
        {'state': 'running', 'finished': 6, 'last': before, 'done': 1,
         'total': 2, 'what': 'x'},
        {'state': 'running', 'finished': 6, 'last': before, 'done': -1,
         'total': 'y', 'what': None},
        {'state': 'idle', 'finished': 7, 'last': after}])
    asked = []

    def task(name, number, wait):
        asked.append((name, number))
        return next(answers)

    client = client_of(path)
    client.task = task
    seen = []
    assert client.wait('collect', 7, lambda *words: seen.append(words)) == (
        after)
    assert seen == [(1, 2, 'x'), (0, 0, 'None')]
    assert set(asked) == {('collect', 7)}
