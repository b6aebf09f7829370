# SPDX-License-Identifier: Apache-2.0

"""The HTTP server's parts, in the test's own event loop."""

import asyncio
import contextlib
import errno
import functools
import os
import socket
import subprocess
import sys
import types

import h11
import pytest

from dedupd.http import body_memory
from dedupd.http import http_server
from dedupd.http import listeners
from dedupd.http import messages
from dedupd.http import routing
from dedupd.http import streams
from tests.support import daemons


def limits(**changed):
    return types.SimpleNamespace(**{
        'max_connections': 1000, 'max_peer_connections': 1000,
        'max_body_memory_mib': 8, 'header_timeout': 10, 'idle_timeout': 10,
        'write_timeout': 10, **changed})


@contextlib.asynccontextmanager
async def serving(path, router, **changed):
    """Run a server on a Unix socket."""
    server = http_server.Server(limits(**changed))
    server.add(listeners.Listener(
        'unix', listeners.listen_unix(str(path), 0o600), router,
        allowed=lambda uid: True))
    try:
        yield server
    finally:
        await server.stop(0)


@contextlib.contextmanager
def no_patience(server):
    """Have requests without memory refused soon.

    The same option limits the time for the head of a request. That time must
    not be short, since the machine may be busy.
    """
    usual = server.shared.bodies._limits
    server.shared.bodies._limits = limits(header_timeout=0.3)
    try:
        yield
    finally:
        server.shared.bodies._limits = usual


# -- turns --------------------------------------------------------------------

def test_connections_that_wait_let_others_go_on(tmp_path):
    """The server accepts one connection in each turn of the event loop."""
    async def check():
        async with serving(tmp_path / 'socket',
                           routing.Router()) as server:
            with contextlib.ExitStack() as stack:
                for _ in range(200):
                    sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                    sock.connect(str(tmp_path / 'socket'))
                steps = []
                while server.connections < 200:
                    before = server.connections
                    await asyncio.sleep(0)
                    steps.append(server.connections - before)
        assert max(steps) == 1

    asyncio.run(asyncio.wait_for(check(), 60))


def test_stopping_while_a_connection_comes(tmp_path):
    """A stop causes no error if a connection waits but is not accepted yet."""
    errors = []

    async def check():
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: errors.append(context['message']))
        async with serving(tmp_path / 'socket', routing.Router()):
            await asyncio.sleep(0)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(tmp_path / 'socket'))
                await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(check(), 60))
    assert errors == []


@pytest.mark.parametrize('number', [errno.EMFILE, errno.ECONNABORTED])
def test_an_error_of_accept_ends_no_listener(tmp_path, number):
    """After an error, the listener pauses and then accepts the connection."""
    class Failing(socket.socket):
        left = 2

        def accept(self):
            if self.left:
                self.left -= 1
                raise OSError(number, os.strerror(number))
            return super().accept()

    async def check():
        async with serving(tmp_path / 'socket', routing.Router()) as server:
            listener, = server._listeners
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(tmp_path / 'socket'))
                while not server.connections:
                    await asyncio.sleep(0.01)
        assert listener.sock.left == 0

    def failing(*args):
        return Failing(fileno=listen_unix(*args).detach())

    listen_unix = listeners.listen_unix
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listeners, 'listen_unix', failing)
        asyncio.run(asyncio.wait_for(check(), 60))


# -- memory -------------------------------------------------------------------

MIB = 1 << 20


class TestBodies:
    """The memory that the bodies of all requests share."""

    @staticmethod
    def run(check, **changed):
        async def bounded():
            options = limits(**changed)
            await asyncio.wait_for(check(body_memory.Bodies(options), options),
                                   60)

        asyncio.run(bounded())

    @staticmethod
    async def begin(bodies, size):
        """Hold memory in a task; return the task and its two events."""
        over = asyncio.Event()

        async def hold():
            async with bodies.hold(size):
                holding.set()
                await over.wait()

        holding = asyncio.Event()
        task = asyncio.create_task(hold())
        for _ in range(5):
            await asyncio.sleep(0)
        return task, over, holding

    def test_they_have_so_much_and_no_more(self):
        async def check(bodies, options):
            first, over, holding = await self.begin(bodies, 8 * MIB)
            assert holding.is_set()
            second, _, waiting = await self.begin(bodies, MIB)
            assert not waiting.is_set()
            over.set()
            await waiting.wait()
            await first
            second.cancel()

        self.run(check)

    def test_small_ones_do_not_wait(self):
        async def check(bodies, options):
            await self.begin(bodies, 8 * MIB)
            for size in (0, 100, messages.HEADER_LIMIT):
                _, _, holding = await self.begin(bodies, size)
                assert holding.is_set()

        self.run(check)

    def test_whoever_came_first_goes_first(self):
        """A large request comes before later small ones."""
        async def check(bodies, options):
            _, over, _ = await self.begin(bodies, 5 * MIB)
            _, _, large = await self.begin(bodies, 4 * MIB)
            _, _, small = await self.begin(bodies, MIB)
            assert not large.is_set() and not small.is_set()
            over.set()
            await large.wait()
            await small.wait()

        self.run(check)

    def test_waiting_has_an_end(self):
        async def check(bodies, options):
            await self.begin(bodies, 8 * MIB)
            with pytest.raises(messages.HTTPError) as caught:
                async with bodies.hold(MIB):
                    pass
            assert caught.value.status == 503
            assert int(caught.value.headers['Retry-After'])

        self.run(check, header_timeout=0.05)

    def test_whoever_gives_up_holds_nothing(self):
        async def check(bodies, options):
            first, over, _ = await self.begin(bodies, 8 * MIB)
            gone, _, _ = await self.begin(bodies, 8 * MIB)
            late, _, _ = await self.begin(bodies, 8 * MIB)
            gone.cancel()
            over.set()
            await first         # this gives its memory to the third
            late.cancel()
            for task in (gone, late):
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            _, _, holding = await self.begin(bodies, 8 * MIB)
            assert holding.is_set()

        self.run(check)

    def test_clients_that_do_not_read(self, tmp_path):
        """Lists for slow clients share a bounded amount of memory."""
        router = routing.Router()
        made = []

        async def listed(request):
            made.append(request)
            return messages.Response(200, {}, bytes(3 * MIB))

        async def small(request):
            return messages.Response(200, {}, b'small')

        ask = functools.partial(ask_slowly, tmp_path / 'socket')

        async def check():
            async with serving(tmp_path / 'socket', router,
                               write_timeout=60) as server:
                with contextlib.ExitStack() as stack:
                    silent = [await ask(stack, '/list') for _ in range(2)]
                    for reader in silent:
                        assert (await reader.read(12)).endswith(b' 200')
                    with no_patience(server):
                        refused = await ask(stack, '/list')
                        assert (await refused.read(12)).endswith(b' 503')
                    assert len(made) == 2
                    fine = await ask(stack, '/small')
                    assert b'small' in await fine.read()
                    for reader in silent:
                        await reader.read()
                    again = await ask(stack, '/list')
                    assert (await again.read(12)).endswith(b' 200')

        router.add('GET', '/list', listed)
        router.add('GET', '/small', small)
        asyncio.run(asyncio.wait_for(check(), 60))

    @pytest.mark.parametrize('before', [False, True])
    def test_clients_that_do_not_read_at_once(self, tmp_path, before):
        """The bound holds for lists of unknown size, requested at once.

        :param before: whether a response of the same route was small before
        """
        router = routing.Router()
        begun, go_on = asyncio.Semaphore(0), asyncio.Event()

        async def listed(request):
            if 'small' in request.query:
                return messages.Response(200, {}, b'small')
            begun.release()
            await go_on.wait()
            return messages.Response(200, {}, bytes(3 * MIB))

        ask = functools.partial(ask_slowly, tmp_path / 'socket')

        async def check():
            async with serving(tmp_path / 'socket', router):
                with contextlib.ExitStack() as stack:
                    if before:
                        reader = await ask(stack, '/list?small=1')
                        assert b'small' in await reader.read()
                    silent = [await ask(stack, '/list') for _ in range(5)]
                    for _ in silent:
                        await begun.acquire()
                    go_on.set()
                    found = [await reader.readexactly(12) for reader in silent]
                    assert sorted(status[-4:] for status in found) == [
                        b' 200'] * 2 + [b' 503'] * 3

        router.add('GET', '/list', listed)
        asyncio.run(asyncio.wait_for(check(), 60))

    def test_the_option_may_change(self):
        async def check(bodies, options):
            await self.begin(bodies, MIB)
            options.max_body_memory_mib = 16
            _, over, holding = await self.begin(bodies, 15 * MIB)
            assert holding.is_set()
            options.max_body_memory_mib = 8
            _, _, waiting = await self.begin(bodies, MIB)
            assert not waiting.is_set()
            over.set()
            await waiting.wait()

        self.run(check)


async def ask_slowly(socket, stack, path):
    """Send a request and return a reader of its response."""
    reader, writer = await asyncio.open_unix_connection(str(socket), limit=1)
    stack.callback(writer.close)
    writer.write(f'GET {path} HTTP/1.1\r\nHost: localhost\r\n'
                 'Connection: close\r\n\r\n'.encode())
    return reader


async def exchange(path, data):
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(data)
    answer = await reader.read(12)
    writer.close()
    return int(answer.split()[1])


@pytest.mark.parametrize('framing', [
    {'Content_Length': 6 * MIB}, {'Transfer_Encoding': 'chunked'}])
def test_a_body_is_received_when_there_is_room(tmp_path, framing):
    """A body waits for memory by its length, or by the route's limit."""
    async def check():
        router = routing.Router()
        asked = []

        async def handler(request):
            asked.append(len(request.body))
            return messages.Response(200)

        router.add('POST', '/', handler, 6 * MIB)
        path = tmp_path / 'socket'
        async with serving(path, router) as server:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(path))
                # This request holds its memory and sends nothing.
                sock.sendall(daemons.raw('POST', '/', **framing))
                while not server.shared.bodies._held:
                    await asyncio.sleep(0.01)
                sizes = (1000, 4 * MIB)
                requests = [daemons.raw('POST', '/', bytes(size))
                            for size in sizes]
                assert await exchange(path, requests[0]) == 200
                with no_patience(server):
                    assert await exchange(path, requests[1]) == 503
            assert await exchange(path, requests[1]) == 200
        assert asked[0] == 1000 and asked[-1] == 4 * MIB

    asyncio.run(asyncio.wait_for(check(), 60))


# -- framing ------------------------------------------------------------------

def chunked(role, data, size):
    """Return the body that is received in pieces of this size."""
    parser = streams.Parser(role)
    if role is h11.CLIENT:
        parser.send(h11.Request(method='GET', target='/',
                                headers=[('Host', 'x')]))
        parser.send(h11.EndOfMessage())
        data = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n' + data
    else:
        data = daemons.raw('POST', '/', Transfer_Encoding='chunked') + data
    body = b''
    for at in range(0, len(data), size):
        parser.receive_data(data[at:at + size])
        while (event := parser.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.EndOfMessage):
                return body
            body += getattr(event, 'data', b'')
    parser.receive_data(b'')
    parser.next_event()


ROLES = pytest.mark.parametrize('role', [h11.SERVER, h11.CLIENT])


@ROLES
@pytest.mark.parametrize('size', [1, 2, 3, 1000])
def test_chunks(role, size):
    assert chunked(role, b'2\r\nab\r\n3;x=y\r\ncde\r\n0\r\n\r\n',
                   size) == b'abcde'


@ROLES
@pytest.mark.parametrize('size', [1, 2, 3, 1000])
@pytest.mark.parametrize('data', [
    b'2\r\nabXX0\r\n\r\n', b'2\r\nab\n\n0\r\n\r\n', b'2\r\nab\rX0\r\n\r\n',
    b'2\r\nabX\n0\r\n\r\n', b'2\r\nab\r\n2\r\ncd450\r\n\r\n', b'2\r\nab\r',
    b'2\r\nab', b'2\r\nab\r\n'])
def test_malformed_chunks(role, size, data):
    """A chunk with a wrong end is refused, with every version of h11."""
    with pytest.raises(h11.RemoteProtocolError) as caught:
        chunked(role, data, size)
    assert caught.value.error_status_hint == 400


def test_a_length_of_many_digits():
    """A length with more digits than Python converts is refused."""
    parser = streams.Parser(h11.SERVER)
    parser.receive_data(daemons.raw('POST', '/', Content_Length='1' * 9000))
    with pytest.raises(h11.RemoteProtocolError):
        parser.next_event()


@pytest.mark.slow
def test_with_the_oldest_h11(tmp_path):
    """The tests of chunks and lengths succeed with h11 0.14, as in Debian 12.

    That version accepts any bytes at the end of a chunk.
    """
    if subprocess.run(
            [sys.executable, '-m', 'pip', 'install', '-q', '--no-deps',
             '--disable-pip-version-check', '--target', str(tmp_path),
             'h11==0.14.0'], timeout=100).returncode:
        pytest.skip('h11 0.14 cannot be installed here')
    code = ('import h11, sys, pytest; assert h11.__version__ == "0.14.0"; '
            'sys.exit(pytest.main(sys.argv[1:]))')
    subprocess.run(
        [sys.executable, '-c', code, '-q', '-p', 'no:cacheprovider', __file__,
         '-k', 'chunks or digits'], check=True, timeout=100,
        cwd=daemons.ROOT, env={**os.environ, 'PYTHONPATH': str(tmp_path)})
