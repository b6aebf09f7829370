# SPDX-License-Identifier: Apache-2.0
"""No two tests get one port, and no connection gets a test's port."""

import concurrent.futures
import socket

import pytest

from tests.support import ports


@pytest.fixture
def first(tmp_path, monkeypatch):
    """The lowest of ten ports that no other test gets."""
    monkeypatch.setattr(ports, '_FIRST', 19000)
    monkeypatch.setattr(ports, '_EPHEMERAL', tmp_path / 'range')
    ports._EPHEMERAL.write_text('19010\t60999\n')
    return 19000


def test_different_ports_at_the_same_time(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ports.free_port, [tmp_path / 'last'] * 200))
    assert len(set(found)) == 200
    end = int(ports._EPHEMERAL.read_text().split()[0])
    assert all(20000 <= port < end for port in found)


def test_each_comes_again_after_all_others(first, tmp_path):
    free = [port for port in range(first, first + 10)
            if ports._is_free(port)]
    assert len(free) > 1
    found = [ports.free_port(tmp_path / 'last') for _ in range(2 * len(free))]
    assert sorted(found[:len(free)]) == free
    assert found[len(free):] == found[:len(free)]


@pytest.mark.parametrize('address', ['127.0.0.1', '127.0.0.9', '0.0.0.0'])
def test_a_port_with_a_server_is_left_out(first, tmp_path, address):
    taken = ports.free_port(tmp_path / 'last')
    with socket.create_server((address, taken)):
        for _ in range(10):
            assert ports.free_port(tmp_path / 'last') != taken


def test_no_port_is_free(first, tmp_path, monkeypatch):
    monkeypatch.setattr(ports, '_is_free', lambda port: False)
    with pytest.raises(OSError, match='no port from 19000 to 19009 is free'):
        ports.free_port(tmp_path / 'last')


def test_the_system_gives_low_ports_to_connections(first, tmp_path):
    ports._EPHEMERAL.write_text('1024 65535\n')
    with pytest.raises(AssertionError, match='set net.ipv4.ip_local_port_ran'):
        ports.free_port(tmp_path / 'last')
