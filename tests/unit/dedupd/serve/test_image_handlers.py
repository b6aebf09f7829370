# SPDX-License-Identifier: Apache-2.0

"""Ranges, lots and tokens that the functional tests cannot observe."""

import asyncio
import contextlib
import hashlib
import http.server
import json
import random
import threading

from hypothesis import given
from hypothesis import strategies
import pytest

from dedupd.http import glance_tokens
from dedupd.http import messages
from dedupd.serve import image_handlers
from glance_dedup.base import hashes
from glance_dedup.base import thread_pool
from glance_dedup.client import wire
from tests.support import repositories


@given(strategies.lists(strategies.tuples(
    strategies.integers(1, 30), strategies.integers(0, 9)), max_size=20),
    strategies.integers(0, 800))
def test_what_is_left_of_ranges(lengths, end):
    ranges, at = [], 0
    for length, gap in lengths:
        ranges.append((at, length))
        at += length + gap
    rest = wire.rest_of(ranges, end)
    assert all(length > 0 for _, length in rest)
    assert bytes_of(rest) == [at for at in bytes_of(ranges) if at >= end]


def bytes_of(ranges):
    return [at for offset, length in ranges
            for at in range(offset, offset + length)]


class Coming:
    """A reading that is complete once this many bytes were read."""

    def __init__(self, data, whole_at):
        self.data, self.whole_at = data, whole_at
        self.size = len(data)
        self.here = False

    def available(self, offset):
        return self.size - offset

    def readinto(self, view, offset):
        view[:] = self.data[offset:offset + len(view)]
        self.here = self.here or offset + len(view) > self.whole_at
        return len(view)

    def on_more(self, callback):
        pass

    def close(self):
        pass


@pytest.mark.parametrize('pours', [False, True])
@pytest.mark.parametrize('begin', [0, 777])
@pytest.mark.parametrize('proven,whole_at', [
    (False, 1 << 30), (False, 2 << 20), (False, 0), (True, 1 << 30)])
def test_what_was_sent_can_be_proven(pours, begin, proven, whole_at):
    """The digest covers all sent bytes as long as these need a proof."""
    data = repositories.noise((5 << 20) + 3, 1)
    image, chance = Coming(data, whole_at), random.Random(2)
    course = image_handlers.Course(image, begin, len(data), proven=proven)
    sent = bytearray()

    def pour(view):
        part = view[:chance.choice((0, 1, 4096, len(view), len(view)))]
        sent.extend(part)
        return len(part)

    async def run():
        pieces = image_handlers.Reads(None,
                                      thread_pool.Workers('read',
                                                          4)).pieces(course)
        send = None
        with contextlib.suppress(StopAsyncIteration):
            while True:
                piece = await pieces.asend(send)
                sent.extend(piece)
                send = pour if pours else None

    asyncio.run(run())
    assert sent == data[begin:] and course.handed == len(data)
    assert course.proven == (proven or image.here)
    if not course.proven:
        assert course.digest == hashlib.sha256(sent).digest()
    if proven or not whole_at:
        assert course.digest == hashlib.sha256().digest()


class Glance:
    def __init__(self):
        self.status = 206
        self.asked = 0
        self.record = json.dumps({
            'os_hash_algo': 'sha512', 'os_hash_value': 'ab' * 64}).encode()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if not self.path.endswith('/file'):
                    self.send_response(200)
                    self.send_header('Content-Length', str(len(outer.record)))
                    self.end_headers()
                    self.wfile.write(outer.record)
                    return
                outer.asked += 1
                self.send_response(outer.status)
                self.send_header('Content-Length', str(1 << 40))
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(('127.0.0.1', 0),
                                                      Handler)
        self.url = f'http://127.0.0.1:{self.server.server_port}/image/'
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def glance():
    found = Glance()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_a_yes_is_remembered_for_a_while(glance, monkeypatch):
    async def run():
        checker = glance_tokens.Tokens(glance.url)
        # Calls at the same time cause one request.
        await asyncio.gather(*(checker.check('t', 'a') for _ in range(20)))
        await checker.check('t', 'a')
        assert glance.asked == 1
        await checker.check('t', 'b')
        await checker.check('u', 'a')
        # The parts of the key cannot be confused.
        await checker.check('ta', '')
        assert glance.asked == 4
        glance.status = 403
        with pytest.raises(messages.HTTPError) as caught:
            await checker.check('v', 'a')
        assert caught.value.status == 403
        await checker.check('t', 'a')
        later = glance_tokens.time.monotonic() + glance_tokens.REMEMBERED + 1
        monkeypatch.setattr(glance_tokens.time, 'monotonic', lambda: later)
        with pytest.raises(messages.HTTPError):
            await checker.check('t', 'a')

    asyncio.run(run())


def test_no_more_than_so_many_are_remembered(glance, monkeypatch):
    monkeypatch.setattr(glance_tokens, 'MAX_COUNT', 3)

    async def run():
        checker = glance_tokens.Tokens(glance.url)
        for number in range(6):
            await checker.check(str(number), 'a')
        assert len(checker._allowed) == 3
        await checker.check('0', 'a')
        assert glance.asked == 7

    asyncio.run(run())


def test_no_more_than_so_many_are_asked(glance, monkeypatch):
    """The number of requests at once is limited.

    Otherwise a client could fill the memory with false tokens.
    """
    monkeypatch.setattr(glance_tokens, 'MAX_REQUESTS', 3)

    async def run():
        checker = glance_tokens.Tokens(glance.url)
        found = await asyncio.gather(
            *(checker.check(str(number), 'a') for number in range(6)),
            return_exceptions=True)
        assert [getattr(e, 'status', None) for e in found] == (
            [None] * 3 + [503] * 3)
        await checker.check('5', 'a')

    asyncio.run(run())


@pytest.mark.parametrize('status,wanted', [
    (401, 401), (403, 403), (404, 404), (204, 503), (302, 503), (500, 503),
    (413, 503)])
def test_what_is_not_a_yes(glance, status, wanted):
    async def run():
        checker = glance_tokens.Tokens(glance.url)
        glance.status = status
        with pytest.raises(messages.HTTPError) as caught:
            await checker.check('t', 'a')
        assert caught.value.status == wanted
        assert not checker._allowed

    asyncio.run(run())


@pytest.mark.parametrize('record,found', [
    ({'os_hash_algo': 'SHA512', 'os_hash_value': 'AB' * 64},
     hashes.Hash('sha512', 'ab' * 64)),
    # an old image
    ({'checksum': 'c' * 32}, hashes.Hash('md5', 'c' * 32)),
    ({'os_hash_algo': 'sha512', 'os_hash_value': None, 'checksum': 'c' * 32},
     hashes.Hash('md5', 'c' * 32)),
    # The better hash is there but unknown, so the other one is not used.
    ({'os_hash_algo': 'new', 'os_hash_value': 'a', 'checksum': 'c' * 32},
     None),
    ({'os_hash_algo': 'shake_128', 'os_hash_value': 'aa'}, None),
    ({'os_hash_algo': 5, 'os_hash_value': ['a']}, None),
    ({'os_hash_algo': 'sha512', 'os_hash_value': 'x' * 128}, None),
    ({}, None)])
def test_what_glance_says_of_an_image(glance, record, found):
    async def run():
        glance.record = json.dumps(record).encode()
        assert await glance_tokens.Tokens(glance.url).check('t', 'a') == found

    asyncio.run(run())


@pytest.mark.parametrize('record', [
    b'', b'[]', b'{"checksum": ', b'[' * 100000, b' ' * (1 << 20) + b'{}'])
def test_a_record_that_is_none(glance, record):
    async def run():
        glance.record = record
        checker = glance_tokens.Tokens(glance.url)
        with pytest.raises(messages.HTTPError) as caught:
            await checker.check('t', 'a')
        assert caught.value.status == 503
        assert not checker._allowed

    asyncio.run(run())
