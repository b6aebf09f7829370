# SPDX-License-Identifier: Apache-2.0

"""The relay's check of whether the cache responds."""

import asyncio
import contextlib
import os
import socket

import pytest

from dedupd.compute.relay import liveness


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(liveness, 'LOOK_SECONDS', 0.01)
    monkeypatch.setattr(liveness, 'QUIET_SECONDS', 0.05)
    monkeypatch.setattr(liveness, 'ANSWER_SECONDS', 0.3)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / 'socket')


@contextlib.asynccontextmanager
async def looking(path):
    pulse = liveness.Pulse(path)
    task = asyncio.create_task(pulse.run())
    try:
        yield pulse
    finally:
        assert not task.done()
        task.cancel()


async def wait(pulse, seconds):
    """Return True if a wait of this many seconds is interrupted."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    try:
        async with asyncio.timeout(60) as timeout:
            with pulse.watch(timeout):
                await asyncio.sleep(seconds)
    except TimeoutError:
        assert loop.time() - begin < 50
        return True
    return False


@contextlib.asynccontextmanager
async def daemon(path):
    """Run a daemon that answers, and yield its list of requests."""
    asked = []

    async def answer(reader, writer):
        asked.append(await reader.readuntil(b'\r\n\r\n'))
        writer.write(b'HTTP/1.1 503 Busy\r\n\r\n')
        writer.close()

    async with await asyncio.start_unix_server(answer, path):
        yield asked


def test_a_cache_that_answers_is_waited_for(path, monkeypatch):
    """The relay waits for a cache that answers, even with an error.

    It sends a check only after a silence.
    """
    monkeypatch.setattr(liveness, 'ANSWER_SECONDS', 60)

    async def scenario():
        async with daemon(path) as asked, looking(path) as pulse:
            with monkeypatch.context() as patch:
                patch.setattr(liveness, 'QUIET_SECONDS', 60)
                assert not await wait(pulse, 0.3)
                assert not asked
            assert not await wait(pulse, 1)
            assert asked and asked[0].startswith(b'GET /healthcheck HTTP/1.1')
            assert not pulse.is_away()

    asyncio.run(scenario())


@pytest.mark.parametrize('backlog', [64, 0])
def test_a_cache_that_hangs(path, backlog, monkeypatch):
    """Waits for a hung cache end, and the relay avoids it until it answers."""
    async def scenario():
        async with looking(path) as pulse:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(path)
                sock.listen(backlog)
                with contextlib.ExitStack() as stack:
                    if not backlog:
                        # Other clients fill the cache's queue.
                        with contextlib.suppress(BlockingIOError):
                            while True:
                                other = stack.enter_context(
                                    socket.socket(socket.AF_UNIX))
                                other.setblocking(False)
                                other.connect(path)
                    ended = await asyncio.gather(*(
                        wait(pulse, 30) for _ in range(3)))
                    assert ended == [True] * 3
                    assert pulse.is_away()
                    await asyncio.sleep(0.5)
                    assert pulse.is_away()
            os.unlink(path)
            monkeypatch.setattr(liveness, 'ANSWER_SECONDS', 60)
            async with daemon(path):
                async with asyncio.timeout(30):
                    while pulse.is_away():
                        await asyncio.sleep(0.01)
                assert not await wait(pulse, 0.3)

    asyncio.run(scenario())


@pytest.mark.parametrize('there', [True, False])
def test_a_daemon_that_is_not_there_is_no_hung_one(path, there):
    """A daemon that does not listen does not count as hung."""
    async def scenario():
        if there:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(path)     # nobody listens
        async with looking(path) as pulse:
            assert not await wait(pulse, 0.5)
            assert not pulse.is_away()

    asyncio.run(scenario())


def test_a_cache_that_was_missed_is_left_alone_for_a_while(path, monkeypatch):
    monkeypatch.setattr(liveness, 'AWAY_SECONDS', 0.2)

    async def scenario():
        pulse = liveness.Pulse(path)
        assert not pulse.is_away()
        pulse.missed(OSError('refused'))
        assert pulse.is_away()
        async with asyncio.timeout(30):
            while pulse.is_away():
                await asyncio.sleep(0.01)
        pulse.answered()
        assert not pulse.is_away()

    asyncio.run(scenario())
