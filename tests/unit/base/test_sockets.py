# SPDX-License-Identifier: Apache-2.0

"""Connections to Unix sockets with a full queue or without a server."""

import contextlib
import os
import socket
import threading
import time

import pytest

from glance_dedup.base import sockets


@pytest.fixture
def path(tmp_path):
    # An address holds 107 bytes, and temporary paths may be longer.
    directory = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield f'/proc/self/fd/{directory}/socket'
    os.close(directory)


@pytest.fixture
def full(path):
    """A server that accepts nothing, with a full queue of connections."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(path)
        server.listen(1)
        with contextlib.suppress(BlockingIOError):
            for _ in range(100):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.setblocking(False)
                sock.connect(path)
        yield server


def test_waits_while_the_queue_is_full(full, path):
    def serve():
        time.sleep(0.2)
        for _ in range(3):
            full.accept()[0].close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with sockets.connect_unix(path, 60) as sock:
            assert sock.gettimeout() == 60
    finally:
        thread.join()


def test_does_not_wait_longer_than_its_limit(full, path):
    with pytest.raises(TimeoutError, match='0.1 seconds'):
        sockets.connect_unix(path, 0.1)


def test_full_queue_is_served(full, path):
    assert sockets.is_served(path)


@pytest.mark.parametrize('left', [False, True])
def test_nobody_serves(path, left):
    if left:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
    assert not sockets.is_served(path)
    with pytest.raises(OSError):
        sockets.connect_unix(path, 1)


def test_another_kind_of_socket(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        with pytest.raises(OSError):
            sockets.is_served(path)
