# SPDX-License-Identifier: Apache-2.0

"""Limits of the rate of a volume's server, by nbdkit's filter."""

import contextlib
import threading
import time

import pytest

from tests.support import nbd
from tests.support import repositories
from tests.support import volume_tools

pytestmark = pytest.mark.needs('nbdkit')

MIB = 1 << 20
SIZE = 64 * MIB
#: The largest request.
BURST = 32 * MIB


@pytest.fixture
def server(tmp_path):
    path = volume_tools.create_repository(tmp_path / 'repository')
    volume_tools.create(path, 'disk', SIZE, part_size=16 * MIB)
    with volume_tools.Server(path, tmp_path) as found:
        yield found


def seconds_for(action):
    began = time.monotonic()
    action()
    return time.monotonic() - began


def test_reads_and_writes_are_limited(server):
    """The limit holds for the sum of all clients, in each direction."""
    server.start('--max-rate', '8M')

    def read():
        for session in sessions:
            session.read(0, BURST)

    def write():
        data = repositories.noise(4 * MIB, 1)
        for offset in range(0, BURST + 16 * MIB, len(data)):
            volume_tools.write(sessions[0], offset, data)

    with server.session() as one, server.session() as two:
        sessions = one, two
        assert seconds_for(read) > 3.9
        assert seconds_for(write) > 1.9


def test_a_larger_burst(server):
    server.start('--max-rate', '1M', '--burst', '64M')
    with server.session() as session:
        # Without the option the second read would take 32 seconds.
        session.read(0, BURST)
        assert seconds_for(lambda: session.read(0, BURST)) < 30


def test_the_end_does_not_wait_for_the_limit(server):
    """A request that waits is not answered: its client sends it again."""
    server.start('--max-rate', '1M')
    with server.session() as session:
        volume_tools.write(session, 0, b'before', volume_tools.FUA)
        session.read(0, BURST)
        answers = []

        def read():
            with contextlib.suppress(ConnectionError, EOFError,
                                     AssertionError):
                answers.append(session.read(0, BURST))

        reader = threading.Thread(target=read)
        reader.start()
        reader.join(1)
        assert reader.is_alive()
        assert seconds_for(server.stop) < 25
        reader.join(nbd.LIMIT)
        assert not reader.is_alive() and not answers
    server.start()
    with server.session() as session:
        assert session.read(0, 6) == b'before'
